"""The pool that finds the next message of a vehicle: `maybe_send` of every trigger.

A vehicle always has the same worker, so its messages are looked for one after the other. A trigger that comes while a
vehicle waits for its worker changes nothing; one that comes while it is being served has it served once more. That, and
the order of writing before triggering, is why no trigger is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final
from zlib import crc32

import structlog

from motorcade.core.receipt import State
from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.desk import ENDS, Delivery, Desk, Verdict, delivery_of
from motorcade.plugins.fanout.receipts import RETRY
from motorcade.plugins.fanout.record import EntryRecord, RecordError, decode_entry
from motorcade.plugins.fanout.tables import attempts_of, owner_of
from motorcade.storage.ports import Entry, Mailboxes, StoreError

FEW: Final = 2  #: entries read where the oldest is the next
MANY: Final = 64  #: entries read at once where priorities decide; all of them are looked at


class Worker:
    """Vehicles that are to be looked at, each once."""

    def __init__(self) -> None:
        self.vins: dict[str, None] = {}
        self.wake = asyncio.Event()


class Pool:
    """The workers of one node."""

    def __init__(
        self,
        mailboxes: Mailboxes,
        desk: Desk,
        counters: Counter[str],
        now: Callable[[], float],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.clerk: Clerk | None = None  #: set before the first trigger; both need each other
        self._mailboxes = mailboxes
        self._desk = desk
        self._counters = counters
        self._now = now
        self._log = log
        self.workers = [Worker() for _ in range(desk.config.dispatchers)]

    def trigger(self, vin: str, why: str) -> None:
        """There may be something for a vehicle."""
        if vin in self._desk.seats:
            self._counters[f"trigger_{why}"] += 1
            worker = self.workers[crc32(vin.encode()) % len(self.workers)]
            worker.vins[vin] = None
            worker.wake.set()

    async def run(self, worker: Worker) -> None:
        """Serve until cancelled."""
        while True:
            await worker.wake.wait()
            worker.wake.clear()
            while worker.vins:
                vin = next(iter(worker.vins))
                del worker.vins[vin]
                try:
                    await self._serve(vin, worker)
                except StoreError as error:
                    self._log.error("fanout_not_read", vin=vin, error=str(error))
                    worker.vins[vin] = None
                    await asyncio.sleep(RETRY)
                except Exception:  # noqa: BLE001 - the other vehicles of this worker must not suffer for it
                    self._counters["dispatch_failed"] += 1
                    self._log.exception("fanout_not_dispatched", vin=vin)

    async def _serve(self, vin: str, worker: Worker) -> None:
        if vin not in self._desk.seats or vin in self._desk.hold:
            return
        seat = self._desk.seats[vin]
        delivery, all_seen = await self._next(vin)
        if self._desk.seats.get(vin) is not seat:
            return  # gone meanwhile; who has come instead has its own trigger
        if delivery is not None:
            judged = self._desk.judge(delivery.entry, self._now()) is Verdict.SEND  # reading may have taken long
            seat.offer(delivery, judged=judged)
        elif all_seen and vin not in worker.vins:
            self._desk.drained.add(vin)

    async def _next(self, vin: str) -> tuple[Delivery | None, bool]:
        """The first of the highest priority, and whether there is nothing else; what is over is ended on the way."""
        best: tuple[int, Delivery] | None = None
        after = 0
        all_seen = True
        while True:
            limit = MANY if self._desk.prioritised else FEW
            now = self._now()
            entries = await self._mailboxes.read(owner_of(vin), after, limit, now)
            for entry in entries:
                after = entry.position
                found, waits = self.look_at(vin, entry, now)
                all_seen = all_seen and not waits
                if found is None:
                    continue
                if not self._desk.prioritised:
                    return found, False
                if best is None or found.entry.priority > best[0]:
                    best = (found.entry.priority, found)
            if len(entries) < limit:
                return (best[1] if best is not None else None), all_seen

    def look_at(self, vin: str, entry: Entry, now: float) -> tuple[Delivery | None, bool]:
        """What a pending entry is, if it may be sent, and whether it is to wait; if its time is over, it is ended."""
        held = self._desk.hold.get(vin)
        if (held is not None and held.position == entry.position) or (vin, entry.position) in self._desk.ended:
            return None, False  # it is on its way, or over
        try:
            record = decode_entry(entry.body)
        except RecordError as error:
            self._log.error("fanout_entry_unreadable", vin=vin, position=entry.position, error=str(error))
            unknown = delivery_of(vin, entry.position, EntryRecord(b"", "unreadable", now), b"", self._desk.config)
            self._end(unknown, State.FAILED, "unreadable")
            return None, False
        if record.batch in self._desk.untold:
            return None, True  # its batch triggers when its receipts are stored
        attempts = max(attempts_of(entry.mark), self._desk.attempts.get((vin, entry.position), 0))
        delivery = delivery_of(vin, entry.position, record, entry.payload, self._desk.config, attempts)
        verdict = self._desk.judge(record, now)
        if verdict in ENDS:
            self._end(delivery, *ENDS[verdict])
        return (delivery if verdict is Verdict.SEND else None), verdict is Verdict.LATER

    def _end(self, delivery: Delivery, state: State, reason: str) -> None:
        assert self.clerk is not None  # noqa: S101 - set by the plugin
        self.clerk.end(delivery, state, reason)
