"""A process that is kept running.

    starting ─▶ up ─▶ died ─ pause, doubled ─▶ starting ─▶ …
        └ ends before it was ever up: `StartError`, with what it said last

`stop` may come at any moment; `run` ends the process that there is, and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final, Protocol

import structlog

from motorcade.core.errors import MotorcadeError
from motorcade.supervisor.backoff import BackOff
from motorcade.supervisor.process import ChildProcess, ending

MAX_TOLD: Final = 10  #: last lines of a process that died, in the log

log = structlog.stdlib.get_logger("motorcade.supervisor")


class StartError(MotorcadeError):
    """A process of `serve --nodes` ended before it was of use; the message is its own."""


class Startable(Protocol):
    """A way to start a process of some kind, and to see that it is of use."""

    kind: str  #: what it is called in the log: node, valkey
    name: str
    stop_patience: float  #: seconds that it may take to end

    async def launch(self) -> ChildProcess:
        """Start it."""

    async def comes_up(self, child: ChildProcess) -> None:
        """Return when it is of use. It may end before; then this is cancelled."""

    def told(self, child: ChildProcess) -> dict[str, object]:
        """Return what the log tells of it when it is of use."""


class Supervised:
    """One process, started again when it dies."""

    def __init__(self, how: Startable, hurry: asyncio.Event) -> None:
        self.how = how
        self.up = asyncio.Event()  #: set while it is of use
        self.deaths = 0
        self.child: ChildProcess | None = None
        self._began = False  # it was of use once
        self._hurry = hurry  # kill what does not end at once
        self._stopping = asyncio.Event()
        self._backoff = BackOff()
        self._untold: set[int] = set()  # signals for when it is up: until then they could end it

    async def run(self) -> None:
        """Keep it running until `stop`, then end it. `StartError` if it ends before it was ever of use."""
        while not self._stopping.is_set():
            try:
                child = self.child = await self.how.launch()
            except MotorcadeError as error:
                await self._go_on(str(error), 0.0, {}, [])
                continue
            try:
                served = await self._serve(child)
            except MotorcadeError as error:  # it is not what was wanted
                await self._end(child)
                await self._go_on(str(error), 0.0, {}, [])
                continue
            if self._stopping.is_set():
                await self._end(child)
            else:
                how = ending(child.ended.result())
                told = ", ".join(f"{key} {value}" for key, value in how.items())
                await self._go_on(child.message or f"it ended ({told})", served, how, list(child.tail)[-MAX_TOLD:])

    def stop(self) -> None:
        """Have `run` end the process and return."""
        self._stopping.set()

    def tell(self, number: int) -> None:
        """Send a signal that it understands when it is up; then, if it is not."""
        if self.up.is_set() and self.child is not None:
            self.child.signal(number)
        else:
            self._untold.add(number)

    async def _serve(self, child: ChildProcess) -> float:
        """Wait until it is up and then until it ends, or until it is to stop; the seconds that it was up."""
        if not await self._first(child, self.how.comes_up(child)):
            return 0.0
        self._began = True
        self.up.set()
        since = monotonic()
        log.info(self._event("up"), **self._named(), pid=child.pid, **self.how.told(child))
        while self._untold:
            child.signal(self._untold.pop())
        await self._first(child)
        self.up.clear()
        return monotonic() - since

    async def _first(self, child: ChildProcess, work: Coroutine[Any, Any, None] | None = None) -> bool:
        """Wait for its end, for the call to stop, or for some work; True if that is done, and came first."""
        stopping = asyncio.create_task(self._stopping.wait())
        waits: set[asyncio.Future[Any]] = {child.ended, stopping}
        task = asyncio.create_task(work) if work is not None else None
        try:
            await asyncio.wait(waits | ({task} if task is not None else set()), return_when=asyncio.FIRST_COMPLETED)
            if task is None or not task.done() or child.ended.done() or self._stopping.is_set():
                return False
            task.result()
            return True
        finally:
            for each in (stopping, task):
                if each is not None and not each.done():
                    each.cancel()
                    await asyncio.wait({each})

    async def _go_on(self, why: str, served: float, how: dict[str, object], tail: list[str]) -> None:
        """Wait before the next start; `StartError` if it has never been of use."""
        if not self._began:
            raise StartError(f"{self.how.kind} {self.how.name}: {why}")
        self.deaths += 1
        pause = self._backoff.after(served)
        served = round(served, 3)
        if how.get("code") == 0:  # it was told to: by a signal, or `motorcade node leave`
            log.info(self._event("ended"), **self._named(), served=served, again_in=pause)
        else:
            log.error(self._event("died"), **self._named(), **how, error=why, served=served, again_in=pause, tail=tail)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)

    async def _end(self, child: ChildProcess) -> None:
        patience = self.how.stop_patience
        clean = await child.stop(patience, self._hurry)
        how = ending(child.ended.result())
        if not clean:
            why = "in a hurry" if self._hurry.is_set() else f"it did not end within {patience:g} s"
            log.warning(self._event("killed"), **self._named(), reason=why)
        elif child.ended.result() > 0:
            log.error(self._event("ended_badly"), **self._named(), **how, error=child.message)

    def _event(self, name: str) -> str:
        return f"{self.how.kind}_{name}"

    def _named(self) -> dict[str, str]:
        return {self.how.kind: self.how.name}
