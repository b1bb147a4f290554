"""A node with the plugin `queues` in virtual time; see `tests/support/virtual.py`.

with QueuesNode.on(queue={"q": {"topics": ["q/#"]}}) as node:
    worker = node.worker("a")               subscribed to `$queue/q`
"""

from __future__ import annotations

from typing import Any

from motorcade.plugins.logs.queues.plugin import QueuesPlugin
from motorcade.plugins.logs.queues.queue import Queue
from motorcade.plugins.logs.queues.service import QueueService
from motorcade.storage.ports import StoreError
from tests.support.virtual import Client, PluginNode, Turns


class QueuesNode(PluginNode):
    """One process."""

    plugin_name = "queues"

    @property
    def queues(self) -> QueueService:
        found: QueueService = self.plugins.service("queues")
        return found

    @property
    def plugin(self) -> QueuesPlugin:
        assert isinstance(self.loaded.plugin, QueuesPlugin)
        return self.loaded.plugin

    def queue(self, name: str = "q") -> Queue:
        found = self.plugin._queues.get(name)
        assert found is not None
        return found

    def worker(self, name: str, version: int = 5, queue: str = "q", **more: Any) -> Client:
        """A client that consumes a queue."""
        client = self.client(name, version, **more)
        if not client.connack.session_present:
            assert (1,) == client.subscribe(f"$queue/{queue}").reasons
        return client

    def fill(self, *payloads: bytes, topic: str = "q/a", **properties: Any) -> None:
        """Publish; all is stored."""
        pub = self.client("filler")
        for payload in payloads:
            assert 0 == pub.publish(topic, payload, **properties)
        pub.disconnect()

    def fail_write(self, *, written: bool) -> None:
        """The oldest write of a store that holds them has an unknown outcome."""
        with self.turns.running():
            self.held.fail(StoreError("the answer is lost"), written=written)

    def let_go(self) -> None:
        """The store does what it was asked to, and goes on so."""
        self.held.held = False
        with self.turns.running():
            self.held.let_go()
        self.turn()

    @property
    def turns(self) -> Turns:
        assert isinstance(self.loop, Turns)
        return self.loop

    def stored(self, name: str = "q") -> list[bytes]:
        """What is in a queue, once what was acknowledged is removed."""
        self.wait(0.1)
        return [found.payload for found in self.run(self.queues.read(name, 0, 1000))]

    def marks(self, name: str = "q") -> list[int]:
        """How often the messages of a queue were sent, as the store knows."""
        return [row.mark for row in self.held.inner.mailboxes.boxes[f"queue:{name}"].rows.values()]
