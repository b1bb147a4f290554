"""gmqtt (PyPI): an asyncio client with a codec of its own, TCP only."""

from __future__ import annotations

import asyncio
from typing import Any

import gmqtt
from gmqtt.mqtt.constants import MQTTv50, MQTTv311

from tests.scenarios.clients.base import LASTING, PATIENCE, Details, Listeners, Loop, RealClient, Received, Will, cut


def to_arguments(details: Details | None) -> dict[str, Any]:
    if details is None:
        return {}
    return {
        "content_type": details.content_type,
        "response_topic": details.response_topic,
        "correlation_data": details.correlation_data,
        "user_property": list(details.user),
    }


def to_details(properties: dict[str, Any]) -> Details | None:
    if not properties.keys() & {"content_type", "response_topic", "correlation_data", "user_property"}:
        return None
    data = properties.get("correlation_data", [b""])[0]
    return Details(
        content_type=properties.get("content_type", [""])[0],
        response_topic=properties.get("response_topic", [""])[0],
        correlation_data=data.encode() if isinstance(data, str) else data,
        user=tuple(properties.get("user_property", ())),
    )


class GmqttClient(RealClient):
    name = "gmqtt"
    transports = ("tcp",)
    client: gmqtt.Client | None = None

    def __init__(self, listeners: Listeners, transport: str, version: int) -> None:
        super().__init__(listeners, transport, version)
        self.loop = Loop()

    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        self.loop.run(self._connect(client_id, clean, will))

    async def _connect(self, client_id: str, clean: bool, will: Will | None) -> None:
        v5 = self.version == 5
        testament = None if will is None else gmqtt.Message(will.topic, will.payload, qos=will.qos)
        lasting = {"session_expiry_interval": LASTING} if v5 and not clean else {}
        client = gmqtt.Client(client_id, clean_session=clean, will_message=testament, **lasting)
        client.stop_reconnect()
        self.granted: asyncio.Queue[Any] = asyncio.Queue()
        self.gone = asyncio.Event()
        client.on_message = self._on_message
        client.on_subscribe = lambda _client, _mid, codes, _properties: self.granted.put_nowait(codes)
        client.on_disconnect = lambda *_: self.gone.set()
        await client.connect(self.address.host, self.address.port, version=MQTTv50 if v5 else MQTTv311)
        self.client = client

    def _on_message(self, _client: Any, topic: str, payload: bytes, qos: int, properties: dict[str, Any]) -> int:
        self.inbox.put(Received(topic, payload, qos, bool(properties["retain"]), to_details(properties)))
        return 0

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self.loop.run(self._subscribe(topic_filter, qos))

    async def _subscribe(self, topic_filter: str, qos: int) -> None:
        assert self.client is not None
        self.client.subscribe(topic_filter, qos)
        assert (qos,) == tuple(await self.granted.get())

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        self.loop.run(self._publish(gmqtt.Message(topic, payload, qos=qos, retain=retain, **to_arguments(details))))

    async def _publish(self, message: gmqtt.Message) -> None:
        assert self.client is not None
        self.client.publish(message)
        # gmqtt tells nobody about acknowledgements; what is unacknowledged stays in its storage.
        async with asyncio.timeout(PATIENCE):
            while message.qos and not self.client._persistent_storage.is_empty:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)

    def disconnect(self) -> None:
        self.loop.run(self._disconnect())

    async def _disconnect(self) -> None:
        assert self.client is not None
        await self.client.disconnect()
        self.client = None

    def drop(self) -> None:
        self.loop.run(self._drop())

    async def _drop(self) -> None:
        assert self.client is not None
        held = self.client._connection._transport.get_extra_info("socket")
        cut(held.fileno())
        await self.gone.wait()
        self.client = None

    def close(self) -> None:
        if self.client is not None:
            self.disconnect()
        self.loop.close()
