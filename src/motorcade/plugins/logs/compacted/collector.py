"""Removal of what is too old: messages beyond the retention, and queues without use.

A collection looks at every queue, at its oldest messages first, and goes on with the next queue when it meets a page
without old ones. It works in steps of `gc_step` messages (a queue counts as one more), with a pause in between, and
begins again `gc_interval` after it has ended. Nothing depends on it: consumers are never given what is too old.

A queue that is empty is forgotten with all progress when it was not used for `idle` seconds. Its numbers go on if it
is used again, for the store does not forget where they were. What is in memory of a queue goes with it, and in any case
when two collections in a row find it idle: names are chosen by clients, and must not add up.

Of several members each collects in the cells that it is steward of, and all of them count all queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from motorcade.extension.cluster import Cluster
from motorcade.extension.compacted import CompactedKind
from motorcade.plugins.logs.compacted.queue import CompactedQueue
from motorcade.plugins.logs.compacted.source import Tools
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, QUEUES, SHARED, decode_queue
from motorcade.storage.ports import Batch, Entry, StoreError

PAUSE: Final = 0.01  #: seconds between two steps
FIRST: Final = 60.0  #: seconds after the start until the first collection, at most
COUNTING: Final = 1000  #: queues counted before others have their turn
COUNT_AGAIN: Final = 5.0  #: seconds until that is tried again


class Collector:
    """Collects in all compacted queues of a node."""

    def __init__(self, tools: Tools, cluster: Cluster | None = None) -> None:
        self._tools = tools
        self._cluster = cluster
        self._budget = 0
        self._now_ = asyncio.Event()

    def hurry(self) -> None:
        """Collect soon: options have changed."""
        self._now_.set()

    async def run(self) -> None:
        """Collect again and again, until cancelled."""
        pause = min(FIRST, self._tools.config.gc_interval)
        while True:
            try:
                await asyncio.wait_for(self._now_.wait(), pause)
            except TimeoutError:
                pass
            self._now_.clear()
            try:
                removed = await self.collect()
            except StoreError as error:
                self._tools.counters["gc_failed"] += 1
                self._tools.log.warning("ecq_not_collected", error=str(error))
            else:
                self._tools.counters["gc_rounds"] += 1
                if removed:
                    self._tools.log.info("ecq_collected", messages=removed)
            pause = self._tools.config.gc_interval

    async def count(self) -> None:
        """Count the queues, for `max_queues`."""
        tools = self._tools
        queues = tools.queues
        while queues.uncounted is not None:
            number = 0
            try:
                async for owner, _ in tools.store.records.scan(QUEUES, tools.now()):
                    number += owner not in queues.uncounted
                    if not number % COUNTING:
                        await asyncio.sleep(0)
            except StoreError as error:
                tools.log.warning("ecq_not_counted", error=str(error))
                await asyncio.sleep(COUNT_AGAIN)
            else:
                queues.count += number
                queues.uncounted = None

    async def collect(self) -> int:
        """Look at all queues; how many messages were removed."""
        tools = self._tools
        self._budget = tools.config.gc_step
        removed = 0
        if self._cluster is None:
            removed += await self._collect_all(None)
        else:
            for feed in range(self._cluster.feeds):
                if self._cluster.is_steward(feed):
                    removed += await self._collect_all(feed)
            await self.count_again()
        await self._close_idle()
        tools.progress.sweep()
        return removed

    async def _collect_all(self, feed: int | None) -> int:
        """Look at the queues of one cell, or at all; how many messages were removed."""
        tools = self._tools
        removed = 0
        async for owner, value in tools.store.records.scan(QUEUES, tools.now(), feed=feed):
            shape = EXCLUSIVE if owner.startswith(EXCLUSIVE.owners) else SHARED
            name = owner.removeprefix(shape.owners)
            removed += await self._collect(owner)
            await self._forget(CompactedQueue(tools.queues, shape, name), value)
            await self._spend(1)
        return removed

    async def count_again(self) -> None:
        """Count the queues again: what members tell each other of them may be lost with one."""
        queues = self._tools.queues
        before = queues.count
        number = 0
        async for _ in self._tools.store.records.scan(QUEUES, self._tools.now()):
            number += 1
            await self._spend(1)
        queues.count += number - before

    async def _close_idle(self) -> None:
        """Close queues that nothing has happened to since the last collection."""
        queues = self._tools.queues
        for queue in list(queues):
            if queue.idle and queue.rested == queue.tail:
                queues.drop(queue)
            else:
                queue.rested = queue.tail if queue.idle else -1
            await self._spend(1)

    async def _spend(self, number: int) -> None:
        """Let others have their turn when a step is over."""
        self._budget -= number
        if self._budget <= 0:
            self._budget = self._tools.config.gc_step
            await asyncio.sleep(PAUSE)

    async def _collect(self, owner: str) -> int:
        """Remove what is too old from one queue; how many messages."""
        tools = self._tools
        removed = after = 0
        while tools.config.retention:
            now = tools.now()
            limit = min(tools.config.gc_step, 1000)
            entries = await tools.store.mailboxes.read(owner, after, limit, now)
            old = _too_old(entries, now - tools.config.retention)
            if old:
                await tools.store.mailboxes.acknowledge(owner, old)
                tools.counters["collected"] += len(old)
                removed += len(old)
            await self._spend(len(entries))
            if not old or len(entries) < limit:
                break
            after = entries[-1].position
        return removed

    async def _forget(self, queue: CompactedQueue, value: bytes) -> None:
        """Forget a queue that is empty and that was not used for long."""
        tools = self._tools
        before = tools.now() - tools.config.idle
        try:
            since = decode_queue(value).since
        except (msgspec.MsgspecError, ValueError):
            since = 0.0
        if since > before or (await tools.store.mailboxes.info(queue.owner)).entries:
            return

        known = tools.queues.open(queue.shape, queue.name)

        async def forget() -> None:
            if known.consumers or known.coming or (await tools.store.mailboxes.info(queue.owner)).entries:
                return
            if await self._is_used(queue, before):
                return
            batch = Batch()
            batch.delete(QUEUES, queue.owner)
            if queue.shape.form is CompactedKind.EXCLUSIVE:
                batch.delete(queue.shape.progress, queue.name)
            await tools.queues.forget(known, batch)
            tools.counters["forgotten"] += 1

        await tools.queues.hold(known, forget)
        tools.queues.drop(known)

    async def _is_used(self, queue: CompactedQueue, before: float) -> bool:
        """Return True if a consumer has acknowledged since a time; progress of shared queues expires by itself."""
        tools = self._tools
        if queue.shape.form is CompactedKind.SHARED:
            async for _ in tools.store.records.scan(queue.shape.progress, tools.now(), f"{queue.name}/"):
                return True
            return False
        if tools.progress.peek(queue.log_key, queue.name) is not None:
            return True
        stored = await tools.progress.read(queue.log_key, queue.name)
        return stored is not None and stored.time > before


def _too_old(entries: Iterable[Entry], oldest: float) -> list[int]:
    return [entry.position for entry in entries if entry.stored_at <= oldest]
