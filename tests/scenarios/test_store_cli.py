"""`motorcade store` beside a running node: nothing stops, and what comes out is a whole store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motorcade import __version__
from tests.support.commands import Done, run
from tests.support.flows import acknowledge, lasting
from tests.support.node import NodeProcess
from tests.support.redis import RedisServer, wait_until
from tests.support.wire import Client

PATIENCE = 120.0  # seconds
LONG_QUEUE = "[session]\nqueue = 1000000\n"
WAITING = [b"%05d" % number + b"x" * 400 for number in range(30)]


def command(*args: object) -> Done:
    return run("store", *args)


def asked(*args: object) -> dict[str, object]:
    """The answer in JSON of a command that must succeed."""
    done = command(*args, "--json")
    assert 0 == done.returncode, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def node(data: Path) -> Iterator[NodeProcess]:
    """A node on an embedded store, with a client that is away and messages that wait for it."""
    config = "[store]\nsweep_interval = 0.2\n"
    with NodeProcess("--store", "rocksdb://", data=data, http=True, config=config) as running:
        leave_messages(running)
        yield running


def leave_messages(node: NodeProcess) -> None:
    with Client(node, version=5) as sleeper:
        sleeper.connect("sleeper", **lasting(5))
        sleeper.subscribe("v/#", 1)
        sleeper.disconnect()
    with Client(node, version=5) as publisher:
        publisher.connect("publisher")
        for payload in WAITING:
            publisher.publish("v/1", payload, qos=1)
        publisher.publish("state", b"kept", qos=1, retain=True)


def expect_messages(node: NodeProcess) -> None:
    with Client(node, version=5) as sleeper:
        assert sleeper.connect("sleeper", **lasting(5)).session_present
        for payload in WAITING:
            message = sleeper.receive()
            assert payload == message.payload
            acknowledge(sleeper, message)


def test_stats_come_from_the_node(node: NodeProcess, data: Path) -> None:
    told = asked("stats", "--store", "rocksdb://", "--data", data, "--http", node.http)
    assert (str(f"rocksdb://{data / 'store'}"), "rocksdb", len(WAITING)) == (
        told["store"],
        told["engine"],
        told["entries"],
    )
    assert told["commits"] > 0  # type: ignore[operator]
    assert False is told["full"]
    assert {"session", "retained"} <= set(told["records"])  # type: ignore[call-overload]
    assert node.process is not None
    assert node.process.pid == told["pid"]


def test_check_goes_on_beside_the_node(node: NodeProcess, data: Path) -> None:
    told = asked("check", "--store", "rocksdb://", "--data", data, "--http", node.http)
    assert (True, []) == (told["ok"], told["findings"])
    assert [] == list((data / "store").glob("copy-*")), "the copy was left behind"


def test_a_backup_and_an_export_of_a_running_node_can_be_served(node: NodeProcess, data: Path, tmp_path: Path) -> None:
    place = ("--store", "rocksdb://", "--data", data, "--http", node.http)
    told = asked("backup", tmp_path / "backup", *place)
    assert told["octets"] > len(WAITING[0])  # type: ignore[operator]
    exported = asked("export", tmp_path / "all.gz", *place)
    assert len(WAITING) == exported["entries"]
    assert [] == list((data / "store").glob("copy-*")), "the copy was left behind"
    asked("import", tmp_path / "all.gz", "--store", f"rocksdb://{tmp_path / 'imported'}")
    for copy in ("backup", "imported"):
        with NodeProcess("--store", f"rocksdb://{tmp_path / copy}") as served:
            expect_messages(served)


def test_copies_made_under_load_are_whole(tmp_path: Path) -> None:
    """What was acknowledged before a copy was asked for is in it, in order, and nothing in it disagrees."""
    acknowledged = 0
    stopping = threading.Event()

    def publish(node: NodeProcess) -> None:
        nonlocal acknowledged
        with Client(node, version=5) as publisher:
            publisher.connect("publisher")
            while not stopping.is_set():
                publisher.publish("v/1", b"%d" % acknowledged, qos=1)
                acknowledged += 1

    with NodeProcess("--store", f"rocksdb://{tmp_path / 'store'}", http=True, config=LONG_QUEUE) as node:
        with Client(node, version=5) as sleeper:
            sleeper.connect("sleeper", **lasting(5))
            sleeper.subscribe("v/#", 1)
            sleeper.disconnect()
        publishing = threading.Thread(target=publish, args=(node,))
        publishing.start()
        try:
            place = ("--store", f"rocksdb://{tmp_path / 'store'}", "--http", node.http)
            wait_until(lambda: acknowledged > 100, "messages are acknowledged")
            at_least = acknowledged
            asked("backup", tmp_path / "backup", *place)
            asked("export", tmp_path / "f", *place)
            assert True is asked("check", *place)["ok"]
        finally:
            stopping.set()
            publishing.join()
    assert True is asked("check", "--store", f"rocksdb://{tmp_path / 'backup'}")["ok"]
    asked("import", tmp_path / "f", "--store", f"rocksdb://{tmp_path / 'imported'}")
    for copy in ("backup", "imported"):
        url = f"rocksdb://{tmp_path / copy}"
        with NodeProcess("--store", url, config=LONG_QUEUE) as served, Client(served, version=5) as sleeper:
            assert sleeper.connect("sleeper", **lasting(5)).session_present
            for number in range(at_least):
                assert b"%d" % number == sleeper.receive().payload


def call(node: NodeProcess, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    with node.web() as web:
        answer = web.request(method, path, json=body)
        return answer.status_code, answer.json()


def test_the_control_port_says_what_is_wrong_with_a_backup(tmp_path: Path) -> None:
    with NodeProcess("--store", f"rocksdb://{tmp_path / 'store'}", http=True) as node:
        assert 404 == call(node, "GET", "store/backup")[0]
        code, answer = call(node, "POST", "store/backup", {"to": "relative"})
        assert (409, True) == (code, "no absolute path" in answer["message"])
        assert 400 == call(node, "POST", "store/backup", {"into": "/x"})[0]
        assert 202 == call(node, "POST", "store/backup", {"to": str(tmp_path / "store" / "LOCK" / "x")})[0]
        wait_until(lambda: call(node, "GET", "store/backup")[1]["state"] == "failed", "it cannot be made there")
        assert "cannot be made" in call(node, "GET", "store/backup")[1]["error"]
        assert [] == list((tmp_path / "store").glob("copy-*"))
    with NodeProcess("--store", "memory://", http=True) as node:
        code, answer = call(node, "POST", "store/backup", {"to": str(tmp_path / "x")})
        assert (409, True) == (code, "not in a directory" in answer["message"])
        assert "memory" == call(node, "GET", "store")[1]["figures"]["engine"]


def test_two_backups_to_one_place_are_refused(node: NodeProcess, data: Path, tmp_path: Path) -> None:
    place = ("--store", "rocksdb://", "--data", data, "--http", node.http)
    asked("backup", tmp_path / "backup", *place)
    again = command("backup", tmp_path / "backup", *place)
    assert 1 == again.returncode
    assert "exists already" in again.stderr


def test_another_node_is_not_mistaken_for_the_one_that_has_the_store(node: NodeProcess, data: Path) -> None:
    with NodeProcess("--store", "memory://", http=True) as other:
        done = command("check", "--store", "rocksdb://", "--data", data, "--http", other.http)
    assert 1 == done.returncode
    assert f"but not by the node at {other.http}" in done.stderr


def test_an_import_into_the_store_of_a_running_node_is_refused(node: NodeProcess, data: Path, tmp_path: Path) -> None:
    place = ("--store", "rocksdb://", "--data", data, "--http", node.http)
    asked("export", tmp_path / "f", *place)
    done = command("import", tmp_path / "f", *place)
    assert 1 == done.returncode
    assert "is in use by another process" in done.stderr


def test_the_figures_are_on_the_metrics_page(node: NodeProcess) -> None:
    """They are as old as the last round of housekeeping, so the last messages may be missing at first."""
    wanted = f'motorcade_store_entries{{engine="rocksdb"}} {len(WAITING)}\n'

    def shown() -> str:
        with node.web("") as web:
            return web.get("/metrics").text

    wait_until(lambda: wanted in shown(), "all messages are counted")
    page = shown()
    names = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line.startswith("motorcade_store_")}
    assert {
        "motorcade_store_blobs",
        "motorcade_store_records",
        "motorcade_store_commits_total",
        "motorcade_store_writes_total",
        "motorcade_store_queued",
        "motorcade_store_disk_bytes",
        "motorcade_store_full",
        "motorcade_store_swept_total",
        "motorcade_store_sweeps_total",
    } <= names


def test_a_store_moves_from_a_directory_to_redis_and_back(tmp_path: Path) -> None:
    """What a node has left in one engine, a node on another one delivers."""
    with RedisServer() as server:
        first, last = f"rocksdb://{tmp_path / 'first'}", f"rocksdb://{tmp_path / 'last'}"
        with NodeProcess("--store", first) as node:
            leave_messages(node)
        asked("export", tmp_path / "1", "--store", first)
        asked("import", tmp_path / "1", "--store", f"{server.url}?prefix=fleet")
        told = asked("stats", "--store", f"{server.url}?prefix=fleet")
        assert ("redis", len(WAITING)) == (told["engine"], told["entries"])
        with NodeProcess("--store", f"{server.url}?prefix=fleet"):
            # On Redis they go on beside a node.
            assert True is asked("check", "--store", f"{server.url}?prefix=fleet")["ok"]
            asked("export", tmp_path / "2", "--store", f"{server.url}?prefix=fleet")
        refused = command("import", tmp_path / "1", "--store", f"{server.url}?prefix=fleet")
        assert 1 == refused.returncode
        assert "is not empty" in refused.stderr
        asked("import", tmp_path / "2", "--store", last)
        with NodeProcess("--store", last) as node:
            expect_messages(node)
    assert __version__.encode() in (tmp_path / "2").read_bytes()[:200]
