"""Records of a stream in the table `rows`: one by itself, or a run of them in one row.

A row costs about a microsecond to write and as much to read, whatever is in it, and each byte of it more than a
nanosecond. So records that are appended together share a row, and if they are of one form (`Formed`), only what
differs is stored.

Rule 1: the key of a row is the offset of its last record. So looking for an offset leads to the row that has it.
Rule 2: all records of a row have the same time. A run begins with the time below zero; that tells it from a record by
        itself.
Rule 3: a run may have lost its oldest records to a trim; only the head of the stream knows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from struct import Struct

import msgspec

from motorcade.storage.ports import Formed, StreamRecord

#: Records in one row, and bytes after which the next begins: a reader who wants one of them reads them all.
MAX_RECORDS = 256
MAX_BYTES = 32 * 1024

#: What the first byte of a run is at least, since its time is below zero.
RUN = 0x80

_TIME = Struct(">d")
_HEAD = Struct(">dBI")  # the time below zero, what follows, records

_VALUES = 1  #: msgpack: the values
_FORMED = 2  #: msgpack: parts and columns of a `Formed`

_encode = msgspec.msgpack.Encoder().encode
_decode_values = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_formed = msgspec.msgpack.Decoder(tuple[list[bytes | int], list[list[bytes]]]).decode


def rows_of(first: int, time: float, values: Sequence[bytes]) -> Iterator[tuple[int, bytes, int]]:
    """Yield rows for values appended together: each row's offset, the row, and the bytes of its values."""
    if isinstance(values, Formed):
        yield from _formed_rows(first, time, values)
        return
    start, size_bytes = 0, 0
    for end, value in enumerate(values, 1):
        size_bytes += len(value)
        if size_bytes >= MAX_BYTES or end - start == MAX_RECORDS or end == len(values):
            if end - start == 1:
                row = _TIME.pack(time) + value
            else:
                row = _HEAD.pack(-time, _VALUES, end - start) + _encode(values[start:end])
            yield first + end - 1, row, size_bytes
            start, size_bytes = end, 0


def _formed_rows(first: int, time: float, values: Formed) -> Iterator[tuple[int, bytes, int]]:
    for start in range(0, len(values), MAX_RECORDS):
        end = min(start + MAX_RECORDS, len(values))
        part = values if end - start == len(values) else values.part(start, end)
        row = _HEAD.pack(-time, _FORMED, end - start) + _encode((part.parts, part.columns))
        yield first + end - 1, row, part.size_bytes()


def weight(values: Sequence[bytes]) -> int:
    """Return how long writing takes, in ordinary rows; a matter of bytes rather than of the number of values."""
    return 1 + (len(values) >> 5 if isinstance(values, Formed) else sum(map(len, values)) >> 9)


def extent(row: bytes) -> tuple[float, int]:
    """Return the time of a row's records, and how many records it was made with."""
    if row[0] < RUN:
        return _TIME.unpack_from(row)[0], 1
    time, _, count = _HEAD.unpack_from(row)
    return -time, count


def values(last: int, row: bytes, start: int, limit: int) -> tuple[int, float, list[bytes]]:
    """Return up to `limit` of a row's values from an offset on: the offset of the first, the time of all, the values.

    `last` is the offset of the row.
    """
    if row[0] < RUN:
        return last, _TIME.unpack_from(row)[0], [row[8:]] if limit > 0 else []
    time, kind, count = _HEAD.unpack_from(row)
    first = last - count + 1
    skip = max(start - first, 0)
    found = _values(row, kind)
    if skip or limit < count:
        found = found[skip : skip + max(limit, 0)]
    return first + skip, -time, found


def records(last: int, row: bytes, start: int, limit: int) -> list[StreamRecord]:
    """Return the same values as records."""
    first, time, found = values(last, row, start, limit)
    return list(map(StreamRecord, range(first, first + len(found)), repeat(time), found))


def sizes(row: bytes) -> list[int]:
    """Return the size of each value in bytes."""
    if row[0] < RUN:
        return [len(row) - _TIME.size]
    return list(map(len, _values(row, _HEAD.unpack_from(row)[1])))


def _values(row: bytes, kind: int) -> list[bytes]:
    content = memoryview(row)[_HEAD.size :]
    return list(Formed(*_decode_formed(content))) if kind == _FORMED else _decode_values(content)
