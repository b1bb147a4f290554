"""Three real nodes on one store, as clients see them: any client on any node, whoever dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, product
from typing import Any

import pytest

from tests.scenarios.clients import KINDS, Kind, Listeners, RealClient
from tests.scenarios.clients import Will as ClientWill
from tests.scenarios.witness import metrics
from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import run
from tests.support.flows import both_versions, lasting, let_pass, numbered, payloads, publish_many, receive_until
from tests.support.node import NodeProcess
from tests.support.redis import RedisServer, wait_until
from tests.support.wire import DISCONNECT, PUBACK, SUBACK, Client, Will, publish_packet, subscribe_packet

#: Members that the tests stop for a while are found dead by nobody meanwhile, those that are killed soon.
OPTIONS = "lease = 2.0\nview_lease = 3.5"
TAKEN_OVER = 0x8E
_names = count()


def unique(what: str) -> str:
    return f"{what}{next(_names)}"


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=members", cluster=OPTIONS) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


def client(node: NodeProcess, name: str, version: int = 5, **kw: object) -> Client:
    opened = Client(node, version=version)
    assert 0 == opened.connect(name, **kw).reason
    return opened


@both_versions
def test_what_is_published_anywhere_reaches_subscribers_everywhere(nodes: ClusterNodes, version: int) -> None:
    """With each QoS, clean and durable sessions, one filter with a wildcard and one without."""
    topic = unique("everywhere")
    subscribers = [client(node, unique("sub"), version) for node in nodes.nodes]
    subscribers += [client(node, unique("sub"), **lasting(version)) for node in nodes.nodes]
    for number, subscriber in enumerate(subscribers):
        subscriber.version = version
        subscriber.subscribe(f"{topic}/+" if number % 2 else f"{topic}/1", 2)
    for node, qos in product(nodes.nodes, (0, 1, 2)):
        with client(node, unique("pub"), version) as publisher:
            payload = f"{node.args}{qos}".encode()
            publisher.publish(f"{topic}/1", payload, qos)
            for subscriber in subscribers:
                got = subscriber.receive()
                assert (payload, qos) == (got.payload, got.qos)
    for subscriber in subscribers:
        subscriber.expect_nothing()
        subscriber.close()


def test_a_subscription_that_was_granted_gets_what_is_acknowledged_after_it_on_any_node(nodes: ClusterNodes) -> None:
    """Subscribe at one node, publish at another at once; clean and durable sessions in turn, two hundred times."""
    publishers = [client(node, unique("pub")) for node in nodes.nodes]
    for number in range(200):
        where = number % len(nodes)
        options = lasting(5) if number % 2 else {}
        with client(nodes[where], unique("sub"), **options) as subscriber:
            topic = unique("granted")
            subscriber.subscribe(topic, 1)
            publishers[(where + 1 + number // 3) % len(nodes)].publish(topic, b"here", 1)
            assert b"here" == subscriber.receive().payload
            subscriber.unsubscribe(topic)
    for publisher in publishers:
        publisher.close()


def test_a_granted_subscription_gets_all_though_a_member_stands_still(nodes: ClusterNodes) -> None:
    """Less than a lease at a time: nobody is found dead; who stood still must not acknowledge what it cannot know."""
    publishers = [client(node, unique("pub")) for node in nodes.nodes[:2]]
    standing = nodes[2]
    late = client(standing, unique("late"))
    for number in range(5):
        topic = unique("standing")
        with client(nodes[number % 2], unique("sub"), **lasting(5)) as subscriber:
            os.kill(standing.pid, signal.SIGSTOP)
            try:
                subscriber.send(subscribe_packet(7, [(topic, 1)], version=5))
                let_pass(0.7)
            finally:
                os.kill(standing.pid, signal.SIGCONT)
            subscriber.expect(SUBACK)
            late.publish(topic, b"from the late one", 1)
            publishers[number % 2].publish(topic, b"here", 1)
            assert [b"from the late one", b"here"] == [subscriber.receive().payload for _ in range(2)]
    for one in (*publishers, late):
        one.close()


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_sleeps_moves_and_goes_on_at_another_node(nodes: ClusterNodes, qos: int) -> None:
    """Messages for it are stored wherever they are published, and come in the order of each publisher."""
    name, topic = unique("mover"), unique("moves")
    sleeper = client(nodes[0], name, **lasting(5))
    sleeper.subscribe(topic, qos)
    sleeper.disconnect()
    with client(nodes[1], unique("pub")) as publisher:
        publish_many(publisher, topic, numbered(50), qos)
    with client(nodes[2], unique("pub")) as publisher:
        publish_many(publisher, topic, [*numbered(50, 50), b"last"], qos)
    awake = Client(nodes[2], version=5)
    assert awake.connect(name, **lasting(5)).session_present
    assert [*numbered(100), b"last"] == payloads(receive_until(awake, b"last"))
    awake.close()


def test_a_client_that_connects_elsewhere_displaces_itself(nodes: ClusterNodes) -> None:
    """Of a client id there is one in the cluster, whether its session lasts or not."""
    for options in ({}, lasting(5)):
        name, topic = unique("twice"), unique("displaced")
        first = client(nodes[0], name, **options)
        first.subscribe(topic, 1)
        second = Client(nodes[1], version=5)
        assert bool(options) is second.connect(name, **options).session_present
        assert TAKEN_OVER == first.expect(DISCONNECT).reason
        first.close()
        if not options:
            second.subscribe(topic, 1)
        with client(nodes[2], unique("pub")) as publisher:
            publisher.publish(topic, b"to the second", 1)
        assert b"to the second" == second.receive().payload
        listed = json.loads(run("client", "list", "--http", nodes[0].http, "--json").stdout)
        assert [("n2", True)] == [(one["node"], one["connected"]) for one in listed if one["client_id"] == name]
        second.disconnect()


def test_a_client_moves_under_load_and_nothing_is_lost(nodes: ClusterNodes) -> None:
    """From node to node without saying goodbye, while two publishers go on."""
    name, topic = unique("restless"), unique("load")
    moving = client(nodes[0], name, **lasting(5))
    moving.subscribe(f"{topic}/#", 1)
    publishers = [client(node, unique("pub")) for node in nodes.nodes[:2]]
    got: list[bytes] = []
    for step in range(9):
        for number, publisher in enumerate(publishers):
            publish_many(publisher, f"{topic}/{number}", [b"%d:%05d" % (number, step * 20 + at) for at in range(20)], 1)
        got += [moving.receive().payload for _ in range(5)]
        moved = Client(nodes[step % 3], version=5)
        assert moved.connect(name, **lasting(5)).session_present
        moving.close()
        moving = moved
    publishers[0].publish(f"{topic}/0", b"0:last", 1)
    got += payloads(receive_until(moving, b"0:last"))
    for number in range(2):
        first = list(dict.fromkeys(payload for payload in got if payload.startswith(b"%d:0" % number)))
        assert [b"%d:%05d" % (number, at) for at in range(180)] == first
    for one in (*publishers, moving):
        one.close()


def test_a_shared_group_spans_the_nodes(nodes: ClusterNodes) -> None:
    """Each message goes to one member of the group, and all members get some."""
    topic, group = unique("work"), unique("group")
    members = [client(node, unique("member")) for node in nodes.nodes]
    for member in members:
        member.subscribe([(f"$share/{group}/{topic}", 1), (f"{topic}/end", 1)])
    with client(nodes[0], unique("pub")) as publisher:
        publish_many(publisher, topic, numbered(60), 1)
        publisher.publish(f"{topic}/end", b"end", 1)  # to each, on the same links after all others
    got = [payloads(receive_until(member, b"end")) for member in members]
    assert sorted(numbered(60)) == sorted(payload for found in got for payload in found[:-1])
    assert all(len(found) > 1 for found in got), [len(found) for found in got]
    for member in members:
        member.close()


def test_a_will_is_published_once_wherever_its_client_breaks(nodes: ClusterNodes) -> None:
    topic = unique("will")
    witnesses = [client(node, unique("witness")) for node in nodes.nodes]
    for witness in witnesses:
        witness.subscribe(topic, 1)
    for node in nodes.nodes:
        client(node, unique("breaks"), will=Will(topic, b"broken", qos=1)).abort()
        for witness in witnesses:
            assert b"broken" == witness.receive().payload
    for witness in witnesses:
        witness.expect_nothing()
        witness.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.transport == "tcp"], ids=str)
def test_the_clients_that_people_use_talk_over_the_nodes(nodes: ClusterNodes, kind: Kind) -> None:
    """From one node to another: each QoS, what is retained, a will, a shared group, and a session that moves."""
    topic = unique("people")
    with ExitStack() as stack:

        def at(node: NodeProcess, name: str, **kw: Any) -> RealClient:
            made = kind.driver(Listeners(node.mqtt, node.mqtt), kind.transport, kind.version)
            stack.callback(made.close)
            made.connect(name, **kw)
            return made

        here, there = at(nodes[0], unique("here")), at(nodes[1], unique("there"))
        here.subscribe(topic, 2)
        for qos in (0, 1, 2):
            there.publish(topic, b"qos %d" % qos, qos)
            got = here.receive()
            assert (topic, b"qos %d" % qos, qos) == (got.topic, got.payload, got.qos)

        there.publish(f"{topic}/kept", b"kept", 1, retain=True)
        late = at(nodes[2], unique("late"))
        late.subscribe(f"{topic}/kept", 1)
        got = late.receive()
        assert (b"kept", True) == (got.payload, got.retain)

        witness = at(nodes[0], unique("witness"))
        witness.subscribe(f"{topic}/will", 1)
        breaks = at(nodes[1], unique("breaks"), will=ClientWill(f"{topic}/will", b"broken"))
        breaks.subscribe(f"{topic}/none", 1)  # only then mosquitto's is connected
        breaks.drop()
        assert b"broken" == witness.receive().payload

        workers = [at(node, unique("worker")) for node in (nodes[0], nodes[2])]
        for worker in workers:
            worker.subscribe(f"$share/{topic}/{topic}/work", 1)
        for payload in numbered(10):
            there.publish(f"{topic}/work", payload, 1)
        wanted = set(numbered(10))
        while wanted:
            for worker in workers:
                while not worker.inbox.empty():
                    wanted.discard(worker.inbox.get().payload)
            let_pass(0.01)

        name = unique("mover")
        mover = at(nodes[0], name, clean=False)
        mover.subscribe(f"{topic}/moves", 1)
        mover.disconnect()
        for payload in numbered(5):
            there.publish(f"{topic}/moves", payload, 1)
        moved = at(nodes[2], name, clean=False)
        moved.subscribe(f"{topic}/moves", 1)  # likewise
        assert numbered(5) == [moved.receive().payload for _ in range(5)]
        moved.disconnect()


def test_a_killed_node_takes_nothing_with_it(nodes: ClusterNodes) -> None:
    """Its durable sessions go on elsewhere, its wills are published, and it comes back under its name."""
    topic = unique("killed")
    with client(nodes[1], unique("witness")) as witness:
        witness.subscribe(f"{topic}/will", 1)
        name = unique("victim")
        victim = client(nodes[0], name, **lasting(5), will=Will(f"{topic}/will", b"durable", qos=1))
        victim.subscribe(f"{topic}/data", 1)
        client(nodes[0], unique("clean"), will=Will(f"{topic}/will", b"clean", qos=1))
        nodes[0].kill()
        with client(nodes[2], unique("pub")) as publisher:
            publish_many(publisher, f"{topic}/data", numbered(20), 1)
        again = Client(nodes[2], version=5)
        assert again.connect(name, **lasting(5)).session_present
        assert numbered(20) == [again.receive().payload for _ in range(20)]
        again.close()
        assert {b"clean", b"durable"} == {witness.receive().payload for _ in range(2)}
        nodes.nodes[0] = nodes.node("n1").start()
        with client(nodes[0], unique("pub")) as publisher:
            publisher.publish(f"{topic}/data", b"after", 1)
        again = Client(nodes[0], version=5)
        assert again.connect(name, **lasting(5)).session_present
        assert b"after" == again.receive().payload
        again.disconnect()


def given_up(node: NodeProcess) -> float:
    """Confirmations of other nodes that did not come within `cluster.patience`."""
    return metrics(node)['motorcade_cluster_link_items_total{event="impatient"}']


def dead(node: NodeProcess) -> float:
    return metrics(node)["motorcade_cluster_condemned_total"]


def test_publishers_wait_for_nobody_who_is_dead(nodes: ClusterNodes) -> None:
    """After a kill messages for durable receivers are answered without a look at the dead. One for its live receivers
    waits for `cluster.patience` at most, and not at all when it is found dead.
    """
    topic, name = unique("nobody"), unique("durable")
    durable = client(nodes[2], name, **lasting(5))
    durable.subscribe(f"{topic}/durable", 1)
    client(nodes[2], unique("live")).subscribe(f"{topic}/live", 1)
    publishers = [client(node, unique("pub")) for node in nodes.nodes[:2]]
    for publisher in publishers:
        publish_many(publisher, f"{topic}/durable", [b"before"], 1)
        publish_many(publisher, f"{topic}/live", [b"before"], 1)
    patient, found = [given_up(node) for node in nodes.nodes[:2]], sum(dead(node) for node in nodes.nodes[:2])
    nodes[2].kill()
    try:
        for number in range(20):
            for publisher in publishers:
                publish_many(publisher, f"{topic}/durable", [b"%d" % number], 1)
        assert patient == [given_up(node) for node in nodes.nodes[:2]], "nobody was waited for"
        for publisher in publishers:
            publisher.send(publish_packet(f"{topic}/live", b"x", version=5, qos=1, packet_id=60_000))
            publisher.expect(PUBACK)
        for node, before in zip(nodes.nodes[:2], patient, strict=True):
            assert given_up(node) - before <= 1, "it was waited for once, or found dead before that"
        wait_until(lambda: sum(dead(node) for node in nodes.nodes[:2]) > found, "the killed node is found dead")
        wait_until(lambda: all(_live(node) == 2 for node in nodes.nodes[:2]), "both know that it is dead")
        patient = [given_up(node) for node in nodes.nodes[:2]]
        for publisher in publishers:
            publish_many(publisher, f"{topic}/live", numbered(20), 1)
        assert patient == [given_up(node) for node in nodes.nodes[:2]], "nobody was waited for"
        again = Client(nodes[0], version=5)
        assert again.connect(name, **lasting(5)).session_present
        expected = [b"before", b"before", *(b"%d" % number for number in range(20) for _ in publishers)]
        assert sorted(expected) == sorted(again.receive().payload for _ in expected)
        again.disconnect()
    finally:
        nodes.nodes[2] = nodes.node("n3").start()
        for one in publishers:
            one.close()


def _live(node: NodeProcess) -> float:
    return metrics(node)['motorcade_cluster_members{state="live"}']


def test_a_fail_over_declares_nobody_dead_and_closes_no_client(
    nodes: ClusterNodes, request: pytest.FixtureRequest
) -> None:
    """For longer than a lease nobody can renew. What is published meanwhile is answered when the store is back."""
    topic = unique("away")
    clients = [client(node, unique("live")) for node in nodes.nodes]
    clients += [client(node, unique("durable"), **lasting(5)) for node in nodes.nodes]
    for one in clients:
        one.subscribe(topic, 1)
    publishers = [client(node, unique("pub")) for node in nodes.nodes]
    wait_until(lambda: all(_live(node) == 3 for node in nodes.nodes), "all know of each other")
    found = [dead(node) for node in nodes.nodes]
    servers = request.getfixturevalue("lone_redis" if "lone" in request.node.name else "cluster_redis")
    if isinstance(servers, RedisServer):
        servers.pause()
        let_pass(4.0)
        servers.resume()
    else:
        victim = servers.masters()[0]
        victim.kill()
        wait_until(lambda: len(servers.masters()) == 3, "a replica is promoted")
        victim.start()
        servers.wait_healthy()
    for number, publisher in enumerate(publishers):
        publisher.publish(topic, b"%d" % number, 1)
    for one in clients:
        assert {b"0", b"1", b"2"} == {one.receive().payload for _ in publishers}
        one.expect_nothing()
        one.close()
    assert found == [dead(node) for node in nodes.nodes] and all(_live(node) == 3 for node in nodes.nodes)
    for publisher in publishers:
        publisher.close()
