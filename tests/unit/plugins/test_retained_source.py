"""The retained messages that a subscription gets: whole, in step with the window, at a rate, and as they are then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motorcade.broker.limits import SessionOptions
from motorcade.core.subscription import Subscription
from motorcade.extension.plugin import Plugins
from motorcade.mqtt.packets import Connect, Publish
from motorcade.mqtt.properties import NONE, Properties
from tests.support.virtual import START, MemoryNode, Peer, Turns, standing
from tests.unit.broker.sources import acknowledge, messages, session_of, subscribe, unsubscribe

WINDOW = 10
LASTING = Properties(session_expiry=100)


class RetainedNode(MemoryNode):
    """A node with the plugin, in virtual time."""

    def load(self, **config: Any) -> None:
        assert isinstance(self.loop, Turns)
        plugins = Plugins(self.broker, self.hooks, Path("unused"), self.state.shared.sources)
        loaded = self.loop.create_task(plugins.load("retained", config))
        self.turn()
        loaded.result()
        self.publisher = self.client("publisher")

    def retain(self, topic: str, payload: bytes = b"old", properties: Properties = NONE) -> None:
        self.publisher.send(Publish(topic, payload, 1, retain=True, packet_id=1, properties=properties))
        self.turn()
        self.publisher.take()

    def resume(self, peer: Peer) -> None:
        """The client is back."""
        peer.send(Connect("car", peer.version, False, properties=LASTING if peer.version == 5 else NONE))
        self.turn()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.turn()

    def rest(self, peer: Peer, *first: Publish) -> list[tuple[str, bytes]]:
        """Acknowledge until nothing comes any more; topics and payloads of the retained messages that came."""
        found: list[Publish] = []
        acknowledge(self, peer, *first)
        while some := messages(peer):
            assert len(some) <= WINDOW
            found += [message for message in some if message.retain]
            acknowledge(self, peer, *some)
        return [(message.topic, message.payload) for message in found]


@pytest.fixture
def node() -> Iterator[RetainedNode]:
    node = RetainedNode(SessionOptions(window=WINDOW))
    with standing(node.clock):
        node.load()
        yield node


def topics(name: str, count: int) -> list[tuple[str, bytes]]:
    return [(f"{name}/{number:03}", b"old") for number in range(count)]


def filled(node: RetainedNode, count: int, name: str = "a") -> list[tuple[str, bytes]]:
    for topic, payload in topics(name, count):
        node.retain(topic, payload)
    return topics(name, count)


def test_a_set_arrives_whole_and_within_the_window(node: RetainedNode) -> None:
    """Who does not acknowledge holds up only itself; when the last has arrived, nothing is left of the source."""
    expected = filled(node, 200)
    slow, quick = node.client("slow"), node.client("quick")
    for peer in (slow, quick):
        subscribe(node, peer, ("a/#", 1))
    assert expected == node.rest(quick)
    assert session_of(node, "quick").scheduler is None
    held = messages(slow)
    assert WINDOW == len(held)
    assert expected[WINDOW:] == node.rest(slow, *held)


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_half_delivered_set_goes_on_after_a_return(node: RetainedNode, taken_over: bool) -> None:
    """Each comes once, those in flight again with DUP; what has changed meanwhile comes as it is then."""
    expected = filled(node, 120)
    peer: Peer = node.client("car", clean=False, properties=LASTING)
    subscribe(node, peer, ("a/#", 1))
    done: list[tuple[str, bytes]] = []
    for version in (4, 5, 4):
        first = messages(peer)
        acknowledge(node, peer, *first)
        held = messages(peer)
        assert WINDOW == len(held)
        done += [(message.topic, message.payload) for message in (*first, *held)]
        if not taken_over:
            peer.close()
            node.turn()
        peer = node.peer(version)
        node.resume(peer)
        again = [packet for packet in peer.take() if isinstance(packet, Publish)]
        assert [(m.topic, True) for m in held] == [(m.topic, m.dup) for m in again]
        acknowledge(node, peer, *again)
    node.retain("a/100", b"new")
    done += node.rest(peer)
    assert [(topic, b"new" if topic == "a/100" else payload) for topic, payload in expected] == done


def test_subscribing_again_brings_the_set_as_retain_handling_says(node: RetainedNode) -> None:
    """0: at every SUBSCRIBE, also in the middle of the set; 1: only if the subscription is new; 2: never."""
    expected = filled(node, 50)
    peer = node.client("car")
    for handling, count in ((2, 0), (1, 0), (0, 50), (0, 50), (1, 0)):
        subscribe(node, peer, Subscription("a/#", 1, retain_handling=handling))
        assert expected[:count] == node.rest(peer), handling
    subscribe(node, peer, Subscription("a/+", 1, retain_handling=1))
    held = messages(peer)
    subscribe(node, peer, Subscription("a/+", 1, retain_handling=1))
    assert expected[WINDOW:] == node.rest(peer, *held), "it goes on"
    subscribe(node, peer, ("a/+", 1))
    held = messages(peer)
    subscribe(node, peer, ("a/+", 1))
    assert expected == node.rest(peer, *held), "it begins again, and nothing of the first comes besides"


def test_after_unsubscribing_nothing_of_the_set_comes(node: RetainedNode) -> None:
    expected = filled(node, 50)
    peer = node.client("car")
    subscribe(node, peer, ("a/#", 1))
    held = messages(peer)
    unsubscribe(node, peer, "a/#")
    assert [] == node.rest(peer, *held)
    subscribe(node, peer, ("a/007", 1))
    assert [expected[7]] == node.rest(peer)


def test_what_changes_while_it_waits_comes_as_it_is_then(node: RetainedNode) -> None:
    """A value that is replaced comes as the new one; one that is deleted, or has expired, does not come."""
    filled(node, WINDOW, "a")
    node.retain("b/expires", properties=Properties(message_expiry=5))
    for topic in ("stays", "replaced", "deleted"):
        node.retain(f"b/{topic}")
    peer = node.client("car")
    subscribe(node, peer, ("a/#", 1))
    held = messages(peer)
    assert WINDOW == len(held)
    subscribe(node, peer, ("b/#", 1))
    node.retain("b/deleted", b"")
    node.retain("b/replaced", b"new")
    live = [("b/deleted", b""), ("b/replaced", b"new")]
    node.wait(5)
    acknowledge(node, peer, *held)
    found = messages(peer)
    assert live == [(m.topic, m.payload) for m in found if not m.retain]
    assert [("b/replaced", b"new"), ("b/stays", b"old")] == sorted((m.topic, m.payload) for m in found if m.retain)


def test_the_rate_holds_for_all_subscribers_together() -> None:
    """And who has got all uses nothing of it: the others are served, and its source is gone."""
    node = RetainedNode(SessionOptions(window=WINDOW))
    with standing(node.clock):
        node.load(delivery_rate=4)
        filled(node, 10)
        peers = [node.client(name) for name in ("one", "two")]
        node.wait(100)
        for peer in peers:
            subscribe(node, peer, ("a/+", 0))
        assert [4, 0] == [len(messages(peer)) for peer in peers]
        got = [4, 0]
        for _ in range(50):
            node.wait(0.1)
            got = [before + len(messages(peer)) for before, peer in zip(got, peers, strict=True)]
            assert sum(got) <= 4 + 4 * (node.clock.now - 100 - START) + 1e-6
        assert [10, 10] == got
        assert session_of(node, "one").scheduler is None
