"""A dispatcher with everything around it as lists: a store, clients, and a clock that stands.

    rig = Rig(ack_timeout=10)
    a = rig.join("a", room=3)       # a client that may get three messages
    rig.append(5)                   # messages 1 to 5
    rig.settle()                    # reads are answered, messages are sent
    a.numbers                       # what it has got
    a.ack(1), a.nack(2)             # by number

The store answers reads when `settle` is called, so that tests can let things happen in between (`rig.reads`). Clients
are sent everything they were given when `settle` is called, unless they are `blocked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from motorcade.core.message import Message
from motorcade.plugins.logs.queues.dispatcher import (
    DISCONNECTED,
    WITHDRAWN,
    EntryState,
    Level,
    QueueConsumer,
    QueueDispatcher,
    QueueEntry,
)
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.record import QueueRecord

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
    """A client: how much it may get, and what it has got."""

    rig: Rig
    name: str
    room: int
    blocked: bool = False
    given: list[QueueEntry] = field(default_factory=list)  #: and not sent
    rechecks: set[QueueEntry] = field(default_factory=set)  #: of these, what is asked for before it is sent
    inflight: list[QueueEntry] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  #: every message that was sent, each time
    consumer: QueueConsumer = field(init=False)

    def __post_init__(self) -> None:
        self.consumer = QueueConsumer(self.name, "$queue/q", self)

    # -- QueueClient

    def give(self, consumer: QueueConsumer, entries: list[QueueEntry]) -> None:
        assert consumer is self.consumer
        assert self.room >= len(entries), f"{self.name} was not promised so many"
        self.room -= len(entries)
        self.given += entries

    def recheck(self, consumer: QueueConsumer, entry: QueueEntry) -> None:
        assert consumer is self.consumer
        self.rechecks.add(entry)

    # -- the client

    def send(self, number: int = 0) -> bool:
        """The window lets messages through (0: all)."""
        some = self.given[:number] if number else list(self.given)
        for entry in some:
            self.given.remove(entry)
            message: Message | None = entry.message
            if entry in self.rechecks or entry.ends <= self.rig.now:  # nothing else is asked for
                message = self.rig.dispatcher.sending(self.consumer, entry, self.rig.now)
                self.rechecks.discard(entry)
            if message is None:
                self.room += 1
                self.rig.dispatcher.not_taken(self.consumer, entry, WITHDRAWN, self.rig.now)
            else:
                self.rig.dispatcher.sent(self.consumer, [entry], self.rig.now)
                self.inflight.append(entry)
                self.seen.append(int(message.payload))
        return bool(some)

    def ack(self, *numbers: int) -> None:
        self.rig.dispatcher.acknowledged(self.consumer, self._take(numbers), self.rig.now)
        self.rig.settle()

    def nack(self, *numbers: int) -> None:
        for entry in self._take(numbers):
            self.rig.dispatcher.not_taken(self.consumer, entry, "refused", self.rig.now)
        self.rig.settle()

    def _take(self, numbers: tuple[int, ...]) -> list[QueueEntry]:
        entries = [next(i for i in self.inflight if int(i.message.payload) == number) for number in numbers]
        for entry in entries:
            self.inflight.remove(entry)
        self.room += len(entries)
        return entries

    @property
    def numbers(self) -> list[int]:
        """What it holds."""
        return [int(entry.message.payload) for entry in self.inflight]

    def leave(self, reason: str = DISCONNECTED) -> None:
        self.given.clear()
        self.inflight.clear()
        self.rig.clients.remove(self)
        self.rig.dispatcher.leave(self.consumer, reason, self.rig.now)
        self.rig.settle()


class Rig:
    """The effects of one dispatcher."""

    def __init__(self, **options: Any) -> None:
        self.now = START
        self.entries: dict[tuple[int, int], Entry] = {}
        self.last: Counter[int] = Counter()
        self.reads: list[tuple[Level, int, int]] = []
        self.asked: list[tuple[Level, int, int]] = []  #: every read that there ever was
        self.removals: list[QueueEntry] = []
        self.marks: dict[QueueEntry, None] = {}  #: to be written
        self.dead: list[tuple[int, int, str]] = []  #: message, attempts, reason
        self.dead_entries: list[QueueEntry] = []
        self.timer_at: float | None = None
        self.clients: list[Client] = []
        self.counters: Counter[str] = Counter()
        self.confirm = True  #: removals are answered when `settle` is called
        self.dispatcher = QueueDispatcher("q", QueueOptions(**options), self, self.counters)

    # -- Effects

    def fetch(self, level: Level, after: int, limit: int) -> None:
        assert not [read for read in self.reads if read[0] is level], "one read at a time"
        self.reads.append((level, after, limit))
        self.asked.append((level, after, limit))

    def remove(self, entries: Sequence[QueueEntry]) -> None:
        self.removals += entries

    def removed(self, level: Level, positions: Sequence[int], size: int) -> None:
        self.dispatcher.removed(level, positions)

    def mark(self, entries: Sequence[QueueEntry]) -> None:
        self.marks.update(dict.fromkeys(entries))

    def write_marks(self) -> None:
        for entry in self.marks:
            stored = self.entries.get((entry.level.number, entry.position))
            if stored is not None and entry.state is not EntryState.DONE:
                stored.mark = entry.attempts
        self.marks.clear()

    def dead_letter(self, entry: QueueEntry, reason: str) -> None:
        self.dead.append((int(entry.message.payload), entry.attempts, reason))
        self.dead_entries.append(entry)
        self.removals.append(entry)

    def claim(self, limit: int) -> None:
        raise AssertionError("it is alone")

    def release(self, entries: Sequence[QueueEntry]) -> None:
        raise AssertionError("it is alone")

    def offer(self, member: str) -> None:
        raise AssertionError("it is alone")

    def tell_hungry(self, count: int) -> None:
        raise AssertionError("it is alone")

    def set_timer(self, delay: float | None) -> None:
        self.timer_at = None if delay is None else self.now + delay

    # -- what happens

    def join(self, name: str, room: int = 100, *, blocked: bool = False) -> Client:
        client = Client(self, name, room, blocked)
        self.clients.append(client)
        self.dispatcher.join(client.consumer, self.now)
        return client

    def append(self, number: int = 1, level: int = 0, expires_at: float | None = None, *, told: bool = True) -> None:
        """`told`: the answer to the append comes; without it the dispatcher hears nothing."""
        at = self.dispatcher.levels[level]
        for _ in range(number):
            self.last[level] += 1
            entry = Entry(level, self.last[level], self.now, expires_at=expires_at)
            self.entries[level, entry.position] = entry
            if told and self.dispatcher.takes(at, entry.position):
                at.add([self.entry(entry)])
        self.dispatcher.dispatch(self.now)

    def entry(self, entry: Entry) -> QueueEntry:
        """Messages tell their level and position: 1, 2, … and 1001, 1002, … of level 1."""
        payload = b"%d" % (1000 * entry.level + entry.position)
        message = Message("t", payload, 1, expires_at=entry.expires_at)
        level = self.dispatcher.levels[entry.level]
        record = QueueRecord("t", b"")
        return QueueEntry(level, entry.position, message, record, len(payload), entry.stored_at, entry.mark)

    def read(self) -> None:
        """Answer the oldest read."""
        level, after, limit = self.reads.pop(0)
        found = [e for e in self.entries.values() if e.level == level.number and e.position > after]
        part = sorted(found, key=position_of)[:limit]
        last = part[-1].position if part else 0
        entries = [self.entry(entry) for entry in part]
        self.dispatcher.fetched(level, entries, last, self.now, more=len(part) == limit)

    def remove_now(self) -> None:
        """The store does what it was asked to."""
        entries, self.removals = self.removals, []
        for entry in entries:
            self.entries.pop((entry.level.number, entry.position), None)
            self.removed(entry.level, [entry.position], entry.size)

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
                self.remove_now()

    def wait(self, seconds: float) -> None:
        """Let time pass, and everything happen that is to happen meanwhile."""
        end = self.now + seconds
        while self.timer_at is not None and self.timer_at <= end:
            self.now, self.timer_at = max(self.now, self.timer_at), None
            self.dispatcher.tick(self.now)
            self.settle()
        self.now = end


def position_of(entry: Entry) -> int:
    return entry.position
