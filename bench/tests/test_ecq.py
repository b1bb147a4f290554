"""What the report of compacted queues says about figures: no broker is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.ecq import Bench, markdown, met
from runner.machine import BenchError


def bench() -> Bench:
    return Bench(Path("generator"), "rocksdb://", 1000, 100, 0, 1)


def run(rate: float, **more: Any) -> dict[str, Any]:
    fine = dict.fromkeys(("lost", "unexpected", "reordered", "timed_out", "conn_fail", "disconnects", "unacked"), 0)
    said = {"rate": rate, "broker_cpu_s": 0.1, "acknowledged": 1000, "received": 1000, "gen_util": 0.2}
    return said | fine | more


def row(report: str, name: str) -> str:
    (line,) = (line for line in report.splitlines() if line.startswith(f"| {name} "))
    return line


def test_bars_are_judged_by_the_median_of_the_rounds() -> None:
    measured = bench()
    measured.rounds = {
        "append-256": [run(30_000), run(19_000), run(21_000)],
        "append-1024": [run(9_999)],
        "drain-256": [run(19_999)],
    }
    cost = {"append_cpu_us": 12.0, "drain_cpu_us": 0.7}
    measured.raw = {
        256: [{"append": 60_000, "drain": 1_000_000} | cost] * 3,
        1024: [{"append": 50_000, "drain": 500_000} | cost],
    }
    report = markdown(measured, ["a note"])
    assert "21 000/s" in row(report, "append-256") and "0.35" in row(report, "append-256")
    assert "100.0 µs / 12.0 µs" in row(report, "append-256")
    assert row(report, "append-256").endswith("≥ 20 000/s: met |")
    assert "0.20" in row(report, "append-1024") and "missed" in row(report, "append-1024")
    assert "0.02" in row(report, "drain-256") and "missed" in row(report, "drain-256")
    assert not met(measured)
    measured.rounds = {"append-1024": [run(10_000, gen_util=0.99)]}
    assert met(measured)
    assert "the generator was busy" in markdown(measured, [])


def test_one_key_is_flat_or_not() -> None:
    measured = bench()
    measured.steps = [run(100.0)] * 9 + [run(79.0)]
    measured.left = {"messages": 1, "bytes": 300, "last": 100, "disk": 5_000_000}
    report = markdown(measured, [])
    assert "not flat" in report and "5.0 MB" in report
    assert not met(measured)
    measured.steps[-1] = run(80.0)
    assert met(measured)
    measured.left["messages"] = 2
    assert not met(measured)


@pytest.mark.parametrize(
    "name", ["lost", "unexpected", "reordered", "timed_out", "conn_fail", "disconnects", "unacked"]
)
def test_a_run_that_went_wrong_has_no_figures(name: str) -> None:
    measured = bench()
    with pytest.raises(BenchError, match=f"append-256: {name} 3"):
        measured._note("append-256", run(1.0, **{name: 3}))
    assert {} == measured.rounds
