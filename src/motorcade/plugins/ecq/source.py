"""The messages of one consumer, on their way to its window.

    loading ──▶ reading ◀──▶ at the end (costs nothing; what is appended is handed over without reading it)
                 │    ▲
                 ▼    │
               refused: waits, then what was refused is looked up and given again, before anything newer

One instance per filter, that is, per queue and client. Its place in the queue is `_cursor`, the number up to which
everything was given; `place` knows what of it was acknowledged. It keeps no messages.

Rule 1: numbers are given in rising order. The one exception, what the client has refused, is read again from the store,
        and nothing newer is given between the refusal and that. So a value that was replaced meanwhile is not found any
        more, and no client gets an old value after a newer one.
Rule 2: tags of messages are `start << 48 | number`. `start` says which beginning of which instance it was: what was
        sent before a rewind is acknowledged in vain, and what was not sent yet is withdrawn.
Rule 3: whoever is not at the end has something coming that makes it go on: a fetch, a timer, room, or a look.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

import msgspec
import structlog

from motorcade.core.message import Message
from motorcade.core.record import RecordError
from motorcade.core.subscription import Subscription
from motorcade.extension.compacted import Form
from motorcade.extension.plugin import Spawn
from motorcade.extension.sources import Ack, Answer, Delayed, Feed, Given, Source, Why
from motorcade.plugins.ecq import record
from motorcade.plugins.ecq.appender import Appender
from motorcade.plugins.ecq.options import EcqConfig
from motorcade.plugins.ecq.place import Place
from motorcade.plugins.ecq.progress import Ledger, Progress
from motorcade.plugins.ecq.queue import Fresh, Item, Queue, Queues
from motorcade.plugins.ecq.topics import consumed
from motorcade.storage.ports import Entry, Store, StoreError

SHIFT: Final = 48
NUMBERS: Final = (1 << SHIFT) - 1
PAGE: Final = 128  #: messages read at once, at most: the embedded engine reads as many without another thread
RETRY: Final = 1.0  #: seconds until what could not be read is tried again

_starts: Final = count(1)  #: unique in the process; nothing is ever compared with those of another one


@dataclass(frozen=True, slots=True)
class Tools:
    """What all sources of a node have in common."""

    store: Store
    queues: Queues
    appender: Appender
    ledger: Ledger
    now: Callable[[], float]
    spawn: Spawn
    counters: Counter[str]
    log: structlog.stdlib.BoundLogger

    @property
    def config(self) -> EcqConfig:
        return self.queues.config


class _Signal:
    __slots__ = ()


LOOK: Final = _Signal()  #: `info`: there may be something
BEGIN: Final = _Signal()  #: `info`: begin where progress is
RESTART: Final = _Signal()  #: `info`: begin again there
AGAIN: Final = _Signal()  #: `info`: give again what was refused


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """Messages that were read."""

    start: int
    limit: int
    tail: int  #: the end of the queue when reading began
    entries: list[Entry] | None  #: None: reading has failed


class Found(msgspec.Struct, frozen=True, gc=False):
    """What is left of messages that were refused."""

    start: int
    numbers: list[int]
    entries: list[Entry] | None  #: None: reading has failed


class CompactedSource(Source):
    """One consumer of one queue."""

    progress: Progress
    queue: Queue

    def __init__(self, feed: Feed, tools: Tools) -> None:
        super().__init__(feed)
        self._tools = tools
        self._filter = ""
        self._place = Place(0)
        self._cursor = 0
        self._start = 0
        self._epoch = 0
        self._beginning = False  # `BEGIN` was sent
        self._begun = False
        self._standing = False  # at the end, and waits for what is appended
        self._fetching = False
        self._expected = False  # `LOOK` will come
        self._peak = 1  # the most that could be given at once
        self._refused: dict[int, None] = {}  # numbers to be given again
        self._attempts: dict[int, int] = {}  # number: times it was refused
        self._due = False  # what was refused may be given again now
        self._timer: Delayed | None = None
        self._stale = False  # messages of an earlier start may wait to be sent
        self._replaced: set[int] = set()  # of what was given and is not done
        self._oldest = 0.0  # time of the oldest message given and not known to be done
        self._open = False  # its progress is

    # -- begin and end

    def subscribe(self, subscription: Subscription, why: Why) -> bool:  # noqa: ARG002 - each time the same
        found = consumed(subscription.filter)
        client = self.feed.client.client_id
        if found is None or (found[0].form is Form.EXCLUSIVE and found[1] != client):
            return False
        tools = self._tools
        queue = self.queue = tools.queues.open(*found)
        self._filter = subscription.filter
        self.progress = tools.ledger.open(queue, client)
        self._open = True
        queue.consumers[self] = None
        if not self._begin_soon():
            tools.spawn(self._load, "load")
        return True

    async def _load(self) -> None:
        """Find out how far it is, and where the queue ends."""
        tools = self._tools
        while self._open and not self.progress.loaded:
            try:
                await tools.ledger.load(self.progress)
            except StoreError:
                tools.counters["consumer_waits_for_store"] += 1
                await asyncio.sleep(RETRY)
        if not self._open:
            return
        if not self._begin_soon():
            tools.appender.look(self.queue)  # it calls `look`

    def _begin_soon(self) -> bool:
        """Begin, if all is known that one must know for it."""
        ready = self.progress.loaded and self.queue.known
        if ready and not self._beginning:
            self._beginning = True
            self.feed.send(BEGIN)
        return ready

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - there is one
        self._leave()
        if why is not Why.UNSUBSCRIBED:
            # What was in flight is taken back. What of it was replaced is not in the queue any more, so it must not
            # hold up progress: it would only bring again what the client has acknowledged.
            self._done(self._replaced)

    def _leave(self) -> None:
        self.queue.consumers.pop(self, None)
        self._begun = self._standing = False

    def terminate(self) -> None:
        if self._open:
            self._open = False
            self._leave()
            self._tools.ledger.close(self.progress)

    def _begin(self) -> None:
        """Begin where progress is."""
        progress, queue = self.progress, self.queue
        done = progress.number
        if done > queue.tail:  # the store has lost what it had promised to keep: nothing new must be missed
            self._tools.log.warning("ecq_progress_ahead", queue=queue.owner, progress=done, last=queue.tail)
            done = queue.tail
        self._begun = True
        self._epoch = progress.epoch
        self._start = next(_starts)
        self._place = Place(done)
        self._cursor = done
        self._refused.clear()
        self._replaced.clear()
        self._attempts.clear()
        self._due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stale = True  # perhaps; `asks` looks

    @property
    def in_flight(self) -> int:
        return len(self.feed.inflight)

    # -- what its queue says

    def offer(self, fresh: Fresh) -> None:
        if fresh.gone and not self._place.clear:
            done, cursor = self._place.done, self._cursor
            self._replaced.update([number for number in fresh.gone if done < number <= cursor])
        if self._standing:
            self._standing = False
            self.feed.send(fresh)

    def look(self) -> None:
        if not self._begun:
            self._begin_soon()
        elif self._standing:
            self._standing = False
            self._look_soon()

    def restart(self) -> None:
        if self._begun:
            self.feed.send(RESTART)

    def _look_soon(self) -> None:
        if not self._expected:
            self._expected = True
            self.feed.send(LOOK)

    # -- what it is told

    def info(self, what: object, desired: int) -> Answer:
        given: list[Given] = []
        if what is BEGIN or what is RESTART:
            if self in self.queue.consumers and (what is RESTART or not self._begun):
                self._begin()
        elif what is LOOK:
            self._expected = False
        elif what is AGAIN:
            self._timer = None
            self._due = True
        elif isinstance(what, Fresh):
            given = self._take_fresh(what, desired)
        elif isinstance(what, Fetched):
            self._fetching = False
            given = self._take_fetched(what)
        elif isinstance(what, Found):
            self._fetching = False
            given = self._take_found(what)
        self._peak = max(self._peak, desired)
        self._fill(desired - len(given))
        return given or None

    def _fill(self, room: int) -> None:
        """Ask for what comes next, if there is room for it."""
        if not self._begun or self._fetching or self._expected:
            return
        if self._refused:
            self._standing = False
            if self._due and room > 0:
                self._fetching = True
                self._tools.spawn(partial(self._find, self._start, sorted(self._refused)[:room]), "again")
        elif self._cursor >= self.queue.tail:
            self._standing = True
            self._catch_up()
        else:
            self._standing = False
            if room > 0:
                self._fetching = True
                self._tools.spawn(partial(self._fetch, self._start, min(room, PAGE)), "fetch")

    def _catch_up(self) -> None:
        """At the end: what was never given (replaced, too old) is done with when all else is."""
        if self._place.catch_up(self._cursor):
            self._tools.ledger.advance(self.progress, self._epoch, self._place.done)

    # -- reading

    async def _fetch(self, start: int, limit: int) -> None:
        tools, queue = self._tools, self.queue
        tail = queue.tail
        entries: list[Entry] | None = None
        try:
            entries = await tools.store.mailboxes.read(queue.owner, self._cursor, limit, tools.now())
        except StoreError:
            tools.counters["consumer_waits_for_store"] += 1
            await asyncio.sleep(RETRY)
        self.feed.send(Fetched(start, limit, tail, entries))

    async def _find(self, start: int, numbers: list[int]) -> None:
        """Look what is left of messages that were refused."""
        tools = self._tools
        found: list[Entry] = []
        failed = False
        try:
            for number in numbers:
                entries = await tools.store.mailboxes.read(self.queue.owner, number - 1, 1, tools.now())
                found += [entry for entry in entries if entry.position == number]
        except StoreError:
            tools.counters["consumer_waits_for_store"] += 1
            failed = True
            await asyncio.sleep(RETRY)
        self.feed.send(Found(start, numbers, None if failed else found))

    def _take_fetched(self, fetched: Fetched) -> list[Given]:
        entries = fetched.entries
        if fetched.start != self._start or entries is None or not self._begun:
            return []
        complete = len(entries) < fetched.limit  # there was nothing more up to the end of then
        upto, tail = fetched.tail, self.queue.tail
        while entries and entries[-1].position > tail:
            entries.pop()  # not heard of yet (rule 1 of `queue`)
            complete, upto = True, tail  # but nothing is left before it
        if entries:
            self._cursor = entries[-1].position
        if complete:
            self._cursor = max(self._cursor, upto)
        return self._give(self._items(entries))

    def _items(self, entries: Iterable[Entry]) -> list[Item]:
        """Messages of entries, as far as they are to be delivered."""
        tools, queue = self._tools, self.queue
        retention, now = tools.config.retention, tools.now()
        oldest = now - retention if retention else 0.0
        doomed, name = queue.doomed, queue.shape.number
        root = f"{queue.shape.root}/{queue.name}/"
        items: list[Item] = []
        for entry in entries:
            number = entry.position
            if entry.stored_at <= oldest:
                tools.counters["too_old"] += 1
                continue
            if number in doomed:
                continue
            try:
                stored = record.decode(entry.body)
                topic = root + entry.key.decode()
            except (RecordError, UnicodeDecodeError) as error:
                tools.counters["unreadable"] += 1
                tools.log.error("ecq_entry_unreadable", queue=queue.owner, number=number, error=str(error))  # noqa: TRY400 - it says enough
                continue
            items.append(
                Item(number, record.delivery(stored, entry.payload, topic, (name, str(number)), entry.stored_at))
            )
        return items

    def _take_fresh(self, fresh: Fresh, room: int) -> list[Given]:
        """Messages that were appended a moment ago, without reading them again."""
        if not self._begun or self._fetching or self._refused or not fresh.after <= self._cursor < fresh.upto:
            return []
        items = fresh.items
        if self._cursor > fresh.after:
            items = [item for item in items if item.number > self._cursor]
        if len(items) > room:
            items = items[:room]
            if items:
                self._cursor = items[-1].number
        else:
            self._cursor = fresh.upto
        return self._give(items)

    def _give(self, items: Sequence[Item]) -> list[Given]:
        if not items:
            return []
        place = self._place
        if place.clear:
            self._replaced.clear()
            self._oldest = items[0].message.timestamp
        place.give([item.number for item in items])
        return self._given(items)

    def _given(self, items: Iterable[Item]) -> list[Given]:
        filter_, tag = self._filter, self._start << SHIFT
        return [Given(item.message, filter_, tag | item.number) for item in items]

    # -- what is sent

    @property
    def asks(self) -> bool:
        if self._stale:
            start = self._start
            self._stale = any(given.tag >> SHIFT != start for given in self.feed.unsent)
        retention = self._tools.config.retention
        return self._stale or (retention > 0 and self._oldest + retention <= self._tools.now())

    def sending(self, given: Given) -> Message | None:
        if given.tag >> SHIFT != self._start:
            return None
        retention = self._tools.config.retention
        if retention and given.message.timestamp + retention <= self._tools.now():
            return None
        return given.message

    # -- what has become of it

    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        start = self._start
        numbers = [each.tag & NUMBERS for each in given if each.tag >> SHIFT == start]
        if ack.dropped:
            self._not_sent(numbers, ack.dropped)
        elif ack.refused:
            numbers = self._refuse(numbers, ack)
        else:
            self._tools.counters["acknowledged"] += len(numbers)
        if self._attempts:
            for number in numbers:
                self._attempts.pop(number, None)
        self._done(numbers)
        self._go_on(ack.desired)
        return None

    def _done(self, numbers: Iterable[int]) -> None:
        if self._place.acknowledge(numbers):
            self._tools.ledger.advance(self.progress, self._epoch, self._place.done)

    def _go_on(self, room: int) -> None:
        """After acknowledgements: they come in short runs, and reading a few messages for each would cost more."""
        if not self._begun or self._fetching or self._expected:
            return
        if self._refused or self._cursor >= self.queue.tail or room * 2 >= self._peak:
            self._fill(room)
        elif room:
            self._look_soon()

    def _not_sent(self, numbers: list[int], why: str) -> None:
        """They are passed over: they are too old by now, or this client cannot be sent them."""
        counters = self._tools.counters
        counters["too_old" if why == "withdrawn" else why] += len(numbers)
        if why not in ("withdrawn", "expired"):
            for number in numbers:
                self._tell_passed(number, why)

    def _refuse(self, numbers: list[int], ack: Ack) -> list[int]:
        """Give them again later; those that were refused too often are returned: they are passed over."""
        tools = self._tools
        tools.counters["refused"] += len(numbers)
        most = tools.config.max_attempts
        over: list[int] = []
        for number in numbers:
            attempts = self._attempts[number] = self._attempts.get(number, 0) + 1
            if most and attempts >= most:
                over.append(number)
                tools.counters["given_up"] += 1
                self._tell_passed(number, f"refused {attempts} times, at last with 0x{ack.reason:02x}")
            else:
                self._refused[number] = None
        self._wait()
        return over

    def _wait(self) -> None:
        if self._refused and self._timer is None and self._begun:
            self._timer = self.feed.send_later(self._tools.config.retry_delay, AGAIN)

    def _tell_passed(self, number: int, why: str) -> None:
        """It stays in the queue until a newer value replaces it, and a rewind brings it again."""
        self._tools.log.warning(
            "ecq_message_passed_over", queue=self.queue.owner, client=self.feed.client.client_id, number=number, why=why
        )

    def _take_found(self, found: Found) -> list[Given]:
        """What was refused is given again, as far as it is still there; what is not was replaced, or is too old."""
        if found.start != self._start or not self._begun:
            return []
        self._due = False
        given: list[Given] = []
        if found.entries is not None:
            items = self._items(found.entries)
            there = {item.number for item in items}
            for number in found.numbers:
                self._refused.pop(number, None)
            gone = [number for number in found.numbers if number not in there]
            for number in gone:
                self._attempts.pop(number, None)
            self._done(gone)
            if items:
                self._oldest = min(self._oldest, items[0].message.timestamp)
                self._tools.counters["given_again"] += len(items)
                given = self._given(items)
        self._wait()
        return given
