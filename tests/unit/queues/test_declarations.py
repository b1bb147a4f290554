"""What operators do with queues, and what they are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from motorcade.core.errors import MotorcadeError, PluginError
from motorcade.extension.declared import read_options
from motorcade.plugins.logs.queues.options import NOUN, QueueOptions, QueuesConfig
from motorcade.storage.ports import Draft
from tests.unit.queues.node import QueuesNode

DRAFT = Draft(b"", b"x")


def options(**given: Any) -> QueueOptions:
    return read_options(NOUN, QueueOptions, {"topics": ["q/#"], **given})


def test_options_that_cannot_be() -> None:
    """A queue by itself, and the configuration of several."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"topics": ["a/#/b"]}, "topics: 'a/#/b'"),
        ({"topics": [""]}, "topics: ''"),
        ({"topics": ["$queue/x"]}, "topics: '$queue/x': no message is published there"),
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
    ]
    for given, problem in wrong:
        with pytest.raises(MotorcadeError, match="queue") as told:
            options(**given)
        assert problem in str(told.value)
    chain = {"a": {"dead_letter": "b"}, "b": {"dead_letter": "c"}, "c": {"dead_letter": "a"}}
    for queues, problem in [
        ({"a": {"dead_letter": "a"}}, "a -> a goes round"),
        (chain, "a -> b -> c -> a goes round"),
        ({"a": {"dead_letter": "b"}}, "queue 'a': dead_letter: there is no queue 'b'; declare it first"),
        ({"a b": {}}, "queue"),
    ]:
        with pytest.raises(msgspec.ValidationError) as refused:
            msgspec.convert({"queue": queues}, QueuesConfig)
        assert problem in str(refused.value)


def test_a_queue_is_made_changed_and_deleted() -> None:
    with QueuesNode.on() as node:
        made = node.run(node.queues.create("q", options(max_messages=5)))
        assert ("q", "command", 0, 5) == (made.name, made.origin, made.messages, made.options.max_messages)
        node.fill(b"x")
        changed = node.run(node.queues.change("q", options(topics=["other"])))
        assert (1, ("other",)) == (changed.messages, changed.options.topics)
        node.fill(b"not bound any more")
        node.fill(b"y", topic="other")
        assert [b"x", b"y"] == node.stored()
        assert ["q"] == [view.name for view in node.run(node.queues.list())]
        assert 1 == len(node.queues)
        node.run(node.queues.delete("q"))
        assert [] == node.run(node.queues.list())
        assert (None, None) == node.hooks.publish_chains("other")


def test_what_was_declared_is_there_again() -> None:
    with QueuesNode.on() as node:
        node.run(node.queues.create("q", options(strategy="random")))
        node.fill(b"x")
        again = node.restart()
        assert "random" == again.queues.options("q").strategy
        assert [b"x"] == again.stored()


def test_a_subscription_waits_for_its_queue() -> None:
    """Also when it is deleted and made again: without its old messages, be they given to it and not sent."""
    with QueuesNode.on() as node:
        worker = node.worker("a", receive_maximum=2)
        node.fill(b"too early")
        for word in ("x", "y"):
            node.run(node.queues.create("q", options(ack_timeout=0)))
            node.fill(*(f"{word}{number}".encode() for number in range(5)))
            held = worker.messages()
            assert [f"{word}0".encode(), f"{word}1".encode()] == [message.payload for message in held]
            node.run(node.queues.delete("q"))
            worker.ack(*held)
        assert [] == worker.messages()
        worker.unsubscribe("$queue/q")
        assert {} == node.plugin._queues._waiting


def test_what_cannot_be_made() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("q", {}, "there is a queue 'q' already"),
        ("no name", {}, "queue name 'no name'"),
        ("", {}, "queue name ''"),
        ("new", {"dead_letter": "gone"}, "there is no queue 'gone'"),
        ("new", {"dead_letter": "new"}, "cannot be its own dead-letter queue"),
        ("third", {}, "there are 2 queues already; see max_queues"),
    ]
    for name, given, problem in wrong:
        with QueuesNode.on(max_queues=3 if name == "new" else 2, queue={"conf": {"topics": ["c"]}}) as node:
            node.run(node.queues.create("q", options()))
            assert problem in node.refusal(node.queues.create(name, options(**given)))


def test_what_cannot_be_changed() -> None:
    """What stands in the configuration; what messages depend on; dead letters that go round."""
    with QueuesNode.on(queue={"conf": {"topics": ["c"]}}) as node:
        queues = node.queues
        assert "stands in the configuration" in node.refusal(queues.change("conf", options()))
        assert "stands in the configuration" in node.refusal(queues.delete("conf"))
        assert "stands in the configuration" in node.refusal(queues.create("conf", options()))
        assert "there is no queue 'x'; there are: conf" in node.refusal(queues.change("x", options()))
        assert "there is no queue 'x'" in node.refusal(queues.delete("x"))
        node.run(queues.create("a", options(priorities=2)))
        node.run(queues.create("b", options(dead_letter="a")))
        assert "a -> b -> a goes round" in node.refusal(queues.change("a", options(dead_letter="b")))
        assert "is the dead_letter of b" in node.refusal(queues.delete("a"))
        node.run(node.held.mailboxes.append(["queue:a:1"], DRAFT, 0.0))
        assert "kind cannot change" in node.refusal(queues.change("a", options(kind="last_value")))
        assert "1 messages of priority 1" in node.refusal(queues.change("a", options()))
        assert 3 == node.run(queues.change("a", options(priorities=3))).options.priorities


def reload(node: QueuesNode, **config: Any) -> None:
    node.run(node.plugins.reload("queues", config))


def test_the_configuration_changes() -> None:
    """Queues come, change and go; messages of one that is gone stay until it is deleted by name."""
    with QueuesNode.on(queue={"a": {"topics": ["a"]}, "b": {"topics": ["b"]}}) as node:
        node.fill(b"x", topic="a")
        reload(node, queue={"b": {"topics": ["b2"]}, "c": {"topics": ["c"]}})
        assert ["b", "c"] == [view.name for view in node.run(node.queues.list())]
        worker = node.worker("w", queue="b")
        node.fill(b"y", topic="b2")
        assert [b"y"] == worker.drain()
        reload(node, queue={"a": {"topics": ["a"]}})
        assert [b"x"] == node.stored("a")
        reload(node)
        node.run(node.queues.delete("a"))
        reload(node, queue={"a": {"topics": ["a"]}})
        assert [] == node.stored("a")


def test_a_configuration_that_does_not_fit_changes_nothing() -> None:
    with QueuesNode.on(queue={"a": {"topics": ["a"]}}) as node:
        node.run(node.queues.create("mine", options(dead_letter="a")))
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"mine": {"topics": ["a"]}, "a": {}}, "declared while the node ran"),
            ({}, "there is no queue 'a'"),
        ]
        for queues, problem in wrong:
            assert problem in node.refusal(node.plugins.reload("queues", {"queue": queues, "max_queues": 7}))
        assert ["a", "mine"] == [view.name for view in node.run(node.queues.list())]
        assert 1000 == node.queues.max_queues == node.plugin.config.max_queues


def test_a_node_starts_whatever_was_declared_before() -> None:
    """The configuration goes first; damaged records and missing dead-letter queues are told in the log."""
    with QueuesNode.on(queue={"dead": {}}) as node:
        node.run(node.queues.create("a", options(dead_letter="dead")))
        node.run(node.queues.create("b", options(topics=["b"])))
        node.run(node.held.records.put("queue", "damaged", b"?"))
        again = node.restart(queue={"b": {"topics": ["from the file"]}})
        assert {"a": "command", "b": "configuration"} == {v.name: v.origin for v in again.run(again.queues.list())}
        assert ("from the file",) == again.queues.options("b").topics
        assert 1 == again.counters["unreadable"]


def test_a_plugin_without_a_store_says_so() -> None:
    node = QueuesNode()
    node.plugins.store = None
    with pytest.raises(PluginError, match="queues need a store"):
        node.load()


def test_what_there_is_to_know() -> None:
    with QueuesNode.on(queue={"q": {"topics": ["q/#"]}}) as node:
        worker = node.worker("a", receive_maximum=2)
        node.fill(*(b"%d" % number for number in range(5)))
        assert 2 == len(worker.messages())
        view = node.run(node.queues.show("q"))
        assert (5, 1, 5, node.now) == (view.messages, view.consumers, view.inflight, view.oldest)
        assert [("a", 5, 2)] == [(client.client, client.unacked, client.sent) for client in view.clients]
        assert view.bytes == node.run(node.held.mailboxes.info("queue:q")).size_bytes
        gauges = node.plugin.gauges()
        assert (1, 1, 5, 5) == tuple(
            gauges[name] for name in ("queues", "queue_consumers", "queue_inflight", "queue_messages")
        )
        (first, *_) = node.run(node.queues.read("q", 0, 1))
        assert ("q/a", b"0", "filler") == (first.topic, first.payload, first.publisher)
        assert 4 == len(node.run(node.queues.read("q", first.position, 100)))
