"""The codec over the table of packets, and every way to get a packet wrong."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt import properties as properties_module
from motorcade.mqtt.codec import MAX_PACKET, Decoder, Limits, decode, encode, split
from motorcade.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Packet,
    Pingreq,
    Puback,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import Properties
from motorcade.mqtt.reasons import ProtocolError
from tests.unit.mqtt.table import PACKETS, PacketCase

MALFORMED = ReasonCode.MALFORMED_PACKET
PROTOCOL = ReasonCode.PROTOCOL_ERROR
each_packet = pytest.mark.parametrize("case", PACKETS, ids=lambda case: case.name)


@each_packet
def test_a_packet_is_written_as_in_the_table(case: PacketCase) -> None:
    assert case.raw.hex(" ") == encode(case.packet, case.version).hex(" ")


@each_packet
def test_a_packet_is_read_as_in_the_table(case: PacketCase) -> None:
    assert [case.packet] == Decoder(case.version).feed(case.raw)


@each_packet
def test_every_prefix_asks_for_more(case: PacketCase) -> None:
    """A packet cut short at any byte is unfinished, never malformed."""
    for end in range(len(case.raw)):
        assert split(case.raw[:end], 0, MAX_PACKET) is None
        decoder = Decoder(case.version)
        assert [] == decoder.feed(case.raw[:end])
        assert [case.packet] == decoder.feed(case.raw[end:])


@each_packet
def test_a_body_cut_short_is_never_the_packet_itself(case: PacketCase) -> None:
    """A body that ends early is refused, or is another right packet: a PUBLISH with less payload, a shorter list."""
    start, end = split(case.raw, 0, MAX_PACKET) or (0, 0)
    body = case.raw[start:end]
    for cut in range(len(body)):
        try:
            packet = decode(case.raw[0], body[:cut], case.version)
        except ProtocolError as error:
            assert error.reason >= MALFORMED  # noqa: PT017 - most cuts raise, not all
        else:
            assert case.packet != packet


_OPEN_ENDED = (Publish, Subscribe, Suback, Unsubscribe, Unsuback)  # a payload or a list may go on
_CLOSED = [case for case in PACKETS if not isinstance(case.packet, _OPEN_ENDED)]


@pytest.mark.parametrize("case", _CLOSED, ids=lambda case: case.name)
def test_bytes_after_the_end_are_refused(case: PacketCase) -> None:
    """In the short forms of MQTT 5 the first byte too many is taken for a reason code, which 0xEE is not."""
    start, end = split(case.raw, 0, MAX_PACKET) or (0, 0)
    with pytest.raises(ProtocolError) as caught:
        decode(case.raw[0], case.raw[start:end] + b"\xee\xee", case.version)
    assert caught.value.reason in {MALFORMED, PROTOCOL}


@pytest.mark.parametrize("version", (3, 4, 5))
def test_packets_in_one_piece_and_byte_by_byte_are_the_same(version: int) -> None:
    cases = [case for case in PACKETS if case.version == version]
    stream = b"".join(case.raw for case in cases)
    decoder = Decoder(version)
    assert [case.packet for case in cases] == Decoder(version).feed(stream)
    assert [case.packet for case in cases] == [p for i in range(len(stream)) for p in decoder.feed(stream[i : i + 1])]


def test_a_decoder_speaks_the_version_of_the_connect_that_passed() -> None:
    decoder = Decoder()
    assert 4 == decoder.version
    decoder.feed(encode(Connect("c", 5), 5))
    assert 5 == decoder.version
    assert [Auth()] == decoder.feed(b"\xf0\x00")


def test_a_broken_stream_stays_broken() -> None:
    decoder = Decoder(4)
    for data in (b"\x00\x00", b"\xc0\x00"):
        with pytest.raises(ProtocolError):
            decoder.feed(data)


def test_the_table_of_properties_has_the_order_of_the_record() -> None:
    """Encoder and decoder pair fields and table by position."""
    assert list(Properties.__slots__) == [wire.name for wire in properties_module._TABLE]
    assert sorted(wire.id for wire in properties_module._TABLE) == [wire.id for wire in properties_module._TABLE]
    assert 27 == len(properties_module._TABLE)


# --- framing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("c000", (2, 2)),
        ("3005", None),
        ("307f" + "00" * 127, (2, 129)),
        ("308001" + "00" * 128, (3, 131)),
        ("30ffff7f", None),
        ("30808001", None),
        ("30ffffff7f", None),
    ],
)
def test_split_finds_body_and_end(raw: str, expected: tuple[int, int] | None) -> None:
    assert expected == split(bytes.fromhex(raw), 0, MAX_PACKET)


def test_split_starts_at_the_offset() -> None:
    assert (4, 6) == split(b"\xc0\x00\x40\x02\x00\x01", 2, 4)


@pytest.mark.parametrize("raw", ("30ffffffff", "3080808080", "30ffffffff01", "308000", "30ff8000", "30ffffff00"))
@pytest.mark.clause(v5=["MQTT-1.5.5-1"])
def test_a_length_too_long_or_not_the_shortest_is_malformed(raw: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        split(bytes.fromhex(raw), 0, MAX_PACKET)
    assert MALFORMED == caught.value.reason


def test_an_oversized_packet_is_refused_before_its_body_arrives() -> None:
    assert split(b"\x30\x62", 0, 100) is None
    with pytest.raises(ProtocolError) as caught:
        split(b"\x30\x63", 0, 100)
    assert ReasonCode.PACKET_TOO_LARGE == caught.value.reason
    with pytest.raises(ProtocolError) as caught:
        Decoder(4, max_size=100).feed(b"\x10\xff\xff\xff\x7f")
    assert ReasonCode.PACKET_TOO_LARGE == caught.value.reason


# --- what is wrong ------------------------------------------------------------------------------------------------


def _all(versions: Iterable[int], raw: str, reason: ReasonCode, name: str) -> list[object]:
    return [pytest.param(bytes.fromhex(raw), version, reason, id=f"v{version} {name}") for version in versions]


_V3 = (3, 4)
_ANY = (3, 4, 5)
_ACKS = ("40", "50", "62", "70")
_C3 = "0006 4d5149736470 03"
_C4 = "0004 4d515454 04"
_C5 = "0004 4d515454 05"

#: First byte and body (the length is put in by the test).
WRONG = [
    # --- fixed header
    *_all(_ANY, "00", MALFORMED, "packet type 0"),
    *_all(_V3, "f0", MALFORMED, "AUTH in MQTT 3"),
    *_all(_ANY, f"11 {_C4} 02 0000 0001 63", MALFORMED, "flags of CONNECT"),
    *_all(_ANY, "21 00 00", MALFORMED, "flags of CONNACK"),
    *_all(_ANY, "41 0001", MALFORMED, "flags of PUBACK"),
    *_all(_ANY, "58 0001", MALFORMED, "flags of PUBREC"),
    *_all(_ANY, "60 0001", MALFORMED, "flags of PUBREL"),
    *_all(_ANY, "72 0001", MALFORMED, "flags of PUBCOMP"),
    *_all(_V3, "80 0001 0001 61 00", MALFORMED, "flags of SUBSCRIBE"),
    *_all((4,), "8a 0001 0001 61 00", MALFORMED, "DUP of SUBSCRIBE"),
    *_all((5,), "8a 0001 00 0001 61 00", MALFORMED, "DUP of SUBSCRIBE"),
    *_all(_ANY, "92 0001 00", MALFORMED, "flags of SUBACK"),
    *_all(_V3, "a3 0001 0001 61", MALFORMED, "flags of UNSUBSCRIBE"),
    *_all(_ANY, "b1 0001", MALFORMED, "flags of UNSUBACK"),
    *_all(_ANY, "c8", MALFORMED, "flags of PINGREQ"),
    *_all(_ANY, "d1", MALFORMED, "flags of PINGRESP"),
    *_all(_ANY, "e2", MALFORMED, "flags of DISCONNECT"),
    *_all((5,), "f1", MALFORMED, "flags of AUTH"),
    # --- CONNECT
    *_all((4,), "10 0004 4d515455 04 02 0000 0001 63", ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, "protocol name"),
    *_all((4,), "10 0006 4d5149736470 04 02 0000 0001 63", ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, "MQIsdp level 4"),
    *_all((4,), "10 0004 4d515454 03 02 0000 0001 63", ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, "MQTT level 3"),
    *_all((4,), "10 0004 4d515454 06 02 0000 0001 63", ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, "level 6"),
    *_all((4,), "10 0004 4d515454 84 02 0000 0001 63", ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, "level 4 of a bridge"),
    *_all((4,), "10", MALFORMED, "CONNECT, empty"),
    *_all((4,), f"10 {_C4} 03 0000 0001 63", MALFORMED, "reserved connect flag"),
    *_all((5,), f"10 {_C5} 03 0000 00 0001 63", MALFORMED, "reserved connect flag"),
    *_all((3,), f"10 {_C3} 1e 0000 0001 63 0001 77 0000", MALFORMED, "will QoS 3"),
    *_all((4,), f"10 {_C4} 1e 0000 0001 63 0001 77 0000", MALFORMED, "will QoS 3"),
    *_all((5,), f"10 {_C5} 1e 0000 00 0001 63 00 0001 77 0000", MALFORMED, "will QoS 3"),
    *_all((4,), f"10 {_C4} 0a 0000 0001 63", MALFORMED, "will QoS without will"),
    *_all((5,), f"10 {_C5} 22 0000 00 0001 63", MALFORMED, "will retain without will"),
    *_all((3,), f"10 {_C3} 42 0000 0001 63 0001 70", MALFORMED, "password without user name"),
    *_all((4,), f"10 {_C4} 42 0000 0001 63 0001 70", MALFORMED, "password without user name"),
    *_all((4,), f"10 {_C4} 82 0000 0001 63", MALFORMED, "user name missing"),
    *_all((4,), f"10 {_C4} c2 0000 0001 63 0001 75", MALFORMED, "password missing"),
    *_all((4,), f"10 {_C4} 02 0000 0001 63 0001 75", MALFORMED, "user name without its flag"),
    *_all((4,), f"10 {_C4} 02 0000 0001 00", MALFORMED, "U+0000 in client id"),
    *_all((4,), f"10 {_C4} 02 0000 0003 eda080", MALFORMED, "surrogate in client id"),
    *_all((4,), f"10 {_C4} 82 0000 0001 63 0001 ff", MALFORMED, "user name not UTF-8"),
    *_all((4,), f"10 {_C4} 06 0000 0001 63 0002 c080 0000", MALFORMED, "will topic overlong"),
    *_all((4,), f"10 {_C4} 06 0000 0001 63 0001 2b 0000", ReasonCode.TOPIC_NAME_INVALID, "+ in will topic"),
    *_all((5,), f"10 {_C5} 06 0000 00 0001 63 00 0001 23 0000", ReasonCode.TOPIC_NAME_INVALID, "# in will topic"),
    *_all((5,), f"10 {_C5} 06 0000 00 0001 63 00 0000 0000", ReasonCode.TOPIC_NAME_INVALID, "empty will topic"),
    # --- properties; the packet goes on rightly after them
    *_all((5,), f"10 {_C5} 02 0000 02 7f00 0000", MALFORMED, "unknown property"),
    *_all((5,), f"10 {_C5} 02 0000 02 0000 0000", MALFORMED, "property 0"),
    *_all((5,), f"10 {_C5} 02 0000 03 810100 0000", MALFORMED, "property identifier of two bytes"),
    *_all((5,), f"10 {_C5} 02 0000 05 1800000000 0000", MALFORMED, "will delay in CONNECT itself"),
    *_all((5,), f"10 {_C5} 06 0000 00 0000 03 210001 0001 77 0000", MALFORMED, "receive maximum in will"),
    *_all((5,), "30 0001 61 04 1f000178", MALFORMED, "reason string in PUBLISH"),
    *_all((5,), "40 0001 00 03 230001", MALFORMED, "topic alias in PUBACK"),
    *_all((5,), "82 0001 04 1f000178 0001 61 00", MALFORMED, "reason string in SUBSCRIBE"),
    *_all((5,), "a2 0001 02 0b01 0001 61", MALFORMED, "subscription identifier in UNSUBSCRIBE"),
    *_all((5,), "e0 00 03 210001", MALFORMED, "receive maximum in DISCONNECT"),
    *_all((5,), f"10 {_C5} 02 0000 06 210001210001 0000", PROTOCOL, "receive maximum twice"),
    *_all((5,), f"10 {_C5} 02 0000 0a 11000000001100000001 0000", PROTOCOL, "session expiry twice"),
    *_all((5,), "30 0001 61 04 01000100", PROTOCOL, "payload format twice"),
    *_all((5,), "30 0001 61 06 230001230001", PROTOCOL, "topic alias twice"),
    *_all((5,), "82 0001 04 0b010b02 0001 61 00", PROTOCOL, "subscription identifier twice"),
    *_all((5,), "40 0001 00 06 1f00001f0000", PROTOCOL, "reason string twice"),
    *_all((5,), f"10 {_C5} 02 0000 03 210000 0000", PROTOCOL, "receive maximum 0"),
    *_all((5,), f"10 {_C5} 02 0000 05 2700000000 0000", PROTOCOL, "maximum packet size 0"),
    *_all((5,), f"10 {_C5} 02 0000 02 1702 0000", PROTOCOL, "request problem information 2"),
    *_all((5,), f"10 {_C5} 02 0000 02 1902 0000", PROTOCOL, "request response information 2"),
    *_all((5,), f"10 {_C5} 02 0000 04 16000164 0000", PROTOCOL, "authentication data without method"),
    *_all((5,), "82 0001 02 0b00 0001 61 00", PROTOCOL, "subscription identifier 0"),
    *_all((5,), "82 0001 03 0b8100 0001 61 00", MALFORMED, "subscription identifier not the shortest"),
    *_all((5,), "82 0001 06 0bffffffff7f 0001 61 00", MALFORMED, "subscription identifier of five bytes"),
    *_all((5,), "30 0001 61 02 0102", PROTOCOL, "payload format 2"),
    *_all((5,), "30 0001 61 03 230000", ReasonCode.TOPIC_ALIAS_INVALID, "topic alias 0"),
    *_all((5,), "30 0001 61 06 080003 612f23", PROTOCOL, "wildcard in response topic"),
    *_all((5,), "30 0001 61 03 080000", PROTOCOL, "empty response topic"),
    *_all((5,), "30 0001 61 07 2600016b0001ff", MALFORMED, "user property not UTF-8"),
    *_all((5,), "30 0001 61 05 2600000001", MALFORMED, "user property goes past the properties"),
    *_all((5,), "30 0001 61 02 0200 000001", MALFORMED, "number goes past the properties"),
    *_all((5,), "30 0001 61 01 01 78", MALFORMED, "byte goes past the properties"),
    *_all((5,), "30 0001 61 05 09000578 78", MALFORMED, "binary goes past the properties"),
    *_all((5,), "30 0001 61 7f", MALFORMED, "properties go past the packet"),
    *_all((5,), "30 0001 61 8000", MALFORMED, "property length not the shortest"),
    *_all((5,), "30 0001 61 ffffffffff", MALFORMED, "property length of five bytes"),
    *_all((5,), "30 0001 61", MALFORMED, "no property length"),
    *_all((5,), "20 00 00 02 2402", PROTOCOL, "maximum QoS 2"),
    *_all((5,), "20 00 00 02 2502", PROTOCOL, "retain available 2"),
    *_all((5,), "20 00 00 02 2802", PROTOCOL, "wildcard available 2"),
    *_all((5,), "20 00 00 02 2902", PROTOCOL, "subscription identifiers available 2"),
    *_all((5,), "20 00 00 02 2a02", PROTOCOL, "shared available 2"),
    # --- CONNACK
    *_all(_V3, "20 02 00", MALFORMED, "reserved acknowledge flags"),
    *_all((5,), "20 02 00 00", MALFORMED, "reserved acknowledge flags"),
    *_all(_V3, "20 00 06", PROTOCOL, "return code 6"),
    *_all((4,), "20 01 05", PROTOCOL, "session present in a refusal"),
    *_all((5,), "20 01 87 00", PROTOCOL, "session present in a refusal"),
    *_all((5,), "20 00 01 00", PROTOCOL, "CONNACK with reason 0x01"),
    *_all((5,), "20 00 00", MALFORMED, "CONNACK without property length"),
    *_all(_V3, "20 00 00 00", MALFORMED, "CONNACK goes on"),
    # --- PUBLISH
    *_all(_ANY, "36 0001 61 0001 00", MALFORMED, "QoS 3"),
    *_all(_ANY, "38 0001 61 00", MALFORMED, "DUP with QoS 0"),
    *_all(_V3, "32 0001 61 0000", PROTOCOL, "PUBLISH with packet id 0"),
    *_all((5,), "34 0001 61 0000 00", PROTOCOL, "PUBLISH with packet id 0"),
    *_all(_ANY, "32 0001 61 00", MALFORMED, "half a packet id"),
    *_all(_ANY, "30 0003 612f2b 00", ReasonCode.TOPIC_NAME_INVALID, "+ in topic"),
    *_all(_ANY, "30 0003 612f23 00", ReasonCode.TOPIC_NAME_INVALID, "# in topic"),
    *_all(_V3, "30 0000 78", ReasonCode.TOPIC_NAME_INVALID, "empty topic"),
    *_all((5,), "30 0000 00 78", PROTOCOL, "empty topic without alias"),
    *_all(_ANY, "30 0002 6100 00", MALFORMED, "U+0000 in topic"),
    *_all(_ANY, "30 0003 edbfbf 00", MALFORMED, "surrogate in topic"),
    *_all(_ANY, "30 0004 f4908080 00", MALFORMED, "beyond U+10FFFF in topic"),
    *_all(_ANY, "30 0009 61 00", MALFORMED, "topic goes past the packet"),
    *_all(_ANY, "30 00", MALFORMED, "half a length"),
    # --- acknowledgements
    *[p for first in _ACKS for p in _all(_ANY, f"{first} 0000", PROTOCOL, f"{first} with id 0")],
    *[p for first in _ACKS for p in _all(_ANY, f"{first} 00", MALFORMED, f"{first} cut in its id")],
    *[p for first in _ACKS for p in _all(_V3, f"{first} 0001 00", MALFORMED, f"{first} goes on")],
    *[p for first in _ACKS for p in _all((5,), f"{first} 0001 01", PROTOCOL, f"{first} with 0x01")],
    *_all((5,), "40 0001 92", PROTOCOL, "PUBACK with 0x92"),
    *_all((5,), "62 0001 10", PROTOCOL, "PUBREL with 0x10"),
    *_all((5,), "40 0001 00 00 00", MALFORMED, "PUBACK goes on after its properties"),
    # --- SUBSCRIBE and the rest
    *_all(_V3, "82 0001", PROTOCOL, "SUBSCRIBE without filter"),
    *_all((5,), "82 0001 00", PROTOCOL, "SUBSCRIBE without filter"),
    *_all(_V3, "82 0000 0001 61 00", PROTOCOL, "SUBSCRIBE with packet id 0"),
    *_all((5,), "82 0000 00 0001 61 00", PROTOCOL, "SUBSCRIBE with packet id 0"),
    *_all(_V3, "82 0001 0001 61 03", PROTOCOL, "SUBSCRIBE with QoS 3"),
    *_all((5,), "82 0001 00 0001 61 03", PROTOCOL, "SUBSCRIBE with QoS 3"),
    *_all(_V3, "82 0001 0001 61 04", MALFORMED, "SUBSCRIBE with No Local in MQTT 3"),
    *_all((5,), "82 0001 00 0001 61 40", MALFORMED, "SUBSCRIBE with reserved option"),
    *_all((5,), "82 0001 00 0001 61 80", MALFORMED, "SUBSCRIBE with the other reserved option"),
    *_all((5,), "82 0001 00 0001 61 30", PROTOCOL, "SUBSCRIBE with retain handling 3"),
    *_all(_V3, "82 0001 0001 61", MALFORMED, "SUBSCRIBE without options"),
    *_all(_V3, "82 0001 0001 ff 00", MALFORMED, "filter not UTF-8"),
    *_all(_V3, "90 0001", PROTOCOL, "SUBACK without code"),
    *_all((5,), "90 0001 00", PROTOCOL, "SUBACK without code"),
    *_all(_V3, "90 0001 03", PROTOCOL, "SUBACK with 0x03"),
    *_all(_V3, "90 0001 87", PROTOCOL, "SUBACK of MQTT 3 with 0x87"),
    *_all((5,), "90 0001 00 11", PROTOCOL, "SUBACK with 0x11"),
    *_all(_V3, "a2 0001", PROTOCOL, "UNSUBSCRIBE without filter"),
    *_all((5,), "a2 0001 00", PROTOCOL, "UNSUBSCRIBE without filter"),
    *_all(_V3, "a2 0000 0001 61", PROTOCOL, "UNSUBSCRIBE with packet id 0"),
    *_all(_V3, "a2 0001 0001 00", MALFORMED, "U+0000 in filter"),
    *_all(_V3, "b0 0001 00", MALFORMED, "UNSUBACK of MQTT 3 goes on"),
    *_all((5,), "b0 0001 00", PROTOCOL, "UNSUBACK without code"),
    *_all((5,), "b0 0001 00 01", PROTOCOL, "UNSUBACK with 0x01"),
    *_all(_ANY, "b0 0000", PROTOCOL, "UNSUBACK with packet id 0"),
    *_all(_ANY, "c0 00", MALFORMED, "PINGREQ goes on"),
    *_all(_ANY, "d0 00", MALFORMED, "PINGRESP goes on"),
    *_all(_V3, "e0 00", MALFORMED, "DISCONNECT of MQTT 3 goes on"),
    *_all((5,), "e0 01", PROTOCOL, "DISCONNECT with 0x01"),
    *_all((5,), "e0 00 00 00", MALFORMED, "DISCONNECT goes on"),
    *_all((5,), "f0 18 00", PROTOCOL, "AUTH without method"),
    *_all((5,), "f0 00 04 1f000178", PROTOCOL, "AUTH with reason string but no method"),
    *_all((5,), "f0 18", MALFORMED, "AUTH without property length"),
    *_all((5,), "f0 01 04 1500016d", PROTOCOL, "AUTH with 0x01"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "version", "reason"), WRONG)
def test_what_is_wrong_is_refused_with_its_reason(raw: bytes, version: int, reason: ReasonCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(raw[0], raw[1:], version)
    assert reason == caught.value.reason, str(caught.value)
    assert str(caught.value)
    with pytest.raises(ProtocolError) as caught:
        Decoder(version).feed(bytes((raw[0], len(raw) - 1)) + raw[1:])
    assert reason == caught.value.reason


def test_an_error_names_the_field() -> None:
    with pytest.raises(ProtocolError, match="will topic"):
        decode(0x10, bytes.fromhex(f"{_C4} 06 0000 0001 63 0001 ff 0000"), 4)
    with pytest.raises(ProtocolError, match="receive maximum"):
        decode(0x10, bytes.fromhex(f"{_C5} 02 0000 03 210000 0000"), 5)


# --- what is odd but right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "version", "expected"),
    [
        pytest.param("40 0001 00", 5, Puback(1), id="reason spelt out"),
        pytest.param("40 0001 00 00", 5, Puback(1), id="reason and no properties spelt out"),
        pytest.param("f0 00 00", 5, Auth(), id="AUTH spelt out"),
        pytest.param("8a 0001 0001 61 00", 3, Subscribe(1, (Subscription("a"),)), id="DUP of SUBSCRIBE in 3.1"),
        pytest.param(f"10 {_C3} c2 0000 0001 63", 3, Connect("c", 3), id="3.1 lets user name and password be left out"),
        pytest.param(f"10 {_C3} c2 0000 0001 63 0001 75", 3, Connect("c", 3, username="u"), id="3.1, no password"),
        pytest.param("20 01 00", 3, Connack(), id="3.1 knows no session present"),
        pytest.param(f"10 {_C3} 02 0000 0000", 3, Connect("", 3), id="empty client id in 3.1 is the broker's matter"),
        pytest.param("82 0001 0000 00", 4, Subscribe(1, (Subscription(""),)), id="filters are the broker's matter"),
        pytest.param("30 0001 61 02 0101 ff", 5, Publish("a", b"\xff", properties=Properties(1)), id="payload too"),
    ],
)
def test_what_is_odd_but_right_is_read(raw: str, version: int, expected: Packet) -> None:
    data = bytes.fromhex(raw)
    assert expected == decode(data[0], data[1:], version)


def test_user_properties_are_counted() -> None:
    """One packet may carry as many as the limit says; one more is a quota exceeded; 0 is no limit."""
    packet = Publish("a", b"", properties=Properties(user_properties=(("k", "v"),) * 65))
    raw = encode(packet, 5)
    with pytest.raises(ProtocolError) as caught:
        Decoder(5).feed(raw)
    assert ReasonCode.QUOTA_EXCEEDED == caught.value.reason
    assert [packet] == Decoder(5, limits=Limits(max_user_properties=65)).feed(raw)
    assert [packet] == Decoder(5, limits=Limits(max_user_properties=0)).feed(raw)


# --- what cannot be written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packet", "version"),
    [
        pytest.param(Publish("a" * 65536, b""), 4, id="topic too long"),
        pytest.param(Publish("é" * 32768, b""), 4, id="topic too long in bytes"),
        pytest.param(Publish("a\0", b""), 4, id="U+0000"),
        pytest.param(Publish("\ud800", b""), 4, id="surrogate"),
        pytest.param(Publish("a", b"", 3, packet_id=1), 4, id="QoS 3"),
        pytest.param(Publish("a", b"", 1), 4, id="packet id 0"),
        pytest.param(Puback(65536), 4, id="packet id too large"),
        pytest.param(Puback(0), 5, id="acknowledgement of packet id 0"),
        pytest.param(Connect("c", 4, password=b"p"), 4, id="password without user name in 3.1.1"),
        pytest.param(Connect("c", 6), 4, id="level 6"),
        pytest.param(Connect("c", 4, keep_alive=65536), 4, id="keep alive too long"),
        pytest.param(Connect("c", 4, will=Will("w", b"x" * 65536)), 4, id="will payload too long"),
        pytest.param(Connack(ReasonCode.MALFORMED_PACKET), 4, id="no return code in MQTT 3"),
        pytest.param(Subscribe(1, ()), 4, id="no filters"),
        pytest.param(Subscribe(1, (Subscription("a", 3),)), 4, id="requested QoS 3"),
        pytest.param(Subscribe(1, (Subscription("a", retain_handling=3),)), 5, id="retain handling 3"),
        pytest.param(Subscribe(1, (Subscription("a", identifier=3),)), 5, id="identifier without property"),
        pytest.param(Suback(1, ()), 4, id="no codes in SUBACK"),
        pytest.param(Unsubscribe(1, ()), 4, id="no filters in UNSUBSCRIBE"),
        pytest.param(Unsuback(1), 5, id="no codes in UNSUBACK"),
        pytest.param(Auth(), 4, id="AUTH in MQTT 3"),
        pytest.param(Auth(ReasonCode.RE_AUTHENTICATE), 5, id="AUTH without method"),
        pytest.param(Connect("c", 5, properties=Properties(session_expiry=1 << 32)), 5, id="four bytes"),
        pytest.param(Connect("c", 5, properties=Properties(receive_maximum=-1)), 5, id="negative"),
        pytest.param(Publish("a", b"", properties=Properties(payload_format=256)), 5, id="one byte"),
        pytest.param(Publish("a", b"", properties=Properties(subscription_ids=(268435456,))), 5, id="varint"),
        pytest.param(Publish("a", b"", properties=Properties(correlation_data=b"x" * 65536)), 5, id="binary too long"),
    ],
)
def test_what_cannot_be_said_is_a_value_error(packet: Packet, version: int) -> None:
    with pytest.raises(ValueError):
        encode(packet, version)


def test_the_largest_packet_can_be_said_and_no_larger() -> None:
    largest = bytes(268_435_455 - 3)
    assert MAX_PACKET == len(encode(Publish("a", largest), 4))
    with pytest.raises(ValueError):
        encode(Publish("a", largest + b"\0"), 4)


def test_mqtt_3_is_not_told_what_it_does_not_know() -> None:
    """Properties and reasons of acknowledgements are left out; every refusal of a subscription is 0x80."""
    properties = Properties(reason_string="why", user_properties=(("k", "v"),))
    assert b"\x40\x02\x00\x01" == encode(Puback(1, ReasonCode.NOT_AUTHORIZED, properties), 4)
    assert b"\x30\x04\x00\x01ax" == encode(Publish("a", b"x", properties=properties), 4)
    assert b"\x90\x04\x00\x01\x80\x01" == encode(
        Suback(1, (ReasonCode.NOT_AUTHORIZED, ReasonCode.GRANTED_QOS_1), properties), 4
    )
    assert b"\xb0\x02\x00\x01" == encode(Unsuback(1, (ReasonCode.NO_SUBSCRIPTION_EXISTED,)), 4)
    assert b"\x20\x02\x00\x00" == encode(Connack(session_present=True), 3)
    assert b"\xc0\x00" == encode(Pingreq(), 3)
