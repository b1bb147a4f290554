"""A bounded queue for work of which only some may run at once, fair by lane.

A lane is an address, or one client that is known there. Lanes take turns, whoever came first within each. When all
places are taken, the longest lane gives up its newest place to a lane that has fewer: one address that asks without end
delays others by one piece of work, and keeps no one out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class FairQueue:
    """Admits `at_once` pieces of work; `max_waiting` more may wait for their turn."""

    def __init__(self, at_once: int, max_waiting: int) -> None:
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._lanes: OrderedDict[str, deque[asyncio.Future[bool]]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    async def enter(self, lane: str) -> bool:
        """Wait for a turn; `leave` ends it. False: there is no place, or another lane has got it."""
        if self.running < self._at_once and not self.waiting:
            self.running += 1
            return True
        if self.waiting >= self._max_waiting and not self._make_room(lane):
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(lane, deque()).append(turn)
        self.waiting += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                if turn.result():
                    self.leave()
            else:
                self._forget(lane, turn)
            raise

    def leave(self) -> None:
        """The work is done: the next lane has its turn."""
        self.running -= 1
        while self.waiting and self.running < self._at_once:
            lane = next(iter(self._lanes))
            turns = self._lanes[lane]
            turn = turns.popleft()
            self.waiting -= 1
            if turns:
                self._lanes.move_to_end(lane)
            else:
                del self._lanes[lane]
            if not turn.done():
                turn.set_result(True)
                self.running += 1

    def close(self) -> None:
        """Turn away all that wait."""
        for turns in self._lanes.values():
            for turn in turns:
                if not turn.done():
                    turn.set_result(False)
        self._lanes.clear()
        self.waiting = 0

    def _make_room(self, lane: str) -> bool:
        """Take the newest place of the longest lane, if that makes the lanes more equal."""
        if not self._lanes:
            return False
        longest = max(self._lanes, key=lambda name: len(self._lanes[name]))
        if len(self._lanes[longest]) <= len(self._lanes.get(lane, ())) + 1:
            return False
        turn = self._lanes[longest].pop()
        self.waiting -= 1
        if not turn.done():
            turn.set_result(False)
        return True

    def _forget(self, lane: str, turn: asyncio.Future[bool]) -> None:
        """A caller that no longer waits gives its place back."""
        turns = self._lanes.get(lane)
        if turns is not None and turn in turns:
            turns.remove(turn)
            self.waiting -= 1
            if not turns:
                del self._lanes[lane]
