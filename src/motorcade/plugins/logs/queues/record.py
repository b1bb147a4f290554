"""The stored form of a message of a queue: that of `delivery.record`, and why it is a dead letter.

The payload lies beside the body, as the payload of the entry. Entries of the version before this form are read:

    [1, topic, publisher, username, guid, time, expires at, qos, payload format, content type, response topic,
     correlation data, user properties, dead]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from motorcade.core.message import Message, UserProperties
from motorcade.delivery.record import Form, Record, message_with

PRIORITY: Final = "priority"  #: user property with the level of a message
MAX_HISTORY: Final = 32  #: newest attempts that are remembered of a message


class Attempt(msgspec.Struct, array_like=True, frozen=True):
    """A failed attempt to deliver a message."""

    time: float
    consumer: str
    reason: str


class DeadLetter(msgspec.Struct, array_like=True, frozen=True):
    """The reason for which a message is in a dead-letter queue."""

    queue: str  #: where it came from
    reason: str  #: of the last attempt
    attempts: int
    history: tuple[Attempt, ...]  #: oldest first; the newest `MAX_HISTORY`


class QueueRecord(Record, frozen=True, gc=False):
    """A stored message of a queue."""

    dead: DeadLetter | None = None


class _Format1(msgspec.Struct, array_like=True, tag=1):
    topic: str
    publisher: str
    username: str | None
    guid: bytes
    time: float
    expires_at: float | None
    qos: int
    payload_format: int | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None
    user_properties: UserProperties
    dead: DeadLetter | None = None


_decode_format1 = msgspec.msgpack.Decoder(_Format1).decode
_json = msgspec.json.Encoder()


def _old(body: bytes) -> QueueRecord:
    fields = msgspec.structs.asdict(_decode_format1(body))
    return QueueRecord(payload=b"", client=fields.pop("publisher"), **fields)


QUEUE: Final = Form(QueueRecord, old=_old)


def delivered(record: QueueRecord, payload: bytes) -> Message:
    """Return a message as consumers get it: with QoS 1 at most, and the story of a dead letter as properties."""
    properties, dead = record.user_properties, record.dead
    if dead is not None:
        properties = (
            *properties,
            ("dead-reason", dead.reason),
            ("dead-queue", dead.queue),
            ("dead-attempts", str(dead.attempts)),
            ("dead-history", history_text(dead.history)),
        )
    return message_with(record, payload, record.topic, 1, False, record.time, properties)


def history_text(history: Sequence[Attempt]) -> str:
    """Return attempts as compact JSON: `[[time, consumer, reason], …]`."""
    return _json.encode(list(history)).decode()


def level_of(properties: UserProperties, levels: int) -> int:
    """Return the level of a message: its property `priority`, up to the highest of the queue; 0 without one."""
    if levels > 1:
        for name, value in properties:
            if name == PRIORITY:
                return min(int(value), levels - 1) if value.isascii() and value.isdigit() and len(value) < 10 else 0
    return 0
