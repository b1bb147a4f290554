"""The inflight table: which message a vehicle may get now, and which it has. No store, no clock, no waiting.

    pending (store) ──claim──▶ claimed ──sent──▶ sent ──acknowledged──▶ ending ─(receipt stored)─▶ gone
                                                  │ └─(over, not answered)─▶ over ──answered, withdrawn──▶ gone
       ▲                          │                │ refused, silent         ▲
       └────────── release ◀──────┴─── backing off ◀┘ (too often: failed) ───┘

Rule 1: a VIN has at most one message in flight. `claim` is the only place that decides it, and `inflight` the only
        table: a delivery is there from before it is given to the session until its final receipt is stored, or it is
        released. It outlives connections and sources, since what is in flight belongs to the session.
Rule 2: a delivery ends once. Whatever comes later (a second acknowledgement, a time-out, a cancellation, a reader that
        has found the entry just before it was removed) finds it among those that have `ended`.
Rule 3: one in flight means one packet. A message whose packet is in the window of a session (`in_window`) is not given
        to the session again: the session repeats the packet on the next connection (`Attempts.repeats`). It is released
        when the packet has left the window: answered with an error, withdrawn, or gone with its session.
Rule 4: a message that is over while its packet is in the window holds its place until the packet is answered or
        withdrawn; the packet is not repeated.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Final

from motorcade.core.message import Message
from motorcade.core.receipt import State
from motorcade.core.recent import RecentSet
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.record import EntryRecord, RequestRecord
from motorcade.plugins.fanout.triggers import Triggers

if TYPE_CHECKING:
    from motorcade.plugins.fanout.source import VehicleSource

ACTIVE: Final = RequestRecord()
MAX_RELEASED: Final = 10_000  #: deliveries whose attempts are remembered when they are released
MAX_ENDED: Final = 100_000  #: deliveries that are remembered to have ended; far more than end in the time of a write


class Phase(StrEnum):
    """The phase of a delivery in flight."""

    CLAIMED = auto()  #: given to the session, or about to be
    SENT = auto()
    BACKING_OFF = auto()  #: not acknowledged; it is sent again after a while
    OVER = auto()  #: it has ended, but its packet is still in the window (rule 4)
    ENDING = auto()  #: over, as soon as its receipt is stored


class EntryVerdict(StrEnum):
    """The decision on a pending entry."""

    SEND = auto()
    LATER = auto()  #: its request is paused
    EXPIRED = auto()
    OUTDATED = auto()  #: older than messages are kept
    CANCELLED = auto()
    UNREADABLE = auto()


@dataclass(slots=True, eq=False)
class Delivery:
    """One message for one vehicle, in flight."""

    vin: str
    position: int
    entry: EntryRecord
    message: Message
    attempts: int = 0  #: how often it was sent
    in_window: bool = False  #: the session has its packet in flight (rule 3)
    phase: Phase = Phase.CLAIMED
    since: float = 0.0  #: when it was sent last; backing off: when it is sent again
    sent_at: float = 0.0  #: when its last attempt began
    watched: bool = False  #: the vehicle is there, so that its silence counts
    stored: bool = False  #: its final receipt is
    late: bool = False  #: acknowledged between its end and that

    @property
    def ending(self) -> bool:
        return self.phase is Phase.ENDING or self.phase is Phase.OVER


class InflightTable:
    """Vehicles, what they have in flight, and what operators have decided about requests."""

    def __init__(self, config: FanoutConfig, triggers: Triggers) -> None:
        self.config = config
        self.inflight: dict[str, Delivery] = {}  #: by VIN (rule 1)
        self.sources = triggers.sources  #: by VIN: vehicles that are connected and subscribed
        self.drained: set[str] = set()  #: of these, those with nothing pending but what is in flight
        self.requests: dict[str, RequestRecord] = {}  #: those that are, or were, paused or cancelled
        self.ended: RecentSet[tuple[str, int]] = RecentSet(MAX_ENDED)  #: (VIN, position) (rule 2)
        self.attempts: OrderedDict[tuple[str, int], int] = OrderedDict()  #: of what was released, lately
        self.cancels = 0  #: cancellations, since the start
        self.deciding = asyncio.Lock()  #: held while a record of `requests` is replaced: none is made from an older one
        self.storing: set[bytes] = set()  #: batches whose receipts are not stored yet: nothing of them is sent
        self.alone = True  #: no other member appends, so `drained` can be relied on
        self.prioritised = False  #: some message has a priority: the oldest is not always the next
        self.priorities = 0  #: batches with a priority, since the start
        self._trigger = triggers.trigger

    # -- rule 1

    def claim(self, delivery: Delivery) -> bool:
        """Return True if a vehicle may be given this now; it has it then."""
        held = self.inflight.get(delivery.vin)
        if held is not None:
            return held is delivery and not held.ending
        if (delivery.vin, delivery.position) in self.ended:
            return False
        self.inflight[delivery.vin] = delivery
        delivery.phase = Phase.CLAIMED
        return True

    def release(self, delivery: Delivery) -> None:
        """Make a message pending again, unless it is over or its packet is in the window."""
        if self.inflight.get(delivery.vin) is delivery and not delivery.in_window and not delivery.ending:
            del self.inflight[delivery.vin]
            self.drained.discard(delivery.vin)
            if delivery.attempts:  # the store may not know of all of them yet
                self.attempts[delivery.vin, delivery.position] = delivery.attempts
                if len(self.attempts) > MAX_RELEASED:
                    self.attempts.popitem(last=False)

    def stored(self, vin: str, position: int) -> Delivery | None:
        """Let a vehicle have its next message: the final receipt of this one is stored, and its entry removed.

        Return the delivery if it was acknowledged meanwhile, after its end.
        """
        held = self.inflight.get(vin)
        late = None
        if held is not None and held.position == position:
            held.stored = True
            late = held if held.late else None
            held.late = False
            if held.in_window:
                return late  # rule 4
            del self.inflight[vin]
        if vin not in self.drained:
            self._trigger(vin, "acknowledged")
        return late

    def left(self, delivery: Delivery) -> None:
        """Note that a packet has left the window: answered, withdrawn, or gone with its session."""
        delivery.in_window = False
        if delivery.phase is Phase.OVER:
            delivery.phase = Phase.ENDING
            if delivery.stored:
                self.stored(delivery.vin, delivery.position)

    def offer_new(self, delivery: Delivery, now: float) -> bool:
        """Give a vehicle what was stored for it just now; False if it has to be looked for what comes first."""
        vin = delivery.vin
        source = self.sources.get(vin)
        if source is None or vin not in self.drained:
            return False
        if vin in self.inflight or self.judge(delivery.entry, now) is not EntryVerdict.SEND:
            self.drained.discard(vin)
            return vin in self.inflight  # if so, it is looked for when that is over
        if self.claim(delivery):  # else it is over already
            source.give(delivery, now)
        return True

    def end(self, vin: str, position: int) -> bool:
        """End a delivery, whether it is in flight or not; False if it has ended before (rule 2)."""
        name = (vin, position)
        if name in self.ended:
            return False
        self.ended.add(name)
        self.attempts.pop(name, None)
        held = self.inflight.get(vin)
        if held is not None and held.position == position:
            if held.phase is Phase.BACKING_OFF:
                held.since = held.sent_at  # it was silent: its connection is closed when it was to be sent again
            held.phase = Phase.OVER if held.in_window else Phase.ENDING
        return True

    # -- vehicles

    def attach(self, vin: str, source: VehicleSource) -> Delivery | None:
        """Note that a vehicle is there; what it has in flight."""
        self.sources[vin] = source
        return self.inflight.get(vin)

    def detach(self, vin: str, source: VehicleSource) -> None:
        """Note that a vehicle is gone, unless another connection of it has come before."""
        if self.sources.get(vin) is not source:
            return
        del self.sources[vin]
        self.drained.discard(vin)
        held = self.inflight.get(vin)
        if held is not None:
            held.watched = False
            self.release(held)

    def session_over(self, vin: str) -> Delivery | None:
        """End a session with what it had in flight (rule 3): that is pending again. Return what it was sent."""
        held = self.inflight.get(vin)
        if held is None:
            return None
        was_sent = held.phase is Phase.SENT
        self.left(held)
        self.release(held)
        return held if was_sent else None

    def session_left(self, vin: str) -> Delivery | None:
        """Forget what a vehicle has in flight whose session is no longer on this node; return it if it goes on."""
        held = self.inflight.pop(vin, None)
        if held is None or held.ending:
            return None
        held.in_window = False
        self.attempts.pop((vin, held.position), None)
        return held

    def rely(self, *, alone: bool) -> None:
        """Rely on `drained`, or not: other members have come or gone."""
        self.alone = alone
        self.drained.clear()

    # -- requests

    def judge(self, entry: EntryRecord, now: float) -> EntryVerdict:
        """Return what to do with a pending entry."""
        request = self.requests.get(entry.request_id, ACTIVE)
        if request.cancelled_at and request.cancels(entry, self.config.data_retention):
            return EntryVerdict.CANCELLED
        if 0.0 < entry.expires_at <= now:
            return EntryVerdict.EXPIRED
        if entry.accepted_at + self.config.data_retention <= now:
            return EntryVerdict.OUTDATED
        return EntryVerdict.LATER if request.state == "paused" else EntryVerdict.SEND

    def delay(self, delivery: Delivery) -> float:
        """Return the seconds between the last attempt and the next one."""
        delay: float = self.config.retry_delay * 2 ** max(0, delivery.attempts - 1)
        return min(delay, self.config.retry_delay_max)


def delivery_of(
    vin: str, position: int, entry: EntryRecord, data: bytes, config: FanoutConfig, attempts: int = 0
) -> Delivery:
    """Return a pending entry as something that can be sent."""
    message = Message(
        config.topic_of(vin, entry.request_id),
        data,
        1,
        publisher=entry.publisher,
        guid=entry.batch,
        timestamp=entry.accepted_at,
        expires_at=entry.expires_at or None,
    )
    return Delivery(vin, position, entry, message, attempts)


ENDS: Final = {
    EntryVerdict.EXPIRED: (State.EXPIRED, "expires_in"),
    EntryVerdict.OUTDATED: (State.EXPIRED, "retention"),
    EntryVerdict.CANCELLED: (State.CANCELLED, "cancelled"),
}
