"""Deduplication of batches with a `batch_id`: however often such a batch is sent, each vehicle is addressed once.

    first time   entries + intent ──commit──▶ receipts + record ──commit──▶ PUBACK
    again        record ──▶ PUBACK with the figures of the first time and `repeated`; nothing is stored, nothing sent

A record (`fanout-batch`) is written with the receipts, not with the entries: until then the intent, which is stored
with the entries, carries the id, and `recovery` makes the record of what it finds.

Rule 1: one batch of a name (request and batch id) is under way at a time. A second one waits for it in the line, and
        all that came behind it wait, too: so the order of batches is kept if the first fails and the second is stored.
        Of several members, each claims the name in the store first (`fanout-claim`); one that finds it claimed waits
        until the batch is over at the member that has claimed it. If that is gone, the batch is completed first.
Rule 2: where a commit is not atomic, a batch may be stored for some of its vehicles only. Then the record names the
        others (`missing`), and a batch that is sent again goes to these.
Rule 3: a vehicle for which a later batch of the same request waits already, in mode `replace`, is not `missing` but
        `superseded`: if it got the earlier one now, it would keep the wrong one, since the later one, sent again,
        stores nothing. So the times of such batches differ (`moment`).
Rule 4: the vehicles and the data are what is compared, not when they expire and how urgent they are: a platform may
        have less time left when it sends a batch again. Data that is named counts by its name: it may be gone by then.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from motorcade.core.reasons import ReasonCode
from motorcade.core.record import RecordError
from motorcade.core.vin import LENGTH
from motorcade.plugins.fanout.batch import FanoutBatch
from motorcade.plugins.fanout.inflight import InflightTable
from motorcade.plugins.fanout.members import FanoutMembers
from motorcade.plugins.fanout.pending_batch import PendingBatch
from motorcade.plugins.fanout.record import (
    BatchRecord,
    ClaimRecord,
    IntentRecord,
    Named,
    decode_batch,
    decode_claim,
    encode,
)
from motorcade.plugins.fanout.tables import BATCHES, CLAIMS, INTENTS, name_of
from motorcade.storage.ports import Batch, Records, Store, StoreConflictError, StoreError

_SHOWN: Final = 40  # characters of an id in a refusal
RETRY: Final = 0.5  #: seconds between two looks for the intent of a member that is gone
_DIGEST: Final = 16  # bytes


class BatchDedup:
    """The batches with an id that are under way, and how many are remembered."""

    def __init__(
        self,
        store: Store,
        table: InflightTable,
        now: Callable[[], float],
        counters: Counter[str],
        members: FanoutMembers | None,
    ) -> None:
        self.count = 0  #: of records in the store, about
        self._store = store
        self._records = store.records
        self._members = members
        self._table = table
        self._now = now
        self._counters = counters
        self._under_way: dict[str, PendingBatch] = {}  # by name (rule 1)
        self._last = 0.0

    def moment(self) -> float:
        """Return the time of a batch; later than that of every one before (rule 3)."""
        self._last = max(self._now(), math.nextafter(self._last, math.inf))
        return self._last

    async def admit(self, batch: PendingBatch, named: Named) -> bool:
        """Return True if something of a batch is to be stored; if not, its result says what to answer."""
        name = name_of(batch.parsed.request_id, named.batch_id)
        twin = self._under_way.get(name)
        if twin is not None:
            await twin.over
        while True:
            known = await find(self._records, name, batch.now, self._table.config.data_retention)
            if not self._is_wanted(batch, named, known):
                return False
            if self._members is None or await self._claim(batch, name, known, self._members):
                break
        if known is not None:
            self._counters["batches_completed"] += 1
            batch.known = known
            batch.parsed = msgspec.structs.replace(batch.parsed, vins=vins_of(known.missing))
        self._under_way[name] = batch
        return True

    def _is_wanted(self, batch: PendingBatch, named: Named, known: BatchRecord | None) -> bool:
        """Return True if something of a batch is to be stored, as far as is known of it."""
        most = self._table.config.max_batch_ids
        result = batch.result
        if known is None:
            if self.count + len(self._under_way) >= most:
                self._counters["batches_refused_ids"] += 1
                result.refuse(
                    f"{most} batch ids are remembered, more may not be (max_batch_ids); raise it, or send without one",
                    ReasonCode.QUOTA_EXCEEDED,
                )
                return False
        elif known.digest != named.digest:
            self._counters["batches_refused_other"] += 1
            shown = named.batch_id if len(named.batch_id) <= _SHOWN else f"{named.batch_id[:_SHOWN]}…"
            result.refuse(
                f"batch_id: {shown!r} was used in this request for other vehicles or other data; "
                "give each batch an id of its own"
            )
            return False
        elif not known.missing:
            result.repeat(known)
            return False
        return True

    async def _claim(self, batch: PendingBatch, name: str, known: BatchRecord | None, members: FanoutMembers) -> bool:
        """Claim the name of a batch (rule 1); False: its record may be another one now."""
        value = await self._records.get(CLAIMS, name, batch.now)
        try:
            claim = decode_claim(value) if value is not None else None
        except RecordError as error:
            raise StoreError(f"the claim of batch {name!r} cannot be read: {error}") from error
        if claim is not None:
            await members.until_over(claim.member, claim.batch)
            if claim.member != members.me and not members.is_alive(claim.member):
                await self._until_completed(claim.batch)
        steps = Batch()
        until = batch.now + self._table.config.data_retention
        mine = encode(ClaimRecord(members.me, batch.guid))
        steps.put(CLAIMS, name, mine, until, expect=value, now=batch.now)
        try:
            await self._store.write(steps)
        except StoreConflictError:
            return False
        # It may have been claimed, stored and let go since its record was read.
        return known == await find(self._records, name, batch.now, self._table.config.data_retention)

    async def _until_completed(self, guid: bytes) -> None:
        """Wait until the steward has completed a batch whose member is gone."""
        while True:
            if await self._records.get(INTENTS, guid.hex(), self._now()) is None:
                return
            await asyncio.sleep(RETRY)

    def over(self, batch: PendingBatch, named: Named) -> None:
        """Let the next one of its name come."""
        name = name_of(batch.parsed.request_id, named.batch_id)
        if self._under_way.get(name) is batch:
            del self._under_way[name]

    def keep(self, also: Batch, batch: PendingBatch, named: Named) -> None:
        """Write down with the receipts of a batch that all of it is stored."""
        result = batch.result
        record = BatchRecord(
            batch.guid,
            named.digest,
            batch.now,
            result.accepted,
            result.duplicates,
            result.replaced,
            result.rejected,
            result.superseded,
        )
        name = name_of(batch.parsed.request_id, named.batch_id)
        put(also, name, record, self._table.config.data_retention)
        if self._members is not None:
            also.delete(CLAIMS, name)


def named_of(batch: FanoutBatch) -> Named | None:
    """Return what is to be known of a batch with an id until it is stored (rule 4)."""
    if not batch.batch_id:
        return None
    digest = hashlib.blake2b("".join(sorted(batch.vins)).encode(), digest_size=_DIGEST)
    digest.update(b"@" + batch.data_id.encode() if batch.data is None else b"=" + batch.data)
    return Named(batch.batch_id, digest.digest(), batch.mode == "append", batch.duplicates)


def vins_of(text: str) -> tuple[str, ...]:
    """Return VINs that stand one after the other."""
    return tuple(text[at : at + LENGTH] for at in range(0, len(text), LENGTH))


async def find(records: Records, name: str, came: float, retention: float) -> BatchRecord | None:
    """Return what was remembered of a batch when it came, which may be long ago if the store is slow."""
    value = await records.get(BATCHES, name, came)
    try:
        known = decode_batch(value) if value is not None else None
    except RecordError as error:
        raise StoreError(f"batch {name!r} cannot be read: {error}") from error
    return known if known is not None and came < known.time + retention else None  # the option may have been lowered


def put(also: Batch, name: str, record: BatchRecord, retention: float) -> None:
    """Write a record with a batch of the store."""
    also.put(BATCHES, name, encode(record), record.time + retention)


def recovered(
    batch: bytes,
    intent: IntentRecord,
    named: Named,
    known: BatchRecord | None,
    ours: int,
    replaced: int,
    missing: Sequence[str],
) -> BatchRecord | None:
    """Return what to remember of a batch that may be stored in part; None: nothing that is not known (rule 2).

    `ours`: vehicles that have it. Those of the intent that have it not and are not `missing` are superseded (rule 3).
    """
    count = len(intent.vins) // LENGTH
    if len(missing) == count or (known is not None and known.batch == batch):
        return None
    before = known or BatchRecord(b"", named.digest, 0.0, 0, named.duplicates, 0)
    return BatchRecord(
        batch,
        named.digest,
        intent.time,
        before.accepted + ours,
        named.duplicates,
        before.replaced + replaced,
        before.rejected,
        before.superseded + count - ours - len(missing),
        "".join(missing),
    )
