"""A node with the plugin `streams` in virtual time; see `tests/support/virtual.py`.

with StreamsNode.with_stream() as node:                 a stream `s`, bound to `t/#`
    node.append(b"0", b"1")
    car = node.reader("car", "earliest", window=4)      subscribed to `$stream/s`
    assert [b"0", b"1"] == car.drain()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from motorcade.broker.limits import SessionOptions
from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.record import decode, encode
from motorcade.delivery.cursor import Cursor
from motorcade.delivery.progress import ProgressStore
from motorcade.mqtt.packets import Publish
from motorcade.plugins.logs.streams.options import StreamOptions
from motorcade.plugins.logs.streams.plugin import StreamsPlugin
from motorcade.plugins.logs.streams.position import OFFSET
from motorcade.plugins.logs.streams.reader import COLLECTION, key_of
from motorcade.plugins.logs.streams.service import StreamService
from motorcade.plugins.logs.streams.stream import Stream
from motorcade.storage.ports import Batch
from tests.support.virtual import Client, PluginNode

BUFFER = 64  #: messages of a source that wait for the window of their client
LASTING: dict[str, Any] = {"clean": False, "session_expiry": 100_000}


class StreamsNode(PluginNode):
    """One process."""

    plugin_name = "streams"

    @classmethod
    @contextmanager
    def with_stream(cls, options: dict[str, Any] | None = None, **config: Any) -> Iterator[Self]:
        """With a stream `s` that was declared by a command."""
        with cls.on(session=SessionOptions(source_buffer=BUFFER), **config) as node:
            node.create(**(options or {}))
            yield node

    @property
    def streams(self) -> StreamService:
        assert isinstance(self.loaded.plugin, StreamsPlugin)
        return self.loaded.plugin.streams

    @property
    def stream(self) -> Stream:
        found = self.streams.stream("s")
        assert found is not None
        return found

    @property
    def progress_store(self) -> ProgressStore:
        return self.streams.progress

    def create(self, name: str = "s", **options: Any) -> Any:
        return self.run(self.streams.create(name, msgspec.convert({"topics": ["t/#"]} | options, StreamOptions)))

    # -- in

    def appending(self, *payloads: bytes, stream: str = "s") -> Commit[Any]:
        """As another plugin appends; the commit of its offsets."""
        with self.loop.running():  # type: ignore[union-attr]
            return self.streams.append(stream, [Message("t/a", each, timestamp=self.now) for each in payloads])

    def append(self, *payloads: bytes, stream: str = "s") -> list[int]:
        """Until it is stored; the offsets."""
        appending = self.appending(*payloads, stream=stream)
        self.turn()
        assert appending.error is None
        found: list[int] = appending.result
        return found

    def append_numbers(self, count: int, start: int = 0, stream: str = "s") -> None:
        self.append(*(b"%d" % number for number in range(start, start + count)), stream=stream)

    def append_past(self, *numbers: int, batch: bool = True) -> None:
        """As the fan-out does it: past the service, in a batch of its own."""
        values = [encode(Message("t/a", b"%d" % number)) for number in numbers]
        if not batch:
            self.run(self.held.streams.append("s", values, self.now))
            return
        together = Batch()
        together.stream("s", values, self.now)
        together.put("things", "k", b"v")
        self.run(self._written(together))

    async def _written(self, batch: Batch) -> None:
        await self.held.write(batch)

    def stored(self, stream: str = "s") -> list[bytes]:
        found = self.held.inner.streams.streams
        return [decode(record.value).payload for record in found[stream].records] if stream in found else []

    # -- out

    def reader(
        self,
        name: str = "car",
        offset: str = "",
        *,
        stream: str = "s",
        qos: int = 1,
        version: int = 5,
        window: int = 4,
        **more: Any,
    ) -> Client:
        """A client that reads a stream, from where it says."""
        client = self.client(name, version, receive_maximum=window, **more)
        if not client.connack.session_present:
            read(client, f"$stream/{stream}", offset, qos)
        return client

    def cursor(self, client: str = "car", offset: str = "") -> Cursor:
        """The place of a subscription."""
        return self.cursors(client)[offset]

    def cursors(self, client: str = "car", stream: str = "s") -> dict[str, Cursor]:
        """The places of a client's subscriptions, by the offsets in their filters."""
        found = self.progress_store.peek(key_of(stream), client)
        return found.cursors if found is not None else {}

    def committed(self, client: str = "car", stream: str = "s") -> int | None:
        """Where a client would go on; None: nowhere."""
        found = self.progress_store.peek(key_of(stream), client)
        if found is not None and found.loaded:
            found.gather()
            return found.number if found.exists else None
        stored = self.progress().get(f"{stream}/{client}")
        return None if stored is None else stored[1]

    def progress(self) -> dict[str, Any]:
        """Progress in the store, by stream and client."""
        found = self.held.records_of(COLLECTION)
        ends = self.held.inner.records.collections.get(COLLECTION, {})
        return {
            key: msgspec.msgpack.decode(value)
            for key, value in found.items()
            if not ends[key][1] or ends[key][1] > self.now
        }


def read(client: Client, filter_: str = "$stream/s", offset: str = "", qos: int = 1) -> None:
    """Subscribe, with a position or without."""
    answer = client.subscribe(filter_, qos, stream_offset=offset) if offset else client.subscribe(filter_, qos)
    assert (min(qos, 1),) == answer.reasons


def numbers(messages: list[Publish]) -> list[int]:
    """Payloads that are numbers."""
    return [int(message.payload) for message in messages]


def offsets(messages: list[Publish]) -> list[int]:
    return [int(dict(message.properties.user_properties)[OFFSET]) for message in messages]
