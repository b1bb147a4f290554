"""For all packets, and for all damage to them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.mqtt.codec import MAX_PACKET, Decoder, decode, encode, split
from motorcade.mqtt.packets import Connect, Packet
from motorcade.mqtt.reasons import ProtocolError
from tests.unit.mqtt.strategies import damaged, packets

versions = st.sampled_from((3, 4, 5))


@settings(deadline=None, max_examples=250)
@given(version=versions, data=st.data())
def test_what_is_written_is_read_back_and_every_prefix_asks_for_more(version: int, data: st.DataObject) -> None:
    packet = data.draw(packets(version))
    raw = encode(packet, version)
    assert [packet] == Decoder(version).feed(raw)
    assert all(split(raw[:end], 0, MAX_PACKET) is None for end in range(len(raw)))
    assert len(raw) == (split(raw, 0, MAX_PACKET) or (0, 0))[1]


@settings(deadline=None, max_examples=100)
@given(version=versions, data=st.data())
def test_a_stream_may_be_cut_anywhere(version: int, data: st.DataObject) -> None:
    sent = data.draw(st.lists(packets(version), max_size=5))
    stream = b"".join(encode(packet, version) for packet in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder = Decoder(version)
    received: list[Packet] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert sent == received


def _stands_for_itself(packet: Packet, version: int) -> None:
    """Whatever was accepted can be said again and means the same."""
    level = packet.version if isinstance(packet, Connect) else version
    assert [packet] == Decoder(level).feed(encode(packet, level))


@settings(deadline=None, max_examples=400)
@given(version=versions, data=st.data())
def test_a_damaged_body_is_refused_or_means_something(version: int, data: st.DataObject) -> None:
    """The frame is right and the body is not, so that the damage reaches every field."""
    raw = encode(data.draw(packets(version)), version)
    start, _ = split(raw, 0, MAX_PACKET) or (0, 0)
    body = data.draw(damaged(raw[start:]))
    first = data.draw(st.just(raw[0]) | st.integers(0, 255))
    try:
        packet = decode(first, body, version)
    except ProtocolError:
        return
    _stands_for_itself(packet, version)


@settings(deadline=None, max_examples=250)
@given(version=versions, data=st.data())
def test_a_damaged_stream_is_refused_or_means_something(version: int, data: st.DataObject) -> None:
    stream = b"".join(
        encode(packet, version) for packet in data.draw(st.lists(packets(version), min_size=1, max_size=3))
    )
    decoder = Decoder(version)
    try:
        received = decoder.feed(data.draw(damaged(stream)))
    except ProtocolError:
        return
    for packet in received:
        if isinstance(packet, Connect):
            version = packet.version
        _stands_for_itself(packet, version)


@settings(deadline=None, max_examples=400)
@given(version=versions, first=st.integers(0, 255), body=st.binary(max_size=40))
def test_noise_is_refused_or_means_something(version: int, first: int, body: bytes) -> None:
    try:
        packet = decode(first, body, version)
    except ProtocolError:
        return
    _stands_for_itself(packet, version)
