"""A store that writes down what it decides, and the checker that reads it; one that has never failed proves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from motorcade.storage.ports import Batch, Draft, Durability, Fence, Opened
from motorcade.storage.redis import RedisStore
from tests.contracts.engines import patient
from tests.support.redis import RedisCluster, RedisServer
from tests.support.store_trace import TraceEntry, read_trace, violations
from tests.unit.storage_redis.proxy import Relay

NOW = time.time()


@asynccontextmanager
async def traced(url: str, level: Durability = Durability.FAST) -> AsyncIterator[RedisStore]:
    store = patient(f"{url}?trace=yes", level)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def decision(fence: Fence, *, detach: bool = False) -> Batch:
    batch = Batch()
    batch.put("session", "x", b"1")
    if detach:
        batch.detach(fence)
    else:
        batch.fence(fence)
    return batch


async def moves(store: RedisStore, other: RedisStore) -> list[Fence]:
    """A home goes from one member to another and back; each has something in the air that comes too late."""
    given = []
    first = await store.coordination.try_open("session:x", "a", ["session"], NOW)
    assert isinstance(first, Opened)
    given.append(first.attached.fence)
    await store.write(decision(given[0]))
    await other.coordination.try_open("session:x", "b", [], NOW)
    given.append((await other.coordination.attach("session:x", "b")).fence)
    late = [store.write(decision(given[0])), store.write(decision(given[0], detach=True))]
    await asyncio.gather(*late, return_exceptions=True)
    await other.write(decision(given[1], detach=True))
    given.append((await store.coordination.attach("session:x", "a")).fence)
    assert not await other.coordination.detach(given[1])
    assert await store.coordination.detach(given[2])
    return given


async def test_what_happens_to_a_home_is_written_down_in_its_order(server: RedisServer) -> None:
    async with traced(server.url) as store, traced(server.url) as other:
        first, second, third = await moves(store, other)
        cell = store.core.cells.of("client:x")
        traces = read_trace([server.client])
        told = [
            (entry.number, entry.token, entry.what, entry.accepted)
            for entry in traces[cell]
            if entry.name == "client:x"
        ]
        fences = [(fence.number, fence.token.hex()) for fence in (first, second, third)]
        assert [
            (*fences[0], "attach a", True),
            (*fences[0], "decision", True),
            (0, told[2][1], "attach b", False),
            (*fences[1], "attach b", True),
            (*fences[0], "decision", False),
            (*fences[0], "decision", False),
            (*fences[1], "decision", True),
            (*fences[1], "detach", True),
            (*fences[2], "attach a", True),
            (*fences[1], "detach", False),
            (*fences[2], "detach", True),
        ] == told
        assert [] == violations(traces)
        assert [] == await store.check()


async def test_other_conditions_and_fenced_writers_are_written_down_too(server: RedisServer) -> None:
    async with (
        Relay(server.host, server.port) as relay,
        traced(server.url) as store,
        traced(f"redis://127.0.0.1:{relay.port}") as late,
    ):
        (answer,) = await late.mailboxes.append(["v"], Draft(b"1"), NOW)
        for _ in range(2):
            batch = Batch()
            batch.take("v", answer.position)
            batch.put("c", "k", b"1", expect=None)
            await asyncio.gather(late.write(batch), return_exceptions=True)
        relay.hold()
        writing = asyncio.ensure_future(late.records.put("c", "late", b"1"))
        await asyncio.sleep(0)
        await store.coordination.fence_member(late.writer)
        relay.release()
        await asyncio.gather(writing, return_exceptions=True)
        traces = read_trace([server.client])
        told = [(entry.name, entry.what, entry.accepted) for entries in traces.values() for entry in entries]
        assert [True, False] == [accepted for name, what, accepted in told if (name, what) == ("v", "take")]
        assert [True, False] == [accepted for name, what, accepted in told if (name, what) == ("c/k", "expect")]
        calls = [(what, accepted) for name, what, accepted in told if name == late.writer]
        assert [("fence", True), ("call", False)] == calls[-2:]
        assert {("call", True)} == set(calls[:-2])
        assert [] == violations(traces)


@pytest.mark.timeout(300)
async def test_on_a_cluster_each_cell_has_its_own(cluster: RedisCluster) -> None:
    async with traced(cluster.url, Durability.SAFE) as store, traced(cluster.url, Durability.SAFE) as other:
        await moves(store, other)
        await store.coordination.fence_member(other.writer)
        with pytest.raises(Exception, match="fenced"):
            await other.records.put("session", "x", b"late")
        traces = read_trace([server.client for server in cluster.masters()])
        assert set(range(store.core.cells.count)) == set(traces), "each has heard of the fence"
        assert all(cell == entry.cell for cell, entries in traces.items() for entry in entries)
        last = traces[store.core.cells.of("client:x")][-1]
        assert (other.writer, "call", False) == (last.name, last.what, last.accepted)
        assert [] == violations(traces)


async def test_without_the_option_nothing_is_written_down(store: RedisStore, server: RedisServer) -> None:
    await moves(store, store)
    assert {} == read_trace([server.client])


A, B = (1, "aa"), (2, "bb")


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([("attach a", A), ("attach b", B), ("decision", B), ("decision", A)], "after another attach"),
        ([("attach a", A), ("detach", A), ("decision", A)], "after another attach"),
        ([("attach a", A), ("decision", B)], "never attached"),
        ([("attach a", A), ("attach b", B), ("detach", A)], "after another attach"),
        ([("fence", A), ("call", A)], "after its fence"),
        ([("call", A), ("call", B), ("call", A)], "call 1 of client:x after call 2"),
        ([("call", A), ("call", A)], "call 1 of client:x after call 1"),
        ([("attach a", A), ("attach b", B), ("decision", B), ("attach a", A), ("decision", A)], "after another attach"),
        ([("attach a", A), ("decision", A), ("detach", A), ("attach b", B), ("decision", B)], ""),
        ([("call", A), ("call", B), ("fence", A)], ""),
    ],
)
def test_the_checker_finds_what_is_wrong(told: list[tuple[str, tuple[int, str]]], found: str) -> None:
    """And accepts what is refused."""
    entries = [TraceEntry(3, "client:x", *fence, what, True) for what, fence in told]
    assert bool(found) == bool(violations({3: entries}))
    assert found in "".join(violations({3: entries}))
    assert [] == violations({3: [entry._replace(accepted=False) for entry in entries[-1:]]})


def test_the_checker_looks_at_each_line_once() -> None:
    """Homes that are attached again and again, and a line at the end that belongs to the first of all fences."""
    count, entries = 100_000, []
    for number in range(1, count + 1):
        fence = (number, "aa")
        home = f"client:{number % 100}"
        entries += [TraceEntry(3, home, *fence, what, True) for what in ("attach a", "decision", "decision")]
        entries.append(TraceEntry(3, "writer", number, "", "call", True))
    assert [] == violations({3: entries})
    entries.append(TraceEntry(3, "client:1", 1, "aa", "decision", True))
    assert 1 == len(violations({3: entries}))
