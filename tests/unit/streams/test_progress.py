"""Progress in the store: written seldom, never backwards, gone with its session."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from motorcade.extension.sources import Why
from motorcade.plugins.streams.progress import COLLECTION, DAY, Mark
from motorcade.storage.ports import Store, StoreError
from tests.unit.streams.clients import NOW, Node


async def records(store: Store, now: float = NOW) -> dict[str, Any]:
    return {key: msgspec.msgpack.decode(value) async for key, value in store.records.scan(COLLECTION, now)}


async def reading(node: Node, count: int = 20) -> Any:
    """A client with everything in flight."""
    await node.append(*(b"%d" % number for number in range(count)))
    session = node.client("car", window=count, buffer=count).subscribe("$stream/s", "earliest")
    await node.quiet()
    assert count == len(session.inflight)
    return session.client


def test_acknowledged_in_any_order() -> None:
    """`done` is the highest offset without a hole before it."""
    for seed in range(50):
        order = list(range(1, 21))
        random.Random(seed).shuffle(order)
        mark = Mark("car", "s", "")
        mark.begin(1, 0, ahead=False)
        mark.give(range(1, 21))
        acknowledged: set[int] = set()
        for offset in order:
            mark.acknowledge(offset)
            acknowledged.add(offset)
            assert mark.done == max(n for n in range(21) if acknowledged.issuperset(range(1, n + 1)))
        assert not mark.acked
        assert not mark.outstanding


async def test_many_acknowledgements_are_one_write(node: Node, store: Store) -> None:
    """The first place is written at once, the rest when the interval is over."""
    car = await reading(node)
    assert {"s//car": [1, 0, NOW, False]} == await records(store)
    written = node.counters["progress_written"]
    for _ in range(10):
        car.acknowledge()
    await node.quiet()
    assert written == node.counters["progress_written"]
    node.streams.ledger._due()
    await node.quiet()
    assert {"s//car": [1, 10, NOW, False]} == await records(store)
    assert written + 1 == node.counters["progress_written"]


async def test_the_interval_is_one_for_all(store: Store) -> None:
    """It runs only while something has changed."""
    node = await Node.on(store, progress_interval=0.01)
    await node.create()
    car = await reading(node)
    assert node.streams.ledger._timer is None
    car.acknowledge()
    async with asyncio.timeout(10):
        while (await records(store))["s//car"][1] != 1:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.01)
    assert node.streams.ledger._timer is None
    await node.stop()


async def test_who_goes_away_is_written_at_once(node: Node, store: Store) -> None:
    car = await reading(node)
    car.acknowledge()
    car.disconnect()
    await node.quiet()
    assert {"s//car": [1, 1, NOW, False]} == await records(store)


async def test_a_short_visit_leaves_nothing(node: Node, store: Store) -> None:
    car = await reading(node)
    car.acknowledge()
    car.disconnect(Why.ENDED)
    await node.quiet()
    assert {} == await records(store)


async def test_mqtt_3_without_a_session_writes_nothing(node: Node, store: Store) -> None:
    car = node.client("car")
    car.info.version, car.info.clean_start = 4, True
    car.subscribe("$stream/s/earliest")
    await node.append(b"1")
    await car.drain()
    await node.streams.ledger.settle()
    assert 0 == node.counters["progress_written"]


async def test_a_store_that_fails_is_tried_again(node: Node, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    car = await reading(node)
    car.acknowledge()
    monkeypatch.setattr("motorcade.plugins.streams.progress.RETRY", 0.01)
    batch = store.batch

    class Failing:
        def put(self, *_args: object) -> None:
            pass

        async def commit(self) -> None:
            monkeypatch.setattr(store, "batch", batch)
            raise StoreError("away")

    monkeypatch.setattr(store, "batch", Failing)
    node.streams.ledger._due()
    await node.quiet()
    assert 1 == node.counters["progress_failed"]
    assert {"s//car": [1, 1, NOW, False]} == await records(store)


async def test_records_expire_when_they_are_of_no_use(node: Node, store: Store) -> None:
    """A record that outlives its session goes when everything up to it was trimmed by age."""
    await node.create("kept", topics=(), retention=0)
    for name in ("s", "kept"):
        node.client("car").subscribe(f"$stream/{name}")
    await node.quiet()
    week = node.streams.options("s").retention
    assert {"s//car", "kept//car"} == set(await records(store, NOW + week + DAY - 1))
    assert {"kept//car"} == set(await records(store, NOW + week + DAY))


async def test_client_ids_may_be_anything(store: Store) -> None:
    """With slashes, and too long for a key: that one is not stored."""
    node = await Node.on(store)
    await node.create()
    await node.append(b"1")
    odd = ["a/b//c", "$stream/s", "ü€", "x" * 65_535]
    for client_id in odd:
        node.client(client_id).subscribe("$stream/s/earliest")
    await node.quiet()
    await node.stop()
    assert {f"s/earliest/{client_id}" for client_id in odd[:3]} == set(await records(store))
    again = await Node.on(store)
    assert 3 == len(again.streams.ledger)
    assert all(again.streams.ledger.find(client_id, "s", "earliest") for client_id in odd[:3])
    await again.stop()


async def test_a_record_of_something_else_is_left_alone(store: Store) -> None:
    await store.records.put(COLLECTION, "s//car", b"\xc1")
    node = await Node.on(store)
    assert (1, 0) == (node.counters["progress_unreadable"], len(node.streams.ledger))
    await node.stop()


async def test_a_store_that_has_lost_its_end(store: Store) -> None:
    """Progress beyond the end goes back to it; who has asked for what is not there yet waits on."""
    node = await Node.on(store)
    await node.create()
    await node.append(b"0", b"1", b"2")
    lost = node.client("lost").subscribe("$stream/s", "earliest")
    ahead = node.client("ahead").subscribe("$stream/s", "6")
    await lost.client.drain()
    await node.stop()
    await store.streams.drop("s")
    await store.streams.append("s", [], NOW)
    again = await Node.on(store)
    await again.append(b"3")
    for session in (lost, ahead):
        session.received.clear()
        session.client.resume(again)
    await again.append(*(b"%d" % number for number in range(4, 10)))
    await lost.client.drain()
    await ahead.client.drain()
    assert [b"4", b"5"] == [message.payload for message in lost.received][:2]
    assert [b"8", b"9"] == [message.payload for message in ahead.received]
    await again.stop()
