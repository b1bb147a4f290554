"""Chapter 7 and section 4.2: what a server must offer as a whole, and the stream of bytes that it takes."""

from __future__ import annotations

import os

import psutil
import pytest

from tests.support.cases import both_versions
from tests.support.clauses import clause
from tests.support.node import NodeProcess
from tests.support.wire import PUBLISH, Connect, publish_packet


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


@clause(v3="MQTT-7.1.1-1", v5=("MQTT-4.2-1", "MQTT-7.1.1-1"))
@both_versions
def test_tcp_carries_every_byte_in_order(connect: Connect, name: str, version: int) -> None:
    """What is sent over TCP in pieces of any size arrives complete and in order [MQTT-4.2-1]."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 1)
    payloads = [bytes([number]) * (number * 997) for number in range(30)]
    stream = b"".join(
        publish_packet(name, payload, version=version, qos=1, packet_id=number + 1)
        for number, payload in enumerate(payloads)
    )
    for at in range(0, len(stream), 1009):  # pieces that never end where a packet ends
        publisher.send(stream[at : at + 1009])
    assert list(range(1, 31)) == [publisher.recv().packet_id for _ in range(30)]
    assert payloads == [subscriber.receive().payload for _ in range(30)]


@clause(v5="MQTT-4.2-1")
@both_versions
def test_a_large_message_arrives_whole(connect: Connect, name: str, version: int) -> None:
    """A message of nearly the maximum packet size passes unharmed [MQTT-4.2-1]."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name)
    payload = bytes(range(256)) * 4000
    publisher.publish(name, payload)
    assert payload == subscriber.expect(PUBLISH).payload
