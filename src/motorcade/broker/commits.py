"""What the broker writes to the store: collected for a turn of the event loop, committed in parts, answered in order.

    accept ─▶ [ jobs: messages for more receivers than a turn can do ]
        └──────────┴─▶ [ part: what grows ]     ─┐
    put a record   ──▶                           ├─ end of the turn: commit ─▶ receivers get it, then tickets are done
    acknowledge,   ──▶ [ part: what only removes ]┘
    mark, delete

Rule 1: a part has at most `PART_ROWS` rows, so that no commit holds up the others. A turn hands over about
        `TURN_ROWS`, and the store has about `FLYING_ROWS` at once, so that neither asking nor answering holds up the
        event loop; what is more waits as a job. A QoS 2 message of a durable publisher is never divided:
        it is stored with its packet id as a whole, or, where batches are not atomic, repeated under the same token.
Rule 2: what only removes has a part of its own. A full store refuses the rest, and this gives it room again.
Rule 3: parts are begun in order, so writes for one mailbox or record are applied in order (ports, rule 6).
Rule 4: acknowledgements of receivers ride along. If they are lost in a crash, the message is sent again (QoS 1), or
        only its PUBREL (QoS 2). If they could not be stored they are tried again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from motorcade.broker import kept
from motorcade.broker.frames import Frame, frame_of, message_of
from motorcade.broker.kept import AWAITING, pair
from motorcade.broker.mailbox import Mailbox
from motorcade.broker.pubsub import Copy, Route, chosen_of, noted
from motorcade.broker.session import Session
from motorcade.broker.ticket import Ticket
from motorcade.clock import time
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.storage.ports import Appended, Batch, Bound, Draft, Store
from motorcade.tasks import Tasks, Work

log = structlog.stdlib.get_logger("motorcade.keeper")

PART_ROWS = 256  #: rows in one commit, unless a QoS 2 message needs more
TURN_ROWS = 1024  #: rows handed over in one turn of the event loop, unless a QoS 2 message needs more
FLYING_ROWS = 4096  #: rows the store has not answered yet, before it gets no more; QoS 0 is no longer kept then
REMEMBERED = 256  #: publishers of a topic whose entries' common part is remembered; bounds likewise
RETRY = 1.0  #: seconds until something that failed is tried again


class Source(Protocol):
    """A message on its way to durable receivers."""

    octets: int  #: of its payload
    moved: bool  #: it is in another mailbox until it is stored

    def draft(self, copy: Copy, token: bytes) -> Draft:
        """The entry for a receiver."""

    def frame(self, copy: Copy, now: float) -> Frame:
        """What goes to a receiver that waits for it."""


class Whole:
    """A message of any kind, encoded once per kind of receiver."""

    __slots__ = ("_frames", "_message", "moved", "octets")

    def __init__(self, message: Message, *, moved: bool = False) -> None:
        self.moved = moved
        self._message = message
        self._frames: dict[tuple[object, ...], Frame] = {}
        self.octets = len(message.payload)

    def draft(self, copy: Copy, token: bytes) -> Draft:
        message, group = self._message, copy.group.text if copy.group is not None else ""
        record = kept.record_of(message, copy.qos, retain=copy.retain, identifiers=copy.identifiers, group=group)
        return Draft(
            kept.encode(record),
            message.payload,
            expires_at=message.expires_at or 0.0,
            droppable=not copy.qos,
            token=token,
        )

    def frame(self, copy: Copy, now: float) -> Frame:
        version = copy.session.version
        kind = (version == 5, copy.qos, copy.retain, copy.identifiers)
        frame = self._frames.get(kind)
        if frame is None:
            message = noted(self._message, copy.identifiers) if copy.identifiers else self._message
            frame = frame_of(message, version, copy.qos, now, retain=copy.retain, identifiers=copy.identifiers)
            self._frames[kind] = frame
        return frame


class Plain:
    """A QoS 1 message without properties, as it came in."""

    __slots__ = ("_client", "_frame", "_payload", "_route", "_version", "octets")

    moved = False

    def __init__(self, route: Route, frame: Frame, payload: bytes, client: ClientInfo, version: int) -> None:
        self._route = route
        self._frame = frame
        self._payload = payload
        self._client = client
        self._version = version
        self.octets = len(payload)

    def draft(self, copy: Copy, token: bytes) -> Draft:
        client, bodies = self._client, self._route.bodies
        if bodies is None:
            bodies = self._route.bodies = {}
        key = (client.client_id, client.username, copy.identifiers)
        body = bodies.get(key)
        if body is None:
            if len(bodies) >= REMEMBERED:
                bodies.clear()
            body = bodies[key] = kept.plain_body(self._route.topic, client, copy.identifiers)
        return Draft(body, self._payload, token=token)

    def frame(self, copy: Copy, now: float) -> Frame:
        version = copy.session.version
        if not copy.identifiers and (version == 5) == (self._version == 5):
            return self._frame
        message = noted(message_of(self._frame, self._version), copy.identifiers)
        return frame_of(message, version, 1, now, identifiers=copy.identifiers)


class Job:
    """A message that is being handed over, and how far."""

    __slots__ = ("at", "copies", "now", "packet", "source", "ticket", "token")

    def __init__(self, source: Source, copies: Sequence[Copy], now: float, ticket: Ticket) -> None:
        self.source = source
        self.copies = copies
        self.now = now
        self.ticket = ticket
        self.at = 0  #: receivers that are done
        self.packet: tuple[str, bytes] | None = None  #: key and record of the QoS 2 packet it came in
        self.token = b""


class Part:
    """What is committed together."""

    __slots__ = ("acks", "batch", "deliveries", "puts", "rows", "tickets")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.rows = 0
        self.deliveries: list[tuple[Sequence[Copy], Source]] = []  #: in the order of the batch's answers
        self.tickets: list[Ticket] = []
        self.acks: dict[Mailbox, list[int]] = {}
        self.puts = False  #: it has records


class Commits(ABC):
    """The way into the store; `Keeper` knows the sessions."""

    def __init__(
        self, store: Store, loop: asyncio.AbstractEventLoop, flush: Callable[[], None], supervisor: Tasks | None = None
    ) -> None:
        self.supervisor = supervisor or Tasks()
        self.store = store
        self.loop = loop
        self.now = time()  #: of this turn
        self.refused = 0  #: parts since the store began to refuse them; 0: it takes them
        self._flush = flush
        self._jobs: deque[Job] = deque()
        self._part: Part | None = None
        self._removing: Part | None = None
        self._acks: dict[Mailbox, list[int]] = {}
        self._turn_rows = 0
        self._flying = 0  # rows that the store has not answered yet
        self._scheduled = False
        self._bounds: dict[tuple[int, int], Bound] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def check(self) -> None:
        """Raise `StoreError` if nothing may be written now."""

    # -- messages

    @property
    def busy(self) -> bool:
        """Whether there is more to hand over than this turn can do: publishers should let others have theirs."""
        return bool(self._jobs)

    def accept(
        self,
        message: Message,
        copies: Sequence[Copy],
        now: float,
        publisher: Session | None = None,
        packet_id: int = 0,
        token: bytes = b"",
        *,
        moved: bool = False,
    ) -> Ticket:
        """Keep a message for its durable receivers, and, of a durable publisher, the id of its QoS 2 packet.

        With a token, a repetition of the same message is recognised. `moved`: it is in another mailbox until then.
        """
        ticket = Ticket(0)
        if any(copy.session.ended for copy in copies):  # while a plugin, or the store, was waited for
            for copy in copies:
                if copy.session.ended:
                    copy.session.forgo(message, "session_ended")
            copies = [copy for copy in copies if not copy.session.ended]
        job = Job(Whole(message, moved=moved), copies, now, ticket)
        job.token = token
        if publisher is None or not packet_id:
            self._enter(job)
            return ticket
        key = pair(publisher.client.client_id, str(packet_id))
        whole = kept.encode(kept.AwaitingRecord(now, message.guid))
        if self.store.atomic:
            job.packet = (key, whole)
            self._enter(job)
            return ticket
        job.token = message.guid
        job.packet = (key, kept.encode(kept.AwaitingRecord(now, message.guid, True, chosen_of(copies))))
        self._enter(job)
        return self._then_put(ticket, publisher, key, whole)

    def _then_put(self, first: Ticket, publisher: Session, key: str, record: bytes) -> Ticket:
        """When the first is done, say so in the record: from then on a repetition is known, not doubtful.

        If that cannot be stored it does no harm: a doubtful message is recognised by its token.
        """
        both = Ticket()

        def go_on() -> None:
            if first.error is not None or publisher.ended:
                both.finish(first.error)
                return
            part, ticket = self.putter()
            part.batch.put(AWAITING, key, record)
            part.rows += 1
            ticket.then(both.finish)

        first.then(go_on)
        return both

    def announce(
        self, session: Session, packet_id: int, guid: bytes, copies: Sequence[Copy], now: float
    ) -> Ticket | None:
        """Store who was chosen in shared groups before anybody gets the message; None: that is not needed."""
        chosen = chosen_of(copies)
        if self.store.atomic or not chosen:
            return None
        part, ticket = self.putter()
        record = kept.encode(kept.AwaitingRecord(now, guid, True, chosen))
        part.batch.put(AWAITING, pair(session.client.client_id, str(packet_id)), record)
        part.rows += 1
        return ticket

    def accept_plain(
        self, route: Route, frame: Frame, payload: bytes, client: ClientInfo, version: int, ticket: Ticket
    ) -> None:
        """The same for the byte loop: a QoS 1 message without properties that only durable receivers get."""
        self._later()
        self._enter(Job(Plain(route, frame, payload, client, version), route.lasting, self.now, ticket))

    def keep(self, session: Session, message: Message, *, retain: bool) -> None:
        """Keep a QoS 0 message for a client that is away, unless the store has more to do than it can."""
        copy = Copy(session, 0, retain, ())
        if self._flying >= FLYING_ROWS or self._jobs:
            session.drop(Whole(message).frame(copy, self.now), "queue_full")
        else:
            self.accept(message, [copy], message.timestamp or time())

    def give(self, message: Message, copy: Copy, now: float) -> None:
        """Keep a message for one durable receiver; nobody waits for it."""
        self.accept(message, [copy], now)

    def caught_up(self) -> Ticket:
        """A ticket that is done when everything that was accepted before has been handed over."""
        ticket = Ticket(0)
        if self._jobs:
            ticket.part()
            self._jobs.append(Job(Whole(Message("", b"")), (), self.now, ticket))
        return ticket

    def _enter(self, job: Job) -> None:
        if self._jobs or self._turn_rows + len(job.copies) > TURN_ROWS or self._flying >= FLYING_ROWS:
            job.ticket.part()
            self._jobs.append(job)
            self._later()
        else:
            self._hand_over(job, TURN_ROWS)

    def _work(self) -> None:
        """One turn's share of the jobs."""
        while self._jobs and self._turn_rows < TURN_ROWS and self._flying < FLYING_ROWS:
            job = self._jobs[0]
            self._hand_over(job, TURN_ROWS - self._turn_rows)
            if job.at >= len(job.copies):
                self._jobs.popleft()
                job.ticket.finish()

    def _hand_over(self, job: Job, rows: int) -> None:
        """Give the store the entries for some more receivers of a message; all of them, if they belong together."""
        source, ticket = job.source, job.ticket
        if job.packet is not None:
            copies: Sequence[Copy] = job.copies
            part = self._room(len(copies) + 1)
            self._in_order(part)
            part.batch.put(AWAITING, *job.packet)
            part.rows += 1
            self._take(part, ticket)
        else:
            copies = job.copies[job.at : job.at + rows]
        job.at += len(copies)
        self._turn_rows += len(copies)
        for alike in _alike(copies):
            draft, bound = source.draft(alike[0], job.token), self._bound(alike[0])
            step = len(alike) if job.packet is not None else PART_ROWS
            for start in range(0, len(alike), step):
                some = alike[start : start + step]
                if job.packet is None:
                    part = self._room(len(some))
                    self._take(part, ticket)
                owners, spared = _expecting(some, source.octets)
                part.batch.append(owners, draft, job.now, bound, spared)
                part.rows += len(some)
                part.deliveries.append((some, source))

    def _bound(self, copy: Copy) -> Bound:
        """How large a receiver's mailbox may grow; one object per answer, since there are few."""
        room = copy.session.mailbox.room if copy.session.mailbox is not None else (0, 0)
        bound = self._bounds.get(room)
        if bound is None:
            if len(self._bounds) >= REMEMBERED:
                self._bounds.clear()
            bound = self._bounds[room] = Bound(*room)
        return bound

    def acknowledge(self, mailbox: Mailbox, position: int) -> None:
        """An entry is done with."""
        self._acks.setdefault(mailbox, []).append(position)
        self._later()

    def mark(self, mailbox: Mailbox, position: int, mark: int) -> Ticket:
        """Note a number with an entry."""
        part, ticket = self.remover()
        part.batch.mark(mailbox.owner, position, mark)
        part.rows += 1
        return ticket

    # -- parts

    def putter(self) -> tuple[Part, Ticket]:
        """A part with room for a record, and a ticket that is done with it."""
        part = self._room(1)
        self._in_order(part)
        ticket = Ticket(0)
        self._take(part, ticket)
        return part, ticket

    def _in_order(self, part: Part) -> None:
        """A record is put: what was asked to be removed before must be begun before."""
        part.puts = True
        if self._removing is not None:
            self._begin(self._removing)

    def remover(self) -> tuple[Part, Ticket]:
        """The part for what only removes, after every record that was put before; and a ticket."""
        if self._part is not None and self._part.puts:
            self._begin(self._part)
        part = self._removing
        if part is not None and part.rows >= PART_ROWS:
            self._begin(part)
            part = None
        if part is None:
            part = self._removing = Part(Batch())
            self._later()
        ticket = Ticket(0)
        self._take(part, ticket)
        return part, ticket

    def _room(self, rows: int) -> Part:
        """The part of this turn, or one more if it is full."""
        part = self._part
        if part is not None and part.rows and part.rows + rows > PART_ROWS:
            self._begin(part)
            part = None
        if part is None:
            part = self._part = Part(Batch())
            self._later()
        return part

    def _take(self, part: Part, ticket: Ticket) -> None:
        """The ticket is not done before the part is."""
        if not part.tickets or part.tickets[-1] is not ticket:
            ticket.part()
            part.tickets.append(ticket)

    def begin_all(self) -> None:
        """What was asked for until now goes before everything that comes."""
        for part in (self._part, self._removing):
            if part is not None:
                self._begin(part)

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.now = time()
            self.loop.call_soon(self.turn_over)

    def turn_over(self) -> None:
        """Begin what this turn has collected."""
        self._scheduled = False
        if self._jobs:
            self._work()
        if self._part is not None:
            self._begin(self._part)
        acks, self._acks = self._acks, {}
        for mailbox, positions in acks.items():
            if not mailbox.session.ended:
                part = self._removing = self._removing or Part(Batch())
                part.acks[mailbox] = positions
                part.batch.acknowledge(mailbox.owner, positions)
                part.rows += len(positions)
        if self._removing is not None:
            self._begin(self._removing)
        self._turn_rows = 0
        if self._jobs and self._flying < FLYING_ROWS:
            self._later()

    def _begin(self, part: Part) -> None:
        if part is self._part:
            self._part = None
        else:
            self._removing = None
        self._flying += part.rows
        self.spawn(self._commit(part), "commit")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something beside that deals with its failures itself; `wait_for_tasks` waits for it."""
        task = self.loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def watch(self, work: Work, name: str) -> None:
        """Run something beside, again if it fails; `wait_for_tasks` waits for it."""
        task = self.supervisor.start(work, f"sessions.{name}", loop=self.loop)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.supervisor.note(f"sessions.{task.get_name()}", error)

    async def wait_for_tasks(self, patience: float) -> None:
        """Until everything that was asked for is done, or for so many seconds without any of it getting done."""
        self.turn_over()
        while self._tasks or self._jobs:
            if not self._tasks:
                self.turn_over()
                continue
            done, late = await asyncio.wait(self._tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                log.error("not_stored_in_time", tasks=len(late), consequence="what they wrote may be missing")
                break
            self.turn_over()
        for task in self._tasks:
            task.cancel()

    async def _commit(self, part: Part) -> None:
        try:
            self.check()
            answers = (await self.store.write(part.batch)).appended
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._fail(part, error)
        else:
            self._settle(part, answers)

    def _settle(self, part: Part, answers: Sequence[Appended]) -> None:
        """A part is stored: receivers that wait get their messages, then publishers their answers."""
        now = time()
        self._landed(part)
        if self.refused and (part.puts or part.deliveries):
            log.warning("stores_again", refused=self.refused)
            self.refused = 0
        present: set[Session] = set()
        each = iter(answers)
        for copies, source in part.deliveries:
            for copy in copies:
                answer = next(each)
                try:
                    if self._arrive(copy, source, answer, now):
                        present.add(copy.session)
                except Exception as error:  # noqa: BLE001 - it is stored: the others, and the publisher, must hear of it
                    self._crash(copy.session, error)
        for mailbox, positions in part.acks.items():
            mailbox.settled(positions)
        for ticket in part.tickets:
            ticket.finish()
        for session in present:
            self.pump(session, now)
        self._flush()

    def _landed(self, part: Part) -> None:
        self._flying -= part.rows
        if self._jobs:
            self._later()

    def _arrive(self, copy: Copy, source: Source, answer: Appended, now: float) -> bool:
        """One receiver's entry is stored; whether it is there to get it."""
        session = copy.session
        mailbox = session.mailbox
        if mailbox is None:
            return False
        if answer.dropped:
            mailbox.pushed_out(answer.dropped)
        if answer.over:
            self.trim(session)
        if answer.repeated:
            session.shared.stats.withdrawn["repeated"] += 1
        elif answer.position:
            if answer.position <= mailbox.before:
                mailbox.before = answer.position - 1
            mailbox.kept += 1
            session.shared.kept += 1
        if not answer.position:
            mailbox.arrived(0, None, source.octets)
            session.drop(source.frame(copy, now), "queue_full")
        elif mailbox.open and not answer.repeated:
            frame: Frame | None = None
            try:
                frame = source.frame(copy, now)
            except Exception as error:  # noqa: BLE001 - it is stored, and will be read
                self.supervisor.note("sessions.deliver", error, client_id=session.client.client_id)
            mailbox.arrived(answer.position, frame, source.octets)
        else:
            mailbox.arrived(answer.position, None, source.octets)
        return mailbox.open

    def _fail(self, part: Part, error: Exception) -> None:
        """A part could not be stored, or nobody knows."""
        self._landed(part)
        if not self.refused:  # once, not for every message
            log.error("not_stored", error=str(error), consequence="publishers are refused until the store takes writes")
        self.refused += 1
        for copies, source in part.deliveries:
            for copy in copies:
                copy.session.shared.stats.withdrawn["store_failed"] += not source.moved
                if copy.session.mailbox is not None:
                    copy.session.mailbox.arrived(0, None, source.octets)
                    if not getattr(error, "certain", False):
                        copy.session.mailbox.look_again()
        if part.acks:
            self.loop.call_later(RETRY, self._again, part.acks)
        for ticket in part.tickets:
            ticket.finish(error)
        self._flush()

    def _again(self, acks: dict[Mailbox, list[int]]) -> None:
        for mailbox, positions in acks.items():
            self._acks.setdefault(mailbox, []).extend(positions)
        self._later()

    @abstractmethod
    def trim(self, session: Session) -> None:
        """The mailbox of a client has more than it may: drop of what waits."""

    def pump(self, session: Session, now: float) -> None:
        """Send what waits for a client."""
        try:
            if session.link is not None and session.pump(now):
                session.link.pump_later()
        except Exception as error:  # noqa: BLE001 - ARCHITECTURE, rule 7
            self._crash(session, error)

    def _crash(self, session: Session, error: Exception) -> None:
        """A defect of ours: this client is sent away, and goes on with what is stored when it comes back."""
        self.supervisor.note("sessions.deliver", error, client_id=session.client.client_id)
        if session.link is not None:
            session.link.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")


def _expecting(copies: Sequence[Copy], octets: int) -> tuple[list[str], list[int]]:
    """The mailboxes of receivers, told that something comes; and up to where each is in flight."""
    owners: list[str] = []
    spared: list[int] = []
    for copy in copies:
        mailbox = copy.session.mailbox
        if mailbox is not None:
            mailbox.expect(octets)
            owners.append(mailbox.owner)
            spared.append(mailbox.spared)
    return owners, spared


def _alike(copies: Sequence[Copy]) -> list[Sequence[Copy]]:
    """Receivers that get the same entry, together."""
    if len(copies) <= 1:
        return [copies] if copies else []
    groups: dict[tuple[object, ...], list[Copy]] = {}
    for copy in copies:
        mailbox = copy.session.mailbox
        room = mailbox.room if mailbox is not None else (0, 0)
        groups.setdefault((copy.qos, copy.retain, copy.identifiers, copy.group, room), []).append(copy)
    return list(groups.values())


async def wait(ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
    """Until a ticket is done; `error` says how it went."""
    if ticket.done:
        return
    done = loop.create_future()

    def finish() -> None:
        if not done.cancelled():
            done.set_result(None)

    ticket.then(finish)
    await done
