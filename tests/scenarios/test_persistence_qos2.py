"""Exactly once, although the node is killed in the middle: each step of QoS 2, from publishers and to subscribers."""

from __future__ import annotations

import random

import pytest

from tests.support.flows import (
    MESSAGE_EXPIRY,
    PACKET_ID_NOT_FOUND,
    acknowledge,
    let_pass,
    numbered,
    payloads,
    publish_many,
)
from tests.support.stores import Home, both_ends, drained, on_every_store, session_present, subscribe
from tests.support.wire import (
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    Client,
    Closed,
    Packet,
    ack_packet,
    prop,
    publish_packet,
)

VERSIONS = (4, 5)
NO_MATCHING_SUBSCRIBERS = 0x10


def offer(client: Client, topic: str, payload: bytes, number: int, *, dup: bool = False) -> Packet:
    """PUBLISH; the PUBREC."""
    client.send(publish_packet(topic, payload, version=client.version, qos=2, packet_id=number, dup=dup))
    answer = client.await_answer(PUBREC, number)
    assert answer.reason in (None, 0, NO_MATCHING_SUBSCRIBERS), f"PUBREC 0x{answer.reason:02x}"
    return answer


def release(client: Client, number: int, *allowed: int) -> None:
    """PUBREL; the PUBCOMP says that the id was known, or one of the reasons that are allowed."""
    client.send(ack_packet(PUBREL, number, version=client.version))
    answer = client.await_answer(PUBCOMP, number)
    assert answer.reason in (None, 0, *allowed), f"PUBCOMP 0x{answer.reason:02x}"


def answer(client: Client, kind: int, message: Packet) -> None:
    """PUBREC or PUBCOMP to a message."""
    client.send(ack_packet(kind, message.packet_id or 0, version=client.version))


# --- from publishers ----------------------------------------------------------------------------------------------


@on_every_store
@both_ends
def test_a_repeated_message_is_delivered_once(home: Home, end: str) -> None:
    """PUBREC, end of the node, the same PUBLISH with DUP: answered again, not delivered again; then released."""
    home.start()
    home.absent("s", 5, ("t/#", 2))
    for version in VERSIONS:
        offer(home.lasting(f"p{version}", version), f"t/{version}", b"once", 7)
    home.again(end)
    for version in VERSIONS:
        publisher = home.back(f"p{version}", version)
        offer(publisher, f"t/{version}", b"once", 7, dup=True)
        release(publisher, 7)
    back = home.back("s")
    assert [("t/4", b"once"), ("t/5", b"once")] == [(m.topic, m.payload) for m in drained(back)]


@both_ends
def test_a_message_can_be_released_after_the_end_of_the_node(home: Home, end: str) -> None:
    """PUBREC, end of the node, PUBREL: the id is still known, and free after that."""
    home.start()
    home.absent("s", 5, ("t", 2))
    for version in VERSIONS:
        offer(home.lasting(f"p{version}", version), "t", b"first", 7)
    home.again(end)
    for version in VERSIONS:
        publisher = home.back(f"p{version}", version)
        release(publisher, 7)
        offer(publisher, "t", b"second", 7)
        release(publisher, 7)
    assert [b"first"] * 2 + [b"second"] * 2 == payloads(drained(home.back("s")))


def test_a_completed_id_is_free_after_a_kill(home: Home) -> None:
    """After PUBCOMP the id names the next message, whatever happened to the node since."""
    home.start()
    home.absent("s", 5, ("t", 2))
    for version in VERSIONS:
        publisher = home.lasting(f"p{version}", version)
        offer(publisher, "t", b"first", 7)
        release(publisher, 7)
    home.crash()
    for version in VERSIONS:
        publisher = home.back(f"p{version}", version)
        offer(publisher, "t", b"second", 7)
        release(publisher, 7)
    assert [b"first"] * 2 + [b"second"] * 2 == payloads(drained(home.back("s")))


def test_a_repeated_message_is_known_even_if_nobody_lasting_got_it(home: Home) -> None:
    """The id is kept for its own sake: who has subscribed meanwhile does not get the repetition."""
    home.start()
    for version in VERSIONS:
        offer(home.lasting(f"p{version}", version), "t", b"old", 1)
    home.crash()
    subscriber = home.connect("s")
    subscribe(subscriber, "t", 2)
    for version in VERSIONS:
        publisher = home.back(f"p{version}", version)
        offer(publisher, "t", b"old", 1, dup=True)
        release(publisher, 1)
        publisher.publish("t", b"new", 2)
    assert [b"new"] * 2 == payloads(drained(subscriber))


def test_a_discarded_session_forgets_its_ids(home: Home) -> None:
    """After a clean start the same id is a new message, also if the node was killed in between."""
    home.start()
    home.absent("s", 5, ("t", 2))
    for version in VERSIONS:
        offer(home.lasting(f"p{version}", version), "t", b"first", 7)
        home.connect(f"p{version}", version, clean=True)
    home.crash()
    for version in VERSIONS:
        publisher = home.lasting(f"p{version}", version)
        assert not session_present(publisher)
        offer(publisher, "t", b"second", 7)
        release(publisher, 7)
    assert [b"first"] * 2 + [b"second"] * 2 == payloads(drained(home.back("s")))


def test_each_of_many_messages_goes_on_where_it_was(home: Home) -> None:
    """Offered, released or completed before the crash; all are delivered once, in the order of the first PUBLISH."""
    home.start()
    home.absent("s", 4, ("t", 2))
    for version in VERSIONS:
        publisher = home.lasting(f"p{version}", version)
        for number in range(1, 31):
            offer(publisher, "t", b"%d-%02d" % (version, number), number)
        for number in range(1, 11):
            release(publisher, number)
    home.crash()
    for version in VERSIONS:
        publisher = home.back(f"p{version}", version)
        for number in range(21, 31):
            offer(publisher, "t", b"%d-%02d" % (version, number), number, dup=True)
        for number in range(11, 31):
            release(publisher, number)
        for number in range(1, 31):
            offer(publisher, "t", b"%d+%02d" % (version, number), number)
    seen = payloads(drained(home.back("s", 4)))
    for version in VERSIONS:
        expected = [b"%d%c%02d" % (version, sign, number) for sign in b"-+" for number in range(1, 31)]
        assert expected == [payload for payload in seen if payload.startswith(b"%d" % version)]


@on_every_store
def test_killed_between_publish_and_pubrec(home: Home) -> None:
    """Whether or not the message had been stored: after the repetition it is there exactly once."""
    home.start()
    home.absent("s", 5, ("t", 2), ("u", 1))
    home.absent("other", 4, ("t", 2))
    chance = random.Random(2)
    tries = 6 if home.kind == "rocksdb" else 3
    for number in range(tries):
        version = VERSIONS[number % 2]
        publisher = home.lasting(f"p{version}", version)
        payload = b"%05d" % number
        publisher.send(publish_packet("t", payload, version=version, qos=2, packet_id=9))
        let_pass(chance.random() * 0.01)  # any moment will do
        home.crash()
        publisher = home.back(f"p{version}", version)
        offer(publisher, "t", payload, 9, dup=True)
        release(publisher, 9)
    assert numbered(tries) == payloads(drained(home.back("s")))
    assert numbered(tries) == payloads(drained(home.back("other", 4)))


def test_killed_between_pubrel_and_pubcomp(home: Home) -> None:
    """The repeated PUBREL is answered whether or not the id had been removed, and frees it."""
    home.start()
    home.absent("s", 5, ("t", 2))
    chance = random.Random(3)
    for number in range(4):
        version = VERSIONS[number % 2]
        publisher = home.lasting(f"p{version}", version)
        offer(publisher, "t", b"%05d" % number, 9)
        publisher.send(ack_packet(PUBREL, 9, version=version))
        let_pass(chance.random() * 0.005)  # any moment will do
        home.crash()
        release(home.back(f"p{version}", version), 9, PACKET_ID_NOT_FOUND)
    assert numbered(4) == payloads(drained(home.back("s")))


def test_killed_while_many_are_under_way(home: Home) -> None:
    """A publisher that goes on as the specification says: all its messages arrive once, in order."""
    home.start("[session]\nqueue = 10000\n")
    home.absent("s", 5, ("t", 2))
    home.lasting("p", 5)
    chance = random.Random(4)
    wanted = numbered(400)
    steps = dict.fromkeys(range(len(wanted)), PUBLISH)  # what to send next; what is done is taken out
    begun: set[int] = set()
    for _ in range(3):
        publisher = home.back("p")
        window = [number for number in steps if number < min(steps) + 80]
        for number in window:
            packet_id = number % 200 + 1
            if steps[number] == PUBLISH:
                publisher.send(publish_packet("t", wanted[number], qos=2, packet_id=packet_id, dup=number in begun))
                begun.add(number)
            else:
                publisher.send(ack_packet(PUBREL, packet_id))
        left = chance.randint(1, sum(2 if steps[number] == PUBLISH else 1 for number in window))
        while left:
            left -= 1
            take_step(publisher, publisher.recv(), steps)
        home.node.kill()
        while True:  # what had left the node before it died counts
            try:
                take_step(publisher, publisher.recv(), steps)
            except Closed:
                break
        home.kill()
        home.start()
    publisher = home.back("p")
    for number in list(steps):
        packet_id = number % 200 + 1
        if steps[number] == PUBLISH:
            offer(publisher, "t", wanted[number], packet_id, dup=number in begun)
        release(publisher, packet_id, PACKET_ID_NOT_FOUND)
    assert wanted == payloads(drained(home.back("s")))


def take_step(publisher: Client, found: Packet, steps: dict[int, int]) -> None:
    """Answer a PUBREC with PUBREL; after a PUBCOMP the message is done."""
    number = next(number for number in steps if number % 200 + 1 == found.packet_id)
    if found.type == PUBREC:
        assert (found.reason or 0) < 0x80
        steps[number] = PUBREL
        publisher.send(ack_packet(PUBREL, found.packet_id or 0))
    else:
        assert PUBCOMP == found.type, f"unexpected {found.name}"
        del steps[number]


# --- to subscribers -----------------------------------------------------------------------------------------------


@on_every_store
@both_ends
def test_each_delivery_goes_on_where_it_was(home: Home, end: str) -> None:
    """PUBLISH with DUP, or PUBREL, with the same id; nothing of what was completed, and each in its order."""
    home.start()
    first: dict[int, list[Packet]] = {}
    for version in VERSIONS:
        subscriber = home.lasting(f"s{version}", version)
        subscribe(subscriber, f"t{version}", 2)
        publish_many(home.connect("p", version), f"t{version}", numbered(9), 2)
        first[version] = [subscriber.expect(PUBLISH) for _ in range(9)]
        for index in (4, 2, 3, 5):
            answer(subscriber, PUBREC, first[version][index])
            assert first[version][index].packet_id == subscriber.expect(PUBREL).packet_id
        for index in (4, 5):
            answer(subscriber, PUBCOMP, first[version][index])
        subscriber.expect_nothing()  # the node has read them
    home.settle()
    for _ in range(2):  # the same again if nothing was answered
        home.again(end)
        for version in VERSIONS:
            back = home.back(f"s{version}", version)
            again = [back.recv() for _ in range(7)]
            assert [first[version][index].packet_id for index in (2, 3)] == sorted(
                packet.packet_id or 0 for packet in again if packet.type == PUBREL
            )
            assert [(first[version][i].packet_id, first[version][i].payload, True) for i in (0, 1, 6, 7, 8)] == [
                (packet.packet_id, packet.payload, packet.dup) for packet in again if packet.type == PUBLISH
            ]
    for version in VERSIONS:
        publish_many(home.connect("p", version), f"t{version}", [b"next"], 2)
        seen = [message.payload for message in drained(home.back(f"s{version}", version))]
        assert [b"00000", b"00001", b"00006", b"00007", b"00008", b"next"] == seen


def test_a_pubrec_without_its_pubrel(home: Home) -> None:
    """Killed at any moment after PUBREC: PUBLISH or PUBREL with the same id comes, never another id."""
    home.start()
    for number in range(4):
        version = VERSIONS[number % 2]
        subscriber = home.lasting("s", version)
        subscribe(subscriber, "t", 2)
        home.connect("p").publish("t", b"%05d" % number, 2)
        message = subscriber.expect(PUBLISH)
        answer(subscriber, PUBREC, message)
        let_pass(0.001 * number)  # any moment will do
        home.crash()
        back = home.back("s", version)
        found = back.recv()
        assert message.packet_id == found.packet_id
        if found.type == PUBLISH:
            assert (message.payload, True) == (found.payload, found.dup)
            answer(back, PUBREC, found)
            found = back.expect(PUBREL)
        assert (PUBREL, message.packet_id) == (found.type, found.packet_id)
        answer(back, PUBCOMP, found)
        assert [] == drained(back)


def test_a_refused_message_is_not_sent_again(home: Home) -> None:
    """PUBREC with an error ends the flow for good; so does PUBACK. [MQTT-4.3.3-4]"""
    home.start()
    subscriber = home.lasting("s")
    subscribe(subscriber, "t/2", 2)
    subscribe(subscriber, "t/1", 1)
    for qos in (1, 2):
        home.connect("p").publish(f"t/{qos}", b"x", qos)
        acknowledge(subscriber, subscriber.expect(PUBLISH), reason=0x83)
    subscriber.expect_nothing()
    home.settle()
    home.crash()
    assert [] == drained(home.back("s"))


def test_a_release_is_repeated_to_another_version(home: Home) -> None:
    """The state of a flow does not depend on the version that it began with."""
    home.start()
    first: dict[int, int] = {}
    for version in VERSIONS:
        subscriber = home.lasting(f"s{version}", version)
        subscribe(subscriber, f"t{version}", 2)
        publish_many(home.connect("p"), f"t{version}", [b"released", b"sent"], 2)
        released, _ = subscriber.expect(PUBLISH), subscriber.expect(PUBLISH)
        answer(subscriber, PUBREC, released)
        first[version] = subscriber.expect(PUBREL).packet_id or 0
    home.crash()
    for version in VERSIONS:
        back = home.back(f"s{version}", 9 - version)
        found = {packet.type: packet for packet in (back.recv(), back.recv())}
        assert first[version] == found[PUBREL].packet_id
        assert (b"sent", True) == (found[PUBLISH].payload, found[PUBLISH].dup)


def test_a_release_outlives_the_expiry_of_its_message(home: Home) -> None:
    """Expiry is for messages that were not delivered yet; this one only waits for its end. [MQTT-4.4.0-1]"""
    home.start()
    subscriber = home.lasting("s")
    subscribe(subscriber, "t", 2)
    home.connect("p").publish("t", b"x", 2, properties=prop(MESSAGE_EXPIRY, 1))
    message = subscriber.expect(PUBLISH)
    answer(subscriber, PUBREC, message)
    assert message.packet_id == subscriber.expect(PUBREL).packet_id
    home.kill()
    let_pass(1.2)
    home.start()
    back = home.back("s")
    assert message.packet_id == back.expect(PUBREL).packet_id
    answer(back, PUBCOMP, message)
    assert [] == drained(back)


@pytest.mark.parametrize("publisher_lasts", [True, False], ids=["lasting publisher", "brief publisher"])
def test_both_sides_over_two_crashes(home: Home, publisher_lasts: bool) -> None:
    """Publisher and subscriber finish what they began; the subscriber has seen each message once."""
    home.start()
    home.absent("s", 5, ("t", 2))
    publisher = home.lasting("p") if publisher_lasts else home.connect("p")
    for number in range(1, 6):
        offer(publisher, "t", b"%05d" % number, number)
    home.crash()
    if publisher_lasts:
        publisher = home.back("p")
        for number in range(1, 6):
            release(publisher, number)
    subscriber = home.back("s")
    known = {message.packet_id: message.payload for message in (subscriber.expect(PUBLISH) for _ in range(5))}
    for message in list(known)[:3]:
        subscriber.send(ack_packet(PUBREC, message or 0))
        subscriber.expect(PUBREL)
    home.crash()
    back = home.back("s")
    again = [back.recv() for _ in range(5)]
    assert {packet.packet_id for packet in again} == set(known)
    for packet in again:
        assert packet.type == PUBREL or known[packet.packet_id] == packet.payload
    assert numbered(5, start=1) == list(known.values())
