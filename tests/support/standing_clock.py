"""An event loop over real sockets whose clock stands until it is turned.

    await turn(3.0)                          three seconds pass, with everything that happens in them
    await until(lambda: …, "what")           the clock goes from timer to timer until something holds
    loop.servers_answer = False              from now on nobody is waited for: a server was paused

What can happen without time happens before the clock moves: callbacks, bytes between sockets of this process, replies
of Redis servers. So leases, time-outs and pauses cost nothing, and a machine that is busy makes nobody late. A server
has a clock of its own, which this one knows nothing of.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

from motorcade.redis.resp import Argument, RedisConnection

#: Seconds of the loop's clock after which `until` gives up, and of real time between two looks at other threads.
PATIENCE = 600.0
LOOK = 0.005

#: Commands that a server answers when there is something to tell, which may be never.
BLOCKING = ("XREAD",)


class StandingLoop(asyncio.SelectorEventLoop):
    """Its time is a number."""

    def __init__(self) -> None:
        self.servers_answer = True
        self._now = 1000.0
        self._unanswered = 0  #: commands to servers
        self._waiting: list[asyncio.Future[None]] = []  #: those who want to know when all is quiet
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def quiet(self) -> asyncio.Future[None]:
        """Done when nothing more happens unless time passes, or another thread does something."""
        self._waiting.append(self.create_future())
        return self._waiting[-1]

    def tell_quiet(self) -> bool:
        """Nothing is ready and no socket has anything: whether anybody wanted to know."""
        if not self._waiting or (self._unanswered and self.servers_answer):
            return False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)
        return True

    def next_timer(self) -> float | None:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        return min((timer.when() for timer in timers if not timer.cancelled()), default=None)

    def move_to(self, when: float) -> None:
        self._now = max(self._now, when)

    def heard(self, words: tuple[Argument, ...]) -> None:
        """What was said to a server; for tests that want to know."""

    def asked(self, words: tuple[Argument, ...], reply: asyncio.Future[Any]) -> None:
        """A command is on its way to a server."""
        self.heard(words)
        if words[0] not in BLOCKING:
            self._unanswered += 1
            reply.add_done_callback(self._answered)

    def _answered(self, _reply: asyncio.Future[Any]) -> None:
        self._unanswered -= 1


class _Selector(selectors.DefaultSelector):
    """Waits in real time only for servers and threads."""

    def __init__(self, loop: StandingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0 or self._loop.tell_quiet():
            return events
        return super().select(LOOK)


def count_commands(patch: Callable[[object, str, object], None]) -> None:
    """Let loops know what servers have not answered; `patch` is `monkeypatch.setattr`."""
    call = RedisConnection.call

    def counted(connection: RedisConnection, *words: Argument) -> asyncio.Future[Any]:
        reply = call(connection, *words)
        loop = reply.get_loop()
        if isinstance(loop, StandingLoop):
            loop.asked(words, reply)
        return reply

    patch(RedisConnection, "call", counted)


def clock() -> StandingLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StandingLoop)
    return loop


async def turn(seconds: float) -> None:
    """Let time pass."""
    loop = clock()
    end = loop.time() + seconds
    await loop.quiet()
    while (when := loop.next_timer()) is not None and when <= end:
        loop.move_to(when)
        await loop.quiet()
    loop.move_to(end)
    await loop.quiet()


async def until(
    condition: Callable[[], object], what: str, *, within: float = PATIENCE, standing: bool = False
) -> None:
    """Let as much time pass as it takes; none if the clock is `standing`, since another thread has to do something."""
    loop, end = clock(), time.monotonic() + PATIENCE
    last = loop.time() + within
    await loop.quiet()
    while not condition():
        when = loop.next_timer()
        if standing or when is None:
            assert time.monotonic() < end, f"not within {PATIENCE:g} s of real time: {what}"
            await asyncio.to_thread(time.sleep, LOOK)
        else:
            assert when <= last, f"not within {within:g} s: {what}"
            loop.move_to(when)
        await loop.quiet()
