"""The engine that forgets: all ports in dictionaries, for tests and for nodes that need not remember.

    MemoryStore ── write, sweep, figures, check
        mailboxes ──> blobs        entries refer to payloads by digest
        coordination ──> mailboxes `attach` looks whether something is pending, appends look who is attached
        all ──> Ending             what ends by itself, soonest first

Rule 1: every change is one synchronous method (`apply…`), so whatever happens between two awaits is atomic; a batch is
        a list of such calls made in one go.
Rule 2: a sweep looks only at what is due, so each step costs no more than its budget. What was removed or renewed in
        the meantime is still in the heap and recognised when its turn comes: nothing searches the heap.
Rule 3: a payload is held by the entries that refer to it, by count; the last to go takes it along, unless it was
        asked to be kept longer.
Rule 4: nothing here waits. A caller that writes in a loop and never waits for anything else holds up its event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import secrets
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter

import msgspec

from motorcade.commit import Commit
from motorcade.storage.due import DUE, due_homes, due_value
from motorcade.storage.homes import CLIENT, home_of_owner, records_of
from motorcade.storage.offers import SUBSCRIPTIONS, draft_of, is_stored, offered
from motorcade.storage.ports import (
    FEED_KEPT,
    FENCED,
    NO_BOUND,
    SPARE_ALL,
    TOKEN_MEMORY,
    Acknowledge,
    AddNote,
    Append,
    Appended,
    Attached,
    Backlog,
    Batch,
    Bound,
    Claim,
    Delete,
    Detach,
    Draft,
    Elsewhere,
    Entry,
    Expect,
    FeedEnd,
    FeedPage,
    FeedTail,
    Fence,
    Holds,
    Lease,
    MailboxInfo,
    Make,
    Mark,
    Member,
    Note,
    Offer,
    Opened,
    Put,
    Release,
    SetDue,
    Spare,
    StoreCondition,
    StoreConflictError,
    StoreError,
    StoreFencedError,
    StoreFigures,
    StreamAppend,
    StreamInfo,
    StreamRecord,
    Swept,
    Take,
    Watcher,
    Written,
    check_feed,
    check_mark,
    spared_by,
    weigh,
)
from motorcade.storage.tails import Tails
from motorcade.storage.wakeups import WakeUps, Watchers

#: The cursor of a sweep that is not done. The heap knows where to go on, so it says no more than that.
MORE = b"more"

_offset = attrgetter("offset")
_time = attrgetter("time")


@dataclass(frozen=True, slots=True)
class Ended:
    """The things that an ending has removed."""

    removed: int = 0
    size_bytes: int = 0
    entry: tuple[str, int] | None = None  #: owner and position, if it was an entry


NOTHING = Ended()


class Ending:
    """The things that end by themselves: a heap of (when, tie-breaker, what to do then)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], Ended]]] = []
        self._serial = 0

    def at(self, when: float, end: Callable[[float], Ended]) -> None:
        """Have `end(now)` called by a sweep at `when` or later."""
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, end))

    def step(self, now: float, budget: int) -> Swept:
        """End at most `budget` things."""
        removed = size_bytes = 0
        entries: list[tuple[str, int]] = []
        while budget > 0 and self._is_due(now):
            ended = heapq.heappop(self._heap)[2](now)
            removed += ended.removed
            size_bytes += ended.size_bytes
            if ended.entry is not None:
                entries.append(ended.entry)
            budget -= 1
        return Swept(removed, size_bytes, MORE if self._is_due(now) else None, tuple(entries))

    def _is_due(self, now: float) -> bool:
        return bool(self._heap) and self._heap[0][0] <= now


class Gate:
    """The state of the store: if it is open and may write, and how much was written; every port asks and tells."""

    def __init__(self) -> None:
        self.is_open = False
        self.writer = ""
        self.since = 0.0
        self.fenced = False
        self.fenced_others: set[str] = set()  #: writers of other store objects that share this data, in tests
        self.writes = 0

    def open(self) -> None:
        self.is_open = True
        self.writer = secrets.token_hex(8)
        self.since = time.time()

    def read(self) -> None:
        if not self.is_open:
            raise StoreError("the store is closed")

    def write(self) -> None:
        self.read()
        if self.fenced:
            raise StoreFencedError(FENCED)
        self.writes += 1


# -- blobs


@dataclass(slots=True)
class MemoryBlob:
    """A payload and what holds it."""

    data: bytes
    holders: int = 0  #: entries
    keep_until: float = 0.0


class MemoryBlobs:
    """Payloads by content."""

    def __init__(self, gate: Gate, ending: Ending) -> None:
        self.blobs: dict[bytes, MemoryBlob] = {}
        self.size_bytes = 0
        self._gate = gate
        self._ending = ending

    async def put(self, data: bytes, now: float, keep_until: float = 0.0) -> bytes:  # noqa: ARG002 - nothing to touch
        self._gate.write()
        digest, blob = self._store(data)
        blob.keep_until = max(blob.keep_until, keep_until)
        self._ending.at(blob.keep_until, partial(self._end, digest))
        return digest

    async def get(self, digest: bytes, now: float) -> bytes | None:
        self._gate.read()
        blob = self.blobs.get(digest)
        return blob.data if blob is not None and (blob.holders or now < blob.keep_until) else None

    async def count(self) -> tuple[int, int]:
        self._gate.read()
        return len(self.blobs), self.size_bytes

    def data(self, digest: bytes) -> bytes:
        """Return the payload of an entry; nothing for the digest of nothing."""
        return self.blobs[digest].data if digest else b""

    def hold(self, data: bytes) -> bytes:
        """Store the payload of an entry; its digest, or nothing for nothing."""
        if not data:
            return b""
        digest, blob = self._store(data)
        blob.holders += 1
        return digest

    def release(self, digest: bytes) -> int:
        """Release an entry's hold; return how many bytes that frees."""
        if not digest:
            return 0
        blob = self.blobs[digest]
        blob.holders -= 1
        if blob.holders:
            return 0
        if not blob.keep_until:
            return self._remove(digest)
        # Its put pushed it into the heap, but its turn may have come while entries held it.
        self._ending.at(blob.keep_until, partial(self._end, digest))
        return 0

    def _store(self, data: bytes) -> tuple[bytes, MemoryBlob]:
        digest = hashlib.sha256(data).digest()
        blob = self.blobs.get(digest)
        if blob is None:
            blob = self.blobs[digest] = MemoryBlob(data)
            self.size_bytes += len(data)
        return digest, blob

    def _remove(self, digest: bytes) -> int:
        size_bytes = len(self.blobs.pop(digest).data)
        self.size_bytes -= size_bytes
        return size_bytes

    def _end(self, digest: bytes, now: float) -> Ended:
        blob = self.blobs.get(digest)
        if blob is None or blob.holders or now < blob.keep_until:
            return NOTHING
        return Ended(1, self._remove(digest))


# -- mailboxes


@dataclass(slots=True)
class Row:
    """An entry as it is stored."""

    body: bytes
    digest: bytes  #: of its payload; empty: it has none
    key: bytes
    stored_at: float
    expires_at: float
    size_bytes: int
    mark: int = 0


@dataclass(slots=True)
class MemoryMailbox:
    """One owner; rows and droppable in the order of positions."""

    # Not plain dictionaries: finding the first of those costs a step for each that went before it.
    rows: OrderedDict[int, Row] = field(default_factory=OrderedDict)
    droppable: OrderedDict[int, None] = field(default_factory=OrderedDict)
    keys: dict[bytes, int] = field(default_factory=dict)
    tokens: dict[bytes, tuple[float, int]] = field(default_factory=dict)  #: until when, position
    size_bytes: int = 0
    last: int = 0
    generation: int = 1
    made: bool = False  #: by `make`
    spare: int = 0  #: see `ports.Batch.spare`
    claims: dict[int, str] = field(default_factory=dict)  #: position: who has claimed it

    @property
    def is_there(self) -> bool:
        return self.made or self.last >= self.generation

    @property
    def info(self) -> MailboxInfo:
        return MailboxInfo(len(self.rows), self.size_bytes, next(iter(self.rows), 0), self.last, self.generation)

    def exceeds(self, bound: Bound) -> bool:
        return 0 < bound.entries < len(self.rows) or 0 < bound.size_bytes < self.size_bytes

    def fits(self, draft: Draft, replaced: int, bound: Bound, beside: Sequence[MailboxInfo]) -> bool:
        """Return True if an entry fits when the one that it replaces (0: none) is gone."""
        old = self.rows[replaced].size_bytes if replaced else 0
        size_bytes = self.size_bytes - old + len(draft.body) + len(draft.payload)
        entries = len(self.rows) + (0 if replaced else 1)
        entries += sum(info.entries for info in beside)
        size_bytes += sum(info.size_bytes for info in beside)
        return not (0 < bound.entries < entries or 0 < bound.size_bytes < size_bytes)

    def next_to_drop(self, spared: int) -> int | None:
        if self.droppable:
            return next(iter(self.droppable))
        if spared == SPARE_ALL:
            return None
        return next((position for position in self.rows if position > spared), None)

    def positions_after(self, after: int) -> Iterable[int]:
        """Return the positions above `after`, perhaps with some that are gone; never more than there are rows."""
        if self.last - after < len(self.rows):
            return range(after + 1, self.last + 1)
        return [position for position in self.rows if position > after]


class MemoryMailboxes:
    """Ordered entries per owner."""

    def __init__(self, gate: Gate, ending: Ending, blobs: MemoryBlobs) -> None:
        self.boxes: dict[str, MemoryMailbox] = {}
        self.floor = 0  #: positions of mailboxes that are made begin above it
        self.attached: dict[str, tuple[str, Fence]] = {}  #: home: member, its fence; written by MemoryCoordination
        self._gate = gate
        self._ending = ending
        self._blobs = blobs

    async def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> list[Appended]:
        self._gate.write()
        if generations:
            return self.apply_named(owners, draft, now, bound, spared, generations)
        return self.apply_append(owners, draft, now, bound, spared)

    async def make(self, owner: str) -> int:
        self._gate.write()
        return self.apply_make(owner)

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        self._gate.read()
        found: list[Entry] = []
        box = self.boxes.get(owner)
        if box is None or limit <= 0:
            return found
        for position in box.positions_after(max(after, 0)):
            row = box.rows.get(position)
            if row is None or 0 < row.expires_at <= now:
                continue
            found.append(self._entry(position, row))
            if len(found) == limit:
                break
        return found

    async def entries(self, owner: str, positions: Sequence[int], now: float) -> list[Entry]:
        self._gate.read()
        found: list[Entry] = []
        rows = self.boxes[owner].rows if owner in self.boxes else {}
        for position in positions:
            row = rows.get(position)
            if row is not None and not 0 < row.expires_at <= now:
                found.append(self._entry(position, row))
        return found

    def _entry(self, position: int, row: Row) -> Entry:
        payload = self._blobs.data(row.digest)
        return Entry(position, row.body, payload, row.key, row.stored_at, row.expires_at, row.mark)

    async def claimed(self, owner: str, claimer: str) -> list[int]:
        self._gate.read()
        claims = self.boxes[owner].claims if owner in self.boxes else {}
        return sorted(position for position, one in claims.items() if one == claimer)

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        self._gate.write()
        return self.apply_acknowledge(owner, positions)

    async def mark(self, owner: str, position: int, mark: int) -> bool:
        check_mark(mark)
        self._gate.write()
        return self.apply_mark(owner, position, mark)

    async def info(self, owner: str) -> MailboxInfo:
        self._gate.read()
        return self.look(owner)

    async def clear(self, owner: str) -> int:
        self._gate.write()
        box = self.boxes.get(owner)
        return self.apply_acknowledge(owner, list(box.rows)) if box is not None else 0

    async def forget(self, owner: str, fence: Fence | None = None) -> int:
        self._gate.write()
        if fence is not None:
            self.check(fence)
        removed = await self.clear(owner)
        box = self.boxes.pop(owner, None)
        if box is not None and box.is_there:
            self.floor = max(self.floor, box.last, box.generation)
        return removed

    async def owners(self, feed: int | None = None) -> AsyncIterator[str]:
        check_feed(feed, 1)
        self._gate.read()
        for owner in [owner for owner, box in self.boxes.items() if box.rows]:
            yield owner

    def look(self, owner: str) -> MailboxInfo:
        box = self.boxes.get(owner)
        return box.info if box is not None and box.is_there else MailboxInfo(0, 0, 0, 0)

    def check_entry(self, condition: Holds) -> None:
        """Raise `StoreConflictError` unless an entry is there."""
        box = self.boxes.get(condition.owner)
        if box is None or condition.position not in box.rows:
            raise StoreConflictError(f"the mailbox {condition.owner} has no entry {condition.position}")

    def check(self, fence: Fence) -> None:
        """Raise `StoreFencedError` unless it is the fence of its home."""
        if fence.home not in self.attached or self.attached[fence.home][1] != fence:
            raise StoreFencedError(f"{fence.home} is attached elsewhere")

    def apply_append(
        self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, spared: Sequence[int] = ()
    ) -> list[Appended]:
        return [
            self._append(owner, draft, now, bound, spared[index] if spared else 0) for index, owner in enumerate(owners)
        ]

    def apply_named(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound,
        spared: Sequence[int],
        generations: Sequence[int],
    ) -> list[Appended]:
        """Append to mailboxes of these generations."""
        answers = []
        for index, (owner, generation) in enumerate(zip(owners, generations, strict=True)):
            if generation not in (0, self.look(owner).generation):
                answers.append(Appended(owner, 0, attached=self._member_of(owner), gone=True))
            else:
                answers += self.apply_append([owner], draft, now, bound, spared[index : index + 1])
        return answers

    def _member_of(self, owner: str) -> str:
        return self.attached[home][0] if (home := home_of_owner(owner)) in self.attached else ""

    def apply_offer(self, offer: Offer, records: MemoryRecords) -> Appended:
        """Append to the mailbox of a client if it has a subscription that matches."""
        home, owner = CLIENT + offer.client_id, f"session:{offer.client_id}"
        attached = self._member_of(owner)
        stored = records.look(SUBSCRIPTIONS, home, offer.now)
        found = offered(offer, home, stored, self.look(owner).generation)
        if found is None or not is_stored(offer, found, attached):
            return Appended(owner, 0, attached=attached if found is not None else "", offered=found)
        answer = self._append(owner, draft_of(offer.draft, found), offer.now, offer.bound, 0)
        return msgspec.structs.replace(answer, offered=found)

    def apply_make(self, owner: str) -> int:
        box = self._made(owner)
        box.made = True
        return box.generation

    def _made(self, owner: str) -> MemoryMailbox:
        box = self.boxes.get(owner)
        if box is None:
            box = self.boxes[owner] = MemoryMailbox(last=self.floor, generation=self.floor + 1)
        return box

    def apply_acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        box = self.boxes.get(owner)
        if box is None:
            return 0
        gone = [position for position in set(positions) if position in box.rows]
        for position in gone:
            self._remove(box, position)
        return len(gone)

    def apply_spare(self, owner: str, position: int) -> None:
        box = self.boxes.get(owner)
        if box is not None and box.is_there:
            box.spare = position

    def apply_claim(self, step: Claim) -> list[list[int]]:
        """Claim entries; the positions of each owner."""
        found: list[list[int]] = []
        left = step.limit
        for index, owner in enumerate(step.owners):
            box = self.boxes.get(owner) or MemoryMailbox()
            skip = step.skip[index] if step.skip else ()
            box.claims = {place: one for place, one in box.claims.items() if one not in self._gate.fenced_others}
            free = (
                position
                for position, row in box.rows.items()
                if position not in box.claims and position not in skip and not 0 < row.expires_at <= step.now
            )
            found.append(list(islice(free, left)))
            left -= len(found[-1])
            box.claims.update(dict.fromkeys(found[-1], step.claimer))
        return found

    def apply_release(self, owner: str, claimer: str, positions: Iterable[int]) -> None:
        box = self.boxes.get(owner)
        for position in positions if box is not None else ():
            if box.claims.get(position) == claimer:  # type: ignore[union-attr]
                del box.claims[position]  # type: ignore[union-attr]

    def apply_mark(self, owner: str, position: int, mark: int) -> bool:
        box = self.boxes.get(owner)
        row = box.rows.get(position) if box is not None else None
        if row is None:
            return False
        row.mark = mark
        if mark:
            row.expires_at = 0.0
        return True

    def _append(self, owner: str, draft: Draft, now: float, bound: Bound, spared: int) -> Appended:
        attached = self._member_of(owner)
        if draft.away and attached:
            return Appended(owner, 0, attached=attached)
        box = self._made(owner)
        spared = spared_by(spared, box.spare)
        if box.claims:
            spared = spared_by(spared, max(box.claims))
        if draft.token:
            until, position = box.tokens.get(draft.token, (now, 0))
            if now < until:
                return Appended(owner, position, repeated=True, attached=attached)
        replaced = box.keys.get(draft.key, 0) if draft.key else 0
        if bound.refuse and not box.fits(draft, replaced, bound, [self.look(other) for other in bound.beside]):
            return Appended(owner, 0, attached=attached, refused=True)
        if replaced:
            self._remove(box, replaced)
        position, dropped = self._add(owner, box, draft, now, bound, spared)
        if draft.token:
            self.remember(owner, box, draft.token, position, now + TOKEN_MEMORY)
        over = spared != 0 and position != 0 and box.exceeds(bound)
        return Appended(owner, position, replaced, dropped, attached=attached, over=over)

    def remember(self, owner: str, box: MemoryMailbox, token: bytes, position: int, until: float) -> None:
        box.tokens[token] = (until, position)
        self._ending.at(until, partial(self._end_token, owner, token))

    def _add(
        self, owner: str, box: MemoryMailbox, draft: Draft, now: float, bound: Bound, spared: int
    ) -> tuple[int, tuple[int, ...]]:
        """Add an entry; return its position (0: pushed out itself), and the positions that it pushed out."""
        size_bytes = len(draft.body) + len(draft.payload)
        if 0 < bound.size_bytes < size_bytes:
            return 0, ()
        box.last += 1
        position = box.last
        digest = self._blobs.hold(draft.payload)
        box.rows[position] = Row(draft.body, digest, draft.key, now, draft.expires_at, size_bytes)
        box.size_bytes += size_bytes
        if draft.key:
            box.keys[draft.key] = position
        if draft.droppable:
            box.droppable[position] = None
        dropped: list[int] = []
        while box.exceeds(bound):
            victim = box.next_to_drop(spared)
            if victim is None:
                break
            dropped.append(victim)
            self._remove(box, victim)
        if position in dropped:
            return 0, tuple(other for other in dropped if other != position)
        if draft.expires_at:
            self._ending.at(draft.expires_at, partial(self._end_entry, owner, position))
        return position, tuple(dropped)

    def _remove(self, box: MemoryMailbox, position: int) -> int:
        """Remove an entry; return how many bytes that frees."""
        row = box.rows.pop(position)
        box.size_bytes -= row.size_bytes
        box.droppable.pop(position, None)
        box.claims.pop(position, None)
        if row.key:
            del box.keys[row.key]
        return len(row.body) + self._blobs.release(row.digest)

    def _end_entry(self, owner: str, position: int, now: float) -> Ended:
        box = self.boxes.get(owner)
        row = box.rows.get(position) if box is not None else None
        if box is None or row is None or not 0 < row.expires_at <= now:
            return NOTHING
        return Ended(1, self._remove(box, position), (owner, position))

    def _end_token(self, owner: str, token: bytes, now: float) -> Ended:
        box = self.boxes.get(owner)
        if box is not None and token in box.tokens and box.tokens[token][0] <= now:
            del box.tokens[token]
        return NOTHING  # no entry, record or blob


# -- records


class MemoryRecords:
    """Small named collections."""

    def __init__(self, gate: Gate, ending: Ending) -> None:
        self.collections: dict[str, dict[str, tuple[bytes, float]]] = {}  #: value, expires_at
        self._gate = gate
        self._ending = ending

    async def put(self, collection: str, key: str, value: bytes, expires_at: float = 0.0) -> None:
        self._gate.write()
        self.apply_put(collection, key, value, expires_at)

    async def get(self, collection: str, key: str, now: float) -> bytes | None:
        self._gate.read()
        value, expires_at = self.collections.get(collection, {}).get(key, (None, 0.0))
        return None if 0 < expires_at <= now else value

    async def get_many(self, collection: str, keys: Sequence[str], now: float) -> list[bytes | None]:
        return [await self.get(collection, key, now) for key in keys]

    async def delete(self, collection: str, key: str) -> bool:
        self._gate.write()
        return self.apply_delete(collection, key)

    async def of_home(self, collection: str, home: str, now: float) -> dict[str, bytes]:
        self._gate.read()
        return self.look(collection, home, now)

    async def scan(
        self, collection: str, now: float, prefix: str = "", feed: int | None = None
    ) -> AsyncIterator[tuple[str, bytes]]:
        check_feed(feed, 1)
        self._gate.read()
        for key, (value, expires_at) in list(self.collections.get(collection, {}).items()):
            if key.startswith(prefix) and not 0 < expires_at <= now:
                yield key, value

    def look(self, collection: str, home: str, now: float) -> dict[str, bytes]:
        """Return the records of a home."""
        prefix, exact = records_of(home, collection)
        return {
            key: value
            for key, (value, expires_at) in self.collections.get(collection, {}).items()
            if (key == prefix if exact else key.startswith(prefix)) and not 0 < expires_at <= now
        }

    def check(self, condition: Expect) -> None:
        """Raise `StoreConflictError` unless a record is as expected."""
        value, expires_at = self.collections.get(condition.collection, {}).get(condition.key, (None, 0.0))
        if (None if 0 < expires_at <= condition.now else value) != condition.value:
            raise StoreConflictError(f"the record {condition.collection}/{condition.key} is not as expected")

    def count(self) -> int:
        return sum(len(collection) for collection in self.collections.values())

    def apply_put(self, collection: str, key: str, value: bytes, expires_at: float, rank: int = 0) -> None:
        records = self.collections.setdefault(collection, {})
        if rank and key in records and records[key][0][:rank] > value[:rank]:
            return
        records[key] = (value, expires_at)
        if expires_at:
            self._ending.at(expires_at, partial(self._end, collection, key))

    def apply_due(self, home: str, at: float) -> None:
        if at > 0:
            self.apply_put(DUE, home, due_value(at), 0.0)
        else:
            self.apply_delete(DUE, home)

    def apply_delete(self, collection: str, key: str) -> bool:
        return self.collections.get(collection, {}).pop(key, None) is not None

    def _end(self, collection: str, key: str, now: float) -> Ended:
        records = self.collections[collection]
        value, expires_at = records.get(key, (b"", 0.0))
        if not 0 < expires_at <= now:
            return NOTHING
        del records[key]
        return Ended(1, len(value))


# -- streams


@dataclass(slots=True)
class MemoryStream:
    """One stream; offsets and times of its records only grow."""

    records: list[StreamRecord] = field(default_factory=list)
    last: int = 0
    time: float = 0.0
    size_bytes: int = 0


class MemoryStreams:
    """Append-only sequences."""

    def __init__(self, gate: Gate) -> None:
        self.streams: dict[str, MemoryStream] = {}
        self._gate = gate
        self._watchers = Watchers()

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        self._gate.write()
        return self.apply_append(stream, values, now)

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        self._gate.read()
        records = self._records(stream)
        start = bisect_right(records, after, key=_offset)
        return records[start : start + max(limit, 0)]

    async def find(self, stream: str, time: float) -> int:
        self._gate.read()
        records = self._records(stream)
        start = bisect_left(records, time, key=_time)
        if start < len(records):
            return records[start].offset - 1
        return self.streams[stream].last if stream in self.streams else 0

    async def info(self, stream: str) -> StreamInfo:
        self._gate.read()
        found = self.streams.get(stream, MemoryStream())
        first = found.records[0].offset if found.records else 0
        return StreamInfo(first, found.last, len(found.records), found.size_bytes)

    async def trim(
        self, stream: str, before: float = 0.0, size_bytes: int = 0, records: int = 0, budget: int = 1000
    ) -> Swept:
        self._gate.write()
        found = self.streams.get(stream, MemoryStream())
        count, freed = 0, 0
        for record in found.records:
            old = record.time < before
            too_long = 0 < records < len(found.records) - count
            too_large = 0 < size_bytes < found.size_bytes - freed
            if not (old or too_long or too_large):
                break
            if count == budget:
                return self._cut(found, count, freed, MORE)
            count += 1
            freed += len(record.value)
        return self._cut(found, count, freed, None)

    async def drop(self, stream: str) -> None:
        self._gate.write()
        self.streams.pop(stream, None)

    async def names(self) -> list[str]:
        self._gate.read()
        return list(self.streams)

    def watch(self, told: Watcher) -> Callable[[], None]:
        return self._watchers.add(told)

    def apply_append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        if not values:
            return []
        found = self.streams.setdefault(stream, MemoryStream())
        found.time = max(found.time, now)
        offsets = list(range(found.last + 1, found.last + 1 + len(values)))
        found.last = offsets[-1]
        for offset, value in zip(offsets, values, strict=True):
            found.records.append(StreamRecord(offset, found.time, value))
            found.size_bytes += len(value)
        self._watchers.tell(stream, found.last)
        return offsets

    def _records(self, stream: str) -> list[StreamRecord]:
        found = self.streams.get(stream)
        return found.records if found is not None else []

    @staticmethod
    def _cut(stream: MemoryStream, count: int, size_bytes: int, cursor: bytes | None) -> Swept:
        del stream.records[:count]
        stream.size_bytes -= size_bytes
        return Swept(count, size_bytes, cursor)


# -- feeds


class MemoryFeeds:
    """The single feed of changes."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._notes: deque[Note] = deque(maxlen=FEED_KEPT)
        self.tails = Tails()

    def feed_of(self, home: str) -> int:  # noqa: ARG002 - there is but one
        return 0

    async def ends(self) -> list[FeedEnd]:
        self._gate.read()
        return [FeedEnd(self._notes[-1].number, self._notes[-1].nonce) if self._notes else FeedEnd()]

    async def read(self, feed: int, after: FeedEnd, limit: int) -> FeedPage:  # noqa: ARG002 - there is but one
        self._gate.read()
        first = self._notes[0].number if self._notes else 1
        start = after.number + 1 - first  # of the notes that are kept
        known = FeedEnd() if start == 0 == after.number else None
        if 0 < start <= len(self._notes):
            known = FeedEnd(self._notes[start - 1].number, self._notes[start - 1].nonce)
        if known != after:
            return FeedPage([], gap=True)
        return FeedPage(list(islice(self._notes, start, start + max(limit, 0))))

    def follow(self, after: Sequence[FeedEnd]) -> FeedTail:
        self._gate.read()
        return self.tails.follow(self, after)

    @property
    def noted(self) -> int:
        """The number of the last note."""
        return self._notes[-1].number if self._notes else 0

    def apply_note(self, data: bytes) -> int:
        """Add a note; its number."""
        number = self.noted + 1
        self._notes.append(Note(number, secrets.token_bytes(8), data))
        self.tails.ring()
        return number


# -- coordination


class MemoryCoordination:
    """Attachments, fences and leases. One counter gives all tokens of leases: they grow for each name, with gaps."""

    def __init__(self, gate: Gate, mailboxes: MemoryMailboxes, records: MemoryRecords, feeds: MemoryFeeds) -> None:
        self._gate = gate
        self._mailboxes = mailboxes
        self._records = records
        self._feeds = feeds
        self.leases: dict[str, tuple[int, float]] = {}  #: token, until when
        self._wake_ups = WakeUps()
        self.serial = 0  #: given last
        self.takeovers = 0  #: there are none

    async def attach(self, owner: str, member: str) -> Attached:
        self._gate.write()
        home, attached = home_of_owner(owner), self._mailboxes.attached
        previous, old = attached.get(home, ("", None))
        fence = Fence(home, old.number + 1 if old is not None else 1, secrets.token_bytes(8))
        attached[home] = member, fence
        return Attached(fence, previous, self._mailboxes.look(owner), self._feeds.noted)

    async def open(self, owner: str, member: str, collections: Sequence[str], now: float) -> Opened:
        found = [self._records.look(collection, home_of_owner(owner), now) for collection in collections]
        return Opened(await self.attach(owner, member), found)

    async def try_open(
        self,
        owner: str,
        member: str,
        collections: Sequence[str],
        now: float,
        *,
        displace: str = "",
        wait: bool = True,  # noqa: ARG002 - nothing lasts
    ) -> Opened | Elsewhere:
        self._gate.write()
        holder = self._mailboxes.attached.get(home_of_owner(owner), ("", None))[0]
        if holder not in ("", member, displace):
            return Elsewhere(holder)
        return await self.open(owner, member, collections, now)

    async def detach(self, fence: Fence) -> bool:
        self._gate.write()
        return self.apply_detach(fence)

    def apply_detach(self, fence: Fence) -> bool:
        if self._mailboxes.attached.get(fence.home, ("", None))[1] != fence:
            return False
        del self._mailboxes.attached[fence.home]
        return True

    async def attached(self, member: str, feed: int) -> AsyncIterator[Fence]:
        check_feed(feed, 1)
        self._gate.read()
        for fence in [fence for holder, fence in self._mailboxes.attached.values() if holder == member]:
            yield fence

    async def due(self, feed: int, now: float, limit: int) -> list[tuple[str, float]]:
        check_feed(feed, 1)
        self._gate.read()
        times = self._records.collections.get(DUE, {})
        return due_homes(((home, value) for home, (value, _) in times.items()), now, limit)

    async def time(self) -> float:
        self._gate.read()
        return time.time()

    async def members(self) -> list[Member]:
        self._gate.read()
        return [] if self._gate.fenced else [Member(self._gate.writer, self._gate.since)]

    async def fence_member(self, writer: str) -> bool:
        self._gate.write()
        if writer != self._gate.writer:
            self._gate.fenced_others.add(writer)
            return False
        self._gate.fenced = True
        return True

    async def acquire(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:  # noqa: ARG002
        self._gate.write()
        if name in self.leases and now < self.leases[name][1]:
            return None
        lease = Lease(name, self._next())
        self.leases[name] = (lease.token, now + ttl)
        return lease

    async def renew(self, lease: Lease, ttl: float, now: float) -> bool:
        self._gate.write()
        token, until = self.leases.get(lease.name, (0, 0.0))
        if token != lease.token or now >= until:
            return False
        self.leases[lease.name] = (token, now + ttl)
        return True

    async def release(self, lease: Lease) -> bool:
        self._gate.write()
        if self.leases.get(lease.name, (0, 0.0))[0] != lease.token:
            return False
        del self.leases[lease.name]
        return True

    async def notify(self, node: str, data: bytes) -> None:
        self._gate.read()
        self._wake_ups.notify(node, data)

    async def listen(self, node: str) -> AsyncIterator[bytes]:
        self._gate.read()
        with self._wake_ups.listener(node) as waiting:
            while True:
                yield await waiting.get()

    def _next(self) -> int:
        self.serial += 1
        return self.serial


# -- the store


class MemoryStore:
    """`memory://`."""

    atomic = True

    def __init__(self) -> None:
        self._fresh()

    def _fresh(self) -> None:
        self.gate = Gate()
        self._ending = Ending()
        self.blobs = MemoryBlobs(self.gate, self._ending)
        self.mailboxes = MemoryMailboxes(self.gate, self._ending, self.blobs)
        self.records = MemoryRecords(self.gate, self._ending)
        self.streams = MemoryStreams(self.gate)
        self.feeds = MemoryFeeds(self.gate)
        self.coordination = MemoryCoordination(self.gate, self.mailboxes, self.records, self.feeds)
        self.backlog = Backlog()
        self._swept = 0
        self._answers: list[tuple[Commit[Written], Written | Exception]] = []  # of this turn of the event loop

    async def open(self) -> None:
        if self.gate.is_open:
            raise StoreError("the store is open already")
        self.gate.open()

    @property
    def writer(self) -> str:
        return self.gate.writer

    async def close(self) -> None:
        self._answer()
        self.gate.is_open = False  # for callers that still hold a port
        self.feeds.tails.ring()
        self._fresh()

    def write(self, batch: Batch) -> Commit[Written]:
        commit: Commit[Written] = Commit()
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._answer)
        try:
            rows, size = weigh(batch)
            self.backlog.rows += rows
            self.backlog.bytes += size
            self._answers.append((commit, self.apply(batch)))
        except Exception as error:  # noqa: BLE001 - the caller is told where it looks
            self._answers.append((commit, error))
        return commit

    def apply(self, batch: Batch) -> Written:
        """Make the changes of a batch."""
        self.gate.write()
        for condition in batch.conditions:
            if isinstance(condition, Fence):
                self.mailboxes.check(condition)
            elif isinstance(condition, Holds):
                self.mailboxes.check_entry(condition)
            else:
                self.records.check(condition)
        for step in batch.steps if batch.conditions else ():
            if isinstance(step, Take):
                self.mailboxes.apply_acknowledge(step.owner, [step.position])
        generations: list[int] = []
        notes: list[int] = []
        detached: list[Fence] = []
        claimed: list[list[list[int]]] = []
        written = Written([], [], generations, notes, claimed)
        for step in batch.steps:
            match step:
                case Append(owners, draft, now, bound, spared, []):
                    written.appended.extend(self.mailboxes.apply_append(owners, draft, now, bound, spared))
                case Append(owners, draft, now, bound, spared, named):
                    written.appended.extend(self.mailboxes.apply_named(owners, draft, now, bound, spared, named))
                case Offer():
                    written.appended.append(self.mailboxes.apply_offer(step, self.records))
                case Make(owner):
                    generations.append(self.mailboxes.apply_make(owner))
                case Acknowledge(owner, positions):
                    self.mailboxes.apply_acknowledge(owner, positions)
                case Mark(owner, position, mark):
                    self.mailboxes.apply_mark(owner, position, mark)
                case Spare(owner, position):
                    self.mailboxes.apply_spare(owner, position)
                case Claim():
                    claimed.append(self.mailboxes.apply_claim(step))
                case Release(owner, claimer, positions):
                    self.mailboxes.apply_release(owner, claimer, positions)
                case SetDue(home, at):
                    self.records.apply_due(home, at)
                case Put(collection, key, value, expires_at, rank):
                    self.records.apply_put(collection, key, value, expires_at, rank)
                case Delete(collection, key):
                    self.records.apply_delete(collection, key)
                case StreamAppend(stream, values, now):
                    written.offsets.append(self.streams.apply_append(stream, values, now))
                case AddNote(_, data):
                    notes.append(self.feeds.apply_note(data))
                case Detach():
                    detached.append(step.fence)
        for fence in detached:
            self.coordination.apply_detach(fence)
        return written

    def _answer(self) -> None:
        answers, self._answers = self._answers, []
        self.backlog.rows = self.backlog.bytes = 0
        for commit, outcome in answers:
            if isinstance(outcome, Exception):
                commit.finish(outcome)
            else:
                commit.settle(outcome)

    async def sweep(
        self,
        now: float,
        budget: int,
        cursor: bytes = b"",  # noqa: ARG002 - see MORE
        kept: Callable[[int], bool] | None = None,  # noqa: ARG002 - it serves one node
    ) -> Swept:
        self.gate.read()
        swept = self._ending.step(now, budget)
        self._swept += swept.removed
        return swept

    async def figures(self) -> StoreFigures:
        self.gate.read()
        return StoreFigures(
            engine="memory",
            entries=sum(len(box.rows) for box in self.mailboxes.boxes.values()),
            blobs=len(self.blobs.blobs),
            blob_octets=self.blobs.size_bytes,
            records=self.records.count(),
            commits=self.gate.writes,
            writes=self.gate.writes,
            queued=0,
            disk_octets=0,
            swept=self._swept,
            full=False,
        )

    def condition(self) -> StoreCondition:
        trouble, detail = ("is fenced", FENCED) if self.gate.fenced else ("", "")
        return StoreCondition("memory", self.gate.writes, self.gate.writes, 0, False, trouble, detail)

    async def check(self) -> list[str]:
        self.gate.read()
        return [*self._check_mailboxes(), *self._check_blobs()]

    def _check_mailboxes(self) -> list[str]:
        wrong = []
        for owner, box in self.mailboxes.boxes.items():
            keys = {row.key: position for position, row in box.rows.items() if row.key}
            if keys != box.keys:
                wrong.append(f"mailbox {owner!r}: the keys do not agree with the entries")
            if box.size_bytes != sum(row.size_bytes for row in box.rows.values()):
                wrong.append(f"mailbox {owner!r}: the size does not agree with the entries")
            if not box.droppable.keys() <= box.rows.keys():
                wrong.append(f"mailbox {owner!r}: entries to drop first that are gone")
            if next(reversed(box.rows), 0) > box.last:
                wrong.append(f"mailbox {owner!r}: an entry beyond the last position")
        return wrong

    def _check_blobs(self) -> list[str]:
        holders: dict[bytes, int] = {}
        for box in self.mailboxes.boxes.values():
            for row in box.rows.values():
                if row.digest:
                    holders[row.digest] = holders.get(row.digest, 0) + 1
        wrong = [f"blob {digest.hex()}: missing" for digest in holders if digest not in self.blobs.blobs]
        for digest, blob in self.blobs.blobs.items():
            if blob.holders != holders.get(digest, 0):
                wrong.append(f"blob {digest.hex()}: held by {holders.get(digest, 0)} entries, not {blob.holders}")
            if hashlib.sha256(blob.data).digest() != digest:
                wrong.append(f"blob {digest.hex()}: the data does not agree with the digest")
        return wrong
