"""The view lease, with three members and a clock that is turned."""

from __future__ import annotations

import math

import pytest

from motorcade.cluster.view import LINK, SLACK, View

LEASE = 5.0
LATE = LEASE * (1 + SLACK)


class Feeds:
    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.view = View(LEASE, lambda feed: self.numbers.get(feed, 0))

    def handle(self, feed: int, number: int) -> None:
        self.numbers[feed] = number
        self.view.handled(feed)


def test_a_member_alone_relies_on_what_it_knows_for_ever_and_grants_at_once() -> None:
    view = Feeds().view
    assert math.inf == view.until
    assert view.grant({}, 3, 10.0).done


def test_a_view_lasts_for_a_lease_from_the_oldest_ping_that_was_answered() -> None:
    view = Feeds().view
    view.need("b")
    assert -math.inf == view.until
    view.need("c")
    view.answered("b", 10.0)
    assert -math.inf == view.until and view.behind("c") and not view.behind("b")
    view.answered("c", 12.0)
    assert 15.0 == view.until
    view.answered("b", 11.0)
    view.answered("b", 10.5)  # it came late
    assert 16.0 == view.until


def test_an_answer_counts_when_all_that_was_named_before_it_is_handled() -> None:
    feeds = Feeds()
    view = feeds.view
    view.need("b")
    view.answered("b", 10.0)
    view.named("b", [(1, 7), (2, 1)])
    view.answered("b", 11.0)
    view.named("b", [(1, 8)])
    view.answered("b", 12.0)
    assert 15.0 == view.until
    feeds.handle(2, 5)
    assert 15.0 == view.until
    feeds.handle(1, 7)
    assert 16.0 == view.until and view.behind("b")
    feeds.handle(1, 9)
    assert 17.0 == view.until and not view.behind("b")


def test_a_cell_that_is_read_again_answers_for_what_was_named_before() -> None:
    """A fail-over has forgotten note 1010: the feed ends at 1000 now."""
    feeds = Feeds()
    view = feeds.view
    view.need("b")
    view.named("b", [(1, 1010)])
    view.answered("b", 10.0)
    view.reads(1)
    view.named("b", [(1, 1001)])
    view.answered("b", 11.0)
    view.handled(2)
    assert -math.inf == view.until
    feeds.handle(1, 1000)
    assert 15.0 == view.until
    feeds.handle(1, 1001)
    assert 16.0 == view.until


def test_a_member_that_is_gone_is_needed_until_all_is_handled_that_it_may_have_granted() -> None:
    view = Feeds().view
    view.need("b")
    view.answered("b", 10.0)
    view.named("b", [(1, 4)])
    view.gone("b")
    view.answered("b", 11.0)  # it was on its way
    view.named("b", [(1, 5)])
    view.handled(1)
    assert 15.0 == view.until and ["b"] == view.others
    view.forget("b")
    assert math.inf == view.until and not view.others


def test_a_grant_waits_until_the_others_have_confirmed_it() -> None:
    view = Feeds().view
    view.told("b", 10.0)
    view.told("c", 11.0)
    grants = [
        view.grant({"b": 4, "c": 4}, 1, 11.0),
        view.grant({"b": 5, "c": 5}, 1, 11.0),
        view.grant({"b": 90, "c": 2}, LINK, 11.0),
    ]
    seen = []
    for member, feed, number in (
        ("b", 1, 5),
        ("c", 2, 9),
        ("c", 1, 4),
        ("c", 1, 3),  # it comes late
        ("c", 1, 5),
        ("b", LINK, 90),
        ("c", LINK, 7),
    ):
        view.confirmed(member, feed, number)
        seen.append(sum(grant.done for grant in grants))
    assert [0, 0, 1, 1, 2, 2, 3] == seen
    assert view.grant({"b": 5, "c": 1}, 1, 11.0).done


def test_a_grant_waits_no_longer_than_the_others_may_rely_on_their_view() -> None:
    view = Feeds().view
    view.told("b", 10.0)
    view.told("c", 12.0)
    grant = view.grant({"b": 1}, 0, 12.0)  # c is dead: there is no way to tell it
    assert 10.0 + LATE == view.deadline
    view.tick(10.0 + LATE)
    assert 12.0 + LATE == view.deadline
    view.told("c", 16.0)  # an answer that names it: the one before counts
    view.tick(12.0 + LATE)
    assert grant.done and math.inf == view.deadline
    assert view.grant({"b": 2}, 0, 12.1 + LEASE).done is False  # c was answered since
    view.tick(16.0 + LATE)
    assert view.grant({"b": 3, "c": 3}, 0, 30.0).done  # nobody may rely on anything


def test_a_member_that_has_left_is_not_waited_for() -> None:
    view = Feeds().view
    view.told("b", 10.0)
    view.told("c", 10.0)
    grant = view.grant({"b": 1, "c": 1}, 0, 10.0)
    view.confirmed("c", 0, 1)
    view.left("b")
    assert grant.done
    assert view.grant({}, 0, 10.0).done is False
    view.confirmed("c", 0, 3)
    assert view.grant({"c": 3}, 0, 10.0).done


@pytest.mark.parametrize("pinged", [0.0, 0.5, 1.0])
def test_a_view_that_knows_nothing_of_a_grant_ends_before_that_is_granted(pinged: float) -> None:
    """A has answered C at `pinged`, before it stored a subscription; what it named then never comes."""
    a, c = Feeds().view, Feeds().view
    c.need("a")
    c.answered("a", pinged)
    a.told("c", pinged + 0.2)
    granted, at = a.grant({"c": 1}, 0, 1.2), 0.0
    while not granted.done:
        at = a.deadline
        a.tick(at)
    assert c.until < at
