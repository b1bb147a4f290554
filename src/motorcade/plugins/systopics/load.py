"""Load averages: how much of something happens per minute, over the last 1, 5 and 15 minutes.

An average moves towards the newest rate by an amount that depends on the time since the last look, so that what
happened a period ago counts for 1/e of what happens now (the way a Unix load average is made):

    average = rate + exp(-elapsed / period) * (average - rate)
"""

from __future__ import annotations

import math

PERIODS = (("1min", 60.0), ("5min", 300.0), ("15min", 900.0))  #: name, seconds


class Load:
    """The averages of one counter that only grows."""

    __slots__ = ("_averages", "_last")

    def __init__(self) -> None:
        self._last: float | None = None
        self._averages = [0.0 for _ in PERIODS]

    def observe(self, count: float, elapsed: float) -> None:
        """Take the counter now, `elapsed` seconds after the last look. The first look only remembers it."""
        last, self._last = self._last, count
        if last is None or elapsed <= 0:
            return
        rate = (count - last) * 60.0 / elapsed
        for index, (_, period) in enumerate(PERIODS):
            keep = math.exp(-elapsed / period)
            self._averages[index] = rate + keep * (self._averages[index] - rate)

    def averages(self) -> dict[str, float]:
        """Return events per minute by name of the period."""
        return {name: average for (name, _), average in zip(PERIODS, self._averages, strict=True)}
