"""The command line: `motorcade NOUN VERB [--json]`, one file per noun.

A verb imports what it needs when it runs, so that `motorcade --help` and shell completion stay quick.
Exit codes: 0 done, 1 refused or failed (the message is on standard error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, TextIO, cast

import typer

from motorcade import __version__
from motorcade.cli import (
    acl,
    capture,
    client,
    config,
    demo,
    dispatch,
    fanout,
    fleet,
    node,
    passwd,
    pipeline,
    plugin,
    pub,
    queue,
    serve,
    store,
    stream,
    sub,
    vehicle,
)
from motorcade.cli._groups import verb
from motorcade.cli._output import Terminal
from motorcade.core.errors import MotorcadeError
from motorcade.core.redaction import without_secrets
from motorcade.core.words import printable

app = typer.Typer(
    name="motorcade",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback of ours is for a bug report, not for decoration
    help="A message hub for vehicle fleets: an MQTT 3.1, 3.1.1 and 5 broker with plugins.",
)
app.command("serve")(serve.serve)
verb(app, "pub")(pub.pub)
verb(app, "sub")(sub.sub)
app.command("demo")(demo.demo)
app.add_typer(fanout.app, name="fanout")
app.add_typer(vehicle.app, name="vehicle")
app.add_typer(fleet.app, name="fleet")
app.add_typer(dispatch.app, name="dispatch")
app.add_typer(config.app, name="config")
app.add_typer(client.app, name="client")
app.add_typer(node.app, name="node")
app.add_typer(queue.app, name="queue")
app.add_typer(stream.app, name="stream")
app.add_typer(capture.app, name="capture")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(plugin.app, name="plugin")
app.add_typer(store.app, name="store")
app.command("passwd")(passwd.passwd)
app.add_typer(acl.app, name="acl")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"motorcade {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options before the noun."""


def main() -> None:
    """Run the `motorcade` command."""
    if sys.stdout.isatty():
        sys.stdout = cast("TextIO", Terminal(sys.stdout))
    try:
        app()
    except MotorcadeError as error:
        told = printable(without_secrets(str(error)), "\n")
        print(f"error: {told}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        # Inside a command Typer does this; outside are the moments in which it puts all commands together.
        raise SystemExit(130) from None
    except BrokenPipeError:
        # `motorcade sub … | head` is no failure; keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
