"""When draining a source counts as quick enough, and idle subscribers as free: no node is started here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.machine import SOURCES, BenchError
from runner.measure import Runs, Sample
from runner.sources import IDLE_BAR, Case, Idle, MotorcadeSources, Result, Setup, _chosen, cases, idle_outcome, markdown
from runner.verdict import Outcome, Row

CASE = Case("stream", 1, 1, 1000)
NODE = MotorcadeSources("stream", Setup("memory://", 32))
SOUND = Sample(
    value=100.0,
    cpu_per_million=10.0,
    generator_load=0.5,
    broker_load=1.0,
    foreign_load=0.0,
    raw={"qos": 1, "first_s": 0.002},
)
FILL = {"unacked": 0, "timed_out": False, "rate": 50.0}


def result(
    live: list[float], drain: list[float], *, live_sample: Sample = SOUND, drain_sample: Sample = SOUND
) -> Result:
    """Rounds of a case, one for each pair of values."""
    return Result(CASE, row(live, live_sample), row(drain, drain_sample), [FILL] * len(live))


def row(values: list[float], sample: Sample = SOUND, *errors: str) -> Row:
    return Row.of(Runs(CASE.workload("phase"), NODE, [replace(sample, value=value) for value in values], list(errors)))


def test_the_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    """A slow minute hits both phases of its round, and so leaves their ratio as it is."""
    found = result([1000, 10, 1000], [600, 6, 100])
    assert (0.6, Outcome.MET) == (found.ratio, found.outcome)


@pytest.mark.parametrize(("drain", "expected"), [(50.0, Outcome.MET), (49.0, Outcome.MISSED)])
def test_half_of_the_live_rate_is_enough(drain: float, expected: Outcome) -> None:
    """The bar itself is met."""
    assert expected is result([100.0], [drain]).outcome


def test_an_invalid_phase_shows_nothing() -> None:
    """Neither a loss nor a live rate that is the generator's own says how fast the node is."""
    lossy, bound = replace(SOUND, lost=1), replace(SOUND, generator_load=1.0)
    assert Outcome.NOT_SHOWN is result([100], [90], drain_sample=lossy).outcome
    assert Outcome.NOT_SHOWN is result([100], [90], live_sample=lossy).outcome
    assert Outcome.NOT_SHOWN is result([100], [90], live_sample=bound).outcome


def test_a_generator_that_is_too_slow_for_the_drain_shows_a_met_bar_only() -> None:
    """The true ratio can only be higher."""
    bound = replace(SOUND, generator_load=1.0)
    assert Outcome.MET is result([100], [60], drain_sample=bound).outcome
    assert Outcome.NOT_SHOWN is result([100], [40], drain_sample=bound).outcome


@pytest.mark.parametrize(("more", "expected"), [(IDLE_BAR * 0.9, Outcome.MET), (IDLE_BAR * 1.1, Outcome.MISSED)])
def test_idle_subscribers_of_sources_are_compared_with_plain_ones(more: float, expected: Outcome) -> None:
    """Cores beyond those of plain subscribers count, whatever these take."""
    plain = Idle("plain", 1000, 20.0, cpu=0.4, kib_each=4.0)
    assert expected is idle_outcome(plain, replace(plain, name="stream", cpu=0.4 + more * 20.0))


def test_the_report_has_a_line_for_each_row_with_its_verdict() -> None:
    """What is not valid is said with the reason; what failed has no figures."""
    failed = Result(CASE, row([], SOUND, "no | end"), row([], SOUND, "no | end"), [])
    lossy = result([100], [90], drain_sample=replace(SOUND, lost=7))
    page = markdown([result([100], [60]), lossy, failed], [], ["a note"])
    assert "| stream-q1-1 | 100/s | 60/s | 0.60× | 0.60× – 0.60× | 10.0 / 10.0 | 50/s | 2 ms | 0 / 0 / 0 |" in page
    assert "not shown (**not valid**: drain: messages lost)" in page
    assert "failed: no / end" in page


def test_rows_are_chosen_by_name() -> None:
    """A name that does not exist is an error with all that do."""
    assert ([case for case in cases(100) if case.name == "queue-q1-10"], True) == _chosen(["queue-q1-10", "idle"], 100)
    with pytest.raises(BenchError, match=r"no such row: queues-q1 .*stream-q0-1.*idle"):
        _chosen(["queues-q1"], 100)


def test_the_bound_filter_is_that_of_the_generators_stored_topics() -> None:
    """The generator publishes below TAG/source/1 what is to be kept, and TAG is given to it."""
    assert '"bench/source/1/#"' in (SOURCES / "motorcade.toml").read_text()
    assert ["--tag", "bench"] == CASE.arguments()[:2]
