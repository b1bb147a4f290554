"""What is remembered, and for how long."""

from __future__ import annotations

from motorcade.core.lately import Lately


def test_the_last_ones_are_remembered_and_old_ones_forgotten() -> None:
    lately: Lately[int] = Lately(10)
    for number in range(100):
        lately.add(number)
        assert all(kept in lately for kept in range(max(0, number - 9), number + 1))
        assert len(lately) <= 20
    assert 50 not in lately


def test_all_can_be_forgotten() -> None:
    lately: Lately[int] = Lately(2)
    for number in range(3):
        lately.add(number)
    lately.clear()
    assert 0 == len(lately) and 2 not in lately
