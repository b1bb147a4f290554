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
from tests.unit.fanout.receipt_process import ReceiptProcess
from tests.unit.streams.node import StreamsNode

VINS = [make_vin(number) for number in range(5)]


async def _written(process: ReceiptProcess) -> list[Receipt]:
    records = await process.store.streams.read(RECEIPTS, 0, 100)
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
    process = await ReceiptProcess.on(store)
    store.held = True
    also = Batch()
    also.put("done", "done", b"")
    other = process.receipt(State.REPLACED, "task_0", 0, 1)
    commit = process.begin([other], AcceptedRun(VINS, [1] * 5, "task_1", process.hub.time), also)
    for _ in range(3):
        store.cut = calls
        error = StoreFullError("no room") if calls is None else StoreError("the rest is refused")
        store.fail(error, written=calls is not None)
        store.cut = None
        for _ in range(10):
            await asyncio.sleep(0)
        assert not commit.done and not process.hub.routed, "nothing is told before it is stored"
    store.let_go()
    store.held = False
    await commit
    await process.counters._read()
    written = [receipt.state for receipt in await _written(process)]
    assert ([State.ACCEPTED] * 5 + [State.REPLACED]) * (4 if calls else 1) == written
    assert {State.ACCEPTED: 5} == process.states("task_1")
    assert {State.REPLACED: 1} == process.states("task_0")
    assert "done" in store.records_of("done")
    assert 3 == process.counted["receipts_not_stored"]
    assert 5 == process.counted["receipts_accepted"]
    await process.counters.checkpoint()
    for _ in range(2):
        process = await process.crash()
        assert {State.ACCEPTED: 5} == process.states("task_1")
        await store.records.delete("fanout-ledger", "head")  # the second time, everything is counted from the stream
        await store.records.delete("fanout-ledger", "r/task_1")
    await process.stop()


def test_readers_of_the_stream_get_receipts() -> None:
    """Those that wait are woken; those that come later read to the end, without another receipt to wake them."""
    with StreamsNode.on() as node:
        node.run(node.streams.open(RECEIPTS, "fanout"))
        dashboard = node.reader("dashboard", stream=RECEIPTS)
        process = node.run(ReceiptProcess.on(node.held))
        process.context.offer("streams", node.streams)
        node.run(process.accepted("task_1", range(10)))
        node.run(process.say(State.SENT, "task_1", 1))
        assert [State.ACCEPTED] * 10 + [State.SENT] == states(dashboard.drain())
        earliest = node.reader("earliest", stream=f"{RECEIPTS}/earliest")
        third, latest = (node.reader(f"from {offset}", offset, stream=RECEIPTS) for offset in ("3", "latest"))
        assert (11, 9, 0) == (len(earliest.drain()), len(third.drain()), len(latest.drain()))
        node.run(process.say(State.ACKED, "task_1", 1))
        assert [State.ACKED] == states(latest.drain())
        node.run(process.stop())


def states(payloads: list[bytes]) -> list[State]:
    return [receipts_.decode(payload).state for payload in payloads]


async def test_a_slow_broker_loses_copies_but_no_receipts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await ReceiptProcess.on(store)
    monkeypatch.setattr(module, "MAX_UNPUBLISHED", 3)
    await process.accepted("task_1", range(10))
    assert 7 == process.counted["receipts_not_published"]
    assert {State.ACCEPTED: 10} == process.states("task_1")
    await process.stop()
