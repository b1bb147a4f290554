"""What is published to compacted queues, on its way into the store.

    publish ─▶ [ group: what comes in one turn ] ─▶ prepared ─▶ one batch ─▶ queues, consumers ─▶ publishers
                                                      │  is it a new queue, does it have room
                                                      └─ too much: refused

Rule 1: one line of work for all queues. One batch is under way at a time, the next group gathers meanwhile; what must
        not happen while a batch is under way (looking how large a queue is, deleting it) happens between two
        (`between`, `look`). So numbers become known in their order.
Rule 2: all messages of a group share one future, which is made only if somebody waits for it. What becomes of a single
        one that may be refused is noted with it (`Row.answer`).
Rule 3: a message for a queue that is full is written all the same, because it may replace the value of its key; nobody
        can tell before. If it has not, it is removed again before its publisher hears that there is no room, and nobody
        is given it meanwhile (`Queue.doomed`).
Rule 4: that does for the bound of messages. For that of bytes one must know how large the value is that goes: a queue
        near that bound is read as a whole once, and the sizes are remembered, of `WEIGHED` queues at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from motorcade.plugins.ecq.options import EcqConfig
from motorcade.plugins.ecq.queue import Queue, Queues, Row
from motorcade.plugins.ecq.tables import QUEUES, QueueRecord, encode
from motorcade.storage.ports import NO_BOUND, Appended, Batch, Bound, Store, StoreError

GROUP_ROWS: Final = 256  #: messages in one batch: the store's thread holds up others for as long as it takes
GROUP_OCTETS: Final = 4 * 1024**2  #: bytes likewise; one message more than that goes alone
PAGE: Final = 256  #: messages read at once
WEIGHED: Final = 16  #: queues whose sizes are remembered message by message
RETRY: Final = 1.0  #: seconds until what could not be removed is tried again


class Group:
    """Messages that are written together."""

    __slots__ = ("_done", "doubtful", "octets", "rows")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.octets = 0
        self.doubtful: dict[Queue, None] = {}  #: queues that must be looked at first
        self._done: asyncio.Future[None] | None = None

    def future(self) -> asyncio.Future[None]:
        """Done when the store has answered."""
        if self._done is None:
            self._done = asyncio.get_running_loop().create_future()
        return self._done

    def finish(self, error: Exception | None = None) -> None:
        """It has."""
        done = self._done
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
            done.exception()  # seen: those who wait may be gone


class Appender:
    """Appends to all compacted queues of a node."""

    def __init__(
        self,
        store: Store,
        queues: Queues,
        now: Callable[[], float],
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.count = 0  #: queues that there are, as far as counted
        self.uncounted: set[str] | None = set()  #: mailboxes of those that came before the others were counted
        self.pending = 0  #: messages that the store has not confirmed
        self.pending_octets = 0
        self._store = store
        self._queues = queues
        self._now = now
        self._counters = counters
        self._log = log
        self._groups: deque[Group] = deque()
        self._flying: Group | None = None
        self._works: deque[Callable[[], Awaitable[None]]] = deque()
        self._looks: dict[Queue, None] = {}
        self._doomed: dict[Queue, None] = {}  # that have something to remove
        self._weighed: list[Queue] = []  # the last one last
        self._wake = asyncio.Event()
        self._failing = False
        self._ended = False

    @property
    def config(self) -> EcqConfig:
        return self._queues.config

    # -- what others ask for

    def add(self, row: Row) -> Group:
        """Append soon; what comes in one turn of the event loop shares a batch."""
        groups = self._groups
        if not groups or len(groups[-1].rows) >= GROUP_ROWS or groups[-1].octets >= GROUP_OCTETS:
            groups.append(Group())
            self._wake.set()
        group = groups[-1]
        queue, size = row.queue, row.size
        group.rows.append(row)
        group.octets += size
        self.pending += 1
        self.pending_octets += size
        queue.expect(row)
        if row.probe:
            group.doubtful[queue] = None
        return group

    def look(self, queue: Queue) -> None:
        """Find out where a queue ends and how large it is; its consumers hear if there is something for them."""
        self._looks[queue] = None
        self._wake.set()

    async def between(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something while no batch is under way; done when it is."""
        if self._ended:
            raise StoreError("the plugin ecq is unloaded")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def do() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - for whoever asked for it
                if not done.done():
                    done.set_exception(error)
            finally:
                if not done.done():
                    done.set_result(None)

        self._works.append(do)
        self._wake.set()
        await done

    async def settle(self) -> None:
        """Wait until the store has answered for everything that was added until now."""
        while self._groups or self._flying is not None or self._works or self._looks:
            await self.between(_nothing)

    # -- the line

    async def run(self) -> None:
        """Work until cancelled; also what an earlier run has left."""
        self._ended = False
        self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(0)  # the rest of this turn joins
                if self._doomed:
                    await self._remove_doomed()
                while self._groups or self._works or self._looks:
                    await self._step()
        finally:
            self._abandon()

    async def _step(self) -> None:
        while self._works:
            await self._works.popleft()()
        if self._looks:
            looks, self._looks = self._looks, {}
            await self._look_at(looks)
        if self._groups:
            group = self._flying = self._groups.popleft()
            await self._write(group)
            self._flying = None

    async def _look_at(self, queues: Iterable[Queue]) -> None:
        async def look(queue: Queue) -> None:
            try:
                queue.looked(await self._store.mailboxes.info(queue.owner))
            except StoreError as error:
                self._complain(error)
                self._counters["look_failed"] += 1
                if queue.consumers:
                    asyncio.get_running_loop().call_later(RETRY, self.look, queue)
            else:
                queue.tell()

        await asyncio.gather(*map(look, queues))

    async def _write(self, group: Group) -> None:
        now = self._now()
        config = self.config
        try:
            new = await self._prepare(group, now) if group.doubtful else ()
            batch = Batch()
            for queue in new:  # first: where batches are not atomic it must not be missing
                batch.put(QUEUES, queue.owner, encode(QueueRecord(now)))
            append = batch.append
            drops = config.overflow == "drop_oldest"
            bound = Bound(config.max_messages, config.max_bytes) if drops else NO_BOUND
            for row in group.rows:
                append([row.queue.owner], row.draft, now, bound)
            answers = (await self._store.write(batch)).appended if group.rows else []
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            self._failed(group, error if isinstance(error, StoreError) else StoreError(f"appending failed: {error!r}"))
            return
        if self._failing:
            self._failing = False
            self._log.info("ecq_appended_again")
        for queue in new:
            queue.registered = True
            self.count += 1
            if self.uncounted is not None:
                self.uncounted.add(queue.owner)
        self._landed(group.rows, answers, config, now)
        if self._doomed:
            await self._remove_doomed()
        self._over(group)
        group.finish()

    async def _prepare(self, group: Group, now: float) -> list[Queue]:
        """Look at queues that may be new or full; refuse what cannot be. The queues that are new."""
        new: list[Queue] = []
        refused: set[Queue] = set()
        config = self.config
        for queue in group.doubtful:
            if not queue.registered:
                queue.registered = await self._store.records.get(QUEUES, queue.owner, now) is not None
                if queue.registered:
                    continue
                if self.count + len(new) >= config.max_queues:
                    refused.add(queue)
                else:
                    new.append(queue)
        if config.overflow == "refuse":
            infos = await asyncio.gather(*(self._store.mailboxes.info(queue.owner) for queue in group.doubtful))
            for queue, info in zip(group.doubtful, infos, strict=True):
                queue.looked(info)
                if 0 < config.max_bytes < queue.octets_expected:
                    await self._weigh(queue, group.rows, config)
                else:
                    queue.sizes = None
        for row in group.rows if refused else ():
            if row.queue in refused:
                row.refusal = f"there are {config.max_queues} compacted queues already (max_queues)"
                self._counters["refused_queues"] += 1
        self._take_out_refused(group)
        return new

    async def _weigh(self, queue: Queue, rows: list[Row], config: EcqConfig) -> None:
        """Refuse what would make a queue too large, after what each message replaces is gone (rule 4)."""
        if queue.sizes is None:
            queue.sizes = await self._sizes(queue)
            self._weighed = [known for known in self._weighed if known.sizes is not None and known is not queue]
            self._weighed.append(queue)
            if len(self._weighed) > WEIGHED:
                self._weighed.pop(0).sizes = None
        octets = queue.octets
        for row in rows:
            if row.queue is queue:
                after = octets + row.size - queue.sizes.get(row.draft.key, 0)
                if after > config.max_bytes:
                    row.refusal = full(queue, config)
                    self._counters["refused_full"] += 1
                else:
                    octets, queue.sizes[row.draft.key] = after, row.size

    async def _sizes(self, queue: Queue) -> dict[bytes, int]:
        """How large the message of each key is."""
        sizes: dict[bytes, int] = {}
        after = 0
        while True:
            entries = await self._store.mailboxes.read(queue.owner, after, PAGE, self._now())
            for entry in entries:
                sizes[entry.key] = len(entry.body) + len(entry.payload)
            if len(entries) < PAGE:
                return sizes
            after = entries[-1].position

    def _take_out_refused(self, group: Group) -> None:
        kept: list[Row] = []
        for row in group.rows:
            if row.refusal:
                row.queue.dropped(row)
                group.octets -= row.size
                self.pending -= 1
                self.pending_octets -= row.size
            else:
                kept.append(row)
        group.rows = kept

    def _landed(self, rows: list[Row], answers: list[Appended], config: EcqConfig, stored_at: float) -> None:
        counters = self._counters
        replaced = dropped = refused = 0
        touched: dict[Queue, None] = {}
        for row, answer in zip(rows, answers, strict=True):
            queue = row.queue
            if answer.replaced:
                replaced += 1
            if answer.dropped or not answer.position:
                dropped += len(answer.dropped) + (not answer.position)
            if queue.landed(row, answer, config):
                self._doomed[queue] = None
                row.refusal = full(queue, config)
                refused += 1
            if queue.consumers:
                touched[queue] = None
        counters["appended"] += len(rows) - refused
        counters["replaced"] += replaced
        counters["dropped"] += dropped
        counters["refused_full"] += refused
        too_old = 0 < config.retention <= self._now() - stored_at
        for queue in touched:
            try:
                queue.dispatch(stored_at, too_old=too_old)
            except Exception:  # noqa: BLE001 - a defect in one queue must not stop all others
                self._log.exception("ecq_queue_failed", queue=queue.owner)

    async def _remove_doomed(self) -> None:
        """Rule 3. What cannot be removed now is tried again; until then it is given to nobody."""
        for queue in list(self._doomed):
            numbers = list(queue.doomed)
            try:
                await self._store.mailboxes.acknowledge(queue.owner, numbers)
            except StoreError as error:
                self._complain(error)
                asyncio.get_running_loop().call_later(RETRY, self._wake.set)
                continue
            queue.doomed.difference_update(numbers)
            del self._doomed[queue]

    def _failed(self, group: Group, error: StoreError) -> None:
        self._complain(error)
        self._counters["append_failed"] += len(group.rows)
        for row in group.rows:
            row.queue.dropped(row)
            row.queue.sizes = None
            if not error.certain:
                self._looks[row.queue] = None  # it may be there all the same
        self._over(group)
        group.finish(error)

    def _over(self, group: Group) -> None:
        self.pending -= len(group.rows)
        self.pending_octets -= group.octets

    def _complain(self, error: Exception) -> None:
        if not self._failing:  # once until it goes well again
            self._failing = True
            self._log.warning("ecq_store_failed", error=str(error))

    def _abandon(self) -> None:
        self._ended = True
        error = StoreError("appending has ended before the store had confirmed the message")
        for group in (self._flying, *self._groups):
            if group is not None:
                group.finish(error)
        self._flying = None
        self._groups.clear()


def full(queue: Queue, config: EcqConfig) -> str:
    """Why there is no room."""
    return (
        f"the queue {queue.name[:64]!r} is full ({config.max_messages} messages or {config.max_bytes} bytes); "
        "keys that it has can be written, others when some are too old, or with larger max_messages and max_bytes"
    )


async def _nothing() -> None:
    pass
