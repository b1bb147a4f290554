"""What takes luck to see on a real node, one thing at a time, in the world of the model (`test_model`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import State
from motorcade.mqtt.packets import Puback
from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.dispatcher import Pool
from motorcade.plugins.fanout.record import EntryRecord, encode
from motorcade.plugins.fanout.tables import done_of, owner_of
from motorcade.plugins.fanout.views import WhyView
from motorcade.storage.ports import Draft
from tests.unit.broker.memory import surviving
from tests.unit.fanout.test_model import ACK_TIMEOUT, MAX_ATTEMPTS, VINS, Machine

VIN = VINS[0]


@pytest.fixture
def world() -> Iterator[Machine]:
    """A node, three vehicles that are away, a platform. What the model demands in the end is demanded here, too."""
    machine = Machine()
    machine.start(atomic=True)
    yield machine
    machine.teardown()


def come(world: Machine) -> None:
    world.connect(which=0, clean=False, version=5, lasting=True, limit=None, subscribes=True, turn=True)


def publish(world: Machine, request: str = "r0") -> None:
    world.publish(which=[0], request=request, two=False, mode=None, priority=0, expires=None, turn=True)


def why(world: Machine) -> WhyView:
    view: WhyView = world.run(world.service.why(VIN))
    return view


def test_why_a_message_is_being_looked_for(world: Machine) -> None:
    publish(world)
    world.store.held_reads = True
    come(world)
    (looking,) = world.store.reads  # the dispatcher's; others are answered
    world.store.reads.clear()
    world.store.held_reads = False
    view = why(world)
    assert ("dispatching", 1, "r0") == (view.reason, view.pending, view.request_id)
    world.loop.call_soon(looking.go)
    world.go_on()
    assert "in_flight" == why(world).reason


@pytest.mark.parametrize("online", [True, False])
def test_a_heartbeat_is_trigger_enough(world: Machine, online: bool) -> None:
    """The seed: another node has stored something for a vehicle that is here, and nobody has told this one."""
    come(world)
    entry = EntryRecord(b"another batch...", "r1", world.now)
    world.run(world.store.inner.mailboxes.append([owner_of(VIN)], Draft(encode(entry), b"task"), world.now))
    world.pass_time(100.0)
    assert not world.cars[0].flying
    world.heartbeat(which=0, online=online, turn=True)
    (flying,) = world.cars[0].flying.values()
    assert ("r1", b"task") == (flying.entry.request, flying.entry.payload)


def test_a_dispatcher_that_fails_once_goes_on(world: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """S46: of two vehicles of one worker the other one has its message, and the first has it with its next trigger."""
    serve = Pool._serve
    failed: list[str] = []

    async def breaks(pool: Pool, vin: str, *more: Any) -> None:
        if not failed:
            failed.append(vin)
            raise ZeroDivisionError
        await serve(pool, vin, *more)

    publish(world)
    monkeypatch.setattr(Pool, "_serve", breaks)
    come(world)
    assert [VIN] == failed and not world.cars[0].flying
    world.heartbeat(which=0, online=True, turn=True)
    assert world.cars[0].flying
    assert 1 == world.loaded.context.counters.pop("dispatch_failed")


def test_a_clerk_who_fails_once_forgets_nothing(world: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """S46: neither receipts nor times."""
    write = Clerk._write
    broken: list[int] = []

    async def breaks(clerk: Clerk, notes: Any) -> None:
        if not broken:
            broken.append(len(notes))
            raise ZeroDivisionError
        await write(clerk, notes)

    monkeypatch.setattr(Clerk, "_write", breaks)
    with surviving():
        come(world)
        publish(world)
        assert [1] == broken
        world.pass_time(5.0)
        world.pass_time(6.0)  # silent for too long
        assert ["accepted", "sent", "retried"] == [receipt.state.value for receipt in world.receipts()]
    assert 1 == world.loaded.context.counters.pop("task_failed")


def test_a_message_that_was_refused_comes_once_more(world: Machine) -> None:
    """Also if its time to be acknowledged and its time to rest are over at the same moment."""
    come(world)
    publish(world)
    world.answer(which=0, refuse=True, turn=True)
    world.pass_time(ACK_TIMEOUT)
    assert 1 == len(world.cars[0].flying)
    assert ["accepted", "sent", "retried", "sent"] == [receipt.state.value for receipt in world.receipts()]


def test_a_message_that_rests_while_a_copy_is_in_flight_is_not_sent_beside_it(world: Machine) -> None:
    """The session repeats the copy when the vehicle comes back; that is the message, until it has had its time."""
    come(world)
    publish(world)
    world.pass_time(ACK_TIMEOUT)
    assert ["accepted", "sent", "retried"] == [receipt.state.value for receipt in world.receipts()]
    world.leave(which=0, goodbye=False, turn=True)
    world.pass_time(5.0)
    world.connect(which=0, clean=False, version=5, lasting=True, limit=None, subscribes=False, turn=True)
    world.pass_time(5.0)
    assert 1 == len(world.cars[0].flying)
    world.answer(which=0, refuse=False, turn=True)
    assert "acked" == world.receipts()[-1].state.value


# -- one in flight is one packet


def come_again(world: Machine, limit: int | None = None) -> None:
    world.connect(which=0, clean=False, version=5, lasting=True, limit=limit, subscribes=False, turn=True)


def told(world: Machine) -> list[str]:
    return [" ".join(filter(None, (receipt.state.value, receipt.reason))) for receipt in world.receipts()]


@pytest.mark.parametrize("over", ["expired", "cancelled", "replaced"])
def test_what_is_over_is_withdrawn_from_the_window_of_a_session(world: Machine, over: str) -> None:
    """A stale message is not repeated when the vehicle is back; what is behind it comes."""
    come(world)
    expires = 5.0 if over == "expired" else None
    world.publish(which=[0], request="r0", two=False, mode=None, priority=0, expires=expires, turn=True)
    (before,) = world.cars[0].flying.values()
    world.leave(which=0, goodbye=False, turn=True)
    if over == "cancelled":
        world.cancel(request="r0", turn=True)
    elif over == "replaced":
        publish(world)
    world.pass_time(6.0)
    publish(world, "r1")
    come_again(world, limit=1)
    (flying,) = world.cars[0].flying.values()
    assert flying.entry is not before.entry
    assert ("r0" if over == "replaced" else "r1") == flying.entry.request
    assert 1 == sum(over == receipt.state.value for receipt in world.receipts())
    assert 1 == len(world.node.plane.registry.sessions[VIN].inflight)


@pytest.mark.parametrize("limit", [1, 32])
def test_a_silent_vehicle_gets_the_same_packet_on_its_next_connection(world: Machine, limit: int) -> None:
    """It fails after `max_attempts`, with whatever window, and nothing behind it waits for longer."""
    come(world)
    publish(world)
    publish(world, "r1")
    come_again(world, limit)
    ids = set(world.cars[0].flying)
    for _ in range(MAX_ATTEMPTS):
        assert "r0" == next(iter(world.cars[0].flying.values())).entry.request
        world.pass_time(ACK_TIMEOUT)
        world.pass_time(5.0)
        if world.cars[0].peer is None:  # sent away: its session repeats the packet
            come_again(world, limit)
            ids |= set(world.cars[0].flying)
    assert "failed no_ack" in told(world), told(world)
    (flying,) = world.cars[0].flying.values()
    assert "r1" == flying.entry.request
    assert 2 == len(ids), "each message has had one packet id"
    assert 1 == len(world.node.plane.registry.sessions[VIN].inflight)


def test_a_vehicle_that_never_lives_long_enough_to_acknowledge_holds_up_nothing(world: Machine) -> None:
    """Its session is kept, its connection ends before `ack_timeout`: a repetition is an attempt."""
    come(world)
    publish(world)
    publish(world, "r1")
    for number in range(MAX_ATTEMPTS):
        for pause in (0.1, 4.0):  # sooner than a retry would be, it is the same attempt
            world.leave(which=0, goodbye=False, turn=True)
            world.pass_time(pause)
            come_again(world)
            assert min(number + 1 + (pause > 1), MAX_ATTEMPTS) == max(receipt.attempt for receipt in world.receipts())
    assert [1, 2, 3] == [receipt.attempt for receipt in world.receipts() if receipt.state is State.SENT][:-1]
    assert "failed no_ack" in told(world)
    (flying,) = world.cars[0].flying.values()
    assert "r1" == flying.entry.request


def test_an_acknowledgement_of_what_was_replaced_is_told(world: Machine) -> None:
    """On the connection that has brought it; with that the next message may go."""
    come(world)
    publish(world)
    publish(world)
    assert 1 == len(world.cars[0].flying)
    world.answer(which=0, refuse=False, turn=True)
    (flying,) = world.cars[0].flying.values()
    assert 2 == flying.entry.position
    assert ["accepted", "sent", "accepted", "replaced reissued", "sent late_ack", "sent"] == told(world)
    assert {State.REPLACED: 1, State.SENT: 1} == world.run(world.service.status("r0")).states


def test_an_acknowledgement_that_nobody_asked_for_is_told(world: Machine) -> None:
    """A vehicle that sends, on its next connection, an acknowledgement that was lost with the last one."""
    come(world)
    publish(world)
    ((packet_id, _),) = world.cars[0].flying.items()
    world.leave(which=0, goodbye=False, turn=True)
    world.cancel(request="r0", turn=True)
    come_again(world)
    assert not world.cars[0].flying and world.cars[0].peer is not None
    next(iter(world.entries.values())).answers["yes"] += 1
    for _ in range(2):  # the second time it means nothing
        world.say(world.cars[0].peer, Puback(packet_id))
        world.go_on()
    assert ["accepted", "sent", "cancelled cancelled", "sent late_ack"] == told(world)
    assert {State.CANCELLED: 1} == world.run(world.service.status("r0")).states
    assert 1 == world.loaded.context.counters["receipts_late_ack"]
    world.kill(written=0)
    assert {State.CANCELLED: 1} == world.run(world.service.status("r0")).states
    assert [] == list(world.run(world.service.targets("r0", State.SENT, "", 10)))


def test_a_message_that_expires_says_for_how_long_it_is_good(world: Machine) -> None:
    """Also when it is repeated: [MQTT-3.3.2-6]. The model looks at it (`Car._message`)."""
    come(world)
    world.publish(which=[0], request="r0", two=False, mode=None, priority=0, expires=15.0, turn=True)
    world.leave(which=0, goodbye=False, turn=True)
    world.pass_time(8.0)
    come_again(world)
    assert world.cars[0].flying


def test_the_history_of_a_vehicle_is_kept_as_long_as_receipts(world: Machine) -> None:
    """Platforms choose the VINs: what was written for vehicles that are never named again must not stay for good."""
    come(world)
    publish(world)
    world.answer(which=0, refuse=False, turn=True)
    world.go_on()
    assert ["r0"] == [view.request_id for view in world.run(world.service.vehicle(VIN)).history]
    kept, read = world.plugin.config.receipts_retention, world.store.inner.mailboxes.read
    assert 1 == len(world.run(read(done_of(VIN), 0, 10, world.now + kept - 1.0)))
    assert [] == world.run(read(done_of(VIN), 0, 10, world.now + kept + 1.0)), "expired: the next sweep removes it"


def test_a_message_refused_after_unsubscribing_comes_with_the_next_subscription(world: Machine) -> None:
    """The session repeats it though there is no subscription, so it can be refused while no source serves it."""
    come(world)
    publish(world)
    world.unsubscribe(which=0, number=0, turn=True)
    world.leave(which=0, goodbye=False, turn=True)
    come_again(world)
    world.answer(which=0, refuse=True, turn=True)
    world.pass_time(5.0)
    world.subscribe(which=0, filter_=0, qos=1, turn=True)
    assert 1 == len(world.cars[0].flying)


def test_what_is_taken_from_the_window_by_the_broker_waits_again(world: Machine) -> None:
    """As when the right to read it was revoked: its packet is gone, the message is not."""
    come(world)
    publish(world)
    session = world.node.plane.registry.sessions[VIN]
    ((number, _),) = session.inflight.items()
    del session.inflight[number]
    assert session.carrier is not None
    session.carrier.acknowledged(number, ReasonCode.NOT_AUTHORIZED, "not_authorized")
    session.go_on()
    world.cars[0].flying.clear()
    world.go_on()
    assert 1 == len(world.cars[0].flying)


def test_attempts_are_forgotten_with_their_delivery(world: Machine) -> None:
    """They are remembered of what was given back, until that is over."""
    come(world)
    publish(world)
    world.answer(which=0, refuse=True, turn=True)
    world.leave(which=0, goodbye=True, turn=True)
    world.go_on()
    assert [VIN] == [vin for vin, _ in world.plugin.desk.attempts]
    world.cancel(request="r0", turn=True)
    come(world)
    world.pass_time(10.0)
    assert not world.plugin.desk.attempts
