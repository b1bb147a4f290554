"""Which consumer gets the next message.

A strategy holds the consumers that may have room. It is told (`offer`) when one of them has, or when what it holds has
changed; one that turns out to have no room is forgotten until then. Nothing here costs more with more consumers, but
for messages that not everybody may get, which are rare.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

SLACK: Final = 64  #: outdated notes that `LeastInflight` keeps, beside three for each consumer


class Member(Hashable, Protocol):
    """A consumer."""

    @property
    def room(self) -> int:
        """Messages it may get now."""

    @property
    def held(self) -> int:
        """Messages it has got and not acknowledged."""


M = TypeVar("M", bound=Member)


class RoundRobin(Generic[M]):
    """One after the other. Also what all strategies have in common."""

    def __init__(self) -> None:
        self._members: OrderedDict[M, None] = OrderedDict()

    def offer(self, member: M) -> None:
        """It may have room, or what it holds has changed."""
        if member not in self._members:
            self._members[member] = None

    def discard(self, member: M) -> None:
        """It is gone, or has no room."""
        self._members.pop(member, None)

    def pick(self) -> M | None:
        """Who gets the next message; None: nobody has room. `given` says that it got it."""
        while self._members:
            member = self._candidate()
            if member.room > 0:
                return member
            self.discard(member)
        return None

    @property
    def is_alone(self) -> bool:
        """Whether nobody else may have room beside the one that was picked."""
        return len(self._members) == 1

    def those_with_room(self) -> list[M]:
        """Everybody, in the order of the strategy, for a message that not all may get."""
        return [member for member in self._sorted(self._members) if member.room > 0]

    def given(self, member: M) -> None:
        """It was given a message."""
        if member in self._members:
            self._members.move_to_end(member)

    def _candidate(self) -> M:
        return next(iter(self._members))

    def _sorted(self, members: Iterable[M]) -> list[M]:
        return list(members)


class Random(RoundRobin[M]):
    """Anybody."""

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()  # noqa: S311 - nothing secret depends on it
        self._list: list[M] = []
        self._place: dict[M, int] = {}

    def offer(self, member: M) -> None:
        if member not in self._members:
            self._members[member] = None
            self._place[member] = len(self._list)
            self._list.append(member)

    def discard(self, member: M) -> None:
        if member in self._members:
            del self._members[member]
            place, last = self._place.pop(member), self._list.pop()
            if last is not member:  # it takes the place that is free now
                self._list[place] = last
                self._place[last] = place

    def given(self, member: M) -> None:
        """Chance has no memory."""

    def _candidate(self) -> M:
        return self._list[self._chance.randrange(len(self._list))]

    def _sorted(self, members: Iterable[M]) -> list[M]:
        mixed = list(members)
        self._chance.shuffle(mixed)
        return mixed


class LeastInflight(RoundRobin[M]):
    """Who has the fewest messages; among equals the one whose number changed longest ago.

    The heap holds a note (how many, serial, who) for each change; all but the newest of each member are dropped when
    they come up, so that a change costs one push.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, M]] = []
        self._noted: dict[M, tuple[int, int]] = {}  # how many, serial
        self._serial = 0

    def offer(self, member: M) -> None:
        self._members.setdefault(member)
        noted = self._noted.get(member)
        if noted is None or noted[0] != member.held:
            self._note(member)

    def discard(self, member: M) -> None:
        self._members.pop(member, None)
        self._noted.pop(member, None)

    def given(self, member: M) -> None:
        if member in self._members:
            self._note(member)

    def _note(self, member: M) -> None:
        self._serial += 1
        self._noted[member] = member.held, self._serial
        heappush(self._heap, (member.held, self._serial, member))
        if len(self._heap) > 3 * len(self._members) + SLACK:
            self._heap = [(held, serial, noted) for noted, (held, serial) in self._noted.items()]
            heapify(self._heap)

    def _candidate(self) -> M:
        while True:
            held, serial, member = self._heap[0]
            newest = self._noted.get(member) == (held, serial)
            if newest and held == member.held:
                return member
            heappop(self._heap)
            if newest and member in self._members:
                self._note(member)  # it was not told that this has changed

    def _sorted(self, members: Iterable[M]) -> list[M]:
        return sorted(members, key=lambda member: (member.held, self._noted[member][1]))


STRATEGIES: Final[dict[str, type[RoundRobin]]] = {  # type: ignore[type-arg]
    "round_robin": RoundRobin,
    "random": Random,
    "least_inflight": LeastInflight,
}
