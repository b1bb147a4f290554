"""Rows as a transaction sees them: its own changes first, then what was written lately, then the tables."""

from __future__ import annotations

from rocksdict import WriteBatch

from motorcade.storage import tables
from motorcade.storage.deltas import DeltaWrite
from motorcade.storage.files import RocksTables
from motorcade.storage.ports import Appended
from motorcade.storage.tables import Head
from motorcade.storage.transaction.state import BlobInfo, SharedMessage, StreamHead, WriterState

#: Tables with rows that a transaction looks up again.
_OVERLAID = ("keys", "tokens", "records", "streams", "leases", "endings")

_pack = tables.NUMBER.pack
_pack_head = tables.HEAD.pack


class Rows:
    """Begins and ends a transaction, and finds its rows."""

    def __init__(self, opened: RocksTables, state: WriterState) -> None:
        self.opened = opened
        # Heads name their user by number: they outlive it, and an object would keep its rows and tables alive.
        self._number = state.next_transaction()
        self._tables = opened
        self._state = state
        self._batch = WriteBatch(raw_mode=True)
        self._put = self._batch.put
        self._delete = self._batch.delete
        self._handles = handles = opened.handles
        self._entries = handles["entries"]
        self._overlay: dict[str, dict[bytes, bytes | None]] = {table: {} for table in _OVERLAID}
        self._rows: dict[bytes, bytes | None] = {}  #: the overlay of `entries`, once `_settle` was called
        self._bulk: list[tuple[list[Appended], bytes, bytes]] = []  #: appended, but not in the overlay yet; row, key
        self._bulk_keys: set[bytes] = set()  #: the compaction keys in it
        self._settled = 0  #: answers of the last in `_bulk` that are in the overlay
        self._deltas: dict[bytes, bytes | None] = {}  #: to be noted, beside the next three
        self._heads: dict[str, Head] = {}
        self._forgotten: list[Head] = []  #: of owners that begin again
        self._blobs: dict[bytes, BlobInfo] = {}
        self._messages: dict[int, SharedMessage] = {}
        self._streams: dict[str, StreamHead] = {}  #: to be written
        self.grown: dict[str, int] | None = None  #: streams that were appended to: their last offset
        self._delta_write: DeltaWrite | None = None
        self._size_bytes = 0  #: of all that is written
        self.swept = 0
        state.heads.trim()
        state.blobs.trim()
        state.messages.trim()

    def finish(self) -> WriteBatch:
        """Everything of this transaction, to be written as a whole."""
        noted = self._deltas
        for head in self._heads.values():
            noted[b"h" + head.prefix[:-1]] = _pack_head(
                head.last, head.count, head.size_bytes, head.first, head.droppable, head.generation
            )
            head.write_at = head.last + tables.TAIL
        for digest, info in self._blobs.items():
            noted[b"b" + digest] = tables.BLOBINFO.pack(info.holders, info.keep_until, info.size)
        for number, message in self._messages.items():
            noted[b"n" + _pack(number)] = _pack(message.holders)
        for stream, ends in self._streams.items():
            row = tables.STREAM.pack(ends.first, ends.last, ends.records, ends.size_bytes, ends.time)
            self._put(tables.name(stream), row, self._handles["streams"])
        if noted or len(self._batch):
            noted[tables.TOTALS_DELTA] = self._state.totals()
            self._delta_write = self._state.deltas.write(self._tables, self._batch, noted)
        self._size_bytes = self._batch.size_in_bytes()
        return self._batch

    def written(self) -> None:
        """It is in the tables: let readers know what is certain now."""
        if self._delta_write is not None:
            self._state.deltas.written(self._delta_write)
        if self._rows:
            self._state.keep_in_mind(self._rows, self._size_bytes)
        for head in self._heads.values():
            head.floor = head.first
            head.emptied = -1 if head.count else head.last
        for head in self._forgotten:
            if not head.is_there:  # owners are chosen by clients: what is forgotten takes no place
                self._state.heads.drop(head.owner, head)

    def _get_entry(self, key: bytes) -> bytes | None:
        state = self._state
        for rows in (self._rows, state.known, state.known_before):
            if key in rows:
                return rows[key]
        found: bytes | None = self._tables.entries.get(key)
        return found

    def _set_entry(self, key: bytes, row: bytes) -> None:
        self._rows[key] = row
        self._put(key, row, self._entries)

    def _get(self, table: str, key: bytes) -> bytes | None:
        overlay = self._overlay[table]
        if key in overlay:
            return overlay[key]
        found: bytes | None = getattr(self._tables, table).get(key)
        return found

    def _set(self, table: str, key: bytes, value: bytes) -> None:
        self._overlay[table][key] = value
        self._put(key, value, self._handles[table])

    def _unset(self, table: str, key: bytes) -> None:
        self._overlay[table][key] = None
        self._delete(key, self._handles[table])
