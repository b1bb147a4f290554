"""Parquet files of a lake: rows of many tables and days into files, and many small files into one.

What a task does, in Python, with Arrow. It knows nothing of Spark, nor of what becomes of the files: they are written
under unique names into a directory that readers ignore, and `lake.py` decides.

    Arrow batch: table | day | late | offset | time | topic | fields of the 1st type | … | of the 2nd | … | dead letters
        └─ by table, by day ─▶ rows that wait, up to BUFFER_BYTES in all ─▶ a file, written as a whole

Rule 1: a file is whole and on the disk before its name is recorded.
Rule 2: a file that is opened is written and closed. There are as many open files as there is need for: one.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from motorcade.pipelines import PipelineError

#: Bytes of rows, as Arrow holds them, that wait in a task for their file.
BUFFER_BYTES: Final = 128 * 2**20

#: Rows of a row group, at most; what a reader skips or takes as a whole.
GROUP_ROWS: Final = 256 * 1024

COMPRESSION: Final = "zstd"


@dataclass(frozen=True, slots=True)
class Made:
    """A file that was written, and what is in it."""

    table: str
    day: str  #: YYYY-MM-DD
    name: str  #: in the folder that it was written to
    rows: int
    bytes: int
    late: int = 0  #: rows of a day before the one on which they were recorded
    reasons: dict[str, int] = field(default_factory=dict)  #: of dead letters: how many for each


@dataclass(frozen=True, slots=True)
class LakeTable:
    """A table, and which columns of a batch are its own."""

    name: str
    columns: dict[str, str]  #: in files, and in batches; several tables may have one in common
    dead: bool = False  #: has a column `reason`, which is counted


class Sorter:
    """Rows on their way into files, of one task."""

    def __init__(self, folder: Path, tables: Sequence[LakeTable], buffer: int = BUFFER_BYTES) -> None:
        self._folder = folder
        self._tables = tables
        self._buffer = buffer
        self._waiting: dict[tuple[int, int], list[pa.RecordBatch]] = {}
        self._late: Counter[tuple[int, int]] = Counter()
        self._bytes: Counter[tuple[int, int]] = Counter()

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Made]:
        """Write batches: number of the table, day, late, and the columns of all tables, null in rows of others."""
        for batch in batches:
            self._sort(batch)
            while self._bytes.total() > self._buffer:
                yield self._file(self._bytes.most_common(1)[0][0])
        for key in sorted(self._waiting):
            yield self._file(key)

    def _sort(self, batch: pa.RecordBatch) -> None:
        numbers, days, late = batch.column(0), batch.column(1).cast(pa.int32()), batch.column(2)
        for number in pc.unique(numbers).to_pylist():
            mask = pc.equal(numbers, number)
            columns = self._tables[number].columns
            rows = batch.select(list(columns.values())).rename_columns(list(columns))
            self._by_day(number, rows.filter(mask), days.filter(mask), late.filter(mask))

    def _by_day(self, number: int, rows: pa.RecordBatch, days: pa.Array, late: pa.Array) -> None:
        found = sorted(pc.unique(days).to_pylist())
        if len(found) == 1:
            self._put((number, found[0]), rows, late)
            return
        order = pc.sort_indices(days)
        rows, days, late = rows.take(order), days.take(order), late.take(order)
        start = 0
        for day in found:
            count = pc.sum(pc.equal(days, day)).as_py()
            self._put((number, day), rows.slice(start, count), late.slice(start, count))
            start += count

    def _put(self, key: tuple[int, int], rows: pa.RecordBatch, late: pa.Array) -> None:
        self._waiting.setdefault(key, []).append(rows)
        self._late[key] += pc.sum(late).as_py() or 0
        self._bytes[key] += rows.nbytes

    def _file(self, key: tuple[int, int]) -> Made:
        number, day = key
        kind = self._tables[number]
        table = pa.Table.from_batches(self._waiting.pop(key))
        del self._bytes[key]
        name = f"{uuid.uuid4().hex}.parquet"
        size = write(table, self._folder / name)
        reasons = _counts(table.column("reason")) if kind.dead else {}
        when = date.fromordinal(_EPOCH + day).isoformat()
        return Made(kind.name, when, name, table.num_rows, size, self._late.pop(key, 0), reasons)


_EPOCH: Final = date(1970, 1, 1).toordinal()


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {pair["values"]: pair["counts"] for pair in pc.value_counts(column).to_pylist()}


def write(table: pa.Table, path: Path) -> int:
    """Write a file (rule 1); its size."""
    with path.open("xb") as out:
        pq.write_table(table, out, compression=COMPRESSION, row_group_size=GROUP_ROWS)
        return _sync(out)


def _sync(out: Any) -> int:
    out.flush()
    os.fsync(out.fileno())
    return int(out.tell())


# -- compaction


def merge(sources: Sequence[Path], target: Path) -> tuple[int, int]:
    """Merge many files into one, in their order; return the number of rows and of bytes.

    Columns that some files lack, since the schema had them later, are null there.
    """
    files = [_opened(source) for source in sources]
    try:
        schema = pa.unify_schemas([file.schema_arrow.remove_metadata() for file in files])
        with target.open("xb") as out:
            with pq.ParquetWriter(out, schema, compression=COMPRESSION) as writer:
                for table in _groups(files, schema):
                    writer.write_table(table)
            size = _sync(out)
    except pa.ArrowException as error:
        raise PipelineError(f"{sources[0].parent}: its files do not fit together: {error}") from error
    finally:
        for file in files:
            file.close()
    rows = sum(file.metadata.num_rows for file in files)
    written = pq.read_metadata(target).num_rows
    if rows != written:
        raise PipelineError(f"{sources[0].parent}: {rows} rows were to be merged, {written} were written")
    return rows, size


def _opened(source: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source)
    except (OSError, pa.ArrowInvalid) as error:
        raise PipelineError(f"{source} cannot be read, so it cannot be merged with others: {error}") from error


def _groups(files: Sequence[pq.ParquetFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield row groups of a good size, of files that may be small."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for file in files:
        for batch in file.iter_batches(GROUP_ROWS):
            table = _fitted(pa.Table.from_batches([batch]), schema)
            if waiting and (rows + table.num_rows > GROUP_ROWS or size + table.nbytes > BUFFER_BYTES):
                yield pa.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
            waiting.append(table)
            rows, size = rows + table.num_rows, size + table.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(one.name) if one.name in table.column_names else pa.nulls(table.num_rows, one.type)
        for one in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
