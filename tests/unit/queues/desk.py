"""A dispatcher with everything around it as lists: a store, clients, and a clock that stands.

    desk = Desk(ack_timeout=10)
    a = desk.join("a", room=3)      # a client that may get three messages
    desk.append(5)                  # messages 1 to 5
    desk.settle()                   # reads are answered, messages are sent
    a.numbers                       # what it has got
    a.ack(1), a.nack(2)             # by number

The store answers reads when `settle` is called, so that tests can let things happen in between (`desk.reads`). Clients
are sent everything they were given when `settle` is called, unless they are `blocked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from motorcade.core.message import Message
from motorcade.plugins.queues.dispatcher import DISCONNECTED, Consumer, Dispatcher, Item
from motorcade.plugins.queues.options import QueueOptions

START = 1000.0


@dataclass
class Entry:
    """A message in the store."""

    level: int
    position: int
    stored_at: float
    mark: int = 0
    expires_at: float | None = None


@dataclass(eq=False)
class Client:
    """The place of a client: how much it may get, and what it has got."""

    desk: Desk
    name: str
    room: int
    blocked: bool = False
    given: list[Item] = field(default_factory=list)  #: and not sent
    doubtful: set[Item] = field(default_factory=set)  #: of these, what is asked for before it is sent
    inflight: list[Item] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  #: every message that was sent, each time
    consumer: Consumer = field(init=False)

    def __post_init__(self) -> None:
        self.consumer = Consumer(self.name, "$queue/q", self)

    # -- Seat

    def put(self, consumer: Consumer, items: list[Item]) -> None:
        assert consumer is self.consumer
        assert self.room >= len(items), f"{self.name} was not promised so many"
        self.room -= len(items)
        self.given += items

    def doubt(self, consumer: Consumer, item: Item) -> None:
        assert consumer is self.consumer
        self.doubtful.add(item)

    # -- the client

    def send(self, number: int = 0) -> bool:
        """The window lets messages through (0: all)."""
        some = self.given[:number] if number else list(self.given)
        for item in some:
            self.given.remove(item)
            message: Message | None = item.message
            if item in self.doubtful or item.ends <= self.desk.now:  # nothing else is asked for
                message = self.desk.dispatcher.sending(self.consumer, item, self.desk.now)
                self.doubtful.discard(item)
            if message is None:
                self.room += 1
                self.desk.dispatcher.not_sent(self.consumer, item, self.desk.now)
            else:
                self.desk.dispatcher.sent(self.consumer, [item], self.desk.now)
                self.inflight.append(item)
                self.seen.append(int(message.payload))
        return bool(some)

    def ack(self, *numbers: int) -> None:
        self.desk.dispatcher.acknowledged(self.consumer, self._take(numbers), self.desk.now)
        self.desk.settle()

    def nack(self, *numbers: int) -> None:
        for item in self._take(numbers):
            self.desk.dispatcher.refused(self.consumer, item, "refused", self.desk.now)
        self.desk.settle()

    def _take(self, numbers: tuple[int, ...]) -> list[Item]:
        items = [next(i for i in self.inflight if int(i.message.payload) == number) for number in numbers]
        for item in items:
            self.inflight.remove(item)
        self.room += len(items)
        return items

    @property
    def numbers(self) -> list[int]:
        """What it holds."""
        return [int(item.message.payload) for item in self.inflight]

    def leave(self, reason: str = DISCONNECTED) -> None:
        self.given.clear()
        self.inflight.clear()
        self.desk.clients.remove(self)
        self.desk.dispatcher.leave(self.consumer, reason, self.desk.now)
        self.desk.settle()


class Desk:
    """The outside of one dispatcher."""

    def __init__(self, **options: Any) -> None:
        self.now = START
        self.entries: dict[tuple[int, int], Entry] = {}
        self.last: Counter[int] = Counter()
        self.reads: list[tuple[int, int, int]] = []
        self.asked: list[tuple[int, int, int]] = []  #: every read that there ever was
        self.removals: list[Item] = []
        self.buried: list[tuple[int, int, str]] = []  #: message, attempts, reason
        self.graves: list[Item] = []
        self.alarm_at: float | None = None
        self.marking = False
        self.clients: list[Client] = []
        self.counters: Counter[str] = Counter()
        self.confirm = True  #: removals are answered when `settle` is called
        self.dispatcher = Dispatcher(QueueOptions(**options), self, self.counters)

    # -- Outside

    def fetch(self, level: int, after: int, limit: int) -> None:
        assert not [read for read in self.reads if read[0] == level], "one read at a time"
        self.reads.append((level, after, limit))
        self.asked.append((level, after, limit))

    def finish(self, items: Sequence[Item]) -> None:
        self.removals += items

    def mark(self, *, at_once: bool) -> None:
        self.marking = True

    def write_marks(self) -> None:
        for item in list(self.dispatcher.unmarked) if self.marking else ():
            entry = self.entries.get((item.level, item.position))
            if entry is not None:
                entry.mark = item.attempts
        self.dispatcher.unmarked.clear()
        self.marking = False

    def bury(self, item: Item, reason: str) -> None:
        self.buried.append((int(item.message.payload), item.attempts, reason))
        self.graves.append(item)
        self.removals.append(item)

    def alarm(self, delay: float | None) -> None:
        self.alarm_at = None if delay is None else self.now + delay

    # -- what happens

    def join(self, name: str, room: int = 100, *, blocked: bool = False) -> Client:
        client = Client(self, name, room, blocked)
        self.clients.append(client)
        self.dispatcher.join(client.consumer, self.now)
        return client

    def append(self, number: int = 1, level: int = 0, expires_at: float | None = None) -> None:
        for _ in range(number):
            self.last[level] += 1
            entry = Entry(level, self.last[level], self.now, expires_at=expires_at)
            self.entries[level, entry.position] = entry
            if self.dispatcher.expects(level, entry.position):
                self.dispatcher.insert(self.item(entry))
        self.dispatcher.dispatch(self.now)

    def item(self, entry: Entry) -> Item:
        """Messages tell their level and position: 1, 2, … and 1001, 1002, … of level 1."""
        payload = b"%d" % (1000 * entry.level + entry.position)
        message = Message("t", payload, 1, expires_at=entry.expires_at)
        return Item(entry.level, entry.position, message, len(payload), entry.stored_at, entry.mark)

    def read(self) -> None:
        """Answer the oldest read."""
        level, after, limit = self.reads.pop(0)
        found = sorted((e for e in self.entries.values() if e.level == level and e.position > after), key=position_of)
        part = found[:limit]
        last = part[-1].position if part else 0
        items = [self.item(entry) for entry in part]
        self.dispatcher.fetched(level, items, last, self.now, more=len(part) == limit)

    def remove(self) -> None:
        """The store does what it was asked to."""
        items, self.removals = self.removals, []
        for item in items:
            self.entries.pop((item.level, item.position), None)
            self.dispatcher.removed(item.level, [item.position])

    def settle(self) -> None:
        """Until nothing is left to do now."""
        busy = True
        while busy:
            busy = bool(self.reads)
            while self.reads:
                self.read()
            for client in list(self.clients):
                busy = (not client.blocked and client.send()) or busy
            self.write_marks()
            if self.confirm and self.removals:
                busy = True
                self.remove()

    def wait(self, seconds: float) -> None:
        """Let time pass, and everything happen that is to happen meanwhile."""
        end = self.now + seconds
        while self.alarm_at is not None and self.alarm_at <= end:
            self.now, self.alarm_at = max(self.now, self.alarm_at), None
            self.dispatcher.tick(self.now)
            self.settle()
        self.now = end


def position_of(entry: Entry) -> int:
    return entry.position
