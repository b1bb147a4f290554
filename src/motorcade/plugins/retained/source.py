"""The retained messages that one subscription gets, as a source.

It reads the index as there is room, so nothing is copied, however many topics the filter matches. A message that is
replaced or deleted while it waits for room goes out as it is then, or not at all (`sending`): no subscriber gets an
outdated message after a newer one.

A client that disconnects in the middle gets the rest when it comes back: the session keeps the iterator (`feed.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Ack, Answer, Destroy, FastFeed, FastSource, Given, Why
from motorcade.plugins.retained.index import Index

REFILL: Final = 32  #: read more only with room for so many messages, or with none outstanding
PAUSE: Final = 0.05  #: seconds until a source that was over the rate tries again

_MORE: Final = object()


class Rate:
    """Limit how many messages all subscribers together get per second; 0: any number."""

    def __init__(self, per_second: int) -> None:
        self.per_second = per_second
        self._left = float(per_second)
        self._at = 0.0

    def take(self, wanted: int, now: float) -> int:
        """Return how many of them may go now."""
        if not self.per_second:
            return wanted
        self._left = min(float(self.per_second), self._left + max(0.0, now - self._at) * self.per_second)
        self._at = now
        allowed = min(wanted, int(self._left))
        self._left -= allowed
        return allowed

    def give_back(self, unused: int) -> None:
        """Return what was taken and not sent."""
        self._left += unused


@dataclass(slots=True)
class Messages:
    """The messages that all sources of the plugin read."""

    index: Index
    rate: Rate
    now: Callable[[], float]

    def matching(self, subscription: Subscription, client_id: str) -> Iterator[Message]:
        """Yield what a subscription gets. `retain` is set in every message, so they go out as retained ones."""
        for message in self.index.walk(subscription.filter, self.now):
            if subscription.no_local and message.publisher and message.publisher == client_id:
                continue  # [MQTT-3.8.3-3]
            yield message

    def current(self, topics: list[str]) -> Iterator[Message]:
        """Yield the messages that these topics have when they are read."""
        for topic in topics:
            message = self.index.get(topic, self.now())
            if message is not None:
                yield message


class RetainedSource(FastSource):
    """One subscription's retained messages; it ends when the last one is delivered."""

    def __init__(self, feed: FastFeed, messages: Messages) -> None:
        super().__init__(feed)
        self._retained = messages
        self._filter = ""
        self._unread: Iterator[Message] = iter(())
        self._outstanding = 0  # given, and not delivered yet
        self._paused = False

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        """Begin, or go on where the previous connection ended."""
        if why is Why.RESUMED:
            self._unread, self.feed.kept = self.feed.kept or iter(()), None
        else:
            self._unread = self._retained.matching(subscription, self.feed.client.client_id)
        self._filter = subscription.filter
        self._outstanding = len(self.feed.inflight)
        self.feed.send(_MORE)
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - it has one filter only
        """Keep the rest for the client's next connection."""
        if why is Why.DISCONNECTED:
            unsent = [given.message.topic for given in self.feed.unsent]
            self.feed.kept = chain(self._retained.current(unsent), self._unread)

    def info(self, what: object, desired: int) -> Answer:
        """Give more: there is room, or the pause is over."""
        if what is _MORE:
            self._paused = False
        return self._more(desired)

    def delivered(self, given: Given, ack: Ack) -> Answer:  # noqa: ARG002 - one is like the other
        """Count one as delivered, or no longer wanted, and give more."""
        self._outstanding -= 1
        return self._more(ack.desired) if ack.desired >= REFILL or not self._outstanding else None

    def _more(self, desired: int) -> Answer:
        if self._paused or not desired:
            return None
        rate = self._retained.rate
        allowed = rate.take(desired, self._retained.now())
        found = [Given(message, self._filter) for message in islice(self._unread, allowed)]
        self._outstanding += len(found)
        if len(found) < allowed:  # these were the last
            rate.give_back(allowed - len(found))
            return found if self._outstanding else Destroy()
        if allowed < desired:
            self._paused = True
            self.feed.send_later(PAUSE, _MORE)
        return found

    def sending(self, given: Given) -> Message | None:
        """Return the topic's current message."""
        return self._retained.index.get(given.message.topic, self._retained.now())
