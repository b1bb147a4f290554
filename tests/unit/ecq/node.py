"""A broker in this process with the plugin `ecq`, over a real store, on the event loop of the test.

    async with Node.on(store, retention=60.0) as node:
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=2)
        await pub.publish("$ECQ/w/car/speed", b"50")
        await car.subscribe("$ECQ/car/#")
        (message,) = await car.take(1)
        car.ack(message)

`await node.kill()` is the end of the process, as far as the store can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from motorcade.extension.compacted import SERVICE, Compacted, CompactedView, Form
from motorcade.extension.plugin import Loaded, Plugins
from motorcade.mqtt.packets import Connack, Publish
from motorcade.mqtt.properties import NONE, Properties
from motorcade.plugins.ecq.plugin import EcqPlugin
from motorcade.storage.ports import Store
from tests.unit.broker.memory import MemoryNode
from tests.unit.queues.node import Client, Hub, until

EXCLUSIVE, SHARED = Form.EXCLUSIVE, Form.SHARED

__all__ = ["EXCLUSIVE", "SHARED", "Client", "Node", "numbers", "until", "values"]


class Node:
    """One process."""

    def __init__(self, store: Store, **limits: Any) -> None:
        self.store = store
        self.broker = MemoryNode(loop=asyncio.get_running_loop(), **limits)
        self.hub = Hub(self.broker)
        self.plugins = Plugins(self.hub, self.broker.hooks, Path("unused"), self.broker.plane.shared.sources)
        self.plugins.store = store
        self.loaded: Loaded

    @classmethod
    async def begin(cls, store: Store, **config: Any) -> Node:
        """Start a process; `stop` or `kill` ends it."""
        node = cls(store)
        node.loaded = await node.plugins.load("ecq", config)
        return node

    @classmethod
    @asynccontextmanager
    async def on(cls, store: Store, **config: Any) -> AsyncIterator[Node]:
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

    @property
    def service(self) -> Compacted:
        found: Compacted = self.plugins.service(SERVICE)
        return found

    @property
    def plugin(self) -> EcqPlugin:
        assert isinstance(self.loaded.plugin, EcqPlugin)
        return self.loaded.plugin

    @property
    def counters(self) -> Any:
        return self.loaded.context.counters

    async def client(self, client_id: str, version: int = 5, **properties_: Any) -> Client:
        properties = Properties(**properties_) if properties_ else NONE
        client = Client(self, client_id, version, properties=properties)  # type: ignore[arg-type]
        answer: Connack = await client.expect(Connack)
        assert not answer.reason
        return client

    async def fill(self, name: str, *messages: tuple[str, bytes], root: str = "$ECQ") -> None:
        """Append, and wait until all is stored."""
        pub = await self.client(f"pub-{name}")
        for key, payload in messages:
            assert 0 == await pub.publish(f"{root}/w/{name}/{key}", payload)
        pub.disconnect()

    async def stored(self, name: str, kind: Form = EXCLUSIVE) -> list[tuple[int, str, bytes]]:
        """Number, key and payload of what is in a queue."""
        found = await self.service.read(kind, name, 0, 10_000)
        return [(each.position, each.properties["key"], each.payload) for each in found]

    async def show(self, name: str, kind: Form = EXCLUSIVE) -> CompactedView:
        return await self.service.show(kind, name)

    async def progress(self, name: str, client: str = "", kind: Form = EXCLUSIVE) -> int:
        """The progress of a consumer, as operators see it."""
        view = await self.service.show(kind, name)
        return next((each.progress for each in view.consuming if each.client == (client or name)), -1)

    async def kill(self) -> None:
        """Nothing is written any more, and nobody is told."""
        ledger = self.plugin.tools.ledger
        ledger.gathered.cancel()
        for task in list(self.loaded.context.tasks):
            task.cancel()
        await asyncio.gather(*self.loaded.context.tasks, return_exceptions=True)


def numbers(messages: list[Publish]) -> list[int]:
    """Sequence numbers of deliveries."""
    return [int(dict(message.properties.user_properties)[name]) for message in messages for name in _number(message)]


def _number(message: Publish) -> list[str]:
    return [f"{message.topic[1:4].lower()}-seqno"]


def values(messages: list[Publish]) -> list[tuple[str, bytes]]:
    """Keys and payloads of deliveries."""
    return [(message.topic.split("/", 2)[2], bytes(message.payload)) for message in messages]
