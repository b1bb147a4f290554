"""Retained messages of three real nodes on one store: published at one, there for subscribers of all."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import count, product

import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.flows import MESSAGE_EXPIRY, both_versions, lasting, let_pass
from tests.support.node import NodeProcess
from tests.support.wire import (
    PATIENCE,
    PINGREQ,
    PINGRESP,
    PUBACK,
    SUBACK,
    Client,
    Will,
    prop,
    publish_packet,
    subscribe_packet,
)

OPTIONS = "lease = 2.0\nview_lease = 3.5"
SYSTOPICS = "[plugins.systopics]\ninterval = 0.4"
RETAIN_AS_PUBLISHED, IF_NEW, NEVER = 0x08, 0x10, 0x20  #: of a SUBSCRIBE, beside the QoS
LARGE = b"x" * 20_000
_names = count()


def unique(what: str) -> str:
    return f"{what}{next(_names)}"


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=retained", cluster=OPTIONS, more=SYSTOPICS) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


def client(node: NodeProcess, name: str, version: int = 5, **kw: object) -> Client:
    opened = Client(node, version=version)
    assert 0 == opened.connect(name, **kw).reason
    return opened


def given(node: NodeProcess, filter_: str, wanted: int, version: int = 5) -> dict[str, bytes]:
    """The retained messages that a new subscriber gets, if it waits for so many."""
    with client(node, unique("asks"), version) as subscriber:
        subscriber.subscribe(filter_, 1)
        found = {}
        for _ in range(wanted):
            message = subscriber.receive()
            assert message.retain
            found[message.topic] = message.payload
        if not wanted:
            let_pass(0.3)
            subscriber.expect_nothing()
        return found


def until_given(node: NodeProcess, topic: str, payload: bytes) -> None:
    """New subscribers get a value sooner or later."""
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline:
        with client(node, unique("asks")) as subscriber:
            subscriber.send(subscribe_packet(1, [(topic, 1)], version=5))
            while (came := subscriber.recv()).type == SUBACK or not came.retain:
                pass  # it may come live, even before the SUBACK, which waits for the dead one
            if came.payload == payload:
                return
    raise AssertionError(f"{topic} was never {payload!r}")


def until_gone(node: NodeProcess, topic: str) -> None:
    """New subscribers get no value any more, sooner or later."""
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline:
        with client(node, unique("asks")) as subscriber:
            subscriber.subscribe(topic, 0)
            subscriber.send(PINGREQ)
            if subscriber.recv().type == PINGRESP:
                return
    raise AssertionError(f"{topic} did not go")


@both_versions
def test_who_subscribes_after_a_publish_was_acknowledged_gets_it_on_every_node(
    nodes: ClusterNodes, version: int
) -> None:
    """At each QoS that is acknowledged, with small and large messages, by its topic and by a wildcard; 150 times."""
    chance, topic = random.Random(version), unique("last")
    publishers = [client(node, unique("pub"), version) for node in nodes.nodes]
    for number in range(150):
        payload = b"%d" % number + (LARGE if number % 5 == 0 else b"")
        chance.choice(publishers).publish(f"{topic}/1", payload, 1 + number % 2, retain=True)
        filter_ = chance.choice([f"{topic}/1", f"{topic}/+", f"{topic}/#"])
        assert {f"{topic}/1": payload} == given(chance.choice(nodes.nodes), filter_, 1, version)
    publishers[0].publish(f"{topic}/1", b"", 1, retain=True)
    for node in nodes.nodes:
        assert {} == given(node, f"{topic}/#", 0, version)
    for publisher in publishers:
        publisher.close()


def test_what_two_nodes_publish_at_the_same_time_ends_alike_everywhere(nodes: ClusterNodes) -> None:
    topic = unique("race")
    publishers = [client(node, unique("pub")) for node in nodes.nodes]
    topics = [f"{topic}/{number}" for number in range(40)]
    for number, one in enumerate(topics):
        for place, publisher in enumerate(publishers):
            payload = f"{place} {number}".encode() + (LARGE if place == 1 else b"")
            publisher.send(publish_packet(one, payload, version=5, qos=1, packet_id=number + 1, retain=True))
    for publisher in publishers:
        for _ in topics:
            assert (publisher.expect(PUBACK).reason or 0) < 0x80
        publisher.close()
    first, *others = [given(node, f"{topic}/+", len(topics)) for node in nodes.nodes]
    assert set(topics) == first.keys()
    assert [first, first] == others


def test_a_member_that_stands_still_holds_up_no_publisher_and_gives_nothing_outdated(nodes: ClusterNodes) -> None:
    topic, standing = unique("still"), nodes[2]
    with client(nodes[0], unique("pub")) as publisher, client(standing, unique("late")) as late:
        publisher.publish(topic, b"old", 1, retain=True)
        assert {topic: b"old"} == given(standing, topic, 1)
        for number in range(3):
            os.kill(standing.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                publisher.publish(topic, b"%d" % number, 1, retain=True)
                assert time.monotonic() - began < 1.0  # no lease, and no patience
            finally:
                os.kill(standing.pid, signal.SIGCONT)
            late.subscribe(topic, 1)
            assert b"%d" % number == late.receive().payload
            late.unsubscribe(topic)


def test_a_client_that_breaks_off_and_goes_on_elsewhere_has_the_last_word(nodes: ClusterNodes) -> None:
    """Its will, and what it has published at QoS 0 in the last moment, come before what it says at the next node."""
    topic, name = unique("status"), unique("car")
    for number in range(20):
        here, there = nodes[number % 3], nodes[(number + 1) % 3]
        options = lasting(5) if number % 2 else {}
        car = client(here, name, will=Will(topic, b"offline", 1, retain=True), **options)
        car.publish(topic, b"early %d" % number, 0, retain=True)
        if number % 3:
            car.abort()
        with client(there, name, **options) as again:
            again.publish(topic, b"online %d" % number, 1, retain=True)
            for node in nodes.nodes:
                assert {topic: b"online %d" % number} == given(node, topic, 1)
            again.disconnect()
        car.close()


def test_messages_expire_everywhere(nodes: ClusterNodes) -> None:
    topic = unique("expires")
    with client(nodes[0], unique("pub")) as publisher:
        publisher.publish(topic, b"x", 1, retain=True, properties=prop(MESSAGE_EXPIRY, 3))
    assert [{topic: b"x"}] * 3 == [given(node, topic, 1) for node in nodes.nodes]
    let_pass(3.5)
    assert [{}] * 3 == [given(node, topic, 0) for node in nodes.nodes]


@both_versions
def test_live_messages_of_other_nodes_have_the_flag_that_the_subscriber_wants(
    nodes: ClusterNodes, version: int
) -> None:
    """Groups get none of the retained messages, and retain handling holds."""
    for here, there in product(nodes.nodes[:2], repeat=2):
        topic = unique("flag")
        with (
            client(here, unique("pub"), version) as publisher,
            client(there, unique("sub"), version) as plain,
            client(there, unique("sub")) as wanted,
            client(there, unique("sub"), **lasting(5)) as durable,
        ):
            plain.subscribe(topic, 1)
            wanted.subscribe(topic, 1 | RETAIN_AS_PUBLISHED)
            durable.subscribe(topic, 1 | RETAIN_AS_PUBLISHED)
            let_pass(0.5)  # what is published in the first milliseconds may come as a retained message too
            for qos in (0, 1, 2):
                publisher.publish(topic, b"%d" % qos, qos, retain=True)
                flags = [one.receive() for one in (plain, wanted, durable)]
                assert [(b"%d" % qos, kept) for kept in (False, True, True)] == [
                    (one.payload, bool(one.retain)) for one in flags
                ]
            assert {topic: b"2"} == given(there, topic, 1)
            wanted.subscribe(topic, 1 | IF_NEW)
            plain.subscribe(f"$share/g/{topic}", 1)
            with client(there, unique("sub")) as other:
                other.subscribe(topic, 1 | NEVER)
                for one in (wanted, plain, other):
                    one.expect_nothing()


def test_each_node_tells_the_figures_of_each_and_of_all(nodes: ClusterNodes) -> None:
    """Clients add up; retained messages are the same ones everywhere."""
    crowd = [client(nodes[number], unique("counted")) for number in (0, 0, 1)]
    for node in nodes.nodes:
        wanted = {"broker": "4", "brokers/n1": "2", "brokers/n2": "1", "brokers/n3": "0"}
        wanted[f"brokers/n{nodes.nodes.index(node) + 1}"] += "+1"  # the monitor
        wanted = {whose: str(sum(map(int, text.split("+")))) for whose, text in wanted.items()}
        with client(node, unique("monitor")) as monitor:
            filters = [f"$SYS/{whose}/clients/connected" for whose in wanted]
            filters += ["$SYS/+/retained messages/count", "$SYS/brokers/+/retained messages/count"]
            monitor.subscribe([(one, 0) for one in filters])
            found: dict[str, str] = {}
            deadline = time.monotonic() + 2 * PATIENCE
            kept: dict[str, int] = {}
            while found != wanted or len(kept) < 4:
                assert time.monotonic() < deadline, (found, kept)
                message = monitor.receive()
                whose = message.topic.removeprefix("$SYS/").partition("/clients/")[0]
                if whose in wanted:
                    found[whose] = message.payload.decode()
                elif "retained" in message.topic:
                    kept[message.topic] = int(message.payload)
            everywhere = kept.pop("$SYS/broker/retained messages/count")
            assert 100 < everywhere < 1.5 * max(kept.values())
    for one in crowd:
        one.close()


def test_what_a_killed_node_has_acknowledged_stays_and_its_wills_are_retained(nodes: ClusterNodes) -> None:
    """Also at the node that takes its place, which has all messages when it serves."""
    topic = unique("killed")
    killed = nodes[2]
    with client(killed, unique("pub")) as publisher:
        publisher.publish(f"{topic}/kept", b"x", 1, retain=True)
        publisher.publish(f"{topic}/large", LARGE, 1, retain=True)
    car = client(killed, unique("car"), will=Will(f"{topic}/status", b"offline", 1, retain=True))
    car.publish(f"{topic}/status", b"online", 1, retain=True)
    killed.kill()
    until_given(nodes[0], f"{topic}/status", b"offline")
    until_gone(nodes[0], "$SYS/brokers/n3/uptime")
    wanted = {f"{topic}/kept": b"x", f"{topic}/large": LARGE, f"{topic}/status": b"offline"}
    assert wanted == given(nodes[1], f"{topic}/#", 3)
    nodes.nodes[2] = nodes.node("n3").start()
    assert [wanted] * 3 == [given(node, f"{topic}/#", 3) for node in nodes.nodes]
    car.close()
