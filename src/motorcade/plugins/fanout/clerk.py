"""The clerk writes down what happens to deliveries: receipts, and with the last one of each, that its entry is gone.

    sent, retried        ─▶ [ group ] ─┐
    acked, failed, …     ─▶ [ group ] ─┴─ one batch at a time ─▶ store ─▶ receipts are published, the next one may go
                             receipt + removal + history

Rule 1: a final receipt and the removal of its entry are one batch. Where batches are not atomic (Redis) the receipt
        goes first: a crash in between may repeat it, but never lose it.
Rule 2: a vehicle gets its next message when the receipt of the last one is stored (`Desk.stored`).
Rule 3: what cannot be stored is tried again, for ever (`receipts`, rule 3); meanwhile vehicles with something to be
        written wait.
Rule 4: one timer serves all deliveries that wait for an acknowledgement or rest.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from heapq import heappop, heappush
from itertools import chain, count
from typing import Final

from motorcade.core.receipt import LATE_ACK, Receipt, State
from motorcade.plugins.fanout.desk import ENDS, Delivery, Desk, Phase, Seat, Verdict
from motorcade.plugins.fanout.ledger import UNLOADED
from motorcade.plugins.fanout.receipts import Receipts, history_draft
from motorcade.plugins.fanout.tables import done_of, mark_of, owner_of
from motorcade.storage.ports import Batch, Bound, StoreError

GROUP: Final = 1000  #: receipts in one batch
SILENT: Final = "no PUBACK within ack_timeout; connect again to be sent what is still wanted"  #: of a disconnection

Note = tuple[Delivery, Receipt, bool]  #: something that happened to a delivery, and whether it is over with that


class Clerk:
    """Receipts of one node."""

    def __init__(
        self,
        desk: Desk,
        receipts: Receipts,
        node: str,
        now: Callable[[], float],
        trigger: Callable[[str, str], None],
    ) -> None:
        self.now = now
        self.triggered = trigger  #: (VIN, why): there may be something for a vehicle
        self._desk = desk
        desk.told = self.late
        self._receipts = receipts
        self._node = node
        self._notes: list[Note] = []
        self._in_hand: list[Note] = []  # being written; those before `_at_note` are
        self._at_note = 0
        self._turned = asyncio.Event()  # the group in hand is written; a new one for each
        self._wake = asyncio.Event()
        self._stored = 0  # receipts, since the start
        self._closed = False
        self._due: list[tuple[float, int, Delivery]] = []  # heap; what is no longer so is left until it comes up
        self._serial = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # seconds since the epoch; none is set

    @property
    def unwritten(self) -> int:
        """Receipts that are not stored yet."""
        return len(self._notes) + len(self._in_hand) - self._at_note

    # -- what happens

    def sent(self, delivery: Delivery) -> None:
        """It leaves for the vehicle."""
        delivery.attempts += 1
        delivery.in_window = True
        delivery.phase = Phase.SENT
        self.watch(delivery)
        delivery.sent_at = delivery.since
        self._note(delivery, State.SENT)

    def watch(self, delivery: Delivery) -> None:
        """Wait for its acknowledgement, from now on."""
        timeout = self._desk.config.ack_timeout
        delivery.since = self.now()
        delivery.watched = True
        if timeout:
            self._at(delivery.since + timeout, delivery)

    def watch_on(self) -> None:
        """The time that vehicles have to acknowledge is another one now."""
        timeout = self._desk.config.ack_timeout
        for delivery in self._desk.hold.values():
            if timeout and delivery.watched and delivery.phase in (Phase.SENT, Phase.OVER):
                self._at(delivery.since + timeout, delivery)

    def repeats(self, delivery: Delivery) -> bool:
        """Whether the session may repeat its packet on the next connection; False: the packet leaves the window."""
        desk = self._desk
        if desk.hold.get(delivery.vin) is not delivery:
            return False
        if delivery.phase is not Phase.OVER:
            now = self.now()
            verdict = desk.judge(delivery.entry, now)
            if (
                verdict is Verdict.SEND
                and delivery.phase is Phase.SENT
                and now < delivery.sent_at + desk.delay(delivery)
            ):
                self.watch(delivery)  # sooner than a retry would be: this is the same attempt
                return True
            if verdict is Verdict.SEND and delivery.attempts < desk.config.max_attempts:
                self.sent(delivery)
                return True
            if verdict in ENDS:
                self.end(delivery, *ENDS[verdict])
            elif verdict is Verdict.SEND:
                self.end(delivery, State.FAILED, "no_ack")
        desk.left(delivery)
        desk.release(delivery)
        self.triggered(delivery.vin, "withdrawn")
        return False

    def refused(self, delivery: Delivery, reason: str) -> None:
        """The vehicle has answered with an error: once more after a while, as a new packet, but not for ever."""
        if not delivery.ending and delivery.phase is not Phase.RESTING:  # else its silence was told before
            self._again(delivery, reason)

    def _silent(self, delivery: Delivery, seat: Seat) -> None:
        """The vehicle is there and has not answered for `ack_timeout`.

        On this connection the packet must not be sent again [MQTT-4.4.0-1]. So it is closed after `retry_delay`, or at
        once if the message is over: then the session repeats the packet, or withdraws it.
        """
        verdict = self._desk.judge(delivery.entry, self.now())
        if verdict in ENDS:
            self.end(delivery, *ENDS[verdict])
        else:
            self._again(delivery, "no_ack")
        if delivery.phase is Phase.OVER:
            seat.disconnect(SILENT)

    def _again(self, delivery: Delivery, reason: str) -> None:
        again = self._desk.rest(delivery, self.now())
        if again is None:
            self.end(delivery, State.FAILED, reason)
            return
        self._note(delivery, State.RETRIED, reason)
        self._at(again, delivery)

    def end(self, delivery: Delivery, state: State, reason: str = "") -> None:
        """It is over, if it was not already."""
        if self._desk.end(delivery):
            self._note(delivery, state, reason, final=True)

    def late(self, delivery: Delivery) -> None:
        """The vehicle has acknowledged what was over."""
        if delivery.ending and not delivery.told and self._desk.hold.get(delivery.vin) is delivery:
            delivery.late = True  # behind its final receipt, which a batch may have to write again
        # Else its request is paused, and it comes again. Those that have `ended` are remembered for a while only.
        elif delivery.ending or (delivery.vin, delivery.position) in self._desk.ended:
            self._note(delivery, State.SENT, LATE_ACK)

    def session_over(self, delivery: Delivery) -> None:
        """The session that had it in flight has ended: one attempt more has failed."""
        if delivery.attempts >= self._desk.config.max_attempts:
            self.end(delivery, State.FAILED, "session_ended")
        else:
            self._note(delivery, State.RETRIED, "session_ended")

    def _note(self, delivery: Delivery, state: State, reason: str = "", *, final: bool = False) -> None:
        if not self._notes:
            self._wake.set()
        self._notes.append((delivery, self.receipt(delivery, state, reason), final))

    def receipt(self, delivery: Delivery, state: State, reason: str = "") -> Receipt:
        """What is told of a delivery now."""
        return Receipt(
            state=state,
            vin=delivery.vin,
            request_id=delivery.entry.request_id,
            delivery_id=delivery.name,
            time=self.now(),
            node=self._node,
            attempt=delivery.attempts,
            reason=reason,
        )

    # -- time

    def _at(self, when: float, delivery: Delivery) -> None:
        heappush(self._due, (when, next(self._serial), delivery))
        if when < self._timer_at:
            self._set_timer(when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer_at = math.inf
        now = self.now()
        while self._due and self._due[0][0] <= now:
            self._look_at(heappop(self._due)[2], now)
        if self._due and self._due[0][0] < self._timer_at:
            self._set_timer(self._due[0][0])

    def _look_at(self, delivery: Delivery, now: float) -> None:
        if self._desk.hold.get(delivery.vin) is not delivery or delivery.phase is Phase.ENDING:
            return
        seat = self._desk.seats.get(delivery.vin)
        if seat is None and delivery.phase is Phase.RESTING:
            self._desk.release(delivery)  # refused by a vehicle that has unsubscribed: it waits for the next one
        if seat is None or (delivery.in_window and not delivery.watched):
            return  # away: its session repeats it, and its time begins again then
        if delivery.phase is Phase.RESTING:
            if delivery.since > now:
                return
            if delivery.in_window:
                seat.disconnect(SILENT)
            else:
                delivery.phase = Phase.CLAIMED  # once, though it may stand in the heap more than once
                seat.offer(delivery)
        elif self._desk.config.ack_timeout and delivery.since + self._desk.config.ack_timeout <= now:
            if delivery.phase is Phase.SENT:
                self._silent(delivery, seat)
            elif delivery.phase is Phase.OVER:
                seat.disconnect(SILENT)

    # -- the store

    async def run(self) -> None:
        """Write until cancelled; also what an earlier run has left."""
        self._notes = self._in_hand[self._at_note :] + self._notes
        self._in_hand, self._at_note = [], 0
        if self._notes:
            self._wake.set()
        if self._due:
            self._set_timer(self._due[0][0])
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(0)  # what happens in the same turn goes together
                self._in_hand, self._notes, self._at_note = self._notes, [], 0
                while self._at_note < len(self._in_hand):
                    group = self._in_hand[self._at_note : self._at_note + GROUP]
                    await self._write(group)
                    self._at_note += len(group)
                    self._stored += len(group)
                    self._turned.set()
                    self._turned = asyncio.Event()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def written(self, deliveries: Collection[tuple[str, int]]) -> None:
        """Wait until nothing of these (VIN, position) is still to be written."""
        while any(
            (delivery.vin, delivery.position) in deliveries
            for delivery, _, _ in chain(self._in_hand[self._at_note :], self._notes)
        ):
            await self._turned.wait()

    async def settle(self) -> None:
        """Wait until everything is written that has happened by now; `StoreError` if the plugin is unloaded before."""
        wanted = self._stored + self.unwritten
        while self._stored < wanted:
            if self._closed:
                raise StoreError(UNLOADED)
            await self._turned.wait()

    def close(self) -> None:
        """Let no caller wait any longer."""
        self._closed = True
        self._turned.set()

    async def _write(self, notes: list[Note]) -> None:
        now = self.now()
        bound = Bound(entries=self._desk.config.history)

        def fill(batch: Batch) -> None:
            for delivery, receipt, final in notes:
                if final:
                    batch.acknowledge(owner_of(delivery.vin), [delivery.position])
                    batch.append([done_of(delivery.vin)], history_draft(receipt, self._desk.config), now, bound)
                elif receipt.reason != LATE_ACK and (receipt.state is State.RETRIED or delivery.attempts > 1):
                    batch.mark(owner_of(delivery.vin), delivery.position, mark_of(delivery.attempts))

        await self._receipts.store(fill, [receipt for _, receipt, _ in notes])
        for delivery, _, final in notes:
            if final:
                self._desk.stored(delivery.vin, delivery.position)
