"""Counters add up: every copy of a message is delivered, dropped for a reason, or waits (docs/metrics.md, "Adding up").

Only what `/metrics` exports is asked, after each step of random conversations. Copies are counted here too, from the
subscriptions at the moment of each PUBLISH, and what the store has.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.control import Control, ReloadView
from motorcade.core.client import ClientInfo
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Stop
from motorcade.extension.plugin import Plugins
from motorcade.http.metrics import families
from motorcade.mqtt.packets import (
    Connect,
    Disconnect,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)
from motorcade.mqtt.properties import Properties
from motorcade.storage.ports import StoreError
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, Turns, standing
from tests.unit.broker.sources import SourceScript, given

STEPS = 80
DEEDS = (
    *("publish",) * 7,
    *("connect", "acknowledge") * 2,
    "leave",
    "kill",
    "fill",
    "drain",
    "unsubscribe",
    "wait",
    "give",
)
RARELY = ("restart", "full", "revoke")
#: Reasons for which a message never becomes a copy.
NOT_COPIES = {"no_subscribers", "not_authorized", "not_stored", "hook_loop", "will_failed", "no_memory"}
GROUP = "$share/g/t/0"


def exported(node: MemoryNode) -> Counter[str]:
    """What `/metrics` shows of messages: `family` or `family{label}`."""

    async def reload() -> ReloadView:
        raise NotImplementedError

    control = Control(node.broker, Plugins(node.broker, node.hooks, Path(), node.state.shared.sources), reload)
    assert isinstance(node.loop, Turns)
    asked = node.loop.create_task(control.statistics())
    node.turn()
    found: Counter[str] = Counter()
    for family in families(asked.result()):
        for _, labels, value in family.samples:
            found["".join(("motorcade_", family.name, *(f"{{{label}}}" for label in labels.values())))] = int(value)
    return found


def balanced(found: Counter[str]) -> None:
    """Check the equation of docs/metrics.md."""
    dropped = {key: count for key, count in found.items() if key.startswith("motorcade_messages_dropped_total{")}
    withdrawn = {key: count for key, count in found.items() if key.startswith("motorcade_messages_withdrawn_total{")}
    copies = {key: count for key, count in dropped.items() if key.split("{")[1][:-1] not in NOT_COPIES}
    live = found["motorcade_messages_total{out}"] - found["motorcade_store_messages_sent_total"]
    delivered = live - found["motorcade_messages_abandoned_total"] + found["motorcade_store_messages_delivered_total"]
    waiting = found["motorcade_session_queued_messages"] + found["motorcade_session_stored_messages"]
    into = found["motorcade_messages_routed_total"] + found["motorcade_messages_restored_total"]
    assert into == delivered + sum(copies.values()) + sum(withdrawn.values()) + waiting, {
        key: count for key, count in found.items() if "messages" in key and count
    }


class Conversation:
    """One node, one publisher, and three clients that come, go, lag and acknowledge as chance has it."""

    def __init__(self, chance: Random, *, store_qos0: bool, durable: bool) -> None:
        self.chance = chance
        options = SessionOptions(window=2, queue=4, patience=0.0, store_qos0=store_qos0, expiry_default_v3=50)
        self.store = HeldStore() if durable else None
        self.node = MemoryNode(options, Limits(flapping_count=0), store=self.store)
        self.copies = self.unheard = self.number = 0
        self.before = 0  #: entries in the store when this process began
        self.peers: dict[str, Peer] = {}
        self.guarded = chance.random() < 0.5
        self.denied: set[str] = set()
        self.script = SourceScript(prefix="x") if chance.random() < 0.3 else None

    def run(self) -> None:
        with standing(self.node.clock):
            self.guard()
            self.writer = self.node.client("writer")
            for _ in range(STEPS):
                deed = self.chance.choice(RARELY if self.chance.random() < 0.06 else DEEDS)
                name = f"client-{self.chance.randrange(3)}"
                if deed in ("publish", "wait", "give", *RARELY):
                    getattr(self, deed)()
                elif deed == "connect":
                    self.connect(name)
                elif (peer := self.peers.get(name)) is not None and peer.open:
                    getattr(self, deed)(peer)
                self.node.turn()
                self.check()

    def give(self) -> None:
        """A source gives messages to the client that has subscribed to it last."""
        if self.script is not None and self.script.sources and not self.script.source.over:
            qos, end = self.chance.randrange(3), self.chance.choice([None, self.node.clock.now + 5])
            payload = b"x" * self.chance.choice([1, 200])
            self.script.give(self.node, *(given(number, "x", qos, payload, expires_at=end) for number in (1, 2, 3)))

    def guard(self) -> None:
        if self.script is not None:
            self.script.open(self.node)
        if self.guarded:
            self.node.hooks.add("client.authorize", Callback(self.decide, 0, "access"))
            self.node.turn()

    def decide(self, client: ClientInfo, action: str, topic: str, acc: object) -> Stop:
        return Stop(not (action == "subscribe" and topic in self.denied))

    def revoke(self) -> None:
        """A right is taken away for a moment."""
        if self.guarded:
            self.denied = {self.chance.choice(("t/0", "t/1"))}
            self.node.broker.recheck_access()
            self.node.turn()
            self.denied = set()

    def full(self) -> None:
        """The store is full, or no longer."""
        if self.store is not None:
            self.store.full = not self.store.full

    def restart(self) -> None:
        """The process is killed, and its counters begin at 0."""
        if self.store is None:
            return
        self.store.full = False
        self.node.turn()
        self.node = self.node.restart()
        self.guard()
        self.copies = self.unheard = self.number = 0
        self.before = self.rows()
        self.peers.clear()
        self.writer = self.node.client("writer")

    def rows(self) -> int:
        if self.store is None:
            return 0
        return sum(len(box.rows) for box in self.store.inner.mailboxes.boxes.values())

    def wait(self) -> None:
        self.node.clock.now += self.chance.choice([1, 10, 100])
        self.node.state.registry.due(self.node.clock.now)
        self.node.turn()
        if self.store is not None and self.node.session_store is not None and self.chance.random() < 0.5:
            assert isinstance(self.node.loop, Turns)
            sweep = self.node.loop.create_task(self.store.sweep(self.node.clock.now, 1000))
            self.node.turn()
            self.node.session_store.expired(sweep.result().expired)

    def heard(self, topic: str, qos: int) -> int:
        """How many copies a message has."""
        sessions = list(self.node.state.registry.sessions.values())
        members = [session for session in sessions if topic == "t/0" and GROUP in session.subscriptions]
        shared = any(session.online or qos for session in members)
        self.unheard += bool(members) and not shared
        return sum(topic in session.subscriptions for session in sessions) + shared

    def publish(self) -> None:
        topic, qos = f"t/{self.chance.randrange(2)}", self.chance.randrange(3)
        if not self.writer.open:  # it was refused
            self.writer = self.node.client("writer")
        unheard, heard = self.unheard, self.heard(topic, qos)
        routed = self.node.state.stats.routed
        self.copies += heard
        self.unheard += not heard and unheard == self.unheard
        self.number += 1
        properties = Properties(message_expiry=5) if self.chance.random() < 0.2 else Properties()
        size = self.chance.choice([1, 200])
        self.writer.send(Publish(topic, b"x" * size, qos, packet_id=self.number if qos else 0, properties=properties))
        self.node.turn()
        for packet in self.writer.take():
            if isinstance(packet, Pubrec):
                self.writer.send(Pubrel(packet.packet_id))
        if self.store is not None and self.store.full:  # refused: clients without a durable session have no copy
            self.node.turn()
            assert heard >= self.node.state.stats.routed - routed
            self.copies += self.node.state.stats.routed - routed - heard

    def connect(self, name: str) -> None:
        version, clean = self.chance.choice([4, 5]), self.chance.random() < 0.3
        wanted = Properties()
        if version == 5:
            smallest = 100 if self.chance.random() < 0.3 else None
            wanted = Properties(session_expiry=50, maximum_packet_size=smallest)
        peer = self.peers[name] = self.node.peer(version)
        peer.send(Connect(name, version, clean, properties=wanted))
        self.node.turn()
        for topic in ("t/0", "t/1"):
            if self.chance.random() < 0.8 and peer.open:
                peer.send(Subscribe(1, (Subscription(topic, self.chance.randrange(3)),)))
        if self.chance.random() < 0.3 and peer.open:
            peer.send(Subscribe(2, (Subscription(GROUP, self.chance.randrange(3)),)))
        if self.script is not None and peer.open:
            peer.send(Subscribe(3, (Subscription("x", self.chance.randrange(3)),)))

    def acknowledge(self, peer: Peer) -> None:
        for packet in peer.take():
            match packet:
                case Publish(qos=1):
                    peer.send(Puback(packet.packet_id))
                case Publish(qos=2):
                    peer.send(Pubrec(packet.packet_id))
                case Pubrel():
                    peer.send(Pubcomp(packet.packet_id))
                case _:
                    pass

    def leave(self, peer: Peer) -> None:
        peer.send(Disconnect())

    def kill(self, peer: Peer) -> None:
        peer.close()

    def fill(self, peer: Peer) -> None:
        peer.wire.fill()

    def drain(self, peer: Peer) -> None:
        peer.wire.drain()

    def unsubscribe(self, peer: Peer) -> None:
        peer.send(Unsubscribe(9, ("t/0",)))

    def check(self) -> None:
        found = exported(self.node)
        balanced(found)
        of_sources = found["motorcade_messages_routed_total"] - self.copies
        assert of_sources >= 0 if self.script is not None else not of_sources
        assert self.unheard == found["motorcade_messages_dropped_total{no_subscribers}"]
        assert self.number == found["motorcade_messages_total{in}"]
        waiting = sum(len(session.queue or ()) for session in self.node.state.registry.sessions.values())
        assert waiting == found["motorcade_session_queued_messages"]
        left = self.before - found["motorcade_messages_restored_total"]
        boxes = [s.durable for s in self.node.state.registry.sessions.values() if s.durable is not None]
        gone = sum(len(box._gone or ()) for box in boxes)  # in flight when they expired: they may be acknowledged yet
        done = sum(len((box._counted or set()) - box.acked) for box in boxes)  # revoked, and PUBCOMP is missing
        assert self.rows() == left + found["motorcade_session_stored_messages"] - gone + done


@settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_copy_is_delivered_dropped_or_waits(seed: int, store_qos0: bool, durable: bool) -> None:
    Conversation(Random(seed), store_qos0=store_qos0, durable=durable).run()


def test_what_the_store_drops_is_not_sent_though_it_was_read() -> None:
    """A QoS 0 message of the backlog is pushed out while it waits for room in the window."""
    node = MemoryNode(SessionOptions(window=1, queue=3, patience=0.0), Limits(flapping_count=0), store=HeldStore())
    lasting = Properties(session_expiry=100)
    with standing(node.clock):
        writer, car = node.client("writer"), node.client("car", properties=lasting)
        node.subscribe(car, ("t", 1))
        car.close()
        node.turn()
        for number, qos in ((1, 1), (2, 1), (0, 0)):
            writer.send(Publish("t", b"%d" % number, qos, packet_id=number))
            node.turn()
        car = node.client("car", clean=False, properties=lasting)
        assert 0 == exported(node)["motorcade_messages_dropped_total{queue_full}"]
        for number in (3, 4):
            writer.send(Publish("t", b"%d" % number, 1, packet_id=number))
            node.turn()
        inflight = node.state.registry.sessions["car"].inflight
        while inflight:
            car.send(Puback(next(iter(inflight))))
            node.turn()
        got = [packet.payload for packet in car.take() if isinstance(packet, Publish)]
        assert [b"2", b"3", b"4"] == got
        found = exported(node)
        balanced(found)
        assert 1 == found["motorcade_messages_dropped_total{queue_full}"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_message_whose_publisher_repeats_it_counts_once(*, lost: bool) -> None:
    """Where batches are not atomic, QoS 2 for a group may be stored or not when its publisher comes back."""
    store = HeldStore(atomic=False)
    node = MemoryNode(SessionOptions(patience=0.0), Limits(flapping_count=0), store=store)
    lasting = Properties(session_expiry=100)
    with standing(node.clock):
        writer, car = (node.client(name, properties=lasting) for name in ("writer", "car"))
        node.subscribe(car, ("$share/g/t", 1))
        store.held = True
        writer.send(Publish("t", b"1", 2, packet_id=1))
        node.turn()
        if lost:
            store.fail(StoreError("no answer"))
        else:
            writer.close()
        node.turn()
        store.held = False
        store.let_go()
        node.turn()
        writer = node.client("writer", clean=False, properties=lasting)
        writer.send(Publish("t", b"1", 2, dup=True, packet_id=1), Pubrel(1))
        node.turn()
        found = exported(node)
        balanced(found)
        assert 1 == found["motorcade_messages_routed_total"] - lost == found["motorcade_session_stored_messages"]
        assert [b"1"] == [packet.payload for packet in car.take() if isinstance(packet, Publish)]
