"""The verbs of `queue`, `stream` and `capture`, except the flags of `create` and `change`.

The node knows what options there are and says what is wrong with one; nothing of it is repeated here.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from motorcade.cli import _control, _options, _output
from motorcade.cli._groups import verb

FARTHEST = 2**63 - 1  #: a position
LIMIT = 100  #: messages shown unless the caller says otherwise

Name = Annotated[str, typer.Argument(metavar="NAME")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
After = Annotated[int, typer.Option(min=0, max=FARTHEST, help="Start after this position.")]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of messages.")]


@dataclass(frozen=True)
class Noun:
    """Something that operators declare."""

    name: str
    plural: str
    columns: tuple[str, ...]  #: of `list`
    lost: str  #: what goes with it when it is deleted

    def path(self, name: str) -> str:
        """Return the path of one of them."""
        if not name:
            raise typer.BadParameter(f"a {self.name} has a name", param_hint="NAME")
        return f"{self.plural}/{_control.name(name)}"


def options(topics: list[str] | None = None, options: list[str] | None = None, **flags: object) -> dict[str, object]:
    """Make the body of a request of `--topic`, `--set` and flags of their own; each option once."""
    flags = {"topics": topics or None, **flags}
    body = _options.settings(options or [])
    for key, value in flags.items():
        if value is None:
            continue
        if key in body:
            raise typer.BadParameter(f"{key!r} is given by a flag of its own too", param_hint="--set")
        body[key] = value
    return body


def create(noun: Noun, name: str, body: dict[str, object], node: _control.NodeFlags) -> None:
    """Declare one."""
    _tell(noun, name, "created", node.call("POST", noun.path(name), body), node)


def change(noun: Noun, name: str, body: dict[str, object], node: _control.NodeFlags) -> None:
    """Give one other options; those that are not named stay as they are."""
    if not body:
        raise typer.BadParameter("nothing to change; name an option, for example by --set KEY=VALUE")
    _tell(noun, name, "changed", node.call("PATCH", noun.path(name), body), node)


def _tell(noun: Noun, name: str, done: str, answer: Any, node: _control.NodeFlags) -> None:
    node.print(answer, lambda _view: print(f"{noun.name} {name!r} is {done}"))


def add_list(app: typer.Typer, noun: Noun) -> None:
    """Add `list`."""

    @verb(app, "list", help=f"All {noun.plural} of the node, from its configuration and from commands.")
    def list_(*, node: _control.NodeFlags) -> None:
        print_list(noun, node.call("GET", noun.plural)["data"], node)


def print_list(noun: Noun, found: list[dict[str, Any]], node: _control.NodeFlags) -> None:
    """Print a line for each."""
    node.print(
        found, lambda views: _output.print_list(noun.columns, (dict(fields(view)) for view in views), noun.plural)
    )


def add_show(app: typer.Typer, noun: Noun) -> None:
    """Add `show`."""

    @verb(app, help=f"One {noun.name} in full: its options, and what became of its messages.")
    def show(name: Name, *, node: _control.NodeFlags) -> None:
        node.print(node.call("GET", noun.path(name)), print_fields)


def print_fields(view: dict[str, Any]) -> None:
    """Print everything about one."""
    _output.print_fields(fields(view))


def add_delete(app: typer.Typer, noun: Noun) -> None:
    """Add `delete`. It asks first, on a terminal."""

    @verb(app, help=f"Delete a {noun.name} {noun.lost}.")
    def delete(name: Name, yes: Yes = False, *, node: _control.NodeFlags) -> None:
        ask(f"Delete {noun.name} {name!r} {noun.lost}?", yes)
        _tell(noun, name, "deleted", node.call("DELETE", noun.path(name)), node)


def ask(question: str, yes: bool) -> None:
    """Go on only after a yes: the flag, or what is typed."""
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; confirm with the flag", param_hint="--yes")
    if not yes and not typer.confirm(question, err=True):
        print("error: nothing was deleted", file=sys.stderr)
        raise typer.Exit(1)


def add_read(app: typer.Typer, noun: Noun) -> None:
    """Add `read`: position, topic and payload, a line each; the payload is printed as the bytes it is."""

    @verb(app, help=f"Look at the messages of a {noun.name}, oldest first. Looking takes nothing out.")
    def read(name: Name, after: After = 0, limit: Limit = LIMIT, *, node: _control.NodeFlags) -> None:
        print_messages(messages(node.control, noun.path(name), after, limit), node.as_json)


def print_messages(found: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print one JSON document, or a line for each message."""
    if as_json:
        _output.print_json(list(found))
        return
    for message in found:
        print_message(message)
    sys.stdout.buffer.flush()


def print_message(message: dict[str, Any]) -> None:
    """Print position, topic and payload, not flushed."""
    text = message["payload"]
    payload = b64decode(text) if message["encoding"] == "base64" else text.encode()
    _output.write_bytes(f"{message['position']} {message['topic']} ".encode() + payload + b"\n")


def messages(
    control: _control.ControlClient, path: str, after: int, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the messages after a position, read page by page; at most `limit`."""
    return control.pages(f"{path}/messages", limit, key="after", after=after)


def fields(view: dict[str, Any]) -> list[tuple[str, object]]:
    """Flatten a view into lines: nested keys with a dot, a line for each entry of a list."""
    lines: list[tuple[str, object]] = []
    for name, value in view.items():
        if isinstance(value, dict):
            lines += [(f"{name}.{key}", inner) for key, inner in fields(value)]
        elif name == "topics":
            lines.append((name, " ".join(value)))
        elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
            lines += [(name, ", ".join(f"{key} {entry}" for key, entry in inner.items())) for inner in value]
        else:
            lines.append((name, _output.when(value) if name == "oldest" else value))
    return lines
