"""Queues in memory, stored messages and topics by themselves: the corners that are rarely met together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import structlog

from motorcade.core.message import Message
from motorcade.delivery.cursor import Cursor
from motorcade.delivery.progress import Progress
from motorcade.delivery.reader import Page
from motorcade.extension.sources import FastFeed
from motorcade.plugins.logs.compacted import record
from motorcade.plugins.logs.compacted.options import EcqConfig
from motorcade.plugins.logs.compacted.queue import Appending, CompactedQueue, Queues
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, SHARED
from motorcade.plugins.logs.compacted.topics import consumed
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Appended, Draft
from tests.unit.ecq.node import EcqNode, told

NOW = 1000.0


# -- queues


class Consumer:
    """Notes what it is told; a reader that waits at the tail."""

    feed: FastFeed
    progress: Progress
    cursor = Cursor()

    def __init__(self) -> None:
        self.pages: list[Page | None] = []
        self.gone: list[int] = []

    def more(self, page: Page | None = None) -> None:
        self.pages.append(page)

    def replaced(self, numbers: Iterable[int]) -> None:
        self.gone += numbers

    def look(self) -> None: ...

    def restart(self) -> None: ...

    def halt(self) -> None: ...


def queues() -> Queues:
    def spawn(*_: Any, **__: Any) -> Any: ...

    log = structlog.stdlib.get_logger("motorcade.plugin")
    return Queues(MemoryStore(), EcqConfig(), lambda: NOW, spawn, Counter(), log)


def make(tail: int) -> tuple[CompactedQueue, Consumer]:
    queue, consumer = CompactedQueue(queues(), EXCLUSIVE, "car"), Consumer()
    queue.reached(tail)
    queue.consumers[consumer] = None
    queue.wait(consumer)  # type: ignore[arg-type]
    return queue, consumer


def land(queue: CompactedQueue, key: str, position: int, **more: Any) -> None:
    body, payload = record.encode(Message(f"$ECQ/w/car/{key}", b"v"))
    appending = Appending(queue, Draft(body, payload, key.encode()), len(body))
    appending.time = NOW
    assert queue.landed(appending, Appended(queue.owner, position, **more))


async def test_what_was_appended_is_handed_over_without_what_it_replaces() -> None:
    queue, consumer = make(tail=4)
    for key, position, replaced in (("a", 5, 2), ("b", 6, 0), ("a", 7, 5)):
        land(queue, key, position, replaced=replaced)
    queue.tell(oldest=0.0)
    (page,) = consumer.pages
    assert page is not None
    assert ([6, 7], ["$ECQ/car/b", "$ECQ/car/a"]) == (page.numbers, [message.topic for message in page.messages])
    assert (4, 7, [2]) == (page.after, page.upto, consumer.gone)


async def test_a_number_that_was_not_heard_of_must_be_read() -> None:
    """A write that was called lost has come through: what comes after it is not handed over."""
    for known in (True, False):
        queue, consumer = make(tail=4)
        queue.known = known
        land(queue, "a", 6 if known else 5)
        queue.tell(oldest=0.0)
        assert [None] == consumer.pages


async def test_what_took_too_long_to_store_is_not_handed_over() -> None:
    queue, consumer = make(tail=4)
    land(queue, "a", 5)
    queue.tell(oldest=NOW)
    assert [None] == consumer.pages


async def test_idle_queues_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motorcade.plugins.logs.compacted.queue.MAX_OPEN", 3)
    opened = queues()
    kept = opened.open(EXCLUSIVE, "0")
    kept.consumers[Consumer()] = None
    for number in range(1, 10):
        opened.open(EXCLUSIVE, str(number))
    assert kept is opened.open(EXCLUSIVE, "0")
    assert len(opened) <= 4


# -- stored messages

#: As the version before has written them: a small payload, and one that lies beside; the second with everything.
SMALL = b"\x9d\x01\xc4\x01v\xa3pub\xc0\xc4\x02id\xcb@\x8f@\x00\x00\x00\x00\x00\x01\xc0\xc0\xc0\xc0\xc0\x90"
LARGE = (
    b"\x9d\x01\xc0\xa3pub\xa4user\xc4\x02id\xcb@\x8f@\x00\x00\x00\x00\x00\x02\xcbB\x00\x00\x00\x00\x00\x00\x00"
    b"\x01\xa4text\xa5reply\xc4\x01c\x91\x92\xa1a\xa1b"
)


def test_entries_of_the_version_before_are_delivered() -> None:
    with EcqNode.on() as node:
        node.fill("car", ("x", b"0"))
        for body, payload, key in ((SMALL, b"", b"small"), (LARGE, bytes(5000), b"large")):
            node.run(node.held.mailboxes.append(["ecq:car"], Draft(body, payload, key), node.now))
        node.fill("car", ("y", b"3"))
        messages = node.consumer().messages()
        assert [(1, "x", b"0"), (2, "small", b"v"), (3, "large", bytes(5000)), (4, "y", b"3")] == told(messages)
        said = messages[2].properties
        assert (1, "text", "reply", b"c") == (
            said.payload_format,
            said.content_type,
            said.response_topic,
            said.correlation_data,
        )
        assert (("a", "b"), ("ecq-seqno", "3")) == said.user_properties
        assert [b"0", b"v", bytes(5000), b"3"] == [payload for _, _, payload in node.stored()]


# -- topics


def test_filters_that_consume() -> None:
    assert (EXCLUSIVE, "car") == consumed("$ECQ/car/#")
    assert (SHARED, "q") == consumed("$SCQ/q/#")
    assert (EXCLUSIVE, "w") == consumed("$ECQ/w/#")
    for filter_ in ("$ECQ//#", "$ECQ/+/#", "$ECQ/#", "$ECQ/car/k/#", "$ECQ/car", "$ECQX/car/#", "a/car/#"):
        assert consumed(filter_) is None, filter_


async def test_what_was_appended_before_a_queue_is_held_is_written_before() -> None:
    """Else a queue that is deleted in the same turn of the event loop would leave a message behind."""
    opened = queues()
    await opened.store.open()
    queue = opened.open(EXCLUSIVE, "car")
    queue.registered = True
    body, payload = record.encode(Message("$ECQ/w/car/a", b"v"))
    appending = opened.append(queue, Draft(body, payload, b"a"), len(body))

    async def clear() -> None:
        await opened.store.mailboxes.clear(queue.owner)

    await opened.hold(queue, clear)
    await appending
    assert 0 == (await opened.store.mailboxes.info(queue.owner)).entries
