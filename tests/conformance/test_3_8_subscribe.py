"""3.8 SUBSCRIBE and 3.9 SUBACK: the packets, their options and codes, and what a subscription then gets."""

from __future__ import annotations

from tests.support import wire
from tests.support.cases import both_versions, each
from tests.support.checks import NO_LOCAL, RETAIN_AS_PUBLISHED, RETAIN_NEVER, subscribe_and_take
from tests.support.clauses import clause

SUBSCRIPTION_ID = 0x0B
USER_PROPERTY = 0x26
SESSION_EXPIRY = 0x11


@clause(v5="MQTT-3.8.3-3")
def test_no_local_keeps_own_messages_away(connect: wire.Connect, name: str) -> None:
    """With No Local a client gets the messages of others and not its own [MQTT-3.8.3-3]."""
    client, other = connect(), connect()
    client.subscribe(name, 1 | NO_LOCAL)
    assert client.publish(name, b"own", 1)
    other.publish(name, b"foreign", 1)
    assert b"foreign" == client.receive().payload
    client.expect_nothing()


@clause(v5="MQTT-3.8.3-3")
def test_no_local_belongs_to_one_subscription(connect: wire.Connect, name: str) -> None:
    """An overlapping subscription without No Local still gets the client's own messages (3.8.3.1)."""
    client = connect()
    client.subscribe(f"{name}/a", NO_LOCAL)
    client.subscribe(f"{name}/+", 0)
    client.publish(f"{name}/a", b"own")
    assert b"own" == client.receive().payload
    client.expect_nothing()


@clause(v5="MQTT-3.8.3-3")
def test_no_local_adds_nothing_to_an_overlapping_subscription(connect: wire.Connect, name: str) -> None:
    """To its own messages a client's No Local subscription contributes neither QoS nor identifier [MQTT-3.8.3-3]."""
    client, other = connect(), connect()
    client.subscribe(f"{name}/a", 1 | NO_LOCAL, properties=wire.prop(SUBSCRIPTION_ID, 1))
    client.subscribe(f"{name}/+", 0, properties=wire.prop(SUBSCRIPTION_ID, 2))
    client.send(wire.publish_packet(f"{name}/a", b"own", qos=1, packet_id=9))
    found = {answer.type: answer for answer in (client.recv(), client.recv())}
    assert {wire.PUBLISH, wire.PUBACK} == found.keys()
    assert (0, [2]) == (found[wire.PUBLISH].qos, found[wire.PUBLISH].prop_all(SUBSCRIPTION_ID))
    client.expect_nothing()
    other.publish(f"{name}/a", b"foreign", 1)
    assert [1, 2] == sorted(client.receive().prop_all(SUBSCRIPTION_ID))


@clause(v5="MQTT-3.8.3-3")
def test_no_local_goes_by_client_identifier(connect: wire.Connect, name: str) -> None:
    """What a client publishes just before a reconnect is not queued for its next connection [MQTT-3.8.3-3]."""
    lasting = {"clean": False, "properties": wire.prop(SESSION_EXPIRY, 60)}
    first = connect(name, **lasting)
    first.subscribe(name, 1 | NO_LOCAL)
    first.publish(name, b"own", 1)
    first.disconnect()
    connect().publish(name, b"foreign", 1)
    second = connect(name, **lasting)
    assert b"foreign" == second.receive().payload
    second.expect_nothing()


@both_versions
def test_subscribes_in_one_write_are_answered_one_by_one(connect: wire.Connect, name: str, version: int) -> None:
    """Packets that arrive together get their own SUBACKs, in order (3.8.4)."""
    client = connect(version=version)
    client.send(b"".join(wire.subscribe_packet(n, [(f"{name}/{n}", n % 3)], version=version) for n in range(1, 21)))
    for n in range(1, 21):
        answer = client.expect(wire.SUBACK)
        assert (n, [n % 3]) == (answer.packet_id, answer.reasons)


@clause(v3="MQTT-3.8.4-3", v5="MQTT-3.8.4-3")
@both_versions
def test_the_same_filter_again_replaces_the_subscription(connect: wire.Connect, name: str, version: int) -> None:
    """After a second SUBSCRIBE with another QoS there is one copy, with the new QoS [MQTT-3.8.4-3]."""
    client, other = connect(version=version), connect(version=version)
    assert [2] == client.subscribe(f"{name}/#", 2).reasons
    assert [1] == client.subscribe(f"{name}/#", 1).reasons
    other.publish(f"{name}/a", b"once", 2)
    message = client.receive()
    assert (b"once", 1) == (message.payload, message.qos)
    client.expect_nothing()


@clause(v5="MQTT-3.8.4-3")
def test_a_replaced_subscription_has_only_its_new_options(connect: wire.Connect, name: str) -> None:
    """QoS, Retain As Published and the subscription identifier are all replaced [MQTT-3.8.4-3]."""
    client, other = connect(), connect()
    client.subscribe(name, 1 | RETAIN_AS_PUBLISHED, properties=wire.prop(SUBSCRIPTION_ID, 7))
    client.subscribe(name, 0 | RETAIN_NEVER)
    other.publish(name, b"x", 1, retain=True)
    message = client.receive()
    assert (0, False, None) == (message.qos, message.retain, message.prop(SUBSCRIPTION_ID))
    client.subscribe(name, 1 | RETAIN_AS_PUBLISHED | RETAIN_NEVER, properties=wire.prop(SUBSCRIPTION_ID, 8))
    other.publish(name, b"", 1, retain=True)
    message = client.receive()
    assert (1, True, 8) == (message.qos, message.retain, message.prop(SUBSCRIPTION_ID))


@clause(v5="MQTT-3.8.4-3")
def test_no_local_is_replaced_too(connect: wire.Connect, name: str) -> None:
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


@clause(v3="MQTT-3.8.4-3", v5=("MQTT-3.8.4-4", "MQTT-3.3.1-9"))
@both_versions
def test_replacing_sends_retained_messages_again(connect: wire.Connect, name: str, version: int) -> None:
    """Each SUBSCRIBE of the same filter brings the retained message again [MQTT-3.8.4-3] [MQTT-3.8.4-4]."""
    client, other = connect(version=version), connect(version=version)
    other.publish(name, b"kept", 1, retain=True)
    for _ in range(3):
        (message,) = subscribe_and_take(client, name, 1, count=1)
        assert (b"kept", True) == (message.payload, message.retain)
    other.publish(name, b"", 1, retain=True)


@clause(v3="MQTT-3.8.4-3", v5="MQTT-3.8.4-4")
@both_versions
def test_replacing_loses_no_publication(connect: wire.Connect, name: str, version: int) -> None:
    """Messages that are published while a subscription is replaced all arrive, in order [MQTT-3.8.4-4]."""
    client, other = connect(version=version), connect(version=version)
    client.subscribe(name, 1)
    seen: list[bytes] = []
    for n in range(20):
        client.send(wire.subscribe_packet(100 + n, [(name, 1)], version=version))
        other.publish(name, b"%d" % n, 1)
        answers = 0
        while answers < 2:
            found = client.recv()
            if found.type == wire.PUBLISH:
                seen.append(found.payload)
                assert found.packet_id is not None
                client.send(b"\x40\x02" + found.packet_id.to_bytes(2, "big"))
            else:
                assert wire.SUBACK == found.type
            answers += 1
    assert [b"%d" % n for n in range(20)] == seen


@clause(v3=("MQTT-3.8.4-4", "MQTT-3.8.4-5"), v5=("MQTT-3.8.4-5", "MQTT-3.8.4-6", "MQTT-3.8.4-7"))
@both_versions
def test_several_filters_get_one_suback(connect: wire.Connect, name: str, version: int) -> None:
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
def test_a_filter_repeated_in_one_packet_is_replaced(connect: wire.Connect, name: str, version: int) -> None:
    """The last of two equal filters in one packet counts, as if it came in a second packet [MQTT-3.8.4-4]."""
    client, other = connect(version=version), connect(version=version)
    assert [2, 0] == client.subscribe([(name, 2), (name, 0)]).reasons
    other.publish(name, b"m", 2)
    assert 0 == client.receive().qos
    client.expect_nothing()


def test_a_subscription_identifier_counts_for_all_filters_of_its_packet(connect: wire.Connect, name: str) -> None:
    """All filters of one SUBSCRIBE share its identifier; other clients do not see it (3.8.2.1.2)."""
    client, bystander, other = connect(), connect(), connect()
    bystander.subscribe(f"{name}/#", 0)
    client.subscribe([(f"{name}/a", 0), (f"{name}/b", 0)], properties=wire.prop(SUBSCRIPTION_ID, 200))
    for topic in ("a", "b"):
        other.publish(f"{name}/{topic}", b"m", 1)
        assert [200] == client.receive().prop_all(SUBSCRIPTION_ID)
        assert [] == bystander.receive().prop_all(SUBSCRIPTION_ID)


def test_a_subscription_identifier_is_part_of_the_session(connect: wire.Connect, name: str) -> None:
    """After a reconnect, and for messages queued meanwhile, the identifier is still there (3.8.4)."""
    lasting = {"clean": False, "properties": wire.prop(SESSION_EXPIRY, 60)}
    client, other = connect(name, **lasting), connect()
    client.subscribe(name, 1, properties=wire.prop(SUBSCRIPTION_ID, 42))
    client.disconnect()
    other.publish(name, b"queued", 1)
    client = connect(name, **lasting)
    assert [42] == client.receive().prop_all(SUBSCRIPTION_ID)
    other.publish(name, b"live", 1)
    assert [42] == client.receive().prop_all(SUBSCRIPTION_ID)


def test_user_properties_are_accepted(connect: wire.Connect, name: str) -> None:
    """User properties may come several times, with equal names too (3.8.2.1.3)."""
    pair = wire.prop(USER_PROPERTY, ("k", "v"))
    assert [1] == connect().subscribe(name, 1, properties=pair + pair).reasons


@both_versions
def test_a_subscription_counts_from_its_suback_on(connect: wire.Connect, name: str, version: int) -> None:
    """A message published after the SUBACK is delivered, one published before is not (3.8.4)."""
    client, other = connect(version=version), connect(version=version)
    other.publish(name, b"early", 1)
    client.subscribe(name, 1)
    other.publish(name, b"late", 1)
    assert b"late" == client.receive().payload
    client.expect_nothing()


# --- SUBACK -------------------------------------------------------------------------------------------------------

#: Table 3-8 of MQTT 5, and the return codes of 3.1.1.
CODES = {
    4: {0x00, 0x01, 0x02, 0x80},
    5: {0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2},
}


@clause(v3="MQTT-3.9.3-1", v5=("MQTT-3.9.3-1", "MQTT-3.2.2-10"))
@both_versions
def test_codes_stand_in_the_order_of_the_filters(connect: wire.Connect, name: str, version: int) -> None:
    """Fifty filters with differing QoS are answered with fifty codes in the same order [MQTT-3.9.3-1]."""
    asked = [(7 * n + n // 5) % 3 for n in range(50)]
    client = connect(version=version)
    assert asked == client.subscribe([(f"{name}/{n}", qos) for n, qos in enumerate(asked)]).reasons


@clause(v3="MQTT-3.9.3-2", v5="MQTT-3.9.3-2")
@both_versions
@each(wrong=("{}/#/x", "{}/a+", "$share/g", "$share//{}"))
def test_a_suback_uses_defined_codes_only(connect: wire.Connect, name: str, version: int, wrong: str) -> None:
    """Where a wrong filter is answered by a SUBACK, each of its codes is defined for SUBACK [MQTT-3.9.3-2]."""
    client = connect(version=version)
    filters = [(f"{name}/a", 0), (wrong.format(name), 1), (f"{name}/b", 2)]
    client.send(wire.subscribe_packet(1, filters, version=version))
    try:
        answer = client.recv()
    except wire.Closed:
        assert version < 5, "MQTT 5 clients are told why"
        return
    if answer.type == wire.DISCONNECT:
        assert answer.reason in (0x81, 0x82, 0x8F)
        return
    assert wire.SUBACK == answer.type
    assert 3 == len(answer.reasons)
    assert set(answer.reasons) <= CODES[version]
    assert (0, 2) == (answer.reasons[0], answer.reasons[2])


@clause(v5=("MQTT-3.9.2-1", "MQTT-3.9.2-2"))
def test_a_suback_fits_into_the_maximum_packet_size(connect: wire.Connect, name: str) -> None:
    """Reason string and user properties never push a SUBACK, also one of a refusal, over the client's maximum
    [MQTT-3.9.2-1] [MQTT-3.9.2-2].
    """
    client = connect(properties=wire.prop(0x27, 20))
    filters = [(f"{name}/a", 0), ("$share/g+/x", 1)]
    client.send(wire.subscribe_packet(1, filters))
    answer = client.recv()
    assert answer.type in (wire.SUBACK, wire.DISCONNECT)
    assert len(answer.raw) <= 20
    if answer.type == wire.SUBACK:
        assert [0, 0x8F] == answer.reasons
