"""Sections 3.4 to 3.7, PUBACK, PUBREC, PUBREL and PUBCOMP: their forms, reason codes and sizes."""

from __future__ import annotations

import pytest

from tests.support import wire
from tests.support.cases import each, every_version, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import (
    MAXIMUM_PACKET_SIZE,
    PACKET_ID_NOT_FOUND,
    REASON_STRING,
    RECEIVE_MAXIMUM,
    USER_PROPERTY,
    acknowledge,
    lasting,
    payloads,
    receive_until,
)

NO_MATCHING_SUBSCRIBERS = 0x10

#: What the specification lists for each packet (tables 3-4, 3-5, 3-6 and 3-7).
REASONS = {
    wire.PUBACK: {0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
    wire.PUBREC: {0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
    wire.PUBREL: {0x00, 0x92},
    wire.PUBCOMP: {0x00, 0x92},
}

#: Properties that every acknowledgement may carry.
EXPLAINED = (
    wire.prop(REASON_STRING, "because Ä") + wire.prop(USER_PROPERTY, ("a", "1")) + wire.prop(USER_PROPERTY, ("a", "1"))
)

acknowledgements = pytest.mark.parametrize(
    "kind", [wire.PUBACK, wire.PUBREC, wire.PUBREL, wire.PUBCOMP], ids=["PUBACK", "PUBREC", "PUBREL", "PUBCOMP"]
)


def awaiting(connect: wire.Connect, topic: str, kind: int, version: int = 5) -> tuple[wire.Client, int]:
    """A client of which the broker awaits an acknowledgement of this kind, and the packet id."""
    client, other = connect(version=version), connect(version=version)
    if kind == wire.PUBREL:
        client.send(wire.publish_packet(topic, b"from the client", version=version, qos=2, packet_id=5))
        assert 5 == client.expect(wire.PUBREC).packet_id
        return client, 5
    client.subscribe(topic, 2)
    other.publish(topic, b"to the client", 1 if kind == wire.PUBACK else 2)
    message = client.expect(wire.PUBLISH)
    assert message.packet_id is not None
    if kind == wire.PUBCOMP:
        acknowledge(client, message)
        assert message.packet_id == client.expect(wire.PUBREL).packet_id
    return client, message.packet_id


def assert_settled(client: wire.Client, kind: int, packet_id: int) -> None:
    """The acknowledgement was taken: the next step of the flow comes, and nothing else."""
    if kind == wire.PUBREC:
        answer = client.expect(wire.PUBREL)
        assert (packet_id, 0) == (answer.packet_id, answer.reason or 0)
    elif kind == wire.PUBREL:
        answer = client.expect(wire.PUBCOMP)
        assert (packet_id, 0) == (answer.packet_id, answer.reason or 0)
    client.expect_nothing()


# --- what the broker sends ----------------------------------------------------------------------------------------


@qos_1_and_2
@clause(v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1"))
def test_the_publisher_learns_whether_somebody_listens(connect: wire.Connect, name: str, qos: int) -> None:
    """PUBACK and PUBREC say success with a subscriber and No Matching Subscribers without. [MQTT-3.4.2-1]"""
    publisher, subscriber = connect(), connect()
    alone = publisher.publish(name, b"x", qos)
    assert alone is not None and NO_MATCHING_SUBSCRIBERS == alone.reason
    subscriber.subscribe(name, 0)
    heard = publisher.publish(name, b"x", qos)
    assert heard is not None and 0 == heard.reason


@acknowledgements
@clause(v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1"))
def test_the_broker_uses_reason_codes_of_the_table(connect: wire.Connect, name: str, kind: int) -> None:
    """Every acknowledgement of the broker has a reason code that is listed for it. [MQTT-3.6.2-1]"""
    client, other = connect(), connect()
    seen: set[int | None] = set()
    if kind == wire.PUBREL:
        client.subscribe(name, 2)
        other.publish(name, b"x", 2)
        acknowledge(client, client.expect(wire.PUBLISH))
        seen.add(client.expect(wire.PUBREL).reason)
        client.send(wire.ack_packet(wire.PUBREC, 999))
        seen.add(client.expect(wire.PUBREL).reason)
    elif kind == wire.PUBCOMP:
        for packet_id in (1, 2):
            client.send(wire.publish_packet(name, qos=2, packet_id=1))
            client.expect(wire.PUBREC)
            client.send(wire.ack_packet(wire.PUBREL, packet_id))
            seen.add(client.expect(wire.PUBCOMP).reason)
    else:
        for dup in (False, True):
            client.send(wire.publish_packet(name, qos=1 if kind == wire.PUBACK else 2, packet_id=1, dup=dup))
            seen.add(client.expect(kind).reason)
    assert seen <= REASONS[kind], f"{sorted(seen - REASONS[kind], key=repr)} is not listed"


@every_version
@clause(v3="MQTT-4.3.3-2", v5=("MQTT-3.7.2-1", "MQTT-4.3.3-11"))
def test_an_unknown_pubrel_is_answered(connect: wire.Connect, version: int) -> None:
    """PUBREL of an unknown packet id gets PUBCOMP, in MQTT 5 with Packet Identifier not found. [MQTT-3.7.2-1]"""
    client = connect(version=version)
    client.send(wire.ack_packet(wire.PUBREL, 4711, version=version))
    answer = client.expect(wire.PUBCOMP)
    assert 4711 == answer.packet_id
    if version == 5:
        assert PACKET_ID_NOT_FOUND == answer.reason
    client.expect_nothing()


@clause(v5=("MQTT-3.6.2-1", "MQTT-4.3.3-4"))
def test_an_unknown_pubrec_is_answered(connect: wire.Connect) -> None:
    """PUBREC of an unknown packet id gets PUBREL with Packet Identifier not found. [MQTT-3.6.2-1]"""
    client = connect()
    client.send(wire.ack_packet(wire.PUBREC, 4711))
    answer = client.expect(wire.PUBREL)
    assert (4711, PACKET_ID_NOT_FOUND) == (answer.packet_id, answer.reason)
    client.expect_nothing()


@every_version
@each(kind=(wire.PUBACK, wire.PUBCOMP))
def test_an_unknown_last_acknowledgement_is_ignored(connect: wire.Connect, name: str, version: int, kind: int) -> None:
    """PUBACK and PUBCOMP of an unknown packet id change nothing; the specification leaves it to the broker."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(name, 2)
    client.send(wire.ack_packet(kind, 4711, version=version))
    client.expect_nothing()
    other.publish(name, b"x", 2)
    assert b"x" == client.receive().payload


@acknowledgements
@clause(
    v5=(
        "MQTT-3.4.2-2",
        "MQTT-3.4.2-3",
        "MQTT-3.5.2-2",
        "MQTT-3.5.2-3",
        "MQTT-3.6.2-2",
        "MQTT-3.6.2-3",
        "MQTT-3.7.2-2",
        "MQTT-3.7.2-3",
    )
)
def test_acknowledgements_fit_into_the_packet_size_of_the_client(connect: wire.Connect, name: str, kind: int) -> None:
    """Reasons and properties are left out where the acknowledgement would grow too large. [MQTT-3.4.2-2]

    The cases are those in which a broker has something to explain: nobody listens, or the packet id is unknown.
    """
    # Large enough for a CONNACK with the limits of the broker, too small for a sentence.
    limit = 24
    client = connect(properties=wire.prop(MAXIMUM_PACKET_SIZE, limit))
    if kind in (wire.PUBACK, wire.PUBREC):
        client.send(wire.publish_packet(name, qos=1 if kind == wire.PUBACK else 2, packet_id=1))
    else:
        client.send(wire.ack_packet(wire.PUBREC if kind == wire.PUBREL else wire.PUBREL, 1))
    answer = client.expect(kind)
    assert answer.packet_id == 1
    assert len(answer.raw) <= limit


# --- what the broker accepts --------------------------------------------------------------------------------------


@every_version
@acknowledgements
@clause(v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1"))
def test_the_shortest_form_means_success(connect: wire.Connect, name: str, version: int, kind: int) -> None:
    """An acknowledgement of a packet id alone is a success. [MQTT-3.4.2-1]"""
    client, packet_id = awaiting(connect, name, kind, version)
    client.send(wire.ack_packet(kind, packet_id, version=version))
    assert_settled(client, kind, packet_id)


@acknowledgements
@each(tail=(b"\x00", b"\x00\x00", bytes([0, len(EXPLAINED)]) + EXPLAINED))
@clause(v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1"))
def test_every_form_of_success_is_understood(connect: wire.Connect, name: str, kind: int, tail: bytes) -> None:
    """The reason code may come alone, with an empty property list, or with properties. [MQTT-3.4.2-1]"""
    client, packet_id = awaiting(connect, name, kind)
    client.send(wire.packet(kind << 4 | (2 if kind == wire.PUBREL else 0), packet_id.to_bytes(2, "big") + tail))
    assert_settled(client, kind, packet_id)


@qos_1_and_2
@each(reason=(0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99))
@clause(v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-4.4.0-2", "MQTT-4.9.0-2"))
def test_an_error_settles_the_message(connect: wire.Connect, name: str, qos: int, reason: int) -> None:
    """An error in PUBACK or PUBREC frees packet id and window, without PUBREL and without repetition. [MQTT-4.4.0-2]"""
    options = lasting(5, wire.prop(RECEIVE_MAXIMUM, 1))
    client, other = connect(f"{name}-s", **options), connect()
    client.subscribe(name, qos)
    other.publish(name, b"refused", qos)
    other.publish(name, b"next", qos)
    acknowledge(client, client.expect(wire.PUBLISH), reason=reason, properties=EXPLAINED)
    assert b"next" == client.receive().payload
    client.expect_nothing()
    client.close()
    again = connect(f"{name}-s", **options)
    other.publish(name, b"end", qos)
    assert [b"end"] == payloads(receive_until(again, b"end"))


@clause(v5="MQTT-3.7.2-1")
def test_pubcomp_not_found_settles_the_message(connect: wire.Connect, name: str) -> None:
    """PUBCOMP with Packet Identifier not found ends the flow like a success. [MQTT-3.7.2-1]"""
    client = connect(f"{name}-s", **lasting(5, wire.prop(RECEIVE_MAXIMUM, 1)))
    other = connect()
    client.subscribe(name, 2)
    other.publish(name, b"first", 2)
    other.publish(name, b"next", 2)
    message = client.expect(wire.PUBLISH)
    acknowledge(client, message)
    client.expect(wire.PUBREL)
    client.send(wire.ack_packet(wire.PUBCOMP, message.packet_id or 0, reason=PACKET_ID_NOT_FOUND))
    assert b"next" == client.receive().payload
    client.expect_nothing()


@clause(v5="MQTT-3.6.2-1")
def test_pubrel_not_found_frees_the_packet_id(connect: wire.Connect, name: str) -> None:
    """PUBREL with Packet Identifier not found is answered, and the packet id is free again. [MQTT-3.6.2-1]"""
    subscriber = connect()
    subscriber.subscribe(name, 2)
    client, packet_id = awaiting(connect, name, wire.PUBREL)
    client.send(wire.ack_packet(wire.PUBREL, packet_id, reason=PACKET_ID_NOT_FOUND))
    assert packet_id == client.expect(wire.PUBCOMP).packet_id
    client.publish(name, b"new", 2, packet_id=packet_id)
    assert [b"from the client", b"new"] == payloads(receive_until(subscriber, b"new"))
