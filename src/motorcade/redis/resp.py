"""One connection to one Redis server: commands go out together, replies come back in the order of the commands.

    call(...) ─┐                       ┌─> future
    call(...) ─┼─> one write per turn ─┤─> future     hiredis packs and parses; nothing here looks inside a reply
    call(...) ─┘   of the event loop   └─> future

Rule 1: a command is never sent twice from here. A caller that repeats one knows whether that does harm.
Rule 2: when the connection breaks, every command without a reply fails with `LostError`: it may have been carried out.
Rule 3: a server that says nothing for `reply_timeout` seconds while commands wait is as good as dead: the connection is
        broken off, so that a stopped server cannot hold up its callers for longer.
Rule 4: no message of an error contains a password.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import hiredis

from motorcade.core.errors import StoreAwayError, StoreError

Argument = str | bytes | int | float

_NOT_YET = object()


class ServerAddress(NamedTuple):
    """The address at which a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ServerError(Exception):
    """The server answered with an error; the first word tells which (`MOVED`, `NOSCRIPT`, `OOM`…)."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class LostError(StoreAwayError):
    """The connection broke before the reply came; the command may have been carried out or not."""


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials and time-outs for a server."""

    user: str = ""
    password: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None
    connect_timeout: float = 2.0  #: seconds, with TLS and log-in
    reply_timeout: float = 4.0  #: seconds without any reply while commands wait; longer than a `WAIT` may take
    max_pending: int = 10_000  #: commands without a reply on one connection; more have to wait for room


class RedisConnection(asyncio.Protocol):
    """A pipelining connection."""

    def __init__(self, address: ServerAddress, access: Access, push: Callable[[Any], None] | None = None) -> None:
        self.address = address
        self.closed = asyncio.get_running_loop().create_future()  #: done when the connection is gone
        self._loop = asyncio.get_running_loop()
        self._access = access
        self._push = push
        self._reader = hiredis.Reader(replyError=ServerError, notEnoughData=_NOT_YET)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._room: asyncio.Event = asyncio.Event()
        self._room.set()
        self._heard = 0.0  #: loop time of the last sign of life, or of the first command after silence
        self._watch: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.closed.done()

    def call(self, *arguments: Argument) -> asyncio.Future[Any]:
        """Send a command in this turn of the event loop; the reply."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        if not self.is_open:
            reply.set_exception(LostError(f"not connected to {self.address}"))
            return reply
        if not self._out:
            self._loop.call_soon(self._flush)
        if not self._waiting:
            self._heard = self._loop.time()
        self._out.append(hiredis.pack_command(arguments))  # type: ignore[arg-type] # takes any number
        self._waiting.append(reply)
        if len(self._waiting) >= self._access.max_pending:
            self._room.clear()
        return reply

    async def room(self) -> None:
        """Wait until fewer than `max_pending` commands are without a reply."""
        while not self._room.is_set():
            await self._room.wait()

    def send(self, *arguments: Argument) -> None:
        """Send a command whose replies go to `push` (SUBSCRIBE and its like)."""
        if not self.is_open:
            raise LostError(f"not connected to {self.address}")
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(hiredis.pack_command(arguments))  # type: ignore[arg-type] # takes any number

    @property
    def silence(self) -> float:
        """Seconds since the server was last heard."""
        return self._loop.time() - self._heard

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast("asyncio.Transport", transport)
        self._heard = self._loop.time()
        self._watch = self._loop.call_later(self._access.reply_timeout / 4, self._look)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOT_YET:
                self._deliver(reply)
        except hiredis.ProtocolError:
            self.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        waiting, self._waiting = self._waiting, deque()
        self._room.set()
        for reply in waiting:
            if not reply.done():
                reply.set_exception(LostError(f"lost the connection to {self.address}"))

    def _deliver(self, reply: Any) -> None:
        if not self._waiting:
            if self._push is not None:
                self._push(reply)
            return
        future = self._waiting.popleft()
        if not self._room.is_set() and len(self._waiting) < self._access.max_pending // 2:
            self._room.set()
        if future.done():  # its caller was cancelled
            return
        if isinstance(reply, ServerError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def _look(self) -> None:
        if self._waiting and self._loop.time() - self._heard > self._access.reply_timeout:
            self.close()
            return
        self._watch = self._loop.call_later(self._access.reply_timeout / 4, self._look)


async def connect(address: ServerAddress, access: Access, push: Callable[[Any], None] | None = None) -> RedisConnection:
    """Connect, log in and choose the database."""
    try:
        async with asyncio.timeout(access.connect_timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: RedisConnection(address, access, push),
                address.host,
                address.port,
                ssl=access.tls,
                server_hostname=address.host if access.tls else None,
            )
            try:
                await _log_in(connection, access)
            except BaseException:
                connection.close()
                raise
            return connection
    except (OSError, TimeoutError) as error:
        raise LostError(f"cannot connect to {address}: {str(error) or 'no answer in time'}") from None


async def _log_in(connection: RedisConnection, access: Access) -> None:
    replies = []
    if access.password:
        replies.append(connection.call("AUTH", *((access.user,) if access.user else ()), access.password))
    if access.database:
        replies.append(connection.call("SELECT", access.database))
    replies.append(connection.call("CLIENT", "SETNAME", "motorcade"))
    # All are awaited, so that every failure is looked at.
    for answer in await asyncio.gather(*replies, return_exceptions=True):
        if isinstance(answer, ServerError) and answer.code not in {"NOPERM", "LOADING", "MASTERDOWN"}:
            raise StoreError(f"{connection.address} refuses us: {answer}") from None
        if isinstance(answer, LostError):
            raise answer
