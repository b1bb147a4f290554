"""A write on its way into the store, and what becomes of it.

    commit = store.write(batch)      never waits, never raises
    commit.then(callback)            called when the outcome is known, in the order of the writes
    written = await commit           the same for a task; raises the error

Rule 1: a commit is done once. Callbacks run then, in the order in which they were given. One that raises is logged, and
        keeps neither the others nor the answers of other commits.
Rule 2: `write` calls no callback. A commit may be done when it returns: of an empty batch, or a closed store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, Self, TypeVar

import structlog

log = structlog.stdlib.get_logger("motorcade.storage")

T = TypeVar("T")


class Commit(Generic[T]):
    """Something that will be stored, or could not be."""

    __slots__ = ("_callbacks", "done", "error", "result")

    def __init__(self) -> None:
        self.done = False  #: the outcome is known
        self._callbacks: list[Callable[[], object]] = []
        self.result: T = None  # type: ignore[assignment]  # until it is done; a commit without an answer is Commit[None]
        self.error: BaseException | None = None  #: why it failed

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """Return a commit that has failed already."""
        commit = cls()
        commit.finish(error)
        return commit

    @property
    def refused(self) -> bool:
        """Return True if it failed and certainly nothing was stored."""
        return bool(getattr(self.error, "certain", False))

    def then(self, callback: Callable[[], object]) -> None:
        """Call back when it is done; at once if it is."""
        if self.done:
            _call(callback)
        else:
            self._callbacks.append(callback)

    def finish(self, error: BaseException | None = None) -> None:
        """Note that it is done, and why it failed."""
        self.error = error
        self.done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback)

    def settle(self, result: T) -> None:
        """Note that it is done, with an answer."""
        self.result = result
        self.finish()

    # A future of its own for each task, since cancelling a task cancels what it waits for.

    def __await__(self) -> Generator[Any, None, T]:
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.then(partial(self._wake, waiter))
        return waiter.__await__()

    def _wake(self, waiter: asyncio.Future[T]) -> None:
        if waiter.done():  # the task that waited was cancelled
            return
        if self.error is None:
            waiter.set_result(self.result)
        else:
            # Many may raise the same error: it must not gather the frames of all of them.
            waiter.set_exception(self.error.with_traceback(None))


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("commit_callback_failed", consequence="what waited for this write may wait for ever")
