"""The files of the embedded engine: opened, closed, opened again, and their errors in our words.

Traps of the binding that this file keeps away from the others:

- The lock on the directory stays held while any column family, handle, iterator or checkpoint object is alive. So all
  of them live in one `RocksTables` object, readers announce themselves, and closing waits for the readers.
- Raw mode is a matter of each column family, not only of the database.
- Every error is a plain `Exception` with a text; `explain` makes ours of it.
- An iterator that meets a damaged block ends like one that is through: a scan asks `status()` at the end.
- A log cut short by a crash is normal, a log damaged in the middle is not. RocksDB's default recovers up to the damage
  and forgets what was acknowledged behind it; here opening is refused until `salvage` is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from rocksdict import (
    AccessType,
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBRecoveryMode,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from motorcade.storage import tables
from motorcade.storage.ports import StoreDamagedError, StoreError, StoreFullError

#: Bytes. Blocks read from the files, shared by all tables; with the binding's own default, reading is up to five times
#: slower once millions of entries wait.
BLOCK_CACHE = 128 * 2**20

#: Bytes written to a table before they are sorted into a file, and to all tables together.
WRITE_BUFFER = 32 * 2**20
WRITE_BUFFERS = 96 * 2**20

#: The property of a table that tells the bytes of its write buffers.
MEMTABLE_BYTES = "rocksdb.size-all-mem-tables"

#: Bytes of one part of an index or a filter.
METADATA_BLOCK = 8192

#: Bits per key. A filter answers "not there" without touching the block: each new compaction key asks that.
BLOOM_BITS = 10

#: Seconds between two reports of a migration in the log.
REPORT_EVERY = 5.0

log = structlog.stdlib.get_logger("motorcade.store")

_HELD = re.compile(r"lock hold by|While lock file|LOCK: ", re.IGNORECASE)
_DAMAGED = re.compile(r"^(Corruption|Not implemented|Invalid argument)|checksum mismatch|does not exist|No such file")
_FILE = re.compile(r"(/\S+\.(?:sst|log|blob)|/\S*(?:MANIFEST|CURRENT|OPTIONS)\S*)")


class OpeningAgainError(StoreError):
    """The files are being opened again; ask once more in a moment."""


class RocksTables:
    """An open database: one attribute per table to read from, one handle per table to write with."""

    __slots__ = ("db", "handles", *tables.TABLES)

    entries: Rdict
    shared: Rdict
    holders: Rdict
    heads: Rdict
    keys: Rdict
    tokens: Rdict
    blobs: Rdict
    blobinfo: Rdict
    records: Rdict
    streams: Rdict
    rows: Rdict
    leases: Rdict
    endings: Rdict
    notes: Rdict
    feed: Rdict
    meta: Rdict

    def __init__(self, db: Rdict, present: Iterable[str] = tables.TABLES) -> None:
        """Take the tables. Files of an older format, opened to be read only, may lack some."""
        self.db = db
        self.handles = {table: db.get_column_family_handle(table) for table in present}
        for table in present:
            setattr(self, table, db.get_column_family(table))

    def release(self) -> Rdict:
        """Let go of everything but the database, even if the frames of some error still hold this object."""
        for table in self.handles:
            delattr(self, table)
        self.handles.clear()
        db = self.db
        del self.db
        return db


class Files:
    """The directory of a store."""

    def __init__(self, path: Path, *, salvage: bool = False, block_cache: int = BLOCK_CACHE) -> None:
        self.path = path
        self.read_only = False
        self._salvage = salvage
        self._tables: RocksTables | None = None
        self._readers = 0
        self._loop_reads = False  #: the event loop's thread reads now; only that thread writes this
        self._closing = False
        self._changed = threading.Condition()
        self._cache = Cache(block_cache)

    # -- opening and closing

    def open(self, *, read_only: bool = False) -> RocksTables:
        """Open or create; StoreError says what is wrong."""
        if not read_only:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreFullError(f"the store at {self.path} cannot be made: {error}") from error
        access = AccessType.read_only(False) if read_only else AccessType.read_write()
        try:
            present = Rdict.list_cf(str(self.path), self._options()) if read_only else tables.TABLES
            families = {table: self._options() for table in tables.TABLES if table in present}
            db = Rdict(str(self.path), self._options(), column_families=families, access_type=access)
            opened = RocksTables(db, families)
        except Exception as error:
            raise self.explain(error, opening=True) from error
        self.read_only = read_only
        with self._changed:
            self._tables = opened
            self._closing = False
            self._changed.notify_all()
        return opened

    def stored(self, key: bytes) -> bytes | None:
        """Return a row of `meta` as the files have it, whatever those who have them open think."""
        try:
            families = {table: self._options() for table in Rdict.list_cf(str(self.path), self._options())}
            access = AccessType.read_only(False)
            db = Rdict(str(self.path), self._options(), column_families=families, access_type=access)
            try:
                value: bytes | None = db.get_column_family("meta").get(key)
            finally:
                db.close()
        except Exception as error:
            raise self.explain(error, opening=True) from error
        return value

    def close(self) -> None:
        """Wait for the readers and let go of everything, whatever state it is in."""
        with self._changed:
            self._closing = True
            closing, self._tables = self._tables, None
            self._changed.wait_for(lambda: self._readers == 0)
        while self._loop_reads:  # a matter of microseconds, see `enter_loop`
            time.sleep(0.0005)
        if closing is None:
            return
        db = closing.release()
        try:
            db.close()
        except Exception as error:  # noqa: BLE001 - after a failed write closing fails too, but does let go
            self.explain(error)

    # -- reading, from any thread

    def enter(self) -> RocksTables | None:
        """Return the tables, which stay open until `leave`; None while they are being opened again or for ever."""
        with self._changed:
            if self._closing or self._tables is None:
                return None
            self._readers += 1
            return self._tables

    def leave(self) -> None:
        with self._changed:
            self._readers -= 1
            if self._closing:
                self._changed.notify_all()

    def enter_loop(self) -> RocksTables | None:
        """Return the tables for the event loop's thread, which reads most, leaves before it waits, and needs no lock.

        First it says that it reads, then it takes the tables; `close` takes them away, then looks whether it reads.
        """
        self._loop_reads = True
        opened = self._tables
        if opened is None:
            self._loop_reads = False
        return opened

    def leave_loop(self) -> None:
        self._loop_reads = False

    @contextmanager
    def reading(self) -> Iterator[RocksTables]:
        """Hold the tables for a longer look; give errors our words."""
        opened = self.enter()
        if opened is None:
            raise OpeningAgainError("the store is closed, or about to be opened again")
        try:
            yield opened
        except StoreError:
            raise
        except Exception as error:
            raise self.explain(error) from error
        finally:
            del opened
            self.leave()

    # -- figures and copies

    def free_bytes(self) -> int:
        """Return the room on the disk for an ordinary user."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def size_bytes(self) -> int:
        """Return the size of all files."""
        total = 0
        for entry in os.scandir(self.path):
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                pass  # compaction has removed it meanwhile
        return total

    def memory_bytes(self, opened: RocksTables) -> int:
        """Return the bytes of the cache of blocks and of what is written and not yet in a sorted file."""
        buffers = (getattr(opened, table).property_int_value(MEMTABLE_BYTES) or 0 for table in opened.handles)
        return self._cache.get_usage() + sum(buffers)

    def log_bytes(self) -> int:
        """Return the size of the write-ahead logs: what opening again writes into sorted files."""
        return sum(entry.stat().st_size for entry in os.scandir(self.path) if entry.name.endswith(".log"))

    def copy(self, opened: RocksTables, to: Path) -> None:
        """Make a copy as of now; on the same file system its large files are hard links."""
        if to.exists():
            raise StoreError(f"{to} exists already; a backup wants a place of its own")
        to.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = Checkpoint(opened.db)
        try:
            checkpoint.create_checkpoint(str(to))
        except Exception as error:
            shutil.rmtree(to, ignore_errors=True)
            raise self.explain(error) from error
        finally:
            del checkpoint

    # -- errors

    def explain(self, error: Exception, *, opening: bool = False) -> StoreError:
        """Return the binding's error in our words."""
        # Its traceback holds frames, those hold iterators, and they would hold the lock on the directory.
        error.__traceback__ = None
        text = str(error)
        if _HELD.search(text):
            return StoreError(
                f"the store at {self.path} is in use by another process; stop that one, or give this one another place"
            )
        if _DAMAGED.search(text):
            found = _FILE.search(text)
            what = found.group(1) if found else f"the store at {self.path}"
            advice = "bring back a backup"
            if opening and not self._salvage:
                advice += ", or open it once with salvage, which gives up what lies behind the damage"
            return StoreDamagedError(f"{what} is damaged ({text}); {advice}")
        return StoreFullError(f"the store at {self.path} cannot be written: {text}; it goes on when that is mended")

    # -- the parts

    def _options(self) -> Options:
        """Return the options for the database and for each table; one cache for all."""
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_write_buffer_size(WRITE_BUFFER)
        options.set_db_write_buffer_size(WRITE_BUFFERS)
        options.set_max_total_wal_size(2 * WRITE_BUFFERS)
        options.set_max_background_jobs(2)
        options.set_keep_log_file_num(2)
        options.set_wal_recovery_mode(
            DBRecoveryMode.point_in_time() if self._salvage else DBRecoveryMode.tolerate_corrupted_tail_records()
        )
        blocks = BlockBasedOptions()
        blocks.set_block_cache(self._cache)
        blocks.set_bloom_filter(BLOOM_BITS, False)
        # Filters and indexes then count as cached blocks: memory stays within the cache however much is stored.
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        # In parts: otherwise the index of a large file of well compressed rows is one block of megabytes, which does
        # not fit its shard of the cache, and each read would fetch and unpack it again.
        blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
        blocks.set_partition_filters(True)
        blocks.set_metadata_block_size(METADATA_BLOCK)
        blocks.set_pin_top_level_index_and_filter(True)
        options.set_block_based_table_factory(blocks)
        return options


def scan(table: Rdict, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a table from `start` to before `end` (empty: to its end), as of now."""
    options = ReadOptions()
    if end:
        # Without it, finding the end would walk over everything deleted behind it.
        options.set_iterate_upper_bound(end)
    rows = table.iter(options)
    rows.seek(start)
    while rows.valid():
        yield rows.key(), rows.value()
        rows.next()
    rows.status()  # a damaged block ends a scan like the end of the table does; this tells them apart


def scan_up_to(table: Rdict, start: bytes, end: bytes, last: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the same rows in two thirds of the time, where the last is known; harmless if it is gone or another came.

    The binding's own iteration is quicker, but does not tell a damaged block from the end.
    """
    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    rows: Iterator[tuple[bytes, bytes]] = table.items(from_key=start, read_opt=options)  # type: ignore[assignment]
    key = b""
    for key, row in rows:
        yield key, row
    if key < last:
        yield from scan(table, key + b"\0" if key else start, end)


# -- formats

#: A bounded part of a migration: given where to begin (empty: at the beginning), the rows to write, and where to go on
#: (None: done). The rows and the place to go on are written as a whole, so a crash in between harms nothing.
Step = Callable[["RocksTables", bytes], tuple[WriteBatch, bytes | None]]


def _add_shared(opened: RocksTables, _: bytes) -> tuple[WriteBatch, None]:
    """Migrate 1 to 2: entries may be references, and small rows may be noted.

    What is there may stay as it is, but the totals count shared messages too, of which there are none.
    """
    batch = WriteBatch(raw_mode=True)
    totals = opened.meta.get(tables.META_TOTALS)
    if totals is not None and len(totals) < tables.TOTALS.size:
        batch.put(tables.META_TOTALS, totals + tables.NUMBER.pack(0), opened.handles["meta"])
    return batch, None


def _allow_runs(_: RocksTables, __: bytes) -> tuple[WriteBatch, None]:
    """Migrate 2 to 3: records of a stream may share a row. What is there may stay as it is."""
    return WriteBatch(raw_mode=True), None


def _add_generations(_: RocksTables, __: bytes) -> tuple[WriteBatch, None]:
    """Migrate 3 to 4: heads have a generation, totals a floor, there is a feed. What is there may stay as it is."""
    return WriteBatch(raw_mode=True), None


#: What brings files of an older format to the next one, step by step: by the format they have.
MIGRATIONS: dict[int, Step] = {1: _add_shared, 2: _allow_runs, 3: _add_generations}


def migrate(opened: RocksTables, steps: dict[int, Step] | None = None) -> None:
    """Bring files to the format of this version; StoreError if they come from a later one, or from none we know."""
    steps = MIGRATIONS if steps is None else steps
    stored = opened.meta.get(tables.META_FORMAT)
    if stored is None:
        write_meta(opened, tables.META_FORMAT, tables.FORMAT)
        return
    (version,) = tables.NUMBER.unpack(stored)
    if version > tables.FORMAT:
        raise StoreError(
            f"the store has format {version}, this version of Motorcade knows up to {tables.FORMAT}; use a newer one"
        )
    for older in range(version, tables.FORMAT):
        if older not in steps:
            raise StoreError(f"the store has format {older}, which this version of Motorcade cannot bring up to date")
        _take_steps(opened, older, steps[older])


def _take_steps(opened: RocksTables, version: int, step: Step) -> None:
    """Migrate from one format to the next; goes on where an earlier attempt was interrupted."""
    place: bytes | None = opened.meta.get(tables.META_MIGRATED) or b""
    begun = reported = time.monotonic()
    log.info("store_migration_begins", format=version, to=version + 1, interrupted=bool(place))
    count = 0
    options = WriteOptions()
    options.sync = True
    while place is not None:
        batch, place = step(opened, place)
        count += 1
        if place is None:
            batch.put(tables.META_FORMAT, tables.NUMBER.pack(version + 1), opened.handles["meta"])
            batch.delete(tables.META_MIGRATED, opened.handles["meta"])
        else:
            batch.put(tables.META_MIGRATED, place, opened.handles["meta"])
        opened.db.write(batch, options)
        if place is not None and time.monotonic() - reported >= REPORT_EVERY:
            reported = time.monotonic()
            log.info("store_migration_goes_on", to=version + 1, steps=count, at=place[:40].hex())
    log.info("store_migrated", format=version + 1, steps=count, seconds=round(time.monotonic() - begun, 1))


def write_meta(opened: RocksTables, key: bytes, number: int) -> None:
    """Write one number, durably; only while opening."""
    batch = WriteBatch(raw_mode=True)
    batch.put(key, tables.NUMBER.pack(number), opened.handles["meta"])
    options = WriteOptions()
    options.sync = True
    opened.db.write(batch, options)
