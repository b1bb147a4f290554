"""The operator's view of the fan-out and actions on it. The service `fanout` answers with the records below.

    platform        send, requests, status, targets, cancel, pause, resume, gc
    one vehicle     vehicle (what waits, what is in flight, what became of the last ones), why (the one sentence)

Rule 1: every answer is a copy.
Rule 2: times are seconds since the epoch, 0 is never; sizes are bytes.
Rule 3: the values of `Hold` are a contract: programs compare them, people read `sentence` and `next`. A new reason is
        added to `Hold`, gets a function here, and a line in docs/fanout.md (a test counts them).
Rule 4: this file reads no clock and no store. The service collects the facts; the words are all here, so that one can
        see in one place what an operator is told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from motorcade.core.receipt import Receipt, State
from motorcade.plugins.fanout.record import Status

PENDING: Final = "pending"  #: any state that is not final

Wanted = State | Literal["pending"] | None  #: which deliveries are asked for; None: all

MAX_WAITING: Final = 100  #: messages shown that wait for one vehicle; `pending` counts all


class Hold(StrEnum):
    """The reason for which a vehicle does not get its next message now."""

    NOT_KNOWN = auto()
    NOTHING_PENDING = auto()
    OFFLINE = auto()
    NOT_SUBSCRIBED = auto()
    IN_FLIGHT = auto()
    BACKING_OFF = auto()
    PAUSED = auto()
    WINDOW_FULL = auto()
    DISPATCHING = auto()
    STORE_UNAVAILABLE = auto()


class AcceptedView(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a batch; the same figures are user properties of its PUBACK."""

    accepted: int  #: vehicles that will get it, each once
    duplicates: int  #: VINs that were named before in the same batch
    replaced: int  #: vehicles whose pending message of the same request gave way to this one
    rejected: int = 0  #: vehicles that have `max_pending` messages waiting: theirs has failed (`pending_limit`)
    #: Of batches with an id, and if there are some: vehicles that have a later message of the request waiting.
    superseded: int | UnsetType = UNSET
    #: Of batches with an id: it is known, and nothing was stored now; the figures are those of the first time.
    repeated: bool | UnsetType = UNSET


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request, over all its batches."""

    request_id: str
    status: Status | Literal["complete"]  #: active, paused or cancelled; complete: active, and nothing is pending
    since: float  #: when the status became that
    first_at: float  #: first batch accepted
    last_at: float  #: last receipt written
    targets: int  #: deliveries accepted: a vehicle that was named in two batches counts twice
    pending: int  #: deliveries without a final state
    states: dict[State, int]  #: deliveries by the state they are in now; the sum is `targets`


class TargetView(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery of a request to one vehicle: its last receipt."""

    vin: str
    request_id: str
    delivery_id: str
    state: State
    time: float  #: when it came into this state
    attempt: int  #: how often it had been sent then
    reason: str = ""
    node: str = ""

    @classmethod
    def of(cls, receipt: Receipt) -> TargetView:
        """Return a copy of a delivery."""
        return cls(
            vin=receipt.vin,
            request_id=receipt.request_id,
            delivery_id=receipt.delivery_id,
            state=receipt.state,
            time=receipt.time,
            attempt=receipt.attempt,
            reason=receipt.reason,
            node=receipt.node,
        )


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a vehicle has still to get."""

    delivery_id: str
    request_id: str
    state: Literal["waiting", "in_flight", "backing_off", "paused"]
    accepted_at: float
    expires_at: float  #: its own time or the end of the retention, whichever comes first
    priority: int
    attempts: int  #: how often it was sent
    size: int
    sent_at: float = 0.0  #: in flight: when
    until: float = 0.0  #: in flight: when it is sent again if no acknowledgement comes; backing off: when it is sent
    publisher: str = ""


class WhyView(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a vehicle has not got its message, and what happens next."""

    vin: str
    reason: Hold
    sentence: str
    next: str
    pending: int = 0  #: messages that wait for the vehicle, the one in flight included
    request_id: str = ""  #: of the message that is next
    delivery_id: str = ""
    attempt: int = 0  #: how often it was sent
    since: float = 0.0  #: offline: last seen; in flight: sent
    until: float = 0.0  #: when something happens by itself


class VehicleView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the fan-out knows about one vehicle."""

    vin: str
    connected: bool
    seen_at: float  #: connected: since when; else when its connection ended; 0: there is no session
    subscribed: bool  #: to the filter at which it gets its messages
    filter: str  #: this one
    pending: int
    in_flight: DeliveryView | None
    waiting: list[DeliveryView]  #: the first MAX_WAITING, in the order in which they will be sent
    history: list[TargetView]  #: final receipts, newest first
    why: WhyView


class GcView(msgspec.Struct, frozen=True, kw_only=True):
    """One collection of what is no longer needed."""

    vehicles: int  #: looked at
    expired: int  #: messages whose time was over
    cancelled: int  #: messages that were called off
    data: int  #: published data that was removed
    octets: int  #: of it
    seconds: float  #: it took


class Fanout(Protocol):
    """The service `fanout`. Errors: `UnknownError` (no such request), `BadBatchError`, `VinError`, `ConflictError`."""

    async def send(
        self,
        vins: Sequence[str],
        request_id: str,
        data: bytes,
        expires_in: float | None = None,
        priority: int = 0,
        mode: str | None = None,
        batch_id: str | None = None,
    ) -> AcceptedView:
        """Send a batch that carries its data: answered when it is as durable as the store promises."""

    async def requests(self, after: str, limit: int) -> Sequence[RequestView]:
        """Return requests in the order of their ids, after one of them; fewer than `limit`: there are no more."""

    async def status(self, request_id: str) -> RequestView:
        """Return one request; `UnknownError`."""

    async def targets(self, request_id: str, state: Wanted, after: str, limit: int) -> Sequence[TargetView]:
        """Return deliveries, each with its last receipt, after a delivery id; fewer than `limit`: there are no more."""

    async def cancel(self, request_id: str) -> RequestView:
        """Call off what is pending now. What is accepted later under the same id is delivered. `UnknownError`."""

    async def pause(self, request_id: str) -> RequestView:
        """Pass over its messages until `resume`; what is in flight stays in flight."""

    async def resume(self, request_id: str) -> RequestView:
        """Go on with a request that was paused."""

    async def gc(self) -> GcView:
        """Collect now, to the end; `ConflictError` if a collection is under way."""

    async def why(self, vin: str) -> WhyView:
        """Return one sentence about a vehicle; `VinError`."""

    async def vehicle(self, vin: str) -> VehicleView:
        """Return all that is known of a vehicle; `VinError`. One never heard of has nothing pending and no history."""


# -- the sentences of `why`, one function for each reason


def not_known(vin: str) -> WhyView:
    """Tell that no batch has ever named the vehicle."""
    return WhyView(
        vin=vin,
        reason=Hold.NOT_KNOWN,
        sentence=f"No batch has named {vin} as long as this node remembers.",
        next="Nothing, until a batch names it; look whether the VIN is the right one.",
    )


def nothing_pending(vin: str, last: TargetView | None = None) -> WhyView:
    """Tell that nothing is pending: all is delivered, or has ended otherwise; `last` is the latest final receipt."""
    ended = ""
    if last is not None:
        reason = _because(last.reason) if last.reason != last.state else ""
        ended = f"; the last message, {last.request_id!r}, was {last.state}{reason} at {clock(last.time)}"
    return WhyView(
        vin=vin,
        reason=Hold.NOTHING_PENDING,
        sentence=f"Nothing waits for {vin}{ended}.",
        next="Nothing, until a batch names it again.",
        request_id=last.request_id if last else "",
        delivery_id=last.delivery_id if last else "",
        attempt=last.attempt if last else 0,
        since=last.time if last else 0.0,
    )


def offline(vin: str, head: DeliveryView, pending: int, now: float, seen_at: float) -> WhyView:
    """Tell that it is not connected; `seen_at` is when its connection ended, 0 if there is no session of it."""
    seen = f"it was last seen at {clock(seen_at)}, {ago(now - seen_at)}" if seen_at else "there is no session of it"
    return _why(
        vin,
        Hold.OFFLINE,
        head,
        pending,
        f"{vin} is not connected: {seen}.",
        _when_it_comes(head, pending, "it connects and is subscribed"),
        since=seen_at,
        until=head.expires_at,
    )


def not_subscribed(vin: str, head: DeliveryView, pending: int, wanted: str, connected_at: float = 0.0) -> WhyView:
    """Tell that it is connected without a subscription for its messages; `wanted` is the filter."""
    return _why(
        vin,
        Hold.NOT_SUBSCRIBED,
        head,
        pending,
        f"{vin} is connected, but has not subscribed to {wanted!r}.",
        _when_it_comes(head, pending, "it subscribes"),
        since=connected_at,
        until=head.expires_at,
    )


def in_flight(vin: str, head: DeliveryView, pending: int, now: float) -> WhyView:
    """Tell that it was sent, and the PUBACK has not come. `head.until` 0: it is not sent again by itself."""
    behind = f" {_many(pending - 1)} it after that." if pending > 1 else ""
    again = (
        f"If no acknowledgement comes until {clock(head.until)}, its connection is closed: it is sent again when the"
        " vehicle is back, or has failed if that was the last attempt."
        if head.until
        else "It is sent again when the vehicle comes back with its session."
    )
    return _why(
        vin,
        Hold.IN_FLIGHT,
        head,
        pending,
        f"Request {head.request_id!r} was sent to {vin} at {clock(head.sent_at)}, {ago(now - head.sent_at)}"
        f" (attempt {head.attempts}), and it has not acknowledged it.",
        again + behind,
        since=head.sent_at,
        until=head.until,
    )


def backing_off(vin: str, head: DeliveryView, pending: int, now: float, most: int, reason: str = "") -> WhyView:
    """Tell that the last attempt failed, for `reason`; the next is at `head.until`, and there are `most` of them."""
    return _why(
        vin,
        Hold.BACKING_OFF,
        head,
        pending,
        f"Request {head.request_id!r} was sent to {vin} {_times(head.attempts)} without success{_because(reason)}.",
        f"It is sent again at {clock(head.until)}, in {span(head.until - now)}; after {_times(most)} without success it"
        " has failed, and the next message is sent.",
        until=head.until,
    )


def paused(vin: str, head: DeliveryView, pending: int) -> WhyView:
    """Tell that all pending messages belong to paused requests; `head` is the first of them."""
    return _why(
        vin,
        Hold.PAUSED,
        head,
        pending,
        f"Request {head.request_id!r} is paused, and nothing else waits for {vin}.",
        f"It is sent after `motorcade fanout resume {head.request_id}`{_or_expires(head)}.",
        until=head.expires_at,
    )


def window_full(vin: str, head: DeliveryView, pending: int, unacknowledged: int = 0) -> WhyView:
    """Tell that the session's window is full of other kinds of messages; `unacknowledged` is 0 if not known."""
    others = f"{unacknowledged} other messages" if unacknowledged > 1 else "other messages"
    others = "another message" if unacknowledged == 1 else others
    return _why(
        vin,
        Hold.WINDOW_FULL,
        head,
        pending,
        f"{vin} has not acknowledged {others}, and takes no more at a time.",
        f"{_many(pending)} it when it has acknowledged one of them{_or_expires(head)}.",
        until=head.expires_at,
    )


def dispatching(vin: str, head: DeliveryView, pending: int) -> WhyView:
    """Tell that it is on its way: read from the store, or between the dispatcher and the connection."""
    return _why(
        vin,
        Hold.DISPATCHING,
        head,
        pending,
        f"Request {head.request_id!r} is being sent to {vin} at this moment.",
        "Ask again: it is in flight or acknowledged then.",
    )


def store_unavailable(vin: str, error: str) -> WhyView:
    """Tell that its pending messages cannot be read now."""
    return WhyView(
        vin=vin,
        reason=Hold.STORE_UNAVAILABLE,
        sentence=f"What waits for {vin} cannot be read: the store does not answer ({error}).",
        next="Nothing is lost: sending goes on by itself when the store answers again (`motorcade store stats`).",
    )


def _why(
    vin: str,
    reason: Hold,
    head: DeliveryView,
    pending: int,
    sentence: str,
    next_: str,
    *,
    since: float = 0.0,
    until: float = 0.0,
) -> WhyView:
    return WhyView(
        vin=vin,
        reason=reason,
        sentence=sentence,
        next=next_,
        pending=pending,
        request_id=head.request_id,
        delivery_id=head.delivery_id,
        attempt=head.attempts,
        since=since,
        until=until,
    )


# -- words


def clock(seconds: float) -> str:
    """Format a time in UTC: the reader may be in any time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def span(seconds: float) -> str:
    """Format a length of time as people say it: in the largest unit that fits."""
    left = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if left >= size:
            return f"{left / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{left:.0f} s"


def ago(seconds: float) -> str:
    """Return how long ago something was."""
    return f"{span(seconds)} ago"


def _many(pending: int) -> str:
    """Return the subject of `… it as soon as`."""
    return "The message that waits is sent to" if pending == 1 else f"{pending} messages wait; the first is sent to"


def _when_it_comes(head: DeliveryView, pending: int, comes: str) -> str:
    """Tell what happens to the next message of a vehicle that has to do something first."""
    match head.state:
        case "in_flight":
            return f"Request {head.request_id!r} was sent before and not acknowledged: it is repeated when {comes}."
        case "paused":
            resume = f"`motorcade fanout resume {head.request_id}`"
            return f"Request {head.request_id!r} is paused: it is sent after {resume}, when {comes}{_or_expires(head)}."
        case _:
            return f"{_many(pending)} it as soon as {comes}{_or_expires(head)}."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _or_expires(head: DeliveryView) -> str:
    return f", unless that is after {clock(head.expires_at)}, when it expires" if head.expires_at else ""
