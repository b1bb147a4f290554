"""MQTT over WebSocket: the handshake and frames around the same bytes. [MQTT-6.0.0-1] to [MQTT-6.0.0-4]

`WebSocketProtocol` stands between the socket and a `Connection`. Towards the connection it is a transport: what is
written becomes one binary frame. MQTT packets and frames need not line up in either direction.

Frames are costly, and most kinds of them cost without saying anything in MQTT. So they are counted before they are
parsed: a connection has a number of them per turn of the event loop, and few until its client is let in.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from typing import Any, cast
from urllib.parse import urlsplit

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from motorcade.broker.connection import Connection

FRAME_OVERHEAD = 1024  #: bytes a frame may be longer than the largest packet
FRAMES_PER_TURN = 128  #: frames of one connection, of whatever kind, before the others have their turn
FRAMES_BEFORE_CONNECT = 256  #: frames of a connection, of whatever kind, until its client is let in
MAX_HANDSHAKE = 16 * 1024  #: bytes of the HTTP request


class WebSocketProtocol(asyncio.Protocol):
    """The socket side."""

    def __init__(
        self,
        make: Callable[[], Connection],
        path: str,
        origins: Sequence[str],
        max_frame: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._make = make
        self._path = path
        self._origins = origins
        self._ws = ServerProtocol(
            subprotocols=[Subprotocol("mqtt")],
            select_subprotocol=_select_subprotocol,
            max_size=max_frame + FRAME_OVERHEAD if max_frame else None,
        )
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self._loop = loop
        self._rest = b""  # what has come and is not parsed yet: over the budget, or the beginning of a frame's header
        self._open = False  # the handshake is over
        self._arrived = 0  # bytes before that
        self._inside = 0  # bytes to come of the frame that is being read
        self._frames = 0  # since the beginning
        self._spent = False  # the budget of this turn is; the rest is for the next one
        self._held = False  # the connection wants to read nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self._transport = transport
        self._connection = self._make()
        self._connection.connection_made(WebSocketTransport(transport, self))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio says so
        self._transport = None
        if not self._spent and self._goes_on():
            self._spent = True
            self._loop.call_soon(self._next_turn)
        if not self._spent:
            self._lose()  # else when the rest of what has come is taken

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.connection_lost(None)
            self._connection = None

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if self._spent or self._held:
            self._rest = data
            return
        if not self._open:
            data = self._handshake(data)
        if data:
            self._take(data)

    def _handshake(self, data: bytes) -> bytes:
        """Take the HTTP request, or a part of it; return what has come behind it."""
        end = data.find(b"\r\n\r\n") + 4
        self._open = end >= 4
        head = data[:end] if self._open else data[:-3]  # the end may be cut anywhere
        self._arrived += len(head)
        if self._arrived > MAX_HANDSHAKE and self._transport is not None:
            self._transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n")
            self._transport.close()
            return b""
        if head:
            self._receive(head)
        if self._open:
            return data[end:]
        self._rest = data[-3:]
        return b""

    def _take(self, data: bytes) -> None:
        """Parse the frames of `data`, as many as the budget of a turn allows, and keep the rest."""
        connection = self._connection
        most = FRAMES_PER_TURN
        if connection is not None and connection.session is None and not connection.closing:
            most = min(FRAMES_PER_TURN, FRAMES_BEFORE_CONNECT - self._frames)
            if most <= 0 and len(data) > self._inside:
                connection.broker.state.refuse("max_connect_size")
                self._ws.fail(CloseCode.POLICY_VIOLATION, "too many frames before CONNECT")
                self._send()
                return
        end, self._inside, frames = measure(data, self._inside, most)
        self._frames += frames
        self._rest = data[end:]
        if frames >= most:
            self._spent = True
            self._follow_reading()
            self._loop.call_soon(self._next_turn)
        if end:
            self._receive(data[:end] if end < len(data) else data)

    def _next_turn(self) -> None:
        """Go on after the turns of the other connections."""
        self._spent = False
        self._follow_reading()
        if self._rest and not self._held:
            self.data_received(b"")
        if self._transport is None and not self._spent:
            self.connection_lost(None)

    def _goes_on(self) -> bool:
        """Return True if only the budgets of this turn keep what has come from being taken."""
        connection = self._connection
        return (
            bool(self._rest)
            and connection is not None
            and not connection.closing
            and (connection.spent if self._held else self._spent)
        )

    def _receive(self, data: bytes) -> None:
        self._ws.receive_data(data)
        self._take_events()
        self._send()

    def _follow_reading(self) -> None:
        """Read from the socket unless there is a reason not to."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._held or self._spent:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def hold(self, held: bool) -> None:
        """Pause or resume reading, as the connection wants."""
        if held is self._held:
            return
        self._held = held
        if not held and self._rest and not self._spent:
            self._spent = True
            self._loop.call_soon(self._next_turn)
        self._follow_reading()

    def eof_received(self) -> bool | None:
        if self._goes_on():
            return None  # frames that come before the end are not parsed yet; see `connection_lost`
        self._rest = b""  # the layer takes nothing more
        self._ws.receive_eof()
        self._take_events()
        self._send()
        return None

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.resume_writing()

    def _take_events(self) -> None:
        payloads: list[bytes] = []
        for event in self._ws.events_received():
            if isinstance(event, Request):
                self._shake_hands(event)
                if self._ws.state is not State.OPEN:
                    break
            elif isinstance(event, Frame):
                if event.opcode in (Opcode.BINARY, Opcode.CONT):
                    payloads.append(bytes(event.data))
                elif event.opcode is Opcode.TEXT:  # [MQTT-6.0.0-1]
                    self._ws.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is sent in binary frames")
                    break
        if payloads and self._connection is not None:
            self._connection.data_received(payloads[0] if len(payloads) == 1 else b"".join(payloads))

    def _shake_hands(self, request: Request) -> None:
        if self._ws.parser_exc is not None:
            return  # what came behind the request was no frame: the layer has given up already
        if request.path.partition("?")[0] != self._path:
            response = self._ws.reject(http.HTTPStatus.NOT_FOUND, f"MQTT is served at {self._path}\n")
        elif not admits(self._origins, request.headers.get_all("Origin"), request.headers.get_all("Host"), self._local):
            reason = "pages of this origin may not connect; the option `origins` of the listener lists those that may\n"
            response = self._ws.reject(http.HTTPStatus.FORBIDDEN, reason)
        else:
            response = self._ws.accept(request)
        self._ws.send_response(response)

    @property
    def _local(self) -> bool:
        """True if the peer is on this machine."""
        channel = self._connection.channel if self._connection is not None else None
        return channel is not None and channel.client.is_loopback

    def _send(self) -> None:
        """Write what the WebSocket layer has to say; an empty piece ends the stream."""
        transport = self._transport
        if transport is None:
            return
        for piece in self._ws.data_to_send():
            if piece:
                transport.write(piece)
            else:
                transport.close()
        if self._ws.parser_exc is not None and self._ws.state is State.CONNECTING:
            transport.close()

    # -- for the connection

    def send(self, data: bytes) -> None:
        """Send one binary frame."""
        if self._ws.state is State.OPEN:
            self._ws.send_binary(data)
            self._send()

    def close(self) -> None:
        """Send the closing handshake, then close the socket."""
        if self._ws.state is State.OPEN:
            self._ws.send_close(CloseCode.NORMAL_CLOSURE)
            self._send()
        if self._transport is not None:
            self._transport.close()


def admits(origins: Sequence[str], origin: Sequence[str], host: Sequence[str], local: bool) -> bool:
    """Return True if a page of an origin may connect.

    Browsers say where a page is from, other clients do not. Without a list only pages of the host that is asked are let
    in. A site can make its name lead to this machine, whose clients may need no log-in: for them (`local`) the host
    must be an address or `localhost`.
    """
    if not origin or "*" in origins:
        return True
    if len(origin) > 1:
        return False
    if origins:
        return origin[0] in origins
    try:
        page, asked = urlsplit(origin[0]).hostname, urlsplit(f"//{host[0]}").hostname if len(host) == 1 else None
    except ValueError:
        return False
    if page is None or page != asked:
        return False
    return not local or page == "localhost" or page.endswith(".localhost") or _is_address(page)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def measure(data: bytes, inside: int, most: int) -> tuple[int, int, int]:
    """Find where frames end without parsing them.

    `inside`: bytes that the first frame still has. Return how many bytes may be parsed, which is up to the end of
    `most` frames or to a header that is not complete, the bytes to come of the last frame, and how many frames begin.
    """
    n = len(data)
    at, frames = inside, 0
    while at + 1 < n and frames < most:
        length = data[at + 1] & 127
        width = 2 if length < 126 else 4 if length == 126 else 10
        if at + width > n:
            break
        if length >= 126:
            length = int.from_bytes(data[at + 2 : at + width], "big")
        at += width + length + (4 if data[at + 1] & 128 else 0)
        frames += 1
    return (n, at - n, frames) if at >= n else (at, 0, frames)


def _select_subprotocol(_protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Select `mqtt`, or `mqttv3.1` as MQTT 3.1 clients say; one that names none is let in without. [MQTT-6.0.0-3]"""
    for name in ("mqtt", "mqttv3.1"):
        if name in offered:
            return Subprotocol(name)
    return None


class WebSocketTransport(asyncio.Transport):
    """The transport that a `Connection` writes to."""

    def __init__(self, transport: asyncio.Transport, protocol: WebSocketProtocol) -> None:
        super().__init__()
        self._transport = transport
        self._protocol = protocol

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._protocol.send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self._protocol.send(b"".join(list_of_data))

    def close(self) -> None:
        self._protocol.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._protocol.hold(True)

    def resume_reading(self) -> None:
        self._protocol.hold(False)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)
