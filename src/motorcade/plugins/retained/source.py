"""The retained messages that one subscription gets, as a source.

It reads the index as there is room, so nothing is copied, however many topics the filter matches. A message that is
replaced or deleted while it waits for room goes out as it is then, or not at all (`sending`): no subscriber gets an
outdated message after a newer one.

A client that disconnects in the middle gets the rest when it comes back: the session keeps the iterator (`feed.kept`).

With several nodes a source begins when this one knows what was acknowledged on the others (`RetainedFeed.current`), and
leaves topics for later that are unsettled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Ack, Answer, Destroy, FastFeed, FastSource, Given, Why
from motorcade.plugins.retained.feed import Ends, RetainedFeed
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
    unstored: str  #: topics that begin so are of one node
    shared: RetainedFeed | None = None  #: with several nodes

    def matching(self, subscription: Subscription, client_id: str) -> Iterator[Message]:
        """Yield what a subscription gets. `retain` is set in every message, so they go out as retained ones."""
        for message in self.index.walk(subscription.filter, self.now):
            if subscription.no_local and message.publisher and message.publisher == client_id:
                continue  # [MQTT-3.8.3-3]
            yield message

    def shared_by(self, filter_: str) -> RetainedFeed | None:
        """Return what has to be followed before a subscription gets its messages; None: nothing."""
        return None if filter_.startswith(self.unstored) else self.shared

    def current(self, topics: Iterable[str]) -> Iterator[Message]:
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
        self._shared: RetainedFeed | None = None
        self._ends: Ends = ()  # of the feeds when the client was subscribed, and the last change of this member then
        self._serial = 0
        self._held = False  # until what was acknowledged elsewhere is known
        self._waits = False  # for a topic that is unsettled
        self._later: dict[str, None] = {}  # unsettled topics

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        """Begin, or go on where the previous connection ended."""
        if why is Why.RESUMED:
            self._unread, self.feed.kept = self.feed.kept or iter(()), None
        else:
            self._unread = self._retained.matching(subscription, self.feed.client.client_id)
        self._filter = subscription.filter
        self._outstanding = len(self.feed.inflight)
        self._shared = shared = self._retained.shared_by(subscription.filter)
        if shared is None or why is Why.RESUMED:
            self.feed.send(_MORE)
        else:
            self._held = True
            self._serial = shared.serial
            current = shared.current(subscription.filter)
            current.then(lambda: self._begin(shared, current.result))
        return True

    def _begin(self, shared: RetainedFeed, ends: Ends) -> None:
        """Begin, as everything is known here that was acknowledged before; but what is under way comes later."""
        self._later = dict.fromkeys(shared.unsettled(self._filter))
        self._ends = ends
        self._held = False
        self.feed.send(_MORE)

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - it has one filter only
        """Keep the rest for the client's next connection."""
        if why is Why.DISCONNECTED:
            unsent = [given.message.topic for given in self.feed.unsent]
            self.feed.kept = chain(self._retained.current((*unsent, *self._later)), self._unread)

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
        if self._paused or self._held or not desired:
            return None
        rate = self._retained.rate
        allowed = rate.take(desired, self._retained.now())
        messages = self._unread if self._shared is None else self._settled(self._shared)
        found = [Given(message, self._filter) for message in islice(messages, allowed)]
        self._outstanding += len(found)
        if len(found) < allowed:  # these were the last
            rate.give_back(allowed - len(found))
            if self._later and self._shared is not None:
                self._wait_for(self._shared, next(iter(self._later)))
                return found
            return found if self._outstanding else Destroy()
        if allowed < desired:
            self._paused = True
            self.feed.send_later(PAUSE, _MORE)
        return found

    def _settled(self, shared: RetainedFeed) -> Iterator[Message]:
        """Yield messages of settled topics: first of those that never were otherwise."""
        for message in self._unread:
            if message.topic in self._later:
                continue
            if shared.settled(message.topic) is not None:
                self._later[message.topic] = None
            elif not shared.came_live(message.topic, self._ends, self._serial):
                yield message
        for topic in list(self._later):
            if shared.settled(topic) is None:
                del self._later[topic]
                if not shared.came_live(topic, self._ends, self._serial):
                    yield from self._wanted(topic)

    def _wanted(self, topic: str) -> Iterator[Message]:
        """Yield the message of a topic, if the client gets it."""
        subscription, client = self.feed.subscriptions.get(self._filter), self.feed.client
        for message in self._retained.current((topic,)):
            own = bool(message.publisher) and message.publisher == client.client_id
            if subscription is not None and not (own and subscription.no_local):  # [MQTT-3.8.3-3]
                yield message

    def _wait_for(self, shared: RetainedFeed, topic: str) -> None:
        settled = shared.settled(topic)
        if settled is not None and not self._waits:
            self._waits = True
            settled.then(self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        self.feed.send(_MORE)

    def sending(self, given: Given) -> Message | None:
        """Return the topic's current message; None if it came live."""
        shared, topic = self._shared, given.message.topic
        if shared is not None and shared.came_live(topic, self._ends, self._serial):
            return None
        return self._retained.index.get(given.message.topic, self._retained.now())
