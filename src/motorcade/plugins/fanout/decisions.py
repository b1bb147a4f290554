"""Decisions about requests: paused, active again, called off. With several nodes they hold on all of them.

    decide ─▶ record, expected to be the one that was read ─┬─▶ in force here
                                                            └─▶ note ─▶ in force on all members, in the order of notes

Rule 1: a decision is made from the stored one, of whichever member; so a cancellation outlasts a pause that came at
        the same time. With several members that is a condition of the write, else a lock.
Rule 2: `decide` returns when every member goes by it, or cannot acknowledge anything without it.
Rule 3: that there are priorities is told in the same way, before the first entry with one is stored. With several
        members that holds until none of the stored ones has been alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from motorcade.core.record import RecordError
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.inflight import ACTIVE, InflightTable
from motorcade.plugins.fanout.record import RequestRecord, decode_request, encode
from motorcade.plugins.fanout.tables import PRIORITISED, REQUESTS, STATE, UNSWEPT
from motorcade.storage.ports import Batch, Store, StoreConflictError, StoreError

CODE: Final = "f"  #: of the notes


class _Decided(msgspec.Struct, array_like=True):
    request_id: str  #: empty: there are priorities
    record: RequestRecord | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Decided).decode

Make = Callable[[RequestRecord], RequestRecord | None]  #: the next record of the one that is stored; None: leave it


class RequestDecisions:
    """The decisions of operators, in `InflightTable.requests`, and the store."""

    def __init__(self, context: Context, table: InflightTable, changed: Callable[[RequestRecord], None]) -> None:
        """`changed`: called when a decision is in force here."""
        self._context = context
        self._cluster = context.cluster
        self._store: Store = context.store
        self._now = context.hub.now
        self._table = table
        self._changed = changed

    async def load(self) -> None:
        """Read all decisions."""
        async for request_id, value in self._store.records.scan(REQUESTS, self._now()):
            try:
                self._table.requests[request_id] = decode_request(value)
            except RecordError as error:
                self._context.log.warning("fanout_request_unreadable", request_id=request_id, error=str(error))
        self._table.prioritised = await self._has_priorities()

    def follow(self) -> None:
        """Go by what other members decide."""
        if self._cluster is not None:
            self._context.at_end(self._cluster.on_note(CODE, self._on_note, self._reload))

    async def _has_priorities(self) -> bool:
        return await self._store.records.get(STATE, PRIORITISED, self._now()) is not None

    # -- decisions

    async def decide(self, request_id: str, make: Make) -> None:
        """Replace the decision about a request. `StoreError`."""
        async with self._table.deciding:
            while True:
                try:
                    await self._decide(request_id, make)
                except StoreConflictError:
                    continue  # another member was quicker: from its decision
                return

    async def _decide(self, request_id: str, make: Make) -> None:
        cluster, now, table = self._cluster, self._now(), self._table
        value: bytes | None = None
        before = table.requests.get(request_id, ACTIVE)
        if cluster is not None:
            value = await self._store.records.get(REQUESTS, request_id, now)
            try:
                before = decode_request(value) if value is not None else ACTIVE
            except RecordError as error:
                raise StoreError(f"the record of request {request_id!r} cannot be read: {error}") from error
        record = make(before)
        if record is None:
            return
        # Nothing that is pending now lives longer; but what is paused stays so, whatever is issued under its id.
        until = 0.0 if record.state == "paused" else now + table.config.data_retention
        batch = Batch()
        if record.state == "cancelled":
            batch.put(STATE, UNSWEPT, encode(record.since))  # first: where batches are not atomic it must be there
        if cluster is None:
            batch.put(REQUESTS, request_id, encode(record), until)
        else:
            if batch.steps:
                await self._store.write(batch)
                batch = Batch()
            batch.put(REQUESTS, request_id, encode(record), until, expect=value, now=now)
            batch.note(request_id, CODE.encode() + _encode(_Decided(request_id, record)))
        try:
            written = await self._store.write(batch)
        finally:
            table.cancels += record.state == "cancelled"  # also if it may be stored
        if cluster is None:
            self._apply(request_id, record)
            return
        feed = self._store.feeds.feed_of(request_id)
        await cluster.reached(feed, written.notes[-1])
        await cluster.synced(feed, written.notes[-1])

    async def prioritise(self) -> None:
        """Note that the oldest message of a vehicle is not always the next (rule 3)."""
        self._table.priorities += 1
        if self._table.prioritised:
            return
        self._table.prioritised = True
        batch = Batch()
        batch.put(STATE, PRIORITISED, b"1")
        if self._cluster is not None:
            batch.note(PRIORITISED, CODE.encode() + _encode(_Decided("")))
        try:
            written = await self._store.write(batch)
        except StoreError:
            self._table.prioritised = False  # the next one tries again; this one is refused
            raise
        if self._cluster is not None:
            await self._cluster.synced(self._store.feeds.feed_of(PRIORITISED), written.notes[-1])

    # -- of other members

    def _apply(self, request_id: str, record: RequestRecord) -> None:
        self._table.requests[request_id] = record
        self._changed(record)

    def _on_note(self, _feed: int, _number: int, data: bytes) -> None:
        decided = _decode(data)
        if decided.record is None:
            self._table.prioritised = True
        else:
            self._apply(decided.request_id, decided.record)

    async def _reload(self, feed: int) -> None:
        """Notes are missing: read all decisions of a cell."""
        found = {}
        async for request_id, value in self._store.records.scan(REQUESTS, self._now(), feed=feed):
            try:
                found[request_id] = decode_request(value)
            except RecordError as error:
                self._context.log.warning("fanout_request_unreadable", request_id=request_id, error=str(error))
        requests, feed_of = self._table.requests, self._store.feeds.feed_of
        for request_id in [name for name in requests if name not in found and feed_of(name) == feed]:
            del requests[request_id]
        for request_id, record in found.items():
            if requests.get(request_id) != record:
                self._apply(request_id, record)
        if feed == feed_of(PRIORITISED) and await self._has_priorities():
            self._table.prioritised = True
