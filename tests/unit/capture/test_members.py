"""Capture rules of several members on one store, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from motorcade.core.record import decode
from motorcade.extension.declared import ConflictError
from motorcade.mqtt.packets import Publish, Will
from motorcade.plugins.capture.options import RuleOptions
from motorcade.plugins.capture.rules import COLLECTION, CaptureRules
from motorcade.plugins.logs.streams import StreamOptions, StreamService
from tests.support.members import MemberNode, Members
from tests.support.virtual import standing

PLUGINS: dict[str, Any] = {"retained": {}, "streams": {}, "capture": {}}


def rules(node: MemberNode) -> CaptureRules:
    found: CaptureRules = node.plugins.service("captures")
    return found


def streams(node: MemberNode) -> StreamService:
    found: StreamService = node.plugins.service("streams")
    return found


def rule(*topics: str, to: str = "stream:in") -> RuleOptions:
    return msgspec.convert({"topics": list(topics), "to": to}, RuleOptions)


def captured(members: Members, stream: str = "in") -> list[bytes]:
    found = members.store.inner.streams.streams
    return [decode(record.value).payload for record in found[stream].records] if stream in found else []


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(3, plugins=PLUGINS)
    with standing(made.clock):
        first = made.nodes[0]
        for name in ("in", "other"):
            first.run(streams(first).create(name, StreamOptions()))
        yield made


def test_a_message_is_captured_once_by_the_member_of_its_publisher(members: Members) -> None:
    """Of each QoS, retained or not, relayed to subscribers and sleeping sessions everywhere; and wills."""
    _, b, c = members.nodes
    c.run(rules(c).create("all", rule("fleet/#")))
    for node in members.nodes:
        node.client(f"live-{node.member}").subscribe("fleet/#")
        sleeper = node.client(f"asleep-{node.member}", clean=False, session_expiry=1000)
        sleeper.subscribe("fleet/#")
        sleeper.disconnect()
    sent: list[bytes] = []
    for number, node in enumerate(members.nodes):
        for qos in (0, 1, 2):
            sent.append(b"%d:%d" % (number, qos))
            publisher = node.client(f"pub-{number}")
            publisher.send(Publish("fleet/x", sent[-1], qos, retain=qos == 1, packet_id=9 if qos else 0))
            members.turn()
    will = Will("fleet/will", b"will", 1)
    b.client("breaks", will=will).close()
    members.turn()
    late = b.client("late")
    late.subscribe("fleet/#")  # what is retained comes again, to it alone
    assert [*sent, b"will"] == captured(members)
    assert [3, 4, 3] == [node.run(rules(node).show("all")).captured for node in members.nodes]


def test_rules_are_created_changed_and_removed_everywhere(members: Members) -> None:
    a, b, c = members.nodes
    a.run(rules(a).create("r", rule("a/#")))
    for node in members.nodes:
        assert 0 == node.client("pub").publish("a/1", b"1")
    assert [b"1"] * 3 == captured(members)
    b.run(rules(b).change("r", rule("b/#", to="stream:other")))
    for node in members.nodes:
        assert ["b/#"] == list(rules(node).options("r").topics)
        for topic in ("a/2", "b/2"):
            assert 0 == node.client("pub").publish(topic, topic.encode())
    assert ([b"1"] * 3, [b"b/2"] * 3) == (captured(members), captured(members, "other"))
    with pytest.raises(ConflictError, match="already"):
        c.run(rules(c).create("r", rule("c/#")))
    c.run(rules(c).delete("r"))
    for node in members.nodes:
        assert 0 == len(rules(node))
        assert 0 == node.client("pub").publish("b/3", b"3")
    assert [b"b/2"] * 3 == captured(members, "other")
    assert {} == members.store.records_of(COLLECTION)


def test_a_member_that_comes_later_has_the_rules_and_hears_of_changes(members: Members) -> None:
    a, *_ = members.nodes
    a.run(rules(a).create("r", rule("a/#")))
    late = members.join()
    assert 0 == late.client("pub").publish("a/1", b"1")
    a.cluster.mute.add(late.member)  # it is told by the note alone
    work = members.loop.create_task(rules(a).create("s", rule("b/#")))
    members.turn()
    assert 0 == late.client("pub").publish("b/1", b"2")
    members.wait(5)
    assert work.done() and [b"1", b"2"] == captured(members)
