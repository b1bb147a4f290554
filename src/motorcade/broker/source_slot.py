"""A source's place in a session (`SourceSlot`), and what an instance of it has from the broker (`InstanceFeed`).

The slot stays as long as its subscriptions; instances come and go in it. What an instance still sends after its end
does not reach the next one: each has a feed of its own, which is closed with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Delayed, FastSource, Given, Source, SourceType, Why

if TYPE_CHECKING:
    from motorcade.broker.source_scheduler import SourceScheduler


class SourceSlot:
    """One source's place in a session."""

    __slots__ = (
        "asks",
        "at_once",
        "backoff",
        "buffer",
        "fast",
        "feed",
        "kept",
        "kind",
        "leaving",
        "missed",
        "new_filters",
        "promised",
        "retry",
        "scheduler",
        "source",
        "subscriptions",
        "told_sent",
        "unacked",
    )

    def __init__(self, scheduler: SourceScheduler, kind: SourceType) -> None:
        self.scheduler = scheduler
        self.kind = kind
        self.kept: Any = None
        self.subscriptions: dict[str, Subscription] = {}
        self.source: Source | None = None  #: none while the client is away, or before one is made again
        self.fast: FastSource | None = None  #: the same, if it has the optional face
        self.feed: InstanceFeed | None = None  #: what the source has from us
        self.asks = False  #: it wants to be asked before a message is sent, if it does not say otherwise
        self.told_sent = False  #: it hears that a message was sent
        self.at_once = False  #: it hears of several deliveries at once
        self.buffer: deque[Given] = deque()
        self.promised = 0  #: messages the source may give
        self.unacked = 0  #: messages in flight
        self.missed: list[Outcome] = []  #: what became of messages while there was no source to hear it
        self.leaving = False  #: no filter is left; it stays for what is in flight
        self.backoff = 0.0
        self.retry: Delayed | None = None
        self.new_filters: dict[str, Why] | None = None  #: filters that came while there was no instance to hear of them

    def make(self) -> Source:
        """Return a new instance of the source."""
        self.feed = InstanceFeed(self)
        self.source = self.kind.make(self.feed)
        self.fast = fast = self.source if isinstance(self.source, FastSource) else None
        kind = type(fast) if fast is not None else FastSource
        self.asks = kind.sending is not FastSource.sending
        self.told_sent = kind.sent_run is not FastSource.sent_run
        self.at_once = kind.delivered_run is not FastSource.delivered_run
        return self.source

    def unmake(self) -> None:
        """Drop the instance, which has ended."""
        self.source = self.fast = None
        if self.feed is not None:
            self.feed.close()
            self.feed = None
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None

    def qos_of(self, message: Message, filter_: str) -> int:
        """Return the QoS at which the client gets a message."""
        return min(message.qos, self.subscriptions[filter_].qos, 1 if self.kind.release else 2)

    @property
    def busy(self) -> bool:
        """Return True if it has as much in flight as it may; an acknowledgement lines it up again."""
        most = self.kind.max_unacked
        return most > 0 and self.unacked >= most

    @property
    def spent(self) -> bool:
        """Return True if its source has given all that it may, and all of that is sent."""
        return not (self.buffer or self.promised or self.kind.max_unacked)

    @property
    def waits(self) -> bool:
        """Return True if it has a message to send."""
        if not self.buffer:
            return False
        most = self.kind.max_unacked
        return not most or self.unacked < most or not self.needs_room

    @property
    def needs_room(self) -> bool:
        """Return True if the next message must find room in the window."""
        given = self.buffer[0]
        return given.message.qos > 0 and self.subscriptions[given.filter].qos > 0

    def turn(self, now: float) -> bool:
        """Send one message; False if there is none, or no room for it."""
        return self.scheduler.send(self, now)


class InstanceFeed:
    """The `Feed` of one instance of a source: what it still sends after its end does not reach the next one."""

    __slots__ = ("_open", "_slot", "_timers")

    def __init__(self, slot: SourceSlot) -> None:
        self._slot = slot
        self._open = True
        self._timers: set[Timer] | None = None

    @property
    def kept(self) -> Any:
        return self._slot.kept

    @kept.setter
    def kept(self, value: Any) -> None:
        if self._open:
            self._slot.kept = value

    @property
    def client(self) -> ClientInfo:
        return self._slot.scheduler.client

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        return self._slot.subscriptions

    @property
    def inflight(self) -> list[Given]:
        slot = self._slot
        missed = [given for _, given, _, _ in slot.missed]  # it hears of them next
        return missed + [given for of, given in slot.scheduler.unacked.values() if of is slot]

    @property
    def unsent(self) -> list[Given]:
        return list(self._slot.buffer)

    @property
    def desired(self) -> int:
        return self._slot.scheduler.promise(self._slot) if self._open else 0

    def hand(self, given: Given) -> bool:
        return self._open and self._slot.scheduler.hand(self._slot, given)

    def send(self, what: object) -> None:
        if self._open:
            self._slot.scheduler.post(self._slot, self, what)

    def send_later(self, delay: float, what: object) -> Delayed:
        timer = Timer(self, what)
        if self._open:
            if self._timers is None:
                self._timers = set()
            self._timers.add(timer)
            timer.start(self._slot.scheduler.later(delay, timer))
        return timer

    def disconnect(self, detail: str) -> None:
        if self._open:
            self._slot.scheduler.disconnect(detail)

    def forget(self, timer: Timer) -> None:
        if self._timers is not None:
            self._timers.discard(timer)

    def close(self) -> None:
        """Close the feed of an instance that has ended."""
        self._open = False
        for timer in list(self._timers or ()):
            timer.cancel()


class Timer:
    """Something a source has sent itself for later."""

    __slots__ = ("_feed", "_handle", "_what")

    def __init__(self, feed: InstanceFeed, what: object) -> None:
        self._feed = feed
        self._what = what
        self._handle: Delayed | None = None

    def start(self, handle: Delayed) -> None:
        self._handle = handle

    def over(self) -> None:
        self._feed.forget(self)
        self._feed.send(self._what)

    def cancel(self) -> None:
        self._feed.forget(self)
        if self._handle is not None:
            self._handle.cancel()


#: What became of a message: the client's answer, or why it was dropped.
Outcome = tuple[SourceSlot, Given, ReasonCode, str]
