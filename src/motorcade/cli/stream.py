"""`motorcade stream`: messages that are kept in order and can be read again."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from motorcade.cli import _control, _declared, _options
from motorcade.cli._groups import verb

STREAM = _declared.Noun(
    name="stream",
    plural="streams",
    columns=("name", "origin", "topics", "records", "bytes", "first", "last", "readers", "lag"),
    lost="with all messages in it",
)

app = typer.Typer(no_args_is_help=True, help="Declare, list, read and delete streams of a running node.")


@dataclass(frozen=True)
class StreamFlags:
    """The options of a stream that is created or changed."""

    topics: _options.Topics = None
    retention: _options.Retention = None
    options: _options.Set = None


@verb(app)
def create(name: _declared.Name, *, given: StreamFlags, node: _control.NodeFlags) -> None:
    """Declare a stream; readers subscribe to `$stream/NAME`. It is there again after a restart."""
    _declared.create(STREAM, name, _declared.options(**vars(given)), node)


@verb(app)
def change(name: _declared.Name, *, given: StreamFlags, node: _control.NodeFlags) -> None:
    """Give a stream other options while it is in use; those that are not named stay as they are."""
    _declared.change(STREAM, name, _declared.options(**vars(given)), node)


_declared.add_list(app, STREAM)
_declared.add_show(app, STREAM)
_declared.add_read(app, STREAM)
_declared.add_delete(app, STREAM)
