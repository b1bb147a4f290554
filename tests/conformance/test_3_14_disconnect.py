"""Sections 3.14 and 4.11: DISCONNECT of the client, and of a node that stops (wills and sessions: test_3_1_*).

The nodes that stop may send their clients to another server. Nothing in 4.11 has a number.
"""

from __future__ import annotations

import os

import pytest

from tests.support.cases import every_version
from tests.support.clauses import clause
from tests.support.node import NodeProcess
from tests.support.refusals import refused
from tests.support.wire import PINGREQ, Connect, disconnect_packet, publish_packet

SERVER_REFERENCE = 0x1C
SHUTTING_DOWN, USE_ANOTHER_SERVER = 0x8B, 0x9C


@clause(v3="MQTT-3.14.4-3", v5="MQTT-3.14.4-3")
@every_version
def test_the_broker_closes_after_a_disconnect(connect: Connect, name: str, version: int) -> None:
    """After DISCONNECT nothing is sent or processed, and the broker closes if the client does not [MQTT-3.14.4-3]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/t")
    client = connect(version=version)
    client.send(disconnect_packet(version=version) + publish_packet(f"{name}/t", b"late", version=version) + PINGREQ)
    assert [] == client.expect_closed()
    observer.expect_nothing()


@clause(v5=("MQTT-3.14.2-1", "MQTT-3.14.4-1", "MQTT-3.14.4-2"))
@pytest.mark.skipif("MOTORCADE_TEST_BROKER" in os.environ, reason="needs a node that it may configure and stop")
@pytest.mark.parametrize("reference", ["", "other.example:1883"], ids=["no other", "another"])
def test_a_stopping_node_says_so_and_names_the_other_server(connect: Connect, reference: str) -> None:
    """MQTT 5 clients hear 0x8B, or 0x9C and where to go; others see the end of the connection [MQTT-3.14.2-1]."""
    with NodeProcess(config=f'[broker]\nserver_reference = "{reference}"\n') as node:
        five, four = connect(to=node), connect(version=4, to=node)
        node.stop()
        farewell = refused(five, USE_ANOTHER_SERVER if reference else SHUTTING_DOWN)
        assert farewell is not None and (reference or None) == farewell.prop(SERVER_REFERENCE)
        refused(four)
