"""Section 4.3, the delivery protocols of QoS 0, 1 and 2, seen from both ends."""

from __future__ import annotations

from tests.support.cases import both_versions, each, each_row, every_version, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import (
    MESSAGE_EXPIRY,
    USER_PROPERTY,
    acknowledge,
    lasting,
    numbered,
    payloads,
    publish_many,
    receive_until,
)
from tests.support.refusals import PROTOCOL_ERROR, refused
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import (
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    Client,
    Connect,
    ack_packet,
    prop,
    publish_packet,
)

# --- QoS 0 --------------------------------------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-4.3.1-1", v5="MQTT-4.3.1-1")
def test_qos_0_is_sent_once_without_dup(connect: Connect, name: str, version: int) -> None:
    """A QoS 0 message goes out with QoS 0, DUP 0 and no packet id, and is not repeated. [MQTT-4.3.1-1]"""
    subscriber, publisher = connect(f"{name}-s", **lasting(version)), connect(version=version)
    subscriber.subscribe(name, 2)
    publisher.publish(name, b"once")
    message = subscriber.expect(PUBLISH)
    assert (b"once", 0, False, None) == (message.payload, message.qos, message.dup, message.packet_id)
    subscriber.close()
    again = connect(f"{name}-s", **lasting(version))
    publisher.publish(name, b"end")
    assert [b"end"] == payloads(receive_until(again, b"end"))


# --- packet ids, QoS 1 and 2 --------------------------------------------------------------------------------------


@every_version
@qos_1_and_2
@clause(
    v3=("MQTT-4.3.2-1", "MQTT-4.3.3-1", "MQTT-2.3.1-1", "MQTT-2.3.1-4"),
    v5=("MQTT-4.3.2-1", "MQTT-4.3.2-2", "MQTT-4.3.3-1", "MQTT-4.3.3-2", "MQTT-2.2.1-4"),
)
def test_messages_in_flight_have_packet_ids_of_their_own(connect: Connect, name: str, version: int, qos: int) -> None:
    """New messages go out with DUP 0 and packet ids that are not in use. [MQTT-4.3.2-1]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, qos)
    publish_many(publisher, name, numbered(10), qos)
    first = [subscriber.expect(PUBLISH) for _ in range(10)]
    settled = first[3]
    acknowledge(subscriber, settled)
    if qos == 2:
        assert settled.packet_id == subscriber.expect(PUBREL).packet_id
        subscriber.send(ack_packet(PUBCOMP, settled.packet_id or 0, version=version))
    publish_many(publisher, name, numbered(10, start=10), qos)
    second = [subscriber.expect(PUBLISH) for _ in range(10)]
    assert numbered(20) == payloads(first + second)
    assert {(qos, False)} == {(message.qos, message.dup) for message in first + second}
    in_use = [message.packet_id for message in first + second if message is not settled]
    assert all(in_use) and len(set(in_use)) == len(in_use)


@clause(v3="MQTT-4.3.2-1", v5="MQTT-4.3.2-1")
@each(version=(4, 5), qos=(1, 2))
def test_a_packet_id_in_use_survives_the_wrap(virtual: VirtualBroker, version: int, qos: int) -> None:
    """When the ids begin anew, those of messages that are still in flight are not used again. [MQTT-4.3.2-1]"""
    client_id = f"wrap-{version}-{qos}"
    subscriber, publisher = virtual.connect(client_id, version=version), virtual.connect(version=version)
    subscriber.subscribe(client_id, qos)
    publish_many(publisher, client_id, numbered(3), qos)
    held = [subscriber.expect(PUBLISH) for _ in range(3)]
    acknowledge(subscriber, held.pop(1))
    if qos == 2:
        subscriber.expect(PUBREL)
        subscriber.send(ack_packet(PUBCOMP, 2, version=version))
    virtual.node.state.registry.sessions[client_id].next_id = 65530
    publish_many(publisher, client_id, numbered(10), qos)
    assert [*range(65530, 65536), 2, 4, 5, 6] == [subscriber.expect(PUBLISH).packet_id for _ in range(10)]
    assert [1, 3] == [message.packet_id for message in held]


@every_version
@clause(v3="MQTT-4.3.2-1", v5="MQTT-4.3.2-3")
def test_a_qos_1_message_is_unacknowledged_until_puback(connect: Connect, name: str, version: int) -> None:
    """Only PUBACK ends the broker's duty to deliver a QoS 1 message. [MQTT-4.3.2-3]"""
    subscriber, publisher = connect(f"{name}-s", **lasting(version)), connect(version=version)
    subscriber.subscribe(name, 1)
    publisher.publish(name, b"one", 1)
    publisher.publish(name, b"two", 1)
    first = subscriber.expect(PUBLISH)
    assert b"two" == subscriber.expect(PUBLISH).payload
    acknowledge(subscriber, first)
    subscriber.expect_nothing()
    subscriber.close()
    again = connect(f"{name}-s", **lasting(version))
    message = again.receive()
    assert (b"two", True) == (message.payload, message.dup)
    again.expect_nothing()
    again.close()
    last = connect(f"{name}-s", **lasting(version))
    publisher.publish(name, b"end", 1)
    assert [b"end"] == payloads(receive_until(last, b"end"))


@every_version
@clause(v3="MQTT-4.3.2-2", v5=("MQTT-4.3.2-4", "MQTT-4.3.2-5"))
def test_after_puback_the_same_packet_id_is_a_new_message(connect: Connect, name: str, version: int) -> None:
    """After PUBACK a PUBLISH with the same id is delivered as well, whatever DUP says. [MQTT-4.3.2-5]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 1)
    for payload, dup in ((b"one", False), (b"two", True), (b"three", False)):
        publisher.send(publish_packet(name, payload, version=version, qos=1, packet_id=7, dup=dup))
        assert 7 == publisher.expect(PUBACK).packet_id
    assert [b"one", b"two", b"three"] == payloads(receive_until(subscriber, b"three"))


# --- QoS 2, the broker as the sender ------------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-4.3.3-1", v5=("MQTT-4.3.3-2", "MQTT-4.3.3-4"))
def test_pubrec_is_answered_with_pubrel(connect: Connect, name: str, version: int) -> None:
    """PUBREC gets a PUBREL of the same packet id, and PUBCOMP ends the flow. [MQTT-4.3.3-4]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    connect(version=version).publish(name, b"x", 2)
    message = subscriber.expect(PUBLISH)
    assert (2, False) == (message.qos, message.dup)
    acknowledge(subscriber, message)
    release = subscriber.expect(PUBREL)
    assert (message.packet_id, 0) == (release.packet_id, release.reason or 0)
    subscriber.send(ack_packet(PUBCOMP, message.packet_id or 0, version=version))
    subscriber.expect_nothing()


@every_version
@clause(v3="MQTT-4.3.3-1", v5="MQTT-4.3.3-4")
def test_a_repeated_pubrec_is_answered_with_pubrel_again(connect: Connect, name: str, version: int) -> None:
    """A client that repeats PUBREC before PUBCOMP gets PUBREL of that packet id again. [MQTT-4.3.3-4]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    connect(version=version).publish(name, b"x", 2)
    message = subscriber.expect(PUBLISH)
    for _ in range(2):
        acknowledge(subscriber, message)
        assert message.packet_id == subscriber.expect(PUBREL).packet_id


@each(reason=(0x00, 0x10))
@clause(v5="MQTT-4.3.3-4")
def test_pubrec_below_0x80_is_a_success(connect: Connect, name: str, reason: int) -> None:
    """All reason codes below 0x80 are answered with PUBREL. [MQTT-4.3.3-4]"""
    subscriber = connect()
    subscriber.subscribe(name, 2)
    connect().publish(name, b"x", 2)
    message = subscriber.expect(PUBLISH)
    acknowledge(subscriber, message, reason=reason)
    assert message.packet_id == subscriber.expect(PUBREL).packet_id


@every_version
@clause(v3="MQTT-4.3.3-1", v5=("MQTT-4.3.3-3", "MQTT-4.3.3-5", "MQTT-4.3.3-6"))
def test_each_step_is_repeated_until_it_is_acknowledged(connect: Connect, name: str, version: int) -> None:
    """PUBLISH is repeated until PUBREC, then PUBREL until PUBCOMP, and PUBLISH no more. [MQTT-4.3.3-6]"""
    publisher = connect(version=version)

    def come_back() -> Client:
        return connect(f"{name}-s", **lasting(version))

    subscriber = come_back()
    subscriber.subscribe(name, 2)
    publisher.publish(name, b"x", 2)
    number = subscriber.expect(PUBLISH).packet_id
    for _ in range(2):  # before PUBREC: the PUBLISH again
        subscriber.close()
        subscriber = come_back()
        message = subscriber.expect(PUBLISH)
        assert (number, b"x", True) == (message.packet_id, message.payload, message.dup)
    acknowledge(subscriber, message)
    assert number == subscriber.expect(PUBREL).packet_id
    for _ in range(2):  # before PUBCOMP: the PUBREL again
        subscriber.close()
        subscriber = come_back()
        assert number == subscriber.expect(PUBREL).packet_id
        subscriber.expect_nothing()
    subscriber.send(ack_packet(PUBCOMP, number or 0, version=version))
    subscriber.expect_nothing()
    subscriber.close()
    subscriber = come_back()  # after PUBCOMP: nothing
    publisher.publish(name, b"end", 2)
    assert [b"end"] == payloads(receive_until(subscriber, b"end"))


@clause(v5="MQTT-4.3.3-7")
def test_a_qos_2_message_that_was_sent_does_not_expire(virtual: VirtualBroker) -> None:
    """Once the PUBLISH is out the flow is finished even after the expiry interval. [MQTT-4.3.3-7]"""
    subscriber, publisher = virtual.connect("s", **lasting(5)), virtual.connect()
    subscriber.subscribe("t", 2)
    publisher.publish("t", b"short", 2, properties=prop(MESSAGE_EXPIRY, 10))
    assert b"short" == subscriber.expect(PUBLISH).payload
    virtual.let_pass(11)
    subscriber.close()
    again = virtual.connect("s", **lasting(5))
    message = again.receive()
    assert (b"short", True) == (message.payload, message.dup)
    again.expect_nothing()


# --- QoS 2, the broker as the receiver ----------------------------------------------------------------------------


@every_version
@clause(v3="MQTT-4.3.3-2", v5=("MQTT-4.3.3-8", "MQTT-4.3.3-11"))
def test_a_qos_2_message_is_taken_in_two_steps(connect: Connect, name: str, version: int) -> None:
    """PUBLISH gets PUBREC and PUBREL gets PUBCOMP, each with the packet id of the client. [MQTT-4.3.3-8]"""
    publisher = connect(version=version)
    for number in (1, 255, 256, 65535):
        publisher.send(publish_packet(name, b"x", version=version, qos=2, packet_id=number))
        assert number == publisher.expect(PUBREC).packet_id
    for number in (65535, 1, 256, 255):
        publisher.send(ack_packet(PUBREL, number, version=version))
        answer = publisher.expect(PUBCOMP)
        assert (number, 0) == (answer.packet_id, answer.reason or 0)


@every_version
@each(dup=(True, False))
@clause(v3="MQTT-4.3.3-2", v5="MQTT-4.3.3-10")
def test_a_qos_2_message_is_delivered_once_however_often_it_is_sent(
    connect: Connect, name: str, version: int, dup: bool
) -> None:
    """Until PUBREL each repetition gets PUBREC and reaches nobody again, even after a reconnection. [MQTT-4.3.3-10]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    publisher = connect(f"{name}-p", **lasting(version))
    once = publish_packet(name, b"once", version=version, qos=2, packet_id=7)
    again = publish_packet(name, b"once", version=version, qos=2, packet_id=7, dup=dup)
    publisher.send(once)
    assert 7 == publisher.expect(PUBREC).packet_id
    publisher.send(again)
    assert 7 == publisher.expect(PUBREC).packet_id
    publisher.close()
    publisher = connect(f"{name}-p", **lasting(version))
    publisher.send(again)
    assert 7 == publisher.expect(PUBREC).packet_id
    publisher.send(ack_packet(PUBREL, 7, version=version))
    assert 7 == publisher.expect(PUBCOMP).packet_id
    publisher.publish(name, b"end", 2, packet_id=8)
    assert [b"once", b"end"] == payloads(receive_until(subscriber, b"end"))


@every_version
@clause(v3="MQTT-4.3.3-2", v5=("MQTT-4.3.3-11", "MQTT-4.3.3-12"))
def test_after_pubcomp_the_same_packet_id_is_a_new_message(connect: Connect, name: str, version: int) -> None:
    """A finished packet id begins a new flow; a repeated PUBREL is answered again. [MQTT-4.3.3-12]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 2)
    for payload, dup in ((b"one", False), (b"two", True), (b"three", False)):
        publisher.send(publish_packet(name, payload, version=version, qos=2, packet_id=7, dup=dup))
        assert 7 == publisher.expect(PUBREC).packet_id
        for _ in range(2):
            publisher.send(ack_packet(PUBREL, 7, version=version))
            assert 7 == publisher.expect(PUBCOMP).packet_id
    assert [b"one", b"two", b"three"] == payloads(receive_until(subscriber, b"three"))


@every_version
@clause(v3="MQTT-4.3.3-2", v5="MQTT-4.3.3-10")
def test_each_client_has_packet_ids_of_its_own(connect: Connect, name: str, version: int) -> None:
    """The same packet id from several clients is not a repetition. [MQTT-4.3.3-10]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, 2)
    publishers = [connect(version=version) for _ in range(3)]
    for index, publisher in enumerate(publishers):
        publisher.send(publish_packet(name, b"%d" % index, version=version, qos=2, packet_id=7))
        assert 7 == publisher.expect(PUBREC).packet_id
    for publisher in publishers:
        publisher.send(ack_packet(PUBREL, 7, version=version))
        assert 7 == publisher.expect(PUBCOMP).packet_id
    publishers[0].publish(name, b"end", 2)
    assert [b"0", b"1", b"2", b"end"] == payloads(receive_until(subscriber, b"end"))


@every_version
@each(properties=(b"", prop(USER_PROPERTY, ("a", "1"))))
@clause(v3="MQTT-4.3.3-2", v5=("MQTT-4.3.3-10", "MQTT-4.3.3-12"))
def test_a_run_of_packets_is_taken_like_single_ones(
    connect: Connect, name: str, version: int, properties: bytes
) -> None:
    """Repetition, release and reuse of a packet id within one write are told apart. [MQTT-4.3.3-10]"""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 2)

    def publish(payload: bytes, *, dup: bool = False) -> bytes:
        return publish_packet(
            name, payload, version=version, qos=2, packet_id=7, dup=dup, properties=properties if version == 5 else b""
        )

    release = ack_packet(PUBREL, 7, version=version)
    publisher.send(
        publish(b"one") + publish(b"one", dup=True) + release + publish(b"two") + release + release + publish(b"end")
    )
    answers = [publisher.recv() for _ in range(7)]
    assert [PUBREC, PUBREC, PUBCOMP, PUBREC, PUBCOMP, PUBCOMP, PUBREC] == [answer.type for answer in answers]
    assert {7} == {answer.packet_id for answer in answers}
    assert [b"one", b"two", b"end"] == payloads(receive_until(subscriber, b"end"))


@every_version
def test_a_qos_2_message_is_routed_when_it_arrives(connect: Connect, name: str, version: int) -> None:
    """Subscribers do not wait for PUBREL: a decision of this broker, the specification allows both."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 2)
    publisher.send(publish_packet(name, b"early", version=version, qos=2, packet_id=7))
    publisher.expect(PUBREC)
    assert b"early" == subscriber.receive().payload


@clause(v5="MQTT-4.3.3-13")
def test_an_expired_qos_2_message_is_still_finished(virtual: VirtualBroker) -> None:
    """PUBREL is answered with success although the message has expired meanwhile. [MQTT-4.3.3-13]"""
    absent = virtual.connect("s", **lasting(5))
    absent.subscribe("t", 2)
    absent.disconnect()
    publisher = virtual.connect()
    short = prop(MESSAGE_EXPIRY, 10)
    publisher.send(publish_packet("t", b"short", qos=2, packet_id=7, properties=short))
    assert 7 == publisher.expect(PUBREC).packet_id
    virtual.let_pass(11)
    publisher.send(publish_packet("t", b"short", qos=2, packet_id=7, dup=True, properties=short))
    assert 7 == publisher.expect(PUBREC).packet_id
    publisher.send(ack_packet(PUBREL, 7))
    answer = publisher.expect(PUBCOMP)
    assert (7, 0) == (answer.packet_id, answer.reason)


# --- the QoS of a delivery ----------------------------------------------------------------------------------------


@every_version
@each(granted=(0, 1, 2))
@each(published=(0, 1, 2))
@clause(
    v3=("MQTT-3.8.4-6", "MQTT-4.3.1-1", "MQTT-4.3.2-1", "MQTT-4.3.3-1"),
    v5=("MQTT-3.8.4-8", "MQTT-4.3.1-1", "MQTT-4.3.2-2", "MQTT-4.3.3-2"),
)
def test_each_end_has_its_own_flow(connect: Connect, name: str, version: int, published: int, granted: int) -> None:
    """The flow towards a subscriber follows the lower of published and granted QoS. [MQTT-4.3.2-2]"""
    subscriber = connect(version=version)
    subscriber.subscribe(name, granted)
    connect(version=version).publish(name, b"x", published)
    message = subscriber.receive()
    assert (b"x", min(published, granted)) == (message.payload, message.qos)
    subscriber.expect_nothing()


@both_versions
@each_row("qos wrong", [(1, PUBREC), (1, PUBCOMP), (2, PUBACK), (2, PUBCOMP)])
@clause(v5=("MQTT-4.3.2-3", "MQTT-4.3.3-3"))
def test_an_acknowledgement_of_the_other_qos_settles_nothing(
    connect: Connect, name: str, version: int, qos: int, wrong: int
) -> None:
    """It is an error of the protocol, and the message is still owed. [MQTT-4.3.2-3]"""
    subscriber = connect(f"{name}-s", **lasting(version))
    subscriber.subscribe(name, qos)
    connect().publish(name, b"x", qos)
    message = subscriber.expect(PUBLISH)
    subscriber.send(ack_packet(wrong, message.packet_id or 0, version=version))
    refused(subscriber, PROTOCOL_ERROR)
    again = connect(f"{name}-s", **lasting(version)).expect(PUBLISH)
    assert (message.packet_id, b"x", True) == (again.packet_id, again.payload, again.dup)
