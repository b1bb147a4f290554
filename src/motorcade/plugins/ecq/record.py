"""A message of a compacted queue as the store keeps it. Its key and its sequence number belong to the entry.

A MessagePack array whose first element is the version of the format. New fields go to the end, with a default: old
records are read as before.

    [1, payload, publisher, username, guid, time, qos, expires at, payload format, content type, response topic,
     correlation data, user properties]

    payload   up to `INLINE` bytes; nil: it lies beside it. No two queues share a message, so storing it once by its
              hash, as payloads are, would cost two more rows and a digest and gain nothing.
    time      at which it was published; its age is counted from the time at which it was stored, which the entry has
"""

from __future__ import annotations

from typing import Final

import msgspec

from motorcade.core.message import Message, UserProperties
from motorcade.core.record import RecordError

INLINE: Final = 4096  #: bytes


class Stored(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """A message, perhaps without its payload."""

    payload: bytes | None
    publisher: str
    username: str | None
    guid: bytes
    time: float
    qos: int  #: with which it was published
    expires_at: float | None
    payload_format: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Stored).decode


def encode(message: Message, now: float) -> tuple[bytes, bytes]:
    """Body and payload of the entry; `RecordError` if a plugin has made the message of something that is no text."""
    payload = message.payload
    inline = len(payload) <= INLINE
    try:
        body = _encode(
            Stored(
                payload if inline else None,
                message.publisher,
                message.username,
                message.guid,
                now,
                message.qos,
                message.expires_at,
                message.payload_format,
                message.content_type,
                message.response_topic,
                message.correlation_data,
                message.user_properties,
            )
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise RecordError(f"the message cannot be stored: {error}") from error
    return body, b"" if inline else payload


def encode_plain(payload: bytes, publisher: str, username: str | None, guid: bytes, now: float) -> tuple[bytes, bytes]:
    """The same of a message of QoS 1 that has no properties."""
    if len(payload) <= INLINE:
        return _encode(Stored(payload, publisher, username, guid, now, 1, None)), b""
    return _encode(Stored(None, publisher, username, guid, now, 1, None)), payload


def decode(body: bytes) -> Stored:
    """What a body says; `RecordError`."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordError(str(error)) from error


def delivery(stored: Stored, payload: bytes, topic: str, number: tuple[str, str], stored_at: float) -> Message:
    """The message as a consumer gets it; `number` is the property that tells its sequence number."""
    return Message(
        topic,
        payload if stored.payload is None else stored.payload,
        1,
        False,
        stored.publisher,
        stored.username,
        stored.guid,
        stored_at,
        stored.payload_format,
        stored.expires_at,
        stored.content_type,
        stored.response_topic,
        stored.correlation_data,
        _with(stored.user_properties, number),
    )


def delivered(message: Message, topic: str, number: tuple[str, str], stored_at: float) -> Message:
    """The same of a message that was appended just now."""
    return Message(
        topic,
        message.payload,
        1,
        False,
        message.publisher,
        message.username,
        message.guid,
        stored_at,
        message.payload_format,
        message.expires_at,
        message.content_type,
        message.response_topic,
        message.correlation_data,
        _with(message.user_properties, number),
    )


def _with(properties: UserProperties, number: tuple[str, str]) -> UserProperties:
    """What the producer says, but for a sequence number of its own making."""
    if not properties:
        return (number,)
    return (*[each for each in properties if each[0] != number[0]], number)
