"""Who gets which message of one queue. Pure: no store, no clock, no waiting; `Outside` does what has to be done.

    store ─▶ level (highest first): [ back: given back ] ─┐
                                    [ ahead: read ahead ] ─┴─▶ strategy ─▶ consumer ─▶ acknowledged: leaves the store
                                          ▲                                   │
                                          └── refused, timed out, gone ◀──────┘ (too often: dead letter)

Rule 1: a message that waits is in memory once, and is given to one consumer at a time. Only a consumer that did not
        acknowledge in time may have it beside another one; whoever is first to acknowledge it ends it.
Rule 2: what is given back goes before what is behind it in the store: order is lost only where consumers lose it.
Rule 3: up to `Level.cursor` everything is in memory or on its way out. What lies behind is read when somebody has room.
        Without consumers nothing is in memory; what waited is read again (`_rewind`).
Rule 4: a message is counted as sent when it has left for the client (`sent`), not when it is given: what a client has
        never got is no attempt, but for what is too large for it.
Rule 5: what a client was promised is a promise to all its queues together, so it is asked for each time (`room`).
Rule 6: a client that does not take what it was given (its window is full) shall not keep it from one that would: what
        was not sent for `BLOCKED` seconds goes to a consumer that has room and nothing unsent itself.
Rule 7: what was given and may not be sent any more is told to the seat at once (`doubt`), which asks (`sending`) before
        it is sent; so is what was kept until it was too old. Nothing else is asked for: most messages leave unasked.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import StrEnum, auto
from heapq import heappop, heappush
from itertools import count, cycle
from math import inf
from typing import Final, Protocol

import msgspec

from motorcade.core.message import Message
from motorcade.plugins.queues.options import QueueOptions
from motorcade.plugins.queues.record import MOST_HISTORY, Attempt, Dead
from motorcade.plugins.queues.strategy import STRATEGIES, RoundRobin

LOW: Final = 192  #: messages in memory at which the next ones are read, unless they are large; a few consumers' windows
READ: Final = 128  #: messages read at once; a store on this machine finds so many without a thread of its own
READ_OCTETS: Final = 1024 * 1024  #: bytes likewise, as far as the messages before let it be guessed
FIRST_READ: Final = 32  #: messages read while their size cannot be guessed
MOST_WAITING: Final = 4096  #: messages of a level that wait in memory; beyond that nothing is read
MOST_NOTES: Final = 4096  #: messages of a level whose attempts are remembered while they are not in memory
MOST_SKIPPED: Final = 256  #: messages that those with room may not get, before nothing behind them is looked at
PATIENCE: Final = 1.0  #: seconds that a refused message waits for a consumer that has not refused it, but has no room

BLOCKED: Final = 0.05  #: seconds after which a message that was given and not sent may go to another consumer
SENT: Final = inf  #: in place of the time at which a message was given

DISCONNECTED: Final = "disconnected"
UNSUBSCRIBED: Final = "unsubscribed"
TIMED_OUT: Final = "not acknowledged in time"
TOO_LARGE: Final = "larger than the consumer takes"
RESTARTED: Final = "not acknowledged"  #: by anybody the node could remember


class State(StrEnum):
    """Where a message is."""

    WAITING = auto()
    DELAYED = auto()  #: nobody else is there to take it
    GIVEN = auto()
    FORGOTTEN = auto()  #: it is only in the store now
    DONE = auto()  #: acknowledged, expired, dropped, replaced or dead: nothing happens to it any more


_WAITING: Final = State.WAITING  # looking up a member of an enumeration costs as much as the rest of a comparison
_GIVEN: Final = State.GIVEN
_DONE: Final = State.DONE


class Item(msgspec.Struct, eq=False):
    """A message of a queue, in memory."""

    level: int
    position: int
    message: Message
    size: int  #: bytes in the store
    stored_at: float
    attempts: int = 0  #: how often it was sent
    qos: int = 0  #: with which it was published
    dead: Dead | None = None
    ends: float = inf  #: when it is too old
    state: State = State.WAITING
    consumer: Consumer | None = None  #: who has it now
    tried: bool = False  #: somebody had it, so not everybody may get it
    avoid: set[str] | None = None  #: who has refused it lately
    history: list[Attempt] | None = None
    dispatcher: Dispatcher | None = None


class Seat(Protocol):
    """A client's place, common to all queues that it consumes."""

    @property
    def room(self) -> int:
        """Messages it may be given now."""

    def put(self, consumer: Consumer, items: list[Item]) -> None:
        """Give it messages, not more than it has room for."""

    def doubt(self, consumer: Consumer, item: Item) -> None:
        """Ask before this message is sent, which it was given before (rule 7)."""


class Consumer:
    """A client that consumes one queue."""

    __slots__ = ("filter", "items", "name", "seat", "sent")

    def __init__(self, name: str, filter_: str, seat: Seat) -> None:
        self.name = name
        self.filter = filter_
        self.seat = seat
        #: Given and not settled, oldest first; since when, or `SENT`. What another one got meanwhile stays until the
        #: client has answered, or is about to send it: it must not get the same message twice.
        self.items: dict[Item, float] = {}
        self.sent = 0  #: of these, sent

    @property
    def held(self) -> int:
        return len(self.items)

    @property
    def room(self) -> int:
        return self.seat.room

    @property
    def is_hungry(self) -> bool:
        """Whether it has been sent everything that it was given."""
        return len(self.items) == self.sent

    def may_get(self, item: Item) -> bool:
        """Whether it neither has a message already nor has refused it."""
        return item not in self.items and (item.avoid is None or self.name not in item.avoid)


class Level:
    """Messages of one priority."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = 0  #: position up to which everything is known (rule 3)
        self.highest = 0  #: position that was known, whether the cursor is still behind it or not
        self.behind = True  #: there may be more behind it
        self.reading = False
        self.grown = False  #: something was appended while it was read
        self.items: dict[int, Item] = {}  #: all in memory, by position
        self.ahead: deque[Item] = deque()
        self.octets = 0  #: of these
        self.back: list[tuple[int, int, Item]] = []  #: by position; what no longer waits is left until it comes up
        self.rewound = False  #: what is being read is of no use any more
        self._serial = count()
        self.leaving: set[int] = set()  #: done, and perhaps still in the store
        self.missed: set[int] = set()  #: gone while it was read
        self.notes: OrderedDict[int, tuple[int, list[Attempt] | None]] = OrderedDict()  #: of what is not in memory
        self.average = 0.0  #: bytes of a message, lately

    def take(self) -> Item | None:
        """The first that waits."""
        ahead, back = self.ahead, self.back
        while ahead and ahead[0].state is not _WAITING:
            self.octets -= ahead.popleft().size
        while back and back[0][2].state is not _WAITING:
            heappop(back)
        if back and (not ahead or back[0][0] < ahead[0].position):
            return heappop(back)[2]
        if not ahead:
            return None
        item = ahead.popleft()
        self.octets -= item.size
        return item

    def put_back(self, item: Item) -> None:
        item.state = State.WAITING
        heappush(self.back, (item.position, next(self._serial), item))

    @property
    def read_limit(self) -> int:
        return min(READ, max(1, int(READ_OCTETS / self.average))) if self.average else FIRST_READ


class Outside(Protocol):
    """What a dispatcher asks for."""

    def fetch(self, level: int, after: int, limit: int) -> None:
        """Read messages; `fetched` or `not_fetched` answers."""

    def finish(self, items: Sequence[Item]) -> None:
        """Remove messages from the store; `removed` answers."""

    def mark(self, *, at_once: bool) -> None:
        """Note how often the messages in `unmarked` were sent, and take them out."""

    def bury(self, item: Item, reason: str) -> None:
        """It was sent too often: a dead letter, or dropped; `removed` answers."""

    def alarm(self, delay: float | None) -> None:
        """Call `tick` after so many seconds instead of whenever it was to be called; None: not at all."""


class Dispatcher:
    """The messages of one queue and its consumers."""

    def __init__(self, options: QueueOptions, outside: Outside, counters: Counter[str]) -> None:
        self.options = options
        self.consumers: dict[Consumer, None] = {}
        self.closed = False
        self._outside = outside
        self._counters = counters
        self._ready: RoundRobin[Consumer] = STRATEGIES[options.strategy]()
        self._levels = {number: Level(number) for number in range(options.priorities)}
        self._down = tuple(reversed(self._levels.values()))
        self._due: dict[Item, float] = {}  # sent, and until when it is to be acknowledged; in the order of the times
        self._gave = False  # something may be given and not sent
        self.unmarked: dict[Item, None] = {}  #: sent, and how often is not noted yet
        self._delayed: list[tuple[float, int, Item]] = []
        self._serial = count()
        self._alarm_at = inf

    # -- consumers

    def join(self, consumer: Consumer, now: float) -> None:
        """One more consumer."""
        self.consumers[consumer] = None
        for _, _, item in self._delayed:
            if item.state is State.DELAYED and consumer.may_get(item):
                self._levels[item.level].put_back(item)
        self._ready.offer(consumer)
        self.dispatch(now)

    def leave(self, consumer: Consumer, reason: str, now: float) -> None:
        """A consumer is gone: others get what it has not acknowledged."""
        self.consumers.pop(consumer, None)
        self._ready.discard(consumer)
        held = [(item, since) for item, since in consumer.items.items() if item.consumer is consumer]
        consumer.items.clear()
        consumer.sent = 0
        for item, since in held:
            if item.state is State.GIVEN:
                self._take_from(item)
                if since == SENT and not self._in_vain(item, consumer, reason, now):
                    continue
                self._levels[item.level].put_back(item)
        if self.consumers:
            self.dispatch(now)
        else:
            self._rewind()

    def has_room(self, consumer: Consumer, now: float) -> None:
        """A consumer may have room."""
        if consumer in self.consumers:
            self._ready.offer(consumer)
            self.dispatch(now)

    def sending(self, consumer: Consumer, item: Item, now: float) -> Message | None:
        """A message is about to be sent; None: it must not be any more."""
        if item.state is State.WAITING and item in consumer.items:
            item.state, item.consumer = State.GIVEN, consumer  # another one had it for a while, and is gone
        if item.state is not State.GIVEN or item.consumer is not consumer:
            return None
        if item.ends <= now:
            self._expire(item)
            return None
        return item.message

    def sent(self, consumer: Consumer, items: Sequence[Item], now: float) -> None:
        """Messages have left for the client (rule 4)."""
        held, due, unmarked = consumer.items, self._due, self.unmarked
        until = now + self.options.ack_timeout
        may_be_late = until > now
        again = False
        number = 0
        nothing_to_mark = not unmarked
        for item in items:
            if held.get(item, SENT) == SENT:
                continue  # the queue is gone, or it was told before
            held[item] = SENT
            number += 1
            item.attempts += 1
            if item.attempts > 1:
                again = True
            unmarked[item] = None
            if may_be_late and item.consumer is consumer:
                due[item] = until
        if not number:
            return
        consumer.sent += number
        self._counters["delivered"] += number
        if nothing_to_mark or again:
            self._outside.mark(at_once=again)
        if may_be_late and until < self._alarm_at:
            self._set_alarm(until, now)
        if self._gave and len(self.consumers) > 1 and consumer.is_hungry:
            self._look_for_blocked(now)

    def acknowledged(self, consumer: Consumer, items: Iterable[Item], now: float) -> None:
        """A consumer is done with messages, be it late."""
        held, due, unmarked, levels = consumer.items, self._due, self.unmarked, self._levels
        done: list[Item] = []
        sent = 0
        for item in items:
            if held.pop(item, None) == SENT:
                sent += 1
            if item.state is _GIVEN and item.consumer is consumer:  # most: as `_end` does it, but written out
                item.state = _DONE
                item.consumer = None
                due.pop(item, None)
                unmarked.pop(item, None)
                levels[item.level].items.pop(item.position, None)
                done.append(item)
            elif item.state is State.FORGOTTEN and not self.closed:  # its client has unsubscribed, and was the last one
                item = levels[item.level].items.get(item.position, item)  # noqa: PLW2901 - it was read again
                self._end(item)
                done.append(item)
            elif item.state is not State.DONE and not self.closed:
                self._end(item)
                done.append(item)
        consumer.sent -= sent
        if done:
            self._counters["acknowledged"] += len(done)
            self._remove(done)
        self.has_room(consumer, now)

    def refused(self, consumer: Consumer, item: Item, reason: str, now: float) -> None:
        """A consumer does not take a message, or cannot be sent it."""
        if not self._settle(consumer, item):
            item.attempts += 1  # or it would be tried for ever
        if item.state is State.GIVEN and item.consumer is consumer and not self.closed:
            self._counters["refused"] += 1
            self._take_from(item)
            if self._in_vain(item, consumer, reason, now):
                self._find_another(item, consumer, now)
        self.has_room(consumer, now)

    def not_sent(self, consumer: Consumer, item: Item, now: float, *, expired: bool = False) -> None:
        """A message was withdrawn, or has expired before it was sent."""
        self._settle(consumer, item)
        if item.state is State.GIVEN and item.consumer is consumer and not self.closed:
            if expired:
                self._expire(item)
            else:
                self._take_from(item)
                self._levels[item.level].put_back(item)
        self.has_room(consumer, now)

    def _settle(self, consumer: Consumer, item: Item) -> bool:
        """A consumer has a message no longer; whether it had been sent it."""
        if consumer.items.pop(item, SENT) != SENT:
            return False
        consumer.sent -= 1
        return True

    def _take_from(self, item: Item) -> None:
        """Nobody has a message any more."""
        item.consumer = None
        self._due.pop(item, None)

    def _in_vain(self, item: Item, consumer: Consumer, reason: str, now: float) -> bool:
        """A message was sent in vain; False if that was once too often."""
        item.tried = True
        if item.history is None:
            item.history = []
        item.history.append(Attempt(now, consumer.name, reason))
        del item.history[:-MOST_HISTORY]
        if 0 < self.options.max_attempts <= item.attempts:
            self._bury(item, reason)
            return False
        self.unmarked[item] = None
        self._outside.mark(at_once=True)
        return True

    def _find_another(self, item: Item, consumer: Consumer, now: float) -> None:
        """A message was refused: to another consumer at once, to the same one after a while."""
        if item.avoid is None:
            item.avoid = set()
        item.avoid.add(consumer.name)
        if any(other.may_get(item) for other in self.consumers):
            self._levels[item.level].put_back(item)
            self._later(item, now + PATIENCE, now)
        else:
            item.state = State.DELAYED
            self._later(item, now + self.options.redispatch_delay, now)

    # -- the store

    def expects(self, level: int, position: int) -> bool:
        """Something was appended: whether `insert` would take it, so that it need not be read."""
        at = self._levels.get(level)
        if at is None or position <= at.cursor:
            return False
        if at.reading:
            at.grown = True
        elif not at.behind and self.consumers and len(at.ahead) < MOST_WAITING and at.octets < READ_OCTETS:
            return True
        at.behind = True
        return False

    def look_again(self, level: int) -> None:
        """Read on: there may be messages that no append has told of. `dispatch` begins with it."""
        at = self._levels.get(level)
        if at is not None:
            at.behind = True
            at.grown = at.reading

    def insert(self, item: Item) -> None:
        """Take what was appended just now; `dispatch` gives it to somebody."""
        self._add(self._levels[item.level], [item])

    def fetched(self, level: int, items: list[Item], last: int, now: float, *, more: bool) -> None:
        """Messages were read; `last` is the position of the last one, 0: there was none; `more`: perhaps not all."""
        at = self._levels.get(level)
        if at is None or self.closed:
            return
        if at.rewound:
            items, last, more = [], 0, True
        if items:
            at.average = sum([item.size for item in items]) / len(items)
        if at.missed or (items and items[0].position <= at.highest):
            items = self._unknown(at, items)
        self._add(at, items)
        at.cursor = max(at.cursor, last)
        at.behind = more or at.grown
        at.reading = at.grown = at.rewound = False
        at.leaving -= at.missed
        at.missed.clear()
        if self.consumers:
            self.dispatch(now)
        else:
            self._rewind()

    def _unknown(self, at: Level, items: list[Item]) -> list[Item]:
        """Of messages that were read, those that are neither in memory nor gone, with what is remembered of them."""
        found: list[Item] = []
        for item in items:
            position = item.position
            if position in at.items or position in at.leaving or position in at.missed or position <= at.cursor:
                continue
            note = at.notes.pop(position, None)
            if note is not None:
                item.attempts = max(item.attempts, note[0])
                item.history = note[1]
            found.append(item)
        return found

    def not_fetched(self, level: int) -> None:
        """Nothing could be read."""
        at = self._levels.get(level)
        if at is not None:
            at.reading = at.grown = at.rewound = False
            at.behind = True

    def removed(self, level: int, positions: Iterable[int]) -> None:
        """The store has let go of what was finished or buried."""
        at = self._levels.get(level)
        if at is not None:
            if at.reading:  # what is being read may still have them
                at.missed.update(positions)
            else:
                at.leaving.difference_update(positions)

    def in_flight_to(self, level: int) -> int:
        """The highest position of a level that a consumer was sent and has not acknowledged; 0: none."""
        return max(
            (
                item.position
                for consumer in self.consumers
                for item, since in consumer.items.items()
                if since == SENT and item.level == level
            ),
            default=0,
        )

    def gone(self, level: int, position: int) -> bool:
        """An entry was replaced by a newer one, or pushed out; whether it was in memory, or is perhaps being read."""
        at = self._levels.get(level)
        if at is None:
            return False
        if at.reading:
            at.missed.add(position)
        at.notes.pop(position, None)
        item = at.items.get(position)
        if item is not None:
            self._end(item)
        return item is not None or at.reading

    def _add(self, at: Level, items: list[Item]) -> None:
        """Messages wait in memory from now on; in the order of the store, and behind all others."""
        if not items:
            return
        known, ends = at.items, self._ends
        for item in items:
            item.dispatcher = self
            item.ends = ends(item)
            known[item.position] = item
        at.octets += sum([item.size for item in items])
        at.ahead += items
        at.cursor = max(at.cursor, items[-1].position)
        at.highest = max(at.highest, at.cursor)

    def _ends(self, item: Item) -> float:
        retention = self.options.retention
        ends = item.stored_at + retention if retention else inf
        expires_at = item.message.expires_at
        return ends if expires_at is None or expires_at > ends else expires_at

    def _end(self, item: Item) -> None:
        """Nothing happens to a message any more."""
        item.state = State.DONE
        self._doubt(item)
        item.consumer = None
        self._due.pop(item, None)
        self.unmarked.pop(item, None)
        self._levels[item.level].items.pop(item.position, None)

    def _doubt(self, item: Item) -> None:
        """Whoever has a message and was not sent it asks before that happens (rule 7)."""
        consumer = item.consumer
        if consumer is not None and consumer.items.get(item, SENT) != SENT:
            consumer.seat.doubt(consumer, item)

    def _remove(self, items: list[Item]) -> None:
        """Messages that have ended leave the store."""
        for item in items:
            at = self._levels[item.level]
            at.leaving.add(item.position)
        for at in self._down:
            if at.notes:
                for item in items:
                    if item.level == at.number:
                        at.notes.pop(item.position, None)
        self._outside.finish(items)

    def _expire(self, item: Item) -> None:
        self._counters["expired"] += 1
        self._end(item)
        self._remove([item])

    def _bury(self, item: Item, reason: str) -> None:
        self._end(item)
        self._levels[item.level].leaving.add(item.position)
        self._outside.bury(item, reason)

    def _rewind(self) -> None:
        """Nobody is there: forget what waits, and read it again when somebody comes."""
        for at in self._levels.values():
            at.rewound = at.reading
            if not at.items:
                continue
            at.cursor = min(at.cursor, min(at.items) - 1)
            at.behind = True
            for position, item in at.items.items():
                item.state = State.FORGOTTEN
                if item.attempts or item.history:
                    at.notes[position] = item.attempts, item.history
            while len(at.notes) > MOST_NOTES:
                at.notes.popitem(last=False)
                self._counters["notes_forgotten"] += 1
            at.items.clear()
            at.ahead.clear()
            at.octets = 0
            at.back.clear()
        self._delayed.clear()
        self._due.clear()
        self._gave = False
        self._set_alarm(inf, 0.0)

    # -- giving

    def dispatch(self, now: float) -> None:
        """Give what waits to whoever has room."""
        if self._dispatch(now) and self._gave and len(self.consumers) > 1:
            self._look_for_blocked(now)

    def _dispatch(self, now: float) -> bool:
        """Give what waits to whoever has room, and read ahead; whether somebody still has room."""
        ready = self._ready
        skipped: list[Item] = []
        gave = False
        while (consumer := ready.pick()) is not None and len(skipped) < MOST_SKIPPED:
            if ready.is_alone and self._give_run(consumer, now):
                gave = True
                continue
            item = self._next(now)
            if item is None:
                break
            if item.tried and not consumer.may_get(item):
                others = [other for other in ready.those_with_room() if other.may_get(item)]
                if not others:
                    skipped.append(item)
                    continue
                consumer = others[0]
            self._give(item, consumer, now)
            gave = True
        for item in skipped:
            self._levels[item.level].put_back(item)
        if gave or consumer is not None:
            self._read_ahead()
        return consumer is not None

    def _next(self, now: float) -> Item | None:
        """The first message that waits; None: there is none, or what goes before it must be read first."""
        most = self.options.max_attempts
        for at in self._down:
            while (item := at.take()) is not None:
                if item.ends <= now:
                    self._expire(item)
                elif 0 < most <= item.attempts:
                    self._bury(item, item.history[-1].reason if item.history else RESTARTED)
                else:
                    return item
            if at.behind or at.reading:
                return None
        return None

    def _give(self, item: Item, consumer: Consumer, now: float) -> None:
        item.state = _GIVEN
        item.consumer = consumer
        if item.attempts:
            self._counters["redispatched"] += 1
        consumer.items[item] = now
        self._gave = True
        consumer.seat.put(consumer, [item])
        self._ready.given(consumer)

    def _give_run(self, consumer: Consumer, now: float) -> bool:
        """Give the only one who has room what was never sent and is next, up to the first with a story of its own."""
        for at in self._down:
            if at.ahead or at.back or at.behind or at.reading:
                break
        ahead, held = at.ahead, consumer.items
        if at.back:
            return False
        items: list[Item] = []
        room = consumer.room
        octets = 0
        while ahead and len(items) < room:
            item = ahead.popleft()
            if item.state is _WAITING:
                if item.attempts or item.tried or item.ends <= now:
                    ahead.appendleft(item)
                    break
                item.state = _GIVEN
                item.consumer = consumer
                held[item] = now
                items.append(item)
            octets += item.size
        at.octets -= octets
        if items:
            self._gave = True
            consumer.seat.put(consumer, items)
            self._ready.given(consumer)
        return bool(items)

    def _look_for_blocked(self, now: float) -> None:
        """Somebody may be glad of what another one does not take (rule 6). Looked at later: looking has a price."""
        self._set_alarm(now + BLOCKED, now, sooner=True)

    def _share_blocked(self, now: float) -> float:
        """Give what was not sent for a while to those who wait for something; when to look again, if at all."""
        if not self._gave:
            return inf
        hungry = [consumer for consumer in self._ready.those_with_room() if consumer.is_hungry]
        if not hungry:
            return inf
        unsent = self._unsent()
        self._gave = bool(unsent)
        turn = cycle(hungry)
        for since, _, _, item in unsent:
            if since + BLOCKED > now:
                return since + BLOCKED
            for _ in hungry:
                consumer = next(turn)
                if consumer.room > 0 and consumer.may_get(item):
                    self._doubt(item)  # who had it finds out when it wants to send it (`sending`)
                    self._take_from(item)
                    item.tried = True
                    self._give(item, consumer, now)
                    break
        return inf

    def _unsent(self) -> list[tuple[float, int, int, Item]]:
        """What was given and not sent: since when, and what it is, in the order in which it was given."""
        unsent = [
            (since, -item.level, item.position, item)
            for consumer in self.consumers
            if not consumer.is_hungry
            for item, since in consumer.items.items()
            if since != SENT and item.consumer is consumer
        ]
        unsent.sort(key=lambda one: one[:3])
        return unsent

    def _read_ahead(self) -> None:
        """Read on where the next messages come from, while somebody takes them."""
        for at in self._down:
            if at.reading:
                return
            if at.behind:
                few = len(at.ahead) <= LOW and at.octets <= READ_OCTETS // 4
                if few and len(at.back) < MOST_WAITING:
                    at.reading = True
                    self._outside.fetch(at.number, at.cursor, at.read_limit)
                return
            if at.ahead:
                return

    # -- time

    def _later(self, item: Item, at: float, now: float) -> None:
        heappush(self._delayed, (at, next(self._serial), item))
        self._set_alarm(at, now, sooner=True)

    def tick(self, now: float) -> None:
        """The alarm: what was to happen until now happens."""
        self._alarm_at = inf
        while self._due:
            item = next(iter(self._due))
            if self._due[item] > now:
                break
            self._late(item, now)
        while self._delayed and self._delayed[0][0] <= now:
            item = heappop(self._delayed)[2]
            item.avoid = None
            if item.state is State.DELAYED:
                self._levels[item.level].put_back(item)
        self._dispatch(now)
        soonest = min(self._share_blocked(now), next(iter(self._due.values()), inf))
        if self._delayed:
            soonest = min(soonest, self._delayed[0][0])
        self._set_alarm(min(soonest, self._alarm_at), now)

    def _late(self, item: Item, now: float) -> None:
        """A consumer has not acknowledged a message in time. It may still do so, if it is the first."""
        consumer = item.consumer
        self._take_from(item)
        self._counters["timed_out"] += 1
        if consumer is None or self._in_vain(item, consumer, TIMED_OUT, now):
            self._levels[item.level].put_back(item)

    def _set_alarm(self, at: float, now: float, *, sooner: bool = False) -> None:
        if at == self._alarm_at or (sooner and at > self._alarm_at):
            return
        self._alarm_at = at
        self._outside.alarm(None if at == inf else max(0.0, at - now))

    # -- operators

    def change(self, options: QueueOptions, now: float) -> None:
        """Other options hold from now on; for messages that were given, from their next time on."""
        before, self.options = self.options, options
        if options.strategy != before.strategy:
            self._ready = STRATEGIES[options.strategy]()
            for consumer in self.consumers:
                self._ready.offer(consumer)
        for number in range(options.priorities):
            self._levels.setdefault(number, Level(number))
        for number in [number for number in self._levels if number >= options.priorities]:
            del self._levels[number]
        self._down = tuple(self._levels[number] for number in sorted(self._levels, reverse=True))
        for at in self._down:
            for item in at.items.values():
                item.ends = self._ends(item)
                self._doubt(item)  # it may be too old now
        self.dispatch(now)

    def close(self) -> list[Consumer]:
        """The queue is no more; those who consumed it."""
        self.closed = True
        consumers = list(self.consumers)
        for consumer in consumers:
            self._ready.discard(consumer)
            for item in consumer.items:
                self._doubt(item)
            consumer.items.clear()
            consumer.sent = 0
        self.consumers.clear()
        self._rewind()
        return consumers

    @property
    def inflight(self) -> int:
        """Messages that consumers hold."""
        return sum(len(consumer.items) for consumer in self.consumers)

    def history(self, level: int, position: int) -> list[Attempt]:
        """Attempts at a message, as far as they are remembered."""
        at = self._levels.get(level)
        item = at.items.get(position) if at is not None else None
        noted = at.notes.get(position) if at is not None else None
        return list((item.history if item is not None else noted[1] if noted is not None else None) or ())

    def is_held(self, level: int, position: int) -> bool:
        """Whether a message is with a consumer, or on its way out."""
        at = self._levels.get(level)
        if at is None:
            return False
        item = at.items.get(position)
        return position in at.leaving or (item is not None and item.state is State.GIVEN)
