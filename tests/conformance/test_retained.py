"""Retained messages as subscribers see them (3.3.1.3 and 3.8.3.1): what is kept, what a new subscription gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.cases import both_versions, each, each_row, every_qos
from tests.support.checks import RETAIN_AS_PUBLISHED, RETAIN_IF_NEW, RETAIN_NEVER, subscribe_and_take
from tests.support.clauses import clause
from tests.support.wire import Connect, Packet, prop

Keep = Callable[..., None]

MESSAGE_EXPIRY = 0x02
SUBSCRIPTION_ID = 0x0B


@pytest.fixture
def keep(connect: Connect) -> Iterator[Keep]:
    """`keep(topic, payload, qos=1, **options)` publishes a retained message; what was kept is removed at the end."""
    publisher = connect()
    topics = []

    def kept(topic: str, payload: bytes, qos: int = 1, **options: bytes) -> None:
        topics.append(topic)
        publisher.publish(topic, payload, qos, retain=True, **options)
        publisher.expect_nothing()  # QoS 0 has no acknowledgement; this round trip stands for it

    yield kept
    for topic in topics:
        publisher.publish(topic, b"", 1, retain=True)


def retained(connect: Connect, topic_filter: str, *, count: int, version: int = 5, options: int = 1) -> list[Packet]:
    """The retained messages that a new subscriber of the filter gets."""
    return subscribe_and_take(connect(version=version), topic_filter, options, count=count)


@clause(v3=("MQTT-3.3.1-5", "MQTT-3.3.1-6", "MQTT-3.3.1-8"), v5=("MQTT-3.3.1-5", "MQTT-3.3.1-9"))
@both_versions
@every_qos
def test_a_new_subscription_gets_the_retained_message(
    connect: Connect, keep: Keep, name: str, version: int, qos: int
) -> None:
    """A retained message of any QoS reaches a later subscriber with RETAIN set
    [MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-8] [MQTT-3.3.1-9].
    """
    keep(name, b"kept", qos)
    (message,) = retained(connect, name, count=1, version=version, options=2)
    assert (name, b"kept", True, qos, False) == (
        message.topic,
        message.payload,
        message.retain,
        message.qos,
        message.dup,
    )


@clause(v3=("MQTT-3.3.1-6", "MQTT-3.3.1-7"), v5="MQTT-3.3.1-5")
@both_versions
@every_qos
def test_the_last_retained_message_of_a_topic_counts(
    connect: Connect, keep: Keep, name: str, version: int, qos: int
) -> None:
    """A new retained message, also one of QoS 0, takes the place of the old one [MQTT-3.3.1-5] [MQTT-3.3.1-7]."""
    keep(name, b"old", 2)
    keep(name, b"new", qos)
    (message,) = retained(connect, name, count=1, version=version, options=2)
    assert (b"new", qos) == (message.payload, message.qos)


@clause(v3=("MQTT-3.3.1-10", "MQTT-3.3.1-11"), v5=("MQTT-3.3.1-6", "MQTT-3.3.1-7"))
@both_versions
@every_qos
def test_an_empty_payload_removes(connect: Connect, keep: Keep, name: str, version: int, qos: int) -> None:
    """An empty retained message removes what was kept, is not kept itself, and still reaches those who listen
    [MQTT-3.3.1-10] [MQTT-3.3.1-11] [MQTT-3.3.1-6] [MQTT-3.3.1-7].
    """
    listener = connect(version=version)
    keep(name, b"kept")
    subscribe_and_take(listener, name, 2, count=1)
    keep(name, b"", qos)
    message = listener.receive()
    assert (b"", False, qos) == (message.payload, message.retain, message.qos)
    retained(connect, name, count=0, version=version)
    retained(connect, f"{name}/#", count=0, version=version)


@clause(v3="MQTT-3.3.1-12", v5="MQTT-3.3.1-8")
@both_versions
def test_a_message_without_the_flag_changes_nothing(connect: Connect, keep: Keep, name: str, version: int) -> None:
    """Without RETAIN a message is neither kept nor does it remove or replace one [MQTT-3.3.1-12] [MQTT-3.3.1-8]."""
    other = connect(version=version)
    other.publish(name, b"passing", 1)
    retained(connect, name, count=0, version=version)
    keep(name, b"kept")
    for payload in (b"passing", b""):
        other.publish(name, payload, 1)
        assert b"kept" == retained(connect, name, count=1, version=version)[0].payload


@clause(v3="MQTT-3.3.1-9", v5="MQTT-3.3.1-12")
@both_versions
def test_a_live_delivery_clears_the_flag(connect: Connect, keep: Keep, name: str, version: int) -> None:
    """To an established subscription a retained message is news, so RETAIN is 0 [MQTT-3.3.1-9] [MQTT-3.3.1-12]."""
    listener = connect(version=version)
    listener.subscribe(name, 1)
    keep(name, b"kept")
    assert not listener.receive().retain


@clause(v5="MQTT-3.3.1-13")
@each(retain=(True, False))
def test_retain_as_published(connect: Connect, name: str, retain: bool) -> None:
    """With Retain As Published a live delivery has the flag of the publisher [MQTT-3.3.1-13]."""
    listener, other = connect(), connect()
    listener.subscribe(name, 1 | RETAIN_AS_PUBLISHED)
    other.publish(name, b"m", 1, retain=retain)
    assert retain == listener.receive().retain
    other.publish(name, b"", 1, retain=True)


@both_versions
@each(granted=(0, 1, 2))
@each(kept=(0, 1, 2))
def test_the_granted_qos_caps_a_retained_message(
    connect: Connect, keep: Keep, name: str, version: int, kept: int, granted: int
) -> None:
    """Retained messages too come with the lower of the two QoS (3.8.4)."""
    keep(name, b"kept", kept)
    (message,) = retained(connect, name, count=1, version=version, options=granted)
    assert min(kept, granted) == message.qos


@both_versions
@each_row(
    "topic_filter expected",
    (
        ("{}/#", {"", "/a", "/a/x", "/b", "/b/x", "/"}),
        ("{}/+", {"/a", "/b", "/"}),
        ("{}/+/x", {"/a/x", "/b/x"}),
        ("{}/a/#", {"/a", "/a/x"}),
        ("+/{}", set()),
        ("{}/b", {"/b"}),
        ("{}/+/+", {"/a/x", "/b/x"}),
    ),
)
def test_a_wildcard_subscription_gets_all_that_match(
    connect: Connect, keep: Keep, name: str, version: int, topic_filter: str, expected: set[str]
) -> None:
    """Each matching topic gives its message, no other does (3.3.1.3)."""
    for end in ("", "/", "/a", "/a/x", "/b", "/b/x"):
        keep(name + end, end.encode() or b"root")
    messages = retained(connect, topic_filter.format(name), count=len(expected), version=version)
    assert {name + end for end in expected} == {message.topic for message in messages}
    assert all(message.retain for message in messages)


@both_versions
def test_more_retained_messages_than_the_window_holds(connect: Connect, keep: Keep, name: str, version: int) -> None:
    """A subscription to 150 retained topics gets all of them, each once (3.3.1.3)."""
    for n in range(150):
        keep(f"{name}/{n}", b"%d" % n, 0)
    keep(f"{name}/last", b"last", 1)
    messages = retained(connect, f"{name}/#", count=151, version=version)
    assert {b"last"} | {b"%d" % n for n in range(150)} == {message.payload for message in messages}


@clause(v5="MQTT-3.3.1-10")
def test_retain_handling_1_sends_for_a_new_subscription(connect: Connect, keep: Keep, name: str) -> None:
    """With Retain Handling 1 the message comes when the subscription did not exist, also after an UNSUBSCRIBE, and
    not when it is repeated [MQTT-3.3.1-10].
    """
    keep(name, b"kept")
    client = connect()
    subscribe_and_take(client, name, 1 | RETAIN_IF_NEW, count=1)
    subscribe_and_take(client, name, 1 | RETAIN_IF_NEW, count=0)
    subscribe_and_take(client, f"{name}/#", 1 | RETAIN_IF_NEW, count=1)
    client.unsubscribe(name)
    subscribe_and_take(client, name, 1 | RETAIN_IF_NEW, count=1)


@clause(v5="MQTT-3.3.1-10")
def test_retain_handling_1_knows_the_subscriptions_of_the_session(connect: Connect, keep: Keep, name: str) -> None:
    """After a reconnect the subscription exists already, so the message does not come again [MQTT-3.3.1-10]."""
    lasting = {"clean": False, "properties": prop(0x11, 60)}
    keep(name, b"kept")
    client = connect(f"{name}-c", **lasting)
    subscribe_and_take(client, name, 1 | RETAIN_IF_NEW, count=1)
    client.disconnect()
    client = connect(f"{name}-c", **lasting)
    subscribe_and_take(client, name, 1 | RETAIN_IF_NEW, count=0)


@clause(v5="MQTT-3.3.1-11")
def test_retain_handling_2_sends_nothing(connect: Connect, keep: Keep, name: str) -> None:
    """With Retain Handling 2 a subscription gets live messages only [MQTT-3.3.1-11]."""
    keep(name, b"kept")
    client = connect()
    subscribe_and_take(client, name, 1 | RETAIN_NEVER, count=0)
    keep(name, b"live")
    assert b"live" == client.receive().payload


def test_each_filter_of_a_packet_has_its_own_retain_handling(connect: Connect, keep: Keep, name: str) -> None:
    """The option belongs to the filter, not to the packet (3.8.3.1)."""
    for end in ("a", "b"):
        keep(f"{name}/{end}", end.encode())
    filters = [(f"{name}/a", 1 | RETAIN_NEVER), (f"{name}/b", 1)]
    (message,) = subscribe_and_take(connect(), filters, count=1)
    assert b"b" == message.payload


def test_a_retained_message_carries_the_subscription_identifier(connect: Connect, keep: Keep, name: str) -> None:
    """Messages sent because of a SUBSCRIBE name its identifier (3.3.2.3.8)."""
    keep(name, b"kept")
    (message,) = subscribe_and_take(connect(), name, 1, count=1, properties=prop(SUBSCRIPTION_ID, 99))
    assert [99] == message.prop_all(SUBSCRIPTION_ID)


@both_versions
def test_each_filter_of_overlapping_ones_brings_its_retained_messages(
    connect: Connect, keep: Keep, name: str, version: int
) -> None:
    """Filters that match the same topic, subscribed in separate packets, each bring the message (3.3.1.3)."""
    keep(f"{name}/a", b"kept")
    client = connect(version=version)
    for topic_filter in (f"{name}/a", f"{name}/+", f"{name}/#"):
        subscribe_and_take(client, topic_filter, 1, count=1)
