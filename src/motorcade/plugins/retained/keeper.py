"""Brings what changes in the index to the node's store, and what the store holds into the index at the start.

    publish ─▶ index ─▶ waiting ──(one batch at a time)──▶ flying ─▶ store
                 ▲                                            │
                 └── what the store had before ◀── it fails ──┘──▶ doubtful, if it may have been written all the same

The index is what subscribers are served from, and it changes at once. `waiting` holds topics, not messages: what is
written is what the index has when the batch is made, so a topic that changes often is written once per batch, and
nothing is stored twice in memory but the message that a topic falls back to.

Rule 1: one batch flies at a time. While it does, the next one collects; the busier, the larger. So the writes of a
        topic can neither overtake each other nor pile up.
Rule 2: `before` of a change is what the store has confirmed last. When a batch fails, each of its topics goes back to
        that in the index, unless a newer change of it waits: that one will be written anyway, and inherits `before`.
Rule 3: a failed write that may have been carried out leaves its topic doubtful: the store may hold what the index does
        not. Doubtful topics are written again, as the index has them, until the store confirms.
Rule 4: deletions fly in a batch of their own, beside the rest. A store that is full takes them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from itertools import islice
from typing import Final

import structlog

from motorcade.core.message import Message
from motorcade.plugins.retained.index import Index, size_of
from motorcade.plugins.retained.record import COLLECTION, RecordError, decode, encode
from motorcade.storage.ports import Batch as StoreBatch
from motorcade.storage.ports import Store, StoreError, StoreFullError

#: Topics whose last change the store has not confirmed. A change of one more is refused.
MAX_UNCOMMITTED: Final = 100_000

#: Topics and octets in one batch; one message may be larger by itself. Bounds how long making it holds up the loop.
BATCH_TOPICS: Final = 200
BATCH_OCTETS: Final = 4 * 2**20

#: Seconds between two attempts to write what is doubtful.
RETRY_AFTER: Final = 1.0

#: Records read between two turns of the event loop.
LOAD_STEP: Final = 200

#: Unreadable records whose topics are logged, one by one; the rest is only counted.
MAX_NAMED: Final = 100

Done = asyncio.Future[None]


class Change:
    """A topic whose message in the store is not, or not certainly, that of the index."""

    __slots__ = ("before", "done", "doubt")

    def __init__(self, before: Message | None, doubt: bool) -> None:
        self.before = before  #: what the store has confirmed last
        self.doubt = doubt  #: the store may hold something else than `before`
        self.done: Done | None = None  #: set when somebody waits

    def succeed(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: StoreError) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen: nobody may be left to look at it


class Batch:
    """Writes that fly together."""

    def __init__(self, store: Store) -> None:
        self.topics: list[str] = []
        self._store = store
        self._batch = StoreBatch()

    def put(self, message: Message) -> None:
        """`RecordError`: it cannot be written; the others can."""
        self._batch.put(COLLECTION, message.topic, encode(message), message.expires_at or 0.0)
        self.topics.append(message.topic)

    def delete(self, topic: str) -> None:
        self._batch.delete(COLLECTION, topic)
        self.topics.append(topic)

    async def commit(self) -> StoreError | None:
        """Why it failed, if it did."""
        try:
            await self._store.write(self._batch)
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            return StoreError(f"writing has failed: {error!r}")
        return None


async def _committed(*batches: Batch) -> list[tuple[Batch, StoreError | None]]:
    """All that have something to write, with their outcomes."""
    used = [batch for batch in batches if batch.topics]
    return list(zip(used, await asyncio.gather(*(batch.commit() for batch in used)), strict=True))


class Keeper:
    """Keeps the store's collection `retained` the same as the index."""

    def __init__(self, store: Store, index: Index, counters: Counter[str], log: structlog.stdlib.BoundLogger) -> None:
        self._store = store
        self._index = index
        self._counters = counters
        self._log = log
        self._waiting: dict[str, Change] = {}
        self._flying: dict[str, Change] = {}
        self._doubtful: dict[str, None] = {}
        self._partial = False  #: the store holds records that are not in the index
        self._failing = False  #: the last batch failed
        self._retry_at = 0.0  #: loop time
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()  #: nothing waits or flies
        self._settled.set()

    @property
    def uncommitted(self) -> int:
        """Topics that the store has not confirmed as they are."""
        return len(self._waiting) + len(self._flying) + len(self._doubtful)

    # -- at the start

    async def load(self, now: float) -> None:
        """Read everything into the index. Of more than its bounds allow, the newest messages.

        What does not fit, or cannot be read, stays in the store until its topic gets a new message.
        """
        by_age: list[tuple[float, str]] = []
        found = unreadable = left = 0
        async for topic, value in self._store.records.scan(COLLECTION, now):
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
        self._partial = bool(left or unreadable)
        self._count_loaded(found - left - unreadable, left, unreadable)

    def _count_loaded(self, loaded: int, left: int, unreadable: int) -> None:
        self._counters["loaded"] += loaded
        if left:
            self._counters["not_loaded"] += left
            self._log.warning("retained_beyond_bounds", left=left, remedy="raise the bounds of [plugins.retained]")
        if unreadable:
            self._counters["unreadable"] += unreadable
        self._log.info("retained_loaded", messages=loaded, left=left, unreadable=unreadable)

    # -- what changes

    def has_room(self, topic: str) -> bool:
        """Whether a change of this topic can be taken."""
        return topic in self._waiting or topic in self._doubtful or self.uncommitted < MAX_UNCOMMITTED

    def full(self) -> StoreFullError:
        """What to say when there is no room."""
        return StoreFullError(f"{self.uncommitted} retained messages wait for the store already")

    def changed(self, topic: str, before: Message | None, waits: bool) -> Done | None:
        """A topic was set or deleted in the index, which had `before` for it.

        If `waits`, a future of its confirmation by the store, or None if there is nothing to confirm.
        """
        change = self._waiting.get(topic)
        if change is None:
            change = self._flying.get(topic) if self._is_unchanged(topic, before) else self._new(topic, before)
        if change is None or not waits:
            return None
        if change.done is None:
            change.done = asyncio.get_running_loop().create_future()
        return change.done

    def _is_unchanged(self, topic: str, before: Message | None) -> bool:
        """Whether the store has, or is being given, what the index has."""
        if self._index.peek(topic) is not before or topic in self._doubtful:
            return False
        return before is not None or not self._partial

    def _new(self, topic: str, before: Message | None) -> Change:
        doubt = topic in self._doubtful
        self._doubtful.pop(topic, None)
        change = self._waiting[topic] = Change(before, doubt)
        self._settled.clear()
        self._wake.set()
        return change

    # -- to the store

    async def run(self) -> None:
        """Write until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._rest(loop)
                if self._waiting:
                    self._counters["store_failed"] += await self._write(self._next())
                if self._doubtful and loop.time() >= self._retry_at:
                    await self.mend()
                if not self._waiting:
                    self._settled.set()
        finally:
            self._abandon()

    async def settle(self) -> None:
        """Wait until the store has confirmed or refused everything."""
        await self._settled.wait()

    async def mend(self) -> None:
        """Try once to write what is doubtful. Not while `run` does something."""
        while self._doubtful:
            topics = list(islice(self._doubtful, BATCH_TOPICS))
            for topic in topics:
                del self._doubtful[topic]
            if await self._write({topic: Change(self._index.peek(topic), doubt=True) for topic in topics}):
                return

    async def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until there is something to do. At least one turn: what comes in one turn shares a batch."""
        if self._waiting:
            await asyncio.sleep(0)
            return
        pause = max(self._retry_at - loop.time(), 0) if self._doubtful else None
        try:
            async with asyncio.timeout(pause):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _next(self) -> dict[str, Change]:
        """Take a batch from what waits, first come, first served."""
        topics: list[str] = []
        octets = 0
        for topic in self._waiting:
            message = self._index.peek(topic)
            octets += size_of(message) if message is not None else len(topic)
            if topics and (octets > BATCH_OCTETS or len(topics) == BATCH_TOPICS):
                break
            topics.append(topic)
        return {topic: self._waiting.pop(topic) for topic in topics}

    async def _write(self, changes: dict[str, Change]) -> int:
        """Write the topics as the index has them; how many of them could not be."""
        self._flying = changes
        failed = 0
        puts, deletions = Batch(self._store), Batch(self._store)
        for topic in list(changes):
            message = self._index.peek(topic)
            if message is None:
                deletions.delete(topic)
                continue
            try:
                puts.put(message)
            except RecordError as unfit:
                failed += 1
                self._undo(topic, StoreError(str(unfit)), certain=True)
        for batch, error in await _committed(puts, deletions):
            if error is None:
                self._land(batch.topics)
                continue
            failed += len(batch.topics)
            self._note_failure(error)
            # What has become of a failed deletion is never certain (see `StoreFullError`), nor is it in a batch of
            # which another part may have been written.
            certain = error.certain and self._store.atomic and batch is puts
            for topic in batch.topics:
                self._undo(topic, error, certain)
        return failed

    def _land(self, topics: list[str]) -> None:
        if self._failing:
            self._failing = False
            self._log.info("retained_stored_again")
        for topic in topics:
            self._flying.pop(topic).succeed()

    def _undo(self, topic: str, error: StoreError, certain: bool) -> None:
        """Rules 2 and 3. `certain`: nothing was written."""
        change = self._flying.pop(topic)
        change.doubt = change.doubt or not certain
        later = self._waiting.get(topic)
        if later is not None:
            later.before = change.before
            later.doubt = later.doubt or change.doubt
        else:
            self._index.restore(topic, change.before)
            if change.doubt:
                self._doubtful[topic] = None
                self._retry_at = asyncio.get_running_loop().time() + RETRY_AFTER
        change.fail(error)

    def _note_failure(self, error: StoreError) -> None:
        if not self._failing:  # once until it goes well again: a full store would fill the log as well
            self._failing = True
            self._log.warning("retained_not_stored", error=str(error))

    def _abandon(self) -> None:
        """Writing has ended: those who wait must know, and what the store has is doubtful."""
        error = StoreError("writing has ended before the store had confirmed the message")
        abandoned = {**self._flying, **self._waiting}
        for topic, change in [*self._flying.items(), *self._waiting.items()]:
            self._doubtful[topic] = None
            change.fail(error)
        self._flying, self._waiting = {}, {}
        if abandoned:
            self._log.warning("retained_abandoned", topics=len(abandoned))
        self._settled.set()
