"""A message as a record of a stream: what everything that reads streams later (sources, capture, Spark jobs) relies on.

The value is a MessagePack array whose first element is the version of the format, so that a reader can tell a record it
does not know from one that is damaged:

    [1, topic, payload, client, username, time, guid, qos, retain,
     payload format, expires at, content type, response topic, correlation data, user properties]

    topic, client      text; the client id of the publisher, "" for the node and its plugins
    payload            bytes, as published
    username           text or nil
    time, expires at   seconds since the epoch, as floating point; expires at nil: never
    guid               16 bytes that sort by time (`core.guid`); empty for what never passed through a broker
    qos, retain        0 to 2, and a boolean, as published
    payload format     0, 1 or nil (MQTT 5)
    content type, response topic, correlation data    text, text, bytes; nil: not set (MQTT 5)
    user properties    array of [name, value], in their order (MQTT 5)

Rule 1: fields are added at the end, with a default. A reader takes a shorter array for the defaults and ignores
        what comes after the fields it knows; so old readers read new records, and new readers old ones.
Rule 2: a change that an old reader would misunderstand is a new version.
Rule 3: headers of a message, which are notes between plugins about one publish, are not part of it.

The offset of a record, and the time at which it was appended, belong to the stream, not to the record.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message, UserProperties

VERSION: Final = 1


class RecordError(MotorcadeError):
    """A record cannot be read, or a message cannot be written as one."""


class Record(msgspec.Struct, array_like=True, tag=VERSION, frozen=True, gc=False):
    """One stored message; the fields stand in the order of the format."""

    topic: str
    payload: bytes
    client: str = ""
    username: str | None = None
    time: float = 0.0
    guid: bytes = b""
    qos: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    retain: bool = False
    payload_format: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    expires_at: float | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()

    def message(self) -> Message:
        """Return the message as it was published."""
        return Message(
            self.topic,
            self.payload,
            self.qos,
            self.retain,
            self.client,
            self.username,
            self.guid,
            self.time,
            self.payload_format,
            self.expires_at,
            self.content_type,
            self.response_topic,
            self.correlation_data,
            self.user_properties,
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def encode(message: Message) -> bytes:
    """Return the value for a message; `RecordError` if a plugin has made it of something that cannot be written."""
    try:
        return _encode(
            Record(
                message.topic,
                message.payload,
                message.publisher,
                message.username,
                message.timestamp,
                message.guid,
                message.qos,
                message.retain,
                message.payload_format,
                message.expires_at,
                message.content_type,
                message.response_topic,
                message.correlation_data,
                message.user_properties,
            )
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise RecordError(f"the message cannot be stored: {error}") from error


def decode(value: bytes) -> Record:
    """Return the record of a value; `RecordError` says why it is none."""
    try:
        return _decode(value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"{error}{_other_version(value)}") from error


def _other_version(value: bytes) -> str:
    """Return advice about a record of another version; an empty text if that is not what is wrong."""
    try:
        stored = msgspec.msgpack.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return ""
    version = stored[0] if isinstance(stored, list) and stored else None
    if not isinstance(version, int) or version == VERSION:
        return ""
    return f" (its version is {version}, this program knows {VERSION}: read it with the program that wrote it)"
