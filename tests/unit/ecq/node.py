"""A node with the plugin `ecq` in virtual time; see `tests/support/virtual.py`.

with EcqNode.on(retention=60.0) as node:
    node.fill("car", ("speed", b"50"))
    car = node.consumer()                   subscribed to `$ECQ/car/#`
    assert [(1, "speed", b"50")] == told(car.messages())
"""

from __future__ import annotations

from typing import Any

from motorcade.extension.compacted import SERVICE, Compacted, CompactedKind, CompactedView
from motorcade.mqtt.packets import Publish
from motorcade.plugins.logs.compacted.plugin import EcqPlugin
from tests.support.virtual import Client, PluginNode

EXCLUSIVE, SHARED = CompactedKind.EXCLUSIVE, CompactedKind.SHARED
ROOTS = {EXCLUSIVE: "$ECQ", SHARED: "$SCQ"}


class EcqNode(PluginNode):
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

    # -- clients

    def fill(self, name: str, *messages: tuple[str, bytes], form: CompactedKind = EXCLUSIVE) -> None:
        """Append; all is stored."""
        pub = self.client(f"pub-{name}")
        for key, payload in messages:
            assert 0 == pub.publish(f"{ROOTS[form]}/w/{name}/{key}", payload)
        pub.disconnect()

    def consumer(self, name: str = "car", version: int = 5, shared: str = "", **more: Any) -> Client:
        """A client that consumes its own queue, or a shared one."""
        client = self.client(name, version, **more)
        if not client.connack.session_present:
            assert (1,) == client.subscribe(f"$SCQ/{shared}/#" if shared else f"$ECQ/{name}/#").reasons
        return client

    # -- operators

    def stored(self, name: str = "car", form: CompactedKind = EXCLUSIVE) -> list[tuple[int, str, bytes]]:
        """Number, key and payload of what is in a queue."""
        found = self.run(self.service.read(form, name, 0, 10_000))
        return [(each.position, each.properties["key"], each.payload) for each in found]

    def keys(self, name: str = "car") -> list[str]:
        return [key for _, key, _ in self.stored(name)]

    def show(self, name: str = "car", form: CompactedKind = EXCLUSIVE) -> CompactedView:
        return self.run(self.service.show(form, name))

    def progress(self, name: str = "car", client: str = "", form: CompactedKind = EXCLUSIVE) -> int:
        """The progress of a consumer."""
        view = self.show(name, form)
        return next((each.progress for each in view.consuming if each.client == (client or name)), -1)

    def rewind(self, name: str = "car", client: str = "", form: CompactedKind = EXCLUSIVE, **how: Any) -> Any:
        return self.run(self.service.rewind(form, name, client, **how))

    def delete(self, name: str, form: CompactedKind = EXCLUSIVE) -> None:
        self.run(self.service.delete(form, name))

    def collect(self) -> int:
        """Remove what is too old, with the pauses that this takes."""
        task = self.begin(self.plugin.collector.collect())
        self.wait(1.0)
        return task.result()


def numbers(messages: list[Publish]) -> list[int]:
    """Sequence numbers of deliveries."""
    return [int(dict(each.properties.user_properties)[f"{each.topic[1:4].lower()}-seqno"]) for each in messages]


def values(messages: list[Publish]) -> list[tuple[str, bytes]]:
    """Keys and payloads of deliveries."""
    return [(message.topic.split("/", 2)[2], bytes(message.payload)) for message in messages]


def told(messages: list[Publish]) -> list[tuple[int, str, bytes]]:
    """Numbers, keys and payloads of deliveries."""
    return [(number, *value) for number, value in zip(numbers(messages), values(messages), strict=True)]
