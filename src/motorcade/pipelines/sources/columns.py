"""Schemas of the source, and pages of a store as Arrow columns.

The fields of most records are found by `unpack`, for a whole page at once. The value of any other is decoded into a
struct, and each requested column is then one list of its fields. Many columns hold one value over and over
(no username, QoS 1): those are seen and made as a whole.

Rule 1: only what is asked for is made. A frame with a schema of three columns costs less than one with all.
Rule 2: a column is added at the end of a schema, so that positions in old programs stay.
Rule 3: Spark takes a batch only if its types are exactly those that it would choose itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from motorcade.core.record import Record
from motorcade.storage.readers import MailboxPage

#: The columns of each kind of frame, in their order.
MESSAGES: Final = (
    "offset",
    "time",
    "topic",
    "payload",
    "client",
    "username",
    "guid",
    "qos",
    "retain",
    "content_type",
    "user_properties",
    "published",
)
ENTRIES: Final = ("offset", "time", "id", "fields")
WAITING: Final = ("owner", "position", "stored", "expires", "mark", "body")

#: A column of messages that is made only if a schema has it, and of what it says: the payload, parsed.
JSON: Final = "json"

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_PROPERTY: Final = pa.struct([("name", pa.string()), ("value", pa.string())])
PROPERTIES: Final = pa.list_(_PROPERTY)
FIELDS: Final = pa.map_(pa.string(), pa.binary())

TYPES: Final[dict[str, pa.DataType]] = {
    "offset": pa.int64(),
    "time": TIMESTAMP,
    "topic": pa.string(),
    "payload": pa.binary(),
    "client": pa.string(),
    "username": pa.string(),
    "guid": pa.binary(),
    "qos": pa.int32(),
    "retain": pa.bool_(),
    "content_type": pa.string(),
    "user_properties": PROPERTIES,
    "published": TIMESTAMP,
    "id": pa.string(),
    "fields": FIELDS,
    "owner": pa.string(),
    "position": pa.int64(),
    "stored": TIMESTAMP,
    "expires": TIMESTAMP,
    "mark": pa.int32(),
    "body": pa.binary(),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Columns of a frame in the order of its schema."""

    names: list[str]
    json: pa.StructType | None = None  #: the type of the column `json`, if that is wanted

    def stored(self) -> list[str]:
        """Return the columns that a record has, and those that others are derived from."""
        names = [name for name in self.names if name != JSON]
        return [*names, "payload"] if len(names) < len(self.names) and "payload" not in names else names


#: Bits of an id's number within its millisecond in an offset; and what is left for the milliseconds.
SEQUENCE_BITS: Final = 20
MAX_MILLISECONDS: Final = 2 ** (63 - SEQUENCE_BITS)


def plain(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a column of values as they are."""
    first = values[0]
    # One comparison is a nanosecond, one conversion twenty or more.
    if values[-1] == first and values.count(first) == len(values):
        return pa.nulls(len(values), kind) if first is None else pa.repeat(pa.scalar(first, kind), len(values))
    return pa.array(values, kind)


def offsets(values: Sequence[int]) -> pa.Array:
    """Return a column of offsets, which grow; mostly one after the other."""
    if values[-1] - values[0] == len(values) - 1:
        return pa.array(np.arange(values[0], values[-1] + 1))
    return pa.array(values, pa.int64())


def times(seconds: Sequence[float] | npt.NDArray[np.float64], never: float | None = None) -> pa.Array:
    """Return a column of timestamps from seconds since the epoch; `never` becomes null."""
    column = pa.array(seconds, pa.float64())
    micros = pc.round(pc.multiply(column, 1e6)).cast(pa.int64())
    if never is not None:
        micros = pc.if_else(pc.equal(column, never), pa.scalar(None, pa.int64()), micros)
    return micros.cast(TIMESTAMP)


def properties(values: Sequence[Sequence[tuple[str, str]]]) -> pa.Array:
    """Return user properties, of which most messages have none."""
    ends = list(accumulate(map(len, values), initial=0))
    pairs = list(chain.from_iterable(values))
    names = pa.array([pair[0] for pair in pairs], pa.string())
    texts = pa.array([pair[1] for pair in pairs], pa.string())
    return lists(pa.array(ends, pa.int32()), names, texts)


def lists(ends: pa.Array, names: pa.Array, texts: pa.Array) -> pa.Array:
    """Return lists of pairs, each from one end to the next."""
    return pa.ListArray.from_arrays(
        ends, pa.StructArray.from_arrays([names, texts], fields=list(_PROPERTY)), type=PROPERTIES
    )


def messages(
    names: Sequence[str], numbers: Sequence[int], moments: Sequence[float], records: Sequence[Record]
) -> pa.RecordBatch:
    """Return records of a stream, in the requested columns."""
    if not records:
        return batch(names, [pa.nulls(0, TYPES[name]) for name in names])
    made = []
    for name in names:
        match name:
            case "offset":
                made.append(offsets(numbers))
            case "time":
                made.append(times(moments))
            case "published":
                made.append(times([record.time for record in records]))
            case "user_properties":
                made.append(properties([record.user_properties for record in records]))
            case _:
                made.append(plain(_FIELD[name](records), TYPES[name]))
    return batch(names, made)


#: Written out, because asking for an attribute by a name that is not known beforehand takes twice as long.
_FIELD: Final[dict[str, Callable[[Sequence[Record]], list[Any]]]] = {
    "topic": lambda records: [record.topic for record in records],
    "payload": lambda records: [record.payload for record in records],
    "client": lambda records: [record.client for record in records],
    "username": lambda records: [record.username for record in records],
    "guid": lambda records: [record.guid for record in records],
    "qos": lambda records: [record.qos for record in records],
    "retain": lambda records: [record.retain for record in records],
    "content_type": lambda records: [record.content_type for record in records],
}


def merged(parts: Sequence[tuple[Sequence[int], pa.RecordBatch]]) -> pa.RecordBatch:
    """Merge batches into one, each with its offsets, in the order of these."""
    order = np.argsort(np.concatenate([numbers for numbers, _ in parts]), kind="stable")
    whole = pa.Table.from_batches([part for _, part in parts]).take(pa.array(order))
    return whole.combine_chunks().to_batches()[0]


def entries(names: Sequence[str], ids: Sequence[bytes], fields: Sequence[Sequence[bytes]]) -> pa.RecordBatch:
    """Return a table of entries of a Redis stream. ValueError if an id is too large for an offset."""
    parts = [identifier.partition(b"-") for identifier in ids]
    milliseconds = [int(part[0]) for part in parts]
    made = []
    for name in names:
        match name:
            case "offset":
                made.append(
                    offsets([offset_of(ms, int(part[2])) for ms, part in zip(milliseconds, parts, strict=True)])
                )
            case "time":
                made.append(pc.multiply(pa.array(milliseconds, pa.int64()), 1000).cast(TIMESTAMP))
            case "id":
                made.append(pa.array(ids, pa.binary()).cast(pa.string()))
            case _:
                made.append(_maps(fields))
    return batch(names, made)


def offset_of(milliseconds: int, sequence: int) -> int:
    """Return an id as one number that grows with it."""
    if milliseconds >= MAX_MILLISECONDS or sequence >> SEQUENCE_BITS:
        raise ValueError(
            f"the id {milliseconds}-{sequence} does not fit the column `offset`, which has room for "
            f"{2**SEQUENCE_BITS} entries per millisecond; leave that column out of the schema"
        )
    return milliseconds << SEQUENCE_BITS | sequence


def _maps(fields: Sequence[Sequence[bytes]]) -> pa.Array:
    ends = list(accumulate((len(words) // 2 for words in fields), initial=0))
    words = list(chain.from_iterable(fields))
    keys = pa.array(words[::2], pa.binary()).cast(pa.string())
    return pa.MapArray.from_arrays(pa.array(ends, pa.int32()), keys, pa.array(words[1::2], pa.binary()))


def waiting(names: Sequence[str], page: MailboxPage) -> pa.RecordBatch:
    """Return a table of mailbox entries."""
    made = []
    for name in names:
        match name:
            case "owner":
                made.append(plain(page.owners, pa.string()))
            case "position":
                made.append(pa.array(page.positions, pa.int64()))
            case "stored":
                made.append(times(page.stored))
            case "expires":
                made.append(times(page.expires, never=0.0))
            case "mark":
                made.append(plain(page.marks, pa.int32()))
            case _:
                made.append(plain(page.bodies, pa.binary()))
    return batch(names, made)


def batch(names: Sequence[str], made: list[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(made, schema=pa.schema([(name, TYPES[name]) for name in names]))
