"""The embedded engine, written down and filled; both work on a directory that no node has open.

`tables.py` lists the rows. They are read and written here as they are, without a writer: nothing else is there, and a
store is filled several times faster that way. A store that is being filled has another name until it is complete.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
from rocksdict import WriteBatch

from motorcade.storage import embedded, packed_rows, tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.files import Files, RocksTables, scan, write_meta
from motorcade.storage.ports import StoreDamagedError, StoreError
from motorcade.storage.tables import EndingKind, after_prefix
from motorcade.storage.transaction import MAX_ENDING, load_head
from motorcade.storage.transfer import (
    INLINE,
    PART_BYTES,
    PART_ROWS,
    Content,
    ExportedBlob,
    ExportedEntry,
    ExportedFloor,
    ExportedLease,
    ExportedMailbox,
    ExportedRecords,
    ExportedStream,
    ExportedTokens,
)

_pack = tables.NUMBER.pack
_encode = msgspec.msgpack.Encoder().encode


class RocksSource:
    """The contents of a directory."""

    engine = "rocksdb"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def contents(self, now: float) -> AsyncIterator[Content]:
        with embedded.opened(self._path) as opened:
            try:
                for content in _contents(opened, now):
                    yield content
            finally:
                del opened


def _contents(opened: RocksTables, now: float) -> Iterator[Content]:
    written: set[bytes] = set()
    deltas = Deltas()
    deltas.load(opened)
    for key, _ in deltas.scan(opened, b"h"):
        yield from _mailbox(opened, deltas, key.decode(), now, written)
    for digest, row in deltas.scan(opened, b"b"):
        keep_until = tables.BLOBINFO.unpack(row)[1]
        if digest not in written and now < keep_until:
            yield ExportedBlob(_blob(opened, digest), keep_until)
    yield from _tokens(opened, now)
    yield from _records(opened, now)
    for key, row in scan(opened.streams, b"", b""):
        yield from _stream(opened, key, row)
    for key, row in scan(opened.leases, b"", b""):
        token, until = tables.LEASE.unpack(row)
        if now < until:
            yield ExportedLease(key.decode(), token, until)
    boot = opened.meta.get(tables.META_BOOT)
    # Each life of a store has numbers of its own (see `State`); the next one begins here.
    token = (tables.NUMBER.unpack(boot)[0] + 1) << 32 if boot is not None else 0
    yield ExportedFloor(token, tables.parse_totals(deltas.get(opened, tables.TOTALS_DELTA)).floor)


def _mailbox(opened: RocksTables, deltas: Deltas, owner: str, now: float, written: set[bytes]) -> Iterator[Content]:
    head = load_head(opened, deltas, owner)
    entries: list[ExportedEntry] = []
    size_bytes = parts = 0
    for key, row in scan(opened.entries, head.prefix, after_prefix(head.prefix)):
        entry = tables.parse_entry(_own(opened, row))
        if 0 < entry.expires_at <= now:
            continue
        payload, digest, size = entry.payload, b"", entry.size_bytes - len(entry.body)
        if entry.flags & tables.BLOB:
            digest, payload = entry.payload, b""
            if size <= INLINE:
                payload, digest = _blob(opened, digest), b""
            elif digest not in written:
                written.add(digest)
                yield _held_blob(opened, deltas, digest, now)
        (position,) = tables.NUMBER.unpack(key[-8:])
        droppable = bool(entry.flags & tables.DROPPABLE)
        times = (entry.stored_at, entry.expires_at)
        entries.append(
            ExportedEntry(position, *times, entry.mark, droppable, entry.key, entry.body, payload, digest, size)
        )
        size_bytes += len(row)
        if len(entries) == PART_ROWS or size_bytes > PART_BYTES:
            yield ExportedMailbox(owner, head.last, entries, head.generation, head.spare)
            entries, size_bytes, parts = [], 0, parts + 1
    if entries or not parts:
        yield ExportedMailbox(owner, head.last, entries, head.generation, head.spare)


def _blob(opened: RocksTables, digest: bytes) -> bytes:
    data: bytes | None = opened.blobs.get(digest)
    if data is None:
        raise StoreDamagedError(f"blob {digest.hex()} is missing though entries refer to it; `motorcade store check`")
    return data


def _own(opened: RocksTables, row: bytes) -> bytes:
    """Return the row of an entry, with the message that it shares with others."""
    if len(row) > tables.REFERENCE_SIZE:
        return row
    shared: bytes | None = opened.shared.get(row[:8])
    if shared is None:
        raise StoreDamagedError(
            f"message {row[:8].hex()} is missing though entries refer to it; `motorcade store check`"
        )
    return tables.own_row(row, shared)


def _held_blob(opened: RocksTables, deltas: Deltas, digest: bytes, now: float) -> ExportedBlob:
    row = deltas.get(opened, b"b" + digest)
    keep_until = tables.BLOBINFO.unpack(row)[1] if row is not None else 0.0
    return ExportedBlob(_blob(opened, digest), keep_until if now < keep_until else 0.0)


def _tokens(opened: RocksTables, now: float) -> Iterator[Content]:
    owner, tokens = b"", list[tuple[bytes, int, float]]()
    for key, row in scan(opened.tokens, b"", b""):
        until, position = tables.TOKEN.unpack(row)
        name, _, token = key.partition(b"\0")
        if tokens and (name != owner or len(tokens) == PART_ROWS):
            yield ExportedTokens(owner.decode(), tokens)
            tokens = []
        owner = name
        if now < until:
            tokens.append((token, position, until))
    if tokens:
        yield ExportedTokens(owner.decode(), tokens)


def _records(opened: RocksTables, now: float) -> Iterator[Content]:
    collection, records, size_bytes = b"", list[tuple[str, bytes, float]](), 0
    for key, row in scan(opened.records, b"", b""):
        (until,) = tables.EXPIRES.unpack_from(row)
        name, _, own = key.partition(b"\0")
        if records and (name != collection or len(records) == PART_ROWS or size_bytes > PART_BYTES):
            yield ExportedRecords(collection.decode(), records)
            records, size_bytes = [], 0
        collection = name
        if not 0 < until <= now:
            records.append((own.decode(), row[8:], until))
            size_bytes += len(row)
    if records:
        yield ExportedRecords(collection.decode(), records)


def _stream(opened: RocksTables, name: bytes, head: bytes) -> Iterator[Content]:
    first, last, _, _, time = tables.STREAM.unpack(head)
    records, size_bytes, parts = list[tuple[int, float, bytes]](), 0, 0
    for key, row in scan(opened.rows, name + b"\0", name + b"\1"):
        for record in packed_rows.records(tables.NUMBER.unpack(key[-8:])[0], row, first, sys.maxsize):
            records.append((record.offset, record.time, record.value))
            size_bytes += len(record.value) + 8
            if len(records) == PART_ROWS or size_bytes > PART_BYTES:
                yield ExportedStream(name.decode(), last, time, records)
                records, size_bytes, parts = [], 0, parts + 1
    if records or not parts:
        yield ExportedStream(name.decode(), last, time, records)


class RocksTarget:
    """A new directory, which takes its place when it is complete."""

    def __init__(self, path: Path) -> None:
        """Take `path`, which does not exist, or is an empty directory, or an empty store that no process has open."""
        self._path = path
        self._made = path.with_name(f"{path.name}.importing")
        shutil.rmtree(self._made, ignore_errors=True)  # of an import that a crash has ended
        self._files = Files(self._made, block_cache=embedded.CACHE)
        self._tables: RocksTables | None = self._files.open()
        self._batch = WriteBatch(raw_mode=True)
        self._size_bytes = 0
        self._endings = 0
        self._head: _LoadedHead | None = None
        self._stream: _StreamHead | None = None
        self._holders: Counter[bytes] = Counter()
        self._kept: dict[bytes, tuple[float, int]] = {}  #: digest: keep_until, size
        self._totals = [0, 0, 0, 0, 0, 0]  #: see `tables.Totals`; shared messages: none
        self._floor = 0

    async def load(self, content: Content) -> None:
        match content:
            case ExportedBlob():
                self._blob(content)
            case ExportedMailbox():
                self._mailbox(content)
            case ExportedTokens():
                self._tokens(content)
            case ExportedRecords():
                self._records(content)
            case ExportedStream():
                self._records_of_stream(content)
            case ExportedLease():
                self._put("leases", tables.name(content.name), tables.LEASE.pack(content.token, content.until))
                self._floor = max(self._floor, content.token)
            case ExportedFloor():
                self._floor = max(self._floor, content.token)
                self._totals[5] = max(self._totals[5], content.position)
        if self._size_bytes > PART_BYTES * 4:
            self._write()

    def _blob(self, blob: ExportedBlob) -> None:
        digest = hashlib.sha256(blob.data).digest()
        self._put("blobs", digest, blob.data)
        # Whether anything refers to it or not: the first sweep after that time looks.
        self._put("endings", tables.ending(blob.keep_until, EndingKind.BLOB, digest), b"")
        self._kept[digest] = (blob.keep_until, len(blob.data))
        self._totals[1] += 1
        self._totals[2] += len(blob.data)

    def _mailbox(self, part: ExportedMailbox) -> None:
        if self._head is None or self._head.owner != part.owner:
            self._finish_head()
            self._head = _LoadedHead(part.owner, part.last, part.generation, part.spare)
        head = self._head
        prefix = tables.name(part.owner) + b"\0"
        ending: dict[float, list[int]] = {}
        for item in part.entries:
            place = _pack(item.position)
            self._put("entries", prefix + place, _entry_row(item))
            if item.key:
                self._put("keys", prefix + item.key, place)
            if item.digest:
                self._holders[item.digest] += 1
            if item.expires_at:
                ending.setdefault(item.expires_at, []).append(item.position)
            head.add(item)
        for when, positions in ending.items():
            for start in range(0, len(positions), MAX_ENDING):
                some = positions[start : start + MAX_ENDING]
                self._end(when, EndingKind.ENTRIES, ([part.owner] * len(some), some))
        self._totals[0] += len(part.entries)

    def _tokens(self, part: ExportedTokens) -> None:
        prefix = tables.name(part.owner) + b"\0"
        for token, position, until in part.tokens:
            self._put("tokens", prefix + token, tables.TOKEN.pack(until, position))
            self._end(until, EndingKind.TOKENS, (token, [part.owner]))

    def _records(self, part: ExportedRecords) -> None:
        prefix = tables.name(part.collection) + b"\0"
        for key, value, until in part.records:
            where = prefix + tables.name(key)
            self._put("records", where, tables.EXPIRES.pack(until) + value)
            if until:
                self._put("endings", tables.ending(until, EndingKind.RECORD, where), b"")
        self._totals[3] += len(part.records)

    def _records_of_stream(self, part: ExportedStream) -> None:
        if self._stream is None or self._stream.name != part.name:
            self._finish_stream()
            self._stream = _StreamHead(part.name, part.last, part.time)
        prefix = tables.name(part.name) + b"\0"
        for offset, time, value in part.records:
            self._put("rows", prefix + _pack(offset), tables.EXPIRES.pack(time) + value)
            self._stream.add(offset, len(value))

    async def finish(self) -> None:
        self._finish_head()
        self._finish_stream()
        for digest, (keep_until, size) in self._kept.items():
            self._put("blobinfo", digest, tables.BLOBINFO.pack(self._holders.pop(digest, 0), keep_until, size))
        if self._holders:
            raise StoreError(f"blob {next(iter(self._holders)).hex()} is not in the file though entries refer to it")
        self._put("meta", tables.META_TOTALS, tables.TOTALS.pack(*self._totals))
        self._write()
        opened = self._tables
        if opened is None:
            raise StoreError("the import is over already")
        # Opening the store begins the next life: its numbers are above all that were ever given.
        write_meta(opened, tables.META_BOOT, self._floor >> 32)
        write_meta(opened, tables.META_FORMAT, tables.FORMAT)
        del opened
        self.close()
        if self._path.exists():
            shutil.rmtree(self._path)
        self._made.rename(self._path)

    def close(self) -> None:
        """Let go; what was not finished is gone."""
        self._tables = None
        self._files.close()

    def abandon(self) -> None:
        self.close()
        shutil.rmtree(self._made, ignore_errors=True)

    def _finish_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._put("heads", tables.name(head.owner), head.row())

    def _finish_stream(self) -> None:
        head, self._stream = self._stream, None
        if head is not None:
            self._put("streams", tables.name(head.name), head.row())

    def _end(self, when: float, kind: EndingKind, what: object) -> None:
        # The store itself gives larger numbers from its first life on.
        self._endings += 1
        self._put("endings", tables.ending(when, kind, _pack(self._endings)), _encode(what))

    def _put(self, table: str, key: bytes, value: bytes) -> None:
        if self._tables is None:
            raise StoreError("the import is over already")
        self._batch.put(key, value, self._tables.handles[table])
        self._size_bytes += len(key) + len(value)

    def _write(self) -> None:
        if self._tables is None:
            raise StoreError("the import is over already")
        batch, self._batch, self._size_bytes = self._batch, WriteBatch(raw_mode=True), 0
        try:
            self._tables.db.write(batch)
        except Exception as error:
            raise self._files.explain(error) from error


class _LoadedHead:
    """The head of a mailbox that is being loaded."""

    def __init__(self, owner: str, last: int, generation: int, spare: int) -> None:
        self.owner = owner
        self._last = last
        self._generation = generation
        self._spare = spare
        self._count = self._size_bytes = self._droppable = 0
        self._first = 0

    def add(self, item: ExportedEntry) -> None:
        self._first = self._first or item.position
        self._count += 1
        self._size_bytes += len(item.body) + item.size
        self._droppable += item.droppable

    def row(self) -> bytes:
        first = self._first or self._last + 1
        numbers = (self._last, self._count, self._size_bytes, first, self._droppable, self._generation)
        return tables.HEAD.pack(*numbers) + (tables.SPARE.pack(self._spare) if self._spare else b"")


class _StreamHead:
    """The head of a stream that is being loaded."""

    def __init__(self, name: str, last: int, time: float) -> None:
        self.name = name
        self._last = last
        self._time = time
        self._first = self._records = self._size_bytes = 0

    def add(self, offset: int, size_bytes: int) -> None:
        self._first = self._first or offset
        self._records += 1
        self._size_bytes += size_bytes

    def row(self) -> bytes:
        first = self._first or self._last + 1
        return tables.STREAM.pack(first, self._last, self._records, self._size_bytes, self._time)


def _entry_row(item: ExportedEntry) -> bytes:
    flags = (tables.DROPPABLE if item.droppable else 0) | (tables.BLOB if item.digest else 0)
    payload = item.digest or item.payload
    row = tables.entry_row(item.stored_at, item.expires_at, flags, item.key, item.body, payload, item.size)
    return row[: tables.MARK_AT] + bytes((item.mark,)) + row[tables.MARK_AT + 1 :]
