"""Verbs that speak to a running node over its control port."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from motorcade.config import DEFAULT_PLUGINS
from tests.support import wire
from tests.support.local import LocalNode
from tests.unit.cli.conftest import Run

PLUGIN = '''
import msgspec
from motorcade.extension.plugin import Plugin

class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: int = 1

class Mine(Plugin):
    """Does nothing."""
    Config = Config
    description = "does nothing"
'''


@pytest.fixture
def address(node: LocalNode) -> tuple[str, str]:
    return node.at


def test_clients_are_listed_shown_and_sent_away(run: Run, node: LocalNode, address: tuple[str, str]) -> None:
    name = "a client/with?an odd%name"
    with wire.Client(node) as client:
        assert 0 == client.connect(name).reason
        client.subscribe("some/#", 1)
        listed = json.loads(run("client", "list", *address, "--json").stdout)
        assert [name] == [entry["client_id"] for entry in listed if entry["client_id"] == name]
        assert name in run("client", "list", *address).stdout
        assert 1 == len(json.loads(run("client", "list", "--limit", 1, *address, "--json").stdout))
        shown = json.loads(run("client", "show", name, *address, "--json").stdout)
        assert ["some/#"] == [entry["filter"] for entry in shown["subscriptions"]]
        assert re.search(r"subscribed +some/# \(QoS 1\)", run("client", "show", name, *address).stdout)
        assert 0 == run("client", "kick", name, *address).returncode
        assert 0x98 == client.expect(wire.DISCONNECT).reason
    gone = run("client", "show", name, *address)
    assert 1 == gone.returncode
    assert f"there is no client {name!r}" in gone.stderr


def test_plugins_are_loaded_and_unloaded(run: Run, address: tuple[str, str], tmp_path: Path) -> None:
    """A path is meant as the caller sees it, whatever folder the node runs in."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "mine.py").chmod(0o644)
    loaded = run("plugin", "load", "mine", "--path", "mine.py", "--set", "level=3", *address)
    assert (0, "plugin 'mine' is loaded\n", "") == (loaded.returncode, loaded.stdout, loaded.stderr)
    listed = {entry["name"]: entry for entry in json.loads(run("plugin", "list", *address, "--json").stdout)}
    assert {*DEFAULT_PLUGINS, "mine"} == set(listed)
    assert "does nothing" in run("plugin", "list", *address).stdout
    again = run("plugin", "load", "mine", "--path", "mine.py", *address)
    assert 1 == again.returncode
    assert "loaded already" in again.stderr
    assert 0 == run("plugin", "unload", "mine", *address).returncode
    assert 1 == run("plugin", "unload", "mine", *address).returncode


def test_reload_reads_the_file_again_and_refuses_a_bad_one(run: Run) -> None:
    with LocalNode("[session]\nwindow = 5\n") as node:
        address, file = node.at, node.file
        file.write_text("[session]\nwindow = 6\n")
        assert "session.window has changed" in run("config", "reload", *address).stdout
        file.write_text("[session]\nwindwo = 6\n")
        refused = run("config", "reload", *address)
        assert 1 == refused.returncode
        assert f"{file}:2: unknown key 'session.windwo'" in refused.stderr
        with wire.Client(node) as client:
            assert 0 == client.connect("still-served").reason


def test_a_token_is_asked_for_and_shown(run: Run, tmp_path: Path) -> None:
    """Also from a file, which no list of processes shows; one that cannot be read is named."""
    file = tmp_path / "token"
    file.write_text("hush\n")
    with LocalNode('[http]\ntoken = "hush"\n') as node:
        address = node.at
        assert 1 == run("client", "list", *address).returncode
        assert 0 == run("client", "list", *address, "--token", "hush").returncode
        assert 0 == run("client", "list", *address, env={"MOTORCADE_TOKEN": "hush"}).returncode
        assert 0 == run("client", "list", *address, "--token", f"file://{file}").returncode
        assert 0 == run("client", "list", *address, env={"MOTORCADE_TOKEN": f"file://{file}"}).returncode
        file.unlink()
        refused = run("client", "list", *address, "--token", f"file://{file}")
        assert 1 == refused.returncode
        assert f"--token (MOTORCADE_TOKEN): cannot read {file}: No such file or directory" in refused.stderr
