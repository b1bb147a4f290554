"""The five storage ports: what every feature that must outlive a process is built from.

    mailboxes     per owner: ordered entries, an optional compaction key, acknowledged one by one
    blobs         payloads by content hash, stored once, gone when nothing refers to them
    records       small named collections
    streams       append-only, offsets, retention
    coordination  who is attached where, leases with fencing tokens, wake-ups

Each engine serves all five natively (`memory`, `rocks`, `redis`); one contract suite per port runs over all of them.

Rule 1: a method that writes returns when what it wrote is as durable as the store's level promises. What is written
        between two awaits of one task may share a commit.
Rule 2: `batch()` collects writes that belong together. Embedded engines apply a batch as a whole or not at all. Redis
        applies it cell by cell, in the order of the calls: a crash in between may leave the beginning of a batch, and
        whoever repeats it gives its appends the same `token`, so that nothing is appended twice.
Rule 3: readers never see what has expired, whether or not a sweep has removed it yet.
Rule 4: reads see every write that has returned.
Rule 5: time comes in as an argument, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Protocol

from motorcade.core.errors import MotorcadeError


class Durability(StrEnum):
    """How much a write survives before it counts as done."""

    FAST = auto()  #: a crash of the process
    SAFE = auto()  #: a crash of the machine (embedded: one sync per group; Redis: received by a replica)
    STRICT = auto()  #: Redis: also on the master's disk; embedded: the same as SAFE


class StoreError(MotorcadeError):
    """The store could not do what was asked; nothing of the failed batch counts as written."""


class StoreFullError(StoreError):
    """No room, or the files cannot be written; the store takes no writes until that is mended."""


class StoreDamagedError(StoreError):
    """The files of the store are damaged; the message names the file and what to do."""


# -- mailboxes


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry to append."""

    body: bytes  #: small, per entry; its meaning is the feature's own
    payload: bytes = b""  #: stored once however many owners get it
    key: bytes = b""  #: replaces the owner's earlier entry of the same key; empty: replaces nothing
    expires_at: float = 0.0  #: 0: never
    droppable: bool = False  #: goes before others when the mailbox overflows (QoS 0)
    token: bytes = b""  #: an append with the same token to the same owner within an hour is done once; empty: always


@dataclass(frozen=True, slots=True)
class Bound:
    """How large a mailbox may grow (0: any). What does not fit pushes out the oldest droppable entry, or the oldest."""

    entries: int = 0
    octets: int = 0  #: of bodies and payloads


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of one owner's copy."""

    owner: str
    position: int  #: grows with every append to this owner, from 1; never used again. 0: it was pushed out itself
    replaced: int = 0  #: position of the entry with the same key that it replaced
    dropped: tuple[int, ...] = ()  #: positions pushed out by the bound
    repeated: bool = False  #: the token was known: nothing was appended, `position` is the first append's
    attached: str = ""  #: node the owner is attached to now (see `Coordination`)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is in a mailbox."""

    position: int
    body: bytes
    payload: bytes
    key: bytes
    stored_at: float
    expires_at: float
    mark: int  #: 0, or what `mark` set


@dataclass(frozen=True, slots=True)
class MailboxInfo:
    """A mailbox at one moment."""

    entries: int
    octets: int
    first: int  #: position of the oldest entry; 0: empty
    last: int  #: position given last, whether the entry is still there or not


@dataclass(frozen=True, slots=True)
class Swept:
    """One bounded step of a sweep."""

    removed: int
    octets: int  #: given back
    cursor: bytes | None  #: where to go on; None: done


class Mailboxes(Protocol):
    """Ordered entries per owner."""

    async def append(self, owners: Sequence[str], draft: Draft, now: float, bound: Bound = ...) -> list[Appended]:
        """Append to one or many owners, one answer per owner in the same order."""

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        """Up to `limit` entries with a position above `after`, oldest first."""

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        """Remove entries; how many were there. May ride on the next commit: after a crash they can be there again."""

    async def mark(self, owner: str, position: int, mark: int) -> bool:
        """Note a small number (0 to 255) with an entry, durably; False if the entry is gone."""

    async def info(self, owner: str) -> MailboxInfo:
        """Size and ends of a mailbox."""

    async def clear(self, owner: str) -> int:
        """Remove all entries; how many. Positions go on from where they were."""

    def owners(self) -> AsyncIterator[str]:
        """All owners with entries, in no particular order."""


# -- blobs


class Blobs(Protocol):
    """Payloads by content."""

    async def put(self, data: bytes, now: float, keep_until: float = 0.0) -> bytes:
        """Store once; the SHA-256 digest. Kept while an entry refers to it and at least until `keep_until`."""

    async def get(self, digest: bytes, now: float) -> bytes | None:
        """The data, or None."""

    async def count(self) -> tuple[int, int]:
        """(blobs, bytes) stored."""


# -- records


class Records(Protocol):
    """Small named collections. Collections have short fixed names; keys are text without U+0000."""

    async def put(self, collection: str, key: str, value: bytes, expires_at: float = 0.0) -> None:
        """Write one record."""

    async def get(self, collection: str, key: str, now: float) -> bytes | None:
        """Read one record."""

    async def delete(self, collection: str, key: str) -> bool:
        """Remove one record; False if it was not there."""

    def scan(self, collection: str, now: float, prefix: str = "") -> AsyncIterator[tuple[str, bytes]]:
        """All records whose key begins with `prefix`, in any order; changes meanwhile may or may not be seen."""


# -- streams


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One record of a stream."""

    offset: int  #: grows, from 1; gaps are allowed
    time: float  #: when it was appended, seconds since the epoch
    value: bytes


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream at one moment."""

    first: int  #: offset of the oldest record; 0: none
    last: int  #: offset given last
    records: int
    octets: int


class Streams(Protocol):
    """Append-only sequences."""

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        """Append; the offsets."""

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        """Up to `limit` records with an offset above `after`, oldest first."""

    async def find(self, stream: str, time: float) -> int:
        """The offset after which records of `time` and later begin; reading after it gives these."""

    async def info(self, stream: str) -> StreamInfo:
        """Size and ends of a stream."""

    async def trim(
        self, stream: str, before: float = 0.0, octets: int = 0, records: int = 0, budget: int = 1000
    ) -> Swept:
        """Remove what is older than `before`, and the oldest above so many bytes or records (0: any), step by step."""

    async def drop(self, stream: str) -> None:
        """Remove a stream."""

    async def names(self) -> list[str]:
        """All streams."""


# -- coordination


@dataclass(frozen=True, slots=True)
class Attached:
    """The owner is attached to the caller's node now."""

    epoch: int  #: grows with every attach of this owner
    previous: str  #: node it was attached to; empty: none
    pending: bool  #: its mailbox is not empty


@dataclass(frozen=True, slots=True)
class Lease:
    """A right that ends by itself."""

    name: str
    token: int  #: fencing token: grows with every acquisition of this name


class Coordination(Protocol):
    """Who is where, and who leads.

    No lost wake-up: `attach` and `append` to the same owner are serialised. `append` answers where the owner is
    attached, `attach` answers whether something is pending, so at least one of the two sees the other.
    """

    async def attach(self, owner: str, node: str) -> Attached:
        """Claim an owner for a node."""

    async def detach(self, owner: str, epoch: int) -> bool:
        """Give an owner up; an old epoch does nothing and answers False."""

    async def acquire(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:
        """Take a lease that nobody holds, or that has run out; None if somebody does."""

    async def renew(self, lease: Lease, ttl: float, now: float) -> bool:
        """Hold on to a lease; False if it is no longer ours."""

    async def release(self, lease: Lease) -> bool:
        """Give a lease back; False if it was no longer ours."""

    async def notify(self, node: str, data: bytes) -> None:
        """Wake a node up; best effort: what it should look at lies in the store."""

    def listen(self, node: str) -> AsyncIterator[bytes]:
        """Wake-ups for a node, from now on."""


# -- the store


class Batch(Protocol):
    """Writes that belong together (rule 2)."""

    def append(self, owners: Sequence[str], draft: Draft, now: float, bound: Bound = ...) -> None: ...

    def acknowledge(self, owner: str, positions: Iterable[int]) -> None: ...

    def mark(self, owner: str, position: int, mark: int) -> None: ...

    def put(self, collection: str, key: str, value: bytes, expires_at: float = 0.0) -> None: ...

    def delete(self, collection: str, key: str) -> None: ...

    def stream(self, stream: str, values: Sequence[bytes], now: float) -> None: ...

    async def commit(self) -> list[Appended]:
        """Apply; the answers of all appends in order, one per owner."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The store as a whole, at one moment."""

    engine: str
    entries: int
    blobs: int
    blob_octets: int
    records: int
    commits: int  #: groups committed since it was opened
    writes: int  #: batches written since it was opened
    queued: int  #: batches waiting for the writer now
    disk_octets: int  #: 0 where that cannot be known
    swept: int  #: entries, records and blobs removed by sweeps since it was opened
    full: bool  #: takes no writes now


class Store(Protocol):
    """One engine."""

    mailboxes: Mailboxes
    blobs: Blobs
    records: Records
    streams: Streams
    coordination: Coordination

    async def open(self) -> None:
        """Open or create. `StoreError` says what is wrong and what to do."""

    async def close(self) -> None:
        """Commit what waits and let go of everything."""

    def batch(self) -> Batch:
        """Collect writes that belong together."""

    async def sweep(self, now: float, budget: int, cursor: bytes = b"") -> Swept:
        """Remove what has expired and blobs nothing refers to, at most `budget` items."""

    async def figures(self) -> StoreFigures:
        """Counts and sizes."""

    async def check(self) -> list[str]:
        """What is wrong inside; empty: nothing. Changes nothing."""
