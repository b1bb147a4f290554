"""Section 4.9, flow control: the Receive Maximum of the client and that of the broker.

The limits of the broker itself (window of 32, 100 unreleased QoS 2 messages) hold for all protocol versions and are
tested here too.
"""

from __future__ import annotations

from tests.support import wire
from tests.support.cases import each, every_version, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import (
    RECEIVE_MAXIMUM,
    RECEIVE_MAXIMUM_EXCEEDED,
    acknowledge,
    hold_unreleased,
    lasting,
    numbered,
    payloads,
    publish_many,
    receive_until,
)
from tests.support.refusals import refused

#: Messages that the broker has in flight to one client at most.
WINDOW = 32
#: Unreleased QoS 2 messages that the broker holds for one client at most.
AWAITING_RELEASE = 100


# --- towards the client -------------------------------------------------------------------------------------------


@qos_1_and_2
@each(most=(1, 2, 10))
@clause(v5=("MQTT-3.3.4-9", "MQTT-4.9.0-1", "MQTT-4.9.0-2"))
def test_the_receive_maximum_of_the_client_is_kept(connect: wire.Connect, name: str, qos: int, most: int) -> None:
    """No more messages are in flight than the client allows; each finished one lets one more out. [MQTT-3.3.4-9]"""
    subscriber = connect(properties=wire.prop(RECEIVE_MAXIMUM, most))
    subscriber.subscribe(name, qos)
    publish_many(connect(), name, numbered(most + 5), qos)
    held = [subscriber.expect(wire.PUBLISH) for _ in range(most)]
    subscriber.expect_nothing()
    seen = list(held)
    for _ in range(5):
        message = held.pop(0)
        acknowledge(subscriber, message)
        if qos == 2:
            assert message.packet_id == subscriber.expect(wire.PUBREL).packet_id
            subscriber.expect_nothing()  # PUBREC alone gives nothing back
            subscriber.send(wire.ack_packet(wire.PUBCOMP, message.packet_id or 0))
        held.append(subscriber.expect(wire.PUBLISH))
        seen.append(held[-1])
        subscriber.expect_nothing()
    assert numbered(most + 5) == payloads(seen)


@clause(v5="MQTT-4.9.0-2")
def test_qos_1_and_2_share_the_receive_maximum(connect: wire.Connect, name: str) -> None:
    """Messages of both QoS together stay within the Receive Maximum. [MQTT-4.9.0-2]"""
    subscriber, publisher = connect(properties=wire.prop(RECEIVE_MAXIMUM, 2)), connect()
    subscriber.subscribe(name, 2)
    for qos in (1, 2, 1, 2):
        publisher.publish(name, b"x", qos)
    assert [1, 2] == [subscriber.expect(wire.PUBLISH).qos for _ in range(2)]
    subscriber.expect_nothing()


@qos_1_and_2
@clause(v5=("MQTT-3.3.4-9", "MQTT-4.9.0-2"))
def test_retained_messages_stay_within_the_receive_maximum(connect: wire.Connect, name: str, qos: int) -> None:
    """What a SUBSCRIBE brings up is counted like live messages, and comes completely. [MQTT-3.3.4-9]"""
    publisher, subscriber = connect(), connect(properties=wire.prop(RECEIVE_MAXIMUM, 2))
    for payload in numbered(10):
        publisher.publish(f"{name}/{payload.decode()}", payload, qos, retain=True)
    subscriber.subscribe(f"{name}/+", qos)
    seen: list[bytes] = []
    for _ in range(5):
        held = [subscriber.expect(wire.PUBLISH) for _ in range(2)]
        subscriber.expect_nothing()
        seen += payloads(held)
        for message in held:
            acknowledge(subscriber, message)
        if qos == 2:
            for message in held:
                assert message.packet_id == subscriber.expect(wire.PUBREL).packet_id
            subscriber.send(b"".join(wire.ack_packet(wire.PUBCOMP, message.packet_id or 0) for message in held))
    subscriber.expect_nothing()
    assert numbered(10) == sorted(seen)


@clause(v5="MQTT-4.9.0-2")
def test_qos_0_does_not_use_the_receive_maximum(connect: wire.Connect, name: str) -> None:
    """QoS 0 messages take no place: many of them go out to a client that allows one. [MQTT-4.9.0-2]"""
    subscriber = connect(properties=wire.prop(RECEIVE_MAXIMUM, 1))
    subscriber.subscribe(name, 2)
    publish_many(connect(), name, [*numbered(20), b"end"], 0)
    assert [*numbered(20), b"end"] == payloads(receive_until(subscriber, b"end"))


@clause(v5=("MQTT-3.3.4-10", "MQTT-4.9.0-3"))
def test_other_packets_go_on_at_the_receive_maximum(connect: wire.Connect, name: str) -> None:
    """With no place left the client is still answered: PINGREQ, SUBSCRIBE, PUBLISH, UNSUBSCRIBE. [MQTT-3.3.4-10]"""
    client = connect(properties=wire.prop(RECEIVE_MAXIMUM, 1))
    client.subscribe(name, 2)
    publish_many(connect(), name, numbered(3), 2)
    message = client.expect(wire.PUBLISH)
    client.expect_nothing()
    client.send(wire.subscribe_packet(11, [(f"{name}/x", 1)]))
    assert 11 == client.expect(wire.SUBACK).packet_id
    client.send(wire.publish_packet(f"{name}/y", qos=1, packet_id=12))
    assert 12 == client.expect(wire.PUBACK).packet_id
    client.send(wire.publish_packet(f"{name}/y", qos=2, packet_id=13))
    assert 13 == client.expect(wire.PUBREC).packet_id
    client.send(wire.ack_packet(wire.PUBREL, 13))
    assert 13 == client.expect(wire.PUBCOMP).packet_id
    client.send(wire.unsubscribe_packet(14, [f"{name}/x"]))
    assert 14 == client.expect(wire.UNSUBACK).packet_id
    acknowledge(client, message)
    assert message.packet_id == client.expect(wire.PUBREL).packet_id


@every_version
@qos_1_and_2
def test_the_window_of_the_broker_holds_without_a_receive_maximum(
    connect: wire.Connect, name: str, version: int, qos: int
) -> None:
    """To a client that sets no limit 32 messages are in flight at most: a default of this broker."""
    subscriber = connect(version=version)
    subscriber.subscribe(name, qos)
    publish_many(connect(version=version), name, numbered(WINDOW + 8), qos)
    held = [subscriber.expect(wire.PUBLISH) for _ in range(WINDOW)]
    subscriber.expect_nothing()
    assert numbered(WINDOW) == payloads(held)


@clause(v5="MQTT-4.9.0-1")
def test_a_receive_maximum_above_the_window_is_no_promise(connect: wire.Connect, name: str) -> None:
    """The client's maximum is an upper bound; the broker stays at its own window of 32 below it. [MQTT-4.9.0-1]"""
    subscriber = connect(properties=wire.prop(RECEIVE_MAXIMUM, 65535))
    subscriber.subscribe(name, 1)
    publish_many(connect(), name, numbered(WINDOW + 8), 1)
    for _ in range(WINDOW):
        subscriber.expect(wire.PUBLISH)
    subscriber.expect_nothing()


@clause(v5="MQTT-4.9.0-1")
def test_the_quota_begins_anew_with_each_connection(connect: wire.Connect, name: str) -> None:
    """The Receive Maximum belongs to the connection: a larger one on the next counts at once. [MQTT-4.9.0-1]"""
    subscriber = connect(f"{name}-s", **lasting(5, wire.prop(RECEIVE_MAXIMUM, 1)))
    subscriber.subscribe(name, 1)
    publish_many(connect(), name, numbered(6), 1)
    subscriber.expect(wire.PUBLISH)
    subscriber.expect_nothing()
    subscriber.close()
    again = connect(f"{name}-s", **lasting(5, wire.prop(RECEIVE_MAXIMUM, 4)))
    assert numbered(4) == [again.expect(wire.PUBLISH).payload for _ in range(4)]
    again.expect_nothing()


# --- towards the broker -------------------------------------------------------------------------------------------


@clause(v5=("MQTT-3.3.4-7", "MQTT-4.9.0-3"))
def test_the_broker_takes_as_many_as_it_announced(connect: wire.Connect, name: str) -> None:
    """Up to its own Receive Maximum the broker accepts unreleased messages; one more is refused. [MQTT-3.3.4-7]"""
    client = connect()
    assert client.connack is not None
    most = client.connack.prop(RECEIVE_MAXIMUM)
    assert AWAITING_RELEASE == most
    hold_unreleased(client, name, most)
    client.expect_nothing()
    client.send(wire.publish_packet(name, b"too many", qos=2, packet_id=most + 1))
    refused(client, RECEIVE_MAXIMUM_EXCEEDED)


@each(version=(3, 4))
def test_unreleased_messages_of_older_clients_are_bounded(connect: wire.Connect, name: str, version: int) -> None:
    """A client that cannot be told the limit is disconnected at the same one: a decision of this broker."""
    client = connect(version=version)
    hold_unreleased(client, name, AWAITING_RELEASE)
    client.expect_nothing()
    client.send(wire.publish_packet(name, b"too many", version=version, qos=2, packet_id=AWAITING_RELEASE + 1))
    refused(client)


@every_version
@clause(v5="MQTT-4.9.0-3")
def test_a_released_message_makes_room(connect: wire.Connect, name: str, version: int) -> None:
    """At the limit repetitions are answered, and each PUBREL lets one more message in. [MQTT-4.9.0-3]"""
    client = connect(version=version)
    hold_unreleased(client, name, AWAITING_RELEASE)
    client.send(wire.publish_packet(name, b"held", version=version, qos=2, packet_id=1, dup=True))
    assert 1 == client.expect(wire.PUBREC).packet_id
    for number in range(1, 6):
        client.send(wire.ack_packet(wire.PUBREL, number, version=version))
        assert number == client.expect(wire.PUBCOMP).packet_id
        client.send(wire.publish_packet(name, b"new", version=version, qos=2, packet_id=1000 + number))
        assert 1000 + number == client.expect(wire.PUBREC).packet_id
    client.expect_nothing()


@each(version=(4, 5))
def test_coming_back_gives_no_new_allowance(connect: wire.Connect, name: str, version: int) -> None:
    """What is unreleased belongs to the session: it counts on the next connection too (4.1)."""
    hold_unreleased(connect(f"{name}-p", **lasting(version)), name, AWAITING_RELEASE)
    again = connect(f"{name}-p", **lasting(version))
    again.send(wire.publish_packet(name, b"too many", version=version, qos=2, packet_id=AWAITING_RELEASE + 1))
    refused(again, RECEIVE_MAXIMUM_EXCEEDED)


@every_version
@clause(v5="MQTT-4.9.0-3")
def test_qos_0_and_1_go_on_at_the_limit(connect: wire.Connect, name: str, version: int) -> None:
    """In 3.x nothing but QoS 2 counts; in MQTT 5 QoS 0 does not count. The broker goes on answering. [MQTT-4.9.0-3]"""
    subscriber, client = connect(version=version), connect(version=version)
    subscriber.subscribe(f"{name}/other", 1)
    hold_unreleased(client, name, AWAITING_RELEASE)
    client.publish(f"{name}/other", b"qos 0")
    assert b"qos 0" == subscriber.receive().payload
    if version < 5:
        client.publish(f"{name}/other", b"qos 1", 1)
        assert b"qos 1" == subscriber.receive().payload
    assert client.subscribe(f"{name}/more", 1).reasons == [1]


@clause(v5="MQTT-3.3.4-7")
def test_answered_messages_do_not_count(connect: wire.Connect, name: str) -> None:
    """QoS 1 messages that were answered, and finished QoS 2 messages, are no burden on the limit. [MQTT-3.3.4-7]"""
    client = connect()
    publish_many(client, name, numbered(3 * AWAITING_RELEASE), 1)
    publish_many(client, name, numbered(3 * AWAITING_RELEASE), 2)
    client.expect_nothing()
