"""Section 3.3, PUBLISH: flags, topic names, retained messages, answers and overlapping subscriptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.support.clauses import clause
from tests.support.flows import (
    MALFORMED_PACKET,
    PROTOCOL_ERROR,
    SUBSCRIPTION_ID,
    TOPIC_NAME_INVALID,
    both_versions,
    every_qos,
    every_version,
    expect_refused,
    lasting,
    payloads,
    qos_1_and_2,
    receive_until,
)
from tests.support.wire import (
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    Client,
    Closed,
    ack_packet,
    packet,
    prop,
    publish_packet,
)

Connect = Callable[..., Client]

#: Subscription options of MQTT 5.
RETAIN_AS_PUBLISHED = 0x08
IF_NEW = 0x10
NEVER = 0x20


# --- DUP ----------------------------------------------------------------------------------------------------------


@every_version
@qos_1_and_2
@clause(v3="MQTT-3.3.1-1", v5="MQTT-3.3.1-1")
def test_a_repeated_publish_carries_dup(connect: Connect, name: str, version: int, qos: int) -> None:
    """What was sent before the connection broke is sent again with DUP 1. [MQTT-3.3.1-1]"""
    subscriber = connect(f"{name}-s", **lasting(version))
    subscriber.subscribe(name, qos)
    connect(version=version).publish(name, b"once", qos)
    assert not subscriber.expect(PUBLISH).dup
    subscriber.close()
    again = connect(f"{name}-s", **lasting(version)).expect(PUBLISH)
    assert (b"once", True) == (again.payload, again.dup)


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
@clause(v3="MQTT-3.3.1-2", v5="MQTT-3.3.1-2")
def test_dup_on_an_incoming_qos_0_message_goes_no_further(connect: Connect, name: str, version: int) -> None:
    """A QoS 0 message that arrives with DUP 1 is refused or sent on with DUP 0, never as it came. [MQTT-3.3.1-2]"""
    subscriber, good = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 0)
    bad = connect(version=version)
    bad.send(publish_packet(name, b"odd", version=version, dup=True) + b"\xc0\x00")
    with contextlib.suppress(Closed):
        bad.recv()  # PINGRESP, DISCONNECT or the end: the message has been looked at
    good.publish(name, b"end")
    assert not any(message.dup for message in receive_until(subscriber, b"end"))


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


# --- QoS ----------------------------------------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-3.3.1-4", v5="MQTT-3.3.1-4")
def test_qos_3_closes_the_connection(connect: Connect, name: str, version: int) -> None:
    """A PUBLISH with both QoS bits set is malformed and reaches nobody. [MQTT-3.3.1-4]"""
    subscriber, good, bad = connect(version=version), connect(version=version), connect(version=version)
    subscriber.subscribe(name, 2)
    bad.send(publish_packet(name, b"qos 3", version=version, qos=3, packet_id=1))
    expect_refused(bad, MALFORMED_PACKET)
    good.publish(name, b"end", 2)
    assert [b"end"] == payloads(receive_until(subscriber, b"end"))


# --- RETAIN -------------------------------------------------------------------------------------------------------


def retained(connect: Connect, topic: str, version: int, options: int = 2) -> list[tuple[bytes, int, bool]]:
    """What a new subscriber of the topic gets: payload, QoS and RETAIN of each message."""
    # A retained message behind the ones in question tells when they have come, or that there are none.
    connect(version=version).publish(f"{topic}/end", b"end", 1, retain=True)
    subscriber = connect(version=version)
    subscriber.subscribe([(topic, options), (f"{topic}/end", 0)])
    messages = receive_until(subscriber, b"end")[:-1]
    subscriber.expect_nothing()
    return [(message.payload, message.qos, message.retain) for message in messages]


@every_version
@every_qos
@clause(v3=("MQTT-3.3.1-5", "MQTT-3.3.1-6", "MQTT-3.3.1-8"), v5=("MQTT-3.3.1-5", "MQTT-3.3.1-9"))
def test_a_retained_message_waits_for_subscribers(connect: Connect, name: str, version: int, qos: int) -> None:
    """A retained message is stored with its QoS; a new subscription gets it with RETAIN 1. [MQTT-3.3.1-5]"""
    publisher = connect(version=version)
    publisher.publish(name, b"kept", qos, retain=True)
    publisher.expect_nothing()
    assert [(b"kept", qos, True)] == retained(connect, name, version)


@every_version
@clause(v3=("MQTT-3.3.1-5", "MQTT-3.3.1-6"), v5=("MQTT-3.3.1-5", "MQTT-3.3.1-9"))
def test_each_matching_topic_gives_its_last_retained_message(connect: Connect, name: str, version: int) -> None:
    """A new retained message replaces the old one of its topic; a wildcard gets one for each topic. [MQTT-3.3.1-6]"""
    publisher = connect(version=version)
    for topic, payload in (("a", b"old a"), ("b", b"new b"), ("a", b"new a")):
        publisher.publish(f"{name}/{topic}", payload, 1, retain=True)
    subscriber = connect(version=version)
    subscriber.subscribe(f"{name}/+", 1)
    found = [subscriber.receive() for _ in range(2)]
    assert {(f"{name}/a", b"new a", True), (f"{name}/b", b"new b", True)} == {
        (message.topic, message.payload, message.retain) for message in found
    }
    subscriber.expect_nothing()


@every_version
@clause(v3="MQTT-3.3.1-7", v5="MQTT-3.3.1-5")
def test_a_retained_qos_0_message_replaces_the_retained_one(connect: Connect, name: str, version: int) -> None:
    """A retained QoS 0 message ends the one retained before; this broker stores the new one. [MQTT-3.3.1-7]"""
    publisher = connect(version=version)
    publisher.publish(name, b"old", 1, retain=True)
    publisher.publish(name, b"new", 0, retain=True)
    publisher.expect_nothing()
    assert [(b"new", 0, True)] == retained(connect, name, version)


@every_version
@every_qos
@clause(v3="MQTT-3.3.1-9", v5="MQTT-3.3.1-12")
def test_an_established_subscription_sees_retain_0(connect: Connect, name: str, version: int, qos: int) -> None:
    """A retained message that matches a standing subscription is forwarded with RETAIN 0. [MQTT-3.3.1-9]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    connect(version=version).publish(name, b"live", qos, retain=True)
    message = subscriber.receive()
    assert (b"live", False) == (message.payload, message.retain)


@every_qos
@pytest.mark.parametrize("retain", [False, True], ids=["plain", "retained"])
@clause(v5="MQTT-3.3.1-13")
def test_retain_as_published_keeps_the_flag(connect: Connect, name: str, qos: int, retain: bool) -> None:
    """With Retain As Published the RETAIN flag of the publisher arrives. [MQTT-3.3.1-13]"""
    subscriber = connect()
    subscriber.subscribe(name, 2 | RETAIN_AS_PUBLISHED)
    connect().publish(name, b"live", qos, retain=retain)
    assert retain == subscriber.receive().retain


@every_version
@every_qos
@clause(v3=("MQTT-3.3.1-10", "MQTT-3.3.1-11"), v5=("MQTT-3.3.1-6", "MQTT-3.3.1-7"))
def test_an_empty_retained_message_removes_the_retained_one(
    connect: Connect, name: str, version: int, qos: int
) -> None:
    """It is delivered like any other, removes what was retained and is not retained itself. [MQTT-3.3.1-10]"""
    publisher, standing = connect(version=version), connect(version=version)
    publisher.publish(name, b"kept", 1, retain=True)
    standing.subscribe(name, 2)
    assert b"kept" == standing.receive().payload
    publisher.publish(name, b"", qos, retain=True)
    message = standing.receive()
    assert (b"", qos, False) == (message.payload, message.qos, message.retain)
    assert [] == retained(connect, name, version)


@every_version
@clause(v3="MQTT-3.3.1-12", v5="MQTT-3.3.1-8")
def test_retain_0_leaves_the_retained_message_alone(connect: Connect, name: str, version: int) -> None:
    """A message with RETAIN 0, empty or not, neither stores, replaces nor removes a retained one. [MQTT-3.3.1-12]"""
    publisher = connect(version=version)
    publisher.publish(f"{name}/none", b"plain", 1)
    publisher.publish(f"{name}/some", b"kept", 1, retain=True)
    publisher.publish(f"{name}/some", b"plain", 1)
    publisher.publish(f"{name}/some", b"", 1)
    assert [] == retained(connect, f"{name}/none", version)
    assert [(b"kept", 1, True)] == retained(connect, f"{name}/some", version)


@clause(v5="MQTT-3.3.1-9")
def test_retain_handling_0_sends_again_at_each_subscribe(connect: Connect, name: str) -> None:
    """With Retain Handling 0 a repeated SUBSCRIBE gets the retained messages again. [MQTT-3.3.1-9]"""
    connect().publish(name, b"kept", 1, retain=True)
    subscriber = connect()
    for _ in range(2):
        subscriber.subscribe(name, 1)
        message = subscriber.receive()
        assert (b"kept", True) == (message.payload, message.retain)


@clause(v5="MQTT-3.3.1-10")
def test_retain_handling_1_sends_only_to_new_subscriptions(connect: Connect, name: str) -> None:
    """With Retain Handling 1 only a subscription that did not exist gets retained messages. [MQTT-3.3.1-10]"""
    publisher, subscriber = connect(), connect()
    publisher.publish(name, b"kept", 1, retain=True)
    subscriber.subscribe(name, 1 | IF_NEW)
    assert b"kept" == subscriber.receive().payload
    subscriber.subscribe(name, 1 | IF_NEW)
    publisher.publish(name, b"live", 1)
    assert [b"live"] == payloads(receive_until(subscriber, b"live"))
    subscriber.unsubscribe(name)
    subscriber.subscribe(name, 1 | IF_NEW)
    assert b"kept" == subscriber.receive().payload


@clause(v5="MQTT-3.3.1-11")
def test_retain_handling_2_sends_nothing(connect: Connect, name: str) -> None:
    """With Retain Handling 2 a SUBSCRIBE gets no retained messages. [MQTT-3.3.1-11]"""
    publisher, subscriber = connect(), connect()
    publisher.publish(name, b"kept", 1, retain=True)
    subscriber.subscribe(name, 1 | NEVER)
    subscriber.expect_nothing()
    publisher.publish(name, b"live", 1)
    assert [b"live"] == payloads(receive_until(subscriber, b"live"))


# --- topic names --------------------------------------------------------------------------------------------------


@every_version
@pytest.mark.parametrize(
    "topic",
    [b"\xff\xfe", b"a/\xc3", b"a/\xed\xa0\x80", b"a/\xc0\xaf", b"a/\xf5\x80\x80\x80", b"a/\x00"],
    ids=["not-utf8", "cut", "surrogate", "overlong", "beyond-unicode", "null"],
)
@clause(v3="MQTT-3.3.2-1", v5="MQTT-3.3.2-1")
def test_a_topic_name_is_utf8(connect: Connect, version: int, topic: bytes) -> None:
    """A topic name that is no legal UTF-8 string closes the connection. [MQTT-3.3.2-1]"""
    bad = connect(version=version)
    bad.send(publish_packet(topic, b"x", version=version))
    expect_refused(bad, MALFORMED_PACKET, TOPIC_NAME_INVALID)


@every_version
@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x05abc"], ids=["nothing", "half-a-length", "cut"])
@clause(v3="MQTT-3.3.2-1", v5="MQTT-3.3.2-1")
def test_a_topic_name_comes_first(connect: Connect, version: int, body: bytes) -> None:
    """A PUBLISH that ends before its topic name does is malformed. [MQTT-3.3.2-1]"""
    bad = connect(version=version)
    bad.send(packet(0x30, body))
    expect_refused(bad, MALFORMED_PACKET)


@every_version
@every_qos
@pytest.mark.parametrize("tail", ["#", "+", "a/#", "+/a", "a+", "#a"])
@clause(v3="MQTT-3.3.2-2", v5="MQTT-3.3.2-2")
def test_a_topic_name_has_no_wildcards(connect: Connect, name: str, version: int, qos: int, tail: str) -> None:
    """A PUBLISH to a topic with a wildcard character closes the connection. [MQTT-3.3.2-2]"""
    bad = connect(version=version)
    bad.send(publish_packet(f"{name}/{tail}", b"x", version=version, qos=qos))
    expect_refused(bad, MALFORMED_PACKET, PROTOCOL_ERROR, TOPIC_NAME_INVALID)


@every_version
@clause(v3="MQTT-3.3.2-1", v5="MQTT-3.3.2-1")
def test_an_empty_topic_name_is_refused(connect: Connect, version: int) -> None:
    """Without a topic alias an empty topic name is a protocol error. [MQTT-3.3.2-1]"""
    bad = connect(version=version)
    bad.send(publish_packet("", b"x", version=version))
    expect_refused(bad, PROTOCOL_ERROR)


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


# --- answers ------------------------------------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-3.3.4-1", v5="MQTT-3.3.4-1")
def test_the_answer_follows_from_the_qos(connect: Connect, name: str, version: int) -> None:
    """QoS 0 gets no answer, QoS 1 a PUBACK, QoS 2 a PUBREC, each with the packet id. [MQTT-3.3.4-1]"""
    publisher = connect(version=version)
    publisher.send(publish_packet(name, version=version))
    publisher.expect_nothing()
    publisher.send(publish_packet(name, version=version, qos=1, packet_id=7))
    assert 7 == publisher.expect(PUBACK).packet_id
    publisher.send(publish_packet(name, version=version, qos=2, packet_id=65535))
    assert 65535 == publisher.expect(PUBREC).packet_id
    publisher.send(ack_packet(PUBREL, 65535, version=version))
    assert 65535 == publisher.expect(PUBCOMP).packet_id


@every_version
@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 300_000])
@clause(v3="MQTT-3.3.4-1", v5="MQTT-3.3.4-1")
def test_payloads_of_all_sizes_arrive_whole(connect: Connect, name: str, version: int, size: int) -> None:
    """A payload arrives byte for byte, with none at all, and across each width of the length. [MQTT-3.3.4-1]"""
    payload = bytes(index * 31 % 256 for index in range(size))
    subscriber = connect(version=version)
    subscriber.subscribe(name, 1)
    connect(version=version).publish(name, payload, 1)
    assert payload == subscriber.receive().payload


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


@clause(v5="MQTT-3.3.4-3")
def test_a_retained_message_carries_the_identifier_of_its_subscription(connect: Connect, name: str) -> None:
    """A message sent because of a SUBSCRIBE carries the identifier given there. [MQTT-3.3.4-3]"""
    connect().publish(name, b"kept", 1, retain=True)
    subscriber = connect()
    subscriber.subscribe(name, 1, properties=prop(SUBSCRIPTION_ID, 5))
    assert [5] == subscriber.receive().prop_all(SUBSCRIPTION_ID)


@clause(v5="MQTT-3.3.4-6")
def test_a_client_may_not_send_a_subscription_identifier(connect: Connect, name: str) -> None:
    """A PUBLISH with a Subscription Identifier from a client is a protocol error. [MQTT-3.3.4-6]"""
    bad = connect()
    bad.send(publish_packet(name, b"x", properties=prop(SUBSCRIPTION_ID, 1)))
    expect_refused(bad, PROTOCOL_ERROR, MALFORMED_PACKET)


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
