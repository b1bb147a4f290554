"""Things that change often and are written seldom: all that have changed together, a little later; some of them now.

    change ─▶ waits until the interval is over ─┐
    hurry ──────────────────────────────────────┴─▶ up to BATCH at a time ─▶ write(some) ─▶ done, or tried again

Rule 1: one batch is under way at a time, so nothing is overwritten by something older.
Rule 2: `write` takes things as they are when it begins. One that changes meanwhile is written once more.
Rule 3: what could not be written is tried again, before what has changed since; what was dropped meanwhile is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from itertools import chain, islice
from typing import Final, Generic, TypeVar

from motorcade.extension.plugin import Spawn

BATCH: Final = 500  #: things written at once
LAST_ATTEMPT: Final = 5.0  #: seconds for what is left at the end

T = TypeVar("T", bound=Hashable)


class Gathered(Generic[T]):
    """What has changed, and its way out."""

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[bool]],
        interval: Callable[[], float],
        retry: float,
        spawn: Spawn,
        name: str,
        done: Callable[[list[T]], None] | None = None,
    ) -> None:
        """`write` says whether it has written, and does not raise; `done` hears of what is out of here."""
        self._write = write
        self._interval = interval
        self._retry = retry
        self._spawn = spawn
        self._name = name
        self._done = done
        self._changed: dict[T, None] = {}  # to be written when the interval is over
        self._urgent: dict[T, None] = {}  # to be written now
        self._flying: dict[T, None] = {}  # being written
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._ending = False

    def __contains__(self, thing: T) -> bool:
        """Whether it is not written yet."""
        return thing in self._changed or thing in self._urgent or thing in self._flying

    def __iter__(self) -> Iterator[T]:
        """What is not written yet; one that changes while it is written comes twice."""
        return chain(self._changed, self._urgent, self._flying)

    def waits(self, thing: T) -> bool:
        """Whether it has changed, and nobody is in a hurry."""
        return thing in self._changed

    @property
    def is_timed(self) -> bool:
        """Whether the interval runs."""
        return self._timer is not None

    def change(self, thing: T) -> None:
        """Write it when the interval is over."""
        self._changed[thing] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval(), self.due)

    def hurry(self, thing: T) -> None:
        """Write it now."""
        self._changed.pop(thing, None)
        self._urgent[thing] = None
        self._write_soon()

    def drop(self, thing: T) -> None:
        """Do not write it, nor try again."""
        self._changed.pop(thing, None)
        self._urgent.pop(thing, None)
        self._flying.pop(thing, None)

    def due(self) -> None:
        """The interval is over."""
        self._timer = None
        self._urgent.update(self._changed)
        self._changed.clear()
        self._write_soon()

    def _write_soon(self) -> None:
        if self._writing is None and self._urgent:
            self._writing = self._spawn(self._write_all, self._name)

    async def _write_all(self) -> None:
        try:
            while self._urgent:
                some = list(islice(self._urgent, BATCH))
                for thing in some:
                    del self._urgent[thing]
                self._flying = dict.fromkeys(some)
                written = await self._write(some)
                left, self._flying = self._flying, {}
                if not written:
                    self._urgent = left | self._urgent
                    if self._ending:
                        break
                    await asyncio.sleep(self._retry)
                elif self._done is not None:
                    self._done(some)
        except asyncio.CancelledError:
            self._writing = None
            raise
        except Exception:  # this task is run again
            self._urgent, self._flying = self._flying | self._urgent, {}
            raise
        self._writing = None

    def cancel(self) -> None:
        """Stop the clock, as a process that dies would."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle(self) -> int:
        """Write everything, for the last time; how many are left."""
        self._ending = True
        self.cancel()
        self.due()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=LAST_ATTEMPT)
        return len(self._urgent)
