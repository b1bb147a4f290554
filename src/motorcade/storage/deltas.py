"""Small rows that change often: logged as deltas first, put in place later.

    transaction ─▶ one row of `notes` with all that it changed ─▶ young ─▶ old ─▶ heads, holders, blobinfo, totals
                                                                  in memory        a few with each transaction

An acknowledgement changes the head of its mailbox and the counter of its message. Each would be a row of its own, and
writing a row costs more than everything else; but most of them change again soon. So a transaction writes one row for
all of them, and what did not change for a while is put in place behind it.

Rule 1: what is in memory here has been written; a transaction that fails leaves no trace. `get` may be asked by any
        thread: what it finds is in memory until after it is in its table.
Rule 2: deltas come in two generations. While the young one grows, the old one is put in place, a little faster; when
        that is done, its rows of the log go, and the young one becomes the old one if it is large enough. So the log is
        bounded, and with it the time that opening takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from rocksdict import Rdict, WriteBatch

from motorcade.storage import tables
from motorcade.storage.files import RocksTables, scan

#: A generation ends with so many rows changed, transactions, or bytes in the log.
MAX_CHANGED = 32_768
MAX_ROWS = 1_024
MAX_BYTES = 8 * 2**20

#: Rows put in place by a transaction beyond as many as it changes.
STEP: Final = 8

_pack = tables.NUMBER.pack
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[bytes, bytes | None]).decode
_MISSING: Final = b"missing"  #: no value is that short


class Deltas:
    """All deltas of a store. A key is one byte for the table (`tables.DELTA_TABLES`), then the key there."""

    def __init__(self) -> None:
        self._young: dict[bytes, bytes | None] = {}  #: None: there is no such row
        self._old: dict[bytes, bytes | None] = {}
        self._waiting: list[bytes] = []  #: keys of `_old` that are not in place yet
        self._next = 1  #: number of the next row of the log
        self._young_from = 1  #: number of the first row of the young generation
        self._size_bytes = 0  #: of its rows

    def load(self, opened: RocksTables) -> None:
        """Begin with what the log has."""
        self._young, self._old, self._waiting = {}, {}, []
        self._next = self._young_from = 1
        self._size_bytes = 0
        for number, row in scan(opened.notes, b"", b""):
            self._young.update(_decode(row))
            self._next = tables.NUMBER.unpack(number)[0] + 1
            self._size_bytes += len(row)

    def get(self, opened: RocksTables, key: bytes) -> bytes | None:
        """Return a row as of now, logged or in place."""
        return self.get_from(getattr(opened, tables.DELTA_TABLES[key[:1]]), key)

    def get_from(self, table: Rdict, key: bytes) -> bytes | None:
        """Return the same value from a table at hand."""
        found = self._young.get(key, _MISSING)
        if found is _MISSING:
            found = self._old.get(key, _MISSING)
            if found is _MISSING:
                found = table.get(key[1:])
        return found

    def all(self) -> dict[bytes, bytes | None]:
        """Return all rows that are logged and not yet in place."""
        return {**self._old, **self._young}

    def scan(self, opened: RocksTables, table: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield all rows of a table, those in place first; only while nothing is written."""
        logged = {key[1:]: value for key, value in self.all().items() if key[:1] == table}
        for key, row in scan(getattr(opened, tables.DELTA_TABLES[table]), b"", b""):
            if key not in logged:
                yield key, row
        yield from ((key, value) for key, value in logged.items() if value is not None)

    # -- the writer's thread

    def write(self, opened: RocksTables, batch: WriteBatch, changes: Mapping[bytes, bytes | None]) -> DeltaWrite:
        """Add to a transaction what it changes, and what is put in place with it."""
        row = _encode(changes)
        batch.put(_pack(self._next), row, opened.handles["notes"])
        placed = self._waiting[-(len(changes) + STEP) :]
        young, old, handles = self._young, self._old, opened.handles
        for key in placed:
            if key in young or key in changes:
                continue  # changed again since
            value = old[key]
            if value is None:
                batch.delete(key[1:], handles[tables.DELTA_TABLES[key[:1]]])
            else:
                batch.put(key[1:], value, handles[tables.DELTA_TABLES[key[:1]]])
        done = len(placed) == len(self._waiting)
        if done and self._old:
            batch.delete_range(_pack(0), _pack(self._young_from), handles["notes"])
        return DeltaWrite(changes, placed, len(row), done)

    def written(self, delta: DeltaWrite) -> None:
        """Note that a delta is in the tables."""
        self._young.update(delta.changes)
        self._next += 1
        self._size_bytes += delta.size_bytes
        if delta.placed:
            del self._waiting[-len(delta.placed) :]
        if delta.done:
            self._old = {}
            if (
                len(self._young) >= MAX_CHANGED
                or self._size_bytes >= MAX_BYTES
                or self._next - self._young_from >= MAX_ROWS
            ):
                self._old, self._young = self._young, {}
                self._waiting = list(self._old)
                self._young_from, self._size_bytes = self._next, 0


class DeltaWrite:
    """The rows that one transaction logs and puts in place."""

    __slots__ = ("changes", "done", "placed", "size_bytes")

    def __init__(self, changes: Mapping[bytes, bytes | None], placed: list[bytes], size_bytes: int, done: bool) -> None:
        self.changes = changes
        self.placed = placed
        self.size_bytes = size_bytes
        self.done = done
