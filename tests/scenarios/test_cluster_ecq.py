"""Compacted queues on three real nodes over one store: appended anywhere, consumed anywhere, whoever dies."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import run
from tests.support.compacted import Compacted
from tests.support.consumers import ack_all, payloads, take, unique
from tests.support.flows import numbered, publish_many
from tests.support.operator import Operator
from tests.support.wire import Client

#: Members that are killed are found dead soon; nothing here may depend on the heartbeat.
OPTIONS = "lease = 2.0\nview_lease = 3.5"
ECQ = "[plugins.ecq]\nheartbeat = 100000.0\nmax_messages = 50\n"
both_kinds = pytest.mark.parametrize("kind", ["exclusive", "shared"])


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=compacted", cluster=OPTIONS, more=ECQ) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


def at_each(nodes: ClusterNodes, kind: str) -> list[Compacted]:
    """One queue, as clients of each node see it."""
    name = unique("q")
    return [Compacted(node, name, kind) for node in nodes.nodes]


@both_kinds
def test_what_is_appended_at_any_node_comes_to_a_consumer_at_another(nodes: ClusterNodes, kind: str) -> None:
    """At once, in the order of its numbers, and the last value of each key is that of the last acknowledged publish."""
    queues = at_each(nodes, kind)
    with queues[0].consumer(5) as consumer:
        for number in range(30):
            queues[number % 3].put((f"k{number % 10}", b"%d" % number))
        got = take(consumer, 30)
        assert list(range(1, 31)) == queues[0].numbers(got)
        assert [b"%d" % number for number in range(30)] == payloads(got)
    for node, queue in zip(nodes.nodes, queues, strict=True):
        with Operator(node) as operator:
            assert [b"%d" % number for number in range(20, 30)] == queue.stored(operator)
            assert 30 == queue.shown(operator)["last"]


@both_kinds
def test_a_consumer_moves_under_load(nodes: ClusterNodes, kind: str) -> None:
    """No old value after a newer one, nothing passed over, and in the end the last value of each key."""
    queues = at_each(nodes, kind)
    consumer_id = queues[0].name
    newest: dict[str, int] = {}
    writers = [Client(node, version=5) for node in nodes.nodes[:2]]
    for writer in writers:
        assert 0 == writer.connect(unique("pub")).reason
    consumer = queues[0].sleeper(5, client_id=consumer_id)

    def seen(count: int) -> None:
        for message in take(consumer, count):
            (number,) = queues[0].numbers([message])
            (key,) = queues[0].keys([message])
            assert newest.get(key, 0) <= number, f"{key}: {number} after {newest[key]}"
            newest[key] = number

    last = 0
    for step in range(9):
        for at, writer in enumerate(writers):
            for key in range(8):
                publish_many(writer, queues[0].write(f"{at}-{key}"), [b"%d" % step], 1)
                last += 1
        seen(4)
        moved = queues[(step + 1) % 3].sleeper(5, client_id=consumer_id)
        consumer.close()
        consumer = moved
    while max(newest.values()) < last or len(newest) < 16:
        seen(1)
    with Operator(nodes[1]) as operator:
        found = {each["properties"]["key"]: each["position"] for each in queues[1].messages(operator)}
    assert found == newest
    for client in (*writers, consumer):
        client.close()


@both_kinds
def test_a_node_is_killed_whose_consumer_holds_messages(nodes: ClusterNodes, kind: str) -> None:
    queues = at_each(nodes, kind)
    consumer = queues[2].sleeper(5, client_id=queues[2].name)
    queues[0].put_numbers(10)
    first = take(consumer, 10, ack=False)
    ack_all(consumer, first[:4])
    with Operator(nodes[0]) as operator:
        while queues[0].shown(operator)["consuming"][0]["progress"] < 4:
            pass
    nodes[2].kill()
    queues[0].put(("k9", b"newer"))
    try:
        with queues[1].sleeper(5, client_id=queues[1].name) as again:
            got = take(again, 6)
        assert [5, 6, 7, 8, 9, 11] == queues[1].numbers(got)
        assert b"newer" == got[-1].payload
    finally:
        nodes.nodes[2] = nodes.node("n3").start()


@both_kinds
def test_the_operator_of_any_node_shows_rewinds_and_deletes(nodes: ClusterNodes, kind: str) -> None:
    queues = at_each(nodes, kind)
    flag = [] if kind == "exclusive" else ["--shared"]
    consumer_id = queues[0].name
    who = [] if kind == "exclusive" else ["--consumer", consumer_id]
    with queues[0].consumer(5, client_id=consumer_id) as consumer:
        queues[1].put_numbers(5)
        take(consumer, 5)
        shown = [
            json.loads(run("queue", "show", queues[0].name, *flag, "--http", node.http, "--json").stdout)
            for node in nodes.nodes
        ]
        assert [(True, 5)] * 3 == [
            (view["consuming"][0]["connected"], view["consuming"][0]["progress"]) for view in shown
        ]
        rewound = run("queue", "rewind", queues[0].name, *flag, *who, "--to", 3, "--http", nodes[2].http, "--json")
        assert (5, 2, 3) == tuple(json.loads(rewound.stdout)[key] for key in ("before", "progress", "messages"))
        assert [3, 4, 5] == queues[0].numbers(take(consumer, 3))
        run("queue", "delete", queues[0].name, f"--{kind}", "--yes", "--http", nodes[1].http)
        queues[0].put(("k0", b"after"))
        assert [6] == queues[0].numbers(take(consumer, 1))
        tails = [
            run("queue", "tail", queues[0].name, *flag, "--http", node.http, "--json").stdout for node in nodes.nodes
        ]
        assert 1 == len(set(tails))
        assert "after" in tails[0]


def test_the_bound_of_a_queue_holds_over_the_nodes(nodes: ClusterNodes) -> None:
    """Fifty keys fit (`max_messages`), whoever appends them; newer values of them always do."""
    queues = at_each(nodes, "exclusive")
    writers = [Client(node, version=5) for node in nodes.nodes]
    for writer in writers:
        assert 0 == writer.connect(unique("pub")).reason
    for number, payload in enumerate(numbered(50)):
        publish_many(writers[number % 3], queues[0].write(f"k{number}"), [payload], 1)
    for writer in writers:
        refused = writer.publish(queues[0].write("one more"), b"x", 1)
        assert refused is not None and 0x97 == refused.reason
        publish_many(writer, queues[0].write("k7"), [b"newer"], 1)
        writer.close()
    with Operator(nodes[0]) as operator:
        assert 50 == queues[0].shown(operator)["messages"]
