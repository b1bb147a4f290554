"""Filters that were taken away from a session because its client may not read them any more.

What waits or is in flight under such a filter is not delivered, unless another subscription of the session matches it.
A subscription that the client gives up by itself is no such filter: what is on its way arrives. [MQTT-3.10.4-3]
"""

from __future__ import annotations

from collections.abc import Iterable

from motorcade.core.topic import split_share
from motorcade.core.trie import FilterTrie


class Revoked:
    """The filters of one session, until everything that came under them is gone."""

    __slots__ = ("_allowed", "_taken", "filters")

    def __init__(self, filters: Iterable[str], allowed: Iterable[str]) -> None:
        """Take `allowed`, the subscriptions that are left."""
        self.filters: set[str] = set()
        self._taken: FilterTrie[bool] = FilterTrie()
        self._allowed: FilterTrie[bool] = FilterTrie()
        for filter_ in allowed:
            self.allow(filter_)
        for filter_ in filters:
            self.add(filter_)

    def add(self, filter_: str) -> None:
        """Add a subscription that is taken away."""
        self.filters.add(filter_)
        self._taken.set(split_share(filter_)[1], True)
        self._allowed.remove(split_share(filter_)[1])

    def allow(self, filter_: str) -> None:
        """Allow a filter that the client has subscribed to again with permission."""
        self.filters.discard(filter_)
        self._allowed.set(split_share(filter_)[1], True)

    def hides(self, topic: str) -> bool:
        """Return True if a message of this topic must not be delivered."""
        return bool(self._taken.match(topic)) and not self._allowed.match(topic)
