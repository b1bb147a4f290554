"""A pair of clients that talk through the node all the time; every message of theirs is counted."""

from __future__ import annotations

import asyncio
import contextlib
from time import perf_counter

from motorcade.client import Client
from motorcade.mqtt.packets import Publish
from tests.soak.churn import until
from tests.support.node import NodeProcess

PAUSE = 0.1  #: seconds between two messages
PATIENCE = 60.0  #: seconds until a message that has not come is lost


class Probe:
    """A publisher and a subscriber, QoS 1; `cycle` tells how it went since the last call."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._sent: dict[int, float] = {}  # not received yet
        self._latencies: list[float] = []
        self._number = 0
        self._publisher: Client
        self._subscriber: Client
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        """Connect and begin."""
        at = self._node.mqtt
        self._subscriber = await Client.connect(at.host, at.port, client_id="probe-in", on_message=self._received)
        self._publisher = await Client.connect(at.host, at.port, client_id="probe-out")
        await self._subscriber.subscribe(("probe", 1))
        self._task = asyncio.create_task(self._run(), name="probe")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._publisher.disconnect()
        await self._subscriber.disconnect()

    async def observe(self, name: str) -> None:
        """Have the observer look around."""
        await self._publisher.publish("soak/observe", name.encode(), 1)

    async def cycle(self) -> tuple[int, int, tuple[float, float]]:
        """Count messages and losses since the last call; with the latency, median and 99 of 100."""
        last = self._number
        with contextlib.suppress(TimeoutError):
            await until(lambda: self._task.done() or min(self._sent, default=last + 1) > last, PATIENCE)
        latencies, self._latencies = sorted(self._latencies), []
        missing = [number for number in self._sent if number <= last]
        for number in missing:
            del self._sent[number]
        lost, count = len(missing), len(latencies)
        if not latencies:
            return lost, lost, (0.0, 0.0)
        return count + lost, lost, (latencies[count // 2], latencies[count * 99 // 100])

    def forget(self) -> None:
        """Do not count latencies so far."""
        self._latencies = []

    async def _run(self) -> None:
        while True:
            self._number += 1
            self._sent[self._number] = perf_counter()
            await self._publisher.send("probe", str(self._number).encode(), 1)
            await asyncio.sleep(PAUSE)

    def _received(self, message: Publish) -> None:
        sent = self._sent.pop(int(message.payload), None)
        if sent is not None:
            self._latencies.append(perf_counter() - sent)
