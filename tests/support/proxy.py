"""A way to a server of this event loop that can be cut, stopped and slowed down.

async with Proxy(target) as way:       clients connect to `way.address`
    way.cut()                          all connections break, with what is on its way
    way.stop(to_target=False)          nothing goes through in one direction; what comes waits
    way.go()
    way.closed = True                  new connections are closed at once
    way.piece = 7                      bytes that go through in one turn of the loop
    way.delay = 0.2                    seconds that everything is under way, in each direction
    way.rate = 50_000                  bytes a second, in each direction

A way that is slow or stopped takes as much as a socket would, and then makes the sender wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self, cast

#: Bytes that wait in one direction until no more is read.
ROOM = 1 << 20

#: Seconds between two pieces of a way with a rate.
BEAT = 0.02


class Proxy:
    """A listener on a port of this machine that carries bytes to an address and back."""

    def __init__(self, target: str, port: int = 0) -> None:
        """Lead to `target`; listen on `port`, or on one that is free."""
        self.closed = False
        self.piece = 0  #: 0: as they come
        self.delay = 0.0
        self.rate = 0  #: 0: as fast as it goes
        self.connections = 0  #: that have been carried
        self.open: set[Carried] = set()
        self.stopped_to_target = self.stopped_to_client = False
        self._target = target
        self._port = port
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Carried(self), "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        for one in list(self.open):
            one.abort()

    def stop(self, *, to_target: bool = True, to_client: bool = True) -> None:
        self.stopped_to_target, self.stopped_to_client = to_target, to_client

    def go(self) -> None:
        self.stopped_to_target = self.stopped_to_client = False
        for one in list(self.open):
            one.move()

    async def connect(self, carried: Carried) -> None:
        await self.carry(carried, self._target)

    async def carry(self, carried: Carried, target: str) -> None:
        """Open the connection to the target."""
        host, _, port = target.rpartition(":")
        try:
            await asyncio.get_running_loop().create_connection(lambda: carried.other, host, int(port))
        except OSError:
            carried.abort()


class Carried(asyncio.Protocol):
    """One connection of a client, with the one to the target that belongs to it."""

    def __init__(self, proxy: Proxy, client: Carried | None = None) -> None:
        self.proxy = proxy
        self.to_target = client is None
        self.other: Carried = client or Carried(proxy, self)
        self.transport: asyncio.Transport | None = None
        self.data = bytearray()  #: that has come and was not carried
        self._late: deque[tuple[float, bytes]] = deque()  # what is under way, and when it will have come
        self._connecting: asyncio.Task[None] | None = None
        self._moving = False
        self._full = False  # the transport takes no more for now
        self._deaf = False  # nothing is read for now

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if not self.to_target:
            self.other.move()
        elif self.proxy.closed:
            self.transport.abort()
        else:
            self.proxy.connections += 1
            self.proxy.open.add(self)
            self._connecting = asyncio.ensure_future(self.proxy.connect(self))

    def data_received(self, data: bytes) -> None:
        if self.proxy.delay or self._late:
            loop = asyncio.get_running_loop()
            due = loop.time() + self.proxy.delay
            if not self._late:
                loop.call_at(due, self._arrive)
            self._late.append((due, data))
            self._listen()
        else:
            self.data += data
            self.move()

    def _arrive(self) -> None:
        loop = asyncio.get_running_loop()
        while self._late and self._late[0][0] <= loop.time():
            self.data += self._late.popleft()[1]
        if self._late:
            loop.call_at(self._late[0][0], self._arrive)
        self.move()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.other.move()

    def move(self) -> None:
        """Carry what has come; the rest in the next turns."""
        if self.to_target:
            self.other._move()
        self._move()

    def _move(self) -> None:
        proxy, target = self.proxy, self.other.transport
        stopped = proxy.stopped_to_target if self.to_target else proxy.stopped_to_client
        if self.data and target is not None and not (stopped or self._moving or self.other._full):
            count = proxy.piece or (max(1, int(proxy.rate * BEAT)) if proxy.rate else len(self.data))
            target.write(bytes(self.data[:count]))
            del self.data[:count]
            if proxy.rate:
                self._moving = True
                asyncio.get_running_loop().call_later(BEAT, self._move_on)
            elif self.data:
                self._moving = True
                asyncio.get_running_loop().call_soon(self._move_on)
        self._listen()

    def _listen(self) -> None:
        """Read while there is room."""
        deaf = len(self.data) + sum(len(data) for _, data in self._late) >= ROOM
        if deaf != self._deaf and self.transport is not None:
            self._deaf = deaf
            if deaf:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _move_on(self) -> None:
        self._moving = False
        self._move()

    def connection_lost(self, error: Exception | None) -> None:
        self.abort()

    def abort(self) -> None:
        self.proxy.open.discard(self if self.to_target else self.other)
        for one in (self, self.other):
            transport, one.transport = one.transport, None
            if transport is not None:
                transport.abort()
