"""The view lease: may a member rely on what it knows of the others, and may it grant what not all of them know. Pure.

    A grants a subscription                         C acknowledges a message of QoS 1 or 2
      stored, note n of feed f                        only while each other member has answered a ping that was sent
      item `named` (f, n) to C ──────────────────▶    less than a lease ago, and all that it had named before it
      waits until C has handled n, or until           answered is handled here
      C cannot rely on its view any more ◀── `handled`

A ping of C is answered after all items that A has sent before. So an answer that A has made after it named n comes
after the name, and C relies on it only when n is handled. One that A has made before n was stored answers a ping that
is older than n: what C bases on it ends a lease later at the latest, and then A grants (`told`: when A answered last).
What live clients want goes over the link as well; A waits until the link has it, or for the same time.

Rule 1: a lease counts from when the ping was sent, never from when its answer came.
Rule 2: a member that is gone is relied on as long as its last answer lasts, and no longer needed when all notes that
        the store had after it was fenced are handled here: it may have granted what it could not name any more.
Rule 3: who grants waits `SLACK` longer than who relies on it may: clocks do not run exactly alike.
Rule 4: while a cell is read again, nothing is relied on. Then it answers for all names that came before: a fail-over
        may have forgotten those notes.

Times are those of one clock that never steps, and goes on while the machine is suspended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Final, NamedTuple

from motorcade.commit import Commit

SLACK: Final = 0.02  #: share of the lease that who grants waits longer
LINK: Final = -1  #: stands for the items of a link among the numbers of feeds

Position = tuple[int, int]  #: a feed and the number of a note there


class _Answer(NamedTuple):
    """An answer to a ping: what it is worth when all names before it are handled."""

    sent_at: float  #: when the ping was sent


class _Other:
    """A member that this one relies on."""

    __slots__ = ("events", "gone", "until")

    def __init__(self) -> None:
        self.events: deque[_Answer | Position] = deque()  # names, and answers after them
        self.until = -math.inf  # when what it has said may no longer be relied on
        self.gone = False


class _Grant:
    """Something that others have to know before it is granted."""

    __slots__ = ("commit", "left")

    def __init__(self) -> None:
        self.commit: Commit[None] = Commit()
        self.left: set[str] = set()  #: members that are waited for


class View:
    """The lease on the state of all members: until when this one may rely on it, and what it may grant."""

    def __init__(self, lease: float, handled: Callable[[int], int]) -> None:
        """`handled`: the number of the last note of a feed that was handled here."""
        self.until = math.inf  #: when the view ends; in the past: it does not hold
        self._lease = lease
        self._handled = handled
        self._others: dict[str, _Other] = {}
        self._reading: set[int] = set()  # feeds whose cells are read again
        self._told: dict[str, float] = {}  # when they were answered last
        self._known: dict[str, dict[int, int]] = {}  # numbers that they have confirmed, by feed
        self._waiting: dict[tuple[str, int], list[tuple[int, int, _Grant]]] = {}  # heaps by number
        self._deadlines: list[tuple[float, int, str, _Grant]] = []
        self._count = 0

    # -- what this member relies on

    @property
    def others(self) -> list[str]:
        """Return the members that have to answer."""
        return list(self._others)

    def behind(self, member: str) -> bool:
        """Return True if a member has named what is not handled here yet, or has never answered."""
        other = self._others.get(member)
        return other is not None and (bool(other.events) or other.until == -math.inf)

    def until_of(self, member: str) -> float:
        """Return when what a member has said may no longer be relied on."""
        other = self._others.get(member)
        return other.until if other is not None else math.inf

    def need(self, member: str) -> None:
        """Rely on a member: from now on its answers are needed."""
        if member not in self._others:
            self._others[member] = _Other()
            self._look()

    def named(self, member: str, positions: Iterable[Position]) -> None:
        """Note what a member grants."""
        other = self._others.get(member)
        if other is not None and not other.gone:
            other.events.extend(position for position in positions if not self._has(*position))

    def answered(self, member: str, sent_at: float) -> None:
        """Note the answer to a ping; everything that was sent before it has come."""
        other = self._others.get(member)
        if other is not None and not other.gone:
            other.events.append(_Answer(sent_at))
            self._advance(other)
            self._look()

    def handled(self, feed: int) -> None:
        """Note that notes of a feed were handled, or that its cell was read."""
        self._reading.discard(feed)
        for other in self._others.values():
            self._advance(other)
        self._look()

    def reads(self, feed: int) -> None:
        """Note that a cell is read again, from now until something of it is handled (rule 4)."""
        self._reading.add(feed)
        for other in self._others.values():
            for at, event in enumerate(other.events):
                if not isinstance(event, _Answer) and event[0] == feed:
                    other.events[at] = feed, 0
        self._look()

    def gone(self, member: str) -> None:
        """Note that a member is gone; what it still says does not count."""
        other = self._others.get(member)
        if other is not None:
            other.gone = True
            other.events.clear()

    def forget(self, member: str) -> None:
        """Need a member no longer: what it may have granted is handled (rule 2)."""
        if self._others.pop(member, None) is not None:
            self._look()

    def _has(self, feed: int, number: int) -> bool:
        return feed not in self._reading and self._handled(feed) >= number

    def _advance(self, other: _Other) -> None:
        events = other.events
        while events:
            event = events[0]
            if isinstance(event, _Answer):
                other.until = max(other.until, event.sent_at + self._lease)
            elif not self._has(*event):
                return
            events.popleft()

    def _look(self) -> None:
        self.until = min((other.until for other in self._others.values()), default=math.inf)
        if self._reading:
            self.until = -math.inf

    # -- what this member grants

    def told(self, member: str, now: float) -> None:
        """Note that a ping of a member is answered now."""
        self._told[member] = now

    def confirmed(self, member: str, feed: int, number: int) -> None:
        """Note that a member has handled a note, or (`LINK`) taken over an item of its link."""
        known = self._known.setdefault(member, {})
        if number <= known.get(feed, 0):
            return
        known[feed] = number
        waiting = self._waiting.get((member, feed))
        while waiting and waiting[0][0] <= number:
            self._settle(member, heappop(waiting)[2])
        if not waiting:
            self._waiting.pop((member, feed), None)

    def grant(self, wanted: Mapping[str, int], feed: int, now: float) -> Commit[None]:
        """Return a commit that is done when members know something, or cannot rely on their view any more.

        `wanted`: the number of the note, or of the item of the link, for each member that can be told. Others that may
        rely on an answer of this member are waited for until that has run out.
        """
        grant = _Grant()
        for member, told in self._told.items():
            deadline = told + self._lease * (1 + SLACK)
            number = wanted.get(member)
            if deadline <= now or (number is not None and number <= self._known.get(member, {}).get(feed, 0)):
                continue
            grant.left.add(member)
            self._count += 1
            if number is not None:
                heappush(self._waiting.setdefault((member, feed), []), (number, self._count, grant))
            heappush(self._deadlines, (deadline, self._count, member, grant))
        if not grant.left:
            grant.commit.finish()
        return grant.commit

    @property
    def deadline(self) -> float:
        """Return when `tick` has something to do."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][3].commit.done:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else math.inf

    def tick(self, now: float) -> None:
        """Wait no longer for those that cannot rely on their view any more."""
        while self.deadline <= now:
            _, _, member, grant = heappop(self._deadlines)
            self._settle(member, grant)
        for member in [member for member, told in self._told.items() if told + self._lease * (1 + SLACK) <= now]:
            del self._told[member]
            if member not in self._others:
                self._forget(member)

    def left(self, member: str) -> None:
        """Note that a member has left of its own accord, after its last client: it relies on nothing any more."""
        self._told.pop(member, None)
        for _, _, name, grant in list(self._deadlines):
            if name == member:
                self._settle(member, grant)
        self._forget(member)

    def _forget(self, member: str) -> None:
        self._known.pop(member, None)
        for key in [key for key in self._waiting if key[0] == member]:
            del self._waiting[key]

    def _settle(self, member: str, grant: _Grant) -> None:
        grant.left.discard(member)
        if not grant.left and not grant.commit.done:
            grant.commit.finish()
