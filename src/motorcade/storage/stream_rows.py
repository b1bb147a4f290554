"""Streams in the tables of the embedded engine, as all who read them do: the engine itself, and readers from outside.

    head      size and ends
    records   some of them, one by one
    page      many of them, as columns
    find      where a time begins

Rule 1: the head says where a stream begins. What the tables have before that was trimmed, and is only not removed yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from rocksdict import ReadOptions

from motorcade.storage import packed_rows, tables
from motorcade.storage.files import RocksTables, scan_up_to
from motorcade.storage.ports import StreamRecord
from motorcade.storage.readers import PAGE_BYTES, StreamPage
from motorcade.storage.tables import after_prefix
from motorcade.storage.transaction import StreamHead

_pack = tables.NUMBER.pack
_unpack_number = tables.NUMBER.unpack
_unpack_time = tables.EXPIRES.unpack_from


def head(stream: str, opened: RocksTables) -> StreamHead:
    """Return the size and ends of a stream; of one that never was, those of an empty one."""
    row = opened.streams.get(tables.name(stream))
    return StreamHead(*tables.STREAM.unpack(row)) if row is not None else StreamHead()


def records(stream: str, after: int, limit: int, opened: RocksTables) -> list[StreamRecord]:
    """Return up to `limit` records with an offset above `after`."""
    ends = head(stream, opened)
    start = max(after + 1, ends.first)
    found: list[StreamRecord] = []
    for key, row in _rows(stream, start, ends.last, opened):
        last: int = _unpack_number(key[-8:])[0]
        if row[0] < packed_rows.RUN:
            found.append(StreamRecord(last, _unpack_time(row)[0], row[8:]))
        else:
            found += packed_rows.records(last, row, start, limit - len(found))
        if len(found) == limit:
            break
    return found


def page(stream: str, after: int, last: int, limit: int, opened: RocksTables) -> StreamPage:
    """Return up to `limit` records above `after` up to `last`; fewer if a run more is too many, or bytes are enough."""
    ends = head(stream, opened)
    start = max(after + 1, ends.first)
    offsets: list[range] = []
    times: list[float] = []
    values: list[bytes] = []
    size_bytes = 0
    for key, row in _rows(stream, start, ends.last, opened):
        end: int = _unpack_number(key[-8:])[0]
        count = packed_rows.extent(row)[1]
        if values and len(values) + count > limit:
            break  # or the next page would have to take this row apart once more
        first, time, found = packed_rows.values(end, row, start, min(limit, last - max(start, end - count + 1) + 1))
        if not found:
            break
        offsets.append(range(first, first + len(found)))
        times += [time] * len(found)
        values += found
        # Those of a run that are of one form are as large as one another, about; the row has the common part once.
        size_bytes += max(len(row), len(found) * len(found[0]))
        if len(values) >= limit or size_bytes >= PAGE_BYTES or offsets[-1][-1] >= last:
            break
    return StreamPage(_joined(offsets, len(values)), times, values)


def _joined(parts: list[range], count: int) -> Sequence[int]:
    """Return offsets joined, mostly without a gap."""
    if parts and parts[-1][-1] - parts[0][0] == count - 1:
        return range(parts[0][0], parts[-1][-1] + 1)
    return list(chain.from_iterable(parts))


def _rows(stream: str, start: int, last: int, opened: RocksTables) -> Iterator[tuple[bytes, bytes]]:
    """Return the rows that have these offsets."""
    prefix = tables.name(stream) + b"\0"
    # From the first on: before it lies what was trimmed, and walking over that takes time.
    return scan_up_to(opened.rows, prefix + _pack(start), after_prefix(prefix), prefix + _pack(last))


def find(stream: str, time: float, opened: RocksTables) -> int:
    """Halve the offsets: times never go back. What is not there takes the time of what comes next."""
    ends = head(stream, opened)
    prefix = tables.name(stream) + b"\0"
    options = ReadOptions()
    options.set_iterate_upper_bound(after_prefix(prefix))
    cursor = opened.rows.iter(options)
    low, high = ends.first, ends.last + 1
    while low < high:
        middle = (low + high) // 2
        cursor.seek(prefix + _pack(middle))
        if not cursor.valid():
            cursor.status()  # see `scan`
            low = middle + 1  # trimmed since the head was read
        elif packed_rows.extent(cursor.value())[0] < time:
            low = _unpack_number(cursor.key()[-8:])[0] + 1
        else:
            high = middle
    return low - 1
