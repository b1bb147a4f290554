"""Into a stream of the node, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from motorcade.core.message import Message
from motorcade.plugins.capture import RuleView
from motorcade.plugins.capture.rules import CaptureRules
from motorcade.storage.ports import StoreError
from tests.unit.capture.capturing import options, rule
from tests.unit.streams.node import StreamsNode

QUOTA = 0x97
UNBOUND = {"topics": ["nothing/is/published/here"]}


class CaptureNode(StreamsNode):
    """With a stream `telemetry`, and the plugin `capture` beside that of streams."""

    def load(self, **config: Any) -> None:
        super().load(stream={"telemetry": UNBOUND})
        self.capture = self.run(self.plugins.load("capture", config))

    @property
    def rules(self) -> CaptureRules:
        found: CaptureRules = self.plugins.service("captures")
        return found

    def view(self) -> RuleView:
        return self.run(self.rules.show("in"))


def test_a_published_message_is_a_record_of_the_stream() -> None:
    """As it was published, of every QoS, in order; the publisher is answered when the store has it."""
    with CaptureNode.on(rule={"in": rule("stream:telemetry")}) as node:
        pub, reader = node.client("pub"), node.client("reader", receive_maximum=1000)
        for number in range(300):
            assert 0 == pub.publish("fleet/1", b"\xff%d" % number, number % 3, user_properties=(("a", "b"),))
            assert number + 1 == len(node.stored("telemetry"))
        reader.subscribe("$stream/telemetry/earliest")
        assert [b"\xff%d" % number for number in range(300)] == reader.drain()
        assert {("fleet/1", ("a", "b"))} == {
            (message.topic, message.properties.user_properties[0]) for message in reader.received
        }
        view = node.view()
        assert (300, 0, "") == (view.captured, view.pending, view.problem)


def test_the_stream_must_be_declared_before_the_rule() -> None:
    """But a node starts without the stream of a rule that is configured; a reload that names none changes nothing."""
    with CaptureNode.on() as node:
        assert "motorcade stream create nowhere" in node.refusal(node.rules.create("in", options("stream:nowhere")))
        assert 0 == len(node.rules)
        node.run(node.rules.create("in", options("stream:telemetry")))
        assert "no stream 'nowhere'" in node.refusal(node.rules.change("in", options("stream:nowhere")))
        assert "motorcade stream read telemetry" in node.refusal(node.rules.read("in", 0, 1))
        assert 0 == node.client("pub").publish("fleet/1", b"1")
    with CaptureNode.on(rule={"in": rule("stream:later")}) as node:
        assert "no stream 'later'" in node.view().problem
        node.create("later")
        assert (0, "") == (node.client("pub").publish("fleet/1", b"1"), node.view().problem)
        wrong = {"rule": {"in": rule("stream:nowhere")}}
        assert "no stream 'nowhere'" in node.refusal(node.plugins.reload("capture", wrong))
        assert 0 == node.client("pub").publish("fleet/1", b"2")


def test_a_stream_that_goes_is_heard_of_and_may_come_back() -> None:
    """Messages fail and are counted, QoS 1 publishers are refused, the view says why."""
    with CaptureNode.on() as node:
        node.create("s", **UNBOUND)
        node.run(node.rules.create("in", options("stream:s")))
        pub = node.client("pub")
        node.run(node.streams.delete("s"))
        assert (QUOTA, 0) == (pub.publish("fleet/1", b"1"), pub.publish("fleet/1", b"2", 0))
        assert (2, True) == (node.view().failed, "no stream 's'" in node.view().problem)
        node.create("s", **UNBOUND)
        assert (0, "") == (pub.publish("fleet/1", b"3"), node.view().problem)
        node.run(node.plugins.unload("streams"))
        assert QUOTA == pub.publish("fleet/1", b"4")
        assert "'streams' is not loaded" in node.view().problem
        assert [b"3"] == node.stored()


def test_a_message_that_cannot_be_written_does_not_harm_others() -> None:
    """A plugin may have made it of something else than text."""
    with CaptureNode.on(rule={"in": rule("stream:telemetry")}) as node:
        given = [
            Message("fleet/1", payload, 1, publisher=publisher)
            for payload, publisher in ((b"a", "pub"), (b"b", "\ud800"), (b"c", "pub"))
        ]

        async def publish() -> None:  # in one turn
            await asyncio.gather(*map(node.broker.publish, given), return_exceptions=True)

        node.run(publish())
        node.turn()
        assert ([b"a", b"c"], 1) == (node.stored("telemetry"), node.view().failed)


def test_what_waits_is_bounded_and_a_store_in_doubt_ends_the_connection() -> None:
    with CaptureNode.on(rule={"in": rule("stream:telemetry", max_pending=2)}) as node:
        pubs = [node.client(f"pub{number}") for number in range(3)]
        node.held.streams_too = node.held.held = True
        for pub in pubs[:2]:
            pub.put("fleet/1", b"x")
        node.turn()
        assert (QUOTA, 0) == (pubs[2].publish("fleet/1", b"x"), pubs[2].publish("fleet/1", b"x", 0))
        node.held.held = False
        node.held.let_go()
        node.turn()
        view = node.view()
        assert (2, 1, 1, 0) == (view.captured, view.refused, view.dropped, view.pending)
        node.held.held = True
        pubs[0].put("fleet/1", b"y")
        node.turn()
        node.held.fail(StoreError("no answer"))
        node.held.held = False
        node.turn()
        assert (False, 1) == (pubs[0].open, node.view().failed)
