"""Many records at once: where the fields of their values are, found for all of them by the same few operations.

Taken apart one by one, a record becomes a struct with an object for each of its fields, which are then gathered into
columns: most of the time that reading a stream takes. Here the values of a page stand behind each other in one buffer,
and a step looks at the next field of all of them. No object is made for a record, none for a field.

    bytes    9f 01 a5 v / 1 / t c4 02 { } … 90 | 9f 01 a7 v / 2 2 / t t c4 …
    at             ↑ of the first                     ↑ of the second, and so on: the place of the field that comes next

Rule 1: a shortcut for what `core.record` writes today. Whatever is otherwise (another version, fewer or more fields,
        numbers written in another width, damage) is not `fine` and left to `core.record`, which alone knows what a
        record is and what is wrong with it.
Rule 2: what is fine here, `core.record` takes too, and finds the same fields. So a value must end where its last field
        does, and text must be text, whether that column is requested or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from motorcade.pipelines.sources import columns

Integers = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

#: Bytes behind the last value, so that a step may look beyond the end of a record that is too short.
_MARGIN: Final = bytes(16)

#: Bytes of a page that Arrow's 32 bits reach.
MAX_BYTES: Final = 2**31 - 1

_NIL: Final = 0xC0
_FALSE: Final = 0xC2
_TRUE: Final = 0xC3
_FLOAT: Final = 0xCB
_PAIR: Final = 0x92

#: An array of 15, and the version.
_HEAD: Final = 0x9F01

#: The last five of the eight bytes from `qos` on, if a message has no properties; read from behind.
_NO_PROPERTIES: Final = 0x90C0C0C0C0

#: Values so short stand inside the view of an Arrow column, not in its buffer.
_INLINE: Final = 12


class _Encoding:
    """The header of a field: by its first byte, whether it is valid, and its length."""

    def __init__(self, widths: Mapping[int, int], fixed: Mapping[int, int]) -> None:
        """Take `widths`, bytes that tell the length, and `fixed`, the length itself."""
        self.valid: Flags = np.zeros(256, np.bool_)
        self.widths: Integers = np.zeros(256, np.int64)
        self.sizes: Integers = np.zeros(256, np.int64)
        for head, width in widths.items():
            self.widths[head], self.valid[head] = width, True
        for head, size in fixed.items():
            self.sizes[head], self.valid[head] = size, True


_SHORT: Final = {0xA0 | size: size for size in range(32)}
_TEXT: Final = _Encoding({0xD9: 1, 0xDA: 2, 0xDB: 4}, _SHORT)
_TEXT_OR_NIL: Final = _Encoding({0xD9: 1, 0xDA: 2, 0xDB: 4}, {_NIL: 0, **_SHORT})
_BYTES: Final = _Encoding({0xC4: 1, 0xC5: 2, 0xC6: 4}, {})
_BYTES_OR_NIL: Final = _Encoding({0xC4: 1, 0xC5: 2, 0xC6: 4}, {_NIL: 0})


class Slices(NamedTuple):
    """The position of a field in each record."""

    starts: Integers
    sizes: Integers
    heads: ByteArray

    def of(self, rows: Integers) -> Slices:
        return Slices(self.starts[rows], self.sizes[rows], self.heads[rows])


class _Walk:
    """Goes through all records at once, field by field."""

    def __init__(self, data: ByteArray, at: Integers, ends: Integers) -> None:
        self.data = data
        self.at = at
        self.ends = ends
        self.fine: Flags = np.ones(len(at), np.bool_)

    def heads(self) -> ByteArray:
        return self.data[self.at]

    def words(self, kind: str) -> npt.NDArray[Any]:
        """Read numbers of some width."""
        width = np.dtype(kind).itemsize
        there: npt.NDArray[Any] = np.ndarray((len(self.data) - width + 1,), kind, self.data, strides=(1,))
        return there[self.at]

    def move(self, to: Integers) -> None:
        late = to > self.ends
        if late.any():
            self.fine &= ~late
            to = np.minimum(to, self.ends)
        self.at = to

    def field(self, kind: _Encoding) -> Slices:
        """Read a field of some length."""
        heads = self.heads()
        first = int(heads[0]) if len(heads) else _NIL
        if kind.valid[first] and kind.widths[first] <= 1 and (heads == first).all():
            return self._alike(kind, first, heads)
        self.fine &= kind.valid[heads]
        widths, sizes = kind.widths[heads], kind.sizes[heads]
        starts = self.at + 1
        if widths.any():
            starts += widths
            for width in (1, 2, 4):
                rows = np.flatnonzero(widths == width)
                if len(rows):
                    sizes[rows] = self._number(self.at[rows] + 1, width)
        self.move(starts + sizes)
        return Slices(starts, sizes, heads)

    def _alike(self, kind: _Encoding, head: int, heads: ByteArray) -> Slices:
        """Read a field faster, where it begins with the same byte in all records."""
        width = int(kind.widths[head])
        starts = self.at + 1 + width
        sizes = self._number(self.at + 1, 1) if width else np.full(len(heads), kind.sizes[head])
        self.move(starts + sizes)
        return Slices(starts, sizes, heads)

    def _number(self, at: Integers, width: int) -> Integers:
        number = self.data[at].astype(np.int64)
        for place in range(1, width):
            number = number << 8 | self.data[at + place]
        return number

    def byte(self, *allowed: int) -> ByteArray:
        """Read a field of one byte."""
        heads = self.heads()
        right = heads == allowed[0]
        for other in allowed[1:]:
            right |= heads == other
        self.fine &= right
        self.move(self.at + 1)
        return heads

    def seconds(self) -> npt.NDArray[np.float64]:
        """Read floating point numbers."""
        self.byte(_FLOAT)
        found = self.words(">f8").astype(np.float64)
        self.move(self.at + 8)
        return found

    def seconds_or_nil(self) -> None:
        heads = self.heads()
        there = heads == _FLOAT
        self.fine &= there | (heads == _NIL)
        self.move(self.at + np.where(there, 9, 1))

    def some(self, rows: Integers) -> _Walk:
        """Return the walk of some records; `join` merges it back."""
        part = _Walk(self.data, self.at[rows], self.ends[rows])
        part.fine = self.fine[rows]
        return part

    def join(self, rows: Integers, part: _Walk) -> None:
        self.at[rows], self.fine[rows] = part.at, part.fine


class _Properties(NamedTuple):
    """User properties, in the order of records and within them."""

    counts: Integers
    names: Slices
    texts: Slices


class Unpacked:
    """The records of a page."""

    def __init__(self, values: Sequence[bytes], sizes: Integers) -> None:
        ends = np.cumsum(sizes)
        self._buffer = pa.py_buffer(b"".join([*values, _MARGIN]))
        walk = _Walk(np.frombuffer(self._buffer, np.uint8), ends - sizes, ends)
        self._data = walk.data
        walk.fine &= walk.words(">u2") == _HEAD
        walk.move(walk.at + 2)
        self._texts: dict[str, Slices] = {"topic": walk.field(_TEXT)}
        self._bytes: dict[str, Slices] = {"payload": walk.field(_BYTES)}
        self._texts["client"] = walk.field(_TEXT)
        self._texts["username"] = walk.field(_TEXT_OR_NIL)
        self._published = walk.seconds()
        self._bytes["guid"] = walk.field(_BYTES)
        self._properties: _Properties | None = None
        if not self._ends_plainly(walk):
            self._walk_on(walk)
        self.fine: Flags = walk.fine & (walk.at == walk.ends)
        self.rows: Integers = np.flatnonzero(self.fine)  #: that are

    def _ends_plainly(self, walk: _Walk) -> bool:
        """Return True if all messages are without properties, as most are: then the rest is eight bytes."""
        tails = walk.words("<u8")
        if not ((tails >> 24 == _NO_PROPERTIES) & (walk.at + 8 == walk.ends)).all():
            return False
        self._qos = walk.byte(0, 1, 2)
        self._retain = walk.byte(_FALSE, _TRUE)
        walk.byte(_NIL, 0, 1)
        walk.move(walk.ends)
        return True

    def _walk_on(self, walk: _Walk) -> None:
        self._qos = walk.byte(0, 1, 2)
        self._retain = walk.byte(_FALSE, _TRUE)
        walk.byte(_NIL, 0, 1)  # payload format
        walk.seconds_or_nil()  # expires at
        self._texts["content_type"] = walk.field(_TEXT_OR_NIL)
        self._texts["response_topic"] = walk.field(_TEXT_OR_NIL)
        walk.field(_BYTES_OR_NIL)  # correlation data
        self._properties = _walk_properties(walk)

    # -- columns, of the rows that are fine

    def batch(self, names: Sequence[str], numbers: Sequence[int], moments: Sequence[float]) -> pa.RecordBatch:
        """Return the rows with their offsets and times; ArrowInvalid if a text is none, or a time cannot be one."""
        made = self._columns(set(names))
        if "offset" in names:
            made["offset"] = columns.offsets(numbers)
        if "time" in names:
            made["time"] = columns.times(moments)
        return columns.batch(names, [made[name] for name in names])

    def _columns(self, wanted: set[str]) -> dict[str, pa.Array]:
        texts = {name: self._values(slices, pa.string()) for name, slices in self._texts.items()}
        made = {name: column for name, column in texts.items() if name in wanted}
        made |= {name: self._values(slices, pa.binary()) for name, slices in self._bytes.items() if name in wanted}
        if "qos" in wanted:
            made["qos"] = pa.array(self._qos[self.rows].astype(np.int32))
        if "retain" in wanted:
            made["retain"] = pa.array(self._retain[self.rows] == _TRUE)
        if "published" in wanted:
            made["published"] = columns.times(self._published[self.rows])
        if "content_type" in wanted:
            made.setdefault("content_type", pa.nulls(len(self.rows), pa.string()))
        properties = self._pairs()
        if "user_properties" in wanted:
            made["user_properties"] = properties
        return made

    def _values(self, slices: Slices, kind: pa.DataType) -> pa.Array:
        return self._column(slices if len(self.rows) == len(self.fine) else slices.of(self.rows), kind)

    def _column(self, slices: Slices, kind: pa.DataType) -> pa.Array:
        starts, sizes, heads = slices
        there = heads != _NIL
        if not there.any():
            return pa.nulls(len(starts), kind)
        # The beginning of a value, which should stand in the second place of its view, serves comparisons only.
        views = np.zeros((len(starts), 4), np.int32)
        views[:, 0] = sizes
        views[:, 3] = starts
        short = np.flatnonzero(sizes <= _INLINE)
        if len(short):
            words: npt.NDArray[np.int32] = np.ndarray((len(self._data) - 3,), "<i4", self._data, strides=(1,))
            for place in range(3):
                views[short, 1 + place] = words[starts[short] + 4 * place]
        validity = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
        found = pa.Array.from_buffers(pa.binary_view(), len(starts), [validity, pa.py_buffer(views), self._buffer])
        return found.cast(kind)

    def _pairs(self) -> pa.Array:
        """Read user properties."""
        if self._properties is None:
            ends, names = np.zeros(len(self.rows) + 1, np.int32), pa.nulls(0, pa.string())
            return columns.lists(pa.array(ends), names, names)
        counts, names, texts = self._properties
        kept = np.flatnonzero(np.repeat(self.fine, counts))
        ends = np.concatenate([[0], np.cumsum(counts[self.rows])]).astype(np.int32)
        made = [self._column(slices.of(kept), pa.string()) for slices in (names, texts)]
        return columns.lists(pa.array(ends), *made)


def _walk_properties(walk: _Walk) -> _Properties:
    """Walk the array of pairs at the end; of up to 15, which is what one byte can tell."""
    heads = walk.byte(*range(0x90, 0xA0))
    counts = np.where(walk.fine, heads & 0x0F, 0).astype(np.int64)
    owners: list[Integers] = [np.zeros(0, np.int64)]
    found: tuple[list[Slices], list[Slices]] = ([], [])
    for turn in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > turn)
        part = walk.some(rows)
        part.byte(_PAIR)
        for slices in found:
            slices.append(part.field(_TEXT))
        walk.join(rows, part)
        owners.append(rows)
    order = np.argsort(np.concatenate(owners), kind="stable")
    names, texts = (_joined(slices, order) for slices in found)
    return _Properties(counts, names, texts)


def _joined(slices: list[Slices], order: Integers) -> Slices:
    if not slices:
        return Slices(order, order, order.astype(np.uint8))
    starts, sizes, heads = zip(*slices, strict=True)
    return Slices(np.concatenate(starts), np.concatenate(sizes), np.concatenate(heads)).of(order)


def unpack(values: Sequence[bytes]) -> Unpacked | None:
    """Unpack the records of a page; None if they are too many bytes."""
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    return Unpacked(values, sizes) if sizes.sum() <= MAX_BYTES - len(_MARGIN) else None
