"""Section 4.6, message ordering."""

from __future__ import annotations

from tests.support.cases import both_versions, each, every_qos, every_version
from tests.support.clauses import clause
from tests.support.flows import RECEIVE_MAXIMUM, acknowledge, numbered, payloads, publish_many, receive_until
from tests.support.wire import PUBACK, PUBCOMP, PUBLISH, PUBREC, PUBREL, Connect, ack_packet, prop, publish_packet


@every_version
@every_qos
@clause(v3=("MQTT-4.6.0-5", "MQTT-4.6.0-6"), v5=("MQTT-4.6.0-5", "MQTT-4.6.0-6"))
def test_messages_arrive_in_the_order_of_publishing(connect: Connect, name: str, version: int, qos: int) -> None:
    """Messages of one client on one topic reach every subscriber in order, far beyond its window. [MQTT-4.6.0-5]"""
    subscribers = [connect(version=version) for _ in range(2)]
    subscribers[0].subscribe(name, qos)
    subscribers[1].subscribe(f"{name}/#", qos)
    publish_many(connect(version=version), name, [*numbered(300), b"end"], qos)
    for subscriber in subscribers:
        assert [*numbered(300), b"end"] == payloads(receive_until(subscriber, b"end"))


@every_qos
@each(most=(1, 2, 7))
@clause(v5=("MQTT-4.6.0-5", "MQTT-4.6.0-6"))
def test_a_small_window_keeps_the_order(connect: Connect, name: str, qos: int, most: int) -> None:
    """Waiting for acknowledgements does not let a later message pass an earlier one. [MQTT-4.6.0-5]"""
    subscriber = connect(properties=prop(RECEIVE_MAXIMUM, most))
    subscriber.subscribe(name, qos)
    publish_many(connect(), name, [*numbered(50), b"end"], qos)
    assert [*numbered(50), b"end"] == payloads(receive_until(subscriber, b"end"))


@both_versions
@clause(v3="MQTT-4.6.0-6", v5="MQTT-4.6.0-5")
def test_acknowledgements_out_of_order_keep_the_order(connect: Connect, name: str, version: int) -> None:
    """A subscriber that acknowledges backwards still gets all messages in order. [MQTT-4.6.0-5]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 1)
    publish_many(connect(version=version), name, numbered(96), 1)
    seen: list[bytes] = []
    for _ in range(12):
        held = [subscriber.expect(PUBLISH) for _ in range(8)]
        seen += payloads(held)
        for message in reversed(held):
            acknowledge(subscriber, message)
    assert numbered(96) == seen
    subscriber.expect_nothing()


@every_version
@clause(v3="MQTT-4.6.0-6", v5="MQTT-4.6.0-5")
def test_messages_of_several_qos_keep_the_order_of_each(connect: Connect, name: str, version: int) -> None:
    """With QoS 0, 1 and 2 mixed, the messages of each QoS arrive in order. [MQTT-4.6.0-5]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 2)
    for number, payload in enumerate(numbered(60)):
        publisher.publish(name, payload, number % 3)
    publisher.publish(name, b"end", 2)
    messages = receive_until(subscriber, b"end")[:-1]
    for qos in range(3):
        assert numbered(60)[qos::3] == [message.payload for message in messages if message.qos == qos]


@every_version
@clause(v3=("MQTT-4.6.0-2", "MQTT-4.6.0-3"))
def test_the_publisher_is_answered_in_order(connect: Connect, name: str, version: int) -> None:
    """PUBACK and PUBREC come in the order of the messages they answer. [MQTT-4.6.0-2]"""
    publisher = connect(version=version)
    numbers = [9, 3, 7, 1, 65535, 256, 2]
    for qos, kind in ((1, PUBACK), (2, PUBREC)):
        publisher.send(b"".join(publish_packet(name, version=version, qos=qos, packet_id=n) for n in numbers))
        assert numbers == [publisher.expect(kind).packet_id for _ in numbers]


@every_version
@clause(v3=("MQTT-4.6.0-4", "MQTT-4.6.0-6"))
def test_pubrel_follows_the_order_of_pubrec(connect: Connect, name: str, version: int) -> None:
    """The broker releases messages in the order in which PUBREC came, not in which they were sent. [MQTT-4.6.0-4]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    publish_many(connect(version=version), name, numbered(5), 2)
    held = [subscriber.expect(PUBLISH) for _ in range(5)]
    order = [held[index] for index in (3, 0, 4, 1, 2)]
    for message in order:
        acknowledge(subscriber, message)
    assert [message.packet_id for message in order] == [subscriber.expect(PUBREL).packet_id for _ in order]
    subscriber.send(b"".join(ack_packet(PUBCOMP, message.packet_id or 0, version=version) for message in order))
    subscriber.expect_nothing()
