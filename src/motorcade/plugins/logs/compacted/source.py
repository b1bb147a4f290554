"""The messages of one consumer of a compacted queue: `delivery.reader`, with what is special about these queues.

One instance per filter, that is, per queue and client. What is in flight is taken back when the client disconnects, so
its cursor ends with the connection; only progress stays.

Rule 1: no client gets an old value after a newer one. What it has refused is read again from the store, and nothing
        newer is given between the refusal and that, so a value that was replaced meanwhile is not found any more.
Rule 2: what was sent before a rewind is acknowledged without effect, and what was not sent yet is withdrawn.
Rule 3: what is too old when its turn comes to be sent is withdrawn, and counts as done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.delivery.cursor import Cursor
from motorcade.delivery.progress import ProgressStore
from motorcade.delivery.reader import SHIFT, Reader
from motorcade.extension.compacted import CompactedKind
from motorcade.extension.sources import Ack, Answer, FastFeed, Given, Why
from motorcade.plugins.logs.compacted.options import EcqConfig
from motorcade.plugins.logs.compacted.queue import CompactedQueue, Queues
from motorcade.plugins.logs.compacted.topics import consumed
from motorcade.storage.ports import Store


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that all sources of a node have in common."""

    store: Store
    queues: Queues
    progress: ProgressStore
    now: Callable[[], float]
    counters: Counter[str]
    log: structlog.stdlib.BoundLogger

    @property
    def config(self) -> EcqConfig:
        return self.queues.config


class _Restart:
    __slots__ = ()


RESTART: Final = _Restart()  #: `info`: progress was set; begin again there


class CompactedSource(Reader):
    """One consumer of one queue."""

    queue: CompactedQueue

    def __init__(self, feed: FastFeed, tools: Tools) -> None:
        super().__init__(feed, tools.progress)
        self._tools = tools
        self._attempts: dict[int, int] = {}  # of what was refused
        self._stale = False  # messages of an earlier beginning may wait to be sent
        self._replaced: set[int] = set()  # of what was given and is not done
        self._oldest = 0.0  # time of the oldest message given and not known to be done

    # -- begin and end

    def subscribe(self, subscription: Subscription, why: Why) -> bool:  # noqa: ARG002 - each time the same
        found = consumed(subscription.filter)
        if found is None or (found[0].form is CompactedKind.EXCLUSIVE and found[1] != self.feed.client.client_id):
            return False
        self.filter = subscription.filter
        queue = self.queue = self._tools.queues.open(*found)
        queue.enter(self)
        if self.open(queue.log_key):
            self.ready()
        return True

    def ready(self) -> None:
        if self not in self.queue.consumers or self.log is not None:
            return
        if self.queue.known:
            self._begin()
        else:
            self._tools.queues.look(self.queue)  # it calls `look`

    def look(self) -> None:
        if self.progress.loaded:
            self.ready()

    def restart(self) -> None:
        if self.log is not None:
            self.feed.send(RESTART)

    def _begin(self) -> None:
        """Begin where progress is."""
        progress, queue = self.progress, self.queue
        progress.gather()
        done = progress.number
        if done > queue.tail:  # the store has lost what it had promised to keep: nothing new must be missed
            self._tools.log.warning("ecq_progress_ahead", queue=queue.owner, progress=done, last=queue.tail)
            done = queue.tail
            self.store.rewind(progress, done)
        self.cursor = Cursor()
        self.cursor.begin(done)
        self._replaced.clear()
        self._attempts.clear()
        self._stale = True  # perhaps; `asks` looks
        self.read(queue)

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - there is one
        self.queue.leave_out(self)
        self.halt()
        if why is not Why.UNSUBSCRIBED:
            # What was in flight is taken back. What of it was replaced is not in the queue any more, so it must not
            # hold up progress: it would only bring again what the client has acknowledged.
            self.done(self._replaced)

    def terminate(self) -> None:
        if self._open:
            self.queue.leave_out(self)
            self.halt()
            self.store.remove(self.progress, self.name, self.cursor)
            self.close()

    def info(self, what: object, desired: int) -> Answer:
        if what is RESTART and self.log is not None:
            self._begin()
        return super().info(what, desired)

    # -- what is given

    def replaced(self, numbers: Iterable[int]) -> None:
        """Note what is not in the queue any more."""
        if not self.cursor.clear:
            done, position = self.cursor.done, self.position
            self._replaced.update([number for number in numbers if done < number <= position])

    def giving(self, numbers: Sequence[int], messages: Sequence[Message]) -> None:  # noqa: ARG002 - see Reader
        oldest = messages[0].timestamp
        if self.cursor.clear:
            self._replaced.clear()
            self._oldest = oldest
        else:
            self._oldest = min(self._oldest, oldest)

    def look_up(self, numbers: list[int]) -> None:
        self._tools.queues.spawn(partial(self.queue.look_up, numbers, self), "again")

    @property
    def asks(self) -> bool:
        if self._stale:
            start = self.cursor.start
            self._stale = any(given.tag >> SHIFT != start for given in self.feed.unsent)
        retention = self._tools.config.retention
        return self._stale or (retention > 0 and self._oldest + retention <= self._tools.now())

    def sending(self, given: Given) -> Message | None:
        if given.tag >> SHIFT != self.cursor.start:
            return None
        retention = self._tools.config.retention
        if retention and given.message.timestamp + retention <= self._tools.now():
            return None
        return given.message

    # -- what has become of it

    def judge(self, numbers: list[int], ack: Ack) -> Iterable[int]:
        counters = self._tools.counters
        if ack.dropped:
            # They are passed over: they are too old by now, or this client cannot be sent them.
            counters["too_old" if ack.dropped == "withdrawn" else ack.dropped] += len(numbers)
            if ack.dropped not in ("withdrawn", "expired"):
                for number in numbers:
                    self._tell_passed(number, ack.dropped)
        elif ack.refused:
            counters["refused"] += len(numbers)
            numbers = self._refuse(numbers, ack)
        else:
            counters["acknowledged"] += len(numbers)
        if self._attempts:
            for number in numbers:
                self._attempts.pop(number, None)
        return numbers

    def _refuse(self, numbers: list[int], ack: Ack) -> list[int]:
        """Give them again later; those that were refused too often are returned: they are passed over."""
        config = self._tools.config
        over: list[int] = []
        again: list[int] = []
        for number in numbers:
            attempts = self._attempts[number] = self._attempts.get(number, 0) + 1
            if config.max_attempts and attempts >= config.max_attempts:
                over.append(number)
                self._tools.counters["given_up"] += 1
                self._tell_passed(number, f"refused {attempts} times, at last with 0x{ack.reason:02x}")
            else:
                again.append(number)
        self.give_again(again, config.retry_delay)
        return over

    def _tell_passed(self, number: int, why: str) -> None:
        """Log that a message is passed over: it stays in the queue until a newer value comes; a rewind repeats it."""
        self._tools.log.warning(
            "ecq_message_passed_over", queue=self.queue.owner, client=self.feed.client.client_id, number=number, why=why
        )
