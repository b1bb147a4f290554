"""Section 3.3.2.3, the properties of a PUBLISH other than the topic alias."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clauses import clause
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MALFORMED_PACKET,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    PROTOCOL_ERROR,
    RESPONSE_TOPIC,
    SUBSCRIPTION_ID,
    TOPIC_NAME_INVALID,
    USER_PROPERTY,
    every_qos,
    expect_refused,
    lasting,
    let_pass,
    payloads,
    receive_until,
)
from tests.support.wire import Client, Packet, prop, publish_packet

Connect = Callable[..., Client]

#: One of each property that a server forwards as it is.
FORWARDED: list[tuple[int, Any]] = [
    (PAYLOAD_FORMAT, 1),
    (CONTENT_TYPE, "text/plain; charset=utf-8 Ä"),
    (RESPONSE_TOPIC, "answers/to Ä/here"),
    (CORRELATION_DATA, b"\x00\x01\xff"),
    (USER_PROPERTY, ("b", "1")),
    (USER_PROPERTY, ("a", "2")),
    (USER_PROPERTY, ("b", "1")),
    (USER_PROPERTY, ("", "")),
    (USER_PROPERTY, ("b", "0")),
]
ENCODED = b"".join(prop(key, value) for key, value in FORWARDED)


def forwarded(connect: Connect, topic: str, properties: bytes, qos: int = 1) -> list[tuple[int, Any]]:
    """The properties with which a message reaches two subscribers, who must see the same."""
    subscribers = [connect(), connect()]
    for subscriber in subscribers:
        subscriber.subscribe(topic, 2)
    connect().publish(topic, b"text", qos, properties=properties)
    first, second = (subscriber.receive() for subscriber in subscribers)
    assert first.properties == second.properties
    return first.properties


def of(properties: list[tuple[int, Any]], key: int) -> list[Any]:
    """All values of one property."""
    return [value for found, value in properties if found == key]


def assert_unaltered(message: Packet) -> None:
    """All properties of `FORWARDED` are there, with the user properties in their order, and nothing else."""
    assert sorted(FORWARDED, key=repr) == sorted(message.properties, key=repr)
    assert of(FORWARDED, USER_PROPERTY) == message.prop_all(USER_PROPERTY)


# --- forwarded as they are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1])
@clause(v5="MQTT-3.3.2-4")
def test_the_payload_format_indicator_arrives(connect: Connect, name: str, value: int) -> None:
    """Payload Format Indicator 1 arrives as 1; 0 arrives as 0 or, meaning the same, not at all. [MQTT-3.3.2-4]"""
    found = of(forwarded(connect, name, prop(PAYLOAD_FORMAT, value)), PAYLOAD_FORMAT)
    assert found == [value] or (value == 0 and not found)


@pytest.mark.parametrize("value", ["a", "answers/to Ä/here", "/", "$SYS/x", "long/" + "x" * 1000])
@clause(v5=("MQTT-3.3.2-13", "MQTT-3.3.2-15"))
def test_the_response_topic_arrives(connect: Connect, name: str, value: str) -> None:
    """The Response Topic arrives unaltered. [MQTT-3.3.2-15]"""
    assert [value] == of(forwarded(connect, name, prop(RESPONSE_TOPIC, value)), RESPONSE_TOPIC)


@pytest.mark.parametrize(
    "value", [b"", b"\x00", bytes(range(256)), b"\xff" * 5000], ids=["empty", "zero", "all", "long"]
)
@clause(v5="MQTT-3.3.2-16")
def test_the_correlation_data_arrive(connect: Connect, name: str, value: bytes) -> None:
    """The Correlation Data, which are bytes and not text, arrive unaltered. [MQTT-3.3.2-16]"""
    assert [value] == of(forwarded(connect, name, prop(CORRELATION_DATA, value)), CORRELATION_DATA)


@pytest.mark.parametrize("value", ["", "application/json", "Ä😀"])
@clause(v5=("MQTT-3.3.2-19", "MQTT-3.3.2-20"))
def test_the_content_type_arrives(connect: Connect, name: str, value: str) -> None:
    """The Content Type arrives unaltered. [MQTT-3.3.2-20]"""
    assert [value] == of(forwarded(connect, name, prop(CONTENT_TYPE, value)), CONTENT_TYPE)


@clause(v5=("MQTT-3.3.2-17", "MQTT-3.3.2-18"))
def test_user_properties_arrive_in_order(connect: Connect, name: str) -> None:
    """All User Properties arrive in their order, repeated and empty names included. [MQTT-3.3.2-18]"""
    given = of(FORWARDED, USER_PROPERTY)
    assert given == of(forwarded(connect, name, b"".join(prop(USER_PROPERTY, pair) for pair in given)), USER_PROPERTY)


@every_qos
@clause(v5=("MQTT-3.3.2-4", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-18", "MQTT-3.3.2-20"))
def test_all_properties_arrive_together(connect: Connect, name: str, qos: int) -> None:
    """A message with every property arrives with every property, at each QoS. [MQTT-3.3.2-17]"""
    subscriber = connect()
    subscriber.subscribe(name, 2)
    connect().publish(name, b"text", qos, properties=ENCODED)
    assert_unaltered(subscriber.receive())


@clause(v5=("MQTT-3.3.2-4", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-18", "MQTT-3.3.2-20"))
def test_a_retained_message_keeps_its_properties(connect: Connect, name: str) -> None:
    """The properties are stored with a retained message. [MQTT-3.3.2-17]"""
    connect().publish(name, b"text", 1, retain=True, properties=ENCODED)
    subscriber = connect()
    subscriber.subscribe(name, 1)
    assert_unaltered(subscriber.receive())


@clause(v5=("MQTT-3.3.2-4", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-18", "MQTT-3.3.2-20"))
def test_a_queued_and_a_repeated_message_keep_their_properties(connect: Connect, name: str) -> None:
    """The properties are stored with a message for an absent client, and repeated with it. [MQTT-3.3.2-17]"""
    subscriber = connect(f"{name}-s", **lasting(5))
    subscriber.subscribe(name, 1)
    subscriber.disconnect()
    connect().publish(name, b"text", 1, properties=ENCODED)
    for dup in (False, True):
        subscriber = connect(f"{name}-s", **lasting(5))
        message = subscriber.recv()
        assert dup == message.dup
        assert_unaltered(message)
        subscriber.close()


@clause(v5="MQTT-3.3.2-17")
def test_a_message_without_properties_gets_none(connect: Connect, name: str) -> None:
    """Nothing is invented: no properties in, none out. [MQTT-3.3.2-17]"""
    assert [] == forwarded(connect, name, b"")


@pytest.mark.parametrize("version", [3, 4], ids=["3.1", "3.1.1"])
@clause(v5="MQTT-3.3.2-17")
def test_an_older_subscriber_gets_the_payload_alone(connect: Connect, name: str, version: int) -> None:
    """To a client that knows no properties the payload is sent without them. [MQTT-3.3.2-17]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 1)
    connect().publish(name, b"text", 1, properties=ENCODED + prop(MESSAGE_EXPIRY, 100))
    assert b"text" == subscriber.receive().payload


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "properties",
    [
        prop(PAYLOAD_FORMAT, 1) * 2,
        prop(MESSAGE_EXPIRY, 5) * 2,
        prop(CONTENT_TYPE, "a") * 2,
        prop(RESPONSE_TOPIC, "a") * 2,
        prop(CORRELATION_DATA, b"a") * 2,
        prop(0x23, 1) * 2,
    ],
    ids=["payload-format", "expiry", "content-type", "response-topic", "correlation-data", "alias"],
)
@clause(v5="MQTT-4.13.1-1")
def test_a_repeated_property_is_refused(connect: Connect, name: str, properties: bytes) -> None:
    """All properties but the User Property may appear once; twice is a protocol error. [MQTT-4.13.1-1]"""
    bad = connect()
    bad.send(publish_packet(name, b"x", properties=properties))
    expect_refused(bad, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "properties",
    [
        b"\x00\x00",
        b"\x7f\x00",
        prop(0x11, 5),
        prop(0x21, 5),
        prop(0x24, 1),
        prop(0x1F, "no"),
        b"\x02\x00\x00",
        b"\x26\x00\x01a",
    ],
    ids=["0x00", "unknown", "session-expiry", "receive-maximum", "maximum-qos", "reason-string", "cut", "half-pair"],
)
@clause(v5="MQTT-4.13.1-1")
def test_a_property_that_does_not_belong_here_is_refused(connect: Connect, name: str, properties: bytes) -> None:
    """Unknown, cut and foreign properties are malformed or protocol errors. [MQTT-4.13.1-1]"""
    bad = connect()
    bad.send(publish_packet(name, b"", properties=properties))
    expect_refused(bad, MALFORMED_PACKET, PROTOCOL_ERROR)


@clause(v5="MQTT-4.13.1-1")
def test_payload_format_2_is_refused(connect: Connect, name: str) -> None:
    """A Payload Format Indicator other than 0 and 1 is a protocol error. [MQTT-4.13.1-1]"""
    bad = connect()
    bad.send(publish_packet(name, b"x", properties=prop(PAYLOAD_FORMAT, 2)))
    expect_refused(bad, PROTOCOL_ERROR, MALFORMED_PACKET)


@pytest.mark.parametrize("value", ["#", "+", "a/#", "a/+/b"])
@clause(v5="MQTT-3.3.2-14")
def test_a_response_topic_has_no_wildcards(connect: Connect, name: str, value: str) -> None:
    """A Response Topic with a wildcard is refused. [MQTT-3.3.2-14]"""
    bad = connect()
    bad.send(publish_packet(name, b"x", properties=prop(RESPONSE_TOPIC, value)))
    expect_refused(bad, PROTOCOL_ERROR, MALFORMED_PACKET, TOPIC_NAME_INVALID)


@pytest.mark.parametrize("value", [b"\xff", b"\xed\xa0\x80", b"a\x00b"], ids=["not-utf8", "surrogate", "null"])
@pytest.mark.parametrize("key", [RESPONSE_TOPIC, CONTENT_TYPE], ids=["response-topic", "content-type"])
@clause(v5=("MQTT-3.3.2-13", "MQTT-3.3.2-19"))
def test_texts_are_utf8(connect: Connect, name: str, key: int, value: bytes) -> None:
    """A Response Topic or Content Type that is no legal UTF-8 string is malformed. [MQTT-3.3.2-13]"""
    bad = connect()
    bad.send(publish_packet(name, b"x", properties=prop(key, value)))
    expect_refused(bad, MALFORMED_PACKET)


@clause(v5="MQTT-4.13.1-1")
def test_user_properties_are_utf8(connect: Connect, name: str) -> None:
    """A User Property that is no legal UTF-8 string is malformed. [MQTT-4.13.1-1]"""
    for pair in ((b"\xff", "a"), ("a", b"\xff")):
        bad = connect()
        bad.send(publish_packet(name, b"x", properties=prop(USER_PROPERTY, pair)))
        expect_refused(bad, MALFORMED_PACKET)


# --- message expiry -----------------------------------------------------------------------------------------------


@every_qos
@clause(v5="MQTT-3.3.2-6")
def test_a_message_that_did_not_wait_keeps_its_expiry(connect: Connect, name: str, qos: int) -> None:
    """A message that is sent on at once carries the interval it came with. [MQTT-3.3.2-6]"""
    subscriber, publisher = connect(), connect()
    subscriber.subscribe(name, 2)
    for interval in (1000, 4_294_967_295):
        publisher.publish(name, b"x", qos, properties=prop(MESSAGE_EXPIRY, interval))
        told = subscriber.receive().prop(MESSAGE_EXPIRY)
        assert interval - 5 <= told <= interval


@clause(v5="MQTT-3.3.2-6")
def test_the_time_in_the_queue_is_subtracted(connect: Connect, name: str) -> None:
    """A message for an absent client arrives with the interval that is left. [MQTT-3.3.2-6]"""
    subscriber = connect(f"{name}-s", **lasting(5))
    subscriber.subscribe(name, 1)
    subscriber.disconnect()
    before = time.monotonic()
    connect().publish(name, b"x", 1, properties=prop(MESSAGE_EXPIRY, 1000))
    accepted = time.monotonic()
    let_pass(2.1)
    waited_at_least = int(time.monotonic() - accepted)
    message = connect(f"{name}-s", **lasting(5)).recv()
    # One second more in each direction, for clocks that count whole seconds.
    waited_at_most = time.monotonic() - before + 1
    assert 1000 - waited_at_most - 1 <= message.prop(MESSAGE_EXPIRY) <= 1000 - waited_at_least + 1
    assert message.prop(MESSAGE_EXPIRY) < 1000


@clause(v5="MQTT-3.3.2-6")
def test_the_time_as_a_retained_message_is_subtracted(connect: Connect, name: str) -> None:
    """The interval of a retained message shrinks while it is kept. [MQTT-3.3.2-6]"""
    connect().publish(name, b"x", 1, retain=True, properties=prop(MESSAGE_EXPIRY, 1000))
    subscriber = connect()

    def told() -> int:
        subscriber.subscribe(name, 1)
        interval: int = subscriber.receive().prop(MESSAGE_EXPIRY)
        return interval

    first = told()
    assert 990 <= first <= 1000
    deadline = time.monotonic() + 30
    while told() >= first:
        assert time.monotonic() < deadline, "the interval does not shrink"


@every_qos
@clause(v5="MQTT-3.3.2-5")
def test_an_expired_message_leaves_the_queue(connect: Connect, name: str, qos: int) -> None:
    """What expired while the client was away is not sent; what did not expire is. [MQTT-3.3.2-5]"""
    subscriber, publisher = connect(f"{name}-s", **lasting(5)), connect()
    subscriber.subscribe(name, 2)
    subscriber.disconnect()
    publisher.publish(name, b"short", qos, properties=prop(MESSAGE_EXPIRY, 1))
    publisher.publish(name, b"end", 1, properties=prop(MESSAGE_EXPIRY, 1000))
    publisher.publish(name, b"short", qos, properties=prop(MESSAGE_EXPIRY, 1))
    let_pass(2.1)
    subscriber = connect(f"{name}-s", **lasting(5))
    assert [b"end"] == payloads(receive_until(subscriber, b"end"))
    publisher.publish(name, b"later", 1)
    assert [b"later"] == payloads(receive_until(subscriber, b"later"))


@clause(v5="MQTT-3.3.2-5")
def test_an_expired_message_leaves_the_queue_of_a_slow_client(connect: Connect, name: str) -> None:
    """What expired while the window of a connected client was full is not sent. [MQTT-3.3.2-5]"""
    subscriber, publisher = connect(properties=prop(0x21, 1)), connect()
    subscriber.subscribe(name, 1)
    publisher.publish(name, b"first", 1)
    publisher.publish(name, b"short", 1, properties=prop(MESSAGE_EXPIRY, 1))
    publisher.publish(name, b"end", 1)
    let_pass(2.1)
    assert [b"first", b"end"] == payloads(receive_until(subscriber, b"end"))


@clause(v5="MQTT-3.3.2-5")
def test_an_expired_retained_message_is_gone(connect: Connect, name: str) -> None:
    """A retained message whose interval has passed is not sent to new subscribers. [MQTT-3.3.2-5]"""
    publisher, subscriber = connect(), connect()
    publisher.publish(name, b"short", 1, retain=True, properties=prop(MESSAGE_EXPIRY, 1))
    publisher.publish(f"{name}/kept", b"kept", 1, retain=True)
    let_pass(2.1)
    subscriber.subscribe(name + "/#", 1, properties=prop(SUBSCRIPTION_ID, 1))
    assert [b"kept"] == payloads(receive_until(subscriber, b"kept"))
    subscriber.expect_nothing()
