"""The keys of the recent past: at least the last so many, at a cost that does not grow with them.

Two sets take turns: new keys go into the younger one, and when that is full the older one is forgotten as a whole. So
between `least` and twice as many are remembered. (A dict from which the first key is deleted for each new one walks
over the gaps that the deleted ones have left: with 100 000 keys that takes 18 µs each time.)
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RecentSet(Generic[K]):
    """The last keys that were added."""

    __slots__ = ("_least", "_old", "_young")

    def __init__(self, least: int) -> None:
        self._least = least
        self._young: set[K] = set()
        self._old: set[K] = set()

    @property
    def full(self) -> bool:
        """Return True if the next key makes the older set be forgotten."""
        return len(self._young) >= self._least

    def add(self, key: K) -> None:
        """Remember a key."""
        if self.full:
            self.turn()
        self._young.add(key)

    def turn(self) -> int:
        """Forget the older set; how many keys."""
        forgotten = len(self._old)
        self._old = self._young
        self._young = set()
        return forgotten

    def clear(self) -> None:
        """Forget all."""
        self._young.clear()
        self._old.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._young or key in self._old

    def __len__(self) -> int:
        """Return how many keys are remembered; a key that is in both sets counts twice."""
        return len(self._young) + len(self._old)
