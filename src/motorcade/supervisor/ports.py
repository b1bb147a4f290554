"""The ports of all nodes: chosen once, and held.

A held port is bound and never listened on: the system gives it to nothing else that asks for any port, and a node that
is started again finds it free. Nodes may listen there, since a socket that does not listen is in the way of none that
allows it (SO_REUSEADDR), and several may, if it is to be shared (SO_REUSEPORT).

    shared      MQTT, TLS, WebSocket, WSS: the same for all nodes
    spread      control port, links: the one that is configured for the first node, the next free ones for the others

A port on which others listen is refused, also if they would share it: those would be nodes of another command, and
clients would come to either.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from motorcade.broker.listener import address_text
from motorcade.config import ListenAddress
from motorcade.core.errors import ConfigError

MAX_PORT: Final = 65535
LOOPBACK: Final = "127.0.0.1"
_Place = tuple[socket.AddressFamily, str]  # where a host name leads


class HeldPorts:
    """The ports that a supervisor holds."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._held: set[tuple[str, int]] = set()  # of hosts as they resolve

    def share(self, address: ListenAddress, what: str) -> ListenAddress:
        """Hold a port that all nodes listen on; with port 0, one that is free. `ConfigError` if it cannot be had."""
        return self._hold(address, what, shared=True)

    def spread(self, address: ListenAddress, count: int, what: str) -> list[ListenAddress]:
        """Hold a port for each node: this one and the next that are free, or any with port 0."""
        found = [self._hold(address, what, shared=False)]
        port = address.port
        while len(found) < count:
            port += 1 if address.port else 0
            if port > MAX_PORT:
                raise ConfigError(f"{what}: there are no {count} free ports from {address_text(*address)} on")
            try:
                found.append(self._hold(ListenAddress(address.host, port), what, shared=False))
            except ConfigError as error:
                if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE):
                    raise
        return found

    def close(self) -> None:
        """Let go of all."""
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _hold(self, address: ListenAddress, what: str, *, shared: bool) -> ListenAddress:
        try:
            places = _resolved(address.host)
            port = address.port or _free_port(places)
            for place in places:
                self._bind(place, port, shared=shared)
        except OSError as error:
            raise ConfigError(
                f"{what}: cannot listen on {address_text(*address)}: {error.strerror or error}"
            ) from error
        return ListenAddress(address.host, port)

    def _bind(self, place: _Place, port: int, *, shared: bool) -> None:
        if (place[1], port) in self._held:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        # Without SO_REUSEPORT this fails if another socket listens there, also one that would share the port.
        _bound(place, port, socket.SO_REUSEADDR).close()
        options = (socket.SO_REUSEADDR, socket.SO_REUSEPORT) if shared else (socket.SO_REUSEADDR,)
        self._sockets.append(_bound(place, port, *options))
        self._held.add((place[1], port))


def _resolved(host: str) -> list[_Place]:
    """Return all addresses that a listener on a host binds; an empty host is every interface."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = {(family, str(address[0])): None for family, _, _, _, address in found}
    return [place for place in places if _is_there(place[0])]


def _is_there(family: socket.AddressFamily) -> bool:
    """Return True if this machine has such addresses at all."""
    try:
        socket.socket(family).close()
    except OSError:
        return False
    return True


def _free_port(places: list[_Place]) -> int:
    with _bound(places[0], 0) as probe:  # without any option: a port that nothing has
        return int(probe.getsockname()[1])


def _bound(place: _Place, port: int, *options: int) -> socket.socket:
    family, host = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
