"""The acknowledgements of one session that wait for the store: PUBACK after the durable write, in order.

A publisher is answered when its message is as durable as the configuration promises. Until then the connection is not
held up: it goes on with the client's next packets, and the answers wait here.

    PUBLISH 1 ─▶ commit ────────(stored)──────▶ PUBACK 1
    PUBLISH 2 ─▶ commit ─(stored)─▶ waits ────▶ PUBACK 2      answers leave in the order of the packets [MQTT-4.6.0-2]
    PUBLISH 3 ─▶ (nothing to store) waits ────▶ PUBACK 3

An answer may also wait for other members (`relay`): its message is delivered already then (`routed`).

Rule: one queue per session, not per connection: a client that comes back waits for what its old connection has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from motorcade.commit import Commit


class AckQueue:
    """Continuations of one session that wait for their commits, first come, first served."""

    __slots__ = ("_waiting", "answers", "size", "unrouted")

    def __init__(self) -> None:
        self._waiting: deque[tuple[Commit[Any], Callable[[], None], int, int, bool]] = deque()
        self.answers = 0  #: that wait
        self.unrouted = 0  #: of what waits: continuations that have messages to deliver yet
        self.size = 0  #: bytes of the messages they are for

    def join(
        self,
        commit: Commit[Any],
        go_on: Callable[[], None],
        answers: int = 1,
        size: int = 0,
        *,
        first: bool = False,
        routed: bool = False,
    ) -> None:
        """Call `go_on` when the commit is done and all that joined before have been called.

        `first`: for one that has just been called, and needs another commit before those behind it. `routed`: nothing
        is left to do but to answer, so what comes behind may be delivered meanwhile.
        """
        if first:
            self._waiting.appendleft((commit, go_on, answers, size, routed))
        else:
            self._waiting.append((commit, go_on, answers, size, routed))
        self.unrouted += not routed
        self.answers += answers
        self.size += size
        commit.then(self._advance)

    def _advance(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0].done:
            _, go_on, answers, size, routed = waiting.popleft()
            self.unrouted -= not routed
            self.answers -= answers
            self.size -= size
            go_on()
