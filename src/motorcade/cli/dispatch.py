"""`motorcade dispatch`: an elected leader hands messages to workers; both run in the foreground.

Options come from the section [dispatch] of the configuration. Flags are there for what differs from process to process
on one machine, and for read-only commands.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _control
from motorcade.cli._groups import verb
from motorcade.cli._output import print_fields, print_json, print_table, when
from motorcade.cli.serve import ConfigFile
from motorcade.core.words import as_text

if TYPE_CHECKING:
    from motorcade.dispatch.options import DispatchOptions
    from motorcade.dispatch.views import DeadLetterView, Status, WorkerView

app = typer.Typer(no_args_is_help=True, help="Hand messages from a Redis stream to workers, each processed once.")
dead = typer.Typer(no_args_is_help=True, help="Messages that were given up: look at them, try them again.")
app.add_typer(dead, name="dead")

Redis = Annotated[
    str | None, typer.Option("--redis", metavar="URL", help="redis://HOST:PORT or redis+cluster://HOST:PORT,…")
]


@dataclass(frozen=True)
class ProcessFlags:
    """The options that leaders and workers share."""

    secret_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with the secret that leaders and workers share."),
    ] = None
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Its certificate, PEM; with --tls-key.")] = None
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The private key of the certificate, PEM.")] = None
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="The CA of the other side's certificate, PEM.")] = (
        None
    )
    log_level: Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error. \\[info]")] = None
    log_format: Annotated[str | None, typer.Option("--log-format", help="auto, console or json. \\[auto]")] = None


@verb(app)
def leader(
    config: ConfigFile = None,
    redis: Redis = None,
    workers: Annotated[
        list[str] | None,
        typer.Option("--worker", metavar="HOST:PORT", help="A worker that does not register itself. May be repeated."),
    ] = None,
    intake: Annotated[str | None, typer.Option(metavar="stream|channel", help="Source of messages. \\[stream]")] = None,
    *,
    process: ProcessFlags,
) -> None:
    """Run a dispatcher until SIGTERM or SIGINT: it leads, or waits until it may.

    Prints a line with `ready` when it takes part in the election. Run two or more: one leads, and when it dies another
    one takes over.
    """
    options = _options(config, redis, workers=workers or None, intake=intake, **vars(process))
    from motorcade.dispatch.leader import run_leader

    _serve(lambda stop: run_leader(options, stop=stop, ready=_ready("leader")))


@verb(app)
def worker(
    config: ConfigFile = None,
    redis: Redis = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address to listen on. [127.0.0.1:9701]")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address in the worker registry, if not that of --listen.")
    ] = None,
    handler: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Handler of messages. \\[written as they are]")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Concurrent calls of an asynchronous handler. [8]")
    ] = None,
    *,
    process: ProcessFlags,
) -> None:
    """Run a worker until SIGTERM or SIGINT, and finish what was begun.

    Prints a line with `ready` when leaders can come. A message is parsed, given to the handler, and what the handler
    returns is written to the stream of processed messages; only then is it acknowledged.
    """
    flags: dict[str, Any] = {"listen": listen, "advertise": advertise, "handler": handler, "parallel": parallel}
    options = _options(config, redis, **flags, **vars(process))
    from motorcade.dispatch.handlers import load_handler
    from motorcade.dispatch.worker import run_worker

    function = load_handler(options.handler) if options.handler else None

    _serve(lambda stop: run_worker(options, function, stop=stop, ready=_ready("worker")))


@app.command()
def status(config: ConfigFile = None, redis: Redis = None, as_json: _control.AsJson = False) -> None:
    """Show the leader, the workers, the backlog and the dead letters."""
    options = _options(config, redis)
    from motorcade.dispatch.status import status as ask

    found = asyncio.run(ask(options))
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(found))
    else:
        _print_status(found)


@dead.command("list")
def list_dead(
    config: ConfigFile = None,
    redis: Redis = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Number.")] = 100,
    after: Annotated[str, typer.Option(metavar="ENTRY", help="Start after this one.")] = "",
    as_json: _control.AsJson = False,
) -> None:
    """List messages that were given up, oldest first, with the reason."""
    options = _options(config, redis)
    from motorcade.dispatch.status import dead_list

    letters = asyncio.run(dead_list(options, limit, after))
    if as_json:
        print_json([_letter(one) for one in letters])
        return
    columns = ("entry", "when", "deliveries", "worker", "reason", "payload")
    shown = [_letter(one) | {"when": when(one.time)} for one in letters]
    print_table(columns, [[one[column] for column in columns] for one in shown])


@dead.command("retry")
def retry(
    entries: Annotated[list[str] | None, typer.Argument(metavar="ENTRY…", help="As `dead list` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All current entries.")] = False,
    config: ConfigFile = None,
    redis: Redis = None,
    as_json: _control.AsJson = False,
) -> None:
    """Give messages another chance: each becomes a new message, and its letter is removed."""
    if bool(entries) == everything:
        raise typer.BadParameter("name entries, or give --all", param_hint="ENTRY")
    options = _options(config, redis)
    from motorcade.dispatch.status import dead_retry

    count = asyncio.run(dead_retry(options, entries or None))
    if as_json:
        print_json({"retried": count})
    else:
        print(f"{count} {'message' if count == 1 else 'messages'} published again")


# --- options ----------------------------------------------------------------------------------------------------------


def _options(
    config: ConfigFile, redis: str | None, log_level: str | None = None, log_format: str | None = None, **flags: Any
) -> DispatchOptions:
    """Load the section [dispatch], overridden by flags; set up logs as configured."""
    from motorcade import config as configuration
    from motorcade import log

    given = {f"dispatch.{key}": value for key, value in ({"redis": redis} | flags).items()}
    given |= {"log.level": log_level, "log.format": log_format}
    loaded = configuration.load(config, os.environ, {key: value for key, value in given.items() if value is not None})
    log.configure(loaded.config.log.level, loaded.config.log.format)
    return loaded.config.dispatch


# --- running ----------------------------------------------------------------------------------------------------------


def _ready(part: str) -> Callable[[str], None]:
    """Return a function that prints the `ready` line."""
    from motorcade import __version__

    return lambda where: print(f"motorcade {__version__} dispatch {part} ready  {where}", flush=True)


def _serve(run: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    if sys.platform == "win32":
        asyncio.run(_until_stopped(run))
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(run))


async def _until_stopped(run: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await run(stop)


# --- showing ----------------------------------------------------------------------------------------------------------


def _print_status(found: Status) -> None:
    view = found.view
    print_fields(
        [
            ("leader", found.leader or "none"),
            ("epoch", found.epoch),
            ("lease left", f"{found.lease_left:.1f} s"),
            ("messages/s", f"{view.messages_per_second:.0f}" if view is not None else ""),
            ("not read yet", found.lag),
            ("trimmed unread", found.trimmed),
            ("trimmed unfinished", found.unfinished),
            ("on their way", found.pending),
            ("processed", found.processed),
            ("dead", found.dead),
            ("sent again", view.redistributed if view is not None else ""),
            ("held up", view.held_up if view is not None else ""),
        ]
    )
    seen = {worker.worker: worker for worker in view.workers} if view is not None else {}
    if names := sorted({*seen, *found.registered}):
        print()
        columns = ("worker", "state", "in flight", "credit", "acknowledged", "faults", "problem")
        print_table(columns, [_worker_row(name, seen.get(name)) for name in names])


def _worker_row(name: str, seen: WorkerView | None) -> tuple[object, ...]:
    if seen is None:
        return (name, "registered", "", "", "", "", "no leader has told about it yet")
    faults = ", ".join(f"{fault} {count}" for fault, count in sorted(seen.faults.items()))
    return (name, seen.state, seen.in_flight, seen.credit, seen.acknowledged, faults, seen.problem)


def _letter(letter: DeadLetterView) -> dict[str, Any]:
    """Return a dead letter as a mapping; its payload as text if it is text."""
    payload, encoding = as_text(letter.payload)
    return {
        "entry": letter.entry,
        "id": letter.id,
        "time": letter.time,
        "deliveries": letter.deliveries,
        "worker": letter.worker,
        "reason": letter.reason,
        "payload": payload,
        "encoding": encoding,
    }
