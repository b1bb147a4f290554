"""4.8 Subscriptions, chiefly shared ones: which filters are legal, who gets a message, who never gets it.

To know which member has a message, tests let one member join, publish, and only then let the next one join.
Shared subscriptions are a part of MQTT 5; the node offers them to 3.1.1 clients as well.
"""

from __future__ import annotations

from tests.support import wire
from tests.support.cases import both_versions, each, qos_1_and_2
from tests.support.checks import assert_filter_refused, subscribe_and_take
from tests.support.clauses import clause

SUBSCRIPTION_ID = 0x0B
SESSION_EXPIRY = 0x11
UNSPECIFIED_ERROR, NOT_AUTHORIZED = 0x80, 0x87


def collect(client: wire.Client) -> list[bytes]:
    """Payloads of everything that waits for the client; QoS 0 or 1.

    Acknowledgements make room in the window for more, so this asks until a round trip brings nothing new.
    """
    payloads: list[bytes] = []
    while True:
        before = len(payloads)
        client.send(wire.PINGREQ)
        while (found := client.recv()).type == wire.PUBLISH:
            payloads.append(found.payload)
            if found.qos:
                answer(client, wire.PUBACK, found)
        assert wire.PINGRESP == found.type
        if len(payloads) == before:
            return payloads


def answer(client: wire.Client, kind: int, message: wire.Packet, reason: int | None = None) -> None:
    """Answer a PUBLISH or PUBREL with a packet of type `kind`."""
    assert message.packet_id is not None
    client.send(wire.ack_packet(kind, message.packet_id, version=client.version, reason=reason))


@clause(v5=("MQTT-4.8.2-1", "MQTT-4.8.2-2"))
@both_versions
@each(wrong=("$share//{}", "$share/+/{}", "$share/#/{}", "$share/a+/{}", "$share/a#b/{}"))
def test_a_share_name_is_not_empty_and_has_no_wildcards(
    connect: wire.Connect, name: str, version: int, wrong: str
) -> None:
    """A share name has at least one character and neither + nor # [MQTT-4.8.2-1] [MQTT-4.8.2-2]."""
    assert_filter_refused(connect(version=version), wrong.format(name))


@clause(v5="MQTT-4.8.2-2")
@both_versions
@each(wrong=("$share/", "$share/{}", "$share/{}/"))
def test_a_share_name_is_followed_by_a_filter(connect: wire.Connect, name: str, version: int, wrong: str) -> None:
    """$share/ without share name, separator and filter is no subscription [MQTT-4.8.2-2]."""
    assert_filter_refused(connect(version=version), wrong.format(name))


@clause(v5="MQTT-4.8.2-2")
@both_versions
@each(wrong=("{}/a#", "{}/#/b", "{}+/b"))
def test_the_filter_in_a_shared_filter_obeys_the_rules(
    connect: wire.Connect, name: str, version: int, wrong: str
) -> None:
    """What follows the share name must be a legal topic filter [MQTT-4.8.2-2]."""
    assert_filter_refused(connect(version=version), "$share/g/" + wrong.format(name))


@clause(v5="MQTT-4.8.2-1")
@each(shape=("{}/a", "{}/+", "{}/#", "+/{}", "/{}/a", "{}//a", "#"))
def test_a_shared_filter_may_use_wildcards_and_empty_levels(connect: wire.Connect, name: str, shape: str) -> None:
    """Legal shared filters of all shapes are granted and match as usual [MQTT-4.8.2-1]."""
    client, other = connect(), connect()
    assert [1] == client.subscribe("$share/g/" + shape.format(name), 1).reasons
    topic = shape.format(name).replace("+", "a").replace("#", f"{name}/b")
    other.publish(topic, name.encode(), 1)
    while (message := client.receive()).payload != name.encode():
        pass  # `#` also sees others
    assert topic == message.topic


@both_versions
@each(qos=(0, 1))
def test_each_message_goes_to_exactly_one_member(connect: wire.Connect, name: str, version: int, qos: int) -> None:
    """Of three members each gets a part, together they get everything once (4.8.2)."""
    members = [connect(version=version) for _ in range(3)]
    for member in members:
        member.subscribe(f"$share/g/{name}/+", qos)
    other = connect(version=version)
    sent = [b"%d" % n for n in range(60)]
    for n, payload in enumerate(sent):
        other.publish(f"{name}/{n % 5}", payload, 1)
    parts = [collect(member) for member in members]
    assert sorted(sent) == sorted(payload for part in parts for payload in part)
    assert all(parts), f"a member got nothing: {[len(part) for part in parts]}"


@both_versions
def test_groups_and_ordinary_subscribers_do_not_share(connect: wire.Connect, name: str, version: int) -> None:
    """Each group gets each message, and so does an ordinary subscriber with the same filter (4.8.2)."""
    first, second, ordinary, other = (connect(version=version) for _ in range(4))
    first.subscribe(f"$share/one/{name}", 1)
    second.subscribe(f"$share/two/{name}", 1)
    ordinary.subscribe(name, 1)
    other.publish(name, b"m", 1)
    assert [[b"m"]] * 3 == [collect(first), collect(second), collect(ordinary)]


def test_the_same_name_with_another_filter_is_another_group(connect: wire.Connect, name: str) -> None:
    """Share name and filter together make the group; overlapping groups each deliver (4.8.2)."""
    first, second, other = connect(), connect(), connect()
    first.subscribe(f"$share/g/{name}/a", 1)
    second.subscribe(f"$share/g/{name}/+", 1)
    other.publish(f"{name}/a", b"m", 1)
    assert [[b"m"]] * 2 == [collect(first), collect(second)]


def test_share_names_are_case_sensitive(connect: wire.Connect, name: str) -> None:
    """Names that differ in case are different groups (4.8.2)."""
    first, second, other = connect(), connect(), connect()
    first.subscribe(f"$share/g/{name}", 1)
    second.subscribe(f"$share/G/{name}", 1)
    other.publish(name, b"m", 1)
    assert [[b"m"]] * 2 == [collect(first), collect(second)]


def test_one_client_in_a_group_and_ordinary_gets_both(connect: wire.Connect, name: str) -> None:
    """A client's shared and its ordinary subscription are apart, each with its identifier (4.8.2, 3.3.4)."""
    client, other = connect(), connect()
    client.subscribe(f"$share/g/{name}", 0, properties=wire.prop(SUBSCRIPTION_ID, 1))
    client.subscribe(name, 0, properties=wire.prop(SUBSCRIPTION_ID, 2))
    other.publish(name, b"m", 1)
    identifiers = client.receive().prop_all(SUBSCRIPTION_ID)
    if len(identifiers) == 1:
        identifiers += client.receive().prop_all(SUBSCRIPTION_ID)
    assert [1, 2] == sorted(identifiers)
    client.expect_nothing()


def test_a_delivery_names_the_identifier_of_its_member(connect: wire.Connect, name: str) -> None:
    """Only the identifier of the member that gets the message is in it (3.3.4)."""
    members = {7: connect(), 8: connect()}
    for identifier, member in members.items():
        member.subscribe(f"$share/g/{name}", 0, properties=wire.prop(SUBSCRIPTION_ID, identifier))
    other = connect()
    for _ in range(10):
        other.publish(name, b"m", 1)
    received = 0
    for identifier, member in members.items():
        member.send(wire.PINGREQ)
        while (found := member.recv()).type == wire.PUBLISH:
            received += 1
            assert [identifier] == found.prop_all(SUBSCRIPTION_ID)
    assert 10 == received


@clause(v5="MQTT-4.8.2-3")
@each(granted=(0, 1, 2))
def test_the_granted_qos_of_the_member_counts(connect: wire.Connect, name: str, granted: int) -> None:
    """A QoS 2 message arrives with the QoS that its member was granted, whatever the others have [MQTT-4.8.2-3]."""
    client, neighbour, other = connect(), connect(), connect()
    client.subscribe(f"$share/g/{name}", granted)
    other.publish(name, b"m", 2)
    assert granted == client.receive().qos
    neighbour.subscribe(f"$share/g/{name}", 2 - granted)
    for _ in range(6):
        other.publish(name, b"m", 2)
    for member, qos in ((client, granted), (neighbour, 2 - granted)):
        member.send(wire.PINGREQ)
        while (found := member.recv()).type in (wire.PUBLISH, wire.PUBREL):
            if found.type == wire.PUBREL:
                answer(member, wire.PUBCOMP, found)
                continue
            assert qos == found.qos
            if qos:
                answer(member, wire.PUBACK if qos == 1 else wire.PUBREC, found)


@each(end=("disconnect", "unsubscribe", "close"))
def test_a_member_that_left_gets_nothing_more(connect: wire.Connect, name: str, end: str) -> None:
    """After one of two members is gone the other gets everything (4.8.2)."""
    leaver, stayer, other = connect(f"{name}-leaver"), connect(), connect()
    leaver.subscribe(f"$share/g/{name}", 1)
    stayer.subscribe(f"$share/g/{name}", 1)
    if end == "disconnect":
        leaver.disconnect()
    elif end == "unsubscribe":
        leaver.unsubscribe(f"$share/g/{name}")
    else:
        leaver.close()
        # Connecting with the same client id ends what is left of the old connection.
        connect(f"{name}-leaver")
    sent = [b"%d" % n for n in range(20)]
    for payload in sent:
        other.publish(name, payload, 1)
    assert sent == collect(stayer)


def test_an_offline_member_is_skipped_while_another_is_connected(connect: wire.Connect, name: str) -> None:
    """A member whose session waits for its return gets no share while another member is connected (4.8.2)."""
    away = connect(f"{name}-away", clean=False, properties=wire.prop(SESSION_EXPIRY, 60))
    present, other = connect(), connect()
    away.subscribe(f"$share/g/{name}", 1)
    present.subscribe(f"$share/g/{name}", 1)
    away.disconnect()
    sent = [b"%d" % n for n in range(100)]  # more than fit into a window: those that wait are not given away either
    for payload in sent:
        other.publish(name, payload, 1)
    assert sent == collect(present)
    back = connect(f"{name}-away", clean=False, properties=wire.prop(SESSION_EXPIRY, 60))
    back.expect_nothing()


def test_with_all_members_offline_a_message_waits_for_one(connect: wire.Connect, name: str) -> None:
    """When every member is away the message is kept in the session of one of them (4.8.2)."""
    lasting = {"clean": False, "properties": wire.prop(SESSION_EXPIRY, 60)}
    names = [f"{name}-1", f"{name}-2"]
    for client_id in names:
        member = connect(client_id, **lasting)
        member.subscribe(f"$share/g/{name}", 1)
        member.disconnect()
    connect().publish(name, b"m", 1)
    received = [payload for client_id in names for payload in collect(connect(client_id, **lasting))]
    assert [b"m"] == received


def test_an_unacknowledged_qos1_message_is_handed_on(connect: wire.Connect, name: str) -> None:
    """When the session of a member ends before its PUBACK, another member gets the message (4.8.2)."""
    leaver, heir, other = connect(), connect(), connect()
    leaver.subscribe(f"$share/g/{name}", 1)
    other.publish(name, b"m", 1)
    leaver.expect(wire.PUBLISH)
    heir.subscribe(f"$share/g/{name}", 1)
    leaver.disconnect()
    message = heir.receive()
    assert (name, b"m", 1) == (message.topic, message.payload, message.qos)
    heir.expect_nothing()


def test_an_acknowledged_message_is_not_handed_on(connect: wire.Connect, name: str) -> None:
    """What the leaving member has acknowledged is done (4.8.2)."""
    leaver, heir, other = connect(), connect(), connect()
    leaver.subscribe(f"$share/g/{name}", 1)
    other.publish(name, b"done", 1)
    assert b"done" == leaver.receive().payload
    heir.subscribe(f"$share/g/{name}", 1)
    leaver.disconnect()
    other.publish(name, b"next", 1)
    assert [b"next"] == collect(heir)


@clause(v5="MQTT-4.8.2-4")
def test_an_interrupted_qos2_delivery_is_completed_with_its_member(connect: wire.Connect, name: str) -> None:
    """A member that lost its connection in a QoS 2 delivery gets the rest of it after it reconnects, and no other
    member gets the message [MQTT-4.8.2-4].
    """
    lasting = {"clean": False, "properties": wire.prop(SESSION_EXPIRY, 60)}
    first, second = connect(f"{name}-a", **lasting), connect(f"{name}-b", **lasting)
    neighbour, other = connect(), connect()
    first.subscribe(f"$share/g/{name}/1", 2)
    second.subscribe(f"$share/g/{name}/2", 2)
    other.publish(f"{name}/1", b"not received", 2)
    other.publish(f"{name}/2", b"received", 2)
    sent = first.expect(wire.PUBLISH)
    answer(second, wire.PUBREC, second.expect(wire.PUBLISH))
    release = second.expect(wire.PUBREL)
    for n in (1, 2):
        neighbour.subscribe(f"$share/g/{name}/{n}", 2)
    first.disconnect()
    second.disconnect()
    neighbour.expect_nothing()

    first = connect(f"{name}-a", **lasting)
    again = first.expect(wire.PUBLISH)
    assert (sent.packet_id, b"not received", True) == (again.packet_id, again.payload, again.dup)
    answer(first, wire.PUBREC, again)
    answer(first, wire.PUBCOMP, first.expect(wire.PUBREL))
    second = connect(f"{name}-b", **lasting)
    repeated = second.expect(wire.PUBREL)
    assert release.packet_id == repeated.packet_id
    answer(second, wire.PUBCOMP, repeated)
    for client in (first, second, neighbour):
        client.expect_nothing()


@clause(v5="MQTT-4.8.2-5")
def test_a_qos2_message_dies_with_the_session_of_its_member(connect: wire.Connect, name: str) -> None:
    """When the session ends before the member returns, the QoS 2 message goes to nobody else [MQTT-4.8.2-5]."""
    leaver, neighbour, other = connect(), connect(), connect()
    leaver.subscribe(f"$share/g/{name}", 2)
    other.publish(name, b"lost", 2)
    leaver.expect(wire.PUBLISH)
    neighbour.subscribe(f"$share/g/{name}", 1)
    leaver.disconnect()
    other.publish(name, b"next", 2)
    assert b"next" == neighbour.receive().payload
    neighbour.expect_nothing()


@clause(v5="MQTT-4.8.2-6")
@qos_1_and_2
@each(reason=(UNSPECIFIED_ERROR, NOT_AUTHORIZED))
def test_a_refused_message_goes_to_nobody_else(connect: wire.Connect, name: str, qos: int, reason: int) -> None:
    """PUBACK or PUBREC with an error ends the message: no other member gets it, nor is it repeated [MQTT-4.8.2-6]."""
    refuser, neighbour, other = connect(), connect(), connect()
    refuser.subscribe(f"$share/g/{name}", qos)
    other.publish(name, b"refused", qos)
    message = refuser.expect(wire.PUBLISH)
    neighbour.subscribe(f"$share/g/{name}", 1)
    answer(refuser, wire.PUBACK if qos == 1 else wire.PUBREC, message, reason)
    refuser.expect_nothing()
    refuser.disconnect()
    other.publish(name, b"next", 1)
    assert [b"next"] == collect(neighbour)


def test_no_retained_messages_on_a_shared_subscription(connect: wire.Connect, name: str) -> None:
    """A new shared subscription gets no retained messages, neither the first member nor later ones (4.8.2)."""
    other = connect()
    other.publish(name, b"kept", 1, retain=True)
    for _ in range(2):
        assert [] == subscribe_and_take(connect(), f"$share/g/{name}", 1, count=0)
    (message,) = subscribe_and_take(connect(), name, 1, count=1)
    assert b"kept" == message.payload
    other.publish(name, b"", 1, retain=True)


def test_a_shared_subscription_is_part_of_the_session(connect: wire.Connect, name: str) -> None:
    """After a reconnect a member is still in its group, without subscribing again (4.8.2)."""
    lasting = {"clean": False, "properties": wire.prop(SESSION_EXPIRY, 60)}
    member, other = connect(name, **lasting), connect()
    member.subscribe(f"$share/g/{name}", 1)
    member.disconnect()
    member = connect(name, **lasting)
    other.publish(name, b"m", 1)
    assert b"m" == member.receive().payload


def test_a_member_that_subscribes_again_counts_once(connect: wire.Connect, name: str) -> None:
    """Repeating a shared subscription changes its options and gives no second share (4.8.2)."""
    member, other = connect(), connect()
    member.subscribe(f"$share/g/{name}", 0)
    member.subscribe(f"$share/g/{name}", 1)
    other.publish(name, b"m", 1)
    assert 1 == member.receive().qos
    member.expect_nothing()


def test_a_publisher_may_be_a_member(connect: wire.Connect, name: str) -> None:
    """A client may get what it has published itself through its group (4.8.2)."""
    member = connect()
    member.subscribe(f"$share/g/{name}", 0)
    member.publish(name, b"own")
    assert b"own" == member.receive().payload
