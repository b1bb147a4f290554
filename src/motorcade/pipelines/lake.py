"""A lake of Parquet files into which every batch goes once, whatever dies when.

    LAKE/TYPE/day=2026-01-31/batch-00000017-RUN-0003.parquet     rows of batch 17
    LAKE/TYPE/day=2026-01-31/merged-00000042-RUN-0000.parquet    rows of many batches, compacted
    LAKE/dead_letters/day=…/…                                    what could not be taken, and why
    LAKE/.motorcade/tables/TYPE.json                             columns that the table has had
    LAKE/.motorcade/RUN/run.json                                 what the run reads
    LAKE/.motorcade/RUN/lock                                     held by the process that writes
    LAKE/.motorcade/RUN/ledger.json                              the last batch, and what is still to be done for it
    LAKE/.motorcade/RUN/staging/TRY/*.parquet                    files that are not read yet

Readers see plain files; what begins with a dot they leave out. A change of the lake, a batch or a compaction, is
a list of moves (staging to table) and of removals, and goes like this:

1. tasks write whole files into the folder of this try, under random names, and sync them;
2. the ledger is replaced by one that has the number of the batch and the list: from here on the change is decided;
3. files are moved, then others removed;
4. the ledger is replaced by one with an empty list.

A process that dies before 2 has changed nothing: the next attempt starts with an empty staging folder. After 2 there
is a list, and `open` carries it out before anything else; each step of it can be done twice. So when Spark runs a batch
again, which its checkpoint calls unfinished, the ledger knows whether it is: a batch that was decided is never written
again, though Spark may compute it again, in another order, with another one of two duplicates.

Rule 1: only the ledger decides. Files in staging that are in no list are rubbish, also those of tasks that still run
        for a driver that is dead: each try has a folder of its own.
Rule 2: a run touches the files with its own name in theirs, and no others. So several runs can fill one lake.
Rule 3: every change of the disk goes through `Disk`, where tests stop it at each.
Rule 4: a reader that lists a folder between two moves sees a part of a batch; between a move and a removal it sees
        merged rows twice. Both last for milliseconds, or until the next start if the process dies there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

import msgspec

from motorcade.pipelines import PipelineError
from motorcade.pipelines.lake_files import Made
from motorcade.pipelines.schema import DAY

HOME: Final = ".motorcade"

#: Bytes that a merged file has at most, about; files of half of that are left as they are.
TARGET_BYTES: Final = 128 * 2**20

#: Files of similar size in a day that are merged without being asked.
MANY_FILES: Final = 16

#: Files whose sizes differ by no more than this factor, about, are similar. A row is then written again once for each
#: power of it between the size of a first file and TARGET_BYTES: four or five times.
SIMILAR: Final = 8

#: Bytes below which all files are similar.
TINY: Final = 64 * 1024


class LakeError(PipelineError):
    """The lake cannot be written, or is not what the run has left."""


class Disk:
    """Everything that changes files."""

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, path: Path, content: bytes) -> None:
        """Write a file and have it on the disk."""
        with path.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())

    def move(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def clear(self, folder: Path) -> None:
        """Remove a folder with everything in it; a task of a dead driver may still write there."""
        shutil.rmtree(folder, ignore_errors=True)

    def sync(self, folder: Path) -> None:
        """Have the names in a folder on the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class LakeCounts(msgspec.Struct, frozen=True):
    """Counts of rows by outcome."""

    written: dict[str, int] = {}  #: by type
    dead: dict[str, int] = {}  #: by reason
    late: int = 0  #: of those written: of a day before the one on which they were recorded

    @classmethod
    def of(cls, made: Iterable[Made]) -> LakeCounts:
        written: Counter[str] = Counter()
        dead: Counter[str] = Counter()
        late = 0
        for one in made:
            if one.reasons:
                dead.update(one.reasons)
            else:
                written[one.table] += one.rows
                late += one.late
        return cls(dict(written), dict(dead), late)

    def __add__(self, other: LakeCounts) -> LakeCounts:
        return LakeCounts(
            dict(Counter(self.written) + Counter(other.written)),
            dict(Counter(self.dead) + Counter(other.dead)),
            self.late + other.late,
        )

    @property
    def rows(self) -> int:
        return sum(self.written.values()) + sum(self.dead.values())


class Ledger(msgspec.Struct, frozen=True):
    """The stored progress of a run."""

    batch: int = -1  #: the last one that was decided
    mark: str = ""  #: what that batch was made of
    change: int = 0  #: how many changes there were
    moves: list[tuple[str, str]] = []  #: from staging, to a table; relative to the lake
    removes: list[str] = []
    counts: LakeCounts = LakeCounts()  #: what has become of the rows of that batch


class FileGroup(NamedTuple):
    """Files of one day that are to become one."""

    table: str
    day: str
    names: tuple[str, ...]  #: relative to the lake
    size: int


class Lake:
    """The part of a lake that belongs to one run, for as long as the context lasts."""

    def __init__(self, root: Path, run: str, disk: Disk | None = None) -> None:
        self.root = root
        self.run = run
        self.ledger = Ledger()
        self._disk = disk or Disk()
        self._home = root / HOME / run
        self._lock: IO[str] | None = None

    # -- beginning

    def open(self, reads: Mapping[str, str], *, begun: bool = False, again: bool = False) -> None:
        """Take the place of this run, and finish what was decided.

        `reads` says what the run reads, and is the same at each start. `begun`: its checkpoint has batches, so the lake
        must know it. `again`: take a stream that another run has brought here already.
        """
        with self._telling("cannot be opened"):
            known = (self._home / "run.json").exists()
            if begun and not known:
                raise LakeError(
                    f"{self.root} knows nothing of this run, whose checkpoint has batches already: bring the lake "
                    "back, or begin with another checkpoint"
                )
            if not known and not again:
                self._check_others(reads)
            self._disk.make(self._home)
            self._take()
            if not known:
                self._write(self._home / "run.json", msgspec.json.encode(dict(reads)))
            self.ledger = self._read_ledger()
            self._carry_out()
            self._disk.clear(self._staging)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_others(self, reads: Mapping[str, str]) -> None:
        for file in sorted((self.root / HOME).glob("*/run.json")):
            with suppress(ValueError):
                if json.loads(file.read_bytes()) == dict(reads):
                    what = ", ".join(f"{name} {value}" for name, value in reads.items())
                    raise LakeError(
                        f"{self.root} has rows of {what} already, by a run with another checkpoint: go on with that "
                        "one, name another lake, or add them a second time with --again"
                    )

    def _take(self) -> None:
        self._lock = (self._home / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise LakeError(
                f"{self.root} is written to by another process under the same run {self.run}: its checkpoint was "
                "copied; begin with one of its own"
            ) from None

    def _read_ledger(self) -> Ledger:
        path = self._home / "ledger.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Ledger)
        except FileNotFoundError:
            return Ledger()
        except msgspec.DecodeError as error:
            raise LakeError(f"{path} cannot be understood: {error}; it was changed by another program") from error

    def settle(self, table: str, columns: Mapping[str, str]) -> None:
        """Agree on the columns of a table; files with other types under the same name could not be read together."""
        path = self.root / HOME / "tables" / f"{table}.json"
        with self._telling("cannot be written"):
            try:
                known: dict[str, str] = json.loads(path.read_bytes())
            except FileNotFoundError:
                known = {}
            for name, kind in columns.items():
                if known.get(name, kind) != kind:
                    raise LakeError(
                        f"{self.root / table}: the column {name!r} is {known[name]} in the files there, and is now "
                        f"declared as {kind}; give the column or the type another name"
                    )
            if columns.items() - known.items():
                self._disk.make(path.parent)
                self._write(path, msgspec.json.encode(known | dict(columns)))

    # -- a batch

    @property
    def _staging(self) -> Path:
        return self._home / "staging"

    def has(self, batch: int, mark: str = "") -> bool:
        """Return True if a batch with this `mark` is in the lake; if not, it is the next one.

        A checkpoint that is older than the lake, or newer, would leave rows out or bring them twice.
        """
        last = self.ledger.batch
        if batch == last + 1:
            return False
        if batch == last and mark == self.ledger.mark:
            return True
        than = "newer" if batch > last else "older"
        raise LakeError(
            f"{self.root} has batches up to {last}, and the checkpoint goes on with {batch}: it is {than} than the "
            "lake; bring back what belongs together, or begin with another lake and checkpoint"
        )

    def fresh(self) -> Path:
        """Make a directory for the files of one attempt; remove those of others."""
        with self._telling("cannot be written"):
            self._disk.clear(self._staging)
            folder = self._staging / secrets.token_hex(8)
            self._disk.make(folder)
            return folder

    def place(self, batch: int, made: Sequence[Made], folder: Path, mark: str = "") -> LakeCounts:
        """Put the files of a batch into their tables."""
        if self.has(batch, mark):
            raise LakeError(f"{self.root} has batch {batch} already")
        staged = folder.relative_to(self.root)
        # In an order that does not depend on which task was first.
        order = sorted(made, key=lambda one: (one.table, one.day, one.name))
        moves = [
            (str(staged / one.name), f"{one.table}/{DAY}={one.day}/batch-{batch:08}-{self.run}-{number:04}.parquet")
            for number, one in enumerate(order)
        ]
        counts = LakeCounts.of(made)
        self._change(batch=batch, mark=mark, moves=moves, counts=counts)
        return counts

    def _change(self, **fields: Any) -> None:
        with self._telling("cannot be written"):
            self._note(msgspec.structs.replace(self.ledger, change=self.ledger.change + 1, **fields))
            self._carry_out()
            self._disk.clear(self._staging)

    def _carry_out(self) -> None:
        """Carry out everything on the list, then empty the list."""
        if not self.ledger.moves and not self.ledger.removes:
            return
        touched: dict[Path, None] = {}
        for source, target in self.ledger.moves:
            self._move(self.root / source, self.root / target)
            touched[(self.root / target).parent] = None
        for folder in touched:  # what is new is safe before anything old goes
            self._disk.sync(folder)
        for name in self.ledger.removes:
            self._disk.remove(self.root / name)
        self._note(msgspec.structs.replace(self.ledger, moves=[], removes=[]))

    def _move(self, source: Path, target: Path) -> None:
        if source.exists():
            self._disk.make(target.parent)
            self._disk.move(source, target)
        elif not target.exists():
            raise LakeError(
                f"{source} is gone, which was to become {target}: files of the lake were removed while batch "
                f"{self.ledger.batch} was written; bring it back, or begin with another lake and checkpoint"
            )

    def _note(self, ledger: Ledger) -> None:
        self._write(self._home / "ledger.json", msgspec.json.encode(ledger))
        self.ledger = ledger

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file whole or not at all."""
        partial = path.with_name(f".{path.name}")
        self._disk.put(partial, content)
        self._disk.move(partial, path)
        self._disk.sync(path.parent)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LakeError(f"{error.filename or self.root} {what}: {error.strerror or error}") from error

    # -- compaction

    def days(self) -> list[tuple[str, str]]:
        """Return the tables and their days."""
        found = self.root.glob(f"[!._]*/{DAY}=*")
        return sorted((folder.parent.name, folder.name.removeprefix(f"{DAY}=")) for folder in found)

    def crowded(self, days: Iterable[tuple[str, str]], *, least: int = 2, similar: bool = False) -> list[FileGroup]:
        """Return groups of small files of this run that may become larger ones: `least` a day, and of similar size."""
        found = []
        for table, day in days:
            files = self._own(table, day)
            tiers: dict[int, list[tuple[int, str]]] = {}
            for size, name in files:
                if size < TARGET_BYTES // 2:
                    tiers.setdefault(_tier(size) if similar else 0, []).append((size, name))
            for some in tiers.values():
                if len(some) >= least:
                    found += [FileGroup(table, day, *group) for group in _groups(some)]
        return found

    def _own(self, table: str, day: str) -> list[tuple[int, str]]:
        """Return size and name of this run's files of a day."""
        folder = self.root / table / f"{DAY}={day}"
        mine = re.compile(rf"(batch|merged)-\d+-{re.escape(self.run)}-\d+\.parquet")
        with self._telling("cannot be read"), os.scandir(folder) as entries:
            return sorted(
                (entry.stat().st_size, f"{table}/{folder.name}/{entry.name}")
                for entry in entries
                if mine.fullmatch(entry.name)
            )

    def replace(self, merged: Sequence[tuple[FileGroup, str]], folder: Path) -> None:
        """Put merged files, by their names in `folder`, in the place of those that they were made of."""
        staged = folder.relative_to(self.root)
        change = self.ledger.change + 1
        moves = [
            (str(staged / name), f"{group.table}/{DAY}={group.day}/merged-{change:08}-{self.run}-{number:04}.parquet")
            for number, (group, name) in enumerate(merged)
        ]
        self._change(moves=moves, removes=[name for group, _ in merged for name in group.names])


def _tier(size: int) -> int:
    tier, bound = 0, TINY
    while size > bound:
        tier, bound = tier + 1, bound * SIMILAR
    return tier


def _groups(files: Sequence[tuple[int, str]]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield groups, small files first, as many together as make up one file."""
    names: list[str] = []
    total = 0
    for size, name in sorted(files):
        if names and total + size > TARGET_BYTES:
            if len(names) > 1:
                yield tuple(names), total
            names, total = [], 0
        names.append(name)
        total += size
    if len(names) > 1:
        yield tuple(names), total
