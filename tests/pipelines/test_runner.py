"""Folders of runs, queries that are followed, and what is said of those that fail."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - so it is called wherever Spark is used
from pyspark.sql.streaming.readwriter import DataStreamWriter
from rich.console import Console
from structlog.testing import capture_logs

from motorcade.cli import _pipeline, _progress
from motorcade.pipelines import PipelineError, failures, runner, status
from motorcade.pipelines.rundir import RunDir
from motorcade.pipelines.runner import BatchProgress, Trigger, TriggerKind
from tests.pipelines.lake import Lake
from tests.support.cases import refusal
from tests.support.redis import RedisServer

pytestmark = pytest.mark.timeout(240)

ONCE = Trigger()


# -- folders


def test_a_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    """A second run is told who has it, and gets it afterwards."""
    with RunDir(tmp_path / "run", "copy", {}):
        with pytest.raises(PipelineError, match=rf"run is in use by process {os.getpid()} on .*: stop that one"):
            RunDir(tmp_path / "run", "copy", {}).__enter__()
        assert status.look(tmp_path / "run")["running"] is True
    assert status.look(tmp_path / "run")["running"] is False
    with RunDir(tmp_path / "run", "copy", {}):
        pass


def test_a_folder_belongs_to_what_it_was_begun_with(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with RunDir(place, "copy", {"stream": "log", "lake": "here"}) as folder:
        Path(folder.spark).mkdir()
    for pipeline, identity, words in (
        ("ingest", {}, "belongs to the pipeline 'copy', not 'ingest'; name another folder"),
        ("copy", {"stream": "other", "lake": "here"}, "was begun with stream 'log', and now it is 'other'; run it as"),
        ("copy", {"stream": "log"}, "was begun with lake 'here', and now it is unset"),
        ("copy", {"stream": "log", "lake": "here", "days": "3"}, "was begun with days unset, and now it is '3'"),
    ):
        with pytest.raises(PipelineError, match=words), RunDir(place, pipeline, identity):
            pass
    with RunDir(place, "copy", {"lake": "here", "stream": "log"}):  # refusals leave no lock behind
        pass


def test_a_folder_in_which_nothing_was_made_may_be_begun_otherwise(tmp_path: Path) -> None:
    """A command with a mistake in it is given again, without it."""
    place = tmp_path / "run"
    with RunDir(place, "copy", {"sql": "SELEC"}) as folder:
        folder.note(state="failed", error="Syntax error")
        folder.log.write_text("what Java says")
    with RunDir(place, "copy", {"sql": "SELECT"}) as folder:
        folder.part("plan").mkdir()
    assert {"sql": "SELECT"} == status.look(place)["identity"]
    with pytest.raises(PipelineError, match="was begun with sql 'SELECT'"), RunDir(place, "copy", {"sql": "SELEC"}):
        pass


def test_what_spark_fails_at_before_there_is_a_query_is_noted(spark: SparkSession, tmp_path: Path) -> None:
    with (
        RunDir(tmp_path / "run", "copy", {}) as folder,
        pytest.raises(ParseException),
        _pipeline.noting(folder),
    ):
        spark.sql("SELEC vin FROM fleet")
    found = status.look(tmp_path / "run")
    assert "failed" == found["state"]
    assert "[PARSE_SYNTAX_ERROR] Syntax error at or near 'SELEC'." == found["error"]


def test_what_is_no_folder_of_a_run_is_left_alone(tmp_path: Path) -> None:
    for place in ("hdfs://host/run", "s3a://bucket/run", "file:/tmp/run", ""):
        with pytest.raises(PipelineError, match="folder"):
            RunDir(place, "copy", {})
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(PipelineError, match=r"has other files in it \(letter\)"), RunDir(tmp_path, "copy", {}):
        pass
    with pytest.raises(PipelineError, match="Not a directory"), RunDir(tmp_path / "letter" / "run", "copy", {}):
        pass
    for manifest, words in (
        ("{", "is no JSON"),
        ("[]", "holds no object"),
        ('{"v": 99, "pipeline": "copy"}', "is of version 99"),
    ):
        (tmp_path / "pipeline.json").write_text(manifest)
        with pytest.raises(PipelineError, match=words), RunDir(tmp_path, "copy", {}):
            pass


def test_a_run_that_was_killed_before_it_wrote_anything_is_no_obstacle(tmp_path: Path) -> None:
    for left in ("lock", "lock.java", "spark.log", "spark.out", ".pipeline.json.1a2b3c4d"):
        (tmp_path / left).write_text("")
    with RunDir(tmp_path, "copy", {}):
        pass
    assert "copy" == status.look(tmp_path)["pipeline"]


def test_notes_stay_until_the_next(tmp_path: Path) -> None:
    """From several threads, as those of Spark; and the file is whole whenever it is read."""
    with RunDir(tmp_path, "copy", {}) as folder:

        def note(name: str) -> None:
            for number in range(50):
                folder.note(**{name: number})
                json.loads((tmp_path / "status.json").read_text())

        threads = [threading.Thread(target=note, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (49, 49) == (folder.status["a"], folder.status["b"])
    with RunDir(tmp_path, "copy", {}) as folder:
        assert 49 == folder.status["a"]
    assert ["lock", "pipeline.json", "status.json"] == sorted(entry.name for entry in tmp_path.iterdir())


# -- queries


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"rocksdb://{tmp_path / 'store'}"
    with Lake(url) as lake:
        lake.fill("log", 500)
    return url


def rows(spark: SparkSession, store: str, **options: object) -> DataFrame:
    chosen = {"store": store, "stream": "log", **options}
    return spark.readStream.format("motorcade").options(**chosen).load()  # type: ignore[arg-type]


def test_a_query_is_followed_to_its_end_and_gone_on_with(spark: SparkSession, store: str, tmp_path: Path) -> None:
    identity = {"store": store, "stream": "log"}
    lake, place = str(tmp_path / "lake"), tmp_path / "run"
    files = rows(spark, store, max_rows=200).writeStream.format("parquet").option("path", lake)
    seen: list[BatchProgress] = []
    with RunDir(place, "copy", identity) as folder:
        outcome = runner.follow(files, folder, ONCE, seen.append)
    assert (True, 3, 500, 0) == (outcome.done, outcome.batches, outcome.rows, outcome.exit_code)
    assert [(0, 200, 300), (1, 200, 100), (2, 100, 0)] == [(batch.number, batch.rows, batch.behind) for batch in seen]
    assert [200, 400, 500] == [batch.offsets["offset"] for batch in seen]
    with Lake(store) as more:
        more.fill("log", 50, first=501)
    found = status.look(place)
    assert ("copy", "done", False, 2, 50, None) == tuple(
        found[name] for name in ("pipeline", "state", "running", "batch", "behind", "behind_unknown")
    )
    assert [500] == [place["offset"] for place in found["offsets"]]
    assert (3, 500, 100) == tuple(found[name] for name in ("batches", "rows", "rows_last"))
    with RunDir(place, "copy", identity) as folder:
        again = runner.follow(files, folder, ONCE)
    assert (1, 50) == (again.batches, again.rows)
    assert 550 == spark.read.parquet(lake).select("offset").distinct().count() == spark.read.parquet(lake).count()
    assert 0 == status.look(place)["behind"]


def test_a_query_may_be_followed_in_any_thread(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """Spark looks for sources in the session that is active in a thread; signals are left to the main one."""
    query = rows(spark, store).writeStream.format("noop")
    with RunDir(tmp_path / "run", "copy", {}) as folder, ThreadPoolExecutor(1) as thread:
        assert 500 == thread.submit(runner.follow, query, folder, ONCE).result().rows


def test_the_lag_behind_a_redis_stream_is_a_number_of_entries(
    spark: SparkSession, redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.empty()
    add = ("XADD", "jobs", "*", "payload", "x")
    for _ in range(3):
        redis_server.command(*add)
    source = spark.readStream.format("motorcade").options(store=redis_server.url, redis_stream="jobs")
    with RunDir(tmp_path, "copy", {"store": redis_server.url, "redis_stream": "jobs"}) as folder:
        outcome = runner.follow(source.load().writeStream.format("noop"), folder, ONCE)
    assert 3 == outcome.rows
    redis_server.command(*add)
    assert 1 == status.look(tmp_path)["behind"]
    found = status.look(tmp_path, "redis://127.0.0.1:1")
    assert found["behind"] is None
    assert "127.0.0.1:1" in found["behind_unknown"]


def later(act: Callable[[], None], when: threading.Event) -> threading.Thread:
    def wait() -> None:
        if when.wait(120):
            act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_signal_lets_a_query_go_without_harm(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """In the middle of a batch, which the next run does again: once, at an interval, continuously, and to the end."""
    lake = str(tmp_path / "lake")
    held: set[int] = set()  #: batches that were under way when the signal came

    def hold(frame: DataFrame, batch: int) -> None:
        if batch not in {0, *held} and len(held) < 3:
            held.add(batch)
            inside.set()
            frame.select(F.udf(lambda _: time.sleep(600))("topic")).collect()  # works until it is interrupted
        frame.write.parquet(f"{lake}/{batch}", mode="overwrite")

    query = rows(spark, store, max_rows=100).writeStream.foreachBatch(hold)
    for number, trigger, code in (
        (signal.SIGINT, ONCE, 130),
        (signal.SIGTERM, Trigger(TriggerKind.INTERVAL, 0.1), 0),
        (signal.SIGTERM, Trigger(TriggerKind.CONTINUOUS), 0),
    ):
        inside, handler = threading.Event(), signal.getsignal(number)
        later(partial(os.kill, os.getpid(), number), inside)
        with RunDir(tmp_path / "run", "copy", {}) as folder:
            outcome = runner.follow(query, folder, trigger)
        assert (False, 1, 100, code) == (outcome.done, outcome.batches, outcome.rows, outcome.exit_code), trigger
        assert handler is signal.getsignal(number)
        assert "stopped" == status.look(tmp_path / "run")["state"]
    with RunDir(tmp_path / "run", "copy", {}) as folder:
        assert 200 == runner.follow(query, folder, ONCE).rows
    assert {1, 2, 3} == held
    written = spark.read.parquet(f"{lake}/*")
    assert 500 == written.count() == written.select("offset").distinct().count()


Making = Callable[[SparkSession, str, Path], DataStreamWriter]


def files(spark: SparkSession, place: Path) -> DataFrame:
    """A query that needs no process of the source's: 500 topics."""
    if not (place / "files").exists():
        spark.range(1, 501, numPartitions=1).selectExpr("concat('v/', id % 7, '/t') AS topic").write.parquet(
            str(place / "files")
        )
    return spark.readStream.schema("topic STRING").parquet(str(place / "files"))


def _raising(error: Exception) -> Making:
    def fail(_frame: DataFrame, _batch: int) -> None:
        raise error

    return lambda spark, _store, place: files(spark, place).writeStream.foreachBatch(fail)


def _in_a_task(spark: SparkSession, store: str, _place: Path) -> DataStreamWriter:
    @F.udf("int")
    def fail(topic: str) -> int:
        raise PipelineError(f"nothing is known of {topic}; ask somebody else")

    return rows(spark, store).select(fail("topic")).writeStream.format("noop")


def _into_a_file(spark: SparkSession, _store: str, place: Path) -> DataStreamWriter:
    (place / "file").write_text("")
    return files(spark, place).writeStream.format("parquet").option("path", str(place / "file" / "lake"))


FAILURES: dict[str, tuple[Making, str]] = {
    "ours": (_raising(PipelineError("the lake is full: make room")), "the lake is full: make room"),
    "another": (_raising(ValueError("of\ntwo lines")), "ValueError: of two lines"),
    "in_a_task": (_in_a_task, "nothing is known of v/1/t; ask somebody else"),
    "sql": (
        lambda spark, _store, place: files(spark, place).selectExpr("int(topic)").writeStream.format("noop"),
        '[CAST_INVALID_INPUT] The value \'v/1/t\' of the type "STRING" cannot be cast to "INT"',
    ),
    "no_stream": (
        lambda spark, store, _place: rows(spark, store, stream="nope").writeStream.format("noop"),
        "the stream 'nope' has no record in this store: there is no such stream (with records there are: log), or",
    ),
    "sink": (_into_a_file, "ParentNotDirectoryException: Parent path is not a directory: file:"),
}


def test_a_failure_is_told_in_the_innermost_words(spark: SparkSession, store: str, tmp_path: Path) -> None:
    for name, (make, words) in FAILURES.items():
        with RunDir(tmp_path / name, "copy", {}) as folder:
            said = refusal(PipelineError, runner.follow, make(spark, store, tmp_path), folder, ONCE)
        assert said.startswith(f"the pipeline copy failed: {words}"), (name, said)
        assert not [
            sign for sign in ("\n", "\tat ", "java.", "SQLSTATE", "Traceback", "Streaming Query") if sign in said
        ]
        found = status.look(tmp_path / name)
        assert "failed" == found["state"], name
        assert found["error"].startswith(words), (name, found["error"])


def test_a_query_that_the_machine_was_too_busy_for_is_started_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some times. The words are Spark's; here another part of the query says them."""
    monkeypatch.setattr(runner, "STARTS", 3)
    for failing in (runner.STARTS - 1, runner.STARTS):
        started: list[bool] = []
        with RunDir(tmp_path / str(failing), "copy", {}) as folder, capture_logs() as said:
            start = partial(_too_busy, spark, folder, tmp_path, failing, started)
            if failing < runner.STARTS:
                assert runner.follow(start, folder, ONCE).done
            else:
                with pytest.raises(PipelineError, match="the machine is too busy"):
                    runner.follow(start, folder, ONCE)
        assert runner.STARTS == len(started)
        assert ["pipeline_starts_again"] * (runner.STARTS - 1) == [entry["event"] for entry in said]


def _too_busy(spark: SparkSession, folder: RunDir, place: Path, failing: int, started: list[bool]) -> Any:
    """Start a query that fails so often."""

    def batch(frame: DataFrame, _number: int) -> None:
        if len(started) <= failing:
            raise RuntimeError("Python worker failed to connect back.")
        frame.count()

    started.append(True)
    query = files(spark, place).writeStream.foreachBatch(batch).trigger(availableNow=True)
    return query.option("checkpointLocation", folder.spark).start()


def test_a_column_that_is_not_there_is_told_without_the_plan(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """Plans show the options of sources, and those the passwords of stores."""
    frame = rows(spark, store)

    def start() -> Any:
        return frame.select("colour").writeStream.start()

    with RunDir(tmp_path / "run", "copy", {}) as folder, pytest.raises(PipelineError) as failure:
        runner.follow(start, folder, ONCE)
    assert "`colour` cannot be resolved" in str(failure.value)
    assert store not in str(failure.value)
    assert "store=*********(redacted)" in str(failure.value.__cause__), "nor in the log"


def test_a_mistake_of_ours_keeps_its_traceback(spark: SparkSession, tmp_path: Path) -> None:
    def start() -> Any:
        raise KeyError("mistake")

    with RunDir(tmp_path / "run", "copy", {}) as folder, pytest.raises(KeyError):
        runner.follow(start, folder, ONCE)
    assert "failed" == status.look(tmp_path / "run")["state"]


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    raise\n'


def test_of_a_text_the_innermost_words_are_told() -> None:
    for text, words in (
        (f"{TRACE}motorcade.x.StoreError: redis://a:secret@host: gone", "redis://***@host: gone"),
        (f"{TRACE}AssertionError\n SQLSTATE: 38000", "AssertionError"),
        (f"{TRACE}KeyError: 'a'\n\nDuring handling …\n{TRACE}x.ValueError: b\n\tat a.b(C.java)", "ValueError: b"),
        ("[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: full SQLSTATE: XXKST", "full"),
        ("a.b.SparkException: Job aborted.\n\tat a.b(C.java:1)\nCaused by: java.io.IOException: No space", "No space"),
        ("x" * 1000, "x" * failures.MAX_WORDS + " …"),
    ):
        assert words == failures.of_text(text)
    for error in (
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o182.defaultParallelism"),
        ConnectionRefusedError(111, "no"),
    ):
        assert failures.is_known(error)
        assert failures.words(error).startswith("Spark's Java has ended")


def test_a_process_of_sparks_that_is_gone_is_told(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """The one that says which offsets there are: of its end Spark has no words at all."""

    def kill(_frame: DataFrame, _batch: int) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # others end by themselves
                if "pyspark.sql.streaming.python_streaming_source_runner" in process.cmdline():
                    process.kill()

    query = rows(spark, store, max_rows=100).writeStream.foreachBatch(kill)
    with RunDir(tmp_path / "run", "copy", {}) as folder, pytest.raises(PipelineError) as failure:
        runner.follow(query, folder, ONCE)
    assert str(failure.value).startswith(f"the pipeline copy failed after 1 batches: {failures.HELPER_GONE}")


def test_work_that_is_no_query_is_repeated_until_it_is_stopped_or_enough(tmp_path: Path) -> None:
    times = 0

    def work() -> tuple[int, dict[str, int]]:
        nonlocal times
        times += 1
        if times == 4:
            raise KeyboardInterrupt
        return times, {"made": times}

    seen: list[BatchProgress] = []
    with RunDir(tmp_path, "copy", {}) as folder:
        outcome = runner.repeat(work, folder, Trigger(TriggerKind.INTERVAL, 0.01), seen.append)
        assert (False, 3, 3, 0) == (outcome.done, outcome.batches, outcome.rows, outcome.exit_code)
        assert [1, 2, 3] == [batch.counts["made"] for batch in seen]
        times = 0
        done = runner.repeat(work, folder, ONCE)
        assert (True, 1) == (done.done, done.batches)
        times = 3
        assert 130 == runner.repeat(work, folder, ONCE).exit_code
        assert "stopped" == folder.status["state"]
        times = 0
        enough = runner.repeat(work, folder, Trigger(TriggerKind.INTERVAL, 0.001), enough=lambda: times == 2)
        assert (True, 2, 2, 0) == (enough.done, enough.batches, enough.rows, enough.exit_code)
        assert ({"made": 2}, "done") == (folder.status["counts"], folder.status["state"])


# -- progress

BATCH = BatchProgress(7, 20_000, 1.25, 70_000, 0.0, counts={"written": {"position": 19_985}, "dead": {}, "late": 2})


def test_a_line_per_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.display(quiet=False) as display:  # standard error is no terminal here
        display.tell("reading")
        display.batch(BATCH)
    with _progress.display(quiet=True) as silent:
        silent.batch(BATCH)
    out, err = capsys.readouterr()
    line = "batch 7: 20000 rows in 1.2 s (16000/s), 70000 behind; written (position 19985), late 2\n"
    assert ("", line) == (out, err)


def test_a_display_that_changes() -> None:
    shown = io.StringIO()
    live = _progress.Live(Console(file=shown, force_terminal=True, width=200))
    live.tell("starting Spark")
    live.batch(BATCH)
    live.batch(BatchProgress(8, 70_000, 1.0, 0, 0.0))
    live.batch(BatchProgress(9, 1, 1.0, None, 0.0))
    live.close()
    text = shown.getvalue()
    for part in ("starting Spark …", "20000 rows, 70000 behind", "100%", "90001 rows; batch 9"):
        assert part in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is there again"
