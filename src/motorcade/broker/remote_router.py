"""Which filters of others match a topic: what peers want live, and what durable sessions elsewhere subscribe to.

    a/b/c            the topic itself                            ┐
    a/b/+  a/b/#     its parent with `+`, each ancestor with `#` ├ one table, its keys are the filters
    a/+/c  +/b/#     in a trie besides                           ┘

A fleet has millions of filters of the first two kinds (`agent/{VIN}/#`). Each is one entry of one table, since a trie
takes ten times as much (`tests/unit/broker/test_remote_router.py` has the figures).

Rule 1: values of peers are shared: there are as many as there are combinations of peers that want the same filter, and
        peers are always in the same order.
Rule 2: a peer that is gone wants nothing from that moment on. Its entries are taken away later, in steps (`sweep`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from motorcade.broker.router import first_level
from motorcade.core.topic import is_wildcard, matches
from motorcade.core.trie import FilterTrie, Matching
from motorcade.extension.cluster import Peer

LIVE: Final = 1  #: a flag: a client there takes every message live
DURABLE: Final = 2  #: durable sessions there take messages of QoS 0 live; the others are stored for them

#: Bytes, measured with CPython 3.11: a filter of peers without wildcards, or with one as its last level.
REMOTE_BYTES: Final = 150

SHARED: Final = 10_000  #: combinations of peers that are shared
SWEEP_STEP: Final = 2000  #: filters of peers that are gone, looked at in one turn of the event loop

V = TypeVar("V")


class FilterTable(Generic[V]):
    """A value per filter; asked with a topic."""

    __slots__ = ("_hashes", "_pluses", "_special", "_trie", "_values", "searches")

    def __init__(self) -> None:
        self._values: dict[str, V] = {}
        self._pluses = self._hashes = 0  # filters whose only wildcard is this one, as the last level
        self._trie: FilterTrie[str] = FilterTrie()  # the filters with others
        self._special: Counter[str] = Counter()  # first level -> filters of `$…` topics
        self.searches: list[Matching[str]] = []  #: topics that are being compared with the trie in several turns

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nodes(self) -> int:
        """Return the levels of the trie."""
        return self._trie.nodes

    def get(self, filter_: str) -> V | None:
        """Return the value of this very filter."""
        return self._values.get(filter_)

    def filters(self) -> list[str]:
        """Return all filters."""
        return list(self._values)

    def set(self, filter_: str, value: V) -> None:
        """Put a value."""
        if filter_ not in self._values:
            self._add(filter_)
        self._values[filter_] = value

    def _add(self, filter_: str) -> None:
        if filter_[0] == "$":
            self._special[first_level(filter_)] += 1
        if not is_wildcard(filter_):
            return
        if not _is_simple(filter_):
            self._trie.set(filter_, filter_)
            for search in self.searches:
                if matches(filter_, search.topic):
                    search.found.append(filter_)
        elif filter_[-1] == "+":
            self._pluses += 1
        else:
            self._hashes += 1

    def remove(self, filter_: str) -> None:
        """Take a value away, if there is one."""
        if self._values.pop(filter_, None) is None:
            return
        if filter_[0] == "$":
            level = first_level(filter_)
            self._special[level] -= 1
            if not self._special[level]:
                del self._special[level]
        if not is_wildcard(filter_):
            return
        if not _is_simple(filter_):
            self._trie.remove(filter_)
        elif filter_[-1] == "+":
            self._pluses -= 1
        else:
            self._hashes -= 1

    def begin(self, topic: str) -> Matching[str]:
        """Begin to compare a topic with the trie; who does it in several turns puts it among the `searches`."""
        return self._trie.begin(topic)

    def found(self, topic: str, search: Matching[str] | None = None) -> Iterator[tuple[str, V]]:
        """Return all filters that match a topic, with their values. `search` has been taken to its end."""
        values = self._values
        if not values:
            return
        for filter_ in self._simple(topic):
            value = values.get(filter_)
            if value is not None:
                yield filter_, value
        # One that came while the topic was compared may be there twice, or gone.
        wild: Iterable[str] = dict.fromkeys(search.found) if search is not None else self._trie.match(topic)
        for filter_ in wild:
            value = values.get(filter_)
            if value is not None:
                yield filter_, value

    def _simple(self, topic: str) -> Iterator[str]:
        """Return what a filter that matches a topic may be, if no level but its last one is a wildcard."""
        yield topic
        special = topic[0] == "$"  # [MQTT-4.7.2-1]
        if self._pluses:
            end = topic.rfind("/") + 1
            if end or not special:
                yield topic[:end] + "+"
        if self._hashes:
            yield topic + "/#"
            end = topic.rfind("/")
            while end >= 0:
                yield topic[: end + 1] + "#"
                end = topic.rfind("/", 0, end)
            if not special:
                yield "#"

    def heard(self, topic: str) -> bool:
        """Return True if any filter matches a topic."""
        return next(self.found(topic), None) is not None

    def heard_below(self, level: str) -> bool:
        """Return True if any filter begins with this first level of `$…` topics."""
        return self._special[level] > 0


def _is_simple(filter_: str) -> bool:
    """Return True if a filter with wildcards has but one, as its last level."""
    return filter_[-1] in "+#" and filter_.count("+") + filter_.count("#") == 1


Wants = tuple[tuple[Peer, int], ...]  #: peers and their flags


class PeerGroup:
    """Some peers that get the same messages."""

    __slots__ = ("droppable", "peers")

    def __init__(self, peers: tuple[Peer, ...], *, droppable: bool) -> None:
        self.peers = peers
        self.droppable = droppable  #: messages of QoS 0

    @property
    def full(self) -> Peer | None:
        """Return a peer for which as much waits as may."""
        for peer in self.peers:
            if peer.full:
                return peer
        return None


class RemoteRouter:
    """The interest of the peers: routes a topic to those that want it live."""

    __slots__ = ("_changed", "_forget", "_left", "_links", "_peers", "_shared", "table")

    def __init__(self, changed: Callable[[str], None], forget: Callable[[], None]) -> None:
        """`changed`: the routes of a filter; `forget`: all routes."""
        self.table: FilterTable[Wants] = FilterTable()
        self._changed = changed
        self._forget = forget
        self._peers: dict[Peer, None] = {}  # those that are alive
        self._shared: dict[Wants, Wants] = {}
        self._links: dict[tuple[tuple[Peer, ...], bool], PeerGroup] = {}
        self._left: list[str] | None = None  # filters that may have a peer that is gone

    def join(self, peer: Peer) -> None:
        """Take in a peer; it wants nothing yet."""
        self._peers[peer] = None

    def tell(self, peer: Peer, filter_: str, flags: int) -> None:
        """Note what a peer wants of a filter; 0: nothing. One that is gone wants nothing any more."""
        if peer not in self._peers:
            return
        wants = dict(self.table.get(filter_) or ())
        wants[peer] = flags
        self._put(filter_, tuple((one, wants[one]) for one in self._peers if wants.get(one)))
        self._changed(filter_)

    def _put(self, filter_: str, wants: Wants) -> None:
        if wants:
            if len(self._shared) >= SHARED:
                self._shared.clear()
            self.table.set(filter_, self._shared.setdefault(wants, wants))
        else:
            self.table.remove(filter_)

    def leave(self, peer: Peer) -> None:
        """Forget a peer; `sweep` takes away what is left of it."""
        if self._peers.pop(peer, self) is self:
            return
        self._links = {key: links for key, links in self._links.items() if peer not in links.peers}
        self._left = self.table.filters()
        self._forget()

    def sweep(self, budget: int = SWEEP_STEP) -> bool:
        """Take away what peers that are gone wanted; True if something is left to do."""
        left = self._left
        if left is None:
            return False
        for _ in range(min(budget, len(left))):
            filter_ = left.pop()
            wants = self.table.get(filter_) or ()
            if any(one[0] not in self._peers for one in wants):
                self._put(filter_, tuple(one for one in wants if one[0] in self._peers))
        if left:
            return True
        self._left = None
        self._shared = {wants: wants for wants in self._shared if not any(one[0] not in self._peers for one in wants)}
        return False

    def resolve(self, topic: str, search: Matching[str] | None = None) -> tuple[PeerGroup | None, PeerGroup | None]:
        """Return the peers that get messages of a topic: those of QoS 0, and those of QoS 1 and 2."""
        found: dict[Peer, int] = {}
        for _, wants in self.table.found(topic, search):
            for peer, flags in wants:
                if peer in self._peers:
                    found[peer] = found.get(peer, 0) | flags
        if not found:
            return None, None
        wanting = tuple(peer for peer in self._peers if peer in found)
        live = tuple(peer for peer in wanting if found[peer] & LIVE)
        return self._linked(wanting, droppable=True), self._linked(live, droppable=False) if live else None

    def _linked(self, peers: tuple[Peer, ...], *, droppable: bool) -> PeerGroup:
        """Return one object for the same peers: the fast path sends what goes to the same ones together."""
        links = self._links.get((peers, droppable))
        if links is None:
            if len(self._links) >= SHARED:
                self._links.clear()
            links = self._links[peers, droppable] = PeerGroup(peers, droppable=droppable)
        return links
