"""Receipts, counters and queries over a store, without a broker: what the fan-out does with them, in few words.

process = await ReceiptProcess.on(store)
await process.accepted("task_1", [1, 2, 3])        vehicles by number; each has a mailbox of its own
await process.say(State.ACKED, "task_1", 1)        its latest delivery
await process.crash()                              another process on the same store: what was not stored is gone
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, Self

import structlog

from motorcade.commit import Commit
from motorcade.core.receipt import Receipt, State, delivery_id
from motorcade.core.vin import make_vin
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.receipt_format import AcceptedRun
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.storage.ports import Batch, Store
from tests.unit.plugins.hub import MemoryHub

LOG = structlog.stdlib.get_logger("motorcade.plugin")


class ReceiptProcess:
    """One process of the fan-out, as far as receipts are concerned."""

    def __init__(self, store: Store, node: str, max_requests: int) -> None:
        self.store = store
        self.hub = MemoryHub()
        self.context = Context("fanout", self.hub, LOG, Path(), Counter(), set(), store)
        self.counted = self.context.counters
        parts = Parts(self.context, FanoutConfig(max_requests=max_requests), lambda _: None)
        self.counters, self.receipts, self.queries = parts.counters, parts.receipts, parts.queries
        self.positions: Counter[int] = Counter()  # by vehicle

    @classmethod
    async def on(cls, store: Store, node: str = "n1", max_requests: int = 1000) -> Self:
        process = cls(store, node, max_requests)
        await process.counters.load()
        return process

    async def crash(self) -> ReceiptProcess:
        """The process is gone, another one begins."""
        await self.stop()
        after = await type(self).on(self.store, "n2", self.counters.max_requests)
        after.positions = self.positions
        after.hub.time = self.hub.time
        return after

    async def stop(self) -> None:
        for task in list(self.context.tasks):
            task.cancel()
        await asyncio.gather(*self.context.tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.context.spawn(work, "test")

    async def accepted(self, request_id: str, vehicles: Iterable[int]) -> None:
        """A batch."""
        numbers = list(vehicles)
        self.positions.update(numbers)
        vins, positions = [make_vin(number) for number in numbers], [self.positions[number] for number in numbers]
        await self.begin([], AcceptedRun(vins, positions, request_id, self.hub.time))

    def begin(
        self, receipts: list[Receipt], run: AcceptedRun | None = None, batch: Batch | None = None
    ) -> Commit[None]:
        """Give receipts to the store."""
        stored: Commit[None] = Commit()
        self.receipts.write(batch or Batch(), self.hub.time, stored.finish, receipts, run)
        return stored

    def receipt(self, state: State, request_id: str, vehicle: int, position: int = 0, **more: Any) -> Receipt:
        vin = make_vin(vehicle)
        name = delivery_id(vin, position or self.positions[vehicle])
        return Receipt(
            state=state, vin=vin, request_id=request_id, delivery_id=name, time=self.hub.time, node="n1", **more
        )

    async def say(self, state: State, request_id: str, *vehicles: int, **more: Any) -> None:
        """Something has happened to the latest delivery of vehicles."""
        await self.write([self.receipt(state, request_id, vehicle, **more) for vehicle in vehicles])

    async def write(self, receipts: list[Receipt], *, told: bool = True) -> None:
        """Into the stream; `told`: and the process lives long enough to hear of it."""
        if told:
            await self.begin(receipts)
        else:
            await self.store.streams.append(
                RECEIPTS, self.receipts.format.values(receipts, self.hub.time), self.hub.time
            )

    def states(self, request_id: str) -> dict[State, int]:
        tally = self.counters.find(request_id)
        return tally.states() if tally is not None else {}
