"""Payloads of the two-step form: data that is published once, under an id, and named by batches later.

The bytes are stored once by their hash, and found by a record under their id. Published again, they live longer. Those
that were published lately are cached.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final, cast

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import RecordError
from motorcade.extension.hooks import Handled, acknowledge_after
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout import batch as batches
from motorcade.plugins.fanout.batch import BadBatchError
from motorcade.plugins.fanout.inflight import InflightTable
from motorcade.plugins.fanout.record import DataRecord, decode_data, encode
from motorcade.plugins.fanout.tables import DATA
from motorcade.storage.ports import Store, StoreError

MAX_CACHED: Final = 64  #: payloads
CACHED_BYTES: Final = 16 * 1024**2


class MissingDataError(MotorcadeError):
    """A trigger names data that is not there; nothing was stored."""


class Payloads:
    """The data of one node's platform."""

    def __init__(self, context: Context, table: InflightTable) -> None:
        self._store = cast("Store", context.store)
        self._now = context.hub.now
        self._counters = context.counters
        self._log = context.log
        self._table = table
        self._shared = context.cluster is not None
        self._cache: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # by id, and when it was published
        self._cached_bytes = 0
        self.stored_bytes = 0  #: of all data in the store, about
        self._sizes: dict[str, int] = {}  # by id
        self._coming: dict[str, bytes] = {}  # on their way into the store
        self._storing: dict[str, asyncio.Future[None]] = {}  # the last write of each

    @property
    def cached(self) -> tuple[int, int]:
        """Return how many are cached, and their bytes."""
        return len(self._cache), self._cached_bytes

    def publish(self, message: Message, data_id: str) -> Handled:
        """Take data that batches will name; the answer to its publisher."""
        config = self._table.config
        try:
            batches.check_data_id(data_id)
            batches.check_size(len(message.payload), config)
            batches.data_digests(data_id, message.payload)
        except BadBatchError as error:
            self._counters["data_refused"] += 1
            return Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error))
        size, before = len(message.payload), self._sizes.get(data_id)
        if config.max_data_bytes and self.stored_bytes + size - (before or 0) > config.max_data_bytes:
            self._counters["data_refused_full"] += 1
            return Handled(
                ReasonCode.QUOTA_EXCEEDED,
                f"data of {self.stored_bytes} bytes is stored, {config.max_data_bytes} may be (max_data_bytes)",
            )
        self._sizes[data_id] = size
        self.stored_bytes += size - (before or 0)
        self._coming[data_id] = message.payload  # batches that come behind it find it here
        earlier = self._storing.get(data_id)
        done = asyncio.ensure_future(self._put(data_id, message.payload, earlier, before))
        self._storing[data_id] = done
        acknowledge_after(message, done)
        return Handled()

    async def _put(self, data_id: str, data: bytes, earlier: asyncio.Future[None] | None, before: int | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])  # of two with the same id the second is the last
        try:
            await self._store_data(data_id, data)
        except BaseException:
            self.stored_bytes += (before or 0) - len(data)
            if before is None:
                self._sizes.pop(data_id, None)
            else:
                self._sizes[data_id] = before
            raise
        finally:
            if self._coming.get(data_id) is data:
                del self._coming[data_id]
                self._storing.pop(data_id, None)
        self._counters["data_stored"] += 1

    async def _store_data(self, data_id: str, data: bytes) -> None:
        now = self._now()
        until = now + self._table.config.data_retention
        known = await self._store.records.get(DATA, data_id, now)
        digest = await self._store.blobs.put(data, now, until)
        if known is not None and _digest_of(known) not in (b"", digest):
            self._counters["data_replaced"] += 1
            self._log.warning("fanout_data_replaced", data_id=data_id)
        record = DataRecord(digest, hashlib.sha1(data, usedforsecurity=False).hexdigest(), len(data), now)
        await self._store.records.put(DATA, data_id, encode(record), until)
        self._remember(data_id, data, now)

    async def settle(self) -> None:
        """Wait until the data that has come by now is stored or refused."""
        if self._storing:
            await asyncio.wait(list(self._storing.values()))

    def count(self, sizes: dict[str, int]) -> None:
        """Go by the sizes that were found in the store."""
        self._sizes = sizes | {data_id: len(data) for data_id, data in self._coming.items()}
        self.stored_bytes = sum(self._sizes.values())

    def at_hand(self, data_id: str) -> bytes | None:
        """Return data that need not be read from the store."""
        coming = self._coming.get(data_id)
        if coming is not None or self._shared:  # another member may have other data of that id by now
            return coming
        cached = self._cache.get(data_id)
        return cached[0] if cached is not None and self._now() < cached[1] + self._table.config.data_retention else None

    async def find(self, data_id: str) -> bytes:
        """Return data by its id; `MissingDataError`, `StoreError`."""
        found = self.at_hand(data_id)
        if found is not None:
            return found
        now, since = self._now(), 0.0
        value = await self._store.records.get(DATA, data_id, now)
        try:
            record = decode_data(value) if value is not None else None
        except RecordError as error:
            raise StoreError(f"data {data_id!r} cannot be read: {error}") from error
        if record is not None and now < record.time + self._table.config.data_retention:  # it may have been longer once
            cached = self._cache.get(data_id)
            if cached is not None and hashlib.sha256(cached[0]).digest() == record.digest:
                found = cached[0]
            else:
                found = await self._store.blobs.get(record.digest, now)
            since = record.time
        if found is None:
            self._counters["batches_without_data"] += 1
            shown = data_id if len(data_id) <= 64 else f"{data_id[:64]}…"
            raise MissingDataError(f"there is no data {shown!r}; publish it to $SDV-FANOUT/data/{shown} first")
        self._remember(data_id, found, since)
        return found

    def _remember(self, data_id: str, data: bytes, since: float) -> None:
        self._forget(data_id)
        self._cache[data_id] = data, since
        self._cached_bytes += len(data)
        while self._cache and (len(self._cache) > MAX_CACHED or self._cached_bytes > CACHED_BYTES):
            self._forget(next(iter(self._cache)))

    def _forget(self, data_id: str) -> None:
        old = self._cache.pop(data_id, None)
        self._cached_bytes -= len(old[0]) if old is not None else 0


def _digest_of(value: bytes) -> bytes:
    try:
        return decode_data(value).digest
    except RecordError:
        return b""
