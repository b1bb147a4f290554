"""`motorcade config`: what a node would be, and is, configured with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from motorcade.cli import _control, _output
from motorcade.cli.serve import ConfigFile

app = typer.Typer(no_args_is_help=True, help="Check, show and reload the configuration.")


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="TOML file. [--config]")] = None,
    config: ConfigFile = None,
    as_json: _control.AsJson = False,
) -> None:
    """Whether a node would start with this file and the environment of this shell. Starts nothing."""
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
    config: ConfigFile = None,
    origin: Annotated[bool, typer.Option("--origin", help="Where each value comes from.")] = False,
    as_json: _control.AsJson = False,
) -> None:
    """Every key with the value a node would use. Secrets are hidden."""
    from motorcade import config as configuration

    loaded = configuration.load(config, os.environ, {})
    entries = list(loaded.entries())
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


@app.command()
def reload(
    http: _control.Http = _control.DEFAULT, token: _control.Token = None, as_json: _control.AsJson = False
) -> None:
    """Let a running node read its file again, as SIGHUP does. A wrong file is refused and the old values stay."""
    answer = _control.Control(http, token).call("POST", "config/reload")
    if as_json:
        _output.print_json(answer)
        return
    print("\n".join(answer["changed"] or ["nothing has changed"]))


@app.command()
def reference() -> None:
    """The page docs/configuration.md: every section, key, type and default."""
    from motorcade import config as configuration

    print(configuration.reference(), end="")
