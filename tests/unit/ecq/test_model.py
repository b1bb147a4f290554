"""Compacted queues under everything that can happen to them, beside a dictionary and a counter for each queue.

A producer; two clients that consume their own queue and a shared one, come and go, with or without their sessions, take
their own connection over, acknowledge in any order, refuse, unsubscribe, rewind; operators that delete and collect; a
store that is slow, refuses, or does not say what it has done; a process that is killed. At all times:

    numbers of a queue grow by one, and an append replaces what the dictionary has under its key, and nothing else
    who hears that a message is taken finds it stored; who hears that it is not does not
    a consumer is given what is in the queue, not what is too old; numbers rise, but for what it has refused
    it never gets an old value after a newer one of the same key, whatever happens in between, rewinds too
    stored progress never goes back but by a rewind, and never passes a message that is there and not acknowledged

And in the end, when the store works and clients answer: everybody has got everything that is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from motorcade.broker.limits import SessionOptions
from motorcade.core.errors import MotorcadeError
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.delivery.progress import decode as decode_progress
from motorcade.extension.compacted import SERVICE, Compacted, CompactedKind
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Packet,
    Puback,
    Publish,
    Pubrec,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from motorcade.mqtt.properties import Properties
from motorcade.plugins.logs.compacted.plugin import EcqPlugin
from motorcade.plugins.logs.compacted.record import FORM
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, SHARED
from motorcade.storage.ports import Appended, Draft
from tests.support.held_store import HeldStore
from tests.unit.broker.world import ALL, OUTCOMES, STEP, Guest, PluginWorld, often

SESSION = 10_000  #: seconds that sessions outlive connections
RETENTION = 1000.0
MOST = 3  #: messages in a queue, with bounds
ATTEMPTS = 3
CLIENTS = ("a", "b")
OWNERS = ("ecq:a", "ecq:b", "scq:s")
KEYS = ("k", "k/1", "l", "m", "n")
SHAPES = {"ecq": EXCLUSIVE, "scq": SHARED}


@dataclass(eq=False)
class Value:
    """A message that was ever written."""

    number: int
    key: str
    payload: bytes
    time: float


@dataclass(eq=False)
class Model:
    """A queue: a dictionary and a counter."""

    owner: str
    counter: int = 0
    values: dict[str, Value] = field(default_factory=dict)  #: by key
    written: dict[int, Value] = field(default_factory=dict)  #: all there ever was, by number

    @property
    def topic(self) -> str:
        shape = SHAPES[self.owner[:3]]
        return f"{shape.root}/w/{self.owner[4:]}/"

    def append(self, answer: Appended, draft: Draft, now: float) -> None:
        key = draft.key.decode()
        payload = FORM.decode(draft.body).payload
        if answer.refused:
            assert key not in self.values and len(self.values) >= MOST, "there was room"
            return
        self.counter += 1
        assert answer.position == self.counter, "a number is missing, or was used again"
        before = self.values.get(key)
        assert answer.replaced == (before.number if before is not None else 0)
        self.values[key] = self.written[self.counter] = Value(self.counter, key, payload, now)
        for number in answer.dropped:
            self.remove(number)

    def remove(self, number: int) -> None:
        value = self.written[number]
        if self.values.get(value.key) is value:
            del self.values[value.key]

    def there(self, now: float) -> dict[int, Value]:
        """What is to be delivered, by number."""
        return {value.number: value for value in self.values.values() if now < value.time + RETENTION}


@dataclass(eq=False)
class Flying:
    """A packet that a consumer has not answered."""

    owner: str
    number: int
    epoch: int  #: of the consumer, when it came


@dataclass(eq=False)
class Reader:
    """One client's view of one queue."""

    model: Model
    epoch: int = 0  #: one more with each rewind
    newest: dict[str, int] = field(default_factory=dict)  #: by key: the highest number that has ever come
    last: int = 0  #: the number that came last, since it began or was rewound
    came: set[int] = field(default_factory=set)  #: likewise
    refused: set[int] = field(default_factory=set)  #: and may come again
    times: dict[int, int] = field(default_factory=dict)  #: refusals by number, since it began or was rewound
    done: set[int] = field(
        default_factory=set
    )  #: acknowledged, skipped or given up; those that a rewind brings are not
    stored: int = 0  #: progress in the store
    back: bool = True  #: it may be lower than before

    def begins(self) -> None:
        """With what is not acknowledged, as far as is stored."""
        self.last = 0
        self.came.clear()
        self.refused.clear()
        self.times.clear()


class Car(Guest):
    """A client."""

    def __init__(self, world: Machine, name: str) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.lasting = True
        self.filters: set[str] = set()
        self.flying: dict[int, Flying] = {}  #: by packet id
        self.readers = {owner: Reader(world.models[owner]) for owner in (f"ecq:{name}", "scq:s")}

    def filter_of(self, owner: str) -> str:
        return f"{SHAPES[owner[:3]].root}/{owner[4:]}/#"

    def connect(self, *, clean: bool, lasting: bool, limit: int | None) -> None:
        if self.peer is not None:
            self.read()
            self.lost()
        self.lasting = lasting
        properties = Properties(session_expiry=SESSION if lasting else None, receive_maximum=limit)
        self.peer = self.world.node.peer(5)
        self.world.say(self.peer, Connect(self.name, 5, clean, properties=properties))

    def lost(self) -> None:
        """What was in flight is taken back."""
        super().lost()
        self.flying.clear()
        for reader in self.readers.values():
            reader.begins()
        if not self.lasting:
            self.filters.clear()

    def subscribe(self, owner: str) -> None:
        assert self.peer is not None
        filter_ = self.filter_of(owner)
        if filter_ not in self.filters:
            self.filters.add(filter_)
            self.readers[owner].begins()
        self.world.say(self.peer, Subscribe(1, (Subscription(filter_, 1),)))

    def unsubscribe(self, owner: str) -> None:
        assert self.peer is not None
        self.filters.discard(self.filter_of(owner))
        self.world.say(self.peer, Unsubscribe(2, (self.filter_of(owner),)))

    def heard(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            assert not packet.reason
            self.on = True
            if not packet.session_present:
                self.filters.clear()
        elif isinstance(packet, Publish):
            self._message(packet)
        elif isinstance(packet, Puback):
            self.world.rewound(self, packet)
        else:
            assert isinstance(packet, Suback | Unsuback), packet
            if isinstance(packet, Suback):
                assert packet.reasons == (1,)

    def _message(self, packet: Publish) -> None:
        root, name, key = packet.topic.split("/", 2)
        owner = f"{root[1:].lower()}:{name}"
        reader = self.readers[owner]
        number = int(dict(packet.properties.user_properties)[f"{root[1:].lower()}-seqno"])
        value = reader.model.written[number]
        where = f"{owner} {number} to {self.name}"
        assert (value.key, value.payload) == (key, bytes(packet.payload)), where
        assert packet.qos == 1 and not packet.dup and packet.packet_id not in self.flying
        assert self.world.now < value.time + RETENTION, f"{where} is too old"
        assert value.payload not in self.world.not_taken, f"{where} was refused"
        assert number >= reader.newest.get(key, 0), f"{where} comes after {reader.newest[key]}, which is newer"
        assert number > reader.last or number in reader.refused, f"{where} comes after {reader.last}"
        reader.newest[key] = number
        reader.last = max(reader.last, number)
        reader.came.add(number)
        reader.refused.discard(number)
        self.flying[packet.packet_id] = Flying(owner, number, reader.epoch)

    def answer(self, which: int, *, refuse: bool) -> None:
        assert self.peer is not None
        packet_id = list(self.flying)[which % len(self.flying)]
        flying = self.flying.pop(packet_id)
        reader = self.readers[flying.owner]
        if flying.epoch == reader.epoch:
            if not refuse:
                reader.done.add(flying.number)
            else:
                reader.refused.add(flying.number)
                times = reader.times[flying.number] = reader.times.get(flying.number, 0) + 1
                if times >= ATTEMPTS:
                    reader.done.add(flying.number)  # given up
        self.world.say(self.peer, Puback(packet_id, ReasonCode.QUOTA_EXCEEDED if refuse else ReasonCode.SUCCESS))


cars = st.integers(0, len(CLIENTS) - 1)
turns = st.sampled_from((True, True, False))


class Machine(PluginWorld[Car]):
    """The world."""

    def __init__(self) -> None:
        super().__init__()
        self.models = {owner: Model(owner) for owner in OWNERS}
        self.sent: dict[int, tuple[Model, bytes]] = {}  #: by packet id, until they are answered
        self.payloads: dict[bytes, Model] = {}  #: that were ever written
        self.not_taken: set[bytes] = set()
        self.rewinds: dict[tuple[str, int], tuple[Reader, int]] = {}  #: client, packet id: until it is answered

    @initialize(
        atomic=st.booleans(),
        overflow=st.sampled_from(("refuse", "drop_oldest")),
        bounded=st.booleans(),
        buffer=st.sampled_from((1, 4, 128)),
        window=st.sampled_from((None, 1, 4)),
    )
    def start(self, atomic: bool, overflow: str, bounded: bool, buffer: int, window: int | None) -> None:
        self.options = {
            "max_messages": MOST if bounded else 0,
            "overflow": overflow,
            "retention": RETENTION,
            "max_attempts": ATTEMPTS,
            "heartbeat": 60.0,
            "progress_interval": STEP / 2,
            "gc_interval": 1e9,
            "gc_step": 2,
        }
        self.store = HeldStore(atomic=atomic)
        self._note_writes()
        self.set_up(SessionOptions(source_buffer=buffer))
        self.cars = [Car(self, name) for name in CLIENTS]
        self.begin()
        for car in self.cars:
            car.connect(clean=False, lasting=True, limit=window)
            self.go_on()
            for owner in car.readers:
                car.subscribe(owner)
            self.go_on()

    def _note_writes(self) -> None:
        boxes = self.store.inner.mailboxes
        append, acknowledge = boxes.apply_append, boxes.apply_acknowledge

        def noted(owners: list[str], draft: Draft, now: float, *more: Any) -> list[Appended]:
            answers = append(owners, draft, now, *more)
            for answer in answers:
                model = self.models.get(answer.owner)
                if model is not None and not answer.repeated:
                    model.append(answer, draft, now)
                if model is not None and answer.position and not answer.repeated:
                    self.payloads[model.written[model.counter].payload] = model
            return answers

        def removed(owner: str, positions: Iterable[int]) -> int:
            numbers = list(positions)
            if owner in self.models:
                for number in numbers:
                    self.models[owner].remove(number)
            return acknowledge(owner, numbers)

        boxes.apply_append = noted  # type: ignore[method-assign,assignment]
        boxes.apply_acknowledge = removed  # type: ignore[method-assign]

    def begin(self) -> None:
        self.load("ecq", self.options)
        assert isinstance(self.loaded.plugin, EcqPlugin)
        self.plugin = self.loaded.plugin
        self.service: Compacted = self.plugins.service(SERVICE)

    # -- what is true at once

    def answered(self, packet: Puback | Pubrec) -> None:
        model, payload = self.sent.pop(packet.packet_id)
        if packet.reason < 0x80:
            assert self.payloads.get(payload) is model, "it was acknowledged, and is not stored"
        else:
            assert packet.reason == ReasonCode.QUOTA_EXCEEDED
            self.not_taken.add(payload)
            stored = [value.payload for value in model.values.values()]
            assert payload not in stored, "it was refused, and is there"

    def cut_off(self) -> None:
        self.sent.clear()  # nobody knows

    def check(self) -> None:
        for car in self.cars:
            for owner, reader in car.readers.items():
                shape = SHAPES[owner[:3]]
                value = self.store.records_of(shape.progress).get(shape.log_key(owner[4:]).of(car.name))
                if value is None:
                    continue
                number = decode_progress(value).number
                assert number >= reader.stored or reader.back, f"{owner}: {car.name} went back from {reader.stored}"
                reader.back = reader.back and number < reader.stored
                reader.stored = number
                left = [each for each in reader.model.there(self.now) if each <= number and each not in reader.done]
                assert not left, f"{owner}: {car.name} is at {number}, but has not acknowledged {left}"

    # -- the producer

    @rule(
        which=st.integers(0, len(OWNERS) - 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        qos=st.sampled_from((1, 1, 1, 0, 2)),
        turn=turns,
    )
    def publish(self, which: int, keys: list[str], qos: int, turn: bool) -> None:
        model = self.models[OWNERS[which]]
        packets: list[Publish] = []
        for key in keys:
            self.number += 1
            packets.append(Publish(model.topic + key, b"%d" % self.number, qos, packet_id=self.number if qos else 0))
        if self.publisher.wire.reading:
            self.sent |= {packet.packet_id: (model, packet.payload) for packet in packets if packet.packet_id}
            self.say(self.publisher, *packets)
        self.go_on(turn)

    # -- consumers

    @rule(
        which=cars,
        number=st.integers(0, 5),
        refuse=st.sampled_from((False, False, False, True)),
        count=st.integers(1, 3),
        turn=turns,
    )
    def answer(self, which: int, number: int, refuse: bool, count: int, turn: bool) -> None:
        """Some of what is in flight, in any order."""
        car = self.cars[which]
        for _ in range(count):
            if car.may_speak and car.flying:
                car.answer(number, refuse=refuse)
        self.go_on(turn)

    @rule(which=cars, back=st.booleans())
    def answer_everything(self, which: int, back: bool) -> None:
        """In the order in which it came, or the other way round."""
        car = self.cars[which]
        self.go_on()
        while car.may_speak and car.flying:
            car.answer(-1 if back else 0, refuse=False)
        self.go_on()

    @rule(
        what=st.sampled_from(("resume", "clean", "passing", "goodbye", "cut", "subscribe", "subscribe", "unsubscribe")),
        which=cars,
        shared=st.booleans(),
        limit=st.sampled_from((None, 1, 2, 5)),
        turn=turns,
    )
    def come_and_go(self, what: str, which: int, shared: bool, limit: int | None, turn: bool) -> None:
        """Connecting while it is connected takes its own connection over."""
        self.go_on()
        car, owner = self.reader_of(which, shared)
        if what in ("resume", "clean", "passing"):
            car.connect(clean=what != "resume", lasting=what != "passing", limit=limit)
            self.go_on(turn)
        elif what in ("goodbye", "cut"):
            self.see_off(car, goodbye=what == "goodbye")
        elif car.may_speak and what == "subscribe":
            car.subscribe(owner)
        elif car.may_speak:
            car.unsubscribe(owner)
        self.go_on(turn)

    def reader_of(self, which: int, shared: bool) -> tuple[Car, str]:
        car = self.cars[which]
        return car, "scq:s" if shared else f"ecq:{car.name}"

    @rule(seconds=st.sampled_from((0.2, 1.1, 5.0, 61.0, 450.0, 1.1 * RETENTION)))
    def wait(self, seconds: float) -> None:
        self.go_on()
        self.node.clock.now += seconds
        self.go_on()

    # -- rewinding, collecting, deleting

    @rule(which=cars, shared=st.booleans(), back=st.integers(0, 8), by_time=st.booleans(), mqtt=st.booleans())
    def rewind(self, which: int, shared: bool, back: int, by_time: bool, mqtt: bool) -> None:
        """When nothing is under way: what comes after it has come because of it."""
        car, owner = self.reader_of(which, shared)
        self.rest()
        model, reader = self.models[owner], car.readers[owner]
        since = self.now - (0.0, 0.5, 2.0, 10.0, 70.0)[back % 5] if by_time else None
        to = None if by_time else max(0, model.counter + 1 - back)
        if mqtt and to is not None and car.may_speak:
            assert car.peer is not None
            self.number += 1
            self.rewinds[car.name, self.number] = reader, to
            self._forget_sent(reader, to)
            topic = model.topic.replace("/w/", "/rewind/")[:-1]
            self.say(car.peer, Publish(topic, b"%d" % to, 1, packet_id=self.number))
        else:
            client = "" if owner.startswith("ecq") else car.name
            before = model.there(self.now)
            preview = self._rewind(owner, client, to, since, preview=True)
            assert before == model.there(self.now)
            if preview is not None:
                self._forget_sent(reader, preview.progress + 1)
            view = self._rewind(owner, client, to, since, preview=False)
            assert (view is None) == (preview is None)
            if view is not None:
                self._is_rewound(reader, preview, view)
        self.go_on()

    def _rewind(self, owner: str, client: str, to: int | None, since: float | None, *, preview: bool) -> Any:
        with suppress(MotorcadeError):  # there is no such queue, or it has no such consumer
            form = SHAPES[owner[:3]].form
            return self.run(self.service.rewind(form, owner[4:], client, to=to, since=since, preview=preview))
        return None

    def _forget_sent(self, reader: Reader, to: int) -> None:
        """What was sent before a rewind counts no more, and what lies before it counts as done."""
        reader.back = True
        reader.epoch += 1
        reader.begins()
        reader.done = {number for number in reader.model.written if number < to}

    def _is_rewound(self, reader: Reader, preview: Any, view: Any) -> None:
        assert (preview.progress, preview.messages, preview.bytes) == (view.progress, view.messages, view.bytes)
        there = [number for number in sorted(reader.model.there(self.now)) if number > view.progress]
        assert (len(there), there[0] if there else 0) == (view.messages, view.first)

    def rewound(self, car: Car, packet: Puback) -> None:
        """A client hears of its rewind."""
        reader, to = self.rewinds.pop((car.name, packet.packet_id))
        if packet.reason < 0x80:
            assert dict(packet.properties.user_properties)["progress"] == str(max(0, to - 1))
        else:
            unknown = reader.model.owner.startswith("scq") or not reader.model.values
            assert unknown, "there is nothing to be rewound, but there was"

    @rule(turn=turns)
    def collect(self, turn: bool) -> None:
        """What is too old goes."""
        self.chore(self.plugin.collector.collect())
        self.go_on(turn)

    @rule(which=st.integers(0, len(OWNERS) - 1))
    def delete(self, which: int) -> None:
        """Numbers go on, and so does who consumes it."""
        owner = OWNERS[which]
        self.rest()
        model = self.models[owner]
        for car in self.cars:
            if owner in car.readers:
                self._forget_sent(car.readers[owner], model.counter + 1)
        with suppress(MotorcadeError):
            self.run(self.service.delete(SHAPES[owner[:3]].form, owner[4:]))
        assert not model.values
        self.go_on()

    def rest(self) -> None:
        """Until nothing is under way."""
        self.hold_nothing()
        for _ in range(3):
            self.go_on()
            self.node.clock.now += 1.1
            self.go_on()

    # -- the store, and the process

    @rule(writes=st.sampled_from((False, False, True)), reads=st.sampled_from((False, False, False, True)))
    def hold(self, writes: bool, reads: bool) -> None:
        """From now on the store does what it is asked for when it is let go; or at once."""
        self.store.held, self.store.held_reads = writes, reads
        if not writes:
            self.loop.call_soon(self.store.let_go, ALL)
        if not reads:
            self.loop.call_soon(self.store.let_read, ALL)
        self.go_on()

    @precondition(lambda self: self.store.waiting or self.store.reads)
    @rule(count=st.integers(1, 4), turn=turns)
    def let_go(self, count: int, turn: bool) -> None:
        """A few writes and reads are done."""
        self.release(count)
        self.go_on(turn)

    @precondition(lambda self: self.store.waiting)
    @rule(outcome=st.sampled_from(OUTCOMES), turn=turns)
    def fail(self, outcome: str, turn: bool) -> None:
        """A write is refused; or it was done, or was not, or will be, and nobody is told."""
        self.fail_write(outcome)
        self.go_on(turn)

    @rule(
        outcome=st.sampled_from(OUTCOMES),
        which=st.integers(0, len(OWNERS) - 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
        qos=st.integers(0, 2),
        held=st.booleans(),
    )
    def publish_and_fail(self, outcome: str, which: int, keys: list[str], qos: int, held: bool) -> None:
        """An append fails; the store works again, or does nothing for now."""
        self.fail_next(outcome, lambda: self.publish(which=which, keys=keys, qos=qos, turn=True))
        self.hold(writes=held, reads=False)

    @rule(
        owner=st.integers(0, len(OWNERS) - 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=2, max_size=5, unique=True),
        order=st.permutations(range(5)),
        upto=st.integers(0, 4),
    )
    def publish_and_answer(self, owner: int, keys: list[str], order: list[int], upto: int) -> None:
        """The everyday: several in flight, some of them acknowledged, in any order."""
        self.publish(which=owner, keys=keys, qos=1, turn=True)
        for which in order[:upto]:
            self.answer(which=which % 2, number=which, refuse=False, count=1, turn=True)

    @rule(written=st.integers(0, 5))
    def kill(self, written: int) -> None:
        """The process is gone; so many of its writes are done."""
        self.go_on()
        self.die(written)
        self.rewinds.clear()
        self.start_again()
        for car in self.cars:
            car.connect(clean=False, lasting=True, limit=None)
            self.go_on()

    # -- what must be true in the end

    def come_to_rest(self) -> None:
        """What was under way is done; whoever has lost something finds out in time (heartbeat)."""
        self.rest()
        self.answer_all()
        for car in self.cars:
            if not car.may_speak:
                car.connect(clean=False, lasting=True, limit=None)
                self.go_on()
            for owner in car.readers:
                car.subscribe(owner)
                self.go_on()
        self.answer_all()

    def answer_all(self) -> None:
        """Until nothing happens any more, also when somebody looks whether something was missed."""
        for _ in range(3):
            self.wait(61.0)
            while any(car.may_speak and car.flying for car in self.cars):
                for car in self.cars:
                    while car.may_speak and car.flying:
                        car.answer(0, refuse=False)
                    self.go_on()

    def judge(self) -> None:
        boxes = self.store.inner.mailboxes.boxes
        for owner, model in self.models.items():
            rows = boxes[owner].rows if owner in boxes else {}
            assert sorted(rows) == sorted(value.number for value in model.values.values())
        for car in self.cars:
            for owner, reader in car.readers.items():
                there = set(reader.model.there(self.now))
                assert there <= reader.done, f"{car.name} has not got {sorted(there - reader.done)} of {owner}"
                if there:
                    self._judge_view(car, owner, there)
        assert not self.sent and not self.rewinds
        super().judge()

    def _judge_view(self, car: Car, owner: str, there: set[int]) -> None:
        form: CompactedKind = SHAPES[owner[:3]].form
        view = self.run(self.service.show(form, owner[4:]))
        assert view.messages >= len(there) and view.last == self.models[owner].counter
        (consumer,) = [each for each in view.consuming if each.client == car.name]
        assert (consumer.connected, consumer.waiting, consumer.in_flight) == (True, 0, 0)
        assert consumer.progress >= max(there)


Machine.TestCase.settings = often(examples=200, steps=50)
TestCompacted: Any = Machine.TestCase
