"""One peer: what it is sent and what comes from it, over one connection after the other. Pure.

    send ─▶ pending ─ end of turn ─▶ kept, until acknowledged ─▶ queue ─▶ wire        ACK ─▶ kept items go,
                                                                   ▲                         confirmations are done
                                               PONG ───────────────┘
    ACK, PING, ASK, ANSWER ──────────────────────────────────────────────▶ wire

A link is about a pair of incarnations: this member as it runs, and the other one. Items are numbered from 1, are
written in that order, and those that the other side has not got are written again on the next connection. What comes
with a number that was taken over already is dropped. So each item is handled once, in order, as long as both live.

Rule 1: `receive` takes all that comes, whatever is full here. ACKs, questions and answers never wait for items: they
        are written before items that wait (but not into the middle of one), and only as many items as the connection
        takes are handed to it. So a question or an answer may come before items that were sent earlier; what must
        come after them is an item.
Rule 2: a PONG does wait for the items before it: who has it has handled everything that was sent before.
Rule 3: nothing but `close_dead` drops items that were accepted; it is for peers that do not live any more.
Rule 4: a link is `full` from `max_items` or `max_bytes` unacknowledged on until less than half is left. Then droppable
        items are dropped, and callers are expected to send no more of the others than they have to.
Rule 5: handlers, callbacks of commits and `LinkEvents` may call every method, but none that takes bytes or time.

Times are those of one clock that never steps. The patience of a confirmation begins at the end of the turn.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from enum import StrEnum, auto
from heapq import heappop, heappush
from typing import Final, Protocol

import structlog

from motorcade.cluster.frames import (
    ACK,
    ANSWER,
    ASK,
    BATCH,
    BATCH_SIZE,
    DECLARATION,
    ITEM_SIZE,
    MAX_CODES,
    MAX_NAME,
    MIN_FRAME,
    PING,
    PONG,
    REFUSED,
    FrameReader,
    LinkFrameError,
    ack_frame,
    answer_frame,
    ask_frame,
    batch_head,
    ping_frame,
    pong_frame,
    read_answer,
    read_ask,
    read_batch,
    read_number,
    read_sentence,
)
from motorcade.cluster.options import LinkOptions
from motorcade.commit import Commit
from motorcade.core.handshake import HandshakeError
from motorcade.extension.cluster import AskError, ItemHandler, Peer

log = structlog.stdlib.get_logger("motorcade.cluster")

BATCH_BYTES: Final = 262_144  #: bytes of items from which on a batch is closed; a larger item is a batch by itself
WRITE_SIZE: Final = 262_144  #: bytes of a large item that are written at once: the loop must not stand still meanwhile
MAX_ASKS: Final = 10_000  #: questions to one peer without an answer
MAX_PINGS: Final = 64  #: pings that wait for their answer; older ones are forgotten
MAX_LOGGED: Final = 10  #: errors of handlers of one link that are logged
MAX_ERROR: Final = 1000  #: characters of an error that a question is answered with

_NEVER: Final = math.inf
_ANY: Final = 1 << 62

#: What was confirmed already; one for all, since nothing of it can change.
_CONFIRMED: Final[Commit[None]] = Commit.stored(None)


class LinkLostError(AskError):
    """The connection has ended before the answer came: the question may have been carried out or not."""


class LinkClosedError(LinkFrameError):
    """The other side says why it closes the connection."""


class LinkStatus(StrEnum):
    """The state of a link."""

    CLOSED = auto()  #: no connection; items wait for one
    OPEN = auto()
    DEAD = auto()  #: the peer lives no more: nothing is sent, nothing is waited for


class LinkWire(Protocol):
    """The connection, as a link knows it."""

    def write(self, data: bytes) -> None:
        """Send bytes after those before."""


class LinkEvents(Protocol):
    """Callbacks of a link."""

    def wake(self, link: Link) -> None:
        """Call `flush` at the end of this turn."""

    def handler(self, kind: str) -> ItemHandler | None:
        """Return the handler of a kind of items."""

    def asked(self, link: Link, wire: LinkWire, id_: int, noun: str, question: bytes) -> None:
        """Have a question answered: `link.answer`."""

    def pong(self, link: Link) -> bytes:
        """Return what the answer to a ping says."""

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:
        """Take the answer to a ping that was sent at a time."""


class _Outgoing:
    """A batch, or a PONG."""

    __slots__ = ("count", "data", "large", "last", "size_bytes", "written")

    def __init__(self, data: bytes, count: int = 0, last: int = 0, size_bytes: int = 0, large: bytes = b"") -> None:
        self.data = data
        self.large = large  #: what follows it, and is written piece by piece
        self.count = count  #: items
        self.last = last  #: number of the last one
        self.size_bytes = size_bytes
        self.written = False  #: on this connection or an earlier one


class _Confirmation:
    """All items up to a number are waited for."""

    __slots__ = ("commit", "deadline", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.deadline = _NEVER  # until the end of the turn
        self.commit: Commit[None] = Commit()


class Link:
    """The link to one peer. It is the `Peer` that broker and plugins know."""

    __slots__ = (
        "_asks",
        "_bodies",
        "_codes",
        "_confirmations",
        "_control",
        "_deadlines",
        "_events",
        "_kept",
        "_kept_bytes",
        "_large",
        "_large_at",
        "_last_ask",
        "_last_ping",
        "_logged",
        "_look_bytes",
        "_look_items",
        "_max_body",
        "_names",
        "_options",
        "_paused",
        "_pending_bytes",
        "_pending_codes",
        "_pings",
        "_queue",
        "_reader",
        "_room",
        "_sealed",
        "_table",
        "_told",
        "_unstamped",
        "_wire",
        "_woken",
        "acknowledged",
        "connections",
        "dropped",
        "errors",
        "full",
        "heard_at",
        "id",
        "impatient",
        "number",
        "over_full",
        "problem",
        "received",
        "resent",
        "round_trip",
        "status",
        "too_large",
        "unknown",
    )

    def __init__(self, id_: str, number: int, events: LinkEvents, options: LinkOptions) -> None:
        self.id = id_
        self.number = number  #: of the member
        self.status = LinkStatus.CLOSED
        self.full = False
        self.problem = ""  #: why the last connection ended, or could not begin
        self.heard_at = 0.0  #: when something came last
        self.round_trip = 0.0  #: seconds, of the ping answered last

        self.acknowledged = 0  #: number of the last item that the peer has taken over
        self.received = 0  #: number of the last item that was taken over from it

        self.connections = 0
        self.resent = 0  #: items written another time
        self.dropped = 0  #: droppable items that were not sent, since the link was full
        self.over_full = 0  #: other items that were sent nevertheless
        self.impatient = 0  #: confirmations that did not come in time
        self.too_large = 0  #: items that do not fit into a frame, and were not sent
        self.errors = 0  #: items whose handler raised
        self.unknown: Counter[str] = Counter()  #: items of a kind without handler

        self._events = events
        self._options = options
        self._wire: LinkWire | None = None
        self._paused = False
        self._reader = FrameReader(options.max_frame)
        self._control: list[bytes] = []  # frames that do not wait for items
        self._queue: deque[_Outgoing] = deque()  # to be written on this connection
        self._large = b""  # an item of which a part is written
        self._large_at = 0
        self._max_body = 0
        self._limit_frames(options.max_frame)

        self._codes: dict[str, int] = {}
        self._bodies: list[bytes] = []  # pending: of this turn
        self._pending_codes = bytearray()
        self._pending_bytes = 0
        self._sealed = 0  # number of the last item that is not pending
        self._kept: deque[_Outgoing] = deque()  # batches that are not acknowledged
        self._kept_bytes = 0
        self._look_items = 1  # pending items, and bytes of them, at which `_look` is due
        self._look_bytes = 0
        self._woken = False

        self._names: dict[int, str] = {}
        self._table: list[ItemHandler] = [self._undeclared] * (MAX_CODES + 1)
        self._table[DECLARATION] = self._declared
        self._told = 0  # number in the last ACK

        self._confirmations: deque[_Confirmation] = deque()  # by number, which is by deadline too
        self._unstamped = 0  # of them, those that have no deadline yet
        self._room: Commit[None] | None = None
        self._asks: dict[int, Commit[bytes]] = {}
        self._deadlines: list[tuple[float, int]] = []  # of questions, a heap; answered ones may still be in it
        self._last_ask = 0
        self._pings: dict[int, float] = {}
        self._last_ping = 0
        self._logged = 0

    # -- items

    def send(self, kind: str, body: bytes, *, droppable: bool = False) -> None:
        """Send an item; `droppable`: not if the link is full (counted)."""
        if droppable and self.full:
            self.dropped += 1
            return
        code = self._codes.get(kind) or self._declare(kind)
        bodies = self._bodies
        bodies.append(body)
        self._pending_codes.append(code)
        self._pending_bytes = pending = self._pending_bytes + len(body) + ITEM_SIZE
        if pending >= self._look_bytes or len(bodies) >= self._look_items:
            self._look()

    def figures(self) -> dict[str, float]:
        """Return what is measured; all but the last five only grow."""
        return {
            "sent": self.sent,
            "received": self.received,
            "resent": self.resent,
            "dropped": self.dropped,
            "over_full": self.over_full,
            "too_large": self.too_large,
            "impatient": self.impatient,
            "unknown": self.unknown.total(),
            "errors": self.errors,
            "connections": self.connections,
            "linked": self.status is LinkStatus.OPEN,
            "full": self.full,
            "unacknowledged": self.unacknowledged,
            "unacknowledged_bytes": self.unacknowledged_bytes,
            "round_trip": self.round_trip,
        }

    @property
    def sent(self) -> int:
        """Return the number of the last item."""
        return self._sealed + len(self._bodies)

    @property
    def unacknowledged(self) -> int:
        """Return how many items the peer has not acknowledged."""
        if self.status is LinkStatus.DEAD:
            return 0
        return self._sealed + len(self._bodies) - self.acknowledged

    @property
    def unacknowledged_bytes(self) -> int:
        """Return the bytes of these items."""
        return self._kept_bytes + self._pending_bytes

    def confirm(self) -> Commit[None]:
        """Return the commit of all that was sent so far; see `Peer`."""
        number = self._sealed + len(self._bodies)
        if number <= self.acknowledged or self.status is LinkStatus.DEAD:
            return _CONFIRMED
        waiting = self._confirmations
        if waiting and waiting[-1].number == number:
            return waiting[-1].commit
        confirmation = _Confirmation(number)
        waiting.append(confirmation)
        self._unstamped += 1
        self._wake()
        return confirmation.commit

    def room(self) -> Commit[None]:
        """Return a commit that is done when the link is no longer full."""
        if not self.full:
            return _CONFIRMED
        if self._room is None:
            self._room = Commit()
        return self._room

    def _declare(self, kind: str) -> int:
        """Give a kind its code, and tell the peer."""
        if self.status is LinkStatus.DEAD:
            return DECLARATION  # `_look` drops it
        code = len(self._codes) + 1
        name = kind.encode()
        if code > MAX_CODES or not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"{kind!r}: at most {MAX_CODES} kinds of items, with names of 1 to {MAX_NAME} bytes")
        self._codes[kind] = code
        declaration = bytes((code,)) + name
        self._bodies.append(declaration)
        self._pending_codes.append(DECLARATION)
        self._pending_bytes += len(declaration) + ITEM_SIZE
        return code

    def _look(self) -> None:
        """See whether a batch is to be closed, or the link is full, and when to look again."""
        bodies = self._bodies
        if self.status is LinkStatus.DEAD:
            self._forget_pending()
            return
        body = bodies[-1]
        if len(body) > self._max_body:
            self._refuse_large()
            if not bodies:
                return
        self._wake()
        if len(body) >= BATCH_BYTES and bodies[-1] is body:
            self._seal_large()
        elif self._pending_bytes >= BATCH_BYTES:
            self._seal()
        options = self._options
        items, size_bytes = self.unacknowledged, self._kept_bytes + self._pending_bytes
        if self.full:
            self.over_full += 1
        elif items >= options.max_items or size_bytes >= options.max_bytes:
            self.full = True
        self._look_items = 1
        self._look_bytes = 0
        if not self.full:
            self._look_items = len(self._bodies) + options.max_items - items
            self._look_bytes = min(BATCH_BYTES, self._pending_bytes + options.max_bytes - size_bytes)

    def _refuse_large(self) -> None:
        """Take back the item sent last: the peer would close the connection at it, again and again."""
        body = self._bodies.pop()
        code = self._pending_codes.pop()
        self._pending_bytes -= len(body) + ITEM_SIZE
        self.too_large += 1
        if self._may_log():
            kind = next((kind for kind, known in self._codes.items() if known == code), "")
            log.error(
                "cluster_item_too_large",
                peer=self.id,
                kind=kind,
                size=len(body),
                most=self._max_body,
                consequence="it is not sent",
                remedy="raise cluster.max_frame of all members",
            )

    def _seal(self) -> None:
        """Close the pending batch."""
        bodies = self._bodies
        first = self._sealed + 1
        head = batch_head(first, self._pending_codes, bodies)
        self._sealed += len(bodies)
        self._keep(_Outgoing(b"".join((head, *bodies)), len(bodies), self._sealed, self._pending_bytes))
        self._bodies = []
        self._pending_codes.clear()
        self._pending_bytes = 0

    def _seal_large(self) -> None:
        """Close the pending batch without its last item, and make that a batch of its own, which is not copied."""
        body = self._bodies.pop()
        code = self._pending_codes.pop()
        self._pending_bytes -= len(body) + ITEM_SIZE
        if self._bodies:
            self._seal()
        head = batch_head(self._sealed + 1, bytes((code,)), [body])
        self._sealed += 1
        self._keep(_Outgoing(head, 1, self._sealed, len(body) + ITEM_SIZE, body))

    def _keep(self, batch: _Outgoing) -> None:
        self._kept.append(batch)
        self._kept_bytes += batch.size_bytes
        if self._wire is not None:
            self._queue.append(batch)

    def _forget_pending(self) -> None:
        self._bodies.clear()
        self._pending_codes.clear()
        self._pending_bytes = 0

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._events.wake(self)

    # -- the end of a turn, and time

    def flush(self, now: float) -> None:
        """Write what was sent in this turn."""
        self._woken = False
        if self._bodies:
            self._seal()
        self._look_items, self._look_bytes = 1, 0
        if self._unstamped:
            deadline = now + self._options.patience
            for at in range(-self._unstamped, 0):
                self._confirmations[at].deadline = deadline
            self._unstamped = 0
        self._pump()

    @property
    def deadline(self) -> float:
        """Return when `tick` is due."""
        asks, waiting = self._deadlines, self._confirmations
        while asks and asks[0][1] not in self._asks:
            heappop(asks)
        return min(asks[0][0] if asks else _NEVER, waiting[0].deadline if waiting else _NEVER)

    def tick(self, now: float) -> None:
        """Give up what was waited for long enough."""
        waiting = self._confirmations
        late: list[Commit[None]] = []
        while waiting and waiting[0].deadline <= now:
            late.append(waiting.popleft().commit)
        self.impatient += len(late)
        overdue: list[Commit[bytes]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            if (ask := self._asks.pop(heappop(self._deadlines)[1], None)) is not None:
                overdue.append(ask)
        for commit in late:
            commit.finish()
        for ask in overdue:
            ask.finish(AskError(f"{self.id} has not answered in time"))

    def ping(self, now: float) -> None:
        """Ask for a sign of life."""
        if self._wire is None:
            return
        self._last_ping += 1
        self._pings[self._last_ping] = now
        if len(self._pings) > MAX_PINGS:
            del self._pings[next(iter(self._pings))]
        self._control.append(ping_frame(self._last_ping))
        self._pump()

    # -- questions

    def ask(self, noun: str, question: bytes, deadline: float) -> Commit[bytes]:
        """Ask the peer; the commit has its answer, or fails with `AskError`."""
        name = noun.encode()
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"{noun!r}: a noun has 1 to {MAX_NAME} bytes")
        if self._wire is None:
            return Commit.failed(LinkLostError(f"there is no connection to {self.id}: {self.problem or 'not yet'}"))
        if len(self._asks) >= MAX_ASKS:
            return Commit.failed(AskError(f"{self.id} has {MAX_ASKS} questions to answer already"))
        if len(question) + len(name) > self._max_body:
            return Commit.failed(AskError(f"a question of {len(question)} bytes is too long for {self.id}"))
        self._last_ask += 1
        commit: Commit[bytes] = Commit()
        self._asks[self._last_ask] = commit
        heappush(self._deadlines, (deadline, self._last_ask))
        self._control.append(ask_frame(self._last_ask, name, question))
        self._wake()
        return commit

    def answer(self, wire: LinkWire, id_: int, answer: bytes) -> None:
        """Answer a question that came over `wire`; nothing if that connection has ended."""
        if len(answer) > self._max_body:
            self.refuse(wire, id_, f"the answer has {len(answer)} bytes, which is too long for a frame")
        else:
            self._answer(wire, answer_frame(id_, True, answer))

    def refuse(self, wire: LinkWire, id_: int, why: str) -> None:
        """Answer a question with an error."""
        self._answer(wire, answer_frame(id_, False, why[:MAX_ERROR].encode("utf-8", "replace")))

    def _answer(self, wire: LinkWire, frame: bytes) -> None:
        if wire is self._wire:
            self._control.append(frame)
            self._wake()

    # -- the connection

    @property
    def wire(self) -> LinkWire | None:
        """Return the connection, if there is one."""
        return self._wire

    def check(self, received: int) -> None:
        """Refuse a peer that has another number than it can have; see `opened`."""
        if received < self.acknowledged:
            raise HandshakeError(f"{self.id} has forgotten what it has been sent, and has to join the cluster again")
        if received > self._sealed:
            raise HandshakeError(f"{self.id} has received more than it was sent, and has to join the cluster again")

    def opened(self, wire: LinkWire, received: int, max_frame: int, now: float) -> None:
        """Go on over a connection. The peer has all items up to `received`, and takes frames up to `max_frame`."""
        self._limit_frames(max_frame)
        self._acknowledge(received)  # calls back: what is sent then is kept, and is in the queue below
        if self.status is LinkStatus.DEAD:
            return
        self.status = LinkStatus.OPEN
        self.connections += 1
        self.heard_at = now
        self._wire = wire
        self._paused = False
        self._reader = FrameReader(self._options.max_frame)
        self._told = self.received  # the greeting has told it
        self._queue.extend(map(self._fitting, self._kept))
        self.resent += sum(batch.count for batch in self._queue if batch.written)
        self._wake()  # written at the end of the turn, after the greeting

    def lost(self, why: str) -> None:
        """Note that the connection has ended."""
        if self._wire is None:
            return
        self._wire = None
        self.status = LinkStatus.CLOSED
        self.problem = why
        self._control.clear()
        self._queue.clear()
        self._large = b""
        self._pings.clear()
        asks, self._asks = self._asks, {}
        self._deadlines.clear()
        for ask in asks.values():
            ask.finish(LinkLostError(f"the connection to {self.id} has ended: {why}"))

    def close_dead(self, why: str) -> None:
        """Drop everything: the peer lives no more, and neither do those who would have got it."""
        if self.status is LinkStatus.DEAD:
            return
        self.lost(why)
        self.problem = why
        self.status = LinkStatus.DEAD
        self._forget_pending()
        self._codes.clear()
        self._look_items, self._look_bytes = 1, 0
        self._kept.clear()
        self._kept_bytes = 0
        self._table[:] = [_ignored] * (MAX_CODES + 1)  # in place: items of a batch may be under way
        self.full = False
        waiting, self._confirmations = [each.commit for each in self._confirmations], deque()
        self._unstamped = 0
        if self._room is not None:
            waiting.append(self._room)
            self._room = None
        for commit in waiting:
            commit.finish()

    def pause(self) -> None:
        """Hand over no more items: the connection has enough to write."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._pump()

    def _limit_frames(self, max_frame: int) -> None:
        most = min(self._options.max_frame, max(max_frame, MIN_FRAME))
        self._max_body = most - BATCH_SIZE - 2 * ITEM_SIZE - MAX_NAME

    def _fitting(self, batch: _Outgoing) -> _Outgoing:
        """Return a batch as it is, or a declaration of nothing in the place of an item that the peer would refuse."""
        if batch.count > 1 or batch.size_bytes - ITEM_SIZE <= self._max_body:
            return batch
        self.too_large += 1
        self._kept_bytes -= batch.size_bytes
        batch.data, batch.large = batch_head(batch.last, bytes((DECLARATION,)), [b""]), b""
        batch.size_bytes = 0
        return batch

    def _pump(self) -> None:
        """Write what the connection takes."""
        wire = self._wire
        if wire is None or (self._large and not self._write_large(wire)):
            return
        control = self._control
        if control:
            data = control[0] if len(control) == 1 else b"".join(control)
            control.clear()
            wire.write(data)
        queue = self._queue
        while queue and not self._paused:
            outgoing = queue.popleft()
            outgoing.written = True
            wire.write(outgoing.data)
            if outgoing.large:
                self._large, self._large_at = outgoing.large, 0
                if not self._write_large(wire):
                    return

    def _write_large(self, wire: LinkWire) -> bool:
        """Write on a large item; nothing may come between its pieces. Return True if it is written."""
        large, at = self._large, self._large_at
        while at < len(large) and not self._paused:
            wire.write(large[at : at + WRITE_SIZE])
            at += WRITE_SIZE
        self._large_at = at
        if at < len(large):
            return False
        self._large = b""
        return True

    # -- what comes

    def receive(self, data: bytes, now: float) -> None:
        """Take bytes of the connection; `LinkFrameError` says why it is to be closed."""
        self.heard_at = now
        wire = self._wire
        try:
            for kind, frame, start, stop in self._reader.feed(data):
                if kind == BATCH:
                    self._batch(frame, start, stop)
                else:
                    self._other_frame(kind, frame, start, stop, now)
                if self._wire is not wire:  # a handler has closed it
                    return
        finally:
            if self._wire is wire and self.received > self._told:
                self._told = self.received
                self._control.append(ack_frame(self.received))
            self._pump()

    def _batch(self, data: bytes, start: int, stop: int) -> None:
        first, codes, lengths, at = read_batch(data, start, stop)
        received = self.received
        if first > received + 1:
            raise LinkFrameError(f"items {received + 1} to {first - 1} are missing")
        last = first + len(codes) - 1
        if first <= received:  # it was sent again
            if last <= received:
                return
            known = received + 1 - first
            at += sum(lengths[:known])
            codes, lengths = codes[known:], lengths[known:]
        table = self._table
        for code, length in zip(codes, lengths, strict=True):
            end = at + length
            try:
                table[code](self, data[at:end])
            except Exception as error:  # noqa: BLE001 - whatever it is, the items after it must be handled
                self._failed(code, error)
            at = end
        self.received = last

    def _other_frame(self, kind: int, data: bytes, start: int, stop: int, now: float) -> None:
        if kind == ACK:
            number = read_number(data, start, stop)
            if number > self._sealed:
                raise LinkFrameError(f"it acknowledges item {number}, and the last one is {self._sealed}")
            self._acknowledge(number)
        elif kind == PING:
            if self._bodies:
                self._seal()
                self._look_items, self._look_bytes = 1, 0
            body = self._events.pong(self)
            self._queue.append(_Outgoing(pong_frame(read_number(data, start, stop), body)))
        elif kind == PONG:
            sent_at = self._pings.pop(read_number(data, start, stop), None)
            if sent_at is not None:
                self.round_trip = now - sent_at
                self._events.answered(self, sent_at, data[start + 8 : stop])
        elif kind == ASK:
            wire = self._wire
            if wire is not None:
                self._events.asked(self, wire, *read_ask(data, start, stop))
        elif kind == ANSWER:
            id_, answered, answer = read_answer(data, start, stop)
            if (commit := self._asks.pop(id_, None)) is not None:
                if answered:
                    commit.settle(answer)
                else:
                    commit.finish(AskError(f"{self.id} refuses: {answer.decode('utf-8', 'replace')}"))
        elif kind == REFUSED:
            raise LinkClosedError(read_sentence(data, start, stop))
        else:
            raise LinkFrameError(f"a frame of kind {kind} comes too late")

    def _acknowledge(self, number: int) -> None:
        """Forget what the peer has."""
        if number <= self.acknowledged:
            return
        self.acknowledged = number
        kept = self._kept
        while kept and kept[0].last <= number:
            self._kept_bytes -= kept.popleft().size_bytes
        waiting = self._confirmations
        done: list[Commit[None]] = []
        while waiting and waiting[0].number <= number:
            done.append(waiting.popleft().commit)
        self._unstamped = min(self._unstamped, len(waiting))
        if (
            self.full
            and self.unacknowledged * 2 < self._options.max_items
            and self.unacknowledged_bytes * 2 < self._options.max_bytes
        ):
            self.full = False
            if self._room is not None:
                done.append(self._room)
                self._room = None
        for commit in done:
            commit.finish()

    # -- kinds of items that come

    def refresh(self) -> None:
        """Look up the handlers again."""
        if self.status is LinkStatus.DEAD:
            return
        for code, kind in self._names.items():
            self._table[code] = self._events.handler(kind) or self._unhandled(kind)

    def _declared(self, _peer: Peer, body: bytes) -> None:
        if not body:  # in the place of an item that was too large
            return
        code, kind = body[0], body[1:].decode()
        if code != DECLARATION:
            self._names[code] = kind
            self._table[code] = self._events.handler(kind) or self._unhandled(kind)

    def _undeclared(self, _peer: Peer, _body: bytes) -> None:
        self.unknown[""] += 1

    def _unhandled(self, kind: str) -> ItemHandler:
        unknown = self.unknown

        def count(_peer: Peer, _body: bytes) -> None:
            unknown[kind] += 1

        return count

    def _failed(self, code: int, error: Exception) -> None:
        """Count and log that a handler has raised."""
        self.errors += 1
        if self._may_log():
            log.error(
                "cluster_item_failed",
                peer=self.id,
                kind=self._names.get(code, str(code)),
                consequence="the item counts as handled",
                exc_info=error,
            )

    def _may_log(self) -> bool:
        self._logged += 1
        return self._logged <= MAX_LOGGED


def _ignored(_peer: Peer, _body: bytes) -> None:
    """Take an item of a peer that is dead."""
