"""Counts per request: a view over the stream `receipts`, so that nobody has to read it from the start.

    written ─▶ count ─▶ tallies ─(each second)─▶ checkpoint, with the place up to which it holds
    start   ─▶ checkpoint + what the stream has after that place

    records   fanout-ledger / r/{request}   `_Stored`: the tally of a request, and what it includes
              fanout-ledger / head          `_Head`: up to where all tallies include everything

A tally is right if each receipt of the stream is in it exactly once. The difficulty is to say *which* are in it, since
batches do not tell the offsets of what they append, and several are under way at a time.

    block    receipts that are written together; its stamp (microseconds, growing) and the origin of this process are in
             the guid of their records, so a record in the stream says which block it is from
    offset   the stream's last offset, asked for at some time: all blocks begun later lie behind it. It holds as soon as
             none of the blocks begun before is still under way
    upto     all blocks of this process up to this stamp are settled; `also` names later ones that are counted too

Rule 1: a stored tally includes what lies up to its offset, and blocks of its origin up to `upto` or in `also`. It says
        so itself, in its own record: where batches are not atomic, some tallies may be newer than others.
Rule 2: a block of which nobody knows whether it is in the stream casts doubt on the tallies. While there is doubt no
        checkpoint is written, and when it has been calm for a while they are made anew from the last one. Whoever has
        written the same receipts again by then is counted once.
Rule 3: each block is counted by `count` or by the replay, whichever sees it first.
Rule 4: what has ended stays so. A receipt that was written down late, after the last one of its delivery, changes
        nothing, and neither does a second last one.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

import msgspec
import structlog

from motorcade.core import receipt as receipts
from motorcade.core.lately import Lately
from motorcade.core.receipt import FINAL, LATE_ACK, Receipt, ReceiptError, State
from motorcade.core.record import RecordError
from motorcade.core.record import decode as decode_record
from motorcade.plugins.fanout.tables import LEDGER, RECEIPTS, owner_of
from motorcade.storage.ports import Batch, Store, StoreError, StreamRecord

INTERVAL: Final = 1.0  #: seconds between two checkpoints
STEP: Final = 1000  #: records read at once
LOAD_STEPS: Final = 2000  #: reads before the fan-out starts; the rest follows while it runs
GROUP: Final = 500  #: tallies in one batch
CALM: Final = 5.0  #: seconds after the last doubt until the tallies are made anew
LOST: Final = 60.0  #: seconds after which a block of which nothing was heard is in doubt
MOST_ALSO: Final = 1000  #: blocks named in a checkpoint; with more there is none this time
MOST_KNOWN: Final = 100_000  #: deliveries that are remembered to have ended; of a replay, also to be accepted
MOST_OPEN: Final = 200_000  #: deliveries, over all requests, that are known to have been sent

UNLOADED: Final = "the fan-out was unloaded before it was done"  #: a caller that waits for the store is told

_HEAD: Final = "head"
_REQUEST: Final = "r/"  # request ids have no slash


class _Head(msgspec.Struct, array_like=True, tag=1):
    offset: int


class _Stored(msgspec.Struct, array_like=True, tag=1):
    offset: int
    origin: bytes
    upto: int
    also: list[int]
    accepted: int
    finals: dict[State, int]
    sent: list[str]
    retried: list[str]
    first_at: float
    last_at: float
    begin: int
    end: int

    def includes(self, offset: int, origin: bytes, stamp: int) -> bool:
        """Rule 1."""
        return offset <= self.offset or (origin == self.origin and (stamp <= self.upto or stamp in self.also))


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_stored = msgspec.msgpack.Decoder(_Stored).decode


class Tally:
    """What is known of one request, over all its batches."""

    __slots__ = ("accepted", "begin", "end", "finals", "first_at", "last_at", "open", "request_id", "stamp", "stored")

    def __init__(self, request_id: str, begin: int, first_at: float) -> None:
        self.request_id = request_id
        self.accepted = 0  #: deliveries
        self.finals: Counter[State] = Counter()
        self.open: dict[str, State] = {}  #: delivery id -> sent or retried; accepted ones that are not here only wait
        self.first_at = first_at
        self.last_at = first_at
        self.begin = begin  #: its receipts lie behind this offset
        self.end = 0  #: and not behind this one; 0: that is not known
        self.stamp = 0  #: of the block that was counted last; 0: by a replay
        self.stored: _Stored | None = None  #: as it was read, until the replay is over

    @property
    def pending(self) -> int:
        """Deliveries without a final state."""
        return max(0, self.accepted - self.finals.total())

    def states(self) -> dict[State, int]:
        """Deliveries by the state they are in now, as far as there are any."""
        left = self.pending
        found = dict(self.finals)
        for state, count in Counter(self.open.values()).items():
            found[state] = min(count, left)
            left -= found[state]
        found[State.ACCEPTED] = left
        return {state: found[state] for state in State if found.get(state)}


class Ledger:
    """The tallies of all requests."""

    def __init__(
        self,
        store: Store,
        max_requests: int,
        now: Callable[[], float],
        log: structlog.stdlib.BoundLogger,
        counters: Counter[str],
    ) -> None:
        self.max_requests = max_requests  #: above it those that ended longest ago go
        self.counters = counters
        self.origin = os.urandom(6)  #: in the guid of every receipt of this process
        self.offset = 0  #: everything up to it is counted
        self.floor = 0  #: the stream has grown so far, at least
        self._offset_stamp = 0  # blocks up to this stamp lie there
        self._store = store
        self._now = now
        self._log = log
        self._tallies: dict[str, Tally] = {}
        self._names: list[str] = []  # sorted
        self._pending = 0  # deliveries without a final state, all together
        self._open = 0  # entries in `Tally.open`, all together
        self._newest = 0  # stamp
        self._outstanding: dict[int, None] = {}  # stamps of blocks that are under way, ascending
        self._above: set[int] = set()  # stamps of settled blocks, some of them later than one that is under way
        self._probe: tuple[int, int] | None = None  # an offset that will hold, and the newest stamp then
        self._dirty: dict[str, None] = {}  # requests whose tally has changed since it was stored
        self._unended: dict[str, None] = {}  # requests stored without knowing where they end: once more, next time
        self._gone: dict[str, None] = {}  # requests whose record is to be deleted
        self._doubt: float | None = None  # time of the last doubt
        self._ready = asyncio.Event()  # not set: a replay is under way
        self._closed = False
        self._after = 0  # where the replay is
        self._seen: set[int] = set()  # stamps of blocks of this process that a replay has counted
        # Deliveries that have ended; with "+", that a replay has seen accepted.
        self._known: Lately[str] = Lately(MOST_KNOWN)
        self._ended: list[str] = []  # delivery ids of what a replay has seen end
        self._deferred: list[tuple[int, Callable[[], None]]] = []  # blocks written during a replay: stamp, what to do
        self._late: set[int] = set()  # stamps of blocks that were given up, of which something may be heard yet
        self._writing = asyncio.Lock()

    # -- for queries

    def __len__(self) -> int:
        return len(self._tallies)

    @property
    def pending(self) -> int:
        """Deliveries without a final state, of all requests."""
        return max(0, self._pending)

    @property
    def open(self) -> int:
        """Deliveries that are known to have been sent."""
        return self._open

    @property
    def known(self) -> int:
        """Deliveries that are remembered to have ended."""
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
        """Tallies in the order of request ids, behind one of them."""
        for index in range(bisect_right(self._names, request_id), len(self._names)):
            yield self._tallies[self._names[index]]

    # -- blocks

    def begin(self) -> int:
        """The stamp of a new block; `count` or `failed` follows."""
        self._newest = stamp = max(self._newest + 1, int(self._now() * 1_000_000))
        self._outstanding[stamp] = None
        return stamp

    def count(self, stamp: int, written: Sequence[Receipt]) -> None:
        """A block is in the stream."""
        self._take(stamp, partial(self._add_all, written, stamp))

    def count_accepted(self, stamp: int, request_id: str, accepted: int, now: float) -> None:
        """A block of `accepted` receipts of one request is in the stream."""
        self._take(stamp, partial(self._add_accepted, request_id, accepted, now, stamp))

    def failed(self, stamp: int, *, certain: bool) -> None:
        """A block could not be written; `certain`: nothing of it is in the stream, nor will be."""
        self._settle(stamp)
        if not certain:
            self._doubted()

    def _take(self, stamp: int, add: Callable[[], None]) -> None:
        """Count a block, now or after the replay, unless that has seen it (rule 3)."""
        self._settle(stamp)
        self._late.discard(stamp)
        if not self._ready.is_set():
            self._deferred.append((stamp, add))
        elif stamp in self._seen:
            self._seen.discard(stamp)
        else:
            add()

    def _settle(self, stamp: int) -> None:
        if stamp in self._outstanding:
            del self._outstanding[stamp]
            if self._outstanding:
                self._above.add(stamp)
            else:
                self._above.clear()

    def _doubted(self) -> None:
        self._doubt = self._now()
        self.counters["ledger_doubts"] += 1

    # -- counting

    def _tally(self, request_id: str, time: float) -> Tally:
        tally = self._tallies.get(request_id)
        if tally is None:
            if len(self._tallies) >= self.max_requests:
                self._make_room()
            tally = self._tallies[request_id] = Tally(request_id, self.offset, time)
            insort(self._names, request_id)
            self._gone.pop(request_id, None)
        if time > tally.last_at:
            tally.last_at = time
        elif time < tally.first_at:
            tally.first_at = time
        self._dirty[request_id] = None
        return tally

    def _add_accepted(self, request_id: str, accepted: int, now: float, stamp: int) -> None:
        tally = self._tally(request_id, now)
        tally.stamp, tally.end = stamp, 0
        tally.accepted += accepted
        self._pending += accepted

    def _add_all(self, written: Sequence[Receipt], stamp: int) -> None:
        for receipt in written:
            self._add(receipt, stamp)

    def _add(self, receipt: Receipt, stamp: int) -> None:
        tally = self._tally(receipt.request_id, receipt.time)
        tally.stamp, tally.end = stamp, 0
        state, name = receipt.state, receipt.delivery_id
        if receipt.reason == LATE_ACK:
            return  # it has ended, whether that is remembered or not
        if state is State.ACCEPTED:
            tally.accepted += 1
            self._pending += 1
        elif name in self._known:
            self.counters["ledger_repeated"] += state in FINAL  # rule 4
        elif state in FINAL:
            self._known.add(name)
            tally.finals[state] += 1
            self._pending -= 1
            if tally.open.pop(name, None) is not None:
                self._open -= 1
        elif name in tally.open:
            tally.open[name] = state
        elif self._open < MOST_OPEN:
            tally.open[name] = state
            self._open += 1
        else:
            self.counters["ledger_open_not_kept"] += 1

    def _make_room(self) -> None:
        """Those that ended longest ago go, a hundredth at a time; if all go on, those that were quiet longest."""
        ended = [tally for tally in self._tallies.values() if not tally.pending]
        ended = ended or list(self._tallies.values())
        ended.sort(key=lambda tally: tally.last_at)
        for tally in ended[: max(1, self.max_requests // 100, len(self._tallies) + 1 - self.max_requests)]:
            self._forget(tally)

    def forget_ended(self, before: float) -> None:
        """Drop requests that ended before a time: their receipts are no longer kept."""
        if self._ready.is_set():
            for tally in [tally for tally in self._tallies.values() if tally.last_at < before and not tally.pending]:
                self._forget(tally)

    def _forget(self, tally: Tally) -> None:
        self._open -= len(tally.open)
        self._pending -= tally.accepted - tally.finals.total()
        del self._tallies[tally.request_id]
        del self._names[bisect_left(self._names, tally.request_id)]
        self._dirty.pop(tally.request_id, None)
        self._gone[tally.request_id] = None
        self.counters["ledger_forgotten"] += 1

    # -- checkpoints

    async def run(self) -> None:
        """Write checkpoints until cancelled."""
        while True:
            try:
                if not self._ready.is_set():
                    await self._replay()
                await self.tick()
            except StoreError as error:
                self.counters["ledger_failed"] += 1
                self._log.warning("fanout_ledger_not_written", error=str(error))
            await asyncio.sleep(INTERVAL)

    async def tick(self) -> None:
        """What is due now: a look for lost blocks, an end of doubt, a checkpoint."""
        now = self._now()
        for stamp in list(self._outstanding):
            if stamp / 1_000_000 > now - LOST:
                break
            self.counters["ledger_blocks_lost"] += 1
            self.failed(stamp, certain=False)
            self._late.add(stamp)
        if self._doubt is None:
            await self.checkpoint()
        elif not 0 <= now - self._doubt < CALM:
            self._doubt = None
            await self.load()

    async def checkpoint(self) -> None:
        """Store what has changed, unless there is doubt."""
        async with self._writing:
            if self._unsure() or not (self._dirty or self._gone):
                return
            await self._move_offset()
            if self._unsure():
                return
            self._unended.clear()
            try:
                while await self._write_some() and not self._unsure():
                    pass
            finally:
                self._dirty |= {name: None for name in self._unended if name in self._tallies}

    def _unsure(self) -> bool:
        """Whether the tallies are not to be stored as they are."""
        return self._doubt is not None or self._closed or not self._ready.is_set()

    async def _move_offset(self) -> None:
        if self._probe is None:
            last = (await self._store.streams.info(RECEIPTS)).last
            self._probe = last, self._newest
        oldest = next(iter(self._outstanding), self._newest + 1)
        if oldest > self._probe[1] and self._ready.is_set():
            self.offset, self._offset_stamp = max(self.offset, self._probe[0]), self._probe[1]
            self.floor = max(self.floor, self.offset)
            self._probe = None

    async def _write_some(self) -> bool:
        """A group of tallies, as they are at this moment; whether there are more to be written now."""
        upto = next(iter(self._outstanding), self._newest + 1) - 1
        also = sorted(stamp for stamp in self._above if stamp > upto)
        self._above.intersection_update(also)
        if len(also) > MOST_ALSO:
            self.counters["ledger_checkpoints_left"] += 1
            return False
        some = list(islice(self._dirty, GROUP))
        gone = list(islice(self._gone, GROUP))
        batch = Batch()
        for request_id in some:
            del self._dirty[request_id]
            tally = self._tallies[request_id]
            if not tally.end and tally.stamp <= self._offset_stamp:
                tally.end = self.offset
            elif not tally.end:
                self._unended[request_id] = None
            batch.put(LEDGER, _REQUEST + request_id, _encode(self._stored(tally, upto, also)))
        for request_id in gone:
            del self._gone[request_id]
            batch.delete(LEDGER, _REQUEST + request_id)
        if not self._dirty and not self._gone:
            batch.put(LEDGER, _HEAD, _encode(_Head(self.offset)))  # last: until then the old one holds (rule 1)
        try:
            await self._store.write(batch)
        except BaseException:
            self._dirty |= dict.fromkeys(request_id for request_id in some if request_id in self._tallies)
            self._gone |= dict.fromkeys(request_id for request_id in gone if request_id not in self._tallies)
            raise
        return bool(self._dirty or self._gone)

    def _stored(self, tally: Tally, upto: int, also: list[int]) -> _Stored:
        return _Stored(
            self.offset,
            self.origin,
            upto,
            also,
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
        """Read the last checkpoint, and what the stream has after it. What takes too long goes on in `run`."""
        self._ready.clear()
        async with self._writing:
            # `_seen` stays: what an earlier replay has counted may be stored in a tally before its writer tells.
            for names in (self._tallies, self._names, self._dirty, self._gone, self._known):
                names.clear()
            self._open = self.offset = self._after = 0
            self._probe = None
            async for key, value in self._store.records.scan(LEDGER, self._now()):
                self._restore(key, value)
            self._names = sorted(self._tallies)
            self._after = self.offset
        await self._replay(LOAD_STEPS)

    def _restore(self, key: str, value: bytes) -> None:
        try:
            if key == _HEAD:
                self.offset = _decode_head(value).offset
                return
            stored = _decode_stored(value)
        except (msgspec.MsgspecError, ValueError) as error:
            self.counters["ledger_unreadable"] += 1
            self._log.error("fanout_ledger_unreadable", key=key, error=str(error))
            return
        request_id = key.removeprefix(_REQUEST)
        tally = self._tallies[request_id] = Tally(request_id, stored.begin, stored.first_at)
        tally.stored = stored
        tally.accepted = stored.accepted
        tally.finals.update(stored.finals)
        tally.open = dict.fromkeys(stored.sent, State.SENT) | dict.fromkeys(stored.retried, State.RETRIED)
        tally.last_at, tally.end = stored.last_at, stored.end
        self._open += len(tally.open)
        self._pending += tally.accepted - tally.finals.total()

    async def _replay(self, steps: int = 0) -> None:
        """Count what lies in the stream, at most so many steps (0: to its end)."""
        found: list[StreamRecord] = []
        while not self._ready.is_set():
            found = await self._store.streams.read(RECEIPTS, self._after, STEP)
            for record in found:
                self._replayed(record)
            self._after = found[-1].offset if found else self._after
            await self._finish_ended()
            if len(found) < STEP:
                self._caught_up()
            steps -= 1
            if not steps:
                break

    def _replayed(self, record: StreamRecord) -> None:
        try:
            message = decode_record(record.value)
            receipt = receipts.decode(message.payload)
        except (RecordError, ReceiptError) as error:
            self.counters["ledger_unreadable"] += 1
            self._log.warning("fanout_receipt_unreadable", offset=record.offset, error=str(error))
            return
        stamp, origin = int.from_bytes(message.guid[:8], "big"), message.guid[8:14]
        if origin == self.origin:
            self._seen.add(stamp)
        tally = self._tallies.get(receipt.request_id)
        if receipt.state in FINAL:
            self._ended.append(receipt.delivery_id)
        if tally is not None and tally.stored is not None and tally.stored.includes(record.offset, origin, stamp):
            self._include(receipt)
            return
        if receipt.state is State.ACCEPTED and not self._include(receipt):
            self.counters["ledger_repeated"] += 1
            return
        self._add(receipt, 0)
        self._tallies[receipt.request_id].end = record.offset
        self.counters["ledger_replayed"] += 1

    def _include(self, receipt: Receipt) -> bool:
        """Know of a receipt if it can count only once; False if that is known.

        Whoever cannot know that it is in the stream writes it again.
        """
        if receipt.state not in FINAL and receipt.state is not State.ACCEPTED:
            return True
        key = f"+{receipt.delivery_id}" if receipt.state is State.ACCEPTED else receipt.delivery_id
        if key in self._known:
            return False
        self._known.add(key)
        return True

    async def _finish_ended(self) -> None:
        """Remove entries whose end was written down just before a crash, where both are not one write."""
        ended, self._ended = self._ended, []
        if self._store.atomic or not ended:
            return
        batch = Batch()
        for delivery_id in ended:
            vin, _, position = delivery_id.rpartition(".")
            batch.acknowledge(owner_of(vin), [int(position)])
        await self._store.write(batch)

    def _caught_up(self) -> None:
        """From here on blocks are counted as they are written."""
        self.offset, self._offset_stamp = max(self.offset, self._after), 0
        self.floor = max(self.floor, self.offset)
        self._ready.set()
        for tally in self._tallies.values():
            tally.stored = None
        deferred, self._deferred = self._deferred, []
        for stamp, add in deferred:
            if stamp not in self._seen:
                add()
        self._seen.intersection_update(self._outstanding.keys() | self._late)
        self._late.intersection_update(self._seen)
