"""A stream into a lake without Spark: what somebody would write who has none, and knows how to write it well.

    plain_ingest.py URL LAKE     prints seconds, rows of each table and dead letters by reason as JSON

One pass: msgspec decodes the record and then the message, into a struct of its type, which checks the fields; a set
knows keys for an hour at least; rows wait by type and day until there are enough for a row group, which pyarrow
appends to the file of that day. The same rows as the pipeline `ingest` makes with the schema in `tables_bench.py`, the
same columns, the same compression. What it leaves out is everything for which the pipeline keeps a checkpoint: whoever
kills it begins again with an empty lake.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from motorcade.core.record import Record
from motorcade.storage.readers import open_reader

STREAM = "telemetry"
GROUP_ROWS = 256 * 1024
WITHIN = 3600.0  # seconds that duplicates are known
LATENESS = timedelta(days=7)
AHEAD = timedelta(hours=1)

MOMENT = pa.timestamp("us", "UTC")
RECORDED = [("_offset", pa.int64()), ("_time", MOMENT), ("_topic", pa.string())]


class Position(msgspec.Struct, gc=False):
    vin: str
    lat: float
    lon: float
    at: datetime
    speed: float | None = None
    soc: int | None = None


class Leg(msgspec.Struct, gc=False):
    km: float | None = None
    seconds: int | None = None


class Trip(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    vin: str
    started: int
    legs: list[Leg] | None = None


class Health(msgspec.Struct, gc=False):
    vin: str
    odometer: float | None = None
    voltage: float | None = None
    codes: list[str] | None = None


@dataclass(slots=True)
class Kind:
    name: str
    parse: Callable[[bytes], Any]
    columns: list[tuple[str, pa.DataType]]
    key: Callable[[Any], Any] | None = None  #: else the GUID
    event: Callable[[Any], datetime] | None = None  #: else the time of the record


LEGS = pa.list_(pa.struct([("km", pa.float64()), ("seconds", pa.int32())]))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KINDS = {
    "position": Kind(
        "position",
        msgspec.json.Decoder(Position).decode,
        [
            *(("vin", pa.string()), ("lat", pa.float64()), ("lon", pa.float64())),
            *(("speed", pa.float64()), ("soc", pa.int32()), ("at", MOMENT)),
        ],
        key=lambda row: (row.vin, row.at),
        event=lambda row: row.at,
    ),
    "trip": Kind(
        "trip",
        msgspec.json.Decoder(Trip).decode,
        [("vin", pa.string()), ("started", pa.int64()), ("legs", LEGS)],
        event=lambda row: EPOCH + timedelta(milliseconds=row.started),
    ),
    "health": Kind(
        "health",
        msgspec.json.Decoder(Health).decode,
        [("vin", pa.string()), ("odometer", pa.float64()), ("voltage", pa.float64()), ("codes", pa.list_(pa.string()))],
    ),
}
DEAD = [
    ("offset", pa.int64()), ("time", MOMENT), ("topic", pa.string()), ("payload", pa.binary()),
    ("type", pa.string()), ("reason", pa.string()), ("detail", pa.string()),
]  # fmt: skip


class Letter(NamedTuple):
    offset: int
    time: datetime
    topic: str
    payload: bytes
    type: str | None
    reason: str
    detail: str


@dataclass(slots=True)
class Waiting:
    """Rows of a table and day, on their way into a file."""

    bodies: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)


class Lake:
    """A file for each table and day."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[tuple[str, int], pq.ParquetWriter] = {}
        self.rows: Counter[str] = Counter()

    def write(self, kind: Kind, day: int, some: Waiting) -> None:
        arrays = [_column(some.bodies, name, type_) for name, type_ in kind.columns]
        arrays += [pa.array(some.offsets, pa.int64()), pa.array(some.times, MOMENT), pa.array(some.topics, pa.string())]
        self._append(kind.name, day, pa.table(arrays, pa.schema([*kind.columns, *RECORDED])))

    def bury(self, day: int, letters: Sequence[Letter]) -> None:
        arrays = [pa.array(column, type_) for column, (_, type_) in zip(zip(*letters, strict=True), DEAD, strict=True)]
        self._append("dead_letters", day, pa.table(arrays, pa.schema(DEAD)))

    def _append(self, table: str, day: int, rows: pa.Table) -> None:
        file = self._files.get((table, day))
        if file is None:
            folder = self._root / table / f"day={datetime.fromordinal(day).date()}"
            folder.mkdir(parents=True)
            file = self._files[table, day] = pq.ParquetWriter(folder / "0.parquet", rows.schema, compression="zstd")
        file.write_table(rows)
        self.rows[table] += rows.num_rows

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _column(bodies: list[Any], name: str, type_: pa.DataType) -> pa.Array:
    values = list(map(attrgetter(name), bodies))
    if name == "legs":
        values = [legs and [(leg.km, leg.seconds) for leg in legs] for legs in values]
    return pa.array(values, type_)


def judged(kind: Kind, payload: bytes, recorded: datetime) -> tuple[Any, datetime, str, str]:
    """The message and when it happened, or a reason and a detail."""
    try:
        body = kind.parse(payload)
    except msgspec.ValidationError as error:
        said = str(error)
        if "missing required" in said:
            return None, recorded, "missing_field", said
        return None, recorded, "unknown_field" if "unknown field" in said else "wrong_type", said
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, recorded, "not_json", str(error)
    event = kind.event(body) if kind.event else recorded
    if event < recorded - LATENESS:
        return None, recorded, "too_late", str(event)
    if event > recorded + AHEAD:
        return None, recorded, "in_future", str(event)
    return body, event, "", ""


def main() -> None:
    url, place = sys.argv[1], Path(sys.argv[2])
    decode = msgspec.msgpack.Decoder(Record).decode
    begun = time.perf_counter()
    lake = Lake(place)
    waiting: dict[tuple[str, int], Waiting] = defaultdict(Waiting)
    letters: dict[int, list[Letter]] = defaultdict(list)
    reasons: Counter[str] = Counter()
    seen: set[Any] = set()
    before: set[Any] = set()  # of the hour before
    until = 0.0
    read = 0
    reader = open_reader(url)
    extent = reader.extent(STREAM)
    for page in reader.pages(STREAM, extent.floor - 1, extent.last):
        read += len(page.values)
        for offset, at, value in zip(page.offsets, page.times, page.values, strict=True):
            if at >= until:
                seen, before, until = set(), seen, at + WITHIN
            record = decode(value)
            recorded = datetime.fromtimestamp(at, UTC)
            topic = record.topic
            kind = KINDS.get(topic.rpartition("/")[2])
            if kind is None:
                reason, detail = "no_type", ""
            else:
                body, event, reason, detail = judged(kind, record.payload, recorded)
            if reason:
                reasons[reason] += 1
                name = kind and kind.name
                day = recorded.toordinal()
                letters[day].append(Letter(offset, recorded, topic, record.payload, name, reason, detail))
                continue
            key = kind.key(body) if kind.key else record.guid
            if key in seen or key in before:
                continue
            seen.add(key)
            some = waiting[kind.name, event.toordinal()]
            some.bodies.append(body)
            some.offsets.append(offset)
            some.times.append(recorded)
            some.topics.append(topic)
            if len(some.offsets) == GROUP_ROWS:
                lake.write(kind, event.toordinal(), waiting.pop((kind.name, event.toordinal())))
    reader.close()
    for (name, day), some in waiting.items():
        lake.write(KINDS[name], day, some)
    for day, some_letters in letters.items():
        lake.bury(day, some_letters)
    lake.close()
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "rows": lake.rows, "dead": reasons, "read": read}))


if __name__ == "__main__":
    main()
