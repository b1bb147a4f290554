"""The crash test of compacted queues in short, and its judge. `make chaos ECQ=1 ROUNDS=100` is the long one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.chaos.ecq import Options, crash, report
from tests.chaos.ecq_judge import Delivery, Place, Publication, Story, Verdict, Visit, judge

PLACE = Place("exclusive", "car")


@pytest.mark.parametrize("engine", ["rocksdb", "redis"])
def test_no_compacted_queue_breaks_a_promise_when_the_node_is_killed(engine: str) -> None:
    outcome = crash(Options(rounds=2, engine=engine, seed=3, quiet=True, standstill=60.0))
    assert outcome.verdict.passed, report(outcome)
    assert outcome.verdict.acknowledged > 100 and outcome.verdict.delivered > 100, report(outcome)


# --- the judge ----------------------------------------------------------------------------------------------------


def put(value: int, key: str = "k", reason: int | None = 0) -> Publication:
    return Publication(PLACE, key, value, reason)


def got(number: int, value: int, key: str = "k", acked: bool = True, refused: bool = False) -> Delivery:
    return Delivery(1, number, key, value, acked, refused)


def judged(published: Sequence[Publication], visits: Sequence[Visit], stored: dict[str, tuple[int, int]]) -> Verdict:
    return judge(published, [Story(PLACE, "car", list(visits))], {PLACE: stored})


def test_nothing_is_wrong() -> None:
    """A value whose producer heard nothing may be there or not; killed nodes may give acknowledged messages again."""
    visits = [Visit(1, [got(1, 0), got(2, 1)]), Visit(2, [got(2, 1), got(3, 2)])]
    found = judged([put(0), put(1), put(2, reason=None), put(3, reason=None)], visits, {"k": (3, 2)})
    assert found.passed, list(found.told())
    assert (4, 2, 4, 1) == (found.published, found.acknowledged, found.delivered, found.again)


def test_what_is_wrong_is_found() -> None:
    wrong: list[tuple[str, list[Publication], list[Visit], dict[str, tuple[int, int]]]] = [
        ("lost", [put(0), put(1)], [Visit(1, [got(1, 0)])], {"k": (1, 0)}),
        ("lost", [put(0)], [], {}),
        ("refused", [put(0, reason=0x97)], [], {}),
        ("backwards", [put(0), put(1)], [Visit(1, [got(2, 1)]), Visit(2, [got(1, 0)])], {"k": (2, 1)}),
        ("reused", [put(0), put(1)], [Visit(1, [got(1, 0)]), Visit(2, [got(1, 1)])], {"k": (1, 1)}),
        ("reused", [put(0), put(1, "l")], [Visit(1, [got(1, 0)])], {"k": (1, 0), "l": (1, 1)}),
        ("invented", [put(0)], [Visit(1, [got(1, 0), got(2, 7)])], {"k": (2, 7)}),
        ("unordered", [put(0), put(1, "l")], [Visit(1, [got(2, 1, "l"), got(1, 0)])], {"k": (1, 0), "l": (2, 1)}),
        ("repeated", [put(0)], [Visit(1, [got(1, 0)], polite=True), Visit(1, [got(1, 0)])], {"k": (1, 0)}),
        ("unfinished", [put(0), put(1)], [Visit(1, [got(1, 0)])], {"k": (2, 1)}),
    ]
    for kind, published, visits, stored in wrong:
        assert judged(published, visits, stored).count(kind), (kind, published, visits)


def test_what_is_not_wrong() -> None:
    """Smaller numbers after a rewind or a refusal; repeated after a loss, a kill, a rewind, or behind a hole."""
    stored = {"k": (1, 0), "l": (2, 1)}
    published = [put(0), put(1, "l")]
    back = Visit(1, [got(2, 1, "l"), got(1, 0), got(2, 1, "l")], rewound=True)
    assert judged(published, [back], stored).passed
    refused = Visit(1, [got(1, 0, acked=False, refused=True), got(2, 1, "l"), got(1, 0)])
    assert judged(published, [refused], stored).passed
    both = [got(1, 0), got(2, 1, "l")]
    for before in (
        Visit(1, both),
        Visit(0, both, polite=True),
        Visit(1, both, polite=True, rewound=True),
        Visit(1, [got(1, 0, acked=False), got(2, 1, "l")], polite=True),
    ):
        assert judged(published, [before, Visit(1, [got(1, 0), got(2, 1, "l")])], stored).passed
