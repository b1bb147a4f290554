"""`motorcade pipeline run ingest`: messages of a stream into a lake of Parquet files."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motorcade.cli import _control, _files, _options, _pipeline
from motorcade.cli._store import StoreFlags, StoreLocation
from motorcade.pipelines import PipelineError
from motorcade.storage.readers import open_reader

if TYPE_CHECKING:
    from motorcade.pipelines.ingest_run import Ingestion

#: Options of the source, as they are called here.
_NAMES = {
    "store": "--store",
    "stream": "--stream",
    "redis_stream": "--redis-stream",
    "starting": "--from",
    "on_trimmed": "--on-trimmed",
    "if_missing": "--if-missing",
}


def _at_least_a_second(text: str) -> float:
    seconds = _options.duration(text)
    if seconds < 1:
        raise typer.BadParameter("it must be 1 second at least: clocks differ")
    return seconds


def ingest(
    schema: Annotated[Path, typer.Option("--schema", metavar="FILE", help="Types of messages: a TOML file.")],
    lake: Annotated[
        Path, typer.Option("--lake", parser=_pipeline.folder, metavar="DIR", help="Directory of the tables.")
    ],
    checkpoint: _pipeline.Checkpoint,
    stream: Annotated[str | None, typer.Option("--stream", metavar="NAME", help="A stream of the node.")] = None,
    redis_stream: Annotated[
        str | None, typer.Option("--redis-stream", metavar="KEY", help="A stream of Redis: messages:processed.")
    ] = None,
    starting: Annotated[
        str, typer.Option("--from", metavar="earliest|latest|OFFSET|TIME", help="Start of a new run.")
    ] = "earliest",
    dedupe_within: Annotated[
        float,
        typer.Option(
            "--dedupe-within",
            parser=_options.duration,
            metavar="1h|30m",
            help="Dedupe within this time; 0: off.",
        ),
    ] = "1h",  # type: ignore[assignment]  # typer has the parser read defaults too
    max_lateness: Annotated[
        float,
        typer.Option(
            "--max-lateness",
            parser=_options.duration,
            metavar="7d|12h",
            help="Older messages are dead letters; 0: never.",
        ),
    ] = "7d",  # type: ignore[assignment]
    max_ahead: Annotated[
        float,
        typer.Option(
            "--max-ahead",
            parser=_at_least_a_second,
            metavar="1h|30s",
            help="Messages farther in the future are dead letters.",
        ),
    ] = "1h",  # type: ignore[assignment]
    max_payload: Annotated[
        int, typer.Option("--max-payload", min=1, help="Larger messages are dead letters, in bytes.")
    ] = 1_048_576,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, help="Maximum rows of one micro-batch.")] = 1_000_000,
    on_trimmed: Annotated[
        str, typer.Option("--on-trimmed", metavar="fail|skip", help="If records were trimmed before they were read.")
    ] = "fail",
    if_missing: Annotated[
        str, typer.Option("--if-missing", metavar="fail|empty", help="If the stream is unknown.")
    ] = "fail",
    compact: Annotated[
        bool, typer.Option("--compact", help="Compact the files of each day at the end; with --trigger once.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Ingest a stream again that the lake has from another checkpoint.")
    ] = False,
    master: _pipeline.Master = "local[*]",
    trigger: _pipeline.TriggerOption = "once",
    every: _pipeline.Every = "1m",  # type: ignore[assignment]
    quiet: _pipeline.Quiet = False,
    settings: _pipeline.Set = None,
    as_json: _control.AsJson = False,
    *,
    chosen: StoreFlags,
) -> None:
    """Write messages into Parquet files by type and day, each once; what is wrong with others is said beside them."""
    from motorcade.pipelines import runner
    from motorcade.pipelines import schema as schemas

    if (stream is None) == (redis_stream is None):
        raise typer.BadParameter("give one of --stream and --redis-stream", param_hint="--stream")
    if compact and trigger != "once":
        raise typer.BadParameter(
            "a run that goes on merges many files of a day by itself; --compact is for --trigger once",
            param_hint="--compact",
        )
    if lake.is_relative_to(checkpoint) or checkpoint.is_relative_to(lake):
        raise typer.BadParameter("the lake and the run directory must not contain each other", param_hint="--lake")
    _files.check_folder("--lake", lake)
    types = schemas.read(schema)
    where = chosen.find()
    kind, name = ("stream", stream) if stream is not None else ("redis_stream", redis_stream or "")
    more = {"starting": starting, "max_rows": str(max_rows), "on_trimmed": on_trimmed, "if_missing": if_missing}
    url = _readable(where, kind, name, more)
    if if_missing.lower() == "fail" and not _is_there(where, kind, name):
        _check_declared(chosen.config, where, kind, name)
        more["if_missing"] = "empty"
    reads = {"store": where.shown, kind: name}
    identity = reads | {"lake": str(lake), "duplicates": "looked for" if dedupe_within else "kept"}
    with _pipeline.running(checkpoint, "ingest", identity, master, settings, quiet=quiet) as running:
        from motorcade.pipelines import ingest as ingests  # not without Spark, and `running` says what to do then
        from motorcade.pipelines.ingest_run import Ingestion, IngestSource

        bounds = ingests.IngestOptions(max_lateness, max_ahead, max_payload, dedupe_within)
        source = IngestSource(url, kind, name, more)
        with Ingestion(running.spark, running.folder, lake, source, types, bounds) as ingestion:
            ingestion.open(reads, again=again)
            shown = ingestion.shown(running.display.batch)
            outcome = runner.follow(ingestion.writer(), running.folder, _pipeline.trigger_of(trigger, every), shown)
            if compact and outcome.done:
                _compact(ingestion, running, quiet)
    _pipeline.ended(outcome, as_json)


def _readable(where: StoreLocation, kind: str, name: str, more: dict[str, str]) -> str:
    """Check store and options, and return the URL: an error comes sooner, and is shorter, than Spark's."""
    from motorcade.pipelines.sources.options import Missing, OptionError, ReadOptions

    try:
        options = ReadOptions.parse({"store": where.url, kind: name, **more})
    except OptionError as error:
        raise typer.BadParameter(_as_written(str(error))) from error
    if options.if_missing is Missing.EMPTY and kind == "stream":
        # Of Redis' own streams a server that has no store of Motorcade's may have some.
        _pipeline.store_url(where)
    return where.url


def _as_written(words: str) -> str:
    """Replace names of source options in a message by those of the command line."""
    for theirs, ours in _NAMES.items():
        words = words.replace(f"option {theirs}:", f"{ours}:")
    return words


def _is_there(where: StoreLocation, kind: str, name: str) -> bool:
    """Return True if the store has such a stream."""
    if kind == "redis_stream":
        return _has_entries(where, name)
    from motorcade.pipelines.sources.messages import is_declared

    with closing(open_reader(where.url)) as reader:
        return name in reader.streams() or is_declared(reader, name)


def _check_declared(config: Path | None, where: StoreLocation, kind: str, name: str) -> None:
    """Refuse an unknown stream without records, before there is a run directory for it."""
    if _is_declared(config, where, kind, name):
        return
    there, look = "", "look at the name"
    if kind == "stream":
        there = f" (with records there are: {', '.join(_streams(where)) or 'none'})"
        look = "`motorcade stream list` names those that are declared"
    raise PipelineError(
        f"the stream {name!r} has no record in {where.shown}: there is no such stream{there}, or nothing has come to "
        f"it yet; {look}. `--if-missing empty` waits for the first record; with `--config FILE`, streams that the "
        "configuration of the node declares are known to be there"
    )


def _is_declared(config: Path | None, where: StoreLocation, kind: str, name: str) -> bool:
    """Return True if the configuration that names the store declares such a stream."""
    from motorcade import config as configuration

    loaded = configuration.load(config, os.environ, {})
    configuration.check_plugins(loaded)
    plugins = {plugin.name: plugin.config for plugin in configuration.plugins_to_load(loaded.config)}
    if kind == "stream":
        return name in plugins.get("streams", {}).get("stream", {})
    rules = plugins.get("capture", {}).get("rule", {}).values()
    return any(rule["to"] == f"redis-stream:{name}" and rule.get("redis", "") in {"", where.url} for rule in rules)


def _streams(where: StoreLocation) -> list[str]:
    with closing(open_reader(where.url)) as reader:
        return reader.streams()


def _has_entries(where: StoreLocation, key: str) -> bool:
    from motorcade.storage.redis_reader import NativeReader

    with closing(NativeReader(where.url)) as reader:
        return reader.extent(key).exists


def _compact(ingestion: Ingestion, running: _pipeline.Running, quiet: bool) -> None:
    running.tell("merging files")
    fewer = ingestion.compact()
    if not quiet:
        print(f"merged: {fewer} files less", file=sys.stderr)
