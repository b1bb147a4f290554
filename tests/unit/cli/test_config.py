"""`motorcade config`, and what `serve` refuses before it starts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from tests.support.node import ROOT
from tests.unit.cli.conftest import Run


def test_a_good_file_passes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[session]\nwindow = 5\n")
    done = run("config", "check", "m.toml")
    assert (0, "") == (done.returncode, done.stderr)
    assert {"ok": True, "file": "m.toml", "set": ["session.window"]} == json.loads(
        run("config", "check", "m.toml", "--json").stdout
    )


def test_a_bad_file_is_refused_with_line_and_key(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[session]\nwindwo = 5\n")
    for verb in (
        ("config", "check", "m.toml"),
        ("config", "show", "--config", "m.toml"),
        ("serve", "--config", "m.toml"),
    ):
        done = run(*verb)
        assert 1 == done.returncode
        assert "error: file m.toml:2: unknown key 'session.windwo'; did you mean 'window'?\n" == done.stderr


def test_show_names_origins_and_can_be_read_back(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[session]\nwindow = 5\n")
    nowhere = {"MOTORCADE_HTTP": "127.0.0.1:1"}  # whatever else runs on this machine
    env = nowhere | {"MOTORCADE_CONFIG": "m.toml", "MOTORCADE_SESSION__QUEUE": "7", "MOTORCADE_HTTP__TOKEN": "hush"}
    shown = json.loads(run("config", "show", "--origin", "--json", env=env).stdout)
    assert {"value": 5, "origin": "file m.toml:2"} == shown["session.window"]
    assert {"value": 7, "origin": "environment MOTORCADE_SESSION__QUEUE"} == shown["session.queue"]
    assert {"value": "***", "origin": "environment MOTORCADE_HTTP__TOKEN"} == shown["http.token"]
    assert "default" == shown["limits.max_connections"]["origin"]
    table = run("config", "show", "--origin", env=env).stdout
    (line,) = [line for line in table.splitlines() if line.startswith("session.window ")]
    assert ["session.window", "5", "file", "m.toml:2"] == line.split()
    plain = run("config", "show", env=env)
    assert 5 == tomllib.loads(plain.stdout)["session"]["window"]
    assert "hush" not in plain.stdout + table


def test_the_reference_is_the_page_in_docs(run: Run) -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == run("config", "reference").stdout


def test_a_noun_without_a_verb_is_wrong_usage(run: Run) -> None:
    done = run("config")
    assert (2, True) == (done.returncode, "reload" in done.stdout), "and its verbs are told"


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").stdout.startswith("motorcade ")
