"""`motorcade pipeline run ingest`: messages of a stream into a lake of Parquet files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motorcade.cli import _control, _options, _pipeline
from motorcade.cli.serve import ConfigFile
from motorcade.cli.store import Data, Url, Where, _shown, _where

if TYPE_CHECKING:
    from motorcade.pipelines.ingest_run import Ingestion


def _at_least_a_second(text: str) -> float:
    seconds = _options.duration(text)
    if seconds < 1:
        raise typer.BadParameter("it must be 1 second at least: clocks differ")
    return seconds


def ingest(
    schema: Annotated[Path, typer.Option("--schema", metavar="FILE", help="What types of messages there are: TOML.")],
    lake: Annotated[Path, typer.Option("--lake", parser=_pipeline.folder, metavar="DIR", help="Where tables grow.")],
    checkpoint: _pipeline.Checkpoint,
    stream: Annotated[str | None, typer.Option("--stream", metavar="NAME", help="A stream of the node.")] = None,
    redis_stream: Annotated[
        str | None, typer.Option("--redis-stream", metavar="KEY", help="A stream of Redis: messages:processed.")
    ] = None,
    starting: Annotated[
        str, typer.Option("--from", metavar="earliest|latest|OFFSET|TIME", help="Where a new run begins.")
    ] = "earliest",
    dedupe_within: Annotated[
        float,
        typer.Option(
            "--dedupe-within",
            parser=_options.duration,
            metavar="1h|30m",
            help="Duplicates are known for so long; 0: not.",
        ),
    ] = "1h",  # type: ignore[assignment]  # typer has the parser read defaults too
    max_lateness: Annotated[
        float,
        typer.Option("--max-lateness", parser=_options.duration, metavar="7d|12h", help="Older is dead; 0: never."),
    ] = "7d",  # type: ignore[assignment]
    max_ahead: Annotated[
        float,
        typer.Option("--max-ahead", parser=_at_least_a_second, metavar="1h|30s", help="Farther in the future is dead."),
    ] = "1h",  # type: ignore[assignment]
    max_payload: Annotated[int, typer.Option("--max-payload", min=1, help="Larger is dead, in octets.")] = 1_048_576,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, help="In one micro-batch.")] = 1_000_000,
    on_trimmed: Annotated[
        str, typer.Option("--on-trimmed", metavar="fail|skip", help="If records are gone that were not read yet.")
    ] = "fail",
    compact: Annotated[
        bool, typer.Option("--compact", help="In the end, make one file of many, in all days; with --trigger once.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Bring a stream that the lake has already from another checkpoint.")
    ] = False,
    store: Url = None,
    config: ConfigFile = None,
    data: Data = None,
    master: _pipeline.Master = "local[*]",
    trigger: _pipeline.TriggerOption = "once",
    every: _pipeline.Every = "1m",  # type: ignore[assignment]
    quiet: _pipeline.Quiet = False,
    settings: _pipeline.Set = None,
    as_json: _control.AsJson = False,
) -> None:
    """Messages into Parquet files by type and day, each once; what is wrong with the others is said beside them."""
    from motorcade.pipelines import runner
    from motorcade.pipelines import schema as schemas

    if (stream is None) == (redis_stream is None):
        raise typer.BadParameter("one of --stream and --redis-stream says what to read", param_hint="--stream")
    if compact and trigger != "once":
        raise typer.BadParameter(
            "a run that goes on merges many files of a day by itself; --compact is for --trigger once",
            param_hint="--compact",
        )
    if lake.is_relative_to(checkpoint) or checkpoint.is_relative_to(lake):
        raise typer.BadParameter("the lake and the folder of the run are two, side by side", param_hint="--lake")
    types = schemas.read(schema)
    where = _where(store, config, data, None, None)
    kind, name = ("stream", stream) if stream is not None else ("redis_stream", redis_stream or "")
    more = {"starting": starting, "max_rows": str(max_rows), "on_trimmed": on_trimmed}
    url = _readable(where, kind, name, more)
    reads = {"store": _shown(where), kind: name}
    identity = reads | {"lake": str(lake), "duplicates": "looked for" if dedupe_within else "kept"}
    with _pipeline.running(checkpoint, "ingest", identity, master, settings, quiet=quiet) as running:
        from motorcade.pipelines import ingest as ingests  # not without Spark, and `running` says what to do then
        from motorcade.pipelines.ingest_run import Ingestion, Source

        bounds = ingests.Options(max_lateness, max_ahead, max_payload, dedupe_within)
        source = Source(url, kind, name, more)
        with Ingestion(running.spark, running.folder, lake, source, types, bounds) as ingestion:
            ingestion.open(reads, again=again)
            shown = ingestion.shown(running.display.batch)
            outcome = runner.follow(ingestion.writer(), running.folder, _pipeline.trigger_of(trigger, every), shown)
            if compact and outcome.done:
                _compact(ingestion, running, quiet)
    _pipeline.ended(outcome, as_json)


def _readable(where: Where, kind: str, name: str, more: dict[str, str]) -> str:
    """The URL of the store; what is wrong with it, or with options, is told sooner and in fewer words than by Spark."""
    from motorcade.pipelines.sources.options import ReadOptions

    ReadOptions.parse({"store": where.url, kind: name, **more})
    if kind == "redis_stream":  # a server that has no store of Motorcade's will do
        return where.url
    return _pipeline.store_url(where)


def _compact(ingestion: Ingestion, running: _pipeline.Running, quiet: bool) -> None:
    running.tell("merging files")
    fewer = ingestion.compact()
    if not quiet:
        print(f"merged: {fewer} files less", file=sys.stderr)
