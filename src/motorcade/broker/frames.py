"""A message as it goes out to clients: encoded once per version and QoS, shared by all who get it.

A frame is `(head, tail, origin)`. On the wire it is `head + tail` for QoS 0 and `head + packet id + tail` for
QoS 1 and 2: only the two bytes of the packet id differ between receivers.

    head    fixed header and topic
    tail    properties (MQTT 5) and payload
    origin  the publisher, or the whole `Message` where a hook or source will ask for more than the bytes

Frames are plain tuples because one is made for every message: a tuple costs a tenth of an object.
"""

from __future__ import annotations

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.mqtt.wire import binary, utf8, varint

Origin = ClientInfo | Message | None
Frame = tuple[bytes, bytes, Origin]

#: the two bytes of every packet id
IDS: list[bytes] = [number.to_bytes(2, "big") for number in range(65536)]

#: in the inflight window: PUBREC has come, PUBREL is sent, PUBCOMP is awaited; its first byte is no PUBLISH
RELEASED: Frame = (b"\x00", b"", None)


def qos_of(frame: Frame) -> int:
    """Return the QoS at which a frame is sent."""
    return frame[0][0] >> 1 & 3


def size_of(frame: Frame) -> int:
    """Return the size of a frame in bytes on the wire."""
    head, tail, _ = frame
    return len(head) + len(tail) + (2 if head[0] & 6 else 0)


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return (value, offset behind it) of a valid variable byte integer."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7


def build(topic: bytes, tail: bytes, qos: int, origin: Origin, *, retain: bool = False) -> Frame:
    """Return a frame from its parts. `tail` already has the properties of its version in front."""
    remaining = 2 + len(topic) + len(tail) + (2 if qos else 0)
    first = 0x30 | qos << 1 | (1 if retain else 0)
    if remaining < 128:  # most messages
        header = bytes((first, remaining))
    elif remaining < 16384:
        header = bytes((first, remaining & 127 | 128, remaining >> 7))
    else:
        header = bytes((first,)) + varint(remaining)
    return header + IDS[len(topic)] + topic, tail, origin


def frame_of(
    message: Message, version: int, qos: int, now: float, *, retain: bool = False, identifiers: tuple[int, ...] = ()
) -> Frame:
    """Encode a message for receivers of one version and QoS. `now` (epoch seconds) tells what is left of its life."""
    tail = message.payload
    if version == 5:
        properties = _properties(message, now, identifiers)
        tail = varint(len(properties)) + properties + tail if properties else b"\x00" + tail
    return build(message.topic.encode(), tail, qos, message, retain=retain)


def _properties(message: Message, now: float, identifiers: tuple[int, ...]) -> bytes:
    if (
        not (identifiers or message.user_properties)
        and message.expires_at is None
        and message.payload_format is None
        and message.content_type is None
        and message.response_topic is None
        and message.correlation_data is None
    ):
        return b""  # most messages
    parts: list[bytes] = []
    if message.payload_format is not None:
        parts.append(bytes((0x01, message.payload_format)))
    if message.expires_at is not None:
        # Never more than it came with, though the clock may have been set back before a restart.
        left = min(max(0, round(message.expires_at - max(now, message.timestamp))), 0xFFFFFFFF)
        parts.append(b"\x02" + left.to_bytes(4, "big"))  # [MQTT-3.3.2-6]
    if message.content_type is not None:
        parts.append(b"\x03" + utf8(message.content_type))
    if message.response_topic is not None:
        parts.append(b"\x08" + utf8(message.response_topic))
    if message.correlation_data is not None:
        parts.append(b"\x09" + binary(message.correlation_data))
    parts.extend(b"\x0b" + varint(identifier) for identifier in identifiers)
    for name, value in message.user_properties:  # [MQTT-3.3.2-18]: in order
        parts.append(b"\x26" + utf8(name) + utf8(value))
    return b"".join(parts)


def topic_of(frame: Frame) -> bytes:
    """Return the topic of a frame."""
    head = frame[0]
    _, start = read_varint(head, 1)
    return head[start + 2 :]


def payload_of(frame: Frame, version: int) -> bytes:
    """Return the payload of a frame."""
    tail = frame[1]
    if version == 5:
        length, start = read_varint(tail, 0)
        return tail[start + length :]
    return tail


def message_of(frame: Frame, version: int) -> Message:
    """Return the message in a frame; made from the bytes now if the fast path did not need it."""
    origin = frame[2]
    if isinstance(origin, Message):
        return origin
    return Message(
        topic=topic_of(frame).decode(),
        payload=payload_of(frame, version),
        qos=qos_of(frame),
        retain=bool(frame[0][0] & 1),
        publisher=origin.client_id if origin else "",
        username=origin.username if origin else None,
    )


def is_released(frame: Frame) -> bool:
    """Return True if only the packet id of a frame is still in use."""
    return not frame[0][0]


def released(frame: Frame) -> Frame:
    """Return what stays of a frame in the window after PUBREC; the message only if it will be asked for."""
    origin = frame[2]
    return (b"\x00", b"", origin) if isinstance(origin, Message) else RELEASED


def converted(frame: Frame, old: int, new: int, now: float) -> Frame:
    """Return the same frame for a client that came back speaking another version."""
    if is_released(frame) or (old == 5) == (new == 5):
        return frame
    message = message_of(frame, old)
    identifiers = message.headers.get("subscription_ids")
    return frame_of(
        message,
        new,
        qos_of(frame),
        now,
        retain=bool(frame[0][0] & 1),
        identifiers=identifiers if isinstance(identifiers, tuple) else (),
    )


def aliased(frame: Frame, alias: int, *, known: bool) -> tuple[bytes, bytes]:
    """Return head and tail of an MQTT 5 frame with a topic alias; without the topic if the client knows the alias."""
    head, tail, _ = frame
    length, start = read_varint(tail, 0)
    tail = varint(length + 3) + b"\x23" + IDS[alias] + tail[start:]
    topic = b"" if known else topic_of(frame)
    new = build(topic, tail, qos_of(frame), None, retain=bool(head[0] & 1))
    return new[0], new[1]
