"""A queue of a whole node under everything that can happen to it, beside a set of messages.

A publisher; three workers with windows of their own that acknowledge in any order, refuse, keep silent, leave with and
without a word, come back to their session or without one, take their own connection over, unsubscribe and acknowledge
later; a store that is slow, refuses, or does not say what it has done; a process that is killed. At all times:

    who hears that a message is taken finds it stored; who hears that it is not does not
    nobody gets a message that another one holds, unless that one has exceeded the time to acknowledge
    nobody gets a message once more that was acknowledged, or was sent as often as it may, in the life of a process
    what leaves the store was acknowledged, or is a dead letter

And in the end, when the store works and one worker answers: everything is done, and the queue is empty.
`test_dispatcher_model.py` has the dispatcher alone, with every step of it apart.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from motorcade.broker.limits import SessionOptions
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
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
from motorcade.plugins.logs.queues.plugin import QueuesPlugin
from motorcade.plugins.logs.queues.strategy import Random
from motorcade.storage.ports import Appended, Draft
from tests.support.held_store import HeldStore
from tests.unit.broker.world import ALL, Guest, PluginWorld, often

WORKERS = 3
SESSION = 100_000  #: seconds that sessions outlive connections
TIMEOUT = 10.0
ATTEMPTS = 4
OUTCOMES = ("refused", "lost", "written")  #: of a write that fails; a store never says so before it is done (`ports`)


class Car(Guest):
    """A worker."""

    def __init__(self, world: Machine, name: str, window: int) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.window = window
        self.lasting = True
        self.flying: dict[int, bytes] = {}  #: payloads by packet id

    def connect(self, *, clean: bool, lasting: bool) -> None:
        if self.peer is not None:
            self.read()
            self.lost()
        self.lasting = lasting
        properties = Properties(session_expiry=SESSION if lasting else None, receive_maximum=self.window)
        self.peer = self.world.node.peer(5)
        self.world.say(self.peer, Connect(self.name, 5, clean, properties=properties))

    def lost(self) -> None:
        """What was in flight is taken back."""
        super().lost()
        self.flying.clear()
        self.lets_go()

    def lets_go(self) -> None:
        """Others may get what it holds."""
        for holding in self.world.holding.values():
            holding.pop(self.name, None)

    def heard(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            assert not packet.reason
            self.on = True
        elif isinstance(packet, Publish):
            self._message(packet)
        else:
            assert isinstance(packet, Suback | Unsuback), packet

    def leaves_unread(self, packets: list[Packet]) -> None:
        for packet in packets:
            if isinstance(packet, Publish):
                self._message(packet)

    def _message(self, packet: Publish) -> None:
        world, payload = self.world, bytes(packet.payload)
        where = f"{payload!r} to {self.name}"
        assert packet.qos == 1 and not packet.dup and packet.packet_id not in self.flying, where
        assert payload in world.stored, f"{where} is not stored"
        assert world.done.get(payload) != world.node.process, f"{where} was acknowledged"
        holding = world.holding.setdefault(payload, {})
        late = [name for name, since in holding.items() if name != self.name and world.now < since + TIMEOUT]
        assert not late, f"{where} is held by {late}"
        holding[self.name] = world.now
        world.tries[payload] += 1
        assert not world.attempts or world.tries[payload] <= world.attempts, f"{where} is tried once too often"
        self.flying[packet.packet_id] = payload

    def answer(self, which: int, *, refuse: bool) -> None:
        assert self.peer is not None
        packet_id = list(self.flying)[which % len(self.flying)]
        payload = self.flying.pop(packet_id)
        self.world.holding[payload].pop(self.name, None)
        if not refuse:
            self.world.done[payload] = self.world.node.process
        self.world.say(self.peer, Puback(packet_id, ReasonCode.QUOTA_EXCEEDED if refuse else ReasonCode.SUCCESS))

    def subscribe(self) -> None:
        assert self.peer is not None
        self.world.say(self.peer, Subscribe(1, (Subscription("$queue/q", 1),)))

    def unsubscribe(self) -> None:
        assert self.peer is not None
        self.world.say(self.peer, Unsubscribe(2, ("$queue/q",)))
        self.lets_go()  # but what it says of them later counts


cars = st.integers(0, WORKERS - 1)
turns = st.sampled_from((True, True, False))


class Machine(PluginWorld[Car]):
    """The world."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: set[bytes] = set()  #: payloads that ever were in the queue
        self.there: dict[tuple[str, int], bytes] = {}  #: by owner and position: what is in it now
        self.dead: set[bytes] = set()  #: payloads of dead letters
        self.done: dict[bytes, int] = {}  #: acknowledged, and in which process
        self.sent: dict[int, bytes] = {}  #: by packet id, until they are answered
        self.holding: dict[bytes, dict[str, float]] = {}  #: who has what, and since when
        self.tries: Counter[bytes] = Counter()  #: in this process

    @initialize(
        windows=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30)),
        buffer=st.sampled_from((1, 4, 64)),
        strategy=st.sampled_from(("round_robin", "random", "least_inflight")),
        levels=st.integers(1, 3),
        attempts=st.sampled_from((0, ATTEMPTS)),
        most=st.sampled_from((0, 12)),
    )
    def start(
        self, windows: tuple[int, ...], buffer: int, strategy: str, levels: int, attempts: int, most: int
    ) -> None:
        self.attempts = attempts
        options = {
            "topics": ["q/#"],
            "strategy": strategy,
            "priorities": levels,
            "max_attempts": attempts,
            "max_messages": most,
            "ack_timeout": TIMEOUT,
            "redispatch_delay": 0.5,
            "dead_letter": "dead",
        }
        self.options: dict[str, Any] = {"queue": {"dead": {}, "q": options}}
        self.store = HeldStore()
        self._note_writes()
        self.set_up(SessionOptions(source_buffer=buffer))
        self.cars = [Car(self, f"car{number}", window) for number, window in enumerate(windows)]
        self.begin()
        for car in self.cars:
            self._join(car)

    def _join(self, car: Car) -> None:
        car.connect(clean=False, lasting=True)
        self.go_on()
        if car.may_speak:
            car.subscribe()
            self.go_on()

    def _note_writes(self) -> None:
        boxes = self.store.inner.mailboxes
        append, acknowledge = boxes.apply_append, boxes.apply_acknowledge

        def noted(owners: list[str], draft: Draft, now: float, *more: Any) -> list[Appended]:
            answers = append(owners, draft, now, *more)
            for answer in answers:
                payload = bytes(draft.payload)
                if answer.owner.startswith("queue:dead"):
                    self.dead.add(payload)
                elif answer.owner.startswith("queue:q") and not answer.repeated:
                    self.stored.add(payload)
                    self.there[answer.owner, answer.position] = payload
            return answers

        def removed(owner: str, positions: Iterable[int]) -> int:
            numbers = list(positions)
            for number in numbers:
                payload = self.there.pop((owner, number), None)
                assert payload is None or payload in self.done or payload in self.dead, f"{payload!r} is lost"
            return acknowledge(owner, numbers)

        boxes.apply_append = noted  # type: ignore[method-assign,assignment]
        boxes.apply_acknowledge = removed  # type: ignore[method-assign]

    def begin(self) -> None:
        self.load("queues", self.options)
        assert isinstance(self.loaded.plugin, QueuesPlugin)
        queue = self.loaded.plugin._queues.get("q")
        assert queue is not None
        if queue.options.strategy == "random":  # of the same chance each time, or a failure could not be repeated
            queue.dispatcher._ready = Random(random.Random(0))

    # -- what is true at once

    def answered(self, packet: Puback | Pubrec) -> None:
        payload = self.sent.pop(packet.packet_id)
        if packet.reason < 0x80:
            assert payload in self.stored, "it was acknowledged, and is not stored"
        else:
            assert packet.reason == ReasonCode.QUOTA_EXCEEDED
            assert payload not in self.stored, "it was refused, and is there"

    def cut_off(self) -> None:
        self.sent.clear()  # nobody knows

    # -- what happens

    @rule(count=st.integers(1, 12), level=st.integers(0, 3), qos=st.sampled_from((1, 1, 0, 2)), turn=turns)
    def publish(self, count: int, level: int, qos: int, turn: bool) -> None:
        packets: list[Publish] = []
        ranked = Properties(user_properties=(("priority", str(level)),))
        for _ in range(count):
            self.number += 1
            payload = b"%06d" % self.number * 20  # as large as one that is stored beside its record
            packets.append(Publish("q/a", payload, qos, packet_id=self.number if qos else 0, properties=ranked))
        if self.publisher.wire.reading:
            self.sent |= {packet.packet_id: bytes(packet.payload) for packet in packets if packet.packet_id}
            self.say(self.publisher, *packets)
        self.go_on(turn)

    @rule(which=cars, number=st.integers(0, 5), refuse=st.sampled_from((False, False, True)), count=st.integers(1, 6))
    def answer(self, which: int, number: int, refuse: bool, count: int) -> None:
        """Some of what is in flight, in any order."""
        car = self.cars[which]
        self.go_on()
        for _ in range(count):
            if car.may_speak and car.flying:
                car.answer(number, refuse=refuse)
        self.go_on()

    @rule(
        what=st.sampled_from(("resume", "clean", "passing", "goodbye", "cut", "subscribe", "subscribe", "unsubscribe")),
        which=cars,
        turn=turns,
    )
    def come_and_go(self, what: str, which: int, turn: bool) -> None:
        """Connecting while it is connected takes its own connection over."""
        self.go_on()
        car = self.cars[which]
        if what in ("resume", "clean", "passing"):
            car.connect(clean=what != "resume", lasting=what != "passing")
        elif what in ("goodbye", "cut"):
            self.see_off(car, goodbye=what == "goodbye")
        elif car.may_speak and what == "subscribe":
            car.subscribe()
        elif car.may_speak:
            car.unsubscribe()
        self.go_on(turn)

    @rule(seconds=st.sampled_from((0.06, 0.6, 1.1, 5.1, TIMEOUT + 1)))
    def wait(self, seconds: float) -> None:
        """Workers that hold something keep silent."""
        self.go_on()
        self.node.clock.now += seconds
        self.go_on()

    # -- the store, and the process

    @rule(writes=st.sampled_from((False, True)), reads=st.sampled_from((False, False, True)))
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
        """A write is refused; or it was done, or was not, and the answer does not tell."""
        self.fail_write(outcome)
        self.go_on(turn)

    @rule(
        outcome=st.sampled_from(OUTCOMES),
        count=st.integers(1, 3),
        level=st.integers(0, 3),
        qos=st.integers(0, 2),
        held=st.booleans(),
    )
    def publish_and_fail(self, outcome: str, count: int, level: int, qos: int, held: bool) -> None:
        """An append fails; the store works again, or does nothing for now."""
        self.fail_next(outcome, lambda: self.publish(count=count, level=level, qos=qos, turn=True))
        self.hold(writes=held, reads=False)

    @rule(written=st.integers(0, 5))
    def kill(self, written: int) -> None:
        """The process is gone; so many of its writes are done."""
        self.go_on()
        self.die(written)
        self.holding.clear()
        self.tries.clear()
        self.start_again()
        for car in self.cars:
            self._join(car)

    # -- what must be true in the end

    def come_to_rest(self) -> None:
        """One worker does the rest."""
        self.hold_nothing()
        last, *others = self.cars
        for car in others:
            self.see_off(car, goodbye=True)
        self.wait(TIMEOUT + 1)
        if not last.may_speak:
            last.connect(clean=True, lasting=True)
            self.go_on()
        last.subscribe()
        for _ in range(4):
            self.wait(TIMEOUT + 1)
            while last.flying:
                last.answer(0, refuse=False)
                self.go_on()

    def judge(self) -> None:
        left = self.stored - self.done.keys() - self.dead
        assert not left and not self.there, f"nobody has got {sorted(left)}"
        assert not self.sent
        super().judge()


Machine.TestCase.settings = often(examples=80, steps=40)
TestQueue: Any = Machine.TestCase
