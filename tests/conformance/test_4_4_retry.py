"""Section 4.4, message delivery retry: what a broker sends again, when, and in which order."""

from __future__ import annotations

from tests.support.cases import both_versions, every_version, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import RECEIVE_MAXIMUM, acknowledge, lasting, numbered, payloads, publish_many, receive_until
from tests.support.wire import PUBCOMP, PUBLISH, PUBREL, Connect, ack_packet, prop


@every_version
@qos_1_and_2
@clause(
    v3=("MQTT-2.3.1-4", "MQTT-4.4.0-1", "MQTT-4.6.0-1", "MQTT-3.3.1-1"),
    v5=("MQTT-2.2.1-5", "MQTT-4.4.0-1", "MQTT-3.3.1-1"),
)
def test_unacknowledged_messages_are_repeated_with_their_ids(
    connect: Connect, name: str, version: int, qos: int
) -> None:
    """On reconnection everything in flight comes again, in order, with its packet id and DUP 1. [MQTT-4.4.0-1]"""
    subscriber = connect(f"{name}-s", **lasting(version))
    subscriber.subscribe(name, qos)
    publish_many(connect(version=version), name, numbered(10), qos)
    first = [subscriber.expect(PUBLISH) for _ in range(10)]
    subscriber.close()
    again = connect(f"{name}-s", **lasting(version))
    if version > 3:  # MQTT 3.1 has no such flag
        assert again.connack is not None and again.connack.session_present
    second = [again.expect(PUBLISH) for _ in range(10)]
    assert [(message.packet_id, message.payload) for message in first] == [
        (message.packet_id, message.payload) for message in second
    ]
    assert all(message.dup for message in second)
    again.expect_nothing()


@both_versions
@clause(v3=("MQTT-4.4.0-1", "MQTT-4.6.0-1", "MQTT-4.6.0-4"), v5="MQTT-4.4.0-1")
def test_publish_and_pubrel_are_repeated_side_by_side(connect: Connect, name: str, version: int) -> None:
    """Each message comes back at the step it had reached: PUBLISH, PUBREL or not at all. [MQTT-4.4.0-1]"""
    subscriber = connect(f"{name}-s", **lasting(version))
    subscriber.subscribe(name, 2)
    publish_many(connect(version=version), name, numbered(6), 2)
    first = [subscriber.expect(PUBLISH) for _ in range(6)]
    for message in first[:4]:
        acknowledge(subscriber, message)
        assert message.packet_id == subscriber.expect(PUBREL).packet_id
    for message in first[:2]:
        subscriber.send(ack_packet(PUBCOMP, message.packet_id or 0, version=version))
    subscriber.expect_nothing()
    subscriber.close()
    again = connect(f"{name}-s", **lasting(version))
    second = [again.recv() for _ in range(4)]
    assert [message.packet_id for message in first[2:4]] == [p.packet_id for p in second if p.type == PUBREL]
    assert [(message.packet_id, message.payload, True) for message in first[4:]] == [
        (p.packet_id, p.payload, p.dup) for p in second if p.type == PUBLISH
    ]
    again.expect_nothing()


@every_version
@qos_1_and_2
@clause(v3="MQTT-4.4.0-1", v5="MQTT-4.4.0-1")
def test_a_take_over_repeats_too(connect: Connect, name: str, version: int, qos: int) -> None:
    """A second connection with the client id of a living one gets what that one has not acknowledged. [MQTT-4.4.0-1]"""
    subscriber = connect(f"{name}-s", **lasting(version))
    subscriber.subscribe(name, qos)
    publish_many(connect(version=version), name, numbered(3), qos)
    first = [subscriber.expect(PUBLISH).packet_id for _ in range(3)]
    again = connect(f"{name}-s", **lasting(version))
    second = [again.expect(PUBLISH) for _ in range(3)]
    assert [(number, True) for number in first] == [(message.packet_id, message.dup) for message in second]


@qos_1_and_2
@clause(v5="MQTT-4.4.0-1")
def test_nothing_is_repeated_on_a_living_connection(connect: Connect, name: str, qos: int) -> None:
    """Neither further messages nor acknowledgements of others make the broker repeat one. [MQTT-4.4.0-1]

    That no timer does it either cannot be shown in finite time; the clients here stay silent for a few exchanges only.
    """
    subscriber, publisher = connect(), connect()
    subscriber.subscribe(name, qos)
    publisher.publish(name, b"unanswered", qos)
    subscriber.expect(PUBLISH)
    for payload in numbered(10):
        publisher.publish(name, payload, qos)
        message = subscriber.receive()
        assert (payload, False) == (message.payload, message.dup)
        subscriber.expect_nothing()


@both_versions
@qos_1_and_2
@clause(v3=("MQTT-4.4.0-1", "MQTT-4.6.0-1"), v5="MQTT-4.4.0-1")
def test_repeated_messages_come_before_queued_ones(connect: Connect, name: str, version: int, qos: int) -> None:
    """What was in flight comes first, then what arrived while the client was away, in order. [MQTT-4.4.0-1]"""
    subscriber, publisher = connect(f"{name}-s", **lasting(version)), connect(version=version)
    subscriber.subscribe(name, qos)
    publish_many(publisher, name, numbered(3), qos)
    for _ in range(3):
        subscriber.expect(PUBLISH)
    subscriber.disconnect()
    publish_many(publisher, name, [*numbered(40, start=3), b"end"], qos)
    messages = receive_until(connect(f"{name}-s", **lasting(version)), b"end")
    assert [*numbered(43), b"end"] == payloads(messages)
    assert [True] * 3 + [False] * 41 == [message.dup for message in messages]


@qos_1_and_2
@clause(v5=("MQTT-4.4.0-1", "MQTT-3.3.4-9", "MQTT-4.9.0-1"))
def test_a_smaller_receive_maximum_holds_for_repetitions(connect: Connect, name: str, qos: int) -> None:
    """Repetitions to a client that comes back with a smaller Receive Maximum stay within it. [MQTT-3.3.4-9]"""
    subscriber = connect(f"{name}-s", **lasting(5, prop(RECEIVE_MAXIMUM, 5)))
    subscriber.subscribe(name, qos)
    publish_many(connect(), name, numbered(8), qos)
    first = [subscriber.expect(PUBLISH) for _ in range(5)]
    subscriber.expect_nothing()
    subscriber.close()
    again = connect(f"{name}-s", **lasting(5, prop(RECEIVE_MAXIMUM, 2)))
    second = []
    for _ in range(4):
        held = [again.expect(PUBLISH), again.expect(PUBLISH)]
        again.expect_nothing()
        second += held
        for message in held:
            acknowledge(again, message)
        if qos == 2:
            for message in held:
                assert message.packet_id == again.expect(PUBREL).packet_id
            again.send(b"".join(ack_packet(PUBCOMP, message.packet_id or 0) for message in held))
    again.expect_nothing()
    assert numbered(8) == payloads(second)
    assert [(message.packet_id, True) for message in first] == [(m.packet_id, m.dup) for m in second[:5]]
    assert not any(message.dup for message in second[5:])
