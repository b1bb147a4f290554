"""A client's subscription to a stream, as a source: `delivery.reader` on the pages of a stream.

    not declared ──▶ beginning ──▶ reading
         ▲            (progress must be loaded, or a time looked up)
         └───────── deleted

One instance per filter: each subscription has a cursor of its own. The cursor lasts as long as the session, also while
the client is away, since the session sends again what was in flight. What is committed (`delivery.progress`) belongs to
the client id, whatever session it has: it is where a subscription without a position goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from motorcade.core.subscription import Subscription
from motorcade.delivery.cursor import Cursor
from motorcade.delivery.progress import LogKey, ProgressStore
from motorcade.delivery.reader import RETRY, Reader
from motorcade.extension.sources import RECREATE, Ack, Answer, Delayed, FastFeed, Why
from motorcade.plugins.logs.streams.position import EARLIEST, LATEST, Origin, Position, Wish, read_wish
from motorcade.plugins.logs.streams.stream import Stream

COLLECTION: Final = "stream-progress"
LONGEST: Final = 3600.0  #: seconds; a moment farther away is waited for in steps


def key_of(stream: str) -> LogKey:
    """Return where the progress of the readers of a stream is stored."""
    return LogKey(COLLECTION, stream)


class StreamCursor(Cursor):
    """The place of a subscription, and where it is to begin."""

    __slots__ = ("otherwise", "position")

    def __init__(self, position: Position | None, otherwise: Position) -> None:
        super().__init__()
        self.position = position  #: where the client says; None: where it was
        self.otherwise = otherwise  #: if it was nowhere

    def pin(self, tail: int) -> None:
        """Let `latest` mean what comes from now on."""
        now = Position(Origin.NUMBER, tail + 1)
        if self.position == LATEST:
            self.position = now
        if self.otherwise == LATEST:
            self.otherwise = now


class ReadableStreams(Protocol):
    """The service in which streams are found."""

    progress: ProgressStore

    def stream(self, name: str) -> Stream | None: ...

    def attend(self, name: str, reader: StreamSource) -> None:
        """Call `declared` and `deleted` of a reader."""

    def leave(self, name: str, reader: StreamSource) -> None: ...

    def find_time(self, stream: Stream, time: float, found: Callable[[int | None], None]) -> None:
        """Look a time up, and say after which offset it begins; None if that fails."""

    def find_end(self, stream: Stream, found: Callable[[bool], None]) -> None:
        """Look where a stream ends, and say whether that has succeeded; its `tail` is right then."""

    def now(self) -> float: ...

    def count(self, event: str, times: int = 1) -> None: ...


class _Deleted:
    __slots__ = ()


class _Begin:
    __slots__ = ()


DELETED: Final = _Deleted()  #: `info`: the stream was deleted; also for the instance that follows
BEGIN: Final = _Begin()  #: `info`: look up the time at which to begin


class StreamSource(Reader):
    """One subscription of one client."""

    cursor: StreamCursor

    def __init__(self, feed: FastFeed, service: ReadableStreams) -> None:
        super().__init__(feed, service.progress)
        self._service = service
        self._stream: Stream | None = None  # none: not declared, or this has ended
        self._wish: Wish | None = None
        self._timer: Delayed | None = None  # until a time has come

    # -- begin and end

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        wish = self._wish = read_wish(subscription)  # checked in SUBSCRIBE; else this raises, which is counted
        self.filter = subscription.filter
        self.name = wish.written
        self.open(key_of(wish.name))
        cursor = self.progress.cursors.get(self.name)
        if not isinstance(cursor, StreamCursor) or why in {Why.NEW, Why.AGAIN}:
            self.progress.gather()
            cursor = self.progress.cursors[self.name] = self._new_cursor(wish, why)
        self.cursor = cursor
        self._service.attend(wish.name, self)
        stream = self._service.stream(wish.name)
        if stream is not None:
            self.declared(stream)
        return True

    def _new_cursor(self, wish: Wish, why: Why) -> StreamCursor:
        """Begin where the client says now, else where it was, else where it has said once."""
        if self.feed.kept is DELETED:
            self.feed.kept = None
            return StreamCursor(EARLIEST, EARLIEST)
        if why is not Why.RESUMED:
            return StreamCursor(wish.position if why in {Why.NEW, Why.AGAIN} else None, wish.position or LATEST)
        # If nothing is committed, the stream was deleted and made again meanwhile, or it was too long ago, or a crash
        # came first. A time means the same in all cases, else the oldest record misses nothing.
        by_time = wish.position is not None and wish.position.origin is Origin.TIME
        return StreamCursor(None, wish.position if wish.position is not None and by_time else EARLIEST)

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - there is one
        self._detach()
        if self._wish is not None:
            self._service.leave(self._wish.name, self)
        if not self.attached:
            return
        if why is Why.ENDED:
            self.store.end(self.progress)
        elif why is not Why.UNSUBSCRIBED:
            self.close()
        elif not self.feed.inflight:
            self.store.remove(self.progress, self.name, self.cursor)
        else:
            self.store.leave(self.progress)  # what is in flight may still be acknowledged; `terminate` comes after it

    def terminate(self) -> None:
        self._detach()
        if self._open:
            self.store.remove(self.progress, self.name, self.cursor)
            self.close()

    def declared(self, stream: Stream) -> None:
        """Attach to the stream of this name, which is declared now."""
        if not self.attached:
            return  # ended, or of a stream that was deleted: the next instance reads this one
        self._stream = stream
        stream.join(self)
        self.cursor.pin(stream.tail)  # though progress may not be loaded yet
        if self.progress.loaded:
            self.ready()

    def deleted(self) -> None:
        """Forget a stream that is gone, and all that was known of this reader.

        What was given and not sent must go too: that is what a new instance is for.
        """
        self._detach()
        if self._open and not self.attached:
            self.feed.send(DELETED)

    def _detach(self) -> None:
        self.halt()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def ready(self) -> None:
        stream, cursor = self._stream, self.cursor
        if stream is None or self.log is not None or not self.attached:
            return
        if cursor.start:
            self.read(stream, cursor.resume(self.in_flight()))
            return
        progress = self.progress
        progress.gather()
        if cursor.position is None and progress.exists:
            if progress.ahead or progress.number <= stream.tail:
                self._begin(stream, progress.number, ahead=progress.ahead, reset=False)
            else:  # another member has appended; or the store has lost the end of the stream
                self._service.find_end(stream, lambda known: self._found_end(stream, known=known))
            return
        position = cursor.position or cursor.otherwise
        if position.origin is Origin.TIME:
            self._begin_at(stream, position.value)
        else:
            after = 0 if position.origin is Origin.EARLIEST else int(position.value) - 1
            self._begin(stream, after, ahead=after > stream.tail)

    def _begin(self, stream: Stream, after: int, *, ahead: bool, reset: bool = True) -> None:
        self.cursor.begin(after, ahead=ahead)
        self.store.begin(self.progress, reset=reset)
        self.read(stream)

    def _begin_at(self, stream: Stream, time: float) -> None:
        """Begin with the first record of a time, or later. In the future: when it has come."""
        wait = time - self._service.now()
        if wait > 0:
            self._timer = self.feed.send_later(min(wait, LONGEST), BEGIN)
        else:
            self._service.find_time(stream, time, lambda after: self._found(stream, after))

    def _found_end(self, stream: Stream, *, known: bool) -> None:
        """Go on where the client was, or at the end of a stream that has lost more."""
        if self._stream is not stream or self.log is not None or not self.attached:
            return  # ended meanwhile
        if known:
            self._begin(stream, min(self.progress.number, stream.tail), ahead=False, reset=False)
        else:
            self._timer = self.feed.send_later(RETRY, BEGIN)

    def _found(self, stream: Stream, after: int | None) -> None:
        if self._stream is not stream or self.log is not None or not self.attached:
            return  # ended meanwhile
        if after is None:
            self._timer = self.feed.send_later(RETRY, BEGIN)
        else:
            self._begin(stream, after, ahead=False)

    # -- what comes

    def info(self, what: object, desired: int) -> Answer:
        if what is DELETED:
            self.feed.kept = DELETED
            return RECREATE
        if what is BEGIN:
            self.ready()
            return None
        return super().info(what, desired)

    def judge(self, numbers: list[int], ack: Ack) -> Iterable[int]:
        """Count what the client did not take; it is not given again."""
        if ack.refused or ack.dropped:
            self._service.count(ack.dropped or "refused", len(numbers))
        return numbers
