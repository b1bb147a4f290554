"""The writes of all queues of a node.

Rule 1: messages are appended in groups (`GroupWriter`); a publisher is answered when its message is stored. All copies
        of a message are in one group. A dead letter leaves its old queue with the write that appends it.
Rule 2: removals are written many at a time, up to `DELAY` later. One that fails is repeated until it succeeds; until
        then no consumer gets the message. One that is lost with the process means that its message comes again, as if
        the acknowledgement had been lost.
Rule 3: how often a message was sent is stored with its entry (`mark`), unless it is done within `DELAY`: consumers that
        acknowledge quickly cost no marks. What is sent again, or has failed, is rare, and stored at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import groupby, islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.delivery.group import Group, GroupWriter
from motorcade.delivery.writebehind import LAST_ATTEMPT, WriteBehind
from motorcade.extension.plugin import Spawn
from motorcade.plugins.logs.queues.dispatcher import EntryState, Level, QueueEntry
from motorcade.plugins.logs.queues.tables import MAX_MARK
from motorcade.storage.ports import NO_BOUND, Batch, Bound, Draft, Store, StoreError

if TYPE_CHECKING:
    from motorcade.plugins.logs.queues.queue import Queue

DELAY: Final = 0.02  #: seconds; waking the store costs more than removing a few messages
RETRY: Final = 1.0  #: seconds until what failed is tried again
MAX_BATCH: Final = 1024  #: removals or marks of a level in one write

_LEVEL: Final = attrgetter("level")


class QueueAppend(msgspec.Struct, gc=False):
    """A message on its way into one queue."""

    queue: Queue
    level: Level
    draft: Draft
    size: int
    bound: Bound = NO_BOUND
    moved: QueueEntry | None = None  #: a dead letter, which leaves its queue with the same write
    error: StoreError | None = None  #: why the bound has refused it


class QueueStore:
    """Appends, removals and marks of all queues of a node."""

    def __init__(
        self,
        store: Store,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
        now: Callable[[], float],
        spawn: Spawn,
    ) -> None:
        self.store = store
        self.counters = counters
        self.log = log
        self.now = now
        self.spawn = spawn
        self.pending = 0  #: appends that the store has not answered
        self._appends = GroupWriter(store, now, self._fill_appends, self._appended)
        self._last: Group[QueueAppend]
        self._behind = WriteBehind(store, self._fill, lambda: DELAY, RETRY, self._written)
        # Of the write in flight:
        self._removed: list[tuple[Level, list[tuple[int, int]]]] = []
        self._marked: list[tuple[Level, list[QueueEntry]]] = []
        self._failing = False
        self._closing = False

    # -- appends

    def append(self, appends: Sequence[QueueAppend]) -> Commit[Any]:
        """Append to queues in one write; it fails if one of them refuses. Queues hear of it before the caller does."""
        for append in appends:
            append.queue.expect(append)
        self.pending += len(appends)
        group = self._last = self._appends.add(appends, sum([append.size for append in appends]))
        if not any(append.bound.refuse for append in appends):
            return group
        taken: Commit[None] = Commit()
        errors = (append.error for append in appends if append.error is not None)
        group.then(lambda: taken.finish(group.error or next(errors, None)))
        return taken

    def _fill_appends(self, batch: Batch, group: Group[QueueAppend]) -> None:
        spared: dict[Level, tuple[int]] = {}  # looking for it has a price
        for append in group.items:
            level = append.level
            if append.bound is NO_BOUND:
                batch.append([level.mailbox], append.draft, group.time)
            else:
                if level not in spared:
                    spared[level] = (append.queue.spared_up_to(level),)
                batch.append([level.mailbox], append.draft, group.time, append.bound, spared[level])
            if append.moved is not None:
                batch.acknowledge(append.moved.level.mailbox, [append.moved.position])

    def _appended(self, group: Group[QueueAppend]) -> None:
        self.pending -= len(group.items)
        answers = group.result.appended if group.error is None else [None] * len(group.items)
        queues: dict[Queue, None] = {}
        for append, answer in zip(group.items, answers, strict=True):
            queues[append.queue] = None
            try:
                if answer is None:
                    append.queue.not_appended(append, certain=group.refused)
                else:
                    append.error = append.queue.appended(append, answer, group.time)
            except Exception:
                self.log.exception("queue_failed", queue=append.queue.name)
        for queue in queues:
            try:
                queue.dispatch()
            except Exception:
                self.log.exception("queue_failed", queue=queue.name)

    # -- removals and marks

    def remove(self, entries: Sequence[QueueEntry]) -> None:
        """Remove messages soon; their queue hears of it."""
        for level, some in groupby(entries, key=_LEVEL):
            level.done += [(entry.position, entry.size) for entry in some]
            self._behind.change(level)

    def mark(self, entries: Sequence[QueueEntry]) -> None:
        """Store how often messages were sent, unless they are done meanwhile (rule 3)."""
        now = self.now()
        for level, some in groupby(entries, key=_LEVEL):
            urgent = False
            for entry in some:
                again = entry.attempts > 1 or entry.history is not None
                level.unmarked[entry] = 0.0 if again else now
                urgent |= again
            if urgent:
                self._behind.hurry(level)
            else:
                self._behind.change(level)

    async def close(self) -> None:
        """Write what is left."""
        self._closing = True
        if self.pending:
            with suppress(StoreError, TimeoutError):  # publishers are told
                await asyncio.wait_for(self._last, LAST_ATTEMPT)
        await self._behind.settle()

    def _fill(self, batch: Batch, levels: Collection[Level]) -> None:
        """Add removals and marks of some levels, but not of queues that are gone: others may have their positions."""
        self._removed, self._marked = [], []
        before = inf if self._closing else self.now() - DELAY  # most others are done before the next time
        for level in levels:
            if level.dispatcher.closed:
                continue
            done, level.done = level.done[:MAX_BATCH], level.done[MAX_BATCH:]
            if done:
                batch.acknowledge(level.mailbox, [position for position, _ in done])
                self._removed.append((level, done))
            sent = list(islice((entry for entry, since in level.unmarked.items() if since <= before), MAX_BATCH))
            for entry in sent:
                del level.unmarked[entry]
                batch.mark(level.mailbox, entry.position, min(entry.attempts, MAX_MARK))
            self._marked.append((level, sent))
            if level.done or level.unmarked:
                self._behind.change(level)

    def _written(self, _levels: Collection[Level], error: BaseException | None) -> None:
        if error is not None:
            self._failed(error)
            return
        if self._failing:
            self._failing = False
            self.log.info("queues_removed_again")
        for level, done in self._removed:
            positions, sizes = zip(*done, strict=True)
            level.dispatcher.effects.removed(level, positions, sum(sizes))

    def _failed(self, error: BaseException) -> None:
        """Keep what was not written for the retry."""
        if not self._failing:  # once until it succeeds again
            self._failing = True
            self.log.warning("queues_not_removed", error=str(error))
        for level, done in self._removed:
            level.done[:0] = done
        for level, sent in self._marked:
            self.counters["not_marked"] += len(sent)
            level.unmarked = {entry: 0.0 for entry in sent if entry.state is not EntryState.DONE} | level.unmarked
