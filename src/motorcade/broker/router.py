"""The filters that match a topic: a table for filters without wildcards, a trie for the rest.

Beside them stands a cache of whole answers (`Routes`): topic bytes as they arrive -> route. A cached route is
right or marked stale: its holder looks at `stale` before using it.

    subscribe t/+/x -> every cached topic the filter matches is dropped and marked stale; others are untouched
    subscribe #     -> where that would be very many, all of them; also where many filters in a row come near to that
    cache full      -> the oldest entries are dropped and marked stale, some at a time; full is a number of topics or of
                       bytes, whichever comes first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Generic, Protocol, TypeVar

from motorcade.core.topic import is_wildcard
from motorcade.core.trie import FilterTrie, Matching, Retired, TopicTree

MAX_LOOKED_AT = 4096  #: levels of cached topics that one changed filter may look at; beyond it, the cache is emptied
#: Levels of cached topics that changed filters may look at together; each topic that is cached lets them look at more.
STORM = 65_536
STORM_PER_TOPIC = 64
FREED = 1024  #: levels of topics once cached that are freed per turn of the event loop

E = TypeVar("E")


class Router(Generic[E]):
    """One entry per filter."""

    __slots__ = ("_exact", "_special", "_wild")

    def __init__(self) -> None:
        self._exact: dict[str, E] = {}
        self._special: Counter[str] = Counter()  # first level -> exact filters of `$…` topics
        self._wild: FilterTrie[E] = FilterTrie()

    def get(self, filter_: str) -> E | None:
        """Return the entry of this very filter."""
        return self._wild.get(filter_) if is_wildcard(filter_) else self._exact.get(filter_)

    def set(self, filter_: str, entry: E) -> None:
        """Put an entry."""
        if is_wildcard(filter_):
            self._wild.set(filter_, entry)
        else:
            if filter_.startswith("$") and filter_ not in self._exact:
                self._special[first_level(filter_)] += 1
            self._exact[filter_] = entry

    def remove(self, filter_: str) -> None:
        """Take an entry away."""
        if is_wildcard(filter_):
            self._wild.remove(filter_)
        elif self._exact.pop(filter_, None) is not None and filter_.startswith("$"):
            level = first_level(filter_)
            self._special[level] -= 1
            if not self._special[level]:
                del self._special[level]

    @property
    def nodes(self) -> int:
        """Levels of filters with wildcards."""
        return self._wild.nodes

    def match(self, topic: str) -> list[E]:
        """Return the entries of all filters that match a topic."""
        found = self._wild.match(topic) if self._wild else []
        exact = self._exact.get(topic)
        if exact is not None:
            found.append(exact)
        return found

    def begin(self, topic: str) -> Matching[E]:
        """Begin to match a topic with the filters that have wildcards, in steps."""
        return self._wild.begin(topic)

    def exact(self, topic: str) -> E | None:
        """Return the entry of the filter that is this very topic."""
        return self._exact.get(topic)

    def heard(self, topic: str) -> bool:
        """Return True if any filter matches a topic; quick where the answer is no."""
        if topic in self._exact:
            return True
        if topic.startswith("$") and not self._wild.begins(first_level(topic)):
            return False  # [MQTT-4.7.2-1]: no wildcard stands for its first level
        return bool(self._wild) and bool(self._wild.match(topic))

    def heard_below(self, level: str) -> bool:
        """Return True if any filter begins with this first level of `$…` topics."""
        return self._wild.begins(level) or self._special[level] > 0


def first_level(topic: str) -> str:
    """Return the first level of a topic or filter."""
    return topic.split("/", 1)[0]


class Staleable(Protocol):
    """A cached answer."""

    stale: bool
    weight: int  #: receivers that it refers to


R = TypeVar("R", bound=Staleable)


#: Bytes, measured with CPython 3.11: a level of a tree with its text; a route without receivers, its topic apart; a
#: receiver in the tuples of a route. `tests/unit/broker/test_tables.py` compares them with what is really allocated.
NODE_BYTES = 260
ROUTE_BYTES = 560
RECEIVER_BYTES = 40


class Routes(Generic[R]):
    """Bounded cache of routes by topic, dropped exactly when a filter that matches the topic changes."""

    __slots__ = ("_limit", "_looks", "_max_bytes", "_own", "_retired", "_soon", "_tree", "table")

    def __init__(self, limit: int, max_bytes: int, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._own = 0  # bytes of all routes, without the tree
        self._looks = STORM  # levels that changed filters may look at
        self._soon = soon  # what lets something happen in the next turn of the event loop
        self._tree: TopicTree[R] = TopicTree()
        self._retired: list[Retired[R]] = []
        self.table: dict[bytes, R] = {}  #: read by the fast path

    @property
    def size_bytes(self) -> int:
        """Bytes that the cache takes, about."""
        return self._own + self._tree.nodes * NODE_BYTES

    def put(self, topic: str, route: R) -> None:
        """Remember a route."""
        while self.table and (len(self.table) >= self._limit or self.size_bytes >= self._max_bytes):
            # Several at once: finding the first key walks over the gaps of those that were dropped before.
            for old in list(islice(self.table, 1 + self._limit // 1024)):
                self._drop(old.decode())
        self.table[topic.encode()] = route
        self._tree.set(topic, route)
        self._own += _cost(topic, route)
        if self._looks < STORM:
            self._looks += STORM_PER_TOPIC

    def invalidate(self, filter_: str) -> None:
        """Forget what a change in the subscriptions of a filter makes wrong."""
        if not is_wildcard(filter_):
            self._drop(filter_)
            return
        topics = self._tree.matches(filter_, min(MAX_LOOKED_AT, self._looks))
        self._looks -= self._tree.looked_at
        if topics is None or self._looks <= 0:
            self.clear()
            return
        for topic in topics:
            self._drop(topic)

    def clear(self) -> None:
        """Forget all routes: everything may have changed."""
        for route in self.table.values():
            route.stale = True
        self.table.clear()
        self._own = 0
        self._looks = STORM
        if not self._tree:
            return
        self._retired.append(self._tree.retire())
        if len(self._retired) == 1:
            self._free()

    def _free(self) -> None:
        """Free some of what was cached, and the rest in the next turns."""
        if not self._retired[0].free(FREED):
            del self._retired[0]
        if self._retired and self._soon is not None:
            self._soon(self._free)
        else:
            self._retired.clear()

    def _drop(self, topic: str) -> None:
        route = self._tree.remove(topic)
        if route is not None:
            route.stale = True
            del self.table[topic.encode()]
            self._own -= _cost(topic, route)


def _cost(topic: str, route: Staleable) -> int:
    """Return how many bytes a route takes: the topic is kept as text and as bytes."""
    return ROUTE_BYTES + 2 * len(topic) + RECEIVER_BYTES * route.weight
