"""The leader's link to one worker: reconnect, credit (back-pressure), and what the worker may not do.

    connecting ─▶ (shows that it knows the secret) ─▶ connected ─ lost ─▶ pause ─▶ connecting
                                    └─ does not, or breaks a rule ─▶ cut off: longer pause ─▶ connecting

The window is how many messages the worker may have at once. It begins small, doubles whenever it was used up while
acknowledgements came and hardly any message was old, and is halved when a quarter of it has waited for half of the time
there is: a worker whose handler takes long is sent as much as it can do in time, not as much as fits in a buffer.

Rule 1: a worker answers about what it has, or has had on this connection; what it says a second time changes nothing.
        Anything else is a lie, and the worker is cut off. So is one that sends what is no frame, and one that has
        messages that are overdue and has answered nothing for as long. What it said before, or with it, about messages
        that it has counts: how bytes are cut on their way decides nothing.
Rule 2: whatever ends a connection, all that the worker had goes back at once. Whether it has done some of it does not
        matter: results are written once per id.
Rule 3: messages that are overdue at a worker that still answers are taken back one by one; the worker stays.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, cast

import structlog

from motorcade.core.handshake import HandshakeError
from motorcade.dispatch.frames import AnswerReader, Answers, FrameError, SecretWantedError, process_frames
from motorcade.dispatch.handshake import Handshake, refused_frame
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.security import Security

log = structlog.get_logger("motorcade.dispatch")

FIRST_WINDOW: Final = 16
#: Seconds between attempts to reach a worker, doubled each time.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
LONGEST_CUT: Final = 60.0
CONNECT_TIMEOUT: Final = 2.0
#: Ids that were taken back from a worker and may still be acknowledged by it.
MAX_RECALLED: Final = 100_000
#: Windows of ids that were answered, and may be answered again.
PAST_WINDOWS: Final = 4
#: Seconds without a fault after which the pauses of a worker are short again.
FORGIVEN: Final = 30.0


class LinkState(StrEnum):
    """The state of a link."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    CUT_OFF = "cut_off"
    CLOSED = "closed"


class Fault(StrEnum):
    """The reason why messages are taken back from a worker."""

    LOST = "lost"  #: the connection ended
    HUNG = "hung"  #: overdue messages, and no answer at all
    OVERDUE = "overdue"  #: this message was not acknowledged in time; others were
    UNKNOWN_ID = "unknown_id"  #: it acknowledged what it never had
    BAD_FRAME = "bad_frame"  #: it sent what is no frame
    SECRET = "secret"  #: it does not know the secret, or asks for one that there is not  # noqa: S105 - a name
    REFUSED = "refused"  #: it cannot work on this message
    RETURNED = "returned"  #: it could not write the result
    REPEATED = "repeated"  #: it has answered about this message before; only counted


class InflightSend(NamedTuple):
    """Messages that were sent together."""

    at: float
    ids: list[bytes]
    size_bytes: int


class WorkerLinkOwner(Protocol):
    """Callbacks of a link to its leader."""

    def answered(self, link: WorkerLink, answers: Answers) -> None:
        """Handle answers of a worker about messages that it has, or has had."""

    def taken_back(self, link: WorkerLink, ids: Sequence[bytes], fault: Fault, detail: str) -> None:
        """Handle messages that are taken back from a worker unfinished."""

    def changed(self, link: WorkerLink) -> None:
        """Handle that it is connected, or no longer."""


class WorkerLink:
    """The way to one worker."""

    def __init__(
        self, name: str, owner: WorkerLinkOwner, options: DispatchOptions, security: Security | None = None
    ) -> None:
        self.name = name
        self.state = LinkState.CONNECTING
        self.held: set[bytes] = set()  #: ids that the worker has
        self.in_flight_bytes = 0  #: of their messages, at least
        self.suspects: set[bytes] = set()  #: those of them that have failed before, and perhaps some that are gone
        self.window = min(FIRST_WINDOW, options.window)
        self.acknowledged = 0
        self.faults: Counter[str] = Counter()
        self.problem = ""  #: what went wrong last
        self._owner = owner
        self._options = options
        self._security = security or Security()
        self._sent: deque[InflightSend] = deque()
        self._recalled: dict[bytes, None] = {}
        self._past: deque[list[bytes]] = deque()  #: ids that were sent together and are all answered or taken back
        self._past_ids = 0
        self._full = False  #: the window was used up since the last look
        self._resized = 0  #: acknowledgements until the window was changed last
        self._shrunk = 0.0  #: loop time when the window was made smaller last
        self._heard = 0.0  #: loop time of the last answer, or of the first message after none
        self._wire: _LinkProtocol | None = None
        self._loop = asyncio.get_running_loop()
        self._pause = 0.0
        self._cut = 0.0
        self._faulty_at = -FORGIVEN
        self._closed = False

    @property
    def credit(self) -> int:
        """Messages that may be sent now."""
        if self._wire is None or (self.in_flight_bytes >= self._options.window_bytes and self.held):
            return 0
        return max(self.window - len(self.held), 0)

    def send(self, ids: list[bytes], messages: list[bytes], now: float) -> None:
        wire = self._wire
        assert wire is not None  # noqa: S101 - no send without credit
        if not self.held:
            self._heard = now
        self.held.update(ids)
        size_bytes = sum(map(len, messages))
        self.in_flight_bytes += size_bytes
        self._sent.append(InflightSend(now, ids, size_bytes))
        if len(self.held) >= self.window:
            self._full = True
        wire.write(process_frames(ids, messages))

    def count_suspects(self) -> int:
        """Return how many messages in the worker's hands have failed before."""
        self.suspects &= self.held
        return len(self.suspects)

    def look(self, now: float) -> None:
        """Take back what is overdue, and see whether the window is right. Called a few times per second or more."""
        timeout = self._options.ack_timeout
        self._forget_answered()
        if not self._sent or now - self._sent[0].at < timeout:
            self._adapt(now)
        elif now - self._heard >= timeout:
            self.cut_off(Fault.HUNG, f"nothing heard for {now - self._heard:.1f} s, {len(self.held)} messages in hand")
        else:
            self._take_back_overdue(now)

    def cut_off(self, fault: Fault, detail: str) -> None:
        """Leave the worker alone for a while."""
        self._lengthen_cut(fault, detail)
        self._drop(fault, detail, LinkState.CUT_OFF)

    def _lengthen_cut(self, fault: Fault, detail: str) -> None:
        self._cut = min(max(self._cut * 2, self._options.cut_off), LONGEST_CUT)
        self._faulty_at = self._loop.time()
        log.warning("dispatch_worker_cut_off", worker=self.name, fault=fault, detail=detail, seconds=self._cut)

    def close(self) -> None:
        """Never connect again. What the worker has, it may finish for the next leader."""
        self._closed = True
        self.state = LinkState.CLOSED
        if self._wire is not None:
            wire, self._wire = self._wire, None
            wire.close()

    async def run(self) -> None:
        """Keep the connection up until the link is closed."""
        host, _, port = self.name.rpartition(":")
        host = host.strip("[]")
        while not self._closed:
            self.state = LinkState.CONNECTING
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    _, wire = await self._loop.create_connection(
                        lambda: _LinkProtocol(self, self._security.secret),
                        host,
                        int(port),
                        ssl=self._security.context,
                    )
            except (OSError, TimeoutError) as error:
                self.problem = f"cannot connect: {str(error) or 'no answer in time'}"
                self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
                await asyncio.sleep(self._pause * random.uniform(0.75, 1.0))  # noqa: S311 - spreads attempts
                continue
            if await self._knows_secret(wire):
                self._begin(wire)
                await wire.ended
            await asyncio.sleep(self._rest())

    async def _knows_secret(self, wire: _LinkProtocol) -> bool:
        """Wait until the worker has shown that it does; if not, it is cut off before it gets anything."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await wire.ready
        except (HandshakeError, TimeoutError) as error:
            detail = str(error) or (
                "it does not ask for the secret: it has none, or TLS is configured on one side only "
                "(options secret_file and tls_… of [dispatch])"
            )
            wire.refuse(detail)
            self.state = LinkState.CUT_OFF
            self.problem = detail
            self.faults[Fault.SECRET] += 1
            self._lengthen_cut(Fault.SECRET, detail)
            return False
        return True

    def _begin(self, wire: _LinkProtocol) -> None:
        if self._closed:  # meanwhile
            wire.close()
            return
        self._wire = wire
        self.state = LinkState.CONNECTED
        self.window = min(FIRST_WINDOW, self._options.window)
        self._resized = self.acknowledged
        self._recalled.clear()
        self._past.clear()
        self._past_ids = 0
        self._owner.changed(self)

    def _rest(self) -> float:
        """Return the seconds until the next attempt."""
        if self._closed:
            return 0.0
        if self.state is LinkState.CUT_OFF:
            return self._cut
        # Back off longer after each connection that ends without any acknowledgement.
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        return self._pause

    # -- what the connection tells

    def received(self, wire: _LinkProtocol, answers: Answers) -> None:
        if wire is not self._wire:
            return
        now = self._loop.time()
        self._heard = now
        if self._cut and now - self._faulty_at > FORGIVEN:
            self._cut = 0.0
        ids, rejected, returned = answers
        if rejected or returned:
            ids = [*ids, *(id_ for id_, _ in rejected), *returned]
        lie = False
        if not self._take(ids):
            answers, lie = self._take_singly(answers)
        if answers.acknowledged:
            self.acknowledged += len(answers.acknowledged)
            self._pause = 0.0
        if self.in_flight_bytes * 2 > self._options.window_bytes:
            self._forget_answered()
        if any(answers):
            self._owner.answered(self, answers)
        if lie:
            self.cut_off(Fault.UNKNOWN_ID, "it answered about a message that it never had")

    def ended(self, wire: _LinkProtocol, detail: str) -> None:
        if wire is self._wire:
            self._drop(Fault.LOST, detail or "the connection was closed", LinkState.CONNECTING)

    def broken(self, wire: _LinkProtocol, error: FrameError) -> None:
        if wire is not self._wire:
            return
        if isinstance(error, SecretWantedError):
            wire.refuse("this leader has no secret: give it one (option secret_file of [dispatch]), or the worker none")
            self.cut_off(Fault.SECRET, str(error))
        else:
            self.cut_off(Fault.BAD_FRAME, str(error))

    # -- inside

    def _forget_answered(self) -> None:
        """Subtract bytes per sending, when all of it is answered: near enough, and nothing to do per message."""
        sent = self._sent
        while sent and self.held.isdisjoint(sent[0].ids):
            self._forget(sent.popleft())

    def _forget(self, sent: InflightSend) -> None:
        """Forget what the worker holds; for a while it may still answer a second time."""
        self.in_flight_bytes -= sent.size_bytes
        self._past.append(sent.ids)
        self._past_ids += len(sent.ids)
        while self._past_ids > PAST_WINDOWS * self._options.window and len(self._past) > 1:
            self._past_ids -= len(self._past.popleft())

    def _take(self, ids: list[bytes]) -> bool:
        """Remove what the worker has answered. Return False, with nothing changed, if they need a check one by one."""
        held = self.held
        size = len(held)
        if held.issuperset(ids):
            held.difference_update(ids)
            if size - len(held) == len(ids):
                return True
            held.update(ids)  # something was answered twice
        return False

    def _take_singly(self, answers: Answers) -> tuple[Answers, bool]:
        """Return the answers that are new, and whether one is about a message that the worker never had."""
        had: set[bytes] | None = None
        lie = False

        def is_news(id_: bytes, *, done: bool) -> bool:
            nonlocal had, lie
            if id_ in self.held:
                self.held.discard(id_)
                return True
            if id_ in self._recalled:
                # What was taken back is with another worker already; only that it was done is news.
                del self._recalled[id_]
                return done
            if had is None:
                had = {known for ids in self._past for known in ids}
                had.update(known for sent in self._sent for known in sent.ids)
            if id_ in had:
                self.faults[Fault.REPEATED] += 1
            else:
                lie = True
            return False

        acknowledged = [id_ for id_ in answers.acknowledged if is_news(id_, done=True)]
        rejected = [(id_, reason) for id_, reason in answers.rejected if is_news(id_, done=False)]
        returned = [id_ for id_ in answers.returned if is_news(id_, done=False)]
        return Answers(acknowledged, rejected, returned), lie

    def _drop(self, fault: Fault, detail: str, state: LinkState) -> None:
        wire, self._wire = self._wire, None
        self.state = state
        self.problem = detail
        self.faults[fault] += 1
        held, self.held = self.held, set()
        self.in_flight_bytes = 0
        self._sent.clear()
        if wire is not None:
            wire.abort()
        self._owner.taken_back(self, list(held), fault, detail)
        self._owner.changed(self)

    def _take_back_overdue(self, now: float) -> None:
        while self._sent and self._sent[0].at <= now - self._options.ack_timeout:
            sent = self._sent.popleft()
            overdue = [id_ for id_ in sent.ids if id_ in self.held]
            self._forget(sent)
            self.held.difference_update(overdue)
            for id_ in overdue:
                self._recalled[id_] = None
            self.faults[Fault.OVERDUE] += len(overdue)
            self._owner.taken_back(self, overdue, Fault.OVERDUE, "not acknowledged in time")
        while len(self._recalled) > MAX_RECALLED:
            del self._recalled[next(iter(self._recalled))]
        self._adapt(now)

    def _adapt(self, now: float) -> None:
        """See whether the window is right. A few slow messages among many say nothing about it."""
        quarter = self._options.ack_timeout / 4
        old = late = 0
        for at, ids, _ in self._sent:
            if at > now - quarter:
                break
            waiting = len(self.held.intersection(ids))
            old += waiting
            late += waiting if at <= now - 2 * quarter else 0
        if late > self.window // 4:
            if now - self._shrunk >= quarter:  # time to see what the last step has brought
                self.window = max(self.window // 2, 1)
                self._shrunk = now
                self._resized = self.acknowledged
        elif self._full and self.acknowledged - self._resized >= self.window and old <= self.window // 16:
            # A whole window was acknowledged since: doubling at every look would have sent a slow worker much
            # more than it can do in time before the first of it is old.
            self.window = min(self.window * 2, self._options.window)
            self._resized = self.acknowledged
        self._full = len(self.held) >= self.window


class _LinkProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, link: WorkerLink, secret: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()  #: the worker knows the secret, or there is none
        self._handshake = Handshake(secret, leads=True) if secret else None
        self._link = link
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None and not self._transport.is_closing():  # what was refused is told first
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast("asyncio.Transport", transport)
        if self._handshake is None:
            self.ready.set_result(None)
        else:
            self.write(self._handshake.hello())

    def refuse(self, why: str) -> None:
        """Tell the worker why, and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(refused_frame(why))
            self._transport.close()

    def _shake_hands(self, handshake: Handshake, data: bytes) -> None:
        if self.ready.done():  # too late, or refused
            return
        try:
            self.write(handshake.feed(data))
        except HandshakeError as error:
            self.ready.set_exception(error)
            return
        if handshake.done:
            self._handshake = None
            self.ready.set_result(None)
            if handshake.rest:
                self.data_received(handshake.rest)

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            self._shake_hands(self._handshake, data)
            return
        try:
            answers = self._reader.feed(data)
        except FrameError as error:
            if isinstance(error.before, Answers) and any(error.before):
                self._link.received(self, error.before)
            self._link.broken(self, error)
            return
        if any(answers):
            self._link.received(self, answers)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(HandshakeError("it has closed the connection instead of showing the secret"))
        if not self.ended.done():
            self.ended.set_result(None)
        self._link.ended(self, str(error) if error else "")
