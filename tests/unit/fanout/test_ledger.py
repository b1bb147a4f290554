"""Counts per request: right while everything runs, after a crash, and when nobody knows what the store has done."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from motorcade.core.receipt import FINAL, Receipt, State
from motorcade.core.vin import make_vin
from motorcade.plugins.fanout import ledger as module
from motorcade.plugins.fanout.tables import LEDGER, RECEIPTS, owner_of
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Draft, Store, StoreError
from tests.unit.fanout.bookkeeping import Bookkeeping


async def test_each_delivery_counts_in_the_state_it_is_in(store: Store) -> None:
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", range(8))
    await books.say(State.SENT, "task_1", 0, 1, 2, 3, 4, attempt=1)
    await books.say(State.RETRIED, "task_1", 0, 1, attempt=1)
    await books.say(State.SENT, "task_1", 0, attempt=2)
    await books.say(State.ACKED, "task_1", 2, 0, attempt=1)
    await books.say(State.FAILED, "task_1", 3, attempt=10)
    await books.say(State.EXPIRED, "task_1", 7)
    await books.say(State.CANCELLED, "task_1", 6)
    expected = {
        State.ACCEPTED: 1,
        State.SENT: 1,
        State.RETRIED: 1,
        State.ACKED: 2,
        State.FAILED: 1,
        State.EXPIRED: 1,
        State.CANCELLED: 1,
    }
    assert expected == books.states("task_1")
    tally = books.ledger.find("task_1")
    assert tally is not None
    assert (8, 3, 3) == (tally.accepted, tally.pending, books.ledger.pending)
    await books.accepted("task_2", range(4))
    await books.ledger.checkpoint()
    await books.say(State.ACKED, "task_2", 1)
    books = await books.crash()  # some of it is in a checkpoint, some is read again
    assert 6 == books.ledger.pending
    await books.stop()


async def test_after_a_checkpoint_only_the_rest_is_read_again(store: Store) -> None:
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", range(10))
    await books.say(State.SENT, "task_1", 1, 2)
    await books.ledger.checkpoint()
    await books.say(State.ACKED, "task_1", 1)
    await books.accepted("task_2", [5])
    books = await books.crash()
    assert {State.ACCEPTED: 8, State.SENT: 1, State.ACKED: 1} == books.states("task_1")
    assert {State.ACCEPTED: 1} == books.states("task_2")
    assert 2 == books.counters["ledger_replayed"]
    await books.ledger.checkpoint()
    books = await books.crash()
    assert {State.ACCEPTED: 8, State.SENT: 1, State.ACKED: 1} == books.states("task_1")
    assert 0 == books.counters["ledger_replayed"]
    await books.stop()


async def test_a_tally_that_is_newer_than_the_head_counts_nothing_twice(store: Store) -> None:
    """Where a checkpoint is not one write, a crash may leave its beginning."""
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", [1, 2])
    books = await books.crash()
    await books.accepted("task_1", [3])
    await books.accepted("task_2", [1])
    await books.ledger.checkpoint()
    await books.say(State.ACKED, "task_1", 3)
    assert await store.records.delete(LEDGER, "head")
    assert await store.records.delete(LEDGER, "r/task_2")
    books = await books.crash()
    assert {State.ACCEPTED: 2, State.ACKED: 1} == books.states("task_1")
    assert {State.ACCEPTED: 1} == books.states("task_2")
    await books.stop()


async def test_nothing_to_tell_is_nothing_to_write(store: Store) -> None:
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", [1])
    await books.ledger.checkpoint()
    before = (await store.figures()).writes
    await books.ledger.checkpoint()
    await books.ledger.tick()
    assert before == (await store.figures()).writes
    await books.stop()


async def test_a_request_knows_where_its_receipts_lie(store: Store) -> None:
    books = await Bookkeeping.on(store)
    for number in range(3):
        await books.accepted(f"task_{number}", [number])
        await books.ledger.checkpoint()
    tally = books.ledger.find("task_1")
    assert tally is not None
    assert (1, 2) == (tally.begin, tally.end)
    await books.say(State.ACKED, "task_1", 1)
    assert (1, 0) == (tally.begin, tally.end)
    books = await books.crash()
    tally = books.ledger.find("task_1")
    assert tally is not None
    assert (1, 4) == (tally.begin, tally.end)
    await books.stop()


async def test_receipts_of_which_nobody_knows_are_found_again_when_it_is_calm(store: Store) -> None:
    """The store has failed after it has written: the fan-out writes the same again, and each counts once."""
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", [1, 2])
    await books.ledger.checkpoint()
    acked = [books.receipt(State.ACKED, "task_1", 1)]
    values = await books.write(acked, told=False)
    books.receipts.failed(values, StoreError("no answer"))
    await books.ledger.tick()
    await books.write(acked)
    await books.say(State.ACKED, "task_1", 2)
    await books.ledger.checkpoint()  # writes nothing: what is counted is doubtful
    dead = await books.crash()
    assert {State.ACKED: 2} == dead.states("task_1")
    await dead.stop()
    books.hub.time += module.CALM
    await books.ledger.tick()
    assert {State.ACKED: 2} == books.states("task_1")
    assert 1 == books.counters["ledger_repeated"]
    await books.ledger.checkpoint()
    after = await books.crash()
    assert {State.ACKED: 2} == after.states("task_1")
    await after.stop()


async def test_a_block_of_which_nothing_is_heard_is_looked_for(store: Store) -> None:
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", [1, 2])
    first = [books.receipt(State.ACKED, "task_1", 1)]
    values = await books.write(first, told=False)
    await books.ledger.tick()
    assert 0 == books.counters["ledger_blocks_lost"]
    books.hub.time += module.LOST + 1
    await books.ledger.tick()
    assert 1 == books.counters["ledger_blocks_lost"]
    books.hub.time += module.CALM
    await books.ledger.tick()
    assert {State.ACCEPTED: 1, State.ACKED: 1} == books.states("task_1")
    books.receipts.written(first, values)  # it was only very late
    assert {State.ACCEPTED: 1, State.ACKED: 1} == books.states("task_1")
    await books.stop()


async def test_what_is_written_during_a_replay_counts_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 2)
    monkeypatch.setattr(module, "LOAD_STEPS", 1)
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", range(20))
    books = await books.crash()  # has read a page, the rest follows
    assert 2 == sum(books.states("task_1").values())
    acked = [books.receipt(State.ACKED, "task_1", number) for number in range(5)]
    values = await books.write(acked, told=False)
    await books.say(State.ACKED, "task_1", 5, 6)
    await books.accepted("task_2", [1, 2])
    running = books.spawn(books.ledger.run())
    await books.ledger.ready()
    books.receipts.written(acked, values)
    assert {State.ACCEPTED: 13, State.ACKED: 7} == books.states("task_1")
    assert {State.ACCEPTED: 2} == books.states("task_2")
    assert not running.done()
    await books.stop()


async def test_the_oldest_that_have_ended_go_when_there_are_too_many(store: Store) -> None:
    books = await Bookkeeping.on(store, max_requests=4)
    for number in range(4):
        books.hub.time += 1
        await books.accepted(f"task_{number}", [number])
    await books.say(State.ACKED, "task_2", 2)
    books.hub.time += 1
    await books.say(State.ACKED, "task_1", 1)
    await books.ledger.checkpoint()
    await books.accepted("task_4", [4])
    assert ["task_0", "task_1", "task_3", "task_4"] == [tally.request_id for tally in books.ledger.after("")]
    await books.accepted("task_5", [5])
    assert ["task_0", "task_3", "task_4", "task_5"] == [tally.request_id for tally in books.ledger.after("")]
    await books.accepted("task_6", [6])  # none has ended: the one that was quiet longest
    assert ["task_3", "task_4", "task_5", "task_6"] == [tally.request_id for tally in books.ledger.after("")]
    assert 3 == books.counters["ledger_forgotten"]
    assert 4 == books.ledger.pending
    await books.ledger.checkpoint()
    assert 5 == len([key async for key, _ in store.records.scan(LEDGER, books.hub.time)])  # four and the head
    books = await books.crash()
    assert ["task_3", "task_4", "task_5", "task_6"] == [tally.request_id for tally in books.ledger.after("")]
    await books.stop()


async def test_damaged_records_are_counted_and_left_out(store: Store) -> None:
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", [1])
    await store.streams.append(RECEIPTS, [b"nonsense", b"\x93\x01\xa1t\xc4\x01x"], 1.0)
    await store.records.put(LEDGER, "r/task_9", b"nonsense")
    books = await books.crash()
    assert {State.ACCEPTED: 1} == books.states("task_1")
    assert 3 == books.counters["ledger_unreadable"]
    await books.stop()


async def test_more_deliveries_than_are_known_to_be_sent_count_as_accepted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 2)
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", range(4))
    await books.say(State.SENT, "task_1", 0, 1, 2)
    assert {State.ACCEPTED: 2, State.SENT: 2} == books.states("task_1")
    assert 1 == books.counters["ledger_open_not_kept"]
    await books.say(State.ACKED, "task_1", 0, 2)
    await books.say(State.SENT, "task_1", 3)
    assert {State.SENT: 2, State.ACKED: 2} == books.states("task_1")
    await books.stop()


async def test_what_has_ended_stays_so(store: Store) -> None:
    """A receipt may be stored after the last one of its delivery, by another writer; it is no news."""
    books = await Bookkeeping.on(store)
    await books.accepted("task_1", [1, 2])
    await books.say(State.REPLACED, "task_1", 1)
    await books.say(State.SENT, "task_1", 1)
    await books.say(State.ACKED, "task_1", 1)
    assert {State.ACCEPTED: 1, State.REPLACED: 1} == books.states("task_1")
    books = await books.crash()
    assert {State.ACCEPTED: 1, State.REPLACED: 1} == books.states("task_1")
    await books.stop()


class Torn(MemoryStore):
    """A store like Redis: a batch may be cut off in the middle."""

    atomic = False


async def test_an_entry_whose_end_is_written_down_goes_after_a_crash() -> None:
    store = Torn()
    await store.open()
    books = await Bookkeeping.on(store)
    appended = await store.mailboxes.append([owner_of(make_vin(1))], Draft(b"entry"), books.hub.time)
    await books.accepted("task_1", [1])
    assert 1 == appended[0].position
    await books.say(State.ACKED, "task_1", 1)  # and dies before the entry is removed
    books = await books.crash()
    assert [] == await store.mailboxes.read(owner_of(make_vin(1)), 0, 10, books.hub.time)
    await books.stop()


async def test_the_counts_are_those_of_the_stream_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, ends, doubts, checkpoints and crashes in any order, several writes under way at a time."""
    monkeypatch.setattr(module, "STEP", 3)
    monkeypatch.setattr(module, "GROUP", 2)
    for seed in (*range(30), 72):
        try:
            await anything_happens(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


async def anything_happens(seed: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore()
    await store.open()
    books = await Bookkeeping.on(store)
    truth: dict[str, tuple[str, State]] = {}  # delivery -> request, last state
    untold: list[tuple[list[Receipt], list[bytes]]] = []

    def happens(receipts: list[Receipt]) -> None:
        for receipt in receipts:
            truth[receipt.delivery_id] = receipt.request_id, receipt.state

    async def accept() -> None:
        request_id, vehicles = f"task_{chance.randrange(5)}", chance.sample(range(20), chance.randint(1, 6))
        await books.accepted(request_id, vehicles)
        happens([books.receipt(State.ACCEPTED, request_id, vehicle) for vehicle in vehicles])

    def some() -> list[Receipt]:
        """Changes of deliveries that have not ended, and of which nothing is under way."""
        busy = {receipt.delivery_id for receipts, _ in untold for receipt in receipts}
        pending = [name for name, (_, state) in truth.items() if state not in FINAL and name not in busy]
        receipts = []
        for name in chance.sample(pending, min(len(pending), chance.randint(1, 4))):
            vin, _, position = name.partition(".")
            vehicle = next(number for number in range(20) if make_vin(number) == vin)
            state = chance.choice([State.SENT, State.RETRIED, State.ACKED, State.FAILED, State.EXPIRED])
            receipts.append(books.receipt(state, truth[name][0], vehicle, int(position)))
        return receipts

    async def change() -> None:
        if receipts := some():
            untold.append((receipts, await books.write(receipts, told=False)))
            happens(receipts)

    async def tell() -> None:
        if untold:
            books.receipts.written(*untold.pop(chance.randrange(len(untold))))

    async def doubt() -> None:
        """Nobody knows whether the store has written it; it is written again."""
        receipts = some()
        if receipts:
            if chance.random() < 0.5:
                books.receipts.failed(await books.write(receipts, told=False), StoreError("no answer"))
            else:
                books.receipts.failed(books.receipts.values(receipts), StoreError("no answer"))
            await books.write(receipts)
            happens(receipts)

    async def pause() -> None:
        books.hub.time += chance.choice([0.0, 1.0, module.CALM])
        await books.ledger.tick()

    async def crash() -> None:
        nonlocal books
        untold.clear()
        books = await books.crash()

    for _ in range(150):
        await chance.choices([accept, change, tell, doubt, pause, crash], [4, 6, 6, 1, 3, 1])[0]()

    while untold:
        await tell()
    books.hub.time += 2 * module.LOST
    await books.ledger.tick()
    books.hub.time += 2 * module.CALM
    await books.ledger.tick()
    expected: dict[str, Counter[State]] = {}
    for request_id, state in truth.values():
        expected.setdefault(request_id, Counter())[state] += 1
    for _ in range(2):
        assert {name: dict(states) for name, states in expected.items()} == {
            tally.request_id: tally.states() for tally in books.ledger.after("")
        }
        await books.ledger.checkpoint()
        await asyncio.sleep(0)
        books = await books.crash()
    await books.stop()
