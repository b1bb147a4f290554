"""The batches that may be sent: their `accepted` receipts are stored.

A node by itself knows the batches whose receipts are under way (`InflightTable.storing`). Of several members each knows
its own batches, and those that it has had a hint of. For an entry of another one it looks for the intent, which is
there as long as receipts may be missing.

Rule 1: an entry whose batch has an intent holds up what is behind it, so that the order is that of the mailbox.
Rule 2: if the intent is gone, the entries are read again: what has gone with it must not be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from motorcade.core.record import RecordError
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.inflight import InflightTable
from motorcade.plugins.fanout.members import FanoutMembers
from motorcade.plugins.fanout.record import decode_entry, decode_intent
from motorcade.plugins.fanout.tables import INTENTS
from motorcade.plugins.fanout.triggers import Triggers
from motorcade.storage.ports import Entry, Store, StoreError

LOOK: Final = 0.5  #: seconds between two looks for an intent whose member is gone, or does not answer


class ToldBatches:
    """The batches that may be sent, as one member knows them."""

    def __init__(self, context: Context, members: FanoutMembers, table: InflightTable, triggers: Triggers) -> None:
        self._context = context
        self._store: Store = context.store
        self._now = context.hub.now
        self._members = members
        self._told = members.told
        self._table = table
        self._triggers = triggers
        self._waiting: dict[bytes, set[str]] = {}  # batches that are waited for: vehicles

    async def first_untold(self, vin: str, entries: Sequence[Entry]) -> int | None:
        """Return how many of these entries may be sent before one that may not; None: read them again (rule 2)."""
        learned = False
        for index, entry in enumerate(entries):
            try:
                batch = decode_entry(entry.body).batch
            except RecordError:
                continue
            if batch in self._table.storing:
                return None if learned else index  # it triggers by itself
            if batch in self._told:
                continue
            value = await self._store.records.get(INTENTS, batch.hex(), self._now())
            if value is not None:
                self._wait(vin, batch, value)
                return None if learned else index
            self._told.add(batch)
            learned = True
        return None if learned else len(entries)

    def _wait(self, vin: str, batch: bytes, intent: bytes) -> None:
        """Look at a vehicle again when a batch is over."""
        waiting = self._waiting.get(batch)
        if waiting is not None:
            waiting.add(vin)
            return
        self._waiting[batch] = {vin}
        self._context.spawn(self._until_over(batch, intent), "untold")

    async def _until_over(self, batch: bytes, intent: bytes) -> None:
        value: bytes | None = intent
        try:
            while value is not None:
                try:
                    await self._members.until_over(decode_intent(value).member, batch)
                except RecordError:
                    await asyncio.sleep(LOOK)
                try:
                    value = await self._store.records.get(INTENTS, batch.hex(), self._now())
                except StoreError:
                    await asyncio.sleep(LOOK)
                else:
                    if value is not None:
                        await asyncio.sleep(LOOK)  # its member is gone: the steward completes it
        finally:
            vins = self._waiting.pop(batch)
        for vin in vins:
            self._triggers.trigger(vin, "batch")
