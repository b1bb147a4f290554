"""Which pages may open a WebSocket, and what the others hear."""

from __future__ import annotations

from motorcade.broker.connection import Connection
from motorcade.broker.websocket import WebSocketProtocol, admits
from tests.support.virtual import MemoryNode, Wire, standing
from tests.unit.broker.test_fairness import HANDSHAKE

EVIL = "https://evil.example"


def test_origins() -> None:
    for origins, origin, host, local, admitted in (
        ((), None, "node.example:8083", False, True),  # no browser
        ((), EVIL, "node.example:8083", False, False),
        ((), EVIL, "localhost:8083", True, False),
        ((), "null", "localhost:8083", True, False),
        ((), "http://[", "localhost", True, False),
        ((), "", "localhost", True, False),
        ((), "http://node.example", "node.example:8083", False, True),
        ((), "https://NODE.example:3000", "node.EXAMPLE", False, True),
        ((), "http://localhost:3000", "localhost:8083", True, True),
        ((), "http://app.localhost", "app.localhost:8083", True, True),
        ((), "http://127.0.0.1:3000", "127.0.0.1:8083", True, True),
        ((), "http://[::1]", "[::1]:8083", True, True),
        ((), "http://127.0.0.1", "localhost:8083", True, False),
        ((), EVIL, "evil.example:8083", True, False),  # a name of theirs that leads to this machine
        ((), "http://localhost.evil.example", "localhost.evil.example", True, False),
        (("https://fleet.example",), "https://fleet.example", "localhost", True, True),
        (("https://fleet.example",), "http://localhost", "localhost", True, False),
        (("https://fleet.example",), None, "localhost", True, True),
        (("*",), EVIL, "localhost", True, True),
    ):
        given = [] if origin is None else [origin]
        assert admitted is admits(origins, given, [host], local)
        if given and "*" not in origins:
            assert not admits(origins, given * 2, [host], local), "browsers send one"
            assert not admits((), given, [], local)


def answer(origins: tuple[str, ...], handshake: bytes) -> bytes:
    """What a node says to a handshake."""
    node = MemoryNode()
    with standing(node.clock):
        wire = Wire(node.loop)
        protocol = WebSocketProtocol(lambda: Connection(node.broker, "ws"), "/mqtt", origins, 1 << 20, node.broker.loop)
        wire.protocol = protocol  # type: ignore[assignment]
        protocol.connection_made(wire)
        protocol.data_received(handshake)
        node.turn()
    return bytes(wire.written)


def test_a_page_of_another_host_hears_why() -> None:
    """A browser on this machine needs no log-in, so a page that it shows must not use its place."""
    page = HANDSHAKE.replace(b"Host: ", b"Origin: https://evil.example\r\nHost: ")
    assert answer((), HANDSHAKE).startswith(b"HTTP/1.1 101 ")
    assert answer(("*",), page).startswith(b"HTTP/1.1 101 ")
    refused = answer((), page)
    assert refused.startswith(b"HTTP/1.1 403 ")
    assert b"`origins`" in refused
