"""Capture rules of a real node: published messages are copied into a stream, a Redis stream and a Redis channel.

What rules promise is tested without a node (tests/unit/capture). Here a Redis server is beside the node that is not its
store, is the store, goes away and comes back.
"""

from __future__ import annotations

import json
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
from tests.support.flows import CONTENT_TYPE, both_versions
from tests.support.node import NodeProcess
from tests.support.operator import Operator, payload_of
from tests.support.redis import RedisServer
from tests.support.wire import PUBACK, PUBREC, prop, publish_packet

ODD = [bytes(range(256)), b"", b"\r\n\0{}\n", b"\xff" * 70_000, "grün".encode()]
QUOTA_EXCEEDED = 0x97


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "rocksdb://", http=True) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer({"appendfsync": "always"}) as running:
        yield running


def entries(server: RedisServer, key: str) -> list[dict[bytes, bytes]]:
    """The fields of the entries of a Redis stream, oldest first."""
    found: Any = server.client.xrange(key)
    return [fields for _, fields in found]


def captured(server: RedisServer, key: str) -> list[bytes]:
    return [fields[b"payload"] for fields in entries(server, key)]


@both_versions
def test_a_day_of_three_rules(node: NodeProcess, operator: Operator, server: RedisServer, version: int) -> None:
    """What is acknowledged is in the stream, in Redis and with the subscribers, as it was published, in order."""
    name, car = unique("c"), unique("car")
    server.command("CONFIG", "SET", "requirepass", "fluffy-secret")  # its connection stays good
    url = f"redis://:fluffy-secret@{server.address}"
    operator.create("streams", name, topics=[])
    operator.create("captures", f"{name}-stream", topics=[f"{name}/#", f"{name}/x"], to=f"stream:{name}")
    operator.create("captures", f"{name}-redis", topics=[f"{name}/#"], to=f"redis-stream:{name}", redis=url)
    operator.create("captures", f"{name}-heard", topics=[f"{name}/#"], to=f"redis-channel:{name}", redis=url)
    listening = redis.Redis(server.host, server.port, password="fluffy-secret", socket_timeout=60)
    before = time.time()
    try:
        with listening as client, client.pubsub() as listener, connected(node) as live:
            listener.subscribe(name)
            assert "subscribe" == heard(listener)["type"]
            subscribe(live, f"{name}/#")
            with connected(node, car, version) as publisher:
                for number, payload in enumerate(ODD):
                    properties = prop(CONTENT_TYPE, "t/x") + user("a", "b") if version == 5 else b""
                    publisher.publish(f"{name}/x", payload, 1 + number % 2, properties=properties)
                    assert payload == captured(server, name)[-1], "acknowledged is there"
                publisher.publish(f"{name}/x", b"last", 0)
            assert [*ODD, b"last"] == payloads(take(live, len(ODD) + 1)), "they are routed as usual"
            for payload in [*ODD, b"last"]:
                head, _, body = heard(listener)["data"].partition(b"\n")
                told = json.loads(head)
                assert (payload, f"{name}/x", car) == (body, told["topic"], told["client"])
        wait_until(lambda: captured(server, name) == [*ODD, b"last"], "all are copied")
        found = entries(server, name)
        assert {(f"{name}/x".encode(), car.encode())} == {(fields[b"topic"], fields[b"client"]) for fields in found}
        assert all(before - 1 < float(fields[b"time"]) < time.time() + 1 for fields in found)
        guids = [fields[b"guid"] for fields in found]
        assert guids == sorted(set(guids)), "GUIDs sort by time"
        wait_until(lambda: len(operator.read("streams", name)) > len(ODD), "the last one, of QoS 0, is stored")
        stored = operator.read("streams", name)
        assert [*ODD, b"last"] == [payload_of(message) for message in stored]
        assert {car} == {message["publisher"] for message in stored}
        operator.change("captures", f"{name}-redis", topics=[f"{name}/y"], to=f"redis-stream:{name}", redis=url)
        operator.delete("captures", f"{name}-stream")
        fill(node, [(f"{name}/x", b"x"), (f"{name}/y", b"y")])
        assert [b"last", b"y"] == captured(server, name)[-2:], "from the next message on"
        assert len(stored) == len(operator.read("streams", name))
        shown = json.dumps([operator.show("captures", f"{name}-redis"), operator.asked("capture", "list")])
        assert "fluffy" not in shown and "fluffy" not in node.log
    finally:
        server.command("CONFIG", "SET", "requirepass", "")


def heard(listener: Any) -> dict[str, Any]:
    message = listener.get_message(timeout=60)
    assert message is not None
    return dict(message)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_redis_that_is_away_and_back(node: NodeProcess, operator: Operator, server: RedisServer, how: str) -> None:
    """Others are served meanwhile; who was acknowledged finds its message there, once; publishing works again."""
    name = unique("c")
    url = f"{server.url}?patience=60"  # it may take a while to start again
    operator.create("captures", name, topics=[f"{name}/#"], to=f"redis-stream:{name}", redis=url)
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
    fill(node, numbered(f"{name}/a", 10, 20))
    assert [b"%d" % number for number in range(30)] == captured(server, name)
    operator.delete("captures", name)


def test_publishers_hear_that_redis_is_away(node: NodeProcess, operator: Operator, server: RedisServer) -> None:
    """MQTT 5 is refused, MQTT 3 is sent away, QoS 0 waits; when Redis is back, everything goes on."""
    name = unique("c")
    url = f"{server.url}?patience=0.5"
    operator.create("captures", name, topics=[f"{name}/#"], to=f"redis-stream:{name}", redis=url)
    with connected(node) as publisher, connected(node) as live, connected(node, "", 4) as old:
        subscribe(live, f"{name}/#")
        server.stop()
        publisher.publish(f"{name}/a", b"0", 0)
        for qos, kind in ((1, PUBACK), (2, PUBREC)):
            packet_id = publisher.next_id()
            publisher.send(publish_packet(f"{name}/a", b"refused", qos=qos, packet_id=packet_id))
            assert QUOTA_EXCEEDED == publisher.await_answer(kind, packet_id).reason
        old.send(publish_packet(f"{name}/a", b"refused", version=4, qos=1, packet_id=1))
        old.expect_closed()
        server.start()
        view = operator.show("captures", name)
        assert (3, 0) == (view["failed"], view["refused"])
        wait_until(lambda: captured(server, name) == [b"0"], "what has waited is copied")
        publisher.publish(f"{name}/a", b"1", 1)
        assert [b"0", b"1"] == payloads(take(live, 2)) == captured(server, name)
    operator.delete("captures", name)
