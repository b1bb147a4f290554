"""The clock by which a node tells how much of a life is left: seconds since the epoch that never step.

Session expiry, will delay, message expiry, retention: all are intervals, so a step of the system's clock (an operator
sets it, NTP corrects it by hours) must not lengthen or shorten them. `time()` goes on evenly from where the system's
clock was when the process began, by a clock that cannot be set, and never goes back.

    system's clock   ───────────┐ step                          ┐
                                └────────────────────────────   │ `offset`, told as a metric
    `time()`         ───────────────────────── draws near, by at most `SLEW` of the time that passes

Rule 1: what is an interval, and what is only shown, goes by `time()`. What others have dated (the end of a token or
        of a certificate) goes by the system's clock: `wall()`.
Rule 2: `check` is called several times a second. It finds steps, and lets the node's clock draw near to the system's,
        so slowly that no interval is off by more than a hundredth.
Rule 3: time that the machine was suspended counts, where the system has a clock that tells it.
Rule 4: across a restart there is only the system's clock.
"""

from __future__ import annotations

import time as system
from collections.abc import Callable
from typing import Final

STEP: Final = 0.5  #: seconds by which the system's clock moves against the even one at least, to count as a step
SUSPENDED: Final = 1.0  #: seconds that count as such; less may be the time between reading two clocks
SLEW: Final = 0.01  #: share of the time that passes by which the node's clock draws near to the system's


def _suspended() -> float:
    """Return the seconds of suspension since the machine's start, plus a constant; 0 if the system does not tell."""
    boot = getattr(system, "CLOCK_BOOTTIME", None)
    return 0.0 if boot is None else system.clock_gettime(boot) - system.monotonic()


class Clock:
    """One for a process, as the system's clock is; tests make their own."""

    __slots__ = ("_asleep", "_base", "_even", "_looked_at", "_suspended", "offset", "steps", "wall")

    def __init__(
        self,
        wall: Callable[[], float] = system.time,
        even: Callable[[], float] = system.monotonic,
        suspended: Callable[[], float] = _suspended,
    ) -> None:
        self.wall = wall  #: the system's clock, steps and all
        self.steps = 0  #: steps of the system's clock that were noticed
        self.offset = 0.0  #: seconds by which the system's clock is ahead
        self._even = even  # cannot be set, and stands still while the machine is suspended
        self._suspended = suspended
        self._base = wall() - even()
        self._asleep = suspended()
        self._looked_at = even()

    def time(self) -> float:
        """Return the seconds since the epoch; never goes back."""
        return self._even() + self._base

    def check(self) -> float:
        """Look at both clocks; by how many seconds the system's has been set meanwhile, 0 if it has not."""
        asleep = self._suspended()
        if asleep - self._asleep > SUSPENDED:
            self._base += asleep - self._asleep
        self._asleep = max(self._asleep, asleep)  # less is told if this thread had to wait between its two clocks
        even = self._even()
        wall = self.wall()
        if self._even() - even > STEP / 10:
            return 0.0  # this thread had to wait between the two: the next look compares them
        passed, self._looked_at = even - self._looked_at, even
        offset = wall - even - self._base
        moved, self.offset = offset - self.offset, offset
        most = passed * SLEW
        nearer = max(-most, min(most, offset))
        self._base += nearer
        self.offset -= nearer
        if abs(moved) < STEP:
            return 0.0
        self.steps += 1
        return moved


CLOCK: Final = Clock()  #: of this process
time: Final = CLOCK.time
