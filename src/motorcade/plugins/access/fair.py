"""A bounded queue for work of which only some may run at once, fair by flow.

A flow is an address, or one client that is known there. Flows take turns, oldest request first within each. When all
places are taken, the longest flow gives up its newest place to a flow that has fewer: one address that asks without end
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
        self._flows: OrderedDict[str, deque[asyncio.Future[bool]]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    async def enter(self, flow: str) -> bool:
        """Wait for a turn; `leave` ends it. False: there is no place, or another flow has got it."""
        if self.running < self._at_once and not self.waiting:
            self.running += 1
            return True
        if self.waiting >= self._max_waiting and not self._make_room(flow):
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flows.setdefault(flow, deque()).append(turn)
        self.waiting += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                if turn.result():
                    self.leave()
            else:
                self._forget(flow, turn)
            raise

    def leave(self) -> None:
        """Leave when the work is done: the next flow has its turn."""
        self.running -= 1
        while self.waiting and self.running < self._at_once:
            flow = next(iter(self._flows))
            turns = self._flows[flow]
            turn = turns.popleft()
            self.waiting -= 1
            if turns:
                self._flows.move_to_end(flow)
            else:
                del self._flows[flow]
            if not turn.done():
                turn.set_result(True)
                self.running += 1

    def close(self) -> None:
        """Turn away all that wait."""
        for turns in self._flows.values():
            for turn in turns:
                if not turn.done():
                    turn.set_result(False)
        self._flows.clear()
        self.waiting = 0

    def _make_room(self, flow: str) -> bool:
        """Take the newest place of the longest flow, if that makes the flows more equal."""
        if not self._flows:
            return False
        longest = max(self._flows, key=lambda name: len(self._flows[name]))
        if len(self._flows[longest]) <= len(self._flows.get(flow, ())) + 1:
            return False
        turn = self._flows[longest].pop()
        self.waiting -= 1
        if not turn.done():
            turn.set_result(False)
        return True

    def _forget(self, flow: str, turn: asyncio.Future[bool]) -> None:
        """Give back the place of a caller that no longer waits."""
        turns = self._flows.get(flow)
        if turns is not None and turn in turns:
            turns.remove(turn)
            self.waiting -= 1
            if not turns:
                del self._flows[flow]
