"""Streams of three real nodes on one store: appended, read and declared anywhere, whoever dies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.scenarios.witness import metrics, wait_until
from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import run
from tests.support.consumers import (
    ack_all,
    connected,
    payloads,
    receive_maximum,
    settled,
    subscribe,
    take,
    unique,
    user,
    user_property,
)
from tests.support.consumers import lasting as lasting_client
from tests.support.flows import both_versions, numbered, publish_many
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, Packet, Will

OFFSET = "stream-offset"
#: A member that is killed is found dead soon; what is too much goes soon.
OPTIONS = "lease = 2.0\nview_lease = 3.5"
STREAMS = "[plugins.streams]\ntrim_interval = 0.5\n"
WINDOW = 16
DEATH = 120.0  #: seconds until others have certainly taken over


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=streams", cluster=OPTIONS, more=STREAMS) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


@pytest.fixture
def operators(nodes: ClusterNodes) -> Iterator[list[Operator]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Operator(node)) for node in nodes.nodes]


def read(client: Client, name: str, offset: str = "") -> None:
    """Subscribe; each version says in its own way where it begins."""
    if client.version < 5:
        subscribe(client, f"$stream/{name}/{offset}".removesuffix("/"))
    else:
        subscribe(client, f"$stream/{name}", 1, *([user(OFFSET, offset)] if offset else []))


def offsets(messages: list[Packet]) -> list[int]:
    return [int(user_property(message, OFFSET)) for message in messages]


def live(client: Client, number: int) -> list[bytes]:
    """Receive so many live messages; those that were published right after SUBACK may come as retained ones too."""
    found: list[bytes] = []
    while len(found) < number:
        packet = client.receive()
        if not packet.retain:
            found.append(packet.payload)
    return found


def counted(node: NodeProcess, event: str) -> float:
    return metrics(node).get(f'motorcade_stream_record_events_total{{event="{event}"}}', 0.0)


@both_versions
def test_what_is_declared_and_appended_anywhere_is_read_and_shown_everywhere(
    nodes: ClusterNodes, operators: list[Operator], version: int
) -> None:
    """By command on one node; wills, retained and relayed messages are in the stream once."""
    name = unique("s")
    assert 0 == run("stream", "create", name, "--topic", f"{name}/#", *nodes[1].at).returncode
    early = [connected(node, version=version) for node in nodes.nodes]
    for reader in early:
        read(reader, name, "earliest")
    listeners = [connected(node) for node in nodes.nodes]
    for listener in listeners:
        listener.subscribe(f"{name}/#", 1)
    sent: list[bytes] = []
    for number, node in enumerate(nodes.nodes * 2):
        with connected(node) as publisher:
            for qos, retain in ((0, False), (1, True), (2, False)):
                sent.append(b"%d:%d" % (number, qos))
                publisher.publish(f"{name}/{number}", sent[-1], qos, retain=retain)
                for reader in early:
                    assert sent[-1] == reader.receive().payload
    connected(nodes[0], will=Will(f"{name}/will", b"will", qos=1)).abort()
    sent.append(b"will")
    for reader in early:
        assert b"will" == reader.receive().payload
        reader.close()
    for node in nodes.nodes:
        with connected(node) as late:
            read(late, name, "earliest")
            messages = take(late, len(sent))
            assert (sent, list(range(1, len(sent) + 1))) == (payloads(messages), offsets(messages))
    for listener in listeners:
        assert sorted(sent) == sorted(live(listener, len(sent)))
        listener.close()
    stored = [operator.read("streams", name, after=2, limit=5) for operator in operators]
    assert stored[0] == stored[1] == stored[2] and [3, 4, 5, 6, 7] == [found["position"] for found in stored[0]]
    listed = [run("stream", "read", name, "--limit", 3, *node.at).stdout for node in nodes.nodes]
    assert listed[0] == listed[1] == listed[2] and listed[0]


def test_a_capture_rule_of_any_node_copies_what_is_published_on_each_once(
    nodes: ClusterNodes, operators: list[Operator], request: pytest.FixtureRequest
) -> None:
    """Into a stream, and into a Redis stream that all nodes write to; also what is relayed, retained or a will."""
    name, key = unique("captured"), unique("redis")
    operators[0].create("streams", name)
    operators[1].create("captures", f"{name}.s", topics=[f"{name}/#"], to=f"stream:{name}")
    operators[2].create("captures", f"{name}.r", topics=[f"{name}/#"], to=f"redis-stream:{key}")
    listeners = [connected(node) for node in nodes.nodes]
    for listener in listeners:
        listener.subscribe(f"{name}/#", 2)
    expected: list[bytes] = []
    for number, node in enumerate(nodes.nodes):
        with connected(node) as publisher:
            for qos in (0, 1, 2):
                expected.append(b"%d:%d" % (number, qos))
                publisher.publish(f"{name}/{number}", expected[-1], qos, retain=qos == 1)
        connected(node, will=Will(f"{name}/will", b"will %d" % number, qos=1)).abort()
        expected.append(b"will %d" % number)
    for listener in listeners:
        assert sorted(expected) == sorted(live(listener, len(expected)))
        listener.close()
    with connected(nodes[0]) as late:
        late.subscribe(f"{name}/#", 1)
        assert late.receive().payload in {b"0:1", b"1:1", b"2:1"}  # a retained message, which is not captured again
    wait_until(lambda: operators[0].show("streams", name)["records"] >= len(expected), "all is captured")
    found = [message["payload"].encode() for message in operators[1].read("streams", name, limit=100)]
    assert sorted(expected) == sorted(found)
    if "lone" in request.node.name:
        servers = request.getfixturevalue("lone_redis")
        wait_until(lambda: servers.client.xlen(key) >= len(expected), "all is in the Redis stream")
        assert sorted(expected) == sorted(fields[b"payload"] for _, fields in servers.client.xrange(key))
    operators[0].delete("captures", f"{name}.s")
    for operator, node in zip(operators, nodes.nodes, strict=True):
        assert f"{name}.s" not in operator.names("captures")
        with connected(node) as publisher:
            publisher.publish(f"{name}/late", b"late", 1)
    assert len(expected) == operators[0].show("streams", name)["records"]
    operators[0].delete("captures", f"{name}.r")


def test_every_node_lists_and_shows_the_same_readers(nodes: ClusterNodes, operators: list[Operator]) -> None:
    name = unique("shown")
    operators[0].create("streams", name, topics=[f"{name}/#"])
    with connected(nodes[2]) as publisher:
        publish_many(publisher, f"{name}/a", numbered(10), 1)
    readers = [connected(node, unique("reader")) for node in nodes.nodes]
    for done, reader in enumerate(readers, 2):
        read(reader, name, "earliest")
        ack_all(reader, take(reader, 10, ack=False)[:done])
        settled(reader)
    views = [operator.show("streams", name) for operator in operators]
    assert views[0] == views[1] == views[2]
    assert (10, 3, 8, {}) == tuple(views[0][key] for key in ("records", "readers", "lag", "unanswered"))
    expected = {(reader.client_id, f"n{number}", number + 1) for number, reader in enumerate(readers, 1)}
    assert expected == {(found["client"], found["node"], found["offset"]) for found in views[0]["reading"]}
    listed = [json.loads(run("stream", "list", "--json", *node.at).stdout) for node in nodes.nodes]
    assert listed[0] == listed[1] == listed[2]
    for reader in readers:
        reader.close()


def test_latest_is_what_is_published_anywhere_after_the_suback(nodes: ClusterNodes, operators: list[Operator]) -> None:
    """A hundred times: nothing from before, and nothing of after is missing."""
    name = unique("latest")
    operators[0].create("streams", name, topics=[f"{name}/#"])
    publishers = [connected(node) for node in nodes.nodes]
    for number in range(100):
        publishers[number % 3].publish(f"{name}/a", b"before %d" % number, 1)
        with connected(nodes[(number + 1 + number // 3) % 3]) as reader:
            read(reader, name, "latest")
            publishers[(number + 2) % 3].publish(f"{name}/a", b"after %d" % number, 1)
            assert b"after %d" % number == reader.receive().payload
    for publisher in publishers:
        publisher.close()


class Publishing:
    """Numbers to a topic from one node, one after the other, until it is stopped."""

    def __init__(self, node: NodeProcess, topic: str) -> None:
        self.count = 0
        self.failed: BaseException | None = None
        self._client = connected(node)
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publishing")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.002):
                publish_many(self._client, self._topic, numbered(8, self.count), 1)
                self.count += 8
        except BaseException as error:  # noqa: BLE001 - told by `stop`
            self.failed = error

    def stop(self) -> int:
        """How many were acknowledged."""
        self._stop.set()
        self._thread.join(120)
        self._client.close()
        assert self.failed is None, self.failed
        return self.count


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "clean"])
def test_a_consumer_moves_under_load(nodes: ClusterNodes, operators: list[Operator], *, lasting: bool) -> None:
    """From node to node without saying goodbye. Nothing is skipped; what it has acknowledged does not come again."""
    name, client_id = unique("moves"), unique("mover")
    operators[1].create("streams", name, topics=[f"{name}/#"])
    publishing = [Publishing(node, f"{name}/{number}") for number, node in enumerate(nodes.nodes[:2])]
    before: Client | None = None
    got: dict[int, Packet] = {}
    done = 0
    try:
        for step in range(12):
            node = nodes[(step + step // 3) % 3]
            connect = lasting_client if lasting else connected
            client = connect(node, client_id, 5, receive_maximum(WINDOW))
            assert client.connack is not None and bool(lasting and step) is bool(client.connack.session_present)
            if not lasting or not step:
                read(client, name, "" if step else "earliest")
            messages = take(client, 1, ack=False)
            first = offsets(messages)[0]
            displaced = any(
                client_id in line and "client_displaced" in line for one in nodes.nodes for line in one.output
            )
            assert first == done + 1 or (displaced and first <= done), f"step {step}: {first} after {done}"
            while len(messages) < 40:
                ack_all(client, messages[-1:])
                messages += take(client, 1, ack=False)
            assert list(range(first, first + 40)) == offsets(messages), "no hole, no repetition"
            got |= dict(zip(offsets(messages), messages, strict=True))
            settled(client)  # what was acknowledged was read
            done = first + 38
            if before is not None:
                before.close()
            before = client
    finally:
        sent = [one.stop() for one in publishing]
    assert before is not None
    before.close()
    stored = operators[2].show("streams", name)
    assert sum(sent) == stored["last"] == stored["records"]
    last = connected(nodes[2], client_id, 5, receive_maximum(WINDOW))
    read(last, name)
    rest = take(last, sum(sent) - done)
    got |= dict(zip(offsets(rest), rest, strict=True))
    assert list(range(1, sum(sent) + 1)) == sorted(got)
    for number, count in enumerate(sent):
        from_one = [got[at].payload for at in sorted(got) if got[at].topic == f"{name}/{number}"]
        assert numbered(count) == from_one, "in the order of their publisher"
    last.close()


def test_a_stream_is_changed_and_deleted_everywhere(nodes: ClusterNodes, operators: list[Operator]) -> None:
    name = unique("gone")
    operators[0].create("streams", name, topics=[f"{name}/a"])
    readers = [connected(node) for node in nodes.nodes]
    for reader in readers:
        read(reader, name, "earliest")
    operators[1].change("streams", name, topics=[f"{name}/b"])
    for number, node in enumerate(nodes.nodes):
        with connected(node) as publisher:
            publisher.publish(f"{name}/a", b"not taken", 1)
            publisher.publish(f"{name}/b", b"%d" % number, 1)
    for reader in readers:
        assert [b"0", b"1", b"2"] == payloads(take(reader, 3))
    operators[2].delete("streams", name)
    for operator, node in zip(operators, nodes.nodes, strict=True):
        assert name not in operator.names("streams")
        with connected(node) as publisher:
            publisher.publish(f"{name}/b", b"for nobody", 1)
    operators[0].create("streams", name, topics=[f"{name}/b"])
    for number, node in enumerate(nodes.nodes):
        with connected(node) as publisher:
            publisher.publish(f"{name}/b", b"new %d" % number, 1)
    for reader in readers:
        messages = take(reader, 3)
        assert ([b"new 0", b"new 1", b"new 2"], [1, 2, 3]) == (payloads(messages), offsets(messages))
        reader.close()
    assert [3, 3, 3] == [operator.show("streams", name)["records"] for operator in operators]


def test_a_killed_steward_is_followed_by_another_one_and_readers_miss_nothing(nodes: ClusterNodes) -> None:
    """The node that trims a stream is killed under load; those that read another stream of the same topics go on."""
    with ExitStack() as stack:
        operators = [stack.enter_context(Operator(node)) for node in nodes.nodes]
        name, whole = unique("kept"), unique("whole")
        operators[0].create("streams", name, topics=[f"{name}/#"], max_messages=200)
        operators[0].create("streams", whole, topics=[f"{name}/#"])
        before = [counted(node, "trimmed") for node in nodes.nodes]
        with connected(nodes[0]) as publisher:
            publish_many(publisher, f"{name}/a", numbered(600), 1)
        wait_until(lambda: operators[0].show("streams", name)["records"] <= 200, "the stream is trimmed")
        trimmed = [counted(node, "trimmed") - was for node, was in zip(nodes.nodes, before, strict=True)]
        assert [0.0, 0.0] == sorted(trimmed)[:2] and sum(trimmed) == 400, "by one node"
        dead = trimmed.index(max(trimmed))
        first, second = (number for number in range(3) if number != dead)
        reader = connected(nodes[first])
        read(reader, whole, "latest")
        publishing = Publishing(nodes[second], f"{name}/b")
        got = take(reader, 50)
        nodes[dead].kill()
        got += take(reader, 200)
        before = [counted(nodes[number], "trimmed") for number in (first, second)]

        def goes_on() -> bool:
            got.extend(take(reader, 50))
            return sum(counted(nodes[number], "trimmed") for number in (first, second)) > sum(before)

        wait_until(goes_on, "another node trims the stream", DEATH)
        sent = publishing.stop()
        got += take(reader, sent - len(got))
        assert numbered(sent) == payloads(got)
        assert list(range(601, 601 + sent)) == offsets(got)
        wait_until(lambda: operators[first].show("streams", name)["records"] <= 200, "the stream is trimmed", DEATH)
        reader.close()
        nodes.nodes[dead] = nodes.node(f"n{dead + 1}").start()
    with Operator(nodes[dead]) as again, connected(nodes[dead]) as back:
        view: dict[str, Any] = again.show("streams", name)
        assert 600 + sent == view["last"]
        read(back, name, "latest")
        with connected(nodes[first]) as publisher:
            publisher.publish(f"{name}/c", b"after", 1)
        assert b"after" == back.receive().payload
