"""Clients and nodes for tests over all transports: TCP, TLS, WebSocket and WebSocket over TLS.

The clients are `wire.Client` over sockets of each kind. `WebSocket` makes frames by hand, so that tests decide how a
stream is cut into frames. Certificates come from `trustme`, new for each run.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import ssl
import struct
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.support.node import Endpoint, NodeProcess
from tests.support.ports import free_port
from tests.support.wire import PATIENCE, Client

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
FIN = 0x80

KINDS = ("tcp", "tls", "ws", "wss")
every_kind = pytest.mark.parametrize("kind", KINDS)


# --- sockets ------------------------------------------------------------------------------------------------------


class HandshakeError(AssertionError):
    """The node did not switch to WebSocket; `status` is what it answered."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer.decode("latin-1"))
        self.status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        self.body = answer.partition(b"\r\n\r\n")[2]


class WebSocket:
    """The client's end of a WebSocket, with as much of a socket's face as `wire.Client` uses."""

    def __init__(
        self, sock: socket.socket, path: str = "/mqtt", offered: str | None = "mqtt", origin: str | None = None
    ) -> None:
        self.sock = sock
        self.control: deque[tuple[int, bytes]] = deque()  #: PONG and CLOSE frames that came
        self.frames = 0  #: binary frames that came
        self._buffer = b""
        key = base64.b64encode(os.urandom(16))
        lines = [
            f"GET {path} HTTP/1.1",
            "Host: localhost",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key.decode()}",
            "Sec-WebSocket-Version: 13",
            *([f"Sec-WebSocket-Protocol: {offered}"] if offered is not None else []),
            *([f"Origin: {origin}"] if origin is not None else []),
        ]
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        head = self._head()
        proof = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        assert b"Sec-WebSocket-Accept: " + proof in head
        found = re.search(rb"Sec-WebSocket-Protocol: (\S+)", head)
        self.subprotocol = found[1].decode() if found else None

    def _head(self) -> bytes:
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = self.sock.recv(4096)
            if not data:
                raise HandshakeError(answer)
            answer += data
        head, _, self._buffer = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101 "):
            while data := self.sock.recv(4096):
                answer += data
            raise HandshakeError(answer)
        return head

    def sendall(self, data: bytes) -> None:
        self.sock.sendall(frame(BINARY, data))

    def recv(self, _most: int) -> bytes:
        """The payload of the next binary frame; empty at the end. Control frames are put aside."""
        while True:
            found = self._frame()
            if found is None:
                return b""
            opcode, data = found
            if opcode == BINARY:
                self.frames += 1
                if data:
                    return data
            else:
                assert opcode in (CLOSE, PONG), f"opcode {opcode} from the broker"
                self.control.append((opcode, data))

    def _frame(self) -> tuple[int, bytes] | None:
        while True:
            if len(self._buffer) >= 2:
                assert self._buffer[0] & FIN, "a fragment from the broker"
                assert not self._buffer[1] & 0x80, "a masked frame from the broker"
                length, at = self._buffer[1], 2
                if length == 126:
                    length, at = int.from_bytes(self._buffer[2:4], "big"), 4
                elif length == 127:
                    length, at = int.from_bytes(self._buffer[2:10], "big"), 10
                if len(self._buffer) >= max(at, 2) and len(self._buffer) >= at + length:
                    opcode, data = self._buffer[0] & 0x0F, self._buffer[at : at + length]
                    self._buffer = self._buffer[at + length :]
                    return opcode, data
            data = self.sock.recv(262_144)
            if not data:
                return None
            self._buffer += data

    def settimeout(self, seconds: float | None) -> None:
        self.sock.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.sock.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def close(self) -> None:
        self.sock.close()


def frame(opcode: int, data: bytes = b"", first: int = FIN, *, masked: bool = True, length: int | None = None) -> bytes:
    """A frame, masked as a client must; `length` may lie about the data."""
    size, said = len(data), len(data) if length is None else length
    bit = 0x80 if masked else 0
    if said < 126:
        head = struct.pack("!BB", first | opcode, bit | said)
    elif said < 65536:
        head = struct.pack("!BBH", first | opcode, bit | 126, said)
    else:
        head = struct.pack("!BBQ", first | opcode, bit | 127, said)
    if not masked:
        return head + data
    key = os.urandom(4)
    mask = (key * (size // 4 + 1))[:size]
    return head + key + (int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")).to_bytes(size, "little")


class AnyClient(Client):
    """`wire.Client` over a socket that is there already."""

    def __init__(self, sock: socket.socket | WebSocket, version: int = 5) -> None:
        super().__init__(sock, version=version)

    @property
    def websocket(self) -> WebSocket:
        found: object = self.socket
        assert isinstance(found, WebSocket)
        return found


# --- certificates and nodes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Papers:
    """Authorities and certificates in files."""

    folder: Path
    authority: trustme.CA
    stranger: trustme.CA  #: an authority that the node does not know

    @property
    def tls(self) -> str:
        """Lines of a listener's section."""
        return f'certificate = "{self.folder}/server.pem"\nkey = "{self.folder}/server.key"\n'

    @property
    def ca(self) -> str:
        return f'ca = "{self.folder}/ca.pem"\n'

    def trusting(self, authority: trustme.CA | None = None) -> ssl.SSLContext:
        """A client's context that trusts one authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        (authority or self.authority).configure_trust(context)
        return context

    def showing(self, name: str, authority: trustme.CA | None = None) -> ssl.SSLContext:
        """A client's context with a certificate for this common name."""
        context = self.trusting()
        (authority or self.authority).issue_cert(f"{name}.example", common_name=name).configure_cert(context)
        return context


def make_papers(folder: Path) -> Papers:
    """New authorities, and a certificate for this machine's loopback addresses."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server = authority.issue_cert("localhost", "127.0.0.1", "::1")
    server.private_key_pem.write_to_path(folder / "server.key")
    for part in server.cert_chain_pems:
        part.write_to_path(folder / "server.pem", append=True)
    return Papers(folder, authority, trustme.CA())


@dataclass(frozen=True)
class Ways:
    """A node with all its ways in."""

    node: NodeProcess
    at: dict[str, Endpoint]
    papers: Papers

    def wire(self, kind: str, context: ssl.SSLContext | None = None) -> socket.socket:
        """A TCP or TLS connection."""
        endpoint = self.at[kind]
        plain = socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if kind in ("tcp", "ws"):
            return plain
        try:
            return (context or self.papers.trusting()).wrap_socket(plain, server_hostname=endpoint.host)
        except BaseException:
            plain.close()
            raise

    def client(self, kind: str, version: int = 5, context: ssl.SSLContext | None = None) -> AnyClient:
        """A client that has not sent CONNECT yet."""
        wire = self.wire(kind, context)
        return AnyClient(WebSocket(wire) if kind in ("ws", "wss") else wire, version)


CONFIG = """
[limits]
connect_timeout = 60.0
stall_timeout = 600.0
[session]
queue_bytes = 268435456
[log]
format = "json"
"""


def open_ways(papers: Papers, tls: str = "", wss: str = "", more: str = CONFIG) -> Ways:
    """A node on all four; `tls` and `wss` are further lines of their sections."""
    at = {kind: Endpoint("127.0.0.1", free_port()) for kind in ("tls", "wss")}
    config = f"""{more}
[listeners.tls]
bind = "{at["tls"]}"
{papers.tls}{tls}
[listeners.wss]
bind = "{at["wss"]}"
{papers.tls}{wss}
"""
    node = NodeProcess(config=config, ws=True, http=True)
    assert node.ws is not None
    return Ways(node, at | {"tcp": node.mqtt, "ws": node.ws}, papers)


class Served(NodeProcess):
    """`motorcade serve` with exactly these arguments."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "motorcade", "serve", *self.args]

    def addresses(self) -> dict[str, list[str]]:
        """What the `ready` line says: addresses by kind."""
        line = next(line for line in self.output if " ready " in line)
        found: dict[str, list[str]] = {}
        kind = ""
        for word in line.partition(" ready ")[2].split():
            if ":" in word:
                found[kind].append(word)
            else:
                kind = word
                found[kind] = []
        return found
