"""Frames against the codec: the same message, encoded both ways, for every version, QoS and property."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from motorcade.broker import frames
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Packet, Publish
from motorcade.mqtt.properties import NONE, Properties
from tests.unit.mqtt.strategies import blobs, flags, packet_ids, payloads, qualities, subscription_ids, texts, topics

NOW = 1_700_000_000.0

versions = st.sampled_from((3, 4, 5))
big = st.sampled_from((0, 100, 127, 128, 16_383, 16_384, 70_000)).map(bytes)
lives = st.integers(0, 0xFFFF_FFFF)
messages = st.builds(
    Message,
    topics | st.integers(100, 300).map(lambda n: "t" * n),
    payloads | big,
    qualities,
    st.booleans(),
    payload_format=st.none() | flags,
    expires_at=st.none() | lives.map(lambda left: NOW + left),
    content_type=st.none() | texts,
    response_topic=st.none() | topics,
    correlation_data=st.none() | blobs,
    user_properties=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
)
identifier_lists = st.lists(subscription_ids, max_size=3).map(tuple)


def wire(frame: frames.Frame, number: int) -> bytes:
    head, tail, _ = frame
    return head + (frames.IDS[number] if frames.qos_of(frame) else b"") + tail


def decoded(data: bytes, version: int) -> Packet:
    (packet,) = codec.Decoder(version).feed(data)
    return packet


def packet_of(
    message: Message, version: int, qos: int, number: int, *, retain: bool = False, identifiers: tuple[int, ...] = ()
) -> Publish:
    properties = Properties(
        payload_format=message.payload_format,
        message_expiry=None if message.expires_at is None else round(message.expires_at - NOW),
        content_type=message.content_type,
        response_topic=message.response_topic,
        correlation_data=message.correlation_data,
        subscription_ids=identifiers,
        user_properties=message.user_properties,
    )
    return Publish(
        message.topic,
        message.payload,
        qos,
        retain,
        packet_id=number if qos else 0,
        properties=properties if version == 5 else NONE,
    )


@given(messages, versions, qualities, st.booleans(), packet_ids, identifier_lists)
def test_a_frame_is_what_the_codec_writes(
    message: Message, version: int, qos: int, retain: bool, number: int, identifiers: tuple[int, ...]
) -> None:
    """Byte for byte."""
    frame = frames.frame_of(message, version, qos, NOW, retain=retain, identifiers=identifiers)
    expected = packet_of(message, version, qos, number, retain=retain, identifiers=identifiers)
    data = wire(frame, number)
    assert codec.encode(expected, version) == data
    assert (qos, len(data)) == (frames.qos_of(frame), frames.size_of(frame))
    assert message.topic.encode() == frames.topic_of(frame)
    assert message.payload == frames.payload_of(frame, version)
    assert frame[2] is message
    assert frames.message_of(frame, version) is message


@given(messages, qualities, st.booleans(), packet_ids, st.integers(1, 65535), identifier_lists)
def test_a_frame_with_a_topic_alias(
    message: Message, qos: int, retain: bool, number: int, alias: int, identifiers: tuple[int, ...]
) -> None:
    """The first use carries topic and alias, later ones the alias alone; nothing else changes."""
    frame = frames.frame_of(message, 5, qos, NOW, retain=retain, identifiers=identifiers)
    expected = packet_of(message, 5, qos, number, retain=retain, identifiers=identifiers)
    expected = replace(expected, properties=replace(expected.properties, topic_alias=alias))
    for known in (False, True):
        head, tail = frames.aliased(frame, alias, known=known)
        got = decoded(wire((head, tail, None), number), 5)
        assert replace(expected, topic="" if known else message.topic) == got


@given(messages, versions, versions, qualities, st.booleans(), packet_ids)
def test_a_frame_for_a_client_that_came_back_with_another_version(
    message: Message, old: int, new: int, qos: int, retain: bool, number: int
) -> None:
    frame = frames.frame_of(message, old, qos, NOW, retain=retain)
    changed = frames.converted(frame, old, new, NOW)
    assert packet_of(message, new, qos, number, retain=retain) == decoded(wire(changed, number), new)


@given(messages, versions, qualities)
def test_the_message_in_a_frame_of_the_byte_loop(message: Message, version: int, qos: int) -> None:
    """Made from the bytes and the publisher."""
    plain = Message(message.topic, message.payload)
    head, tail, _ = frames.frame_of(plain, version, qos, NOW)
    publisher = ClientInfo("car", username="fleet")
    found = frames.message_of((head, tail, publisher), version)
    assert Message(message.topic, message.payload, qos, publisher="car", username="fleet") == found
    assert "" == frames.message_of((head, tail, None), version).publisher


@given(messages, versions)
def test_what_stays_of_a_released_message(message: Message, version: int) -> None:
    """Its id, and the message itself where somebody will ask for it."""
    frame = frames.frame_of(message, version, 2, NOW)
    assert not frames.is_released(frame)
    left = frames.released(frame)
    assert frames.is_released(left) and left[2] is message
    assert frames.released((frame[0], frame[1], ClientInfo("car"))) is frames.RELEASED
    assert frames.converted(left, 4, 5, NOW) is left
