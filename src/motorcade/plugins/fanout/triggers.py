"""Vehicles for which there may be something, each with the worker that looks for it.

A vehicle always has the same worker, so its messages are looked for one after the other. A trigger that comes while a
vehicle waits for its worker changes nothing; one that comes while it is being served has it served once more. That, and
the order of writing before triggering, is why no trigger is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from motorcade.plugins.fanout.source import VehicleSource


class TriggerQueue:
    """Vehicles that are to be looked at, each once."""

    def __init__(self) -> None:
        self.vins: dict[str, None] = {}
        self.wake = asyncio.Event()


class Triggers:
    """The workers of one node, and the vehicles that are there."""

    def __init__(self, workers: int, counters: Counter[str]) -> None:
        self.sources: dict[str, VehicleSource] = {}  #: by VIN: vehicles that are connected and subscribed
        self.queues = [TriggerQueue() for _ in range(workers)]
        self._counters = counters

    def trigger(self, vin: str, why: str) -> None:
        """Have a vehicle looked at, if it is there."""
        if vin in self.sources:
            self._counters[f"trigger_{why}"] += 1
            queue = self.queues[crc32(vin.encode()) % len(self.queues)]
            queue.vins[vin] = None
            queue.wake.set()
