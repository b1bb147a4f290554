"""Redis servers, read in bulk from outside the nodes that share them.

    RedisReader     a Motorcade store: its streams and mailboxes
    NativeReader    streams that are Redis' own (XADD), such as `messages:processed`

Both are for callers without an event loop. They have one themselves, which runs only while they wait for an answer; so
the next question is on its way before the last answer is handed out, and the server works while the caller does.

Rule 1: nothing is written, not even what would create a store.
Rule 2: a question asks for PAGE_ROWS at most: a server does nothing else meanwhile, and nodes wait for it too.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from motorcade.redis.resp import Argument, ServerError
from motorcade.redis.scripts import Script, script_of
from motorcade.redis.servers import Servers, refusal
from motorcade.redis.slots import slot_of
from motorcade.redis.url import RedisOptions, parse_url
from motorcade.storage.cells import Cells
from motorcade.storage.ports import StoreError
from motorcade.storage.readers import MAX_ROWS, PAGE_BYTES, Extent, MailboxPage, StreamPage, rows_for
from motorcade.storage.redis_checks import VERSION, format_refusal
from motorcade.storage.redis_format import TIME, unpack_entry
from motorcade.storage.redis_scripts import EXTENT, FIND, READ

#: Entries in one answer: 0.4 ms of the server's processor time where records are short (`stride`: 0.9 ms).
PAGE_ROWS: Final = 1000

#: Questions on their way at once.
AHEAD: Final = 2

#: Mailboxes asked for at once.
WINDOW: Final = 64

STRIDE: Final = script_of("motorcade.storage", "stride")

T = TypeVar("T")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection: an answer is thousands of lists without a cycle; looking for them costs a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Asking:
    """Servers, and the loop in which they are asked."""

    def __init__(self, url: str) -> None:
        self.place = parse_url(url, RedisOptions())
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._servers = Servers(
            self.place.addresses, self.place.access, self.place.clustered, self.place.options.patience
        )
        self._closed = False
        try:
            self.wait(self._servers.open())
        except BaseException:
            self.close()
            raise

    def wait(self, answer: Awaitable[T]) -> T:
        if self._closed:
            raise StoreError("the reader is closed")
        return self._loop.run_until_complete(_awaited(answer))

    def begin(self, answer: Awaitable[T]) -> asyncio.Task[T]:
        """Begin a question; it is sent the next time a caller waits."""
        return self._loop.create_task(_awaited(answer))

    def send(self) -> None:
        """Let questions that have begun leave."""
        self.wait(asyncio.sleep(0))
        self.wait(asyncio.sleep(0))

    def forget(self, answers: deque[asyncio.Task[T]]) -> None:
        """Forget answers that are not wanted any more."""
        if self._closed or not answers:
            return
        for answer in answers:
            answer.cancel()
        self.wait(asyncio.gather(*answers, return_exceptions=True))

    async def ask(self, slot: int, *arguments: Argument) -> Any:
        try:
            return await self._servers.ask(slot, *arguments)
        except ServerError as error:
            raise self._refusal(slot, error) from None

    async def evaluate(self, slot: int, script: Script, keys: list[Argument], *arguments: Argument) -> Any:
        try:
            return await self._servers.evaluate(slot, script, keys, *arguments)
        except ServerError as error:
            raise self._refusal(slot, error) from None

    def _refusal(self, slot: int, error: ServerError) -> StoreError:
        return refusal(error, self._servers.master(slot) or self.place.addresses[0])

    def close(self) -> None:
        if self._closed:
            return
        self.wait(self._servers.close())
        self._closed = True
        self._runner.close()


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer


# -- a Motorcade store


class RedisReader:
    """A `StoreReader` of what nodes share."""

    def __init__(self, url: str) -> None:
        self._asking = Asking(url)
        try:
            self._cells = self._find_store()
        except BaseException:
            self._asking.close()
            raise

    def _find_store(self) -> Cells:
        options = self._asking.place.options
        key = f"{options.prefix}:meta"
        version, cells, importing = self._asking.wait(
            self._asking.ask(slot_of(key), "HMGET", key, "version", "cells", "importing")
        )
        if version is None or cells is None:
            raise StoreError(
                f"there is no store with the prefix {options.prefix!r} on these servers; ?prefix=… names another one"
            )
        if int(version) != VERSION:
            raise StoreError(format_refusal(int(version)))
        if importing is not None:
            raise StoreError("an import into this store was not finished")
        return Cells(options.prefix, int(cells))

    def refresh(self) -> None:
        """Do nothing: every question is answered as of now."""

    def close(self) -> None:
        self._asking.close()

    # -- records

    def record(self, collection: str, key: str) -> bytes | None:
        cell = self._cells.of_record(collection, key)
        where = self._cells.key(cell, f"R:{collection}")
        stored = self._asking.wait(self._asking.ask(self._cells.slot(cell), "HGET", where, key))
        return None if stored is None else stored[TIME.size :]

    # -- streams

    def streams(self) -> list[str]:
        found = [
            self._asking.begin(self._asking.ask(self._cells.slot(cell), "SMEMBERS", self._cells.key(cell, "s")))
            for cell in range(self._cells.count)
        ]
        return sorted(name.decode() for names in self._asking.wait(asyncio.gather(*found)) for name in names)

    def extent(self, stream: str) -> Extent:
        first, last, records, size_bytes = self._look(EXTENT, stream)
        return Extent(first or last + 1, last, records, size_bytes)

    def find(self, stream: str, time: float) -> int:
        return int(self._look(FIND, stream, repr(time)))

    def _look(self, script: Script, stream: str, *arguments: Argument) -> Any:
        cell = self._cells.of(stream)
        keys: list[Argument] = [self._cells.key(cell, f"S:{stream}"), self._cells.key(cell, f"s:{stream}")]
        return self._asking.wait(self._asking.evaluate(self._cells.slot(cell), script, keys, *arguments))

    def pages(self, stream: str, after: int, last: int, rows: int = MAX_ROWS) -> Iterator[StreamPage]:
        extent = self.extent(stream)
        start, last = max(after + 1, extent.floor), min(last, extent.last)
        most = min(rows, PAGE_ROWS)
        limit = rows_for(extent.size_bytes, extent.records, most)
        cell = self._cells.of(stream)
        slot, key = self._cells.slot(cell), self._cells.key(cell, f"S:{stream}")
        coming: deque[asyncio.Task[Any]] = deque()
        page = _Growing(rows)
        try:
            while True:
                while len(coming) < AHEAD and start <= last:
                    end = min(start + limit - 1, last)
                    coming.append(self._asking.begin(self._asking.ask(slot, "XRANGE", key, f"{start}-0", f"{end}-0")))
                    start = end + 1
                if not coming:
                    break
                with _uncollected():
                    found = self._asking.wait(coming.popleft())
                    if found:
                        limit = rows_for(page.add(found), len(found), most)
                    del found
                if page.is_full(limit):
                    yield page.take()
            if page.values:
                yield page.take()
        finally:
            self._asking.forget(coming)

    # -- mailboxes

    def parts(self) -> int:
        return self._cells.count

    def waiting(self, prefix: str, part: int) -> Iterator[MailboxPage]:
        slot = self._cells.slot(part)
        start = prefix.encode()
        seen: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, members = self._asking.wait(
                self._asking.ask(slot, "SSCAN", self._cells.key(part, "o"), cursor, "COUNT", 500)
            )
            owners = [owner for owner in members if owner.startswith(start) and owner not in seen]
            seen.update(owners)
            for index in range(0, len(owners), WINDOW):
                yield self._entries(part, owners[index : index + WINDOW])
            if cursor == b"0":
                return

    def _entries(self, cell: int, owners: list[bytes]) -> MailboxPage:
        page = MailboxPage([], [], [], [], [], [])
        asked = dict.fromkeys(owners, 0)  #: those that may have more, and the position read last
        while asked:
            questions = [self._asking.begin(self._mailbox(cell, owner, after)) for owner, after in asked.items()]
            for owner, reply in zip(list(asked), self._asking.wait(asyncio.gather(*questions)), strict=True):
                _add_entries(page, owner.decode(), reply)
                if len(reply) < 3 * PAGE_ROWS:
                    del asked[owner]
                else:
                    asked[owner] = int(reply[-3])
        return page

    async def _mailbox(self, cell: int, owner: bytes, after: int) -> Any:
        keys: list[Argument] = [self._cells.key(cell, kind).encode() + owner for kind in ("e:", "g:")]
        return await self._asking.evaluate(self._cells.slot(cell), READ, keys, after, PAGE_ROWS, -1)


class _Growing:
    """A page made of several answers: for the server a thousand rows are many, for columns they are few."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size_bytes = 0
        self.offsets: list[int] = []
        self.times: list[float] = []
        self.values: list[bytes] = []

    def add(self, rows: list[Any]) -> int:
        """Return how many bytes these rows have."""
        first, last = int(rows[0][0].partition(b"-")[0]), int(rows[-1][0].partition(b"-")[0])
        if last - first + 1 == len(rows):  # no gaps, as nearly always
            self.offsets += range(first, last + 1)
        else:
            self.offsets += [int(row[0].partition(b"-")[0]) for row in rows]
        fields = [row[1] for row in rows]
        values = [field[3] for field in fields]
        self.times += _times([field[1] for field in fields])
        self.values += values
        size_bytes = sum(map(len, values))
        self._size_bytes += size_bytes
        return size_bytes

    def is_full(self, coming: int) -> bool:
        """Return True if so many more rows, as large as these, would be too many."""
        return bool(self.values) and _is_full(len(self.values), self._size_bytes, coming, self._most)

    def take(self) -> StreamPage:
        page = StreamPage(self.offsets, self.times, self.values)
        self.offsets, self.times, self.values, self._size_bytes = [], [], [], 0
        return page


def _times(texts: list[bytes]) -> list[float]:
    """Parse times, each once: that takes longer than all else about a row, and records that came together share one."""
    if texts[0] == texts[-1]:  # times never go back, so all between are the same
        return [float(texts[0])] * len(texts)
    known = {text: float(text) for text in set(texts)}
    return [known[text] for text in texts]


def _is_full(rows: int, size_bytes: int, coming: int, most: int) -> bool:
    return rows + coming > most or size_bytes * (rows + coming) > PAGE_BYTES * rows


def _add_entries(page: MailboxPage, owner: str, reply: list[bytes]) -> None:
    for index in range(0, len(reply), 3):
        entry = unpack_entry(reply[index + 1])
        page.owners.append(owner)
        page.positions.append(int(reply[index]))
        page.stored.append(entry.stored_at)
        page.expires.append(entry.expires_at)
        page.marks.append(int(reply[index + 2] or 0))
        page.bodies.append(entry.body)


# -- streams of Redis itself


class EntryId(NamedTuple):
    """The id of an entry: milliseconds, usually of the time it was added, and a number among those."""

    milliseconds: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.sequence}"

    @classmethod
    def parse(cls, text: str | bytes) -> EntryId:
        """Parse an id, ValueError if it is none; without a sequence it is the first of its millisecond."""
        written = text.decode() if isinstance(text, bytes) else text
        milliseconds, _, sequence = written.partition("-")
        return cls(int(milliseconds), int(sequence or 0))

    def before(self) -> EntryId:
        """Return the id just below."""
        if self.sequence:
            return EntryId(self.milliseconds, self.sequence - 1)
        return EntryId(self.milliseconds - 1, 2**64 - 1) if self.milliseconds else ORIGIN


#: Below every entry.
ORIGIN: Final = EntryId(0, 0)


class NativeExtent(NamedTuple):
    """A Redis stream at one moment."""

    exists: bool
    first: EntryId | None  #: of the oldest entry; None: there is none
    last: EntryId  #: given last, whether the entry is there or not
    added: int  #: entries, ever
    length: int  #: entries that are there


class NativePage(NamedTuple):
    """Some entries, oldest first."""

    ids: list[bytes]
    fields: list[list[bytes]]  #: name, value, name, value, …


class NativeReader:
    """Reads streams that other programs write."""

    def __init__(self, url: str) -> None:
        self._asking = Asking(url)

    def close(self) -> None:
        self._asking.close()

    def extent(self, key: str) -> NativeExtent:
        try:
            reply = self._asking.wait(self._asking.ask(slot_of(key), "XINFO", "STREAM", key))
        except StoreError as error:
            if "no such key" in str(error):
                return NativeExtent(exists=False, first=None, last=ORIGIN, added=0, length=0)
            raise
        facts = dict(zip(reply[::2], reply[1::2], strict=True))
        first = facts[b"first-entry"]
        return NativeExtent(
            exists=True,
            first=EntryId.parse(first[0]) if first else None,
            last=EntryId.parse(facts[b"last-generated-id"]),
            added=facts[b"entries-added"],
            length=facts[b"length"],
        )

    def stride(self, key: str, after: EntryId, last: EntryId, most: int) -> tuple[EntryId, int]:
        """Return how far up to `most` entries above `after` reach, and how many they are."""
        count = 0
        while count < most:
            page = min(PAGE_ROWS, most - count)
            found, end = self._asking.wait(
                self._asking.evaluate(slot_of(key), STRIDE, [key], str(after), str(last), page)
            )
            count += found
            after = EntryId.parse(end) if end else after
            if found < page:
                break
        return after, count

    def pages(self, key: str, after: EntryId, last: EntryId) -> Iterator[NativePage]:
        """Yield the entries above `after` up to `last`."""
        coming = deque([self._ask(key, str(after), str(last), PAGE_ROWS)])
        page, size_bytes = NativePage([], []), 0
        try:
            while found := self._asking.wait(coming.popleft()):
                size = sum(len(word) for _, words in found for word in words)
                limit = rows_for(size, len(found), PAGE_ROWS)
                coming.append(self._ask(key, found[-1][0].decode(), str(last), limit))
                self._asking.send()  # the server may begin while the caller looks at what is here
                page.ids.extend([row[0] for row in found])
                page.fields.extend([row[1] for row in found])
                size_bytes += size
                if _is_full(len(page.ids), size_bytes, limit, MAX_ROWS):
                    yield page
                    page, size_bytes = NativePage([], []), 0
            if page.ids:
                yield page
        finally:
            self._asking.forget(coming)

    def _ask(self, key: str, after: str, last: str, limit: int) -> asyncio.Task[Any]:
        return self._asking.begin(self._asking.ask(slot_of(key), "XRANGE", key, f"({after}", last, "COUNT", limit))
