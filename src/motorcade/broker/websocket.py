"""MQTT over WebSocket: the handshake and frames around the same bytes. [MQTT-6.0.0-1] to [MQTT-6.0.0-4]

`WebSocketProtocol` stands between the socket and a `Connection`. Towards the connection it is a transport: what is
written becomes one binary frame. MQTT packets and frames need not line up in either direction.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from motorcade.broker.connection import Connection

FRAME_OVERHEAD = 1024  #: bytes a frame may be longer than the largest packet


class WebSocketProtocol(asyncio.Protocol):
    """The socket side."""

    def __init__(self, make: Callable[[], Connection], path: str, origins: Sequence[str], max_frame: int) -> None:
        self._make = make
        self._path = path
        self._ws = ServerProtocol(
            origins=[Origin(o) for o in origins] + [None] if origins else None,
            subprotocols=[Subprotocol("mqtt")],
            select_subprotocol=_select_subprotocol,
            max_size=max_frame + FRAME_OVERHEAD if max_frame else None,
        )
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self._transport = transport
        self._connection = self._make()
        self._connection.connection_made(WebSocketTransport(transport, self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._connection is not None:
            self._connection.connection_lost(exc)
            self._connection = None

    def data_received(self, data: bytes) -> None:
        self._ws.receive_data(data)
        self._take_events()
        self._send()

    def eof_received(self) -> bool | None:
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
        else:
            response = self._ws.accept(request)
        self._ws.send_response(response)

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
        """One binary frame."""
        if self._ws.state is State.OPEN:
            self._ws.send_binary(data)
            self._send()

    def close(self) -> None:
        """Closing handshake, then the socket."""
        if self._ws.state is State.OPEN:
            self._ws.send_close(CloseCode.NORMAL_CLOSURE)
            self._send()
        if self._transport is not None:
            self._transport.close()


def _select_subprotocol(_protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """`mqtt`, or `mqttv3.1` as clients of MQTT 3.1 say; a client that names none is let in without. [MQTT-6.0.0-3]"""
    for name in ("mqtt", "mqttv3.1"):
        if name in offered:
            return Subprotocol(name)
    return None


class WebSocketTransport(asyncio.Transport):
    """What a `Connection` writes to."""

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
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)
