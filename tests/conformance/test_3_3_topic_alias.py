"""Section 3.3.2.3.4, topic aliases from clients and to clients."""

from __future__ import annotations

from tests.support.cases import each, every_qos
from tests.support.clauses import clause
from tests.support.flows import (
    PROTOCOL_ERROR,
    TOPIC_ALIAS,
    TOPIC_ALIAS_INVALID,
    TOPIC_ALIAS_MAXIMUM,
    lasting,
    payloads,
    publish_many,
    receive_until,
)
from tests.support.refusals import refused
from tests.support.wire import Client, Connect, Packet, prop, publish_packet


def alias(number: int) -> bytes:
    return prop(TOPIC_ALIAS, number)


def announced(client: Client) -> int:
    """The Topic Alias Maximum that the broker gave to this client."""
    assert client.connack is not None
    return client.connack.prop(TOPIC_ALIAS_MAXIMUM) or 0


def resolved(messages: list[Packet], most: int) -> list[str]:
    """The topics of messages of one connection, with their aliases looked up as a client does it."""
    known: dict[int, str] = {}
    topics = []
    for message in messages:
        number = message.prop(TOPIC_ALIAS)
        if number is not None:
            assert 1 <= number <= most, f"alias {number}"
            if message.topic:
                known[number] = message.topic
            assert number in known, f"alias {number} was never introduced on this connection"
            topics.append(known[number])
        else:
            assert message.topic, "neither a topic nor an alias"
            topics.append(message.topic)
    return topics


# --- from clients -------------------------------------------------------------------------------------------------


@every_qos
@clause(v5="MQTT-3.3.2-12")
def test_every_alias_up_to_the_maximum_is_accepted(connect: Connect, name: str, qos: int) -> None:
    """All aliases from 1 to the announced maximum stand for the topics they were given with. [MQTT-3.3.2-12]"""
    subscriber, publisher = connect(), connect()
    subscriber.subscribe(f"{name}/+", 2)
    numbers = range(1, announced(publisher) + 1)
    assert numbers, "the broker announces no topic aliases"
    for number in numbers:
        publisher.publish(f"{name}/{number}", b"full", qos, properties=alias(number))
    for number in numbers:
        publisher.publish("", b"short", qos, properties=alias(number))
    publisher.publish(f"{name}/end", b"end", qos)
    messages = receive_until(subscriber, b"end")[:-1]
    assert [f"{name}/{number}" for number in numbers] * 2 == [message.topic for message in messages]


@clause(v5="MQTT-3.3.2-12")
def test_an_alias_can_be_given_anew(connect: Connect, name: str) -> None:
    """An alias that comes with another topic stands for that one from then on. [MQTT-3.3.2-12]"""
    subscriber, publisher = connect(), connect()
    subscriber.subscribe(f"{name}/+", 1)
    for topic in (f"{name}/a", "", f"{name}/b", ""):
        publisher.publish(topic, b"x", 1, properties=alias(1))
    publisher.publish(f"{name}/end", b"end", 1)
    messages = receive_until(subscriber, b"end")
    assert [f"{name}/{topic}" for topic in ("a", "a", "b", "b", "end")] == [message.topic for message in messages]


@clause(v5=("MQTT-3.3.2-11", "MQTT-3.3.2-12"))
def test_an_alias_of_the_publisher_stays_between_it_and_the_broker(connect: Connect, name: str) -> None:
    """Subscribers that allow no aliases get full topic names; retained messages have them too. [MQTT-3.3.2-11]"""
    subscriber, publisher = connect(), connect()
    subscriber.subscribe(name, 1)
    publisher.publish(name, b"first", 1, properties=alias(3))
    publisher.publish("", b"second", 1, retain=True, properties=alias(3))
    late = connect()
    late.subscribe(name, 1)
    for message in [*receive_until(subscriber, b"second"), late.receive()]:
        assert (name, None) == (message.topic, message.prop(TOPIC_ALIAS))


@clause(v5="MQTT-3.3.2-12")
def test_each_connection_has_aliases_of_its_own(connect: Connect, name: str) -> None:
    """The same alias may stand for different topics on different connections. [MQTT-3.3.2-12]"""
    subscriber = connect()
    subscriber.subscribe(f"{name}/+", 1)
    first, second = connect(), connect()
    first.publish(f"{name}/a", b"1", 1, properties=alias(1))
    second.publish(f"{name}/b", b"2", 1, properties=alias(1))
    first.publish("", b"3", 1, properties=alias(1))
    second.publish("", b"4", 1, properties=alias(1))
    messages = receive_until(subscriber, b"4")
    assert [f"{name}/{topic}" for topic in "abab"] == [message.topic for message in messages]


@clause(v5="MQTT-3.3.2-7")
def test_aliases_end_with_the_connection(connect: Connect, name: str) -> None:
    """An alias of an earlier connection of the same session means nothing. [MQTT-3.3.2-7]"""
    subscriber = connect()
    subscriber.subscribe(name, 1)
    publisher = connect(f"{name}-p", **lasting(5))
    publisher.publish(name, b"before", 1, properties=alias(1))
    publisher.disconnect()
    again = connect(f"{name}-p", **lasting(5))
    again.send(publish_packet("", b"after", properties=alias(1)))
    refused(again, PROTOCOL_ERROR, TOPIC_ALIAS_INVALID)
    connect().publish(name, b"end", 1)
    assert [b"before", b"end"] == payloads(receive_until(subscriber, b"end"))


# --- to clients ---------------------------------------------------------------------------------------------------


@every_qos
@each(most=(1, 3, 65535))
@clause(v5=("MQTT-3.1.2-26", "MQTT-3.3.2-8", "MQTT-3.3.2-11"))
def test_aliases_to_a_client_stay_within_its_maximum(connect: Connect, name: str, qos: int, most: int) -> None:
    """No alias is 0 or above the client's maximum, and all of them can be resolved. [MQTT-3.3.2-11]"""
    subscriber, publisher = connect(properties=prop(TOPIC_ALIAS_MAXIMUM, most)), connect()
    subscriber.subscribe(f"{name}/#", 2)
    topics = [f"{name}/{index % 5}" for index in range(25)]
    for topic in topics:
        publisher.publish(topic, topic.encode(), qos)
    publisher.publish(f"{name}/end", b"end", qos)
    messages = receive_until(subscriber, b"end")[:-1]
    assert topics == resolved(messages, most)
    assert topics == [message.payload.decode() for message in messages]


@each(properties=(b"", prop(TOPIC_ALIAS_MAXIMUM, 0)))
@clause(v5=("MQTT-3.1.2-27", "MQTT-3.3.2-11"))
def test_a_client_that_allows_no_aliases_gets_none(connect: Connect, name: str, properties: bytes) -> None:
    """Without a Topic Alias Maximum, or with 0, every message carries its topic and no alias. [MQTT-3.3.2-11]"""
    subscriber, publisher = connect(properties=properties), connect()
    subscriber.subscribe(name, 1)
    publish_many(publisher, name, [b"x"] * 10 + [b"end"], 1)
    for message in receive_until(subscriber, b"end"):
        assert (name, None) == (message.topic, message.prop(TOPIC_ALIAS))


def test_the_broker_uses_the_aliases_that_a_client_allows(connect: Connect, name: str) -> None:
    """A repeated topic is sent by its alias alone: a decision of this broker, the specification only allows it."""
    subscriber, publisher = connect(properties=prop(TOPIC_ALIAS_MAXIMUM, 10)), connect()
    subscriber.subscribe(name, 1)
    publish_many(publisher, name, [b"x"] * 10 + [b"end"], 1)
    messages = receive_until(subscriber, b"end")
    assert [name] * 11 == resolved(messages, 10)
    assert any(not message.topic for message in messages)


@clause(v5="MQTT-3.3.2-7")
def test_aliases_to_a_client_are_introduced_anew_on_each_connection(connect: Connect, name: str) -> None:
    """Repeated and queued messages use no alias of the old connection. [MQTT-3.3.2-7]"""
    options = lasting(5, prop(TOPIC_ALIAS_MAXIMUM, 5))
    subscriber, publisher = connect(f"{name}-s", **options), connect()
    subscriber.subscribe(name, 1)
    publish_many(publisher, name, [b"seen"] * 5 + [b"end"], 1)
    receive_until(subscriber, b"end")
    publish_many(publisher, name, [b"repeated"] * 5, 1)
    for _ in range(5):
        subscriber.recv()
    subscriber.disconnect()
    publish_many(publisher, name, [b"queued"] * 5 + [b"end"], 1)
    messages = receive_until(connect(f"{name}-s", **options), b"end")
    assert [b"repeated"] * 5 + [b"queued"] * 5 + [b"end"] == payloads(messages)
    assert [name] * 11 == resolved(messages, 5)


@clause(v5="MQTT-3.3.2-11")
def test_a_connection_without_aliases_after_one_with_them_gets_topics(connect: Connect, name: str) -> None:
    """The maximum of the present connection counts, not that of an earlier one of the session. [MQTT-3.3.2-11]"""
    subscriber, publisher = connect(f"{name}-s", **lasting(5, prop(TOPIC_ALIAS_MAXIMUM, 5))), connect()
    subscriber.subscribe(name, 1)
    publish_many(publisher, name, [b"x"] * 5, 1)
    for _ in range(5):
        subscriber.recv()
    subscriber.disconnect()
    publish_many(publisher, name, [b"end"], 1)
    for message in receive_until(connect(f"{name}-s", **lasting(5)), b"end"):
        assert (name, None) == (message.topic, message.prop(TOPIC_ALIAS))
