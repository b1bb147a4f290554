"""How far each consumer is with its queue, and how that gets into the store.

    acknowledgements ─▶ Progress ─▶ changed: written together, an interval later ─┐
    consumer leaves, rewind, somebody looks ─▶ urgent: written now ───────────────┴─▶ records

Rule 1: progress grows, or is set by a rewind; who has consumed before it was set (`epoch`) changes nothing any more.
Rule 2: what is in memory is newer than what is stored until it is written. So a `Progress` stays here while somebody
        uses it or it is not written yet, and a consumer that comes back finds it.
Rule 3: what is lost with the process is at most an interval old: these messages come again.
Rule 4: what is shown to operators is what is stored, so that nobody sees progress go back after a crash.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from motorcade.extension.compacted import Form
from motorcade.extension.gathered import Gathered
from motorcade.extension.plugin import Spawn
from motorcade.plugins.ecq.queue import Queue, Queues
from motorcade.plugins.ecq.tables import ProgressRecord, decode_progress, encode
from motorcade.storage.ports import Batch, Store, StoreError

RETRY: Final = 1.0  #: seconds until a batch that failed is tried again
MADE_UP: Final = "auto-"  #: ids that the broker gives to clients without one begin so: they never come back


class Progress:
    """How far one consumer is."""

    __slots__ = ("client", "epoch", "kept", "key", "loaded", "number", "queue", "stored", "time", "users", "waiters")

    def __init__(self, queue: Queue, client: str) -> None:
        self.queue = queue
        self.client = client
        self.key = queue.shape.progress_key(queue.name, client)
        self.number = 0  #: everything up to it was acknowledged
        self.time = 0.0  #: of the last change; 0: never
        self.stored: ProgressRecord | None = None  #: what is in the store
        self.epoch = 0  #: one more with each rewind
        self.loaded = False
        self.kept = True  #: whether it is written at all
        self.users = 0
        self.waiters: list[asyncio.Future[None]] = []

    def take(self, stored: ProgressRecord | None) -> None:
        """What was read, unless somebody else has read it meanwhile."""
        if not self.loaded:
            self.loaded = True
            self.stored = stored
            if stored is not None:
                self.number, self.time = stored.number, stored.time


class Ledger:
    """All progress that is in use, and its way into the store."""

    def __init__(
        self,
        store: Store,
        queues: Queues,
        now: Callable[[], float],
        spawn: Spawn,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._store = store
        self._queues = queues
        self._now = now
        self._counters = counters
        self._log = log
        self.gathered = Gathered(self._write, self._interval, RETRY, spawn, "progress", self._written)
        self._open: dict[tuple[Form, str], Progress] = {}
        self._failing = False

    # -- who uses it

    def open(self, queue: Queue, client: str) -> Progress:
        """The progress of a consumer, perhaps not loaded yet; to be given back with `close`."""
        progress = Progress(queue, client)
        place = queue.shape.form, progress.key
        progress = self._open.setdefault(place, progress)
        progress.users += 1
        return progress

    def peek(self, queue: Queue, client: str) -> Progress | None:
        """Progress that somebody uses, or that is not written yet."""
        return self._open.get((queue.shape.form, queue.shape.progress_key(queue.name, client)))

    def unwritten(self, queue: Queue) -> list[Progress]:
        """What is not in the store yet, of one queue."""
        shape, name = queue.shape, queue.name
        return [progress for progress in self.gathered if progress.queue.shape is shape and progress.queue.name == name]

    def close(self, progress: Progress) -> None:
        """Somebody is done with it: what has changed is written now."""
        progress.users -= 1
        if not progress.users and self.gathered.waits(progress):
            self.gathered.hurry(progress)
        self._drop_unused(progress)

    def _drop_unused(self, progress: Progress) -> None:
        if progress.users or progress in self.gathered:
            return
        place = progress.queue.shape.form, progress.key
        if self._open.get(place) is progress:
            del self._open[place]

    async def load(self, progress: Progress) -> None:
        """Read what is stored, unless it is known; `StoreError`."""
        if progress.loaded:
            return
        stored = await self.read(progress.queue, progress.client)
        if stored is None and progress.queue.shape.form is Form.SHARED:
            await self._admit(progress)
        progress.take(stored)

    async def read(self, queue: Queue, client: str) -> ProgressRecord | None:
        """What is stored of a consumer."""
        shape = queue.shape
        key = shape.progress_key(queue.name, client)
        value = await self._store.records.get(shape.progress, key, self._now())
        return self.decode(key, value) if value is not None else None

    def decode(self, key: str, value: bytes) -> ProgressRecord | None:
        """What a record says; one that cannot be read is as none: its consumer gets everything again."""
        try:
            return decode_progress(value)
        except (msgspec.MsgspecError, ValueError) as error:
            self._counters["progress_unreadable"] += 1
            self._log.error("ecq_progress_unreadable", key=key, error=str(error))
            return None

    async def _admit(self, progress: Progress) -> None:
        """A new consumer of a shared queue: its progress is kept if there are not too many, and if it may come back."""
        queue = progress.queue
        if progress.client.startswith(MADE_UP):
            progress.kept = False
            return
        if queue.progresses is None:
            number = 0
            async for _ in self._store.records.scan(queue.shape.progress, self._now(), f"{queue.name}/"):
                number += 1
            queue.progresses = number
        if queue.progresses >= self._queues.config.max_consumers:
            progress.kept = False
            self._counters["refused_consumers"] += 1
            self._log.warning("ecq_progress_not_kept", queue=queue.owner, client=progress.client, why="max_consumers")
        else:
            queue.progresses += 1

    # -- changes

    def advance(self, progress: Progress, epoch: int, number: int) -> None:
        """A consumer has acknowledged everything up to a number (rule 1)."""
        if epoch == progress.epoch and number > progress.number:
            progress.number = number
            self._change(progress)

    def rewind(self, progress: Progress, number: int) -> None:
        """Set it; who consumes now is told by the caller."""
        progress.epoch += 1
        progress.number = number
        self._change(progress)

    def _change(self, progress: Progress) -> None:
        progress.time = self._now()
        if progress.kept:
            self.gathered.change(progress)

    def _interval(self) -> float:
        return self._queues.config.progress_interval

    def forget(self, progress: Progress, number: int) -> None:
        """Its queue is deleted: nothing of it is written, but for what comes later. The caller deletes the record."""
        progress.epoch += 1
        progress.number = number
        progress.stored = None
        self.gathered.drop(progress)
        for waiter in progress.waiters:
            if not waiter.done():
                waiter.set_result(None)  # there is nothing to wait for any more
        progress.waiters = []
        self._drop_unused(progress)

    async def flush(self, progress: Progress) -> None:
        """Write it now, if it has changed; done when it is stored. `StoreError` says that it is not yet."""
        if progress in self.gathered:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            progress.waiters.append(done)
            self.gathered.hurry(progress)
            await done

    # -- into the store

    def _written(self, some: list[Progress]) -> None:
        for progress in some:
            self._drop_unused(progress)

    async def _write(self, some: list[Progress]) -> bool:
        now = self._now()
        batch = Batch()
        records: list[ProgressRecord] = []
        waiters: list[asyncio.Future[None]] = []
        for progress in some:
            stored = ProgressRecord(progress.number, progress.time)
            shape = progress.queue.shape
            # Progress of an exclusive queue goes with its queue.
            until = now + self._queues.config.idle if shape.form is Form.SHARED else 0.0
            batch.put(shape.progress, progress.key, encode(stored), until)
            records.append(stored)
            waiters += progress.waiters
            progress.waiters = []
        error: StoreError | None = None
        try:
            await self._store.write(batch)
        except Exception as problem:  # noqa: BLE001 - whatever it is, it is tried again
            error = problem if isinstance(problem, StoreError) else StoreError(repr(problem))
            self._failed(len(some), error)
        else:
            self._failing = False
            self._counters["progress_written"] += len(some)
            for progress, stored in zip(some, records, strict=True):
                progress.stored = stored
        for waiter in waiters:
            if not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
        return error is None

    def _failed(self, number: int, error: StoreError) -> None:
        self._counters["progress_failed"] += 1
        if not self._failing:  # once until it goes well again
            self._failing = True
            self._log.warning("ecq_progress_not_written", count=number, error=str(error))

    async def settle(self) -> None:
        """Write everything, for the last time; what the store does not take is delivered again."""
        left = await self.gathered.settle()
        if left:
            self._log.warning("ecq_progress_left", count=left)
