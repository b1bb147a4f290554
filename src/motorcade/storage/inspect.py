"""Looks through a copy of a store and says what does not agree.

Sizes and ends against entries, keys against entries, counters of shared messages and of blobs against those that hold
them, blobs against their digests, totals against all. It works on a copy because only there everything is of the same
moment.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from motorcade.storage import packed_rows, tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.files import Files, RocksTables, scan
from motorcade.storage.ports import StoreDamagedError
from motorcade.storage.transaction import load_head

#: Bytes; what is read once need not be kept.
CACHE = 8 * 2**20

#: Findings after which the rest is left out.
MAX_FINDINGS = 100


def inspect(copy: Path) -> list[str]:
    """Return what is wrong; empty: nothing."""
    files = Files(copy, block_cache=CACHE)
    try:
        files.open(read_only=True)
        with files.reading() as opened:
            try:
                return _Inspection(opened).run()
            finally:
                del opened
    except StoreDamagedError as error:
        return [str(error).replace(str(copy), str(copy.parent))]
    finally:
        files.close()


class _Inspection:
    def __init__(self, opened: RocksTables) -> None:
        self._tables = opened
        self._deltas = Deltas()
        self._deltas.load(opened)
        self._wrong: list[str] = []
        self._holders: Counter[bytes] = Counter()  #: of blobs
        self._references: Counter[bytes] = Counter()  #: to shared messages

    def run(self) -> list[str]:
        entries, shared = self._mailboxes(), self._shared()
        totals = (entries, *self._blobs(), sum(1 for _ in scan(self._tables.records, b"", b"")), shared)
        stored = self._deltas.get(self._tables, tables.TOTALS_DELTA)
        expected = tables.parse_totals(stored)[:5]
        if totals != expected:
            what = "entries, blobs, bytes of blobs, records, shared messages"
            self._say(f"totals ({what}): counted {totals}, noted {expected}")
        self._streams()
        return self._wrong

    def _say(self, what: str) -> None:
        if len(self._wrong) < MAX_FINDINGS:
            self._wrong.append(what)

    def _mailboxes(self) -> int:
        """Compare entries with heads and keys; return how many entries there are."""
        total = 0
        owner, count, size_bytes, droppable, last, keys = b"", 0, 0, 0, 0, 0
        heads = 0
        all_keys = sum(1 for _ in scan(self._tables.keys, b"", b""))
        for key, row in scan(self._tables.entries, b"", b""):
            if key[:-9] != owner:
                heads += self._mailbox(owner, count, size_bytes, droppable, last)
                owner, count, size_bytes, droppable, last = key[:-9], 0, 0, 0, 0
            flags, size = tables.facts(row)
            last = tables.NUMBER.unpack(key[-8:])[0]
            total += 1
            count += 1
            size_bytes += size
            droppable += flags & tables.DROPPABLE
            compaction = self._entry(row)
            if compaction:
                keys += 1
                if self._tables.keys.get(owner + b"\0" + compaction) != key[-8:]:
                    self._say(f"mailbox {owner.decode()!r}: the key of entry {last} does not lead to it")
        heads += self._mailbox(owner, count, size_bytes, droppable, last)
        if keys != all_keys:
            self._say(f"{all_keys} compaction keys, but {keys} entries that have one")
        self._empty_heads(heads)
        return total

    def _entry(self, row: bytes) -> bytes:
        """Count what an entry holds; its compaction key."""
        if len(row) > tables.REFERENCE_SIZE:
            entry = tables.parse_entry(row)
            if entry.flags & tables.BLOB:
                self._holders[entry.payload] += 1
            return entry.key
        number = row[:8]
        self._references[number] += 1
        if not tables.facts(row)[0] & tables.KEYED:
            return b""
        message = self._tables.shared.get(number)
        return tables.parse_entry(message).key if message is not None else b""

    def _shared(self) -> int:
        """Compare shared messages with their counters and references; return how many messages there are."""
        count = 0
        for number, row in scan(self._tables.shared, b"", b""):
            count += 1
            entry = tables.parse_entry(row)
            if entry.flags & tables.BLOB:
                self._holders[entry.payload] += 1
            counter = self._deltas.get(self._tables, b"n" + number)
            holders = tables.NUMBER.unpack(counter)[0] if counter is not None else -1
            held = self._references.pop(number, 0)
            if holders != held:
                self._say(f"shared message {number.hex()}: {held} entries refer to it, noted {holders}")
        for number in self._references:
            self._say(f"shared message {number.hex()}: missing")
        return count

    def _mailbox(self, owner: bytes, count: int, size_bytes: int, droppable: int, last: int) -> int:
        if not owner:
            return 0
        head = load_head(self._tables, self._deltas, owner.decode())
        if (head.count, head.size_bytes, head.droppable) != (count, size_bytes, droppable) or head.last < last:
            self._say(
                f"mailbox {owner.decode()!r}: {count} entries, {size_bytes} bytes, the last at {last}; "
                f"noted {head.count}, {head.size_bytes}, {head.last}"
            )
        return 1

    def _empty_heads(self, with_entries: int) -> None:
        """Report heads that speak of entries where there are none."""
        claims = 0
        for owner, _ in self._deltas.scan(self._tables, b"h"):
            claims += load_head(self._tables, self._deltas, owner.decode()).count > 0
        if claims != with_entries:
            self._say(f"{claims} mailboxes are said to have entries, {with_entries} have")

    def _blobs(self) -> tuple[int, int]:
        """Compare blobs with digests and counters; return how many there are, and their bytes."""
        count, size_bytes = 0, 0
        for digest, data in scan(self._tables.blobs, b"", b""):
            count += 1
            size_bytes += len(data)
            if hashlib.sha256(data).digest() != digest:
                self._say(f"blob {digest.hex()}: the data does not agree with the digest")
            row = self._deltas.get(self._tables, b"b" + digest)
            holders = tables.BLOBINFO.unpack(row)[0] if row is not None else -1
            held = self._holders.pop(digest, 0)
            if holders != held:
                self._say(f"blob {digest.hex()}: held by {held} entries and messages, noted {holders}")
        for digest in self._holders:
            self._say(f"blob {digest.hex()}: missing")
        return count, size_bytes

    def _streams(self) -> None:
        for name, row in scan(self._tables.streams, b"", b""):
            first, last, records, size_bytes, _ = tables.STREAM.unpack(row)
            found, size, lowest, highest = 0, 0, 0, 0
            for key, value in scan(self._tables.rows, name + b"\0", name + b"\1"):
                highest = tables.NUMBER.unpack(key[-8:])[0]
                bytes_of = packed_rows.sizes(value)
                # The oldest of a run may have been trimmed; a row of which all were is one too many.
                left = bytes_of[-min(highest - first + 1, len(bytes_of)) :] if highest >= first else bytes_of
                lowest = lowest or highest - len(left) + 1
                found += len(left)
                size += sum(left)
            if (found, size) != (records, size_bytes) or (found and (lowest, highest) != (first, last)):
                self._say(
                    f"stream {name.decode()!r}: {found} records, {size} bytes, {lowest} to {highest}; "
                    f"noted {records}, {size_bytes}, {first} to {last}"
                )
