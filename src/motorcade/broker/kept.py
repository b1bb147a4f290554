"""How the broker writes down what must outlive it: keys and values of its records and mailbox entries.

| where | key | value |
|---|---|---|
| records `session` | client id | `SessionRecord` |
| records `subscription` | client id, filter (`pair`) | `SubscriptionRecord` |
| records `awaiting` | client id, packet id (`pair`) | `AwaitingRecord`: a QoS 2 message of the client, until PUBREL |
| mailbox `session:{client id}` | position | body: `MessageRecord`; the payload stands beside it |

Values are MessagePack arrays. A field is only ever added at the end, with a default: old values stay readable, and old
versions of the broker pass over what they do not know.
"""

from __future__ import annotations

from typing import Any

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message, UserProperties
from motorcade.core.subscription import Subscription

SESSIONS = "session"
SUBSCRIPTIONS = "subscription"
AWAITING = "awaiting"

OWNER = "session:"  #: prefix of mailbox owners that are sessions


class MessageRecord(msgspec.Struct, array_like=True, gc=False):
    """A message on its way to one receiver, all but its payload."""

    flags: int  #: bits 0 and 1: QoS at which the receiver gets it; bit 2: with the retain flag
    topic: str
    publisher: str = ""
    username: str | None = None
    guid: bytes = b""
    timestamp: float = 0.0
    expires_at: float | None = None
    qos: int = 0  #: at which it was published
    payload_format: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()
    identifiers: tuple[int, ...] = ()  #: of the receiver's subscriptions
    group: str = ""  #: `$share/{group}/{filter}` by which the receiver got it
    retained: bool = False  #: as it was published


class WillRecord(msgspec.Struct, array_like=True):
    """A will that may have to be published by the next process."""

    message: MessageRecord
    payload: bytes
    delay: int
    at: float | None  #: when it is due, if the client is gone already


class SessionRecord(msgspec.Struct, array_like=True):
    """A durable session, without what has records of its own."""

    username: str | None
    version: int  #: protocol level
    expiry: int
    created_at: float
    connected: bool
    expires_at: float | None  #: if not connected
    disconnected_at: float | None
    will: WillRecord | None
    superuser: bool = False
    attributes: dict[str, str] = {}
    host: str = ""
    listener: str = "tcp"
    sent_to: int = -1  #: if not connected: the last entry that was ever sent; -1: unknown
    window: int = 0  #: messages its client takes at once
    revoked: list[str] = []  #: subscriptions that were taken away; entries that came under them are not delivered


class SubscriptionRecord(msgspec.Struct, array_like=True):
    """Options of a subscription."""

    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int
    user_properties: UserProperties = ()


class AwaitingRecord(msgspec.Struct, array_like=True):
    """A QoS 2 message that was taken from a client."""

    time: float
    guid: bytes
    begun: bool = False  #: it may not be in all mailboxes yet (only on a store whose batches are not atomic)
    chosen: dict[str, str] = {}  #: `$share/{group}/{filter}` -> client id of the member that gets it


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(MessageRecord).decode
decode_session = msgspec.msgpack.Decoder(SessionRecord).decode
decode_subscription = msgspec.msgpack.Decoder(SubscriptionRecord).decode
decode_awaiting = msgspec.msgpack.Decoder(AwaitingRecord).decode


def owner_of(client_id: str) -> str:
    """The mailbox of a session."""
    return OWNER + client_id


def pair(client_id: str, rest: str) -> str:
    """One key of two texts, whatever characters they have."""
    return f"{len(client_id)}:{client_id}{rest}"


def unpair(key: str) -> tuple[str, str]:
    """(client id, rest) of a key made by `pair`."""
    length, _, both = key.partition(":")
    size = int(length)
    return both[:size], both[size:]


def record_of(
    message: Message, qos: int, *, retain: bool, identifiers: tuple[int, ...] = (), group: str = ""
) -> MessageRecord:
    """What is kept of a message for its receivers."""
    return MessageRecord(
        qos | retain << 2,
        message.topic,
        message.publisher,
        message.username,
        message.guid,
        message.timestamp,
        message.expires_at,
        message.qos,
        message.payload_format,
        message.content_type,
        message.response_topic,
        message.correlation_data,
        message.user_properties,
        identifiers,
        group,
        message.retain,
    )


def plain_body(topic: str, client: ClientInfo, identifiers: tuple[int, ...]) -> bytes:
    """What is kept of a QoS 1 message without properties: the same for all messages of a client to a topic."""
    return encode(
        MessageRecord(1, topic, client.client_id, client.username, qos=1, identifiers=identifiers),
    )


def is_plain(record: MessageRecord) -> bool:
    """Whether a message is nothing but topic, payload and QoS."""
    return (
        not (record.flags & 4 or record.guid or record.identifiers or record.user_properties)
        and record.expires_at is None
        and record.payload_format is None
        and record.content_type is None
        and record.response_topic is None
        and record.correlation_data is None
    )


def message_from(record: MessageRecord, payload: bytes) -> Message:
    """The message again."""
    headers: dict[str, object] = {"subscription_ids": record.identifiers} if record.identifiers else {}
    return Message(
        record.topic,
        payload,
        record.qos,
        record.retained,
        record.publisher,
        record.username,
        record.guid,
        record.timestamp,
        record.payload_format,
        record.expires_at,
        record.content_type,
        record.response_topic,
        record.correlation_data,
        record.user_properties,
        headers,
    )


def subscription_from(filter_: str, data: bytes) -> Subscription:
    """A subscription from its record."""
    record = decode_subscription(data)
    return Subscription(
        filter_,
        record.qos,
        record.no_local,
        record.retain_as_published,
        record.retain_handling,
        record.identifier,
        record.user_properties,
    )


def subscription_record(subscription: Subscription) -> bytes:
    """The record of a subscription."""
    return encode(
        SubscriptionRecord(
            subscription.qos,
            subscription.no_local,
            subscription.retain_as_published,
            subscription.retain_handling,
            subscription.identifier,
            subscription.user_properties,
        )
    )


def client_from(client_id: str, record: SessionRecord) -> ClientInfo:
    """The client as it was when it was last connected, as far as that matters while it is away."""
    return ClientInfo(
        client_id,
        username=record.username,
        host=record.host,
        listener=record.listener,
        version=record.version,
        clean_start=False,
        superuser=record.superuser,
        attributes=dict(record.attributes),
    )


def will_record(message: Message, delay: int, at: float | None) -> WillRecord:
    """What is kept of a will."""
    return WillRecord(record_of(message, message.qos, retain=message.retain), message.payload, delay, at)


def will_from(record: WillRecord, client: ClientInfo) -> Message:
    """The will again."""
    message = message_from(record.message, record.payload)
    headers: dict[str, Any] = {"will_of": client}
    message.headers = headers
    return message
