"""What a connection owes to all packets alike, at both speeds: rates, order while a hook is waited for, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self
from unittest.mock import patch

import pytest

from motorcade.broker import connection as connection_module
from motorcade.broker.connection import Pause
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Continue, Stop
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsubscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from tests.support.virtual import MemoryNode, Peer, standing


@pytest.fixture(params=[False, True], ids=["fast path", "observed"])
def observed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(observed: bool) -> Iterator[Callable[..., MemoryNode]]:
    """A node at one of both speeds."""
    with ExitStack() as stack:

        def made(session: SessionOptions | None = None, limits: Limits | None = None) -> MemoryNode:
            node = MemoryNode(session, limits)
            kept = Callback(lambda _client, _message: None, 0, "retained", retained_only=True)
            node.hooks.add("message.publish", kept)
            node.state.observed = observed
            stack.enter_context(standing(node.clock))
            return node

        yield made


Make = Callable[..., MemoryNode]

# --- rates --------------------------------------------------------------------------------------------------------

MESSAGES = {
    "plain": Publish("t", b"x"),
    "qos 1": Publish("t", b"x", 1, packet_id=1),
    "retained": Publish("t", b"x", retain=True),
    "repeated": Publish("t", b"x", 1, dup=True, packet_id=1),
    "with properties": Publish("t", b"x", properties=Properties(user_properties=(("k", "v"),))),
    "by alias": Publish("t", b"x", properties=Properties(topic_alias=1)),
}


def test_every_kind_of_message_counts_against_the_rate(make: Make) -> None:
    """Reading pauses for as long as the bucket needs, and goes on then."""
    for kind, message in MESSAGES.items():
        node = make(limits=Limits(message_rate=10.0, message_burst=20.0))
        car = node.client("car")
        car.send(codec.encode(message, 5) * 40)
        assert not car.wire.reading, kind
        assert node.state.stats.refused["message_rate"] >= 1, kind
        assert 40 == node.state.stats.publish_received, "what has been read is served"
        node.clock.now += 1.9
        node.turn()
        assert not car.wire.reading
        node.clock.now += 0.2
        node.turn()
        assert car.wire.reading


def test_slower_than_the_rate_is_never_held(make: Make) -> None:
    node = make(limits=Limits(message_rate=10.0, message_burst=5.0))
    car = node.client("car")
    for _ in range(50):
        car.send(Publish("t", b"x"))
        assert car.wire.reading
        node.clock.now += 0.11
    assert 0 == node.state.stats.refused["message_rate"]


def test_every_byte_counts_against_the_byte_rate(make: Make) -> None:
    for packet in (Publish("t", bytes(1000)), Pingreq(), Publish("t", bytes(1000), retain=True)):
        node = make(limits=Limits(byte_rate=1000.0, byte_burst=2000.0))
        car = node.client("car")
        data = codec.encode(packet, 5)
        car.send(data * (4000 // len(data)))
        assert not car.wire.reading
        assert node.state.stats.refused["byte_rate"] >= 1


# --- what is told -------------------------------------------------------------------------------------------------


def test_messages_without_subscribers_are_told_one_by_one(make: Make, observed: bool) -> None:
    node = make()
    told: list[tuple[bytes, str]] = []

    def dropped(_client: ClientInfo | None, message: Message, why: str) -> None:
        told.append((message.payload, why))

    node.hooks.add("message.dropped", Callback(dropped, 0, "test"))
    node.state.observed = observed
    car = node.client("car")
    car.send(*(Publish("nobody", b"%d" % number) for number in range(5)))
    assert [(b"%d" % number, "no_subscribers") for number in range(5)] == told


def test_messages_for_a_slow_client_are_told_as_they_were(make: Make, observed: bool) -> None:
    """With topic, payload and publisher, whichever way they came."""
    node = make()
    told: list[Message] = []
    node.hooks.add("message.dropped", Callback(lambda _client, message, _why: told.append(message), 0, "test"))
    node.state.observed = observed
    car, slow = node.client("car"), node.client("slow", 4)
    node.subscribe(slow, ("t/#", 0))
    car.send(Publish("t/ü", b"first"))  # its route is known from here on
    slow.wire.fill()
    car.send(*(Publish("t/ü", b"\xff%d" % number) for number in range(3)))
    assert [("t/ü", b"\xff%d" % number, "car") for number in range(3)] == [
        (m.topic, m.payload, m.publisher) for m in told
    ]


def test_a_read_that_ends_in_an_error_is_served_up_to_there(make: Make) -> None:
    """The good packets are delivered, answered and counted."""
    node = make()
    car, watch = node.client("car"), node.client("watch")
    node.subscribe(watch, ("t", 1))
    car.send(Publish("t", b"0"))
    car.send(Publish("t", b"1"), Publish("t", b"2", 1, packet_id=9), b"\x00\x00", Publish("t", b"never"))
    node.turn()
    assert [b"0", b"1", b"2"] == [p.payload for p in watch.take() if isinstance(p, Publish)]
    puback, goodbye = car.take()
    assert isinstance(puback, Puback) and isinstance(goodbye, Disconnect)
    assert ReasonCode.MALFORMED_PACKET is goodbye.reason
    assert not car.open
    assert (3, 3) == (node.state.stats.publish_received, node.state.stats.publish_sent)


def test_room_made_in_a_read_that_ends_in_an_error_is_used(make: Make) -> None:
    """What waited for an acknowledgement goes out before the goodbye."""
    node = make(SessionOptions(window=1))
    car, watch = node.client("car"), node.client("watch")
    node.subscribe(watch, ("t", 1))
    car.send(*(Publish("t", b"%d" % number, 1, packet_id=number + 1) for number in range(2)))
    node.turn()
    assert [b"0"] == [p.payload for p in watch.take() if isinstance(p, Publish)]
    watch.send(Puback(1), b"\xff\xff\xff\xff\xff\xff")
    node.turn()
    message, goodbye = watch.take()
    assert isinstance(message, Publish) and b"1" == message.payload
    assert isinstance(goodbye, Disconnect)


def test_counters_tell_messages_not_attempts(make: Make) -> None:
    """A message that waits is counted when it is sent, and once."""
    node = make(SessionOptions(window=1))
    car, watch = node.client("car"), node.client("watch")
    node.subscribe(watch, ("t", 1))
    for number in range(3):
        car.send(Publish("t", b"", 1, packet_id=number + 1))
    assert (3, 1) == (node.state.stats.publish_received, node.state.stats.publish_sent)
    for number in range(3):
        watch.send(Puback(number + 1))
    assert (3, 3) == (node.state.stats.publish_received, node.state.stats.publish_sent)
    assert 3 * 0 == node.state.stats.publish_bytes_received


def test_a_client_that_comes_back_with_less_room_still_gets_its_connack(make: Make) -> None:
    node = make()
    keep = Properties(session_expiry=100)
    watch = node.client("watch", clean=False, properties=keep)
    node.subscribe(watch, ("t", 1))
    node.client("car").send(Publish("t", b"x" * 500, 1, packet_id=1), Publish("t", b"small", 1, packet_id=2))
    node.turn()
    watch.close()
    node.turn()
    again = node.peer()
    again.send(
        Connect("watch", 5, clean_start=False, properties=Properties(session_expiry=100, maximum_packet_size=100))
    )
    node.turn()
    connack, small = again.take()
    assert isinstance(connack, Connack) and connack.session_present
    assert isinstance(small, Publish) and (b"small", True) == (small.payload, small.dup)


def test_a_client_that_takes_no_connack_is_told_so(make: Make) -> None:
    """CONNACK 0x95 if that fits, else nothing; a session that it had stays as it was."""
    node = make()
    node.client("watch", clean=False, properties=Properties(session_expiry=100)).close()
    node.turn()
    told = []
    for most in range(1, 60):
        peer = node.peer()
        options = Properties(session_expiry=100, maximum_packet_size=most)
        peer.send(Connect("watch", 5, clean_start=False, properties=options))
        node.turn()
        answers = peer.take()
        told.append([answer.reason for answer in answers if isinstance(answer, Connack)])
        assert all(len(codec.encode(answer, 5)) <= most for answer in answers)
        assert peer.open is (told[-1] == [ReasonCode.SUCCESS])
        peer.close()
        node.turn()
    assert [[]] * 4 == told[:4]
    assert [ReasonCode.PACKET_TOO_LARGE] == told[4]
    refused = told.count([ReasonCode.PACKET_TOO_LARGE])
    assert [[ReasonCode.SUCCESS]] * (55 - refused) == told[4 + refused :]
    assert 0 < refused < 40
    assert 100 == node.state.registry.sessions["watch"].expiry


class Tight(list[bytes]):
    """A list for which memory ends: as Python's, it takes all of what is added or nothing."""

    room = 0

    def append(self, item: bytes) -> None:
        if len(self) >= self.room:
            raise MemoryError
        super().append(item)

    def __iadd__(self, items: Any) -> Self:  # type: ignore[misc,override]
        if len(self) + len(items) > self.room:
            raise MemoryError
        super().extend(items)
        return self


def test_no_half_packet_is_sent_when_memory_ends() -> None:
    """Neither to the publisher, whose acknowledgement does not fit, nor to a subscriber."""
    for room in range(9):
        node = MemoryNode()
        publisher, subscriber = node.client("publisher"), node.client("subscriber")
        node.subscribe(subscriber, ("t/#", 2))
        publisher.send(Publish("t/1", b"", 1, packet_id=9), Publish("t/2", b"", 2, packet_id=10), Publish("t/1", b""))
        node.turn()
        first = subscriber.take()
        publisher.take()
        packets: list[Packet] = [
            *(Publish("t/1", b"x", 1, packet_id=1), Publish("t/2", b"x", 2, packet_id=2), Pubrel(2), Pingreq()),
            *(Publish("t/1", b"y"), Publish("t/1", b"z", properties=Properties(content_type="text"))),
        ]
        for tight in (publisher, subscriber):
            session = tight.connection.session
            assert session is not None
            session.out = Tight()
            session.out.room = room
            answers = [Pubrec(p.packet_id) for p in first if isinstance(p, Publish) and p.qos == 2]
            with patch.object(connection_module.log, "error", lambda *_, **__: None):
                subscriber.send(*answers)
                publisher.send(*packets)
                node.turn()
            for peer in (publisher, subscriber):
                data = bytes(peer.wire.written)
                assert data == b"".join(codec.encode(packet, 5) for packet in peer.take()), "whole packets only"


def test_a_full_socket_stops_reading_until_it_is_empty(make: Make) -> None:
    """A client that does not read its answers gets to ask nothing more."""
    node = make()
    car = node.client("car")
    car.wire.fill()
    assert not car.wire.reading
    car.wire.drain()
    assert car.wire.reading


HOLDING = [pause for pause in Pause if pause not in (Pause.FULL_SOCKET, Pause.CLOSING)]  #: what is read is kept


@pytest.mark.parametrize("pause", HOLDING, ids=lambda pause: pause.name)
def test_reasons_not_to_read_add_up(make: Make, pause: Pause) -> None:
    """What comes while a connection is held is taken, in order, when the last reason has gone."""
    node = make()
    car = node.client("car")
    connection = car.connection
    for other in {*HOLDING, Pause.FULL_SOCKET} - {pause}:
        connection.hold(pause)
        connection.hold(other)
        assert (connection.pauses, connection.held, car.wire.reading) == (pause | other, True, False)
        car.send(Subscribe(1, (Subscription("t"),)))
        car.send(Publish("t", b"x"))
        node.turn()
        connection.resume(other)
        node.turn()
        assert (connection.pauses, car.take(), car.wire.reading) == (pause, [], False)
        connection.resume(pause)
        node.turn()
        assert (connection.pauses, connection.held, car.wire.reading) == (Pause(0), False, True)
        assert [type(packet) for packet in car.take()] == [Suback, Publish]


def test_a_closing_connection_is_never_read_again(make: Make) -> None:
    """Whatever held it before, or would hold it or let it go now."""
    node = make()
    for number, pause in enumerate((*HOLDING, Pause.FULL_SOCKET)):
        car = node.client(f"car{number}")
        connection = car.connection
        connection.hold(pause)
        connection.close("enough")
        connection.hold(pause)
        connection.resume(pause)
        assert connection.pauses == Pause.CLOSING and connection.closing and not connection.held
        connection.data_received(codec.encode(Pingreq(), 5))
        node.turn()
        assert not car.take()


# --- hooks that wait (on a real event loop) -----------------------------------------------------------------------

PATIENCE = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - any condition, in tests only
            await asyncio.sleep(0)


class Gate:
    """An asynchronous callback that waits until it is opened."""

    def __init__(self) -> None:
        self.waiting = 0
        self.open = asyncio.Event()

    async def pass_through(self, answer: Any = None) -> Any:
        self.waiting += 1
        await self.open.wait()
        return answer


async def connected(node: MemoryNode, name: str, *, clean: bool = True, expiry: int | None = None) -> Peer:
    peer = node.peer()
    peer.send(Connect(name, 5, clean, properties=Properties(session_expiry=expiry)))
    packets: list[Packet] = []
    await received(peer, packets, 1)
    assert isinstance(packets[0], Connack)
    return peer


async def received(peer: Peer, packets: list[Packet], count: int) -> None:
    """Read until there are so many packets."""

    def enough() -> bool:
        packets.extend(peer.take())
        return len(packets) >= count

    await until(enough)


@pytest.fixture
async def node() -> MemoryNode:
    return MemoryNode(loop=asyncio.get_running_loop())


async def test_packets_keep_their_order_while_a_hook_is_waited_for(node: MemoryNode) -> None:
    """The client itself waits, in whatever pieces it goes on sending; others do not."""
    gate = Gate()

    async def hold(_client: ClientInfo, message: Message) -> Any:
        return await gate.pass_through(Continue(message))

    node.hooks.add("message.publish", Callback(hold, 0, "test", topics=("slow",), timeout=PATIENCE))
    watch, car, bus = [await connected(node, name) for name in ("watch", "car", "bus")]
    packets: list[Packet] = []
    watch.send(Subscribe(1, (Subscription("#", 0),)))
    await received(watch, packets, 1)
    data = b"".join(
        codec.encode(packet, 5) for packet in (Publish("slow", b"1"), Publish("t", b"2"), Publish("t", b"3"), Pingreq())
    )
    for start in range(0, len(data), 3):
        car.connection.data_received(data[start : start + 3])
    await until(lambda: gate.waiting == 1)
    assert not car.wire.reading
    bus.send(Publish("t", b"other"))
    await received(watch, packets, 2)
    assert [b"other"] == [p.payload for p in packets if isinstance(p, Publish)]
    gate.open.set()
    await received(watch, packets, 5)
    assert [b"other", b"1", b"2", b"3"] == [p.payload for p in packets if isinstance(p, Publish)]
    answers: list[Packet] = []
    await received(car, answers, 1)
    assert [Pingresp()] == answers
    assert car.wire.reading


async def test_a_callback_whose_own_work_is_cancelled_does_not_hold_its_client_for_ever(node: MemoryNode) -> None:
    """As when its plugin is unloaded while it waits for one of the plugin's tasks."""
    work = asyncio.get_running_loop().create_future()

    async def hold(_client: ClientInfo, _message: Message) -> None:
        await work

    callback = Callback(hold, 0, "test", timeout=PATIENCE)
    node.hooks.add("message.publish", callback)
    car = await connected(node, "car")
    car.send(Publish("t", b"", 1, packet_id=1), Pingreq())
    await until(lambda: not car.wire.reading)
    work.cancel()
    packets: list[Packet] = []
    await received(car, packets, 2)
    assert isinstance(packets[0], Puback) and isinstance(packets[1], Pingresp)
    assert 1 == callback.errors


async def test_a_client_that_goes_while_a_hook_is_waited_for(node: MemoryNode) -> None:
    """Its packets are forgotten, its session ends as it should, and the callback is cancelled."""
    gate = Gate()
    ended: list[bool] = []

    async def hold(_client: ClientInfo, message: Message) -> Any:
        try:
            return await gate.pass_through(Continue(message))
        finally:
            ended.append(True)

    callback = Callback(hold, 0, "test", timeout=PATIENCE)
    node.hooks.add("message.publish", callback)
    car = await connected(node, "car")
    car.send(Publish("t", b""))
    await until(lambda: gate.waiting == 1)
    car.close()
    await until(lambda: bool(ended))
    await until(lambda: not node.broker.connections)
    assert ({}, 0, 0) == (node.state.registry.sessions, node.state.registry.connected, callback.errors)


class Resuming:
    """A client with a session and a subscription comes back while access rules take their time."""

    def __init__(self, node: MemoryNode) -> None:
        self.node = node
        self.gate = Gate()

    async def begin(self) -> Peer:
        first = await connected(self.node, "car", clean=False, expiry=100)
        packets: list[Packet] = []
        first.send(Subscribe(1, (Subscription("t", 1),)))
        await received(first, packets, 1)
        assert isinstance(packets[0], Suback)
        first.close()
        await until(lambda: not self.node.broker.connections)

        async def authorize(_client: ClientInfo, _action: str, _topic: str, _decision: bool | None) -> Any:
            return await self.gate.pass_through(Stop(True))

        self.node.hooks.add("client.authorize", Callback(authorize, 0, "test", timeout=PATIENCE))
        return self.come()

    def come(self) -> Peer:
        peer = self.node.peer()
        peer.send(Connect("car", 5, clean_start=False, properties=Properties(session_expiry=100)))
        return peer


async def test_a_resumed_session_whose_client_goes_at_once_still_expires(node: MemoryNode) -> None:
    setting = Resuming(node)
    peer = await setting.begin()
    await until(lambda: setting.gate.waiting == 1)
    peer.close()
    await until(lambda: not node.broker.connections)
    session = node.state.registry.sessions["car"]
    assert (False, None, 0) == (session.online, session.link, node.state.registry.connected)
    assert session.expires_at is not None
    node.state.registry.due(session.expires_at)
    assert {} == node.state.registry.sessions


async def test_two_connections_that_resume_one_session_at_the_same_time(node: MemoryNode) -> None:
    """The later one gets it, the earlier one is told so; never both."""
    setting = Resuming(node)
    first = await setting.begin()
    await until(lambda: setting.gate.waiting == 1)
    second = setting.come()
    await asyncio.sleep(0)
    setting.gate.open.set()
    await until(lambda: node.state.registry.connected == 1 and len(node.broker.connections) == 1)
    session = node.state.registry.sessions["car"]
    (left,) = node.broker.connections
    assert session.link is left is second.connection
    assert not first.open
    packets: list[Packet] = []
    await received(second, packets, 1)
    second.send(Publish("t", b"echo", 1, packet_id=1))
    await received(second, packets, 3)
    assert isinstance(packets[0], Connack) and packets[0].session_present
    assert {Publish, Puback} == {type(packet) for packet in packets[1:]}


@pytest.mark.parametrize("version", [4, 5])
async def test_qos_2_is_routed_once_though_a_hook_waits(node: MemoryNode, version: int) -> None:
    """The repeated PUBLISH waits behind the first one and is then only acknowledged. [MQTT-4.3.3-10]."""
    gate = Gate()
    seen: list[bytes] = []

    async def hold(_client: ClientInfo, message: Message) -> Any:
        seen.append(message.payload)
        return await gate.pass_through(Continue(message))

    node.hooks.add("message.publish", Callback(hold, 0, "test", timeout=PATIENCE))
    car = node.peer(version)
    car.send(Connect("car", version))
    packets: list[Packet] = []
    await received(car, packets, 1)
    car.send(Publish("t", b"x", 2, packet_id=7), Publish("t", b"x", 2, dup=True, packet_id=7))
    await until(lambda: gate.waiting == 1)
    gate.open.set()
    await received(car, packets, 3)
    assert [7, 7] == [p.packet_id for p in packets if isinstance(p, Pubrec)]
    assert [b"x"] == seen


def test_an_ill_formed_filter_ends_the_connection() -> None:
    """Nothing of its SUBSCRIBE stays, in a session that outlives the connection either."""
    for version in (4, 5):
        for text in ("a+", "a/#/b", "#b", "$share/g", "$share/+/t", "$share//t"):
            node = MemoryNode()
            keep = Properties(session_expiry=100)
            with standing(node.clock):
                for packet in (
                    Subscribe(2, (Subscription("new"), Subscription("old", 0), Subscription(text))),
                    Unsubscribe(2, ("old", text)),
                ):
                    client = node.client("c", version, clean=False, properties=keep)
                    node.subscribe(client, ("old", 1))
                    client.send(packet)
                    node.turn()
                    goodbye = [Disconnect(ReasonCode.MALFORMED_PACKET)] if version == 5 else []
                    assert goodbye == [replace(p, properties=NONE) for p in client.take() if isinstance(p, Disconnect)]
                    session = node.state.registry.sessions["c"]
                    assert not client.open and {"old": 1} == {s.filter: s.qos for s in session.subscriptions.values()}
                    assert 3 == session.filter_bytes


def test_an_ill_formed_filter_of_a_plugin_is_refused() -> None:
    """The client did nothing wrong."""
    node = MemoryNode()

    def rewrite(_client: ClientInfo, _properties: object, wanted: list[Any]) -> Continue:
        return Continue([replace(wanted[0], filter="a+"), *wanted[1:]])

    node.hooks.add("client.subscribe", Callback(rewrite, 0, "rewriter"))
    client = node.client("c")
    client.send(Subscribe(1, (Subscription("a"), Subscription("b"))))
    node.turn()
    (suback,) = client.take()
    assert isinstance(suback, Suback)
    assert (ReasonCode.TOPIC_FILTER_INVALID, 0) == suback.reasons
