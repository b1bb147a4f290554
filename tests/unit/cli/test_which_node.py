"""Commands that look into a store or a configuration mean the node that runs, and say which one they looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local import LocalNode
from tests.support.node import NodeProcess
from tests.unit.cli.conftest import Run

NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """A process: it locks its store."""
    with NodeProcess(http=True) as running:
        yield running


def test_the_store_of_the_running_node_is_meant(run: Run, node: NodeProcess, tmp_path: Path) -> None:
    """Whatever folder the command is given in; a store that is named goes before it."""
    env = {"MOTORCADE_HTTP": str(node.http)}
    place = node.data.resolve() / "store"
    for verb in (("stats",), ("check",), ("export", "f.gz"), ("backup", "copy")):
        done = run("store", *verb, env=env)
        assert 0 == done.returncode, done.stderr
        assert done.stderr.startswith(f"store: rocksdb://{place} (of node "), done.stderr
        assert f"at http://{node.http})" in done.stderr
    assert str(place) in json.loads(run("store", "stats", "--json", env=env).stdout)["store"]
    named = run("store", "check", "--data", "elsewhere", env=env)
    assert 1 == named.returncode
    assert f"store: rocksdb://{tmp_path}/elsewhere/store (as --data says)" in named.stderr


def test_without_a_node_the_folder_is_meant_and_told(run: Run, tmp_path: Path) -> None:
    done = run("store", "stats", env={"MOTORCADE_HTTP": NOWHERE})
    assert 1 == done.returncode
    told, error = done.stderr.splitlines()
    assert f"store: rocksdb://{tmp_path}/motorcade-data/store (no node answers at http://{NOWHERE})" == told
    assert error.startswith("error: there is no store at ")


def test_a_node_that_keeps_its_store_elsewhere_says_so(run: Run) -> None:
    with LocalNode() as node:
        asked = [run(*words, *node.at) for words in (("store", "stats"), ("fanout", "report", "r"))]
    for done in asked:
        assert 1 == done.returncode
        assert f"at http://{node.http} keeps its store in memory" in done.stderr and "--store URL" in done.stderr


def test_the_configuration_of_the_running_node_is_shown(run: Run, node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[session]\nwindow = 5\n")
    env = {"MOTORCADE_HTTP": str(node.http), "MOTORCADE_SESSION__QUEUE": "7"}
    done = run("config", "show", "--origin", env=env)
    assert done.stderr.startswith("configuration: node ") and f"at http://{node.http}\n" in done.stderr
    values = json.loads(run("config", "show", "--json", env=env).stdout)
    assert (str(node.data), 1000) == (values["data.dir"], values["session.queue"])
    # A file that is named goes before it.
    named = run("config", "show", "--json", "--config", "m.toml", env=env)
    assert (5, 7) == tuple(json.loads(named.stdout)[key] for key in ("session.window", "session.queue"))
    told = run("config", "show", "--config", "m.toml", env=env).stderr
    assert "configuration: a node that would start with m.toml in this shell\n" == told
    # And a node that is named must be there.
    refused = run("config", "show", "--http", NOWHERE, env=env)
    assert 1 == refused.returncode and f"no node answers at http://{NOWHERE}" in refused.stderr
    # Without any, it is what a node would start with.
    alone = run("config", "show", env={"MOTORCADE_HTTP": NOWHERE})
    assert f"in this shell; none answers at http://{NOWHERE}\n" in alone.stderr


def test_a_node_that_does_not_tell_is_not_taken_for_none(run: Run, node: NodeProcess) -> None:
    """Another user's node: its store cannot be asked for, and the folder here may not be meant."""
    env = {"MOTORCADE_HTTP": str(node.http), "MOTORCADE_TOKEN": "wrong"}
    done = run("store", "stats", env=env)
    assert 1 == done.returncode
    assert f"the node at http://{node.http} does not tell which store it has" in done.stderr
