"""MQTT on the wire for tests: packets built byte by byte, replies taken apart again, one blocking client.

This file imports nothing of Motorcade, so that a mistake in the broker's codec cannot hide behind the same mistake
in its tests. It builds wrong packets as willingly as right ones: nothing here checks what a test asks for.

`properties` are always the bytes of the properties without their length; the builders put the length in front.
Versions are the protocol levels: 3 (MQTT 3.1), 4 (MQTT 3.1.1) and 5.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBSCRIBE = range(1, 9)
SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ_TYPE, PINGRESP, DISCONNECT, AUTH = range(9, 16)

#: Names of the packet types, for readable assertion messages.
NAMES = (
    *("RESERVED", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP"),
    *("SUBSCRIBE", "SUBACK", "UNSUBSCRIBE", "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH"),
)

PINGREQ = b"\xc0\x00"

#: Seconds a test waits for an answer before it fails. Generous: machines that run tests are busy.
PATIENCE = 30.0

# Property identifiers by the type of their value (MQTT 5, table 2-4).
_BYTE = {0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A}
_TWO = {0x13, 0x21, 0x22, 0x23}
_FOUR = {0x02, 0x11, 0x18, 0x27}
_VARINT = {0x0B}
_UTF8 = {0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F}
_BINARY = {0x09, 0x16}
_PAIR = {0x26}


# --- building -----------------------------------------------------------------------------------------------------


def varint(n: int) -> bytes:
    """A Variable Byte Integer of the shortest form."""
    out = bytearray()
    while True:
        n, digit = divmod(n, 128)
        out.append(digit | 0x80 if n else digit)
        if not n:
            return bytes(out)


def utf8(s: str | bytes) -> bytes:
    """A string with its two-byte length; bytes are taken as they are, so that illegal UTF-8 can be sent."""
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("!H", len(raw)) + raw


def binary(b: bytes) -> bytes:
    """Binary data with its two-byte length."""
    return struct.pack("!H", len(b)) + b


def prop(id: int, value: Any) -> bytes:  # noqa: A002 - the name the specification uses
    """One MQTT 5 property, its value encoded as its identifier demands; a User Property takes a pair."""
    head = varint(id)
    if id in _BYTE:
        return head + bytes([value])
    if id in _TWO:
        return head + struct.pack("!H", value)
    if id in _FOUR:
        return head + struct.pack("!I", value)
    if id in _VARINT:
        return head + varint(value)
    if id in _UTF8:
        return head + utf8(value)
    if id in _BINARY:
        return head + binary(value)
    if id in _PAIR:
        return head + utf8(value[0]) + utf8(value[1])
    raise ValueError(f"no property 0x{id:02x}")


def props(*items: bytes) -> bytes:
    """Properties with their length in front."""
    body = b"".join(items)
    return varint(len(body)) + body


def packet(first: int, body: bytes = b"") -> bytes:
    """A packet of a first byte (type and flags) and everything after the Remaining Length."""
    return bytes([first]) + varint(len(body)) + body


@dataclass(frozen=True)
class Will:
    """The will of a CONNECT. `properties` are without their length."""

    topic: str | bytes
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: bytes = b""


def connect_packet(
    client_id: str | bytes = "",
    *,
    version: int = 5,
    clean: bool = True,
    keepalive: int = 60,
    username: str | bytes | None = None,
    password: bytes | str | None = None,
    will: Will | None = None,
    properties: bytes = b"",
) -> bytes:
    """A CONNECT; `clean` is Clean Session up to 3.1.1 and Clean Start in 5."""
    flags = 0x02 if clean else 0
    payload = utf8(client_id)
    if will is not None:
        flags |= 0x04 | will.qos << 3 | (0x20 if will.retain else 0)
        if version >= 5:
            payload += props(will.properties)
        payload += utf8(will.topic) + binary(will.payload)
    if username is not None:
        flags |= 0x80
        payload += utf8(username)
    if password is not None:
        flags |= 0x40
        payload += utf8(password)
    name = b"MQIsdp" if version == 3 else b"MQTT"
    head = utf8(name) + bytes([version, flags]) + struct.pack("!H", keepalive)
    if version >= 5:
        head += props(properties)
    return packet(0x10, head + payload)


def publish_packet(
    topic: str | bytes,
    payload: bytes = b"",
    *,
    version: int = 5,
    qos: int = 0,
    packet_id: int | None = None,
    retain: bool = False,
    dup: bool = False,
    properties: bytes = b"",
) -> bytes:
    """A PUBLISH. A packet identifier is written when one is given, whatever the QoS; QoS 1 and 2 default to 1."""
    if packet_id is None and qos > 0:
        packet_id = 1
    body = utf8(topic)
    if packet_id is not None:
        body += struct.pack("!H", packet_id)
    if version >= 5:
        body += props(properties)
    return packet(0x30 | (8 if dup else 0) | qos << 1 | retain, body + payload)


def subscribe_packet(
    packet_id: int, filters: Iterable[tuple[str | bytes, int]], *, version: int = 5, properties: bytes = b""
) -> bytes:
    """A SUBSCRIBE of pairs of filter and options byte."""
    body = struct.pack("!H", packet_id)
    if version >= 5:
        body += props(properties)
    return packet(0x82, body + b"".join(utf8(name) + bytes([options]) for name, options in filters))


def unsubscribe_packet(
    packet_id: int, filters: Iterable[str | bytes], *, version: int = 5, properties: bytes = b""
) -> bytes:
    """An UNSUBSCRIBE."""
    body = struct.pack("!H", packet_id)
    if version >= 5:
        body += props(properties)
    return packet(0xA2, body + b"".join(utf8(name) for name in filters))


def ack_packet(
    type_nibble: int, packet_id: int, *, version: int = 5, reason: int | None = None, properties: bytes = b""
) -> bytes:
    """A PUBACK, PUBREC, PUBREL or PUBCOMP; without `reason` and `properties` the two-byte form."""
    body = struct.pack("!H", packet_id)
    if version >= 5 and (reason is not None or properties):
        body += bytes([reason or 0])
        if properties:
            body += props(properties)
    return packet(type_nibble << 4 | (2 if type_nibble == PUBREL else 0), body)


def disconnect_packet(*, version: int = 5, reason: int | None = None, properties: bytes = b"") -> bytes:
    """A DISCONNECT; without `reason` and `properties` the empty form."""
    if version < 5 or (reason is None and not properties):
        return b"\xe0\x00"
    return packet(0xE0, bytes([reason or 0]) + (props(properties) if properties else b""))


def auth_packet(reason: int, properties: bytes = b"") -> bytes:
    """An AUTH."""
    return packet(0xF0, bytes([reason]) + props(properties))


# --- reading ------------------------------------------------------------------------------------------------------


class _Cursor:
    """Reads values one after the other; running out of bytes is a failed assertion, not a guess."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, n: int) -> bytes:
        assert n <= self.left, f"packet cut short: {self.data.hex(' ')}"
        self.at += n
        return self.data[self.at - n : self.at]

    def rest(self) -> bytes:
        return self.take(self.left)

    def byte(self) -> int:
        return self.take(1)[0]

    def two(self) -> int:
        return int.from_bytes(self.take(2), "big")

    def four(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def varint(self) -> int:
        value = 0
        for shift in (0, 7, 14, 21):
            digit = self.byte()
            value |= (digit & 0x7F) << shift
            if digit < 0x80:
                assert digit or not shift, f"variable byte integer not in its shortest form: {self.data.hex(' ')}"
                return value
        raise AssertionError("variable byte integer of more than four bytes")

    def utf8(self) -> str:
        text = self.take(self.two()).decode("utf-8")  # a broker that sends illegal UTF-8 fails the test here
        assert "\0" not in text, "string with U+0000 from the broker"
        return text

    def properties(self) -> list[tuple[int, Any]]:
        inner = _Cursor(self.take(self.varint()))
        found: list[tuple[int, Any]] = []
        while inner.left:
            found.append(inner.property())
        return found

    def property(self) -> tuple[int, Any]:
        id = self.varint()  # noqa: A001 - the name the specification uses
        if id in _BYTE:
            return id, self.byte()
        if id in _TWO:
            return id, self.two()
        if id in _FOUR:
            return id, self.four()
        if id in _VARINT:
            return id, self.varint()
        if id in _UTF8:
            return id, self.utf8()
        if id in _BINARY:
            return id, self.take(self.two())
        if id in _PAIR:
            return id, (self.utf8(), self.utf8())
        raise AssertionError(f"unknown property 0x{id:02x} from the broker")


@dataclass
class Packet:
    """A packet that the broker sent. Attributes that its type does not have keep their defaults."""

    type: int
    flags: int
    raw: bytes
    version: int
    packet_id: int | None = None
    topic: str = ""
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    dup: bool = False
    reason: int | None = None  #: return code up to 3.1.1, Reason Code in 5; 0 where 5 lets it be left out
    reasons: list[int] = field(default_factory=list)
    session_present: bool = False
    properties: list[tuple[int, Any]] = field(default_factory=list)

    def prop(self, id: int) -> Any:  # noqa: A002 - the name the specification uses
        """The first value of a property, or None."""
        return next((value for key, value in self.properties if key == id), None)

    def prop_all(self, id: int) -> list[Any]:  # noqa: A002 - the name the specification uses
        """All values of a property in the order of the packet."""
        return [value for key, value in self.properties if key == id]

    @property
    def name(self) -> str:
        return NAMES[self.type]


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The fixed header of the next packet, and the rest of it; the errors of the stream if it does not come whole."""
    head = await reader.readexactly(2)
    length, shift = head[1] & 0x7F, 7
    while head[-1] & 0x80:
        head += await reader.readexactly(1)
        length |= (head[-1] & 0x7F) << shift
        shift += 7
    return head, await reader.readexactly(length)


def parse(raw: bytes, version: int = 5) -> Packet:
    """Take one whole packet from a broker apart; a malformed one fails the test."""
    cursor = _Cursor(raw)
    first = cursor.byte()
    length = cursor.varint()
    assert length == cursor.left, f"remaining length {length} but {cursor.left} bytes follow"
    found = Packet(first >> 4, first & 0x0F, raw, version)
    v5 = version >= 5
    match found.type:
        case 2:  # CONNACK
            acknowledge = cursor.byte()
            assert acknowledge & 0xFE == 0, "reserved bits of the CONNACK flags are set"
            found.session_present = bool(acknowledge & 1)
            found.reason = cursor.byte()
            if v5:
                found.properties = cursor.properties()
        case 3:  # PUBLISH
            found.qos = found.flags >> 1 & 3
            found.retain = bool(found.flags & 1)
            found.dup = bool(found.flags & 8)
            found.topic = cursor.utf8()
            if found.qos:
                found.packet_id = cursor.two()
            if v5:
                found.properties = cursor.properties()
            found.payload = cursor.rest()
        case 4 | 5 | 6 | 7:  # PUBACK, PUBREC, PUBREL, PUBCOMP
            found.packet_id = cursor.two()
            if v5:
                found.reason = cursor.byte() if cursor.left else 0
                if cursor.left:
                    found.properties = cursor.properties()
        case 9 | 11:  # SUBACK, UNSUBACK
            found.packet_id = cursor.two()
            if v5:
                found.properties = cursor.properties()
            found.reasons = list(cursor.rest())
        case 14 | 15:  # DISCONNECT, AUTH
            found.reason = cursor.byte() if cursor.left else 0
            if cursor.left:
                found.properties = cursor.properties()
        case 13:  # PINGRESP
            pass
        case _:
            raise AssertionError(f"a broker must not send {NAMES[found.type]}: {raw.hex(' ')}")
    assert not cursor.left, f"bytes behind the end of the packet: {raw.hex(' ')}"
    return found


def whole(buffer: bytes | bytearray) -> int:
    """Length of the first packet in the buffer, 0 while it is incomplete."""
    length = 0
    for index, digit in enumerate(buffer[1:5]):
        length |= (digit & 0x7F) << 7 * index
        if digit < 0x80:
            total = 2 + index + length
            return total if total <= len(buffer) else 0
    assert len(buffer) < 5, f"remaining length of more than four bytes: {bytes(buffer[:8]).hex(' ')}"
    return 0


class Closed(AssertionError):  # noqa: N818 - a state of the connection that most tests expect
    """The broker closed the connection where a packet was expected."""


class Address(Protocol):
    """Where a broker listens."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Link(Protocol):
    """As much of a connected socket as `Client` uses: TLS, WebSocket and a broker in memory have it too."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, most: int, /) -> bytes: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def close(self) -> None: ...


def _connected(to: Address | Link) -> socket.socket:
    if hasattr(to, "sendall"):
        return cast("socket.socket", to)  # whoever uses more of a socket than a link has knows what it is
    connection = socket.create_connection((to.host, to.port), timeout=PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Client:
    """One blocking connection that sends what it is told and shows what comes back.

    It connects to an address over TCP, or speaks over a link that is there already.
    """

    def __init__(self, to: Address | Link, *, version: int = 5) -> None:
        self.version = version
        self.client_id = ""
        self.connack: Packet | None = None  #: set by the `connect` fixture
        self.last_packet_id = 0
        self.socket = _connected(to)
        self.buffer = bytearray()
        self.pending: deque[Packet] = deque()  #: read while something else was awaited; `recv` gives them first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- bytes ---

    def send(self, data: bytes) -> None:
        """Send bytes as they are. A connection that the broker has closed already is left for `expect_closed`."""
        self.socket.settimeout(PATIENCE)
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def recv(self, timeout: float = PATIENCE) -> Packet:
        """The next packet; `Closed` at the end of the connection, `TimeoutError` when nothing comes."""
        return self.pending.popleft() if self.pending else self._read(timeout)

    def _read(self, timeout: float = PATIENCE) -> Packet:
        deadline = time.monotonic() + timeout
        while True:
            length = whole(self.buffer)
            if length:
                raw = bytes(self.buffer[:length])
                del self.buffer[:length]
                return parse(raw, self.version)
            self._fill(deadline)

    def _fill(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no packet in time; unread: {bytes(self.buffer).hex(' ')}")
        self.socket.settimeout(left)
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Closed(f"connection closed; unread: {bytes(self.buffer).hex(' ')}")
        self.buffer += data

    def recv_some(self, timeout: float = PATIENCE) -> bytes:
        """Some bytes as they come, uninterpreted; `Closed` at the end of the connection."""
        if not self.buffer:
            self._fill(time.monotonic() + timeout)
        data = bytes(self.buffer)
        self.buffer.clear()
        return data

    # --- expectations ---

    def expect(self, type: int, timeout: float = PATIENCE) -> Packet:  # noqa: A002 - the name the specification uses
        """The next packet, which must be of this type."""
        found = self.recv(timeout)
        assert found.type == type, f"expected {NAMES[type]}, got {found.name}: {found.raw.hex(' ')}"
        return found

    def expect_closed(self, timeout: float = PATIENCE) -> list[Packet]:
        """Wait for the broker to close; the packets that came before the end."""
        deadline = time.monotonic() + timeout
        seen: list[Packet] = []
        while True:
            try:
                seen.append(self.recv(max(0.0, deadline - time.monotonic())))
            except Closed:
                assert not self.buffer, f"closed in the middle of a packet: {bytes(self.buffer).hex(' ')}"
                return seen
            except TimeoutError:
                names = [found.name for found in seen]
                raise AssertionError(f"still open; packets so far: {names}") from None

    def expect_nothing(self) -> None:
        """Assert that nothing was under way to this client: a PINGREQ is answered before anything else arrives."""
        self.send(PINGREQ)
        self.expect(PINGRESP)

    def await_answer(self, type: int, packet_id: int | None) -> Packet:  # noqa: A002 - the name the specification uses
        """The answer to a packet of ours. Messages that come in between are kept for `recv`; nothing else may come."""
        while True:
            found = self._read()
            if found.type == type and found.packet_id == packet_id:
                return found
            wanted = f"{NAMES[type]} {packet_id}"
            assert found.type == PUBLISH, f"expected {wanted}, got {found.name}: {found.raw.hex(' ')}"
            self.pending.append(found)

    # --- whole exchanges ---

    def next_id(self) -> int:
        """A packet identifier that this client has not used yet."""
        self.last_packet_id = self.last_packet_id % 65535 + 1
        return self.last_packet_id

    def connect(self, client_id: str | bytes = "", **kw: Any) -> Packet:
        """Send CONNECT and return the CONNACK, whatever it says."""
        kw.setdefault("version", self.version)
        self.client_id = client_id if isinstance(client_id, str) else client_id.decode("utf-8", "replace")
        self.send(connect_packet(client_id, **kw))
        return self.expect(CONNACK)

    def subscribe(self, filter: str | Sequence[tuple[str, int]], qos: int = 0, **kw: Any) -> Packet:  # noqa: A002
        """Send SUBSCRIBE for one filter (`qos` is the options byte) or for pairs; return the SUBACK."""
        packet_id = kw.pop("packet_id", None) or self.next_id()
        filters = [(filter, qos)] if isinstance(filter, str) else list(filter)
        self.send(subscribe_packet(packet_id, filters, version=self.version, **kw))
        answer = self.expect(SUBACK)
        assert answer.packet_id == packet_id
        return answer

    def unsubscribe(self, *filters: str, **kw: Any) -> Packet:
        """Send UNSUBSCRIBE and return the UNSUBACK."""
        packet_id = kw.pop("packet_id", None) or self.next_id()
        self.send(unsubscribe_packet(packet_id, filters, version=self.version, **kw))
        answer = self.expect(UNSUBACK)
        assert answer.packet_id == packet_id
        return answer

    def publish(self, topic: str | bytes, payload: bytes = b"", qos: int = 0, **kw: Any) -> Packet | None:
        """Publish with the whole flow of the QoS; return the PUBACK or PUBREC, None for QoS 0."""
        packet_id = kw.pop("packet_id", None) or (self.next_id() if qos else None)
        self.send(publish_packet(topic, payload, version=self.version, qos=qos, packet_id=packet_id, **kw))
        if qos == 0:
            return None
        answer = self.await_answer(PUBACK if qos == 1 else PUBREC, packet_id)
        if qos == 2 and (answer.reason or 0) < 0x80:
            assert packet_id is not None
            self.send(ack_packet(PUBREL, packet_id, version=self.version))
            self.await_answer(PUBCOMP, packet_id)
        return answer

    def receive(self, timeout: float = PATIENCE) -> Packet:
        """The next packet, which must be a PUBLISH; acknowledged with the whole flow of its QoS."""
        message = self.expect(PUBLISH, timeout)
        if message.qos:
            assert message.packet_id is not None
            self.send(ack_packet(PUBACK if message.qos == 1 else PUBREC, message.packet_id, version=self.version))
            if message.qos == 2:
                self.await_answer(PUBREL, message.packet_id)
                self.send(ack_packet(PUBCOMP, message.packet_id, version=self.version))
        return message

    # --- ends ---

    def disconnect(self, reason: int | None = None, properties: bytes = b"") -> None:
        """Send DISCONNECT, wait until the broker has closed (so that it has taken note), and close."""
        self.send(disconnect_packet(version=self.version, reason=reason, properties=properties))
        if type(self.socket) is socket.socket:  # TLS and WebSocket do not know half a close
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
        self.expect_closed()
        self.close()

    def close(self) -> None:
        """Close without a DISCONNECT."""
        self.socket.close()

    def abort(self) -> None:
        """Close with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


Connect = Callable[..., Client]  #: the fixture `connect`: options of a CONNECT to a client that was accepted
