"""How far each client has read each of its streams.

    collection `stream-progress`, key {stream}/{offset as written in the filter}/{client id}:  [1, offset, time, ahead]

`offset` is the highest one up to which everything was acknowledged, `ahead` says that the client has asked for one that
is not there yet, and waits for it. (Without it, an offset beyond the end means that the store has lost records: a Redis
that failed over, say. The reader goes on at the end then.) A `Mark` is that number in memory, with what is
needed to go on in the same process: which messages are in flight, and which were acknowledged before older ones. Marks
of all sessions are in memory, those of clients that are away too: the end of a session must find them.

Rule 1: acknowledgements change the mark at once and the store later: all marks that have changed go in one batch, each
        at most once per interval; those of clients that leave go at once. One batch is under way at a time, so a record
        never goes back.
Rule 2: a mark belongs to a subscription. It goes when the client unsubscribes or its session ends, and when its stream
        is deleted.
Rule 3: a record may outlive its session only if the node dies first. It expires by itself when everything up to it has
        been trimmed by age: to begin at the oldest record is the same from then on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import msgspec
import structlog

from motorcade.plugins.streams.appender import Spawn
from motorcade.plugins.streams.position import Position
from motorcade.storage.ports import Store

COLLECTION: Final = "stream-progress"
BATCH: Final = 500  #: records written at once
RETRY: Final = 5.0  #: seconds until a batch that failed is tried again
LAST_ATTEMPT: Final = 5.0  #: seconds for what is left when the plugin stops
DAY: Final = 86400.0
MAX_KEY: Final = 65_535  #: bytes; a client whose id leaves no room begins anew after a restart of the node


class _Stored(msgspec.Struct, array_like=True, tag=1, gc=False):
    offset: int
    time: float
    ahead: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode


class Mark:
    """One client's place in one stream."""

    __slots__ = (
        "acked",
        "ahead",
        "client",
        "done",
        "gone",
        "kept",
        "lost",
        "outstanding",
        "position",
        "start",
        "stored",
        "written",
    )

    def __init__(self, client: str, stream: str, offset: str) -> None:
        self.client = client
        self.stored = f"{stream}/{offset}/{client}"  #: key of its record
        self.kept = len(self.stored.encode(errors="replace")) <= MAX_KEY  #: whether it has a record at all
        self.written = False  #: there may be a record
        self.gone = False
        self.position: Position | None = None  #: where to begin; None: after `done`
        self.start = 0  #: which beginning this is: acknowledgements of messages from before it do not count
        self.ahead = False  #: it begins with an offset that was not there yet
        self.done = 0  #: everything up to it was acknowledged
        self.outstanding: deque[int] = deque()  #: offsets given and not known to be acknowledged up to, in order
        self.acked: set[int] = set()  #: those of them that are acknowledged
        self.lost: set[int] = set()  #: those of them that were sent, but of which the session knows nothing any more

    @property
    def stream(self) -> str:
        return self.stored.partition("/")[0]

    @property
    def offset(self) -> str:
        """As written in the filter; "": none."""
        return self.stored.split("/", 2)[1]

    def begin(self, start: int, after: int, *, ahead: bool) -> None:
        """Begin after an offset."""
        self.position = None
        self.ahead = ahead
        self.start = start
        self.done = after
        self.outstanding.clear()
        self.acked.clear()
        self.lost.clear()

    def give(self, offsets: Sequence[int]) -> None:
        """These go out, in this order."""
        self.ahead = False
        if self.lost:
            self._found(offsets)
            offsets = [offset for offset in offsets if not self.outstanding or offset > self.outstanding[-1]]
        self.outstanding.extend(offsets)

    def _found(self, offsets: Sequence[int]) -> None:
        """Of what was lost, these are given again; what lies before them and is not there any more never will be."""
        gone = [offset for offset in sorted(self.lost) if offset <= offsets[-1]]
        self.lost.difference_update(gone)
        for offset in gone:
            if offset not in offsets:
                self.acknowledge(offset)

    def acknowledge(self, offset: int) -> bool:
        """One is done with; whether everything up to some offset is, that was not before."""
        outstanding = self.outstanding
        if not outstanding or outstanding[0] != offset:
            if offset > self.done:
                self.acked.add(offset)
            return False
        self.done = outstanding.popleft()
        acked = self.acked
        while acked and outstanding and outstanding[0] in acked:
            self.done = outstanding.popleft()
            acked.discard(self.done)
        return True

    def resume(self, inflight: set[int]) -> set[int]:
        """Go on after `done`; what must not be given again, since it is in flight or was acknowledged."""
        outstanding = self.outstanding
        known = inflight | self.acked
        while outstanding and outstanding[-1] not in known:
            outstanding.pop()  # given, but never sent
        self.acked.intersection_update(outstanding)
        self.lost = set(outstanding) - known
        return known.intersection(outstanding)


class Ledger:
    """All marks, and their way into the store."""

    def __init__(
        self,
        store: Store,
        interval: float,
        now: Callable[[], float],
        retention: Callable[[str], float],
        spawn: Spawn,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.interval = interval
        self._store = store
        self._now = now
        self._retention = retention
        self._spawn = spawn
        self._counters = counters
        self._log = log
        self._marks: dict[str, dict[str, Mark]] = {}  # by client, and the rest of the filter
        self._by_stream: dict[str, dict[Mark, None]] = {}
        self._changed: dict[Mark, None] = {}  # to be written when the interval is over
        self._urgent: dict[Mark, None] = {}  # to be written at once
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._failing = False
        self._ending = False

    # -- marks

    async def load(self) -> None:
        """Read what a node before this one has written."""
        async for key, value in self._store.records.scan(COLLECTION, self._now()):
            stream, offset, client = key.split("/", 2)
            try:
                stored = _decode(value)
            except (msgspec.MsgspecError, ValueError) as error:
                self._counters["progress_unreadable"] += 1
                self._log.error("stream_progress_unreadable", key=key, error=str(error))
                continue
            mark = self._add(client, stream, offset)
            mark.done, mark.ahead = stored.offset, stored.ahead
            mark.written = True

    def __len__(self) -> int:
        return sum(map(len, self._marks.values()))

    def find(self, client: str, stream: str, offset: str) -> Mark | None:
        return self._marks.get(client, {}).get(f"{stream}/{offset}")

    def new(self, client: str, stream: str, offset: str) -> Mark:
        """A mark for a new subscription; one from before is forgotten."""
        old = self.find(client, stream, offset)
        mark = self._add(client, stream, offset)
        if old is not None:
            old.gone = True
            mark.written = old.written
            self._by_stream[stream].pop(old, None)
            self._changed.pop(old, None)
            self._urgent.pop(old, None)
        return mark

    def _add(self, client: str, stream: str, offset: str) -> Mark:
        mark = Mark(client, stream, offset)
        self._marks.setdefault(client, {})[f"{stream}/{offset}"] = mark
        self._by_stream.setdefault(stream, {})[mark] = None
        return mark

    def of_stream(self, stream: str) -> list[Mark]:
        """All marks in a stream."""
        return list(self._by_stream.get(stream, ()))

    def forget(self, mark: Mark) -> None:
        """Its subscription has ended."""
        if self._remove(mark) and mark.written:
            self.hurry(mark)

    def _remove(self, mark: Mark) -> bool:
        """Whether it was there."""
        marks = self._marks.get(mark.client, {})
        rest = f"{mark.stream}/{mark.offset}"
        if marks.get(rest) is not mark:
            return False
        del marks[rest]
        if not marks:
            del self._marks[mark.client]
        in_stream = self._by_stream[mark.stream]
        del in_stream[mark]
        if not in_stream:
            del self._by_stream[mark.stream]
        mark.gone = True
        self._changed.pop(mark, None)
        self._urgent.pop(mark, None)
        return True

    def forget_client(self, client: str) -> None:
        """Its session has ended."""
        for mark in list(self._marks.get(client, {}).values()):
            self.forget(mark)

    def forget_stream(self, stream: str) -> list[Mark]:
        """It is deleted; what was known of it, for `erase`."""
        return [mark for mark in self.of_stream(stream) if self._remove(mark)]

    async def erase(self, marks: Sequence[Mark]) -> None:
        """Delete the records of marks that were forgotten; done when the store has done it."""
        written = [mark.stored for mark in marks if mark.written]
        for start in range(0, len(written), BATCH):
            batch = self._store.batch()
            for key in written[start : start + BATCH]:
                batch.delete(COLLECTION, key)
            await batch.commit()

    # -- into the store

    def changed(self, mark: Mark) -> None:
        """Write it within an interval."""
        if mark.kept and not mark.gone:
            self._changed[mark] = None
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self.interval, self._due)

    def leave(self, mark: Mark) -> None:
        """Its client goes away: write now what has changed."""
        if mark in self._changed:
            self.hurry(mark)

    def hurry(self, mark: Mark) -> None:
        """Write it now."""
        if mark.kept:
            self._changed.pop(mark, None)
            self._urgent[mark] = None
            self._write_soon()

    def _due(self) -> None:
        self._timer = None
        self._urgent.update(self._changed)
        self._changed.clear()
        self._write_soon()

    def _write_soon(self) -> None:
        if self._writing is None and self._urgent:
            self._writing = self._spawn(self._write(), "progress")

    async def _write(self) -> None:
        try:
            while self._urgent:
                some = list(islice(self._urgent, BATCH))
                for mark in some:
                    del self._urgent[mark]
                if not await self._write_some(some):
                    self._urgent = dict.fromkeys(some) | self._urgent
                    if self._ending:
                        return
                    await asyncio.sleep(RETRY)
        finally:
            self._writing = None

    async def _write_some(self, marks: list[Mark]) -> bool:
        now = self._now()
        batch = self._store.batch()
        for mark in marks:
            if not mark.gone:
                retention = self._retention(mark.stream)
                value = _encode(_Stored(mark.done, now, mark.ahead))
                batch.put(COLLECTION, mark.stored, value, now + retention + DAY if retention else 0.0)
                mark.written = True
            elif self._marks.get(mark.client, {}).get(f"{mark.stream}/{mark.offset}") is None:
                batch.delete(COLLECTION, mark.stored)
        try:
            await batch.commit()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            self._counters["progress_failed"] += 1
            if not self._failing:
                self._failing = True
                self._log.error("stream_progress_not_written", marks=len(marks), error=str(error))
            return False
        self._failing = False
        self._counters["progress_written"] += len(marks)
        return True

    async def settle(self) -> None:
        """Write everything, for the last time; what the store does not take is read again by those it concerns."""
        self._ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._due()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=LAST_ATTEMPT)
        if self._urgent:
            self._log.warning("stream_progress_left", marks=len(self._urgent))
