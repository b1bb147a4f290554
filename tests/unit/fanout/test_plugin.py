"""What takes luck to see on a real node, one thing at a time, in the world of the model (`test_model`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.dispatcher import Pool
from motorcade.plugins.fanout.record import EntryRecord, encode
from motorcade.plugins.fanout.tables import owner_of
from motorcade.plugins.fanout.views import WhyView
from motorcade.storage.ports import Draft
from tests.unit.broker.memory import surviving
from tests.unit.fanout.test_model import ACK_TIMEOUT, VINS, Machine

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
    world.answer(which=0, number=0, refuse=True, turn=True)
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
    world.answer(which=0, number=0, refuse=False, turn=True)
    assert "acked" == world.receipts()[-1].state.value
