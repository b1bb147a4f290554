"""What the verbs of `motorcade pipeline run` have in common: options, a session in a folder, progress, the end.

with _pipeline.running(checkpoint, "ingest", identity, master, settings, quiet=quiet) as run:
    outcome = run.follow(writer, trigger)      # run.spark, run.folder, run.tell("reading …")
_pipeline.ended(outcome, as_json)
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _options, _output

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from rich.console import Console

    from motorcade.pipelines.runner import Batch, Folder, Outcome, Trigger

_MASTERS = ("local", "local[N]", "local[*]", "spark://HOST:PORT", "yarn", "k8s://URL")
_MASTER = re.compile(r"local(\[(\*|\d+)(, *\d+)?\]|-cluster\[\d+, *\d+, *\d+\])?|spark://.+|yarn|k8s://.+")

#: Nobody looks at Spark's own interface while a command runs; what it has to say is in a file.
_SETTINGS = {"spark.ui.enabled": "false", "spark.log.level": "WARN"}

#: Seconds that Spark, and after it Java, may take to stop; then they are left to end by themselves.
STOP_PATIENCE = 20.0


# -- options


def _master(text: str) -> str:
    if not _MASTER.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_MASTERS)}")
    return text


def _trigger(text: str) -> str:
    from motorcade.pipelines.runner import Kind

    if text not in list(Kind):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(Kind)}")
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
    from motorcade.pipelines import PipelineError
    from motorcade.pipelines.folder import check_place

    try:
        return check_place(text)
    except PipelineError as error:
        raise typer.BadParameter(str(error)) from error


Master = Annotated[
    str, typer.Option("--master", parser=_master, metavar="URL", help="Where Spark works: local[N], spark://…, yarn.")
]
TriggerOption = Annotated[
    str,
    typer.Option(
        "--trigger",
        parser=_trigger,
        metavar="once|interval|continuous",
        help="What is there now, then end; every so often; or the next rows as soon as the last are done.",
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
        help="Folder of this run: the same command goes on from here. All machines must see it.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", parser=_setting, metavar="spark.KEY=VALUE", help="A setting of Spark's. Several times."),
]


def trigger_of(kind: str, every: float) -> Trigger:
    """`--trigger` and `--every` together."""
    from motorcade.pipelines.runner import Kind, Trigger

    return Trigger(Kind(kind), every)


def settings_of(options: list[str] | None) -> dict[str, str]:
    """`--set spark.KEY=VALUE`, as Spark takes them."""
    pairs = (option.partition("=") for option in options or [])
    return {key: value for key, _, value in pairs}


# -- a run


@dataclass
class Running:
    """A session, the folder of the run, and how to tell what is done."""

    spark: SparkSession
    folder: Folder
    tell: Callable[[str], None]  #: what is being done, for a person who watches
    show: Callable[[Batch], None]

    def follow(self, start: Callable[[], StreamingQuery] | DataStreamWriter, trigger: Trigger) -> Outcome:
        """`runner.follow` with the progress of this command."""
        from motorcade.pipelines import runner

        return runner.follow(start, self.folder, trigger, self.show)


@contextmanager
def running(
    checkpoint: Path,
    pipeline: str,
    identity: Mapping[str, str],
    master: str,
    settings: list[str] | None = None,
    *,
    quiet: bool = False,
) -> Iterator[Running]:
    """Take the folder, start Spark; end both."""
    from motorcade.pipelines import runner

    chosen = settings_of(settings)
    with (
        _interruptible(),
        runner.Folder(checkpoint, pipeline, identity) as folder,
        progress(quiet) as (tell, show),
        _session(master, chosen, f"motorcade pipeline {pipeline}", folder.log, tell) as spark,
    ):
        folder.claim(spark)
        yield Running(spark, folder, tell, show)


@contextmanager
def session(master: str, settings: list[str] | None, name: str, *, quiet: bool = False) -> Iterator[Running]:
    """Start Spark for something that has no folder; `Running.folder` is not there."""
    chosen = settings_of(settings)
    with (
        _interruptible(),
        tempfile.TemporaryDirectory(prefix="motorcade-") as place,
        progress(quiet) as (tell, show),
        _session(master, chosen, name, Path(place) / "spark.log", tell) as spark,
    ):
        yield Running(spark, None, tell, show)  # type: ignore[arg-type]  # as said


@contextmanager
def _session(
    master: str, settings: Mapping[str, str], name: str, log: Path, tell: Callable[[str], None]
) -> Iterator[SparkSession]:
    from motorcade.pipelines import session as sessions

    tell("starting Spark")
    spark = sessions.start(master, _SETTINGS | dict(settings), name, log)
    signal.signal(signal.SIGINT, _interrupt)  # Spark has put its own handler there, which speaks to Java
    tell("")
    try:
        yield spark
    finally:
        _end(spark)


def _end(spark: SparkSession) -> None:
    """Stop Spark and its Java, whatever this thread was saying to them when it was interrupted."""
    stopping = threading.Thread(target=spark.stop, daemon=True)  # another thread has a connection of its own
    stopping.start()
    stopping.join(STOP_PATIENCE)
    process = spark.sparkContext._gateway.proc  # type: ignore[union-attr]  # noqa: SLF001 - no other way to Java
    if process is not None:  # else it was there before us
        process.stdin.close()  # by this Java learns that it is no longer needed
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_PATIENCE)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM as Ctrl-C, said in our words."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # tells of connections that we have closed ourselves
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- progress


@contextmanager
def progress(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[Batch], None]]]:
    """What is being done, and each batch: a display that changes on a terminal, else a line per batch."""
    if quiet:
        yield (lambda _words: None), (lambda _batch: None)
    elif not sys.stderr.isatty():
        yield (lambda _words: None), (lambda batch: print(batch_line(batch), file=sys.stderr, flush=True))
    else:
        with _live() as both:
            yield both


@contextmanager
def _live() -> Iterator[tuple[Callable[[str], None], Callable[[Batch], None]]]:
    from rich.console import Console

    console: Console = Console(stderr=True)
    with console.status("") as status:
        rows = 0

        def show(batch: Batch) -> None:
            nonlocal rows
            rows += batch.rows
            status.update(f"{rows} rows; {batch_line(batch)}")

        yield (lambda words: status.update(f"{words} …" if words else "working …")), show


def batch_line(batch: Batch) -> str:
    """`batch 7: 20000 rows in 1.2 s (16667/s), 5000 behind; dead 3`."""
    speed = f" ({batch.rows / batch.seconds:.0f}/s)" if batch.seconds else ""
    behind = f", {batch.behind} behind" if batch.behind is not None else ""
    counts = ", ".join(f"{name} {_count(value)}" for name, value in batch.counts.items())
    line = f"batch {batch.number}: {batch.rows} rows in {batch.seconds:.1f} s{speed}{behind}"
    return f"{line}; {counts}" if counts else line


def _count(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {inner}" for name, inner in value.items()) + ")"
    return str(value)


# -- the end


def ended(outcome: Outcome, as_json: bool) -> None:
    """Say how a run has ended, and end with its exit code."""
    if as_json:
        _output.print_json(outcome.as_dict())
    elif outcome.done:
        print(f"{outcome.pipeline}: {outcome.rows} rows in {outcome.batches} micro-batches, {outcome.seconds:.1f} s")
    if not outcome.done:
        print("stopped; the same command goes on from here", file=sys.stderr)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
