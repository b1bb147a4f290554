"""`motorcade plugin`: what extends a running node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motorcade.cli import _control, _options, _output

app = typer.Typer(no_args_is_help=True, help="List, load and unload plugins of a running node.")
Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command("list")
def list_(
    http: _control.Http = _control.DEFAULT, token: _control.Token = None, as_json: _control.AsJson = False
) -> None:
    """Plugins of the node."""
    plugins = _control.ControlClient(http, token).call("GET", "plugins")["data"]
    if as_json:
        _output.print_json(plugins)
    elif plugins:
        columns = [name for name in ("name", "origin", "description") if name in plugins[0]]
        _output.print_table(columns, ([plugin.get(column) for column in columns] for plugin in plugins))
    else:
        print("no plugins")


@app.command()
def load(
    name: Name,
    path: Annotated[
        Path | None, typer.Option("--path", help="A .py file or package folder. \\[an installed plugin]")
    ] = None,
    options: _options.Set = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Load a plugin while clients stay connected."""
    body: dict[str, object] = {"config": _options.settings(options or [])}
    if path is not None:
        body["path"] = str(path.resolve())  # the node may run in another folder
    answer = _control.ControlClient(http, token).call("POST", f"plugins/{_control.name(name)}", body)
    if as_json:
        _output.print_json(answer)
    else:
        print(f"plugin {name!r} is loaded")


@app.command()
def unload(
    name: Name, http: _control.Http = _control.DEFAULT, token: _control.Token = None, as_json: _control.AsJson = False
) -> None:
    """Unload a plugin while clients stay connected."""
    answer = _control.ControlClient(http, token).call("DELETE", f"plugins/{_control.name(name)}")
    if as_json:
        _output.print_json(answer)
    else:
        print(f"plugin {name!r} is unloaded")
