"""`motorcade queue`: messages that several consumers share."""

from __future__ import annotations

from typing import Annotated

import typer

from motorcade.cli import _control, _declared, _options

QUEUE = _declared.Noun(
    name="queue",
    plural="queues",
    columns=("name", "origin", "kind", "topics", "messages", "inflight", "consumers", "dead_letter"),
    lost="with all messages in it",
)

app = typer.Typer(no_args_is_help=True, help="Declare, list, read and delete queues of a running node.")

Kind = Annotated[str | None, typer.Option(metavar="regular|last_value", help="last_value keeps one message per key.")]
Strategy = Annotated[
    str | None, typer.Option(metavar="round_robin|random|least_inflight", help="Who gets the next message.")
]
DeadLetter = Annotated[
    str | None, typer.Option("--dead-letter", metavar="QUEUE", help="Where messages go that nobody could handle.")
]


@app.command()
def create(
    name: _declared.Name,
    topics: _options.Topics = None,
    kind: Kind = None,
    strategy: Strategy = None,
    retention: _options.Retention = None,
    dead_letter: DeadLetter = None,
    options: _options.Set = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Declare a queue; consumers subscribe to `$queue/NAME`. It is there again after a restart."""
    body = _declared.options(
        topics, options, kind=kind, strategy=strategy, retention=retention, dead_letter=dead_letter
    )
    _declared.create(QUEUE, name, body, http, token, as_json)


@app.command()
def change(
    name: _declared.Name,
    topics: _options.Topics = None,
    kind: Kind = None,
    strategy: Strategy = None,
    retention: _options.Retention = None,
    dead_letter: DeadLetter = None,
    options: _options.Set = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Give a queue other options while it is in use; those that are not named stay as they are."""
    body = _declared.options(
        topics, options, kind=kind, strategy=strategy, retention=retention, dead_letter=dead_letter
    )
    _declared.change(QUEUE, name, body, http, token, as_json)


_declared.add_list(app, QUEUE)
_declared.add_show(app, QUEUE)
_declared.add_read(app, QUEUE)
_declared.add_delete(app, QUEUE)
