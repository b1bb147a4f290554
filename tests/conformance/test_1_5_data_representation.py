"""Section 1.5: strings, variable byte integers and string pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.clauses import clause
from tests.support.refusals import BROKEN, connect_refused, refused
from tests.support.wire import (
    PUBLISH,
    Client,
    Will,
    connect_packet,
    packet,
    prop,
    publish_packet,
    subscribe_packet,
    unsubscribe_packet,
    utf8,
)

VERSIONS = (4, 5)

#: Byte sequences that are not UTF-8 as Unicode and RFC 3629 define it.
ILL_FORMED = {
    "surrogate": b"a\xed\xa0\x80b",
    "surrogate-pair": b"\xed\xa0\x80\xed\xb0\x80",
    "overlong": b"a\xc0\xaf",
    "overlong-null": b"\xc0\x80",
    "beyond-unicode": b"\xf4\x90\x80\x80",
    "five-bytes": b"\xf8\x88\x80\x80\x80",
    "lone-continuation": b"a\x80",
    "cut-short": b"a\xe2\x82",
    "never-a-byte": b"\xff\xfe",
}
NULL = {"null": b"a\x00b", "null-alone": b"\x00"}

#: Packets of a connected client with a string to fill in.
STRINGS_AFTER_CONNECT: dict[str, Callable[[bytes, int], bytes]] = {
    "topic": lambda bad, version: publish_packet(bad, b"x", version=version),
    "filter": lambda bad, version: subscribe_packet(1, [(bad, 0)], version=version),
    "unsubscribe-filter": lambda bad, version: unsubscribe_packet(1, [bad], version=version),
}
STRINGS_IN_CONNECT: dict[str, Callable[[bytes, int], bytes]] = {
    "client-id": lambda bad, version: connect_packet(bad, version=version),
    "will-topic": lambda bad, version: connect_packet("c15", version=version, will=Will(bad, b"x")),
    "user-name": lambda bad, version: connect_packet("c15", version=version, username=bad),
}
#: Properties that are strings, in a PUBLISH: content type, response topic.
STRING_PROPERTIES = (0x03, 0x08)


def bad_strings(kinds: dict[str, bytes]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bad", list(kinds.values()), ids=list(kinds))


def places(kinds: dict[str, Callable[[bytes, int], bytes]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("build", list(kinds.values()), ids=list(kinds))


@clause(v3="MQTT-1.5.3-1", v5="MQTT-1.5.4-1")
@pytest.mark.parametrize("version", VERSIONS)
@places(STRINGS_AFTER_CONNECT)
@bad_strings(ILL_FORMED)
def test_ill_formed_utf8_closes_the_connection(
    connect: Callable[..., Client], version: int, build: Callable[[bytes, int], bytes], bad: bytes
) -> None:
    """A packet with a string that is not well-formed UTF-8 ends the connection [MQTT-1.5.4-1]."""
    client = connect(version=version)
    client.send(build(bad, version))
    # A topic may also be called invalid: 0x8F for a filter, 0x90 for a name.
    refused(client, *BROKEN, 0x8F, 0x90)


@clause(v3="MQTT-1.5.3-2", v5="MQTT-1.5.4-2")
@pytest.mark.parametrize("version", VERSIONS)
@places(STRINGS_AFTER_CONNECT)
@bad_strings(NULL)
def test_the_null_character_closes_the_connection(
    connect: Callable[..., Client], version: int, build: Callable[[bytes, int], bytes], bad: bytes
) -> None:
    """A packet with U+0000 in a string ends the connection [MQTT-1.5.4-2]."""
    client = connect(version=version)
    client.send(build(bad, version))
    refused(client, *BROKEN, 0x8F, 0x90)


@clause(
    v3=("MQTT-1.5.3-1", "MQTT-1.5.3-2", "MQTT-3.1.3-4", "MQTT-3.1.3-10", "MQTT-3.1.3-11"),
    v5=("MQTT-1.5.4-1", "MQTT-1.5.4-2", "MQTT-3.1.3-4", "MQTT-3.1.3-11", "MQTT-3.1.3-12"),
)
@pytest.mark.parametrize("version", VERSIONS)
@places(STRINGS_IN_CONNECT)
@bad_strings(ILL_FORMED | NULL)
def test_a_connect_with_a_bad_string_is_closed(
    open_client: Callable[..., Client], version: int, build: Callable[[bytes, int], bytes], bad: bytes
) -> None:
    """Client identifier, will topic and user name of a CONNECT are UTF-8 strings [MQTT-3.1.3-4]."""
    client = open_client(version)
    client.send(build(bad, version))
    connect_refused(client, *BROKEN, 0x85, 0x90)


@clause(v5=("MQTT-1.5.4-1", "MQTT-1.5.4-2"))
@pytest.mark.parametrize("key", STRING_PROPERTIES, ids=hex)
@bad_strings(ILL_FORMED | NULL)
def test_bad_strings_in_properties_close_the_connection(
    connect: Callable[..., Client], name: str, key: int, bad: bytes
) -> None:
    """String properties follow the rules of strings [MQTT-1.5.4-1]."""
    client = connect()
    client.send(publish_packet(name, b"x", properties=prop(key, bad)))
    refused(client, *BROKEN, 0x90)


@clause(v5="MQTT-1.5.7-1")
@pytest.mark.parametrize("half", (0, 1), ids=("name", "value"))
@bad_strings(ILL_FORMED | NULL)
def test_bad_string_pairs_close_the_connection(
    connect: Callable[..., Client], name: str, half: int, bad: bytes
) -> None:
    """Both halves of a user property are strings [MQTT-1.5.7-1]."""
    pair: list[bytes] = [b"name", b"value"]
    pair[half] = bad
    client = connect()
    client.send(publish_packet(name, b"x", properties=prop(0x26, pair)))
    refused(client, *BROKEN)


@clause(v3="MQTT-1.5.3-3", v5="MQTT-1.5.4-3")
@pytest.mark.parametrize("version", VERSIONS)
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
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("whole", (127, 128, 16_383, 16_384, 200_000))
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
@pytest.mark.parametrize("size", (1, 118, 119, 120, 121, 122, 123, 124, 125, 1_000))
def test_property_lengths_are_sent_in_their_shortest_form(connect: Callable[..., Client], name: str, size: int) -> None:
    """The property length of a PUBLISH from the broker takes as few bytes as it can [MQTT-1.5.5-1]."""
    client = connect()
    client.subscribe(name)
    client.publish(name, b"x", properties=prop(0x26, ("n", "v" * size)))
    assert ("n", "v" * size) == client.expect(PUBLISH).prop(0x26)  # the reader refuses every longer form


@clause(v3="MQTT-4.8.0-1", v5="MQTT-4.13.1-1")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("first", (0x30, 0x82, 0xC0), ids=("publish", "subscribe", "pingreq"))
def test_a_length_of_five_bytes_is_malformed(connect: Callable[..., Client], version: int, first: int) -> None:
    """A remaining length whose fourth byte promises a fifth is malformed [MQTT-4.13.1-1]."""
    client = connect(version=version)
    client.send(bytes([first]) + b"\xff\xff\xff\xff\x7f")
    refused(client, *BROKEN)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_packet_may_arrive_byte_by_byte(connect: Callable[..., Client], name: str, version: int) -> None:
    """A packet in single bytes is the same packet: part of a length or a string is waited for, not guessed."""
    client = connect(version=version)
    client.subscribe(name)
    for byte in publish_packet(name, b"x" * 200, version=version):
        client.send(bytes([byte]))
    assert b"x" * 200 == client.expect(PUBLISH).payload
