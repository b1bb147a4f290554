"""Section 3.14: DISCONNECT, from the client and from the broker (wills and session expiry: test_3_1_*)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.clauses import clause
from tests.support.node import NodeProcess
from tests.support.refusals import BROKEN, MALFORMED, PROTOCOL_ERROR, refused
from tests.support.wire import (
    DISCONNECT,
    PINGREQ,
    PUBLISH,
    Client,
    Will,
    connect_packet,
    disconnect_packet,
    packet,
    prop,
    publish_packet,
    subscribe_packet,
    varint,
)

VERSIONS = (4, 5)
Connect = Callable[..., Client]

#: Reason codes of table 3-10 that a server may send.
SERVER_REASONS = {
    *(0x00, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97),
    *(0x98, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9E, 0x9F, 0xA0, 0xA1, 0xA2),
}

#: Mistakes of a connected client that the broker answers with DISCONNECT.
MISTAKES = {
    "second-connect": connect_packet("c"),
    "wildcard-topic": publish_packet("a/#", b"x"),
    "qos-3": packet(0x36, b"\x00\x01a\x00\x01\x00x"),
    "identifier-0": publish_packet("a", b"x", qos=1, packet_id=0),
    "no-filters": subscribe_packet(1, []),
    "alias-0": publish_packet("a", b"x", properties=prop(0x23, 0)),
    "unknown-property": publish_packet("a", b"x", properties=varint(0x7E)),
    "auth": packet(0xF0, b"\x18\x00"),
    "too-large": b"\x30\xff\xff\xff\x7f",
}


@clause(v3="MQTT-4.8.0-1", v5=("MQTT-3.14.2-1", "MQTT-3.14.2-2", "MQTT-3.14.4-1", "MQTT-3.14.4-2", "MQTT-4.13.2-1"))
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_the_brokers_disconnect_is_the_last_word(connect: Connect, mistake: str) -> None:
    """Its reason is one of the table, it has no session expiry, and nothing but the end follows [MQTT-3.14.4-2]."""
    client = connect()
    client.send(MISTAKES[mistake] + PINGREQ * 3)
    answer = refused(client)
    assert answer is not None
    assert answer.reason in SERVER_REASONS
    assert answer.prop(0x11) is None
    assert 0 == answer.flags


@clause(v5=("MQTT-3.14.2-3", "MQTT-3.14.2-4", "MQTT-3.1.2-24"))
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_disconnect_fits_the_client(connect: Connect, mistake: str) -> None:
    """A reason string or user property that makes DISCONNECT too large for the client is left out [MQTT-3.14.2-3]."""
    client = connect(properties=prop(0x27, 24))  # enough for the CONNACK, not for a sentence
    client.send(MISTAKES[mistake])
    answer = refused(client)
    assert answer is not None
    assert len(answer.raw) <= 24


@clause(v5="MQTT-3.14.0-1")
@pytest.mark.parametrize("raw", list(MISTAKES.values())[1:], ids=list(MISTAKES)[1:])
def test_no_disconnect_before_connack(open_client: Callable[..., Client], raw: bytes) -> None:
    """Who was not accepted gets no DISCONNECT [MQTT-3.14.0-1]."""
    client = open_client()
    client.send(raw)
    assert DISCONNECT not in [answer.type for answer in client.expect_closed()]


@clause(v5="MQTT-3.14.0-1")
@pytest.mark.parametrize("properties", (prop(0x21, 0), prop(0x15, "no-such-method")), ids=("malformed", "refused"))
def test_no_disconnect_instead_of_connack(open_client: Callable[..., Client], name: str, properties: bytes) -> None:
    """A refused CONNECT is answered with CONNACK or nothing, never with DISCONNECT [MQTT-3.14.0-1]."""
    client = open_client()
    client.send(connect_packet(name, properties=properties))
    assert DISCONNECT not in [answer.type for answer in client.expect_closed()]


@clause(v3="MQTT-3.14.4-3", v5="MQTT-3.14.4-3")
@pytest.mark.parametrize("version", (3, 4, 5))
def test_the_broker_closes_after_a_disconnect(connect: Connect, name: str, version: int) -> None:
    """After DISCONNECT nothing is sent or processed, and the broker closes if the client does not [MQTT-3.14.4-3]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/t")
    client = connect(version=version)
    client.send(disconnect_packet(version=version) + publish_packet(f"{name}/t", b"late", version=version) + PINGREQ)
    assert [] == client.expect_closed()
    observer.expect_nothing()


@clause(v5="MQTT-4.13.1-1")
@pytest.mark.parametrize(
    ("raw", "reasons"),
    [
        pytest.param(packet(0xE0, b"\x00\x05\x11\x00\x00\x00"), BROKEN, id="property-cut"),
        pytest.param(packet(0xE0, b"\x00" + varint(10) + prop(0x11, 5) * 2), (PROTOCOL_ERROR,), id="expiry-twice"),
        pytest.param(packet(0xE0, b"\x00" + varint(3) + prop(0x21, 5)), BROKEN, id="misplaced-property"),
        pytest.param(packet(0xE0, b"\x00\x00\x00"), BROKEN, id="bytes-behind-the-end"),
        pytest.param(packet(0xE0, b"\x42"), BROKEN, id="unknown-reason"),
    ],
)
def test_a_broken_disconnect_is_an_error(connect: Connect, raw: bytes, reasons: tuple[int, ...]) -> None:
    """A DISCONNECT that is malformed is answered like any malformed packet [MQTT-4.13.1-1]."""
    client = connect(properties=prop(0x11, 60))
    client.send(raw)
    refused(client, *reasons)


@clause(v3="MQTT-3.14.1-1", v5="MQTT-3.14.1-1")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_disconnect_with_flags_is_not_a_goodbye(connect: Connect, name: str, version: int) -> None:
    """Reserved bits make DISCONNECT malformed, so the will is published [MQTT-3.14.1-1]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/will")
    client = connect(version=version, will=Will(f"{name}/will", b"gone"))
    client.send(b"\xe1\x00")
    refused(client, MALFORMED)
    assert b"gone" == observer.expect(PUBLISH).payload


def test_a_disconnect_body_in_3_1_1_is_malformed(connect: Connect) -> None:
    """DISCONNECT of MQTT 3.1.1 has no body."""
    client = connect(version=4)
    client.send(packet(0xE0, b"\x00"))
    refused(client)


@clause(v5=("MQTT-3.14.2-1", "MQTT-3.14.4-1", "MQTT-3.14.4-2"))
def test_a_stopping_broker_says_so(connect: Connect) -> None:
    """When the node stops, MQTT 5 clients get 0x8B, others just the end of the connection [MQTT-3.14.2-1]."""
    with NodeProcess() as node:
        five, four = connect(to=node), connect(version=4, to=node)
        node.stop()
        refused(five, 0x8B)
        refused(four)
