"""Background tasks of a node: run again when they fail, counted, and known while they stand still.

    start(work, name) ─▶ work() ─ returns ─▶ done
                           ▲  └── raises ──▶ counted, logged ─▶ pause, doubled with every failure ─┐
                           └────────────────────────────────────────────────────────────────────┘

Rule 1: `work` is a function that makes the coroutine, so that it can be made again. It begins with the state it left.
Rule 2: a task stands still from its first failure until it has ended well, or has run for `STEADY` seconds. A node is
        not ready meanwhile (`standing_still`).
Rule 3: the label of the metric is the first two parts of the name (`queues.fetch` of `queues.fetch.orders`): the number
        of series depends on the code, never on the fleet.
Rule 4: each label has at most one line in the log per `LOG_PAUSE`, with a bounded traceback, however many tasks fail.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

import structlog

FIRST_PAUSE: Final = 1.0  #: seconds until a task that has failed is run again
LONGEST_PAUSE: Final = 30.0  #: seconds, after many failures
STEADY: Final = 10.0  #: seconds that a task must run after a failure to count as well again
LOG_PAUSE: Final = 1.0  #: seconds between two lines of one label
MAX_TRACEBACK: Final = 4000  #: characters of a traceback in the log, from its end
MAX_ERROR: Final = 300  #: characters of an error
MAX_TOLD: Final = 10  #: tasks that are named when many stand still

Work = Callable[[], Coroutine[Any, Any, None]]

log = structlog.stdlib.get_logger("motorcade.tasks")


class StandingStill(NamedTuple):
    """A task that has failed and does not run well again yet."""

    name: str
    error: str
    failures: int  #: in a row

    def __str__(self) -> str:
        times = f" ({self.failures} times in a row)" if self.failures > 1 else ""
        return f"task {self.name} has failed{times} and is tried again: {self.error}"


class _Run:
    """A task that is watched."""

    __slots__ = ("began", "error", "failures", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0  # in a row
        self.error = ""
        self.began = 0.0  # of the last attempt, in loop time
        self.waiting = False  # for the next attempt


class Tasks:
    """The background tasks of one node."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  #: by label
        self._troubled: dict[_Run, None] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._logged: dict[str, tuple[float, int]] = {}  # label: when, and failures not logged since

    def start(
        self,
        work: Work,
        name: str,
        *,
        failed: Callable[[], object] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Task[None]:
        """Run `work()` until it returns, again and again while it raises; `failed` hears of every failure."""
        task = (loop or asyncio.get_running_loop()).create_task(self._run(work, name, failed), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """End all tasks."""
        for task in self._running:
            task.cancel()

    async def _run(self, work: Work, name: str, failed: Callable[[], object] | None) -> None:
        run = _Run(name)
        loop = asyncio.get_running_loop()
        try:
            while True:
                run.began = loop.time()
                try:
                    await work()
                    return
                except Exception as error:  # noqa: BLE001 - whatever it is, the task must go on
                    if run.failures and loop.time() - run.began >= STEADY:
                        run.failures = 0
                    run.failures += 1
                    run.error = _short(error)
                    run.waiting = True
                    self._troubled[run] = None
                    pause = min(FIRST_PAUSE * 2 ** (min(run.failures, 10) - 1), LONGEST_PAUSE)
                    self.note(name, error, again_in=pause)
                    if failed is not None:
                        failed()
                await asyncio.sleep(pause)
                run.waiting = False
        finally:
            self._troubled.pop(run, None)

    def note(self, name: str, error: BaseException, **more: object) -> None:
        """Count and log a failure of something in the background."""
        label = label_of(name)
        self.failures[label] += 1
        now = asyncio.get_running_loop().time()
        last, unlogged = self._logged.get(label, (0.0, 0))
        if last and now - last < LOG_PAUSE:
            self._logged[label] = last, unlogged + 1
            return
        self._logged[label] = now or LOG_PAUSE, 0
        if unlogged:
            more["unlogged"] = unlogged
        text = "".join(traceback.format_exception(error))
        log.error("task_failed", task=name, error=_short(error), traceback=text[-MAX_TRACEBACK:], **more)

    def standing_still(self) -> list[StandingStill]:
        """Return tasks that have failed and do not run well again yet."""
        now = asyncio.get_running_loop().time()
        for run in [run for run in self._troubled if not run.waiting and now - run.began >= STEADY]:
            del self._troubled[run]
            run.failures = 0
        return [StandingStill(run.name, run.error, run.failures) for run in self._troubled]

    def troubles(self) -> list[str]:
        """Return the same in words, for an operator; at most `MAX_TOLD` of them."""
        found = self.standing_still()
        told = [str(task) for task in found[:MAX_TOLD]]
        if len(found) > MAX_TOLD:
            told.append(f"and {len(found) - MAX_TOLD} tasks more")
        return told


def label_of(name: str) -> str:
    """Return the part of a task's name that comes from the code (rule 3)."""
    return ".".join(name.split(".", 2)[:2])


def _short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"
