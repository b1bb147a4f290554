"""The shared engine, written down and filled.

Nothing lists the owners whose mailboxes are empty, or the leases that were ever given: reading goes over all keys of
the store's prefix, server by server. It may go on beside nodes that write. Then each part of a mailbox is of one
moment, but the whole is not: what is appended or acknowledged meanwhile is in the file or not.

Filling goes through the writer, by operations of its own (lua/load.lua), so it survives failovers like every write. It
cannot be undone. A store that is being filled says so in its `meta`, and no node opens it until that is over.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from motorcade.redis.resp import ServerAddress, ServerError
from motorcade.redis.servers import Purpose, refusal
from motorcade.redis.slots import slot_of
from motorcade.storage.due import DUE, due_time, due_value
from motorcade.storage.homes import home_of_owner
from motorcade.storage.ports import TOKEN_MEMORY, StoreDamagedError
from motorcade.storage.redis import Core, RedisStore, blob_operation, due_operation, put_operation
from motorcade.storage.redis_format import (
    BY_DIGEST,
    DROPPABLE,
    HEADER,
    TIME,
    StoredState,
    raw,
    unpack_entry,
    unpack_state,
)
from motorcade.storage.redis_scripts import FILL, READ
from motorcade.storage.redis_writer import MAX_BYTES, MAX_WEIGHT, Operation
from motorcade.storage.transfer import (
    INLINE,
    PART_ROWS,
    Content,
    ExportedBlob,
    ExportedEntry,
    ExportedFloor,
    ExportedLease,
    ExportedMailbox,
    ExportedRecords,
    ExportedStream,
    ExportedTokens,
)

#: Keys asked for at once, and keys read side by side.
SCAN: Final = 1000
WINDOW: Final = 32


class Keys:
    """All keys of a store, each once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._base = f"{core.cells.prefix}:{{".encode()

    async def pages(self, kinds: Sequence[bytes] = ()) -> AsyncIterator[list[tuple[int, bytes, bytes]]]:
        """Yield pages of (cell, kind, name), of the kinds asked for."""
        seen: set[bytes] = set()
        for address in self._core.servers.topology.all_masters():
            cursor = b"0"
            while True:
                cursor, keys = await self._scan(address, cursor)
                fresh = [key for key in keys if key not in seen]
                found = [place for place in map(self._place, fresh) if place is not None and place[1] in kinds]
                seen.update(key for key in fresh if (self._place(key) or (0, b"", b""))[1] in kinds)
                if found:
                    yield found
                if cursor == b"0":
                    break

    async def _scan(self, address: ServerAddress, cursor: bytes) -> tuple[bytes, list[bytes]]:
        pattern = b"".join(b"\\" + bytes((byte,)) if byte in b"\\*?[]" else bytes((byte,)) for byte in self._base)
        try:
            connection = await self._core.servers.connection(address, Purpose.READ)
            await connection.room()
            following, keys = await connection.call("SCAN", cursor, "MATCH", pattern + b"*", "COUNT", SCAN)
        except ServerError as error:
            raise refusal(error, address) from None
        return following, keys

    def _place(self, key: bytes) -> tuple[int, bytes, bytes] | None:
        """Return cell, kind and name; `e:`, `R:` and so on, or a kind that has no names."""
        cell, found, rest = key[len(self._base) :].partition(b"}:")
        if not found or not cell.isdigit():
            return None
        kind, colon, name = rest.partition(b":")
        return int(cell), kind + colon, name


class RedisSource:
    """The contents of an open store."""

    def __init__(self, store: RedisStore) -> None:
        self._core = store.core
        self.engine = "redis+cluster" if self._core.servers.clustered else "redis"
        self._written: set[bytes] = set()

    async def contents(self, now: float) -> AsyncIterator[Content]:
        highest, floor, blobs = 0, 0, list[bytes]()
        async for page in Keys(self._core).pages((b"e:", b"t0:", b"t1:", b"R:", b"D", b"s:", b"b:", b"f:", b"f", b"p")):
            for start in range(0, len(page), WINDOW):
                async for content in self._some(page[start : start + WINDOW], now):
                    yield content
            blobs += [name for _, kind, name in page if kind == b"b:"]
            for cell, kind, name in page:
                if kind in {b"f:", b"f"}:
                    highest = max(highest, int(await self._core.ask(cell, "GET", kind.decode(), name) or 0))
                if kind == b"p":
                    floor = max(floor, int(await self._core.ask(cell, "GET", "p")))
        for digest in blobs:
            if digest not in self._written:
                blob = await self._blob(digest, now)
                if blob is not None and blob.keep_until:
                    yield blob
        yield ExportedFloor(highest, floor)

    async def _some(self, places: list[tuple[int, bytes, bytes]], now: float) -> AsyncIterator[Content]:
        """Yield what some keys hold; the short ones are read side by side."""
        owners = [(cell, name.decode()) for cell, kind, name in places if kind == b"e:"]
        beginnings = await asyncio.gather(*(self._beginning(cell, owner, now) for cell, owner in owners))
        for (cell, owner), (state, rows) in zip(owners, beginnings, strict=True):
            if state is not None:
                async for content in self._mailbox(cell, owner, unpack_state(state), rows, now):
                    yield content
        known = [(cell, kind, name) for cell, kind, name in places if kind in {b"t0:", b"t1:"}]
        for tokens in await asyncio.gather(*(self._tokens(cell, kind, name, now) for cell, kind, name in known)):
            if tokens.tokens:
                yield tokens
        for cell, kind, name in places:
            match kind:
                case b"R:":
                    async for records in self._records(cell, name, now):
                        yield records
                case b"D":
                    async for records in self._due(cell):
                        yield records
                case b"s:":
                    async for stream in self._stream(cell, name):
                        yield stream
                case b"f:":
                    lease = await self._lease(cell, name, now)
                    if lease is not None:
                        yield lease

    async def _beginning(self, cell: int, owner: str, now: float) -> tuple[bytes | None, list[bytes]]:
        """Return the state of a mailbox (None: format 2 only knows where it is attached), and its first part."""
        state = await self._core.ask(cell, "HGET", "e:", owner, "s")
        return state, await self._core.evaluate(cell, READ, "eg", owner, 0, PART_ROWS, now)

    async def _mailbox(
        self, cell: int, owner: str, state: StoredState, rows: list[bytes], now: float
    ) -> AsyncIterator[Content]:
        last, parts = state.last, 0
        while rows or not parts:
            items, blobs = await self._items(cell, owner, rows, now)
            for blob in blobs:
                yield blob
            # What came since the beginning was read is in the file, so its position must not be given again.
            last = max([last, *(item.position for item in items[-1:])])
            yield ExportedMailbox(owner, last, items, state.begun + 1, state.spare)
            parts += 1
            if len(rows) < 3 * PART_ROWS:
                return
            rows = await self._core.evaluate(cell, READ, "eg", owner, int(rows[-3]), PART_ROWS, now)

    async def _items(
        self, cell: int, owner: str, rows: list[bytes], now: float
    ) -> tuple[list[ExportedEntry], list[ExportedBlob]]:
        """Return a part of a mailbox, and the blobs that have to stand before it."""
        entries = [(int(rows[at]), rows[at + 1], int(rows[at + 2] or 0)) for at in range(0, len(rows), 3)]
        wanted = {unpack_entry(value).digest for _, value, _ in entries} - {b""} - self._written
        found = dict(zip(wanted, await asyncio.gather(*(self._blob(digest, now) for digest in wanted)), strict=True))
        items: list[ExportedEntry] = []
        blobs: list[ExportedBlob] = []
        for position, value, mark in entries:
            entry, flags = unpack_entry(value), HEADER.unpack_from(value)[3]
            payload, digest, size = entry.payload, entry.digest, entry.size_bytes - len(entry.body)
            if digest and digest not in self._written:
                blob = found[digest]
                if blob is None:
                    if not await self._core.ask(cell, "HEXISTS", "e:", owner, position):
                        continue  # acknowledged meanwhile, and its payload went with it
                    raise StoreDamagedError(f"mailbox {owner!r}: the payload of entry {position} is missing")
                if size <= INLINE:
                    payload, digest = blob.data, b""
                else:
                    self._written.add(digest)
                    blobs.append(blob)
            times, droppable = (entry.stored_at, entry.expires_at), bool(flags & DROPPABLE)
            items.append(ExportedEntry(position, *times, mark, droppable, entry.key, entry.body, payload, digest, size))
        return items, blobs

    async def _blob(self, digest: bytes, now: float) -> ExportedBlob | None:
        value = await self._core.ask(self._core.cells.of(digest), "GET", "b:", digest)
        if value is None:
            return None
        (keep_until,) = TIME.unpack_from(value)
        return ExportedBlob(value[TIME.size :], keep_until if now < keep_until else 0.0)

    async def _tokens(self, cell: int, kind: bytes, name: bytes, now: float) -> ExportedTokens:
        stored = await self._core.ask(cell, "HGETALL", kind.decode(), name)
        found: list[tuple[bytes, int, float]] = []
        for token, value in zip(stored[::2], stored[1::2], strict=True):
            position, _, time = value.partition(b":")
            if token and now < float(time) + TOKEN_MEMORY:
                found.append((token, int(position), float(time) + TOKEN_MEMORY))
        return ExportedTokens(name.decode(), found)

    async def _records(self, cell: int, collection: bytes, now: float) -> AsyncIterator[Content]:
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, page = await self._core.ask(cell, "HSCAN", "R:", collection, cursor, "COUNT", PART_ROWS)
            found = []
            for key, stored in zip(page[::2], page[1::2], strict=True):
                (until,) = TIME.unpack_from(stored)
                if key not in seen and not 0 < until <= now:
                    found.append((key.decode(), stored[TIME.size :], until))
                seen.add(key)
            if found:
                yield ExportedRecords(collection.decode(), found)
            if cursor == b"0":
                return

    async def _due(self, cell: int) -> AsyncIterator[Content]:
        """Due times, in the form of records that other engines give them."""
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, page = await self._core.ask(cell, "ZSCAN", "D", b"", cursor, "COUNT", PART_ROWS)
            times = [(home, at) for home, at in zip(page[::2], page[1::2], strict=True) if home not in seen]
            seen.update(home for home, _ in times)
            if times:
                yield ExportedRecords(DUE, [(home.decode(), due_value(float(at)), 0.0) for home, at in times])
            if cursor == b"0":
                return

    async def _stream(self, cell: int, name: bytes) -> AsyncIterator[Content]:
        last, time = await self._core.ask(cell, "HMGET", "s:", name, "last", "time")
        start, parts = b"-", 0
        while True:
            rows = await self._core.ask(cell, "XRANGE", "S:", name, start, "+", "COUNT", PART_ROWS)
            records = [(int(key.split(b"-")[0]), float(fields[1]), bytes(fields[3])) for key, fields in rows]
            # As with mailboxes: what was appended meanwhile counts too.
            head = (records[-1][0], records[-1][1]) if records else (0, 0.0)
            if records or not parts:
                yield ExportedStream(name.decode(), max(int(last), head[0]), max(float(time), head[1]), records)
            if len(rows) < PART_ROWS:
                return
            start, parts = b"(" + rows[-1][0], parts + 1

    async def _lease(self, cell: int, name: bytes, now: float) -> ExportedLease | None:
        left = await self._core.ask(cell, "PTTL", "l:", name)
        token = await self._core.ask(cell, "HGET", "l:", name, "token")
        return ExportedLease(name.decode(), int(token), now + left / 1000) if left > 0 and token is not None else None


async def summary(store: RedisStore) -> tuple[int, dict[str, int], dict[str, int]]:
    """Count mailboxes with entries; records by collection; records by stream."""
    core = store.core
    records: Counter[str] = Counter()
    streams: dict[str, int] = {}
    mailboxes = sum(await core.everywhere("SCARD", "o"))
    async for page in Keys(core).pages((b"R:", b"D", b"S:")):
        for cell, kind, name in page:
            if kind == b"D":
                records[DUE] += await core.ask(cell, "ZCARD", "D")
            elif kind == b"R:":
                records[name.decode()] += await core.ask(cell, "HLEN", "R:", name)
            else:
                streams[name.decode()] = await core.ask(cell, "XLEN", "S:", name)
    return mailboxes, dict(records), streams


class RedisTarget:
    """An open store without contents, without another writer."""

    def __init__(self, store: RedisStore, now: float) -> None:
        self._core = store.core
        self._script = self._core.writer.script
        self._core.writer.script = FILL
        self._now = now
        self._hold = self._core.next_hold()
        self._meta = f"{self._core.cells.prefix}:meta"
        self._marked = False
        self._blobs: list[Operation] = []
        self._held: list[bytes] = []  #: digests
        self._others: list[Operation] = []
        self._weight = 0

    async def load(self, content: Content) -> None:
        if not self._marked:
            await self._core.servers.ask(slot_of(self._meta), "HSET", self._meta, "importing", "1")
            self._marked = True
        match content:
            case ExportedBlob():
                self._blob(content)
            case ExportedMailbox():
                self._mailbox(content)
            case ExportedTokens():
                rows = [(raw(token), position, until - TOKEN_MEMORY) for token, position, until in content.tokens]
                self._add("load_tokens", home_of_owner(content.owner), content.owner, (rows,), len(rows))
            case ExportedRecords():
                for key, value, until in content.records:
                    if content.collection == DUE:
                        self._put(due_operation(self._core, key, due_time(value)))
                        continue
                    self._put(put_operation(self._core, content.collection, key, value, until))
            case ExportedStream():
                rows = [(offset, time, raw(value)) for offset, time, value in content.records]  # type: ignore[misc]
                size_bytes = sum(len(value) for _, _, value in content.records)
                words = (content.last, content.time, rows)
                self._add("load_stream", content.name, content.name, words, len(rows), size_bytes)
            case ExportedLease():
                left = max(int((content.until - self._now) * 1000), 1)
                self._add("load_lease", content.name, content.name, (content.token, left))
            case ExportedFloor():
                for cell in range(self._core.cells.count):
                    self._put(Operation(("load_floor", cell, content.token, content.position)))
        if self._weight > MAX_WEIGHT * WINDOW or sum(operation.size_bytes for operation in self._blobs) > MAX_BYTES:
            await self._write()

    def _blob(self, blob: ExportedBlob) -> None:
        digest = hashlib.sha256(blob.data).digest()
        # It has no end of its own: the sweep finds it when nothing refers to it any more and its time has come.
        self._blobs.append(blob_operation(self._core, digest, blob.data, blob.keep_until, 0.0, self._hold))
        self._held.append(digest)

    def _mailbox(self, part: ExportedMailbox) -> None:
        rows = []
        size_bytes = 0
        for item in part.entries:
            flags = (DROPPABLE if item.droppable else 0) | (BY_DIGEST if item.digest else 0)
            size = len(item.body) + item.size
            head = HEADER.pack(item.stored_at, item.expires_at, size, flags, len(item.key), len(item.body))
            entry = b"".join((head, item.key, item.body, item.digest or item.payload))
            tail = (item.expires_at, size, flags, raw(item.key), raw(item.digest), item.mark)
            rows.append((item.position, raw(entry), *tail))
            size_bytes += len(entry)
        words = (part.last, rows, part.generation - 1, part.spare)
        self._add("load_mailbox", home_of_owner(part.owner), part.owner, words, len(rows), size_bytes)

    def _add(self, name: str, home: str, of: str, words: tuple[Any, ...], weight: int = 1, size_bytes: int = 0) -> None:
        self._put(Operation((name, self._core.cells.of(home), of, *words), max(weight, 1), size_bytes))

    def _put(self, operation: Operation) -> None:
        self._others.append(operation)
        self._weight += operation.weight

    async def _write(self) -> None:
        """Write blobs first: entries that refer to them must find them."""
        blobs, held, others = self._blobs, self._held, self._others
        self._blobs, self._held, self._others, self._weight = [], [], [], 0
        if blobs:
            await self._core.writer.write(blobs)
        if others:
            await self._core.writer.write(others)
        for digest in held:
            self._core.writer.later(Operation(("unhold", self._core.cells.of(digest), self._hold, [raw(digest)])))

    async def finish(self) -> None:
        await self._write()
        self._core.writer.script = self._script
        await self._core.servers.ask(slot_of(self._meta), "HDEL", self._meta, "importing")
