"""Queues and streams outlive the node: nothing acknowledged is lost, what consumers have acknowledged stays done.

Each test ends the node in the middle of its work and goes on with a new process on the same store: embedded, Redis, and
one pass on a Redis cluster.
"""

from __future__ import annotations

import threading

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    ack_all,
    fill,
    numbered,
    numbers,
    payloads,
    settled,
    subscribe,
    take,
    take_until,
    unique,
    user,
)
from tests.support.flows import acknowledge
from tests.support.operator import Operator, payload_of
from tests.support.stores import Home, both_ends, on_every_store
from tests.support.wire import DISCONNECT, PUBACK, Client, Closed, publish_packet

WINDOW = 32
VERSIONS = (4, 5)

CONFIG = """
[plugins.queues.queue.jobs]
topics = ["jobs/#"]
max_attempts = 0

[plugins.streams.stream.log]
topics = ["log/#"]

[plugins.streams.stream.all]
topics = ["jobs/#"]
"""


def stored(home: Home, nouns: str, name: str) -> list[bytes]:
    with Operator(home.node) as operator:
        return [payload_of(message) for message in operator.read(nouns, name, limit=1000)]


@on_every_store
@both_ends
def test_a_queue_and_its_consumers_go_on_with_a_new_process(home: Home, end: str) -> None:
    """Everything that its publisher knows to be taken is there, in order; what was acknowledged in time is not.

    Streams stand beside it: their messages have the same offsets, and readers go on where they were.
    """
    home.start(CONFIG)
    fill(home, numbered("jobs/a", 300))
    fill(home, numbered("log/a", 300))
    for version in VERSIONS:
        worker = home.connect(f"first-{version}", version)
        subscribe(worker, "$queue/jobs")
        consume_and_leave(worker, 50)
        reader = home.connect(f"reader-{version}", version)
        subscribe(reader, "$stream/log/earliest")
        consume_and_leave(reader, 200)
        sleeper = home.lasting(f"sleeper-{version}", version)
        subscribe(sleeper, "$stream/log/earliest")
        consume_and_leave(sleeper, 100)
    home.absent("worker", 5, ("$queue/jobs", 1))
    home.settle()  # acknowledgements of consumers ride on the next write
    wait_until(lambda: len(stored(home, "queues", "jobs")) == 200, "what is done is noted")
    home.again(end)
    worker = home.back("worker")  # its subscription is there again
    assert 200 == len(set(numbers(take(worker, 200))))
    wait_until(lambda: stored(home, "queues", "jobs") == [], "all are done")
    fill(home, [("jobs/a", b"new")])
    assert [] == take_until(worker, b"new")
    fill(home, numbered("log/a", 50, 300))
    for version in VERSIONS:
        goes_on(home.back(f"sleeper-{version}", version), 100)
        reader = home.connect(f"reader-{version}", version)
        subscribe(reader, "$stream/log")  # the progress is the client's, not the session's
        goes_on(reader, 200)
    witness = home.connect("witness")
    subscribe(witness, "$stream/log/earliest")
    assert list(range(350)) == numbers(take(witness, 350))


def consume_and_leave(client: Client, count: int) -> None:
    """Acknowledge so many, hold as many as go in flight, and disconnect."""
    take(client, count)
    held = settled(client)
    take(client, WINDOW - len(held), ack=False)
    client.disconnect()


def goes_on(reader: Client, done: int) -> None:
    """It gets what it had not acknowledged, to the end, in order; a killed node may have noted a little less."""
    seen = [numbers(take(reader, 1))[0]]
    while seen[-1] != 349:
        seen += numbers(take(reader, 1))
    assert seen == list(range(seen[0], 350)), "a gap, or out of order"
    assert done - 2 * WINDOW <= seen[0] <= done


@both_ends
def test_the_node_ends_in_the_middle_of_all_work(home: Home, end: str) -> None:
    """Publishers and consumers at full speed when it happens. Each message that was taken is done at least once; none
    comes again that was acknowledged longer ago than the last moment; the stream has all of them, in order.
    """
    home.start(CONFIG)
    accepted, done = publish_and_consume(home, end)
    fill(home, [("jobs/a", b"-1")])
    worker = home.connect("worker")
    subscribe(worker, "$queue/jobs")
    again = numbers(take_until(worker, b"-1"))
    assert accepted <= done | set(again), "lost"
    # What comes again are acknowledgements that were on their way: of all that was done, only the last moment's.
    assert len(done & set(again)) < max(200, len(done) // 2)
    reader = home.connect("reader")
    subscribe(reader, "$stream/all/earliest")
    seen = numbers(take_until(reader, b"-1"))
    assert seen == list(range(len(seen)))
    assert len(accepted) <= len(seen) <= len(accepted) + 50


def publish_and_consume(home: Home, end: str) -> tuple[set[int], set[int]]:
    """Numbers whose PUBACK came, and numbers that consumers have acknowledged, when the node ended."""
    accepted: set[int] = set()
    done: set[int] = set()
    errors: list[BaseException] = []

    def publish(client: Client) -> None:
        number = 0
        try:
            while True:
                for offset in range(50):
                    packet = publish_packet("jobs/a", b"%d" % (number + offset), version=4, qos=1, packet_id=offset + 1)
                    client.send(packet)
                for offset in range(50):
                    client.expect(PUBACK)
                    accepted.add(number + offset)
                number += 50
        except (Closed, OSError):
            pass
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    def consume(client: Client) -> None:
        try:
            while True:
                message = client.recv()
                if message.type == DISCONNECT:  # MQTT 5 is told that the node goes
                    return
                acknowledge(client, message)
                done.add(numbers([message])[0])
        except (Closed, OSError):
            pass
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    consumers = [home.connect(f"consumer-{version}", version) for version in VERSIONS]
    for client in consumers:
        subscribe(client, "$queue/jobs")
    threads = [threading.Thread(target=publish, args=(home.connect("publisher", 4),), daemon=True)]
    threads += [threading.Thread(target=consume, args=(client,), daemon=True) for client in consumers]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(done) > 500 or bool(errors), "some hundreds are done")
    if end == "SIGKILL":
        home.node.kill()  # the clients see the end of their connections
    else:
        home.node.stop()
    for thread in threads:
        thread.join(60)
    assert [] == errors
    home.forget_lease()
    home.start()
    return accepted, done


@both_ends
def test_attempts_priorities_and_last_values_are_remembered(home: Home, end: str) -> None:
    """A message that nobody could take twice before the end of the node is given up after the third time."""
    home.start(
        """
[plugins.queues.queue.jobs]
topics = ["jobs/#"]
max_attempts = 3
dead_letter = "dead"
redispatch_delay = 0.01

[plugins.queues.queue.dead]
topics = []

[plugins.queues.queue.ranked]
topics = ["ranked"]
priorities = 3

[plugins.queues.queue.latest]
topics = ["latest/#"]
kind = "last_value"
"""
    )
    worker = home.connect("worker")
    subscribe(worker, "$queue/jobs")
    fill(home, [("jobs/a", b"poison")])
    ack_all(worker, take(worker, 1, ack=False), reason=0x83)
    take(worker, 1, ack=False)
    worker.disconnect()
    for payload, priority in ((b"low", "0"), (b"high", "2"), (b"middle", "1")):
        fill(home, [("ranked", payload)], user("priority", priority))
    fill(home, [(f"latest/{number % 3}", b"%d" % number) for number in range(30)])
    home.settle()
    home.again(end)
    worker = home.connect("worker")
    subscribe(worker, "$queue/jobs")
    tried = 0
    while not stored(home, "queues", "dead"):
        try:
            ack_all(worker, [worker.recv(0.2)], reason=0x83)
        except TimeoutError:
            continue
        tried += 1
    assert 1 <= tried <= 2, "the third time was the last; a killed node may not have noted the second"
    assert [] == stored(home, "queues", "jobs")
    fill(home, [("latest/1", b"30")])
    subscribe(worker, "$queue/ranked")
    assert [b"high", b"middle", b"low"] == payloads(take(worker, 3))
    subscribe(worker, "$queue/latest")
    assert [27, 29, 30] == numbers(take(worker, 3))


def test_what_was_declared_by_command_is_there_again(home: Home) -> None:
    """Queues, streams and rules, with their contents; deleted ones are not."""
    home.start(CONFIG)
    names = {nouns: (unique("kept"), unique("gone")) for nouns in ("queues", "streams", "captures")}
    with Operator(home.node) as operator:
        for nouns, (kept, gone) in names.items():
            options = {"to": "stream:log"} if nouns == "captures" else {}
            for name in (kept, gone):
                operator.create(nouns, name, topics=[f"{nouns}/{name}/#"], **options)
                fill(home, [(f"{nouns}/{name}/a", name.encode())])
            operator.delete(nouns, gone)
    home.crash()
    with Operator(home.node) as operator:
        for nouns, (kept, gone) in names.items():
            assert kept in operator.names(nouns)
            assert gone not in operator.names(nouns)
        kept, gone = names["queues"]
        assert [kept.encode()] == stored(home, "queues", kept)
        assert [names["streams"][0].encode()] == stored(home, "streams", names["streams"][0])
        operator.create("queues", gone, topics=["x"])
        assert [] == stored(home, "queues", gone), "the old contents are gone with it"
        rule = names["captures"][0]
        fill(home, [(f"captures/{rule}/b", b"again")])
        assert b"again" == stored(home, "streams", "log")[-1]
