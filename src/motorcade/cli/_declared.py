"""What `queue`, `stream` and `capture` have in common: everything but the flags of `create` and `change`.

The node knows what options there are and says what is wrong with one; nothing of it is repeated here.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from motorcade.cli import _control, _options, _output

Name = Annotated[str, typer.Argument(metavar="NAME")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_PAGE = 500  # messages per request
_LIMIT = 100  # messages shown unless the caller says otherwise


@dataclass(frozen=True)
class Noun:
    """Something that operators declare."""

    name: str
    plural: str
    columns: tuple[str, ...]  #: of `list`
    lost: str  #: what goes with it when it is deleted

    def path(self, name: str) -> str:
        """Where one of them is found."""
        if not name:
            raise typer.BadParameter(f"a {self.name} has a name", param_hint="NAME")
        return f"{self.plural}/{_control.name(name)}"

    def call(self, http: str, token: str | None, method: str, name: str, body: object = None) -> Any:
        """One request about one of them."""
        return _control.Control(http, token).call(method, self.path(name), body)


def options(topics: list[str] | None, given: list[str] | None, **flags: object) -> dict[str, object]:
    """The body of a request, of `--topic`, `--set` and flags of their own; each option once."""
    flags = {"topics": topics or None, **flags}
    body = _options.settings(given or [])
    for key, value in flags.items():
        if value is None:
            continue
        if key in body:
            raise typer.BadParameter(f"{key!r} is given by a flag of its own too", param_hint="--set")
        body[key] = value
    return body


def create(noun: Noun, name: str, body: dict[str, object], http: str, token: str | None, as_json: bool) -> None:
    """Declare one."""
    _answered(noun, name, "created", noun.call(http, token, "POST", name, body), as_json)


def change(noun: Noun, name: str, body: dict[str, object], http: str, token: str | None, as_json: bool) -> None:
    """Give one other options; those that are not named stay as they are."""
    if not body:
        raise typer.BadParameter("nothing to change; name an option, for example by --set KEY=VALUE")
    _answered(noun, name, "changed", noun.call(http, token, "PATCH", name, body), as_json)


def _answered(noun: Noun, name: str, done: str, answer: Any, as_json: bool) -> None:
    if as_json:
        _output.print_json(answer)
    else:
        print(f"{noun.name} {name!r} is {done}")


def add_list(app: typer.Typer, noun: Noun) -> None:
    """`list`."""

    @app.command("list", help=f"All {noun.plural} of the node, from its configuration and from commands.")
    def list_(
        http: _control.Http = _control.DEFAULT, token: _control.Token = None, as_json: _control.AsJson = False
    ) -> None:
        found = _control.Control(http, token).call("GET", noun.plural)["data"]
        if as_json:
            _output.print_json(found)
        elif found:
            rows = [dict(_fields(entry)) for entry in found]
            columns = [column for column in noun.columns if any(column in row for row in rows)]
            _output.print_table(columns, ([row.get(column) for column in columns] for row in rows))
        else:
            print(f"no {noun.plural}")


def add_show(app: typer.Typer, noun: Noun) -> None:
    """`show`."""

    @app.command(help=f"One {noun.name} in full: its options, and what became of its messages.")
    def show(
        name: Name,
        http: _control.Http = _control.DEFAULT,
        token: _control.Token = None,
        as_json: _control.AsJson = False,
    ) -> None:
        answer = noun.call(http, token, "GET", name)
        if as_json:
            _output.print_json(answer)
        else:
            _output.print_fields(_fields(answer))


def add_delete(app: typer.Typer, noun: Noun) -> None:
    """`delete`. Asks first, where there is somebody to ask."""

    @app.command(help=f"Delete a {noun.name} {noun.lost}.")
    def delete(
        name: Name,
        yes: Yes = False,
        http: _control.Http = _control.DEFAULT,
        token: _control.Token = None,
        as_json: _control.AsJson = False,
    ) -> None:
        if not yes and not sys.stdin.isatty():
            raise typer.BadParameter("there is no terminal to ask on; say that you mean it", param_hint="--yes")
        if not yes and not typer.confirm(f"Delete {noun.name} {name!r} {noun.lost}?", err=True):
            print("error: nothing was deleted", file=sys.stderr)
            raise typer.Exit(1)
        _answered(noun, name, "deleted", noun.call(http, token, "DELETE", name), as_json)


def add_read(app: typer.Typer, noun: Noun) -> None:
    """`read`: position, topic and payload, a line each; the payload is printed as the bytes it is."""

    @app.command(help=f"Look at the messages of a {noun.name}, oldest first. Looking takes nothing out.")
    def read(
        name: Name,
        after: Annotated[int, typer.Option(min=0, help="Begin behind this position.")] = 0,
        limit: Annotated[int, typer.Option(min=1, help="At most so many messages.")] = _LIMIT,
        http: _control.Http = _control.DEFAULT,
        token: _control.Token = None,
        as_json: _control.AsJson = False,
    ) -> None:
        found = _messages(_control.Control(http, token), noun.path(name), after, limit)
        if as_json:
            _output.print_json(list(found))
            return
        for message in found:
            text = message["payload"]
            payload = b64decode(text) if message["encoding"] == "base64" else text.encode()
            sys.stdout.buffer.write(f"{message['position']} {message['topic']} ".encode() + payload + b"\n")
        sys.stdout.buffer.flush()


def _messages(control: _control.Control, path: str, after: int, limit: int) -> Iterator[dict[str, Any]]:
    """Page by page, as they are printed."""
    cursor: str | None = str(after)
    while cursor is not None and limit > 0:
        query = urlencode({"after": cursor, "limit": min(_PAGE, limit)})
        page = control.call("GET", f"{path}/messages?{query}")
        yield from page["data"]
        limit -= len(page["data"])
        cursor = page["meta"]["cursor"]


def _fields(view: dict[str, Any]) -> list[tuple[str, object]]:
    """A view as lines: a table under its name, a line for each of many."""
    fields: list[tuple[str, object]] = []
    for name, value in view.items():
        if isinstance(value, dict):
            fields += [(f"{name}.{key}", inner) for key, inner in _fields(value)]
        elif name == "topics":
            fields.append((name, " ".join(value)))
        elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
            fields += [(name, ", ".join(f"{key} {entry}" for key, entry in inner.items())) for inner in value]
        else:
            fields.append((name, _output.when(value) if name == "oldest" else value))
    return fields
