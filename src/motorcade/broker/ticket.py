"""A promise that something is stored, and the line in which answers wait for it.

A publisher is told that its message is taken only when it is as safe as the configuration promises. Until then the
connection is not held up: it goes on with the client's next packets, and the answers wait in a line.

    PUBLISH 1 ─▶ ticket ────────(commit)──────▶ PUBACK 1
    PUBLISH 2 ─▶ ticket ─(commit)─▶ waits ────▶ PUBACK 2      answers leave in the order of the packets [MQTT-4.6.0-2]
    PUBLISH 3 ─▶ (nothing to store) waits ────▶ PUBACK 3

Rule 1: one line per session, not per connection: a client that comes back waits for what its old connection has left.
Rule 2: a ticket is done once, and says then whether it failed. Nobody is told twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from motorcade.commit import Commit


class Future(Protocol):
    """What a plugin hands out: `asyncio.Future`, or anything like it."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Ticket:
    """Something that will be stored, or could not be."""

    __slots__ = ("_open", "_then", "error", "known")

    def __init__(self, parts: int = 1) -> None:
        self._open = parts  # parts that are not done yet
        self.known = False  #: of a question: it is in the store
        self.error: BaseException | None = None  #: why it failed; of several reasons the first
        self._then: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def refused(self) -> bool:
        """Return True if the client hears that it failed: certainly nothing was stored, and the store does answer.

        Otherwise the client should send it again.
        """
        return is_refusal(self.error)

    def part(self) -> None:
        """One more part belongs to it."""
        self._open += 1

    def finish(self, error: BaseException | None = None) -> None:
        """One part is done."""
        self.error = self.error or error
        self._open -= 1
        if not self._open:
            then, self._then = self._then, []
            for callback in then:
                callback()

    def after(self, waits: Iterable[Commit[Any] | Future]) -> None:
        """It also takes what these bring."""
        for done in waits:
            self.part()
            if isinstance(done, Commit):
                done.then(partial(self._committed, done))
            else:
                done.add_done_callback(self._ended)

    def _committed(self, commit: Commit[Any]) -> None:
        self.finish(commit.error)

    def _ended(self, future: Future) -> None:
        self.finish(RuntimeError("it was given up") if future.cancelled() else future.exception())

    def then(self, callback: Callable[[], None]) -> None:
        """Call back when it is done; at once if it is."""
        if self.done:
            callback()
        else:
            self._then.append(callback)


def is_refusal(error: BaseException | None) -> bool:
    """Return True if an error refuses a message; False if the client should send it again."""
    return bool(getattr(error, "certain", False)) and not getattr(error, "away", False)


class Line:
    """Continuations of one session that wait for their tickets, first come, first served."""

    __slots__ = ("_waiting", "answers", "octets")

    def __init__(self) -> None:
        self._waiting: deque[tuple[Ticket, Callable[[], None], int, int]] = deque()
        self.answers = 0  #: that wait
        self.octets = 0  #: of the messages they are for

    def join(
        self, ticket: Ticket, go_on: Callable[[], None], answers: int = 1, octets: int = 0, *, first: bool = False
    ) -> None:
        """Call `go_on` when the ticket is done and everybody before has had their turn.

        `first`: for one that has just had its turn, and needs another before those behind it.
        """
        if first:
            self._waiting.appendleft((ticket, go_on, answers, octets))
        else:
            self._waiting.append((ticket, go_on, answers, octets))
        self.answers += answers
        self.octets += octets
        ticket.then(self._move)

    def _move(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0].done:
            _, go_on, answers, octets = waiting.popleft()
            self.answers -= answers
            self.octets -= octets
            go_on()
