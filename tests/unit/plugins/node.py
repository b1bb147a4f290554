"""A broker in this process with one plugin, over a real store, on the event loop of the test.

    async with Node.on(store, **options) as node:         a `PluginNode` of the plugin
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=2)
        await pub.publish("q/a", b"1")                    QoS 1, until it is acknowledged
        (message,) = await car.take(1)
        car.ack(message)

`await node.kill()` is the end of the process, as far as the store can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any, ClassVar, Self

from motorcade.core.subscription import Subscription
from motorcade.extension.plugin import Loaded, Plugins
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Publish,
    Pubrec,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.storage.ports import Store
from tests.unit.broker.memory import MemoryNode, Peer

PATIENCE = 60.0  #: seconds until a test has waited in vain


async def until(condition: Callable[[], Any], what: str = "it") -> Any:
    """Wait for something that must come true."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.001)
    return found


class Hub:
    """The broker, with a clock that can be moved."""

    def __init__(self, node: MemoryNode) -> None:
        self._node = node
        self.ahead = 0.0

    def now(self) -> float:
        return time() + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node.broker, name)


class Client:
    """A client that was let in."""

    def __init__(self, broker: MemoryNode, client_id: str, version: int, **connect: Any) -> None:
        self.peer: Peer = broker.peer(version)
        self.packets: list[Packet] = []
        self._numbers = 0
        self.peer.send(Connect(client_id, version, **connect))

    def _pull(self) -> None:
        self.packets += self.peer.take()

    async def expect(self, kind: type[Packet]) -> Any:
        """The next packet of a kind."""

        def found() -> Packet | None:
            self._pull()
            return next((packet for packet in self.packets if isinstance(packet, kind)), None)

        packet = await until(found, kind.__name__)
        self.packets.remove(packet)
        return packet

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    async def subscribe(self, filter_: str, qos: int = 1) -> Suback:
        self.peer.send(Subscribe(self._next(), (Subscription(filter_, qos),)))
        answer: Suback = await self.expect(Suback)
        return answer

    async def unsubscribe(self, filter_: str) -> None:
        self.peer.send(Unsubscribe(self._next(), (filter_,)))
        await self.expect(Unsuback)

    def send(self, topic: str, payload: bytes, qos: int = 1, properties: Properties = NONE) -> int:
        number = self._next() if qos else 0
        self.peer.send(Publish(topic, payload, qos, packet_id=number, properties=properties))
        return number

    async def publish(self, topic: str, payload: bytes, qos: int = 1, properties: Properties = NONE) -> int:
        """Publish, and wait for the answer: 0, or the code of an error."""
        self.send(topic, payload, qos, properties)
        reason = int((await self.expect(Puback if qos == 1 else Pubrec)).reason) if qos else 0
        return reason if reason >= 0x80 else 0

    async def take(self, number: int) -> list[Publish]:
        """The next messages."""
        return [await self.expect(Publish) for _ in range(number)]

    def ack(self, *messages: Publish, reason: int = 0) -> None:
        for message in messages:
            self.peer.send(Puback(message.packet_id or 0, reason))  # type: ignore[arg-type]

    async def drain(self, number: int) -> list[bytes]:
        """Take and acknowledge so many; their payloads."""
        payloads = []
        for _ in range(number):
            (message,) = await self.take(1)
            self.ack(message)
            payloads.append(bytes(message.payload))
        return payloads

    async def quiet(self) -> list[Publish]:
        """Messages that have come, once nothing is under way for a moment."""
        for _ in range(30):
            await asyncio.sleep(0.002)
        self._pull()
        return [packet for packet in self.packets if isinstance(packet, Publish)]

    def close(self) -> None:
        self.peer.close()

    def disconnect(self) -> None:
        self.peer.send(Disconnect())


class PluginNode:
    """One process."""

    plugin_name: ClassVar[str]

    def __init__(self, store: Store, **limits: Any) -> None:
        self.store = store
        self.broker = MemoryNode(loop=asyncio.get_running_loop(), **limits)
        self.hub = Hub(self.broker)
        self.plugins = Plugins(self.hub, self.broker.hooks, Path("unused"), self.broker.plane.shared.sources)
        self.plugins.store = store
        self.loaded: Loaded

    @classmethod
    async def begin(cls, store: Store, **config: Any) -> Self:
        """Start a process; `stop` or `kill` ends it."""
        node = cls(store)
        node.loaded = await node.plugins.load(cls.plugin_name, config)
        return node

    @classmethod
    @asynccontextmanager
    async def on(cls, store: Store, **config: Any) -> AsyncIterator[Self]:
        node = await cls.begin(store, **config)
        try:
            yield node
        finally:
            await node.stop()

    async def stop(self) -> None:
        await self.plugins.unload_all()
        self.check()

    def check(self) -> None:
        """Nothing has raised where nobody sees it."""
        assert 0 == self.counters["task_failed"]
        assert 0 == sum(callback.errors for callback in self.broker.hooks.lookup("message.publish"))
        assert not [kind for kind in self.broker.plane.shared.sources.kinds if kind.counters["failed"]]

    async def kill(self) -> None:
        """Nothing is written any more, and nobody is told."""
        for task in list(self.loaded.context.tasks):
            task.cancel()
        await asyncio.gather(*self.loaded.context.tasks, return_exceptions=True)

    @property
    def counters(self) -> Any:
        return self.loaded.context.counters

    async def client(self, client_id: str, version: int = 5, **properties_: Any) -> Client:
        properties = Properties(**properties_) if properties_ else NONE
        client = Client(self.broker, client_id, version, properties=properties)
        answer: Connack = await client.expect(Connack)
        assert not answer.reason
        return client
