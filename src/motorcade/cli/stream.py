"""`motorcade stream`: messages that are kept in order and can be read again."""

from __future__ import annotations

import typer

from motorcade.cli import _control, _declared, _options

STREAM = _declared.Noun(
    name="stream",
    plural="streams",
    columns=("name", "origin", "topics", "records", "bytes", "first", "last", "readers", "lag"),
    lost="with all messages in it",
)

app = typer.Typer(no_args_is_help=True, help="Declare, list, read and delete streams of a running node.")


@app.command()
def create(
    name: _declared.Name,
    topics: _options.Topics = None,
    retention: _options.Retention = None,
    options: _options.Set = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Declare a stream; readers subscribe to `$stream/NAME`. It is there again after a restart."""
    body = _declared.options(topics, options, retention=retention)
    _declared.create(STREAM, name, body, http, token, as_json)


@app.command()
def change(
    name: _declared.Name,
    topics: _options.Topics = None,
    retention: _options.Retention = None,
    options: _options.Set = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Give a stream other options while it is in use; those that are not named stay as they are."""
    body = _declared.options(topics, options, retention=retention)
    _declared.change(STREAM, name, body, http, token, as_json)


_declared.add_list(app, STREAM)
_declared.add_show(app, STREAM)
_declared.add_read(app, STREAM)
_declared.add_delete(app, STREAM)
