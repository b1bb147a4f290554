"""The entry point before there is a command: Ctrl-C is no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.text import Text

from motorcade import cli
from tests.support.node import ROOT

#: Seconds for a process to start and to end, on a busy machine.
PATIENCE = 60.0

#: Stands where a library is looked for that the command line imports: it says that it is there, and stays.
SLOW = """
import sys
print("importing", flush=True)
sys.stdin.read()
sys.exit("nobody has come")
"""


def installed() -> list[str]:
    """What the installed command does, as pyproject.toml has it."""
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["motorcade"].partition(
        ":"
    )
    return ["-c", f"import sys; from {module} import {name}; sys.exit({name}())"]


@pytest.mark.parametrize("way", [["-m", "motorcade"], installed()], ids=["module", "command"])
def test_ctrl_c_while_it_imports_is_quiet(way: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, *way, "pipeline", "run", "audit"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "importing\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        assert (130, "") == (process.returncode, process.stderr.read() if process.stderr else None)
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_while_commands_are_put_together_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (130, ("", "")) == (ended.value.code, capsys.readouterr())


def _commands(command: Any) -> list[Any]:
    return [command, *(each for inner in getattr(command, "commands", {}).values() for each in _commands(inner))]


def test_help_shows_what_stands_in_brackets() -> None:
    """Defaults are told in brackets, which are markup if a letter follows: they vanished."""
    found = [
        (command.name, text)
        for command in _commands(typer.main.get_command(cli.app))
        for each in command.params
        if (text := getattr(each, "help", None)) and "[" in text
    ]
    assert found
    for name, text in found:
        assert Text.from_markup(text).plain == text.replace("\\[", "["), name
