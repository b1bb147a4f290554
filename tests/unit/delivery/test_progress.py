"""Progress by itself: rewinds, what stays in memory and for how long, what is not stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import structlog

from motorcade.delivery.cursor import Cursor
from motorcade.delivery.progress import LogKey, Progress, ProgressOptions, ProgressStore
from motorcade.storage.memory import MemoryStore
from motorcade.tasks import Work

NOW = 1000.0
ONE, MANY = LogKey("ecq-progress", "car", single=True), LogKey("stream-progress", "s")


class Rig(ProgressStore):
    """A progress store over a store in memory."""

    def __init__(self, store: MemoryStore, interval: float = 1000.0, most: int = 100, *, shared: bool = False) -> None:
        self.counters: Counter[str] = Counter()
        self.now = NOW
        self.held: list[asyncio.Task[None]] = []
        options = ProgressOptions(
            "test", "refused", "waits", 1.0, lambda: interval, lambda: most, lambda _: 100.0, shared=shared
        )
        log = structlog.stdlib.get_logger("motorcade.plugin")
        super().__init__(store, options, lambda: self.now, self.spawn, self.counters, log)

    def spawn(self, work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.held.append(asyncio.create_task(work() if callable(work) else work, name=name))
        return self.held[-1]

    async def loaded(self, log: LogKey, client: str) -> Progress:
        progress = self.open(log, client)
        await self.load(progress)
        return progress

    def consume(self, progress: Progress, after: int, upto: int, name: str = "") -> Cursor:
        """A consumer that has acknowledged everything up to a number."""
        cursor = progress.cursors[name] = Cursor()
        cursor.begin(after)
        cursor.give(range(after + 1, upto + 1))
        cursor.acknowledge(range(after + 1, upto + 1))
        self.changed(progress)
        return cursor


async def opened() -> MemoryStore:
    store = MemoryStore()
    await store.open()
    return store


async def test_a_consumer_from_before_a_rewind_changes_nothing() -> None:
    rig = Rig(await opened())
    progress = await rig.loaded(ONE, "car")
    old = rig.consume(progress, 0, 10)
    rig.rewind(progress, 3)
    old.give([11])
    old.acknowledge([11])
    rig.changed(progress)
    await rig.flush(progress)
    stored = await rig.read(ONE, "car")
    assert stored is not None and 3 == stored.number
    rig.consume(progress, 3, 4)
    await rig.flush(progress)
    assert progress.stored == await rig.read(ONE, "car")
    assert progress.stored is not None and 4 == progress.stored.number


async def test_it_stays_in_memory_until_it_is_written() -> None:
    rig = Rig(await opened())
    progress = await rig.loaded(MANY, "a")
    rig.remove(progress, "", rig.consume(progress, 0, 5))
    rig.close(progress)
    assert rig.open(LogKey("stream-progress", "s"), "a") is progress
    rig.close(progress)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (0, None) == (len(rig), rig.peek(MANY, "a"))
    assert 5 == (await rig.loaded(MANY, "a")).number


async def test_a_cursor_keeps_it_in_memory_and_its_record_in_the_store() -> None:
    store = await opened()
    rig = Rig(store)
    progress = await rig.loaded(MANY, "a")
    rig.consume(progress, 0, 5)
    rig.close(progress)
    gone = await rig.loaded(MANY, "b")
    rig.remove(gone, "", rig.consume(gone, 0, 5))
    rig.close(gone)
    for _ in range(40):
        rig.now += 10
        rig.sweep()
        for each in rig.of_log(MANY):
            await rig.flush(each)
    assert (1, {"a"}) == (len(rig), set(await rig.consumers(MANY)))
    assert 5 < rig.counters["progress_written"] < 15, "seldom"


async def test_the_cursor_farthest_behind_counts_while_it_is_open() -> None:
    rig = Rig(await opened())
    progress = await rig.loaded(MANY, "a")
    first, second = rig.consume(progress, 0, 5, "x"), rig.consume(progress, 0, 9, "y")
    progress.gather()
    assert 5 == progress.number
    rig.remove(progress, "x", first)
    progress.gather()
    assert 9 == progress.number
    rig.remove(progress, "y", second)
    progress.gather()
    assert 9 == progress.number, "the last one counts"
    rig.consume(progress, 2, 3, "x"), rig.consume(progress, 6, 7, "y")
    rig.end_client("a")
    assert (3, {}) == (progress.number, progress.cursors), "all of a session"


async def test_a_record_that_cannot_be_read_is_none() -> None:
    store = await opened()
    await store.records.put(ONE.collection, "car", b"\xc1")
    rig = Rig(store)
    assert (0, 1) == ((await rig.loaded(ONE, "car")).number, rig.counters["progress_unreadable"])


async def test_records_of_the_version_before_are_read() -> None:
    """`[1, number, time]` of compacted queues, `[1, offset, time, ahead]` of streams."""
    store = await opened()
    await store.records.put(ONE.collection, "car", b"\x93\x01\x05\xcb@\x8f@\x00\x00\x00\x00\x00")
    for client, ahead in (("a", b"\xc2"), ("b", b"\xc3")):
        await store.records.put(MANY.collection, f"s/{client}", b"\x94\x01\x06\xcb@\x8f@\x00\x00\x00\x00\x00" + ahead)
    rig = Rig(store)
    found = [await rig.loaded(*each) for each in ((ONE, "car"), (MANY, "a"), (MANY, "b"))]
    assert [(5, False), (6, False), (6, True)] == [(each.number, each.ahead) for each in found]
    assert [NOW] * 3 == [each.time for each in found]


async def test_clients_that_do_not_come_back_leave_no_record() -> None:
    store = await opened()
    rig = Rig(store)
    progress = await rig.loaded(MANY, "auto-1234")
    rig.consume(progress, 0, 5)
    rig.begin(progress)
    assert 0 == await rig.unwritten.settle()
    assert not progress.exists
    assert [] == [each async for each in store.records.scan(MANY.collection, NOW)]


async def test_the_number_of_consumers_is_bounded_and_counted_again() -> None:
    rig = Rig(await opened(), most=2)
    for client in "abc":
        progress = await rig.loaded(MANY, client)
        rig.remove(progress, "", rig.consume(progress, 0, 1))
        assert progress.kept is (client < "c")
        rig.close(progress)
    await asyncio.sleep(0)
    assert 1 == rig.counters["refused"]
    rig.now += 100
    assert (await rig.loaded(MANY, "c")).kept, "the others have expired"


# -- several members


async def test_what_a_member_writes_late_does_not_take_progress_back() -> None:
    """A consumer that has moved on has acknowledged more, was rewound, or has begun elsewhere: that stays."""
    for went_on in ("acknowledged", "rewound", "began"):
        store = await opened()
        old, new = Rig(store, shared=True), Rig(store, shared=True)
        late = await old.loaded(MANY, "a")
        old.consume(late, 0, 5)
        await old.flush(late)
        old.consume(late, 5, 8)  # and is slow to write it
        new.now += 1
        progress = await new.loaded(MANY, "a")
        assert 5 == progress.number
        if went_on == "acknowledged":
            new.consume(progress, 5, 9)
        elif went_on == "rewound":
            new.rewind(progress, 3)
        else:
            progress.cursors[""] = cursor = Cursor()
            cursor.begin(6)  # beyond what is stored: the old member has 8
            new.begin(progress, reset=True)
        await new.flush(progress)
        wanted = {"acknowledged": 9, "rewound": 3, "began": 6}[went_on]
        for _ in range(2):
            await old.flush(late)
            stored = await new.read(MANY, "a")
            assert stored is not None and wanted == stored.number, went_on
            old.changed(late)  # again, with the time of then


async def test_a_decision_of_a_slow_clock_follows_the_one_before() -> None:
    store = await opened()
    fast, slow = Rig(store, shared=True), Rig(store, shared=True)
    slow.now -= 50
    for rig, number in ((fast, 5), (slow, 3), (fast, 4), (slow, 2), (slow, 1)):
        progress = await rig.loaded(MANY, "a")
        rig.rewind(progress, number)
        await rig.flush(progress)
        rig.close(progress)
        stored = await fast.read(MANY, "a")
        assert stored is not None and number == stored.number


async def test_a_consumer_that_is_back_goes_on_after_what_another_member_has_stored() -> None:
    """Also if what it has left here waits to be written."""
    for elsewhere, wanted in ((4, 5), (7, 7)):
        store = await opened()
        here, there = Rig(store, shared=True), Rig(store, shared=True)
        progress = await here.loaded(MANY, "a")
        here.consume(progress, 0, 5)
        progress.gather()
        progress.cursors.clear()
        progress.users -= 1  # as `end` and `close`, which would write it now
        other = await there.loaded(MANY, "a")
        there.consume(other, 0, elsewhere)
        await there.flush(other)
        back = await here.loaded(MANY, "a")
        assert (progress, wanted) == (back, back.number)


async def test_records_of_a_lone_node_are_read_and_followed() -> None:
    store = await opened()
    alone, member = Rig(store), Rig(store, shared=True)
    before = await alone.loaded(MANY, "a")
    alone.consume(before, 0, 300)
    await alone.flush(before)
    progress = await member.loaded(MANY, "a")
    assert 300 == progress.number
    member.rewind(progress, 3)
    await member.flush(progress)
    assert 3 == (await Rig(store).loaded(MANY, "a")).number
