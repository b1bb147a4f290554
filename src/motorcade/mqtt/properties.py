"""MQTT 5 properties: one immutable record for all packets; a field that is None (or empty) is absent.

A property that comes or goes is one field of `Properties` and one line of `_TABLE`, at the same place in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from operator import attrgetter
from typing import Any

from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.reasons import ProtocolError
from motorcade.mqtt.wire import (
    binary,
    four,
    malformed,
    read_binary,
    read_byte,
    read_four,
    read_two,
    read_utf8,
    read_varint,
    two,
    utf8,
    varint,
    violation,
)


@dataclass(frozen=True, slots=True)
class Properties:
    """All 27 properties of MQTT 5 (table 2-4). Which packet may carry which is checked by the codec."""

    payload_format: int | None = None  # 0x01
    message_expiry: int | None = None  # 0x02, seconds
    content_type: str | None = None  # 0x03
    response_topic: str | None = None  # 0x08
    correlation_data: bytes | None = None  # 0x09
    subscription_ids: tuple[int, ...] = ()  # 0x0B
    session_expiry: int | None = None  # 0x11, seconds
    assigned_client_id: str | None = None  # 0x12
    server_keep_alive: int | None = None  # 0x13, seconds
    authentication_method: str | None = None  # 0x15
    authentication_data: bytes | None = None  # 0x16
    request_problem_information: int | None = None  # 0x17
    will_delay: int | None = None  # 0x18, seconds
    request_response_information: int | None = None  # 0x19
    response_information: str | None = None  # 0x1A
    server_reference: str | None = None  # 0x1C
    reason_string: str | None = None  # 0x1F
    receive_maximum: int | None = None  # 0x21
    topic_alias_maximum: int | None = None  # 0x22
    topic_alias: int | None = None  # 0x23
    maximum_qos: int | None = None  # 0x24
    retain_available: int | None = None  # 0x25
    user_properties: tuple[tuple[str, str], ...] = ()  # 0x26
    maximum_packet_size: int | None = None  # 0x27
    wildcard_available: int | None = None  # 0x28
    subscription_ids_available: int | None = None  # 0x29
    shared_available: int | None = None  # 0x2A


NONE = Properties()


# --- on the wire --------------------------------------------------------------------------------------------------

WILL = 0  #: stands for the will properties of CONNECT, where the other packets have their type


class _Kind(IntEnum):
    FLAG = auto()  # one byte; every property of one byte is 0 or 1
    TWO = auto()
    FOUR = auto()
    VARINT = auto()
    UTF8 = auto()
    BINARY = auto()
    PAIR = auto()


@dataclass(frozen=True, slots=True)
class _Wire:
    """The encoding of one field of `Properties`, and the packets that may carry it (table 2-4)."""

    id: int
    name: str
    kind: _Kind
    packets: tuple[int, ...]  # types of control packets, or WILL


# Types of control packets; packets.py has them too, but imports this file.
_CONNECT, _CONNACK, _PUBLISH, _SUBSCRIBE, _DISCONNECT, _AUTH = 1, 2, 3, 8, 14, 15
_MESSAGE = (_PUBLISH, WILL)
_ANSWERS = (_CONNACK, 4, 5, 6, 7, 9, 11, _DISCONNECT, _AUTH)
_ALL = (*_ANSWERS, WILL, _CONNECT, _PUBLISH, _SUBSCRIBE, 10)

#: In the order of the fields of `Properties`, which is also the order in which we write them.
_TABLE = (
    _Wire(0x01, "payload_format", _Kind.FLAG, _MESSAGE),
    _Wire(0x02, "message_expiry", _Kind.FOUR, _MESSAGE),
    _Wire(0x03, "content_type", _Kind.UTF8, _MESSAGE),
    _Wire(0x08, "response_topic", _Kind.UTF8, _MESSAGE),
    _Wire(0x09, "correlation_data", _Kind.BINARY, _MESSAGE),
    _Wire(0x0B, "subscription_ids", _Kind.VARINT, (_PUBLISH, _SUBSCRIBE)),
    _Wire(0x11, "session_expiry", _Kind.FOUR, (_CONNECT, _CONNACK, _DISCONNECT)),
    _Wire(0x12, "assigned_client_id", _Kind.UTF8, (_CONNACK,)),
    _Wire(0x13, "server_keep_alive", _Kind.TWO, (_CONNACK,)),
    _Wire(0x15, "authentication_method", _Kind.UTF8, (_CONNECT, _CONNACK, _AUTH)),
    _Wire(0x16, "authentication_data", _Kind.BINARY, (_CONNECT, _CONNACK, _AUTH)),
    _Wire(0x17, "request_problem_information", _Kind.FLAG, (_CONNECT,)),
    _Wire(0x18, "will_delay", _Kind.FOUR, (WILL,)),
    _Wire(0x19, "request_response_information", _Kind.FLAG, (_CONNECT,)),
    _Wire(0x1A, "response_information", _Kind.UTF8, (_CONNACK,)),
    _Wire(0x1C, "server_reference", _Kind.UTF8, (_CONNACK, _DISCONNECT)),
    _Wire(0x1F, "reason_string", _Kind.UTF8, _ANSWERS),
    _Wire(0x21, "receive_maximum", _Kind.TWO, (_CONNECT, _CONNACK)),
    _Wire(0x22, "topic_alias_maximum", _Kind.TWO, (_CONNECT, _CONNACK)),
    _Wire(0x23, "topic_alias", _Kind.TWO, (_PUBLISH,)),
    _Wire(0x24, "maximum_qos", _Kind.FLAG, (_CONNACK,)),
    _Wire(0x25, "retain_available", _Kind.FLAG, (_CONNACK,)),
    _Wire(0x26, "user_properties", _Kind.PAIR, _ALL),
    _Wire(0x27, "maximum_packet_size", _Kind.FOUR, (_CONNECT, _CONNACK)),
    _Wire(0x28, "wildcard_available", _Kind.FLAG, (_CONNACK,)),
    _Wire(0x29, "subscription_ids_available", _Kind.FLAG, (_CONNACK,)),
    _Wire(0x2A, "shared_available", _Kind.FLAG, (_CONNACK,)),
)
_INDEX = {wire.id: index for index, wire in enumerate(_TABLE)}
_values_of = attrgetter(*(wire.name for wire in _TABLE))

_SUBSCRIPTION_IDS = _INDEX[0x0B]
_USER_PROPERTIES = _INDEX[0x26]
_NOT_ZERO = (0x21, 0x27)  # receive maximum, maximum packet size


def encode_properties(properties: Properties) -> bytes:
    """Encode properties with their length in front; by ascending identifier, user properties in their own order."""
    if properties is NONE:
        return b"\0"
    parts: list[bytes] = []
    for wire, value in zip(_TABLE, _values_of(properties), strict=True):
        if value is not None and value != ():
            _append(parts, wire, value)
    raw = b"".join(parts)
    return varint(len(raw)) + raw


def _append(parts: list[bytes], wire: _Wire, value: Any) -> None:
    kind = wire.kind
    head = bytes((wire.id,))
    if kind is _Kind.PAIR:
        for name, text in value:
            parts += (head, utf8(name), utf8(text))
    elif kind is _Kind.VARINT:
        for number in value:
            parts += (head, varint(number))
    elif kind is _Kind.UTF8:
        parts += (head, utf8(value))
    elif kind is _Kind.FOUR:
        parts += (head, four(value))
    elif kind is _Kind.TWO:
        parts += (head, two(value))
    elif kind is _Kind.BINARY:
        parts += (head, binary(value))
    else:
        parts += (head, bytes((value,)))


def decode_properties(body: bytes, at: int, packet: int, max_user_properties: int) -> tuple[Properties, int]:
    """Decode the properties at `at` of a packet of type `packet` (or WILL); return them and the position after them."""
    length, at = read_varint(body, at, "property length")
    if not length:
        return NONE, at
    end = at + length
    if end > len(body):
        raise malformed("properties go past the end of the packet")
    section = body[at:end]
    values: list[Any] = [None] * len(_TABLE)
    ids: list[int] = []
    pairs: list[tuple[str, str]] = []
    at = 0
    while at < length:
        index = _index(section[at], packet)
        wire = _TABLE[index]
        at += 1
        if wire.kind is _Kind.PAIR:
            name, at = read_utf8(section, at, "name of user property")
            text, at = read_utf8(section, at, "value of user property")
            pairs.append((name, text))
            if 0 < max_user_properties < len(pairs):
                raise ProtocolError(ReasonCode.QUOTA_EXCEEDED, f"more than {max_user_properties} user properties")
        elif wire.kind is _Kind.VARINT:
            number, at = _read_subscription_id(section, at)
            if ids and packet == _SUBSCRIBE:
                raise violation("subscription identifier stands twice")  # 3.8.2.1.2
            ids.append(number)
        else:
            if values[index] is not None:
                raise violation(f"{_spoken(wire)} stands twice")  # 2.2.2.2 and each property's own section
            values[index], at = _read_value(section, at, wire)
    values[_SUBSCRIPTION_IDS] = tuple(ids)
    values[_USER_PROPERTIES] = tuple(pairs)
    properties = Properties(*values)
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise violation("authentication data without authentication method")  # 3.1.2.11.10
    return properties, end


def _index(identifier: int, packet: int) -> int:
    index = _INDEX.get(identifier)
    if index is None:
        raise malformed(f"unknown property 0x{identifier:02X}")  # 2.2.2.2
    if packet not in _TABLE[index].packets:
        raise malformed(f"{_spoken(_TABLE[index])} is no property of this packet")  # 2.2.2.2
    return index


def _read_subscription_id(section: bytes, at: int) -> tuple[int, int]:
    number, at = read_varint(section, at, "subscription identifier")
    if not number:
        raise violation("subscription identifier is 0")  # 3.8.2.1.2, 3.3.2.3.8
    return number, at


def _read_value(section: bytes, at: int, wire: _Wire) -> tuple[Any, int]:
    kind = wire.kind
    name = _spoken(wire)
    if kind is _Kind.UTF8:
        text, at = read_utf8(section, at, name)
        if wire.id == 0x08 and (not text or "+" in text or "#" in text):
            raise violation("response topic is no topic name")  # [MQTT-3.3.2-14], [MQTT-4.7.3-1]
        return text, at
    if kind is _Kind.BINARY:
        return read_binary(section, at, name)
    if kind is _Kind.FLAG:
        number, at = read_byte(section, at, name)
        if number > 1:
            raise violation(f"{name} is {number}, neither 0 nor 1")
        return number, at
    number, at = read_two(section, at, name) if kind is _Kind.TWO else read_four(section, at, name)
    if not number and wire.id in _NOT_ZERO:
        raise violation(f"{name} is 0")  # 3.1.2.11.3, 3.1.2.11.4
    if not number and wire.id == 0x23:
        raise ProtocolError(ReasonCode.TOPIC_ALIAS_INVALID, "topic alias is 0")  # [MQTT-3.3.2-8]
    return number, at


def _spoken(wire: _Wire) -> str:
    return wire.name.replace("_", " ")
