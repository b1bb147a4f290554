"""The source of a client that consumes queues: one instance for all its `$queue/…` filters.

It keeps no messages. What a dispatcher gives it (`give`) leaves with the answer of the callback that is running, or, if
none of its own is, with the next one, which it asks for (`wake`). `_promised` is what the broker takes; what was given
and not handed over yet counts against it. The broker asks before it sends only while there is something that may have
to be withdrawn (`asks`), and says afterwards what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.declared import BadNameError, check_name
from motorcade.extension.sources import Ack, Answer, FastFeed, FastSource, Given, Why
from motorcade.plugins.logs.queues import dispatcher as reasons
from motorcade.plugins.logs.queues.dispatcher import SENT, QueueConsumer, QueueDispatcher, QueueEntry
from motorcade.plugins.logs.queues.options import NOUN
from motorcade.plugins.logs.queues.tables import PREFIX

if TYPE_CHECKING:
    from motorcade.plugins.logs.queues.service import QueueService


class _Go:
    __slots__ = ()


ALL: Final = 1 << 30
GO: Final = _Go()  #: `info`: there may be messages

_UNSENT: Final = {"too_large": reasons.TOO_LARGE, "withdrawn": reasons.WITHDRAWN, "expired": reasons.EXPIRED}
_LEFT: Final = {Why.UNSUBSCRIBED: reasons.UNSUBSCRIBED, Why.REMOVED: reasons.UNSUBSCRIBED}


class QueueSource(FastSource):
    """One client, as the consumer of all its queues."""

    def __init__(self, feed: FastFeed, queues: QueueService) -> None:
        super().__init__(feed)
        self.name = feed.client.client_id
        self._queues = queues
        self._consumers: dict[str, QueueConsumer] = {}  # by filter
        self._promised = 0
        self._share = ALL  # how much the outbox may hold while one queue is asked
        self._outbox: list[Given] = []
        self._rechecks: dict[QueueEntry, str] = {}  # given, and perhaps not to be sent; its filter
        self._soonest = inf  # when the first of what was given may be too old
        self._inside = False
        self._awake = False

    # -- QueueClient

    @property
    def room(self) -> int:
        return min(self._promised, self._share) - len(self._outbox)

    def give(self, consumer: QueueConsumer, entries: list[QueueEntry]) -> None:
        filter_ = consumer.filter
        self._outbox += [Given(entry.message, filter_, entry) for entry in entries]
        self._soonest = min(self._soonest, *[entry.ends for entry in entries])
        if not self._inside:
            self.wake()

    def recheck(self, consumer: QueueConsumer, entry: QueueEntry) -> None:
        self._rechecks[entry] = consumer.filter

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
        consumer = QueueConsumer(self.name, subscription.filter, self)
        self._consumers[subscription.filter] = consumer
        self._promised = self.feed.desired
        self._queues.enter(name, consumer)
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:
        consumer = self._consumers.pop(filter_, None)
        if consumer is not None:
            self.withdraw(consumer)
            name = filter_.removeprefix(PREFIX)
            self._queues.leave(name, consumer, _LEFT.get(why, reasons.DISCONNECTED))
            self._rechecks = {entry: of for entry, of in self._rechecks.items() if of != filter_}

    def terminate(self) -> None:
        for filter_ in list(self._consumers):
            self.unsubscribe(filter_, Why.DISCONNECTED)

    def withdraw(self, consumer: QueueConsumer) -> None:
        """Take back what was given to a consumer and not handed over."""
        self._known(given for given in self._outbox if given.filter == consumer.filter)
        self._outbox = [given for given in self._outbox if given.filter != consumer.filter]

    @property
    def asks(self) -> bool:
        now = self._queues.now()
        if self._soonest <= now:
            self._soonest = min((entry.ends for entry in self._unsent()), default=inf)
        return bool(self._rechecks) or self._soonest <= now

    def _unsent(self) -> Iterator[QueueEntry]:
        for consumer in self._consumers.values():
            yield from (entry for entry, since in consumer.entries.items() if since != SENT)

    def sending(self, given: Given) -> Message | None:
        entry: QueueEntry = given.tag
        consumer = self._consumers.get(given.filter)
        if consumer is None:
            return None
        return entry.level.dispatcher.sending(consumer, entry, self._queues.now())

    def sent_run(self, given: Sequence[Given]) -> None:
        if self._rechecks:
            self._known(given)
        now = self._queues.now()
        for dispatcher, filter_, entries in _by_queue(given):
            consumer = self._consumers.get(filter_)
            if consumer is not None:
                dispatcher.sent(consumer, entries, now)

    def info(self, what: object, desired: int) -> Answer:
        if what is GO:
            self._awake = False
        self._promised = desired
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
        self._promised = ack.desired
        if self._rechecks:
            self._known(given)
        self._inside = True
        if len(self._consumers) > 1:
            self._share = 0  # the room is for all of its queues, not for the one whose message has made it
        try:
            now = self._queues.now()
            for dispatcher, filter_, entries in _by_queue(given):
                consumer = self._consumers.get(filter_)
                if consumer is None:  # it has unsubscribed: nothing more for it, but what it says counts
                    consumer = QueueConsumer(self.name, filter_, self)
                _settle(dispatcher, consumer, entries, ack, now)
            if len(self._consumers) > 1:
                self._ask_all()
        finally:
            self._inside = False
            self._share = ALL
        return self._hand_over()

    def _known(self, given: Iterable[Given]) -> None:
        """Forget to ask before messages are sent: their outcome is known."""
        for one in given:
            self._rechecks.pop(one.tag, None)

    def _ask_all(self) -> None:
        """Let every queue of this client give its share, another one first each time; then what is left to any."""
        filters = list(self._consumers)
        for number, filter_ in enumerate(filters):
            free = self._promised - len(self._outbox)
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
        number = max(0, min(self._promised, len(self._outbox)))
        if not number:
            return None
        given, self._outbox = self._outbox[:number], self._outbox[number:]
        self._promised -= number
        return given


def _by_queue(given: Sequence[Given]) -> Iterator[tuple[QueueDispatcher, str, list[QueueEntry]]]:
    """Yield messages by the dispatchers that have given them, with their filter, in their order. Mostly it is one."""
    for dispatcher, run in groupby(given, key=attrgetter("tag.level.dispatcher")):
        some = list(run)
        yield dispatcher, some[0].filter, [one.tag for one in some]


def _settle(
    dispatcher: QueueDispatcher, consumer: QueueConsumer, entries: list[QueueEntry], ack: Ack, now: float
) -> None:
    """Tell a dispatcher the outcome of messages."""
    if not ack.dropped and not ack.refused:
        dispatcher.acknowledged(consumer, entries, now)
        return
    # A client that cannot be sent it is like one that refuses it: another one perhaps can.
    reason = _UNSENT.get(ack.dropped, ack.dropped) if ack.dropped else f"refused with 0x{ack.reason:02x}"
    for entry in entries:
        dispatcher.not_taken(consumer, entry, reason, now)
