"""Compacted queues through a real broker, over both engines that live in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motorcade.broker.lane import InstanceFeed, Timer
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.declared import BadOptionsError, UnknownError
from motorcade.mqtt.packets import Puback, Publish, Pubrec, Pubrel
from motorcade.mqtt.properties import Properties
from motorcade.plugins.ecq.queue import Queue
from motorcade.plugins.ecq.tables import EXCLUSIVE as ECQ
from motorcade.storage.memory import MemoryBatch, MemoryStore
from motorcade.storage.ports import Appended, Draft, Store, StoreError, StoreFullError
from tests.unit.ecq.node import EXCLUSIVE, SHARED, Client, Node, numbers, until, values

QUOTA = 0x97


@pytest.fixture
async def memory() -> Store:
    """For what does not depend on the engine."""
    made = MemoryStore()
    await made.open()
    return made


async def consume(node: Node, client_id: str = "car", filter_: str = "", **properties: Any) -> Client:
    client = await node.client(client_id, **properties)
    answer = await client.subscribe(filter_ or f"$ECQ/{client_id}/#")
    assert answer.reasons == (1,)
    return client


# -- appending and consuming


async def test_the_last_value_of_each_key_comes_in_order(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"1"), ("b/c", b"2"), ("a", b"3"), ("d", b""))
        car = await consume(node)
        messages = await car.take(3)
        assert [("b/c", b"2"), ("a", b"3"), ("d", b"")] == values(messages)
        assert [2, 3, 4] == numbers(messages)
        assert {1} == {message.qos for message in messages}
        car.ack(*messages)
        await until(lambda: node.counters["acknowledged"] == 3)
        assert 4 == await node.progress("car")
        assert [(2, "b/c", b"2"), (3, "a", b"3"), (4, "d", b"")] == await node.stored("car"), "all is kept"


async def test_who_is_connected_gets_it_at_once_and_without_reading(store: Store) -> None:
    async with Node.on(store) as node:
        car = await consume(node)
        await until(lambda: _standing(node))
        pub = await node.client("pub")
        reads = 0
        read = store.mailboxes.read

        async def counted(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return await read(*args)

        store.mailboxes.read = counted  # type: ignore[method-assign,assignment]
        try:
            for number in range(20):
                assert 0 == await pub.publish(f"$ECQ/w/car/k{number}", b"%d" % number)
            messages = await car.take(20)
        finally:
            store.mailboxes.read = read  # type: ignore[method-assign]
        assert [*range(1, 21)] == numbers(messages)
        assert 0 == reads


def _standing(node: Node) -> bool:
    return all(source._standing for queue in node.plugin.queues for source in queue.consumers)  # type: ignore[attr-defined]


async def test_what_the_producer_says_is_kept(store: Store) -> None:
    """But for a sequence number of its own making; and the QoS is 1, whatever it was."""
    said = Properties(
        content_type="text/plain",
        response_topic="answer",
        correlation_data=b"c",
        payload_format=1,
        message_expiry=1000,
        user_properties=(("x", "1"), ("ecq-seqno", "4711"), ("x", "2")),
    )
    async with Node.on(store) as node:
        pub = await node.client("pub")
        await pub.publish("$ECQ/w/car/k", b"v", 1, said)
        await pub.publish("$ECQ/w/car/l", bytes(10_000), 1, said)
        car = await consume(node)
        for message, number in zip(await car.take(2), ("1", "2"), strict=True):
            told = message.properties
            assert (("x", "1"), ("x", "2"), ("ecq-seqno", number)) == told.user_properties
            assert ("text/plain", "answer", b"c", 1) == (
                told.content_type,
                told.response_topic,
                told.correlation_data,
                told.payload_format,
            )
            assert told.message_expiry is not None and 900 < told.message_expiry <= 1000


async def test_nobody_else_gets_it(store: Store) -> None:
    """Not by a wildcard."""
    async with Node.on(store) as node:
        other = await node.client("other")
        await other.subscribe("#")
        await other.subscribe("+/w/#")
        pub = await node.client("pub")
        assert 0 == await pub.publish("$ECQ/w/car/k", b"v")
        assert [] == await other.quiet()


@pytest.mark.parametrize("version", [4, 5])
async def test_more_than_fits_the_window(store: Store, version: int) -> None:
    async with Node.on(store) as node:
        await node.fill("car", *((f"k{number}", b"%d" % number) for number in range(300)))
        car = await node.client("car", version)
        await car.subscribe("$ECQ/car/#")
        assert [b"%d" % number for number in range(300)] == await car.drain(300)
        await until(lambda: node.counters["acknowledged"] == 300)
        assert 300 == await node.progress("car")


async def test_exactly_once_into_the_queue(store: Store) -> None:
    """QoS 2: the packet that comes again is the same message."""
    async with Node.on(store) as node:
        pub = await node.client("pub")
        pub.peer.send(Publish("$ECQ/w/car/k", b"v", 2, packet_id=9))
        assert 0 == (await pub.expect(Pubrec)).reason
        pub.peer.send(Publish("$ECQ/w/car/k", b"v", 2, dup=True, packet_id=9))
        assert 0 == (await pub.expect(Pubrec)).reason
        pub.peer.send(Pubrel(9))
        assert [(1, "k", b"v")] == await node.stored("car")


async def test_plugins_of_the_node_may_append(store: Store) -> None:
    async with Node.on(store) as node:
        await node.broker.broker.publish(Message("$ECQ/w/car/k", b"v", 1))
        car = await consume(node)
        assert [("k", b"v")] == values(await car.take(1))


# -- progress


async def test_progress_waits_for_the_oldest(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", *((key, b"v") for key in "abcd"))
        car = await consume(node)
        messages = await car.take(4)
        car.ack(messages[1], messages[3])
        await until(lambda: node.counters["acknowledged"] == 2)
        assert 0 == await node.progress("car")
        car.ack(messages[0])
        await until(lambda: node.counters["acknowledged"] == 3)
        assert 2 == await node.progress("car")
        car.close()
        car = await consume(node)
        assert [3, 4] == numbers(await car.take(2)), "what was acknowledged beyond it comes again"


async def test_progress_survives_a_clean_end_and_is_there_at_once(store: Store) -> None:
    node = await Node.begin(store, progress_interval=1000.0)
    await node.fill("car", ("a", b"1"), ("b", b"2"), ("c", b"3"))
    car = await consume(node)
    messages = await car.take(3)
    car.ack(*messages[:2])
    await until(lambda: node.counters["acknowledged"] == 2)
    await node.stop()
    async with Node.on(store) as second:
        car = await consume(second)
        assert [3] == numbers(await car.take(1))


async def test_a_killed_node_forgets_no_more_than_an_interval(store: Store) -> None:
    node = await Node.begin(store, progress_interval=0.005)
    await node.fill("car", ("a", b"1"), ("b", b"2"), ("c", b"3"))
    car = await consume(node)
    messages = await car.take(3)
    car.ack(*messages[:2])
    await until(lambda: node.counters["progress_written"])
    await node.kill()
    async with Node.on(store) as second:
        await second.fill("car", ("d", b"4"))
        car = await consume(second)
        assert [3, 4] == numbers(await car.take(2))


async def test_what_comes_back_at_once_finds_its_progress(store: Store) -> None:
    """Though the store is slow in taking it."""
    async with Node.on(store, progress_interval=1000.0) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"))
        car = await consume(node)
        car.ack(*await car.take(2))
        await until(lambda: node.counters["acknowledged"] == 2)
        car.close()
        car = await consume(node)
        await node.fill("car", ("c", b"3"))
        assert [3] == numbers(await car.take(1))


async def test_a_newer_value_supersedes_what_was_in_flight(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"old"), ("b", b"1"))
        car = await consume(node, session_expiry=100)
        messages = await car.take(2)
        car.close()
        await node.fill("car", ("a", b"new"))
        car = Client(node.broker, "car", 5, clean_start=False, properties=Properties(session_expiry=100))
        assert [("b", b"1"), ("a", b"new")] == values(await car.take(2)), "without subscribing again"
        assert not [message for message in messages if message.dup]


async def test_progress_passes_what_was_replaced(store: Store) -> None:
    """Once the consumer is away: until then it may still acknowledge it."""
    async with Node.on(store) as node:
        car = await consume(node)
        await node.fill("car", ("a", b"1"), ("a", b"2"))
        messages = await car.take(2)
        car.ack(messages[1])
        await until(lambda: node.counters["acknowledged"] == 1)
        assert 0 == await node.progress("car")
        car.close()
        await until(lambda: not node.plugin.queues.consumed())
        assert 2 == await node.progress("car")


# -- reading beside appending


async def test_what_is_appended_while_it_reads_is_not_missed(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"1"))
        read, letting = store.mailboxes.read, asyncio.Event()
        waiting = 0

        async def slow(*args: Any) -> Any:
            nonlocal waiting
            found = await read(*args)
            waiting += 1
            await letting.wait()
            return found

        store.mailboxes.read = slow  # type: ignore[method-assign,assignment]
        try:
            car = await consume(node)
            await until(lambda: waiting)
            await node.fill("car", ("b", b"2"), ("a", b"3"))
            letting.set()
            assert [1, 2, 3] == numbers(await car.take(3))
        finally:
            store.mailboxes.read = read  # type: ignore[method-assign]


async def test_nobody_is_given_what_the_node_has_not_heard_of(store: Store) -> None:
    """It may be one too many, and go again; if it stays, it comes in its place."""
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"))
        (entry, _) = await store.mailboxes.read("ecq:car", 0, 2, 0.0)
        await store.mailboxes.append(["ecq:car"], Draft(entry.body, key=b"z"), node.hub.now())
        car = await consume(node)
        assert [1, 2] == numbers(await car.take(2))
        assert [] == await car.quiet()
        await node.fill("car", ("c", b"4"))
        assert [3, 4] == numbers(await car.take(2))


async def test_nobody_is_given_what_is_one_too_many(store: Store) -> None:
    """Though it could not be removed yet."""
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"), ("c", b"3"))
        node.plugin.queues.open(ECQ, "car").doomed.add(2)
        car = await consume(node)
        assert [1, 3] == numbers(await car.take(2))
        assert [1, 3] == [number for number, _, _ in await node.stored("car")]


# -- refusals of consumers


async def test_what_is_refused_comes_again_before_anything_newer(store: Store) -> None:
    async with Node.on(store, retry_delay=0.01) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"))
        car = await consume(node)
        first, second = await car.take(2)
        car.ack(first, reason=0x83)
        await until(lambda: node.counters["refused"] == 1)
        await node.fill("car", ("c", b"3"))
        assert [1, 3] == numbers(await car.take(2))
        car.ack(second)
        assert 1 == node.counters["given_again"]


async def test_what_was_refused_and_replaced_does_not_come_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes until the newer value is stored."""
    timers: list[Timer] = []

    def later(feed: InstanceFeed, _delay: float, what: object) -> Timer:
        timers.append(Timer(feed, what))
        return timers[-1]

    monkeypatch.setattr(InstanceFeed, "send_later", later)
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"old"))
        car = await consume(node)
        car.ack(*await car.take(1), reason=0x83)
        await until(lambda: node.counters["refused"] == 1)
        await node.fill("car", ("a", b"new"))
        assert 1 == len(timers)
        timers[0].over()
        assert [("a", b"new")] == values(await car.take(1))
        assert [] == [packet for packet in await car.quiet() if packet.payload == b"old"]


async def test_what_is_refused_too_often_is_passed_over_and_kept(store: Store) -> None:
    async with Node.on(store, retry_delay=0.005, max_attempts=3) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"))
        car = await consume(node)
        message, other = await car.take(2)
        for _ in range(2):
            car.ack(message, reason=0x97)
            (message,) = await car.take(1)
            assert [1] == numbers([message])
        car.ack(message, reason=0x97)
        assert [] == await car.quiet()
        car.ack(other)
        await until(lambda: node.counters["acknowledged"] == 1)
        assert (1, 3, 2) == (node.counters["given_up"], node.counters["refused"], await node.progress("car"))
        assert 2 == len(await node.stored("car"))


async def test_what_a_client_cannot_take_is_passed_over(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", ("a", bytes(1000)), ("b", b"2"))
        car = await consume(node, maximum_packet_size=200)
        (message,) = await car.take(1)
        car.ack(message)
        assert [2] == numbers([message])
        await until(lambda: node.counters["acknowledged"] == 1)
        assert (1, 2) == (node.counters["too_large"], await node.progress("car"))


# -- refusals of the plugin


@pytest.mark.parametrize(
    ("filter_", "qos", "reason"),
    [
        ("$ECQ/car/#", 0, 0x83),
        ("$ECQ/car/#", 2, 0x83),
        ("$ECQ/other/#", 1, 0x87),
        ("$ECQ/other/#", 0, 0x87),
        ("$ECQ/#", 1, 0x8F),
        ("$ECQ/+/#", 1, 0x8F),
        ("$ECQ/car", 1, 0x8F),
        ("$ECQ/car/k", 1, 0x8F),
        ("$ECQ/car/k/#", 1, 0x8F),
        ("$ECQ/car/+", 1, 0x8F),
        ("$ECQ/w/car/#", 1, 0x8F),
        ("$ECQ", 1, 0x8F),
        ("$share/g/$ECQ/car/#", 1, 0x9E),
        ("$SCQ/q/#", 0, 0x83),
        ("$SCQ/q/#", 2, 0x83),
        ("$SCQ/+/#", 1, 0x8F),
        ("$SCQ/w/#", 1, 0x8F),
        ("$SCQ/rewind/#", 1, 0x8F),
        (f"$SCQ/{'n' * 300}/#", 1, 0x8F),
        ("$share/g/$SCQ/q/#", 1, 0x9E),
    ],
)
async def test_subscriptions_that_are_refused(memory: Store, filter_: str, qos: int, reason: int) -> None:
    async with Node.on(memory) as node:
        car, old = await node.client("car"), await node.client("old", 4)
        answer = await car.subscribe(filter_, qos)
        assert (reason,) == answer.reasons
        assert answer.properties.reason_string
        if "car" not in filter_:
            assert (0x80,) == (await old.subscribe(filter_, qos)).reasons


async def test_others_are_not_concerned(store: Store) -> None:
    async with Node.on(store) as node:
        car = await node.client("car")
        for filter_ in ("$ECQX/a", "a/$ECQ/car/#", "#", "$share/g/a/$ECQ/#"):
            assert (1,) == (await car.subscribe(filter_)).reasons
        assert 0 == node.counters["refused_subscribe"]


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        ("$ECQ/w/car", 0x90),
        ("$ECQ/w/car/", 0x90),
        ("$ECQ/w//k", 0x90),
        ("$ECQ/car/k", 0x90),
        ("$ECQ/k", 0x90),
        ("$ECQ", 0x90),
        ("$SCQ/q/k", 0x90),
        ("$SCQ/w/w/k", 0x90),
        ("$SCQ/w/rewind/k", 0x90),
        (f"$ECQ/w/car/{'k' * 1025}", 0x90),
        (f"$ECQ/w/{'n' * 257}/k", 0x90),
        ("$ECQ/rewind/car", 0x87),
        ("$ECQ/rewind/pub/x", 0x90),
        ("$ECQ/rewind", 0x90),
    ],
)
async def test_publishes_that_are_refused(memory: Store, topic: str, reason: int) -> None:
    async with Node.on(memory) as node:
        pub, old = await node.client("pub"), await node.client("old", 4)
        pub.send(topic, b"1")
        answer = await pub.expect(Puback)
        assert reason == answer.reason
        assert answer.properties.reason_string
        old.send(topic, b"1")
        await until(lambda: not old.peer.open, "MQTT 3 is disconnected")
        assert [] == [queue for queue in node.plugin.queues if queue.coming]


# -- bounds


async def test_a_full_queue_takes_newer_values_only(store: Store) -> None:
    async with Node.on(store, max_messages=2) as node:
        car = await consume(node)
        pub = await node.client("pub")
        answers = [await pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "abcabd"]
        assert [0, 0, QUOTA, 0, 0, QUOTA] == answers
        assert ["a", "b"] == [key for _, key, _ in await node.stored("car")]
        assert ["a", "b", "a", "b"] == [key for key, _ in values(await car.take(4))]
        assert [] == await car.quiet()
        assert 2 == node.counters["refused_full"]
        assert 0 == await pub.publish("$ECQ/w/other/c", b"v"), "others are not concerned"


async def test_many_at_once_do_not_exceed_the_bound(store: Store) -> None:
    async with Node.on(store, max_messages=5) as node:
        pub = await node.client("pub")
        for number in range(40):
            pub.send(f"$ECQ/w/car/k{number}", b"v")
        answers = [(await pub.expect(Puback)).reason for _ in range(40)]
        assert [0] * 5 + [QUOTA] * 35 == answers
        assert [f"k{number}" for number in range(5)] == [key for _, key, _ in await node.stored("car")]


async def test_bytes_are_bounded_too(store: Store) -> None:
    async with Node.on(store, max_bytes=20_000) as node:
        pub = await node.client("pub")

        async def publish(key: str, size: int) -> int:
            return await pub.publish(f"$ECQ/w/car/{key}", bytes(size))

        assert [0, 0, 0] == [await publish(key, 6000) for key in "abc"]
        assert QUOTA == await publish("d", 6000)
        assert QUOTA == await publish("a", 12_000), "with the others it would be too much"
        assert 0 == await publish("a", 5000)
        assert QUOTA == await publish("e", 30_000), "it never fits"
        view = await node.show("car")
        assert (3, True) == (view.messages, view.bytes <= 20_000)
        assert 0 == await publish("b", 100)
        assert 0 == await publish("d", 5000), "now there is room"


async def test_or_the_oldest_goes(store: Store) -> None:
    async with Node.on(store, max_messages=2, overflow="drop_oldest") as node:
        pub = await node.client("pub")
        assert [0] * 4 == [await pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "abac"]
        assert ["a", "c"] == [key for _, key, _ in await node.stored("car")]
        assert 1 == node.counters["dropped"]


async def test_queues_are_bounded(store: Store) -> None:
    async with Node.on(store, max_queues=2) as node:
        pub = await node.client("pub")
        assert [0, 0, QUOTA, 0] == [await pub.publish(f"$ECQ/w/{name}/k", b"v") for name in ("a", "b", "c", "a")]
        assert QUOTA == await pub.publish("$SCQ/w/a/k", b"v")
        await node.service.delete(EXCLUSIVE, "a")
        assert 0 == await pub.publish("$ECQ/w/c/k", b"v")
    async with Node.on(store, max_queues=2) as second:
        await until(lambda: second.plugin.tools.appender.uncounted is None)
        pub = await second.client("pub")
        assert [QUOTA, 0] == [await pub.publish(f"$ECQ/w/{name}/k", b"v") for name in ("d", "b")]


async def test_what_waits_for_the_store_is_bounded() -> None:
    store = Sluggish()
    await store.open()
    async with Node.on(store, max_pending=3) as node:
        pub, old = await node.client("pub"), await node.client("old", 4)
        store.letting.clear()
        for number in range(5):
            pub.send(f"$ECQ/w/car/k{number}", b"v")
        old.send("$ECQ/w/car/z", b"v", 0)
        await until(lambda: node.counters["refused_pending"] == 3)
        assert old.peer.open, "who waits for no answer is not sent away"
        store.letting.set()
        assert [0, 0, 0, QUOTA, QUOTA] == [(await pub.expect(Puback)).reason for _ in range(5)]


class Sluggish(MemoryStore):
    """Commits when it is let, or fails as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.letting = asyncio.Event()
        self.letting.set()
        self.error: Exception | None = None
        self.written = False

    def batch(self) -> MemoryBatch:
        return SluggishBatch(self)


class SluggishBatch(MemoryBatch):
    def __init__(self, store: Sluggish) -> None:
        super().__init__(store)
        self._sluggish = store

    async def commit(self) -> list[Appended]:
        store = self._sluggish
        await store.letting.wait()
        if store.error is None:
            return await super().commit()
        if store.written:
            await super().commit()
        raise store.error


async def test_a_full_store_is_told_to_the_producer() -> None:
    store = Sluggish()
    await store.open()
    async with Node.on(store) as node:
        pub, old = await node.client("pub"), await node.client("old", 4)
        store.error = StoreFullError("no room on the disk")
        pub.send("$ECQ/w/car/k", b"v")
        answer = await pub.expect(Puback)
        assert (QUOTA, "no room on the disk") == (answer.reason, answer.properties.reason_string)
        old.send("$ECQ/w/car/k", b"v")
        await until(lambda: not old.peer.open)
        store.error = None
        assert 0 == await pub.publish("$ECQ/w/car/k", b"w")


@pytest.mark.parametrize("written", [False, True])
async def test_a_store_that_does_not_answer_ends_the_connection(written: bool) -> None:
    """What was written all the same reaches the consumer, in its place."""
    store = Sluggish()
    await store.open()
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"1"))
        car = await consume(node)
        assert [1] == numbers(await car.take(1))
        pub = await node.client("pub")
        store.error, store.written = StoreError("no answer"), written
        pub.send("$ECQ/w/car/b", b"2")
        await until(lambda: not pub.peer.open)
        store.error = None
        await node.fill("car", ("c", b"3"))
        assert ([2, 3] if written else [2]) == numbers(await car.take(2 if written else 1))


# -- rewinding


async def test_rewinding_to_a_number(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", *((key, b"v") for key in "abcd"), ("b", b"w"))
        car = await consume(node)
        car.ack(*await car.take(4))
        await until(lambda: node.counters["acknowledged"] == 4)
        preview = await node.service.rewind(EXCLUSIVE, "car", to=2, preview=True)
        assert (5, 1, 3, 3, 5, True) == (
            preview.before,
            preview.progress,
            preview.messages,
            preview.first,
            preview.last,
            preview.preview,
        )
        assert 5 == await node.progress("car")
        done = await node.service.rewind(EXCLUSIVE, "car", to=2)
        assert replace_preview(preview) == done
        messages = await car.take(3)
        assert [3, 4, 5] == numbers(messages)
        assert 1 == await node.progress("car")


def replace_preview(view: Any) -> Any:
    return type(view)(**{field: getattr(view, field) for field in view.__struct_fields__} | {"preview": False})


async def test_rewinding_while_messages_are_in_flight(store: Store) -> None:
    """What was sent before it does not count; what was not sent yet does not come."""
    async with Node.on(store) as node:
        await node.fill("car", *((f"k{number}", b"v") for number in range(10)))
        car = await consume(node, receive_maximum=4)
        before = await car.take(4)
        await node.service.rewind(EXCLUSIVE, "car", to=1)
        car.ack(*before)
        after = await car.take(4)
        assert [1, 2, 3, 4] == numbers(after)
        assert 0 == await node.progress("car")
        car.ack(*after)
        assert [5, 6, 7, 8] == numbers(await car.take(4))


async def test_rewinding_to_a_time(store: Store) -> None:
    async with Node.on(store, retention=0.0) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"))
        node.hub.ahead += 1000.0
        middle = node.hub.now()
        node.hub.ahead += 1000.0
        await node.fill("car", ("c", b"3"))
        car = await consume(node)
        car.ack(*await car.take(3))
        await until(lambda: node.counters["acknowledged"] == 3)
        assert (2, 1) == _told(await node.service.rewind(EXCLUSIVE, "car", since=middle))
        assert [3] == numbers(await car.take(1))
        assert (0, 3) == _told(await node.service.rewind(EXCLUSIVE, "car", since=middle - 5000.0))
        assert [1, 2, 3] == numbers(await car.take(3))
        assert (0, 3) == _told(await node.service.rewind(EXCLUSIVE, "car", since=node.hub.now() + 10.0)), (
            "never forward"
        )


def _told(view: Any) -> tuple[int, int]:
    return view.progress, view.messages


async def test_going_forward_skips_and_says_so(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", *((key, b"v") for key in "abcd"))
        view = await node.service.rewind(EXCLUSIVE, "car", to=4)
        assert (0, 3, 3, 1) == (view.before, view.progress, view.skipped, view.messages)
        car = await consume(node)
        assert [4] == numbers(await car.take(1))


async def test_rewinds_that_make_no_sense(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", ("a", b"1"))
        for wrong in ({}, {"to": 1, "since": 1.0}, {"to": -1}, {"to": 3}):
            with pytest.raises(BadOptionsError):
                await node.service.rewind(EXCLUSIVE, "car", **wrong)
        with pytest.raises(UnknownError):
            await node.service.rewind(EXCLUSIVE, "nobody", to=1)
        with pytest.raises(UnknownError):
            await node.service.rewind(EXCLUSIVE, "car", "another", to=1)
        await node.fill("q", ("a", b"1"), root="$SCQ")
        with pytest.raises(BadOptionsError):
            await node.service.rewind(SHARED, "q", to=1)
        with pytest.raises(UnknownError):
            await node.service.rewind(SHARED, "q", "nobody", to=1)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"1", 0),
        (b" 2 ", 0),
        (b"2020-01-01T00:00:00Z", 0),
        (b"2020-01-01", 0),
        (b"2020-01-01T00:00:00+02:00", 0),
        (b"9", 0x99),
        (b"-1", 0x99),
        (b"", 0x99),
        (b"yesterday", 0x99),
        (b"1" * 100, 0x99),
        (b"\xff\xfe", 0x99),
        ("²".encode(), 0x99),
    ],
)
async def test_a_consumer_rewinds_by_itself(memory: Store, payload: bytes, reason: int) -> None:
    async with Node.on(memory) as node:
        await node.fill("car", ("a", b"1"), ("b", b"2"))
        car = await consume(node)
        car.ack(*await car.take(2))
        await until(lambda: node.counters["acknowledged"] == 2)
        car.send("$ECQ/rewind/car", payload)
        answer = await car.expect(Puback)
        assert reason == answer.reason
        if reason:
            assert answer.properties.reason_string
            assert [] == await car.quiet()
        else:
            told = dict(answer.properties.user_properties)
            assert int(told["messages"]) == len(await car.take(int(told["messages"]))) > 0


async def test_a_queue_that_is_not_there_cannot_be_rewound(store: Store) -> None:
    async with Node.on(store) as node:
        car = await node.client("car")
        car.send("$ECQ/rewind/car", b"1")
        assert 0x83 == (await car.expect(Puback)).reason


# -- the shared form


async def test_each_consumer_of_a_shared_queue_has_its_own_progress(store: Store) -> None:
    async with Node.on(store) as node:
        first = await consume(node, "a", "$SCQ/q/#")
        await node.fill("q", ("x", b"1"), ("y", b"2"), ("x", b"3"), root="$SCQ")
        messages = await first.take(3)
        assert [1, 2, 3] == numbers(messages)
        first.ack(*messages)
        late = await consume(node, "b", "$SCQ/q/#")
        messages = await late.take(2)
        assert [("y", b"2"), ("x", b"3")] == values(messages), "the compacted state"
        late.ack(messages[0])
        await until(lambda: node.counters["acknowledged"] == 4)
        view = await node.show("q", SHARED)
        assert {"a": (3, 0), "b": (2, 1)} == {each.client: (each.progress, each.waiting) for each in view.consuming}
        first.send("$SCQ/rewind/q", b"1")
        assert 0 == (await first.expect(Puback)).reason
        assert [2, 3] == numbers(await first.take(2))
        assert [] == await late.quiet(), "the other one does not notice"
        assert 2 == len(await node.stored("q", SHARED)), "there is one copy"


async def test_more_consumers_than_are_remembered(store: Store) -> None:
    async with Node.on(store, max_consumers=1) as node:
        await node.fill("q", ("x", b"1"), root="$SCQ")
        acknowledged = 0
        for name, comes in (("a", True), ("b", True), ("a", False), ("b", True)):
            client = await consume(node, name, "$SCQ/q/#")
            if comes:
                client.ack(*await client.take(1))
                acknowledged += 1
                await until(lambda wanted=acknowledged: node.counters["acknowledged"] == wanted)  # type: ignore[misc]
            else:
                assert [] == await client.quiet(), "its progress is remembered"
            client.close()
            await until(lambda: not node.plugin.queues.consumed())
        assert 2 == node.counters["refused_consumers"]


# -- what is too old


async def test_what_is_too_old_does_not_come_and_is_collected(store: Store) -> None:
    async with Node.on(store, retention=100.0, gc_step=3) as node:
        await node.fill("car", *((f"k{number}", b"v") for number in range(10)))
        node.hub.ahead += 60.0
        await node.fill("car", ("new", b"v"), ("k0", b"w"))
        node.hub.ahead += 60.0
        car = await consume(node)
        messages = await car.take(2)
        assert [("new", b"v"), ("k0", b"w")] == values(messages)
        car.ack(*messages)
        await until(lambda: node.counters["acknowledged"] == 2)
        assert 12 == await node.progress("car")
        assert 9 == await node.plugin.collector.collect()
        assert 0 == await node.plugin.collector.collect()
        view = await node.show("car")
        assert (2, 11, 12) == (view.messages, view.first, view.last)
        node.hub.ahead += 1000.0
        assert 2 == await node.plugin.collector.collect(), "again and again"
        await node.fill("car", ("k0", b"x"))
        assert [13] == numbers(await car.take(1)), "numbers go on"


async def test_what_waits_too_long_for_the_window_is_not_sent(store: Store) -> None:
    async with Node.on(store, retention=100.0) as node:
        await node.fill("car", *((f"k{number}", b"v") for number in range(5)))
        car = await consume(node, receive_maximum=2)
        messages = await car.take(2)
        node.hub.ahead += 200.0
        await node.fill("car", ("new", b"v"))
        car.ack(*messages)
        assert [6] == numbers(await car.take(1))
        assert 3 == node.counters["too_old"]


async def test_the_collector_runs_by_itself(store: Store) -> None:
    async with Node.on(store, retention=100.0, gc_interval=0.01) as node:
        await node.fill("car", ("a", b"v"))
        node.hub.ahead += 200.0
        await until(lambda: node.counters["collected"] == 1)
        rounds = node.counters["gc_rounds"]
        await until(lambda: node.counters["gc_rounds"] > rounds + 2)


async def test_an_empty_queue_that_nobody_uses_is_forgotten(store: Store) -> None:
    async with Node.on(store, retention=100.0, idle=1000.0) as node:
        car = await consume(node)
        await node.fill("car", ("a", b"1"))
        car.ack(*await car.take(1))
        await until(lambda: node.counters["acknowledged"] == 1)
        node.hub.ahead += 2000.0
        await node.plugin.collector.collect()
        assert 0 == node.counters["forgotten"], "somebody consumes it"
        car.close()
        await until(lambda: not node.plugin.queues.consumed())
        await node.plugin.tools.ledger.flush(node.plugin.tools.ledger.open(Queue(ECQ, "car"), "car"))
        node.plugin.tools.ledger.close(node.plugin.tools.ledger.peek(Queue(ECQ, "car"), "car"))  # type: ignore[arg-type]
        await node.plugin.collector.collect()
        assert 1 == node.counters["forgotten"]
        with pytest.raises(UnknownError):
            await node.show("car")
        assert 0 == len(node.plugin.queues), "it is closed, too"
        await node.fill("car", ("a", b"2"))
        assert [(2, "a", b"2")] == await node.stored("car"), "numbers go on"


async def test_queues_that_are_no_longer_used_are_closed(store: Store) -> None:
    """Whoever chooses ever-new names fills the memory only until the next collections; nothing is lost with it."""
    async with Node.on(store) as node:
        consumer = await consume(node, "kept")
        for number in range(20):
            await node.fill(f"car-{number}", ("a", b"1"))
            reader = await node.client(f"reader-{number}")
            await reader.subscribe(f"$SCQ/never-there-{number}/#")
            reader.disconnect()
        await until(lambda: len(node.plugin.queues.consumed()) == 1)
        assert 41 == len(node.plugin.queues)
        await node.service.delete(EXCLUSIVE, "car-0")
        assert 40 == len(node.plugin.queues)
        await node.plugin.collector.collect()
        await node.fill("car-1", ("b", b"2"))
        await node.plugin.collector.collect()
        assert ["car-1", "kept"] == sorted(queue.name for queue in node.plugin.queues), "in use"
        await node.plugin.collector.collect()
        assert ["kept"] == [queue.name for queue in node.plugin.queues]
        await node.fill("car-1", ("c", b"3"))
        assert [1, 2, 3] == [number for number, _, _ in await node.stored("car-1")]
        await node.fill("kept", ("a", b"1"))
        assert [1] == numbers(await consumer.take(1))


# -- operators


async def test_lists_come_in_pages(store: Store) -> None:
    async with Node.on(store) as node:
        for name in "dbca":
            await node.fill(name, ("k", b"v"))
        await node.fill("s", ("k", b"v"), root="$SCQ")
        first = await node.service.list(EXCLUSIVE, "", 3)
        assert ["a", "b", "c"] == [view.name for view in first]
        assert ["d"] == [view.name for view in await node.service.list(EXCLUSIVE, "c", 3)]
        assert ["s"] == [view.name for view in await node.service.list(SHARED)]
        assert (1, 1, 1, 0) == (first[0].messages, first[0].first, first[0].last, first[0].consumers)


async def test_a_queue_is_shown_with_its_consumer(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", *((key, b"v") for key in "abc"))
        with pytest.raises(UnknownError):
            await node.show("nobody")
        car = await consume(node)
        messages = await car.take(3)
        car.ack(messages[0])
        await until(lambda: node.counters["acknowledged"] == 1)
        view = await node.show("car")
        assert (3, 1, 3, 1) == (view.messages, view.first, view.last, view.consumers)
        (consumer,) = view.consuming
        assert ("car", True, 1, 2, 2) == (
            consumer.client,
            consumer.connected,
            consumer.progress,
            consumer.waiting,
            consumer.in_flight,
        )
        assert view.oldest is not None and consumer.acked_at is not None and view.oldest <= consumer.acked_at
        car.close()
        await until(lambda: not node.plugin.queues.consumed())
        (consumer,) = (await node.show("car")).consuming
        assert (False, 1, 0) == (consumer.connected, consumer.progress, consumer.in_flight)


async def test_a_deleted_queue_begins_anew_but_its_numbers_go_on(store: Store) -> None:
    async with Node.on(store) as node:
        await node.fill("car", *((key, b"v") for key in "abc"))
        car = await consume(node, receive_maximum=1)
        before = await car.take(1)
        await node.service.delete(EXCLUSIVE, "car")
        with pytest.raises(UnknownError):
            await node.show("car")
        car.ack(*before)
        await node.fill("car", ("d", b"v"))
        messages = await car.take(1)
        assert [4] == numbers(messages)
        car.ack(*messages)
        await until(lambda: node.counters["acknowledged"] == 1)
        assert 4 == await node.progress("car")
        with pytest.raises(UnknownError):
            await node.service.delete(SHARED, "car")


# -- the plugin comes and goes


async def test_options_change_while_it_runs(store: Store) -> None:
    async with Node.on(store, max_messages=1) as node:
        pub = await node.client("pub")
        assert [0, QUOTA] == [await pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "ab"]
        await node.plugins.reload("ecq", {"max_messages": 2})
        assert [0, QUOTA] == [await pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "bc"]
        await node.plugins.reload("ecq", {"max_messages": 2, "overflow": "drop_oldest"})
        assert 0 == await pub.publish("$ECQ/w/car/c", b"v")
        assert ["b", "c"] == [key for _, key, _ in await node.stored("car")]


async def test_a_plugin_that_is_loaded_again_goes_on(store: Store) -> None:
    """Who is subscribed already gets what comes."""
    async with Node.on(store) as node:
        car = await consume(node)
        await node.fill("car", ("a", b"1"))
        car.ack(*await car.take(1))
        await until(lambda: node.counters["acknowledged"] == 1)
        await node.plugins.unload("ecq")
        node.loaded = await node.plugins.load("ecq", {})
        await node.fill("car", ("b", b"2"))
        assert [2] == numbers(await car.take(1))


async def test_the_heartbeat_finds_what_was_missed(store: Store) -> None:
    """An entry that this node has not heard of reaches the consumer all the same."""
    async with Node.on(store, heartbeat=0.01) as node:
        await node.fill("car", ("a", b"1"))
        car = await consume(node)
        assert [1] == numbers(await car.take(1))
        (entry,) = await store.mailboxes.read("ecq:car", 0, 1, 0.0)
        await store.mailboxes.append(["ecq:car"], Draft(entry.body, key=b"z"), node.hub.now())
        assert [("z", b"1")] == values(await car.take(1))


async def test_reasons_are_codes_that_mqtt_knows(store: Store) -> None:
    """A SUBACK may not say that a QoS is not supported (0x9B)."""
    async with Node.on(store) as node:
        car = await node.client("car")
        (reason,) = (await car.subscribe("$ECQ/car/#", 0)).reasons
        assert reason is ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
