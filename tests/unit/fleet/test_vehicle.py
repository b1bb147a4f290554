"""What a vehicle says and records, judged by a broker that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motorcade.fleet import Behaviour, Fleet, FleetError, FleetOptions, Leave, Vehicle, VehicleState, digest_of
from motorcade.fleet.profile import profile_of
from tests.support import wire
from tests.support.checks import both_versions
from tests.unit.fleet.script import Broker, Peer, scripted

SESSION_TAKEN_OVER = 0x8E
SERVER_KEEP_ALIVE, REASON_STRING, USER_PROPERTY = 0x13, 0x1F, 0x26


class Scene:
    """One vehicle and the broker it talks to."""

    def __init__(self, broker: Broker, fleet: Fleet, peer: Peer) -> None:
        self.broker = broker
        self.fleet = fleet
        self.peer = peer
        self.vehicle: Vehicle = next(iter(fleet))
        self.online: wire.Packet

    def topic(self, request: str) -> str:
        return f"agent/{self.vehicle.vin}/proxy/request/{request}"

    async def come_again(self, *, clean: bool = False) -> tuple[Peer, asyncio.Task[None]]:
        """The vehicle goes and comes; its new connection, on which nothing was said, and what waits for its end."""
        await self.vehicle.disconnect()
        coming = asyncio.create_task(self.vehicle.connect(clean=clean))
        return await self.broker.peer(), coming

    async def until(self, condition: Any, what: str) -> None:
        await self.fleet.wait_until(condition, what)


@contextlib.asynccontextmanager
async def scene(behaviour: Behaviour | None = None, version: int = 5, **options: Any) -> AsyncIterator[Scene]:
    """A vehicle that has just come online."""
    profile = profile_of(behaviour or Behaviour(heartbeat=0))
    async with scripted(version) as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=1, version=version, profile=profile, **options))
        starting = asyncio.create_task(fleet.start())
        try:
            peer = await broker.peer()
            made = Scene(broker, fleet, peer)
            made.online = await peer.welcome()
            await starting
            yield made
        finally:
            starting.cancel()
            await fleet.stop(Leave.RESET)


# --- what it says -------------------------------------------------------------------------------------------------


@both_versions
async def test_it_introduces_itself_by_its_vin_with_a_session_that_is_kept(version: int) -> None:
    behaviour = Behaviour(heartbeat=0, keep_alive=77, session_expiry=1000)
    async with scene(behaviour, version, username="car-{VIN}", password="secret-{VIN}") as s:
        vin = s.vehicle.vin
        wanted = wire.connect_packet(
            vin,
            version=version,
            clean=False,
            keepalive=77,
            username=f"car-{vin}",
            password=f"secret-{vin}".encode(),
            properties=wire.prop(0x11, 1000) if version == 5 else b"",
        )
        assert wanted == s.peer.connect
        filter_ = f"agent/{vin}/proxy/request/+"
        assert wire.subscribe_packet(1, [(filter_, 1)], version=version) == s.peer.subscribe
        assert (f"ecp/{vin}/online", 0) == (s.online.topic, s.online.qos)
        assert s.vehicle.is_online
        assert 1 == s.fleet.figures().total.online


async def test_it_beats() -> None:
    async with scene(Behaviour(heartbeat=0.01)) as s:
        for _ in range(3):
            assert f"ecp/{s.vehicle.vin}/heartbeat" == (await s.peer.next(wire.PUBLISH)).topic
        s.fleet.behave(Behaviour(heartbeat=0))
        assert s.vehicle.heartbeat()  # and when it is told to


async def test_it_asks_a_quiet_broker_and_gives_it_up() -> None:
    """The broker's own keep alive counts; PINGREQ comes when nothing was heard, and no answer is the end."""
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=1, profile=profile_of(Behaviour(heartbeat=0.1))))
        starting = asyncio.create_task(fleet.start())
        peer = await broker.peer()
        await peer.introduced()
        peer.connack(properties=wire.prop(SERVER_KEEP_ALIVE, 1))
        await peer.subscribed()
        await starting
        try:
            for _ in range(2):
                while (raw := await peer.raw())[0] >> 4 == wire.PUBLISH:
                    pass
                assert wire.PINGREQ == raw
                peer.send(b"\xd0\0")
            await fleet.wait_until(lambda: fleet.figures().total.lost == 1, "it has given up")
            assert "did not answer PINGREQ within 1 s" in next(iter(fleet)).trouble
        finally:
            await fleet.stop(Leave.RESET)


# --- what it records ----------------------------------------------------------------------------------------------


@both_versions
async def test_a_message_is_recorded_and_acknowledged(version: int) -> None:
    async with scene(version=version) as s:
        before = time.time()
        s.peer.deliver(s.topic("ota_1"), b"payload", 41, dup=True)
        ack = await s.peer.next(wire.PUBACK)
        assert (41, 0 if version == 5 else None) == (ack.packet_id, ack.reason)
        await s.until(lambda: s.fleet.figures().total.acked == 1, "it is acknowledged")
        (record,) = s.vehicle.received
        assert ("ota_1", digest_of(b"payload"), 7, 1, True, 41, 1) == (
            record.request_id,
            record.digest,
            record.size,
            record.qos,
            record.dup,
            record.packet_id,
            record.connection,
        )
        assert (0, False, 0, True) == (record.waiting, record.repeated, record.reason, record.acked)
        assert record.answered is not None
        assert before <= record.time <= record.answered <= time.time()
        assert [] == s.vehicle.unanswered
        total = s.fleet.figures().total
        assert (1, 7, 1, 1, 0, 0) == (total.received, total.bytes, total.acked, total.dup, total.repeated, total.strays)


async def test_qos_0_is_recorded_and_not_answered() -> None:
    async with scene(qos=0) as s:
        assert s.peer.subscribe is not None
        assert 0 == s.peer.subscribe[-1]
        s.peer.deliver(s.topic("a"), b"x", 0, qos=0)
        await s.until(lambda: len(s.vehicle.received) == 1, "it came")
        s.vehicle.park(Leave.GOODBYE)
        assert wire.disconnect_packet() == await s.peer.closed()  # and nothing before it
        first = s.vehicle.received[0]
        assert ("a", 0, 0, None) == (first.request_id, first.qos, first.packet_id, first.reason)


async def test_a_qos_that_was_not_asked_for_is_a_breach() -> None:
    async with scene() as s:
        s.peer.send(wire.publish_packet(s.topic("a"), b"x", qos=2, packet_id=1))
        assert b"" == await s.peer.closed()
        await s.until(lambda: s.fleet.figures().total.broken == 1, "it is noticed")
        assert [] == s.vehicle.received
        assert "QoS 2 was not asked for" in s.vehicle.trouble


async def test_a_message_cut_at_every_byte_is_the_same_message() -> None:
    """Also a large one, which crosses many reads."""
    large = bytes(range(256)) * 4000
    async with scene() as s:
        s.peer.deliver(s.topic("large"), large, 100)
        await s.peer.next(wire.PUBACK)
        record = s.vehicle.received.pop()
        assert (digest_of(large), len(large)) == (record.digest, record.size)
        for number, cut in enumerate((1, 2, 3, 20, 50), start=1):
            raw = s.peer.publish(s.topic("cut"), b"p" * 300, number)
            s.peer.send(raw[:cut])
            await s.peer.writer.drain()
            s.vehicle.heartbeat()  # a round trip, so that the pieces come apart
            await s.peer.next(wire.PUBLISH)
            s.peer.send(raw[cut:])
            assert number == (await s.peer.next(wire.PUBACK)).packet_id
        assert {(digest_of(b"p" * 300), 300)} == {(record.digest, record.size) for record in s.vehicle.received}
        assert 4 == s.fleet.figures().total.repeated


async def test_what_is_told_of_messages_that_come_together_again_or_astray() -> None:
    """Two in one write overlap: the second was sent before the broker can have had the answer to the first."""
    async with scene() as s:
        s.peer.send(s.peer.publish(s.topic("a"), b"x", 1), s.peer.publish(s.topic("b"), b"y", 2))
        assert [1, 2] == [(await s.peer.next(wire.PUBACK)).packet_id for _ in range(2)]
        properties = wire.prop(USER_PROPERTY, ("delivery-id", "7"))
        for number, (topic, payload, told) in enumerate(
            (
                (s.topic("a"), b"x", b""),
                (s.topic("a"), b"y", properties),
                (s.topic("c"), b"x", b""),
                ("agent/SOMEBODYELSE/proxy/request/a", b"x", b""),
            ),
            start=3,
        ):
            s.peer.send(wire.publish_packet(topic, payload, qos=1, packet_id=number, properties=told))
            await s.peer.next(wire.PUBACK)
        assert [0, 1, 0, 0, 0, 0] == [record.waiting for record in s.vehicle.received]
        assert [2] == [at for at, record in enumerate(s.vehicle.received) if record.repeated], "not another payload"
        assert (("delivery-id", "7"),) == s.vehicle.received[3].user_properties
        assert "agent/SOMEBODYELSE/proxy/request/a" == s.vehicle.received[-1].request_id
        total = s.fleet.figures().total
        assert (1, 1, 1) == (total.overlapped, total.repeated, total.strays)


async def test_what_was_not_acknowledged_may_come_again_but_not_by_a_packet_id_in_use() -> None:
    async with scene(Behaviour(heartbeat=0, ignore=1)) as s:
        for number in (1, 2, 2):
            s.peer.deliver(s.topic("a"), b"x", number)
        await s.until(lambda: len(s.vehicle.received) == 3, "all came")
        assert [(0, False), (1, False)] == [(record.waiting, record.repeated) for record in s.vehicle.received[:2]]
        total = s.fleet.figures().total
        assert (3, 0, 0, 1) == (total.ignored, total.acked, total.repeated, total.broken)


async def test_memory_of_messages_is_bounded_and_what_is_dropped_is_counted() -> None:
    async with scene(max_received=10) as s:
        for number in range(1, 31):
            s.peer.deliver(s.topic(f"r{number}"), b"x", number)
            await s.peer.next(wire.PUBACK)
        total = s.fleet.figures().total
        assert 30 == total.received == total.forgotten + len(s.vehicle.received)
        assert 5 <= len(s.vehicle.received) <= 10
        assert "r30" == s.vehicle.received[-1].request_id


# --- how it answers -----------------------------------------------------------------------------------------------


async def test_a_refusal_has_its_reason_until_it_behaves_otherwise() -> None:
    async with scene(Behaviour(heartbeat=0, refuse=1, reason=0x97)) as s:
        s.peer.deliver(s.topic("a"), b"x", 3)
        ack = await s.peer.next(wire.PUBACK)
        assert (3, 0x97) == (ack.packet_id, ack.reason)
        await s.until(lambda: s.fleet.figures().total.refused == 1, "it is refused")
        record = s.vehicle.received[0]
        assert (0x97, False) == (record.reason, record.acked)
        assert record.answered is not None
        s.vehicle.behave(Behaviour(heartbeat=0))
        s.peer.deliver(s.topic("b"), b"x", 4)
        assert 0 == (await s.peer.next(wire.PUBACK)).reason


async def test_mqtt_3_refuses_by_hanging_up_and_comes_back() -> None:
    async with scene(Behaviour(heartbeat=0, refuse=1), version=4) as s:
        s.peer.deliver(s.topic("a"), b"x", 3)
        assert b"" == await s.peer.closed()
        assert (1, None) == (s.fleet.figures().total.refused, s.vehicle.received[0].reason)
        again = await s.broker.peer()
        await again.introduced()
        assert s.peer.connect == again.connect
        assert (0, {}) == (s.fleet.figures().total.lost, s.fleet.figures().troubles)


async def test_a_late_answer_comes_late_and_not_after_the_end() -> None:
    async with scene(Behaviour(heartbeat=0, answer=(0.05, 0.05))) as s:
        s.peer.deliver(s.topic("a"), b"x", 1)
        await s.until(lambda: len(s.vehicle.received) == 1, "it came")
        assert ["a"] == [record.request_id for record in s.vehicle.unanswered]
        await s.peer.next(wire.PUBACK)
        record = s.vehicle.received[0]
        await s.until(lambda: record.answered is not None, "it is answered")
        s.peer.deliver(s.topic("b"), b"x", 2)
        await s.until(lambda: len(s.vehicle.received) == 2, "the second came")
        due = s.fleet.now() + 0.06
        s.vehicle.park(Leave.RESET)
        assert b"" == await s.peer.closed()
        await s.until(lambda: s.fleet.now() > due, "its answer would be due")
        assert (None, None) == (s.vehicle.received[1].answered, s.vehicle.received[1].reason)
        assert 1 == s.fleet.figures().total.acked


async def test_a_test_answers_by_itself_and_once() -> None:
    async with scene(Behaviour(heartbeat=0, ignore=1)) as s:
        for number in (1, 2):
            s.peer.deliver(s.topic(f"r{number}"), b"x", number)
        await s.until(lambda: len(s.vehicle.received) == 2, "both came")
        first, second = s.vehicle.received
        assert s.vehicle.answer(second)
        assert s.vehicle.answer(first, 0x80)
        assert [(2, 0), (1, 0x80)] == [(a.packet_id, a.reason) for a in [await s.peer.next(wire.PUBACK) for _ in "12"]]
        assert not s.vehicle.answer(first)
        assert (True, False) == (second.acked, first.acked)


# --- going and coming ---------------------------------------------------------------------------------------------


async def test_goodbye_is_said_and_a_reset_says_nothing() -> None:
    for leave, said in ((Leave.GOODBYE, wire.disconnect_packet()), (Leave.RESET, b"")):
        async with scene() as s:
            s.vehicle.park(leave)
            assert said == await s.peer.closed()
            total = s.fleet.figures().total
            assert (VehicleState.PARKED, 0, 0) == (s.vehicle.state, total.online, total.lost)
            with pytest.raises(FleetError, match="is parked"):
                await s.vehicle.take_over()


async def test_who_falls_silent_keeps_the_connection_and_reads_nothing() -> None:
    """The broker cannot know. Out of the tunnel the vehicle comes by a new connection, and drops the old one then."""
    async with scene() as s:
        s.vehicle.park(Leave.SILENCE)
        s.peer.deliver(s.topic("a"), b"x", 1)
        await s.peer.writer.drain()
        coming = asyncio.create_task(s.vehicle.connect())
        again = await s.broker.peer()
        await again.introduced()
        assert not s.peer.reader.at_eof()
        again.connack(session_present=True)
        await coming
        assert b"" == await s.peer.closed()
        assert [] == s.vehicle.received
        assert (2, 1) == (s.fleet.figures().total.connects, s.fleet.figures().total.resumed)


@both_versions
async def test_a_kept_session_needs_no_subscription(version: int) -> None:
    async with scene(version=version) as s:
        again, coming = await s.come_again()
        await again.introduced()
        again.connack(session_present=True)
        assert "online" in (await again.next(wire.PUBLISH)).topic
        await coming
        assert (True, 2) == (s.vehicle.session_present, s.vehicle.connections)


async def test_a_session_that_is_gone_or_not_wanted_is_subscribed_anew() -> None:
    async with scene() as s:
        again, coming = await s.come_again()
        await again.welcome()
        await coming
        assert s.peer.subscribe == again.subscribe
        s.vehicle.behave(Behaviour(heartbeat=0, resubscribe=True))
        third, coming = await s.come_again()
        await third.introduced()
        third.connack(session_present=True)
        await third.subscribed()
        await coming


async def test_a_new_session_is_begun_when_told() -> None:
    async with scene() as s:
        again, coming = await s.come_again(clean=True)
        await again.welcome()
        await coming
        kept = bytearray(s.peer.connect)
        kept[9] |= 2  # clean start
        assert bytes(kept) == again.connect


async def test_a_second_connection_takes_over_and_both_are_recorded() -> None:
    async with scene() as s:
        taking = asyncio.create_task(s.vehicle.take_over())
        second = await s.broker.peer()
        await second.introduced()
        s.peer.deliver(s.topic("old"), b"x", 1)
        assert 1 == (await s.peer.next(wire.PUBACK)).packet_id
        second.connack(session_present=True)
        await second.next(wire.PUBLISH)
        old = await taking
        s.peer.deliver(s.topic("late"), b"x", 2)
        assert 2 == (await s.peer.next(wire.PUBACK)).packet_id
        second.deliver(s.topic("new"), b"x", 1)
        await second.next(wire.PUBACK)
        s.peer.send(wire.disconnect_packet(reason=SESSION_TAKEN_OVER))
        s.peer.hang_up()
        await s.until(lambda: old not in s.fleet.links, "the old connection is closed")
        assert [("old", 1), ("late", 1), ("new", 2)] == [(r.request_id, r.connection) for r in s.vehicle.received]
        total = s.fleet.figures().total
        assert (True, 2, 0, 1) == (s.vehicle.is_online, total.connects, total.lost, total.online)


async def test_a_lost_connection_is_told_and_tried_again() -> None:
    async with scene() as s:
        told = wire.prop(REASON_STRING, "go home")
        s.peer.send(wire.disconnect_packet(reason=0x98, properties=told))
        s.peer.hang_up()
        again = await s.broker.peer()
        await again.welcome()
        await s.until(lambda: s.vehicle.is_online, "it is back")
        figures = s.fleet.figures()
        assert 1 == figures.total.lost
        assert {"the broker disconnected it: administrative action (0x98): go home": 1} == figures.troubles


async def test_a_broker_that_breaks_the_rules_is_left() -> None:
    async with scene() as s:
        s.peer.send(b"\xf0\x80\x80\x80\x80\x01")
        assert b"" == await s.peer.closed()
        await s.until(lambda: s.fleet.figures().total.lost == 1, "it has left")
        assert 1 == s.fleet.figures().total.broken
        assert "broke the rules" in s.vehicle.trouble


async def test_a_day_is_lived_by_itself() -> None:
    """Awake, asleep, and back without being told; leaving is not losing."""
    async with scene(Behaviour(heartbeat=0, awake=(0.02, 0.02), asleep=(0.02, 0.02))) as s:
        assert wire.disconnect_packet() == await s.peer.closed()
        again = await s.broker.peer()
        await again.introduced()
        again.connack(session_present=True)
        await s.until(lambda: s.vehicle.arrivals == 2, "it is back")
        assert (0, {}) == (s.fleet.figures().total.lost, s.fleet.figures().troubles)
