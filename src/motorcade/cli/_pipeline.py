"""Shared parts of `motorcade pipeline run`: options, a session in a run directory, progress, the end.

    with _pipeline.running(checkpoint, "ingest", identity, master, settings, quiet=quiet) as run:
        outcome = run.follow(writer, trigger)      # run.spark, run.folder, run.tell("reading")
    _pipeline.ended(outcome, as_json)

Whatever ends a run, nothing of Spark's is left: not its Java, and nothing that it says is on the terminal.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _options, _output
from motorcade.core.errors import MotorcadeError
from motorcade.pipelines import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from motorcade.cli._progress import Display
    from motorcade.cli._store import StoreLocation
    from motorcade.pipelines.runner import RunDir, RunOutcome, Trigger

_MASTERS = ("local", "local[N]", "local[*]", "spark://HOST:PORT", "yarn", "k8s://URL")
_MASTER = re.compile(r"local(\[(\*|\d+)(, *\d+)?\]|-cluster\[\d+, *\d+, *\d+\])?|spark://.+|yarn|k8s://.+")

#: Spark's own interface is off while a command runs; its log is in a file.
_SETTINGS = {"spark.ui.enabled": "false", "spark.log.level": "WARN"}

#: Loggers of PySpark that tell of each error a second time, with the stack of Java, and of connections that we close.
_TALKATIVE = ("py4j", "SQLQueryContextLogger", "DataFrameQueryContextLogger")

#: Seconds that Spark has to stop, and Java to end, after a second signal.
_SHORT_PATIENCE = 3.0

STOPPED = "stopped; the same command goes on from here"


# -- options


def _master(text: str) -> str:
    if not _MASTER.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_MASTERS)}")
    return text


def _trigger(text: str) -> str:
    from motorcade.pipelines.runner import TriggerKind

    if text not in list(TriggerKind):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(TriggerKind)}")
    return text


def _every(text: str) -> float:
    seconds = _options.duration(text)
    if not seconds:
        raise typer.BadParameter("it must be longer than 0; `--trigger continuous` makes no pauses")
    return seconds


def _setting(text: str) -> str:
    key, equals, _value = text.partition("=")
    if not equals or not re.fullmatch(r"spark(\.\w[\w-]*)+", key):
        raise typer.BadParameter(f"{text!r}; write spark.KEY=VALUE")
    return text


def folder(text: str) -> Path:
    from motorcade.pipelines.rundir import check_place

    with _options.wrong_usage():
        return check_place(text)


Master = Annotated[
    str, typer.Option("--master", parser=_master, metavar="URL", help="Spark master: local[N], spark://…, yarn.")
]
TriggerOption = Annotated[
    str,
    typer.Option(
        "--trigger",
        parser=_trigger,
        metavar="once|interval|continuous",
        help="Once: what is there now, then end. Interval: --every. Continuous: without pauses.",
    ),
]
Every = Annotated[
    float, typer.Option("--every", parser=_every, metavar="1m|30s", help="--trigger interval: how often.")
]
Checkpoint = Annotated[
    Path,
    typer.Option(
        "--checkpoint",
        parser=folder,
        metavar="DIR",
        help="Run directory: the same command resumes from here. All machines must see it.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", parser=_setting, metavar="spark.KEY=VALUE", help="A setting of Spark. May be repeated."),
]


def store_url(where: StoreLocation) -> str:
    """Check that the store can be read, and return its URL: an error comes sooner, and is shorter, than Spark's."""
    from motorcade.storage.readers import open_reader

    open_reader(where.url).close()
    return where.url


def trigger_of(kind: str, every: float) -> Trigger:
    """Combine `--trigger` and `--every`."""
    from motorcade.pipelines.runner import Trigger, TriggerKind

    return Trigger(TriggerKind(kind), every)


def settings_of(options: list[str] | None) -> dict[str, str]:
    """Parse `--set spark.KEY=VALUE`, as Spark takes them."""
    pairs = (option.partition("=") for option in options or [])
    return {key: value for key, _, value in pairs}


# -- a run


@dataclass
class Running:
    """A session, the folder of the run, and who is shown what is done."""

    spark: SparkSession
    folder: RunDir
    display: Display

    def tell(self, words: str) -> None:
        """Show what is being done."""
        self.display.tell(words)

    def follow(self, start: Callable[[], StreamingQuery] | DataStreamWriter, trigger: Trigger) -> RunOutcome:
        """Run `runner.follow` with the progress of this command."""
        from motorcade.pipelines import runner

        return runner.follow(start, self.folder, trigger, self.display.batch)


@contextmanager
def running(
    checkpoint: Path,
    pipeline: str,
    identity: Mapping[str, str],
    master: str,
    settings: list[str] | None = None,
    *,
    quiet: bool = False,
    stopped: str = STOPPED,
) -> Iterator[Running]:
    """Take the folder, start Spark; end both. `stopped` is printed if it is interrupted early."""
    from motorcade.cli import _progress
    from motorcade.pipelines import runner

    name = f"motorcade pipeline {pipeline}"
    with (
        _interruptible(stopped),
        runner.RunDir(checkpoint, pipeline, identity) as folder,
        noting(folder),
        _progress.display(quiet) as display,
        _session(master, settings, name, folder.log, display) as spark,
    ):
        folder.claim(spark)
        yield Running(spark, folder, display)


@contextmanager
def noting(folder: RunDir) -> Iterator[None]:
    """Store the error that has ended a run, for `pipeline status`."""
    from motorcade.pipelines import failures

    try:
        yield
    except KeyboardInterrupt:
        folder.note(state="stopped", ended_at=time.time())
        raise
    except Exception as error:
        folder.note(state="failed", error=failures.words(error), ended_at=time.time())
        raise


@contextmanager
def folder_or_none(checkpoint: Path | None) -> Iterator[Path]:
    """Yield the run directory, or a temporary one."""
    if checkpoint is not None:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="motorcade-") as place:
        yield Path(place)


@contextmanager
def session(
    master: str, settings: list[str] | None, name: str, *, quiet: bool = False
) -> Iterator[tuple[SparkSession, Display]]:
    """Start Spark for something that has no folder, and end it."""
    from motorcade.cli import _progress

    with (
        _interruptible("stopped"),
        tempfile.TemporaryDirectory(prefix="motorcade-") as place,
        _progress.display(quiet) as display,
        _session(master, settings, name, Path(place) / "spark.log", display) as spark,
    ):
        yield spark, display


@contextmanager
def _session(master: str, settings: list[str] | None, name: str, log: Path, display: Display) -> Iterator[SparkSession]:
    from motorcade.pipelines import failures
    from motorcade.pipelines import session as sessions

    display.tell("starting Spark")
    spark = sessions.start(master, _SETTINGS | settings_of(settings), name, log)
    signal.signal(signal.SIGINT, _interrupt)  # Spark has put its own handler there, which speaks to Java
    _hush(spark)
    display.tell("working")
    patience = sessions.STOP_PATIENCE
    try:
        yield spark
    except MotorcadeError:
        raise
    except KeyboardInterrupt:
        patience = _SHORT_PATIENCE
        raise
    except Exception as error:
        if not failures.is_known(error):
            raise  # a traceback is wanted
        raise PipelineError(failures.words(error)) from error
    finally:
        sessions.stop(spark, patience)


def _hush(spark: SparkSession) -> None:
    """Keep PySpark from printing errors that we tell in our own words, and what becomes of it when Java is gone."""
    for logger in _TALKATIVE:
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)
    server: Any = spark.sparkContext._accumulatorServer  # noqa: SLF001 - no other way
    server.handle_error = lambda *_: None


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _interruptible(words: str) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, and say `words`."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        print(words, file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the end


def ended(outcome: RunOutcome, as_json: bool) -> None:
    """Say how a run has ended, and end with its exit code."""
    from motorcade.cli import _progress

    if as_json:
        _output.print_json(outcome.as_dict())
    elif outcome.done:
        counts = _progress.counted(outcome.counts)
        told = f"{outcome.pipeline}: {outcome.rows} rows in {outcome.batches} batches, {outcome.seconds:.1f} s"
        print(f"{told}; {counts}" if counts else told)
    if not outcome.done:
        print(STOPPED, file=sys.stderr)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
