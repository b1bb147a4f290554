"""Keeps the store of a node tidy, and its figures at hand, in the background.

    every `interval`:  sweep, step by step, until there is nothing left to remove  ─▶  figures

Rule 1: a step removes at most `budget` items, and is followed by a pause as long as the step took: a sweep never has
        more than half of the store's time, however much has expired at once.
Rule 2: a budget of 0 means that this node removes nothing: the figures are still taken. Readers never see what has
        expired, so nothing is wrong then, but its room does not come back unless another node of a shared store sweeps.
        With several nodes each sweeps the cells whose steward it is (`kept`).
Rule 3: an error of the store is counted and told once; the next round comes later and later, up to LONGEST_PAUSE. The
        figures are taken also where sweeping fails; what cannot be had stays as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from motorcade.clock import time
from motorcade.storage.ports import Store, StoreError, StoreFigures

#: Seconds between two rounds, whatever was asked for.
SHORTEST_PAUSE: Final = 0.1

#: Seconds until the next round after errors.
LONGEST_PAUSE: Final = 300.0

#: Seconds of pause between two steps at most.
LONGEST_BREAK: Final = 1.0

log = structlog.stdlib.get_logger("motorcade.storage")


@dataclass(frozen=True, slots=True)
class SweepCounters:
    """The work of housekeeping since the node started."""

    rounds: int  #: complete ones
    steps: int
    removed: int  #: entries, records and blobs
    octets: int  #: given back
    errors: int  #: rounds that ended early
    seconds: float  #: of the last complete round
    ended_at: float  #: when that was, in seconds since the epoch; 0: there was none
    trouble: str  #: why the last round ended early; empty: it did not


class Housekeeping:
    """One for each store that a node has open."""

    def __init__(
        self,
        store: Store,
        interval: float,
        budget: int,
        clock: Callable[[], float] = time,
        *,
        kept: Callable[[int], bool] | None = None,
        on_expired: Callable[[Iterable[tuple[str, int]]], None] | None = None,
    ) -> None:
        """Take `interval` in seconds; `clock` tells what counts as now.

        `kept` says of which feeds this node sweeps the cells; None: of all. `on_expired` gets the owners and positions
        of entries that were removed.
        """
        self._kept = kept
        self._on_expired = on_expired
        self.figures: StoreFigures | None = None  #: as of the last time they could be had
        self._store = store
        self._interval = max(interval, SHORTEST_PAUSE)
        self._budget = budget
        self._clock = clock
        self._rounds = self._steps = self._removed = self._size_bytes = self._errors = 0
        self._failures = 0  #: one after the other, up to now
        self._seconds = self._ended_at = 0.0
        self._trouble = ""

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(self.pause)

    async def round(self) -> None:
        """Sweep once and take the figures; an error of the store ends it early and is counted."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        failure: StoreError | None = None
        try:
            await self._sweep()
        except StoreError as error:
            failure = error
        try:  # a store that takes no writes can still be counted
            self.figures = await self._store.figures()
        except StoreError as error:
            failure = failure or error
        if failure is not None:
            self._failed(failure)
            return
        if self._failures:
            log.info("housekeeping_goes_on", after=self._failures)
        self._failures = 0
        self._trouble = ""
        self._rounds += 1
        self._seconds = loop.time() - start
        self._ended_at = self._clock()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        cursor: bytes | None = b""
        while self._budget and cursor is not None:
            start = loop.time()
            swept = await self._store.sweep(self._clock(), self._budget, cursor, self._kept)
            self._steps += 1
            self._removed += swept.removed
            self._size_bytes += swept.size_bytes
            cursor = swept.cursor
            if swept.expired and self._on_expired is not None:
                self._on_expired(swept.expired)
            await asyncio.sleep(min(loop.time() - start, LONGEST_BREAK))

    def _failed(self, error: StoreError) -> None:
        self._errors += 1
        self._failures += 1
        if str(error) != self._trouble:
            log.warning("housekeeping_failed", error=str(error), again_in=self.pause)
        self._trouble = str(error)

    @property
    def pause(self) -> float:
        """Seconds until the next round."""
        doubled = self._interval * (1 << min(self._failures, 30))
        return max(self._interval, min(doubled, LONGEST_PAUSE))

    @property
    def counters(self) -> SweepCounters:
        return SweepCounters(
            rounds=self._rounds,
            steps=self._steps,
            removed=self._removed,
            octets=self._size_bytes,
            errors=self._errors,
            seconds=self._seconds,
            ended_at=self._ended_at,
            trouble=self._trouble,
        )
