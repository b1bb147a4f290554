"""Regular expressions in rules: they match what `re` matches, and cost the same for every name of a length."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motorcade.core.client import ClientInfo
from motorcade.plugins.access import aclfile
from motorcade.plugins.access.expressions import MAX_SUBJECT, Expression, ExpressionError, SubjectError
from motorcade.plugins.access.rules import Action
from tests.support.tables import each_case

from .conftest import Start

ATOMS = st.sampled_from(
    ["a", "b", ".", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[^a-b]", "[a-c1]", r"[^\d]", "^", "$", r"\Z", "", "\n"]
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, repeats).map(lambda two: f"({two[0]}){two[1]}"),
    )


@given(st.recursive(ATOMS, combined, max_leaves=6), st.text("aAbB1\n_", max_size=6), st.booleans())
@example("(a|ab)(c|bcd)(d*)", "abcd", False)
@example("a$", "a\n", False)
@example("$[^a]", "\n", False)
@example("$^", "\n", False)
@example("$^", "", False)
def test_it_matches_what_re_matches(pattern: str, subject: str, fold: bool) -> None:
    text = f"(?i){pattern}" if fold else pattern
    assert (re.search(text, subject) is not None) == Expression(text).search(subject)


@each_case("pattern", ["(a+)+$", "(a|aa)+$", "(.*)*b", "(a*)*(a*)*(a*)*$", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_no_name_makes_an_expression_slow(pattern: str) -> None:
    """Of a long name each character is one step over sets of instructions, however often the expression nests."""
    expression = Expression(pattern)
    steps: list[str] = []
    step = Expression._step

    class Counted(Expression):
        def _step(self, states: frozenset[int], char: str) -> frozenset[int]:
            steps.append(char)
            return step(self, states, char)

    counted = Counted(pattern)
    assert counted.search("a" * (MAX_SUBJECT - 1) + "!") == expression.search("a" * 50 + "!")
    assert len(steps) <= 8, "sets that were met before are remembered"


def test_what_cannot_be_bounded_is_refused() -> None:
    for pattern in (
        r"(a)\1",
        "(?=a)",
        "(?<!a)b",
        r"\bword",
        "(?s).",
        "(?i:a)",
        "(",
        "a" * 1001,
        "((a{100}){100}){100}",
    ):
        with pytest.raises(ExpressionError):
            Expression(pattern)
    with pytest.raises(SubjectError):
        Expression("a").search("a" * (MAX_SUBJECT + 1))


async def test_a_name_that_is_too_long_for_a_rule_may_do_nothing(start: Start, tmp_path: Path) -> None:
    """An allow that could be wrong is not given, a deny that could be right is not passed over."""
    rules = tmp_path / "acl.conf"
    rules.write_text('{deny, {user, {re, "evil"}}, all, all}.\n{allow, all}.\n')
    node = await start(acl_file=str(rules))
    assert node.authorize(ClientInfo("c", "good", "127.0.0.1"), "publish", "a")
    assert not node.authorize(ClientInfo("c", "x" * 5000, "127.0.0.1"), "publish", "a")
    assert 1 == node.counter("name_too_long")


def test_nothing_many_times_is_nothing() -> None:
    assert Expression("(){1000000000}a").search("a")
    assert not Expression("(){1000000000}a").search("b")


def test_a_rule_file_denies_names_that_it_cannot_look_at() -> None:
    """`motorcade acl test` says what the node would say."""
    file = aclfile.parse('{allow, {client, {re, "^a+$"}}, all, ["#"]}.', "acl.conf")
    assert (True, file.rules[0]) == file.decide(ClientInfo("a" * MAX_SUBJECT), Action.PUBLISH, "t", no_match=True)
    assert (False, None) == file.decide(ClientInfo("a" * (MAX_SUBJECT + 1)), Action.PUBLISH, "t", no_match=True)
