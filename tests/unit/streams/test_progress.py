"""Progress in the store: by client id, written seldom, never backwards, gone when it was of no use for long."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from motorcade.extension.sources import Why
from motorcade.plugins.streams.progress import COLLECTION, LASTS, Mark
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
            mark.acknowledge([offset])
            acknowledged.add(offset)
            assert mark.done == max(n for n in range(21) if acknowledged.issuperset(range(1, n + 1)))
        assert not mark.acked
        assert not mark.outstanding


def test_acknowledged_in_runs() -> None:
    """As one by one, wherever a run ends."""
    for seed in range(50):
        dice = random.Random(seed)
        order = list(range(1, 31))
        for _ in range(seed % 7):
            one, other = dice.randrange(30), dice.randrange(30)
            order[one], order[other] = order[other], order[one]
        single, runs = Mark("car", "s", ""), Mark("car", "s", "")
        for mark in (single, runs):
            mark.begin(1, 0, ahead=False)
            mark.give(range(1, 31))
        while order:
            run, order = order[: dice.randint(1, 8)], order[8:]
            before = single.done
            for offset in run:
                single.acknowledge([offset])
            assert runs.acknowledge(run) is (single.done > before)
            assert (single.done, single.acked, single.outstanding) == (runs.done, runs.acked, runs.outstanding)


async def test_many_acknowledgements_are_one_write(node: Node, store: Store) -> None:
    """The first place is written at once, the rest when the interval is over."""
    car = await reading(node)
    assert {"s/car": [1, 0, NOW, False]} == await records(store)
    written = node.counters["progress_written"]
    for _ in range(10):
        car.acknowledge()
    await node.quiet()
    assert written == node.counters["progress_written"]
    node.streams.ledger.gathered.due()
    await node.quiet()
    assert {"s/car": [1, 10, NOW, False]} == await records(store)
    assert written + 1 == node.counters["progress_written"]


async def test_the_interval_is_one_for_all(store: Store) -> None:
    """It runs only while something has changed."""
    node = await Node.on(store, progress_interval=0.01)
    await node.create()
    car = await reading(node)
    assert not node.streams.ledger.gathered.is_timed
    car.acknowledge()
    async with asyncio.timeout(60):
        while (await records(store))["s/car"][1] != 1:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.01)
    assert not node.streams.ledger.gathered.is_timed
    await node.stop()


async def test_who_goes_away_is_written_at_once(node: Node, store: Store) -> None:
    car = await reading(node)
    car.acknowledge()
    car.disconnect()
    await node.quiet()
    assert {"s/car": [1, 1, NOW, False]} == await records(store)


@pytest.mark.parametrize("why", [Why.ENDED, Why.UNSUBSCRIBED])
@pytest.mark.parametrize("version", [4, 5])
async def test_progress_outlives_its_subscription(node: Node, store: Store, why: Why, version: int) -> None:
    """Whatever session the client has, it goes on by its id."""
    car = await reading(node)
    car.info.version, car.info.clean_start = version, True
    for _ in range(5):
        car.acknowledge()
    car.sessions.pop("$stream/s").end(why)
    await node.quiet()
    assert {"s/car": [1, 5, NOW, False]} == await records(store)
    session = node.client("car").subscribe("$stream/s")
    await session.client.drain()
    assert b"5" == session.received[0].payload
    assert 15 == len(session.received)


async def test_what_is_acknowledged_after_unsubscribing_counts(node: Node, store: Store) -> None:
    """It was in flight; the client has got it."""
    car = await reading(node)
    session = car.unsubscribe("$stream/s")
    session.delivered(*[session.inflight.pop(0) for _ in range(8)])
    session.delivered(session.inflight.pop(1))
    await node.streams.ledger.settle()
    assert {"s/car": [1, 8, NOW, False]} == await records(store)
    again = car.subscribe("$stream/s")
    session.delivered(session.inflight.pop(0))  # it is given again already
    await node.quiet()
    assert b"8" == again.received[0].payload
    assert 8 == node.streams.ledger.find("car", "s", "").done  # type: ignore[union-attr]


async def test_unsubscribed_while_the_rest_is_in_flight(node: Node) -> None:
    """When the last of it is acknowledged, its place is no more, and what was committed is."""
    car = await reading(node)
    session = car.unsubscribe("$stream/s")
    while session.inflight:
        session.delivered(session.inflight.pop())
    ledger = node.streams.ledger
    assert session.source is None
    assert [] == ledger.of_stream("s")
    assert 20 == ledger.committed("car", "s").offset  # type: ignore[union-attr]


@pytest.mark.parametrize("filter_", ["$stream/s", "$stream/s/3"])
async def test_progress_goes_back_only_with_a_position(node: Node, store: Store, filter_: str) -> None:
    """And then follows from there; of a client that has committed nothing it begins with the position."""
    car = await reading(node)
    await car.drain()
    car.disconnect(Why.ENDED)
    await node.quiet()
    assert 20 == (await records(store))["s/car"][1]
    session = node.client("car", window=4).subscribe(filter_, "" if filter_[-1] == "3" else "3")
    await node.quiet()
    assert 2 == (await records(store))["s/car"][1]
    session.client.acknowledge()
    session.client.disconnect(Why.ENDED)
    await node.quiet()
    assert 3 == (await records(store))["s/car"][1]


async def test_several_subscriptions_share_the_progress(node: Node, store: Store) -> None:
    """It is that of the one farthest behind, as long as it is there."""
    ledger = node.streams.ledger
    await node.append(*(b"%d" % number for number in range(20)))
    car = node.client("car", window=20, buffer=20)
    fast, slow = car.subscribe("$stream/s/11"), car.subscribe("$stream/s/earliest")
    await node.quiet()
    for _ in range(4):
        car.acknowledge(0, "$stream/s/11")
    car.acknowledge(0, "$stream/s/earliest")
    assert (14, 1) == (ledger.find("car", "s", "11").done, ledger.committed("car", "s").offset)  # type: ignore[union-attr]
    slow.inflight.clear()
    car.unsubscribe("$stream/s/earliest")
    assert 14 == ledger.committed("car", "s").offset  # type: ignore[union-attr]
    car.subscribe("$stream/s/5")
    await node.quiet()
    fast.inflight.clear()
    car.unsubscribe("$stream/s/11")
    assert 4 == ledger.committed("car", "s").offset  # type: ignore[union-attr]


@pytest.mark.parametrize("first", [0, 1])
async def test_a_session_that_ends_with_several(node: Node, first: int) -> None:
    """Nothing is missed, whichever ends first; from the next subscription on only that counts."""
    ledger = node.streams.ledger
    await node.append(*(b"%d" % number for number in range(20)))
    car = node.client("car", window=20, buffer=20)
    for filter_ in ["$stream/s/15", "$stream/s/4"][:: 1 if first else -1]:
        car.subscribe(filter_)
    await node.quiet()
    car.disconnect(Why.ENDED)
    assert 3 == ledger.committed("car", "s").offset  # type: ignore[union-attr]
    again = node.client("car").subscribe("$stream/s/18")
    await node.quiet()
    assert 17 == ledger.committed("car", "s").offset  # type: ignore[union-attr]
    again.client.acknowledge()
    assert 18 == ledger.committed("car", "s").offset  # type: ignore[union-attr]


async def test_who_has_no_name_of_its_own_has_no_progress(node: Node, store: Store) -> None:
    car = node.client("auto-0123456789abcdef0123").subscribe("$stream/s/earliest").client
    await node.append(b"1")
    await car.drain()
    await node.streams.ledger.settle()
    assert (0, 0) == (node.counters["progress_written"], len(node.streams.ledger))
    assert 1 == (await node.streams.show("s")).readers


async def test_there_is_a_bound_per_stream(store: Store) -> None:
    """Who is beyond it reads like everybody else; nothing of it is committed."""
    node = await Node.on(store, max_progress=2)
    for name in ("s", "other"):
        await node.create(name)
    for number in range(3):
        session = node.client(f"car{number}").subscribe("$stream/s")
        await node.quiet()
    node.client("car9").subscribe("$stream/other")
    await node.append(b"1")
    await session.client.drain()
    assert [b"1"] == [message.payload for message in session.received]
    assert (1, 3) == (node.counters["refused_max_progress"], len(node.streams.ledger))
    session.client.disconnect(Why.ENDED)
    session = node.client("car2").subscribe("$stream/s")
    await node.quiet()
    assert [] == session.received, "nothing is committed, so it begins with the latest"
    await node.stop()
    assert {"s/car0", "s/car1", "other/car9"} == set(await records(store))


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
    node.streams.ledger.gathered.due()
    await node.quiet()
    assert 1 == node.counters["progress_failed"]
    assert {"s/car": [1, 1, NOW, False]} == await records(store)


async def test_a_stream_is_deleted_while_its_progress_cannot_be_written(
    node: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again: it would be there for the next stream of that name."""
    car = await reading(node)
    car.acknowledge()
    monkeypatch.setattr("motorcade.plugins.streams.progress.RETRY", 0.01)
    batch = store.batch

    class Failing:
        def put(self, *_args: object) -> None:
            pass

        async def commit(self) -> None:
            monkeypatch.setattr(store, "batch", batch)
            await node.streams.delete("s")
            raise StoreError("away")

    monkeypatch.setattr(store, "batch", Failing)
    node.streams.ledger.gathered.due()
    await node.quiet()
    assert {} == await records(store)


async def test_progress_expires(node: Node, store: Store) -> None:
    """The retention after the last commit, in the store and in memory; without a retention after 30 days."""
    await node.create("kept", topics=(), retention=0)
    await node.append(b"0")
    for name in ("s", "kept"):
        node.client("car").subscribe(f"$stream/{name}", "earliest").client.disconnect(Why.ENDED)
    await node.quiet()
    week = node.streams.options("s").retention
    assert {"s/car", "kept/car"} == set(await records(store, NOW + week - 1))
    assert {"kept/car"} == set(await records(store, NOW + week))
    assert {} == await records(store, NOW + LASTS)
    node.now = NOW + week - 1
    assert node.streams.ledger.committed("car", "s") is not None
    node.now = NOW + week
    assert node.streams.ledger.committed("car", "s") is None
    assert node.streams.ledger.committed("car", "kept") is not None
    node.now = NOW + LASTS
    node.streams.ledger.sweep()
    assert 0 == len(node.streams.ledger)


async def test_the_last_commit_counts(store: Store) -> None:
    """Whoever has begun first may go last."""
    node = await Node.on(store)
    await node.create(retention=100)
    for name in ("one", "two"):
        node.client(name).subscribe("$stream/s").client.disconnect(Why.ENDED)
        await node.quiet()
    node.now += 80
    node.client("one").subscribe("$stream/s").client.disconnect(Why.ENDED)
    await node.quiet()
    node.now += 25
    node.streams.ledger.sweep()
    assert ["one"] == [progress.client for progress in node.streams.ledger.of_clients("s")]
    await node.stop()


async def test_expired_progress_makes_room(store: Store) -> None:
    node = await Node.on(store, max_progress=1)
    await node.create(retention=100)
    node.client("one").subscribe("$stream/s").client.disconnect(Why.ENDED)
    node.now += 100
    await node.streams.trimmer.look()
    node.client("two").subscribe("$stream/s")
    await node.stop()
    assert (0, {"s/two"}) == (node.counters["refused_max_progress"], set(await records(store, node.now)))


@pytest.mark.parametrize("away", [False, True])
async def test_a_subscription_keeps_its_progress(store: Store, away: bool) -> None:
    """However long nothing happens, and the node may die at any time."""
    node = await Node.on(store)
    await node.create(retention=100)
    await node.append(b"0")
    session = node.client("car").subscribe("$stream/s", "earliest")
    node.client("gone").subscribe("$stream/s").client.disconnect(Why.ENDED)
    await session.client.drain()
    if away:
        session.client.disconnect()
    for _ in range(40):
        node.now += 10
        node.streams.ledger.sweep()
        if node.streams.ledger.gathered.is_timed:
            node.streams.ledger.gathered.due()
        await node.quiet()
        assert 1 == (await records(store, node.now))["s/car"][1]
    assert {"s/car"} == set(await records(store, node.now))
    assert 5 < node.counters["progress_written"] < 15, "seldom"
    await node.kill()


async def test_a_client_that_comes_back_late_is_written_at_once(store: Store) -> None:
    """Else it could expire before anybody looks again."""
    node = await Node.on(store)
    await node.create(retention=100)
    node.client("car").subscribe("$stream/s").client.disconnect(Why.ENDED)
    await node.quiet()
    node.now += 90
    node.client("car").subscribe("$stream/s")
    await node.quiet()
    assert [1, 0, node.now, False] == (await records(store, node.now + 99))["s/car"]
    await node.stop()


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
    assert 1 == node.counters["progress_unwritable"]
    assert {f"s/{client_id}" for client_id in odd[:3]} == set(await records(store))
    again = await Node.on(store)
    assert 3 == len(again.streams.ledger)
    assert all(again.streams.ledger.committed(client_id, "s") for client_id in odd[:3])
    await again.stop()


async def test_a_record_of_something_else_is_left_alone(store: Store) -> None:
    await store.records.put(COLLECTION, "s/car", b"\xc1")
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
