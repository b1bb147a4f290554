"""Producers and consumers of compacted queues that go on across all deaths of the node.

A producer never publishes a value again: what had no answer when the connection was lost may be there or not, and the
next value of its key is newer in any case. A consumer comes and goes, with new sessions and with lasting ones, says
goodbye or does not, acknowledges at once, late, in any order, refuses some, and goes back now and then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

from tests.chaos.client import Gone, dial, read_packet
from tests.chaos.ecq_judge import Delivery, Place, Publication, Story, Visit
from tests.support import wire
from tests.support.compacted import FORMS
from tests.support.flows import RECEIVE_MAXIMUM, SESSION_EXPIRY, USER_PROPERTY
from tests.support.wire import Address, Packet

LATE = 15.0  #: seconds for which a rewind without an answer may still be carried out, on another connection
RETRY = 0.03  #: seconds between two attempts to reach a node that is down
IN_FLIGHT = 16  #: of a producer
KEYS = 12  #: of a producer in each queue
REFUSED = 0x83


def _at(address: Address | Callable[[], Address]) -> Address:
    return address() if callable(address) else address


class Producer:
    """Publishes until it is told to end, then waits for the last answer.

    `address` may be a function, which is asked before each connection.
    """

    def __init__(
        self,
        number: int,
        address: Address | Callable[[], Address],
        places: Sequence[Place],
        random: Random,
        rate: float,
    ) -> None:
        self.publications: list[Publication] = []
        self.happened: Callable[[], None] = lambda: None  #: an answer has come
        self.flowing = asyncio.Event()  #: else it publishes nothing new
        self.flowing.set()
        self.ending = asyncio.Event()
        self._name = f"producer-{number}"
        self._version = 4 + number % 2
        self._address = address
        self._places = places
        self._random = random
        self._rate = rate
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Connect again and again."""
        while not self.ending.is_set():
            try:
                await self._connection()
            except Gone:
                await asyncio.sleep(RETRY)

    def move(self) -> None:
        """Break the connection: what has no answer may be there or not."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _connection(self) -> None:
        connect = wire.connect_packet(self._name, version=self._version, keepalive=0)
        reader, writer, connack = await dial(_at(self._address), connect, self._version)
        self._writer = writer
        waiting: dict[int, Publication] = {}
        try:
            if connack.reason:
                raise Gone
            publishing = asyncio.create_task(self._publish(writer, waiting))
            try:
                while not (publishing.done() and not waiting):
                    self._heard(await read_packet(reader, self._version), waiting)
            finally:
                publishing.cancel()
        finally:
            writer.transport.abort()

    async def _publish(self, writer: asyncio.StreamWriter, waiting: dict[int, Publication]) -> None:
        number = 0
        while not writer.is_closing():
            await self.flowing.wait()
            if len(waiting) < IN_FLIGHT:
                number += 1
                place = self._random.choice(self._places)
                key = f"{self._name}/{self._random.randrange(KEYS)}"
                publication = Publication(place, key, len(self.publications), sent=time.monotonic())
                self.publications.append(publication)
                waiting[number % 60_000 + 1] = publication
                payload = b"%d %s" % (publication.value, b"x" * self._random.choice((0, 50, 1500)))
                topic = f"{FORMS[place.kind][0]}/w/{place.name}/{key}"
                writer.write(
                    wire.publish_packet(topic, payload, version=self._version, qos=1, packet_id=number % 60_000 + 1)
                )
                if self.ending.is_set():
                    return  # there is an answer to come, at which the connection ends
            await asyncio.sleep(self._random.expovariate(self._rate))

    def _heard(self, packet: Packet, waiting: dict[int, Publication]) -> None:
        if packet.type == wire.PUBACK:
            publication = waiting.pop(packet.packet_id or 0)
            publication.reason, publication.answered = packet.reason or 0, time.monotonic()
            self.happened()
        elif packet.type == wire.DISCONNECT:
            raise Gone


class Consumer:
    """A client that consumes one queue in a hurried way, while it is not told to be steady."""

    def __init__(
        self, story: Story, address: Address | Callable[[], Address], random: Random, process: Callable[[], int]
    ) -> None:
        self.story = story
        self.open = asyncio.Event()  #: it may connect
        self.steady = asyncio.Event()  #: while this is set it stays, and acknowledges at once
        self.happened: Callable[[], None] = lambda: None  #: it has written an acknowledgement
        self.odd: list[str] = []  #: what no node may do
        self._address = address
        self._random = random
        self._process = process
        self._root, self._property = FORMS[story.place.kind]
        self._version = random.choice((4, 5, 5))
        self._packet_id = 0
        self._subscribed = False  #: its session has the subscription: the node has said so
        self._asked: dict[int, float] = {}  #: rewinds without an answer, and when they were asked for

    async def run(self) -> None:
        while True:
            await self.open.wait()
            try:
                await self._visit()
            except Gone:
                await asyncio.sleep(RETRY)
            if not self.steady.is_set():
                await asyncio.sleep(self._random.uniform(0.0, 0.3))

    def unacknowledged(self) -> Iterator[Delivery]:
        """What it has got on the present connection and has not answered."""
        if self.story.visits:
            yield from (one for one in self.story.visits[-1].deliveries if not one.acked and not one.refused)

    async def _visit(self) -> None:
        lasting = self._random.random() < 0.5
        properties = b""
        if self._version == 5:
            properties += wire.prop(SESSION_EXPIRY, 3600) if lasting else b""
            properties += wire.prop(RECEIVE_MAXIMUM, self._random.choice((1, 5, 40, 1000)))
        connect = wire.connect_packet(
            self.story.client, version=self._version, clean=not lasting, keepalive=0, properties=properties
        )
        process = self._process()
        reader, writer, connack = await dial(_at(self._address), connect, self._version)
        visit = Visit(process)
        visit.rewound = any(time.monotonic() - asked < LATE for asked in self._asked.values())
        try:
            if connack.reason:
                raise Gone
            self.story.visits.append(visit)
            self._subscribed &= connack.session_present
            if not self._subscribed or self._random.random() < 0.3:
                self._subscribe(writer)
            await self._stay(reader, writer, visit)
        finally:
            writer.transport.abort()

    def _next_id(self) -> int:
        self._packet_id = self._packet_id % 60_000 + 1
        return self._packet_id

    def _subscribe(self, writer: asyncio.StreamWriter) -> None:
        filters = [(f"{self._root}/{self.story.place.name}/#", 1)]
        writer.write(wire.subscribe_packet(self._next_id(), filters, version=self._version))

    async def _stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, visit: Visit) -> None:
        """Until its time is over, or the connection."""
        leaving = asyncio.create_task(self._leave(writer, visit))
        acknowledging = asyncio.create_task(self._acknowledge(writer, visit))
        self._held: list[tuple[int, Delivery]] = []
        try:
            while True:
                packet = await read_packet(reader, self._version)
                if packet.type == wire.PUBLISH:
                    self._got(packet, visit)
                elif packet.type == wire.SUBACK:
                    self._subscribed = True
                    if packet.reasons != [1]:
                        self.odd.append(f"{self.story.client}: SUBACK {packet.reasons}")
                elif packet.type == wire.PUBACK:
                    self._asked.pop(packet.packet_id or 0, None)
                    if (packet.reason or 0) >= 0x80:
                        self.odd.append(f"{self.story.client}: rewind refused with 0x{packet.reason:02x}")
                elif packet.type == wire.DISCONNECT:
                    raise Gone
        finally:
            leaving.cancel()
            acknowledging.cancel()

    def _got(self, packet: Packet, visit: Visit) -> None:
        told = [int(value) for name, value in packet.prop_all(USER_PROPERTY) if name == self._property]
        if len(told) != (self._version == 5):
            self.odd.append(f"{self.story.client}: numbers {told} in one message")
        key = packet.topic.removeprefix(f"{self._root}/{self.story.place.name}/")
        delivery = Delivery(len(self.story.visits), told[0] if told else 0, key, int(packet.payload.split()[0]))
        visit.deliveries.append(delivery)
        self._held.append((packet.packet_id or 0, delivery))

    async def _acknowledge(self, writer: asyncio.StreamWriter, visit: Visit) -> None:
        """Some of what is there, in any order, again and again."""
        quick = self._random.random() < 0.5
        while not writer.is_closing():
            await asyncio.sleep(0.002 if quick or self.steady.is_set() else self._random.uniform(0.0, 0.1))
            steady = self.steady.is_set()
            if not steady and self._random.random() < 0.3:
                self._random.shuffle(self._held)
            count = len(self._held) if quick or steady else self._random.randint(0, len(self._held))
            for packet_id, delivery in self._held[:count]:
                refuse = self._version == 5 and not steady and self._random.random() < 0.05
                reason = REFUSED if refuse else None
                writer.write(wire.ack_packet(wire.PUBACK, packet_id, version=self._version, reason=reason))
                delivery.acked, delivery.refused = not refuse, refuse
            del self._held[:count]
            if count:
                self.happened()
            if not steady and self._version == 5 and visit.deliveries and self._random.random() < 0.01:
                self._rewind(writer, visit)

    def _rewind(self, writer: asyncio.StreamWriter, visit: Visit) -> None:
        visit.rewound = True
        number = self._random.randint(1, max(one.number for one in visit.deliveries))
        topic = f"{self._root}/rewind/{self.story.place.name}"
        packet_id = self._next_id()
        self._asked[packet_id] = time.monotonic()
        writer.write(wire.publish_packet(topic, b"%d" % number, qos=1, packet_id=packet_id))

    async def _leave(self, writer: asyncio.StreamWriter, visit: Visit) -> None:
        """After a while, with a word or without, unless it is steady then."""
        await asyncio.sleep(self._random.uniform(0.1, 2.0))
        while self.steady.is_set():  # noqa: ASYNC110 - it is never cleared again, or soon
            await asyncio.sleep(self._random.uniform(0.1, 2.0))
        if self._random.random() < 0.5:
            writer.write(wire.disconnect_packet(version=self._version))
            visit.polite = True
            self._held.clear()  # nothing is acknowledged after a goodbye
            writer.write_eof()
        else:
            writer.transport.abort()
