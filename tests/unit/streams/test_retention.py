"""What goes, when, and in which steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motorcade.storage.ports import Store, Swept
from tests.unit.streams.clients import NOW, Node


async def offsets_of(store: Store) -> list[int]:
    return [record.offset for record in await store.streams.read("s", 0, 10_000)]


async def test_by_age(store: Store) -> None:
    node = await Node.on(store)
    await node.create(retention=10)
    for _ in range(20):
        await node.append(b"x")
        node.now += 1
    assert NOW + 10 == node.streams.streams()[0].outdated_at()
    await node.streams.trimmer.look()
    assert list(range(11, 21)) == await offsets_of(store)
    assert NOW + 20 == node.streams.streams()[0].outdated_at()
    assert 10 == node.counters["trimmed"]
    node.now += 1000
    await node.streams.trimmer.look()
    view = await node.streams.show("s")
    assert (0, 20, 0, 0) == (view.first, view.last, view.records, view.bytes)
    await node.append(b"y")
    assert [21] == await offsets_of(store)
    assert node.now + 10 == node.streams.streams()[0].outdated_at()
    await node.stop()


async def test_by_count_and_size(store: Store) -> None:
    node = await Node.on(store)
    await node.create(max_messages=5)
    await node.append(*(b"x" for _ in range(20)))
    await node.streams.trimmer.look()
    assert list(range(16, 21)) == await offsets_of(store)
    size = node.streams.streams()[0].octets // 5
    await node.streams.change("s", type(node.streams.options("s"))(topics=(), max_bytes=2 * size))
    await node.streams.trimmer.look()
    assert [19, 20] == await offsets_of(store)
    assert 18 * size == node.counters["trimmed_bytes"]
    stream = node.streams.streams()[0]
    assert (2, 2 * size, 19) == (stream.records, stream.octets, stream.first)
    await node.stop()


async def test_in_bounded_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await Node.on(store, trim_budget=7)
    await node.create(max_messages=1)
    await node.append(*(b"x" for _ in range(100)))
    steps = []
    trim = store.streams.trim

    async def counted(*args: Any) -> Swept:
        swept = await trim(*args)
        steps.append(swept.removed)
        return swept

    monkeypatch.setattr(store.streams, "trim", counted)
    await node.streams.trimmer.look()
    assert [100] == await offsets_of(store)
    assert 99 == sum(steps)
    assert 7 == max(steps)
    await node.stop()


async def test_a_stream_that_grows_too_far_is_trimmed_at_once(store: Store) -> None:
    """Without waiting for the interval; and while nothing is to be done, nothing runs."""
    node = await Node.on(store, trim_interval=100_000.0)
    await node.create(max_messages=100, retention=0)
    trimming = asyncio.create_task(node.streams.trimmer.run())
    for _ in range(10):
        await node.append(*(b"x" for _ in range(100)))
    async with asyncio.timeout(60):
        while len(await offsets_of(store)) > 100:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.01)
    assert 100_000 == node.streams.trimmer._patience()
    await node.streams.delete("s")
    assert node.streams.trimmer._patience() is None
    trimming.cancel()
    await node.stop()


async def test_the_next_look_comes_in_time(store: Store) -> None:
    """When the oldest record is to go, but not more often than a hundredth of the retention."""
    node = await Node.on(store)
    await node.create(retention=60)
    assert 10 == node.streams.trimmer._patience(), "there is nothing to lose"
    await node.append(b"x")
    node.now += 57
    assert 3 == node.streams.trimmer._patience()
    node.now += 4
    assert 0.6 == node.streams.trimmer._patience()
    await node.create("short", retention=8)
    node.now -= 20
    assert 2 == node.streams.trimmer._patience(), "progress in it may expire, too"
    await node.stop()


async def test_readers_never_see_what_was_trimmed_from_the_cache(store: Store) -> None:
    node = await Node.on(store)
    await node.create(retention=10)
    first = node.client("first", 100, 100).subscribe("$stream/s", "earliest")
    await node.append(b"old")
    await first.client.drain()
    node.now += 11
    await node.streams.trimmer.look()
    await node.append(b"new")
    second = node.client("second").subscribe("$stream/s", "1")
    await second.client.drain()
    assert [b"new"] == [message.payload for message in second.received]
    await node.stop()
