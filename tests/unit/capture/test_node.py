"""Capture through a real node: what its clients and operators see of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.node import ROOT, NodeProcess
from tests.support.redis import RedisServer, wait_until
from tests.support.wire import PUBACK, PUBREC, Client, publish_packet
from tests.unit.capture.capturing import entries, payloads

pytestmark = pytest.mark.timeout(120)

CONFIG = """
[plugins.streams.stream.telemetry]
topics = ["nobody/publishes/here"]

[plugins.capture.rule.into-redis]
topics = ["fleet/#"]
to = "redis-stream:messages:published"
redis = "{url}?patience={patience}"

[plugins.capture.rule.into-stream]
topics = ["fleet/#"]
to = "stream:telemetry"
"""
KEY = "messages:published"


@pytest.fixture
def node(server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(config=CONFIG.format(url=server.url, patience=60), http=True) as running:
        yield running


@pytest.fixture
def hasty(server: RedisServer) -> Iterator[NodeProcess]:
    """A node that does not wait for Redis for long."""
    with NodeProcess(config=CONFIG.format(url=server.url, patience=0.5), http=True) as running:
        yield running


def motorcade(node: NodeProcess, *words: str) -> Any:
    """A command to the node; its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "motorcade", *words, "--json", "--http", str(node.http)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


@pytest.mark.parametrize("version", [4, 5])
def test_an_acknowledged_message_is_in_both_targets_and_with_its_subscribers(
    node: NodeProcess, server: RedisServer, version: int
) -> None:
    with Client(node, version=version) as listener, Client(node, version=version) as car:
        listener.connect("listener")
        listener.subscribe("fleet/#", 1)
        car.connect("car")
        for qos in (1, 2):
            car.publish("fleet/1", b"\xff%d" % qos, qos)
            assert b"\xff%d" % qos == payloads(server, KEY)[-1]
            assert b"\xff%d" % qos == listener.receive().payload
        car.publish("fleet/1", b"\xff0", 0)
        assert b"\xff0" == listener.receive().payload
        with Client(node, version=version) as reader:
            reader.connect("reader")
            reader.subscribe("$stream/telemetry/earliest", 1)
            assert [b"\xff1", b"\xff2", b"\xff0"] == [reader.receive().payload for _ in range(3)]
    wait_until(lambda: 3 == server.client.xlen(KEY), "all three are copied")
    assert [(b"car", b"1"), (b"car", b"2"), (b"car", b"0")] == [
        (found["client"], found["qos"]) for found in entries(server, KEY)
    ]


def test_publishers_hear_that_redis_is_away(hasty: NodeProcess, server: RedisServer) -> None:
    """MQTT 5 is refused, MQTT 3 is sent away, QoS 0 waits; when Redis is back, everything goes on."""
    with Client(hasty) as car, Client(hasty) as listener, Client(hasty, version=4) as old:
        for client, name in ((car, "car"), (listener, "listener"), (old, "old")):
            client.connect(name)
        listener.subscribe("fleet/#", 1)
        server.stop()
        car.publish("fleet/1", b"0", 0)
        for qos, answer in ((1, PUBACK), (2, PUBREC)):
            packet_id = car.next_id()
            car.send(publish_packet("fleet/1", b"refused", qos=qos, packet_id=packet_id))
            assert 0x97 == car.await_answer(answer, packet_id).reason
        old.send(publish_packet("fleet/1", b"refused", version=4, qos=1, packet_id=1))
        old.expect_closed()
        server.start()
        (view,) = [view for view in motorcade(hasty, "capture", "list") if view["name"] == "into-redis"]
        assert (3, 0) == (view["failed"], view["refused"])
        wait_until(lambda: payloads(server, KEY) == [b"0"], "what has waited is copied")
        car.publish("fleet/1", b"1", 1)
        assert [b"0", b"1"] == [listener.receive().payload for _ in range(2)]
    assert [b"0", b"1"] == payloads(server, KEY)


def test_rules_are_made_and_removed_by_commands(hasty: NodeProcess, server: RedisServer) -> None:
    with Client(hasty) as car:
        car.connect("car")
        url = f"redis://:hush@{server.address}"
        server.command("CONFIG", "SET", "requirepass", "hush")
        try:
            words = ("--topic", "other/#", "--to", "redis-stream:other", "--set", f"redis={url}")
            assert "hush" not in repr(motorcade(hasty, "capture", "create", "own", *words))
            car.publish("other/1", b"1", 1)
            view = motorcade(hasty, "capture", "show", "own")
            assert (1, "") == (view["captured"], view["problem"]) and "hush" not in repr(view)
            motorcade(hasty, "capture", "delete", "own", "--yes")
            car.publish("other/1", b"2", 1)
            car.publish("fleet/1", b"3", 1)
        finally:
            server.client.execute_command("AUTH", "hush")
            server.command("CONFIG", "SET", "requirepass", "")
    assert [b"1"] == payloads(server, "other")
    assert "hush" not in hasty.log
