"""What operators decide and see, over kills, collections and changed options, in the world of the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest

from motorcade.core.receipt import LATE_ACK, State
from motorcade.core.recent import RecentSet
from motorcade.mqtt.packets import Publish
from motorcade.plugins.fanout.record import BatchRecord, DataRecord, decode_batch, decode_data, encode
from motorcade.plugins.fanout.tables import BATCHES, DATA, STATE, TRIGGER, UNSWEPT
from motorcade.storage.memory import MemoryRecords
from tests.unit.fanout.test_model import ACK_TIMEOUT, OPTIONS, RETENTION, VINS, Machine, Sent


@pytest.fixture
def unjudged() -> Iterator[Machine]:
    """The same, but for counts that are forgotten, and decisions that the model does not hear of."""
    machine = Machine()
    try:
        machine.start(atomic=True)
        yield machine
    finally:
        machine.abandon()


def states(world: Machine, request: str = "r0") -> dict[State, int]:
    found: dict[State, int] = world.run(world.service.status(request)).states
    return found


def test_a_cancellation_goes_on_after_a_kill(world: Machine) -> None:
    """Its collection is taken up by the next start, not half an hour later."""
    world.publish([0, 1, 2])
    world.store.held_reads = True  # the collection finds nothing out
    world.cancel()
    assert {State.ACCEPTED: 3} == states(world)
    world.kill()
    assert {State.CANCELLED: 3} == states(world)
    assert world.run(world.store.inner.records.get(STATE, UNSWEPT, world.now)) is None, "nothing is left to do"


def test_a_cancellation_goes_on_after_a_kill_though_a_collection_ended_while_it_was_stored(
    world: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That collection did not know of it, and must not say that everything is done."""
    world.publish([0, 1, 2])
    store, records = world.store, world.store.inner.records

    async def delete(collection: str, key: str) -> bool:
        return await store.wait(lambda: records.apply_delete(collection, key), removes=True)

    world.hold()
    with monkeypatch.context() as patch:
        patch.setattr(records, "delete", delete)  # behind the writes before it
        world.cancel()
        world.collect()
        world.kill(2)
    assert {State.CANCELLED: 3} == states(world)


def test_a_collection_waits_only_for_receipts_of_what_happened_before(world: Machine) -> None:
    """A fleet that goes on acknowledging does not hold it up."""
    for which in (0, 1):
        world.connect(which, subscribes=True)
    world.publish([0, 1])
    world.hold()
    world.answer()
    settled: asyncio.Task[None] = world.loop.create_task(world.plugin.receipts.settle())
    world.go_on()
    world.answer(1)
    assert 2 == world.plugin.receipts.unwritten and not settled.done()
    world.let_go(1)
    assert 1 == world.plugin.receipts.unwritten and settled.done()


def test_a_late_answer_is_told_however_much_has_ended_since(world: Machine) -> None:
    world.connect(subscribes=True)
    for _ in range(2):
        world.publish()
    world.plugin.table.ended = RecentSet(1)  # others have taken its place
    world.answer()
    assert [LATE_ACK] == [receipt.reason for receipt in world.receipts() if receipt.reason == LATE_ACK]


@pytest.mark.parametrize("outcome", ["refused", "lost"])
def test_a_late_answer_is_told_behind_the_end_that_has_to_be_written_again(world: Machine, outcome: str) -> None:
    world.connect(subscribes=True)
    world.publish()
    world.hold()
    world.publish()
    world.let_go(1)  # it has replaced the first, and its receipts wait
    world.answer()
    world.fail(outcome)
    world.work_again()
    world.pass_time(ACK_TIMEOUT)
    told = [receipt.reason for receipt in world.receipts() if receipt.reason]
    assert ["reissued", LATE_ACK] == told


def test_a_cancellation_during_a_collection_has_one_of_its_own(world: Machine) -> None:
    world.publish([0, 1, 2])
    world.store.held_reads = True
    world.collect()
    world.cancel()
    world.work_again()
    world.go_on()
    assert {State.CANCELLED: 3} == states(world)


def test_a_pause_behind_a_cancellation_that_is_being_stored_does_not_undo_it(world: Machine) -> None:
    world.publish()
    world.store.held = True
    world.cancel()
    world.pause()
    world.work_again()
    world.go_on()
    assert {State.CANCELLED: 1} == states(world)
    assert "paused" == world.run(world.service.status("r0")).status


def test_a_request_with_nothing_pending_is_complete(world: Machine) -> None:
    world.connect(subscribes=True)
    world.publish([0, 1])
    view = world.run(world.service.status("r0"))
    assert ("active", 2) == (view.status, view.pending)
    world.answer()
    world.connect(1, subscribes=True)
    world.answer(1)
    view = world.run(world.service.status("r0"))
    assert ("complete", 0, view.last_at) == (view.status, view.pending, view.since)
    assert ["complete"] == [found.status for found in world.run(world.service.requests("", 10))]
    world.publish()
    assert "active" == world.run(world.service.status("r0")).status


def test_targets_that_are_pending(world: Machine) -> None:
    """Accepted, sent or retried: each with its last receipt, page by page."""
    world.connect(subscribes=True)
    world.connect(1, subscribes=True)
    world.publish([0, 1, 2])
    world.answer()
    found = world.run(world.service.targets("r0", "pending", "", 10))
    assert [(VINS[1], State.SENT), (VINS[2], State.ACCEPTED)] == [(target.vin, target.state) for target in found]
    (first,) = world.run(world.service.targets("r0", "pending", "", 1))
    (second,) = world.run(world.service.targets("r0", "pending", first.delivery_id, 1))
    assert [VINS[1], VINS[2]] == [first.vin, second.vin]


def test_a_lowered_retention_holds_for_what_is_stored(unjudged: Machine) -> None:
    """Data and batch ids that were stored when it was longer."""
    world = unjudged
    world.publish(two=True, named=True)
    world.publish([1], "r1", two=True)
    world.pass_time(20.0)
    world.run(world.plugins.reload("fanout", OPTIONS | {"data_retention": 10.0}))
    world.go_on()
    fields = {"ids": [VINS[2]], "request_id": "r2", "data_id": "d1"}
    world.batches[901] = Sent(world.now, "r2", b"")
    world.say(world.publisher, Publish(TRIGGER, json.dumps(fields).encode(), 1, packet_id=901))
    world.go_on()
    assert not world.batches and 1 == world.loaded.context.counters["batches_without_data"]
    for collection in (DATA, BATCHES):
        assert not world.store.inner.records.collections.get(collection), collection
    assert {State.EXPIRED: 1} == states(world)


def test_what_was_written_since_a_collection_has_looked_stays(
    unjudged: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old data that is published again, an old id that is used again, while they are about to be removed."""
    world = unjudged
    world.publish(two=True, named=True)
    world.pass_time(20.0)
    scan = MemoryRecords.scan
    decoders: dict[str, Callable[[bytes], DataRecord | BatchRecord]] = {DATA: decode_data, BATCHES: decode_batch}

    async def scanned(
        self: MemoryRecords, collection: str, now: float, feed: int | None = None
    ) -> AsyncIterator[tuple[str, bytes]]:
        assert feed is None
        found = [item async for item in scan(self, collection, now)]
        for key, value in found:
            yield key, value
        for key, value in found if collection in decoders else []:
            record = msgspec.structs.replace(decoders[collection](value), time=now)
            await self.put(collection, key, encode(record), now + 10.0)

    monkeypatch.setattr(MemoryRecords, "scan", scanned)
    world.run(world.plugins.reload("fanout", OPTIONS | {"data_retention": 10.0}))
    world.go_on()
    for collection in decoders:
        assert 1 == len(world.store.records_of(collection)), collection


def test_there_is_no_data_that_was_never_published_however_long_it_is_kept(unjudged: Machine) -> None:
    """A retention that goes back to before the epoch."""
    world = unjudged
    world.run(world.plugins.reload("fanout", OPTIONS | {"data_retention": 1e10}))
    fields = {"ids": [VINS[0]], "request_id": "r0", "data_id": "unknown"}
    world.batches[901] = Sent(world.now, "r0", b"")
    world.say(world.publisher, Publish(TRIGGER, json.dumps(fields).encode(), 1, packet_id=901))
    world.go_on()
    assert 1 == world.loaded.context.counters["batches_without_data"]
    assert not world.pending(VINS[0])


def test_a_paused_request_whose_counts_are_forgotten_can_be_resumed(unjudged: Machine) -> None:
    """It is listed, resumed and cancelled like any other, though `max_requests` has pushed its counts out."""
    world = unjudged
    world.connect(subscribes=True)
    for name in ("r0", "r1"):
        world.publish(request=name)
        world.answer()
        world.pause(name)
    world.run(world.plugins.reload("fanout", OPTIONS | {"max_requests": 1}))
    world.publish(request="r2")
    world.answer()
    listed = [(view.request_id, view.status) for view in world.run(world.service.requests("", 10))]
    assert [("r0", "paused"), ("r1", "paused"), ("r2", "complete")] == listed
    assert ["r0"] == [view.request_id for view in world.run(world.service.requests("", 1))]
    assert ["r1"] == [view.request_id for view in world.run(world.service.requests("r0", 1))]
    assert "cancelled" == world.run(world.service.cancel("r1")).status
    assert "active" == world.run(world.service.resume("r0")).status
    world.paused.clear()
    world.publish()
    assert world.cars[0].flying, "nothing holds it"


def test_tables_of_requests_shrink(unjudged: Machine) -> None:
    """What was decided goes with the retention of messages, counts go with that of receipts."""
    world = unjudged
    for number in range(20):
        world.publish(request=f"q{number}")
        world.run(world.service.cancel(f"q{number}"))
    world.go_on()
    table, counters = world.plugin.table, world.plugin.counters
    assert 20 == len(table.requests) == len(counters)
    world.pass_time(1.1 * RETENTION)
    world.collect()
    assert not table.requests and 20 == len(counters)
    world.run(world.plugins.reload("fanout", OPTIONS | {"receipts_retention": RETENTION}))
    world.go_on()
    assert not len(counters)


def test_histories_do_not_wait(world: Machine) -> None:
    """What is told to wait is what waits: histories are counted, also by the next process, up to their bound."""
    world.run(world.plugins.reload("fanout", OPTIONS | {"history": 3}))
    world.connect(subscribes=True)
    for _ in range(5):
        world.publish()
        world.answer()
    world.publish([1, 2])
    waiting = world.run(world.store.inner.figures()).entries - world.plugins.history()
    assert (3, 2) == (world.plugins.history(), waiting)
    world.kill()
    assert 3 == world.plugins.history()
    world.collect()
    assert 3 == world.plugins.history()
