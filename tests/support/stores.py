"""A node whose state outlives it, and the stores that it may have: embedded, one Redis, a Redis cluster.

    home: Home                        fixture; every test that takes it runs on `rocksdb://` and on `redis://`
    @on_every_store                   … and on `redis+cluster://`
    @embedded, @shared                only on one of them

    home.start("[session]\\nqueue = 10")     configuration as TOML; kept for the starts that follow
    home.crash()                            SIGKILL, and a new process on the same store
    home.restart()                          SIGTERM, and a new process on the same store
    home.again("SIGKILL")                   one of both

A new process has new ports, so clients are opened by `home.connect`. Redis servers are started once per run (and
worker), when the first test asks for them, and are emptied before each test. `tests/scenarios/conftest.py` makes the
fixtures known.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support import wire
from tests.support.flows import SUBSCRIPTION_ID, acknowledge, lasting
from tests.support.node import ROOT, START_PATIENCE, NodeProcess
from tests.support.redis import RedisCluster, RedisServer

#: What a node that is well never writes into its log.
COMPLAINTS = ("Traceback", '"level":"error"', "never retrieved", "never awaited")

#: How many times a node is started on other ports when one was taken meanwhile.
PORT_ATTEMPTS = 5

on_every_store = pytest.mark.parametrize("home", ["rocksdb", "redis", "cluster"], indirect=True)
embedded = pytest.mark.parametrize("home", ["rocksdb"], indirect=True)
shared = pytest.mark.parametrize("home", ["redis"], indirect=True)
both_ends = pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])


class Home:
    """A store, and one node after the other that runs on it. It is the address of the node that runs now."""

    def __init__(self, kind: str, url: str, data: Path) -> None:
        self.kind = kind
        self.url = url
        self.data = data
        self.config = ""
        self.forget_lease: Callable[[], None] = lambda: None  #: see `forgetting`
        self.may_complain = False  #: the test gives the node reason to log errors
        self._logs: list[str] = []
        self._node: NodeProcess | None = None
        self._clients: list[wire.Client] = []

    # An address for clients.

    @property
    def node(self) -> NodeProcess:
        assert self._node is not None, "no node was started"
        return self._node

    @property
    def host(self) -> str:
        return self.node.host

    @property
    def port(self) -> int:
        return self.node.port

    @property
    def log(self) -> str:
        """What all nodes have printed."""
        return "".join(self._logs) + (self._node.log if self._node is not None else "")

    # One life after the other.

    def start(self, config: str | None = None) -> None:
        """Start a node; without `config` with the configuration of the one before."""
        if config is not None:
            self.config = config
        for attempt in range(PORT_ATTEMPTS):
            self._node = self.process()
            try:
                self._node.start()
            except AssertionError:
                # Somebody may have been quicker to take a port that was free.
                if "address already in use" not in self._node.log.lower() or attempt == PORT_ATTEMPTS - 1:
                    raise
            else:
                return

    def process(self) -> NodeProcess:
        """A node on this store that was not started yet."""
        return NodeProcess("--store", self.url, config=self.config, data=self.data, http=True)

    def kill(self) -> None:
        """SIGKILL; the connections of the clients are gone."""
        self.node.kill()
        self.forget_lease()
        self._forget()

    def stop(self) -> None:
        """SIGTERM; the node must exit with 0."""
        self.node.stop()
        self._forget()

    def _forget(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self._logs.append(self.node.log)
        self._node = None

    def crash(self) -> None:
        self.kill()
        self.start()

    def restart(self) -> None:
        self.stop()
        self.start()

    def again(self, end: str) -> None:
        """End the node by this signal and start a new one."""
        if end == "SIGKILL":
            self.crash()
        else:
            self.restart()

    def refusal(self, *args: str, config: str | None = None, url: str | None = None) -> str:
        """Start a node that must refuse to run: exit code 1, no traceback. What it says."""
        node = NodeProcess(
            "--store", url or self.url, *args, config=self.config if config is None else config, data=self.data
        )
        done = subprocess.run(
            node.command(),
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * START_PATIENCE,
            check=False,
        )
        told = done.stdout + done.stderr
        assert 1 == done.returncode, f"exit code {done.returncode}:\n{told}"
        assert "Traceback" not in told, told
        assert " ready " not in told, told
        return told

    # Clients.

    def client(self, version: int = 5) -> wire.Client:
        """A connection on which nothing was said yet."""
        client = wire.Client(self, version=version)
        self._clients.append(client)
        return client

    def connect(self, client_id: str, version: int = 5, **options: Any) -> wire.Client:
        """A client that was accepted; its CONNACK is `client.connack`."""
        client = self.client(version)
        answer = client.connect(client_id, **options)
        assert answer.reason == 0, f"CONNECT refused with 0x{answer.reason or 0:02x}"
        client.connack = answer
        return client

    def lasting(self, client_id: str, version: int = 5, *properties: bytes, **options: Any) -> wire.Client:
        """A client whose session outlives its connection, new or taken up again."""
        return self.connect(client_id, **lasting(version, *properties), **options)

    def back(self, client_id: str, version: int = 5, *properties: bytes, **options: Any) -> wire.Client:
        """The same, and the session must have been there."""
        client = self.lasting(client_id, version, *properties, **options)
        assert session_present(client), f"the session of {client_id} is gone"
        return client

    def absent(self, client_id: str, version: int, *filters: tuple[str, int]) -> None:
        """A session with subscriptions and without a connection."""
        client = self.lasting(client_id, version)
        answer = client.subscribe(filters)
        assert all(reason <= 2 for reason in answer.reasons), answer.reasons
        client.disconnect()

    def settle(self) -> None:
        """Return when everything that the node has noted before is in the store, whether or not it had to tell anyone.

        The store writes in order, and a PUBACK for a message to a lasting session tells of a commit.
        """
        with wire.Client(self) as client:
            assert client.connect("settle", **lasting(5)).reason == 0
            subscribe(client, "settle", 1)
            client.publish("settle", b"", 1)

    # The end of a test.

    def close(self) -> None:
        """End everything."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._node is not None:
            self._node.kill()
            self._logs.append(self._node.log)
            self._node = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def assert_well(self) -> None:
        """No node has logged an error."""
        for sign in () if self.may_complain else COMPLAINTS:
            assert sign not in self.log, self.log[max(0, self.log.index(sign) - 1000) :][:4000]


def session_present(client: wire.Client) -> bool:
    assert client.connack is not None
    return client.connack.session_present


def subscribe(client: wire.Client, topic_filter: str, options: int, identifier: int = 0) -> None:
    """Subscribe and be granted what was asked for. Messages that come before the SUBACK are kept for `recv`."""
    packet_id = client.next_id()
    properties = wire.prop(SUBSCRIPTION_ID, identifier) if identifier else b""
    client.send(
        wire.subscribe_packet(packet_id, [(topic_filter, options)], version=client.version, properties=properties)
    )
    assert [options & 3] == client.await_answer(wire.SUBACK, packet_id).reasons


def drained(client: wire.Client) -> list[wire.Packet]:
    """Everything that waits for a client, each message with the whole flow of its QoS.

    A PINGRESP would not show that nothing is left: it need not wait for what is still being read from the store. So
    the client sends a message to itself, which stands behind all others.
    """
    topic, asked, sent = f"drained/{uuid.uuid4().hex}", client.next_id(), client.next_id()
    client.send(wire.subscribe_packet(asked, [(topic, 1)], version=client.version))
    client.send(wire.publish_packet(topic, b"", version=client.version, qos=1, packet_id=sent))
    answers: set[tuple[int, int | None]] = {(wire.SUBACK, asked), (wire.PUBACK, sent)}
    unreleased: set[int | None] = set()
    messages: list[wire.Packet] = []
    while answers or unreleased or not messages or messages[-1].topic != topic:
        found = client.recv()
        if found.type == wire.PUBLISH:
            messages.append(found)
            if found.qos:
                acknowledge(client, found)
            if found.qos == 2:
                unreleased.add(found.packet_id)
        elif found.type == wire.PUBREL:  # of one of these, or of a message that came on an earlier connection
            client.send(wire.ack_packet(wire.PUBCOMP, found.packet_id or 0, version=client.version))
            unreleased.discard(found.packet_id)
        else:
            assert (found.type, found.packet_id) in answers, f"unexpected {found.name}"
            answers.remove((found.type, found.packet_id))
    client.unsubscribe(topic)
    return messages[:-1]


def forgetting(servers: RedisServer | RedisCluster) -> Callable[[], None]:
    """What spares the tests the seconds until a shared store gives the lease of a killed node to the next one."""

    def forget() -> None:
        for server in [servers] if isinstance(servers, RedisServer) else servers.masters():
            for key in server.client.scan_iter("*:l:sessions", count=10_000):
                server.client.delete(key)

    return forget


@pytest.fixture(scope="session")
def lone_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def cluster_redis() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(params=["rocksdb", "redis"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A store of each kind in turn, empty; no node runs yet."""
    kind: str = request.param
    with Home(kind, "rocksdb://", tmp_path / "data") as home:
        if kind != "rocksdb":
            fixture = "lone_redis" if kind == "redis" else "cluster_redis"
            servers: RedisServer | RedisCluster = request.getfixturevalue(fixture)
            servers.empty()
            home.url, home.forget_lease = servers.url, forgetting(servers)
        yield home
    home.assert_well()
