"""The write batch of a transaction, and rows as the transaction sees them: its own changes first, then the tables."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from rocksdict import WriteBatch

from motorcade.storage import tables
from motorcade.storage.files import RocksTables
from motorcade.storage.tables import EndingKind
from motorcade.storage.transaction.state import WriterState

_encode = msgspec.msgpack.Encoder().encode


class OverlaidBatch:
    """A write batch with an overlay of what it changes."""

    __slots__ = ("delete", "deltas", "handles", "opened", "overlay", "put", "raw", "state")

    def __init__(self, opened: RocksTables, state: WriterState) -> None:
        self.opened = opened
        self.state = state
        self.raw = WriteBatch(raw_mode=True)
        self.put = self.raw.put  #: past the overlay: rows that the transaction does not look up again
        self.delete = self.raw.delete
        self.handles = opened.handles
        #: By table, then by key; only of rows that the transaction looks up again. Made when needed: most are small.
        self.overlay: defaultdict[str, dict[bytes, bytes | None]] = defaultdict(dict)
        self.deltas: dict[bytes, bytes | None] = {}  #: heads and counters that change

    def get(self, table: str, key: bytes) -> bytes | None:
        overlay = self.overlay[table]
        if key in overlay:
            return overlay[key]
        found: bytes | None = getattr(self.opened, table).get(key)
        return found

    def set(self, table: str, key: bytes, value: bytes) -> None:
        self.overlay[table][key] = value
        self.put(key, value, self.handles[table])

    def unset(self, table: str, key: bytes) -> None:
        self.overlay[table][key] = None
        self.delete(key, self.handles[table])

    def end(self, when: float, kind: EndingKind, refs: bytes) -> None:
        """Let a sweep look at something at a time."""
        self.set("endings", tables.ending(when, kind, tables.NUMBER.pack(self.state.serial())), refs)

    def keep_ending(self, key: bytes, rest: object) -> None:
        """Replace an ending by what a sweep has left of it; None: nothing."""
        if rest is None:
            self.unset("endings", key)
        else:
            self.set("endings", key, _encode(rest))
