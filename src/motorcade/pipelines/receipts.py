"""Receipts as tables: how far each request is, how long it took, who is late and why, where and when.

    records of the stream `receipts`
        └─ parse ─▶ once ─┬─▶ deliveries ─┬─▶ funnel       one row per request
                          │               ├─▶ latency      request and stage: percentiles
                          │               ├─▶ stragglers   deliveries that are late or missing, and why
                          │               └─▶ reasons      the same, counted, for all deliveries that have a reason
                          ├─▶ nodes       request, node and state: counts
                          └─▶ hours       request, hour and state: counts

Functions from frame to frame: nothing is read or computed before rows are collected. docs/receipts.md says what
may be relied on; from there:

Rule 1: a receipt that is there twice (same delivery, state and attempt) counts once, the first one.
Rule 2: a final receipt is the last word, also if others stand behind it in the stream; of several the first one counts
        here. That there are several is the audit's business.
Rule 3: a late acknowledgement (`late_ack`) changes no state, and counts nowhere here.
Rule 4: times are those of the nodes, which are as equal as their clocks. Differences are shown as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - so it is called wherever Spark is used

from motorcade.core.receipt import FINAL, LATE_ACK, TOPIC, VERSION, State

#: Seconds after which a message that was acknowledged in the end counts as late.
SLOW_AFTER: Final = 3600.0

#: From … to …, in seconds; see `deliveries`.
STAGES: Final = ("wait", "retry", "answer", "total")

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

#: Of a rank: one in so many. Below that number of deliveries percentiles are exact.
ACCURACY: Final = 10_000

_JSON: Final = (
    "v INT, state STRING, vin STRING, request_id STRING, delivery_id STRING, time DOUBLE, node STRING, attempt INT, "
    "reason STRING"
)

#: What has to be read of the stream.
COLUMNS: Final = f"offset LONG, topic STRING, json STRUCT<{_JSON}>"

_FINAL: Final = [state.value for state in State if state in FINAL]
_OPEN: Final = [state.value for state in State if state not in FINAL]
_DELIVERY: Final = ("request_id", "vin", "delivery_id")


@dataclass(frozen=True)
class ReceiptTables:
    """Tables of receipts, as frames; docs/pipelines.md has the columns."""

    once: DataFrame
    deliveries: DataFrame
    funnel: DataFrame
    latency: DataFrame
    stragglers: DataFrame
    reasons: DataFrame
    nodes: DataFrame
    hours: DataFrame

    def named(self) -> dict[str, DataFrame]:
        """Return the tables that are worth keeping."""
        return {name: frame for name, frame in vars(self).items() if name != "once"}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Read the stream once for all that is asked for inside; else it is read for every table."""
        shared = [frame for frame in (self.once, self.deliveries) if not frame.is_cached]  # else by who is around us
        for frame in shared:
            frame.persist()
        try:
            yield
        finally:
            for frame in reversed(shared):
                frame.unpersist()


def receipts(
    frame: DataFrame, *, request: str | None = None, now: datetime | None = None, slow_after: float = SLOW_AFTER
) -> ReceiptTables:
    """Make all tables from records of the stream `receipts`; of one request, or of all.

    `now` is up to when those that are still pending have waited: the time of the newest receipt, if it is not given.
    """
    single = once(parse(frame, request))
    known = deliveries(single, slow_after=slow_after)
    return ReceiptTables(
        once=single,
        deliveries=known,
        funnel=funnel(known),
        latency=latency(known),
        stragglers=stragglers(known, now=now),
        reasons=reasons(known),
        nodes=nodes(single),
        hours=hours(single),
    )


# -- receipts


def parse(frame: DataFrame, request: str | None = None) -> DataFrame:
    """Return one row per change of state. Records that are no receipts are left out; the audit names them."""
    rows = read(frame, request).where(F.col("readable") & (F.col("reason") != LATE_ACK)).drop("readable")
    return rows if request is None else rows.where(F.col("request_id") == request)


def read(frame: DataFrame, request: str | None = None) -> DataFrame:
    """Return one row per record; what is not `readable` is no receipt of a known version.

    From the column `json` as COLUMNS has it, or from `payload`, which takes longer.
    """
    if request is not None and "topic" in frame.columns:
        # Most records are of other requests, and a topic is compared sooner than JSON is parsed.
        frame = frame.where(F.col("topic").startswith(f"{TOPIC}/{request}/"))
    if "json" in frame.columns:
        return frame.select("offset", _row(F.col("json")).alias("told")).select("offset", "told.*")
    # As a table of one row, and not as a column: a filter on it would be moved below the parsing, which Spark then does
    # again for each field that the filter looks at.
    text = F.col("payload").cast("string")
    told = F.transform(F.array(F.from_json(text, _JSON)), _row)
    return frame.select("offset", F.inline(told))


def _row(told: Column) -> Column:
    """Return the columns of one receipt."""
    at = F.timestamp_micros(F.round(told["time"] * 1e6).try_cast("long"))
    readable = (told["v"] == VERSION) & at.isNotNull() & told["state"].isin(_FINAL + _OPEN)
    for name in _DELIVERY:
        readable &= told[name].isNotNull()
    return F.struct(
        *(told[name].alias(name) for name in (*_DELIVERY, "state")),
        F.coalesce(told["attempt"], F.lit(0)).alias("attempt"),
        at.alias("at"),
        F.coalesce(told["node"], F.lit("")).alias("node"),
        F.coalesce(told["reason"], F.lit("")).alias("reason"),
        F.coalesce(readable, F.lit(False)).alias("readable"),
    )


def once(rows: DataFrame) -> DataFrame:
    """Keep each receipt once (rule 1): dedupe."""
    keys = (*_DELIVERY, "state", "attempt")
    first = F.min_by(F.struct("offset", "at", "node", "reason"), "offset").alias("first")
    # By delivery, so that what follows needs no other order.
    return rows.repartition(*_DELIVERY).groupBy(*keys).agg(first).select(*keys, "first.*")


# -- deliveries


def deliveries(rows: DataFrame, *, slow_after: float = SLOW_AFTER) -> DataFrame:
    """Return one row per delivery: state, reason, attempts, times of the changes, and durations.

    wait    from acceptance to the first sending: the vehicle is away, or busy with another message
    retry   from the first to the last sending, if there were several
    answer  from the last sending to the acknowledgement
    total   from acceptance to the acknowledgement
    """
    is_final = F.col("state").isin(_FINAL)
    told = F.struct("state", "reason", "node", "at")
    at = {state: F.when(F.col("state") == state.value, F.col("at")) for state in (State.ACCEPTED, State.SENT)}
    grouped = rows.groupBy(*_DELIVERY).agg(
        F.coalesce(F.min_by(F.when(is_final, told), F.when(is_final, F.col("offset"))), F.max_by(told, "offset")).alias(
            "last"
        ),
        F.max("attempt").alias("attempts"),
        F.count_if(F.col("state") == State.RETRIED.value).alias("retries"),
        F.min(at[State.ACCEPTED]).alias("accepted_at"),
        F.min(at[State.SENT]).alias("sent_at"),
        F.collect_set(at[State.SENT]).alias("sendings"),
        F.max("at").alias("last_at"),
    )
    ended = grouped.select(
        *_DELIVERY,
        "last.state",
        "last.reason",
        "last.node",
        "attempts",
        "retries",
        "accepted_at",
        "sent_at",
        F.when(F.col("last.state").isin(_FINAL), F.col("last.at")).alias("ended_at"),
        "last_at",
        "sendings",
    )
    # A sending may be noted behind the end; then it was not the one that was answered.
    resent = F.array_max(F.filter("sendings", lambda time: F.col("ended_at").isNull() | (time <= F.col("ended_at"))))
    timed = _timed(ended.withColumn("resent_at", resent).drop("sendings"))
    return timed.withColumn("why", _why(slow_after))


def _timed(frame: DataFrame) -> DataFrame:
    acked = F.col("state") == State.ACKED.value
    return frame.withColumns(
        {
            "wait": _seconds("accepted_at", "sent_at"),
            "retry": F.when(F.col("resent_at") > F.col("sent_at"), _seconds("sent_at", "resent_at")),
            "answer": F.when(acked, _seconds("resent_at", "ended_at")),
            "total": F.when(acked, _seconds("accepted_at", "ended_at")),
        }
    )


def _seconds(start: str, end: str) -> Column:
    return (F.unix_micros(end) - F.unix_micros(start)) / 1e6


def _why(slow_after: float) -> Column:
    """Return the reason, in the words of docs/receipts.md where there are some."""
    late = (F.col("state") == State.ACKED.value) & (F.col("total") > slow_after)
    longest = F.greatest(*(F.coalesce(stage, F.lit(0.0)) for stage in ("wait", "retry", "answer")))
    return (
        F.when(F.col("state") == State.ACCEPTED.value, "never_sent")
        .when(F.col("state") == State.SENT.value, "in_flight")
        .when(late & (F.col("wait") == longest), "slow_wait")
        .when(late & (F.col("retry") == longest), "slow_retry")
        .when(late, "slow_answer")
        .otherwise(F.col("reason"))
    )


# -- views


def funnel(frame: DataFrame) -> DataFrame:
    """Return one row per request: deliveries by state. The final states and `pending` add up to `accepted`."""
    ends = [F.count_if(F.col("state") == state).alias(state) for state in _FINAL]
    return frame.groupBy("request_id").agg(
        F.count_distinct("vin").alias("vehicles"),
        F.count(F.lit(1)).alias("accepted"),
        F.count("sent_at").alias("sent"),
        F.count_if(F.col("retries") > 0).alias("retried"),
        *ends,
        F.count_if(F.col("state").isin(_OPEN)).alias("pending"),
        F.min("accepted_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
    )


def latency(frame: DataFrame) -> DataFrame:
    """Return by request and stage how many deliveries have been through it, and how many seconds it took them."""
    stages = ", ".join(f"'{stage}', {stage}" for stage in STAGES)
    long = frame.selectExpr("request_id", f"stack({len(STAGES)}, {stages}) AS (stage, seconds)")
    ranks = F.percentile_approx("seconds", list(PERCENTILES.values()), ACCURACY).alias("ranks")
    figures = (
        long.where("seconds IS NOT NULL")
        .groupBy("request_id", "stage")
        .agg(F.count("seconds").alias("count"), F.avg("seconds").alias("mean"), ranks, F.max("seconds").alias("max"))
    )
    chosen = [F.col("ranks")[index].alias(name) for index, name in enumerate(PERCENTILES)]
    return figures.select("request_id", "stage", "count", "mean", *chosen, "max")


def stragglers(frame: DataFrame, *, now: datetime | None = None) -> DataFrame:
    """Return deliveries that are pending, failed, expired or late; not those that were cancelled or replaced."""
    undone = [*_OPEN, State.FAILED.value, State.EXPIRED.value]
    late = frame.where(F.col("state").isin(undone) | F.col("why").startswith("slow_"))
    if now is None:
        late = late.crossJoin(F.broadcast(frame.agg(F.max("last_at").alias("now"))))
    else:
        late = late.withColumn("now", F.lit(now))
    end = late.withColumn("until", F.coalesce("ended_at", "now"))
    return end.select(
        *_DELIVERY,
        "state",
        "why",
        "attempts",
        "accepted_at",
        "last_at",
        _seconds("accepted_at", "until").alias("age"),
    )


def reasons(frame: DataFrame) -> DataFrame:
    """Return by request, state and reason how many deliveries there are."""
    return frame.where(F.col("why") != "").groupBy("request_id", "state", "why").count()


def nodes(rows: DataFrame) -> DataFrame:
    """Return by request, node and state how many receipts there are."""
    return rows.groupBy("request_id", "node", "state").count()


def hours(rows: DataFrame) -> DataFrame:
    """Return by request, hour and state how many receipts there are. Hours are UTC's, whatever the session's zone."""
    hour = F.timestamp_seconds(F.floor(F.unix_seconds("at") / 3600) * 3600).alias("hour")
    return rows.groupBy("request_id", hour, "state").count()
