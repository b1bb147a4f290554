"""Does the node survive WebSocket peers that break HTTP, the frames, or the MQTT inside?

Frames are built by hand: a library would refuse to send these. `guarded` speaks plain MQTT to the same node meanwhile.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from tests.scenarios.transports import BINARY, CLOSE, CONT, FIN, PING, TEXT, frame
from tests.scenarios.witness import Witness, metrics, rss, wait_until
from tests.support.cases import each
from tests.support.node import NodeProcess
from tests.support.wire import CONNACK, PATIENCE, PINGREQ, connect_packet, parse

CONFIG = """
[limits]
connect_timeout = 60.0
"""

pytestmark = pytest.mark.usefixtures("witness")


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(config=CONFIG, ws=True, http=True) as running:
        yield running


def dial(node: NodeProcess) -> socket.socket:
    assert node.ws is not None
    return socket.create_connection((node.ws.host, node.ws.port), timeout=PATIENCE)


HANDSHAKE = (
    b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)


def upgraded(node: NodeProcess) -> socket.socket:
    """A connection after its handshake."""
    peer = dial(node)
    peer.sendall(HANDSHAKE)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += peer.recv(4096)
    assert answer.startswith(b"HTTP/1.1 101 ")
    return peer


def ends(peer: socket.socket) -> bytes:
    """Everything until the node closes."""
    seen = b""
    try:
        while data := peer.recv(65536):
            seen += data
    except ConnectionResetError:
        pass
    return seen


# --- the handshake ------------------------------------------------------------------------------------------------

BAD_HANDSHAKES: dict[str, bytes] = {
    "MQTT without WebSocket": connect_packet("ws") + b"\r\n\r\n",
    "no HTTP": b"\x00\xff" * 100 + b"\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\r\n" * 100,
    "another path": HANDSHAKE.replace(b"/mqtt", b"/etc/passwd"),
    "another method": HANDSHAKE.replace(b"GET", b"POST"),
    "no upgrade": b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "old version": HANDSHAKE.replace(b"Version: 13", b"Version: 8"),
    "no key": HANDSHAKE.replace(b"Sec-WebSocket-Key", b"X-Key"),
    "broken key": HANDSHAKE.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"not base64!"),
    "two requests, the first refused": HANDSHAKE.replace(b"Sec-WebSocket-Key", b"X-Key") + HANDSHAKE,
    "two requests for another path": HANDSHAKE.replace(b"/mqtt", b"/") * 2,
    "HTTP/1.0": HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a header that never ends": b"GET /mqtt HTTP/1.1\r\nX: " + b"x" * 100_000,
    "too many headers": b"GET /mqtt HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    "a line that never ends": b"GET /" + b"a" * 100_000,
    "a body": b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n",
}


@each(what=BAD_HANDSHAKES)
def test_a_broken_handshake_is_refused(node: NodeProcess, witness: Witness, what: str) -> None:
    """What is no handshake for MQTT gets an HTTP error or nothing, and is closed."""
    with dial(node) as peer:
        try:
            peer.sendall(BAD_HANDSHAKES[what])
        except ConnectionError:
            pass
        witness.check()
        answer = ends(peer)
        assert answer == b"" or answer.split(b" ")[1][:1] in (b"4", b"5"), answer[:200]


def test_a_handshake_cut_short_is_forgotten(node: NodeProcess) -> None:
    """A peer that leaves inside its handshake leaves nothing."""
    for end in range(1, len(HANDSHAKE), 13):
        with dial(node) as peer:
            peer.sendall(HANDSHAKE[:end])
            peer.shutdown(socket.SHUT_WR)
            ends(peer)
    wait_until(lambda: metrics(node)["motorcade_connections"] == 2, "only the witness is connected")


# --- frames -------------------------------------------------------------------------------------------------------

CONNECT = connect_packet("ws-offender", keepalive=0)

BAD_FRAMES: dict[str, bytes] = {
    "not masked": frame(BINARY, CONNECT, masked=False),
    "text": frame(TEXT, CONNECT),
    "reserved bits": frame(BINARY, CONNECT, first=FIN | 0x40),
    "reserved opcode": frame(0x3, CONNECT),
    "reserved control opcode": frame(0xB, b""),
    "continuation of nothing": frame(CONT, CONNECT),
    "new message inside a message": frame(BINARY, CONNECT[:5], first=0) + frame(BINARY, CONNECT[5:]),
    "fragmented ping": frame(PING, b"x", first=0),
    "ping of 126 bytes": frame(PING, b"x" * 126),
    "close with one byte": frame(CLOSE, b"x"),
    "close with a reserved code": frame(CLOSE, struct.pack("!H", 1005)),
    "close with illegal UTF-8": frame(CLOSE, struct.pack("!H", 1000) + b"\xff\xfe"),
    "frame of 2 GiB": frame(BINARY, b"x", length=2**31),
    "frame of 2**63 bytes": frame(BINARY, b"x", length=2**63),
    "length not in its shortest form": struct.pack("!BBQ", FIN | BINARY, 0x80 | 127, 2**64 - 1) + b"abcd",
    "MQTT that is no CONNECT": frame(BINARY, PINGREQ),
    "MQTT with a length of five bytes": frame(BINARY, b"\x10\x80\x80\x80\x80\x01"),
    "MQTT of 256 MiB": frame(BINARY, b"\x10\xff\xff\xff\x7f"),
}


@each(what=BAD_FRAMES)
def test_a_broken_frame_ends_the_connection(node: NodeProcess, witness: Witness, what: str) -> None:
    """Frames that break the protocol, or carry bytes that break MQTT, end the connection; nothing is let in."""
    with upgraded(node) as peer:
        peer.sendall(BAD_FRAMES[what])
        witness.check()
        assert not _connack_in(ends(peer))
    wait_until(lambda: metrics(node)["motorcade_connections"] == 2, "only the witness is connected")


def test_a_frame_that_says_more_than_it_has_is_waited_for(node: NodeProcess, witness: Witness) -> None:
    """A frame that says 4096 and brings 3 bytes is unfinished; when the peer leaves, so does it."""
    with upgraded(node) as peer:
        peer.sendall(frame(BINARY, CONNECT[:3], length=4096))
        witness.check()
        peer.shutdown(socket.SHUT_WR)
        ends(peer)
    wait_until(lambda: metrics(node)["motorcade_connections"] == 2, "only the witness is connected")


def _connack_in(seen: bytes) -> bool:
    """Whether a binary frame of the node holds a CONNACK that lets the client in."""
    at = 0
    while at + 2 <= len(seen):
        opcode, size = seen[at] & 15, seen[at + 1]
        if opcode == BINARY and at + 2 + size <= len(seen) and seen[at + 2] >> 4 == CONNACK:
            return parse(seen[at + 2 : at + 2 + size]).reason == 0
        at += 2 + size
    return False


def test_a_flood_of_pings_that_nobody_reads_is_bounded(node: NodeProcess, witness: Witness) -> None:
    """Pings must be answered with their own bytes; a peer that reads no answer is not read for ever either."""
    flood = frame(PING, b"." * 125) * 500
    with upgraded(node) as peer:
        before = rss(node)
        peer.settimeout(2)
        blocked = False
        try:
            for _ in range(1000):
                peer.sendall(flood)
        except OSError:
            blocked = True
        witness.check()
        assert blocked, "60 MB of pings were taken from a peer that reads nothing"
        assert rss(node) < before + 48 * 1024 * 1024
