"""One atomic write: mailboxes, shared payloads, records, streams, leases, and the sweep of what has ended."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import msgspec
from rocksdict import WriteBatch

from motorcade.storage import packed_rows, tables
from motorcade.storage.deltas import DeltaWrite
from motorcade.storage.due import DUE, due_value
from motorcade.storage.files import RocksTables, scan
from motorcade.storage.homes import CLIENT, home_of_owner, records_of
from motorcade.storage.offers import SUBSCRIPTIONS, draft_of, is_stored, offered
from motorcade.storage.ports import (
    FEED_KEPT,
    Appended,
    Attached,
    Condition,
    Elsewhere,
    Expect,
    Fence,
    Holds,
    Lease,
    Offer,
    Opened,
    StoreConflictError,
    StoreFencedError,
    Swept,
)
from motorcade.storage.tables import EndingKind, after_prefix
from motorcade.storage.transaction.batch import OverlaidBatch
from motorcade.storage.transaction.mailboxes import MailboxChanges
from motorcade.storage.transaction.payloads import SharedPayloads
from motorcade.storage.transaction.state import StreamHead, WriterState

MORE = b"more"

_pack = tables.NUMBER.pack

_decode_entries = msgspec.msgpack.Decoder(tuple[list[str], list[int]]).decode
_decode_tokens = msgspec.msgpack.Decoder(tuple[bytes, list[str]]).decode


class Transaction:
    """One atomic write in the making, which several small calls may share."""

    def __init__(self, opened: RocksTables, state: WriterState) -> None:
        self.opened = opened
        self._state = state
        self._batch = batch = OverlaidBatch(opened, state)
        self.payloads = SharedPayloads(batch)
        self.mailboxes = MailboxChanges(batch, self.payloads)
        self._streams: dict[str, StreamHead] = {}  #: to be written
        self.grown: dict[str, int] | None = None  #: streams that were appended to: their last offset
        self.detached: dict[str, tuple[str, Fence]] | None = None  #: homes given up: as they were attached
        self._delta_write: DeltaWrite | None = None
        self._size_bytes = 0  #: of all that is written
        self.swept = 0

    def finish(self) -> WriteBatch:
        """Return everything of this transaction, to be written as a whole."""
        batch, state = self._batch, self._state
        self.mailboxes.finish()
        if self.payloads.messages or self.payloads.blobs:
            self.payloads.finish()
        for stream, ends in self._streams.items():
            row = tables.STREAM.pack(ends.first, ends.last, ends.records, ends.size_bytes, ends.time)
            batch.put(tables.name(stream), row, batch.handles["streams"])
        deltas, raw = batch.deltas, batch.raw
        if deltas or len(raw):
            deltas[tables.TOTALS_DELTA] = state.totals()
            self._delta_write = state.deltas.write(self.opened, raw, deltas)
        self._size_bytes = raw.size_in_bytes()
        return raw

    def written(self) -> None:
        """Let readers know what is certain now: the transaction is in the tables."""
        if self._delta_write is not None:
            self._state.deltas.written(self._delta_write)
        self.mailboxes.written(self._size_bytes)

    def _check_entry(self, condition: Holds) -> None:
        """Raise `StoreConflictError` unless an entry is there."""
        if not self.mailboxes.has(condition.owner, condition.position):
            raise StoreConflictError(f"the mailbox {condition.owner} has no entry {condition.position}")

    # -- records

    def _check_record(self, condition: Expect) -> None:
        """Raise `StoreConflictError` unless a record is as expected."""
        where = tables.name(condition.collection) + b"\0" + tables.name(condition.key)
        row = self._batch.get("records", where)
        if row is not None and 0 < tables.EXPIRES.unpack_from(row)[0] <= condition.now:
            row = None
        if (row if row is None else row[tables.EXPIRES.size :]) != condition.value:
            raise StoreConflictError(f"the record {condition.collection}/{condition.key} is not as expected")

    def put_record(self, collection: str, key: str, value: bytes, expires_at: float, rank: int = 0) -> None:
        where = tables.name(collection) + b"\0" + tables.name(key)
        before = self._batch.get("records", where)
        size = tables.EXPIRES.size
        if rank and before is not None and before[size : size + rank] > value[:rank]:
            return
        if before is None:
            self._state.records += 1
        old = tables.EXPIRES.unpack_from(before)[0] if before is not None else 0.0
        if expires_at and not 0 < old <= expires_at:
            # A record that is prolonged again and again needs no second row: the sweep moves the first one on.
            self._batch.set("endings", tables.ending(expires_at, EndingKind.RECORD, where), b"")
        self._batch.set("records", where, tables.EXPIRES.pack(expires_at) + value)

    def delete_record(self, collection: str, key: str) -> bool:
        where = tables.name(collection) + b"\0" + tables.name(key)
        if self._batch.get("records", where) is None:
            return False
        self._batch.unset("records", where)
        self._state.records -= 1
        return True

    def set_due(self, home: str, at: float) -> None:
        """Set the time when a home comes up."""
        if at > 0:
            self.put_record(DUE, home, due_value(at), 0.0)
        else:
            self.delete_record(DUE, home)

    # -- messages for clients that are looked up

    def offer(self, offer: Offer) -> Appended:
        """Append to the mailbox of a client if it has a subscription that matches."""
        home, owner = CLIENT + offer.client_id, f"session:{offer.client_id}"
        stored = self._subscriptions(home, offer.now)
        found = offered(offer, home, stored, self.mailboxes.info(owner).generation)
        attached = self._state.attached[home][0] if home in self._state.attached else ""
        if found is None or not is_stored(offer, found, attached):
            return Appended(owner, 0, attached=attached if found is not None else "", offered=found)
        [answer] = self.mailboxes.append([owner], draft_of(offer.draft, found), offer.now, offer.bound)
        return msgspec.structs.replace(answer, offered=found)

    def _subscriptions(self, home: str, now: float) -> dict[str, bytes]:
        """Return the records of a client's subscriptions, as this transaction leaves them."""
        prefix, _ = records_of(home, SUBSCRIPTIONS)
        found = records_of_home(SUBSCRIPTIONS, prefix, False, now, self.opened)
        within = tables.name(SUBSCRIPTIONS) + b"\0"
        start = within + prefix.encode()
        for key, row in self._batch.overlay["records"].items():
            if key.startswith(start):
                found.pop(name := key[len(within) :].decode(), None)
                if row is not None and not 0 < tables.EXPIRES.unpack_from(row)[0] <= now:
                    found[name] = row[tables.EXPIRES.size :]
        return found

    # -- streams

    def append_stream(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        if not values:
            return []
        prefix = tables.name(stream) + b"\0"
        head = self._stream(stream) or StreamHead()
        head.time = max(head.time, now)
        offsets = list(range(head.last + 1, head.last + 1 + len(values)))
        for offset, row, size_bytes in packed_rows.rows_of(head.last + 1, head.time, values):
            self._batch.put(prefix + _pack(offset), row, self._batch.handles["rows"])
            head.size_bytes += size_bytes
        head.last = offsets[-1]
        head.records += len(values)
        self._streams[stream] = head
        if self.grown is None:
            self.grown = {}
        self.grown[stream] = head.last
        return offsets

    def trim(self, stream: str, before: float, size_bytes: int, records: int, budget: int) -> Swept:
        head = self._stream(stream)
        if head is None or not head.records:
            return Swept(0, 0, None)
        prefix = tables.name(stream) + b"\0"
        removed, freed, cursor = 0, 0, None
        for offset, time, size, key in self._records_of(prefix, head.first):
            if not (time < before or 0 < records < head.records or 0 < size_bytes < head.size_bytes):
                break
            if removed == budget:
                cursor = MORE
                break
            if key:
                self._batch.delete(key, self._batch.handles["rows"])
            removed += 1
            freed += size
            head.records -= 1
            head.size_bytes -= size
            head.first = offset + 1
        if removed:
            self._streams[stream] = head
        return Swept(removed, freed, cursor)

    def _records_of(self, prefix: bytes, first: int) -> Iterator[tuple[int, float, int, bytes]]:
        """Yield offset, time and bytes of a stream's records, oldest first; the last one of a row has the row's key."""
        for key, row in scan(self.opened.rows, prefix + _pack(first), after_prefix(prefix)):
            last = tables.NUMBER.unpack(key[-8:])[0]
            time, _ = packed_rows.extent(row)
            sizes = packed_rows.sizes(row)
            offset = last - len(sizes) + 1
            for size in sizes:
                if offset >= first:
                    yield offset, time, size, key if offset == last else b""
                offset += 1

    def drop_stream(self, stream: str) -> None:
        name = tables.name(stream)
        if self._stream(stream) is None:
            return
        self._streams.pop(stream, None)
        if self.grown is not None:
            self.grown.pop(stream, None)
        self._batch.unset("streams", name)
        self._batch.raw.delete_range(name + b"\0", name + b"\1", self._batch.handles["rows"])

    def _stream(self, stream: str) -> StreamHead | None:
        head = self._streams.get(stream)
        if head is None:
            row = self._batch.get("streams", tables.name(stream))
            head = StreamHead(*tables.STREAM.unpack(row)) if row is not None else None
        return head

    # -- feeds

    def add_note(self, data: bytes) -> int:
        """Add a note to the feed; its number."""
        state, handle = self._state, self._batch.handles["feed"]
        state.feed += 1
        self._batch.put(_pack(state.feed), secrets.token_bytes(tables.NONCE_SIZE) + data, handle)
        if state.feed > FEED_KEPT:
            self._batch.delete(_pack(state.feed - FEED_KEPT), handle)
        return state.feed

    # -- coordination; attachments are kept in memory only, since none outlives the process

    def attach(self, owner: str, member: str) -> Attached:
        home, attached = home_of_owner(owner), self._state.attached
        mailbox = self.mailboxes.info(owner)
        previous, old = attached.get(home, ("", None))
        fence = Fence(home, old.number + 1 if old is not None else 1, secrets.token_bytes(8))
        attached[home] = member, fence
        return Attached(fence, previous, mailbox, self._state.feed)

    def open(self, owner: str, member: str, collections: Sequence[str], now: float) -> Opened:
        """Attach, and read the records of the home; shares no transaction, so all of them are in the table."""
        home = home_of_owner(owner)
        places = [records_of(home, collection) for collection in collections]
        found = [
            records_of_home(collection, *place, now, self.opened)
            for collection, place in zip(collections, places, strict=True)
        ]
        return Opened(self.attach(owner, member), found)

    def try_open(
        self, owner: str, member: str, collections: Sequence[str], now: float, displace: str
    ) -> Opened | Elsewhere:
        """Open a home unless another member than these two has it."""
        holder = self._state.attached.get(home_of_owner(owner), ("", None))[0]
        if holder not in ("", member, displace):
            return Elsewhere(holder)
        return self.open(owner, member, collections, now)

    def detach(self, fence: Fence) -> bool:
        """Give a home up."""
        attached = self._state.attached.get(fence.home)
        if attached is None or attached[1] != fence:
            return False
        del self._state.attached[fence.home]
        if self.detached is None:
            self.detached = {}
        self.detached[fence.home] = attached
        return True

    def check(self, conditions: Sequence[Condition]) -> None:
        """Raise an error unless all hold."""
        for condition in conditions:
            if isinstance(condition, Fence):
                self.check_fence(condition)
            elif isinstance(condition, Holds):
                self._check_entry(condition)
            else:
                self._check_record(condition)

    def check_fence(self, fence: Fence) -> None:
        """Raise `StoreFencedError` unless it is the fence of its home."""
        if self._state.attached.get(fence.home, ("", None))[1] != fence:
            raise StoreFencedError(f"{fence.home} is attached elsewhere")

    def acquire(self, name: str, ttl: float, now: float) -> Lease | None:
        key = tables.name(name)
        row = self._batch.get("leases", key)
        if row is not None and now < tables.LEASE.unpack(row)[1]:
            return None
        lease = Lease(name, self._state.serial())
        self._batch.set("leases", key, tables.LEASE.pack(lease.token, now + ttl))
        return lease

    def renew(self, lease: Lease, ttl: float, now: float) -> bool:
        key = tables.name(lease.name)
        row = self._batch.get("leases", key)
        token, until = tables.LEASE.unpack(row) if row is not None else (0, 0.0)
        if token != lease.token or now >= until:
            return False
        self._batch.set("leases", key, tables.LEASE.pack(token, now + ttl))
        return True

    def release(self, lease: Lease) -> bool:
        key = tables.name(lease.name)
        row = self._batch.get("leases", key)
        if row is None or tables.LEASE.unpack(row)[0] != lease.token:
            return False
        self._batch.unset("leases", key)
        return True

    # -- endings

    def sweep(self, now: float, budget: int) -> Swept:
        """Take one bounded step: at most `budget` entries, tokens, records and blobs are looked at."""
        end = _pack(tables.milliseconds(now) + 1)
        removed, freed, left = 0, 0, budget
        expired: list[tuple[str, int]] = []
        for key, row in scan(self.opened.endings, b"", end):
            if left <= 0:
                break
            count, size_bytes, looked = self._ended(key, row, now, left, expired)
            removed += count
            freed += size_bytes
            left -= looked
            if self._batch.get("endings", key) is not None:
                break  # the budget ended within it
        else:
            self.swept += removed
            return Swept(removed, freed, None, tuple(expired))
        self.swept += removed
        return Swept(removed, freed, MORE, tuple(expired))

    def _ended(
        self, key: bytes, row: bytes, now: float, budget: int, expired: list[tuple[str, int]]
    ) -> tuple[int, int, int]:
        """Return what one ending removed, freed, and how much it looked at; entries are noted in `expired`."""
        kind, what = key[8], key[9:]
        if kind == EndingKind.ENTRIES:
            return self.mailboxes.ended_entries(key, *_decode_entries(row), now, budget, expired)
        if kind == EndingKind.TOKENS:
            return self.mailboxes.ended_tokens(key, *_decode_tokens(row), now, budget)
        self._batch.unset("endings", key)
        if kind == EndingKind.RECORD:
            return (*self._ended_record(what, now), 1)
        return (*self.payloads.ended(what, now), 1)

    def _ended_record(self, where: bytes, now: float) -> tuple[int, int]:
        row = self._batch.get("records", where)
        if row is None:
            return 0, 0
        expires_at = tables.EXPIRES.unpack_from(row)[0]
        if not expires_at:
            return 0, 0
        if expires_at > now:
            self._batch.set("endings", tables.ending(expires_at, EndingKind.RECORD, where), b"")
            return 0, 0
        self._batch.unset("records", where)
        self._state.records -= 1
        return 1, len(row) - 8


def records_of_home(collection: str, prefix: str, exact: bool, now: float, opened: RocksTables) -> dict[str, bytes]:
    """Return the records that a home has in a collection; see `homes.records_of`."""
    within = tables.name(collection) + b"\0"
    start = within + prefix.encode()
    found: dict[str, bytes] = {}
    for key, row in scan(opened.records, start, start + b"\0" if exact else after_prefix(within)):
        if not key.startswith(start):
            break
        if not 0 < tables.EXPIRES.unpack_from(row)[0] <= now:
            found[key[len(within) :].decode()] = row[tables.EXPIRES.size :]
    return found
