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
from time import perf_counter
from typing import Final

from motorcade.core.record import RecordError
from motorcade.plugins.fanout.dispatcher import Dispatcher
from motorcade.plugins.fanout.inflight import ENDS, EntryVerdict
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.record import decode_batch, decode_data, decode_entry
from motorcade.plugins.fanout.tables import BATCHES, DATA, DONE, PRIORITISED, STATE, UNSWEPT, owner_of, vin_of
from motorcade.plugins.fanout.views import GcView

PAGE: Final = 64  #: entries read at once


class Sweeper:
    """One collection at a time."""

    def __init__(self, parts: Parts, dispatcher: Dispatcher) -> None:
        self.idle = asyncio.Event()  #: no collection is under way
        self.idle.set()
        self.data: dict[str, int] = {}  #: bytes by id, as of the last collection
        self.batch_ids = 0  #: that are remembered; likewise
        self._store = parts.store
        self._table = parts.table
        self._dispatcher = dispatcher
        self._attempts = parts.attempts
        self._receipts = parts.receipts
        self._now = parts.now
        self._counters = parts.context.counters
        self._looked = 0
        self._priorities = 0  # entries with one, in this collection

    @property
    def running(self) -> bool:
        return not self.idle.is_set()

    async def collect(self) -> GcView:
        """Look at everything that is pending, once."""
        self.idle.clear()
        began = perf_counter()
        vehicles = 0
        ended: Counter[EntryVerdict] = Counter()
        batches, self._priorities = self._table.priorities, 0
        cancels, finished, history = self._table.cancels, self._receipts.finished, 0
        try:
            async for owner in self._store.mailboxes.owners():
                vin = vin_of(owner)
                if vin is not None:
                    vehicles += 1
                    await self._look_at(vin, ended)
                elif owner.startswith(DONE):
                    history += await self._history(owner)
            self._receipts.finished += history - finished
            await self._receipts.settle()
            async with self._table.deciding:  # a cancellation that is being stored counts as one that came meanwhile
                if cancels == self._table.cancels:
                    await self._store.records.delete(STATE, UNSWEPT)  # what was called off has its receipts
            self._forget_requests()
            before = self.data
            self.data = await self._count_data()
            self.batch_ids = await self.count_batch_ids()
            if self._table.prioritised and not self._priorities and batches == self._table.priorities:
                self._table.prioritised = False
                await self._store.records.delete(STATE, PRIORITISED)
        finally:
            self.idle.set()
        self._counters["collections"] += 1
        return GcView(
            vehicles=vehicles,
            expired=ended[EntryVerdict.EXPIRED] + ended[EntryVerdict.OUTDATED],
            cancelled=ended[EntryVerdict.CANCELLED],
            data=sum(1 for name in before if name not in self.data),
            octets=sum(size for name, size in before.items() if name not in self.data),
            seconds=perf_counter() - began,
        )

    async def count_history(self) -> None:
        """Count how many final receipts the histories of vehicles have."""
        finished, history = self._receipts.finished, 0
        async for owner in self._store.mailboxes.owners():
            if owner.startswith(DONE):
                history += await self._history(owner)
        self._receipts.finished += history - finished

    async def _history(self, owner: str) -> int:
        await self._breathe(1)
        return (await self._store.mailboxes.info(owner)).entries

    def _forget_requests(self) -> None:
        """Forget decisions that concern nothing any more; their records have expired in the store."""
        before = self._now() - self._table.config.data_retention
        requests = self._table.requests
        for request_id in [name for name, record in requests.items() if record.over(before)]:
            del requests[request_id]

    async def _look_at(self, vin: str, ended: Counter[EntryVerdict]) -> None:
        after = 0
        while True:
            now = self._now()
            entries = await self._store.mailboxes.read(owner_of(vin), after, PAGE, now)
            for entry in entries:
                after = entry.position
                try:
                    record = decode_entry(entry.body)
                    verdict = self._table.judge(record, now)
                    self._priorities += record.priority > 0
                except RecordError:
                    verdict = EntryVerdict.SEND  # `look_at` tells of it
                held = self._table.inflight.get(vin)
                if held is not None and held.position == entry.position:
                    if verdict in ENDS and held.in_window and not held.ending and vin not in self._table.sources:
                        self._attempts.end(held, *ENDS[verdict])  # in flight to a vehicle that is away
                        ended[verdict] += 1
                    continue  # on its way; it is judged before it is sent (again)
                self._dispatcher.look_at(vin, entry, now)
                ended[verdict] += 1
            await self._breathe(len(entries) + 1)
            if len(entries) < PAGE:
                return

    async def _count_data(self) -> dict[str, int]:
        """Return how much data there is, by id; remove what is older than the retention of now."""
        sizes: dict[str, int] = {}
        old: dict[str, bytes] = {}
        before = self._now() - self._table.config.data_retention
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
        """Remove records that the store would keep for longer (a lowered option), unless they were written since."""
        for key, value in old.items():
            if await self._store.records.get(collection, key, self._now()) == value:
                await self._store.records.delete(collection, key)
            await self._breathe(1)

    async def count_batch_ids(self) -> int:
        """Return how many batches with an id are remembered; remove what is older than the retention of now."""
        count = 0
        old: dict[str, bytes] = {}
        before = self._now() - self._table.config.data_retention
        async for name, value in self._store.records.scan(BATCHES, self._now()):
            count += 1
            with contextlib.suppress(RecordError):
                if decode_batch(value).time <= before:
                    old[name] = value
            await self._breathe(1)
        await self._remove(BATCHES, old)
        return count - len(old)

    async def _breathe(self, looked: int) -> None:
        """Pause after a budget's worth of work: let what was ended be stored, and others have their turn."""
        self._looked += looked
        if self._looked >= self._table.config.gc_budget:
            self._looked = 0
            await self._receipts.settle()
            await asyncio.sleep(0)
