"""The steward of detached sessions: expiry, wills, and the sessions of members that died.

    after each takeover of a server of the store, on every member:
        clients attached here whose attachment, or mailbox, is forgotten ──▶ they come again
    every second, for each cell this member is the steward of:
        due times  ──▶ claim the client as if it came ──▶ its session ends, or its will is published ──▶ put to sleep
        clients attached to a member that is fenced ──▶ put to sleep where they lie; if anything is due, the same

Rule 1: a client that is attached to a member that is alive is left alone: what is due of it has been put off by that.
Rule 2: two members may take themselves for the steward of a cell for a moment. A claim has a fence, so each thing is
        done by the one that has claimed the client.
Rule 3: at most `MAX_CLAIMS` clients are claimed at a time; clients that come back do not wait for the others.
Rule 4: a session whose member died is not loaded: its record is written as it is when its client is away, with the
        fence of its last attachment. Who claims it first has displaced that, and this write is refused. Some go
        together; if any of these has been claimed they are written one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

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
MAX_CLAIMS: Final = 256  #: clients that are claimed at the same time
MAX_PUT: Final = 256  #: clients that are put to sleep at the same time
TOGETHER: Final = 64  #: of these, in one write; and mailboxes that are looked at together
AT_ONCE: Final = 4  #: cells that are looked at together, so that the store has work while this member has
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
        await self._look_at_mailboxes([fence for fence in believed if fence in known])
        self._takeovers = takeovers

    async def _look_at_mailboxes(self, fences: Sequence[Fence]) -> None:
        """Look whether the store still has the mailboxes of clients that are attached to this member."""
        lasting = [fence for fence in fences if self._attachments.generation(fence)]
        for start in range(0, len(lasting), TOGETHER):
            some = lasting[start : start + TOGETHER]
            owners = (records.owner_of(fence.home.removeprefix(CLIENT)) for fence in some)
            found = await asyncio.gather(*map(self._store.mailboxes.info, owners))
            for fence, info in zip(some, found, strict=True):
                if self._attachments.generation(fence) not in (0, info.generation):
                    self._attachments.forgotten(fence)

    async def look(self) -> None:
        """Look at all cells once, some at a time."""
        own = [feed for feed in range(self._cluster.feeds) if self._cluster.is_steward(feed)]
        for start in range(0, len(own), AT_ONCE):
            looks = map(self._look_at, own[start : start + AT_ONCE])
            failed = [one for one in await asyncio.gather(*looks, return_exceptions=True) if one is not None]
            if failed:
                raise failed[0]
        while self._claims:
            await asyncio.wait(self._claims)

    async def _look_at(self, feed: int) -> None:
        for member in self._cluster.fenced():
            await self._adopt_all(member, feed)
        due = await self._store.coordination.due(feed, time(), PAGE)
        await self._claim_all(home for home, _ in due)

    async def _adopt_all(self, member: str, feed: int) -> None:
        """Take care of the clients of a cell that are attached to a member that died."""
        found = [fence async for fence in self._store.coordination.attached(member, feed)]
        clients = [fence for fence in found if fence.home.startswith(CLIENT) and not self._is_here(fence.home)]
        for start in range(0, len(clients), MAX_PUT):
            await self._put_to_sleep(clients[start : start + MAX_PUT])

    def _is_here(self, home: str) -> bool:
        return self._attachments.has(home.removeprefix(CLIENT))

    async def _put_to_sleep(self, fences: Sequence[Fence]) -> None:
        """Write down that clients are away; claim those of which anything is due (rule 4)."""
        now = time()
        names = [fence.home.removeprefix(CLIENT) for fence in fences]
        stored = await self._store.records.get_many(SESSIONS, names, now)
        due: list[str] = []
        sleepers: list[Sleeper] = []
        for fence, value in zip(fences, stored, strict=True):
            sleeper = _sleeper(fence, value, now)
            if sleeper is None:
                due.append(fence.home)
            else:
                sleepers.append(sleeper)
        refused = await self._write([sleepers[at : at + TOGETHER] for at in range(0, len(sleepers), TOGETHER)])
        for sleeper in await self._write([[sleeper] for sleeper in refused]):
            client_id = sleeper.fence.home.removeprefix(CLIENT)
            log.debug("client_not_adopted", client_id=client_id, error="it has come back")
        await self._claim_all(due)

    async def _write(self, groups: Sequence[Sequence[Sleeper]]) -> list[Sleeper]:
        """Write groups of sleepers; return those of groups of which one was claimed meanwhile."""
        writing = [(group, self._store.write(_together(group))) for group in groups]
        refused: list[Sleeper] = []
        for group, commit in writing:
            try:
                await commit
            except StoreFencedError:
                refused += group
        return refused

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


class Sleeper(NamedTuple):
    """A client whose member died."""

    fence: Fence
    record: bytes  #: of its session; empty: it has none
    due: float


def _sleeper(fence: Fence, value: bytes | None, now: float) -> Sleeper | None:
    """Return what becomes of a client whose member died; None if it has to be claimed: something of it is due."""
    if value is None:
        return Sleeper(fence, b"", 0.0)
    try:
        record = records.asleep(records.decode_session(value), now)
    except msgspec.MsgspecError:
        return None
    times = (record.expires_at, record.will.at if record.will is not None else None)
    due = min(at for at in times if at is not None)
    return Sleeper(fence, records.encode(record), due) if due > now else None


def _together(sleepers: Sequence[Sleeper]) -> Batch:
    """Return what puts clients to sleep."""
    batch = Batch()
    for fence, record, due in sleepers:
        if record:
            client_id = fence.home.removeprefix(CLIENT)
            batch.put(SESSIONS, client_id, record)
            batch.spare(records.owner_of(client_id), SPARE_ALL)
            batch.due(fence.home, due)
        batch.detach(fence)
    return batch
