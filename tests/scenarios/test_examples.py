"""Do the programs in `examples/` work as their headers say, against a real node and a real Redis?

The plugins have tests of their own (test_example_plugin.py, test_sqlite_source.py), the pipelines too
(tests/pipelines/test_examples.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from motorcade.core.vin import make_vin
from tests.support.commands import environment
from tests.support.dispatch import DEAD, Place, wait_until
from tests.support.fanout import vehicle
from tests.support.flows import acknowledge
from tests.support.local import LocalNode
from tests.support.node import ROOT
from tests.support.redis import RedisServer
from tests.support.wire import Client

EXAMPLES = ROOT / "examples"
PATIENCE = 60.0


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


def run(program: str, *words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run an example with the Python and the `motorcade` of these tests."""
    path = EXAMPLES / program
    start = [sys.executable, path] if path.suffix == ".py" else ["/bin/sh", path]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [*map(str, start), *map(str, words)],
        env=environment({"PATH": tools, **(env or {})}),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_the_handler_summarises_trips() -> None:
    """A trip becomes a result, a parked vehicle none, and a message of another form a dead letter."""
    points = [{"km": 10.0, "at": 0}, {"km": 22.5, "at": 900}]
    with RedisServer() as server, Place(server, max_deliveries=1) as place:
        (place.folder / "trips.py").write_text((EXAMPLES / "dispatch" / "trips.py").read_text())
        place.worker("--handler", "trips:summarise")
        place.leader()
        for message in ({"vin": "A", "points": points}, {"vin": "B", "points": points[:1]}, {"vin": "C"}):
            place.publish(json.dumps(message).encode())
        ((_, entry),) = place.wait_processed(1)
        assert {"vin": "A", "km": 12.5, "average_speed": 50.0} == json.loads(entry[b"payload"])
        wait_until(lambda: place.redis.xlen(DEAD) == 1, "a dead letter")
        ((_, letter),) = place.redis.xrange(DEAD)
        assert b"`points`" in letter[b"reason"], letter


def test_every_vehicle_of_the_fleet_acknowledges(node: LocalNode) -> None:
    done = run("fleet/commuters.py", "--host", node.host, "--port", node.port, "--vehicles", 20)
    assert (0, "steady: 20 of 20 acknowledged, 0 repeated\n") == (done.returncode, done.stdout), done.stderr


def test_a_stream_is_read_again_from_an_offset(node: LocalNode) -> None:
    """From the beginning, from an offset, and no further than asked; a bad position is refused by name."""
    with node.web() as api, Client(node) as car:
        api.post("/streams/trips", json={"topics": ["fleet/+/trip"]}).raise_for_status()
        car.connect("car")
        for km in range(5):
            car.publish("fleet/VIN1/trip", b"%d" % km, 1)

    def payloads(*words: object) -> list[str]:
        done = run("streams/rewind.py", "trips", "--host", node.host, "--port", node.port, *words)
        assert 0 == done.returncode, done.stderr
        return [line.split()[-1] for line in done.stdout.splitlines()]

    assert ["0", "1", "2", "3", "4"] == payloads()
    offsets = run("streams/rewind.py", "trips", "--port", node.port, "--count", 4).stdout.splitlines()
    assert ["3", "4"] == payloads("--start", offsets[3].split()[0])
    assert ["0", "1"] == payloads("--count", 2)
    refused = run("streams/rewind.py", "trips", "--port", node.port, "--start", "yesterday")
    assert (1, True) == (refused.returncode, "'yesterday'" in refused.stderr)


def test_a_roll_out_stops_at_the_first_wave_that_fails(node: LocalNode, tmp_path: Path) -> None:
    """Vehicles of the first wave acknowledge; those of the second are away until it expires; the third gets nothing."""
    waves = [tmp_path / f"wave{number}.txt" for number in (1, 2, 3)]
    vins = [make_vin(number) for number in (1, 2, 3)]
    for path, vin in zip(waves, vins, strict=True):
        path.write_text(vin + "\n")
    payload = tmp_path / "update.json"
    payload.write_text('{"do": "update"}')
    env = {
        "MQTT_PORT": str(node.port),
        "MOTORCADE_HTTP": str(node.http),
        "MOTORCADE_TOKEN": node.auth["Authorization"].split()[-1],
        "EXPIRES": "5s",
        "POLL": "1",
    }
    with vehicle(node, vins[0]) as car:
        answering = threading.Thread(target=lambda: acknowledge(car, car.receive()), daemon=True)
        answering.start()
        done = run("fanout/rollout.sh", "task_ota_7", payload, *waves, env=env)
        answering.join(PATIENCE)
    assert 1 == done.returncode, done.stderr
    assert "task_ota_7_wave1: 100 % acknowledged" in done.stdout
    assert "task_ota_7_wave2: 0 % acknowledged" in done.stdout
    assert "fewer than 95 %" in done.stderr
    with node.web() as api:
        known = [request["request_id"] for request in api.get("/fanout/requests").json()["data"]]
    assert {"task_ota_7_wave1", "task_ota_7_wave2"} == set(known)
