"""How far each client has read each stream: places in memory, and what is committed in the store.

    subscription ─▶ Mark ──┐
    subscription ─▶ Mark ──┴─ the one farthest behind ─▶ Progress ─▶ record
                             of one client, in one stream

    collection `stream-progress`, key {stream}/{client id}:  [1, offset, time, ahead]

A `Mark` is the place of one subscription in this process: up to where everything was acknowledged, which messages are
in flight, and which were acknowledged before older ones. Marks live as long as their session, those of clients that are
away too. A `Progress` belongs to the client id, whatever session it has. It outlives UNSUBSCRIBE, the session and the
node, and is where a subscription without a position goes on.

`offset` is the highest one up to which everything was acknowledged, `ahead` says that the client has asked for one that
is not there yet, and waits for it. (Without it, an offset beyond the end means that the store has lost records: a Redis
that failed over, say. The reader goes on at the end then.)

Rule 1: acknowledgements change the mark at once and the store later: all progress that has changed goes in one batch,
        each at most once per interval; that of clients that leave goes at once. One batch is under way at a time, so a
        record is never overwritten by an older one.
Rule 2: progress goes back only if the client begins farther back, by naming a position, or if the store has lost
        what was there.
Rule 3: with several subscriptions of one client to one stream, progress is that of the one farthest behind. Who
        unsubscribes no longer counts, unless it was the last. What ends with its session counts until the client
        subscribes again: it would miss something otherwise.
Rule 4: progress goes with its stream, or when nothing was committed for the retention of the stream; while there is a
        subscription, it is committed again in time (`sweep`). There are at most `max_progress` per stream. A client
        that finds no room reads like everybody else, but nothing of it is committed. That holds for clients whose id
        the broker has made up, too: hardly anybody comes back by such a name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import structlog

from motorcade.extension.gathered import BATCH, Gathered
from motorcade.extension.plugin import Spawn
from motorcade.plugins.streams.position import Position
from motorcade.storage.ports import Batch, Store

COLLECTION: Final = "stream-progress"
RETRY: Final = 5.0  #: seconds until a batch that failed is tried again
LASTS: Final = 30 * 86400.0  #: seconds that progress in a stream without a retention is kept after the last commit
SWEEPS: Final = 4  #: looks at what has expired, in the time that progress is kept
MAX_KEY: Final = 65_535  #: bytes; nothing is committed of a client whose id leaves no room for the name of the stream
MADE_UP: Final = "auto-"  #: ids that the broker gives to clients without one begin so


class _Stored(msgspec.Struct, array_like=True, tag=1, gc=False):
    offset: int
    time: float
    ahead: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode


class Progress:
    """How far one client has read one stream, whatever session it has."""

    __slots__ = ("ahead", "client", "ended", "gone", "marks", "offset", "stream", "time", "written")

    def __init__(self, stream: str, client: str) -> None:
        self.stream = stream
        self.client = client
        self.offset = 0
        self.ahead = False
        self.time = 0.0  #: of the last commit
        self.written = False  #: there may be a record
        self.gone = False
        self.ended = False  #: a session has ended here, and the client has not begun anew since (rule 3)
        self.marks: list[Mark] = []  #: of its subscriptions that have begun

    @property
    def key(self) -> str:
        """Of its record."""
        return f"{self.stream}/{self.client}"

    def gather(self) -> None:
        """Bring it up to date."""
        if self.marks:
            last = min(self.marks, key=_done)
            if not self.ended or last.done < self.offset:
                self.offset, self.ahead = last.done, last.ahead


class Mark:
    """The place of one subscription."""

    __slots__ = (
        "acked",
        "ahead",
        "client",
        "done",
        "gone",
        "lost",
        "offset",
        "outstanding",
        "position",
        "progress",
        "start",
        "stream",
    )

    def __init__(self, client: str, stream: str, offset: str) -> None:
        self.client = client
        self.stream = stream
        self.offset = offset  #: as written in the filter; "": none
        self.progress: Progress | None = None  #: what it is part of; none before it has begun, or if there is no room
        self.gone = False
        self.position: Position | None = None  #: where to begin; None: after `done`
        self.start = 0  #: which beginning this is: acknowledgements of messages from before it do not count
        self.ahead = False  #: it begins with an offset that was not there yet
        self.done = 0  #: everything up to it was acknowledged
        self.outstanding: deque[int] = deque()  #: offsets given and not known to be acknowledged up to, in order
        self.acked: set[int] = set()  #: those of them that are acknowledged
        self.lost: set[int] = set()  #: those of them that were sent, but of which the session knows nothing any more

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
        self.acknowledge([offset for offset in gone if offset not in offsets])

    def acknowledge(self, offsets: Iterable[int]) -> bool:
        """These are done with; whether everything up to some offset is, that was not before."""
        before = self.done
        outstanding, acked = self.outstanding, self.acked
        for offset in offsets:
            if outstanding and outstanding[0] == offset:
                self.done = outstanding.popleft()
                while acked and outstanding and outstanding[0] in acked:
                    self.done = outstanding.popleft()
                    acked.discard(self.done)
            elif offset > self.done:
                acked.add(offset)
        return self.done > before

    def resume(self, inflight: set[int]) -> set[int]:
        """Go on after `done`; what must not be given again, since it is in flight or was acknowledged."""
        outstanding = self.outstanding
        known = inflight | self.acked
        while outstanding and outstanding[-1] not in known:
            outstanding.pop()  # given, but never sent
        self.acked.intersection_update(outstanding)
        self.lost = set(outstanding) - known
        return known.intersection(outstanding)


def _done(mark: Mark) -> int:
    return mark.done


class Ledger:
    """All marks and all progress, and their way into the store."""

    def __init__(
        self,
        store: Store,
        interval: float,
        max_progress: int,
        now: Callable[[], float],
        retention: Callable[[str], float],
        spawn: Spawn,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.interval = interval
        self.max_progress = max_progress
        self._store = store
        self._now = now
        self._retention = retention
        self._counters = counters
        self._log = log
        self.gathered = Gathered(self._write, lambda: self.interval, RETRY, spawn, "progress")
        self._marks: dict[str, dict[tuple[str, str], Mark]] = {}  # by client; stream, and offset in the filter
        self._by_stream: dict[str, dict[Mark, None]] = {}
        self._progress: dict[str, OrderedDict[str, Progress]] = {}  # by stream; client; the last commit last
        self._swept: dict[str, float] = {}  # by stream: when it was looked at
        self._failing = False

    async def load(self) -> None:
        """Read what a node before this one has written."""
        found: list[Progress] = []
        async for key, value in self._store.records.scan(COLLECTION, self._now()):
            stream, _, client = key.partition("/")
            try:
                stored = _decode(value)
            except (msgspec.MsgspecError, ValueError) as error:
                self._counters["progress_unreadable"] += 1
                self._log.error("stream_progress_unreadable", key=key, error=str(error))
                continue
            progress = Progress(stream, client)
            progress.offset, progress.time, progress.ahead = stored.offset, stored.time, stored.ahead
            progress.written = True
            found.append(progress)
        for progress in sorted(found, key=lambda each: each.time):
            self._progress.setdefault(progress.stream, OrderedDict())[progress.client] = progress

    def __len__(self) -> int:
        """How much progress there is."""
        return sum(map(len, self._progress.values()))

    # -- places

    def find(self, client: str, stream: str, offset: str) -> Mark | None:
        return self._marks.get(client, {}).get((stream, offset))

    def new(self, client: str, stream: str, offset: str) -> Mark:
        """A mark for a new subscription; one from before is forgotten."""
        old = self.find(client, stream, offset)
        if old is not None:
            self.forget(old)
        mark = Mark(client, stream, offset)
        self._marks.setdefault(client, {})[stream, offset] = mark
        self._by_stream.setdefault(stream, {})[mark] = None
        return mark

    def of_stream(self, stream: str) -> list[Mark]:
        """All marks in a stream."""
        return list(self._by_stream.get(stream, ()))

    def forget(self, mark: Mark, *, ended: bool = False) -> None:
        """Its subscription has ended, by itself or with its session. What is committed stays."""
        if not self._remove(mark):
            return
        progress = mark.progress
        if progress is not None and mark in progress.marks:
            if ended or len(progress.marks) == 1:
                progress.gather()
                progress.ended = progress.ended or ended
            progress.marks.remove(mark)
            if progress.marks:
                self.changed(mark)
            self.leave(mark)

    def _remove(self, mark: Mark) -> bool:
        """Whether it was there."""
        marks = self._marks.get(mark.client, {})
        if marks.get((mark.stream, mark.offset)) is not mark:
            return False
        del marks[mark.stream, mark.offset]
        if not marks:
            del self._marks[mark.client]
        in_stream = self._by_stream[mark.stream]
        del in_stream[mark]
        if not in_stream:
            del self._by_stream[mark.stream]
        mark.gone = True
        return True

    def forget_client(self, client: str) -> None:
        """Its session has ended."""
        for mark in list(self._marks.get(client, {}).values()):
            self.forget(mark, ended=True)

    # -- progress

    def committed(self, client: str, stream: str) -> Progress | None:
        """What a subscription without a position goes on with."""
        in_stream = self._progress.get(stream)
        progress = in_stream.get(client) if in_stream is not None else None
        if progress is not None:
            progress.gather()
            if progress.marks or progress.time + self._lasts(stream) > self._now():
                return progress
            self._drop(progress)
        return None

    def of_clients(self, stream: str) -> Iterable[Progress]:
        """All progress in a stream."""
        return self._progress[stream].values() if stream in self._progress else ()

    def begun(self, mark: Mark) -> None:
        """A subscription has its place: its client's progress follows it from now on."""
        progress = self.committed(mark.client, mark.stream) or self._add(mark)
        if progress is None:
            return
        before = progress.offset, progress.ahead
        mark.progress = progress
        progress.marks.append(mark)
        progress.ended = False
        progress.gather()
        old = progress.time + self._lasts(mark.stream) / 2 <= self._now()
        if old or not progress.written or before != (progress.offset, progress.ahead):
            self.gathered.hurry(progress)

    def _add(self, mark: Mark) -> Progress | None:
        """None: it gets none."""
        if mark.client.startswith(MADE_UP):
            return None
        progress = Progress(mark.stream, mark.client)
        if len(progress.key.encode(errors="replace")) > MAX_KEY:
            self._counters["progress_unwritable"] += 1
            return None
        if len(self._progress.get(mark.stream, ())) >= self.max_progress:
            self._counters["refused_max_progress"] += 1
            return None
        progress.time = self._now()
        self._progress.setdefault(mark.stream, OrderedDict())[mark.client] = progress
        return progress

    def _drop(self, progress: Progress) -> None:
        progress.gone = True
        self.gathered.drop(progress)
        in_stream = self._progress[progress.stream]
        del in_stream[progress.client]
        if not in_stream:
            del self._progress[progress.stream]
            self._swept.pop(progress.stream, None)

    def _lasts(self, stream: str) -> float:
        """Seconds that progress is kept after the last commit."""
        return self._retention(stream) or LASTS

    def sweep(self) -> None:
        """Forget what the store forgets by itself; commit again what must not be forgotten. May be called often."""
        now = self._now()
        for stream in list(self._progress):
            lasts = self._lasts(stream)
            if now >= self._swept.get(stream, 0.0) + lasts / SWEEPS:
                self._swept[stream] = now
                self._sweep(stream, now, lasts)

    def _sweep(self, stream: str, now: float, lasts: float) -> None:
        for progress in list(self._progress[stream].values()):
            if progress.time + lasts / 2 > now:
                return  # so are all that follow
            if progress.marks:
                self.gathered.change(progress)
            elif progress.time + lasts <= now:
                self._drop(progress)

    def forget_stream(self, stream: str) -> list[str]:
        """It is deleted; the keys of what was committed, for `erase`."""
        for mark in self.of_stream(stream):
            self._remove(mark)
        written = []
        for progress in list(self.of_clients(stream)):
            self._drop(progress)
            if progress.written:
                written.append(progress.key)
        return written

    async def erase(self, keys: Sequence[str]) -> None:
        """Delete records of progress that was forgotten; done when the store has done it."""
        for start in range(0, len(keys), BATCH):
            batch = Batch()
            for key in keys[start : start + BATCH]:
                batch.delete(COLLECTION, key)
            await self._store.write(batch)

    # -- into the store

    def changed(self, mark: Mark) -> None:
        """Write its progress within an interval."""
        if mark.progress is not None and not mark.progress.gone:
            self.gathered.change(mark.progress)

    def leave(self, mark: Mark) -> None:
        """Its client goes away: write now what has changed."""
        if mark.progress is not None and self.gathered.waits(mark.progress):
            self.gathered.hurry(mark.progress)

    async def _write(self, some: list[Progress]) -> bool:
        now = self._now()
        batch = Batch()
        for progress in some:
            progress.gather()
            value = _encode(_Stored(progress.offset, now, progress.ahead))
            batch.put(COLLECTION, progress.key, value, now + self._lasts(progress.stream))
            progress.written = True
            progress.time = now
            self._progress[progress.stream].move_to_end(progress.client)
        try:
            await self._store.write(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            self._counters["progress_failed"] += 1
            if not self._failing:
                self._failing = True
                self._log.error("stream_progress_not_written", count=len(some), error=str(error))
            return False
        self._failing = False
        self._counters["progress_written"] += len(some)
        return True

    async def settle(self) -> None:
        """Write everything, for the last time; what the store does not take is read again by those it concerns."""
        left = await self.gathered.settle()
        if left:
            self._log.warning("stream_progress_left", count=left)
