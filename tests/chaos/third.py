"""paho-mqtt as publisher and subscriber: a client that is not ours, with the habits of clients in the field.

It publishes at QoS 1 only, one message at a time: what it does to QoS 2 when connections end early is told in
`client.py`, and with more than one message in flight it may send new ones before old ones after a reconnect. As a
receiver it takes part at QoS 1 and QoS 2.

Rule 1: callbacks run in paho's thread; they append to the history and set events, nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.chaos.judge import Delivery, History, Publication, Receiver, Window
from tests.chaos.messages import read_payload
from tests.support.wire import Address

#: Seconds between two attempts to connect, and until a thread has ended.
RETRY = 0.05
PATIENCE = 20.0


class PahoClient:
    """What publisher and subscriber have in common: a durable session, and an eye on "session present"."""

    def __init__(
        self, name: str, address: Address | Callable[[], Address], history: History, version: int, keepalive: int = 60
    ) -> None:
        self.name = name
        self._place = address
        self.history = history
        self.connected = threading.Event()
        self.connections = 0
        self.place = ""  #: where the present or last connection leads
        self._leaving = False
        self._connect: dict[str, Any] = {"keepalive": keepalive}
        if version == 5:
            self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
            properties = Properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = 86400
            self._connect |= {"clean_start": False, "properties": properties}
        else:
            self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, clean_session=False)
        self.client.reconnect_delay_set(RETRY, RETRY)  # type: ignore[arg-type]  # annotated as int, used as seconds
        self.client.on_connect = self._on_connect
        self.client.on_disconnect = self._on_disconnect
        self.client.on_connect_fail = self._on_connect_fail

    def start(self) -> None:
        self._aim(at_once=True)
        self.client.loop_start()

    def _aim(self, *, at_once: bool = False) -> None:
        """Say where the next connection leads; paho takes the options of a connection for all that follow."""
        address = self._place() if callable(self._place) else self._place
        connect = self.client.connect if at_once else self.client.connect_async
        connect(host=address.host, port=address.port, **self._connect)
        self.place = str(address)

    def stop(self) -> None:
        self._leaving = True
        self.client.disconnect()
        self.client.loop_stop()

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            return
        if self.connections:
            self.history.reconnects += 1
            if not flags.session_present:
                self.history.forgotten(self.name, f"{self.name}, connection {self.connections + 1}")
        self.connections += 1
        self.resumed(forgotten=self.connections == 1 or not flags.session_present)
        self.connected.set()

    def _on_disconnect(self, client: paho.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.connected.clear()
        self._aim_elsewhere()

    def _on_connect_fail(self, client: paho.Client, userdata: Any) -> None:
        self._aim_elsewhere()

    def _aim_elsewhere(self) -> None:
        if callable(self._place) and not self._leaving:
            self._aim()

    def resumed(self, *, forgotten: bool) -> None:
        """Connected again; `forgotten`: the broker has no session."""


class PahoSubscriber(PahoClient):
    """Holds one subscription and writes down what comes."""

    def __init__(
        self,
        name: str,
        address: Address | Callable[[], Address],
        history: History,
        *,
        version: int,
        receiver: Receiver,
        pattern: str,
        qos: int,
        keepalive: int = 60,
    ) -> None:
        super().__init__(name, address, history, version, keepalive)
        self.receiver = receiver
        self.window = Window(pattern, qos, asked=history.clock())
        self.granted = threading.Event()
        receiver.windows.append(self.window)
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe

    def resumed(self, *, forgotten: bool) -> None:
        if forgotten and self.granted.is_set():
            again = self.history.subscribes_again(self.window)
            if again is not self.window:
                self.window = again
                self.granted.clear()
        if forgotten or not self.granted.is_set():
            self.client.subscribe(self.window.filter, self.window.qos)

    def _on_subscribe(self, client: paho.Client, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if not self.granted.is_set():
            self.window.granted = self.history.clock()
            self.granted.set()

    def _on_message(self, client: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        name = read_payload(bytes(message.payload))
        self.receiver.deliveries.append(
            Delivery(name, message.topic, message.qos, message.dup, self.connections, self.history.clock(), self.name)
        )


class PahoPublisher(PahoClient):
    """Publishes one message after the other at QoS 1, from a thread of its own, while it `may`."""

    def __init__(
        self,
        name: str,
        address: Address | Callable[[], Address],
        history: History,
        *,
        version: int,
        compose: Callable[[], tuple[Publication, bytes]],
        pause: Callable[[], float],
        may: Callable[[], bool] = lambda: True,
        keepalive: int = 60,
    ) -> None:
        super().__init__(name, address, history, version, keepalive)
        self.compose = compose
        self.pause = pause
        self.may = may
        self._current: Publication | None = None
        self._answered = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._publish, name=name, daemon=True)
        self.client.on_publish = self._on_publish

    def start(self) -> None:
        super().start()
        self._thread.start()

    def finish(self) -> None:
        """Publish nothing more."""
        self._ending.set()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._ending.set()
        self._answered.set()
        self._thread.join(PATIENCE)
        super().stop()

    def _publish(self) -> None:
        while not self._ending.wait(self.pause()):
            if not self.connected.wait(0.1) or not self.may():
                continue
            publication, payload = self.compose()
            self._answered.clear()
            self._current = publication
            publication.sent.append(self.history.clock())
            publication.through.append(self.place)
            self.history.publications[publication.name] = publication
            self.client.publish(publication.topic, payload, publication.qos)
            self._answered.wait()

    def resumed(self, *, forgotten: bool) -> None:
        # paho repeats by itself what was not acknowledged.
        current = self._current
        if current is not None and current.is_open:
            current.sent.append(self.history.clock())
            current.through.append(self.place)

    def _on_publish(self, client: paho.Client, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        publication = self._current
        assert publication is not None
        if reason.is_failure:
            publication.refused = reason.value
        else:
            publication.acknowledged = publication.completed = self.history.clock()
        self._answered.set()
