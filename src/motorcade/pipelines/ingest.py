"""Messages of a stream into a lake: parsed, checked against a schema, each once, in the day on which it happened.

    stream ─▶ records ─▶ classified ─▶ once ─▶ batch by batch: tasks write files ─▶ Lake.place ─▶ compaction
              topic,     type, row or   state    Sorter, in Python, one pass           exactly once
              payload,   dead letter    of keys
              identity   with a reason

The first three are functions from frame to frame, and know nothing of lakes. A batch is computed in one job, which
parses each message once and ends in tasks that write the files of all tables themselves: neither is the batch kept
anywhere, nor read again for each table.

Rule 1: every record ends in exactly one place: the table of its type, or the dead letters. Only one that is a duplicate
        is nowhere; those are counted.
Rule 2: what becomes of a record depends on the record and the options, never on the clock of the machine: what is
        late, or in the future, is so beside the time at which it was recorded.
Rule 3: records are forgotten for being duplicates by *their* time, which never goes back. So nothing is dropped for
        being old: Spark drops what is older than its watermark, and no record is.
Rule 4: a batch that the lake has is computed again if Spark wants it, since Spark's state needs that, and thrown away.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum, auto
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - so it is called wherever Spark is used
from pyspark.sql.types import (
    ArrayType,
    DataType,
    IntegralType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from motorcade.pipelines.lake import FileGroup, Lake
from motorcade.pipelines.lake_files import LakeTable, Made, Sorter, merge
from motorcade.pipelines.schema import DEAD_LETTERS, UNITS, Type

#: Seconds.
MAX_LATENESS: Final = 7 * 86400.0
MAX_AHEAD: Final = 3600.0
DEDUPE_WITHIN: Final = 3600.0

#: Bytes of a message that is parsed.
MAX_PAYLOAD: Final = 2**20

#: Columns that are read: of a stream, and of a Redis stream.
COLUMNS: Final = "offset LONG, time TIMESTAMP, topic STRING, payload BINARY, guid BINARY"
ENTRIES: Final = "offset LONG, time TIMESTAMP, id STRING, fields MAP<STRING, BINARY>"

#: Default settings of Spark for this pipeline: keys that were seen are kept on disk, not in
#: Java's memory, and only what has changed is written after a batch. And no method that Java's compiler finds too long,
#: as one made of all expressions would be: it would be interpreted, at half the speed.
STATE: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": STATE,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.codegen.hugeMethodLimit": "8000",
}

#: What tables have besides the fields that are declared, and the dead letters.
EXTRA: Final = {"_offset": "bigint", "_time": "timestamp", "_topic": "string"}
DEAD: Final = {
    "offset": "bigint",
    "time": "timestamp",
    "topic": "string",
    "payload": "binary",
    "type": "string",
    "reason": "string",
    "detail": "string",
}


class Reason(StrEnum):
    """The reason why a record is a dead letter."""

    NO_PAYLOAD = auto()  #: an entry of a Redis stream without the field `payload`
    NO_TYPE = auto()  #: no type has a filter for its topic
    TOO_LARGE = auto()  #: larger than `max_payload`
    NOT_JSON = auto()  #: not UTF-8, no JSON, not one object
    WRONG_TYPE = auto()  #: a field has a value that cannot be what is declared
    UNKNOWN_FIELD = auto()  #: a field that is not declared, where the type is strict
    MISSING_FIELD = auto()  #: no value for what is NOT NULL, or needed for time or key
    TOO_LATE = auto()  #: happened longer than `max_lateness` before it was recorded, or before 1970
    IN_FUTURE = auto()  #: happened more than `max_ahead` after it was recorded


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Bounds, in seconds and bytes."""

    max_lateness: float = MAX_LATENESS  #: 0: any
    max_ahead: float = MAX_AHEAD
    max_payload: int = MAX_PAYLOAD
    dedupe_within: float = DEDUPE_WITHIN  #: 0: duplicates are not looked for


# -- records


def records(frame: DataFrame) -> DataFrame:
    """Return `offset`, `time`, `topic`, `payload` and `identity` of a stream's records, or of a Redis stream's entries.

    Entries have their fields from a capture rule (`topic`, `payload`, `guid`) or from a dispatcher (`payload`, `id`).
    """
    if "fields" not in frame.columns:
        unnamed = F.coalesce(F.length("guid"), F.lit(0)) == 0  # never went through a broker
        identity = F.when(unnamed, F.col("offset").cast("string").cast("binary")).otherwise(F.col("guid"))
        return frame.select("offset", "time", "topic", "payload", identity.alias("identity"))
    named = [F.col("fields").getItem(name) for name in ("guid", "id", "message_id")]
    return frame.select(
        "offset",
        "time",
        F.col("fields").getItem("topic").cast("string").alias("topic"),
        F.col("fields").getItem("payload").alias("payload"),
        F.coalesce(*named, F.col("id").cast("binary")).alias("identity"),
    )


# -- types


def matches(topic: Column, filter_: str) -> Column:
    """Return whether a topic matches an MQTT filter, as `core.topic.matches`; never null.

    Regular expressions are slow here, so filters of the usual forms are done without.
    """
    levels = filter_.split("/")
    prefix = "/".join(levels[: next((i for i, level in enumerate(levels) if level in "+#" and level), len(levels))])
    if levels[0] in ("+", "#"):
        found = topic.rlike(_pattern(levels)) & ~topic.startswith("$")
    elif prefix == filter_:
        found = topic == filter_
    elif levels[-1] == "#" and prefix == filter_[:-2]:
        found = (topic == prefix) | topic.startswith(f"{prefix}/")
    elif levels.count("+") == 1 and levels[-1] != "#":
        found = _one_level(topic, f"{prefix}/", filter_.removeprefix(f"{prefix}/+"))
    else:
        found = topic.startswith(prefix) & topic.rlike(_pattern(levels))
    return F.coalesce(found, F.lit(False))


def _one_level(topic: Column, before: str, after: str) -> Column:
    """Match `before`, one level, `after`: there is no slash between, and the ends do not overlap."""
    middle = F.substring(topic, F.lit(len(before) + 1), F.length(topic) - len(before) - len(after))
    both = topic.startswith(before) & (topic.endswith(after) if after else F.lit(True))
    return both & (F.length(topic) >= len(before) + len(after)) & (F.instr(middle, "/") == 0)


def _pattern(levels: Sequence[str]) -> str:
    made = ["[^/]*" if level == "+" else _quoted(level) for level in levels if level != "#"]
    if levels[-1] != "#":
        return f"(?s)^{'/'.join(made)}\\z"
    return f"(?s)^{'/'.join(made)}(/.*)?\\z" if made else "(?s)^.*\\z"


def _quoted(level: str) -> str:
    return re.sub(r"([^\w ])", lambda found: f"\\x{{{ord(found[1]):x}}}", level)


def _type_number(types: Sequence[Type]) -> Column:
    """Return the type of a topic by its place in `types`; null if of none."""
    rest = [number for number, one in enumerate(types) if not one.topics]
    chosen = F.lit(rest[0] if rest else None).cast("int")
    for number, one in reversed(list(enumerate(types))):
        if one.topics:
            taken = reduce(or_, (matches(F.col("topic"), filter_) for filter_ in one.topics))
            chosen = F.when(taken, F.lit(number)).otherwise(chosen)
    return chosen


# -- classification

#: JSON is what RFC 8259 says, and nothing besides. A value that fails leaves a null, and the text in `_bad`.
_JSON: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": "_bad",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}

#: Times as exact as they are; Spark writes milliseconds, and two events in one of them would be the same.
_EXACT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}

_MICROS_OF_DAY: Final = 86_400_000_000


def classified(frame: DataFrame, types: Sequence[Type], options: IngestOptions) -> DataFrame:
    """Classify each record of `records`.

    time, key        of the record; what it is known by when it comes again
    table            the place of its type, or the number of types: the dead letters
    day, late        of the event, counted from 1970; whether that is before the day of the record
    row_0, …, dead   a row of the first type, …, or a dead letter: one of these is not null
    """
    sorted_ = frame.withColumn("type", _type_number(types)).withColumn("fit", _is_fit(options))
    parsed = sorted_.withColumns({f"parsed_{number}": _parsed(number, one) for number, one in enumerate(types)})
    timed = parsed.withColumns({"event": _event(types), "again": _again(types)})
    return _placed(timed.withColumn("verdict", _verdict(types, options)), types)


def _is_fit(options: IngestOptions) -> Column:
    """Return whether a record is worth parsing."""
    short = F.octet_length("payload") <= options.max_payload
    return F.coalesce(
        F.col("type").isNotNull() & short & F.is_valid_utf8(F.col("payload").cast("string")), F.lit(False)
    )


def _parsed(number: int, one: Type) -> Column:
    """Parse the message as the only member `m` of an array inside an object, beside `_bad`.

    Spark reads the first value of a text and does not look at the rest, so that of `{"a": 1}{"a": 2}` a half would be
    lost in silence. Inside of something else, the rest must fit.
    """
    row = StructType([StructField(field.name, field.dataType) for field in one.schema.fields])
    whole = StructType([StructField("m", ArrayType(row)), StructField("_bad", StringType())])
    text = F.concat(F.lit('{"m":['), F.col("payload").cast("string"), F.lit("]}"))
    return F.when(F.col("fit") & (F.col("type") == number), F.from_json(text, whole, _JSON))


def _body(number: int) -> Column:
    return F.get(F.col(f"parsed_{number}.m"), F.lit(0))


def _event(types: Sequence[Type]) -> Column:
    """Return the time of the event; null if it is unknown."""
    chosen = F.col("time")
    for number, one in enumerate(types):
        if one.time:
            chosen = F.when(F.col("type") == number, _time(number, one)).otherwise(chosen)
    return chosen


def _time(number: int, one: Type) -> Column:
    value = _body(number).getField(one.time)
    if isinstance(one.schema[one.time].dataType, TimestampType):
        return value
    return F.timestamp_micros(F.round(value.cast("double") * UNITS[one.time_unit]).try_cast("bigint"))


def _again(types: Sequence[Type]) -> Column:
    """Parse again, by name and text, messages that are JSON but do not fit the schema."""
    wrong = reduce(or_, (_is_wrong(number) for number in range(len(types))))
    return F.when(wrong, F.from_json(F.col("payload").cast("string"), "MAP<STRING, STRING>", _JSON))


def _is_wrong(number: int) -> Column:
    """Return whether it is an object with a value that could not be read."""
    return F.col(f"parsed_{number}._bad").isNotNull() & _body(number).isNotNull()


def _verdict(types: Sequence[Type], options: IngestOptions) -> Column:
    """Return `reason` and `detail` of the first thing that is wrong with a row, or null if nothing is."""
    size = F.octet_length("payload")
    too_large = F.concat(size.cast("string"), F.lit(f" bytes, of {options.max_payload} at most"))
    unfit = (
        _when(F.col("payload").isNull(), Reason.NO_PAYLOAD)
        .when(F.col("type").isNull(), _dead(Reason.NO_TYPE))
        .when(size > options.max_payload, _dead(Reason.TOO_LARGE, too_large))
        .when(~F.col("fit"), _dead(Reason.NOT_JSON, F.lit("not UTF-8")))
    )
    wrong = (F.when(F.col("type") == number, _verdict_of(number, one)) for number, one in enumerate(types))
    return F.coalesce(unfit, *wrong, _untimely(options))


def _untimely(options: IngestOptions) -> Column:
    event = F.col("event")
    early = F.lit(datetime.fromtimestamp(0, UTC))
    if options.max_lateness:
        early = F.greatest(early, F.col("time") - F.lit(timedelta(seconds=options.max_lateness)))
    late = F.col("time") + F.lit(timedelta(seconds=options.max_ahead))
    return _when(event < early, Reason.TOO_LATE, event.cast("string")).when(
        event > late, _dead(Reason.IN_FUTURE, event.cast("string"))
    )


def _verdict_of(number: int, one: Type) -> Column:
    """Return the verdict on a message that was parsed."""
    body = _body(number)
    size = F.size(F.col(f"parsed_{number}.m"))
    unknown = F.array_except(F.json_object_keys(F.col("payload").cast("string")), _texts(one.schema.fieldNames()))
    unread = _names(one.schema.fieldNames(), lambda name: _unread(body, name))
    inside = F.when(unread == "", F.lit("inside a field")).otherwise(unread)  # which has no name here
    found = (
        _when(size == 0, Reason.NOT_JSON, F.lit("empty"))
        .when(body.isNull() | (size != 1), _dead(Reason.NOT_JSON, F.lit("not one JSON object")))
        .when(_is_wrong(number), _dead(Reason.WRONG_TYPE, inside))
    )
    if one.strict:
        found = found.when(F.size(unknown) > 0, _dead(Reason.UNKNOWN_FIELD, F.concat_ws(", ", unknown)))
    if one.needed:
        missing = reduce(or_, (body.getField(name).isNull() for name in one.needed))
        needed = [name for name in one.schema.fieldNames() if name in one.needed]
        names = _names(needed, lambda name: body.getField(name).isNull())
        found = found.when(missing, _dead(Reason.MISSING_FIELD, names))
    if one.time:
        no_time = F.concat(F.lit(f"{one.time}: no time: "), body.getField(one.time).cast("string"))
        found = found.when(F.col("event").isNull(), _dead(Reason.WRONG_TYPE, no_time))
    return found


def _unread(body: Column, name: str) -> Column:
    return body.getField(name).isNull() & F.col("again").getItem(name).isNotNull()


def _names(fields: Iterable[str], which: Callable[[str], Column]) -> Column:
    """Return the names of the fields for which it is so, as one text."""
    return F.concat_ws(", ", *(F.when(which(name), F.lit(name)) for name in fields))


def _texts(texts: Iterable[str]) -> Column:
    return F.array(*(F.lit(text) for text in texts))


def _dead(reason: Reason, detail: Column | None = None) -> Column:
    text = F.lit("") if detail is None else F.coalesce(detail, F.lit(""))
    return F.struct(F.lit(reason.value).alias("reason"), text.alias("detail"))


def _when(condition: Column, reason: Reason, detail: Column | None = None) -> Column:
    return F.when(condition, _dead(reason, detail))


def _placed(frame: DataFrame, types: Sequence[Type]) -> DataFrame:
    fine = F.col("verdict").isNull()
    table = F.when(fine, F.col("type")).otherwise(F.lit(len(types)))
    event = F.when(fine, F.col("event")).otherwise(F.col("time"))
    day, today = _day(event), _day(F.col("time"))
    return frame.select(
        "time",
        _key(types, fine).alias("key"),
        table.alias("table"),
        day.alias("day"),
        (day < today).alias("late"),
        *(
            F.when(fine & (F.col("type") == number), _row(number, one)).alias(f"row_{number}")
            for number, one in enumerate(types)
        ),
        F.when(~fine, _dead_letter(types)).alias("dead"),
    )


def _day(time: Column) -> Column:
    return F.floor(F.unix_micros(time) / F.lit(_MICROS_OF_DAY)).cast("int")


def _key(types: Sequence[Type], fine: Column) -> Column:
    """Return the dedupe key of a type; each dead letter is unique."""
    chosen = F.col("identity")
    for number, one in enumerate(types):
        if one.key:
            own = F.concat(*(_exact(_body(number).getField(name), one.schema[name].dataType) for name in one.key))
            chosen = F.when(F.col("type") == number, own.cast("binary")).otherwise(chosen)
    names = F.get(_texts(one.name for one in types), F.col("type")).cast("binary")
    known = F.concat(names, F.lit(b"\0"), chosen)
    return F.when(fine, known).otherwise(F.concat(F.lit(b"\0"), F.col("offset").cast("string").cast("binary")))


def _exact(value: Column, kind: DataType) -> Column:
    """Return a part of a key as text, with a clear end; JSON is for what is rare."""
    match kind:
        case StringType():
            return F.concat(F.length(value).cast("string"), F.lit(":"), value)
        case TimestampType():
            return F.concat(F.unix_micros(value).cast("string"), F.lit(","))
        case IntegralType():
            return F.concat(value.cast("string"), F.lit(","))
        case _:
            text = F.to_json(F.struct(value.alias("v")), _EXACT)
            return F.concat(F.length(text).cast("string"), F.lit(":"), text)


def _row(number: int, one: Type) -> Column:
    body = _body(number)
    return F.struct(
        *(body.getField(name).alias(name) for name in one.schema.fieldNames()),
        F.col("offset").alias("_offset"),
        F.col("time").alias("_time"),
        F.col("topic").alias("_topic"),
    )


def _dead_letter(types: Sequence[Type]) -> Column:
    name = F.get(_texts(one.name for one in types), F.col("type")).alias("type")
    return F.struct("offset", "time", "topic", "payload", name, "verdict.reason", "verdict.detail")


# -- duplicates


def once(frame: DataFrame, within: float) -> DataFrame:
    """Keep one of the rows with the same key that were recorded within so many seconds: dedupe."""
    delayed = frame.withWatermark("time", f"{round(within * 1000)} milliseconds")
    return delayed.dropDuplicatesWithinWatermark(["key"])


# -- files

#: Columns that all tables have; those of a type have a `_` in front there.
_COMMON: Final = ("offset", "time", "topic")

_MADE: Final = "table STRING, day STRING, name STRING, rows LONG, bytes LONG, late LONG, reasons MAP<STRING, LONG>"
_MADE_ARROW: Final = pa.schema(
    [
        ("table", pa.string()),
        ("day", pa.string()),
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("late", pa.int64()),
        ("reasons", pa.map_(pa.string(), pa.int64())),
    ]
)


def write(frame: DataFrame, types: Sequence[Type], folder: Path) -> list[Made]:
    """Write the rows of a frame as `classified` makes it into files; all in one job."""
    tables = _tables(types)
    place = str(folder)

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for one in Sorter(Path(place), tables).write(batches):
            yield pa.RecordBatch.from_pylist([asdict(one) | {"reasons": list(one.reasons.items())}], _MADE_ARROW)

    rows = frame.select("table", "day", "late", *_flat(types))
    # A cluster has more partitions than cores, for the sake of large batches; each would have files of its own.
    few = rows.coalesce(max(1, rows.sparkSession.sparkContext.defaultParallelism))
    return [Made(**row.asDict()) for row in few.mapInArrow(task, _MADE).collect()]


def _flat(types: Sequence[Type]) -> list[Column]:
    """Return the columns of rows and of dead letters side by side, and the common ones once.

    Spark asks after each row how large its Arrow batch is by now. Of a struct that takes several times as long as of
    the columns in it.
    """
    common = [
        F.coalesce(
            *(F.col(f"row_{number}").getField(f"_{name}") for number in range(len(types))), F.col(f"dead.{name}")
        ).alias(name)
        for name in _COMMON
    ]
    fields = [
        F.col(f"row_{number}").getField(name).alias(_place(number, place))
        for number, one in enumerate(types)
        for place, name in enumerate(one.schema.fieldNames())
    ]
    return [*common, *fields, *(F.col(f"dead.{name}").alias(f"dead_{name}") for name in DEAD if name not in _COMMON)]


def _place(number: int, place: int) -> str:
    """Return the temporary name of a field; its own name may have dots, which Spark would take for paths."""
    return f"field_{number}_{place}"


def _tables(types: Sequence[Type]) -> list[LakeTable]:
    """Return the tables, each with its columns."""
    extra = {f"_{name}": name for name in _COMMON}
    dead = {name: name if name in _COMMON else f"dead_{name}" for name in DEAD}
    fields = (
        {name: _place(number, place) for place, name in enumerate(one.schema.fieldNames())}
        for number, one in enumerate(types)
    )
    return [
        *(LakeTable(one.name, own | extra) for one, own in zip(types, fields, strict=True)),
        LakeTable(DEAD_LETTERS, dead, dead=True),
    ]


def drain(frame: DataFrame) -> None:
    """Compute a frame and discard it."""
    frame.write.format("noop").mode("overwrite").save()


# -- compaction

#: Files that are made before any of them is put into place; each needs room beside those that it is made of.
MERGED_TOGETHER: Final = 64


def compact(spark: SparkSession, lake: Lake, groups: Sequence[FileGroup]) -> int:
    """Make one file of each group; how many files there are less now."""
    for start in range(0, len(groups), MERGED_TOGETHER):
        some = groups[start : start + MERGED_TOGETHER]
        folder = lake.fresh()
        jobs = [([str(lake.root / name) for name in group.names], str(folder)) for group in some]
        names = spark.sparkContext.parallelize(jobs, len(jobs)).map(_merge).collect()
        lake.replace(list(zip(some, names, strict=True)), folder)
    return sum(len(group.names) - 1 for group in groups)


def _merge(job: tuple[list[str], str]) -> str:
    """Merge files in a task. It may run twice, so its file has a unique name."""
    sources, folder = job
    name = f"{uuid.uuid4().hex}.parquet"
    merge([Path(source) for source in sources], Path(folder) / name)
    return name
