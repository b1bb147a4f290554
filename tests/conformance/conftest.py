"""Fixtures of the conformance tests: one node for all of them, raw clients that are closed at the end.

`MOTORCADE_TEST_BROKER=HOST:PORT` runs the suite against a broker that is running already. Tests share that broker, so
each takes its own topics and client ids from `name`.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.node import Endpoint, NodeProcess
from tests.support.wire import PATIENCE, Address, Client, Packet

Open = Callable[..., Client]


#: What a broker refuses it refuses before the tests lose their patience; what only ran out of time is no refusal.
CONFIG = f"[limits]\nconnect_timeout = {2 * PATIENCE}\n"


@pytest.fixture(scope="session")
def broker() -> Iterator[Address]:
    """A broker with its default configuration, but for the time that a CONNECT may take."""
    running = os.environ.get("MOTORCADE_TEST_BROKER")
    if running:
        host, _, port = running.rpartition(":")
        yield Endpoint(host, int(port))
        return
    with NodeProcess(config=CONFIG) as node:
        yield node


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
