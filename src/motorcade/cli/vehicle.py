"""`motorcade vehicle`: what the fan-out has for one vehicle."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from motorcade.cli import _control, _options, _output
from motorcade.cli._groups import verb

app = typer.Typer(no_args_is_help=True, help="Look at a vehicle: what waits for it and what it has got.")

_WAITING = ("delivery_id", "request_id", "state", "priority", "attempts", "size", "accepted_at", "expires_at")
_HISTORY = ("delivery_id", "request_id", "state", "time", "attempt", "reason")
_TIMES = {"accepted_at", "expires_at", "time", "sent_at", "until", "seen_at"}


@app.callback()
def _noun() -> None:
    """Keep `show` a verb of its own while it is the only one."""


@verb(app)
def show(vin: Annotated[str, typer.Argument(metavar="VIN", parser=_options.vin)], *, node: _control.NodeFlags) -> None:
    """Show the backlog of a vehicle, what is in flight, its history, and why it has not got the next message."""
    node.print(node.call("GET", f"vehicles/{_control.name(vin)}"), _print)


def _print(view: dict[str, Any]) -> None:
    why = view["why"]
    seen = "connected_since" if view["connected"] else "last_seen"
    _output.print_fields(
        [
            ("vin", view["vin"]),
            ("connected", view["connected"]),
            *([(seen, _output.when(view["seen_at"]))] if view["seen_at"] else []),
            ("subscribed", f"{'yes' if view['subscribed'] else 'no'} ({view['filter']})"),
            ("pending", view["pending"]),
            ("why", f"{why['reason']}: {why['sentence']}"),
            ("next", why["next"]),
        ]
    )
    waiting = ([view["in_flight"]] if view["in_flight"] else []) + view["waiting"]
    if waiting:
        print("\nWaiting:")
        _output.print_table(_WAITING, ([_cell(entry, name) for name in _WAITING] for entry in waiting))
        if view["pending"] > len(waiting):
            print(f"… and {view['pending'] - len(waiting)} more")
    if view["history"]:
        print("\nHistory, newest first:")
        _output.print_table(_HISTORY, ([_cell(entry, name) for name in _HISTORY] for entry in view["history"]))


def _cell(entry: dict[str, Any], name: str) -> object:
    return _output.when(entry[name]) if name in _TIMES else entry[name]
