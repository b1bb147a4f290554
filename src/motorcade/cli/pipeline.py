"""`motorcade pipeline`: data pipelines on Spark, embedded or on a cluster.

A run has a folder (`--checkpoint DIR`, for receipts `--out DIR`) that it goes on from when the same command is given
again, whatever has ended it; `status` reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _control, _options, _output, _pipeline, _pipeline_audience, _pipeline_ingest
from motorcade.cli._groups import verb
from motorcade.cli._store import StoreFlags

if TYPE_CHECKING:
    from motorcade.pipelines.audit import AuditVerdict

app = typer.Typer(no_args_is_help=True, help="Run data pipelines on Spark, and see how far they are.")
run = typer.Typer(no_args_is_help=True, help="Run a pipeline: on this machine, or on a cluster.")
app.add_typer(run, name="run")
verb(run)(_pipeline_ingest.ingest)
verb(run)(_pipeline_audience.audience)

_STOPPED = "stopped"  # an audit starts from the beginning each time

Request = Annotated[
    str | None,
    typer.Option("--request", metavar="ID", parser=_options.request_id, help="Only this request. \\[all]"),
]


@verb(run)
def receipts(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "--checkpoint",
            parser=_pipeline.folder,
            metavar="DIR",
            help="Run directory, for tables, page and pictures.",
        ),
    ],
    request: Request = None,
    slow_after: Annotated[
        float,
        typer.Option(
            "--slow-after", parser=_options.positive_duration, metavar="1h|30m|45s", help="What counts as late."
        ),
    ] = "1h",  # type: ignore[assignment]  # typer has the parser read defaults too
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Maximum number of requests in page and pictures.")
    ] = 100,
    master: _pipeline.Master = "local[*]",
    trigger: _pipeline.TriggerOption = "once",
    every: _pipeline.Every = "1m",  # type: ignore[assignment]  # likewise
    quiet: _pipeline.Quiet = False,
    settings: _pipeline.Set = None,
    as_json: _control.AsJson = False,
    *,
    chosen: StoreFlags,
) -> None:
    """Report progress, delivery times and late vehicles of each request: as tables, page, pictures and JSON."""
    from motorcade.pipelines import runner

    where = chosen.find()
    url = _pipeline.store_url(where)
    identity = {"store": where.shown} | ({"request": request} if request is not None else {})
    with _pipeline.running(out, "receipts", identity, master, settings, quiet=quiet) as running:
        from motorcade.pipelines import publication  # not without Spark, and `running` says what to do then

        def work() -> tuple[int, dict[str, Any]]:
            made = publication.publish(
                running.spark, url, out, request=request, slow_after=slow_after, max_requests=requests
            )
            return made.pop("receipts"), made

        running.tell("reading receipts")
        outcome = runner.repeat(work, running.folder, _pipeline.trigger_of(trigger, every), running.display.batch)
    _pipeline.ended(outcome, as_json)


@verb(run)
def audit(
    request: Request = None,
    list_: Annotated[
        int, typer.Option("--list", min=0, metavar="N", help="Maximum number of findings to list.")
    ] = 1000,
    master: _pipeline.Master = "local[*]",
    trigger: _pipeline.TriggerOption = "once",
    every: _pipeline.Every = "1m",  # type: ignore[assignment]  # likewise
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            parser=_pipeline.folder, metavar="DIR", help="Run directory for the result, for `pipeline status`."
        ),
    ] = None,
    quiet: _pipeline.Quiet = False,
    settings: _pipeline.Set = None,
    as_json: _control.AsJson = False,
    *,
    chosen: StoreFlags,
) -> None:
    """Check that each accepted delivery is in one final state or pending. Exit code 1 and a list of those that are not.

    A request that nothing is known of is exit code 1, too.

    With an interval it looks again and again, until something is wrong or it is stopped.
    """
    from motorcade.pipelines import runner

    where = chosen.find()
    url = _pipeline.store_url(where)
    identity = {"store": where.shown} | ({"request": request} if request is not None else {})
    verdicts: list[AuditVerdict] = []
    with (
        _pipeline.folder_or_none(checkpoint) as place,
        _pipeline.running(place, "audit", identity, master, settings, quiet=quiet, stopped=_STOPPED) as running,
    ):
        from motorcade.pipelines import audit as audits  # likewise

        def work() -> tuple[int, dict[str, Any]]:
            verdict = audits.run(running.spark, url, request=request, max_listed=list_)
            verdicts[:] = [verdict]
            _tell_verdict(verdict, where.shown, as_json)
            return verdict.as_dict()["deliveries"], {**verdict.outcomes, "wrong": verdict.wrong}

        running.tell("comparing receipts and mailboxes")
        when = _pipeline.trigger_of(trigger, every)
        # A request that is not there may be one that is sent later; who waits for it is told each time.
        outcome = runner.repeat(work, running.folder, when, enough=lambda: verdicts[0].wrong > 0)
    if verdicts and not verdicts[0].clean:
        raise typer.Exit(verdicts[0].exit_code)
    if not outcome.done:
        print(_STOPPED, file=sys.stderr)
        raise typer.Exit(outcome.exit_code)


def _tell_verdict(verdict: AuditVerdict, store: str, as_json: bool) -> None:
    if as_json:
        _output.print_json({"store": store, **verdict.as_dict()})
    else:
        print(*verdict.lines(), sep="\n", flush=True)
    if verdict.unknown:
        print(
            f"error: {store} has no receipts of request {verdict.request!r}; `motorcade fanout list` names the "
            "requests of a node, whose receipts are kept for receipts_retention",
            file=sys.stderr,
        )


# -- status


@app.command()
def status(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", parser=_pipeline.folder, help="The folder of a run."),
    ],
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="The store, if it needs a password. \\[as it was run]")
    ] = None,
    as_json: _control.AsJson = False,
) -> None:
    """Show whether a run is active, its progress, and its lag behind the stream."""
    from motorcade.pipelines import status as states

    found = states.look(folder, store)
    if as_json:
        _output.print_json(found)
    else:
        _output.print_fields(_lines(found))


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "pipeline", found["pipeline"]
    for name, value in found["identity"].items():
        yield name, " ".join(value.split())  # a query may have several lines
    yield "state", f"running ({found['by']})" if found["running"] else found["state"]
    for name in ("trigger", "error"):
        if found[name]:
            yield name, found[name]
    for name in ("started_at", "ended_at", "batch_at"):
        if found[name]:
            yield name, _output.when(found[name])
    for name in ("batch", "batches", "rows", "rows_last"):
        if found[name] is not None:
            yield name, found[name]
    for name, value in (found["counts"] or {}).items():
        yield f"  {name}", value
    for offset in found["offsets"]:
        yield "read up to", {name: value for name, value in offset.items() if name != "mark"}
    if found["behind"] is not None:
        yield "behind", found["behind"]
    elif found["behind_unknown"]:
        yield "behind", f"unknown: {found['behind_unknown']}"
