"""Queues through a real broker: what is published, stored, given, acknowledged, given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from motorcade.core.message import Message
from motorcade.extension.hooks import AFTER
from motorcade.mqtt.packets import Connack, Puback, Pubcomp, Publish, Pubrel
from motorcade.mqtt.properties import Properties
from motorcade.plugins.queues.dispatcher import Dispatcher
from motorcade.plugins.queues.source import QueueSource
from motorcade.storage.memory import MemoryBatch, MemoryStore
from motorcade.storage.ports import Appended, Draft, Entry, Store, StoreError, StoreFullError
from tests.unit.queues.node import Client, Node, until

QUEUE: dict[str, Any] = {"q": {"topics": ["q/#"]}}
QUOTA = 0x97
REFUSED = 0x83


def payloads(messages: list[Publish]) -> list[bytes]:
    return [bytes(message.payload) for message in messages]


def queue(**options: Any) -> dict[str, Any]:
    return {"q": {"topics": ["q/#"], **options}}


async def test_what_is_published_waits_for_a_consumer(store: Store) -> None:
    """In order; each comes once, and is gone when it was acknowledged."""
    async with Node.on(store, queue=QUEUE) as node:
        pub = await node.client("pub")
        sent = [b"%d" % number for number in range(300)]
        for payload in sent:
            pub.send("q/a", payload, 1)
        for _ in sent:
            assert (await pub.expect(Puback)).reason < 0x80
        car = await node.client("car", receive_maximum=20)
        await car.subscribe("$queue/q")
        assert sent == await car.drain(300)
        await node.emptied()
        assert 300 == node.counters["appended"] == node.counters["delivered"] == node.counters["acknowledged"]


@pytest.mark.parametrize("version", [4, 5])
async def test_several_consumers_share(store: Store, version: int) -> None:
    async with Node.on(store, queue=QUEUE) as node:
        cars = [await node.client(name, version) for name in "abc"]
        for car in cars:
            assert 1 == (await car.subscribe("$queue/q", 2)).reasons[0]
        pub = await node.client("pub", version)
        for number in range(30):
            await pub.publish("q/a", b"%d" % number)
        shares = [payloads(await car.take(10)) for car in cars]
        assert {b"%d" % number for number in range(30)} == {payload for share in shares for payload in share}


async def test_one_client_consumes_several_queues(store: Store) -> None:
    """Both get their turn, however much waits in one of them."""
    many = {"a": {"topics": ["a"]}, "b": {"topics": ["b"]}}
    async with Node.on(store, queue=many) as node:
        pub = await node.client("pub")
        for number in range(200):
            await pub.publish("a", b"a%d" % number)
        for number in range(20):
            await pub.publish("b", b"b%d" % number)
        car = await node.client("car", receive_maximum=4)
        await car.subscribe("$queue/a")
        await car.subscribe("$queue/b")
        seen = await car.drain(220)
        assert [b"a%d" % number for number in range(200)] == [p for p in seen if p.startswith(b"a")]
        assert [b"b%d" % number for number in range(20)] == [p for p in seen if p.startswith(b"b")]
        assert seen.index(b"b0") < 120, "the other one is not drained first"


async def test_a_message_may_belong_to_several_queues(store: Store) -> None:
    """It is in each of them once, however many filters match."""
    many = {"a": {"topics": ["x/#", "x/+"]}, "b": {"topics": ["x/y"]}, "c": {"topics": ["z"]}}
    async with Node.on(store, queue=many) as node:
        pub = await node.client("pub")
        await pub.publish("x/y", b"1")
        assert ([b"1"], [b"1"], []) == tuple([await node.stored(name) for name in "abc"])


async def test_attempts_survive_the_process(store: Store) -> None:
    """What was in flight comes again, and is counted; at last it is a dead letter that tells of it."""
    config = {"dead": {}, "q": {"topics": ["q/#"], "max_attempts": 2, "dead_letter": "dead"}}
    node = Node(store)
    node.loaded = await node.plugins.load("queues", {"queue": config})
    pub = await node.client("pub")
    await pub.publish("q/a", b"x")
    car = await node.client("car")
    await car.subscribe("$queue/q")
    await car.take(1)
    await _marked(node, 1)
    await node.kill()
    async with Node.on(store, queue=config) as second:
        car = await second.client("car")
        await car.subscribe("$queue/q")
        (message,) = await car.take(1)
        car.ack(message, reason=REFUSED)
        await second.emptied()
        (letter,) = await second.queues.read("dead", 0, 10)
        assert ("q/a", b"x", "2", "q") == (
            letter.topic,
            letter.payload,
            letter.properties["attempts"],
            letter.properties["dead-queue"],
        )
        await car.subscribe("$queue/dead")
        (message,) = await car.take(1)
        told = dict(message.properties.user_properties)
        assert ("2", "q", "refused with 0x83") == (told["dead-attempts"], told["dead-queue"], told["dead-reason"])
        assert [["car", "refused with 0x83"]] == [attempt[1:] for attempt in json.loads(told["dead-history"])]
        await until(lambda: second.counters["dead_lettered"] == 1)


async def _marked(node: Node, attempts: int) -> None:
    """Wait until the store knows how often the first message was sent."""
    while True:
        (entry,) = await node.store.mailboxes.read("queue:q", 0, 1, node.hub.now())
        if entry.mark == attempts:
            return
        await asyncio.sleep(0.002)


async def test_a_message_that_no_consumer_can_take_is_given_up(store: Store) -> None:
    """One whose packets may not be that large has not acknowledged it; one that may gets it."""
    config = {"dead": {}, "q": {"topics": ["q/#"], "max_attempts": 2, "dead_letter": "dead", "redispatch_delay": 0.01}}
    async with Node.on(store, queue=config) as node:
        pub, small = await node.client("pub"), await node.client("small", maximum_packet_size=100)
        await pub.publish("q/a", bytes(1000))
        await small.subscribe("$queue/q")
        await until(lambda: node.counters["dead_lettered"])
        (letter,) = await node.queues.read("dead", 0, 10)
        assert "larger than the consumer takes" == letter.properties["dead-reason"]
        large = await node.client("large")
        await large.subscribe("$queue/q")
        await pub.publish("q/a", bytes(2000))
        assert [bytes(2000)] == await large.drain(1)
        assert [] == await small.quiet()


async def test_a_dead_letter_waits_for_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays where it is as long as the dead-letter queue is full, and holds up nobody."""
    monkeypatch.setattr("motorcade.plugins.queues.queue.GRAVE_RETRY", 0.01)
    config = {
        "dead": {"topics": ["dead"], "max_messages": 1},
        "q": {"topics": ["q/#"], "max_attempts": 1, "dead_letter": "dead"},
    }
    async with Node.on(store, queue=config) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("dead", b"old")
        await pub.publish("q/a", b"x")
        await pub.publish("q/a", b"y")
        await car.subscribe("$queue/q")
        bad, good = await car.take(2)
        car.ack(bad, reason=REFUSED)
        car.ack(good)
        await until(lambda: node.counters["dead_letter_refused"] > 1)
        await node.comes_to([b"x"])
        await car.subscribe("$queue/dead")
        assert [b"old", b"x"] == await car.drain(2)
        await node.emptied()


# -- bounds


async def test_a_full_queue_refuses(store: Store) -> None:
    """QoS 1 hears it, QoS 0 is counted; there is room again when something is consumed."""
    async with Node.on(store, queue=queue(max_messages=2)) as node:
        pub, car = await node.client("pub"), await node.client("car")
        assert [0, 0, QUOTA] == [await pub.publish("q/a", b"%d" % number) for number in range(3)]
        await pub.publish("q/a", b"0", 0)
        assert QUOTA == await pub.publish("q/a", b"2", 2)
        await until(lambda: node.counters["refused_full"] == 3)
        await car.subscribe("$queue/q")
        assert [b"0", b"1"] == await car.drain(2)
        await node.emptied()
        assert 0 == await pub.publish("q/a", b"4")
        assert [b"4"] == await car.drain(1)


async def test_a_message_is_in_all_queues_or_in_none(store: Store) -> None:
    many = {"a": {"topics": ["x"], "max_messages": 1}, "b": {"topics": ["x"]}}
    async with Node.on(store, queue=many) as node:
        pub = await node.client("pub")
        assert [0, QUOTA] == [await pub.publish("x", b"%d" % number) for number in range(2)]
        await pub.publish("x", b"2", 0)
        await until(lambda: node.counters["appended"] == 3)
        assert [b"0", b"2"] == await node.stored("b"), "nobody hears of QoS 0, so it goes where there is room"


async def test_expired_messages_make_room(store: Store) -> None:
    """They leave the store without a word."""
    async with Node.on(store, queue=queue(max_messages=1)) as node:
        pub = await node.client("pub")
        assert 0 == await pub.publish("q/a", b"0", properties=Properties(message_expiry=500))
        assert QUOTA == await pub.publish("q/a", b"1")
        node.hub.ahead = 1000
        await store.sweep(node.hub.now(), 100)
        while await pub.publish("q/a", b"2"):  # noqa: ASYNC110 - which makes the queue look how large it is
            await asyncio.sleep(0.01)
        assert [b"2"] == await node.stored()


async def test_a_full_queue_drops_the_oldest(store: Store) -> None:
    """One that a consumer holds is not among them: if it fails, another one gets it."""
    async with Node.on(store, queue=queue(max_messages=3, overflow="drop_oldest")) as node:
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=1)
        await car.subscribe("$queue/q")
        await pub.publish("q/a", b"0")
        (held,) = await car.take(1)
        for number in range(1, 6):
            await pub.publish("q/a", b"%d" % number)
        assert [b"0", b"4", b"5"] == await node.stored()
        assert b"0" == held.payload and 3 == node.counters["dropped"]
        car.close()
        other = await node.client("other", receive_maximum=1)
        await other.subscribe("$queue/q")
        assert [b"0", b"4", b"5"] == await other.drain(3)
        await node.emptied()


async def test_the_lowest_level_is_dropped_first(store: Store) -> None:
    options = queue(max_messages=4, overflow="drop_oldest", priorities=3)
    async with Node.on(store, queue=options) as node:
        pub = await node.client("pub")
        for number in range(4):
            await pub.publish("q/a", b"low%d" % number)
        for number in range(3):
            await pub.publish("q/a", b"high%d" % number, properties=Properties(user_properties=(("priority", "9"),)))
        await until(lambda: node.counters["dropped"] == 3)
        assert [b"high0", b"high1", b"high2", b"low3"] == await node.stored()


async def test_what_consumers_have_is_looked_for_only_in_a_full_queue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs as much as there are messages in flight. What is known of the size may be too little, once."""
    looked: list[int] = []
    in_flight_to = Dispatcher.in_flight_to

    def look(dispatcher: Dispatcher, level: int) -> int:
        looked.append(level)
        return in_flight_to(dispatcher, level)

    monkeypatch.setattr(Dispatcher, "in_flight_to", look)
    async with Node.on(store, queue=queue(max_messages=3, overflow="drop_oldest")) as node:
        pub = await node.client("pub")
        for number in range(3):
            await pub.publish("q/a", b"%d" % number)
        assert not looked
        await pub.publish("q/a", b"3")
        assert looked and [b"1", b"2", b"3"] == await node.stored()
        (found,) = node.plugin._queues
        found._entries = 0
        await pub.publish("q/a", b"4")
        await until(lambda: found._entries > 3)
        for number in range(5, 7):
            await pub.publish("q/a", b"%d" % number)
        assert [b"4", b"5", b"6"] == await node.stored()


async def test_what_goes_to_a_consumer_while_a_queue_is_trimmed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the consumer fails, another one gets it."""
    store = MemoryStore()
    await store.open()
    read, reading, go = store.mailboxes.read, asyncio.Event(), asyncio.Event()
    options = queue(max_messages=2, overflow="drop_oldest", priorities=2)
    async with Node.on(store, queue=options) as node:
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=1)
        for number in range(2):
            await pub.publish("q/a", b"low%d" % number)

        async def slow(owner: str, after: int, limit: int, now: float) -> list[Entry]:
            entries = await read(owner, after, limit, now)
            if not reading.is_set():
                reading.set()
                await go.wait()
            return entries

        monkeypatch.setattr(store.mailboxes, "read", slow)
        await pub.publish("q/a", b"high", properties=Properties(user_properties=(("priority", "9"),)))
        await reading.wait()
        await car.subscribe("$queue/q")
        (first,) = await car.take(1)
        car.ack(first)
        (held,) = await car.take(1)
        go.set()
        await until(lambda: not next(iter(node.plugin._queues))._trimming)
        assert [bytes(held.payload)] == [one for one in await node.stored() if one == bytes(held.payload)]


async def test_a_message_larger_than_the_queue_is_refused(store: Store) -> None:
    for overflow in ("refuse", "drop_oldest"):
        async with Node.on(store, queue=queue(max_bytes=500, overflow=overflow)) as node:
            assert QUOTA == await (await node.client("pub")).publish("q/a", bytes(1000))


async def test_what_waits_for_the_store_is_bounded() -> None:
    """A store that does not answer is not given everything at once."""
    store = TroubledStore()
    await store.open()
    store.open_up.clear()
    async with Node.on(store, queue=QUEUE, max_pending=5) as node:
        pub = await node.client("pub")
        for number in range(8):
            pub.send("q/a", b"%d" % number, 0)
        await until(lambda: node.counters["refused_pending"] == 3)
        assert QUOTA == await pub.publish("q/a", b"8")
        store.open_up.set()
        await until(lambda: node.counters["appended"] == 5)


# -- a store that fails


class TroubledBatch(MemoryBatch):
    """Waits until it may write, and fails if it is to."""

    def __init__(self, store: TroubledStore) -> None:
        super().__init__(store)
        self._troubled = store

    async def commit(self) -> list[Appended]:
        await self._troubled.open_up.wait()
        if self._troubled.errors:
            error, written = self._troubled.errors.pop(0)
            if written:
                await super().commit()
            raise error
        return await super().commit()


class TroubledStore(MemoryStore):
    """Its next batches fail with `errors`, written nevertheless or not."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[tuple[StoreError, bool]] = []
        self.open_up = asyncio.Event()
        self.open_up.set()

    def batch(self) -> MemoryBatch:
        return TroubledBatch(self)


async def troubled() -> TroubledStore:
    store = TroubledStore()
    await store.open()
    return store


async def test_a_store_that_is_full_refuses_the_publisher() -> None:
    """And nothing stays behind that would count against the queue."""
    store = await troubled()
    async with Node.on(store, queue=queue(max_messages=1)) as node:
        pub = await node.client("pub")
        store.errors = [(StoreFullError("no room"), False)]
        assert QUOTA == await pub.publish("q/a", b"1")
        assert 0 == await pub.publish("q/a", b"2")
        assert [b"2"] == await node.stored()


async def test_an_unknown_outcome_closes_the_connection() -> None:
    """The publisher sends it again; with QoS 1 it may be there twice then, and never not at all."""
    store = await troubled()
    async with Node.on(store, queue=QUEUE) as node:
        pub = await node.client("pub")
        store.errors = [(StoreError("the answer is lost"), True)]
        pub.send("q/a", b"1")
        await until(lambda: not pub.peer.open)
        assert [b"1"] == await node.stored()
        again = await node.client("pub")
        assert 0 == await again.publish("q/a", b"1")
        assert [b"1", b"1"] == await node.stored()


async def test_a_repetition_with_the_same_guid_is_not_doubled(store: Store) -> None:
    """QoS 2: the broker publishes again under the same GUID what may have been stored."""
    async with Node.on(store, queue=QUEUE) as node:
        message = Message("q/a", b"once", 2, publisher="pub", guid=bytes(16), timestamp=node.hub.now())
        for _ in range(2):
            chain = node.broker.hooks.publish_chains("q/a")[0]
            assert chain is not None
            copy = replace(message, headers={})
            assert copy is chain.fold(None, acc=copy)
            for done in cast("list[asyncio.Future[None]]", copy.headers[AFTER]):
                await done
        assert [b"once"] == await node.stored()


async def test_acknowledgements_that_fail_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile nobody gets the message again."""
    monkeypatch.setattr("motorcade.plugins.queues.writer.RETRY", 0.01)
    store = await troubled()
    async with Node.on(store, queue=QUEUE) as node:
        pub, car = await node.client("pub"), await node.client("car")
        for number in range(3):
            await pub.publish("q/a", b"%d" % number)
        working, failed = store.mailboxes.acknowledge, 0

        async def failing(owner: str, positions: Iterable[int]) -> int:
            nonlocal failed
            failed += 1
            if failed < 4:
                raise StoreError("away")
            return await working(owner, positions)

        monkeypatch.setattr(store.mailboxes, "acknowledge", failing)
        await car.subscribe("$queue/q")
        await car.drain(3)
        car.close()
        other = await node.client("other")
        await other.subscribe("$queue/q")
        await node.emptied()
        assert [] == await other.quiet()


async def test_a_dead_letter_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the store did not say that it was moved."""
    monkeypatch.setattr("motorcade.plugins.queues.writer.RETRY", 0.01)
    monkeypatch.setattr("motorcade.plugins.queues.queue.RETRY", 0.01)
    store = await troubled()
    config = {"dead": {}, "q": {"topics": ["q/#"], "max_attempts": 1, "dead_letter": "dead"}}
    async with Node.on(store, queue=config) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("q/a", b"x")
        await car.subscribe("$queue/q")
        (message,) = await car.take(1)
        await _marked(node, 1)
        store.errors = [(StoreError("the answer is lost"), True), (StoreError("away"), False)]
        car.ack(message, reason=REFUSED)
        await until(lambda: node.counters["dead_lettered"] == 1)
        assert ([], [b"x"]) == (await node.stored(), await node.stored("dead"))


async def test_reading_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motorcade.plugins.queues.queue.RETRY", 0.01)
    store = await troubled()
    async with Node.on(store, queue=QUEUE) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("q/a", b"x")
        working, failed = store.mailboxes.read, 0

        async def failing(owner: str, after: int, limit: int, now: float) -> list[Entry]:
            nonlocal failed
            failed += 1
            if failed < 4:
                raise StoreError("away")
            return await working(owner, after, limit, now)

        monkeypatch.setattr(store.mailboxes, "read", failing)
        await car.subscribe("$queue/q")
        assert [b"x"] == await car.drain(1)


async def test_a_defect_in_one_queue_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is stored; the publisher is answered, and the next message is taken."""
    store = await troubled()
    async with Node.on(store, queue=QUEUE) as node:
        pub = await node.client("pub")
        with monkeypatch.context() as broken:
            broken.setattr("motorcade.plugins.queues.queue.Queue.appended", lambda *_: 1 / 0)
            assert 0 == await pub.publish("q/a", b"1")
        assert 0 == await pub.publish("q/a", b"2")
        assert [b"1", b"2"] == await node.stored()


async def test_what_cannot_be_read_holds_up_nobody(store: Store) -> None:
    """It is counted, stays where it is, and an operator sees it."""
    async with Node.on(store, queue=QUEUE) as node:
        await store.mailboxes.append(["queue:q"], Draft(b"damaged", b"?"), node.hub.now())
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("q/a", b"x")
        await car.subscribe("$queue/q")
        assert [b"x"] == await car.drain(1)
        assert 1 == node.counters["unreadable"]
        (found,) = [found for found in await node.queues.read("q", 0, 10) if found.payload == b"?"]
        assert found.properties["error"]


# -- last value


async def test_of_a_key_only_the_newest_is_kept(store: Store) -> None:
    async with Node.on(store, queue=queue(kind="last_value")) as node:
        pub, car = await node.client("pub"), await node.client("car")
        for number in range(100):
            await pub.publish(f"q/{number % 10}", b"%d" % number)
        await car.subscribe("$queue/q")
        assert [b"%d" % number for number in range(90, 100)] == await car.drain(10)
        await node.emptied()
        assert 90 == node.counters["replaced"]


@pytest.mark.parametrize(
    ("key", "kept"), [("publisher", [b"2"]), ("property:vin", [b"0", b"2"]), ("topic", [b"0", b"1", b"2"])]
)
async def test_keys(store: Store, key: str, kept: list[bytes]) -> None:
    """Of a message without the property nothing is known, so nothing replaces it."""
    async with Node.on(store, queue=queue(kind="last_value", key=key)) as node:
        pub = await node.client("pub")
        await pub.publish("q/0", b"0")
        for number in (1, 2):
            await pub.publish(f"q/{number}", b"%d" % number, properties=Properties(user_properties=(("vin", "V"),)))
        assert kept == await node.stored()


async def test_a_value_in_flight_is_superseded_and_one_that_was_not_sent_replaced(store: Store) -> None:
    """The acknowledgement of an old value does not remove the new one."""
    async with Node.on(store, queue=queue(kind="last_value")) as node:
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=1)
        await car.subscribe("$queue/q")
        await pub.publish("q/a", b"a1")
        (first,) = await car.take(1)
        for payload in (b"b1", b"b2", b"b3"):
            await pub.publish("q/b", payload)
        await pub.publish("q/a", b"a2")
        car.ack(first)
        assert [b"b3", b"a2"] == await car.drain(2)
        await node.emptied()


async def test_a_full_queue_takes_newer_values(store: Store) -> None:
    """But no further keys."""
    async with Node.on(store, queue=queue(kind="last_value", max_messages=2)) as node:
        pub = await node.client("pub")
        topics = ["q/a", "q/b", "q/a", "q/c", "q/b"]
        assert [0, 0, 0, QUOTA, 0] == [await pub.publish(topic, topic.encode()) for topic in topics]
        await until(lambda: not node.plugin._remover.pending)
        assert [b"q/a", b"q/b"] == await node.stored()


# -- priorities and age


async def test_priorities(store: Store) -> None:
    """Higher ones first; what is no number, or none at all, has none; one too high is the highest."""
    async with Node.on(store, queue=queue(priorities=3)) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("q/a", b"plain")
        for text in ("1", "x", "-1", "2", "77", "", "1"):
            await pub.publish("q/a", text.encode(), properties=Properties(user_properties=(("priority", text),)))
        wanted = [b"2", b"77", b"1", b"1", b"plain", b"x", b"-1", b""]
        assert wanted == await node.stored()
        positions = [found.position for found in await node.queues.read("q", 0, 100)]
        for number, position in enumerate(positions):
            rest = await node.queues.read("q", position, 100)
            assert wanted[number + 1 :] == [found.payload for found in rest]
        await car.subscribe("$queue/q")
        assert wanted == await car.drain(8)
        await node.emptied()


async def test_what_is_too_old_is_not_given(store: Store) -> None:
    """By its own expiry or the retention of the queue; the sweep removes it, be it marked."""
    async with Node.on(store, queue=queue(retention=1000, ack_timeout=0)) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("q/a", b"0", properties=Properties(message_expiry=100))
        await pub.publish("q/a", b"1")
        await car.subscribe("$queue/q")
        await car.take(2)
        await _marked(node, 1)
        car.close()
        await until(lambda: not node.plugin._queues.get("q").dispatcher.consumers)  # type: ignore[union-attr]
        node.hub.ahead = 200
        assert [b"1"] == await node.stored()
        node.hub.ahead = 1100
        await pub.publish("q/a", b"2")
        assert [b"2"] == await node.stored()
        found = node.plugin._queues.get("q")
        assert found is not None
        assert 3 == await found.sweep(node.hub.now(), 10)
        assert 1 == (await store.mailboxes.info("queue:q")).entries
        assert 2 == node.counters["expired"]
        other = await node.client("other")
        await other.subscribe("$queue/q")
        assert [b"2"] == await other.drain(1)


async def test_qos_2_is_appended_once(store: Store) -> None:
    async with Node.on(store, queue=QUEUE) as node:
        pub = await node.client("pub")
        assert 0 == await pub.publish("q/a", b"x", 2)
        pub.peer.send(Publish("q/a", b"x", 2, dup=True, packet_id=1), Pubrel(1))
        await pub.expect(Pubcomp)
        assert [b"x"] == await node.stored()


# -- who may


@pytest.mark.parametrize(
    ("filter_", "reason"),
    [
        ("$queue/q", 1),
        ("$queue/not-there-yet", 1),
        ("$queue/a/b", 0x8F),
        ("$queue/+", 0x8F),
        ("$queue/#", 0x8F),
        ("$queue/", 0x8F),
        ("$queue", 0x8F),
        ("$queue/-x", 0x8F),
        ("$queue/" + "x" * 65, 0x8F),
        ("$share/g/$queue/q", 0x9E),
        ("$queues/q", 2),
        ("a/$queue/q", 2),
    ],
)
async def test_subscribing(store: Store, filter_: str, reason: int) -> None:
    async with Node.on(store, queue=QUEUE) as node:
        car = await node.client("car")
        answer = await car.subscribe(filter_, 2)
        assert (reason,) == tuple(answer.reasons)
        told = answer.properties.reason_string or ""
        assert bool(told) == (reason > 2 or "not-there" in filter_)


@pytest.mark.parametrize("topic", ["$queue/q", "$queue/a/b", "$queue"])
async def test_nobody_publishes_to_a_queue_directly(store: Store, topic: str) -> None:
    async with Node.on(store, queue=QUEUE) as node:
        pub = await node.client("pub")
        assert 0x90 == await pub.publish(topic, b"x")


async def test_a_queue_without_topics_costs_publishers_nothing(store: Store) -> None:
    async with Node.on(store, queue={"dead": {}, "q": {"topics": ["q"], "dead_letter": "dead"}}) as node:
        assert (None, None) == node.broker.hooks.publish_chains("other")
        assert None is not node.broker.hooks.publish_chains("q")[0]


async def test_nothing_happens_while_nothing_happens(store: Store) -> None:
    """Consumers that wait set no timers, and nobody looks into the store for them."""
    async with Node.on(store, queue=QUEUE) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await car.subscribe("$queue/q")
        await pub.publish("q/a", b"x")
        await car.drain(1)
        await node.emptied()
        found = node.plugin._queues.get("q")
        assert found is not None
        node.hub.ahead = 31
        found._tick()
        assert None is found._timer
        assert {"queues.append", "queues.remove", "queues.sweep"} == {
            task.get_name() for task in node.loaded.context.tasks
        }


async def test_what_a_broken_source_had_in_flight_hangs_on_nobody(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The carrier takes it back while there is no source to hear so; it comes again at once, not after ack_timeout."""
    async with Node.on(store, queue=queue(ack_timeout=0)) as node:
        pub, car = await node.client("pub"), await node.client("car", session_expiry=100, receive_maximum=3)
        await car.subscribe("$queue/q")
        for number in range(6):
            await pub.publish("q/a", b"%d" % number)
        first, *_ = await car.take(3)
        kind = next(kind for kind in node.broker.plane.shared.sources.kinds if kind.name == "queue")
        with monkeypatch.context() as broken:
            broken.setattr(QueueSource, "delivered_run", lambda self, given, ack: 1 // 0)
            car.ack(first)
            await until(lambda: kind.counters["recreated"], "the source is to be made anew")
            car.close()
        car = Client(node.broker, "car", 5, clean_start=False, properties=Properties(session_expiry=100))
        assert (await car.expect(Connack)).session_present
        left = {b"1", b"2", b"3", b"4", b"5"}  # what became of the first one, nobody has heard
        while left:
            left -= set(await car.drain(1))
        await node.emptied()
        assert 1 == kind.counters["failed"]
        kind.counters["failed"] = 0  # as it was meant to be
