"""`motorcade client`: who is connected."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from motorcade.cli import _control, _output
from motorcade.cli._groups import verb

app = typer.Typer(no_args_is_help=True, help="List, inspect and send away clients of a running node.")
ClientId = Annotated[str, typer.Argument(metavar="CLIENT_ID")]

_COLUMNS = (
    *("client_id", "username", "node", "connected", "host"),
    *("listener", "protocol", "subscriptions", "inflight", "queued"),
)
_TIMES = {"connected_at", "disconnected_at", "expires_at", "created_at"}


@verb(app, "list")
def list_(
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number. \\[all]")] = None,
    of: Annotated[str, typer.Option("--node", help="Only clients of this node of the cluster. \\[all]")] = "",
    *,
    node: _control.NodeFlags,
) -> None:
    """List clients with a session, connected or not, of all nodes of the cluster."""
    clients = list(node.control.pages("clients", limit, node=of))
    node.print(clients, lambda found: _output.print_list(_COLUMNS, found, "clients"))


@verb(app)
def show(client_id: ClientId, *, node: _control.NodeFlags) -> None:
    """Show everything the node knows about one client, whichever node of the cluster it is connected to."""
    answer = node.call("GET", f"clients/{_control.name(client_id)}")
    node.print(answer, lambda view: _output.print_fields(_fields(view)))


def _fields(detail: dict[str, Any]) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = []
    for name, value in detail.items():
        if name == "subscriptions" and isinstance(value, list):
            fields += [("subscribed", f"{entry['filter']} (QoS {entry['qos']})") for entry in value]
        elif isinstance(value, dict):
            inner = _fields(value)
            fields += inner if name in ("client", "data") else [(f"{name}.{key}", entry) for key, entry in inner]
        else:
            fields.append((name, _output.when(value) if name in _TIMES else value))
    return fields


@verb(app)
def kick(client_id: ClientId, *, node: _control.NodeFlags) -> None:
    """Send a client away (it may come back), wherever it is connected; if it is away already, end its session."""
    answer = node.call("DELETE", f"clients/{_control.name(client_id)}")
    node.print(answer, lambda view: print(f"client {client_id!r}: {view['result']}"))
    for name, why in answer.get("unanswered", {}).items():
        print(f"no answer from node {name}: {why}", file=sys.stderr)
