"""Runs as processes, each with a Java of its own: killed, interrupted; and the last scene of the demonstration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from motorcade.pipelines import PipelineError, runner, status
from tests.pipelines.lake import Lake
from tests.pipelines.runner_program import MAX_ROWS
from tests.support.node import ROOT
from tests.support.redis import wait_until

pytestmark = pytest.mark.timeout(600)

#: Seconds for something that a process with a Spark of its own does, on a busy machine.
PATIENCE = 240.0

#: Records of the stream: more batches than are done before a signal comes.
RECORDS = 40 * MAX_ROWS


class Process:
    """A run, with what it says on standard error in a file."""

    def __init__(self, place: Path, *args: str) -> None:
        self._err = place / "stderr"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
        with self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *args],
                cwd=place,
                env=clean | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        self.pid = self._process.pid

    def said(self) -> list[str]:
        return self._err.read_text().splitlines()

    def wait_for_batches(self, count: int) -> None:
        def there() -> bool:
            assert self._process.poll() is None, self.said()
            return len(self.said()) >= count

        wait_until(there, f"{count} batches are done", PATIENCE)

    def java(self) -> list[psutil.Process]:
        """The Java of Spark, not the one that is asked for its version."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [child for child in children if _is_of_spark(child)]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and standard output."""
        out, _ = self._process.communicate(timeout=PATIENCE)
        return self._process.returncode, out

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _is_of_spark(process: psutil.Process) -> bool:
    try:
        return process.name() == "java" and "org.apache.spark.deploy.SparkSubmit" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Process]]:
    """Whatever a test has started ends with it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()


@pytest.mark.long
def test_a_run_that_is_killed_stopped_and_begun_again_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, started: list[Process]
) -> None:
    store, place, lake = f"rocksdb://{tmp_path / 'store'}", tmp_path / "run", str(tmp_path / "lake")
    with Lake(store) as filled:
        filled.fill("log", RECORDS)

    def begin(trigger: str) -> Process:
        started.append(Process(tmp_path, "tests.pipelines.runner_program", store, str(place), lake, trigger))
        return started[-1]

    # Killed: its Java notices a moment later, and the next run waits for that.
    first = begin("once")
    first.wait_for_batches(2)
    (java,) = first.java()
    found = status.look(place)
    assert ("running", f"process {first.pid} on {os.uname().nodename}") == (found["state"], found["by"])
    with pytest.raises(PipelineError, match=f"in use by process {first.pid}"):
        runner.RunDir(place, "copy", {}).__enter__()
    first.kill()
    # Ctrl-C: it says what was done, and how to go on.
    second = begin("once")
    second.wait_for_batches(2)
    assert not java.is_running()
    second.signal(signal.SIGINT)
    code, out = second.end()
    *batches, last = second.said()
    assert (130, "stopped; the same command goes on from here") == (code, last)
    assert all(line.startswith("batch ") for line in batches), "nothing of Spark's is on standard error"
    outcome = json.loads(out)
    # If the first one was killed between the files of a batch and the note that it is done, that batch comes again, and
    # Spark, which finds the files there, reads no rows for it.
    assert not outcome["done"]
    assert outcome["rows"] in {outcome["batches"] * MAX_ROWS, (outcome["batches"] - 1) * MAX_ROWS}
    found = status.look(place)
    assert "stopped" == found["state"]
    assert RECORDS == found["offsets"][0]["offset"] + found["behind"]
    # To the end, and on; SIGTERM is the ordinary end of a run that has none.
    third = begin("continuous")
    wait_until(lambda: status.look(place)["behind"] == 0, "everything is read", PATIENCE)
    (java,) = third.java()
    third.signal(signal.SIGTERM)
    assert 0 == third.end()[0]
    assert not java.is_running()
    rows = spark.read.parquet(lake)
    assert (RECORDS, RECORDS) == (rows.count(), rows.select("offset").distinct().count())


@pytest.mark.spark
def test_ctrl_c_while_java_starts_leaves_none(tmp_path: Path, started: list[Process]) -> None:
    with Lake(f"rocksdb://{tmp_path / 'data' / 'store'}") as lake:
        lake.fill("log", 1)
    started.append(Process(tmp_path, "motorcade", "pipeline", "run", "audit", "--data", "data"))
    (process,) = started
    wait_until(lambda: bool(process.java()), "Java is there", PATIENCE)
    (java,) = process.java()
    process.signal(signal.SIGINT)
    assert (130, "", ["stopped"]) == (*process.end(), process.said())
    assert not java.is_running()


@pytest.mark.spark
def test_the_demonstration_plays_the_whole_loop_and_leaves_the_report_alone(tmp_path: Path) -> None:
    """Exit code 0 means that the audit was clean, and every count as it should be."""
    place, kept = tmp_path / "tmp", tmp_path / "report"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "motorcade", "demo", "--report", str(kept)],
        env={**os.environ, "TMPDIR": str(place)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-2000:] + done.stderr
    assert "" == done.stderr
    assert "423 rows: 400 vehicles, 20 named twice, 3 no VIN; 2 batches sent and acknowledged" in done.stdout
    assert "400 vehicles by SQL, 395 acked, 5 pending, none lost: audit clean" in done.stdout
    assert 13 == done.stdout.count("✓")
    assert {"report.html", "report.png"} == {file.name for file in kept.iterdir()}
    assert (kept / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "task_brakes_7" in (kept / "report.html").read_text()
    assert [] == list(place.iterdir())
