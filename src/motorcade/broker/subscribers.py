"""Durable sessions that are not attached here: asleep, or attached to a peer. Their messages are stored for them.

A session that sleeps takes no more than its name and its filters (`Subscriber`). The table is filled from the store:
who reads records and feeds calls `put`, `drop` and `forget`.

Rule 1: a client whose session is here has no subscriber. It is forgotten when the session comes (`PubSub.is_here`);
        who fills the table leaves out what concerns clients of this member.
Rule 2: the generation of its mailbox says which session of the client is meant. An append to another one is answered
        with `gone`, and the subscriber goes (`forget`).
Rule 3: `place` is best effort: only messages of QoS 0 and the choice in shared groups go by it. Where the session
        really is attached the store says, with each append. It is not in `Subscriber`, since most of them sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec

from motorcade.broker.remote_router import FilterTable
from motorcade.core.subscription import Subscription
from motorcade.core.topic import split_share
from motorcade.core.trie import Matching

#: Bytes, measured with CPython 3.11: with one filter of its own that ends with its only wildcard.
SUBSCRIBER_BYTES: Final = 300

OPTIONS: Final = 10_000  #: options of subscriptions that are shared


class Options(NamedTuple):
    """What a subscription says besides its filter."""

    qos: int
    no_local: bool
    retain_as_published: bool
    identifier: int


class Subscriber(msgspec.Struct, gc=False, eq=False):
    """A durable session elsewhere. It refers to nothing that could lead back to it."""

    client_id: str
    generation: int  #: of its mailbox; 0: any
    filters: str | dict[str, Options] = ""  #: one, with the `options` of it, or several
    options: Options | None = None

    ended: ClassVar[bool] = False

    def subscriptions(self) -> list[tuple[str, Options]]:
        """Return its filters, with their options."""
        if isinstance(self.filters, dict):
            return list(self.filters.items())
        return [] if self.options is None else [(self.filters, self.options)]

    def get(self, filter_: str) -> Options | None:
        """Return the options of a filter; None if it is not subscribed to."""
        if isinstance(self.filters, dict):
            return self.filters.get(filter_)
        return self.options if self.filters == filter_ else None

    def set(self, filter_: str, options: Options) -> None:
        """Add a filter, or give it other options."""
        if isinstance(self.filters, dict):
            self.filters[filter_] = options
        elif self.options is None or self.filters == filter_:
            self.filters, self.options = filter_, options
        else:
            self.filters, self.options = {self.filters: self.options, filter_: options}, None

    def remove(self, filter_: str) -> None:
        """Take a filter away."""
        if not isinstance(self.filters, dict):
            if self.filters == filter_:
                self.filters, self.options = "", None
            return
        self.filters.pop(filter_, None)
        if len(self.filters) == 1:
            ((self.filters, self.options),) = self.filters.items()


class AddressedClient(msgspec.Struct, gc=False, eq=False):
    """A client that a topic names: its home says whether it wants the message, and where it is (`addressing`)."""

    client_id: str

    ended: ClassVar[bool] = False


class Groups(Protocol):
    """Shared groups, whose members these sessions are too."""

    def join_group(self, text: str, subscriber: Subscriber, options: Options) -> None:
        """Add a member to `$share/{group}/{filter}`, or give it other options."""

    def leave_group(self, text: str, subscriber: Subscriber) -> None:
        """Remove a member."""


Crowd = Subscriber | dict[Subscriber, None]


class Subscribers:
    """All durable sessions that are not attached here."""

    __slots__ = ("_by_feed", "_changed", "_feed_of", "_groups", "_options", "_places", "subscriptions", "table")

    def __init__(self, changed: Callable[[str], None], groups: Groups, feed_of: Callable[[str], int]) -> None:
        """`changed`: the routes of a filter. `feed_of`: the feed of a client's cell."""
        self._by_feed: dict[int, dict[str, Subscriber]] = {}  # a cell is read again by itself
        self._feed_of = feed_of
        self.table: FilterTable[Crowd] = FilterTable()
        self.subscriptions = 0
        self._changed = changed
        self._groups = groups
        self._options: dict[Options, Options] = {}
        self._places: dict[str, str] = {}  # members that have sessions attached, whether or not they are known yet

    def __len__(self) -> int:
        return sum(map(len, self._by_feed.values()))

    def __contains__(self, client_id: object) -> bool:
        return isinstance(client_id, str) and self.get(client_id) is not None

    def get(self, client_id: str) -> Subscriber | None:
        """Return a session by its client; None if it is not known."""
        return self._by_feed.get(self._feed_of(client_id), {}).get(client_id)

    def of_feed(self, feed: int) -> list[str]:
        """Return the clients whose notes go to a feed."""
        return list(self._by_feed.get(feed, ()))

    def put(self, client_id: str, generation: int, subscription: Subscription) -> None:
        """Add or replace a subscription of a durable session, as the store has it."""
        feed = self._feed_of(client_id)
        clients = self._by_feed.get(feed)
        if clients is None:
            clients = self._by_feed[feed] = {}
        known = clients.get(client_id)
        if known is not None and not (known.generation and generation):
            generation = known.generation = known.generation or generation  # a node by itself has written none
        if known is None or known.generation != generation:
            if known is not None:
                self._take_out(known)
            known = clients[client_id] = Subscriber(client_id, generation)
        options = Options(
            subscription.qos, subscription.no_local, subscription.retain_as_published, subscription.identifier
        )
        if len(self._options) >= OPTIONS:
            self._options.clear()
        options = self._options.setdefault(options, options)
        text = subscription.filter
        is_new = known.get(text) is None
        known.set(text, options)
        self.subscriptions += is_new
        group, filter_ = split_share(text)
        if group is not None:
            self._groups.join_group(text, known, options)
            return
        if is_new:
            self._add(filter_, known)
        self._changed(filter_)

    def _add(self, filter_: str, subscriber: Subscriber) -> None:
        others = self.table.get(filter_)
        if others is None:
            self.table.set(filter_, subscriber)
        elif isinstance(others, dict):
            others[subscriber] = None
        else:
            self.table.set(filter_, {others: None, subscriber: None})

    def drop(self, client_id: str, text: str) -> None:
        """Remove a subscription, as the client wrote it; nothing happens if there is none."""
        known = self.get(client_id)
        if known is None or known.get(text) is None:
            return
        self._remove(known, text)
        known.remove(text)
        if not known.subscriptions():
            del self._by_feed[self._feed_of(client_id)][client_id]

    def _remove(self, subscriber: Subscriber, text: str) -> None:
        self.subscriptions -= 1
        group, filter_ = split_share(text)
        if group is not None:
            self._groups.leave_group(text, subscriber)
            return
        others = self.table.get(filter_)
        if isinstance(others, dict):
            others.pop(subscriber, None)
            if len(others) == 1:
                self.table.set(filter_, next(iter(others)))
        elif others is subscriber:
            self.table.remove(filter_)
        self._changed(filter_)

    def forget(self, client_id: str, generation: int = 0) -> None:
        """Remove a session, if it is of this generation (0: of any): it has ended, or it is here now."""
        known = self.get(client_id)
        if known is not None and known.generation and generation not in (0, known.generation):
            return
        self._places.pop(client_id, None)
        if known is not None:
            self._take_out(known)

    def _take_out(self, known: Subscriber) -> None:
        del self._by_feed[self._feed_of(known.client_id)][known.client_id]
        for text, _ in known.subscriptions():
            self._remove(known, text)

    def place(self, client_id: str) -> str | None:
        """Return the member that has a session attached; None: it sleeps."""
        return self._places.get(client_id)

    def move(self, client_id: str, member: str | None) -> None:
        """Note where a session is attached now; None: it sleeps."""
        if member is not None:
            self._places[client_id] = member
        else:
            self._places.pop(client_id, None)

    def leave(self, client_id: str, member: str) -> None:
        """Note that a session is no longer attached to this member."""
        if self._places.get(client_id) == member:
            del self._places[client_id]

    def left(self, member: str) -> None:
        """Note that a member is gone."""
        self._places = {client_id: at for client_id, at in self._places.items() if at != member}

    def found(self, topic: str, search: Matching[str] | None = None) -> Iterator[tuple[Subscriber, Options]]:
        """Return all subscriptions that match a topic; a session with several of them is there several times."""
        for filter_, crowd in self.table.found(topic, search):
            for subscriber in crowd if isinstance(crowd, dict) else (crowd,):
                options = subscriber.get(filter_)
                if options is not None:
                    yield subscriber, options
