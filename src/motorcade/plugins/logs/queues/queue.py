"""One queue: its dispatcher, its size, and what they need of the store.

Unknown outcomes: an append may be stored although its commit has failed (the store is closed; Redis has stored a part
of a batch and refuses the rest). What was stored has its position by then, so reading on from the cursor finds it
(`not_appended`), and nothing that was appended later is taken before it (`QueueDispatcher.takes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from motorcade.core.message import Message
from motorcade.delivery.record import RecordError, message_of
from motorcade.extension.declared import FoundMessage
from motorcade.plugins.logs.queues.dispatcher import Level, QueueDispatcher, QueueEntry
from motorcade.plugins.logs.queues.options import PROPERTY, QueueOptions
from motorcade.plugins.logs.queues.record import (
    MAX_HISTORY,
    QUEUE,
    DeadLetter,
    QueueRecord,
    delivered,
    history_text,
    level_of,
)
from motorcade.plugins.logs.queues.store import RETRY, QueueAppend, QueueStore
from motorcade.plugins.logs.queues.tables import MAX_MARK
from motorcade.storage.ports import (
    MAX_CLAIMED,
    SPARE_ALL,
    Appended,
    Batch,
    Bound,
    Draft,
    Entry,
    StoreError,
    StoreFencedError,
    StoreFullError,
)

if TYPE_CHECKING:
    from motorcade.plugins.logs.queues.members import QueueMembers

RANK: Final = 48  #: bits of a position below the rank of its level, where operators read messages
STEP: Final = 64  #: messages read at once by a sweep, or when a queue with priorities is too large
DEAD_LETTER_RETRY: Final = 5.0  #: seconds until a dead-letter queue that is full is tried again
REFRESH_PAUSE: Final = 0.2  #: seconds between two looks at the size of a queue that seems full


class Queue:
    """A queue that is declared."""

    def __init__(
        self,
        name: str,
        options: QueueOptions,
        origin: str,
        store: QueueStore,
        find: Callable[[str], Queue | None],
        members: QueueMembers | None = None,
    ) -> None:
        """Take `find`, which returns the queue of a name, for dead letters."""
        self.name = name
        self.options = options
        self.origin = origin
        self.dead_lettered = 0  #: messages moved to the dead-letter queue, since the start of the node
        self.dispatcher = QueueDispatcher(name, options, self, store.counters)
        self.members = members
        self._lane = asyncio.Lock()  # claims and their ends, one after the other
        self._store = store
        self._mailboxes = store.store.mailboxes
        self._find = find
        self._entries = 0  # in the store, as far as known
        self._bytes = 0
        self._delta = 0  # being appended, less those being removed
        self._delta_bytes = 0
        self._refreshing = False
        self._refreshed_at = 0.0  # loop time
        self._trimming = False
        self._timer: asyncio.TimerHandle | None = None
        self._swept: dict[int, int] = {}  # level: position up to which the last sweep has looked

    @property
    def closed(self) -> bool:
        return self.dispatcher.closed

    # -- appending

    def prepare(
        self, message: Message, body: bytes, payload: bytes, token: bytes = b"", *, beside: bool = False
    ) -> QueueAppend:
        """Return the append of a message to this queue; `StoreFullError` if there is no room for it.

        `token`: of a dead letter; `beside`: other queues get the message too, or none of them.
        """
        options = self.options
        level = self.dispatcher.levels[level_of(message.user_properties, options.priorities)]
        key = self._key(message)
        draft = Draft(
            body,
            payload,
            key=key,
            expires_at=message.expires_at or 0.0,
            token=token or (message.guid if message.qos == 2 else b""),
        )
        size = len(body) + len(payload)
        if options.max_bytes and size > options.max_bytes:
            raise StoreFullError(f"the message is larger than queue {self.name!r} may be ({options.max_bytes} bytes)")
        append = QueueAppend(self, level, draft, size)
        if options.overflow == "drop_oldest":
            if options.priorities == 1:  # else the lowest level goes first, whatever the level of the message: `_trim`
                append.bound = Bound(options.max_messages, options.max_bytes)
        elif self.dispatcher.claims and not token and not (beside and self._is_full(size)):
            # Only the store knows how large it is: other members append and remove, too.
            others = tuple(other.mailbox for other in self.dispatcher.levels.values() if other is not level)
            append.bound = Bound(options.max_messages, options.max_bytes, refuse=True, beside=others)
        elif self._is_full(size):
            self._refresh_soon()
            if not key:
                raise self._full()
            if not token:  # it may replace an older value; a dead letter is moved, so it is not refused
                append.bound = Bound(options.max_messages, options.max_bytes, refuse=True)
        return append

    def _key(self, message: Message) -> bytes:
        options = self.options
        if options.kind != "last_value":
            return b""
        if options.key == "topic":
            return b"k" + message.topic.encode()
        if options.key == "publisher":
            return b"k" + message.publisher.encode()
        wanted = options.key.removeprefix(PROPERTY)
        for name, value in message.user_properties:
            if name == wanted:
                return b"k" + value.encode()
        return b""  # it has no key, so nothing replaces it

    def spared_up_to(self, level: Level) -> int:
        """Return the position up to which the bound of an append pushes out nothing: consumers have it.

        Looked for only in a full queue: very many messages may be in flight. What is claimed the store knows.
        """
        if self.dispatcher.claims:
            return 0
        return self.dispatcher.sent_up_to(level) if self._is_full() else SPARE_ALL

    def _is_full(self, size: int = 0) -> bool:
        """Return True if a message of this size does not fit; without a size: if there is too much already."""
        options = self.options
        entries = self._entries + self._delta + (1 if size else 0)
        return 0 < options.max_messages < entries or 0 < options.max_bytes < self._bytes + self._delta_bytes + size

    def _full(self) -> StoreFullError:
        return StoreFullError(
            f"queue {self.name!r} is full ({self.size[0]} messages, {self.size[1]} bytes); "
            "it takes more when some are consumed, or with larger max_messages and max_bytes"
        )

    def expect(self, append: QueueAppend) -> None:
        """Count a message that is being appended."""
        self._delta += 1
        self._delta_bytes += append.size

    def not_appended(self, append: QueueAppend, *, certain: bool) -> None:
        """Read what an append of unknown outcome has left."""
        self._delta -= 1
        self._delta_bytes -= append.size
        if not certain and not self.closed:
            self.dispatcher.read_again(append.level)
            self._refresh_soon()

    def appended(self, append: QueueAppend, answer: Appended, now: float) -> StoreError | None:
        """Take a message that is stored; return an error if the queue was full."""
        level, size = append.level, append.size
        self._delta -= 1
        self._delta_bytes -= size
        counters = self._store.counters
        if self.closed:
            return None
        if answer.repeated:
            self.dispatcher.takes(level, answer.position)  # perhaps by another member, which has not told
            return None
        if answer.refused:
            counters["refused_full"] += 1
            return self._full()
        for position in answer.dropped:
            counters["dropped"] += 1
            self._entries -= 1
            self.dispatcher.gone(level, position)
        if not answer.position:
            counters["dropped"] += 1
            return None
        self._bytes += size
        if answer.replaced:
            counters["replaced"] += 1
            self.dispatcher.gone(level, answer.replaced)
        else:
            self._entries += 1
        if answer.replaced or answer.dropped or answer.over:
            self._refresh_soon()  # the answer does not tell how large they were
        if answer.replaced or answer.dropped:
            self.told_gone(level, [position for position in (answer.replaced, *answer.dropped) if position])
        counters["appended"] += 1
        if self.dispatcher.takes(level, answer.position):
            draft = append.draft
            record = QUEUE.decode(draft.body)
            level.add([QueueEntry(level, answer.position, delivered(record, draft.payload), record, size, now)])
        if self.options.overflow == "drop_oldest" and self.options.priorities > 1 and self._is_full():
            self._trim_soon()
        return None

    def told_gone(self, level: Level, positions: Sequence[int]) -> None:
        """Tell other members that messages are not there any more."""
        if self.members is not None and self.dispatcher.claims:
            self.members.tell_gone(level.mailbox, positions)

    def dispatch(self) -> None:
        """Give what waits to consumers: before its publisher is answered, so that it leaves no later."""
        if not self.closed:
            self.dispatcher.dispatch(self._store.now())

    # -- size

    async def refresh(self) -> None:
        """Look up how large the queue is."""
        infos = [await self._mailboxes.info(level.mailbox) for level in self.dispatcher.levels.values()]
        self._entries = sum(info.entries for info in infos)
        self._bytes = sum(info.size_bytes for info in infos)

    @property
    def size(self) -> tuple[int, int]:
        """Return messages and bytes in the queue, as far as known."""
        return max(0, self._entries + self._delta), max(0, self._bytes + self._delta_bytes)

    async def oldest(self) -> float | None:
        """Return when the oldest message was stored."""
        now = self._store.now()
        firsts = [await self._mailboxes.read(level.mailbox, 0, 1, now) for level in self.dispatcher.levels.values()]
        return min((entry.stored_at for entries in firsts for entry in entries), default=None)

    def _refresh_soon(self) -> None:
        """Look at the size again: what expires leaves the store without notice, so there may be room."""
        if not self._refreshing:
            self._refreshing = True
            self._store.spawn(self._refresh_after_pause, f"size.{self.name}")

    async def _refresh_after_pause(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._refreshed_at + REFRESH_PAUSE - loop.time()))
            if not self.closed:
                await self.refresh()
        except StoreError as error:
            self._store.log.warning("queue_size_unknown", queue=self.name, error=str(error))
        finally:
            self._refreshing = False
            self._refreshed_at = loop.time()

    def _trim_soon(self) -> None:
        if not self._trimming:
            self._trimming = True
            self._store.spawn(self._trim, f"trim.{self.name}")

    async def _trim(self) -> None:
        """Remove the oldest of the lowest level that no consumer has, until the rest fits."""
        try:
            await self.refresh()
            for level in self.dispatcher.levels.values():
                after = 0
                while self._is_full() and not self.closed:
                    excess = max(1, self.size[0] - self.options.max_messages) if self.options.max_messages else 1
                    if self.dispatcher.claims:
                        if not await self._drop_unclaimed(level, min(STEP, excess), "dropped"):
                            break
                        await self.refresh()
                        continue
                    after = max(after, self.dispatcher.sent_up_to(level))
                    entries = await self._mailboxes.read(level.mailbox, after, min(STEP, excess), self._store.now())
                    if not entries or self.closed:
                        break
                    spared = self.dispatcher.sent_up_to(level)  # it may have moved on meanwhile
                    after = entries[-1].position
                    self._drop(level, [entry for entry in entries if entry.position > spared], "dropped")
        except StoreError as error:
            self._store.log.warning("queue_not_trimmed", queue=self.name, error=str(error))
        finally:
            self._trimming = False

    def _drop(self, level: Level, entries: Sequence[Entry], event: str) -> None:
        """Remove entries."""
        sizes = {entry.position: len(entry.body) + len(entry.payload) for entry in entries}
        self._store.counters[event] += self.dispatcher.drop(level, sizes)

    # -- effects of the dispatcher

    def fetch(self, level: Level, after: int, limit: int) -> None:
        self._store.spawn(partial(self._fetch, level, after, limit), f"fetch.{self.name}")

    async def _fetch(self, level: Level, after: int, limit: int) -> None:
        if self.closed:
            return
        try:
            stored = await self._mailboxes.read(level.mailbox, after, limit, self._store.now())
        except Exception as error:  # noqa: BLE001 - whatever it is, consumers wait for the next try
            self._store.log.warning("queue_not_read", queue=self.name, error=str(error))
            await asyncio.sleep(RETRY)
            self.dispatcher.fetched(level, [], 0, self._store.now(), more=True)
            return
        entries = self._readable(level, stored)
        last = stored[-1].position if stored else 0
        self.dispatcher.fetched(level, entries, last, self._store.now(), more=len(stored) == limit)

    def _readable(self, level: Level, stored: Sequence[Entry]) -> list[QueueEntry]:
        entries: list[QueueEntry] = []
        for each in stored:
            try:
                entries.append(self._entry(level, each))
            except RecordError as error:
                self._store.counters["unreadable"] += 1
                self._store.log.error(  # noqa: TRY400 - the error says enough
                    "queue_entry_unreadable", queue=self.name, position=each.position, error=str(error)
                )
        return entries

    def _entry(self, level: Level, entry: Entry) -> QueueEntry:
        body, payload = entry.body, entry.payload
        record = QUEUE.decode(body)
        size = len(body) + len(payload)
        return QueueEntry(level, entry.position, delivered(record, payload), record, size, entry.stored_at, entry.mark)

    # -- claims

    def claim(self, limit: int) -> None:
        self._store.spawn(self._claim_some(limit), f"claim.{self.name}")

    async def _claim_some(self, limit: int) -> None:
        levels = list(reversed(self.dispatcher.levels.values()))
        now = self._store.now()
        skip = [self.dispatcher.left_to_others(level, now) for level in levels]
        async with self._lane:
            more = False
            try:
                positions = await self._claim(levels, limit, skip)
                more = sum(map(len, positions)) >= limit
            except StoreError as error:
                self._store.log.warning("queue_not_claimed", queue=self.name, error=str(error))
                positions, more = await self._claimed(levels), True
            found = [(level, await self._entries_of(level, of)) for level, of in zip(levels, positions, strict=True)]
        if self.closed:  # meanwhile
            for level, of in zip(levels, positions, strict=True):
                await self._release(level, of, {})
            return
        self.dispatcher.claimed(found, self._store.now(), more=more)

    async def _claim(
        self, levels: Sequence[Level], limit: int, skip: Sequence[Sequence[int]] = ()
    ) -> Sequence[Sequence[int]]:
        batch = Batch()
        batch.claim([level.mailbox for level in levels], self._store.store.writer, limit, self._store.now(), skip)
        (found,) = (await self._store.store.write(batch)).claimed
        return found

    async def _claimed(self, levels: Sequence[Level]) -> list[list[int]]:
        """Return what is claimed, when the store answers again, and not known here."""
        while True:
            await asyncio.sleep(RETRY)
            try:
                found = [await self._mailboxes.claimed(level.mailbox, self._store.store.writer) for level in levels]
            except StoreError:
                continue
            return [
                [position for position in of if position not in level.entries]
                for level, of in zip(levels, found, strict=True)
            ]

    async def _entries_of(self, level: Level, positions: Sequence[int]) -> list[QueueEntry]:
        """Read what is claimed, as long as that takes."""
        while positions:
            try:
                stored = await self._mailboxes.entries(level.mailbox, positions, self._store.now())
            except StoreError as error:
                self._store.log.warning("queue_not_read", queue=self.name, error=str(error))
                await asyncio.sleep(RETRY)
            else:
                return self._readable(level, stored)
        return []

    async def adopt(self, upto: Mapping[Level, int], known: Mapping[Level, Collection[int]]) -> None:
        """Claim what was read while this node was alone: everything up to a position of each level. `StoreError`.

        `known`: positions that were in memory then, of levels that may have claims of an earlier time with several
        members. Those that were forgotten while it was alone are given back.
        """
        async with self._lane:
            for level, kept in known.items():
                claimed = await self._mailboxes.claimed(level.mailbox, self._store.store.writer)
                here = level.entries.keys() | level.leaving
                await self._release(level, [each for each in claimed if each not in kept and each not in here], {})
            for level, end in upto.items():
                more = end > 0 and bool(level.entries or level.leaving)
                while more:
                    (found,) = await self._claim([level], MAX_CLAIMED)
                    beyond = [position for position in found if position > end]
                    if beyond:
                        await self._release(level, beyond, {})
                    more = len(found) == MAX_CLAIMED and not beyond

    def release(self, entries: Sequence[QueueEntry]) -> None:
        self._store.spawn(self._release_all(list(entries)), f"release.{self.name}")

    async def _release_all(self, entries: Sequence[QueueEntry]) -> None:
        by_level: dict[Level, list[QueueEntry]] = {}
        for entry in entries:
            by_level.setdefault(entry.level, []).append(entry)
        async with self._lane:
            for level, some in by_level.items():
                marks = {entry.position: min(entry.attempts, MAX_MARK) for entry in some if entry.attempts}
                await self._release(level, [entry.position for entry in some], marks)
        self.dispatcher.released(len(entries), self._store.now())

    async def _release(self, level: Level, positions: Sequence[int], marks: Mapping[int, int]) -> None:
        """Give claims back, as long as that takes, with the counts of attempts."""
        while positions:
            batch = Batch()
            for position, mark in marks.items():
                batch.mark(level.mailbox, position, mark)
            batch.release(level.mailbox, self._store.store.writer, positions)
            try:
                await self._store.store.write(batch)
            except StoreFencedError:
                return  # then the claims are void
            except StoreError as error:
                self._store.log.warning("queue_not_released", queue=self.name, error=str(error))
                await asyncio.sleep(RETRY)
            else:
                return

    async def _drop_unclaimed(
        self, level: Level, limit: int, event: str, keep: Sequence[int] = (), wanted: Collection[int] | None = None
    ) -> int:
        """Remove some of the oldest messages that no member has claimed; return how many. `StoreError`.

        `keep`: positions to pass over; `wanted`: no others than these.
        """
        async with self._lane:
            (claimed,) = await self._claim([level], limit, [keep])
            old = [position for position in claimed if wanted is None or position in wanted]
            await self._release(level, [position for position in claimed if position not in set(old)], {})
            entries = await self._mailboxes.entries(level.mailbox, old, self._store.now())
            self._drop(level, entries, event)
        if len(old) < len(claimed):
            self.dispatcher.released(len(claimed) - len(old), self._store.now())
        return len(entries)

    def offer(self, member: str) -> None:
        if self.members is not None:
            self.members.offer(self.name, member)

    def tell_hungry(self, count: int) -> None:
        if self.members is not None:
            self.members.tell_hungry(self.name, count)

    async def settle(self) -> None:
        """Wait until what was given back is given back."""
        async with self._lane:
            pass

    def remove(self, entries: Sequence[QueueEntry]) -> None:
        self._delta -= len(entries)
        self._delta_bytes -= sum([entry.size for entry in entries])
        self._store.remove(entries)

    def removed(self, level: Level, positions: Sequence[int], size: int) -> None:
        self._entries -= len(positions)
        self._bytes -= size
        self._delta += len(positions)
        self._delta_bytes += size
        self.dispatcher.removed(level, positions)

    def mark(self, entries: Sequence[QueueEntry]) -> None:
        self._store.mark(entries)

    def dead_letter(self, entry: QueueEntry, reason: str) -> None:
        if self.options.dead_letter:
            self._store.spawn(partial(self._move, entry, reason), f"dead.{self.name}")
            return
        self._store.counters["dead_dropped"] += 1
        self._store.log.info(
            "queue_message_dropped",
            queue=self.name,
            topic=entry.message.topic,
            guid=entry.message.guid.hex(),
            attempts=entry.attempts,
            reason=reason,
        )
        self.remove([entry])

    async def _move(self, entry: QueueEntry, reason: str) -> None:
        """Move a message to the dead-letter queue. It is in one of both, whatever happens."""
        store, record = self._store, entry.record
        history = (*(record.dead.history if record.dead is not None else ()), *(entry.history or ()))
        message = message_of(record, entry.message.payload)
        body, payload = QUEUE.encode(message, DeadLetter(self.name, reason, entry.attempts, history[-MAX_HISTORY:]))
        token = f"{entry.level.mailbox} {entry.position} ".encode() + message.guid
        while not self.closed:
            target = self._find(self.options.dead_letter)
            try:
                if target is None:
                    raise StoreFullError(f"there is no queue {self.options.dead_letter!r}")
                append = target.prepare(message, body, payload, token)
                append.moved = entry
            except StoreFullError as error:
                store.counters["dead_letter_refused"] += 1
                store.log.warning("dead_letter_waits", queue=self.name, error=str(error))
                await asyncio.sleep(DEAD_LETTER_RETRY)
                continue
            try:
                await store.append([append])
            except StoreError:
                await asyncio.sleep(RETRY)
                continue
            self.dead_lettered += 1
            self._entries -= 1
            self._bytes -= entry.size
            store.counters["dead_lettered"] += 1
            self.dispatcher.removed(entry.level, [entry.position])
            return

    def set_timer(self, delay: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay is not None:
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.closed:
            self.dispatcher.tick(self._store.now())

    # -- operators

    def change(self, options: QueueOptions) -> None:
        """Take other options."""
        self.options = options
        self.dispatcher.change(options, self._store.now())

    def close(self) -> None:
        """End; what is stored stays."""
        self.dispatcher.close()
        self.set_timer(None)

    async def sweep(self, now: float, budget: int) -> int:
        """Remove what is too old, some at a time; return how many messages were looked at.

        From the beginning, where the oldest are, and on from where the sweep before has ended: a message that expires
        by itself may be anywhere.
        """
        looked = 0
        await self.refresh()
        for level in self.dispatcher.levels.values() if self._entries else ():
            for start in dict.fromkeys((0, self._swept.get(level.number, 0))):
                if looked >= budget or self.closed:
                    return looked
                limit = min(budget - looked, STEP)
                entries = await self._mailboxes.read(level.mailbox, start, limit, now)
                looked += len(entries)
                if not self.closed:
                    held = self.dispatcher.is_held
                    old = [e for e in entries if self._is_old(e, now) and not held(level, e.position)]
                    if self.dispatcher.claims and old:
                        wanted = {entry.position for entry in old} - level.entries.keys()
                        keep = [entry.position for entry in entries if entry.position not in wanted]
                        await self._drop_unclaimed(level, len(wanted), "expired", keep, wanted)
                    else:
                        self._drop(level, old, "expired")
                if start or not self._swept.get(level.number):
                    self._swept[level.number] = entries[-1].position if len(entries) == limit else 0
        return looked

    def _is_old(self, entry: Entry, now: float) -> bool:
        if self.options.retention and entry.stored_at + self.options.retention <= now:
            return True
        try:
            expires_at = QUEUE.decode(entry.body).expires_at
        except RecordError:
            return False
        return expires_at is not None and expires_at <= now

    async def read(self, after: int, limit: int) -> list[FoundMessage]:
        """Return messages after a position, in the order in which consumers get them."""
        found: list[FoundMessage] = []
        now = self._store.now()
        for rank, level in enumerate(reversed(self.dispatcher.levels.values())):
            start = after - (rank << RANK)
            if start >> RANK > 0:
                continue  # all of this level has been read
            position = max(0, start)
            while len(found) < limit:
                wanted = limit - len(found)
                entries = await self._mailboxes.read(level.mailbox, position, wanted, now)
                for entry in entries:
                    position = entry.position
                    if not self._is_old(entry, now):
                        found.append(self._found((rank << RANK) + position, level, entry))
                if len(entries) < wanted:
                    break
        return found

    def _found(self, position: int, level: Level, entry: Entry) -> FoundMessage:
        try:
            record = QUEUE.decode(entry.body)
        except RecordError as error:
            told = {"error": str(error)}
            return FoundMessage(
                position=position, topic="", payload=entry.payload, time=entry.stored_at, properties=told
            )
        return FoundMessage(
            position=position,
            topic=record.topic,
            payload=entry.payload,
            time=record.time,
            publisher=record.client,
            guid=record.guid.hex(),
            properties=self._properties(level, entry, record),
        )

    def _properties(self, level: Level, entry: Entry, record: QueueRecord) -> dict[str, str]:
        told = dict(record.user_properties)
        told |= {"attempts": str(entry.mark), "qos": str(record.qos)}
        if self.options.priorities > 1:
            told["priority"] = str(level.number)
        if entry.key:
            told["key"] = entry.key[1:].decode(errors="replace")
        if record.content_type is not None:
            told["content-type"] = record.content_type
        history = self.dispatcher.history(level, entry.position)
        dead = record.dead
        if dead is not None:
            history = [*dead.history, *history]
            told |= {"dead-queue": dead.queue, "dead-reason": dead.reason, "dead-attempts": str(dead.attempts)}
            told["attempts"] = str(dead.attempts + entry.mark)
        if history:
            told["history"] = history_text(history)
        return told
