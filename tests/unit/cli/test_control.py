"""Verbs that speak to a running node over its control port."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from motorcade.config import DEFAULT_PLUGINS
from tests.support import wire
from tests.support.node import NodeProcess
from tests.support.ports import free_port
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
def address(node: NodeProcess) -> tuple[str, str]:
    return ("--http", str(node.http))


def test_clients_are_listed_shown_and_sent_away(run: Run, node: NodeProcess, address: tuple[str, str]) -> None:
    name = "a client/with?an odd%name"
    with wire.Client(node) as client:
        assert 0 == client.connect(name).reason
        client.subscribe("some/#", 1)
        listed = json.loads(run("client", "list", *address, "--json").stdout)
        assert [name] == [entry["client_id"] for entry in listed if entry["client_id"] == name]
        assert name in run("client", "list", *address).stdout
        shown = json.loads(run("client", "show", name, *address, "--json").stdout)
        assert ["some/#"] == [entry["filter"] for entry in shown["subscriptions"]]
        assert re.search(r"subscribed +some/# \(QoS 1\)", run("client", "show", name, *address).stdout)
        assert 0 == run("client", "kick", name, *address).returncode
        assert 0x98 == client.expect(wire.DISCONNECT).reason
    gone = run("client", "show", name, *address)
    assert 1 == gone.returncode
    assert f"there is no client {name!r}" in gone.stderr


def test_the_list_is_read_to_its_last_page(run: Run, node: NodeProcess, address: tuple[str, str]) -> None:
    """More clients than one page holds; `--limit` stops early."""
    count = 520
    clients = []
    try:
        for number in range(count):
            client = wire.Client(node)
            clients.append(client)
            client.connect(f"page-{number:04}")
        listed = json.loads(run("client", "list", *address, "--json").stdout)
        names = [entry["client_id"] for entry in listed if entry["client_id"].startswith("page-")]
        assert [f"page-{number:04}" for number in range(count)] == names
        assert 3 == len(json.loads(run("client", "list", "--limit", 3, *address, "--json").stdout))
    finally:
        for client in clients:
            client.close()


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


def test_a_plugin_says_what_is_wrong_with_its_configuration(run: Run, address: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    for setting, wanted in (("level=high", "level"), ("colour=1", "colour")):
        done = run("plugin", "load", "mine", "--path", "mine.py", "--set", setting, *address)
        assert 1 == done.returncode
        assert wanted in done.stderr
    assert 2 == run("plugin", "load", "mine", "--set", "nonsense", *address).returncode


def test_reload_reads_the_file_again_and_refuses_a_bad_one(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "reload.toml"
    file.write_text("[session]\nwindow = 5\n")
    with NodeProcess("--config", str(file), http=True) as node:
        address = ("--http", str(node.http))
        file.write_text("[session]\nwindow = 6\n")
        assert "session.window has changed" in run("config", "reload", *address).stdout
        file.write_text("[session]\nwindwo = 6\n")
        refused = run("config", "reload", *address)
        assert 1 == refused.returncode
        assert f"{file}:2: unknown key 'session.windwo'" in refused.stderr
        with wire.Client(node) as client:
            assert 0 == client.connect("still-served").reason


def test_a_token_is_asked_for_and_shown(run: Run) -> None:
    with NodeProcess(http=True, token=True, env={"MOTORCADE_HTTP__TOKEN": "hush"}) as node:
        address = ("--http", str(node.http))
        assert 1 == run("client", "list", *address).returncode
        assert 0 == run("client", "list", *address, "--token", "hush").returncode
        assert 0 == run("client", "list", *address, env={"MOTORCADE_TOKEN": "hush"}).returncode


def test_no_node_is_said_with_the_address_and_what_to_do(run: Run) -> None:
    port = free_port()
    for verb in (("client", "list"), ("plugin", "list"), ("config", "reload"), ("client", "kick", "x")):
        done = run(*verb, "--http", f"127.0.0.1:{port}")
        assert 1 == done.returncode
        assert (
            f"no node answers at http://127.0.0.1:{port} (Connection refused); start one with `motorcade serve`"
            in done.stderr
        )
