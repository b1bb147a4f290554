"""The directory of an embedded store, seen from outside: who has it, what it holds, how it is copied.

RocksDB admits one process to a directory. So a command either finds the directory free, and
claims it while looking (`claimed`), or finds a node in it, and asks that node for a copy.

Rule 1: nothing here writes into a store, not even what opening one writes: a store of an older format must still be
        that after it was looked at or copied.
Rule 2: a copy has its name only when it is complete and on the disk.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocksdict import AccessType, Options, Rdict

from motorcade.storage import tables
from motorcade.storage.deltas import Deltas
from motorcade.storage.files import Files, RocksTables, scan
from motorcade.storage.inspect import inspect
from motorcade.storage.ports import StoreDamagedError, StoreError, StoreFullError

#: Bytes; what is read once need not be kept.
CACHE = 8 * 2**20

#: Bytes copied between two reports of progress.
PORTION = 8 * 2**20

#: Not part of a store: locks, reports for people, and copies that a store has made for itself.
_BESIDE = ("LOCK", "LOG", "copy-")


class InUseError(StoreError):
    """Another process has the store; a node that runs can be asked for a copy."""


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The contents of a store, at one moment."""

    format: int
    mailboxes: int  #: owners something is known of
    entries: int
    blobs: int
    blob_octets: int
    records: dict[str, int]  #: by collection
    streams: dict[str, int]  #: records by stream
    disk_octets: int


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the lock, so that no other process opens the store meanwhile; `InUseError` if one has it open."""
    if not (path / "CURRENT").is_file():
        raise StoreError(f"there is no store at {path}")
    try:
        lock = (path / "LOCK").open("ab")
    except OSError as error:
        raise StoreError(f"the store at {path} cannot be opened: {error.strerror}") from error
    with lock:  # closing it lets go
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUseError(f"the store at {path} is in use by another process") from None
        yield


# -- looking, at a directory without a writer


@contextmanager
def opened(path: Path) -> Iterator[RocksTables]:
    """Open the tables of a directory to read; `StoreError` if their format is not the one this version reads."""
    files = Files(path, block_cache=CACHE)
    files.open(read_only=True)
    try:
        with files.reading() as found:
            try:
                version = _format(found)
                if version != tables.FORMAT:
                    raise StoreError(_other_format(path, version))
                yield found
            finally:
                del found
    finally:
        files.close()


def format_of(path: Path) -> int:
    """Return the version of the layouts in a directory."""
    files = Files(path, block_cache=CACHE)
    files.open(read_only=True)
    try:
        with files.reading() as found:
            try:
                return _format(found)
            finally:
                del found
    finally:
        files.close()


def _format(found: RocksTables) -> int:
    stored = found.meta.get(tables.META_FORMAT)
    return int(tables.NUMBER.unpack(stored)[0]) if stored is not None else tables.FORMAT


def _other_format(path: Path, version: int) -> str:
    if version > tables.FORMAT:
        return (
            f"the store at {path} has format {version}, this version of Motorcade knows up to {tables.FORMAT}; "
            "use a newer one"
        )
    return (
        f"the store at {path} has format {version}; a node of this version brings it to format {tables.FORMAT} when "
        "it starts (make a backup before), and only then its contents can be looked at"
    )


def check(path: Path) -> list[str]:
    """Return what is wrong in a directory; empty: nothing."""
    try:
        version = format_of(path)
    except StoreDamagedError as error:
        return [str(error)]
    if version != tables.FORMAT:
        raise StoreError(_other_format(path, version))
    findings = inspect(path)
    if path.name.startswith("copy-"):
        return findings
    # It expects a copy within the store, and speaks of the directory above it.
    return [text.replace(f"{path.parent}/", f"{path}/") for text in findings]


def contents(path: Path) -> StoreContents:
    """Count everything in a store; reads all keys of records, streams and mailboxes."""
    with opened(path) as found:
        try:
            deltas = Deltas()
            deltas.load(found)
            entries, blobs, size_bytes, *_ = tables.parse_totals(deltas.get(found, tables.TOTALS_DELTA))
            records: Counter[str] = Counter()
            for key, _ in scan(found.records, b"", b""):
                records[key.partition(b"\0")[0].decode()] += 1
            streams = {key.decode(): tables.STREAM.unpack(row)[2] for key, row in scan(found.streams, b"", b"")}
            mailboxes = sum(1 for _ in deltas.scan(found, b"h"))
        finally:
            del found
    return StoreContents(
        tables.FORMAT, mailboxes, entries, blobs, size_bytes, dict(records), streams, _size_bytes(path)
    )


def records_beside(path: Path) -> dict[str, int]:
    """Count records by collection while a node writes: without its help, and about right.

    A copy would be exact. This costs the node nothing, and takes nothing from it but a look at its files.
    """
    with tempfile.TemporaryDirectory(prefix="motorcade-") as own:
        records: Counter[str] = Counter()
        try:
            db = Rdict(
                str(path),
                Options(raw_mode=True),
                column_families={table: Options(raw_mode=True) for table in tables.TABLES},
                access_type=AccessType.secondary(own),
            )
            found = db.get_column_family("records")
            for key, _ in scan(found, b"", b""):
                records[key.partition(b"\0")[0].decode()] += 1
            del found
            db.close()
        except Exception as error:
            raise Files(path, block_cache=CACHE).explain(error) from error
        return dict(records)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


# -- copying


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file() and not file.name.startswith(_BESIDE)]


def copy(path: Path, to: Path, progress: Callable[[int, int], None] = lambda _done, _all: None) -> int:
    """Copy the files of a store without a writer, whatever their format; return how many bytes."""
    files = _files(path)
    needed = sum(file.stat().st_size for file in files)
    with _making(to) as place:
        free = shutil.disk_usage(place).free
        if free < needed:
            raise StoreFullError(f"a copy needs {needed >> 20} MiB, and {to.parent} has {free >> 20} MiB left")
        done = 0
        for file in files:
            done = _copy_file(file, place / file.name, done, lambda so_far: progress(so_far, needed))
    return needed


def publish(made: Path, to: Path) -> int:
    """Give a copy that a store has made beside itself its own place, on this disk or on another; how many bytes."""
    size = _size_bytes(made)
    if made.stat().st_dev != _existing_parent(to).stat().st_dev:
        copy(made, to)
        shutil.rmtree(made)
        return size
    with _making(to) as place:
        for file in _files(made):
            file.rename(place / file.name)
    shutil.rmtree(made)
    return size


def remove(made: Path) -> None:
    """Take away what a copy that did not come to its end has left."""
    shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _making(to: Path) -> Iterator[Path]:
    """Make a directory for this user's eyes only, which becomes `to` if all goes well and is gone if not."""
    if to.exists():
        raise StoreError(f"{to} exists already; a backup wants a place of its own")
    place = to.with_name(f".{to.name}.{secrets.token_hex(4)}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700)
    except OSError as error:
        raise StoreError(f"a copy cannot be made at {to}: {error.strerror}") from error
    try:
        yield place
        _sync(place)
        place.rename(to)
        _sync(to.parent)
    except OSError as error:
        raise StoreError(f"the copy at {to} could not be made: {error.strerror}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _copy_file(source: Path, target: Path, done: int, progress: Callable[[int], None]) -> int:
    with source.open("rb") as reading, target.open("wb") as writing:
        while portion := reading.read(PORTION):
            writing.write(portion)
            done += len(portion)
            progress(done)
        writing.flush()
        os.fsync(writing.fileno())
    return done


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
