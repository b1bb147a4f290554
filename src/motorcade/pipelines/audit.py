"""Is every delivery that was accepted in exactly one final state, or pending? If not, which ones are not?

    stream `receipts` ────────▶ told ────┐
                                         ├─ full join ─▶ judged: an outcome per delivery ─▶ audit: what is wrong
    mailboxes `fanout:{VIN}` ─▶ waiting ─┘

The receipts say what has become of a delivery, the mailboxes themselves say what still waits. Neither is believed
alone: a message that is in no mailbox and has no final receipt is lost, whatever counters say.

Things move while they are read. `run` therefore
1. notes where the stream ends, and leaves out what is accepted behind that place;
2. reads the mailboxes, and after them the receipts: what has left its mailbox by then has its final receipt by then;
3. looks a second time at deliveries that seem wrong, since some changes take a moment: a replaced entry is gone before
   its receipt is written, and on Redis a final receipt is written before its entry is gone.
What is wrong both times is a finding.

Rule 1: `judged` and `audit` are functions of two frames and know nothing of time.
Rule 2: what cannot be judged, since older receipts were trimmed, is counted and told, never passed as right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum, auto
from time import sleep
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - so it is called wherever Spark is used

from motorcade.core.receipt import FINAL, LATE_ACK, State
from motorcade.pipelines import receipts as receipts_
from motorcade.plugins.fanout.tables import ENTRIES, RECEIPTS
from motorcade.storage.readers import open_reader

#: What has to be read of mailboxes; their bodies are not needed.
COLUMNS: Final = "owner STRING, position LONG, stored TIMESTAMP"

#: Findings that a verdict lists one by one; all are counted.
MAX_LISTED: Final = 1000

#: Seconds between two looks at what seems wrong.
PAUSE: Final = 2.0

#: Outcomes of deliveries that are as they should be, besides the final states.
PENDING: Final = "pending"
UNJUDGED: Final = "unjudged"

_FINAL: Final = [state.value for state in State if state in FINAL]


class Problem(StrEnum):
    """The problem of a delivery."""

    LOST = auto()  #: no final receipt, and not in its mailbox
    SEVERAL_FINALS = auto()  #: different final receipts
    FINAL_AND_PENDING = auto()  #: a final receipt, and still in its mailbox
    NEVER_ACCEPTED = auto()  #: in a mailbox or in receipts, without a receipt `accepted`
    UNREADABLE = auto()  #: a record of the stream that is no receipt; there is no telling whose it is


#: For people.
SENTENCES: Final = {
    Problem.LOST: "no final receipt, and not in the vehicle's mailbox",
    Problem.SEVERAL_FINALS: "different final receipts",
    Problem.FINAL_AND_PENDING: "a final receipt, and still in the vehicle's mailbox",
    Problem.NEVER_ACCEPTED: "no receipt `accepted`",
    Problem.UNREADABLE: "a record that is no receipt",
}


def audit(
    receipts: DataFrame,
    pending: DataFrame,
    *,
    request: str | None = None,
    since: datetime | None = None,
    upto: int | None = None,
) -> DataFrame:
    """Return deliveries that are not in exactly one final or pending state, with the problem; no rows if all is well.

    `receipts` are records of the stream, `pending` entries of mailboxes, both as the source gives them, whole.

    request  judge its deliveries only
    since    time of the oldest record, if older ones were trimmed: whose first receipts are missing may be older
    upto     leave out what was accepted behind this offset
    """
    return problems(judged(receipts, pending, request=request, since=since, upto=upto))


def problems(frame: DataFrame) -> DataFrame:
    return frame.where(F.col("outcome").isin([problem.value for problem in Problem]))


def judged(
    receipts: DataFrame,
    pending: DataFrame,
    *,
    request: str | None = None,
    since: datetime | None = None,
    upto: int | None = None,
) -> DataFrame:
    """Return one row per delivery with its `outcome`: a final state, `pending`, `unjudged`, or a `Problem`."""
    rows = receipts_.read(receipts, request).where(F.col("reason") != LATE_ACK)  # those change no state
    if request is not None:
        rows = rows.where(~F.col("readable") | (F.col("request_id") == request))
    # Whose request an entry without receipts is, its mailbox does not say.
    both = _told(rows).join(_waiting(pending), "delivery_id", "full_outer" if request is None else "left_outer")
    if upto is not None:
        both = both.where(F.coalesce(F.col("accepted_offset") <= upto, F.lit(True)))
    return both.select(
        "delivery_id",
        "request_id",
        F.coalesce("vin", F.substring_index("delivery_id", ".", 1)).alias("vin"),
        _outcome(since).alias("outcome"),
        _or_none("finals").alias("finals"),
        F.coalesce("waits", F.lit(False)).alias("waits"),
        "accepted_at",
        "last_at",
        "offset",
    )


def _told(rows: DataFrame) -> DataFrame:
    """Return what the receipts say, by delivery; and a row for each record that is no receipt."""
    accepted = F.col("state") == State.ACCEPTED.value
    keys = {
        "delivery_id": F.when(F.col("readable"), F.col("delivery_id")),
        "unreadable": F.when(~F.col("readable"), F.col("offset")),
    }
    return (
        rows.withColumns(keys)
        .groupBy(*keys)
        .agg(
            F.min("request_id").alias("request_id"),
            F.min("vin").alias("vin"),
            F.min(F.when(accepted, F.col("offset"))).alias("accepted_offset"),
            F.min(F.when(accepted, F.col("at"))).alias("accepted_at"),
            F.max("at").alias("last_at"),
            F.min("offset").alias("offset"),
            F.array_sort(F.collect_set(F.when(F.col("state").isin(_FINAL), F.col("state")))).alias("finals"),
        )
    )


def _waiting(pending: DataFrame) -> DataFrame:
    """Return what the mailboxes say."""
    vin = F.expr(f"substring(owner, {len(ENTRIES) + 1})")
    return pending.where(F.col("owner").startswith(ENTRIES)).select(
        F.concat_ws(".", vin, F.col("position").cast("string")).alias("delivery_id"),
        "stored",
        F.lit(True).alias("waits"),
    )


def _outcome(since: datetime | None) -> Column:
    finals = F.size(_or_none("finals"))
    waits = F.coalesce("waits", F.lit(False))
    accepted = F.col("accepted_offset").isNotNull()
    # An entry that is younger than the oldest receipt should have one.
    known = F.lit(True) if since is None else F.coalesce(F.col("stored") > F.lit(since), F.lit(False))
    return (
        F.when(F.col("unreadable").isNotNull(), Problem.UNREADABLE.value)
        .when(finals > 1, Problem.SEVERAL_FINALS.value)
        .when((finals == 1) & waits, Problem.FINAL_AND_PENDING.value)
        .when((finals == 0) & ~waits, Problem.LOST.value)
        .when(~accepted & known, Problem.NEVER_ACCEPTED.value)
        .when(~accepted, UNJUDGED)
        .when(finals == 1, F.get("finals", 0))
        .otherwise(PENDING)
    )


def _or_none(column: str) -> Column:
    """Return a list of states that is never null."""
    return F.coalesce(column, F.array().cast("array<string>"))


# -- a store


@dataclass(frozen=True)
class AuditVerdict:
    """The findings of an audit."""

    outcomes: dict[str, int]  #: deliveries by outcome
    findings: list[dict[str, Any]] = field(default_factory=list)  #: the first `MAX_LISTED`
    upto: int = 0  #: deliveries accepted behind this offset of the stream were left out
    request: str | None = None  #: the one that was judged alone

    @property
    def unknown(self) -> bool:
        """Return True if there is nothing of the request: a mistyped name is not clean."""
        return self.request is not None and not self.outcomes

    @property
    def wrong(self) -> int:
        """Return the number of findings."""
        return sum(self.outcomes.get(problem, 0) for problem in Problem)

    @property
    def clean(self) -> bool:
        return not self.wrong and not self.unknown

    @property
    def exit_code(self) -> int:
        return 0 if self.clean else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for scripts."""
        return {
            "clean": self.clean,
            **({"request": self.request} if self.request is not None else {}),
            "deliveries": sum(self.outcomes.values()) - self.outcomes.get(Problem.UNREADABLE, 0),
            "outcomes": self.outcomes,
            "wrong": self.wrong,
            "findings": self.findings,
            "not_listed": self.wrong - len(self.findings),
            "upto": self.upto,
        }

    def lines(self) -> Iterator[str]:
        """Yield the verdict as lines for people."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
        yield f"{self.as_dict()['deliveries']} deliveries: {counts or 'none'}"
        for finding in self.findings:
            yield _line(finding)
        if self.wrong > len(self.findings):
            yield f"and {self.wrong - len(self.findings)} more"
        if self.outcomes.get(UNJUDGED):
            yield f"{self.outcomes[UNJUDGED]} cannot be judged: their first receipts are no longer in the stream"
        if self.unknown:
            yield f"nothing was audited: there are no receipts of request {self.request!r}"
        else:
            yield "clean" if self.clean else f"not clean: {self.wrong} wrong"


def _line(finding: dict[str, Any]) -> str:
    problem = Problem(finding["problem"])
    if problem is Problem.UNREADABLE:
        return f"{problem}: offset {finding['offset']}: {SENTENCES[problem]}"
    finals = f" ({', '.join(finding['finals'])})" if finding["finals"] else ""
    request = f" of {finding['request_id']}" if finding["request_id"] else ""
    return f"{problem}: {finding['delivery_id']}{request}: {SENTENCES[problem]}{finals}"


def run(
    spark: SparkSession,
    store: str,
    *,
    request: str | None = None,
    max_listed: int = MAX_LISTED,
    pause: float = PAUSE,
) -> AuditVerdict:
    """Audit a store, whose nodes may be running."""
    span = _span(store)
    first = _look(spark, store, request, span)
    suspects = problems(first).where(F.col("delivery_id").isNotNull()).select("delivery_id")
    if suspects.isEmpty():
        return _verdict(first, request, span.upto, max_listed)
    sleep(pause)
    again = _look(spark, store, request, span).join(suspects, "delivery_id", "left_semi")
    settled = first.join(suspects, "delivery_id", "left_anti").unionByName(again)
    return _verdict(settled, request, span.upto, max_listed)


class _Span(NamedTuple):
    """The offsets of the stream before anything else is read."""

    since: datetime | None
    upto: int


def _span(store: str) -> _Span:
    reader = open_reader(store)
    try:
        extent = reader.extent(RECEIPTS)
        if extent.floor <= 1:
            return _Span(None, extent.last)
        page = next(reader.pages(RECEIPTS, extent.floor - 1, extent.last, 1), None)
        # Everything was trimmed: what waits may be as old as it likes.
        if page is None or not page.times:
            return _Span(datetime.now(UTC), extent.last)
        return _Span(datetime.fromtimestamp(page.times[0], UTC), extent.last)
    finally:
        reader.close()


def _look(spark: SparkSession, store: str, request: str | None, span: _Span) -> DataFrame:
    """Judge all deliveries as they are now; the frame is cached, so that every query sees the same."""
    mailboxes = _reading(spark, store).option("mailboxes", ENTRIES).schema(COLUMNS).load()
    pending = mailboxes.localCheckpoint()  # before any receipt is read
    stream = _reading(spark, store).option("stream", RECEIPTS).option("if_missing", "empty")
    frame = stream.schema(receipts_.COLUMNS).load()
    return judged(frame, pending, request=request, since=span.since, upto=span.upto).localCheckpoint()


def _reading(spark: SparkSession, store: str) -> DataFrameReader:
    return spark.read.format("motorcade").option("store", store)


def _verdict(frame: DataFrame, request: str | None, upto: int, max_listed: int) -> AuditVerdict:
    counts = {row["outcome"]: row["count"] for row in frame.groupBy("outcome").count().collect()}
    order = [*_FINAL, PENDING, UNJUDGED, *(problem.value for problem in Problem)]
    listed = problems(frame).orderBy("outcome", "delivery_id", "offset").limit(max_listed).collect()
    return AuditVerdict(
        outcomes={outcome: counts[outcome] for outcome in order if outcome in counts},
        findings=[_finding(row.asDict()) for row in listed],
        upto=upto,
        request=request,
    )


def _finding(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "problem": row["outcome"],
        "delivery_id": row["delivery_id"],
        "request_id": row["request_id"],
        "vin": row["vin"],
        "finals": row["finals"] or [],
        "pending": bool(row["waits"]),
        "accepted_at": _epoch(row["accepted_at"]),
        "last_at": _epoch(row["last_at"]),
        "offset": row["offset"],
    }


def _epoch(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None
