"""From publish to the store: in order, in groups, within bounds, and the publisher hears what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from motorcade.core.message import Message
from motorcade.core.record import RecordError, decode
from motorcade.extension.declared import UnknownError
from motorcade.plugins.streams.appender import MAX_GROUP
from motorcade.storage.ports import Store, StoreError, StoreFullError
from tests.unit.streams.clients import Node


class Gate:
    """Holds the appends of a store until they are let go, and can let them fail."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None
        append = store.streams.append

        async def held(stream: str, values: Sequence[bytes], now: float) -> list[int]:
            self.groups.append(len(values))
            await self.open.wait()
            if self.error is not None:
                raise self.error
            return await append(stream, values, now)

        monkeypatch.setattr(store.streams, "append", held)


@pytest.fixture
def gate(store: Store, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(store, monkeypatch)


def put(node: Node, *payloads: bytes) -> Any:
    """As the hook does; the group."""
    stream = node.streams.stream("s")
    assert stream is not None
    return [stream.appender.put(Message("t/a", payload, 1)) for payload in payloads][-1]


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def stored(store: Store) -> list[bytes]:
    return [decode(record.value).payload for record in await store.streams.read("s", 0, 1_000_000)]


async def test_what_comes_in_one_turn_is_one_write(node: Node, store: Store, gate: Gate) -> None:
    """And while it is under way, the next group collects."""
    futures = [put(node, b"%d" % number).future() for number in range(10)]
    await turn()
    assert [10] == gate.groups
    more = node.streams.append("s", [Message("t", b"10"), Message("t", b"11")])
    last = put(node, b"12").future()
    await turn()
    assert [10] == gate.groups, "one write at a time"
    gate.open.set()
    assert list(range(1, 11)) == (await asyncio.gather(*futures))[0]
    assert [11, 12] == await more
    await last
    assert [10, 3] == gate.groups
    assert [b"%d" % number for number in range(13)] == await stored(store)
    assert 0 == node.streams.waiting.messages == node.streams.waiting.octets


async def test_groups_are_bounded(node: Node, store: Store, gate: Gate) -> None:
    gate.open.set()
    last = put(node, *(b"x" for _ in range(2 * MAX_GROUP + 1)))
    await last.future()
    assert [MAX_GROUP, MAX_GROUP, 1] == gate.groups


async def test_a_store_that_is_full_refuses_certainly(node: Node, store: Store, gate: Gate) -> None:
    """Everybody of the group hears why; the next one is tried as ever."""
    gate.error = StoreFullError("disk full")
    gate.open.set()
    group, appended = put(node, b"1"), node.streams.append("s", [Message("t", b"2")])
    for future in (group.future(), appended):
        with pytest.raises(StoreFullError, match="disk full"):
            await future
    gate.error = None
    assert [1] == await node.streams.append("s", [Message("t", b"3")])
    assert (2, 1) == (node.counters["append_failed"], node.counters["appended"])
    assert [b"3"] == await stored(store)


async def test_too_much_waits(store: Store, gate: Gate) -> None:
    """What does not fit is refused at once, whoever asks, and counted."""
    node = await Node.on(store, max_waiting=3)
    await node.create()
    put(node, b"1", b"2", b"3")
    with pytest.raises(StoreFullError, match="max_waiting"):
        put(node, b"4")
    with pytest.raises(StoreFullError, match="3 messages wait"):
        await node.streams.append("s", [Message("t", b"5")])
    assert 2 == node.counters["refused_waiting"]
    gate.open.set()
    await node.quiet()
    assert [4] == await node.append(b"6")
    await node.stop()


async def test_bytes_that_wait_are_bounded_too(store: Store, gate: Gate) -> None:
    node = await Node.on(store, max_waiting_bytes=1000)
    await node.create()
    put(node, b"x" * 1000)
    with pytest.raises(StoreFullError, match="max_waiting_bytes"):
        put(node, b"4")
    gate.open.set()
    await node.stop()


async def test_errors_of_an_append_are_told_where_it_is_waited_for(node: Node) -> None:
    with pytest.raises(UnknownError, match="no stream 'x'"):
        await node.streams.append("x", [Message("t", b"")])
    with pytest.raises(RecordError):
        await node.streams.append("s", [Message("t\ud800", b"")])
    assert [] == await node.streams.append("s", [])


async def test_whoever_does_not_wait_any_more_harms_nobody(node: Node, gate: Gate) -> None:
    appended = node.streams.append("s", [Message("t", b"1")])
    other = node.streams.append("s", [Message("t", b"2")])
    appended.cancel()
    gate.open.set()
    assert [2] == await other


async def test_unloaded_in_the_middle_of_a_write(node: Node, gate: Gate) -> None:
    """Nobody waits for ever."""
    flying = put(node, b"1").future()
    await turn()
    waiting = put(node, b"2").future()
    await node.kill()
    for future in (flying, waiting):
        with pytest.raises(StoreError):
            await future
    assert 0 == node.streams.waiting.messages


async def test_a_fault_after_the_write_leaves_no_publisher_waiting(
    node: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored; those behind it are written too, and readers find all of it."""
    stream = node.streams.stream("s")
    assert stream is not None

    def breaks(*_: object) -> None:
        raise RuntimeError("a page that cannot be made")

    with monkeypatch.context() as patch:
        patch.setattr(stream.appender, "_appended", breaks)
        assert [1] == await asyncio.wait_for(put(node, b"1").future(), 60)
    assert [2] == await asyncio.wait_for(put(node, b"2").future(), 60)
    assert [b"1", b"2"] == await stored(store)
    assert 2 == stream.tail and stream.appender.doubtful


async def test_a_stream_that_could_not_be_counted_is_counted_later(
    node: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = node.streams.stream("s")
    assert stream is not None
    await store.streams.append("s", [b"1", b"2"], 1.0)  # past the service
    assert 2 == stream.tail and stream.uncounted

    async def breaks(_: str) -> None:
        raise StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(store.streams, "info", breaks)
        with pytest.raises(StoreError):
            await stream.look()
    await stream.look()
    assert 2 == stream.records
