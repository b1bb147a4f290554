"""After a crash: receipts that were not written for batches that were stored.

An append removes what a batch replaces, and only its answer tells which entries those were; so their receipts, and the
`accepted` ones of the new entries, come in a second batch. If the process dies in between, an intent is left
(`intake`, rule 3). What is missing can be told from the receipts of the request and what its vehicles have pending:

    entry of the request without any receipt                        ->  accepted
    delivery of the request that is not final, and has no entry     ->  replaced: nothing else removes an entry without
                                                                        writing its receipt with it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from motorcade.core.receipt import FINAL, Receipt, State, delivery_id
from motorcade.core.vin import LENGTH
from motorcade.extension.declared import UnknownError
from motorcade.plugins.fanout.queries import Queries
from motorcade.plugins.fanout.receipts import Receipts
from motorcade.plugins.fanout.record import IntentRecord, RecordError, decode_entry, decode_intent
from motorcade.plugins.fanout.tables import INTENTS, owner_of
from motorcade.plugins.fanout.views import TargetView
from motorcade.storage.ports import Store

PAGE: Final = 500  #: deliveries, or entries, read at once


class Recovery:
    """Completes what the process before has begun."""

    def __init__(
        self,
        store: Store,
        queries: Queries,
        receipts: Receipts,
        node: str,
        now: Callable[[], float],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._store = store
        self._queries = queries
        self._receipts = receipts
        self._node = node
        self._now = now
        self._log = log

    async def run(self) -> int:
        """Write what is missing; how many batches were incomplete. Nobody may take batches meanwhile."""
        found = [item async for item in self._store.records.scan(INTENTS, self._now())]
        for key, value in found:
            try:
                intent = decode_intent(value)
            except RecordError as error:
                self._log.warning("fanout_intent_unreadable", key=key, error=str(error))
                await self._store.records.delete(INTENTS, key)
                continue
            await self._complete(key, intent)
        if found:
            self._log.info("fanout_batches_completed", batches=len(found))
        return len(found)

    async def _complete(self, key: str, intent: IntentRecord) -> None:
        known = await self._deliveries(intent.request_id)
        missing: list[Receipt] = []
        vins = [intent.vins[at : at + LENGTH] for at in range(0, len(intent.vins), LENGTH)]
        for number, vin in enumerate(vins):
            pending = await self._pending(vin, intent.request_id)
            told = known.get(vin, {})
            missing += [
                self._receipt(intent, vin, position, State.ACCEPTED)
                for position in sorted(pending)
                if delivery_id(vin, position) not in told
            ]
            missing += [
                self._receipt(intent, vin, _position(name), State.REPLACED, "reissued", view.attempt)
                for name, view in told.items()
                if view.state not in FINAL and _position(name) not in pending
            ]
            if number % PAGE == PAGE - 1:
                await asyncio.sleep(0)
        values = self._receipts.values(missing)
        batch = self._store.batch()
        self._receipts.stage(batch, values, self._now())
        batch.delete(INTENTS, key)
        await batch.commit()
        self._receipts.written(missing, values)

    async def _deliveries(self, request_id: str) -> dict[str, dict[str, TargetView]]:
        """VIN -> delivery id -> its last receipt."""
        found: dict[str, dict[str, TargetView]] = {}
        after = ""
        while True:
            try:
                page = await self._queries.targets(request_id, None, after, PAGE)
            except UnknownError:
                return found
            for view in page:
                after = view.delivery_id
                found.setdefault(view.vin, {})[view.delivery_id] = view
            if len(page) < PAGE:
                return found

    async def _pending(self, vin: str, request_id: str) -> set[int]:
        """Positions of what waits for a vehicle, of one request."""
        found: set[int] = set()
        after = 0
        while True:
            entries = await self._store.mailboxes.read(owner_of(vin), after, PAGE, self._now())
            for entry in entries:
                after = entry.position
                try:
                    record = decode_entry(entry.body)
                except RecordError:
                    continue
                if record.request_id == request_id:
                    found.add(entry.position)
            if len(entries) < PAGE:
                return found

    def _receipt(
        self, intent: IntentRecord, vin: str, position: int, state: State, reason: str = "", attempt: int = 0
    ) -> Receipt:
        return Receipt(
            state=state,
            vin=vin,
            request_id=intent.request_id,
            delivery_id=delivery_id(vin, position),
            time=self._now(),
            node=self._node,
            attempt=attempt,
            reason=reason,
        )


def _position(name: str) -> int:
    return int(name.rpartition(".")[2])
