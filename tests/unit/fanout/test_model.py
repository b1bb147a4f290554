"""The fan-out under everything that can happen to it, against what platforms and vehicles may rely on.

A platform that publishes batches, and a few vehicles that subscribe, unsubscribe, go, come back with or without their
session, take their own connection over, acknowledge, refuse or are silent; operators that cancel, pause, resume,
collect, and load the plugin anew; a store that is slow, full, refuses, or does not say what it has done, or how much of
it; a process that is killed. At all times:

    a vehicle has at most one packet of the fan-out that it has not answered, over all its connections
    no more packets than its receive maximum are unanswered, of whatever kind
    a packet is repeated, with DUP, only on the next connection, and only while its message is wanted
    a vehicle is sent away if it was silent about a packet of the fan-out for too long, then and only then
    messages of one vehicle come in the order in which they were stored, unless their request was paused or has priority
    nothing is sent, for the first time or again, when it has expired, was called off, or while it is paused
    a vehicle gets its next message when the receipt of the last one is stored
    an acknowledgement of something that is over is told
    a batch with an id is stored once for each vehicle, however often it is sent, until its id is forgotten

And in the end, when the store works and vehicles that are there answer: nothing that could be sent waits, though nobody
gives a sign of life. When everybody is back: every entry that was ever stored has ended in exactly one state, and that
is one that fits what has happened to it; the counts of requests are those of the receipts, and whoever has listened to
their topics has heard the same.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from motorcade.broker.limits import SessionOptions
from motorcade.core import receipt as receipts
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import FINAL, LATE_ACK, Receipt, State
from motorcade.core.record import decode as decode_record
from motorcade.core.subscription import Subscription
from motorcade.core.vin import make_vin
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Publish,
    Pubrec,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.plugins.fanout.plugin import LAST_WRITES, FanoutPlugin
from motorcade.plugins.fanout.receipt_writer import RETRY
from motorcade.plugins.fanout.record import decode_entry
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, RECEIPTS, TRIGGER, owner_of, vin_of
from motorcade.storage.ports import Appended, Bound, Draft
from tests.support.held_store import HeldStore
from tests.unit.broker.world import ALL, Guest, PluginWorld, often

SESSION = 120  #: seconds that sessions outlive connections
ACK_TIMEOUT = 10.0
RETENTION = 1000.0
EXPIRES = 15.0  #: seconds that some batches give their messages
MAX_PENDING = 4
MAX_ATTEMPTS = 3
RETRY_MAX = 4.0
SOON = 0.1  #: seconds between what a node does and that its clients notice it, at most
OPTIONS = {
    "ack_timeout": ACK_TIMEOUT,
    "retry_delay": 1.0,
    "retry_delay_max": RETRY_MAX,
    "max_attempts": MAX_ATTEMPTS,
    "max_pending": MAX_PENDING,
    "data_retention": RETENTION,
    "dispatchers": 2,
    "gc_budget": 3,
}
VINS = tuple(make_vin(number) for number in range(3))
REQUESTS = ("r0", "r1", "r2")


@dataclass(eq=False)
class Stored:
    """An entry that was ever in the mailbox of a vehicle."""

    vin: str
    position: int
    request: str
    payload: bytes
    priority: int
    accepted_at: float
    expires_at: float
    replaced: bool = False
    came: int = 0  #: times it has come without DUP
    answers: Counter[str] = field(default_factory=Counter)  #: yes, no, silence

    @property
    def name(self) -> str:
        return receipts.delivery_id(self.vin, self.position)


@dataclass(frozen=True)
class Sent:
    """A packet of the platform."""

    at: float
    request: str
    payload: bytes
    vins: tuple[str, ...] = ()


@dataclass(eq=False)
class Flying:
    """A packet that the vehicle has not answered."""

    entry: Stored
    since: float
    silent: bool = False  #: for too long, on this connection


class Car(Guest):
    """A vehicle."""

    def __init__(self, world: Machine, vin: str) -> None:
        super().__init__()
        self.world = world
        self.vin = vin
        self.filters = (f"agent/{vin}/proxy/request/+", f"agent/{vin}/#")
        self.version = 5
        self.lasting = True
        self.granted: dict[str, int] = {}
        self.limit = 65535  #: receive maximum
        self.flying: dict[int, Flying] = {}  #: by packet id: what this connection has brought
        self.before: dict[int, Stored] = {}  #: by packet id: what the connections before have brought
        self.others: set[int] = set()  #: packet ids of live messages that are not answered
        self.orphans: set[int] = set()  #: packet ids of what the plugin has sent before it was loaded anew
        self.answered: Stored | None = None  #: what it has acknowledged last
        self.last: dict[int, int] = {}  #: by priority: the position that has come first last
        self.was_silent = False  #: when its session was forgotten
        self.told = 0  #: receipts that there were when it had read everything
        self.unwritten: list[Stored] = []  #: pending when its connection broke

    @property
    def is_served(self) -> bool:
        return self.may_speak and bool(self.granted)

    def connect(self, *, clean: bool, version: int, lasting: bool, limit: int | None = None) -> None:
        if self.peer is not None:
            self.read()
            self.lost()
        self.version, self.lasting = version, lasting if version == 5 else not clean
        properties = NONE
        if version == 5:
            properties = Properties(session_expiry=SESSION if lasting else None, receive_maximum=limit)
        self.limit = limit if version == 5 and limit else 65535
        self.peer = self.world.node.peer(version)
        self.told = self.world.told
        self.world.say(self.peer, Connect(self.vin, version, clean, properties=properties))

    def read(self) -> None:
        on, peer = self.on, self.peer
        super().read()
        if peer is not None and self.peer is None and on:
            silent = any(flying.silent for flying in self.flying.values()) or self.was_silent
            assert silent, f"{self.vin} was sent away"
        self.told = self.world.told

    def leaves_unread(self, packets: list[Packet]) -> None:
        for packet in packets:  # its session repeats them with DUP, as if it had read them
            self.heard(packet)

    def lost(self) -> None:
        super().lost()
        self.unwritten = self.world.pending(self.vin)
        if not self.lasting:
            self.forget()

    def forget(self) -> None:
        self.was_silent = any(flying.silent for flying in self.flying.values())
        self.granted.clear()
        self.flying.clear()
        self.before.clear()
        self.others.clear()
        self.orphans.clear()

    def subscribe(self, which: int, qos: int) -> None:
        assert self.peer is not None
        if not self.granted:
            for flying in self.flying.values():
                flying.since = self.world.now  # its time begins again
        self.granted[self.filters[which]] = qos
        if not qos:
            self.world.unconfirmed.add(self.vin)
        self.world.say(self.peer, Subscribe(1, (Subscription(self.filters[which], qos),)))

    def heard(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            assert not packet.reason
            self.on = True
            self.before |= {number: flying.entry for number, flying in self.flying.items()}
            self.flying.clear()
            self.others.clear()  # those that it still has to answer are repeated
            if not packet.session_present:
                self.forget()
            self.was_silent = False
        elif isinstance(packet, Publish) and self._is_other(packet):
            if packet.qos:
                self.others.add(packet.packet_id)
                self._count()
        elif isinstance(packet, Publish):
            self._message(packet)
        else:
            assert isinstance(packet, Suback | Unsuback | Disconnect), packet
            if isinstance(packet, Suback):
                assert all(code < 0x80 for code in packet.reasons)

    def _is_other(self, packet: Publish) -> bool:
        return packet.topic == f"agent/{self.vin}/other" or (packet.dup and packet.packet_id in self.orphans)

    def _count(self) -> None:
        assert len(self.flying) + len(self.others) <= self.limit, "more than it takes at a time"

    def _message(self, packet: Publish) -> None:
        world = self.world
        request = packet.topic.rsplit("/", 1)[1]
        entry = world.found[self.vin, request, bytes(packet.payload)]
        for other in self.flying.values():
            raise AssertionError(f"{entry.name} comes while {other.entry.name} is not answered")
        self._may_come(entry)
        left = packet.properties.message_expiry
        if self.version == 5 and entry.expires_at:
            assert left is not None and abs(entry.expires_at - world.now - left) <= 1.0, f"{entry} has {left} left"
        if packet.dup:
            if packet.packet_id not in self.before and entry in self.unwritten:
                self._begins(entry)  # it entered the window in the turn in which the connection broke
            else:
                assert self.before.pop(packet.packet_id, None) is entry, f"{entry.name} with DUP, but not sent before"
            assert not world.is_over(entry, self.told), f"{entry.name} is over, and comes again"
        else:
            self._begins(entry)
        for other_entry in self.before.values():  # it was withdrawn
            over = world.is_over(other_entry) or other_entry.request in world.ever_paused
            assert over, f"{entry.name} comes instead of {other_entry.name}"
        self.before.clear()
        if not packet.qos:
            assert not all(self.granted.values()), f"{entry.name} without QoS"
            return
        assert packet.packet_id not in self.others, "a packet id that is in use"
        self.flying[packet.packet_id] = Flying(entry, world.now)
        self._count()

    def _may_come(self, entry: Stored) -> None:
        world = self.world
        where = f"{entry.name} of {entry.request}"
        assert not entry.expires_at or world.now < entry.expires_at, f"{where} has expired"
        assert world.now < entry.accepted_at + RETENTION, f"{where} is too old"
        assert entry.accepted_at >= world.cancelled.get(entry.request, 0.0), f"{where} was called off"
        assert entry.request not in world.paused, f"{where} is paused"

    def _begins(self, entry: Stored) -> None:
        entry.came += 1
        last_one = self.answered
        assert last_one is None or self.world.is_over(last_one), f"{entry.name} comes before {last_one} has its receipt"
        if entry.came == 1 and entry.request not in self.world.ever_paused:
            last = self.last.get(entry.priority, 0)
            assert entry.position > last, f"{entry.name} of {entry.request} comes after {last}"
            self.last[entry.priority] = entry.position

    def answer(self, *, refuse: bool) -> None:
        assert self.peer is not None
        id_, flying = self.flying.popitem()
        refuse = refuse and self.version == 5
        flying.entry.answers["no" if refuse else "yes"] += 1
        if not refuse:
            self.world.acknowledged.add(flying.entry.name)
            self.answered = flying.entry
        self.world.say(self.peer, Puback(id_, ReasonCode.QUOTA_EXCEEDED if refuse else ReasonCode.SUCCESS))

    def answer_other(self) -> None:
        assert self.peer is not None
        number = self.others.pop()
        self.orphans.discard(number)
        self.world.say(self.peer, Puback(number))

    def orphan(self) -> None:
        """The plugin is loaded anew: its packets are nobody's, and their messages are sent anew."""
        self.others |= self.flying.keys()
        self.orphans |= self.flying.keys() | self.before.keys()
        self.flying.clear()
        self.before.clear()

    def waited(self) -> None:
        """Time has passed."""
        for flying in self.flying.values():
            if self.may_speak and self.world.now >= flying.since + ACK_TIMEOUT - SOON:
                flying.silent = True
                flying.entry.answers["silence"] += 1
            if self.is_served and self.world.now > flying.since + ACK_TIMEOUT + RETRY_MAX + SOON:
                raise AssertionError(f"{self.vin} is silent about {flying.entry.name}, and nobody has noticed it")


cars = st.sampled_from((0, 0, 0, 0, 1, 1, 2))  # most of it happens to one vehicle
limits = st.sampled_from((None, 1, 1, 2))  #: receive maximum
asked = st.sampled_from(REQUESTS)
turns = st.sampled_from((True, True, False))
parts = st.sampled_from((None, 1, 2, 3))  #: calls of a batch that is not written as a whole


AnyMachine = TypeVar("AnyMachine", bound="Machine")


class Machine(PluginWorld[Car]):
    """The world."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[tuple[str, int], Stored] = {}
        self.found: dict[tuple[str, str, bytes], Stored] = {}  #: the last of each
        self.batches: dict[int, Sent] = {}  #: by packet id, until they are answered
        self.named: dict[bytes, tuple[str, dict[str, Any], tuple[str, ...]]] = {}  #: by payload: batches with an id
        self.most: int | None = None  #: so many vehicles of a batch are written now, where that is not atomic
        self.accepted: list[Stored] = []  #: what was acknowledged to the platform
        self.cancelled: dict[str, float] = {}  #: request: when it was called off last
        self.paused: set[str] = set()
        self.ever_paused: set[str] = set()
        self.decided: list[Callable[[], None]] = []  #: what operators have decided since everybody has read
        self.unconfirmed: set[str] = set()  #: vehicles that have ever subscribed with QoS 0
        self.acknowledged: set[str] = set()  #: deliveries that were acknowledged, and not before a kill
        self.heard: list[bytes] = []  #: receipts that came on their topics since this process has begun
        self.heard_from = 0  #: receipts that there were then
        self._receipts: list[Receipt] = []  # as far as they were read
        self.torn = False  #: a write was cut off in the middle: receipts may be there twice

    @initialize(atomic=st.booleans(), here=st.lists(limits, min_size=len(VINS), max_size=len(VINS)))
    def start(self, atomic: bool, here: Sequence[int | None] = ()) -> None:
        self.store = HeldStore(atomic=atomic)
        boxes = self.store.inner.mailboxes
        apply = boxes.apply_append

        def noted(owners: list[str], draft: Draft, now: float, bound: Bound, *more: Any) -> list[Appended]:
            most = self.most if vin_of(owners[0]) is not None else None
            answers = apply(owners[:most], draft, now, bound, *more)
            for answer in answers:
                self.note(answer, draft)
            return answers

        boxes.apply_append = noted  # type: ignore[method-assign,assignment]
        self.set_up(SessionOptions(expiry_default_v3=SESSION))
        self.cars = [Car(self, vin) for vin in VINS]
        self.begin()
        for which, limit in enumerate(here):
            self.connect(which, limit=limit, subscribes=True)

    def begin(self) -> None:
        self.load("fanout", OPTIONS)
        self.take_plugin()
        self.watcher = self.node.client("watcher")
        self.node.subscribe(self.watcher, (f"{receipts.TOPIC}/#", 0))
        self.heard, self.heard_from = [], self.told

    def take_plugin(self) -> None:
        assert isinstance(self.loaded.plugin, FanoutPlugin)
        self.plugin = self.loaded.plugin
        self.service: FanoutService = self.plugins.service("fanout")

    # -- what there is

    def note(self, answer: Appended, draft: Draft) -> None:
        vin = vin_of(answer.owner)
        if vin is None:
            return
        record = decode_entry(draft.body)
        entry = Stored(
            vin,
            answer.position,
            record.request_id,
            draft.payload,
            record.priority,
            record.accepted_at,
            record.expires_at,
        )
        assert (vin, answer.position) not in self.entries, "a position was used again"
        earlier = self.found.get((vin, record.request_id, draft.payload))
        assert earlier is None or record.accepted_at >= earlier.accepted_at + RETENTION, f"{earlier} once more"
        self.entries[vin, answer.position] = entry
        self.found[vin, record.request_id, draft.payload] = entry
        if answer.replaced:
            self.entries[vin, answer.replaced].replaced = True

    def pending(self, vin: str) -> list[Stored]:
        box = self.store.inner.mailboxes.boxes.get(owner_of(vin))
        return [] if box is None else [self.entries[vin, position] for position in box.rows]

    def receipts(self) -> list[Receipt]:
        stream = self.store.inner.streams.streams.get(RECEIPTS)
        records = [] if stream is None else stream.records
        new = records[len(self._receipts) :]
        self._receipts += (receipts.decode(decode_record(record.value).payload) for record in new)
        return self._receipts

    def check(self) -> None:
        """What was decided holds for everything that is sent from now on."""
        decided, self.decided = self.decided, []
        for hold in decided:
            hold()
        self.heard += (packet.payload for packet in self.watcher.take() if isinstance(packet, Publish))

    @property
    def told(self) -> int:
        """How many receipts there are."""
        stream = self.store.inner.streams.streams.get(RECEIPTS)
        return 0 if stream is None else len(stream.records)

    def is_over(self, entry: Stored, told: int | None = None) -> bool:
        """Now, or when there were so many receipts."""
        known = itertools.islice(self.receipts(), told)
        return any(receipt.delivery_id == entry.name and receipt.state in FINAL for receipt in known)

    # -- answers, and time

    def cut_off(self) -> None:
        self.batches.clear()

    def answered(self, packet: Puback | Pubrec) -> None:
        assert isinstance(packet, Puback)
        sent = self.batches.pop(packet.packet_id)
        request, payload, vins = sent.request, sent.payload, sent.vins
        if packet.reason < 0x80:
            taken = [entry.vin for entry in self._taken(sent)]
            figures = dict(packet.properties.user_properties)
            if figures:
                told, left = (int(figures.get(name, 0)) for name in ("rejected", "superseded"))
                told += int(figures["accepted"])
                assert told + left == len(set(vins)), f"{figures} of {vins}"
                assert told <= len(set(taken)), f"{figures}, but of {payload!r} only {taken} were told"
                assert len(vins) - len(set(vins)) == int(figures["duplicates"])
            for vin in set(vins) - set(taken):
                assert self._is_superseded(vin, request, payload), f"{vin} was left out"

    def _taken(self, sent: Sent) -> list[Stored]:
        """What is stored of a batch that was acknowledged."""
        if sent.payload not in self.named:
            taken = [self.found[vin, sent.request, sent.payload] for vin in set(sent.vins)]
        else:  # perhaps earlier than this; and once more meanwhile, when its id was forgotten
            told = {receipt.delivery_id for receipt in self.receipts()}
            taken = [
                entry
                for entry in self.entries.values()
                if (entry.request, entry.payload) == (sent.request, sent.payload)
                and entry.accepted_at <= sent.at
                and (sent.at < entry.accepted_at + RETENTION or not self.store.atomic)  # or it was completed since
                and entry.name in told
            ]
        self.accepted += taken
        return taken

    def _is_superseded(self, vin: str, request: str, payload: bytes) -> bool:
        """Whether a batch that was published later was stored for a vehicle."""
        others = [entry for entry in self.entries.values() if (entry.vin, entry.request) == (vin, request)]
        return any(int(entry.payload) > int(payload) for entry in others)

    def pass_time(self, seconds: float) -> None:
        """Everything that is due happens at its time."""
        self.go_on()
        until, later = self.now + seconds, self.loop.later
        while later and later[0][0] <= until:
            self.node.clock.now = max(self.now, later[0][0])
            self._look_at_clocks()
            self.node.turn()
            for car in self.cars:
                car.read()
        self.node.clock.now = max(self.now, until)
        self._look_at_clocks()
        for will in self.node.state.registry.due(self.now):
            self.node.broker.publish_will(will)
        self.go_on()

    def _look_at_clocks(self) -> None:
        for car in self.cars:
            car.waited()

    # -- the platform

    @rule(
        which=st.lists(cars, min_size=1, max_size=4),
        request=asked,
        two=st.booleans(),
        mode=st.sampled_from((None, None, "replace", "append")),
        priority=st.sampled_from((0, 0, 0, 0, 5)),
        expires=st.sampled_from((None, None, EXPIRES)),
        named=st.booleans(),
        turn=turns,
    )
    def publish(
        self,
        which: Sequence[int] = (0,),
        request: str = "r0",
        two: bool = False,
        mode: str | None = None,
        priority: int = 0,
        expires: float | None = None,
        named: bool = False,
        turn: bool = True,
    ) -> None:
        self.number += 1
        payload = b"%d" % self.number
        vins = tuple(VINS[number] for number in which)
        fields: dict[str, Any] = {"ids": vins, "request_id": request, "priority": priority}
        fields |= {"mode": mode} if mode is not None else {}
        fields |= {"expires_in": expires} if expires is not None else {}
        first, second = 2 * self.number, 2 * self.number + 1
        topic = TRIGGER if two else INGRESS
        fields |= {"data_id": f"d{self.number}"} if two else {"data": payload.decode(), "encoding": "utf8"}
        if named:
            fields |= {"batch_id": f"b{self.number}"}
            self.named[payload] = topic, fields, vins
        packets: list[Packet] = [Publish(topic, json.dumps(fields).encode(), 1, packet_id=second)]
        self.batches[second] = Sent(self.now, request, payload, vins)
        if two:
            packets.insert(0, Publish(f"{DATA_PREFIX}d{self.number}", payload, 1, packet_id=first))
            self.batches[first] = Sent(self.now, request, payload)
        self.say(self.publisher, *packets)
        self.go_on(turn)

    @rule(which=st.integers(0, 3), turn=turns)
    def send_again(self, which: int, turn: bool) -> None:
        """One of the last batches with an id, whatever has become of it."""
        if self.named:
            payload = list(self.named)[-1 - which % len(self.named)]
            topic, fields, vins = self.named[payload]
            self.number += 1
            packet_id = 2 * self.number
            self.batches[packet_id] = Sent(self.now, fields["request_id"], payload, vins)
            self.say(self.publisher, Publish(topic, json.dumps(fields).encode(), 1, packet_id=packet_id))
        self.go_on(turn)

    # -- vehicles

    @rule(
        which=cars,
        clean=st.sampled_from((False, False, False, True)),
        version=st.sampled_from((4, 5, 5)),
        lasting=st.sampled_from((True, True, True, False)),
        limit=limits,
        subscribes=st.booleans(),
        turn=turns,
    )
    def connect(
        self,
        which: int = 0,
        clean: bool = False,
        version: int = 5,
        lasting: bool = True,
        limit: int | None = None,
        subscribes: bool = False,
        turn: bool = True,
    ) -> None:
        """Also while it is connected: then it takes its own connection over."""
        car = self.cars[which]
        car.connect(clean=clean, version=version, lasting=lasting, limit=limit)
        self.node.turn()
        car.read()
        if subscribes and car.may_speak:
            car.subscribe(0, 1)
        self.go_on(turn)

    @rule(which=cars, limit=limits, version=st.sampled_from((4, 5, 5)), away=st.sampled_from((0.0, 2.0, EXPIRES)))
    def come_again(self, which: int = 0, limit: int | None = None, version: int = 5, away: float = 0.0) -> None:
        """The connection breaks, and the vehicle resumes its session after a while."""
        self.see_off(self.cars[which], goodbye=False)
        if away:
            self.pass_time(away)
        self.connect(which, version=version, limit=limit)

    @rule(which=cars, limit=limits)
    def be_silent(self, which: int, limit: int | None) -> None:
        """Until the vehicle is sent away, if it has something to answer; then it resumes its session."""
        for _ in range(2):
            self.pass_time(ACK_TIMEOUT)
        if self.cars[which].peer is None:
            self.connect(which, limit=limit)

    @rule(which=cars, request=asked, over=st.sampled_from(("cancelled", "replaced", "expired", "paused")), limit=limits)
    def end_while_away(self, which: int, request: str, over: str, limit: int | None) -> None:
        """Something in flight is over before the vehicle is back."""
        expires = EXPIRES if over == "expired" else None
        self.publish([which], request, expires=expires)
        self.see_off(self.cars[which], goodbye=False)
        match over:
            case "cancelled":
                self.cancel(request)
            case "replaced":
                self.publish([which], request)
            case "paused":
                self.pause(request)
            case _:
                self.pass_time(EXPIRES)
        self.connect(which, limit=limit)

    @rule(which=cars, filter_=st.integers(0, 1), qos=st.sampled_from((1, 1, 1, 0)), turn=turns)
    def subscribe(self, which: int = 0, filter_: int = 0, qos: int = 1, turn: bool = True) -> None:
        car = self.cars[which]
        if car.may_speak and not car.granted.get(car.filters[filter_], 1):
            self.node.turn()  # what was sent before may come at the QoS that it had
            car.read()
        if car.may_speak:
            car.subscribe(filter_, qos)
        self.go_on(turn)

    @rule(which=cars, number=st.integers(0, 1), turn=turns)
    def unsubscribe(self, which: int = 0, number: int = 0, turn: bool = True) -> None:
        car = self.cars[which]
        if car.may_speak and car.granted:
            assert car.peer is not None
            filter_ = list(car.granted)[number % len(car.granted)]
            self.node.turn()  # what was sent before may come at the QoS that it had
            car.read()
            car.granted.pop(filter_, None)
            if car.may_speak:
                self.say(car.peer, Unsubscribe(2, (filter_,)))
        self.go_on(turn)

    @rule(which=cars, goodbye=st.booleans(), turn=turns)
    def leave(self, which: int = 0, goodbye: bool = False, turn: bool = True) -> None:
        self.see_off(self.cars[which], goodbye=goodbye)
        self.go_on(turn)

    @rule(which=cars, refuse=st.sampled_from((False, False, False, True)), turn=turns)
    def answer(self, which: int = 0, refuse: bool = False, turn: bool = True) -> None:
        car = self.cars[which]
        if car.may_speak and car.flying:
            car.answer(refuse=refuse)
        self.go_on(turn)

    @rule(which=cars, turn=turns)
    def answer_unasked(self, which: int, turn: bool) -> None:
        """What an earlier connection has brought, though this one has not repeated it (yet)."""
        car = self.cars[which]
        self.go_on()
        numbers = car.before.keys() - car.flying.keys() - car.others
        if car.may_speak and numbers:
            assert car.peer is not None
            number = min(numbers)
            car.before.pop(number).answers["yes"] += 1
            self.say(car.peer, Puback(number))
        self.go_on(turn)

    @rule(which=cars, turn=turns)
    def tell(self, which: int, turn: bool) -> None:
        """A live message for a vehicle, of somebody else: it takes room in the window."""
        self.number += 1
        packet_id = 2 * self.number
        self.batches[packet_id] = Sent(self.now, "", b"")
        self.say(self.publisher, Publish(f"agent/{VINS[which]}/other", b"hello", 1, packet_id=packet_id))
        self.go_on(turn)

    @rule(which=cars, turn=turns)
    def answer_other(self, which: int, turn: bool) -> None:
        car = self.cars[which]
        if car.may_speak and car.others:
            car.answer_other()
        self.go_on(turn)

    @rule(which=cars, online=st.booleans(), turn=turns)
    def heartbeat(self, which: int = 0, online: bool = True, turn: bool = True) -> None:
        car = self.cars[which]
        if car.may_speak:
            assert car.peer is not None
            self.say(car.peer, Publish(f"ecp/{car.vin}/{'online' if online else 'heartbeat'}", b"", 0))
        self.go_on(turn)

    @rule(seconds=st.sampled_from((0.5, 1.0, 2.0, 5.0, ACK_TIMEOUT, EXPIRES)))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(seconds=st.sampled_from((1.0, 1.0, 1.0, 2.0 * SESSION, 1.1 * RETENTION)))
    def wait_long(self, seconds: float) -> None:
        self.pass_time(seconds)

    # -- operators

    @rule(request=asked, turn=turns)
    def cancel(self, request: str = "r0", turn: bool = True) -> None:
        self.go_on()
        at = self.now

        async def work() -> None:
            await self.service.cancel(request)
            self.paused.discard(request)
            self.decided.append(partial(self.paused.discard, request))  # behind a pause that was asked for before
            self.decided.append(partial(self.cancelled.__setitem__, request, at))

        self.chore(work())
        self.go_on(turn)

    @rule(request=asked, turn=turns)
    def pause(self, request: str = "r0", turn: bool = True) -> None:
        self.go_on()
        self.ever_paused.add(request)

        async def work() -> None:
            await self.service.pause(request)
            self.decided.append(partial(self.paused.add, request))

        self.chore(work())
        self.go_on(turn)

    @rule(request=asked, turn=turns)
    def resume(self, request: str = "r0", turn: bool = True) -> None:
        self.go_on()
        self.paused.discard(request)

        async def work() -> None:
            await self.service.resume(request)
            self.decided.append(partial(self.paused.discard, request))

        self.chore(work())
        self.go_on(turn)

    @rule(turn=turns)
    def collect(self, turn: bool = True) -> None:
        self.chore(self.service.gc())
        self.go_on(turn)

    @rule(works=st.booleans())
    def load_anew(self, works: bool = True) -> None:
        """Unload the plugin and load it again, with packets in flight; the store works before, or only in between."""
        if works:
            self.work_again()
        else:
            self.go_on()
        unloading = self.loop.create_task(self.plugins.unload("fanout"))
        self.node.turn()
        for car in self.cars:
            car.read()
            car.orphan()
        until = self.now + (2 * RETRY if works else LAST_WRITES)
        while not unloading.done():
            assert self.now <= until, "unloading does not end"
            self.pass_time(RETRY / 2)
        unloading.result()
        if not works:
            self.unload_unwritten()
        self.loaded = self.run(self.plugins.load("fanout", OPTIONS))
        self.take_plugin()
        if not works:
            self.take_decisions()
        self.go_on()

    def unload_unwritten(self) -> None:
        """What was not stored when the plugin ended is as after a kill: the next one knows what is stored by now."""
        self.work_again()
        for car in self.cars:
            car.answered = None
        self.acknowledged.clear()
        self.decided.clear()
        self.heard, self.heard_from = [], self.told  # of what was stored since, only the stream tells

    def take_decisions(self) -> None:
        """What was being decided may have been stored."""
        for request, record in self.plugin.table.requests.items():
            self.cancelled[request] = record.cancelled_at
            (self.paused.add if record.state == "paused" else self.paused.discard)(request)

    # -- the store, and the process

    @rule(writes=st.booleans(), reads=st.booleans())
    def hold(self, writes: bool = True, reads: bool = False) -> None:
        """From now on the store does what it is asked for when it is let go."""
        self.store.held, self.store.held_reads = writes, reads

    @rule()
    def fill(self) -> None:
        """From now on the store takes nothing that needs room."""
        self.store.full = True

    def hold_nothing(self) -> None:
        self.store.full = False
        super().hold_nothing()

    @rule()
    def work_again(self) -> None:
        self.hold_nothing()
        self.go_on()

    @rule(count=st.integers(1, 4), turn=turns)
    def let_go(self, count: int = ALL, turn: bool = True) -> None:
        self.release(count)
        self.go_on(turn)

    @rule(outcome=st.sampled_from(("refused", "refused", "lost", "part")), calls=parts, turn=turns)
    def refuse(self, outcome: str, calls: int | None, turn: bool) -> None:
        """A write is refused; where batches are not atomic, perhaps when a part of it was done."""
        self.fail(outcome if not self.store.atomic else "refused", calls, turn)

    def fail(self, outcome: str, calls: int | None = None, turn: bool = True) -> None:
        """A write is refused; or it was done, or was not, or in part, and the caller is not told which."""
        if self.store.waiting:
            self.torn |= outcome == "part"
            with self.loop.running(), self.writing_a_part(calls, part=outcome == "part"):
                self.fail_write("written" if outcome == "part" else outcome)
        self.go_on(turn)

    @contextmanager
    def writing_a_part(self, calls: int | None, *, part: bool = True) -> Iterator[None]:
        """Of a batch so many calls are made, and an append gets to its first vehicle; if batches are atomic, to all."""
        if part and not self.store.atomic:
            self.most, self.store.cut = 1, calls
        try:
            yield
        finally:
            self.most = self.store.cut = None

    @rule(written=st.integers(0, 5), part=st.booleans(), calls=parts)
    def kill(self, written: int = 0, part: bool = False, calls: int | None = None) -> None:
        """The process is gone; so many of its writes are done, and perhaps a part of the next one."""
        self.go_on()
        self.loop.die()
        writes = list(self.store.waiting)
        self.die(written)
        if part and not self.store.atomic and len(writes) > written:
            self.torn = True
            with self.writing_a_part(calls):
                writes[written].apply()
        self.store.full = False
        for car in self.cars:
            car.flying.clear()  # who takes them again is told so by a new packet
            car.before.clear()
            car.orphans.clear()
            car.answered = None
        self.acknowledged.clear()
        self.decided.clear()
        self.start_again()
        self.take_decisions()

    # -- what must be true in the end

    def come_to_rest(self) -> None:
        self.hold_nothing()
        self.go_on()
        # A decision that could not be stored has not been taken.
        self.paused = {name for name, record in self.plugin.table.requests.items() if record.state == "paused"}
        self.answer_all()
        for car in self.cars:  # nobody has given a sign of life: what could be sent was sent
            if car.is_served:
                waiting = [entry.name for entry in self.pending(car.vin) if entry.request not in self.paused]
                assert not waiting, f"{waiting} wait for nothing"
        for request in sorted(self.paused):
            self.resume(request)
        for car in self.cars:
            if not car.may_speak:
                car.connect(clean=False, version=5, lasting=True)
                self.go_on()
            car.subscribe(0, 1)
            self.go_on()
        self.answer_all()

    def answer_all(self) -> None:
        """Until nothing happens any more."""
        quiet = 0
        while quiet < 2 * ACK_TIMEOUT:
            before = self.told
            for car in self.cars:
                while car.may_speak and (car.flying or car.others):
                    if car.others:
                        car.answer_other()
                    else:
                        car.answer(refuse=False)
                    self.go_on()
            self.pass_time(1.0)
            quiet = quiet + 1 if self.told == before else 0

    def judge(self) -> None:
        for car in self.cars:
            assert not [entry.name for entry in self.pending(car.vin)], "something is left"
            history = [view.delivery_id for view in self.run(self.service.vehicle(car.vin)).history]
            assert len(set(history)) == len(history), "something has ended twice in the history of a vehicle"
        assert not self.plugin.table.inflight
        assert not self.batches
        for what in ("task_failed", "dispatch_failed"):
            assert not self.loaded.context.counters[what]
        super().judge()
        told = self.receipts()
        self._judge_order(told)
        self._judge_late(told)
        told = [receipt for receipt in told if receipt.reason != LATE_ACK]
        self._judge_ends(told)
        self._judge_counts(told)
        stream = self.store.inner.streams.streams.get(RECEIPTS)
        written = [] if stream is None else stream.records[self.heard_from :]
        stored = Counter(decode_record(record.value).payload for record in written)
        told_live = Counter(self.heard)
        if self.torn:  # some may be there twice, and are told once
            assert told_live.keys() == stored.keys() and told_live <= stored
        else:
            assert told_live == stored

    def _judge_ends(self, told: list[Receipt]) -> None:
        ends: dict[str, list[Receipt]] = {entry.name: [] for entry in self.entries.values()}
        for receipt in told:
            if receipt.state in FINAL:
                ends[receipt.delivery_id].append(receipt)
        named = {receipt.delivery_id for receipt in told}
        promised = {entry.name for entry in self.accepted}
        for entry in self.entries.values():
            if entry.replaced and entry.name not in named | promised:
                continue  # killed before anybody had heard of it, and the next batch was stored already
            self._judge_ending(entry, ends[entry.name])
        accepted = {receipt.delivery_id for receipt in told if receipt.state is State.ACCEPTED}
        for entry in self.accepted:
            assert entry.name in accepted or _is_rejected(ends[entry.name]), f"{entry.name} was never accepted"

    def _judge_order(self, told: list[Receipt]) -> None:
        """The first receipt of a delivery says that it was accepted, if its publisher has heard so."""
        begun = {entry.name for entry in self.entries.values()}
        begun -= {entry.name for entry in self.accepted}
        for receipt in told:
            first = receipt.delivery_id not in begun
            begun.add(receipt.delivery_id)
            assert not first or receipt.state is State.ACCEPTED, f"{receipt} comes before it was accepted"

    def _judge_late(self, told: list[Receipt]) -> None:
        """What was acknowledged when it was over is told as such, after its end, and nothing else is."""
        ended: dict[str, State] = {}
        late: set[str] = set()
        for receipt in told:
            if receipt.state in FINAL:
                ended[receipt.delivery_id] = receipt.state
            elif receipt.reason == LATE_ACK:
                assert receipt.state is State.SENT and receipt.delivery_id in ended, f"{receipt} before its end"
                late.add(receipt.delivery_id)
        for entry in self.entries.values():
            if entry.name in late:
                assert entry.answers["yes"] and ended[entry.name] is not State.ACKED, f"{entry} has no late answer"
            elif entry.name in self.acknowledged:
                assert ended[entry.name] is State.ACKED, f"{entry} was {ended[entry.name]}, and its answer is not told"

    def _judge_ending(self, entry: Stored, found: list[Receipt]) -> None:
        assert len({receipt.state for receipt in found}) == 1, f"{entry.name} ended as {found}"
        assert self.torn or len(found) <= 1, f"{entry.name} ended {len(found)} times"
        self._judge_end(entry, found[0])

    def _judge_end(self, entry: Stored, receipt: Receipt) -> None:
        fits: bool
        match receipt.state, receipt.reason:
            case State.ACKED, "qos0":
                fits = entry.vin in self.unconfirmed  # though the connection may have broken before it came
            case State.ACKED, _:
                fits = bool(entry.answers["yes"])
            case State.REPLACED, _:
                fits = entry.replaced
            case State.EXPIRED, "expires_in":
                fits = bool(entry.expires_at)
            case State.EXPIRED, _:
                fits = receipt.time >= entry.accepted_at + RETENTION
            case State.CANCELLED, _:
                fits = entry.request in self.cancelled
            case State.FAILED, "pending_limit":
                fits = not entry.came
            case State.FAILED, "session_ended":
                fits = receipt.attempt >= MAX_ATTEMPTS
            case State.FAILED, "no_ack":
                fits = receipt.attempt >= MAX_ATTEMPTS
            case State.FAILED, _:
                fits = bool(entry.answers["no"])
        assert fits, f"{entry} has ended as {receipt}"

    def _judge_counts(self, told: list[Receipt]) -> None:
        counted: dict[str, Counter[State]] = {}
        last: dict[str, Receipt] = {}
        for receipt in told:
            if receipt.delivery_id not in last or last[receipt.delivery_id].state not in FINAL:
                last[receipt.delivery_id] = receipt
        for receipt in last.values():
            counted.setdefault(receipt.request_id, Counter())[receipt.state] += 1
        for request, states in counted.items():
            view = self.run(self.service.status(request))
            assert view.states == dict(states), f"{request}: {view.states} instead of {dict(states)}"


@contextmanager
def judged(machine: AnyMachine, *, atomic: bool = True) -> Iterator[AnyMachine]:
    """Begin a world for one example: three vehicles that are away, a platform. It ends as the model demands."""
    try:
        machine.start(atomic)
        yield machine
    except BaseException:
        machine.abandon()
        raise
    machine.teardown()


def _is_rejected(ends: list[Receipt]) -> bool:
    return any(receipt.reason == "pending_limit" for receipt in ends)


Machine.TestCase.settings = often(examples=120, steps=40)
TestFanout: Any = Machine.TestCase


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_steps() -> None:
    run_state_machine_as_test(Machine, settings=often(examples=2500, steps=60))


def test_a_message_that_waits_for_room_comes_by_the_filter_that_is_left() -> None:
    machine = Machine()
    machine.start(atomic=False, here=[None, None, None])
    machine.subscribe(which=0, filter_=1)  # two filters match now
    machine.publish([0], "r0")
    machine.come_again(which=0, limit=1)
    machine.load_anew(works=False)  # the packet of the plugin before fills the window
    machine.unsubscribe(which=0, number=0)
    machine.teardown()
