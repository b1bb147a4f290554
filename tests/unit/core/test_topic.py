"""Rules of topic names and filters, and matching against a slow matcher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.errors import TopicError
from motorcade.core.topic import check_filter, check_topic, is_wildcard, matches, split_share
from tests.support.cases import each, each_row
from tests.unit.core.matching import filters, slow_match, topics


@each(topic=("a", "/", "//", "a/b", "$SYS/x", " ", "ü/€/😀", "a" * 65535, "€" * 21845))
def test_names_that_may_stand_in_a_publish(topic: str) -> None:
    check_topic(topic)
    check_filter(topic)


@each_row(
    "topic told",
    (
        ("", "empty"),
        ("a/+", "wildcard"),
        ("#", "wildcard"),
        ("a#b", "wildcard"),
        ("a\0b", "U+0000"),
        ("a" * 65536, "65535 bytes"),
        ("€" * 21846, "65535 bytes"),
    ),
)
def test_names_that_may_not(topic: str, told: str) -> None:
    with pytest.raises(TopicError, match=told.replace("+", r"\+")):
        check_topic(topic)


@each(filter_=("#", "+", "+/+", "a/#", "+/a/+/#", "/#", "//+", "$SYS/#", "$share"))
def test_filters_that_may_stand_in_a_subscribe(filter_: str) -> None:
    check_filter(filter_)


@each_row(
    "filter_ told",
    (
        ("", "empty"),
        ("a+", "stand alone"),
        ("+a/b", "stand alone"),
        ("a/b#", "stand alone"),
        ("##", "stand alone"),
        ("#/a", "last level"),
        ("a/#/b", "last level"),
        ("a\0/#", "U+0000"),
        ("a/" * 32768, "65535 bytes"),
    ),
)
def test_filters_that_may_not(filter_: str, told: str) -> None:
    with pytest.raises(TopicError, match=told.replace("+", r"\+")):
        check_filter(filter_)


@given(topics, st.integers(1, 6))
def test_levels_are_counted(topic: str, limit: int) -> None:
    """An empty level is a level."""
    if len(topic.split("/")) <= limit:
        check_topic(topic, limit)
    else:
        with pytest.raises(TopicError, match=f"more than {limit} levels"):
            check_topic(topic, limit)


@each_row(
    "text parts",
    (
        ("a/b", (None, "a/b")),
        ("$share/g/a", ("g", "a")),
        ("$share/g/a/+/#", ("g", "a/+/#")),
        ("$share/g//", ("g", "/")),
        ("$sharex/g/a", (None, "$sharex/g/a")),
        ("$Share/g/a", (None, "$Share/g/a")),
    ),
)
def test_shared_subscriptions_are_taken_apart(text: str, parts: tuple[str | None, str]) -> None:
    assert parts == split_share(text)


@each(text=("$share", "$share/", "$share/g", "$share/g/", "$share//a", "$share/+/a", "$share/g#/a"))
def test_broken_shared_subscriptions(text: str) -> None:
    with pytest.raises(TopicError, match="shared subscription"):
        split_share(text)


@given(filters() | topics, topics)
def test_matching(filter_: str, topic: str) -> None:
    assert slow_match(filter_, topic) == matches(filter_, topic)


@given(topics)
def test_every_filter_made_from_a_topic_matches_it(topic: str) -> None:
    """A topic itself, one wildcard in place of each level, and the rest left out."""
    levels = topic.split("/")
    assert matches(topic, topic)
    for i in range(len(levels)):
        if i == 0 and topic.startswith("$"):
            continue
        assert matches("/".join([*levels[:i], "+", *levels[i + 1 :]]), topic)
        assert matches("/".join([*levels[: i + 1], "#"]), topic)


@given(filters() | topics)
def test_only_filters_with_wildcards_match_more_than_one_topic(filter_: str) -> None:
    assert is_wildcard(filter_) == any(level in ("+", "#") for level in filter_.split("/"))
