"""One table of packets that break the rules of MQTT, and the answer that each must get.

Every row is a packet of one protocol version. The codec goes over all rows, a broker in memory too; a node behind real
sockets gets one row of each kind of answer.

    reason    what is wrong with it; MQTT 5 is told, MQTT 3 sees the end of its connection and nothing else
    opening   these bytes are the first of a connection; otherwise the client was let in before
    silent    nobody is told, because the bytes do not even say which version they are of
    state     right in itself, but not on this connection: only a broker can tell

Hexadecimal rows are written by hand from the specification; spaces stand between the fields. {p} is the length of no
properties, which MQTT 5 has and others do not; {c} is the name and level of the protocol. The length of the packet is
put in behind the first byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.support import wire

MALFORMED, PROTOCOL_ERROR, BAD_VERSION, BAD_CLIENT_ID = 0x81, 0x82, 0x84, 0x85
TOPIC_INVALID, ALIAS_INVALID, TOO_LARGE, QUOTA_EXCEEDED = 0x90, 0x94, 0x95, 0x97

V3, ANY, V5 = (3, 4), (3, 4, 5), (5,)
SINCE_311 = (4, 5)


@dataclass(frozen=True)
class Malformed:
    """A row of the table."""

    name: str
    version: int
    raw: bytes
    reason: int
    opening: bool = False
    silent: bool = False
    state: bool = False

    def __str__(self) -> str:
        return f"MQTT {({3: '3.1', 4: '3.1.1'}).get(self.version, self.version)}, {self.name}"

    @property
    def type(self) -> int:
        """The type of the packet."""
        return self.raw[0] >> 4

    @property
    def answer(self) -> list[tuple[int, int]]:
        """Type and code of what the client is told before the end of its connection."""
        if self.silent:
            return []
        if not self.opening:
            return [(wire.DISCONNECT, self.reason)] if self.version == 5 else []
        if self.reason == BAD_VERSION:
            return [(wire.CONNACK, 1)]  # in the words of MQTT 3, which every client can read
        if self.version == 5:
            return [(wire.CONNACK, self.reason)]
        return [(wire.CONNACK, 2)] if self.reason == BAD_CLIENT_ID else []


def _by_hand(
    versions: Iterable[int], text: str, reason: int, name: str, *, state: bool = False, silent: bool = False
) -> Iterator[Malformed]:
    """The first byte and the body in hexadecimal."""
    for version in versions:
        protocol = "0006 4d5149736470 03" if version == 3 else f"0004 4d515454 {version:02x}"
        raw = bytes.fromhex(text.format(p="00" if version == 5 else "", c=protocol))
        opening = raw[0] >> 4 == wire.CONNECT and not state
        yield Malformed(name, version, wire.packet(raw[0], raw[1:]), reason, opening, silent, state)


def _rows(*groups: Iterable[Malformed]) -> tuple[Malformed, ...]:
    return tuple(row for group in groups for row in group)


# --- the fixed header ---------------------------------------------------------------------------------------------

_RIGHT = {
    "CONNACK": "20 00 00 {p}",
    "PUBACK": "40 0001",
    "PUBREC": "50 0001",
    "PUBREL": "62 0001",
    "PUBCOMP": "70 0001",
    "SUBSCRIBE": "82 0001 {p} 0001 61 00",
    "SUBACK": "90 0001 {p} 00",
    "UNSUBSCRIBE": "a2 0001 {p} 0001 61",
    "UNSUBACK": "b0 0001",
    "PINGREQ": "c0",
    "PINGRESP": "d0",
    "DISCONNECT": "e0",
}


def _wrong_flags() -> Iterator[Malformed]:
    for kind, text in _RIGHT.items():
        first = int(text[:2], 16)
        for flags in range(16):
            if flags == first & 15:
                continue
            dup = flags == 0b1010 and first & 15 == 2  # MQTT 3.1 lets such a packet be repeated
            wrong = f"{first & 0xF0 | flags:02x}{text[2:]}"
            yield from _by_hand(SINCE_311 if dup else ANY, wrong, MALFORMED, f"{kind} with flags {flags:04b}")
    for flags in range(1, 16):
        name = f"CONNECT with flags {flags:04b}"
        yield from _by_hand(ANY, f"1{flags:x} {{c}} 02 0000 {{p}} 0001 63", MALFORMED, name)
        yield from _by_hand(V5, f"f{flags:x}", MALFORMED, f"AUTH with flags {flags:04b}")


FLAGS = _rows(_wrong_flags())

TYPES = _rows(
    _by_hand(ANY, "00", MALFORMED, "packet type 0"),
    _by_hand(V3, "f0", MALFORMED, "AUTH before there was any"),
    _by_hand(ANY, "c0 00", MALFORMED, "PINGREQ that goes on"),
    _by_hand(ANY, "d0 00", MALFORMED, "PINGRESP that goes on"),
)

#: Packets that only a server sends.
SERVER_PACKETS = _rows(
    _by_hand(ANY, "20 00 00 {p}", PROTOCOL_ERROR, "CONNACK from a client", state=True),
    _by_hand(ANY, "90 0001 {p} 00", PROTOCOL_ERROR, "SUBACK from a client", state=True),
    _by_hand(V3, "b0 0001", PROTOCOL_ERROR, "UNSUBACK from a client", state=True),
    _by_hand(V5, "b0 0001 00 00", PROTOCOL_ERROR, "UNSUBACK from a client", state=True),
    _by_hand(ANY, "d0", PROTOCOL_ERROR, "PINGRESP from a client", state=True),
)


def _whole_lengths() -> Iterator[Malformed]:
    """Raw bytes, since the length itself is wrong."""
    mebibyte = 1024 * 1024
    for name, raw, reason in (
        ("length of five bytes", b"\x30\x80\x80\x80\x80\x01", MALFORMED),
        ("length of five bytes, all bits set", b"\x82\xff\xff\xff\xff\x7f", MALFORMED),
        ("length that never ends", b"\xc0" + b"\xff" * 16, MALFORMED),
        ("length of zero in two bytes", b"\xc0\x80\x00", MALFORMED),
        ("length of 127 in three bytes", b"\x30\xff\x80\x00", MALFORMED),
        ("length not in its shortest form", b"\x30\xff\xff\xff\x00", MALFORMED),
        ("packet one byte larger than allowed", b"\x30" + wire.varint(mebibyte - 3), TOO_LARGE),
        ("packet of 256 MiB, of which nothing comes", b"\x32\xff\xff\xff\x7f", TOO_LARGE),
    ):
        for version in ANY:
            yield Malformed(name, version, raw, reason)


LENGTHS = _rows(_whole_lengths())


# --- CONNECT ------------------------------------------------------------------------------------------------------

PROTOCOLS = _rows(
    *(
        _by_hand((4,), f"10 {name} {level} 02 0000 0001 63", BAD_VERSION, f"protocol {said}")
        for name, level, said in (
            ("0004 4d515455", "04", "MQTU level 4"),
            ("0004 6d717474", "04", "mqtt level 4"),
            ("0000", "04", "without a name"),
            ("0003 4d5154", "04", "MQT level 4"),
            ("0005 4d51545458", "05", "MQTTX level 5"),
            ("0006 4d5149736470", "04", "MQIsdp level 4"),
            *(("0004 4d515454", f"{level:02x}", f"MQTT level {level}") for level in (0, 1, 2, 3, 6, 7, 127, 255)),
            ("0004 4d515454", "84", "MQTT level 4 of a bridge"),
        )
    ),
    _by_hand((4,), "10 0004 ffffffff 04 02 0000 0001 63", MALFORMED, "protocol whose name is no text"),
)

CONNECTS = _rows(
    _by_hand(V3, "10", MALFORMED, "CONNECT of no bytes"),
    _by_hand(V5, "10", MALFORMED, "CONNECT of no bytes", silent=True),
    _by_hand(ANY, "10 {c} 03 0000 {p} 0001 63", MALFORMED, "CONNECT with the reserved flag"),
    _by_hand(ANY, "10 {c} 02 0000 {p}", MALFORMED, "CONNECT without client id"),
    _by_hand(ANY, "10 {c} 02 0000 {p} 0009 616263", MALFORMED, "client id goes past the packet"),
    _by_hand(ANY, "10 {c} 02 0000 {p} 0001 63 00", MALFORMED, "CONNECT that goes on"),
    _by_hand(ANY, "10 {c} 02 0000 {p} 0001 63 0001 75", MALFORMED, "user name without its flag"),
    _by_hand(SINCE_311, "10 {c} 82 0000 {p} 0001 63", MALFORMED, "flag of a user name without one"),
    _by_hand(ANY, "10 {c} 82 0000 {p} 0001 63 ffff 75", MALFORMED, "user name goes past the packet"),
    _by_hand(SINCE_311, "10 {c} c2 0000 {p} 0001 63 0001 75", MALFORMED, "flag of a password without one"),
    _by_hand(ANY, "10 {c} c2 0000 {p} 0001 63 0001 75 ffff 70", MALFORMED, "password goes past the packet"),
    _by_hand(ANY, "10 {c} 82 0000 {p} 0001 63 0001 75 0001 70", MALFORMED, "password without its flag"),
    _by_hand(V3, "10 {c} 42 0000 0001 63 0001 70", MALFORMED, "password without user name"),
    _by_hand((4,), "10 {c} 02 0000 0000 00", MALFORMED, "empty client id, and more"),
)

WILLS = _rows(
    *(
        _by_hand(ANY, f"10 {{c}} {flags} 0000 {{p}} 0001 63", MALFORMED, f"{what} without will")
        for what, flags in (("will QoS 1", "0a"), ("will QoS 2", "12"), ("will QoS 3", "1a"), ("will retain", "22"))
    ),
    _by_hand(ANY, "10 {c} 1e 0000 {p} 0001 63 {p} 0001 77 0000", MALFORMED, "will QoS 3"),
    _by_hand(ANY, "10 {c} 06 0000 {p} 0001 63", MALFORMED, "flag of a will without one"),
    _by_hand(ANY, "10 {c} 06 0000 {p} 0001 63 {p} 0001 77", MALFORMED, "will without message"),
    _by_hand(ANY, "10 {c} 06 0000 {p} 0001 63 {p} ffff 77", MALFORMED, "will topic goes past the packet"),
    _by_hand(ANY, "10 {c} 06 0000 {p} 0001 63 {p} 0001 77 ffff 6d", MALFORMED, "will message goes past the packet"),
    _by_hand(ANY, "10 {c} 02 0000 {p} 0001 63 {p} 0001 77 0001 6d", MALFORMED, "will without its flag"),
    _by_hand(ANY, "10 {c} 86 0000 {p} 0001 63 0001 75 {p} 0001 77 0001", MALFORMED, "user name before the will"),
    _by_hand(V5, "10 {c} 06 0000 00 0001 63 ff7f 0001 77 0000", MALFORMED, "will properties go past the packet"),
    *(
        _by_hand(ANY, f"10 {{c}} 06 0000 {{p}} 0001 63 {{p}} {topic} 0000", TOPIC_INVALID, f"will topic {said}")
        for topic, said in (("0001 2b", "+"), ("0001 23", "#"), ("0003 612f2b", "a/+"), ("0000", "of no characters"))
    ),
)


def _client_ids() -> Iterator[Malformed]:
    """Not malformed by the specification: this broker makes topics and rules from client ids."""
    for client_id in ("+", "#", "a/+/b", "fleet/#", "vin+", "x" * 5000):
        for version in ANY:
            raw = wire.connect_packet(client_id, version=version)
            yield Malformed(f"client id {client_id[:9]}", version, raw, BAD_CLIENT_ID, opening=True, state=True)
    raw = wire.connect_packet("", version=4, clean=False)
    yield Malformed("no client id for a session that stays", 4, raw, BAD_CLIENT_ID, opening=True, state=True)


CLIENT_IDS = _rows(_client_ids())


def _strangers() -> Iterator[Malformed]:
    """First bytes that are no CONNECT, or of one that cannot be read; closed at once, before more comes."""
    for name, raw in (
        ("CONNECT of 256 MiB, of which nothing comes", b"\x10\xff\xff\xff\x7f"),
        ("CONNECT of 256 MiB, of which some comes", b"\x10\xff\xff\xff\x7f\x00\x04MQTT\x05\x02" + b"\0" * 4096),
        ("CONNECT one byte larger than allowed", b"\x10" + wire.varint(16 * 1024 - 2)),
        ("CONNECT with a length of five bytes", b"\x10\x80\x80\x80\x80\x01"),
        ("CONNECT with a length that never ends", b"\x10" + b"\x80" * 64),
        ("CONNECT with a length not in its shortest form", b"\x10\x8d\x00" + wire.connect_packet("", version=4)[2:]),
        ("CONNECT with a name that goes past the packet", wire.packet(0x10, b"\xff\xffMQTT\x04\x02\x00\x3c\x00\x00")),
        ("PUBLISH of 256 MiB", b"\x30\xff\xff\xff\x7f"),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("TLS", bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 200),
        ("SSH", b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"),
        ("zeros", b"\0" * 1024),
        ("ones", b"\xff" * 1024),
    ):
        reason = TOO_LARGE if name.startswith(("CONNECT of", "CONNECT one", "PUBLISH of")) else MALFORMED
        yield Malformed(f"a stranger with {name}", 4, raw, reason, opening=True, silent=True)
    for version in SINCE_311:
        for name, raw in (
            ("PINGREQ", wire.PINGREQ),
            ("PUBLISH", wire.publish_packet("behind", b"!", version=version)),
            ("SUBSCRIBE", wire.subscribe_packet(1, [("#", 0)], version=version)),
            ("DISCONNECT", wire.disconnect_packet(version=version)),
            ("PUBACK", wire.ack_packet(wire.PUBACK, 1, version=version)),
            ("CONNACK", b"\x20\x02\x00\x00"),
            ("AUTH", wire.auth_packet(0x18, wire.prop(0x15, "m"))),
        ):
            yield Malformed(
                f"{name} before CONNECT", version, raw, PROTOCOL_ERROR, opening=True, silent=True, state=True
            )


STRANGERS = _rows(_strangers())


# --- strings ------------------------------------------------------------------------------------------------------

#: Bytes that are not UTF-8 as Unicode and RFC 3629 define it.
ILL_FORMED: dict[str, bytes] = {
    "half a surrogate pair": b"a\xed\xa0\x80b",
    "a surrogate pair": b"\xed\xa0\xbd\xed\xb8\x80",
    "an overlong slash": b"a\xc0\xaf",
    "an overlong slash of three bytes": b"\xe0\x80\xaf",
    "U+0000 in two bytes": b"\xc0\x80",
    "a character beyond U+10FFFF": b"\xf4\x90\x80\x80",
    "a character of five bytes": b"\xf8\x88\x80\x80\x80",
    "a lone continuation": b"a\x80",
    "a cut character": b"a\xe2\x82",
    "no UTF-8 at all": b"\xff\xfe",
}
NULL: dict[str, bytes] = {"U+0000": b"a\x00b", "U+0000 alone": b"\x00"}


def _texts(kinds: dict[str, bytes]) -> Iterator[Malformed]:
    for what, bad in kinds.items():
        for version in ANY:
            places = {
                "topic": wire.publish_packet(bad, b"x", version=version),
                "topic of QoS 1": wire.publish_packet(bad, version=version, qos=1),
                "filter": wire.subscribe_packet(1, [(bad, 0)], version=version),
                "second filter": wire.subscribe_packet(1, [("a", 0), (bad, 0)], version=version),
                "filter to leave": wire.unsubscribe_packet(1, [bad], version=version),
                "client id": wire.connect_packet(bad, version=version),
                "user name": wire.connect_packet("c", version=version, username=bad),
                "will topic": wire.connect_packet("c", version=version, will=wire.Will(bad)),
            }
            if version == 5:
                places |= {
                    "content type": wire.publish_packet("a", properties=wire.prop(0x03, bad)),
                    "response topic": wire.publish_packet("a", properties=wire.prop(0x08, bad)),
                    "name of a user property": wire.publish_packet("a", properties=wire.prop(0x26, (bad, "v"))),
                    "value of a user property": wire.publish_packet("a", properties=wire.prop(0x26, ("k", bad))),
                    "reason string": wire.ack_packet(wire.PUBACK, 1, reason=0x10, properties=wire.prop(0x1F, bad)),
                    "reason string of DISCONNECT": wire.disconnect_packet(reason=0, properties=wire.prop(0x1F, bad)),
                    "authentication method": wire.auth_packet(0x19, wire.prop(0x15, bad)),
                }
            for place, raw in places.items():
                yield Malformed(f"{what} in a {place}", version, raw, MALFORMED, opening=raw[0] >> 4 == wire.CONNECT)


ILL_FORMED_TEXTS = _rows(_texts(ILL_FORMED))
NULL_TEXTS = _rows(_texts(NULL))


# --- properties ---------------------------------------------------------------------------------------------------

#: A value of every property of MQTT 5 (table 2-4).
PROPERTIES: dict[int, bytes] = {
    number: wire.prop(number, value)
    for number, value in {
        0x01: 1,
        0x02: 60,
        0x03: "text",
        0x08: "answers",
        0x09: b"c",
        0x0B: 5,
        0x11: 0,
        0x12: "id",
        0x13: 10,
        0x15: "m",
        0x16: b"d",
        0x17: 1,
        0x18: 1,
        0x19: 0,
        0x1A: "i",
        0x1C: "s",
        0x1F: "r",
        0x21: 10,
        0x22: 10,
        0x23: 1,
        0x24: 1,
        0x25: 1,
        0x26: ("k", "v"),
        0x27: 1000,
        0x28: 1,
        0x29: 1,
        0x2A: 1,
    }.items()
}

_ACKNOWLEDGED = {0x1F, 0x26}

#: Properties that a client may send, by packet (table 2-4).
ALLOWED: dict[str, set[int]] = {
    "CONNECT": {0x11, 0x15, 0x16, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27},
    "will": {0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26},
    "PUBLISH": {0x01, 0x02, 0x03, 0x08, 0x09, 0x23, 0x26},
    "SUBSCRIBE": {0x0B, 0x26},
    "UNSUBSCRIBE": {0x26},
    "PUBACK": _ACKNOWLEDGED,
    "PUBREC": _ACKNOWLEDGED,
    "PUBREL": _ACKNOWLEDGED,
    "PUBCOMP": _ACKNOWLEDGED,
    "DISCONNECT": {0x11, 0x1C, 0x1F, 0x26},  # the table does not tell who sends it
    "AUTH": {0x15, 0x16, 0x1F, 0x26},
}


def carrying(kind: str, properties: bytes, client_id: str = "c") -> bytes:
    """A packet of MQTT 5 with these properties."""
    match kind:
        case "CONNECT":
            return wire.connect_packet(client_id, properties=properties)
        case "will":
            return wire.connect_packet(client_id, will=wire.Will("w", properties=properties))
        case "PUBLISH":
            return wire.publish_packet("a", b"text", properties=properties)
        case "SUBSCRIBE":
            return wire.subscribe_packet(1, [("a", 0)], properties=properties)
        case "UNSUBSCRIBE":
            return wire.unsubscribe_packet(1, ["a"], properties=properties)
        case "DISCONNECT":
            return wire.disconnect_packet(reason=0, properties=properties)
        case "AUTH":
            return wire.auth_packet(0x19, properties)
        case _:
            return wire.ack_packet(wire.NAMES.index(kind), 1, reason=0, properties=properties)


def _with(kind: str, properties: bytes, reason: int, name: str, *, state: bool = False) -> Malformed:
    return Malformed(name, 5, carrying(kind, properties), reason, kind in ("CONNECT", "will"), state=state)


def _foreign() -> Iterator[Malformed]:
    for kind, allowed in ALLOWED.items():
        for number, raw in PROPERTIES.items():
            if (kind, number) == ("PUBLISH", 0x0B):  # only servers may: a rule of its own [MQTT-3.3.4-6]
                yield _with(kind, raw, PROTOCOL_ERROR, "PUBLISH of a client with a subscription identifier", state=True)
            elif number not in allowed:
                yield _with(kind, raw, MALFORMED, f"{kind} with property 0x{number:02x} of other packets")


def _repeated() -> Iterator[Malformed]:
    """Every property but the user property may stand once; also with another one between."""
    between = PROPERTIES[0x26]
    for kind, allowed in ALLOWED.items():
        for number in sorted(allowed - {0x26}):
            raw, first = PROPERTIES[number], PROPERTIES[0x15] if number == 0x16 else b""
            yield _with(kind, first + raw + raw, PROTOCOL_ERROR, f"{kind} with property 0x{number:02x} twice")
            apart = first + raw + between + raw
            yield _with(kind, apart, PROTOCOL_ERROR, f"{kind} with property 0x{number:02x} twice, not side by side")


def _unreadable() -> Iterator[Malformed]:
    """Identifiers that do not exist, and values that go past the end of the properties."""
    unknown = (b"\x00", b"\x04\x00", b"\x7f\x00", b"\x80\x01\x00", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\x7f")
    for kind, allowed in ALLOWED.items():
        for raw in unknown:
            yield _with(kind, raw, MALFORMED, f"{kind} with unknown property {raw.hex()}")
        for number in sorted(allowed):
            for end in range(1, len(PROPERTIES[number])):
                cut = PROPERTIES[number][:end]
                yield _with(kind, cut, MALFORMED, f"{kind} with property 0x{number:02x} cut at {end}")


FOREIGN_PROPERTIES = _rows(_foreign())
REPEATED_PROPERTIES = _rows(_repeated())
UNREADABLE_PROPERTIES = _rows(
    _unreadable(),
    _by_hand(V5, "10 {c} 02 0000 7f 0000", MALFORMED, "properties of CONNECT go past the packet"),
    _by_hand(V5, "10 {c} 02 0000 8080808001 0000", MALFORMED, "property length of CONNECT of five bytes"),
    _by_hand(V5, "30 0001 61 7f", MALFORMED, "properties of PUBLISH go past the packet"),
    _by_hand(V5, "30 0001 61 01 01 78", MALFORMED, "byte goes past the properties"),
    _by_hand(V5, "30 0001 61 02 0200 000001", MALFORMED, "number goes past the properties"),
    _by_hand(V5, "30 0001 61 05 09000578 78", MALFORMED, "bytes go past the properties"),
    _by_hand(V5, "30 0001 61 05 2600000001", MALFORMED, "user property goes past the properties"),
    _by_hand(V5, "30 0001 61 8000", MALFORMED, "property length not in its shortest form"),
    _by_hand(V5, "30 0001 61 ffffffffff", MALFORMED, "property length of five bytes"),
    _by_hand(V5, "30 0001 61", MALFORMED, "PUBLISH without property length"),
    _by_hand(V5, "82 0001", MALFORMED, "SUBSCRIBE without property length"),
    _by_hand(V5, "a2 0001", MALFORMED, "UNSUBSCRIBE without property length"),
    _by_hand(V5, "20 00 00", MALFORMED, "CONNACK without property length"),
    _by_hand(V5, "f0 18", MALFORMED, "AUTH without property length"),
)

#: Values that the specification forbids.
IMPOSSIBLE_VALUES = _rows(
    [
        _with("CONNECT", wire.prop(0x21, 0), PROTOCOL_ERROR, "receive maximum 0"),
        _with("CONNECT", wire.prop(0x27, 0), PROTOCOL_ERROR, "maximum packet size 0"),
        _with("CONNECT", wire.prop(0x17, 2), PROTOCOL_ERROR, "request problem information 2"),
        _with("CONNECT", wire.prop(0x19, 255), PROTOCOL_ERROR, "request response information 255"),
        _with("CONNECT", wire.prop(0x16, b"d"), PROTOCOL_ERROR, "authentication data without method"),
        _with("will", wire.prop(0x01, 2), PROTOCOL_ERROR, "payload format 2 of a will"),
        _with("will", wire.prop(0x08, "#"), PROTOCOL_ERROR, "response topic # of a will"),
        _with("PUBLISH", wire.prop(0x01, 2), PROTOCOL_ERROR, "payload format 2"),
        _with("PUBLISH", wire.prop(0x01, 255), PROTOCOL_ERROR, "payload format 255"),
        *(
            _with("PUBLISH", wire.prop(0x08, topic), PROTOCOL_ERROR, f"response topic {topic!r}")
            for topic in ("", "#", "+", "a/#", "+/a", "a+", "a/+/b")
        ),
        _with("SUBSCRIBE", wire.prop(0x0B, 0), PROTOCOL_ERROR, "subscription identifier 0"),
        _with("SUBSCRIBE", b"\x0b\x81\x00", MALFORMED, "subscription identifier not in its shortest form"),
        _with("SUBSCRIBE", b"\x0b\xff\xff\xff\xff\x7f", MALFORMED, "subscription identifier of five bytes"),
        _with(
            "DISCONNECT", wire.prop(0x11, 60), PROTOCOL_ERROR, "DISCONNECT that prolongs a session of none", state=True
        ),
        _with("AUTH", wire.prop(0x1F, "x"), PROTOCOL_ERROR, "AUTH with a reason string but no method"),
    ],
    *(
        _by_hand(V5, f"20 00 00 02 {value}", PROTOCOL_ERROR, f"CONNACK with {name} 2")
        for value, name in (
            *(("2402", "maximum QoS"), ("2502", "retain available"), ("2802", "wildcards available")),
            *(("2902", "subscription identifiers available"), ("2a02", "shared subscriptions available")),
        )
    ),
)

TOO_MANY_PROPERTIES = _rows(
    _with(kind, PROPERTIES[0x26] * 65, QUOTA_EXCEEDED, f"{kind} with 65 user properties") for kind in ALLOWED
)


# --- PUBLISH ------------------------------------------------------------------------------------------------------

PUBLISHES = _rows(
    *(
        _by_hand(ANY, f"{first} 0001 61 0001 {{p}}", MALFORMED, f"QoS 3, 0x{first}")
        for first in ("36", "37", "3e", "3f")
    ),
    *(_by_hand(ANY, f"{first} 0001 61 {{p}} 21", MALFORMED, f"DUP with QoS 0, 0x{first}") for first in ("38", "39")),
    _by_hand(ANY, "30", MALFORMED, "PUBLISH of no bytes"),
    _by_hand(ANY, "30 00", MALFORMED, "PUBLISH with half a length"),
    _by_hand(ANY, "30 0009 61 00", MALFORMED, "topic goes past the packet"),
    _by_hand(ANY, "32 0001 61", MALFORMED, "QoS 1 without packet identifier"),
    _by_hand(ANY, "32 0001 61 00", MALFORMED, "QoS 1 with half a packet identifier"),
)

TOPICS = _rows(
    (
        Malformed(
            f"QoS {qos} to topic {topic}",
            version,
            wire.publish_packet(topic, b"!", version=version, qos=qos),
            TOPIC_INVALID,
        )
        for topic in ("#", "+", "a/#", "+/a", "a/+/b", "a+", "a#", "#a")
        for version in ANY
        for qos in (0, 1, 2)
    ),
    _by_hand(V3, "30 0000 78", TOPIC_INVALID, "topic of no characters"),
    _by_hand(V5, "30 0000 00 78", PROTOCOL_ERROR, "topic of no characters and no alias"),
)

ALIASES = _rows(
    _by_hand(V5, "30 0001 61 03 230000", ALIAS_INVALID, "alias 0"),
    _by_hand(V5, "30 0000 03 230000", ALIAS_INVALID, "alias 0 without topic"),
    _by_hand(V5, "30 0001 61 03 230011", ALIAS_INVALID, "alias above the maximum", state=True),
    _by_hand(V5, "30 0001 61 03 23ffff", ALIAS_INVALID, "the last alias", state=True),
    _by_hand(V5, "30 0000 03 230003", PROTOCOL_ERROR, "alias that was never given", state=True),
)


# --- the other packets --------------------------------------------------------------------------------------------

PACKET_IDS = _rows(
    _by_hand(ANY, "32 0001 61 0000 {p}", PROTOCOL_ERROR, "PUBLISH QoS 1 with packet identifier 0"),
    _by_hand(ANY, "34 0001 61 0000 {p}", PROTOCOL_ERROR, "PUBLISH QoS 2 with packet identifier 0"),
    _by_hand(ANY, "82 0000 {p} 0001 61 00", PROTOCOL_ERROR, "SUBSCRIBE with packet identifier 0"),
    _by_hand(ANY, "a2 0000 {p} 0001 61", PROTOCOL_ERROR, "UNSUBSCRIBE with packet identifier 0"),
    _by_hand(ANY, "40 0000", PROTOCOL_ERROR, "PUBACK with packet identifier 0"),
    _by_hand(ANY, "50 0000", PROTOCOL_ERROR, "PUBREC with packet identifier 0"),
    _by_hand(ANY, "62 0000", PROTOCOL_ERROR, "PUBREL with packet identifier 0"),
    _by_hand(ANY, "70 0000", PROTOCOL_ERROR, "PUBCOMP with packet identifier 0"),
    _by_hand(ANY, "b0 0000", PROTOCOL_ERROR, "UNSUBACK with packet identifier 0"),
)

_ACKS = ((wire.PUBACK, "40"), (wire.PUBREC, "50"), (wire.PUBREL, "62"), (wire.PUBCOMP, "70"))

ACKNOWLEDGEMENTS = _rows(
    *(_by_hand(ANY, f"{first}", MALFORMED, f"{wire.NAMES[kind]} of no bytes") for kind, first in _ACKS),
    *(_by_hand(ANY, f"{first} 00", MALFORMED, f"{wire.NAMES[kind]} cut in its identifier") for kind, first in _ACKS),
    *(
        _by_hand(V3, f"{first} 0001 00", MALFORMED, f"{wire.NAMES[kind]} of MQTT 3 that goes on")
        for kind, first in _ACKS
    ),
    *(_by_hand(V5, f"{first} 0001 00 00 00", MALFORMED, f"{wire.NAMES[kind]} that goes on") for kind, first in _ACKS),
    *(
        _by_hand(V5, f"{first} 0001 {reason}", PROTOCOL_ERROR, f"{wire.NAMES[kind]} with reason 0x{reason}")
        for kind, first in _ACKS
        for reason in ("01", "04", "7f", "8e", "ff", "92" if kind in (wire.PUBACK, wire.PUBREC) else "10")
    ),
)

SUBSCRIBES = _rows(
    _by_hand(ANY, "82", MALFORMED, "SUBSCRIBE of no bytes"),
    _by_hand(ANY, "82 0001 {p}", PROTOCOL_ERROR, "SUBSCRIBE without filter"),
    _by_hand(ANY, "82 0001 {p} 0001 61", MALFORMED, "SUBSCRIBE without options"),
    _by_hand(ANY, "82 0001 {p} ffff 61 00", MALFORMED, "filter goes past the packet"),
    _by_hand(ANY, "82 0001 {p} 0001 61 03", PROTOCOL_ERROR, "SUBSCRIBE with QoS 3"),
    *(
        _by_hand(V3, f"82 0001 0001 61 {options}", MALFORMED, f"SUBSCRIBE with options 0x{options} of MQTT 5")
        for options in ("04", "08", "10", "20", "40", "80", "81", "c0")
    ),
    *(
        _by_hand(V5, f"82 0001 00 0001 61 {options}", MALFORMED, f"SUBSCRIBE with reserved options 0x{options}")
        for options in ("40", "80", "c0", "c1")
    ),
    _by_hand(V5, "82 0001 00 0001 61 30", PROTOCOL_ERROR, "SUBSCRIBE with retain handling 3"),
    _by_hand(V5, "82 0001 00 000a 2473686172652f672f61 04", PROTOCOL_ERROR, "no local of a shared filter", state=True),
)

UNSUBSCRIBES = _rows(
    _by_hand(ANY, "a2", MALFORMED, "UNSUBSCRIBE of no bytes"),
    _by_hand(ANY, "a2 0001 {p}", PROTOCOL_ERROR, "UNSUBSCRIBE without filter"),
    _by_hand(ANY, "a2 0001 {p} ffff 61", MALFORMED, "filter to leave goes past the packet"),
)

DISCONNECTS = _rows(
    _by_hand(V3, "e0 00", MALFORMED, "DISCONNECT of MQTT 3 that goes on"),
    _by_hand(V5, "e0 00 00 00", MALFORMED, "DISCONNECT that goes on"),
    _by_hand(V5, "e0 01", PROTOCOL_ERROR, "DISCONNECT with reason 0x01"),
    _by_hand(V5, "e0 42", PROTOCOL_ERROR, "DISCONNECT with reason 0x42"),
)

AUTHS = _rows(
    _by_hand(V5, "f0 18 00", PROTOCOL_ERROR, "AUTH without method"),
    _by_hand(V5, "f0 01 04 1500016d", PROTOCOL_ERROR, "AUTH with reason 0x01"),
    *(
        _by_hand(V5, f"f0 {reason} 08 1500016d 16000164", PROTOCOL_ERROR, f"AUTH 0x{reason} without need", state=True)
        for reason in ("00", "18", "19")
    ),
    _by_hand(V5, "f0", PROTOCOL_ERROR, "AUTH that says nothing, without need", state=True),
)

#: What a server would not send; a client that does is refused all the same, and the codec of our own client looks too.
BROKEN_SERVER_PACKETS = _rows(
    _by_hand(ANY, "20 02 00 {p}", MALFORMED, "CONNACK with reserved flags"),
    _by_hand(V3, "20 00 06", PROTOCOL_ERROR, "CONNACK with return code 6"),
    _by_hand((4,), "20 01 05", PROTOCOL_ERROR, "CONNACK of a session in a refusal"),
    _by_hand(V5, "20 01 87 00", PROTOCOL_ERROR, "CONNACK of a session in a refusal"),
    _by_hand(V5, "20 00 01 00", PROTOCOL_ERROR, "CONNACK with reason 0x01"),
    _by_hand(V3, "20 00 00 00", MALFORMED, "CONNACK that goes on"),
    _by_hand(ANY, "90 0001 {p}", PROTOCOL_ERROR, "SUBACK without code"),
    _by_hand(V3, "90 0001 03", PROTOCOL_ERROR, "SUBACK with code 0x03"),
    _by_hand(V3, "90 0001 87", PROTOCOL_ERROR, "SUBACK of MQTT 3 with code 0x87"),
    _by_hand(V5, "90 0001 00 11", PROTOCOL_ERROR, "SUBACK with code 0x11"),
    _by_hand(V3, "b0 0001 00", MALFORMED, "UNSUBACK of MQTT 3 that goes on"),
    _by_hand(V5, "b0 0001 00", PROTOCOL_ERROR, "UNSUBACK without code"),
    _by_hand(V5, "b0 0001 00 01", PROTOCOL_ERROR, "UNSUBACK with code 0x01"),
)

SECOND_CONNECTS = _rows(_by_hand(ANY, "10 {c} 02 0000 {p} 0001 63", PROTOCOL_ERROR, "a second CONNECT", state=True))

PROPERTY_ROWS = (
    *(*FOREIGN_PROPERTIES, *REPEATED_PROPERTIES, *UNREADABLE_PROPERTIES, *IMPOSSIBLE_VALUES, *TOO_MANY_PROPERTIES),
)

ALL: tuple[Malformed, ...] = (
    *(*FLAGS, *TYPES, *SERVER_PACKETS, *LENGTHS, *PROTOCOLS, *CONNECTS, *WILLS, *CLIENT_IDS, *STRANGERS),
    *(*ILL_FORMED_TEXTS, *NULL_TEXTS, *PROPERTY_ROWS, *PUBLISHES, *TOPICS, *ALIASES, *PACKET_IDS, *ACKNOWLEDGEMENTS),
    *(*SUBSCRIBES, *UNSUBSCRIBES, *DISCONNECTS, *AUTHS, *BROKEN_SERVER_PACKETS, *SECOND_CONNECTS),
)


def of_type(rows: Iterable[Malformed], *types: int) -> list[Malformed]:
    """The rows of some packet types."""
    return [row for row in rows if row.type in types]


def kinds_of_answer(rows: Iterable[Malformed] = ALL) -> list[Malformed]:
    """The first row of each kind: version, place in the conversation, reason, and what is told."""
    first: dict[tuple[object, ...], Malformed] = {}
    for row in rows:
        first.setdefault((row.version, row.opening, row.silent, row.state, row.reason), row)
    return list(first.values())


# --- playing rows -------------------------------------------------------------------------------------------------

Open = Callable[[int], wire.Client]


def heard(row: Malformed, open_client: Open, client_id: str, behind: bytes = b"") -> list[tuple[int, int | None]]:
    """Send the packet of a row, with other bytes behind it; type and code of all that comes until the end."""
    with open_client(row.version) as client:
        if not row.opening:
            answer = client.connect(client_id)
            assert answer.reason == 0, f"CONNECT refused with 0x{answer.reason or 0:02x}"
        client.send(row.raw + behind)
        seen = bytearray()
        try:
            while True:
                seen += client.recv_some()
        except wire.Closed:
            pass
    found = []
    while seen:
        length = wire.whole(seen)
        assert length, f"cut short: {bytes(seen).hex(' ')}"
        raw = bytes(seen[:length])
        del seen[:length]
        one = wire.parse(raw, 4 if raw[0] >> 4 == wire.CONNACK and length == 4 else row.version)
        found.append((one.type, one.reason))
    return found


def told_otherwise(
    rows: Sequence[Malformed], open_client: Open, client_id: Callable[[], str], behind: bytes = b""
) -> list[str]:
    """Play rows one after the other; those that were answered otherwise than the table says, with what was heard."""
    assert rows, "no rows"
    wrong = []
    for row in rows:
        try:
            seen = heard(row, open_client, client_id(), behind)
        except (AssertionError, TimeoutError) as error:
            wrong.append(f"{row}: {error!r}")
            continue
        if seen != row.answer:
            wrong.append(f"{row} ({row.raw[:40].hex(' ')}): wanted {_words(row.answer)}, heard {_words(seen)}")
    return wrong


def _words(answers: Sequence[tuple[int, int | None]]) -> str:
    return ", ".join(f"{wire.NAMES[kind]} 0x{code or 0:02x}" for kind, code in answers) or "nothing but the end"
