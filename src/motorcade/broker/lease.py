"""The lease of the node that serves the sessions of a store which several nodes can reach.

Every node would hold all sessions in memory, so two must not serve at once. A node that cannot renew its lease stores
nothing new from the moment it may have run out: batches of the session writer go through `write`, only the removal of
sessions that have ended does not. It goes on when it has the lease again, and stops if another node has it,
or if its store was fenced: that takes no write any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from motorcade.clock import time
from motorcade.commit import Commit
from motorcade.storage.ports import Batch, Lease, Store, StoreError, StoreFencedError, StoreRefusedError, Written
from motorcade.tasks import Tasks

log = structlog.stdlib.get_logger("motorcade.sessions")

LEASE = "sessions"
TTL = 3.0  #: seconds after which a node that died is forgotten
OTHER_NODE = "another node serves the sessions of this store; stop it, or give this node a store of its own"
FENCED_NODE = "the store of this node was fenced: another one has taken its right to write; start this node again"


class SessionLease:
    """The right to serve the sessions of a store. On one that no other node can reach it is never begun, and lasts."""

    def __init__(self, store: Store, supervisor: Tasks | None = None) -> None:
        self._supervisor = supervisor or Tasks()
        self.store = store
        self._node = ""
        self._lease: Lease | None = None
        self._until: float | None = None  # of the loop's time; None: forever
        self._task: asyncio.Task[None] | None = None

    def write(self, batch: Batch) -> Commit[Written]:
        """Write a batch, if this node may."""
        if self._until is not None:
            try:
                self.check()
            except StoreRefusedError as error:
                return Commit.failed(error)
        return self.store.write(batch)

    async def begin(self, node: str, lost: Callable[[str], None]) -> None:
        """Take the lease, or raise `StoreError`; then hold it, and tell `lost` why if this node must stop."""
        loop = asyncio.get_running_loop()
        self._node, self._until = node, 0.0
        deadline = loop.time() + 2 * TTL
        while not await self._acquire():
            if loop.time() > deadline:
                raise StoreError(OTHER_NODE)
            log.info("waiting", reason="another node serves the sessions of this store, or has died just now")
            await asyncio.sleep(TTL / 4)
        self._task = self._supervisor.start(partial(self._hold, lost), "sessions.lead")

    def check(self) -> None:
        """Raise `StoreRefusedError` unless the lease is surely ours."""
        if self._until is not None and asyncio.get_running_loop().time() > self._until:
            raise StoreRefusedError("this node may not serve the sessions now: its lease has run out")

    async def end(self) -> None:
        """Give the lease back, so that the next node need not wait."""
        if self._task is not None:
            self._task.cancel()
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                async with asyncio.timeout(TTL):  # then it has run out by itself
                    await self.store.coordination.release(lease)
            except (StoreError, TimeoutError) as error:
                log.warning("lease_not_released", error=str(error) or "the store does not answer")

    async def _acquire(self) -> bool:
        began = asyncio.get_running_loop().time()
        self._lease = await self.store.coordination.acquire(LEASE, self._node, TTL, time())
        if self._lease is not None:
            self._until = began + TTL
        return self._lease is not None

    async def _hold(self, lost: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        while self._lease is not None:
            await asyncio.sleep(TTL / 6)
            began = loop.time()
            try:
                if await self.store.coordination.renew(self._lease, TTL, time()):
                    self._until = began + TTL
                elif await self._acquire():  # it ran out while the store was away, and no other node has taken it
                    log.warning("lease_taken_again", reason="the store was away")
                else:
                    log.error("lease_lost", consequence="this node stops")
                    lost(OTHER_NODE)
            except StoreFencedError:
                log.error("store_fenced", consequence="this node stops")  # noqa: TRY400
                lost(FENCED_NODE)
                return
            except StoreError as error:
                if self._until is not None and loop.time() > self._until:
                    log.warning("lease_not_renewed", error=str(error))
