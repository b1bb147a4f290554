"""Fixtures of the conformance tests: one node for all of them, raw clients that are closed at the end.

`MOTORCADE_TEST_BROKER=HOST:PORT` runs the suite against a broker that is running already. Tests share that broker, so
each takes its own topics and client ids from `name`. Where time must pass, and for packets that break the rules, the
broker is one in memory (`virtual`).
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Endpoint, NodeProcess
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import PATIENCE, Address, Client, Packet

Open = Callable[..., Client]


#: What a broker refuses it refuses before the tests lose their patience; what only ran out of time is no refusal.
CONFIG = f"[limits]\nconnect_timeout = {2 * PATIENCE}\n"


@pytest.fixture(scope="session")
def node() -> Iterator[NodeProcess]:
    """A node with its default configuration, but for the time that a CONNECT may take."""
    with NodeProcess(config=CONFIG, ws=True) as running:
        yield running


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Address:
    """Where that node listens, or the broker that is running already."""
    host, _, port = os.environ.get("MOTORCADE_TEST_BROKER", "").rpartition(":")
    if port:
        return Endpoint(host, int(port))
    running: NodeProcess = request.getfixturevalue("node")
    return running


@pytest.fixture(scope="session")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A node that lets nobody publish to `secret/#`, with the plugin of talkative_plugin.py."""
    rules = tmp_path_factory.mktemp("rules") / "acl.conf"
    rules.write_text('{deny, all, publish, ["secret/#"]}.\n{allow, all}.\n')
    plugin = Path(__file__).with_name("talkative_plugin.py")
    config = f'[plugins.access]\nacl_file = "{rules}"\n\n[plugins.talkative]\npath = "{plugin}"\n'
    with NodeProcess(config=config) as running:
        yield running


@pytest.fixture
def virtual() -> Iterator[VirtualBroker]:
    """A broker in memory whose time passes when it is told, with retained messages."""
    with VirtualBroker() as running:
        running.load("retained")
        yield running


@pytest.fixture
def name() -> str:
    """A word that no other test uses, for topics and client ids (22 characters at most)."""
    return "t" + uuid.uuid4().hex[:14]


@pytest.fixture
def open_client(broker: Address) -> Iterator[Open]:
    """`open_client(version=5, to=None)`: a raw client, not yet connected in the MQTT sense; closed at the end."""
    with ExitStack() as stack:

        def opened(version: int = 5, to: Address | None = None) -> Client:
            return stack.enter_context(Client(to or broker, version=version))

        yield opened


@pytest.fixture
def connect(open_client: Open, name: str) -> Callable[..., Client]:
    """`connect(client_id=None, *, version=5, to=None, **connect_packet options)`: a client that was accepted.

    Its CONNACK is `client.connack`. Without a client id it gets one of its own.
    """
    numbers = itertools.count(1)

    def connected(client_id: str | None = None, *, version: int = 5, to: Address | None = None, **kw: Any) -> Client:
        client = open_client(version, to)
        answer: Packet = client.connect(f"{name}-{next(numbers)}" if client_id is None else client_id, **kw)
        assert answer.reason == 0, f"CONNECT refused with 0x{answer.reason or 0:02x}"
        client.connack = answer
        return client

    return connected
