"""Queues of a real process, on each engine: a day in the life, and many consumers with accidents.

What they promise is tested in virtual time (tests/unit/queues), what outlives the node in `test_queues_durable.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    FILTER_INVALID,
    QUOTA_EXCEEDED,
    SHARED_NOT_SUPPORTED,
    ack_all,
    connected,
    lasting,
    numbers,
    payloads,
    receive_maximum,
    settled,
    subscribe,
    take,
    take_until,
    unique,
    user,
)
from tests.support.flows import USER_PROPERTY, acknowledge, both_versions
from tests.support.kept import Queue, assert_refused, sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import publish_packet

REFUSED = 0x83  #: implementation specific error: the consumer cannot do it
ODD = [bytes(range(256)), b"", b"\0" * 100_000, b"{}"]


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), "[store]\nsweep_interval = 0.2\n") as running:
        yield running


def assert_empty(queue: Queue) -> None:
    wait_until(lambda: queue.stored() == [], "the queue is empty")


@both_versions
def test_a_day_of_a_queue(node: NodeProcess, operator: Operator, version: int) -> None:
    """Messages wait, are shared, are left behind and refused, and end as dead letters."""
    dead = Queue(node, operator, unique("dead"), topics=[])
    options = {"max_attempts": 3, "dead_letter": dead.name, "redispatch_delay": 0.01, "ack_timeout": 0}
    jobs = Queue(node, operator, unique("jobs"), **options)
    jobs.put(*ODD)
    jobs.put_numbers(100)
    with connected(node, "", version, receive_maximum(10)) as first, connected(node, "", version) as live:
        subscribe(live, f"{jobs.name}/#")
        subscribe(first, jobs.filter)
        assert ODD == payloads(take(first, len(ODD)))
        held = take(first, 10 if version == 5 else 32, ack=False)
        assert [] == settled(first), "the window is full"
        assert list(range(len(held))) == numbers(held)
        ack_all(first, held[:5])
        settled(first)
        first.abort()
        with lasting(node, unique("second"), version) as second:
            subscribe(second, jobs.filter)
            assert set(range(5, 100)) == set(numbers(take(second, 95))), "what it left behind goes to another"
            assert_empty(jobs)
            jobs.put_numbers(1)
            assert [0] == numbers(take(live, 1)), "it is routed as usual"
            take(second, 1, ack=False)
            with lasting(node, str(second.client_id), version) as again:
                assert [0] == numbers(take(again, 1)), "a take-over loses nothing"
                assert_empty(jobs)
                jobs.put(b"poison", properties=user("trace", "7"))
                if version == 5:
                    for _ in range(3):
                        ack_all(again, take(again, 1, ack=False), reason=REFUSED)
                    jobs.put(b"good")
                    assert [] == take_until(again, b"good"), "three attempts, and no fourth"
    if version < 5:  # who cannot refuse may die of it
        for _ in range(2):
            with connected(node, "", version) as victim:
                subscribe(victim, jobs.filter)
                assert [b"poison"] == payloads(take(victim, 1, ack=False))
                victim.abort()
    wait_until(lambda: dead.stored() == [b"poison"], "the dead letter")
    with connected(node) as undertaker:
        subscribe(undertaker, dead.filter)
        (message,) = take(undertaker, 1)
    assert ("trace", "7") in message.prop_all(USER_PROPERTY)
    assert f"{jobs.name}/a" == message.topic


@both_versions
def test_what_is_refused_is_told(node: NodeProcess, operator: Operator, version: int) -> None:
    """MQTT 5 hears why; MQTT 3 is disconnected, or gets 0x80."""
    jobs = Queue(node, operator, unique("full"), max_messages=5)
    jobs.assert_nobody_publishes_to_it(connected(node, "", version))
    jobs.put_numbers(5)
    with connected(node, "", version) as client:
        assert_refused(client, "$queue/-x", FILTER_INVALID)
        assert_refused(client, f"$share/g/{jobs.filter}", SHARED_NOT_SUPPORTED)
        if version == 5:
            answer = client.publish(f"{jobs.name}/a", b"6", 1)
            assert answer is not None and QUOTA_EXCEEDED == answer.reason
        else:
            client.send(publish_packet(f"{jobs.name}/a", b"6", version=4, qos=1, packet_id=7))
            assert [] == client.expect_closed()
    with connected(node, "", version) as worker:
        subscribe(worker, jobs.filter)
        assert [0, 1, 2, 3, 4] == numbers(take(worker, 5))
        with connected(node) as publisher:

            def is_taken() -> bool:
                answer = publisher.publish(f"{jobs.name}/a", b"5", 1)
                return answer is not None and (answer.reason or 0) < 0x80

            wait_until(is_taken, "there is room again")
        assert [5] == numbers(take(worker, 1))


def test_priorities_last_values_and_declarations(node: NodeProcess, operator: Operator) -> None:
    ranked = Queue(node, operator, unique("ranked"), priorities=3)
    for payload, priority in (("low", "0"), ("top", "2"), ("middle", "1")):
        ranked.put(payload.encode(), properties=user("priority", priority))
    latest = Queue(node, operator, unique("latest"), kind="last_value")
    for number in range(30):
        latest.put(b"%d" % number, topic=f"{number % 3}")
    with connected(node) as worker:
        subscribe(worker, ranked.filter)
        assert [b"top", b"middle", b"low"] == payloads(take(worker, 3))
        subscribe(worker, latest.filter)
        assert [27, 28, 29] == numbers(take(worker, 3))
        assert_empty(latest)
        operator.delete("queues", latest.name)
        latest.put(b"lost")
        again = Queue(node, operator, latest.name)
        again.put(b"new")
        assert [] == take_until(worker, b"new"), "its consumers work for the new one without doing anything"


def test_many_consumers_publishers_and_accidents(node: NodeProcess, operator: Operator) -> None:
    """Consumers come, refuse, and vanish while messages come in; at the end each message was acknowledged by one."""
    jobs = Queue(node, operator, unique("many"), redispatch_delay=0.01, max_attempts=0, ack_timeout=0)
    total = 600
    done: Counter[int] = Counter()
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while sum(1 for _ in done) < total:
                with connected(node, "", 4 + number % 2) as client:
                    subscribe(client, jobs.filter)
                    for turn in range(60):
                        try:
                            message = client.recv(0.2)
                        except TimeoutError:
                            break
                        if (turn + number) % 10 == 9 and client.version == 5:
                            ack_all(client, [message], reason=REFUSED)
                            continue
                        acknowledge(client, message)
                        with lock:
                            done[int(message.payload)] += 1
                    settled(client)  # the node has read all acknowledgements; what came is left to others
                    client.abort()
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    jobs.put_numbers(total)
    for thread in threads:
        thread.join(60)
    assert [] == errors
    assert set(range(total)) == set(done)
    assert set(done.values()) == {1}, "acknowledged, and delivered again"
    assert_empty(jobs)
