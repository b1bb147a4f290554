"""A client's subscription to a stream, as a source.

    not declared ──▶ beginning ──▶ reading ◀──▶ at the tail
         ▲            (a time must    │ ▲            (costs nothing)
         │             be looked up)  ▼ │
         └───────── deleted       no room, or a page is being read

One instance per filter: each subscription has a place of its own, so nothing has to be sorted out between them. The
place is `cursor`, the offset after which the next record is looked for. What comes next is taken from the stream's
pages (`pages`), which all readers share; when there is none, one is read, and the reader is told (`more`).

Acknowledgements come in runs, which may be short. Giving as few messages for each would cost more than the messages, so
the reader waits until half of what it may give is free, or until the end of the turn of the event loop, whichever comes
first.

Tags of messages are `start << 48 | offset`. `start` says which beginning of which reader it was, so that the
acknowledgement of a message from before a new beginning is not taken for one of the same offset from after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, Protocol

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import RECREATE, Ack, Answer, Delayed, Feed, Given, Source, Why
from motorcade.plugins.streams.pages import Cache, Page
from motorcade.plugins.streams.position import EARLIEST, LATEST, Origin, Wish, read_wish
from motorcade.plugins.streams.progress import Ledger, Mark
from motorcade.plugins.streams.stream import Stream

SHIFT: Final = 48
OFFSETS: Final = (1 << SHIFT) - 1
RETRY: Final = 1.0  #: seconds until a page that could not be read is tried again
LONGEST: Final = 3600.0  #: seconds; a moment farther away is waited for in steps

_starts: Final = count(1)  #: unique in the process; nothing is ever compared with those of another one


class Place(Protocol):
    """Where streams are found: the service."""

    ledger: Ledger
    cache: Cache

    def stream(self, name: str) -> Stream | None: ...

    def attend(self, name: str, reader: StreamSource) -> None:
        """Call `declared` and `deleted` of a reader."""

    def leave(self, name: str, reader: StreamSource) -> None: ...

    def find_time(self, stream: Stream, time: float, found: Callable[[int | None], None]) -> None:
        """Look a time up, and say after which offset it begins; None if that fails."""

    def now(self) -> float: ...

    def count(self, event: str, times: int = 1) -> None: ...


class _More:
    __slots__ = ()


class _Deleted:
    __slots__ = ()


class _Begin:
    __slots__ = ()


MORE: Final = _More()  #: `info`: there may be something; look
DELETED: Final = _Deleted()  #: `info`: the stream was deleted; also for the instance that follows
BEGIN: Final = _Begin()  #: `info`: look up the time at which to begin


class StreamSource(Source):
    """One subscription of one client."""

    def __init__(self, feed: Feed, place: Place) -> None:
        super().__init__(feed)
        self._place = place
        self._stream: Stream | None = None  # none: not declared, or this has ended
        self._mark: Mark | None = None
        self._wish: Wish | None = None
        self._filter = ""
        self._cursor = 0
        self._tag = 0  # start << SHIFT
        self._beginning = False  # a time is being looked up
        self._expected = False  # `MORE`, or a page, will come
        self._behind = False  # counted in the cache
        self._peak = 1  # the most that could be given at once
        self._skip: set[int] = set()
        self._timer: Delayed | None = None

    # -- begin and end

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        wish = self._wish = read_wish(subscription)  # checked in SUBSCRIBE; else this raises, which is counted
        self._filter = subscription.filter
        client = self.feed.client.client_id
        mark = self._place.ledger.find(client, wish.name, wish.written)
        if mark is None or why in {Why.NEW, Why.AGAIN}:
            mark = self._new_mark(wish, why)
        self._mark = mark
        self._place.attend(wish.name, self)
        stream = self._place.stream(wish.name)
        if stream is not None:
            self.declared(stream)
        return True

    def _new_mark(self, wish: Wish, why: Why) -> Mark:
        """Begin where the client says now, else where it was, else where it has said once."""
        ledger, client = self._place.ledger, self.feed.client.client_id
        mark = ledger.new(client, wish.name, wish.written)
        said_now = why in {Why.NEW, Why.AGAIN} and wish.position is not None
        progress = None if said_now else ledger.committed(client, wish.name)
        if self.feed.kept is DELETED:
            self.feed.kept = None
            mark.position = EARLIEST
        elif progress is not None:
            mark.done, mark.ahead = progress.offset, progress.ahead
        elif why is not Why.RESUMED:
            mark.position = wish.position or LATEST
        else:
            # Nothing is committed: the stream was deleted and made again meanwhile, or it was too long ago, or a crash
            # came first. A time means the same in all cases, else the oldest record misses nothing.
            by_time = wish.position is not None and wish.position.origin is Origin.TIME
            mark.position = wish.position if by_time else EARLIEST
        return mark

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - there is one
        mark = self._mark
        self._detach()
        if self._wish is not None:
            self._place.leave(self._wish.name, self)
        if mark is None:
            return
        self._place.ledger.leave(mark)
        if why is Why.UNSUBSCRIBED and self.feed.inflight:
            return  # what is in flight may still be acknowledged, which counts; `terminate` comes after it
        self._mark = None
        if why in {Why.UNSUBSCRIBED, Why.ENDED}:
            self._place.ledger.forget(mark, ended=why is Why.ENDED)

    @property
    def mark(self) -> Mark | None:
        """Its place, while it reads."""
        return self._mark

    def _inflight(self, mark: Mark) -> set[int]:
        """What this source has given, and what is not acknowledged yet."""
        tag = mark.start << SHIFT
        given = [*self.feed.inflight, *self.feed.unsent]
        return {each.tag - tag for each in given if each.tag >> SHIFT == mark.start}

    def terminate(self) -> None:
        self._detach()
        mark, self._mark = self._mark, None
        if mark is not None:
            self._place.ledger.forget(mark)

    def declared(self, stream: Stream) -> None:
        """There is a stream of this name now."""
        mark = self._mark
        if mark is None or mark.gone:
            return  # ended, or of a stream that was deleted: the next instance reads this one
        self._stream = stream
        stream.join(self)
        position = mark.position
        if position is None:
            self._resume(mark, stream)
        elif position.origin is Origin.TIME:
            self._begin_at(position.value)
        else:
            after = {Origin.EARLIEST: 0, Origin.LATEST: stream.tail}.get(position.origin, int(position.value) - 1)
            self._begin(mark, after)

    def deleted(self) -> None:
        """The stream is gone, and with it all that was known of this reader.

        What was given and not sent must go too: that is what a new instance is for.
        """
        self._detach()
        if self._mark is not None and self._mark.gone:
            self.feed.send(DELETED)

    def _detach(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave(self)
        self._at_tail()
        self._beginning = self._expected = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_at(self, time: float) -> None:
        """Begin with the first record of a time, or later. In the future: when it has come."""
        self._beginning = True
        stream = self._stream
        assert stream is not None  # noqa: S101 - called only with one
        wait = time - self._place.now()
        if wait > 0:
            self._timer = self.feed.send_later(min(wait, LONGEST), BEGIN)
        else:
            self._place.find_time(stream, time, lambda after: self._found(stream, after))

    def _found(self, stream: Stream, after: int | None) -> None:
        if self._stream is not stream or self._mark is None or not self._beginning:
            return  # ended meanwhile
        if after is None:
            self._timer = self.feed.send_later(RETRY, BEGIN)
            return
        self._beginning = False
        self._begin(self._mark, after)

    def _begin(self, mark: Mark, after: int) -> None:
        mark.begin(next(_starts), after, ahead=self._stream is not None and after > self._stream.tail)
        self._place.ledger.begun(mark)
        self._go_on(mark, set())

    def _resume(self, mark: Mark, stream: Stream) -> None:
        if not mark.start:  # of a process before this one
            mark.begin(next(_starts), mark.done if mark.ahead else min(mark.done, stream.tail), ahead=mark.ahead)
            self._place.ledger.begun(mark)
        self._go_on(mark, mark.resume(self._inflight(mark)))

    def _go_on(self, mark: Mark, skip: set[int]) -> None:
        self._cursor = mark.done
        self._tag = mark.start << SHIFT
        self._skip = skip
        self.more()

    # -- what comes

    def more(self, page: Page | None = None) -> None:
        """For the stream: there may be something. Does nothing but send."""
        self._expected = True
        self.feed.send(MORE if page is None else page)

    def broken(self, error: Exception) -> None:  # noqa: ARG002 - counted and logged by the stream
        """For the stream: it could not be read. It is tried again, as long as it takes."""
        self._place.count("reader_waits_for_store")
        self._timer = self.feed.send_later(RETRY, MORE)

    def info(self, what: object, desired: int) -> Answer:
        stream = self._stream
        if what is DELETED:
            self.feed.kept = DELETED
            return RECREATE
        if stream is None:
            return None
        if what is BEGIN:
            if self._beginning and self._mark is not None and self._mark.position is not None:
                self._begin_at(self._mark.position.value)
            return None
        if isinstance(what, Page | _More):
            self._expected = False
        if self._beginning:
            return None
        return self._fill(stream, desired, what if isinstance(what, Page) else None)

    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        mark = self._mark
        if mark is None:
            return None  # of a subscription, or a stream, that is no more
        if ack.reason >= 0x80 or ack.dropped:
            self._place.count(ack.dropped or "refused", len(given))
        start = mark.start
        if mark.acknowledge([each.tag & OFFSETS for each in given if each.tag >> SHIFT == start]):
            self._place.ledger.changed(mark)
        stream, room = self._stream, ack.desired
        if stream is None or self._expected or self._beginning or not room:
            return None
        if room * 2 >= self._peak:
            return self._fill(stream, room, None)
        self.more()
        return None

    def _fill(self, stream: Stream, room: int, page: Page | None) -> list[Given] | None:
        """Up to so many messages, as far as they are in memory; what is not there yet is asked for."""
        self._peak = max(self._peak, room)
        given: list[Given] = []
        while len(given) < room:
            cursor = self._cursor
            if page is None or not page.after <= cursor < page.upto:
                page = stream.pages.find(cursor)
            if page is not None:
                self._take(page, room - len(given), given)
                if self._cursor >= page.upto:
                    stream.passed(page)
            elif cursor < stream.tail:
                self._expected = True
                self._is_behind()
                stream.load(cursor, self, room - len(given))
                break
            else:
                self._expected = True
                self._at_tail()
                self._catch_up(cursor)
                stream.wait(self)
                break
        return given or None

    def _take(self, page: Page, room: int, given: list[Given]) -> None:
        """Go on in a page."""
        at = bisect_right(page.offsets, self._cursor)
        offsets, messages = page.offsets[at : at + room], page.messages[at : at + room]
        self._cursor = page.upto if at + room >= len(page.offsets) else offsets[-1]
        if self._skip:
            offsets, messages = self._left(offsets, messages)
        if not offsets:
            return
        if self._mark is not None:
            self._mark.give(offsets)
        filter_, tag = self._filter, self._tag
        given += [Given(message, filter_, tag | at) for at, message in zip(offsets, messages, strict=True)]

    def _left(self, offsets: list[int], messages: list[Message]) -> tuple[list[int], list[Message]]:
        """Without those that are in flight, or were acknowledged before the client went away."""
        skip = self._skip
        left = [(at, message) for at, message in zip(offsets, messages, strict=True) if at not in skip]
        self._skip = {offset for offset in skip if offset > self._cursor}
        return [at for at, _ in left], [message for _, message in left]

    def _catch_up(self, cursor: int) -> None:
        """At the tail, with nothing under way: what is behind and was never given (trimmed, unreadable) is done."""
        mark = self._mark
        if mark is not None and not mark.outstanding and mark.done < cursor:
            mark.done = cursor
            self._place.ledger.changed(mark)

    def _is_behind(self) -> None:
        if not self._behind:
            self._behind = True
            self._place.cache.behind += 1

    def _at_tail(self) -> None:
        if self._behind:
            self._behind = False
            self._place.cache.behind -= 1
