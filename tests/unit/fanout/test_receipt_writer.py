"""Receipts are written until they are stored, are counted once, and are told to readers and subscribers then."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from motorcade.core import receipt as receipts_
from motorcade.core.receipt import Receipt, State
from motorcade.core.record import decode as decode_record
from motorcade.core.vin import make_vin
from motorcade.plugins.fanout import receipt_writer as module
from motorcade.plugins.fanout.receipt_format import AcceptedRun
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.storage.ports import Batch, Store, StoreError, StoreFullError
from tests.support.held_store import HeldStore
from tests.unit.fanout.bookkeeping import Bookkeeping
from tests.unit.streams.node import StreamsNode

VINS = [make_vin(number) for number in range(5)]


async def _written(books: Bookkeeping) -> list[Receipt]:
    records = await books.store.streams.read(RECEIPTS, 0, 100)
    return [receipts_.decode(decode_record(record.value).payload) for record in records]


async def test_what_is_refused_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times in a row; nothing of it was stored, or a part, or all but the answer."""
    monkeypatch.setattr(module, "RETRY", 0.0)
    for atomic, calls in itertools.product((True, False), (None, 0, 1, 2)):
        try:
            await written_three_times(atomic=atomic, calls=calls)
        except AssertionError as error:
            raise AssertionError(f"{calls} calls were carried out, atomic: {atomic}: {error}") from error


async def written_three_times(*, atomic: bool, calls: int | None) -> None:
    store = HeldStore(atomic=atomic)
    books = await Bookkeeping.on(store)
    store.held = True
    also = Batch()
    also.put("done", "done", b"")
    other = books.receipt(State.REPLACED, "task_0", 0, 1)
    commit = books.begin([other], AcceptedRun(VINS, [1] * 5, "task_1", books.hub.time), also)
    for _ in range(3):
        store.cut = calls
        error = StoreFullError("no room") if calls is None else StoreError("the rest is refused")
        store.fail(error, written=calls is not None)
        store.cut = None
        for _ in range(10):
            await asyncio.sleep(0)
        assert not commit.done and not books.hub.routed, "nothing is told before it is stored"
    store.let_go()
    store.held = False
    await commit
    await books.counters._read()
    written = [receipt.state for receipt in await _written(books)]
    assert ([State.ACCEPTED] * 5 + [State.REPLACED]) * (4 if calls else 1) == written
    assert {State.ACCEPTED: 5} == books.states("task_1")
    assert {State.REPLACED: 1} == books.states("task_0")
    assert "done" in store.records_of("done")
    assert 3 == books.counted["receipts_not_stored"]
    assert 5 == books.counted["receipts_accepted"]
    await books.counters.checkpoint()
    for _ in range(2):
        books = await books.crash()
        assert {State.ACCEPTED: 5} == books.states("task_1")
        await store.records.delete("fanout-ledger", "head")  # the second time, everything is counted from the stream
        await store.records.delete("fanout-ledger", "r/task_1")
    await books.stop()


def test_readers_of_the_stream_get_receipts() -> None:
    """Those that wait are woken; those that come later read to the end, without another receipt to wake them."""
    with StreamsNode.on() as node:
        node.run(node.streams.open(RECEIPTS, "fanout"))
        dashboard = node.reader("dashboard", stream=RECEIPTS)
        books = node.run(Bookkeeping.on(node.held))
        books.context.offer("streams", node.streams)
        node.run(books.accepted("task_1", range(10)))
        node.run(books.say(State.SENT, "task_1", 1))
        assert [State.ACCEPTED] * 10 + [State.SENT] == states(dashboard.drain())
        earliest = node.reader("earliest", stream=f"{RECEIPTS}/earliest")
        third, latest = (node.reader(f"from {offset}", offset, stream=RECEIPTS) for offset in ("3", "latest"))
        assert (11, 9, 0) == (len(earliest.drain()), len(third.drain()), len(latest.drain()))
        node.run(books.say(State.ACKED, "task_1", 1))
        assert [State.ACKED] == states(latest.drain())
        node.run(books.stop())


def states(payloads: list[bytes]) -> list[State]:
    return [receipts_.decode(payload).state for payload in payloads]


async def test_a_slow_broker_loses_copies_but_no_receipts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    books = await Bookkeeping.on(store)
    monkeypatch.setattr(module, "MAX_UNPUBLISHED", 3)
    await books.accepted("task_1", range(10))
    assert 7 == books.counted["receipts_not_published"]
    assert {State.ACCEPTED: 10} == books.states("task_1")
    await books.stop()
