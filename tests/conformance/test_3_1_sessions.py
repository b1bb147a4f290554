"""Sections 3.1.2.4, 3.1.2.11.2, 3.1.4 and 4.1: sessions that are kept, resumed, taken over and ended."""

from __future__ import annotations

import pytest

from tests.support.cases import both_versions, each, qos_1_and_2
from tests.support.clauses import clause
from tests.support.refusals import PROTOCOL_ERROR, refused
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import (
    PUBLISH,
    Client,
    Connect,
    disconnect_packet,
    prop,
)

EXPIRY = 0x11
FOREVER = 0xFFFF_FFFF


def present(client: Client) -> bool:
    """Whether the CONNACK of a client told of a session."""
    assert client.connack is not None
    return client.connack.session_present


@pytest.fixture
def join(connect: Connect) -> Connect:
    """`join(client_id, *, version, ...)`: connect to a session that outlives its connections."""

    def joined(client_id: str, *, version: int, clean: bool = False, expiry: int = 300, **kw: object) -> Client:
        properties = prop(EXPIRY, expiry) if version == 5 else b""
        return connect(client_id, version=version, clean=clean, properties=properties, **kw)

    return joined


# --- clean start and clean session --------------------------------------------------------------------------------


@clause(
    v3=("MQTT-3.1.2-4", "MQTT-3.1.4-3", "MQTT-3.2.2-2", "MQTT-3.2.2-3", "MQTT-4.1.0-1"),
    v5=("MQTT-3.1.2-5", "MQTT-3.1.2-6", "MQTT-3.1.2-23", "MQTT-3.1.4-4", "MQTT-3.2.2-3"),
)
@both_versions
@each(end=("disconnect", "close", "abort"))
def test_a_session_is_made_kept_and_resumed(connect: Connect, join: Connect, name: str, version: int, end: str) -> None:
    """Subscriptions survive the connection, and CONNACK tells new sessions from old ones [MQTT-3.1.2-5]."""
    first = join(name, version=version)
    assert not present(first)
    first.subscribe(f"{name}/t", 1)
    getattr(first, end)()
    second = join(name, version=version)
    assert present(second)
    connect(version=version).publish(f"{name}/t", b"x", 1)
    assert b"x" == second.receive().payload


@clause(v3=("MQTT-3.1.2-5", "MQTT-4.1.0-1"), v5=("MQTT-3.1.2-5", "MQTT-3.1.2-23"))
@both_versions
def test_messages_for_an_absent_client_are_stored(connect: Connect, join: Connect, name: str, version: int) -> None:
    """QoS 1 and 2 messages wait in the session, in order, at the QoS that was granted [MQTT-3.1.2-5]."""
    away = join(name, version=version)
    away.subscribe([(f"{name}/one", 1), (f"{name}/two", 2)])
    away.disconnect()
    publisher = connect(version=version)
    for number in range(5):
        publisher.publish(f"{name}/one", b"one %d" % number, 2)
        publisher.publish(f"{name}/two", b"two %d" % number, 2)
    back = join(name, version=version)
    messages = [back.receive() for _ in range(10)]
    assert [b"one %d" % n for n in range(5)] == [m.payload for m in messages if m.topic.endswith("one")]
    assert [b"two %d" % n for n in range(5)] == [m.payload for m in messages if m.topic.endswith("two")]
    assert {1} == {m.qos for m in messages if m.topic.endswith("one")}
    assert {2} == {m.qos for m in messages if m.topic.endswith("two")}
    back.expect_nothing()


@clause(v3=("MQTT-3.1.2-6", "MQTT-3.2.2-1", "MQTT-4.4.0-1"), v5=("MQTT-3.1.2-4", "MQTT-3.2.2-2", "MQTT-4.4.0-1"))
@both_versions
@qos_1_and_2
def test_a_clean_start_discards_the_old_session(
    connect: Connect, join: Connect, name: str, version: int, qos: int
) -> None:
    """Subscriptions, stored messages and unfinished exchanges of the old session are gone [MQTT-3.1.2-4]."""
    first = join(name, version=version)
    first.subscribe(f"{name}/t", qos)
    publisher = connect(version=version)
    publisher.publish(f"{name}/t", b"in flight", qos)
    first.expect(PUBLISH)
    first.close()
    publisher.publish(f"{name}/t", b"stored", qos)
    clean = join(name, version=version, clean=True)
    assert not present(clean)
    publisher.publish(f"{name}/t", b"new", qos)
    clean.expect_nothing()


@clause(v3="MQTT-3.1.2-6")
@each(end=("disconnect", "close"))
def test_a_clean_session_ends_with_its_connection(connect: Connect, name: str, end: str) -> None:
    """State of a clean session is not found by a later CONNECT without Clean Session [MQTT-3.1.2-6]."""
    first = connect(name, version=4, clean=True)
    first.subscribe(f"{name}/t", 1)
    getattr(first, end)()
    second = connect(name, version=4, clean=False)
    assert not present(second)
    connect(version=4).publish(f"{name}/t", b"x", 1)
    second.expect_nothing()


@clause(v5=("MQTT-3.1.2-23", "MQTT-4.1.0-2", "MQTT-3.2.2-3"))
@each(properties=(b"", prop(EXPIRY, 0)))
def test_without_an_expiry_the_session_ends_with_its_connection(connect: Connect, name: str, properties: bytes) -> None:
    """A session expiry of zero or none means that nothing is kept, also without Clean Start [MQTT-4.1.0-2]."""
    first = connect(name, clean=False, properties=properties)
    first.subscribe(f"{name}/t", 1)
    first.close()
    second = connect(name, clean=False)
    assert not present(second)


@clause(v5="MQTT-3.1.2-23")
def test_a_clean_start_may_begin_a_session_that_is_kept(connect: Connect, name: str) -> None:
    """Clean Start is about the past, the session expiry about the future [MQTT-3.1.2-23]."""
    connect(name, clean=True, properties=prop(EXPIRY, 300)).close()
    assert present(connect(name, clean=False))


@clause(v3="MQTT-3.1.2-7")
@both_versions
def test_retained_messages_outlive_the_session(connect: Connect, name: str, version: int) -> None:
    """Retained messages stay when the session that published them ends and when it is discarded [MQTT-3.1.2-7]."""
    publisher = connect(name, version=version)
    publisher.publish(f"{name}/t", b"stays", 1, retain=True)
    publisher.disconnect()
    again = connect(name, version=version)
    again.subscribe(f"{name}/t")
    message = again.expect(PUBLISH)
    assert (b"stays", True) == (message.payload, message.retain)
    again.publish(f"{name}/t", b"", retain=True)


# --- duration -----------------------------------------------------------------------------------------------------


def lives(virtual: VirtualBroker, client_id: str) -> bool:
    """Whether there is a session of this client; asking ends it."""
    client = virtual.connect(client_id, clean=False)
    client.disconnect()
    return present(client)


@clause(v3="MQTT-4.1.0-2", v5="MQTT-4.1.0-1")
@both_versions
def test_a_session_lasts_as_long_as_its_connection(virtual: VirtualBroker, version: int) -> None:
    """State stays while the connection is open, however short the session may live afterwards [MQTT-4.1.0-1]."""
    properties = prop(EXPIRY, 1) if version == 5 else b""
    client = virtual.connect(version=version, clean=True, keepalive=0, properties=properties)
    client.subscribe("t", 1)
    virtual.connect(version=version).publish("t", b"early", 1)
    early = client.expect(PUBLISH)
    virtual.let_pass(60)
    virtual.connect(version=version).publish("t", b"late", 1)
    late = client.expect(PUBLISH)
    assert b"late" == late.payload
    assert early.packet_id != late.packet_id  # the first one is still in flight
    client.expect_nothing()


@clause(v5="MQTT-4.1.0-2")
def test_a_session_ends_when_its_expiry_is_over(virtual: VirtualBroker) -> None:
    """The interval counts from the end of each connection, and each CONNECT sets its own [MQTT-4.1.0-2]."""
    for client_id, *expiries in (("short", 10), ("long", 300), ("longer", 10, 300), ("shorter", 300, 10)):
        for expiry in expiries:
            virtual.connect(client_id, clean=False, properties=prop(EXPIRY, expiry)).close()
            virtual.let_pass(1)
    virtual.let_pass(12)
    assert [False, True, True, False] == [lives(virtual, name) for name in ("short", "long", "longer", "shorter")]


def test_disconnect_may_end_shorten_and_lengthen_the_session(virtual: VirtualBroker) -> None:
    """A session expiry in DISCONNECT replaces that of the CONNECT, if that had one."""
    for client_id, first, then in (("ended", 300, 0), ("shorter", 300, 10), ("longer", 10, 300)):
        virtual.connect(client_id, properties=prop(EXPIRY, first)).disconnect(0, prop(EXPIRY, then))
    assert not lives(virtual, "ended")
    virtual.let_pass(12)
    assert [False, True] == [lives(virtual, client_id) for client_id in ("shorter", "longer")]


@clause(v5="MQTT-4.13.1-1")
@each(properties=(b"", prop(EXPIRY, 0)))
def test_disconnect_may_not_prolong_a_session_of_no_length(connect: Connect, name: str, properties: bytes) -> None:
    """An expiry in DISCONNECT after none in CONNECT is a protocol error and keeps nothing [MQTT-4.13.1-1]."""
    client = connect(name, properties=properties)
    client.send(disconnect_packet(reason=0, properties=prop(EXPIRY, 300)))
    refused(client, PROTOCOL_ERROR)
    assert not present(connect(name, clean=False))


def test_a_lowered_expiry_is_told(connect: Connect, name: str) -> None:
    """Who asks for a longer session than the broker keeps is told what it gets; others are told nothing."""
    forever, modest = connect(properties=prop(EXPIRY, FOREVER)), connect(properties=prop(EXPIRY, 3600))
    assert forever.connack is not None and modest.connack is not None
    assert 7 * 86_400 == forever.connack.prop(EXPIRY)
    assert modest.connack.prop(EXPIRY) in (None, 3600)


# --- take-over ----------------------------------------------------------------------------------------------------


@clause(v3="MQTT-3.1.4-2", v5=("MQTT-3.1.4-3", "MQTT-3.14.4-2", "MQTT-4.13.2-1"))
@both_versions
@each(clean=(True, False))
def test_a_second_client_takes_the_place_of_the_first(
    connect: Connect, join: Connect, name: str, version: int, clean: bool
) -> None:
    """The old connection hears 0x8E (MQTT 5) and is closed; the new one has the session or a new one [MQTT-3.1.4-3]."""
    old = join(name, version=version)
    old.subscribe(f"{name}/t", 1)
    new = join(name, version=version, clean=clean)
    assert present(new) is not clean
    refused(old, 0x8E)
    connect(version=version).publish(f"{name}/t", b"x", 1)
    if clean:
        new.expect_nothing()
    else:
        assert b"x" == new.receive().payload


@clause(v3="MQTT-3.1.4-2", v5="MQTT-3.1.4-3")
def test_a_take_over_works_between_versions(connect: Connect, join: Connect, name: str) -> None:
    """The identifier decides, not the version: each kind of client may replace the other [MQTT-3.1.4-3]."""
    five = join(name, version=5)
    five.subscribe(f"{name}/t", 1)
    four = join(name, version=4)
    assert present(four)
    refused(five, 0x8E)
    five = join(name, version=5)
    assert present(five)
    refused(four)
    connect().publish(f"{name}/t", b"x", 1)
    assert b"x" == five.receive().payload


@clause(v3="MQTT-3.1.4-2", v5="MQTT-3.1.4-3")
@both_versions
def test_many_take_overs_leave_one_client(join: Connect, name: str, version: int) -> None:
    """Of many clients with one identifier the last one is served and all others are closed [MQTT-3.1.4-3]."""
    clients = [join(name, version=version) for _ in range(10)]
    for old in clients[:-1]:
        refused(old, 0x8E)
    clients[-1].expect_nothing()
