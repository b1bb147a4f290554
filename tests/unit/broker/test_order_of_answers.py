"""What must be over before a client is answered, and before the next message goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from motorcade.broker.limits import SessionOptions
from motorcade.broker.session_records import AWAITING
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.extension.hooks import Callback, Continue, Stop, acknowledge_after
from motorcade.mqtt.packets import Pubcomp, Publish, Pubrec, Pubrel
from motorcade.mqtt.reasons import ReasonCode
from tests.support.held_store import HeldStore
from tests.support.virtual import Client, MemoryNode, standing


@pytest.fixture
def store() -> HeldStore:
    return HeldStore()


@pytest.fixture
def node(store: HeldStore) -> Iterator[MemoryNode]:
    node = MemoryNode(store=store)
    with standing(node.clock):
        yield node


def durable(node: MemoryNode, name: str) -> Client:
    return node.client(name, clean=False, session_expiry=1000)


def kinds(client: Client) -> list[str]:
    client.node.turn()
    return [type(packet).__name__ for packet in client.take()]


def test_pubcomp_waits_until_the_id_is_free_in_the_store(node: MemoryNode, store: HeldStore) -> None:
    """Else a new message with this id would pass for known after a crash."""
    client = durable(node, "publisher")
    client.send(Publish("t", b"", 2, packet_id=7))
    client.expect(Pubrec)
    store.held = True
    client.send(Pubrel(7))
    assert [] == kinds(client)
    store.held = False
    store.let_go()
    assert 7 == client.expect(Pubcomp).packet_id
    assert {} == store.records_of(AWAITING)


def test_a_qos_2_id_is_stored_after_what_plugins_store(node: MemoryNode, store: HeldStore) -> None:
    """Else a repetition after a crash would pass for known, and the plugins' part be lost."""
    done: asyncio.Future[None] = node.loop.create_future()

    def keep(_client: ClientInfo | None, message: Message) -> None:
        acknowledge_after(message, done)

    node.hooks.add("message.publish", Callback(keep, 0, "test"))
    client = durable(node, "publisher")
    client.send(Publish("t", b"", 2, packet_id=7))
    assert [] == kinds(client)
    assert {} == store.records_of(AWAITING)
    node.loop.call_soon(done.set_result, None)
    assert ["Pubrec"] == kinds(client)
    assert 1 == len(store.records_of(AWAITING))


def test_a_qos_2_message_that_is_refused_makes_room_for_the_next(node: MemoryNode) -> None:
    reader, publisher = node.client("reader", receive_maximum=1), node.client("publisher")
    reader.subscribe("t", 2)
    for payload in (b"1", b"2"):
        publisher.publish("t", payload, 2)
    (first,) = reader.messages()
    reader.send(Pubrec(first.packet_id, ReasonCode.QUOTA_EXCEEDED))
    assert [b"2"] == reader.payloads()


def test_ids_that_are_never_released_are_forgotten_in_the_store_too(node: MemoryNode, store: HeldStore) -> None:
    client = durable(node, "publisher")
    client.send(Publish("t", b"", 2, packet_id=7))
    client.expect(Pubrec)
    assert 1 == len(store.records_of(AWAITING))
    node.wait(node.state.session_options.await_rel_timeout + 60.0)
    node.broker._tick()
    node.turn()
    assert {} == store.records_of(AWAITING)


def test_what_is_new_waits_until_all_is_repeated() -> None:
    """The client takes fewer at once than before."""
    node = MemoryNode()
    with standing(node.clock):
        reader, publisher = durable(node, "reader"), node.client("publisher")
        reader.subscribe("t")
        for number in range(3):
            publisher.publish("t", b"%d" % number)
        assert 3 == len(reader.messages())
        reader.close()
        reader = node.admit("reader", clean=False, session_expiry=1000, receive_maximum=1)
        for qos in (0, 1):
            publisher.publish("t", b"new", qos)
        reader.drain()
        assert [b"0", b"1", b"2", b"new", b"new"] == [message.payload for message in reader.received]


def test_a_publisher_does_not_wait_for_a_reader_that_is_gone() -> None:
    """It waits while the only reader is behind, and goes on at once when that has closed its connection."""
    node = MemoryNode(SessionOptions(window=1, queue=4, patience=60.0))
    with standing(node.clock):
        reader, publisher = node.client("reader"), node.client("publisher")
        reader.subscribe("t")
        for number in range(1, 4):
            assert 0 == publisher.publish("t", b"%d" % number)
        publisher.put("t", b"4")
        assert [] == kinds(publisher)
        reader.close()
        assert ["Puback"] == kinds(publisher)


def test_a_topic_that_a_plugin_has_rewritten_passes_the_rules(node: MemoryNode) -> None:
    def rewrite(_client: ClientInfo | None, message: Message) -> Continue:
        return Continue(replace(message, topic="secret"))

    def authorize(_client: ClientInfo, action: str, topic: str, _allowed: Any) -> Stop:
        return Stop(action == "subscribe" or topic != "secret")

    reader = node.client("reader")
    reader.subscribe("secret")
    node.hooks.add("message.publish", Callback(rewrite, 0, "rewriter"))
    node.hooks.add("client.authorize", Callback(authorize, 0, "rules"))
    assert ReasonCode.NOT_AUTHORIZED == node.client("publisher").publish("open", b"x")
    assert [] == reader.messages()
