"""Receipts on their way: into the stream together with what they tell of, then to the counts and to subscribers.

    sent, retried     ─▶ [ notes ] ─┐ one write at a time: receipts, removals, history
    acked, failed, …  ─▶ [ notes ] ─┴─▶ store ─┬─▶ counts; readers of `$stream/receipts` (the store tells them)
    a batch: accepted, replaced ──────▶  │     ├─▶ topics of the receipts, if there are subscribers
                                         │     └─▶ the vehicle is free for its next message
                                         └─ refused ─▶ again after `RETRY`

With several nodes each end is a write of its own (`outbox`), and receipts are counted from the stream (`counting`).

Rule 1: a final receipt and the removal of its entry are one batch. Where batches are not atomic (Redis) the receipt
        goes first: a crash in between may repeat it, but never lose it.
Rule 2: no subscriber hears of a receipt that is not stored, and a vehicle gets its next message when the final receipt
        of the last one is stored (`InflightTable.stored`).
Rule 3: what the store refuses is written again, for ever; meanwhile vehicles with something to be written wait. Where
        a store has taken a part of a batch and refuses the rest, a receipt may be in the stream twice.
Rule 4: receipts of one delivery are written one after the other, so they stand in the stream as it happened.
Rule 5: a vehicle that moves to another node is sent nothing there until what is noted here is stored
        (`Hub.under_way`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.receipt import LATE_ACK, Receipt, State, encode, topic_of
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.counters import REFUSED, UNLOADED, Block, RequestCounters
from motorcade.plugins.fanout.inflight import Delivery, InflightTable
from motorcade.plugins.fanout.members import FanoutMembers
from motorcade.plugins.fanout.outbox import Outbox
from motorcade.plugins.fanout.receipt_format import QOS, AcceptedRun, ReceiptFormat
from motorcade.plugins.fanout.tables import DONE, ENTRIES, INGRESS, RECEIPTS, mark_of
from motorcade.storage.ports import Batch, Bound, Draft, Store, StoreError, StoreFencedError, StreamAppend, Written

GROUP: Final = 1000  #: notes in one batch
MAX_UNPUBLISHED: Final = 10_000  #: receipts that wait to be published to subscribers; more are left out, counted
RETRY: Final = 1.0  #: seconds until a refused write is tried again

Note = tuple[Delivery, Receipt, bool]  #: something that happened to a delivery, and whether it has ended with that


class ReceiptWriter:
    """Writes and publishes the receipts of one node."""

    def __init__(
        self, context: Context, table: InflightTable, counters: RequestCounters, members: FanoutMembers | None
    ) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._store = cast("Store", context.store)
        self._hub = context.hub
        self._now = context.hub.now
        self._node = context.hub.node
        self._counters = context.counters
        self._table = table
        self._requests = counters
        self.format = ReceiptFormat(self._node)
        self._notes: list[Note] = []  # not given to the store yet
        self._writing: list[Note] = []
        self._flushing = False  # `_flush` is going to be called
        self._stored = 0  # notes, since the start
        self._turned: Commit[None] | None = None  # done when the notes that are being written are stored
        self._closed = False
        self._failing = False
        self.finished = 0  #: final receipts in the histories of vehicles, about; the sweeper counts them
        self._unpublished: deque[Message] = deque()
        self._publishing = False
        self._next: Commit[None] = Commit()  # done when the notes are stored that are not given to the store yet
        self._settling: list[Commit[None]] = []  # of those that are
        self._left = 0  # writes of those that are being stored
        #: The ends of deliveries, if other members may end them, too.
        self.outbox = Outbox(context, members, table, self) if members is not None else None

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
            delivery_id=f"{delivery.vin}.{delivery.position}",
            time=now,
            node=self._node,
            attempt=delivery.attempts,
            reason=reason,
        )
        self._notes.append((delivery, receipt, final))
        if self.outbox is not None:
            self._hub.under_way(delivery.vin, self._next)  # rule 5
        if not self._flushing and not self._writing:
            self._flushing = True
            self._loop.call_soon(self._flush)  # what happens in the same turn goes together

    def _flush(self) -> None:
        self._flushing = False
        if self._closed:
            return
        self._writing, self._notes = self._notes[:GROUP], self._notes[GROUP:]
        if not self._notes:
            self._settling.append(self._next)
            self._next = Commit()
        try:
            self._write_notes(self._writing)
        except Exception:  # a fault of ours: the fleet waits for these
            self._counters["receipts_not_stored"] += 1
            self._context.log.exception("receipts_not_stored")
            self._writing, self._notes = [], self._writing + self._notes
            self._flushing = True
            self._loop.call_later(RETRY, self._flush)

    def _write_notes(self, notes: Sequence[Note]) -> None:
        if self.outbox is not None:
            self._write_each(notes, self.outbox)
            return
        config, now = self._table.config, self._now()
        bound, retention = Bound(entries=config.history), config.receipts_retention
        batch = Batch()
        receipts = []
        for delivery, receipt, final in notes:
            receipts.append(receipt)
            if final:
                batch.acknowledge(ENTRIES + delivery.vin, [delivery.position])
                history = Draft(encode(receipt), expires_at=receipt.time + retention)
                batch.append([DONE + delivery.vin], history, now, bound)
            elif receipt.reason != LATE_ACK and (receipt.state is State.RETRIED or delivery.attempts > 1):
                batch.mark(ENTRIES + delivery.vin, delivery.position, mark_of(delivery.attempts))
        self.write(batch, now, self._flushed, receipts)

    def _write_each(self, notes: Sequence[Note], outbox: Outbox) -> None:
        """Write what ends each by itself: another member may have ended it."""
        now, batch = self._now(), Batch()
        receipts = []
        for delivery, receipt, final in notes:
            if final:
                continue
            receipts.append(receipt)
            if receipt.reason != LATE_ACK and (receipt.state is State.RETRIED or delivery.attempts > 1):
                batch.mark(ENTRIES + delivery.vin, delivery.position, mark_of(delivery.attempts))
        ends = [(delivery, receipt) for delivery, receipt, final in notes if final]
        self._left = len(ends) + (1 if receipts else 0)
        if receipts:
            self.write(batch, now, self._one_flushed, receipts)
        for delivery, receipt in ends:
            outbox.end(delivery, receipt).then(self._one_flushed)

    def _one_flushed(self) -> None:
        self._left -= 1
        if not self._left:
            self._flushed()

    def _flushed(self) -> None:
        notes, self._writing = self._writing, []
        self._stored += len(notes)
        self._settle()
        if self._notes:
            self._flushing = True
            self._loop.call_soon(self._flush)
        if self._turned is not None:
            turned, self._turned = self._turned, None
            turned.finish()
        for delivery, _, final in notes:
            if final:
                self.ended(delivery.vin, delivery.position)

    def ended(self, vin: str, position: int) -> None:
        """Note that the final receipt of a delivery is stored: its vehicle may have the next one."""
        late = self._table.stored(vin, position)
        if late is not None:
            self.note(late, State.SENT, self._now(), LATE_ACK)

    def _settle(self) -> None:
        settling, self._settling = self._settling, []
        for commit in settling:
            commit.finish()

    def note_late(self, delivery: Delivery) -> None:
        """Write that a vehicle has acknowledged what had ended otherwise."""
        self.note(delivery, State.SENT, self._now(), LATE_ACK)

    async def settle(self) -> None:
        """Wait until everything is stored that has been noted by now; `StoreError` if the plugin is unloaded before."""
        wanted = self._stored + self.unwritten
        while self._stored < wanted:
            if self._closed:
                raise StoreError(UNLOADED)
            if self._turned is None:
                self._turned = Commit()
            await self._turned

    def close(self) -> None:
        """Try nothing again from now on, and let no caller wait any longer."""
        self._closed = True
        if self.outbox is not None:
            self.outbox.close()
            self._settling.append(self._next)
            self._settle()
        if self._turned is not None:
            self._turned.finish()

    # -- into the store

    def write(
        self,
        batch: Batch,
        now: float,
        then: Callable[[], object],
        receipts: Sequence[Receipt],
        accepted: AcceptedRun | None = None,
    ) -> None:
        """Store a batch with receipts, which go first. Call back when it is stored (rule 3)."""
        if accepted is not None:
            values: Sequence[bytes] = self.format.accepted(accepted, now)
            if receipts:
                values = [*values, *self.format.values(receipts, now)]
            batch.steps.insert(0, StreamAppend(RECEIPTS, values, now))
        elif receipts:
            batch.steps.insert(0, StreamAppend(RECEIPTS, self.format.values(receipts, now), now))
        self._send(Block(receipts, accepted, batch, then))

    def _send(self, block: Block) -> None:
        if self._closed or block.batch is None:
            return
        if self.outbox is None:
            self._requests.begin(block)
        commit = self._store.write(block.batch)
        commit.then(partial(self._answered, block, commit))

    def _answered(self, block: Block, commit: Commit[Written]) -> None:
        if self._closed:
            return
        if commit.error is not None:
            self._refused(block, commit)
            return
        self._failing = False
        for unknown in block.unknown:
            unknown.last = REFUSED
        written = commit.result
        if written.offsets:
            block.first, block.last = written.offsets[0][0], written.offsets[0][-1]
        else:
            block.last = REFUSED  # it had no receipts
        try:
            if self.outbox is None:
                self._requests.count()
            for answer in written.appended:
                self.finished += 1 - len(answer.dropped)
            self.told(block.receipts, block.accepted)
        finally:  # whatever goes wrong there, vehicles and publishers do not wait for it
            if block.then is not None:
                block.then()

    def _refused(self, block: Block, commit: Commit[Written]) -> None:
        again = Block(block.receipts, block.accepted, block.batch, block.then, block.unknown)
        if isinstance(commit.error, StoreFencedError):
            self.close()  # this member is dead to the others, and ends: they tell what it has left
            return
        if self.outbox is not None:
            pass  # what is in the stream is counted from there
        elif commit.refused:
            block.last = REFUSED
            self._requests.count()
        else:
            again.unknown.append(block)  # nothing behind it is counted until this is stored
            if block.accepted is not None:  # some may be in the stream: they are counted one by one
                again.receipts = [*block.accepted.receipts(self._node), *block.receipts]
                again.accepted = None
        self.note_refusal(commit.error)
        self._loop.call_later(RETRY, self._send, again)

    def note_refusal(self, error: BaseException | None) -> None:
        """Count a write of receipts that was not done, and log it once until it goes well again."""
        self._counters["receipts_not_stored"] += 1
        if not self._failing:
            self._failing = True
            self._context.log.error("receipts_not_stored", error=str(error))

    # -- to subscribers

    def told(self, receipts: Sequence[Receipt], accepted: AcceptedRun | None = None) -> None:
        """Count receipts that are in the stream now, and publish them."""
        self._failing = False
        if accepted is not None:
            self._counters["receipts_accepted"] += len(accepted.vins)
        for receipt in receipts:
            self._counters[f"receipts_{receipt.reason if receipt.reason == LATE_ACK else receipt.state}"] += 1
        if not self._hub.heard_below(INGRESS, self._context.name):
            return
        if accepted is not None:
            receipts = [*accepted.receipts(self._node), *receipts]
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
