"""What one consumer was given, and what of it is acknowledged.

    numbers  … 7 8 | 9  10 11 13 14 |
              done   ▲     ▲         cursor of the source
                     └ outstanding; 10 and 13 may be acknowledged already, 9 is not: progress is 8

Rule 1: `done` is the highest number with nothing unacknowledged at or below it. It never goes back.
Rule 2: numbers are given in order, each once, except those that were refused: these are outstanding until they are
        acknowledged at last, or given up, or gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Place:
    """The place of one consumer in a queue."""

    __slots__ = ("_acked", "_outstanding", "done")

    def __init__(self, done: int) -> None:
        self.done = done
        self._outstanding: deque[int] = deque()
        self._acked: set[int] = set()

    @property
    def clear(self) -> bool:
        """Whether nothing is outstanding."""
        return not self._outstanding

    def give(self, numbers: Iterable[int]) -> None:
        """These go out, in this order."""
        self._outstanding.extend(numbers)

    def acknowledge(self, numbers: Iterable[int]) -> bool:
        """These are done with; whether `done` has grown."""
        before = self.done
        outstanding, acked = self._outstanding, self._acked
        for number in numbers:
            if outstanding and outstanding[0] == number:
                self.done = outstanding.popleft()
                while acked and outstanding and outstanding[0] in acked:
                    self.done = outstanding.popleft()
                    acked.discard(self.done)
            elif number > self.done:
                acked.add(number)
        return self.done > before

    def catch_up(self, cursor: int) -> bool:
        """Nothing is left up to a number that was not given; whether `done` has grown."""
        if self._outstanding or self.done >= cursor:
            return False
        self.done = cursor
        return True
