"""What the report of the fan-out says about figures, and what its platform writes: no broker is started here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.accept import batches, packet, publish
from runner.fanout import EAGER, Fanout, _measure, _parser, markdown, sides
from runner.machine import BenchError


def online(seconds: float) -> dict[str, Any]:
    return {"last_delivery_s": seconds, "publisher_bytes": 1e6, "broker_cpu_s": 0.1, "gen_util": 0.2, "dup": 0}


def offline(seconds: float, vehicles: int) -> dict[str, dict[str, Any]]:
    return {
        "fill": {"secs": seconds, "queued": vehicles, "gen_util": 0.2},
        "drain": {"secs": 1.0, "publisher_bytes": 1e6},
    }


def step(number: int, rate: float) -> dict[str, Any]:
    return {"targets": number * 100_000, "rate": rate, "rss_kb": 1024 * 100, "cpu": 0.5, "load": 0.1}


def test_bars_are_judged_by_the_median_of_the_rounds() -> None:
    bench = Fanout(Path("generator"), 2000, 0, 1)
    ours, lazy = sides()[0].name, sides()[1].name
    bench.online = {ours: [online(1.0)] * 3, lazy: [online(2.5), online(1.0), online(2.0)]}
    bench.offline = {ours: [offline(1.0, 2000)] * 3, lazy: [offline(4.9, 2000)] * 3, EAGER: [offline(5.0, 1000)]}
    bench.steps = [step(1, 120_000), step(2, 110_000), step(3, 60_000)]
    report = markdown(bench, ["a note"])
    (row,) = [line for line in report.splitlines() if line.startswith(f"| {lazy} | 2.00 s")]
    assert "2.00 × (1.00 – 2.50)" in row and "≥ 2 ×: met" in row
    (row,) = [line for line in report.splitlines() if line.startswith(f"| {lazy} | 2000")]
    assert "4.90 ×" in row and "missed" in row
    (row,) = [line for line in report.splitlines() if line.startswith(f"| {EAGER}")]
    assert "10.00 ×" in row and "met" in row  # per vehicle: it had half of them
    assert "median 110 000 targets/s (bar 100000: met); not flat" in report


def test_every_pass_over_the_vehicles_is_another_request() -> None:
    vins = [f"v{number}" for number in range(6)]
    found = [json.loads(data[data.index(b"{") :]) for data in batches(vins, 6, 6, 3)]
    assert [
        {"ids": vins[:3], "request_id": "r1", "data_id": "d"},
        {"ids": vins[3:], "request_id": "r1", "data_id": "d"},
    ] == found


def test_packets() -> None:
    """Lengths of one and two bytes."""
    assert bytes.fromhex("32 07 0001 61 0005 78 79") == publish("a", b"xy", 5)
    assert bytes.fromhex("32 c801") == packet(0x32, bytes(200))[:3]


def test_vehicles_come_in_whole_batches() -> None:
    with pytest.raises(BenchError, match="a multiple of 200"):
        _measure(_parser().parse_args(["--vehicles", "250"]))
