"""Collects what is over for vehicles that are away: expired, too old, or called off. In steps, with pauses between.

A vehicle that comes finds out by itself (`dispatcher.look_at`); this is for those that do not come, so that platforms
hear of it, and stores do not fill up.

Of several members each looks at the cells whose steward it is. What has to be ended there is first shown to the others:
a member that has the vehicle attached looks after it itself, as it knows what is in flight.

Data that was published under an id goes by itself: its record expires in the store, and its bytes with the last entry
that refers to them. So do the ids of batches. Here they are only counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import msgspec

from motorcade.core.record import RecordError
from motorcade.plugins.fanout.dispatcher import Dispatcher
from motorcade.plugins.fanout.inflight import ENDS, EntryVerdict
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.record import decode_batch, decode_data, decode_entry, decode_time, encode
from motorcade.plugins.fanout.tables import BATCHES, DATA, DONE, PRIORITISED, STATE, UNSWEPT, owner_of, vin_of
from motorcade.plugins.fanout.views import GcView
from motorcade.storage.ports import Batch, Entry, Expect, StoreConflictError

PAGE: Final = 64  #: entries read at once
SHOWN: Final = 500  #: vehicles of which something is over, shown to the other members at once
ENDS_ASKED: Final = "fanout.ends"
SWEPT: Final = "fanout.swept"

_decode_vins = msgspec.msgpack.Decoder(list[str]).decode


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
        self._members = parts.members
        self._told = parts.told
        self._trigger = parts.triggers.trigger
        self._context = parts.context
        self._over: dict[str, list[tuple[Entry, EntryVerdict]]] = {}  # to be ended, if no other member has the vehicle
        self._swept = 0.0  # cancellations up to then have been ended in the cells of this member
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
            unswept = await self._store.records.get(STATE, UNSWEPT, self._now())
            for feed in self._cells():
                async for owner in self._store.mailboxes.owners(feed):
                    vin = vin_of(owner)
                    if vin is not None:
                        vehicles += 1
                        await self._look_at(vin, ended)
                    elif owner.startswith(DONE):
                        history += await self._history(owner)
                await self._end_over(ended)
            self._receipts.finished += history - finished
            await self._receipts.settle()
            await self._note_swept(cancels, unswept)
            self._forget_requests()
            before = self.data
            self.data = await self._count_data()
            self.batch_ids = await self.count_batch_ids()
            quiet = not self._priorities and batches == self._table.priorities
            if self._table.prioritised and quiet and self._members is None:
                self._table.prioritised = False
                await self._store.records.delete(STATE, PRIORITISED)
        finally:
            self.idle.set()
        self._counters["collections"] += 1
        return GcView(
            vehicles=vehicles,
            expired=ended[EntryVerdict.EXPIRED] + ended[EntryVerdict.OUTDATED],
            cancelled=ended[EntryVerdict.CANCELLED],
            data=sum(1 for name in before if name not in self.data and self._is_ours(name)),
            octets=sum(size for name, size in before.items() if name not in self.data and self._is_ours(name)),
            seconds=perf_counter() - began,
        )

    async def count_history(self) -> None:
        """Count how many final receipts the histories of vehicles have."""
        finished, history = self._receipts.finished, 0
        for feed in self._cells():
            async for owner in self._store.mailboxes.owners(feed):
                if owner.startswith(DONE):
                    history += await self._history(owner)
        self._receipts.finished += history - finished

    # -- one of several members

    def _cells(self) -> Sequence[int | None]:
        """Return the cells that this member looks after, as numbers of their feeds; None: all."""
        if self._members is None:
            return [None]
        cluster = self._members.cluster
        return [feed for feed in range(cluster.feeds) if cluster.is_steward(feed)]

    def _is_ours(self, name: str) -> bool:
        """Return True if a record whose home is this name lies in a cell of this member."""
        return self._members is None or self._members.cluster.is_steward(self._store.feeds.feed_of(name))

    def start(self) -> None:
        """Begin to answer other members."""
        if self._members is not None:
            cluster, at_end = self._members.cluster, self._context.at_end
            at_end(cluster.on_ask(ENDS_ASKED, self._answer_ends))
            at_end(cluster.on_ask(SWEPT, self._answer_swept))

    async def _end_over(self, ended: Counter[EntryVerdict]) -> None:
        """End what is over for vehicles that no other member has attached."""
        over, self._over = self._over, {}
        if not over or self._members is None:
            return
        answers = await self._members.ask_all(ENDS_ASKED, encode(list(over)))
        if answers.silent:  # the next collection tries again
            self._context.log.info("fanout_not_all_collected", silent=answers.silent)
            return
        elsewhere = {vin for body in answers.found.values() for vin in _decode_vins(body)}
        for vin, entries in over.items():
            for entry, verdict in entries if vin not in elsewhere else ():
                self._dispatcher.look_at(vin, entry, self._now())
                ended[verdict] += 1
            await self._breathe(1)

    async def _answer_ends(self, _member: str, body: bytes) -> bytes:
        """Look after vehicles of which something is over, as far as they are here; return these."""
        here = [vin for vin in _decode_vins(body) if vin in self._table.sources or vin in self._table.inflight]
        ended: Counter[EntryVerdict] = Counter()
        for vin in here:
            await self._look_at(vin, ended)
        return encode(here)

    async def _note_swept(self, cancels: int, unswept: bytes | None) -> None:
        """Note that what was called off before this collection has its receipts; all members must have done so."""
        async with self._table.deciding:  # a cancellation that is being stored counts as one that came meanwhile
            if cancels != self._table.cancels or unswept is None:
                return
            if self._members is None:
                await self._store.records.delete(STATE, UNSWEPT)
                return
        with contextlib.suppress(RecordError):
            self._swept = decode_time(unswept)
        if not self._is_ours(UNSWEPT):
            return
        answers = await self._members.ask_all(SWEPT)
        if answers.silent or any(decode_time(body) < self._swept for body in answers.found.values()):
            return  # it is only a reason to collect early
        batch = Batch()
        batch.conditions = [Expect(STATE, UNSWEPT, unswept, self._now())]
        batch.delete(STATE, UNSWEPT)
        with contextlib.suppress(StoreConflictError):  # something was called off meanwhile
            await self._store.write(batch)

    async def _answer_swept(self, _member: str, _body: bytes) -> bytes:
        return encode(self._swept)

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
            told = len(entries) if self._told is None else await self._told.first_untold(vin, entries)
            if told is None:
                continue
            for entry in entries[:told]:
                after = entry.position
                try:
                    record = decode_entry(entry.body)
                    verdict = self._table.judge(record, now)
                    self._priorities += record.priority > 0
                except RecordError:
                    verdict = EntryVerdict.UNREADABLE  # `look_at` tells of it
                held = self._table.inflight.get(vin)
                here = held is not None or vin in self._table.sources
                if self._told is not None and not here:
                    if verdict in ENDS or verdict is EntryVerdict.UNREADABLE:
                        self._over.setdefault(vin, []).append((entry, verdict))
                    continue
                if held is not None and held.position == entry.position:
                    if verdict in ENDS and held.in_window and not held.ending and vin not in self._table.sources:
                        self._attempts.end(held, *ENDS[verdict])  # in flight to a vehicle that is away
                        ended[verdict] += 1
                    continue  # on its way; it is judged before it is sent (again)
                self._dispatcher.look_at(vin, entry, now)
                ended[verdict] += 1
            if len(self._over) >= SHOWN:
                await self._end_over(ended)
            await self._breathe(len(entries) + 1)
            if told < len(entries) or len(entries) < PAGE:
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
            if self._is_ours(key) and await self._store.records.get(collection, key, self._now()) == value:
                await self._store.records.delete(collection, key)
            await self._breathe(1)

    async def count_batch_ids(self) -> int:
        """Return how many batches with an id are remembered; remove what is older than the retention of now.

        Of several members each counts in its cells, and takes all others for equally full.
        """
        count = 0
        old: dict[str, bytes] = {}
        before, cells = self._now() - self._table.config.data_retention, self._cells()
        for feed in cells:
            async for name, value in self._store.records.scan(BATCHES, self._now(), feed=feed):
                count += 1
                with contextlib.suppress(RecordError):
                    if decode_batch(value).time <= before:
                        old[name] = value
                await self._breathe(1)
        await self._remove(BATCHES, old)
        of_all = self._members.cluster.feeds if self._members is not None else 1
        return (count - len(old)) * of_all // max(1, len(cells))

    async def _breathe(self, looked: int) -> None:
        """Pause after a budget's worth of work: let what was ended be stored, and others have their turn."""
        self._looked += looked
        if self._looked >= self._table.config.gc_budget:
            self._looked = 0
            await self._receipts.settle()
            await asyncio.sleep(0)
