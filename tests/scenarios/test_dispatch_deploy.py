"""What `deploy/` ships: files that can be read by those they are for, and commands that exist.

The script that forms the cluster, the configuration of Redis and that of the dispatcher are used here as they are. Of
the compose file and the units the test reads what they would start.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis.cluster

from tests.support.commands import run
from tests.support.compose import plain_yaml
from tests.support.dispatch import PROCESSED, PUBLISHED, Daemon, numbered, wait_until
from tests.support.node import ROOT
from tests.support.ports import free_port

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
#: Where the files of `deploy/` are installed.
INSTALLED = {
    "/etc/motorcade/dispatch.toml": DEPLOY / "dispatch.toml",
    "/etc/motorcade/redis.conf": DEPLOY / "redis.conf",
    "/usr/lib/motorcade/form-cluster": DEPLOY / "form-cluster",
}


def accepted(words: list[str]) -> None:
    """A command line that `motorcade` understands; with --help nothing is started, but all options are read."""
    done = run(*words, "--help")
    assert 0 == done.returncode, done.stderr


# -- the compose file


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = plain_yaml((DEPLOY / "compose.yaml").read_text())
    return found


def test_the_compose_file_starts_a_cluster_dispatchers_and_workers(compose: dict[str, Any]) -> None:
    services = compose["services"]
    servers = [name for name in services if name.startswith("redis-")]
    assert 6 == len(servers)
    assert 2 <= services["leader"]["deploy"]["replicas"]
    assert 2 <= services["worker"]["deploy"]["replicas"]
    addresses = [f"{services[name]['networks']['fleet']['ipv4_address']}:6379" for name in servers]
    assert addresses == services["cluster"]["command"]
    url = services["leader"]["environment"]["MOTORCADE_DISPATCH__REDIS"]
    assert set(url.removeprefix("redis+cluster://").split(",")) < set(addresses)
    assert servers == services["cluster"]["depends_on"]
    assert set(servers) == set(compose["volumes"])


def test_the_compose_file_names_files_and_commands_that_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), volume
    build = services["leader"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    accepted(services["leader"]["command"])
    (line,) = services["worker"]["command"]
    words = shlex.split(line.replace("$$(hostname)", "worker-1"))
    assert ["exec", "motorcade"] == words[:2]
    accepted(words[2:])


def test_the_image_has_what_it_copies() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name


# -- the units


def options(unit: Path) -> dict[str, dict[str, list[str]]]:
    """Sections, and the values of each option; one that is there twice has two."""

    class Several(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if isinstance(value, list) and key in self:
                value = self[key] + value
            super().__setitem__(key, value)

    parser = ConfigParser(dict_type=Several, strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return {name: {key: value.splitlines() for key, value in parser[name].items()} for name in parser.sections()}


def test_units_start_something_that_exists() -> None:
    for unit in SERVICES:
        starts_something_that_exists(unit)


def starts_something_that_exists(unit: Path) -> None:
    found = options(unit)
    assert {"Unit", "Service", "Install"} == set(found), unit
    assert ["motorcade"] == found["Service"]["User"], f"nothing runs as root: {unit}"
    (line,) = found["Service"]["ExecStart"]
    words = shlex.split(line.replace("%i", "9701").replace("${LISTEN}", "127.0.0.1"))
    for word in words[1:]:
        if word.startswith("/etc/"):
            assert INSTALLED[word].exists()
    match Path(words[0]).name:
        case "motorcade":
            accepted([str(INSTALLED.get(word, word)) for word in words[1:]])
        case "form-cluster":
            assert os.access(INSTALLED[words[0]], os.X_OK)
            assert 6 == len(words[1:])
        case name:
            assert "redis-server" == name


def test_units_want_units_that_exist_and_the_target_starts_all_of_them() -> None:
    names = {unit.name for unit in UNITS}
    for unit in UNITS:
        for option in ("Wants", "Requires", "After", "PartOf"):
            for name in " ".join(options(unit)["Unit"].get(option, [])).split():
                if name.startswith("motorcade"):
                    assert re.sub(r"@[^.]+", "@", name) in names, f"{unit.name}: {name}"
    (target,) = [unit for unit in UNITS if unit.suffix == ".target"]
    wanted = " ".join(options(target)["Unit"]["Wants"]).split()
    assert 2 <= sum("leader@" in name for name in wanted)
    assert 2 <= sum("worker@" in name for name in wanted)
    (cluster,) = [name for name in wanted if "cluster" in name]
    servers = " ".join(options(DEPLOY / "systemd" / cluster)["Unit"]["Requires"]).split()
    assert 6 == len(servers)


# -- all of it, on this machine


def server_port() -> int:
    """One whose port for the cluster, 10 000 above it, is free too."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
        return port


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[str]]:
    """Six servers with the configuration of `deploy/`, started as the unit does."""
    unit = options(DEPLOY / "systemd" / "motorcade-redis@.service")
    ports = [server_port() for _ in range(6)]
    with ExitStack() as stack:
        for port in ports:
            folder = tmp_path / str(port)
            folder.mkdir()
            line = unit["Service"]["ExecStart"][0].replace("/var/lib/motorcade-redis-%i", str(folder))
            words = shlex.split(line.replace("%i", str(port)))
            words = ["redis-server", *(str(INSTALLED.get(word, word)) for word in words[1:])]
            process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
        yield [f"127.0.0.1:{port}" for port in ports]


def test_from_six_servers_to_processed_messages(servers: list[str], tmp_path: Path) -> None:
    """The script makes them a cluster, once; leader and worker run with the configuration that is shipped."""
    for _ in range(2):
        done = subprocess.run(
            [DEPLOY / "form-cluster", *servers], capture_output=True, text=True, timeout=60, check=False
        )
        assert 0 == done.returncode, done.stdout + done.stderr
    env = {
        "MOTORCADE_CONFIG": str(DEPLOY / "dispatch.toml"),
        "MOTORCADE_DISPATCH__REDIS": "redis+cluster://" + ",".join(servers[:3]),
    }
    worker = Daemon(["worker", "--listen", f"127.0.0.1:{free_port()}"], tmp_path, env).start()
    leader = Daemon(["leader"], tmp_path, env).start()
    host, port = servers[0].split(":")
    client = redis.cluster.RedisCluster(host, int(port))
    try:
        for text in numbered(20):
            client.xadd(PUBLISHED, {"payload": text})
        wait_until(lambda: 20 == client.xlen(PROCESSED), "they are processed")
    finally:
        client.close()
        leader.stop()
        worker.stop()


def test_too_few_servers_are_no_cluster() -> None:
    done = subprocess.run([DEPLOY / "form-cluster", "127.0.0.1:1"], capture_output=True, text=True, check=False)
    assert 2 == done.returncode
    assert "six" in done.stderr
