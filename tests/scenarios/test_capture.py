"""Capture rules: published messages are copied into a stream, a Redis stream or a Redis channel, as they are.

One node on the embedded store serves most tests, with a Redis server beside it that is not its store.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    connected,
    fill,
    numbered,
    numbers,
    payloads,
    settled,
    subscribe,
    take,
    unique,
    user,
)
from tests.support.flows import CONTENT_TYPE, every_qos
from tests.support.node import NodeProcess
from tests.support.operator import Operator, payload_of
from tests.support.redis import RedisServer
from tests.support.wire import PUBACK, prop, publish_packet

ODD = [bytes(range(256)), b"", b"\r\n\0{}\n", b"\xff" * 70_000, "grün".encode()]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "rocksdb://", http=True) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def entries(server: RedisServer, key: str) -> list[dict[bytes, bytes]]:
    """The fields of the entries of a Redis stream, oldest first."""
    found: Any = server.client.xrange(key)
    return [fields for _, fields in found]


# --- into a stream ------------------------------------------------------------------------------------------------


def test_into_a_stream_and_back(node: NodeProcess, desk: Operator) -> None:
    """Read over MQTT and with the command line: the messages as they were published, with who and when."""
    name = unique("c")
    desk.done("stream", "create", name)
    desk.done("capture", "create", name, "--topic", f"{name}/+/x", "--topic", f"{name}/y", "--to", f"stream:{name}")
    before = time.time()
    car = unique("car")
    with connected(node, car) as publisher, connected(node) as live:
        subscribe(live, f"{name}/#")
        for payload in ODD:
            publisher.publish(f"{name}/1/x", payload, 1, properties=prop(CONTENT_TYPE, "t/x") + user("a", "b"))
        publisher.publish(f"{name}/z", b"no", 1)
        publisher.publish(f"{name}/y", b"last", 2)
        assert len(ODD) + 2 == len(take(live, len(ODD) + 2)), "they are routed as usual"
    with connected(node) as reader:
        subscribe(reader, f"$stream/{name}/earliest")
        messages = take(reader, len(ODD) + 1)
    assert [*ODD, b"last"] == payloads(messages)
    assert [f"{name}/1/x"] * len(ODD) + [f"{name}/y"] == [message.topic for message in messages]
    assert "t/x" == messages[0].prop(CONTENT_TYPE)
    found = desk.asked("stream", "read", name, "--limit", 100)
    assert [*ODD, b"last"] == [payload_of(message) for message in found]
    assert {car} == {message["publisher"] for message in found}
    assert len(found) == len({message["guid"] for message in found})
    assert all(before - 1 < message["time"] < time.time() + 1 for message in found)
    assert b"last" in desk.done("stream", "read", name).encode()


@every_qos
def test_every_qos_is_captured(node: NodeProcess, desk: Operator, qos: int) -> None:
    name = unique("c")
    desk.create("streams", name, topics=[])
    desk.create("captures", name, topics=[f"{name}/#"], to=f"stream:{name}")
    with connected(node) as publisher:
        for number in range(20):
            publisher.publish(f"{name}/a", b"%d" % number, qos)
    wait_until(lambda: len(desk.read("streams", name)) == 20, "all are captured")
    assert [b"%d" % number for number in range(20)] == [payload_of(m) for m in desk.read("streams", name)]


def test_several_rules_and_one_stream(node: NodeProcess, desk: Operator) -> None:
    """Each rule copies for itself."""
    name = unique("c")
    desk.create("streams", name, topics=[f"{name}/own"])
    desk.create("captures", f"{name}-1", topics=[f"{name}/a", f"{name}/+"], to=f"stream:{name}")
    fill(node, [(f"{name}/a", b"1"), (f"{name}/own", b"2")])
    assert [b"1", b"2", b"2"] == sorted(payload_of(message) for message in desk.read("streams", name))


# --- into Redis ---------------------------------------------------------------------------------------------------


def test_into_a_redis_stream(node: NodeProcess, desk: Operator, server: RedisServer) -> None:
    """One entry per message, in order; the payload is untouched, the rest are fields beside it."""
    key = unique("fleet:messages")
    desk.done(
        *("capture", "create", key.replace(":", "-"), "--topic", f"{key}/#", "--to", f"redis-stream:{key}"),
        *("--set", f"redis={server.url}"),
    )
    car = unique("car")
    before = time.time()
    with connected(node, car, 5) as publisher:
        for payload in ODD:
            publisher.publish(f"{key}/a", payload, 1, properties=user("a", "b"))
    found = entries(server, key)  # acknowledged is there
    assert ODD == [fields[b"payload"] for fields in found]
    assert {f"{key}/a".encode()} == {fields[b"topic"] for fields in found}
    assert {car.encode()} == {fields[b"client"] for fields in found}
    assert all(before - 1 < float(fields[b"time"]) < time.time() + 1 for fields in found)
    assert len(found) == len({fields[b"guid"] for fields in found})
    assert sorted(fields[b"guid"] for fields in found) == [fields[b"guid"] for fields in found], "GUIDs sort by time"


def test_many_messages_keep_their_order(node: NodeProcess, desk: Operator, server: RedisServer) -> None:
    key = unique("many")
    desk.create("captures", key, topics=[f"{key}/#"], to=f"redis-stream:{key}", redis=server.url)
    fill(node, numbered(f"{key}/a", 3000))
    assert [b"%d" % number for number in range(3000)] == [fields[b"payload"] for fields in entries(server, key)]


def test_into_a_redis_channel(node: NodeProcess, desk: Operator, server: RedisServer) -> None:
    """A line of JSON that tells topic, client, time and GUID, then the payload as it is."""
    channel = unique("messages:published")
    desk.create(
        "captures",
        unique("c"),
        topics=[f"{channel}/#"],
        to=f"redis-channel:{channel}",
        redis=server.url,
    )
    with redis.Redis(server.host, server.port, socket_timeout=60) as client, client.pubsub() as listener:
        listener.subscribe(channel)
        assert "subscribe" == heard(listener)["type"]
        car = unique("car")
        with connected(node, car) as publisher:
            for payload in ODD:
                publisher.publish(f"{channel}/a", payload, 1)
        for payload in ODD:
            head, _, body = heard(listener)["data"].partition(b"\n")
            told = json.loads(head)
            assert payload == body
            assert (f"{channel}/a", car) == (told["topic"], told["client"])
            assert {"time", "guid"} <= set(told)


def heard(listener: Any) -> dict[str, Any]:
    message = listener.get_message(timeout=60)
    assert message is not None
    return dict(message)


def test_the_own_redis_of_the_node(lone_redis: RedisServer) -> None:
    """A node that keeps its state in Redis needs no other URL; its own keys and those of rules do not meet."""
    lone_redis.empty()
    with NodeProcess("--store", lone_redis.url, http=True) as node, Operator(node) as desk:
        desk.create("captures", "c", topics=["t/#"], to="redis-stream:captured")
        fill(node, numbered("t/a", 100))
        assert 100 == len(entries(lone_redis, "captured"))


def test_without_a_redis_a_rule_says_so(desk: Operator) -> None:
    """A node on the embedded store has none of its own: the message names the option to set."""
    told = desk.refused("capture", "create", unique("c"), "--topic", "t", "--to", "redis-stream:x")
    assert "redis" in told


@pytest.mark.parametrize(
    ("to", "word"),
    [
        ("nowhere", "redis-stream:"),
        ("stream:", "stream:"),
        ("stream:-bad", "-bad"),
        ("kafka:topic", "kafka"),
    ],
)
def test_a_bad_target_is_refused(desk: Operator, to: str, word: str) -> None:
    assert word in desk.refused("capture", "create", unique("c"), "--topic", "t", "--to", to)


# --- changes, and trouble -----------------------------------------------------------------------------------------


def test_a_rule_is_changed_while_messages_come(node: NodeProcess, desk: Operator, server: RedisServer) -> None:
    """Other topics, another target, gone: from the next message on, with nothing lost in between."""
    name = unique("c")
    desk.create("captures", name, topics=[f"{name}/a"], to=f"redis-stream:{name}-1", redis=server.url)
    both = [(f"{name}/a", b"a"), (f"{name}/b", b"b")]
    fill(node, both)
    desk.done("capture", "change", name, "--topic", f"{name}/b")
    fill(node, both)
    desk.change("captures", name, topics=[f"{name}/#"], to=f"redis-stream:{name}-2", redis=server.url)
    fill(node, both)
    desk.done("capture", "delete", name, "--yes")
    fill(node, both)
    assert [b"a", b"b"] == [fields[b"payload"] for fields in entries(server, f"{name}-1")]
    assert [b"a", b"b"] == [fields[b"payload"] for fields in entries(server, f"{name}-2")]
    assert name not in desk.names("captures")


def test_publishing_goes_on_while_rules_change(node: NodeProcess, desk: Operator, server: RedisServer) -> None:
    """A rule that is replaced by the same rule again and again loses nothing and doubles nothing."""
    name = unique("c")
    options = {"topics": [f"{name}/#"], "to": f"redis-stream:{name}", "redis": server.url}
    desk.create("captures", name, **options)
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            fill(node, numbered(f"{name}/a", 2000))
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    while thread.is_alive():
        desk.change("captures", name, **options)
    thread.join()
    assert [] == errors
    assert list(range(2000)) == [int(fields[b"payload"]) for fields in entries(server, name)]


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_redis_that_is_away_and_back(node: NodeProcess, desk: Operator, how: str) -> None:
    """Others are served meanwhile; who was acknowledged finds its message there, once; publishing works again."""
    name = unique("c")
    with RedisServer({"appendfsync": "always"}) as server:
        url = f"{server.url}?patience=60"  # it may take a while to start again
        desk.create("captures", name, topics=[f"{name}/#"], to=f"redis-stream:{name}", redis=url)
        fill(node, numbered(f"{name}/a", 10))
        if how == "killed":
            server.kill()
        else:
            server.pause()
        with connected(node) as publisher, connected(node) as live, connected(node) as other:
            subscribe(live, f"{name}/#")
            subscribe(live, "other")
            for number in range(10, 20):
                publisher.send(publish_packet(f"{name}/a", b"%d" % number, qos=1, packet_id=number))
            assert [] == settled(publisher)
            other.publish("other", b"x", 1)
            assert [b"x"] == payloads(take(live, 1))
            if how == "killed":
                server.start()
            else:
                server.resume()
            answers = [publisher.expect(PUBACK, 60).packet_id for _ in range(10)]
            assert list(range(10, 20)) == numbers(take(live, 10)), "what was taken is routed, too"
        assert list(range(10, 20)) == answers
        assert list(range(20)) == [int(fields[b"payload"]) for fields in entries(server, name)]
        fill(node, numbered(f"{name}/a", 10, 20))
        assert list(range(30)) == [int(fields[b"payload"]) for fields in entries(server, name)]
        desk.delete("captures", name)


def test_what_waits_for_a_redis_that_is_away_is_bounded(node: NodeProcess, desk: Operator) -> None:
    """More than `max_pending` are refused, and the publisher hears so; the count shows it."""
    name = unique("c")
    with RedisServer() as server:
        desk.create("captures", name, topics=[f"{name}/#"], to=f"redis-stream:{name}", redis=server.url, max_pending=10)
        fill(node, numbered(f"{name}/a", 1))
        server.pause()
        with connected(node) as publisher:
            for number in range(30):
                publisher.send(publish_packet(f"{name}/a", b"%d" % number, qos=1, packet_id=number + 1))
            assert [] == settled(publisher)
            server.resume()
            answers = {answer.packet_id: answer.reason for answer in (publisher.expect(PUBACK, 60) for _ in range(30))}
            assert {number + 1 for number in range(10, 30)} == {key for key, code in answers.items() if code == 0x97}
            assert set(range(1, 11)) == {key for key, code in answers.items() if (code or 0) < 0x80}
        assert 11 == len(entries(server, name))
        desk.delete("captures", name)


def test_a_password_is_shown_to_nobody(node: NodeProcess, desk: Operator) -> None:
    """Neither in a list nor in the view of a rule nor in the log."""
    with RedisServer() as server:
        name = unique("c")
        server.command("CONFIG", "SET", "requirepass", "fluffy-secret")  # its connection stays good
        url = f"redis://:fluffy-secret@{server.address}"
        desk.create("captures", name, topics=[f"{name}/#"], to=f"redis-stream:{name}", redis=url)
        fill(node, numbered(f"{name}/a", 5))
        assert 5 == len(entries(server, name))
        shown = desk.done("capture", "show", name) + desk.done("capture", "list", "--json")
        shown += json.dumps(desk.show("captures", name))
        desk.delete("captures", name)
    assert "fluffy" not in shown
    assert "fluffy" not in node.log
