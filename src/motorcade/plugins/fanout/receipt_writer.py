"""Receipts on their way: into the stream together with what they tell of, then to the counts and to subscribers.

    sent, retried     ─▶ [ notes ] ─┐ one write at a time: receipts, removals, history
    acked, failed, …  ─▶ [ notes ] ─┴─▶ store ─┬─▶ counts; readers of `$stream/receipts` (the store tells them)
    a batch: accepted, replaced ──────▶  │     ├─▶ topics of the receipts, if there are subscribers
                                         │     └─▶ the vehicle is free for its next message
                                         └─ refused ─▶ again after `RETRY`

Rule 1: a final receipt and the removal of its entry are one batch. Where batches are not atomic (Redis) the receipt
        goes first: a crash in between may repeat it, but never lose it.
Rule 2: no subscriber hears of a receipt that is not stored, and a vehicle gets its next message when the final receipt
        of the last one is stored (`InflightTable.stored`).
Rule 3: what the store refuses is written again, for ever; meanwhile vehicles with something to be written wait. Where
        a store has taken a part of a batch and refuses the rest, a receipt may be in the stream twice.
Rule 4: receipts of one delivery are written one after the other, so they stand in the stream as it happened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.receipt import LATE_ACK, Receipt, State, encode, topic_of
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.counters import UNLOADED, AcceptedRun, Block, RequestCounters
from motorcade.plugins.fanout.inflight import Delivery, InflightTable
from motorcade.plugins.fanout.receipt_format import QOS, ReceiptFormat, history_draft
from motorcade.plugins.fanout.tables import INGRESS, RECEIPTS, done_of, mark_of, owner_of
from motorcade.storage.ports import Batch, Bound, Store, StoreError, Written

GROUP: Final = 1000  #: notes in one batch
MAX_UNPUBLISHED: Final = 10_000  #: receipts that wait to be published to subscribers; more are left out, counted
RETRY: Final = 1.0  #: seconds until a refused write is tried again

Note = tuple[Delivery, Receipt, bool]  #: something that happened to a delivery, and whether it has ended with that


class _Write:
    """A batch with receipts, until it is stored."""

    __slots__ = ("accepted", "batch", "done", "receipts", "unknown")

    def __init__(self, batch: Batch, receipts: Sequence[Receipt], accepted: AcceptedRun | None) -> None:
        self.batch = batch
        self.receipts = receipts
        self.accepted = accepted
        self.unknown: list[Block] = []  #: of earlier attempts, of which a part may be stored
        self.done: Commit[None] = Commit()


class ReceiptWriter:
    """Writes and publishes the receipts of one node."""

    def __init__(self, context: Context, table: InflightTable, counters: RequestCounters) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._store = cast("Store", context.store)
        self._hub = context.hub
        self._now = context.hub.now
        self._node = context.hub.node
        self._counters = context.counters
        self._table = table
        self._requests = counters
        self.format = ReceiptFormat(self._node, self._now)
        self._notes: list[Note] = []  # not given to the store yet
        self._writing: list[Note] = []
        self._flushing = False  # `_flush` is going to be called
        self._stored = 0  # notes, since the start
        self._turned: Commit[None] = Commit()  # the notes that are being written are stored; a new one each time
        self._closed = False
        self._failing = False
        self.finished = 0  #: final receipts in the histories of vehicles, about; the sweeper counts them
        self._unpublished: deque[Message] = deque()
        self._publishing = False

    # -- what happens to single deliveries

    @property
    def unwritten(self) -> int:
        """Return how many notes are not stored yet."""
        return len(self._notes) + len(self._writing)

    def note(self, delivery: Delivery, state: State, now: float, reason: str = "", *, final: bool = False) -> None:
        """Write a receipt of what has happened to a delivery; `final`: with the removal of its entry."""
        receipt = Receipt(
            state=state,
            vin=delivery.vin,
            request_id=delivery.entry.request_id,
            delivery_id=delivery.name,
            time=now,
            node=self._node,
            attempt=delivery.attempts,
            reason=reason,
        )
        self._notes.append((delivery, receipt, final))
        if not self._flushing and not self._writing:
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._flushing = True
        self._loop.call_soon(self._flush)  # what happens in the same turn goes together

    def _flush(self) -> None:
        self._flushing = False
        if self._closed:
            return
        self._writing, self._notes = self._notes[:GROUP], self._notes[GROUP:]
        try:
            self._write_notes().then(self._flushed)
        except Exception:  # a fault of ours: the fleet waits for these
            self._counters["receipts_not_stored"] += 1
            self._context.log.exception("receipts_not_stored")
            self._writing, self._notes = [], self._writing + self._notes
            self._flushing = True
            self._loop.call_later(RETRY, self._flush)

    def _write_notes(self) -> Commit[None]:
        config, now = self._table.config, self._now()
        bound = Bound(entries=config.history)
        batch = Batch()
        for delivery, receipt, final in self._writing:
            if final:
                batch.acknowledge(owner_of(delivery.vin), [delivery.position])
                batch.append([done_of(delivery.vin)], history_draft(receipt, config), now, bound)
            elif receipt.reason != LATE_ACK and (receipt.state is State.RETRIED or delivery.attempts > 1):
                batch.mark(owner_of(delivery.vin), delivery.position, mark_of(delivery.attempts))
        return self.write(batch, [receipt for _, receipt, _ in self._writing])

    def _flushed(self) -> None:
        notes, self._writing = self._writing, []
        self._stored += len(notes)
        if self._notes:
            self._flush_soon()
        turned, self._turned = self._turned, Commit()
        turned.finish()
        for delivery, _, final in notes:
            if final:
                self.ended(delivery.vin, delivery.position)

    def ended(self, vin: str, position: int) -> None:
        """The final receipt of a delivery is stored: its vehicle may have the next one."""
        late = self._table.stored(vin, position)
        if late is not None:
            self.note(late, State.SENT, self._now(), LATE_ACK)

    async def settle(self) -> None:
        """Wait until everything is stored that has been noted by now; `StoreError` if the plugin is unloaded before."""
        wanted = self._stored + self.unwritten
        while self._stored < wanted:
            if self._closed:
                raise StoreError(UNLOADED)
            await self._turned

    def close(self) -> None:
        """Try nothing again from now on, and let no caller wait any longer."""
        self._closed = True
        self._turned.finish()

    # -- into the store

    def write(self, also: Batch, receipts: Sequence[Receipt], accepted: AcceptedRun | None = None) -> Commit[None]:
        """Store receipts, and behind them what else belongs to the batch. Done when it is stored (rule 3)."""
        values: Sequence[bytes] = self.format.values(receipts) if receipts else ()
        if accepted is not None:
            run = self.format.accepted(accepted)
            values = [*run, *values] if values else run
        batch = Batch()
        if values:
            batch.stream(RECEIPTS, values, self._now())
        batch.steps += also.steps
        write = _Write(batch, receipts, accepted)
        self._send(write)
        return write.done

    def _send(self, write: _Write) -> None:
        if self._closed:
            return
        receipts, accepted = write.receipts, write.accepted
        if accepted is not None and write.unknown:  # some may be in the stream: they are counted one by one
            receipts, accepted = [*accepted.receipts(self._node), *receipts], None
        block = self._requests.begin(receipts, accepted)
        commit = self._store.write(write.batch)
        commit.then(partial(self._answered, write, block, commit))

    def _answered(self, write: _Write, block: Block, commit: Commit[Written]) -> None:
        if commit.error is not None:
            self._refused(write, block, commit)
            return
        self._failing = False
        for unknown in write.unknown:
            self._requests.refused(unknown)
        appended, offsets = commit.result.appended, commit.result.offsets
        if offsets:
            self._requests.stored(block, offsets[0])
        else:
            self._requests.refused(block)  # there was none
        for answer in appended:
            self.finished += 1 - len(answer.dropped)
        if write.accepted is not None:
            self._counters["receipts_accepted"] += len(write.accepted.vins)
        for receipt in write.receipts:
            self._counters[f"receipts_{receipt.reason if receipt.reason == LATE_ACK else receipt.state}"] += 1
        if self._hub.heard_below(INGRESS, self._context.name):
            self._tell(write)
        write.done.finish()

    def _refused(self, write: _Write, block: Block, commit: Commit[Written]) -> None:
        if commit.refused:
            self._requests.refused(block)
        else:
            write.unknown.append(block)  # nothing behind it is counted until this is stored
        self._counters["receipts_not_stored"] += 1
        if not self._failing:  # once until it goes well again
            self._failing = True
            self._context.log.error("receipts_not_stored", error=str(commit.error))
        self._loop.call_later(RETRY, self._send, write)

    # -- to subscribers

    def _tell(self, write: _Write) -> None:
        receipts = write.receipts
        if write.accepted is not None:
            receipts = [*write.accepted.receipts(self._node), *receipts]
        for receipt in receipts:
            topic = topic_of(receipt)
            if not self._hub.heard(topic, self._context.name):
                continue
            if len(self._unpublished) >= MAX_UNPUBLISHED:
                self._counters["receipts_not_published"] += 1
                continue
            self._unpublished.append(Message(topic, encode(receipt), QOS, timestamp=receipt.time))
        if self._unpublished and not self._publishing:
            self._publishing = True
            self._context.spawn(self._publish, "publish")

    async def _publish(self) -> None:
        """Publish one after the other, in the order in which they were stored."""
        self._publishing = True
        try:
            while self._unpublished:
                await self._hub.publish(self._unpublished.popleft())
        finally:
            self._publishing = False
