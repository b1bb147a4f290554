"""Attempts to deliver: sent, acknowledged or not in time, sent again, given up. Each change is noted as a receipt.

Rule 1: a vehicle that does not acknowledge within `ack_timeout` is disconnected after `retry_delay`, since packets are
        not repeated on the same connection [MQTT-4.4.0-1]. Its session repeats the packet on the next one.
Rule 2: one timer serves all deliveries that wait for an acknowledgement or back off.
Rule 3: what is in the window of a vehicle that is there is always looked at again, whatever has become of it: also what
        is over holds its place until it is answered (`inflight`, rule 4), and a silent vehicle gets nothing else.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from motorcade.core.receipt import LATE_ACK, State
from motorcade.plugins.fanout.inflight import ENDS, Delivery, EntryVerdict, InflightTable, Phase
from motorcade.plugins.fanout.receipt_writer import ReceiptWriter
from motorcade.plugins.fanout.triggers import Triggers

if TYPE_CHECKING:
    from motorcade.plugins.fanout.source import VehicleSource

SILENT: Final = "no PUBACK within ack_timeout; connect again to be sent what is still wanted"  #: of a disconnection


class Attempts:
    """The deliveries of one node."""

    def __init__(
        self, table: InflightTable, receipts: ReceiptWriter, triggers: Triggers, now: Callable[[], float]
    ) -> None:
        self.now = now
        self.trigger = triggers.trigger  #: (VIN, why): there may be something for a vehicle
        self._table = table
        self._note = receipts.note
        self._due: list[tuple[float, int, Delivery]] = []  # heap; what is no longer so is left until it comes up
        self._serial = count()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # seconds since the epoch; none is set

    def close(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    # -- attempts

    def sent(self, delivery: Delivery, now: float) -> None:
        """Note that it leaves for the vehicle."""
        delivery.attempts += 1
        delivery.in_window = True
        delivery.phase = Phase.SENT
        delivery.sent_at = delivery.since = now
        delivery.watched = True
        if self._table.config.ack_timeout:
            self._at(now + self._table.config.ack_timeout, delivery)
        self._note(delivery, State.SENT, now)

    def watch(self, delivery: Delivery, now: float) -> None:
        """Wait for its acknowledgement, from now on."""
        timeout = self._table.config.ack_timeout
        delivery.since = now
        delivery.watched = True
        if timeout:
            self._at(now + timeout, delivery)

    def watch_all(self) -> None:
        """Go by another `ack_timeout` from now on."""
        timeout = self._table.config.ack_timeout
        for delivery in self._table.inflight.values():
            if timeout and delivery.watched and delivery.phase in (Phase.SENT, Phase.OVER):
                self._at(delivery.since + timeout, delivery)

    def repeats(self, delivery: Delivery) -> bool:
        """Return True if the session may repeat its packet on the next connection; else the packet is withdrawn."""
        table = self._table
        if table.inflight.get(delivery.vin) is not delivery:
            return False
        if delivery.phase is not Phase.OVER:
            now = self.now()
            verdict = table.judge(delivery.entry, now)
            soon = delivery.phase is Phase.SENT and now < delivery.sent_at + table.delay(delivery)
            if verdict is EntryVerdict.SEND and soon:
                self.watch(delivery, now)  # sooner than a retry would be: this is the same attempt
                return True
            if verdict is EntryVerdict.SEND and delivery.attempts < table.config.max_attempts:
                self.sent(delivery, now)
                return True
            if verdict in ENDS:
                self.end(delivery, *ENDS[verdict])
            elif verdict is EntryVerdict.SEND:
                self.end(delivery, State.FAILED, "no_ack")
        table.left(delivery)
        table.release(delivery)
        self.trigger(delivery.vin, "withdrawn")
        return False

    def refused(self, delivery: Delivery, reason: str) -> None:
        """Send it again after a while, as a new packet: the vehicle has answered with an error."""
        if not delivery.ending and delivery.phase is not Phase.BACKING_OFF:  # else it was silent before
            self._back_off(delivery, reason)

    def _silent(self, delivery: Delivery, source: VehicleSource, now: float) -> None:
        """Close the connection after a while (rule 1), or at once if the message is over: then it is withdrawn."""
        verdict = self._table.judge(delivery.entry, now)
        if verdict in ENDS:
            self.end(delivery, *ENDS[verdict])
        else:
            self._back_off(delivery, "no_ack")
        if delivery.phase is Phase.OVER:
            source.disconnect(SILENT)

    def _back_off(self, delivery: Delivery, reason: str) -> None:
        if delivery.attempts >= self._table.config.max_attempts:
            self.end(delivery, State.FAILED, reason)
            return
        now = self.now()
        delivery.phase = Phase.BACKING_OFF
        delivery.since = now + self._table.delay(delivery)
        self._note(delivery, State.RETRIED, now, reason)
        self._at(delivery.since, delivery)

    def end(self, delivery: Delivery, state: State, reason: str = "") -> None:
        """End it, if it has not ended before."""
        if self._table.end(delivery.vin, delivery.position):
            delivery.phase = Phase.OVER if delivery.in_window else Phase.ENDING
            self._note(delivery, state, self.now(), reason, final=True)

    def late(self, delivery: Delivery) -> None:
        """Note that the vehicle has acknowledged what was over."""
        if delivery.ending and not delivery.stored and self._table.inflight.get(delivery.vin) is delivery:
            delivery.late = True  # behind its final receipt, which may have to be written again
        # Else its request is paused, and it comes again. Those that have `ended` are remembered for a while only.
        elif delivery.ending or (delivery.vin, delivery.position) in self._table.ended:
            self._note(delivery, State.SENT, self.now(), LATE_ACK)

    def session_over(self, vin: str) -> None:
        """Count what the session of a vehicle had in flight as one more attempt that has failed."""
        delivery = self._table.session_over(vin)
        if delivery is None:
            return
        if delivery.attempts >= self._table.config.max_attempts:
            self.end(delivery, State.FAILED, "session_ended")
        else:
            self._note(delivery, State.RETRIED, self.now(), "session_ended")

    def session_left(self, vin: str) -> tuple[int, int] | None:
        """Forget what a vehicle has in flight whose session is no longer on this node.

        Return its position, and how many attempts count; None: nothing is to be told to the next node.
        """
        delivery = self._table.session_left(vin)
        if delivery is None:
            return None
        soon = delivery.phase is Phase.SENT and self.now() < delivery.sent_at + self._table.delay(delivery)
        attempts = delivery.attempts - soon  # as on the same node, a repetition that comes soon is the same attempt
        return (delivery.position, attempts) if attempts else None

    # -- time

    def _at(self, when: float, delivery: Delivery) -> None:
        heappush(self._due, (when, next(self._serial), delivery))
        if when < self._timer_at:
            self._set_timer(when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_later(max(0.0, when - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer_at = math.inf
        now = self.now()
        while self._due and self._due[0][0] <= now:
            self._look_at(heappop(self._due)[2], now)
        if self._due and self._due[0][0] < self._timer_at:
            self._set_timer(self._due[0][0])

    def _look_at(self, delivery: Delivery, now: float) -> None:
        if self._table.inflight.get(delivery.vin) is not delivery or delivery.phase is Phase.ENDING:
            return
        source = self._table.sources.get(delivery.vin)
        if source is None and delivery.phase is Phase.BACKING_OFF:
            self._table.release(delivery)  # refused by a vehicle that has unsubscribed: it waits for the next one
        if source is None or (delivery.in_window and not delivery.watched):
            return  # away: its session repeats it, and its time begins again then
        if delivery.phase is Phase.BACKING_OFF:
            if delivery.since > now:
                return
            if delivery.in_window:
                source.disconnect(SILENT)
            else:
                delivery.phase = Phase.CLAIMED  # once, though it may be in the heap more than once
                source.offer(delivery)
        elif self._table.config.ack_timeout and delivery.in_window:
            due = delivery.since + self._table.config.ack_timeout
            if due > now:
                self._at(due, delivery)  # rule 3
            elif delivery.phase is Phase.SENT:
                self._silent(delivery, source, now)
            elif delivery.phase is Phase.OVER:
                source.disconnect(SILENT)
