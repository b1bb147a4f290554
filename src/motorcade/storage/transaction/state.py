"""The writer's state between transactions: bounded caches, totals, and the attached nodes."""

from __future__ import annotations

from typing import Generic, TypeVar

from motorcade.storage import tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.files import RocksTables
from motorcade.storage.ports import FeedEnd, Fence
from motorcade.storage.tables import Head

#: Heads in the cache: about 300 bytes each.
MAX_HEADS = 65_536

#: Counters of blobs in the cache, and shared messages.
MAX_BLOBINFO = 4_096
MAX_MESSAGES = 4_096

#: Mailboxes whose rows were read lately, and rows of each that are kept: acknowledging them needs no second look.
MAX_SEEN = 1_024
MAX_SEEN_ROWS = 64

#: Bytes: of what was written last, up to twice as much, the rows of entries are kept in mind (about 10 MiB at most).
#: Who is connected acknowledges at once, and looking a row up takes longer than removing it.
MAX_KNOWN = 2**20

V = TypeVar("V")
K = TypeVar("K")


class Recent(Generic[K, V]):
    """A bounded cache in two halves: when the young half is full, the old one goes. Finding costs one lookup.

    The bound may be exceeded by what one transaction touches.
    """

    __slots__ = ("half", "old", "young")

    def __init__(self, bound: int) -> None:
        self.half = max(1, bound // 2)
        self.young: dict[K, V] = {}
        self.old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def peek(self, key: K) -> V | None:
        """Find a value for another thread, and change nothing."""
        return self.young.get(key) or self.old.get(key)

    def put(self, key: K, value: V) -> None:
        self.young[key] = value

    def drop(self, key: K, value: V) -> None:
        """Forget a key if it has this very value."""
        for half in (self.young, self.old):
            if half.get(key) is value:
                del half[key]

    def trim(self) -> None:
        """Keep to the bound; not while a transaction relies on what it has changed being here."""
        if len(self.young) >= self.half:
            self.old = self.young
            self.young = {}

    def clear(self) -> None:
        self.young = {}
        self.old = {}


class BlobInfo:
    """The holders of a blob, and how long it is kept."""

    __slots__ = ("holders", "keep_until", "size")

    def __init__(self, holders: int, keep_until: float, size: int) -> None:
        self.holders = holders
        self.keep_until = keep_until
        self.size = size


class SharedMessage:
    """The known part of a shared message: all but its body."""

    __slots__ = ("digest", "holders", "key", "number", "size_bytes")

    def __init__(self, number: int, holders: int, key: bytes, digest: bytes, size_bytes: int) -> None:
        self.number = number
        self.holders = holders
        self.key = key
        self.digest = digest  #: of its blob; empty: none
        self.size_bytes = size_bytes  #: that go with it, but for the blob


class StreamHead:
    """Size and ends of a stream."""

    __slots__ = ("first", "last", "records", "size_bytes", "time")

    def __init__(self, first: int = 1, last: int = 0, records: int = 0, size_bytes: int = 0, time: float = 0.0) -> None:
        self.first = first
        self.last = last
        self.records = records
        self.size_bytes = size_bytes
        self.time = time


class WriterState:
    """The writer's state between transactions."""

    def __init__(self, max_heads: int = MAX_HEADS) -> None:
        self.heads: Recent[str, Head] = Recent(max_heads)
        self.blobs: Recent[bytes, BlobInfo] = Recent(MAX_BLOBINFO)
        self.messages: Recent[int, SharedMessage] = Recent(MAX_MESSAGES)
        #: Rows that readers found, oldest first. By head, not by owner: who is forgotten gets another head, and what
        #: was read before tells nothing of the new entries. Only the event loop's thread puts, and keeps the bound.
        self.seen: Recent[Head, list[tuple[int, bytes]]] = Recent(MAX_SEEN)
        #: Rows of entries that were written lately, by their keys; None: removed. The young ones count first.
        self.known: dict[bytes, bytes | None] = {}
        self.known_before: dict[bytes, bytes | None] = {}
        self._known_bytes = 0
        self.deltas = Deltas()
        self.attached: dict[str, tuple[str, Fence]] = {}  #: home: member; as many as are attached
        self.claims: dict[str, dict[int, str]] = {}  #: owner, position: who has claimed it; as `attached`
        self.entries = 0
        self.blob_count = 0
        self.blob_bytes = 0
        self.records = 0
        self.shared = 0
        self.floor = 0  #: see `tables.Totals`
        self.feed = 0  #: number of the last note
        self._serial = 0
        self._transactions = 0

    def load(self, opened: RocksTables, boot: int | None = None) -> None:
        """Begin; or, without `boot`, begin again with tables that were opened again."""
        if boot is not None:
            # 2^20 openings and 2^32 numbers in each stay below what a double can count.
            self._serial = boot << 32
            self.claims.clear()
        self.deltas.load(opened)
        self.forget(opened)

    def forget(self, opened: RocksTables) -> None:
        """Empty the caches, in which nothing is certain; the deltas and the tables are."""
        self.heads.clear()
        self.blobs.clear()
        self.messages.clear()
        self.known, self.known_before, self._known_bytes = {}, {}, 0
        totals = tables.parse_totals(self.deltas.get(opened, tables.TOTALS_DELTA))
        self.entries, self.blob_count, self.blob_bytes, self.records, self.shared, self.floor = totals
        self.feed = feed_end(opened).number

    def unclaim(self, owner: str, position: int) -> None:
        """End a claim, if there is one."""
        claims = self.claims.get(owner)
        if claims is not None:
            claims.pop(position, None)
            if not claims:
                del self.claims[owner]

    def attach_again(self, detached: dict[str, tuple[str, Fence]] | None) -> None:
        """Take back what a transaction has detached that was not written."""
        if detached:
            self.attached.update(detached)

    def totals(self) -> bytes:
        return tables.TOTALS.pack(self.entries, self.blob_count, self.blob_bytes, self.records, self.shared, self.floor)

    def keep_in_mind(self, rows: dict[bytes, bytes | None], size_bytes: int) -> None:
        """Keep rows that have just been written, in a transaction of so many bytes."""
        self.known.update(rows)
        self._known_bytes += size_bytes
        if self._known_bytes > MAX_KNOWN:
            self.known_before, self.known, self._known_bytes = self.known, {}, 0

    def next_transaction(self) -> int:
        """Keep the caches to their bounds, and return the number of the transaction that begins."""
        heads, blobs, messages = self.heads, self.blobs, self.messages
        if len(heads.young) >= heads.half:
            heads.trim()
        if len(blobs.young) >= blobs.half:
            blobs.trim()
        if len(messages.young) >= messages.half:
            messages.trim()
        self._transactions += 1
        return self._transactions

    def serial(self) -> int:
        """Return a number that was never given before, in any run of this store."""
        self._serial += 1
        return self._serial


def feed_end(opened: RocksTables) -> FeedEnd:
    """Return the last note of the feed."""
    cursor = opened.feed.iter()
    cursor.seek_to_last()
    if not cursor.valid():
        cursor.status()  # see `files.scan`
        return FeedEnd()
    return FeedEnd(tables.NUMBER.unpack(cursor.key())[0], cursor.value()[: tables.NONCE_SIZE])
