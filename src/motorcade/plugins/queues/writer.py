"""What goes into the store, many at a time.

    Appender    messages of publishers, and dead letters: one batch is under way, the next one gathers meanwhile
    Remover     acknowledgements, which may ride on other commits, and the marks of what was sent

Rule 1: batches of appends are answered in the order in which they were begun, so the positions of one queue become
        known in their order. The dispatchers rely on that.
Rule 2: a removal that fails is repeated until it succeeds. Until then nobody gets the message again. Removals gather
        for `GATHER` seconds, unless there are `ENOUGH`: waking the store costs more than removing a few messages. One
        that is lost with the process only means that its message comes again, as if the acknowledgement had been lost.
Rule 3: a mark is written only for what is still unacknowledged `MARK_PAUSE` after the last ones were written, or
        `GATHER` after it was sent if that is longer ago. Consumers that acknowledge quickly cost no marks, and what a
        slow one has got is noted while it works. What is sent again, or was sent in vain, is rare, and noted at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from motorcade.core.message import Message
from motorcade.plugins.queues.dispatcher import Item
from motorcade.plugins.queues.tables import mark_of, owner_of
from motorcade.storage.ports import NO_BOUND, SPARE_ALL, Appended, Batch, Bound, Draft, Store, StoreError

if TYPE_CHECKING:
    from motorcade.plugins.queues.queue import Queue

BATCH_ROWS: Final = 512  #: appends in one batch
BATCH_OCTETS: Final = 4 * 1024 * 1024  #: bytes likewise; one message more than that goes alone
GATHER: Final = 0.01  #: seconds that acknowledgements, and first marks, wait for others
ENOUGH: Final = 512  #: acknowledgements that wait no longer
MARK_PAUSE: Final = 0.05  #: seconds between two batches of marks
REMOVALS: Final = 1024  #: positions or marks in one write
RETRY: Final = 1.0  #: seconds until what failed is tried again


class Row(msgspec.Struct, frozen=True, gc=False):
    """A message on its way into one queue."""

    queue: Queue
    level: int
    draft: Draft
    bound: Bound
    message: Message
    probe: bool = False  #: the queue is full: it may only replace an older value

    @property
    def size(self) -> int:
        return len(self.draft.body) + len(self.draft.payload)


class Job(msgspec.Struct, gc=False):
    """What belongs together: a message for one or more queues."""

    rows: list[Row]
    done: asyncio.Future[None] | None  #: somebody waits for it
    removal: Item | None = None  #: a dead letter leaves its old queue in the same batch
    origin: Queue | None = None  #: of the dead letter


class Appender:
    """Appends to all queues of a node."""

    def __init__(self, store: Store, now: Callable[[], float], log: structlog.stdlib.BoundLogger) -> None:
        self._store = store
        self._now = now
        self._log = log
        self._waiting: list[Job] = []
        self._flying: list[Job] = []
        self.pending = 0  #: rows that the store has not confirmed
        self._wake = asyncio.Event()
        self._failing = False

    def add(self, job: Job) -> None:
        """Append soon; what comes in one turn of the event loop shares a batch."""
        self._waiting.append(job)
        self.pending += len(job.rows)
        for row in job.rows:
            row.queue.expect(row)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled, also after a failure."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(0)  # the rest of this turn joins
                while self._waiting:
                    await self._write(self._next())
        finally:
            self._abandon()

    async def settle(self) -> None:
        """Wait until the store has answered for everything that was added until now."""
        done = asyncio.get_running_loop().create_future()
        self.add(Job([], done))
        with contextlib.suppress(StoreError):  # whose message it was has heard of it
            await done

    def _next(self) -> list[Job]:
        rows = octets = number = 0
        for job in self._waiting:
            rows += len(job.rows)
            octets += sum(row.size for row in job.rows)
            if number and (rows > BATCH_ROWS or octets > BATCH_OCTETS):
                break
            number += 1
        jobs, self._waiting = self._waiting[:number], self._waiting[number:]
        return jobs

    async def _write(self, jobs: list[Job]) -> None:
        self._flying = jobs
        now = self._now()
        spared: dict[str, int] = {}  # what consumers have is not pushed out
        try:
            batch = Batch()
            for job in jobs:
                for row in job.rows:
                    owner = owner_of(row.queue.name, row.level)
                    if row.bound is NO_BOUND:
                        batch.append([owner], row.draft, now)
                        continue
                    if owner not in spared:
                        # It is looked for only where something must go: a queue may have very many in flight.
                        full = row.queue.overflows
                        spared[owner] = row.queue.dispatcher.in_flight_to(row.level) if full else SPARE_ALL
                    batch.append([owner], row.draft, now, row.bound, [spared[owner]])
                if job.removal is not None and job.origin is not None:
                    batch.acknowledge(owner_of(job.origin.name, job.removal.level), [job.removal.position])
            answers = (await self._store.write(batch)).appended if any(job.rows for job in jobs) else []
        except StoreError as error:
            self._failed(jobs, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            self._failed(jobs, StoreError(f"appending has failed: {error!r}"))
        else:
            if self._failing:
                self._failing = False
                self._log.info("queues_appended_again")
            self._landed(jobs, answers, now)
        self._flying = []

    def _landed(self, jobs: list[Job], answers: list[Appended], now: float) -> None:
        answer = iter(answers)
        touched: dict[Queue, None] = {}
        for job in jobs:
            error: StoreError | None = None
            self.pending -= len(job.rows)
            for row in job.rows:
                error = self._tell(row, next(answer), now) or error
                touched[row.queue] = None
            if job.removal is not None and job.origin is not None:
                job.origin.removed(job.removal.level, [job.removal.position])
            _answer(job, error)
        for queue in touched:
            try:
                queue.dispatch()
            except Exception:  # noqa: BLE001 - as in `_tell`
                self._log.exception("queue_failed", queue=queue.name)

    def _tell(self, row: Row, answer: Appended, now: float) -> StoreError | None:
        """A queue hears what has become of a message. A defect in one must not stop all others."""
        try:
            return row.queue.appended(row, answer, now)
        except Exception:  # noqa: BLE001 - see above
            self._log.exception("queue_failed", queue=row.queue.name)
            return None

    def _failed(self, jobs: list[Job], error: StoreError) -> None:
        if not self._failing:  # once until it goes well again
            self._failing = True
            self._log.warning("queues_not_appended", error=str(error))
        for job in jobs:
            self.pending -= len(job.rows)
            for row in job.rows:
                row.queue.not_appended(row, certain=error.certain)
            _answer(job, error)

    def _abandon(self) -> None:
        error = StoreError("appending has ended before the store had confirmed the message")
        for job in (*self._flying, *self._waiting):
            _answer(job, error)
        self._flying, self._waiting = [], []


def _answer(job: Job, error: StoreError | None) -> None:
    if job.done is None or job.done.done():
        return
    if error is None:
        job.done.set_result(None)
    else:
        job.done.set_exception(error)
        job.done.exception()  # seen: nobody may be left to look at it


class Remover:
    """Acknowledgements and marks of all queues of a node."""

    def __init__(self, store: Store, counters: Counter[str], log: structlog.stdlib.BoundLogger) -> None:
        self._store = store
        self._counters = counters
        self._log = log
        self._done: dict[Queue, dict[int, list[int]]] = {}  # by level
        self._number = 0  # of positions there, or a few more
        self._gathering = False  # they are written soon
        self._marks: dict[Queue, None] = {}  # that have something to mark
        self._marked_at = 0.0  # loop time
        self._at_once = False  # there is a mark that is not to wait
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._failing = False

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._done or self._marks)

    def finish(self, queue: Queue, items: Sequence[Item]) -> None:
        """Remove messages."""
        level = items[0].level
        positions: list[int] = []
        for item in items:
            if item.level != level:
                self._add(queue, level, positions)
                level, positions = item.level, []
            positions.append(item.position)
        self._add(queue, level, positions)

    def _add(self, queue: Queue, level: int, positions: list[int]) -> None:
        levels = self._done.get(queue)
        if levels is None:
            levels = self._done[queue] = {}
        done = levels.get(level)
        if done is None:
            levels[level] = positions
        else:
            done += positions
        self._number += len(positions)
        if self._number >= ENOUGH:
            self._wake.set()
        elif not self._gathering:
            self._gathering = True
            self._wake_after(GATHER)

    def mark(self, queue: Queue, *, at_once: bool) -> None:
        """Note how often messages were sent, if they are not acknowledged before (rule 3)."""
        known = queue in self._marks
        self._marks[queue] = None
        if at_once:
            self._at_once = True
            self._wake.set()
        elif not known:
            loop = asyncio.get_running_loop()
            self._wake_after(max(GATHER, self._marked_at + MARK_PAUSE - loop.time()))

    def _wake_after(self, delay: float) -> None:
        """Write so much later, unless something wants it sooner."""
        loop = asyncio.get_running_loop()
        at = loop.time() + delay
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = loop.call_at(at, self._over)

    def _over(self) -> None:
        self._timer, self._timer_at = None, inf
        self._wake.set()

    def forget(self, queue: Queue) -> None:
        """A queue is no more: its positions may come again and mean something else."""
        self._done.pop(queue, None)
        self._marks.pop(queue, None)

    async def run(self) -> None:
        """Write until cancelled; also what an earlier run has left."""
        self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(0)
                if not await self.flush():
                    await asyncio.sleep(RETRY)
                    self._wake.set()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def close(self) -> None:
        """Write everything, however long it takes."""
        while self.pending:
            if not await self.flush(all_marks=True):
                await asyncio.sleep(RETRY)

    async def flush(self, *, all_marks: bool = False) -> bool:
        """Write what there is; False if something could not be written, which is kept."""
        loop = asyncio.get_running_loop()
        works = [self._remove(queue, level, positions) for queue, level, positions in self._take_done()]
        wait = self._marked_at + MARK_PAUSE - loop.time()
        if self._marks and (all_marks or self._at_once or wait <= 0):
            self._at_once = False
            self._marked_at = loop.time()
            works.append(self._mark())
        elif self._marks:
            self._wake_after(wait)
        outcome = [await works[0]] if len(works) == 1 else await asyncio.gather(*works)
        if self._failing and all(outcome) and works:
            self._failing = False
            self._log.info("queues_removed_again")
        return all(outcome)

    def _take_done(self) -> Iterable[tuple[Queue, int, list[int]]]:
        done, self._done = self._done, {}
        self._number = 0
        self._gathering = False
        for queue, levels in done.items():
            for level, positions in levels.items():
                if len(positions) > REMOVALS:
                    self._add(queue, level, positions[REMOVALS:])
                yield queue, level, positions[:REMOVALS]

    async def _remove(self, queue: Queue, level: int, positions: list[int]) -> bool:
        try:
            await self._store.mailboxes.acknowledge(owner_of(queue.name, level), positions)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message must not come again meanwhile
            self._complain(error)
            if not queue.closed:
                self._add(queue, level, positions)
            return False
        queue.removed(level, positions)
        return True

    async def _mark(self) -> bool:
        batch = Batch()
        number = 0
        queues, self._marks = self._marks, {}
        for queue in queues:
            unmarked = queue.dispatcher.unmarked
            for item in list(unmarked)[: REMOVALS - number]:
                del unmarked[item]
                batch.mark(owner_of(queue.name, item.level), item.position, mark_of(item.attempts))
                number += 1
            if unmarked:
                self.mark(queue, at_once=self._at_once)
        if not number:
            return True
        try:
            await self._store.write(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, removing must go on
            self._complain(error)
            self._counters["not_marked"] += number  # they count again when they are sent again
            return False
        return True

    def _complain(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            self._log.warning("queues_not_removed", error=str(error))
