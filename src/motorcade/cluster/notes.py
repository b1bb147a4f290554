"""The feeds of all cells, as one member follows them: notes go to handlers, and cells are read again.

    feed ─▶ tail ─▶ note ─▶ handler of its code             each once, in the order of the feed
               └─▶ gap ──▶ all handlers read that cell (`Reload`), and go on with what came after

Rule 1: who reads a cell takes the end of its feed first. What the reading finds contains all notes up to that end, so
        these are left out for this handler; those after it wait until the reading is over, and are handled then.
Rule 2: a handler that is new reads all cells by itself; the others go on meanwhile.
Rule 3: a note counts as handled (`handled`) when all handlers have it. While a cell is read again because notes are
        missing, nothing of it counts (`NotesOwner.reads`), until that is over.
Rule 4: a reading that fails begins again, with a new end. While the store is away that is tried every `RETRY` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import structlog

from motorcade.extension.cluster import End, NoteHandler, Reload
from motorcade.storage.ports import FeedEnd, FeedPage, Feeds, FeedTail, Note, StoreError
from motorcade.tasks import Tasks, Work

log = structlog.stdlib.get_logger("motorcade.cluster")

MAX_READING: Final = 8  #: cells that are read at the same time
RETRY: Final = 0.5  #: seconds until a cell is read again that could not be read
MAX_ERRORS: Final = 10  #: errors of handlers that are logged


class NotesOwner(Protocol):
    """Callbacks of the notes."""

    def reads(self, feed: int) -> None:
        """Handle that notes of a feed are missing, until something of it counts as handled."""

    def note_handled(self, feed: int) -> None:
        """Handle that more of a feed counts as handled, or that its cell was read."""


class _Registered:
    """A handler, and what it does not get yet."""

    __slots__ = ("floors", "handler", "held", "reload")

    def __init__(self, handler: NoteHandler, reload: Reload) -> None:
        self.handler = handler
        self.reload = reload
        self.held: dict[int, list[Note]] = {}  # of feeds whose cells it reads
        self.floors: dict[int, int] = {}  # by feed: notes up to that number were in what it has read

    def take(self, feed: int, note: Note) -> None:
        held = self.held.get(feed)
        if held is not None:
            held.append(note)
        elif note.number > self.floors.get(feed, 0):
            self.handler(feed, note.number, note.data[1:])


class _Cell:
    """The feed of one cell."""

    __slots__ = ("again", "feed", "gap", "gap_end", "handled", "lock", "reading", "seen")

    def __init__(self, feed: int, end: int) -> None:
        self.feed = feed
        self.seen = end  #: number of the last note that came
        self.handled = end  #: and of the last one that counts as handled
        self.reading = False  #: notes are missing, or it was never read
        self.again = False  #: it has to be read (again)
        self.gap = False  #: since notes are missing
        self.gap_end: int | None = None  #: end of the feed, while it is read for that reason
        self.lock = asyncio.Lock()  #: of the one who reads it


class NoteReader:
    """Follows all feeds of a store."""

    def __init__(self, feeds: Feeds, owner: NotesOwner, tasks: Tasks) -> None:
        self.count = 0  #: feeds; known when it follows them
        self.gaps = 0  #: times that notes were missing
        self.errors = 0  #: notes whose handler raised
        self._feeds = feeds
        self._owner = owner
        self._supervisor = tasks
        self._handlers: dict[str, _Registered] = {}
        self._cells: list[_Cell] = []
        self._tail: FeedTail | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_READING)
        self._unread = 0
        self._read = asyncio.Event()  # all cells were read once
        self._closed = False

    def on_note(self, code: str, handler: NoteHandler, reload: Reload) -> End:
        """Handle notes of a code, see `Cluster.on_note`; `ValueError` if another feature does so already."""
        if code in self._handlers:
            raise ValueError(f"notes that begin with {code!r} have a handler already")
        registered = self._handlers[code] = _Registered(handler, reload)
        if self._tail is not None:
            registered.held = {cell.feed: [] for cell in self._cells}
            self._start(partial(self._read_all, registered), f"cluster.read_for.{code}")

        def end() -> None:
            if self._handlers.get(code) is registered:
                del self._handlers[code]

        return end

    async def begin(self) -> None:
        """Read all cells, and follow what comes; return when all are read."""
        ends = await self._feeds.ends()
        self.count = len(ends)
        self._cells = [_Cell(feed, end.number) for feed, end in enumerate(ends)]
        self._tail = self._feeds.follow(ends)
        self._unread = len(self._cells)
        for cell, end in zip(self._cells, ends, strict=True):
            self._read_again(cell, end)
        self._start(partial(self._follow, self._tail), "cluster.follow")
        await self._read.wait()

    def close(self) -> None:
        """Follow the feeds, and read cells, no longer."""
        self._closed = True
        if self._tail is not None:
            self._tail.close()
        for task in self._tasks:
            task.cancel()

    def handled(self, feed: int) -> int:
        """Return the number of the last note of a feed that counts as handled."""
        return self._cells[feed].handled if self._cells else 0

    def is_reading(self, feed: int) -> bool:
        """Return True while notes of a feed are missing."""
        return not self._cells or self._cells[feed].reading

    @property
    def reading(self) -> int:
        """Return how many cells are read again now, or were never read."""
        return sum(cell.reading for cell in self._cells)

    def reload(self, feed: int) -> None:
        """Read a cell again, as if notes were missing."""
        if self._cells:
            self._read_again(self._cells[feed])

    def gap_end(self, feed: int) -> int | None:
        """Return the end of a feed whose cell is read because notes were missing (`Cluster.gap_end`)."""
        return self._cells[feed].gap_end if self._cells else None

    def look(self, feed: int) -> None:
        """Look at a feed at once: a note is there."""
        if self._tail is not None:
            self._tail.look(feed)

    # -- what comes

    async def _follow(self, tail: FeedTail) -> None:
        while True:
            feed, page = await tail.next()
            self._take(self._cells[feed], page)

    def _take(self, cell: _Cell, page: FeedPage) -> None:
        if page.gap:
            self.gaps += 1
            log.warning("cluster_notes_missing", feed=cell.feed, handled=cell.handled, consequence="it is read again")
            cell.gap = True
            self._read_again(cell)
            return
        for note in page.notes:
            registered = self._handlers.get(note.data[:1].decode("latin-1"))
            if registered is not None:
                self._hand_over(registered, cell.feed, note)
            cell.seen = note.number
        if not cell.reading:
            cell.handled = cell.seen
            self._owner.note_handled(cell.feed)

    def _hand_over(self, registered: _Registered, feed: int, note: Note) -> None:
        try:
            registered.take(feed, note)
        except Exception:
            self.errors += 1
            if self.errors <= MAX_ERRORS:
                log.exception("cluster_note_failed", feed=feed, number=note.number, consequence="it counts as handled")

    # -- reading cells

    def _start(self, work: Work, name: str) -> None:
        task = self._supervisor.start(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _read_again(self, cell: _Cell, end: FeedEnd | None = None) -> None:
        cell.again = True
        if cell.reading or self._closed:
            return
        cell.reading = True
        self._owner.reads(cell.feed)
        self._start(partial(self._read_cell, cell, [end] if end is not None else []), f"cluster.read.{cell.feed}")

    async def _read_cell(self, cell: _Cell, first: list[FeedEnd]) -> None:
        """Have all handlers read a cell until that succeeds (rule 4)."""
        while True:
            try:
                await self._try_to_read(cell, first)
            except StoreError as error:
                cell.again = True
                log.info("cluster_cell_not_read", feed=cell.feed, error=str(error))
            except Exception:
                cell.again = True
                raise
            else:
                break
            await asyncio.sleep(RETRY)
        self._owner.note_handled(cell.feed)
        if self._unread:
            self._unread -= 1
            if not self._unread:
                self._read.set()

    async def _try_to_read(self, cell: _Cell, first: list[FeedEnd]) -> None:
        """Have all handlers read a cell; `first`: its end, if that was just taken, with the tail there."""
        feed, tail = cell.feed, self._tail
        assert tail is not None  # noqa: S101 - `begin` has made it
        async with self._room, cell.lock:
            handlers: Sequence[_Registered] = ()
            while cell.again:
                handlers = list(self._handlers.values())
                for registered in handlers:
                    registered.held[feed] = []
                if first:
                    end = first.pop()
                else:
                    end = (await self._feeds.ends())[feed]
                    for registered in handlers:
                        registered.held[feed] = []  # the tail gives again what comes after the end
                    cell.seen = end.number
                    tail.reset(feed, end)
                if cell.gap:
                    cell.gap, cell.gap_end = False, end.number
                cell.again = False
                for registered in handlers:
                    registered.floors[feed] = end.number
                    await registered.reload(feed)
            for registered in handlers:
                self._release(registered, feed)
            cell.reading, cell.gap_end = False, None
            cell.handled = cell.seen

    async def _read_all(self, registered: _Registered) -> None:
        """Have a new handler read all cells."""
        ends: Sequence[FeedEnd] = ()
        for cell in self._cells:
            async with cell.lock:
                if cell.feed not in registered.held:
                    continue  # it has read the cell meanwhile, with the others or before a failure
                if cell.feed % MAX_READING == 0 or not ends:
                    ends = await self._feeds.ends()
                registered.floors[cell.feed] = ends[cell.feed].number
                await registered.reload(cell.feed)
                self._release(registered, cell.feed)

    def _release(self, registered: _Registered, feed: int) -> None:
        """Hand over what has waited for the reading of a cell."""
        for note in registered.held.pop(feed, ()):
            if note.number > registered.floors.get(feed, 0):
                self._hand_over(registered, feed, note)
