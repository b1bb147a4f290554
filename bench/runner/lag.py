"""How late the node's event loop was, from the histogram at its control port.

The node counts from its start on, so what a phase did is the difference of two readings.
"""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

from .machine import BenchError

SERIES = "motorcade_loop_lag_seconds"
_BUCKET = re.compile(SERIES + r'_bucket\{le="([^"]+)"\} (\d+)')
_SUM = re.compile(SERIES + r"_sum ([0-9.e+-]+)")
BAR = 40  #: characters of the longest bar of a drawn histogram


@dataclass(frozen=True, slots=True)
class Lag:
    """Samples of lateness by upper bound: (seconds, samples up to it), the last bound is infinite."""

    buckets: tuple[tuple[float, int], ...]
    seconds: float  #: of all samples together

    @classmethod
    def parse(cls, page: str) -> Lag:
        """Read the node's metrics page."""
        buckets = tuple((float(bound), int(count)) for bound, count in _BUCKET.findall(page))
        total = _SUM.search(page)
        if not buckets or total is None:
            raise BenchError(f"no {SERIES} in the node's metrics")
        return cls(buckets, float(total[1]))

    @classmethod
    def read(cls, address: str) -> Lag:
        """Ask the control port at HOST:PORT."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return cls.parse(answer.read().decode())

    def since(self, earlier: Lag) -> Lag:
        """What came after `earlier`."""
        before = dict(earlier.buckets)
        buckets = tuple((bound, count - before.get(bound, 0)) for bound, count in self.buckets)
        return Lag(buckets, self.seconds - earlier.seconds)

    @property
    def count(self) -> int:
        return self.buckets[-1][1]

    def as_json(self) -> dict[str, object]:
        """Samples up to each bound in seconds, as Prometheus has them."""
        return {
            "buckets": {f"{bound:g}": count for bound, count in self.buckets},
            "seconds": round(self.seconds, 6),
        }

    @classmethod
    def from_json(cls, raw: dict[str, object]) -> Lag:
        buckets, seconds = raw["buckets"], raw["seconds"]
        assert isinstance(buckets, dict)
        assert isinstance(seconds, int | float)
        return cls(tuple((float(bound), int(count)) for bound, count in buckets.items()), float(seconds))

    def drawing(self) -> list[str]:
        """One line for each bucket that is not beyond the last sample."""
        counts = [count for _, count in self.buckets]
        inside = [count - below for count, below in zip(counts, [0, *counts], strict=False)]
        longest, all_of_them = max(1, *inside), max(1, self.count)
        lines, least = [], 0.0
        for (bound, count), samples in zip(self.buckets, inside, strict=True):
            label = f"≤ {bound * 1000:g} ms" if bound != float("inf") else f"> {least * 1000:g} ms"
            bar = "#" * -(-BAR * samples // longest)  # rounded up: one late sample shows
            lines.append(f"{label:>11} {samples:8} {100 * samples / all_of_them:5.1f} % {bar}".rstrip())
            least = bound
            if count == self.count:
                break
        return lines
