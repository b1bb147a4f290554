"""Section 3.3.5 of MQTT 3.1.1 and the errors of PUBACK and PUBREC: messages that the broker does not take."""

from __future__ import annotations

from tests.support.cases import both_versions, every_qos, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import (
    MAXIMUM_PACKET_SIZE,
    REASON_STRING,
    RECEIVE_MAXIMUM,
    USER_PROPERTY,
    payloads,
    receive_until,
)
from tests.support.wire import PUBACK, PUBREC, Address, Closed, Connect, prop, publish_packet

NOT_AUTHORIZED = 0x87
PAYLOAD_FORMAT_INVALID = 0x99

#: The plugin of talkative_plugin.py refuses what is published here, with many words.
WORDY = "talkative/refuse"


@both_versions
@every_qos
@clause(v3="MQTT-3.3.5-2", v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1"))
def test_a_message_without_permission_reaches_nobody(
    connect: Connect, name: str, talkative: Address, version: int, qos: int
) -> None:
    """3.1.1 acknowledges or closes, as it has no words for it; MQTT 5 says Not authorized. [MQTT-3.3.5-2]"""
    subscriber, good = connect(to=talkative), connect(to=talkative)
    subscriber.subscribe([("secret/#", 2), (name, 2)])
    bad = connect(version=version, to=talkative)
    bad.send(publish_packet(f"secret/{name}", b"forbidden", version=version, qos=qos, packet_id=1 if qos else None))
    if qos == 0:
        bad.send(b"\xc0\x00")
    try:
        answer = bad.recv()
    except Closed:
        assert version == 4, "an MQTT 5 client is told why"
    else:
        if qos:
            assert (1, PUBACK if qos == 1 else PUBREC) == (answer.packet_id, answer.type)
            assert version == 4 or answer.reason == NOT_AUTHORIZED
    good.publish(name, b"end", 2)
    assert [b"end"] == payloads(receive_until(subscriber, b"end"))


@clause(v5="MQTT-4.3.3-9")
def test_after_an_error_in_pubrec_the_packet_id_is_new(connect: Connect, name: str, talkative: Address) -> None:
    """A packet id that was refused begins a new message, which is delivered, even with DUP. [MQTT-4.3.3-9]"""
    subscriber, publisher = connect(to=talkative), connect(to=talkative)
    subscriber.subscribe(name, 2)
    for topic, reason in ((f"secret/{name}", NOT_AUTHORIZED), (WORDY, PAYLOAD_FORMAT_INVALID)):
        for dup in (False, True):
            publisher.send(publish_packet(topic, b"forbidden", qos=2, packet_id=7))
            answer = publisher.expect(PUBREC)
            assert (7, reason) == (answer.packet_id, answer.reason)
            publisher.publish(name, b"new", 2, packet_id=7, dup=dup)
    publisher.publish(name, b"end", 2)
    assert [b"new"] * 4 + [b"end"] == payloads(receive_until(subscriber, b"end"))


@qos_1_and_2
@clause(v5=("MQTT-3.3.4-7", "MQTT-4.9.0-3"))
def test_refused_messages_do_not_count(connect: Connect, name: str, talkative: Address, qos: int) -> None:
    """A refusal gives the place back at once: more than Receive Maximum of them end nothing. [MQTT-3.3.4-7]"""
    publisher = connect(to=talkative)
    assert publisher.connack is not None
    for number in range(1, publisher.connack.prop(RECEIVE_MAXIMUM) + 11):
        publisher.send(publish_packet(f"secret/{name}", qos=qos, packet_id=number))
        assert NOT_AUTHORIZED == publisher.expect(PUBACK if qos == 1 else PUBREC).reason
    publisher.publish(name, b"allowed", qos)


@qos_1_and_2
@clause(v5=("MQTT-3.4.2-2", "MQTT-3.4.2-3", "MQTT-3.5.2-2", "MQTT-3.5.2-3"))
def test_a_refusal_is_explained_as_far_as_it_fits(connect: Connect, talkative: Address, qos: int) -> None:
    """Reason String and User Properties are sent where they fit, and left out where they do not. [MQTT-3.4.2-2]"""
    for limit, explained in ((None, True), (100_000, True), (100, False)):
        properties = prop(MAXIMUM_PACKET_SIZE, limit) if limit else b""
        publisher = connect(to=talkative, properties=properties)
        publisher.send(publish_packet(WORDY, qos=qos, packet_id=1))
        answer = publisher.expect(PUBACK if qos == 1 else PUBREC)
        assert (1, PAYLOAD_FORMAT_INVALID) == (answer.packet_id, answer.reason)
        assert limit is None or len(answer.raw) <= limit
        assert explained == (answer.prop(REASON_STRING) is not None)
        assert (3 if explained else 0) == len(answer.prop_all(USER_PROPERTY))


@qos_1_and_2
@clause(v5=("MQTT-3.4.2-2", "MQTT-3.4.2-3", "MQTT-3.5.2-2", "MQTT-3.5.2-3"))
def test_no_refusal_is_larger_than_the_client_allows(connect: Connect, talkative: Address, qos: int) -> None:
    """At every limit around the sizes of its parts the answer fits and keeps its reason code. [MQTT-3.4.2-3]"""
    for limit in (24, 300, 308, 309, 320, 620, 900, 1200, 1240, 1250, 1260):
        publisher = connect(to=talkative, properties=prop(MAXIMUM_PACKET_SIZE, limit))
        publisher.send(publish_packet(WORDY, qos=qos, packet_id=1))
        answer = publisher.expect(PUBACK if qos == 1 else PUBREC)
        assert PAYLOAD_FORMAT_INVALID == answer.reason
        assert len(answer.raw) <= limit
