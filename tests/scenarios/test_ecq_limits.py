"""Compacted queues are bounded: by count, by octets, by age. What goes gives its room back.

Each node here has limits so small that tests reach them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.scenarios.witness import wait_until
from tests.support.compacted import Compacted
from tests.support.consumers import (
    QUOTA_EXCEEDED,
    connected,
    fill,
    numbers,
    payloads,
    settled,
    take,
    take_until,
    unique,
)
from tests.support.flows import REASON_STRING, let_pass
from tests.support.kept import sound_node
from tests.support.operator import Operator
from tests.support.stores import Home
from tests.support.wire import publish_packet

RETENTION = 1.0

CONFIGS = {
    "refuse": "max_messages = 20\nmax_bytes = 20000",
    "drop": 'max_messages = 20\nmax_bytes = 20000\noverflow = "drop_oldest"',
    "aging": f"retention = {RETENTION}\ngc_interval = 0.1",
}

both_kinds = pytest.mark.parametrize("kind", ["exclusive", "shared"])


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def engine(request: pytest.FixtureRequest) -> pytest.FixtureRequest:
    return request


@pytest.fixture(scope="module")
def desks(
    engine: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Operator]]:
    """The node with these limits, started when the first test asks for it: one at a time, since they share a store."""
    with ExitStack() as running:
        started: dict[str, Operator] = {}

        def get(which: str) -> Operator:
            if which not in started:
                running.close()
                started.clear()
                data = tmp_path_factory.mktemp("data")
                node = running.enter_context(sound_node(engine, data, f"[plugins.ecq]\n{CONFIGS[which]}\n"))
                started[which] = running.enter_context(Operator(node))
            return started[which]

        yield get


# --- count and octets ---------------------------------------------------------------------------------------------


@both_kinds
def test_a_full_queue_refuses_new_keys(desks: Callable[[str], Operator], kind: str) -> None:
    """MQTT 5 hears why, MQTT 3 is disconnected, QoS 0 is dropped and counted. A key that is there has its place."""
    desk = desks("refuse")
    queue = Compacted(desk.node, unique("full"), kind)
    queue.put_numbers(20)
    with connected(desk.node) as producer, connected(desk.node, "", 4) as old:
        for qos in (1, 2):
            answer = producer.publish(queue.write("new"), b"x", qos)
            assert answer is not None and QUOTA_EXCEEDED == answer.reason
            assert queue.name in str(answer.prop(REASON_STRING)) or "20" in str(answer.prop(REASON_STRING))
        old.send(publish_packet(queue.write("new"), b"x", version=4, qos=1, packet_id=7))
        assert [] == old.expect_closed()
        before = desk.counted("ecq")
        producer.publish(queue.write("new"), b"x", 0)
        settled(producer)
        wait_until(lambda: desk.counted("ecq") > before, "what is dropped is counted")
        answer = producer.publish(queue.write("k3"), b"newer", 1)
        assert answer is not None and 0 == (answer.reason or 0), "it takes the place of the older value"
        other = producer.publish(Compacted(desk.node).write("k"), b"x", 1)
        assert other is not None and 0 == (other.reason or 0), "another queue has its own bound"
    with queue.consumer() as client:
        seen = take(client, 20)
        assert [b"%d" % number for number in range(20) if number != 3] + [b"newer"] == payloads(seen)
        last = queue.numbers(seen)[-1]
        assert 21 <= last
    with connected(desk.node) as producer:  # acknowledged messages stay, and so does the bound
        answer = producer.publish(queue.write("new"), b"x", 1)
        assert answer is not None and QUOTA_EXCEEDED == answer.reason


def test_octets_are_bounded_too(desks: Callable[[str], Operator]) -> None:
    """The bound counts what is there: a value that is replaced by a smaller one gives its room back."""
    desk = desks("refuse")
    queue = Compacted(desk.node)
    with connected(desk.node) as producer:

        def publish(key: str, size: int) -> int:
            answer = producer.publish(queue.write(key), b"x" * size, 1)
            assert answer is not None
            return answer.reason or 0

        reasons = [publish(f"k{number}", 6000) for number in range(5)]
        assert [0, 0, 0, QUOTA_EXCEEDED, QUOTA_EXCEEDED] == reasons
        assert 0 == publish("k1", 6000), "in place of the value before"
        assert QUOTA_EXCEEDED == publish("k1", 12000), "not if it is too large for the room that is left"
        assert 0 == publish("k1", 10)
        assert 0 == publish("k3", 6000)
        assert QUOTA_EXCEEDED == publish("alone", 30_000), "larger than any queue"
    assert 18_000 < queue.shown(desk)["bytes"] <= 20_000


@both_kinds
def test_a_full_queue_drops_the_oldest_if_it_is_told_to(desks: Callable[[str], Operator], kind: str) -> None:
    """Numbers go on; what was dropped is counted."""
    desk = desks("drop")
    queue = Compacted(desk.node, unique("full"), kind)
    before = desk.counted("ecq", "dropped")
    queue.put_numbers(50)
    assert desk.counted("ecq", "dropped") >= before + 30
    with queue.consumer() as client:
        seen = take(client, 20)
        assert (list(range(30, 50)), list(range(31, 51))) == (numbers(seen), queue.numbers(seen))
        for key, value in (("large", b"x" * 15_000), ("larger", b"y" * 15_000)):
            queue.put((key, value))
            assert [value] == payloads(take(client, 1))
    assert 15_000 <= queue.shown(desk)["bytes"] <= 20_000


def test_the_oldest_is_dropped_under_its_consumer(desks: Callable[[str], Operator]) -> None:
    """A consumer that does not keep up goes on with what is left."""
    desk = desks("drop")
    queue = Compacted(desk.node, unique("slow"))
    with queue.consumer() as client:
        queue.put_numbers(10)
        held = take(client, 10, ack=False)
        queue.put_numbers(1000, 10)
        for message in held:
            client.send(bytes([0x40, 2]) + (message.packet_id or 0).to_bytes(2, "big"))
        queue.put(("end", b"-1"))
        seen = numbers(take_until(client, b"-1"))
        assert seen == sorted(set(seen))
        assert seen[-1] == 1009
        settled(client)
    with queue.consumer() as client:
        queue.put(("end", b"-2"))
        assert [] == take_until(client, b"-2"), "what is gone does not hold up progress"


# --- age ----------------------------------------------------------------------------------------------------------


def test_old_messages_go_again_and_again(desks: Callable[[str], Operator]) -> None:
    """After the retention they are not delivered any more, acknowledged or not; and this is so every time.

    Numbers go on, though nothing is left.
    """
    desk = desks("aging")
    queues = [Compacted(desk.node, unique("aging"), kind) for kind in ("exclusive", "shared")]
    for turn in range(2):
        for queue in queues:
            queue.put(("a", b"old"), ("b", b"old"), ("c", b"old"))
        let_pass(RETENTION)
        for queue in queues:
            with queue.consumer() as client:
                queue.put(("new", b"%d" % turn))
                seen = take(client, 1)
                assert ([b"%d" % turn], [4 * turn + 4]) == (payloads(seen), queue.numbers(seen)), "old ones do not come"
        wait_until(lambda: all(queue.messages(desk) == [] for queue in queues), "all are gone")
        wait_until(lambda: all(queue.shown(desk)["messages"] == 0 for queue in queues), "and collected")


def test_age_counts_from_the_last_value(desks: Callable[[str], Operator]) -> None:
    """Keys that are renewed stay, whatever their place in any order; the others go."""
    desk = desks("aging")
    queue = Compacted(desk.node, unique("aging"))
    queue.put(("a", b"old"), ("b", b"0"), ("c", b"old"))
    turn, stored = 0, [b"old"]
    while b"old" in stored:
        turn, began = turn + 1, time.monotonic()
        queue.put(("b", b"%d" % turn))
        stored = queue.stored(desk)
        assert b"%d" % turn in stored or time.monotonic() - began > RETENTION / 2, "it is not old yet"
    with queue.consumer() as client:  # it is there first: the last value does not wait for it
        queue.put(("b", b"end"))
        assert b"old" not in payloads(take_until(client, b"end"))


def test_a_consumer_that_is_behind_skips_what_is_too_old(desks: Callable[[str], Operator]) -> None:
    desk = desks("aging")
    queue = Compacted(desk.node, unique("aging"))
    with queue.consumer() as client:
        queue.put_numbers(100)
        held = take(client, 32, ack=False)
        let_pass(RETENTION)
        queue.put(("new", b"new"))
        for message in held:
            client.send(bytes([0x40, 2]) + (message.packet_id or 0).to_bytes(2, "big"))
        assert [b"new"] == payloads(take(client, 1))
        settled(client)
    with queue.consumer() as client:
        queue.put(("new", b"newer"))
        assert [] == take_until(client, b"newer")


def test_the_disk_comes_back(desks: Callable[[str], Operator], engine: pytest.FixtureRequest) -> None:
    """Of what has been replaced and of what was too old."""
    desk = desks("aging")
    queue = Compacted(desk.node, unique("disk"))
    fill(desk.node, [(queue.write("k"), bytes([number % 251]) * 4096) for number in range(3000)])
    assert len(queue.messages(desk)) <= 1, "or none, if it is too old by now"
    if engine.param == "redis":
        keeper = engine.getfixturevalue("lone_redis")
        wait_until(lambda: keeper.client.info("memory")["used_memory_dataset"] < 8_000_000, "Redis has its memory back")
    else:
        stored = sum(view["messages"] for view in desk.web.get("compacted/exclusive").json()["data"])
        assert stored < 200
    wait_until(lambda: queue.shown(desk)["messages"] == 0, "collected")


# --- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["max_messages = -1", 'overflow = "panic"', "colour = 1"])
def test_a_wrong_setting_is_named(tmp_path: Path, line: str) -> None:
    """Before anything is served."""
    with Home("memory", "memory://", tmp_path / "data") as home:
        assert line.split(maxsplit=1)[0] in home.refusal(config=f"[plugins.ecq]\n{line}\n")
