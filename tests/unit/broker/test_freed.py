"""Memory of what has ended comes back at once, by reference counts alone: the collector may come much later."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from motorcade.broker.ack_queue import AckQueue
from motorcade.broker.channel import Channel
from motorcade.broker.connection import Connection
from motorcade.broker.durable_queue import DurableQueue
from motorcade.broker.limits import SessionOptions
from motorcade.broker.pubsub import STRATEGIES, SharedGroup
from motorcade.broker.session import Session
from motorcade.broker.source_scheduler import SourceScheduler
from motorcade.broker.source_slot import InstanceFeed, SourceSlot
from motorcade.commit import Commit
from motorcade.extension.sources import Source
from motorcade.mqtt.packets import Connect, Disconnect, Puback, Publish, Pubrec, Pubrel
from motorcade.mqtt.properties import Properties
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, standing
from tests.unit.broker.sources import SharedBacklog

LASTING = Properties(session_expiry=1_000_000)
KINDS = (
    Session,
    DurableQueue,
    Connection,
    Channel,
    SourceScheduler,
    SourceSlot,
    InstanceFeed,
    Source,
    AckQueue,
    Commit,
)


def alive(*kinds: type) -> Counter[str]:
    """Objects of these kinds; the collector knows them also while it does not collect."""
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds or KINDS))


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_session_that_has_ended_is_freed() -> None:
    for expiry in (0, 3600):
        for stored in (False, True):
            with ExitStack() as stack:
                node = MemoryNode(SessionOptions(window=4), store=HeldStore() if stored else None)
                stack.enter_context(standing(node.clock))
                stack.enter_context(without_collector())
                SharedBacklog("s", 50).open(node)
                publisher = node.client("p")
                node.subscribe(node.client("q", properties=LASTING), ("live", 1))
                publisher.send(Publish("live", b"", 1, packet_id=1))
                node.turn()
                before = alive()
                for how in ("break", "goodbye", "taken over", "discarded", "discarded later", "refused"):
                    _live(node, expiry, how)
                    for number in range(1, 4):
                        publisher.send(Publish("live", b"%d" % number, 1, packet_id=number))
                        node.turn()
                    publisher.take()
                    # Connections that are closed are given some seconds; sessions that have ended need not expire.
                    node.clock.now += 10 if how in {"goodbye", "discarded", "discarded later"} else 7200
                    for will in node.state.registry.due(node.clock.now):
                        node.broker.publish_will(will)
                    node.turn()
                    assert ["p", "q"] == list(node.state.registry.sessions)
                    assert before == alive(), how


def test_a_shared_group_is_freed_with_its_last_member() -> None:
    """And holds no session that has left: names of groups are chosen by clients."""
    for strategy in STRATEGIES:
        with ExitStack() as stack:
            node = MemoryNode(SessionOptions(shared_strategy=strategy))
            stack.enter_context(standing(node.clock))
            stack.enter_context(without_collector())
            publisher, staying = node.client("p"), node.client("stays")
            node.subscribe(staying, ("$share/g/a/b", 1))
            before = alive(SharedGroup, Session)
            for number in range(5):
                peer = node.client(f"car-{number}")
                node.subscribe(peer, ("$share/g/a/b", 1), (f"$share/own-{number}/a/b", 1))
                for each in range(1, 5):
                    publisher.send(Publish("a/b", b"", 1, packet_id=each))
                node.turn()
                peer.send(Disconnect())
                node.turn()
                for client in (peer, publisher, staying):
                    client.take()
                peer.wire.protocol = None
                del peer, client
                node.clock.now += 10
                node.turn()
            assert before == alive(SharedGroup, Session)


def _live(node: MemoryNode, expiry: int, how: str) -> None:
    """A client comes, uses everything, and goes."""
    properties = Properties(session_expiry=expiry)
    peer = node.client("car", properties=properties)
    node.subscribe(peer, ("x", 1), ("live", 2))
    other = node.client("other")
    for number in range(1, 7):
        other.send(Publish("live", b"%d" % number, 1 + number % 2, packet_id=number))
        node.turn()
        if number % 2:
            other.send(Pubrel(number))
    node.turn()
    other.send(Disconnect())
    node.turn()
    flying = [packet for packet in peer.take() if isinstance(packet, Publish) and packet.qos]
    for packet in flying[:3]:
        peer.send(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))
    peer.send(Publish("$SYS/no", b"", 2, packet_id=9), Publish("somewhere", b"", 2, packet_id=10))
    node.turn()
    if how == "refused":
        peer.send(b"\x00\x00")
    elif how in {"taken over", "discarded", "discarded later"}:
        if how == "discarded later":
            peer.close()
            node.turn()
        again = node.peer(5)
        again.send(Connect("car", 5, clean_start=how != "taken over", properties=properties))
        node.turn()
        again.send(Disconnect(properties=Properties(session_expiry=0)))
    elif how == "goodbye":
        peer.send(Disconnect(properties=Properties(session_expiry=0) if expiry else Properties()))
    else:
        peer.close()
    node.turn()
    peer.take()
    peer.wire.protocol = None  # transports of the event loop let go of their protocol
