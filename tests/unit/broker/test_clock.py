"""Steps of the system's clock: lives of sessions, wills and messages go on evenly, and are never told longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from motorcade.broker import broker
from motorcade.broker.frames import frame_of
from motorcade.clock import CLOCK, SLEW, Clock
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.mqtt.packets import Connack, Connect, Packet, Puback, Publish, Will
from motorcade.mqtt.properties import NONE, Properties
from motorcade.storage.memory import MemoryStore
from tests.support.cases import each
from tests.support.virtual import START, MemoryNode, Peer

HOUR = 3600.0
STEPS = (HOUR, -HOUR, 400 * 24 * HOUR, -400 * 24 * HOUR)


class Watch:
    """The two clocks of a machine."""

    def __init__(self) -> None:
        self.wall = START
        self.even = 5000.0
        self.suspended = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.even, lambda: self.suspended)

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.even += seconds


# -- the clock


def test_the_nodes_clock_never_steps_and_draws_near() -> None:
    for step in STEPS:
        watch = Watch()
        clock = watch.clock()
        watch.pass_time(10)
        assert 0.0 == clock.check()
        watch.wall += step
        assert pytest.approx(START + 10) == clock.time(), "before anybody has looked"
        watch.pass_time(0.25)
        assert pytest.approx(step) == clock.check()
        assert 1 == clock.steps
        last = clock.time()
        for _ in range(400):
            watch.pass_time(0.25)
            assert 0.0 == clock.check(), "once"
            moved, last = clock.time() - last, clock.time()
            assert 0.25 * (1 - SLEW) - 1e-3 <= moved <= 0.25 * (1 + SLEW) + 1e-3
        assert abs(clock.offset) == pytest.approx(abs(step) - 100.25 * SLEW, abs=0.01)
        assert watch.wall == pytest.approx(clock.time() + clock.offset)


def test_a_step_that_was_taken_back_and_drift_leave_nothing() -> None:
    watch = Watch()
    clock = watch.clock()
    watch.wall += HOUR
    clock.check()
    watch.wall -= HOUR
    clock.check()
    for _ in range(4000):  # NTP slews the clock by 500 ppm
        watch.pass_time(0.25)
        watch.wall += 0.25 * 0.0005
        assert 0.0 == clock.check()
    assert 2 == clock.steps
    assert abs(watch.wall - clock.time()) < 0.01


def test_a_thread_that_had_to_wait_between_the_two_clocks_is_no_step() -> None:
    watch = Watch()

    def slow() -> float:
        watch.pass_time(3)
        return watch.wall

    clock = watch.clock()
    clock.wall = slow
    assert 0.0 == clock.check() and 0 == clock.steps


def test_a_thread_that_had_to_wait_while_it_asked_was_not_suspended() -> None:
    watch = Watch()
    clock = watch.clock()
    watch.suspended -= 3  # the second of its two clocks was read late
    assert 0.0 == clock.check()
    watch.suspended += 3
    assert 0.0 == clock.check() and 0 == clock.steps
    assert pytest.approx(START) == clock.time()


def test_time_that_the_machine_was_suspended_counts_and_is_no_step() -> None:
    watch = Watch()
    clock = watch.clock()
    watch.wall += HOUR
    watch.suspended += HOUR
    assert 0.0 == clock.check() and 0 == clock.steps
    assert pytest.approx(START + HOUR) == clock.time()


# -- the node


class World:
    """A node whose modules read the process's clock, which reads these two."""

    def __init__(self, watch: Watch, store: MemoryStore | None = None) -> None:
        self.watch = watch
        self.node = MemoryNode(store=store)
        self.node.broker.clock = CLOCK

    def pass_time(self, seconds: float) -> None:
        """As the broker does: a look at what is due four times a second, here once per part."""
        for _ in range(4):
            self.watch.pass_time(seconds / 4)
            self.node.clock.now += seconds / 4
            self.tick()

    def tick(self) -> None:
        self.node.loop.call_soon(self.node.broker._work)
        self.node.turn()

    def step(self, seconds: float) -> None:
        self.watch.wall += seconds

    def back(self, client_id: str, properties: Properties = NONE) -> tuple[Peer, Connack, list[Packet]]:
        peer = self.node.peer()
        peer.send(Connect(client_id, 5, clean_start=False, properties=properties))
        self.node.turn()
        first, *rest = peer.take()
        assert isinstance(first, Connack)
        return peer, first, rest


def watched(patch: pytest.MonkeyPatch) -> Watch:
    """Let the process's clock read these two."""
    watch = Watch()
    fresh = watch.clock()
    for name in Clock.__slots__:
        patch.setattr(CLOCK, name, getattr(fresh, name))
    return watch


@contextmanager
def made(stored: bool) -> Iterator[World]:
    """A node with a clock of its own, with or without a store."""
    with pytest.MonkeyPatch.context() as patch:
        watch = watched(patch)
        store = MemoryStore() if stored else None
        if store is not None:
            store.gate.is_open = True
        yield World(watch, store)


@each(stored=(False, True), step=STEPS)
def test_a_session_lives_as_long_as_it_was_told(stored: bool, step: float) -> None:
    """Neither at once when the clock jumps forward, nor hours longer when it is set back."""
    with made(stored) as world:
        for client_id in ("early", "late"):
            world.node.client(client_id, properties=Properties(session_expiry=100)).close()
        world.node.turn()
        world.pass_time(40)
        world.step(step)
        world.pass_time(40)
        _, connack, _ = world.back("early", Properties(session_expiry=100))
        assert connack.session_present
        world.pass_time(25)
        assert "late" not in world.node.state.registry.sessions
        assert 1 == world.node.state.stats.expired_sessions


@each(stored=(False, True), step=STEPS)
def test_a_will_goes_out_after_its_delay(stored: bool, step: float) -> None:
    with made(stored) as world:
        watcher = world.node.client("watcher")
        world.node.subscribe(watcher, ("w", 0))
        will = Will("w", b"gone", properties=Properties(will_delay=100))
        peer = world.node.peer()
        peer.send(Connect("car", 5, properties=Properties(session_expiry=1000), will=will))
        world.node.turn()
        peer.close()
        world.node.turn()
        world.step(step)
        world.pass_time(90)
        assert [] == watcher.take()
        world.pass_time(15)
        assert [b"gone"] == [packet.payload for packet in watcher.take() if isinstance(packet, Publish)]


@each(stored=(False, True), step=STEPS)
def test_a_message_that_waits_expires_in_its_own_time(stored: bool, step: float) -> None:
    """And is told what is left of its life, never more than it came with. [MQTT-3.3.2-5], [MQTT-3.3.2-6]"""
    with made(stored) as world:
        lasting = Properties(session_expiry=1000)
        for client_id in ("soon", "late"):
            car = world.node.client(client_id, properties=lasting)
            world.node.subscribe(car, ("t", 1))
            car.close()
        world.node.turn()
        publisher = world.node.client("p")
        publisher.send(Publish("t", b"m", 1, packet_id=1, properties=Properties(message_expiry=100)))
        world.node.turn()
        assert isinstance(publisher.take()[0], Puback)
        world.pass_time(20)
        world.step(step)
        peer, _, packets = world.back("soon", lasting)
        (found,) = [packet for packet in packets if isinstance(packet, Publish)]
        assert 80 == found.properties.message_expiry, "before anybody has noticed the step"
        world.pass_time(40)
        peer.close()
        world.node.turn()
        _, _, packets = world.back("soon", lasting)
        (found,) = [packet for packet in packets if isinstance(packet, Publish)]
        assert 40 == found.properties.message_expiry or found.dup
        world.pass_time(45)
        _, _, packets = world.back("late", lasting)
        assert not [packet for packet in packets if isinstance(packet, Publish)]


@each(stored=(False, True))
def test_a_step_is_logged_and_counted_once(stored: bool) -> None:
    with made(stored) as world:
        world.pass_time(1)
        world.step(-HOUR)
        with patch.object(broker, "log") as log:
            world.pass_time(2)
        (line,) = log.warning.mock_calls
        assert ("clock_stepped",) == line.args and -HOUR == line.kwargs["seconds"]
        figures = world.node.broker.statistics()
        assert 1 == figures["clock_steps"] and -HOUR == pytest.approx(figures["clock_offset"], abs=0.1)
        assert world.node.broker.now() == pytest.approx(START + 3, abs=0.1), "plugins count intervals by this"
        assert world.node.broker.wall() == pytest.approx(START + 3 - HOUR), "and the ends of tokens by this"


# -- across a restart there is only the system's clock


def test_a_clock_that_was_set_back_before_a_restart_makes_no_life_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched(monkeypatch)
    store = MemoryStore()
    store.gate.is_open = True
    world = World(watch, store)
    lasting = Properties(session_expiry=100)
    car = world.node.client("car", properties=lasting)
    world.node.subscribe(car, ("t", 1))
    car.close()
    world.node.turn()
    publisher = world.node.client("p")
    publisher.send(Publish("t", b"m", 1, packet_id=1, properties=Properties(message_expiry=60)))
    world.node.turn()
    watch.wall -= HOUR
    fresh = watch.clock()
    for name in Clock.__slots__:
        setattr(CLOCK, name, getattr(fresh, name))
    world.node = world.node.restart()
    world.node.broker.clock = CLOCK
    session = world.node.state.registry.sessions["car"]
    assert session.expires_at is not None and session.expires_at <= watch.wall + 100
    _, _, packets = world.back("car", lasting)
    (found,) = [packet for packet in packets if isinstance(packet, Publish)]
    assert 60 == found.properties.message_expiry


def test_no_frame_tells_more_than_a_message_came_with() -> None:
    message = Message("t", b"", timestamp=START, expires_at=START + 10, publisher=ClientInfo("p").client_id)
    for now, left in ((START, 10), (START + 4, 6), (START + 99, 0), (START - HOUR, 10), (0.0, 10)):
        frame = frame_of(message, 5, 1, now)
        assert b"\x02" + left.to_bytes(4, "big") in frame[1]
    endless = Message("t", b"", expires_at=1e15)
    assert b"\x02\xff\xff\xff\xff" in frame_of(endless, 5, 1, START)[1]
