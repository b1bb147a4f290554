"""A node in virtual time: a real broker with real plugins, on transports that are lists of bytes, an event loop that
turns when told to, and a clock that stands until it is moved.

    node = MemoryNode()
    car = node.client("car")              CONNECT sent, CONNACK read
    car.send(Publish(…))                  one read of the broker's
    node.turn()                           the loop turn is over: output is written
    car.take()                            packets that have come

With a store the node keeps durable sessions there (`HeldStore` lets a test say when a write is done), and
`node.restart()` is what a new process finds after this one has been killed.

A `PluginNode` has one plugin, over a `HeldStore` unless it is given another store. Its clients say what they want, and
everything that follows from it now has happened when they return; later things happen in `wait`:

    with EcqNode.on(retention=60.0) as node:
        pub, car = node.client("pub"), node.client("car", receive_maximum=2)
        assert 0 == pub.publish("$ECQ/w/car/speed", b"50")
        car.subscribe("$ECQ/car/#")
        first, *_ = car.messages()        those that have come since the last time
        car.ack(first)
        node.wait(61)
        node = node.kill()                the process that comes after it
"""

from __future__ import annotations

import asyncio
import importlib
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import fields
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast
from unittest.mock import patch

from motorcade import commit
from motorcade.broker.broker import Broker
from motorcade.broker.connection import Connection
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.session_store import SessionStore
from motorcade.broker.state import BrokerOptions, BrokerState
from motorcade.clock import Clock as NodeClock
from motorcade.core.errors import MotorcadeError
from motorcade.core.guid import GuidFactory
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Loaded, Plugins
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.storage.ports import Store, StoreError
from motorcade.tasks import Tasks
from tests.support import clocks
from tests.support.held_store import HeldStore

T = TypeVar("T")
AnyPacket = TypeVar("AnyPacket", bound=Packet)

START = 1_700_000_000.0  #: seconds since the epoch at which every node begins
MAX_CLEANUPS = 100  #: awaits of a coroutine after it was told to end


class Clock:
    """Seconds; the same for both clocks of the broker."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def _crash(_connection: Connection, error: Exception) -> None:
    raise error


def _call(callback: Callable[[], object]) -> None:
    """What waits for a commit and fails would be logged, and its defect stay hidden."""
    callback()


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
        clocks.replaced(stack)
        stack.enter_context(patch.object(Connection, "_crash", _crash))
        stack.enter_context(patch.object(Tasks, "note", _crash_task))
        stack.enter_context(patch.object(commit, "_call", _call))
        for module in (importlib.import_module(f"motorcade.broker.{name}") for name in clocks.READERS):
            for name in {"time", "monotonic"} & vars(module).keys():
                stack.enter_context(patch.object(module, name, clock))
        yield


class Handle:
    """A call that is due in this turn, or later."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None

    def run(self) -> None:
        if self.callback is not None:
            self.callback(*self.args)


class Turns:
    """As much of an event loop as the broker needs. Tasks are real; what fails in one fails in `turn`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.soon: deque[Handle] = deque()
        self.later: list[tuple[float, int, Handle]] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self._count = 0
        self._failed: list[BaseException] = []
        self._dead = False

    def time(self) -> float:
        return self.clock.now

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(callback, args) if context is None else Handle(context.run, (callback, *args))
        self.soon.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        self._count += 1
        handle = Handle(callback, args)
        heappush(self.later, (self.clock.now + delay, self._count, handle))
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Handle:
        return self.call_later(when - self.clock.now, callback, *args)

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

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is done here is done in a callback of this loop."""
        before = events._get_running_loop()
        events._set_running_loop(cast("asyncio.AbstractEventLoop", self))
        try:
            yield
        finally:
            events._set_running_loop(before)

    def turn(self) -> None:
        """Run until nothing is left to do now."""
        with self.running():
            while self.soon or (self.later and self.later[0][0] <= self.clock.now):
                (self.soon.popleft() if self.soon else heappop(self.later)[2]).run()
        if self._failed:
            failed, self._failed = self._failed, []
            raise failed[-1]

    def die(self) -> None:
        """The process is killed: nothing goes on."""
        self._dead = True
        self.soon.clear()
        self.later.clear()
        with self.running():  # what cleans up may ask for its loop
            for task in self.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant to be
                _close(task.get_coro())
        self.tasks.clear()
        self.soon.clear()


def _close(work: Any) -> None:
    """End a coroutine; where it awaits something to clean up (`finally: await …`), that is not done either."""
    for _ in range(MAX_CLEANUPS):
        try:
            work.close()
        except RuntimeError as error:
            if str(error) != "coroutine ignored GeneratorExit":
                raise
        else:
            return
    raise AssertionError(f"{work} does not end")


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
            with self.wire.loop.running() if isinstance(self.wire.loop, Turns) else nullcontext():
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


PROPERTIES = {field.name for field in fields(Properties)}


class Client(Peer):
    """A client that was let in. What was asked for by kind (`messages`, `expect`, …) does not come with `take`."""

    def __init__(self, node: MemoryNode, client_id: str, version: int = 5, host: str = "127.0.0.1") -> None:
        super().__init__(node.broker, node.loop, version, host)
        self.node = node
        self.client_id = client_id
        self.received: list[Publish] = []  #: every message that `messages` has returned
        self.inflight: list[Publish] = []  #: of these, what is not acknowledged
        self.connack = Connack()
        self._came: list[Packet] = []
        self._numbers = 0

    def connect(self, connect: Connect) -> Connack:
        """Be let in."""
        self.send(connect)
        connack = self.expect(Connack)
        assert not connack.reason, connack
        return connack

    def take(self) -> list[Packet]:
        self._came += super().take()
        found, self._came = self._came, []
        return found

    def expect(self, kind: type[AnyPacket]) -> AnyPacket:
        """The next packet of a kind, which has come when nothing is left to do now."""
        self.node.turn()
        packets = self.take()
        found = next((packet for packet in packets if isinstance(packet, kind)), None)
        assert found is not None, f"no {kind.__name__}, but {packets}"
        packets.remove(found)
        self._came = packets
        return found

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- what it does

    def subscribe(self, filter_: str, qos: int = 1, identifier: int = 0, **user: str) -> Suback:
        """Subscribe; user properties are given with `_` for `-`."""
        told = tuple((name.replace("_", "-"), value) for name, value in user.items())
        properties = Properties(subscription_ids=(identifier,) if identifier else (), user_properties=told)
        self.send(Subscribe(self._next(), (Subscription(filter_, qos),), properties))
        return self.expect(Suback)

    def unsubscribe(self, filter_: str) -> None:
        self.send(Unsubscribe(self._next(), (filter_,)))
        self.expect(Unsuback)

    def put(self, topic: str, payload: bytes, qos: int = 1, **properties: Any) -> int:
        """Publish, and leave the answer for later; its packet identifier."""
        number = self._next() if qos else 0
        self.send(Publish(topic, payload, qos, packet_id=number, properties=Properties(**properties)))
        return number

    def publish(self, topic: str, payload: bytes, qos: int = 1, **properties: Any) -> int:
        """Publish, and be answered: 0, or the code of an error."""
        number = self.put(topic, payload, qos, **properties)
        if not qos:
            self.node.turn()
            return 0
        answer: Puback | Pubrec = self.expect(Puback) if qos == 1 else self.expect(Pubrec)
        assert number == answer.packet_id
        if answer.reason >= 0x80:
            return int(answer.reason)
        if qos == 2:
            self.send(Pubrel(number))
            self.node.turn()
        return 0

    def messages(self) -> list[Publish]:
        """Messages that have come since the last time, when nothing is left to do now."""
        self.node.turn()
        packets = self.take()
        found = [packet for packet in packets if isinstance(packet, Publish)]
        self._came = [packet for packet in packets if not isinstance(packet, Publish)]
        self.received += found
        self.inflight += (message for message in found if message.qos)
        return found

    def payloads(self) -> list[bytes]:
        """Their payloads."""
        return [bytes(message.payload) for message in self.messages()]

    def ack(self, *messages: Publish, reason: int = 0) -> None:
        """Acknowledge in one read, or refuse."""
        for message in messages:
            self.inflight.remove(message)
        if messages:
            self.send(*(Puback(message.packet_id, ReasonCode(reason)) for message in messages))
        self.node.turn()

    def drain(self) -> list[bytes]:
        """Take and acknowledge until nothing comes any more; the payloads of all that was in flight or has come."""
        self.messages()
        seen: list[bytes] = []
        while self.inflight:
            seen += (bytes(message.payload) for message in self.inflight)
            self.ack(*self.inflight)
            self.messages()
        return seen

    # -- how it goes, and comes back

    def disconnect(self) -> None:
        self.send(Disconnect())
        self.node.turn()


class MemoryNode:
    """A node without sockets."""

    sessions: ClassVar[type[SessionStore]] = SessionStore

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
        self.state = BrokerState(
            BrokerOptions(), session or SessionOptions(), limits or Limits(), self.hooks, guids, START
        )
        clocks = NodeClock(self.clock, self.clock)
        self.broker = Broker(self.state, cast("asyncio.AbstractEventLoop", self.loop), clock=clocks)
        self.store = store
        if isinstance(store, HeldStore):
            store.loop = cast("asyncio.AbstractEventLoop", self.loop)
        self.session_store: SessionStore | None = None
        if store is not None:
            self.session_store = self.sessions(
                store,
                self.state,
                cast("asyncio.AbstractEventLoop", self.loop),
                self.broker.flusher.later,
                self.broker.supervisor,
            )
            self.state.store = self.state.registry.store = self.session_store

    def restart(self) -> MemoryNode:
        """The process is killed; the one that comes after it, on the same store, with its sessions brought back."""
        assert isinstance(self.loop, Turns)
        self.loop.die()
        if self.session_store is not None:  # what it had waiting cleans up when it is freed, but it writes no more
            self.session_store.lease.write = lambda _batch: commit.Commit()  # type: ignore[assignment, method-assign]
        node = MemoryNode(
            self.state.session_options,
            self.state.limits,
            store=self.store,
            clock=self.clock,
            process=self.process + 1,
        )
        assert isinstance(node.loop, Turns) and node.session_store is not None
        restored = node.loop.create_task(node.session_store.restore())
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
    ) -> Client:
        """A client that has been let in, without what came with its CONNACK."""
        client = self.admit(client_id, version, clean=clean, properties=properties, **more)
        client.take()
        return client

    def admit(
        self, client_id: str, version: int = 5, *, clean: bool = True, properties: Properties = NONE, **more: Any
    ) -> Client:
        """A client that has been let in; `more` are fields of CONNECT, or of its properties."""
        if named := {name: more.pop(name) for name in PROPERTIES & more.keys()}:
            properties = Properties(**named)
        if version != 5:
            properties = NONE
        client = Client(self, client_id, version)
        client.connack = client.connect(Connect(client_id, version, clean, properties=properties, **more))
        return client

    def subscribe(self, peer: Peer, *wanted: tuple[str, int] | Subscription) -> None:
        """Subscribe and read the SUBACK."""
        subscriptions = tuple(w if isinstance(w, Subscription) else Subscription(*w) for w in wanted)
        peer.send(Subscribe(1, subscriptions))
        self.turn()
        assert [s for s in peer.take() if isinstance(s, Suback)]

    # -- time, and work beside that of clients

    def wait(self, seconds: float) -> None:
        """Time passes, and everything happens when it is due."""
        assert isinstance(self.loop, Turns)
        end = self.clock.now + seconds
        self.turn()
        while self.loop.later and self.loop.later[0][0] <= end:
            self.clock.now = max(self.clock.now, self.loop.later[0][0])
            self.turn()
        self.clock.now = end
        self.turn()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Something that takes as long as it takes."""
        assert isinstance(self.loop, Turns)
        task = self.loop.create_task(work)
        self.turn()
        return task

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Something that is done at once."""
        task = self.begin(work)
        assert task.done(), task
        return task.result()

    def refusal(self, work: Coroutine[Any, Any, Any]) -> str:
        """What an operator is told who asks for something that is not done."""
        try:
            self.run(work)
        except MotorcadeError as error:
            return str(error)
        raise AssertionError("nothing was refused")


class PluginNode(MemoryNode):
    """A node with a plugin. Sessions are stored at once, whatever a held store does: they have tests of their own."""

    plugin_name: ClassVar[str]

    def __init__(
        self,
        store: HeldStore | Store | None = None,
        session: SessionOptions | None = None,
        clock: Clock | None = None,
        process: int = 1,
    ) -> None:
        self.held = store if isinstance(store, HeldStore) else HeldStore()
        used = store or self.held
        super().__init__(
            session, store=used.inner if isinstance(used, HeldStore) else used, clock=clock, process=process
        )
        self.plugins = Plugins(self.broker, self.hooks, Path("unused"), self.state.shared.sources)
        self.plugins.store = used
        self.loaded: Loaded
        self.successor: Self | None = None

    @classmethod
    @contextmanager
    def on(
        cls, store: HeldStore | Store | None = None, session: SessionOptions | None = None, **config: Any
    ) -> Iterator[Self]:
        """A process with the plugin; it, or the last one that has followed it, ends with the block."""
        node = cls(store, session)
        with standing(node.clock):
            node.load(**config)
            yield node
            while node.successor is not None:
                node = node.successor
            node.stop()

    def client(
        self, client_id: str, version: int = 5, *, clean: bool = True, properties: Properties = NONE, **more: Any
    ) -> Client:
        """A client that has been let in, with what came since."""
        return self.admit(client_id, version, clean=clean, properties=properties, **more)

    def load(self, **config: Any) -> None:
        self.config = config
        self.loaded = self.run(self.plugins.load(self.plugin_name, config))

    @property
    def now(self) -> float:
        return self.clock.now

    def wait(self, seconds: float) -> None:
        """Sessions whose time is over end, too, as the broker lets them several times a second."""
        super().wait(seconds)
        assert isinstance(self.loop, Turns)
        with self.loop.running():
            for will in self.state.registry.due(self.now):
                self.broker.publish_will(will)
        self.turn()

    @property
    def counters(self) -> Any:
        return self.loaded.context.counters

    def stop(self) -> None:
        """The end of the process, in good order; nothing has raised where nobody sees it."""
        assert isinstance(self.loop, Turns)
        self.run(self.plugins.unload_all())
        self.loop.die()
        assert not self.counters["task_failed"]
        assert not sum(callback.errors for callback in self.hooks.lookup("message.publish"))
        assert not [kind for kind in self.state.shared.sources.kinds if kind.counters["failed"]]

    def restart(self, **config: Any) -> Self:
        """End in good order; the process that follows, with other options perhaps."""
        self.stop()
        return self._follow(config)

    def kill(self, written: int = 0, **config: Any) -> Self:
        """The end without another word; so many of the writes that a held store has are done."""
        assert isinstance(self.loop, Turns)
        self.loop.die()
        self.held.die(written)
        return self._follow(config)

    def _follow(self, config: dict[str, Any]) -> Self:
        store = cast("HeldStore | Store", self.plugins.store)
        node = type(self)(store, self.state.session_options, self.clock, self.process + 1)
        assert node.session_store is not None
        node.run(node.session_store.restore())
        self.successor = node
        node.load(**(config or self.config))
        return node
