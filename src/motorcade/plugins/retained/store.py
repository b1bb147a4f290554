"""The store of retained messages: changes of the index are written to it, and a start reads the index from it.

Subscribers are served from the index, which changes at once. The publisher is answered when the store has the change.

Rule 1: a topic has one write in flight. What changes meanwhile is written when that is answered: the newest message of
        the topic, once. So writes of a topic that changes often do not pile up, and cannot overtake each other. While
        the write waits for its group, a newer message takes the place of the one that waits.
Rule 2: a topic whose write is refused goes back to the message that the store has, unless it has changed meanwhile.
Rule 3: messages are written in groups (`GroupWriter`), and deletions in others: a full store takes those.
Rule 4: what became of a write is unknown only when the store is closed or damaged. The index goes back then as well,
        and the next start reads what the store has.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import structlog

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.delivery.group import Group, GroupWriter
from motorcade.delivery.record import RecordError
from motorcade.plugins.retained.index import Index
from motorcade.plugins.retained.record import COLLECTION, decode, encode
from motorcade.storage.ports import Backlog, Batch, Store, StoreError

LOAD_STEP: Final = 200  #: records read between two turns of the event loop
MAX_NAMED: Final = 100  #: unreadable records whose topics are logged, one by one; the rest is only counted


class Writing:
    """A write of one topic that is in flight."""

    __slots__ = ("commit", "message", "next", "stored", "topic", "value")

    def __init__(self, topic: str, message: Message | None, value: bytes, stored: Message | None) -> None:
        self.topic = topic
        self.message = message  #: None: a deletion
        self.value = value  #: of the message, until the store gets it
        self.stored = stored  #: what the store has if this is refused
        self.commit: Group[Writing]
        self.next: Commit[Any] | None = None  #: of the changes that have come meanwhile


class RetainedStore:
    """Keep the store's collection `retained` the same as the index."""

    def __init__(
        self,
        store: Store,
        index: Index,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._index = index
        self._counters = counters
        self._log = log
        self._now = now
        self._puts = GroupWriter(store, now, self._fill_puts, self._written)
        self._deletions = GroupWriter(store, now, self._fill_deletions, self._written)
        self._inflight: dict[str, Writing] = {}  #: by topic
        self._backlog = Backlog()  #: of these
        self._unindexed = False  #: the store may hold messages that are not in the index
        self._failing = False  #: the last write failed

    # -- at the start

    async def load(self) -> None:
        """Read everything into the index. Of more than its bounds allow, take the newest messages.

        What does not fit, or cannot be read, stays in the store until its topic gets a new message.
        """
        by_age: list[tuple[float, str]] = []
        found = unreadable = left = 0
        async for topic, value in self._store.records.scan(COLLECTION, self._now()):
            found += 1
            if found % LOAD_STEP == 0:
                await asyncio.sleep(0)
            try:
                message = decode(topic, value)
            except RecordError as error:
                unreadable += 1
                if unreadable <= MAX_NAMED:
                    self._log.warning("retained_unreadable", topic=topic, error=str(error))
                continue
            if self._index.max_payload and len(message.payload) > self._index.max_payload:
                left += 1
                continue
            self._index.restore(topic, message)
            heapq.heappush(by_age, (message.timestamp, topic))
            while self._index.beyond:
                self._index.delete(heapq.heappop(by_age)[1])
                left += 1
        self._unindexed = bool(left or unreadable)
        loaded = found - left - unreadable
        self._counters.update(loaded=loaded, not_loaded=left, unreadable=unreadable)
        if left:
            self._log.warning("retained_beyond_bounds", left=left, remedy="raise the bounds of [plugins.retained]")
        self._log.info("retained_loaded", messages=loaded, left=left, unreadable=unreadable)

    # -- changes

    def has_room(self, topic: str) -> bool:
        """Return True if a change of a topic can be taken now."""
        return topic in self._inflight or not (self._backlog.full or self._store.backlog.full)

    def write(self, topic: str, before: Message | None, message: Message | None) -> Commit[Any] | None:
        """Store the message that the index has for a topic now; it had `before`. None: there is nothing to wait for."""
        writing = self._inflight.get(topic)
        if message is before and (message is not None or not self._unindexed):  # there was nothing to delete
            return None if writing is None else writing.next or writing.commit
        if writing is None or (writing.value and writing.next is None and message is not None):
            return self._write(topic, message, before)
        if writing.next is None:
            writing.next = Commit()
        return writing.next

    def _write(self, topic: str, message: Message | None, stored: Message | None) -> Commit[Any]:
        try:
            value = b"" if message is None else encode(message)
        except RecordError as error:
            self._counters["store_failed"] += 1
            self._index.restore(topic, stored)
            return Commit.failed(error)
        writing = self._inflight.get(topic)
        if writing is not None:
            grown = len(value) - len(writing.value)
            writing.message, writing.value = message, value
            writing.commit.size += grown
            self._backlog.bytes += grown
            return writing.commit
        writing = self._inflight[topic] = Writing(topic, message, value, stored)
        self._backlog.rows += 1
        self._backlog.bytes += len(value)
        writing.commit = (self._deletions if message is None else self._puts).add((writing,), len(value))
        return writing.commit

    def _fill_puts(self, batch: Batch, group: Group[Writing]) -> None:
        for writing in group.items:
            if writing.message is not None:
                batch.put(COLLECTION, writing.topic, writing.value, writing.message.expires_at or 0.0)
                writing.value = b""

    def _fill_deletions(self, batch: Batch, group: Group[Writing]) -> None:
        for writing in group.items:
            batch.delete(COLLECTION, writing.topic)

    def _written(self, group: Group[Writing]) -> None:
        error = group.error
        self._backlog.rows -= len(group.items)
        self._backlog.bytes -= group.size
        if error is not None:
            self._counters["store_failed"] += len(group.items)
            self._unindexed |= not group.refused
        if self._failing is (error is None):  # log it once until that changes: a full store would fill the log as well
            self._failing = error is not None
            if error is None:
                self._log.info("retained_stored_again")
            else:
                self._log.warning("retained_not_stored", error=str(error))
        for writing in group.items:
            topic = writing.topic
            del self._inflight[topic]
            stored = writing.message if error is None else writing.stored
            if writing.next is not None:
                self._write_next(topic, stored, writing.next)
            elif error is not None:
                self._index.restore(topic, stored)

    def _write_next(self, topic: str, stored: Message | None, changed: Commit[Any]) -> None:
        commit = self._write(topic, self._index.peek(topic), stored)
        commit.then(lambda: changed.finish(commit.error))

    @property
    def unwritten(self) -> int:
        """Return how many topics have a write in flight."""
        return len(self._inflight)

    async def settle(self) -> None:
        """Wait until no write is in flight."""
        while self._inflight:
            with contextlib.suppress(StoreError):  # publishers are told
                await next(iter(self._inflight.values())).commit
