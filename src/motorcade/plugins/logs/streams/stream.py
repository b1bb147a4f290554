"""One stream that is declared: its end, its readers, and the way in and out.

    append ─▶ store.write ───────┬─▶ tail moves, pages grow ─▶ readers that wait there are told
    batches of other plugins ─▶ ─┤
    reader ─▶ pages, or ◀─ load ─┘

`tail` is the last offset that is known to be in the store. A reader that stands there costs nothing until it moves. A
reader that stands before it finds a page, or asks for one (`load`); those who ask for the same one share the read.

Rule 1: the tail follows every append to the stream, whichever part of the node makes it: the store tells (`told`). Of
        the appends of other members these tell (`tails`), while there are readers here.
Rule 2: an append that was not announced (a write of unknown outcome, another process, a lost hint) is found by `look`:
        while readers wait at the tail, at least once per `trim_interval`, and every second beside other members.
Rule 3: what waits for the store is bounded, over all streams together (`AppendBacklog`). What does not fit is refused
        with `StoreFullError`, which the publisher hears.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import Final

import structlog

from motorcade.commit import Commit
from motorcade.core.message import Message, UserProperties
from motorcade.core.record import RecordError, decode, encode
from motorcade.delivery.group import Group, GroupWriter
from motorcade.delivery.reader import Page, Reader
from motorcade.delivery.record import message_with
from motorcade.plugins.logs.streams.loader import Loader
from motorcade.plugins.logs.streams.options import StreamOptions
from motorcade.plugins.logs.streams.pages import OVERHEAD, PAGE, PAGE_BYTES, Cache, Pages
from motorcade.plugins.logs.streams.position import OFFSET
from motorcade.storage.ports import Batch, Store, StoreError, StoreFullError, StreamRecord

TIME: Final = "stream-time"  #: user property: when it was appended
SLACK: Final = 1.05  #: times a bound: a stream that grows so far is trimmed at once, not with the next look
MAX_NAMED: Final = 10  #: records that cannot be read are logged one by one up to here
MESSAGE: Final = 200  #: bytes a message that waits takes in memory besides its record, roughly


class AppendBacklog:
    """The amount that waits for the store, of all streams."""

    __slots__ = ("max_bytes", "max_messages", "messages", "size_bytes")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.messages = 0
        self.size_bytes = 0

    def full(self) -> bool:
        return self.messages >= self.max_messages or self.size_bytes >= self.max_bytes


class Stamps:
    """Times as text. Most records share their second with the one before."""

    __slots__ = ("_prefix", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._prefix = ""

    def text(self, time: float) -> str:
        """Format a time as ISO 8601 in UTC with milliseconds, rounded down: reading from it finds the record itself."""
        second, thousandths = divmod(int(time * 1000), 1000)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._prefix}.{thousandths:03}Z"


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all streams of a node use."""

    store: Store
    cache: Cache
    loader: Loader
    waiting: AppendBacklog
    now: Callable[[], float]
    counters: Counter[str]
    log: structlog.stdlib.BoundLogger
    trim_soon: Callable[[Stream], None]  #: called when one has clearly more than it may have, or is no longer empty
    moved: Callable[[str], None]  #: called when it was trimmed
    reads: Callable[[str, bool], None]  #: called when its first reader has come, and when the last one has gone


class Stream:
    """A stream, while it is declared."""

    def __init__(self, name: str, options: StreamOptions | None, origin: str, shared: Shared, made: int = 0) -> None:
        self.name = name
        self.options = options  #: None: it is bound to no topics and keeps what its owner lets it keep
        self.origin = origin
        self.made = made  #: another number for each stream of this name; 0: not known
        self.pages = Pages(shared.cache)
        self.readers: set[Reader] = set()
        self.tail = 0
        self.first = 0  #: as far as is known: trimming moves it, and looks before it does
        self.records = 0
        self.size_bytes = 0
        self.oldest = 0.0  #: time of the first record; 0: there is none
        self.time = 0.0  #: of the last record
        self.closed = False  #: deleted, or no longer declared
        self.uncounted = False  #: others have appended: `records`, `size_bytes` and `first` are to be looked up
        self.refreshed = 0.0  #: when that was done last because of other members
        self._shared = shared
        self._store = shared.store.streams
        self._counters = shared.counters
        self._waiting: set[Reader] = set()  # at the tail
        self._loading: dict[int, dict[Reader, None]] = {}  # by the offset after which a page is being read
        self._behind: set[Reader] = set()  # not at the tail
        self._groups = GroupWriter(shared.store, shared.now, self._fill, self._written)
        self._last: Group[tuple[Message, bytes]]
        self._flying = 0  # messages on their way into the store
        self._told = 0  # the last offset that the store has told
        self._failing = False
        self._stamps = Stamps()
        self._unreadable = 0

    async def open(self) -> None:
        """Find out where the stream stands."""
        info = await self._store.info(self.name)
        self.first, self.records, self.size_bytes = info.first, info.records, info.size_bytes
        self._reached(info.last)
        if self.records:
            last = await self._store.read(self.name, self.tail - 1, 1)
            self.time = max(self.time, last[0].time if last else 0.0)
        await self._look_at_first()

    async def _look_at_first(self) -> None:
        found = await self._store.read(self.name, 0, 1)
        if found:
            self.first, self.oldest = found[0].offset, found[0].time
        elif not self._flying:
            self.first, self.oldest, self.records, self.size_bytes = 0, 0.0, 0, 0

    async def trimmed(self, records: int, size_bytes: int) -> None:
        """Note that so much was removed from the store."""
        self.records = max(0, self.records - records)
        self.size_bytes = max(0, self.size_bytes - size_bytes)
        await self._look_at_first()
        self.pages.forget_before(self.first or self.tail + 1)
        self._shared.moved(self.name)

    async def refresh(self, *, whole: bool) -> None:
        """Count what other members have appended and trimmed; `whole`: and look how old it is."""
        self.refreshed = self._shared.now()
        if whole:
            self.uncounted = False
            await self.open()
        else:
            info = await self._store.info(self.name)
            self.first, self.records, self.size_bytes = info.first, info.records, info.size_bytes
            self._reached(info.last)
        self.pages.forget_before(self.first or self.tail + 1)

    def close(self) -> None:
        """Close: no more readers, no more pages."""
        self.closed = True
        self.pages.clear()
        for reader in [*self.readers]:
            self.leave(reader)
        self._loading.clear()

    # -- in

    def append(self, messages: Sequence[Message]) -> Commit[Sequence[int]]:
        """Append, in order. The commit tells the offsets.

        It fails with `StoreFullError` if too much waits already, `RecordError` if a message cannot be written.
        """
        answer: Commit[Sequence[int]] = Commit()
        if not messages:
            answer.settle([])
            return answer
        try:
            group = self.write(messages)
        except (StoreFullError, RecordError) as error:
            answer.finish(error)
            return answer
        end = len(group.items)
        start = end - len(messages)
        group.then(
            lambda: answer.finish(group.error) if group.error else answer.settle(group.result.offsets[0][start:end])
        )
        return answer

    def write(self, messages: Sequence[Message]) -> Group[tuple[Message, bytes]]:
        """Append, in order; `StoreFullError`, `RecordError`."""
        waiting = self._shared.waiting
        if waiting.full():
            self._counters["refused_waiting"] += 1
            raise StoreFullError(
                f"stream {self.name!r}: {waiting.messages} messages wait for the store already "
                "(options max_waiting and max_waiting_bytes of the plugin streams)"
            )
        items = [(message, encode(message)) for message in messages]
        size = sum(len(value) + MESSAGE for _, value in items)
        waiting.messages += len(items)
        waiting.size_bytes += size
        self._flying += len(items)
        self._last = self._groups.add(items, size)
        return self._last

    async def settle(self) -> None:
        """Wait until everything is stored, or has failed."""
        if self._flying:
            with suppress(StoreError):
                await self._last

    def _fill(self, batch: Batch, group: Group[tuple[Message, bytes]]) -> None:
        batch.stream(self.name, [value for _, value in group.items], group.time)

    def _written(self, group: Group[tuple[Message, bytes]]) -> None:
        count = len(group.items)
        self._shared.waiting.messages -= count
        self._shared.waiting.size_bytes -= group.size
        self._flying -= count
        if group.error is not None:
            self._failed(count, group.error)
        else:
            self._failing = False
            self._counters["appended"] += count
            if not self.closed:
                self._appended(group.result.offsets[0], group)
        self._follow()

    def _appended(self, offsets: Sequence[int], group: Group[tuple[Message, bytes]]) -> None:
        """Count what is stored, and hand it to readers."""
        self.time = max(self.time, group.time)
        was_empty = not self.oldest
        self.oldest = self.oldest or self.time
        self.first = self.first or offsets[0]
        self.records += len(offsets)
        self.size_bytes += group.size - MESSAGE * len(offsets)
        if self.readers:
            stamp = TIME, self._stamps.text(self.time)
            self.pages.extend(
                offsets,
                [_delivery(message, at, stamp) for (message, _), at in zip(group.items, offsets, strict=True)],
            )
        self.uncounted = self.uncounted or offsets[0] > self.tail + 1
        self._reached(offsets[-1])
        if was_empty or self.overflows(SLACK):
            self._shared.trim_soon(self)

    def _failed(self, count: int, error: BaseException) -> None:
        self._counters["append_failed"] += count
        if not (isinstance(error, StoreError) and error.certain):
            self.uncounted = True  # it may be there all the same
        if not self._failing:  # once until it succeeds again
            self._failing = True
            self._shared.log.error("stream_append_failed", stream=self.name, error=str(error) or repr(error))

    def told(self, last: int, first: int = 0) -> None:
        """Note that the store has records up to an offset now, and those before `first` no longer.

        While an append of ours is under way, that may be the one: readers hear of it when its page is there.
        """
        self._told = max(self._told, last)
        if first > self.first:
            self.first, self.uncounted = first, True
            self.pages.forget_before(first)
        self._follow()

    @property
    def last(self) -> int:
        """Return the last offset that is known to be in the store, though its page may not be there yet."""
        return max(self.tail, self._told)

    def _follow(self) -> None:
        if self._told > self.tail and not self._flying:
            self.uncounted = True
            self._reached(self._told)

    async def look(self) -> None:
        """Find what the store could not tell of (rule 2), and count what others have appended."""
        if self.uncounted:
            self.uncounted = False
            try:
                await self.open()
            except BaseException:
                self.uncounted = True  # the next look counts
                raise
        elif self.awaited:
            await self.look_at_tail()

    @property
    def awaited(self) -> bool:
        """Return True while readers wait at the tail, and nothing is under way that would tell them more."""
        return bool(self._waiting) and not self._flying

    async def look_at_tail(self) -> None:
        """Find out where the stream ends, beyond what was told (rule 2)."""
        tail, waited = self.tail, self.awaited
        info = await self._store.info(self.name)
        if info.last > self.tail:
            if waited and self.tail == tail:
                self._counters["found_late"] += 1
            self.uncounted = True
            self._reached(info.last)

    def overflows(self, slack: float = 1.0) -> bool:
        """Return True if there is more than there may be, times `slack`."""
        options = self.options
        return options is not None and (
            0 < options.max_bytes * slack < self.size_bytes or 0 < options.max_messages * slack < self.records
        )

    def outdated_at(self) -> float:
        """Return when the oldest record is to go; infinity: never."""
        options = self.options
        return self.oldest + options.retention if options and options.retention and self.oldest else inf

    # -- out

    def find(self, position: int) -> Page | None:
        return self.pages.find(position)

    def wait(self, reader: Reader) -> None:
        """Tell a reader when something is appended."""
        self._waiting.add(reader)
        self._is_behind(reader, behind=False)

    def _is_behind(self, reader: Reader, *, behind: bool) -> None:
        if behind is not (reader in self._behind):
            (self._behind.add if behind else self._behind.remove)(reader)
            self._shared.cache.behind += 1 if behind else -1

    def join(self, reader: Reader) -> None:
        self.readers.add(reader)
        if len(self.readers) == 1:
            self._shared.reads(self.name, True)

    def leave(self, reader: Reader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)
            if not self.readers:
                self._shared.reads(self.name, False)
        self._waiting.discard(reader)
        self._is_behind(reader, behind=False)
        for asking in self._loading.values():
            asking.pop(reader, None)
        if not self.readers:
            self.pages.clear()

    def passed(self, page: Page) -> None:
        """Note that a reader has been through a page. If it is the only one, the page is removed while it is warm."""
        if len(self.readers) == 1:
            self.pages.remove(page)

    def load(self, after: int, reader: Reader, wanted: int) -> None:
        """Read a page for a reader, and tell it. Not less than it wants now, if a page has room for it."""
        self._is_behind(reader, behind=True)
        asking = self._loading.get(after)
        if asking is not None:
            asking[reader] = None
            return
        self._loading[after] = {reader: None}
        self._shared.loader.do(partial(self._load, after, self._page_length(wanted)))

    def _page_length(self, wanted: int) -> int:
        """Return how many records to read: a whole page, unless records are large or too many readers are behind."""
        average = self.size_bytes // max(1, self.records) + OVERHEAD
        fair = min(PAGE_BYTES, self._shared.cache.share()) // average
        return max(1, min(PAGE, max(fair, min(wanted, PAGE_BYTES // average))))

    async def _load(self, after: int, limit: int) -> None:
        tail = self.tail  # all of it is in the store when the read begins
        error: Exception | None = None
        found: list[StreamRecord] = []
        if self._loading.get(after):  # else those who have asked are gone
            try:
                found = await self._store.read(self.name, after, limit)
            except Exception as failure:  # noqa: BLE001 - readers wait for an answer, whatever it is
                error = failure
        asking = self._loading.pop(after, {})
        if not asking:
            return
        if error is not None:
            self._counters["read_failed"] += 1
            self._break(asking)
            return
        try:
            page = self._page(after, tail, found, whole=len(found) < limit)
            for reader in asking:
                reader.more(page)
        except Exception:  # a defect: they begin again, rather than wait for ever
            self._break(asking)
            raise

    def _break(self, asking: Iterable[Reader]) -> None:
        for reader in asking:
            self._counters["reader_waits_for_store"] += 1
            reader.broken()

    def _page(self, after: int, tail: int, found: Sequence[StreamRecord], *, whole: bool) -> Page | None:
        """Return a page of what was read; `whole`: there was nothing more."""
        last = found[-1].offset if found else after
        upto = max(tail, last) if whole else last
        self._counters["read"] += len(found)
        page = self.pages.add(after, upto, *self._from_store(found))
        # Beyond the tail only if a reader reads before the append has returned, or its outcome was not known.
        self._reached(upto)
        return page

    def _reached(self, offset: int) -> None:
        """Note that the stream is known to go up to an offset."""
        if offset > self.tail:
            self.tail = offset
            woken, self._waiting = self._waiting, set()
            for reader in woken:
                reader.more()

    def _from_store(self, found: Sequence[StreamRecord]) -> tuple[list[int], list[Message]]:
        """Return offsets and messages; values that are no records are left out, and readers go on behind them."""
        offsets: list[int] = []
        messages: list[Message] = []
        time, stamp = -1.0, (TIME, "")
        for stored in found:
            offset = stored.offset
            try:
                record = decode(stored.value)
            except RecordError as error:
                self._cannot_read(offset, error)
                continue
            if stored.time != time:  # what was appended together has one time
                time = stored.time
                stamp = TIME, self._stamps.text(time)
            properties: UserProperties = ((OFFSET, str(offset)), stamp)
            if record.user_properties:
                properties = record.user_properties + properties
            offsets.append(offset)
            messages.append(
                message_with(record, record.payload, record.topic, 1, record.retain, record.time, properties)
            )
        return offsets, messages

    def _cannot_read(self, offset: int, error: RecordError) -> None:
        self._counters["unreadable"] += 1
        self._unreadable += 1
        if self._unreadable <= MAX_NAMED:
            self._shared.log.warning("stream_unreadable", stream=self.name, offset=offset, error=str(error))


def _delivery(message: Message, offset: int, stamp: tuple[str, str]) -> Message:
    """Return a message that was appended just now as readers get it."""
    return Message(
        message.topic,
        message.payload,
        1,
        message.retain,
        message.publisher,
        message.username,
        message.guid,
        message.timestamp,
        message.payload_format,
        message.expires_at,
        message.content_type,
        message.response_topic,
        message.correlation_data,
        (*message.user_properties, (OFFSET, str(offset)), stamp),
    )
