"""The reader: a source with a cursor, which reads one log ahead for one subscription of one client.

    loading ──▶ reading ◀──▶ at the tail (costs nothing; what is appended is handed over)
                 │    ▲
                 ▼    │
               refused: waits, then what was refused is looked up and given again, before anything newer

What is common to all logs is here. A feature has a class of its own that knows when to begin (`read`), which log that
is (`Log`), and what becomes of what the client did not take (`judge`).

Rule 1: `position` is the number up to which everything was given. A `Page` that covers it is all that a reader needs.
        If there is none it asks the log for one, or waits at the tail. It keeps no messages.
Rule 2: numbers are given in rising order. The one exception, what the client has refused (`give_again`), is looked up
        in the log, and nothing newer is given between the refusal and that.
Rule 3: tags of messages are `start << 48 | number`. `start` says which beginning of the cursor it was: the
        acknowledgement of a message from before a new beginning does not count.
Rule 4: acknowledgements come in runs, which may be short. Giving as few messages for each would cost more than the
        messages, so a reader waits until half of what it may give is free, or until the end of the turn.
Rule 5: a reader that is not at the tail has something coming that makes it go on: a page, a timer, room, or `MORE`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from motorcade.core.message import Message
from motorcade.delivery.cursor import Cursor
from motorcade.delivery.progress import LogKey, Progress, ProgressStore
from motorcade.extension.sources import Ack, Answer, Delayed, FastFeed, FastSource, Given

SHIFT: Final = 48
NUMBERS: Final = (1 << SHIFT) - 1
RETRY: Final = 1.0  #: seconds until a page that could not be read is tried again


class Page:
    """A stretch of a log without holes: all that is there above `after` and up to `upto`."""

    __slots__ = ("after", "messages", "numbers", "start", "upto")

    def __init__(self, after: int, upto: int, numbers: list[int], messages: list[Message], start: int = 0) -> None:
        self.after = after
        self.upto = upto
        self.numbers = numbers
        self.messages = messages
        self.start = start  #: only for the reader that began so; 0: for all


class FoundAgain(msgspec.Struct, frozen=True, gc=False):
    """The messages that are left of those that were refused."""

    start: int
    numbers: list[int]  #: that were looked up
    messages: dict[int, Message] | None  #: those that are there; None: looking them up has failed


class Log(Protocol):
    """A log that readers read."""

    @property
    def tail(self) -> int:
        """Return the last number that is known to be stored."""

    def find(self, position: int) -> Page | None:
        """Return the page that covers a position, if it is in memory."""

    def load(self, position: int, reader: Reader, wanted: int) -> None:
        """Read a page for a reader: `more` or `broken` follows."""

    def wait(self, reader: Reader) -> None:
        """Tell a reader when something is appended: `more` follows."""

    def passed(self, page: Page) -> None:
        """Note that a reader has been through a page."""

    def leave(self, reader: Reader) -> None:
        """Tell a reader nothing more."""


class _Signal:
    __slots__ = ()


MORE: Final = _Signal()  #: `info`: there may be something; look
READY: Final = _Signal()  #: `info`: progress is loaded
AGAIN: Final = _Signal()  #: `info`: give again what was refused


class Reader(FastSource):
    """One subscription of one client."""

    def __init__(self, feed: FastFeed, store: ProgressStore) -> None:
        super().__init__(feed)
        self.store = store
        self.filter = ""
        self.name = ""  #: of its cursor, among those of the same client
        self.progress: Progress
        self.cursor = Cursor()
        self.log: Log | None = None  #: None: it does not read now
        self.position = 0
        self._open = False  # its progress is
        self._tag = 0  # start << SHIFT
        self._expected = False  # `MORE` or a page will come
        self._peak = 1  # the most that could be given at once
        self._skip: Collection[int] = ()
        self._refused: dict[int, None] = {}
        self._delay = RETRY  # seconds until what was refused is given again
        self._due = False  # that is so now
        self._finding = False  # what was refused is being looked up
        self._retry: Delayed | None = None
        self._again: Delayed | None = None

    # -- for the feature

    def open(self, log: LogKey) -> bool:
        """Open the progress of this client. Return True if it is loaded, else `ready` is called when it is."""
        self.progress = self.store.open(log, self.feed.client.client_id)
        self._open = True
        if not self.progress.loaded:
            self.store.load_soon(self.progress, self._loaded)
        return self.progress.loaded

    def _loaded(self) -> None:
        if self._open:
            self.feed.send(READY)

    def ready(self) -> None:
        """Begin: progress is loaded."""
        raise NotImplementedError

    def read(self, log: Log, skip: Collection[int] = ()) -> None:
        """Read on after the cursor, without what is in `skip`. What is under way for an earlier beginning is void."""
        self.log = log
        self.progress.cursors[self.name] = self.cursor
        self.position = self.cursor.done
        self._tag = self.cursor.start << SHIFT
        self._skip = skip
        self._finding = self._due = False
        self._refused.clear()
        self._cancel()
        self.more()

    def halt(self) -> None:
        """Read no more."""
        log, self.log = self.log, None
        if log is not None:
            log.leave(self)
        self._expected = False
        self._cancel()

    def close(self) -> None:
        """Give the progress back: what has changed is written now."""
        if self._open:
            self._open = False
            self.store.close(self.progress)

    def _cancel(self) -> None:
        for timer in (self._retry, self._again):
            if timer is not None:
                timer.cancel()
        self._retry = self._again = None

    @property
    def attached(self) -> bool:
        """Return True while its cursor counts."""
        return self._open and self.progress.cursors.get(self.name) is self.cursor

    def in_flight(self) -> set[int]:
        """Return the numbers that this source has given since its cursor began, and that are not acknowledged."""
        start = self.cursor.start
        given = [*self.feed.inflight, *self.feed.unsent]
        return {each.tag & NUMBERS for each in given if each.tag >> SHIFT == start}

    def done(self, numbers: Iterable[int]) -> None:
        """Count numbers as acknowledged."""
        if self.cursor.acknowledge(numbers) and self.attached:
            self.store.changed(self.progress)

    def give_again(self, numbers: Iterable[int], delay: float) -> None:
        """Give again, after a while, what the client has refused (rule 2)."""
        self._refused.update(dict.fromkeys(numbers))
        self._delay = delay
        self._wait()

    def _wait(self) -> None:
        if self._refused and self._again is None and self.log is not None:
            self._again = self.feed.send_later(self._delay, AGAIN)

    def look_up(self, numbers: list[int]) -> None:
        """Read messages that were refused: `found` follows."""
        raise NotImplementedError

    def judge(self, numbers: list[int], ack: Ack) -> Iterable[int]:  # noqa: ARG002 - for features
        """Return which of the numbers that were acknowledged, refused or dropped are done with."""
        return numbers

    def giving(self, numbers: Sequence[int], messages: Sequence[Message]) -> None:
        """Note that these go out now."""

    # -- for the log

    def more(self, page: Page | None = None) -> None:
        """Note that there may be something; in this page, if there is one. Does nothing but send."""
        self._expected = True
        self.feed.send(MORE if page is None else page)

    def broken(self, start: int = 0) -> None:
        """Note that a page could not be read. It is tried again, as long as it takes."""
        if self.log is not None and start in (0, self.cursor.start):
            self._retry = self.feed.send_later(RETRY, MORE)

    def found(self, found: FoundAgain) -> None:
        """Take the messages that are left of those that were refused."""
        self.feed.send(found)

    # -- as a source

    def info(self, what: object, desired: int) -> Answer:
        page: Page | None = None
        given: list[Given] = []
        if isinstance(what, Page):
            if what.start not in (0, self.cursor.start):
                return None
            self._expected = False
            page = what
        elif what is MORE:
            self._expected = False
        elif what is READY:
            if self._open:
                self.ready()
        elif what is AGAIN:
            self._again = None
            self._due = True
        elif isinstance(what, FoundAgain):
            given = self._take_found(what)
        return self._fill(desired, page, given)

    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        start = self.cursor.start
        numbers = [each.tag & NUMBERS for each in given if each.tag >> SHIFT == start]
        self.done(self.judge(numbers, ack))
        log, room = self.log, ack.desired
        if log is None:
            return None
        if self._expected:
            self._catch_up(log)
            return None
        if self._refused or room * 2 >= self._peak:
            return self._fill(room)
        if room:
            self.more()
        return None

    def _fill(self, room: int, page: Page | None = None, given: list[Given] | None = None) -> list[Given] | None:
        """Give up to so many messages, as far as they are in memory; ask for what is not there yet."""
        self._peak = max(self._peak, room)
        given = [] if given is None else given
        log = self.log
        if log is None:
            return given or None
        if self._refused:
            self._find(room - len(given))
            return given or None
        while not self._expected:
            position = self.position
            if position >= log.tail:
                self._expected = True
                self._catch_up(log)
                log.wait(self)
                break
            if len(given) >= room:
                break
            if page is None or not page.after <= position < page.upto:
                page = log.find(position)
            if page is None:
                self._expected = True
                log.load(position, self, room - len(given))
                break
            self._take(page, room - len(given), given)
            if self.position >= page.upto:
                log.passed(page)
        return given or None

    def _take(self, page: Page, room: int, given: list[Given]) -> None:
        """Go on in a page."""
        at = bisect_right(page.numbers, self.position)
        numbers, messages = page.numbers[at : at + room], page.messages[at : at + room]
        self.position = page.upto if at + room >= len(page.numbers) else numbers[-1]
        if self._skip:
            numbers, messages = self._not_skipped(numbers, messages)
        if not numbers:
            return
        self.giving(numbers, messages)
        self.cursor.give(numbers)
        filter_, tag = self.filter, self._tag
        given += [Given(message, filter_, tag | number) for number, message in zip(numbers, messages, strict=True)]

    def _not_skipped(self, numbers: list[int], messages: list[Message]) -> tuple[list[int], list[Message]]:
        """Leave out what is in flight, or was acknowledged before the client went away."""
        skip = self._skip
        left = [(number, message) for number, message in zip(numbers, messages, strict=True) if number not in skip]
        self._skip = {number for number in skip if number > self.position}
        return [number for number, _ in left], [message for _, message in left]

    def _catch_up(self, log: Log) -> None:
        """Finish what was passed and never given (trimmed, replaced, expired), at the tail with nothing in flight."""
        if self.position >= log.tail and self.cursor.catch_up(self.position) and self.attached:
            self.store.changed(self.progress)

    # -- refused

    def _find(self, room: int) -> None:
        if self._due and not self._finding and room > 0:
            self._finding = True
            self.look_up(sorted(self._refused)[:room])

    def _take_found(self, found: FoundAgain) -> list[Given]:
        """Give what was refused again, as far as it is still there; what is not is done with."""
        if found.start != self.cursor.start or self.log is None:
            return []
        self._finding = self._due = False
        given: list[Given] = []
        if found.messages is not None:
            for number in found.numbers:
                self._refused.pop(number, None)
            self.done([number for number in found.numbers if number not in found.messages])
            numbers, messages = list(found.messages), list(found.messages.values())
            if numbers:
                self.giving(numbers, messages)
                given = [Given(found.messages[number], self.filter, self._tag | number) for number in numbers]
        self._wait()
        return given
