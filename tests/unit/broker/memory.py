"""A broker in memory: real connections on transports that are lists of bytes, an event loop that turns when told to,
and a clock that stands until it is moved.

    node = MemoryNode()
    car = node.client("car")        # CONNECT sent, CONNACK read
    car.send(codec.encode(…))       # one read of the broker's
    node.turn()                     # the loop turn is over: output is written
    car.take()                      # packets that have come
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from heapq import heappop, heappush
from typing import Any, cast
from unittest.mock import patch

from motorcade.broker import broker, byteloop, connection
from motorcade.broker.broker import Broker
from motorcade.broker.connection import Connection
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.plane import BrokerOptions, Plane
from motorcade.core.guid import GuidFactory
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Hooks
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Connack, Connect, Packet, Suback, Subscribe
from motorcade.mqtt.properties import NONE, Properties

START = 1_700_000_000.0  #: seconds since the epoch at which every node begins


class Clock:
    """Seconds; the same for both clocks of the broker."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def _crash(_connection: Connection, error: Exception) -> None:
    raise error


@contextmanager
def standing(clock: Clock) -> Iterator[None]:
    """Let the broker read this clock; a defect that it would survive with one client lost fails the test."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Connection, "_crash", _crash))
        for module in (connection, broker, byteloop):
            for name in {"time", "monotonic"} & vars(module).keys():
                stack.enter_context(patch.object(module, name, clock))
        yield


class _Done:
    """What `create_task` gives: the coroutines that are run here never wait."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        """What fails here fails where it is called."""


class Turns:
    """As much of an event loop as the broker needs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.later: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.clock.now

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append((callback, args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        heappush(self.later, (self.clock.now + delay, len(self.later), callback, args))

    def create_task(self, work: Coroutine[Any, Any, object], name: str = "") -> _Done:
        self.call_soon(_finish, work)
        return _Done()

    def turn(self) -> None:
        """Run until nothing is left to do now."""
        while self.soon or (self.later and self.later[0][0] <= self.clock.now):
            if self.soon:
                callback, args = self.soon.popleft()
            else:
                _, _, callback, args = heappop(self.later)
            callback(*args)


def _finish(work: Coroutine[Any, Any, object]) -> None:
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("a coroutine waits; use a real event loop for this test")


class Wire(asyncio.Transport):
    """A transport whose other end is `written`. `full` lets nothing through until `drain`."""

    def __init__(self, loop: Turns | asyncio.AbstractEventLoop, host: str = "127.0.0.1") -> None:
        super().__init__({"peername": (host, 40000)})
        self.loop = loop
        self.protocol: Connection | None = None
        self.written = bytearray()
        self.reading = True
        self.full = False
        self.gone = False

    def write(self, data: Any) -> None:
        assert not self.gone, "written after the end"
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Sizes are not counted here; see `fill` and `drain`."""

    def get_write_buffer_size(self) -> int:
        return 1 if self.full else 0

    def fill(self) -> None:
        """The peer does not read any more."""
        if not self.full and not self.gone:
            self.full = True
            assert self.protocol is not None
            self.protocol.pause_writing()

    def drain(self) -> None:
        """The peer has read everything."""
        if self.full and not self.gone:
            self.full = False
            assert self.protocol is not None
            self.protocol.resume_writing()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.gone

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            assert self.protocol is not None
            self.loop.call_soon(self.protocol.connection_lost, None)

    abort = close


class Peer:
    """The client's end of a connection."""

    def __init__(self, node: Broker, loop: Turns | asyncio.AbstractEventLoop, version: int, host: str) -> None:
        self.version = version
        self.wire = Wire(loop, host)
        self.connection = Connection(node, "ws")  # any listener whose bytes go through the transport
        self.wire.protocol = self.connection
        self._decoder = codec.Decoder(version)
        self.connection.connection_made(self.wire)

    @property
    def open(self) -> bool:
        return not self.wire.gone

    def send(self, data: bytes | Packet, *pieces: bytes | Packet) -> None:
        """Bytes or packets of one read."""
        parts = (p if isinstance(p, bytes) else codec.encode(p, self.version) for p in (data, *pieces))
        if self.open:
            self.connection.data_received(b"".join(parts))

    def take(self) -> list[Packet]:
        """Packets that have come since the last time."""
        data = bytes(self.wire.written)
        self.wire.written.clear()
        return list(self._decoder.feed(data))

    def close(self) -> None:
        """Close without a DISCONNECT."""
        self.wire.close()


class MemoryNode:
    """A node without sockets."""

    def __init__(
        self,
        session: SessionOptions | None = None,
        limits: Limits | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.clock = Clock()
        self.loop: Turns | asyncio.AbstractEventLoop = loop or Turns(self.clock)
        self.hooks = Hooks()
        self.plane = Plane(
            BrokerOptions(), session or SessionOptions(), limits or Limits(), self.hooks, GuidFactory("n", 1), START
        )
        self.broker = Broker(self.plane, cast("asyncio.AbstractEventLoop", self.loop))

    def turn(self) -> None:
        """The loop turn is over."""
        assert isinstance(self.loop, Turns)
        self.loop.turn()

    def peer(self, version: int = 5, host: str = "127.0.0.1") -> Peer:
        """A network connection on which nothing has been said yet."""
        return Peer(self.broker, self.loop, version, host)

    def client(
        self, client_id: str, version: int = 5, *, clean: bool = True, properties: Properties = NONE, **more: Any
    ) -> Peer:
        """A client that has been let in."""
        peer = self.peer(version)
        if version != 5:
            properties = NONE
        peer.send(Connect(client_id, version, clean, properties=properties, **more))
        self.turn()
        (connack,) = peer.take()[:1]
        assert isinstance(connack, Connack) and not connack.reason, connack
        return peer

    def subscribe(self, peer: Peer, *wanted: tuple[str, int] | Subscription) -> None:
        """Subscribe and read the SUBACK."""
        subscriptions = tuple(w if isinstance(w, Subscription) else Subscription(*w) for w in wanted)
        peer.send(Subscribe(1, subscriptions))
        self.turn()
        assert [s for s in peer.take() if isinstance(s, Suback)]
