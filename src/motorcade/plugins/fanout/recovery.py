"""Receipts that are missing for a batch of which it is not known whether it was stored.

An append removes what a batch replaces, and only its answer tells which entries those were; so their receipts, and the
`accepted` ones of the new entries, come in a second batch. If the process dies in between, or the store does not
answer, an intent is left (`intake`, rule 3). What is missing can be told from what its vehicles have pending and the
receipts of the request:

    entry of the batch without any receipt                          ->  accepted
    delivery of the request that is not final, and has no entry     ->  replaced: nothing else removes an entry without
                                                                        writing its receipt with it

Rule 1: entries are read first, then receipts. What was removed by somebody who writes a last receipt with it is final
        by then.
Rule 2: in a process that goes on, something is written to each mailbox before that: a write of unknown outcome may be
        carried out until then (`ports`, rule 6). Batches of the same request that came before must have been told of.
Rule 3: a delivery that ends meanwhile ends once (`desk`, rule 2); the intent stays until that is written down.
Rule 4: of a batch with an id it is written down besides for whom it is stored (`repeats`, rules 2 and 3). What is
        pending tells, since nothing of it, nor of later batches, is sent or ends otherwise before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from motorcade.core.receipt import FINAL, Receipt, State, delivery_id
from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.desk import Desk
from motorcade.plugins.fanout.queries import Queries
from motorcade.plugins.fanout.receipts import Receipts, history_draft
from motorcade.plugins.fanout.record import IntentRecord, RecordError, decode_entry, decode_intent
from motorcade.plugins.fanout.repeats import find, recovered, vins_of, writing
from motorcade.plugins.fanout.tables import INTENTS, done_of, name_of, owner_of
from motorcade.storage.ports import Batch, Bound, Entry, Store

PAGE: Final = 500  #: entries read at once
NOTHING: Final = 0  #: no entry has this position


class Recovery:
    """Completes what was begun."""

    def __init__(
        self,
        store: Store,
        desk: Desk,
        clerk: Clerk,
        queries: Queries,
        receipts: Receipts,
        node: str,
        now: Callable[[], float],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._store = store
        self._desk = desk
        self._clerk = clerk
        self._queries = queries
        self._receipts = receipts
        self._node = node
        self._now = now
        self._log = log

    async def run(self) -> int:
        """At the start: write what the process before has left; how many batches were incomplete."""
        found = [item async for item in self._store.records.scan(INTENTS, self._now())]
        for key, value in found:
            try:
                intent, batch = decode_intent(value), bytes.fromhex(key)
            except (RecordError, ValueError) as error:
                self._log.warning("fanout_intent_unreadable", key=key, error=str(error))
                await self._store.records.delete(INTENTS, key)
                continue
            await self._complete(key, batch, intent, vins_of(intent.vins))
        if found:
            self._log.info("fanout_batches_completed", batches=len(found))
        return len(found)

    async def complete(self, batch: bytes, intent: IntentRecord, vins: Sequence[str]) -> list[Receipt]:
        """While the process goes on: what was missing for a batch (rule 2)."""
        barrier = Batch()
        for vin in vins:
            barrier.acknowledge(owner_of(vin), [NOTHING])
        await self._store.write(barrier)
        return await self._complete(batch.hex(), batch, intent, vins)

    async def unknown(self, request_id: str, deliveries: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of these deliveries (VIN, position) of which there is no receipt."""
        told = await self._queries.last_words(request_id, {vin for vin, _ in deliveries})
        return [(vin, position) for vin, position in deliveries if delivery_id(vin, position) not in told]

    async def _complete(self, key: str, batch: bytes, intent: IntentRecord, vins: Sequence[str]) -> list[Receipt]:
        found = _Found(batch, intent)
        for number, vin in enumerate(vins):
            await self._pending(vin, found)
            if number % PAGE == PAGE - 1:
                await asyncio.sleep(0)
        pending = found.pending
        told = await self._queries.last_words(intent.request_id, set(vins))
        missing = [
            self._receipt(intent, name, State.ACCEPTED)
            for name, is_ours in pending.items()
            if is_ours and name not in told
        ]
        gone = [receipt for name, receipt in told.items() if receipt.state not in FINAL and name not in pending]
        ends = [
            self._receipt(intent, receipt.delivery_id, State.REPLACED, "reissued", receipt.attempt)
            for receipt in gone
            if self._desk.end_entry(*_parts(receipt.delivery_id))
        ]
        if len(ends) < len(gone):
            await self._clerk.written({_parts(receipt.delivery_id) for receipt in gone})  # before the intent goes
        missing += ends
        bound = Bound(entries=self._desk.config.history)
        keep = await self._keep(found, vins, len(ends))

        def fill(batch: Batch) -> None:
            if keep is not None:
                keep(batch)
            for receipt in ends:
                batch.append([done_of(receipt.vin)], history_draft(receipt, self._desk.config), receipt.time, bound)
            batch.delete(INTENTS, key)

        await self._receipts.store(fill, missing)
        return missing

    async def _keep(self, found: _Found, vins: Sequence[str], replaced: int) -> Callable[[Batch], None] | None:
        """What writes down how much of a batch with an id is stored."""
        intent, named = found.intent, found.intent.named
        if named is None:
            return None
        name = name_of(intent.request_id, named.batch_id)
        retention = self._desk.config.data_retention
        known = await find(self._store.records, name, intent.time, retention)
        missing = [vin for vin in vins if vin not in found.ours and vin not in found.superseded]
        record = recovered(found.batch, intent, named, known, len(found.ours), replaced, missing)
        return writing(name, record, retention) if record is not None else None

    async def _pending(self, vin: str, found: _Found) -> None:
        """What waits for a vehicle, of one request."""
        after = 0
        while True:
            entries = await self._store.mailboxes.read(owner_of(vin), after, PAGE, self._now())
            for entry in entries:
                after = entry.position
                found.see(vin, entry)
            if len(entries) < PAGE:
                return

    def _receipt(self, intent: IntentRecord, name: str, state: State, reason: str = "", attempt: int = 0) -> Receipt:
        return Receipt(
            state=state,
            vin=_parts(name)[0],
            request_id=intent.request_id,
            delivery_id=name,
            time=self._now(),
            node=self._node,
            attempt=attempt,
            reason=reason,
        )


class _Found:
    """What waits for the vehicles of a batch, of its request."""

    def __init__(self, batch: bytes, intent: IntentRecord) -> None:
        self.batch = batch
        self.intent = intent
        self.pending: dict[str, bool] = {}  # delivery id -> whether it belongs to this batch
        self.ours: set[str] = set()  # vehicles that have it
        self.superseded: set[str] = set()  # vehicles that have a later one which would have replaced it

    def see(self, vin: str, entry: Entry) -> None:
        try:
            record = decode_entry(entry.body)
        except RecordError:
            return
        if record.request_id != self.intent.request_id:
            return
        is_ours = record.batch == self.batch
        self.pending[delivery_id(vin, entry.position)] = is_ours
        named = self.intent.named
        if is_ours:
            self.ours.add(vin)
        elif named is not None and not named.appends and entry.key and record.accepted_at > self.intent.time:
            self.superseded.add(vin)


def _parts(name: str) -> tuple[str, int]:
    vin, _, position = name.rpartition(".")
    return vin, int(position)
