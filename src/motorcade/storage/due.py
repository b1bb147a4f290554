"""Due times, in the engines that keep them as records; they serve one node, which knows most of them anyway.

    record    collection `due`, key: the home, value: the time

What is exported has this form, whichever engine it comes from. The collection is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from struct import Struct
from typing import Final

DUE: Final = "due"
_TIME: Final = Struct(">d")


def due_value(at: float) -> bytes:
    """Return the value of a record."""
    return _TIME.pack(at)


def due_time(value: bytes) -> float:
    """Return the time of a record."""
    return float(_TIME.unpack(value)[0])


def due_homes(records: Iterable[tuple[str, bytes]], now: float, limit: int) -> list[tuple[str, float]]:
    """Return the homes whose time has come, oldest first."""
    times = ((due_time(value), home) for home, value in records)
    return [(home, at) for at, home in nsmallest(limit, (pair for pair in times if pair[0] <= now))]
