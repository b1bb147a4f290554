"""The records of members in the store: one is reserved, renewed, condemned, fenced, removed.

    cluster/shared   ClusterRecord: name and id of the cluster, the number given last
    member/ID        MemberRecord of each member that is alive, or whose clients are being taken care of

Every write expects what was read before (`Batch.put(expect=…)`), so of two members that change a record one does, and a
member that was condemned meets that with its next renewal.
"""

from __future__ import annotations

import secrets
from typing import Final

import msgspec
import structlog

from motorcade.clock import time
from motorcade.cluster.membership import ALIVE, ClusterRecord, MemberRecord
from motorcade.extension.cluster import MemberState
from motorcade.storage.homes import MEMBERS
from motorcade.storage.ports import Batch, Store, StoreConflictError

log = structlog.stdlib.get_logger("motorcade.cluster")

COLLECTION: Final = "member"
CLUSTER: Final = "cluster"
SHARED: Final = "shared"  #: key of the one record of `CLUSTER`

_encode = msgspec.msgpack.Encoder().encode
_decode_member = msgspec.msgpack.Decoder(MemberRecord).decode
_decode_cluster = msgspec.msgpack.Decoder(ClusterRecord).decode


class Roster:
    """The records of all members in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._values: dict[str, bytes] = {}  # of others, as they were read last
        self._own = ""

    async def shared(self) -> ClusterRecord | None:
        """Return what all members share; None if no node was ever a member here."""
        value = (await self._store.records.of_home(CLUSTER, MEMBERS, time())).get(SHARED)
        return None if value is None else _decode_cluster(value)

    async def enter(self, me: MemberRecord, cluster: str) -> tuple[MemberRecord, ClusterRecord]:
        """Add a new member, with the next number; `cluster` becomes the name of all of them.

        In one batch: who has a higher number finds this record when it reads after its own.
        """
        while True:
            value = (await self._store.records.of_home(CLUSTER, MEMBERS, time())).get(SHARED)
            before = _decode_cluster(value) if value is not None else ClusterRecord(name="", store=secrets.token_hex(8))
            shared = msgspec.structs.replace(before, name=cluster, last=before.last + 1)
            record = msgspec.structs.replace(me, number=shared.last)
            batch = Batch()
            batch.put(CLUSTER, SHARED, _encode(shared), expect=value, now=time())
            batch.put(COLLECTION, record.id, _encode(record))
            try:
                await self._store.write(batch)
            except StoreConflictError:
                continue  # another node starts too
            self._own = record.id
            return record, shared

    async def read(self) -> list[MemberRecord]:
        """Return the records of all members."""
        values = await self._store.records.of_home(COLLECTION, MEMBERS, time())
        records: list[MemberRecord] = []
        known: dict[str, bytes] = {}
        for key, value in values.items():
            try:
                record = _decode_member(value)
            except msgspec.MsgspecError as error:
                log.error("member_unreadable", member=key, error=str(error))  # noqa: TRY400 - it says what and where
                continue
            if record.id != self._own:
                known[record.id] = value
            records.append(record)
        self._values = known
        return records

    async def renew(self, before: MemberRecord, after: MemberRecord) -> MemberRecord | None:
        """Write the next record of this member itself. Return what is stored instead if another one has changed it.

        A fail-over of the store may have forgotten the last renewals; that is no change.
        """
        expected = _encode(before)
        while True:
            batch = Batch()
            batch.put(COLLECTION, before.id, _encode(after), expect=expected, now=time())
            try:
                await self._store.write(batch)
            except StoreConflictError:
                value = (await self._store.records.of_home(COLLECTION, MEMBERS, time())).get(before.id)
                stored = _decode_member(value) if value is not None else None
                if stored is None or value is None:
                    return msgspec.structs.replace(before, state=MemberState.FENCED, by="")
                if stored.token != before.token or stored.state not in ALIVE:
                    return stored
                log.warning("member_renewal_forgotten", stored=stored.beat, written=before.beat)
                expected = value
            else:
                return None

    async def replace(self, before: MemberRecord, after: MemberRecord) -> bool:
        """Write the record of another member; False if that before it is no longer stored."""
        value = _encode(after)
        batch = Batch()
        batch.put(COLLECTION, before.id, value, expect=self._value(before), now=time())
        try:
            await self._store.write(batch)
        except StoreConflictError:
            return False
        self._values[before.id] = value
        return True

    async def remove(self, record: MemberRecord) -> bool:
        """Remove the record of a member that has left, or of which nothing is left; False as for `replace`."""
        batch = Batch()
        batch.put(COLLECTION, record.id, b"", expect=self._value(record), now=time())
        batch.delete(COLLECTION, record.id)
        try:
            await self._store.write(batch)
        except StoreConflictError:
            return False
        self._values.pop(record.id, None)
        return True

    def _value(self, record: MemberRecord) -> bytes:
        """Return what is stored of a member: of others as it was read, since their version may write it otherwise."""
        return self._values.get(record.id) or _encode(record)

    async def fence(self, record: MemberRecord, by: str) -> bool:
        """Take the right to write from a member that is dead; True if it was this call that has finished it."""
        condemned = record
        if record.state is not MemberState.CONDEMNED:
            condemned = msgspec.structs.replace(record, state=MemberState.CONDEMNED, by=by)
            if not await self.replace(record, condemned):
                return False
        await self._store.coordination.fence_member(record.writer)
        return await self.replace(condemned, msgspec.structs.replace(condemned, state=MemberState.FENCED))
