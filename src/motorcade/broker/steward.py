"""The steward of detached sessions: expiry, wills, and the sessions of members that died.

    after each takeover of a server of the store, on every member:
        clients attached here whose attachment is forgotten ──▶ they come again
    every second, for each cell this member is the steward of:
        due times  ──▶ claim the client as if it came ──▶ its session ends, or its will is published ──▶ put to sleep
        clients attached to a member that is fenced ──▶ put to sleep where they lie; if anything is due, the same

Rule 1: a client that is attached to a member that is alive is left alone: what is due of it has been put off by that.
Rule 2: two members may take themselves for the steward of a cell for a moment. A claim has a fence, so each thing is
        done by the one that has claimed the client.
Rule 3: at most `MAX_CLAIMS` clients are claimed at a time; clients that come back do not wait for the others.
Rule 4: a session whose member died is not loaded: its record is written as it is when its client is away, with the
        fence of its last attachment. Who claims it first has displaced that, and this write is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import structlog

from motorcade.broker import session_records as records
from motorcade.broker.attachments import Attachments
from motorcade.broker.session_records import SESSIONS
from motorcade.clock import time
from motorcade.extension.cluster import Cluster
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import SPARE_ALL, Batch, Fence, Store, StoreError, StoreFencedError

log = structlog.stdlib.get_logger("motorcade.steward")

INTERVAL: Final = 1.0  #: seconds between two looks
MAX_CLAIMS: Final = 256  #: clients that are claimed, or put to sleep, at the same time
PAGE: Final = 1000  #: due times of a cell read at once


class Steward:
    """Expires sessions and publishes wills in the cells that this member is the steward of."""

    def __init__(self, cluster: Cluster, store: Store, attachments: Attachments) -> None:
        self._cluster = cluster
        self._store = store
        self._attachments = attachments
        self._room = asyncio.Semaphore(MAX_CLAIMS)
        self._claims: set[asyncio.Task[None]] = set()
        self._takeovers = store.coordination.takeovers  # after which attachments were looked at

    async def run(self) -> None:
        """Look after the cells until cancelled."""
        while True:
            try:
                await self.look_at_own()
                await self.look()
            except StoreError as error:
                log.warning("cells_not_looked_after", error=str(error))
            await asyncio.sleep(INTERVAL)

    async def look_at_own(self) -> None:
        """Look whether the store still knows who is attached to this member, if it may have forgotten some."""
        takeovers = self._store.coordination.takeovers
        if takeovers == self._takeovers:
            return
        believed = self._attachments.fences()
        known: set[Fence] = set()
        for feed in range(self._cluster.feeds):
            known.update([fence async for fence in self._store.coordination.attached(self._cluster.me, feed)])
        for fence in believed:
            if fence not in known:
                self._attachments.forgotten(fence)
        self._takeovers = takeovers

    async def look(self) -> None:
        """Look at all cells once."""
        for feed in range(self._cluster.feeds):
            if self._cluster.is_steward(feed):
                for member in self._cluster.fenced():
                    await self._adopt_all(member, feed)
                due = await self._store.coordination.due(feed, time(), PAGE)
                await self._claim_all(home for home, _ in due)
        while self._claims:
            await asyncio.wait(self._claims)

    async def _adopt_all(self, member: str, feed: int) -> None:
        """Take care of the clients of a cell that are attached to a member that died."""
        found = [fence async for fence in self._store.coordination.attached(member, feed)]
        clients = [fence for fence in found if fence.home.startswith(CLIENT) and not self._is_here(fence.home)]
        for start in range(0, len(clients), MAX_CLAIMS):
            await self._put_to_sleep(clients[start : start + MAX_CLAIMS])

    def _is_here(self, home: str) -> bool:
        return self._attachments.has(home.removeprefix(CLIENT))

    async def _put_to_sleep(self, fences: Sequence[Fence]) -> None:
        """Write down that clients are away; claim those of which anything is due (rule 4)."""
        now = time()
        reading = (self._store.records.get(SESSIONS, fence.home.removeprefix(CLIENT), now) for fence in fences)
        stored = await asyncio.gather(*reading)
        due: list[str] = []
        writing = []
        for fence, value in zip(fences, stored, strict=True):
            batch = _sleeping(fence, value, now)
            if batch is None:
                due.append(fence.home)
            else:
                writing.append((fence.home, self._store.write(batch)))
        for home, commit in writing:
            try:
                await commit
            except StoreFencedError:
                log.debug("client_not_adopted", client_id=home.removeprefix(CLIENT), error="it has come back")
        await self._claim_all(due)

    async def _claim_all(self, homes: Iterable[str]) -> None:
        for home in homes:
            if home.startswith(CLIENT) and not self._is_here(home):
                await self._room.acquire()
                task = asyncio.create_task(self._claim(home.removeprefix(CLIENT)), name="steward.claim")
                self._claims.add(task)
                task.add_done_callback(self._claims.discard)

    async def _claim(self, client_id: str) -> None:
        try:
            await self._attachments.adopt(client_id)
        except StoreError as error:  # attached to a member that is alive; or the store is away: it stays due
            log.debug("client_not_adopted", client_id=client_id, error=str(error))
        finally:
            self._room.release()


def _sleeping(fence: Fence, value: bytes | None, now: float) -> Batch | None:
    """Return what puts a client to sleep whose member died; None if it has to be claimed: something of it is due."""
    batch = Batch()
    if value is not None:
        try:
            record = records.asleep(records.decode_session(value), now)
        except msgspec.MsgspecError:
            return None
        times = (record.expires_at, record.will.at if record.will is not None else None)
        due = min(at for at in times if at is not None)
        if due <= now:
            return None
        client_id = fence.home.removeprefix(CLIENT)
        batch.put(SESSIONS, client_id, records.encode(record))
        batch.spare(records.owner_of(client_id), SPARE_ALL)
        batch.due(fence.home, due)
    batch.detach(fence)
    return batch
