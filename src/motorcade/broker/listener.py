"""Listeners for clients: TCP, TLS, WebSocket and WebSocket over TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from motorcade.broker.broker import Broker
from motorcade.broker.connection import Connection
from motorcade.broker.websocket import WebSocketProtocol
from motorcade.core.errors import ConfigError

BACKLOG = 4096  #: connections the kernel may hold until they are accepted


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address to listen on."""

    kind: str  #: tcp, tls, ws or wss
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    path: str = "/mqtt"  #: of WebSockets
    origins: tuple[str, ...] = ()  #: of WebSockets; empty: pages of the same host
    max_connections: int = 0  #: of all endpoints of this kind; 0 is any number
    shared: bool = False  #: other nodes of this user on this machine listen there too, and the kernel chooses

    def __str__(self) -> str:
        return f"{self.kind}://{address_text(self.host, self.port)}"


def address_text(host: str, port: int) -> str:
    """Return an address as it is written in the configuration."""
    return f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"


class Listener:
    """Accepts connections on one endpoint."""

    def __init__(self, broker: Broker, endpoint: Endpoint) -> None:
        self._broker = broker
        self.endpoint = endpoint
        self._servers: list[asyncio.Server] = []

    async def open(self) -> None:
        """Begin to accept; `ConfigError` if the address cannot be had."""
        endpoint = self.endpoint
        self._broker.limit_listener(endpoint.kind, endpoint.max_connections)
        try:
            self._servers = [
                await self._serve(host=endpoint.host or None, port=endpoint.port, reuse_port=endpoint.shared)
            ]
        except (OSError, socket.gaierror) as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror or error}") from error
        self.endpoint = replace(endpoint, port=self.port)  # closed and opened again it is the same one

    async def renew(self, context: ssl.SSLContext) -> None:
        """Take another TLS context for connections to come; `ConfigError` if that fails, and all stays as it was.

        The sockets stay the same, with all that waits on them; connections that exist stay as they are.
        """
        endpoint, old = self.endpoint, self._servers
        servers: list[asyncio.Server] = []
        self.endpoint = replace(endpoint, tls=context)
        try:
            for listening in [sock for server in old for sock in server.sockets]:
                sock = socket.socket(fileno=os.dup(listening.fileno()))
                try:
                    servers.append(await self._serve(sock=sock))
                except OSError:
                    sock.close()
                    raise
        except OSError as error:
            self.endpoint = endpoint
            for server in servers:
                server.close()
            why = error.strerror or error
            raise ConfigError(
                f"{endpoint} cannot take new certificates: {why}; it goes on with the old ones"
            ) from error
        self._servers = servers
        for server in old:
            server.close()

    async def _serve(self, **where: Any) -> asyncio.Server:
        context = self.endpoint.tls
        patience = self._broker.state.limits.connect_timeout or None if context else None
        return await asyncio.get_running_loop().create_server(
            self._factory(),
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=patience,
            ssl_shutdown_timeout=patience,
            **where,
        )

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        for server in self._servers:
            for sock in server.sockets:
                return int(sock.getsockname()[1])
        return self.endpoint.port

    def _factory(self) -> Callable[[], asyncio.Protocol]:
        broker, endpoint = self._broker, self.endpoint
        kind = endpoint.kind
        if kind in ("tcp", "tls"):
            return lambda: Connection(broker, kind)
        path, origins, max_frame = endpoint.path, endpoint.origins, broker.state.limits.max_packet_size
        return lambda: WebSocketProtocol(lambda: Connection(broker, kind), path, origins, max_frame, broker.loop)

    async def close(self) -> None:
        """Accept no new connection; connections that exist stay."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
