"""Chapter 2: fixed header, packet identifiers and properties."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tests.support.cases import both_versions, each, qos_1_and_2
from tests.support.clauses import clause
from tests.support.wire import (
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    Client,
    ack_packet,
    packet,
    props,
    publish_packet,
    utf8,
)

Connect = Callable[..., Client]


@clause(v3="MQTT-2.2.2-1", v5="MQTT-2.1.3-1")
@both_versions
def test_the_broker_sends_the_flags_that_the_table_gives(connect: Connect, name: str, version: int) -> None:
    """Acknowledgements of the broker have zero flags, its PUBREL has 2 [MQTT-2.1.3-1]."""
    publisher, subscriber = connect(version=version), connect(version=version)
    assert subscriber.connack is not None and 0 == subscriber.connack.flags
    assert 0 == subscriber.subscribe(name, 2).flags
    publisher.send(publish_packet(name, b"x", version=version, qos=2, packet_id=9))
    assert 0 == publisher.expect(PUBREC).flags
    publisher.send(ack_packet(PUBREL, 9, version=version))
    assert 0 == publisher.expect(PUBCOMP).flags
    packet_id = subscriber.expect(PUBLISH).packet_id
    assert packet_id is not None
    subscriber.send(ack_packet(PUBREC, packet_id, version=version))
    assert 2 == subscriber.expect(PUBREL).flags
    assert 0 == subscriber.unsubscribe(name).flags


# --- packet identifiers -------------------------------------------------------------------------------------------


@clause(v3="MQTT-2.3.1-5", v5=("MQTT-2.2.1-2", "MQTT-2.2.2-1"))
@both_versions
def test_a_qos_0_publish_has_no_packet_identifier(connect: Connect, name: str, version: int) -> None:
    """A QoS 0 message from the broker is topic, empty properties and payload, nothing else [MQTT-2.2.1-2]."""
    client = connect(version=version)
    client.subscribe(name, 0)
    client.publish(name, b"payload")
    empty = b"\x00" if version == 5 else b""
    assert packet(0x30, utf8(name) + empty + b"payload") == client.expect(PUBLISH).raw


@clause(v3=("MQTT-2.3.1-1", "MQTT-2.3.1-4"), v5="MQTT-2.2.1-4")
@both_versions
@qos_1_and_2
def test_identifiers_in_flight_are_not_handed_out_again(connect: Connect, name: str, version: int, qos: int) -> None:
    """While messages wait for their acknowledgement every further one has another identifier [MQTT-2.2.1-4]."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, qos)
    held: set[int] = set()
    for number in range(10):
        publisher.publish(name, b"%d" % number, qos)
        message = subscriber.expect(PUBLISH)
        assert message.packet_id
        assert message.packet_id not in held
        if number % 2:
            held.add(message.packet_id)
        else:  # every second identifier goes back, so the next one could be any that is free
            subscriber.send(ack_packet(PUBACK if qos == 1 else PUBREC, message.packet_id, version=version))
            if qos == 2:
                assert message.packet_id == subscriber.expect(PUBREL).packet_id
                subscriber.send(ack_packet(PUBCOMP, message.packet_id, version=version))


@clause(
    v3=("MQTT-2.3.1-6", "MQTT-2.3.1-7", "MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.10.4-4"),
    v5=("MQTT-2.2.1-5", "MQTT-2.2.1-6", "MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.10.4-4", "MQTT-3.10.4-5"),
)
@both_versions
@each(packet_id=(1, 255, 256, 65_535))
def test_acknowledgements_carry_the_identifier_of_the_request(
    connect: Connect, name: str, version: int, packet_id: int
) -> None:
    """PUBACK, PUBREC, PUBCOMP, SUBACK and UNSUBACK answer under the identifier that was sent [MQTT-2.2.1-5]."""
    client = connect(version=version)
    # The client's methods compare the identifiers of all answers.
    client.subscribe(f"{name}/other", 1, packet_id=packet_id)
    client.publish(name, b"x", 1, packet_id=packet_id)
    client.publish(name, b"x", 2, packet_id=packet_id)
    client.unsubscribe(f"{name}/other", packet_id=packet_id)
    client.expect_nothing()


# --- properties ---------------------------------------------------------------------------------------------------


@clause(v5="MQTT-2.2.2-1")
def test_no_properties_is_a_length_of_zero(connect: Connect, name: str) -> None:
    """SUBACK, UNSUBACK and CONNACK always have a property length, zero when there is nothing to say [MQTT-2.2.2-1]."""
    client = connect()
    assert client.connack is not None
    length = client.connack.raw[4:]
    assert length == props(length[1:]) or len(length) > 128
    answer = client.subscribe(name, 1)
    if not answer.properties:
        assert packet(0x90, struct.pack("!H", answer.packet_id or 0) + b"\x00\x01") == answer.raw
    answer = client.unsubscribe(name)
    if not answer.properties:
        assert packet(0xB0, struct.pack("!H", answer.packet_id or 0) + b"\x00\x00") == answer.raw
