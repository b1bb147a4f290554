"""The writer: one thread that does everything that changes the store, in groups.

    event loop                               writer's thread
    submit ─▶ [ queue: max_queued ] ─▶ take all ─▶ transaction, write ─ transaction, write ─▶ one sync ─▶ one wake-up
       └────▶ [ line: the rest, in order ]                                                                   │
    commit ◀─────────────────────────────────────────────────────────────────────────────────────────────────┘

Rule 1: nothing is answered before the sync of its group, unless it asked for no sync and nothing in the group did.
Rule 2: first in, first out. What finds the queue full stands in line; none passes. What is submitted in one turn of
        the event loop is handed over at its end, in one piece: waking the thread for each call would make it take them
        one by one, and the two would fight for the interpreter.
Rule 3: writes go to RocksDB unsynced and one `flush_wal(True)` follows: the binding keeps the interpreter's lock during
        a write, sync included, but not during `flush_wal`. So writes are short (MERGE_ROWS) and the sync is free.
Rule 4: a write that fails means that the files cannot be trusted to take the next one. Everything is refused, reading
        goes on, and the files are opened again when there may be room; what was acknowledged is there then.
Rule 5: a transaction is written with its number, so that the files tell after a failure which of the last ones they
        have. What they do not have is refused for certain. What they have is answered when it is durable: when the
        files are open again. The outcome is unknown only if the files cannot even be read, or the store is closed
        before.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
from rocksdict import WriteOptions

from motorcade.commit import Commit
from motorcade.storage.files import Files, RocksTables, migrate, write_meta
from motorcade.storage.ports import (
    FENCED,
    Backlog,
    Fence,
    StoreConflictError,
    StoreError,
    StoreFencedError,
    StoreFullError,
)
from motorcade.storage.tables import META_APPLIED, META_BOOT, NUMBER
from motorcade.storage.transaction import Transaction, WriterState
from motorcade.storage.wakeups import Watchers

#: Calls that the writer holds. More stand in line until it has room, and their callers wait with them.
MAX_QUEUED = 4096

#: Calls in one group: bounds how long the first of a group waits for the last.
MAX_GROUP = 1024

#: Rows in one write, unless a single call has more. Two hundred take about 0.3 ms, during which no other thread runs.
#: A batch of two hundred owners and the receipts of another fit.
MERGE_ROWS = 256

#: Bytes of disk that must stay free; below that only what gives room is done. RocksDB needs some to tidy up.
RESERVE = 64 * 2**20

#: Seconds between two looks at the free room, and between two attempts to write again after an error.
LOOK_EVERY = 1.0

#: Seconds between two looks at the free room while nothing is written.
LOOK_IDLE = 10.0

T = TypeVar("T")

log = structlog.stdlib.get_logger("motorcade.storage")


class WriterCall(msgspec.Struct, eq=False):
    """Something for the writer to do."""

    apply: Callable[[Transaction], object]
    commit: Commit[Any] | asyncio.Future[Any]
    rows: int  #: about how many
    durable: bool  #: answered only after a sync
    grows: bool  #: takes room on the disk
    alone: bool  #: shares no transaction: it reads what others write
    bytes: int = 0  #: of values
    result: object = None
    error: BaseException | None = None
    in_doubt: bool = False  #: it may be written; answered when the files tell


class UnsyncedTransaction(msgspec.Struct, frozen=True):
    """A transaction that is written, or may be, and is not synced."""

    number: int
    calls: list[WriterCall]
    grown: dict[str, int] | None  #: streams that it appends to: their last offset
    detached: dict[str, tuple[str, Fence]] | None = None  #: homes that it gives up: as they were attached


class RocksWriter:
    """The thread, its queue and its state."""

    # Fewer than 30 attributes: beyond that, Python looks each of them up in a dictionary.

    def __init__(
        self, files: Files, state: WriterState, *, sync: bool, max_queued: int = MAX_QUEUED, reserve: int = RESERVE
    ) -> None:
        self.files = files
        self.state = state
        self.commits = 0
        self.writes = 0
        self.swept = 0
        self.faults = 0  #: times the thread has met what it does not expect
        self.queued = 0  #: calls not answered yet
        self.backlog = Backlog()  #: of `write`
        self.watchers = Watchers()  #: of streams
        self.fenced = False  #: nothing is written until it is opened again
        self.trouble: StoreError | None = None  #: why nothing can be written
        self._low: StoreFullError | None = None  #: why nothing more can be stored
        self._sync = sync
        self._reserve = reserve
        self._max_queued = max_queued
        self._held = 0  #: calls that the thread has yet to try
        self._turn: list[WriterCall] = []  #: submitted in this turn of the event loop
        self._line: deque[WriterCall] = deque()
        self._queue: queue.SimpleQueue[list[WriterCall] | None] = queue.SimpleQueue()
        self._options = WriteOptions()
        self._tables: RocksTables | None = None
        self._number = 0  #: of the last transaction
        self._unsynced: list[UnsyncedTransaction] = []  #: of the group
        self._doubtful: list[UnsyncedTransaction] = []  #: of groups that have failed, oldest first
        self._grown: dict[str, int] = {}  #: streams that the group appends to: their last offset
        self._looked_at = 0.0  #: for room, or whether writing is possible again
        self._loop: asyncio.AbstractEventLoop | None = None  #: while calls are taken
        self._event_loop: asyncio.AbstractEventLoop | None = None  #: where they are answered
        self._thread: threading.Thread | None = None

    # -- the event loop's side

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the files and start; takes a while, so call it beside the loop."""
        opened = self.files.open()
        try:
            migrate(opened)
            stored = opened.meta.get(META_BOOT)
            boot = (NUMBER.unpack(stored)[0] if stored is not None else 0) + 1
            write_meta(opened, META_BOOT, boot)
            self._number = _applied(opened)
            self.state.load(opened, boot)
        except BaseException as error:
            del opened
            self.files.close()
            if isinstance(error, StoreError) or not isinstance(error, Exception):
                raise
            raise self.files.explain(error, opening=True) from error
        self._tables = opened
        self.fenced = False
        self._loop = self._event_loop = loop
        self._thread = threading.Thread(target=self._run, name="motorcade-store", daemon=True)
        self._thread.start()

    def submit(
        self,
        apply: Callable[[Transaction], T],
        rows: int = 1,
        *,
        durable: bool = True,
        grows: bool = True,
        alone: bool = False,
    ) -> asyncio.Future[T]:
        """Let the writer do it; the future has the result when it is as durable as promised.

        For the methods of the ports, which wait for it at once: a future costs a tenth of a commit.
        """
        loop = self._loop
        if loop is None:
            raise StoreError("the store is closed")
        future: asyncio.Future[T] = loop.create_future()
        call = WriterCall(apply, future, rows, durable, grows, alone)
        self.queued += 1
        if self._held < self._max_queued:
            # As `_hold` does it, but written out: every acknowledgement passes here.
            self._held += 1
            if not self._turn:
                loop.call_soon(self._hand_over)
            self._turn.append(call)
        else:
            self._line.append(call)
        return future

    def write(
        self, apply: Callable[[Transaction], T], rows: int, size: int, *, durable: bool, grows: bool
    ) -> Commit[T]:
        """Let the writer do it, as `submit` does; never raises."""
        if self._loop is None:
            return Commit.failed(StoreError("the store is closed"))
        commit: Commit[T] = Commit()
        call = WriterCall(apply, commit, rows, durable, grows, False, size)
        self.queued += 1
        backlog = self.backlog
        backlog.rows += rows
        backlog.bytes += size
        if self._held < self._max_queued:
            self._hold(call, self._loop)
        else:
            self._line.append(call)
        return commit

    def _hold(self, call: WriterCall, loop: asyncio.AbstractEventLoop) -> None:
        self._held += 1
        if not self._turn:
            loop.call_soon(self._hand_over)
        self._turn.append(call)

    def _hand_over(self) -> None:
        if self._turn:
            self._queue.put(self._turn)
            self._turn = []

    @property
    def full(self) -> bool:
        """Takes no new entries now."""
        return self.trouble is not None or self._low is not None

    def condition(self) -> tuple[str, str]:
        """Return why not everything can be written, in few words and in the operator's; both empty: it can."""
        if self.fenced:
            return "is fenced", FENCED
        if self.trouble is not None:
            detail = str(self.trouble)
            return "has no room" if "No space left" in detail else "cannot be written", detail
        return ("has no room", str(self._low)) if self._low is not None else ("", "")

    async def close(self) -> None:
        """Commit what waits, then let go."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = None
        self._held += len(self._line)
        self._turn += self._line
        self._line.clear()
        self._hand_over()
        self._queue.put(None)
        await loop.run_in_executor(None, thread.join)
        # The thread's last wake-up is among what the loop does next.
        await asyncio.sleep(0)
        self._thread = None

    def _answer(self, calls: list[WriterCall], grown: dict[str, int], tried: int) -> None:
        """Answer calls, in the event loop, and let in what stands in line for those that were tried."""
        for stream, last in grown.items():
            self.watchers.tell(stream, last)
        self.queued -= len(calls)
        self._held -= tried
        backlog = self.backlog
        for call in calls:
            commit = call.commit
            if isinstance(commit, asyncio.Future):
                if commit.done():
                    continue  # its caller was cancelled
                if call.error is not None:
                    commit.set_exception(call.error)
                else:
                    commit.set_result(call.result)
                continue
            backlog.rows -= call.rows
            backlog.bytes -= call.bytes
            if call.error is not None:
                commit.finish(call.error)
            else:
                commit.settle(call.result)
        while self._line and self._held < self._max_queued and self._loop is not None:
            self._hold(self._line.popleft(), self._loop)

    # -- the thread's side

    def _run(self) -> None:
        while True:
            try:
                first = self._queue.get(timeout=LOOK_EVERY if self.trouble or self._low else LOOK_IDLE)
            except queue.Empty:
                self._guard(self._mend, [])
                continue
            group, closing = self._group(first)
            if group:
                self._grown = {}
                self._guard(partial(self._commit, group), group)
                answered = group if self.trouble is None else [call for call in group if not call.in_doubt]
                self._post(answered, self._grown, len(group))
            if closing:
                break
        if self._doubtful:
            self._guard(self._open_again, [])  # the last chance to tell
        self._tables = None
        self.files.close()
        self._give_up("the store was closed before it could tell what was written")

    def _post(self, calls: list[WriterCall], grown: dict[str, int], tried: int = 0) -> None:
        """Have calls answered in the event loop; `tried`: calls of the group that has ended, if one has."""
        # It may be gone if its owner did not close the store.
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._answer, calls, grown, tried)

    def _guard(self, step: Callable[[], None], calls: list[WriterCall]) -> None:
        """Keep the thread alive after a fault: callers would wait for ever. The files are opened again after it."""
        try:
            step()
        except Exception as error:
            self.faults += 1
            log.exception("store_writer_failed", consequence="the store refuses writes until its files are open again")
            self._fail(error)
            for call in calls:
                if call.error is None and not call.in_doubt:
                    self._allowed(call)

    def _group(self, first: list[WriterCall] | None) -> tuple[list[WriterCall], bool]:
        """Return everything that waits, up to about a bound, and whether to end after it."""
        group: list[WriterCall] = []
        calls = first
        while calls is not None:
            group += calls
            if len(group) >= MAX_GROUP:
                return group, False
            try:
                calls = self._queue.get_nowait()
            except queue.Empty:
                return group, False
        return group, True

    def _commit(self, group: list[WriterCall]) -> None:
        self._mend()
        durable = False
        part: list[WriterCall] = []
        rows = 0
        for call in group:
            if not self._allowed(call):
                continue
            if part and (call.alone or part[-1].alone or rows + call.rows > MERGE_ROWS):
                self._write(part)
                part, rows = [], 0
            part.append(call)
            rows += call.rows
            durable = durable or call.durable
        if part:
            self._write(part)
        if durable and self._sync and self.trouble is None and self._tables is not None:
            try:
                self._tables.db.flush_wal(True)
            except Exception as error:  # noqa: BLE001 - the binding knows no other
                self._fail(error)
        self._unsynced.clear()
        self.commits += 1

    def _allowed(self, call: WriterCall) -> bool:
        """Return True if the writer may try; if not, it knows why."""
        if self.fenced:
            call.error = StoreFencedError(FENCED)
            return False
        trouble = self.trouble or (self._low if call.grows else None)
        if trouble is None:
            return True
        call.error = type(trouble)(str(trouble))
        return False

    def _write(self, part: list[WriterCall]) -> None:
        """Write one transaction for all; if one call is impossible, one transaction for each."""
        opened = self._tables
        if self.trouble is not None or self.fenced or opened is None:
            for call in part:
                self._allowed(call)
            return
        transaction = Transaction(opened, self.state)
        try:
            for call in part:
                try:
                    call.result = call.apply(transaction)
                except (
                    StoreConflictError,
                    StoreFencedError,
                ) as error:  # raised before its first change: the others are not touched
                    call.error = error.with_traceback(None)  # which holds the transaction, and that the files
            batch = transaction.finish()
        except Exception as error:  # noqa: BLE001 - what the caller asked for, or the binding
            self.state.attach_again(transaction.detached)
            self._impossible(part, error, opened)
            return
        if not len(batch):
            if self._unsynced:  # it was answered from what these write, and stands or falls with them
                self._unsynced.append(UnsyncedTransaction(self._number, part, None, transaction.detached))
        else:
            self._number += 1
            batch.put(META_APPLIED, NUMBER.pack(self._number), opened.handles["meta"])
            self._unsynced.append(UnsyncedTransaction(self._number, part, transaction.grown, transaction.detached))
            try:
                opened.db.write(batch, self._options)
            except Exception as error:  # noqa: BLE001 - the binding knows no other
                self._fail(error)
                return
            transaction.written()
            if transaction.grown:
                self._grown.update(transaction.grown)
        self.writes += len(part)
        self.swept += transaction.swept

    def _impossible(self, part: list[WriterCall], error: Exception, opened: RocksTables) -> None:
        """Refuse the impossible call alone: nothing was written, and the others must not suffer for it."""
        try:
            self.state.forget(opened)
        except Exception as worse:  # noqa: BLE001 - the binding knows no other
            self._fail(worse)
            for call in part:
                self._allowed(call)
            return
        if len(part) > 1:
            for call in part:
                call.error = None
                self._write([call])
            return
        known = isinstance(error, (StoreError, ValueError, TypeError))
        error.__traceback__ = None  # it holds the transaction, and that holds the files
        part[0].error = error if known else self.files.explain(error)

    def _fail(self, error: Exception) -> None:
        """Take no more writes, and find out which of the last ones the files have (rule 5)."""
        self.trouble = self.files.explain(error)
        self._looked_at = time.monotonic()
        self._grown = {}
        self._doubtful += self._unsynced
        for unsettled in self._unsynced:
            for call in unsettled.calls:
                call.in_doubt = True
        self._unsynced = []
        if not self._doubtful:
            return
        try:
            applied = _number(self.files.stored(META_APPLIED))  # reading goes on with what is open
        except StoreError:
            self._give_up("the files cannot tell what was written")
        else:
            self._settle(applied, durable=False)

    def _settle(self, applied: int, *, durable: bool) -> None:
        """Refuse what is in doubt and not written; answer what is written, if it is durable as well."""
        doubtful, self._doubtful = self._doubtful, []
        for unsettled in doubtful:
            if unsettled.number > applied:
                self.state.attach_again(unsettled.detached)
                for call in unsettled.calls:
                    call.error = StoreFullError(str(self.trouble))
                self._post(unsettled.calls, {})
            elif durable:
                self._post(unsettled.calls, unsettled.grown or {})
            else:
                self._doubtful.append(unsettled)

    def _give_up(self, why: str) -> None:
        """Answer what is in doubt: the outcome is unknown."""
        doubtful, self._doubtful = self._doubtful, []
        for unsettled in doubtful:
            for call in unsettled.calls:
                call.error = StoreError(f"{why}: {self.trouble}")
            self._post(unsettled.calls, {})

    # -- room

    def _mend(self) -> None:
        """Look whether there is room, now and then; after an error, whether writing is possible again."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY:
            return
        self._looked_at = now
        if self.trouble is not None:
            self._open_again()
        else:
            self._look()

    def _look(self) -> None:
        free = self.files.free_bytes()
        self._low = None
        if free < self._reserve:
            self._low = StoreFullError(
                f"the disk of the store at {self.files.path} has {free >> 20} MiB left, {self._reserve >> 20} MiB are "
                "kept in reserve; it goes on when there is room"
            )

    def _open_again(self) -> None:
        # Opening turns the logs into sorted files. Without room for that it fails, and reading would end as well.
        if self.files.free_bytes() < max(self._reserve, self.files.log_bytes() + 2**20):
            return
        self._tables = None
        self.files.close()
        try:
            opened = self.files.open()
        except StoreError as error:
            self.trouble = error
            try:
                self._settle(_applied(self.files.open(read_only=True)), durable=False)
            except StoreError:
                self._give_up("the files cannot tell what was written")  # reading has to wait as well
            return
        self._tables = opened
        try:
            self.state.load(opened)
            # Opening may succeed where writing does not: only a write that is synced proves it.
            boot: bytes = opened.meta[META_BOOT] or b""
            write_meta(opened, META_BOOT, NUMBER.unpack(boot)[0])
            if self._sync:
                opened.db.flush_wal(True)
        except Exception as error:  # noqa: BLE001 - the binding knows no other
            self.trouble = self.files.explain(error)
            return
        self._settle(_applied(opened), durable=True)
        self.trouble = None
        self._look()


def _applied(opened: RocksTables) -> int:
    """Return the number of the last transaction that the files have."""
    return _number(opened.meta.get(META_APPLIED))


def _number(stored: bytes | None) -> int:
    return int(NUMBER.unpack(stored)[0]) if stored is not None else 0
