"""A run of `ingest`: a stream, a schema, a lake and the folder of the run, brought together.

    Ingestion(spark, folder, lake, source, types, options)
        .writer()         the query, for `runner.follow`
        .shown(show)      what to show and note of its batches
        .compact()        all small files, when nothing else is to be done

What a batch is made of is written in Spark's checkpoint before it is computed; that is the mark by which the lake knows
it again (`Lake.has`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from motorcade.pipelines import PipelineError, ingest, schema, status
from motorcade.pipelines.lake import MANY_FILES, Lake, LakeCounts
from motorcade.pipelines.rundir import RunDir
from motorcade.pipelines.runner import BatchProgress, Show

#: The name of the file that has the name of the run.
_RUN: Final = "run"


@dataclass(frozen=True, slots=True)
class IngestSource:
    """The source of an ingestion; options as those of the source `motorcade`."""

    store: str
    kind: str  #: `stream` or `redis_stream`
    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def frame(self, spark: SparkSession) -> DataFrame:
        columns = ingest.COLUMNS if self.kind == "stream" else ingest.ENTRIES
        reader = spark.readStream.format("motorcade").option("store", self.store).option(self.kind, self.name)
        return reader.options(**self.options).schema(columns).load()


class Ingestion:
    """From a stream into a lake, for as long as the context lasts."""

    def __init__(
        self,
        spark: SparkSession,
        folder: RunDir,
        place: Path,
        source: IngestSource,
        types: tuple[schema.Type, ...],
        options: ingest.IngestOptions,
    ) -> None:
        self.types = schema.resolve(types)
        self.lake = Lake(place, _run(folder))
        self._spark = spark
        self._folder = folder
        self._source = source
        self._options = options
        self._placed: dict[int, LakeCounts] = {}  #: what has become of batches that were not shown yet
        self._set: list[str] = []  #: settings that the session did not have
        self._busy = threading.Lock()  # a batch is placed by a thread of Spark's
        self._closed = False

    def open(self, reads: Mapping[str, str], *, again: bool = False) -> Self:
        """Take the lake; `reads` says what is read, without passwords."""
        begun = status.committed(Path(self._folder.spark))[0] is not None
        self.lake.open(reads, begun=begun, again=again)
        for one in self.types:
            columns = {column.name: column.dataType.simpleString() for column in one.schema.fields}
            self.lake.settle(one.name, columns | ingest.EXTRA)
        for key, value in ingest.SETTINGS.items():
            if self._spark.conf.get(key, None) is None:
                self._spark.conf.set(key, value)
                self._set.append(key)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A query that was stopped leaves its thread behind, which may just be moving files.
        with self._busy:
            self._closed = True
            self.lake.close()
            for key in self._set:
                self._spark.conf.unset(key)

    # -- batches

    def writer(self) -> DataStreamWriter:
        """Return the query; it has no trigger and no checkpoint yet."""
        frame = ingest.classified(ingest.records(self._source.frame(self._spark)), self.types, self._options)
        if self._options.dedupe_within:
            frame = ingest.once(frame, self._options.dedupe_within)
        return frame.writeStream.queryName("ingest").outputMode("append").foreachBatch(self._batch)

    def _batch(self, frame: DataFrame, number: int) -> None:
        with self._busy:
            if self._closed:
                raise PipelineError("the run has ended")
            mark = self._mark(number)
            if self.lake.has(number, mark):
                ingest.drain(frame)
                self._placed[number] = self.lake.ledger.counts
                return
            folder = self.lake.fresh()
            made = ingest.write(frame, self.types, folder)
            self._placed[number] = self.lake.place(number, made, folder, mark)
            days = {(one.table, one.day) for one in made}
            crowded = self.lake.crowded(sorted(days), least=MANY_FILES, similar=True)
            ingest.compact(self._spark, self.lake, crowded)

    def _mark(self, number: int) -> str:
        """Return where the batch ends, as Spark has stored it."""
        try:
            lines = (Path(self._folder.spark) / "offsets" / str(number)).read_text().splitlines()
        except OSError as error:
            raise PipelineError(f"{self._folder.spark} cannot be read: {error.strerror}") from error
        return "\n".join(lines[2:])  # the first two have times in them

    def compact(self) -> int:
        """Make few files of many, in all days; how many there are less now."""
        with self._busy:
            return ingest.compact(self._spark, self.lake, self.lake.crowded(self.lake.days()))

    # -- what is told

    def shown(self, show: Show) -> Show:
        """Show what has become of each batch; note what has become of all of this run."""
        read, duplicates, total = 0, 0, LakeCounts()

        def shown(batch: BatchProgress) -> None:
            nonlocal read, duplicates, total
            placed = self._placed.pop(batch.number, LakeCounts())
            again = batch.rows - placed.rows
            read, duplicates, total = read + batch.rows, duplicates + again, total + placed
            self._folder.note(counts=_figures(read, total, duplicates))
            show(replace(batch, counts=_figures(batch.rows, placed, again)))

        self._folder.note(counts=_figures(read, total, duplicates))
        return shown


def _figures(read: int, counts: LakeCounts, duplicates: int) -> dict[str, Any]:
    """Return the figures of a batch: each row that was read is written, dead or a duplicate."""
    return {
        "read": read,
        "written": counts.written,
        "dead": counts.dead,
        "duplicates": duplicates,
        "late": counts.late,
    }


def _run(folder: RunDir) -> str:
    """Return the name of the run, made with its directory; names of files in the lake contain it."""
    path = folder.part(_RUN)
    if not path.exists():
        partial = path.with_name(f".{_RUN}")
        partial.write_text(secrets.token_hex(6))
        partial.replace(path)
    return path.read_text()
