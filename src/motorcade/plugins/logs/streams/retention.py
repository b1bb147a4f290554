"""Removal of records that are too old, and of the oldest of streams that are too large.

Each stream knows in memory how old its oldest record is and how much it holds, so one that has nothing to lose costs a
comparison per interval. A stream that grows clearly beyond its bounds is looked at at once; what is too old goes with
the next look, which comes within a hundredth of the retention or one interval. What is to go goes in steps of
`trim_budget` records, with a turn of the event loop between them. While no stream is declared, nothing runs.

Of several members the steward of a stream's cell trims it. It looks up once per interval what the others have appended;
a member that sees a stream grow clearly beyond its bounds tells it (`tails`). Two members that both take themselves for
the steward, while one comes or goes, do no harm: what is to go is gone after the first of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

import structlog

from motorcade.delivery.progress import SWEEPS, ProgressStore
from motorcade.plugins.logs.streams.stream import Stream
from motorcade.storage.ports import StoreError, Streams

SHORTEST: Final = 0.1  #: seconds between two looks, unless a stream overflows


class TrimmableStreams(Protocol):
    """The service in which streams are found."""

    def streams(self) -> Sequence[Stream]: ...

    progress: ProgressStore

    def now(self) -> float: ...

    @property
    def shared(self) -> bool:
        """Return True if other members may append and trim too."""

    def keeps(self, stream: Stream) -> bool:
        """Return True if this member trims a stream."""


class Trimmer:
    """Removes what is to go, as long as `run` runs."""

    def __init__(
        self,
        service: TrimmableStreams,
        store: Streams,
        interval: float,
        budget: int,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._service = service
        self._store = store
        self._interval = interval
        self._budget = budget
        self._counters = counters
        self._log = log
        self._wake = asyncio.Event()
        self._failing = False

    def configure(self, interval: float, budget: int) -> None:
        self._interval = interval
        self._budget = budget
        self._wake.set()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def members_changed(self) -> None:
        """Look at all streams now: others may be for this member to trim."""
        for stream in self._service.streams():
            stream.refreshed = 0.0
        self._wake.set()

    async def run(self) -> None:
        """Trim until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience()):  # not `wait_for`: it may swallow being cancelled (3.11)
                    await self._wake.wait()
            self._wake.clear()
            await self.look()

    def _patience(self) -> float | None:
        """Return seconds until the next look; None: as long as nothing happens."""
        streams = self._service.streams()
        if not streams:
            return None
        now = self._service.now()
        patience = self._interval
        for stream in streams:
            if stream.options is not None and stream.options.retention:
                pause = max(SHORTEST, stream.options.retention / 100)
                # Progress is to be swept several times in a retention, whether there are records or not.
                due = stream.options.retention / SWEEPS
                if self._service.keeps(stream):
                    due = min(stream.outdated_at() - now, due)
                patience = min(patience, max(pause, due))
        return patience

    async def look(self) -> None:
        """Trim every stream that has something to lose; progress goes by age too."""
        self._service.progress.sweep()
        for stream in self._service.streams():
            try:
                keeps, now = self._service.keeps(stream), self._service.now()
                if self._service.shared and (stream.refreshed + self._interval <= now or (keeps and stream.uncounted)):
                    await stream.refresh(whole=keeps)
                else:
                    await stream.look()
                now = self._service.now()
                if keeps and not stream.closed and (stream.overflows() or stream.outdated_at() <= now):
                    await self._trim(stream, now)
                self._failing = False
            except StoreError as error:
                self._counters["trim_failed"] += 1
                if not self._failing:  # once, not with every look
                    self._failing = True
                    self._log.error("stream_not_trimmed", stream=stream.name, error=str(error))

    async def _trim(self, stream: Stream, now: float) -> None:
        options = stream.options
        while options is not None and not stream.closed:
            swept = await self._store.trim(
                stream.name,
                now - options.retention if options.retention else 0.0,
                options.max_bytes,
                options.max_messages,
                self._budget,
            )
            self._counters["trimmed"] += swept.removed
            self._counters["trimmed_bytes"] += swept.size_bytes
            await stream.trimmed(swept.removed, swept.size_bytes)
            if swept.cursor is None:
                return
            await asyncio.sleep(0)
