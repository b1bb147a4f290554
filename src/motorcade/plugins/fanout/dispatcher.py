"""Finds the next message of a vehicle, when something has triggered that (`triggers`)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from motorcade.core.receipt import State
from motorcade.core.record import RecordError
from motorcade.plugins.fanout.inflight import ENDS, Delivery, EntryVerdict, delivery_of
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.receipt_writer import RETRY
from motorcade.plugins.fanout.record import EntryRecord, decode_entry
from motorcade.plugins.fanout.tables import attempts_of, owner_of
from motorcade.plugins.fanout.triggers import TriggerQueue
from motorcade.storage.ports import Entry, StoreError

FEW: Final = 2  #: entries read where the oldest is the next
MANY: Final = 64  #: entries read at once where priorities decide; all of them are looked at


class Dispatcher:
    """Reads the mailboxes of vehicles."""

    def __init__(self, parts: Parts) -> None:
        self._mailboxes = parts.store.mailboxes
        self._hub = parts.context.hub
        self._trigger = parts.triggers.trigger
        self._told = parts.told
        self._table = parts.table
        self._attempts = parts.attempts
        self._counters = parts.context.counters
        self._now = parts.now
        self._log = parts.context.log

    async def run(self, queue: TriggerQueue) -> None:
        """Serve the vehicles of a queue until cancelled."""
        while True:
            await queue.wake.wait()
            queue.wake.clear()
            while queue.vins:
                vin = next(iter(queue.vins))
                del queue.vins[vin]
                try:
                    await self._serve(vin, queue)
                except StoreError as error:
                    self._log.error("fanout_not_read", vin=vin, error=str(error))
                    queue.vins[vin] = None
                    await asyncio.sleep(RETRY)
                except Exception:  # noqa: BLE001 - the other vehicles of this worker must not suffer for it
                    self._counters["dispatch_failed"] += 1
                    self._log.exception("fanout_not_dispatched", vin=vin)

    async def _serve(self, vin: str, queue: TriggerQueue) -> None:
        table = self._table
        source = table.sources.get(vin)
        if source is None or vin in table.inflight:
            return
        arriving = self._hub.arriving(vin)
        if arriving is not None:  # the node that it comes from has not settled all of it
            arriving.then(partial(self._trigger, vin, "moved"))
            return
        delivery, all_seen = await self._next(vin)
        if table.sources.get(vin) is not source:
            return  # gone meanwhile; a new connection has its own trigger
        if delivery is None:
            if all_seen and vin not in queue.vins and table.alone:
                table.drained.add(vin)
            return
        now = self._now()  # reading may have taken long
        if table.judge(delivery.entry, now) is EntryVerdict.SEND and table.claim(delivery):
            source.give(delivery, now)
        else:
            source.offer(delivery)

    async def _next(self, vin: str) -> tuple[Delivery | None, bool]:
        """Return the first of the highest priority, and whether there is nothing else; end what is over on the way."""
        best: tuple[int, Delivery] | None = None
        after = 0
        all_seen = True
        while True:
            limit = MANY if self._table.prioritised else FEW
            now = self._now()
            entries = await self._mailboxes.read(owner_of(vin), after, limit, now)
            told = len(entries) if self._told is None else await self._told.first_untold(vin, entries)
            if told is None:
                continue
            for entry in entries[:told]:
                after = entry.position
                found, waits = self.look_at(vin, entry, now)
                all_seen = all_seen and not waits
                if found is None:
                    continue
                if not self._table.prioritised:
                    return found, False
                if best is None or found.entry.priority > best[0]:
                    best = (found.entry.priority, found)
            if told < len(entries):
                return (best[1] if best is not None else None), False
            if len(entries) < limit:
                return (best[1] if best is not None else None), all_seen

    def look_at(self, vin: str, entry: Entry, now: float) -> tuple[Delivery | None, bool]:
        """Return a pending entry if it may be sent, and whether it is to wait; end it if its time is over."""
        held = self._table.inflight.get(vin)
        if (held is not None and held.position == entry.position) or (vin, entry.position) in self._table.ended:
            return None, False  # it is in flight, or over
        try:
            record = decode_entry(entry.body)
        except RecordError as error:
            self._log.error("fanout_entry_unreadable", vin=vin, position=entry.position, error=str(error))
            unknown = delivery_of(vin, entry.position, EntryRecord(b"", "unreadable", now), b"", self._table.config)
            self._attempts.end(unknown, State.FAILED, "unreadable")
            return None, False
        if record.batch in self._table.storing:
            return None, True  # its batch triggers when its receipts are stored
        attempts = max(attempts_of(entry.mark), self._table.attempts.get((vin, entry.position), 0))
        delivery = delivery_of(vin, entry.position, record, entry.payload, self._table.config, attempts)
        verdict = self._table.judge(record, now)
        if verdict in ENDS:
            self._attempts.end(delivery, *ENDS[verdict])
        return (delivery if verdict is EntryVerdict.SEND else None), verdict is EntryVerdict.LATER
