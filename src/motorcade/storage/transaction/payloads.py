"""The contents that several entries share, with their holders: a message, or a large payload (a blob).

Rule 4 of the package: `row` claims for as many entries as it is told; `unclaim` gives one claim back.
"""

from __future__ import annotations

import hashlib

from motorcade.storage import tables
from motorcade.storage.ports import Draft, StoreDamagedError
from motorcade.storage.tables import EndingKind
from motorcade.storage.transaction.batch import OverlaidBatch
from motorcade.storage.transaction.state import BlobInfo, SharedMessage

_pack = tables.NUMBER.pack
_unpack_entry = tables.ENTRY.unpack_from
_unpack_reference = tables.REFERENCE.unpack_from


class SharedPayloads:
    """Shared messages and blobs, with the number of their holders."""

    def __init__(self, batch: OverlaidBatch) -> None:
        self.messages: dict[int, SharedMessage] = {}  #: whose holders have changed
        self._batch = batch
        self._state = batch.state
        self.blobs: dict[bytes, BlobInfo] = {}  #: whose counters have changed

    def finish(self) -> None:
        """Add the counters that have changed to the deltas."""
        deltas = self._batch.deltas
        for digest, info in self.blobs.items():
            deltas[b"b" + digest] = tables.BLOBINFO.pack(info.holders, info.keep_until, info.size)
        for number, message in self.messages.items():
            deltas[b"n" + _pack(number)] = _pack(message.holders)

    def row(self, draft: Draft, now: float, entries: int) -> bytes:
        """Return the row that is the same for all owners: complete, or a reference (rule 4)."""
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
        size_bytes = len(body) + size
        message = SharedMessage(
            self._state.serial(),
            entries,
            key,
            payload if blob is not None else b"",
            size_bytes if blob is None else len(body),
        )
        self._batch.put(_pack(message.number), row, self._batch.handles["shared"])
        self.messages[message.number] = message
        self._state.messages.put(message.number, message)
        self._state.shared += 1
        return tables.reference_row(message.number, flags | (tables.KEYED if key else 0), size_bytes, draft.expires_at)

    def unclaim(self, row: bytes) -> int:
        """Release what an entry shares with others; return how many bytes that frees."""
        if len(row) <= tables.REFERENCE_SIZE:
            return self.let_go(self.message(_unpack_reference(row)[0]))
        _, _, flags, _, _, body, payload = _unpack_entry(row)
        return int(body) + (self.release(row[-32:]) if flags & tables.BLOB else int(payload))

    def let_go(self, message: SharedMessage) -> int:
        """Release one reference; return how many bytes that frees."""
        message.holders -= 1
        if message.holders:
            self.messages[message.number] = message
            return 0
        number = _pack(message.number)
        self.messages.pop(message.number, None)
        self._batch.delete(number, self._batch.handles["shared"])
        self._batch.deltas[b"n" + number] = None
        self._state.shared -= 1
        return message.size_bytes + (self.release(message.digest) if message.digest else 0)

    def message(self, number: int) -> SharedMessage:
        """Return a shared message that an entry refers to."""
        message = self._state.messages.get(number)
        if message is None:
            where = _pack(number)
            holders = self._state.deltas.get(self._batch.opened, b"n" + where)
            row = self._batch.opened.shared.get(where)
            if holders is None or row is None:
                raise StoreDamagedError(f"message {number} is missing though entries refer to it; bring back a backup")
            entry = tables.parse_entry(row)
            blob = entry.flags & tables.BLOB
            message = SharedMessage(
                number,
                tables.NUMBER.unpack(holders)[0],
                entry.key,
                entry.payload if blob else b"",
                len(entry.body) if blob else entry.size_bytes,
            )
            self._state.messages.put(number, message)
        return message

    # -- blobs

    def put_blob(self, data: bytes, keep_until: float) -> bytes:
        """Store a blob and keep it for a while; its digest."""
        digest = hashlib.sha256(data).digest()
        info = self._blob_of(digest, data)
        info.keep_until = max(info.keep_until, keep_until)
        self._batch.set("endings", tables.ending(info.keep_until, EndingKind.BLOB, digest), b"")
        return digest

    def _blob_of(self, digest: bytes, data: bytes) -> BlobInfo:
        """Return the counter of a blob that is stored now, if it was not before."""
        info = self._info(digest)
        if info is None:
            info = BlobInfo(0, 0.0, len(data))
            self._batch.put(digest, data, self._batch.handles["blobs"])
            self._state.blobs.put(digest, info)
            self._state.blob_count += 1
            self._state.blob_bytes += info.size
        self.blobs[digest] = info
        return info

    def _held(self, digest: bytes) -> BlobInfo:
        """Return the counter of a blob that an entry refers to, for a change."""
        info = self._info(digest)
        if info is None:
            raise StoreDamagedError(f"blob {digest.hex()} is missing though entries refer to it; bring back a backup")
        self.blobs[digest] = info
        return info

    def _info(self, digest: bytes) -> BlobInfo | None:
        info = self.blobs.get(digest) or self._state.blobs.get(digest)
        if info is None:
            row = self._state.deltas.get(self._batch.opened, b"b" + digest)
            if row is None:
                return None
            info = BlobInfo(*tables.BLOBINFO.unpack(row))
            self._state.blobs.put(digest, info)
        return info if info.size >= 0 else None

    def release(self, digest: bytes) -> int:
        """Release an entry's hold; return how many bytes that frees."""
        info = self._held(digest)
        info.holders -= 1
        if info.holders > 0:
            return 0
        if info.keep_until:
            # Its turn may have come while entries held it.
            self._batch.set("endings", tables.ending(info.keep_until, EndingKind.BLOB, digest), b"")
            return 0
        return self._drop_blob(digest, info)

    def _drop_blob(self, digest: bytes, info: BlobInfo) -> int:
        size = info.size
        self._state.blob_count -= 1
        self._state.blob_bytes -= size
        self._batch.delete(digest, self._batch.handles["blobs"])
        self._batch.deltas[b"b" + digest] = None
        self.blobs.pop(digest, None)
        info.size = -1  # dead, for a reader that finds it in the cache
        return size

    def ended(self, digest: bytes, now: float) -> tuple[int, int]:
        info = self._info(digest)
        if info is None or info.holders or now < info.keep_until:
            return 0, 0
        return 1, self._drop_blob(digest, info)
