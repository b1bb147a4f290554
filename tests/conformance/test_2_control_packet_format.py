"""Chapter 2: fixed header, packet identifiers and properties."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from tests.support.clauses import clause
from tests.support.refusals import BROKEN, MALFORMED, PROTOCOL_ERROR, connect_refused, refused
from tests.support.wire import (
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    Client,
    ack_packet,
    connect_packet,
    packet,
    prop,
    props,
    publish_packet,
    subscribe_packet,
    unsubscribe_packet,
    utf8,
    varint,
)

VERSIONS = (4, 5)
Connect = Callable[..., Client]


def with_flags(raw: bytes, flags: int) -> bytes:
    """The same packet with other flags in its first byte."""
    return bytes([raw[0] & 0xF0 | flags]) + raw[1:]


def wrong_flags() -> list[object]:
    """Every packet type of a connected client with every flag value that its type does not have."""
    cases: list[object] = []
    for version in VERSIONS:
        packets = {
            "puback": (ack_packet(PUBACK, 1, version=version), 0),
            "pubrec": (ack_packet(PUBREC, 1, version=version), 0),
            "pubrel": (ack_packet(PUBREL, 1, version=version), 2),
            "pubcomp": (ack_packet(PUBCOMP, 1, version=version), 0),
            "subscribe": (subscribe_packet(1, [("a", 0)], version=version), 2),
            "unsubscribe": (unsubscribe_packet(1, ["a"], version=version), 2),
            "pingreq": (b"\xc0\x00", 0),
        }
        for kind, (raw, right) in packets.items():
            cases += [
                pytest.param(version, with_flags(raw, flags), id=f"v{version}-{kind}-{flags}")
                for flags in (0, 1, 2, 4, 8, 15)
                if flags != right
            ]
    return cases


@clause(v3=("MQTT-2.2.2-1", "MQTT-2.2.2-2"), v5="MQTT-2.1.3-1")
@pytest.mark.parametrize(("version", "raw"), wrong_flags())
def test_reserved_flags_of_the_fixed_header_are_checked(connect: Connect, version: int, raw: bytes) -> None:
    """A packet with other flags than its type has is malformed and ends the connection [MQTT-2.1.3-1]."""
    client = connect(version=version)
    client.send(raw)
    refused(client, MALFORMED)


@clause(v3=("MQTT-2.2.2-1", "MQTT-2.2.2-2"), v5="MQTT-2.1.3-1")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("flags", (1, 2, 4, 8, 15))
def test_reserved_flags_of_connect_are_checked(
    open_client: Callable[..., Client], name: str, version: int, flags: int
) -> None:
    """A CONNECT with flags in its first byte is not accepted [MQTT-2.1.3-1]."""
    client = open_client(version)
    client.send(with_flags(connect_packet(name, version=version), flags))
    # The flags come before the version, so an answer in words is not asked for.
    assert all(answer.reason for answer in client.expect_closed())


@clause(v3=("MQTT-2.2.2-1", "MQTT-3.14.1-1"), v5=("MQTT-2.1.3-1", "MQTT-3.14.1-1"))
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("flags", (1, 2, 4, 8, 15))
def test_reserved_flags_of_disconnect_are_checked(connect: Connect, version: int, flags: int) -> None:
    """A DISCONNECT with flags is malformed, not a normal goodbye [MQTT-3.14.1-1]."""
    client = connect(version=version)
    client.send(bytes([0xE0 | flags, 0]))
    refused(client, MALFORMED)


@clause(v3="MQTT-2.2.2-1", v5="MQTT-2.1.3-1")
@pytest.mark.parametrize("version", VERSIONS)
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


@clause(v3="MQTT-4.8.0-1", v5="MQTT-4.13.1-1")
@pytest.mark.parametrize(
    ("version", "raw"),
    [
        pytest.param(4, b"\x00\x00", id="v4-type-0"),
        pytest.param(5, b"\x00\x00", id="v5-type-0"),
        pytest.param(4, b"\xf0\x00", id="v4-type-15"),
    ],
)
def test_reserved_packet_types_end_the_connection(connect: Connect, version: int, raw: bytes) -> None:
    """A packet type that the version does not have ends the connection [MQTT-4.8.0-1]."""
    client = connect(version=version)
    client.send(raw)
    refused(client, *BROKEN)


@clause(v3="MQTT-4.8.0-1", v5="MQTT-4.13.1-1")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "kind", ("connack", "suback", "unsuback", "pingresp"), ids=("connack", "suback", "unsuback", "pingresp")
)
def test_packets_that_only_a_server_sends_end_the_connection(connect: Connect, version: int, kind: str) -> None:
    """A client that sends a server's packet breaks the protocol [MQTT-4.13.1-1]."""
    empty = b"\x00" if version == 5 else b""
    body = {
        "connack": packet(0x20, b"\x00\x00" + empty),
        "suback": packet(SUBACK << 4, b"\x00\x01" + empty + b"\x00"),
        "unsuback": packet(UNSUBACK << 4, b"\x00\x01" + (empty + b"\x00" if version == 5 else b"")),
        "pingresp": packet(0xD0),
    }[kind]
    client = connect(version=version)
    client.send(body)
    refused(client, *BROKEN)


# --- packet identifiers -------------------------------------------------------------------------------------------


@clause(v3="MQTT-2.3.1-1", v5="MQTT-2.2.1-3")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ("publish-1", "publish-2", "subscribe", "unsubscribe"))
def test_a_packet_identifier_of_zero_ends_the_connection(connect: Connect, name: str, version: int, kind: str) -> None:
    """SUBSCRIBE, UNSUBSCRIBE and PUBLISH above QoS 0 need an identifier other than zero [MQTT-2.3.1-1]."""
    raw = {
        "publish-1": publish_packet(name, b"x", version=version, qos=1, packet_id=0),
        "publish-2": publish_packet(name, b"x", version=version, qos=2, packet_id=0),
        "subscribe": subscribe_packet(0, [(name, 0)], version=version),
        "unsubscribe": unsubscribe_packet(0, [name], version=version),
    }[kind]
    client = connect(version=version)
    client.send(raw)
    refused(client, *BROKEN)


@clause(v3="MQTT-2.3.1-5", v5=("MQTT-2.2.1-2", "MQTT-2.2.2-1"))
@pytest.mark.parametrize("version", VERSIONS)
def test_a_qos_0_publish_has_no_packet_identifier(connect: Connect, name: str, version: int) -> None:
    """A QoS 0 message from the broker is topic, empty properties and payload, nothing else [MQTT-2.2.1-2]."""
    client = connect(version=version)
    client.subscribe(name, 0)
    client.publish(name, b"payload")
    empty = b"\x00" if version == 5 else b""
    assert packet(0x30, utf8(name) + empty + b"payload") == client.expect(PUBLISH).raw


@clause(v3=("MQTT-2.3.1-1", "MQTT-2.3.1-4"), v5="MQTT-2.2.1-4")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", (1, 2))
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


@clause(v3="MQTT-2.3.1-4", v5="MQTT-2.2.1-5")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_message_sent_again_keeps_its_identifier(connect: Connect, name: str, version: int) -> None:
    """What was not acknowledged comes again after a reconnect under the same identifier [MQTT-2.3.1-4]."""
    kept = prop(0x11, 300) if version == 5 else b""
    subscriber = connect(f"{name}s", version=version, clean=False, properties=kept)
    subscriber.subscribe(name, 1)
    publisher = connect(version=version)
    for payload in (b"one", b"two", b"three"):
        publisher.publish(name, payload, 1)
    first = {message.payload: message.packet_id for message in (subscriber.expect(PUBLISH) for _ in range(3))}
    subscriber.close()
    again = connect(f"{name}s", version=version, clean=False, properties=kept)
    second = {message.payload: message.packet_id for message in (again.receive() for _ in range(3))}
    assert first == second


@clause(v3=("MQTT-2.3.1-6", "MQTT-2.3.1-7"), v5=("MQTT-2.2.1-5", "MQTT-2.2.1-6"))
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("packet_id", (1, 255, 256, 65_535))
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


@clause(v5=("MQTT-2.2.2-1", "MQTT-4.13.1-1"))
@pytest.mark.parametrize("kind", ("subscribe", "unsubscribe", "publish"))
def test_a_packet_without_a_property_length_is_malformed(connect: Connect, kind: str) -> None:
    """A packet that ends where its property length should be cannot be understood [MQTT-2.2.2-1]."""
    raw = {
        "subscribe": packet(0x82, b"\x00\x01"),
        "unsubscribe": packet(0xA2, b"\x00\x01"),
        "publish": packet(0x30, utf8("a")),
    }[kind]
    client = connect()
    client.send(raw)
    refused(client, *BROKEN)


#: Property bytes of a PUBLISH that no receiver can accept.
BROKEN_PROPERTIES = {
    "unknown-id": (varint(0x7E) + b"\x00", (MALFORMED, PROTOCOL_ERROR)),
    "unknown-long-id": (varint(300) + b"\x00", (MALFORMED, PROTOCOL_ERROR)),
    "of-another-packet": (prop(0x21, 10), (MALFORMED, PROTOCOL_ERROR)),
    "assigned-client-id": (prop(0x12, "x"), (MALFORMED, PROTOCOL_ERROR)),
    "cut-value": (b"\x02\x00\x00", (MALFORMED, PROTOCOL_ERROR)),
    "cut-string": (b"\x03\x00\x09abc", (MALFORMED, PROTOCOL_ERROR)),
    "cut-pair": (b"\x26\x00\x01a", (MALFORMED, PROTOCOL_ERROR)),
    "twice-format": (prop(0x01, 1) * 2, (PROTOCOL_ERROR,)),
    "twice-expiry": (prop(0x02, 60) * 2, (PROTOCOL_ERROR,)),
    "twice-content-type": (prop(0x03, "a") * 2, (PROTOCOL_ERROR,)),
    "twice-response-topic": (prop(0x08, "a") * 2, (PROTOCOL_ERROR,)),
    "twice-correlation": (prop(0x09, b"a") * 2, (PROTOCOL_ERROR,)),
    "twice-alias": (prop(0x23, 1) * 2, (PROTOCOL_ERROR,)),
}


@clause(v5="MQTT-4.13.1-1")
@pytest.mark.parametrize("case", list(BROKEN_PROPERTIES))
def test_broken_properties_end_the_connection(connect: Connect, name: str, case: str) -> None:
    """Unknown, misplaced, cut and repeated properties end the connection with their reason [MQTT-4.13.1-1]."""
    properties, reasons = BROKEN_PROPERTIES[case]
    client = connect()
    client.send(publish_packet(name, b"x", properties=properties))
    refused(client, *reasons)


@clause(v5="MQTT-4.13.1-1")
def test_a_property_length_beyond_the_packet_is_malformed(connect: Connect, name: str) -> None:
    """Properties may not reach past the end of their packet [MQTT-4.13.1-1]."""
    client = connect()
    client.send(packet(0x30, utf8(name) + varint(50) + prop(0x01, 1)))
    refused(client, *BROKEN)


@clause(v5="MQTT-4.13.1-1")
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(prop(0x11, 1) * 2, id="session-expiry-twice"),
        pytest.param(prop(0x21, 0), id="receive-maximum-zero"),
        pytest.param(prop(0x21, 5) * 2, id="receive-maximum-twice"),
        pytest.param(prop(0x27, 0), id="maximum-packet-size-zero"),
        pytest.param(prop(0x27, 500) * 2, id="maximum-packet-size-twice"),
        pytest.param(prop(0x22, 5) * 2, id="topic-alias-maximum-twice"),
        pytest.param(prop(0x19, 2), id="request-response-information-two"),
        pytest.param(prop(0x19, 1) * 2, id="request-response-information-twice"),
        pytest.param(prop(0x17, 2), id="request-problem-information-two"),
        pytest.param(prop(0x17, 1) * 2, id="request-problem-information-twice"),
        pytest.param(prop(0x15, "m") * 2, id="authentication-method-twice"),
        pytest.param(prop(0x16, b"d"), id="authentication-data-without-method"),
    ],
)
def test_connect_properties_with_a_forbidden_value_are_a_protocol_error(
    open_client: Callable[..., Client], name: str, bad: bytes
) -> None:
    """Values that the specification calls a protocol error are refused with 0x82 [MQTT-4.13.1-1]."""
    client = open_client()
    client.send(connect_packet(name, properties=bad))
    connect_refused(client, PROTOCOL_ERROR)


@clause(v5="MQTT-4.13.1-1")
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(prop(0x02, 1), id="message-expiry"),
        pytest.param(prop(0x0B, 1), id="subscription-identifier"),
        pytest.param(prop(0x12, "x"), id="assigned-client-id"),
        pytest.param(varint(0x7E), id="unknown"),
        pytest.param(b"\x11\x00", id="cut"),
    ],
)
def test_connect_properties_of_other_packets_are_malformed(
    open_client: Callable[..., Client], name: str, bad: bytes
) -> None:
    """A CONNECT with a property that does not belong there is refused [MQTT-4.13.1-1]."""
    client = open_client()
    client.send(connect_packet(name, properties=bad))
    connect_refused(client, *BROKEN)
