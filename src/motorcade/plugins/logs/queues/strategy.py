"""Which consumer gets the next message: of those that may have room, the one with the lowest rank.

    strategy         rank: weight, then order
    round_robin      0, when it was last given a message
    least_inflight   unacknowledged messages, when their number last changed
    random           0, the end of an exponential waiting time: what is left of the others' times is distributed like a
                     new one, so each is next with the same chance, whichever was before

The heap holds a rank for each change. All but the newest of a member are dropped when they come up, so a change costs
one push however many consumers there are. One that turns out to have no room is forgotten until `offer`.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

SLACK: Final = 64  #: outdated ranks in the heap, beside three for each consumer

Rank = tuple[int, float, int]  #: weight, order, serial


class Member(Hashable, Protocol):
    """A consumer."""

    @property
    def room(self) -> int:
        """Return how many messages it may get now."""

    @property
    def held(self) -> int:
        """Return how many messages it has got and not acknowledged."""


M = TypeVar("M", bound=Member)


class Strategy(Generic[M]):
    """The consumers that may have room, by rank."""

    def __init__(self, name: str, chance: random.Random | None = None) -> None:
        self._weighs = name == "least_inflight"
        self._chance = (chance or random.Random()) if name == "random" else None  # noqa: S311 - nothing secret
        self._ranks: dict[M, Rank] = {}
        self._heap: list[tuple[Rank, M]] = []
        self._serial = 0
        self._time = 0.0  # of the last one picked at random

    def offer(self, member: M) -> None:
        """Note that it may have room, or that what it holds has changed."""
        rank = self._ranks.get(member)
        if rank is None or (self._weighs and rank[0] != member.held):
            self._rank(member)

    def discard(self, member: M) -> None:
        """Forget it: it is gone, or has no room."""
        self._ranks.pop(member, None)

    def given(self, member: M) -> None:
        """Note that it was given a message."""
        if member in self._ranks:
            self._rank(member)

    def pick(self) -> M | None:
        """Return the consumer that gets the next message; None: none has room. `given` says that it got it."""
        while self._heap:
            rank, member = self._heap[0]
            if self._ranks.get(member) != rank:
                heappop(self._heap)
            elif self._weighs and rank[0] != member.held:
                self._rank(member)  # it was not told that this has changed
            elif member.room > 0:
                self._time = rank[1]
                return member
            else:
                del self._ranks[member]
        return None

    @property
    def is_alone(self) -> bool:
        """Return True if no other one may have room beside the one that was picked."""
        return len(self._ranks) == 1

    def those_with_room(self) -> list[M]:
        """Return all of them by rank, for a message that not every one may get."""
        return [member for member in sorted(self._ranks, key=self._ranks.__getitem__) if member.room > 0]

    def _rank(self, member: M) -> None:
        self._serial += 1
        order = self._time + self._chance.expovariate(1.0) if self._chance is not None else self._serial
        rank = self._ranks[member] = member.held if self._weighs else 0, order, self._serial
        heappush(self._heap, (rank, member))
        if len(self._heap) > 3 * len(self._ranks) + SLACK:
            self._heap = [(newest, one) for one, newest in self._ranks.items()]
            heapify(self._heap)
