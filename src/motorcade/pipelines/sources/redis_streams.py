"""A stream of Redis itself, such as `messages:processed`, as rows.

An offset of Spark is {"id": "1760000000000-0", "entries": n}: everything up to and with that id was read, and so many
entries had been added up to there. The count tells what a trim has taken: Redis knows how many entries were ever added
and how many are there, but not which ones are gone.

Redis cannot say which entry is the thousandth, so the end of a bounded batch is found by going over the entries inside
the server, and tasks share a range by time, which ids begin with, not by the number of rows.

Rule 1: entries removed one by one (XDEL) from the part that was not read yet count as gone, when everything before them
        is gone too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa
import structlog

from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources import columns
from motorcade.pipelines.sources.messages import FRESH, MAX_PARTITIONS, Offset, TrimmedError
from motorcade.pipelines.sources.options import Edge, Lost, Missing, Moment, Place, ReadOptions
from motorcade.pipelines.sources.store_cache import store_cache
from motorcade.storage.redis_reader import ORIGIN, EntryId, NativeExtent, NativeReader

log = structlog.get_logger("motorcade.pipelines")


class Range(NamedTuple):
    """The range that a task reads."""

    after: str  #: id
    last: str  #: id; it is part of the range
    start: str  #: of the whole batch, with the number of entries up to there
    entries: int


_HIGHEST: Final = 2**64 - 1


def split(after: EntryId, last: EntryId, parts: int) -> list[tuple[EntryId, EntryId]]:
    """Return ranges of the same number of milliseconds; one that begins and ends in the same is not divided."""
    first = after.milliseconds
    span = last.milliseconds - first
    parts = max(1, min(parts, span))
    cuts = [EntryId(first + span * part // parts, _HIGHEST) for part in range(1, parts)]
    edges = [after, *cuts, last]
    return list(pairwise(edges))


class RedisStreamReader:
    """Plans and reads; made in every process."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = names
        self._seen: NativeExtent | None = None
        self._looked = 0.0  #: when; of the monotonic clock

    # -- on the driver

    def begin(self) -> Offset:
        extent = self._extent()
        return self._offset(self._after(self._options.starting, extent), extent)

    def end(self, start: Offset) -> Offset:
        extent = self._extent()
        after = EntryId.parse(str(start["id"]))
        self._check(after, int(start["entries"]), extent)
        ending = self._options.ending
        last = self._after(ending, extent) if isinstance(ending, Edge | Moment) else EntryId.parse(ending)
        # The count is not needed: nothing goes on from here.
        return {"id": str(max(after, min(last, extent.last))), "entries": 0}

    def newest(self) -> Offset:
        extent = self._extent()
        return {"id": str(extent.last), "entries": extent.added}

    def next(self, start: Offset, most: int | None, target: Offset | None) -> Offset:
        after, entries = EntryId.parse(str(start["id"])), int(start["entries"])
        extent = self._extent()
        self._check(after, entries, extent)
        last, added = extent.last, extent.added
        if target is not None:
            last, added = EntryId.parse(str(target["id"])), int(target["entries"])
        if last <= after:
            return start
        if most is None:
            return {"id": str(last), "entries": added}
        end, count = self._reader().stride(self._options.name, after, last, most)
        if count < most:
            return {"id": str(last), "entries": added}
        gone = self._gone(after, entries, extent)
        return {"id": str(end), "entries": entries + gone + count}

    def ranges(self, start: Offset, end: Offset) -> list[Range]:
        after, last = EntryId.parse(str(start["id"])), EntryId.parse(str(end["id"]))
        if last <= after:
            return []
        extent = self._extent()
        first = max(after, extent.first.before()) if extent.first is not None else after
        edges = split(first, last, self._parts(first, last, extent)) if first < last else [(after, last)]
        edges[0] = (after, edges[0][1])
        return [Range(str(low), str(high), str(start["id"]), int(start["entries"])) for low, high in edges]

    def _parts(self, after: EntryId, last: EntryId, extent: NativeExtent) -> int:
        """Return the number of tasks, if entries are spread evenly."""
        whole = max(1, extent.last.milliseconds - (extent.first or after).milliseconds)
        rows = extent.length * min(1.0, (last.milliseconds - after.milliseconds + 1) / whole)
        return min(MAX_PARTITIONS, max(1, math.ceil(rows / self._options.rows_per_partition)))

    def _extent(self) -> NativeExtent:
        now = time.monotonic()
        if self._seen is None or now - self._looked >= FRESH:
            self._seen, self._looked = self._reader().extent(self._options.name), now
            if not self._seen.exists and self._options.if_missing is Missing.FAIL:
                raise PipelineError(
                    f"the Redis stream {self._options.name!r} is not there: it has another name, or nothing has come "
                    "to it yet. Look at the name; the option if_missing=empty waits for the first entry"
                )
        return self._seen

    def _after(self, place: Place, extent: NativeExtent) -> EntryId:
        """Return the id after which `place` begins."""
        match place:
            case Edge.EARLIEST:
                return extent.first.before() if extent.first is not None else extent.last
            case Edge.LATEST:
                return extent.last
            case Moment(moment):
                return EntryId(max(0, round(moment * 1000)), 0).before()
            case _:
                return EntryId.parse(place).before()

    def _offset(self, after: EntryId, extent: NativeExtent) -> Offset:
        """Return an offset with the entries up to it; they are counted once, and only for a place in between."""
        removed = extent.added - extent.length
        if extent.first is None or after >= extent.last:
            return {"id": str(after), "entries": extent.added}
        if after < extent.first:
            return {"id": str(after), "entries": removed}
        _, count = self._reader().stride(self._options.name, ORIGIN, after, extent.length)
        return {"id": str(after), "entries": removed + count}

    @staticmethod
    def _gone(after: EntryId, entries: int, extent: NativeExtent) -> int:
        """Return how many entries were added after `after` and are gone."""
        if extent.first is not None and extent.first <= after:
            return 0
        return max(0, extent.added - extent.length - entries)

    def _check(self, after: EntryId, entries: int, extent: NativeExtent) -> None:
        if entries > extent.added:
            raise PipelineError(
                f"the Redis stream {self._options.name!r} ends at {extent.last}, but was read up to {after}: it was "
                "recreated since, or this is another server; begin with a new checkpoint"
            )
        gone = self._gone(after, entries, extent)
        if not gone:
            return
        if self._options.on_trimmed is Lost.FAIL:
            raise self._trimmed(after, extent, gone)
        log.warning("stream_trimmed", stream=self._options.name, after=str(after), skipped=gone)

    def _trimmed(self, after: EntryId, extent: NativeExtent, gone: int) -> TrimmedError:
        return TrimmedError(
            f"the Redis stream {self._options.name!r} was trimmed: {gone} entries after {after} and before "
            f"{extent.first or 'its end'} are gone and were not read. Let the stream keep more, or read more often; "
            "the option on_trimmed=skip goes on without them"
        )

    # -- in a task

    def read(self, part: Range) -> Iterator[pa.RecordBatch]:
        reader = self._reader()
        after, last = EntryId.parse(part.after), EntryId.parse(part.last)
        self._check_overtaken(reader, part, after)
        reached = after
        for page in reader.pages(self._options.name, after, last):
            reached = EntryId.parse(page.ids[0])
            yield columns.entries(self._names, page.ids, page.fields)
        # A trim that has come further than the beginning of the last page may have been there before us.
        self._check_overtaken(reader, part, reached)

    def _check_overtaken(self, reader: NativeReader, part: Range, reached: EntryId) -> None:
        """Raise if a trim since the planning has removed rows that were not read."""
        extent = reader.extent(self._options.name)
        if extent.first is not None and extent.first <= reached:
            return
        gone = self._gone(EntryId.parse(part.start), part.entries, extent)
        if not gone:
            return
        if self._options.on_trimmed is Lost.FAIL:
            raise self._trimmed(reached, extent, gone)
        log.warning("stream_trimmed", stream=self._options.name, after=str(reached), at_most=gone)

    def _reader(self) -> NativeReader:
        return store_cache.take(self._options.store, NativeReader)
