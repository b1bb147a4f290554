"""Collects what is over for vehicles that are away: expired, too old, or called off. In steps, with pauses between.

A vehicle that comes finds out by itself (`dispatcher.look_at`); this is for those that do not come, so that platforms
hear of it, and stores do not fill up.

Data that was published under an id goes by itself: its record expires in the store, and its bytes with the last entry
that refers to them. So do the ids of batches. Here they are only counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Final

from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.desk import ENDS, Desk, Verdict
from motorcade.plugins.fanout.dispatcher import Pool
from motorcade.plugins.fanout.receipts import Receipts
from motorcade.plugins.fanout.record import RecordError, decode_batch, decode_data, decode_entry
from motorcade.plugins.fanout.tables import BATCHES, DATA, DONE, PRIORITISED, STATE, UNSWEPT, owner_of, vin_of
from motorcade.plugins.fanout.views import GcView
from motorcade.storage.ports import Store

PAGE: Final = 64  #: entries read at once


class Sweeper:
    """One collection at a time."""

    def __init__(
        self,
        store: Store,
        desk: Desk,
        pool: Pool,
        clerk: Clerk,
        receipts: Receipts,
        now: Callable[[], float],
        counters: Counter[str],
    ) -> None:
        self.idle = asyncio.Event()  #: no collection is under way
        self.idle.set()
        self.data: dict[str, int] = {}  #: bytes by id, as of the last collection
        self.batch_ids = 0  #: that are remembered; likewise
        self._store = store
        self._desk = desk
        self._pool = pool
        self._clerk = clerk
        self._receipts = receipts
        self._now = now
        self._counters = counters
        self._looked = 0
        self._priorities = 0  # entries with one, in this collection

    @property
    def running(self) -> bool:
        return not self.idle.is_set()

    async def collect(self) -> GcView:
        """Look at everything that waits, once."""
        self.idle.clear()
        began = perf_counter()
        vehicles = 0
        ended: Counter[Verdict] = Counter()
        batches, self._priorities = self._desk.priorities, 0
        cancels, finished, history = self._desk.cancels, self._receipts.finished, 0
        try:
            async for owner in self._store.mailboxes.owners():
                vin = vin_of(owner)
                if vin is not None:
                    vehicles += 1
                    await self._look_at(vin, ended)
                elif owner.startswith(DONE):
                    history += await self._history(owner)
            self._receipts.finished += history - finished
            await self._clerk.settle()
            async with self._desk.deciding:  # a cancellation that is being stored counts as one that came meanwhile
                if cancels == self._desk.cancels:
                    await self._store.records.delete(STATE, UNSWEPT)  # what was called off has its receipts
            self._forget_requests()
            before = self.data
            self.data = await self._count_data()
            self.batch_ids = await self.count_batch_ids()
            if self._desk.prioritised and not self._priorities and batches == self._desk.priorities:
                self._desk.prioritised = False
                await self._store.records.delete(STATE, PRIORITISED)
        finally:
            self.idle.set()
        self._counters["collections"] += 1
        return GcView(
            vehicles=vehicles,
            expired=ended[Verdict.EXPIRED] + ended[Verdict.OUTDATED],
            cancelled=ended[Verdict.CANCELLED],
            data=sum(1 for name in before if name not in self.data),
            octets=sum(size for name, size in before.items() if name not in self.data),
            seconds=perf_counter() - began,
        )

    async def count_history(self) -> None:
        """Find out how many final receipts the histories of vehicles have."""
        finished, history = self._receipts.finished, 0
        async for owner in self._store.mailboxes.owners():
            if owner.startswith(DONE):
                history += await self._history(owner)
        self._receipts.finished += history - finished

    async def _history(self, owner: str) -> int:
        await self._breathe(1)
        return (await self._store.mailboxes.info(owner)).entries

    def _forget_requests(self) -> None:
        """Decisions that concern nothing any more; their records have expired in the store."""
        before = self._now() - self._desk.config.data_retention
        requests = self._desk.requests
        for request_id in [name for name, record in requests.items() if record.over(before)]:
            del requests[request_id]

    async def _look_at(self, vin: str, ended: Counter[Verdict]) -> None:
        after = 0
        while True:
            now = self._now()
            entries = await self._store.mailboxes.read(owner_of(vin), after, PAGE, now)
            for entry in entries:
                after = entry.position
                try:
                    record = decode_entry(entry.body)
                    verdict = self._desk.judge(record, now)
                    self._priorities += record.priority > 0
                except RecordError:
                    verdict = Verdict.SEND  # `look_at` tells of it
                held = self._desk.hold.get(vin)
                if held is not None and held.position == entry.position:
                    if verdict in ENDS and held.in_window and not held.ending and vin not in self._desk.seats:
                        self._clerk.end(held, *ENDS[verdict])  # in flight to a vehicle that is away
                        ended[verdict] += 1
                    continue  # on its way; it is judged before it is sent (again)
                self._pool.look_at(vin, entry, now)
                ended[verdict] += 1
            await self._breathe(len(entries) + 1)
            if len(entries) < PAGE:
                return

    async def _count_data(self) -> dict[str, int]:
        """How much data there is, by id; what is older than the retention of now is removed."""
        sizes: dict[str, int] = {}
        old: dict[str, bytes] = {}
        before = self._now() - self._desk.config.data_retention
        async for data_id, value in self._store.records.scan(DATA, self._now()):
            with contextlib.suppress(RecordError):
                record = decode_data(value)
                if record.time <= before:
                    old[data_id] = value
                else:
                    sizes[data_id] = record.size
            await self._breathe(1)
        await self._remove(DATA, old)
        return sizes

    async def _remove(self, collection: str, old: dict[str, bytes]) -> None:
        """The option was lowered: records that the store would keep for longer, unless they were written since."""
        for key, value in old.items():
            if await self._store.records.get(collection, key, self._now()) == value:
                await self._store.records.delete(collection, key)
            await self._breathe(1)

    async def count_batch_ids(self) -> int:
        """How many batches with an id are remembered; what is older than the retention of now is removed."""
        count = 0
        old: dict[str, bytes] = {}
        before = self._now() - self._desk.config.data_retention
        async for name, value in self._store.records.scan(BATCHES, self._now()):
            count += 1
            with contextlib.suppress(RecordError):
                if decode_batch(value).time <= before:
                    old[name] = value
            await self._breathe(1)
        await self._remove(BATCHES, old)
        return count - len(old)

    async def _breathe(self, looked: int) -> None:
        """After a budget's worth of work let what was ended be stored, and everybody else have their turn."""
        self._looked += looked
        if self._looked >= self._desk.config.gc_budget:
            self._looked = 0
            await self._clerk.settle()
            await asyncio.sleep(0)
