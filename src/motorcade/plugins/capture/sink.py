"""Messages on their way to one target, within bounds, and the answers to their publishers.

    take ─▶ [ pending: max_pending, max_pending_bytes ] ─▶ target ─▶ captured │ failed
      └─ no room: QoS 1 and 2 refused (0x97), QoS 0 dropped

Rule 1: every message that was taken ends once, as captured or as failed, and is counted then.
Rule 2: messages reach the target in the order in which they were taken.
Rule 3: an error that is `certain` says that the target has nothing of the message and will get nothing: the publisher
        is refused. After any other error the outcome is unknown: the publisher is not answered, and sends it again.
Rule 4: a QoS 2 message that its publisher sends again comes with its old GUID. The last `MAX_RECENT` of each rule are
        recognised, and not copied twice. A QoS 1 message that is sent again is a new one to the broker, and is copied
        again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import Final

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.plugins.capture.options import RuleOptions
from motorcade.storage.ports import StoreError, StoreFullError

MAX_RECENT: Final = 10_000  #: QoS 2 messages per rule that are recognised when they come again


class NotCapturedError(StoreError):
    """The target does not take the message; it has nothing of it."""

    certain = True


class RuleCounts:
    """Count the messages of one rule by outcome, and those of all rules together."""

    def __init__(self, total: Counter[str]) -> None:
        self._own: Counter[str] = Counter()
        self._total = total

    def add(self, event: str, count: int = 1) -> None:
        self._own[event] += count
        self._total[event] += count

    def __getitem__(self, event: str) -> int:
        return self._own[event]


class CapturedMessage:
    """A message that was taken."""

    __slots__ = ("captured", "commit", "guid", "message", "since", "size_bytes")

    def __init__(self, message: Message, size_bytes: int, since: float) -> None:
        self.message: Message | None = message  #: None when it has ended
        self.guid = message.guid if message.qos == 2 else b""
        self.size_bytes = size_bytes
        self.since = since  #: loop time
        self.commit: Commit[None] | None = Commit() if message.qos else None  #: the answer to the publisher
        self.captured = False

    def answer(self, error: StoreError | None) -> None:
        """Answer the publisher, once; the message itself may go on."""
        if self.commit is not None and not self.commit.done:
            self.commit.finish(error)


class Sink:
    """The way to one target. Subclasses bring messages there, and `finish` each."""

    def __init__(self, options: RuleOptions, counts: RuleCounts) -> None:
        self.counts = counts
        self.problem = ""  #: what keeps messages from the target now
        self.pending = 0
        self._pending_bytes = 0
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._recent: OrderedDict[bytes, CapturedMessage] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self.tune(options)

    def tune(self, options: RuleOptions) -> None:
        """Take other bounds for messages to come."""
        self._max_pending = options.max_pending
        self._max_pending_bytes = options.max_pending_bytes

    def start(self) -> None:
        """Begin to bring messages to the target."""

    def take(self, message: Message) -> Commit[None] | None:
        """Copy a message. The commit is done when the target has it; None: the publisher does not wait."""
        if message.qos == 2 and (known := self._recent.get(message.guid)) is not None:
            return self._repeated(known)
        size = len(message.payload) + len(message.topic)
        # A message that is larger than the bound by itself goes alone.
        crowded = self.pending and self._pending_bytes + size > self._max_pending_bytes
        if self._closing or self.pending >= self._max_pending or crowded:
            return self._no_room(message)
        copy = CapturedMessage(message, size, self._loop.time())
        self.pending += 1
        self._pending_bytes += size
        self._idle.clear()
        if copy.guid:
            self._recent[copy.guid] = copy
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        self._begin(copy)
        return copy.commit

    async def close(self, patience: float) -> None:
        """Take nothing more; bring what is pending to the target for so many seconds, then give it up."""
        self._closing = True
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            pass
        await self._end()

    # -- for subclasses

    def _begin(self, copy: CapturedMessage) -> None:
        """Bring it to the target, after all before it."""
        raise NotImplementedError

    async def _end(self) -> None:
        """Give up what is left, and release everything."""

    def finish(self, copies: list[CapturedMessage], error: StoreError | None = None) -> None:
        """End messages: the target has them, or they have failed."""
        self.counts.add("captured" if error is None else "failed", len(copies))
        self.pending -= len(copies)
        for copy in copies:
            self._pending_bytes -= copy.size_bytes
            copy.message = None
            copy.captured = error is None
            if error is not None:
                self._recent.pop(copy.guid, None)
            copy.answer(error)
        if not self.pending:
            self._idle.set()

    # -- inside

    def _repeated(self, copy: CapturedMessage) -> Commit[None]:
        """Answer a QoS 2 message that is known already."""
        self.counts.add("repeated")
        if copy.captured:
            return Commit.stored(None)
        if copy.commit is None or copy.commit.done:  # its first answer was that the outcome is unknown
            copy.commit = Commit()
        return copy.commit

    def _no_room(self, message: Message) -> Commit[None] | None:
        if not message.qos:
            self.counts.add("dropped")
            return None
        self.counts.add("refused")
        why = f": {self.problem}" if self.problem else ""
        return Commit.failed(StoreFullError(f"{self.pending} messages wait to be captured already{why}"))


class BrokenSink(Sink):
    """The way to a target that cannot be used until its rule, or something on this machine, is changed."""

    def __init__(self, options: RuleOptions, counts: RuleCounts, problem: str) -> None:
        super().__init__(options, counts)
        self.problem = problem

    def _begin(self, copy: CapturedMessage) -> None:
        self.finish([copy], NotCapturedError(self.problem))
