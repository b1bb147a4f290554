"""Section 3.3, PUBLISH: flags, topic names, retained messages, answers and overlapping subscriptions."""

from __future__ import annotations

from tests.support.cases import both_versions, every_qos, every_version, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import SUBSCRIPTION_ID, lasting, payloads, receive_until
from tests.support.wire import PUBLISH, Connect, prop

# --- DUP ----------------------------------------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-3.3.1-2", v5="MQTT-3.3.1-2")
def test_a_qos_0_message_never_carries_dup(connect: Connect, name: str, version: int) -> None:
    """A QoS 0 subscriber sees DUP 0 even if the publisher repeated the message with QoS 1. [MQTT-3.3.1-2]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 0)
    connect(version=version).publish(name, b"repeated", 1, dup=True)
    message = subscriber.expect(PUBLISH)
    assert (0, False) == (message.qos, message.dup)


@every_version
@qos_1_and_2
@clause(v3="MQTT-3.3.1-3", v5="MQTT-3.3.1-3")
def test_dup_is_not_copied_to_subscribers(connect: Connect, name: str, version: int, qos: int) -> None:
    """The first delivery to a subscriber has DUP 0 although the publisher set it. [MQTT-3.3.1-3]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    connect(version=version).publish(name, b"repeated by the publisher", qos, dup=True)
    message = subscriber.expect(PUBLISH)
    assert (qos, False) == (message.qos, message.dup)


# --- topic names --------------------------------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-3.3.2-3", v5="MQTT-3.3.2-3")
def test_the_topic_name_matches_the_filter(connect: Connect, name: str, version: int) -> None:
    """Subscribers get the publisher's topic name, unchanged, and only if it matches. [MQTT-3.3.2-3]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(f"{name}/+/speed", 1)
    wanted = [f"{name}/a/speed", f"{name}//speed", f"{name}/Ä €😀/speed", f"{name}/ A /speed", f"{name}/end/speed"]
    others = [f"{name}/a/Speed", f"{name}/a/b/speed", f"{name}/speed", f"/{name}/a/speed", f"{name}/a/speed/"]
    for topic in others + wanted:
        publisher.publish(topic, topic.encode(), 1)
    messages = receive_until(subscriber, wanted[-1].encode())
    assert wanted == [message.topic for message in messages]
    assert [topic.encode() for topic in wanted] == payloads(messages)


# --- overlapping subscriptions ------------------------------------------------------------------------------------


@every_version
@every_qos
@clause(v3="MQTT-3.3.5-1", v5="MQTT-3.3.4-2")
def test_overlapping_subscriptions_give_the_highest_qos(connect: Connect, name: str, version: int, qos: int) -> None:
    """A message that matches several subscriptions of a client arrives with the highest of their QoS. [MQTT-3.3.5-1]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe([(f"{name}/#", 0), (f"{name}/a", 2), (f"{name}/+", 1)])
    publisher.publish(f"{name}/a", b"one", qos)
    publisher.publish(f"{name}/a", b"end", qos)
    messages = receive_until(subscriber, b"end")
    assert qos == max(message.qos for message in messages if message.payload == b"one")


@clause(v5=("MQTT-3.3.4-3", "MQTT-3.3.4-4", "MQTT-3.3.4-5"))
def test_overlapping_subscriptions_give_all_their_identifiers(connect: Connect, name: str) -> None:
    """One copy carries all matching identifiers; of several copies each carries its own. [MQTT-3.3.4-4]"""
    subscriber, publisher = connect(), connect()
    subscriber.subscribe(f"{name}/#", 1, properties=prop(SUBSCRIPTION_ID, 1))
    subscriber.subscribe(f"{name}/a", 1, properties=prop(SUBSCRIPTION_ID, 268_435_455))
    subscriber.subscribe(f"{name}/+", 1)
    subscriber.subscribe(f"{name}/b", 1, properties=prop(SUBSCRIPTION_ID, 99))
    publisher.publish(f"{name}/a", b"one", 1)
    publisher.publish(f"{name}/a", b"end", 1)
    copies = [message for message in receive_until(subscriber, b"end") if message.payload == b"one"]
    identifiers = [sorted(message.prop_all(SUBSCRIPTION_ID)) for message in copies]
    if len(copies) == 1:
        assert [[1, 268_435_455]] == identifiers
    else:
        assert [[], [1], [268_435_455]] == sorted(identifiers)


@every_qos
@clause(v5=("MQTT-3.3.4-3", "MQTT-3.3.4-4"))
def test_messages_that_waited_have_their_identifiers(connect: Connect, name: str, qos: int) -> None:
    """What was kept for a client that was away carries the identifiers, whatever its QoS. [MQTT-3.3.4-3]"""
    subscriber = connect(name, **lasting(5))
    subscriber.subscribe(f"{name}/#", 2, properties=prop(SUBSCRIPTION_ID, 1))
    subscriber.subscribe(f"{name}/a", 2, properties=prop(SUBSCRIPTION_ID, 268_435_455))
    subscriber.disconnect()
    publisher = connect()
    publisher.publish(f"{name}/a", b"one", qos)
    publisher.publish(f"{name}/a", b"end", 1)
    copies = [message for message in receive_until(connect(name, **lasting(5)), b"end") if message.payload == b"one"]
    assert [1, 268_435_455] == sorted(found for message in copies for found in message.prop_all(SUBSCRIPTION_ID))


@both_versions
@clause(v3="MQTT-3.3.2-3", v5="MQTT-3.3.2-3")
def test_versions_share_topics(connect: Connect, name: str, version: int) -> None:
    """A message of one protocol version reaches subscribers of all of them. [MQTT-3.3.2-3]"""
    subscribers = [connect(version=other) for other in (3, 4, 5)]
    for subscriber in subscribers:
        subscriber.subscribe(name, 2)
    connect(version=version).publish(name, b"for all", 2)
    for subscriber in subscribers:
        message = subscriber.receive()
        assert (name, b"for all", 2, []) == (message.topic, message.payload, message.qos, message.properties)
