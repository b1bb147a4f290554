"""What tables are said to cost is what they cost, about; the cache of routes stays within its bytes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from motorcade.broker.limits import Limits
from motorcade.broker.tables import tables
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.vin import make_vin
from motorcade.mqtt.packets import Connect, Publish, Subscribe
from motorcade.plugins.fanout import metrics as fanout
from motorcade.plugins.fanout.counters import Tally
from motorcade.plugins.retained import metrics as retained
from motorcade.plugins.retained.index import Index
from tests.support.virtual import MemoryNode, standing

MANY = 3000
BETWEEN = (0.5, 2.0)  #: estimate : what was allocated


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    made = MemoryNode(limits=Limits(flapping_count=0))
    with standing(made.clock):
        yield made


def grown(work: Callable[[], object]) -> int:
    """Bytes that are there afterwards and were not before."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + 0 * id(kept)
    finally:
        tracemalloc.stop()


def told(node: MemoryNode, name: str) -> tuple[int, int]:
    (found,) = [table for table in tables(node.state) if table.name == name]
    return found.entries, found.size_bytes


def close_to(estimate: int, allocated: int) -> bool:
    return BETWEEN[0] * allocated <= estimate <= BETWEEN[1] * allocated


@pytest.mark.parametrize("topic", ["t{}", "agent/{}/proxy/request/x", "a/b/c/d/e/f/{}/" + "x" * 200])
def test_routes_cost_what_is_told(node: MemoryNode, topic: str) -> None:
    reader, writer = node.client("reader"), node.client("writer")
    node.subscribe(reader, ("#", 0))

    def publish() -> None:
        for number in range(MANY):
            writer.send(Publish(topic.format(make_vin(number)), b"", 0))
        node.turn()
        reader.wire.written = bytearray()

    allocated = grown(publish)
    entries, size_bytes = told(node, "routes")
    assert MANY == entries
    assert close_to(size_bytes, allocated), (size_bytes, allocated)


def test_the_cache_of_routes_is_bounded_by_bytes() -> None:
    """Whatever names topics have and however many receive them, and it is empty again when they are gone."""
    node = MemoryNode(limits=Limits(route_cache=200_000, flapping_count=0))
    with standing(node.clock):
        writer, readers = node.client("writer"), [node.client(f"r{number}") for number in range(50)]
        for number in range(2000):
            depth = 1 + number % 100
            if number % 7 == 0:
                node.subscribe(readers[number % 50], (f"{number}/#", 0))
            writer.send(Publish(f"{number}/" + "x/" * depth + "long" * (number % 50), b"", 0))
            entries, size_bytes = told(node, "routes")
            assert 0 < entries and size_bytes < 200_000 + 100 * 260 + 10_000  # one route above the bound
        node.state.pubsub.forget_routes()
        assert (0, 0) == told(node, "routes")


def test_a_dropped_route_gives_back_what_it_has_cost(node: MemoryNode) -> None:
    reader, writer = node.client("reader"), node.client("writer")
    for number in range(200):
        node.subscribe(reader, (f"a/{number % 20}/+", 0))
        writer.send(Publish(f"a/{number % 20}/{number}", b"", 0))
    node.subscribe(reader, ("#", 0))  # everything is found again
    assert (0, 0) == told(node, "routes")


@pytest.mark.parametrize("filter_", ["x/{}/y", "x/{}/+", "{}/+/+/#"])
def test_subscriptions_cost_what_is_told(node: MemoryNode, filter_: str) -> None:
    clients = [node.client(f"c{number}") for number in range(MANY // 100)]

    def subscribe() -> None:
        for number, client in enumerate(clients):
            wanted = (Subscription(filter_.format(make_vin(100 * number + each)), 1) for each in range(100))
            client.send(Subscribe(1, tuple(wanted)))
        node.turn()
        for client in clients:
            client.take()

    allocated = grown(subscribe)
    entries, size_bytes = told(node, "subscriptions")
    assert MANY == entries
    assert close_to(size_bytes, allocated), (size_bytes, allocated)
    for client in clients:
        client.close()
    node.turn()
    assert (0, 0) == told(node, "subscriptions")


def test_sessions_and_connections_cost_what_is_told(node: MemoryNode) -> None:
    def leave() -> None:
        for number in range(MANY // 3):
            peer = node.peer(4)
            peer.send(Connect(f"away-{number}", 4, clean_start=False))
            node.turn()
            peer.close()
            node.turn()

    allocated = grown(leave)
    entries, size_bytes = told(node, "sessions")
    assert MANY // 3 == entries
    assert close_to(size_bytes, allocated), (size_bytes, allocated)
    peers = []

    def stay() -> None:
        for number in range(MANY // 3):
            peer = node.peer(4)
            peer.send(Connect(f"here-{number}", 4, clean_start=False))
            node.turn()
            peer.take()
            peers.append(peer)

    allocated = grown(stay)
    both = told(node, "connections")[1] + told(node, "sessions")[1] - size_bytes
    assert close_to(both, allocated), (both, allocated)


def test_retained_messages_cost_what_is_told() -> None:
    index = Index(0, 0, 0)

    def keep() -> None:
        for number in range(MANY):
            index.put(Message(f"agent/{make_vin(number)}/state", b"x" * 50, 1, True), 1.0)

    allocated = grown(keep)
    estimate = index.bytes + len(index) * retained.MESSAGE_BYTES + index.nodes * retained.LEVEL_BYTES
    assert close_to(estimate, allocated), (estimate, allocated)


def test_requests_of_the_fanout_cost_what_is_told() -> None:
    def count() -> object:
        made = {f"task_{number}": Tally(f"task_{number}", 1, 2.0, 2.0, 1) for number in range(MANY)}
        return made, sorted(made)

    allocated = grown(count)
    assert close_to(MANY * fanout.REQUEST_BYTES, allocated), allocated
