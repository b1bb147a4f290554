"""Queue and inflight window of one session. Time is an argument; the wire is the list `out`."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motorcade.broker.frames import build, frame_of, message_of, qos_of
from motorcade.broker.limits import SessionOptions
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.broker.stats import Stats
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.extension.hooks import Callback, Hooks, Stop
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Connack, Packet, Publish, Pubrel

NOW = 1_700_000_000.0


class Reader:
    """A window and the client at its other end."""

    def __init__(self, version: int = 4, limit: int = 65535, *, away: bool = False, **options: Any) -> None:
        self.hooks = Hooks()
        self.shared = SessionContext(SessionOptions(**options), self.hooks, Stats())
        self.window = Session(self.shared, ClientInfo("car", version=version), 0.0)
        self.version = version
        if not away:
            self.attach(limit)

    def attach(self, limit: int = 65535, max_packet: int = 0, aliases: int = 0) -> None:
        self.window.attach(self.version, min(limit, self.shared.options.window), max_packet, aliases)
        self.decoder = codec.Decoder(self.version)
        self.window.resend(NOW)
        self.window.pump(NOW)

    def offer(self, payload: bytes, qos: int = 1, topic: str = "t", **more: Any) -> None:
        message = Message(topic, payload, qos, **more)
        self.window.offer(frame_of(message, self.version, qos, NOW))

    def read(self) -> list[Packet]:
        data = b"".join(self.window.out)
        self.window.out.clear()
        self.shared.dirty.clear()
        return self.decoder.feed(data)

    def payloads(self) -> list[bytes]:
        return [packet.payload for packet in self.read() if isinstance(packet, Publish)]

    def acknowledge(self, *numbers: int, now: float = NOW) -> bool:
        for number in numbers:
            del self.window.inflight[number]
        return self.window.pump(now)

    def waiting(self) -> list[bytes]:
        return [message_of(frame, self.version).payload for frame in self.window.queue or ()]

    @property
    def dropped(self) -> dict[str, int]:
        return {why: count for why, count in self.shared.stats.dropped.items() if count}


# --- order and bounds ---------------------------------------------------------------------------------------------


def test_the_window_fills_then_the_queue_and_acknowledgements_empty_both() -> None:
    reader = Reader(window=2, queue=10)
    for number in range(5):
        reader.offer(b"%d" % number)
    packets = reader.read()
    assert [(1, b"0"), (2, b"1")] == [(p.packet_id, p.payload) for p in packets if isinstance(p, Publish)]
    assert [b"2", b"3", b"4"] == reader.waiting()
    reader.acknowledge(2)
    assert [b"2"] == reader.payloads()
    reader.acknowledge(1, 3)
    assert [b"3", b"4"] == reader.payloads()
    assert reader.window.ready
    assert (None, 0, 0) == (reader.window.queue, reader.shared.queued, reader.shared.queued_bytes)


def test_a_full_queue_drops_its_oldest_qos_0_message_first() -> None:
    reader = Reader(window=1, queue=4)
    for payload, qos in ((b"w", 1), (b"1", 1), (b"a0", 0), (b"2", 2), (b"b0", 0)):
        reader.offer(payload, qos)
    reader.offer(b"3", 1)
    assert [b"1", b"2", b"b0", b"3"] == reader.waiting()
    reader.offer(b"c0", 0)
    assert [b"1", b"2", b"3", b"c0"] == reader.waiting()
    reader.offer(b"4", 1)
    assert [b"1", b"2", b"3", b"4"] == reader.waiting()
    reader.offer(b"d0", 0)
    assert [b"1", b"2", b"3", b"4"] == reader.waiting(), "the arriving one is the oldest QoS 0 message then"
    reader.offer(b"5", 2)
    assert [b"2", b"3", b"4", b"5"] == reader.waiting()
    assert {"queue_full": 5} == reader.dropped


def test_without_bounds_nothing_is_dropped() -> None:
    reader = Reader(window=1, queue=0, queue_bytes=0)
    for number in range(3000):
        reader.offer(b"%d" % number)
    assert 2999 == len(reader.waiting())
    assert {} == reader.dropped


def test_who_is_away_keeps_qos_0_only_if_told_to() -> None:
    for store, kept in ((False, [b"1"]), (True, [b"0", b"1"])):
        reader = Reader(away=True, store_qos0=store)
        reader.offer(b"0", 0)
        reader.offer(b"1", 1)
        assert kept == reader.waiting()
        assert ({} if store else {"offline_qos0": 1}) == reader.dropped


def test_a_full_socket_drops_qos_0_and_keeps_the_rest() -> None:
    reader = Reader()
    reader.window.set_writable(False)
    reader.offer(b"0", 0)
    reader.offer(b"1", 1)
    assert [] == reader.payloads()
    assert {"slow_consumer": 1} == reader.dropped
    reader.window.set_writable(True)
    assert not reader.window.ready
    reader.window.pump(NOW)
    assert [b"1"] == reader.payloads()
    assert reader.window.ready


def test_a_message_may_be_taken_back_instead_of_waiting() -> None:
    reader = Reader(window=1)
    taken: list[bytes] = []

    def take(_client: ClientInfo, message: Message, _acc: bool) -> Stop | None:
        if message.payload == b"mine":
            taken.append(message.payload)
            return Stop(True)
        return None

    reader.hooks.add("message.nack", Callback(take, 0, "test"))
    for payload in (b"first", b"mine", b"yours"):
        reader.offer(payload)
    assert ([b"mine"], [b"yours"]) == (taken, reader.waiting())


# --- packet ids ---------------------------------------------------------------------------------------------------


def test_ids_in_flight_are_never_handed_out_again() -> None:
    """Message 1 is never acknowledged while the ids wrap around twice."""
    reader = Reader(window=3)
    reader.offer(b"first")
    for _ in range(70_000):
        reader.offer(b"")
        (number,) = (n for n in reader.window.inflight if n != 1)
        assert 0 < number < 65536
        reader.acknowledge(number)
    assert b"first" == message_of(reader.window.inflight[1], 4).payload


def test_all_ids_can_be_in_flight() -> None:
    reader = Reader(window=100_000, queue=10)
    for _ in range(65_540):
        reader.offer(b"")
    assert (set(range(1, 65_536)), 5) == (set(reader.window.inflight), len(reader.waiting()))
    reader.acknowledge(77)
    assert (65_535, 4) == (len(reader.window.inflight), len(reader.waiting()))


# --- expiry, sizes, aliases ---------------------------------------------------------------------------------------


def test_what_expires_in_the_queue_is_not_sent() -> None:
    """What is sent late tells MQTT 5 clients what is left of its life; what is out already stays out."""
    for version in (4, 5):
        reader = Reader(version, window=1)
        for payload, life in ((b"out", 10.0), (b"short", 10.0), (b"long", 100.0), (b"endless", None)):
            reader.offer(payload, 1, expires_at=None if life is None else NOW + life)
        assert [b"out"] == reader.payloads()
        reader.acknowledge(1, now=NOW + 30)
        (late,) = reader.read()
        assert isinstance(late, Publish)
        assert (b"long", 70 if version == 5 else None) == (late.payload, late.properties.message_expiry)
        assert {"expired": 1} == reader.dropped
        reader.acknowledge(2, now=NOW + 1e6)
        assert [b"endless"] == reader.payloads()


def test_what_is_too_large_for_the_client_is_dropped() -> None:
    """[MQTT-3.1.2-25]: as if it had been sent; the next one is not held up."""
    for waits in (False, True):
        reader = Reader(5, window=1 if waits else 10)
        if waits:
            reader.offer(b"first")
        reader.window.max_packet = 60
        reader.offer(b"x" * 100)
        reader.offer(b"small")
        reader.read()
        if waits:
            reader.acknowledge(1)
            assert [b"small"] == reader.payloads()
        assert 1 == len(reader.window.inflight)
        assert {"too_large": 1} == reader.dropped


@given(st.integers(5, 60), st.integers(0, 60), st.integers(0, 2))
def test_no_packet_is_ever_larger_than_the_client_takes(limit: int, size: int, qos: int) -> None:
    """Also when an alias is introduced, which makes a packet longer. [MQTT-3.1.2-24]."""
    reader = Reader(5, away=True)
    reader.attach(max_packet=limit, aliases=2)
    for topic in ("a", "b", "a", "c", "c"):
        reader.offer(b"x" * size, qos, topic)
        assert sum(map(len, reader.window.out)) <= limit
        reader.window.out.clear()


def test_aliases_are_introduced_once_and_bounded() -> None:
    reader = Reader(5, away=True)
    reader.attach(aliases=2)
    for topic in ("a", "b", "a", "c", "b"):
        reader.offer(b"", 0, topic)
    sent = [(p.topic, p.properties.topic_alias) for p in reader.read() if isinstance(p, Publish)]
    assert [("a", 1), ("b", 2), ("", 1), ("c", None), ("", 2)] == sent
    reader.window.detach()
    reader.attach(aliases=1)
    reader.offer(b"", 0, "b")
    assert [("b", 1)] == [(p.topic, p.properties.topic_alias) for p in reader.read() if isinstance(p, Publish)]


# --- coming back --------------------------------------------------------------------------------------------------


def test_everything_unacknowledged_is_sent_again_in_order_with_its_id() -> None:
    for version in (4, 5):
        reader = Reader(version, window=4)
        for number in range(6):
            reader.offer(b"%d" % number, 1 + number % 2)
        reader.read()
        del reader.window.inflight[1]
        reader.window.inflight[2] = (b"\x00", b"", None)  # PUBREC has come
        reader.window.detach()
        reader.offer(b"6")
        reader.attach()
        packets = reader.read()
        assert [2] == [p.packet_id for p in packets if isinstance(p, Pubrel)]
        again = [(p.packet_id, p.payload, p.dup, p.qos) for p in packets if isinstance(p, Publish)]
        assert [(3, b"2", True, 1), (4, b"3", True, 2), (5, b"4", False, 1)] == again
        reader.acknowledge(3, 4)
        assert [b"5", b"6"] == reader.payloads()


def test_what_has_become_too_large_is_not_sent_again() -> None:
    """And what was written before it on the same connection, the CONNACK, stays."""
    reader = Reader(5)
    for payload in (b"x" * 100, b"small"):
        reader.offer(payload)
    reader.window.detach()
    reader.window.attach(5, 32, 60, 0)
    reader.window.out.append(b"\x20\x03\x01\x00\x00")
    reader.window.resend(NOW)
    connack, small = codec.Decoder(5).feed(b"".join(reader.window.out))
    assert isinstance(connack, Connack)
    assert isinstance(small, Publish) and (b"small", 2, True) == (small.payload, small.packet_id, small.dup)
    assert {"too_large": 1} == reader.dropped


# --- anything may happen ------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Offers, acknowledgements, full sockets and reconnects in any order, against the rules of session.py."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(5, window=3, queue=4, queue_bytes=200)
        self.count = 0
        self.seen: list[int] = []  #: numbers of messages in the order of their first sending
        self.lost: set[int] = set()

        def lost(_client: ClientInfo, message: Message, _why: str) -> None:
            self.lost.add(int(message.payload[:6]))

        self.reader.hooks.add("message.dropped", Callback(lost, 0, "test"))

    def read(self) -> None:
        for packet in self.reader.read():
            if isinstance(packet, Publish) and not packet.dup:
                self.seen.append(int(packet.payload[:6]))

    @rule(qos=st.integers(0, 2), size=st.integers(0, 60))
    def offer(self, qos: int, size: int) -> None:
        self.count += 1
        self.reader.offer(b"%06d" % self.count + b"x" * size, qos)

    @precondition(lambda self: self.reader.window.online)
    @rule(which=st.integers(0, 2))
    def acknowledge(self, which: int) -> None:
        numbers = list(self.reader.window.inflight)
        if numbers:
            self.reader.acknowledge(numbers[which % len(numbers)])

    @precondition(lambda self: self.reader.window.online)
    @rule(writable=st.booleans())
    def socket(self, writable: bool) -> None:
        self.reader.window.set_writable(writable)
        self.reader.window.pump(NOW)

    @rule(limit=st.integers(1, 5))
    def reconnect(self, limit: int) -> None:
        self.read()
        self.reader.window.detach()
        self.reader.attach(limit)

    @rule()
    def leave(self) -> None:
        self.read()
        self.reader.window.detach()

    @invariant()
    def rules_hold(self) -> None:
        self.read()
        window = self.reader.window
        queue = list(window.queue or ())
        assert sorted(self.seen) == self.seen, "order in is order out"
        assert len(set(self.seen)) == len(self.seen)
        assert len(queue) <= 4
        size = sum(len(head) + len(tail) for head, tail, _ in queue)
        assert size <= 200 or len(queue) == 1
        if window.queue is not None:
            assert (size, sum(not qos_of(frame) for frame in queue)) == (window.queue.size, window.queue.qos0)
        assert (self.reader.shared.queued, self.reader.shared.queued_bytes) == (len(queue), size)
        assert len(window.inflight) <= 3
        waiting = [int(payload[:6]) for payload in self.reader.waiting()]
        assert sorted(waiting) == waiting
        assert not set(waiting) & (set(self.seen) | self.lost)
        assert set(range(1, self.count + 1)) == set(self.seen) | set(waiting) | self.lost, "nothing vanishes untold"
        assert window.ready == (window.online and window.writable and not queue and not window.unsent)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_how_long_the_oldest_message_is_held_is_known() -> None:
    shared = SessionContext(SessionOptions(), Hooks(), Stats())
    session = Session(shared, ClientInfo("c", version=5), 0.0)
    assert 0.0 == session.held_for(10.0)
    session.attach(5, 10, 0, 0)
    session.resend(NOW)
    session.pump(0.0)
    for number in range(3):
        session.offer(build(b"t", b"\x00%d" % number, 1, ClientInfo("p")))
    assert [1, 2, 3] == list(session.inflight)
    assert [0.0, 60.0] == [session.held_for(20.0), session.held_for(80.0)]
    session.acknowledged(2)
    assert 70.0 == session.held_for(90.0)
    session.acknowledged(1)
    assert [0.0, 5.0] == [session.held_for(100.0), session.held_for(105.0)], "another is the oldest now"
