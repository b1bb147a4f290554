"""Queues on three real nodes over one store: each message to one consumer at a time, wherever, whoever dies."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import run
from tests.support.consumers import connected, fill, lasting, numbered, receive_maximum, subscribe, take, unique
from tests.support.flows import acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import PUBLISH, Client, Closed, Packet, ack_packet

#: Members that are killed are found dead soon.
OPTIONS = "lease = 2.0\nview_lease = 3.5"
PATIENCE = 90.0  #: seconds until all of some work must be done
QUOTA, REFUSED = 0x97, 0x83


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=queues", cluster=OPTIONS) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


def declare(node: NodeProcess, **options: object) -> str:
    name = unique("jobs")
    with Operator(node) as operator:
        operator.create("queues", name, topics=[f"{name}/#"], **options)
    return name


def stored(node: NodeProcess, name: str) -> int:
    with Operator(node) as operator:
        return len(operator.read("queues", name, limit=1000))


def empty(nodes: ClusterNodes, name: str) -> None:
    """Wait until a queue is empty: removals are written many at a time."""
    deadline = time.monotonic() + PATIENCE
    while stored(nodes[0], name):
        assert time.monotonic() < deadline, f"{stored(nodes[0], name)} messages are left"


def worker(node: NodeProcess, queue: str, window: int = 8) -> Client:
    client = connected(node, unique("worker"), 5, receive_maximum(window))
    subscribe(client, f"$queue/{queue}")
    return client


class Workers:
    """Consumers that acknowledge what they get, until they are stopped; what each has got, in order."""

    def __init__(self, clients: list[Client]) -> None:
        self.got: list[list[bytes]] = [[] for _ in clients]
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=self._work, args=(client, got), daemon=True)
            for client, got in zip(clients, self.got, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, client: Client, got: list[bytes]) -> None:
        while not self.stopped.is_set():
            try:
                message = client.recv(0.2)
            except TimeoutError:
                continue
            except Closed:
                return
            if message.type == PUBLISH:
                got.append(message.payload)
                acknowledge(client, message)

    @property
    def all(self) -> Counter[bytes]:
        return Counter(payload for some in self.got for payload in some)

    def wait_for(self, count: int) -> None:
        """Until so many different messages have come."""
        deadline = time.monotonic() + PATIENCE
        while len(self.all) < count:
            assert time.monotonic() < deadline, f"{len(self.all)} of {count} have come"
            time.sleep(0.05)

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("strategy", ["round_robin", "random", "least_inflight"])
def test_producers_and_consumers_on_all_nodes(nodes: ClusterNodes, strategy: str) -> None:
    """Each message to one of them, once, while all of them are there."""
    name = declare(nodes[0], strategy=strategy)
    clients = [worker(node, name) for node in nodes.nodes for _ in range(2)]
    workers = Workers(clients)
    for start in range(0, 600, 100):
        fill(nodes[start // 100 % 3], numbered(f"{name}/a", 100, start))
    workers.wait_for(600)
    empty(nodes, name)
    workers.stop()
    assert Counter({b"%d" % number: 1 for number in range(600)}) == workers.all
    for client in clients:
        client.close()


def test_a_consumer_at_one_node_gets_all_in_order_from_all_publishers(nodes: ClusterNodes) -> None:
    name = declare(nodes[1])
    fill(nodes[0], numbered(f"{name}/a", 50))
    with worker(nodes[2], name) as client:
        fill(nodes[1], numbered(f"{name}/a", 50, 50))
        assert list(range(100)) == [int(message.payload) for message in take(client, 100)]
    empty(nodes, name)


def test_a_slow_consumer_keeps_nothing_from_those_at_other_nodes(nodes: ClusterNodes) -> None:
    name = declare(nodes[0])
    with worker(nodes[0], name, 1) as slow, worker(nodes[1], name) as quick:
        fill(nodes[0], numbered(f"{name}/a", 20))
        got = take(quick, 19)
        (kept,) = take(slow, 1, ack=False)
        assert set(range(20)) == {int(message.payload) for message in [*got, kept]}
        acknowledge(slow, kept)
    empty(nodes, name)


def test_what_a_consumer_refuses_or_leaves_goes_to_another_node(nodes: ClusterNodes) -> None:
    name = declare(nodes[2])
    here, there = worker(nodes[0], name), worker(nodes[1], name)
    fill(nodes[2], [(f"{name}/a", b"x")])
    deadline = time.monotonic() + PATIENCE
    first: Client
    message: Packet
    while True:
        assert time.monotonic() < deadline
        found = _first_message((here, there))
        if found is not None:
            first, message = found
            break
    second = there if first is here else here
    first.send(ack_packet(0x04, message.packet_id or 0, version=5, reason=REFUSED))
    (again,) = take(second, 1, ack=False, timeout=PATIENCE)
    assert b"x" == again.payload
    second.close()
    (last,) = take(first, 1, timeout=PATIENCE)
    assert b"x" == last.payload
    empty(nodes, name)
    first.close()


def _first_message(clients: tuple[Client, ...]) -> tuple[Client, Packet] | None:
    for client in clients:
        try:
            return client, client.recv(0.1)
        except TimeoutError:
            continue
    return None


def test_a_node_is_killed_while_its_consumers_hold_messages(nodes: ClusterNodes) -> None:
    """All of them come to others, and nothing that was acknowledged in time comes again."""
    name = declare(nodes[0])
    doomed = [worker(nodes[2], name) for _ in range(2)]
    fill(nodes[0], numbered(f"{name}/a", 100))
    held = [take(client, 4, ack=False) for client in doomed]
    clients = [worker(node, name) for node in nodes.nodes[:2]]
    workers = Workers(clients)
    nodes[2].kill()
    try:
        workers.wait_for(100)
        empty(nodes, name)
        workers.stop()
        assert {message.payload for some in held for message in some} <= workers.all.keys()
        assert Counter({b"%d" % number: 1 for number in range(100)}) == workers.all
    finally:
        nodes.nodes[2] = nodes.node("n3").start()
        for client in (*clients, *doomed):
            client.close()


def test_consumers_move_under_load(nodes: ClusterNodes) -> None:
    """From node to node with their sessions; everything comes, and in the end nothing is left."""
    name = declare(nodes[0])
    ids = [unique("mover") for _ in range(3)]
    got: set[bytes] = set()

    def arrive(client_id: str, node: NodeProcess) -> Client:
        client = lasting(node, client_id, 5, receive_maximum(8))
        assert client.connack is not None
        if not client.connack.session_present:
            subscribe(client, f"$queue/{name}")
        return client

    clients = [arrive(client_id, node) for client_id, node in zip(ids, nodes.nodes, strict=True)]
    for step in range(12):
        fill(nodes[step % 3], numbered(f"{name}/a", 30, step * 30))
        for client in clients:
            got |= {message.payload for message in _what_came(client)}
        at = step % 3
        moved = arrive(ids[at], nodes[(step + step // 3 + 1) % 3])
        clients[at].close()
        clients[at] = moved
    deadline = time.monotonic() + PATIENCE
    while len(got) < 360:
        assert time.monotonic() < deadline, f"{len(got)} of 360 have come"
        for client in clients:
            got |= {message.payload for message in _what_came(client)}
    empty(nodes, name)
    for client in clients:
        client.close()


def _what_came(client: Client) -> list[Packet]:
    found: list[Packet] = []
    while True:
        try:
            message = client.recv(0.1)
        except TimeoutError:
            return found
        if message.type == PUBLISH:
            found.append(message)
            acknowledge(client, message)


def test_attempts_are_counted_over_nodes_and_a_kill_until_the_message_is_a_dead_letter(nodes: ClusterNodes) -> None:
    dead = declare(nodes[1])
    name = declare(nodes[0], max_attempts=3, dead_letter=dead)
    fill(nodes[0], [(f"{name}/a", b"poison")])
    for node in (nodes[1], nodes[0], nodes[2]):
        victim = worker(node, name)
        (message,) = take(victim, 1, ack=False, timeout=PATIENCE)
        assert b"poison" == message.payload
        attempts = 0
        deadline = time.monotonic() + PATIENCE
        while attempts < (nodes[1], nodes[0], nodes[2]).index(node) + 1:  # it is counted
            assert time.monotonic() < deadline
            with Operator(nodes[0]) as operator:
                attempts = int(operator.read("queues", name)[0]["properties"]["attempts"])
        if node is nodes[2]:
            node.kill()
        victim.close()
    try:
        with worker(nodes[0], name), worker(nodes[1], dead) as undertaker:
            (letter,) = take(undertaker, 1, timeout=PATIENCE)
            assert b"poison" == letter.payload
            assert ("dead-attempts", "3") in letter.prop_all(0x26)
        empty(nodes, name)
        empty(nodes, dead)
    finally:
        nodes.nodes[2] = nodes.node("n3").start()


def test_a_queue_is_full_at_all_nodes(nodes: ClusterNodes) -> None:
    name = declare(nodes[0], max_messages=30)
    publishers = [connected(node) for node in nodes.nodes]
    answers = [publishers[number % 3].publish(f"{name}/a", b"x", 1) for number in range(60)]
    reasons = Counter(answer.reason or 0 for answer in answers if answer is not None)
    assert Counter({0: 30, QUOTA: 30}) == reasons
    assert 30 == stored(nodes[1], name)
    for publisher in publishers:
        publisher.close()


def test_operators_see_and_change_the_same_at_each_node(nodes: ClusterNodes) -> None:
    name = declare(nodes[0])
    with worker(nodes[0], name, 2) as here, worker(nodes[1], name, 2) as there:
        fill(nodes[2], numbered(f"{name}/a", 20))
        take(here, 2, ack=False)
        take(there, 2, ack=False)
        views = [json.loads(run("queue", "show", name, "--http", node.http, "--json").stdout) for node in nodes.nodes]
        assert {(20, 2)} == {(view["messages"], view["consumers"]) for view in views}
        clients = {tuple(sorted(each["client"] for each in view["clients"])) for view in views}
        assert 1 == len(clients)
        assert 2 == len(clients.pop())
    tails = {run("queue", "tail", name, "-n", 5, "--http", node.http, "--json").stdout for node in nodes.nodes}
    assert 1 == len(tails)
    for node in nodes.nodes:
        with Operator(node) as operator:
            operator.change("queues", name, topics=[f"{name}/#"], max_attempts=3)
            assert name in operator.names("queues")
    run("queue", "delete", name, "--yes", "--http", nodes[2].http)
    for node in nodes.nodes:
        with Operator(node) as operator:
            assert name not in operator.names("queues")
