"""The place of a consumer: given, acknowledged in any order, done."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from motorcade.delivery.cursor import Cursor


def begun(after: int = 0) -> Cursor:
    cursor = Cursor()
    cursor.begin(after)
    return cursor


def test_done_is_what_nothing_lies_below() -> None:
    cursor = begun(4)
    cursor.give([5, 7, 8, 12])
    assert not cursor.acknowledge([7])
    assert not cursor.acknowledge([12, 7])
    assert (4, 2) == (cursor.done, cursor.in_flight)
    assert cursor.acknowledge([5])
    assert 7 == cursor.done
    assert cursor.acknowledge([8])
    assert (12, True, 0) == (cursor.done, cursor.clear, cursor.in_flight)


def test_what_was_never_given_is_done_with_when_all_else_is() -> None:
    cursor = begun()
    cursor.give([3])
    assert not cursor.catch_up(9)
    cursor.acknowledge([3])
    assert cursor.catch_up(9)
    assert not cursor.catch_up(9)
    assert not cursor.acknowledge([5])
    assert 9 == cursor.done


@given(st.randoms(use_true_random=False), st.lists(st.integers(1, 8), min_size=1, max_size=30))
def test_acknowledged_in_any_order_and_in_runs(dice: random.Random, lengths: list[int]) -> None:
    """A run is as one by one, wherever it ends."""
    order = list(range(1, 31))
    for _ in range(dice.choice((0, 3, 100))):
        one, other = dice.randrange(30), dice.randrange(30)
        order[one], order[other] = order[other], order[one]
    single, runs = begun(), begun()
    for cursor in (single, runs):
        cursor.give(range(1, 31))
    acknowledged: set[int] = set()
    for length in lengths:
        run, order = order[:length], order[length:]
        before = single.done
        for number in run:
            single.acknowledge([number])
            acknowledged.add(number)
            assert single.done == max(n for n in range(31) if acknowledged.issuperset(range(1, n + 1)))
        assert runs.acknowledge(run) is (single.done > before)
        assert (single.done, single.in_flight) == (runs.done, runs.in_flight) == (runs.done, 30 - len(acknowledged))


def test_a_consumer_that_is_back_gets_what_the_session_does_not_know() -> None:
    """In flight 2 and 4; 3 acknowledged, 5 sent and lost, 6 acknowledged, 7 never sent."""
    cursor = begun(1)
    cursor.give([2, 3, 4, 5, 6, 7])
    cursor.acknowledge([3, 6])
    assert {2, 3, 4, 6} == cursor.resume({2, 4})
    cursor.acknowledge([2, 4])
    assert 4 == cursor.done
    cursor.give([5, 7])  # again, and for the first time
    assert 4 == cursor.done
    cursor.acknowledge([5, 7])
    assert (7, True) == (cursor.done, cursor.clear)


def test_what_was_lost_and_is_gone_from_the_log_is_done() -> None:
    cursor = begun()
    cursor.give([1, 2, 3])
    assert {3} == cursor.resume({3})
    cursor.give([2, 5])  # 1 was trimmed
    assert 1 == cursor.done
    cursor.acknowledge([2, 3])
    assert (3, 1) == (cursor.done, cursor.in_flight)


def test_a_new_beginning_forgets_what_was_given() -> None:
    cursor = begun()
    cursor.give([1, 2])
    before = cursor.start
    cursor.begin(7, ahead=True)
    assert (7, True, True) == (cursor.done, cursor.clear, cursor.ahead)
    assert before < cursor.start
    cursor.give([9])
    assert not cursor.ahead
