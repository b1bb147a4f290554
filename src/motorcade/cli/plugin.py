"""`motorcade plugin`: what extends a running node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motorcade.cli import _control, _options, _output
from motorcade.cli._groups import verb

app = typer.Typer(no_args_is_help=True, help="List, load and unload plugins of a running node.")
Name = Annotated[str, typer.Argument(metavar="NAME")]


@verb(app, "list")
def list_(*, node: _control.NodeFlags) -> None:
    """List the plugins of the node."""
    plugins = node.call("GET", "plugins")["data"]
    node.print(plugins, lambda found: _output.print_list(("name", "origin", "description"), found, "plugins"))


@verb(app)
def load(
    name: Name,
    path: Annotated[
        Path | None, typer.Option("--path", help="A .py file or package folder. \\[an installed plugin]")
    ] = None,
    options: _options.Set = None,
    *,
    node: _control.NodeFlags,
) -> None:
    """Load a plugin while clients stay connected."""
    body: dict[str, object] = {"config": _options.settings(options or [])}
    if path is not None:
        body["path"] = str(path.resolve())  # the node may run in another folder
    answer = node.call("POST", f"plugins/{_control.name(name)}", body)
    node.print(answer, lambda _view: print(f"plugin {name!r} is loaded"))


@verb(app)
def unload(name: Name, *, node: _control.NodeFlags) -> None:
    """Unload a plugin while clients stay connected."""
    answer = node.call("DELETE", f"plugins/{_control.name(name)}")
    node.print(answer, lambda _view: print(f"plugin {name!r} is unloaded"))
