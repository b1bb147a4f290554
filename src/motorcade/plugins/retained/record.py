"""A retained message as the store has it: a record of the collection `retained`, its topic the key.

The value is a message in the one stored form (`delivery.record`), with its payload. The topic in it is left empty.
Headers, which are notes about one publish, are not stored.

Values that earlier versions wrote are read as well; their second element is the payload, not a text:

    [1, payload, qos, publisher, username, guid, timestamp, payload format, expires at,
     content type, response topic, correlation data, user properties]
"""

from __future__ import annotations

import sys
from typing import Annotated, Final

import msgspec

from motorcade.core.errors import TopicError
from motorcade.core.message import Message, UserProperties
from motorcade.core.topic import check_topic
from motorcade.delivery.record import Form, Record, RecordError, message_with

COLLECTION: Final = "retained"


class _OldRetained(msgspec.Struct, array_like=True, tag=1, gc=False):
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


_decode_old = msgspec.msgpack.Decoder(_OldRetained).decode


def _read_old(value: bytes) -> Record:
    old = _decode_old(value)
    return Record(
        "",
        old.payload,
        old.publisher,
        old.username,
        old.timestamp,
        old.guid,
        old.qos,
        True,  # retain
        old.payload_format,
        old.expires_at,
        old.content_type,
        old.response_topic,
        old.correlation_data,
        old.user_properties,
    )


_FORM: Final = Form(Record, inline=sys.maxsize, old=_read_old)


def encode(message: Message) -> bytes:
    """Return the value for a message; `RecordError` if a plugin has made it of something that cannot be stored."""
    _check(message.topic)
    return _FORM.encode(message, topic="")[0]


def decode(topic: str, value: bytes) -> Message:
    """Return the message of a record; `RecordError` says why it is none."""
    _check(topic)
    record = _FORM.decode(value)
    return message_with(record, record.payload, topic, record.qos, True, record.time, record.user_properties)


def _check(topic: str) -> None:
    try:
        check_topic(topic)
    except (TopicError, ValueError, TypeError) as error:
        raise RecordError(f"the message cannot be stored: {error}") from error
