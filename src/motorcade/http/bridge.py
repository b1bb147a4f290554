"""From the HTTP thread into the broker's event loop and back.

A request takes a bounded copy in the broker's loop and does everything else (checking, sorting, serialising) here.
The broker never waits for HTTP; HTTP waits for the broker a bounded time, and says 503 if that was not enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 5.0  #: seconds the broker may take to answer
LONG_PATIENCE = 30.0  #: seconds for loading a plugin or reading the configuration again


class BrokerBusyError(Exception):
    """The broker's event loop did not answer in time, or has ended."""


class Bridge:
    """Calls methods of `Control` where they belong."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, method: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of `Control` in the broker's loop, with the ordinary time-out."""
        return await self._run(method(*args, **kwargs), PATIENCE)

    async def call_slow(self, method: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of `Control` in the broker's loop, with a longer time-out."""
        return await self._run(method(*args, **kwargs), LONG_PATIENCE)

    async def _run(self, work: Coroutine[Any, Any, T], patience: float) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise BrokerBusyError("the broker has stopped") from error
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({waiting}, timeout=patience)
        if not done:
            waiting.cancel()  # cancels the work in the broker's loop too
            raise BrokerBusyError(f"the broker did not answer within {patience:g} seconds")
        return await waiting
