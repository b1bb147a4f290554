"""Publishers wait for the only receiver of their messages rather than push its older messages out of its queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.witness import Witness, metrics
from tests.support.flows import let_pass
from tests.support.node import NodeProcess
from tests.support.wire import PUBACK, PUBLISH, Client, Packet, ack_packet, publish_packet

PUBLISHERS, EACH = 40, 200  # far more than window and queue of one session hold together
MANY = 3000


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[NodeProcess]:
    """A node whose publishers wait longer than a busy machine keeps a receiver from its turn."""
    with NodeProcess(http=True, config="[session]\npatience = 60\n") as running:
        yield running


def joined(node: NodeProcess, version: int = 5) -> Client:
    client = Client(node, version=version)
    client.connect()
    return client


def burst(topic: str, count: int, version: int = 5, start: int = 0) -> bytes:
    """Numbered QoS 1 messages, all at once, without waiting for an acknowledgement."""
    numbers = range(start, start + count)
    return b"".join(publish_packet(topic, b"%d" % n, qos=1, packet_id=n + 1, version=version) for n in numbers)


def take(subscriber: Client, count: int) -> list[Packet]:
    """Receive and acknowledge."""
    messages: list[Packet] = []
    while len(messages) < count:
        message = subscriber.expect(PUBLISH, timeout=30)
        subscriber.send(ack_packet(PUBACK, message.packet_id or 0, version=subscriber.version))
        messages.append(message)
    return messages


def dropped(node: NodeProcess) -> float:
    return metrics(node)['motorcade_messages_dropped_total{reason="queue_full"}']


@pytest.mark.parametrize("version", [4, 5])
def test_fan_in_loses_nothing(patient: NodeProcess, version: int) -> None:
    """40 publishers send 200 messages each as fast as they can to one subscriber that takes them one by one."""
    before = dropped(patient)
    with joined(patient, version) as subscriber:
        subscriber.subscribe(f"in-{version}/+", 1)
        publishers = [joined(patient, version) for _ in range(PUBLISHERS)]
        for number, publisher in enumerate(publishers):
            publisher.send(burst(f"in-{version}/{number}", EACH, version))
        messages = take(subscriber, PUBLISHERS * EACH)
        for number, publisher in enumerate(publishers):
            mine = [m.payload for m in messages if m.topic == f"in-{version}/{number}"]
            assert [b"%d" % n for n in range(EACH)] == mine
            assert list(range(1, EACH + 1)) == [publisher.expect(PUBACK).packet_id for _ in range(EACH)]
            publisher.close()
    assert before == dropped(patient)


def test_a_receiver_that_acknowledges_nothing_is_given_up(node: NodeProcess) -> None:
    """Its publisher goes on and is acknowledged; the receiver loses its oldest messages, as a full queue says."""
    before = dropped(node)
    with joined(node) as stuck, joined(node) as publisher, Witness(node) as witness:
        stuck.subscribe("stuck", 1)
        publisher.send(burst("stuck", MANY))
        witness.check()
        assert list(range(1, MANY + 1)) == [publisher.expect(PUBACK, timeout=30).packet_id for _ in range(MANY)]
        assert before + MANY - 1000 - 32 == dropped(node)


def test_a_slow_receiver_does_not_slow_the_others_of_its_topic(node: NodeProcess) -> None:
    """With a second subscriber nobody waits for the slow one."""
    with joined(node) as slow, joined(node) as quick, joined(node) as publisher:
        for subscriber in (slow, quick):
            subscriber.subscribe("both", 1)
        for start in range(0, MANY, 500):  # as many as the quick one's queue holds, then the next
            publisher.send(burst("both", 500, start=start))
            assert [b"%d" % n for n in range(start, start + 500)] == [m.payload for m in take(quick, 500)]
        assert MANY == len([publisher.expect(PUBACK) for _ in range(MANY)])


def test_two_clients_that_flood_each_other_both_get_everything(node: NodeProcess) -> None:
    """Each publishes more to the other than its queue holds, and takes what comes: neither waits for ever."""
    with joined(node) as one, joined(node) as two:
        one.subscribe("to/one", 1)
        two.subscribe("to/two", 1)
        for start in range(0, MANY, 600):
            for client, topic in ((one, "to/two"), (two, "to/one")):
                client.send(burst(topic, 600, start=start))
        heard: dict[str, list[bytes]] = {"to/one": [], "to/two": []}
        last = b"%d" % (MANY - 1)
        while any(messages[-1:] != [last] for messages in heard.values()):
            for client, topic in ((one, "to/one"), (two, "to/two")):
                if heard[topic][-1:] != [last]:
                    message = client.recv(timeout=30)
                    if message.type == PUBLISH:
                        heard[topic].append(message.payload or b"")
                        client.send(ack_packet(PUBACK, message.packet_id or 0))


def test_a_waiting_publisher_is_not_taken_for_dead(patient: NodeProcess) -> None:
    """While it waits nothing is read from it, so its keep alive does not count."""
    with joined(patient) as subscriber, Client(patient) as publisher:
        subscriber.subscribe("patience", 1)
        publisher.connect(keepalive=1)
        publisher.send(burst("patience", MANY))
        for _ in range(20):  # the subscriber takes little by little, for longer than the keep alive
            take(subscriber, 20)
            let_pass(0.1)
        messages = take(subscriber, MANY - 400)
        assert b"%d" % (MANY - 1) == messages[-1].payload
        assert list(range(1, MANY + 1)) == [publisher.expect(PUBACK).packet_id for _ in range(MANY)]
