"""The pauses before a process that has ended is started again. Pure."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE: Final = 0.2  #: seconds, after it has served for a while
LONGEST_PAUSE: Final = 30.0  #: seconds
STEADY: Final = 60.0  #: seconds that it must have served for the next pause to be the first one again


class BackOff:
    """The pauses of one process: doubled from one to the next, from the beginning after it has served for a while."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def after(self, served: float) -> float:
        """Return the seconds to wait, after it has served for so long."""
        if served >= STEADY:
            self._next = FIRST_PAUSE
        pause, self._next = self._next, min(2 * self._next, LONGEST_PAUSE)
        return pause
