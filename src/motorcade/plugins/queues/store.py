"""What all queues of a node write.

Rule 1: a publish is one write, and its publisher is answered when that is stored. The commits of one turn of the event
        loop share a group inside the store; nothing is gathered here.
Rule 2: removals are written many at a time, up to `DELAY` later. One that fails is repeated until it succeeds; until
        then no consumer gets the message. One that is lost with the process means that its message comes again, as if
        the acknowledgement had been lost.
Rule 3: how often a message was sent is stored with its entry (`mark`), unless it is done within `DELAY`: consumers that
        acknowledge quickly cost no marks. What is sent again, or has failed, is rare, and stored at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.delivery.writebehind import WriteBehind
from motorcade.extension.plugin import Spawn
from motorcade.plugins.queues.dispatcher import Level, QueueEntry, State
from motorcade.plugins.queues.tables import MAX_MARK
from motorcade.storage.ports import Batch, Bound, Draft, Store, Written

if TYPE_CHECKING:
    from motorcade.plugins.queues.queue import Queue

DELAY: Final = 0.02  #: seconds; waking the store costs more than removing a few messages
RETRY: Final = 1.0  #: seconds until what failed is tried again
MAX_BATCH: Final = 1024  #: removals or marks of a level in one write

_LEVEL: Final = attrgetter("level")


class Append(msgspec.Struct, frozen=True, gc=False):
    """A message on its way into one queue."""

    queue: Queue
    level: Level
    draft: Draft
    bound: Bound
    spared: Sequence[int]  #: see `Mailboxes.append`

    @property
    def size(self) -> int:
        return len(self.draft.body) + len(self.draft.payload)


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
        self._behind = WriteBehind(store, self._fill, lambda: DELAY, RETRY, self._written)
        # Of the write in flight:
        self._removed: list[tuple[Level, list[tuple[int, int]]]] = []
        self._marked: list[tuple[Level, list[QueueEntry]]] = []
        self._failing = False
        self._closing = False

    # -- appends

    def append(self, appends: Sequence[Append], moved: QueueEntry | None = None) -> Commit[None]:
        """Append to queues in one write; it fails if one of them refuses. `moved` leaves its queue with the same write.

        Queues hear of it before the caller does.
        """
        batch = Batch()
        now = self.now()
        for append in appends:
            batch.append([append.level.mailbox], append.draft, now, append.bound, append.spared)
            append.queue.expect(append)
        if moved is not None:
            batch.acknowledge(moved.level.mailbox, [moved.position])
        self.pending += len(appends)
        taken: Commit[None] = Commit()
        commit = self.store.write(batch)
        commit.then(partial(self._appended, appends, commit, now, taken))
        return taken

    def _appended(self, appends: Sequence[Append], commit: Commit[Written], now: float, taken: Commit[None]) -> None:
        self.pending -= len(appends)
        error = commit.error
        answers = commit.result.appended if error is None else [None] * len(appends)
        for append, answer in zip(appends, answers, strict=True):
            try:
                if answer is None:
                    append.queue.not_appended(append, certain=commit.refused)
                else:
                    error = append.queue.appended(append, answer, now) or error
            except Exception:
                self.log.exception("queue_failed", queue=append.queue.name)
        taken.finish(error)

    # -- removals and marks

    def remove(self, entries: Sequence[QueueEntry]) -> None:
        """Remove messages soon; their queue hears of it."""
        for level, some in groupby(entries, key=_LEVEL):
            level.done += [(entry.position, entry.size) for entry in some]
            self._behind.change(level)

    def mark(self, entries: Sequence[QueueEntry], *, at_once: bool) -> None:
        """Store how often messages were sent, unless they are done meanwhile."""
        since = 0.0 if at_once else self.now()
        for level, some in groupby(entries, key=_LEVEL):
            level.unmarked.update(dict.fromkeys(some, since))
            if at_once:
                self._behind.hurry(level)
            else:
                self._behind.change(level)

    async def close(self) -> None:
        """Write what is left."""
        self._closing = True
        await self._behind.settle()

    def _fill(self, batch: Batch, levels: Sequence[Level]) -> None:
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

    def _written(self, _levels: Sequence[Level], error: BaseException | None) -> None:
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
            level.unmarked = {entry: 0.0 for entry in sent if entry.state is not State.DONE} | level.unmarked
