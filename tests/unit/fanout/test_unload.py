"""Unloading the fan-out while the store is full or does not answer: it ends, and neither clients nor operators wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from motorcade.core.errors import MotorcadeError
from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.packets import Disconnect, Puback
from motorcade.plugins.fanout.counters import UNLOADED, RequestCounters
from motorcade.plugins.fanout.plugin import LAST_WRITES
from motorcade.plugins.fanout.receipt_writer import RETRY
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, INTENTS
from tests.support.virtual import Turns
from tests.unit.fanout.node import VIN, VINS, FanoutNode, batch, in_turn, message_of, packed
from tests.unit.fanout.test_model import EXPIRES, Machine, judged

Work = Coroutine[Any, Any, Any]


@pytest.fixture
def node() -> Iterator[FanoutNode]:
    with FanoutNode.on() as made:
        yield made


async def outcome(work: Work) -> str:
    """What a caller is told."""
    try:
        await work
    except MotorcadeError as error:
        return str(error)
    return "done"


def unload(node: FanoutNode) -> float:
    """Unload; return the seconds it took. No task of the plugin is left."""
    began = node.now
    unloading = node.begin(outcome(node.plugins.unload("fanout")))
    while not unloading.done():
        assert node.now < began + 60.0, "unloading does not end"
        node.wait(0.25)
    assert "done" == unloading.result()
    assert isinstance(node.loop, Turns)
    assert not [task for task in node.loop.tasks if (task.get_name() or "").startswith("fanout.")]
    assert not [task for task in node.loaded.context.tasks if not task.done()]
    return node.now - began


def load_again(node: FanoutNode) -> None:
    node.held.full = node.held.held = False
    node.loop.call_soon(node.held.let_go)
    node.turn()
    node.loaded = node.run(node.plugins.load("fanout", {}))


# -- vehicles


def test_unloading_ends_while_the_store_is_full_and_the_message_comes_again(node: FanoutNode) -> None:
    car = node.vehicle()
    node.send([VIN], "a")
    node.send([VIN], "b")
    node.held.full = True
    car.ack(message_of(car))
    assert LAST_WRITES <= unload(node) <= LAST_WRITES + 1.0
    load_again(node)
    assert ["a", "b"] == in_turn(car)
    assert ["accepted", "sent", "sent", "acked"] == node.states("a")
    assert {"acked": 1} == node.counts("a") == node.counts("b")


def test_unloading_waits_for_receipts_that_the_store_takes_when_it_is_asked_again(node: FanoutNode) -> None:
    car = node.vehicle()
    node.send([VIN], "a")
    node.held.full = True
    car.ack(message_of(car))
    node.held.full = False
    assert 0.0 < unload(node) <= RETRY + 0.5
    load_again(node)
    assert [] == car.messages()
    assert ["accepted", "sent", "acked"] == node.states("a")


@pytest.mark.parametrize("works", [True, False])
def test_a_message_that_expired_while_the_store_was_full_ends_once(works: bool) -> None:
    """As the model has found it: the receipt waits for its next attempt when the plugin is unloaded."""
    with judged(Machine(), atomic=False) as world:
        world.connect(subscribes=True)
        world.publish(expires=EXPIRES)
        world.fill()
        world.wait(EXPIRES)
        world.come_again(version=4)
        world.load_anew(works)


# -- the platform


def test_the_publisher_of_a_batch_that_is_not_stored_is_disconnected_and_sends_it_again(node: FanoutNode) -> None:
    """Its entries are stored, their receipts are not; else it would wait for ever, with all that it sends after it."""
    car = node.vehicle()
    node.held.held = True
    node.platform.put(INGRESS, packed(batch([VIN], "a", batch_id="1")))
    node.turn()
    node.held.let_go(1)
    node.platform.put(INGRESS, packed(batch([VIN], "b")))
    node.turn()
    assert node.held.records_of(INTENTS)
    assert unload(node) <= LAST_WRITES + 1.0
    assert ReasonCode.SERVER_BUSY == node.platform.expect(Disconnect).reason
    node.held.die()
    load_again(node)
    assert not node.held.records_of(INTENTS)
    assert ["accepted", "sent"] == node.states("a")
    node.platform = node.client("platform")
    assert 1 == node.send([VIN], "a", batch_id="1")["repeated"]
    assert ["a"] == in_turn(car)


@pytest.mark.parametrize("written", [0, 1])
def test_what_the_store_answers_after_the_plugin_is_unloaded_sets_off_nothing(node: FanoutNode, written: int) -> None:
    """The entries of a batch, its receipts, and the receipt of an acknowledgement."""
    car = node.vehicle()
    node.send([VIN], "a")
    watcher = node.client("watcher")
    watcher.subscribe("$SDV-FANOUT/receipt/#")
    node.held.held = True
    car.ack(message_of(car))
    node.platform.put(INGRESS, packed(batch([VIN], "b")))
    node.turn()
    node.loop.call_soon(node.held.let_go, 2 * written)
    unload(node)
    watcher.messages()
    node.loop.call_soon(node.held.let_go)
    node.turn()
    assert not node.held.waiting, "nothing more is written"
    assert [] == watcher.messages() == car.messages()
    load_again(node)
    assert ["accepted", "sent", "acked"] == node.states("a")
    assert ["accepted", "sent"] == node.states("b")


def test_batches_in_the_line_are_refused_with_those_under_way(node: FanoutNode, monkeypatch) -> None:
    answered = node.loop.create_future()

    async def slow(*_: object) -> None:
        await answered

    monkeypatch.setattr(node.held.inner.records, "get", slow)  # the data of the first is looked for
    node.platform.put(f"{INGRESS}/trigger", packed({"ids": [VIN], "request_id": "a", "data_id": "d"}))
    for request in "bc":
        node.platform.put(INGRESS, packed(batch([VIN], request)))
    node.turn()
    unload(node)
    assert ReasonCode.SERVER_BUSY == node.platform.expect(Disconnect).reason
    monkeypatch.undo()
    load_again(node)
    assert [] == node.states()


def test_a_batch_and_data_that_are_stored_in_time_are_acknowledged(node: FanoutNode) -> None:
    node.held.held = True
    node.platform.put(f"{DATA_PREFIX}d", b"data")
    node.platform.put(INGRESS, packed(batch(VINS, "a")))
    node.turn()
    unloading = node.begin(node.plugins.unload("fanout"))
    node.wait(LAST_WRITES / 2)
    assert not unloading.done()
    node.held.held = False
    node.loop.call_soon(node.held.let_go)
    node.turn()
    assert unloading.done()
    assert [False, False] == [bool(packet.reason) for packet in node.platform.take() if isinstance(packet, Puback)]
    assert len(VINS) == len(node.states("a"))
    load_again(node)


# -- operators


def ask(node: FanoutNode, ask_: Callable[[FanoutService], Work]) -> asyncio.Task[str]:
    return node.begin(outcome(ask_(node.service)))


def test_a_collection_that_waits_for_the_store_ends_with_the_plugin(node: FanoutNode) -> None:
    car = node.vehicle()
    node.send([VIN], "a")
    node.held.full = True
    car.ack(message_of(car))
    collecting = ask(node, lambda service: service.gc())
    assert not collecting.done()
    unload(node)
    assert UNLOADED == collecting.result()
    load_again(node)


def test_a_caller_that_asks_for_counts_during_a_replay_is_told_that_the_plugin_was_unloaded(
    node: FanoutNode, monkeypatch
) -> None:
    node.send([VIN], "a")
    unload(node)

    async def slow(_counters: RequestCounters, _steps: int = 0) -> None:
        await asyncio.sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(RequestCounters, "_read", slow)
        load_again(node)
        asking = ask(node, lambda service: service.status("a"))
        assert not asking.done()
        unload(node)
        assert UNLOADED == asking.result()
    load_again(node)
    assert {"accepted": 1} == node.counts("a"), "a replay that was cut short is not stored as counts"


def test_a_batch_sent_by_a_service_that_was_unloaded_meanwhile_is_refused(node: FanoutNode) -> None:
    service = node.service
    unload(node)
    assert UNLOADED == node.run(outcome(service.send([VIN], "a", b"data")))
    load_again(node)
    assert [] == node.states()
