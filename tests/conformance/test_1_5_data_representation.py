"""Section 1.5: strings, variable byte integers and string pairs."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.cases import both_versions, each
from tests.support.clauses import clause
from tests.support.wire import (
    PUBLISH,
    Client,
    packet,
    prop,
    publish_packet,
    utf8,
)


@clause(v3="MQTT-1.5.3-3", v5="MQTT-1.5.4-3")
@both_versions
def test_a_byte_order_mark_is_a_character_like_any_other(
    connect: Callable[..., Client], name: str, version: int
) -> None:
    """EF BB BF in front of a topic or inside it is neither skipped nor stripped [MQTT-1.5.4-3]."""
    plain, marked = connect(version=version), connect(version=version)
    plain.subscribe(f"{name}/t")
    marked.subscribe(f"\ufeff{name}/\ufefft")
    plain.publish(f"\ufeff{name}/\ufefft", b"marked")
    plain.expect_nothing()
    assert f"\ufeff{name}/\ufefft" == marked.expect(PUBLISH).topic
    plain.publish(f"{name}/t", b"plain")
    assert f"{name}/t" == plain.expect(PUBLISH).topic
    marked.expect_nothing()


@clause(v5="MQTT-1.5.5-1")
@both_versions
@each(whole=(127, 128, 16_383, 16_384, 200_000))
def test_lengths_are_sent_in_their_shortest_form(
    connect: Callable[..., Client], name: str, version: int, whole: int
) -> None:
    """The remaining length of a PUBLISH from the broker takes as few bytes as it can [MQTT-1.5.5-1]."""
    client = connect(version=version)
    client.subscribe(name)
    head = len(utf8(name)) + (1 if version == 5 else 0)
    client.publish(name, b"x" * (whole - head))
    message = client.expect(PUBLISH)  # the reader refuses every longer form
    assert packet(0x30, message.raw[-whole:]) == message.raw


@clause(v5="MQTT-1.5.5-1")
@each(size=(1, 118, 119, 120, 121, 122, 123, 124, 125, 1_000))
def test_property_lengths_are_sent_in_their_shortest_form(connect: Callable[..., Client], name: str, size: int) -> None:
    """The property length of a PUBLISH from the broker takes as few bytes as it can [MQTT-1.5.5-1]."""
    client = connect()
    client.subscribe(name)
    client.publish(name, b"x", properties=prop(0x26, ("n", "v" * size)))
    assert ("n", "v" * size) == client.expect(PUBLISH).prop(0x26)  # the reader refuses every longer form


@both_versions
def test_a_packet_may_arrive_byte_by_byte(connect: Callable[..., Client], name: str, version: int) -> None:
    """A packet in single bytes is the same packet: part of a length or a string is waited for, not guessed."""
    client = connect(version=version)
    client.subscribe(name)
    for byte in publish_packet(name, b"x" * 200, version=version):
        client.send(bytes([byte]))
    assert b"x" * 200 == client.expect(PUBLISH).payload
