"""3.10 UNSUBSCRIBE and 3.11 UNSUBACK."""

from __future__ import annotations

from tests.support import wire
from tests.support.cases import both_versions, each, each_row
from tests.support.checks import MALFORMED, NO_LOCAL, PROTOCOL_ERROR
from tests.support.clauses import clause

MAXIMUM_PACKET_SIZE = 0x27
SUCCESS, NOTHING_THERE = 0x00, 0x11


@clause(v3="MQTT-3.10.4-1", v5="MQTT-3.10.4-1")
@both_versions
@each_row(
    "held given",
    (
        ("{}/a", "{}/A"),
        ("{}/a", "{}/+"),
        ("{}/a", "{}/#"),
        ("{}/a", "{}/a/"),
        ("{}/a", "$share/g/{}/a"),
        ("{}/+", "{}/a"),
        ("{}/#", "{}/a"),
        ("{}/#", "{}"),
        ("$share/g/{}/a", "{}/a"),
        ("$share/g/{}/a", "$share/h/{}/a"),
    ),
)
def test_only_an_equal_filter_is_removed(connect: wire.Connect, name: str, version: int, held: str, given: str) -> None:
    """A filter that merely matches, contains or resembles another leaves it alone [MQTT-3.10.4-1]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(held.format(name), 1)
    assert version < 5 or [NOTHING_THERE] == client.unsubscribe(given.format(name)).reasons
    if version < 5:
        client.unsubscribe(given.format(name))
    other.publish(f"{name}/a", b"m", 1)
    assert b"m" == client.receive().payload


@clause(v3=("MQTT-3.10.4-1", "MQTT-3.10.4-2"), v5=("MQTT-3.10.4-1", "MQTT-3.10.4-2"))
@both_versions
@each(topic_filter=("{}/a", "{}/+", "{}/#", "$share/g/{}/a"))
def test_an_equal_filter_is_removed(connect: wire.Connect, name: str, version: int, topic_filter: str) -> None:
    """After the UNSUBACK no new message comes for that filter [MQTT-3.10.4-1] [MQTT-3.10.4-2]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(topic_filter.format(name), 1)
    other.publish(f"{name}/a", b"before", 1)
    assert b"before" == client.receive().payload
    answer = client.unsubscribe(topic_filter.format(name))
    assert version < 5 or [SUCCESS] == answer.reasons
    other.publish(f"{name}/a", b"after", 1)
    client.expect_nothing()


@clause(v3="MQTT-3.10.4-1", v5="MQTT-3.10.4-1")
@both_versions
def test_the_other_of_two_overlapping_filters_stays(connect: wire.Connect, name: str, version: int) -> None:
    """Removing one filter leaves the QoS of the other that matches the same topic [MQTT-3.10.4-1]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe([(f"{name}/a", 2), (f"{name}/+", 1)])
    client.unsubscribe(f"{name}/a")
    other.publish(f"{name}/a", b"m", 2)
    assert 1 == client.receive().qos
    client.expect_nothing()


@clause(v3="MQTT-3.10.4-1", v5="MQTT-3.10.4-1")
@both_versions
def test_unsubscribing_concerns_one_client(connect: wire.Connect, name: str, version: int) -> None:
    """Another client with the same filter keeps its subscription (3.10.4)."""
    client, neighbour, other = (connect(version=version) for _ in range(3))
    client.subscribe(f"{name}/#", 1)
    neighbour.subscribe(f"{name}/#", 1)
    client.unsubscribe(f"{name}/#")
    other.publish(f"{name}/a", b"m", 1)
    assert b"m" == neighbour.receive().payload
    client.expect_nothing()


@clause(v3="MQTT-3.10.4-3", v5="MQTT-3.10.4-3")
@both_versions
def test_a_qos2_delivery_under_way_is_completed(connect: wire.Connect, name: str, version: int) -> None:
    """After an UNSUBSCRIBE in the middle of a QoS 2 delivery, PUBREC is still answered with PUBREL [MQTT-3.10.4-3]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(name, 2)
    other.publish(name, b"m", 2)
    message = client.expect(wire.PUBLISH)
    client.unsubscribe(name)
    assert message.packet_id is not None
    client.send(wire.ack_packet(wire.PUBREC, message.packet_id, version=version))
    assert message.packet_id == client.expect(wire.PUBREL).packet_id
    client.send(wire.ack_packet(wire.PUBCOMP, message.packet_id, version=version))
    client.expect_nothing()


@clause(v3="MQTT-3.10.4-3", v5="MQTT-3.10.4-3")
@both_versions
def test_an_unacknowledged_delivery_is_repeated_after_a_reconnect(
    connect: wire.Connect, name: str, version: int
) -> None:
    """A QoS 1 message that was sent before the UNSUBSCRIBE stays the session's until its PUBACK [MQTT-3.10.4-3]."""
    lasting = {"version": version, "clean": False, "properties": wire.prop(0x11, 60)}  # 3.1.1 has no properties
    client, other = connect(name, **lasting), connect(version=version)
    client.subscribe(name, 1)
    other.publish(name, b"m", 1)
    first = client.expect(wire.PUBLISH)
    client.unsubscribe(name)
    client.disconnect()
    other.publish(name, b"later", 1)
    client = connect(name, **lasting)
    again = client.expect(wire.PUBLISH)
    assert (first.packet_id, b"m", True) == (again.packet_id, again.payload, again.dup)
    assert again.packet_id is not None
    client.send(wire.ack_packet(wire.PUBACK, again.packet_id, version=version))
    client.expect_nothing()


@clause(v3="MQTT-3.10.4-5", v5=("MQTT-3.10.4-5", "MQTT-3.11.3-2"))
@both_versions
def test_an_unsuback_comes_when_nothing_was_there(connect: wire.Connect, name: str, version: int) -> None:
    """Unsubscribing from an unknown filter is answered; MQTT 5 tells that there was none [MQTT-3.10.4-5]."""
    answer = connect(version=version).unsubscribe(name)
    assert ([NOTHING_THERE] if version == 5 else []) == answer.reasons


@clause(v3="MQTT-3.10.4-6", v5=("MQTT-3.10.4-6", "MQTT-3.11.3-1"))
@both_versions
def test_several_filters_get_one_unsuback(connect: wire.Connect, name: str, version: int) -> None:
    """Filters of one packet are all removed; one UNSUBACK has their codes in order, also for a filter named twice
    [MQTT-3.10.4-6] [MQTT-3.11.3-1].
    """
    client, other = connect(version=version), connect(version=version)
    client.subscribe([(f"{name}/a", 1), (f"{name}/b", 1), (f"{name}/c", 1)])
    given = [f"{name}/x", f"{name}/a", f"{name}/y", f"{name}/b", f"{name}/a"]
    answer = client.unsubscribe(*given)
    assert ([NOTHING_THERE, SUCCESS, NOTHING_THERE, SUCCESS, NOTHING_THERE] if version == 5 else []) == answer.reasons
    for topic in ("a", "b", "c"):
        other.publish(f"{name}/{topic}", topic.encode(), 1)
    assert b"c" == client.receive().payload
    client.expect_nothing()


@clause(v5="MQTT-3.11.3-2")
@each(wrong=("{}/#/x", "{}/a+", "$share/g", "$share//{}"))
def test_an_unsuback_uses_defined_codes_only(connect: wire.Connect, name: str, wrong: str) -> None:
    """A filter that can never have been subscribed removes nothing and gets a defined code, or ends the connection
    with one [MQTT-3.11.3-2].
    """
    client = connect()
    client.send(wire.unsubscribe_packet(1, [wrong.format(name)]))
    answer = client.recv()
    if answer.type == wire.UNSUBACK:
        assert answer.reasons in ([NOTHING_THERE], [0x80], [0x8F])
    else:
        assert answer.reason in (MALFORMED, PROTOCOL_ERROR, 0x8F)
        assert [] == client.expect_closed()


@clause(v5=("MQTT-3.11.2-1", "MQTT-3.11.2-2"))
def test_an_unsuback_fits_into_the_maximum_packet_size(connect: wire.Connect, name: str) -> None:
    """Reason string and user properties never push an UNSUBACK over the client's maximum
    [MQTT-3.11.2-1] [MQTT-3.11.2-2].
    """
    client = connect(properties=wire.prop(MAXIMUM_PACKET_SIZE, 20))
    answer = client.unsubscribe(f"{name}/a", f"{name}/b")
    assert len(answer.raw) <= 20
    assert [NOTHING_THERE, NOTHING_THERE] == answer.reasons


def test_user_properties_are_accepted(connect: wire.Connect, name: str) -> None:
    """An UNSUBSCRIBE may carry user properties (3.10.2.1)."""
    assert [NOTHING_THERE] == connect().unsubscribe(name, properties=wire.prop(0x26, ("k", "v"))).reasons


def test_a_later_subscription_starts_afresh(connect: wire.Connect, name: str) -> None:
    """Options of a removed subscription do not come back with a new one (3.10.4)."""
    client = connect()
    client.subscribe(name, NO_LOCAL, properties=wire.prop(0x0B, 5))
    client.unsubscribe(name)
    client.subscribe(name, 0)
    client.publish(name, b"own")
    assert [] == client.receive().prop_all(0x0B)
