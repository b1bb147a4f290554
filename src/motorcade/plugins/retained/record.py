"""A retained message as the store keeps it: a record of the collection `retained`, its topic the key.

The value is a MessagePack array whose first element is the version of the format, so that a node can tell a record that
it does not know from one that is damaged. New fields go to the end, with a default: old records are read as before.

    [1, payload, qos, publisher, username, guid, timestamp, payload format, expires at,
     content type, response topic, correlation data, user properties]

Not kept are the retain flag, which is always set, and headers, which are notes about one publish.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message, UserProperties
from motorcade.core.topic import check_topic

COLLECTION: Final = "retained"


class RecordError(MotorcadeError):
    """A record cannot be read, or a message cannot be written as one."""


class _Version1(msgspec.Struct, array_like=True, tag=1, gc=False):
    payload: bytes
    qos: Annotated[int, msgspec.Meta(ge=0, le=2)]
    publisher: str
    username: str | None
    guid: bytes
    timestamp: float
    payload_format: Annotated[int, msgspec.Meta(ge=0, le=1)] | None
    expires_at: float | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None
    user_properties: UserProperties


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Version1).decode


def encode(message: Message) -> bytes:
    """The value for a message; `RecordError` if a plugin has made it of something that is no text."""
    try:
        check_topic(message.topic)
        return _encode(
            _Version1(
                message.payload,
                message.qos,
                message.publisher,
                message.username,
                message.guid,
                message.timestamp,
                message.payload_format,
                message.expires_at,
                message.content_type,
                message.response_topic,
                message.correlation_data,
                message.user_properties,
            )
        )
    except (ValueError, TypeError, MotorcadeError) as error:
        raise RecordError(f"the message cannot be stored: {error}") from error


def decode(topic: str, value: bytes) -> Message:
    """The message of a record; `RecordError` says why it is none."""
    try:
        check_topic(topic)
        stored = _decode(value)
    except (msgspec.MsgspecError, MotorcadeError, ValueError) as error:
        raise RecordError(str(error)) from error
    return Message(
        topic,
        stored.payload,
        stored.qos,
        True,  # retained
        stored.publisher,
        stored.username,
        stored.guid,
        stored.timestamp,
        stored.payload_format,
        stored.expires_at,
        stored.content_type,
        stored.response_topic,
        stored.correlation_data,
        stored.user_properties,
    )
