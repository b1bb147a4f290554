"""The source scheduler: round robin, so that sources share a client's window fairly; and the life of its sources.

    source ─▶ slot ─┐
    source ─▶ slot ─┼─▶ ring: what needs room in the window ─┐
      durable queue ┤                                         ├─ one each, in turn ─▶ window ─▶ client
         live queue ┘   free: what needs none (QoS 0) ────────┘     (only as far as there is room)

A slot is one source's place in the session. An instance of the source ends with the connection (`extension.sources`
has the rules that plugins rely on); the slot stays as long as its subscriptions, so that a client that comes back finds
its sources where it left them, and acknowledgements of what is still in flight reach the right one.

Rule 1: no more than `source_buffer` messages wait here, and one of each source besides. What a source is told it may
        give is promised to it, and no source is promised more than half of what is left. So there is room for one that
        comes later, and a source that is slow with its messages, or has none, holds up no other.
Rule 2: between two messages of one upstream (a source, the durable queue, the live queue), each of the others that
        waits has sent one, or could not. The one that has sent goes behind all others. (One that moves between the
        two rings may be passed twice.) A slot that waits alone sends as many as there is room for (`_send_run`).
Rule 3: callbacks of sources run in `turn` (what was sent to them) and in `pump` (what became of messages), in the
        lifetime calls (`subscribed` …), and never inside each other.
Rule 4: one call of `pump` sends at most `STEP` messages or about `STEP_BYTES`; then others have their turn of the
        event loop.
Rule 5: a message is taken from its slot when it is sent, or when it is certain that it never will be; the outcome is
        noted, for its source to hear.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from motorcade.broker.frames import IDS, frame_of
from motorcade.broker.source_slot import InstanceFeed, Outcome, SourceSlot, Timer
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import (
    RECREATE,
    ROOM,
    Ack,
    Answer,
    Delayed,
    Destroy,
    Given,
    Recreate,
    Source,
    SourceType,
    Why,
)

if TYPE_CHECKING:
    from motorcade.broker.session import Session

log = logging.getLogger(__name__)

STEP = 256  #: messages sent, or things told to sources, per turn of the event loop
STEP_BYTES = 256 * 1024  #: likewise; one message more than that goes alone
BACKOFF = 0.1  #: seconds until a source that asked for it is made again; doubled each time, until one delivers
MAX_BACKOFF = 30.0
INBOX = 10_000  #: things that sources of one client were sent and have not heard yet; more are dropped, and counted


class Upstream(Protocol):
    """The upstream of a window, from which it gets messages: a source's slot, the durable queue, the live queue."""

    @property
    def waits(self) -> bool:
        """Return True if it has a message to send."""

    @property
    def needs_room(self) -> bool:
        """Return True if the next message must find room in the window. Only asked while one waits."""

    def turn(self, now: float) -> bool:
        """Send the next message; False if there is none, or it must wait."""


class SourceScheduler:
    """The sources of one session, and whose turn it is."""

    __slots__ = (
        "_done",
        "_free",
        "_hungry",
        "_inbox",
        "_ring",
        "_rings",
        "_scheduled",
        "_sent_bytes",
        "_withdrawn",
        "buffered",
        "buffered_bytes",
        "leaving",
        "promised",
        "session",
        "slots",
        "unacked",
    )

    def __init__(self, session: Session) -> None:
        self.session = session
        self.unacked: dict[int, tuple[SourceSlot, Given]] = {}  #: by packet id, in the order of sending
        self.buffered = 0  #: messages that wait in slots
        self.buffered_bytes = 0  #: of these
        # Who has something to send, the next one first: what needs room in the window, and what does not (QoS 0).
        self._ring: dict[Upstream, None] = {}
        self._free: dict[Upstream, None] = {}
        self._rings = (self._ring, self._free)
        self._done: list[Outcome] = []  # what sources have to hear
        self._sent_bytes = 0  # of this pump
        self.slots: dict[tuple[str, str], SourceSlot] = {}  #: by name of the kind, and filter (none: for all filters)
        self.leaving: set[SourceSlot] = set()
        self.promised = 0  #: messages that sources may give
        self._hungry: dict[SourceSlot, None] = {}  # who may give nothing: told so, or all is given; in that order
        self._inbox: deque[tuple[SourceSlot, InstanceFeed, object]] = deque()
        self._scheduled = False
        self._withdrawn: dict[int, tuple[SourceSlot, Given]] = {}  # by packet id: what this connection did not repeat

    @property
    def client(self) -> ClientInfo:
        """The client of these sources."""
        return self.session.client

    def later(self, delay: float, timer: Timer) -> Delayed:
        """Call a timer after so many seconds."""
        return self.session.shared.later(delay, timer.over)

    def disconnect(self, detail: str) -> None:
        """Close the client's connection; its session is kept as long as the client has asked for."""
        if self.session.link is not None:
            self.session.link.end(ReasonCode.UNSPECIFIED_ERROR, detail)

    @property
    def idle(self) -> bool:
        """True if there is nothing left to carry, or to remember."""
        return not (self.slots or self.leaving or self.unacked or self._done or self._inbox)

    @property
    def active(self) -> bool:
        """True if `pump` has something to do here."""
        return bool(self._ring or self._free or self._done or self._hungry)

    # -- room

    def promise(self, slot: SourceSlot) -> int:
        """Return how many messages a source may give: as many as promised and not given, or more (rule 1)."""
        session = self.session
        if not session.greeted or slot.leaving or slot.feed is None:
            return 0
        options = session.shared.options
        room = 0
        if self.buffered_bytes < options.source_buffer_bytes:
            room = (options.source_buffer - self.buffered - self.promised + slot.promised) // 2
        if room < 1 and not slot.buffer:
            room = 1
        if slot.kind.max_unacked:
            room = min(room, slot.kind.max_unacked - slot.unacked - len(slot.buffer))
        if room > slot.promised:
            self.promised += room - slot.promised
            slot.promised = room
        if slot.promised:
            self._hungry.pop(slot, None)
        else:
            self._hungry[slot] = None
        return slot.promised

    # -- subscriptions come and go

    def subscribed(self, subscription: Subscription, why: Why) -> None:
        """Take a subscription of the client, the first or a repeated one."""
        self._settle()
        for kind in self.session.shared.sources.kinds:
            slot = self.slots.get(_key(kind, subscription.filter))
            known = slot is not None and subscription.filter in slot.subscriptions
            if slot is not None and known:
                slot.subscriptions[subscription.filter] = subscription
                self._line_up(slot)  # its QoS may be another
            if (known and not kind.renew) or not kind.concerns(self.session.client, subscription, why):
                continue
            if slot is not None and known:
                self._end_filter(slot, subscription.filter, Why.REMOVED)
            self._enter(kind, subscription, why)

    def unsubscribed(self, filter_: str) -> None:
        """Drop a subscription that is gone."""
        self._settle()
        for slot in [slot for slot in self.slots.values() if filter_ in slot.subscriptions]:
            self._end_filter(slot, filter_, Why.UNSUBSCRIBED)

    def added(self, kind: SourceType) -> None:
        """Offer to a new kind of source what the client has subscribed to."""
        for subscription in list(self.session.subscriptions.values()):
            slot = self.slots.get(_key(kind, subscription.filter))
            if slot is not None and subscription.filter in slot.subscriptions:
                continue
            if kind.concerns(self.session.client, subscription, Why.RECREATED):
                self._enter(kind, subscription, Why.RECREATED)

    def removed(self, kind: SourceType) -> None:
        """End the sources of an unregistered kind: they are not told any more what becomes of their messages."""
        self._settle()
        for slot in [slot for slot in self._all() if slot.kind is kind]:
            for filter_ in list(slot.subscriptions):
                self._end_filter(slot, filter_, Why.REMOVED, linger=False)
            self._terminate(slot)

    def _enter(self, kind: SourceType, subscription: Subscription, why: Why) -> None:
        """Offer a filter to the slot of a kind, which is made if there is none."""
        key = _key(kind, subscription.filter)
        slot = self.slots.get(key) or SourceSlot(self, kind)
        if slot.retry is not None:
            slot.subscriptions[subscription.filter] = subscription  # the next instance hears of it
            slot.new_filters = (slot.new_filters or {}) | {subscription.filter: why}
            return
        if self._offer(slot, subscription, why):
            self.slots[key] = slot
        elif not slot.subscriptions:
            self._terminate(slot)

    def _offer(self, slot: SourceSlot, subscription: Subscription, why: Why) -> bool:
        """Return True if the source of a slot takes a filter."""
        kind = slot.kind
        try:
            taken = (slot.source or slot.make()).subscribe(subscription, why)
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(kind, "subscribe")
            taken = False
        if taken:
            slot.subscriptions[subscription.filter] = subscription
        else:
            slot.subscriptions.pop(subscription.filter, None)
        return bool(taken)

    def _begin(self, slot: SourceSlot, why: Why) -> None:
        """Begin a new instance for a slot that has filters; it ends if none of them is taken."""
        filters = list(slot.subscriptions)
        new_filters, slot.new_filters = slot.new_filters or {}, None
        for subscription in list(slot.subscriptions.values()):
            self._offer(slot, subscription, new_filters.get(subscription.filter, why))
        if slot.subscriptions:
            self._done += slot.missed
            slot.missed = []
        else:
            self.slots.pop(_key(slot.kind, filters[0]), None)
            self._terminate(slot)

    def _end_filter(self, slot: SourceSlot, filter_: str, why: Why, *, linger: bool = True) -> None:
        """Remove a filter from a slot; without any it ends, as soon as nothing is in flight any more."""
        self._call_unsubscribe(slot, filter_, why)
        slot.subscriptions.pop(filter_, None)
        self._purge(slot, filter_)
        if slot.subscriptions:
            return
        self.slots.pop(_key(slot.kind, filter_), None)
        if slot.unacked and slot.source is not None and linger:
            slot.leaving = True
            self.leaving.add(slot)
            self.promised -= slot.promised
            slot.promised = 0
            self._hungry.pop(slot, None)
        else:
            self._terminate(slot)

    def _purge(self, slot: SourceSlot, filter_: str) -> None:
        """Remove what was given for a filter and not sent."""
        gone = [given for given in slot.buffer if given.filter == filter_]
        if gone:
            slot.buffer = deque(given for given in slot.buffer if given.filter != filter_)
            self._count(gone)
            if not slot.promised and slot.subscriptions:
                self._hungry[slot] = None  # no one tells it of what is gone, but there is room now
        self._line_up(slot)

    def _count(self, gone: list[Given]) -> None:
        self.buffered -= len(gone)
        self.buffered_bytes -= sum(len(given.message.payload) for given in gone)

    def _call_unsubscribe(self, slot: SourceSlot, filter_: str, why: Why) -> None:
        if slot.source is not None:
            try:
                slot.source.unsubscribe(filter_, why)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(slot.kind, "unsubscribe")

    def _terminate(self, slot: SourceSlot) -> None:
        """End an instance."""
        if slot.source is not None:
            try:
                slot.source.terminate()
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(slot.kind, "terminate")
        self._drop(slot)

    def _drop(self, slot: SourceSlot) -> None:
        """Drop the source of a slot; nothing of it waits, and nothing is promised to it."""
        slot.unmake()
        self._count(list(slot.buffer))
        slot.buffer.clear()
        self.promised -= slot.promised
        slot.promised = 0
        self._line_up(slot)
        self._hungry.pop(slot, None)
        self.leaving.discard(slot)

    def _all(self) -> Iterator[SourceSlot]:
        yield from list(self.slots.values())
        yield from list(self.leaving)

    # -- the connection comes and goes

    def detach(self, why: Why) -> None:
        """End the sources as the connection is gone; their slots wait for the client."""
        self._settle()
        for slot in self._all():
            for filter_ in list(slot.subscriptions):
                self._call_unsubscribe(slot, filter_, why)
            slot.backoff = 0.0
            lingers = slot.leaving and slot.kind.lingers and not slot.kind.release and slot.unacked
            self._terminate(slot)
            if lingers:
                self.leaving.add(slot)
        self._inbox.clear()
        self._ring.clear()
        self._free.clear()
        self._withdrawn.clear()
        for number in [number for number, (slot, _) in self.unacked.items() if slot.kind.release]:
            self.unacked.pop(number)[0].unacked -= 1
            self.session.inflight.pop(number, None)

    def resumed(self) -> None:
        """Resume the sources of a client that is back, and has got its CONNACK."""
        offered = {(slot.kind.name, filter_) for slot in self.slots.values() for filter_ in slot.subscriptions}
        for slot in list(self.slots.values()):
            self._begin(slot, Why.RESUMED)
        for slot in list(self.leaving):
            try:
                slot.make()
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(slot.kind, "make")
                self._drop(slot)
        for kind in self.session.shared.sources.kinds:
            for subscription in list(self.session.subscriptions.values()):
                known = (kind.name, subscription.filter) in offered
                if not known and kind.concerns(self.session.client, subscription, Why.RESUMED):
                    self._enter(kind, subscription, Why.RESUMED)

    def may_repeat(self, number: int) -> bool:
        """Ask before a message in flight is sent again on this connection; False: it is no longer in flight."""
        at = self.unacked.get(number)
        if at is None:
            return True
        slot, given = at
        kind, asked = slot.kind, slot.kind.repeats
        if asked is None:
            return True
        try:
            wanted = kind in self.session.shared.sources.kinds and asked(self.session.client, given)
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(kind, "repeats")
            wanted = True
        if not wanted:
            kind.counters["withdrawn"] += 1
            self._withdrawn[number] = self.unacked.pop(number)
            slot.unacked -= 1
            if slot in self.leaving and not slot.unacked:
                self._terminate(slot)
        return wanted

    def late(self, number: int, reason: ReasonCode) -> None:
        """Take a late acknowledgement, unasked, of what was not repeated on this connection."""
        slot, given = self._withdrawn.pop(number, (None, None))
        if slot is not None and given is not None and slot.kind.late is not None and reason < 0x80:
            try:
                slot.kind.late(self.session.client, given)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(slot.kind, "late")

    def end(self) -> None:
        """End with the session. Its sources have heard of it when the connection went."""
        for slot in self._all():
            self._terminate(slot)
        self.slots.clear()
        self.unacked.clear()
        self._done.clear()

    # -- what sources are told

    def post(self, slot: SourceSlot, feed: InstanceFeed, what: object) -> None:
        """Send `info` to a source in the next turn of the event loop."""
        if len(self._inbox) >= INBOX:
            slot.kind.counters["overrun"] += 1
            return
        self._inbox.append((slot, feed, what))
        self._turn_later()

    def tell(self, what: object) -> bool:
        """Send `info` to all generic sources; False if there is none."""
        told = False
        for slot in self.slots.values():
            if slot.kind.generic and slot.feed is not None:
                slot.feed.send(what)
                told = True
        return told

    def _turn_later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.session.shared.soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        inbox = self._inbox
        for _ in range(min(STEP, len(inbox))):
            if not inbox:
                break  # a callback has ended the session
            slot, feed, what = inbox.popleft()
            if slot.feed is feed and slot.source is not None:
                self._info(slot, slot.source, what)
        if inbox:
            self._turn_later()
        if self.active:
            self.session.go_on()
        else:
            self.session.put_down()

    def _info(self, slot: SourceSlot, source: Source, what: object) -> None:
        try:
            answer = source.info(what, self.promise(slot))
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(slot.kind, "info")
            answer = RECREATE
        if answer is not None:
            self._answered(slot, source, answer)

    def _settle(self) -> None:
        """Tell sources what became of their messages."""
        done, self._done = self._done, []
        at = 0
        if len(done) == 1:
            slot, _, reason, dropped = done[0]
            self._settle_run(slot, done, reason, dropped)
            at = 1
        while at < len(done):
            slot, _, reason, dropped = done[at]
            end = at + 1
            while end < len(done) and done[end][0] is slot and done[end][2] is reason and done[end][3] == dropped:
                end += 1
            self._settle_run(slot, done[at:end], reason, dropped)
            at = end
        if self.leaving:
            for slot in [slot for slot in self.leaving if not slot.unacked]:
                self._terminate(slot)

    def _settle_run(self, slot: SourceSlot, run: list[Outcome], reason: ReasonCode, dropped: str) -> None:
        """Tell a source the same outcome of several of its messages."""
        outcome_name = dropped or ("refused" if reason >= 0x80 else "delivered")
        counters = slot.kind.counters
        at_once = slot.at_once
        ack: Ack | None = None
        for number, outcome in enumerate(run):
            source = slot.source
            if source is None:
                if slot.retry is not None:
                    slot.missed += run[number:]  # the next instance hears of it
                else:
                    counters[outcome_name] += len(run) - number
                return
            counters[outcome_name] += len(run) if at_once else 1
            if ack is None or slot.kind.max_unacked:  # else there is as much room as a moment ago
                ack = Ack(self.promise(slot), reason, dropped)
            try:
                if at_once and slot.fast is not None:
                    answer = slot.fast.delivered_run([of for _, of, _, _ in run], ack)
                else:
                    answer = source.delivered(outcome[1], ack)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(slot.kind, "delivered")
                answer = RECREATE
            if answer is not None:
                ack = None
                self._answered(slot, source, answer)
            if not (dropped or isinstance(answer, Recreate)):
                slot.backoff = 0.0
            if at_once:
                return

    def _answered(self, slot: SourceSlot, source: Source, answer: Answer) -> None:
        if slot.source is not source or slot.leaving:
            return  # its callback has had an effect that ended it, or it has no filter any more
        try:
            if isinstance(answer, Recreate):
                self._recreate(slot)
            elif isinstance(answer, Destroy):
                for filter_ in list(slot.subscriptions if answer.filters is None else answer.filters):
                    if filter_ in slot.subscriptions:
                        self._finish(slot, filter_)
            elif answer is not None:
                self._take(slot, answer)
        except Exception:  # noqa: BLE001 - a plugin may answer anything, and must hurt only itself
            self._failed(slot.kind, "answer")
            self._recreate(slot)

    def _finish(self, slot: SourceSlot, filter_: str) -> None:
        """Finish a filter that a source is done with, by its own word."""
        del slot.subscriptions[filter_]
        self._purge(slot, filter_)
        if not slot.subscriptions:
            self.slots.pop(_key(slot.kind, filter_), None)
            self._terminate(slot)

    def _take(self, slot: SourceSlot, items: Sequence[object]) -> None:
        """Take messages from a source."""
        counters, subscriptions = slot.kind.counters, slot.subscriptions
        usable: list[Given] = []
        size = 0
        for given in items:
            if type(given) is not Given or not is_message(given.message) or given.filter not in subscriptions:
                counters["stray"] += 1
                continue
            usable.append(given)
            size += len(given.message.payload)
        taken = len(usable)
        if not taken:
            return
        slot.buffer += usable
        self.buffered_bytes += size
        counters["given"] += taken
        self.buffered += taken
        if taken > slot.promised:
            counters["overshoot"] += taken - slot.promised
            self.session.shared.stats.refused["source_buffer"] += taken - slot.promised
        rest = max(0, slot.promised - taken)
        self.promised += rest - slot.promised
        slot.promised = rest
        self._line_up(slot)

    def _recreate(self, slot: SourceSlot) -> None:
        """End an instance and make a new one after a while."""
        slot.kind.counters["recreated"] += 1
        for filter_ in list(slot.subscriptions):
            self._call_unsubscribe(slot, filter_, Why.REMOVED)
        backoff = slot.backoff = min(MAX_BACKOFF, slot.backoff * 2 or BACKOFF)
        self._terminate(slot)

        def again() -> None:
            slot.retry = None
            self._begin(slot, Why.RECREATED)
            if self.active:
                self.session.go_on()
            else:
                self.session.put_down()

        slot.retry = self.session.shared.later(backoff, again)

    # -- messages out

    def pump(self, now: float) -> bool:
        """Send what waits, in turn, as far as window and socket allow. True if it could go on in the next turn."""
        session = self.session
        if not (self._ring or self._free or self._hungry):
            self._settle()  # mostly that is all
            live = session.queue or (session.durable is not None and session.durable.waits)
            if not (self._ring or self._free or self._hungry or self._done or live):
                return False
        if session.durable is not None:
            self._line_up(session.durable)
        if session.queue is not None:
            self._line_up(session.queue)
        self._sent_bytes = sum(map(len, session.out))  # of this turn, not written yet
        budget = STEP
        while budget > 0 and self._sent_bytes <= STEP_BYTES:
            if self._done:
                self._settle()
            # What the last connection has not repeated yet goes first: each source's messages keep their order.
            sent = 0 if session.unsent else self._round(now, budget)
            budget -= sent
            if not sent and not self._done and not (self._hungry and self._tell_room()):
                return False
        waits = bool(self._done or self._free or self._hungry) or (bool(self._ring) and session.room > 0)
        return waits and session.writable and not session.unsent

    def _tell_room(self) -> bool:
        """Tell sources that could give nothing that they may; True if one has given something."""
        before = self.buffered
        for slot in list(self._hungry):
            source = slot.source
            if source is None:
                self._hungry.pop(slot, None)
            elif self.promise(slot):
                self._info(slot, source, ROOM)
        return self.buffered > before

    def _line_up(self, upstream: Upstream) -> None:
        """Let it wait where its next message belongs: behind the others, if it did not wait there already."""
        if not upstream.waits:
            self._ring.pop(upstream, None)
            self._free.pop(upstream, None)
        elif upstream.needs_room:
            self._free.pop(upstream, None)
            self._ring.setdefault(upstream)
        else:
            self._ring.pop(upstream, None)
            self._free.setdefault(upstream)

    def _round(self, now: float, budget: int) -> int:
        """Send one message of each upstream that waits; return how many. One that waits alone may send more."""
        session = self.session
        sent = 0
        cut = False
        stood = [(ring, len(ring)) for ring in self._rings]  # who comes in again meanwhile has had its turn
        for ring, number in stood:
            for _ in range(number):
                cut = cut or sent >= budget or self._sent_bytes > STEP_BYTES
                no_room = ring is self._ring and session.room <= 0
                if cut or no_room or not ring or not session.writable:
                    break
                slot = next(iter(ring))
                alone = len(self._free) + len(self._ring) == 1
                del ring[slot]
                if alone:
                    sent += self._send_run(slot, now, budget - sent)
                elif slot.turn(now):
                    sent += 1
                self._line_up(slot)
                if isinstance(slot, SourceSlot) and slot.spent:
                    self._hungry[slot] = None  # nothing has to be acknowledged before it may give more
        if cut:
            self._rings = self._rings[::-1]  # what needs no room in the window may have used up the rest of a pump
        return sent

    def send(self, slot: SourceSlot, now: float) -> bool:
        """Send the next message of a slot, or find that it is not to be sent; False if there is no room for it."""
        if not slot.buffer:
            return False
        session = self.session
        given = slot.buffer[0]
        message: Message | None = given.message
        qos = slot.qos_of(given.message, given.filter)
        no_room = session.room <= 0 or slot.busy
        if qos and no_room:
            return False
        if slot.asks and self._asks_now(slot):
            message = self._ask(slot, given)
            if not slot.buffer or given.filter not in slot.subscriptions:
                return False  # asking has ended it
            qos = slot.qos_of(message, given.filter) if message is not None else 0
            if qos and no_room:
                return False
        slot.buffer.popleft()
        size = len(given.message.payload)
        self.buffered -= 1
        self.buffered_bytes -= size
        self._sent_bytes += size
        if message is None:
            self._done.append((slot, given, ReasonCode.SUCCESS, "withdrawn"))
        elif message.expired(now):
            session.shared.stats.routed += 1
            session.forgo(message, "expired")
            self._done.append((slot, given, ReasonCode.SUCCESS, "expired"))
        else:
            self._send(slot, given, message, qos, now)
        return True

    def _send(self, slot: SourceSlot, given: Given, message: Message, qos: int, now: float) -> None:
        session, kind = self.session, slot.kind
        subscription = slot.subscriptions[given.filter]
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        if identifiers:
            message = replace(message, headers=message.headers | {"subscription_ids": identifiers})
        retain = message.retain and (kind.retained or subscription.retain_as_published)
        try:
            frame = frame_of(message, session.version, qos, now, retain=retain, identifiers=identifiers)
        except Exception:  # noqa: BLE001 - a plugin may make messages that cannot be written, and must hurt only itself
            self._failed(kind, "message")
            self._done.append((slot, given, ReasonCode.SUCCESS, "unusable"))
            return
        number = session.take_id() if qos else 0
        session.shared.stats.routed += 1
        if not session.send(frame, number):
            self._done.append((slot, given, ReasonCode.PACKET_TOO_LARGE, "too_large"))
            return
        if qos:
            self.unacked[number] = (slot, given)
            slot.unacked += 1
        else:
            self._done.append((slot, given, ReasonCode.SUCCESS, ""))
        if slot.told_sent:
            self._tell_sent(slot, [given])

    def _send_run(self, slot: Upstream, now: float, most: int) -> int:
        """Send messages of a slot that waits alone, as far as there is room; return how many were sent.

        Plain ones, to a client with nothing special, take the inside of `send` and `Session.send` without their calls.
        """
        session = self.session
        hooks = session.shared.hooks
        sent = 0
        quick = isinstance(slot, SourceSlot) and not (slot.kind.max_unacked or session.special)
        if hooks.message_delivered is not None or hooks.delivery_completed is not None:
            quick = False
        while sent < most and self._sent_bytes <= STEP_BYTES:
            count = self._send_quickly(slot, now, most - sent) if quick and isinstance(slot, SourceSlot) else 0
            if not count and not slot.turn(now):
                break
            sent += count or 1
        return sent

    def _send_quickly(self, slot: SourceSlot, now: float, most: int) -> int:
        """Send the next messages of a slot up to the first with something of its own; return how many were sent."""
        session = self.session
        buffer, inflight, out, unacked, done = slot.buffer, session.inflight, session.out, self.unacked, self._done
        subscriptions, version, take_id = slot.subscriptions, session.version, session.take_id
        highest = 1 if slot.kind.release else 2
        retained, asks = slot.kind.retained, slot.asks and self._asks_now(slot)
        run: list[Given] | None = [] if slot.told_sent else None
        room = session.room
        size = sent = unwindowed = 0
        empty = not out
        while sent < most and buffer and size <= STEP_BYTES:
            given = buffer[0]
            message = given.message
            subscription = subscriptions[given.filter]
            if subscription.identifier or message.expires_at is not None:
                break
            qos = min(message.qos, subscription.qos, highest)
            if qos and sent - unwindowed >= room:
                break
            if asks:
                wanted = self._ask(slot, given)
                if wanted is not message or slot.buffer is not buffer or not buffer:
                    break  # another one, or asking has ended it
            retain = message.retain and (retained or subscription.retain_as_published)
            try:
                frame = frame_of(message, version, qos, now, retain=retain)
            except Exception:  # noqa: BLE001 - `_send` tells of it
                break
            buffer.popleft()
            if qos:
                number = take_id()
                inflight[number] = frame
                unacked[number] = (slot, given)
                out += (frame[0], IDS[number], frame[1])
            else:
                unwindowed += 1
                out += frame[:2]
                done.append((slot, given, ReasonCode.SUCCESS, ""))
            if run is not None:
                run.append(given)
            size += len(message.payload)
            sent += 1
        if sent:
            slot.unacked += sent - unwindowed
            self.buffered -= sent
            self.buffered_bytes -= size
            self._sent_bytes += size
            if empty:
                session.shared.dirty.append(session)
            stats = session.shared.stats
            stats.packets_sent += sent
            stats.publish_sent += sent
            stats.routed += sent
            stats.publish_bytes_sent += size
            if run is not None:
                self._tell_sent(slot, run)
        return sent

    def hand(self, slot: SourceSlot, given: Given) -> bool:
        """Send one message to a client for whom nothing waits; False: it cannot be done here and now.

        Like `_send_quickly`, this is the inside of `send` and `Session.send` for plain messages to plain clients.
        """
        session = self.session
        hooks, message = session.shared.hooks, given.message
        subscription = slot.subscriptions.get(given.filter)
        if (
            not session.ready
            or self._ring
            or self._free
            or subscription is None
            or not (subscription.qos and message.qos)
            or subscription.identifier
            or message.retain
            or message.expires_at is not None
            or slot.kind.max_unacked
            or session.special
            or hooks.message_delivered is not None
            or hooks.delivery_completed is not None
            or session.room <= 0
        ):
            return False
        qos = min(message.qos, subscription.qos, 1 if slot.kind.release else 2)
        try:
            frame = frame_of(message, session.version, qos, 0.0)
        except Exception:  # noqa: BLE001 - `_send` tells of it
            return False
        number = session.take_id()
        session.inflight[number] = frame
        self.unacked[number] = (slot, given)
        slot.unacked += 1
        out = session.out
        if not out:
            session.shared.dirty.append(session)
            if session.link is not None:
                session.link.write_later()
        out += (frame[0], IDS[number], frame[1])
        slot.kind.counters["given"] += 1
        stats = session.shared.stats
        stats.packets_sent += 1
        stats.publish_sent += 1
        stats.routed += 1
        stats.publish_bytes_sent += len(message.payload)
        return True

    def _asks_now(self, slot: SourceSlot) -> bool:
        """Return True if a source that can be asked wants to be."""
        try:
            return slot.fast is not None and slot.fast.asks is not False
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(slot.kind, "asks")
            return True

    def _tell_sent(self, slot: SourceSlot, given: list[Given]) -> None:
        if slot.fast is not None:
            try:
                slot.fast.sent_run(given)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(slot.kind, "sent_run")

    def _ask(self, slot: SourceSlot, given: Given) -> Message | None:
        if slot.fast is None:
            return given.message
        try:
            message = slot.fast.sending(given)
            return message if message is None or is_message(message) else given.message
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(slot.kind, "sending")
            return given.message

    def acknowledged(self, number: int, reason: ReasonCode = ReasonCode.SUCCESS, dropped: str = "") -> None:
        """Finish a message that the client is done with, or will never get; its source hears of it at the next pump."""
        at = self.unacked.pop(number, None)
        if at is None:
            return
        slot, given = at
        slot.unacked -= 1
        if slot.source is None and slot.subscriptions:
            slot.missed.append((slot, given, reason, dropped))
            return
        self._done.append((slot, given, reason, dropped))
        if slot.buffer and slot.kind.max_unacked:
            self._line_up(slot)

    def _failed(self, kind: SourceType, callback: str) -> None:
        kind.counters["failed"] += 1
        client_id = self.session.client.client_id
        text = "source_failed source=%s callback=%s client=%s"
        log.error(text, kind.name, callback, client_id, exc_info=True)  # noqa: LOG014 - called while it is handled


def _key(kind: SourceType, filter_: str) -> tuple[str, str]:
    return kind.name, "" if kind.multi_topic else filter_


def is_message(message: object) -> bool:
    """Return True if a source has given what it should; values that cannot be encoded are found when they are sent."""
    return isinstance(message, Message) and isinstance(message.payload, bytes)
