"""The stored form of values, as lua/common.lua also knows it.

    entry    stored_at, expires_at, bytes, flags, length of key, length of body | key | body | payload, or its digest
    record   expires_at | value
    blob     keep_until | data
    state    of a mailbox: last, first, entries, bytes, soon, begun, and spare unless it is 0 and nothing is claimed,
             and the highest position that is; all as doubles, which Lua's numbers are

All numbers big-endian; times are doubles.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import msgspec

from motorcade.storage.ports import Draft

HEADER = Struct(">ddIBII")
TIME = Struct(">d")
STATE = Struct(">ddddddd")  #: without the last number if it is 0, and the one before it, of format 2, if that is 0
DROPPABLE = 1
BY_DIGEST = 2


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry without its position and mark."""

    stored_at: float
    expires_at: float
    size_bytes: int
    key: bytes
    body: bytes
    payload: bytes
    digest: bytes  #: of a payload that is stored apart; empty: it is here


def pack_entry(draft: Draft, now: float, digest: bytes) -> tuple[bytes, int, int]:
    """Pack an entry as it is stored; return it with its bytes and its flags."""
    size_bytes = len(draft.body) + len(draft.payload)
    flags = (DROPPABLE if draft.droppable else 0) | (BY_DIGEST if digest else 0)
    head = HEADER.pack(now, draft.expires_at, size_bytes, flags, len(draft.key), len(draft.body))
    return b"".join((head, draft.key, draft.body, digest or draft.payload)), size_bytes, flags


def unpack_entry(value: bytes) -> StoredEntry:
    stored_at, expires_at, size_bytes, flags, key_length, body_length = HEADER.unpack_from(value)
    body_start = HEADER.size + key_length
    body_end = body_start + body_length
    rest = value[body_end:]
    return StoredEntry(
        stored_at,
        expires_at,
        size_bytes,
        value[HEADER.size : body_start],
        value[body_start:body_end],
        b"" if flags & BY_DIGEST else rest,
        rest if flags & BY_DIGEST else b"",
    )


@dataclass(frozen=True, slots=True)
class StoredState:
    """A mailbox as a whole."""

    last: int = 0  #: position given last
    first: int = 1  #: of the oldest entry; if there is none, where the next one will be
    entries: int = 0
    size_bytes: int = 0
    soon: float = 0.0  #: when its next entry expires, or sooner; 0: none does
    begun: int = 0  #: position that it began above
    spare: int = 0  #: position up to which entries are in flight; -1: all of them


def unpack_state(value: bytes | None) -> StoredState:
    if value is None:
        return StoredState()
    last, first, entries, size_bytes, soon, begun, spare = STATE.unpack(value[: STATE.size].ljust(STATE.size, b"\0"))
    return StoredState(int(last), int(first), int(entries), int(size_bytes), soon, int(begun), int(spare))


EMPTY = msgspec.Raw(b"\xa0")


def raw(data: bytes) -> msgspec.Raw:
    """Return bytes as a string for a script, since the server's decoder knows no binary type."""
    size = len(data)
    if not size:
        return EMPTY
    if size < 32:
        head = bytes((0xA0 | size,))
    elif size < 1 << 8:
        head = b"\xd9" + size.to_bytes(1, "big")
    elif size < 1 << 16:
        head = b"\xda" + size.to_bytes(2, "big")
    else:
        head = b"\xdb" + size.to_bytes(4, "big")
    return msgspec.Raw(head + data)
