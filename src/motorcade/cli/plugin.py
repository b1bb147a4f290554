"""`motorcade plugin`: what extends a running node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from motorcade.cli import _control, _output

app = typer.Typer(no_args_is_help=True, help="List, load and unload plugins of a running node.")
Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command("list")
def list_(
    http: _control.Http = _control.DEFAULT, token: _control.Token = None, as_json: _control.AsJson = False
) -> None:
    """Plugins of the node."""
    plugins = _control.Control(http, token).call("GET", "plugins")["data"]
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
        Path | None, typer.Option("--path", help="A .py file or package folder. [an installed plugin]")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Its configuration; VALUE is JSON, else text."),
    ] = None,
    http: _control.Http = _control.DEFAULT,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Load a plugin while clients stay connected."""
    body: dict[str, object] = {"config": _settings(options or [])}
    if path is not None:
        body["path"] = str(path.resolve())  # the node may run in another folder
    answer = _control.Control(http, token).call("POST", f"plugins/{_control.name(name)}", body)
    if as_json:
        _output.print_json(answer)
    else:
        print(f"plugin {name!r} is loaded")


@app.command()
def unload(
    name: Name, http: _control.Http = _control.DEFAULT, token: _control.Token = None, as_json: _control.AsJson = False
) -> None:
    """Unload a plugin while clients stay connected."""
    answer = _control.Control(http, token).call("DELETE", f"plugins/{_control.name(name)}")
    if as_json:
        _output.print_json(answer)
    else:
        print(f"plugin {name!r} is unloaded")


def _settings(options: list[str]) -> dict[str, object]:
    """`a.b=1` as {"a": {"b": 1}}."""
    tree: dict[str, object] = {}
    for option in options:
        key, found, text = option.partition("=")
        if not found or not all(key.split(".")):
            raise typer.BadParameter(f"{option!r}; write KEY=VALUE", param_hint="--set")
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                raise typer.BadParameter(f"{option!r}: {section!r} is a value already", param_hint="--set")
            place = inner
        try:
            place[last] = json.loads(text)
        except ValueError:
            place[last] = text
    return tree
