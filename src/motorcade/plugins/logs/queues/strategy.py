"""The choice of the consumer that gets the next message, of those that may have room.

    round_robin      the one that was given a message longest ago
    least_inflight   the one with the fewest unacknowledged messages; among equals, whose number changed longest ago
    random           any of them, with the same chance

One that turns out to have no room is forgotten until `offer`. Nothing here costs more with more consumers, but for
messages that not every one may get, which are rare.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

SLACK: Final = 64  #: outdated ranks in the heap of `LeastInflight`, beside three for each consumer


class Candidate(Hashable, Protocol):
    """A consumer."""

    @property
    def room(self) -> int:
        """Return how many messages it may get now."""

    @property
    def held(self) -> int:
        """Return how many messages it has got and not acknowledged."""


C = TypeVar("C", bound=Candidate)


class RoundRobin(Generic[C]):
    """One after the other; also what all strategies have in common."""

    def __init__(self) -> None:
        self._ready: OrderedDict[C, None] = OrderedDict()

    def offer(self, member: C) -> None:
        """Note that it may have room, or that what it holds has changed."""
        if member not in self._ready:
            self._ready[member] = None

    def discard(self, member: C) -> None:
        """Forget it: it is gone, or has no room."""
        self._ready.pop(member, None)

    def pick(self) -> C | None:
        """Return the consumer that gets the next message; None: none has room. `given` says that it got it."""
        while self._ready:
            member = self._first()
            if member.room > 0:
                return member
            self.discard(member)
        return None

    def given(self, member: C) -> None:
        """Note that it was given a message."""
        if member in self._ready:
            self._ready.move_to_end(member)

    @property
    def is_alone(self) -> bool:
        """Return True if no other one may have room beside the one that was picked."""
        return len(self._ready) == 1

    def those_with_room(self) -> list[C]:
        """Return all of them, the next one first, for a message that not every one may get."""
        return [member for member in self._ready if member.room > 0]

    def some_with_room(self, count: int) -> list[C]:
        """Return up to so many of them; those without room that are met are forgotten."""
        found: list[C] = []
        full: list[C] = []
        for member in self._ready:
            (found if member.room > 0 else full).append(member)
            if len(found) >= count:
                break
        for member in full:
            self.discard(member)
        return found

    def _first(self) -> C:
        return next(iter(self._ready))


class Random(RoundRobin[C]):
    """Any of them."""

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()  # noqa: S311 - nothing secret depends on it
        self._members: list[C] = []  # all that are ready
        self._indexes: dict[C, int] = {}  # where they are in it

    def offer(self, member: C) -> None:
        if member not in self._ready:
            self._ready[member] = None
            self._indexes[member] = len(self._members)
            self._members.append(member)

    def discard(self, member: C) -> None:
        if member in self._ready:
            del self._ready[member]
            index, last = self._indexes.pop(member), self._members.pop()
            if last is not member:  # it moves to where there is a gap now
                self._members[index] = last
                self._indexes[last] = index

    def given(self, member: C) -> None:
        """Change nothing: chance has no memory."""

    def those_with_room(self) -> list[C]:
        mixed = super().those_with_room()
        self._chance.shuffle(mixed)
        return mixed

    def _first(self) -> C:
        return self._members[int(self._chance.random() * len(self._members))]


class LeastInflight(RoundRobin[C]):
    """The one that holds the fewest messages.

    The heap has a rank for each change (how many it holds, serial number). All but the newest of a member are dropped
    when they come up, so that a change costs one push.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[C, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, C]] = []
        self._serial = 0

    def offer(self, member: C) -> None:
        self._ready.setdefault(member)
        rank = self._ranks.get(member)
        if rank is None or rank[0] != member.held:
            self._rank(member)

    def discard(self, member: C) -> None:
        self._ready.pop(member, None)
        self._ranks.pop(member, None)

    def given(self, member: C) -> None:
        if member in self._ready:
            self._rank(member)

    def those_with_room(self) -> list[C]:
        for member in self._ready:
            self.offer(member)
        return sorted(super().those_with_room(), key=self._ranks.__getitem__)

    def _rank(self, member: C) -> None:
        self._serial += 1
        held = member.held
        self._ranks[member] = held, self._serial
        heappush(self._heap, (held, self._serial, member))
        if len(self._heap) > 3 * len(self._ready) + SLACK:
            self._heap = [(held, serial, one) for one, (held, serial) in self._ranks.items()]
            heapify(self._heap)

    def _first(self) -> C:
        while True:
            held, serial, member = self._heap[0]
            is_newest = self._ranks.get(member) == (held, serial)
            if is_newest and held == member.held:
                return member
            heappop(self._heap)
            if is_newest:
                self._rank(member)  # it was not told that this has changed


STRATEGIES: Final[dict[str, type[RoundRobin]]] = {  # type: ignore[type-arg]
    "round_robin": RoundRobin,
    "least_inflight": LeastInflight,
    "random": Random,
}
