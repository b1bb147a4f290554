"""Conditions of a batch: they refuse their own batch, before its first write, and no other of the same call."""

from __future__ import annotations

import asyncio
import time

import pytest

from motorcade.storage.ports import Batch, Bound, Draft, Durability, StoreConflictError, StoreError
from motorcade.storage.redis import Plan, RedisStore
from tests.contracts.engines import patient
from tests.support.redis import RedisCluster, RedisServer

NOW = time.time()


def in_other_cells(store: RedisStore, names: int, prefix: str = "v") -> list[str]:
    """Names that are all in different cells."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < names:
        name = f"{prefix}{number}"
        found.setdefault(store.core.cells.of(name), name)
        number += 1
    return list(found.values())


async def test_one_unmet_condition_in_a_group_refuses_its_own_batch_only(store: RedisStore) -> None:
    await store.records.put("c", "taken", b"1")
    batches = []
    for number in range(9):
        batch = Batch()
        batch.append(["v"], Draft(b"%d" % number), NOW)
        batch.put("c", "taken" if number % 3 == 1 else f"free{number}", b"2", expect=None)
        batch.stream("s", [b"%d" % number], NOW)
        batches.append(batch)
    before = store.core.writer.commits
    outcomes = await asyncio.gather(*map(store.write, batches), return_exceptions=True)
    assert 1 == store.core.writer.commits - before
    assert [n % 3 == 1 for n in range(9)] == [isinstance(outcome, StoreConflictError) for outcome in outcomes]
    assert [b"0", b"2", b"3", b"5", b"6", b"8"] == [e.body for e in await store.mailboxes.read("v", 0, 10, NOW)]
    assert 6 == (await store.streams.info("s")).records
    assert (0, 0) == (store.backlog.rows, store.backlog.bytes)
    assert [] == await store.check()


async def test_a_refused_append_changes_nothing(store: RedisStore, server: RedisServer) -> None:
    """Not even the payload of what would have been replaced; it can be repeated with its token when there is room."""
    bound = Bound(entries=2, size_bytes=1000, refuse=True)
    for key in (b"a", b"b"):
        await store.mailboxes.append(["v"], Draft(b"1", b"p" * 400, key, token=key), NOW, bound)
    mailbox = store.core.key(store.core.cells.of("v"), "e:", "v")
    before = server.client.hgetall(mailbox)
    for draft in (Draft(b"2", key=b"c", token=b"c"), Draft(b"2", b"p" * 600, b"a", token=b"c"), Draft(b"x" * 2000)):
        (answer,) = await store.mailboxes.append(["v"], draft, NOW, bound)
        assert (0, 0, (), True) == (answer.position, answer.replaced, answer.dropped, answer.refused)
    assert before == server.client.hgetall(mailbox)
    (answer,) = await store.mailboxes.append(["v"], Draft(b"2", key=b"a", token=b"c"), NOW, bound)
    assert (3, 1, False) == (answer.position, answer.replaced, answer.refused)
    assert [] == await store.check()


@pytest.mark.timeout(300)
async def test_on_a_cluster_the_cell_of_the_condition_goes_first(cluster: RedisCluster) -> None:
    store = patient(cluster.url, Durability.SAFE)
    await store.open()
    first, second, third, other = in_other_cells(store, 4)
    batch = Batch()
    batch.append([first, third, second], Draft(b"1", b"p" * 1000), NOW)
    batch.put("c", second, b"new", expect=b"old")
    batch.stream(third, [b"1", b"2"], NOW)
    with pytest.raises(StoreConflictError) as raised:
        await store.write(batch)
    assert raised.value.certain
    assert 0 == (await store.figures()).entries
    assert 0 == (await store.streams.info(third)).records
    await store.records.put("c", second, b"old")
    written = await store.write(batch)
    assert [first, third, second] == [answer.owner for answer in written.appended]
    assert [[1, 2]] == [list(offsets) for offsets in written.offsets]
    assert b"new" == await store.records.get("c", second, NOW)

    both = Batch()
    both.put("c", first, b"1", expect=None)
    both.put("c", second, b"newer", expect=b"other")
    both.append([other], Draft(b"1"), NOW)
    with pytest.raises(StoreConflictError):
        await store.write(both)
    assert await store.records.get("c", first, NOW) is None
    await store.records.put("c", second, b"other")
    await store.write(both)
    assert (b"1", b"newer") == (await store.records.get("c", first, NOW), await store.records.get("c", second, NOW))
    assert 1 == (await store.mailboxes.info(other)).entries
    assert [] == await store.check()
    await a_home_is_given_up_at_the_end(store, [first, second, third, other])
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.write(both)


async def a_home_is_given_up_at_the_end(store: RedisStore, homes: list[str]) -> None:
    """In a call of its own if the batch has more to do elsewhere, else together with all the rest."""
    for many in (True, False):
        fence = (await store.coordination.attach(homes[0], "node-a")).fence
        batch = Batch()
        batch.detach(fence)
        batch.append(homes if many else homes[:1], Draft(b"2", b"p" * 1000 if many else b""), NOW)
        batch.put("c", homes[0], b"last")
        plan = Plan(store.core)
        plan.add(batch)
        stages, _ = plan._stages([])
        words = [[operation.words[0] for operation in stage.operations] for stage in stages]
        assert (
            [["append", "put"], ["append"] * 3, ["detach"]] == words if many else [["append", "put", "detach"]] == words
        )
        await store.write(batch)
        assert not await store.coordination.detach(fence)
