"""Three real nodes with addressed filters: what is published anywhere arrives, and nobody else knows of a filter."""

from __future__ import annotations

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
