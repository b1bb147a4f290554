"""The retained messages that one subscription gets, as a source.

It reads the index as there is room, so nothing is copied, however many topics the filter matches. What is replaced or
deleted while it waits for room goes out as it is then, or not at all (`sending`): nobody gets an outdated message after
a newer one.

A client that disconnects in the middle gets the rest when it comes back: the iterator waits in the lane (`feed.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Ack, Answer, Destroy, Feed, Given, Source, Why
from motorcade.plugins.retained.index import Index

REFILL: Final = 32  #: room for so many messages, or nothing on its way: only then more are read
PAUSE: Final = 0.05  #: seconds until a source asks again that was over the rate

_MORE: Final = object()


class Rate:
    """How many messages all subscribers together may get per second; 0: any number."""

    def __init__(self, per_second: int) -> None:
        self.per_second = per_second
        self._left = float(per_second)
        self._at = 0.0

    def take(self, wanted: int, now: float) -> int:
        """So many of them may go now."""
        if not self.per_second:
            return wanted
        self._left = min(float(self.per_second), self._left + max(0.0, now - self._at) * self.per_second)
        self._at = now
        allowed = min(wanted, int(self._left))
        self._left -= allowed
        return allowed

    def give_back(self, unused: int) -> None:
        """So many of them were not there to be sent."""
        self._left += unused


@dataclass(slots=True)
class Shelf:
    """What all sources of the plugin read from."""

    index: Index
    rate: Rate
    now: Callable[[], float]

    def matching(self, subscription: Subscription, client_id: str) -> Iterator[Message]:
        """What a subscription gets. `retain` is set in every message, so they go out as retained ones."""
        for message in self.index.walk(subscription.filter, self.now):
            if subscription.no_local and message.publisher and message.publisher == client_id:
                continue  # [MQTT-3.8.3-3]
            yield message

    def current(self, topics: list[str]) -> Iterator[Message]:
        """The messages that these topics have when they are read."""
        for topic in topics:
            message = self.index.get(topic, self.now())
            if message is not None:
                yield message


class RetainedSource(Source):
    """One subscription's retained messages; it ends when the last one is delivered."""

    def __init__(self, feed: Feed, shelf: Shelf) -> None:
        super().__init__(feed)
        self._shelf = shelf
        self._filter = ""
        self._messages: Iterator[Message] = iter(())
        self._outstanding = 0  # given, and not delivered yet
        self._paused = False

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        """Begin, or go on where the connection before has ended."""
        if why is Why.RESUMED:
            self._messages, self.feed.kept = self.feed.kept or iter(()), None
        else:
            self._messages = self._shelf.matching(subscription, self.feed.client.client_id)
        self._filter = subscription.filter
        self._outstanding = len(self.feed.inflight)
        self.feed.send(_MORE)
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - it has one filter only
        """The rest waits in the lane for the client."""
        if why is Why.DISCONNECTED:
            unsent = [given.message.topic for given in self.feed.unsent]
            self.feed.kept = chain(self._shelf.current(unsent), self._messages)

    def info(self, what: object, desired: int) -> Answer:
        """There is room, or it is time to go on."""
        if what is _MORE:
            self._paused = False
        return self._more(desired)

    def delivered(self, given: Given, ack: Ack) -> Answer:  # noqa: ARG002 - one is like the other
        """One has arrived, or is no longer wanted."""
        self._outstanding -= 1
        return self._more(ack.desired) if ack.desired >= REFILL or not self._outstanding else None

    def _more(self, desired: int) -> Answer:
        if self._paused or not desired:
            return None
        rate = self._shelf.rate
        allowed = rate.take(desired, self._shelf.now())
        found = [Given(message, self._filter) for message in islice(self._messages, allowed)]
        self._outstanding += len(found)
        if len(found) < allowed:  # these were the last
            rate.give_back(allowed - len(found))
            return found if self._outstanding else Destroy()
        if allowed < desired:
            self._paused = True
            self.feed.send_later(PAUSE, _MORE)
        return found

    def sending(self, given: Given) -> Message | None:
        """What the topic has by now."""
        return self._shelf.index.get(given.message.topic, self._shelf.now())
