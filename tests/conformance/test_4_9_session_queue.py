"""The bounded queue of a session: 1000 messages by default, and what is dropped when it is full.

The specification leaves this to the server. When the queue is full its oldest QoS 0 message goes, else its oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.clauses import clause
from tests.support.flows import (
    both_versions,
    every_version,
    lasting,
    numbered,
    payloads,
    publish_many,
    qos_1_and_2,
    receive_until,
)
from tests.support.node import NodeProcess
from tests.support.wire import Address, Client

Connect = Callable[..., Client]

QUEUE = 1000
WINDOW = 32


@pytest.fixture(scope="module")
def keeping() -> Iterator[Address]:
    """A broker that keeps QoS 0 messages for absent clients."""
    with NodeProcess(config="[session]\nstore_qos0 = true\n") as node:
        yield node


@pytest.fixture(scope="module")
def forgetting() -> Iterator[Address]:
    """A broker that does not."""
    with NodeProcess(config="[session]\nstore_qos0 = false\n") as node:
        yield node


def absent_subscriber(connect: Connect, name: str, version: int, qos: int, to: Address | None = None) -> None:
    """A session with one subscription and no connection."""
    subscriber = connect(f"{name}-s", to=to, **lasting(version))
    subscriber.subscribe(name, qos)
    subscriber.disconnect()


@every_version
@qos_1_and_2
@clause(v3="MQTT-4.5.0-1", v5="MQTT-4.5.0-1")
def test_a_thousand_messages_wait_for_an_absent_client(connect: Connect, name: str, version: int, qos: int) -> None:
    """As many as the queue holds are all delivered, in order. [MQTT-4.5.0-1]"""
    absent_subscriber(connect, name, version, qos)
    wanted = numbered(QUEUE)
    publish_many(connect(version=version), name, wanted, qos)
    assert wanted == payloads(receive_until(connect(f"{name}-s", **lasting(version)), wanted[-1]))


@both_versions
@qos_1_and_2
def test_a_full_queue_of_an_absent_client_drops_the_oldest(connect: Connect, name: str, version: int, qos: int) -> None:
    """Of more messages than the queue holds the newest thousand are delivered."""
    absent_subscriber(connect, name, version, qos)
    sent = numbered(QUEUE + 25)
    publish_many(connect(version=version), name, sent, qos)
    assert sent[25:] == payloads(receive_until(connect(f"{name}-s", **lasting(version)), sent[-1]))


@both_versions
def test_a_full_queue_of_an_absent_client_drops_qos_0_first(
    connect: Connect, name: str, version: int, keeping: Address
) -> None:
    """The oldest QoS 0 messages go before any QoS 1 message does, wherever they stand in the queue."""
    absent_subscriber(connect, name, version, 1, keeping)
    publisher = connect(version=version, to=keeping)
    important, idle, later = numbered(100), [b"idle-%d" % n for n in range(10)], numbered(896, start=100)
    publish_many(publisher, name, important, 1)
    publish_many(publisher, name, idle, 0)
    publish_many(publisher, name, later, 1)  # 1006 in all: six of the ten QoS 0 messages go
    messages = receive_until(connect(f"{name}-s", to=keeping, **lasting(version)), later[-1])
    assert important + idle[6:] + later == payloads(messages)


@both_versions
def test_a_full_queue_drops_the_oldest_once_no_qos_0_is_left(
    connect: Connect, name: str, version: int, keeping: Address
) -> None:
    """When all QoS 0 messages are gone the oldest of the others go."""
    absent_subscriber(connect, name, version, 1, keeping)
    publisher = connect(version=version, to=keeping)
    publish_many(publisher, name, numbered(100), 1)
    publish_many(publisher, name, [b"idle"] * 10, 0)
    publish_many(publisher, name, numbered(905, start=100), 1)
    messages = receive_until(connect(f"{name}-s", to=keeping, **lasting(version)), b"01004")
    assert numbered(1000, start=5) == payloads(messages)


@both_versions
def test_qos_0_does_not_push_others_out_of_a_full_queue(
    connect: Connect, name: str, version: int, keeping: Address
) -> None:
    """A QoS 0 message that finds the queue full of QoS 1 messages is itself the oldest of its kind, and goes."""
    absent_subscriber(connect, name, version, 1, keeping)
    publisher = connect(version=version, to=keeping)
    publish_many(publisher, name, numbered(QUEUE), 1)
    publish_many(publisher, name, [b"idle"] * 10, 0)
    publisher.expect_nothing()
    subscriber = connect(f"{name}-s", to=keeping, **lasting(version))
    assert numbered(QUEUE) == payloads(receive_until(subscriber, b"00999"))
    subscriber.expect_nothing()


@both_versions
def test_qos_0_messages_for_absent_clients_are_a_choice(
    connect: Connect, name: str, version: int, keeping: Address, forgetting: Address
) -> None:
    """`store_qos0` tells whether QoS 0 messages wait for a client that is away; the specification allows both."""
    for broker, kept in ((keeping, [0, 1, 0, 2]), (forgetting, [1, 2])):
        absent_subscriber(connect, name, version, 2, broker)
        publisher = connect(version=version, to=broker)
        for qos in (0, 1, 0, 2):
            publisher.publish(name, b"qos %d" % qos, qos)
        messages = receive_until(connect(f"{name}-s", to=broker, **lasting(version)), b"qos 2")
        assert kept == [message.qos for message in messages]


@both_versions
@qos_1_and_2
def test_a_full_queue_of_a_silent_client_drops_the_oldest(connect: Connect, name: str, version: int, qos: int) -> None:
    """What is in flight stays; of what waits behind it the newest thousand are delivered."""
    subscriber = connect(version=version)
    subscriber.subscribe(name, qos)
    sent = numbered(WINDOW + QUEUE + 25)
    publish_many(connect(version=version), name, sent, qos)
    assert sent[:WINDOW] + sent[WINDOW + 25 :] == payloads(receive_until(subscriber, sent[-1]))


@both_versions
def test_a_full_queue_of_a_silent_client_drops_qos_0_first(connect: Connect, name: str, version: int) -> None:
    """QoS 1 messages behind a full window are not lost while there are QoS 0 messages to drop."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 1)
    idle = [b"idle-%d" % n for n in range(10)]
    publish_many(publisher, name, numbered(WINDOW), 1)
    publish_many(publisher, name, idle, 0)
    publish_many(publisher, name, numbered(996, start=WINDOW), 1)
    messages = receive_until(subscriber, b"%05d" % (WINDOW + 995))
    assert numbered(WINDOW + 996) == [message.payload for message in messages if message.qos]
    # A broker may send QoS 0 past a full window, or let it wait in its place; then the oldest six went.
    assert [message.payload for message in messages if not message.qos] in (idle, idle[6:])


@both_versions
def test_a_full_queue_of_one_client_is_no_loss_for_others(connect: Connect, name: str, version: int) -> None:
    """A client that reads gets everything while the queue of another overflows."""
    absent_subscriber(connect, name, version, 1)
    reader, publisher = connect(version=version), connect(version=version)
    reader.subscribe(name, 1)
    seen: list[bytes] = []
    for start in range(0, QUEUE + 100, 100):
        part = numbered(100, start=start)
        publish_many(publisher, name, part, 1)
        seen += payloads(receive_until(reader, part[-1]))
    assert numbered(QUEUE + 100) == seen
