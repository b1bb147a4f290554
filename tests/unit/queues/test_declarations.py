"""What operators do with queues, and what they are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from motorcade.core.errors import PluginError
from motorcade.extension.declared import read_options
from motorcade.plugins.queues.options import NOUN, QueueOptions, QueuesConfig
from motorcade.storage.ports import Draft, Store
from tests.unit.queues.node import Node, until

DRAFT = Draft(b"", b"x")


def options(**given: Any) -> QueueOptions:
    return read_options(NOUN, QueueOptions, {"topics": ["q/#"], **given})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"topics": ["a/#/b"]}, "topics: 'a/#/b'"),
        ({"topics": [""]}, "topics: ''"),
        ({"topics": ["$queue/x"]}, "topics: '$queue/x': nobody publishes there"),
        ({"topics": ["$share/g/x"]}, "topics: '$share/g/x'"),
        ({"topics": [f"a/{number}" for number in range(101)]}, "topics: 101 filters are more than 100"),
        ({"kind": "other"}, "kind"),
        ({"key": "payload"}, "key: 'payload' is none of topic, publisher and property:NAME"),
        ({"key": "property:"}, "key: write property:NAME"),
        ({"kind": "last_value", "priorities": 2}, "priorities: a last_value queue has none"),
        ({"strategy": "fair"}, "strategy"),
        ({"priorities": 0}, "priorities"),
        ({"priorities": 11}, "priorities"),
        ({"max_attempts": 256}, "max_attempts"),
        ({"max_attempts": -1}, "max_attempts"),
        ({"retention": -1}, "retention"),
        ({"dead_letter": "no name"}, "dead_letter: queue name 'no name'"),
        ({"max_message": 1}, "unknown option 'max_message'; did you mean 'max_messages'?"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match="queue") as told:
        options(**given)
    assert problem in str(told.value)


@pytest.mark.parametrize(
    ("queues", "problem"),
    [
        ({"a": {"dead_letter": "a"}}, "a -> a goes round"),
        (
            {"a": {"dead_letter": "b"}, "b": {"dead_letter": "c"}, "c": {"dead_letter": "a"}},
            "a -> b -> c -> a goes round",
        ),
        ({"a": {"dead_letter": "b"}}, "queue 'a': dead_letter: there is no queue 'b'; declare it first"),
        ({"a b": {}}, "queue"),
    ],
)
def test_a_configuration_that_cannot_be(queues: dict[str, Any], problem: str) -> None:
    with pytest.raises(msgspec.ValidationError) as told:
        msgspec.convert({"queue": queues}, QueuesConfig)
    assert problem in str(told.value)


async def test_a_queue_is_made_changed_and_deleted(store: Store) -> None:
    async with Node.on(store) as node:
        made = await node.queues.create("q", options(max_messages=5))
        assert ("q", "command", 0, 5) == (made.name, made.origin, made.messages, made.options.max_messages)
        pub = await node.client("pub")
        await pub.publish("q/a", b"x")
        changed = await node.queues.change("q", options(topics=["other"]))
        assert (1, ("other",)) == (changed.messages, changed.options.topics)
        await pub.publish("q/a", b"not bound any more")
        await pub.publish("other", b"y")
        assert [b"x", b"y"] == await node.stored()
        assert ["q"] == [view.name for view in await node.queues.list()]
        assert 1 == len(node.queues)
        await node.queues.delete("q")
        assert [] == await node.queues.list()
        assert (None, None) == node.broker.hooks.publish_chains("other")


async def test_what_was_declared_is_there_again(store: Store) -> None:
    async with Node.on(store) as node:
        await node.queues.create("q", options(strategy="random"))
        await (await node.client("pub")).publish("q/a", b"x")
    async with Node.on(store) as again:
        assert "random" == again.queues.options("q").strategy
        assert [b"x"] == await again.stored()


async def test_a_subscription_waits_for_its_queue(store: Store) -> None:
    """Also when it is deleted and made again: without its old messages."""
    async with Node.on(store) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await car.subscribe("$queue/q")
        await pub.publish("q/a", b"too early")
        for round_ in (b"1", b"2"):
            await node.queues.create("q", options(ack_timeout=0))
            await pub.publish("q/a", round_)
            (message,) = await car.take(1)
            assert round_ == message.payload
            await node.queues.delete("q")
            car.ack(message)
        assert [] == await car.quiet()
        await car.unsubscribe("$queue/q")
        assert {} == node.plugin._queues._waiting


async def test_deleting_takes_back_what_was_not_sent(store: Store) -> None:
    async with Node.on(store) as node:
        await node.queues.create("q", options())
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=2)
        await car.subscribe("$queue/q")
        for number in range(5):
            await pub.publish("q/a", b"%d" % number)
        held = await car.take(2)
        await node.queues.delete("q")
        car.ack(*held)
        assert [] == await car.quiet()


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("q", {}, "there is a queue 'q' already"),
        ("no name", {}, "queue name 'no name'"),
        ("", {}, "queue name ''"),
        ("new", {"dead_letter": "gone"}, "there is no queue 'gone'"),
        ("new", {"dead_letter": "new"}, "cannot be its own dead-letter queue"),
        ("third", {}, "there are 2 queues already; see max_queues"),
    ],
)
async def test_what_cannot_be_made(store: Store, name: str, given: dict[str, Any], problem: str) -> None:
    async with Node.on(store, max_queues=3 if name == "new" else 2, queue={"conf": {"topics": ["c"]}}) as node:
        await node.queues.create("q", options())
        assert problem in await node.error(node.queues.create(name, options(**given)))


async def test_what_cannot_be_changed(store: Store) -> None:
    """What stands in the configuration; what messages depend on; dead letters that go round."""
    async with Node.on(store, queue={"conf": {"topics": ["c"]}}) as node:
        queues = node.queues
        assert "stands in the configuration" in await node.error(queues.change("conf", options()))
        assert "stands in the configuration" in await node.error(queues.delete("conf"))
        assert "stands in the configuration" in await node.error(queues.create("conf", options()))
        assert "there is no queue 'x'; there are: conf" in await node.error(queues.change("x", options()))
        assert "there is no queue 'x'" in await node.error(queues.delete("x"))
        await queues.create("a", options(priorities=2))
        await queues.create("b", options(dead_letter="a"))
        assert "a -> b -> a goes round" in await node.error(queues.change("a", options(dead_letter="b")))
        assert "is the dead_letter of b" in await node.error(queues.delete("a"))
        await store.mailboxes.append(["queue:a:1"], DRAFT, 0.0)
        assert "kind cannot change" in await node.error(queues.change("a", options(kind="last_value")))
        assert "1 messages of priority 1" in await node.error(queues.change("a", options()))
        assert 3 == (await queues.change("a", options(priorities=3))).options.priorities


async def test_the_configuration_changes(store: Store) -> None:
    """Queues come, change and go; messages of one that is gone stay until it is deleted by name."""
    async with Node.on(store, queue={"a": {"topics": ["a"]}, "b": {"topics": ["b"]}}) as node:
        pub, car = await node.client("pub"), await node.client("car")
        await pub.publish("a", b"x")
        await node.plugins.reload("queues", {"queue": {"b": {"topics": ["b2"]}, "c": {"topics": ["c"]}}})
        assert ["b", "c"] == [view.name for view in await node.queues.list()]
        await car.subscribe("$queue/b")
        await pub.publish("b2", b"y")
        assert [b"y"] == await car.drain(1)
        await node.plugins.reload("queues", {"queue": {"a": {"topics": ["a"]}}})
        assert [b"x"] == await node.stored("a")
        await node.plugins.reload("queues", {})
        await node.queues.delete("a")
        await node.plugins.reload("queues", {"queue": {"a": {"topics": ["a"]}}})
        assert [] == await node.stored("a")


async def test_a_configuration_that_does_not_fit_changes_nothing(store: Store) -> None:
    async with Node.on(store, queue={"a": {"topics": ["a"]}}) as node:
        await node.queues.create("mine", options(dead_letter="a"))
        for queues, problem in (
            ({"mine": {"topics": ["a"]}, "a": {}}, "declared while the node ran"),
            ({}, "there is no queue 'a'"),
        ):
            assert problem in await node.error(node.plugins.reload("queues", {"queue": queues, "max_queues": 7}))
        assert ["a", "mine"] == [view.name for view in await node.queues.list()]
        assert 1000 == node.queues.max_queues == node.plugin.config.max_queues


async def test_a_node_starts_whatever_was_declared_before(store: Store) -> None:
    """The configuration goes first; damaged records and missing dead-letter queues are told in the log."""
    async with Node.on(store, queue={"dead": {}}) as node:
        await node.queues.create("a", options(dead_letter="dead"))
        await node.queues.create("b", options(topics=["b"]))
        await store.records.put("queue", "damaged", b"?")
    async with Node.on(store, queue={"b": {"topics": ["from the file"]}}) as again:
        assert {"a": "command", "b": "configuration"} == {v.name: v.origin for v in await again.queues.list()}
        assert ("from the file",) == again.queues.options("b").topics
        assert 1 == again.counters["unreadable"]


async def test_a_plugin_without_a_store_says_so() -> None:
    node = Node(None)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="queues need a store"):
        await node.plugins.load("queues", {})


async def test_what_there_is_to_know(store: Store) -> None:
    async with Node.on(store, queue={"q": {"topics": ["q/#"]}}) as node:
        pub, car = await node.client("pub"), await node.client("car", receive_maximum=2)
        await car.subscribe("$queue/q")
        before = node.hub.now()
        for number in range(5):
            await pub.publish("q/a", b"%d" % number)
        await car.take(2)
        queue = node.plugin._queues.get("q")
        assert queue is not None
        await until(lambda: queue.dispatcher.inflight == 5)
        view = await node.queues.show("q")
        assert (5, 1, 5) == (view.messages, view.consumers, view.inflight)
        assert [("car", 5, 2)] == [(client.client, client.unacked, client.sent) for client in view.clients]
        assert view.oldest is not None and before - 1 <= view.oldest <= node.hub.now()
        assert view.bytes == (await store.mailboxes.info("queue:q")).octets
        gauges = node.plugin.gauges()
        assert (1, 1, 5, 5) == tuple(
            gauges[name] for name in ("queues", "queue_consumers", "queue_inflight", "queue_messages")
        )
        (first, *_) = await node.queues.read("q", 0, 1)
        assert ("q/a", b"0", "pub") == (first.topic, first.payload, first.publisher)
        assert 4 == len(await node.queues.read("q", first.position, 100))
