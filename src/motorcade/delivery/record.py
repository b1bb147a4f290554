"""The stored form of a message, for all features: a stream record, followed by fields of the feature.

    [1, topic, payload, client, username, time, guid, qos, retain, payload format, expires at, content type,
     response topic, correlation data, user properties,  fields of the feature …]

The format and its rules are those of `core.record`; a stream record is the same without the fields of a feature. A
feature declares its own fields by a subclass of `Record`, each with a default:

    class QueueRecord(Record, frozen=True, gc=False):
        dead: DeadLetter | None = None

    QUEUE = Form(QueueRecord)
    body, payload = QUEUE.encode(message, dead)

Rule 1: the payload is in the body if it has at most `inline` bytes, else beside it, as the payload of the entry: there
        the store keeps it once for all owners. `payload_of` finds it in either place.
Rule 2: what the key of an entry or record tells already (a topic) may be left empty in the body.
Rule 3: what an earlier version has written is read by `old`, which is tried when a body is not of this form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from motorcade.core.message import Message, UserProperties
from motorcade.core.record import Record as Record  # noqa: PLC0414 - features derive their records from it
from motorcade.core.record import RecordError as RecordError  # noqa: PLC0414 - likewise

R = TypeVar("R", bound=Record)

_encode = msgspec.msgpack.Encoder().encode


class Form(Generic[R]):
    """Encode and decode the stored messages of one feature."""

    def __init__(self, record: type[R], *, inline: int = 0, old: Callable[[bytes], R] | None = None) -> None:
        """Take `inline`, the bytes of payload in a body at most. `old` may raise any `MsgspecError` or `ValueError`."""
        self._record = record
        self._decode = msgspec.msgpack.Decoder(record).decode
        self._inline = inline
        self._old = old

    def encode(self, message: Message, *own: Any, topic: str | None = None) -> tuple[bytes, bytes]:
        """Return body and payload for an entry; `own` are the values of the feature's fields.

        `topic` goes in place of the message's. `RecordError` if a plugin has made the message of something that cannot
        be written.
        """
        payload = message.payload
        inline = len(payload) <= self._inline
        try:
            body = _encode(
                self._record(
                    message.topic if topic is None else topic,
                    payload if inline else b"",
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
                    *own,
                )
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise RecordError(f"the message cannot be stored: {error}") from error
        return body, b"" if inline else payload

    def encode_record(self, record: R) -> bytes:
        """Return the body for a record that the feature has made itself."""
        return _encode(record)

    def decode(self, body: bytes) -> R:
        """Return the record of a body; `RecordError` says why it is none."""
        try:
            return self._decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            if self._old is not None:
                try:
                    return self._old(body)
                except (msgspec.MsgspecError, ValueError):
                    pass
            raise RecordError(str(error)) from error


def payload_of(record: Record, beside: bytes) -> bytes:
    """Return the payload of a stored message; `beside` is that of its entry."""
    return record.payload or beside


def message_of(record: Record, beside: bytes = b"") -> Message:
    """Return the message of a record as it was published."""
    payload = record.payload or beside
    return message_with(record, payload, record.topic, record.qos, record.retain, record.time, record.user_properties)


def message_with(
    record: Record,
    payload: bytes,
    topic: str,
    qos: int,
    retain: bool,
    time: float,
    user_properties: UserProperties,
) -> Message:
    """Return the message of a record as its receiver gets it.

    No defaults: they, and keywords, would cost as much as all the rest for every message that is read.
    """
    return Message(
        topic,
        payload,
        qos,
        retain,
        record.client,
        record.username,
        record.guid,
        time,
        record.payload_format,
        record.expires_at,
        record.content_type,
        record.response_topic,
        record.correlation_data,
        user_properties,
    )
