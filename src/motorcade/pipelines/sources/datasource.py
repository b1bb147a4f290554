"""The data source that Spark calls: `format("motorcade")`.

Everything here is pickled and sent around, so it holds options and column names only; what plans and reads is made
where it is used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkTypeError
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from motorcade.pipelines.sources import columns
from motorcade.pipelines.sources.appends import FIELDS, REMEMBERED, STAGED_FOR, RedisStreamWriter, Staged
from motorcade.pipelines.sources.brokers import SendCounts, Sender
from motorcade.pipelines.sources.columns import Wanted
from motorcade.pipelines.sources.fanouts import Fanouts
from motorcade.pipelines.sources.json_payloads import unfit
from motorcade.pipelines.sources.mailboxes import MailboxReader
from motorcade.pipelines.sources.messages import Offset, StoredStreamReader
from motorcade.pipelines.sources.options import OptionError, ReadOptions, SourceKind, WriteOptions
from motorcade.pipelines.sources.publishes import Publishes
from motorcade.pipelines.sources.redis_streams import RedisStreamReader
from motorcade.pipelines.sources.store_cache import settle

COLUMNS: Final = {
    SourceKind.STREAM: columns.MESSAGES,
    SourceKind.REDIS_STREAM: columns.ENTRIES,
    SourceKind.MAILBOXES: columns.WAITING,
}

#: The property in which Spark tells tasks the id of their query. It is made with the checkpoint and kept there.
QUERY_ID: Final = "sql.streaming.queryId"

_PROPERTY: Final = StructType([StructField("name", StringType()), StructField("value", StringType())])
_TYPES: Final[dict[pa.DataType, DataType]] = {
    pa.int64(): LongType(),
    pa.int32(): IntegerType(),
    pa.bool_(): BooleanType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    columns.TIMESTAMP: TimestampType(),
    columns.PROPERTIES: ArrayType(_PROPERTY),
    columns.FIELDS: MapType(StringType(), BinaryType()),
}


def schema_of(kind: SourceKind) -> StructType:
    return StructType([StructField(name, _TYPES[columns.TYPES[name]]) for name in COLUMNS[kind]])


def columns_of(kind: SourceKind, schema: StructType) -> Wanted:
    """Return the requested columns: all, or those of a schema that was given."""
    known = {field.name: field.dataType for field in schema_of(kind).fields}
    parsed = None
    for field in schema.fields:
        if field.name == columns.JSON and kind is SourceKind.STREAM:
            parsed = _parsed(field)
        elif field.name not in known:
            raise OptionError(f"there is no column {field.name!r}; {kind.value} has {', '.join(known)}")
        elif field.dataType != known[field.name]:
            raise OptionError(
                f"the column {field.name!r} is {known[field.name].simpleString()}, not "
                f"{field.dataType.simpleString()}; a schema chooses columns, `cast` changes them"
            )
    return Wanted(schema.fieldNames(), parsed)


def _parsed(field: StructField) -> pa.StructType:
    """Return the type that the payload is parsed into."""
    kind: pa.DataType | None = None
    try:
        kind = to_arrow_type(field.dataType, timezone="UTC")
        why = unfit(kind) if isinstance(field.dataType, StructType) else "it is a STRUCT<name: TYPE, …>"
    except PySparkTypeError as error:
        why = str(error)
    if why:
        raise OptionError(
            f"the column 'json' cannot be {field.dataType.simpleString()}: {why}; `from_json` makes other things of "
            "the column `payload`"
        )
    return kind


class MotorcadeDataSource(DataSource):
    """Streams, Redis streams and mailboxes to read; Redis streams, fan-outs and topics to write: docs/pipelines.md."""

    @classmethod
    def name(cls) -> str:
        return "motorcade"

    def schema(self) -> StructType:
        return schema_of(ReadOptions.parse(self.options).kind)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = ReadOptions.parse(self.options)
        return BatchReader(options, columns_of(options.kind, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        options = ReadOptions.parse(self.options)
        if options.kind is SourceKind.MAILBOXES:
            raise OptionError("mailboxes can be read (spark.read), not followed (spark.readStream)")
        if "ending" in {name.lower() for name in self.options}:
            raise OptionError(
                "option ending: what is followed (spark.readStream) has no end; spark.read has one, and the trigger "
                "availableNow ends with what is there"
            )
        return StreamReader(options, columns_of(options.kind, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        sender = _sender(self.options, schema, overwrite, streaming=False)
        if sender is not None:
            return BatchSender(sender)
        options = WriteOptions.parse(self.options)
        _check_entries(schema, overwrite)
        # `query` has named a frame until version 0.1.0; it is forgotten when the frame is written.
        run = f"frame-{options.batch_id or options.query or uuid.uuid4().hex}"
        lasts = REMEMBERED if options.batch_id else STAGED_FOR
        return BatchAppender(
            RedisStreamWriter(options.store, options.redis_stream, run, lasts), remember=bool(options.batch_id)
        )

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        sender = _sender(self.options, schema, overwrite, streaming=True)
        if sender is not None:
            return StreamSender(sender)
        options = WriteOptions.parse(self.options)
        _check_entries(schema, overwrite)
        if not options.query:
            raise OptionError("option query: a name is needed, by which the query is known when it is started again")
        if options.batch_id:
            raise OptionError("option batch_id: it names a frame (write); a streaming query has the option `query`")
        return StreamAppender(RedisStreamWriter(options.store, options.redis_stream, options.query))


def feed(options: ReadOptions, wanted: Wanted) -> StoredStreamReader | RedisStreamReader:
    return (
        RedisStreamReader(options, wanted.names)
        if options.kind is SourceKind.REDIS_STREAM
        else StoredStreamReader(options, wanted)
    )


class BatchReader(DataSourceReader):
    """One read, from `starting` to `ending`."""

    def __init__(self, options: ReadOptions, wanted: Wanted) -> None:
        self._options = options
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        if self._options.kind is SourceKind.MAILBOXES:
            return [InputPartition(part) for part in MailboxReader(self._options, self._wanted.names).ranges()]
        source = feed(self._options, self._wanted)
        start = source.begin()
        return [InputPartition(part) for part in source.ranges(start, source.end(start))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # what Spark makes of no partitions
            return iter(())
        return _read(self._options, self._wanted, partition.value)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream that is followed."""

    def __init__(self, options: ReadOptions, wanted: Wanted) -> None:
        self._options = options
        self._wanted = wanted
        self._made: StoredStreamReader | RedisStreamReader | None = None  #: on the driver
        self._target: Offset | None = None  #: beyond which a backfill does not go

    def _feed(self) -> StoredStreamReader | RedisStreamReader:
        if self._made is None:
            self._made = feed(self._options, self._wanted)
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the source: tasks plan nothing."""
        return {**self.__dict__, "_made": None}

    def initialOffset(self) -> Offset:  # noqa: N802
        return self._feed().begin()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._feed().newest()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        if isinstance(limit, ReadMaxRows):
            return self._feed().next(start, limit.max_rows, self._target)
        if isinstance(limit, ReadAllAvailable):
            return self._feed().next(start, None, self._target)
        raise OptionError(f"Spark asks for a limit that this source does not know: {limit}")

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        return self._feed().newest()

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        return [InputPartition(part) for part in self._feed().ranges(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._wanted, partition.value)


def _read(options: ReadOptions, wanted: Wanted, part: Any) -> Iterator[pa.RecordBatch]:
    source = MailboxReader(options, wanted.names) if options.kind is SourceKind.MAILBOXES else feed(options, wanted)
    yield from source.read(part)
    if TaskContext.get() is not None:
        settle()


# -- writing


def _check_entries(schema: StructType, overwrite: bool) -> None:
    if overwrite:
        raise OptionError("a stream can be added to (mode append, output mode append), not overwritten")
    for one in schema.fields:
        whole = one.name == FIELDS and len(schema.fields) == 1 and isinstance(one.dataType, MapType)
        if not whole and not isinstance(one.dataType, StringType | BinaryType | IntegerType | LongType):
            raise OptionError(
                f"the column {one.name!r} is {one.dataType.simpleString()}; entries of a stream have text, bytes and "
                "whole numbers (cast others, or `to_json` them), or one column `fields` with a map"
            )


class StagedCommit(WriterCommitMessage):
    """A task's report to the driver."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [message.staged for message in messages if isinstance(message, StagedCommit)]


class BatchAppender(DataSourceArrowWriter):
    """A frame into a Redis stream; all of it or nothing."""

    def __init__(self, appends: RedisStreamWriter, *, remember: bool) -> None:
        self._appends = appends
        self._remember = remember  #: it may be written again under the same name

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return StagedCommit(self._appends.stage(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._appends.land(_staged(messages), 0)
        if not self._remember:
            self._appends.forget_run()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._appends.forget(_staged(messages))


class StreamAppender(DataSourceStreamArrowWriter):
    """A query into a Redis stream; each batch once."""

    def __init__(self, appends: RedisStreamWriter) -> None:
        self._appends = appends

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        checkpoint = context.getLocalProperty(QUERY_ID) if context is not None else None
        return StagedCommit(self._appends.stage(iterator, checkpoint or ""))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._appends.land(_staged(messages), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        self._appends.forget(_staged(messages))


# -- writing to a broker


def _sender(options: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool) -> Sender | None:
    """Return the sender of rows over MQTT, if an option asks for it."""
    targets = [name.lower() for name in options if name.lower() in {"fanout", "publish", "redis_stream"}]
    if len(targets) != 1:
        raise OptionError("one of the options `redis_stream`, `fanout` and `publish` says where to write")
    if targets == ["redis_stream"]:
        return None
    if overwrite:
        raise OptionError("what is sent is sent: use mode append, output mode append")
    if targets == ["fanout"]:
        return Fanouts.parse(options, schema, streaming=streaming)
    return Publishes.parse(options, schema)


class Acknowledged(WriterCommitMessage):
    """A task's report to the driver that the broker has acknowledged everything."""

    def __init__(self, sent: SendCounts) -> None:
        self.sent = sent


def _sent(messages: Sequence[WriterCommitMessage | None]) -> list[SendCounts]:
    return [message.sent for message in messages if isinstance(message, Acknowledged)]


class BatchSender(DataSourceArrowWriter):
    """A frame to a broker."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Acknowledged(self._sender.send(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sender.line.note(_sent(messages), 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: sent messages cannot be recalled."""


class StreamSender(DataSourceStreamArrowWriter):
    """A query to a broker."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Acknowledged(self._sender.send(iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._sender.line.note(_sent(messages), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: sent messages cannot be recalled; the batch is sent again, under the same ids."""
