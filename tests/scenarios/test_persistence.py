"""What survives the end of a node, be it asked to stop or killed: sessions, subscriptions, messages, their order.

Each test looks at the node from outside, through connections, and both protocol versions stand beside each other in one
node where the same holds for both: a start costs more than a client. QoS 2 and wills have files of their own.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from tests.scenarios.witness import metrics, wait_until
from tests.support.checks import NO_LOCAL, RETAIN_AS_PUBLISHED
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MAXIMUM_PACKET_SIZE,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    RECEIVE_MAXIMUM,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    USER_PROPERTY,
    acknowledge,
    lasting,
    let_pass,
    numbered,
    payloads,
    publish_many,
)
from tests.support.node import STOP_PATIENCE
from tests.support.stores import Home, both_ends, drained, embedded, on_every_store, session_present, subscribe
from tests.support.wire import (
    CONNACK,
    DISCONNECT,
    PATIENCE,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    SUBACK,
    Client,
    Closed,
    Packet,
    ack_packet,
    connect_packet,
    disconnect_packet,
    prop,
    publish_packet,
    subscribe_packet,
)

VERSIONS = (4, 5)
NO_MATCHING_SUBSCRIBERS = 0x10
TAKEN_OVER = 0x8E


def dropped(home: Home, reason: str) -> float:
    return metrics(home.node)[f'motorcade_messages_dropped_total{{reason="{reason}"}}']


# --- sessions and subscriptions -----------------------------------------------------------------------------------


@on_every_store
@both_ends
def test_sessions_subscriptions_and_messages_are_back(home: Home, end: str) -> None:
    """Session present, what was queued comes first and in order, and the subscription goes on."""
    home.start()
    for version in VERSIONS:
        home.absent(f"s{version}", version, (f"in/{version}/#", 1))
        publish_many(home.connect("p", version), f"in/{version}/a", numbered(50), 1)
    home.again(end)
    for version in VERSIONS:
        back = home.back(f"s{version}", version)
        assert [(payload, 1) for payload in numbered(50)] == [(m.payload, m.qos) for m in drained(back)]
        home.connect("p", version).publish(f"in/{version}/b", b"new", 1)
        message = back.receive()
        assert (f"in/{version}/b", b"new", 1) == (message.topic, message.payload, message.qos)


@both_ends
def test_every_option_of_a_subscription_is_back(home: Home, end: str) -> None:
    """QoS, No Local, Retain As Published and the identifier work as before, for one filter as for another."""
    home.start()
    with home.lasting("s") as client:
        subscribe(client, "plain/+", 1)
        subscribe(client, "own/+", 2 | NO_LOCAL, 3)
        subscribe(client, "kept/+", 1 | RETAIN_AS_PUBLISHED, 268_435_455)
        subscribe(client, "zero/+", 0, 4)
        client.disconnect()
    home.again(end)
    back, publisher = home.back("s"), home.connect("p")
    for topic in ("plain/1", "own/1", "kept/1", "zero/1"):
        back.publish(topic, b"by itself", 1)
        publisher.publish(topic, b"by another", 2, retain=True)
    assert [
        ("plain/1", b"by itself", 1, False, []),
        ("plain/1", b"by another", 1, False, []),
        ("own/1", b"by another", 2, False, [3]),
        ("kept/1", b"by itself", 1, False, [268_435_455]),
        ("kept/1", b"by another", 1, True, [268_435_455]),
        ("zero/1", b"by itself", 0, False, [4]),
        ("zero/1", b"by another", 0, False, [4]),
    ] == sorted(
        ((m.topic, m.payload, m.qos, m.retain, m.prop_all(SUBSCRIPTION_ID)) for m in drained(back)),
        key=lambda seen: (["plain/1", "own/1", "kept/1", "zero/1"].index(seen[0]), seen[1] == b"by another"),
    )


@both_ends
def test_what_was_changed_last_counts(home: Home, end: str) -> None:
    """Subscribed again with other options, unsubscribed, and subscribed anew after that."""
    home.start()
    for version in VERSIONS:
        client = home.lasting(f"s{version}", version)
        for topic in ("raised", "gone", "returned"):
            subscribe(client, f"{topic}/{version}", 0)
        subscribe(client, f"raised/{version}", 1)
        client.unsubscribe(f"gone/{version}", f"returned/{version}")
        subscribe(client, f"returned/{version}", 1)
    home.again(end)  # the clients are connected: UNSUBACK and SUBACK are what they may rely on
    for version in VERSIONS:
        back, publisher = home.back(f"s{version}", version), home.connect("p", version)
        for topic in ("gone", "raised", "returned"):
            publisher.publish(f"{topic}/{version}", b"x", 1)
        assert [(f"raised/{version}", 1), (f"returned/{version}", 1)] == [(m.topic, m.qos) for m in drained(back)]


def test_an_unsubscribed_filter_gets_no_message_while_the_client_is_away(home: Home) -> None:
    """What waits from before the UNSUBSCRIBE may still come; what is published after it does not."""
    home.start()
    client = home.lasting("s")
    subscribe(client, "t", 1)
    subscribe(client, "u", 1)
    client.unsubscribe("t")
    home.crash()
    publisher = home.connect("p")
    assert NO_MATCHING_SUBSCRIBERS == publisher.publish("t", b"not wanted", 1).reason  # type: ignore[union-attr]
    publisher.publish("u", b"wanted", 1)
    home.crash()
    assert [b"wanted"] == payloads(drained(home.back("s")))


def test_members_of_a_shared_subscription_are_back(home: Home) -> None:
    """Each message goes to one member; each member gets some, and those that are away keep theirs."""
    home.start()
    for name in ("a", "b"):
        home.absent(name, 5, ("$share/group/t/#", 1))
    home.absent("c", 4, ("t/#", 1))
    publish_many(home.connect("p"), "t/1", numbered(10), 1)
    home.crash()
    publish_many(home.connect("p"), "t/2", numbered(10, start=10), 1)
    a, b, c = drained(home.back("a")), drained(home.back("b")), drained(home.back("c", 4))
    assert a and b
    assert sorted(numbered(20)) == sorted(payloads(a) + payloads(b))
    assert numbered(20) == payloads(c)
    home.back("a").unsubscribe("$share/group/t/#")
    home.crash()
    publish_many(home.connect("p"), "t/3", numbered(4, start=20), 1)
    assert [] == drained(home.back("a"))
    assert numbered(4, start=20) == payloads(drained(home.back("b")))


@pytest.mark.parametrize("moment", ["right after CONNACK", "later"])
def test_a_discarded_session_leaves_nothing(home: Home, moment: str) -> None:
    """A clean start ends the old session for good, also if the node is killed as soon as it has said so."""
    home.start()
    for version in VERSIONS:
        home.absent(f"s{version}", version, (f"t{version}", 1))
        publish_many(home.connect("p", version), f"t{version}", numbered(5), 1)
    home.connect("s4", 4, clean=True)
    clean = home.connect("s5", 5, clean=True, properties=prop(SESSION_EXPIRY, 3600))
    assert not session_present(clean)
    if moment == "later":
        home.connect("s4", 4, clean=True).disconnect()
        subscribe(clean, "other", 1)
        clean.disconnect()
    home.crash()
    publisher = home.connect("p")
    for version in VERSIONS:
        assert NO_MATCHING_SUBSCRIBERS == publisher.publish(f"t{version}", b"x", 1).reason  # type: ignore[union-attr]
    for version in VERSIONS:
        back = home.lasting(f"s{version}", version)
        assert (version == 5) == session_present(back), "3.1.1: the clean session has ended; 5: it was to last"
        assert [] == drained(back)
        subscribe(back, f"t{version}", 1)
        assert [] == drained(back)
    publisher.publish("other", b"x", 1)
    assert [b"x"] * (moment == "later") == payloads(drained(home.back("s5")))


def test_a_session_without_expiry_leaves_nothing(home: Home) -> None:
    """What ends with its connection is not there after a crash; what was made so by DISCONNECT neither."""
    home.start()
    for version in VERSIONS:
        client = home.connect(f"s{version}", version)
        subscribe(client, "t", 1)
    ending = home.lasting("ending")
    subscribe(ending, "t", 1)
    ending.disconnect(0, prop(SESSION_EXPIRY, 0))
    home.crash()
    home.connect("p").publish("t", b"x", 1)
    for client_id, version in (("s4", 4), ("s5", 5), ("ending", 5)):
        back = home.lasting(client_id, version)
        assert not session_present(back)
        assert [] == drained(back)


def test_a_session_made_lasting_or_ending_by_reconnecting(home: Home) -> None:
    """The last CONNECT decides whether a session outlives the next end of its connection."""
    home.start()
    home.absent("longer", 5, ("t", 1))
    home.absent("shorter", 5, ("t", 1))
    home.connect("longer", clean=False, properties=prop(SESSION_EXPIRY, 7200)).close()
    home.connect("shorter", clean=False, properties=prop(SESSION_EXPIRY, 0)).disconnect()
    home.crash()
    home.connect("p").publish("t", b"x", 1)
    assert [b"x"] == payloads(drained(home.back("longer")))
    gone = home.lasting("shorter")
    assert not session_present(gone)
    assert [] == drained(gone)


def test_the_session_of_another_user_is_not_resumed(home: Home) -> None:
    """A client id alone does not open somebody else's mailbox."""
    home.start()
    for version in VERSIONS:
        home.lasting(f"s{version}", version, username="alice").subscribe("t", 1)
    home.crash()
    home.connect("p").publish("t", b"for alice", 1)
    thief = home.lasting("s5", 5, username="mallory")
    assert not session_present(thief)
    assert [] == drained(thief)
    assert [b"for alice"] == payloads(drained(home.back("s4", 4, username="alice")))


def test_many_sessions_are_back(home: Home) -> None:
    """Each with its own subscriptions and messages, and a message for all of them reaches all of them."""
    home.start()
    names = [f"vehicle-{number}" for number in range(100)]
    for name in names:
        home.absent(name, 5, (f"to/{name}", 1), ("to/all", 1))
    publisher = home.connect("p")
    publisher.publish("to/all", b"first" * 200, 1)
    for name in names:
        publisher.publish(f"to/{name}", name.encode(), 1)
    home.crash()
    publisher = home.connect("p")
    publisher.publish("to/all", b"last", 1)
    for name in names:
        assert [b"first" * 200, name.encode(), b"last"] == payloads(drained(home.back(name)))


@on_every_store
def test_sessions_with_similar_names_do_not_touch_each_other(home: Home) -> None:
    """Names that begin alike, hold separators or look like patterns; one session of them is discarded."""
    home.start()
    names = ["v", "v1", "v/1", "v:1", "v ", "V", "{v}", "v*", "v?", "[v]", "v%2F1", "v\\", "ü", "車", "🚗", "v" * 256]
    filters = ["a", "a/b", "/", "//", "+/b", "a/#", "#"]
    for number, name in enumerate(names):
        client = home.lasting(name)
        subscribe(client, f"own/{number}", 1)
        for topic_filter in filters:
            subscribe(client, topic_filter, 1, identifier=number + 1)
        client.unsubscribe("#")
        client.disconnect()
    home.connect("v", clean=True).disconnect()
    home.crash()
    publisher = home.connect("p")
    for number in range(len(names)):
        publisher.publish(f"own/{number}", b"%d" % number, 1)
    for topic in ("a", "a/b", "/", "//", "x"):
        publisher.publish(topic, b"", 1)
    assert not session_present(home.lasting("v"))
    for number, name in enumerate(names[1:], 1):
        found = drained(home.back(name))
        assert [(f"own/{number}", b"%d" % number)] == [(m.topic, m.payload) for m in found if m.payload]
        others = [message for message in found if not message.payload]
        assert {"a", "a/b", "/", "//"} == {message.topic for message in others}
        assert all({number + 1} == {*message.prop_all(SUBSCRIPTION_ID)} for message in others)


def test_everything_in_one_write(home: Home) -> None:
    """A client need not wait for CONNACK; that comes first, and what was asked for is in the store."""
    home.start()
    for version in VERSIONS:
        for number in range(10):
            client = home.client(version)
            client.send(
                connect_packet(f"s{version}-{number}", **lasting(version))
                + subscribe_packet(1, [(f"t{version}", 1)], version=version)
                + publish_packet("nobody", b"x", version=version, qos=1, packet_id=2)
                + PINGREQ
            )
            assert CONNACK == client.recv().type
            assert {SUBACK, PUBACK, PINGRESP} == {client.recv().type for _ in range(3)}
            client.send(disconnect_packet(version=version))
    home.settle()
    home.crash()
    for version in VERSIONS:
        home.connect("p").publish(f"t{version}", b"x", 1)
        for number in range(10):
            assert [b"x"] == payloads(drained(home.back(f"s{version}-{number}", version)))


def test_a_crowd_with_one_name(home: Home) -> None:
    """Connections of one client id at the same moment: each is answered or closed, one stays, the session is whole."""
    home.start()
    home.absent("s", 5, ("t", 1))
    for _ in range(3):
        crowd = [home.client() for _ in range(8)]
        for client in crowd:
            client.send(connect_packet("s", **lasting(5)))
        answered = [client for client in crowd if accepted(client)]  # of all of them: nobody comes in behind another
        open_ones = [client for client in answered if stays(client)]
        assert len(open_ones) == 1
        home.connect("p").publish("t", b"x", 1)
        assert b"x" == open_ones[0].receive().payload
    home.connect("p").publish("t", b"last", 1)
    home.crash()
    assert [b"last"] == payloads(drained(home.back("s")))


def accepted(client: Client) -> bool:
    """Whether a client that has sent CONNECT is let in, for however short a time."""
    try:
        answer = client.recv()
    except Closed:
        return False
    assert (CONNACK, 0, True) == (answer.type, answer.reason, answer.session_present)
    return True


def stays(client: Client) -> bool:
    """Whether a client that was let in has not been taken over by another."""
    client.send(PINGREQ)
    try:
        answer = client.recv()
    except Closed:
        return False
    if answer.type == DISCONNECT:
        assert TAKEN_OVER == answer.reason
        return False
    assert PINGRESP == answer.type
    return True


# --- messages -----------------------------------------------------------------------------------------------------


@on_every_store
def test_every_property_of_a_message_is_back(home: Home) -> None:
    """In the order of the publisher where an order means something; the expiry lowered by the time that has passed."""
    home.start()
    client = home.lasting("s")
    subscribe(client, "t/#", 2, 7)
    subscribe(client, "t/+", 1 | RETAIN_AS_PUBLISHED, 9)
    client.disconnect()
    pairs = [("b", "2"), ("a", "1"), ("b", "2"), ("", ""), ("ü", "車🚗")]
    home.connect("p").publish(
        "t/x",
        "grün".encode(),
        1,
        retain=True,
        properties=prop(PAYLOAD_FORMAT, 1)
        + prop(MESSAGE_EXPIRY, 1000)
        + prop(CONTENT_TYPE, "text/plain")
        + prop(RESPONSE_TOPIC, "answers/s")
        + prop(CORRELATION_DATA, bytes(range(256)))
        + b"".join(prop(USER_PROPERTY, pair) for pair in pairs),
    )
    let_pass(1.1)
    home.crash()
    copies = drained(home.back("s"))
    assert copies
    assert [7, 9] == sorted(number for copy in copies for number in copy.prop_all(SUBSCRIPTION_ID))
    assert any(copy.retain for copy in copies), "one of the subscriptions asked for the flag as published"
    for copy in copies:
        assert ("t/x", "grün".encode()) == (copy.topic, copy.payload)
        assert 1 == copy.prop(PAYLOAD_FORMAT)
        assert "text/plain" == copy.prop(CONTENT_TYPE)
        assert "answers/s" == copy.prop(RESPONSE_TOPIC)
        assert bytes(range(256)) == copy.prop(CORRELATION_DATA)
        assert pairs == copy.prop_all(USER_PROPERTY)
        assert 0 < copy.prop(MESSAGE_EXPIRY) < 1000


def test_payloads_of_all_sizes_are_back(home: Home) -> None:
    """Empty, small enough to lie beside the entry, large enough to lie elsewhere, and twice the same."""
    home.start()
    home.absent("s", 4, ("t", 1))
    sent = [b"", b"a", bytes(range(256)), b"b" * 257, b"c" * 5000, b"c" * 5000, random.Random(1).randbytes(300_000)]
    publisher = home.connect("p", 4)
    for payload in sent:
        publisher.publish("t", payload, 1)
    home.crash()
    assert sent == payloads(drained(home.back("s", 4)))


@on_every_store
def test_a_backlog_of_large_messages_comes_whole(home: Home) -> None:
    """More of them than are read ahead, each larger than what is fetched at once; after a crash and without one."""
    home.start()
    home.absent("s", 5, ("t", 1))
    rest = random.Random(2)
    sent = [rest.randbytes(300 * 1024) for _ in range(20)]
    publisher = home.connect("p", 5)
    for payload in sent:
        publisher.publish("t", payload, 1)
    assert sent == payloads(drained(home.back("s", 5)))
    home.absent("s", 5, ("t", 1))
    for payload in reversed(sent):
        publisher.publish("t", payload, 1)
    home.crash()
    assert sent[::-1] == payloads(drained(home.back("s", 5)))


def test_messages_expire_while_the_node_is_down(home: Home) -> None:
    """An expired one does not come; those around it do."""
    home.start()
    home.absent("s", 5, ("t", 1))
    publisher = home.connect("p")
    for payload, expiry in ((b"long", 1000), (b"short", 1), (b"for ever", 0)):
        publisher.publish("t", payload, 1, properties=prop(MESSAGE_EXPIRY, expiry) if expiry else b"")
    home.kill()
    let_pass(1.2)
    home.start()
    assert [b"long", b"for ever"] == payloads(drained(home.back("s")))


def test_sessions_expire_while_the_node_is_down(home: Home) -> None:
    """One that was away long enough is gone with its messages; one that was connected has its time from the start."""
    home.start()
    brief: dict[str, Any] = {"clean": False, "properties": prop(SESSION_EXPIRY, 1)}
    longer: dict[str, Any] = {"clean": False, "properties": prop(SESSION_EXPIRY, 5)}  # for a machine that starts slowly
    for name, expiry in (("away", brief), ("connected", longer), ("late", brief)):
        subscribe(home.connect(name, **expiry), "t", 1)
    home.connect("p").publish("t", b"x", 1)
    home.connect("away", **brief).disconnect()
    home.settle()
    home.kill()
    let_pass(5.2)
    home.start()
    assert session_present(connected := home.connect("connected", **longer))
    assert [b"x"] == payloads(drained(connected))
    away = home.connect("away", **brief)
    assert not session_present(away)
    subscribe(away, "t", 1)
    assert [] == drained(away)
    let_pass(1.2)
    assert not session_present(home.connect("late", **brief))


def test_the_session_expiry_of_disconnect_counts_after_a_crash(home: Home) -> None:
    """DISCONNECT may shorten what CONNECT has said, and the store knows."""
    home.start()
    client = home.lasting("s")
    subscribe(client, "t", 1)
    client.disconnect(0, prop(SESSION_EXPIRY, 1))
    home.settle()
    home.kill()
    let_pass(1.2)
    home.start()
    assert not session_present(home.lasting("s"))


def test_a_full_queue_is_bounded_in_the_store(home: Home) -> None:
    """The oldest QoS 0 messages go first, then the oldest; what went is counted, and is gone after a crash too."""
    home.start("[session]\nqueue = 10\n")
    for version in VERSIONS:
        home.absent(f"s{version}", version, ("t", 1))
    publisher = home.connect("p")
    publish_many(publisher, "t", numbered(5), 1)
    publish_many(publisher, "t", [b"idle"] * 3, 0)
    publish_many(publisher, "t", numbered(7, start=5), 1)
    assert 10 == dropped(home, "queue_full")
    home.crash()
    for version in VERSIONS:
        assert numbered(10, start=2) == payloads(drained(home.back(f"s{version}", version)))


def test_qos_0_waits_in_its_place_and_goes_first(home: Home) -> None:
    """What is left of the QoS 0 messages comes in between the others."""
    home.start("[session]\nqueue = 10\n")
    home.absent("s", 5, ("t", 1))
    publisher = home.connect("p")
    publish_many(publisher, "t", numbered(4), 1)
    publish_many(publisher, "t", [b"idle-1", b"idle-2", b"idle-3"], 0)
    publish_many(publisher, "t", numbered(5, start=4), 1)
    home.restart()
    assert [*numbered(4), b"idle-3", *numbered(5, start=4)] == payloads(drained(home.back("s")))


def test_a_queue_bounded_in_bytes(home: Home) -> None:
    """The newest messages that fit are there, however many restarts lie between."""
    home.start("[session]\nqueue_bytes = 100000\n")
    home.absent("s", 5, ("t", 1))
    sent = [b"%d" % number * 30_000 for number in range(6)]
    for number, payload in enumerate(sent):
        home.connect("p").publish("t", payload, 1)
        if number == 3:
            home.crash()
    assert sent[3:] == payloads(drained(home.back("s")))


@on_every_store
def test_thousands_of_messages_are_drained_in_order(home: Home) -> None:
    """Many times the window and more than a node reads at once."""
    home.start("[session]\nqueue = 10000\nwindow = 32\n")
    for version in VERSIONS:
        home.absent(f"s{version}", version, ("t", 1))
    publish_many(home.connect("p"), "t", numbered(5000), 1)
    home.crash()
    for version in VERSIONS:
        assert numbered(5000) == payloads(drained(home.back(f"s{version}", version)))


def test_new_messages_stand_behind_those_that_wait(home: Home) -> None:
    """While a long queue is drained further messages come in; the order is that of publishing."""
    home.start("[session]\nqueue = 2000\nwindow = 8\n")
    home.absent("s", 5, ("t", 1))
    publish_many(home.connect("p"), "t", numbered(300), 1)
    home.crash()
    back, publisher = home.back("s"), home.connect("p")
    seen: list[bytes] = []
    for start in range(300, 600, 10):
        publish_many(publisher, "t", numbered(10, start=start), 1)
        seen += [back.receive().payload for _ in range(7)]
    seen += payloads(drained(back))
    assert numbered(600) == seen


# --- in flight ----------------------------------------------------------------------------------------------------


@on_every_store
@both_ends
def test_what_was_not_acknowledged_comes_again_with_its_id(home: Home, end: str) -> None:
    """Messages without PUBACK are repeated with DUP and their packet id, in order; the others are not."""
    home.start()
    first: dict[int, list[Packet]] = {}
    for version in VERSIONS:
        subscriber = home.lasting(f"s{version}", version)
        subscribe(subscriber, f"t{version}", 1)
        publish_many(home.connect("p", version), f"t{version}", numbered(10), 1)
        first[version] = [subscriber.expect(PUBLISH) for _ in range(10)]
        assert not any(message.dup for message in first[version])
        for index in (0, 1, 2, 5, 9):
            acknowledge(subscriber, first[version][index])
        subscriber.expect_nothing()  # the node has read them
    home.settle()
    home.again(end)
    for version in VERSIONS:
        expected = [first[version][index] for index in (3, 4, 6, 7, 8)]
        back = home.back(f"s{version}", version)
        again = drained(back)
        assert [(m.packet_id, m.payload, True) for m in expected] == [(m.packet_id, m.payload, m.dup) for m in again]


def test_what_the_client_has_seen_before_has_dup(home: Home) -> None:
    """Many windows are sent and acknowledged, the node is killed: what comes again says so. [MQTT-3.3.1-1]"""
    home.start()
    for version in VERSIONS:
        home.absent(f"s{version}", version, ("t", 1))
    publish_many(home.connect("p"), "t", numbered(400), 1)
    for version in VERSIONS:
        client = home.back(f"s{version}", version)
        seen = {client.receive().payload for _ in range(300)}
        os.kill(home.node.pid, signal.SIGKILL)
        seen.update(packet.payload for packet in client.expect_closed())
        home.crash()
        again = drained(home.back(f"s{version}", version))
        assert numbered(400)[-len(again) :] == payloads(again)
        assert [] == [message.payload for message in again if message.payload in seen and not message.dup]


@pytest.mark.parametrize("most", [1, 10])
def test_the_receive_maximum_is_kept_after_a_crash(home: Home, most: int) -> None:
    """Never more in flight than the client takes, with more waiting than that; every acknowledgement lets one pass."""
    home.start()
    quota = prop(RECEIVE_MAXIMUM, most)
    subscriber = home.lasting("s", 5, quota)
    subscribe(subscriber, "t", 1)
    publish_many(home.connect("p"), "t", numbered(30), 1)
    first = [subscriber.expect(PUBLISH) for _ in range(most)]
    subscriber.expect_nothing()
    home.crash()
    back = home.back("s", 5, quota)
    in_flight = [back.expect(PUBLISH) for _ in range(most)]
    home.settle()
    back.expect_nothing()
    assert [(m.packet_id, m.payload, True) for m in first] == [(m.packet_id, m.payload, m.dup) for m in in_flight]
    for payload in numbered(30 - most, start=most):
        acknowledge(back, in_flight.pop(0))
        in_flight.append(back.expect(PUBLISH))
        assert payload == in_flight[-1].payload
        back.expect_nothing()
        ids = [message.packet_id for message in in_flight]
        assert len(ids) == len(set(ids))


def test_a_smaller_receive_maximum_after_a_crash(home: Home) -> None:
    """What was in flight is more than the client takes now; it comes in the same order, a few at a time."""
    home.start()
    subscriber = home.lasting("s")
    subscribe(subscriber, "t", 1)
    publish_many(home.connect("p"), "t", numbered(20), 1)
    first = {message.payload: message.packet_id for message in (subscriber.expect(PUBLISH) for _ in range(20))}
    home.crash()
    back = home.back("s", 5, prop(RECEIVE_MAXIMUM, 3))
    seen: list[Packet] = []
    while len(seen) < 20:
        some = [back.expect(PUBLISH) for _ in range(min(3, 20 - len(seen)))]
        back.expect_nothing()
        for message in some:
            acknowledge(back, message)
        seen += some
    assert list(first.items()) == [(message.payload, message.packet_id) for message in seen]
    assert all(message.dup for message in seen)


def test_acknowledging_what_was_not_sent_removes_nothing(home: Home) -> None:
    """Packet ids that are not in flight mean nothing, though messages wait that will have them."""
    home.start()
    for version in VERSIONS:
        home.absent(f"s{version}", version, ("t", 2))
    publisher = home.connect("p")
    for number in range(60):
        publisher.publish("t", b"%05d" % number, 1 + number % 2)
    home.crash()
    for version in VERSIONS:
        hasty = home.back(f"s{version}", version)
        first = hasty.expect(PUBLISH).packet_id or 0
        for kind in (PUBACK, PUBREC, PUBCOMP):
            for number in range(40, 60):
                hasty.send(ack_packet(kind, first + number, version=version))
        hasty.send(disconnect_packet(version=version))
        hasty.expect_closed()
    home.settle()
    home.crash()
    for version in VERSIONS:
        assert numbered(60) == payloads(drained(home.back(f"s{version}", version)))


@embedded
@pytest.mark.slow
def test_packet_ids_are_never_used_twice_at_once(home: Home) -> None:
    """One message is not acknowledged while so many pass that all ids have been used."""
    home.start("[session]\nqueue = 100000\nqueue_bytes = 0\n")
    home.absent("s", 4, ("t", 1))
    publisher = home.connect("p", 4)
    count = 66_000
    for start in range(0, count, 1000):
        some = range(start, start + 1000)
        publisher.send(
            b"".join(publish_packet("t", b"%05d" % n, version=4, qos=1, packet_id=n - start + 1) for n in some)
        )
        for _ in some:
            publisher.expect(PUBACK)
    client = home.back("s", 4)
    kept: Packet | None = client.expect(PUBLISH)
    assert kept is not None
    seen = [kept]
    while len(seen) < count:
        try:
            seen.append(client.expect(PUBLISH, timeout=3 if kept is not None else PATIENCE))
        except TimeoutError:  # it may as well wait until the id is free
            assert kept is not None, "nothing more comes"
            acknowledge(client, kept)
            kept = None
            continue
        assert kept is None or kept.packet_id != seen[-1].packet_id, f"the id is in use, message {len(seen)}"
        acknowledge(client, seen[-1])
    assert numbered(count) == payloads(seen)


def test_a_take_over_in_the_middle_of_a_delivery(home: Home) -> None:
    """The new connection gets what the old one has not acknowledged, and then the rest; once each."""
    home.start("[session]\nwindow = 10\n")
    for version in VERSIONS:
        home.absent(f"s{version}", version, ("t", 1))
    publish_many(home.connect("p"), "t", numbered(100), 1)
    for version in VERSIONS:
        seen: list[bytes] = []
        for _ in range(4):
            client = home.back(f"s{version}", version)
            seen += [client.receive().payload for _ in range(7)]
            client.expect(PUBLISH)  # and not acknowledged
            client.send(PINGREQ)  # the acknowledgements before it have been read when it is answered
            client.await_answer(PINGRESP, None)
        client = home.back(f"s{version}", version)
        seen += payloads(drained(client))
        assert numbered(100) == seen


def test_a_take_over_leaves_one_owner(home: Home) -> None:
    """After two clients took the session from each other and the node was killed, the last one has it."""
    home.start()
    subscribe(first := home.lasting("s"), "t", 1)
    second = home.back("s")
    assert [TAKEN_OVER] == [packet.reason for packet in first.expect_closed()]
    home.connect("p").publish("t", b"x", 1)
    assert b"x" == second.expect(PUBLISH).payload
    home.crash()
    assert [(b"x", True)] == [(m.payload, m.dup) for m in drained(home.back("s"))]


@both_ends
def test_a_client_comes_back_with_another_version(home: Home, end: str) -> None:
    """A session is the same session for MQTT 3.1.1 and 5; properties are left out where they cannot be said."""
    home.start()
    home.absent("up", 4, ("t", 1))
    home.absent("down", 5, ("t", 1))
    home.connect("p").publish("t", b"x", 1, properties=prop(CONTENT_TYPE, "a/b") + prop(USER_PROPERTY, ("k", "v")))
    home.again(end)
    (up,) = drained(home.back("up", 5))
    assert (b"x", "a/b", [("k", "v")]) == (up.payload, up.prop(CONTENT_TYPE), up.prop_all(USER_PROPERTY))
    down = home.back("down", 4)
    assert [b"x"] == payloads(drained(down))
    home.again(end)
    home.connect("p").publish("t", b"y", 1)
    assert [b"y"] == payloads(drained(home.back("up", 4)))
    assert [b"y"] == payloads(drained(home.back("down", 5)))


def test_a_client_comes_back_with_a_smaller_maximum_packet_size(home: Home) -> None:
    """What it cannot take is dropped as if it had been delivered: counted, and gone for good. [MQTT-3.1.2-25]"""
    home.start()
    home.absent("s", 5, ("t", 1))
    publish_many(home.connect("p"), "t", [b"1", b"2" * 1000, b"3", b"4" * 1000, b"5"], 1)
    home.crash()
    small = home.back("s", 5, prop(MAXIMUM_PACKET_SIZE, 100))
    assert [b"1", b"3", b"5"] == payloads(drained(small))
    assert 2 == dropped(home, "too_large")
    home.connect("p").publish("t", b"6", 1)
    small.receive()
    small.expect_nothing()  # the node has read the PUBACK
    home.settle()
    home.crash()
    assert [] == drained(home.back("s"))


# --- what a PUBACK means ------------------------------------------------------------------------------------------


@on_every_store
@both_ends
def test_what_was_acknowledged_is_there(home: Home, end: str) -> None:
    """Ended at once after some PUBACK of many messages under way: all acknowledged ones are there, each once."""
    home.start("[session]\nqueue = 100000\n")
    home.absent("s", 5, ("t", 1))
    chance = random.Random(1)
    sent = 0
    acknowledged: list[bytes] = []
    for number in range(5 if (home.kind, end) == ("rocksdb", "SIGKILL") else 2):
        publisher = home.connect(f"p{number % 2}", 4 + number % 2)
        wanted = numbered(90, start=sent)
        sent += len(wanted)
        raw = [
            publish_packet("t", payload, version=publisher.version, qos=1, packet_id=index)
            for index, payload in enumerate(wanted, 1)
        ]
        publisher.send(b"".join(raw))
        for index in range(1, chance.randint(1, 80) + 1):
            assert index == publisher.expect(PUBACK).packet_id
            acknowledged.append(wanted[index - 1])
        os.kill(home.node.pid, signal.Signals[end])
        # What has left the node before its end counts too.
        answers = [packet for packet in publisher.expect_closed() if packet.type == PUBACK and not packet.reason]
        acknowledged += [wanted[(packet.packet_id or 0) - 1] for packet in answers]
        assert home.node.process is not None
        home.node.process.wait(STOP_PATIENCE)
        home.again(end)
    seen = payloads(drained(home.back("s")))
    assert sorted(set(seen)) == seen, "out of order, or twice"
    assert [] == sorted(set(acknowledged) - set(seen))


def test_acknowledgements_come_in_the_order_of_the_messages(home: Home) -> None:
    """Whoever the messages go to: lasting sessions, away or not, others, or nobody. [MQTT-4.6.0-2] [MQTT-4.6.0-3]"""
    home.start()
    home.absent("away", 5, ("kept/#", 2))
    subscribe(home.lasting("online", 4), "kept/#", 1)
    subscribe(home.connect("brief"), "+/live", 2)
    topics = ("kept/live", "no/body", "any/live", "kept/one", "nobody")
    for version in VERSIONS:
        publisher = home.connect("p", version)
        raw = [
            publish_packet(topics[number % 5], b"x", version=version, qos=1 + number % 2, packet_id=number)
            for number in range(1, 91)
        ]
        publisher.send(b"".join(raw))
        answers = [publisher.recv() for _ in range(90)]
        assert list(range(2, 91, 2)) == [answer.packet_id for answer in answers if answer.type == PUBACK]
        assert list(range(1, 91, 2)) == [answer.packet_id for answer in answers if answer.type == PUBREC]
        if version == 5:
            unheard = [answer.packet_id for answer in answers if answer.reason == NO_MATCHING_SUBSCRIBERS]
            assert [n for n in range(1, 91) if topics[n % 5] in ("no/body", "nobody")] == sorted(filter(None, unheard))


@both_ends
def test_receivers_of_every_kind_get_the_same_message(home: Home, end: str) -> None:
    """Lasting and connected, lasting and away, and one whose session ends with its connection."""
    home.start()
    home.absent("away", 5, ("t", 1))
    online, brief, zero = home.lasting("online", 4), home.connect("brief"), home.lasting("zero")
    subscribe(online, "t", 1)
    subscribe(brief, "t", 1)
    subscribe(zero, "t", 0)
    publisher = home.connect("p")
    for qos in (0, 1, 2):
        publish_many(publisher, "t", numbered(20, start=100 * qos), qos)
    # Only what has the same QoS stays in order beside the others. [MQTT-4.6.0-6]
    sent = [numbered(20, start=100 * qos) for qos in (0, 1, 2)]
    for client in (online, brief, zero):
        seen = payloads(drained(client))
        assert sent == [[payload for payload in seen if payload[2] - ord("0") == qos] for qos in (0, 1, 2)]
    publish_many(publisher, "t", [b"end"], 1)
    home.again(end)
    waiting = payloads(drained(home.back("away")))
    assert [*sent[1], *sent[2], b"end"] == [payload for payload in waiting if payload not in sent[0]]
    assert [b"end"] == payloads(drained(home.back("online", 4)))
    assert not session_present(home.lasting("brief"))
    home.back("zero")


def test_the_subscriber_gets_its_own_messages_through_the_store(home: Home) -> None:
    """A client that publishes to itself, in a pipeline, gets answers and messages, each in order."""
    home.start()
    client = home.lasting("s")
    subscribe(client, "t", 1)
    client.send(b"".join(publish_packet("t", b"%05d" % n, qos=1, packet_id=n) for n in range(1, 31)))
    found = [client.recv() for _ in range(60)]
    assert list(range(1, 31)) == [packet.packet_id for packet in found if packet.type == PUBACK]
    messages = [packet for packet in found if packet.type == PUBLISH]
    assert numbered(30, start=1) == payloads(messages)
    home.crash()
    back = home.back("s")
    again = drained(back)
    assert [(m.packet_id, m.payload, True) for m in messages] == [(m.packet_id, m.payload, m.dup) for m in again]


def test_subscribe_and_unsubscribe_are_answered_in_order_with_messages(home: Home) -> None:
    """SUBSCRIBE, PUBLISH to it and PINGREQ in one write: the subscription is in force for the message."""
    home.start()
    for version in VERSIONS:
        client = home.lasting(f"s{version}", version)
        client.send(
            subscribe_packet(1, [(f"t{version}", 1)], version=version)
            + publish_packet(f"t{version}", b"x", version=version, qos=1, packet_id=2)
            + PINGREQ
        )
        found = [client.recv() for _ in range(4)]
        assert [b"x"] == [packet.payload for packet in found if packet.type == PUBLISH]
        assert {1, 2} <= {packet.packet_id for packet in found}


def test_a_publisher_that_leaves_at_once_is_still_heard(home: Home) -> None:
    """PUBLISH and DISCONNECT in one write, also for a client whose session ends with that."""
    home.start()
    home.absent("s", 4, ("t", 1))
    for version in VERSIONS:
        publisher = home.connect("p", version)
        publisher.send(publish_packet("t", b"%d" % version, version=version, qos=1, packet_id=1))
        publisher.disconnect()
    back = home.back("s", 4)
    assert [b"4", b"5"] == [back.receive().payload for _ in VERSIONS]


# --- retained messages --------------------------------------------------------------------------------------------


def test_retained_messages_are_back(home: Home) -> None:
    """What was acknowledged is there after a kill, what was deleted or replaced is not."""
    home.start()
    publisher = home.connect("p")
    for topic, payload in (("r/a", b"1"), ("r/b", b"2"), ("r/c", b"3"), ("r/b", b""), ("r/c", b"4")):
        publisher.publish(topic, payload, 1, retain=True, properties=prop(USER_PROPERTY, ("k", "v")))
    home.crash()
    client = home.connect("s")
    subscribe(client, "r/#", 1)
    found = drained(client)
    assert {("r/a", b"1", True), ("r/c", b"4", True)} == {(m.topic, m.payload, m.retain) for m in found}
    assert all([("k", "v")] == message.prop_all(USER_PROPERTY) for message in found)


def test_deleted_retained_messages_stay_deleted(home: Home) -> None:
    """Deleted in one life, gone in all that follow."""
    home.start()
    home.connect("p").publish("r", b"x", 1, retain=True)
    home.crash()
    home.connect("p").publish("r", b"", 1, retain=True)
    for _ in range(2):
        home.crash()
        client = home.connect("s")
        subscribe(client, "r", 1)
        assert [] == drained(client)


def test_expired_retained_messages_are_gone(home: Home) -> None:
    """The time while no node runs counts."""
    home.start()
    for topic, expiry in (("r/short", 1), ("r/long", 1000)):
        home.connect("p").publish(topic, b"x", 1, retain=True, properties=prop(MESSAGE_EXPIRY, expiry))
    home.kill()
    let_pass(1.2)
    home.start()
    client = home.connect("s")
    subscribe(client, "r/#", 1)
    (message,) = drained(client)
    assert "r/long" == message.topic
    assert 0 < message.prop(MESSAGE_EXPIRY) < 1000


# --- figures ------------------------------------------------------------------------------------------------------


def test_the_metrics_know_who_is_back(home: Home) -> None:
    """Sessions and subscriptions that came from the store are counted like any others."""
    home.start()
    for number in range(5):
        home.absent(f"s{number}", 5, ("t", 1), (f"t/{number}", 1))
    home.crash()

    def counted() -> bool:
        seen = metrics(home.node)
        return (5, 10, 0) == tuple(
            int(seen[f"motorcade_{name}"]) for name in ("sessions", "subscriptions", "clients_connected")
        )

    wait_until(counted, "five sessions with ten subscriptions, nobody connected")
