"""The storage ports: what every feature that must outlive a process is built from.

    mailboxes     per owner: ordered entries, an optional compaction key, acknowledged one by one
    blobs         payloads by content hash, stored once, gone when nothing refers to them
    records       small named collections
    streams       append-only, offsets, retention
    feeds         what has changed, for those who keep a copy of it in memory
    coordination  who is attached where, fences, leases with fencing tokens, wake-ups

Each engine serves all of them natively (`memory`, `rocks`, `redis`); one contract suite per port runs over all engines.

Words. *Home*: what a name belongs to, a client, a queue (`homes`); on Redis everything of a home lies in one cell.
*Decision*: a write that may come only from the one in charge of a home, such as a session record or a subscription: its
batch has a fence. *Fact*: what is true from any writer, such as an acknowledgement: it has none. *Generation*: of a
mailbox, another one whenever it is made again.

Rule 1: a method that writes returns when what it wrote is as durable as the store's level promises. What is written
        between two awaits of one task may share a commit.
Rule 2: a `Batch` has writes that belong together. Embedded engines apply a batch as a whole or not at all. Redis
        applies it cell by cell, in the order of the calls: a crash in between may leave the beginning of a batch, and
        a caller that repeats it gives its appends the same `token`, so that nothing is appended twice.
Rule 3: readers never see what has expired, whether or not a sweep has removed it yet.
Rule 4: reads see every write that has returned.
Rule 5: time comes in as an argument, in seconds since the epoch. What has an `expires_at` has expired when
        `now >= expires_at`. Times come back to the millisecond at least. (Leases: see `Coordination`.)
Rule 6: writes to the same owner, record or stream are applied in the order in which their calls began, whether or not
        the earlier ones were awaited: a caller may have many in the air and still keep its order.
Rule 7: names (owners, streams, nodes, leases, keys of records) are any non-empty text without U+0000, up to 65 535
        bytes of UTF-8. A store that is closed answers every call with `StoreError`; closing it again does nothing.
Rule 8: conditions of a batch (`fence`, `take`, `put` with `expect`) are checked before its first write, against what is
        stored before it. If one does not hold, this batch is refused, with a `certain` error, and no other one of its
        group.
        On Redis, what the batch writes in the cell of the condition comes first and together with the check; the rest
        follows, as in rule 2.
Rule 9: positions of an owner never restart, even if it is forgotten. So a late acknowledgement or mark never meets
        another entry than its own. On Redis they do not restart either when a server takes over, or starts again, which
        may have forgotten some: it goes on far above. Positions stay below 2^48.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from itertools import repeat
from typing import Final, Protocol, overload

from msgspec import Struct

from motorcade.commit import Commit
from motorcade.core.errors import StoreAwayError as StoreAwayError  # noqa: PLC0414 - likewise
from motorcade.core.errors import StoreConflictError as StoreConflictError  # noqa: PLC0414 - likewise
from motorcade.core.errors import StoreDamagedError as StoreDamagedError  # noqa: PLC0414 - part of the ports
from motorcade.core.errors import StoreError as StoreError  # noqa: PLC0414 - likewise
from motorcade.core.errors import StoreFencedError as StoreFencedError  # noqa: PLC0414 - likewise
from motorcade.core.errors import StoreFullError as StoreFullError  # noqa: PLC0414 - likewise
from motorcade.core.errors import StoreRefusedError as StoreRefusedError  # noqa: PLC0414 - likewise


class Durability(StrEnum):
    """The failures that a write survives before it counts as done."""

    FAST = auto()  #: a crash of the process
    SAFE = auto()  #: a crash of the machine (embedded: one sync per group; Redis: received by a replica)
    STRICT = auto()  #: Redis: also on the master's disk; embedded: the same as SAFE


# -- mailboxes
#
# What comes by the hundred in one write (drafts, answers, entries) are structs, since making a frozen dataclass takes
# twenty times as long. They hold nothing that could lead back to them, so the collector need not look at them.


class Draft(Struct, frozen=True, gc=False):
    """An entry to append."""

    body: bytes  #: small, per entry; its meaning is the feature's own
    payload: bytes = b""  #: stored once however many owners get it
    key: bytes = b""  #: replaces the owner's earlier entry of the same key; empty: replaces nothing
    expires_at: float = 0.0  #: 0: never
    droppable: bool = False  #: goes before others when the mailbox overflows (QoS 0)
    #: An append with the same token to the same owner is done once within an hour (of the `now` of the first), even if
    #: the entry is gone meanwhile; empty: always.
    token: bytes = b""
    #: Only for owners whose home is attached to no member: of the others the answer tells who has them, and nothing is
    #: changed (QoS 0: that member gives it to the client, or it is for none).
    away: bool = False


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of a mailbox (0: any). What does not fit pushes out the oldest droppable entry, or the oldest.

    Entries go one after the other until the rest fits, after the entry of the same key has been replaced. The new entry
    may be the one to go: a droppable one that finds only others that are not, or one that finds only spared ones.
    One that is larger than `size_bytes` all by itself pushes out nothing else. Entries that have expired count, and
    go in the same order, until they are swept.

    `refuse`: what does not fit is refused instead (`Appended.refused`): nothing is pushed out nor replaced, no position
    is used and no token remembered. An entry that fits when the one of its key is gone replaces it.
    """

    entries: int = 0
    size_bytes: int = 0  #: of bodies and payloads
    refuse: bool = False
    beside: tuple[str, ...] = ()  #: with `refuse`: other mailboxes of the same home, whose entries count as well


NO_BOUND: Final = Bound()

SPARE_ALL: Final = -1  #: see `Mailboxes.append`


#: Entries that can be claimed at once.
MAX_CLAIMED: Final = 1000


def spared_by(one: int, another: int) -> int:
    """Return the larger protection of two."""
    return SPARE_ALL if SPARE_ALL in (one, another) else max(one, another)


#: Seconds that the token of an append is known; append.lua has the same number.
TOKEN_MEMORY: Final = 3600.0


class Offered(Struct, frozen=True, gc=False):
    """The way in which a client gets a message that it was offered (`Batch.offer`): all that match taken together."""

    granted: int  #: QoS
    retained: bool  #: with the retain flag
    identifiers: tuple[int, ...]  #: of the subscriptions


class Appended(Struct, frozen=True, gc=False):
    """The result for one owner's copy."""

    owner: str
    #: One more with every append to this owner; never used again (rule 9). 0: it was pushed out itself (which may use
    #: up a position or not), or not taken (`refused`, `gone`, `Draft.away`).
    position: int
    replaced: int = 0  #: position of the entry with the same key that it replaced, expired or not
    dropped: tuple[int, ...] = ()  #: positions pushed out by the bound, in the order they went; not its own
    repeated: bool = False  #: the token was known: nothing was appended, `position` is the first append's
    attached: str = ""  #: node the owner is attached to now (see `Coordination`)
    over: bool = False  #: the mailbox is larger than the bound, since all of it is spared
    refused: bool = False  #: it did not fit (`Bound.refuse`): nothing was changed, `position` is 0
    gone: bool = False  #: there is no mailbox of the generation that was named: likewise
    offered: Offered | None = None  #: answer to an offer; None: no subscription matches, and nothing was changed


class Entry(Struct, frozen=True, gc=False):
    """An entry of a mailbox."""

    position: int
    body: bytes
    payload: bytes
    key: bytes
    stored_at: float
    expires_at: float
    mark: int  #: 0, or what `mark` set


@dataclass(frozen=True, slots=True)
class MailboxInfo:
    """A mailbox at one moment. What has expired counts until it is swept."""

    entries: int
    size_bytes: int  #: of bodies and payloads, each payload counted for each entry
    first: int  #: position of the oldest entry; 0: empty
    last: int  #: position given last, whether the entry is still there or not
    generation: int = 0  #: 0: there is no such mailbox, and the other numbers are 0 too


@dataclass(frozen=True, slots=True)
class Swept:
    """One bounded step of a sweep. A step may remove nothing and still have more to look at."""

    removed: int  #: never more than the budget; blobs that go with their last entry need not be counted
    size_bytes: int  #: given back
    cursor: bytes | None  #: where to go on; None: done
    expired: tuple[tuple[str, int], ...] = ()  #: entries among those removed: owner, position


class Mailboxes(Protocol):
    """Ordered entries per owner.

    A mailbox is there from `make`, or from its first entry on, until it is forgotten. A new one begins above every
    position that one of that name ever had (rule 9): above the *floor* of its cell, which is raised to the last
    position of each mailbox that is forgotten there. Its generation is the first position that it may give, so no
    other mailbox of that name ever has the same.
    """

    async def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = ...,
        spared: Sequence[int] = ...,
        generations: Sequence[int] = ...,
    ) -> list[Appended]:
        """Append to one or many owners, one answer per owner in the same order. An owner named twice gets two.

        `spared`: for each owner, the position up to which entries are in flight: the bound does not push them out,
        unless they are droppable. `SPARE_ALL`: it pushes out no entry that is not droppable; `over` tells of it. What
        the mailbox itself remembers (`Batch.spare`) counts if it protects more, and so does the highest position that
        is claimed.
        `generations`: for each owner, the generation that is meant (0: any, and the mailbox is made if there is none).
        If there is no such mailbox, nothing is appended to it: `gone`.
        """

    async def make(self, owner: str) -> int:
        """Make a mailbox, unless there is one; its generation."""

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        """Return up to `limit` entries with a position above `after`, oldest first. Expired ones do not count.

        Fewer than `limit` means that there are no more, however large entries are and whatever was removed meanwhile.
        """

    async def entries(self, owner: str, positions: Sequence[int], now: float) -> list[Entry]:
        """Return those of some entries that are there, in the order of the positions; expired ones do not count."""

    async def claimed(self, owner: str, claimer: str) -> list[int]:
        """Return the positions of the entries that are claimed for a claimer (`Batch.claim`), in their order."""

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        """Remove entries; how many were there, each counted once.

        May ride on the next commit: after a crash they can be there again.
        """

    async def mark(self, owner: str, position: int, mark: int) -> bool:
        """Note a small number (0 to 255, else `ValueError`) with an entry, durably; False if the entry is gone.

        An entry that is marked (not 0) never expires, from then on for ever.
        """

    async def info(self, owner: str) -> MailboxInfo:
        """Return the size and ends of a mailbox."""

    async def clear(self, owner: str) -> int:
        """Remove all entries; how many. Positions go on from where they were, tokens stay known."""

    async def forget(self, owner: str, fence: Fence | None = ...) -> int:
        """Remove all entries and everything known of an owner but where it is attached; how many entries.

        Tokens are forgotten; positions are never given again (rule 9). What is appended while this is under way stays,
        in the same mailbox or in a new one. A large mailbox goes in steps that let other writes in between; with a
        fence, each of them is refused if it no longer holds.
        """

    def owners(self, feed: int | None = None) -> AsyncIterator[str]:
        """Yield all owners with entries, in no particular order.

        `feed`: only those whose homes note their changes in this one (`Feeds`); `ValueError` if there is none of that
        number.
        """


# -- blobs


class Blobs(Protocol):
    """Payloads by content: those put here, and those of entries.

    A blob that nothing needs any more is gone at the latest after a complete sweep that began an hour later (engines
    that store the payload before its entries need the delay). Payloads of up to 256 bytes may be kept with their entry
    instead; they are not found here then.
    """

    async def put(self, data: bytes, now: float, keep_until: float = 0.0) -> bytes:
        """Store once; the SHA-256 digest. Kept while an entry refers to it and at least until `keep_until`.

        A later `put` of the same data may lengthen that time, never shorten it.
        """

    async def get(self, digest: bytes, now: float) -> bytes | None:
        """Return the data, or None. What was only put is None when `keep_until` has come."""

    async def count(self) -> tuple[int, int]:
        """Return how many blobs are stored, and their bytes."""


# -- records


class Records(Protocol):
    """Small named collections. Collections have short fixed names; keys are text without U+0000."""

    async def put(self, collection: str, key: str, value: bytes, expires_at: float = 0.0) -> None:
        """Write one record."""

    async def get(self, collection: str, key: str, now: float) -> bytes | None:
        """Read one record."""

    async def get_many(self, collection: str, keys: Sequence[str], now: float) -> list[bytes | None]:
        """Read some records, each as `get` does; in the order of the keys."""

    async def delete(self, collection: str, key: str) -> bool:
        """Remove one record; False if it was not there."""

    async def of_home(self, collection: str, home: str, now: float) -> dict[str, bytes]:
        """Return all records that a home has in a collection, as of one moment unless there are hundreds.

        `ValueError` for a collection in which the records of a home do not lie together (`homes.records_of`).
        """

    def scan(
        self, collection: str, now: float, prefix: str = "", feed: int | None = None
    ) -> AsyncIterator[tuple[str, bytes]]:
        """Yield all records whose key begins with `prefix` (no pattern), each once, in any order.

        Changes meanwhile may or may not be seen. `feed`: only those whose changes are noted in this one (`Feeds`);
        `ValueError` if there is none of that number.
        """


# -- streams


class StreamRecord(Struct, frozen=True, gc=False):
    """One record of a stream."""

    offset: int  #: grows, from 1; gaps are allowed
    time: float  #: `now` of its append, or the time of the record before it if that was later: it never goes back
    value: bytes


class Formed(Sequence[bytes]):
    """Values that have most of their bytes in common, to be appended together.

    An engine may store what differs and put the values together when they are read.
    """

    __slots__ = ("columns", "parts")

    def __init__(self, parts: Sequence[bytes | int], columns: Sequence[Sequence[bytes]]) -> None:
        """Take `parts` of each value, bytes as they are or the number of a column; columns are equally long.

        They must not be changed afterwards.
        """
        self.parts = parts
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return b"".join([self.columns[part][index] if isinstance(part, int) else part for part in self.parts])

    def __iter__(self) -> Iterator[bytes]:
        columns = [self.columns[part] if isinstance(part, int) else repeat(part, len(self)) for part in self.parts]
        return map(b"".join, zip(*columns, strict=True))

    def part(self, start: int, end: int) -> Formed:
        """Return some of the values."""
        return Formed(self.parts, [column[start:end] for column in self.columns])

    def size_bytes(self) -> int:
        """Return the bytes of all values."""
        sizes = [sum(map(len, column)) for column in self.columns]
        count = len(self)
        return sum(sizes[part] if isinstance(part, int) else len(part) * count for part in self.parts)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream at one moment."""

    first: int  #: offset of the oldest record; 0: none
    last: int  #: offset given last
    records: int
    size_bytes: int  #: of values


#: Called with a stream and the offset that was given last.
Watcher = Callable[[str, int], None]


class Streams(Protocol):
    """Append-only sequences. A stream exists from its first append until it is dropped, even if all is trimmed."""

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        """Append; the offsets. Values of one form are better appended as `Formed`."""

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        """Return up to `limit` records with an offset above `after`, oldest first."""

    async def find(self, stream: str, time: float) -> int:
        """Return the offset after which records of `time` and later begin; reading after it gives these."""

    async def info(self, stream: str) -> StreamInfo:
        """Return the size and ends of a stream."""

    async def trim(
        self, stream: str, before: float = 0.0, size_bytes: int = 0, records: int = 0, budget: int = 1000
    ) -> Swept:
        """Remove what is older than `before`, and the oldest above so many bytes or records (0: any), step by step."""

    async def drop(self, stream: str) -> None:
        """Remove a stream. One of the same name made later is a new one, its offsets may begin again."""

    async def names(self) -> list[str]:
        """Return the names of all streams."""

    def watch(self, told: Watcher) -> Callable[[], None]:
        """Call `told` in the event loop for what this store object has appended, by `append` or in a batch.

        It comes when the records are as durable as promised, in order, about when the caller of the append hears of
        it. What is appended together, or by several calls in one group, may be told once. Not told: what other
        processes append, and writes of unknown outcome. `told` must not raise. Returns a function that ends the calls.
        """


# -- feeds

#: Notes that a feed keeps at least; readers that are farther behind read the collections again.
FEED_KEPT: Final = 65_536


class Note(Struct, frozen=True, gc=False):
    """Something that has changed, in the words of the feature that wrote it."""

    number: int  #: grows by one
    nonce: bytes  #: random: after a fail-over the same number may be another note
    data: bytes


class FeedEnd(Struct, frozen=True, gc=False):
    """The position of a feed, or of its reader: the last note."""

    number: int = 0  #: 0: none yet
    nonce: bytes = b""


class FeedPage(Struct, frozen=True, gc=False):
    """A part of a feed."""

    notes: list[Note]
    #: Notes are missing: they were trimmed, or the last note of the reader is not there any more. There are none here
    #: then. The reader takes the `ends` of now, reads all collections again, and goes on from these ends.
    gap: bool = False


class FeedTail(Protocol):
    """A reader of all feeds that waits for what comes."""

    @property
    def ends(self) -> Sequence[FeedEnd]:
        """Return how far what `next` has returned goes, of each feed."""

    async def next(self) -> tuple[int, FeedPage]:
        """Return the next part of any feed, and its number, when there is one; for one caller at a time.

        After a gap nothing more comes of that feed until `reset`. An engine that several nodes share finds out about a
        gap when the next note comes, and else within seconds. If a server is away, it waits. `StoreError` if it, or
        the store, was closed.
        """

    def reset(self, feed: int, end: FeedEnd) -> None:
        """Go on after that note; what was read of this feed before is left out."""

    def look(self, feed: int) -> None:
        """Look at a feed at once, since the caller has heard of a note there."""

    def close(self) -> None:
        """Wait no longer."""


class Feeds(Protocol):
    """The feeds of changes, one per cell; a note is written together with what it tells of (`Batch.note`)."""

    def feed_of(self, home: str) -> int:
        """Return the number of the feed that notes of a home go to."""

    async def ends(self) -> list[FeedEnd]:
        """Return the ends of all feeds, in the order of their numbers; how many there are never changes."""

    async def read(self, feed: int, after: FeedEnd, limit: int) -> FeedPage:
        """Return up to `limit` notes after that one, oldest first. Fewer, and no gap: there are no more."""

    def follow(self, after: Sequence[FeedEnd]) -> FeedTail:
        """Read all feeds from these ends on, as `read` does, and wait for what comes; `ValueError` if one is missing.

        It has tasks and perhaps connections of its own until it is closed.
        """


# -- coordination


class Fence(Struct, frozen=True, gc=False):
    """The right to make decisions about a home, until another one attaches it.

    Number and token are compared: a fail-over may forget a number and give it again.
    """

    home: str
    number: int  #: one more with every attach, from 1 again after a detach
    token: bytes  #: random


@dataclass(frozen=True, slots=True)
class Attached:
    """The home of an owner is attached to the caller's member now."""

    fence: Fence
    previous: str  #: member it was attached to, perhaps the same; empty: none
    mailbox: MailboxInfo  #: of the owner
    noted: int  #: number of the last note in the feed of the home: all that the home has takes account of these

    @property
    def pending(self) -> bool:
        """Return True if the owner's mailbox is not empty. Expired entries count until they are swept."""
        return self.mailbox.entries > 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A home that was attached, with its records."""

    attached: Attached
    records: list[dict[str, bytes]]  #: of each collection: key and value


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A home that was not attached, since another member has it."""

    member: str


#: What a store says that was fenced (`Coordination.fence_member`).
FENCED: Final = "this store was fenced: another member has taken its right to write; it has to be opened again"


@dataclass(frozen=True, slots=True)
class Member:
    """A store object that is open somewhere, and may write."""

    writer: str  #: another one each time that a store is opened
    since: float  #: when it was opened, by its own clock


@dataclass(frozen=True, slots=True)
class Lease:
    """A right that ends by itself."""

    name: str
    token: int  #: fencing token: grows with every acquisition of this name


class Coordination(Protocol):
    """Attachments of homes to nodes, fences, leases and wake-ups.

    No lost wake-up: `attach` and `append` to owners of the same home are serialised. `append` answers where the home is
    attached, `attach` answers whether something is pending, so at least one of the two sees the other.

    An engine that serves one node may forget who was attached when it closes (that node is gone then anyway). Fencing
    tokens of leases grow for ever.

    Leases: an engine that serves one node goes by `now`. One that several nodes share goes by its own clock and ignores
    `now`, since their clocks may differ.
    """

    async def attach(self, owner: str, member: str) -> Attached:
        """Claim the home of an owner (or a home by its own name) for a member. Fences from before are void."""

    async def open(self, owner: str, member: str, collections: Sequence[str], now: float) -> Opened:
        """Attach, and read all records of the home in some collections, in one step.

        `ValueError` for a collection in which the records of a home do not lie together (`homes.records_of`).
        """

    async def try_open(
        self,
        owner: str,
        member: str,
        collections: Sequence[str],
        now: float,
        *,
        displace: str = "",
        wait: bool = True,
    ) -> Opened | Elsewhere:
        """Open a home, unless another member than this one and `displace` has it: then nothing is changed.

        `wait`: False for a home that has nothing to lose, such as that of a client whose session ends with its
        connection: replicas of servers are not waited for, and a fail-over may forget that it is attached.
        """

    async def detach(self, fence: Fence) -> bool:
        """Give a home up; an old fence does nothing and answers False. Nothing of the attachment is left."""

    @property
    def takeovers(self) -> int:
        """Return how many times a server may have been replaced, or started again; it only grows.

        Each time it may have forgotten what it had confirmed, attachments among it. 0 where that cannot be.
        """

    def attached(self, member: str, feed: int) -> AsyncIterator[Fence]:
        """Yield the fences of the homes that a member has attached, of those whose notes go to a feed, each home once.

        Changes meanwhile may or may not be seen. `ValueError` if there is no feed of that number.
        """

    async def due(self, feed: int, now: float, limit: int) -> list[tuple[str, float]]:
        """Return up to `limit` homes whose time has come (`Batch.due`), the oldest first, with their times.

        Of those whose notes go to a feed; `ValueError` if there is none of that number.
        """

    async def time(self) -> float:
        """Return the clock of the store: where nodes share one, that of the same server for all of them."""

    async def members(self) -> list[Member]:
        """Return all store objects that may write now."""

    async def fence_member(self, writer: str) -> bool:
        """Take the right to write from a store object, for good; False if it had none.

        When this returns, nothing that it still sends is applied, however late. It may be the caller's own store.
        """

    async def acquire(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:
        """Take a lease that has no holder, or that has run out; None if it is held, be it by the same holder."""

    async def renew(self, lease: Lease, ttl: float, now: float) -> bool:
        """Hold on to a lease for `ttl` from now; False if it is no longer ours, which is so once it has run out."""

    async def release(self, lease: Lease) -> bool:
        """Give a lease back; False if it was no longer ours."""

    async def notify(self, node: str, data: bytes) -> None:
        """Wake a node up; best effort: what it should look at lies in the store."""

    def listen(self, node: str) -> AsyncIterator[bytes]:
        """Yield wake-ups for a node, from about when the first is asked for, each to all listeners, until cancelled."""


# -- the store


class Written(Struct, frozen=True, gc=False):
    """Answers of a batch."""

    appended: list[Appended]  #: of all appends and offers in order, one per owner
    offsets: list[Sequence[int]]  #: of each call of `stream`, in order: the offsets of its records
    generations: Sequence[int] = ()  #: of each call of `make`, in order
    notes: Sequence[int] = ()  #: of each call of `note`, in order: its number in the feed
    #: Of each call of `claim`, in order: of each owner the positions of its entries, in their order.
    claimed: Sequence[Sequence[Sequence[int]]] = ()


class Append(Struct, frozen=True, gc=False):
    """`Mailboxes.append`, as part of a batch."""

    owners: Sequence[str]
    draft: Draft
    now: float
    bound: Bound
    spared: Sequence[int]
    generations: Sequence[int]


class Offer(Struct, frozen=True, gc=False):
    """A message for a client that the store looks up, as part of a batch (`Batch.offer`)."""

    client_id: str
    topic: str
    qos: int
    retain: bool
    own: bool  #: the client has published it itself
    keep_qos0: bool  #: it is stored at QoS 0 too, if the client is attached to no member
    draft: Draft  #: `body`: its beginning
    now: float
    bound: Bound


class Make(Struct, frozen=True, gc=False):
    """`Mailboxes.make`, as part of a batch."""

    owner: str


class Acknowledge(Struct, frozen=True, gc=False):
    """`Mailboxes.acknowledge`, as part of a batch."""

    owner: str
    positions: Sequence[int]


class Mark(Struct, frozen=True, gc=False):
    """`Mailboxes.mark`, as part of a batch."""

    owner: str
    position: int
    mark: int


class Spare(Struct, frozen=True, gc=False):
    """Entries of a mailbox that are in flight, as part of a batch."""

    owner: str
    position: int


class Claim(Struct, frozen=True, gc=False):
    """Entries that are claimed, as part of a batch."""

    owners: Sequence[str]
    claimer: str
    limit: int
    now: float
    skip: Sequence[Sequence[int]]  #: of each owner; or nothing at all


class Release(Struct, frozen=True, gc=False):
    """Claims that are given back, as part of a batch."""

    owner: str
    claimer: str
    positions: Sequence[int]


class Take(Struct, frozen=True, gc=False):
    """An entry that is removed, as part of a batch; its first steps, wherever they stand."""

    owner: str
    position: int


class Put(Struct, frozen=True, gc=False):
    """`Records.put`, as part of a batch."""

    collection: str
    key: str
    value: bytes
    expires_at: float
    rank: int = 0


class Delete(Struct, frozen=True, gc=False):
    """`Records.delete`, as part of a batch."""

    collection: str
    key: str


class StreamAppend(Struct, frozen=True, gc=False):
    """`Streams.append`, as part of a batch."""

    stream: str
    values: Sequence[bytes]
    now: float


class AddNote(Struct, frozen=True, gc=False):
    """A note for the feed of a home, as part of a batch."""

    home: str
    data: bytes


class SetDue(Struct, frozen=True, gc=False):
    """Set the time at which a home is due, as part of a batch."""

    home: str
    at: float


class Detach(Struct, frozen=True, gc=False):
    """`Coordination.detach`, as part of a batch; its last step, wherever it stands."""

    fence: Fence


Step = (
    Append
    | Offer
    | Make
    | Acknowledge
    | Mark
    | Spare
    | Claim
    | Release
    | Take
    | Put
    | Delete
    | StreamAppend
    | AddNote
    | SetDue
    | Detach
)


class Expect(Struct, frozen=True, gc=False):
    """A condition of a batch: what a record holds before the batch."""

    collection: str
    key: str
    value: bytes | None  #: None: there is no such record, or it has expired
    now: float


class Holds(Struct, frozen=True, gc=False):
    """A condition of a batch: there is such an entry before the batch, expired or not."""

    owner: str
    position: int


Condition = Expect | Holds | Fence


class Unconditional(Enum):
    """The type of `ANYTHING`."""

    ANYTHING = auto()


ANYTHING: Final = Unconditional.ANYTHING  #: see `Batch.put`


class Batch:
    """Writes that belong together (rule 2), in order. Filled by one caller, then given to `Store.write`."""

    __slots__ = ("conditions", "steps")

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.conditions: Sequence[Condition] = ()  #: rule 8

    def fence(self, fence: Fence) -> None:
        """Make it a decision: it is applied only while this is the fence of its home, else `StoreFencedError`."""
        self.conditions = [*self.conditions, fence]

    def detach(self, fence: Fence) -> None:
        """Make it the last decision of this fence: when all the rest is done, the home is given up."""
        self.fence(fence)
        self.steps.append(Detach(fence))

    def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> None:
        """Append to one or many owners (`Mailboxes.append`)."""
        self.steps.append(Append(list(owners), draft, now, bound, spared, generations))

    def offer(
        self,
        client_id: str,
        topic: str,
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        *,
        qos: int,
        retain: bool = False,
        own: bool = False,
        keep_qos0: bool = True,
    ) -> None:
        """Append a message to the session of a client if any of its subscriptions matches the topic.

        The store looks: at the records of the client's subscriptions that are of its mailbox, but for shared ones
        (`offers` has the rules, and what becomes of the body). `Written.appended` has one answer, with `offered`.
        What is granted QoS 0 is not stored for a client that is attached to a member, nor without `keep_qos0`.
        """
        self.steps.append(Offer(client_id, topic, qos, retain, own, keep_qos0, draft, now, bound))

    def make(self, owner: str) -> None:
        """Make a mailbox (`Mailboxes.make`)."""
        self.steps.append(Make(owner))

    def acknowledge(self, owner: str, positions: Iterable[int]) -> None:
        """Remove entries (`Mailboxes.acknowledge`)."""
        self.steps.append(Acknowledge(owner, list(positions)))

    def mark(self, owner: str, position: int, mark: int) -> None:
        """Note a number with an entry (`Mailboxes.mark`)."""
        check_mark(mark)
        self.steps.append(Mark(owner, position, mark))

    def spare(self, owner: str, position: int) -> None:
        """Let a mailbox remember up to which position entries are in flight, for appends by those who do not know.

        `SPARE_ALL`: all of them; 0: none. It is forgotten with the mailbox; where there is none, nothing is done.
        """
        check_spare(position)
        self.steps.append(Spare(owner, position))

    def claim(
        self, owners: Sequence[str], claimer: str, limit: int, now: float, skip: Sequence[Sequence[int]] = ()
    ) -> None:
        """Claim up to `limit` entries (`MAX_CLAIMED` at most) that no other writer has claimed: `Written.claimed`.

        The oldest of the first mailbox go first, then those of the next; all have one home. Left out is what has
        expired, and what `skip` names for each of them. Fewer than `limit` means that there are no more.
        `claimer`: the writer of the store that claims (`Store.writer`). A claim lasts until its entry is gone, or it is
        given back. It is void when its writer is fenced or its store closed: the next one who claims may get the entry.
        It does not keep others from reading, marking or removing the entry.
        """
        if not 0 <= limit <= MAX_CLAIMED:
            raise ValueError(f"{MAX_CLAIMED} entries can be claimed at once, not {limit}")
        self.steps.append(Claim(list(owners), claimer, limit, now, skip))

    def release(self, owner: str, claimer: str, positions: Iterable[int]) -> None:
        """Give claims back: the entries can be claimed again, in their old places. Others' claims are left alone."""
        self.steps.append(Release(owner, claimer, list(positions)))

    def take(self, owner: str, position: int) -> None:
        """Remove an entry that must be there before the batch, expired or not; else `StoreConflictError` (rule 8).

        So of all who take an entry one does, and what else its batch has is done once. It is the batch's first step.
        """
        self.conditions = [*self.conditions, Holds(owner, position)]
        self.steps.append(Take(owner, position))

    def put(
        self,
        collection: str,
        key: str,
        value: bytes,
        expires_at: float = 0.0,
        *,
        expect: bytes | Unconditional | None = ANYTHING,
        now: float = 0.0,
        rank: int = 0,
    ) -> None:
        """Write a record (`Records.put`).

        `expect`: what must be stored before the batch; None: no such record, or one that has expired at `now`. Else the
        whole batch is refused (rule 8): `StoreConflictError`.
        `rank`: how many bytes a value begins with that never become less: if those of the stored one (expired or not)
        are greater, byte by byte, it stays as it is, and all the rest of the batch is done.
        """
        if not isinstance(expect, Unconditional):
            self.conditions = [*self.conditions, Expect(collection, key, expect, now)]
        self.steps.append(Put(collection, key, value, expires_at, rank))

    def delete(self, collection: str, key: str) -> None:
        """Remove a record (`Records.delete`)."""
        self.steps.append(Delete(collection, key))

    def stream(self, stream: str, values: Sequence[bytes], now: float) -> None:
        """Append to a stream (`Streams.append`)."""
        self.steps.append(StreamAppend(stream, values if isinstance(values, Formed) else list(values), now))

    def note(self, home: str, data: bytes) -> None:
        """Tell the readers of the home's feed what this batch changes there (`Feeds`)."""
        self.steps.append(AddNote(home, data))

    def due(self, home: str, at: float) -> None:
        """Let a home come up when its time has come (`Coordination.due`); 0: never. A home has one such time.

        It counts as a record in `StoreFigures`, and is none otherwise.
        """
        self.steps.append(SetDue(home, at))

    @property
    def grows(self) -> bool:
        """Return True if it may take room: a full store refuses it."""
        return not _GROWING.isdisjoint(map(type, self.steps))


_GROWING: Final = frozenset({Append, Offer, Make, Put, StreamAppend})  # a feed is trimmed as it grows


def weigh(batch: Batch) -> tuple[int, int]:
    """Return the rows and bytes of a batch, as `Backlog` counts them."""
    rows = size = 0
    for step in batch.steps:
        if isinstance(step, Append):
            rows += len(step.owners)
            size += len(step.draft.body) + len(step.draft.payload)
        elif isinstance(step, Offer):
            rows += 1
            size += len(step.draft.body) + len(step.draft.payload)
        elif isinstance(step, Acknowledge | Release):
            rows += len(step.positions)
        elif isinstance(step, StreamAppend):
            rows += len(step.values)
            size += bytes_of(step.values)
        else:
            rows += 1
            size += len(step.value) if isinstance(step, Put) else 0
            size += len(step.data) if isinstance(step, AddNote) else 0
    return rows, size


def bytes_of(values: Sequence[bytes]) -> int:
    """Return the bytes of all values of an append to a stream."""
    return values.size_bytes() if isinstance(values, Formed) else sum(map(len, values))


def check_feed(feed: int | None, count: int) -> None:
    """Raise `ValueError` if there is no feed of that number; None stands for all of them."""
    if feed is not None and not 0 <= feed < count:
        raise ValueError(f"a feed has a number from 0 to {count - 1}, not {feed}")


def check_spare(position: int) -> None:
    """Raise `ValueError` unless entries can be spared up to a position."""
    if position < SPARE_ALL:
        raise ValueError(f"entries are spared up to a position, or all of them ({SPARE_ALL}), not {position}")


def check_mark(mark: int) -> None:
    """Raise `ValueError` if a number cannot be a mark."""
    if not 0 <= mark <= 255:
        raise ValueError(f"a mark is a number from 0 to 255, not {mark}")


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
    shared: int = 0  #: messages stored once for several mailboxes, where an engine does that
    memory_bytes: int = 0  #: of this process, for the engine's own cache and write buffers


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """The condition of a store, as far as this process knows without asking: told at once, whatever its state."""

    engine: str
    commits: int  #: groups committed since it was opened
    writes: int  #: batches written since it was opened
    queued: int  #: batches waiting for the writer now
    full: bool  #: takes no new entries now
    trouble: str = ""  #: why not everything can be written now, in plain words; empty: it can
    detail: str = ""  #: the same for the operator


#: What may wait in a store before callers should take no more.
MAX_BACKLOG_ROWS: Final = 100_000
MAX_BACKLOG_BYTES: Final = 64 * 2**20


class Backlog:
    """The work handed to `Store.write` and not done: rows (entries, records, positions) and bytes of values.

    `write` never refuses because of it. It is the back-pressure of the store: callers check `full` before they accept
    more from their clients.
    """

    __slots__ = ("bytes", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0

    @property
    def full(self) -> bool:
        """Return True while callers should take no more."""
        return self.rows >= MAX_BACKLOG_ROWS or self.bytes >= MAX_BACKLOG_BYTES


class Store(Protocol):
    """One engine."""

    # Properties, so that an engine may give them its own types; plain attributes serve them.
    @property
    def atomic(self) -> bool:
        """True if a batch is applied as a whole or not at all (rule 2)."""

    @property
    def mailboxes(self) -> Mailboxes: ...

    @property
    def blobs(self) -> Blobs: ...

    @property
    def records(self) -> Records: ...

    @property
    def streams(self) -> Streams: ...

    @property
    def feeds(self) -> Feeds: ...

    @property
    def coordination(self) -> Coordination: ...

    @property
    def backlog(self) -> Backlog: ...

    @property
    def writer(self) -> str:
        """The name under which it writes, another one each time it is opened (`Coordination.members`).

        Once that is fenced, every write is refused with `StoreFencedError`, and `condition` says so; reading goes on.
        It may be closed and opened again, and writes then as another member.
        """

    async def open(self) -> None:
        """Open or create. `StoreError` says what is wrong and what to do."""

    async def close(self) -> None:
        """Commit what waits and let go of everything."""

    def write(self, batch: Batch) -> Commit[Written]:
        """Apply a batch. Never waits and never raises (`commit.Commit`); the batch must not be changed afterwards.

        Batches of one turn of the event loop share a group. Commits are done in the order of the calls; on Redis, of
        batches that touch the same owner, record or stream and nothing else. A refusal may come before the answers to
        earlier writes that are still being found out about.

        The outcome is that it is stored, or an error that is `certain`: an engine that cannot tell yet goes on until it
        can, however long a server is away. Other errors are left for a store that is closed meanwhile or whose files
        cannot even be read, and for Redis where a part was stored and the rest is refused for want of room, or what was
        sent is refused when sent again.
        """

    async def sweep(
        self, now: float, budget: int, cursor: bytes = b"", kept: Callable[[int], bool] | None = None
    ) -> Swept:
        """Remove what has expired and blobs nothing refers to, at most `budget` items.

        Begin with no cursor, go on with the one from the step before until it is None.
        `kept`: only in the cells of feeds for which it says so; an engine that serves one node has one, and asks not.
        """

    async def figures(self) -> StoreFigures:
        """Return counts and sizes; what has expired counts until it is swept."""

    def condition(self) -> StoreCondition:
        """Return whether the store takes writes now; never waits and never fails."""

    async def check(self) -> list[str]:
        """Return what is wrong inside; empty: nothing. Changes nothing."""
