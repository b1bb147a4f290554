"""Section 1.5 and chapter 2: strings, integers, fixed header, packet identifiers and properties."""

from __future__ import annotations

import struct

from tests.support import wire
from tests.support.cases import both_versions, each, every_version
from tests.support.clauses import clause

# --- data representation (1.5) ------------------------------------------------------------------------------------


@clause(v5="MQTT-1.5.5-1")
@both_versions
@each(whole=(127, 128, 16_383, 16_384, 200_000))
def test_lengths_are_sent_in_their_shortest_form(connect: wire.Connect, name: str, version: int, whole: int) -> None:
    """The remaining length of a PUBLISH from the broker takes as few bytes as it can [MQTT-1.5.5-1]."""
    client = connect(version=version)
    client.subscribe(name)
    head = len(wire.utf8(name)) + (1 if version == 5 else 0)
    client.publish(name, b"x" * (whole - head))
    message = client.expect(wire.PUBLISH)  # the reader refuses every longer form
    assert wire.packet(0x30, message.raw[-whole:]) == message.raw


@clause(v5="MQTT-1.5.5-1")
@each(size=(1, 118, 119, 120, 121, 122, 123, 124, 125, 1_000))
def test_property_lengths_are_sent_in_their_shortest_form(connect: wire.Connect, name: str, size: int) -> None:
    """The property length of a PUBLISH from the broker takes as few bytes as it can [MQTT-1.5.5-1]."""
    client = connect()
    client.subscribe(name)
    client.publish(name, b"x", properties=wire.prop(0x26, ("n", "v" * size)))
    assert ("n", "v" * size) == client.expect(wire.PUBLISH).prop(0x26)  # the reader refuses every longer form


@both_versions
def test_a_packet_may_arrive_byte_by_byte(connect: wire.Connect, name: str, version: int) -> None:
    """A packet in single bytes is the same packet: part of a length or a string is waited for, not guessed."""
    client = connect(version=version)
    client.subscribe(name)
    for byte in wire.publish_packet(name, b"x" * 200, version=version):
        client.send(bytes([byte]))
    assert b"x" * 200 == client.expect(wire.PUBLISH).payload


# --- fixed header -------------------------------------------------------------------------------------------------


@clause(v3=("MQTT-2.2.2-1", "MQTT-3.6.1-1"), v5=("MQTT-2.1.3-1", "MQTT-3.6.1-1"))
@every_version
def test_the_broker_sends_the_flags_that_the_table_gives(connect: wire.Connect, name: str, version: int) -> None:
    """Acknowledgements of the broker have zero flags, its PUBREL has 2 [MQTT-2.1.3-1]."""
    publisher, subscriber = connect(version=version), connect(version=version)
    assert subscriber.connack is not None and 0 == subscriber.connack.flags
    assert 0 == subscriber.subscribe(name, 2).flags
    publisher.send(wire.publish_packet(name, b"x", version=version, qos=2, packet_id=9))
    assert 0 == publisher.expect(wire.PUBREC).flags
    publisher.send(wire.ack_packet(wire.PUBREL, 9, version=version))
    assert 0 == publisher.expect(wire.PUBCOMP).flags
    packet_id = subscriber.expect(wire.PUBLISH).packet_id
    assert packet_id is not None
    subscriber.send(wire.ack_packet(wire.PUBREC, packet_id, version=version))
    assert 2 == subscriber.expect(wire.PUBREL).flags
    assert 0 == subscriber.unsubscribe(name).flags
    publisher.send(wire.publish_packet(name, b"x", version=version, qos=1, packet_id=9))
    assert 0 == publisher.expect(wire.PUBACK).flags


# --- packet identifiers -------------------------------------------------------------------------------------------


@clause(v3="MQTT-2.3.1-5", v5=("MQTT-2.2.1-2", "MQTT-2.2.2-1"))
@both_versions
def test_a_qos_0_publish_has_no_packet_identifier(connect: wire.Connect, name: str, version: int) -> None:
    """A QoS 0 message from the broker is topic, empty properties and payload, nothing else [MQTT-2.2.1-2]."""
    client = connect(version=version)
    client.subscribe(name, 0)
    client.publish(name, b"payload")
    empty = b"\x00" if version == 5 else b""
    assert wire.packet(0x30, wire.utf8(name) + empty + b"payload") == client.expect(wire.PUBLISH).raw


@clause(
    v3=("MQTT-2.3.1-6", "MQTT-2.3.1-7", "MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.10.4-4", "MQTT-3.3.4-1"),
    v5=(
        "MQTT-2.2.1-5",
        "MQTT-2.2.1-6",
        "MQTT-3.8.4-1",
        "MQTT-3.8.4-2",
        "MQTT-3.10.4-4",
        "MQTT-3.10.4-5",
        "MQTT-3.3.4-1",
    ),
)
@every_version
@each(packet_id=(1, 255, 256, 65_535))
def test_acknowledgements_carry_the_identifier_of_the_request(
    connect: wire.Connect, name: str, version: int, packet_id: int
) -> None:
    """PUBACK, PUBREC, PUBCOMP, SUBACK and UNSUBACK answer under the identifier that was sent, QoS 0 has no answer
    [MQTT-2.2.1-5] [MQTT-3.3.4-1].
    """
    client = connect(version=version)
    # The client's methods compare the identifiers of all answers.
    client.subscribe(f"{name}/other", 1, packet_id=packet_id)
    client.publish(name, b"x")
    client.publish(name, b"x", 1, packet_id=packet_id)
    client.publish(name, b"x", 2, packet_id=packet_id)
    client.unsubscribe(f"{name}/other", packet_id=packet_id)
    client.expect_nothing()


# --- properties ---------------------------------------------------------------------------------------------------


@clause(v5="MQTT-2.2.2-1")
def test_no_properties_is_a_length_of_zero(connect: wire.Connect, name: str) -> None:
    """SUBACK, UNSUBACK and CONNACK always have a property length, zero when there is nothing to say [MQTT-2.2.2-1]."""
    client = connect()
    assert client.connack is not None
    length = client.connack.raw[4:]
    assert length == wire.props(length[1:]) or len(length) > 128
    answer = client.subscribe(name, 1)
    if not answer.properties:
        assert wire.packet(0x90, struct.pack("!H", answer.packet_id or 0) + b"\x00\x01") == answer.raw
    answer = client.unsubscribe(name)
    if not answer.properties:
        assert wire.packet(0xB0, struct.pack("!H", answer.packet_id or 0) + b"\x00\x00") == answer.raw
