"""Clients of the model: they keep to the rules of MQTT 5, and write down what they say and hear.

Publication   a message, when it was sent, by which members, and what its publisher was told
Life          a session as its client knows it: subscriptions, and what came by them
ModelClient   one device; it has one connection at a time, but may leave one behind that its member takes for open
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import NONE, Properties
from tests.support.cluster_world import ClientWire, ClusterWorld, Host, HostNode

EXPIRY: Final = 86_400  #: seconds that a durable session lasts
NEVER: Final = math.inf
MAX_OPEN: Final = 12  #: publications that a client has open


@dataclass(eq=False)
class Publication:
    """A message, as its publisher knows it."""

    publisher: str
    number: int
    topic: str
    qos: int
    retain: bool
    sent: list[float] = field(default_factory=list)
    through: list[HostNode] = field(default_factory=list)  #: incarnations that it was sent to
    acknowledged: float = NEVER
    refused: int = 0  #: reason code
    given_up: bool = False  #: its publisher does not know what became of it, and will not ask again

    @property
    def name(self) -> bytes:
        return f"{self.publisher}.{self.number}".encode()

    def __repr__(self) -> str:
        told = f"acknowledged {self.acknowledged:.3f}" if self.acknowledged < NEVER else "not acknowledged"
        through = [node.id for node in self.through]
        sent = [round(at, 3) for at in self.sent]
        return f"{self.name.decode()} ({self.topic}, QoS {self.qos}, sent {sent} by {through}, {told})"


@dataclass(eq=False)
class Window:
    """A subscription, while it is one."""

    filter: str
    qos: int
    asked: float
    granted: float = NEVER
    leaving: float = NEVER


@dataclass(eq=False)
class Arrival:
    """A delivery."""

    name: bytes
    qos: int
    at: float
    node: HostNode
    retained: bool


@dataclass(eq=False)
class Life:
    """A session, as its client knows it."""

    client: str
    durable: bool
    since: float
    windows: list[Window] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    unreleased: set[int] = field(default_factory=set)  #: ids of QoS 2 messages that have come
    established: bool = False  #: CONNACK has come
    ended: float = NEVER

    def window_of(self, publication: Publication) -> Window | None:
        """Return a subscription by which a publication is owed."""
        if publication.acknowledged == NEVER or not publication.qos:
            return None
        for window in self.windows:
            if (
                window.granted < publication.sent[0]
                and publication.acknowledged < min(window.leaving, self.ended)
                and window.qos
                and matches(window.filter, publication.topic)
            ):
                return window
        return None


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


class ModelClient:
    """One device."""

    def __init__(self, name: str, world: ClusterWorld, publications: dict[bytes, Publication]) -> None:
        self.name = name
        self.world = world
        self.publications = publications
        self.lives: list[Life] = []
        self.life: Life | None = None
        self.wire: ClientWire | None = None
        self.node: HostNode | None = None
        self.on = False  #: CONNACK has come
        self.durable = False  #: its session outlives this connection
        self.answers = True  #: it acknowledges at once
        self.todo: list[Packet] = []  #: what it has not acknowledged
        self.open: dict[int, Publication] = {}  #: by packet id, in the order of sending
        self.released: set[int] = set()  #: of these, those whose PUBREC has come
        self.pending: dict[int, tuple[str, list[Window]]] = {}  #: SUBSCRIBE and UNSUBSCRIBE without an answer
        self.refusals: list[int] = []  #: reasons of CONNACKs that were errors
        self._decoder = codec.Decoder(5)
        self._clean = False
        self._next = 0
        self._count = 0

    # -- the connection

    def connect(self, host: Host, *, durable: bool, clean: bool = False, will: bool = False) -> bool:
        """Come to a member, whatever became of the connection before; False if it takes no clients."""
        node = host.node
        if node is None or not node.listens:
            return False
        self._forget_connection()
        clean = clean or not durable
        if self.life is not None and (clean or not self.life.durable):
            self.end_life()
        if self.life is None:
            self.life = Life(self.name, durable, self.world.now)
            self.lives.append(self.life)
        self._clean, self.durable, self.node = clean, durable, node
        self._decoder = codec.Decoder(5)
        wire: list[ClientWire] = []
        made = node.connect(lambda data: self._heard(wire[0], data), lambda: self._ended(wire[0]))
        assert made is not None
        wire.append(made)
        self.wire = made
        properties = Properties(session_expiry=EXPIRY) if durable else NONE
        last = Will(f"w/{self.name}", b"will", 1) if will else None
        self._send(Connect(self.name, 5, clean, will=last, properties=properties))
        return True

    def end_life(self) -> None:
        """Its session ends, with all that its client was waiting for."""
        if self.life is not None:
            self.life.ended = min(self.life.ended, self.world.now)
            self.life = None
        for publication in self.open.values():
            publication.given_up = True
        self.open.clear()
        self.released.clear()

    def _forget_connection(self) -> None:
        self.wire = None
        self.on = False
        self.todo.clear()
        self.pending.clear()
        if self.life is not None and not self.life.durable:
            self.end_life()

    def _ended(self, wire: ClientWire) -> None:
        if wire is self.wire:
            self._forget_connection()

    def disconnect(self) -> None:
        if self.wire is not None:
            wire = self.wire
            self._send(Disconnect())
            self._forget_connection()
            wire.leave()

    def break_off(self) -> None:
        """The connection is gone, and its member hears of it."""
        if self.wire is not None:
            wire = self.wire
            self._forget_connection()
            wire.leave()

    def walk_away(self) -> None:
        """The connection is gone, and its member hears nothing of it."""
        if self.wire is not None:
            wire = self.wire
            self._forget_connection()
            wire.broken = True

    def _send(self, *packets: Packet) -> None:
        assert self.wire is not None
        self.wire.send(b"".join(codec.encode(packet, 5) for packet in packets))

    # -- what it asks for

    @property
    def ready(self) -> bool:
        return self.wire is not None and self.on

    def _id(self) -> int:
        while True:
            self._next = self._next % 500 + 1
            if self._next not in self.open and self._next not in self.pending:
                return self._next

    def subscribe(self, filter_: str, qos: int) -> Window | None:
        if not self.ready or self.life is None:
            return None
        number = self._id()
        window = Window(filter_, qos, self.world.now)
        self.life.windows.append(window)
        self.pending[number] = filter_, [window]
        self._send(Subscribe(number, (Subscription(filter_, qos),)))
        return window

    def unsubscribe(self, filter_: str) -> None:
        if not self.ready or self.life is None:
            return
        number = self._id()
        for window in self.life.windows:
            if window.filter == filter_:
                window.leaving = min(window.leaving, self.world.now)
        self.pending[number] = filter_, []
        self._send(Unsubscribe(number, (filter_,)))

    def publish(self, topic: str, qos: int, *, retain: bool = False) -> Publication | None:
        if not self.ready or len(self.open) >= MAX_OPEN:
            return None
        self._count += 1
        publication = Publication(self.name, self._count, topic, qos, retain)
        self.publications[publication.name] = publication
        number = self._id() if qos else 0
        if qos:
            self.open[number] = publication
        self._send(self._packet(number, publication))
        return publication

    def _packet(self, number: int, publication: Publication, *, dup: bool = False) -> Publish:
        assert self.node is not None
        publication.sent.append(self.world.now)
        publication.through.append(self.node)
        return Publish(
            publication.topic,
            publication.name,
            publication.qos,
            retain=publication.retain,
            dup=dup,
            packet_id=number,
        )

    def acknowledge(self, count: int = 1_000_000) -> None:
        """Answer what has come, the oldest first."""
        for packet in self.todo[:count]:
            if self.wire is not None:
                self._send(packet)
        del self.todo[:count]

    # -- what it hears

    def _heard(self, wire: ClientWire, data: bytes) -> None:
        for packet in self._decoder.feed(data) if wire is self.wire else ():
            if wire is self.wire:
                self._take(packet)

    def _take(self, packet: Packet) -> None:
        handlers: dict[type[Packet], Callable[[Any], None]] = {
            Connack: self._connected,
            Suback: self._granted,
            Unsuback: self._unsubscribed,
            Puback: self._answered,
            Pubrec: self._received,
            Pubcomp: self._completed,
            Publish: self._message,
            Pubrel: self._release,
        }
        handler = handlers.get(type(packet))
        if handler is not None:
            handler(packet)

    def _connected(self, packet: Connack) -> None:
        if packet.reason >= 0x80:
            self.refusals.append(int(packet.reason))
            return
        self.on = True
        life = self.life
        assert life is not None
        if not packet.session_present:
            if life.established and not self._clean:
                self._session_forgotten(life)
                self.end_life()
                life = self.life = Life(self.name, self.durable, self.world.now)
                self.lives.append(life)
            for publication in self.open.values():
                publication.given_up = True
            self.open.clear()
            self.released.clear()
        elif self._clean:
            raise BrokenPromiseError(f"{self.name} began clean, and a session was there")
        life.established = True
        for number, publication in list(self.open.items()):
            if number in self.released:
                self._send(Pubrel(number))
            else:
                self._send(self._packet(number, publication, dup=True))

    def _session_forgotten(self, life: Life) -> None:
        home = "client:" + self.name
        if not any(lapse.concerns(home) for lapse in self.world.cells.lapses):
            raise BrokenPromiseError(
                f"the session of {self.name}, which began at {life.since:.3f}, is gone at {self.world.now:.3f}"
            )

    def _granted(self, packet: Suback) -> None:
        _, windows = self.pending.pop(packet.packet_id)
        for window in windows:
            if packet.reasons[0] <= 2:
                window.granted = self.world.now
            elif self.life is not None and window in self.life.windows:
                self.life.windows.remove(window)

    def _unsubscribed(self, packet: Unsuback) -> None:
        self.pending.pop(packet.packet_id)

    def _settle(self, number: int, reason: ReasonCode) -> None:
        publication = self.open.get(number)
        if publication is None:
            return
        if reason >= 0x80:
            publication.refused = int(reason)
            del self.open[number]
        elif publication.acknowledged == NEVER:
            publication.acknowledged = self.world.now

    def _answered(self, packet: Puback) -> None:
        self._settle(packet.packet_id, packet.reason)
        self.open.pop(packet.packet_id, None)

    def _received(self, packet: Pubrec) -> None:
        self._settle(packet.packet_id, packet.reason)
        if packet.reason < 0x80:
            self.released.add(packet.packet_id)
            self._send(Pubrel(packet.packet_id))

    def _completed(self, packet: Pubcomp) -> None:
        self.open.pop(packet.packet_id, None)
        self.released.discard(packet.packet_id)

    def _message(self, packet: Publish) -> None:
        life, number = self.life, packet.packet_id
        assert life is not None and self.node is not None
        again = packet.qos == 2 and number in life.unreleased
        if not again:
            arrival = Arrival(bytes(packet.payload), packet.qos, self.world.now, self.node, packet.retain)
            life.arrivals.append(arrival)
        if packet.qos == 1:
            self._answer(Puback(number))
        elif packet.qos == 2:
            life.unreleased.add(number)
            self._answer(Pubrec(number))

    def _release(self, packet: Pubrel) -> None:
        if self.life is not None:
            self.life.unreleased.discard(packet.packet_id)
        self._answer(Pubcomp(packet.packet_id))

    def _answer(self, packet: Packet) -> None:
        if self.answers:
            self._send(packet)
        else:
            self.todo.append(packet)
