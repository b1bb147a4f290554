"""Compacted queues in memory: as much of each as appending and consuming need.

    publish ─▶ store.write ─▶ stored: publisher answered, consumers told ─▶ read by consumers
                           │          └ those at other members too (`members`)
                           └▶ too much: refused

A `CompactedQueue` is made for its first publisher or consumer, and dropped when it was idle from one collection to the
next, or when there are many; the store has everything that matters.

Rule 1: `tail` is the highest number that is known to be stored, by whichever member. Consumers get nothing beyond it,
        though it may be in the store already. While a queue has no consumers here, `tail` may be behind.
Rule 2: what is appended to a queue that may be new waits until its record is written (`_register`). So it does while a
        queue is deleted (`hold`): it is in the queue that begins after that one.
Rule 3: what waits for the store is bounded, over all queues together (`max_pending`, `max_pending_bytes`): the plugin
        looks before it appends. The bounds of a queue are the store's to keep (`Bound`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.record import RecordError
from motorcade.delivery.group import Group, GroupWriter
from motorcade.delivery.progress import Progress
from motorcade.delivery.reader import FoundAgain, Page, Reader
from motorcade.extension.plugin import Spawn
from motorcade.extension.sources import FastFeed
from motorcade.plugins.logs.compacted import record
from motorcade.plugins.logs.compacted.options import EcqConfig
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, QUEUES, SHARED, CompactedQueueRecord, Shape, encode
from motorcade.storage.ports import (
    Appended,
    Batch,
    Bound,
    Draft,
    Entry,
    Store,
    StoreConflictError,
    StoreError,
    StoreFullError,
)

if TYPE_CHECKING:
    from motorcade.plugins.logs.compacted.members import CompactedMembers

MAX_OPEN: Final = 65_536  #: queues in memory without a consumer; when there are more, those that are idle go
PAGE: Final = 128  #: messages read at once, at most: the embedded engine reads as many without another thread
RETRY: Final = 1.0  #: seconds until the end of a queue is looked for again


class QueueFullError(StoreFullError):
    """A bound of compacted queues refuses a message."""


class Appending(Commit[None]):
    """A message on its way into a queue. It fails with `QueueFullError` if there is no room for it."""

    __slots__ = ("draft", "queue", "size", "time")

    def __init__(self, queue: CompactedQueue, draft: Draft, size: int) -> None:
        super().__init__()
        self.queue = queue
        self.draft = draft
        self.size = size
        self.time = 0.0  #: at which it is written


class Consumer(Protocol):
    """A source, as its queue knows it."""

    feed: FastFeed
    progress: Progress

    def look(self) -> None:
        """Look again, as the end of the queue is known."""

    def replaced(self, numbers: Iterable[int]) -> None:
        """Note that these are not in the queue any more."""

    def restart(self) -> None:
        """Begin again at the progress, which was set."""


class CompactedQueue:
    """One queue, as a log for its readers."""

    __slots__ = (
        "_fresh",
        "_fresh_after",
        "_gap",
        "_gone",
        "_lock",
        "_standing",
        "coming",
        "consumers",
        "known",
        "log_key",
        "name",
        "owner",
        "queues",
        "registered",
        "rested",
        "shape",
        "tail",
        "waiting",
    )

    def __init__(self, queues: Queues, shape: Shape, name: str) -> None:
        self.queues = queues
        self.shape = shape
        self.name = name
        self.owner = shape.owner_of(name)
        self.log_key = shape.log_key(name)
        self.tail = 0
        self.known = False  #: whether `tail` is (rule 1)
        self.registered = False  #: it is certain that the store has its record, and nothing waits for that
        self.rested = -1  #: where it ended when the last collection found it idle
        self.consumers: dict[Consumer, None] = {}
        self.coming = 0  #: messages on their way into the store
        self.waiting: list[Appending] = []  #: of these, those that wait for its record (rule 2)
        self._lock: asyncio.Lock | None = None
        self._standing: dict[Reader, None] = {}  # readers at the tail
        self._fresh: dict[int, Appending] = {}  # stored, and consumers are not told yet
        self._fresh_after = 0
        self._gone: list[int] = []  # replaced or dropped by these
        self._gap = False

    @property
    def lock(self) -> asyncio.Lock:
        """Held while its record is read, written or deleted."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    @property
    def idle(self) -> bool:
        """Return True if nothing is lost with it."""
        return not (self.consumers or self.coming or (self._lock is not None and self._lock.locked()))

    # -- consumed

    def enter(self, consumer: Consumer) -> None:
        """Add a consumer."""
        members = self.queues.members
        if members is not None and not self.consumers:
            members.enter(self)
        self.consumers[consumer] = None

    def leave_out(self, consumer: Consumer) -> None:
        """Remove a consumer, if it is one."""
        members = self.queues.members
        if self.consumers.pop(consumer, self) is None and members is not None and not self.consumers:
            members.leave(self)

    # -- stored

    def reached(self, number: int) -> None:
        """Note that a number is stored; `looked` tells of the end."""
        self.tail = max(self.tail, number)
        self.known = True

    def hinted(self, number: int, gone: Iterable[int]) -> None:
        """Note what another member has stored."""
        if not self.consumers:
            return
        if gone:
            for consumer in self.consumers:
                consumer.replaced(gone)
        if number > self.tail or not self.known:
            self.reached(number)
            self.ready()
            self.wake()  # before `tell`: its page has only what has landed here

    def landed(self, appending: Appending, answer: Appended) -> bool:
        """Note what the store has done. Return True if consumers must be told."""
        number = answer.position
        if not self.consumers:
            if number > self.tail:
                self.tail, self.known = number, True
            return False
        for gone in (answer.replaced, *answer.dropped):
            if gone and self._fresh.pop(gone, None) is None:
                self._gone.append(gone)
        if number and not answer.repeated:
            # A number between them is of a write of unknown outcome: it must be read.
            self._gap = self._gap or not self.known or number != self.tail + 1
            if not self._fresh:
                self._fresh_after = number - 1
            self._fresh[number] = appending
            self.reached(number)
        return True

    def tell(self, *, oldest: float) -> None:
        """Hand to consumers what has landed, unless it was stored before `oldest`."""
        fresh, self._fresh = self._fresh, {}
        gone, self._gone = self._gone, []
        gap, self._gap = self._gap, False
        if gone:
            for consumer in self.consumers:
                consumer.replaced(gone)
        if gap:  # perhaps the first that is known of it: some may wait for that
            self.ready()
        page: Page | None = None
        if fresh and not gap and all(appending.time > oldest for appending in fresh.values()):
            rows = [
                (number, each.draft.key, each.draft.body, each.draft.payload, each.time)
                for number, each in fresh.items()
            ]
            page = Page(self._fresh_after, self.tail, *self._messages(rows))
        self.wake(page)

    def ready(self) -> None:
        """Let consumers begin that wait for the end to be known."""
        for consumer in list(self.consumers):
            consumer.look()

    def wake(self, page: Page | None = None) -> None:
        """Tell readers at the tail that there may be something."""
        standing, self._standing = self._standing, {}
        for reader in standing:
            reader.more(page)

    def _messages(self, rows: Iterable[tuple[int, bytes, bytes, bytes, float]]) -> tuple[list[int], list[Message]]:
        """Return numbers and messages; what cannot be read is left out."""
        numbers: list[int] = []
        messages: list[Message] = []
        name, root = self.shape.number, f"{self.shape.root}/{self.name}/"
        for number, key, body, payload, stored_at in rows:
            try:
                messages.append(record.delivery(body, payload, root + key.decode(), (name, str(number)), stored_at))
            except (RecordError, UnicodeDecodeError) as error:
                self.queues.unreadable(self, number, error)
                continue
            numbers.append(number)
        return numbers, messages

    # -- read

    def find(self, position: int) -> Page | None:  # noqa: ARG002 - see Log
        """Return None: a queue keeps no pages."""
        return None

    def passed(self, page: Page) -> None:
        """Do nothing: a queue keeps no pages."""

    def wait(self, reader: Reader) -> None:
        self._standing[reader] = None

    def leave(self, reader: Reader) -> None:
        self._standing.pop(reader, None)

    def load(self, position: int, reader: Reader, wanted: int) -> None:
        work = partial(self._load, position, reader, reader.cursor.start, min(wanted, PAGE))
        self.queues.spawn(work, "fetch")

    async def _load(self, position: int, reader: Reader, start: int, limit: int) -> None:
        upto = self.tail  # all of it is in the store when the read begins
        try:
            entries = await self.queues.store.mailboxes.read(self.owner, position, limit, self.queues.now())
        except StoreError:
            self.queues.counters["consumer_waits_for_store"] += 1
            reader.broken(start)
            return
        whole = len(entries) < limit
        while entries and entries[-1].position > self.tail:
            entries.pop()  # not known to be stored (rule 1)
            whole, upto = True, self.tail  # but nothing is left before it
        last = entries[-1].position if entries else position
        reader.more(Page(position, max(last, upto) if whole else last, *self._deliverable(entries), start))

    async def look_up(self, numbers: list[int], reader: Reader) -> None:
        """Read what is left of messages that a reader has refused."""
        start = reader.cursor.start
        entries: list[Entry] = []
        try:
            for number in numbers:
                found = await self.queues.store.mailboxes.read(self.owner, number - 1, 1, self.queues.now())
                entries += [entry for entry in found if entry.position == number]
        except StoreError:
            self.queues.counters["consumer_waits_for_store"] += 1
            reader.found(FoundAgain(start, numbers, None))
            return
        there = dict(zip(*self._deliverable(entries), strict=True))
        self.queues.counters["given_again"] += len(there)
        reader.found(FoundAgain(start, numbers, there))

    def _deliverable(self, entries: Iterable[Entry]) -> tuple[list[int], list[Message]]:
        """Return numbers and messages of entries, without those that are too old."""
        oldest = self.queues.oldest()
        rows = []
        for entry in entries:
            if entry.stored_at <= oldest:
                self.queues.counters["too_old"] += 1
            else:
                rows.append((entry.position, entry.key, entry.body, entry.payload, entry.stored_at))
        return self._messages(rows)

    def topic_of(self, entry: Entry) -> str:
        """Return where consumers get an entry."""
        return f"{self.shape.root}/{self.name}/{entry.key.decode(errors='replace')}"


class Queues:
    """All queues in memory, and what is appended to them."""

    def __init__(
        self,
        store: Store,
        config: EcqConfig,
        now: Callable[[], float],
        spawn: Spawn,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.store = store
        self.now = now
        self.spawn = spawn
        self.counters = counters
        self.exclusive: dict[str, CompactedQueue] = {}  #: by name
        self.shared: dict[str, CompactedQueue] = {}
        self.count = 0  #: queues that there are, as far as counted
        self.uncounted: set[str] | None = set()  #: mailboxes of those that came before the others were counted
        self.pending = 0  #: messages that the store has not confirmed
        self.pending_bytes = 0
        self.members: CompactedMembers | None = None  #: the others of a cluster; None: this node is alone
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._touched: dict[CompactedQueue, None] = {}  # consumers must be told
        self._groups = GroupWriter(store, now, self._fill, self._written)
        self._failing = False
        self.configure(config)

    def configure(self, config: EcqConfig) -> None:
        """Let options hold from now on."""
        self.config = config
        self._bound = Bound(config.max_messages, config.max_bytes, config.overflow == "refuse")

    def oldest(self) -> float:
        """Return the time up to which messages are too old to be delivered."""
        return self.now() - self.config.retention if self.config.retention else 0.0

    def unreadable(self, queue: CompactedQueue, number: int, error: Exception) -> None:
        """Note that an entry cannot be read; consumers go on behind it."""
        self.counters["unreadable"] += 1
        self._log.error("ecq_entry_unreadable", queue=queue.owner, number=number, error=str(error))

    # -- in memory

    def __iter__(self) -> Iterator[CompactedQueue]:
        yield from self.exclusive.values()
        yield from self.shared.values()

    def __len__(self) -> int:
        return len(self.exclusive) + len(self.shared)

    def of(self, shape: Shape) -> dict[str, CompactedQueue]:
        """Return those of one form."""
        return self.exclusive if shape is EXCLUSIVE else self.shared

    def open(self, shape: Shape, name: str) -> CompactedQueue:
        """Return a queue, whether or not there is anything in it."""
        queues = self.exclusive if shape is EXCLUSIVE else self.shared
        queue = queues.get(name)
        if queue is None:
            if len(queues) >= MAX_OPEN:
                for idle in [name for name, queue in queues.items() if queue.idle]:
                    del queues[idle]
            queue = queues[name] = CompactedQueue(self, shape, name)
        return queue

    def peek(self, shape: Shape, name: str) -> CompactedQueue | None:
        """Return a queue that is in memory."""
        return self.of(shape).get(name)

    def drop(self, queue: CompactedQueue) -> None:
        """Close a queue if it is idle; its next user finds all of it in the store."""
        queues = self.of(queue.shape)
        if queue.idle and queues.get(queue.name) is queue:
            del queues[queue.name]

    def find(self, owner: str) -> CompactedQueue | None:
        """Return a queue that is in memory, by its mailbox."""
        shape = EXCLUSIVE if owner.startswith(EXCLUSIVE.owners) else SHARED
        return self.of(shape).get(owner.removeprefix(shape.owners))

    def consumed(self) -> list[CompactedQueue]:
        """Return those that have consumers now."""
        return [queue for queue in self if queue.consumers]

    def look(self, queue: CompactedQueue) -> None:
        """Find out where a queue ends; its consumers hear of it."""
        self.spawn(partial(self._look, queue), "look")

    async def _look(self, queue: CompactedQueue) -> None:
        while True:
            try:
                info = await self.store.mailboxes.info(queue.owner)
                break
            except StoreError as error:
                self._complain(error)
                self.counters["look_failed"] += 1
                if not queue.consumers:
                    return
                await asyncio.sleep(RETRY)
        if not queue.coming:  # else its end is not known to be stored
            queue.reached(info.last)
        if queue.known:
            queue.ready()
            queue.wake()
        elif queue.consumers:  # what is stored next tells, unless it is refused
            self._loop.call_later(RETRY, self.look, queue)

    # -- append

    def append(self, queue: CompactedQueue, draft: Draft, size: int) -> Appending:
        """Append; done when it is stored."""
        appending = Appending(queue, draft, size)
        self.pending += 1
        self.pending_bytes += size
        queue.coming += 1
        if queue.registered:
            self._groups.add((appending,), size)
        else:
            queue.waiting.append(appending)
            if len(queue.waiting) == 1:
                self.spawn(partial(self._register, queue), "register")
        return appending

    def _fill(self, batch: Batch, group: Group[Appending]) -> None:
        self._append_all(batch, group.items, group.time)

    def _append_all(self, batch: Batch, some: Iterable[Appending], now: float) -> None:
        bound = self._bound
        for each in some:
            each.time = now
            batch.append((each.queue.owner,), each.draft, now, bound)

    def _written(self, group: Group[Appending]) -> None:
        if group.error is not None:
            for each in group.items:
                self.landed(each, group.error)
        else:
            for each, answer in zip(group.items, group.result.appended, strict=True):
                self.landed(each, answer)

    async def _register(self, queue: CompactedQueue) -> None:
        """Append what waits for the record of a queue, with the record if it is new."""
        async with queue.lock:
            while queue.waiting:
                some = queue.waiting[:]
                answers: list[Appended] | StoreError = StoreError("the plugin ecq was unloaded meanwhile")
                try:
                    answers = await self._append_first(queue, some)
                finally:
                    del queue.waiting[: len(some)]
                    queue.registered = not isinstance(answers, StoreError) and not queue.waiting
                    for number, each in enumerate(some):
                        self.landed(each, answers if isinstance(answers, StoreError) else answers[number])

    async def _append_first(self, queue: CompactedQueue, some: list[Appending]) -> list[Appended] | StoreError:
        batch = Batch()
        try:
            new = await self.store.records.get(QUEUES, queue.owner, self.now()) is None
            if new and self.count >= self.config.max_queues:
                self.counters["refused_queues"] += len(some)
                return QueueFullError(f"there are {self.config.max_queues} compacted queues already (max_queues)")
            if new:  # first: where batches are not atomic it must not be missing
                batch.put(QUEUES, queue.owner, encode(CompactedQueueRecord(self.now())))
            self._append_all(batch, some, self.now())
            answers = (await self.store.write(batch)).appended
        except StoreError as error:
            return error
        if new:
            self._count(queue)
        return answers

    def _count(self, queue: CompactedQueue) -> None:
        self.count += 1
        if self.uncounted is not None:
            self.uncounted.add(queue.owner)
        if self.members:
            self.members.made()

    async def forget(self, queue: CompactedQueue, batch: Batch) -> None:
        """Write a batch that deletes the record of a queue, which is held; what others append meanwhile has another."""
        if self.members is None:
            await self.store.write(batch)
            self.count -= 1
            return
        self.members.note(batch, queue.owner)
        await self.store.write(batch)
        self.count -= 1
        await self.keep(queue)

    async def keep(self, queue: CompactedQueue) -> None:
        """Write the record of a queue that was deleted, if something is in it or on its way; its lock is held."""
        on_its_way = queue.coming > len(queue.waiting)
        if not on_its_way and not (await self.store.mailboxes.info(queue.owner)).entries:
            return
        batch = Batch()
        now = self.now()
        batch.put(QUEUES, queue.owner, encode(CompactedQueueRecord(now)), expect=None, now=now)
        try:
            await self.store.write(batch)
        except StoreConflictError:
            return  # it is there
        self._count(queue)

    def landed(self, appending: Appending, answer: Appended | BaseException) -> None:
        """Note what has become of a message, and answer its publisher."""
        queue = appending.queue
        self.pending -= 1
        self.pending_bytes -= appending.size
        queue.coming -= 1
        if not isinstance(answer, Appended):
            self._failed(queue, answer)
            appending.finish(answer)
            return
        counters = self.counters
        if answer.refused:
            counters["refused_full"] += 1
            appending.finish(QueueFullError(self._full(queue)))
            return
        self._failing = False
        counters["appended"] += 1
        if answer.replaced:
            counters["replaced"] += 1
        if answer.dropped or not answer.position:
            counters["dropped"] += len(answer.dropped) + (not answer.position)
        if self.members:
            self.members.stored(queue, answer)
        if queue.landed(appending, answer):
            if not self._touched:  # what is stored in one turn of the event loop is told at once
                self._loop.call_soon(self._tell)
            self._touched[queue] = None
        appending.finish()

    def _tell(self) -> None:
        touched, self._touched = self._touched, {}
        oldest = self.oldest()
        for queue in touched:
            try:
                queue.tell(oldest=oldest)
            except Exception:  # noqa: BLE001 - a defect in one queue must not stop all others
                self._log.exception("ecq_queue_failed", queue=queue.owner)

    def _failed(self, queue: CompactedQueue, error: BaseException) -> None:
        if isinstance(error, QueueFullError):
            return
        self.counters["append_failed"] += 1
        self._complain(error)
        certain = isinstance(error, StoreError) and error.certain
        if queue.consumers and not queue.coming and not (certain and queue.known):
            self.look(queue)  # it may be there all the same

    def _complain(self, error: BaseException) -> None:
        if not self._failing:  # once until it succeeds again
            self._failing = True
            self._log.warning("ecq_store_failed", error=str(error))

    def _full(self, queue: CompactedQueue) -> str:
        config = self.config
        return (
            f"the queue {queue.name[:64]!r} is full ({config.max_messages} messages or {config.max_bytes} bytes); "
            "keys that it has can be written, others when some are too old, or with larger max_messages and max_bytes"
        )

    async def hold(self, queue: CompactedQueue, work: Callable[[], Awaitable[None]]) -> None:
        """Do something while nothing is appended to a queue, and forget that it is there (rule 2)."""
        async with queue.lock:
            queue.registered = False
            self._groups.flush()
            await work()
