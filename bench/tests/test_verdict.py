"""What the runner calls valid, and when a bar counts as met: no broker is started here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.brokers import BROKERS
from runner.measure import Plan, Runs, Sample
from runner.report import markdown
from runner.verdict import Flaw, Outcome, Row, Rows
from runner.workloads import WORKLOADS, Metric

PAIR = WORKLOADS["pair-q1-10-64"]
LATENCY = WORKLOADS["latency-1000"]
MEMORY = WORKLOADS["memory"]
SOUND = Sample(value=100.0, cpu_per_million=10.0, generator_load=0.5, broker_load=1.0, foreign_load=0.0, raw={"qos": 1})


def runs(broker: str, *values: float, workload: str = PAIR.name, sample: Sample = SOUND) -> Runs:
    """One broker's runs of a workload, one for each value, otherwise like `sample`."""
    samples = [replace(sample, value=value) for value in values]
    return Runs(WORKLOADS[workload], BROKERS[broker], samples)


def outcome(*entries: Runs) -> tuple[Outcome, float | None]:
    """How Motorcade's only bar stands."""
    (bar,) = Rows(entries).bars(["motorcade"])
    return bar.outcome, bar.figure


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"lost": 1}, Flaw.LOST),
        ({"reordered": 1}, Flaw.REORDERED),
        ({"misrouted": 1}, Flaw.MISROUTED),
        ({"disconnects": 1}, Flaw.DISCONNECTED),
        ({"not_connected": 1}, Flaw.NOT_CONNECTED),
        ({"unacknowledged": 1}, Flaw.UNFINISHED),
        ({"timed_out": True}, Flaw.UNFINISHED),
        ({"lower_qos": True}, Flaw.LOWER_QOS),
        ({"duplicated": 1, "raw": {"qos": 2}}, Flaw.DUPLICATED),
        ({"generator_load": 0.96}, Flaw.GENERATOR_BOUND),
        ({"generator_load": 0.90, "broker_load": 0.80}, Flaw.GENERATOR_BOUND),
    ],
)
def test_one_bad_sample_makes_the_row_invalid(changes: dict[str, object], flaw: Flaw) -> None:
    """Whatever went wrong is named, and the row is not valid."""
    bad = replace(SOUND, **changes)  # type: ignore[arg-type]
    assert (flaw,) == Row.of(Runs(PAIR, BROKERS["mosquitto"], [bad])).flaws


def test_a_loss_in_one_round_of_three_counts() -> None:
    """The median hides an outlier in speed, never a lost message."""
    entry = runs("mosquitto", 1, 2, 3)
    entry.samples[0] = replace(entry.samples[0], lost=1)
    assert (Flaw.LOST,) == Row.of(entry).flaws


@pytest.mark.parametrize(
    "changes",
    [{}, {"duplicated": 3}, {"generator_load": 0.90, "broker_load": 1.0}],
    ids=["sound", "dup-q1", "both-busy"],
)
def test_what_is_allowed_leaves_the_row_valid(changes: dict[str, object]) -> None:
    """Duplicates at QoS 1 are allowed, and a busy generator does no harm while the broker is busier."""
    assert Row.of(Runs(PAIR, BROKERS["mosquitto"], [replace(SOUND, **changes)])).valid  # type: ignore[arg-type]


def test_a_run_that_failed_makes_the_row_invalid() -> None:
    """Two good rounds do not make up for one that gave no figures."""
    entry = runs("mosquitto", 1, 2)
    entry.errors.append("no end after 90 s")
    assert (Flaw.FAILED,) == Row.of(entry).flaws


def test_a_late_generator_spoils_a_latency_but_a_spinning_one_does_not() -> None:
    """At a fixed rate the generator's load is 1 by design; only its lateness counts."""
    spinning = replace(SOUND, generator_load=1.0, broker_load=0.1, generator_late_p99=10.0)
    assert Row.of(runs("mosquitto", 100, workload=LATENCY.name, sample=spinning)).valid
    late = replace(spinning, generator_late_p99=51.0)
    assert (Flaw.GENERATOR_LATE,) == Row.of(runs("mosquitto", 100, workload=LATENCY.name, sample=late)).flaws


@pytest.mark.parametrize(("value", "expected"), [(300.0, Outcome.MET), (299.0, Outcome.MISSED)])
def test_a_bar_compares_medians(value: float, expected: Outcome) -> None:
    """The ratio is the median over the rounds against mosquitto's median."""
    assert (expected, value / 100) == outcome(runs("motorcade", 1, value, 9999), runs("mosquitto", 100, 5, 1000))


@pytest.mark.parametrize(("value", "expected"), [(150.0, Outcome.MET), (151.0, Outcome.MISSED)])
def test_a_latency_has_to_stay_below_its_bar(value: float, expected: Outcome) -> None:
    """For a latency, less is better."""
    mine, theirs = runs("motorcade", value, workload=LATENCY.name), runs("mosquitto", 100, workload=LATENCY.name)
    assert (expected, value / 100) == outcome(mine, theirs)


@pytest.mark.parametrize(("value", "expected"), [(8192.0, Outcome.MET), (8193.0, Outcome.MISSED)])
def test_memory_needs_no_mosquitto(value: float, expected: Outcome) -> None:
    """The bar on memory is a number of bytes, not a ratio."""
    assert (expected, value) == outcome(runs("motorcade", value, workload=MEMORY.name))


def test_a_bar_is_not_shown_by_an_invalid_row() -> None:
    """Neither ours nor mosquitto's may be invalid."""
    lossy = replace(SOUND, lost=1)
    good, bad = runs("motorcade", 900), runs("motorcade", 900, sample=lossy)
    assert Outcome.NOT_SHOWN is outcome(bad, runs("mosquitto", 100))[0]
    assert Outcome.NOT_SHOWN is outcome(good, runs("mosquitto", 100, sample=lossy))[0]
    assert (Outcome.NOT_SHOWN, None) == outcome(good)


def test_a_slow_generator_can_show_a_met_bar_but_not_a_missed_one() -> None:
    """It makes our figure too small: enough is enough, too little says nothing."""
    bound = replace(SOUND, generator_load=1.0)
    theirs = runs("mosquitto", 100)
    assert Outcome.MET is outcome(runs("motorcade", 300, sample=bound), theirs)[0]
    assert Outcome.NOT_SHOWN is outcome(runs("motorcade", 299, sample=bound), theirs)[0]


def test_a_sample_is_read_from_the_generators_line() -> None:
    """Each metric takes its own field; a rate that was not reached is told."""
    line = {
        "qos": 1,
        "granted_qos": 0,
        "rate": 900.0,
        "target_rate": 1000.0,
        "lat_us": {"p50": 5.0, "p99": 9.0},
        "lost": 2,
        "disconnects": 0,
        "conn_fail": 0,
        "gen_util": 0.4,
        "broker_util": 0.9,
        "cpu_s_per_M": 12.0,
    }
    sample = Sample.of(Metric.P99, line, foreign_load=0.1)
    assert (9.0, 5.0, 2, True, 0.9) == (sample.value, sample.p50, sample.lost, sample.lower_qos, sample.rate_reached)
    assert 900.0 == Sample.of(Metric.MESSAGES, line, foreign_load=0.1).value


def test_the_report_marks_what_is_not_valid() -> None:
    """Both tables say it, with the counts and the reason."""
    rows = Rows([runs("motorcade", 400, sample=replace(SOUND, lost=7)), runs("mosquitto", 100)])
    text = markdown(rows, Plan(Path("mqttload"), 1, 1.0, 0, 1), {"motorcade": "1", "mosquitto": "2"}, ["motorcade"], [])
    assert "400/s (4.00×) **invalid**" in text
    assert "| 7 / 0 / 0 | **not valid**: messages lost |" in text
    assert "0 met, 0 MISSED, 1 not shown" in text


def test_every_name_in_the_lists_fits() -> None:
    """What a broker leaves out exists, and the quick set has every kind of figure but memory."""
    for broker in BROKERS.values():
        assert set(broker.left_out) <= set(WORKLOADS)
    assert set(Metric) - {Metric.MEMORY} == {workload.metric for workload in WORKLOADS.values() if workload.quick}
