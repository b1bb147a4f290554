"""paho-mqtt (PyPI), with its network thread."""

from __future__ import annotations

import queue
import threading
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.scenarios.clients.base import LASTING, PATIENCE, Details, RealClient, Received, Will, cut


def to_properties(details: Details | None) -> Properties | None:
    """The properties of a PUBLISH."""
    if details is None:
        return None
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType = details.content_type
    properties.ResponseTopic = details.response_topic
    properties.CorrelationData = details.correlation_data
    properties.UserProperty = list(details.user)
    return properties


def to_details(properties: Any) -> Details | None:
    """What a received message has of them."""
    if properties is None or properties.isEmpty():
        return None
    return Details(
        content_type=getattr(properties, "ContentType", ""),
        response_topic=getattr(properties, "ResponseTopic", ""),
        correlation_data=getattr(properties, "CorrelationData", b""),
        user=tuple(getattr(properties, "UserProperty", ())),
    )


def lasting_properties() -> Properties:
    """The properties of a CONNECT whose session outlives the connection."""
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = LASTING
    return properties


class PahoClient(RealClient):
    name = "paho"
    client: paho.Client | None = None

    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        v5 = self.version == 5
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=None if v5 else clean,
            protocol=paho.MQTTv5 if v5 else paho.MQTTv311,
            transport="websockets" if self.transport == "ws" else "tcp",
            reconnect_on_failure=False,
        )
        client.connect_timeout = PATIENCE
        if self.transport == "ws":
            client.ws_set_options(path="/mqtt")
        if will is not None:
            client.will_set(will.topic, will.payload, will.qos)
        answers: queue.Queue[Any] = queue.Queue()
        self.granted: queue.Queue[Any] = queue.Queue()
        client.on_connect = lambda _client, _data, _flags, reason, _properties: answers.put(reason)
        client.on_subscribe = lambda _client, _data, _mid, codes, _properties: self.granted.put(codes)
        client.on_message = self._on_message
        if v5:
            properties = None if clean else lasting_properties()
            client.connect(self.address.host, self.address.port, clean_start=clean, properties=properties)
        else:
            client.connect(self.address.host, self.address.port)
        self.client = client
        client.loop_start()
        reason = answers.get(timeout=PATIENCE)
        assert not reason.is_failure, reason

    def _on_message(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        details = to_details(getattr(message, "properties", None))
        self.inbox.put(Received(message.topic, bytes(message.payload), message.qos, bool(message.retain), details))

    def subscribe(self, topic_filter: str, qos: int) -> None:
        assert self.client is not None
        self.client.subscribe(topic_filter, qos)
        (code,) = self.granted.get(timeout=PATIENCE)
        assert qos == code.value

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        assert self.client is not None
        sent = self.client.publish(topic, payload, qos, retain, to_properties(details))
        sent.wait_for_publish(PATIENCE)
        assert sent.is_published()

    def disconnect(self) -> None:
        assert self.client is not None
        gone = threading.Event()
        self.client.on_disconnect = lambda *_: gone.set()
        self.client.disconnect()
        assert gone.wait(PATIENCE)
        self.client.loop_stop()
        self.client = None

    def drop(self) -> None:
        assert self.client is not None
        gone = threading.Event()
        self.client.on_disconnect = lambda *_: gone.set()
        held = self.client.socket()
        assert held is not None
        cut(held.fileno())
        assert gone.wait(PATIENCE)
        self.client.loop_stop()
        self.client = None

    def close(self) -> None:
        if self.client is not None:
            self.client.disconnect()
            self.client.loop_stop()
            self.client = None
