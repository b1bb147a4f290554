"""New entries: the shortest way for the message that most are, one for many owners at once, and one for all the rest.

_append_plain    a small message for one owner who has room
_append_all      one message for many owners: a campaign, sleeping sessions; the row is made once
_append_each     what has a token, or can never fit

`append` chooses; whichever way is taken, the same rows are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from motorcade.storage import tables
from motorcade.storage.homes import home_of_owner
from motorcade.storage.ports import NO_BOUND, SPARE_ALL, TOKEN_MEMORY, Appended, Bound, Draft
from motorcade.storage.tables import EndingKind, Head
from motorcade.storage.transaction.mailboxes import Mailboxes

#: Entries named by one row of `endings`, so that one step of a sweep never reads much more than its budget.
MAX_ENDING = 256

_ANY = 2**63  #: more than any mailbox holds

_REFERENCE_SIZE = tables.REFERENCE_SIZE

_pack = tables.NUMBER.pack
_pack_entry = tables.ENTRY.pack
_encode = msgspec.msgpack.Encoder().encode


class Appends(Mailboxes):
    """Whatever concerns entries that come."""

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
        if generations:
            gone = self._gone(owners, generations)
            if gone:
                return self._append_to_some(owners, draft, now, bound, spared, gone)
        if not owners:
            return []  # nothing would ever release the payload
        if len(owners) == 1:
            answer = self._append_plain(owners[0], draft, now, bound)
            if answer is not None:
                return [answer]
        size = len(draft.body) + len(draft.payload)
        if draft.token or 0 < bound.size_bytes < size or (draft.key and len(set(owners)) < len(owners)):
            answers = self._append_each(owners, draft, now, bound, size, spared)
            stored = [answer for answer in answers if answer.position and not answer.repeated]
        else:
            answers = stored = self._append_all(owners, draft, now, bound, size, spared)
        if draft.expires_at and stored:
            self._end_entries(draft.expires_at, [answer for answer in stored if answer.position])
        return answers

    def _gone(self, owners: Sequence[str], generations: Sequence[int]) -> set[int]:
        """Return which of the owners have no mailbox of the generation that is named (0: any)."""
        gone = set()
        for index, (owner, generation) in enumerate(zip(owners, generations, strict=True)):
            if generation:
                head = self._used(owner)
                if head.generation != generation or not head.is_there:
                    gone.add(index)
        return gone

    def _append_to_some(
        self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, spared: Sequence[int], gone: set[int]
    ) -> list[Appended]:
        """Append to the owners whose mailboxes are not gone."""
        left = [index for index in range(len(owners)) if index not in gone]
        safe = [spared[index] for index in left] if spared else ()
        answers = iter(self.append([owners[index] for index in left], draft, now, bound, safe))
        return [
            Appended(owner, 0, attached=self._member_of(owner), gone=True) if index in gone else next(answers)
            for index, owner in enumerate(owners)
        ]

    def _member_of(self, owner: str) -> str:
        """Return the member that an owner is attached to."""
        attached = self._state.attached
        return attached[home][0] if (home := home_of_owner(owner)) in attached else ""

    def _append_plain(self, owner: str, draft: Draft, now: float, bound: Bound) -> Appended | None:
        """The shortest way, for what most messages are: a small one, for one owner with room; None: take another."""
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
        self._state.entries += 1
        return Appended(owner, position, replaced, (), False, self._member_of(owner) if self._state.attached else "")

    def _take_key(self, head: Head, compaction: bytes) -> int:
        """Let a compaction key lead to the entry that comes next; the position of the one it led to, now removed."""
        if self._bulk:
            self._settle()
        replaced = self._replaced(head, compaction)
        bit = tables.key_bit(compaction)
        head.keyed = head.keyed | bit if head.count else bit
        self._set("keys", head.prefix + compaction, _pack(head.last + 1))
        return replaced

    def _append_all(
        self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, size: int, spared: Sequence[int]
    ) -> list[Appended]:
        """The short way, when nothing is repeated: a campaign, sleeping sessions, the messages of one turn."""
        row = self._row(draft, now, len(owners))
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
        # What is appended here enters the overlay only if somebody looks: mostly nobody does.
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
        """The inside of `_append_all` without its cases, up to the first owner who has no room."""
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
        """The same with a compaction key, up to the first owner who has no room or an entry of that key."""
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

    def _append_full(
        self, owner: str, draft: Draft, row: bytes, size: int, bound: Bound, node: str, spared: int
    ) -> Appended:
        """To a mailbox where something must go, unless it is replaced."""
        head = self._used(owner)
        if bound.refuse and not self._fits(head, draft.key, size, bound):
            self._unclaim(row)
            return Appended(owner, 0, 0, (), False, node, False, True)
        replaced = self._replaced(head, draft.key) if draft.key else 0
        position, dropped = self._add(head, draft, row, size, bound, spared)
        over = spared != 0 and position != 0 and _exceeds(head, bound)
        return Appended(owner, position, replaced, dropped, False, node, over)

    def _fits(self, head: Head, key: bytes, size: int, bound: Bound) -> bool:
        """Return True if an entry fits when the one of the same key is gone."""
        count, size_bytes = head.count + 1, head.size_bytes + size
        place = self._place_of(head, head.prefix + key, tables.key_bit(key)) if key else None
        row = self._get_entry(head.prefix + place) if place is not None else None
        if row is not None:
            count, size_bytes = count - 1, size_bytes - tables.facts(row)[1]
        return not (0 < bound.entries < count or 0 < bound.size_bytes < size_bytes)

    def _append_each(
        self, owners: Sequence[str], draft: Draft, now: float, bound: Bound, size: int, spared: Sequence[int]
    ) -> list[Appended]:
        """The long way: what has a token, or can never fit."""
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
                    self._unclaim(row)
                answers.append(Appended(owner, known, 0, (), True, node))
                continue
            if fits:
                row = row or self._row(draft, now, len(owners) - number)
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
                self._set("tokens", head.prefix + draft.token, token)
        if fresh:
            self._end_tokens(now + TOKEN_MEMORY, draft.token, fresh)
        return answers

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

    def _add(
        self, head: Head, draft: Draft, row: bytes, size: int, bound: Bound, spared: int
    ) -> tuple[int, tuple[int, ...]]:
        """The position (0: pushed out itself), and what was pushed out."""
        head.last = position = head.last + 1
        head.newest = b""
        if draft.key:
            bit = tables.key_bit(draft.key)
            head.keyed = head.keyed | bit if head.count else bit
            self._set("keys", head.prefix + draft.key, _pack(position))
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
            self._end(when, EndingKind.ENTRIES, _encode(refs))

    def _end_tokens(self, when: float, token: bytes, owners: list[str]) -> None:
        for start in range(0, len(owners), MAX_ENDING):
            self._end(when, EndingKind.TOKENS, _encode((token, owners[start : start + MAX_ENDING])))

    def _end(self, when: float, kind: EndingKind, refs: bytes) -> None:
        self._set("endings", tables.ending(when, kind, _pack(self._state.serial())), refs)


def _exceeds(head: Head, bound: Bound) -> bool:
    return 0 < bound.entries < head.count or 0 < bound.size_bytes < head.size_bytes
