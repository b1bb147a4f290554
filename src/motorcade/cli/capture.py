"""`motorcade capture`: rules that copy what is published to somewhere else."""

from __future__ import annotations

from typing import Annotated

import typer

from motorcade.cli import _control, _declared, _options
from motorcade.cli._groups import verb

CAPTURE = _declared.Noun(
    name="capture",
    plural="captures",
    columns=("name", "origin", "topics", "to", "captured", "failed", "pending", "problem"),
    lost="rule; what it has copied stays",
)

app = typer.Typer(no_args_is_help=True, help="Declare, list and delete rules that copy published messages.")

_TO = "stream:NAME|redis-stream:KEY|redis-channel:NAME"


@verb(app)
def create(
    name: _declared.Name,
    to: Annotated[str, typer.Option("--to", metavar=_TO, help="Destination of the copies.")],
    topics: _options.Topics = None,
    options: _options.Set = None,
    *,
    node: _control.NodeFlags,
) -> None:
    """Copy every message that is published to some topics. The rule is there again after a restart."""
    _declared.create(CAPTURE, name, _declared.options(topics, options, to=to), node)


@verb(app)
def change(
    name: _declared.Name,
    to: Annotated[str | None, typer.Option("--to", metavar=_TO, help="Destination of the copies.")] = None,
    topics: _options.Topics = None,
    options: _options.Set = None,
    *,
    node: _control.NodeFlags,
) -> None:
    """Give a rule other options while messages come; those that are not named stay as they are."""
    _declared.change(CAPTURE, name, _declared.options(topics, options, to=to), node)


_declared.add_list(app, CAPTURE)
_declared.add_show(app, CAPTURE)
_declared.add_delete(app, CAPTURE)
