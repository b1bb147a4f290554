"""Sections 3.1.2.5 to 3.1.2.7 and 3.1.3.2: wills, when they are published and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.cases import both_versions, each, each_row, every_qos
from tests.support.clauses import clause
from tests.support.refusals import refused
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import (
    CONNACK,
    PUBLISH,
    Client,
    Connect,
    Will,
    connect_packet,
    disconnect_packet,
    prop,
    publish_packet,
)

Open = Callable[..., Client]

WILL_DELAY = 0x18
SESSION_EXPIRY = 0x11


def persistent(version: int) -> bytes:
    """Properties that let a session outlive its connection."""
    return prop(SESSION_EXPIRY, 300) if version == 5 else b""


def observer_of(connect: Connect, name: str, version: int = 5, qos: int = 0) -> Client:
    """A subscriber of everything below the test's topic."""
    observer = connect(f"{name}observer", version=version, keepalive=0)
    observer.subscribe(f"{name}/#", qos)
    return observer


@clause(v3="MQTT-3.1.2-8", v5=("MQTT-3.1.2-7", "MQTT-3.1.2-8"))
@both_versions
@each(end=("close", "abort"))
def test_the_will_is_published_when_the_connection_breaks(connect: Connect, name: str, version: int, end: str) -> None:
    """A connection that ends without DISCONNECT publishes its will [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name, version)
    client = connect(version=version, will=Will(f"{name}/will", b"gone"))
    observer.expect_nothing()
    getattr(client, end)()
    message = observer.expect(PUBLISH)
    assert (f"{name}/will", b"gone") == (message.topic, message.payload)


@clause(v3="MQTT-3.1.2-8", v5=("MQTT-3.1.2-7", "MQTT-3.1.2-8"))
@both_versions
def test_the_will_is_published_after_a_protocol_error(connect: Connect, name: str, version: int) -> None:
    """A client that is closed for breaking the rules has not said goodbye [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name, version)
    client = connect(version=version, will=Will(f"{name}/will", b"gone"))
    client.send(publish_packet(f"{name}/+", b"x", version=version))
    refused(client)
    assert b"gone" == observer.expect(PUBLISH).payload


@clause(v3=("MQTT-3.1.2-10", "MQTT-3.14.4-3"), v5=("MQTT-3.1.2-10", "MQTT-3.1.2-8", "MQTT-3.14.4-3"))
@each_row("version reason", ((3, None), (4, None), (5, None), (5, 0)))
def test_no_will_after_a_normal_disconnect(connect: Connect, name: str, version: int, reason: int | None) -> None:
    """DISCONNECT, in MQTT 5 with reason 0x00 given or left out, drops the will [MQTT-3.14.4-3]."""
    observer = observer_of(connect, name, version)
    client = connect(version=version, will=Will(f"{name}/will", b"gone", qos=1, retain=True))
    client.disconnect(reason)
    observer.expect_nothing()
    late = connect(version=version)
    late.subscribe(f"{name}/#")
    late.expect_nothing()


@clause(v3="MQTT-3.1.2-10", v5="MQTT-3.1.2-10")
@both_versions
def test_a_dropped_will_does_not_come_back_with_the_session(connect: Connect, name: str, version: int) -> None:
    """After DISCONNECT the session has no will, also when it is resumed without one and breaks [MQTT-3.1.2-10]."""
    observer = observer_of(connect, name, version)
    will = Will(f"{name}/will", b"gone")
    client = connect(name, version=version, clean=False, properties=persistent(version), will=will)
    client.disconnect()
    again = connect(name, version=version, clean=False, properties=persistent(version))
    again.close()
    connect(name, version=version, clean=False, properties=persistent(version)).disconnect()
    observer.expect_nothing()


@clause(v3="MQTT-3.1.2-10", v5="MQTT-3.1.2-10")
@both_versions
def test_a_will_is_published_once(connect: Connect, name: str, version: int) -> None:
    """A will that was published is forgotten, also when the session goes on and breaks again [MQTT-3.1.2-10]."""
    observer = observer_of(connect, name, version)
    will = Will(f"{name}/will", b"gone")
    connect(name, version=version, clean=False, properties=persistent(version), will=will).close()
    assert b"gone" == observer.expect(PUBLISH).payload
    connect(name, version=version, clean=False, properties=persistent(version)).close()
    connect(name, version=version, clean=False, properties=persistent(version)).disconnect()
    observer.expect_nothing()


@clause(v5="MQTT-3.1.2-8")
@each(reason=(0x04, 0x80, 0x82, 0x93, 0x97))
def test_the_will_is_published_after_a_disconnect_with_another_reason(connect: Connect, name: str, reason: int) -> None:
    """DISCONNECT with 0x04 asks for the will, and any reason but 0x00 leaves it in force [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name)
    client = connect(will=Will(f"{name}/will", b"gone"))
    client.send(disconnect_packet(reason=reason))
    client.expect_closed()
    assert b"gone" == observer.expect(PUBLISH).payload


@clause(v3="MQTT-3.1.2-12")
@both_versions
def test_no_will_without_the_flag(connect: Connect, name: str, version: int) -> None:
    """A client without a will leaves silently [MQTT-3.1.2-12]."""
    observer = connect(version=version)
    observer.subscribe("+/#")
    client = connect(name, version=version)
    client.close()
    # The same identifier again: by the time it is accepted, the broker has dealt with the first connection.
    connect(name, version=version).disconnect()
    observer.expect_nothing()


@clause(v3=("MQTT-3.1.2-9", "MQTT-3.1.2-14"), v5="MQTT-3.1.2-12")
@both_versions
@every_qos
def test_the_will_has_the_qos_of_the_flags(connect: Connect, name: str, version: int, qos: int) -> None:
    """Will QoS 0, 1 and 2 are what subscribers get [MQTT-3.1.2-12]."""
    observer = observer_of(connect, name, version, qos=2)
    connect(version=version, will=Will(f"{name}/will", b"gone", qos=qos)).close()
    assert qos == observer.receive().qos


@clause(v3="MQTT-3.1.2-16", v5="MQTT-3.1.2-14")
@both_versions
def test_a_will_without_retain_is_not_retained(connect: Connect, name: str, version: int) -> None:
    """Who subscribes after the will was published does not get it [MQTT-3.1.2-14]."""
    observer = observer_of(connect, name, version)
    connect(version=version, will=Will(f"{name}/will", b"gone", retain=False)).close()
    assert not observer.expect(PUBLISH).retain
    late = connect(version=version)
    late.subscribe(f"{name}/#")
    late.expect_nothing()


@clause(v3="MQTT-3.1.2-17", v5="MQTT-3.1.2-15")
@both_versions
def test_a_will_with_retain_is_retained(connect: Connect, name: str, version: int) -> None:
    """Who subscribes after the will was published gets it as a retained message [MQTT-3.1.2-15]."""
    observer = observer_of(connect, name, version)
    connect(version=version, will=Will(f"{name}/will", b"gone", qos=1, retain=True)).close()
    observer.expect(PUBLISH)
    late = connect(version=version)
    late.subscribe(f"{name}/#")
    message = late.expect(PUBLISH)
    assert (True, b"gone") == (message.retain, message.payload)
    late.publish(f"{name}/will", b"", retain=True)


@both_versions
def test_an_empty_will_is_a_message(connect: Connect, name: str, version: int) -> None:
    """A will message of no bytes is published like any other."""
    observer = observer_of(connect, name, version)
    connect(version=version, will=Will(f"{name}/will", b"")).close()
    assert b"" == observer.expect(PUBLISH).payload


@clause(v5="MQTT-3.1.3-10")
def test_will_properties_reach_the_subscribers(connect: Connect, name: str) -> None:
    """All properties of a message come along with the will, user properties in order [MQTT-3.1.3-10]."""
    pairs = [("b", "2"), ("a", "1"), ("b", "0"), ("", ""), ("a", "1")]
    properties = (
        prop(0x01, 1)
        + prop(0x02, 600)
        + prop(0x03, "text/plain")
        + prop(0x08, f"{name}/answer")
        + prop(0x09, b"\x00\x01")
        + b"".join(prop(0x26, pair) for pair in pairs)
    )
    observer = observer_of(connect, name)
    connect(will=Will(f"{name}/will", b"gone", properties=properties)).close()
    message = observer.expect(PUBLISH)
    assert pairs == message.prop_all(0x26)
    assert (1, "text/plain", f"{name}/answer", b"\x00\x01") == tuple(map(message.prop, (0x01, 0x03, 0x08, 0x09)))
    assert 0 < message.prop(0x02) <= 600
    assert message.prop(WILL_DELAY) is None


def test_the_life_of_a_will_begins_when_it_is_published(virtual: VirtualBroker) -> None:
    """A connection longer than the will's Message Expiry Interval does not use it up (chapter 3.1.3.2.4)."""
    observer = observer_of(virtual.connect, "t")
    lost = virtual.connect(keepalive=0, will=Will("t/will", b"gone", retain=True, properties=prop(0x02, 10)))
    virtual.let_pass(60)
    lost.close()
    assert 10 == observer.expect(PUBLISH).prop(0x02)


@clause(v5="MQTT-3.1.2-8")
@each(delay=(10, 3600), expiry=(0, 30, 300))
def test_a_delayed_will_comes_after_its_delay_or_with_the_end_of_the_session(
    virtual: VirtualBroker, delay: int, expiry: int
) -> None:
    """A will is held back for its delay, but not beyond the end of its session [MQTT-3.1.2-8]."""
    observer = observer_of(virtual.connect, "t")
    will = Will("t/will", b"gone", properties=prop(WILL_DELAY, delay))
    virtual.connect(properties=prop(SESSION_EXPIRY, expiry), will=will).close()
    held = min(delay, expiry)
    if held:
        virtual.let_pass(held - 0.5)
        observer.expect_nothing()
        virtual.let_pass(1)
    assert b"gone" == observer.expect(PUBLISH).payload
    observer.close()


@clause(v5="MQTT-3.1.2-8")
def test_a_delayed_will_comes_when_a_clean_start_ends_the_session(connect: Connect, name: str) -> None:
    """Clean Start ends the old session, and its will is published then [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name)
    will = Will(f"{name}/will", b"gone", properties=prop(WILL_DELAY, 3600))
    connect(name, properties=prop(SESSION_EXPIRY, 3600), will=will).close()
    connect(name, clean=True)
    assert b"gone" == observer.expect(PUBLISH).payload


@clause(v5=("MQTT-3.1.3-9", "MQTT-3.1.2-8"))
@each(lost=(True, False))
def test_a_new_connection_stops_a_delayed_will(virtual: VirtualBroker, lost: bool) -> None:
    """A client that comes back to its session in time, or takes its own place, has not gone [MQTT-3.1.3-9]."""
    observer = observer_of(virtual.connect, "t")
    kept: dict[str, Any] = {"clean": False, "keepalive": 0, "properties": prop(SESSION_EXPIRY, 300)}
    old = virtual.connect("car", will=Will("t/will", b"gone", properties=prop(WILL_DELAY, 10)), **kept)
    if lost:
        old.close()
        virtual.let_pass(9)
    back = virtual.connect("car", **kept)
    assert back.connack is not None and back.connack.session_present
    if not lost:
        refused(old, 0x8E)
    virtual.let_pass(60)
    observer.expect_nothing()
    observer.close()
    back.close()


@clause(v3="MQTT-3.1.2-8", v5="MQTT-3.1.2-8")
@both_versions
@each(clean=(True, False))
def test_a_take_over_publishes_a_will_without_delay(connect: Connect, name: str, version: int, clean: bool) -> None:
    """The connection that is pushed aside is closed without DISCONNECT from its client [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name, version)
    will = Will(f"{name}/will", b"gone")
    old = connect(name, version=version, clean=False, properties=persistent(version), will=will)
    connect(name, version=version, clean=clean, properties=persistent(version))
    refused(old, 0x8E)
    assert b"gone" == observer.expect(PUBLISH).payload


@clause(v5=("MQTT-3.1.2-8", "MQTT-3.1.2-7"))
def test_a_disconnect_that_ends_the_session_publishes_a_delayed_will_now(connect: Connect, name: str) -> None:
    """DISCONNECT 0x04 with a session expiry of zero leaves nothing to wait for [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name)
    will = Will(f"{name}/will", b"gone", properties=prop(WILL_DELAY, 3600))
    client = connect(name, properties=prop(SESSION_EXPIRY, 3600), will=will)
    client.disconnect(0x04, prop(SESSION_EXPIRY, 0))
    assert b"gone" == observer.expect(PUBLISH).payload


@clause(v3="MQTT-3.1.2-8", v5="MQTT-3.1.2-7")
@both_versions
def test_the_will_of_a_rejected_connect_is_never_published(
    open_client: Open, connect: Connect, name: str, version: int
) -> None:
    """Only an accepted CONNECT leaves a will behind [MQTT-3.1.2-8]."""
    observer = observer_of(connect, name, version)
    will = Will(f"{name}/will", b"x", retain=True)
    client = open_client(version)
    if version == 4:
        client.send(connect_packet("", version=4, clean=False, will=will))
    else:
        client.send(connect_packet(name, will=will, properties=prop(0x15, "no-such-method")))
    assert [CONNACK] == [answer.type for answer in client.expect_closed()]
    observer.expect_nothing()
