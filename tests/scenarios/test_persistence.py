"""What survives the end of a node, be it asked to stop or killed: sessions, messages, QoS 2, wills, retained messages.

A start costs more than a client. So most of this is told as stories that share the lives of one node: a story is a
generator that yields when the node is to end, and finds the next node when it goes on. Between two lives more than a
second passes. Each story has client ids and topics of its own, looks at the node from outside, and holds for both
protocol versions where both can say it. `tests/unit/broker/test_durable_model.py` has the same in any order, in
virtual time; here are real processes, real files and real servers.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

from tests.scenarios.witness import metrics, wait_until
from tests.support import wire
from tests.support.checks import NO_LOCAL, RETAIN_AS_PUBLISHED
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MAXIMUM_PACKET_SIZE,
    MESSAGE_EXPIRY,
    PACKET_ID_NOT_FOUND,
    PAYLOAD_FORMAT,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    USER_PROPERTY,
    acknowledge,
    let_pass,
    numbered,
    payloads,
    publish_many,
)
from tests.support.node import STOP_PATIENCE
from tests.support.stores import Home, both_ends, drained, embedded, on_every_store, session_present, subscribe

VERSIONS = (4, 5)
NO_MATCHING_SUBSCRIBERS, TAKEN_OVER, DISCONNECT_WITH_WILL = 0x10, 0x8E, 0x04
WILL_DELAY = 0x18
BETWEEN = 1.2  #: seconds without a node; what was to last for one second is over then
LONG = 3000  #: seconds: longer than any test takes
PATIENCE = 60.0

Story = Callable[[Home], Iterator[None]]
STORIES: list[Story] = []


def story(tell: Story) -> Story:
    STORIES.append(tell)
    return tell


@on_every_store
@both_ends
def test_everything_is_back(home: Home, end: str) -> None:
    home.start()
    told = [(tell.__name__, tell(home)) for tell in STORIES]
    while told:
        going_on = []
        for name, each in told:
            try:
                next(each)
            except StopIteration:
                continue
            except AssertionError as error:
                error.add_note(f"in the story of {name}")
                raise
            going_on.append((name, each))
        told = going_on
        if end == "SIGKILL":
            home.kill()
        else:
            home.stop()
        let_pass(BETWEEN)
        home.start()


# --- sessions and subscriptions -----------------------------------------------------------------------------------


@story
def sessions_subscriptions_and_messages(home: Home) -> Iterator[None]:
    """Session present, what was queued comes first and in order, and the subscription goes on."""
    names = [(f"queued-{number}", VERSIONS[number % 2]) for number in range(20)]
    for name, version in names:
        home.absent(name, version, (f"queued/{name}/#", 1), ("queued/all", 1))
    publisher = home.connect("p")
    publisher.publish("queued/all", b"first" * 200, 1)
    for name, _ in names:
        publish_many(publisher, f"queued/{name}/a", numbered(20), 1)
    yield
    for name, version in names:
        back = home.back(name, version)
        assert [b"first" * 200, *numbered(20)] == payloads(drained(back))
        home.connect("p", version).publish(f"queued/{name}/b", b"new", 1)
        message = back.receive()
        assert (f"queued/{name}/b", b"new", 1) == (message.topic, message.payload, message.qos)


@story
def every_option_of_a_subscription(home: Home) -> Iterator[None]:
    """QoS, No Local, Retain As Published and the identifier work as before, for one filter as for another."""
    client = home.lasting("options")
    subscribe(client, "plain/+", 1)
    subscribe(client, "own/+", 2 | NO_LOCAL, 3)
    subscribe(client, "kept/+", 1 | RETAIN_AS_PUBLISHED, 268_435_455)
    subscribe(client, "zero/+", 0, 4)
    yield
    back, publisher = home.back("options"), home.connect("p")
    order = ("plain/1", "own/1", "kept/1", "zero/1")
    for topic in order:
        back.publish(topic, b"by itself", 1)
        publisher.publish(topic, b"by another", 2, retain=True)
        publisher.publish(topic, b"", 1, retain=True)
    seen = [(m.topic, m.payload, m.qos, m.retain, m.prop_all(SUBSCRIPTION_ID)) for m in drained(back) if m.payload]
    assert [
        ("plain/1", b"by itself", 1, False, []),
        ("plain/1", b"by another", 1, False, []),
        ("own/1", b"by another", 2, False, [3]),
        ("kept/1", b"by itself", 1, False, [268_435_455]),
        ("kept/1", b"by another", 1, True, [268_435_455]),
        ("zero/1", b"by itself", 0, False, [4]),
        ("zero/1", b"by another", 0, False, [4]),
    ] == sorted(seen, key=lambda one: (order.index(one[0]), one[1] == b"by another"))


@story
def what_was_changed_last(home: Home) -> Iterator[None]:
    """Subscribed again with other options, unsubscribed, and subscribed anew after that."""
    for version in VERSIONS:
        client = home.lasting(f"changed-{version}", version)
        for topic in ("raised", "gone", "returned"):
            subscribe(client, f"{topic}/{version}", 0)
        subscribe(client, f"raised/{version}", 1)
        client.unsubscribe(f"gone/{version}", f"returned/{version}")
        subscribe(client, f"returned/{version}", 1)
    yield  # the clients are connected: UNSUBACK and SUBACK are what they may rely on
    publisher = home.connect("p")
    for version in VERSIONS:
        answers = [publisher.publish(f"{topic}/{version}", b"x", 1) for topic in ("gone", "raised", "returned")]
        assert [NO_MATCHING_SUBSCRIBERS, 0, 0] == [answer.reason for answer in answers if answer is not None]
    yield  # what was published while they were away, and only that
    for version in VERSIONS:
        found = drained(home.back(f"changed-{version}", version))
        assert [(f"raised/{version}", 1), (f"returned/{version}", 1)] == [(m.topic, m.qos) for m in found]


@story
def members_of_a_shared_subscription(home: Home) -> Iterator[None]:
    """Each message goes to one member; each member gets some, and those that are away keep theirs."""
    for name in ("shared-a", "shared-b"):
        home.absent(name, 5, ("$share/group/shared/#", 1))
    home.absent("shared-c", 4, ("shared/#", 1))
    publish_many(home.connect("p"), "shared/1", numbered(10), 1)
    yield
    publish_many(home.connect("p"), "shared/2", numbered(10, start=10), 1)
    first, second = home.back("shared-a"), home.back("shared-b")
    a, b, c = drained(first), drained(second), drained(home.back("shared-c", 4))
    assert a and b
    assert sorted(numbered(20)) == sorted(payloads(a) + payloads(b))
    assert numbered(20) == payloads(c)
    first.unsubscribe("$share/group/shared/#")
    yield
    publish_many(home.connect("p"), "shared/3", numbered(4, start=20), 1)
    assert [] == drained(home.back("shared-a"))
    assert numbered(4, start=20) == payloads(drained(home.back("shared-b")))


@story
def lives_of_sessions(home: Home) -> Iterator[None]:
    """CONNECT and DISCONNECT say how long a session lasts, the time without a node counts, and users have their own."""
    ends = [("brief-4", 4), ("brief-5", 5), ("ending", 5), ("shorter", 5), ("expired", 5), ("made-short", 5)]
    for name, version in ends:
        if name.startswith("brief"):
            home.connect(name, version).subscribe("lives", 1)
        else:
            home.absent(name, version, ("lives", 1))
    home.lasting("ending").disconnect(0, wire.prop(SESSION_EXPIRY, 0))
    home.lasting("made-short").disconnect(0, wire.prop(SESSION_EXPIRY, 1))
    home.connect("shorter", clean=False, properties=wire.prop(SESSION_EXPIRY, 0)).disconnect()
    home.connect("expired", clean=False, properties=wire.prop(SESSION_EXPIRY, 1)).disconnect()
    home.absent("longer", 5, ("lives", 1))
    home.connect("longer", clean=False, properties=wire.prop(SESSION_EXPIRY, 7200)).close()
    for version in VERSIONS:
        home.lasting(f"alice-{version}", version, username="alice").subscribe("lives", 1)
    home.settle()
    yield
    home.connect("p").publish("lives", b"x", 1)
    assert [b"x"] == payloads(drained(home.back("longer")))
    for name, version in ends:
        gone = home.lasting(name, version)
        assert not session_present(gone), name
        assert [] == drained(gone), name
    thief = home.lasting("alice-5", 5, username="mallory")
    assert not session_present(thief) and [] == drained(thief)
    assert [b"x"] == payloads(drained(home.back("alice-4", 4, username="alice")))


@story
def sessions_with_similar_names(home: Home) -> Iterator[None]:
    """Names that begin alike, hold separators or look like patterns; one session of them is discarded."""
    names = ["v", "v1", "v/1", "v:1", "v ", "V", "{v}", "v*", "v?", "[v]", "v%2F1", "v\\", "ü", "車", "🚗", "v" * 256]
    filters = ["a", "a/b", "/", "//", "+/b", "a/#", "similar/none"]
    for number, name in enumerate(names):
        client = home.lasting(name)
        subscribe(client, f"similar/{number}", 1)
        for topic_filter in filters:
            subscribe(client, topic_filter, 1, identifier=number + 1)
        client.unsubscribe("similar/none")
        client.disconnect()
    home.connect("v", clean=True).disconnect()
    yield
    publisher = home.connect("p")
    for number in range(len(names)):
        publisher.publish(f"similar/{number}", b"%d" % number, 1)
    for topic in ("a", "a/b", "/", "//", "similar/none"):
        publisher.publish(topic, b"", 1)
    assert not session_present(home.lasting("v"))
    for number, name in enumerate(names[1:], 1):
        found = drained(home.back(name))
        assert [(f"similar/{number}", b"%d" % number)] == [(m.topic, m.payload) for m in found if m.payload]
        others = [message for message in found if not message.payload]
        assert {"a", "a/b", "/", "//"} == {message.topic for message in others}
        assert all({number + 1} == {*message.prop_all(SUBSCRIPTION_ID)} for message in others)


# --- messages -----------------------------------------------------------------------------------------------------


@story
def every_property_of_a_message(home: Home) -> Iterator[None]:
    """In the order of the publisher where an order means something; the expiry lowered by the time that has passed."""
    client = home.lasting("properties")
    subscribe(client, "properties/#", 2, 7)
    subscribe(client, "properties/+", 1 | RETAIN_AS_PUBLISHED, 9)
    client.disconnect()
    pairs = [("b", "2"), ("a", "1"), ("b", "2"), ("", ""), ("ü", "車🚗")]
    home.connect("p").publish(
        "properties/x",
        "grün".encode(),
        1,
        retain=True,
        properties=wire.prop(PAYLOAD_FORMAT, 1)
        + wire.prop(MESSAGE_EXPIRY, 1000)
        + wire.prop(CONTENT_TYPE, "text/plain")
        + wire.prop(RESPONSE_TOPIC, "answers/s")
        + wire.prop(CORRELATION_DATA, bytes(range(256)))
        + b"".join(wire.prop(USER_PROPERTY, pair) for pair in pairs),
    )
    yield
    copies = drained(home.back("properties"))
    assert [7, 9] == sorted(number for copy in copies for number in copy.prop_all(SUBSCRIPTION_ID))
    assert any(copy.retain for copy in copies), "one of the subscriptions asked for the flag as published"
    for copy in copies:
        assert ("properties/x", "grün".encode()) == (copy.topic, copy.payload)
        assert (1, "text/plain", "answers/s", bytes(range(256))) == tuple(
            copy.prop(each) for each in (PAYLOAD_FORMAT, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION_DATA)
        )
        assert pairs == copy.prop_all(USER_PROPERTY)
        assert 0 < copy.prop(MESSAGE_EXPIRY) < 1000


@story
def payloads_and_lives_of_messages(home: Home) -> Iterator[None]:
    """Empty, beside the entry, elsewhere, and twice the same; one that expires without a node does not come."""
    home.absent("sizes", 4, ("sizes", 1))
    sent = [b"", b"a", bytes(range(256)), b"b" * 257, b"c" * 5000, b"c" * 5000, random.Random(1).randbytes(300_000)]
    publisher = home.connect("p")
    for number, payload in enumerate(sent):
        publisher.publish("sizes", payload, 1, properties=wire.prop(MESSAGE_EXPIRY, 1000) if number % 2 else b"")
        publisher.publish("sizes", b"short", 1, properties=wire.prop(MESSAGE_EXPIRY, 1))
    yield
    assert sent == payloads(drained(home.back("sizes", 4)))


@story
def what_is_in_flight(home: Home) -> Iterator[None]:
    """Messages without PUBACK are repeated with DUP and their packet id, in order; the others are not."""
    first: dict[int, list[wire.Packet]] = {}
    for version in VERSIONS:
        subscriber = home.lasting(f"flight-{version}", version)
        subscribe(subscriber, f"flight/{version}", 1)
        publish_many(home.connect("p", version), f"flight/{version}", numbered(10), 1)
        first[version] = [subscriber.expect(wire.PUBLISH) for _ in range(10)]
        assert not any(message.dup for message in first[version])
        for index in (0, 1, 2, 5, 9):
            acknowledge(subscriber, first[version][index])
        for number in range(40, 60):  # what is not in flight means nothing, though messages will have these ids
            subscriber.send(wire.ack_packet(wire.PUBACK, (first[version][0].packet_id or 0) + number, version=version))
        subscriber.expect_nothing()  # the node has read them
        publish_many(home.connect("p", version), f"flight/{version}", numbered(60, start=10), 1)
    home.settle()
    yield
    for version in VERSIONS:
        expected = [first[version][index] for index in (3, 4, 6, 7, 8)]
        again = drained(home.back(f"flight-{version}", version))
        assert [(m.packet_id, m.payload, True) for m in expected] == [
            (m.packet_id, m.payload, m.dup) for m in again[: len(expected)]
        ]
        assert numbered(60, start=10) == payloads(again[len(expected) :])


@story
def clients_that_come_back_as_others(home: Home) -> Iterator[None]:
    """With another version, or taking smaller packets: what they cannot be told is left out. [MQTT-3.1.2-25]"""
    home.absent("up", 4, ("as/other", 1))
    home.absent("down", 5, ("as/other", 1))
    home.absent("small", 5, ("as/small", 1))
    publisher = home.connect("p")
    publisher.publish(
        "as/other", b"x", 1, properties=wire.prop(CONTENT_TYPE, "a/b") + wire.prop(USER_PROPERTY, ("k", "v"))
    )
    publish_many(publisher, "as/small", [b"1", b"2" * 1000, b"3"], 1)
    yield
    (up,) = drained(home.back("up", 5))
    assert (b"x", "a/b", [("k", "v")]) == (up.payload, up.prop(CONTENT_TYPE), up.prop_all(USER_PROPERTY))
    assert [b"x"] == payloads(drained(home.back("down", 4)))
    assert [b"1", b"3"] == payloads(drained(home.back("small", 5, wire.prop(MAXIMUM_PACKET_SIZE, 150))))
    home.connect("p").publish("as/other", b"y", 1)
    home.settle()
    yield
    assert [b"y"] == payloads(drained(home.back("up", 4)))
    assert [b"y"] == payloads(drained(home.back("down", 5)))
    assert [] == payloads(drained(home.back("small"))), "gone for good"


@story
def retained_messages(home: Home) -> Iterator[None]:
    """What was acknowledged is there, what was deleted, replaced or has expired is not."""
    publisher = home.connect("p")
    sent = (("one", b"1"), ("two", b"2"), ("three", b"3"), ("two", b""), ("three", b"4"), ("four", b"5"))
    for topic, payload in sent:
        pair = wire.prop(USER_PROPERTY, ("k", "v"))
        publisher.publish(f"retained/{topic}", payload, 1, retain=True, properties=pair)
    for topic, expiry in (("short", 1), ("long", 1000)):
        publisher.publish(f"retained/{topic}", b"x", 1, retain=True, properties=wire.prop(MESSAGE_EXPIRY, expiry))
    yield
    expected = {"retained/one": b"1", "retained/three": b"4", "retained/four": b"5", "retained/long": b"x"}
    found = retained(home)
    assert expected == {topic: message.payload for topic, message in found.items()}
    assert [("k", "v")] == found["retained/one"].prop_all(USER_PROPERTY)
    assert 0 < found["retained/long"].prop(MESSAGE_EXPIRY) < 1000
    home.connect("p").publish("retained/four", b"", 1, retain=True)
    yield
    assert expected.keys() - {"retained/four"} == retained(home).keys()


def retained(home: Home) -> dict[str, wire.Packet]:
    client = home.connect("reader")
    subscribe(client, "retained/#", 1)
    found = drained(client)
    assert all(message.retain for message in found)
    return {message.topic: message for message in found}


# --- QoS 2 --------------------------------------------------------------------------------------------------------


def offer(client: wire.Client, topic: str, payload: bytes, number: int, *, dup: bool = False) -> None:
    """PUBLISH, until PUBREC."""
    client.send(wire.publish_packet(topic, payload, version=client.version, qos=2, packet_id=number, dup=dup))
    answer = client.await_answer(wire.PUBREC, number)
    assert answer.reason in (None, 0, NO_MATCHING_SUBSCRIBERS), f"PUBREC 0x{answer.reason:02x}"


def release(client: wire.Client, number: int, *allowed: int) -> None:
    """PUBREL; the PUBCOMP says that the id was known, or one of the reasons that are allowed."""
    client.send(wire.ack_packet(wire.PUBREL, number, version=client.version))
    answer = client.await_answer(wire.PUBCOMP, number)
    assert answer.reason in (None, 0, *allowed), f"PUBCOMP 0x{answer.reason:02x}"


def answer(client: wire.Client, kind: int, message: wire.Packet) -> None:
    """PUBREC or PUBCOMP to a message."""
    client.send(wire.ack_packet(kind, message.packet_id or 0, version=client.version))


@story
def qos_2_from_publishers(home: Home) -> Iterator[None]:
    """Offered, released or completed: each goes on where it was, and is delivered once, in its order."""
    home.absent("taker", 5, ("from/#", 2))
    for version in VERSIONS:
        publisher = home.lasting(f"giver-{version}", version)
        for number in range(1, 31):
            offer(publisher, f"from/{version}", b"-%02d" % number, number)
        for number in range(1, 11):
            release(publisher, number)
        offer(home.lasting(f"clean-{version}", version), f"from/{version}", b"cleaned", 7)
        home.connect(f"clean-{version}", version, clean=True)
        offer(home.lasting(f"unheard-{version}", version), f"late/{version}", b"old", 7)
    yield
    late = home.connect("late")
    subscribe(late, "late/#", 2)
    for version in VERSIONS:
        publisher = home.back(f"giver-{version}", version)
        for number in range(21, 31):
            offer(publisher, f"from/{version}", b"-%02d" % number, number, dup=True)
        for number in range(11, 31):
            release(publisher, number)
        for number in range(1, 31):
            offer(publisher, f"from/{version}", b"+%02d" % number, number)
        offer(home.lasting(f"clean-{version}", version), f"from/{version}", b"a new session forgets", 7)
        unheard = home.back(f"unheard-{version}", version)
        offer(unheard, f"late/{version}", b"old", 7, dup=True)  # the id is kept, though nobody lasting got it
        release(unheard, 7)
        unheard.publish(f"late/{version}", b"new", 2)
    assert [b"new"] * 2 == payloads(drained(late))
    seen = drained(home.back("taker"))
    for version in VERSIONS:
        expected = [b"%c%02d" % (sign, number) for sign in b"-+" for number in range(1, 31)]
        expected[30:30] = [b"cleaned"]
        assert [*expected, b"a new session forgets"] == [m.payload for m in seen if m.topic == f"from/{version}"]


@story
def qos_2_to_subscribers(home: Home) -> Iterator[None]:
    """PUBLISH with DUP, or PUBREL, with the same id, also in another version; nothing of what was completed."""
    first: dict[int, list[wire.Packet]] = {}
    for version in VERSIONS:
        subscriber = home.lasting(f"two-{version}", version)
        subscribe(subscriber, f"two/{version}", 2)
        publish_many(home.connect("p", version), f"two/{version}", numbered(9), 2)
        first[version] = [subscriber.expect(wire.PUBLISH) for _ in range(9)]
        for index in (4, 2, 3, 5):
            answer(subscriber, wire.PUBREC, first[version][index])
            assert first[version][index].packet_id == subscriber.expect(wire.PUBREL).packet_id
        for index in (4, 5):
            answer(subscriber, wire.PUBCOMP, first[version][index])
        subscriber.expect_nothing()  # the node has read them
    home.settle()
    for turn in range(2):  # the same again if nothing was answered
        yield
        for version in VERSIONS:
            back = home.back(f"two-{version}", version if turn else 9 - version)
            again = [back.recv() for _ in range(7)]
            assert [first[version][index].packet_id for index in (2, 3)] == sorted(
                packet.packet_id or 0 for packet in again if packet.type == wire.PUBREL
            )
            assert [(first[version][i].packet_id, first[version][i].payload, True) for i in (0, 1, 6, 7, 8)] == [
                (packet.packet_id, packet.payload, packet.dup) for packet in again if packet.type == wire.PUBLISH
            ]
            back.close()
    for version in VERSIONS:
        publish_many(home.connect("p", version), f"two/{version}", [b"next"], 2)
        seen = payloads(drained(home.back(f"two-{version}", version)))
        assert [b"00000", b"00001", b"00006", b"00007", b"00008", b"next"] == seen


@story
def flows_that_end(home: Home) -> Iterator[None]:
    """PUBACK or PUBREC with an error ends one for good [MQTT-4.3.3-4]; a release outlives its message [MQTT-4.4.0-1]"""
    subscriber = home.lasting("ended")
    for topic in ("refused", "expires"):
        subscribe(subscriber, f"flows/{topic}", 2)
    for qos in (1, 2):
        home.connect("p").publish("flows/refused", b"x", qos)
        acknowledge(subscriber, subscriber.expect(wire.PUBLISH), reason=0x83)
    home.connect("p").publish("flows/expires", b"x", 2, properties=wire.prop(MESSAGE_EXPIRY, 1))
    message = subscriber.expect(wire.PUBLISH)
    answer(subscriber, wire.PUBREC, message)
    assert message.packet_id == subscriber.expect(wire.PUBREL).packet_id
    home.settle()
    yield
    back = home.back("ended")
    assert message.packet_id == back.expect(wire.PUBREL).packet_id
    answer(back, wire.PUBCOMP, message)
    assert [] == drained(back)


# --- wills --------------------------------------------------------------------------------------------------------


def will(name: str, delay: int | None = None, retain: bool = False) -> wire.Will:
    """A will of QoS 1 that tells whose it is."""
    properties = wire.prop(WILL_DELAY, delay) if delay is not None else b""
    return wire.Will(f"will/{name}", name.encode(), qos=1, retain=retain, properties=properties)


def connected(home: Home) -> int:
    return int(metrics(home.node)["motorcade_clients_connected"])


def vanish(home: Home, *clients: wire.Client) -> None:
    """The connections break, and the node has noticed."""
    before = connected(home)
    for client in clients:
        client.close()
    wait_until(lambda: connected(home) == before - len(clients), "the node has noticed")


@story
def wills(home: Home) -> Iterator[None]:
    """They go out when their time has come, once, with all that belongs to them, and not if the client is back.

    The observer is a session that lasts, so a will that is published while nobody looks waits for it.
    """
    home.absent("observer", 5, ("will/#", 2))
    properties = (
        wire.prop(CONTENT_TYPE, "text/plain") + wire.prop(MESSAGE_EXPIRY, LONG) + wire.prop(USER_PROPERTY, ("b", "1"))
    )
    home.lasting("connected-4", 4, will=will("connected-4"))
    home.lasting("connected-5", 5, will=wire.Will("will/connected-5", b"connected-5", qos=2, properties=properties))
    home.lasting("kept", 4, will=will("kept", retain=True))
    home.lasting("other", will=will("old", LONG))
    home.back("other", will=will("another"))
    home.lasting("none", will=will("none", LONG))
    home.back("none")
    brief: dict[str, Any] = {"clean": False, "properties": wire.prop(SESSION_EXPIRY, 1)}
    vanish(
        home,
        home.lasting("short", will=will("short", 1)),
        home.lasting("later", will=will("later", 4)),
        home.lasting("long", will=will("long", LONG)),
        home.lasting("back", will=will("back", LONG)),
        home.connect("over", will=will("over", LONG), **brief),
    )
    home.lasting("waits", will=will("waits", LONG))
    home.lasting("asks", will=will("asks", 1)).disconnect(DISCONNECT_WITH_WILL)
    home.settle()
    yield
    expected = {b"connected-4": 1, b"connected-5": 2, b"kept": 1, b"another": 1, b"short": 1, b"over": 1}
    expected |= {b"asks": 1, b"later": 1}
    watching = home.back("observer")
    found = {message.payload: message for message in (watching.receive(PATIENCE) for _ in expected)}
    assert expected == {payload: message.qos for payload, message in found.items()}
    five = found[b"connected-5"]
    assert ("text/plain", [("b", "1")]) == (five.prop(CONTENT_TYPE), five.prop_all(USER_PROPERTY))
    assert 0 < five.prop(MESSAGE_EXPIRY) <= LONG
    for name in ("back", "waits"):
        home.back(name).disconnect()
    home.connect("long", clean=True)  # the end of the session ends the delay. [MQTT-3.1.3-9]
    assert b"long" == watching.receive(PATIENCE).payload
    home.settle()
    yield
    for name in ("back", "waits"):  # a will that still waited would go out with the end of its session
        home.back(name)
        home.connect(name, clean=True)
    assert [] == payloads(drained(home.back("observer"))), "published in one life, published again in the next"
    late = home.connect("late")
    subscribe(late, "will/#", 1)
    assert [(b"kept", True)] == [(message.payload, message.retain) for message in drained(late)]


# --- what is asked for last, right before the end -----------------------------------------------------------------


@story
def what_was_just_discarded(home: Home) -> Iterator[None]:
    """A clean start ends the old session for good, also if the node is killed as soon as it has said so."""
    for version in VERSIONS:
        home.absent(f"old-{version}", version, (f"old/{version}", 1))
        publish_many(home.connect("p", version), f"old/{version}", numbered(5), 1)
    home.connect("old-4", 4, clean=True)
    clean = home.connect("old-5", 5, clean=True, properties=wire.prop(SESSION_EXPIRY, 3600))
    assert not session_present(clean)
    yield
    publisher = home.connect("p")
    for version in VERSIONS:
        assert NO_MATCHING_SUBSCRIBERS == publisher.publish(f"old/{version}", b"x", 1).reason  # type: ignore[union-attr]
        back = home.lasting(f"old-{version}", version)
        assert (version == 5) == session_present(back), "3.1.1: the clean session has ended; 5: it was to last"
        subscribe(back, f"old/{version}", 1)
        assert [] == drained(back)


@story
def wills_that_were_just_taken_back(home: Home) -> Iterator[None]:
    """DISCONNECT takes the will away, also if the node is killed as soon as it has closed the connection."""
    home.absent("undertaker", 5, ("goodbye/#", 2))
    for number in range(10):
        gone = wire.Will(f"goodbye/{number}", b"x", qos=1)
        home.lasting(f"polite-{number}", VERSIONS[number % 2], will=gone).disconnect()
    yield
    for number in range(10):
        home.back(f"polite-{number}", VERSIONS[number % 2])
    assert [] == payloads(drained(home.back("undertaker")))


# --- ended in the middle ------------------------------------------------------------------------------------------


@on_every_store
def test_a_long_backlog_is_drained_in_order(home: Home) -> None:
    """Many times the window and more than a node reads at once, large ones too; new messages stand behind."""
    home.start("[session]\nqueue = 10000\nwindow = 32\n")
    chance = random.Random(2)
    large = [chance.randbytes(300 * 1024) for _ in range(20)]
    for version in VERSIONS:
        home.absent(f"s{version}", version, ("t", 1))
    home.absent("large", 5, ("large", 1))
    publish_many(home.connect("p"), "t", numbered(5000), 1)
    publish_many(home.connect("p"), "large", large, 1)
    home.crash()
    publisher = home.connect("p")
    for version in VERSIONS:
        back = home.back(f"s{version}", version)
        seen: list[bytes] = []
        for start in range(5000, 5050, 10):
            publish_many(publisher, "t", numbered(10, start=start), 1)
            seen += [back.receive().payload for _ in range(7)]
        seen += payloads(drained(back))
        assert numbered(5000) == seen[:5000]
        assert numbered(50, start=5000) == seen[5000:5050]
    assert large == payloads(drained(home.back("large")))


@on_every_store
@both_ends
def test_what_was_acknowledged_is_there(home: Home, end: str) -> None:
    """Ended at once after some PUBACK of many messages under way: all acknowledged ones are there, each once."""
    home.start("[session]\nqueue = 100000\n")
    home.absent("s", 5, ("t", 1))
    chance = random.Random(1)
    sent = 0
    acknowledged: list[bytes] = []
    for number in range(4 if (home.kind, end) == ("rocksdb", "SIGKILL") else 2):
        publisher = home.connect(f"p{number % 2}", 4 + number % 2)
        wanted = numbered(90, start=sent)
        sent += len(wanted)
        raw = [
            wire.publish_packet("t", payload, version=publisher.version, qos=1, packet_id=index)
            for index, payload in enumerate(wanted, 1)
        ]
        publisher.send(b"".join(raw))
        for index in range(1, chance.randint(1, 80) + 1):
            assert index == publisher.expect(wire.PUBACK).packet_id
            acknowledged.append(wanted[index - 1])
        os.kill(home.node.pid, signal.Signals[end])
        # What has left the node before its end counts too.
        answers = [packet for packet in publisher.expect_closed() if packet.type == wire.PUBACK and not packet.reason]
        acknowledged += [wanted[(packet.packet_id or 0) - 1] for packet in answers]
        assert home.node.process is not None
        home.node.process.wait(STOP_PATIENCE)
        home.again(end)
    seen = payloads(drained(home.back("s")))
    assert sorted(set(seen)) == seen, "out of order, or twice"
    assert [] == sorted(set(acknowledged) - set(seen))


@on_every_store
def test_killed_at_any_step_of_qos_2(home: Home) -> None:
    """Whether or not a step had been stored: after its repetition each message has come once, under its id."""
    home.start()
    home.absent("s", 5, ("t", 2))
    chance = random.Random(2)
    for number in range(4 if home.kind == "rocksdb" else 2):
        version = VERSIONS[number % 2]
        payload = b"%05d" % number
        publisher, released = home.lasting("publisher", version), home.lasting("released", version)
        offer(released, "t", b"r" + payload, 9)
        reader = home.lasting("reader", version)
        subscribe(reader, "u", 2)
        home.connect("p").publish("u", payload, 2)
        message = reader.expect(wire.PUBLISH)
        publisher.send(wire.publish_packet("t", payload, version=version, qos=2, packet_id=9))
        released.send(wire.ack_packet(wire.PUBREL, 9, version=version))
        answer(reader, wire.PUBREC, message)
        let_pass(chance.random() * 0.01)  # any moment will do
        home.crash()
        publisher = home.back("publisher", version)
        offer(publisher, "t", payload, 9, dup=True)
        release(publisher, 9)
        release(home.back("released", version), 9, PACKET_ID_NOT_FOUND)
        reader = home.back("reader", version)
        found = reader.recv()
        assert message.packet_id == found.packet_id
        if found.type == wire.PUBLISH:
            assert (message.payload, True) == (found.payload, found.dup)
            answer(reader, wire.PUBREC, found)
            found = reader.expect(wire.PUBREL)
        assert (wire.PUBREL, message.packet_id) == (found.type, found.packet_id)
        answer(reader, wire.PUBCOMP, found)
        assert [] == drained(reader)
    seen = payloads(drained(home.back("s")))
    assert numbered(number + 1) == [payload for payload in seen if payload[:1] != b"r"]
    assert [b"r" + payload for payload in numbered(number + 1)] == [payload for payload in seen if payload[:1] == b"r"]


@embedded
def test_a_publisher_that_leaves_at_once_is_still_heard(home: Home) -> None:
    """PUBLISH and DISCONNECT in one write, also for a client whose session ends with that."""
    home.start()
    home.absent("s", 4, ("t", 1))
    for version in VERSIONS:
        publisher = home.connect("p", version)
        publisher.send(
            wire.publish_packet("t", b"%d" % version, version=version, qos=1, packet_id=1)
            + wire.disconnect_packet(version=version)
        )
        publisher.expect_closed()
    back = home.back("s", 4)
    assert [b"4", b"5"] == [back.receive().payload for _ in VERSIONS]
