"""An audience by SQL, and one message to all of it: planned once, then sent, each vehicle addressed once.

    tables ─ SQL ─▶ column `vin` ─▶ by hash of the VIN ─▶ each once, checked ─▶ encoded batches      `planned`
                                                                └─▶ what is no VIN, and why
    DIR/planning ─ rename ─▶ DIR/plan, DIR/invalid                                                   `plan`
    DIR/plan ─ streaming query, checkpoint DIR/spark ─▶ fan-out writer ─▶ broker                     `sending`

Two phases in one folder:

    DIR/payload      what vehicles get, as it was when the plan was made
    DIR/planning/    an unfinished plan; a run that finds it starts again
    DIR/plan/        Parquet with one row for each batch, its message as it is sent; _plan.json counts them
    DIR/invalid/     Parquet with one row for each text that is no VIN; only if there are some
    DIR/figures/     what the broker has answered to each micro-batch

Rule 1: DIR/plan comes by one rename and is never made again, so a batch of one id is always the same batch. Tables may
        change afterwards, and the query may be one that never gives the same rows twice.
Rule 2: what is sent twice is stored once: by its `batch_id` the broker knows what it has accepted. So it does not
        matter where a run is killed, as long as the plan is there; and before it is there, nothing is sent.
Rule 3: VINs meet in Python as columns, a partition at a time. Spark's own aggregation would take several times as long,
        since every VIN is a group of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - so it is called wherever Spark is used
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StringType

from motorcade.core.record import RecordError
from motorcade.core.vin import make_vin
from motorcade.pipelines import PipelineError, failures
from motorcade.pipelines.batching import MAX_DIFFERENT, CountedVins, VinTally, batches, reason_of, right
from motorcade.pipelines.rundir import RunDir
from motorcade.pipelines.sources.brokers import SendCounts, noted
from motorcade.pipelines.tables import QueryTable
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.record import decode_entry
from motorcade.plugins.fanout.tables import ENTRIES
from motorcade.publisher.batches import BATCH, Order

#: Shares that VINs are divided into before small ones are put together again.
PARTITIONS: Final = 64

#: Size of a share as Spark counts it, compressed; some 800 000 VINs.
SHARE: Final = "8m"

_PARTITIONS: Final = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
_SHARING: Final = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": SHARE,
}

#: Batches in one file of a plan. A run that was killed sends one or two files again, for nothing.
BATCHES_PER_FILE: Final = 2000

#: Seconds that a file should take, if there is a rate.
SECONDS_PER_FILE: Final = 10.0

#: Files of one micro-batch.
FILES_PER_BATCH: Final = 2

#: Default number of connections to the broker; a node is busy with fewer.
CONNECTIONS: Final = 8

#: Bytes of a text that is looked at. What is longer is no VIN, and is cut.
LONGEST: Final = 256
_CUT: Final = 64  # characters that are left of it

#: Rows of one Arrow batch with texts that are no VINs.
_WRONG_ROWS: Final = 10_000

VIN: Final = "vin"
BATCHES: Final = "batch"
INVALID: Final = "invalid"

#: What `planned` gives: rows of both kinds.
SCHEMA: Final = (
    "kind STRING, batch_id STRING, message BINARY, vehicles INT, size_bytes LONG, rows LONG, "
    "vin STRING, reason STRING, detail STRING"
)

#: What the writer wants of a plan.
ENCODED: Final = "batch_id STRING, message BINARY, vehicles INT"

_ARROW: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("batch_id", pa.string()),
        ("message", pa.binary()),
        ("vehicles", pa.int32()),
        ("size_bytes", pa.int64()),
        ("rows", pa.int64()),
        ("vin", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)


# -- frames


def chosen(spark: SparkSession, sql: str) -> DataFrame:
    """Return the audience that a query selects: its column `vin`.

    Spark would carry out other statements before they could be refused.
    """
    parser = spark._jsparkSession.sessionState().sqlParser()  # noqa: SLF001 - there is no other way to it
    try:
        parser.parseQuery(sql.rstrip().removesuffix(";"))
    except ParseException as error:
        raise PipelineError(f"this is no query (SELECT … AS vin …): {failures.words(error)}") from error
    return audience(spark.sql(sql))


def audience(frame: DataFrame) -> DataFrame:
    """Return the column `vin` of a frame, as text of bounded length."""
    types = {one.name: one.dataType for one in frame.schema.fields}
    if VIN not in types:
        raise PipelineError(f"the query has no column `vin` but {', '.join(types)}; write `SELECT … AS vin`")
    if not isinstance(types[VIN], StringType):
        raise PipelineError(
            f"the column `vin` of the query is {types[VIN].simpleString()}, not string; a VIN that was a number has "
            "perhaps lost zeros"
        )
    return frame.select(_short(F.col(VIN)).alias(VIN))


def _short(text: Column) -> Column:
    cut = F.concat(F.substring(text, 1, _CUT), F.lit("…"))
    return F.when(F.octet_length(text) <= LONGEST, text).otherwise(cut)


def planned(
    frame: DataFrame,
    order: Order,
    *,
    size: int = BATCH,
    check_digit: bool = False,
    partitions: int | None = None,
    run: str | None = None,
) -> DataFrame:
    """Return encoded batches of an audience, and what in it is no VIN; see `SCHEMA`.

    Evaluated twice, the batches are others: keep the result, and send that. `partitions` None lets Spark put small
    shares together; `run` begins the ids of the batches.
    """
    shared = frame.repartition(VIN) if partitions is None else frame.repartition(partitions, VIN)
    return shared.mapInArrow(
        partial(_share, order=order, size=size, check_digit=check_digit, run=run or uuid.uuid4().hex[:16]), SCHEMA
    )


def _share(
    columns: Iterator[pa.RecordBatch], order: Order, size: int, check_digit: bool, run: str
) -> Iterator[pa.RecordBatch]:
    """Encode, in a task, all rows whose VINs belong to its partition."""
    tally = VinTally(MAX_DIFFERENT)
    for batch in columns:
        tally.add(batch.column(0))
    found = tally.found()
    good = right(found.texts, check_digit=check_digit)
    context = TaskContext.get()
    prefix = f"{run}-{context.partitionId() if context is not None else 0}-"
    for some in batches(found.filter(good), order, size, prefix):
        yield _record(
            kind=[BATCHES] * len(some.ids),
            batch_id=some.ids,
            message=some.messages,
            vehicles=some.vehicles,
            size_bytes=[len(message) for message in some.messages],
            rows=some.rows,
        )
    wrong = found.filter(~good)
    for start in range(0, len(wrong.texts), _WRONG_ROWS):
        yield _wrong(
            CountedVins(wrong.texts[start : start + _WRONG_ROWS], wrong.times[start : start + _WRONG_ROWS]), check_digit
        )


def _wrong(found: CountedVins, check_digit: bool) -> pa.RecordBatch:
    texts = found.texts.to_pylist()
    why = [reason_of(text, check_digit=check_digit) or ("", "") for text in texts]
    return _record(
        kind=[INVALID] * len(texts),
        vin=texts,
        reason=[str(reason) for reason, _ in why],
        detail=[detail for _, detail in why],
        rows=found.times,
    )


def _record(**columns: Any) -> pa.RecordBatch:
    count = len(columns["kind"])
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[one.name], one.type) if one.name in columns else pa.nulls(count, one.type) for one in _ARROW],
        schema=_ARROW,
    )


@dataclass(frozen=True)
class AudienceCounts:
    """Counts of an audience."""

    rows: int = 0  #: of the query
    vehicles: int = 0
    duplicates: int = 0  #: rows that named a vehicle a second time
    invalid: dict[str, int] = field(default_factory=dict)  #: rows that are no VIN, by reason
    batches: int = 0
    size_bytes: int = 0  #: of the batches' messages
    tasks: int = 0  #: that have made batches

    @property
    def invalid_rows(self) -> int:
        return sum(self.invalid.values())


def counted(plan: DataFrame) -> AudienceCounts:
    """Count a plan (`planned`)."""
    found = (
        plan.groupBy("kind", "reason")
        .agg(
            F.sum("rows").alias("rows"),
            F.count("batch_id").alias("batches"),
            F.coalesce(F.sum("vehicles"), F.lit(0)).alias("vehicles"),
            F.coalesce(F.sum("size_bytes"), F.lit(0)).alias("size_bytes"),
            F.count_distinct(F.substring_index("batch_id", "-", 2)).alias("tasks"),
        )
        .collect()
    )
    good = next((row for row in found if row["kind"] == BATCHES), None)
    invalid = {
        row["reason"]: row["rows"] for row in sorted(found, key=lambda row: row["reason"] or "") if row["reason"]
    }
    if good is None:
        return AudienceCounts(rows=sum(invalid.values()), invalid=invalid)
    return AudienceCounts(
        rows=good["rows"] + sum(invalid.values()),
        vehicles=good["vehicles"],
        duplicates=good["rows"] - good["vehicles"],
        invalid=invalid,
        batches=good["batches"],
        size_bytes=good["size_bytes"],
        tasks=good["tasks"],
    )


def dry_run(order: Order, counts: AudienceCounts, pending: int | None) -> dict[str, Any]:
    """Count what sending would do; `pending` as `pending_of` counts it, None if it was not counted."""
    published = order.size_bytes(counts.batches, counts.size_bytes, copies=max(1, counts.tasks))
    topic = len(FanoutConfig().topic_of(make_vin(0), order.request_id).encode())
    single = order.bytes_one_by_one(counts.vehicles, topic)
    return {
        "request_id": order.request_id,
        "rows": counts.rows,
        "invalid": counts.invalid_rows,
        **{f"invalid_{reason}": rows for reason, rows in counts.invalid.items()},
        "duplicates": counts.duplicates,
        "vehicles": counts.vehicles,
        "batches": counts.batches,
        "payload_bytes": len(order.data),
        "bytes": published,
        "bytes_one_by_one": single,
        "bytes_saved": single - published,
        "pending_replaced": pending,
    }


# -- what waits already


def pending_of(spark: SparkSession, store: str, request: str, frame: DataFrame) -> int:
    """Return how many deliveries of a request wait for vehicles of an audience: sending it again replaces them."""
    waiting = (
        spark.read.format("motorcade")
        .schema("owner STRING, body BINARY")
        .options(store=store, mailboxes=ENTRIES)
        .load()
        .mapInArrow(partial(_waiting, request=request), "vin STRING")
    )
    return waiting.join(frame.dropDuplicates([VIN]), VIN, "left_semi").count()


def _waiting(columns: Iterator[pa.RecordBatch], request: str) -> Iterator[pa.RecordBatch]:
    for batch in columns:
        owners, bodies = (batch.column(name).to_pylist() for name in ("owner", "body"))
        mine = [
            owner.removeprefix(ENTRIES) for owner, body in zip(owners, bodies, strict=True) if _request(body) == request
        ]
        yield pa.RecordBatch.from_arrays([pa.array(mine, pa.string())], ["vin"])


def _request(body: bytes) -> str | None:
    try:
        return decode_entry(body).request_id
    except RecordError:
        return None  # the audit tells of those


# -- the plan


def plan(
    spark: SparkSession,
    folder: RunDir,
    order: Order,
    tables: Sequence[QueryTable],
    sql: str,
    *,
    size: int = BATCH,
    check_digit: bool = False,
    partitions: int = PARTITIONS,
    rate: float | None = None,
) -> AudienceCounts:
    """Make the plan of a folder, or find it made."""
    place, under_way = folder.part("plan"), folder.part("planning")
    _remove(under_way)
    if place.exists():
        return _planned_before(place)
    per_file = BATCHES_PER_FILE if rate is None else max(1, min(BATCHES_PER_FILE, int(rate * SECONDS_PER_FILE / size)))
    with _settings_kept(spark), registered(sharing(spark, partitions), tables):
        frame = planned(chosen(spark, sql), order, size=size, check_digit=check_digit)
        try:
            frame.write.partitionBy("kind").option("maxRecordsPerFile", per_file).parquet(str(under_way))
        except Exception:
            _remove(under_way)  # so nothing is there that would keep the next command from being another one
            raise
    counts = _counts_of(spark, under_way)
    _keep_invalid(spark, under_way / f"kind={INVALID}", folder)
    made = under_way / f"kind={BATCHES}"
    made.mkdir(exist_ok=True)
    (made / "_plan.json").write_text(json.dumps(asdict(counts)))
    folder.part("payload").write_bytes(order.data)
    _flush([folder.part("payload"), *made.iterdir()])
    made.rename(place)
    _flush([folder.path])
    _remove(under_way)
    return counts


def sharing(spark: SparkSession, partitions: int) -> SparkSession:
    """Let a session divide rows into so many shares and put small ones together, from now on."""
    for key, value in {**_SHARING, _PARTITIONS: str(partitions)}.items():
        spark.conf.set(key, value)
    return spark


@contextmanager
def _settings_kept(spark: SparkSession) -> Iterator[None]:
    """Restore what `sharing` sets. (A session of its own would not know the source `motorcade`.)"""
    before = {key: spark.conf.get(key, None) for key in (*_SHARING, _PARTITIONS)}
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, value)


@contextmanager
def registered(spark: SparkSession, tables: Sequence[QueryTable]) -> Iterator[None]:
    """Register tables that queries of the session can name, for as long as the context lasts."""
    try:
        for table in tables:
            table.register(spark)
        yield
    finally:
        for table in tables:
            spark.catalog.dropTempView(table.name)


def _planned_before(place: Path) -> AudienceCounts:
    try:
        return AudienceCounts(**json.loads((place / "_plan.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise PipelineError(f"{place} is no plan ({error}); begin in another folder") from error


def _counts_of(spark: SparkSession, place: Path) -> AudienceCounts:
    if not any(place.glob("kind=*")):
        return AudienceCounts()
    return counted(spark.read.schema(SCHEMA).parquet(str(place)))


def _keep_invalid(spark: SparkSession, found: Path, folder: RunDir) -> None:
    """Write what is no VIN into one file, for people to look at."""
    place = folder.part("invalid")
    _remove(place)
    if found.exists():
        rows = spark.read.schema("vin STRING, reason STRING, detail STRING, rows LONG").parquet(str(found))
        rows.coalesce(1).write.parquet(str(place))


def _remove(place: Path) -> None:
    if place.exists():
        shutil.rmtree(place)


def _flush(places: Sequence[Path]) -> None:
    """Flush onto the disk: what a rename makes valid must be there when it is."""
    for place in places:
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- sending


def sending(
    spark: SparkSession,
    folder: RunDir,
    broker: Mapping[str, str],
    *,
    rate: float | None = None,
    connections: int | None = None,
) -> DataStreamWriter:
    """Return the query that sends a plan; `broker` are options of the fan-out writer, its URL (`fanout`) among them."""
    tasks = connections or max(1, min(CONNECTIONS, spark.sparkContext.defaultParallelism))
    frame = (
        spark.readStream.schema(ENCODED)
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .parquet(str(folder.part("plan")))
        .repartition(
            tasks
        )  # whatever the files are: all connections have the same to do, and the same share of the rate
    )
    options = {
        **broker,
        "payload_file": str(folder.part("payload")),
        "figures": str(folder.part("figures")),
        **({"task_rate": str(rate / tasks)} if rate is not None else {}),
    }
    return frame.writeStream.format("motorcade").outputMode("append").options(**options)


def progress(folder: RunDir, counts: AudienceCounts) -> dict[str, int]:
    """Return the progress of sending a plan, by what the broker has answered."""
    sent: SendCounts = noted(folder.part("figures"))
    figures = sent.figures
    return {
        "vehicles": counts.vehicles,
        "invalid": counts.invalid_rows,
        "duplicates": counts.duplicates,
        "batches": counts.batches,
        "acknowledged": figures.batches,
        "accepted": figures.accepted,
        "replaced": figures.replaced,
        "rejected": figures.rejected,
        "repeated": figures.repeated,
        "reconnected": sent.reconnected,
    }
