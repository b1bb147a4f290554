"""The rest of members that are gone: batches, and ends of deliveries, that are not told.

    a member goes, a cell becomes this member's, something could not be done, `NET` is over
        ──▶ batches of requests whose cell is this member's: completed (`recovery`)
        ──▶ untold receipts of these cells: told (`outbox`)

Rule 1: two members may take themselves for the steward of a cell for a moment. What is done is claimed first, in the
        record itself.
Rule 2: a member counts as gone when it is fenced in all cells, or has left: then nothing that it still sends is stored.
"""

from __future__ import annotations

import asyncio
from typing import Final

from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.members import FanoutMembers
from motorcade.plugins.fanout.outbox import Outbox
from motorcade.plugins.fanout.recovery import Recovery
from motorcade.storage.ports import Store, StoreError

INTERVAL: Final = 0.5  #: seconds between two looks whether members have gone
NET: Final = 60.0  #: seconds between two looks at the store without a reason


class FanoutSteward:
    """The work of one member for the cells it is the steward of."""

    def __init__(self, context: Context, members: FanoutMembers, recovery: Recovery, outbox: Outbox) -> None:
        self._context = context
        self._cluster = members.cluster
        self._store: Store = context.store
        self._recovery = recovery
        self._outbox = outbox

    def is_ours(self, request_id: str) -> bool:
        """Return True if the batches of a request are completed here."""
        return self._cluster.is_steward(self._store.feeds.feed_of(request_id))

    async def run(self) -> None:
        """Look after the cells until cancelled."""
        seen: object = None
        looked_at = 0.0
        loop = asyncio.get_running_loop()
        while True:
            cells = [feed for feed in range(self._cluster.feeds) if self._cluster.is_steward(feed)]
            state = (cells, [peer.id for peer in self._cluster.peers])
            if cells and (state != seen or loop.time() >= looked_at + NET):
                seen, looked_at = state, loop.time()
                try:
                    await self._look(cells)
                except StoreError as error:
                    self._context.log.info("fanout_left_not_told", error=str(error))
                    seen = None
            await asyncio.sleep(INTERVAL)

    async def _look(self, cells: list[int]) -> None:
        for feed in cells:
            told = await self._outbox.tell_left(feed)
            if told:
                self._context.counters["receipts_told_for_others"] += told
                self._context.log.info("fanout_ends_told", cell=feed, receipts=told)
        await self._recovery.complete_left(self.is_ours)
