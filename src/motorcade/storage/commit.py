"""A write on its way into the store, and what becomes of it.

    commit = store.write(batch)      never waits, never raises
    commit.then(callback)            called when the outcome is known, in the order of the writes
    written = await commit           the same for a task; raises the error

Rule 1: a commit is done once. Callbacks run then, in the order in which they were given. One that raises is logged, and
        keeps neither the others nor the answers of other commits.
Rule 2: `write` calls no callback. A commit may be done when it returns: of an empty batch, or a closed store.
Rule 3: a commit of several parts is done with the last of them; of several errors it has the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import structlog

log = structlog.stdlib.get_logger("motorcade.storage")

T = TypeVar("T")


class Completion(Protocol):
    """Anything that a commit can wait for, such as `asyncio.Future`."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Commit(Generic[T]):
    """Something that will be stored, or could not be."""

    __slots__ = ("_callbacks", "_open", "error", "result")

    def __init__(self, parts: int = 1) -> None:
        self._open = parts  # parts that are not done yet
        self._callbacks: list[Callable[[], object]] = []
        self.result: T = None  # type: ignore[assignment]  # until it is done; a commit without an answer is Commit[None]
        self.error: BaseException | None = None  #: why it failed; of several reasons the first

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """Return a commit that has failed already."""
        commit = cls(0)
        commit.error = error
        return commit

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return not self._open

    @property
    def refused(self) -> bool:
        """Whether it failed and certainly nothing was stored."""
        return bool(getattr(self.error, "certain", False))

    def then(self, callback: Callable[[], object]) -> None:
        """Call back when it is done; at once if it is."""
        if self._open:
            self._callbacks.append(callback)
        else:
            _call(callback)

    def part(self) -> None:
        """Wait for one more part."""
        self._open += 1

    def finish(self, error: BaseException | None = None) -> None:
        """Note that one part is done."""
        if error is not None and self.error is None:
            self.error = error
        self._open -= 1
        if not self._open and self._callbacks:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                _call(callback)

    def settle(self, result: T) -> None:
        """Note that it is done, with an answer."""
        self.result = result
        self.finish()

    def after(self, completions: Iterable[Completion]) -> None:
        """Wait for these as well."""
        for completion in completions:
            self.part()
            completion.add_done_callback(self._completed)

    def _completed(self, completion: Completion) -> None:
        self.finish(RuntimeError("it was given up") if completion.cancelled() else completion.exception())

    # -- as `asyncio.Future`: what plugins wait for

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback(self)` when it is done."""
        self.then(lambda: callback(self))

    def cancelled(self) -> bool:
        """Return False: a write that has begun cannot be called back."""
        return False

    def exception(self) -> BaseException | None:
        """Return why it failed."""
        return self.error

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
