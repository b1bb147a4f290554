"""Section 3.3.2.3, the properties of a PUBLISH other than the topic alias, and 4.10, request and response."""

from __future__ import annotations

from typing import Any

from tests.support.cases import both_versions, each, every_qos
from tests.support.clauses import clause
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    RESPONSE_TOPIC,
    USER_PROPERTY,
    lasting,
    payloads,
    receive_until,
)
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import Connect, Packet, prop

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


@each(value=(0, 1))
@clause(v5="MQTT-3.3.2-4")
def test_the_payload_format_indicator_arrives(connect: Connect, name: str, value: int) -> None:
    """Payload Format Indicator 1 arrives as 1; 0 arrives as 0 or, meaning the same, not at all. [MQTT-3.3.2-4]"""
    found = of(forwarded(connect, name, prop(PAYLOAD_FORMAT, value)), PAYLOAD_FORMAT)
    assert found == [value] or (value == 0 and not found)


@each(value=("a", "answers/to Ä/here", "/", "$SYS/x", "long/" + "x" * 1000))
@clause(v5=("MQTT-3.3.2-13", "MQTT-3.3.2-15"))
def test_the_response_topic_arrives(connect: Connect, name: str, value: str) -> None:
    """The Response Topic arrives unaltered. [MQTT-3.3.2-15]"""
    assert [value] == of(forwarded(connect, name, prop(RESPONSE_TOPIC, value)), RESPONSE_TOPIC)


@each(value=(b"", b"\x00", bytes(range(256)), b"\xff" * 5000))
@clause(v5="MQTT-3.3.2-16")
def test_the_correlation_data_arrive(connect: Connect, name: str, value: bytes) -> None:
    """The Correlation Data, which are bytes and not text, arrive unaltered. [MQTT-3.3.2-16]"""
    assert [value] == of(forwarded(connect, name, prop(CORRELATION_DATA, value)), CORRELATION_DATA)


@each(value=("", "application/json", "Ä😀"))
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


@each(version=(3, 4))
@clause(v5="MQTT-3.3.2-17")
def test_an_older_subscriber_gets_the_payload_alone(connect: Connect, name: str, version: int) -> None:
    """To a client that knows no properties the payload is sent without them. [MQTT-3.3.2-17]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 1)
    connect().publish(name, b"text", 1, properties=ENCODED + prop(MESSAGE_EXPIRY, 100))
    assert b"text" == subscriber.receive().payload


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
def test_the_time_in_the_queue_or_as_a_retained_message_is_subtracted(virtual: VirtualBroker) -> None:
    """A message for an absent client, and a retained one, arrive with the interval that is left. [MQTT-3.3.2-6]"""
    subscriber = virtual.connect("away", **lasting(5))
    subscriber.subscribe("t", 1)
    subscriber.disconnect()
    publisher = virtual.connect(keepalive=0)
    for topic, retain in (("t", False), ("kept", True)):
        publisher.publish(topic, b"x", 1, retain=retain, properties=prop(MESSAGE_EXPIRY, 1000))
    virtual.let_pass(400)
    back = virtual.connect("away", **lasting(5))
    assert 600 == back.receive().prop(MESSAGE_EXPIRY)
    back.subscribe("kept", 1)
    assert 600 == back.receive().prop(MESSAGE_EXPIRY)


@clause(v5="MQTT-3.3.2-5")
@every_qos
def test_an_expired_message_leaves_the_queue(virtual: VirtualBroker, qos: int) -> None:
    """What expired while the client was away is not sent; what did not expire is. [MQTT-3.3.2-5]"""
    subscriber, publisher = virtual.connect("away", **lasting(5)), virtual.connect(keepalive=0)
    subscriber.subscribe("t", 2)
    subscriber.disconnect()
    publisher.publish("t", b"short", qos, properties=prop(MESSAGE_EXPIRY, 10))
    publisher.publish("t", b"end", 1, properties=prop(MESSAGE_EXPIRY, 1000))
    publisher.publish("t", b"short", qos, properties=prop(MESSAGE_EXPIRY, 10))
    virtual.let_pass(11)
    subscriber = virtual.connect("away", **lasting(5))
    assert [b"end"] == payloads(receive_until(subscriber, b"end"))
    publisher.publish("t", b"later", 1)
    assert [b"later"] == payloads(receive_until(subscriber, b"later"))


@clause(v5="MQTT-3.3.2-5")
def test_an_expired_message_leaves_the_queue_of_a_slow_client(virtual: VirtualBroker) -> None:
    """What expired while the window of a connected client was full is not sent. [MQTT-3.3.2-5]"""
    subscriber, publisher = virtual.connect(keepalive=0, properties=prop(0x21, 1)), virtual.connect()
    subscriber.subscribe("t", 1)
    publisher.publish("t", b"first", 1)
    publisher.publish("t", b"short", 1, properties=prop(MESSAGE_EXPIRY, 10))
    publisher.publish("t", b"end", 1)
    virtual.let_pass(11)
    assert [b"first", b"end"] == payloads(receive_until(subscriber, b"end"))


@clause(v5="MQTT-3.3.2-5")
@both_versions
def test_an_expired_retained_message_is_gone(virtual: VirtualBroker, version: int) -> None:
    """A retained message whose interval has passed is not sent to new subscribers. [MQTT-3.3.2-5]"""
    publisher, subscriber = virtual.connect(), virtual.connect(version=version, keepalive=0)
    publisher.publish("t", b"short", 1, retain=True, properties=prop(MESSAGE_EXPIRY, 10))
    publisher.publish("t/kept", b"kept", 1, retain=True)
    virtual.let_pass(11)
    subscriber.subscribe("t/#", 1)
    assert [b"kept"] == payloads(receive_until(subscriber, b"kept"))
    subscriber.expect_nothing()


# --- request and response (4.10) ----------------------------------------------------------------------------------


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


@clause(v5="MQTT-3.1.2-28")
def test_response_information_comes_only_on_request(connect: Connect) -> None:
    """Without the wish for it, or with the wish 0, a CONNACK has no response information [MQTT-3.1.2-28]."""
    for properties in (b"", prop(0x19, 0)):
        client = connect(properties=properties)
        assert client.connack is not None
        assert client.connack.prop(0x1A) is None
