"""An MQTT client that keeps to the client's side of the specification, and writes down all it sees.

It exists because the judgement "exactly once" needs a peer that is beyond doubt. paho-mqtt, which takes part as well,
publishes a QoS 2 message again after it has sent PUBREL if two connections in a row end before CONNACK (seen with
paho-mqtt 2.2.0), so that a message may be there twice with a faultless broker.

What outlives a connection is in `Memory`, which outlives the node:

    outgoing   packet id -> message and how far it is; repeated in the order in which they began [MQTT-4.6.0-1]:
               PUBLISH with DUP until PUBREC is here, from then on only PUBREL [MQTT-4.3.3-1]
    incoming   ids of QoS 2 messages that were handed on and whose PUBREL is not here yet; the same id again is the same
               message again [MQTT-4.3.3-2]

Where a broker has several nodes, a client asks before each connection which one it shall take, and may move: end its
connection, or leave it open behind it, and come back elsewhere.

Rule 1: nothing new is sent on a connection before everything old was repeated.
Rule 2: a broker that says "no session" gets a client without memory [MQTT-3.2.2-5]: all of it is forgotten here too,
        and written down as a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.judge import History, Publication, Receiver, Window
from tests.support import wire
from tests.support.wire import Address, Packet

#: Seconds between two attempts to reach a broker that is down, and until an attempt counts as failed.
RETRY = 0.03
PATIENCE = 10.0

#: Connections of a client that are left open behind it.
ABANDONED = 2

SESSION_EXPIRY = 0x11
RECEIVE_MAXIMUM = 0x21

#: DISCONNECT of a broker that means "you broke the rules", which this client does not.
ACCUSATIONS = {0x81, 0x82, 0x93, 0x94, 0x95, 0x96, 0x99, 0x9B, 0x8F, 0x90}
QUOTA_EXCEEDED = 0x97

Deliver = Callable[[Packet, int], None]


class Gone(Exception):  # noqa: N818 - a state, not a mistake
    """The connection is over."""


class NoConnackError(Gone):
    """The first packet was another one, which no broker may send."""


async def read_packet(reader: asyncio.StreamReader, version: int) -> Packet:
    """The next whole packet; `Gone` at the end of the connection, also in the middle of a packet."""
    try:
        head, body = await wire.read_frame(reader)
    except (asyncio.IncompleteReadError, OSError):
        raise Gone from None
    return wire.parse(head + body, version)


async def dial(
    address: Address, connect: bytes, version: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Packet]:
    """A connection on which CONNECT was sent and CONNACK has come."""
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                writer.write(connect)
                connack = await read_packet(reader, version)
                if connack.type != wire.CONNACK:
                    raise NoConnackError(f"{address} has sent {connack.name} ({connack.reason}) instead of CONNACK")
            except BaseException:
                writer.transport.abort()
                raise
    except (OSError, TimeoutError):
        raise Gone from None
    return reader, writer, connack


@dataclass
class Outgoing:
    """A message on its way to the broker."""

    packet_id: int
    publication: Publication
    payload: bytes
    retain: bool
    received: bool = False  #: PUBREC is here: only PUBREL may be sent from now on
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Request:
    """A SUBSCRIBE or UNSUBSCRIBE; asked again on the next connection while there is no answer."""

    window: Window
    leave: bool
    packet_id: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Memory:
    """The client's part of the session."""

    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    incoming: dict[int, bytes] = field(default_factory=dict)
    known: bool = False  #: a CONNACK has come: the broker holds the other part


class StrictClient:
    """One client with a durable session, which reconnects until it is stopped.

    `address` may be a function, which is asked before each connection. `deliver` gets every message that the
    application would get, and the number of the connection. `pause` gives the seconds to wait before each
    acknowledgement.
    """

    def __init__(
        self,
        name: str,
        address: Address | Callable[[], Address],
        history: History,
        *,
        version: int = 5,
        deliver: Deliver | None = None,
        window: int = 8,
        receive_maximum: int = 0,
        pause: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.history = history
        self.version = version
        self.place = ""  #: where the present or last connection leads
        self.deliver = deliver
        self.receive_maximum = receive_maximum
        self.pause = pause
        self.memory = Memory()
        self.windows: list[Window] = []  #: what it is subscribed to
        self.connected = asyncio.Event()
        self.connections = 0
        self.endings: Counter[int] = Counter()  #: reason codes of DISCONNECTs from the broker
        self.refusals: Counter[int] = Counter()  #: reason codes of CONNACKs that let it wait outside
        self.repeats = 0  #: QoS 2 messages that came again on the wire and were held back here
        self._requests: list[Request] = []
        self._slots = asyncio.Semaphore(window)
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._last_id = 0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._abandoned: deque[asyncio.StreamWriter] = deque()  # left open: the broker believes them to be there
        self._abandons = False  # the present connection shall become one of these
        self._unanswered: set[int] = set()  #: ids of messages that the broker still waits for, on this connection
        self._delayed: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- from outside

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        """Leave for good."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        while self._abandoned:
            self._abandoned.popleft().transport.abort()

    def check(self) -> None:
        """Raise what went wrong inside: a packet that no broker may send, or a mistake in here."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def publish(self, publication: Publication, payload: bytes, *, retain: bool = False) -> Outgoing:
        """Send when the window has room and a broker is there; `done` tells when its flow is over."""
        await self._slots.acquire()
        await self.connected.wait()
        outgoing = Outgoing(self._free_id(), publication, payload, retain)
        self.memory.outgoing[outgoing.packet_id] = outgoing
        self._send_publish(outgoing)
        return outgoing

    def publish_unacknowledged(self, publication: Publication, payload: bytes) -> bool:
        """Send at QoS 0; False if there is no connection."""
        if not self.connected.is_set():
            return False
        self._send_publish(Outgoing(0, publication, payload, retain=False))
        publication.completed = publication.sent[0]
        return True

    async def subscribe(self, receiver: Receiver | None, pattern: str, qos: int) -> Window:
        """Subscribe, in as many attempts as it takes; for `receiver` it counts from SUBACK on."""
        window = Window(pattern, qos, asked=self.history.clock())
        if receiver is not None:
            receiver.windows.append(window)
        await self._ask(Request(window, leave=False))
        return window

    async def unsubscribe(self, window: Window) -> None:
        window = next((each for each in self.windows if each.filter == window.filter), window)
        window.leaving = self.history.clock()
        await self._ask(Request(window, leave=True))

    def leave(self, *, politely: bool) -> None:
        """Disconnect, with DISCONNECT or by a reset, and stay away until `come_back`."""
        self._wanted.clear()
        if self._writer is None:
            return
        if politely and self.connected.is_set():
            self._send(wire.disconnect_packet(version=self.version))
            self._writer.close()
        else:
            self._writer.transport.abort()

    def come_back(self) -> None:
        self._wanted.set()

    @property
    def is_wanted(self) -> bool:
        """Whether it is connected, or tries to be."""
        return self._wanted.is_set()

    def abandon(self) -> None:
        """Read and write nothing more on this connection, leave it open, and make another one."""
        if self._writer is not None and self.connected.is_set():
            self._abandons = True
            self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # of all transports of streams
            self._reader.feed_eof()

    # -- connections

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            with contextlib.suppress(Gone):
                await self._connection()
            await asyncio.sleep(RETRY)

    async def _connection(self) -> None:
        properties = b""
        if self.version >= 5:
            properties = wire.prop(SESSION_EXPIRY, 86400)
            if self.receive_maximum:
                properties += wire.prop(RECEIVE_MAXIMUM, self.receive_maximum)
        connect = wire.connect_packet(self.name, version=self.version, clean=False, keepalive=0, properties=properties)
        address = self.address() if callable(self.address) else self.address
        self.place = str(address)
        try:
            reader, self._writer, connack = await dial(address, connect, self.version)
        except NoConnackError as error:
            self.history.odd("stray packet", f"{self.name}, at {self.history.clock():.3f}: {error}")
            raise
        self._reader = reader
        try:
            if connack.reason:
                self.refusals[connack.reason] += 1
                return
            self.connections += 1
            self._resume(connack.session_present)
            if self._wanted.is_set():
                async with asyncio.TaskGroup() as tasks:
                    delayed = tasks.create_task(self._send_delayed())
                    try:
                        while True:
                            self._take(await read_packet(reader, self.version))
                    finally:
                        delayed.cancel()
        except* Gone:
            pass
        finally:
            self.connected.clear()
            if self._abandons:
                self._abandons = False
                self._abandoned.append(self._writer)
                if len(self._abandoned) > ABANDONED:
                    self._abandoned.popleft().transport.abort()
            else:
                self._writer.transport.abort()
            self._writer = None

    def _resume(self, session_present: bool) -> None:
        if self.memory.known:
            self.history.reconnects += 1
            if not session_present:
                self.history.forgotten(self.name, f"{self.name}, connection {self.connections}")
                self._forget()
        self.memory.known = True
        self._unanswered.clear()
        self._delayed.clear()
        for outgoing in self.memory.outgoing.values():
            if outgoing.received:
                self._send_ack(wire.PUBREL, outgoing.packet_id)
            else:
                self._send_publish(outgoing, again=True)
        for request in self._requests:
            self._send_request(request)
        self.connected.set()

    def _forget(self) -> None:
        for outgoing in list(self.memory.outgoing.values()):
            outgoing.publication.given_up = True
            self._finish(outgoing)
        self.memory.incoming.clear()
        asked = {id(request.window) for request in self._requests}
        for window in list(self.windows):
            if id(window) not in asked:
                again = self.history.subscribes_again(window)
                if again is not window:
                    self.windows.remove(window)
                self._requests.append(Request(again, leave=False))

    # -- packets in

    def _take(self, packet: Packet) -> None:
        match packet.type:
            case wire.PUBLISH:
                self._take_publish(packet)
            case wire.PUBREL:
                assert packet.packet_id is not None
                self.memory.incoming.pop(packet.packet_id, None)
                self._answer(wire.PUBCOMP, packet.packet_id)
            case wire.PUBACK | wire.PUBREC | wire.PUBCOMP:
                self._take_answer(packet)
            case wire.SUBACK | wire.UNSUBACK:
                self._take_granted(packet)
            case wire.DISCONNECT:
                self.endings[packet.reason or 0] += 1
                if packet.reason in ACCUSATIONS:
                    self.history.odd("accused", f"{self.name} was sent away with 0x{packet.reason:02x}")
                raise Gone
            case _:
                self.history.odd("stray packet", f"{self.name} got {packet.name}")

    def _take_publish(self, packet: Packet) -> None:
        if packet.qos == 0:
            self._hand_on(packet)
            return
        assert packet.packet_id is not None
        if packet.packet_id in self._unanswered:
            self.history.odd(
                "id in use", f"{self.name} got {packet.payload[:24]!r} with id {packet.packet_id} too soon"
            )
        self._unanswered.add(packet.packet_id)
        if self.receive_maximum and len(self._unanswered) > self.receive_maximum:
            self.history.odd("receive maximum", f"{self.name} has {len(self._unanswered)} messages to answer")
        if packet.qos == 1:
            self._hand_on(packet)
            self._answer(wire.PUBACK, packet.packet_id)
            return
        known = self.memory.incoming.get(packet.packet_id)
        if known is None:
            self.memory.incoming[packet.packet_id] = packet.payload
            self._hand_on(packet)
        elif known == packet.payload:
            self.repeats += 1
        else:
            words = f"{self.name} got {packet.payload[:24]!r} with the id of {known[:24]!r}, which has no PUBREL yet"
            self.history.odd("id in use", words)
        self._answer(wire.PUBREC, packet.packet_id)

    def _hand_on(self, packet: Packet) -> None:
        if self.deliver is not None:
            self.deliver(packet, self.connections)
            self.history.happened("delivered")

    def _take_answer(self, packet: Packet) -> None:
        assert packet.packet_id is not None
        outgoing = self.memory.outgoing.get(packet.packet_id)
        expected = outgoing is not None and packet.type in (
            (wire.PUBACK,) if outgoing.publication.qos == 1 else (wire.PUBREC, wire.PUBCOMP)
        )
        if outgoing is None or not expected:
            self.history.odd("stray packet", f"{self.name} got {packet.name} {packet.packet_id} for nothing")
            return
        now, publication = self.history.clock(), outgoing.publication
        if packet.type == wire.PUBCOMP:
            if not outgoing.received:
                self.history.odd("stray packet", f"{self.name} got PUBCOMP before PUBREC for {publication.name}")
            publication.completed = now
            self._finish(outgoing)
        elif (packet.reason or 0) >= 0x80:
            publication.refused = packet.reason or 0
            if packet.reason != QUOTA_EXCEEDED:
                self.history.odd("refused", f"{publication.name} with 0x{packet.reason:02x}")
            self._finish(outgoing)
        elif packet.type == wire.PUBACK:
            publication.acknowledged = publication.completed = now
            self._finish(outgoing)
        else:
            publication.acknowledged = min(publication.acknowledged, now)
            outgoing.received = True
            self._send_ack(wire.PUBREL, outgoing.packet_id)
        self.history.happened("answered")

    def _finish(self, outgoing: Outgoing) -> None:
        del self.memory.outgoing[outgoing.packet_id]
        self._slots.release()
        outgoing.done.set()

    def _take_granted(self, packet: Packet) -> None:
        request = next((request for request in self._requests if request.packet_id == packet.packet_id), None)
        if request is None:
            self.history.odd("stray packet", f"{self.name} got {packet.name} {packet.packet_id} for nothing")
            return
        if any(reason >= 0x80 for reason in packet.reasons):
            self.history.odd("refused", f"{self.name}: {packet.name} {request.window.filter} {packet.reasons}")
        self._requests.remove(request)
        if request.leave:
            request.window.left = self.history.clock()
            if request.window in self.windows:
                self.windows.remove(request.window)
        elif request.window not in self.windows:
            request.window.granted = self.history.clock()
            self.windows.append(request.window)
        request.done.set()

    # -- packets out

    async def _ask(self, request: Request) -> None:
        self._requests.append(request)
        if self.connected.is_set():
            self._send_request(request)
        await request.done.wait()

    def _send_request(self, request: Request) -> None:
        request.packet_id, window = self._free_id(), request.window
        if request.leave:
            self._send(wire.unsubscribe_packet(request.packet_id, [window.filter], version=self.version))
        else:
            filters = [(window.filter, window.qos)]
            self._send(wire.subscribe_packet(request.packet_id, filters, version=self.version))

    def _free_id(self) -> int:
        taken = self.memory.outgoing.keys() | {request.packet_id for request in self._requests}
        while True:
            self._last_id = self._last_id % 65535 + 1
            if self._last_id not in taken:
                return self._last_id

    def _send_publish(self, outgoing: Outgoing, *, again: bool = False) -> None:
        publication = outgoing.publication
        publication.sent.append(self.history.clock())
        publication.through.append(self.place)
        self._send(
            wire.publish_packet(
                publication.topic,
                outgoing.payload,
                version=self.version,
                qos=publication.qos,
                packet_id=outgoing.packet_id or None,
                retain=outgoing.retain,
                dup=again,
            )
        )

    def _answer(self, kind: int, packet_id: int) -> None:
        """Acknowledge, now or after a pause; in the order in which the messages came [MQTT-4.6.0-2]."""
        if self.pause is None:
            self._send_ack(kind, packet_id)
            self._answered(kind, packet_id)
        else:
            self._delayed.append(bytes([kind]) + packet_id.to_bytes(2, "big"))
            self._more.set()

    async def _send_delayed(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._delayed and self.pause is not None:
                await asyncio.sleep(self.pause())
                item = self._delayed.popleft()
                kind, packet_id = item[0], int.from_bytes(item[1:], "big")
                self._send_ack(kind, packet_id)
                self._answered(kind, packet_id)

    def _answered(self, kind: int, packet_id: int) -> None:
        if kind in {wire.PUBACK, wire.PUBCOMP}:
            self._unanswered.discard(packet_id)

    def _send_ack(self, kind: int, packet_id: int) -> None:
        self._send(wire.ack_packet(kind, packet_id, version=self.version))

    def _send(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)
