"""The crash test of pipelines in short (mark `long`), and its judge. `make chaos-spark` is the whole of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chaos import spark_judge as judge
from tests.chaos.spark import Ingest, Options, Phase, crash, report

#: Seconds; each blow costs a start of Spark, on a machine that may be busy.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_every_message_is_in_the_lake_once_when_ingest_is_killed() -> None:
    """While files are written, or when they are in place and Spark has not heard of it."""
    phases = (Phase.WRITING, Phase.PLACED)
    outcome = crash(Options("ingest", rounds=2, seed=4, rate=60.0, victims={"all": 1}, phases=phases, quiet=True))
    assert outcome.passed, report(outcome)
    assert 2 == len(outcome.blows)
    assert outcome.figures["rows in the lake"] and outcome.figures["dead letters"]


@pytest.mark.long
def test_no_vehicle_is_addressed_twice_when_an_audience_is_killed() -> None:
    """While it is sent: what the node has already comes again, and is stored no more."""
    phases = (Phase.SENDING,)
    outcome = crash(Options("audience", rounds=1, vehicles=2000, victims={"all": 1}, phases=phases, quiet=True))
    assert outcome.passed, report(outcome)
    assert 1 == len(outcome.blows)
    assert outcome.figures["vehicles"] in {2000, 4000}  # a campaign may be over before the blow; then there is another


# -- when to strike


PHASES: list[tuple[int, dict[str, object], bool, Phase]] = [
    (0, {"batch": 0}, False, Phase.COMPUTING),
    (0, {"batch": 0}, True, Phase.WRITING),
    (0, {"batch": 1, "moves": [["a", "b"]]}, True, Phase.MOVING),
    (0, {"batch": 1}, False, Phase.PLACED),
    (0, {"batch": 1}, True, Phase.COMPACTING),
    (0, {"batch": 1, "moves": [["a", "b"]], "removes": ["c", "d"]}, True, Phase.REPLACING),
    (1, {"batch": 1}, False, Phase.BETWEEN),
    (1, {"batch": 1}, True, Phase.COMPACTING),
    (1, {"batch": 1, "moves": [["a", "b"]], "removes": ["c", "d"]}, True, Phase.REPLACING),
]


def test_what_ingest_is_doing_is_seen_from_outside(tmp_path: Path) -> None:
    """Micro-batch 1 has begun; when it is done, files are still compacted with `--compact`."""
    for number, (committed, ledger, staged, phase) in enumerate(PHASES):
        place = tmp_path / str(number)
        place.mkdir()
        ingest = Ingest(place, [])
        home = ingest.lake / judge.HIDDEN / "run"
        files = {
            ingest.folder / "status.json": json.dumps({"started_at": 2.0}),
            ingest.folder / "spark" / "offsets" / "1": "",
            ingest.folder / "spark" / "commits" / str(committed): "",
            home / "ledger.json": json.dumps(ledger),
        }
        if staged:
            files[home / "staging" / "try" / "f.parquet"] = ""
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        assert (phase, False) == ingest.look(began=1.0)
        assert (Phase.STARTING, False) == ingest.look(began=3.0), "the process before that one has said so"


# -- the judge: the lake

LEDGER = judge.Ledger(
    rows={"position": {1: "2026-01-31", 2: "2026-01-30"}, "trip": {3: ""}}, dead={b"{": "not_json", b"[": "not_json"}
)


def found(
    position: list[judge.Row] | None = None,
    dead: list[tuple[bytes, str]] | None = None,
    left: list[str] | None = None,
) -> judge.Found:
    return judge.Found(
        rows={
            "position": [(1, "2026-01-31"), (2, "2026-01-30")] if position is None else position,
            "trip": [(3, "2026-02-01")],
        },
        dead=[(b"{", "not_json"), (b"[", "not_json")] if dead is None else dead,
        left=left or [],
    )


def test_a_lake_that_is_as_it_should_be() -> None:
    assert judge.lake(LEDGER, found()).passed


def test_what_is_wrong_in_a_lake_is_found() -> None:
    for kind, wrong in (
        ("lost", found(position=[(1, "2026-01-31")])),
        ("doubled", found(position=[(1, "2026-01-31"), (2, "2026-01-30"), (1, "2026-01-31")])),
        ("wrong day", found(position=[(1, "2026-01-31"), (2, "2026-01-31")])),
        ("invented", found(position=[(1, "2026-01-31"), (2, "2026-01-30"), (9, "2026-01-31")])),
        ("lost", found(dead=[(b"{", "not_json")])),
        ("doubled", found(dead=[(b"{", "not_json"), (b"[", "not_json"), (b"[", "not_json")])),
        ("wrong reason", found(dead=[(b"{", "not_json"), (b"[", "no_type")])),
        ("invented", found(dead=[(b"{", "not_json"), (b"[", "not_json"), (b"!", "not_json")])),
        ("staged", found(left=[".motorcade/r/staging/t/f.parquet"])),
    ):
        verdict = judge.lake(LEDGER, wrong)
        assert {kind: 1} == {name: len(words) for name, words in verdict.by_kind.items() if words}, wrong


def test_a_table_that_nobody_has_written_is_lost() -> None:
    assert 5 == judge.lake(LEDGER, judge.Found()).count("lost")


def test_what_a_reader_finds(tmp_path: Path) -> None:
    """Rows of all days, dead letters, and what was staged and forgotten."""

    def write(name: str, **columns: list[object]) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)

    write("position/day=2026-01-31/batch-1.parquet", n=[1], vin=["a"])
    write("position/day=2026-01-30/merged-1.parquet", n=[2], vin=["b"])
    write("dead_letters/day=2026-01-31/batch-1.parquet", payload=[b"{"], reason=["not_json"])
    write(".motorcade/r/staging/t/f.parquet", n=[7])
    lake = judge.read(tmp_path)
    assert {"position": {(1, "2026-01-31"), (2, "2026-01-30")}} == {name: set(rows) for name, rows in lake.rows.items()}
    assert [(b"{", "not_json")] == lake.dead
    assert [".motorcade/r/staging/t/f.parquet"] == lake.left
    assert (3, 1) == (lake.files, lake.merged)


# -- the judge: the fan-out


def test_a_fan_out_that_is_as_it_should_be() -> None:
    assert judge.fanout("r", "ab", "ba", "ab").passed


def test_what_is_wrong_with_a_fan_out_is_found() -> None:
    for expected, planned, accepted in (
        ({"not planned": 1}, "a", "ab"),
        ({"planned twice": 1}, "aba", "ab"),
        ({"not addressed": 1}, "ab", "b"),
        ({"addressed twice": 1}, "ab", "abb"),
        ({"invented": 2}, "abc", "abc"),
        ({"not planned": 2, "not addressed": 2}, "", ""),
    ):
        verdict = judge.fanout("r", "ab", planned, accepted)
        assert Counter(expected) == Counter({kind: len(words) for kind, words in verdict.by_kind.items()}), expected
