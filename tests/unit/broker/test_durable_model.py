"""Durable sessions under everything that can happen to them, against what MQTT and the store promise.

Publishers and receivers that keep to the rules, a store whose writes are done, refused or lost as the machine says,
connections that break or are taken over, sessions that start clean, end and expire, processes that are killed at any
moment. Clients repeat what MQTT tells them to. At all times:

    an answer to a publisher means that every subscriber's copy is in the store; answers keep the order of the packets
    nothing is sent before it is stored, PUBREL not before the store knows of PUBREC
    no more in flight than the receiver takes, no packet id used twice at once
    what a receiver has got and not finished comes again, with DUP, under its id, though queues overflow and ids are few
    what is new carries no DUP, and nothing comes that was for an earlier session
    QoS 2 comes once to a session, or to one member of a group as long as no member's session ends
    what was answered at the first attempt comes in the order of publishing

And in the end, when the store works again and everybody has come back: what was answered has arrived, and sessions that
have ended have left nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from motorcade.broker import durable_queue, session_records
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.storage.ports import StoreError, StoreRefusedError
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, standing
from tests.unit.broker.test_balance import balanced, exported
from tests.unit.broker.world import World, often

EXPIRY = 50
RETRY = 1.0  #: seconds after which the broker has tried again what failed
OPTIONS = SessionOptions(
    window=3, queue=0, queue_bytes=0, max_awaiting_rel=0, await_rel_timeout=0, expiry_default_v3=EXPIRY
)
TOPICS = ("t/a", "t/b", "s", "u")  #: `s` is shared by the receivers, nobody hears `u`
LIMITS = Limits(flapping_count=0)


@dataclass
class Sent:
    """A message of a publisher."""

    topic: str
    payload: bytes
    qos: int
    wanted_by: dict[str, int]  #: receivers that were subscribed, and in which of their lives
    endings: int = 0  #: sessions that had ended by then
    lives: dict[str, int] = field(default_factory=dict)  #: of all receivers when it was sent last
    attempts: int = 1
    released: bool = False  #: PUBREC has come


class Client:
    """A client that keeps to the rules of MQTT."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.peer: Peer | None = None
        self.on = False  #: CONNACK has come
        self.life = 0  #: one more with every session, as far as it knows
        self.oldest = 0  #: the first of these that its session may go back to
        self.fresh = True  #: it knows of no session

    def begin(self, peer: Peer, *, clean: bool, limit: int = 0) -> None:
        self.peer = peer
        self.on = False
        properties = Properties(session_expiry=EXPIRY, receive_maximum=limit or None) if self.version == 5 else NONE
        if clean or (self.fresh and self.version == 5):
            clean = True  # [MQTT-3.2.2-4]: it must not go on with a session that it has forgotten
            self.forget()
        elif self.fresh:
            self.life += 1
        peer.send(Connect(self.name, self.version, clean, properties=properties))

    def forget(self) -> None:
        """What the client knew of its session is void."""
        self.life += 1
        self.oldest = self.life
        self.fresh = True

    def lost(self) -> None:
        """The connection is gone."""
        self.peer = None
        self.on = False

    def read(self, world: Machine) -> None:
        peer = self.peer
        if peer is None:
            return
        for packet in peer.take():
            if isinstance(packet, Connack):
                assert not self.on
                if packet.reason >= 0x80:
                    continue
                self.on = True
                if not packet.session_present and self.fresh:
                    self.oldest = self.life  # it has begun with CONNECT: what was sent since then may come
                elif not packet.session_present:
                    self.forget()
                self.fresh = False
                self.connected(peer, world)
            elif not isinstance(packet, Disconnect):
                assert self.on, f"{self.name} got {packet} before CONNACK"
                self.heard(packet, world)
        if not peer.open:
            self.lost()

    def connected(self, peer: Peer, world: Machine) -> None:
        raise NotImplementedError

    def heard(self, packet: Packet, world: Machine) -> None:
        raise NotImplementedError


class Publisher(Client):
    """Sends messages until they are answered."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(name, version)
        self.open: dict[int, Sent] = {}  #: by packet id, in the order of sending
        self.next_id = 1
        self.expected: list[tuple[type[Packet], int]] = []  #: answers that this connection owes, in order
        self.answered: list[Sent] = []  #: at the first attempt, in the order of sending

    def forget(self) -> None:
        super().forget()
        self.open.clear()

    def lost(self) -> None:
        super().lost()
        self.expected.clear()

    def packet(self, number: int, sent: Sent, *, dup: bool = False) -> Publish:
        self.expected.append((Puback if sent.qos == 1 else Pubrec, number))
        return Publish(sent.topic, sent.payload, sent.qos, dup=dup, packet_id=number)

    def publish(self, sent: Sent) -> Publish:
        if self.version == 4:  # it cannot tell a session that it has forgotten from a new one
            self.next_id += 1
        while self.next_id in self.open:
            self.next_id = self.next_id % 20 + 1
        self.open[self.next_id] = sent
        return self.packet(self.next_id, sent)

    def connected(self, peer: Peer, world: Machine) -> None:
        for number, sent in list(self.open.items()):
            if sent.released:
                self.expected.append((Pubcomp, number))
                peer.send(Pubrel(number))
            else:
                sent.attempts += 1
                sent.lives = world.lives()
                peer.send(self.packet(number, sent, dup=True))

    def heard(self, packet: Packet, world: Machine) -> None:
        assert isinstance(packet, Puback | Pubrec | Pubcomp), packet
        kind, number = type(packet), packet.packet_id
        # Answers of one kind keep the order of what they answer: [MQTT-4.6.0-2], [MQTT-4.6.0-3].
        assert number == next(n for k, n in self.expected if k is kind), (packet, self.expected)
        self.expected.remove((kind, number))
        if isinstance(packet, Pubcomp):
            del self.open[number]
            return
        sent = self.open[number]
        if packet.reason >= 0x80:
            del self.open[number]
            return
        world.stored(sent)
        if sent.attempts == 1:
            self.answered.append(sent)
        if isinstance(packet, Puback):
            del self.open[number]
        else:
            sent.released = True
            self.expected.append((Pubcomp, number))
            assert self.peer is not None
            self.peer.send(Pubrel(number))


@dataclass
class Life:
    """What a receiver got in one session."""

    got: list[tuple[bytes, int]] = field(default_factory=list)  #: payload, QoS
    must: list[Sent] = field(default_factory=list)  #: what it has to get, because its publisher was told so


class Receiver(Client):
    """Gets messages, and answers them when the machine says so."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(name, version)
        self.subscribed = False  #: SUBACK has come
        self.limit = OPTIONS.window
        self.now = Life()
        self.unreleased: set[int] = set()  #: QoS 2 ids, part of the session
        self.todo: list[Packet] = []  #: answers to give, of this connection
        self.flying: dict[int, bytes] = {}  #: packet id, payload
        self.again: dict[int, bytes] = {}  #: the same of earlier connections, as far as it has not come again
        self.known: dict[int, bytes] = {}  #: payload of the last QoS 2 message of an id
        self.seen: set[bytes] = set()  #: payloads that have ever come
        self.breaking = False  #: its connection broke, and the broker has not heard of it
        self.unread: set[bytes] = set()  #: payloads that the broker may have sent before it heard of that

    def begin(self, peer: Peer, *, clean: bool, limit: int = 0) -> None:
        self.limit = min(limit or OPTIONS.window, OPTIONS.window) if self.version == 5 else OPTIONS.window
        super().begin(peer, clean=clean, limit=limit)

    def forget(self) -> None:
        super().forget()
        self.now = Life()
        self.subscribed = False
        self.unreleased.clear()
        self.again.clear()
        self.known.clear()

    def lost(self) -> None:
        super().lost()
        self.todo.clear()
        self.again |= self.flying
        self.flying.clear()
        self.breaking = True

    def connected(self, peer: Peer, world: Machine) -> None:
        if not self.subscribed:
            peer.send(Subscribe(1, (Subscription("t/#", 2), Subscription("$share/g/s", 2))))

    def heard(self, packet: Packet, world: Machine) -> None:
        if isinstance(packet, Suback):
            self.subscribed = max(packet.reasons) < 0x80
        elif isinstance(packet, Pubrel):
            world.marked(self.name, self.known.get(packet.packet_id, b""))
            self.unreleased.discard(packet.packet_id)
            if self.again.pop(packet.packet_id, None) is not None:
                self.flying[packet.packet_id] = self.known[packet.packet_id]
            self.todo.append(Pubcomp(packet.packet_id))
        else:
            assert isinstance(packet, Publish), packet
            self.message(packet, world)

    def message(self, packet: Publish, world: Machine) -> None:
        number = packet.packet_id
        assert (f"session:{self.name}", packet.payload) in world.store.appended, "it was sent before it was stored"
        assert number not in self.flying, f"packet id {number} is in use"
        self.flying[number] = packet.payload
        if number in self.again:
            assert packet.payload == self.again.pop(number), "another message came under the id of one in flight"
            assert packet.dup or world.troubled, "it has been sent before"
        elif packet.dup:
            sent = packet.payload in self.seen or packet.payload in self.unread
            assert sent or world.crashes or world.troubled, "DUP, but it is new"
        self.seen.add(packet.payload)
        origin = world.messages[packet.payload]
        assert packet.topic == "s" or origin.lives[self.name] >= self.oldest, "it was for an earlier session"
        if packet.qos == 2:
            self.known[number] = packet.payload
        assert len(self.flying) <= self.limit, "more in flight than the client takes"
        if packet.topic == "s" and number not in self.unreleased:
            world.shared[packet.payload] += 1
            once = packet.qos == 2 and world.messages[packet.payload].endings == world.endings
            assert not once or world.shared[packet.payload] == 1, f"{packet.payload!r} has come to two members"
        if packet.qos == 1:
            self.now.got.append((packet.payload, 1))
            self.todo.append(Puback(number))
            return
        if number not in self.unreleased:
            self.unreleased.add(number)
            assert (packet.payload, 2) not in self.now.got, f"{packet.payload!r} has come twice"
            self.now.got.append((packet.payload, 2))
        self.todo.append(Pubrec(number))

    def answer(self, which: int) -> None:
        packet = self.todo.pop(which % len(self.todo))
        assert self.peer is not None and isinstance(packet, Puback | Pubrec | Pubcomp)
        if not isinstance(packet, Pubrec):
            self.flying.pop(packet.packet_id, None)
            self.again.pop(packet.packet_id, None)
        self.peer.send(packet)


publishers = st.integers(0, 1)
receivers = st.integers(0, 1)
names = st.sampled_from(("p0", "p1", "r0", "r1"))
turns = st.booleans()


class Machine(World):
    """The world."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.troubled = False  #: the store has refused or lost something
        self.crashes = 0
        self.shared: Counter[bytes] = Counter()  #: how often messages for the group have come
        self.messages: dict[bytes, Sent] = {}
        self.owed: list[Sent] = []  #: messages for the group that were answered

    @initialize(
        atomic=st.booleans(),
        versions=st.tuples(*[st.sampled_from((4, 5, 5))] * 4),
        queue=st.sampled_from((0, 0, 2)),
        ids=st.sampled_from((60_000, 3, 4, 7)),
        observed=st.booleans(),
    )
    def start(self, atomic: bool, versions: tuple[int, ...], queue: int, ids: int, observed: bool) -> None:
        self.observed = observed
        self.store = HeldStore(atomic=atomic)
        self.bounded = queue > 0
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(durable_queue, "IDS_OF_QUEUE", ids)
        self.node = MemoryNode(msgspec.structs.replace(OPTIONS, queue=queue, patience=0), LIMITS, store=self.store)
        self.node.state.observed = observed
        self.stack.enter_context(standing(self.node.clock))
        self.publishers = [Publisher(f"p{i}", versions[i]) for i in range(2)]
        self.receivers = [Receiver(f"r{i}", versions[2 + i]) for i in range(2)]
        self.clients: dict[str, Client] = {c.name: c for c in (*self.publishers, *self.receivers)}
        for client in self.clients.values():
            client.begin(self.node.peer(client.version), clean=False)
        self.go_on()
        assert all(receiver.subscribed for receiver in self.receivers)
        self.store.held = True

    # -- what is true at once

    def stored(self, sent: Sent) -> None:
        """A publisher was told that a message is taken."""
        if sent.topic == "s":
            if sent.wanted_by and sent.endings == self.endings:
                stored = [
                    (f"session:{receiver.name}", sent.payload) in self.store.appended for receiver in self.receivers
                ]
                assert any(stored), "it was answered before it was stored"
                self.owed.append(sent)
            return
        for name, life in sent.wanted_by.items():
            receiver = self.clients[name]
            assert isinstance(receiver, Receiver)
            if receiver.life == life:
                assert (f"session:{name}", sent.payload) in self.store.appended, "it was answered before it was stored"
                receiver.now.must.append(sent)

    @property
    def endings(self) -> int:
        """Sessions of receivers that may have ended."""
        return sum(receiver.life for receiver in self.receivers)

    def lives(self) -> dict[str, int]:
        """In which session each receiver is, as far as it knows."""
        return {receiver.name: receiver.life for receiver in self.receivers}

    def marked(self, name: str, payload: bytes) -> None:
        """A receiver was told to forget the packet id of a message."""
        mailboxes, blobs = self.store.inner.mailboxes, self.store.inner.blobs
        box = mailboxes.boxes.get(f"session:{name}")
        marks = [row.mark for row in box.rows.values() if blobs.data(row.digest) == payload] if box is not None else []
        assert all(mark & 1 for mark in marks), "PUBREL before the store knows of PUBREC"

    # -- what happens

    def go_on(self, turn: bool = True) -> None:
        if turn:
            self.node.turn()
            for receiver in self.receivers:
                if receiver.breaking:
                    receiver.breaking = False
                    owner = f"session:{receiver.name}"
                    receiver.unread = {payload for of, payload in self.store.appended if of == owner}
            for _ in range(2):  # what they answer at once is read in the next turn
                for client in self.clients.values():
                    client.read(self)
                self.node.turn()

    @rule(
        which=publishers,
        messages=st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(1, 2)), min_size=1, max_size=4),
        turn=turns,
    )
    def publish(self, which: int, messages: list[tuple[str, int]], turn: bool) -> None:
        publisher = self.publishers[which]
        if not publisher.on or publisher.peer is None or len(publisher.open) > 10:
            return
        packets: list[bytes | Packet] = []
        for topic, qos in messages:
            self.count += 1
            heard_by = [receiver for receiver in self.receivers if receiver.subscribed and topic != "u"]
            wanted_by = {receiver.name: receiver.life for receiver in heard_by}
            payload = b"%s %d" % (publisher.name.encode(), self.count)
            sent = Sent(topic, payload, qos, wanted_by, self.endings, self.lives())
            self.messages[sent.payload] = sent
            packets.append(publisher.publish(sent))
        publisher.peer.send(*packets)
        self.go_on(turn)

    @rule(which=receivers, answers=st.lists(st.integers(0, 5), min_size=1, max_size=4), turn=turns)
    def answer(self, which: int, answers: list[int], turn: bool) -> None:
        receiver = self.receivers[which]
        for number in answers:
            if receiver.peer is not None and receiver.on and receiver.todo:
                receiver.answer(number)
        self.go_on(turn)

    @rule(name=names, clean=st.sampled_from((False, False, True)), limit=st.integers(0, 3), turn=turns)
    def connect(self, name: str, clean: bool, limit: int, turn: bool) -> None:
        """Also while it is connected: then it takes its own connection over."""
        client = self.clients[name]
        if client.peer is not None:
            client.read(self)
            client.lost()
        # (A clean session of MQTT 3.1.1 is not durable.)
        client.begin(self.node.peer(client.version), clean=clean and client.version == 5, limit=limit)
        self.go_on(turn)

    @rule(name=names, how=st.sampled_from(("break", "break", "goodbye", "end")), turn=turns)
    def leave(self, name: str, how: str, turn: bool) -> None:
        client = self.clients[name]
        if client.peer is None:
            return
        if how == "break" or not client.on:
            client.peer.close()
        elif how == "end" and client.version == 5:
            client.peer.send(Disconnect(properties=Properties(session_expiry=0)))
            client.forget()
        else:
            client.peer.send(Disconnect())
        client.lost()
        self.go_on(turn)

    @precondition(lambda self: self.store.waiting)
    @rule(count=st.integers(1, 6), turn=turns)
    def commit(self, count: int, turn: bool) -> None:
        self.node.loop.call_soon(self.store.let_go, count)  # answers come in a turn of the loop
        self.go_on(turn)

    @precondition(lambda self: self.store.waiting)
    @rule()
    def commit_all(self) -> None:
        while self.store.waiting:
            self.store.let_go()
            self.go_on()

    @precondition(lambda self: self.store.waiting)
    @rule(outcome=st.sampled_from(("lost", "written", "late")), turn=turns)
    def lose(self, outcome: str, turn: bool) -> None:
        """A write fails. Where batches are not atomic it is unknown whether it was done, or will be."""
        self.troubled = True
        if self.store.atomic:
            self.store.fail(StoreRefusedError("not in time"))
        else:
            self.store.fail(StoreError("no answer"), written=outcome == "written", late=outcome == "late")
        self.go_on(turn)

    @rule()
    def fill(self) -> None:
        """The store is full, or no longer."""
        self.troubled = True
        self.store.full = not self.store.full

    @rule(held=st.booleans(), turn=turns)
    def read(self, held: bool, turn: bool) -> None:
        """Reads are answered, or wait from now on."""
        self.store.held_reads = held
        if not held:
            self.store.let_read()
        self.go_on(turn)

    @rule(seconds=st.sampled_from((RETRY, RETRY, RETRY, 2.0 * EXPIRY)))
    def wait(self, seconds: float) -> None:
        self.go_on()
        self.node.clock.now += seconds
        if seconds > EXPIRY:
            for client in self.clients.values():
                if client.peer is None:
                    client.forget()
        self.go_on()
        for will in self.node.state.registry.due(self.node.clock.now):
            self.node.broker.publish_will(will)
        self.go_on()

    @rule(written=st.integers(0, 4))
    def crash(self, written: int) -> None:
        """The process is killed, some of its writes were done; the next one begins."""
        self.crashes += 1
        for client in self.clients.values():
            client.lost()
        self.store.die(written)
        for client in self.clients.values():
            if self.troubled and self.has_expired(client.name):
                client.forget()
            elif self.troubled and client.fresh:
                client.oldest = 0  # it has expired, but a store that took no writes does not know that it was away
        held, self.store.held = self.store.held, False
        reads, self.store.held_reads = self.store.held_reads, False
        self.node = self.node.restart()
        self.node.state.observed = self.observed
        self.store.held, self.store.held_reads = held, reads

    def has_expired(self, name: str) -> bool:
        """Whether the store says so; a store that was full for longer than that does not know that it came back."""
        data = self.store.records_of(session_records.SESSIONS).get(name)
        record = None if data is None else session_records.decode_session(data)
        return record is not None and record.expires_at is not None and record.expires_at <= self.node.clock.now

    # -- what must be true in the end

    def come_to_rest(self) -> None:
        """The store works, everybody is back and answers, until nothing happens any more."""
        self.store.held = self.store.held_reads = self.store.full = False
        for _ in range(6):
            self.store.let_go()
            self.store.let_read()
            self.wait(RETRY)
        for client in self.clients.values():
            if client.peer is not None:
                client.peer.close()
                client.lost()
        for _ in range(200):
            busy = False
            for client in self.clients.values():
                if client.peer is None:
                    client.begin(self.node.peer(client.version), clean=False)
                    busy = True
            self.go_on()
            for receiver in self.receivers:
                while receiver.todo:
                    receiver.answer(0)
                    busy = True
            self.go_on()
            if not busy and not any(publisher.open for publisher in self.publishers):
                break
            self.wait(RETRY)
        assert all(client.on for client in self.clients.values())
        assert not any(publisher.open for publisher in self.publishers), "messages that nobody answers"
        if not self.troubled:
            balanced(exported(self.node))

    def judge(self) -> None:
        for sent in self.owed:
            if sent.endings == self.endings and not self.bounded:
                assert self.shared[sent.payload], f"{sent.payload!r} was answered, but no member ever got it"
        for receiver in self.receivers:
            got = [payload for payload, _ in receiver.now.got]
            assert not receiver.again, "what it has not finished never came again"
            for sent in receiver.now.must if not self.bounded else ():
                assert sent.payload in got, f"{sent.payload!r} was answered, but {receiver.name} never got it"
            for publisher in self.publishers:
                for topic in ("t/a", "t/b"):
                    order = [sent.payload for sent in publisher.answered if sent.topic == topic and sent.payload in got]
                    assert order == sorted(order, key=got.index), f"{receiver.name} got {got}"
            assert not self.store.entries(receiver.name), "everything is acknowledged, but the store has entries"

    def leave_nothing(self) -> None:
        """All sessions end."""
        for client in self.clients.values():
            assert client.peer is not None
            client.peer.close()
            client.lost()
        self.go_on()
        self.wait(2.0 * EXPIRY)
        assert not self.node.state.registry.sessions
        for collection in ("session", "subscription", "awaiting"):
            assert not self.store.records_of(collection)
        assert not self.store.inner.mailboxes.boxes
        assert self.node.state.pubsub.subscriptions == 0


Machine.TestCase.settings = often(examples=100, steps=40)
TestDurableSessions: Any = Machine.TestCase


def test_what_was_sent_into_a_breaking_connection_comes_again_with_dup() -> None:
    machine = Machine()
    machine.start(atomic=False, versions=(4, 4, 4, 4), queue=0, ids=60000, observed=False)
    machine.leave(how="break", name="r0", turn=False)
    machine.publish(messages=[("t/a", 1)], turn=False, which=0)
    machine.teardown()
