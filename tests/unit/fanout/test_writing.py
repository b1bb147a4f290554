"""Receipts get into the stream once, whatever the store says about it or does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from motorcade.core import receipt as receipts_
from motorcade.core.receipt import Receipt, State
from motorcade.core.record import decode as decode_record
from motorcade.core.vin import make_vin
from motorcade.plugins.fanout import receipts as module
from motorcade.plugins.fanout.receipts import Run
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.storage.ports import Batch, StoreError, StoreFullError
from tests.support.held_store import HeldStore
from tests.unit.fanout.bookkeeping import Bookkeeping

VINS = [make_vin(number) for number in range(5)]
AWAY = StoreError("no answer")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", 0.0)


async def _written(books: Bookkeeping) -> list[Receipt]:
    records = await books.store.streams.read(RECEIPTS, 0, 100)
    return [receipts_.decode(decode_record(record.value).payload) for record in records]


async def _turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def _fill(batch: Batch) -> None:
    batch.put("done", "done", b"")


def _store(books: Bookkeeping, others: Sequence[Receipt] = ()) -> asyncio.Task[None]:
    return books.spawn(books.receipts.store(_fill, others, Run(VINS, [1] * 5, "task_1", books.hub.time)))


async def test_each_is_there_once_and_counts_once() -> None:
    """Whatever becomes of a write, three times in a row, where batches are atomic and where they are not."""
    for atomic, outcome in itertools.product((True, False), ("refused", "lost", "written", "late")):
        try:
            await written_three_times(outcome, atomic=atomic)
        except AssertionError as error:
            raise AssertionError(f"{outcome}, atomic: {atomic}: {error}") from error


async def written_three_times(outcome: str, *, atomic: bool) -> None:
    store = HeldStore(atomic=atomic)
    books = await Bookkeeping.on(store)
    store.held = True
    other = books.receipt(State.REPLACED, "task_0", 0, 1)
    writing = _store(books, [other])
    for _ in range(3):  # again and again
        await _turns()
        error = StoreFullError("no room") if outcome == "refused" else AWAY
        store.fail(error, written=outcome == "written", late=outcome == "late")
    store.held = False
    store.let_go()
    await asyncio.wait_for(writing, 60)
    written = await _written(books)
    assert [State.ACCEPTED] * 5 + [State.REPLACED] == [receipt.state for receipt in written]
    assert {*VINS} == {receipt.vin for receipt in written}
    assert {State.ACCEPTED: 5} == books.states("task_1")
    assert {State.REPLACED: 1} == books.states("task_0")
    assert "done" in store.records_of("done")
    assert 0 == books.counters["ledger_doubts"]
    assert books.counters["receipts_not_stored"]
    await books.ledger.checkpoint()
    books = await books.crash()
    assert {State.ACCEPTED: 5} == books.states("task_1")
    await books.stop()


async def test_a_part_that_is_there_is_not_written_again() -> None:
    store = HeldStore(atomic=False)
    books = await Bookkeeping.on(store)
    store.held = True
    writing = _store(books)
    await _turns()
    stream = store.inner.streams
    whole = stream.apply_append

    def some(name: str, values: Sequence[bytes], now: float) -> list[int]:
        return whole(name, values[:2], now)

    stream.apply_append = some  # type: ignore[method-assign,assignment]
    store.fail(AWAY, written=True)
    stream.apply_append = whole  # type: ignore[method-assign]
    store.held = False
    await asyncio.wait_for(writing, 60)
    assert VINS == [receipt.vin for receipt in await _written(books)]
    assert {State.ACCEPTED: 5} == books.states("task_1")
    books = await books.crash()
    assert {State.ACCEPTED: 5} == books.states("task_1")
    await books.stop()


async def test_many_that_are_in_doubt_read_the_stream_once() -> None:
    store = HeldStore()
    books = await Bookkeeping.on(store)
    for number in range(20):
        await books.accepted(f"task_{number}", range(3))
    store.held = True
    writings = [
        books.spawn(books.receipts.store(_fill, [books.receipt(State.SENT, f"task_{number}", 0)]))
        for number in range(20)
    ]
    await _turns()
    for number in range(20):
        store.fail(AWAY, written=bool(number % 2))
    offsets: list[int] = []
    read = store.streams.read

    async def counted(stream: str, after: int, limit: int) -> list[object]:
        offsets.append(after)
        return await read(stream, after, limit)  # type: ignore[return-value]

    store.streams.read = counted  # type: ignore[method-assign,assignment]
    store.held = False
    await asyncio.wait_for(asyncio.gather(*writings), 60)
    assert 1 == offsets.count(0), "it was read from the beginning more than once"
    assert 80 == len(await _written(books))
    await books.stop()
