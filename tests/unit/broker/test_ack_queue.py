"""The queue in which the answers of a session wait for the store."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from motorcade.broker.ack_queue import AckQueue
from motorcade.commit import Commit


def test_one_that_was_called_may_join_again() -> None:
    told: list[str] = []
    acks, commit = AckQueue(), Commit[None]()

    def again() -> None:
        told.append("first")
        acks.join(Commit.stored(None), partial(told.append, "again"))

    acks.join(commit, again)
    acks.join(commit, partial(told.append, "second"))
    commit.finish()
    assert told == ["first", "second", "again"] and acks.answers == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_answers_leave_in_the_order_of_joining(which: list[int], random: object) -> None:
    """However commits are shared and in whatever order they are done; and an answer leaves as soon as it can."""
    told: list[int] = []
    acks = AckQueue()
    commits = [Commit[None]() for _ in range(5)]
    for number, commit in enumerate(which):
        acks.join(commits[commit], partial(told.append, number), 1, 10)
    order = list(range(5))
    random.shuffle(order)  # type: ignore[attr-defined]
    done: set[int] = set()
    for commit in order:
        commits[commit].finish()
        done.add(commit)
        expected = next((n for n, waits_for in enumerate(which) if waits_for not in done), len(which))
        assert told == list(range(expected))
        assert acks.answers * 10 == acks.size == 10 * (len(which) - expected)
