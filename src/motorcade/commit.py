"""The outcome of a write: the one type of completion, from the store up to the publisher's acknowledgement.

    commit = store.write(batch)      never waits, never raises
    commit.then(callback)            called when the outcome is known, in the order of the writes
    written = await commit           the same for a task; raises the error
    joined([first, second])          done when both are

Rule 1: a commit is done once. Callbacks run then, in the order in which they were given. One that raises is logged, and
        keeps neither the others nor the answers of other commits.
Rule 2: `write` calls no callback. A commit may be done when it returns: of an empty batch, or a closed store.
Rule 3: an error that is `certain` says that nothing was stored. After any other error the outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Generic, Self, TypeVar

import structlog

from motorcade.core.errors import StoreFencedError

log = structlog.stdlib.get_logger("motorcade.commit")

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

    @classmethod
    def stored(cls, result: T) -> Self:
        """Return a commit that is done already."""
        commit = cls()
        commit.settle(result)
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

    def follow(self, other: Commit[T]) -> None:
        """Have the outcome of another one."""
        other.then(partial(self._take, other))

    def _take(self, other: Commit[T]) -> None:
        self.result = other.result
        self.finish(other.error)

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


def is_refusal(error: BaseException | None) -> bool:
    """Return True if a publisher hears that its message is refused; False if it should send it again.

    It is refused if certainly nothing was stored and the store does answer. A node that is no longer in charge refuses
    nothing: the one that is may take the message.
    """
    if isinstance(error, StoreFencedError):
        return False
    return bool(getattr(error, "certain", False)) and not getattr(error, "away", False)


def joined(commits: Iterable[Commit[Any]]) -> Commit[None]:
    """Return a commit that is done when all of these are. It fails with the first error, in their order."""
    parts = list(commits)
    whole: Commit[None] = Commit()
    left = len(parts)
    if not left:
        whole.finish()

    def part_done() -> None:
        nonlocal left
        left -= 1
        if not left:
            whole.finish(next((part.error for part in parts if part.error is not None), None))

    for part in parts:
        part.then(part_done)
    return whole


def commit_of(future: asyncio.Future[T]) -> Commit[T]:
    """Return the commit of what a plugin hands out as a future."""
    commit: Commit[T] = Commit()

    def done(ended: asyncio.Future[T]) -> None:
        if ended.cancelled():
            commit.finish(RuntimeError("the write was cancelled"))
        elif (error := ended.exception()) is not None:
            commit.finish(error)
        else:
            commit.settle(ended.result())

    future.add_done_callback(done)
    return commit


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("commit_callback_failed", consequence="what waited for this write may wait for ever")
