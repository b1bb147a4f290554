"""What is due of sessions that are attached to no member: their end, their will, and clients of members that died.

    every second, for each cell this member is the steward of:
        due times  ──▶ claim the client as if it came ──▶ its session ends, or its will is published ──▶ put to sleep
        clients attached to a member that is fenced ──▶ the same

Rule 1: a client that is attached to a member that is alive is left alone: what is due of it has been put off by that.
Rule 2: two members may take themselves for the steward of a cell for a moment. A claim has a fence, so each thing is
        done by the one that has claimed the client.
Rule 3: at most `MAX_CLAIMS` clients are claimed at a time; clients that come back do not wait for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import structlog

from motorcade.broker.attachments import Attachments
from motorcade.clock import time
from motorcade.extension.cluster import Cluster
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import Store, StoreError

log = structlog.stdlib.get_logger("motorcade.steward")

INTERVAL: Final = 1.0  #: seconds between two looks
MAX_CLAIMS: Final = 256  #: clients that are claimed at the same time
PAGE: Final = 1000  #: due times of a cell read at once


class Steward:
    """What one member does for the cells it is the steward of."""

    def __init__(self, cluster: Cluster, store: Store, attachments: Attachments) -> None:
        self._cluster = cluster
        self._store = store
        self._attachments = attachments
        self._room = asyncio.Semaphore(MAX_CLAIMS)
        self._claims: set[asyncio.Task[None]] = set()
        self.adopted = 0  #: clients of members that died
        self.due = 0  #: sessions of which something was due

    async def run(self) -> None:
        """Look after the cells until cancelled."""
        while True:
            try:
                await self.look()
            except StoreError as error:
                log.warning("cells_not_looked_after", error=str(error))
            await asyncio.sleep(INTERVAL)

    async def look(self) -> None:
        """Look at all cells once."""
        for feed in range(self._cluster.feeds):
            if self._cluster.is_steward(feed):
                for member in self._cluster.fenced():
                    self.adopted += await self._claim_all(self._attached(member, feed))
                self.due += await self._claim_all(self._due(feed))
        while self._claims:
            await asyncio.wait(self._claims)

    async def _attached(self, member: str, feed: int) -> AsyncIterator[str]:
        async for home in self._store.coordination.attached(member, feed):
            yield home

    async def _due(self, feed: int) -> AsyncIterator[str]:
        for home, _ in await self._store.coordination.due(feed, time(), PAGE):
            yield home

    async def _claim_all(self, homes: AsyncIterator[str]) -> int:
        claimed = 0
        async for home in homes:
            if home.startswith(CLIENT) and not self._attachments.has(home[len(CLIENT) :]):
                await self._room.acquire()
                task = asyncio.create_task(self._claim(home[len(CLIENT) :]), name="steward.claim")
                self._claims.add(task)
                task.add_done_callback(self._claims.discard)
                claimed += 1
        return claimed

    async def _claim(self, client_id: str) -> None:
        try:
            await self._attachments.adopt(client_id)
        except StoreError as error:  # attached to a member that is alive; or the store is away: it stays due
            log.debug("client_not_adopted", client_id=client_id, error=str(error))
        finally:
            self._room.release()
