"""The embedded engine: all ports over RocksDB, for one node.

    rocks.py         the ports; everything that reads
    writer.py        one thread that commits in groups; everything that writes passes through it
    transaction/     what a write does: reads, decides, one atomic batch
    deltas.py        small rows that change often, logged as deltas first and put in place later
    stream_rows.py   reading streams, here and from outside the node
    packed_rows.py   records of a stream that share a row
    tables.py        keys and values
    files.py         opening, closing, errors in our words

Rule 1: a short read is made at once in the event loop's thread: a few microseconds, less than any way around it. A
        long one (more than DIRECT_ROWS rows, large payloads, whole tables) is made in steps in a thread of its own.
Rule 2: a read takes the tables with `enter` (in the event loop's thread: `enter_loop`) and gives them back with
        `leave` before it waits for anything; no iterator outlives that. An iterator pins files, and the lock on the
        directory.
Rule 3: the caches of the writer may be looked at, not changed. What they say may be ahead of the tables; only what
        holds even then is used: a mailbox without entries, and a position that no entry is below.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from motorcade.commit import Commit
from motorcade.storage import packed_rows, stream_rows, tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.due import DUE, due_homes
from motorcade.storage.files import BLOCK_CACHE, Files, OpeningAgainError, RocksTables, scan, scan_up_to
from motorcade.storage.homes import records_of
from motorcade.storage.inspect import inspect
from motorcade.storage.ports import (
    NO_BOUND,
    Acknowledge,
    AddNote,
    Append,
    Appended,
    Attached,
    Backlog,
    Batch,
    Bound,
    Claim,
    Delete,
    Detach,
    Draft,
    Durability,
    Elsewhere,
    Entry,
    FeedEnd,
    FeedPage,
    FeedTail,
    Fence,
    Formed,
    Lease,
    MailboxInfo,
    Make,
    Mark,
    Member,
    Note,
    Offer,
    Opened,
    Put,
    Release,
    SetDue,
    Spare,
    StoreCondition,
    StoreError,
    StoreFigures,
    StreamAppend,
    StreamInfo,
    StreamRecord,
    Swept,
    Take,
    Watcher,
    Written,
    bytes_of,
    check_feed,
    check_mark,
)
from motorcade.storage.tables import after_prefix
from motorcade.storage.tails import Tails
from motorcade.storage.transaction import (
    MAX_HEADS,
    MAX_SEEN_ROWS,
    Transaction,
    WriterState,
    feed_end,
    load_head,
    records_of_home,
)
from motorcade.storage.wakeups import WakeUps
from motorcade.storage.writer import MAX_QUEUED, RESERVE, RocksWriter

#: Rows that a read looks at in the event loop's thread: about 0.3 ms.
DIRECT_ROWS = 128

#: Rows that a read looks at in one step beside it.
STEP_ROWS = 1024

#: Bytes of payloads fetched in the event loop's thread.
DIRECT_BYTES = 256 * 1024

#: Bytes of payloads in the cache: one campaign serves thousands of vehicles.
PAYLOAD_CACHE = 16 * 2**20

#: Bytes of shared messages in the cache, payloads included though both caches may hold the same.
MESSAGE_CACHE = 16 * 2**20

#: Entries removed by one step of a sweep or of `clear`, so that other writes come in between.
STEP_REMOVALS = 256

#: Seconds a thread may run while another waits. With Python's own 5 ms the event loop would wait that long for its turn
#: whenever the writer is busy; with more than the writer's calls take (0.3 ms) it would wait for a whole group of them.
SWITCH_INTERVAL = 0.0002

T = TypeVar("T")

_pack = tables.NUMBER.pack
_unpack_entry = tables.ENTRY.unpack_from
_unpack_number = tables.NUMBER.unpack
_unpack_time = tables.EXPIRES.unpack_from

_ANY = 2**63  #: above all positions
_NEVER, _BLOB = tables.NEVER, tables.BLOB
_OWN_SIZE, _REFERENCE_SIZE, _REFERENCE_MARK_AT = tables.OWN_SIZE, tables.REFERENCE_SIZE, tables.REFERENCE_MARK_AT


class Content(NamedTuple):
    """The contents that the references to a shared message have in common."""

    key: bytes
    body: bytes
    payload: bytes
    stored_at: float


V = TypeVar("V", bytes, Content)


class ByteCache(Generic[V]):
    """Bounded in bytes; in two halves, of which the older one goes when the younger is full.

    Nothing in it can be out of date: a digest has one payload, a message one content.
    """

    def __init__(self, bound: int) -> None:
        self._half = bound // 2
        self._young: dict[bytes, V] = {}
        self._old: dict[bytes, V] = {}
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> V | None:
        return self._young.get(key) or self._old.get(key)

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        if size_bytes > self._half:
            return
        with self._lock:
            if self._size_bytes + size_bytes > self._half:
                self._old, self._young, self._size_bytes = self._young, {}, 0
            self._young[key] = value
            self._size_bytes += size_bytes


class TooMuchError(Exception):
    """More bytes than the event loop's thread should fetch."""


class EntryContents:
    """Completes entries: bodies and payloads from the caches, or from the tables."""

    def __init__(self) -> None:
        self.payloads: ByteCache[bytes] = ByteCache(PAYLOAD_CACHE)
        self._messages: ByteCache[Content] = ByteCache(MESSAGE_CACHE)

    def complete(self, found: list[tuple[int, bytes]], budget: int, opened: RocksTables) -> list[Entry]:
        """Return the entries of rows; those that were acknowledged between the two looks are left out.

        TooMuchError if more bytes than `budget` would have to be fetched.
        """
        entries: list[Entry] = []
        left = budget
        for position, row in found:
            if len(row) <= _REFERENCE_SIZE:
                number = row[:8]
                content = self._messages.get(number)
                if content is None:
                    left -= tables.facts(row)[1]
                    content = self._fetch(number, left, opened)
                    if content is None:
                        continue
                key, body, payload, stored_at = content
                until = tables.expiry(row) if len(row) == _REFERENCE_SIZE else 0.0
                entries.append(Entry(position, body, payload, key, stored_at, until, row[_REFERENCE_MARK_AT]))
                continue
            stored_at, expires_at, flags, mark, key_size, body_size, size = _unpack_entry(row)
            body_at = _OWN_SIZE + key_size
            payload_at = body_at + body_size
            if flags & _BLOB:
                data = self.payloads.get(row[-32:])
                if data is None:
                    left -= size
                    data = self.payload(row[-32:], left, opened)
                    if data is None:
                        continue
            else:
                data = row[payload_at:]
            key = row[_OWN_SIZE:body_at] if key_size else b""
            entries.append(Entry(position, row[body_at:payload_at], data, key, stored_at, expires_at, mark))
        return entries

    def payload(self, digest: bytes, left: int, opened: RocksTables) -> bytes | None:
        if left < 0:
            raise TooMuchError
        # As a list: unlike for a single key, that leaves the interpreter to other threads.
        found: list[bytes | None] = opened.blobs.get([digest]) or [None]
        data = found[0]
        if data is not None:
            self.payloads.put(digest, data, len(data))
        return data

    def _fetch(self, number: bytes, left: int, opened: RocksTables) -> Content | None:
        row = opened.shared.get(number)
        if row is None:
            return None
        entry = tables.parse_entry(row)
        payload: bytes | None = entry.payload
        if entry.flags & tables.BLOB:
            payload = self.payloads.get(entry.payload) or self.payload(entry.payload, left, opened)
            if payload is None:
                return None
        content = Content(entry.key, entry.body, payload or b"", entry.stored_at)
        self._messages.put(number, content, entry.size_bytes)
        return content


class TableReader:
    """The ports' access to the tables: in this thread, or in steps beside it."""

    def __init__(self, files: Files, writer: RocksWriter) -> None:
        self.files = files
        self.is_open = False
        self.member = Member("", 0.0)  #: this store object, while it is open
        self._writer = writer
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="motorcade-store-read")
        self.member = Member(secrets.token_hex(8), time.time())
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    async def enter(self) -> RocksTables:
        """Return the tables, to be given back with `files.leave_loop`; waits while they are being opened again."""
        while self.is_open:
            opened = self.files.enter_loop()
            if opened is not None:
                return opened
            await asyncio.sleep(0.01)
        raise StoreError("the store is closed")

    async def now(self, look: Callable[[RocksTables], T]) -> T:
        """Read shortly, in this thread."""
        opened: RocksTables | None = await self.enter()
        try:
            return look(opened)  # type: ignore[arg-type]
        except StoreError:
            raise
        except Exception as error:
            raise self.files.explain(error) from error
        finally:
            opened = None
            self.files.leave_loop()

    async def beside(self, look: Callable[[RocksTables], T]) -> T:
        """Read longer, in another thread."""
        loop = asyncio.get_running_loop()
        while self._pool is not None and self.is_open:
            try:
                return await loop.run_in_executor(self._pool, self._look, look)
            except OpeningAgainError:
                await asyncio.sleep(0.01)
        raise StoreError("the store is closed")

    def _look(self, look: Callable[[RocksTables], T]) -> T:
        with self.files.reading() as opened:
            try:
                return look(opened)
            finally:
                del opened


# -- mailboxes


class RocksMailboxes:
    """Ordered entries per owner."""

    def __init__(self, reader: TableReader, writer: RocksWriter, contents: EntryContents) -> None:
        self._reader = reader
        self._writer = writer
        self._contents = contents
        self._heads = writer.state.heads
        self._seen = writer.state.seen

    async def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> list[Appended]:
        owners = list(owners)
        return await self._writer.submit(
            lambda write: write.mailboxes.append(owners, draft, now, bound, spared, generations), rows=len(owners) + 2
        )

    async def make(self, owner: str) -> int:
        return await self._writer.submit(lambda write: write.mailboxes.make(owner))

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        head = self._heads.peek(owner)
        start = after + 1 if after > 0 else 1
        if head is None:
            prefix = tables.name(owner) + b"\0"
        else:
            prefix = head.prefix
            if head.emptied == head.last and self._reader.is_open:
                return []
            start = max(start, head.floor)
        found: list[tuple[int, bytes]] = []
        go_on, last = 0, head.last if head is not None else _ANY
        # As `TableReader.now` does it, but written out: every delivery passes here.
        reader, files = self._reader, self._reader.files
        opened: RocksTables | None = (files.enter_loop() if reader.is_open else None) or await reader.enter()
        try:
            if limit == 1 and head is not None:
                # Mostly the next entry is where it is looked for, and finding a row is cheaper than an iterator.
                row = opened.entries.get(prefix + _pack(start))  # type: ignore[union-attr]
                if row is not None and not 0 < tables.expiry(row) <= now:
                    found.append((start, row))
                    self._seen.trim()
                    self._seen.young[head] = found
                    entries = self._contents.complete(found, DIRECT_BYTES, opened)  # type: ignore[arg-type]
                    if entries:
                        return entries
                    found, start = [], start + 1  # removed between the two looks
            lowest, go_on = _entries(prefix, start, limit, now, DIRECT_ROWS, found, last, opened)  # type: ignore[arg-type]
            if head is not None and found:
                self._note(head, start, lowest, found)
            if not go_on:
                entries = self._contents.complete(found, DIRECT_BYTES, opened)  # type: ignore[arg-type]
                if len(entries) == len(found) or len(found) < limit:
                    return entries
        except TooMuchError:
            pass  # what was found is completed in another thread
        except Exception as error:
            raise files.explain(error) from error
        finally:
            opened = None
            files.leave_loop()
        while go_on:
            _, go_on = await reader.beside(partial(_entries, prefix, go_on, limit, now, STEP_ROWS, found, last))
        entries = await reader.beside(partial(self._contents.complete, found, sys.maxsize))
        if len(entries) < len(found) >= limit:  # some were removed between the two looks: others fill the page
            entries += await self.read(owner, found[-1][0], limit - len(entries), now)
        return entries

    def _note(self, head: tables.Head, start: int, lowest: int, found: list[tuple[int, bytes]]) -> None:
        """Leave what was found for the next read, and for the writer."""
        if lowest > start == head.floor:
            # Entries that went out of order left a gap that every read would walk over. No entry comes below another,
            # so this stays true whatever the writer does meanwhile.
            head.floor = head.first = lowest
        if len(found) <= MAX_SEEN_ROWS:
            self._seen.trim()
            self._seen.put(head, found)

    async def entries(self, owner: str, positions: Sequence[int], now: float) -> list[Entry]:
        prefix = tables.name(owner) + b"\0"

        def look(opened: RocksTables) -> list[tuple[int, bytes]]:
            rows: Any = opened.entries.get([prefix + _pack(position) for position in positions])
            found = [(position, row) for position, row in zip(positions, rows, strict=True) if row is not None]
            return [(position, row) for position, row in found if not 0 < tables.expiry(row) <= now]

        found = await self._reader.beside(look) if positions else []
        return await self._reader.beside(partial(self._contents.complete, found, sys.maxsize))

    async def claimed(self, owner: str, claimer: str) -> list[int]:
        await self._reader.now(lambda _: None)
        claims = self._writer.state.claims.get(owner, {}).copy()
        return sorted(position for position, one in claims.items() if one == claimer)

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        wanted = list(positions)
        return await self._writer.submit(
            lambda write: write.mailboxes.acknowledge(owner, wanted), rows=len(wanted), durable=False, grows=False
        )

    async def mark(self, owner: str, position: int, mark: int) -> bool:
        check_mark(mark)
        return await self._writer.submit(lambda write: write.mailboxes.mark(owner, position, mark), grows=False)

    async def info(self, owner: str) -> MailboxInfo:
        if self._writer.trouble is not None or self._writer.fenced:
            return await self._reader.now(partial(_info, self._writer.state.deltas, owner))
        return await self._writer.submit(lambda write: write.mailboxes.info(owner), durable=False, grows=False)

    async def clear(self, owner: str) -> int:
        up_to = await self._writer.submit(lambda write: write.mailboxes.last(owner), durable=False, grows=False)
        total = 0
        while True:
            removed = await self._writer.submit(
                lambda write: write.mailboxes.clear(owner, up_to, STEP_REMOVALS), rows=STEP_REMOVALS, grows=False
            )
            total += removed
            if removed < STEP_REMOVALS:
                return total

    async def forget(self, owner: str, fence: Fence | None = None) -> int:
        total, up_to, more = 0, -1, True

        def step(write: Transaction) -> tuple[int, int, bool]:
            if fence is not None:
                write.check_fence(fence)
            return write.mailboxes.forget(owner, up_to, STEP_REMOVALS)

        while more:
            removed, up_to, more = await self._writer.submit(step, rows=2 * STEP_REMOVALS, grows=False)
            total += removed
        return total

    async def owners(self, feed: int | None = None) -> AsyncIterator[str]:
        check_feed(feed, 1)
        start = b""
        while True:
            found, go_on = await self._reader.beside(partial(_owners, start))
            for owner in found:
                yield owner
            if go_on is None:
                return
            start = go_on


def _entries(
    prefix: bytes,
    start: int,
    limit: int,
    now: float,
    rows: int,
    found: list[tuple[int, bytes]],
    last: int,
    opened: RocksTables,
) -> tuple[int, int]:
    """Add entries that have not expired to `found`; `last` is about the last one.

    The position of the first entry, expired or not, and where to go on if more rows were met than allowed; or 0.
    """
    lowest = 0
    if len(found) >= limit:
        return 0, 0
    room = limit - len(found)
    for key, row in scan_up_to(opened.entries, prefix + _pack(start), after_prefix(prefix), prefix + _pack(last)):
        position: int = _unpack_number(key[-8:])[0]
        lowest = lowest or position
        if not rows:
            return lowest, position
        rows -= 1
        # Most never expire: asked as `tables.expiry` does, but written out.
        if not (row[8:16] == _NEVER and len(row) > _REFERENCE_SIZE) and 0 < tables.expiry(row) <= now:
            continue
        found.append((position, row))
        room -= 1
        if not room:
            return lowest, 0
    return lowest, 0


def _info(deltas: Deltas, owner: str, opened: RocksTables) -> MailboxInfo:
    """Return size and ends of a mailbox, from the tables alone."""
    head = load_head(opened, deltas, owner)
    if not head.is_there:
        return MailboxInfo(0, 0, 0, 0)
    rows = scan(opened.entries, head.prefix + _pack(head.first), after_prefix(head.prefix))
    first = next((tables.NUMBER.unpack(key[-8:])[0] for key, _ in rows), 0)
    return MailboxInfo(head.count, head.size_bytes, first, head.last, head.generation)


def _owners(start: bytes, opened: RocksTables) -> tuple[list[str], bytes | None]:
    """Return some owners with entries from `start` on, and where to go on."""
    owners: list[str] = []
    cursor = opened.entries.iter()
    cursor.seek(start)
    while cursor.valid():
        owner: bytes = cursor.key()[:-9]
        owners.append(owner.decode())
        start = owner + b"\1"
        if len(owners) == STEP_ROWS:
            return owners, start
        cursor.seek(start)
    cursor.status()  # see `scan`
    return owners, None


# -- blobs


class RocksBlobs:
    """Payloads by content."""

    def __init__(self, reader: TableReader, writer: RocksWriter, contents: EntryContents) -> None:
        self._reader = reader
        self._writer = writer
        self._contents = contents

    async def put(self, data: bytes, now: float, keep_until: float = 0.0) -> bytes:  # noqa: ARG002 - nothing to touch
        return await self._writer.submit(lambda write: write.payloads.put_blob(data, keep_until), rows=3)

    async def get(self, digest: bytes, now: float) -> bytes | None:
        deltas = self._writer.state.deltas
        row = await self._reader.now(lambda opened: deltas.get(opened, b"b" + digest))
        if row is None:
            return None
        holders, keep_until, size = tables.BLOBINFO.unpack(row)
        if not holders and now >= keep_until:
            return None
        data = self._contents.payloads.get(digest)
        if data is None:
            fetch = self._reader.now if size <= DIRECT_BYTES else self._reader.beside
            data = await fetch(partial(self._contents.payload, digest, 0))
        return data

    async def count(self) -> tuple[int, int]:
        await self._reader.now(lambda _: None)
        return self._writer.state.blob_count, self._writer.state.blob_bytes


# -- records


class RocksRecords:
    """Small named collections."""

    def __init__(self, reader: TableReader, writer: RocksWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def put(self, collection: str, key: str, value: bytes, expires_at: float = 0.0) -> None:
        await self._writer.submit(lambda write: write.put_record(collection, key, value, expires_at), rows=2)

    async def get(self, collection: str, key: str, now: float) -> bytes | None:
        where = tables.name(collection) + b"\0" + tables.name(key)
        row: bytes | None = await self._reader.now(lambda opened: opened.records.get(where))
        if row is None or 0 < tables.EXPIRES.unpack_from(row)[0] <= now:
            return None
        return row[8:]

    async def get_many(self, collection: str, keys: Sequence[str], now: float) -> list[bytes | None]:
        return [await self.get(collection, key, now) for key in keys]

    async def delete(self, collection: str, key: str) -> bool:
        return await self._writer.submit(lambda write: write.delete_record(collection, key), grows=False)

    async def of_home(self, collection: str, home: str, now: float) -> dict[str, bytes]:
        return await self._reader.beside(partial(records_of_home, collection, *records_of(home, collection), now))

    async def scan(
        self, collection: str, now: float, prefix: str = "", feed: int | None = None
    ) -> AsyncIterator[tuple[str, bytes]]:
        check_feed(feed, 1)
        within = tables.name(collection) + b"\0"
        start = within + prefix.encode()
        while True:
            rows = await self._reader.beside(partial(_records, start, within))
            for key, row in rows:
                text = key[len(within) :].decode()
                if not text.startswith(prefix):
                    return
                if not 0 < tables.EXPIRES.unpack_from(row)[0] <= now:
                    yield text, row[8:]
            if len(rows) < STEP_ROWS:
                return
            start = rows[-1][0] + b"\0"


def _records(start: bytes, within: bytes, opened: RocksTables) -> list[tuple[bytes, bytes]]:
    rows = []
    for row in scan(opened.records, start, after_prefix(within)):
        rows.append(row)
        if len(rows) == STEP_ROWS:
            break
    return rows


# -- streams


class RocksStreams:
    """Append-only sequences."""

    def __init__(self, reader: TableReader, writer: RocksWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        values = _kept(values)
        return await self._writer.submit(
            lambda write: write.append_stream(stream, values, now), rows=packed_rows.weight(values) + 1
        )

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        if limit <= 0:
            return []
        look = self._reader.now if limit <= DIRECT_ROWS else self._reader.beside
        return await look(partial(stream_rows.records, stream, max(after, 0), limit))

    async def find(self, stream: str, time: float) -> int:
        return await self._reader.now(partial(stream_rows.find, stream, time))

    async def info(self, stream: str) -> StreamInfo:
        head = await self._reader.now(partial(stream_rows.head, stream))
        return StreamInfo(head.first if head.records else 0, head.last, head.records, head.size_bytes)

    async def trim(
        self, stream: str, before: float = 0.0, size_bytes: int = 0, records: int = 0, budget: int = 1000
    ) -> Swept:
        removed, freed, cursor = 0, 0, None
        while True:
            step = min(STEP_REMOVALS, budget - removed)
            done = await self._writer.submit(
                lambda write: write.trim(stream, before, size_bytes, records, step),  # noqa: B023 - done before the next turn
                rows=step,
                grows=False,
                alone=True,
            )
            removed, freed, cursor = removed + done.removed, freed + done.size_bytes, done.cursor
            if cursor is None or removed >= budget:
                return Swept(removed, freed, cursor)

    async def drop(self, stream: str) -> None:
        await self._writer.submit(lambda write: write.drop_stream(stream), grows=False, alone=True)

    async def names(self) -> list[str]:
        return await self._reader.beside(lambda opened: [key.decode() for key, _ in scan(opened.streams, b"", b"")])

    def watch(self, told: Watcher) -> Callable[[], None]:
        return self._writer.watchers.add(told)


def _kept(values: Sequence[bytes]) -> Sequence[bytes]:
    """Return the values in a form that stays as it is until it is written."""
    return values if isinstance(values, Formed) else list(values)


# -- feeds


class RocksFeeds:
    """The single feed of changes."""

    def __init__(self, reader: TableReader) -> None:
        self._reader = reader
        self.tails = Tails()

    def feed_of(self, home: str) -> int:  # noqa: ARG002 - there is but one
        return 0

    async def ends(self) -> list[FeedEnd]:
        return [await self._reader.now(feed_end)]

    async def read(self, feed: int, after: FeedEnd, limit: int) -> FeedPage:  # noqa: ARG002 - there is but one
        look = self._reader.now if limit <= DIRECT_ROWS else self._reader.beside
        return await look(partial(_deltas, after, limit))

    def follow(self, after: Sequence[FeedEnd]) -> FeedTail:
        if not self._reader.is_open:
            raise StoreError("the store is closed")
        return self.tails.follow(self, after)


def _deltas(after: FeedEnd, limit: int, opened: RocksTables) -> FeedPage:
    """Return the notes after the one that the reader knows, if that is still there."""
    notes: list[Note] = []
    known = not after.number  # at the beginning
    for key, row in scan(opened.feed, _pack(after.number), b""):
        number = _unpack_number(key)[0]
        note = Note(number, row[: tables.NONCE_SIZE], row[tables.NONCE_SIZE :])
        if number == after.number and note.nonce == after.nonce:
            known = True
            continue
        if not known or (not after.number and not notes and number > 1):
            return FeedPage([], gap=True)
        if len(notes) >= limit:
            break
        notes.append(note)
    return FeedPage(notes) if known else FeedPage([], gap=True)


# -- coordination


class RocksCoordination:
    """Attachments, fences and leases, for one node."""

    def __init__(self, reader: TableReader, writer: RocksWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._wake_ups = WakeUps()

    @property
    def takeovers(self) -> int:
        return 0

    async def attach(self, owner: str, member: str) -> Attached:
        return await self._writer.submit(
            lambda write: write.attach(owner, member), durable=False, grows=False, alone=True
        )

    async def open(self, owner: str, member: str, collections: Sequence[str], now: float) -> Opened:
        return await self._writer.submit(
            lambda write: write.open(owner, member, collections, now), durable=False, grows=False, alone=True
        )

    async def try_open(
        self,
        owner: str,
        member: str,
        collections: Sequence[str],
        now: float,
        *,
        displace: str = "",
        wait: bool = True,  # noqa: ARG002 - an attachment never outlives the process
    ) -> Opened | Elsewhere:
        return await self._writer.submit(
            lambda write: write.try_open(owner, member, collections, now, displace),
            durable=False,
            grows=False,
            alone=True,
        )

    async def detach(self, fence: Fence) -> bool:
        return await self._writer.submit(lambda write: write.detach(fence), durable=False, grows=False, alone=True)

    async def attached(self, member: str, feed: int) -> AsyncIterator[Fence]:
        check_feed(feed, 1)
        await self._reader.now(lambda _: None)
        # A copy: the writer's thread changes it.
        for holder, fence in self._writer.state.attached.copy().values():
            if holder == member:
                yield fence

    async def due(self, feed: int, now: float, limit: int) -> list[tuple[str, float]]:
        check_feed(feed, 1)

        def look(opened: RocksTables) -> list[tuple[str, float]]:
            within = tables.name(DUE) + b"\0"
            rows = scan(opened.records, within, after_prefix(within))
            return due_homes(((key[len(within) :].decode(), row[8:]) for key, row in rows), now, limit)

        return await self._reader.beside(look)

    async def time(self) -> float:
        await self._reader.now(lambda _: None)
        return time.time()

    async def members(self) -> list[Member]:
        await self._reader.now(lambda _: None)
        return [] if self._writer.fenced else [self._reader.member]

    async def fence_member(self, writer: str) -> bool:
        if writer != self._reader.member.writer:
            return False

        def fence(_: Transaction) -> None:
            self._writer.fenced = True

        await self._writer.submit(fence, durable=False, grows=False, alone=True)
        return True

    async def acquire(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:  # noqa: ARG002
        return await self._writer.submit(lambda write: write.acquire(name, ttl, now), grows=False)

    async def renew(self, lease: Lease, ttl: float, now: float) -> bool:
        return await self._writer.submit(lambda write: write.renew(lease, ttl, now), grows=False)

    async def release(self, lease: Lease) -> bool:
        return await self._writer.submit(lambda write: write.release(lease), grows=False)

    async def notify(self, node: str, data: bytes) -> None:
        await self._reader.now(lambda _: None)
        self._wake_ups.notify(node, data)

    async def listen(self, node: str) -> AsyncIterator[bytes]:
        await self._reader.now(lambda _: None)
        with self._wake_ups.listener(node) as waiting:
            while True:
                yield await waiting.get()


# -- the store


def _weight(batch: Batch) -> tuple[int, int, bool]:
    """Return about how many rows a batch writes, the bytes of its values, and whether it must be synced.

    Acknowledgements ride on the next group.
    """
    rows, size, durable = 0, 0, False
    for step in batch.steps:
        if isinstance(step, Append):
            durable = True
            draft = step.draft
            rows += len(step.owners) + 1
            size += len(draft.body) + len(draft.payload)
            continue
        if isinstance(step, Acknowledge):
            rows += len(step.positions)
            continue
        durable = True
        if isinstance(step, Offer):
            rows += 2
            size += len(step.draft.body) + len(step.draft.payload)
            continue
        if isinstance(step, StreamAppend):
            rows += packed_rows.weight(step.values) + 1
            size += bytes_of(step.values)
        elif isinstance(step, Put):
            rows += 2
            size += len(step.value)
        else:
            rows += 1
            size += len(step.data) if isinstance(step, AddNote) else 0
    return rows, size, durable


def _apply(batch: Batch, write: Transaction) -> Written:
    """Make the changes of a batch."""
    appended: list[Appended] = []
    offsets: list[Sequence[int]] = []
    generations: Sequence[int] = ()  # as most batches have none of these
    notes: Sequence[int] = ()
    claimed: Sequence[Sequence[Sequence[int]]] = ()
    detached: Sequence[Fence] = ()
    mailboxes = write.mailboxes
    if batch.conditions:
        write.check(batch.conditions)
        for step in batch.steps:
            if isinstance(step, Take):
                mailboxes.acknowledge(step.owner, [step.position])
    for step in batch.steps:  # the frequent ones first; `match` takes twice as long
        if isinstance(step, Append):
            appended += mailboxes.append(step.owners, step.draft, step.now, step.bound, step.spared, step.generations)
        elif isinstance(step, Acknowledge):
            mailboxes.acknowledge(step.owner, step.positions)
        elif isinstance(step, StreamAppend):
            offsets.append(write.append_stream(step.stream, step.values, step.now))
        elif isinstance(step, Put):
            write.put_record(step.collection, step.key, step.value, step.expires_at, step.rank)
        elif isinstance(step, Delete):
            write.delete_record(step.collection, step.key)
        elif isinstance(step, Mark):
            mailboxes.mark(step.owner, step.position, step.mark)
        elif isinstance(step, Detach):
            detached = [*detached, step.fence]
        elif isinstance(step, Make):
            generations = [*generations, mailboxes.make(step.owner)]
        elif isinstance(step, Spare):
            mailboxes.spare(step.owner, step.position)
        elif isinstance(step, Claim):
            claimed = [*claimed, mailboxes.claim(step)]
        elif isinstance(step, Release):
            mailboxes.release(step.owner, step.claimer, step.positions)
        elif isinstance(step, SetDue):
            write.set_due(step.home, step.at)
        elif isinstance(step, Offer):
            appended.append(write.offer(step))
        elif isinstance(step, AddNote):
            notes = [*notes, write.add_note(step.data)]
    for fence in detached:
        write.detach(fence)
    return Written(appended, offsets, generations, notes, claimed)


class RocksStore:
    """`rocksdb://DIR`."""

    atomic = True

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.SAFE,
        *,
        max_queued: int = MAX_QUEUED,  #: calls the writer holds; the rest waits in line
        max_heads: int = MAX_HEADS,  #: mailboxes whose size and ends are kept in memory
        reserve: int = RESERVE,  #: bytes of disk that stay free
        block_cache: int = BLOCK_CACHE,  #: bytes
        salvage: bool = False,  #: open damaged logs and give up what lies behind the damage
    ) -> None:
        self.path = Path(path)
        self._files = Files(self.path, salvage=salvage, block_cache=block_cache)
        self._writer = RocksWriter(
            self._files,
            WriterState(max_heads),
            sync=durability is not Durability.FAST,
            max_queued=max_queued,
            reserve=reserve,
        )
        self._reader = TableReader(self._files, self._writer)
        contents = EntryContents()
        self.mailboxes = RocksMailboxes(self._reader, self._writer, contents)
        self.blobs = RocksBlobs(self._reader, self._writer, contents)
        self.records = RocksRecords(self._reader, self._writer)
        self.streams = RocksStreams(self._reader, self._writer)
        self.feeds = RocksFeeds(self._reader)
        self.coordination = RocksCoordination(self._reader, self._writer)
        self._switch_interval = 0.0

    async def open(self) -> None:
        if self._reader.is_open:
            raise StoreError("the store is open already")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._writer.open, loop)
        await loop.run_in_executor(None, self._remove_copies)
        self._reader.open()
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, SWITCH_INTERVAL))

    async def close(self) -> None:
        if not self._reader.is_open:
            return
        self._reader.close()
        self.feeds.tails.ring()
        await self._writer.close()
        sys.setswitchinterval(self._switch_interval)

    def write(self, batch: Batch) -> Commit[Written]:
        try:
            rows, size, durable = _weight(batch)
        except TypeError as error:  # of a caller that gives no bytes
            return Commit.failed(error)
        commit = self._writer.write(partial(_apply, batch), rows, size, durable=durable, grows=batch.grows)
        if self.feeds.tails and any(isinstance(step, AddNote) for step in batch.steps):
            commit.then(self.feeds.tails.ring)
        return commit

    @property
    def backlog(self) -> Backlog:
        return self._writer.backlog

    @property
    def writer(self) -> str:
        return self._reader.member.writer

    async def sweep(
        self,
        now: float,
        budget: int,
        cursor: bytes = b"",  # noqa: ARG002 - the table is in order
        kept: Callable[[int], bool] | None = None,  # noqa: ARG002 - it serves one node
    ) -> Swept:
        removed, size_bytes, left = 0, 0, budget
        expired: list[tuple[str, int]] = []
        while True:
            step = min(STEP_REMOVALS, left)
            done = await self._writer.submit(
                lambda write: write.sweep(now, step),  # noqa: B023 - done before the next turn
                rows=step,
                durable=False,
                grows=False,
                alone=True,
            )
            removed, size_bytes, left = removed + done.removed, size_bytes + done.size_bytes, left - step
            expired += done.expired
            if done.cursor is None or left <= 0:
                return Swept(removed, size_bytes, done.cursor, tuple(expired))

    async def figures(self) -> StoreFigures:
        disk, memory = await self._reader.beside(
            lambda opened: (self._files.size_bytes(), self._files.memory_bytes(opened))
        )
        writer, state = self._writer, self._writer.state
        return StoreFigures(
            engine="rocksdb",
            entries=state.entries,
            blobs=state.blob_count,
            blob_octets=state.blob_bytes,
            records=state.records,
            shared=state.shared,
            commits=writer.commits,
            writes=writer.writes,
            queued=writer.queued,
            disk_octets=disk,
            memory_bytes=memory,
            swept=writer.swept,
            full=writer.full,
        )

    def condition(self) -> StoreCondition:
        writer = self._writer
        trouble, detail = writer.condition()
        return StoreCondition("rocksdb", writer.commits, writer.writes, writer.queued, writer.full, trouble, detail)

    async def backup(self, to: Path) -> None:
        """Make a copy of everything that was written before while the store goes on; opens as a store of its own."""
        # A copy begins with what is in memory going to the files. By itself that would hold up every other thread.
        await self._reader.beside(_flush)
        await self._writer.submit(lambda write: self._files.copy(write.opened, to), grows=False, alone=True)

    async def check(self) -> list[str]:
        copy = self.path / f"{COPY}check-{secrets.token_hex(4)}"
        await self.backup(copy)
        try:
            return await self._reader.beside(lambda _: inspect(copy))
        finally:
            await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    def _remove_copies(self) -> None:
        """Remove copies that were made before a crash."""
        for copy in self.path.glob(f"{COPY}*"):
            shutil.rmtree(copy, ignore_errors=True)


def _flush(opened: RocksTables) -> None:
    for table in opened.handles:
        getattr(opened, table).flush(True)


#: How the names of copies begin that the store makes for itself, in its own directory.
COPY = "copy-"
