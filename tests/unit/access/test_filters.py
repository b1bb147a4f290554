"""Which subscription is inside another, and which have something in common, compared with trying every topic."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from motorcade.core.topic import matches
from motorcade.plugins.access.filters import covers, overlaps
from tests.support.tables import each_case

# "z" stands in no filter below, so `+` is never the same as all names tried.
NAMES = ("", "a", "b", "z", "$s")
# One level more than any filter has, so that `#` is tried with a longer topic.
TOPICS = [
    "/".join(levels) for n in (1, 2, 3, 4) for levels in itertools.product(NAMES, repeat=n) if any(levels) or n > 1
]

levels = st.lists(st.sampled_from(["", "a", "b", "$s", "+"]), min_size=0, max_size=3)
filters = st.builds(lambda head, rest: "/".join(head + rest), levels, st.sampled_from([[], ["#"]])).filter(
    lambda text: text and len(text.split("/")) <= 3
)


@settings(max_examples=500)
@given(filters, filters)
@example("+/#", "#")
@example("#", "+/#")
@example("a/+", "a/#")
@example("a/#", "a")
@example("#", "$s/#")
def test_covers_agrees_with_trying_every_topic(wide: str, narrow: str) -> None:
    """A filter covers another exactly if no topic is matched by the other alone."""
    truth = all(matches(wide, topic) for topic in TOPICS if matches(narrow, topic))
    assert truth or not covers(wide, narrow)
    if "/#" not in (wide, narrow):  # about the empty topic, which does not exist, the answer is on the safe side
        assert truth == covers(wide, narrow)


@settings(max_examples=500)
@given(filters, filters)
@example("a/#", "a")
@example("+/b", "a/+")
@example("+", "$s")
def test_overlaps_agrees_with_trying_every_topic(one: str, other: str) -> None:
    """Two filters overlap exactly if a topic is matched by both."""
    truth = any(matches(one, topic) and matches(other, topic) for topic in TOPICS)
    assert overlaps(one, other) or not truth
    if "/#" not in (one, other):  # as above
        assert truth == overlaps(one, other)
    assert overlaps(one, other) == overlaps(other, one)


@each_case(
    ("wide", "narrow", "expected"),
    [
        ("a/+", "a/b", True),
        ("a/+", "a/#", False),
        ("a/#", "a/#", True),
        ("a/#", "a/+/c", True),
        ("#", "a/#", True),
        ("#", "$SYS/#", False),
        ("$SYS/#", "#", False),
        ("a/b", "a/+", False),
    ],
)
def test_what_an_allow_rule_may_grant(wide: str, narrow: str, expected: bool) -> None:
    assert expected == covers(wide, narrow)
