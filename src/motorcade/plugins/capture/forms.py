"""A message as Redis holds it. The payload is never changed, wrapped or decoded.

    redis-stream    fields of one entry: topic, client, time, guid, qos, payload; if there is any: username, retain,
                    properties
    redis-channel   one line of JSON with the same names, a line feed, the payload

The line of JSON has no line feed in it and begins with `{"motorcade":1,`, by which a reader tells it from a payload
of another publisher. `properties` is a JSON object of the MQTT 5 properties, `correlation_data` in it in
Base64.
"""

from __future__ import annotations

from typing import Final

import msgspec

from motorcade.core.message import Message, UserProperties

VERSION: Final = 1


class CapturedProperties(msgspec.Struct, frozen=True, omit_defaults=True):
    """MQTT 5 properties, as far as a message has them."""

    payload_format: int | None = None
    expires_at: float | None = None  #: seconds since the epoch
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()


_NO_PROPERTIES: Final = CapturedProperties()


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """The line before the payload in a channel."""

    motorcade: int
    topic: str
    client: str
    time: float  #: seconds since the epoch, to the microsecond
    guid: str
    qos: int
    username: str | None = None
    retain: bool = False
    properties: CapturedProperties | None = None


_encode: Final = msgspec.json.Encoder().encode


def properties_of(message: Message) -> CapturedProperties | None:
    """Return the properties of a message; None if it has none."""
    found = CapturedProperties(
        message.payload_format,
        message.expires_at,
        message.content_type,
        message.response_topic,
        message.correlation_data,
        message.user_properties,
    )
    return None if found == _NO_PROPERTIES else found


def fields(message: Message) -> list[str | bytes | int]:
    """Return names and values of an entry of a Redis stream. Text is encoded here, where an error names its message."""
    found: list[str | bytes | int] = [
        "topic",
        message.topic.encode(),
        "client",
        message.publisher.encode(),
        "time",
        f"{message.timestamp:.6f}",
        "guid",
        message.guid.hex(),
        "qos",
        message.qos,
        "payload",
        message.payload,
    ]
    if message.username is not None:
        found += ("username", message.username.encode())
    if message.retain:
        found += ("retain", 1)
    properties = properties_of(message)
    if properties is not None:
        found += ("properties", _encode(properties))
    return found


def envelope(message: Message) -> bytes:
    """Return a message as it is published in a Redis channel."""
    header = Header(
        VERSION,
        message.topic,
        message.publisher,
        round(message.timestamp, 6),
        message.guid.hex(),
        message.qos,
        message.username,
        message.retain,
        properties_of(message),
    )
    return _encode(header) + b"\n" + message.payload
