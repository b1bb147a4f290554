"""Bytes to packets and packets to bytes, for MQTT 3.1, 3.1.1 and 5. Pure: no I/O, no clock, no state but `Decoder`'s.

    bytes --split--> one packet: first byte + body --decode--> Packet --encode--> bytes

Rule 1: a packet that is not all there is a value (None), never an error; whatever else is wrong with the peer's bytes
        is a `ProtocolError` with the reason code that MQTT 5 wants for it, in every version.
Rule 2: 0x81 (malformed) is for bytes that cannot be read, 0x82 (protocol error) for bytes that say what is not allowed,
        unless the specification gives the case a code of its own (chapters 1.2 and 4.13).
Rule 3: what one packet alone can tell is checked here; what needs the session or the configuration is checked by the
        broker: syntax of topic filters, No Local on a shared subscription, empty client ids, subscription identifiers
        in a PUBLISH to the server, the range of topic aliases, UTF-8 payloads, who may send which packet.
Rule 4: what a version does not have is left out when written: MQTT 3 gets neither properties nor reason codes of
        acknowledgements. A caller who may not leave something out looks before it encodes.

Clause numbers are those of MQTT 5 unless the comment says 3.1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    V5,
    V31,
    V311,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import NONE, WILL, Properties, decode_properties, encode_properties
from motorcade.mqtt.reasons import ProtocolError, connack_code_v3
from motorcade.mqtt.wire import (
    MAX_VARINT,
    binary,
    malformed,
    read_binary,
    read_byte,
    read_two,
    read_utf8,
    two,
    utf8,
    varint,
    violation,
)

__all__ = ["DEFAULT", "MAX_PACKET", "DecodeLimits", "Decoder", "decode", "encode", "encode_properties", "split"]

MAX_PACKET = 1 + 4 + MAX_VARINT  #: bytes of the largest packet that MQTT can say


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits on the contents of one packet, apart from its size."""

    max_user_properties: int = 64  #: in one packet (a will counts on its own); 0 is unlimited


DEFAULT = DecodeLimits()


# --- tables -------------------------------------------------------------------------------------------------------


def _reasons(*codes: int) -> dict[int, ReasonCode]:
    return {code: ReasonCode(code) for code in codes}


#: Reason codes that a packet of MQTT 5 may carry (chapter 2.4).
_REASONS: dict[int, dict[int, ReasonCode]] = {
    CONNACK: _reasons(0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F),
    PUBACK: _reasons(0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99),
    PUBREC: _reasons(0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99),
    PUBREL: _reasons(0x00, 0x92),
    PUBCOMP: _reasons(0x00, 0x92),
    SUBACK: _reasons(0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2),
    UNSUBACK: _reasons(0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91),
    DISCONNECT: _reasons(0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, *range(0x8B, 0x91), *range(0x93, 0xA3)),
    AUTH: _reasons(0x00, 0x18, 0x19),
}

#: Return codes of CONNACK and SUBACK in MQTT 3.
_CONNACK_V3 = {
    0: ReasonCode.SUCCESS,
    1: ReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    2: ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    3: ReasonCode.SERVER_UNAVAILABLE,
    4: ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    5: ReasonCode.NOT_AUTHORIZED,
}
_SUBACK_V3 = _reasons(0x00, 0x01, 0x02, 0x80)

_PROTOCOL_NAMES = {V31: "MQIsdp", V311: "MQTT", V5: "MQTT"}

# Bits of the connect flags (3.1.2.3).
_RESERVED, _CLEAN_START, _WILL, _WILL_QOS_SHIFT, _WILL_RETAIN, _PASSWORD, _USERNAME = (
    0x01,
    0x02,
    0x04,
    3,
    0x20,
    0x40,
    0x80,
)

# Bits of the subscription options (3.8.3.1); MQTT 3 has the QoS only.
_NO_LOCAL, _RETAIN_AS_PUBLISHED, _RETAIN_HANDLING_SHIFT, _OPTIONS_RESERVED = 0x04, 0x08, 4, 0xC0


def sayable(packet: int, reason: ReasonCode) -> ReasonCode:
    """Return the reason, or the nearest one that a packet of this type may carry in MQTT 5: plugins may give any."""
    if reason in _REASONS[packet]:
        return reason
    if reason < 0x80:
        return ReasonCode.SUCCESS
    refused = (ReasonCode.BAD_USER_NAME_OR_PASSWORD, ReasonCode.BANNED, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
    return ReasonCode.NOT_AUTHORIZED if reason in refused else ReasonCode.UNSPECIFIED_ERROR


# --- encoding -----------------------------------------------------------------------------------------------------


def encode(packet: Packet, version: int) -> bytes:
    """Encode a packet; ValueError if it has no encoding. A CONNECT is written in its own version."""
    return _ENCODERS[type(packet)](packet, version)


def _packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


def _check_qos(qos: int) -> None:
    if not 0 <= qos <= 2:
        raise ValueError(f"QoS {qos} does not exist")


def _packet_id(packet_id: int) -> bytes:
    if not packet_id:
        raise ValueError("packet identifier is 0")  # [MQTT-2.2.1-3], [MQTT-2.2.1-4]
    return two(packet_id)


def _encode_connect(packet: Connect, version: int) -> bytes:  # noqa: ARG001 - its own version counts
    level = packet.version
    will = packet.will
    flags = _CLEAN_START if packet.clean_start else 0
    payload = utf8(packet.client_id)  # [MQTT-3.1.3-1]: the order of the fields
    if will is not None:
        _check_qos(will.qos)
        flags |= _WILL | will.qos << _WILL_QOS_SHIFT | (_WILL_RETAIN if will.retain else 0)
        if level == V5:
            payload += encode_properties(will.properties)
        payload += utf8(will.topic) + binary(will.payload)
    if packet.username is not None:
        flags |= _USERNAME
        payload += utf8(packet.username)
    if packet.password is not None:
        if level != V5 and packet.username is None:
            raise ValueError("MQTT 3 has no password without a user name")  # 3.1.1: [MQTT-3.1.2-22]
        flags |= _PASSWORD
        payload += binary(packet.password)
    name = _PROTOCOL_NAMES.get(level)
    if name is None:
        raise ValueError(f"there is no MQTT of level {level}")
    head = utf8(name) + bytes((level, flags)) + two(packet.keep_alive)
    if level == V5:
        head += encode_properties(packet.properties)
    return _packet(CONNECT << 4, head + payload)


def _encode_connack(packet: Connack, version: int) -> bytes:
    flags = 1 if packet.session_present and version != V31 else 0  # in 3.1 the byte means nothing
    if version == V5:
        return _packet(CONNACK << 4, bytes((flags, packet.reason)) + encode_properties(packet.properties))
    code = connack_code_v3(packet.reason)
    if code is None:
        raise ValueError(f"MQTT 3 has no return code for {packet.reason.name}")
    return bytes((CONNACK << 4, 2, flags, code))


def _encode_publish(packet: Publish, version: int) -> bytes:
    _check_qos(packet.qos)
    first = PUBLISH << 4 | (8 if packet.dup else 0) | packet.qos << 1 | (1 if packet.retain else 0)
    head = utf8(packet.topic)
    if packet.qos:
        head += _packet_id(packet.packet_id)
    if version == V5:
        head += encode_properties(packet.properties)
    return b"".join((bytes((first,)), varint(len(head) + len(packet.payload)), head, packet.payload))


_Acknowledgement = Puback | Pubrec | Pubrel | Pubcomp

#: First byte of each acknowledgement; PUBREL has a reserved flag.
_ACKNOWLEDGEMENTS: dict[type[_Acknowledgement], int] = {
    Puback: PUBACK << 4,
    Pubrec: PUBREC << 4,
    Pubrel: PUBREL << 4 | 2,
    Pubcomp: PUBCOMP << 4,
}


_ACKNOWLEDGEMENT_TYPES = {first >> 4: type_ for type_, first in _ACKNOWLEDGEMENTS.items()}


def _encode_acknowledgement(packet: _Acknowledgement, version: int) -> bytes:
    first = _ACKNOWLEDGEMENTS[type(packet)]
    head = _packet_id(packet.packet_id)
    if version != V5:
        return bytes((first, 2)) + head
    return _packet(first, head + _reason_and_properties(packet.reason, packet.properties))


def _reason_and_properties(reason: ReasonCode, properties: Properties) -> bytes:
    """End of an acknowledgement, DISCONNECT or AUTH: what goes without saying is not said."""
    raw = encode_properties(properties)
    if len(raw) > 1:
        return bytes((reason,)) + raw
    return bytes((reason,)) if reason else b""


def _encode_subscribe(packet: Subscribe, version: int) -> bytes:
    if not packet.subscriptions:
        raise ValueError("SUBSCRIBE without a topic filter")  # [MQTT-3.8.3-2]
    parts = [_packet_id(packet.packet_id)]
    if version == V5:
        parts.append(encode_properties(packet.properties))
    for subscription in packet.subscriptions:
        _check_qos(subscription.qos)
        options = subscription.qos
        if version == V5:
            if subscription.identifier and packet.properties.subscription_ids != (subscription.identifier,):
                raise ValueError("subscription identifier differs from the packet's property")
            if not 0 <= subscription.retain_handling <= 2:
                raise ValueError(f"retain handling {subscription.retain_handling} does not exist")
            options |= subscription.retain_handling << _RETAIN_HANDLING_SHIFT
            options |= _NO_LOCAL if subscription.no_local else 0
            options |= _RETAIN_AS_PUBLISHED if subscription.retain_as_published else 0
        parts += (utf8(subscription.filter), bytes((options,)))
    return _packet(SUBSCRIBE << 4 | 2, b"".join(parts))


def _encode_suback(packet: Suback, version: int) -> bytes:
    if not packet.reasons:
        raise ValueError("SUBACK without a reason code")  # [MQTT-3.9.3-1]
    head = _packet_id(packet.packet_id)
    if version == V5:
        return _packet(SUBACK << 4, head + encode_properties(packet.properties) + bytes(packet.reasons))
    codes = bytes([min(reason, 0x80) for reason in packet.reasons])
    return _packet(SUBACK << 4, head + codes)


def _encode_unsubscribe(packet: Unsubscribe, version: int) -> bytes:
    if not packet.filters:
        raise ValueError("UNSUBSCRIBE without a topic filter")  # [MQTT-3.10.3-2]
    parts = [_packet_id(packet.packet_id)]
    if version == V5:
        parts.append(encode_properties(packet.properties))
    parts += [utf8(filter_) for filter_ in packet.filters]
    return _packet(UNSUBSCRIBE << 4 | 2, b"".join(parts))


def _encode_unsuback(packet: Unsuback, version: int) -> bytes:
    head = _packet_id(packet.packet_id)
    if version != V5:
        return _packet(UNSUBACK << 4, head)
    if not packet.reasons:
        raise ValueError("UNSUBACK without a reason code")  # [MQTT-3.11.3-1]
    return _packet(UNSUBACK << 4, head + encode_properties(packet.properties) + bytes(packet.reasons))


def _encode_pingreq(packet: Pingreq, version: int) -> bytes:  # noqa: ARG001 - one shape for the table
    return b"\xc0\0"


def _encode_pingresp(packet: Pingresp, version: int) -> bytes:  # noqa: ARG001 - one shape for the table
    return b"\xd0\0"


def _encode_disconnect(packet: Disconnect, version: int) -> bytes:
    if version != V5:
        return b"\xe0\0"
    return _packet(DISCONNECT << 4, _reason_and_properties(packet.reason, packet.properties))


def _encode_auth(packet: Auth, version: int) -> bytes:
    if version != V5:
        raise ValueError("MQTT 3 has no AUTH")
    tail = _reason_and_properties(packet.reason, packet.properties)
    if len(tail) == 1:
        raise ValueError("AUTH without an authentication method")  # 3.15.2.2.2
    return _packet(AUTH << 4, tail)


_ENCODERS: dict[type, Callable[[Any, int], bytes]] = {
    Connect: _encode_connect,
    Connack: _encode_connack,
    Publish: _encode_publish,
    **dict.fromkeys(_ACKNOWLEDGEMENTS, _encode_acknowledgement),
    Subscribe: _encode_subscribe,
    Suback: _encode_suback,
    Unsubscribe: _encode_unsubscribe,
    Unsuback: _encode_unsuback,
    Pingreq: _encode_pingreq,
    Pingresp: _encode_pingresp,
    Disconnect: _encode_disconnect,
    Auth: _encode_auth,
}


# --- framing ------------------------------------------------------------------------------------------------------


def split(data: bytes | bytearray, offset: int, max_size: int) -> tuple[int, int] | None:
    """Return (start of the body, end of the packet) of the packet at `offset`, or None if it is not complete yet.

    A length that makes the packet larger than `max_size` bytes is refused as soon as it can be read.
    """
    available = len(data)
    at = offset + 1
    if at >= available:
        return None
    length = data[at]
    if length >= 0x80:
        length &= 0x7F
        shift = 7
        digit = 0x80
        while digit >= 0x80:
            if shift > 21:
                raise malformed("remaining length is longer than four bytes")
            at += 1
            if at >= available:
                return None
            digit = data[at]
            length |= (digit & 0x7F) << shift
            shift += 7
        if not digit:
            raise malformed("remaining length is not in its shortest form")  # [MQTT-1.5.5-1]
    start = at + 1
    end = start + length
    if end - offset > max_size:
        detail = f"packet of {end - offset} bytes is larger than {max_size}"
        raise ProtocolError(ReasonCode.PACKET_TOO_LARGE, detail)  # [MQTT-3.1.2-24]
    return (start, end) if end <= available else None


class Decoder:
    """Bytes in, packets out, for one peer's stream: used by clients and tests.

    It follows the version of a CONNECT that passes. After a `ProtocolError` the stream is lost: every further call
    raises the same error again.
    """

    def __init__(self, version: int = V311, max_size: int = MAX_PACKET, limits: DecodeLimits = DEFAULT) -> None:
        self.version = version
        self._max_size = max_size
        self._limits = limits
        self._buffer = bytearray()
        self._error: ProtocolError | None = None

    def feed(self, data: bytes) -> list[Packet]:
        """Return all packets that `data` completes."""
        if self._error is not None:
            raise self._error
        try:
            return self._take(data)
        except ProtocolError as error:
            self._error = error
            raise

    def _take(self, data: bytes) -> list[Packet]:
        buffer = self._buffer
        buffer += data
        packets: list[Packet] = []
        offset = 0
        while (span := split(buffer, offset, self._max_size)) is not None:
            start, end = span
            packet = decode(buffer[offset], bytes(buffer[start:end]), self.version, self._limits)
            if isinstance(packet, Connect):
                self.version = packet.version
            packets.append(packet)
            offset = end
        del buffer[:offset]
        return packets


# --- decoding -----------------------------------------------------------------------------------------------------


def decode(first: int, body: bytes, version: int, limits: DecodeLimits = DEFAULT) -> Packet:
    """Decode the packet with first byte `first` and everything after the remaining length in `body`.

    `version` is not looked at for a CONNECT, which names its own.
    """
    return _DECODERS[first >> 4](first, body, version, limits)


def _check_flags(first: int, wanted: int) -> None:
    if first & 0x0F != wanted:
        raise malformed("reserved flags of the fixed header")  # [MQTT-2.1.3-1], 3.1.1: [MQTT-2.2.2-2]


def _check_request_flags(first: int, version: int) -> None:
    """Check SUBSCRIBE, UNSUBSCRIBE and PUBREL; in MQTT 3.1 they had a DUP flag, which told nothing."""
    _check_flags(first & 0xF7 if version == V31 else first, 2)  # [MQTT-3.6.1-1], [MQTT-3.8.1-1], [MQTT-3.10.1-1]


def _check_end(body: bytes, at: int) -> None:
    if at != len(body):
        raise malformed(f"{len(body) - at} bytes too many")


def _read_packet_id(body: bytes, at: int) -> tuple[int, int]:
    packet_id, at = read_two(body, at, "packet identifier")
    if not packet_id:
        raise violation("packet identifier is 0")  # [MQTT-2.2.1-3], 3.1.1: [MQTT-2.3.1-1]
    return packet_id, at


def _reason(packet: int, code: int) -> ReasonCode:
    # [MQTT-3.2.2-8], [MQTT-3.4.2-1], [MQTT-3.5.2-1], [MQTT-3.6.2-1], [MQTT-3.7.2-1], [MQTT-3.9.3-2],
    # [MQTT-3.11.3-2], [MQTT-3.14.2-1], [MQTT-3.15.2-1]
    reason = _REASONS[packet].get(code)
    if reason is None:
        raise violation(f"0x{code:02X} is no reason code of this packet")
    return reason


def _check_topic(topic: str, field: str) -> None:
    if not topic:
        raise ProtocolError(ReasonCode.TOPIC_NAME_INVALID, f"{field} is empty")  # [MQTT-4.7.3-1]
    if "+" in topic or "#" in topic:
        raise ProtocolError(ReasonCode.TOPIC_NAME_INVALID, f"wildcard in {field}")  # [MQTT-3.3.2-2], [MQTT-4.7.1-1]


def _decode_reserved(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:  # noqa: ARG001
    raise malformed("packet type 0")  # 2.1.2


def _decode_connect(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_flags(first, 0)
    version, at = _read_version(body)
    flags, at = read_byte(body, at, "connect flags")
    _check_connect_flags(flags, version)
    keep_alive, at = read_two(body, at, "keep alive")
    properties = NONE
    if version == V5:
        properties, at = decode_properties(body, at, CONNECT, limits.max_user_properties)
    client_id, at = read_utf8(body, at, "client identifier")  # [MQTT-3.1.3-3], [MQTT-3.1.3-4]
    will = None
    if flags & _WILL:
        will, at = _read_will(body, at, flags, version, limits)
    username = password = None
    # MQTT 3.1 lets a client set these flags and then leave the fields out.
    if flags & _USERNAME and (version != V31 or at < len(body)):
        username, at = read_utf8(body, at, "user name")  # [MQTT-3.1.3-12]
    if flags & _PASSWORD and (version != V31 or at < len(body)):
        password, at = read_binary(body, at, "password")
    _check_end(body, at)  # [MQTT-3.1.2-16], [MQTT-3.1.2-18]: no user name, no password without its flag
    return Connect(client_id, version, bool(flags & _CLEAN_START), keep_alive, username, password, will, properties)


def _read_version(body: bytes) -> tuple[int, int]:
    name, at = read_utf8(body, 0, "protocol name")
    level, at = read_byte(body, at, "protocol level")
    if _PROTOCOL_NAMES.get(level) != name:  # [MQTT-3.1.2-1], [MQTT-3.1.2-2]
        detail = f"protocol {name[:16]!r} level {level}"
        raise ProtocolError(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, detail)
    return level, at


def _check_connect_flags(flags: int, version: int) -> None:
    if flags & _RESERVED:
        raise malformed("reserved connect flag is set")  # [MQTT-3.1.2-3]
    qos = flags >> _WILL_QOS_SHIFT & 3
    if qos == 3:
        raise malformed("will QoS is 3")  # [MQTT-3.1.2-12]
    if not flags & _WILL and (qos or flags & _WILL_RETAIN):
        raise malformed("will QoS or will retain without a will")  # [MQTT-3.1.2-11], [MQTT-3.1.2-13]
    if version != V5 and flags & _PASSWORD and not flags & _USERNAME:
        raise malformed("password without user name")  # 3.1.1: [MQTT-3.1.2-22]


def _read_will(body: bytes, at: int, flags: int, version: int, limits: DecodeLimits) -> tuple[Will, int]:
    properties = NONE
    if version == V5:
        properties, at = decode_properties(body, at, WILL, limits.max_user_properties)
    topic, at = read_utf8(body, at, "will topic")  # [MQTT-3.1.3-11]
    _check_topic(topic, "will topic")
    payload, at = read_binary(body, at, "will payload")
    return Will(topic, payload, flags >> _WILL_QOS_SHIFT & 3, bool(flags & _WILL_RETAIN), properties), at


def _decode_connack(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_flags(first, 0)
    flags, at = read_byte(body, 0, "acknowledge flags")
    if flags > 1:
        raise malformed("reserved acknowledge flags")  # [MQTT-3.2.2-1]
    code, at = read_byte(body, at, "reason code")
    properties = NONE
    if version == V5:
        reason = _reason(CONNACK, code)
        properties, at = decode_properties(body, at, CONNACK, limits.max_user_properties)
    elif code in _CONNACK_V3:
        reason = _CONNACK_V3[code]
    else:
        raise violation(f"return code {code} is reserved")  # 3.1.1: table 3.1
    _check_end(body, at)
    present = bool(flags) and version != V31
    if present and reason:
        raise violation("session present in a refusal")  # [MQTT-3.2.2-6], 3.1.1: [MQTT-3.2.2-4]
    return Connack(reason, present, properties)


def _decode_publish(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    qos = first >> 1 & 3
    if qos == 3:
        raise malformed("QoS is 3")  # [MQTT-3.3.1-4]
    if first & 8 and not qos:
        raise malformed("DUP with QoS 0")  # [MQTT-3.3.1-2]
    topic, at = read_utf8(body, 0, "topic name")  # [MQTT-3.3.2-1]
    packet_id = 0
    if qos:
        packet_id, at = _read_packet_id(body, at)
    properties = NONE
    if version == V5:
        properties, at = decode_properties(body, at, PUBLISH, limits.max_user_properties)
    if topic or version != V5:
        _check_topic(topic, "topic name")
    elif properties.topic_alias is None:
        raise violation("neither topic name nor topic alias")  # 3.3.2.1
    return Publish(topic, body[at:], qos, bool(first & 1), bool(first & 8), packet_id, properties)


def _read_reason_and_properties(
    packet: int, body: bytes, at: int, limits: DecodeLimits
) -> tuple[ReasonCode, Properties]:
    """End of an acknowledgement or DISCONNECT: properties may be left out, and then the reason code may be too."""
    if at == len(body):
        return ReasonCode.SUCCESS, NONE
    reason = _reason(packet, body[at])
    at += 1
    if at == len(body):
        return reason, NONE
    properties, at = decode_properties(body, at, packet, limits.max_user_properties)
    _check_end(body, at)
    return reason, properties


def _decode_acknowledgement(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    kind = first >> 4
    if kind == PUBREL:
        _check_request_flags(first, version)
    else:
        _check_flags(first, 0)
    packet_id, at = _read_packet_id(body, 0)
    if version != V5:
        _check_end(body, at)
        return _ACKNOWLEDGEMENT_TYPES[kind](packet_id)
    reason, properties = _read_reason_and_properties(kind, body, at, limits)
    return _ACKNOWLEDGEMENT_TYPES[kind](packet_id, reason, properties)


def _decode_subscribe(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_request_flags(first, version)
    packet_id, at = _read_packet_id(body, 0)
    properties = NONE
    if version == V5:
        properties, at = decode_properties(body, at, SUBSCRIBE, limits.max_user_properties)
    identifier = properties.subscription_ids[0] if properties.subscription_ids else 0
    subscriptions: list[Subscription] = []
    while at < len(body):
        subscription, at = _read_subscription(body, at, version, identifier)
        subscriptions.append(subscription)
    if not subscriptions:
        raise violation("SUBSCRIBE without a topic filter")  # [MQTT-3.8.3-2], 3.1.1: [MQTT-3.8.3-3]
    return Subscribe(packet_id, tuple(subscriptions), properties)


def _read_subscription(body: bytes, at: int, version: int, identifier: int) -> tuple[Subscription, int]:
    filter_, at = read_utf8(body, at, "topic filter")  # [MQTT-3.8.3-1]
    options, at = read_byte(body, at, "subscription options")
    if options & (_OPTIONS_RESERVED if version == V5 else 0xFC):
        raise malformed("reserved subscription options")  # [MQTT-3.8.3-5], 3.1.1: [MQTT-3.8.3-4]
    qos = options & 3
    if qos == 3:
        raise violation("requested QoS is 3")  # 3.8.3.1
    retain_handling = options >> _RETAIN_HANDLING_SHIFT
    if retain_handling == 3:
        raise violation("retain handling is 3")  # 3.8.3.1
    no_local = bool(options & _NO_LOCAL)
    as_published = bool(options & _RETAIN_AS_PUBLISHED)
    return Subscription(filter_, qos, no_local, as_published, retain_handling, identifier), at


def _decode_suback(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_flags(first, 0)
    packet_id, at = _read_packet_id(body, 0)
    properties = NONE
    if version == V5:
        properties, at = decode_properties(body, at, SUBACK, limits.max_user_properties)
        reasons = tuple([_reason(SUBACK, code) for code in body[at:]])
    else:
        reasons = tuple([_suback_code_v3(code) for code in body[at:]])
    if not reasons:
        raise violation("SUBACK without a reason code")  # [MQTT-3.9.3-1]
    return Suback(packet_id, reasons, properties)


def _suback_code_v3(code: int) -> ReasonCode:
    reason = _SUBACK_V3.get(code)
    if reason is None:
        raise violation(f"return code 0x{code:02X} is reserved")  # 3.1.1: [MQTT-3.9.3-2]
    return reason


def _decode_unsubscribe(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_request_flags(first, version)
    packet_id, at = _read_packet_id(body, 0)
    properties = NONE
    if version == V5:
        properties, at = decode_properties(body, at, UNSUBSCRIBE, limits.max_user_properties)
    filters: list[str] = []
    while at < len(body):
        filter_, at = read_utf8(body, at, "topic filter")  # [MQTT-3.10.3-1]
        filters.append(filter_)
    if not filters:
        raise violation("UNSUBSCRIBE without a topic filter")  # [MQTT-3.10.3-2]
    return Unsubscribe(packet_id, tuple(filters), properties)


def _decode_unsuback(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_flags(first, 0)
    packet_id, at = _read_packet_id(body, 0)
    if version != V5:
        _check_end(body, at)
        return Unsuback(packet_id)
    properties, at = decode_properties(body, at, UNSUBACK, limits.max_user_properties)
    reasons = tuple([_reason(UNSUBACK, code) for code in body[at:]])
    if not reasons:
        raise violation("UNSUBACK without a reason code")  # [MQTT-3.11.3-1]
    return Unsuback(packet_id, reasons, properties)


def _decode_pingreq(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:  # noqa: ARG001
    _check_flags(first, 0)
    _check_end(body, 0)
    return Pingreq()


def _decode_pingresp(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:  # noqa: ARG001
    _check_flags(first, 0)
    _check_end(body, 0)
    return Pingresp()


def _decode_disconnect(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    _check_flags(first, 0)  # [MQTT-3.14.1-1]
    if version != V5:
        _check_end(body, 0)
        return Disconnect()
    reason, properties = _read_reason_and_properties(DISCONNECT, body, 0, limits)
    return Disconnect(reason, properties)


def _decode_auth(first: int, body: bytes, version: int, limits: DecodeLimits) -> Packet:
    if version != V5:
        raise malformed("packet type 15")  # 3.1.1: 2.2.1
    _check_flags(first, 0)  # [MQTT-3.15.1-1]
    if not body:
        return Auth()
    reason = _reason(AUTH, body[0])
    properties, at = decode_properties(body, 1, AUTH, limits.max_user_properties)  # here the length may not be left out
    _check_end(body, at)
    # 3.15.2.1 allows an AUTH that says nothing, 3.15.2.2.2 wants the method in every other.
    if properties.authentication_method is None and (reason or properties is not NONE):
        raise violation("AUTH without an authentication method")
    return Auth(reason, properties)


_DECODERS: tuple[Callable[[int, bytes, int, DecodeLimits], Packet], ...] = (
    _decode_reserved,
    _decode_connect,
    _decode_connack,
    _decode_publish,
    _decode_acknowledgement,
    _decode_acknowledgement,
    _decode_acknowledgement,
    _decode_acknowledgement,
    _decode_subscribe,
    _decode_suback,
    _decode_unsubscribe,
    _decode_unsuback,
    _decode_pingreq,
    _decode_pingresp,
    _decode_disconnect,
    _decode_auth,
)
