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
        With several members `accepted` receipts wait for nothing. Those of what a batch has replaced follow when the
        batches of the request that are under way, here and elsewhere, have theirs.
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
from motorcade.plugins.fanout.members import ACCEPTED, IN_DOUBT, OVER, FanoutMembers, Hint
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.payloads import MissingDataError, Payloads
from motorcade.plugins.fanout.pending_batch import BatchResult, PendingBatch, Stage
from motorcade.plugins.fanout.receipt_format import AcceptedRun, history_draft
from motorcade.plugins.fanout.receipt_writer import RETRY
from motorcade.plugins.fanout.record import EntryRecord, RequestRecord, encode
from motorcade.plugins.fanout.recovery import Recovery, parts_of
from motorcade.plugins.fanout.tables import ENTRIES, INTENTS, done_of, owner_of
from motorcade.storage.ports import Batch, Bound, Draft, StoreError, StoreFullError, Written

PENDING: Final = "pending_limit"  #: reason of what is one too many
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
        self._members = parts.members
        self._outbox = parts.receipts.outbox
        self.dedup = BatchDedup(self._store, parts.table, self._now, self._counters, parts.members)
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
        batch.era = self._table.requests.get(parsed.request_id, ACTIVE).era
        if self._members is not None:
            batch.member = self._members.me
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

    def start(self) -> None:
        """Begin to answer other members."""
        if self._members is not None:
            cluster, at_end = self._members.cluster, self._parts.context.at_end
            at_end(cluster.on_ask(OVER, self._answer_over))
            at_end(cluster.on_ask(ACCEPTED, self._answer_accepted))

    async def _answer_over(self, _member: str, guid: bytes) -> bytes:
        """Answer when a batch is not under way here."""
        for batch in [batch for batch in self._all if batch.guid == guid]:
            await batch.over
        return b""

    async def _answer_accepted(self, _member: str, body: bytes) -> bytes:
        """Answer when batches of a request that are under way here now have their `accepted` receipts."""
        batches = list(self._of_request.get(body.decode(), ()))
        for batch in batches:
            await batch.told
        return IN_DOUBT if any(batch.failed for batch in batches) else b""

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
            batch.told.finish()
            if self._members is not None:
                batch.over.finish()  # other members wait for it; its intent tells of it

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
            await self._parts.decisions.prioritise()
        request_id = batch.parsed.request_id
        if self._table.requests.get(request_id, ACTIVE).state == "cancelled":
            await self._parts.decisions.decide(request_id, partial(_use_again, batch))
        return True

    # -- entries

    def _append(self, batch: PendingBatch) -> None:
        parsed, now = batch.parsed, batch.now
        expires_at = now + parsed.expires_in if parsed.expires_in is not None else 0.0
        batch.entry = EntryRecord(
            batch.guid, parsed.request_id, now, expires_at, parsed.priority, batch.publisher, batch.era
        )
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
        batch.told.finish()
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
                if self._members is None and batch.replaced and not self._may_replace(batch):
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
        if self._members is not None and not batch.failed:
            self._members.told.add(batch.guid)
        batch.told.finish()
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
        if self._outbox is not None and not batch.told.done and (batch.replaced or batch.rejected):
            batch.stage = Stage.WRITING
            self._parts.receipts.write(Batch(), self._now(), partial(self._accepted, batch), (), self._run_of(batch))
            return
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
            rejected = [end for end in batch.rejected if self._outbox is None and table.end(*end)]
            receipts += [self._receipt(batch, *end, State.FAILED, PENDING) for end in rejected]
            bound = Bound(entries=table.config.history)
            for receipt in receipts:
                also.append([done_of(receipt.vin)], history_draft(receipt, table.config), batch.now, bound)
            for vin, position in batch.rejected if self._outbox is None else ():
                also.acknowledge(owner_of(vin), [position])
        also.delete(INTENTS, batch.guid.hex())
        if batch.never_accepted:
            receipts = [self._receipt(batch, *end, State.ACCEPTED) for end in batch.never_accepted] + receipts
        batch.stage = Stage.WRITING
        self._parts.receipts.write(also, self._now(), partial(self._stored, batch), receipts, self._run_of(batch))

    def _run_of(self, batch: PendingBatch) -> AcceptedRun | None:
        """Return the `accepted` receipts of a batch that are not stored yet."""
        if batch.told.done:
            return None
        return AcceptedRun(batch.parsed.vins, batch.positions, batch.parsed.request_id, batch.now)

    def _accepted(self, batch: PendingBatch) -> None:
        """Go on with a batch of several members: its `accepted` receipts are stored."""
        batch.told.finish()
        batch.stage = Stage.CHECKING
        self._parts.context.spawn(self._end_others(batch), "batch")

    async def _end_others(self, batch: PendingBatch) -> None:
        try:
            await self._settle_others(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must not wait for ever
            if not isinstance(error, StoreError):
                self._log.exception("fanout_batch_failed", request_id=batch.parsed.request_id)
            self._failed(batch, error, unknown=True)
        else:
            self._write_receipts(batch)

    async def _settle_others(self, batch: PendingBatch) -> None:
        """End what a batch has replaced, and what is one too many, when that may be told (rule 5).

        The appends of the batch have removed what it has replaced: so no other member tells of it.
        """
        assert self._members is not None  # noqa: S101
        assert self._outbox is not None  # noqa: S101
        assert batch.entry is not None  # noqa: S101
        rejected = []
        for vin, position in batch.rejected:
            self._table.end(vin, position)
            delivery = delivery_of(vin, position, batch.entry, b"", self._table.config)
            rejected.append(self._outbox.end(delivery, self._receipt(batch, vin, position, State.FAILED, PENDING)))
        for ending in rejected:
            await ending
        if batch.replaced:
            for other in list(self._of_request[batch.parsed.request_id]):
                if other is batch:
                    break
                await other.told
                batch.is_behind_unknown |= other.failed
            known = await self._members.until_accepted(batch.parsed.request_id)
            while batch.is_behind_unknown or not known:
                try:
                    batch.never_accepted = await self._recovery.unknown(batch.parsed.request_id, batch.replaced)
                    break
                except StoreError:
                    await asyncio.sleep(RETRY)
        for end in batch.replaced:
            self._table.end(*end)
        batch.ends = list(batch.replaced)

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
        if self._members is not None:
            self._hint(batch, self._members)
        if entry is None or not (table.sources or table.inflight):
            return
        now, data, config = self._now(), batch.data or b"", table.config
        rejected = dict(batch.rejected)
        for vin, answer in zip(batch.parsed.vins, batch.answers, strict=True):
            held = table.inflight.get(vin)
            if self._outbox is not None and answer.replaced:
                self._parts.replaced(vin, answer.replaced)
            elif held is not None and held.position == answer.replaced:
                self._parts.receipts.ended(vin, held.position)
            if vin in table.sources and vin not in rejected:
                if table.offer_new(delivery_of(vin, answer.position, entry, data, config), now):
                    self._counters["trigger_batch"] += 1
                else:
                    self._parts.triggers.trigger(vin, "batch")

    def _hint(self, batch: PendingBatch, members: FanoutMembers) -> None:
        """Tell the members that have vehicles of a batch attached (`members`, rule 1)."""
        hints: dict[str, Hint] = {}
        for vin, answer in zip(batch.parsed.vins, batch.answers, strict=True):
            if answer.attached and answer.attached != members.me:
                hint = hints.setdefault(answer.attached, Hint(batch.guid, [], []))
                hint.vins.append(vin)
                if answer.replaced:
                    hint.replaced.append((vin, answer.replaced))
        for member, hint in hints.items():
            self._counters["hints_sent"] += 1
            members.hint(member, hint)


def _use_again(batch: PendingBatch, before: RequestRecord) -> RequestRecord | None:
    """Make a request active again that was cancelled; what was accepted before stays withdrawn."""
    if before.state != "cancelled":
        return None
    return msgspec.structs.replace(before, state="active", since=batch.now)
