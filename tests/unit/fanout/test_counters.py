"""Counts per request: right while everything runs, after a crash, and when a part of a write is in the stream."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from motorcade.commit import Commit
from motorcade.core.receipt import FINAL, Receipt, State, decode
from motorcade.core.record import decode as decode_record
from motorcade.core.vin import make_vin
from motorcade.plugins.fanout import counters as module
from motorcade.plugins.fanout import receipt_writer
from motorcade.plugins.fanout.counters import REFUSED, Block
from motorcade.plugins.fanout.receipt_format import AcceptedRun
from motorcade.plugins.fanout.tables import LEDGER, RECEIPTS, owner_of
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Draft, Store, StoreError, StoreFullError
from tests.support.held_store import HeldStore
from tests.unit.fanout.receipt_process import ReceiptProcess


async def test_each_delivery_counts_in_the_state_it_is_in(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", range(8))
    await process.say(State.SENT, "task_1", 0, 1, 2, 3, 4, attempt=1)
    await process.say(State.RETRIED, "task_1", 0, 1, attempt=1)
    await process.say(State.SENT, "task_1", 0, attempt=2)
    await process.say(State.ACKED, "task_1", 2, 0, attempt=1)
    await process.say(State.FAILED, "task_1", 3, attempt=10)
    await process.say(State.EXPIRED, "task_1", 7)
    await process.say(State.CANCELLED, "task_1", 6)
    expected = {
        State.ACCEPTED: 1,
        State.SENT: 1,
        State.RETRIED: 1,
        State.ACKED: 2,
        State.FAILED: 1,
        State.EXPIRED: 1,
        State.CANCELLED: 1,
    }
    assert expected == process.states("task_1")
    tally = process.counters.find("task_1")
    assert tally is not None
    assert (8, 3, 3) == (tally.accepted, tally.pending, process.counters.pending)
    await process.accepted("task_2", range(4))
    await process.counters.checkpoint()
    await process.say(State.ACKED, "task_2", 1)
    process = await process.crash()  # some of it is in a checkpoint, some is read again
    assert 6 == process.counters.pending
    await process.stop()


async def test_after_a_checkpoint_only_the_rest_is_read_again(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", range(10))
    await process.say(State.SENT, "task_1", 1, 2)
    await process.counters.checkpoint()
    await process.say(State.ACKED, "task_1", 1)
    await process.accepted("task_2", [5])
    process = await process.crash()
    assert {State.ACCEPTED: 8, State.SENT: 1, State.ACKED: 1} == process.states("task_1")
    assert {State.ACCEPTED: 1} == process.states("task_2")
    assert 2 == process.counted["ledger_replayed"]
    await process.counters.checkpoint()
    process = await process.crash()
    assert {State.ACCEPTED: 8, State.SENT: 1, State.ACKED: 1} == process.states("task_1")
    assert 0 == process.counted["ledger_replayed"]
    await process.stop()


async def test_a_tally_that_is_newer_than_the_head_counts_nothing_twice(store: Store) -> None:
    """Where a checkpoint is not one write, a crash may leave its beginning."""
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1, 2])
    process = await process.crash()
    await process.accepted("task_1", [3])
    await process.accepted("task_2", [1])
    await process.counters.checkpoint()
    await process.say(State.ACKED, "task_1", 3)
    assert await store.records.delete(LEDGER, "head")
    assert await store.records.delete(LEDGER, "r/task_2")
    process = await process.crash()
    assert {State.ACCEPTED: 2, State.ACKED: 1} == process.states("task_1")
    assert {State.ACCEPTED: 1} == process.states("task_2")
    await process.stop()


async def test_nothing_to_tell_is_nothing_to_write(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1])
    await process.counters.checkpoint()
    before = (await store.figures()).writes
    await process.counters.checkpoint()
    assert before == (await store.figures()).writes
    await process.stop()


async def test_a_request_knows_where_its_receipts_lie(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    for number in range(3):
        await process.accepted(f"task_{number}", [number])
        await process.counters.checkpoint()
    tally = process.counters.find("task_1")
    assert tally is not None
    assert (1, 2) == (tally.begin, tally.end)
    await process.say(State.ACKED, "task_1", 1)
    assert (1, 4) == (tally.begin, tally.end)
    process = await process.crash()
    tally = process.counters.find("task_1")
    assert tally is not None
    assert (1, 4) == (tally.begin, tally.end)
    await process.stop()


async def test_what_others_have_written_into_the_stream_is_counted_in_its_turn(store: Store) -> None:
    """A write of the process before may be late, or a part of one of ours is there, and it is written again."""
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1, 2])
    acked = [process.receipt(State.ACKED, "task_1", 1)]
    await process.write([*acked, process.receipt(State.ACCEPTED, "task_2", 3, 1)], told=False)
    await process.write(acked)
    assert {State.ACCEPTED: 2} == process.states("task_1"), "what lies between is read first"
    await process.counters.checkpoint()
    for _ in range(2):
        running = process.spawn(process.counters.run())
        await process.counters.ready()
        running.cancel()
        assert {State.ACCEPTED: 1, State.ACKED: 1} == process.states("task_1")
        assert {State.ACCEPTED: 1} == process.states("task_2")
        assert 5 == process.counters.offset
        process = await process.crash()
    await process.stop()


async def test_blocks_are_counted_in_the_order_of_the_stream(store: Store) -> None:
    """On Redis a later write may be answered first."""
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1, 2])
    first, second, third = ([process.receipt(State.ACKED, "task_1", n, 1)] for n in (1, 2, 1))
    blocks = [Block(receipts) for receipts in (first, second, third)]
    for block in blocks:
        process.counters.begin(block)
    offsets = await store.streams.append(RECEIPTS, process.receipts.format.values([*first, *second], 1.0), 1.0)
    blocks[1].first = blocks[1].last = offsets[1]
    process.counters.count()
    assert {State.ACCEPTED: 2} == process.states("task_1")
    await process.counters.checkpoint()
    after = await ReceiptProcess.on(store)
    assert {State.ACKED: 2} == after.states("task_1"), "the checkpoint has neither of both"
    blocks[0].first = blocks[0].last = offsets[0]
    blocks[2].last = REFUSED
    process.counters.count()
    assert {State.ACKED: 2} == process.states("task_1")
    assert offsets[1] == process.counters.offset
    await process.stop()


# As the version before has stored it: [1, offset, origin, upto, also, accepted, finals, sent, retried, first, last,
# begin, end]; an end of 0 says that some of its receipts may lie behind the offset.
OLD = {"r/task_1": [1, 4, b"origin", 90, [95], 2, {"acked": 1}, [f"{make_vin(2)}.1"], [], 1000.0, 1000.0, 0, 4]}
OLD |= {"r/task_2": [1, 4, b"origin", 90, [95], 2, {}, [], [], 1000.0, 1000.0, 4, 0], "head": [1, 4]}


async def test_counts_of_the_version_before_are_read_or_made_from_the_stream(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1, 2])
    await process.say(State.SENT, "task_1", 2)
    await process.say(State.ACKED, "task_1", 1)
    await process.accepted("task_2", [3, 4])
    await process.say(State.ACKED, "task_2", 3)
    await process.say(State.ACKED, "task_1", 2)
    for key, value in OLD.items():
        await store.records.put(LEDGER, key, msgspec.msgpack.encode(value))
    for replayed in (4, 0):
        process = await process.crash()
        assert {State.ACKED: 2} == process.states("task_1")
        assert {State.ACCEPTED: 1, State.ACKED: 1} == process.states("task_2")
        assert 1 == process.counters.pending
        assert replayed == process.counted["ledger_replayed"]
        await process.counters.checkpoint()
    await process.stop()


async def test_what_is_written_during_a_replay_counts_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 2)
    monkeypatch.setattr(module, "LOAD_STEPS", 1)
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", range(20))
    process = await process.crash()  # has read a page, the rest follows
    assert 2 == sum(process.states("task_1").values())
    await process.say(State.ACKED, "task_1", *range(7))
    await process.accepted("task_2", [1, 2])
    running = process.spawn(process.counters.run())
    await process.counters.ready()
    assert {State.ACCEPTED: 13, State.ACKED: 7} == process.states("task_1")
    assert {State.ACCEPTED: 2} == process.states("task_2")
    assert not running.done()
    await process.stop()


async def test_the_oldest_that_have_ended_go_when_there_are_too_many(store: Store) -> None:
    process = await ReceiptProcess.on(store, max_requests=4)
    for number in range(4):
        process.hub.time += 1
        await process.accepted(f"task_{number}", [number])
    await process.say(State.ACKED, "task_2", 2)
    process.hub.time += 1
    await process.say(State.ACKED, "task_1", 1)
    await process.counters.checkpoint()
    await process.accepted("task_4", [4])
    assert ["task_0", "task_1", "task_3", "task_4"] == [tally.request_id for tally in process.counters.after("")]
    await process.accepted("task_5", [5])
    assert ["task_0", "task_3", "task_4", "task_5"] == [tally.request_id for tally in process.counters.after("")]
    await process.accepted("task_6", [6])  # none has ended: the one that was quiet longest
    assert ["task_3", "task_4", "task_5", "task_6"] == [tally.request_id for tally in process.counters.after("")]
    assert 3 == process.counted["ledger_forgotten"]
    assert 4 == process.counters.pending
    await process.counters.checkpoint()
    assert 5 == len([key async for key, _ in store.records.scan(LEDGER, process.hub.time)])  # four and the head
    process = await process.crash()
    assert ["task_3", "task_4", "task_5", "task_6"] == [tally.request_id for tally in process.counters.after("")]
    await process.stop()


async def test_damaged_records_are_counted_and_left_out(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1])
    await store.streams.append(RECEIPTS, [b"nonsense", b"\x93\x01\xa1t\xc4\x01x"], 1.0)
    await store.records.put(LEDGER, "r/task_9", b"nonsense")
    process = await process.crash()
    assert {State.ACCEPTED: 1} == process.states("task_1")
    assert 3 == process.counted["ledger_unreadable"]
    await process.stop()


async def test_more_deliveries_than_are_known_to_be_sent_count_as_accepted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", range(4))
    await process.say(State.SENT, "task_1", 0, 1, 2)
    assert {State.ACCEPTED: 2, State.SENT: 2} == process.states("task_1")
    assert 1 == process.counted["ledger_open_not_kept"]
    await process.say(State.ACKED, "task_1", 0, 2)
    await process.say(State.SENT, "task_1", 3)
    assert {State.SENT: 2, State.ACKED: 2} == process.states("task_1")
    await process.stop()


async def test_what_has_ended_stays_so(store: Store) -> None:
    """A receipt may be stored after the last one of its delivery, by another writer; it is no news."""
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1, 2])
    await process.say(State.REPLACED, "task_1", 1)
    await process.say(State.SENT, "task_1", 1)
    await process.say(State.ACKED, "task_1", 1)
    assert {State.ACCEPTED: 1, State.REPLACED: 1} == process.states("task_1")
    process = await process.crash()
    assert {State.ACCEPTED: 1, State.REPLACED: 1} == process.states("task_1")
    await process.stop()


class Torn(MemoryStore):
    """A store like Redis: a batch may be cut off in the middle."""

    atomic = False


async def test_an_entry_whose_end_is_written_down_goes_after_a_crash() -> None:
    store = Torn()
    await store.open()
    process = await ReceiptProcess.on(store)
    appended = await store.mailboxes.append([owner_of(make_vin(1))], Draft(b"entry"), process.hub.time)
    await process.accepted("task_1", [1])
    assert 1 == appended[0].position
    await process.say(State.ACKED, "task_1", 1)  # and dies before the entry is removed
    process = await process.crash()
    assert [] == await store.mailboxes.read(owner_of(make_vin(1)), 0, 10, process.hub.time)
    await process.stop()


async def test_the_counts_are_those_of_the_stream_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, ends, writes cut off in the middle, checkpoints and crashes in any order, several writes at a time."""
    monkeypatch.setattr(module, "STEP", 3)
    monkeypatch.setattr(module, "GROUP", 2)
    monkeypatch.setattr(receipt_writer, "RETRY", 0.0)
    for seed in range(30):
        try:
            await anything_happens(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


async def anything_happens(seed: int) -> None:
    chance = random.Random(seed)
    store = HeldStore()
    process = await ReceiptProcess.on(store)
    process.counters._store = store.inner  # checkpoints are written at once
    truth: dict[str, tuple[str, State]] = {}  # delivery -> request, last state
    writing: list[tuple[list[Receipt], Commit[None]]] = []

    def happens(receipts: list[Receipt]) -> None:
        for receipt in receipts:
            truth[receipt.delivery_id] = receipt.request_id, receipt.state

    async def turn() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def accept() -> None:
        request_id, vehicles = f"task_{chance.randrange(5)}", chance.sample(range(20), chance.randint(1, 6))
        process.positions.update(vehicles)
        receipts = [process.receipt(State.ACCEPTED, request_id, vehicle) for vehicle in vehicles]
        positions = [process.positions[vehicle] for vehicle in vehicles]
        run = AcceptedRun([receipt.vin for receipt in receipts], positions, request_id, process.hub.time)
        writing.append((receipts, process.begin([], run)))

    async def change() -> None:
        """Of deliveries that have not ended, and of which nothing is under way."""
        busy = {receipt.delivery_id for receipts, _ in writing for receipt in receipts}
        pending = [name for name, (_, state) in truth.items() if state not in FINAL and name not in busy]
        receipts = []
        for name in chance.sample(pending, min(len(pending), chance.randint(1, 4))):
            vin, _, position = name.partition(".")
            vehicle = next(number for number in range(20) if make_vin(number) == vin)
            state = chance.choice([State.SENT, State.RETRIED, State.ACKED, State.FAILED, State.EXPIRED])
            receipts.append(process.receipt(state, truth[name][0], vehicle, int(position)))
        if receipts:
            writing.append((receipts, process.begin(receipts)))

    async def store_some() -> None:
        store.let_go(chance.randint(1, 3))

    async def refuse() -> None:
        if store.waiting:
            store.fail(StoreFullError("no room"))

    async def cut_off() -> None:
        """A part is stored, the rest refused: it is written again."""
        if store.waiting:
            whole = store.inner.streams.apply_append

            def some(name: str, values: Sequence[bytes], now: float) -> list[int]:
                return whole(name, list(values)[: chance.randint(0, len(values))], now)

            store.inner.streams.apply_append = some  # type: ignore[method-assign,assignment]
            store.fail(StoreError("the rest is refused"), written=True)
            store.inner.streams.apply_append = whole  # type: ignore[method-assign]

    async def pause() -> None:
        await process.counters._read()
        await process.counters.checkpoint()

    async def crash() -> None:
        """What was stored without a word is found in the stream."""
        nonlocal process
        store.die(chance.randint(0, 2))
        writing.clear()
        process.receipts.close()
        process = await process.crash()
        process.counters._store = store.inner
        for record in await store.streams.read(RECEIPTS, 0, 100_000):
            receipt = decode(decode_record(record.value).payload)
            known = truth.get(receipt.delivery_id)
            if known is None or known[1] not in FINAL:
                truth[receipt.delivery_id] = receipt.request_id, receipt.state

    store.held = True
    for _ in range(150):
        actions = [accept, change, store_some, refuse, cut_off, pause, crash]
        await chance.choices(actions, [4, 6, 8, 1, 1, 2, 1])[0]()
        await turn()
        for receipts, commit in [item for item in writing if item[1].done]:
            happens(receipts)
            writing.remove((receipts, commit))
    store.held = False
    store.let_go()
    for receipts, commit in writing:
        await asyncio.wait_for(commit, 60)
        happens(receipts)
    await process.counters._read()
    expected: dict[str, Counter[State]] = {}
    for request_id, state in truth.values():
        expected.setdefault(request_id, Counter())[state] += 1
    for _ in range(2):
        assert {name: dict(states) for name, states in expected.items()} == {
            tally.request_id: tally.states() for tally in process.counters.after("")
        }
        await process.counters.checkpoint()
        process = await process.crash()
    await process.stop()
