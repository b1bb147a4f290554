"""Section 4.13 of MQTT 5 and 4.8 of MQTT 3.1.1: an error ends the connection it happened on, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.clauses import clause
from tests.support.refusals import BROKEN, PROTOCOL_ERROR, refused
from tests.support.wire import (
    PUBLISH,
    Client,
    connect_packet,
    packet,
    prop,
    publish_packet,
    subscribe_packet,
    unsubscribe_packet,
    utf8,
)

VERSIONS = (4, 5)
Connect = Callable[..., Client]


def mistakes() -> list[object]:
    """Packets of a connected client that break the rules, with the reasons that MQTT 5 may give."""
    cases: list[object] = []
    for version in VERSIONS:
        none = b"\x00" if version == 5 else b""
        for case, raw, reasons in (
            ("qos-3", packet(0x36, utf8("a") + b"\x00\x01" + none + b"x"), BROKEN),
            ("dup-on-qos-0", packet(0x38, utf8("a") + none + b"x"), BROKEN),
            ("topic-cut", packet(0x30, b"\x00\x09abc"), BROKEN),
            ("identifier-cut", packet(0x32, utf8("a") + b"\x00"), BROKEN),
            ("empty-publish", packet(0x30), BROKEN),
            ("wildcard-hash", publish_packet("a/#", b"x", version=version), (*BROKEN, 0x90)),
            ("wildcard-plus", publish_packet("+/a", b"x", version=version), (*BROKEN, 0x90)),
            ("second-connect", connect_packet("c", version=version), (PROTOCOL_ERROR,)),
            ("empty-subscribe", packet(0x82), BROKEN),
            ("no-filters", subscribe_packet(1, [], version=version), BROKEN),
            ("filter-without-options", packet(0x82, b"\x00\x01" + none + utf8("a")), BROKEN),
            ("subscribe-qos-3", subscribe_packet(1, [("a", 3)], version=version), BROKEN),
            ("reserved-options", subscribe_packet(1, [("a", 0xC0)], version=version), BROKEN),
            ("no-unsubscribe-filters", unsubscribe_packet(1, [], version=version), BROKEN),
            ("empty-puback", packet(0x40), BROKEN),
            ("puback-cut", packet(0x40, b"\x00"), BROKEN),
            ("pubrel-flags", packet(0x60, b"\x00\x01"), BROKEN),
            ("type-0", packet(0x00), BROKEN),
            ("five-byte-length", b"\x30\xff\xff\xff\xff\x01", BROKEN),
        ):
            cases.append(pytest.param(version, raw, reasons, id=f"v{version}-{case}"))
    return cases


@clause(v3="MQTT-4.8.0-1", v5=("MQTT-4.13.1-1", "MQTT-4.13.2-1"))
@pytest.mark.parametrize(("version", "raw", "reasons"), mistakes())
def test_an_error_ends_the_connection_it_came_on(
    connect: Connect, name: str, version: int, raw: bytes, reasons: tuple[int, ...]
) -> None:
    """The offender is told (MQTT 5) and closed, what follows is ignored, others are served on [MQTT-4.13.1-1]."""
    bystander = connect(version=version)
    bystander.subscribe(name)
    offender = connect(version=version)
    offender.send(raw + publish_packet(name, b"behind the error", version=version))
    refused(offender, *reasons)
    bystander.expect_nothing()
    bystander.publish(name, b"still here")
    assert b"still here" == bystander.expect(PUBLISH).payload


@clause(v3=("MQTT-4.8.0-1", "MQTT-4.8.0-2"), v5="MQTT-4.13.1-1")
@pytest.mark.parametrize("version", VERSIONS)
def test_what_came_before_the_error_was_served(connect: Connect, name: str, version: int) -> None:
    """Packets in front of the broken one in the same write have their effect [MQTT-4.13.1-1]."""
    observer = connect(version=version)
    observer.subscribe(name)
    offender = connect(version=version)
    offender.send(publish_packet(name, b"good", version=version) + packet(0x00))
    refused(offender, *BROKEN)
    assert b"good" == observer.expect(PUBLISH).payload


@clause(v3="MQTT-4.8.0-2", v5="MQTT-4.13.1-1")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_packet_the_broker_has_no_room_for_ends_the_connection(connect: Connect, name: str, version: int) -> None:
    """A well-formed packet beyond the broker's maximum closes the connection [MQTT-4.8.0-2].

    The transient error that an outsider can cause: the broker could not take this packet now.
    """
    observer = connect(version=version)
    observer.subscribe(name)
    offender = connect(version=version)
    offender.send(publish_packet(name, b"x" * 1_048_577, version=version))
    refused(offender, 0x95)
    observer.expect_nothing()


@clause(v5="MQTT-4.13.1-1")
@pytest.mark.parametrize(
    ("raw", "reasons"),
    [
        pytest.param(subscribe_packet(1, [("a", 0x30)]), (PROTOCOL_ERROR, 0x81), id="retain-handling-3"),
        pytest.param(subscribe_packet(1, [("$share/g/a", 0x04)]), (PROTOCOL_ERROR,), id="no-local-shared"),
        pytest.param(
            subscribe_packet(1, [("a", 0)], properties=prop(0x0B, 0)), (PROTOCOL_ERROR, 0x81), id="identifier-0"
        ),
        pytest.param(
            publish_packet("a", b"x", properties=prop(0x0B, 1)), (PROTOCOL_ERROR, 0x81), id="publish-identifier"
        ),
        pytest.param(publish_packet("", b"x"), (PROTOCOL_ERROR, 0x90), id="no-topic-no-alias"),
        pytest.param(publish_packet("", b"x", properties=prop(0x23, 3)), (PROTOCOL_ERROR,), id="unknown-alias"),
        pytest.param(publish_packet("a", b"x", properties=prop(0x08, "a/#")), (*BROKEN, 0x90), id="response-wildcard"),
        pytest.param(publish_packet("a", b"x", properties=prop(0x01, 2)), BROKEN, id="payload-format-2"),
    ],
)
def test_protocol_errors_of_mqtt_5_have_their_reason(connect: Connect, raw: bytes, reasons: tuple[int, ...]) -> None:
    """Errors that MQTT 5 names are answered with the reason it names [MQTT-4.13.1-1]."""
    client = connect()
    client.send(raw)
    refused(client, *reasons)
