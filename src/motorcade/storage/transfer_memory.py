"""The engine that forgets, written down and filled. It serves tests, and nodes without a disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from motorcade.storage.memory import MemoryMailbox, MemoryStore, MemoryStream
from motorcade.storage.ports import Bound, Draft, StreamRecord
from motorcade.storage.transfer import (
    INLINE,
    PART_ROWS,
    Content,
    ExportedBlob,
    ExportedEntry,
    ExportedFloor,
    ExportedLease,
    ExportedMailbox,
    ExportedRecords,
    ExportedStream,
    ExportedTokens,
)


class MemorySource:
    """The contents of an open store."""

    engine = "memory"

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def contents(self, now: float) -> AsyncIterator[Content]:
        for content in self._contents(now):
            yield content

    def _contents(self, now: float) -> Iterator[Content]:
        store, written = self._store, set[bytes]()
        for owner, box in store.mailboxes.boxes.items():
            yield from self._mailbox(owner, box, now, written)
        for digest, blob in store.blobs.blobs.items():
            if digest not in written and now < blob.keep_until:
                yield ExportedBlob(blob.data, blob.keep_until)
        for collection, records in store.records.collections.items():
            alive = [(key, value, until) for key, (value, until) in records.items() if not 0 < until <= now]
            for start in range(0, len(alive), PART_ROWS):
                yield ExportedRecords(collection, alive[start : start + PART_ROWS])
        for name, stream in store.streams.streams.items():
            rows = [(record.offset, record.time, record.value) for record in stream.records]
            for start in range(0, max(len(rows), 1), PART_ROWS):
                yield ExportedStream(name, stream.last, stream.time, rows[start : start + PART_ROWS])
        for name, (token, until) in store.coordination.leases.items():
            if now < until:
                yield ExportedLease(name, token, until)
        yield ExportedFloor(store.coordination.serial, store.mailboxes.floor)

    def _mailbox(self, owner: str, box: MemoryMailbox, now: float, written: set[bytes]) -> Iterator[Content]:
        entries: list[ExportedEntry] = []
        parts = 0
        for position, row in box.rows.items():
            if 0 < row.expires_at <= now:
                continue
            payload, digest = self._store.blobs.data(row.digest), b""
            size = len(payload)
            if size > INLINE:
                digest = row.digest
                if digest not in written:
                    written.add(digest)
                    keep_until = self._store.blobs.blobs[digest].keep_until
                    yield ExportedBlob(payload, keep_until if now < keep_until else 0.0)
                payload = b""
            droppable = position in box.droppable
            times = (row.stored_at, row.expires_at)
            entries.append(
                ExportedEntry(position, *times, row.mark, droppable, row.key, row.body, payload, digest, size)
            )
            if len(entries) == PART_ROWS:
                yield ExportedMailbox(owner, box.last, entries, box.generation, box.spare)
                entries = []
                parts += 1
        if entries or (box.is_there and not parts):
            yield ExportedMailbox(owner, box.last, entries, box.generation, box.spare)
        tokens = [(token, position, until) for token, (until, position) in box.tokens.items() if now < until]
        if tokens:
            yield ExportedTokens(owner, tokens)


class MemoryTarget:
    """An open store without contents."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._blobs: dict[bytes, bytes] = {}

    async def load(self, content: Content) -> None:
        store = self._store
        match content:
            case ExportedBlob():
                digest = await store.blobs.put(content.data, 0.0, content.keep_until)
                self._blobs[digest] = content.data
            case ExportedMailbox():
                self._mailbox(content)
            case ExportedTokens():
                box = store.mailboxes.boxes.setdefault(content.owner, MemoryMailbox())
                for token, position, until in content.tokens:
                    store.mailboxes.remember(content.owner, box, token, position, until)
            case ExportedRecords():
                for key, value, until in content.records:
                    store.records.apply_put(content.collection, key, value, until)
            case ExportedStream():
                self._stream(content)
            case ExportedLease():
                store.coordination.leases[content.name] = (content.token, content.until)
            case ExportedFloor():
                store.coordination.serial = max(store.coordination.serial, content.token)
                store.mailboxes.floor = max(store.mailboxes.floor, content.position)

    def _mailbox(self, part: ExportedMailbox) -> None:
        mailboxes = self._store.mailboxes
        box = mailboxes.boxes.setdefault(part.owner, MemoryMailbox())
        for item in part.entries:
            box.last = item.position - 1
            payload = self._blobs[item.digest] if item.digest else item.payload
            draft = Draft(item.body, payload, item.key, item.expires_at, item.droppable)
            mailboxes.apply_append([part.owner], draft, item.stored_at, Bound())
            box.rows[item.position].mark = item.mark
        box.last, box.generation, box.made, box.spare = part.last, part.generation, True, part.spare

    def _stream(self, part: ExportedStream) -> None:
        stream = self._store.streams.streams.setdefault(part.name, MemoryStream())
        stream.last, stream.time = part.last, part.time
        for offset, time, value in part.records:
            stream.records.append(StreamRecord(offset, time, value))
            stream.size_bytes += len(value)

    async def finish(self) -> None:
        """Finish; blobs that nothing refers to go with the next sweep."""
        self._blobs.clear()
