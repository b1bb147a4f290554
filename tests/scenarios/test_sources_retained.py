"""Retained messages reach a new subscriber in step with its window, whole, and as they are when they are sent.

`test_retained_sets.py` has the plain cases; here connections are taken over, values change and expire while they wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.checks import RETAIN_IF_NEW, RETAIN_NEVER
from tests.support.consumers import (
    ack_all,
    connected,
    lasting,
    payloads,
    settled,
    subscribe,
    take,
    unique,
)
from tests.support.flows import MESSAGE_EXPIRY, both_versions, let_pass
from tests.support.node import NodeProcess
from tests.support.wire import Client, Packet, prop, publish_packet

COUNT = 3000
WINDOW = 10

CONFIG = f"[session]\nwindow = {WINDOW}\n"


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "memory://", http=True, config=CONFIG) as running:
        retain(running, "set", COUNT)
        yield running


def retain(node: NodeProcess, name: str, count: int) -> None:
    """Retained messages 0 … count-1 below a topic."""
    with connected(node) as client:
        client.send(b"".join(publish_packet(f"{name}/{n}", b"%d" % n, retain=True) for n in range(count)))
        client.expect_nothing()


def rest(client: Client, count: int) -> list[Packet]:
    """So many messages, and a look whether there are more: a message to itself, and the answers to two pings."""
    messages = take(client, count)
    marker = unique("marker")
    subscribe(client, marker)
    client.publish(marker, b"", 1)
    while not messages or messages[-1].topic != marker:
        messages += take(client, 1)
    for _ in range(2):
        messages += settled(client)
    return [message for message in messages if message.topic != marker]


@both_versions
def test_a_large_set_arrives_whole_and_within_the_window(node: NodeProcess, version: int) -> None:
    """Thousands of retained messages, ten at a time, each exactly once."""
    name = unique("set")
    with connected(node, "", version) as publisher:
        for number in range(200):
            publisher.publish(f"{name}/{number}", b"x", 1, retain=True)
    with connected(node, "", version) as client:
        subscribe(client, f"{name}/#")
        topics: list[str] = []
        while len(topics) < 200:
            lot = take(client, WINDOW, ack=False)
            assert [] == settled(client), "more in flight than the window"
            topics += [message.topic for message in lot]
            ack_all(client, lot)
        assert {f"{name}/{number}" for number in range(200)} == set(topics)
    with connected(node, "", version) as client:
        subscribe(client, "set/+")  # published with QoS 0, so nothing is to be acknowledged
        messages = take(client, COUNT)
        assert {b"%d" % number for number in range(COUNT)} == set(payloads(messages))
        assert all(message.retain for message in messages)
        assert [] == settled(client)


@both_versions
@pytest.mark.parametrize("how", ["take-over", "abort"])
def test_a_half_delivered_set_continues(node: NodeProcess, version: int, how: str) -> None:
    """Over three connections of one session each message comes once; those in flight come again with DUP."""
    name = unique("half")
    with connected(node) as publisher:
        for number in range(120):
            publisher.publish(f"{name}/{number}", b"x", 1, retain=True)
    client_id = unique("c")
    client = lasting(node, client_id, version)
    subscribe(client, f"{name}/#")
    done: list[str] = []
    for _ in range(3):
        done += [message.topic for message in take(client, 25)]
        held = {message.topic for message in take(client, WINDOW, ack=False)}
        assert [] == settled(client)
        before = client
        if how == "abort":
            before.abort()
        client = lasting(node, client_id, version)
        before.close()
        again = take(client, WINDOW)
        assert (held, {True}) == ({message.topic for message in again}, {message.dup for message in again})
        done += held
    done += [message.topic for message in take(client, 120 - len(done))]
    assert {f"{name}/{number}" for number in range(120)} == set(done)
    assert [] == settled(client)
    client.close()


def test_retain_handling(node: NodeProcess) -> None:
    """0: at every SUBSCRIBE; 1: only if the subscription is new; 2: never. A set under way is not doubled by 1."""
    name = unique("handling")
    retain(node, name, 50)
    with connected(node) as client:
        subscribe(client, f"{name}/#", 1 | RETAIN_NEVER)
        assert [] == rest(client, 0)
        subscribe(client, f"{name}/#", 1 | RETAIN_IF_NEW)
        assert [] == rest(client, 0), "it was subscribed already"
        subscribe(client, f"{name}/#", 1)
        assert 50 == len(rest(client, 50))
        subscribe(client, f"{name}/#", 1)
        assert 50 == len(rest(client, 50)), "each SUBSCRIBE with 0 brings the set again"
        subscribe(client, f"{name}/+", 1 | RETAIN_IF_NEW)
        assert 50 == len(rest(client, 50))


def test_subscribing_again_in_the_middle_of_a_set(node: NodeProcess) -> None:
    """With retain handling 1 the set goes on; with 0 it begins again, and everything has come at the end."""
    name = unique("middle")
    with connected(node) as publisher:
        for number in range(60):
            publisher.publish(f"{name}/{number}", b"x", 1, retain=True)
    topics = {f"{name}/{number}" for number in range(60)}
    with connected(node) as client:
        subscribe(client, f"{name}/#", 1)
        held = take(client, WINDOW, ack=False)
        subscribe(client, f"{name}/#", 1 | RETAIN_IF_NEW)
        ack_all(client, held)
        assert sorted(topics) == sorted(message.topic for message in held + rest(client, 50))
    with connected(node) as client:
        subscribe(client, f"{name}/#", 1)
        held = take(client, WINDOW, ack=False)
        subscribe(client, f"{name}/#", 1)
        ack_all(client, held)
        after = [message.topic for message in rest(client, 60)]
        assert topics == set(after), "the whole set after the second SUBSCRIBE"
        assert 60 == len(after), "and nothing of the first besides"


def test_what_changes_while_it_waits(node: NodeProcess) -> None:
    """A value that is replaced comes as the new one, a deleted one does not come, one that expires neither."""
    name = unique("change")
    with connected(node, "", 5) as publisher:
        for number in range(WINDOW):
            publisher.publish(f"{name}/first/{number}", b"old", 1, retain=True)
        for topic in ("stays", "replaced", "deleted"):
            publisher.publish(f"{name}/{topic}", b"old", 1, retain=True)
        publisher.publish(f"{name}/expires", b"old", 1, retain=True, properties=prop(MESSAGE_EXPIRY, 1))
        with connected(node) as client:
            subscribe(client, f"{name}/first/#")
            held = take(client, WINDOW, ack=False)
            subscribe(client, f"{name}/+")
            assert [] == settled(client)
            publisher.publish(f"{name}/deleted", b"", 1, retain=True)
            publisher.publish(f"{name}/replaced", b"new", 1, retain=True)
            let_pass(1.1)
            ack_all(client, held)
            seen = [(message.topic.removeprefix(f"{name}/"), message.payload) for message in rest(client, 3)]
    kept = [(topic, payload) for topic, payload in seen if topic in ("stays", "expires")]
    assert [("stays", b"old")] == kept
    assert b"old" not in {payload for topic, payload in seen if topic != "stays"}
    assert ("replaced", b"new") in seen
