"""`Store.write` and the `Commit` that it returns: never waited for, answered in order, once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from motorcade.commit import Commit
from motorcade.storage.ports import (
    MAX_BACKLOG_BYTES,
    MAX_BACKLOG_ROWS,
    Batch,
    Draft,
    Formed,
    Store,
    StoreError,
    Written,
)
from tests.contracts.engines import NOW, PAYLOAD, Engine, entries


def appending(owner: str, *bodies: bytes, payload: bytes = b"") -> Batch:
    batch = Batch()
    for body in bodies:
        batch.append([owner], Draft(body, payload), NOW)
    return batch


async def answered(commits: list[Commit[Written]]) -> None:
    """Wait without looking at the outcomes."""
    await asyncio.gather(*(asyncio.wait_for(commit, 60) for commit in commits), return_exceptions=True)


async def test_a_write_does_not_wait(store: Store) -> None:
    """It is on its way when `write` returns, though the caller has given nobody else a turn."""
    commits = [store.write(appending("v", b"%d" % number)) for number in range(100)]
    assert not any(commit.done for commit in commits)
    positions = [answer.position for commit in commits for answer in (await commit).appended]
    assert list(range(1, 101)) == positions
    assert 100 == len(await entries(store, "v"))


async def test_answers_come_in_the_order_of_the_writes(store: Store) -> None:
    """Whatever else is in the batches: large payloads, removals, records (on Redis these may have another cell)."""
    order: list[int] = []
    commits = []
    for number in range(60):
        batch = appending("v", b"%d" % number, payload=PAYLOAD if number % 3 == 0 else b"")
        if number % 4 == 0:
            batch.acknowledge("v", [number])
        if number % 5 == 0 and store.atomic:
            batch.put("c", "key", b"%d" % number)
        commit = store.write(batch)
        commit.then(lambda number=number: order.append(number))  # type: ignore[misc]
        commits.append(commit)
    await answered(commits)
    assert list(range(60)) == order


async def test_callbacks_run_in_order_and_late_ones_at_once(store: Store) -> None:
    told: list[str] = []
    commit = store.write(appending("v", b"1"))
    commit.then(lambda: told.append("first"))
    commit.then(lambda: told.append("second"))
    assert [] == told
    await commit
    assert ["first", "second"] == told
    commit.then(lambda: told.append("late"))
    assert ["first", "second", "late"] == told
    assert commit.done and commit.error is None and not commit.refused
    assert 1 == commit.result.appended[0].position


async def test_a_callback_that_raises_keeps_nobody_from_an_answer(store: Store) -> None:
    told: list[str] = []

    def fail() -> None:
        told.append("raised")
        raise ValueError("a defect of a caller")

    first, second = store.write(appending("v", b"1")), store.write(appending("v", b"2"))
    first.then(fail)
    first.then(lambda: told.append("same commit"))
    second.then(lambda: told.append("next commit"))
    assert 1 == (await asyncio.wait_for(first, 60)).appended[0].position
    assert 2 == (await asyncio.wait_for(second, 60)).appended[0].position
    assert ["raised", "same commit", "next commit"] == told
    first.then(fail)
    assert 3 == (await asyncio.wait_for(store.write(appending("v", b"3")), 60)).appended[0].position


async def test_a_callback_may_write(store: Store) -> None:
    """The next write of a chain begins in the answer to the one before."""
    done = asyncio.get_running_loop().create_future()

    def write(number: int) -> None:
        commit = store.write(appending("v", b"%d" % number))
        commit.then(lambda: write(number + 1) if number < 20 else done.set_result(None))

    write(1)
    await asyncio.wait_for(done, 60)
    assert [b"%d" % number for number in range(1, 21)] == [entry.body for entry in await entries(store, "v")]


async def test_offsets_of_each_append_to_a_stream(store: Store) -> None:
    """One answer per call, in order, also of no values at all and of more than one call of an engine can take."""
    batch = Batch()
    many = [b"%d" % number for number in range(2500)]
    batch.stream("a", [b"1", b"2"], NOW)
    batch.stream("b", many, NOW)
    batch.append(["v"], Draft(b"1"), NOW)
    batch.stream("a", [], NOW)
    batch.stream("a", Formed([b"<", 0, b">"], [[b"3", b"4", b"5"]]), NOW)
    written = await store.write(batch)
    assert [2, 2500, 0, 3] == [len(offsets) for offsets in written.offsets]
    assert [1] == [answer.position for answer in written.appended]
    records = {name: await store.streams.read(name, 0, 10_000) for name in ("a", "b")}
    values = {name: {record.offset: record.value for record in found} for name, found in records.items()}
    told = {
        "a": dict(zip([*written.offsets[0], *written.offsets[3]], [b"1", b"2", b"<3>", b"<4>", b"<5>"], strict=True)),
        "b": dict(zip(written.offsets[1], many, strict=True)),
    }
    assert values == told
    again = Batch()
    again.stream("a", [b"6"], NOW)
    (offsets,) = (await store.write(again)).offsets
    assert [offsets[0]] == [record.offset for record in await store.streams.read("a", written.offsets[3][-1], 10)]


async def test_an_empty_batch(store: Store) -> None:
    written = await store.write(Batch())
    assert ([], [], []) == (written.appended, written.offsets, list(written.generations))


async def test_many_tasks_may_wait_for_one_commit(store: Store) -> None:
    commit = store.write(appending("v", b"1"))

    async def wait() -> Written:
        return await commit

    results = await asyncio.gather(*(wait() for _ in range(10)))
    assert all(result is commit.result for result in results)
    assert await commit is commit.result
    assert 1 == len(await entries(store, "v"))


async def test_a_caller_that_gives_up_does_not_stop_the_write(store: Store) -> None:
    commit = store.write(appending("v", b"1"))
    waiting = asyncio.ensure_future(asyncio.wait_for(commit, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):  # one engine has answered already
        await waiting
    assert 1 == (await commit).appended[0].position
    assert [b"1"] == [entry.body for entry in await entries(store, "v")]


async def test_a_write_that_is_wrong_fails_alone(store: Store) -> None:
    """`write` itself does not raise, and the writes beside it are done."""
    wrong = Batch()
    wrong.append(["v"], Draft("no bytes"), NOW)  # type: ignore[arg-type]
    before, failing, after = (store.write(batch) for batch in (appending("v", b"1"), wrong, appending("v", b"2")))
    await answered([before, failing, after])
    assert before.error is None and after.error is None
    if failing.error is None:  # an engine need not notice
        return
    for _ in range(2):
        with pytest.raises(type(failing.error)):
            await failing
    assert [b"1", b"2"] == [entry.body for entry in await entries(store, "v")]


async def test_a_store_that_is_closed(engine: Engine) -> None:
    """What was written before is answered; what comes later fails, and calls back all the same."""
    store = engine.make()
    told: list[bool] = []
    before = store.write(appending("v", b"0"))
    with pytest.raises(StoreError):
        await before
    await store.open()
    commits = [store.write(appending("v", b"%d" % number)) for number in range(1, 21)]
    for commit in commits:
        commit.then(lambda: told.append(True))
    await store.close()
    assert 20 == len(told)
    assert list(range(1, 21)) == [commit.result.appended[0].position for commit in commits]
    late = store.write(appending("v", b"late"))
    late.then(lambda: told.append(False))
    with pytest.raises(StoreError):
        await asyncio.wait_for(late, 60)
    assert told[-1] is False


async def test_what_waits_is_counted_until_it_is_done(store: Store) -> None:
    """By rows and by bytes; nothing is refused because of it."""
    backlog = store.backlog
    assert (0, 0, False) == (backlog.rows, backlog.bytes, backlog.full)
    rows: list[int] = []
    one = store.write(appending("v", b"body", payload=b"payload"))
    assert 1 <= backlog.rows <= 3 and 11 <= backlog.bytes < 100
    one.then(lambda: rows.append(backlog.rows))
    await one
    assert [0] == rows
    many = Batch()
    many.append([f"v{number}" for number in range(100)], Draft(b"", b"x" * 1000), NOW)
    many.acknowledge("v", range(1, MAX_BACKLOG_ROWS))
    commit = store.write(many)
    assert backlog.full and backlog.bytes < MAX_BACKLOG_BYTES // 2
    await asyncio.wait_for(commit, 60)
    assert (0, 0, False) == (backlog.rows, backlog.bytes, backlog.full)
