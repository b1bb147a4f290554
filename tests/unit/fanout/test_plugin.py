"""What takes luck to see on a real node, one thing at a time, in the world of the model (`test_model`)."""

from __future__ import annotations

from typing import Any

import pytest

from motorcade import commit
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import State
from motorcade.plugins.fanout.counters import RequestCounters
from motorcade.plugins.fanout.dispatcher import Dispatcher
from motorcade.plugins.fanout.receipt_writer import ReceiptWriter
from motorcade.plugins.fanout.tables import done_of
from motorcade.plugins.fanout.views import WhyView
from tests.unit.fanout.test_model import MAX_ATTEMPTS, VINS, Machine

VIN = VINS[0]
LOGGED = commit._call  #: what a node does with a callback that fails; the rig lets it fail the test


def why(world: Machine) -> WhyView:
    view: WhyView = world.run(world.service.why(VIN))
    return view


def test_why_a_message_is_being_looked_for(world: Machine) -> None:
    world.publish()
    world.store.held_reads = True
    world.connect(subscribes=True)
    (looking,) = world.store.reads  # the dispatcher's; others are answered
    world.store.reads.clear()
    world.store.held_reads = False
    view = why(world)
    assert ("dispatching", 1, "r0") == (view.reason, view.pending, view.request_id)
    world.loop.call_soon(looking.go)
    world.go_on()
    assert "in_flight" == why(world).reason


def test_a_dispatcher_that_fails_once_goes_on(world: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """S46: of two vehicles of one worker the other one has its message, and the first has it with its next trigger."""
    serve = Dispatcher._serve
    failed: list[str] = []

    async def breaks(dispatcher: Dispatcher, vin: str, *more: Any) -> None:
        if not failed:
            failed.append(vin)
            raise ZeroDivisionError
        await serve(dispatcher, vin, *more)

    world.publish()
    monkeypatch.setattr(Dispatcher, "_serve", breaks)
    world.connect(subscribes=True)
    assert [VIN] == failed and not world.cars[0].flying
    world.heartbeat()
    assert world.cars[0].flying
    assert 1 == world.loaded.context.counters.pop("dispatch_failed")


def test_a_writer_that_fails_once_loses_nothing(world: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """S46: neither receipts nor times."""
    write = ReceiptWriter._write_notes
    broken: list[int] = []

    def breaks(writer: ReceiptWriter, notes: Any) -> None:
        if not broken:
            broken.append(len(notes))
            raise ZeroDivisionError
        write(writer, notes)

    monkeypatch.setattr(ReceiptWriter, "_write_notes", breaks)
    world.connect(subscribes=True)
    world.publish()
    assert [1] == broken
    world.pass_time(5.0)
    world.pass_time(6.0)  # silent for too long
    assert ["accepted", "sent", "retried"] == [receipt.state.value for receipt in world.receipts()]
    assert 1 == world.loaded.context.counters["receipts_not_stored"]


def test_counts_that_fail_hold_up_no_delivery(world: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """S46: the receipts are stored, so the next message may be sent, and the next start counts them."""

    def breaks(_counters: RequestCounters) -> None:
        raise ZeroDivisionError

    world.connect(subscribes=True)
    with monkeypatch.context() as patch:
        patch.setattr(RequestCounters, "count", breaks)
        patch.setattr(commit, "_call", LOGGED)  # as a node does it: the defect is logged
        for request in ("r0", "r1"):
            world.publish(request=request)
        for _ in range(2):
            assert world.cars[0].flying
            world.answer()
    world.kill()


# -- one in flight is one packet


def told(world: Machine) -> list[str]:
    return [" ".join(filter(None, (receipt.state.value, receipt.reason))) for receipt in world.receipts()]


def test_a_vehicle_that_never_lives_long_enough_to_acknowledge_holds_up_nothing(world: Machine) -> None:
    """Its session is kept, its connection ends before `ack_timeout`: a repetition is an attempt."""
    world.connect(subscribes=True)
    world.publish()
    world.publish(request="r1")
    for number in range(MAX_ATTEMPTS):
        for pause in (0.1, 4.0):  # sooner than a retry would be, it is the same attempt
            world.leave()
            world.pass_time(pause)
            world.connect()
            assert min(number + 1 + (pause > 1), MAX_ATTEMPTS) == max(receipt.attempt for receipt in world.receipts())
    assert [1, 2, 3] == [receipt.attempt for receipt in world.receipts() if receipt.state is State.SENT][:-1]
    assert "failed no_ack" in told(world)
    (flying,) = world.cars[0].flying.values()
    assert "r1" == flying.entry.request


def test_the_history_of_a_vehicle_is_kept_as_long_as_receipts(world: Machine) -> None:
    """Platforms choose the VINs: what was written for vehicles that are never named again must not stay for good."""
    world.connect(subscribes=True)
    world.publish()
    world.answer()
    world.go_on()
    assert ["r0"] == [view.request_id for view in world.run(world.service.vehicle(VIN)).history]
    kept, read = world.plugin.config.receipts_retention, world.store.inner.mailboxes.read
    assert 1 == len(world.run(read(done_of(VIN), 0, 10, world.now + kept - 1.0)))
    assert [] == world.run(read(done_of(VIN), 0, 10, world.now + kept + 1.0)), "expired: the next sweep removes it"


def test_a_message_refused_after_unsubscribing_comes_with_the_next_subscription(world: Machine) -> None:
    """The session repeats it though there is no subscription, so it can be refused while no source serves it."""
    world.connect(subscribes=True)
    world.publish()
    world.unsubscribe()
    world.leave()
    world.connect()
    world.answer(refuse=True)
    world.pass_time(5.0)
    world.subscribe()
    assert 1 == len(world.cars[0].flying)


def test_what_is_taken_from_the_window_by_the_broker_waits_again(world: Machine) -> None:
    """As when the right to read it was revoked: its packet is gone, the message is not."""
    world.connect(subscribes=True)
    world.publish()
    session = world.node.state.registry.sessions[VIN]
    ((number, _),) = session.inflight.items()
    del session.inflight[number]
    assert session.scheduler is not None
    session.scheduler.acknowledged(number, ReasonCode.NOT_AUTHORIZED, "not_authorized")
    session.go_on()
    world.cars[0].flying.clear()
    world.go_on()
    assert 1 == len(world.cars[0].flying)


def test_attempts_are_forgotten_with_their_delivery(world: Machine) -> None:
    """They are remembered of what was given back, until that is over."""
    world.connect(subscribes=True)
    world.publish()
    world.answer(refuse=True)
    world.leave(goodbye=True)
    world.go_on()
    assert [VIN] == [vin for vin, _ in world.plugin.table.attempts]
    world.cancel()
    world.connect(subscribes=True)
    world.pass_time(10.0)
    assert not world.plugin.table.attempts
