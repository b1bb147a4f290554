"""The crash test of dispatcher and workers in short, and its judge. `make chaos-dispatch` is the long one."""

from __future__ import annotations

import pytest

from tests.chaos.dispatch import Options, Verdict, chaos, judge, report

pytestmark = pytest.mark.timeout(600)


def test_nothing_is_lost_or_done_twice_when_anybody_is_killed() -> None:
    """Leader, worker, a master of the cluster; and a leader that hangs for three leases."""
    ways = {"leader": 1, "worker": 1, "pause": 1, "redis": 1}
    outcome = chaos(Options(rounds=4, engine="redis+cluster", ways=ways, lease=1.0, rate=1000, seed=5, quiet=True))
    assert outcome.passed, report(outcome)
    assert outcome.verdict.published == outcome.verdict.processed > 1000
    assert set(outcome.blows) == set(ways)
    assert outcome.leaderships >= 3


# -- the judge

GOOD = [("a", 1), ("b", 2), ("c", 3)]


def test_all_is_well() -> None:
    assert Verdict(published=3, processed=3, duplicated=0, lost=0, dead=0, invented=0) == judge(3, GOOD)
    assert judge(3, GOOD).passed


def test_what_is_wrong_is_found() -> None:
    for kind, entries in (
        ("lost", GOOD[:2]),
        ("duplicated", [*GOOD, ("a", 1)]),
        ("duplicated", [*GOOD, ("d", 1)]),
        ("duplicated", [("a", 1), ("b", 2), ("b", 3)]),
        ("invented", [*GOOD, ("d", 4)]),
    ):
        verdict = judge(3, entries)
        assert 1 == getattr(verdict, kind), kind
        assert not verdict.passed
    assert not judge(3, GOOD, dead=1).passed, "a message that was given up is no success"
