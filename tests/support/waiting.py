"""Waiting in an event loop for what nobody tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 60.0  #: seconds: machines that run tests are busy


async def until(condition: Callable[[], bool], pause: float = 0.01) -> None:
    """Let others work, threads and processes too, until it is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(pause)
