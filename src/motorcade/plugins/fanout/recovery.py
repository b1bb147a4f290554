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
With several members an intent is completed by its own one while that is alive, else by the steward of the request. Both
say so in the intent first, so that no other one does it.

Rule 4: there, entries go before their receipts, and batches of several members may replace each other's entries. So an
        entry that is gone counts as replaced only if no other batch under way names its vehicle, and its end is not
        about to be told (`outbox`, rule 2). Of two batches in doubt the one with the greater guid waits for the other;
        what is not in doubt is over soon.
Rule 5: of a batch with an id it is written down besides for which vehicles it is stored (`dedup`, rules 2 and 3). What
        is pending tells, since nothing of it, nor of later batches, is sent or ends otherwise before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from motorcade.commit import Commit
from motorcade.core.receipt import FINAL, Receipt, State, delivery_id
from motorcade.core.record import RecordError
from motorcade.plugins.fanout.dedup import find, put, recovered, vins_of
from motorcade.plugins.fanout.members import Hint
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.receipt_format import history_draft
from motorcade.plugins.fanout.record import BatchRecord, IntentRecord, decode_entry, decode_intent, encode
from motorcade.plugins.fanout.tables import CLAIMS, INTENTS, done_of, name_of, owner_of
from motorcade.storage.ports import Batch, Bound, Entry, StoreConflictError, StoreError

PAGE: Final = 500  #: entries read at once
NOTHING: Final = 0  #: no entry has this position
TRIES: Final = 25  #: looks for other batches that are under way
AGAIN: Final = 0.2  #: seconds until it is looked whether other batches are still under way


class Recovery:
    """Completes what was begun."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        self._table = parts.table
        self._log = parts.context.log
        self._members = parts.members
        self._outbox = parts.receipts.outbox
        self._taken: dict[bytes, IntentRecord] = {}  # of members that are gone, until they are completed

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

    async def complete_left(self, is_ours: Callable[[str], bool]) -> None:
        """Complete the batches of members that are gone, of the requests that are this member's."""
        members = self._members
        assert members is not None  # noqa: S101 - a node by itself has `run`
        for batch, value, intent in await self._intents():
            if batch in self._taken or members.is_alive(intent.member) or not is_ours(intent.request_id):
                continue
            self._log.info("fanout_batch_left", request_id=intent.request_id, member=intent.member)
            taken = await self._doubt(batch, value, intent)
            if taken is not None:
                self._taken[batch] = taken
        for batch in sorted(self._taken):  # all are taken: of each two the first one goes first (rule 4)
            intent = self._taken[batch]
            found = await self.complete(batch, intent)
            del self._taken[batch]
            ends = [parts_of(receipt.delivery_id) for receipt in found if receipt.state is State.REPLACED]
            members.told.add(batch)
            hint = Hint(batch, list(vins_of(intent.vins)), ends)
            members.hint("", hint)
            self._parts.hinted(hint)

    async def _doubt(self, batch: bytes, value: bytes, intent: IntentRecord) -> IntentRecord | None:
        """Say in an intent that this member completes it; None if it has become another one."""
        assert self._members is not None  # noqa: S101
        taken = msgspec.structs.replace(intent, member=self._members.me, in_doubt=True)
        steps = Batch()
        steps.put(INTENTS, batch.hex(), encode(taken), expect=value, now=self._parts.now())
        try:
            await self._store.write(steps)
        except StoreConflictError:
            return None
        return taken

    async def _intents(self) -> list[tuple[bytes, bytes, IntentRecord]]:
        """Return all intents, in the order of their guids, with what is stored of them."""
        found = []
        async for key, value in self._store.records.scan(INTENTS, self._parts.now()):
            try:
                found.append((bytes.fromhex(key), value, decode_intent(value)))
            except (RecordError, ValueError) as error:
                self._log.warning("fanout_intent_unreadable", key=key, error=str(error))
        return sorted(found)

    async def _read_alone(self, found: _Found, vins: Sequence[str]) -> _Found:
        """Read what is pending while no other batch of the request is under way for any of the vehicles (rule 4).

        `StoreError` if that takes long: by then there may be another one in doubt that has to go first.
        """
        assert self._members is not None  # noqa: S101
        named = set(vins)
        for _ in range(TRIES):
            for vin in vins:
                await self._read_pending(vin, found)
            for batch, _, intent in await self._intents():
                in_doubt = intent.in_doubt or not self._members.is_alive(intent.member)
                waits = not (in_doubt and batch > found.batch)
                other = batch != found.batch and intent.request_id == found.intent.request_id
                if other and waits and not named.isdisjoint(vins_of(intent.vins)):
                    break
            else:
                return found
            await asyncio.sleep(AGAIN)
            found = _Found(found.batch, found.intent)
        raise StoreError(f"other batches of request {found.intent.request_id!r} are under way")

    async def _gone(
        self, request_id: str, pending: Collection[str], vins: Sequence[str]
    ) -> tuple[dict[str, Receipt], list[Receipt]]:
        """Return what was told of vehicles, and the last receipts of what was replaced, and is not final."""
        last_receipts = self._parts.queries.last_receipts
        told = await last_receipts(request_id, set(vins))
        gone = [receipt for name, receipt in told.items() if receipt.state not in FINAL and name not in pending]
        if self._outbox is not None and gone:
            untold = await self._outbox.untold(parts_of(receipt.delivery_id) for receipt in gone)
            told = await last_receipts(request_id, set(vins))  # behind that: what is told by now is there
            gone = [
                receipt
                for name, receipt in told.items()
                if receipt.state not in FINAL and name not in pending and parts_of(name) not in untold
            ]
        return told, gone

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
        if self._members is not None:
            value = await self._store.records.get(INTENTS, batch.hex(), self._parts.now())
            taken = await self._doubt(batch, value, intent) if value is not None else None
            if taken is None:
                return []  # nothing of it was stored
            intent = taken
        return await self.complete(batch, intent)

    async def complete(self, batch: bytes, intent: IntentRecord) -> list[Receipt]:
        """Write the receipts that are missing for a batch, and remove its intent; these receipts."""
        found = _Found(batch, intent)
        vins = vins_of(intent.vins)
        if self._members is not None:
            found = await self._read_alone(found, vins)
        else:
            for number, vin in enumerate(vins):
                await self._read_pending(vin, found)
                if number % PAGE == PAGE - 1:
                    await asyncio.sleep(0)
        pending = found.pending
        told, gone = await self._gone(intent.request_id, pending, vins)
        missing = [
            self._receipt(intent, name, State.ACCEPTED)
            for name, is_ours in pending.items()
            if is_ours and name not in told
        ]
        # Of several members it is the store that says that they have not ended otherwise.
        ends = [
            self._receipt(intent, receipt.delivery_id, State.REPLACED, "reissued", receipt.attempt)
            for receipt in gone
            if self._table.end(*parts_of(receipt.delivery_id)) or self._members is not None
        ]
        if len(ends) < len(gone):
            await self._parts.receipts.settle()  # some have ended otherwise: before the intent goes
        also = Batch()
        record = await self._recovered(found, vins, len(ends))
        config = self._table.config
        if record is not None and intent.named is not None:
            put(also, name_of(intent.request_id, intent.named.batch_id), record, config.data_retention)
        if intent.named is not None and self._members is not None:
            also.delete(CLAIMS, name_of(intent.request_id, intent.named.batch_id))
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
