"""Does the example plugin work as its header says, loaded and unloaded under connected clients?"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.commands import run
from tests.support.local import LocalNode
from tests.support.node import ROOT
from tests.support.wire import Client

EXAMPLE = ROOT / "examples" / "plugins" / "geofence.py"
MUNICH = {"lat": 48.1374, "lon": 11.5755, "radius": 2000}
NEAR = json.dumps({"lat": 48.1400, "lon": 11.5800}).encode()
FAR = json.dumps({"lat": 48.3538, "lon": 11.7861}).encode()  # the airport, 29 km away


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


@pytest.fixture
def api(node: LocalNode) -> Iterator[httpx.Client]:
    with node.web() as client:
        yield client


def connected(node: LocalNode, client_id: str) -> Client:
    client = Client(node)
    assert 0 == client.connect(client_id).reason
    return client


def test_it_is_loaded_by_path_and_works_for_clients_that_are_there_already(node: LocalNode, api: httpx.Client) -> None:
    """Before, nothing; then each change once, retained for those who come later; after unloading, nothing again."""
    with connected(node, "car") as car, connected(node, "watch") as watch:
        watch.subscribe("fleet/+/geofence", 1)
        car.publish("fleet/VIN1/position", NEAR, 1)
        watch.expect_nothing()

        answer = api.post("/plugins/geofence", json={"path": str(EXAMPLE), "config": MUNICH})
        assert 201 == answer.status_code, answer.text
        for position in (NEAR, NEAR, FAR, FAR, NEAR):
            car.publish("fleet/VIN1/position", position, 1)
        assert [b"inside", b"outside", b"inside"] == [watch.receive().payload for _ in range(3)]
        watch.expect_nothing()
        with connected(node, "late") as late:
            late.subscribe("fleet/VIN1/geofence", 1)
            message = late.receive()
            assert (b"inside", True) == (message.payload, message.retain)

        assert 200 == api.delete("/plugins/geofence").status_code
        car.publish("fleet/VIN1/position", FAR, 1)
        watch.expect_nothing()


def test_positions_still_reach_their_subscribers(node: LocalNode, api: httpx.Client) -> None:
    """The plugin looks at positions and changes none, not even one it cannot read; that one it counts."""
    api.post("/plugins/geofence", json={"path": str(EXAMPLE), "config": MUNICH}).raise_for_status()
    with connected(node, "car") as car, connected(node, "watch") as watch:
        watch.subscribe("fleet/+/position", 1)
        for payload in (NEAR, b"no json", b'{"lat": "north"}'):
            car.publish("fleet/VIN1/position", payload, 1)
            assert payload == watch.receive().payload
    plugins = {plugin["name"]: plugin for plugin in api.get("/plugins").json()["data"]}
    assert 2 == plugins["geofence"]["counters"]["unreadable"]


def test_a_wrong_configuration_is_refused_by_name(api: httpx.Client) -> None:
    """The refusal names the key, and nothing of the plugin stays behind."""
    for named, config in (
        ("radius", {**MUNICH, "radius": 0}),
        ("lat", {**MUNICH, "lat": 91}),
        ("raduis", {**MUNICH, "raduis": 1}),
        ("radius", {"lat": 1, "lon": 1}),
    ):
        answer = api.post("/plugins/geofence", json={"path": str(EXAMPLE), "config": config})
        assert (409, True) == (answer.status_code, named in answer.json()["message"]), config
        assert "geofence" not in [plugin["name"] for plugin in api.get("/plugins").json()["data"]]


def test_the_command_in_its_header_loads_it(node: LocalNode, api: httpx.Client) -> None:
    """What the header tells the reader to type works as it stands, from the root of the repository."""
    (line,) = [line.strip() for line in EXAMPLE.read_text().splitlines() if line.strip().startswith("motorcade plugin")]
    done = run(*line.split()[1:], *node.at, cwd=ROOT)
    assert 0 == done.returncode, done.stderr
    assert "geofence" in [plugin["name"] for plugin in api.get("/plugins").json()["data"]]
