"""What the report of several nodes says about figures: no node is started here."""

from __future__ import annotations

from pathlib import Path

from runner.cluster import IN_TURNS, LAYOUTS, Bench, Figures, cases, markdown


def bench(**costs: float) -> Bench:
    """Figures of live messages of QoS 1: what one costs in each layout, µs; the third round costs twice as much."""
    measured = Bench(Path("generator"), (0, 1))
    for layout, cost in costs.items():
        for each in (cost, cost, 2 * cost):
            for row in (layout, IN_TURNS.get(layout, layout)):
                measured.figures.setdefault(("live-q1", row), Figures()).add(1000.0, each, 0.1, 0.2)
    return measured


def test_bars_compare_the_median_cost_of_a_message() -> None:
    measured = bench(lone=1.0, member=1.05, two=1.3, across=3.0)
    assert [True, True, True] == [met for *_, met in measured.bars()]
    assert [0.95, 1.54, 2.31] == [round(ratio, 2) for _, ratio, _ in measured.bars()]


def test_what_a_node_costs_without_traffic_is_taken_from_its_core() -> None:
    """Not from the cost of its messages, which a slow machine would make larger."""
    measured = bench(lone=1.0, member=1.0, two=1.3, across=2.0)
    assert 1.0 == measured.bars()[0][1]
    for layout, share in (("lone", 0.01), ("member", 0.07)):
        measured.figures["live-q1", IN_TURNS[layout]].idle = [share, share, 0.5]
    (what, ratio, met), *_ = measured.bars()
    assert ("live-q1: a member alone" in what, 0.939, False) == (True, round(ratio, 3), met)
    assert "live-q1 member, in turns: 7.00% of a core without traffic" in markdown(measured, cases(quick=True), [])


def test_each_bar_can_be_missed() -> None:
    measured = bench(lone=1.0, member=1.06, two=1.34, across=3.4)
    assert [False, False, False] == [met for *_, met in measured.bars()]
    assert 3 == markdown(measured, cases(quick=True), ["a note"]).count("missed")


def test_what_was_not_measured_is_not_judged() -> None:
    measured = bench(lone=1.0, member=1.0)
    assert [] == measured.bars()
    assert "| live-q1 | lone " in markdown(measured, cases(quick=True), [])


def test_every_kind_of_traffic_is_measured_in_every_layout() -> None:
    assert {tuple(LAYOUTS)} == {case.layouts for case in cases(quick=False)}
