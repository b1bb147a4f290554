"""The cursor of one consumer in a log: given, acknowledged in any order, done.

    numbers  … 7 8 | 9  10 11 13 14 |
              done   ▲     ▲         position of the reader
                     └ given; 10 and 13 may be acknowledged already, 9 is not: the cursor is at 8

Rule 1: `done` is the highest number with nothing unacknowledged at or below it. It never goes back.
Rule 2: numbers are given in rising order, each once. What a consumer has refused stays given until it is acknowledged.
Rule 3: what was sent and is unknown to the session when the consumer is back (`resume`) is lost. It is given again, or
        turns out to be gone from the log: then it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

_starts: Final = count(1)  #: unique in the process; they are never compared with those of another one


class Cursor:
    """The place of one consumer."""

    __slots__ = ("_acked", "_given", "_lost", "ahead", "done", "start")

    def __init__(self) -> None:
        self.start = 0  #: which beginning this is; acknowledgements of an earlier one do not count. 0: not begun
        self.done = 0  #: everything up to it was acknowledged
        self.ahead = False  #: it begins with a number that is not there yet
        self._given: deque[int] = deque()  # and not known to be acknowledged up to, in order
        self._acked: set[int] = set()  # of these
        self._lost: set[int] = set()  # of these: rule 3

    def begin(self, after: int, *, ahead: bool = False) -> None:
        """Begin, or begin again, after a number."""
        self.start = next(_starts)
        self.done = after
        self.ahead = ahead
        self._given.clear()
        self._acked.clear()
        self._lost.clear()

    @property
    def clear(self) -> bool:
        """Return True if everything that was given is acknowledged."""
        return not self._given

    @property
    def in_flight(self) -> int:
        """Return how many numbers are given and not acknowledged."""
        return len(self._given) - len(self._acked)

    def give(self, numbers: Sequence[int]) -> None:
        """Note that these go out, in this order."""
        self.ahead = False
        given = self._given
        if self._lost:
            self._found(numbers)
            numbers = [number for number in numbers if not given or number > given[-1]]
        given.extend(numbers)

    def _found(self, numbers: Sequence[int]) -> None:
        """Take back lost numbers that are given again; what lies before them and is not there any more is done."""
        passed = [number for number in sorted(self._lost) if number <= numbers[-1]]
        self._lost.difference_update(passed)
        self.acknowledge([number for number in passed if number not in numbers])

    def acknowledge(self, numbers: Iterable[int]) -> bool:
        """Note that these are done with. Return True if `done` has grown."""
        before = self.done
        given, acked = self._given, self._acked
        for number in numbers:
            if given and given[0] == number:
                self.done = given.popleft()
                while acked and given and given[0] in acked:
                    self.done = given.popleft()
                    acked.discard(self.done)
            elif number > self.done:
                acked.add(number)
        return self.done > before

    def catch_up(self, position: int) -> bool:
        """Count as done what was passed and never given, if nothing is in flight. Return True if `done` has grown."""
        if self._given or self.done >= position:
            return False
        self.done = position
        return True

    def resume(self, inflight: set[int]) -> set[int]:
        """Go on after `done`. Return what must not be given again: it is in flight, or was acknowledged."""
        given = self._given
        known = inflight | self._acked
        while given and given[-1] not in known:
            given.pop()  # never sent
        self._acked.intersection_update(given)
        self._lost = set(given) - known
        return known.intersection(given)
