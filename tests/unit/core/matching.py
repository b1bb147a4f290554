"""Matching a second time, as slowly and plainly as the specification tells it (4.7), and strategies for topics."""

from __future__ import annotations

from hypothesis import strategies as st

LEVELS = ("a", "b", "", "$s", "ü")
levels = st.sampled_from(LEVELS)
topics = st.lists(levels, min_size=1, max_size=5).map("/".join).filter(bool)


@st.composite
def filters(draw: st.DrawFn) -> str:
    parts = draw(st.lists(levels | st.just("+"), max_size=4))
    if draw(st.booleans()) or not parts:
        parts.append("#")
    return "/".join(parts) or "+"


def slow_match(filter_: str, topic: str) -> bool:
    """Take the first level of both away until one is empty."""
    if topic.startswith("$") and filter_[0] in "+#":
        return False
    return _levels_match(filter_.split("/"), topic.split("/"))


def _levels_match(wanted: list[str], given: list[str]) -> bool:
    if wanted == ["#"]:
        return True
    if not wanted or not given:
        return wanted == given
    return (wanted[0] in ("+", given[0])) and _levels_match(wanted[1:], given[1:])
