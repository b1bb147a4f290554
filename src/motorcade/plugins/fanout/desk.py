"""Which message a vehicle may get now, and which it has. Pure: no store, no clock, no waiting.

    pending (store) ──claim──▶ claimed ──sent──▶ sent ──acknowledged──▶ ending ─(receipt stored)─▶ gone
                                                  │ └─(over, not answered)─▶ over ──answered, withdrawn──▶ gone
       ▲                          │                │ refused, silent         ▲
       └────────── release ◀──────┴──── resting ◀──┘ (too often: failed) ────┘

Rule 1: one VIN has at most one message on its way. `claim` is the only place that decides it, and `hold` the only
        table: an entry stands there from before it is given to the session until its last receipt is stored, or it is
        given back. It outlives connections and sources, since what is in flight belongs to the session.
Rule 2: a delivery ends once. Whatever comes later (a second acknowledgement, a time-out, a cancellation, a reader that
        has found the entry just before it was removed) finds it among those that have `ended`.
Rule 3: one in flight means one packet. A message whose packet is in the window of a session (`in_window`) is not given
        to the session again: the session repeats the packet on the next connection (`Clerk.repeats`). It is given back
        when the packet has left the window: answered with an error, withdrawn, or gone with its session.
Rule 4: a message that is over while its packet is in the window holds its place until the packet is answered or
        withdrawn; the packet is not repeated.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum, auto
from typing import Final, Protocol

from motorcade.core.lately import Lately
from motorcade.core.message import Message
from motorcade.core.receipt import State, delivery_id
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.record import EntryRecord, RequestRecord

ACTIVE: Final = RequestRecord()
MOST_GIVEN_BACK: Final = 10_000  #: deliveries whose attempts are remembered when they are given back
MOST_ENDED: Final = 100_000  #: deliveries that are remembered to have ended; far more than end in the time of a write


class Phase(StrEnum):
    """Where a delivery is that is on its way."""

    CLAIMED = auto()  #: given to the session, or about to be
    SENT = auto()
    RESTING = auto()  #: not taken; it is sent again after a while
    OVER = auto()  #: it has ended, but its packet is still in the window (rule 4)
    ENDING = auto()  #: over, as soon as its receipt is stored


class Verdict(StrEnum):
    """What to do with a pending entry."""

    SEND = auto()
    LATER = auto()  #: its request is paused
    EXPIRED = auto()
    OUTDATED = auto()  #: older than messages are kept
    CANCELLED = auto()


class Delivery:
    """One message for one vehicle, on its way."""

    __slots__ = (
        "attempts",
        "entry",
        "in_window",
        "late",
        "message",
        "phase",
        "position",
        "sent_at",
        "since",
        "told",
        "vin",
        "watched",
    )

    def __init__(self, vin: str, position: int, entry: EntryRecord, message: Message, attempts: int = 0) -> None:
        self.vin = vin
        self.position = position
        self.entry = entry
        self.message = message
        self.attempts = attempts  #: how often it was sent
        self.in_window = False  #: the session has its packet in flight (rule 3)
        self.phase = Phase.CLAIMED
        self.since = 0.0  #: when it was sent last; resting: when it is sent again
        self.sent_at = 0.0  #: when its last attempt began
        self.watched = False  #: the vehicle is there, so that its silence counts
        self.told = False  #: its final receipt is stored
        self.late = False  #: acknowledged between its end and that

    @property
    def name(self) -> str:
        return delivery_id(self.vin, self.position)

    @property
    def ending(self) -> bool:
        return self.phase in (Phase.ENDING, Phase.OVER)


class Seat(Protocol):
    """The source of a connected vehicle."""

    def offer(self, delivery: Delivery, *, judged: bool = False) -> None:
        """Give the vehicle this, if it may have it when its turn comes: at once, if it was `judged` just now."""

    def look_again(self) -> None:
        """Its messages come on other topics now; it may not be subscribed to them."""

    def disconnect(self, detail: str) -> None:
        """Close its connection, so that its session can repeat or withdraw what it is silent about."""


class Desk:
    """Vehicles, what they have on its way, and what operators have decided about requests."""

    def __init__(self, config: FanoutConfig, trigger: Callable[[str], None]) -> None:
        self.config = config
        self.hold: dict[str, Delivery] = {}  #: by VIN (rule 1)
        self.seats: dict[str, Seat] = {}  #: vehicles that are connected and subscribed
        self.drained: set[str] = set()  #: of these, those with nothing pending but what is on hold
        self.requests: dict[str, RequestRecord] = {}  #: those that are, or were, paused or cancelled
        self.ended: Lately[tuple[str, int]] = Lately(MOST_ENDED)  #: (VIN, position) (rule 2)
        self.attempts: OrderedDict[tuple[str, int], int] = OrderedDict()  #: of what was given back, lately
        self.cancels = 0  #: cancellations, since the start
        self.deciding = asyncio.Lock()  #: held while a record of `requests` is replaced: none is made from an older one
        self.untold: set[bytes] = set()  #: batches whose receipts are not stored yet: nothing of them is sent
        self.prioritised = False  #: some message has a priority: the oldest is not always the next
        self.priorities = 0  #: batches with a priority, since the start
        self.told: Callable[[Delivery], None] = lambda _: None  #: the end of what was acknowledged late is stored
        self._trigger = trigger

    # -- rule 1

    def claim(self, delivery: Delivery) -> bool:
        """Whether a vehicle may be given this now; it has it then."""
        held = self.hold.get(delivery.vin)
        if held is not None:
            return held is delivery and not held.ending
        if (delivery.vin, delivery.position) in self.ended:
            return False
        self.hold[delivery.vin] = delivery
        delivery.phase = Phase.CLAIMED
        return True

    def release(self, delivery: Delivery) -> None:
        """Give a message back: it is pending again, unless it is over or its packet is in the window."""
        if self.hold.get(delivery.vin) is delivery and not delivery.in_window and not delivery.ending:
            del self.hold[delivery.vin]
            self.drained.discard(delivery.vin)
            if delivery.attempts:  # the store may not know of all of them yet
                self.attempts[delivery.vin, delivery.position] = delivery.attempts
                if len(self.attempts) > MOST_GIVEN_BACK:
                    self.attempts.popitem(last=False)

    def stored(self, vin: str, position: int) -> None:
        """The final receipt of a delivery is stored, and its entry removed; the vehicle may have the next one."""
        held = self.hold.get(vin)
        if held is not None and held.position == position:
            held.told = True
            if held.late:
                held.late = False
                self.told(held)
            if held.in_window:
                return  # rule 4
            del self.hold[vin]
        if vin not in self.drained:
            self._trigger(vin)

    def left(self, delivery: Delivery) -> None:
        """The packet of a delivery has left the window: answered, withdrawn, or gone with its session."""
        delivery.in_window = False
        if delivery.phase is Phase.OVER:
            delivery.phase = Phase.ENDING
            if delivery.told:
                self.stored(delivery.vin, delivery.position)

    def offer_new(self, delivery: Delivery, now: float) -> bool:
        """Give a vehicle what was stored for it just now; False if it has to be looked for what comes first."""
        vin = delivery.vin
        seat = self.seats.get(vin)
        if seat is None or vin not in self.drained:
            return False
        if vin in self.hold or self.judge(delivery.entry, now) is not Verdict.SEND:
            self.drained.discard(vin)
            return vin in self.hold  # if so, it is looked for when that is over
        if not self.claim(delivery):
            return True  # it is over already
        seat.offer(delivery, judged=True)
        return True

    def end(self, delivery: Delivery) -> bool:
        """It is over; False if it was already (rule 2)."""
        if not self.end_entry(delivery.vin, delivery.position):
            return False
        delivery.phase = Phase.OVER if delivery.in_window else Phase.ENDING
        return True

    def end_entry(self, vin: str, position: int) -> bool:
        """The same for an entry, whether it is on its way or not."""
        name = (vin, position)
        if name in self.ended:
            return False
        self.ended.add(name)
        self.attempts.pop(name, None)
        held = self.hold.get(vin)
        if held is not None and held.position == position:
            held.phase = Phase.OVER if held.in_window else Phase.ENDING
        return True

    # -- vehicles

    def sit(self, vin: str, seat: Seat) -> None:
        """A vehicle is there."""
        self.seats[vin] = seat

    def stand_up(self, vin: str, seat: Seat) -> None:
        """A vehicle is gone; another connection of it may have come before."""
        if self.seats.get(vin) is not seat:
            return
        del self.seats[vin]
        self.drained.discard(vin)
        held = self.hold.get(vin)
        if held is not None:
            held.watched = False
            self.release(held)

    def look_again(self) -> None:
        """Messages go to other topics from now on."""
        for seat in list(self.seats.values()):
            seat.look_again()

    def session_over(self, vin: str) -> Delivery | None:
        """The session of a vehicle has ended, with what it had in flight (rule 3): that is pending again."""
        held = self.hold.get(vin)
        if held is None:
            return None
        was_sent = held.phase is Phase.SENT
        self.left(held)
        self.release(held)
        return held if was_sent else None

    # -- requests

    def judge(self, entry: EntryRecord, now: float) -> Verdict:
        """What to do with a pending entry."""
        request = self.requests.get(entry.request_id, ACTIVE)
        if request.withdrawn(entry):
            return Verdict.CANCELLED
        if entry.expired(now):
            return Verdict.EXPIRED
        if entry.accepted_at + self.config.data_retention <= now:
            return Verdict.OUTDATED
        return Verdict.LATER if request.state == "paused" else Verdict.SEND

    def rest(self, delivery: Delivery, now: float) -> float | None:
        """It was not taken: when it is sent again; None: it was sent as often as it may be."""
        if delivery.attempts >= self.config.max_attempts:
            return None
        delivery.phase = Phase.RESTING
        delivery.since = now + self.delay(delivery)
        return delivery.since

    def delay(self, delivery: Delivery) -> float:
        """Seconds between the last attempt and the next one."""
        delay: float = self.config.retry_delay * 2 ** max(0, delivery.attempts - 1)
        return min(delay, self.config.retry_delay_max)


def delivery_of(
    vin: str, position: int, entry: EntryRecord, data: bytes, config: FanoutConfig, attempts: int = 0
) -> Delivery:
    """A pending entry as something that can be sent."""
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
    Verdict.EXPIRED: (State.EXPIRED, "expires_in"),
    Verdict.OUTDATED: (State.EXPIRED, "retention"),
    Verdict.CANCELLED: (State.CANCELLED, "cancelled"),
}
