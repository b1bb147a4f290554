"""Places, queues in memory, progress and topics by themselves: the corners that are rarely met together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
import structlog

from motorcade.core.message import Message
from motorcade.plugins.ecq import record
from motorcade.plugins.ecq.options import EcqConfig
from motorcade.plugins.ecq.place import Place
from motorcade.plugins.ecq.progress import Ledger, Progress
from motorcade.plugins.ecq.queue import Fresh, Queue, Queues, Row
from motorcade.plugins.ecq.tables import EXCLUSIVE, SHARED
from motorcade.plugins.ecq.topics import consumed
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Appended, Draft, MailboxInfo
from motorcade.tasks import Work

NOW = 1000.0
LOG = structlog.stdlib.get_logger("motorcade.plugin")


# -- places


def test_done_is_what_nothing_lies_below() -> None:
    place = Place(4)
    place.give([5, 7, 8, 12])
    assert not place.acknowledge([7])
    assert not place.acknowledge([12, 7])
    assert 4 == place.done
    assert place.acknowledge([5])
    assert 7 == place.done
    assert place.acknowledge([8])
    assert (12, True) == (place.done, place.clear)


def test_what_was_never_given_is_done_with_when_all_else_is() -> None:
    place = Place(0)
    place.give([3])
    assert not place.catch_up(9)
    place.acknowledge([3])
    assert place.catch_up(9)
    assert not place.catch_up(9)
    assert not place.acknowledge([5])
    assert 9 == place.done


# -- queues


class Consumer:
    """Notes what it is offered."""

    progress: Progress
    in_flight = 0

    def __init__(self) -> None:
        self.offered: list[Fresh] = []

    def offer(self, fresh: Fresh) -> None:
        self.offered.append(fresh)

    def look(self) -> None: ...

    def restart(self) -> None: ...


def make(tail: int, entries: int = 0) -> tuple[Queue, Consumer]:
    queue, consumer = Queue(EXCLUSIVE, "car"), Consumer()
    queue.looked(MailboxInfo(entries, 0, 1 if entries else 0, tail))
    queue.consumers[consumer] = None
    return queue, consumer


def land(queue: Queue, key: str, position: int, config: EcqConfig, *, probe: bool = False, **more: Any) -> int:
    message = Message(f"$ECQ/w/car/{key}", b"v")
    body, payload = record.encode(message, NOW)
    row = Row(queue, Draft(body, payload, key.encode()), len(body), message, probe)
    queue.expect(row)
    return queue.landed(row, Appended(queue.owner, position, **more), config)


def test_what_was_appended_is_offered_without_what_it_replaces() -> None:
    queue, consumer = make(tail=4)
    config = EcqConfig()
    for key, position, replaced in (("a", 5, 2), ("b", 6, 0), ("a", 7, 5)):
        assert 0 == land(queue, key, position, config, replaced=replaced)
    queue.dispatch(NOW, too_old=False)
    (fresh,) = consumer.offered
    assert [6, 7] == [item.number for item in fresh.items]
    assert ["$ECQ/car/b", "$ECQ/car/a"] == [item.message.topic for item in fresh.items]
    assert (4, 7, [2]) == (fresh.after, fresh.upto, fresh.gone)


def test_a_number_that_nobody_has_heard_of_must_be_read() -> None:
    """A write that was called lost has come through: what comes after it is not handed over."""
    for known in (True, False):
        queue, consumer = make(tail=4)
        queue.known = known
        land(queue, "a", 6 if known else 5, EcqConfig())
        queue.dispatch(NOW, too_old=False)
        (fresh,) = consumer.offered
        assert [] == fresh.items


def test_what_took_too_long_to_store_is_not_handed_over() -> None:
    queue, consumer = make(tail=4)
    land(queue, "a", 5, EcqConfig())
    queue.dispatch(NOW, too_old=True)
    (fresh,) = consumer.offered
    assert [] == fresh.items


def test_one_too_many_goes_again() -> None:
    """Unless it has replaced something, or the oldest goes."""
    refuse, drop = EcqConfig(max_messages=2), EcqConfig(max_messages=2, overflow="drop_oldest")
    queue, consumer = make(tail=4, entries=2)
    assert 5 == land(queue, "new", 5, refuse, probe=True)
    assert {5} == queue.doomed
    assert 0 == land(queue, "old", 6, refuse, probe=True, replaced=3)
    assert 0 == land(queue, "new", 7, drop, probe=True, dropped=(4,))
    queue.dispatch(NOW, too_old=False)
    (fresh,) = consumer.offered
    assert [6, 7] == [item.number for item in fresh.items]


def test_room_counts_what_is_on_its_way() -> None:
    queue, _ = make(tail=4, entries=1)
    config = EcqConfig(max_messages=3, max_bytes=1000)
    assert queue.has_room(10, config)
    assert not queue.has_room(1001, config)
    message = Message("$ECQ/w/car/a", b"v")
    for _ in range(2):
        queue.expect(Row(queue, Draft(b"", b"", b"a"), 400, message, False))
    assert not queue.has_room(10, config)
    assert not Queue(EXCLUSIVE, "new").has_room(1, config), "nobody has looked yet"


def test_idle_queues_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motorcade.plugins.ecq.queue.MAX_OPEN", 3)
    queues = Queues(EcqConfig())
    kept = queues.open(EXCLUSIVE, "0")
    kept.consumers[Consumer()] = None
    for number in range(1, 10):
        queues.open(EXCLUSIVE, str(number))
    assert kept is queues.open(EXCLUSIVE, "0")
    assert len(queues) <= 4


# -- progress


class Node:
    """A ledger over a store in memory."""

    def __init__(self, store: MemoryStore, **config: Any) -> None:
        self.counters: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.ledger = Ledger(store, Queues(EcqConfig(**config)), lambda: NOW, self.spawn, self.counters, LOG)

    def spawn(self, work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work() if callable(work) else work, name=name)
        self.tasks.add(task)
        return task


async def opened() -> MemoryStore:
    store = MemoryStore()
    await store.open()
    return store


async def test_who_consumed_before_a_rewind_moves_nothing() -> None:
    store = await opened()
    node = Node(store)
    queue = Queue(EXCLUSIVE, "car")
    progress = node.ledger.open(queue, "car")
    await node.ledger.load(progress)
    node.ledger.advance(progress, 0, 10)
    node.ledger.advance(progress, 0, 7)
    assert 10 == progress.number
    node.ledger.rewind(progress, 3)
    node.ledger.advance(progress, 0, 20)
    assert 3 == progress.number
    node.ledger.advance(progress, 1, 4)
    await node.ledger.flush(progress)
    stored = await node.ledger.read(queue, "car")
    assert stored is not None and 4 == stored.number


async def test_progress_is_kept_until_it_is_written() -> None:
    store = await opened()
    node = Node(store, progress_interval=1000.0)
    queue = Queue(SHARED, "q")
    progress = node.ledger.open(queue, "a")
    await node.ledger.load(progress)
    node.ledger.advance(progress, 0, 5)
    node.ledger.close(progress)
    assert node.ledger.open(Queue(SHARED, "q"), "a") is progress, "another object of the same queue"
    node.ledger.close(progress)
    await asyncio.gather(*node.tasks)
    assert node.ledger.peek(queue, "a") is None
    again = node.ledger.open(queue, "a")
    await node.ledger.load(again)
    assert 5 == again.number


async def test_progress_that_cannot_be_read_is_none() -> None:
    store = await opened()
    await store.records.put(EXCLUSIVE.progress, "car", b"\xc1")
    node = Node(store)
    progress = node.ledger.open(Queue(EXCLUSIVE, "car"), "car")
    await node.ledger.load(progress)
    assert (0, 1) == (progress.number, node.counters["progress_unreadable"])


async def test_clients_that_never_come_back_leave_no_progress() -> None:
    store = await opened()
    node = Node(store)
    progress = node.ledger.open(Queue(SHARED, "q"), "auto-1234")
    await node.ledger.load(progress)
    node.ledger.advance(progress, 0, 5)
    node.ledger.close(progress)
    assert [] == [each async for each in store.records.scan(SHARED.progress, NOW)]
    assert not node.tasks


# -- topics


def test_filters_that_consume() -> None:
    assert (EXCLUSIVE, "car") == consumed("$ECQ/car/#")
    assert (SHARED, "q") == consumed("$SCQ/q/#")
    assert (EXCLUSIVE, "w") == consumed("$ECQ/w/#")
    for filter_ in ("$ECQ//#", "$ECQ/+/#", "$ECQ/#", "$ECQ/car/k/#", "$ECQ/car", "$ECQX/car/#", "a/car/#"):
        assert consumed(filter_) is None, filter_
