"""Heads and entries of mailboxes: looked at, marked, removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rocksdict import ReadOptions

from motorcade.storage import tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.files import RocksTables, scan
from motorcade.storage.ports import MailboxInfo
from motorcade.storage.tables import Head, after_prefix
from motorcade.storage.transaction.shares import Shares

#: Entries to be removed from one mailbox from which on reading all that lie there is cheaper than each by itself.
WORTH_A_SCAN = 4

_REFERENCE_SIZE, _OWN_SIZE = tables.REFERENCE_SIZE, tables.OWN_SIZE
_BLOB, _DROPPABLE = tables.BLOB, tables.DROPPABLE

_pack = tables.NUMBER.pack
_unpack_entry = tables.ENTRY.unpack_from
_unpack_reference = tables.REFERENCE.unpack_from


class Mailboxes(Shares):
    """Whatever concerns entries that are there."""

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
        self._deltas[b"h" + head.prefix[:-1]] = None
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
        if len(row) <= _REFERENCE_SIZE:
            number, flags, _, size_bytes = _unpack_reference(row)
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
            size_bytes = body + payload
            key = row[_OWN_SIZE : _OWN_SIZE + key_size] if key_size else b""
            freed = body + (self._release(row[-32:]) if flags & _BLOB else payload)
        if key:
            where = head.prefix + key
            self._overlay["keys"][where] = None
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

    def _head(self, owner: str) -> Head:
        head = self._state.heads.get(owner)
        if head is None:
            head = load_head(self._tables, self._state.deltas, owner, self._state.floor)
            self._state.heads.put(owner, head)
        return head


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


def load_head(opened: RocksTables, deltas: Deltas, owner: str, floor: int = 0) -> Head:
    """A head as it was noted, with the entries that came since; a new one above the floor if there is none."""
    where = tables.name(owner)
    row = deltas.get_from(opened.heads, b"h" + where)
    if row is None:
        return tables.new_head(owner, where + b"\0", floor)
    head = Head(owner, where + b"\0", keyed=-1, made=True)
    head.last, head.count, head.size_bytes, head.first, head.droppable, head.generation = tables.parse_head(row)
    head.write_at = head.last + tables.TAIL
    for key, entry in scan(opened.entries, head.prefix + _pack(head.last + 1), after_prefix(head.prefix)):
        flags, size_bytes = tables.facts(entry)
        head.last = tables.NUMBER.unpack(key[-8:])[0]
        head.count += 1
        head.size_bytes += size_bytes
        head.droppable += flags & tables.DROPPABLE
    return head
