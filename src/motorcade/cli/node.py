"""`motorcade node`: the nodes of a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from motorcade.cli import _control, _progress
from motorcade.cli._groups import verb
from motorcade.core.errors import MotorcadeError
from motorcade.core.words import printable

app = typer.Typer(no_args_is_help=True, help="List the nodes of a cluster, and send the clients of one elsewhere.")

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the node. \\[the one that is asked]")]
Rate = Annotated[
    float | None, typer.Option("--rate", min=0.1, help="Clients per second. \\[cluster.drain_rate of the node]")
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when it has begun.")]

LOOK: Final = 0.25  #: seconds between two looks at how far it is
TELL: Final = 5.0  #: seconds between two lines of progress, where no person watches
SILENT: Final = 30.0  #: seconds that a node may be silent while it is waited for
_COLUMNS = ("name", "state", "address", "up", "version", "link", "clients", "sessions")
_MS: Final = 0.001  #: clocks of event loops tell no less
_GONE: Final = {"clients": 0, "attached": 0}
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


@verb(app, "list")
def list_(*, node: _control.NodeFlags) -> None:
    """List all nodes of the cluster, as the node that is asked sees them.

    link: round trip between it and the other one.
    """
    nodes = sorted(node.control.pages("nodes"), key=lambda entry: (len(entry["name"]), entry["name"], entry["id"]))
    now = time.time()
    node.print(nodes, lambda found: _print([_row(entry, now) for entry in found]))


def _print(rows: list[dict[str, object]]) -> None:
    """Print a table that is narrower than 80 columns, unless names or addresses are long."""
    lines = [list(_COLUMNS), *([printable(str(row[column])) for column in _COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_COLUMNS))]
    for line in lines:
        print("  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip())


def _row(entry: dict[str, Any], now: float) -> dict[str, object]:
    if entry["here"]:
        link = "here"
    elif entry["linked"]:
        link = f"{entry['round_trip'] * 1000:.0f} ms" if entry["round_trip"] >= _MS else "<1 ms"
    else:
        link = "down"
    return {
        "name": entry["name"],
        "state": entry["drain"]["state"] if entry["drain"] else entry["state"],
        "address": entry["address"],
        "up": _age(now - entry["since"]),
        "version": entry["software"],
        "link": link,
        "clients": "?" if entry["clients"] is None else entry["clients"],
        "sessions": "?" if entry["sessions"] is None else entry["sessions"],
    }


def _age(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return f"{max(0, int(seconds))} s"


@verb(app)
def drain(
    name: Name = "",
    rate: Rate = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Let it take clients again.")] = False,
    no_wait: NoWait = False,
    node: _control.NodeFlags,
) -> None:
    """Send the clients of a node to the others, and let it take no new ones.

    It stays a member until it is stopped, and takes clients again after `--resume`. Sessions that last are served by
    the others as soon as their client connects there.
    """
    name = name or _asked(node)
    path = f"nodes/{_control.name(name)}/drain"
    if resume:
        entry = node.call("DELETE", path)
        node.print(entry, lambda found: print(f"{found['name']} takes clients again"))
        return
    entry = node.call("POST", path, _body(rate))
    if not no_wait:
        entry = _wait(node, entry)
        if entry["drain"] is None:
            raise MotorcadeError(f"{name} takes clients again: its drain was ended by another command")
    node.print(entry, _tell)


@verb(app)
def leave(
    name: Name = "",
    rate: Rate = None,
    *,
    permanent: Annotated[
        bool, typer.Option("--permanent", help="It will not come back: MQTT 5 clients are told so (0x9D).")
    ] = False,
    no_wait: NoWait = False,
    node: _control.NodeFlags,
) -> None:
    """Drain a node, have it leave the cluster, and end it (exit code 0).

    A node of `motorcade serve --nodes`, and one that a service manager restarts, is started again then.
    """
    name = name or _asked(node)
    more = {"permanent": True} if permanent else {}
    entry = node.call("POST", f"nodes/{_control.name(name)}/leave", _body(rate) | more)
    if not no_wait:
        entry = _wait(node, entry, leaves=True)
    node.print(entry, _tell)


def _asked(node: _control.NodeFlags) -> str:
    name: str = node.call("GET", "node")["node"]
    return name


def _body(rate: float | None) -> dict[str, Any]:
    return {} if rate is None else {"rate": rate}


def _wait(node: _control.NodeFlags, entry: dict[str, Any], *, leaves: bool = False) -> dict[str, Any]:
    """Follow a drain to its end; how the node was then, or before it was gone."""
    path = f"nodes/{_control.name(entry['id'])}"
    heard_at = time.monotonic()
    with _shown() as tell:
        while True:
            if entry["drain"] is None or (not leaves and entry["drain"]["state"] == "drained"):
                return entry
            tell(f"{entry['name']}: {_left(entry)}")
            time.sleep(LOOK)
            try:
                found = node.call("GET", path)
            except _control.UnreachableError:
                if leaves and entry["here"]:
                    return entry | _GONE  # it has ended
                raise
            except _control.ControlError as error:
                if leaves and error.code in {"NOT_FOUND", "UNAVAILABLE"}:
                    return entry | _GONE  # no member of this incarnation any more
                raise
            if found["clients"] is not None:
                entry, heard_at = found, time.monotonic()
            elif time.monotonic() - heard_at > SILENT:
                raise MotorcadeError(f"{entry['name']} has not answered for {SILENT:g} s; it may go on with its drain")


def _left(entry: dict[str, Any]) -> str:
    waiting = max(0, entry["attached"] - entry["clients"])
    more = f", {waiting} sessions to be written down" if waiting else ""
    return f"{entry['clients']} of {entry['drain']['clients_before']} clients left{more}"


def _tell(entry: dict[str, Any]) -> None:
    name, drain_ = entry["name"], entry["drain"]
    if drain_["leaves"]:
        print(f"{name} leaves the cluster" if entry["clients"] or entry["attached"] else f"{name} has left the cluster")
        if drain_["restarts"]:
            print("`motorcade serve --nodes`, which runs it, starts it again", file=sys.stderr)
    elif drain_["state"] == "drained":
        print(f"{name} is drained: {drain_['clients_before']} clients sent away in {drain_['seconds']:.1f} s")
    else:
        print(f"{name} drains: {_left(entry)}")


@contextmanager
def _shown() -> Iterator[Any]:
    """Show progress on standard error: a line that changes, or one now and then if it is no terminal."""
    if sys.stderr.isatty():
        with _progress.display(quiet=False) as screen:
            yield screen.tell
        return
    told_at = time.monotonic()

    def tell(words: str) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TELL:
            told_at = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    yield tell
