"""Filters, cached routes and their staleness against a plain list of subscriptions, under churn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from motorcade.broker import pubsub as pubsub_module
from motorcade.broker.limits import SessionOptions
from motorcade.broker.pubsub import PubSub, Route
from motorcade.broker.router import Router, Routes
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.broker.stats import Stats
from motorcade.core.client import ClientInfo
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Hooks
from tests.unit.core.matching import filters, slow_match, topics

NOW = 1_700_000_000.0


@given(
    st.dictionaries(filters() | topics, st.integers(0, 99)), st.lists(filters() | topics), st.lists(topics, max_size=5)
)
def test_entries_of_all_filters_that_match(entries: dict[str, int], removed: list[str], asked: list[str]) -> None:
    router: Router[int] = Router()
    for filter_, entry in entries.items():
        router.set(filter_, entry)
    for filter_ in removed:
        router.remove(filter_)
        entries.pop(filter_, None)
    assert entries == {filter_: router.get(filter_) for filter_ in entries}
    for topic in asked:
        expected = sorted(entry for filter_, entry in entries.items() if slow_match(filter_, topic))
        assert expected == sorted(router.match(topic))


class Answer:
    """A cached answer."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.stale = False
        self.weight = 1


@given(st.lists(topics, unique=True, min_size=1, max_size=20), filters() | topics)
def test_a_change_drops_what_it_concerns_and_nothing_else(cached: list[str], changed: str) -> None:
    routes: Routes[Answer] = Routes(100, 1_000_000)
    answers = [Answer(topic) for topic in cached]
    for answer in answers:
        routes.put(answer.topic, answer)
    routes.invalidate(changed)
    concerned = {topic for topic in cached if slow_match(changed, topic)}
    assert concerned == {answer.topic for answer in answers if answer.stale}
    assert set(cached) - concerned == {key.decode() for key in routes.table}


def test_the_cache_is_bounded_and_tells_those_who_hold_what_it_forgets() -> None:
    routes: Routes[Answer] = Routes(3, 1_000_000)
    answers = [Answer(f"t/{number}") for number in range(10)]
    table = routes.table
    for answer in answers:
        routes.put(answer.topic, answer)
        assert len(table) <= 3
    assert [True] * 7 + [False] * 3 == [answer.stale for answer in answers]
    routes.clear()
    assert all(answer.stale for answer in answers)
    assert not table and table is routes.table, "the fast path holds on to the table"


def test_topics_that_a_plugin_takes_share_a_route() -> None:
    """There may be any number of them, and nobody ever gets a message of one."""
    hooks = Hooks()
    hooks.add("message.publish", Callback(lambda *_: None, 0, "one", topics=("$A/#",), takes=True))
    pubsub = PubSub(SessionContext(SessionOptions(), hooks, Stats()))
    route = pubsub.route("$A/1")
    assert route is pubsub.route("$A/2/3") and route.slow and not route.count and not pubsub.routes
    assert pubsub.route("$B/1") is not route and [b"$B/1"] == list(pubsub.routes)
    hooks.remove_owner("one")
    assert route.stale and pubsub.route("$A/1") is not route and b"$A/1" in pubsub.routes


# --- under churn --------------------------------------------------------------------------------------------------


#: Few of each, so that they meet.
TOPICS = ("a", "a/b", "b", "$s/a")
few_filters = st.sampled_from(("a", "a/b", "b", "a/+", "+", "#", "+/b", "$s/a", "$s/#"))


class Churn(RuleBasedStateMachine):
    """Sessions subscribe, unsubscribe, end and come back with other properties while routes are held.

    A route that is held must be marked stale, or say what a fresh look at all subscriptions says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks = Hooks()
        self.pubsub = PubSub(SessionContext(SessionOptions(), self.hooks, Stats()))
        self.sessions: list[Session] = []
        self.wanted: dict[tuple[Session, str], Subscription] = {}
        self.held: list[Route] = []
        for number in range(4):
            self.sessions.append(self.new(number))

    @initialize(wanted=st.lists(st.tuples(st.integers(0, 3), few_filters, st.integers(0, 2)), min_size=2, max_size=8))
    def begin(self, wanted: list[tuple[int, str, int]]) -> None:
        for who, filter_, qos in wanted:
            self.wanted[self.sessions[who], filter_] = Subscription(filter_, qos)
            self.pubsub.subscribe(self.sessions[who], Subscription(filter_, qos))

    def new(self, number: int) -> Session:
        return Session(self.pubsub.shared, ClientInfo(f"c{number}", version=4 + number % 2), NOW)

    @rule(
        who=st.integers(0, 3),
        filter_=few_filters,
        group=st.sampled_from((None, None, None, "g", "h")),
        qos=st.integers(0, 2),
        no_local=st.booleans(),
        published=st.booleans(),
        identifier=st.sampled_from((0, 0, 5)),
    )
    def subscribe(
        self, who: int, filter_: str, group: str | None, qos: int, no_local: bool, published: bool, identifier: int
    ) -> None:
        text = filter_ if group is None else f"$share/{group}/{filter_}"
        subscription = Subscription(text, qos, no_local and group is None, published, identifier=identifier)
        session = self.sessions[who]
        is_new = (session, text) not in self.wanted
        assert is_new is self.pubsub.subscribe(session, subscription)
        self.wanted[session, text] = subscription

    @rule(which=st.integers(0, 50))
    def unsubscribe(self, which: int) -> None:
        if self.wanted:
            session, text = list(self.wanted)[which % len(self.wanted)]
            del self.wanted[session, text]
            assert self.pubsub.unsubscribe(session, text)
            assert not self.pubsub.unsubscribe(session, text)

    @rule(who=st.integers(0, 3))
    def end(self, who: int) -> None:
        session = self.sessions[who]
        self.pubsub.unsubscribe_all(session)
        assert not session.subscriptions
        self.wanted = {key: value for key, value in self.wanted.items() if key[0] is not session}
        self.sessions[who] = self.new(who)

    @rule(who=st.integers(0, 3), version=st.sampled_from((4, 5)), max_packet=st.sampled_from((0, 100)))
    def come_back(self, who: int, version: int, max_packet: int) -> None:
        session = self.sessions[who]
        session.speak(version, NOW)
        session.attach(version, 10, max_packet, 0)
        self.pubsub.refresh(session)

    @rule()
    def change_hooks(self) -> None:
        if self.hooks.message_publish is not None:
            self.hooks.remove_owner("test")
        else:
            self.hooks.add("message.publish", Callback(lambda *_args: None, 0, "test", topics=("a/#",)))

    @invariant()
    def routes_are_right_or_stale(self) -> None:
        for route in self.held:
            if not route.stale:
                assert self.expected(route.topic) == described(route)
        self.held.clear()
        for topic in TOPICS:
            self.held.append(self.pubsub.route(topic))
            assert not self.held[-1].stale

    @invariant()
    def figures_are_right(self) -> None:
        shared = sum(text.startswith("$share/") for _, text in self.wanted)
        assert (len(self.wanted) - shared, shared) == (self.pubsub.subscriptions, self.pubsub.shared_subscriptions)

    def expected(self, topic: str) -> dict[str, Any]:
        """A fresh look: who gets a message of a topic, and how."""
        mine: dict[Session, list[Subscription]] = {}
        groups: dict[tuple[str, str], set[Session]] = {}
        for (session, text), subscription in self.wanted.items():
            _, group, filter_ = text.split("/", 2) if text.startswith("$share/") else ("", "", text)
            if not slow_match(filter_, topic):
                continue
            if group:
                groups.setdefault((group, filter_), set()).add(session)
            else:
                mine.setdefault(session, []).append(subscription)
        plain, rest = {}, {}
        for session, several in mine.items():
            identifiers = tuple(sorted(s.identifier for s in several if s.identifier))
            qos = max(s.qos for s in several)
            published = any(s.retain_as_published for s in several)
            if identifiers or any(s.no_local for s in several) or session.special:
                rest[session.client.client_id] = (qos, published, identifiers)
            else:
                plain[session.client.client_id] = (session.version == 5, qos, published)
        return {
            "plain": plain,
            "rest": rest,
            "groups": {key: {s.client.client_id for s in members} for key, members in groups.items()},
            "count": len(mine) + len(groups),
            "hooks": self.hooks.message_publish is not None and slow_match("a/#", topic),
        }


def described(route: Route) -> dict[str, Any]:
    plain = {}
    for v5, by_qos in ((False, "v3_qos"), (True, "v5_qos")):
        for qos in (0, 1, 2):
            for session in getattr(route, f"{by_qos}{qos}"):
                assert session.client.client_id not in plain, "one copy for each session"
                plain[session.client.client_id] = (v5, qos, session in route.as_published)
    for family, v5 in (("v3", False), ("v5", True)):
        everybody = {name for name, (is_v5, _, _) in plain.items() if is_v5 is v5}
        above = {name for name, (is_v5, qos, _) in plain.items() if is_v5 is v5 and qos}
        assert everybody == {s.client.client_id for s in getattr(route, f"{family}_all")}
        assert above == {s.client.client_id for s in getattr(route, f"{family}_from_1")}
    return {
        "plain": plain,
        "rest": {
            t.session.client.client_id: (t.qos, t.retain_as_published, tuple(sorted(t.identifiers))) for t in route.rest
        },
        "groups": {(g.name, g.filter): {s.client.client_id for s in g.members} for g in route.groups},
        "count": route.count,
        "hooks": route.publish_hooks is not None,
    }


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class CrowdedChurn(Churn):
    """The same with a cache that is too small."""


@pytest.fixture(autouse=True)
def _small_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.cls is TestCrowdedChurn:
        monkeypatch.setattr(pubsub_module, "ROUTES", 3)


TestCrowdedChurn = CrowdedChurn.TestCase
TestCrowdedChurn.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
