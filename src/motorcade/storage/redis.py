"""The shared engine: all ports on Redis 7.0 or later, or Valkey, alone or as a cluster.

    RedisStore ── ports ──> Writer   ── group per server ──> Servers ── Connection    lua/*.lua do the work
                       └──> reads ─────────────────────────> Servers

`cells.py` lists every key. Everything that writes is an `Operation` for one cell; the writer groups them, repeats them
through failovers and waits for replicas. What stands here is how ports become operations and answers.

Rule 1: a payload that is stored apart is written before the entries that refer to it, and held until they are there.
Rule 2: calls of a batch that are of different kinds and in different cells go one after the other, because a later one
        may rely on an earlier one. Calls of one kind go together; so does everything of one cell, and, on a lone
        server, everything.
Rule 3: leases go by the servers' clock, everything else by the `now` of the caller.
Rule 4: a condition of a batch is checked in its cell, together with what the batch writes there, and that goes before
        everything in other cells, but for the end of an attachment, which comes last. Conditions in several cells are
        all checked before the first write, and each of them again with its cell: if one changes in between, a part of
        the batch may be written.

What Redis cannot give: WAIT means that replicas have received a write, not that they have stored it, and the cluster
may promote a replica that lags behind another. With one replica per master, a write that was confirmed survives the
loss of either; the loss of both at once can take the last second.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.redis.resp import Argument, LostError, RedisConnection, ServerAddress, ServerError, connect
from motorcade.redis.scripts import Script
from motorcade.redis.servers import FIRST_PAUSE, LONGEST_PAUSE, Purpose, Servers, refusal
from motorcade.redis.slots import slot_of
from motorcade.redis.url import RedisOptions, RedisUrl, parse_url
from motorcade.storage import redis_members
from motorcade.storage.cells import Cells
from motorcade.storage.homes import CLIENT, PAIRS, home_of_owner, home_of_record, is_indexed, records_of
from motorcade.storage.offers import SUBSCRIPTIONS
from motorcade.storage.ports import (
    FEED_KEPT,
    NO_BOUND,
    Acknowledge,
    AddNote,
    Append,
    Appended,
    Attached,
    Backlog,
    Batch,
    Bound,
    Claim,
    Condition,
    Delete,
    Detach,
    Draft,
    Durability,
    Elsewhere,
    Entry,
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
    Offered,
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
    weigh,
)
from motorcade.storage.redis_checks import Inspection, agree_on_cells, check_servers, server_info
from motorcade.storage.redis_format import TIME, pack_entry, raw, unpack_entry
from motorcade.storage.redis_scripts import ALL, ATTACHED, COMMIT, EXTENT, FIND, HOME, INFO, READ, TRACED
from motorcade.storage.redis_tail import RedisTail
from motorcade.storage.redis_writer import JobStage, Operation, RedisWriter
from motorcade.storage.wakeups import MAX_WAKE_UPS, Watchers

log = structlog.get_logger("motorcade.storage.redis")

#: A payload for one owner goes into its entry up to this size: one write and one read less. For several owners it does
#: so when it is no longer than the digest would be.
INLINE_ONE: Final = 256
INLINE_MANY: Final = 32

#: What append.lua answers of a mailbox that is too large, or not the one that was meant.
OVER: Final = 1
REFUSED: Final = 2
GONE: Final = 3

#: Owners in one operation, entries that one operation removes, values in one of a stream, entries in one read.
MAX_OWNERS: Final = 250
MAX_REMOVED: Final = 250
MAX_RECORDS: Final = 1000
MAX_READ: Final = 1000
#: Records that come with an attach; of a home that has more they are read after it.
MAX_OPENED: Final = 250
#: Bytes of stream values in one operation.
MAX_VALUES: Final = 1 << 20

#: Seconds that a blob outlives what it is kept for by the server's clock, which need not agree with the nodes' clocks.
BLOB_SLACK: Final = 3600.0
#: Milliseconds that an append may take from storing its payload to storing its entries.
HOLD_TIME: Final = 600_000

#: Seconds between questions whether a listener's server is still there.
LISTENER_PULSE: Final = 1.0

#: Cells that are asked at once when all of them are asked.
WINDOW: Final = 16
#: Records in a page of a scan, and where all of them are small.
PAGE: Final = 200
SMALL_PAGE: Final = 1000


class BlobCache:
    """Payloads read or written lately, by digest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, digest: bytes) -> bytes | None:
        data = self._blobs.get(digest)
        if data is not None:
            self._blobs.move_to_end(digest)
        return data

    def put(self, digest: bytes, data: bytes) -> None:
        if digest in self._blobs or len(data) > self._most // 4:
            return
        self._blobs[digest] = data
        self._size += len(data)
        while self._size > self._most:
            self._size -= len(self._blobs.popitem(last=False)[1])


class Core:
    """The core that all ports of one open store share."""

    def __init__(
        self, servers: Servers, cells: Cells, writer: RedisWriter, blob_cache: int, watchers: Watchers | None = None
    ) -> None:
        self.servers = servers
        self.cells = cells
        self.writer = writer
        self.cache = BlobCache(blob_cache)
        self.swept = 0
        self.pulse: asyncio.TimerHandle | None = None  #: of `redis_members`
        self._watchers = watchers or Watchers()
        self._hold = 0
        self._name = secrets.token_hex(4)

    def next_hold(self) -> str:
        self._hold += 1
        return f"{self._name}{self._hold}"

    def told(self, operation: Operation, first: int) -> None:
        """Tell watchers that an operation has appended to a stream, beginning with the offset `first`."""
        _, _, stream, values, _ = operation.words
        self._watchers.tell(stream, first + len(values) - 1)

    async def one(self, operation: Operation, durable: bool = True) -> Any:
        return (await self.writer.write([operation], durable))[0]

    async def ask(self, cell: int, command: str, kind: str, name: str | bytes = b"", *arguments: Argument) -> Any:
        """Read one key."""
        try:
            return await self.servers.ask(self.cells.slot(cell), command, self.key(cell, kind, name), *arguments)
        except ServerError as error:
            raise self._refusal(cell, error) from None

    async def evaluate(self, cell: int, script: Script, kinds: str, name: str, *arguments: Argument) -> Any:
        """Run a script that reads keys of the given kinds."""
        return await self.look(cell, script, [self.key(cell, f"{kind}:", name) for kind in kinds], *arguments)

    async def look(self, cell: int, script: Script, keys: Sequence[bytes], *arguments: Argument) -> Any:
        """Run a script that reads some keys of a cell."""
        try:
            return await self.servers.evaluate(self.cells.slot(cell), script, keys, *arguments)
        except ServerError as error:
            raise self._refusal(cell, error) from None

    async def everywhere(self, command: str, kind: str, *arguments: Argument) -> list[Any]:
        """Ask all cells the same question; return the answers in their order."""
        answers: list[Any] = []
        for start in range(0, self.cells.count, WINDOW):
            some = range(start, min(start + WINDOW, self.cells.count))
            answers += await asyncio.gather(*(self.ask(cell, command, kind, b"", *arguments) for cell in some))
        return answers

    async def scan(
        self, command: str, kind: str, *arguments: Argument, only: int | None = None
    ) -> AsyncIterator[tuple[int, list[bytes]]]:
        """Yield all pages of HSCAN or SSCAN over all cells, or over one."""
        cells = range(self.cells.count) if only is None else range(only, only + 1)
        for start in range(0, len(cells), WINDOW):
            some = cells[start : start + WINDOW]
            pages = await asyncio.gather(*(self.ask(cell, command, kind, b"", b"0", *arguments) for cell in some))
            for cell, (first_cursor, first_page) in zip(some, pages, strict=True):
                cursor, page = first_cursor, first_page
                while True:
                    if page:
                        yield cell, page
                    if cursor == b"0":
                        break
                    cursor, page = await self.ask(cell, command, kind, b"", cursor, *arguments)

    async def members(self, cell: int, kind: str, name: str = "") -> AsyncIterator[bytes]:
        """Yield all members of a set, each once."""
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, page = await self.ask(cell, "SSCAN", kind, name, cursor, "COUNT", 500)
            for member in set(page) - seen:
                yield member
            seen.update(page)
            if cursor == b"0":
                return

    def key(self, cell: int, kind: str, name: str | bytes = b"") -> bytes:
        return self.cells.key(cell, kind).encode() + (name if isinstance(name, bytes) else name.encode())

    def _refusal(self, cell: int, error: ServerError) -> StoreError:
        return refusal(error, self.servers.master(self.cells.slot(cell)) or self.servers.seeds[0])


# -- operations


class AppendOperations:
    """One append, as operations: a blob perhaps, and one or more per cell."""

    def __init__(
        self,
        core: Core,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound,
        spared: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        self.owners = owners
        self.digest = b""
        inline = INLINE_ONE if len(owners) == 1 else INLINE_MANY
        if len(draft.payload) > inline and owners:
            self.digest = hashlib.sha256(draft.payload).digest()
        entry, size_bytes, flags = pack_entry(draft, now, self.digest)
        what = (raw(entry), now, draft.expires_at, size_bytes, flags, raw(draft.key), raw(self.digest))
        how = (bound.entries, bound.size_bytes, raw(draft.token))
        # Each of these is a key or two more that has to be looked at.
        each = 1 + bool(draft.key) + bool(draft.expires_at) + bool(draft.token) + bool(draft.droppable)
        each += bool(bound.entries or bound.size_bytes)
        away: tuple[Any, ...] = (True,) if draft.away else ()
        if bound.beside:
            away = (draft.away, bound.beside)
            each += len(bound.beside)
        homes = [home_of_owner(owner) for owner in owners]
        if len(owners) == 1:  # as nearly always, and much quicker
            cell = core.cells.of(homes[0])
            words = ("append", cell, *what, *how, owners, spared, bound.refuse, generations, homes, *away)
            self.operations = [Operation(words, each, len(entry))]
            self._places = [[0]]  #: of each operation: the indices of its owners
            return
        cells: dict[int, list[int]] = {}
        for index, home in enumerate(homes):
            cells.setdefault(core.cells.of(home), []).append(index)
        self.operations, self._places = [], []
        for cell, indices in cells.items():
            for start in range(0, len(indices), MAX_OWNERS):
                some = indices[start : start + MAX_OWNERS]
                words = (
                    "append",
                    cell,
                    *what,
                    *how,
                    [owners[index] for index in some],
                    [spared[index] for index in some] if spared else (),
                    bound.refuse,
                    [generations[index] for index in some] if generations else (),
                    [homes[index] for index in some],
                    *away,
                )
                self.operations.append(Operation(words, len(some) * each, len(entry)))
                self._places.append(some)

    def answers(self, replies: Sequence[Any]) -> list[Appended]:
        """Return the replies to `operations` as answers in the order of the owners."""
        found: list[Appended | None] = [None] * len(self.owners)
        for places, reply in zip(self._places, replies, strict=True):
            for index, answer in zip(places, reply, strict=True):
                found[index] = appended_of(self.owners[index], answer)
        return [answer for answer in found if answer is not None]


class OfferOperation:
    """One offer, as an operation, and a blob perhaps."""

    def __init__(self, core: Core, offer: Offer) -> None:
        draft, bound, home = offer.draft, offer.bound, CLIENT + offer.client_id
        self.owner = f"session:{offer.client_id}"
        self.digest = hashlib.sha256(draft.payload).digest() if len(draft.payload) > INLINE_ONE else b""
        prefix, _ = records_of(home, SUBSCRIPTIONS)
        words = (
            "offer",
            core.cells.of(home),
            home,
            self.owner,
            prefix,
            offer.topic,
            offer.qos,
            offer.retain,
            offer.own,
            offer.keep_qos0,
            raw(draft.body),
            raw(self.digest or draft.payload),
            len(draft.payload),
            raw(self.digest),
            offer.now,
            draft.expires_at,
            bound.entries,
            bound.size_bytes,
            raw(draft.token),
        )
        weight = 5 + bool(draft.expires_at) + bool(draft.token) + bool(bound.entries or bound.size_bytes)
        self.operations = [Operation(words, weight, len(draft.body) + len(draft.payload))]

    def answers(self, replies: Sequence[Any]) -> list[Appended]:
        """Return the reply as an answer."""
        if not replies[0]:
            return [Appended(self.owner, 0)]
        granted, retained, identifiers, answer = replies[0]
        found = Offered(granted, retained, tuple(identifiers))
        return [msgspec.structs.replace(appended_of(self.owner, answer), offered=found)]


def appended_of(owner: str, answer: int | Sequence[Any]) -> Appended:
    """Return what append.lua has answered about one owner."""
    if isinstance(answer, int):
        return Appended(owner, answer)
    position, replaced, dropped, repeated, node, state = answer
    return Appended(
        owner,
        position,
        replaced,
        tuple(dropped),
        bool(repeated),
        node,
        over=state == OVER,
        refused=state == REFUSED,
        gone=state == GONE,
    )


def blob_operation(core: Core, digest: bytes, data: bytes, keep_until: float, lasts: float, hold: str) -> Operation:
    """Store a payload. `lasts`: seconds, 0: until a sweep finds that nothing refers to it."""
    ttl = int((lasts + BLOB_SLACK) * 1000) if lasts else 0
    words = ("blob", core.cells.of(digest), raw(digest), raw(data), keep_until, ttl, hold, HOLD_TIME)
    return Operation(words, 1, len(data))


def acknowledge_operations(core: Core, owner: str, positions: Iterable[int]) -> list[Operation]:
    cell, every = core.cells.of_owner(owner), list(positions)
    portions = [every[start : start + MAX_REMOVED] for start in range(0, len(every), MAX_REMOVED)]
    return [Operation(("acknowledge", cell, owner, some), 2 * len(some)) for some in portions]


def mark_operation(core: Core, owner: str, position: int, mark: int) -> Operation:
    return Operation(("mark", core.cells.of_owner(owner), owner, position, mark))


def spare_operation(core: Core, owner: str, position: int) -> Operation:
    return Operation(("spare", core.cells.of_owner(owner), owner, position))


def take_operation(core: Core, owner: str, position: int) -> Operation:
    return Operation(("take", core.cells.of_owner(owner), owner, position), 2)


def claim_operation(core: Core, step: Claim) -> Operation:
    cell = core.cells.of_owner(step.owners[0])
    words = ("claim", cell, step.owners, step.claimer, step.limit, step.now, step.skip)
    return Operation(words, 2 * len(step.owners) + step.limit // 4)


def unclaim_operations(core: Core, owner: str, claimer: str, positions: Sequence[int]) -> list[Operation]:
    cell = core.cells.of_owner(owner)
    portions = [positions[start : start + MAX_REMOVED] for start in range(0, len(positions), MAX_REMOVED)]
    return [Operation(("unclaim", cell, owner, claimer, some), 2 * len(some)) for some in portions]


def due_operation(core: Core, home: str, at: float) -> Operation:
    return Operation(("due", core.cells.of(home), home, at))


def put_operation(core: Core, collection: str, key: str, value: bytes, expires_at: float, rank: int = 0) -> Operation:
    home = home_of_record(collection, key)
    stored = raw(TIME.pack(expires_at) + value)
    words: tuple[Any, ...]
    words = ("put", core.cells.of(home), collection, key, stored, expires_at, _index(collection, key, home))
    return Operation((*words, rank) if rank else words, 1, len(value))


def delete_operation(core: Core, collection: str, key: str) -> Operation:
    home = home_of_record(collection, key)
    return Operation(("delete", core.cells.of(home), collection, key, _index(collection, key, home)))


def _index(collection: str, key: str, home: str) -> str:
    """Return the home whose index has a record; empty: it is found without."""
    return home if is_indexed(collection, key, home) else ""


def note_operation(core: Core, home: str, data: bytes) -> Operation:
    words = ("note", core.cells.of(home), raw(secrets.token_bytes(8)), raw(data), FEED_KEPT)
    return Operation(words, 1, len(data))


def detach_operation(core: Core, fence: Fence) -> Operation:
    return Operation(("detach", core.cells.of(fence.home), fence.home, _stored_fence(fence)))


class OpenOperation:
    """One opening of a home."""

    def __init__(self, core: Core, owner: str, member: str, collections: Sequence[str]) -> None:
        self.home = home_of_owner(owner)
        self.token = secrets.token_bytes(8)  #: of the fence
        self.collections = collections
        places = [records_of(self.home, collection) for collection in collections]
        wanted = [(name, key if single else "") for name, (key, single) in zip(collections, places, strict=True)]
        self._words = (core.cells.of(self.home), self.home, member, self.token.hex(), owner, wanted, MAX_OPENED)

    def operation(self, name: str, *more: str) -> Operation:
        return Operation((name, *self._words, *more), 10 + len(self.collections))


def stream_operations(core: Core, stream: str, values: Sequence[bytes], now: float) -> list[Operation]:
    cell = core.cells.of(stream)
    operations: list[Operation] = []
    some: list[bytes] = []
    size_bytes = 0
    for value in values:
        some.append(value)
        size_bytes += len(value)
        if len(some) == MAX_RECORDS or size_bytes > MAX_VALUES:
            operations.append(
                Operation(("stream", cell, stream, [raw(each) for each in some], now), len(some), size_bytes)
            )
            some, size_bytes = [], 0
    if some:
        operations.append(Operation(("stream", cell, stream, [raw(each) for each in some], now), len(some), size_bytes))
    return operations


def _offsets(operations: Sequence[Operation], replies: Sequence[Any]) -> Sequence[int]:
    """Return the offsets of one append to a stream, from the first that each of its operations has answered."""
    ranges = [range(first, first + len(each.words[3])) for each, first in zip(operations, replies, strict=True)]
    return ranges[0] if len(ranges) == 1 else [offset for some in ranges for offset in some]


def condition_of(core: Core, condition: Condition) -> tuple[Any, ...]:
    """Return a condition, as lua/guard.lua has it."""
    if isinstance(condition, Fence):
        return ("fence", core.cells.of(condition.home), condition.home, _stored_fence(condition))
    if isinstance(condition, Holds):
        return ("holds", core.cells.of_owner(condition.owner), condition.owner, condition.position)
    collection, key = condition.collection, condition.key
    value = False if condition.value is None else raw(condition.value)
    return ("expect", core.cells.of_record(collection, key), collection, key, value, condition.now)


def _stored_fence(fence: Fence) -> str:
    return f"{fence.number}:{fence.token.hex()}:"


class Plan:
    """The operations of a batch, and the stages in which they are carried out (rules 2 and 4)."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._operations: list[Operation] = []
        self._conditions: Sequence[tuple[Any, ...]] = ()
        self._parts: list[tuple[str, range]] = []  #: of each step of the batch: its kind, its operations
        self._appends: list[tuple[range, AppendOperations | OfferOperation]] = []
        self._streams: Sequence[range] = ()
        self._made: Sequence[int] = ()
        self._notes: Sequence[int] = ()
        self._claims: Sequence[int] = ()
        self._detached: Sequence[int] = ()
        self._blobs: dict[bytes, tuple[bytes, float]] = {}  #: digest: data, seconds it lasts (0: no end)

    def add(self, batch: Batch) -> None:
        """Make operations of a batch."""
        core = self._core
        if batch.conditions:
            self._conditions = [condition_of(core, condition) for condition in batch.conditions]
            for taken in [step for step in batch.steps if isinstance(step, Take)]:
                self._add("take", [take_operation(core, taken.owner, taken.position)])
        for step in batch.steps:
            match step:
                case Append(owners, draft, now, bound, spared, generations):
                    self.append(owners, draft, now, bound, spared, generations)
                case Offer():
                    self._place(step.draft, step.now, OfferOperation(core, step), "offer")
                case Make(owner):
                    made = self._add("make", [Operation(("make", core.cells.of_owner(owner), owner))])
                    self._made = [*self._made, *made]
                case Acknowledge(owner, positions):
                    self._add("acknowledge", acknowledge_operations(core, owner, positions))
                case Mark(owner, position, mark):
                    self._add("mark", [mark_operation(core, owner, position, mark)])
                case Spare(owner, position):
                    self._add("spare", [spare_operation(core, owner, position)])
                case Claim():
                    self._claims = [*self._claims, *self._add("claim", [claim_operation(core, step)])]
                case Release(owner, claimer, positions):
                    self._add("unclaim", unclaim_operations(core, owner, claimer, positions))
                case SetDue(home, at):
                    self._add("due", [due_operation(core, home, at)])
                case Put(collection, key, value, expires_at, rank):
                    self._add("put", [put_operation(core, collection, key, value, expires_at, rank)])
                case Delete(collection, key):
                    self._add("delete", [delete_operation(core, collection, key)])
                case StreamAppend(stream, values, now):
                    added = self._add("stream", stream_operations(core, stream, values, now))
                    self._streams = [*self._streams, added]
                case AddNote(home, data):
                    self._notes = [*self._notes, *self._add("note", [note_operation(core, home, data)])]
        for fence in [step.fence for step in batch.steps if isinstance(step, Detach)] if batch.conditions else ():
            self._detached = [*self._detached, *self._add("detach", [detach_operation(core, fence)])]

    def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound,
        spared: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        self._place(draft, now, AppendOperations(self._core, owners, draft, now, bound, spared, generations), "append")

    def _place(self, draft: Draft, now: float, appending: AppendOperations | OfferOperation, kind: str) -> None:
        self._appends.append((self._add(kind, appending.operations), appending))
        if appending.digest:
            lasts = max(draft.expires_at - now, 1.0) if draft.expires_at else 0.0
            _, before = self._blobs.get(appending.digest, (b"", lasts))
            self._blobs[appending.digest] = (draft.payload, max(lasts, before) if lasts and before else 0.0)

    def _add(self, kind: str, operations: list[Operation]) -> range:
        start = len(self._operations)
        self._operations += operations
        part = range(start, start + len(operations))
        self._parts.append((kind, part))
        return part

    def carry_out(self, backlog: Backlog | None = None, rows: int = 0, size: int = 0) -> Commit[Written]:
        """Submit the operations; the commit has their answers. They count in the backlog until then."""
        core, blobs = self._core, self._blobs
        hold = core.next_hold() if blobs else ""
        payloads = [blob_operation(core, digest, data, 0.0, lasts, hold) for digest, (data, lasts) in blobs.items()]
        order: list[Sequence[int]] | None = None  # one stage has everything, payloads first
        if not core.servers.clustered:  # everything in one call
            operations = payloads + self._operations if payloads else self._operations
            stages = [JobStage(operations, _durable(operations), conditions=self._conditions)]
        elif len(self._parts) == 1 and not (payloads or self._conditions):
            stages = [JobStage(self._operations, _durable(self._operations))]
        else:
            stages, order = self._stages(payloads)
        if backlog is not None:
            backlog.rows += rows
            backlog.bytes += size
        submitted = core.writer.submit(stages)
        commit: Commit[Written] = Commit()

        def answer() -> None:
            error = submitted.error
            if backlog is not None:
                backlog.rows -= rows
                backlog.bytes -= size
            if error is None or isinstance(error, StoreConflictError | StoreFencedError):
                for digest in blobs:
                    core.writer.later(Operation(("unhold", core.cells.of(digest), hold, [raw(digest)])))
            if error is not None:
                commit.finish(error)
                return
            try:
                written = self._written(submitted.result, order)
            except Exception as error:  # noqa: BLE001 - an answer of an unknown form: its caller must not wait for ever
                commit.finish(StoreError(f"written, but the answer is not understood: {error!r}"))
                return
            for digest, (data, _) in blobs.items():
                core.cache.put(digest, data)
            commit.settle(written)

        submitted.then(answer)
        return commit

    def _stages(self, payloads: list[Operation]) -> tuple[list[JobStage], list[Sequence[int]]]:
        """Return the stages on a cluster, and of each of them which operations of the batch it has."""
        stages: list[JobStage] = []
        order: list[Sequence[int]] = []
        if payloads:
            stages.append(JobStage(payloads, early=True))
            order.append([-1] * len(payloads))
        guarded = list(dict.fromkeys(self._pipeline(condition[1]) for condition in self._conditions))
        # A home is given up when all the rest is done: with it, or after it if some of it is in other pipelines.
        alone = len({self._pipeline(each.cell) for each in self._operations}) == 1
        last = () if alone else self._detached
        if len(guarded) > 1:  # each of them is looked at again with its pipeline: this finds nearly everything in time
            stages.append(JobStage([], durable=False, conditions=self._conditions))
            order.append([])
        for pipeline in guarded:
            order.append(
                [
                    index
                    for index, each in enumerate(self._operations)
                    if self._pipeline(each.cell) == pipeline and index not in last
                ]
            )
            operations = [self._operations[index] for index in order[-1]]
            conditions = [condition for condition in self._conditions if self._pipeline(condition[1]) == pipeline]
            stages.append(JobStage(operations, _durable(operations), conditions=conditions))
        for indices in self._steps(set(guarded)):
            operations = [self._operations[index] for index in indices]
            stages.append(JobStage(operations, _durable(operations)))
            order.append(indices)
        if last:
            stages.append(JobStage([self._operations[index] for index in last]))
            order.append(last)
        return stages, order

    def _steps(self, done: set[int]) -> list[list[int]]:
        """Return the operations that may go together (rule 2), without those of the pipelines that are done."""
        steps: list[tuple[list[int], set[int]]] = []  # operations, their pipelines
        last = ""
        for kind, part in self._parts:
            indices = [index for index in part if self._pipeline(self._operations[index].cell) not in done]
            pipelines = {self._pipeline(self._operations[index].cell) for index in indices}
            if not indices:
                continue
            if kind == "note" and (told := [step for step, of in steps if pipelines <= of]):
                told[-1].extend(indices)  # together with what it tells of
                continue
            if not steps or (last != kind and len(steps[-1][1] | pipelines) > 1):
                steps.append(([], set()))
                last = kind
            elif last != kind:
                last = ""  # of several kinds, in one pipeline: takes more of this pipeline only
            steps[-1][0].extend(indices)
            steps[-1][1].update(pipelines)
        return [indices for indices, _ in steps]

    def _pipeline(self, cell: int) -> int:
        return self._core.writer.pipeline_of(cell)

    def _written(self, answers: Sequence[list[Any]], order: Sequence[Sequence[int]] | None) -> Written:
        """Put the answers of all operations together, and tell who watches the streams."""
        if order is None:
            found = answers[0][len(self._blobs) :] if self._blobs else answers[0]
        else:
            found = [None] * len(self._operations)
            for indices, of_stage in zip(order, answers, strict=True):
                for index, answer in zip(indices, of_stage, strict=True):
                    if index >= 0:
                        found[index] = answer
        made, notes = [found[index] for index in self._made], [found[index] for index in self._notes]
        claimed = [[list(some) for some in found[index]] for index in self._claims]
        written = Written([], [], made, notes, claimed)
        for part, appending in self._appends:
            written.appended.extend(appending.answers(found[part.start : part.stop]))
        for part in self._streams:
            operations, replies = self._operations[part.start : part.stop], found[part.start : part.stop]
            written.offsets.append(_offsets(operations, replies))
            if part:
                self._core.told(operations[-1], replies[-1])
        return written


def _durable(operations: Sequence[Operation]) -> bool:
    return any(operation.words[0] != "acknowledge" for operation in operations)


# -- ports


class Port:
    """Asks the store for what is open."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    @property
    def _core(self) -> Core:
        return self._store.core


class RedisMailboxes(Port):
    """Ordered entries per owner."""

    async def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> list[Appended]:
        plan = Plan(self._core)
        plan.append(owners, draft, now, bound, spared, generations)
        return (await plan.carry_out()).appended

    async def make(self, owner: str) -> int:
        return int(await self._core.one(Operation(("make", self._core.cells.of_owner(owner), owner))))

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        core = self._core
        cell = core.cells.of_owner(owner)
        found: list[Entry] = []
        after = max(after, 0)
        while limit > 0:
            page = min(limit, MAX_READ)
            reply = await core.evaluate(cell, READ, "eg", owner, after, page, now)
            if reply:
                after = int(reply[-3])
                entries = await self._entries(owner, reply)
                found += entries
                limit -= len(entries)
            if len(reply) < 3 * page:
                break
        return found

    async def _entries(self, owner: str, reply: list[bytes]) -> list[Entry]:
        rows = [
            (int(reply[index]), unpack_entry(reply[index + 1]), int(reply[index + 2] or 0))
            for index in range(0, len(reply), 3)
        ]
        wanted = {entry.digest for _, entry, _ in rows if entry.digest}
        payloads = await self._store.blobs.fetch(wanted) if wanted else {}
        found: list[Entry] = []
        for position, entry, mark in rows:
            payload = payloads.get(entry.digest) if entry.digest else entry.payload
            if payload is None:
                # Nothing behind it is held up; `check` tells of it too.
                log.error("payload_missing", owner=owner, position=position, digest=entry.digest.hex())
                continue
            found.append(Entry(position, entry.body, payload, entry.key, entry.stored_at, entry.expires_at, mark))
        return found

    async def entries(self, owner: str, positions: Sequence[int], now: float) -> list[Entry]:
        core, found = self._core, list[Entry]()
        cell = core.cells.of_owner(owner)
        for start in range(0, len(positions), MAX_READ):
            some = positions[start : start + MAX_READ]
            fields = [field for position in some for field in (f"{position}", f"m{position}")]
            values = await core.ask(cell, "HMGET", "e:", owner, *fields)
            reply: list[bytes] = []
            for index, position in enumerate(some):
                if values[2 * index] is not None:
                    reply += (b"%d" % position, values[2 * index], values[2 * index + 1])
            found += [entry for entry in await self._entries(owner, reply) if not 0 < entry.expires_at <= now]
        return found

    async def claimed(self, owner: str, claimer: str) -> list[int]:
        core = self._core
        claims = await core.ask(core.cells.of_owner(owner), "ZRANGE", "q:", owner, 0, -1)
        return [int(place) for place, _, who in (claim.partition(b":") for claim in claims) if who == claimer.encode()]

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        operations = acknowledge_operations(self._core, owner, positions)
        return sum(await self._core.writer.write(operations, durable=False)) if operations else 0

    async def mark(self, owner: str, position: int, mark: int) -> bool:
        check_mark(mark)
        return bool(await self._core.one(mark_operation(self._core, owner, position, mark)))

    async def info(self, owner: str) -> MailboxInfo:
        core = self._core
        return MailboxInfo(*await core.evaluate(core.cells.of_owner(owner), INFO, "e", owner))

    async def clear(self, owner: str) -> int:
        return await self._step_by_step("clear", owner)

    async def forget(self, owner: str, fence: Fence | None = None) -> int:
        return await self._step_by_step("forget", owner, fence)

    async def _step_by_step(self, operation: str, owner: str, fence: Fence | None = None) -> int:
        core = self._core
        conditions = [] if fence is None else [condition_of(core, fence)]
        cell, total, upto, more = core.cells.of_owner(owner), 0, -1, 1
        while more:
            step = Operation((operation, cell, owner, upto, MAX_REMOVED), 2 * MAX_REMOVED)
            [[(removed, upto, more)]] = await core.writer.submit([JobStage([step], conditions=conditions)])
            total += removed
        return total

    async def owners(self, feed: int | None = None) -> AsyncIterator[str]:
        check_feed(feed, self._core.cells.count)
        seen: set[bytes] = set()
        async for _, members in self._core.scan("SSCAN", "o", "COUNT", 500, only=feed):
            for member in members:
                if member not in seen:
                    seen.add(member)
                    yield member.decode()


class RedisBlobs(Port):
    """Payloads by content."""

    async def put(self, data: bytes, now: float, keep_until: float = 0.0) -> bytes:
        core = self._core
        digest = hashlib.sha256(data).digest()
        lasts = max(keep_until - now, 1.0)
        await core.one(blob_operation(core, digest, data, keep_until, lasts, ""))
        return digest

    async def get(self, digest: bytes, now: float) -> bytes | None:
        core = self._core
        cell = core.cells.of(digest)
        value = await core.ask(cell, "GET", "b:", digest)
        if value is None:
            return None
        (keep_until,) = TIME.unpack_from(value)
        if now < keep_until or digest in await self.referred(core, [digest]):
            return bytes(value[TIME.size :])
        return None

    async def count(self) -> tuple[int, int]:
        """Count blobs as of the last sweep, where the servers have removed some themselves."""
        counts = await self._core.everywhere("HMGET", "n", "blobs", "octets")
        return sum(int(blobs or 0) for blobs, _ in counts), sum(int(size_bytes or 0) for _, size_bytes in counts)

    async def fetch(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the payloads that entries refer to."""
        core = self._core
        found: dict[bytes, bytes] = {}
        missing: list[bytes] = []
        for digest in digests:
            data = core.cache.get(digest)
            if data is None:
                missing.append(digest)
            else:
                found[digest] = data
        values = await asyncio.gather(*(core.ask(core.cells.of(digest), "GET", "b:", digest) for digest in missing))
        for digest, value in zip(missing, values, strict=True):
            if value is not None:
                found[digest] = value[TIME.size :]
                core.cache.put(digest, found[digest])
        return found

    @staticmethod
    async def referred(core: Core, digests: Sequence[bytes]) -> set[bytes]:
        """Return those digests that an entry of any cell refers to."""
        counts = await core.everywhere("HMGET", "r", *digests)
        return {digest for of_cell in counts for digest, count in zip(digests, of_cell, strict=True) if count}

    async def collect(self, cell: int, digests: Sequence[bytes], now: float) -> tuple[int, int]:
        """Remove blobs of one cell that nothing holds; how many went, and their bytes."""
        core = self._core
        sweep = core.next_hold()
        states = await core.one(
            Operation(("condemn", cell, now, sweep, [raw(digest) for digest in digests]), len(digests)), durable=False
        )
        gone = sum(state == 0 for state in states)
        condemned = [digest for digest, state in zip(digests, states, strict=True) if state == 2]
        if not condemned:
            return gone, 0
        referred = await self.referred(core, condemned)
        doomed = [raw(digest) for digest in condemned if digest not in referred]
        if not doomed:
            return gone, 0
        removed, size_bytes = await core.one(Operation(("discard", cell, sweep, doomed), len(doomed)), durable=False)
        return gone + removed, size_bytes


class RedisRecords(Port):
    """Small named collections."""

    async def put(self, collection: str, key: str, value: bytes, expires_at: float = 0.0) -> None:
        await self._core.one(put_operation(self._core, collection, key, value, expires_at))

    async def get(self, collection: str, key: str, now: float) -> bytes | None:
        core = self._core
        stored = await core.ask(core.cells.of_record(collection, key), "HGET", "R:", collection, key)
        return None if stored is None else _alive(stored, now)

    async def get_many(self, collection: str, keys: Sequence[str], now: float) -> list[bytes | None]:
        core = self._core
        found: list[bytes | None] = [None] * len(keys)
        cells: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            cells.setdefault(core.cells.of_record(collection, key), []).append(index)

        async def read(cell: int, indices: list[int]) -> None:
            for start in range(0, len(indices), MAX_READ):
                some = indices[start : start + MAX_READ]
                values = await core.ask(cell, "HMGET", "R:", collection, *(keys[index] for index in some))
                for index, stored in zip(some, values, strict=True):
                    found[index] = None if stored is None else _alive(stored, now)

        await asyncio.gather(*(read(cell, indices) for cell, indices in cells.items()))
        return found

    async def delete(self, collection: str, key: str) -> bool:
        return bool(await self._core.one(delete_operation(self._core, collection, key)))

    async def of_home(self, collection: str, home: str, now: float) -> dict[str, bytes]:
        core, cell, (key, single) = self._core, self._core.cells.of(home), records_of(home, collection)
        if single:
            stored = await core.ask(cell, "HGET", "R:", collection, key)
            return {} if stored is None else _readable({key: stored}, now)
        keys = [core.key(cell, "i:", home), core.key(cell, "R:", collection)]
        found = await core.look(cell, HOME, keys, collection, MAX_OPENED)
        if found is None:
            return _readable(await self.many_of_home(cell, home, collection), now)
        return _readable({key.decode(): value for key, value in zip(found[::2], found[1::2], strict=True)}, now)

    async def many_of_home(self, cell: int, home: str, collection: str) -> dict[str, bytes]:
        """Return the records that a home with many has in a collection, as they are stored, bit by bit."""
        core = self._core
        parts = [name.decode().partition("\0") async for name in core.members(cell, "i:", home)]
        names = [rest for of, _, rest in parts if of == collection]
        found: dict[str, bytes] = {}
        for start in range(0, len(names), MAX_READ):
            some = names[start : start + MAX_READ]
            values = await core.ask(cell, "HMGET", "R:", collection, *some)
            found |= {name: value for name, value in zip(some, values, strict=True) if value is not None}
        return found

    async def scan(
        self, collection: str, now: float, prefix: str = "", feed: int | None = None
    ) -> AsyncIterator[tuple[str, bytes]]:
        check_feed(feed, self._core.cells.count)
        start = prefix.encode()
        pattern = "".join(f"\\{letter}" if letter in "\\*?[]" else letter for letter in prefix) + "*"
        cell, seen = -1, set[bytes]()
        count = SMALL_PAGE if collection in PAIRS else PAGE
        pages = self._core.scan("HSCAN", f"R:{collection}", "MATCH", pattern, "COUNT", count, only=feed)
        async for of_cell, page in pages:
            if of_cell != cell:
                cell, seen = of_cell, set()
            for key, stored in zip(page[::2], page[1::2], strict=True):
                value = _alive(stored, now)
                if value is not None and key not in seen and key.startswith(start):
                    seen.add(key)
                    yield key.decode(), value


def _attached(home: str, token: bytes, answer: Sequence[Any]) -> Attached:
    number, previous, mailbox, noted = answer
    return Attached(Fence(home, number, token), previous, MailboxInfo(*mailbox), noted)


def _alive(stored: bytes, now: float) -> bytes | None:
    (expires_at,) = TIME.unpack_from(stored)
    return None if 0 < expires_at <= now else stored[TIME.size :]


def _readable(stored: dict[str, bytes], now: float) -> dict[str, bytes]:
    """Return the values of records as readers see them, without those that have expired."""
    return {key: value for key, each in stored.items() if (value := _alive(each, now)) is not None}


class RedisStreams(Port):
    """Append-only sequences, each a Redis stream in one cell."""

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        core = self._core
        operations = stream_operations(core, stream, values, now)
        firsts = await core.writer.write(operations) if operations else []
        if firsts:
            core.told(operations[-1], firsts[-1])
        return [
            first + index
            for first, operation in zip(firsts, operations, strict=True)
            for index in range(len(operation.words[3]))
        ]

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        if limit <= 0:
            return []
        core, start = self._core, f"{max(after, 0) + 1}-0"
        rows = await core.ask(core.cells.of(stream), "XRANGE", "S:", stream, start, "+", "COUNT", limit)
        return [StreamRecord(int(id_.split(b"-")[0]), float(fields[1]), fields[3]) for id_, fields in rows]

    async def find(self, stream: str, time: float) -> int:
        core = self._core
        return int(await core.evaluate(core.cells.of(stream), FIND, "Ss", stream, repr(time)))

    async def info(self, stream: str) -> StreamInfo:
        core = self._core
        return StreamInfo(*await core.evaluate(core.cells.of(stream), EXTENT, "Ss", stream))

    async def trim(
        self, stream: str, before: float = 0.0, size_bytes: int = 0, records: int = 0, budget: int = 1000
    ) -> Swept:
        core = self._core
        words = ("trim", core.cells.of(stream), stream, before, size_bytes, records, budget)
        removed, freed, more = await core.one(Operation(words, budget), durable=False)
        return Swept(removed, freed, b"more" if more else None)

    async def drop(self, stream: str) -> None:
        await self._core.one(Operation(("drop", self._core.cells.of(stream), stream)))

    async def names(self) -> list[str]:
        return [name.decode() for names in await self._core.everywhere("SMEMBERS", "s") for name in names]

    def watch(self, told: Watcher) -> Callable[[], None]:
        return self._store.watchers.add(told)


class RedisFeeds(Port):
    """Notes of changes, one feed per cell."""

    def feed_of(self, home: str) -> int:
        return self._core.cells.of(home)

    async def ends(self) -> list[FeedEnd]:
        last = await self._core.everywhere("XREVRANGE", "F", "+", "-", "COUNT", 1)
        return [FeedEnd(note.number, note.nonce) if note else FeedEnd() for note in map(_last_note, last)]

    async def read(self, feed: int, after: FeedEnd, limit: int) -> FeedPage:
        """Read with the note that the reader knows, to see that it is still the same."""
        limit = max(limit, 0)
        rows = await self._core.ask(feed, "XRANGE", "F", b"", f"{after.number}-0", "+", "COUNT", limit + 1)
        notes = list(map(_note, rows))
        if after.number:
            known = bool(notes) and FeedEnd(notes[0].number, notes[0].nonce) == after
            return FeedPage(notes[1:]) if known else FeedPage([], gap=True)
        return FeedPage(notes[:limit]) if not notes or notes[0].number == 1 else FeedPage([], gap=True)

    def follow(self, after: Sequence[FeedEnd]) -> FeedTail:
        return RedisTail(self._core, self, after, self._store.tails)


def _note(row: Any) -> Note:
    id_, fields = row
    return Note(int(id_.split(b"-")[0]), bytes(fields[1]), bytes(fields[3]))


def _last_note(rows: list[Any]) -> Note | None:
    return _note(rows[0]) if rows else None


class RedisCoordination(Port):
    """Attachments, fences and leases on Redis."""

    async def attach(self, owner: str, member: str) -> Attached:
        home, token = home_of_owner(owner), secrets.token_bytes(8)
        words = ("attach", self._core.cells.of(home), home, member, token.hex(), owner)
        return _attached(home, token, await self._core.one(Operation(words)))

    async def open(self, owner: str, member: str, collections: Sequence[str], now: float) -> Opened:
        opening = OpenOperation(self._core, owner, member, collections)
        return await self._opened(opening, now, await self._core.one(opening.operation("open")))

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
        opening = OpenOperation(self._core, owner, member, collections)
        answer = await self._core.one(opening.operation("try_open", displace), durable=wait)
        return Elsewhere(answer) if isinstance(answer, str) else await self._opened(opening, now, answer)

    async def _opened(self, opening: OpenOperation, now: float, answer: Sequence[Any]) -> Opened:
        home, collections = opening.home, opening.collections
        attached, rows = answer
        if rows is False:
            records = [await self._store.records.of_home(collection, home, now) for collection in collections]
        else:
            found = [{key: value.encode("latin-1") for key, value in some} for some in rows]
            records = [_readable(some, now) for some in found]
        return Opened(_attached(home, opening.token, attached), records)

    async def detach(self, fence: Fence) -> bool:
        return bool(await self._core.one(detach_operation(self._core, fence)))

    @property
    def takeovers(self) -> int:
        servers = self._core.servers
        return servers.reconnects + servers.topologies

    async def attached(self, member: str, feed: int) -> AsyncIterator[Fence]:
        core, cursor, seen = self._core, b"0", set[bytes]()
        check_feed(feed, core.cells.count)
        while True:
            cursor, page = await core.look(feed, ATTACHED, [core.key(feed, "a")], member, cursor, MAX_READ)
            for home, stored in zip(page[::2], page[1::2], strict=True):
                if home not in seen:
                    seen.add(home)
                    number, _, token = stored.partition(b":")
                    yield Fence(home.decode(), int(number), bytes.fromhex(token.decode()))
            if cursor == b"0":
                return

    async def due(self, feed: int, now: float, limit: int) -> list[tuple[str, float]]:
        core = self._core
        check_feed(feed, core.cells.count)
        words = ("D", b"", "-inf", repr(now), "WITHSCORES", "LIMIT", 0, max(limit, 0))
        found = await core.ask(feed, "ZRANGEBYSCORE", *words)
        return [(home.decode(), float(at)) for home, at in zip(found[::2], found[1::2], strict=True)]

    async def time(self) -> float:
        seconds, microseconds = await self._core.servers.ask(self._core.cells.slot(0), "TIME")
        return int(seconds) + int(microseconds) / 1e6

    async def members(self) -> list[Member]:
        return await redis_members.listed(self._core)

    async def fence_member(self, writer: str) -> bool:
        return await redis_members.fence(self._core, writer)

    async def acquire(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:  # noqa: ARG002 - rule 3
        words = ("acquire", self._core.cells.of(name), name, holder, max(int(ttl * 1000), 1))
        token = await self._core.one(Operation(words))
        return Lease(name, token) if token else None

    async def renew(self, lease: Lease, ttl: float, now: float) -> bool:  # noqa: ARG002 - rule 3
        words = ("renew", self._core.cells.of(lease.name), lease.name, lease.token, max(int(ttl * 1000), 1))
        return bool(await self._core.one(Operation(words)))

    async def release(self, lease: Lease) -> bool:
        words = ("release", self._core.cells.of(lease.name), lease.name, lease.token)
        return bool(await self._core.one(Operation(words)))

    async def notify(self, node: str, data: bytes) -> None:
        core = self._core
        channel = core.cells.channel(node)
        command = "SPUBLISH" if core.servers.clustered else "PUBLISH"
        for _ in range(2):
            address = core.servers.master(slot_of(channel))
            try:
                if address is not None:
                    connection = await core.servers.connection(address, Purpose.READ)
                    await connection.room()
                    await connection.call(command, channel, data)
                    return
            except (LostError, ServerError) as error:
                log.debug("redis_notify_failed", node=node, error=str(error))
            await core.servers.refresh()

    async def listen(self, node: str) -> AsyncIterator[bytes]:
        core = self._core
        queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAKE_UPS)
        task = asyncio.create_task(WakeupListener(core, node, queue).run(), name=f"redis-listener-{node}")
        self._store.listeners.add(task)
        try:
            while True:
                yield await queue.get()
        finally:
            task.cancel()
            self._store.listeners.discard(task)


class WakeupListener:
    """A subscription that comes back, wherever its channel lives."""

    def __init__(self, core: Core, node: str, queue: asyncio.Queue[bytes]) -> None:
        self._servers = core.servers
        self._channel = core.cells.channel(node)
        self._slot = slot_of(self._channel)
        self._queue = queue
        self._connection: RedisConnection | None = None

    async def run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            address = self._servers.master(self._slot)
            try:
                if address is not None:
                    await self._follow(address)
                    pause = FIRST_PAUSE
            except StoreError as error:
                log.debug("redis_listener_lost", error=str(error))
            except Exception:
                log.exception("redis_listener_failed", again_in=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            await self._servers.refresh()

    async def _follow(self, address: ServerAddress) -> None:
        """Listen as long as the connection lasts."""
        access = self._servers.access
        connection = self._connection = await connect(address, access, self._take)
        try:
            connection.send("SSUBSCRIBE" if self._servers.clustered else "SUBSCRIBE", self._channel)
            while not connection.closed.done():
                await asyncio.wait([connection.closed], timeout=LISTENER_PULSE)
                if self._servers.master(self._slot) != address or connection.silence > access.reply_timeout:
                    return
                if connection.is_open:
                    connection.send("PING")
        finally:
            connection.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, ServerError):  # the slot has moved
            if self._connection is not None:
                self._connection.close()
        elif message[0] in {b"message", b"smessage"} and not self._queue.full():
            self._queue.put_nowait(message[2])
        elif message[0] == b"sunsubscribe" and self._connection is not None:
            self._connection.close()


# -- the store


class RedisStore:
    """`redis://`, `rediss://`, `redis+cluster://` and `rediss+cluster://` (see `redis_place`)."""

    atomic = False

    def __init__(
        self,
        url: str,
        durability: Durability = Durability.SAFE,
        options: RedisOptions | None = None,
        *,
        only_read: bool = False,
    ) -> None:
        """Take `only_read`: also a store of the format before is opened, to be exported; every write is refused."""
        self._place: RedisUrl = parse_url(url, options or RedisOptions())
        self._durability = durability
        self._only_read = only_read
        self._open: Core | None = None
        self.listeners: set[asyncio.Task[None]] = set()
        self.tails: set[RedisTail] = set()
        self.watchers = Watchers()  #: of streams
        self.backlog = Backlog()
        self.mailboxes = RedisMailboxes(self)
        self.blobs = RedisBlobs(self)
        self.records = RedisRecords(self)
        self.streams = RedisStreams(self)
        self.feeds = RedisFeeds(self)
        self.coordination = RedisCoordination(self)

    @property
    def core(self) -> Core:
        if self._open is None:
            raise StoreError("the store is closed")
        return self._open

    async def open(self) -> None:
        if self._open is not None:
            raise StoreError("the store is open already")
        place, options = self._place, self._place.options
        servers = Servers(place.addresses, place.access, place.clustered, options.patience, ALL)
        try:
            await servers.open()
            replicas = await check_servers(servers, self._durability, options)
            cells = Cells(options.prefix, await agree_on_cells(servers, options, replicas, self._only_read))
            writer = RedisWriter(servers, cells, replicas, TRACED if options.trace else COMMIT)
            core = Core(servers, cells, writer, options.blob_cache, self.watchers)
            if self._only_read:
                core.writer.fenced = True
            else:
                await redis_members.join(core, replicas)
        except ServerError as error:
            await servers.close()
            raise refusal(error, place.addresses[0]) from None
        except BaseException:
            await servers.close()
            raise
        self._open = core

    async def close(self) -> None:
        core = self._open
        if core is None:
            return
        for task in list(self.listeners):
            task.cancel()
        for tail in list(self.tails):
            tail.close("the store is closed")
        await core.writer.close()
        await redis_members.leave(core)
        await core.servers.close()
        self._open = None

    def write(self, batch: Batch) -> Commit[Written]:
        try:
            plan = Plan(self.core)
            plan.add(batch)
            return plan.carry_out(self.backlog, *weigh(batch))
        except Exception as error:  # noqa: BLE001 - the caller is told where it looks
            return Commit.failed(error)

    @property
    def writer(self) -> str:
        return self.core.writer.name

    async def sweep(
        self, now: float, budget: int, cursor: bytes = b"", kept: Callable[[int], bool] | None = None
    ) -> Swept:
        if not cursor:
            await redis_members.sweep(self.core)
        swept = await Sweep(self.core, self.blobs, now, budget, kept or _every_cell).step(cursor)
        self.core.swept += swept.removed
        return swept

    async def figures(self) -> StoreFigures:
        core = self.core
        counts = await core.everywhere("HMGET", "n", "entries", "blobs", "octets", "records")
        entries, blobs, size_bytes, records = (
            sum(int(count or 0) for count in column) for column in zip(*counts, strict=True)
        )
        disk = 0
        for address in core.servers.topology.all_masters():
            try:
                disk += int((await server_info(core.servers, address)).get("aof_current_size", "0"))
            except (LostError, ServerError):
                pass  # a server that is away has a size that cannot be known
        return StoreFigures(
            engine="redis+cluster" if core.servers.clustered else "redis",
            entries=entries,
            blobs=blobs,
            blob_octets=size_bytes,
            records=records,
            commits=core.writer.commits,
            writes=core.writer.writes,
            queued=core.writer.queued,
            disk_octets=disk,
            swept=core.swept,
            full=core.writer.full,
        )

    def condition(self) -> StoreCondition:
        core = self._open
        if core is None:
            return StoreCondition("redis", 0, 0, 0, full=False, trouble="is closed", detail="the store is closed")
        writer = core.writer
        trouble, detail = writer.condition()
        engine = "redis+cluster" if core.servers.clustered else "redis"
        return StoreCondition(engine, writer.commits, writer.writes, writer.queued, writer.full, trouble, detail)

    async def check(self) -> list[str]:
        return await Inspection(self.core.servers, self.core.cells).run()


def _every_cell(_cell: int) -> bool:
    return True


class Sweep:
    """One step of a sweep: first what has expired, cell by cell, then blobs that nothing refers to.

    Cursors: `e CELL` and `b CELL PAGE DIGEST`, the digest in hex: pages of a scan may be larger than a step, and are
    then gone through in the order of digests.
    """

    def __init__(self, core: Core, blobs: RedisBlobs, now: float, budget: int, kept: Callable[[int], bool]) -> None:
        self._core = core
        self._blobs = blobs
        self._now = now
        self._kept = kept
        self._left = budget
        self._removed = 0
        self._size_bytes = 0
        self._entries: list[tuple[str, int]] = []

    async def step(self, cursor: bytes) -> Swept:
        phase, *place = cursor.split() or [b"e", b"0"]
        if phase == b"e":
            stopped = await self._expired(int(place[0]))
            if stopped is not None:
                return Swept(self._removed, self._size_bytes, stopped, tuple(self._entries))
            place = [b"0", b"0"]
        mark = bytes.fromhex(place[2].decode()) if len(place) > 2 else b""
        following = await self._unreferred(int(place[0]), place[1], mark)
        return Swept(self._removed, self._size_bytes, following, tuple(self._entries))

    async def _expired(self, start: int) -> bytes | None:
        entries = await self._core.everywhere("ZCOUNT", "x", "-inf", self._now)
        records = await self._core.everywhere("ZCOUNT", "y", "-inf", self._now)
        for cell in range(start, self._core.cells.count):
            if not entries[cell] + records[cell] or not self._kept(cell):
                continue
            more = True
            while more:
                if self._left <= 0:
                    return b"e %d" % cell
                most = min(self._left, MAX_REMOVED)
                removed, size_bytes, more, gone = await self._core.one(
                    Operation(("expire", cell, self._now, most), 2 * most), durable=False
                )
                self._removed += removed
                self._size_bytes += size_bytes
                self._left -= removed
                self._entries += ((owner, int(at)) for owner, at in zip(gone[::2], gone[1::2], strict=True))
        return None

    async def _unreferred(self, start: int, page: bytes, mark: bytes) -> bytes | None:
        sizes = await self._core.everywhere("HLEN", "b")
        for cell in range(start, self._core.cells.count):
            if not sizes[cell] or not self._kept(cell):
                page, mark = b"0", b""
                continue
            while True:
                if self._left <= 0:
                    return b"b %d %s %s" % (cell, page, mark.hex().encode())
                following, found = await self._core.ask(cell, "HSCAN", "b", b"", page, "COUNT", 100)
                digests = sorted(digest for digest in set(found[::2]) if digest > mark)
                some = digests[: self._left]
                if some:
                    removed, size_bytes = await self._blobs.collect(cell, some, self._now)
                    self._removed += removed
                    self._size_bytes += size_bytes
                    self._left -= len(some)
                if len(some) < len(digests):
                    mark = some[-1]
                    continue
                page, mark = following, b""
                if page == b"0":
                    break
        return None
