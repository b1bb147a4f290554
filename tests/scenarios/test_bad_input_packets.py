"""Does the node survive packets that no honest client would send, and tell the offender what was wrong?

Each case goes to one shared node over a connection of its own. MQTT 5 offenders hear a reason code in a CONNACK or a
DISCONNECT; MQTT 3 offenders are just closed. Around every test an honest pair of clients is served as before, the
node's memory comes back, and its log has no error of its own (`guarded`). A CONNECT may take a minute here, so that a
lie about a length cannot be "refused" by the connect timeout.
"""

from __future__ import annotations

import itertools
import socket
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.scenarios.witness import Witness, refusals
from tests.support.node import NodeProcess
from tests.support.refusals import BROKEN, MALFORMED, PROTOCOL_ERROR, bytes_to_the_end, connect_refused, refused
from tests.support.wire import (
    CONNACK,
    NAMES,
    PINGREQ,
    PINGRESP,
    PUBLISH,
    Client,
    Closed,
    Packet,
    Will,
    ack_packet,
    auth_packet,
    connect_packet,
    disconnect_packet,
    packet,
    prop,
    publish_packet,
    subscribe_packet,
    unsubscribe_packet,
    utf8,
    varint,
)

QUOTA_EXCEEDED, TOO_LARGE, TOPIC_INVALID, CLIENT_ID_INVALID, ALIAS_INVALID = 0x97, 0x95, 0x90, 0x85, 0x94

CONFIG = """
[limits]
connect_timeout = 60.0
"""

pytestmark = pytest.mark.usefixtures("witness")


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(config=CONFIG, http=True) as running:
        yield running


_numbers = itertools.count(1)


def fresh() -> str:
    """A client id of its own for every offender, so that none is taken for a flapping client."""
    return f"bad-{next(_numbers)}-{uuid.uuid4().hex[:6]}"


def accepted(node: NodeProcess, version: int, **options: object) -> Client:
    """An offender that behaves well so far."""
    client = Client(node, version=version)
    assert client.connect(fresh(), **options).reason == 0
    return client


both = pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5"])


# --- before CONNECT -----------------------------------------------------------------------------------------------

BEFORE_CONNECT: dict[str, bytes] = {
    "CONNECT of 256 MiB, the body never comes": b"\x10\xff\xff\xff\x7f",
    "CONNECT of 256 MiB, some of the body comes": b"\x10\xff\xff\xff\x7f\x00\x04MQTT\x05\x02" + b"\0" * 4096,
    "CONNECT one byte larger than allowed": b"\x10" + varint(16 * 1024 - 2),
    "length of five bytes": b"\x10\x80\x80\x80\x80\x01",
    "length of five bytes, all bits set": b"\x10\xff\xff\xff\xff\xff",
    "length that never ends": b"\x10" + b"\x80" * 64,
    "length not in its shortest form": b"\x10\x8d\x00" + connect_packet("", version=4)[2:],
    "PUBLISH of 256 MiB": b"\x30\xff\xff\xff\x7f",
    "PINGREQ": PINGREQ,
    "PUBLISH": publish_packet("witness/bad", b"!", version=4),
    "SUBSCRIBE": subscribe_packet(1, [("#", 0)], version=4),
    "DISCONNECT": disconnect_packet(version=4),
    "AUTH": auth_packet(0x18, prop(0x15, "m")),
    "CONNACK": b"\x20\x02\x00\x00",
    "packet type 0": b"\x00\x00",
    "CONNECT of no bytes": b"\x10\x00",
    "CONNECT with reserved flags": b"\x1f" + connect_packet("", version=4)[1:],
    "protocol name longer than the packet": packet(0x10, b"\xff\xffMQTT\x04\x02\x00\x3c\x00\x00"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 200,
    "SSH": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "zeros": b"\0" * 1024,
    "ones": b"\xff" * 1024,
}


@pytest.mark.parametrize("raw", BEFORE_CONNECT.values(), ids=BEFORE_CONNECT.keys())
def test_strangers_are_closed_without_an_answer(node: NodeProcess, witness: Witness, raw: bytes) -> None:
    """What does not begin with a CONNECT that can be read is closed at once, before its body has come."""
    with Client(node, version=4) as stranger:
        stranger.send(raw)
        witness.check()
        assert b"" == bytes_to_the_end(stranger)


@pytest.mark.parametrize(
    ("name", "level"),
    [*(("MQTT", level) for level in (0, 1, 2, 6, 127, 128, 255)), ("", 4), ("mqtt", 4), ("MQIsdp", 4)],
)
def test_an_unknown_protocol_is_told(node: NodeProcess, name: str, level: int) -> None:
    """A protocol that does not exist gets CONNACK 0x01 of MQTT 3, which every client can read, or 0x84."""
    with Client(node, version=4) as offender:
        offender.send(packet(0x10, utf8(name) + bytes([level, 2, 0, 60]) + utf8("")))
        assert bytes_to_the_end(offender) in (b"\x20\x02\x00\x01", b"\x20\x03\x00\x84\x00")


# --- CONNECT ------------------------------------------------------------------------------------------------------


def _connect(flags: int, rest: bytes, version: int = 5, properties: bytes = b"\x00") -> bytes:
    """A CONNECT of parts that need not fit together; `properties` with their length."""
    return packet(0x10, utf8("MQTT") + bytes([version, flags, 0, 60]) + (properties if version == 5 else b"") + rest)


BROKEN_CONNECTS: dict[str, bytes] = {
    "client id longer than the packet": _connect(2, b"\xff\xffabc"),
    "no client id": _connect(2, b""),
    "properties longer than the packet": _connect(2, b"\x00\x00", properties=b"\x7f"),
    "property length of five bytes": _connect(2, b"\x00\x00", properties=b"\x80\x80\x80\x80\x01"),
    "property cut in the middle": _connect(2, b"\x00\x00", properties=b"\x03\x11\x00\x00"),
    "user property longer than the properties": _connect(2, b"\x00\x00", properties=b"\x05\x26\xff\xff\x61\x00"),
    "will topic longer than the packet": _connect(6, b"\x00\x00\x00\xff\xffa"),
    "will payload longer than the packet": _connect(6, b"\x00\x00\x00\x00\x01a\xff\xffb"),
    "will properties longer than the packet": _connect(6, b"\x00\x00\xff\x7f\x00\x01a\x00\x00"),
    "will with the property of a CONNECT": _connect(6, b"\x00\x00\x05\x11\x00\x00\x00\x01\x00\x01a\x00\x00"),
    "will flag without a will": _connect(6, b"\x00\x00"),
    "user name flag without a user name": _connect(0x82, b"\x00\x00"),
    "user name longer than the packet": _connect(0x82, b"\x00\x00\xff\xffu"),
    "password longer than the packet": _connect(0xC2, b"\x00\x00\x00\x01u\xff\xffp"),
    "bytes behind the end": _connect(2, b"\x00\x00more"),
    "reserved flag": _connect(3, b"\x00\x00"),
    "will QoS 3": _connect(0x1E, b"\x00\x00\x00\x00\x01a\x00\x00"),
    "will QoS without a will": _connect(0x0A, b"\x00\x00"),
    "will retain without a will": _connect(0x22, b"\x00\x00"),
    "receive maximum 0": connect_packet("", properties=prop(0x21, 0)),
    "maximum packet size 0": connect_packet("", properties=prop(0x27, 0)),
    "request problem information 2": connect_packet("", properties=prop(0x17, 2)),
    "request response information 255": connect_packet("", properties=prop(0x19, 255)),
    "authentication data without a method": connect_packet("", properties=prop(0x16, b"x")),
    "will payload format 2": connect_packet("", will=Will("a", properties=prop(0x01, 2))),
}


@pytest.mark.parametrize("raw", BROKEN_CONNECTS.values(), ids=BROKEN_CONNECTS.keys())
def test_a_broken_connect_is_refused_with_a_reason(node: NodeProcess, witness: Witness, raw: bytes) -> None:
    """A CONNECT of MQTT 5 that breaks the format or the rules gets CONNACK 0x81 or 0x82."""
    with Client(node) as offender:
        offender.send(raw)
        witness.check()
        connect_refused(offender, *BROKEN)


@both
@pytest.mark.parametrize("client_id", ["+", "#", "a/+/b", "fleet/#", "vin+"])
def test_a_client_id_with_a_wildcard_is_refused(node: NodeProcess, version: int, client_id: str) -> None:
    """A wildcard in a client id would become one in every rule and topic that is made from it."""
    with Client(node, version=version) as offender:
        offender.send(connect_packet(client_id, version=version))
        answers = offender.expect_closed()
        assert [(CONNACK, CLIENT_ID_INVALID if version == 5 else 2)] == [(p.type, p.reason) for p in answers]


@both
def test_a_second_connect_is_refused(node: NodeProcess, witness: Witness, version: int) -> None:
    """A second CONNECT on a connection ends it, even under another client id. [MQTT-3.1.0-2]"""
    with accepted(node, version) as offender:
        offender.send(connect_packet(fresh(), version=version))
        witness.check()
        refused(offender, PROTOCOL_ERROR)


@both
def test_a_second_connect_in_the_same_segment_is_refused(node: NodeProcess, version: int) -> None:
    """Two CONNECTs at once: the first is answered, the second ends the connection."""
    with Client(node, version=version) as offender:
        offender.send(connect_packet(fresh(), version=version) + connect_packet(fresh(), version=version))
        assert offender.expect(CONNACK).reason == 0
        refused(offender, PROTOCOL_ERROR)


def test_the_will_of_a_refused_connect_is_never_published(node: NodeProcess, witness: Witness) -> None:
    """A CONNECT that is refused leaves nothing behind; the witness, subscribed to the will's topic, hears nothing."""
    will = Will("witness/will", b"never")
    for raw in (
        connect_packet("a#", will=will),
        connect_packet(fresh(), will=will, properties=prop(0x21, 0)),
        connect_packet(fresh(), will=will, properties=prop(0x15, "no such method")),
    ):
        with Client(node) as offender:
            offender.send(raw)
            assert [CONNACK] == [answer.type for answer in offender.expect_closed()]
    witness.subscriber.expect_nothing()


# --- packets cut short --------------------------------------------------------------------------------------------

_WILL = Will("bad/will", b"gone", 1, properties=prop(0x18, 0) + prop(0x26, ("k", "v")))


def _whole(version: int) -> dict[str, bytes]:
    """One packet of every type that a client may send, with every optional field that the version has."""
    v5 = version == 5
    pair = prop(0x26, ("k", "v")) if v5 else b""
    found = {
        "PUBLISH QoS 0": publish_packet("bad/t", b"", version=version, properties=pair),
        "PUBLISH QoS 1": publish_packet("bad/t", b"", version=version, qos=1, packet_id=7, properties=pair),
        "PUBLISH QoS 2": publish_packet("bad/t", b"", version=version, qos=2, packet_id=8, properties=pair),
        "SUBSCRIBE": subscribe_packet(9, [("bad/+/x", 1), ("$share/g/bad", 0)], version=version, properties=pair),
        "UNSUBSCRIBE": unsubscribe_packet(10, ["bad/+/x", "bad"], version=version, properties=pair),
        "PUBREC": ack_packet(5, 11, version=version, reason=0, properties=pair),
        "PUBREL": ack_packet(6, 12, version=version, reason=0, properties=pair),
        "PUBACK": ack_packet(4, 13, version=version, reason=0, properties=pair),
        "PUBCOMP": ack_packet(7, 14, version=version, reason=0, properties=pair),
    }
    if v5:
        found["PUBLISH with an alias"] = publish_packet("bad/t", b"", properties=prop(0x23, 1) + prop(0x08, "r"))
        found["DISCONNECT"] = disconnect_packet(reason=4, properties=prop(0x11, 0) + prop(0x1F, "bye"))
    return found


def _full_connect(version: int) -> bytes:
    properties = prop(0x11, 60) + prop(0x21, 10) + prop(0x26, ("k", "v")) if version == 5 else b""
    will = _WILL if version == 5 else Will("bad/will", b"gone", 1)
    name = fresh()
    return connect_packet(
        name, version=version, username="user", password=b"word", will=will, properties=properties, clean=False
    )


def _recut(whole: bytes, end: int) -> bytes:
    """The packet with its body cut at `end`, and a length that says so."""
    assert whole[1] < 0x80, "the cases have lengths of one byte"
    return packet(whole[0], whole[2 : 2 + end])


@both
def test_a_packet_cut_at_any_byte_is_refused_or_understood(node: NodeProcess, witness: Witness, version: int) -> None:
    """A body that ends too early is malformed, unless what is left is a whole packet again; never anything else.

    Cutting bytes off a PUBLISH without payload leaves nothing that could be read, and neither does cutting a SUBSCRIBE
    or UNSUBSCRIBE anywhere but behind a whole filter. Acknowledgements and DISCONNECT of MQTT 5 may end behind each of
    their fields.
    """
    for name, whole in _whole(version).items():
        verdicts: dict[int, str] = {}
        for end in range(len(whole) - 2):
            with accepted(node, version) as offender:
                offender.send(_recut(whole, end))
                verdicts[end] = _verdict(offender)
        assert _expected(name, version, verdicts) == verdicts, name
        witness.check()


def _verdict(offender: Client) -> str:
    """ "refused" with a reason that fits, "understood" if the connection lives on, or "goodbye"."""
    offender.send(PINGREQ)
    seen: list[Packet] = []
    try:
        while True:
            seen.append(offender.recv())
            if seen[-1].type == PINGRESP:
                return "understood"
    except Closed:
        pass
    if offender.version < 5:
        return "refused" if not seen else f"closed after {[p.name for p in seen]}"
    if not seen:
        return "goodbye"
    last = seen[-1]
    fits = [p.name for p in seen] == ["DISCONNECT"] and last.reason in (*BROKEN, TOPIC_INVALID)
    return "refused" if fits else f"closed after {[p.name for p in seen]}"


def _expected(name: str, version: int, verdicts: dict[int, str]) -> dict[int, str]:
    whole: set[int] = set()  # cuts that leave a whole packet
    v5 = version == 5
    if name == "SUBSCRIBE":
        whole = {2 + (8 if v5 else 0) + 2 + 7 + 1}
    elif name == "UNSUBSCRIBE":
        whole = {2 + (8 if v5 else 0) + 2 + 7}
    elif name in ("PUBREC", "PUBREL", "PUBACK", "PUBCOMP") and v5:
        whole = {2, 3}
    elif name == "DISCONNECT":
        return {end: "goodbye" if end in (0, 1) else "refused" for end in verdicts}
    return {end: "understood" if end in whole else "refused" for end in verdicts}


@both
def test_a_connect_cut_at_any_byte_is_refused(node: NodeProcess, witness: Witness, version: int) -> None:
    """No part of a CONNECT is a CONNECT; MQTT 5 is told so as soon as the packet has named its version."""
    whole = _full_connect(version)
    assert whole[1] < 0x80
    for end in range(len(whole) - 2):
        with Client(node, version=version) as offender:
            offender.send(_recut(whole, end))
            if version == 5 and end >= 7:
                connect_refused(offender, *BROKEN)
            else:
                assert b"" == bytes_to_the_end(offender)
    witness.check()
    witness.subscriber.expect_nothing()


@both
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_connection_that_ends_inside_a_packet_is_forgotten(
    node: NodeProcess, witness: Witness, version: int, how: str
) -> None:
    """Whatever part of a packet has come, and however the connection ends, the node lets go of both."""
    packets = [_full_connect(version), *_whole(version).values()]
    for whole in packets:
        for end in range(1, len(whole)):
            offender = Client(node, version=version) if whole[0] == 0x10 else accepted(node, version)
            offender.send(whole[:end])
            if how == "close":
                offender.close()
            elif how == "reset":
                offender.abort()
            else:
                offender.socket.shutdown(socket.SHUT_WR)
                assert [] == offender.expect_closed()
                offender.close()
    witness.check()


@both
def test_unfinished_packets_are_waited_for(node: NodeProcess, witness: Witness, version: int) -> None:
    """Connections that stopped inside a packet are kept, cost little, and may go on later."""
    whole = publish_packet("witness/late", b"at last", version=version)
    waiting = [accepted(node, version) for _ in range(len(whole) - 1)]
    try:
        for end, client in enumerate(waiting, start=1):
            client.send(whole[:end])
        witness.check()
        for end, client in enumerate(waiting, start=1):
            client.send(whole[end:])
            assert b"at last" == witness.subscriber.receive().payload
    finally:
        for client in waiting:
            client.close()


# --- broken packets of a client that was let in -------------------------------------------------------------------


class Case(NamedTuple):
    raw: bytes
    reasons: tuple[int, ...] = BROKEN


def _lengths(version: int) -> dict[str, Case]:
    return {
        "packet larger than allowed, body never comes": Case(b"\x30" + varint(1024 * 1024), (TOO_LARGE,)),
        "packet of 256 MiB, body never comes": Case(b"\x32\xff\xff\xff\x7f", (TOO_LARGE,)),
        "length of five bytes": Case(b"\x30\x80\x80\x80\x80\x01", (MALFORMED,)),
        "length that never ends": Case(b"\xc0" + b"\xff" * 16, (MALFORMED,)),
        "length not in its shortest form": Case(b"\xc0\x80\x00", (MALFORMED,)),
        "topic longer than the packet": Case(packet(0x30, b"\xff\xffabc"), (MALFORMED,)),
        "PUBLISH of no bytes": Case(b"\x30\x00", (MALFORMED,)),
        "PUBLISH QoS 1 cut exactly after the topic": Case(packet(0x32, utf8("a/b")), (MALFORMED,)),
        "SUBSCRIBE of no bytes": Case(b"\x82\x00", (MALFORMED,)),
        "SUBSCRIBE without filters": Case(packet(0x82, b"\x00\x01" + b"\x00" * (version == 5))),
        "UNSUBSCRIBE without filters": Case(packet(0xA2, b"\x00\x01" + b"\x00" * (version == 5))),
        "filter longer than the packet": Case(packet(0x82, b"\x00\x01" + b"\x00" * (version == 5) + b"\xff\xffa\x00")),
        "PINGREQ with a body": Case(b"\xc0\x01\x00", (MALFORMED,)),
        "PUBACK of one byte": Case(b"\x40\x01\x00", (MALFORMED,)),
    }


def _misplaced(version: int) -> dict[str, Case]:
    tail = b"\x00" if version == 5 else b""
    found = {
        "CONNACK": Case(packet(0x20, b"\x00\x00" + tail)),
        "SUBACK": Case(packet(0x90, b"\x00\x01" + tail + b"\x00")),
        "UNSUBACK": Case(packet(0xB0, b"\x00\x01" + (tail + b"\x00" if version == 5 else b""))),
        "PINGRESP": Case(b"\xd0\x00"),
        "packet type 0": Case(b"\x00\x00"),
        "AUTH": Case(auth_packet(0x19, prop(0x15, "m"))),
        "AUTH that says nothing": Case(b"\xf0\x00"),
    }
    if version == 5:
        found["AUTH 0x18 that nobody asked for"] = Case(auth_packet(0x18, prop(0x15, "m")))
    return found


def _identifiers(version: int) -> dict[str, Case]:
    found = {
        "PUBLISH QoS 1": publish_packet("a", version=version, qos=1, packet_id=0),
        "PUBLISH QoS 2": publish_packet("a", version=version, qos=2, packet_id=0),
        "SUBSCRIBE": subscribe_packet(0, [("a", 0)], version=version),
        "UNSUBSCRIBE": unsubscribe_packet(0, ["a"], version=version),
        "PUBACK": ack_packet(4, 0, version=version),
        "PUBREC": ack_packet(5, 0, version=version),
        "PUBREL": ack_packet(6, 0, version=version),
        "PUBCOMP": ack_packet(7, 0, version=version),
    }
    return {f"packet id 0 in {name}": Case(raw) for name, raw in found.items()}


def _flags(version: int) -> dict[str, Case]:
    right = {
        4: ack_packet(4, 1, version=version),
        5: ack_packet(5, 1, version=version),
        6: ack_packet(6, 1, version=version),
        7: ack_packet(7, 1, version=version),
        8: subscribe_packet(1, [("a", 0)], version=version),
        10: unsubscribe_packet(1, ["a"], version=version),
        12: PINGREQ,
        14: b"\xe0\x00",
    }
    found = {}
    for kind, raw in right.items():
        for flags in range(16):
            if flags != raw[0] & 15:
                wrong = bytes([kind << 4 | flags]) + raw[1:]
                found[f"{NAMES[kind]} with flags {flags:04b}"] = Case(wrong, (MALFORMED,))
    for flags in (0b0110, 0b0111, 0b1110, 0b1111):
        raw = bytes([0x30 | flags]) + publish_packet("a", b"!", version=version, packet_id=1)[1:]
        found[f"PUBLISH QoS 3 with flags {flags:04b}"] = Case(raw, (MALFORMED,))
    for retain in (False, True):
        raw = publish_packet("a", b"!", version=version, dup=True, retain=retain)
        found[f"PUBLISH QoS 0 with DUP, retain {retain}"] = Case(raw)
    for options in (0x03, 0x40, 0x80, 0xC0, *((0x30,) if version == 5 else (0x04, 0x10))):
        raw = subscribe_packet(1, [("a", options)], version=version)
        found[f"SUBSCRIBE with options 0x{options:02x}"] = Case(raw)
    return found


def _topics(version: int) -> dict[str, Case]:
    found = {
        f"PUBLISH to {topic!r}": Case(publish_packet(topic, b"!", version=version), (TOPIC_INVALID, *BROKEN))
        for topic in ("#", "+", "witness/#", "witness/+/x", "a+b", "a#")
    }
    found["PUBLISH to nothing"] = Case(publish_packet("", b"!", version=version), (TOPIC_INVALID, *BROKEN))
    if version == 5:
        unknown = publish_packet("", b"!", properties=prop(0x23, 3))
        found["PUBLISH to an alias that was never set"] = Case(unknown, (PROTOCOL_ERROR, ALIAS_INVALID))
        found["PUBLISH to alias 0"] = Case(publish_packet("a", b"!", properties=prop(0x23, 0)), (ALIAS_INVALID,))
        found["PUBLISH to alias 17"] = Case(publish_packet("a", b"!", properties=prop(0x23, 17)), (ALIAS_INVALID,))
        found["PUBLISH to alias 65535"] = Case(publish_packet("a", properties=prop(0x23, 65535)), (ALIAS_INVALID,))
    return found


CASES: dict[str, tuple[int, Case]] = {
    f"{'3.1.1' if version == 4 else '5'}, {name}": (version, case)
    for version in (4, 5)
    for group in (_lengths, _misplaced, _identifiers, _flags, _topics)
    for name, case in group(version).items()
}


@pytest.mark.parametrize(("version", "case"), CASES.values(), ids=CASES.keys())
def test_a_broken_packet_ends_the_connection_with_a_reason(
    node: NodeProcess, witness: Witness, version: int, case: Case
) -> None:
    """A packet that breaks the rules ends the connection; MQTT 5 is told why; what followed it is not looked at."""
    with accepted(node, version) as offender:
        offender.send(case.raw + publish_packet("witness/after", b"too late", version=version))
        witness.check()
        refused(offender, *case.reasons)
    witness.subscriber.expect_nothing()


# --- text ---------------------------------------------------------------------------------------------------------

BAD_TEXT: dict[str, bytes] = {
    "U+0000": b"a\x00b",
    "U+0000 in two bytes": b"\xc0\x80",
    "half a surrogate pair": b"\xed\xa0\x80",
    "a surrogate pair": b"\xed\xa0\xbd\xed\xb8\x80",
    "no UTF-8 at all": b"\xff\xfe",
    "cut character": b"a\xe2\x82",
    "above U+10FFFF": b"\xf4\x90\x80\x80",
    "character longer than needed": b"\xe0\x80\xaf",
    "lone continuation": b"\x80",
}

_STRING_PROPERTIES_OF_PUBLISH = {"content type": 0x03, "response topic": 0x08}


def _text_fields(version: int, bad: bytes) -> dict[str, bytes]:
    found = {
        "topic": publish_packet(bad, version=version),
        "topic of QoS 1": publish_packet(bad, version=version, qos=1),
        "filter": subscribe_packet(1, [(bad, 0)], version=version),
        "second filter": subscribe_packet(1, [("a", 0), (bad, 0)], version=version),
        "filter to give up": unsubscribe_packet(1, [bad], version=version),
    }
    if version == 5:
        for name, number in _STRING_PROPERTIES_OF_PUBLISH.items():
            found[name] = publish_packet("a", properties=prop(number, bad))
        found["name of a user property"] = publish_packet("a", properties=prop(0x26, (bad, "v")))
        found["value of a user property"] = publish_packet("a", properties=prop(0x26, ("k", bad)))
        found["reason string"] = ack_packet(4, 1, reason=0x10, properties=prop(0x1F, bad))
        found["reason string of a DISCONNECT"] = disconnect_packet(reason=0, properties=prop(0x1F, bad))
        found["authentication method"] = auth_packet(0x19, prop(0x15, bad))
    return found


@both
@pytest.mark.parametrize("bad", BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_illegal_text_ends_the_connection(node: NodeProcess, witness: Witness, version: int, bad: bytes) -> None:
    """A string that is not UTF-8, or contains U+0000, ends the connection wherever it stands."""
    for raw in _text_fields(version, bad).values():
        with accepted(node, version) as offender:
            offender.send(raw)
            refused(offender, MALFORMED)
    witness.check()


@both
@pytest.mark.parametrize("bad", BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_illegal_text_in_a_connect_is_refused(node: NodeProcess, version: int, bad: bytes) -> None:
    """The same in every string of a CONNECT; a password may be any bytes."""
    for raw in (
        connect_packet(bad, version=version),
        connect_packet(fresh(), version=version, username=bad),
        connect_packet(fresh(), version=version, will=Will(bad)),
    ):
        with Client(node, version=version) as offender:
            offender.send(raw)
            connect_refused(offender, MALFORMED)
    with Client(node, version=version) as honest:
        honest.send(connect_packet(fresh(), version=version, username="u", password=bad))
        assert honest.expect(CONNACK).reason == 0


# --- properties ---------------------------------------------------------------------------------------------------

#: A value of every property of MQTT 5 (table 2-4).
PROPERTIES: dict[int, bytes] = {
    0x01: prop(0x01, 1),
    0x02: prop(0x02, 60),
    0x03: prop(0x03, "text"),
    0x08: prop(0x08, "answers"),
    0x09: prop(0x09, b"c"),
    0x0B: prop(0x0B, 5),
    0x11: prop(0x11, 0),
    0x12: prop(0x12, "id"),
    0x13: prop(0x13, 10),
    0x15: prop(0x15, "m"),
    0x16: prop(0x16, b"d"),
    0x17: prop(0x17, 1),
    0x18: prop(0x18, 1),
    0x19: prop(0x19, 0),
    0x1A: prop(0x1A, "i"),
    0x1C: prop(0x1C, "s"),
    0x1F: prop(0x1F, "r"),
    0x21: prop(0x21, 10),
    0x22: prop(0x22, 10),
    0x23: prop(0x23, 1),
    0x24: prop(0x24, 1),
    0x25: prop(0x25, 1),
    0x26: prop(0x26, ("k", "v")),
    0x27: prop(0x27, 1000),
    0x28: prop(0x28, 1),
    0x29: prop(0x29, 1),
    0x2A: prop(0x2A, 1),
}

#: Properties that a client may send, by packet (table 2-4).
ALLOWED: dict[str, set[int]] = {
    "CONNECT": {0x11, 0x15, 0x16, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27},
    "will": {0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26},
    "PUBLISH": {0x01, 0x02, 0x03, 0x08, 0x09, 0x23, 0x26},
    "SUBSCRIBE": {0x0B, 0x26},
    "UNSUBSCRIBE": {0x26},
    "PUBACK": {0x1F, 0x26},
    "PUBREC": {0x1F, 0x26},
    "PUBREL": {0x1F, 0x26},
    "PUBCOMP": {0x1F, 0x26},
    "DISCONNECT": {0x11, 0x1C, 0x1F, 0x26},  # the table does not tell who sends it
}


def _carrying(kind: str, properties: bytes) -> bytes:
    """A packet of a kind with these properties."""
    if kind == "CONNECT":
        return connect_packet(fresh(), properties=properties)
    if kind == "will":
        return connect_packet(fresh(), will=Will("bad/will", properties=properties))
    if kind == "PUBLISH":
        return publish_packet("bad/p", b"text", properties=properties)
    if kind == "SUBSCRIBE":
        return subscribe_packet(1, [("bad/s", 0)], properties=properties)
    if kind == "UNSUBSCRIBE":
        return unsubscribe_packet(1, ["bad/s"], properties=properties)
    if kind == "DISCONNECT":
        return disconnect_packet(reason=0, properties=properties)
    return ack_packet(NAMES.index(kind), 1, reason=0, properties=properties)


def _refused_with(node: NodeProcess, kind: str, properties: bytes, *reasons: int) -> None:
    raw = _carrying(kind, properties)
    if kind in ("CONNECT", "will"):
        with Client(node) as offender:
            offender.send(raw)
            connect_refused(offender, *reasons)
        return
    with accepted(node, 5) as offender:
        offender.send(raw)
        refused(offender, *reasons)


@pytest.mark.parametrize("kind", ALLOWED)
def test_a_property_of_another_packet_is_refused(node: NodeProcess, witness: Witness, kind: str) -> None:
    """Every property that the packet may not carry ends the connection."""
    for number, raw in PROPERTIES.items():
        if number not in ALLOWED[kind]:
            _refused_with(node, kind, raw, *BROKEN)
    witness.check()


@pytest.mark.parametrize("kind", ALLOWED)
def test_a_property_that_stands_twice_is_refused(node: NodeProcess, witness: Witness, kind: str) -> None:
    """Every property but the user property may stand once; also with another property between."""
    between = prop(0x26, ("between", ""))
    for number in sorted(ALLOWED[kind] - {0x26}):
        raw = PROPERTIES[number]
        method = PROPERTIES[0x15] if number == 0x16 else b""
        _refused_with(node, kind, method + raw + raw, PROTOCOL_ERROR)
        _refused_with(node, kind, method + raw + between + raw, PROTOCOL_ERROR)
    witness.check()


@pytest.mark.parametrize("kind", ALLOWED)
def test_properties_that_cannot_be_read_are_refused(node: NodeProcess, witness: Witness, kind: str) -> None:
    """Identifiers that do not exist, and values that go past the end of the properties."""
    for unknown in (b"\x00", b"\x04\x00", b"\x7f\x00", b"\x80\x01\x00", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\x7f"):
        _refused_with(node, kind, unknown, *BROKEN)
    for number in sorted(ALLOWED[kind]):
        raw = PROPERTIES[number]
        for end in range(1, len(raw)):
            _refused_with(node, kind, raw[:end], *BROKEN)
    witness.check()


@pytest.mark.parametrize(
    ("kind", "properties"),
    [
        ("PUBLISH", prop(0x01, 2)),
        ("PUBLISH", prop(0x01, 255)),
        ("PUBLISH", prop(0x08, "")),
        ("PUBLISH", prop(0x08, "a/#")),
        ("PUBLISH", prop(0x08, "a/+")),
        ("PUBLISH", prop(0x0B, 5)),
        ("SUBSCRIBE", prop(0x0B, 0)),
        ("SUBSCRIBE", b"\x0b\x80\x80\x80\x80\x01"),
        ("SUBSCRIBE", b"\x0b\x81\x00"),
        ("will", prop(0x01, 2)),
        ("will", prop(0x08, "#")),
        ("DISCONNECT", prop(0x11, 60)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.hex(" "),
)
def test_a_property_with_an_impossible_value_is_refused(node: NodeProcess, kind: str, properties: bytes) -> None:
    """Values that the specification forbids end the connection."""
    _refused_with(node, kind, properties, *BROKEN)


@pytest.mark.parametrize("kind", ALLOWED)
def test_a_flood_of_user_properties_is_refused(node: NodeProcess, witness: Witness, kind: str) -> None:
    """64 user properties are fine, 65 are not, and a packet full of them is refused without reading them all."""
    before = refusals(node, "max_user_properties")
    _refused_with(node, kind, PROPERTIES[0x26] * 65, QUOTA_EXCEEDED)
    assert before + 1 == refusals(node, "max_user_properties")
    fill = 2000 if kind in ("CONNECT", "will") else 140_000
    for _ in range(5):
        _refused_with(node, kind, PROPERTIES[0x26] * fill, QUOTA_EXCEEDED)
        witness.check()


def test_as_many_user_properties_as_allowed_arrive_in_order(node: NodeProcess, witness: Witness) -> None:
    """64 user properties go through as they came, double names too. [MQTT-3.3.2-18]"""
    pairs = [("k", str(n)) for n in range(64)]
    with accepted(node, 5) as honest:
        honest.publish("witness/many", b"!", properties=b"".join(prop(0x26, pair) for pair in pairs))
        message = witness.subscriber.expect(PUBLISH)
        assert pairs == message.prop_all(0x26)


# --- text of ours that is made from theirs --------------------------------------------------------------------------


def test_a_refused_filter_of_any_length_gets_an_answer(node: NodeProcess, witness: Witness) -> None:
    """The reason string tells what was wrong; it must fit into a string even if the filter was as long as a string."""
    for filter_ in ("a+" + "b" * 65_533, "#/" + "b" * 65_533, "$share/+/" + "b" * 65_526, "\x01+" * 32_767):
        with accepted(node, 5) as offender:
            offender.send(subscribe_packet(1, [(filter_, 0)]))
            refused(offender, 0x81)
        witness.check()


def test_an_authentication_method_of_any_length_gets_an_answer(node: NodeProcess) -> None:
    """An unknown method is refused with 0x8C, however long and unprintable its name is."""
    with Client(node) as offender:
        offender.send(connect_packet(fresh(), properties=prop(0x15, "\x01" * 16_000)))
        connect_refused(offender, 0x8C)


def test_a_goodbye_is_never_larger_than_the_client_takes(node: NodeProcess) -> None:
    """A client that takes only small packets gets its DISCONNECT without a reason string. [MQTT-3.14.2-3]"""
    with Client(node) as offender:
        offender.send(connect_packet(fresh(), properties=prop(0x27, 64)))
        assert offender.expect(CONNACK).reason == 0
        offender.send(publish_packet("a/" * 40 + "+", b""))
        answer = refused(offender, TOPIC_INVALID)
        assert answer is not None and len(answer.raw) <= 64
    with Client(node) as offender:
        offender.send(connect_packet(fresh(), properties=prop(0x27, 40)))
        first = offender.recv()
        assert len(first.raw) <= 40
        offender.send(subscribe_packet(0, [("a", 0)]))
        answer = refused(offender, *BROKEN)
        assert answer is not None and len(answer.raw) <= 40
