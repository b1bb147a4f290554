"""Counts per request: a view over the stream `receipts`, so that no query has to read it from the start.

    stored ─▶ [ blocks, in the order of the stream ] ─▶ tallies ─(each second)─▶ checkpoint, with its offset
    start  ─▶ checkpoint ─▶ what the stream has behind it

    records   fanout-ledger / r/{request}   `_Stored`: the tally of a request, and the offset that it is counted up to
              fanout-ledger / head          `_Head`: the offset that all tallies are counted up to

Rule 1: tallies have an offset. Every record of the stream up to it is in them once, no record behind it is. Blocks are
        counted in the order in which they were begun, which is the order of their offsets (`ports`, rule 6).
Rule 2: where a block does not begin right behind the offset, something else is in the stream: a write of unknown
        outcome, or one of the process before that was late. It is read from the stream first.
Rule 3: a stored tally has its own offset: where batches are not atomic, some may be newer than the head.
Several members: one of them reads the stream (`counting`), so there are no blocks: `follow` and `checkpoint` are all.

Rule 4: what has ended stays so. A receipt behind the final one of its delivery changes nothing, neither does a second
        final one. A delivery that is accepted twice counts once, where receipts are counted one by one.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, cast

import msgspec

from motorcade.core import receipt as receipts
from motorcade.core.receipt import FINAL, LATE_ACK, Receipt, ReceiptError, State
from motorcade.core.recent import RecentSet
from motorcade.core.record import RecordError
from motorcade.core.record import decode as decode_record
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.receipt_format import AcceptedRun
from motorcade.plugins.fanout.tables import LEDGER, RECEIPTS, owner_of
from motorcade.storage.ports import Batch, Fence, Store, StoreError, StreamRecord

INTERVAL: Final = 1.0  #: seconds between two checkpoints
STEP: Final = 1000  #: records read at once
LOAD_STEPS: Final = 2000  #: reads before the fan-out starts; the rest follows while it runs
GROUP: Final = 500  #: tallies in one batch
MAX_KNOWN: Final = 100_000  #: deliveries that are remembered to have ended or, counted one by one, to be accepted
MAX_OPEN: Final = 200_000  #: deliveries, over all requests, that are known to have been sent

REFUSED: Final = -1  #: last offset of a block that is not to be counted
UNLOADED: Final = "the fan-out was unloaded before it was done"  #: a caller that waits for the store is told

_HEAD: Final = "head"
_REQUEST: Final = "r/"  # request ids have no slash


class _Head(msgspec.Struct, array_like=True, tag=1):
    offset: int


class _Stored(msgspec.Struct, array_like=True, tag=2):
    offset: int
    accepted: int
    finals: dict[State, int]
    sent: list[str]
    retried: list[str]
    first_at: float
    last_at: float
    begin: int
    end: int


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_stored = msgspec.msgpack.Decoder(_Stored).decode
_decode = msgspec.msgpack.Decoder(list).decode


def _decode_tally(value: bytes) -> _Stored:
    """Return a stored tally, also of the version before: that had stamps of blocks beside its offset.

    If its end is not known there, the offset does not say what it includes. Then it is empty, and counted again.
    """
    if value[1:2] != b"\x01":
        return _decode_stored(value)
    _, offset, _origin, _upto, _also, *counts, begin, end = _decode(value)
    if not end:
        offset, end, counts = begin, begin, [0, {}, [], [], *counts[-2:]]
    return msgspec.convert([2, offset, *counts, begin, end], _Stored)


@dataclass(slots=True, eq=False)
class Tally:
    """The counts of one request, over all its batches."""

    request_id: str
    begin: int  #: its receipts lie behind this offset
    first_at: float
    last_at: float
    end: int  #: they do not lie behind this offset
    accepted: int = 0  #: deliveries
    finals: Counter[State] = field(default_factory=Counter)
    open: dict[str, State] = field(default_factory=dict)  #: delivery id -> sent or retried; others only wait
    offset: int = 0  #: it was stored with everything up to here (rule 3)

    @property
    def pending(self) -> int:
        """Return how many deliveries have no final state."""
        return max(0, self.accepted - self.finals.total())

    def states(self) -> dict[State, int]:
        """Return the deliveries by the state they are in now, as far as there are any."""
        left = self.pending
        found = dict(self.finals)
        for state, count in Counter(self.open.values()).items():
            found[state] = min(count, left)
            left -= found[state]
        found[State.ACCEPTED] = left
        return {state: found[state] for state in State if found.get(state)}


@dataclass(slots=True, eq=False)
class Block:
    """Receipts that are written together, once."""

    receipts: Sequence[Receipt]
    accepted: AcceptedRun | None = None
    batch: Batch | None = None  #: with these receipts
    then: Callable[[], object] | None = None  #: called when it is stored
    unknown: list[Block] = field(default_factory=list)  #: earlier attempts, of which a part may be in the stream
    first: int = 0  #: offset
    last: int = 0  #: 0: it is being written; `REFUSED`: it is not in the stream, or is written again


class RequestCounters:
    """The tallies of all requests."""

    def __init__(self, context: Context, max_requests: int) -> None:
        self.max_requests = max_requests  #: above it those that ended longest ago go
        self.counters = context.counters
        self.offset = 0  #: rule 1
        self._store = cast("Store", context.store)
        self._now = context.hub.now
        self._log = context.log
        self._shared = context.cluster is not None  # entries go before their receipts (`outbox`)
        self._loading = False
        self._tallies: dict[str, Tally] = {}
        self._names: list[str] = []  # sorted
        self._blocks: deque[Block] = deque()  # not counted yet, in the order in which they were begun
        self.begin = self._blocks.append  #: note a block that is given to the store now; `count` follows
        self._pending = 0  # deliveries without a final state, all together
        self.open = 0  #: deliveries that are known to have been sent
        self._dirty: dict[str, None] = {}  # requests whose tally has changed since it was stored
        self._gone: dict[str, None] = {}  # requests whose record is to be deleted
        self._known: RecentSet[str] = RecentSet(MAX_KNOWN)  # deliveries that have ended; with "+": accepted (rule 4)
        self._ended: list[str] = []  # delivery ids of final receipts that were read
        self._ready = asyncio.Event()  # not set: the stream is read up to `_end`
        self._end = 0
        self._head = 0  # of the checkpoint that was read: requests without a tally are forgotten up to here
        self._before = 0  # what is added to tallies now lies behind this offset
        self._closed = False
        self._writing = asyncio.Lock()

    # -- for queries

    def __len__(self) -> int:
        return len(self._tallies)

    @property
    def pending(self) -> int:
        """Return how many deliveries have no final state, of all requests."""
        return max(0, self._pending)

    @property
    def known(self) -> int:
        """Return how many deliveries are remembered (rule 4)."""
        return len(self._known)

    async def ready(self) -> None:
        """Wait until everything is counted that was written before; `StoreError` if the plugin is unloaded before."""
        await self._ready.wait()
        if self._closed:
            raise StoreError(UNLOADED)

    def close(self) -> None:
        """Store nothing from now on, and let no caller wait any longer."""
        self._closed = True
        self._ready.set()

    def find(self, request_id: str) -> Tally | None:
        return self._tallies.get(request_id)

    def after(self, request_id: str) -> Iterator[Tally]:
        """Return tallies in the order of request ids, behind one of them."""
        for index in range(bisect_right(self._names, request_id), len(self._names)):
            yield self._tallies[self._names[index]]

    # -- blocks

    def count(self) -> None:
        """Count the blocks whose offsets are known, in their turn."""
        blocks = self._blocks
        while blocks and blocks[0].last and self._ready.is_set():
            block = blocks[0]
            if block.first > self.offset + 1:
                self._end = block.first - 1  # rule 2
                self._ready.clear()
                return
            del blocks[0]
            if block.last <= self.offset:
                continue  # refused, or counted when the stream was read
            self._before, self.offset = block.first - 1, block.last
            if block.accepted is not None:
                _, positions, request_id, time = block.accepted
                self._tally(request_id, time).accepted += len(positions)
                self._pending += len(positions)
            for receipt in block.receipts:
                self._add(receipt)

    def _tally(self, request_id: str, time: float) -> Tally:
        """Return the tally of a request to which something is added that lies at `offset`."""
        tally = self._tallies.get(request_id)
        if tally is None:
            if len(self._tallies) >= self.max_requests:
                self._make_room()
            tally = self._tallies[request_id] = Tally(request_id, self._before, time, time, self.offset)
            insort(self._names, request_id)
            self._gone.pop(request_id, None)
        if time > tally.last_at:
            tally.last_at = time
        elif time < tally.first_at:
            tally.first_at = time
        tally.end = self.offset
        self._dirty[request_id] = None
        return tally

    def _add(self, receipt: Receipt) -> None:
        tally = self._tally(receipt.request_id, receipt.time)
        state, name = receipt.state, receipt.delivery_id
        if receipt.reason == LATE_ACK:
            return  # it has ended, whether that is remembered or not
        if state is State.ACCEPTED:
            new = self._remember(receipt)
            tally.accepted += new
            self._pending += new
            self.counters["ledger_repeated"] += not new
        elif name in self._known:
            self.counters["ledger_repeated"] += state in FINAL
        elif state in FINAL:
            self._known.add(name)
            tally.finals[state] += 1
            self._pending -= 1
            if tally.open.pop(name, None) is not None:
                self.open -= 1
        elif name in tally.open:
            tally.open[name] = state
        elif self.open < MAX_OPEN:
            tally.open[name] = state
            self.open += 1
        else:
            self.counters["ledger_open_not_kept"] += 1

    def _remember(self, receipt: Receipt) -> bool:
        """Return False if a delivery is known to be accepted, or to have ended (rule 4)."""
        if receipt.state is not State.ACCEPTED and receipt.state not in FINAL:
            return True
        key = f"+{receipt.delivery_id}" if receipt.state is State.ACCEPTED else receipt.delivery_id
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def _make_room(self) -> None:
        """Forget those that ended longest ago, a hundredth at a time; if none has, those that were quiet longest."""
        ended = [tally for tally in self._tallies.values() if not tally.pending]
        ended = ended or list(self._tallies.values())
        ended.sort(key=lambda tally: tally.last_at)
        for tally in ended[: max(1, self.max_requests // 100, len(self._tallies) + 1 - self.max_requests)]:
            self._forget(tally)

    def forget_ended(self, before: float) -> None:
        """Forget requests that ended before a time: their receipts are no longer kept."""
        if self._ready.is_set():
            for tally in [tally for tally in self._tallies.values() if tally.last_at < before and not tally.pending]:
                self._forget(tally)

    def _forget(self, tally: Tally) -> None:
        self.open -= len(tally.open)
        self._pending -= tally.accepted - tally.finals.total()
        del self._tallies[tally.request_id]
        del self._names[bisect_left(self._names, tally.request_id)]
        self._dirty.pop(tally.request_id, None)
        self._gone[tally.request_id] = None
        self.counters["ledger_forgotten"] += 1

    # -- one of several members

    async def reload(self) -> None:
        """Begin at the last checkpoint, whatever was counted here before."""
        self.forget_all()
        await self.load()

    def forget_all(self) -> None:
        """Forget all counts: another member counts."""
        self._tallies.clear()
        self._names.clear()
        self._dirty.clear()
        self._gone.clear()
        self._known.clear()
        self._ended.clear()
        self._pending = self.open = self._head = self._before = 0
        self._ready.clear()

    async def follow(self) -> None:
        """Count all that is in the stream now."""
        end = (await self._store.streams.info(RECEIPTS)).last
        if end > self.offset:
            self._end = end
            self._ready.clear()
        await self._read()

    def place(self, request_id: str) -> int:
        """Return the offset behind which the receipts of a request begin."""
        tally = self._tallies.get(request_id)
        return tally.begin if tally is not None else self.offset  # what is not counted yet lies behind it

    # -- checkpoints

    async def run(self) -> None:
        """Read what is missing and write checkpoints, until cancelled."""
        while True:
            try:
                await self._read()
                await self.checkpoint()
            except StoreError as error:
                self.counters["ledger_failed"] += 1
                self._log.warning("fanout_ledger_not_written", error=str(error))
            await asyncio.sleep(INTERVAL)

    async def checkpoint(self, fence: Fence | None = None) -> None:
        """Store what has changed; as long as a fence holds, if there is one (`StoreFencedError`)."""
        async with self._writing:
            while (self._dirty or self._gone) and self._ready.is_set() and not self._closed:
                await self._write_some(fence)

    async def _write_some(self, fence: Fence | None) -> None:
        """Store a group of tallies, as they are at this moment."""
        some = list(islice(self._dirty, GROUP))
        gone = list(islice(self._gone, GROUP))
        batch = Batch()
        if fence is not None:
            batch.fence(fence)
        for request_id in some:
            del self._dirty[request_id]
            batch.put(LEDGER, _REQUEST + request_id, _encode(self._stored(self._tallies[request_id])))
        for request_id in gone:
            del self._gone[request_id]
            batch.delete(LEDGER, _REQUEST + request_id)
        if not self._dirty and not self._gone:
            batch.put(LEDGER, _HEAD, _encode(_Head(self.offset)))  # last: until then the old one holds (rule 3)
        try:
            await self._store.write(batch)
        except BaseException:
            self._dirty |= dict.fromkeys(request_id for request_id in some if request_id in self._tallies)
            self._gone |= dict.fromkeys(request_id for request_id in gone if request_id not in self._tallies)
            raise

    def _stored(self, tally: Tally) -> _Stored:
        return _Stored(
            self.offset,
            tally.accepted,
            dict(tally.finals),
            [name for name, state in tally.open.items() if state is State.SENT],
            [name for name, state in tally.open.items() if state is State.RETRIED],
            tally.first_at,
            tally.last_at,
            tally.begin,
            tally.end,
        )

    # -- from the store

    async def load(self) -> None:
        """Read the last checkpoint, and what the stream has behind it. What takes too long goes on in `run`."""
        self._end = (await self._store.streams.info(RECEIPTS)).last
        head, recounted = 0, []
        async for key, value in self._store.records.scan(LEDGER, self._now()):
            try:
                if key == _HEAD:
                    head = min(_decode_head(value).offset, self._end)  # less, if the stream was dropped since
                else:
                    self._restore(key.removeprefix(_REQUEST), _decode_tally(value))
            except (msgspec.MsgspecError, ValueError) as error:
                self.counters["ledger_unreadable"] += 1
                self._log.error("fanout_ledger_unreadable", key=key, error=str(error))
        for tally in self._tallies.values():
            if tally.end > tally.begin:
                tally.offset = min(max(tally.offset, head), self._end)
            else:
                recounted.append(tally.begin)
        self._names = sorted(self._tallies)
        self._head = head
        self.offset = min([head, *recounted])
        self._loading = True
        try:
            await self._read(LOAD_STEPS)
        finally:
            self._loading = False

    def _restore(self, request_id: str, stored: _Stored) -> None:
        sent = dict.fromkeys(stored.sent, State.SENT) | dict.fromkeys(stored.retried, State.RETRIED)
        tally = self._tallies[request_id] = Tally(
            request_id,
            stored.begin,
            stored.first_at,
            stored.last_at,
            stored.end,
            stored.accepted,
            Counter(stored.finals),
            sent,
            stored.offset,
        )
        self.open += len(tally.open)
        self._pending += tally.accepted - tally.finals.total()

    async def _read(self, steps: int = 0) -> None:
        """Count what lies in the stream up to `_end`, in at most so many steps (0: any); then go on with blocks."""
        while not self._ready.is_set():
            page = await self._store.streams.read(RECEIPTS, self.offset, STEP)
            for record in page:
                if record.offset > self._end:
                    break
                self._before, self.offset = record.offset - 1, record.offset
                self._add_record(record)
            if len(page) < STEP or page[-1].offset >= self._end:
                self.offset = self._end
            await self._finish_ended()
            if self.offset >= self._end:
                self._ready.set()
                self.count()
            steps -= 1
            if not steps:
                break

    def _add_record(self, record: StreamRecord) -> None:
        try:
            receipt = receipts.decode(decode_record(record.value).payload)
        except (RecordError, ReceiptError) as error:
            self.counters["ledger_unreadable"] += 1
            self._log.warning("fanout_receipt_unreadable", offset=record.offset, error=str(error))
            return
        if receipt.state in FINAL:
            self._ended.append(receipt.delivery_id)
        tally = self._tallies.get(receipt.request_id)
        if record.offset <= (tally.offset if tally is not None else self._head):
            self._remember(receipt)
        else:
            self._add(receipt)
            self.counters["ledger_replayed"] += 1

    async def _finish_ended(self) -> None:
        """Remove entries whose final receipt was stored just before a crash, where both are not one write."""
        ended, self._ended = self._ended, []
        if self._store.atomic or not ended or (self._shared and not self._loading):
            return
        batch = Batch()
        for name in ended:
            vin, _, position = name.rpartition(".")
            batch.acknowledge(owner_of(vin), [int(position)])
        await self._store.write(batch)
