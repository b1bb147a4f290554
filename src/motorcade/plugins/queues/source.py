"""The source of a client that consumes queues: one instance for all its `$queue/…` filters.

It keeps no messages. What a dispatcher gives it (`put`) leaves with the answer of the callback that is running, or, if
none of its own is, with the next one, which it asks for (`wake`). `told` is what the carrier has promised; what was put
and not handed over yet counts against it. The carrier asks before it sends only while there is something that may have
to be withdrawn (`asks`), and says afterwards what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.declared import BadNameError, check_name
from motorcade.extension.sources import Ack, Answer, Feed, Given, Source, Why
from motorcade.plugins.queues import dispatcher as reasons
from motorcade.plugins.queues.dispatcher import SENT, Consumer, Dispatcher, Item
from motorcade.plugins.queues.options import NOUN
from motorcade.plugins.queues.tables import PREFIX

if TYPE_CHECKING:
    from motorcade.plugins.queues.queues import Queues


class _Go:
    __slots__ = ()


ALL: Final = 1 << 30
GO: Final = _Go()  #: `info`: something may be there for you

_CANNOT: Final = {"too_large": reasons.TOO_LARGE}
_LEFT: Final = {Why.UNSUBSCRIBED: reasons.UNSUBSCRIBED, Why.REMOVED: reasons.UNSUBSCRIBED}


class QueueSource(Source):
    """The place of one client at all its queues."""

    def __init__(self, feed: Feed, queues: Queues) -> None:
        super().__init__(feed)
        self.name = feed.client.client_id
        self._queues = queues
        self._consumers: dict[str, Consumer] = {}  # by filter
        self._told = 0
        self._share = ALL  # of what it was told: how much the outbox may hold while one queue is asked
        self._outbox: list[Given] = []
        self._doubtful: dict[Item, str] = {}  # given, and perhaps not to be sent; its filter
        self._soonest = inf  # when the first of what was given may be too old
        self._inside = False
        self._awake = False

    # -- Seat

    @property
    def room(self) -> int:
        return min(self._told, self._share) - len(self._outbox)

    def put(self, consumer: Consumer, items: list[Item]) -> None:
        filter_ = consumer.filter
        self._outbox += [Given(item.message, filter_, item) for item in items]
        self._soonest = min(self._soonest, *[item.ends for item in items])
        if not self._inside:
            self.wake()

    def doubt(self, consumer: Consumer, item: Item) -> None:
        self._doubtful[item] = consumer.filter

    def wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.feed.send(GO)

    # -- Source

    def subscribe(self, subscription: Subscription, why: Why) -> bool:  # noqa: ARG002 - each time the same
        name = subscription.filter.removeprefix(PREFIX)
        try:
            check_name(NOUN, name)
        except BadNameError:
            return False
        if subscription.filter in self._consumers:
            return True
        consumer = Consumer(self.name, subscription.filter, self)
        self._consumers[subscription.filter] = consumer
        self._told = self.feed.desired
        self._queues.enter(name, consumer)
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:
        consumer = self._consumers.pop(filter_, None)
        if consumer is not None:
            self.withdraw(consumer)
            name = filter_.removeprefix(PREFIX)
            self._queues.leave(name, consumer, _LEFT.get(why, reasons.DISCONNECTED))
            self._doubtful = {item: of for item, of in self._doubtful.items() if of != filter_}

    def terminate(self) -> None:
        for filter_ in list(self._consumers):
            self.unsubscribe(filter_, Why.DISCONNECTED)

    def withdraw(self, consumer: Consumer) -> None:
        """What was put for a consumer and not handed over shall not be."""
        self._sure(given for given in self._outbox if given.filter == consumer.filter)
        self._outbox = [given for given in self._outbox if given.filter != consumer.filter]

    @property
    def asks(self) -> bool:
        now = self._queues.now()
        if self._soonest <= now:
            self._soonest = min((item.ends for item in self._unsent()), default=inf)
        return bool(self._doubtful) or self._soonest <= now

    def _unsent(self) -> Iterator[Item]:
        for consumer in self._consumers.values():
            yield from (item for item, since in consumer.items.items() if since != SENT)

    def sending(self, given: Given) -> Message | None:
        item: Item = given.tag
        consumer = self._consumers.get(given.filter)
        if consumer is None or item.dispatcher is None:
            return None
        return item.dispatcher.sending(consumer, item, self._queues.now())

    def sent_run(self, given: Sequence[Given]) -> None:
        if self._doubtful:
            self._sure(given)
        now = self._queues.now()
        for home, filter_, items in _by_queue(given):
            consumer = self._consumers.get(filter_)
            if consumer is not None:
                home.sent(consumer, items, now)

    def info(self, what: object, desired: int) -> Answer:
        if what is GO:
            self._awake = False
        self._told = desired
        self._inside = True
        try:
            self._ask_all()
        finally:
            self._inside = False
            self._share = ALL
        return self._hand_over()

    def delivered(self, given: Given, ack: Ack) -> Answer:
        return self.delivered_run((given,), ack)

    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        self._told = ack.desired
        if self._doubtful:
            self._sure(given)
        self._inside = True
        if len(self._consumers) > 1:
            self._share = 0  # the room is for all of its queues, not for the one whose message has made it
        try:
            now = self._queues.now()
            for home, filter_, items in _by_queue(given):
                consumer = self._consumers.get(filter_)
                if consumer is None:  # it has unsubscribed: nothing more for it, but what it says counts
                    consumer = Consumer(self.name, filter_, self)
                _settle(home, consumer, items, ack, now)
            if len(self._consumers) > 1:
                self._ask_all()
        finally:
            self._inside = False
            self._share = ALL
        return self._hand_over()

    def _sure(self, given: Iterable[Given]) -> None:
        """It is known what has become of messages: nobody will ask for them any more."""
        for one in given:
            self._doubtful.pop(one.tag, None)

    def _ask_all(self) -> None:
        """Let every queue of this client give its share, another one first each time; then what is left to any."""
        filters = list(self._consumers)
        for number, filter_ in enumerate(filters):
            free = self._told - len(self._outbox)
            if free <= 0:
                break
            self._share = len(self._outbox) + max(1, free // (len(filters) - number))
            consumer = self._consumers.pop(filter_)
            self._consumers[filter_] = consumer
            self._queues.has_room(filter_.removeprefix(PREFIX), consumer)
        self._share = ALL
        for filter_ in filters if len(filters) > 1 else ():
            if self.room <= 0:
                break
            self._queues.has_room(filter_.removeprefix(PREFIX), self._consumers[filter_])

    def _hand_over(self) -> list[Given] | None:
        number = max(0, min(self._told, len(self._outbox)))
        if not number:
            return None
        given, self._outbox = self._outbox[:number], self._outbox[number:]
        self._told -= number
        return given


def _by_queue(given: Sequence[Given]) -> Iterator[tuple[Dispatcher, str, list[Item]]]:
    """Messages by the dispatchers that have given them, in their order. Mostly it is one."""
    items: list[Item] = [one.tag for one in given]
    begin = 0
    home = items[0].dispatcher
    for number, item in enumerate(items):
        if item.dispatcher is not home:
            if home is not None:
                yield home, given[begin].filter, items[begin:number]
            begin, home = number, item.dispatcher
    if home is not None:
        yield home, given[begin].filter, items[begin:] if begin else items


def _settle(home: Dispatcher, consumer: Consumer, items: list[Item], ack: Ack, now: float) -> None:
    """Tell a dispatcher what became of messages."""
    if not ack.dropped and not ack.refused:
        home.acknowledged(consumer, items, now)
        return
    for item in items:
        if ack.dropped in {"withdrawn", "expired"}:
            home.not_sent(consumer, item, now, expired=ack.dropped == "expired")
        elif ack.dropped:  # this client cannot be sent it; another one perhaps can
            home.refused(consumer, item, _CANNOT.get(ack.dropped, ack.dropped), now)
        else:
            home.refused(consumer, item, f"refused with 0x{ack.reason:02x}", now)
