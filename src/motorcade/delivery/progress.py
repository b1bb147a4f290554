"""The progress of each consumer of a log: cursors in memory, and the committed number in the store.

    subscription ─▶ Cursor ──┐
    subscription ─▶ Cursor ──┴─ the one farthest behind ─▶ Progress ─▶ record, written behind
                               of one client, in one log

    collection and key by `LogKey`:  [1, number, time of the last change], and `true` if the client waits for a number
                                     that is not there yet; where several members write it (`ProgressOptions.shared`)
                                     [2, rank, time of the last change, `true` or `false`]

Rule 1: acknowledgements change the cursor at once and the store within an interval; what a consumer that leaves has
        acknowledged is written now. So what is lost with the process is at most an interval old: it is delivered again.
Rule 2: what is in memory is newer than what is stored until it is written. A `Progress` stays in memory while it is
        in use, has a cursor, or is not written yet, and a consumer that comes back finds it. Everything else is read
        from the store when it is needed.
Rule 3: progress follows its cursors. It goes back only if a consumer begins farther back. A rewind sets it and takes
        its cursors away: what was given before the rewind changes it no more.
Rule 4: of several cursors of one client the one farthest behind counts. One that is closed counts no more, unless it
        was the last. Those that end with their session count until the client subscribes again.
Rule 5: a record goes with its log; or, where `lasts` says so, that long after it was last written. While there is a
        cursor it is written again in time (`sweep`). New consumers beyond `max_consumers` of a log, and clients whose
        id the broker has made up (they do not come back), are served like others, but nothing of them is stored.
Rule 6: where several members write it, the one that a client has left may be late. So a record has a rank, generation
        and number, and the store keeps the one with the higher rank. Acknowledgements raise the number. A reset, a
        smaller number or a rewind begins a generation: the time of that, in milliseconds, and more than the
        one before. It is not undone by what comes late, and needs no fence. A consumer that comes back is read again.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from motorcade.delivery.cursor import Cursor
from motorcade.delivery.writebehind import BATCH, WriteBehind
from motorcade.extension.plugin import Spawn
from motorcade.storage.ports import Batch, Store, StoreError

MADE_UP: Final = "auto-"  #: ids that the broker gives to clients without one begin so
MAX_KEY: Final = 65_535  #: bytes; nothing is stored of a client whose id leaves no room for the name of the log
SWEEPS: Final = 4  #: looks at what expires, in the time that progress lasts
COUNTING: Final = 1000  #: records counted before others have their turn
LOAD_AGAIN: Final = 1.0  #: seconds until a record that could not be read is tried again


class LogKey(msgspec.Struct, frozen=True):
    """The place in the store of the progress of a log's consumers."""

    collection: str
    name: str
    single: bool = False  #: the log has one consumer, of the same name; its progress goes with the log

    def of(self, client: str) -> str:
        """Return the key of a client's record."""
        return self.name if self.single else f"{self.name}/{client}"


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The contents of a progress record."""

    number: int  #: everything up to it was acknowledged
    time: float  #: of the last change
    ahead: bool = False
    generation: int = 0  #: rule 6


class _Alone(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A record that one member writes."""

    number: int
    time: float
    ahead: bool = False


class _Usual(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The same without what is rare."""

    number: int
    time: float


class _Ranked(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A record that several members write: no field is left out, so that ranks lie at the same place in all."""

    rank: bytes  #: generation and number
    time: float
    ahead: bool


_RANK: Final = struct.Struct(">QQ")
RANKED: Final = 4 + _RANK.size  #: bytes of a record up to the end of its rank

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Alone | _Ranked).decode


def encode(record: Stored, *, shared: bool) -> bytes:
    """Return the contents of a record."""
    if shared:
        return _encode(_Ranked(_RANK.pack(record.generation, record.number), record.time, record.ahead))
    if record.ahead:
        return _encode(_Alone(record.number, record.time, ahead=True))
    return _encode(_Usual(record.number, record.time))


def decode(value: bytes) -> Stored:
    """Return what a record says."""
    record = _decode(value)
    if isinstance(record, _Alone):
        return Stored(record.number, record.time, record.ahead)
    generation, number = _RANK.unpack(record.rank)
    return Stored(number, record.time, record.ahead, generation)


class Progress:
    """The progress of one client in one log, whatever session it has."""

    __slots__ = (
        "_writing",
        "ahead",
        "client",
        "cursors",
        "generation",
        "kept",
        "loaded",
        "log",
        "number",
        "stored",
        "time",
        "users",
        "written_at",
    )

    def __init__(self, log: LogKey, client: str) -> None:
        self.log = log
        self.client = client
        self.number = 0  #: everything up to it was acknowledged; as of the last `gather`
        self.generation = 0  #: rule 6
        self.ahead = False
        self.time = 0.0  #: of the last change; 0: never
        self.cursors: dict[str, Cursor] = {}  #: of its subscriptions, by a name of the feature; begun or not
        self.stored: Stored | None = None  #: what is in the store
        self.written_at = 0.0  #: the record lasts from then on
        self.loaded = False
        self.kept = True  #: it is stored at all (rule 5)
        self.users = 0
        self._writing: Stored | None = None

    @property
    def exists(self) -> bool:
        """Return True if the client has begun once, and that is or will be stored."""
        return self.kept and (self.stored is not None or self.time > 0)

    def gather(self) -> None:
        """Bring it up to date (rule 4)."""
        begun = [cursor for cursor in self.cursors.values() if cursor.start]
        if begun:
            last = min(begun, key=_done)
            self.number, self.ahead = last.done, last.ahead

    def take(self, stored: Stored | None) -> None:
        """Note what was read, unless it was read or reset meanwhile."""
        if self.loaded:
            return
        self.loaded = True
        self.stored = stored
        mine = (self.generation, self.number)
        if stored is not None and (not self.time or (stored.generation, stored.number) > mine):
            self.number, self.time, self.ahead = stored.number, stored.time, stored.ahead
            self.generation = stored.generation
            self.written_at = stored.time  # at the earliest

    def record(self) -> Stored:
        """Return what is to be stored now."""
        self.gather()
        self._writing = Stored(self.number, self.time, self.ahead, self.generation)
        return self._writing

    def written(self, now: float) -> None:
        """Note that the record is stored."""
        self.stored, self.written_at = self._writing, now


def _done(cursor: Cursor) -> int:
    return cursor.done


@dataclass(frozen=True, slots=True)
class ProgressOptions:
    """The options of progress in which features differ."""

    feature: str  #: events in the log of the node begin so
    refused: str  #: counter of consumers beyond `max_consumers`
    waits: str  #: counter of failed attempts to read a record
    retry: float  #: seconds until a batch that failed is retried
    interval: Callable[[], float]  #: seconds at most until progress is stored
    max_consumers: Callable[[], int]  #: of one log whose progress is stored
    lasts: Callable[[LogKey], float]  #: seconds that a record lasts; 0: as long as the log
    shared: bool = False  #: other members write it too (rule 6)


class ProgressStore:
    """All progress that is in use, and its way into the store."""

    def __init__(
        self,
        store: Store,
        options: ProgressOptions,
        now: Callable[[], float],
        spawn: Spawn,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._store = store
        self._options = options
        self._now = now
        self._spawn = spawn
        self._counters = counters
        self._log = log
        self.unwritten = WriteBehind(store, self._fill, options.interval, options.retry, self._written)
        self._open: dict[LogKey, dict[str, Progress]] = {}
        self._consumers: dict[LogKey, tuple[int, float]] = {}  # how many have a record, and when they were counted
        self._swept: dict[LogKey, float] = {}
        self._failing = False

    def __len__(self) -> int:
        """Return how many consumers are in memory."""
        return sum(map(len, self._open.values()))

    # -- in use

    def open(self, log: LogKey, client: str) -> Progress:
        """Return the progress of a consumer, perhaps not loaded yet; to be given back with `close`."""
        progress = self.peek(log, client)
        if progress is None:
            progress = self._open.setdefault(log, {})[client] = Progress(log, client)
        elif self._options.shared and not progress.users and not progress.cursors:
            progress.loaded = False  # it waits to be written; another member may have gone on meanwhile
        progress.users += 1
        return progress

    def peek(self, log: LogKey, client: str) -> Progress | None:
        """Return the progress of a consumer if it is in memory."""
        return self._open.get(log, {}).get(client)

    def of_log(self, log: LogKey) -> list[Progress]:
        """Return what is in memory of a log."""
        return list(self._open.get(log, {}).values())

    def close(self, progress: Progress) -> None:
        """End a use: what has changed is written now."""
        progress.users -= 1
        self.leave(progress)

    def leave(self, progress: Progress) -> None:
        """Write now what has changed; drop it from memory if it is needed no more (rule 2).

        Where others write it too: before the home of the client is given up, which the store does in the same order, so
        that the member that claims the client reads it.
        """
        if self._options.shared:
            self.unwritten.write_alone(progress)
        else:
            self.unwritten.hurry_changed(progress)
        self._drop_unused(progress)

    def _drop_unused(self, progress: Progress) -> None:
        if progress.users or progress.cursors or progress in self.unwritten:
            return
        of_log = self._open.get(progress.log, {})
        if of_log.get(progress.client) is progress:
            del of_log[progress.client]
            if not of_log:
                del self._open[progress.log]
                self._swept.pop(progress.log, None)

    # -- read

    def load_soon(self, progress: Progress, then: Callable[[], None]) -> None:
        """Load it, as long as that takes, and call back."""

        async def load() -> None:
            while progress.users and not progress.loaded:
                try:
                    await self.load(progress)
                except StoreError:
                    self._counters[self._options.waits] += 1
                    await asyncio.sleep(LOAD_AGAIN)
            then()

        self._spawn(load, "load")

    async def load(self, progress: Progress) -> None:
        """Read what is stored, unless it is known; `StoreError`."""
        if progress.loaded:
            return
        stored = await self.read(progress.log, progress.client)
        if stored is None and not progress.loaded:
            await self._admit(progress)
        progress.take(stored)

    async def read(self, log: LogKey, client: str) -> Stored | None:
        """Return what is stored of a consumer."""
        key = log.of(client)
        value = None
        if _fits(key):
            value = await self._store.records.get(log.collection, key, self._now())
        return self._decode(key, value) if value is not None else None

    def _decode(self, key: str, value: bytes) -> Stored | None:
        """Return what a record says; one that cannot be read counts as none."""
        try:
            return decode(value)
        except (msgspec.MsgspecError, ValueError) as error:
            self._counters["progress_unreadable"] += 1
            self._log.error(f"{self._options.feature}_progress_unreadable", key=key, error=str(error))
            return None

    async def _admit(self, progress: Progress) -> None:
        """Decide whether a new consumer is stored (rule 5)."""
        log = progress.log
        if log.single:
            return
        if progress.client.startswith(MADE_UP):
            progress.kept = False
            return
        if not _fits(log.of(progress.client)):
            self._counters["progress_unwritable"] += 1
            progress.kept = False
            return
        number, counted_at = self._consumers.get(log, (-1, 0.0))
        most = self._options.max_consumers()
        if number < 0 or (number >= most and self._now() >= counted_at + self._options.lasts(log) / SWEEPS):
            number, counted_at = await self._count(log), self._now()
        progress.kept = number < most
        self._consumers[log] = number + progress.kept, counted_at
        if not progress.kept:
            self._counters[self._options.refused] += 1
            self._log.warning(
                f"{self._options.feature}_progress_not_kept", log=log.name, client=progress.client, bound=most
            )

    async def _count(self, log: LogKey) -> int:
        number = 0
        async for _ in self._store.records.scan(log.collection, self._now(), f"{log.name}/"):
            number += 1
            if not number % COUNTING:
                await asyncio.sleep(0)
        return number

    async def consumers(self, log: LogKey) -> dict[str, Stored | None]:
        """Return what is stored of each consumer; None for one in memory of which nothing is stored yet."""
        found = {progress.client: progress.stored for progress in self.of_log(log)}
        if log.single:
            stored = await self.read(log, log.name)
            if stored is not None:
                found[log.name] = stored
            return found
        prefix = f"{log.name}/"
        async for key, value in self._store.records.scan(log.collection, self._now(), prefix):
            found[key.removeprefix(prefix)] = self._decode(key, value)
        return found

    # -- changes

    def begin(self, progress: Progress, *, reset: bool = False) -> None:
        """Commit where its cursors have begun, unless the store says the same, and will for a while.

        `reset`: begin a generation, since the client has named a position, or had none before.
        """
        before = progress.number
        progress.gather()
        if reset or progress.number < before:
            self._decide(progress)
        stored = progress.stored
        old = self._options.shared or progress.written_at + self._options.lasts(progress.log) / 2 <= self._now()
        if old or stored is None or (stored.number, stored.ahead) != (progress.number, progress.ahead):
            progress.time = self._now()
            if progress.kept:
                self.unwritten.hurry(progress)

    def changed(self, progress: Progress) -> None:
        """Write within an interval what its cursors say."""
        progress.time = self._now()
        if progress.kept:
            self.unwritten.change(progress)

    def remove(self, progress: Progress, name: str, cursor: Cursor) -> None:
        """Take a cursor away, since its subscription is closed (rule 4)."""
        if progress.cursors.get(name) is not cursor:
            return
        if len(progress.cursors) == 1:
            progress.gather()
        del progress.cursors[name]
        if progress.cursors and cursor.start:
            self.changed(progress)
        self.leave(progress)

    def end(self, progress: Progress) -> None:
        """Take all cursors away, since the session has ended (rule 4)."""
        progress.gather()
        progress.cursors.clear()
        self.leave(progress)

    def end_client(self, client: str) -> None:
        """Note that the session of a client has ended, in whatever logs it has cursors."""
        for of_log in list(self._open.values()):
            progress = of_log.get(client)
            if progress is not None:
                self.end(progress)

    def rewind(self, progress: Progress, number: int) -> None:
        """Set it (rule 3). Consumers must begin again."""
        progress.cursors.clear()
        progress.number, progress.ahead = number, False
        self._decide(progress)
        self.changed(progress)

    async def renew(self, progress: Progress) -> bool:
        """Take the generation that another member has begun (rule 6); False if there is none. `StoreError`.

        Consumers must begin again then.
        """
        stored = await self.read(progress.log, progress.client)
        if stored is None or stored.generation <= progress.generation:
            return False
        progress.cursors.clear()
        progress.loaded = False
        progress.take(stored)
        return True

    def _decide(self, progress: Progress) -> None:
        """Begin a generation (rule 6)."""
        if self._options.shared:
            progress.generation = max(progress.generation + 1, int(self._now() * 1000))

    def forget(self, log: LogKey, number: int = 0) -> list[str]:
        """Note that a log is deleted: write nothing of it, but for what comes later. Return clients, for `erase`."""
        clients = list(self._open.get(log, ()))
        for progress in self.of_log(log):
            progress.cursors.clear()
            progress.loaded = True
            progress.number, progress.ahead, progress.time, progress.stored = number, False, 0.0, None
            self.unwritten.drop(progress)
            self._drop_unused(progress)
        self._consumers.pop(log, None)
        return clients

    async def erase(self, log: LogKey, clients: Iterable[str] = ()) -> None:
        """Delete the records of a log that is deleted, those of `clients` too; done when the store has done it."""
        keys = [log.name] if log.single else [log.of(client) for client in {*clients, *await self.consumers(log)}]
        for start in range(0, len(keys), BATCH):
            batch = Batch()
            for key in keys[start : start + BATCH]:
                if _fits(key):
                    batch.delete(log.collection, key)
            await self._store.write(batch)

    def sweep(self) -> None:
        """Write again what must not expire (rule 5). May be called often."""
        now = self._now()
        for log in list(self._open):
            lasts = self._options.lasts(log)
            if lasts and now >= self._swept.get(log, 0.0) + lasts / SWEEPS:
                self._swept[log] = now
                for progress in self._open[log].values():
                    if progress.cursors and progress.exists and progress.written_at + lasts / 2 <= now:
                        self.unwritten.change(progress)

    # -- written

    async def flush(self, progress: Progress) -> None:
        """Write it now, if it has changed; done when it is stored. `StoreError` says that it is not yet."""
        await self.unwritten.flush(progress)

    def _fill(self, batch: Batch, some: Collection[Progress]) -> None:
        for progress in some:
            log, record = progress.log, progress.record()
            lasts = self._options.lasts(log)
            ends, shared = self._now() + lasts if lasts else 0.0, self._options.shared
            value = encode(record, shared=shared)
            batch.put(log.collection, log.of(progress.client), value, ends, rank=RANKED if shared else 0)

    def _written(self, some: Collection[Progress], error: BaseException | None) -> None:
        if error is not None:
            self._counters["progress_failed"] += 1
            if not self._failing:  # once until it succeeds again
                self._failing = True
                event = f"{self._options.feature}_progress_not_written"
                self._log.warning(event, count=len(some), error=str(error))
            return
        self._failing = False
        self._counters["progress_written"] += len(some)
        now = self._now()
        for progress in some:
            progress.written(now)
            self._drop_unused(progress)

    async def settle(self) -> None:
        """Write everything, for the last time; what the store does not take is delivered again."""
        left = await self.unwritten.settle()
        if left:
            self._log.warning(f"{self._options.feature}_progress_left", count=left)


def _fits(key: str) -> bool:
    return len(key.encode(errors="replace")) <= MAX_KEY
