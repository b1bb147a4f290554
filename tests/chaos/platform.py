"""A platform that publishes batches to the fan-out, across all deaths of the node.

It does what a platform should: QoS 1, and what has no answer when the connection is lost is published again, in the
same order, on the next one. Batches of most requests have an id; of these it sends some once more although they were
answered, as a platform does that has died itself. What it has published, and what was answered, is all that the judge
knows of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from motorcade.fleet import digest_of
from motorcade.mqtt import codec
from motorcade.mqtt.packets import V5, Connack, Connect, Packet, Puback, Publish
from motorcade.mqtt.properties import NONE
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, TRIGGER
from tests.support.node import Endpoint

IN_FLIGHT = 8  #: batches that wait for their answer
TRY_AGAIN = 0.05  #: seconds between two attempts to connect
MAX_VEHICLES = 12  #: in one batch
POOL = 6  #: request ids that are issued again and again
EXPIRES = 2.0  #: seconds that some batches give their messages
NAMED = 4  #: of the POOL, requests whose batches have an id
FORGOTTEN = 0.1  #: share of answered batches with an id that are sent once more


@dataclass(eq=False)
class Batch:
    """One batch, as the platform remembers it."""

    number: int
    request: str
    vins: tuple[str, ...]
    payload: bytes
    mode: str
    priority: int
    expires: float | None
    data_id: str  #: empty: it carries its data
    batch_id: str = ""  #: empty: it has none
    digest: bytes = b""
    published: int = 0  #: times
    reason: int | None = None  #: of the answer
    refusals: list[int] = field(default_factory=list)
    superseded: int = 0  #: vehicles that are said to have a later one
    repeated: int = 0  #: times that it was said to be known

    @property
    def is_acknowledged(self) -> bool:
        return self.reason is not None and self.reason < 0x80


class Platform:
    """Publishes until it is told to end, then waits for the last answer."""

    def __init__(self, address: Endpoint, vins: Sequence[str], random: Random, rate: float) -> None:
        self.batches: list[Batch] = []
        self.odd: list[str] = []  #: what no node may do
        self.happened: Callable[[], None] = lambda: None  #: an answer has come
        self.resting = False  #: it makes no new batches
        self._address = address
        self._vins = vins
        self._random = random
        self._rate = rate
        self._ending = False
        self._todo: list[tuple[Batch, Publish]] = []  # not answered, in order
        self._sent = 0  # of these, on the present connection
        self._number = 0
        self._wake = asyncio.Event()

    @property
    def open(self) -> int:
        """Publications without an answer."""
        return len(self._todo)

    def end(self) -> None:
        """No more batches."""
        self._ending = True
        self._wake.set()

    async def make(self) -> None:
        """New batches, at about the rate."""
        while not self._ending:
            if len(self._todo) < 4 * IN_FLIGHT and not self.resting:
                self._new()
            await asyncio.sleep(self._random.expovariate(self._rate))

    def _new(self) -> None:
        random = self._random
        number = len(self.batches) + 1
        again = random.randrange(POOL) if random.random() < 0.5 else None
        named = again < NAMED if again is not None else random.random() < 0.7
        batch = Batch(
            number,
            f"again-{again}" if again is not None else f"once-{number}",
            tuple(random.sample(self._vins, random.randint(1, MAX_VEHICLES))),
            f"{number} ".encode() + random.randbytes(random.choice((0, 100, 4000))).hex().encode(),
            random.choice(("replace", "replace", "append")),
            random.choice((0, 0, 0, 3)),
            EXPIRES if random.random() < 0.1 else None,
            f"data-{number}" if random.random() < 0.5 else "",
            f"batch-{number}" if named else "",
        )
        batch.digest = digest_of(batch.payload)
        self.batches.append(batch)
        if batch.data_id:
            self._queue(batch, DATA_PREFIX + batch.data_id, batch.payload)
        fields: dict[str, object] = {"ids": batch.vins, "request_id": batch.request, "mode": batch.mode}
        fields |= {"priority": batch.priority} | ({"batch_id": batch.batch_id} if batch.batch_id else {})
        fields |= {"expires_in": batch.expires} if batch.expires is not None else {}
        if batch.data_id:
            fields |= {"data_id": batch.data_id}
        else:
            fields |= {"data": batch.payload.decode(), "encoding": "utf8"}
        self._queue(batch, TRIGGER if batch.data_id else INGRESS, json.dumps(fields).encode())

    def _queue(self, batch: Batch, topic: str, payload: bytes) -> None:
        self._number = self._number % 60_000 + 1
        self._todo.append((batch, Publish(topic, payload, 1, packet_id=self._number)))
        self._wake.set()

    async def run(self) -> None:
        """Connect again and again, until everything is answered and no more is to come."""
        while self._todo or not self._ending:
            try:
                await self._connection()
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(TRY_AGAIN)

    async def _connection(self) -> None:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        decoder = codec.Decoder(V5)
        self._sent = 0
        try:
            writer.write(codec.encode(Connect("platform", V5, True, keep_alive=0), V5))
            writing: asyncio.Task[None] | None = None
            try:
                while data := await reader.read(65536):
                    for packet in decoder.feed(data):
                        if isinstance(packet, Connack) and not packet.reason:
                            writing = asyncio.create_task(self._write(writer))
                        self._heard(packet)
                    if self._ending and not self._todo:
                        return
            finally:
                if writing is not None:
                    writing.cancel()
        finally:
            writer.close()
        await asyncio.sleep(TRY_AGAIN)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            while self._sent < min(len(self._todo), IN_FLIGHT):
                batch, packet = self._todo[self._sent]
                self._sent += 1
                writer.write(codec.encode(packet, V5))
                if not packet.topic.startswith(DATA_PREFIX):
                    batch.published += 1
                repeated = Publish(packet.topic, packet.payload, 1, False, True, packet.packet_id, NONE)
                self._todo[self._sent - 1] = batch, repeated
            self._wake.clear()
            await self._wake.wait()

    def _heard(self, packet: Packet) -> None:
        if not isinstance(packet, Puback):
            return
        for index in range(self._sent):
            batch, sent = self._todo[index]
            if sent.packet_id == packet.packet_id:
                break
        else:
            self.odd.append(f"{packet} answers nothing")
            return
        del self._todo[index]
        self._sent -= 1
        if packet.reason >= 0x80:
            batch.refusals.append(packet.reason)
        if not sent.topic.startswith(DATA_PREFIX):
            self._answered(batch, packet)
            if batch.is_acknowledged:
                self.happened()
                if batch.batch_id and self._random.random() < FORGOTTEN:
                    self._queue(batch, sent.topic, sent.payload)
        self._wake.set()

    def _answered(self, batch: Batch, packet: Puback) -> None:
        figures = dict(packet.properties.user_properties)
        repeated = "repeated" in figures
        if repeated and batch.published < 2:
            self.odd.append(f"batch {batch.number} is said to be known when it comes for the first time")
        if batch.batch_id and batch.is_acknowledged and not repeated:
            self.odd.append(f"batch {batch.number} was answered before, and is not known any more")
        batch.repeated += repeated
        batch.superseded = int(figures.get("superseded", 0))
        batch.reason = packet.reason
