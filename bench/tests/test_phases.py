"""The conversation with a generator that pauses, and the histogram that is read meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.brokers import BROKERS
from runner.lag import Lag
from runner.machine import BenchError
from runner.measure import Plan, Runs, Sample
from runner.million import Outcome, Step, report
from runner.phases import converse
from runner.report import markdown
from runner.verdict import Rows
from runner.workloads import WORKLOADS, Metric

PAGE = """# TYPE motorcade_loop_lag_seconds histogram
motorcade_loop_lag_seconds_bucket{le="0.001"} 6
motorcade_loop_lag_seconds_bucket{le="0.005"} 8
motorcade_loop_lag_seconds_bucket{le="+Inf"} 9
motorcade_loop_lag_seconds_sum 0.25
motorcade_loop_lag_seconds_count 9
"""
EARLIER = Lag(((0.001, 2), (0.005, 2), (float("inf"), 2)), 0.05)
#: Talks as mqttload does: a line for each phase, then it waits; what it was answered is in the next line.
GENERATOR = """
import json, sys
heard = sys.argv[-1]
for phase in {phases}:
    print(json.dumps(dict(phase=phase, heard=heard)), flush=True)
    if phase != "drain":
        heard = sys.stdin.readline().strip()
sys.stderr.write("first\\nthe reason\\n")
sys.exit({code})
"""


def generator(code: int = 0, phases: tuple[str, ...] = ("asleep", "fill", "drain")) -> list[str]:
    return [sys.executable, "-c", GENERATOR.format(phases=phases, code=code)]


def test_the_generator_hears_an_answer_after_each_phase_but_the_last() -> None:
    """Whoever listens is asked once for each pause, and what it says reaches the generator."""
    asked: list[str] = []

    def listener(phase: str) -> str:
        asked.append(phase)
        return f"after {phase}"

    said = converse(generator(), 30, listener)
    assert ["asleep", "fill"] == asked
    assert ["--pause", "after asleep", "after fill"] == [said[phase]["heard"] for phase in ("asleep", "fill", "drain")]


@pytest.mark.parametrize(
    "command", [generator(code=2), generator(phases=("asleep", "fill"))], ids=["exit code", "no last phase"]
)
def test_a_generator_that_breaks_off_is_an_error_with_its_last_words(command: list[str]) -> None:
    """Half a conversation gives no figures."""
    with pytest.raises(BenchError, match="the reason"):
        converse(command, 30)


def test_a_generator_that_does_not_end_is_stopped() -> None:
    """The patience is for the whole conversation."""
    with pytest.raises(BenchError, match="no end after 0 s; it had told of nothing"):
        converse([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_a_failing_listener_ends_the_generator_too() -> None:
    """The error is the listener's; the generator is not left waiting for an answer."""

    def listener(phase: str) -> str:
        raise BenchError(f"the broker is gone after {phase}")

    with pytest.raises(BenchError, match="gone after asleep"):
        converse(generator(), 30, listener)


def test_lag_is_what_came_between_two_readings() -> None:
    """The node's histogram is cumulative, in buckets and in time."""
    lag = Lag.parse(PAGE).since(EARLIER)
    assert ((0.001, 4), (0.005, 6), (float("inf"), 7)) == lag.buckets
    assert (7, pytest.approx(0.2)) == (lag.count, lag.seconds)
    assert lag.buckets == Lag.from_json(lag.as_json()).buckets


def test_a_page_without_the_histogram_is_an_error() -> None:
    """Silence would look like a loop that is never late."""
    with pytest.raises(BenchError, match="no motorcade_loop_lag_seconds"):
        Lag.parse("motorcade_uptime_seconds 3\n")


def test_lag_is_drawn_up_to_its_latest_sample() -> None:
    """Each bucket has its own samples and share; one late sample is visible; empty buckets at the end are left out."""
    many = Lag(((0.001, 990), (0.005, 990), (0.01, 991), (0.05, 991), (float("inf"), 991)), 1.0)
    lines = [line.split() for line in many.drawing()]
    assert [["≤", "1", "ms", "990"], ["≤", "5", "ms", "0"], ["≤", "10", "ms", "1"]] == [line[:4] for line in lines]
    assert ("#" * 40, "#") == (lines[0][-1], lines[2][-1])
    assert "> 5 ms" in Lag.parse(PAGE).drawing()[-1]


def test_a_run_in_phases_gives_a_row_for_each() -> None:
    """Fill and drain come from one run and are judged apart, against both ways mosquitto keeps messages."""
    workload = WORKLOADS["offline-own-100-10-64"]
    assert ["offline-own-100-10-64-fill", "offline-own-100-10-64-drain"] == [row.name for row in workload.rows()]
    entries = [
        Runs(row, broker, [_sample(rate)])
        for broker, rate in zip(
            (BROKERS["motorcade"].stored[0], *BROKERS["mosquitto"].stored), (60, 20, 3), strict=True
        )
        for row in workload.rows()
    ]
    plan = Plan(Path("mqttload"), rounds=1, seconds=1.0, broker_core=0, generator_core=1)
    page = markdown(Rows(entries), plan, {}, ["motorcade"], [])
    assert "| offline-own-100-10-64-drain | messages/s | 60/s (3.00×, 20.00×) | 20/s | 3/s |" in page
    assert "round 1:\n\n```text\n     ≤ 1 ms        6" in page


def _sample(rate: float) -> Sample:
    raw = {"rate": rate, "qos": 1, "cpu_s_per_M": 1.0, "gen_util": 0.1, "broker_util": 1.0, "disconnects": 0}
    return Sample.of(Metric.MESSAGES, raw | {"conn_fail": 0, "loop_lag": Lag.parse(PAGE).as_json()}, foreign_load=0.0)


DRAINED = {
    "received": 10,
    "expected": 10,
    "lost": 0,
    "reordered": 0,
    "dup": 0,
    "unexpected": 0,
    "left": 0,
    "disconnects": 0,
    "conn_fail": 0,
    "clients": 2,
    "session_present": 2,
    "timed_out": False,
}


def million(**changes: object) -> Outcome:
    steps = [Step("fill", seconds=2.0, messages=10, resident=400 * 2**20), Step("drain", resident=600 * 2**20)]
    return Outcome("own", "motorcade-safe", steps, {"fill": {"unacked": 0}, "drain": DRAINED | changes})


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"lost": 1}, "lost: 1"),
        ({"reordered": 2}, "reordered: 2"),
        ({"unexpected": 1}, "unexpected: 1"),
        ({"left": 3}, "left: 3"),
        ({"session_present": 1}, "forgotten sessions: 1"),
        ({"timed_out": True}, "timed out"),
    ],
)
def test_what_must_not_happen_to_a_million_messages(changes: dict[str, object], flaw: str) -> None:
    """Each fault is named; a message that comes twice at QoS 1 is none."""
    assert [flaw] == million(**changes).flaws
    assert [] == million(dup=5).flaws


def test_the_report_of_a_million_judges_the_largest_step() -> None:
    """The bar on memory is about the worst moment of all steps."""
    page = report(million())
    assert "600 MiB at most; bar: below 500 MiB: MISSED" in page
    assert "| fill | 2.00 | 10 | 5 | 400 MiB |" in page
    assert "complete and in order" in page
