"""What happens at the same time, or while the store is slow or fails. Planted faults (docs/faults.md) show the need."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.packets import Disconnect, Puback, Publish
from motorcade.plugins.fanout.counters import RequestCounters
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, INTENTS
from motorcade.storage.ports import Fence, StoreError, StoreFullError
from tests.unit.fanout.node import VIN, VINS, FanoutNode, batch, filter_of, in_turn, message_of, packed, taken, topic_of

OPTIONS: dict[str, Any] = {"ack_timeout": 10.0, "retry_delay": 1.0, "retry_delay_max": 4.0, "max_attempts": 3}


@pytest.fixture
def node() -> Iterator[FanoutNode]:
    with FanoutNode.on(**OPTIONS) as made:
        yield made


# -- vehicles


def test_a_vehicle_is_served_when_the_store_can_be_read_again(node: FanoutNode, monkeypatch) -> None:
    node.send([VIN], "a")

    async def failing(*_: object) -> None:
        raise StoreError("it cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(node.held.mailboxes, "read", failing)
        car = node.vehicle()
        assert [] == car.messages()
    node.wait(2.0)
    assert ["a"] == in_turn(car)


def test_messages_that_are_stored_while_a_mailbox_is_read_come_all(node: FanoutNode, monkeypatch) -> None:
    """The reader finds nothing, and must not take that for the truth when somebody has told it to look again."""
    read = node.held.mailboxes.read
    answered = node.loop.create_future()

    async def slow(*arguments: Any) -> Any:
        found = await read(*arguments)
        await asyncio.shield(answered)
        return found

    monkeypatch.setattr(node.held.mailboxes, "read", slow)
    car = node.vehicle()
    for request in "abc":
        node.send([VIN], request)
    node.loop.call_soon(answered.set_result, None)
    assert ["a", "b", "c"] == in_turn(car)


def test_a_request_that_is_paused_while_its_message_waits_for_room_blocks_nothing(node: FanoutNode) -> None:
    car = node.vehicle(receive_maximum=1)
    car.subscribe("news")
    node.platform.publish("news", b"today")
    news = message_of(car)
    node.send([VIN], "a")
    node.run(node.service.pause("a"))
    car.ack(news)
    node.send([VIN], "b")
    assert ["b"] == in_turn(car)
    node.run(node.service.resume("a"))
    assert ["a"] == in_turn(car)


def test_a_message_that_is_replaced_while_it_waits_for_room_is_not_sent(node: FanoutNode) -> None:
    """From when the new one is stored, though its receipts are not."""
    car = node.vehicle(receive_maximum=1)
    car.subscribe("news")
    node.platform.publish("news", b"today")
    news = message_of(car)
    node.send([VIN], "a", "old")
    node.held.held = True
    node.platform.put(INGRESS, packed(batch([VIN], "a", "new")))
    node.turn()
    node.held.let_go(1)  # the entries
    node.turn()
    car.ack(news)
    assert [] == car.messages()
    node.held.held = False
    node.held.let_go()
    assert b"new" == message_of(car).payload


def test_a_resumed_request_reaches_vehicles_that_are_there_at_once(node: FanoutNode) -> None:
    node.send(VINS[:3], "a")
    node.run(node.service.pause("a"))
    cars = [node.vehicle(vin) for vin in VINS[:3]]
    assert [[]] * 3 == [car.messages() for car in cars]
    node.run(node.service.resume("a"))
    assert [["a"]] * 3 == [in_turn(car) for car in cars]


def test_a_vehicle_that_is_back_at_once_has_its_whole_time_and_no_more(node: FanoutNode) -> None:
    """Sooner than the message would be sent again: it is the same attempt, and its silence counts from then on."""
    car = node.vehicle()
    node.send([VIN], "a")
    first = message_of(car)
    car.close()
    node.wait(0.5)
    car = node.lasting()
    again = message_of(car)
    assert (first.packet_id, True) == (again.packet_id, again.dup)
    assert ["accepted", "sent"] == node.states("a")
    node.wait(9.9)
    assert ["accepted", "sent"] == node.states("a")
    node.wait(1.3)
    assert ReasonCode.UNSPECIFIED_ERROR is car.expect(Disconnect).reason
    assert ["accepted", "sent", "retried"] == node.states("a")


def test_subscribing_again_gives_a_silent_vehicle_its_time_again(node: FanoutNode) -> None:
    car = node.vehicle()
    node.send([VIN], "a")
    message = message_of(car)
    node.wait(10.1)
    assert ["accepted", "sent", "retried"] == node.states("a")
    car.unsubscribe(filter_of(VIN))
    car.subscribe(filter_of(VIN))
    node.wait(5.0)
    assert car.open
    car.ack(message)
    assert ["accepted", "sent", "retried", "acked"] == node.states("a")


def test_a_refused_attempt_counts_after_a_restart(node: FanoutNode) -> None:
    car = node.vehicle()
    node.send([VIN], "a")
    car.ack(message_of(car), reason=ReasonCode.UNSPECIFIED_ERROR)
    node = node.restart()
    car = node.client(VIN)
    car.subscribe(filter_of(VIN))
    node.wait(2.0)
    car.ack(message_of(car))
    assert [1, 1, 2, 2] == [receipt.attempt for receipt in node.receipts("a")][1:]


# -- batches


def test_nothing_of_a_batch_is_sent_before_its_receipts_are_stored(node: FanoutNode) -> None:
    car = node.vehicle()
    node.held.held = True
    node.platform.put(INGRESS, packed(batch([VIN], "a")))
    node.turn()
    node.held.let_go(1)  # the entries
    node.turn()
    car.put(f"ecp/{VIN}/heartbeat", b"", 0)
    assert [] == car.messages()
    assert [] == node.states("a")
    node.held.held = False
    node.held.let_go()
    assert ["a"] == in_turn(car)
    assert ["accepted", "sent", "acked"] == node.states("a")


def test_receipts_of_batches_are_stored_in_the_order_of_the_batches() -> None:
    """Though the store is asked more about the first."""
    with FanoutNode.on(max_pending=1) as node:
        node.send([VIN], "a")
        node.held.held_reads = True
        for vin, request in ((VIN, "b"), (VINS[1], "c")):
            node.platform.put(INGRESS, packed(batch([vin], request)))
        node.turn()
        node.held.held_reads = False
        node.held.let_read()
        node.turn()
        assert ["a", "b", "c"] == list(dict.fromkeys(receipt.request_id for receipt in node.receipts()))


def test_batch_ids_that_are_under_way_count_as_remembered() -> None:
    with FanoutNode.on(max_batch_ids=1) as node:
        with node.slow_store():
            for name in "ab":
                node.platform.put(INGRESS, packed(batch([VIN], "r", batch_id=name)))
            node.turn()
        answers = [packet.reason for packet in node.platform.take() if isinstance(packet, Puback)]
        assert [ReasonCode.SUCCESS, ReasonCode.QUOTA_EXCEEDED] == answers


def test_nothing_is_left_of_a_batch_that_is_told(node: FanoutNode) -> None:
    for request in ("a", "b", "a"):
        node.send(VINS, request)
    assert {} == node.held.records_of(INTENTS)


def test_batches_that_are_done_give_their_place_in_line_back() -> None:
    with FanoutNode.on(max_queued=2) as node:
        for number in range(5):
            assert taken(1) == node.send([VIN], f"r{number}")
        assert node.refused(INGRESS, b"{}")
        assert taken(1) == node.send([VIN], "last")


def test_data_that_could_not_be_stored_takes_no_room(monkeypatch) -> None:
    async def failing(*_: object) -> bytes:
        raise StoreFullError("no room")

    with FanoutNode.on(max_data_bytes=1500) as node:
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(node.held.inner.blobs, "put", failing)
                assert node.refused(f"{DATA_PREFIX}d", b"x" * 1000, ReasonCode.QUOTA_EXCEEDED)
        node.keep("d", b"x" * 1000)


def test_of_two_data_of_one_id_the_second_is_the_last(node: FanoutNode, monkeypatch) -> None:
    """However slow the store was with the first."""
    put = node.held.inner.blobs.put
    slow = node.loop.create_future()

    async def put_slowly(data: bytes, *arguments: Any) -> bytes:
        if data == b"first":
            await asyncio.shield(slow)
        return await put(data, *arguments)

    monkeypatch.setattr(node.held.inner.blobs, "put", put_slowly)
    node.platform.send(
        *(Publish(f"{DATA_PREFIX}d", data, 1, packet_id=n + 1) for n, data in enumerate([b"first", b"second"]))
    )
    node.turn()
    node.loop.call_soon(slow.set_result, None)
    node.turn()
    assert 2 == len([packet for packet in node.platform.take() if isinstance(packet, Puback)])
    monkeypatch.undo()
    node = node.restart()  # so that it is read from the store
    node.trigger([VIN], "a", "d")
    car = node.vehicle()
    message = message_of(car)
    assert (topic_of(VIN, "a"), b"second") == (message.topic, message.payload)


# -- collections


def test_a_priority_that_comes_during_a_collection_counts(node: FanoutNode) -> None:
    """The collection has looked at the vehicle before, and found that priorities are not in use."""
    node.send(VINS[:2], "a")
    node.held.held_reads = True
    collection = node.begin(node.service.gc())
    node.held.let_read(1)
    node.turn()
    node.send([VIN], "b", priority=5)
    node.held.held_reads = False
    node.held.let_read()
    node.turn()
    assert collection.done()
    assert ["b", "a"] == in_turn(node.vehicle())


def test_a_cancellation_that_comes_during_a_collection_survives_a_kill(node: FanoutNode) -> None:
    """The next process ends what the collection had passed already."""
    node.send(VINS[:2], "a")
    node.held.held_reads = True
    node.begin(node.service.gc())
    node.held.let_read(1)
    node.turn()
    node.run(node.service.cancel("a"))
    node.held.let_read(1)
    node.turn()
    assert 1 == node.states("a").count("cancelled")
    node.held.held_reads = False
    node = node.kill()
    node.turn()
    assert 2 == node.states("a").count("cancelled")


# -- counts


def test_counts_survive_a_checkpoint_that_fails(node: FanoutNode, monkeypatch) -> None:
    """What could not be written is written with the next one, though that is about other requests."""
    write = RequestCounters._write_some
    full = iter([True])

    async def failing(counters: RequestCounters, fence: Fence | None) -> None:
        node.held.full = next(full, False)
        try:
            await write(counters, fence)
        finally:
            node.held.full = False

    monkeypatch.setattr(RequestCounters, "_write_some", failing)
    node.send(VINS[:3], "a")
    node.wait(2.0)
    node.send(VINS[:2], "b")
    node.wait(3.0)
    monkeypatch.undo()
    node = node.kill()
    assert {"accepted": 3} == node.counts("a")
    assert {"accepted": 2} == node.counts("b")
