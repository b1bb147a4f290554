"""`motorcade config`: what a node would be, and is, configured with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from motorcade.cli import _control, _output
from motorcade.cli._groups import verb
from motorcade.cli.serve import ConfigFile

app = typer.Typer(no_args_is_help=True, help="Check, show and reload the configuration.")


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="TOML file. [--config]")] = None,
    config: ConfigFile = None,
    as_json: _control.AsJson = False,
) -> None:
    """Check whether a node would start with this file and the environment of this shell. Starts nothing."""
    from motorcade import config as configuration

    path = file or config
    loaded = configuration.load(path, os.environ, {})
    configuration.check_plugins(loaded)
    changed = [key for key, _, origin in loaded.entries() if origin != configuration.DEFAULT]
    if as_json:
        _output.print_json({"ok": True, "file": str(path) if path else None, "set": changed})
    else:
        print(f"{path or 'defaults and environment'}: good; {len(changed)} keys are set")


@app.command()
def show(
    context: typer.Context,
    config: ConfigFile = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show the origin of each value.")] = False,
    http: Annotated[
        str | None, typer.Option("--http", metavar="HOST:PORT", envvar="MOTORCADE_HTTP", help="Control port of a node.")
    ] = None,
    token: _control.Token = None,
    as_json: _control.AsJson = False,
) -> None:
    """Show every key with its value in the running node; with --config, or if none runs, as a node would start.

    Secrets are hidden. Which of them is shown is told on standard error.
    """
    from motorcade import config as configuration

    sources = {name: context.get_parameter_source(name) for name in ("config", "http")}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    entries, shown = _entries(config, http, token, given)
    if not as_json:
        print(f"configuration: {shown}", file=sys.stderr)
    if as_json and origin:
        _output.print_json({key: {"value": value, "origin": source} for key, value, source in entries})
    elif as_json:
        _output.print_json({key: value for key, value, _ in entries})
    elif origin:
        _output.print_table(
            ("key", "value", "origin"), ((key, configuration.toml(value), source) for key, value, source in entries)
        )
    else:
        for key, value, _ in entries:
            print(f"{key} = {configuration.toml(value)}")


def _entries(
    config: Path | None, http: str | None, token: str | None, given: set[str]
) -> tuple[list[tuple[str, object, str]], str]:
    """Return key, value and origin of everything, and whose they are; `given` are the options of the command line."""
    from motorcade import config as configuration

    loaded = configuration.load(config, os.environ, {})
    would = f"a node that would start with {config or 'defaults'} in this shell"
    if "config" in given and "http" not in given:
        return list(loaded.entries()), would
    address = http or next((f"{a.host}:{a.port}" for a in configuration.addresses(loaded.config.http.bind)), "")
    if address:
        control = _control.ControlClient(address, token or loaded.config.http.token)
        try:
            name, answer = control.call("GET", "node")["node"], control.call("GET", "config")
        except _control.UnreachableError:
            if "http" in given:
                raise
        else:
            found = [(each["key"], each["value"], each["origin"]) for each in answer["data"]]
            return found, f"node {name} at http://{address}"
    missing = f"; none answers at http://{address}" if address else ""
    return list(loaded.entries()), would + missing


@verb(app)
def reload(*, node: _control.NodeFlags) -> None:
    """Let a running node read its file again, as SIGHUP does. A wrong file is refused and the old values stay."""
    answer = node.call("POST", "config/reload")
    node.print(answer, lambda view: print("\n".join(view["changed"] or ["nothing has changed"])))


@app.command()
def reference() -> None:
    """Print the page docs/configuration.md: every section, key, type and default."""
    from motorcade import config as configuration

    print(configuration.reference(), end="")
