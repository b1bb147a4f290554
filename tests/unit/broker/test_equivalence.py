"""Two speeds, one meaning: the same conversations on the fast path and packet by packet through the channel.

A conversation is a list of bursts. A burst is what one client sends in one go: a few packets, cut into reads at
arbitrary places. What a client acknowledges depends on what it has received, so packets are made while the
conversation runs; as long as both runs mean the same, both clients say the same.

Everything a client receives must be equal, with its packet ids and in its order, and so must what the node
remembers and counts in the end. One freedom is left: within one read, the fast path may answer before it sends on
what an acknowledgement has made room for, so messages and answers are compared each in their own order.

The same holds with a store: sessions with an expiry are durable then, and what is in the store in the end is compared
too. Its writes are done at once or when a step of the conversation says so. Two more freedoms are left then. Whoever
subscribes while a message is being stored may get it or not, so a SUBSCRIBE is sent when nothing waits for the store.
And an entry of the fast path is a few bytes smaller (it has neither guid nor time), so a mailbox that is full by bytes
may hold one more: here only the number of `LARGE` messages tells whether there is room, whatever surrounds them.

And it holds with a second member, where much of what is published here is heard: what its clients receive is compared
too. It takes messages over at once, or keeps quiet until a step of the conversation says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from motorcade.broker import session_records
from motorcade.broker.frames import is_released
from motorcade.broker.limits import SessionOptions
from motorcade.broker.session import Session
from motorcade.core.client import ClientInfo
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Stop
from motorcade.extension.plugin import Context, _callbacks
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.plugins.retained import RetainedConfig, RetainedPlugin
from motorcade.storage.memory import Row
from tests.support.held_store import HeldStore
from tests.support.members import MemberNode, Members
from tests.support.virtual import MemoryNode, Peer, standing

CLIENTS = 3
TOPICS = ("a", "a", "a", "a/b", "c", "$s/a", "ü")  # what comes often stands here often; `$s/a` mostly has no subscriber
FILTERS = ("a", "a", "a", "a/b", "a/+", "#", "+", "c", "ü", "$share/g/a", "$share/h/a/#", "$s/a")
LARGE = 2000  #: bytes; more than all others together that a mailbox has room for
OPTIONS = SessionOptions(window=3, queue=5, queue_bytes=4 * LARGE - 1, max_awaiting_rel=4)
MEMORY, DURABLE, SPREAD = "sessions in memory", "durable sessions", "a second member"
#: Protocol versions of clients of the second member, and what they subscribe to.
ELSEWHERE = (
    (4, (Subscription("a", 1), Subscription("ü", 1))),
    (5, (Subscription("+", 2), Subscription("$share/g/a", 1))),
    (5, (Subscription("a/b", 0), Subscription("$s/a", 2))),
)

# --- what clients do ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Say:
    """Send a packet that does not depend on what was received."""

    packet: Packet


@dataclass(frozen=True)
class Repeat:
    """Send QoS 0 messages of one size to one topic: a run."""

    topic: str
    payloads: tuple[bytes, ...]


@dataclass(frozen=True)
class Acknowledge:
    """Answer a message (or a PUBREL) that has come; `which` counts from the oldest, `wrong` gives the wrong answer."""

    which: int
    reason: ReasonCode = ReasonCode.SUCCESS
    wrong: bool = False


@dataclass(frozen=True)
class Raw:
    """Send bytes as they are."""

    data: bytes


Action = Say | Repeat | Acknowledge | Raw


@dataclass(frozen=True)
class Burst:
    """One client sends packets in reads of arbitrary sizes."""

    client: int
    actions: tuple[Action, ...]
    cuts: tuple[int, ...] = ()  #: where reads end, as positions in what is sent (taken modulo its length)
    turns: bool = False  #: whether the loop turns between reads


@dataclass(frozen=True)
class Join:
    """A client connects, perhaps while it is connected."""

    client: int
    connect: Connect


@dataclass(frozen=True)
class Leave:
    """A client's connection breaks."""

    client: int


@dataclass(frozen=True)
class Stall:
    """A client's socket is full, or takes bytes again."""

    client: int
    full: bool


@dataclass(frozen=True)
class Wait:
    """Time goes by."""

    seconds: int


@dataclass(frozen=True)
class Hold:
    """From now on the store keeps everybody waiting, or no longer."""

    held: bool


Step = Burst | Join | Leave | Stall | Wait | Hold

small_ids = st.integers(1, 6)
payloads = st.sampled_from((b"", b"1", b"22", b"x" * 120, b"y" * LARGE)) | st.binary(max_size=4)


def often(usual: Any, *unusual: Any, weight: int = 6) -> st.SearchStrategy[Any]:
    """Mostly the usual value: the fast path is for what is usual, and windows must fill to be tested."""
    return st.sampled_from((usual,) * weight * len(unusual) + unusual)


@st.composite
def weighted(draw: st.DrawFn, *choices: tuple[int, st.SearchStrategy[Any]]) -> Any:
    """One of the strategies, each as often as its weight says (`one_of` takes repeated ones for one)."""
    number = draw(st.integers(0, sum(weight for weight, _ in choices) - 1))
    for weight, strategy in choices:
        if number < weight:
            return draw(strategy)
        number -= weight
    raise AssertionError


properties = often(
    NONE,
    Properties(user_properties=(("k", "v"),)),
    Properties(message_expiry=60),
    Properties(topic_alias=1),
    Properties(content_type="t", correlation_data=b"\x00"),
    weight=2,
)


@st.composite
def publishes(draw: st.DrawFn) -> Publish:
    qos = draw(st.integers(0, 2))
    return Publish(
        draw(st.sampled_from(TOPICS)),
        draw(payloads),
        qos,
        retain=draw(often(False, True)),
        dup=qos > 0 and draw(often(False, True)),
        packet_id=draw(small_ids) if qos else 0,
        properties=draw(properties),
    )


subscriptions = st.builds(
    Subscription,
    st.sampled_from(FILTERS),
    st.sampled_from((0, 1, 1, 2, 2)),
    retain_as_published=often(False, True),
    retain_handling=st.integers(0, 2),
)
local_subscriptions = st.builds(Subscription, st.sampled_from(("a", "#")), st.integers(0, 2), no_local=st.just(True))
subscribes = st.builds(
    Subscribe,
    small_ids,
    st.lists(weighted((4, subscriptions), (1, local_subscriptions)), min_size=1, max_size=2).map(tuple),
    often(NONE, Properties(subscription_ids=(7,))),
)
says = weighted(
    (20, publishes()),
    (6, st.builds(Pubrel, small_ids, often(ReasonCode.SUCCESS, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))),
    (2, subscribes),
    (1, st.builds(Unsubscribe, small_ids, st.lists(st.sampled_from(FILTERS), min_size=1, max_size=2).map(tuple))),
    (1, st.builds(Puback, st.integers(60000, 60001))),
    (1, st.builds(Pubrec, st.integers(60000, 60001))),
    (1, st.builds(Pubcomp, st.integers(60000, 60001))),
    (2, st.just(Pingreq())),
)
repeats = st.builds(
    Repeat,
    st.sampled_from(TOPICS),
    st.integers(0, 3).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=2, max_size=6).map(tuple)
    ),
)
acknowledges = st.builds(
    Acknowledge,
    st.sampled_from((0, 0, 0, 1, 2, 5)),
    st.sampled_from((ReasonCode.SUCCESS,) * 6 + (ReasonCode.UNSPECIFIED_ERROR,)),
    st.sampled_from((False,) * 15 + (True,)),
)
raws = st.sampled_from(
    (
        b"\x30\x00",  # PUBLISH without a topic
        b"\x32\x05\x00\x01a\x00\x00",  # packet id 0
        b"\x36\x05\x00\x01a\x00\x01",  # QoS 3
        b"\x30\x04\x00\x02a+",  # wildcard in a topic
        b"\x30\x05\x00\x02\xff\xfe\x00",  # not UTF-8
        b"\x40\x01\x00",  # PUBACK cut short
        b"\x42\x02\x00\x01",  # reserved bits of PUBACK
        b"\xc0\x01\x00",  # PINGREQ with a body
        b"\x10\x00",  # second CONNECT
        b"\xff\xff\xff\xff\xff\xff",  # no length
    )
)
actions = weighted((6, says.map(Say)), (5, acknowledges), (1, repeats))
clients = st.integers(0, CLIENTS - 1)
bursts = st.builds(
    Burst,
    clients,
    st.lists(actions, min_size=2, max_size=10).map(tuple),
    st.lists(st.integers(0, 4 * LARGE), max_size=3).map(tuple),
    st.booleans(),
)


@st.composite
def joins(draw: st.DrawFn, client: int | None = None) -> Join:
    number = draw(clients) if client is None else client
    version = draw(st.sampled_from((4, 5)))
    properties = NONE
    if version == 5:
        properties = Properties(
            session_expiry=draw(st.sampled_from((None, 100, 100))),
            receive_maximum=draw(often(None, 1, 2, weight=2)),
            topic_alias_maximum=draw(often(None, 1)),
            maximum_packet_size=draw(often(None, 150)),
        )
    will = draw(often(None, Will("c", b"gone", 1)))
    return Join(number, Connect(f"c{number}", version, draw(st.booleans()), will=will, properties=properties))


steps = weighted(
    (30, bursts),
    (3, joins()),
    (3, st.builds(Leave, clients)),
    (1, st.builds(Burst, clients, st.just((Say(Disconnect()),)))),
    (2, st.builds(Stall, clients, st.booleans())),
    (2, st.builds(Wait, st.sampled_from((1, 30, 200)))),
    (3, st.builds(Hold, st.booleans())),
    (1, st.builds(Burst, clients, st.tuples(actions, raws.map(Raw)))),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Step]:
    """All clients join and subscribe, then anything may happen."""
    opening: list[Step] = [draw(joins(number)) for number in range(CLIENTS)]
    for number in range(CLIENTS):
        wanted = draw(st.lists(subscriptions, min_size=1, max_size=2).map(tuple))
        opening.append(Burst(number, (Say(Subscribe(1, wanted)),)))
    return opening + draw(st.lists(steps, min_size=8, max_size=20))


# --- running one --------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """What one client knows."""

    peer: Peer | None = None
    received: list[tuple[str, Packet]] = field(default_factory=list)  #: with the connection's number in front
    open: list[Packet] = field(default_factory=list)  #: messages and PUBRELs to answer
    connections: int = 0
    last: Connect | None = None

    def read(self) -> None:
        if self.peer is None:
            return
        for packet in self.peer.take():
            self.received.append((f"connection {self.connections}", packet))
            if isinstance(packet, Pubrel) or (isinstance(packet, Publish) and packet.qos):
                self.open.append(packet)
        self.open.sort(key=lambda packet: isinstance(packet, Pubrel))  # only the order of each kind must be the same
        if not self.peer.open:
            self.received.append((f"connection {self.connections}", Disconnect()))
            self.peer = None
            self.open.clear()

    def bytes_of(self, action: Action, version: int) -> bytes:
        if isinstance(action, Raw):
            return action.data
        if isinstance(action, Repeat):
            return b"".join(codec.encode(Publish(action.topic, p), version) for p in action.payloads)
        if isinstance(action, Say):
            return codec.encode(_said(action.packet, version), version)
        if action.which >= len(self.open):
            return b""
        packet = self.open.pop(action.which)
        assert isinstance(packet, Publish | Pubrel)
        kinds: tuple[Callable[..., Packet], ...] = (Puback, Pubrec, Pubcomp)
        right = 2 if isinstance(packet, Pubrel) else packet.qos - 1
        kind = kinds[(right + action.wrong) % 3]
        refuses = version == 5 and kind is not Pubcomp and action.reason >= 0x80
        return codec.encode(kind(packet.packet_id, action.reason if refuses else ReasonCode.SUCCESS), version)


def _said(packet: Packet, version: int) -> Packet:
    """The packet as a client of this version can say it."""
    if version == 5:
        return packet
    if isinstance(packet, Publish):
        return Publish(packet.topic, packet.payload, packet.qos, packet.retain, packet.dup, packet.packet_id)
    if isinstance(packet, Subscribe):
        return Subscribe(packet.packet_id, tuple(Subscription(s.filter, s.qos) for s in packet.subscriptions))
    return packet


def _authorize(client: ClientInfo, action: str, topic: str, _decision: bool | None) -> Stop:
    """Client 0 may not publish to one of the topics."""
    return Stop(not (client.client_id == "c0" and action == "publish" and topic == "a/b"))


class Run:
    """One conversation on a node of its own."""

    def __init__(self, *, observed: bool, guarded: bool, kind: str, options: SessionOptions = OPTIONS) -> None:
        self.store = HeldStore() if kind == DURABLE else None
        self.members = Members(2, options, lasting=False) if kind == SPREAD else None
        self.node = MemoryNode(options, store=self.store) if self.members is None else self.members.nodes[0]
        self.elsewhere = [Client() for _ in ELSEWHERE] if self.members is not None else []
        self.observed = observed
        self.clients = [Client() for _ in range(CLIENTS)]
        log = structlog.stdlib.get_logger("test")
        context = Context("retained", self.node.broker, log, Path(), Counter(), set())
        for point, callback in _callbacks("retained", RetainedPlugin(context, RetainedConfig())):
            self.node.hooks.add(point, callback)
        if guarded:
            self.node.hooks.add("client.authorize", Callback(_authorize, 0, "access"))
        self.node.state.observed = observed

    def play(self, conversation: list[Step]) -> None:
        with standing(self.node.clock):
            if self.members is not None:
                self._subscribe_elsewhere(self.members.nodes[1])
            for step in conversation:
                self._step(step)
                assert self.node.state.observed is self.observed
                self._go_on()
            self._step(Hold(False))
            self._go_on()

    def _subscribe_elsewhere(self, node: MemberNode) -> None:
        for number, (client, (version, wanted)) in enumerate(zip(self.elsewhere, ELSEWHERE, strict=True)):
            client.peer = node.peer(version)
            client.peer.send(Connect(f"e{number}", version), Subscribe(1, wanted))

    def _go_on(self) -> None:
        self.node.turn()
        for client in self.clients:
            client.read()
        for client in self.elsewhere:
            client.read()
            while client.open and client.peer is not None:  # it keeps up: what is sent to it is what this is about
                client.peer.send(client.bytes_of(Acknowledge(0), client.peer.version))
                self.node.turn()
                client.read()

    def _hold(self, store: HeldStore, held: bool) -> None:
        store.held = held
        while not held and store.waiting:
            store.let_go()
            self.node.turn()

    def _step(self, step: Step) -> None:
        if isinstance(step, Hold):
            if self.store is not None:
                self._hold(self.store, step.held)
            elif self.members is not None:
                link = self.members.link(*self.members.nodes)
                link.silent = step.held
                if not step.held:
                    link.speak()
            return
        if isinstance(step, Wait):
            self.node.clock.now += step.seconds
            for will in self.node.state.registry.due(self.node.clock.now):
                self.node.broker.publish_will(will)
            return
        client = self.clients[step.client]
        if isinstance(step, Join):
            self._join(client, step.connect)
        elif client.peer is None:
            if client.last is not None:  # it comes back sooner or later
                self._join(client, replace(client.last, clean_start=False))
        elif isinstance(step, Leave):
            client.peer.close()
        elif isinstance(step, Stall):
            (client.peer.wire.fill if step.full else client.peer.wire.drain)()
        else:
            self._burst(client, client.peer, step)

    def _join(self, client: Client, connect: Connect) -> None:
        peer = self.node.peer(connect.version)
        peer.send(connect)
        self.node.turn()
        client.read()  # a connection that was there has been taken over
        client.peer = peer
        client.last = connect
        client.connections += 1
        client.open.clear()

    def _burst(self, client: Client, peer: Peer, burst: Burst) -> None:
        actions: list[Action] = []
        for action in burst.actions:
            if self.store is not None and isinstance(action, Say) and isinstance(action.packet, Subscribe):
                self._reads(client, peer, replace(burst, actions=tuple(actions)))
                actions.clear()
                held = self.store.held
                self.node.turn()
                self._hold(self.store, False)
                self.store.held = held
                if peer.connection.held:
                    continue  # it would be read in one go with messages that are held up now
            actions.append(action)
        self._reads(client, peer, replace(burst, actions=tuple(actions)))

    def _reads(self, client: Client, peer: Peer, burst: Burst) -> None:
        data = b"".join(client.bytes_of(action, peer.version) for action in burst.actions)
        start = 0
        for end in [*sorted({cut % (len(data) + 1) for cut in burst.cuts}), len(data)]:
            if start < end and peer.open:
                peer.connection.data_received(data[start:end])
                if burst.turns:
                    self.node.turn()
            start = end

    # -- what is compared

    def heard(self, number: int) -> dict[str, Any]:
        """What a client has received: its messages with their ids in order, and its answers in order.

        QoS 0 and what comes from the store have no order among each other: it depends on when room is made.
        """
        received = [*self.clients, *self.elsewhere][number].received
        messages = [entry for entry in received if isinstance(entry[1], Publish)]
        if self.store is not None:
            messages.sort(key=lambda entry: isinstance(entry[1], Publish) and entry[1].qos > 0)
        return {
            "messages": messages,
            "answers": [entry for entry in received if not isinstance(entry[1], Publish)],
        }

    def memory(self) -> dict[str, Any]:
        """What the node remembers and counts."""
        state = self.node.state
        stats = state.stats
        return {
            "sessions": {name: _session(session) for name, session in state.registry.sessions.items()},
            "connected": state.registry.connected,
            "subscriptions": (state.pubsub.subscriptions, state.pubsub.shared_subscriptions),
            "publish_received": stats.publish_received,
            "publish_sent": stats.publish_sent,
            "dropped": stats.dropped,
            "protocol_errors": stats.protocol_errors,
            "events": stats.sessions,
            "stored": _stored(self.store) if self.store is not None else {},
        }


def _stored(store: HeldStore) -> dict[str, Any]:
    """What is in the store, but for the marks of time and the names that messages have only inside the broker."""
    inner = store.inner
    records = inner.records.collections
    return {
        "sessions": {key: _record(value) for key, (value, _) in records.get(session_records.SESSIONS, {}).items()},
        "subscriptions": records.get(session_records.SUBSCRIPTIONS, {}),
        "awaiting": list(records.get(session_records.AWAITING, {})),
        "entries": {
            owner: [
                (position, _entry(row), inner.blobs.data(row.digest), row.mark) for position, row in box.rows.items()
            ]
            for owner, box in inner.mailboxes.boxes.items()
        },
    }


def _record(data: bytes) -> session_records.SessionRecord:
    record = session_records.decode_session(data)
    if record.will is not None:
        will = session_records.ENTRY.decode(bytes(record.will.message))
        record.will.message = msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(will, guid=b"")))
    return record


def _entry(row: Row) -> tuple[Any, ...]:
    record = msgspec.structs.replace(session_records.ENTRY.decode(row.body), guid=b"", time=0.0)
    return (*msgspec.structs.astuple(record), row.expires_at)


def _session(session: Session) -> dict[str, Any]:
    queue = list(session.queue or ())
    if session.queue is not None:
        assert session.queue.size == sum(len(frame[0]) + len(frame[1]) for frame in queue)
        assert session.queue.qos0 == sum(not frame[0][0] & 6 for frame in queue)
    return {
        "inflight": {
            number: "released" if is_released(frame) else frame[0] + frame[1]
            for number, frame in session.inflight.items()
        },
        "order": list(session.inflight),
        "next_id": session.next_id,
        "queue": [frame[0] + frame[1] for frame in queue],
        "ready": session.ready,
        "online": session.online,
        "subscriptions": session.subscriptions,
        "awaiting": session.awaiting or {},
        "received": session.received,
        "expires_at": session.expires_at,
        "will": session.will is not None,
    }


def difference(conversation: list[Step], *, guarded: bool, kind: str) -> str:
    """What differs between both speeds; empty if nothing does."""
    quick, thorough = (Run(observed=observed, guarded=guarded, kind=kind) for observed in (False, True))
    quick.play(conversation)
    thorough.play(conversation)
    for number in range(CLIENTS + len(quick.elsewhere)):
        if quick.heard(number) != thorough.heard(number):
            return f"client {number} heard\n{quick.heard(number)}\nbut should have heard\n{thorough.heard(number)}"
    if quick.memory() != thorough.memory():
        return f"the node remembers\n{quick.memory()}\nbut should remember\n{thorough.memory()}"
    return ""


def smaller(conversation: list[Step]) -> Iterator[list[Step]]:
    """The conversation cut short, or with one step, one action of a burst, or the cuts of a burst less."""
    for size in (len(conversation) // 2, len(conversation) - 1):
        yield conversation[:size]
    for i, step in enumerate(conversation):
        yield conversation[:i] + conversation[i + 1 :]
        if isinstance(step, Burst):
            for j in range(len(step.actions)):
                less = replace(step, actions=step.actions[:j] + step.actions[j + 1 :])
                yield [*conversation[:i], less, *conversation[i + 1 :]]
            if step.cuts:
                yield [*conversation[:i], replace(step, cuts=()), *conversation[i + 1 :]]


def reduced(conversation: list[Step], *, guarded: bool, kind: str, tries: int = 500) -> list[Step]:
    """A small conversation that still differs. Hypothesis would look for minutes: it does not know what a step is."""
    found = True
    while found and tries > 0:
        found = False
        for candidate in smaller(conversation):
            tries -= 1
            if difference(candidate, guarded=guarded, kind=kind):
                conversation, found = candidate, True
                break
    return conversation


@pytest.mark.parametrize("kind", [MEMORY, DURABLE, SPREAD])
@given(conversations(), st.booleans())
@settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate]
)
def test_the_byte_loop_means_what_the_channel_means(kind: str, conversation: list[Step], guarded: bool) -> None:
    """Messages, packet ids, answers, sessions and counters are the same, with and without access rules."""
    if difference(conversation, guarded=guarded, kind=kind):
        conversation = reduced(conversation, guarded=guarded, kind=kind)
        found = difference(conversation, guarded=guarded, kind=kind)
        steps = "\n".join(map(repr, conversation))
        pytest.fail(f"{found}\nafter (guarded: {guarded})\n{steps}", pytrace=False)


def test_only_the_guid_and_time_of_an_entry_make_it_larger_on_the_slow_path() -> None:
    """Bounds in bytes are those of the store: between both sizes, one speed keeps a message that the other drops."""
    conversation: list[Step] = [Join(n, Connect(f"c{n}", 4, clean_start=False)) for n in range(2)]
    conversation += [
        Burst(0, (Say(Subscribe(1, (Subscription("a", 1),))),)),
        Stall(0, True),
        *(Burst(1, (Say(Publish("a", b"%d" % n, 1, packet_id=n)),)) for n in (1, 2)),
    ]

    def played(observed: bool, queue_bytes: int) -> Run:
        run = Run(
            observed=observed,
            guarded=False,
            kind=DURABLE,
            options=msgspec.structs.replace(OPTIONS, queue_bytes=queue_bytes),
        )
        run.play(conversation)
        return run

    def size(run: Run) -> int:
        assert run.store is not None
        return sum(box.size_bytes for box in run.store.inner.mailboxes.boxes.values())

    quick, thorough = played(False, 10_000), played(True, 10_000)
    assert quick.memory() == thorough.memory()
    assert size(quick) < size(thorough)
    quick, thorough = played(False, size(quick)), played(True, size(quick))
    assert [run.memory()["dropped"]["queue_full"] for run in (quick, thorough)] == [0, 1]
