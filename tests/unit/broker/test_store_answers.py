"""Durable sessions when the store is late, fails, or does not say what it has done: one thing at a time.

What holds whatever happens is in the model (`test_durable_model`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from motorcade.broker import connection, session_writer
from motorcade.broker.session_records import AWAITING, SESSIONS
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, acknowledge_after
from motorcade.mqtt.packets import Connect, Disconnect, Pingreq, Pingresp, Publish, Pubrec, Pubrel, Will
from motorcade.mqtt.properties import Properties
from motorcade.mqtt.reasons import ReasonCode
from motorcade.storage.ports import StoreError
from tests.support.held_store import HeldStore
from tests.support.virtual import Client, MemoryNode, Turns, standing

EXPIRY = 1000  #: seconds that sessions outlive their connections


@pytest.fixture
def store() -> HeldStore:
    return HeldStore()


@pytest.fixture
def node(store: HeldStore) -> Iterator[MemoryNode]:
    node = MemoryNode(store=store)
    with standing(node.clock):
        yield node


def durable(node: MemoryNode, name: str) -> Client:
    return node.admit(name, clean=False, session_expiry=EXPIRY)


def reader_of(node: MemoryNode, qos: int = 1) -> Client:
    client = durable(node, "reader")
    client.subscribe("t", qos)
    return client


def let_go(node: MemoryNode, store: HeldStore) -> None:
    store.held = store.held_reads = False
    store.let_go()
    store.let_read()
    node.turn()


def test_a_message_of_which_the_store_has_not_said_that_it_has_it_comes(node: MemoryNode, store: HeldStore) -> None:
    reader, publisher = reader_of(node), node.client("publisher")
    store.held = True
    publisher.put("t", b"x")
    node.turn()
    store.fail(StoreError("no answer"), written=True)
    let_go(node, store)
    assert not publisher.open, "it has to send it again"
    assert [b"x"] == reader.payloads()


def test_an_acknowledgement_that_could_not_be_stored_is_stored_later(node: MemoryNode, store: HeldStore) -> None:
    reader, publisher = reader_of(node), node.client("publisher")
    publisher.publish("t", b"x")
    store.held = True
    reader.ack(*reader.messages())
    store.fail(StoreError("no answer"))
    let_go(node, store)
    node.wait(10.0)
    assert {} == store.entries("reader")


def test_a_store_that_was_full_takes_as_much_as_before(node: MemoryNode, store: HeldStore, monkeypatch) -> None:
    monkeypatch.setattr(session_writer, "MAX_IN_FLIGHT", 3)
    reader, publisher = reader_of(node), node.client("publisher")
    store.full = True
    for _ in range(4):
        assert ReasonCode.QUOTA_EXCEEDED == publisher.publish("t", b"lost")
    store.full = False
    assert 0 == publisher.publish("t", b"x")
    assert [b"x"] == reader.payloads()


def test_an_id_that_is_released_and_used_again_in_one_read_is_stored(node: MemoryNode, store: HeldStore) -> None:
    client = durable(node, "publisher")
    client.send(Publish("t", b"", 2, packet_id=7))
    client.expect(Pubrec)
    client.send(Pubrel(7), Publish("t", b"", 2, packet_id=7))
    client.expect(Pubrec)
    assert 1 == len(store.records_of(AWAITING))


def test_the_answer_to_an_earlier_connection_is_not_for_this_one(node: MemoryNode, store: HeldStore) -> None:
    reader, publisher = reader_of(node), node.client("publisher")
    reader.close()
    for payload in (b"1", b"2", b"3"):
        publisher.publish("t", payload)
    store.held_reads = True
    durable(node, "reader").close()
    reader = durable(node, "reader")
    let_go(node, store)
    assert [b"1", b"2", b"3"] == reader.payloads()


def test_a_qos_2_message_that_was_sent_does_not_expire(node: MemoryNode) -> None:
    """[MQTT-4.3.3-7]: the client may have it, and holds its id."""
    reader, publisher = reader_of(node, 2), node.client("publisher")
    publisher.publish("t", b"x", 2, message_expiry=10)
    (first,) = reader.messages()
    reader.close()
    node.wait(20.0)
    (again,) = durable(node, "reader").messages()
    assert (True, first.packet_id) == (again.dup, again.packet_id)


def test_a_restart_does_not_prolong_sessions(node: MemoryNode) -> None:
    reader_of(node).close()
    node.wait(600.0)
    node = node.restart()
    session = node.state.registry.sessions["reader"]
    assert session.expires_at is not None
    assert 400.0 == pytest.approx(session.expires_at - node.clock.now, abs=1.0)


# -- the end of sessions


def pay(node: MemoryNode) -> None:
    """Publish the wills that are due, as the broker does several times a second."""
    assert isinstance(node.loop, Turns)
    with node.loop.running():
        for will in node.state.registry.due(node.clock.now):
            node.broker.publish_will(will)
    node.turn()


@pytest.mark.parametrize("ends", ["its connection", "its session"])
def test_a_will_that_a_plugin_holds_up_survives_a_kill(node: MemoryNode, ends: str) -> None:
    """Until it is stored for those who get it, it stays in the record of its session."""
    never: asyncio.Future[None] = node.loop.create_future()

    async def hold(_client: ClientInfo | None, _message: Message) -> None:
        await asyncio.shield(never)

    node.hooks.add("message.publish", Callback(hold, 0, "slow", timeout=1000.0))
    reader = durable(node, "reader")
    reader.subscribe("wills")
    reader.close()
    delay = 100 if ends == "its session" else 0
    will = Will("wills", b"gone", 1, properties=Properties(will_delay=delay))
    node.client("dying", clean=False, session_expiry=10, will=will).close()
    if ends == "its session":
        node.wait(11.0)
    pay(node)
    node = node.restart()
    pay(node)
    assert [b"gone"] == durable(node, "reader").payloads()


@pytest.mark.parametrize("delay", [0, 5, 100])
def test_nothing_is_left_of_a_session_whose_will_is_published(node: MemoryNode, store: HeldStore, delay: int) -> None:
    """At once, before the session ends, or with it."""
    reader = reader_of(node)
    will = Will("t", b"gone", 1, properties=Properties(will_delay=delay))
    node.client("dying", clean=False, session_expiry=20, will=will).close()
    for expected in ([b"gone"] if delay < 10 else [], [b"gone"] if delay > 10 else []):
        node.wait(11.0)
        pay(node)
        assert expected == reader.payloads()
    assert ["reader"] == list(node.state.registry.sessions) == list(store.records_of(SESSIONS))


def test_a_client_that_says_what_went_wrong_leaves_its_will(node: MemoryNode) -> None:
    reader = reader_of(node)
    for reason, expected in (
        (ReasonCode.SUCCESS, []),
        (ReasonCode.DISCONNECT_WITH_WILL, [b"gone"]),
        (ReasonCode.UNSPECIFIED_ERROR, [b"gone"]),
    ):
        node.client("dying", will=Will("t", b"gone", 1)).send(Disconnect(reason))
        node.turn()
        assert expected == reader.payloads(), reason


def test_what_a_member_without_a_store_has_not_acknowledged_goes_to_another(node: MemoryNode) -> None:
    publisher, first = node.client("publisher"), node.client("first", receive_maximum=1)
    first.subscribe("$share/g/t")
    for payload in (b"1", b"2"):
        publisher.publish("t", payload)
    second = node.client("second")
    second.subscribe("$share/g/t")
    first.close()
    assert [b"1", b"2"] == second.payloads()


def test_of_what_a_member_was_sent_only_qos_1_goes_to_another(node: MemoryNode) -> None:
    """[MQTT-4.8.2-5]: a QoS 2 message may have arrived."""
    publisher = node.client("publisher")
    first, second = durable(node, "first"), durable(node, "second")
    first.subscribe("$share/g/t", 2)
    for qos in (1, 2):
        publisher.publish("t", b"%d" % qos, qos)
    assert [b"1", b"2"] == first.payloads()
    second.subscribe("$share/g/t", 2)
    first.send(Disconnect(properties=Properties(session_expiry=0)))
    node.wait(1.0)
    assert [b"1"] == second.payloads()


def test_another_user_does_not_get_the_session_of_a_client_id(node: MemoryNode) -> None:
    publisher = node.client("publisher")
    first = node.admit("c", clean=False, session_expiry=EXPIRY, username="anna")
    first.subscribe("t")
    first.close()
    publisher.publish("t", b"for anna")
    second = node.admit("c", clean=False, session_expiry=EXPIRY, username="bert")
    assert not second.connack.session_present
    publisher.publish("t", b"for nobody")
    assert [] == second.messages()


def test_a_durable_client_that_wants_nothing_of_its_own_gets_nothing_of_it(node: MemoryNode) -> None:
    """Through the channel and through the fast path."""
    client, other = durable(node, "client"), node.client("other")
    node.subscribe(client, Subscription("t", 1, no_local=True))
    for _ in range(3):
        client.publish("t", b"own")
        other.publish("t", b"other")
    assert [b"other"] * 3 == client.payloads()


def test_a_client_that_is_back_is_not_held_up_by_answers_of_its_last_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many wait that no more is taken; when they are there, they go to a connection that is gone."""
    monkeypatch.setattr(connection, "MAX_UNCOMMITTED", 2)
    node = MemoryNode()
    commits: list[Commit[None]] = []

    def keep(_client: ClientInfo | None, message: Message) -> None:
        commits.append(Commit())
        acknowledge_after(message, commits[-1], taken=True)

    node.hooks.add("message.publish", Callback(keep, 0, "slow"))
    with standing(node.clock):
        lasting = Properties(session_expiry=3600)
        node.client("p", properties=lasting).send(*(Publish("t", b"m", 1, packet_id=n) for n in (1, 2)))
        node.turn()
        again = node.peer()
        again.send(Connect("p", 5, clean_start=False, properties=lasting))
        node.turn()
        again.take()
        again.send(Pingreq())
        node.turn()
        for commit in commits:
            commit.settle(None)
        node.turn()
        again.take()
        again.send(Pingreq())
        node.turn()
        assert [Pingresp()] == again.take()
