"""A whole broker in one event loop, without sockets: connections whose other end is this file.

    Rig  ── BrokerState, Broker, retained plugin, one fast and one observed flavour
     └─ Peer ── FakeTransport ◀──▶ motorcade.broker.connection.Connection

The peer takes apart whatever the broker writes with the tests' own reader (`tests.support.wire`), which shares no line
with the broker's codec: what it cannot read is a finding.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, time
from typing import Any
from unittest.mock import patch

import structlog

from motorcade.broker import broker as broker_module
from motorcade.broker import connection as broker_connection
from motorcade.broker import fastpath
from motorcade.broker.broker import Broker
from motorcade.broker.channel import Channel
from motorcade.broker.connection import SUSPENDED, Connection
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.session import Session
from motorcade.broker.state import BrokerOptions, BrokerState
from motorcade.broker.websocket import WebSocketProtocol
from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.guid import GuidFactory
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import POINTS, Allow, Callback, Challenge, Continue, Deny, Handled, Hooks, Stop
from motorcade.extension.plugin import Plugins
from tests.support import wire


class Clock:
    """The time of day of all brokers: it stands still during a conversation, so that what expires does so on all."""

    def __init__(self) -> None:
        self.now = time()

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now = time()


CLOCK = Clock()


@contextmanager
def laboratory() -> Iterator[None]:
    """Brokers made in here read `CLOCK`; everything that rigs change in this process is put back in the end."""
    with ExitStack() as stack:
        for module in (broker_connection, broker_module, fastpath):
            stack.enter_context(patch.object(module, "time", CLOCK))
        # A timer holds a closed connection so long; fake sockets are never slow.
        stack.enter_context(patch.object(broker_connection, "CLOSE_GRACE", 0.0))
        stack.enter_context(warnings.catch_warnings())
        stack.callback(structlog.reset_defaults)
        stack.callback(logging.getLogger("motorcade").handlers.clear)
        yield


#: Rates are off: a fuzzer connects thousands of times per second from one address, often under the same client id.
LIMITS = Limits(
    connect_rate=0.0,
    message_rate=0.0,
    flapping_count=0,
    max_packet_size=64 * 1024,
    max_connect_size=4096,
    max_filters=16,
)
SESSION = SessionOptions(
    window=4, queue=8, queue_bytes=64 * 1024, patience=0.001, max_awaiting_rel=8, max_subscriptions=32
)

#: Loop turns in which everything that was set off must have come to rest.
TURNS = 5000

#: Seconds until the last object of a connection that is closed must be gone.
LONGEST_GRACE = 30.0

WITNESS = "witness-7f1d0c3a"


class Finding(AssertionError):  # noqa: N818 - what a fuzzer has
    """The broker did what it must not do."""


class FakeTransport(asyncio.Transport):
    """The broker's side of a connection; hands what is written to `taken`."""

    def __init__(self, protocol: asyncio.Protocol, taken: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 40000)})
        self._protocol = protocol
        self._taken = taken
        self.closing = False
        self.reading = True

    def write(self, data: Any) -> None:
        if not self.closing:
            self._taken(bytes(data))

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Peer:
    """The client's side of a connection: sends bytes, reads packets, may acknowledge what it gets."""

    LISTENER = "tls"  #: "tcp" would write to a socket past the transport

    def __init__(self, broker: Broker, *, polite: bool = False) -> None:
        self.connection = Connection(broker, self.LISTENER)
        self.protocol = self._protocol(broker)
        self.transport = FakeTransport(self.protocol, self._take)
        self.polite = polite  #: acknowledges QoS 1 and 2 by itself
        self.packets: list[wire.Packet] = []
        self.unsent: list[bytes] = []
        self._buffer = bytearray()
        self._version = 0
        self._max_packet = 0
        self._full = False
        self.protocol.connection_made(self.transport)

    def _protocol(self, broker: Broker) -> asyncio.Protocol:
        """What the transport hands bytes to."""
        return self.connection

    # -- what the client does

    def send(self, data: bytes) -> None:
        """Hand bytes to the broker, as soon as it reads."""
        self.unsent.append(data)
        self.deliver()

    def deliver(self) -> None:
        """Hand over what waits while the broker reads."""
        while self.unsent and self.transport.reading and not self.transport.closing:
            self.protocol.data_received(self.unsent.pop(0))

    def hang_up(self, how: str) -> None:
        """End the connection from the client's side."""
        if self.transport.closing:
            return
        if how == "half":
            if not self.protocol.eof_received():
                self.transport.close()
            return
        self.transport.closing = True
        error = ConnectionResetError() if how == "reset" else None
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def fill(self) -> None:
        """The client stops reading."""
        if not self._full and not self.transport.closing:
            self._full = True
            self.protocol.pause_writing()

    def drain(self) -> None:
        """The client reads again."""
        if self._full and not self.transport.closing:
            self._full = False
            self.protocol.resume_writing()

    @property
    def suspended(self) -> bool:
        """Whether the connection lives and waits for a plugin."""
        return bool(self.connection.pauses & SUSPENDED) and self.connection.transport is not None

    # -- what the broker wrote

    def _take(self, data: bytes) -> None:
        session = self.connection.session
        if session is not None and not self._max_packet:
            self._max_packet = session.max_packet
        self._buffer += data

    def read(self) -> list[wire.Packet]:
        """Packets that have come since the last call."""
        found: list[wire.Packet] = []
        while self._buffer:
            raw = self._next()
            packet = self._parsed(raw)
            self._check_order(packet)
            self.packets.append(packet)
            found.append(packet)
            if self.polite:
                self._acknowledge(packet)
        return found

    def _next(self) -> bytes:
        length = wire.whole(self._buffer)
        if not length:
            raise Finding(f"the broker stopped inside a packet: {bytes(self._buffer[:64]).hex(' ')}")
        raw = bytes(self._buffer[:length])
        del self._buffer[:length]
        return raw

    def _parsed(self, raw: bytes) -> wire.Packet:
        if raw[0] >> 4 == wire.CONNACK and len(raw) == 4:
            self._version = 4
        elif raw[0] >> 4 in (wire.CONNACK, wire.AUTH):
            self._version = 5
        try:
            packet = wire.parse(raw, self._version)
        except (AssertionError, UnicodeDecodeError) as error:
            raise Finding(f"the broker wrote a packet that cannot be read: {error}") from error
        if self._max_packet and self._version == 5 and len(raw) > self._max_packet:
            raise Finding(f"{packet.name} of {len(raw)} bytes, the client takes {self._max_packet}")
        return packet

    def _check_order(self, packet: wire.Packet) -> None:
        before = self.packets
        if not before and packet.type not in (wire.CONNACK, wire.AUTH):
            raise Finding(f"{packet.name} before CONNACK")
        if before and before[-1].type == wire.DISCONNECT:
            raise Finding(f"{packet.name} after DISCONNECT")
        if packet.type == wire.CONNACK and any(p.type == wire.CONNACK for p in before):
            raise Finding("a second CONNACK")
        if packet.type == wire.PUBLISH and packet.qos == 3:
            raise Finding("QoS 3 from the broker")

    def _acknowledge(self, packet: wire.Packet) -> None:
        number = packet.packet_id or 0
        if packet.type == wire.PUBLISH and packet.qos:
            self.send(wire.ack_packet(wire.PUBACK if packet.qos == 1 else wire.PUBREC, number, version=self._version))
        elif packet.type == wire.PUBREL:
            self.send(wire.ack_packet(wire.PUBCOMP, number, version=self._version))
        elif packet.type == wire.PUBREC and (packet.reason or 0) < 0x80:
            self.send(wire.ack_packet(wire.PUBREL, number, version=self._version))


class WebSocketPeer(Peer):
    """A client that speaks HTTP and frames: what it is told to send are the bytes of the TCP stream."""

    LISTENER = "ws"

    def __init__(self, broker: Broker) -> None:
        self._stream = bytearray()
        self._upgraded = False
        super().__init__(broker)

    def _protocol(self, broker: Broker) -> asyncio.Protocol:
        return WebSocketProtocol(lambda: self.connection, "/mqtt", (), broker.state.limits.max_packet_size, broker.loop)

    def _take(self, data: bytes) -> None:
        self._stream += data
        if not self._upgraded:
            head, end, rest = bytes(self._stream).partition(b"\r\n\r\n")
            if not end or not head.startswith(b"HTTP/1.1 101 "):
                return
            self._upgraded = True
            self._stream = bytearray(rest)
        while frame := self._frame():
            opcode, payload = frame
            if opcode == 2:
                super()._take(payload)

    def _frame(self) -> tuple[int, bytes] | None:
        """The next frame of the node, if it is all there: (opcode, payload)."""
        stream = self._stream
        if len(stream) < 2:
            return None
        size, start = stream[1], 2
        if size > 127 or stream[0] & 0x70:
            raise Finding(
                f"the broker wrote a frame that is masked or has reserved bits: {bytes(stream[:16]).hex(' ')}"
            )
        if size > 125:
            start = 4 if size == 126 else 10
            size = int.from_bytes(stream[2:start], "big")
        if len(stream) < start + size:
            return None
        frame = stream[0] & 15, bytes(stream[start : start + size])
        del stream[: start + size]
        return frame


class Errors(logging.Handler):
    """Everything that the broker logs as an error of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))

    def __call__(self, _logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """As a structlog processor."""
        if method in ("error", "exception", "critical"):
            error = event.get("exc_info")
            formatted = structlog.processors.format_exc_info(None, method, dict(event)) if error else event
            self.seen.append(str(formatted))
        raise structlog.DropEvent


class Rig:
    """One broker. `observed` makes it hand every packet to the channel instead of the fast path; `hooked` adds plugins'
    work: access rules that wait, enhanced authentication, a publish hook that waits, refuses or rewrites."""

    def __init__(self, *, observed: bool = False, hooked: bool = False) -> None:
        self.errors = Errors()
        self.use()
        self.hooks = Hooks()
        guids = GuidFactory("fuzz", 1)
        self.state = BrokerState(BrokerOptions(node="fuzz"), SESSION, LIMITS, self.hooks, guids, CLOCK())
        self.broker = Broker(self.state, asyncio.get_running_loop())
        self.plugins = Plugins(self.broker, self.hooks, Path(), self.broker.state.shared.sources)
        self._observed = observed
        self._hooked = hooked
        self._said = 0

    def use(self) -> None:
        """Errors that are logged or escape from now on are this broker's."""
        structlog.configure(processors=[self.errors], cache_logger_on_first_use=False)
        logging.getLogger("motorcade").handlers[:] = [self.errors]
        asyncio.get_running_loop().set_exception_handler(self._escaped)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = self._warned  # type: ignore[assignment]  # it needs the first argument only

    async def start(self) -> None:
        await self.plugins.load("retained", {"max_messages": 64, "max_bytes": 1024 * 1024})
        if self._observed:
            for name, kind in POINTS.items():
                if not kind.fold:
                    self.hooks.add(name, Callback(lambda *_: None, 0, "fuzz"))
        if self._hooked:
            for point, function in (
                ("client.authenticate", _authenticate),
                ("client.authorize", _authorize),
                ("message.publish", _publish),
                ("message.nack", _nack),
                ("client.subscribe", _subscribe),
                ("client.unsubscribe", _unsubscribe),
            ):
                self.hooks.add(point, Callback(function, 0, "fuzz"))
        self.subscriber = Peer(self.broker, polite=True)
        self.publisher = Peer(self.broker, polite=True)
        self.subscriber.send(
            wire.connect_packet(f"{WITNESS}-sub", keepalive=0) + wire.subscribe_packet(1, [(WITNESS, 1)])
        )
        self.publisher.send(wire.connect_packet(f"{WITNESS}-pub", version=4, keepalive=0))
        await self.settle([self.subscriber, self.publisher])
        self._subscriptions = self.state.pubsub.subscriptions
        self.check_witness()

    async def stop(self) -> None:
        for peer in (self.subscriber, self.publisher):
            peer.hang_up("close")
        await self.settle([])
        await self.plugins.unload_all()

    def _escaped(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.seen.append(f"escaped into the event loop: {context!r}")

    def _warned(self, message: Warning | str, *_details: object) -> None:
        self.errors.seen.append(f"warning: {message}")  # a coroutine that nobody waited for, for one

    # -- running

    async def settle(self, peers: list[Peer]) -> None:
        """Let the loop turn until nothing happens any more."""
        quiet = 0
        for _ in range(TURNS):
            await asyncio.sleep(0)
            busy = False
            for peer in (*peers, self.subscriber, self.publisher):
                busy |= bool(peer.read())
                if peer.transport.closing:
                    peer.unsent.clear()
                elif peer.unsent and peer.transport.reading:
                    peer.deliver()
                    busy = True
            busy |= bool(self.state.shared.dirty or self.broker._publishing)
            busy |= any(peer.suspended for peer in peers)
            quiet = 0 if busy else quiet + 1
            if quiet == 2:
                break
        else:
            dirty, wills = len(self.state.shared.dirty), len(self.broker._publishing)
            waiting = sum(peer.suspended for peer in peers)
            what = f"{dirty} windows unwritten, {wills} wills unpublished, {waiting} connections suspended"
            raise Finding(f"the broker does not come to rest within {TURNS} turns of the loop: {what}")
        if self.errors.seen:
            raise Finding("\n".join(self.errors.seen))

    def look(self, peer: Peer, seconds: float) -> None:
        """The periodic look at one connection, as if some seconds had gone by."""
        self.broker._look_at(peer.connection, monotonic() + seconds, CLOCK() + seconds)

    def expire(self, seconds: float) -> None:
        """Wills and sessions that are due some seconds from now."""
        for will in self.state.registry.due(CLOCK() + seconds):
            self.broker.publish_will(will)

    # -- invariants

    def check_witness(self) -> None:
        """An honest message still goes through (the caller lets the loop turn before and after)."""
        self._said += 1
        self.publisher.send(wire.publish_packet(WITNESS, b"%d" % self._said, version=4, qos=1, packet_id=1))

    async def after_case(self, peers: list[Peer]) -> None:
        """Everybody of the case is gone: only what may outlive a connection is left, and then nothing."""
        for peer in peers:
            peer.hang_up("close")
        await self.settle(peers)
        self.check_witness()
        await self.settle([])
        wanted = b"%d" % self._said
        if not any(p.type == wire.PUBLISH and p.payload == wanted for p in self.subscriber.packets):
            raise Finding("the witness did not get its message")
        self.subscriber.packets = self.subscriber.packets[:1]
        self.publisher.packets = self.publisher.packets[:1]
        self._check_tables()
        self._clear()
        await self.settle([])
        self._check_empty()

    def _check_tables(self) -> None:
        state = self.state
        registry = state.registry
        if state.connections != 2 or len(self.broker.connections) != 2 or registry.connected != 2:
            counts = (state.connections, len(self.broker.connections), registry.connected)
            raise Finding(f"connections leaked: {counts}")
        for name, session in registry.sessions.items():
            if session.link is None and not session.expiry:
                raise Finding(f"session {name!r} outlived its connection")
            if len(session.subscriptions) > SESSION.max_subscriptions:
                raise Finding(f"session {name!r} has {len(session.subscriptions)} subscriptions")
            self._check_session(name, session)

    def _check_session(self, name: str, session: Session) -> None:
        queue = session.queue or ()
        if len(queue) > SESSION.queue or len(session.inflight) > 65535 or len(session.awaiting or ()) > 8:
            raise Finding(f"session {name!r} is over its bounds")
        size = sum(len(head) + len(tail) for head, tail, _ in queue)
        if session.queue is not None and size != session.queue.size:
            raise Finding(f"session {name!r} counts {session.queue.size} queued bytes, it has {size}")
        if session.queue is not None and sum(1 for frame in queue if not frame[0][0] & 6) != session.queue.qos0:
            raise Finding(f"session {name!r} counts {session.queue.qos0} queued QoS 0 messages")

    def _clear(self) -> None:
        registry = self.state.registry
        for name in [n for n in registry.sessions if not n.startswith(WITNESS)]:
            for will in registry.end(name, CLOCK()):
                self.broker.publish_will(will)
        self.expire(1e9)

    def _check_empty(self) -> None:
        state = self.state
        if len(state.registry.sessions) != 2:
            raise Finding(f"sessions leaked: {sorted(state.registry.sessions)}")
        if state.pubsub.subscriptions != self._subscriptions or state.pubsub.shared_subscriptions:
            raise Finding(f"subscriptions leaked: {state.pubsub.subscriptions}, {state.pubsub.shared_subscriptions}")
        if state.registry._timers:
            raise Finding(f"timers leaked: {len(state.registry._timers)}")


def count_objects() -> dict[type, int]:
    """How many of the objects that come and go with connections are alive."""
    gc.collect()
    things = gc.get_objects()
    return {kind: sum(1 for thing in things if type(thing) is kind) for kind in (Connection, Channel, Session)}


async def check_objects(before: dict[type, int]) -> None:
    """Objects of connections that are gone are gone too; there are no more than `before`."""
    end = monotonic() + LONGEST_GRACE
    while True:
        await asyncio.sleep(0.1)  # the grace of closing connections, which `Rig` has made short
        alive = count_objects()
        leaked = [kind for kind in alive if alive[kind] > before[kind]]
        if not leaked:
            return
        if monotonic() > end:
            kind = leaked[0]
            raise Finding(f"{alive[kind]} objects of {kind.__name__} are alive, {before[kind]} are in use")


# -- what plugins do: each answer depends on bytes that the fuzzer can reach


async def _authenticate(client: ClientInfo, credentials: Credentials, _acc: object) -> Stop | None:
    await asyncio.sleep(0)
    if credentials.method == "steps":
        return Stop(Allow(data=b"done")) if credentials.data == b"2" else Stop(Challenge(b"1"))
    if client.username == "mallory":
        return Stop(Deny())
    return Stop(Allow(superuser=client.client_id.startswith(WITNESS)))


async def _authorize(_client: ClientInfo, _action: str, topic: str, _acc: object) -> Stop | None:
    await asyncio.sleep(0)
    return Stop(not topic.startswith("forbidden"))


def _publish(_client: ClientInfo | None, message: Message) -> Any:
    if message.topic.startswith("wait"):
        return _publish_later(message)
    if message.topic.startswith("refuse"):
        return Stop(Handled(_verdict(message), "no"))
    if message.topic.startswith("rewrite"):
        return Continue(_moved(message))
    return None


def _nack(_client: ClientInfo, message: Message, _acc: bool) -> Stop | None:
    return Stop(True) if message.topic.startswith("back") else None


async def _subscribe(_client: ClientInfo, _pairs: object, wanted: list[Subscription | ReasonCode]) -> Continue:
    await asyncio.sleep(0)
    return Continue([_judged(item) for item in wanted])


def _judged(item: Subscription | ReasonCode) -> Subscription | ReasonCode:
    if isinstance(item, Subscription) and item.filter.startswith("swap"):
        return replace(item, filter="swapped/#", qos=0) if item.qos else ReasonCode.NOT_AUTHORIZED
    return item


def _unsubscribe(_client: ClientInfo, _pairs: object, filters: list[str]) -> Continue:
    return Continue(["swapped/#" if text.startswith("swap") else text for text in filters])


async def _publish_later(message: Message) -> Continue:
    await asyncio.sleep(0)
    return Continue(message)


def _verdict(message: Message) -> ReasonCode:
    return ReasonCode.QUOTA_EXCEEDED if message.payload else ReasonCode.SUCCESS


def _moved(message: Message) -> Message:
    return replace(message, topic=message.payload.decode("utf-8", "replace") or "moved")
