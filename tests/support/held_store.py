"""A store in memory whose writes are done when a test says so.

    broker ── commit, forget ──▶ [ waiting, in the order of the calls ] ── let_go ──▶ MemoryStore ──▶ broker is told
                                                                        ── fail ────▶ told so; written, or not, or later
                                                                        ── die ─────▶ nobody is told; written or not

Writes are applied in the order in which their calls began (ports, rule 6), each as a whole. A read sees what is there
when it is answered; with `held_reads` reads wait too.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

from motorcade.commit import Commit
from motorcade.storage.memory import (
    MemoryBlobs,
    MemoryCoordination,
    MemoryFeeds,
    MemoryRecords,
    MemoryStore,
    MemoryStreams,
)
from motorcade.storage.ports import (
    NO_BOUND,
    Append,
    Appended,
    Backlog,
    Batch,
    Bound,
    Draft,
    Elsewhere,
    Entry,
    Fence,
    MailboxInfo,
    Offer,
    Opened,
    Put,
    StoreCondition,
    StoreError,
    StoreFigures,
    StoreFullError,
    StreamRecord,
    Swept,
    Written,
    weigh,
)

T = TypeVar("T")


class Waiting(Generic[T]):
    """A call that waits."""

    def __init__(self, apply: Callable[[], T], *, removes: bool) -> None:
        self.apply = apply
        self.removes = removes  #: takes no room
        self.commit: Commit[T] = Commit()

    def go(self) -> None:
        """It is done, or refused by the store."""
        try:
            result = self.apply()
        except StoreError as error:
            self.refuse(error)
            return
        if not self.commit.done:
            self.commit.settle(result)

    def refuse(self, error: Exception) -> None:
        """It is not, or nobody knows."""
        if not self.commit.done:
            self.commit.finish(error)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of `MemoryStore`, which never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("the memory store waits")


class HeldMailboxes:
    """Mailboxes outside of batches."""

    def __init__(self, store: HeldStore) -> None:
        self._inner = store.inner.mailboxes
        self._wait = store.wait
        self._wait_read = store.wait_read

    async def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> list[Appended]:
        inner = self._inner
        return await self._wait(
            lambda: _run(inner.append(owners, draft, now, bound, spared, generations)), removes=False
        )

    async def make(self, owner: str) -> int:
        return await self._wait(lambda: _run(self._inner.make(owner)), removes=False)

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        return await self._wait_read(lambda: _run(self._inner.read(owner, after, limit, now)))

    async def entries(self, owner: str, positions: Sequence[int], now: float) -> list[Entry]:
        return await self._wait_read(lambda: _run(self._inner.entries(owner, positions, now)))

    async def claimed(self, owner: str, claimer: str) -> list[int]:
        return await self._wait_read(lambda: _run(self._inner.claimed(owner, claimer)))

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        wanted = list(positions)
        return await self._wait(lambda: _run(self._inner.acknowledge(owner, wanted)), removes=True)

    async def mark(self, owner: str, position: int, mark: int) -> bool:
        return await self._wait(lambda: _run(self._inner.mark(owner, position, mark)), removes=True)

    async def info(self, owner: str) -> MailboxInfo:
        return await self._wait_read(lambda: _run(self._inner.info(owner)))

    async def clear(self, owner: str) -> int:
        return await self._wait(lambda: _run(self._inner.clear(owner)), removes=True)

    async def forget(self, owner: str, fence: Fence | None = None) -> int:
        return await self._wait(lambda: _run(self._inner.forget(owner, fence)), removes=True)

    def owners(self, feed: int | None = None) -> AsyncIterator[str]:
        return self._inner.owners(feed)


class HeldCoordination:
    """Homes, of which a member hears late that it has them where a test says so (`held_opens`)."""

    def __init__(self, store: HeldStore) -> None:
        self._inner = store.inner.coordination
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def try_open(self, *arguments: Any, **more: Any) -> Opened | Elsewhere:
        found = await self._inner.try_open(*arguments, **more)
        if self._store.held_opens:
            told: Commit[None] = Commit()
            self._store.opens.append(told)
            await told
        return found


class HeldStreams(MemoryStreams):
    """Streams outside of batches; what is appended and read is held only where a test says so (`streams_too`)."""

    def __init__(self, store: HeldStore) -> None:
        inner = store.inner.streams
        super().__init__(inner._gate)  # the same streams, and the same who watch them
        self.streams = inner.streams
        self._watchers = inner._watchers
        self._inner = inner
        self._wait = store.wait
        self._wait_read = store.wait_read
        self._store = store

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        if not self._store.streams_too:
            return await self._inner.append(stream, values, now)
        return await self._wait(lambda: _run(self._inner.append(stream, values, now)), removes=False)

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        if not self._store.streams_too:
            return await self._inner.read(stream, after, limit)
        return await self._wait_read(lambda: _run(self._inner.read(stream, after, limit)))

    async def trim(
        self, stream: str, before: float = 0.0, size_bytes: int = 0, records: int = 0, budget: int = 1000
    ) -> Swept:
        bounds = before, size_bytes, records, budget
        return await self._wait(lambda: _run(self._inner.trim(stream, *bounds)), removes=True)


class HeldStore:
    """See above. Everything is let go at once until `held` is set."""

    def __init__(self, *, atomic: bool = True) -> None:
        self.inner = MemoryStore()
        _run(self.inner.open())
        self.atomic = atomic
        self.loop: asyncio.AbstractEventLoop | None = None  #: in which answers come, also if a test asks from outside
        self.mailboxes = HeldMailboxes(self)
        self.streams = HeldStreams(self)
        self.held_opens = False  #: a home is attached at once, but the answer waits
        self.opens: deque[Commit[None]] = deque()
        self._coordination = HeldCoordination(self)
        self.backlog = Backlog()
        self.waiting: deque[Waiting[Any]] = deque()
        self.reads: deque[Waiting[Any]] = deque()
        self.held = False  #: writes wait
        self.held_reads = False
        self.streams_too = False  #: also what is appended to and read from streams outside of batches waits
        self.full = False  #: only what removes is done
        self.cut: int | None = None  #: so many calls of a batch are made, where batches are not atomic
        self.appended: set[tuple[str, bytes]] = set()  #: owners and payloads that have ever been written

    @property
    def blobs(self) -> MemoryBlobs:
        return self.inner.blobs

    @property
    def records(self) -> MemoryRecords:
        return self.inner.records

    @property
    def feeds(self) -> MemoryFeeds:
        return self.inner.feeds

    @property
    def coordination(self) -> MemoryCoordination:
        return cast("MemoryCoordination", self._coordination)

    @property
    def writer(self) -> str:
        return self.inner.writer

    async def open(self) -> None:
        """It is open from the beginning: what it has must outlive the process that is tested."""

    async def close(self) -> None:
        """Likewise."""

    async def sweep(
        self, now: float, budget: int, cursor: bytes = b"", kept: Callable[[int], bool] | None = None
    ) -> Swept:
        return await self.inner.sweep(now, budget, cursor, kept)

    async def figures(self) -> StoreFigures:
        return await self.inner.figures()

    def condition(self) -> StoreCondition:
        return self.inner.condition()

    async def check(self) -> list[str]:
        return await self.inner.check()

    # -- the broker's side

    def write(self, batch: Batch) -> Commit[Written]:
        """A batch."""
        # Records of streams are let through when it is full: what removes something has its receipt with it.
        grows = any(isinstance(step, (Append, Offer, Put)) for step in batch.steps)
        rows, size = weigh(batch)
        self.backlog.rows += rows
        self.backlog.bytes += size
        commit = self._hold(lambda: self._apply(batch), removes=not grows)
        commit.then(lambda: self._done(rows, size))
        return commit

    def _done(self, rows: int, size: int) -> None:
        self.backlog.rows -= rows
        self.backlog.bytes -= size

    def _apply(self, batch: Batch) -> Written:
        for step in batch.steps:
            if isinstance(step, Append):
                self.appended.update((owner, step.draft.payload) for owner in step.owners)
        if self.cut is not None:
            part = Batch()
            part.steps = batch.steps[: self.cut]
            return self.inner.apply(part)
        return self.inner.apply(batch)

    def _hold(self, apply: Callable[[], T], *, removes: bool) -> Commit[T]:
        call = Waiting(apply, removes=removes)
        self.waiting.append(call)
        if not self.held:
            self._soon(self.let_go)
        return call.commit

    def _soon(self, callback: Callable[[], None]) -> None:
        loop = events._get_running_loop() or self.loop
        assert loop is not None
        loop.call_soon(callback)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Answer as a callback of the loop does."""
        before = events._get_running_loop()
        events._set_running_loop(before or self.loop)
        try:
            yield
        finally:
            events._set_running_loop(before)

    async def wait(self, apply: Callable[[], T], *, removes: bool) -> T:
        """A write."""
        return await self._hold(apply, removes=removes)

    async def wait_read(self, apply: Callable[[], T]) -> T:
        """A read."""
        call = Waiting(apply, removes=True)
        self.reads.append(call)
        if not self.held_reads:
            self._soon(self.let_read)
        return await call.commit

    # -- the test's side; a turn of the loop must follow

    def let_go(self, count: int = 1_000_000) -> None:
        """The oldest writes are done."""
        with self._running():
            while self.waiting and count > 0:
                count -= 1
                call = self.waiting.popleft()
                if self.full and not call.removes:
                    call.refuse(StoreFullError("no room"))
                else:
                    call.go()

    def set_aside(self) -> Callable[[], None]:
        """Let others go before the oldest write, as if it were for another server; what returns carries it out."""
        call = self.waiting.popleft()

        def go() -> None:
            with self._running():
                call.go()

        return go

    def let_read(self, count: int = 1_000_000) -> None:
        """The oldest reads are done."""
        while self.reads and count > 0:
            count -= 1
            self.reads.popleft().go()

    def let_open(self) -> None:
        """Members hear that they have attached what they asked for."""
        while self.opens:
            self.opens.popleft().settle(None)

    def fail(self, error: Exception, *, written: bool = False, late: bool = False) -> None:
        """The oldest write fails; nobody is told whether it was written all the same, or will be in its turn."""
        call = self.waiting[0] if late else self.waiting.popleft()
        with self._running():
            if written:
                call.apply()
            call.refuse(error)

    def die(self, written: int = 0) -> None:
        """The process that has asked is gone; so many of its writes have been done."""
        for _ in range(min(written, len(self.waiting))):
            self.waiting.popleft().apply()
        self.waiting.clear()
        self.reads.clear()

    # -- what is there

    def entries(self, client_id: str) -> dict[int, int]:
        """Positions and marks in the mailbox of a session."""
        box = self.inner.mailboxes.boxes.get(f"session:{client_id}")
        return {} if box is None else {position: row.mark for position, row in box.rows.items()}

    def records_of(self, collection: str) -> dict[str, bytes]:
        """Records of a collection."""
        return {key: value for key, (value, _) in self.inner.records.collections.get(collection, {}).items()}
