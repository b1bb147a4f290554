"""A node with the plugin `ecq`; see `tests/unit/plugins/node.py`.

async with Node.on(store, retention=60.0) as node:
    await (await node.client("pub")).publish("$ECQ/w/car/speed", b"50")
    await (await node.client("car")).subscribe("$ECQ/car/#")
"""

from __future__ import annotations

from motorcade.extension.compacted import SERVICE, Compacted, CompactedView, Form
from motorcade.mqtt.packets import Publish
from motorcade.plugins.ecq.plugin import EcqPlugin
from tests.unit.plugins.node import Client, PluginNode, until

EXCLUSIVE, SHARED = Form.EXCLUSIVE, Form.SHARED

__all__ = ["EXCLUSIVE", "SHARED", "Client", "Node", "numbers", "until", "values"]


class Node(PluginNode):
    """One process."""

    plugin_name = "ecq"

    @property
    def service(self) -> Compacted:
        found: Compacted = self.plugins.service(SERVICE)
        return found

    @property
    def plugin(self) -> EcqPlugin:
        assert isinstance(self.loaded.plugin, EcqPlugin)
        return self.loaded.plugin

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
        self.plugin.tools.ledger.gathered.cancel()
        await super().kill()


def numbers(messages: list[Publish]) -> list[int]:
    """Sequence numbers of deliveries."""
    return [int(dict(message.properties.user_properties)[name]) for message in messages for name in _number(message)]


def _number(message: Publish) -> list[str]:
    return [f"{message.topic[1:4].lower()}-seqno"]


def values(messages: list[Publish]) -> list[tuple[str, bytes]]:
    """Keys and payloads of deliveries."""
    return [(message.topic.split("/", 2)[2], bytes(message.payload)) for message in messages]
