"""The bounded queue of a session: 1000 messages by default, and what is dropped when it is full.

The specification leaves this to the server. When the queue is full its oldest QoS 0 message goes, else its oldest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from motorcade.broker.limits import SessionOptions
from tests.support.cases import both_versions, each, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import lasting, numbered, payloads, publish_many, receive_until
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import Connect

QUEUE = 100
WINDOW = 32


@pytest.fixture
def small() -> Iterator[VirtualBroker]:
    """A broker whose queues hold a hundred messages, and whose publishers do not wait for a receiver that is behind."""
    with VirtualBroker(session=SessionOptions(queue=QUEUE, patience=0.0)) as running:
        yield running


def leave(connect: Connect, topic: str, version: int, qos: int) -> None:
    """Make a session with one subscription and no connection."""
    subscriber = connect(topic, **lasting(version))
    subscriber.subscribe(topic, qos)
    subscriber.disconnect()


@clause(v3="MQTT-4.5.0-1", v5="MQTT-4.5.0-1")
@both_versions
def test_a_thousand_messages_wait_for_an_absent_client(connect: Connect, name: str, version: int) -> None:
    """As many as the queue holds by default are all delivered, in order. [MQTT-4.5.0-1]"""
    leave(connect, name, version, 1)
    sent = numbered(1025)
    publish_many(connect(version=version), name, sent, 1)
    assert sent[25:] == payloads(receive_until(connect(name, **lasting(version)), sent[-1]))


@each(version=(3, 4, 5), qos=(1, 2))
def test_a_full_queue_of_an_absent_client_drops_the_oldest(small: VirtualBroker, version: int, qos: int) -> None:
    """Of more messages than the queue holds the newest are delivered."""
    topic = f"{version}/{qos}"
    leave(small.connect, topic, version, qos)
    sent = numbered(QUEUE + 25)
    publish_many(small.connect(version=version), topic, sent, qos)
    assert sent[25:] == payloads(receive_until(small.connect(topic, **lasting(version)), sent[-1]))


@both_versions
def test_a_full_queue_of_an_absent_client_drops_qos_0_first(small: VirtualBroker, version: int) -> None:
    """The oldest QoS 0 messages go before any QoS 1 message does, wherever they stand; then the oldest of the others.

    A QoS 0 message that finds the queue full of others is itself the oldest of its kind, and goes.
    """
    publisher = small.connect(version=version)
    important, idle = numbered(50), [b"idle-%d" % n for n in range(10)]
    for topic, more, kept in (("some", 46, important + idle[6:]), ("all", 55, important[5:])):
        leave(small.connect, topic, version, 1)
        later = numbered(more, start=50)
        for payloads_, qos in ((important, 1), (idle, 0), (later, 1)):
            publish_many(publisher, topic, payloads_, qos)
        messages = receive_until(small.connect(topic, **lasting(version)), later[-1])
        assert kept + later == payloads(messages)
    leave(small.connect, "full", version, 1)
    publish_many(publisher, "full", numbered(QUEUE), 1)
    publish_many(publisher, "full", idle, 0)
    subscriber = small.connect("full", **lasting(version))
    assert numbered(QUEUE) == payloads(receive_until(subscriber, numbered(QUEUE)[-1]))
    subscriber.expect_nothing()
    for topic in ("some", "all", "full"):
        small.connect(topic, version=version).disconnect()


@each(version=(4, 5), kept=(True, False))
def test_qos_0_messages_for_absent_clients_are_a_choice(version: int, kept: bool) -> None:
    """`store_qos0` tells whether QoS 0 messages wait for a client that is away; the specification allows both."""
    with VirtualBroker(session=SessionOptions(store_qos0=kept)) as broker:
        leave(broker.connect, "t", version, 2)
        publisher = broker.connect(version=version)
        for qos in (0, 1, 0, 2):
            publisher.publish("t", b"qos %d" % qos, qos)
        messages = receive_until(broker.connect("t", **lasting(version)), b"qos 2")
        assert ([0, 1, 0, 2] if kept else [1, 2]) == [message.qos for message in messages]


@both_versions
@qos_1_and_2
def test_a_full_queue_of_a_silent_client_drops_the_oldest(small: VirtualBroker, version: int, qos: int) -> None:
    """What is in flight stays; of what waits behind it the newest are delivered."""
    subscriber = small.connect(version=version)
    subscriber.subscribe(f"{version}/{qos}", qos)
    sent = numbered(WINDOW + QUEUE + 25)
    publish_many(small.connect(version=version), f"{version}/{qos}", sent, qos)
    assert sent[:WINDOW] + sent[WINDOW + 25 :] == payloads(receive_until(subscriber, sent[-1]))


@both_versions
def test_a_full_queue_of_a_silent_client_drops_qos_0_first(small: VirtualBroker, version: int) -> None:
    """QoS 1 messages behind a full window are not lost while there are QoS 0 messages to drop."""
    subscriber, publisher = small.connect(version=version), small.connect(version=version)
    subscriber.subscribe("t", 1)
    idle = [b"idle-%d" % n for n in range(10)]
    publish_many(publisher, "t", numbered(WINDOW), 1)
    publish_many(publisher, "t", idle, 0)
    publish_many(publisher, "t", numbered(QUEUE - 4, start=WINDOW), 1)
    messages = receive_until(subscriber, numbered(WINDOW + QUEUE - 4)[-1])
    assert numbered(WINDOW + QUEUE - 4) == [message.payload for message in messages if message.qos]
    # A broker may send QoS 0 past a full window, or let it wait in its place; then the oldest six went.
    assert [message.payload for message in messages if not message.qos] in (idle, idle[6:])
    subscriber.close()


@both_versions
def test_a_full_queue_of_one_client_is_no_loss_for_others(small: VirtualBroker, version: int) -> None:
    """A client that reads gets everything while the queue of another overflows."""
    topic = f"t/{version}"
    leave(small.connect, topic, version, 1)
    reader, publisher = small.connect(version=version), small.connect(version=version)
    reader.subscribe(topic, 1)
    seen: list[bytes] = []
    for start in range(0, QUEUE + 50, 50):
        part = numbered(50, start=start)
        publish_many(publisher, topic, part, 1)
        seen += payloads(receive_until(reader, part[-1]))
    assert numbered(QUEUE + 50) == seen
