"""Compacted queues of a real process, on each engine: a day in the life of both forms.

What they promise is tested in virtual time (tests/unit/ecq), what outlives the node in `test_ecq_durable.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.compacted import Compacted
from tests.support.consumers import (
    QUOTA_EXCEEDED,
    TOPIC_INVALID,
    ack_all,
    ask,
    connected,
    numbers,
    payloads,
    receive_maximum,
    settled,
    subscribe,
    take,
    take_until,
    unique,
)
from tests.support.flows import REASON_STRING, both_versions
from tests.support.kept import sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import publish_packet

NOT_AUTHORIZED = 0x87
MOST = 150  #: messages in a queue


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), f"[plugins.ecq]\nmax_messages = {MOST}\n") as running:
        yield running


@both_versions
def test_a_day_of_a_consumer(node: NodeProcess, operator: Operator, version: int) -> None:
    queue = Compacted(node, unique("car"))
    room = 10 if version == 5 else 32
    queue.put_numbers(100, keys=50)
    with connected(node) as other, queue.consumer(version, receive_maximum(10)) as client:
        subscribe(other, "#")
        held = take(client, room, ack=False)
        assert [] == settled(client), "the window is full"
        ack_all(client, held)
        seen = held + take(client, 50 - room)
        assert list(range(50, 100)) == numbers(seen), "the last value of each key"
        assert version < 5 or list(range(51, 101)) == queue.numbers(seen)
        for qos in (0, 1, 2):
            with connected(node, "", version) as producer:
                producer.publish(queue.write(f"live/{qos}"), b"%d" % qos, qos, retain=True)
            (message,) = take(client, 1)
            assert (queue.read(f"live/{qos}"), 1, False) == (message.topic, message.qos, message.retain)
        with connected(node) as producer:
            producer.publish("mark", b"mark", 1)
        assert [b"mark"] == payloads(take(other, 1)), "nobody else gets what is in a queue"
        assert version < 5 or ask(other, queue.filter).reasons == [NOT_AUTHORIZED]
    with queue.sleeper(version) as client:
        queue.put(("a", b"old"), ("b", b"1"))
        assert [b"old", b"1"] == payloads(take(client, 2, ack=False))
        client.abort()
    queue.put(("a", b"new"))
    with queue.sleeper(version) as old, queue.sleeper(version) as client:
        old.expect_closed()
        assert [b"1", b"new"] == payloads(take(client, 2)), "a newer value takes the place of what was in flight"
        client.publish(queue.rewind, b"105", 1)
        assert [b"1", b"new"] == payloads(take(client, 2))
        settled(client)
    shown = queue.shown(operator)
    assert (55, 106) == (shown["messages"], shown["last"])
    assert [(queue.name, False, 106)] == [(c["client"], c["connected"], c["progress"]) for c in shown["consuming"]]


@both_versions
def test_what_is_refused_is_told(node: NodeProcess, version: int) -> None:
    """MQTT 5 hears why; MQTT 3 is disconnected, or gets 0x80."""
    queue = Compacted(node, unique("full"))
    queue.put_numbers(MOST)
    for topic, reason in ((queue.write("new"), QUOTA_EXCEEDED), (queue.read("k"), TOPIC_INVALID)):
        with connected(node, "", version) as producer:
            if version == 5:
                answer = producer.publish(topic, b"x", 1)
                assert answer is not None and reason == answer.reason and answer.prop(REASON_STRING)
            else:
                producer.send(publish_packet(topic, b"x", version=4, qos=1, packet_id=7))
                assert [] == producer.expect_closed()
    with queue.consumer(version) as client:
        answer = ask(client, f"$share/g/{queue.filter}")
        assert answer.reasons[0] >= 0x80 and (version < 5 or answer.prop(REASON_STRING))
        first = take(client, 1)  # it has been read: a value that is replaced before never comes
        queue.put(("k0", b"newer"))
        rest = take_until(client, b"newer")
        assert [*range(MOST)] == numbers([*first, *rest]), "a key that is there has its place"


@both_versions
def test_a_shared_queue_has_one_copy_and_everybody_their_own_progress(
    node: NodeProcess, operator: Operator, version: int
) -> None:
    queue = Compacted(node, unique("shared"), "shared")
    queue.put_numbers(100)
    names = [unique("c") for _ in range(3)]
    for name, count in zip(names, (30, 70, 0), strict=True):
        with queue.consumer(version, client_id=name) as client:
            assert list(range(count)) == numbers(take(client, count))
            settled(client)
            client.disconnect()
    before = queue.shown(operator)
    queue.put(("k99", b"100"))
    for name, count in zip(names, (30, 70, 0), strict=True):
        with queue.consumer(version, client_id=name) as client:
            assert [*range(count, 99), 100] == numbers(take(client, 100 - count))
            settled(client)
            client.publish(queue.rewind, b"101", 1)
            assert [100] == numbers(take(client, 1))
    after = queue.shown(operator)
    assert (100, 3) == (after["messages"], after["consumers"])
    assert abs(after["bytes"] - before["bytes"]) < 10
