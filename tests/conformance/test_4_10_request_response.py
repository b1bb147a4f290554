"""4.10 Request and response: the properties that carry a request through the broker, and a whole exchange."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.checks import MALFORMED, PROTOCOL_ERROR, TOPIC_INVALID, assert_refused
from tests.support.clauses import clause
from tests.support.wire import Client, Will, prop, publish_packet

Connect = Callable[..., Client]

RESPONSE_TOPIC, CORRELATION_DATA = 0x08, 0x09
REQUEST_RESPONSE_INFORMATION, RESPONSE_INFORMATION = 0x19, 0x1A


@clause(v5=("MQTT-3.3.2-15", "MQTT-3.3.2-16"))
def test_a_request_is_answered(connect: Connect, name: str) -> None:
    """A responder that knows nothing but the request answers to the right place with the right data
    [MQTT-3.3.2-15] [MQTT-3.3.2-16].
    """
    requester, responder = connect(), connect()
    requester.subscribe(f"{name}/replies/1", 1)
    responder.subscribe(f"{name}/service", 1)
    asked = prop(RESPONSE_TOPIC, f"{name}/replies/1") + prop(CORRELATION_DATA, b"\x00\x01\xff")
    requester.publish(f"{name}/service", b"question", 1, properties=asked)
    request = responder.receive()
    responder.publish(
        request.prop(RESPONSE_TOPIC),
        b"answer to " + request.payload,
        1,
        properties=prop(CORRELATION_DATA, request.prop(CORRELATION_DATA)),
    )
    reply = requester.receive()
    assert (f"{name}/replies/1", b"answer to question") == (reply.topic, reply.payload)
    assert b"\x00\x01\xff" == reply.prop(CORRELATION_DATA)
    assert reply.prop(RESPONSE_TOPIC) is None


@clause(v5=("MQTT-3.3.2-15", "MQTT-3.3.2-16"))
@pytest.mark.parametrize("topic", ["a", "/", "$x/y", "\u6c7d\u8eca/\U0001f697", "a//b "])
@pytest.mark.parametrize("data", [b"", b"\x00", bytes(range(256)), b"x" * 65535], ids=["none", "null", "all", "long"])
def test_both_properties_reach_every_subscriber_unaltered(connect: Connect, name: str, topic: str, data: bytes) -> None:
    """Response topic and correlation data, also empty or of the greatest length, come out as they went in
    [MQTT-3.3.2-15] [MQTT-3.3.2-16].
    """
    subscribers = [connect() for _ in range(2)]
    for qos, subscriber in enumerate(subscribers):
        subscriber.subscribe(f"{name}/#", qos)
    shared = connect()
    shared.subscribe(f"$share/g/{name}/#", 1)
    properties = prop(RESPONSE_TOPIC, topic) + prop(CORRELATION_DATA, data)
    connect().publish(f"{name}/a", b"m", 1, properties=properties)
    for subscriber in (*subscribers, shared):
        message = subscriber.receive()
        assert (topic, data) == (message.prop(RESPONSE_TOPIC), message.prop(CORRELATION_DATA))


@clause(v5="MQTT-3.3.2-14")
@pytest.mark.parametrize("topic", ["a/#", "+/a", "#", "a+"])
def test_a_response_topic_has_no_wildcards(connect: Connect, name: str, topic: str) -> None:
    """A request whose response topic has a wildcard is refused [MQTT-3.3.2-14]."""
    client, witness = connect(), connect()
    witness.subscribe(name)
    client.send(publish_packet(name, b"m", properties=prop(RESPONSE_TOPIC, topic)))
    assert_refused(client, (MALFORMED, PROTOCOL_ERROR, TOPIC_INVALID))
    witness.expect_nothing()


@clause(v5="MQTT-3.3.2-13")
@pytest.mark.parametrize("raw", [b"a\xff", b"a\x00", b"\xed\xa0\x80"], ids=lambda raw: raw.hex())
def test_a_response_topic_is_utf8(connect: Connect, name: str, raw: bytes) -> None:
    """A response topic is a legal UTF-8 string [MQTT-3.3.2-13]."""
    client = connect()
    client.send(publish_packet(name, b"m", properties=prop(RESPONSE_TOPIC, raw)))
    assert_refused(client, (MALFORMED, PROTOCOL_ERROR))


@pytest.mark.parametrize(
    "properties",
    [prop(RESPONSE_TOPIC, "a") * 2, prop(CORRELATION_DATA, b"a") * 2],
    ids=["response topic", "correlation data"],
)
def test_neither_property_comes_twice(connect: Connect, name: str, properties: bytes) -> None:
    """Two of either are a protocol error (3.3.2.3.5, 3.3.2.3.6)."""
    client = connect()
    client.send(publish_packet(name, b"m", properties=properties))
    assert_refused(client, (PROTOCOL_ERROR,))


def test_a_request_queued_for_later_keeps_its_properties(connect: Connect, name: str) -> None:
    """A responder that was away finds the request complete (4.10)."""
    lasting = {"clean": False, "properties": prop(0x11, 60)}
    responder = connect(f"{name}-responder", **lasting)
    responder.subscribe(f"{name}/service", 1)
    responder.disconnect()
    properties = prop(RESPONSE_TOPIC, f"{name}/r") + prop(CORRELATION_DATA, b"7")
    connect().publish(f"{name}/service", b"question", 1, properties=properties)
    request = connect(f"{name}-responder", **lasting).receive()
    assert (f"{name}/r", b"7") == (request.prop(RESPONSE_TOPIC), request.prop(CORRELATION_DATA))


def test_a_will_may_be_a_request(connect: Connect, name: str) -> None:
    """Response topic and correlation data of a will reach its subscribers (3.1.3.2)."""
    witness = connect()
    witness.subscribe(name, 1)
    properties = prop(RESPONSE_TOPIC, f"{name}/r") + prop(CORRELATION_DATA, b"w")
    connect(will=Will(name, b"gone", qos=1, properties=properties)).abort()
    message = witness.receive()
    assert (f"{name}/r", b"w") == (message.prop(RESPONSE_TOPIC), message.prop(CORRELATION_DATA))


def test_a_3_1_1_subscriber_gets_the_bare_message(connect: Connect, name: str) -> None:
    """Properties do not disturb a subscriber that cannot read them (4.10)."""
    old = connect(version=4)
    old.subscribe(name, 1)
    connect().publish(name, b"question", 1, properties=prop(RESPONSE_TOPIC, "r") + prop(CORRELATION_DATA, b"c"))
    assert b"question" == old.receive().payload


@clause(v5="MQTT-3.1.2-28")
def test_response_information_comes_only_on_request(connect: Connect) -> None:
    """Without the wish for it, or with the wish 0, a CONNACK has no response information [MQTT-3.1.2-28]."""
    for properties in (b"", prop(REQUEST_RESPONSE_INFORMATION, 0)):
        client = connect(properties=properties)
        assert client.connack is not None
        assert client.connack.prop(RESPONSE_INFORMATION) is None
