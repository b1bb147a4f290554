"""Readers under everything that can happen to them, beside a list of records: no loss, no double, order kept.

A publisher and a plugin that appends past the service; three clients that read, with windows of their own, acknowledge
in any order, refuse, leave with and without a word, come back to their session or without one, take their own
connection over, subscribe again with a position or without, unsubscribe; operators that trim, delete and make again; a
store that is slow, refuses, or does not say what it has done; a process that ends or is killed. At all times:

    who hears that a message is taken finds it stored; who hears that it is not does not
    a record comes as it was appended, after those before it; again only as a repetition of what was in flight,
        after a process that was killed, or because its reader wants it
    a source never gives more than there is room for
    progress never passes a record that is there and was not acknowledged

And in the end, when the store works and clients answer: everybody has got everything from where it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from motorcade.broker.limits import SessionOptions
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import decode, encode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Answer
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
from motorcade.plugins.logs.streams import pages, stream
from motorcade.plugins.logs.streams.options import StreamOptions
from motorcade.plugins.logs.streams.plugin import StreamsPlugin
from motorcade.plugins.logs.streams.position import OFFSET
from motorcade.plugins.logs.streams.reader import COLLECTION, StreamSource, key_of
from motorcade.plugins.logs.streams.service import StreamService
from motorcade.storage.ports import Batch
from tests.support.held_store import HeldStore
from tests.unit.broker.world import ALL, OUTCOMES, STEP, Guest, PluginWorld, often

READERS = 3
FILTER = "$stream/s"
SESSION = 100_000  #: seconds that sessions outlive connections


@dataclass(eq=False)
class Flying:
    """A packet that a reader has not answered."""

    offset: int
    epoch: int  #: of the reader, when it came first


class Car(Guest):
    """A reader."""

    def __init__(self, world: Machine, name: str, window: int) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.window = window
        self.lasting = True
        self.reads = False  #: it is subscribed
        self.epoch = 0  #: one more with each beginning
        self.begin = 1  #: offset from which on it must get everything
        self.last = 0  #: highest offset that came since it began, or since the process did
        self.floor = 0  #: nothing up to here comes again
        self.again = False  #: what is beyond may: a process has ended since it began
        self.done: set[int] = set()  #: acknowledged since it began
        self.back = True  #: stored progress may still be that of an earlier beginning
        self.flying: dict[int, Flying] = {}  #: by packet id; lasts as long as the session

    def begins(self, begin: int) -> None:
        """With a position."""
        self.epoch += 1
        self.begin = begin
        self.last = self.floor = 0
        self.again = False
        self.done.clear()

    def connect(self, *, clean: bool, lasting: bool) -> None:
        if self.peer is not None:
            self.read()
            self.lost()
        self.lasting = lasting
        properties = Properties(session_expiry=SESSION if lasting else None, receive_maximum=self.window)
        self.peer = self.world.node.peer(5)
        self.world.say(self.peer, Connect(self.name, 5, clean, properties=properties))

    def lost(self) -> None:
        super().lost()
        if not self.lasting:
            self.over()

    def over(self) -> None:
        """Its session is no more."""
        self.flying.clear()
        self.reads = False

    def subscribe(self, position: str | None = None) -> None:
        assert self.peer is not None
        told = Properties(user_properties=((OFFSET, position),)) if position else Properties()
        self.world.say(self.peer, Subscribe(1, (Subscription(FILTER, 1),), told))

    def unsubscribe(self) -> None:
        assert self.peer is not None
        self.reads = False
        self.world.say(self.peer, Unsubscribe(2, (FILTER,)))

    def heard(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            assert not packet.reason
            self.on = True
            if not packet.session_present:
                self.over()
        elif isinstance(packet, Publish):
            self._message(packet)
        else:
            assert isinstance(packet, Suback | Unsuback), packet
            if isinstance(packet, Suback):
                assert packet.reasons == (1,)

    def leaves_unread(self, packets: list[Packet]) -> None:
        for packet in packets:
            if isinstance(packet, Publish):
                self._message(packet)

    def _message(self, packet: Publish) -> None:
        offset = int(dict(packet.properties.user_properties)[OFFSET])
        where = f"{offset} to {self.name}"
        known = self.flying.get(packet.packet_id)
        if packet.dup:
            assert known is not None and known.offset == offset, f"{where} repeats what was never sent"
            return
        assert known is None, where
        assert self.world.records[offset] == bytes(packet.payload), where
        assert offset > self.last, f"{where} comes after {self.last}"
        assert offset > self.floor, f"{where} was acknowledged, and that was stored"
        assert offset not in self.done or self.again, f"{where} was acknowledged"
        assert offset >= self.begin or self.again, f"{where} was not asked for"
        self.last = offset
        self.flying[packet.packet_id] = Flying(offset, self.epoch)

    def answer(self, which: int, *, refuse: bool) -> None:
        assert self.peer is not None
        packet_id = list(self.flying)[which % len(self.flying)]
        flying = self.flying.pop(packet_id)
        if flying.epoch == self.epoch:
            self.done.add(flying.offset)
        self.world.say(self.peer, Puback(packet_id, ReasonCode.QUOTA_EXCEEDED if refuse else ReasonCode.SUCCESS))


cars = st.integers(0, READERS - 1)
turns = st.sampled_from((True, True, False))


class Machine(PluginWorld[Car]):
    """The world."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, bytes] = {}  #: payloads by offset, of this stream
        self.payloads: set[bytes] = set()  #: that were ever stored
        self.sent: dict[int, bytes] = {}  #: by packet id, until they are answered

    @initialize(
        windows=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12)),
        buffer=st.sampled_from((1, 4, 64)),
        page=st.integers(1, 9),
        cache=st.sampled_from((1, 5000, 1_000_000)),
        interval=st.sampled_from((STEP / 2, 1.0)),
    )
    def start(self, windows: tuple[int, ...], buffer: int, page: int, cache: int, interval: float) -> None:
        for module in (pages, stream):  # short pages, so that few messages make many
            self.stack.enter_context(patch.object(module, "PAGE", page))
        for name in ("info", "delivered_run"):
            self.stack.enter_context(patch.object(StreamSource, name, self._measured(name)))
        self.options = {"cache_bytes": cache, "progress_interval": interval}
        self.store = HeldStore()
        self.store.streams_too = True
        self._note_writes()
        self.set_up(SessionOptions(source_buffer=buffer))
        self.cars = [Car(self, f"car{number}", window) for number, window in enumerate(windows)]
        self.begin()
        self.make()
        for car in self.cars:
            car.connect(clean=False, lasting=True)
            self.go_on()
            self.subscribe(car, "earliest")

    @staticmethod
    def _measured(name: str) -> Any:
        given = getattr(StreamSource, name)

        def measured(source: StreamSource, what: Any, more: Any) -> Answer:
            answer = given(source, what, more)
            room = more if isinstance(more, int) else more.desired
            assert not isinstance(answer, list) or len(answer) <= room, "more than there is room for"
            return answer  # type: ignore[no-any-return]

        return measured

    def _note_writes(self) -> None:
        streams = self.store.inner.streams
        append = streams.apply_append

        def noted(name: str, values: Sequence[bytes], now: float) -> list[int]:
            offsets = append(name, values, now)
            for offset, value in zip(offsets, values, strict=True):
                self.records[offset] = payload = bytes(decode(value).payload)
                self.payloads.add(payload)
            return offsets

        streams.apply_append = noted  # type: ignore[method-assign,assignment]

    def begin(self) -> None:
        self.load("streams", self.options)
        assert isinstance(self.loaded.plugin, StreamsPlugin)
        self.service: StreamService = self.loaded.plugin.streams

    def make(self) -> None:
        self.run(self.service.create("s", StreamOptions(topics=("t/#",), retention=0.0)))

    @property
    def there(self) -> set[int]:
        """Offsets in the store."""
        found = self.store.inner.streams.streams.get("s")
        return {record.offset for record in found.records} if found is not None else set()

    # -- what is true at once

    def answered(self, packet: Puback | Pubrec) -> None:
        payload = self.sent.pop(packet.packet_id)
        if packet.reason < 0x80:
            assert payload in self.payloads, "it was acknowledged, and is not stored"
        else:
            assert packet.reason == ReasonCode.QUOTA_EXCEEDED
            assert payload not in self.payloads, "it was refused, and is there"

    def cut_off(self) -> None:
        self.sent.clear()  # nobody knows

    def check(self) -> None:
        there = self.there
        for car in self.cars:
            stored = self.stored(car)
            if stored is not None and car.begin <= stored:
                left = {offset for offset in there if car.begin <= offset <= stored} - car.done
                assert not left or car.back, f"progress of {car.name} is {stored}, but it has not acknowledged {left}"
            elif stored is not None:
                car.back = False

    def stored(self, car: Car) -> int | None:
        """Progress in the store."""
        value = self.store.records_of(COLLECTION).get(f"s/{car.name}")
        return None if value is None else int(msgspec.msgpack.decode(value)[1])

    def committed(self, car: Car) -> int | None:
        """Where it would go on."""
        found = self.service.progress.peek(key_of("s"), car.name)
        if found is None:
            return self.stored(car)
        found.gather()
        return found.number if found.exists else None

    # -- what is appended

    @rule(count=st.integers(1, 12), qos=st.sampled_from((1, 1, 0, 2)), turn=turns)
    def publish(self, count: int, qos: int, turn: bool) -> None:
        packets: list[Publish] = []
        for _ in range(count):
            self.number += 1
            packets.append(Publish("t/a", b"%d" % self.number, qos, packet_id=self.number if qos else 0))
        if self.publisher.wire.reading:
            self.sent |= {packet.packet_id: bytes(packet.payload) for packet in packets if packet.packet_id}
            self.say(self.publisher, *packets)
        self.go_on(turn)

    @rule(count=st.integers(1, 5), turn=turns)
    def append_past(self, count: int, turn: bool) -> None:
        """As another plugin does it, in a batch of its own, perhaps while appends of the service are under way."""
        batch = Batch()
        payloads = [b"%d" % number for number in range(self.number + 1, self.number + 1 + count)]
        self.number += count
        batch.stream("s", [encode(Message("t/a", payload)) for payload in payloads], self.now)

        async def commit() -> None:
            await self.store.write(batch)

        self.chore(commit())
        self.go_on(turn)

    # -- readers

    @rule(which=cars, number=st.integers(0, 5), refuse=st.sampled_from((False, False, True)), count=st.integers(1, 4))
    def answer(self, which: int, number: int, refuse: bool, count: int) -> None:
        """Some of what is in flight, in any order."""
        car = self.cars[which]
        for _ in range(count):
            if car.may_speak and car.flying:
                car.answer(number, refuse=refuse)
        self.go_on()

    @rule(
        what=st.sampled_from(("resume", "resume", "take over", "goodbye", "cut", "cut")),
        which=cars,
        turn=turns,
    )
    def come_and_go(self, what: str, which: int, turn: bool) -> None:
        car = self.cars[which]
        if what == "take over" or (what == "resume" and car.peer is None):
            self.go_on()
            car.connect(clean=False, lasting=True)
            self.go_on()
            if car.may_speak and not car.reads:
                self.subscribe(car)
        elif what in ("goodbye", "cut"):
            self.see_off(car, goodbye=what == "goodbye")
        self.go_on(turn)

    @rule(which=cars, how=st.sampled_from(("clean", "passing", "unsubscribe")), late=st.integers(0, 4))
    def begin_anew(self, which: int, how: str, late: int) -> None:
        """Lose the session, or unsubscribe, and go on without a position; some of what was in flight is acknowledged
        in between.
        """
        self.rest()
        car = self.cars[which]
        if how == "unsubscribe":
            if not car.may_speak:
                return
            car.unsubscribe()
            self.go_on()
            for _ in range(late):
                if car.flying:
                    car.answer(late, refuse=False)
            self.go_on()
        else:
            car.connect(clean=True, lasting=how == "clean")
            self.go_on()
        self.subscribe(car)

    @rule(which=cars, data=st.data())
    def subscribe_again(self, which: int, data: st.DataObject) -> None:
        """With a position, or without: then nothing changes."""
        self.rest()
        car = self.cars[which]
        if car.may_speak:
            tail = max(self.records, default=0)
            positions = st.sampled_from((None, "earliest", "latest")) | st.integers(1, tail + 3).map(str)
            self.subscribe(car, data.draw(positions))

    def subscribe(self, car: Car, position: str | None = None) -> None:
        """When nothing is under way: what comes after it has come because of it."""
        self.rest()
        if not car.may_speak:
            return
        tail = max(self.records, default=0)
        before, was_reading = self.committed(car), car.reads
        if position is not None:
            car.back = True
            car.begins({"earliest": 1, "latest": tail + 1}.get(position) or int(position))
        elif not was_reading:
            begin = tail + 1 if before is None else before + 1
            missed = {offset for offset in self.there if car.begin <= offset < begin} - car.done
            assert not missed or before is None, f"{car.name} goes on after {begin - 1}, and misses {missed}"
            car.epoch += 1
            car.begin, car.last = max(begin, car.begin) if before is not None else begin, 0
            car.done = {offset for offset in car.done if offset < begin}
        car.reads = True
        car.subscribe(position)
        self.go_on()

    @rule(seconds=st.sampled_from((0.2, 1.1, 11.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.go_on()
        self.node.clock.now += seconds
        self.go_on()

    # -- operators

    @rule(keep=st.integers(1, 10))
    def trim(self, keep: int) -> None:
        self.rest()
        found = self.service.stream("s")
        assert found is not None
        removed = max(0, len(self.there) - keep)
        swept = self.run(self.store.streams.trim("s", records=keep))
        assert removed == swept.removed
        self.run(found.trimmed(swept.removed, swept.size_bytes))
        self.go_on()

    @precondition(lambda self: self.number % 5 == 0)
    @rule()
    def delete_and_make_again(self) -> None:
        self.rest()
        self.run(self.service.delete("s"))
        self.records.clear()
        self.make()
        for car in self.cars:
            car.begins(1)
            car.back = True
        self.rest()

    def rest(self) -> None:
        """Until nothing is under way."""
        self.hold_nothing()
        for _ in range(3):
            self.go_on()
            self.node.clock.now += 1.1
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
        """A write is refused; or it was done, or was not, or will be, and nobody is told."""
        self.fail_write(outcome)
        self.go_on(turn)

    @rule(outcome=st.sampled_from(OUTCOMES), count=st.integers(1, 3), qos=st.integers(0, 2), held=st.booleans())
    def publish_and_fail(self, outcome: str, count: int, qos: int, held: bool) -> None:
        """An append fails; the store works again, or does nothing for now."""
        self.fail_next(outcome, lambda: self.publish(count=count, qos=qos, turn=True))
        self.hold(writes=held, reads=False)

    @rule(written=st.integers(0, 5), orderly=st.booleans())
    def restart(self, written: int, orderly: bool) -> None:
        """The process ends, in good order, or with so many of its writes done."""
        if orderly:
            self.rest()
            with suppress(MotorcadeError):
                self.run(self.plugins.unload_all())
            for car in self.cars:
                assert not self.records or (self.stored(car) or 0) <= max(self.records) + 3
        self.go_on()
        self.die(written)
        for car in self.cars:
            car.flying.clear()  # the session has them no more
            car.last, car.again = 0, True
            car.floor = min(self.stored(car) or 0, max(self.records, default=0))
        self.start_again()
        for car in self.cars:
            car.connect(clean=False, lasting=True)
            self.go_on()
            if car.may_speak and not car.reads:
                self.subscribe(car)

    # -- what must be true in the end

    def come_to_rest(self) -> None:
        self.rest()
        for car in self.cars:
            if not car.may_speak:
                car.connect(clean=False, lasting=True)
                self.go_on()
            if not car.reads:
                self.subscribe(car)
        for _ in range(3):
            self.wait(61.0)
            while any(car.may_speak and car.flying for car in self.cars):
                for car in self.cars:
                    while car.may_speak and car.flying:
                        car.answer(0, refuse=False)
                    self.go_on()

    def judge(self) -> None:
        for car in self.cars:
            missed = {offset for offset in self.there if offset >= car.begin} - car.done
            assert not missed, f"{car.name} has not got {sorted(missed)}"
            committed = self.committed(car)
            assert committed is not None and committed >= max(self.records, default=0), "nothing is left"
        assert 0 == self.service.waiting.messages == self.service.waiting.size_bytes
        assert not self.sent
        super().judge()


Machine.TestCase.settings = often(examples=80, steps=40)
TestStreams: Any = Machine.TestCase
