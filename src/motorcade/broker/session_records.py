"""The stored form of durable sessions: keys and values of their records and mailbox entries.

| where | key | value |
|---|---|---|
| records `session` | client id | `SessionRecord` |
| records `subscription` | client id, filter (`pair`) | `SubscriptionRecord` |
| records `awaiting` | client id, packet id (`pair`) | `AwaitingRecord`: a QoS 2 message of the client, until PUBREL |
| mailbox `session:{client id}` | position | body: `SessionEntry`; the payload stands beside it |

Values are MessagePack arrays. A field is only ever added at the end, with a default: old values stay readable. Entries
and wills written before the common form of messages (`delivery.record`) are read as well (`_old_entry`).
"""

from __future__ import annotations

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message, UserProperties
from motorcade.core.subscription import Subscription
from motorcade.delivery.record import Form, Record, message_of

SESSIONS = "session"
SUBSCRIPTIONS = "subscription"
AWAITING = "awaiting"

OWNER = "session:"  #: prefix of mailbox owners that are sessions


class SessionEntry(Record, frozen=True, gc=False):
    """A message on its way to one receiver."""

    granted: int = 0  #: QoS at which the receiver gets it
    retained: bool = False  #: the receiver gets it with the retain flag
    identifiers: tuple[int, ...] = ()  #: of the receiver's subscriptions
    group: str = ""  #: `$share/{group}/{filter}` by which the receiver got it

    @property
    def plain(self) -> bool:
        """Return True if it is nothing but topic, payload and QoS."""
        return (
            not (self.retained or self.guid or self.identifiers or self.user_properties)
            and self.expires_at is None
            and self.payload_format is None
            and self.content_type is None
            and self.response_topic is None
            and self.correlation_data is None
        )


class _OldEntry(msgspec.Struct, array_like=True, gc=False):
    """The form of entries before `SessionEntry`."""

    flags: int  #: bits 0 and 1: QoS at which the receiver gets it; bit 2: with the retain flag
    topic: str
    publisher: str = ""
    username: str | None = None
    guid: bytes = b""
    timestamp: float = 0.0
    expires_at: float | None = None
    qos: int = 0
    payload_format: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()
    identifiers: tuple[int, ...] = ()
    group: str = ""
    retained: bool = False  #: as it was published


_decode_old = msgspec.msgpack.Decoder(_OldEntry).decode


def _old_entry(body: bytes) -> SessionEntry:
    old = msgspec.structs.asdict(_decode_old(body))
    flags = old.pop("flags")
    old |= {"client": old.pop("publisher"), "time": old.pop("timestamp"), "retain": old.pop("retained")}
    return SessionEntry(payload=b"", granted=flags & 3, retained=bool(flags & 4), **old)


ENTRY = Form(SessionEntry, old=_old_entry)


class WillRecord(msgspec.Struct, array_like=True):
    """A will that may have to be published by the next process."""

    message: msgspec.Raw  #: body of a `SessionEntry`
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
    generation: int = 0  #: of the mailbox of its session; 0: the store has one node


class AwaitingRecord(msgspec.Struct, array_like=True):
    """A QoS 2 message that was taken from a client."""

    time: float
    guid: bytes
    begun: bool = False  #: it may not be in all mailboxes yet (only on a store whose batches are not atomic)
    chosen: dict[str, str] = {}  #: `$share/{group}/{filter}` -> client id of the member that gets it


encode = msgspec.msgpack.Encoder().encode
decode_session = msgspec.msgpack.Decoder(SessionRecord).decode
decode_subscription = msgspec.msgpack.Decoder(SubscriptionRecord).decode
decode_awaiting = msgspec.msgpack.Decoder(AwaitingRecord).decode


#: The end of every body with the defaults of the fields that `SessionEntry` adds.
_OWN_FIELDS = b"".join(map(encode, (0, False, (), "")))


def owner_of(client_id: str) -> str:
    """Return the mailbox of a session."""
    return OWNER + client_id


def pair(client_id: str, rest: str) -> str:
    """Make one key of two texts, whatever characters they have."""
    return f"{len(client_id)}:{client_id}{rest}"


def unpair(key: str) -> tuple[str, str]:
    """Return client id and rest of a key made by `pair`."""
    length, _, both = key.partition(":")
    size = int(length)
    return both[:size], both[size:]


def plain_body(topic: str, client: ClientInfo, identifiers: tuple[int, ...] | None) -> bytes:
    """Return the body of QoS 1 messages without properties: the same for all messages of a client to a topic.

    `identifiers`: None if the store finds the receiver, see `offered_body`.
    """
    if identifiers is None:
        body = ENTRY.encode_record(SessionEntry(topic, b"", client.client_id, client.username, qos=1))
        return body[: -len(_OWN_FIELDS)]
    return ENTRY.encode_record(
        SessionEntry(topic, b"", client.client_id, client.username, qos=1, granted=1, identifiers=identifiers)
    )


def offered_body(message: Message) -> tuple[bytes, bytes]:
    """Return body and payload of an entry whose receiver the store finds: the body ends where its own fields begin."""
    body, payload = ENTRY.encode(message)
    return body[: -len(_OWN_FIELDS)], payload


def message_from(entry: SessionEntry, payload: bytes) -> Message:
    """Return the message of an entry."""
    message = message_of(entry, payload)
    if entry.identifiers:
        message.headers["subscription_ids"] = entry.identifiers
    return message


def subscription_from(filter_: str, data: bytes) -> Subscription:
    """Return the subscription of a record."""
    return subscription_of(filter_, decode_subscription(data))


def subscription_of(filter_: str, record: SubscriptionRecord) -> Subscription:
    """Return the subscription of a record that was decoded."""
    return Subscription(filter_, *msgspec.structs.astuple(record)[:-1])


def subscription_record(subscription: Subscription, generation: int = 0) -> bytes:
    """Return the record of a subscription: its fields but for the filter, in their order, and its generation."""
    fields = SubscriptionRecord.__struct_fields__[:-1]
    return encode((*(getattr(subscription, field) for field in fields), generation))


def client_from(client_id: str, record: SessionRecord) -> ClientInfo:
    """Return the client as it was when it was last connected, as far as that matters while it is away."""
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


def asleep(record: SessionRecord, now: float) -> SessionRecord:
    """Return the record of a session whose client has lost its connection: the member that served it is gone."""
    # Never later than from now on: the clock may have been set back meanwhile.
    latest = now + record.expiry
    will = record.will
    if will is not None:
        at = now + will.delay if will.at is None else min(will.at, now + will.delay)
        will = msgspec.structs.replace(will, at=at)
    if record.connected:
        return msgspec.structs.replace(
            record, connected=False, disconnected_at=now, expires_at=latest, sent_to=-1, will=will
        )
    return msgspec.structs.replace(record, expires_at=min(record.expires_at or latest, latest), will=will)


def will_record(message: Message, delay: int, at: float | None) -> WillRecord:
    """Return the record of a will."""
    body, _ = ENTRY.encode(message)
    return WillRecord(msgspec.Raw(body), message.payload, delay, at)


def will_from(record: WillRecord, client: ClientInfo) -> Message:
    """Return the will of a record."""
    message = message_from(ENTRY.decode(bytes(record.message)), record.payload)
    message.headers["will_of"] = client
    return message
