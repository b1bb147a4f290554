"""Sources: how messages that do not come from live publishing reach a client.

    store, database, index ─▶ source ─(at most `desired`)─▶ [ buffer ]─[ window ]─▶ client
                                 ▲                             one buffer per client, fair between its sources
                                 └── delivered(given, ack) ◀── acknowledged, or written (QoS 0)

A plugin registers a *kind* of source (`Context.add_source`). When a client subscribes to a filter that the kind wants,
the broker makes an instance of `Source` for it: one per filter, or, with `multi_topic`, one for all its filters. Every
callback runs on the event loop between two packets, so it must be quick; what must wait runs in a task of the plugin,
which says `feed.send(result)`, and the source gets it with `info`.

    subscribe(subscription, why)   take a filter, or answer False: it is not for this source
    info(what, desired)            something the source or its plugin has sent; or `ROOM`
    delivered(given, ack)          the client has acknowledged a message, or it was written (QoS 0), or given up
    unsubscribe(filter, why)       a filter is gone; messages given for it that were not sent yet are gone too
    terminate()                    the last one: the client has disconnected, or no filter is left

`info` and `delivered` answer with

    None                nothing
    [Given(…), …]       messages for the client
    Destroy(filters)    this source is done with these filters (None: with all); it ends when none is left
    RECREATE            something is broken: end this instance, and make a new one after a while

Rule 1: a source never buffers. It is told how many messages it may give (`desired`), and gives at most as many, then or
        later. The number is a promise: a source told 10 may fetch 10 and give them when they are there. What it gives
        counts against it; the next number it is told says how many it may give from then on, and is never less than
        what is left of the promise. Who was told 0 hears `info(ROOM, n)` as soon as n is more than 0; so
        does who has given all that it may, when all of that is sent, unless its kind has `max_unacked`.
Rule 2: the messages of one source leave in the order in which they were given.
Rule 3: a source ends with its connection, but its slot in the session does not. When the client comes back, a new
        instance gets `subscribe(…, RESUMED)` for each filter. It finds in `feed.inflight` what the session still has
        in flight (which is sent again by the session, and whose acknowledgements reach the new instance), and in
        `feed.kept` what the instance before has left there. What was given but not sent is gone: `feed.unsent` has it
        still when the old instance hears `unsubscribe`, filter by filter. A kind registered with `release` takes its
        messages back when the client disconnects: they are no longer in flight after that, and may be given to others.
        A kind with `repeats` is asked for each of its messages just before the session sends it again.
Rule 4: a callback that raises is counted and logged, and hurts no other source. `subscribe` counts as answered
        with False then, `info` and `delivered` as answered with RECREATE.
Rule 5: after `terminate` nothing of the instance is called any more; what it has sent itself is dropped. So is what is
        sent to sources beyond 10 000 things of one client that wait.
Rule 6: these five callbacks and `desired` are all that a source needs. `FastSource` is the optional face for those that
        serve whole fleets: outcomes in runs, a last look at each message before it is sent, sending outside a callback.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Final, Protocol

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.errors import HookError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription

log = logging.getLogger(__name__)


class Why(StrEnum):
    """The reason for which `subscribe` or `unsubscribe` is called."""

    NEW = auto()  #: the client has subscribed, and was not before
    AGAIN = auto()  #: it has subscribed to a filter it had already; a source that serves it hears so only with `renew`
    RESUMED = auto()  #: the client is back; its session has the subscription
    RECREATED = auto()  #: this kind of source was registered just now, or the instance before has asked for it
    UNSUBSCRIBED = auto()  #: the client has unsubscribed, or may no longer subscribe to it
    DISCONNECTED = auto()  #: the connection is gone; the session may go on
    ENDED = auto()  #: the connection is gone, and the session ends with it
    REMOVED = auto()  #: this kind of source was unregistered, or the instance is replaced


class Given(msgspec.Struct, frozen=True, gc=False):
    """A message that a source gives to its client."""

    message: Message
    filter: str  #: the subscription it belongs to; its QoS and identifier are used
    tag: Any = None  #: the source's own note, for `delivered`


class Ack(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a message."""

    desired: int  #: messages the source may give now
    reason: ReasonCode = ReasonCode.SUCCESS  #: the client's; an error code is a refusal
    dropped: str = ""  #: it was never sent, because of this: `expired`, `too_large`, `withdrawn`, `unusable`

    @property
    def refused(self) -> bool:
        """True if the client did not take it."""
        return self.reason >= 0x80


@dataclass(frozen=True, slots=True)
class Destroy:
    """The source is done with these filters; None: with all."""

    filters: Sequence[str] | None = None


class Recreate:
    """The type of `RECREATE`."""

    __slots__ = ()


class _Room:
    __slots__ = ()


RECREATE: Final = Recreate()
ROOM: Final = _Room()  #: `info`: there is room again

Answer = Sequence[Given] | Destroy | Recreate | None


class Delayed(Protocol):
    """Something that will be sent."""

    def cancel(self) -> None: ...


class Feed(Protocol):
    """The broker's side of a source: its client, and the way to itself."""

    kept: Any  #: what an instance leaves for the next one of the same slot (rule 3)

    @property
    def client(self) -> ClientInfo:
        """The client of this source."""

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """The filters of this source."""

    @property
    def inflight(self) -> list[Given]:
        """Messages of this source that were sent and not acknowledged yet, oldest first."""

    @property
    def unsent(self) -> list[Given]:
        """Messages of this source that wait for room, oldest first."""

    @property
    def desired(self) -> int:
        """The number of messages that the source may give now (rule 1)."""

    def send(self, what: object) -> None:
        """Call `info(what)` soon. May be called from anywhere on the event loop; after the end it does nothing."""

    def send_later(self, delay: float, what: object) -> Delayed:
        """Call `info(what)` after so many seconds."""

    def disconnect(self, detail: str) -> None:
        """Close the client's connection (MQTT 5: with `detail` as reason string). Not from inside a callback."""


class FastFeed(Feed, Protocol):
    """The broker's side of a `FastSource`."""

    def hand(self, given: Given) -> bool:
        """Send a message at once, outside of any callback: True if it has left, and `delivered` follows.

        `sending` and `sent_run` are not called for it. False if messages wait already, there is no room, or more is to
        be done than to write it: then nothing has happened, and `send` is the way.
        """


class Source:
    """One client's external source. Subclass it; every callback is optional but `subscribe`."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        """Take a filter; False: it is not for this source."""
        raise NotImplementedError

    def unsubscribe(self, filter_: str, why: Why) -> None:
        """Drop a filter."""

    def terminate(self) -> None:
        """End: nothing is called after this (rule 5)."""

    def delivered(self, given: Given, ack: Ack) -> Answer:  # noqa: ARG002 - for subclasses
        """Handle the outcome of a message."""
        return None

    def info(self, what: object, desired: int) -> Answer:  # noqa: ARG002 - for subclasses
        """Handle something that was sent to this source."""
        return None


class FastSource(Source):
    """The optional face: a `Source` that is spared calls, or has the last word on a message. See rule 6.

    What is not overridden is not called, and costs nothing.
    """

    feed: FastFeed

    def __init__(self, feed: FastFeed) -> None:
        super().__init__(feed)

    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        """Handle one outcome of several messages, oldest first; in place of `delivered`, if overridden."""
        raise NotImplementedError

    def sending(self, given: Given) -> Message | None:
        """Return the message to send now, a newer one in its place, or None; called just before sending, if overridden.

        None withdraws it: `delivered` is called with `dropped="withdrawn"`. It may be asked twice for one message.
        """
        return given.message

    @property
    def asks(self) -> bool | None:
        """True if `sending` is to be asked now; None: always, if it is overridden. Looked at before each few messages.

        A source that says False while there is nothing to withdraw or to replace is spared a call for each message.
        """
        return None

    def sent_run(self, given: Sequence[Given]) -> None:
        """Note messages that have left, if overridden: each once, oldest first, and before it is `delivered`."""


@dataclass(eq=False, slots=True)
class SourceType:
    """A kind of source, as a plugin registers it."""

    name: str
    make: Callable[[FastFeed], Source]
    owner: str = ""  #: the plugin
    prefix: str = ""  #: only filters that begin so are offered to it
    #: Asked before an instance is made for a filter, so that those who do not want it cost nothing; None: wants all.
    wants: Callable[[ClientInfo, Subscription, Why], bool] | None = None
    multi_topic: bool = False  #: one instance for all filters of a client
    generic: bool = False  #: gets what `Hub.tell` sends to its client
    renew: bool = False  #: subscribing again to a filter ends the instance and makes a new one; else nothing happens
    retained: bool = False  #: its messages keep their retain flag; else as `retain_as_published` says, like live ones
    release: bool = False  #: messages in flight are taken back when the client disconnects; QoS is 1 at most
    #: If a client comes back that had unsubscribed while messages of it were in flight, an instance is made to hear of
    #: them: it gets no `subscribe`, only `delivered` and `terminate`.
    lingers: bool = False
    #: Asked before the session repeats a message in flight on the next connection; False: it is withdrawn from the
    #: window, and no `delivered` follows. None: everything is repeated.
    repeats: Callable[[ClientInfo, Given], bool] | None = None
    #: Told if a client acknowledges, unasked, a message that was withdrawn so.
    late: Callable[[ClientInfo, Given], None] | None = None
    max_unacked: int = 0  #: messages in flight per instance; 0: as many as the window takes
    counters: Counter[str] = field(default_factory=Counter)  #: given, delivered, refused, failed, recreated, …

    def concerns(self, client: ClientInfo, subscription: Subscription, why: Why) -> bool:
        """Return True if an instance should be made for a filter."""
        if not subscription.filter.startswith(self.prefix):
            return False
        try:
            return self.wants is None or self.wants(client, subscription, why)
        except Exception:
            self.counters["failed"] += 1
            log.exception("source_failed source=%s callback=wants client=%s", self.name, client.client_id)
            return False


class Sources:
    """All kinds of sources of one node, in the order of registration."""

    def __init__(self) -> None:
        self._kinds: dict[str, SourceType] = {}
        self.kinds: tuple[SourceType, ...] = ()
        self._on_change: Callable[[SourceType, bool], None] | None = None

    def on_change(self, callback: Callable[[SourceType, bool], None]) -> None:
        """Call this when a kind was added (True) or is gone (False); the broker brings its sessions up to date."""
        self._on_change = callback

    def register(self, kind: SourceType) -> None:
        """Offer a kind of source to all clients, those that are connected too. `HookError` if there is one already."""
        if kind.name in self._kinds:
            raise HookError(f"{kind.owner}: there is a source {kind.name!r} already, of {self._kinds[kind.name].owner}")
        self._kinds[kind.name] = kind
        self._changed(kind, added=True)

    def offer_again(self, kind: SourceType) -> None:
        """Ask `wants` again, as it answers otherwise now: clients may be subscribed to filters of the kind since."""
        if kind in self.kinds:
            self._changed(kind, added=True)

    def unregister(self, name: str) -> bool:
        """End all sources of a kind; False if there is none (any more)."""
        kind = self._kinds.pop(name, None)
        if kind is None:
            return False
        self._changed(kind, added=False)
        return True

    def remove_owner(self, owner: str) -> None:
        """Take away everything a plugin has registered."""
        for name in [kind.name for kind in self.kinds if kind.owner == owner]:
            self.unregister(name)

    def _changed(self, kind: SourceType, *, added: bool) -> None:
        self.kinds = tuple(self._kinds.values())
        if self._on_change is not None:
            self._on_change(kind, added)
