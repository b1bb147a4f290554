"""Packets through the fast path, one by one and in runs. `test_equivalence` compares it with the channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.mqtt import codec
from motorcade.mqtt.packets import Puback, Publish, Pubrec, Pubrel
from motorcade.mqtt.properties import Properties
from motorcade.mqtt.reasons import ReasonCode
from tests.support.held_store import HeldStore
from tests.support.virtual import Client, MemoryNode, standing


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    node = MemoryNode()
    with standing(node.clock):
        yield node


def reader(node: MemoryNode, **more: Any) -> Client:
    client = node.client("reader", **more)
    client.subscribe("t", 2)
    return client


def test_what_nobody_hears_is_answered_with_its_reason(node: MemoryNode) -> None:
    client = node.client("publisher")
    for _ in range(2):  # the first one goes through the channel, which finds the route
        client.send(Publish("nobody", b"", 1, packet_id=1), Publish("nobody", b"", 2, packet_id=2))
        node.turn()
        answers = [packet for packet in client.take() if isinstance(packet, Puback | Pubrec)]
        assert [ReasonCode.NO_MATCHING_SUBSCRIBERS] * 2 == [answer.reason for answer in answers]
        client.send(Pubrel(2))


def test_a_qos_2_id_is_routed_once_until_it_is_released(node: MemoryNode) -> None:
    client, other = node.client("publisher"), reader(node)
    for expected in (1, 1):
        for _ in range(2):
            client.send(Publish("t", b"x", 2, packet_id=7))
            assert 7 == client.expect(Pubrec).packet_id
        client.send(Pubrel(7))
        assert expected == len(other.messages())


def test_packet_ids_begin_again_after_the_last_one(node: MemoryNode) -> None:
    client, other = node.client("publisher"), reader(node)
    client.publish("t", b"x")  # through the channel
    node.state.registry.sessions["reader"].next_id = 65535
    for _ in range(3):
        client.publish("t", b"x")
    assert [1, 65535, 2, 3] == [message.packet_id for message in other.messages()]


def test_a_run_of_packets_ends_where_one_has_properties(node: MemoryNode) -> None:
    """Their heads are the same, and so are their lengths."""
    client, new, old = node.client("publisher"), reader(node), node.client("old", 4)
    old.subscribe("t")
    plain = Publish("t", b"\0" * 7)
    told = Publish("t", b"", properties=Properties(user_properties=(("a", "b"),)))
    assert len(codec.encode(plain, 5)) == len(codec.encode(told, 5))
    for _ in range(2):
        client.send(plain, plain, told, plain)
        found = [(message.payload, message.properties.user_properties) for message in new.messages()]
        assert [(b"\0" * 7, ())] * 2 + [(b"", (("a", "b"),)), (b"\0" * 7, ())] == found
        assert [payload for payload, _ in found] == old.payloads()


def test_what_waits_goes_before_what_is_new(node: MemoryNode) -> None:
    """An acknowledgement and a message in one read: there is room, but somebody was here before."""
    client = reader(node, receive_maximum=1)
    for payload in (b"1", b"2"):
        client.publish("t", payload)
    (first,) = client.messages()
    client.send(Puback(first.packet_id), Publish("t", b"3", 1, packet_id=9))
    assert [b"2"] == client.payloads()
    client.ack(client.inflight[-1])
    assert [b"3"] == client.payloads()


def test_answers_that_wait_for_the_store_are_not_passed() -> None:
    store = HeldStore()
    node = MemoryNode(store=store)
    with standing(node.clock):
        node.client("asleep", clean=False, session_expiry=1000).subscribe("kept")
        node.client("awake").subscribe("live")
        client = node.client("publisher")
        for topic in ("kept", "live"):
            client.publish(topic, b"")
        store.held = True
        client.send(*(Publish(topic, b"", 1, packet_id=n) for n, topic in enumerate(("kept", "live"), 11)))
        node.turn()
        assert [] == client.take()
        store.held = False
        store.let_go()
        node.turn()
        assert [11, 12] == [packet.packet_id for packet in client.take() if isinstance(packet, Puback)]
