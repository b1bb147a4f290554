"""Does a large set of retained messages reach a client as fast as it reads, and whole, whatever happens meanwhile?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.node import NodeProcess
from tests.support.wire import PUBACK, PUBLISH, Client, ack_packet, prop, publish_packet

COUNT = 3000
SESSION_EXPIRY, RECEIVE_MAXIMUM = 0x11, 0x21
WINDOW = 10


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with NodeProcess() as running:
        with connected(running, "filler") as filler:
            filler.send(b"".join(retained(f"set/{number}", b"%d" % number) for number in range(COUNT)))
            filler.expect_nothing()
        yield running


def retained(topic: str, payload: bytes) -> bytes:
    return publish_packet(topic, payload, qos=0, retain=True)


def connected(node: NodeProcess, client_id: str, *, clean: bool = True) -> Client:
    """A client with a small window whose session lasts."""
    client = Client(node)
    properties = prop(SESSION_EXPIRY, 600) + prop(RECEIVE_MAXIMUM, WINDOW)
    assert 0 == client.connect(client_id, clean=clean, properties=properties).reason
    return client


def test_all_of_them_arrive_once(node: NodeProcess) -> None:
    """A wildcard over thousands of topics brings each message exactly once, with the retain flag."""
    with connected(node, "reader") as reader:
        reader.subscribe("set/+")
        messages = [reader.receive() for _ in range(COUNT)]
        reader.expect_nothing()
    assert {f"set/{number}" for number in range(COUNT)} == {message.topic for message in messages}
    assert all(message.retain for message in messages)


def test_a_client_that_does_not_acknowledge_holds_up_only_itself(node: NodeProcess) -> None:
    """It gets as many as its window has room for; others are served; then the rest comes."""
    with connected(node, "filler") as filler:
        for number in range(50):
            filler.publish(f"certain/{number}", b"x", 1, retain=True)
        with connected(node, "slow") as slow:
            slow.subscribe("certain/#", 1)
            held = [slow.expect(PUBLISH) for _ in range(WINDOW)]
            slow.expect_nothing()
            with connected(node, "quick") as quick:
                quick.subscribe("certain/#", 1)
                assert 50 == len({quick.receive().topic for _ in range(50)})
            filler.publish("certain/49", b"", 1, retain=True)  # may be gone before it was sent
            for message in held:
                assert message.packet_id is not None
                slow.send(ack_packet(PUBACK, message.packet_id))
            topics = {message.topic for message in held}
            while not {f"certain/{number}" for number in range(49)} <= topics:
                topics.add(slow.receive().topic)


def test_a_client_that_comes_back_gets_the_rest(node: NodeProcess) -> None:
    """A connection that breaks in the middle of the set loses nothing of it at QoS 1."""
    with connected(node, "filler") as filler:
        for number in range(100):
            filler.publish(f"resumed/{number}", b"x", 1, retain=True)
    topics = set()
    with connected(node, "tunnel", clean=False) as first:
        first.subscribe("resumed/#", 1)
        for _ in range(30):
            topics.add(first.receive().topic)
        first.abort()
    with connected(node, "tunnel", clean=False) as second:
        while len(topics) < 100:
            topics.add(second.receive().topic)
    assert {f"resumed/{number}" for number in range(100)} == topics


def test_unsubscribing_ends_the_set(node: NodeProcess) -> None:
    """After UNSUBACK nothing of it comes any more, and the session is served on."""
    with connected(node, "filler") as filler:
        for number in range(100):
            filler.publish(f"ended/{number}", b"x", 1, retain=True)
    with connected(node, "changed-mind") as client:
        client.subscribe("ended/#", 1)
        held = [client.expect(PUBLISH) for _ in range(WINDOW)]
        client.unsubscribe("ended/#")
        for message in held:
            assert message.packet_id is not None
            client.send(ack_packet(PUBACK, message.packet_id))
        client.expect_nothing()
        client.subscribe("ended/7", 1)
        assert "ended/7" == client.receive().topic
