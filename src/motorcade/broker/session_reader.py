"""Reads of durable sessions: entries for clients that have room, and what a mailbox that is too full drops.

Reads are tasks that go on though the store fails. Each begins with finding what a process that was killed may have
sent (durable queue, rule 3), if that is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from itertools import islice

import structlog

from motorcade.broker.durable_queue import UNKNOWN, DurableQueue
from motorcade.broker.session_writer import RETRY, SessionWriter
from motorcade.clock import time
from motorcade.storage.ports import Batch, Entry, Mailboxes, StoreError
from motorcade.tasks import Work

log = structlog.stdlib.get_logger("motorcade.sessions")

STEP = 16  #: entries read at once to look through a mailbox
LOOKS = 64  #: mailboxes that are looked at together, to find what no member has told of


class SessionReader:
    """The reads of a node's durable sessions."""

    def __init__(self, mailboxes: Mailboxes, writer: SessionWriter, start: Callable[[Work, str], None]) -> None:
        """Take `start`, which runs something as a task of this name."""
        self._mailboxes = mailboxes
        self._writer = writer
        self._start = start
        self._looking: dict[DurableQueue, None] = {}  # mailboxes in which there may be what no member has told of
        self._looks = False  # a task looks at them
        self._trimming: dict[DurableQueue, bool] = {}  # mailboxes that are too full, and whether they have grown since

    async def entries(self, queue: DurableQueue, step: int, limit: int = UNKNOWN) -> AsyncIterator[Entry]:
        """Read a mailbox from its beginning, so many entries at once, and at most `limit`."""
        after = count = 0
        found: list[Entry] | None = None
        while count < limit and (found is None or len(found) == step):
            found = await self._mailboxes.read(queue.owner, after, step, time())
            for entry in found[: limit - count]:
                after = entry.position
                count += 1
                yield entry

    def fetch(self, queue: DurableQueue, limit: int) -> None:
        """Read entries for a client that has room."""
        work = partial(self._fetch, queue, queue.epoch, limit)
        self._start(partial(insist, work, "not_read", queue.session.client.client_id), "fetch")

    async def _fetch(self, queue: DurableQueue, epoch: int, limit: int) -> None:
        """Read from the cursor on: it knows what an attempt that failed has taken already."""
        if not (queue.serves(epoch) and queue.reading):
            return
        await self.count_sent(queue)
        tail, now = queue.tail, time()
        entries = await self._mailboxes.read(queue.owner, queue.cursor, limit, now)
        if queue.serves(epoch):
            queue.fetched(entries, limit, tail)
            self._writer.pump((queue.session,), now)

    async def count_sent(self, queue: DurableQueue) -> None:
        """Find the last entry that may have been sent before a crash (durable queue, rule 3)."""
        if queue.sent_to == UNKNOWN:
            last = count = size = 0
            async for entry in self.entries(queue, STEP, queue.max_sent):
                last = entry.position
                count += 1
                size += len(entry.body) + len(entry.payload)
            queue.know_sent(last, count, size)

    def look_again(self, queues: Iterable[DurableQueue]) -> None:
        """Look whether another member has appended what it cannot tell of any more (durable queue, rule 7)."""
        for queue in queues:
            if queue.open:
                self._looking[queue] = None
        if self._looking and not self._looks:
            self._looks = True
            self._start(self._look, "look")

    async def _look(self) -> None:
        """Look at some mailboxes at a time.

        What a dead member has appended may not be safe yet. An own write to the mailbox makes it so: when that is
        confirmed, everything before it is.
        """
        while self._looking:
            queues = list(islice(self._looking, LOOKS))
            for queue in queues:  # now: one that comes again meanwhile is looked at again
                del self._looking[queue]
            await insist(partial(self._look_at, queues), "not_looked_at", queues[0].session.client_id)
        self._looks = False

    async def _look_at(self, queues: list[DurableQueue]) -> None:
        looked = await asyncio.gather(*(self._mailboxes.info(queue.owner) for queue in queues))
        found = [(queue, info.last) for queue, info in zip(queues, looked, strict=True)]
        found = [(queue, last) for queue, last in found if queue.open and last > queue.confirmed_to]
        if not found:
            return
        batch = Batch()
        for queue, _ in found:
            batch.mark(queue.owner, 0, 0)  # changes nothing (there is no such position), and replicas confirm it
        await self._writer.write(batch)
        now = time()
        for queue, last in found:
            queue.confirmed(last)
        self._writer.pump([queue.session for queue, _ in found], now)

    def trim(self, queue: DurableQueue) -> None:
        """Drop of what waits in a mailbox, oldest first, until the rest fits (durable queue, rule 5)."""
        if queue not in self._trimming:
            self._start(partial(self._trim, queue), "trim")
        self._trimming[queue] = True

    async def _trim(self, queue: DurableQueue) -> None:
        while self._trimming.get(queue) and not queue.session.ended:
            self._trimming[queue] = False
            await insist(partial(self._make_room, queue), "mailbox_not_trimmed", queue.session.client.client_id)
        self._trimming.pop(queue, None)

    async def _make_room(self, queue: DurableQueue) -> None:
        if not queue.session.ended:  # it may have, while the store failed
            await self.count_sent(queue)
            await self._drop_waiting(queue)

    async def _drop_waiting(self, queue: DurableQueue) -> None:
        info = await self._mailboxes.info(queue.owner)
        bound = queue.bound
        # What is acknowledged may still be counted.
        entries = info.entries - len(queue.acked)
        size = info.size_bytes * entries // max(1, info.entries)
        after = queue.sent_to
        while 0 < bound.entries < entries or 0 < bound.size_bytes < size:
            found = await self._mailboxes.read(queue.owner, after, STEP, time())
            if queue.session.ended:
                return  # the next session of its client may have the mailbox by now
            for entry in found:
                after = entry.position
                if (0 < bound.entries < entries or 0 < bound.size_bytes < size) and queue.discard(entry):
                    entries -= 1
                    size -= len(entry.body) + len(entry.payload)
            if len(found) < STEP:
                return


async def insist(work: Callable[[], Awaitable[None]], event: str, client_id: str) -> None:
    """Do something, and again if the store fails."""
    while True:
        try:
            return await work()
        except StoreError as error:
            log.error(event, client_id=client_id, error=str(error))  # noqa: TRY400
            await asyncio.sleep(RETRY)
