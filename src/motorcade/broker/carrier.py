"""The carrier: what the sources of one client give, on its way to the client's window.

    source ─▶ lane ─┐
    source ─▶ lane ─┼─ in turn, one message each ─▶ window ─▶ client
    durable, live ──┘        (only as far as there is room)

A lane is one source's place in the session. An instance of the source ends with the connection (`extension.sources`
has the rules that plugins rely on); the lane stays as long as its subscriptions, so that a client that comes back finds
its sources where it left them, and acknowledgements of what is still in flight reach the right one.

Rule 1: no more than `source_buffer` messages wait here, and one of each source besides. What a source is told it may
        give is promised to it, and nobody is promised more than half of what is left. So there is room for one that
        comes later, and a source that is slow with its messages, or has none, holds up nobody.
Rule 2: while there is room in the window for one message only, everybody who waits gets it in turn: each source, the
        durable queue of the session, and its live queue. Between two messages of one, each of the others has
        sent one, or could not.
Rule 3: callbacks of sources run in `turn` (what was sent to them) and in `pump` (what became of messages), in the
        lifetime calls (`subscribed` …), and never inside each other.
Rule 4: one call of `pump` sends at most `STEP` messages or about `STEP_OCTETS`; then others have their turn of the
        event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from motorcade.broker.lane import InstanceFeed, Lane, Outcome, Timer
from motorcade.broker.turns import STEP, STEP_OCTETS, Turns, is_message
from motorcade.core.client import ClientInfo
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
    Kind,
    Recreate,
    Source,
    Why,
)

if TYPE_CHECKING:
    from motorcade.broker.session import Session

BACKOFF = 0.1  #: seconds until a source that asked for it is made anew; doubled each time, until one delivers
MAX_BACKOFF = 30.0
INBOX = 10_000  #: things that sources of one client were sent and have not heard yet; more are dropped, and counted


class Carrier(Turns):
    """The sources of one session."""

    __slots__ = (
        "_hungry",
        "_inbox",
        "_scheduled",
        "_withdrawn",
        "lanes",
        "leaving",
        "promised",
    )

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.lanes: dict[tuple[str, str], Lane] = {}  #: by name of the kind, and filter (none: for all filters)
        self.leaving: set[Lane] = set()
        self.promised = 0  #: messages that sources may give
        self._hungry: dict[Lane, None] = {}  # told that they may give nothing, in that order
        self._inbox: deque[tuple[Lane, InstanceFeed, object]] = deque()
        self._scheduled = False
        self._withdrawn: dict[int, tuple[Lane, Given]] = {}  # by packet id: what this connection did not repeat

    @property
    def client(self) -> ClientInfo:
        """Whose sources these are."""
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
        """Whether there is nothing left to carry, or to remember."""
        return not (self.lanes or self.leaving or self.unacked or self._done or self._inbox)

    @property
    def active(self) -> bool:
        """Whether `pump` has something to do here."""
        return bool(self._ring or self._free or self._done or self._hungry)

    # -- room

    def promise(self, lane: Lane) -> int:
        """How many messages a source may give: as many as it was told and has not given, or more (rule 1)."""
        session = self.session
        if not session.greeted or lane.leaving or lane.feed is None:
            return 0
        options = session.shared.options
        room = 0
        if self.octets < options.source_buffer_bytes:
            room = (options.source_buffer - self.buffered - self.promised + lane.promised) // 2
        if room < 1 and not lane.buffer:
            room = 1
        if lane.kind.max_unacked:
            room = min(room, lane.kind.max_unacked - lane.unacked - len(lane.buffer))
        if room > lane.promised:
            self.promised += room - lane.promised
            lane.promised = room
        if lane.promised:
            self._hungry.pop(lane, None)
        else:
            self._hungry[lane] = None
        return lane.promised

    # -- subscriptions come and go

    def subscribed(self, subscription: Subscription, why: Why) -> None:
        """A client has subscribed, for the first time or again."""
        self._settle()
        for kind in self.session.shared.sources.kinds:
            lane = self.lanes.get(_key(kind, subscription.filter))
            known = lane is not None and subscription.filter in lane.subscriptions
            if lane is not None and known:
                lane.subscriptions[subscription.filter] = subscription
                self._line_up(lane)  # its QoS may be another
            if (known and not kind.renew) or not kind.concerns(self.session.client, subscription, why):
                continue
            if lane is not None and known:
                self._end_filter(lane, subscription.filter, Why.REMOVED)
            self._enter(kind, subscription, why)

    def unsubscribed(self, filter_: str) -> None:
        """A subscription is gone."""
        self._settle()
        for lane in [lane for lane in self.lanes.values() if filter_ in lane.subscriptions]:
            self._end_filter(lane, filter_, Why.UNSUBSCRIBED)

    def added(self, kind: Kind) -> None:
        """A kind of source was registered: offer it what the client has subscribed to."""
        for subscription in list(self.session.subscriptions.values()):
            lane = self.lanes.get(_key(kind, subscription.filter))
            if lane is not None and subscription.filter in lane.subscriptions:
                continue
            if kind.concerns(self.session.client, subscription, Why.RECREATED):
                self._enter(kind, subscription, Why.RECREATED)

    def removed(self, kind: Kind) -> None:
        """A kind of source was unregistered: nobody is told any more what becomes of its messages."""
        self._settle()
        for lane in [lane for lane in self._all() if lane.kind is kind]:
            for filter_ in list(lane.subscriptions):
                self._end_filter(lane, filter_, Why.REMOVED, linger=False)
            self._terminate(lane)

    def _enter(self, kind: Kind, subscription: Subscription, why: Why) -> None:
        """Offer a filter to the lane of a kind, which is made if there is none."""
        key = _key(kind, subscription.filter)
        lane = self.lanes.get(key) or Lane(self, kind)
        if lane.retry is not None:
            lane.subscriptions[subscription.filter] = subscription  # the next instance hears of it
            lane.anew = (lane.anew or {}) | {subscription.filter: why}
            return
        if self._offer(lane, subscription, why):
            self.lanes[key] = lane
        elif not lane.subscriptions:
            self._terminate(lane)

    def _offer(self, lane: Lane, subscription: Subscription, why: Why) -> bool:
        """Whether the source of a lane takes a filter."""
        kind = lane.kind
        try:
            taken = (lane.source or lane.make()).subscribe(subscription, why)
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(kind, "subscribe")
            taken = False
        if taken:
            lane.subscriptions[subscription.filter] = subscription
        else:
            lane.subscriptions.pop(subscription.filter, None)
        return bool(taken)

    def _begin(self, lane: Lane, why: Why) -> None:
        """A new instance for a lane that has filters; it ends if none of them is taken."""
        filters = list(lane.subscriptions)
        anew, lane.anew = lane.anew or {}, None
        for subscription in list(lane.subscriptions.values()):
            self._offer(lane, subscription, anew.get(subscription.filter, why))
        if lane.subscriptions:
            self._done += lane.missed
            lane.missed = []
        else:
            self.lanes.pop(_key(lane.kind, filters[0]), None)
            self._terminate(lane)

    def _end_filter(self, lane: Lane, filter_: str, why: Why, *, linger: bool = True) -> None:
        """A lane has one filter less; without any it ends, as soon as nothing is in flight any more."""
        self._call_unsubscribe(lane, filter_, why)
        lane.subscriptions.pop(filter_, None)
        self._purge(lane, filter_)
        if lane.subscriptions:
            return
        self.lanes.pop(_key(lane.kind, filter_), None)
        if lane.unacked and lane.source is not None and linger:
            lane.leaving = True
            self.leaving.add(lane)
            self.promised -= lane.promised
            lane.promised = 0
            self._hungry.pop(lane, None)
        else:
            self._terminate(lane)

    def _purge(self, lane: Lane, filter_: str) -> None:
        """What was given for a filter and not sent goes away."""
        gone = [given for given in lane.buffer if given.filter == filter_]
        if gone:
            lane.buffer = deque(given for given in lane.buffer if given.filter != filter_)
            self._count(gone)
            if not lane.promised and lane.subscriptions:
                self._hungry[lane] = None  # nobody tells it of what is gone, but there is room now
        self._line_up(lane)

    def _count(self, gone: list[Given]) -> None:
        self.buffered -= len(gone)
        self.octets -= sum(len(given.message.payload) for given in gone)

    def _call_unsubscribe(self, lane: Lane, filter_: str, why: Why) -> None:
        if lane.source is not None:
            try:
                lane.source.unsubscribe(filter_, why)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(lane.kind, "unsubscribe")

    def _terminate(self, lane: Lane) -> None:
        """The end of an instance."""
        if lane.source is not None:
            try:
                lane.source.terminate()
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(lane.kind, "terminate")
        self._drop(lane)

    def _drop(self, lane: Lane) -> None:
        """A lane has no source any more; nothing of it waits, and nothing is promised to it."""
        lane.unmake()
        self._count(list(lane.buffer))
        lane.buffer.clear()
        self.promised -= lane.promised
        lane.promised = 0
        self._line_up(lane)
        self._hungry.pop(lane, None)
        self.leaving.discard(lane)

    def _all(self) -> Iterator[Lane]:
        yield from list(self.lanes.values())
        yield from list(self.leaving)

    # -- the connection comes and goes

    def detach(self, why: Why) -> None:
        """The connection is gone: its sources end, their lanes wait for the client."""
        self._settle()
        for lane in self._all():
            for filter_ in list(lane.subscriptions):
                self._call_unsubscribe(lane, filter_, why)
            lane.backoff = 0.0
            lingers = lane.leaving and lane.kind.lingers and not lane.kind.release and lane.unacked
            self._terminate(lane)
            if lingers:
                self.leaving.add(lane)
        self._inbox.clear()
        self._ring.clear()
        self._free.clear()
        self._withdrawn.clear()
        for number in [number for number, (lane, _) in self.unacked.items() if lane.kind.release]:
            self.unacked.pop(number)[0].unacked -= 1
            self.session.inflight.pop(number, None)

    def resumed(self) -> None:
        """The client is back, and has got its CONNACK."""
        offered = {(lane.kind.name, filter_) for lane in self.lanes.values() for filter_ in lane.subscriptions}
        for lane in list(self.lanes.values()):
            self._begin(lane, Why.RESUMED)
        for lane in list(self.leaving):
            try:
                lane.make()
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(lane.kind, "make")
                self._drop(lane)
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
        lane, given = at
        kind, asked = lane.kind, lane.kind.repeats
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
            lane.unacked -= 1
            if lane in self.leaving and not lane.unacked:
                self._terminate(lane)
        return wanted

    def late(self, number: int, reason: ReasonCode) -> None:
        """The client acknowledges, unasked, what was not repeated on this connection."""
        lane, given = self._withdrawn.pop(number, (None, None))
        if lane is not None and given is not None and lane.kind.late is not None and reason < 0x80:
            try:
                lane.kind.late(self.session.client, given)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(lane.kind, "late")

    def end(self) -> None:
        """The session has ended. Its sources have heard of it when the connection went."""
        for lane in self._all():
            self._terminate(lane)
        self.lanes.clear()
        self.unacked.clear()
        self._done.clear()

    # -- what sources are told

    def post(self, lane: Lane, feed: InstanceFeed, what: object) -> None:
        """`info` for a source in the next turn of the event loop."""
        if len(self._inbox) >= INBOX:
            lane.kind.counters["overrun"] += 1
            return
        self._inbox.append((lane, feed, what))
        self._turn_later()

    def tell(self, what: object) -> bool:
        """`info` for all generic sources; False if there is none."""
        told = False
        for lane in self.lanes.values():
            if lane.kind.generic and lane.feed is not None:
                lane.feed.send(what)
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
            lane, feed, what = inbox.popleft()
            if lane.feed is feed and lane.source is not None:
                self._info(lane, lane.source, what)
        if inbox:
            self._turn_later()
        if self.active:
            self.session.go_on()
        else:
            self.session.put_down()

    def _info(self, lane: Lane, source: Source, what: object) -> None:
        try:
            answer = source.info(what, self.promise(lane))
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(lane.kind, "info")
            answer = RECREATE
        if answer is not None:
            self._answered(lane, source, answer)

    def _settle(self) -> None:
        """Tell sources what became of their messages."""
        done, self._done = self._done, []
        at = 0
        if len(done) == 1:
            lane, _, reason, dropped = done[0]
            self._settle_run(lane, done, reason, dropped)
            at = 1
        while at < len(done):
            lane, _, reason, dropped = done[at]
            end = at + 1
            while end < len(done) and done[end][0] is lane and done[end][2] is reason and done[end][3] == dropped:
                end += 1
            self._settle_run(lane, done[at:end], reason, dropped)
            at = end
        if self.leaving:
            for lane in [lane for lane in self.leaving if not lane.unacked]:
                self._terminate(lane)

    def _settle_run(self, lane: Lane, run: list[Outcome], reason: ReasonCode, dropped: str) -> None:
        """Messages of one source that fared alike."""
        outcome_name = dropped or ("refused" if reason >= 0x80 else "delivered")
        counters = lane.kind.counters
        at_once = lane.at_once
        ack: Ack | None = None
        for number, outcome in enumerate(run):
            source = lane.source
            if source is None:
                if lane.retry is not None:
                    lane.missed += run[number:]  # the next instance hears of it
                else:
                    counters[outcome_name] += len(run) - number
                return
            counters[outcome_name] += len(run) if at_once else 1
            if ack is None or lane.kind.max_unacked:  # else there is as much room as a moment ago
                ack = Ack(self.promise(lane), reason, dropped)
            try:
                if at_once:
                    answer = source.delivered_run([of for _, of, _, _ in run], ack)
                else:
                    answer = source.delivered(outcome[1], ack)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(lane.kind, "delivered")
                answer = RECREATE
            if answer is not None:
                ack = None
                self._answered(lane, source, answer)
            if not (dropped or isinstance(answer, Recreate)):
                lane.backoff = 0.0
            if at_once:
                return

    def _answered(self, lane: Lane, source: Source, answer: Answer) -> None:
        if lane.source is not source or lane.leaving:
            return  # its callback has had an effect that ended it, or it has no filter any more
        try:
            if isinstance(answer, Recreate):
                self._recreate(lane)
            elif isinstance(answer, Destroy):
                for filter_ in list(lane.subscriptions if answer.filters is None else answer.filters):
                    if filter_ in lane.subscriptions:
                        self._finish(lane, filter_)
            elif answer is not None:
                self._take(lane, answer)
        except Exception:  # noqa: BLE001 - a plugin may answer anything, and must hurt only itself
            self._failed(lane.kind, "answer")
            self._recreate(lane)

    def _finish(self, lane: Lane, filter_: str) -> None:
        """A source is done with a filter, by its own word."""
        del lane.subscriptions[filter_]
        self._purge(lane, filter_)
        if not lane.subscriptions:
            self.lanes.pop(_key(lane.kind, filter_), None)
            self._terminate(lane)

    def _take(self, lane: Lane, items: Sequence[object]) -> None:
        """Messages from a source."""
        counters, subscriptions = lane.kind.counters, lane.subscriptions
        usable: list[Given] = []
        octets = 0
        for given in items:
            if type(given) is not Given or not is_message(given.message) or given.filter not in subscriptions:
                counters["stray"] += 1
                continue
            usable.append(given)
            octets += len(given.message.payload)
        taken = len(usable)
        if not taken:
            return
        lane.buffer += usable
        self.octets += octets
        counters["given"] += taken
        self.buffered += taken
        if taken > lane.promised:
            counters["overshoot"] += taken - lane.promised
            self.session.shared.stats.refused["source_buffer"] += taken - lane.promised
        rest = max(0, lane.promised - taken)
        self.promised += rest - lane.promised
        lane.promised = rest
        self._line_up(lane)

    def _recreate(self, lane: Lane) -> None:
        """End an instance and make a new one after a while."""
        lane.kind.counters["recreated"] += 1
        for filter_ in list(lane.subscriptions):
            self._call_unsubscribe(lane, filter_, Why.REMOVED)
        backoff = lane.backoff = min(MAX_BACKOFF, lane.backoff * 2 or BACKOFF)
        self._terminate(lane)

        def again() -> None:
            lane.retry = None
            self._begin(lane, Why.RECREATED)
            if self.active:
                self.session.go_on()
            else:
                self.session.put_down()

        lane.retry = self.session.shared.later(backoff, again)

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
        self._sent_octets = sum(map(len, session.out))  # of this turn, not written yet
        budget = STEP
        while budget > 0 and self._sent_octets <= STEP_OCTETS:
            if self._done:
                self._settle()
            # What the last connection has not repeated yet goes first: each source's messages keep their order.
            sent = 0 if session.unsent else self._round(now, budget)
            budget -= sent
            if not sent and not self._done and not (self._hungry and self._tell_room()):
                return False
        waits = bool(self._done or self._free) or (bool(self._ring) and session.room > 0)
        return waits and session.writable and not session.unsent

    def _tell_room(self) -> bool:
        """Tell sources that were told to give nothing that they may; whether one has given something."""
        before = self.buffered
        for lane in list(self._hungry):
            source = lane.source
            if source is None:
                self._hungry.pop(lane, None)
            elif self.promise(lane):
                self._info(lane, source, ROOM)
        return self.buffered > before


def _key(kind: Kind, filter_: str) -> tuple[str, str]:
    return kind.name, "" if kind.multi_topic else filter_
