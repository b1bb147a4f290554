"""Do the pipelines in `examples/` work on what a real node has stored?"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from motorcade.core.vin import make_vin
from motorcade.pipelines import session
from tests.support.commands import run
from tests.support.node import ROOT, NodeProcess

EXAMPLES = ROOT / "examples" / "pipelines"
VIN = make_vin(1)

CONFIG = """
[plugins.streams.stream.trips]
topics = ["fleet/+/trip"]
"""


def stored(data: Path, *commands: list[str]) -> str:
    """Run commands against a node that keeps its data here; the URL of its store."""
    with NodeProcess(config=CONFIG, data=data) as node:
        for command in commands:
            done = run(*command, "--host", node.host, "--port", node.port)
            assert 0 == done.returncode, done.stderr
    return f"rocksdb://{data / 'store'}"


def trip(payload: str) -> list[str]:
    return ["pub", "-t", f"fleet/{VIN}/trip", "-q", "1", "-m", payload]


def test_distances_are_summed_once(spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two runs over one stream count every trip once; what is no trip counts nowhere."""
    example = runpy.run_path(str(EXAMPLES / "daily_distance.py"))
    url = stored(tmp_path / "data", trip('{"km": 12.5}'), trip("no json"), trip('{"km": 7.5}'))
    for _ in range(2):
        example["run"](spark, url, "trips", tmp_path / "lake")
    (row,) = example["per_day"](spark.read.parquet(str(tmp_path / "lake"))).collect()
    assert (VIN, 20.0, 2) == (row.vin, row.km, row.trips)
    assert VIN in capfd.readouterr().out


def test_the_notebook_runs_from_top_to_bottom(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its tables show the request of which it reads the receipts."""
    (tmp_path / "vins.txt").write_text(VIN)
    (tmp_path / "task.json").write_text("{}")
    words = ["--vins", tmp_path / "vins.txt", "--request", "task_ota_1", "--payload", tmp_path / "task.json"]
    url = stored(tmp_path / "data", ["fanout", "send", *map(str, words)])
    monkeypatch.setenv("MOTORCADE_STORE", url)
    monkeypatch.setattr(session, "start", lambda: spark)
    monkeypatch.setattr(session, "stop", lambda _: None)
    after = runpy.run_path(str(EXAMPLES / "receipts_notebook.py"))
    assert [("task_ota_1", "accepted", 1)] == [tuple(row) for row in after["states"].collect()]
    assert VIN in capfd.readouterr().out
