"""7 Conformance targets: what a server must offer as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pytest

from tests.support.cases import both_versions
from tests.support.clauses import clause
from tests.support.node import NodeProcess
from tests.support.wire import Client

Connect = Callable[..., Client]


@clause(v3="MQTT-7.0.0-1", v5="MQTT-7.0.0-1")
@pytest.mark.skipif("MOTORCADE_TEST_BROKER" in os.environ, reason="looks into the process of a node")
def test_a_node_opens_no_connections_of_its_own(connect: Connect, node: NodeProcess) -> None:
    """A single node connects to no other server, so it need not be a client as well [MQTT-7.0.0-1].

    The statement cannot be seen from outside; this holds its condition: all established connections of the node are
    ones that it has accepted on its listener.
    """
    client = connect()
    client.subscribe("$x/#", 1)
    client.publish("$x", b"m", 1)
    established = [
        connection.laddr.port
        for connection in psutil.Process(node.pid).net_connections("inet")
        if connection.status == psutil.CONN_ESTABLISHED
    ]
    assert node.ws is not None
    assert node.port in established
    assert {node.port, node.ws.port} >= set(established)


@clause(v3="MQTT-7.0.0-2", v5="MQTT-7.0.0-2")
@both_versions
def test_plain_mqtt_is_enough(connect: Connect, name: str, version: int) -> None:
    """A client that uses no option at all connects, subscribes, publishes at each QoS and leaves [MQTT-7.0.0-2]."""
    client, other = connect(version=version), connect(version=version)
    for qos in (0, 1, 2):
        assert [qos] == client.subscribe(f"{name}/{qos}", qos).reasons
        other.publish(f"{name}/{qos}", b"m", qos)
        assert (b"m", qos) == ((message := client.receive()).payload, message.qos)
        client.unsubscribe(f"{name}/{qos}")
    client.disconnect()
    other.disconnect()


@clause(v3="MQTT-7.1.1-1", v5="MQTT-7.1.1-1")
@both_versions
def test_tcp_carries_an_ordered_stream_without_loss(connect: Connect, name: str, version: int) -> None:
    """A thousand messages over TCP arrive complete and in order [MQTT-7.1.1-1]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(name, 1)
    numbers = [b"%d" % n for n in range(1000)]
    for number in numbers:
        other.publish(name, number, 1)
        assert number == client.receive().payload
