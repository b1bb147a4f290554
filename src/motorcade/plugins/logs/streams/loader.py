"""Reads pages for all streams, a few at a time.

Thousands of readers may come back at once, each at a place of its own. A read from the embedded store runs in the
thread of the event loop, and every page takes memory until its reader has seen it; so no more than `CONCURRENT` reads
are made per turn of the loop, in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from motorcade.extension.plugin import Spawn

CONCURRENT: Final = 8

Work = Callable[[], Awaitable[None]]


class Loader:
    """Does what it is given, soon. What raises must have told its readers before; the others are served."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._work: deque[Work] = deque()
        self._running = False

    def do(self, work: Work) -> None:
        self._work.append(work)
        if not self._running:
            self._running = True
            self._spawn(self._run, "load")

    async def _run(self) -> None:
        self._running = True
        try:
            while self._work:
                some = [self._work.popleft() for _ in range(min(CONCURRENT, len(self._work)))]
                if len(some) == 1:
                    await some[0]()
                else:
                    answers = await asyncio.gather(*(work() for work in some), return_exceptions=True)
                    failed = [answer for answer in answers if isinstance(answer, BaseException)]
                    if failed:
                        raise failed[0]
                await asyncio.sleep(0)  # a turn for all others, and for the readers of these pages
        finally:
            self._running = False
