"""`motorcade fanout`: one message to a list of vehicles, and what became of it.

`send` speaks MQTT, as a platform does; `report` reads the store with Spark; everything else asks the control port of a
node.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _control, _files, _mqtt, _options, _output, _pipeline, _vins
from motorcade.cli._groups import verb
from motorcade.cli._store import NodeStoreFlags

if TYPE_CHECKING:
    from motorcade.cli._batches import Job, Outcome

app = typer.Typer(no_args_is_help=True, help="Send one message to a list of vehicles, and see what became of it.")

_POLL = 0.5  # seconds between two looks at a collection under way
_PAGE = 5000  # targets per request; each page costs the node a look at the rest of the receipts
_FINISHED = ("acked", "replaced", "failed", "expired", "cancelled")
_STATES = ("accepted", "sent", "retried", *_FINISHED)
_ASKED = ("pending", *_STATES)  # pending: any state that is not final
_COLUMNS = ("request_id", "status", "targets", "pending", *_FINISHED, "last_at")


def _state(text: str) -> str:
    if text not in _ASKED:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_ASKED)}")
    return text


Request = Annotated[str, typer.Argument(metavar="REQUEST", parser=_options.request_id)]


# -- sending

CheckDigit = Annotated[bool, typer.Option("--check-digit", help="Check the ninth character of each VIN too.")]


@dataclass(frozen=True)
class DeliveryFlags:
    """The options of a message's delivery; also used by `pipeline run audience`."""

    expires: Annotated[
        float | None,
        typer.Option(
            "--expires",
            parser=_options.positive_duration,
            metavar="7d|12h|30m|45s",
            help="Not delivered after this time.",
        ),
    ] = None
    priority: Annotated[int, typer.Option(min=0, max=9, help="Higher priorities are delivered first.")] = 0
    append: Annotated[
        bool | None,
        typer.Option(
            "--append/--replace",
            help="Keep or replace the backlog of the same request; default: as the node is configured.",
        ),
    ] = None

    def options(self) -> dict[str, object]:
        """Return the optional fields of a batch that were given."""
        mode = None if self.append is None else "append" if self.append else "replace"
        given = {"expires_in": self.expires, "priority": self.priority or None, "mode": mode}
        return {name: value for name, value in given.items() if value is not None}


@verb(app)
def send(
    vins: Annotated[str, typer.Option("--vins", metavar="FILE|-", help="List of VINs, one per line.")],
    request: Annotated[
        str,
        typer.Option("--request", metavar="ID", parser=_options.request_id, help="Request id, for example task_ota_1."),
    ],
    payload: Annotated[str, typer.Option("--payload", metavar="FILE|-", help="Payload, sent as it is.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="VINs in one message to the broker.")] = 200,
    check_digit: CheckDigit = False,
    rest: Annotated[
        Path | None,
        typer.Option("--rest", metavar="FILE", help="If something fails: write the VINs that were not accepted here."),
    ] = None,
    batch_id: Annotated[
        str | None,
        typer.Option(
            "--batch-id",
            metavar="TEXT",
            help="Distinguishes this sending from an earlier one of the same request, vehicles, payload and options,"
            " which would not be sent again.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and count, send nothing.")] = False,
    as_json: _control.AsJson = False,
    *,
    delivery: DeliveryFlags,
    broker: _mqtt.ConnectFlags,
) -> None:
    """Send a file to every vehicle of a list. Exits with 0 after the broker has stored everything.

    Repeating the same command addresses no vehicle twice, whatever the outcome of the first.
    """
    from motorcade.cli import _batches

    if vins == payload == "-":
        raise typer.BadParameter("standard input can be the list or the payload, not both", param_hint="--payload")
    _files.check_file("--rest", rest)
    listed = _vins.read(vins, check_digit=check_digit)
    job = _batches.Job(
        vins=listed.vins,
        request_id=request,
        data=_files.read("--payload", payload),
        options=delivery.options(),
        size=batch,
        name=batch_id or "",
    )
    if dry_run:
        _show_plan(job, listed.duplicates, as_json)
        return
    outcome = _batches.Outcome(batches=len(job.batches()))
    try:
        asyncio.run(_send(broker, job, outcome))
    except KeyboardInterrupt:
        done = f"{_count(outcome.acknowledged, 'batch', 'batches')} of {outcome.batches}"
        print(f"interrupted: {done} accepted, up to {_batches.WINDOW} more may be", file=sys.stderr)
        raise typer.Exit(130) from None
    _show_outcome(outcome, job, listed.duplicates, as_json)
    if outcome.rejected:
        _tell_rejected(outcome.rejected, request)
    if outcome.problems:
        _tell_problems(outcome, rest)
    if outcome.rejected or outcome.problems:
        raise typer.Exit(1)


async def _send(broker: _mqtt.ConnectFlags, job: Job, outcome: Outcome) -> None:
    from motorcade.cli import _batches

    client = await broker.connect()
    try:
        with _bar(len(job.vins)) as progress:
            await _batches.send(client, job, outcome, progress)
    finally:
        await client.disconnect()


@contextmanager
def _bar(vehicles: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("vehicles accepted"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=vehicles)
        yield lambda count: bar.advance(task, count)


def _show_plan(job: Job, duplicates: int, as_json: bool) -> None:
    plan = {
        "request_id": job.request_id,
        "vehicles": len(job.vins),
        "duplicates": duplicates,
        "batches": len(job.batches()),
        "payload_bytes": len(job.data),
        "bytes": job.size_bytes(),
        "data_id": job.data_id,
    }
    if as_json:
        _output.print_json({**plan, "dry_run": True})
        return
    _output.print_fields(plan.items())
    print("nothing was sent (--dry-run)", file=sys.stderr)


def _show_outcome(outcome: Outcome, job: Job, duplicates: int, as_json: bool) -> None:
    figures = {
        "request_id": job.request_id,
        "accepted": outcome.accepted,
        "duplicates": duplicates + outcome.duplicates,
        "replaced": outcome.replaced,
        "rejected": outcome.rejected,
        "repeated_batches": outcome.repeated,
        "batches": outcome.acknowledged,
        "failed_batches": len(outcome.problems),
        "not_accepted": len(outcome.rest),
        "problems": outcome.problems,
    }
    if as_json:
        _output.print_json(figures)
    elif not outcome.problems:
        also = [f"{figures[name]} {name}" for name in ("duplicates", "replaced") if figures[name]]
        print(f"request {job.request_id!r}: {_count(outcome.accepted, 'vehicle')} accepted", *also, sep=", ")
        if outcome.repeated:
            print(
                f"{_count(outcome.repeated, 'batch', 'batches')} of {outcome.batches} had been accepted before, and"
                " addressed no vehicle again; --batch-id TEXT sends the same again",
                file=sys.stderr,
            )
        if sys.stdout.isatty():
            print(f"follow it with `motorcade fanout status {job.request_id} --watch`")


def _tell_rejected(rejected: int, request: str) -> None:
    print(
        f"error: {_count(rejected, 'vehicle')} rejected: too many messages wait there already (option max_pending);"
        f" `motorcade fanout targets {request} --state failed` names them",
        file=sys.stderr,
    )


def _tell_problems(outcome: Outcome, rest: Path | None) -> None:
    for problem in outcome.problems:
        print(f"error: {problem}", file=sys.stderr)
    done = _count(outcome.acknowledged, "batch", "batches")
    print(
        f"{done} of {outcome.batches} accepted ({_count(outcome.accepted, 'vehicle')});"
        f" {_count(len(outcome.rest), 'vehicle')} not",
        file=sys.stderr,
    )
    if rest is None:
        print("to send it to those again, let --rest FILE write their VINs", file=sys.stderr)
        return
    try:
        rest.write_text("".join(f"{vin}\n" for vin in outcome.rest))
    except OSError as error:
        print(f"error: cannot write {rest}: {error.strerror}", file=sys.stderr)
    else:
        print(f"their VINs are in {rest}; send it to them with --vins {rest}", file=sys.stderr)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


# -- requests


@verb(app, "list")
def list_(
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number. \\[all]")] = None,
    *,
    node: _control.NodeFlags,
) -> None:
    """List the requests of the node, with the number of messages in each state."""
    none = dict.fromkeys(_FINISHED, 0)

    def print_requests(found: list[dict[str, Any]]) -> None:
        rows = ({**none, **view, **view["states"], "last_at": _output.when(view["last_at"])} for view in found)
        _output.print_list(_COLUMNS, rows, "requests")

    node.print(list(node.control.pages("fanout/requests", limit)), print_requests)


@verb(app)
def status(
    request: Request,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch until every message has its final state.")] = (
        False
    ),
    interval: Annotated[float, typer.Option(min=0.1, help="--watch: seconds between two queries.")] = 1.0,
    *,
    node: _control.NodeFlags,
) -> None:
    """Show the progress of a request: how many vehicles have it, how many wait, how many never get it."""
    control = node.control
    path = f"fanout/requests/{_control.name(request)}"
    view = control.call("GET", path)
    if watch:
        with _watching() as show:
            while view["pending"]:
                show(view)
                time.sleep(interval)
                view = control.call("GET", path)
    node.print(view, lambda view: _output.print_fields(_status_lines(view)))


@contextmanager
def _watching() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a live progress bar on a terminal, nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda _view: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def show(view: dict[str, Any]) -> None:
            states = ", ".join(f"{view['states'][name]} {name}" for name in _STATES if view["states"].get(name))
            done = view["targets"] - view["pending"]
            bar.update(task, total=view["targets"], completed=done, description=f"{view['status']}: {states}")

        yield show


def _status_lines(view: dict[str, Any]) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = [("request_id", view["request_id"]), ("status", view["status"])]
    if view["status"] not in ("active", "complete"):
        lines.append(("since", _output.when(view["since"])))
    lines += [("first_at", _output.when(view["first_at"])), ("last_at", _output.when(view["last_at"]))]
    lines += [("targets", view["targets"]), ("pending", view["pending"])]
    for name in _STATES:
        if count := view["states"].get(name):
            lines.append((f"  {name}", f"{count} ({100 * count / max(1, view['targets']):.1f} %)"))
    return lines


@verb(app)
def targets(
    request: Request,
    state: Annotated[
        str | None, typer.Option("--state", parser=_state, metavar="|".join(_ASKED), help="Only those in this state.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number. \\[all]")] = None,
    only_vins: Annotated[bool, typer.Option("--only-vins", help="A list as `fanout send --vins` takes it.")] = False,
    *,
    node: _control.NodeFlags,
) -> None:
    """List the vehicles of a request, a line each: state, time, number of attempts, and reason."""
    if only_vins and node.as_json:
        raise typer.BadParameter("a list of VINs is not JSON; leave one of the two out", param_hint="--only-vins")
    path = f"fanout/requests/{_control.name(request)}/targets"
    wanted = {"state": state} if state is not None else {}
    found = node.control.pages(path, limit, size=_PAGE, **wanted)
    if node.as_json:
        _output.print_json(list(found))
        return
    for target in found:
        # A line at a time: a request may have a million of them, and a table is measured before it is printed.
        print(target["vin"] if only_vins else _target_line(target))


def _target_line(target: dict[str, Any]) -> str:
    attempt = f"attempt {target['attempt']}" if target["attempt"] else ""
    when = _output.when(target["time"])
    return f"{target['vin']}  {target['state']:<9}  {when}  {attempt:<10}  {target['reason']}".rstrip()


# -- reports


@verb(app)
def report(
    request: Request,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page with pictures.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Write the picture alone.")] = None,
    slow_after: Annotated[
        float,
        typer.Option(
            "--slow-after", parser=_options.positive_duration, metavar="1h|30m|45s", help="What counts as late."
        ),
    ] = "1h",  # type: ignore[assignment]  # typer has the parser read defaults too
    master: _pipeline.Master = "local[*]",
    *,
    given: NodeStoreFlags,
) -> None:
    """Report progress, delivery times and late vehicles of a request, from all its receipts, read by Spark.

    Reads the store, that of the node that runs here unless another one is named; a node need not run.
    """
    from motorcade.cli import _report

    # Said at once, not after everything was read.
    _files.check_file("--html", html)
    _files.check_file("--png", png)
    if html is not None and png is not None and html.resolve() == png.resolve():
        raise typer.BadParameter("the page and the picture are two files", param_hint="--png")
    where = given.find()
    found = _report.made(where.url, where.shown, request, slow_after, master)
    _report.write(found, html, png)
    if given.as_json:
        _output.print_json(found)
    else:
        _report.show(found)


# -- decisions


@verb(app)
def cancel(request: Request, *, node: _control.NodeFlags) -> None:
    """Call off what vehicles have not got yet. A message in flight may still arrive; its receipt tells."""
    _decide(request, "cancel", node)


@verb(app)
def pause(request: Request, *, node: _control.NodeFlags) -> None:
    """Send nothing more of a request until it is resumed; other requests go on. Expiry does not wait."""
    _decide(request, "pause", node)


@verb(app)
def resume(request: Request, *, node: _control.NodeFlags) -> None:
    """Go on with a request that was paused."""
    _decide(request, "resume", node)


def _decide(request: str, decision: str, node: _control.NodeFlags) -> None:
    view = node.call("POST", f"fanout/requests/{_control.name(request)}/{decision}")
    node.print(
        view, lambda view: print("request {!r} is {status}, {pending} of {targets} pending".format(request, **view))
    )


# -- care and questions


@verb(app)
def gc(*, node: _control.NodeFlags) -> None:
    """Remove now what has expired or was called off, and data that nothing needs; a node does so by itself too."""
    control = node.control
    work = control.call("POST", "fanout/gc")
    while work["state"] == "running":
        time.sleep(_POLL)
        work = control.call("GET", "fanout/gc")
    if work["state"] == "failed":
        raise _control.ControlError(f"the collection has failed: {work['error']}")
    node.print(
        work["found"],
        lambda found: _output.print_fields({**found, "seconds": f"{found['seconds']:.3f}"}.items()),
    )


@verb(app)
def why(vin: Annotated[str, typer.Argument(metavar="VIN", parser=_options.vin)], *, node: _control.NodeFlags) -> None:
    """Tell why a vehicle has not got its message, and what happens next."""
    view = node.call("GET", f"vehicles/{_control.name(vin)}/why")
    node.print(view, lambda view: print(f"{view['reason']}: {view['sentence']}\n{view['next']}"))
