"""The HTTP server in a thread with an event loop of its own, so that no request delays a message.

The two threads share the interpreter. The time after which one hands it to the other (5 ms by default) is what a
message could wait for a busy request; it is lowered while the server runs.

Sockets are bound in `start`, in the caller's thread: an address that is taken is an error of the node's start, not a
message in a log. `stop` has a bound: a thread that hangs is left behind and ends with the process. A thread that ends
by itself is begun again.

A new connection always has a place: when all `MAX_CONNECTIONS` are taken, one that is not being answered gives way, the
one that has waited longest of the address that has most. So silent, slow and half-open ones cannot starve the probes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
import threading
from collections import Counter
from operator import attrgetter
from time import monotonic

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from motorcade.control import Control
from motorcade.core.errors import ConfigError
from motorcade.http.app import make_app
from motorcade.http.guard import OPEN, Token
from motorcade.tasks import Tasks

SWITCH_INTERVAL = 0.0005  #: seconds until the interpreter is handed to the other thread
MAX_CONNECTIONS = 64  #: connections at once; of more, those that wait are closed, and if all are busy 503 is the answer
MAX_HEAD = 16 * 1024  #: bytes of request line and headers
KEEP_ALIVE = 5  #: seconds an idle connection is kept
REQUEST_PATIENCE = 10.0  #: seconds for a whole request to arrive
ANSWER_PATIENCE = 30.0  #: seconds that a client may take nothing of an answer
STOP_PATIENCE = 3.0  #: seconds for requests that are being answered when the server stops

log = structlog.stdlib.get_logger("motorcade.http")


class HttpServer:
    """Serves `Control` at one address. An empty host is every interface, and port 0 lets the system choose."""

    def __init__(
        self, control: Control, host: str, port: int, token: Token = OPEN, supervisor: Tasks | None = None
    ) -> None:
        """Raise `ConfigError` if others than this machine could reach it without a token."""
        local = is_loopback(host)
        if not local and not (token.text and token.required):
            raise ConfigError(f"http.bind: {host or '*'}:{port} is not loopback; set http.token, or bind to 127.0.0.1")
        self.address = ""  #: `host:port` that is listened on
        self._host = host
        self._port = port
        self._control = control
        self._token = token
        self._names = [host] if local else None
        self._loop = asyncio.get_running_loop()  # the broker's
        self._server: _Server | None = None
        self._ended = asyncio.Event()
        self._supervisor = supervisor or Tasks()
        self._watching: asyncio.Task[None] | None = None
        self._old_interval = sys.getswitchinterval()

    async def start(self) -> None:
        """Listen. Call it in the broker's event loop. `ConfigError` if the address cannot be had."""
        try:
            sockets = _open_sockets(self._host, self._port)
        except OSError as error:
            raise ConfigError(
                f"http.bind: cannot listen on {self._host or '*'}:{self._port}: {error.strerror}"
            ) from error
        self.address = _text(sockets[0])
        self._port = sockets[0].getsockname()[1]
        self._old_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        await self._begin(sockets)
        self._watching = self._supervisor.start(self._stay, "http.server")

    async def _begin(self, sockets: list[socket.socket]) -> None:
        self._ended.clear()
        listening = asyncio.Event()
        self._server = _Server(self._config(), self._loop, listening)
        threading.Thread(target=self._run, args=(self._server, sockets), name="http", daemon=True).start()
        waits = [asyncio.create_task(event.wait()) for event in (listening, self._ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not listening.is_set():
            raise ConfigError("the HTTP server could not start; the log says why")

    async def _stay(self) -> None:
        """Wait as long as the thread runs; begin it again if it has ended before."""
        if self._ended.is_set():
            await self._begin(_open_sockets(self._host, self._port))
            log.warning("http_goes_on", address=self.address)
        await self._ended.wait()
        raise RuntimeError("the HTTP thread has ended")

    async def stop(self) -> None:
        """Finish what is being answered, within a bound."""
        if self._watching is not None:
            self._watching.cancel()
        if self._server is None:
            return
        self._server.should_exit = True
        try:
            # uvicorn looks at should_exit ten times a second, then gives requests STOP_PATIENCE.
            await asyncio.wait_for(self._ended.wait(), STOP_PATIENCE + 2.0)
        except TimeoutError:
            log.warning("http_thread_left_behind", address=self.address)
        self._server = None
        sys.setswitchinterval(self._old_interval)

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            make_app(self._control, self._loop, self._token, self._names),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=2
            * MAX_CONNECTIONS,  # of requests; some may still be ending when others have their places
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(STOP_PATIENCE),
            h11_max_incomplete_event_size=MAX_HEAD,
        )

    def _run(self, server: _Server, sockets: list[socket.socket]) -> None:
        """Run the server in its thread."""
        try:
            asyncio.run(server.serve(sockets))
        except Exception:
            log.exception("http_thread_failed")
        finally:
            for sock in sockets:
                sock.close()
            _tell(self._loop, self._ended)


class _Protocol(H11Protocol):
    """One connection, which knows since when it waits for its client."""

    since: float  #: monotonic; it was opened, or has answered its last request
    stuck_since: float | None = None  #: monotonic; its client takes nothing of the answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's own is so
        self.since = monotonic()
        super().connection_made(transport)
        self._make_room()

    def on_response_complete(self) -> None:
        self.since = monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self.stuck_since = monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.stuck_since = None
        super().resume_writing()

    @property
    def waits(self) -> bool:
        """Return True if the client must act: send the rest of a request, or read a response."""
        return self.stuck_since is not None or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def is_overdue(self, now: float) -> bool:
        if self.stuck_since is not None:
            return now - self.stuck_since > ANSWER_PATIENCE
        return self.waits and now - self.since > REQUEST_PATIENCE

    def _make_room(self) -> None:
        """Close connections that wait until there are no more than there may be."""
        while len(self.connections) > MAX_CONNECTIONS:
            waiting = [each for each in self.connections if isinstance(each, _Protocol) and each.waits]
            if waiting == [self] or not waiting:
                return
            (most, _), *_ = Counter(each.host for each in waiting).most_common(1)
            same = [each for each in waiting if each.host == most and each is not self]
            oldest = min(same or waiting, key=attrgetter("since"))
            self.connections.discard(oldest)  # now; it hears of its end in the next turn of the loop
            oldest.transport.abort()

    @property
    def host(self) -> str:
        return self.client[0] if self.client else ""


class _Server(uvicorn.Server):
    """A uvicorn that tells when it listens, and waits for requests only for a bounded time."""

    def __init__(self, config: uvicorn.Config, loop: asyncio.AbstractEventLoop, listening: asyncio.Event) -> None:
        super().__init__(config)
        self._broker_loop = loop
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _tell(self._broker_loop, self._listening)

    async def on_tick(self, counter: int) -> bool:
        """Run ten times a second."""
        self._close_silent(monotonic())
        return await super().on_tick(counter)

    def _close_silent(self, now: float) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Protocol) and connection.is_overdue(now):
                connection.transport.abort()


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of another thread's loop."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # that loop has ended: nothing waits any more
        pass


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _open_sockets(host: str, port: int) -> list[socket.socket]:
    """Return bound sockets for all addresses that the host has, or none and an `OSError`."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.setblocking(False)
            sock.listen()  # here, so that an address in use is found now
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _text(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
