"""What is remembered, and for how long."""

from __future__ import annotations

from motorcade.core.recent import RecentSet


def test_the_last_ones_are_remembered_and_old_ones_forgotten() -> None:
    recent: RecentSet[int] = RecentSet(10)
    for number in range(100):
        recent.add(number)
        assert all(kept in recent for kept in range(max(0, number - 9), number + 1))
        assert len(recent) <= 20
    assert 50 not in recent


def test_all_can_be_forgotten() -> None:
    recent: RecentSet[int] = RecentSet(2)
    for number in range(3):
        recent.add(number)
    recent.clear()
    assert 0 == len(recent) and 2 not in recent
