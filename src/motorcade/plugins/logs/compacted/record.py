"""A message of a compacted queue as the store keeps it: `delivery.record`, without a topic.

The key and the sequence number belong to the entry. The topic is left empty, since queue and key tell it. A payload of
up to `INLINE` bytes is in the body: no two queues share a message, so storing it once by its hash, as payloads are,
would cost two more rows and a digest and gain nothing.

Entries written by the version before are read as well:

    [1, payload; nil: it lies beside it, publisher, username, guid, time, qos, expires at, payload format, content type,
     response topic, correlation data, user properties]
"""

from __future__ import annotations

from typing import Final

import msgspec

from motorcade.core.message import Message, UserProperties
from motorcade.delivery.record import Form, Record, message_with

INLINE: Final = 4096  #: bytes


class _Old(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    payload: bytes | None
    publisher: str
    username: str | None
    guid: bytes
    time: float
    qos: int
    expires_at: float | None
    payload_format: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()


_decode_old = msgspec.msgpack.Decoder(_Old).decode


def _read_old(body: bytes) -> Record:
    old = _decode_old(body)
    return Record(
        "",
        old.payload or b"",
        old.publisher,
        old.username,
        old.time,
        old.guid,
        old.qos,
        False,
        old.payload_format,
        old.expires_at,
        old.content_type,
        old.response_topic,
        old.correlation_data,
        old.user_properties,
    )


FORM: Final = Form(Record, inline=INLINE, old=_read_old)


def encode(message: Message) -> tuple[bytes, bytes]:
    """Return body and payload for an entry; `RecordError`."""
    return FORM.encode(message, topic="")


def encode_plain(payload: bytes, client: str, username: str | None, guid: bytes, now: float) -> tuple[bytes, bytes]:
    """Do the same for a message of QoS 1 that has no properties."""
    if len(payload) <= INLINE:
        return FORM.encode_record(Record("", payload, client, username, now, guid, 1)), b""
    return FORM.encode_record(Record("", b"", client, username, now, guid, 1)), payload


def delivery(body: bytes, payload: bytes, topic: str, number: tuple[str, str], stored_at: float) -> Message:
    """Return the message as a consumer gets it; `number` is the property that tells its sequence number.

    A sequence number of the producer's own making is left out. `RecordError`.
    """
    record = FORM.decode(body)
    properties = record.user_properties
    if properties:
        properties = tuple([each for each in properties if each[0] != number[0]])
    return message_with(record, record.payload or payload, topic, 1, False, stored_at, (*properties, number))
