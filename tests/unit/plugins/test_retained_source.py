"""Retained messages as a source: read as there is room, at a rate, and as they are when they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Ack, Answer, Delayed, Destroy, Given, Why
from motorcade.plugins.retained.index import Index
from motorcade.plugins.retained.source import Rate, RetainedSource, Shelf


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Cancelled:
    def cancel(self) -> None:
        """Nothing waits."""


@dataclass
class OpenFeed:
    """The broker's side, told by the test what to do."""

    client: ClientInfo = field(default_factory=lambda: ClientInfo("car"))
    kept: Any = None
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    inflight: list[Given] = field(default_factory=list)
    unsent: list[Given] = field(default_factory=list)
    desired: int = 0
    sent: list[object] = field(default_factory=list)
    later: list[tuple[float, object]] = field(default_factory=list)

    def hand(self, given: Given) -> bool:
        return False

    def send(self, what: object) -> None:
        self.sent.append(what)

    def send_later(self, delay: float, what: object) -> Delayed:
        self.later.append((delay, what))
        return Cancelled()

    def disconnect(self, detail: str) -> None:
        raise NotImplementedError("retained messages close no connections")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> Index:
    index = Index(0, 0, 0)
    for number in range(10):
        index.put(Message(f"a/{number}", b"old", 1, retain=True), clock.now)
    return index


def begun(index: Index, clock: Clock, rate: int = 0) -> tuple[RetainedSource, OpenFeed]:
    feed = OpenFeed()
    source = RetainedSource(feed, Shelf(index, Rate(rate), clock))
    assert source.subscribe(Subscription("a/+", 1), Why.NEW)
    return source, feed


def topics(answer: Answer) -> list[str]:
    assert isinstance(answer, list)
    return [given.message.topic for given in answer]


def test_no_more_is_read_than_there_is_room_for(index: Index, clock: Clock) -> None:
    source, feed = begun(index, clock)
    given = source.info(feed.sent.pop(), 3)
    assert [f"a/{n}" for n in range(3)] == topics(given)
    assert source.info(object(), 0) is None


def test_it_ends_when_the_last_one_is_delivered(index: Index, clock: Clock) -> None:
    source, feed = begun(index, clock)
    answer = source.info(feed.sent.pop(), 100)
    assert isinstance(answer, list) and len(answer) == 10
    for given in answer[:-1]:
        assert source.delivered(given, Ack(10)) is None
    assert isinstance(source.delivered(answer[-1], Ack(10)), Destroy)


def test_what_is_replaced_or_deleted_while_it_waits_goes_out_as_it_is_then(index: Index, clock: Clock) -> None:
    source, feed = begun(index, clock)
    answer = source.info(feed.sent.pop(), 3)
    assert isinstance(answer, list)
    index.put(Message("a/0", b"new", 1, retain=True), clock.now)
    index.delete("a/1")
    sent = [source.sending(given) for given in answer]
    assert [b"new", None, b"old"] == [None if message is None else message.payload for message in sent]


def test_the_rest_waits_for_a_client_that_comes_back(index: Index, clock: Clock) -> None:
    source, feed = begun(index, clock)
    answer = source.info(feed.sent.pop(), 5)
    assert isinstance(answer, list)
    feed.inflight, feed.unsent = answer[:2], answer[2:]
    source.unsubscribe("a/+", Why.DISCONNECTED)
    feed.unsent = []
    index.put(Message("a/2", b"new", 1, retain=True), clock.now)
    again = RetainedSource(feed, Shelf(index, Rate(0), clock))
    assert again.subscribe(Subscription("a/+", 1), Why.RESUMED)
    rest = again.info(feed.sent.pop(), 100)
    assert [f"a/{n}" for n in range(2, 10)] == topics(rest)
    assert isinstance(rest, list) and rest[0].message.payload == b"new"
    for given in [*feed.inflight, *rest][:-1]:
        assert again.delivered(given, Ack(10)) is None
    assert isinstance(again.delivered(rest[-1], Ack(10)), Destroy)


def test_the_rate_holds_for_all_subscribers_together(index: Index, clock: Clock) -> None:
    shelf = Shelf(index, Rate(4), clock)
    feeds = [OpenFeed(), OpenFeed()]
    sources = [RetainedSource(feed, shelf) for feed in feeds]
    for source in sources:
        assert source.subscribe(Subscription("a/+", 0), Why.NEW)
    assert len(topics(sources[0].info(feeds[0].sent.pop(), 3))) == 3
    assert len(topics(sources[1].info(feeds[1].sent.pop(), 3))) == 1, "one of four is left in this second"
    assert not feeds[0].later
    assert sources[1].info(object(), 3) is None, "it waits for its timer"
    clock.now += 0.5
    delay, what = feeds[1].later.pop()
    assert delay > 0
    assert len(topics(sources[1].info(what, 3))) == 2


def test_a_rate_of_nothing_is_any_rate() -> None:
    assert Rate(0).take(1_000_000, 0.0) == 1_000_000
