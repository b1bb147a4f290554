"""The writer: one thread that does everything that changes the store, in groups.

    event loop                               writer's thread
    submit ─▶ [ queue: max_queued ] ─▶ take all ─▶ transaction, write ─ transaction, write ─▶ one sync ─▶ one wake-up
       └────▶ [ line: the rest, in order ]                                                                   │
    future ◀─────────────────────────────────────────────────────────────────────────────────────────────────┘

Rule 1: nothing is answered before the sync of its group, unless it asked for no sync and nothing in the group did.
Rule 2: first in, first out. What finds the queue full stands in line; nobody passes. What is submitted in one turn of
        the event loop is handed over at its end, in one piece: waking the thread for each call would make it take them
        one by one, and the two would fight for the interpreter.
Rule 3: writes go to RocksDB unsynced and one `flush_wal(True)` follows: the binding keeps the interpreter's lock during
        a write, sync included, but not during `flush_wal`. So writes are short (MERGE_ROWS) and the sync is free.
Rule 4: a write that fails means that the files cannot be trusted to take the next one. Everything is refused, reading
        goes on, and the files are opened again when there may be room; what was acknowledged is there then.
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

from motorcade.storage.files import Files, Tables, migrate, write_meta
from motorcade.storage.ports import StoreError, StoreFullError
from motorcade.storage.tables import META_BOOT, NUMBER
from motorcade.storage.transaction import State, Transaction
from motorcade.storage.wakeups import Watchers

#: Calls that the writer holds. More stand in line until it has room, and their callers wait with them.
MAX_QUEUED = 4096

#: Calls in one group: bounds how long the first of a group waits for the last.
MAX_GROUP = 1024

#: Rows in one write, unless a single call has more. Two hundred take about 0.3 ms, during which no other thread runs.
#: A batch of two hundred owners and the receipts of another fit.
MERGE_ROWS = 256

#: Octets of disk that must stay free; below that only what gives room is done. RocksDB needs some to tidy up.
RESERVE = 64 * 2**20

#: Seconds between two looks at the free room, and between two attempts to write again after an error.
LOOK_EVERY = 1.0

#: Seconds between two looks at the free room while nothing is written.
LOOK_IDLE = 10.0

T = TypeVar("T")

log = structlog.stdlib.get_logger("motorcade.storage")


class Call(msgspec.Struct, eq=False):
    """Something for the writer to do."""

    apply: Callable[[Transaction], object]
    future: asyncio.Future[Any]
    rows: int  #: about how many
    durable: bool  #: answered only after a sync
    grows: bool  #: takes room on the disk
    alone: bool  #: shares no transaction: it reads what others write
    result: object = None
    error: BaseException | None = None


class Writer:
    """The thread, its queue and its state."""

    def __init__(
        self, files: Files, state: State, *, sync: bool, max_queued: int = MAX_QUEUED, reserve: int = RESERVE
    ) -> None:
        self.files = files
        self.state = state
        self.commits = 0
        self.writes = 0
        self.swept = 0
        self.refused = 0  #: calls refused for want of room
        self.faults = 0  #: times the thread has met what it does not expect
        self.queued = 0  #: calls not answered yet
        self.watchers = Watchers()  #: of streams
        self.trouble: StoreError | None = None  #: why nothing can be written
        self._low: StoreFullError | None = None  #: why nothing more can be stored
        self._sync = sync
        self._reserve = reserve
        self._max_queued = max_queued
        self._held = 0  #: calls given to the thread and not answered yet
        self._turn: list[Call] = []  #: submitted in this turn of the event loop
        self._line: deque[Call] = deque()
        self._queue: queue.SimpleQueue[list[Call] | None] = queue.SimpleQueue()
        self._options = WriteOptions()
        self._tables: Tables | None = None
        self._grown: dict[str, int] = {}  #: streams that the group appends to: their last offset
        self._looked_at = 0.0
        self._tried_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
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
            self.state.load(opened, boot)
        except BaseException as error:
            del opened
            self.files.close()
            if isinstance(error, StoreError) or not isinstance(error, Exception):
                raise
            raise self.files.explain(error, opening=True) from error
        self._tables = opened
        self._loop = loop
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
        """Let the writer do it; the future has the result when it is as durable as promised."""
        if self._loop is None:
            raise StoreError("the store is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        call = Call(apply, future, rows, durable, grows, alone)
        self.queued += 1
        if self._held < self._max_queued:
            # As `_hold` does it, but written out: every acknowledgement passes here.
            self._held += 1
            if not self._turn:
                self._loop.call_soon(self._hand_over)
            self._turn.append(call)
        else:
            self._line.append(call)
        return future

    def _hold(self, call: Call) -> None:
        self._held += 1
        if not self._turn:
            call.future.get_loop().call_soon(self._hand_over)
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
        """Why not everything can be written, in few words and in the operator's; both empty: it can."""
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

    def _answer(self, group: list[Call], grown: dict[str, int]) -> None:
        """In the event loop: answer a group and let in who stands in line."""
        for stream, last in grown.items():
            self.watchers.tell(stream, last)
        self.queued -= len(group)
        self._held -= len(group)
        for call in group:
            if call.future.cancelled():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.result)
        while self._line and self._held < self._max_queued:
            call = self._line.popleft()
            if call.future.cancelled():
                self.queued -= 1
                continue
            self._hold(call)

    # -- the thread's side

    def _run(self) -> None:
        loop = self._loop
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
                # The loop may be gone if its owner did not close the store; there is nobody to tell then.
                if loop is not None and not loop.is_closed():
                    loop.call_soon_threadsafe(self._answer, group, self._grown)
            if closing:
                break
        self._tables = None
        self.files.close()

    def _guard(self, step: Callable[[], None], calls: list[Call]) -> None:
        """A fault must not end the thread: every caller would wait for ever. The files are opened again after it."""
        try:
            step()
        except Exception as error:
            self.faults += 1
            log.exception("store_writer_failed", consequence="the store refuses writes until its files are open again")
            self._grown = {}
            self._fail(error, calls)

    def _group(self, first: list[Call] | None) -> tuple[list[Call], bool]:
        """Everything that waits, up to about a bound, and whether to end after it."""
        group: list[Call] = []
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

    def _commit(self, group: list[Call]) -> None:
        self._mend()
        durable = False
        part: list[Call] = []
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
        if durable and self._sync:
            self._flush(group)
        self.commits += 1

    def _flush(self, group: list[Call]) -> None:
        """Make a group as durable as promised; if it cannot be, nobody knows of its calls."""
        if self.trouble is not None or self._tables is None:
            # Some were written before a write failed, and are not synced.
            self._grown = {}
            for call in group:
                call.error = call.error or StoreError(str(self.trouble))
            return
        try:
            self._tables.db.flush_wal(True)
        except Exception as error:  # noqa: BLE001 - the binding knows no other
            self._grown = {}
            self._fail(error, group)

    def _allowed(self, call: Call) -> bool:
        """Whether it may be tried; if not, it knows why."""
        trouble = self.trouble or (self._low if call.grows else None)
        if trouble is None:
            return True
        self.refused += 1
        call.error = type(trouble)(str(trouble))
        return False

    def _write(self, part: list[Call]) -> None:
        """One transaction for all; if one of them is impossible, one for each."""
        opened = self._tables
        if self.trouble is not None or opened is None:
            for call in part:
                self._allowed(call)
            return
        transaction = Transaction(opened, self.state)
        try:
            for call in part:
                call.result = call.apply(transaction)
            batch = transaction.finish()
        except Exception as error:  # noqa: BLE001 - what the caller asked for, or the binding
            self._impossible(part, error, opened)
            return
        if len(batch):
            try:
                opened.db.write(batch, self._options)
            except Exception as error:  # noqa: BLE001 - the binding knows no other
                self._fail(error, part)
                return
            transaction.written()
            if transaction.grown:
                self._grown.update(transaction.grown)
        self.writes += len(part)
        self.swept += transaction.swept

    def _impossible(self, part: list[Call], error: Exception, opened: Tables) -> None:
        """Nothing was written; the others must not suffer for the one."""
        try:
            self.state.forget(opened)
        except Exception as worse:  # noqa: BLE001 - the binding knows no other
            self._fail(worse, part)
            return
        if len(part) > 1:
            for call in part:
                self._write([call])
            return
        known = isinstance(error, (StoreError, ValueError, TypeError))
        error.__traceback__ = None  # it holds the transaction, and that holds the files
        part[0].error = error if known else self.files.explain(error)

    def _fail(self, error: Exception, calls: list[Call]) -> None:
        """The files take no more writes.

        Whether these calls were written shows only when the files are opened again: their error is not a certain one.
        """
        self.trouble = trouble = self.files.explain(error)
        self._tried_at = time.monotonic()
        for call in calls:
            if call.error is None:
                call.error = StoreError(str(trouble)) if trouble.certain else type(trouble)(str(trouble))

    # -- room

    def _mend(self) -> None:
        """Look whether there is room, now and then; after an error, whether writing is possible again."""
        now = time.monotonic()
        if self.trouble is not None:
            if now - self._tried_at >= LOOK_EVERY:
                self._tried_at = now
                self._open_again()
        elif now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._look()

    def _look(self) -> None:
        free = self.files.free_octets()
        self._low = None
        if free < self._reserve:
            self._low = StoreFullError(
                f"the disk of the store at {self.files.path} has {free >> 20} MiB left, {self._reserve >> 20} MiB are "
                "kept in reserve; it goes on when there is room"
            )

    def _open_again(self) -> None:
        # Opening turns the logs into sorted files. Without room for that it fails, and reading would end as well.
        if self.files.free_octets() < max(self._reserve, self.files.log_octets() + 2**20):
            return
        self._tables = None
        self.files.close()
        try:
            opened = self.files.open()
        except StoreError as error:
            self.trouble = error
            try:
                self.files.open(read_only=True)
            except StoreError:
                pass  # reading has to wait as well
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
        self.trouble = None
        self._look()
