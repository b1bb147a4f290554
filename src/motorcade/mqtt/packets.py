"""The fifteen control packets, as values. `codec.py` turns them into bytes and back.

Fields that a version does not have keep their default: reason codes are SUCCESS and properties are
`NONE` in MQTT 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt.properties import NONE, Properties

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 1, 2, 3, 4, 5, 6, 7
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT, AUTH = 8, 9, 10, 11, 12, 13, 14, 15

V31, V311, V5 = 3, 4, 5


@dataclass(frozen=True, slots=True)
class Will:
    """The message that the server publishes for a client that ends without DISCONNECT."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Connect:
    """First packet of a client. `version` is the protocol level: 3, 4 or 5."""

    client_id: str
    version: int = V311
    clean_start: bool = True
    keep_alive: int = 0  #: seconds
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Connack:
    """Answer to CONNECT."""

    reason: ReasonCode = ReasonCode.SUCCESS
    session_present: bool = False
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Publish:
    """A message, either way. `packet_id` is 0 exactly when `qos` is 0."""

    topic: str  #: may be empty in MQTT 5 when a topic alias is given
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class _Acknowledgement:
    packet_id: int
    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Puback(_Acknowledgement):
    """QoS 1: received."""


@dataclass(frozen=True, slots=True)
class Pubrec(_Acknowledgement):
    """QoS 2, step 1: received."""


@dataclass(frozen=True, slots=True)
class Pubrel(_Acknowledgement):
    """QoS 2, step 2: will not be sent again."""


@dataclass(frozen=True, slots=True)
class Pubcomp(_Acknowledgement):
    """QoS 2, step 3: forgotten."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Ask for messages."""

    packet_id: int
    subscriptions: tuple[Subscription, ...]
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Suback:
    """One reason code per filter. MQTT 3 says 0x80 for every failure."""

    packet_id: int
    reasons: tuple[ReasonCode, ...]
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Ask for no more messages."""

    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Unsuback:
    """One reason code per filter; MQTT 3 has none (an empty tuple when decoded)."""

    packet_id: int
    reasons: tuple[ReasonCode, ...] = ()
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Pingreq:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Pingresp:
    """I am."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Goodbye; from the server only in MQTT 5."""

    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NONE


@dataclass(frozen=True, slots=True)
class Auth:
    """A step of enhanced authentication; MQTT 5 only."""

    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NONE


Packet = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
