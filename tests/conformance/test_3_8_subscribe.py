"""3.8 SUBSCRIBE: the packet, its options, and what a subscription then gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.checks import (
    MALFORMED,
    NO_LOCAL,
    PROTOCOL_ERROR,
    RETAIN_AS_PUBLISHED,
    RETAIN_NEVER,
    assert_refused,
    both_versions,
    receive_until,
    subscribe_and_take,
)
from tests.support.clauses import clause
from tests.support.wire import (
    PUBACK,
    PUBLISH,
    SUBACK,
    Client,
    packet,
    prop,
    props,
    publish_packet,
    subscribe_packet,
    utf8,
)

Connect = Callable[..., Client]

SUBSCRIPTION_ID = 0x0B
USER_PROPERTY = 0x26
SESSION_EXPIRY = 0x11


def subscribe_body(*filters: tuple[str | bytes, int], version: int, packet_id: int = 1) -> bytes:
    """What follows the fixed header of a SUBSCRIBE."""
    head = packet_id.to_bytes(2, "big") + (props() if version == 5 else b"")
    return head + b"".join(utf8(name) + bytes([options]) for name, options in filters)


@clause(v3="MQTT-3.8.1-1", v5="MQTT-3.8.1-1")
@both_versions
@pytest.mark.parametrize("flags", [flags for flags in range(16) if flags != 2])
def test_reserved_header_bits_end_the_connection(connect: Connect, name: str, version: int, flags: int) -> None:
    """A SUBSCRIBE whose header flags are not 0010 is malformed [MQTT-3.8.1-1]."""
    client = connect(version=version)
    client.send(packet(0x80 | flags, subscribe_body((name, 0), version=version)))
    assert_refused(client, (MALFORMED,))


@clause(v3="MQTT-3.8.3-1", v5="MQTT-3.8.3-1")
@both_versions
@pytest.mark.parametrize(
    "raw", [b"a\xff", b"a/\xc3\x28", b"\xed\xa0\x80", b"\xc0\xaf", b"a\x00b"], ids=lambda raw: raw.hex()
)
def test_a_filter_is_well_formed_utf8(connect: Connect, version: int, raw: bytes) -> None:
    """A filter with stray bytes, a surrogate, an overlong form or U+0000 is malformed [MQTT-3.8.3-1]."""
    client = connect(version=version)
    client.send(packet(0x82, subscribe_body((raw, 0), version=version)))
    assert_refused(client, (MALFORMED, PROTOCOL_ERROR))


@clause(v3="MQTT-3.8.3-2")
@both_versions
@pytest.mark.parametrize("wildcards", ["+/x", "x/#", "#"])
def test_wildcards_are_supported(connect: Connect, name: str, version: int, wildcards: str) -> None:
    """The node supports wildcards, so it grants filters that have them; refusing is for others [MQTT-3.8.3-2]."""
    topic_filter = wildcards if wildcards == "#" else f"{name}/{wildcards}"
    assert [1] == connect(version=version).subscribe(topic_filter, 1).reasons


@clause(v3="MQTT-3.8.3-3", v5="MQTT-3.8.3-2")
@both_versions
def test_a_subscribe_without_filters_ends_the_connection(connect: Connect, version: int) -> None:
    """An empty payload is a protocol error [MQTT-3.8.3-3] [MQTT-3.8.3-2]."""
    client = connect(version=version)
    client.send(subscribe_packet(1, [], version=version))
    assert_refused(client, (PROTOCOL_ERROR, MALFORMED))


@both_versions
def test_a_filter_without_options_is_malformed(connect: Connect, name: str, version: int) -> None:
    """A payload that ends before the options byte of its filter ends the connection (3.8.3)."""
    client = connect(version=version)
    client.send(packet(0x82, subscribe_body((name, 0), version=version)[:-1]))
    assert_refused(client, (MALFORMED,))


@both_versions
def test_packet_identifier_zero_ends_the_connection(connect: Connect, name: str, version: int) -> None:
    """A SUBSCRIBE has a packet identifier other than 0 (2.2.1)."""
    client = connect(version=version)
    client.send(subscribe_packet(0, [(name, 0)], version=version))
    assert_refused(client, (PROTOCOL_ERROR, MALFORMED))


@clause(v3="MQTT-3.8.3-4")
@pytest.mark.parametrize("options", [0x03, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0x81])
def test_a_requested_qos_has_no_other_bits(connect: Connect, name: str, options: int) -> None:
    """In 3.1.1 the byte behind a filter is 0, 1 or 2; everything else ends the connection [MQTT-3.8.3-4]."""
    client = connect(version=4)
    client.send(subscribe_packet(1, [(name, options)], version=4))
    assert_refused(client, ())


@clause(v5="MQTT-3.8.3-5")
@pytest.mark.parametrize("options", [0x40, 0x80, 0xC1])
def test_reserved_option_bits_are_malformed(connect: Connect, name: str, options: int) -> None:
    """Bits 6 and 7 of the subscription options are 0 [MQTT-3.8.3-5]."""
    client = connect()
    client.send(subscribe_packet(1, [(name, options)]))
    assert_refused(client, (MALFORMED,))


@pytest.mark.parametrize("options", [0x03, 0x30], ids=["QoS 3", "retain handling 3"])
def test_undefined_option_values_are_protocol_errors(connect: Connect, name: str, options: int) -> None:
    """Maximum QoS 3 and Retain Handling 3 do not exist (3.8.3.1)."""
    client = connect()
    client.send(subscribe_packet(1, [(name, options)]))
    assert_refused(client, (PROTOCOL_ERROR, MALFORMED))


@clause(v5="MQTT-3.8.3-3")
def test_no_local_keeps_own_messages_away(connect: Connect, name: str) -> None:
    """With No Local a client gets the messages of others and not its own [MQTT-3.8.3-3]."""
    client, other = connect(), connect()
    client.subscribe(name, 1 | NO_LOCAL)
    assert client.publish(name, b"own", 1)
    other.publish(name, b"foreign", 1)
    assert b"foreign" == client.receive().payload
    client.expect_nothing()


@clause(v5="MQTT-3.8.3-3")
def test_no_local_belongs_to_one_subscription(connect: Connect, name: str) -> None:
    """An overlapping subscription without No Local still gets the client's own messages (3.8.3.1)."""
    client = connect()
    client.subscribe(f"{name}/a", NO_LOCAL)
    client.subscribe(f"{name}/+", 0)
    client.publish(f"{name}/a", b"own")
    assert b"own" == client.receive().payload
    client.expect_nothing()


@clause(v5="MQTT-3.8.3-3")
def test_no_local_adds_nothing_to_an_overlapping_subscription(connect: Connect, name: str) -> None:
    """To its own messages a client's No Local subscription contributes neither QoS nor identifier [MQTT-3.8.3-3]."""
    client, other = connect(), connect()
    client.subscribe(f"{name}/a", 1 | NO_LOCAL, properties=prop(SUBSCRIPTION_ID, 1))
    client.subscribe(f"{name}/+", 0, properties=prop(SUBSCRIPTION_ID, 2))
    client.send(publish_packet(f"{name}/a", b"own", qos=1, packet_id=9))
    found = {answer.type: answer for answer in (client.recv(), client.recv())}
    assert {PUBLISH, PUBACK} == found.keys()
    assert (0, [2]) == (found[PUBLISH].qos, found[PUBLISH].prop_all(SUBSCRIPTION_ID))
    client.expect_nothing()
    other.publish(f"{name}/a", b"foreign", 1)
    assert [1, 2] == sorted(client.receive().prop_all(SUBSCRIPTION_ID))


@clause(v5="MQTT-3.8.3-3")
def test_no_local_goes_by_client_identifier(connect: Connect, name: str) -> None:
    """What a client publishes just before a reconnect is not queued for its next connection [MQTT-3.8.3-3]."""
    lasting = {"clean": False, "properties": prop(SESSION_EXPIRY, 60)}
    first = connect(name, **lasting)
    first.subscribe(name, 1 | NO_LOCAL)
    first.publish(name, b"own", 1)
    first.disconnect()
    connect().publish(name, b"foreign", 1)
    second = connect(name, **lasting)
    assert b"foreign" == second.receive().payload
    second.expect_nothing()


@clause(v3=("MQTT-3.8.4-1", "MQTT-3.8.4-2"), v5=("MQTT-3.8.4-1", "MQTT-3.8.4-2"))
@both_versions
@pytest.mark.parametrize("packet_id", [1, 2, 255, 256, 65535])
def test_the_suback_has_the_packet_identifier(connect: Connect, name: str, version: int, packet_id: int) -> None:
    """Each SUBSCRIBE is answered with a SUBACK of the same packet identifier [MQTT-3.8.4-1] [MQTT-3.8.4-2]."""
    client = connect(version=version)
    client.send(subscribe_packet(packet_id, [(name, 0)], version=version))
    assert packet_id == client.expect(SUBACK).packet_id


@both_versions
def test_subscribes_in_one_write_are_answered_one_by_one(connect: Connect, name: str, version: int) -> None:
    """Packets that arrive together get their own SUBACKs, in order (3.8.4)."""
    client = connect(version=version)
    client.send(b"".join(subscribe_packet(n, [(f"{name}/{n}", n % 3)], version=version) for n in range(1, 21)))
    for n in range(1, 21):
        answer = client.expect(SUBACK)
        assert (n, [n % 3]) == (answer.packet_id, answer.reasons)


@clause(v3="MQTT-3.8.4-3", v5="MQTT-3.8.4-3")
@both_versions
def test_the_same_filter_again_replaces_the_subscription(connect: Connect, name: str, version: int) -> None:
    """After a second SUBSCRIBE with another QoS there is one copy, with the new QoS [MQTT-3.8.4-3]."""
    client, other = connect(version=version), connect(version=version)
    assert [2] == client.subscribe(f"{name}/#", 2).reasons
    assert [1] == client.subscribe(f"{name}/#", 1).reasons
    other.publish(f"{name}/a", b"once", 2)
    message = client.receive()
    assert (b"once", 1) == (message.payload, message.qos)
    client.expect_nothing()


@clause(v5="MQTT-3.8.4-3")
def test_a_replaced_subscription_has_only_its_new_options(connect: Connect, name: str) -> None:
    """QoS, Retain As Published and the subscription identifier are all replaced [MQTT-3.8.4-3]."""
    client, other = connect(), connect()
    client.subscribe(name, 1 | RETAIN_AS_PUBLISHED, properties=prop(SUBSCRIPTION_ID, 7))
    client.subscribe(name, 0 | RETAIN_NEVER)
    other.publish(name, b"x", 1, retain=True)
    message = client.receive()
    assert (0, False, None) == (message.qos, message.retain, message.prop(SUBSCRIPTION_ID))
    client.subscribe(name, 1 | RETAIN_AS_PUBLISHED | RETAIN_NEVER, properties=prop(SUBSCRIPTION_ID, 8))
    other.publish(name, b"", 1, retain=True)
    message = client.receive()
    assert (1, True, 8) == (message.qos, message.retain, message.prop(SUBSCRIPTION_ID))


@clause(v5="MQTT-3.8.4-3")
def test_no_local_is_replaced_too(connect: Connect, name: str) -> None:
    """No Local can be taken back and set again by subscribing to the same filter [MQTT-3.8.4-3]."""
    client, other = connect(), connect()
    client.subscribe(name, NO_LOCAL)
    client.subscribe(name, 0)
    client.publish(name, b"own")
    assert b"own" == client.receive().payload
    client.subscribe(name, NO_LOCAL)
    client.publish(name, b"own again")
    client.expect_nothing()
    other.publish(name, b"foreign", 1)
    assert b"foreign" == client.receive().payload


@clause(v3="MQTT-3.8.4-3", v5="MQTT-3.8.4-4")
@both_versions
def test_replacing_sends_retained_messages_again(connect: Connect, name: str, version: int) -> None:
    """Each SUBSCRIBE of the same filter brings the retained message again [MQTT-3.8.4-3] [MQTT-3.8.4-4]."""
    client, other = connect(version=version), connect(version=version)
    other.publish(name, b"kept", 1, retain=True)
    for _ in range(3):
        (message,) = subscribe_and_take(client, name, 1, count=1)
        assert (b"kept", True) == (message.payload, message.retain)
    other.publish(name, b"", 1, retain=True)


@clause(v3="MQTT-3.8.4-3", v5="MQTT-3.8.4-4")
@both_versions
def test_replacing_loses_no_publication(connect: Connect, name: str, version: int) -> None:
    """Messages that are published while a subscription is replaced all arrive, in order [MQTT-3.8.4-4]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(name, 1)
    seen: list[bytes] = []
    for n in range(20):
        client.send(subscribe_packet(100 + n, [(name, 1)], version=version))
        other.publish(name, b"%d" % n, 1)
        answers = 0
        while answers < 2:
            found = client.recv()
            if found.type == PUBLISH:
                seen.append(found.payload)
                assert found.packet_id is not None
                client.send(b"\x40\x02" + found.packet_id.to_bytes(2, "big"))
            else:
                assert SUBACK == found.type
            answers += 1
    assert [b"%d" % n for n in range(20)] == seen


@clause(v3=("MQTT-3.8.4-4", "MQTT-3.8.4-5"), v5=("MQTT-3.8.4-5", "MQTT-3.8.4-6", "MQTT-3.8.4-7"))
@both_versions
def test_several_filters_get_one_suback(connect: Connect, name: str, version: int) -> None:
    """Three filters give three subscriptions and one SUBACK with three codes
    [MQTT-3.8.4-4] [MQTT-3.8.4-5] [MQTT-3.8.4-6] [MQTT-3.8.4-7].
    """
    client, other = connect(version=version), connect(version=version)
    filters = [(f"{name}/a", 0), (f"{name}/b/+", 1), (f"{name}/c/#", 2)]
    assert [0, 1, 2] == client.subscribe(filters).reasons
    client.expect_nothing()
    for topic, qos in [("a", 0), ("b/x", 1), ("c/x/y", 2)]:
        other.publish(f"{name}/{topic}", b"m", 2)
        message = client.receive()
        assert (f"{name}/{topic}", qos) == (message.topic, message.qos)


@clause(v3="MQTT-3.8.4-4", v5="MQTT-3.8.4-5")
@both_versions
def test_a_filter_repeated_in_one_packet_is_replaced(connect: Connect, name: str, version: int) -> None:
    """The last of two equal filters in one packet counts, as if it came in a second packet [MQTT-3.8.4-4]."""
    client, other = connect(version=version), connect(version=version)
    assert [2, 0] == client.subscribe([(name, 2), (name, 0)]).reasons
    other.publish(name, b"m", 2)
    assert 0 == client.receive().qos
    client.expect_nothing()


@clause(v3="MQTT-3.8.4-6", v5="MQTT-3.8.4-8")
@both_versions
@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("published", [0, 1, 2])
def test_delivery_has_the_lower_qos(connect: Connect, name: str, version: int, published: int, granted: int) -> None:
    """The QoS of a delivery is the lower of published and granted QoS [MQTT-3.8.4-6] [MQTT-3.8.4-8]."""
    client, other = connect(version=version), connect(version=version)
    assert [granted] == client.subscribe(name, granted).reasons
    other.publish(name, b"m", published)
    assert min(published, granted) == client.receive().qos


@clause(v3="MQTT-3.3.5-1", v5="MQTT-3.3.4-2")
@both_versions
def test_overlapping_subscriptions_respect_the_highest_qos(connect: Connect, name: str, version: int) -> None:
    """A message that matches several filters comes once, or once per filter; the best copy has the highest QoS
    [MQTT-3.3.5-1] [MQTT-3.3.4-2].
    """
    client, other = connect(version=version), connect(version=version)
    client.subscribe([(f"{name}/a", 0), (f"{name}/+", 2), (f"{name}/#", 1)])
    client.subscribe(f"{name}-end", 0)
    other.publish(f"{name}/a", b"m", 2)
    other.publish(f"{name}-end", b"end", 1)
    copies = sorted(message.qos for message in receive_until(client, b"end"))
    assert copies in ([2], [0, 1, 2])


@clause(v5=("MQTT-3.3.4-3", "MQTT-3.3.4-4", "MQTT-3.3.4-5"))
def test_overlapping_subscriptions_name_their_identifiers(connect: Connect, name: str) -> None:
    """One copy carries all identifiers, several copies carry one each; a filter without one adds none
    [MQTT-3.3.4-3] [MQTT-3.3.4-4] [MQTT-3.3.4-5].
    """
    client, other = connect(), connect()
    client.subscribe(f"{name}/a", 1, properties=prop(SUBSCRIPTION_ID, 1))
    client.subscribe(f"{name}/+", 1, properties=prop(SUBSCRIPTION_ID, 268_435_455))
    client.subscribe(f"{name}/#", 1)
    client.subscribe(f"{name}-end", 0)
    other.publish(f"{name}/a", b"m", 1)
    other.publish(f"{name}-end", b"end", 1)
    copies = sorted(sorted(message.prop_all(SUBSCRIPTION_ID)) for message in receive_until(client, b"end"))
    assert copies in ([[1, 268_435_455]], [[], [1], [268_435_455]])


def test_a_subscription_identifier_counts_for_all_filters_of_its_packet(connect: Connect, name: str) -> None:
    """All filters of one SUBSCRIBE share its identifier; other clients do not see it (3.8.2.1.2)."""
    client, bystander, other = connect(), connect(), connect()
    bystander.subscribe(f"{name}/#", 0)
    client.subscribe([(f"{name}/a", 0), (f"{name}/b", 0)], properties=prop(SUBSCRIPTION_ID, 200))
    for topic in ("a", "b"):
        other.publish(f"{name}/{topic}", b"m", 1)
        assert [200] == client.receive().prop_all(SUBSCRIPTION_ID)
        assert [] == bystander.receive().prop_all(SUBSCRIPTION_ID)


def test_a_subscription_identifier_is_part_of_the_session(connect: Connect, name: str) -> None:
    """After a reconnect, and for messages queued meanwhile, the identifier is still there (3.8.4)."""
    lasting = {"clean": False, "properties": prop(SESSION_EXPIRY, 60)}
    client, other = connect(name, **lasting), connect()
    client.subscribe(name, 1, properties=prop(SUBSCRIPTION_ID, 42))
    client.disconnect()
    other.publish(name, b"queued", 1)
    client = connect(name, **lasting)
    assert [42] == client.receive().prop_all(SUBSCRIPTION_ID)
    other.publish(name, b"live", 1)
    assert [42] == client.receive().prop_all(SUBSCRIPTION_ID)


@pytest.mark.parametrize(
    "properties",
    [prop(SUBSCRIPTION_ID, 0), prop(SUBSCRIPTION_ID, 1) + prop(SUBSCRIPTION_ID, 2)],
    ids=["zero", "twice"],
)
def test_a_wrong_subscription_identifier_is_a_protocol_error(connect: Connect, name: str, properties: bytes) -> None:
    """The identifier is not 0 and does not come twice (3.8.2.1.2)."""
    client = connect()
    client.send(subscribe_packet(1, [(name, 0)], properties=properties))
    assert_refused(client, (PROTOCOL_ERROR,))


def test_a_property_of_other_packets_is_refused(connect: Connect, name: str) -> None:
    """A SUBSCRIBE may carry a subscription identifier and user properties, nothing else (3.8.2.1)."""
    client = connect()
    client.send(subscribe_packet(1, [(name, 0)], properties=prop(SESSION_EXPIRY, 1)))
    assert_refused(client, (MALFORMED, PROTOCOL_ERROR))


def test_user_properties_are_accepted(connect: Connect, name: str) -> None:
    """User properties may come several times, with equal names too (3.8.2.1.3)."""
    pair = prop(USER_PROPERTY, ("k", "v"))
    assert [1] == connect().subscribe(name, 1, properties=pair + pair).reasons


def test_retain_as_published_keeps_the_flag(connect: Connect, name: str) -> None:
    """The option decides for each subscriber whether a live message shows its RETAIN flag (3.8.3.1)."""
    keeps, clears, other = connect(), connect(), connect()
    keeps.subscribe(name, RETAIN_AS_PUBLISHED)
    clears.subscribe(name, 0)
    for retain in (True, False):
        other.publish(name, b"m", 1, retain=retain)
        assert retain == keeps.receive().retain
        assert not clears.receive().retain
    other.publish(name, b"", 1, retain=True)


@both_versions
def test_a_subscription_counts_from_its_suback_on(connect: Connect, name: str, version: int) -> None:
    """A message published after the SUBACK is delivered, one published before is not (3.8.4)."""
    client, other = connect(version=version), connect(version=version)
    other.publish(name, b"early", 1)
    client.subscribe(name, 1)
    other.publish(name, b"late", 1)
    assert b"late" == client.receive().payload
    client.expect_nothing()
