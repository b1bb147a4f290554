"""Decide which consumer gets which message of one queue. Pure: no store, no clock; `Effects` does what it asks for.

    store ─▶ level (highest first): [ returned ] ───┐
                                    [ ahead: read ] ┴─▶ strategy ─▶ consumer ─▶ acknowledged: removed from the store
                                          ▲                            │
                                          └── refused, timed out ◀─────┘ (after max_attempts: dead letter)

Rule 1: a message that waits is in memory once, and is given to one consumer at a time. Only a consumer that did not
        acknowledge in time may have it beside another one; the first acknowledgement of either ends it.
Rule 2: what is returned goes before what is behind it in the store: order is lost only where consumers lose it.
Rule 3: up to `Level.cursor` everything is in memory or being removed. The rest is read while a consumer has room, but
        for the very next position when it was appended just now (`takes`). Without consumers nothing is in memory; what
        waited is read again (`_rewind`).
Rule 4: an attempt counts when the message has left for the client (`sent`), not when it is given. What is too large for
        a client counts too.
Rule 5: the room of a client is common to all its queues, so it is asked for each time (`room`).
Rule 6: a client whose window is full must not keep messages from one that has room: what was not sent for `BLOCKED`
        seconds goes to a consumer that has room and nothing unsent itself.
Rule 7: the subscriber is told at once of what was given and may no longer be sent (`recheck`), and asks (`sending`)
        before it sends it, or what may be too old. Nothing else is asked for: most messages leave unasked.

While a cluster has several members (`claims`) each has a dispatcher of its own, and rule 3 is another one:

Rule 8: what is in memory is claimed in the store, so no other member has it. As much is claimed as consumers here are
        likely to be sent soon (`_wanted`). A member with consumers that have room tells the others when it finds
        nothing to claim (`hungry`). Who knows of messages that it does not claim (`_untold`) offers them to those, and
        gives back what its own consumers do not take, and leaves that to the others for a while (`left_to_others`).
Rule 9: what is given back goes with the count of its attempts. A consumer here may still acknowledge it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum, auto
from heapq import heappop, heappush
from itertools import count, cycle, groupby
from math import inf
from operator import attrgetter
from typing import Final, Protocol

import msgspec

from motorcade.core.message import Message
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.record import MAX_HISTORY, Attempt, QueueRecord
from motorcade.plugins.logs.queues.strategy import STRATEGIES, RoundRobin
from motorcade.plugins.logs.queues.tables import mailbox_of

LOW: Final = 192  #: messages in memory at which the next ones are read, unless they are large; a few consumers' windows
READ: Final = 128  #: messages read at once; a store on this machine finds so many without a thread of its own
READ_BYTES: Final = 1024 * 1024  #: bytes likewise, as far as the messages before let it be guessed
FIRST_READ: Final = 32  #: messages read while their size cannot be guessed
MAX_WAITING: Final = 4096  #: messages of a level that wait in memory; beyond that nothing is read
MAX_REMEMBERED: Final = 4096  #: messages of a level whose attempts are remembered while they are not in memory
MAX_SKIPPED: Final = 256  #: messages that no consumer with room may get, before the search for others ends
PATIENCE: Final = 1.0  #: seconds that a refused message waits for a consumer that has not refused it, but has no room

BLOCKED: Final = 0.05  #: seconds after which a message that was given and not sent may go to another consumer
LEFT: Final = 1.0  #: seconds that what was given back is left to other members
FIRST_CLAIM: Final = 8  #: messages claimed for a consumer that has none
SENT: Final = inf  #: in place of the time at which a message was given

DISCONNECTED: Final = "disconnected"
UNSUBSCRIBED: Final = "unsubscribed"
TIMED_OUT: Final = "not acknowledged in time"
TOO_LARGE: Final = "larger than the consumer takes"
RESTARTED: Final = "not acknowledged"  #: before the node was started
WITHDRAWN: Final = ""  #: not sent; that is no attempt
EXPIRED: Final = "expired"  #: before it was sent


class EntryState(StrEnum):
    """The state of a message."""

    WAITING = auto()
    DELAYED = auto()  #: all consumers have refused it
    GIVEN = auto()
    RELEASED = auto()  #: given back: another member may have it (rule 9)
    DONE = auto()  #: acknowledged, expired, dropped, replaced or dead


_WAITING: Final = EntryState.WAITING  # looking up a member of an enumeration costs as much as the rest of a comparison
_GIVEN: Final = EntryState.GIVEN
_RELEASED: Final = EntryState.RELEASED
_DONE: Final = EntryState.DONE

_LEVEL: Final = attrgetter("level")
_LEVEL_NUMBER: Final = attrgetter("level.number")

_NO_MESSAGE: Final = Message("", b"")
_NO_RECORD: Final = QueueRecord("", b"")


class QueueEntry(msgspec.Struct, eq=False):
    """A message of a queue, in memory."""

    level: Level
    position: int
    message: Message  #: as consumers get it
    record: QueueRecord  #: as it is stored
    size: int  #: bytes in the store
    stored_at: float
    attempts: int = 0  #: how often it was sent
    ends: float = inf  #: when it is too old
    state: EntryState = EntryState.WAITING
    consumer: QueueConsumer | None = None  #: who has it now
    tried: bool = False  #: a consumer had it, so not every one may get it
    avoid: set[str] | None = None  #: consumers that have refused it lately
    history: list[Attempt] | None = None


class QueueClient(Protocol):
    """A client, common to all queues that it consumes."""

    @property
    def room(self) -> int:
        """Return how many messages it may be given now."""

    def give(self, consumer: QueueConsumer, entries: list[QueueEntry]) -> None:
        """Give it messages, not more than it has room for."""

    def recheck(self, consumer: QueueConsumer, entry: QueueEntry) -> None:
        """Ask before this message is sent, which it was given before (rule 7)."""


class QueueConsumer:
    """A client that consumes one queue."""

    __slots__ = ("blocked", "entries", "filter", "name", "sent", "subscriber")

    def __init__(self, name: str, filter_: str, subscriber: QueueClient) -> None:
        self.name = name
        self.filter = filter_
        self.subscriber = subscriber
        #: Given and not answered, oldest first; since when, or `SENT`. What another one got meanwhile stays until the
        #: client has answered, or is about to send it: it must not get the same message twice.
        self.entries: dict[QueueEntry, float] = {}
        self.sent = 0  #: of these, sent
        self.blocked = False  #: what it was not sent was given back; nothing is claimed for it until it is its turn

    @property
    def held(self) -> int:
        return len(self.entries)

    @property
    def room(self) -> int:
        return self.subscriber.room

    @property
    def is_hungry(self) -> bool:
        """Return True if it has been sent everything that it was given."""
        return len(self.entries) == self.sent

    def may_get(self, entry: QueueEntry) -> bool:
        """Return True if it neither has a message already nor has refused it."""
        return entry not in self.entries and (entry.avoid is None or self.name not in entry.avoid)


class Level:
    """Messages of one priority."""

    def __init__(self, dispatcher: QueueDispatcher, number: int) -> None:
        self.dispatcher = dispatcher
        self.number = number
        self.mailbox = mailbox_of(dispatcher.name, number)
        self.entries: dict[int, QueueEntry] = {}  #: all in memory, by position
        self.cursor = 0  #: position up to which everything is known (rule 3)
        self.behind = True  #: there may be more behind it
        self.reading = False
        self.grown = False  #: something was appended while it was read
        self.rewound = False  #: what is being read is of no use any more
        self.ahead: deque[QueueEntry] = deque()
        self.size = 0  #: bytes of these
        self.returned: list[tuple[int, int, QueueEntry]] = []  #: by position; what no longer waits is left in it
        self.unmarked: dict[QueueEntry, float] = {}  #: sent, and how often is not stored yet; since when
        self.done: list[tuple[int, int]] = []  #: to be removed from the store: positions and bytes
        self.leaving: set[int] = set()  #: done, and perhaps still in the store
        self.left: set[int] = set()  #: of these, gone while the level was read
        self.remembered: OrderedDict[int, tuple[int, list[Attempt] | None]] = OrderedDict()  #: of what is forgotten
        self.lent: dict[int, QueueEntry] = {}  #: given back, and a consumer has not answered yet
        self.left_to_others: dict[int, float] = {}  #: positions that are not claimed, until when
        self.average = 0.0  #: bytes of a message, in the last read
        self._serial = count()

    def waiting(self) -> int:
        """Return how many wait, about: some that wait no more may be counted."""
        ahead, returned = self.ahead, self.returned
        while ahead and ahead[0].state is not _WAITING:
            self.size -= ahead.popleft().size
        while returned and returned[0][2].state is not _WAITING:
            heappop(returned)
        return len(ahead) + len(returned)

    def take(self) -> QueueEntry | None:
        """Return the first that waits."""
        ahead, returned = self.ahead, self.returned
        while ahead and ahead[0].state is not _WAITING:
            self.size -= ahead.popleft().size
        while returned and returned[0][2].state is not _WAITING:
            heappop(returned)
        if returned and (not ahead or returned[0][0] < ahead[0].position):
            return heappop(returned)[2]
        if not ahead:
            return None
        entry = ahead.popleft()
        self.size -= entry.size
        return entry

    def put_back(self, entry: QueueEntry) -> None:
        """Let it wait again."""
        entry.state = _WAITING
        heappush(self.returned, (entry.position, next(self._serial), entry))

    def add(self, entries: list[QueueEntry]) -> None:
        """Let messages wait, but for those that are here or done already."""
        for entry in entries:
            position = entry.position
            if position in self.leaving or position in self.entries:
                continue
            if position in self.lent:
                lent = self.lent.pop(position)
                lent.attempts = max(lent.attempts, entry.attempts)
                entry = lent  # noqa: PLW2901 - the consumer that has it must not get it twice
            elif self.remembered:
                attempts, entry.history = self.remembered.pop(position, (0, None))
                entry.attempts = max(entry.attempts, attempts)
            entry.ends = self.dispatcher.ends(entry)
            self.entries[position] = entry
            if self.ahead and position < self.ahead[-1].position:
                self.put_back(entry)
                continue
            entry.state = _WAITING
            self.size += entry.size
            self.ahead.append(entry)
        if entries:
            self.cursor = max(self.cursor, entries[-1].position)

    def forget(self) -> int:
        """Drop everything from memory, to be read again; return how many messages' attempts are remembered no more."""
        self.rewound = self.reading
        if not self.entries:
            return 0
        self.cursor = min(self.cursor, min(self.entries) - 1)
        self.behind = True
        excess = self.remember(self.entries.values())
        self.entries.clear()
        self.ahead.clear()
        self.size = 0
        self.returned.clear()
        return excess

    def remember(self, entries: Iterable[QueueEntry]) -> int:
        """Remember the attempts at messages that leave memory; return how many messages' are remembered no more."""
        for entry in entries:
            if entry.attempts or entry.history:
                self.remembered[entry.position] = entry.attempts, entry.history
        excess = max(0, len(self.remembered) - MAX_REMEMBERED)
        for _ in range(excess):
            self.remembered.popitem(last=False)
        return excess

    @property
    def read_limit(self) -> int:
        return min(READ, max(1, int(READ_BYTES / self.average))) if self.average else FIRST_READ


class Effects(Protocol):
    """The effects that a dispatcher asks for."""

    def fetch(self, level: Level, after: int, limit: int) -> None:
        """Read messages; `fetched` answers."""

    def remove(self, entries: Sequence[QueueEntry]) -> None:
        """Remove messages from the store; `removed` answers."""

    def removed(self, level: Level, positions: Sequence[int], size: int) -> None:
        """Pass on that messages of so many bytes are removed, which `remove` was asked for."""

    def mark(self, entries: Sequence[QueueEntry]) -> None:
        """Store how often messages were sent, if they are not done before."""

    def dead_letter(self, entry: QueueEntry, reason: str) -> None:
        """Move a message that was sent too often to the dead-letter queue, or drop it; `removed` answers."""

    def claim(self, limit: int) -> None:
        """Claim up to so many messages; `claimed` answers."""

    def release(self, entries: Sequence[QueueEntry]) -> None:
        """Give messages back, with their attempts; `released` answers."""

    def offer(self, member: str) -> None:
        """Tell a member that there are messages."""

    def tell_hungry(self, count: int) -> None:
        """Tell all members that consumers here have room for so many, and find nothing."""

    def set_timer(self, delay: float | None) -> None:
        """Call `tick` after so many seconds instead of when it was to be called; None: not at all."""


class QueueDispatcher:
    """The messages of one queue and its consumers."""

    def __init__(self, name: str, options: QueueOptions, effects: Effects, counters: Counter[str]) -> None:
        self.name = name
        self.options = options
        self.consumers: dict[QueueConsumer, None] = {}
        self.closed = False
        self.levels = {number: Level(self, number) for number in range(options.priorities)}
        self._down = tuple(reversed(self.levels.values()))
        self.effects = effects
        self._counters = counters
        self._ready: RoundRobin[QueueConsumer] = STRATEGIES[options.strategy]()
        self._due: dict[QueueEntry, float] = {}  # sent: until when to be acknowledged; in the order of these times
        self._gave = False  # something may be given and not sent
        self._delayed: list[tuple[float, int, QueueEntry]] = []
        self._serial = count()
        self._timer_at = inf
        # With several members (rule 8):
        self.claims = False
        self.has_claimed = False  #: there were several members before: it may have claims of that time
        self.waits = False  #: another member may have messages in memory that are not claimed: nothing is claimed yet
        self.hungry: dict[str, int] = {}  #: members with consumers that have room for so many
        self.is_hungry = False  #: the others know that this one is
        self._claiming = False
        self._more = False  # there may be something to be claimed
        self._untold = 0  # messages that may be there, which no other member knows of
        self._skipped = 0  # messages that wait for others than the consumers with room, when it was last looked

    # -- consumers

    def join(self, consumer: QueueConsumer, now: float) -> None:
        """Add a consumer."""
        self.consumers[consumer] = None
        for _, _, entry in self._delayed:
            if entry.state is EntryState.DELAYED and consumer.may_get(entry):
                entry.level.put_back(entry)
        self._ready.offer(consumer)
        self._more = True
        self.dispatch(now)

    def leave(self, consumer: QueueConsumer, reason: str, now: float) -> None:
        """Remove a consumer: others get what it has not acknowledged."""
        self.consumers.pop(consumer, None)
        self._ready.discard(consumer)
        held = [(entry, since) for entry, since in consumer.entries.items() if entry.consumer is consumer]
        for entry in consumer.entries:
            self._answered(entry)
        consumer.entries.clear()
        consumer.sent = 0
        for entry, since in held:
            if entry.state is _GIVEN:
                self._take_from(entry)
                if since != SENT or self._may_try_again(entry, consumer, reason, now):
                    entry.level.put_back(entry)
        if self.consumers:
            self.dispatch(now)
        else:
            self._rewind()

    def has_room(self, consumer: QueueConsumer, now: float) -> None:
        """Give a consumer what waits: it may have room."""
        if consumer in self.consumers:
            self._ready.offer(consumer)
            self.dispatch(now)

    def sending(self, consumer: QueueConsumer, entry: QueueEntry, now: float) -> Message | None:
        """Return a message that is about to be sent; None: it must not be any more."""
        if entry not in consumer.entries:  # its queue is gone
            return None
        if entry.state is _WAITING:
            entry.state, entry.consumer = _GIVEN, consumer  # another one had it for a while, and is gone
        if entry.state is not _GIVEN or entry.consumer is not consumer:
            return None
        if entry.ends <= now:
            self._expire(entry)
            return None
        return entry.message

    def sent(self, consumer: QueueConsumer, entries: Sequence[QueueEntry], now: float) -> None:
        """Note that messages have left for the client (rule 4)."""
        held, due = consumer.entries, self._due
        until = now + self.options.ack_timeout
        left = [entry for entry in entries if held.get(entry, SENT) != SENT]  # else its queue is gone, or it was noted
        for entry in left:
            held[entry] = SENT
            entry.attempts += 1
            if until > now and entry.consumer is consumer:
                due[entry] = until
        if not left:
            return
        self.effects.mark(left)
        consumer.sent += len(left)
        consumer.blocked = False
        self._counters["delivered"] += len(left)
        if until > now:
            self._wake(until, now)
        if self._gave and len(self.consumers) > 1 and consumer.is_hungry:
            self._wake(now + BLOCKED, now)
        if self._more and self.claims:
            self._claim_ahead()

    def acknowledged(self, consumer: QueueConsumer, entries: Iterable[QueueEntry], now: float) -> None:
        """End messages that a consumer has acknowledged, in time or late."""
        held = consumer.entries
        done: list[QueueEntry] = []
        for entry in entries:
            if held.pop(entry, None) == SENT:
                consumer.sent -= 1
            self._answered(entry)
            if entry.consumer is not consumer:  # it may have been forgotten and read again, if this was the last one
                entry = entry.level.entries.get(entry.position, entry)  # noqa: PLW2901
            if entry.state is not _DONE and not self.closed:
                if entry.consumer is consumer:
                    entry.consumer = None
                self._end(entry)
                done.append(entry)
        if done:
            self._counters["acknowledged"] += len(done)
            self._remove(done)
        self.has_room(consumer, now)

    def not_taken(self, consumer: QueueConsumer, entry: QueueEntry, reason: str, now: float) -> None:
        """Give a message to another consumer: this one has refused it, or was not sent it."""
        since = consumer.entries.pop(entry, None)  # None: its queue is gone
        consumer.blocked = False
        self._answered(entry)
        if since == SENT:
            consumer.sent -= 1
        elif since is not None and reason not in {WITHDRAWN, EXPIRED}:
            entry.attempts += 1  # it is too large for the client; or it would be tried for ever
        if entry.state is _GIVEN and entry.consumer is consumer and not self.closed:
            if reason == EXPIRED:
                self._expire(entry)
            elif reason == WITHDRAWN:
                self._take_from(entry)
                entry.level.put_back(entry)
            else:
                self._counters["refused"] += 1
                self._take_from(entry)
                if self._may_try_again(entry, consumer, reason, now):
                    self._find_another(entry, consumer, now)
        self.has_room(consumer, now)

    def _answered(self, entry: QueueEntry) -> None:
        """Note that a consumer no longer has a message, which was given back perhaps."""
        if entry.state is _RELEASED:
            entry.level.lent.pop(entry.position, None)

    def _take_from(self, entry: QueueEntry) -> None:
        """Take a message from its consumer."""
        entry.consumer = None
        self._due.pop(entry, None)

    def _may_try_again(self, entry: QueueEntry, consumer: QueueConsumer, reason: str, now: float) -> bool:
        """Note a failed attempt. Return False if it was the last one: it is a dead letter then."""
        entry.tried = True
        entry.history = [*(entry.history or ()), Attempt(now, consumer.name, reason)][-MAX_HISTORY:]
        if 0 < self.options.max_attempts <= entry.attempts:
            self._dead_letter(entry, reason)
            return False
        self.effects.mark([entry])
        return True

    def _find_another(self, entry: QueueEntry, consumer: QueueConsumer, now: float) -> None:
        """Give a refused message to another consumer at once, or to the same one after a while."""
        if entry.avoid is None:
            entry.avoid = set()
        entry.avoid.add(consumer.name)
        at = now + PATIENCE
        if any(other.may_get(entry) for other in self.consumers):
            entry.level.put_back(entry)
        else:
            entry.state = EntryState.DELAYED
            at = now + self.options.redispatch_delay
        heappush(self._delayed, (at, next(self._serial), entry))
        self._wake(at, now)

    # -- the store

    def takes(self, level: Level, position: int) -> bool:
        """Return True if `Level.add` takes what was appended just now; False: it is read when it is its turn.

        Only the very next position is taken. Anything else may follow messages that are not known here: the answers to
        their appends come later, or say that the outcome is unknown.
        """
        if self.claims:
            self._more = True
            self._untold += 1
            return False
        if position <= level.cursor:
            return False
        if level.reading:
            level.grown = True
        elif (
            position == level.cursor + 1
            and not level.behind
            and self.consumers
            and len(level.ahead) < MAX_WAITING
            and level.size < READ_BYTES
        ):
            return True
        level.behind = True
        return False

    def read_again(self, level: Level) -> None:
        """Read on: there may be messages after an append of unknown outcome. `dispatch` begins with it."""
        if self.claims:
            self._more = True
            self._untold += 1
        level.behind = True
        level.grown = level.reading

    def fetched(self, level: Level, entries: list[QueueEntry], last: int, now: float, *, more: bool) -> None:
        """Take what was read, if anything; `last`: position of the last one, or 0; `more`: perhaps not all."""
        if self.closed:
            return
        if level.rewound:
            entries, last, more = [], 0, True
        if entries:
            level.average = sum([entry.size for entry in entries]) / len(entries)
            level.add(entries)
        level.cursor = max(level.cursor, last)
        level.behind = more or level.grown
        level.reading = level.grown = level.rewound = False
        level.leaving -= level.left
        level.left.clear()
        if self.consumers:
            self.dispatch(now)
        else:
            self._rewind()

    def removed(self, level: Level, positions: Sequence[int]) -> None:
        """Forget messages that are removed from the store. What is being read may still have them."""
        if level.reading:
            level.left.update(positions)
        else:
            level.leaving.difference_update(positions)

    def gone(self, level: Level, position: int) -> None:
        """End a message that was replaced by a newer one, or pushed out."""
        if level.reading:
            level.leaving.add(position)
            level.left.add(position)
        level.remembered.pop(position, None)
        entry = level.entries.get(position) or level.lent.get(position)
        if entry is not None:
            self._end(entry)

    def drop(self, level: Level, sizes: Mapping[int, int]) -> int:
        """Remove messages of these positions, in memory or not; return how many were not being removed already."""
        entries = [
            level.entries.get(position) or QueueEntry(level, position, _NO_MESSAGE, _NO_RECORD, size, 0.0)
            for position, size in sizes.items()
            if position not in level.leaving
        ]
        for entry in entries:
            self._end(entry)
        if entries:
            self._remove(entries)
        return len(entries)

    def ends(self, entry: QueueEntry) -> float:
        """Return when a message is too old."""
        retention = self.options.retention
        ends = entry.stored_at + retention if retention else inf
        expires_at = entry.message.expires_at
        return ends if expires_at is None or expires_at > ends else expires_at

    def _end(self, entry: QueueEntry) -> None:
        """Take a message from all that may happen to it."""
        entry.state = _DONE
        if entry.consumer is not None:
            self._recheck(entry)
            entry.consumer = None
        self._due.pop(entry, None)
        level = entry.level
        level.unmarked.pop(entry, None)
        level.entries.pop(entry.position, None)
        level.lent.pop(entry.position, None)

    def _recheck(self, entry: QueueEntry) -> None:
        """Let the consumer that has a message and was not sent it ask before that happens (rule 7)."""
        consumer = entry.consumer
        if consumer is not None and consumer.entries.get(entry, SENT) != SENT:
            consumer.subscriber.recheck(consumer, entry)

    def _remove(self, entries: list[QueueEntry]) -> None:
        """Remove messages that have ended from the store."""
        for entry in entries:
            level = entry.level
            level.leaving.add(entry.position)
            if level.remembered:
                level.remembered.pop(entry.position, None)
        self.effects.remove(entries)

    def _expire(self, entry: QueueEntry) -> None:
        self._counters["expired"] += 1
        self._end(entry)
        self._remove([entry])

    def _dead_letter(self, entry: QueueEntry, reason: str) -> None:
        self._end(entry)
        entry.level.leaving.add(entry.position)
        self.effects.dead_letter(entry, reason)

    def _rewind(self) -> None:
        """Forget what waits while there are no consumers: it is read again for the next one."""
        if self.claims:
            self._release([entry for level in self._down for entry in level.entries.values()])
            for level in self._down:
                level.ahead.clear()
                level.returned.clear()
                level.size = 0
        for level in self.levels.values():
            forgotten = level.forget()
            if forgotten:
                self._counters["notes_forgotten"] += forgotten
        self._delayed.clear()
        self._due.clear()
        self._gave = False
        self._timer_at = inf
        self.effects.set_timer(None)

    # -- giving

    def dispatch(self, now: float) -> None:
        """Give what waits to consumers that have room."""
        if self._dispatch(now) and self._gave and len(self.consumers) > 1:
            self._wake(now + BLOCKED, now)  # rule 6; not at once: looking has a price
        if self.claims:
            self._share(now)

    def _dispatch(self, now: float) -> bool:
        """Give what waits to consumers that have room, and read ahead; return True if one still has room."""
        ready = self._ready
        skipped: list[QueueEntry] = []
        entry: QueueEntry | None
        gave = False
        while (consumer := ready.pick()) is not None and len(skipped) < MAX_SKIPPED:
            entry = self._next(now)
            if entry is None:
                break
            if entry.tried and not consumer.may_get(entry):
                other = next((each for each in ready.those_with_room() if each.may_get(entry)), None)
                if other is None:
                    skipped.append(entry)
                    continue
                consumer = other
            entries = [entry]
            if ready.is_alone:
                room = consumer.room
                while len(entries) < room and len(skipped) < MAX_SKIPPED and (entry := self._next(now)) is not None:
                    (entries if not entry.tried or consumer.may_get(entry) else skipped).append(entry)
            self._give(entries, consumer, now)
            gave = True
        for entry in skipped:
            entry.level.put_back(entry)
        self._skipped = len(skipped)
        if gave or consumer is not None:
            self._read_ahead()
        return consumer is not None

    def _next(self, now: float) -> QueueEntry | None:
        """Return the first message that waits; None: there is none, or what goes before it must be read first."""
        max_attempts = self.options.max_attempts
        for level in self._down:
            while (entry := level.take()) is not None:
                if entry.ends <= now:
                    self._expire(entry)
                elif 0 < max_attempts <= entry.attempts:
                    self._dead_letter(entry, entry.history[-1].reason if entry.history else RESTARTED)
                else:
                    return entry
            if (level.behind or level.reading) and not self.claims:
                return None
        return None

    def _give(self, entries: list[QueueEntry], consumer: QueueConsumer, now: float) -> None:
        held = consumer.entries
        for entry in entries:
            entry.state = _GIVEN
            entry.consumer = consumer
            held[entry] = now
            if entry.attempts:
                self._counters["redispatched"] += 1
        self._gave = True
        consumer.subscriber.give(consumer, entries)
        self._ready.given(consumer)

    def _share_blocked(self, now: float) -> float:
        """Give what was not sent for a while to consumers that have nothing; return when to look again, if at all."""
        hungry = [consumer for consumer in self._ready.those_with_room() if consumer.is_hungry] if self._gave else []
        if not hungry:
            return inf
        unsent = [
            (since, entry)
            for consumer in self.consumers
            if not consumer.is_hungry
            for entry, since in consumer.entries.items()
            if since != SENT and entry.consumer is consumer
        ]
        unsent.sort(key=lambda one: (one[0], -one[1].level.number, one[1].position))  # as it was given
        self._gave = bool(unsent)
        turn = cycle(hungry)
        for since, entry in unsent:
            if since + BLOCKED > now:
                return since + BLOCKED
            for _ in hungry:
                consumer = next(turn)
                if consumer.room > 0 and consumer.may_get(entry):
                    self._recheck(entry)  # the one that had it finds out when it wants to send it (`sending`)
                    self._take_from(entry)
                    entry.tried = True
                    self._give([entry], consumer, now)
                    break
        return inf

    def _read_ahead(self) -> None:
        """Read on where the next messages come from, while a consumer takes them."""
        if self.claims:
            self._claim_ahead()
            return
        for level in self._down:
            if level.reading:
                return
            if level.behind:
                few = len(level.ahead) <= LOW and level.size <= READ_BYTES // 4
                if few and len(level.returned) < MAX_WAITING:
                    level.reading = True
                    self.effects.fetch(level, level.cursor, level.read_limit)
                return
            if level.ahead:
                return

    # -- several members (rules 8 and 9)

    def begin_claims(self) -> None:
        """Take nothing into memory from now on but what is claimed; what is there has to be claimed by the caller."""
        self.claims = self.has_claimed = self._more = True
        for level in self._down:
            level.rewound = level.reading

    def end_claims(self, now: float) -> None:
        """Go on alone: what others had claimed is before what was read here, too."""
        self.claims = self.waits = self.is_hungry = False
        self.hungry.clear()
        self._untold = 0
        for level in self._down:
            level.left_to_others.clear()
            level.cursor = 0
            level.behind = True
            level.grown = level.reading
        if self.consumers:
            self.dispatch(now)

    def look(self, now: float, *, offered: bool = False) -> None:
        """Note that there may be something to claim; `offered`: that no other member was told of."""
        if not self.claims:
            return
        self._more = True
        if offered:
            self.is_hungry = False
            self._untold = max(1, self._untold)
            for level in self._down:
                level.left_to_others.clear()  # they had their turn
        self.dispatch(now)

    def note_hungry(self, member: str, count: int, now: float) -> None:
        """Note that a member has consumers with room, and nothing for them."""
        if self.claims:
            self.hungry[member] = count
            self.dispatch(now)

    def forget_member(self, member: str) -> None:
        """Note that a member is gone."""
        self.hungry.pop(member, None)

    def new_members(self) -> None:
        """Note that there are members who do not know yet whether this one is hungry."""
        self.is_hungry = False

    def _wanted(self) -> int:
        """Return how many messages to claim: as many as consumers are likely to be sent soon."""
        allowed = unsent = room = 0
        for consumer in self._ready.some_with_room(READ):
            if not consumer.blocked:
                allowed += consumer.sent or FIRST_CLAIM
                unsent += consumer.held - consumer.sent
                room += consumer.room
        waiting = max(0, sum(level.waiting() for level in self._down) - self._skipped)
        if (unsent + waiting) * 2 > allowed:
            return 0  # a few at a time would cost a write each
        return max(0, min(READ, room - waiting, allowed - unsent - waiting))

    def _claim_ahead(self) -> None:
        if self._claiming or self.waits or not self._more:
            return
        wanted = self._wanted()
        if wanted > 0:
            self._claiming, self._more = True, False
            self.effects.claim(wanted)

    def claimed(self, found: Iterable[tuple[Level, list[QueueEntry]]], now: float, *, more: bool) -> None:
        """Take what was claimed, if anything; `more`: perhaps not all."""
        self._claiming = False
        if more:
            self._more = True
            self._untold = max(1, self._untold)
        elif not self._more:
            self._untold = 0  # what was left to others was offered when it was given back
        for level, entries in found:
            cursor = level.cursor
            level.add(entries)
            if not self.claims:
                level.cursor = cursor  # this node is alone meanwhile, and has not read what is before them (rule 3)
        if self.consumers:
            self.dispatch(now)
        else:
            self._rewind()
            self._share(now)

    def released(self, count: int, now: float) -> None:
        """Note that messages were given back: others may have them now."""
        if self.claims:
            self._more = True
            self._untold += count
            self._offer()
            self.dispatch(now)

    def _share(self, now: float) -> None:
        """Offer other members what is not taken here, and tell them if there is nothing."""
        if not self._claiming:
            self._offer()
        if self.hungry:
            count, waiting = sum(self.hungry.values()), list[QueueEntry]()
            while len(waiting) < count and (entry := self._next(now)) is not None:
                waiting.append(entry)
            if waiting:
                self._release(waiting, now + LEFT)
            if self._gave:
                self._wake(now + BLOCKED, now)
        if not (self._more or self._claiming or self.is_hungry) and (wanted := self._wanted()) > 0:
            self.is_hungry = True
            self.effects.tell_hungry(wanted)

    def _offer(self) -> None:
        """Tell hungry members of what they may not know of."""
        for member in list(self.hungry) if self._untold else ():
            if self._untold <= 0:
                break
            self._untold = max(0, self._untold - self.hungry.pop(member))
            self.effects.offer(member)

    def _release_blocked(self, now: float) -> float:
        """Give back what was not sent for a while if other members are hungry; return when to look again, if at all."""
        count = sum(self.hungry.values())
        if not count or not self._gave:
            return inf
        unsent = [
            (since, entry, consumer)
            for consumer in self.consumers
            if not consumer.is_hungry
            for entry, since in consumer.entries.items()
            if since != SENT and entry.consumer is consumer
        ]
        unsent.sort(key=lambda one: (one[0], -one[1].level.number, one[1].position))  # as it was given
        self._gave = bool(unsent)
        some = [one for one in unsent if one[0] + BLOCKED <= now][:count]
        for _, entry, consumer in some:
            self._recheck(entry)
            consumer.blocked = True
        if some:
            self._release([entry for _, entry, _ in some], now + LEFT)
        return unsent[len(some)][0] + BLOCKED if 0 < len(unsent) > len(some) < count else inf

    def left_to_others(self, level: Level, now: float) -> list[int]:
        """Return the positions of a level that are not to be claimed now."""
        left = level.left_to_others
        while left and next(iter(left.values())) <= now:
            del left[next(iter(left))]
        return list(left)

    def _release(self, entries: list[QueueEntry], until: float = 0.0) -> None:
        """Give messages back (rule 9), and leave them to others until then."""
        for level, some in groupby(sorted(entries, key=_LEVEL_NUMBER), key=_LEVEL):
            of_level = list(some)
            forgotten = level.remember(of_level)
            if forgotten:
                self._counters["notes_forgotten"] += forgotten
            for entry in of_level:
                entry.consumer = None
                entry.state = _RELEASED
                self._due.pop(entry, None)
                level.unmarked.pop(entry, None)
                level.entries.pop(entry.position, None)
                if until:
                    level.left_to_others.pop(entry.position, None)
                    level.left_to_others[entry.position] = until
                if any(entry in consumer.entries for consumer in self.consumers if entry.tried or consumer.blocked):
                    level.lent[entry.position] = entry
        if entries:
            self.effects.release(entries)

    # -- time

    def tick(self, now: float) -> None:
        """Do what was to happen until now."""
        self._timer_at = inf
        refused: list[QueueEntry] = []
        while self._due:
            entry = next(iter(self._due))
            if self._due[entry] > now:
                break
            self._time_out(entry, now)
        while self._delayed and self._delayed[0][0] <= now:
            entry = heappop(self._delayed)[2]
            entry.avoid = None
            if entry.state is EntryState.DELAYED:
                if self.hungry:
                    refused.append(entry)
                else:
                    entry.level.put_back(entry)
        if refused:
            self._release(refused, now + LEFT)
        self._dispatch(now)
        delayed = self._delayed[0][0] if self._delayed else inf
        blocked = self._share_blocked(now)
        if self.claims:
            self._share(now)
            blocked = min(blocked, self._release_blocked(now))
        self._wake(min(blocked, next(iter(self._due.values()), inf), delayed), now)

    def _time_out(self, entry: QueueEntry, now: float) -> None:
        """Take a message from a consumer that has not acknowledged it in time. It may still do so, if it is first."""
        consumer = entry.consumer
        self._take_from(entry)
        self._counters["timed_out"] += 1
        if consumer is None or self._may_try_again(entry, consumer, TIMED_OUT, now):
            entry.level.put_back(entry)

    def _wake(self, at: float, now: float) -> None:
        """Call `tick` at this time, unless it is called earlier."""
        if at < self._timer_at:
            self._timer_at = at
            self.effects.set_timer(max(0.0, at - now))

    # -- operators

    def change(self, options: QueueOptions, now: float) -> None:
        """Take other options; for messages that were given, from their next time on."""
        before, self.options = self.options, options
        if options.strategy != before.strategy:
            self._ready = STRATEGIES[options.strategy]()
            for consumer in self.consumers:
                self._ready.offer(consumer)
        self.levels = {number: self.levels.get(number) or Level(self, number) for number in range(options.priorities)}
        self._down = tuple(reversed(self.levels.values()))
        for level in self._down:
            for entry in level.entries.values():
                entry.ends = self.ends(entry)
                self._recheck(entry)  # it may be too old now
        self.dispatch(now)

    def close(self) -> None:
        """Forget everything: the queue is no more."""
        self.closed = True
        for consumer in self.consumers:
            self._ready.discard(consumer)
            for entry in consumer.entries:
                self._recheck(entry)
            consumer.entries.clear()
            consumer.sent = 0
        self.consumers.clear()
        self._rewind()

    @property
    def inflight(self) -> int:
        """Return how many messages consumers hold."""
        return sum(len(consumer.entries) for consumer in self.consumers)

    def sent_up_to(self, level: Level) -> int:
        """Return the highest position of a level that a consumer was sent and has not acknowledged; 0: none."""
        return max(
            (
                entry.position
                for consumer in self.consumers
                for entry, since in consumer.entries.items()
                if since == SENT and entry.level is level
            ),
            default=0,
        )

    def history(self, level: Level, position: int) -> list[Attempt]:
        """Return the attempts at a message, as far as they are remembered."""
        entry = level.entries.get(position)
        history = entry.history if entry is not None else level.remembered.get(position, (0, None))[1]
        return list(history or ())

    def is_held(self, level: Level, position: int) -> bool:
        """Return True if a message is with a consumer, or being removed."""
        entry = level.entries.get(position)
        return position in level.leaving or (entry is not None and entry.state is _GIVEN)
