"""Receipts that are missing for a batch of which it is not known whether it was stored.

An append removes what a batch replaces, and only its answer tells which entries those were; so their receipts, and the
`accepted` ones of the new entries, come in a second batch. If the process dies in between, or the store takes a part of
the entries and refuses the rest, an intent is left (`ingress`, rule 3). What is missing follows from what its vehicles
have pending and the receipts of the request:

    entry of the batch without any receipt                          ->  accepted
    delivery of the request that is not final, and has no entry     ->  replaced: nothing else removes an entry without
                                                                        writing its receipt with it

Rule 1: entries are read first, then receipts. What was removed by a write of its final receipt is final by then.
Rule 2: in a process that goes on, batches of the same request that came before must have their receipts, and entries of
        those that came later must be there if they are to be: something is written to each mailbox first, behind them.
Rule 3: a delivery that ends meanwhile ends once (`inflight`, rule 2); the intent stays until that is written down.
Rule 4: of a batch with an id it is written down besides for which vehicles it is stored (`dedup`, rules 2 and 3). What
        is pending tells, since nothing of it, nor of later batches, is sent or ends otherwise before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from motorcade.commit import Commit
from motorcade.core.receipt import FINAL, Receipt, State, delivery_id
from motorcade.core.record import RecordError
from motorcade.plugins.fanout.dedup import find, put, recovered, vins_of
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.receipt_format import history_draft
from motorcade.plugins.fanout.record import BatchRecord, IntentRecord, decode_entry, decode_intent
from motorcade.plugins.fanout.tables import INTENTS, done_of, name_of, owner_of
from motorcade.storage.ports import Batch, Bound, Entry

PAGE: Final = 500  #: entries read at once
NOTHING: Final = 0  #: no entry has this position


class Recovery:
    """Completes what was begun."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        self._table = parts.table
        self._log = parts.context.log

    async def run(self) -> int:
        """Write what the process before has left; how many batches were incomplete."""
        found = [item async for item in self._store.records.scan(INTENTS, self._parts.now())]
        for key, value in found:
            try:
                intent, batch = decode_intent(value), bytes.fromhex(key)
            except (RecordError, ValueError) as error:
                self._log.warning("fanout_intent_unreadable", key=key, error=str(error))
                await self._store.records.delete(INTENTS, key)
                continue
            await self.complete(batch, intent)
        if found:
            self._log.info("fanout_batches_completed", batches=len(found))
        return len(found)

    async def unknown(self, request_id: str, deliveries: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those of these deliveries (VIN, position) of which there is no receipt."""
        told = await self._parts.queries.last_receipts(request_id, {vin for vin, _ in deliveries})
        return [(vin, position) for vin, position in deliveries if delivery_id(vin, position) not in told]

    async def complete_now(self, batch: bytes, intent: IntentRecord) -> list[Receipt]:
        """Do the same while the process goes on (rule 2)."""
        barrier = Batch()
        for vin in vins_of(intent.vins):
            barrier.acknowledge(owner_of(vin), [NOTHING])
        await self._store.write(barrier)
        return await self.complete(batch, intent)

    async def complete(self, batch: bytes, intent: IntentRecord) -> list[Receipt]:
        """Write the receipts that are missing for a batch, and remove its intent; these receipts."""
        found = _Found(batch, intent)
        vins = vins_of(intent.vins)
        for number, vin in enumerate(vins):
            await self._read_pending(vin, found)
            if number % PAGE == PAGE - 1:
                await asyncio.sleep(0)
        pending = found.pending
        told = await self._parts.queries.last_receipts(intent.request_id, set(vins))
        missing = [
            self._receipt(intent, name, State.ACCEPTED)
            for name, is_ours in pending.items()
            if is_ours and name not in told
        ]
        gone = [receipt for name, receipt in told.items() if receipt.state not in FINAL and name not in pending]
        ends = [
            self._receipt(intent, receipt.delivery_id, State.REPLACED, "reissued", receipt.attempt)
            for receipt in gone
            if self._table.end(*parts_of(receipt.delivery_id))
        ]
        if len(ends) < len(gone):
            await self._parts.receipts.settle()  # some have ended otherwise: before the intent goes
        also = Batch()
        record = await self._recovered(found, vins, len(ends))
        config = self._table.config
        if record is not None and intent.named is not None:
            put(also, name_of(intent.request_id, intent.named.batch_id), record, config.data_retention)
        bound = Bound(entries=config.history)
        for receipt in ends:
            also.append([done_of(receipt.vin)], history_draft(receipt, config), receipt.time, bound)
        also.delete(INTENTS, batch.hex())
        stored: Commit[None] = Commit()
        self._parts.receipts.write(also, self._parts.now(), stored.finish, missing + ends)
        await stored
        return missing + ends

    async def _recovered(self, found: _Found, vins: Sequence[str], replaced: int) -> BatchRecord | None:
        """Return what is to be remembered of a batch with an id."""
        intent, named = found.intent, found.intent.named
        if named is None:
            return None
        name = name_of(intent.request_id, named.batch_id)
        known = await find(self._store.records, name, intent.time, self._table.config.data_retention)
        missing = [vin for vin in vins if vin not in found.ours and vin not in found.superseded]
        return recovered(found.batch, intent, named, known, len(found.ours), replaced, missing)

    async def _read_pending(self, vin: str, found: _Found) -> None:
        """Read what is pending for a vehicle, of one request."""
        after = 0
        while True:
            entries = await self._store.mailboxes.read(owner_of(vin), after, PAGE, self._parts.now())
            for entry in entries:
                after = entry.position
                found.see(vin, entry)
            if len(entries) < PAGE:
                return

    def _receipt(self, intent: IntentRecord, name: str, state: State, reason: str = "", attempt: int = 0) -> Receipt:
        return Receipt(
            state=state,
            vin=parts_of(name)[0],
            request_id=intent.request_id,
            delivery_id=name,
            time=self._parts.now(),
            node=self._parts.context.hub.node,
            attempt=attempt,
            reason=reason,
        )


class _Found:
    """The pending entries of a request for the vehicles of a batch."""

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


def parts_of(name: str) -> tuple[str, int]:
    """Return VIN and position of a delivery id."""
    vin, _, position = name.rpartition(".")
    return vin, int(position)
