"""Run a streaming query until it is done, stopped, or fails.

    RunDir ──▶ follow(start, folder, trigger, show) ──▶ RunOutcome, or PipelineError with the innermost words
                 │  every POLL seconds: new micro-batches ──▶ show(batch), folder.note(…)
                 └─ SIGINT, SIGTERM ──▶ the query is let go: its batch is not finished, the next run does it again

Rule 1: a query that is stopped loses nothing: what was read is in the checkpoint, a batch under way is read again.
Rule 2: handlers only set a flag. Spark is spoken to from one thread, between two looks; a call to it that is
        interrupted in its middle would leave a connection that answers the wrong question.
Rule 3: "continuous" is the next micro-batch as soon as the last one is done. What Spark itself calls continuous mode
        knows neither sources in Python nor state, so it is not used.
Rule 4: a query that failed only because the machine was too busy to start it is started again, a few times. By rule 1
        that is no different from another run.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Any, Final

import structlog

from motorcade.pipelines import PipelineError, failures
from motorcade.pipelines.rundir import RunDir

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = structlog.get_logger("motorcade.pipelines")

__all__ = ["BatchProgress", "RunDir", "RunOutcome", "Show", "Trigger", "TriggerKind", "follow", "repeat"]

#: Seconds between two looks at a query.
POLL: Final = 0.25

#: How often a query is started that the machine is too busy for.
STARTS: Final = 3

#: Exit code of a command that was stopped before it was done.
INTERRUPTED: Final = 130


class TriggerKind(StrEnum):
    """The kinds of triggers: when the next micro-batch starts."""

    ONCE = auto()  #: what is there at the start, in as many batches as it takes; then the run ends
    INTERVAL = auto()  #: every so many seconds
    CONTINUOUS = auto()  #: as soon as the last one is done (rule 3)


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger of micro-batches."""

    kind: TriggerKind = TriggerKind.ONCE
    every: float = 60.0  #: seconds, of an interval

    def options(self) -> dict[str, Any]:
        """Return the arguments of `DataStreamWriter.trigger`."""
        if self.kind is TriggerKind.ONCE:
            return {"availableNow": True}
        seconds = self.every if self.kind is TriggerKind.INTERVAL else 0.0
        return {"processingTime": f"{round(seconds * 1000)} milliseconds"}

    @property
    def ends(self) -> bool:
        """Return True if a run ends by itself."""
        return self.kind is TriggerKind.ONCE

    def __str__(self) -> str:
        return f"every {self.every:g} s" if self.kind is TriggerKind.INTERVAL else self.kind.value


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """A micro-batch that is done."""

    number: int
    rows: int  #: read
    seconds: float  #: that it took
    behind: int | None  #: rows that were there and not read yet, if the source can tell
    done_at: float
    offsets: Mapping[str, Any] = field(default_factory=dict)  #: of its first source: where it has ended
    counts: Mapping[str, Any] = field(default_factory=dict)  #: what the pipeline has noted as `counts`


Show = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run."""

    pipeline: str
    done: bool  #: by itself; else it was stopped
    batches: int
    rows: int
    seconds: float
    exit_code: int
    counts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for scripts."""
        return {
            "pipeline": self.pipeline,
            "done": self.done,
            "batches": self.batches,
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
            "counts": dict(self.counts),
        }


def follow(
    start: Callable[[], StreamingQuery] | DataStreamWriter,
    folder: RunDir,
    trigger: Trigger,
    show: Show = lambda _batch: None,
    *,
    poll: float = POLL,
) -> RunOutcome:
    """Start a query and stay with it to its end.

    `start` starts it with the trigger and the checkpoint `folder.spark`; a writer gets both from here.
    """
    began = time.time()
    folder.claim(_active(start))
    folder.note(state="running", trigger=str(trigger), started_at=began, ended_at=None, error=None, batches=0, rows=0)
    seen = _Seen(folder, show)
    with _stops() as stop:
        for left in reversed(range(STARTS)):
            stopped, failed = _run(
                start if callable(start) else lambda: _started(start, folder, trigger), seen, stop, poll
            )
            if not left or failed is None or stopped or stop.is_set() or not failures.is_of_haste(failed):
                break
            log.warning("pipeline_starts_again", pipeline=folder.pipeline, reason=failures.HASTE)
    # Who stops a whole group of processes stops Java and its workers too, perhaps before us.
    stopped = stopped or (failed is not None and stop.is_set())
    if failed is not None and not stopped:
        raise _failed(folder, seen.batches, failed)
    folder.note(state="stopped" if stopped else "done", ended_at=time.time())
    return RunOutcome(
        folder.pipeline,
        not stopped,
        seen.batches,
        seen.rows,
        time.time() - began,
        INTERRUPTED if stopped and trigger.ends else 0,
        folder.status.get("counts") or {},
    )


def _run(
    start: Callable[[], StreamingQuery], seen: _Seen, stop: threading.Event, poll: float
) -> tuple[bool, Exception | None]:
    """Start a query and stay with it; whether it was stopped, and why it has failed."""
    try:
        query = start()
        try:
            _watch(query, seen, stop, poll)
        finally:
            stopped = query.isActive
            query.stop()
        seen.look(query)
        return stopped, query.exception()
    except Exception as error:  # noqa: BLE001 - raised by the caller, or irrelevant
        return False, error


def repeat(
    work: Callable[[], tuple[int, Mapping[str, Any]]],
    folder: RunDir,
    trigger: Trigger,
    show: Show = lambda _batch: None,
    *,
    enough: Callable[[], bool] = lambda: False,
) -> RunOutcome:
    """Do something that is no query, once or again and again; it returns how many rows it has read, and other counts.

    `enough` ends it where the trigger would not. A KeyboardInterrupt ends it too, also in the middle of its work, which
    must stand that as it stands a kill.
    """
    began = time.time()
    folder.note(state="running", trigger=str(trigger), started_at=began, ended_at=None, error=None, batches=0, rows=0)
    times = rows = 0
    stopped = False
    counts: Mapping[str, Any] = {}
    try:
        while True:
            begun = time.time()
            rows, counts = work()
            now = time.time()
            batch = BatchProgress(times, rows, now - begun, None, now, counts=counts)
            times += 1
            folder.note(
                batch=batch.number,
                batches=times,
                rows=rows,  # all of them, each time
                rows_last=rows,
                seconds_last=batch.seconds,
                batch_at=now,
                counts=dict(counts),
            )
            show(batch)
            if trigger.ends or enough():
                break
            time.sleep(max(0.0, begun + trigger.every - now) if trigger.kind is TriggerKind.INTERVAL else 0.0)
    except KeyboardInterrupt:
        stopped = True
    except Exception as error:  # noqa: BLE001 - raised, in a way
        raise _failed(folder, times, error)  # noqa: B904 - it knows its cause
    folder.note(state="stopped" if stopped else "done", ended_at=time.time())
    code = INTERRUPTED if stopped and trigger.ends else 0
    return RunOutcome(folder.pipeline, not stopped, times, rows, time.time() - began, code, counts)


def _active(start: Callable[[], StreamingQuery] | DataStreamWriter) -> SparkSession:
    """Make the session of a query the active one of this thread: Spark looks there for sources by name."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - takes a while, and is an extra

    spark = SparkSession.active() if callable(start) else start._spark  # noqa: SLF001 - it does not tell otherwise
    jvm: Any = spark._jvm  # noqa: SLF001
    jvm.SparkSession.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    return spark


def _started(writer: DataStreamWriter, folder: RunDir, trigger: Trigger) -> StreamingQuery:
    return writer.option("checkpointLocation", folder.spark).trigger(**trigger.options()).start()


def _watch(query: StreamingQuery, seen: _Seen, stop: threading.Event, poll: float) -> None:
    while query.isActive and not stop.is_set():
        seen.look(query)
        time.sleep(poll)


class _Seen:
    """The batches of a query, each once."""

    def __init__(self, folder: RunDir, show: Show) -> None:
        self._folder = folder
        self._show = show
        self._last = -1
        self._looked = ""
        self.batches = 0
        self.rows = 0

    def look(self, query: StreamingQuery) -> None:
        newest: Any = query.lastProgress  # one document; only if it is new, all that are kept
        if newest is None or newest["timestamp"] == self._looked:
            return
        self._looked = newest["timestamp"]
        for progress in query.recentProgress:
            if _is_batch(progress) and progress["batchId"] > self._last:
                self._done(progress)

    def _done(self, progress: Any) -> None:
        self._last = progress["batchId"]
        self.batches += 1
        self.rows += progress["numInputRows"]
        batch = _batch(progress, self._folder.status.get("counts") or {})
        self._folder.note(
            batch=batch.number,
            batches=self.batches,
            rows=self.rows,
            rows_last=batch.rows,
            seconds_last=batch.seconds,
            behind=batch.behind,
            batch_at=batch.done_at,
        )
        self._show(batch)


def _is_batch(progress: Any) -> bool:
    """Return False for a mere sign of life: while there is nothing to do, Spark gives one every ten seconds."""
    return "addBatch" in progress["durationMs"]


def _batch(progress: Any, counts: Mapping[str, Any]) -> BatchProgress:
    source: Mapping[str, Any] = progress["sources"][0] if progress["sources"] else {}
    end = _offset(source.get("endOffset"))
    return BatchProgress(
        number=progress["batchId"],
        rows=progress["numInputRows"],
        seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
        behind=behind(end, _offset(source.get("latestOffset"))),
        done_at=time.time(),
        offsets=end,
        counts=counts,
    )


def _offset(value: Any) -> dict[str, Any]:
    """Parse an offset of a source, which Spark gives as JSON; of other sources it may be anything."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def behind(read: Mapping[str, Any], newest: Mapping[str, Any]) -> int | None:
    """Return the number of rows between two offsets of the source `motorcade` (the lag); None if unknown."""
    for count in ("entries", "offset"):  # a Redis stream counts its entries, other offsets are numbers in a row
        if count in read and count in newest:
            return max(0, int(newest[count]) - int(read[count]))
    return None


def _failed(folder: RunDir, batches: int, error: Exception) -> Exception:
    """Return what to raise: a sentence, or a bug of ours as it is, with its traceback."""
    said = failures.words(error)
    folder.note(state="failed", ended_at=time.time(), error=said)
    if not failures.is_known(error):
        return error
    after = f" after {batches} batches" if batches else ""
    more = "" if failures.is_ours(error) or not folder.log.exists() else f" (more in {folder.log})"
    failure = PipelineError(f"the pipeline {folder.pipeline} failed{after}: {said}{more}")
    failure.__cause__ = error
    return failure


@contextmanager
def _stops() -> Iterator[threading.Event]:
    """Return an event that SIGINT and SIGTERM set; a second signal is a KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
