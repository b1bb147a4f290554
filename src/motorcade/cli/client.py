"""`motorcade client`: who is connected."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from motorcade.cli import _control, _output

app = typer.Typer(no_args_is_help=True, help="List, inspect and send away clients of a running node.")
ClientId = Annotated[str, typer.Argument(metavar="CLIENT_ID")]

_COLUMNS = ("client_id", "username", "connected", "host", "listener", "protocol", "subscriptions", "inflight", "queued")
_TIMES = {"connected_at", "disconnected_at", "expires_at", "created_at"}


@app.command("list")
def list_(
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many. \\[all]")] = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """All clients with a session, connected or away."""
    clients = list(_control.ControlClient(http, token).pages("clients", limit))
    if as_json:
        _output.print_json(clients)
    elif clients:
        _output.print_table(_COLUMNS, ([client.get(column) for column in _COLUMNS] for client in clients))
    else:
        print("no clients")


@app.command()
def show(
    client_id: ClientId,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Everything the node knows about one client."""
    answer = _control.ControlClient(http, token).call("GET", f"clients/{_control.name(client_id)}")
    if as_json:
        _output.print_json(answer)
    else:
        _output.print_fields(_fields(answer))


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


@app.command()
def kick(
    client_id: ClientId,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Send a client away (it may come back); if it is away already, end its session."""
    answer = _control.ControlClient(http, token).call("DELETE", f"clients/{_control.name(client_id)}")
    if as_json:
        _output.print_json(answer)
    else:
        print(f"client {client_id!r}: {answer['result']}")
