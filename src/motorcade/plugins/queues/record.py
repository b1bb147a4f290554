"""A message of a queue as the store keeps it, but for its payload, which lies beside it.

A MessagePack array whose first element is the version of the format. New fields go to the end, with a default: old
records are read as before.

    [1, topic, publisher, username, guid, time, expires at, qos, payload format, content type, response topic,
     correlation data, user properties, dead]

    dead: none, or [queue, reason, attempts, [[time, consumer, reason], …]] of a message that was sent in vain
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message, UserProperties

PRIORITY: Final = "priority"  #: user property that says the level of a message
MOST_HISTORY: Final = 32  #: newest attempts that are remembered of a message


class RecordError(MotorcadeError):
    """An entry of a queue cannot be read."""


class Attempt(msgspec.Struct, array_like=True, frozen=True):
    """One time that a message was sent in vain."""

    time: float
    consumer: str
    reason: str


class Dead(msgspec.Struct, array_like=True, frozen=True):
    """Why a message is in a dead-letter queue."""

    queue: str  #: where it came from
    reason: str  #: of the last attempt
    attempts: int
    history: tuple[Attempt, ...]  #: oldest first; the newest `MOST_HISTORY`


class Stored(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """A message without payload."""

    topic: str
    publisher: str
    username: str | None
    guid: bytes
    time: float  #: at which the broker accepted it
    expires_at: float | None
    qos: int  #: with which it was published
    payload_format: int | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None
    user_properties: UserProperties
    dead: Dead | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Stored)
_json = msgspec.json.Encoder()


def encode(message: Message, dead: Dead | None = None, *, qos: int | None = None) -> bytes:
    """The body for a message; `RecordError` if a plugin has made it of something that is no text."""
    try:
        return _encoder.encode(
            Stored(
                message.topic,
                message.publisher,
                message.username,
                message.guid,
                message.timestamp,
                message.expires_at,
                message.qos if qos is None else qos,
                message.payload_format,
                message.content_type,
                message.response_topic,
                message.correlation_data,
                message.user_properties,
                dead,
            )
        )
    except (ValueError, TypeError) as error:
        raise RecordError(f"the message cannot be stored: {error}") from error


def decode(body: bytes) -> Stored:
    """What a body says; `RecordError`."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise RecordError(str(error)) from error


def message_of(stored: Stored, payload: bytes) -> Message:
    """The message as a consumer gets it: with QoS 1 at most, and what a dead letter has to tell."""
    properties = stored.user_properties
    if stored.dead is not None:
        properties = (*properties, *dead_properties(stored.dead))
    return Message(
        stored.topic,
        payload,
        1,
        False,
        stored.publisher,
        stored.username,
        stored.guid,
        stored.time,
        stored.payload_format,
        stored.expires_at,
        stored.content_type,
        stored.response_topic,
        stored.correlation_data,
        properties,
    )


def dead_properties(dead: Dead) -> UserProperties:
    """A dead letter's story as user properties."""
    return (
        ("dead-reason", dead.reason),
        ("dead-queue", dead.queue),
        ("dead-attempts", str(dead.attempts)),
        ("dead-history", history_text(dead.history)),
    )


def history_text(history: Sequence[Attempt]) -> str:
    """Attempts as compact JSON: `[[time, consumer, reason], …]`."""
    return _json.encode(list(history)).decode()


def level_of(properties: UserProperties, levels: int) -> int:
    """The level of a message: its property `priority`, as far as the queue has levels; 0 if it says none."""
    if levels > 1:
        for name, value in properties:
            if name == PRIORITY:
                return min(int(value), levels - 1) if value.isascii() and value.isdigit() and len(value) < 10 else 0
    return 0
