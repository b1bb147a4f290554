"""A stream of Motorcade as rows: where to begin and to end, what a task reads, what is missing.

An offset of Spark is {"offset": n, "mark": …}: everything up to and with n was read, and that record looked so. By this
a stream that was recreated is distinguished from the one that was read. Tasks get ranges (after, last).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from motorcade.core.record import Record, RecordError, decode
from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources import columns
from motorcade.pipelines.sources.columns import JSON, Wanted
from motorcade.pipelines.sources.json_payloads import JsonPayloads
from motorcade.pipelines.sources.options import Edge, Lost, Missing, Moment, Place, ReadOptions
from motorcade.pipelines.sources.store_cache import store_cache
from motorcade.pipelines.sources.unpack import unpack
from motorcade.storage.readers import Extent, StoreReader, StreamPage, open_reader

log = structlog.get_logger("motorcade.pipelines")

Offset = dict[str, int | str]
Range = tuple[int, int]  #: after this one, up to and with that one

#: Tasks of one batch, however small the option wants them.
MAX_PARTITIONS: Final = 1000

#: Seconds for which what was seen is new enough. Spark asks for news every few milliseconds while there are none.
FRESH: Final = 0.2

#: Seconds that an executor waits until it sees what the driver has seen, for example over a network file system.
CATCH_UP: Final = 10.0


class TrimmedError(PipelineError):
    """Rows that were not read yet are gone."""


def split(after: int, last: int, rows: int) -> list[Range]:
    """Return ranges of about the same size, of at most so many rows as long as MAX_PARTITIONS allow it."""
    count = last - after
    parts = min(-(-count // rows), MAX_PARTITIONS)
    return [(after + count * part // parts, after + count * (part + 1) // parts) for part in range(parts)]


class StoredStreamReader:
    """Plans and reads; made in every process."""

    def __init__(self, options: ReadOptions, wanted: Wanted) -> None:
        self._options = options
        self._wanted = wanted
        self._names = wanted.stored()
        self._bodies = None if wanted.json is None else JsonPayloads(wanted.json)
        self._seen: Extent | None = None
        self._known: Offset = {}  #: the last place that was found to be as it was
        self._looked = 0.0  #: when; of the monotonic clock

    # -- on the driver

    def begin(self) -> Offset:
        """Return the offset before the first row."""
        return {"offset": self._after(self._options.starting, self._extent())}

    def end(self, start: Offset) -> Offset:
        """Return the last row of a read that ends."""
        extent = self._extent()
        self._check(int(start["offset"]), extent)
        ending = self._options.ending
        last = self._after(ending, extent) if isinstance(ending, Edge | Moment) else min(int(ending), extent.last)
        return {"offset": max(last, int(start["offset"]))}

    def newest(self) -> Offset:
        return {"offset": self._extent().last}

    def next(self, start: Offset, most: int | None, target: Offset | None) -> Offset:
        """Return the end of the next batch, of `most` rows; not beyond `target`."""
        after = int(start["offset"])
        extent = self._extent()
        self._check(after, extent)
        self._check_mark(start)
        last = min(extent.last, int(target["offset"])) if target is not None else extent.last
        if most is not None:
            # What is gone does not count.
            last = min(last, max(after, extent.floor - 1) + most)
        if last <= after:
            return start
        self._known = {"offset": last, **self._mark(last)}
        return self._known

    def ranges(self, start: Offset, end: Offset) -> list[Range]:
        return split(int(start["offset"]), int(end["offset"]), self._options.rows_per_partition)

    def _extent(self) -> Extent:
        now = time.monotonic()
        if self._seen is None or now - self._looked >= FRESH:
            reader = self._reader()
            reader.refresh()
            self._seen, self._looked = reader.extent(self._options.name), now
            self._check_exists(reader, self._seen)
        return self._seen

    def _check_exists(self, reader: StoreReader, extent: Extent) -> None:
        """Check that the stream exists: in the store from its first record on; before that, it may be declared."""
        if extent.last or self._options.if_missing is Missing.EMPTY or is_declared(reader, self._options.name):
            return
        there = ", ".join(reader.streams()) or "none"
        raise PipelineError(
            f"the stream {self._options.name!r} has no record in this store: there is no such stream (with records "
            f"there are: {there}), or nothing has come to it yet. Look at the name; the option if_missing=empty waits "
            "for the first record"
        )

    def _after(self, place: Place, extent: Extent) -> int:
        """Return the offset after which `place` begins."""
        match place:
            case Edge.EARLIEST:
                return extent.floor - 1
            case Edge.LATEST:
                return extent.last
            case Moment(moment):
                return max(self._reader().find(self._options.name, moment), extent.floor - 1)
            case _:
                after = max(int(place) - 1, 0)
                if after > extent.last:
                    raise PipelineError(
                        f"the stream {self._options.name!r} ends at offset {extent.last}; it cannot be read from "
                        f"{place} on"
                    )
                return after

    def _check(self, after: int, extent: Extent) -> None:
        """Raise if a read cannot go on after `after`."""
        if after > extent.last:
            raise PipelineError(
                f"the stream {self._options.name!r} ends at offset {extent.last}, but was read up to {after}: it was "
                "recreated since, or this is another store; begin with a new checkpoint"
            )
        if extent.floor > after + 1 and self._options.on_trimmed is Lost.FAIL:
            raise self._trimmed(after + 1, extent.floor - 1)

    def _check_mark(self, start: Offset) -> None:
        """Raise if the last record that was read is there and is not the same any more."""
        if "mark" not in start or start == self._known:
            return
        mark = self._mark(int(start["offset"]))
        if mark and mark["mark"] != start["mark"]:
            raise PipelineError(
                f"the stream {self._options.name!r} has another record at offset {start['offset']} than the one that "
                "was read: it was recreated since, or this is another store; begin with a new checkpoint"
            )
        self._known = start

    def _mark(self, number: int) -> Offset:
        """Return what identifies a record; nothing if it is not there."""
        for page in self._reader().pages(self._options.name, number - 1, number):
            return {"mark": hashlib.blake2b(page.values[0], digest_size=8).hexdigest()}
        return {}

    def _trimmed(self, first: int, last: int) -> TrimmedError:
        return TrimmedError(
            f"the stream {self._options.name!r} was trimmed: offsets {first} to {last} ({last - first + 1} records) "
            "are gone and were not read. Let the stream keep more, or read more often; the option on_trimmed=skip goes "
            "on without them"
        )

    # -- in a task

    def read(self, part: Range) -> Iterator[pa.RecordBatch]:
        after, last = part
        reader = self._reader()
        self._catch_up(reader, last)
        for page in reader.pages(self._options.name, after, last):
            if page.offsets[0] != after + 1:
                self._gap(reader, after, page.offsets[0] - 1)
            after = page.offsets[-1]
            batch = self._batch(page)
            if batch.num_rows:
                yield batch
        if after < last:
            self._gap(reader, after, last)

    def _catch_up(self, reader: StoreReader, last: int) -> None:
        end = time.monotonic() + CATCH_UP
        while (extent := reader.extent(self._options.name)).last < last:
            if time.monotonic() > end:
                raise PipelineError(
                    f"the stream {self._options.name!r} ends at offset {extent.last} here, but the driver has seen "
                    f"{last}: is {self._options.store.partition('://')[0]}://… the same store on all machines?"
                )
            time.sleep(0.05)
            reader.refresh()

    def _gap(self, reader: StoreReader, after: int, before: int) -> None:
        """Check a gap: offsets may have gaps; below the floor they are rows that were lost."""
        gone = min(reader.extent(self._options.name).floor - 1, before)
        if gone <= after:
            return
        if self._options.on_trimmed is Lost.FAIL:
            raise self._trimmed(after + 1, gone)
        log.warning("stream_trimmed", stream=self._options.name, first=after + 1, last=gone, skipped=gone - after)

    def _batch(self, page: StreamPage) -> pa.RecordBatch:
        batch = self._stored(page)
        if self._bodies is None:
            return batch
        made = {name: batch.column(name) for name in self._names}
        made[JSON] = self._bodies.column(made["payload"])
        return pa.RecordBatch.from_arrays([made[name] for name in self._wanted.names], self._wanted.names)

    def _stored(self, page: StreamPage) -> pa.RecordBatch:
        """Decode the records of a page: those in the usual form at once, and the others one by one."""
        found = unpack(page.values)
        if found is None or 2 * len(found.rows) < len(page.values):
            return self._decoded(page)[1]
        usual = page if len(found.rows) == len(page.values) else _some(page, found.rows.tolist())
        try:
            batch = found.batch(self._names, usual.offsets, usual.times)
        except pa.ArrowInvalid:
            return self._decoded(page)[1]  # somewhere text is none: this way finds out where
        if usual is page:
            return batch
        others = self._decoded(_some(page, np.flatnonzero(~found.fine).tolist()))
        return columns.merged([(usual.offsets, batch), others]) if others[0] else batch

    def _decoded(self, page: StreamPage) -> tuple[Sequence[int], pa.RecordBatch]:
        """Decode one by one; return also the offsets of those that could be read."""
        try:
            numbers, moments, records = page.offsets, page.times, list(map(decode, page.values))
        except RecordError:
            numbers, moments, records = self._decoded_singly(page.offsets, page.times, page.values)
        return numbers, columns.messages(self._names, numbers, moments, records)

    def _decoded_singly(
        self, numbers: Sequence[int], moments: Sequence[float], values: Sequence[bytes]
    ) -> tuple[list[int], list[float], list[Record]]:
        """Decode one by one where some cannot be read."""
        kept: tuple[list[int], list[float], list[Record]] = ([], [], [])
        for number, moment, value in zip(numbers, moments, values, strict=True):
            try:
                record = decode(value)
            except RecordError as error:
                if self._options.on_damaged is Lost.FAIL:
                    raise PipelineError(
                        f"the record at offset {number} of the stream {self._options.name!r} cannot be read: {error}; "
                        "the option on_damaged=skip goes on without it"
                    ) from error
                log.warning("record_damaged", stream=self._options.name, offset=number, error=str(error))
                continue
            kept[0].append(number)
            kept[1].append(moment)
            kept[2].append(record)
        return kept

    def _reader(self) -> StoreReader:
        return store_cache.take(self._options.store, open_reader)


def is_declared(reader: StoreReader, name: str) -> bool:
    """Return True if every node has such a stream, or it was created."""
    from motorcade.plugins.fanout.tables import RECEIPTS  # noqa: PLC0415 - takes long, and is asked for hardly ever
    from motorcade.plugins.logs.streams.service import COLLECTION, declares  # noqa: PLC0415 - likewise

    stored = reader.record(COLLECTION, name)
    return name == RECEIPTS or (stored is not None and declares(stored))


def _some(page: StreamPage, rows: list[int]) -> StreamPage:
    return StreamPage(
        [page.offsets[row] for row in rows], [page.times[row] for row in rows], [page.values[row] for row in rows]
    )
