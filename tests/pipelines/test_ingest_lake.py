"""The lake alone: whatever step it dies at, after the next start every row is there once, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.pipelines import PipelineError, lake
from motorcade.pipelines.lake import Disk, FileGroup, Lake, LakeCounts, LakeError
from motorcade.pipelines.lake_files import LakeTable, Made, Sorter, merge, write

READS = {"store": "rocksdb://x", "stream": "s"}
RUN = "0123456789ab"


@pytest.fixture(autouse=True, scope="module")
def _in_memory() -> Iterator[None]:
    """Processes die here, machines do not: nothing needs to wait for a disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _handle: None)
        yield


class Killed(BaseException):
    """Not an error that anybody handles."""


class FrailDisk(Disk):
    """Dies before its n-th step; or in the middle of it, if that writes a file or clears a folder."""

    def __init__(self, steps: int | None = None, *, torn: bool = False) -> None:
        self.left = steps
        self.done = 0
        self.torn = torn

    def _step(self, tear: Callable[[], object] = lambda: None) -> None:
        if self.done == self.left:
            if self.torn:
                tear()
            raise Killed
        self.done += 1

    def make(self, folder: Path) -> None:
        self._step()
        super().make(folder)

    def put(self, path: Path, content: bytes) -> None:
        self._step(lambda: path.write_bytes(content[: len(content) // 2]))
        super().put(path, content)

    def move(self, source: Path, target: Path) -> None:
        self._step()
        super().move(source, target)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def clear(self, folder: Path) -> None:
        self._step(lambda: min(folder.rglob("*.parquet"), default=folder / "none").unlink(missing_ok=True))
        super().clear(folder)

    def sync(self, folder: Path) -> None:
        self._step()
        super().sync(folder)


def rows_of(batch: int) -> list[tuple[str, str, int]]:
    """Table, day and number of the rows of a batch."""
    return [
        (table, day, batch * 100 + number)
        for number, (table, day) in enumerate(
            [("position", "2026-01-30"), ("position", "2026-01-31"), ("trip", "2026-01-31"), ("position", "2026-01-31")]
        )
    ]


def stage(folder: Path, batch: int, *, together: bool = False) -> list[Made]:
    """What the tasks of a batch leave: a file for each row or, as if Spark had divided it otherwise, for each day."""
    parts: dict[tuple[str, str, int], list[int]] = {}
    for table, day, number in rows_of(batch):
        parts.setdefault((table, day, 0 if together else number), []).append(number)
    made = []
    for (table, day, _), numbers in parts.items():
        name = f"{hash((str(folder), numbers[0])) & 0xFFFFFFFF:08x}-{numbers[0]}.parquet"
        size = write(pa.table({"n": numbers}), folder / name)
        made.append(Made(table, day, name, len(numbers), size))
    return made


def found(root: Path) -> list[tuple[str, str, int]]:
    """What a reader sees."""
    seen = []
    for table in ("position", "trip"):
        if (root / table).exists():
            rows = ds.dataset(root / table, partitioning=ds.partitioning(flavor="hive")).to_table().to_pylist()
            seen += [(table, str(row["day"]), row["n"]) for row in rows]
    return sorted(seen)


def leftovers(root: Path) -> list[str]:
    """Files that are neither rows nor what a lake keeps about itself."""
    kept = {"run.json", "ledger.json", "lock"}
    return [str(file) for file in root.rglob("*") if file.is_file() and file.name not in kept and not _is_row(file)]


def _is_row(file: Path) -> bool:
    return file.suffix == ".parquet" and file.parent.name.startswith("day=")


def bring(root: Path, batches: int, disk: Disk | None = None) -> None:
    """What a run does: goes on with the first batch that Spark has not noted, which the lake may have already.

    One that is going to die has its rows in other files than one that tries again.
    """
    with Lake(root, RUN, disk) as one:
        one.open(READS)
        for batch in range(max(0, one.ledger.batch), batches):
            if one.has(batch, f"mark {batch}"):
                continue
            folder = one.fresh()
            one.place(batch, stage(folder, batch, together=disk is None), folder, f"mark {batch}")


def compact(root: Path, disk: Disk | None = None) -> None:
    with Lake(root, RUN, disk) as one:
        one.open(READS)
        groups = one.crowded(one.days())
        if not groups:
            return
        folder = one.fresh()
        for number, group in enumerate(groups):
            merge([root / name for name in group.names], folder / f"{number}.parquet")
        one.replace([(group, f"{number}.parquet") for number, group in enumerate(groups)], folder)


def every_death(work: Callable[[Path, Disk], None], begin: Callable[[Path], None], place: Path) -> Iterator[Path]:
    """A lake for each step at which `work` can die, and died there."""
    counting = FrailDisk()
    begin(place / "whole")
    work(place / "whole", counting)
    for torn in (False, True):
        for step in range(counting.done):
            root = place / f"{step}-{torn}"
            begin(root)
            with pytest.raises(Killed):
                work(root, FrailDisk(step, torn=torn))
            yield root


def everything(batches: int) -> list[tuple[str, str, int]]:
    return sorted(row for batch in range(batches) for row in rows_of(batch))


def test_a_batch_is_there_once_wherever_its_placing_died(tmp_path: Path) -> None:
    """The first batch, and the second."""
    deaths = 0
    for last in (1, 2):

        def begin(root: Path, done: int = last - 1) -> None:
            if done:
                bring(root, done)

        def place(root: Path, disk: Disk, batches: int = last) -> None:
            bring(root, batches, disk)

        for root in every_death(place, begin, tmp_path / str(last)):
            deaths += 1
            bring(root, last + 1)
            assert everything(last + 1) == found(root), root
            assert [] == leftovers(root), root
    assert deaths > 50


def test_dying_again_while_making_good_changes_nothing(tmp_path: Path) -> None:
    """The recovery itself dies at each step, and is recovered from."""
    for number, root in enumerate(
        every_death(lambda root, disk: bring(root, 1, disk), lambda _root: None, tmp_path / "first")
    ):
        for step in (1, 3, 5, 8):
            try:
                bring(root, 1, FrailDisk(step))
            except Killed:
                continue
        bring(root, 1)
        assert everything(1) == found(root), number


def test_nothing_is_lost_or_doubled_by_a_compaction_that_died(tmp_path: Path) -> None:
    for root in every_death(compact, lambda root: bring(root, 3), tmp_path):
        bring(root, 4)  # the next start is that of a run, which makes good what the compaction has left
        assert everything(4) == found(root), root.name
        assert [] == leftovers(root), root.name
        compact(root)
        assert everything(4) == found(root), root.name
        files = [file for file in root.rglob("*.parquet") if file.parent.parent.name == "position"]
        assert 2 == len(files), "one for each day"


def test_a_compacted_lake_goes_on(tmp_path: Path) -> None:
    for batches in range(1, 6):
        bring(tmp_path, batches)
        compact(tmp_path)
    assert everything(5) == found(tmp_path)
    assert all(file.name.startswith("merged-") for file in tmp_path.glob("position/day=*/*"))


def test_a_batch_that_is_run_again_is_not_written_again(tmp_path: Path) -> None:
    bring(tmp_path, 2)
    with Lake(tmp_path, RUN) as one:
        one.open(READS)
        assert one.has(1, "mark 1")
        folder = one.fresh()
        with pytest.raises(LakeError, match="has batch 1 already"):
            one.place(1, stage(folder, 1), folder, "mark 1")
    assert everything(2) == found(tmp_path)


def test_a_checkpoint_that_does_not_belong_to_the_lake_is_refused(tmp_path: Path) -> None:
    bring(tmp_path, 2)
    with Lake(tmp_path, RUN) as one:
        one.open(READS)
        for batch, mark, than in ((0, "mark 0", "older"), (1, "another", "older"), (3, "mark 3", "newer")):
            says = f"batches up to 1, and the checkpoint goes on with {batch}: it is {than}"
            with pytest.raises(LakeError, match=says):
                one.has(batch, mark)


def test_two_runs_fill_one_lake_and_leave_each_other_alone(tmp_path: Path) -> None:
    bring(tmp_path, 3)
    with Lake(tmp_path, "ba9876543210") as other:
        other.open({**READS, "stream": "another"})
        folder = other.fresh()
        other.place(0, stage(folder, 7), folder)
        compact(tmp_path)
        assert [] == other.crowded(other.days(), least=3)
    assert sorted([*everything(3), *rows_of(7)]) == found(tmp_path)


def test_a_stream_is_not_brought_twice_by_mistake(tmp_path: Path) -> None:
    bring(tmp_path, 1)
    with Lake(tmp_path, "ba9876543210") as other:
        with pytest.raises(LakeError, match=r"has rows of store rocksdb://x, stream s already.*--again"):
            other.open(READS)
        other.open(READS, again=True)
        assert -1 == other.ledger.batch


def test_a_lake_that_is_not_the_one_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with Lake(tmp_path, RUN) as one, pytest.raises(LakeError, match="knows nothing of this run"):
        one.open(READS, begun=True)


def test_one_process_writes(tmp_path: Path) -> None:
    with Lake(tmp_path, RUN) as one, Lake(tmp_path, RUN) as two:
        one.open(READS)
        with pytest.raises(LakeError, match="another process under the same run"):
            two.open(READS)


def test_files_that_somebody_has_taken_away_are_missed(tmp_path: Path) -> None:
    """A file that was decided on and is nowhere: its rows are lost, and that is said."""
    with pytest.raises(Killed):
        bring(tmp_path, 1, FrailDisk(10))
    ledger = json.loads((tmp_path / ".motorcade" / RUN / "ledger.json").read_bytes())
    missing = [source for source, target in ledger["moves"] if not (tmp_path / target).exists()]
    (tmp_path / missing[-1]).unlink()
    with pytest.raises(LakeError, match=r"is gone, which was to become .*batch-00000000"):
        bring(tmp_path, 1)


def test_a_ledger_that_somebody_has_changed_is_named(tmp_path: Path) -> None:
    bring(tmp_path, 1)
    (tmp_path / ".motorcade" / RUN / "ledger.json").write_text('{"batch": "one"}')
    with pytest.raises(LakeError, match=r"ledger\.json cannot be understood"):
        bring(tmp_path, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LakeError, match=r"file.*cannot be opened"):
        bring(tmp_path / "file", 1)


def test_a_column_keeps_its_type(tmp_path: Path) -> None:
    with Lake(tmp_path, RUN) as one:
        one.open(READS)
        one.settle("position", {"vin": "string", "lat": "double"})
        one.settle("position", {"vin": "string", "speed": "double"})
        one.settle("trip", {"lat": "string"})
        with pytest.raises(LakeError, match=r"position: the column 'lat' is double.* declared as string"):
            one.settle("position", {"lat": "string"})


# -- which files become one


def sized(root: Path, sizes: dict[str, int]) -> Lake:
    folder = root / "t" / "day=2026-01-31"
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        with (folder / name).open("wb") as out:
            out.truncate(size)
    return Lake(root, RUN)


def names(groups: list[FileGroup]) -> list[list[str]]:
    return [sorted(name.rpartition("/")[2] for name in group.names) for group in groups]


def test_only_small_files_of_the_run_are_merged(tmp_path: Path) -> None:
    one = sized(
        tmp_path,
        {
            f"batch-00000001-{RUN}-0000.parquet": 10,
            f"merged-00000001-{RUN}-0000.parquet": 1000,
            f"merged-00000002-{RUN}-0000.parquet": lake.TARGET_BYTES,
            "batch-00000001-ba9876543210-0000.parquet": 10,
            "somebody.parquet": 10,
        },
    )
    assert [[f"batch-00000001-{RUN}-0000.parquet", f"merged-00000001-{RUN}-0000.parquet"]] == names(
        one.crowded(one.days())
    )


def test_files_are_merged_to_a_good_size_and_no_more(tmp_path: Path) -> None:
    size = lake.TARGET_BYTES // 3
    one = sized(tmp_path, {f"batch-{number:08}-{RUN}-0000.parquet": size for number in range(7)})
    groups = one.crowded(one.days())
    assert [3, 3] == [len(group.names) for group in groups]
    assert all(group.size <= lake.TARGET_BYTES for group in groups)


def test_without_being_asked_only_many_files_of_similar_size_are(tmp_path: Path) -> None:
    """So that a file is not written again for each small one that comes."""
    small = {f"batch-{number:08}-{RUN}-0000.parquet": 1000 for number in range(16)}
    large = {f"merged-{number:08}-{RUN}-0000.parquet": 10_000_000 for number in range(15)}
    one = sized(tmp_path, small | large)
    assert [sorted(small)] == names(one.crowded(one.days(), least=16, similar=True))
    assert [] == one.crowded(one.days(), least=17, similar=True)


# -- files


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3), st.booleans()), max_size=80),
    split=st.integers(1, 30),
    buffer=st.sampled_from([0, 500, 10**9]),
)
def test_sorted_rows_are_in_the_file_of_their_table_and_day(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, bool]], split: int, buffer: int
) -> None:
    folder = tmp_path_factory.mktemp("sorted")
    tables = [
        LakeTable("a", {"n": "n"}),
        LakeTable("b", {"x": "1.x", "n": "n"}),
        LakeTable("dead_letters", {"n": "n", "reason": "2.reason"}, dead=True),
    ]
    batches = []
    for start in range(0, len(rows), split):
        some = rows[start : start + split]
        columns = {
            "table": pa.array([row[0] for row in some], pa.int32()),
            "day": pa.array([row[1] for row in some], pa.int32()),
            "late": pa.array([row[2] for row in some], pa.bool_()),
            "n": pa.array(range(start, start + len(some)), pa.int64()),
            "1.x": pa.array(["x" if row[0] == 1 else None for row in some], pa.string()),
            "2.reason": pa.array([f"r{at % 2}" if row[0] == 2 else None for at, row in enumerate(some)], pa.string()),
        }
        batches.append(pa.RecordBatch.from_pydict(columns))
    made = list(Sorter(folder, tables, buffer=buffer).write(iter(batches)))
    for one in made:
        names = next(table.columns for table in tables if table.name == one.table)
        assert list(names) == pq.read_schema(folder / one.name).names
    seen = [
        ("ab".find(one.table[0]) if one.table != "dead_letters" else 2, one.day, n)
        for one in made
        for n in pq.read_table(folder / one.name).column("n").to_pylist()
    ]
    expected = [(row[0], date.fromordinal(719163 + row[1]).isoformat(), n) for n, row in enumerate(rows)]
    assert sorted(expected) == sorted(seen)
    assert sum(row[2] for row in rows) == sum(one.late for one in made)
    assert sum(row[0] == 2 for row in rows) == sum(sum(one.reasons.values()) for one in made)
    assert all(one.rows == pq.read_metadata(folder / one.name).num_rows for one in made)
    counts = LakeCounts.of(made)
    assert len(rows) == counts.rows


def test_merged_files_may_have_got_columns_later(tmp_path: Path) -> None:
    write(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    write(pa.table({"n": [3], "x": ["late"]}), tmp_path / "b.parquet")
    assert 3 == merge([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "c.parquet")[0]
    assert [
        {"n": 1, "x": None},
        {"n": 2, "x": None},
        {"n": 3, "x": "late"},
    ] == pq.read_table(tmp_path / "c.parquet").to_pylist()


def test_files_that_cannot_be_merged_are_named(tmp_path: Path) -> None:
    write(pa.table({"n": [1]}), tmp_path / "a.parquet")
    write(pa.table({"n": ["text"]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    with pytest.raises(PipelineError, match="do not fit together"):
        merge([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "x.parquet")
    with pytest.raises(PipelineError, match=r"c\.parquet cannot be read"):
        merge([tmp_path / "a.parquet", tmp_path / "c.parquet"], tmp_path / "y.parquet")


def test_counts_add_up() -> None:
    one = LakeCounts({"a": 1, "b": 2}, {"no_type": 1}, 1)
    two = LakeCounts({"b": 2, "c": 3}, {"no_type": 1, "not_json": 5}, 2)
    assert LakeCounts({"a": 1, "b": 4, "c": 3}, {"no_type": 2, "not_json": 5}, 3) == one + two
    assert 15 == (one + two).rows
