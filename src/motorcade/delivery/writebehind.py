"""Write-behind: records that change often are written later, together; some of them now.

    change ─▶ waits until the interval is over ─┐
    hurry, flush ───────────────────────────────┴─▶ up to BATCH at a time ─▶ store.write ─▶ done, or retried

Rule 1: one batch is in flight at a time. What is urgent meanwhile waits for the next one; but for what must be written
        before what its caller writes next (`write_alone`).
Rule 2: a record is written as it is when its batch is made. One that changes while it is in flight is written again.
Rule 3: what could not be written is retried, before what has changed since; what was dropped meanwhile is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Final, Generic, Protocol, TypeVar

from motorcade.commit import Commit
from motorcade.storage.ports import Batch, StoreError

BATCH: Final = 500  #: records written at once
LAST_ATTEMPT: Final = 5.0  #: seconds for what is left at the end

T = TypeVar("T", bound=Hashable)


class BatchWriter(Protocol):
    """A store, or what stands before it."""

    def write(self, batch: Batch) -> Commit[Any]:
        """Write a batch."""


class WriteBehind(Generic[T]):
    """Write what has changed."""

    def __init__(
        self,
        store: BatchWriter,
        fill: Callable[[Batch, Collection[T]], None],
        interval: Callable[[], float],
        retry: float,
        done: Callable[[Collection[T], BaseException | None], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Take `fill`, which adds records to a batch as they are now, and `done`, told of each batch and why it failed.

        Without a loop it is the one that runs when something changes first.
        """
        self._store = store
        self._fill = fill
        self._interval = interval
        self._retry = retry
        self._done = done
        self._changed: dict[T, None] = {}  # to be written when the interval is over
        self._urgent: dict[T, None] = {}  # to be written now
        self._flying: dict[T, None] = {}  # being written
        self._alone: Counter[T] = Counter()  # being written by themselves, how often; but those that were dropped
        self._alone_flying = 0  # such writes
        self._writing = False  # a batch is in flight, though all that it has may be dropped meanwhile
        self._over: Commit[None] | None = None  # of `idle`
        self._waiters: dict[T, list[Commit[None]]] = {}  # of `flush`
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None  # the next batch, or retry, is due
        self._idle: asyncio.Event | None = None  # `settle` waits for it

    def __contains__(self, record: T) -> bool:
        """Return True if it is not written yet."""
        return record in self._changed or record in self._urgent or record in self._flying or record in self._alone

    def __iter__(self) -> Iterator[T]:
        """Iterate over what is not written yet; one that changes while it is in flight comes twice."""
        return chain(self._changed, self._urgent, self._flying, self._alone)

    @property
    def is_timed(self) -> bool:
        """Return True while the interval runs."""
        return self._timer is not None

    def change(self, record: T) -> None:
        """Write it when the interval is over."""
        if self._idle is not None:  # there is no later
            self.hurry(record)
            return
        self._changed[record] = None
        if self._timer is None:
            self._timer = self._get_loop().call_later(self._interval(), self._due)

    def hurry(self, record: T) -> None:
        """Write it now."""
        if self._next is not None and record in self._urgent and not self._changed:
            return  # as it is already to be
        self._changed.pop(record, None)
        self._urgent[record] = None
        self._write_soon()

    def flush(self, record: T) -> Commit[None]:
        """Write it now if it has changed. The commit is done with the next attempt, whether or not that succeeds."""
        if record not in self:
            return Commit.stored(None)
        commit: Commit[None] = Commit()
        self._waiters.setdefault(record, []).append(commit)
        self.hurry(record)
        return commit

    def idle(self) -> Commit[None]:
        """Return a commit that is done when everything that is in flight now has ended."""
        if not self._writing and not self._alone_flying:
            return Commit.stored(None)
        if self._over is None:
            self._over = Commit()
        return self._over

    def hurry_changed(self, record: T) -> None:
        """Write it now if it waits for the interval."""
        if record in self._changed:
            self.hurry(record)

    def write_alone(self, record: T) -> None:
        """Write it now if it is not being written as it is: before anything that its caller writes next."""
        if record not in self._changed and record not in self._urgent:
            return
        self._changed.pop(record, None)
        self._urgent.pop(record, None)
        self._alone[record] += 1
        self._alone_flying += 1
        commit = self._store_of([record])
        commit.then(partial(self._written_alone, record, commit))

    def _written_alone(self, record: T, commit: Commit[Any]) -> None:
        self._alone_flying -= 1
        dropped = record not in self._alone
        self._alone.subtract([] if dropped else [record])
        self._alone += Counter()  # without what is done
        self._done([record], commit.error)
        if commit.error is not None and not dropped:
            self._urgent[record] = None
            if self._next is None and not self._writing:
                self._next = self._get_loop().call_later(self._retry, self._write)
        self._finish_waiters(self._waiters.pop(record, ()) if record not in self else (), commit.error)
        self._batch_over()
        self._settled()

    def drop(self, record: T) -> None:
        """Do not write it, nor retry."""
        self._changed.pop(record, None)
        self._urgent.pop(record, None)
        self._flying.pop(record, None)
        self._alone.pop(record, None)
        for commit in self._waiters.pop(record, ()):
            commit.finish()

    def _due(self) -> None:
        self._timer = None
        self._urgent.update(self._changed)
        self._changed.clear()
        self._write_soon()

    def _write_soon(self) -> None:
        """Write at the end of this turn, so that what is urgent in it shares a batch."""
        if self._next is None and not self._writing:
            self._next = (self._loop or self._get_loop()).call_soon(self._write)

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _write(self) -> None:
        self._next = None
        some, self._urgent = self._urgent, {}
        if not some:  # all were dropped
            self._settled()
            return
        if len(some) > BATCH:
            records = iter(some)
            some, self._urgent = dict.fromkeys(islice(records, BATCH)), dict.fromkeys(records)
        self._flying, self._writing = some, True
        waiters: list[Commit[None]] = []
        if self._waiters:
            for record in some:
                waiters += self._waiters.pop(record, ())
        commit = self._store_of(some)
        commit.then(partial(self._written, commit, waiters))

    def _store_of(self, some: Collection[T]) -> Commit[Any]:
        batch = Batch()
        try:
            self._fill(batch, some)
            return self._store.write(batch)
        except Exception as error:  # noqa: BLE001 - a defect; it is retried like a failure of the store
            return Commit.failed(StoreError(repr(error)))

    def _written(self, commit: Commit[Any], waiters: Sequence[Commit[None]]) -> None:
        some, self._flying, self._writing = self._flying, {}, False
        self._done(some, commit.error)
        if commit.error is not None:
            self._urgent = some | self._urgent
            if self._idle is None:
                self._next = self._get_loop().call_later(self._retry, self._write)
        elif self._urgent:
            self._write_soon()
        self._finish_waiters(waiters, commit.error)
        self._batch_over()
        if self._idle is not None:
            self._settled()

    def _batch_over(self) -> None:
        if self._over is not None and not self._writing and not self._alone_flying:
            over, self._over = self._over, None
            over.finish()

    @staticmethod
    def _finish_waiters(waiters: Iterable[Commit[None]], error: BaseException | None) -> None:
        for waiter in waiters:
            waiter.finish(error)

    def _settled(self) -> None:
        if self._idle is not None and self._next is None and not self._writing and not self._alone:
            self._idle.set()

    async def settle(self) -> int:
        """Write everything, for the last time. Return how many records are left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._idle = asyncio.Event()
        self._due()
        try:
            async with asyncio.timeout(LAST_ATTEMPT):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._urgent) + len(self._flying) + len(self._alone)
