"""Mailboxes: their heads, the entries that are there, and those that are appended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
from rocksdict import ReadOptions

from motorcade.storage import tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.files import RocksTables, scan
from motorcade.storage.homes import home_of_owner
from motorcade.storage.ports import (
    NO_BOUND,
    SPARE_ALL,
    TOKEN_MEMORY,
    Appended,
    Bound,
    Claim,
    Draft,
    MailboxInfo,
    spared_by,
)
from motorcade.storage.tables import EndingKind, Head, after_prefix
from motorcade.storage.transaction.batch import OverlaidBatch
from motorcade.storage.transaction.payloads import SharedPayloads

#: Entries to be removed from one mailbox from which on reading all that lie there is cheaper than each by itself.
WORTH_A_SCAN = 4

#: Entries named by one row of `endings`, so that one step of a sweep never reads much more than its budget.
MAX_ENDING = 256

_ANY = 2**63  #: more than any mailbox holds

_REFERENCE_SIZE, _OWN_SIZE = tables.REFERENCE_SIZE, tables.OWN_SIZE
_BLOB, _DROPPABLE = tables.BLOB, tables.DROPPABLE

_pack = tables.NUMBER.pack
_pack_head = tables.HEAD.pack
_pack_entry = tables.ENTRY.pack
_unpack_entry = tables.ENTRY.unpack_from
_unpack_reference = tables.REFERENCE.unpack_from

_encode = msgspec.msgpack.Encoder().encode


class MailboxChanges:
    """The changes of a transaction to mailboxes."""

    def __init__(self, batch: OverlaidBatch, payloads: SharedPayloads) -> None:
        self._batch = batch
        self._payloads = payloads
        self._tables = batch.opened
        self._state = state = batch.state
        # Heads name their user by number: they outlive it, and an object would keep its rows and tables alive.
        self._number = state.next_transaction()
        self._put = batch.put
        self._delete = batch.delete
        self._handles = batch.handles
        self._entries = batch.handles["entries"]
        self._keys = batch.overlay["keys"]
        self._rows: dict[bytes, bytes | None] = {}  #: the overlay of `entries`, once `_settle` was called
        self._bulk: list[tuple[list[Appended], bytes, bytes]] = []  #: appended, but not in the overlay yet; row, key
        self._bulk_keys: set[bytes] = set()  #: the compaction keys in it
        self._settled = 0  #: answers of the last in `_bulk` that are in the overlay
        self._heads: dict[str, Head] = {}  #: that are written by `finish`
        self._forgotten: list[Head] = []  #: of owners that begin again

    def finish(self) -> None:
        """Add the heads that have changed to the deltas."""
        deltas = self._batch.deltas
        for head in self._heads.values():
            row = _pack_head(head.last, head.count, head.size_bytes, head.first, head.droppable, head.generation)
            deltas[b"h" + head.prefix[:-1]] = row + tables.SPARE.pack(head.spare) if head.spare else row
            head.write_at = head.last + tables.TAIL

    def written(self, size_bytes: int) -> None:
        """Let readers know what is certain now; the transaction has so many bytes."""
        if self._rows:
            self._state.keep_in_mind(self._rows, size_bytes)
        for head in self._heads.values():
            head.floor = head.first
            head.emptied = -1 if head.count else head.last
        for head in self._forgotten:
            if not head.is_there:  # owners are chosen by clients: what is forgotten takes no place
                self._state.heads.drop(head.owner, head)

    # -- entries that are there

    def _get_entry(self, key: bytes) -> bytes | None:
        # Three times the same, written out: a loop over the three takes longer than looking.
        rows, state = self._rows, self._state
        if key in rows:
            return rows[key]
        if key in state.known:
            return state.known[key]
        if key in state.known_before:
            return state.known_before[key]
        found: bytes | None = self._tables.entries.get(key)
        return found

    def _set_entry(self, key: bytes, row: bytes) -> None:
        self._rows[key] = row
        self._put(key, row, self._entries)

    def acknowledge(self, owner: str, positions: Sequence[int]) -> int:
        """Remove entries; how many were there."""
        head = self._used(owner)
        recent = self._state.seen
        seen = recent.young.get(head) or recent.old.get(head)  # as `peek` does it: every acknowledgement passes here
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
        before, removed, size_bytes = head.count, 0, 0
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
                    if self._state.claims:
                        self._state.unclaim(head.owner, position)
                    size_bytes += body + payload
                    removed += 1
                    if position == head.first:
                        head.first = position + 1
                    continue
            self._remove(head, position, row)
        if removed:
            head.count -= removed
            head.size_bytes -= size_bytes
            if not head.count:
                head.first = last + 1
            self._heads[head.owner] = head
            self._state.entries -= removed
        return before - head.count

    def _rows_between(self, first: bytes, last: bytes, wanted: int) -> dict[bytes, bytes]:
        """Return stored entries by their keys, if about as many as wanted lie there; missing ones must be asked for."""
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

    def spare(self, owner: str, position: int) -> None:
        """Note up to which position entries are in flight."""
        head = self._used(owner)
        if head.is_there and head.spare != position:
            head.spare = position
            self._heads[owner] = head

    def claim(self, step: Claim) -> list[list[int]]:
        """Claim entries; the positions of each owner."""
        found: list[list[int]] = []
        left = step.limit
        for index, owner in enumerate(step.owners):
            head, claims = self._used(owner), self._state.claims.setdefault(owner, {})
            skip = step.skip[index] if step.skip else ()
            free = (
                position
                for position, row in self._entries_of(head)
                if position not in claims and position not in skip and not 0 < tables.expiry(row) <= step.now
            )
            found.append(list(islice(free, left)))
            left -= len(found[-1])
            claims.update(dict.fromkeys(found[-1], step.claimer))
            if not claims:
                del self._state.claims[owner]
        return found

    def release(self, owner: str, claimer: str, positions: Sequence[int]) -> None:
        """Give claims back."""
        claims = self._state.claims.get(owner, {})
        for position in positions:
            if claims.get(position) == claimer:
                self._state.unclaim(owner, position)

    def has(self, owner: str, position: int) -> bool:
        """Return True if there is such an entry."""
        head = self._used(owner)
        return 0 < position <= head.last and self._get_entry(head.prefix + _pack(position)) is not None

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
            self._batch.unset("tokens", key)
        self._heads.pop(owner, None)
        self._batch.deltas[b"h" + head.prefix[:-1]] = None
        state = self._state
        if head.is_there:
            state.floor = max(state.floor, head.last, head.generation)
        # A new object: readers who still hold the old one must not take what it says for the new entries.
        fresh = tables.new_head(owner, head.prefix, state.floor)
        fresh.user = self._number
        state.heads.put(owner, fresh)
        self._forgotten.append(fresh)
        return removed, up_to, False

    def make(self, owner: str) -> int:
        """Make a mailbox, unless there is one; its generation."""
        head = self._used(owner)
        if not head.is_there:
            head.made = True
            self._heads[owner] = head
        return head.generation

    def _tokens_of(self, head: Head) -> Iterator[bytes]:
        """Yield the keys of all tokens as this transaction sees them; they may be removed meanwhile."""
        overlay = self._batch.overlay["tokens"]
        yield from [key for key, row in overlay.items() if row is not None and key.startswith(head.prefix)]
        for key, _ in scan(self._tables.tokens, head.prefix, after_prefix(head.prefix)):
            if key not in overlay:
                yield key

    def last(self, owner: str) -> int:
        """Return the position given last."""
        return self._used(owner).last

    def info(self, owner: str) -> MailboxInfo:
        """Return size and ends of a mailbox."""
        head = self._used(owner)
        if not head.is_there:
            return MailboxInfo(0, 0, 0, 0)
        first = next(self._entries_of(head), (0, b""))[0] if head.count else 0
        return MailboxInfo(head.count, head.size_bytes, first, head.last, head.generation)

    def _remove(self, head: Head, position: int, row: bytes | None = None) -> int | None:
        """Remove one entry; bytes given back, None if it was not there."""
        entry_key = head.prefix + _pack(position)
        if row is None:
            row = self._get_entry(entry_key)
            if row is None:
                return None
        self._rows[entry_key] = None
        self._delete(entry_key, self._entries)
        state = self._state
        if state.claims:
            state.unclaim(head.owner, position)
        if len(row) <= _REFERENCE_SIZE:
            number, flags, _, size_bytes = _unpack_reference(row)
            message = state.messages.young.get(number) or self._payloads.message(number)
            key = message.key
            if message.holders > 1:  # as `SharedPayloads.let_go` does it, but written out: most are not the last
                message.holders -= 1
                self._payloads.messages[number] = message
                freed = 0
            else:
                freed = self._payloads.let_go(message)
        else:
            _, _, flags, _, key_size, body, payload = _unpack_entry(row)
            size_bytes = body + payload
            key = row[_OWN_SIZE : _OWN_SIZE + key_size] if key_size else b""
            freed = body + (self._payloads.release(row[-32:]) if flags & _BLOB else payload)
        if key:
            where = head.prefix + key
            self._keys[where] = None
            self._delete(where, self._handles["keys"])
        head.count = count = head.count - 1
        head.size_bytes -= size_bytes
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
        """Yield all entries as this transaction sees them, oldest first; they may be removed meanwhile."""
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
        """Return a head whose entries may be looked at."""
        if self._bulk:
            self._settle()
        head = self._state.heads.young.get(owner) or self._head(owner)
        if head.user != self._number:
            head.user = self._number
            head.base = head.last
        return head

    def _settle(self) -> None:
        """Enter into the overlay what `_append_all` left out."""
        keys = self._keys
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

    def _head(self, owner: str) -> Head:
        head = self._state.heads.get(owner)
        if head is None:
            head = load_head(self._tables, self._state.deltas, owner, self._state.floor)
            self._state.heads.put(owner, head)
        return head

    # -- appends: the shortest way for most messages, one for many owners at once, one for all the rest (rule 5)

    def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> list[Appended]:
        """Append to each owner; the answers in the same order."""
        if generations or draft.away:
            gone = self._gone(owners, generations)
            left_out = gone | self._attached(owners) if draft.away else gone
            if left_out:
                return self._append_to_some(owners, draft, now, bound, spared, left_out, gone)
        if not owners:
            return []  # nothing would ever release the payload
        if len(owners) == 1 and not bound.beside:
            answer = self._append_plain(owners[0], draft, now, bound)
            if answer is not None:
                return [answer]
        size = len(draft.body) + len(draft.payload)
        if draft.token or bound.beside or 0 < bound.size_bytes < size or (draft.key and len(set(owners)) < len(owners)):
            answers = self._append_each(owners, draft, now, bound, size, spared)
            stored = [answer for answer in answers if answer.position and not answer.repeated]
        else:
            answers = stored = self._append_all(owners, draft, now, bound, size, spared)
        if draft.expires_at and stored:
            self._end_entries(draft.expires_at, [answer for answer in stored if answer.position])
        return answers

    def _gone(self, owners: Sequence[str], generations: Sequence[int]) -> set[int]:
        """Return which of the owners have no mailbox of the generation that is named (0: any)."""
        gone: set[int] = set()
        if not generations:
            return gone
        for index, (owner, generation) in enumerate(zip(owners, generations, strict=True)):
            if generation:
                head = self._used(owner)
                if head.generation != generation or not head.is_there:
                    gone.add(index)
        return gone

    def _attached(self, owners: Sequence[str]) -> set[int]:
        """Return which of the owners are attached to a member."""
        if not self._state.attached:
            return set()
        return {index for index, owner in enumerate(owners) if self._member_of(owner)}

    def _append_to_some(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound,
        spared: Sequence[int],
        left_out: set[int],
        gone: set[int],
    ) -> list[Appended]:
        """Append to the other owners than those that are left out, which is so for some since they are gone."""
        left = [index for index in range(len(owners)) if index not in left_out]
        safe = [spared[index] for index in left] if spared else ()
        answers = iter(self.append([owners[index] for index in left], draft, now, bound, safe))
        return [
            Appended(owner, 0, attached=self._member_of(owner), gone=index in gone)
            if index in left_out
            else next(answers)
            for index, owner in enumerate(owners)
        ]

    def _member_of(self, owner: str) -> str:
        """Return the member that an owner is attached to."""
        attached = self._state.attached
        return attached[home][0] if (home := home_of_owner(owner)) in attached else ""

    def _append_plain(self, owner: str, draft: Draft, now: float, bound: Bound) -> Appended | None:
        """Append on the shortest path, for most messages: a small one, one owner with room; None: take another."""
        body, payload, compaction = draft.body, draft.payload, draft.key
        if draft.token or draft.expires_at or len(payload) > tables.INLINE_PAYLOAD:
            return None
        head = self._state.heads.young.get(owner) or self._head(owner)
        size = len(body) + len(payload)
        if bound is not NO_BOUND and (0 < bound.entries <= head.count or 0 < bound.size_bytes < head.size_bytes + size):
            return None
        if head.user != self._number:
            head.user = self._number
            head.base = head.last
        replaced = self._take_key(head, compaction) if compaction else 0
        head.last = position = head.last + 1
        head.count += 1
        head.size_bytes += size
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
        state = self._state
        state.entries += 1
        if replaced or state.attached:
            return Appended(owner, position, replaced, (), False, self._member_of(owner))
        return Appended(owner, position)

    def _take_key(self, head: Head, compaction: bytes) -> int:
        """Let a compaction key lead to the entry that comes next; the position of the one it led to, now removed."""
        if self._bulk:
            self._settle()
        replaced = self._replaced(head, compaction)
        bit = tables.key_bit(compaction)
        head.keyed = head.keyed | bit if head.count else bit
        self._batch.set("keys", head.prefix + compaction, _pack(head.last + 1))
        return replaced

    def _append_all(
        self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, size: int, spared: Sequence[int]
    ) -> list[Appended]:
        """Append on the short path, where nothing is repeated: a campaign, sleeping sessions, one turn's messages."""
        row = self._payloads.row(draft, now, len(owners))
        newest = row if len(row) <= _REFERENCE_SIZE else b""
        droppable = 1 if draft.droppable else 0
        put, entries, dirty = self._put, self._entries, self._heads
        recent, attached = self._state.heads.young.get, self._state.attached
        compaction = draft.key
        most, most_bytes = bound.entries or _ANY, (bound.size_bytes or _ANY) - size
        bounded = bound.entries > 0 or bound.size_bytes > 0
        answers: list[Appended] = []
        answer = answers.append
        if compaction in self._bulk_keys:
            self._settle()
        # What is appended here enters the overlay only when it is looked at, which is rare.
        self._bulk.append((answers, row, compaction))
        if compaction:
            self._bulk_keys.add(compaction)
            bit, keys = tables.key_bit(compaction), self._handles["keys"]
        if not droppable and (compaction or not attached):
            room = (most, most_bytes) if bounded else None
            if compaction:
                self._append_keyed(owners, compaction, row, size, room, answers)
            else:
                self._append_simply(owners, row, size, room, answers)
        full, done = 0, len(answers)
        for owner in owners[done:] if done else owners:
            head = recent(owner) or self._head(owner)
            if bounded and (head.count >= most or head.size_bytes > most_bytes):
                safe = spared[len(answers)] if spared else 0
                answer(self._append_full(owner, draft, row, size, bound, self._member_of(owner), safe))
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
            head.size_bytes += size
            if droppable:
                head.droppable += 1
            place = _pack(position)
            put(head.prefix + place, row, entries)
            if compaction:
                put(where, place, keys)
            if position >= head.write_at:
                dirty[owner] = head
            if attached or replaced:
                answer(Appended(owner, position, replaced, (), False, self._member_of(owner)))
            else:
                answer(Appended(owner, position))
        self._state.entries += len(owners) - full
        if len(owners) == 1:
            self._settle()  # so that the row is kept in mind
        return answers

    def _append_simply(
        self, owners: Sequence[str], row: bytes, size: int, bound: tuple[int, int] | None, answers: list[Appended]
    ) -> None:
        """Append as `_append_all` does, without its cases, up to the first owner who has no room."""
        put, entries, dirty, pack, answer = self._put, self._entries, self._heads, _pack, answers.append
        most, most_bytes = bound or (_ANY, _ANY)
        newest = row if len(row) <= _REFERENCE_SIZE else b""
        for head in self._heads_of(owners):
            if head.count >= most or head.size_bytes > most_bytes:
                break
            head.last = position = head.last + 1
            head.newest = newest
            head.count += 1
            head.size_bytes += size
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
        """Append with a compaction key likewise, up to the first owner who has no room or an entry of that key."""
        put, entries, keys, dirty = self._put, self._entries, self._handles["keys"], self._heads
        attached, answer = self._state.attached, answers.append
        most, most_bytes = bound or (_ANY, _ANY)
        bit, pack = tables.key_bit(compaction), _pack
        newest = row if len(row) <= _REFERENCE_SIZE else b""
        for head in self._heads_of(owners):
            count = head.count
            if count >= most or head.size_bytes > most_bytes:
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
            head.size_bytes += size
            place = pack(position)
            put(prefix + place, row, entries)
            put(where, place, keys)
            owner = head.owner
            if position >= head.write_at:
                dirty[owner] = head
            if attached:
                answer(Appended(owner, position, 0, (), False, self._member_of(owner)))
            else:
                answer(Appended(owner, position))

    def _heads_of(self, owners: Sequence[str]) -> list[Head]:
        """Return the heads of many owners."""
        heads = list(map(self._state.heads.young.get, owners))
        if None in heads:
            return [head or self._head(owner) for owner, head in zip(owners, heads, strict=True)]
        return heads  # type: ignore[return-value]

    def _place_of(self, head: Head, where: bytes, bit: int) -> bytes | None:
        """Return the position of the entry with a compaction key, as it is stored; `where` is the key of that row."""
        if not (head.count and head.keyed & bit):
            return None
        known = self._keys
        return known[where] if where in known else self._tables.keys.get(where)

    def _append_full(
        self, owner: str, draft: Draft, row: bytes, size: int, bound: Bound, node: str, spared: int
    ) -> Appended:
        """Append to a mailbox where something must go, unless it is replaced."""
        head = self._used(owner)
        if head.spare:
            spared = spared_by(spared, head.spare)
        if owner in self._state.claims:
            spared = spared_by(spared, max(self._state.claims[owner]))
        if bound.refuse and not self._fits(head, draft.key, size, bound):
            self._payloads.unclaim(row)
            return Appended(owner, 0, 0, (), False, node, False, True)
        replaced = self._replaced(head, draft.key) if draft.key else 0
        position, dropped = self._add(head, draft, row, size, bound, spared)
        over = spared != 0 and position != 0 and _exceeds(head, bound)
        return Appended(owner, position, replaced, dropped, False, node, over)

    def _fits(self, head: Head, key: bytes, size: int, bound: Bound) -> bool:
        """Return True if an entry fits when the one of the same key is gone."""
        beside = [self._used(other) for other in bound.beside]
        count = head.count + 1 + sum(other.count for other in beside)
        size_bytes = head.size_bytes + size + sum(other.size_bytes for other in beside)
        place = self._place_of(head, head.prefix + key, tables.key_bit(key)) if key else None
        row = self._get_entry(head.prefix + place) if place is not None else None
        if row is not None:
            count, size_bytes = count - 1, size_bytes - tables.facts(row)[1]
        return not (0 < bound.entries < count or 0 < bound.size_bytes < size_bytes)

    def _append_each(
        self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, size: int, spared: Sequence[int]
    ) -> list[Appended]:
        """Append on the long path: drafts with a token, or that can never fit."""
        row = b""
        fresh: list[str] = []  # owners for which the token was not known
        answers: list[Appended] = []
        fits = not 0 < bound.size_bytes < size
        for number, owner in enumerate(owners):
            head = self._used(owner)
            node = self._member_of(owner)
            known = self._known(head, draft.token, now) if draft.token else None
            if known is not None:
                if row:
                    self._payloads.unclaim(row)
                answers.append(Appended(owner, known, 0, (), True, node))
                continue
            if fits:
                row = row or self._payloads.row(draft, now, len(owners) - number)
                answer = self._append_full(owner, draft, row, size, bound, node, spared[number] if spared else 0)
            elif bound.refuse:
                answer = Appended(owner, 0, 0, (), False, node, False, True)
            else:
                replaced = self._replaced(head, draft.key) if draft.key else 0
                answer = Appended(owner, 0, replaced, (), False, node)
            answers.append(answer)
            if draft.token and not answer.refused:
                fresh.append(owner)
                token = tables.TOKEN.pack(now + TOKEN_MEMORY, answer.position)
                self._batch.set("tokens", head.prefix + draft.token, token)
        if fresh:
            self._end_tokens(now + TOKEN_MEMORY, draft.token, fresh)
        return answers

    def _known(self, head: Head, token: bytes, now: float) -> int | None:
        """Return the position of the first append with this token."""
        row = self._batch.get("tokens", head.prefix + token)
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

    def _add(
        self, head: Head, draft: Draft, row: bytes, size: int, bound: Bound, spared: int
    ) -> tuple[int, tuple[int, ...]]:
        """Add an entry; return its position (0: pushed out itself), and the positions that it pushed out."""
        head.last = position = head.last + 1
        head.newest = b""
        if draft.key:
            bit = tables.key_bit(draft.key)
            head.keyed = head.keyed | bit if head.count else bit
            self._batch.set("keys", head.prefix + draft.key, _pack(position))
        head.count += 1
        head.size_bytes += size
        if draft.droppable:
            head.droppable += 1
        self._state.entries += 1
        self._set_entry(head.prefix + _pack(position), row)
        if position >= head.write_at:
            self._heads[head.owner] = head
        if not _exceeds(head, bound):
            return position, ()
        dropped = self._push_out(head, bound, spared)
        if position in dropped:
            return 0, tuple(other for other in dropped if other != position)
        return position, tuple(dropped)

    def _push_out(self, head: Head, bound: Bound, spared: int) -> list[int]:
        """Remove the oldest that may be dropped, then the oldest that is not spared, until the rest fits."""
        dropped: list[int] = []
        for droppable_only in (True, False):
            if not head.droppable if droppable_only else spared == SPARE_ALL:
                continue
            for position, row in self._entries_of(head):
                if not _exceeds(head, bound):
                    return dropped
                if droppable_only and not head.droppable:
                    break
                if tables.facts(row)[0] & tables.DROPPABLE if droppable_only else position > spared:
                    dropped.append(position)
                    self._remove(head, position, row)
        return dropped

    # -- what ends by itself

    def _end_entries(self, when: float, stored: list[Appended]) -> None:
        for start in range(0, len(stored), MAX_ENDING):
            part = stored[start : start + MAX_ENDING]
            refs = ([answer.owner for answer in part], [answer.position for answer in part])
            self._batch.end(when, EndingKind.ENTRIES, _encode(refs))

    def _end_tokens(self, when: float, token: bytes, owners: list[str]) -> None:
        for start in range(0, len(owners), MAX_ENDING):
            self._batch.end(when, EndingKind.TOKENS, _encode((token, owners[start : start + MAX_ENDING])))

    def ended_entries(
        self,
        key: bytes,
        owners: list[str],
        positions: list[int],
        now: float,
        budget: int,
        expired: list[tuple[str, int]],
    ) -> tuple[int, int, int]:
        removed, size_bytes = 0, 0
        due = list(zip(owners[:budget], positions[:budget], strict=True))
        for owner, position in due:
            head = self._used(owner)
            row = self._get_entry(head.prefix + _pack(position))
            if row is not None and 0 < tables.expiry(row) <= now:
                size_bytes += self._remove(head, position, row) or 0
                removed += 1
                expired.append((owner, position))
        rest = (owners[budget:], positions[budget:])
        self._batch.keep_ending(key, rest if rest[0] else None)
        return removed, size_bytes, len(due)

    def ended_tokens(
        self, key: bytes, token: bytes, owners: list[str], now: float, budget: int
    ) -> tuple[int, int, int]:
        due, rest = owners[:budget], owners[budget:]
        for owner in due:
            where = tables.name(owner) + b"\0" + token
            row = self._batch.get("tokens", where)
            if row is not None and tables.TOKEN.unpack(row)[0] <= now:
                self._batch.unset("tokens", where)
        self._batch.keep_ending(key, (token, rest) if rest else None)
        return 0, 0, len(due)


def _row_known(head: Head, position: int, seen: list[tuple[int, bytes]] | None) -> bytes | None:
    """Return the row of an entry, if it certainly exists and is the newest or a reader has seen it.

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


def load_head(opened: RocksTables, deltas: Deltas, owner: str, floor: int = 0) -> Head:
    """Return a head as it was noted, with the entries that came since; if there is none, a new one above the floor."""
    where = tables.name(owner)
    row = deltas.get_from(opened.heads, b"h" + where)
    if row is None:
        return tables.new_head(owner, where + b"\0", floor)
    head = Head(owner, where + b"\0", keyed=-1, made=True)
    numbers = tables.parse_head(row)
    head.last, head.count, head.size_bytes, head.first, head.droppable, head.generation, head.spare = numbers
    head.write_at = head.last + tables.TAIL
    for key, entry in scan(opened.entries, head.prefix + _pack(head.last + 1), after_prefix(head.prefix)):
        flags, size_bytes = tables.facts(entry)
        head.last = tables.NUMBER.unpack(key[-8:])[0]
        head.count += 1
        head.size_bytes += size_bytes
        head.droppable += flags & tables.DROPPABLE
    return head


def _exceeds(head: Head, bound: Bound) -> bool:
    return 0 < bound.entries < head.count or 0 < bound.size_bytes < head.size_bytes
