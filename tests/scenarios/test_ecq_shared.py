"""`$SCQ/{queue}/#`: one compacted queue for many consumers, each with its own progress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.compacted import Compacted
from tests.support.consumers import (
    FILTER_INVALID,
    SHARED_NOT_SUPPORTED,
    TOPIC_INVALID,
    ack_all,
    ask,
    connected,
    numbers,
    payloads,
    settled,
    take,
    take_until,
    unique,
    user,
    user_property,
)
from tests.support.flows import REASON_STRING, both_versions
from tests.support.kept import sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import publish_packet

WINDOW = 32
NOT_AUTHORIZED = 0x87


@pytest.fixture(scope="module", params=["redis", "memory"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), "") as running:
        yield running


@pytest.fixture
def queue(node: NodeProcess) -> Compacted:
    return Compacted(node, unique("shared"), "shared")


@both_versions
def test_everybody_gets_everything(queue: Compacted, version: int) -> None:
    """At once those who are there; in their own time the others, as the queue is then: late joiners, too."""
    with queue.consumer(version) as early:
        seen = []
        for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
            queue.put((key, value))
            seen += take(early, 1)
        assert [b"1", b"2", b"3"] == payloads(seen)
        assert [queue.read("a"), queue.read("b"), queue.read("a")] == [message.topic for message in seen]
        assert [(1, False)] * 3 == [(message.qos, message.retain) for message in seen]
        assert version < 5 or [1, 2, 3] == queue.numbers(seen)
        with queue.consumer(version) as late:
            state = take(late, 2)
            assert [b"2", b"3"] == payloads(state), "the compacted state"
            queue.put(("c", b"4"))
            assert [b"4"] == payloads(take(early, 1)) == payloads(take(late, 1))


def test_one_copy(queue: Compacted, desk: Operator) -> None:
    """However many consume it; what one of them has acknowledged stays for the others."""
    queue.put(*((f"k{number}", b"x" * 1000) for number in range(20)))
    before = queue.shown(desk)
    for _ in range(5):
        with queue.consumer() as client:
            take(client, 20)
            settled(client)
            client.disconnect()
    after = queue.shown(desk)
    assert (20, before["bytes"]) == (after["messages"], after["bytes"])
    assert 5 == after["consumers"]
    assert {20} == {view["progress"] for view in after["consuming"]}


@both_versions
def test_each_has_its_own_progress(queue: Compacted, version: int) -> None:
    """By its client id, also with a new session. A slow one holds up nobody."""
    queue.put_numbers(100)
    names = [unique("c") for _ in range(3)]
    with queue.consumer(version, client_id=names[0]) as slow:
        held = take(slow, WINDOW, ack=False)
        for name, count in zip(names[1:], (30, 70), strict=True):
            with queue.consumer(version, client_id=name) as client:
                assert list(range(count)) == numbers(take(client, count))
                settled(client)
                client.disconnect()
        ack_all(slow, held)
        assert list(range(WINDOW, 100)) == numbers(take(slow, 100 - WINDOW))
    for name, count in zip(names[1:], (30, 70), strict=True):
        with queue.consumer(version, client_id=name) as client:
            assert list(range(count, 100)) == numbers(take(client, 100 - count))


@both_versions
def test_a_session_that_lasts(queue: Compacted, version: int) -> None:
    """Superseded values are never given, those in flight when it left neither."""
    name = unique("sleeper")
    queue.put(("a", b"1"), ("b", b"2"))
    with queue.sleeper(version, client_id=name) as client:
        take(client, 2, ack=False)
        client.abort()
    queue.put(("a", b"3"), ("c", b"4"))
    with queue.sleeper(version, client_id=name) as client:
        assert [b"2", b"3", b"4"] == payloads(take(client, 3))
        queue.put(("end", b"end"))
        assert [] == take_until(client, b"end")


def test_both_forms_of_one_name(node: NodeProcess) -> None:
    """They have nothing to do with each other; a client may consume both, and several shared ones."""
    name = unique("both")
    own, shared, other = Compacted(node, name), Compacted(node, name, "shared"), Compacted(node, kind="shared")
    with own.consumer() as client:
        for queue in (shared, other):
            assert [1] == ask(client, queue.filter).reasons
        own.put(("k", b"own"))
        shared.put(("k", b"shared"))
        other.put(("k", b"other"))
        seen = {message.topic: message for message in take(client, 3)}
        assert {own.read("k"), shared.read("k"), other.read("k")} == set(seen)
        assert "1" == user_property(seen[own.read("k")], "ecq-seqno")
        assert "1" == user_property(seen[shared.read("k")], "scq-seqno")


def test_a_number_that_a_producer_claims(queue: Compacted) -> None:
    queue.put(("k", b"x"), properties=user("scq-seqno", "99"))
    with queue.consumer() as client:
        assert [1] == queue.numbers(take(client, 1))


@both_versions
@pytest.mark.parametrize(
    "form",
    ["$SCQ/#", "$SCQ/+/#", "$SCQ/w/#", "$SCQ/w/{name}/#", "$SCQ/{name}", "$SCQ/{name}/k", "$SCQ/{name}/+", "$SCQ//#"],
)
def test_other_filters_are_refused(queue: Compacted, node: NodeProcess, form: str, version: int) -> None:
    with connected(node, "", version) as client:
        answer = ask(client, form.format(name=queue.name))
        if version < 5:
            assert [0x80] == answer.reasons
        else:
            assert answer.reasons[0] in (FILTER_INVALID, NOT_AUTHORIZED)
            assert answer.prop(REASON_STRING)
        queue.put(("k", b"x"))
        assert [] == settled(client)


@both_versions
def test_other_ways_to_subscribe_are_refused(queue: Compacted, node: NodeProcess, version: int) -> None:
    """QoS 1 exactly, and not as a shared subscription: it is shared by itself."""
    queue.put(("k", b"x"))
    with connected(node, "", version) as client:
        for qos in (0, 2):
            answer = ask(client, queue.filter, qos)
            assert answer.reasons[0] >= 0x80
            assert version < 5 or "QoS" in str(answer.prop(REASON_STRING))
        answer = ask(client, f"$share/g/{queue.filter}")
        assert [SHARED_NOT_SUPPORTED if version == 5 else 0x80] == answer.reasons
        assert [] == settled(client)


@both_versions
@pytest.mark.parametrize(
    "topic", ["$SCQ/{name}/k", "$SCQ/{name}", "$SCQ/w/{name}", "$SCQ/w/{name}/", "$SCQ/w//k", "$SCQ"]
)
def test_publishing_elsewhere_is_refused(queue: Compacted, node: NodeProcess, topic: str, version: int) -> None:
    topic = topic.format(name=queue.name)
    with queue.consumer() as client, connected(node, "", version) as producer:
        if version == 5:
            answer = producer.publish(topic, b"x", 1)
            assert answer is not None and answer.reason in (TOPIC_INVALID, NOT_AUTHORIZED)
            assert answer.prop(REASON_STRING)
        else:
            producer.send(publish_packet(topic, b"x", version=4, qos=1, packet_id=7))
            assert [] == producer.expect_closed()
        queue.put(("k", b"end"))
        assert [] == take_until(client, b"end")
