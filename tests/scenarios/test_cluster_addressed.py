"""Three real nodes with addressed filters: what is published anywhere arrives, and nobody else knows of a filter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count

import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.flows import both_versions, lasting, numbered, payloads, publish_many, receive_until
from tests.support.node import NodeProcess
from tests.support.wire import Client

OPTIONS = 'lease = 2.0\nview_lease = 3.5\naddressed = ["agent/{client}/#"]'
_numbers = count(1)


def vin() -> str:
    return f"WVWZZZ1JZ3W{next(_numbers):06}"


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=addressed", cluster=OPTIONS) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


def client(node: NodeProcess, name: str, version: int = 5, **kw: object) -> Client:
    opened = Client(node, version=version)
    assert 0 == opened.connect(name, **kw).reason
    return opened


@both_versions
def test_a_vehicle_gets_what_is_published_anywhere(nodes: ClusterNodes, version: int) -> None:
    """Connected, to each node, with each QoS; beside it a monitor of all vehicles, which gets it too."""
    monitor = client(nodes[2], f"monitor-{version}", version)
    monitor.subscribe("agent/+/cmd", 2)
    for where in nodes.nodes:
        name = vin()
        with client(where, name, **lasting(version)) as vehicle:
            vehicle.subscribe(f"agent/{name}/#", 2)
            for node in nodes.nodes:
                with client(node, f"p{next(_numbers)}", version) as publisher:
                    for qos in (0, 1, 2):
                        publisher.publish(f"agent/{name}/cmd", b"qos %d" % qos, qos)
                        for one in (vehicle, monitor):
                            got = one.receive()
                            assert (b"qos %d" % qos, qos) == (got.payload, got.qos)
            vehicle.expect_nothing()
    monitor.expect_nothing()
    monitor.close()


@pytest.mark.parametrize("qos", [1, 2])
def test_a_vehicle_sleeps_and_comes_back_elsewhere(nodes: ClusterNodes, qos: int) -> None:
    name = vin()
    with client(nodes[0], name, **lasting(5)) as vehicle:
        vehicle.subscribe(f"agent/{name}/#", qos)
        vehicle.disconnect()
    for number, node in enumerate(nodes.nodes):
        with client(node, f"p{next(_numbers)}") as publisher:
            publish_many(publisher, f"agent/{name}/cmd", numbered(50, 50 * number), qos)
    with Client(nodes[1], version=5) as vehicle:
        assert vehicle.connect(name, **lasting(5)).session_present
        with client(nodes[2], f"p{next(_numbers)}") as publisher:
            publisher.publish(f"agent/{name}/end", b"end", qos)
        assert [*numbered(150), b"end"] == payloads(receive_until(vehicle, b"end"))


def test_a_subscription_that_was_granted_gets_what_is_acknowledged_after_it(nodes: ClusterNodes) -> None:
    """Subscribe at one node, publish at another at once."""
    publishers = [client(node, f"p{next(_numbers)}") for node in nodes.nodes]
    for number in range(200):
        name = vin()
        with client(nodes[number % 3], name, **lasting(5)) as vehicle:
            vehicle.subscribe(f"agent/{name}/cmd", 1)
            publishers[(number + 1 + number // 3) % 3].publish(f"agent/{name}/cmd", b"here", 1)
            assert b"here" == vehicle.receive().payload
            vehicle.unsubscribe(f"agent/{name}/cmd")
    for publisher in publishers:
        publisher.close()


def test_a_vehicle_moves_under_load_and_nothing_is_lost(nodes: ClusterNodes) -> None:
    """From node to node without saying goodbye, one of which stands still for a while; two publishers go on."""
    name = vin()
    moving = client(nodes[0], name, **lasting(5))
    moving.subscribe(f"agent/{name}/#", 1)
    publishers = [client(node, f"p{next(_numbers)}") for node in nodes.nodes[:2]]
    got: list[bytes] = []
    for step in range(9):
        for number, publisher in enumerate(publishers):
            said = [b"%d:%05d" % (number, step * 20 + at) for at in range(20)]
            publish_many(publisher, f"agent/{name}/{number}", said, 1)
        got += [moving.receive().payload for _ in range(5)]
        standing = nodes[(step - 1) % 3] if step % 3 == 0 else None  # the one that it leaves
        if standing is not None:
            os.kill(standing.pid, signal.SIGSTOP)
        try:
            moved = Client(nodes[step % 3], version=5)
            assert moved.connect(name, **lasting(5)).session_present
        finally:
            if standing is not None:
                os.kill(standing.pid, signal.SIGCONT)
        moving.close()
        moving = moved
    for number, publisher in enumerate(publishers):
        publisher.publish(f"agent/{name}/{number}", b"%d:last" % number, 1)
    while not {b"0:last", b"1:last"} <= set(got):
        got.append(moving.receive().payload)
    for number in range(2):
        first = list(dict.fromkeys(payload for payload in got if payload.startswith(b"%d:0" % number)))
        assert [b"%d:%05d" % (number, at) for at in range(180)] == first
    for one in (*publishers, moving):
        one.close()


def test_the_node_of_a_vehicle_is_killed(nodes: ClusterNodes) -> None:
    """What is published meanwhile waits for it, and nobody waits for the dead."""
    name = vin()
    vehicle = client(nodes[0], name, **lasting(5))
    vehicle.subscribe(f"agent/{name}/#", 1)
    nodes[0].kill()
    with client(nodes[2], f"p{next(_numbers)}") as publisher:
        publish_many(publisher, f"agent/{name}/cmd", numbered(20), 1)
        with Client(nodes[1], version=5) as again:
            assert again.connect(name, **lasting(5)).session_present
            publish_many(publisher, f"agent/{name}/cmd", [*numbered(20, 20), b"end"], 1)
            assert [*numbered(40), b"end"] == payloads(receive_until(again, b"end"))
    vehicle.close()
    nodes.nodes[0] = nodes.node("n1").start()
    with Client(nodes[0], version=5) as again:
        assert again.connect(name, **lasting(5)).session_present
        again.disconnect()
