"""The pending table: every message that a leader has read and not finished. Pure: time is an argument.

    add ─▶ [ open: read, not done ] ─ taken by a worker ─▶ acknowledged ─▶ [ done: to be told to Redis ]
                    │      ▲
                    │      └── waiting: to be sent when a worker has credit  ◀── later: when its pause is over
                    └─ too many deliveries, too large ─▶ [ hopeless: to be put into the dead letters ]

Rule 1: a message is in `open` from when it was read until it is done or a dead letter, exactly once. A worker that
        acknowledges a message late, when another one has it already, has still done it.
Rule 2: a delivery counts when it has failed: the worker was silent, was lost, or has refused the message. A leader
        that was lost and a worker that says that it could not write are no fault of the message; nor is, as far as
        is known, the loss of a worker that has never acknowledged anything.
Rule 3: nothing here is per message unless something went wrong: lists, sets and dictionaries are changed a batch at a
        time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

Kept = tuple[bytes, bytes]  #: entry of the intake, message


class History:
    """Deliveries of a message that was not done the first time."""

    __slots__ = ("attempts", "deliveries", "failures", "reason", "worker")

    def __init__(self, deliveries: int = 0) -> None:
        self.deliveries = deliveries  #: that failed, and count
        self.failures = deliveries  #: all that may have been the message's fault, whether they count or not
        self.attempts = deliveries  #: all
        self.reason = ""  #: of the last one
        self.worker = ""  #: that had it last


class Done(NamedTuple):
    """Finished messages that Redis has to be told of."""

    ids: list[bytes]
    entries: list[bytes]
    several: list[bytes]  #: those of the ids that have a history


class PendingTable:
    """All messages of one leader that are not finished."""

    def __init__(self, max_deliveries: int, retry_pause: float, longest_pause: float) -> None:
        self.open: dict[bytes, Kept] = {}
        self.histories: dict[bytes, History] = {}
        self.waiting: deque[bytes] = deque()
        self.hopeless: deque[bytes] = deque()
        self.later: list[tuple[float, bytes]] = []
        self.acknowledged = 0
        self.redistributed = 0
        self._max_deliveries = max_deliveries
        self._retry_pause = retry_pause
        self._longest_pause = longest_pause
        self._done_ids: list[bytes] = []
        self._done_entries: list[bytes] = []
        self._telling: list[bytes] = []

    @property
    def done(self) -> int:
        """Return how many messages are done that Redis may not know of yet."""
        return len(self._done_ids) + len(self._telling)

    def untold(self) -> set[bytes]:
        """Return the ids that are done and that Redis may not know of yet."""
        return {*self._done_ids, *self._telling}

    @property
    def unsent(self) -> int:
        """Return how many messages no worker has."""
        return len(self.waiting) + len(self.later) + len(self.hopeless)

    def add(self, ids: Sequence[bytes], entries: Sequence[bytes], messages: Sequence[bytes]) -> None:
        self.open.update(zip(ids, zip(entries, messages, strict=True), strict=True))

    def messages(self, ids: Iterable[bytes]) -> list[bytes]:
        table = self.open
        return [table[id_][1] for id_ in ids]

    def acknowledge(self, ids: list[bytes]) -> list[Kept]:
        """Finish messages and return their rows. Those that were finished before are skipped."""
        kept = list(map(self.open.pop, ids, repeat(None)))
        if None in kept:
            pairs = [(id_, one) for id_, one in zip(ids, kept, strict=True) if one is not None]
            ids, found = [id_ for id_, _ in pairs], [one for _, one in pairs]
        else:
            found = kept  # type: ignore[assignment] # there is no None in it
        self._done_ids += ids
        self._done_entries += [entry for entry, _ in found]
        self.acknowledged += len(ids)
        return found

    def failed(
        self,
        ids: Iterable[bytes],
        worker: str,
        reason: str,
        now: float,
        *,
        counted: bool,
        pause: bool,
        suspect: bool = True,
    ) -> None:
        """Take messages back from a worker: retry them, or declare them hopeless."""
        for id_ in ids:
            if id_ not in self.open:
                continue
            history = self.histories.get(id_)
            if history is None:
                history = self.histories[id_] = History()
            history.worker, history.reason = worker, reason
            history.deliveries += counted
            history.failures += suspect
            history.attempts += 1
            self.redistributed += 1
            if history.deliveries >= self._max_deliveries:
                self.hopeless.append(id_)
            elif pause:
                length = self._retry_pause * 2.0 ** min(history.attempts - 1, 30)
                heapq.heappush(self.later, (now + min(length, self._longest_pause), id_))
            else:
                self.waiting.append(id_)

    def give_up(self, id_: bytes, reason: str) -> None:
        """Declare a message hopeless that no worker can be sent."""
        history = self.histories.setdefault(id_, History())
        history.reason = reason
        self.hopeless.append(id_)

    def remember(self, id_: bytes, deliveries: int) -> None:
        """Set how often an earlier leader has delivered a message."""
        history = self.histories[id_] = History(deliveries)
        history.reason = "an earlier leader has tried"
        if deliveries >= self._max_deliveries:
            self.hopeless.append(id_)

    def wake(self, now: float) -> None:
        """Move what has paused long enough to what waits."""
        while self.later and self.later[0][0] <= now:
            self.waiting.append(heapq.heappop(self.later)[1])

    def next_waiting(self) -> bytes | None:
        """Return the message that has waited longest; it is not taken yet. Drop those done meanwhile."""
        while self.waiting:
            if self.waiting[0] in self.open:
                return self.waiting[0]
            self.waiting.popleft()
        return None

    def next_hopeless(self) -> bytes | None:
        """Return the first message that is to become a dead letter; it is not taken yet."""
        while self.hopeless:
            if self.hopeless[0] in self.open:
                return self.hopeless[0]
            self.hopeless.popleft()
        return None

    def dead_letter(self, id_: bytes) -> None:
        """Finish a message that is stored among the dead letters."""
        kept = self.open.pop(id_, None)
        if kept is not None:
            self._done_ids.append(id_)
            self._done_entries.append(kept[0])

    def take_done(self, most: int) -> Done:
        """Return up to `most` finished messages that Redis was not told of."""
        ids, entries = self._done_ids[:most], self._done_entries[:most]
        del self._done_ids[:most], self._done_entries[:most]
        self._telling = ids
        several = [id_ for id_ in ids if id_ in self.histories] if self.histories else []
        return Done(ids, entries, several)

    def told(self, done: Done) -> None:
        """Forget what Redis has been told."""
        self._telling = []
        for id_ in done.several:
            self.histories.pop(id_, None)
