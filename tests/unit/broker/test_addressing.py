"""Patterns of filters that name their own client: which filters lie inside, which topics fit, what is refused."""

from __future__ import annotations

import pytest

from motorcade.broker.addressing import Addressing, problem_of
from motorcade.core.topic import matches

AGENT = "agent/{client}/#"


@pytest.mark.parametrize(
    ("pattern", "filter_", "inside"),
    [
        (AGENT, "agent/V1/#", True),
        (AGENT, "agent/V1", True),
        (AGENT, "agent/V1/proxy/request/+", True),
        (AGENT, "agent/V1/+/#", True),
        (AGENT, "agent/V2/#", False),
        (AGENT, "agent/V11/#", False),
        (AGENT, "agent/+/#", False),
        (AGENT, "agent/#", False),
        (AGENT, "#", False),
        (AGENT, "+/V1/#", False),
        (AGENT, "agents/V1/#", False),
        (AGENT, "$share/g/agent/V1/#", False),
        ("a/{client}/b", "a/V1/b", True),
        ("a/{client}/b", "a/V1/+", False),
        ("a/{client}/b", "a/V1/#", False),
        ("a/{client}/b", "a/V1/b/#", False),
        ("a/{client}/b", "a/V1", False),
        ("a/{client}/+", "a/V1/+", True),
        ("a/{client}/+", "a/V1/b", True),
        ("a/{client}/+", "a/V1/#", False),
        ("+/{client}", "x/V1", True),
        ("+/{client}", "+/V1", True),
        ("+/{client}/#", "#", False),
        ("{client}/#", "V1/x", True),
        ("{client}/#", "V1", True),
    ],
)
def test_a_filter_lies_inside_a_pattern(pattern: str, filter_: str, inside: bool) -> None:
    assert inside is Addressing([pattern]).covers("V1", filter_)


@pytest.mark.parametrize("client_id", ["+", "#", "a/b", "$SYS"])
def test_an_id_that_is_no_level_of_a_topic_is_never_addressed(client_id: str) -> None:
    addressing = Addressing(["{client}/#", AGENT])
    assert not addressing.covers(client_id, f"{client_id}/x")
    assert not addressing.covers(client_id, f"agent/{client_id}") or client_id == "$SYS"


@pytest.mark.parametrize(
    ("patterns", "topic", "named"),
    [
        ([AGENT], "agent/V1/cmd", ("V1",)),
        ([AGENT], "agent/V1", ("V1",)),
        ([AGENT], "agent", ()),
        ([AGENT], "agent//cmd", ()),
        ([AGENT], "other/V1/cmd", ()),
        (["a/{client}/b"], "a/V1/b", ("V1",)),
        (["a/{client}/b"], "a/V1/b/c", ()),
        (["a/{client}/b"], "a/V1", ()),
        (["{client}/#"], "$SYS/x", ()),
        ([AGENT, "+/+/{client}", "agent/{client}/cmd"], "agent/V1/cmd", ("V1", "cmd")),
        ([], "agent/V1/cmd", ()),
    ],
)
def test_a_topic_names_clients(patterns: list[str], topic: str, named: tuple[str, ...]) -> None:
    assert named == Addressing(patterns).clients_of(topic)


def test_every_topic_of_a_filter_inside_names_the_client() -> None:
    """That is what makes a route unnecessary."""
    levels = ["agent", "V1", "V2", "x", ""]
    filters = ["/".join(f) for f in _words([*levels[:4], "+"], 4)]
    filters += [f"{filter_}/#" for filter_ in filters] + ["#"]
    topics = ["/".join(t) for t in _words(levels, 4) if any(t)]
    for pattern in (AGENT, "agent/{client}", "+/{client}/x", "{client}/+/#", "agent/{client}/+/x"):
        addressing = Addressing([pattern])
        inside = [filter_ for filter_ in filters if addressing.covers("V1", filter_)]
        assert inside
        for filter_ in inside:
            assert all("V1" in addressing.clients_of(topic) for topic in topics if matches(filter_, topic)), filter_


def _words(letters: list[str], longest: int) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = [()]
    for _ in range(longest):
        words += [(*word, letter) for word in words if len(word) == len(words[-1]) for letter in letters]
    return [word for word in words if word]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (AGENT, ""),
        ("+/{client}/a/+/#", ""),
        ("", "is empty"),
        ("agent/#/{client}", "must be the last level"),
        ("agent/{client}#", "wildcard must stand alone"),
        ("agent/VIN/#", "must have the level {client} once, for the id of the client, as in agent/{client}/#"),
        ("{client}/{client}", "must have the level {client} once"),
        ("agent/x-{client}/#", "must have the level {client} once"),
        ("agent/{client}/{vin}", "has '{vin}', but {client} is all that can be filled in"),
        ("$share/g/agent/{client}", "begins with $"),
    ],
)
def test_what_is_wrong_with_a_pattern(pattern: str, problem: str) -> None:
    found = problem_of(pattern)
    assert problem in found
    assert bool(problem) is bool(found)
