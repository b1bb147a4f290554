"""4.11 Server redirection: a node that shuts down may send its clients to another server.

Nothing in 4.11 has a number. These tests start nodes of their own, because they end them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.node import NodeProcess
from tests.support.wire import CONNACK, DISCONNECT, Client

SERVER_REFERENCE = 0x1C
SHUTTING_DOWN, USE_ANOTHER_SERVER, SERVER_MOVED = 0x8B, 0x9C, 0x9D

pytestmark = pytest.mark.skipif(
    "MOTORCADE_TEST_BROKER" in os.environ, reason="needs a node that it may configure and stop"
)


@pytest.fixture
def clients_of() -> Iterator[list[Client]]:
    """Clients to close at the end."""
    opened: list[Client] = []
    yield opened
    for client in opened:
        client.close()


def connected(node: NodeProcess, opened: list[Client], version: int) -> Client:
    client = Client(node, version=version)
    opened.append(client)
    assert client.connect(f"c{len(opened)}").type == CONNACK
    return client


def test_a_stopping_node_names_the_other_server(clients_of: list[Client]) -> None:
    """With `server_reference` configured an MQTT 5 client is told where to go; a 3.1.1 client is closed (4.11)."""
    with NodeProcess(config='[broker]\nserver_reference = "other.example:1883"\n') as node:
        new, old = connected(node, clients_of, 5), connected(node, clients_of, 4)
        node.stop()
        (farewell,) = new.expect_closed()
        assert DISCONNECT == farewell.type
        assert farewell.reason in (USE_ANOTHER_SERVER, SERVER_MOVED)
        assert "other.example:1883" == farewell.prop(SERVER_REFERENCE)
        assert [] == old.expect_closed()


def test_a_stopping_node_without_reference_says_that_it_stops(clients_of: list[Client]) -> None:
    """Without the setting the reason is Server shutting down, and no reference is sent (4.11, 3.14.2.1)."""
    with NodeProcess() as node:
        new, old = connected(node, clients_of, 5), connected(node, clients_of, 4)
        node.stop()
        (farewell,) = new.expect_closed()
        assert (DISCONNECT, SHUTTING_DOWN) == (farewell.type, farewell.reason)
        assert farewell.prop(SERVER_REFERENCE) is None
        assert [] == old.expect_closed()
