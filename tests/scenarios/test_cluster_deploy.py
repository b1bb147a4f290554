"""What `deploy/cluster` ships: three nodes behind a load balancer, started from the compose file as it is.

Commands, files and dependencies are those of the file; its containers are processes here (`tests/support/compose.py`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from motorcade import config as configuration
from tests.support.compose import Composed, plain_yaml
from tests.support.flows import lasting, numbered
from tests.support.node import ROOT, Endpoint
from tests.support.wire import Client, Closed

pytestmark = pytest.mark.timeout(600)

DEPLOY = ROOT / "deploy" / "cluster"
HUBS = ("hub-1", "hub-2", "hub-3")
USER, PASSWORD = "alice", "a long enough password"
PATIENCE = 120.0  #: seconds: machines that run tests are busy


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.1)


def test_the_compose_file_names_files_that_exist_and_the_image_a_configuration_that_is_good(tmp_path: Path) -> None:
    said: dict[str, Any] = plain_yaml((DEPLOY / "compose.yaml").read_text())
    services = said["services"]
    assert 6 == sum(name.startswith("redis-") for name in services)
    assert set(HUBS) == {name for name, service in services.items() if service["command"] == ["serve"]}
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in said["volumes"] or (DEPLOY / source).is_file(), f"{name}: {volume}"
        assert set(service.get("depends_on", [])) <= set(services), name
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    hub = services["hub-2"]["environment"]
    text = (DEPLOY / "node.toml").read_text()
    for name in ("token", "cluster.secret", "passwords"):
        (tmp_path / name).write_text("0123456789abcdef")
        text = text.replace(f"/etc/motorcade/secrets/{name}", str(tmp_path / name))
    path = tmp_path / "node.toml"
    path.write_text(text)
    loaded = configuration.load(path, {key: str(value) for key, value in hub.items() if "__" in key}, {})
    assert ("hub-2", "172.30.98.22:7946") == (loaded.config.broker.node, loaded.config.cluster.bind)
    # All addresses of the load balancer are those of nodes.
    balanced = (DEPLOY / "haproxy.cfg").read_text()
    for name in HUBS:
        (network,) = services[name]["networks"].values()
        assert 2 == balanced.count(f"server {name} {network['ipv4_address']}:"), name


def test_secrets_are_made_once_and_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    before: dict[str, str] = {}
    for _ in range(2):
        assert 0 == os.spawnv(os.P_WAIT, DEPLOY / "make-secrets", ["make-secrets", str(folder)])
        found = {path.name: path.read_text() for path in folder.iterdir()}
        assert {"cluster.secret", "token", "passwords"} == set(found)
        assert min(len(found["cluster.secret"]), len(found["token"])) >= 32
        assert not before or before == found
        before = found
    assert not [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o077]


@pytest.fixture(scope="module")
def services() -> Iterator[Composed]:
    said = plain_yaml((DEPLOY / "compose.yaml").read_text())
    with Composed(said, DEPLOY, "172.30.98.") as running:
        yield running


def listed(services: Composed, at: str = "hub-1") -> dict[str, dict[str, Any]]:
    said = services.exec(at, "motorcade", "node", "list", "--json", "--http", f"{services[at].address}:18083")
    return {entry["name"]: entry for entry in json.loads(said)}


def connect(services: Composed, name: str, **kw: Any) -> Client:
    """A client that has come through the load balancer."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            opened = Client(Endpoint(services["balancer"].address, 1883), version=5)
            reason = opened.connect(name, username=USER, password=PASSWORD.encode(), **kw).reason
        except (OSError, Closed, TimeoutError):  # there is no node yet, or it is gone and the balancer has not seen it
            reason = -1
        if reason == 0:
            return opened
        assert time.monotonic() < end, f"{name} does not get in: {reason}"
        time.sleep(0.1)


def live(services: Composed, at: str = "hub-1") -> set[str]:
    with suppress(AssertionError):  # it does not answer yet
        return {name for name, entry in listed(services, at).items() if entry["state"] == "live"}
    return set()


def test_clients_are_served_through_the_load_balancer_whichever_node_is_killed_or_drained(services: Composed) -> None:
    """From nothing: a cluster of six servers, secrets, three nodes; a user who is added; a day in their life."""
    until(lambda: set(HUBS) == live(services), "three nodes are live")
    services.exec(
        "hub-1",
        *("motorcade", "passwd", "/etc/motorcade/secrets/passwords", USER, "--password-stdin"),
        stdin=PASSWORD,
    )
    for name in HUBS:
        services[name].signal(signal.SIGHUP)

    # Clients are spread over all nodes, and what is published at one reaches all.
    vehicles = {f"vehicle-{number}": connect(services, f"vehicle-{number}", **lasting(5)) for number in range(9)}
    for vehicle in vehicles.values():
        vehicle.subscribe("news/#", 1)
    spread = Counter({name: entry["clients"] for name, entry in listed(services).items()})
    assert 9 == spread.total() and min(spread[name] for name in HUBS) >= 2, spread
    with connect(services, "platform") as platform:
        assert 0 == (platform.publish("news/1", b"to all", 1) or platform).reason  # type: ignore[union-attr]
    for vehicle in vehicles.values():
        assert b"to all" == vehicle.receive().payload

    # A node is killed: its clients come back through the balancer, and have missed nothing.
    victim = services["hub-3"]
    victim.signal(signal.SIGKILL)
    victim.ends()
    with connect(services, "platform") as platform:
        for payload in numbered(20):
            assert 0 == (platform.publish("news/2", payload, 1) or platform).reason  # type: ignore[union-attr]
    for name in list(vehicles):
        got: dict[bytes, None] = {}
        while list(got) != numbered(20):
            try:
                got[vehicles[name].receive().payload] = None
                got.pop(b"to all", None)  # what was acknowledged to a node that is killed then may come again
            except Closed:
                vehicles[name] = connect(services, name, **lasting(5))
    services.start("hub-3")  # as `restart: unless-stopped` does
    until(lambda: set(HUBS) == live(services), "it is there again")

    # One is drained: its clients go to the others, and the balancer sends it no new ones.
    services.exec("hub-1", "motorcade", "node", "drain", "hub-2", "--http", f"{services['hub-1'].address}:18083")
    for name, vehicle in list(vehicles.items()):
        with suppress(Closed, TimeoutError):
            while vehicle.recv(0.5).type != 14:  # DISCONNECT
                pass
        vehicle.close()
        vehicles[name] = connect(services, name, **lasting(5))
    found = listed(services)
    assert 0 == found["hub-2"]["clients"] and 9 == found["hub-1"]["clients"] + found["hub-3"]["clients"], found
    services.exec(
        "hub-1", "motorcade", "node", "drain", "hub-2", "--resume", "--http", f"{services['hub-1'].address}:18083"
    )

    def served_again() -> bool:
        with connect(services, "probe"):
            return bool(listed(services)["hub-2"]["clients"])

    until(served_again, "the balancer sends clients to it again")
    for vehicle in vehicles.values():
        vehicle.close()
    for name in HUBS:
        services[name].signal(signal.SIGTERM)
        assert 0 == services[name].ends(), services[name].log
        assert "Traceback" not in services[name].log
        errors = [line for line in services[name].log.splitlines() if '"level":"error"' in line]
        assert not errors, errors
