"""A right that is taken away: what waits and is in flight under it is not delivered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import pytest

from motorcade.broker.limits import SessionOptions
from motorcade.broker.revoked import Revoked
from motorcade.broker.session import Session
from motorcade.broker.session_records import SESSIONS
from motorcade.core.client import ClientInfo
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Stop
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)
from motorcade.mqtt.properties import Properties
from tests.support.cases import each
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, Turns, standing, surviving

LASTING = Properties(session_expiry=3600)


class World:
    """A node whose rules can change, with or without a store."""

    def __init__(self, node: MemoryNode, *, durable: bool) -> None:
        self.node = node
        self.durable = durable
        self.denied: set[str] = set()
        self.guard()

    def guard(self) -> None:
        self.node.hooks.add("client.authorize", Callback(self.decide, 0, "access"))
        self.node.turn()

    def decide(self, client: ClientInfo, action: str, topic: str, acc: object) -> Stop:
        return Stop(not (action == "subscribe" and topic in self.denied))

    def deny(self, *filters: str, told: bool = True) -> None:
        """The rules change; whether the node is told, or finds out when a client comes back."""
        self.denied |= set(filters)
        if told:
            self.node.broker.recheck_access()
            self.node.turn()

    def kill(self) -> None:
        if self.durable:
            self.node = self.node.restart()
            self.guard()

    def join(self) -> Peer:
        return self.node.client("r", properties=LASTING)

    def back(self) -> tuple[Peer, list[Packet]]:
        peer = self.node.peer(5)
        peer.send(Connect("r", 5, clean_start=False, properties=LASTING))
        self.node.turn()
        first, *rest = peer.take()
        assert isinstance(first, Connack) and first.session_present
        return peer, rest

    def publish(self, *messages: tuple[str, int]) -> None:
        peer = self.node.client("p")
        for number, (topic, qos) in enumerate(messages, 1):
            peer.send(Publish(topic, f"{topic} {number}".encode(), qos, packet_id=number if qos else 0))
            self.node.turn()
            if qos == 2:
                peer.send(Pubrel(number))
                self.node.turn()
        peer.close()
        self.node.turn()

    @property
    def dropped(self) -> int:
        return self.node.state.stats.dropped["revoked"]


@contextmanager
def made(durable: bool = True) -> Iterator[World]:
    node = MemoryNode(SessionOptions(window=2), store=HeldStore() if durable else None)
    with standing(node.clock):
        yield World(node, durable=durable)


def payloads(packets: list[Packet]) -> list[bytes]:
    return [packet.payload for packet in packets if isinstance(packet, Publish)]


def finish(world: World, peer: Peer, packets: list[Packet]) -> list[bytes]:
    """Acknowledge until nothing comes any more; what came."""
    got: list[bytes] = []
    while packets:
        got += payloads(packets)
        for packet in packets:
            if isinstance(packet, Publish) and packet.qos:
                peer.send(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))
            elif isinstance(packet, Pubrel):
                peer.send(Pubcomp(packet.packet_id))
        world.node.turn()
        packets = peer.take()
    return got


@each(durable=(False, True), qos=(1, 2), when=("connected", "away", "on resume", "killed"))
def test_what_waits_and_is_in_flight_is_not_delivered(durable: bool, qos: int, when: str) -> None:
    with made(durable) as world:
        peer = world.join()
        world.node.subscribe(peer, ("secret/#", qos), ("open", qos), ("secret/both", qos))
        messages = [
            ("secret/a", qos),
            ("open", qos),
            ("secret/a", qos),
            ("secret/both", qos),
            ("open", qos),
        ]
        world.publish(*messages)
        first = peer.take()
        assert 2 == len(payloads(first))
        if when == "connected":
            world.deny("secret/#")
            assert finish(world, peer, first)[2:] == [b"secret/both 4", b"open 5"]
            assert 1 == world.dropped
            return
        if when == "killed":
            world.deny("secret/#")
        peer.close()
        world.node.turn()
        if when == "away":
            world.deny("secret/#")
        if when == "killed":
            world.kill()
        if when == "on resume":
            world.deny("secret/#", told=False)
        peer, packets = world.back()
        expected = [b"open 2", b"secret/both 4", b"open 5"]
        assert expected == finish(world, peer, packets)
        world.publish(("open", qos), ("secret/a", qos))
        assert [b"open 1"] == finish(world, peer, peer.take())
        session = world.node.state.registry.sessions["r"]
        assert not session.inflight and session.revoked is None
        assert when == "killed" or 2 == world.dropped


@each(durable=(False, True))
def test_the_id_of_a_withdrawn_qos_2_message_is_freed(durable: bool) -> None:
    """The client may have got it, and would take the next one under this id for the same."""
    with made(durable) as world:
        peer = world.join()
        world.node.subscribe(peer, ("secret", 2))
        world.publish(("secret", 2))
        (message,) = peer.take()
        assert isinstance(message, Publish)
        peer.close()
        world.node.turn()
        world.deny("secret")
        peer, packets = world.back()
        assert [Pubrel(message.packet_id)] == packets
        peer.send(Pubcomp(message.packet_id))
        world.node.turn()
        assert not world.node.state.registry.sessions["r"].inflight


@each(durable=(False, True))
def test_what_is_in_flight_on_a_living_connection_is_finished(durable: bool) -> None:
    with made(durable) as world:
        peer = world.join()
        world.node.subscribe(peer, ("secret", 2))
        world.publish(("secret", 2))
        (message,) = peer.take()
        assert isinstance(message, Publish)
        world.deny("secret")
        peer.send(Pubrec(message.packet_id))
        world.node.turn()
        assert [Pubrel(message.packet_id)] == peer.take()
        assert 0 == world.dropped


@each(durable=(False, True))
def test_a_right_that_is_given_back_delivers_what_is_left(durable: bool) -> None:
    with made(durable) as world:
        peer = world.join()
        world.node.subscribe(peer, ("secret", 1))
        world.publish(("secret", 1))
        (message,) = peer.take()
        assert isinstance(message, Publish)
        world.deny("secret")
        world.denied.clear()
        peer.send(Subscribe(7, (Subscription("secret", 1),)))
        world.node.turn()
        peer.take()
        peer.close()
        world.node.turn()
        assert [message.payload] == payloads(world.back()[1])


@each(durable=(False, True))
def test_what_a_client_unsubscribes_itself_still_arrives(durable: bool) -> None:
    """[MQTT-3.10.4-3]: delivery that has begun is completed."""
    with made(durable) as world:
        peer = world.join()
        world.node.subscribe(peer, ("t", 1))
        world.publish(("t", 1), ("t", 1))
        assert 2 == len(peer.take())
        peer.send(Unsubscribe(3, ("t",)))
        world.node.turn()
        peer.close()
        world.node.turn()
        assert 2 == len(payloads(world.back()[1]))


def test_another_subscription_that_matches_is_enough() -> None:
    revoked = Revoked(["a/#", "$share/g/b"], ["a/b", "+/c"])
    assert [revoked.hides(topic) for topic in ("a/x", "a/b", "a/c", "b", "z")] == [True, False, False, True, False]
    revoked.allow("a/x")
    revoked.add("a/b")
    assert [revoked.hides(topic) for topic in ("a/x", "a/b")] == [False, True]


@pytest.fixture
def durable() -> Iterator[World]:
    with made() as world:
        yield world


@each(written=(0, 1, 2, 3))
def test_what_came_under_a_lost_right_is_not_delivered_however_the_node_is_killed(written: int) -> None:
    """Of the writes that follow the change of the rules any number may be done."""
    with made() as durable:
        world, store = durable, durable.node.store
        assert isinstance(store, HeldStore)
        peer = world.join()
        world.node.subscribe(peer, ("secret", 1), ("open", 1))
        peer.close()
        world.node.turn()
        world.publish(("secret", 1), ("open", 1))
        store.held = True
        world.deny("secret")
        store.held = False
        store.die(written)
        world.kill()
        peer, packets = world.back()
        assert [b"open 2"] == finish(world, peer, packets)


class Slow:
    """Rules that are asked elsewhere: the answer comes when the test says so."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held = False
        self.answers: list[asyncio.Future[None]] = []
        world.node.hooks.add("client.authorize", Callback(self.decide, 1, "elsewhere", timeout=60.0))
        world.node.turn()

    def decide(self, client: ClientInfo, action: str, topic: str, acc: object) -> Stop | Awaitable[Stop]:
        return self._wait(client, action, topic) if self.held else self.world.decide(client, action, topic, acc)

    async def _wait(self, client: ClientInfo, action: str, topic: str) -> Stop:
        assert isinstance(self.world.node.loop, Turns)
        self.answers.append(self.world.node.loop.create_future())
        await self.answers[-1]
        return self.world.decide(client, action, topic, None)

    def deny(self, filter_: str) -> None:
        """The rules change; the answer for the first subscription of the only session is there."""
        self.held = True
        self.world.denied.add(filter_)
        self.world.node.loop.call_soon(self.world.node.broker.recheck_access)
        self.world.node.turn()
        self.answer()

    def answer(self) -> None:
        """The oldest question."""
        answer = self.answers.pop(0)
        if not answer.done():
            answer.set_result(None)
        self.world.node.turn()


def test_a_connection_that_breaks_while_its_rights_are_looked_at_keeps_nothing(durable: World) -> None:
    world = durable
    slow = Slow(world)
    peer = world.join()
    world.node.subscribe(peer, ("secret", 1), ("open", 1))
    world.publish(("secret", 1), ("open", 1), ("secret", 1), ("open", 1))
    assert [b"secret 1", b"open 2"] == payloads(peer.take())
    slow.deny("secret")
    slow.held = False
    peer.close()
    world.node.turn()
    while slow.answers:
        slow.answer()
    peer, packets = world.back()
    assert [b"open 2", b"open 4"] == finish(world, peer, packets)


def test_a_session_that_ends_while_its_rights_are_looked_at_leaves_nothing(durable: World) -> None:
    world, store = durable, durable.node.store
    assert isinstance(store, HeldStore)
    slow = Slow(world)
    peer = world.join()
    world.node.subscribe(peer, ("secret", 1), ("open", 1))
    peer.close()
    world.node.turn()
    slow.deny("secret")
    slow.held = False
    store.held = True  # it is not gone yet when the rest is known
    world.node.state.registry.end("r", world.node.clock.now)
    world.node.turn()
    while slow.answers:
        slow.answer()
    store.held = False
    while store.waiting:
        store.let_go()
        world.node.turn()
    assert "r" not in store.records_of(SESSIONS)


def test_a_fault_with_one_session_leaves_no_other_its_rights(durable: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = durable
    for name in ("a", "b", "c"):
        peer = world.node.client(name, properties=LASTING)
        world.node.subscribe(peer, ("secret", 1))
        peer.close()
        world.node.turn()
    sessions = world.node.state.registry.sessions
    leave = Session.leave_sources

    def breaks(session: Session, filter_: str) -> None:
        if session is sessions["a"]:
            raise RuntimeError("a defect")
        leave(session, filter_)

    monkeypatch.setattr(Session, "leave_sources", breaks)
    world.denied.add("secret")
    world.node.loop.call_soon(world.node.broker.recheck_access)
    with surviving():
        world.node.turn()
    assert not sessions["b"].subscriptions and not sessions["c"].subscriptions
    assert 1 == world.node.broker.supervisor.failures["broker.recheck"]
