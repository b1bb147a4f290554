"""Batches from the platform, on their way into the store.

    PUBLISH ─▶ parsed, checked ─▶ [ line ] ─▶ one append to all VINs ─▶ receipts ─▶ PUBACK, triggers
                   │           only if something is to be looked up        (many under way)
                   └─ wrong: refused, nothing stored

Rule 1: a batch is checked as a whole before anything of it is stored.
Rule 2: appends begin in the order in which batches came, so that a request that is issued again replaces the one before
        and not the other way round.
Rule 3: the publisher is answered when the entries and their receipts are stored. With the entries an intent is stored,
        and removed with the receipts: if the node dies in between, the next start finds the intent and writes what is
        missing (`recovery`). If a part of the entries may be stored, the publisher is told that it failed, and the same
        is done at once.
Rule 4: a vehicle that has as many messages pending as it may have gets no more: its own delivery has `failed`, with the
        reason `pending_limit`, and the answer tells how many were `rejected`. One vehicle that never comes must not
        hold up a campaign.
Rule 5: receipts of several batches are under way at a time, but batches end in the order in which they came, and one
        that replaces entries of another waits for it. So no vehicle gets the later of two messages first, and no
        receipt says `replaced` before `accepted`, however often something has to be written again.
Rule 6: a batch with a `batch_id` that was stored before is answered, and stored no more (`dedup`).
Rule 7: every publisher is answered. When the plugin is unloaded while batches wait for the store, their publishers are
        disconnected; what is stored of them has its intent, and the next start completes it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Coroutine
from functools import partial
from secrets import token_bytes
from typing import Any, Final

import msgspec

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import Receipt, State, delivery_id
from motorcade.extension.hooks import Handled, acknowledge_after
from motorcade.plugins.fanout import batch as batches
from motorcade.plugins.fanout.batch import BadBatchError, FanoutBatch
from motorcade.plugins.fanout.counters import UNLOADED
from motorcade.plugins.fanout.dedup import BatchDedup, named_of
from motorcade.plugins.fanout.inflight import ACTIVE, delivery_of
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.payloads import MissingDataError, Payloads
from motorcade.plugins.fanout.pending_batch import BatchResult, PendingBatch, Stage
from motorcade.plugins.fanout.receipt_format import AcceptedRun, history_draft
from motorcade.plugins.fanout.receipt_writer import RETRY
from motorcade.plugins.fanout.record import EntryRecord, encode
from motorcade.plugins.fanout.recovery import Recovery, parts_of
from motorcade.plugins.fanout.tables import ENTRIES, INTENTS, PRIORITISED, REQUESTS, STATE, done_of, owner_of
from motorcade.storage.ports import Batch, Bound, Draft, StoreError, StoreFullError, Written

FLOORS: Final = 100_000  #: vehicles of which it is known how many messages were pending once


class Ingress:
    """The batches of one node."""

    def __init__(self, parts: Parts, recovery: Recovery) -> None:
        self._parts = parts
        self._store = parts.store
        self._now = parts.now
        self._counters = parts.context.counters
        self._log = parts.context.log
        self._table = parts.table
        self._recovery = recovery
        self.payloads = Payloads(parts.context, parts.table)
        self.dedup = BatchDedup(self._store.records, parts.table, self._now, self._counters)
        self._line: asyncio.Queue[PendingBatch] = asyncio.Queue()
        self._in_line = 0  # batches that are, the one being prepared included
        self._all: dict[PendingBatch, None] = {}  # that have come and are not over
        self._unwritten: deque[PendingBatch] = deque()  # appended, in order; receipts not begun
        self._under_way: deque[PendingBatch] = deque()  # appended, in order; not over
        self._of_request: dict[str, dict[PendingBatch, None]] = {}  # those, by request
        self._closed = False
        self._floors: OrderedDict[str, int] = OrderedDict()  # VIN -> messages that are gone for certain

    # -- what is published

    def publish(self, message: Message, *, trigger: bool) -> Handled:
        """Take a batch; the answer to its publisher."""
        try:
            parsed = batches.parse(message.payload, self._table.config, trigger=trigger)
        except BadBatchError as error:
            self._counters["batches_refused"] += 1
            return Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error))
        if parsed.extra:
            self._log.info("batch_has_unknown_keys", request_id=parsed.request_id, keys=list(parsed.extra))
        try:
            batch = self.submit(parsed, message)
        except StoreFullError as error:
            return Handled(ReasonCode.QUOTA_EXCEEDED, str(error))
        acknowledge_after(message, batch.done)
        return Handled(outcome=batch.result.answer)

    def submit(self, parsed: FanoutBatch, message: Message) -> PendingBatch:
        """Take a batch that is right; `StoreFullError` if too many wait."""
        most = self._table.config.max_queued
        if len(self._all) >= most:
            self._counters["batches_refused_queued"] += 1
            raise StoreFullError(f"{most} batches wait for the store (max_queued); send it again later")
        named = named_of(parsed) if parsed.batch_id else None
        now = self._now() if named is None else self.dedup.moment()
        result = BatchResult(parsed.duplicates)
        guid = message.guid or token_bytes(16)
        batch = PendingBatch(parsed, result, guid, message.publisher, now, named, parsed.data)
        if self._closed:
            self._answer(batch, StoreError(UNLOADED))
            return batch
        self._all[batch] = None
        if not self._in_line and self._is_prepared(batch):
            self._append(batch)
        else:
            self._in_line += 1
            self._line.put_nowait(batch)
        return batch

    def _answer(self, batch: PendingBatch, error: Exception | None = None) -> None:
        if batch.done.done:
            return
        if error is not None:
            self._counters["batches_failed"] += 1
        elif batch.result.repeated:
            self._counters["batches_repeated"] += 1
        elif batch.result.refusal:
            self._counters["batches_refused"] += 1
        else:
            self._counters["batches"] += 1
            self._counters["targets"] += batch.result.accepted
        batch.done.finish(error)

    # -- the end

    @property
    def under_way(self) -> int:
        """Return how many batches are not over."""
        return len(self._all)

    async def settle(self) -> None:
        """Wait until the batches and the data that have come by now are stored or refused."""
        for batch in list(self._all):
            await batch.over
        await self.payloads.settle()

    def close(self) -> None:
        """Fail the batches that are not over, and those that still come: their publishers send them again (rule 7)."""
        self._closed = True
        for batch in self._all:
            self._answer(batch, StoreError(UNLOADED))

    # -- the line

    def _is_prepared(self, batch: PendingBatch) -> bool:
        """Return True if a batch can be appended at once."""
        parsed, table = batch.parsed, self._table
        if batch.data is None:
            batch.data = self.payloads.at_hand(parsed.data_id)
        return (
            batch.data is not None
            and batch.named is None
            and not parsed.priority
            and (not table.requests or table.requests.get(parsed.request_id, ACTIVE).state != "cancelled")
        )

    async def run(self) -> None:
        """Prepare one batch after the other, until cancelled (rule 2)."""
        while True:
            batch = await self._line.get()
            try:
                if await self._prepare(batch):
                    self._append(batch)
                    continue
            except MissingDataError as error:
                batch.result.refuse(str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must not wait for ever
                self._answer(batch, error if isinstance(error, StoreError) else StoreError(repr(error)))
            finally:
                self._in_line -= 1
            self._answer(batch)
            self._end(batch)

    async def _prepare(self, batch: PendingBatch) -> bool:
        """Look up what is to be known of a batch; False if nothing of it is to be stored."""
        if batch.named is not None and not await self.dedup.admit(batch, batch.named):
            return False
        if batch.data is None:
            batch.data = await self.payloads.find(batch.parsed.data_id)
        if batch.parsed.priority:
            await self._prioritise()
        await self._use_again(batch)
        return True

    async def _prioritise(self) -> None:
        """Note that the oldest message of a vehicle is not always the next; a collection may find that it is."""
        self._table.priorities += 1
        if not self._table.prioritised:
            self._table.prioritised = True
            try:
                await self._store.records.put(STATE, PRIORITISED, b"1")
            except StoreError:
                self._table.prioritised = False  # the next one tries again; this one is refused
                raise

    async def _use_again(self, batch: PendingBatch) -> None:
        """Make a request active again that was cancelled; what was accepted before stays withdrawn."""
        request_id = batch.parsed.request_id
        if self._table.requests.get(request_id, ACTIVE).state != "cancelled":
            return
        async with self._table.deciding:
            before = self._table.requests.get(request_id, ACTIVE)
            if before.state == "cancelled":
                record = msgspec.structs.replace(before, state="active", since=batch.now)
                until = batch.now + self._table.config.data_retention
                await self._store.records.put(REQUESTS, request_id, encode(record), until)
                self._table.requests[request_id] = record

    # -- entries

    def _append(self, batch: PendingBatch) -> None:
        parsed, now = batch.parsed, batch.now
        expires_at = now + parsed.expires_in if parsed.expires_in is not None else 0.0
        batch.entry = EntryRecord(batch.guid, parsed.request_id, now, expires_at, parsed.priority, batch.publisher)
        key = parsed.request_id.encode() if parsed.mode == "replace" else b""
        steps = Batch()
        steps.put(
            INTENTS, batch.guid.hex(), encode(batch.intent())
        )  # first: where batches are not atomic it must be there
        steps.append(list(map(ENTRIES.__add__, parsed.vins)), Draft(encode(batch.entry), batch.data or b"", key), now)
        self._table.storing.add(batch.guid)
        self._unwritten.append(batch)
        self._under_way.append(batch)
        self._of_request.setdefault(parsed.request_id, {})[batch] = None
        commit = self._store.write(steps)
        commit.then(partial(self._appended, batch, commit))

    def _appended(self, batch: PendingBatch, commit: Commit[Written]) -> None:
        if self._closed:
            return  # its intent tells of it
        if commit.error is not None:
            self._failed(batch, commit.error, unknown=not commit.refused)
            return
        vins, most = batch.parsed.vins, self._table.config.max_pending
        batch.answers = answers = commit.result.appended
        batch.positions = [one.position for one in answers]
        if batch.parsed.mode == "replace":
            batch.replaced = [(vin, one.replaced) for vin, one in zip(vins, answers, strict=True) if one.replaced]
        if most and max(batch.positions) > most:
            self._check(batch, self._find_rejected(batch))
        else:
            batch.stage = Stage.READY
            self._advance()

    async def _find_rejected(self, batch: PendingBatch) -> None:
        """Find the messages that are one too many (rule 4)."""
        most = self._table.config.max_pending
        for vin, answer in zip(batch.parsed.vins, batch.answers, strict=True):
            if answer.replaced or answer.position - self._floors.get(vin, 0) <= most:
                continue
            info = await self._store.mailboxes.info(answer.owner)
            self._floors[vin] = info.last - info.entries
            self._floors.move_to_end(vin)
            if len(self._floors) > FLOORS:
                self._floors.popitem(last=False)
            if info.entries > most:
                batch.rejected.append((vin, answer.position))

    def _check(self, batch: PendingBatch, work: Coroutine[Any, Any, None]) -> None:
        """Let a batch wait until something is found out."""
        batch.stage = Stage.CHECKING
        self._parts.context.spawn(self._checked(batch, work), "batch")

    async def _checked(self, batch: PendingBatch, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must not wait for ever
            if not isinstance(error, StoreError):
                self._log.exception("fanout_batch_failed", request_id=batch.parsed.request_id)
            self._failed(batch, error, unknown=True)
        else:
            batch.stage = Stage.READY
            self._advance()

    def _failed(self, batch: PendingBatch, error: BaseException, *, unknown: bool) -> None:
        """Tell the publisher at once; `unknown`: something of the batch may be stored."""
        batch.failed = True
        batch.stage = Stage.UNKNOWN if unknown else Stage.DONE
        self._answer(batch, error if isinstance(error, StoreError) else StoreError(repr(error)))
        self._advance()

    # -- receipts, in the order of the batches (rule 5)

    def _advance(self) -> None:
        """End the batches that can end, then begin the receipts that can begin."""
        while self._under_way and not self._closed:
            batch = self._under_way[0]
            if batch.stage is Stage.UNKNOWN:
                self._counters["batches_doubted"] += 1
                batch.stage = Stage.RECOVERING
                self._parts.context.spawn(self._recover(batch), "batch")
            if batch.stage is not Stage.DONE:
                break
            self._under_way.popleft()
            self._end(batch)
            if not batch.failed:
                self._answer(batch)
                self._offer(batch)
        while self._unwritten and not self._closed:
            batch = self._unwritten[0]
            if batch.stage is Stage.READY:
                if batch.replaced and not self._may_replace(batch):
                    break
            elif batch.stage is not Stage.DONE:
                break
            self._unwritten.popleft()
            if not batch.failed:
                self._write_receipts(batch)

    def _end(self, batch: PendingBatch) -> None:
        """Let messages of a batch be sent, and the next batch of its name come."""
        self._all.pop(batch, None)
        self._table.storing.discard(batch.guid)
        if batch.named is not None:
            self.dedup.over(batch, batch.named)
        others = self._of_request.get(batch.parsed.request_id)
        if others is not None:
            others.pop(batch, None)
            if not others:
                del self._of_request[batch.parsed.request_id]
        batch.over.finish()

    def _may_replace(self, batch: PendingBatch) -> bool:
        """Return True when the receipts of what a batch has replaced can be written; else see to it."""
        vins = set(batch.parsed.vins)
        for other in self._of_request[batch.parsed.request_id]:
            if other is batch:
                break
            if not vins.isdisjoint(other.parsed.vins):
                return False  # it ends first
        if batch.ends is None:
            batch.ends = [end for end in batch.replaced if self._table.end(*end)]
            if len(batch.ends) < len(batch.replaced) or batch.is_behind_unknown:
                self._check(batch, self._settle_replaced(batch))
                return False
        return True

    async def _settle_replaced(self, batch: PendingBatch) -> None:
        """Wait for final receipts of replaced entries that have ended otherwise: until then the intent stays."""
        await self._parts.receipts.settle()
        while batch.is_behind_unknown:
            try:
                batch.never_accepted = await self._recovery.unknown(batch.parsed.request_id, batch.replaced)
                break
            except StoreError:
                await asyncio.sleep(RETRY)

    def _write_receipts(self, batch: PendingBatch) -> None:
        """Write the receipts of a batch, and with them that it is complete."""
        table, parsed, result = self._table, batch.parsed, batch.result
        replaced = batch.ends or ()
        result.replaced = len(replaced)
        result.rejected = len(batch.rejected)
        result.accepted = len(parsed.vins) - len(batch.rejected)
        if batch.known is not None:
            result.add(batch.known)
        also = Batch()
        if batch.named is not None:
            self.dedup.keep(also, batch, batch.named)  # before anything is removed by which it could be found out
        receipts: list[Receipt] = []
        if replaced or batch.rejected:
            receipts = [self._receipt(batch, *end, State.REPLACED, "reissued") for end in replaced]
            rejected = [end for end in batch.rejected if table.end(*end)]
            receipts += [self._receipt(batch, *end, State.FAILED, "pending_limit") for end in rejected]
            bound = Bound(entries=table.config.history)
            for receipt in receipts:
                also.append([done_of(receipt.vin)], history_draft(receipt, table.config), batch.now, bound)
            for vin, position in batch.rejected:
                also.acknowledge(owner_of(vin), [position])
        also.delete(INTENTS, batch.guid.hex())
        if batch.never_accepted:
            receipts = [self._receipt(batch, *end, State.ACCEPTED) for end in batch.never_accepted] + receipts
        run = AcceptedRun(parsed.vins, batch.positions, parsed.request_id, batch.now)
        batch.stage = Stage.WRITING
        self._parts.receipts.write(also, self._now(), partial(self._stored, batch), receipts, run)

    def _stored(self, batch: PendingBatch) -> None:
        if batch.named is not None and batch.known is None:
            self.dedup.count += 1
        batch.stage = Stage.DONE
        self._advance()

    def _receipt(self, batch: PendingBatch, vin: str, position: int, state: State, reason: str = "") -> Receipt:
        held = self._table.inflight.get(vin)
        return Receipt(
            state=state,
            vin=vin,
            request_id=batch.parsed.request_id,
            delivery_id=delivery_id(vin, position),
            time=batch.now,
            node=self._parts.context.hub.node,
            attempt=held.attempts if held is not None and held.position == position else 0,
            reason=reason,
        )

    async def _recover(self, batch: PendingBatch) -> None:
        """Find out which entries of a batch are stored, and write their receipts (rule 3)."""
        while True:
            try:
                found = await self._recovery.complete_now(batch.guid, batch.intent())
                break
            except StoreError as error:
                self._log.warning("fanout_batch_not_completed", request_id=batch.parsed.request_id, error=str(error))
                await asyncio.sleep(RETRY)
        vins = batch.parsed.vins
        for other in self._of_request[batch.parsed.request_id]:
            other.is_behind_unknown |= not set(vins).isdisjoint(other.parsed.vins)
        batch.stage = Stage.DONE
        self._advance()
        self._table.drained.difference_update(vins)
        for receipt in found:
            if receipt.state is State.REPLACED:
                self._parts.receipts.ended(*parts_of(receipt.delivery_id))
        for vin in vins:
            self._parts.triggers.trigger(vin, "batch")

    def _offer(self, batch: PendingBatch) -> None:
        """Give vehicles that are there their message; one whose message was replaced in flight is free for the next."""
        table, entry = self._table, batch.entry
        if entry is None or not (table.sources or table.inflight):
            return
        now, data, config = self._now(), batch.data or b"", table.config
        rejected = dict(batch.rejected)
        for vin, answer in zip(batch.parsed.vins, batch.answers, strict=True):
            held = table.inflight.get(vin)
            if held is not None and held.position == answer.replaced:
                self._parts.receipts.ended(vin, held.position)
            if vin in table.sources and vin not in rejected:
                if table.offer_new(delivery_of(vin, answer.position, entry, data, config), now):
                    self._counters["trigger_batch"] += 1
                else:
                    self._parts.triggers.trigger(vin, "batch")
