"""One queue: its dispatcher, and what this one asks of the store.

Rule: an append of unknown outcome may be in the store, or may still be applied. Until a write that was begun after it
      is done (`ports`, rule 6), what is appended to its level is read from the store and not taken from memory, which
      would pass over the doubtful position. Then the level is read on from where it was.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import structlog

from motorcade.core.message import Message
from motorcade.extension.declared import Found
from motorcade.extension.plugin import Spawn
from motorcade.plugins.queues import record
from motorcade.plugins.queues.dispatcher import Dispatcher, Item
from motorcade.plugins.queues.options import PROPERTY, QueueOptions
from motorcade.plugins.queues.record import MOST_HISTORY, Dead, RecordError, Stored
from motorcade.plugins.queues.tables import owner_of
from motorcade.plugins.queues.writer import RETRY, Appender, Job, Remover, Row
from motorcade.storage.ports import NO_BOUND, Appended, Bound, Draft, Entry, Store, StoreError, StoreFullError

RANK: Final = 48  #: bits of a position below the place of its level, where operators read messages
STEP: Final = 64  #: messages removed at once when a queue with priorities is too large
GRAVE_RETRY: Final = 5.0  #: seconds until a dead-letter queue that is full is tried again
NO_POSITION: Final = 0  #: of no entry
REFRESH_PAUSE: Final = 0.2  #: seconds between two looks at the size of a queue that seems full


@dataclass(frozen=True, slots=True)
class Tools:
    """What all queues of a node have in common."""

    store: Store
    appender: Appender
    remover: Remover
    counters: Counter[str]
    log: structlog.stdlib.BoundLogger
    now: Callable[[], float]
    spawn: Spawn


class Graves(Protocol):
    """Where dead letters go."""

    def get(self, name: str) -> Queue | None: ...


class Queue:
    """A queue that is declared."""

    def __init__(self, name: str, options: QueueOptions, origin: str, tools: Tools, graves: Graves) -> None:
        self.name = name
        self.options = options
        self.origin = origin
        self.closed = False
        self.dead_lettered = 0  #: messages that this queue has given up, since the start of the node
        self.dispatcher = Dispatcher(options, self, tools.counters)
        self._tools = tools
        self._graves = graves
        self._entries = 0  # in the store, as far as known
        self._octets = 0
        self._coming = 0  # on their way there
        self._coming_octets = 0
        self._refreshing = False
        self._refreshed_at = 0.0  # loop time
        self._trimming = False
        self._timer: asyncio.TimerHandle | None = None
        self._swept: dict[int, int] = {}  # level: position up to which the last sweep has looked
        self._doubts: dict[int, int] = {}  # level: appends of unknown outcome, until a write after them is done

    # -- appending

    @property
    def levels(self) -> range:
        return range(self.options.priorities)

    def row(self, message: Message, body: bytes) -> Row:
        """What a message is for this queue; `StoreFullError` if there is no room for it."""
        options = self.options
        draft = Draft(
            body,
            message.payload,
            key=self._key(message),
            expires_at=message.expires_at or 0.0,
            token=message.guid if message.qos == 2 else b"",
        )
        level = record.level_of(message.user_properties, options.priorities)
        size = len(body) + len(message.payload)
        if options.max_bytes and size > options.max_bytes:
            raise StoreFullError(f"the message is larger than queue {self.name!r} may be ({options.max_bytes} bytes)")
        if options.overflow == "drop_oldest":
            return Row(self, level, draft, self._bound(), message)
        if not self._is_full(size):
            return Row(self, level, draft, NO_BOUND, message)
        self._refresh_soon()
        if draft.key:
            return Row(self, level, draft, NO_BOUND, message, probe=True)
        raise self._full()

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

    def _bound(self) -> Bound:
        if self.options.priorities > 1:
            return NO_BOUND  # the lowest level goes first, wherever the new message belongs: see `_trim`
        return Bound(self.options.max_messages, self.options.max_bytes)

    def _is_full(self, size: int = 0) -> bool:
        options = self.options
        entries, octets = self._entries + self._coming, self._octets + self._coming_octets
        more = 1 if size else 0
        return (0 < options.max_messages < entries + more) or (0 < options.max_bytes < octets + size)

    @property
    def overflows(self) -> bool:
        """Whether there is more than there may be, as far as known, with what is on its way."""
        return self._is_full()

    def _full(self) -> StoreFullError:
        return StoreFullError(
            f"queue {self.name!r} is full ({self._entries} messages, {self._octets} bytes); "
            "it takes more when some are consumed, or with larger max_messages and max_bytes"
        )

    def expect(self, row: Row) -> None:
        """A message is on its way into the store."""
        self._coming += 1
        self._coming_octets += row.size

    def not_appended(self, row: Row, *, certain: bool) -> None:
        """It has not arrived, or the outcome is unknown."""
        self._coming -= 1
        self._coming_octets -= row.size
        if certain or self.closed:
            return
        settling = row.level in self._doubts
        self._doubts[row.level] = self._doubts.get(row.level, 0) + 1
        if not settling:
            self._tools.spawn(partial(self._settle, row.level), f"settle.{self.name}")

    async def _settle(self, level: int) -> None:
        """Write something that changes nothing, until that is done; then read what the doubtful appends have left."""
        tools = self._tools
        while level in self._doubts and not self.closed:
            doubts = self._doubts[level]
            try:
                await tools.store.mailboxes.acknowledge(owner_of(self.name, level), [NO_POSITION])
            except StoreError:  # the appender has told why
                await asyncio.sleep(RETRY)
                continue
            if self._doubts[level] == doubts:  # else one was begun after this write
                del self._doubts[level]
            self.dispatcher.look_again(level)
            self.dispatch()
        self._refresh_soon()

    def appended(self, row: Row, answer: Appended, now: float) -> StoreError | None:
        """It has arrived; an error if it should not have."""
        self._coming -= 1
        self._coming_octets -= row.size
        counters = self._tools.counters
        if self.closed or answer.repeated:
            return None
        for position in answer.dropped:
            counters["dropped"] += 1
            self._entries -= 1
            self.dispatcher.gone(row.level, position)
        if not answer.position:
            counters["dropped"] += 1
            return None
        self._entries += 1
        self._octets += row.size
        if answer.replaced:
            self._entries -= 1
            counters["replaced"] += 1
            self.dispatcher.gone(row.level, answer.replaced)
        elif row.probe and self._is_full():
            counters["refused_full"] += 1
            self.dispatcher.gone(row.level, answer.position)
            self.finish([self._item(row, answer.position, now)])
            return self._full()
        if answer.replaced or answer.dropped or answer.over:
            self._refresh_soon()  # nobody told how large they were, or it is larger than was known
        counters["appended"] += 1
        if row.level in self._doubts:
            self.dispatcher.look_again(row.level)
        elif self.dispatcher.expects(row.level, answer.position):
            self.dispatcher.insert(self._item(row, answer.position, now))
        if self.options.overflow == "drop_oldest" and self.options.priorities > 1 and self._is_full():
            self._trim_soon()
        return None

    def _item(self, row: Row, position: int, now: float) -> Item:
        stored = record.decode(row.draft.body)
        message = record.message_of(stored, row.draft.payload)
        return Item(row.level, position, message, row.size, now, qos=stored.qos, dead=stored.dead)

    def dispatch(self) -> None:
        """Give what was appended to whoever has room."""
        if not self.closed:
            self.dispatcher.dispatch(self._tools.now())

    # -- how large it is

    async def refresh(self) -> None:
        """Look how large the queue is."""
        entries = octets = 0
        for level in self.levels:
            info = await self._tools.store.mailboxes.info(owner_of(self.name, level))
            entries += info.entries
            octets += info.octets
        self._entries, self._octets = entries, octets

    @property
    def size(self) -> tuple[int, int]:
        """Messages and bytes in the store, as far as known."""
        return self._entries, self._octets

    async def oldest(self) -> float | None:
        """When the oldest message was stored."""
        now = self._tools.now()
        found: list[float] = []
        for level in self.levels:
            entries = await self._tools.store.mailboxes.read(owner_of(self.name, level), 0, 1, now)
            found += [entry.stored_at for entry in entries]
        return min(found, default=None)

    def _refresh_soon(self) -> None:
        """Expired messages leave the store without a word, so a queue that seems full may have room again."""
        loop = asyncio.get_running_loop()
        if not self._refreshing:
            self._refreshing = True
            pause = max(0.0, self._refreshed_at + REFRESH_PAUSE - loop.time())
            self._tools.spawn(partial(self._refresh_after, pause), f"size.{self.name}")

    async def _refresh_after(self, pause: float) -> None:
        self._refreshing = True
        try:
            await asyncio.sleep(pause)
            if not self.closed:
                await self.refresh()
        except StoreError as error:
            self._tools.log.warning("queue_size_unknown", queue=self.name, error=str(error))
        finally:
            self._refreshing = False
            self._refreshed_at = asyncio.get_running_loop().time()

    def _trim_soon(self) -> None:
        if not self._trimming:
            self._trimming = True
            self._tools.spawn(self._trim, f"trim.{self.name}")

    async def _trim(self) -> None:
        """Remove the oldest of the lowest level that no consumer has, until the rest fits."""
        mailboxes = self._tools.store.mailboxes
        self._trimming = True
        try:
            await self.refresh()
            for level in self.levels:
                owner = owner_of(self.name, level)
                while self._is_full() and not self.closed:
                    beyond = max(1, self._entries - self.options.max_messages) if self.options.max_messages else 1
                    after = self.dispatcher.in_flight_to(level)
                    entries = await mailboxes.read(owner, after, min(STEP, beyond), self._tools.now())
                    if not entries or self.closed:
                        break
                    after = self.dispatcher.in_flight_to(level)  # it may have moved on meanwhile
                    dropped = [entry for entry in entries if entry.position > after]
                    ended = [entry for entry in dropped if self.dispatcher.gone(level, entry.position)]
                    try:
                        await mailboxes.acknowledge(owner, [entry.position for entry in dropped])
                    except StoreError:
                        items = self._items(level, ended)
                        if items and not self.closed:  # no consumer gets them any more: tried again until it is done
                            self._tools.counters["dropped"] += len(items)
                            self.finish(items)
                        raise
                    self._tools.counters["dropped"] += len(dropped)
                    await self.refresh()
        except StoreError as error:
            self._tools.log.warning("queue_not_trimmed", queue=self.name, error=str(error))
        finally:
            self._trimming = False

    # -- what the dispatcher asks for

    def fetch(self, level: int, after: int, limit: int) -> None:
        self._tools.spawn(partial(self._fetch, level, after, limit), f"fetch.{self.name}")

    async def _fetch(self, level: int, after: int, limit: int) -> None:
        tools = self._tools
        if self.closed:
            return
        try:
            entries = await tools.store.mailboxes.read(owner_of(self.name, level), after, limit, tools.now())
        except Exception as error:  # noqa: BLE001 - whatever it is, consumers wait for the next try
            tools.log.warning("queue_not_read", queue=self.name, error=str(error))
            await asyncio.sleep(RETRY)
            self.dispatcher.not_fetched(level)
            self.dispatch()
            return
        items = self._items(level, entries)
        last = entries[-1].position if entries else 0
        self.dispatcher.fetched(level, items, last, tools.now(), more=len(entries) == limit)

    def _items(self, level: int, entries: Iterable[Entry]) -> list[Item]:
        """What was read, as far as it can be."""
        items: list[Item] = []
        decode, message_of = record.decode, record.message_of
        for entry in entries:
            body, payload = entry.body, entry.payload
            try:
                stored = decode(body)
            except RecordError as error:
                self._tools.counters["unreadable"] += 1
                self._tools.log.error(  # noqa: TRY400 - the error says enough
                    "queue_entry_unreadable", queue=self.name, position=entry.position, error=str(error)
                )
                continue
            message = message_of(stored, payload)
            size = len(body) + len(payload)
            items.append(
                Item(level, entry.position, message, size, entry.stored_at, entry.mark, stored.qos, stored.dead)
            )
        return items

    def finish(self, items: Sequence[Item]) -> None:
        self._entries -= len(items)
        self._octets -= sum([item.size for item in items])
        self._tools.remover.finish(self, items)

    def mark(self, *, at_once: bool) -> None:
        self._tools.remover.mark(self, at_once=at_once)

    def removed(self, level: int, positions: Iterable[int]) -> None:
        """The store has let go of messages."""
        if not self.closed:
            self.dispatcher.removed(level, positions)

    def bury(self, item: Item, reason: str) -> None:
        if not self.options.dead_letter:
            self._tools.counters["dead_dropped"] += 1
            self._tools.log.info(
                "queue_message_dropped",
                queue=self.name,
                topic=item.message.topic,
                guid=item.message.guid.hex(),
                attempts=item.attempts,
                reason=reason,
            )
            self.finish([item])
            return
        self._tools.spawn(partial(self._bury, item, reason), f"bury.{self.name}")

    async def _bury(self, item: Item, reason: str) -> None:
        """Move a message to the dead-letter queue. It is in one of both, whatever happens."""
        tools = self._tools
        history = (*(item.dead.history if item.dead is not None else ()), *(item.history or ()))
        dead = Dead(self.name, reason, item.attempts, history[-MOST_HISTORY:])
        message = item.message
        if item.dead is not None:  # what is told of the time before is told anew
            kept = len(message.user_properties) - len(record.dead_properties(item.dead))
            message = replace(message, user_properties=message.user_properties[:kept])
        body = record.encode(message, dead, qos=item.qos)
        token = f"{owner_of(self.name, item.level)} {item.position} ".encode() + message.guid
        while not self.closed:
            grave = self._graves.get(self.options.dead_letter)
            try:
                if grave is None:
                    raise StoreFullError(f"there is no queue {self.options.dead_letter!r}")
                row = grave.row(message, body)
            except StoreFullError as error:
                tools.counters["dead_letter_refused"] += 1
                tools.log.warning("dead_letter_waits", queue=self.name, error=str(error))
                await asyncio.sleep(GRAVE_RETRY)
                continue
            draft = replace_token(row.draft, token)
            done = asyncio.get_running_loop().create_future()
            tools.appender.add(Job([Row(grave, row.level, draft, row.bound, message)], done, item, self))
            try:
                await done
            except StoreError:  # the appender has told why
                await asyncio.sleep(RETRY)
                continue
            self.dead_lettered += 1
            self._entries -= 1
            self._octets -= item.size
            tools.counters["dead_lettered"] += 1
            return

    def alarm(self, delay: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay is not None:
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.closed:
            self.dispatcher.tick(self._tools.now())

    # -- operators

    def change(self, options: QueueOptions) -> None:
        """Other options from now on."""
        self.options = options
        self.dispatcher.change(options, self._tools.now())

    def close(self) -> None:
        """The queue is no more; its messages are the caller's business."""
        self.closed = True
        self.dispatcher.close()
        self._tools.remover.forget(self)
        self.alarm(None)

    async def sweep(self, now: float, budget: int) -> int:
        """Remove what is too old, some at a time; how many messages were looked at.

        From the beginning, where the oldest are, and on from where the sweep before has ended: a message that expires
        by itself may stand anywhere.
        """
        looked = 0
        await self.refresh()
        for level in self.levels if self._entries else ():
            for start in dict.fromkeys((0, self._swept.get(level, 0))):
                if looked >= budget or self.closed:
                    return looked
                looked += await self._sweep_from(level, start, now, budget - looked)
        return looked

    async def _sweep_from(self, level: int, start: int, now: float, budget: int) -> int:
        """One step of a sweep."""
        mailboxes = self._tools.store.mailboxes
        owner = owner_of(self.name, level)
        entries = await mailboxes.read(owner, start, min(budget, STEP), now)
        old = [
            entry.position
            for entry in entries
            if self._is_old(entry, now) and not self.dispatcher.is_held(level, entry.position)
        ]
        if old and not self.closed:
            for position in old:
                self.dispatcher.gone(level, position)
            self._tools.counters["expired"] += await mailboxes.acknowledge(owner, old)
            await self.refresh()
        if start or not self._swept.get(level):
            self._swept[level] = entries[-1].position if len(entries) == min(budget, STEP) else 0
        return len(entries)

    def _is_old(self, entry: Entry, now: float) -> bool:
        if self.options.retention and entry.stored_at + self.options.retention <= now:
            return True
        try:
            expires_at = record.decode(entry.body).expires_at
        except RecordError:
            return False
        return expires_at is not None and expires_at <= now

    async def read(self, after: int, limit: int) -> list[Found]:
        """Messages after a position, in the order in which consumers get them."""
        found: list[Found] = []
        now = self._tools.now()
        for rank, level in enumerate(reversed(self.levels)):
            start = after - (rank << RANK)
            if start >> RANK > 0:
                continue  # all of this level has been read
            position = max(0, start)
            while len(found) < limit:
                wanted = limit - len(found)
                entries = await self._tools.store.mailboxes.read(owner_of(self.name, level), position, wanted, now)
                for entry in entries:
                    position = entry.position
                    if not self._is_old(entry, now):
                        found.append(self._found((rank << RANK) + position, level, entry))
                if len(entries) < wanted:
                    break
        return found

    def _found(self, position: int, level: int, entry: Entry) -> Found:
        try:
            stored = record.decode(entry.body)
        except RecordError as error:
            return Found(
                position=position,
                topic="",
                payload=entry.payload,
                time=entry.stored_at,
                properties={"error": str(error)},
            )
        return Found(
            position=position,
            topic=stored.topic,
            payload=entry.payload,
            time=stored.time,
            publisher=stored.publisher,
            guid=stored.guid.hex(),
            properties=self._told(level, entry, stored),
        )

    def _told(self, level: int, entry: Entry, stored: Stored) -> dict[str, str]:
        told = dict(stored.user_properties)
        told |= {"attempts": str(entry.mark), "qos": str(stored.qos)}
        if self.options.priorities > 1:
            told["priority"] = str(level)
        if entry.key:
            told["key"] = entry.key[1:].decode(errors="replace")
        if stored.content_type is not None:
            told["content-type"] = stored.content_type
        history = self.dispatcher.history(level, entry.position)
        dead = stored.dead
        if dead is not None:
            history = [*dead.history, *history]
            told |= {"dead-queue": dead.queue, "dead-reason": dead.reason, "dead-attempts": str(dead.attempts)}
            told["attempts"] = str(dead.attempts + entry.mark)
        if history:
            told["history"] = record.history_text(history)
        return told


def replace_token(draft: Draft, token: bytes) -> Draft:
    """The same entry, recognised by another token."""
    return Draft(draft.body, draft.payload, draft.key, draft.expires_at, draft.droppable, token)
