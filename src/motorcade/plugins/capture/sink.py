"""What waits for a target, within bounds, and what publishers hear of it.

    take ─▶ [ pending: max_pending, max_pending_bytes ] ─▶ target ─▶ captured │ failed
      └─ no room: QoS 1 and 2 refused (0x97), QoS 0 dropped

Rule 1: every message that was taken ends once, as captured or as failed, and is counted then.
Rule 2: order in is order out.
Rule 3: an error with `certain` says that the target has nothing of the message and will get nothing: the publisher is
        refused. After any other error nobody knows: the publisher is not answered, and sends it again.
Rule 4: a QoS 2 message that its publisher sends again comes with its old GUID. Of the last `MAX_RECENT` of each rule it
        is known what became of them, so that they are not copied twice. A QoS 1 message that is sent again is a new one
        to the broker, and is copied again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import Final

from motorcade.core.message import Message
from motorcade.storage.ports import StoreError, StoreFullError

MAX_RECENT: Final = 10_000  #: QoS 2 messages per rule that are recognised when they come again

Done = asyncio.Future[None]


class NotCapturedError(StoreError):
    """The target does not take the message; it has nothing of it."""

    certain = True


class Tally:
    """What has become of the messages of one rule, also counted for all rules together."""

    def __init__(self, everywhere: Counter[str]) -> None:
        self._own: Counter[str] = Counter()
        self._everywhere = everywhere

    def add(self, event: str, count: int = 1) -> None:
        self._own[event] += count
        self._everywhere[event] += count

    def __getitem__(self, event: str) -> int:
        return self._own[event]


class Entry:
    """A message that was taken."""

    __slots__ = ("captured", "done", "guid", "message", "octets", "since")

    def __init__(self, message: Message, octets: int, since: float, done: Done | None) -> None:
        self.message: Message | None = message  #: None when it has ended
        self.guid = message.guid if message.qos == 2 else b""
        self.octets = octets
        self.since = since  #: loop time
        self.done = done  #: somebody waits
        self.captured = False

    def fail(self, error: StoreError) -> None:
        """Tell who waits; the message itself may go on."""
        if self.done is not None and not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen: nobody may be left to look at it


class Sink:
    """The way to one target. Subclasses bring messages there, and `finish` each."""

    def __init__(self, tally: Tally, max_pending: int, max_bytes: int) -> None:
        self.max_pending = max_pending
        self.max_bytes = max_bytes
        self.problem = ""  #: what keeps messages from the target now
        self.pending = 0
        self._tally = tally
        self._octets = 0
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._recent: OrderedDict[bytes, Entry] = OrderedDict()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begin to bring messages to the target."""

    def take(self, message: Message) -> Done | None:
        """Copy a message; done when the target has it. None: nobody waits."""
        if message.qos == 2 and (known := self._recent.get(message.guid)) is not None:
            return self._again(known)
        octets = len(message.payload) + len(message.topic)
        if self._closing or self.pending >= self.max_pending:
            return self._no_room(message)
        if self._octets + octets > self.max_bytes and self.pending:  # one that is larger by itself goes alone
            return self._no_room(message)
        entry = Entry(message, octets, self._loop.time(), self._loop.create_future() if message.qos else None)
        self.pending += 1
        self._octets += octets
        self._idle.clear()
        if entry.guid:
            self._recent[entry.guid] = entry
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        self._begin(entry)
        return entry.done

    async def close(self, patience: float) -> None:
        """Take nothing more; bring what waits to the target, for so many seconds, then give it up."""
        self._closing = True
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            pass
        await self._end()

    # -- for subclasses

    def _begin(self, entry: Entry) -> None:
        """Bring it to the target, after all before it."""
        raise NotImplementedError

    async def _end(self) -> None:
        """Give up what is left, and let go of everything."""

    def finish(self, entries: list[Entry], error: StoreError | None = None) -> None:
        """The target has them, or does not want them."""
        self._tally.add("captured" if error is None else "failed", len(entries))
        self.pending -= len(entries)
        for entry in entries:
            self._octets -= entry.octets
            entry.message = None
            if error is None:
                entry.captured = True
                if entry.done is not None and not entry.done.done():
                    entry.done.set_result(None)
            else:
                self._recent.pop(entry.guid, None)
                entry.fail(error)
        if not self.pending:
            self._idle.set()

    # -- inside

    def _again(self, entry: Entry) -> Done:
        """A QoS 2 message that came before."""
        self._tally.add("repeated")
        if entry.done is None or entry.done.done():
            entry.done = self._loop.create_future()
            if entry.captured:
                entry.done.set_result(None)
        return entry.done

    def _no_room(self, message: Message) -> Done | None:
        if not message.qos:
            self._tally.add("dropped")
            return None
        self._tally.add("refused")
        refused: Done = self._loop.create_future()
        why = f": {self.problem}" if self.problem else ""
        refused.set_exception(StoreFullError(f"{self.pending} messages wait to be captured already{why}"))
        refused.exception()  # seen: nobody may be left to look at it
        return refused


class BrokenSink(Sink):
    """The way to a target that cannot be used until its rule, or something on this machine, is changed."""

    def __init__(self, tally: Tally, problem: str) -> None:
        super().__init__(tally, 1, 1)
        self.problem = problem

    def _begin(self, entry: Entry) -> None:
        self.finish([entry], NotCapturedError(self.problem))
