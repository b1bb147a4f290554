"""The tables of the embedded engine: every key and every value, and nothing else.

    table      key                               value
    entries    owner 0 position(8)               an entry of its own, see `EntryRow`: header(30) key body payload|digest
                                                 or a reference, see REFERENCE: message(8) flags mark bytes(4)
                                                 and, if it expires, when(f8)
    shared     message(8)                        what the references to it have in common: a row like that of an entry
    holders    message(8)                        entries that refer to it(8)                                  deltas
    heads      owner                             last, count, bytes, first, droppable, generation (6 x 8),    deltas
                                                 spare (8, signed) unless it is 0; see `Head`
    keys       owner 0 compaction key            position(8)
    tokens     owner 0 token                     known until(f8) position(8)
    blobs      sha256                            the payload
    blobinfo   sha256                            entries and messages that hold it(8) keep until(f8) size(8)  deltas
    records    collection 0 key                  expires at(f8) value
    streams    name                              first, last, records, bytes (4 x 8) time of the last(f8)
    rows       name 0 offset(8)                  time(f8) value, or several, see packed_rows.py
    leases     name                              token(8) until(f8)
    endings    when(8) kind(1) what              what ends by itself, soonest first; see `EndingKind`
    notes      number(8)                         rows of the tables above marked "deltas", see deltas.py
    feed       number(8)                         nonce(8) data: what has changed, the newest last
    meta       name                              format, boot, migrated; totals (deltas), see `Totals`

Numbers are big-endian, so that keys sort by them; times are seconds since the epoch, except in `endings`, where they
are whole milliseconds, rounded up, so that they sort. Names have no U+0000, so 0 ends them.

Rule 1: a change of a layout raises FORMAT and needs a step to `MIGRATIONS` in files.py.
Rule 2: a head may lag behind. It is written with the first entry of an owner, whenever an entry goes, and at the latest
        when TAIL entries have come since; what lies beyond its `last` is counted when it is read. So an owner without a
        head has no entries, and a campaign to two hundred owners writes two hundred rows, not four hundred.
Rule 3: the two kinds of rows in `entries` are told apart by their length, so nothing else may be as short as a
        reference.
Rule 4: tables marked "deltas" are never read directly: what they hold may be older than its delta.
Rule 5: up to format 3 heads and totals ended before their last number: such heads have generation 1, the floor is 0.
"""

from __future__ import annotations

import math
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import msgspec

#: Version of all layouts together.
FORMAT = 4

TABLES = (
    "entries",
    "shared",
    "holders",
    "heads",
    "keys",
    "tokens",
    "blobs",
    "blobinfo",
    "records",
    "streams",
    "rows",
    "leases",
    "endings",
    "notes",
    "feed",
    "meta",
)

#: Bytes; larger payloads are blobs, stored once. The ports allow up to 256. Below that a reference costs as much as it
#: saves: 32 bytes of digest in each entry, and a counter to be written for each that goes.
INLINE_PAYLOAD = 256

#: Bytes that sharing must save: below that, copies are cheaper than one more row, its counter and a second look.
SHARE_FROM = 256

#: Entries that may have come since the head was written; reading a head that is not cached looks at so many rows.
TAIL = 32

#: One less than a power of two: with 30 keys in a mailbox, one new key in nine is looked up and not found.
KEY_BITS = 255

#: Bytes of UTF-8 in a name.
MAX_NAME = 65_535

NUMBER = Struct(">Q")
HEAD = Struct(">QQQQQQ")
SPARE = Struct(">q")
ENTRY = Struct(">ddBBIII")  # stored at, expires at, flags, mark, length of key, of body, of payload
REFERENCE = Struct(">QBBI")  # message, flags, mark, bytes of body and payload
REFERENCE_EXPIRES = Struct(">QBBId")
TOKEN = Struct(">dQ")
BLOBINFO = Struct(">QdQ")
EXPIRES = Struct(">d")
NEVER = EXPIRES.pack(0.0)
STREAM = Struct(">QQQQd")
LEASE = Struct(">Qd")
TOTALS = Struct(">QQQQQQ")
NONCE_SIZE = 8

#: Flags of an entry.
DROPPABLE = 1
BLOB = 2  #: the payload is a blob, the row ends with its digest
KEYED = 4  #: of a reference: its message has a compaction key

MARK_AT = 17  #: where the mark stands in an entry's own row
REFERENCE_MARK_AT = 9  #: and in a reference
REFERENCE_SIZE = 22  #: no reference is longer, and no row of its own is as short
OWN_SIZE = 30  #: of the header of a row of its own

#: The tables whose rows are logged as deltas, by the byte that begins the keys of these.
DELTA_TABLES = {b"h": "heads", b"n": "holders", b"b": "blobinfo", b"m": "meta"}

META_FORMAT = b"format"
META_BOOT = b"boot"  #: how often the store was opened; part of what must never repeat
META_TOTALS = b"totals"
META_APPLIED = b"applied"  #: number of the last transaction; tells after a failure which of the last ones are written
META_MIGRATED = b"migrated"  #: where a migration goes on that was interrupted
TOTALS_DELTA = b"m" + META_TOTALS


class EndingKind(IntEnum):
    """The kind of an ending, and what its row holds."""

    ENTRIES = 1  #: key: serial(8); value: msgpack (owners, positions)
    TOKENS = 2  #: key: serial(8); value: msgpack (token, owners)
    RECORD = 3  #: key: collection 0 key; no value
    BLOB = 4  #: key: sha256; no value


class EntryRow(NamedTuple):
    """An entry row taken apart."""

    stored_at: float
    expires_at: float
    flags: int
    mark: int
    key: bytes
    body: bytes
    payload: bytes  #: or the digest, see `flags`
    size_bytes: int  #: of body and payload


class Totals(NamedTuple):
    """The counts of the whole store."""

    entries: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    records: int = 0
    shared: int = 0  #: messages
    floor: int = 0  #: no mailbox that is gone had a position above it; new ones begin above it


class Head(msgspec.Struct, gc=False, eq=False):
    """The head of a mailbox: what is known without looking at its entries.

    There are tens of thousands: quickly made, and left alone by the collector, since nothing in them leads back to
    them. Each is itself and equals no other.
    """

    owner: str
    prefix: bytes
    last: int = 0  #: position given last
    count: int = 0
    size_bytes: int = 0
    first: int = 1  #: no entry is below it; there need not be one at it
    droppable: int = 0
    write_at: int = 1  #: position with which the head must be written again (rule 2)
    user: int = 0  #: number of the transaction that uses it
    base: int = 0  #: `last` before that transaction
    newest: bytes = b""  #: the row at `last`, if it is short enough to be kept in mind
    keyed: int = 0  #: bits of compaction keys that entries may have, see `key_bit`; -1: any
    generation: int = 1  #: the first position that the mailbox could give
    spare: int = 0  #: position up to which entries are in flight, -1: all of them
    made: bool = False  #: written, or to be written, even without an entry
    # For readers in other threads, who see the tables: true of what is written, and of what is about to be.
    emptied: int = -1  #: when this was the last position, there were surely no entries
    floor: int = 1  #: surely no entry below it

    @property
    def is_there(self) -> bool:
        """Return True if there is such a mailbox."""
        return self.made or self.last >= self.generation


def new_head(owner: str, prefix: bytes, floor: int) -> Head:
    """Return the head of a mailbox that is not there: if it is made, it begins above the floor."""
    first = floor + 1
    return Head(owner, prefix, last=floor, base=floor, first=first, write_at=first, generation=first, floor=first)


def name(text: str) -> bytes:
    """Return a name as bytes; ValueError if it cannot be one."""
    encoded = text.encode()
    if not encoded or b"\0" in encoded or len(encoded) > MAX_NAME:
        raise ValueError(f"a name is 1 to {MAX_NAME} bytes of text without U+0000, not {text[:40]!r}")
    return encoded


def key_bit(key: bytes) -> int:
    """Return a bit for a compaction key: a head without it has no entry of that key. Differs between processes."""
    return 1 << (hash(key) & KEY_BITS)


def parse_head(row: bytes) -> tuple[int, ...]:
    """Return what `HEAD` has packed, with a generation whatever the format (rule 5), and up to where it spares."""
    if len(row) > HEAD.size:
        return (*HEAD.unpack_from(row), *SPARE.unpack_from(row, HEAD.size))
    return (*HEAD.unpack(row if len(row) == HEAD.size else row + NUMBER.pack(1)), 0)


def parse_totals(row: bytes | None) -> Totals:
    """Return what `TOTALS` has packed, whatever the format (rule 5)."""
    return Totals() if row is None else Totals(*TOTALS.unpack(row.ljust(TOTALS.size, b"\0")))


def entry_row(
    stored_at: float, expires_at: float, flags: int, key: bytes, body: bytes, payload: bytes, size: int
) -> bytes:
    """Pack an entry. `payload` is the digest if flags say so; `size` is always that of the payload itself."""
    return ENTRY.pack(stored_at, expires_at, flags, 0, len(key), len(body), size) + key + body + payload


def reference_row(message: int, flags: int, size_bytes: int, expires_at: float) -> bytes:
    if expires_at:
        return REFERENCE_EXPIRES.pack(message, flags, 0, size_bytes, expires_at)
    return REFERENCE.pack(message, flags, 0, size_bytes)


def facts(row: bytes) -> tuple[int, int]:
    """Return flags and bytes of an entry, of its own or a reference."""
    if len(row) <= REFERENCE_SIZE:
        _, flags, _, size_bytes = REFERENCE.unpack_from(row)
        return flags, size_bytes
    _, _, flags, _, _, body, payload = ENTRY.unpack_from(row)
    return flags, body + payload


def expiry(row: bytes) -> float:
    """Return when an entry expires, of its own or a reference; 0: never."""
    if len(row) > REFERENCE_SIZE:
        # Most never do, and comparing is cheaper than unpacking.
        return 0.0 if row[8:16] == NEVER else float(ENTRY.unpack_from(row)[1])
    return float(REFERENCE_EXPIRES.unpack(row)[4]) if len(row) == REFERENCE_SIZE else 0.0


def with_mark(row: bytes, mark: int) -> bytes:
    """Return an entry with another mark; marked, it never expires."""
    if len(row) > REFERENCE_SIZE:
        expires = NEVER if mark else row[8:16]
        return row[:8] + expires + row[16:MARK_AT] + bytes((mark,)) + row[MARK_AT + 1 :]
    at = REFERENCE_MARK_AT
    return row[:at] + bytes((mark,)) + (row[at + 1 : REFERENCE.size] if mark else row[at + 1 :])


def own_row(reference: bytes, shared: bytes) -> bytes:
    """Return the row that an entry would have if it shared no message with others."""
    return (
        shared[:8]
        + EXPIRES.pack(expiry(reference))
        + shared[16:MARK_AT]
        + reference[REFERENCE_MARK_AT : REFERENCE_MARK_AT + 1]
        + shared[MARK_AT + 1 :]
    )


def parse_entry(row: bytes) -> EntryRow:
    stored_at, expires_at, flags, mark, key_size, body_size, payload_size = ENTRY.unpack_from(row)
    key_end = OWN_SIZE + key_size
    body_end = key_end + body_size
    return EntryRow(
        stored_at,
        expires_at,
        flags,
        mark,
        row[OWN_SIZE:key_end],
        row[key_end:body_end],
        row[body_end:],
        body_size + payload_size,
    )


def ending(when: float, kind: EndingKind, what: bytes) -> bytes:
    """Return the key of an ending; a time beyond all times is one that never comes."""
    return NUMBER.pack(milliseconds(when)) + bytes((kind,)) + what


def milliseconds(when: float) -> int:
    return max(0, min(math.ceil(when * 1000), 2**63)) if math.isfinite(when) else 2**63


def after_prefix(prefix: bytes) -> bytes:
    """Return the end of a range of keys that begin with a name and 0."""
    return prefix[:-1] + b"\1"
