"""A broker in memory: real connections on transports that are lists of bytes, an event loop that turns when told to,
and a clock that stands until it is moved.

    node = MemoryNode()
    car = node.client("car")        # CONNECT sent, CONNACK read
    car.send(codec.encode(…))       # one read of the broker's
    node.turn()                     # the loop turn is over: output is written
    car.take()                      # packets that have come

With a store the node keeps durable sessions there (`HeldStore` lets a test say when a write is done), and
`node.restart()` is what a new process finds after this one has been killed.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, cast
from unittest.mock import patch

from motorcade.broker import broker, byteloop, commits, connection, keeper
from motorcade.broker.broker import Broker
from motorcade.broker.connection import Connection
from motorcade.broker.keeper import Keeper
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.plane import BrokerOptions, Plane
from motorcade.clock import Clock as NodeClock
from motorcade.core.guid import GuidFactory
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Hooks
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Connack, Connect, Packet, Suback, Subscribe
from motorcade.mqtt.properties import NONE, Properties
from motorcade.storage.ports import Store, StoreError
from motorcade.tasks import Tasks

START = 1_700_000_000.0  #: seconds since the epoch at which every node begins


class Clock:
    """Seconds; the same for both clocks of the broker."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def _crash(_connection: Connection, error: Exception) -> None:
    raise error


_note = Tasks.note


def _crash_task(tasks: Tasks, name: str, error: BaseException, **more: object) -> None:
    """A background task that fails would be tried again, and its defect stay hidden."""
    if not isinstance(error, StoreError):
        raise error
    _note(tasks, name, error, **more)


@contextmanager
def surviving() -> Iterator[None]:
    """Background tasks that fail are tried again, as in a node."""
    with patch.object(Tasks, "note", _note):
        yield


@contextmanager
def standing(clock: Clock) -> Iterator[None]:
    """Let the broker read this clock; a defect that it would survive with one client lost fails the test."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Connection, "_crash", _crash))
        stack.enter_context(patch.object(Tasks, "note", _crash_task))
        for module in (connection, broker, byteloop, commits, keeper):
            for name in {"time", "monotonic"} & vars(module).keys():
                stack.enter_context(patch.object(module, name, clock))
        yield


class Timer:
    """A call that is due later."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None


class Turns:
    """As much of an event loop as the broker needs. Tasks are real; what fails in one fails in `turn`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.later: list[tuple[float, int, Timer]] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self._count = 0
        self._failed: list[BaseException] = []
        self._dead = False

    def time(self) -> float:
        return self.clock.now

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> None:
        self.soon.append((callback, args) if context is None else (context.run, (callback, *args)))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        self._count += 1
        timer = Timer(callback, args)
        heappush(self.later, (self.clock.now + delay, self._count, timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast("asyncio.AbstractEventLoop", self))

    def create_task(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        if self._dead:  # what the process had is being removed from memory; some of it would clean up
            work.close()
            return cast("asyncio.Task[Any]", self.create_future())
        task = asyncio.Task(work, loop=cast("asyncio.AbstractEventLoop", self), name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreError):
            self._failed.append(error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._failed.append(context.get("exception") or AssertionError(context["message"]))

    def turn(self) -> None:
        """Run until nothing is left to do now."""
        events._set_running_loop(cast("asyncio.AbstractEventLoop", self))
        try:
            while self.soon or (self.later and self.later[0][0] <= self.clock.now):
                if self.soon:
                    callback, args = self.soon.popleft()
                    callback(*args)
                    continue
                timer = heappop(self.later)[2]
                if timer.callback is not None:
                    timer.callback(*timer.args)
        finally:
            events._set_running_loop(None)
        if self._failed:
            raise self._failed.pop()

    def die(self) -> None:
        """The process is killed: nothing goes on."""
        self._dead = True
        self.soon.clear()
        self.later.clear()
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant to be
            task.get_coro().close()
        self.tasks.clear()
        self.soon.clear()


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
        self.broken = False  #: by the peer: what is written then goes nowhere

    def write(self, data: Any) -> None:
        if not self.broken:
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
        self.wire.broken = True
        self.wire.close()


class MemoryNode:
    """A node without sockets."""

    def __init__(
        self,
        session: SessionOptions | None = None,
        limits: Limits | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        process: int = 1,
    ) -> None:
        self.clock = clock or Clock()
        self.loop: Turns | asyncio.AbstractEventLoop = loop or Turns(self.clock)
        self.hooks = Hooks()
        self.process = process
        guids = GuidFactory("n", process)
        self.plane = Plane(BrokerOptions(), session or SessionOptions(), limits or Limits(), self.hooks, guids, START)
        clocks = NodeClock(self.clock, self.clock)
        self.broker = Broker(self.plane, cast("asyncio.AbstractEventLoop", self.loop), clock=clocks)
        self.store = store
        self.keeper: Keeper | None = None
        if store is not None:
            self.keeper = Keeper(
                store,
                self.plane,
                cast("asyncio.AbstractEventLoop", self.loop),
                self.broker.outbox.later,
                self.broker.supervisor,
            )
            self.plane.keeper = self.plane.registry.keeper = self.keeper

    def restart(self) -> MemoryNode:
        """The process is killed; the one that comes after it, on the same store, with its sessions brought back."""
        assert isinstance(self.loop, Turns)
        self.loop.die()
        node = MemoryNode(
            self.plane.session_options,
            self.plane.limits,
            store=self.store,
            clock=self.clock,
            process=self.process + 1,
        )
        assert isinstance(node.loop, Turns) and node.keeper is not None
        restored = node.loop.create_task(node.keeper.restore())
        node.turn()
        assert restored.done()
        return node

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
