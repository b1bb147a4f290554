"""What the writer does to the tables: reads, changes, and one write batch that holds all of it or nothing.

    State         what the writer keeps between transactions: caches, totals, who is attached
    Transaction   one atomic write; several small calls may share one

Rule 1: only the writer's thread comes here. Reading, deciding and writing is one step because nobody else writes.
Rule 2: a transaction sees its own changes. Single rows are found in the overlay first; heads, messages, blobs and
        streams are objects that change at once and are written by `finish`. Entries added by the transaction itself are
        those above the `base` of their head. Whoever looks at entries takes their head from `_used`, which sees to all
        that.
Rule 3: whatever was changed in the caches belongs to a transaction that may still fail. Then `State.forget` empties
        them, which is always right and never frequent.
Rule 4: whoever makes a row with `_row` has claimed its message or blob for as many entries as it said; each entry that
        goes, or never comes, gives one claim back with `_unclaim`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec
from rocksdict import ReadOptions, WriteBatch

from motorcade.storage import runs, tables
from motorcade.storage.files import Tables, scan
from motorcade.storage.notes import Notes, Noting
from motorcade.storage.ports import Appended, Attached, Bound, Draft, Lease, MailboxInfo, StoreDamagedError, Swept
from motorcade.storage.tables import Head, Kind

#: Seconds that the token of an append is known.
TOKEN_MEMORY = 3600.0

#: Heads in the cache: about 300 octets each.
MAX_HEADS = 65_536

#: Counters of blobs in the cache, and shared messages.
MAX_BLOBINFO = 4_096
MAX_MESSAGES = 4_096

#: Mailboxes whose rows were read lately, and rows of each that are kept: acknowledging them needs no second look.
MAX_SEEN = 1_024
MAX_SEEN_ROWS = 64

#: Octets: of what was written last, up to twice as much, the rows of entries are kept in mind (about 10 MiB at most).
#: Who is connected acknowledges at once, and looking a row up takes longer than removing it.
MAX_KNOWN = 2**20

#: Entries to be removed from one mailbox from which on reading all that lie there is cheaper than each by itself.
WORTH_A_SCAN = 4

#: Entries named by one row of `endings`, so that one step of a sweep never reads much more than its budget.
MAX_ENDING = 256

#: Tables with rows that a transaction looks up again.
_OVERLAID = ("keys", "tokens", "records", "streams", "leases", "endings")

NO_BOUND = Bound()
MORE = b"more"

V = TypeVar("V")
K = TypeVar("K")

_ANY = 2**63  #: more than any mailbox holds

_REFERENCE_SIZE, _OWN_SIZE = tables.REFERENCE_SIZE, tables.OWN_SIZE
_BLOB, _DROPPABLE = tables.BLOB, tables.DROPPABLE

_pack = tables.NUMBER.pack
_pack_head = tables.HEAD.pack
_pack_entry = tables.ENTRY.pack
_unpack_entry = tables.ENTRY.unpack_from
_unpack_reference = tables.REFERENCE.unpack_from
_encode = msgspec.msgpack.Encoder().encode
_decode_entries = msgspec.msgpack.Decoder(tuple[list[str], list[int]]).decode
_decode_tokens = msgspec.msgpack.Decoder(tuple[bytes, list[str]]).decode


class Recent(Generic[K, V]):
    """A bounded cache in two halves: when the young half is full, the old one goes. Finding costs one lookup.

    The bound may be exceeded by what one transaction touches.
    """

    __slots__ = ("_half", "_old", "young")

    def __init__(self, bound: int) -> None:
        self._half = max(1, bound // 2)
        self.young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self.young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def peek(self, key: K) -> V | None:
        """For other threads: find, and change nothing."""
        return self.young.get(key) or self._old.get(key)

    def put(self, key: K, value: V) -> None:
        self.young[key] = value

    def trim(self) -> None:
        """Keep to the bound; not while a transaction relies on what it has changed being here."""
        if len(self.young) >= self._half:
            self._old = self.young
            self.young = {}

    def clear(self) -> None:
        self.young = {}
        self._old = {}


class BlobInfo:
    """How long a blob is needed."""

    __slots__ = ("holders", "keep_until", "size")

    def __init__(self, holders: int, keep_until: float, size: int) -> None:
        self.holders = holders
        self.keep_until = keep_until
        self.size = size


class Message:
    """What is known of a shared message without its body."""

    __slots__ = ("digest", "holders", "key", "number", "octets")

    def __init__(self, number: int, holders: int, key: bytes, digest: bytes, octets: int) -> None:
        self.number = number
        self.holders = holders
        self.key = key
        self.digest = digest  #: of its blob; empty: none
        self.octets = octets  #: that go with it, but for the blob


class StreamHead:
    """Size and ends of a stream."""

    __slots__ = ("first", "last", "octets", "records", "time")

    def __init__(self, first: int = 1, last: int = 0, records: int = 0, octets: int = 0, time: float = 0.0) -> None:
        self.first = first
        self.last = last
        self.records = records
        self.octets = octets
        self.time = time


class State:
    """What the writer keeps between transactions."""

    def __init__(self, max_heads: int = MAX_HEADS) -> None:
        self.heads: Recent[str, Head] = Recent(max_heads)
        self.blobs: Recent[bytes, BlobInfo] = Recent(MAX_BLOBINFO)
        self.messages: Recent[int, Message] = Recent(MAX_MESSAGES)
        #: Rows that readers found, oldest first. By head, not by owner: who is forgotten gets another head, and what
        #: was read before tells nothing of the new entries. Only the event loop's thread puts, and keeps the bound.
        self.seen: Recent[Head, list[tuple[int, bytes]]] = Recent(MAX_SEEN)
        #: Rows of entries that were written lately, by their keys; None: removed. The young ones count first.
        self.known: dict[bytes, bytes | None] = {}
        self.known_before: dict[bytes, bytes | None] = {}
        self._known_octets = 0
        self.notes = Notes()
        self.attached: dict[str, str] = {}  #: owner: node; as many as are attached
        self.epochs: dict[str, int] = {}  #: likewise
        self.entries = 0
        self.blob_count = 0
        self.blob_octets = 0
        self.records = 0
        self.shared = 0
        self._serial = 0
        self._transactions = 0

    def load(self, opened: Tables, boot: int | None = None) -> None:
        """Begin; or, without `boot`, begin again with tables that were opened again."""
        if boot is not None:
            # 2^20 openings and 2^32 numbers in each stay below what a double can count.
            self._serial = boot << 32
        self.notes.load(opened)
        self.forget(opened)

    def forget(self, opened: Tables) -> None:
        """Nothing in the caches is certain; the notes and the tables are."""
        self.heads.clear()
        self.blobs.clear()
        self.messages.clear()
        self.known, self.known_before, self._known_octets = {}, {}, 0
        row = self.notes.get(opened, tables.TOTALS_NOTE)
        self.entries, self.blob_count, self.blob_octets, self.records, self.shared = (
            tables.TOTALS.unpack(row) if row is not None else (0, 0, 0, 0, 0)
        )

    def totals(self) -> bytes:
        return tables.TOTALS.pack(self.entries, self.blob_count, self.blob_octets, self.records, self.shared)

    def keep_in_mind(self, rows: dict[bytes, bytes | None], octets: int) -> None:
        """Rows that have just been written, in a transaction of so many octets."""
        self.known.update(rows)
        self._known_octets += octets
        if self._known_octets > MAX_KNOWN:
            self.known_before, self.known, self._known_octets = self.known, {}, 0

    def next_transaction(self) -> int:
        self._transactions += 1
        return self._transactions

    def serial(self) -> int:
        """A number that was never given before, in any life of this store."""
        self._serial += 1
        return self._serial


class Transaction:
    """One atomic write in the making."""

    def __init__(self, opened: Tables, state: State) -> None:
        self.opened = opened
        # Heads name their user by number: they outlive it, and an object would keep its rows and tables alive.
        self._number = state.next_transaction()
        self._tables = opened
        self._state = state
        self._batch = WriteBatch(raw_mode=True)
        self._put = self._batch.put
        self._delete = self._batch.delete
        self._handles = handles = opened.handles
        self._entries = handles["entries"]
        self._overlay: dict[str, dict[bytes, bytes | None]] = {table: {} for table in _OVERLAID}
        self._rows: dict[bytes, bytes | None] = {}  #: the overlay of `entries`, once `_settle` was called
        self._bulk: list[tuple[list[Appended], bytes, bytes]] = []  #: appended, but not in the overlay yet; row, key
        self._bulk_keys: set[bytes] = set()  #: the compaction keys in it
        self._settled = 0  #: answers of the last in `_bulk` that are in the overlay
        self._noted: dict[bytes, bytes | None] = {}  #: to be noted, beside the next three
        self._heads: dict[str, Head] = {}
        self._blobs: dict[bytes, BlobInfo] = {}
        self._messages: dict[int, Message] = {}
        self._streams: dict[str, StreamHead] = {}  #: to be written
        self._noting: Noting | None = None
        self._octets = 0  #: of all that is written
        self.swept = 0
        state.heads.trim()
        state.blobs.trim()
        state.messages.trim()

    # -- mailboxes

    def append(self, owners: Sequence[str], draft: Draft, now: float, bound: Bound) -> list[Appended]:
        """Append to each owner; the answers in the same order."""
        if len(owners) == 1:
            answer = self._append_plain(owners[0], draft, now, bound)
            if answer is not None:
                return [answer]
        size = len(draft.body) + len(draft.payload)
        if draft.token or 0 < bound.octets < size or (draft.key and len(set(owners)) < len(owners)):
            answers = self._append_each(owners, draft, now, bound, size)
            stored = [answer for answer in answers if answer.position and not answer.repeated]
        else:
            answers = stored = self._append_all(owners, draft, now, bound, size)
        if draft.expires_at and stored:
            self._end_entries(draft.expires_at, [answer for answer in stored if answer.position])
        return answers

    def _append_plain(self, owner: str, draft: Draft, now: float, bound: Bound) -> Appended | None:
        """The shortest way, for what most messages are: a small one, for one owner with room; None: take another."""
        body, payload, compaction = draft.body, draft.payload, draft.key
        if draft.token or draft.expires_at or len(payload) > tables.INLINE_PAYLOAD:
            return None
        head = self._state.heads.young.get(owner) or self._head(owner)
        size = len(body) + len(payload)
        if bound is not NO_BOUND and (0 < bound.entries <= head.count or 0 < bound.octets < head.octets + size):
            return None
        if head.user != self._number:
            head.user = self._number
            head.base = head.last
        replaced = self._take_key(head, compaction) if compaction else 0
        head.last = position = head.last + 1
        head.count += 1
        head.octets += size
        flags = 0
        if draft.droppable:
            flags = tables.DROPPABLE
            head.droppable += 1
        head.newest = b""
        row = _pack_entry(now, 0.0, flags, 0, len(compaction), len(body), len(payload))
        row += compaction + body + payload if compaction else body + payload
        key = head.prefix + _pack(position)
        self._rows[key] = row
        self._put(key, row, self._entries)
        if position >= head.write_at:
            self._heads[owner] = head
        self._state.entries += 1
        return Appended(owner, position, replaced, (), False, self._state.attached.get(owner, ""))

    def _take_key(self, head: Head, compaction: bytes) -> int:
        """Let a compaction key lead to the entry that comes next; the position of the one it led to, now removed."""
        if self._bulk:
            self._settle()
        replaced = self._replaced(head, compaction)
        bit = tables.key_bit(compaction)
        head.keyed = head.keyed | bit if head.count else bit
        self._set("keys", head.prefix + compaction, _pack(head.last + 1))
        return replaced

    def _append_all(self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, size: int) -> list[Appended]:
        """The short way, when nothing is repeated: a campaign, sleeping sessions, the messages of one turn."""
        row = self._row(draft, now, len(owners))
        newest = row if len(row) <= _REFERENCE_SIZE else b""
        droppable = 1 if draft.droppable else 0
        put, entries, dirty = self._put, self._entries, self._heads
        recent, attached = self._state.heads.young.get, self._state.attached
        compaction = draft.key
        most, most_octets = bound.entries or _ANY, (bound.octets or _ANY) - size
        bounded = bound.entries > 0 or bound.octets > 0
        answers: list[Appended] = []
        answer = answers.append
        if compaction in self._bulk_keys:
            self._settle()
        # What is appended here enters the overlay only if somebody looks: mostly nobody does.
        self._bulk.append((answers, row, compaction))
        if compaction:
            self._bulk_keys.add(compaction)
            bit, keys = tables.key_bit(compaction), self._handles["keys"]
        if not droppable and (compaction or not attached):
            room = (most, most_octets) if bounded else None
            if compaction:
                self._append_keyed(owners, compaction, row, size, room, answers)
            else:
                self._append_simply(owners, row, size, room, answers)
        full, done = 0, len(answers)
        for owner in owners[done:] if done else owners:
            head = recent(owner) or self._head(owner)
            if bounded and (head.count >= most or head.octets > most_octets):
                answer(self._append_full(owner, draft, row, size, bound, attached.get(owner, "")))
                self._settled = len(answers)
                full += 1
                continue
            replaced = 0
            if compaction:
                where = head.prefix + compaction
                old = self._place_of(head, where, bit)
                if old is not None:
                    replaced = self._replace(owner, old)
                head.keyed = head.keyed | bit if head.count else bit
            head.last = position = head.last + 1
            head.newest = newest
            head.count += 1
            head.octets += size
            if droppable:
                head.droppable += 1
            place = _pack(position)
            put(head.prefix + place, row, entries)
            if compaction:
                put(where, place, keys)
            if position >= head.write_at:
                dirty[owner] = head
            if attached or replaced:
                answer(Appended(owner, position, replaced, (), False, attached.get(owner, "")))
            else:
                answer(Appended(owner, position))
        self._state.entries += len(owners) - full
        if len(owners) == 1:
            self._settle()  # so that the row is kept in mind
        return answers

    def _append_simply(
        self, owners: Sequence[str], row: bytes, size: int, bound: tuple[int, int] | None, answers: list[Appended]
    ) -> None:
        """The inside of `_append_all` without its cases, up to the first owner who has no room."""
        put, entries, dirty, pack, answer = self._put, self._entries, self._heads, _pack, answers.append
        most, most_octets = bound or (_ANY, _ANY)
        newest = row if len(row) <= _REFERENCE_SIZE else b""
        for head in self._heads_of(owners):
            if head.count >= most or head.octets > most_octets:
                break
            head.last = position = head.last + 1
            head.newest = newest
            head.count += 1
            head.octets += size
            put(head.prefix + pack(position), row, entries)
            if position >= head.write_at:
                dirty[head.owner] = head
            answer(Appended(head.owner, position))

    def _append_keyed(
        self,
        owners: Sequence[str],
        compaction: bytes,
        row: bytes,
        size: int,
        bound: tuple[int, int] | None,
        answers: list[Appended],
    ) -> None:
        """The same with a compaction key, up to the first owner who has no room or an entry of that key."""
        put, entries, keys, dirty = self._put, self._entries, self._handles["keys"], self._heads
        attached, answer = self._state.attached, answers.append
        most, most_octets = bound or (_ANY, _ANY)
        bit, pack = tables.key_bit(compaction), _pack
        newest = row if len(row) <= _REFERENCE_SIZE else b""
        for head in self._heads_of(owners):
            count = head.count
            if count >= most or head.octets > most_octets:
                break
            prefix = head.prefix
            where = prefix + compaction
            if not count:
                head.keyed = bit
            elif not head.keyed & bit:
                head.keyed |= bit
            elif self._place_of(head, where, bit) is not None:
                break
            head.last = position = head.last + 1
            head.newest = newest
            head.count = count + 1
            head.octets += size
            place = pack(position)
            put(prefix + place, row, entries)
            put(where, place, keys)
            owner = head.owner
            if position >= head.write_at:
                dirty[owner] = head
            if attached:
                answer(Appended(owner, position, 0, (), False, attached.get(owner, "")))
            else:
                answer(Appended(owner, position))

    def _heads_of(self, owners: Sequence[str]) -> list[Head]:
        """The heads of many owners."""
        heads = list(map(self._state.heads.young.get, owners))
        if None in heads:
            return [head or self._head(owner) for owner, head in zip(owners, heads, strict=True)]
        return heads  # type: ignore[return-value]

    def _place_of(self, head: Head, where: bytes, bit: int) -> bytes | None:
        """The position of the entry with a compaction key, as it is stored; `where` is the key of that row."""
        if not (head.count and head.keyed & bit):
            return None
        known = self._overlay["keys"]
        return known[where] if where in known else self._tables.keys.get(where)

    def _append_full(self, owner: str, draft: Draft, row: bytes, size: int, bound: Bound, node: str) -> Appended:
        """To a mailbox where something must go, unless it is replaced."""
        head = self._used(owner)
        replaced = self._replaced(head, draft.key) if draft.key else 0
        position, dropped = self._add(head, draft, row, size, bound)
        return Appended(owner, position, replaced, dropped, False, node)

    def _settle(self) -> None:
        """Enter into the overlay what `_append_all` left out."""
        keys = self._overlay["keys"]
        for answers, row, key in self._bulk:
            for answer in answers[self._settled :]:
                head = self._head(answer.owner)
                if head.user != self._number:
                    head.user = self._number
                    head.base = answer.position - 1
                elif answer.position <= head.base:
                    head.base = answer.position - 1
                place = _pack(answer.position)
                self._rows[head.prefix + place] = row
                if key:
                    keys[head.prefix + key] = place
            self._settled = 0
        # The last one may still be growing.
        last = self._bulk[-1]
        self._settled = len(last[0])
        self._bulk = [last]
        self._bulk_keys = {last[2]} if last[2] else set()

    def _append_each(self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, size: int) -> list[Appended]:
        """The long way: what has a token, or can never fit."""
        row = b""
        fresh: list[str] = []  # owners for which the token was not known
        answers: list[Appended] = []
        fits = not 0 < bound.octets < size
        for number, owner in enumerate(owners):
            head = self._used(owner)
            node = self._state.attached.get(owner, "")
            known = self._known(head, draft.token, now) if draft.token else None
            if known is not None:
                if row:
                    self._unclaim(row)
                answers.append(Appended(owner, known, 0, (), True, node))
                continue
            if fits:
                row = row or self._row(draft, now, len(owners) - number)
                answer = self._append_full(owner, draft, row, size, bound, node)
            else:
                replaced = self._replaced(head, draft.key) if draft.key else 0
                answer = Appended(owner, 0, replaced, (), False, node)
            answers.append(answer)
            if draft.token:
                fresh.append(owner)
                token = tables.TOKEN.pack(now + TOKEN_MEMORY, answer.position)
                self._set("tokens", head.prefix + draft.token, token)
        if fresh:
            self._end_tokens(now + TOKEN_MEMORY, draft.token, fresh)
        return answers

    def _row(self, draft: Draft, now: float, entries: int) -> bytes:
        """The row that is the same for all owners: of its own, or a reference (rule 4)."""
        body, payload, key = draft.body, draft.payload, draft.key
        flags = tables.DROPPABLE if draft.droppable else 0
        size = len(payload)
        blob: BlobInfo | None = None
        if size > tables.INLINE_PAYLOAD:
            flags |= tables.BLOB
            payload = hashlib.sha256(payload).digest()
            blob = self._blob_of(payload, draft.payload)
        row = tables.entry_row(now, draft.expires_at, flags, key, body, payload, size)
        if (entries - 1) * len(row) <= tables.SHARE_FROM:
            if blob is not None:
                blob.holders += entries
            return row
        if blob is not None:
            blob.holders += 1
        octets = len(body) + size
        message = Message(
            self._state.serial(),
            entries,
            key,
            payload if blob is not None else b"",
            octets if blob is None else len(body),
        )
        self._put(_pack(message.number), row, self._handles["shared"])
        self._messages[message.number] = message
        self._state.messages.put(message.number, message)
        self._state.shared += 1
        return tables.reference_row(message.number, flags | (tables.KEYED if key else 0), octets, draft.expires_at)

    def _unclaim(self, row: bytes) -> int:
        """An entry lets go of what it shares with others; octets given back."""
        if len(row) <= tables.REFERENCE_SIZE:
            return self._let_go(self._message(_unpack_reference(row)[0]))
        _, _, flags, _, _, body, payload = _unpack_entry(row)
        return int(body) + (self._release(row[-32:]) if flags & tables.BLOB else int(payload))

    def _let_go(self, message: Message) -> int:
        """One reference less; octets given back."""
        message.holders -= 1
        if message.holders:
            self._messages[message.number] = message
            return 0
        number = _pack(message.number)
        self._messages.pop(message.number, None)
        self._delete(number, self._handles["shared"])
        self._noted[b"n" + number] = None
        self._state.shared -= 1
        return message.octets + (self._release(message.digest) if message.digest else 0)

    def _message(self, number: int) -> Message:
        """A shared message that an entry refers to."""
        message = self._state.messages.get(number)
        if message is None:
            where = _pack(number)
            holders = self._state.notes.get(self._tables, b"n" + where)
            row = self._tables.shared.get(where)
            if holders is None or row is None:
                raise StoreDamagedError(f"message {number} is missing though entries refer to it; bring back a backup")
            entry = tables.parse_entry(row)
            blob = entry.flags & tables.BLOB
            message = Message(
                number,
                tables.NUMBER.unpack(holders)[0],
                entry.key,
                entry.payload if blob else b"",
                len(entry.body) if blob else entry.octets,
            )
            self._state.messages.put(number, message)
        return message

    def _known(self, head: Head, token: bytes, now: float) -> int | None:
        """The position of the first append with this token."""
        row = self._get("tokens", head.prefix + token)
        if row is None:
            return None
        until, position = tables.TOKEN.unpack(row)
        return int(position) if now < until else None

    def _replaced(self, head: Head, key: bytes) -> int:
        """Remove the entry with a compaction key, if there is one; its position."""
        old = self._place_of(head, head.prefix + key, tables.key_bit(key))
        return self._replace(head.owner, old) if old is not None else 0

    def _replace(self, owner: str, place: bytes) -> int:
        """Remove the entry that a compaction key leads to; its position."""
        (position,) = tables.NUMBER.unpack(place)
        return position if self._remove(self._used(owner), position) is not None else 0

    def _add(self, head: Head, draft: Draft, row: bytes, size: int, bound: Bound) -> tuple[int, tuple[int, ...]]:
        """The position (0: pushed out itself), and what was pushed out."""
        head.last = position = head.last + 1
        head.newest = b""
        if draft.key:
            bit = tables.key_bit(draft.key)
            head.keyed = head.keyed | bit if head.count else bit
            self._set("keys", head.prefix + draft.key, _pack(position))
        head.count += 1
        head.octets += size
        if draft.droppable:
            head.droppable += 1
        self._state.entries += 1
        self._set_entry(head.prefix + _pack(position), row)
        if position >= head.write_at:
            self._heads[head.owner] = head
        if not (0 < bound.entries < head.count or 0 < bound.octets < head.octets):
            return position, ()
        dropped = self._push_out(head, bound)
        if position in dropped:
            return 0, tuple(other for other in dropped if other != position)
        return position, tuple(dropped)

    def _push_out(self, head: Head, bound: Bound) -> list[int]:
        """Remove the oldest that may be dropped, then the oldest, until the rest fits."""
        dropped: list[int] = []
        for droppable_only in (True, False):
            if droppable_only and not head.droppable:
                continue
            for position, row in self._entries_of(head):
                if not (0 < bound.entries < head.count or 0 < bound.octets < head.octets):
                    return dropped
                if droppable_only and not head.droppable:
                    break
                if not droppable_only or tables.facts(row)[0] & tables.DROPPABLE:
                    dropped.append(position)
                    self._remove(head, position, row)
        return dropped

    def acknowledge(self, owner: str, positions: Sequence[int]) -> int:
        """Remove entries; how many were there."""
        head = self._used(owner)
        seen = self._state.seen.young.get(head) or self._state.seen.peek(head)
        if len(positions) > 1:
            return self._remove_all(head, sorted(set(positions)), seen or [])
        for position in positions:
            if head.first <= position <= head.last:
                row = _row_known(head, position, seen)
                return 0 if self._remove(head, position, row) is None else 1
        return 0

    def _remove_all(self, head: Head, positions: list[int], seen: list[tuple[int, bytes]]) -> int:
        """Remove entries at positions that grow; how many were there.

        As `_remove` does it, but the head changes once, and rows that lie together are read together.
        """
        prefix, first, last = head.prefix, head.first, head.last
        # See `_row_known`; among positions that are all different, removing some tells nothing about the others.
        known = dict(seen) if last - first + 1 == head.count else {}
        stored: dict[bytes, bytes] | None = None
        overlay, young, old = self._rows, self._state.known, self._state.known_before
        delete, entries = self._delete, self._entries
        before, removed, octets = head.count, 0, 0
        for position in positions:
            if not first <= position <= last:
                continue
            key = prefix + _pack(position)
            row = known.get(position)
            if row is None:
                if key in overlay:
                    row = overlay[key]
                elif key in young:
                    row = young[key]
                elif key in old:
                    row = old[key]
                else:
                    if stored is None:
                        stored = self._rows_between(key, prefix + _pack(min(positions[-1], last)), len(positions))
                    row = stored.get(key) or self._tables.entries.get(key)
                if row is None:
                    continue
            if len(row) > _REFERENCE_SIZE:
                _, _, flags, _, key_size, body, payload = _unpack_entry(row)
                if not (flags or key_size):
                    overlay[key] = None
                    delete(key, entries)
                    octets += body + payload
                    removed += 1
                    if position == head.first:
                        head.first = position + 1
                    continue
            self._remove(head, position, row)
        if removed:
            head.count -= removed
            head.octets -= octets
            if not head.count:
                head.first = last + 1
            self._heads[head.owner] = head
            self._state.entries -= removed
        return before - head.count

    def _rows_between(self, first: bytes, last: bytes, wanted: int) -> dict[bytes, bytes]:
        """Stored entries by their keys, if about as many as wanted lie there; what is missing is to be asked for."""
        if wanted < WORTH_A_SCAN or int.from_bytes(last[-8:]) - int.from_bytes(first[-8:]) >= 2 * wanted:
            return {}
        options = ReadOptions()
        options.set_iterate_upper_bound(last + b"\0")
        return dict(self._tables.entries.items(from_key=first, read_opt=options))  # type: ignore[arg-type]

    def mark(self, owner: str, position: int, mark: int) -> bool:
        """Note a number with an entry."""
        head = self._used(owner)
        if not 0 < position <= head.last:
            return False
        key = head.prefix + _pack(position)
        row = self._get_entry(key)
        if row is None:
            return False
        self._set_entry(key, tables.with_mark(row, mark))
        return True

    def clear(self, owner: str, up_to: int, limit: int) -> int:
        """Remove the oldest entries up to a position; how many."""
        head = self._used(owner)
        removed = 0
        for position, row in self._entries_of(head):
            if position > up_to or removed == limit:
                break
            self._remove(head, position, row)
            removed += 1
        return removed

    def forget(self, owner: str, up_to: int, limit: int) -> tuple[int, int, bool]:
        """Remove the oldest entries up to a position (-1: the last), then what else is known of the owner.

        How many went, up to which position, and whether there is more.
        """
        head = self._used(owner)
        up_to = head.last if up_to < 0 else up_to
        removed = self.clear(owner, up_to, limit)
        if removed == limit:
            return removed, up_to, True
        if head.count:  # came meanwhile
            return removed, up_to, False
        for number, key in enumerate(self._tokens_of(head)):
            if number == limit:
                return removed, up_to, True
            self._unset("tokens", key)
        self._heads.pop(owner, None)
        self._noted[b"h" + head.prefix[:-1]] = None
        # A new object: readers who still hold the old one must not take what it says for the new entries.
        fresh = Head(owner, head.prefix)
        fresh.user = self._number
        self._state.heads.put(owner, fresh)
        return removed, up_to, False

    def _tokens_of(self, head: Head) -> Iterator[bytes]:
        """Keys of all tokens as this transaction sees them; they may be removed meanwhile."""
        overlay = self._overlay["tokens"]
        yield from [key for key, row in overlay.items() if row is not None and key.startswith(head.prefix)]
        for key, _ in scan(self._tables.tokens, head.prefix, after_prefix(head.prefix)):
            if key not in overlay:
                yield key

    def last(self, owner: str) -> int:
        """The position given last."""
        return self._used(owner).last

    def info(self, owner: str) -> MailboxInfo:
        """Size and ends."""
        head = self._used(owner)
        first = next(self._entries_of(head), (0, b""))[0] if head.count else 0
        return MailboxInfo(head.count, head.octets, first, head.last)

    def _remove(self, head: Head, position: int, row: bytes | None = None) -> int | None:
        """Remove one entry; octets given back, None if it was not there."""
        entry_key = head.prefix + _pack(position)
        if row is None:
            row = self._get_entry(entry_key)
            if row is None:
                return None
        self._rows[entry_key] = None
        self._delete(entry_key, self._entries)
        state = self._state
        if len(row) <= _REFERENCE_SIZE:
            number, flags, _, octets = _unpack_reference(row)
            message = state.messages.young.get(number) or self._message(number)
            key = message.key
            if message.holders > 1:  # as `_let_go` does it, but written out: most are not the last
                message.holders -= 1
                self._messages[number] = message
                freed = 0
            else:
                freed = self._let_go(message)
        else:
            _, _, flags, _, key_size, body, payload = _unpack_entry(row)
            octets = body + payload
            key = row[_OWN_SIZE : _OWN_SIZE + key_size] if key_size else b""
            freed = body + (self._release(row[-32:]) if flags & _BLOB else payload)
        if key:
            where = head.prefix + key
            self._overlay["keys"][where] = None
            self._delete(where, self._handles["keys"])
        head.count = count = head.count - 1
        head.octets -= octets
        if not count:
            head.first = head.last + 1
        elif position == head.first:
            head.first = position + 1
        if flags & _DROPPABLE:
            head.droppable -= 1
        self._heads[head.owner] = head
        state.entries -= 1
        return freed

    def _entries_of(self, head: Head) -> Iterator[tuple[int, bytes]]:
        """All entries as this transaction sees them, oldest first; they may be removed meanwhile."""
        prefix, rows = head.prefix, self._rows
        if head.first <= head.base:
            for key, row in scan(self._tables.entries, prefix + _pack(head.first), after_prefix(prefix)):
                changed = rows.get(key, row)
                if changed is not None:
                    yield tables.NUMBER.unpack(key[-8:])[0], changed
        for position in range(head.base + 1, head.last + 1):
            added = rows.get(prefix + _pack(position))
            if added is not None:
                yield position, added

    def _used(self, owner: str) -> Head:
        """A head whose entries may be looked at."""
        if self._bulk:
            self._settle()
        head = self._state.heads.young.get(owner) or self._head(owner)
        if head.user != self._number:
            head.user = self._number
            head.base = head.last
        return head

    def _head(self, owner: str) -> Head:
        head = self._state.heads.get(owner)
        if head is None:
            head = load_head(self._tables, self._state.notes, owner)
            self._state.heads.put(owner, head)
        return head

    # -- blobs

    def put_blob(self, data: bytes, keep_until: float) -> bytes:
        """Store a blob and keep it for a while; its digest."""
        digest = hashlib.sha256(data).digest()
        info = self._blob_of(digest, data)
        info.keep_until = max(info.keep_until, keep_until)
        self._set("endings", tables.ending(info.keep_until, Kind.BLOB, digest), b"")
        return digest

    def _blob_of(self, digest: bytes, data: bytes) -> BlobInfo:
        """The counter of a blob that is stored now, if it was not before."""
        info = self._info(digest)
        if info is None:
            info = BlobInfo(0, 0.0, len(data))
            self._put(digest, data, self._handles["blobs"])
            self._state.blobs.put(digest, info)
            self._state.blob_count += 1
            self._state.blob_octets += info.size
        self._blobs[digest] = info
        return info

    def _held(self, digest: bytes) -> BlobInfo:
        """The counter of a blob that an entry refers to; about to change."""
        info = self._info(digest)
        if info is None:
            raise StoreDamagedError(f"blob {digest.hex()} is missing though entries refer to it; bring back a backup")
        self._blobs[digest] = info
        return info

    def _info(self, digest: bytes) -> BlobInfo | None:
        info = self._blobs.get(digest) or self._state.blobs.get(digest)
        if info is None:
            row = self._state.notes.get(self._tables, b"b" + digest)
            if row is None:
                return None
            info = BlobInfo(*tables.BLOBINFO.unpack(row))
            self._state.blobs.put(digest, info)
        return info if info.size >= 0 else None

    def _release(self, digest: bytes) -> int:
        """An entry lets go; octets given back."""
        info = self._held(digest)
        info.holders -= 1
        if info.holders > 0:
            return 0
        if info.keep_until:
            # Its turn may have come while entries held it.
            self._set("endings", tables.ending(info.keep_until, Kind.BLOB, digest), b"")
            return 0
        return self._drop_blob(digest, info)

    def _drop_blob(self, digest: bytes, info: BlobInfo) -> int:
        size = info.size
        self._state.blob_count -= 1
        self._state.blob_octets -= size
        self._delete(digest, self._handles["blobs"])
        self._noted[b"b" + digest] = None
        self._blobs.pop(digest, None)
        info.size = -1  # dead, for whoever finds it in the cache
        return size

    # -- records

    def put_record(self, collection: str, key: str, value: bytes, expires_at: float) -> None:
        where = tables.name(collection) + b"\0" + tables.name(key)
        before = self._get("records", where)
        if before is None:
            self._state.records += 1
        old = tables.EXPIRES.unpack_from(before)[0] if before is not None else 0.0
        if expires_at and not 0 < old <= expires_at:
            # A record that is prolonged again and again needs no second row: the sweep moves the first one on.
            self._set("endings", tables.ending(expires_at, Kind.RECORD, where), b"")
        self._set("records", where, tables.EXPIRES.pack(expires_at) + value)

    def delete_record(self, collection: str, key: str) -> bool:
        where = tables.name(collection) + b"\0" + tables.name(key)
        if self._get("records", where) is None:
            return False
        self._unset("records", where)
        self._state.records -= 1
        return True

    # -- streams

    def append_stream(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        if not values:
            return []
        prefix = tables.name(stream) + b"\0"
        head = self._stream(stream) or StreamHead()
        head.time = max(head.time, now)
        offsets = list(range(head.last + 1, head.last + 1 + len(values)))
        for offset, row, octets in runs.rows_of(head.last + 1, head.time, values):
            self._put(prefix + _pack(offset), row, self._handles["rows"])
            head.octets += octets
        head.last = offsets[-1]
        head.records += len(values)
        self._streams[stream] = head
        return offsets

    def trim(self, stream: str, before: float, octets: int, records: int, budget: int) -> Swept:
        head = self._stream(stream)
        if head is None or not head.records:
            return Swept(0, 0, None)
        prefix = tables.name(stream) + b"\0"
        removed, freed, cursor = 0, 0, None
        for offset, time, size, key in self._records_of(prefix, head.first):
            if not (time < before or 0 < records < head.records or 0 < octets < head.octets):
                break
            if removed == budget:
                cursor = MORE
                break
            if key:
                self._delete(key, self._handles["rows"])
            removed += 1
            freed += size
            head.records -= 1
            head.octets -= size
            head.first = offset + 1
        if removed:
            self._streams[stream] = head
        return Swept(removed, freed, cursor)

    def _records_of(self, prefix: bytes, first: int) -> Iterator[tuple[int, float, int, bytes]]:
        """Offset, time and octets of the records of a stream, oldest first; the last one of a row has the row's key."""
        for key, row in scan(self._tables.rows, prefix + _pack(first), after_prefix(prefix)):
            last = tables.NUMBER.unpack(key[-8:])[0]
            time, _ = runs.extent(row)
            sizes = runs.sizes(row)
            offset = last - len(sizes) + 1
            for size in sizes:
                if offset >= first:
                    yield offset, time, size, key if offset == last else b""
                offset += 1

    def drop_stream(self, stream: str) -> None:
        octets = tables.name(stream)
        if self._stream(stream) is None:
            return
        self._streams.pop(stream, None)
        self._unset("streams", octets)
        self._batch.delete_range(octets + b"\0", octets + b"\1", self._handles["rows"])

    def _stream(self, stream: str) -> StreamHead | None:
        head = self._streams.get(stream)
        if head is None:
            row = self._get("streams", tables.name(stream))
            head = StreamHead(*tables.STREAM.unpack(row)) if row is not None else None
        return head

    # -- coordination; who is attached is kept in memory only, since after a crash nobody is

    def attach(self, owner: str, node: str) -> Attached:
        state = self._state
        previous = state.attached.get(owner, "")
        pending = self._used(owner).count > 0
        state.attached[owner] = node
        state.epochs[owner] = epoch = state.serial()
        return Attached(epoch, previous, pending)

    def detach(self, owner: str, epoch: int) -> bool:
        if self._state.epochs.get(owner) != epoch:
            return False
        del self._state.attached[owner], self._state.epochs[owner]
        return True

    def acquire(self, name: str, ttl: float, now: float) -> Lease | None:
        key = tables.name(name)
        row = self._get("leases", key)
        if row is not None and now < tables.LEASE.unpack(row)[1]:
            return None
        lease = Lease(name, self._state.serial())
        self._set("leases", key, tables.LEASE.pack(lease.token, now + ttl))
        return lease

    def renew(self, lease: Lease, ttl: float, now: float) -> bool:
        key = tables.name(lease.name)
        row = self._get("leases", key)
        token, until = tables.LEASE.unpack(row) if row is not None else (0, 0.0)
        if token != lease.token or now >= until:
            return False
        self._set("leases", key, tables.LEASE.pack(token, now + ttl))
        return True

    def release(self, lease: Lease) -> bool:
        key = tables.name(lease.name)
        row = self._get("leases", key)
        if row is None or tables.LEASE.unpack(row)[0] != lease.token:
            return False
        self._unset("leases", key)
        return True

    # -- endings

    def _end_entries(self, when: float, stored: list[Appended]) -> None:
        for start in range(0, len(stored), MAX_ENDING):
            part = stored[start : start + MAX_ENDING]
            refs = ([answer.owner for answer in part], [answer.position for answer in part])
            self._end(when, Kind.ENTRIES, _encode(refs))

    def _end_tokens(self, when: float, token: bytes, owners: list[str]) -> None:
        for start in range(0, len(owners), MAX_ENDING):
            self._end(when, Kind.TOKENS, _encode((token, owners[start : start + MAX_ENDING])))

    def _end(self, when: float, kind: Kind, refs: bytes) -> None:
        self._set("endings", tables.ending(when, kind, _pack(self._state.serial())), refs)

    def sweep(self, now: float, budget: int) -> Swept:
        """One bounded step: at most `budget` entries, tokens, records and blobs are looked at."""
        end = _pack(tables.milliseconds(now) + 1)
        removed, freed, left = 0, 0, budget
        for key, row in scan(self._tables.endings, b"", end):
            if left <= 0:
                break
            count, octets, looked = self._ended(key, row, now, left)
            removed += count
            freed += octets
            left -= looked
            if self._get("endings", key) is not None:
                break  # the budget ended within it
        else:
            self.swept += removed
            return Swept(removed, freed, None)
        self.swept += removed
        return Swept(removed, freed, MORE)

    def _ended(self, key: bytes, row: bytes, now: float, budget: int) -> tuple[int, int, int]:
        """What one ending removed, gave back, and how much it looked at."""
        kind, what = key[8], key[9:]
        if kind == Kind.ENTRIES:
            return self._ended_entries(key, *_decode_entries(row), now, budget)
        if kind == Kind.TOKENS:
            return self._ended_tokens(key, *_decode_tokens(row), now, budget)
        self._unset("endings", key)
        if kind == Kind.RECORD:
            return (*self._ended_record(what, now), 1)
        return (*self._ended_blob(what, now), 1)

    def _ended_entries(
        self, key: bytes, owners: list[str], positions: list[int], now: float, budget: int
    ) -> tuple[int, int, int]:
        removed, octets = 0, 0
        due = list(zip(owners[:budget], positions[:budget], strict=True))
        for owner, position in due:
            head = self._used(owner)
            row = self._get_entry(head.prefix + _pack(position))
            if row is not None and 0 < tables.expiry(row) <= now:
                octets += self._remove(head, position, row) or 0
                removed += 1
        rest = (owners[budget:], positions[budget:])
        self._keep_rest(key, rest if rest[0] else None)
        return removed, octets, len(due)

    def _ended_tokens(
        self, key: bytes, token: bytes, owners: list[str], now: float, budget: int
    ) -> tuple[int, int, int]:
        due, rest = owners[:budget], owners[budget:]
        for owner in due:
            where = tables.name(owner) + b"\0" + token
            row = self._get("tokens", where)
            if row is not None and tables.TOKEN.unpack(row)[0] <= now:
                self._unset("tokens", where)
        self._keep_rest(key, (token, rest) if rest else None)
        return 0, 0, len(due)

    def _keep_rest(self, key: bytes, rest: object) -> None:
        if rest is None:
            self._unset("endings", key)
        else:
            self._set("endings", key, _encode(rest))

    def _ended_record(self, where: bytes, now: float) -> tuple[int, int]:
        row = self._get("records", where)
        if row is None:
            return 0, 0
        expires_at = tables.EXPIRES.unpack_from(row)[0]
        if not expires_at:
            return 0, 0
        if expires_at > now:
            self._set("endings", tables.ending(expires_at, Kind.RECORD, where), b"")
            return 0, 0
        self._unset("records", where)
        self._state.records -= 1
        return 1, len(row) - 8

    def _ended_blob(self, digest: bytes, now: float) -> tuple[int, int]:
        info = self._info(digest)
        if info is None or info.holders or now < info.keep_until:
            return 0, 0
        return 1, self._drop_blob(digest, info)

    # -- the end, and the rows

    def finish(self) -> WriteBatch:
        """Everything of this transaction, to be written as a whole."""
        noted = self._noted
        for head in self._heads.values():
            noted[b"h" + head.prefix[:-1]] = _pack_head(head.last, head.count, head.octets, head.first, head.droppable)
            head.write_at = head.last + tables.TAIL
        for digest, info in self._blobs.items():
            noted[b"b" + digest] = tables.BLOBINFO.pack(info.holders, info.keep_until, info.size)
        for number, message in self._messages.items():
            noted[b"n" + _pack(number)] = _pack(message.holders)
        for stream, ends in self._streams.items():
            row = tables.STREAM.pack(ends.first, ends.last, ends.records, ends.octets, ends.time)
            self._put(tables.name(stream), row, self._handles["streams"])
        if noted or len(self._batch):
            noted[tables.TOTALS_NOTE] = self._state.totals()
            self._noting = self._state.notes.write(self._tables, self._batch, noted)
        self._octets = self._batch.size_in_bytes()
        return self._batch

    def written(self) -> None:
        """It is in the tables: let readers know what is certain now."""
        if self._noting is not None:
            self._state.notes.written(self._noting)
        if self._rows:
            self._state.keep_in_mind(self._rows, self._octets)
        for head in self._heads.values():
            head.floor = head.first
            head.emptied = -1 if head.count else head.last

    def _get_entry(self, key: bytes) -> bytes | None:
        state = self._state
        for rows in (self._rows, state.known, state.known_before):
            if key in rows:
                return rows[key]
        found: bytes | None = self._tables.entries.get(key)
        return found

    def _set_entry(self, key: bytes, row: bytes) -> None:
        self._rows[key] = row
        self._put(key, row, self._entries)

    def _get(self, table: str, key: bytes) -> bytes | None:
        overlay = self._overlay[table]
        if key in overlay:
            return overlay[key]
        found: bytes | None = getattr(self._tables, table).get(key)
        return found

    def _set(self, table: str, key: bytes, value: bytes) -> None:
        self._overlay[table][key] = value
        self._put(key, value, self._handles[table])

    def _unset(self, table: str, key: bytes) -> None:
        self._overlay[table][key] = None
        self._delete(key, self._handles[table])


def _row_known(head: Head, position: int, seen: list[tuple[int, bytes]] | None) -> bytes | None:
    """The row of an entry, if it is certain that it exists, and it is the newest or a reader has seen it.

    Whether a reader is ahead or behind does not matter: a position is given once, and its row never changes but for the
    mark. Without gaps, every position between the ends exists.
    """
    if head.last - head.first + 1 != head.count:
        return None
    if position == head.last and head.newest:
        return head.newest
    if not seen:
        return None
    index = position - seen[0][0]
    if 0 <= index < len(seen) and seen[index][0] == position:
        return seen[index][1]
    return None


def load_head(opened: Tables, notes: Notes, owner: str) -> Head:
    """A head as it was noted, with the entries that came since."""
    where = tables.name(owner)
    head = Head(owner, where + b"\0")
    row = notes.get_from(opened.heads, b"h" + where)
    if row is None:
        return head
    head.keyed = -1
    head.last, head.count, head.octets, head.first, head.droppable = tables.HEAD.unpack(row)
    head.write_at = head.last + tables.TAIL
    for key, entry in scan(opened.entries, head.prefix + _pack(head.last + 1), after_prefix(head.prefix)):
        flags, octets = tables.facts(entry)
        head.last = tables.NUMBER.unpack(key[-8:])[0]
        head.count += 1
        head.octets += octets
        head.droppable += flags & tables.DROPPABLE
    return head


def after_prefix(prefix: bytes) -> bytes:
    """The end of a range of keys that begin with a name and 0."""
    return prefix[:-1] + b"\1"


Apply = Callable[[Transaction], object]
