"""The codec over the table of packets (what is wrong: test_malformed.py)."""

from __future__ import annotations

import pytest

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt import properties as properties_module
from motorcade.mqtt.codec import MAX_PACKET, DecodeLimits, Decoder, decode, encode, split
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
from tests.support.cases import each, each_row, every_version
from tests.unit.mqtt.table import PACKETS, PacketCase

MALFORMED = ReasonCode.MALFORMED_PACKET
PROTOCOL = ReasonCode.PROTOCOL_ERROR
each_packet = each(case=PACKETS)

_C3, _C4, _C5 = "0006 4d5149736470 03", "0004 4d515454 04", "0004 4d515454 05"  # name and level of the protocol


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


@each(case=_CLOSED)
def test_bytes_after_the_end_are_refused(case: PacketCase) -> None:
    """In the short forms of MQTT 5 the first byte too many is taken for a reason code, which 0xEE is not."""
    start, end = split(case.raw, 0, MAX_PACKET) or (0, 0)
    with pytest.raises(ProtocolError) as caught:
        decode(case.raw[0], case.raw[start:end] + b"\xee\xee", case.version)
    assert caught.value.reason in {MALFORMED, PROTOCOL}


@every_version
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


@each_row(
    "raw expected",
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


@each(raw=("30ffffffff", "3080808080", "30ffffffff01", "308000", "30ff8000", "30ffffff00"))
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


# --- what is wrong (every way of it: test_malformed.py) --------------------------------------------------------------


def test_an_error_names_the_field() -> None:
    with pytest.raises(ProtocolError, match="will topic"):
        decode(0x10, bytes.fromhex(f"{_C4} 06 0000 0001 63 0001 ff 0000"), 4)
    with pytest.raises(ProtocolError, match="receive maximum"):
        decode(0x10, bytes.fromhex(f"{_C5} 02 0000 03 210000 0000"), 5)


# --- what is odd but right ----------------------------------------------------------------------------------------


@each_row(
    "raw version expected",
    [
        ("40 0001 00", 5, Puback(1)),  # reason spelt out
        ("40 0001 00 00", 5, Puback(1)),  # reason and no properties spelt out
        ("f0 00 00", 5, Auth()),  # AUTH spelt out
        ("8a 0001 0001 61 00", 3, Subscribe(1, (Subscription("a"),))),  # DUP of SUBSCRIBE in 3.1
        (f"10 {_C3} c2 0000 0001 63", 3, Connect("c", 3)),  # 3.1 lets user name and password be left out
        (f"10 {_C3} c2 0000 0001 63 0001 75", 3, Connect("c", 3, username="u")),  # 3.1, no password
        ("20 01 00", 3, Connack()),  # 3.1 knows no session present
        (f"10 {_C3} 02 0000 0000", 3, Connect("", 3)),  # empty client id in 3.1 is the broker's matter
        ("82 0001 0000 00", 4, Subscribe(1, (Subscription(""),))),  # filters are the broker's matter
        ("30 0001 61 02 0101 ff", 5, Publish("a", b"\xff", properties=Properties(1))),  # payload too
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
    assert [packet] == Decoder(5, limits=DecodeLimits(max_user_properties=65)).feed(raw)
    assert [packet] == Decoder(5, limits=DecodeLimits(max_user_properties=0)).feed(raw)


# --- what cannot be written ---------------------------------------------------------------------------------------


@each_row(
    "packet version",
    [
        (Publish("a" * 65536, b""), 4),  # topic too long
        (Publish("é" * 32768, b""), 4),  # topic too long in bytes
        (Publish("a\0", b""), 4),  # U+0000
        (Publish("\ud800", b""), 4),  # surrogate
        (Publish("a", b"", 3, packet_id=1), 4),  # QoS 3
        (Publish("a", b"", 1), 4),  # packet id 0
        (Puback(65536), 4),  # packet id too large
        (Puback(0), 5),  # acknowledgement of packet id 0
        (Connect("c", 4, password=b"p"), 4),  # password without user name in 3.1.1
        (Connect("c", 6), 4),  # level 6
        (Connect("c", 4, keep_alive=65536), 4),  # keep alive too long
        (Connect("c", 4, will=Will("w", b"x" * 65536)), 4),  # will payload too long
        (Connack(ReasonCode.MALFORMED_PACKET), 4),  # no return code in MQTT 3
        (Subscribe(1, ()), 4),  # no filters
        (Subscribe(1, (Subscription("a", 3),)), 4),  # requested QoS 3
        (Subscribe(1, (Subscription("a", retain_handling=3),)), 5),  # retain handling 3
        (Subscribe(1, (Subscription("a", identifier=3),)), 5),  # identifier without property
        (Suback(1, ()), 4),  # no codes in SUBACK
        (Unsubscribe(1, ()), 4),  # no filters in UNSUBSCRIBE
        (Unsuback(1), 5),  # no codes in UNSUBACK
        (Auth(), 4),  # AUTH in MQTT 3
        (Auth(ReasonCode.RE_AUTHENTICATE), 5),  # AUTH without method
        (Connect("c", 5, properties=Properties(session_expiry=1 << 32)), 5),  # four bytes
        (Connect("c", 5, properties=Properties(receive_maximum=-1)), 5),  # negative
        (Publish("a", b"", properties=Properties(payload_format=256)), 5),  # one byte
        (Publish("a", b"", properties=Properties(subscription_ids=(268435456,))), 5),  # varint
        (Publish("a", b"", properties=Properties(correlation_data=b"x" * 65536)), 5),  # binary too long
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
