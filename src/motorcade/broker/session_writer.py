"""Writes of durable sessions: messages for them, acknowledgements, marks, and their records.

    accept ─▶ [ one batch per message, or per read ] ─▶ store.write ─▶ stored: receivers get it, then it is answered
       └─(more than the store has room for now)─▶ [ waiting: in steps, in order ] ─┘
    acknowledgements of receivers ─▶ [ write-behind: one batch in flight ] ─▶ store.write
    records, marks ─────────────────────────────────────────────────────────▶ store.write

Rule 1: a batch has at most `MAX_ROWS` entries, and the store about `MAX_IN_FLIGHT` that it has not answered, so that
        neither asking nor answering holds up the event loop. A QoS 2 message of a durable publisher is not divided: it
        is stored with its packet id as a whole, or, where batches are not atomic, repeated under the same token.
Rule 2: what only removes is in batches of its own. A full store refuses the rest, and these give it room again.
Rule 3: acknowledgements of receivers are written later, and retried if that fails. If they are lost in a crash, the
        message is sent again (QoS 1), or only its PUBREL (QoS 2).
Rule 4: an answer of the store says which member has attached the receiver. If that is another one, it is told of the
        entry (`relay`), also if the session is still here: the store knows better.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from motorcade.broker import session_records as records
from motorcade.broker.durable_queue import DurableQueue
from motorcade.broker.frames import Frame, frame_of, message_of
from motorcade.broker.lease import SessionLease
from motorcade.broker.pubsub import Copy, GroupPeer, Route, chosen_of, noted
from motorcade.broker.session import Session
from motorcade.broker.session_records import AWAITING, owner_of, pair
from motorcade.broker.subscribers import AddressedClient, Subscriber
from motorcade.clock import time
from motorcade.commit import Commit, joined
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.delivery.record import RecordError
from motorcade.delivery.writebehind import WriteBehind
from motorcade.storage.ports import NO_BOUND, Appended, Batch, Bound, Draft, StoreFencedError, Written
from motorcade.tasks import Tasks

if TYPE_CHECKING:
    from motorcade.broker.attachments import Attachments
    from motorcade.broker.relay import Relay

log = structlog.stdlib.get_logger("motorcade.sessions")

MAX_ROWS = 256  #: entries in one batch, unless a QoS 2 message needs more
MAX_IN_FLIGHT = 4096  #: rows the store has not answered yet, before messages wait; QoS 0 is no longer kept then
TURN_ROWS = 1024  #: entries of messages that wait, handed over in one turn of the event loop
BODIES = 256  #: publishers of a topic whose entries' common part is remembered
RETRY = 1.0  #: seconds until something that failed is retried


class FullMessage:
    """A message of any kind for durable receivers, encoded once per kind of receiver."""

    __slots__ = ("_frames", "_message", "moved", "size")

    def __init__(self, message: Message, *, moved: bool = False) -> None:
        self.moved = moved  #: it is in another mailbox until it is stored
        self._message = message
        self._frames: dict[tuple[object, ...], Frame] = {}
        self.size = len(message.payload)

    def draft(self, copy: Copy, token: bytes) -> Draft:
        """Return the entry for a receiver; of one that the store finds, its beginning."""
        if isinstance(copy.session, AddressedClient):
            body, payload = records.offered_body(self._message)
            return Draft(body, payload, expires_at=self._message.expires_at or 0.0, token=token)
        message, group = self._message, copy.group.text if copy.group is not None else ""
        body, payload = records.ENTRY.encode(message, copy.qos, copy.retain, copy.identifiers, group)
        if token and group:
            token += group.encode()  # a member may get it by a subscription of its own as well
        expires_at, droppable = message.expires_at or 0.0, not copy.qos
        away = droppable and isinstance(copy.session, Subscriber)  # where it is attached, it gets QoS 0 live
        return Draft(body, payload, expires_at=expires_at, droppable=droppable, token=token, away=away)

    @property
    def topic(self) -> str:
        """Return its topic."""
        return self._message.topic

    @property
    def publisher(self) -> str:
        """Return the client that has published it."""
        return self._message.publisher

    def message(self) -> Message:
        """Return the message itself."""
        return self._message

    def frame(self, copy: Copy, now: float) -> Frame:
        """Return what goes to a receiver that is connected."""
        version = _session_of(copy).version
        kind = (version == 5, copy.qos, copy.retain, copy.identifiers)
        frame = self._frames.get(kind)
        if frame is None:
            message = noted(self._message, copy.identifiers) if copy.identifiers else self._message
            frame = frame_of(message, version, copy.qos, now, retain=copy.retain, identifiers=copy.identifiers)
            self._frames[kind] = frame
        return frame


class PlainMessage:
    """A QoS 1 message without properties, as it came in."""

    __slots__ = ("_client", "_frame", "_payload", "_route", "_version", "size")

    moved = False

    def __init__(self, route: Route, frame: Frame, payload: bytes, client: ClientInfo, version: int) -> None:
        self._route = route
        self._frame = frame
        self._payload = payload
        self._client = client
        self._version = version
        self.size = len(payload)

    def draft(self, copy: Copy, token: bytes) -> Draft:
        """Return the entry for a receiver; of one that the store finds, its beginning."""
        client, bodies = self._client, self._route.bodies
        if bodies is None:
            bodies = self._route.bodies = {}
        identifiers = None if isinstance(copy.session, AddressedClient) else copy.identifiers
        key = (client.client_id, client.username, identifiers)
        body = bodies.get(key)
        if body is None:
            if len(bodies) >= BODIES:
                bodies.clear()
            body = bodies[key] = records.plain_body(self._route.topic, client, identifiers)
        return Draft(body, self._payload, token=token)

    @property
    def topic(self) -> str:
        """Return its topic."""
        return self._route.topic

    @property
    def publisher(self) -> str:
        """Return the client that has published it."""
        return self._client.client_id

    def message(self) -> Message:
        """Return the message itself."""
        return message_of(self._frame, self._version)

    def frame(self, copy: Copy, now: float) -> Frame:
        """Return what goes to a receiver that is connected."""
        version = _session_of(copy).version
        if not copy.identifiers and (version == 5) == (self._version == 5):
            return self._frame
        message = noted(message_of(self._frame, self._version), copy.identifiers)
        return frame_of(message, version, 1, now, identifiers=copy.identifiers)


class PublisherPacket(NamedTuple):
    """The id of a QoS 2 message of a durable publisher, which is stored with the message."""

    client_id: str
    number: int
    guid: bytes

    @property
    def key(self) -> str:
        """Return the key of its record."""
        return pair(self.client_id, str(self.number))


class MessageBatch(Batch):
    """Messages for durable receivers that are written together."""

    __slots__ = ("bound", "deliveries", "keep_qos0", "rows")

    def __init__(self, bound: Bound = NO_BOUND, *, keep_qos0: bool = True) -> None:
        """`bound`: of mailboxes of sessions that are not attached here; `keep_qos0`: they get QoS 0 as well."""
        self.bound = bound
        self.keep_qos0 = keep_qos0
        self.steps = []
        self.conditions = ()
        #: In the order of the answers: receivers that get the same, what, and the entry that they have in common.
        self.deliveries: list[tuple[Sequence[Copy], FullMessage | PlainMessage, Draft]] = []
        self.rows = 0

    def add(self, message: FullMessage | PlainMessage, copies: Sequence[Copy], now: float, token: bytes = b"") -> None:
        """Add the entries of a message."""
        self.rows += len(copies)
        for alike in _alike(copies) if len(copies) > 1 else (copies,):
            draft = message.draft(alike[0], token)  # first: if it cannot be stored, nothing is to be expected
            if isinstance(alike[0].session, AddressedClient):
                self._offer(message, draft, alike[0], now)
            elif isinstance(alike[0].session, Subscriber):
                self._add_elsewhere(draft, alike, now)
            else:
                owners: list[str] = []
                spared: list[int] = []
                generations: list[int] = []
                for copy in alike:
                    queue = _queue_of(copy)
                    spared.append(queue.expect(message.size))
                    owners.append(queue.owner)
                    if queue.generation:
                        generations.append(queue.generation)
                self.append(owners, draft, now, queue.bound, spared, generations)
            self.deliveries.append((alike, message, draft))

    def _offer(self, message: FullMessage | PlainMessage, draft: Draft, copy: Copy, now: float) -> None:
        """Add what the store offers to a client that the topic names."""
        self.offer(
            copy.session.client_id,
            message.topic,
            draft,
            now,
            self.bound,
            qos=copy.qos,
            retain=copy.retain,
            own=message.publisher == copy.session.client_id,
            keep_qos0=self.keep_qos0,
        )

    def _add_elsewhere(self, draft: Draft, copies: Sequence[Copy], now: float) -> None:
        """Add entries for sessions that are not attached here; what of theirs is in flight their mailbox spares."""
        sessions = [copy.session for copy in copies if isinstance(copy.session, Subscriber)]
        owners = [owner_of(session.client_id) for session in sessions]
        self.append(owners, draft, now, self.bound, (), [session.generation for session in sessions])


class SessionWriter:
    """The writes of a node's durable sessions."""

    def __init__(
        self, lease: SessionLease, loop: asyncio.AbstractEventLoop, flush: Callable[[], None], supervisor: Tasks
    ) -> None:
        #: Queues with acknowledgements to write.
        self.acks = WriteBehind(lease, self._fill_acks, lambda: 0.0, RETRY, self._acks_written, loop)
        self.progress: asyncio.Event | None = None  #: while the node stops: set when something is done
        self.relay: Relay | None = None  #: the way to other members, if there are any; set by it
        self.attachments: Attachments | None = None  #: likewise; which clients are attached to this node
        self.bound = NO_BOUND  #: of mailboxes of sessions that are not attached here; likewise
        self.keep_qos0 = True  #: QoS 0 is stored for clients that are away; likewise
        self._lease = lease
        self._loop = loop
        self._flush = flush
        self._supervisor = supervisor
        self._in_flight = 0  # rows that the store has not answered yet
        self._refused = 0  # batches since the store began to refuse them; 0: it takes them
        self._waiting: deque[tuple[Commit[Any], Callable[[], Commit[Any]], int]] = deque()  # writes, and their rows
        self._acking: dict[DurableQueue, list[int]] = {}  # acknowledgements that are being written
        self._scheduled = False

    # -- messages in

    @property
    def full(self) -> bool:
        """Return True while the store has as much to do as it may: messages wait, and publishers should."""
        return bool(self._waiting) or self._in_flight >= MAX_IN_FLIGHT

    @property
    def rows(self) -> int:
        """Return how many rows and messages are not stored yet."""
        return len(self._waiting) + self._in_flight

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
    ) -> Commit[Any]:
        """Store a message for its durable receivers, and, of a durable publisher, the id of its QoS 2 packet.

        With a token, a repetition of the same message is recognised. `moved`: it is in another mailbox until then.
        """
        if any(_ended(copy.session) for copy in copies):  # while a plugin, or the store, was waited for
            for copy in copies:
                if isinstance(copy.session, Session) and copy.session.ended:
                    copy.session.forgo(message, "session_ended")
            copies = [copy for copy in copies if not _ended(copy.session)]
        packet = None
        if publisher is not None and packet_id:
            packet = PublisherPacket(publisher.client_id, packet_id, message.guid)
            if self.relay is not None or not self._lease.store.atomic:
                token = message.guid
        elif not copies:
            return Commit.stored(None)
        full = FullMessage(message, moved=moved)
        if not self.full and (len(copies) <= MAX_ROWS or packet is not None):
            return self._append(full, copies, now, token, packet)
        step = MAX_ROWS if packet is None else max(1, len(copies))
        parts = [copies[at : at + step] for at in range(0, len(copies) or 1, step)]
        return joined([self._wait(partial(self._append, full, part, now, token, packet), len(part)) for part in parts])

    def _wait(self, write: Callable[[], Commit[Any]], rows: int) -> Commit[Any]:
        """Write when there is room in the store, and all that waited before is written."""
        commit: Commit[Any] = Commit()
        self._waiting.append((commit, write, rows))
        self._later()
        return commit

    def caught_up(self) -> Commit[Any]:
        """Return a commit that is done when all that waits now has been handed to the store."""
        nothing: Commit[Any] = Commit.stored(None)
        return self._wait(lambda: nothing, 0) if self._waiting else nothing

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.turn_over)

    def turn_over(self) -> None:
        """Write as much of what waits as there is room for."""
        self._scheduled = False
        waiting, rows = self._waiting, 0
        while waiting and rows < TURN_ROWS and self._in_flight < MAX_IN_FLIGHT:
            commit, write, size = waiting.popleft()
            rows += size
            commit.follow(write())
        if waiting and self._in_flight < MAX_IN_FLIGHT:
            self._later()

    def keep(self, session: Session, message: Message, *, retain: bool) -> None:
        """Keep a QoS 0 message for a client that is away, unless the store has as much to do as it may."""
        identifiers = message.headers.get("subscription_ids")
        copy = Copy(session, 0, retain, identifiers if isinstance(identifiers, tuple) else ())
        if self.full:
            session.drop(FullMessage(message).frame(copy, time()), "queue_full")
        else:
            self.accept(message, [copy], message.timestamp or time())

    def keep_message(self, session: Session, message: Message, qos: int, now: float) -> None:
        """Store a retained message for a client that is away."""
        identifiers = message.headers.get("subscription_ids")
        self.accept(message, [Copy(session, qos, True, identifiers if isinstance(identifiers, tuple) else ())], now)

    def _append(
        self,
        message: FullMessage,
        copies: Sequence[Copy],
        now: float,
        token: bytes,
        packet: PublisherPacket | None,
    ) -> Commit[Written]:
        """Hand a message to the store, with its packet id if it has one.

        Where batches are not atomic, the record of the id comes first, with what a repetition has to know. It becomes
        final with the last step, so that after a crash an unfinished message is told from a finished one.
        """
        batch = self.message_batch()
        if packet is not None and not self._lease.store.atomic:
            begun = records.AwaitingRecord(now, packet.guid, True, chosen_of(copies))
            batch.put(AWAITING, packet.key, records.encode(begun))
        if copies:
            try:
                batch.add(message, copies, now, token)
            except RecordError as error:
                return Commit.failed(error)
        if packet is not None:
            done = records.AwaitingRecord(now, packet.guid, chosen=chosen_of(copies) if self.relay is not None else {})
            batch.put(AWAITING, packet.key, records.encode(done))
            batch.rows += 1
            self.decide(batch, packet.client_id)
        commit = self.write_messages(batch)
        if packet is not None:
            commit.then(partial(self.decided, packet.client_id, commit))
        return commit

    # -- to the store

    def decide(self, batch: Batch, client_id: str) -> None:
        """Make a batch a decision about a client, where several nodes may serve it (session store, rule 4)."""
        fence = self.attachments.fence(client_id) if self.attachments is not None else None
        if fence is not None:
            batch.fence(fence)

    def decided(self, client_id: str, commit: Commit[Written]) -> None:
        """Look at the outcome of a decision."""
        if self.attachments is None:
            return
        if isinstance(commit.error, StoreFencedError):
            self.attachments.lost(client_id)
        elif commit.error is None and commit.result.notes:
            self.attachments.note(client_id, max(commit.result.notes))

    def write(self, batch: Batch) -> Commit[Written]:
        """Write something else than messages."""
        commit = self._lease.write(batch)
        self._in_flight += 1
        commit.then(partial(self._answered, 1))
        return commit

    def message_batch(self) -> MessageBatch:
        """Return a batch for messages."""
        return MessageBatch(self.bound, keep_qos0=self.keep_qos0)

    def write_messages(self, batch: MessageBatch) -> Commit[Written]:
        """Write messages; receivers get them when they are stored, before the caller hears of it."""
        commit = self._lease.write(batch)
        self._in_flight += batch.rows
        commit.then(partial(self._written, commit, batch))
        return commit

    def _answered(self, rows: int) -> None:
        self._in_flight -= rows
        if self._waiting:
            self._later()
        if self.progress is not None:
            self.progress.set()

    def mark(self, queue: DurableQueue, position: int, mark: int) -> Commit[Written]:
        """Note a number with an entry."""
        batch = Batch()
        batch.mark(queue.owner, position, mark)
        return self.write(batch)

    def _fill_acks(self, batch: Batch, queues: Collection[DurableQueue]) -> None:
        """Remove entries of these queues. What the store knows already is no longer in `acked`."""
        self._in_flight += 1
        self._acking = {queue: list(queue.acked) for queue in queues if not queue.session.ended}
        for queue, positions in self._acking.items():
            batch.acknowledge(queue.owner, positions)

    def _acks_written(self, _: Collection[DurableQueue], error: BaseException | None) -> None:
        self._answered(1)
        acking, self._acking = self._acking, {}
        if error is None:
            for queue, positions in acking.items():
                queue.settled(positions)

    # -- to receivers

    def _written(self, commit: Commit[Written], batch: MessageBatch) -> None:
        """Give receivers that wait their messages: these are stored. Or note that they are not."""
        self._answered(batch.rows)
        if commit.error is not None:
            self._not_written(commit.error, batch)
            return
        if self._refused:
            log.warning("stores_again", refused=self._refused)
            self._refused = 0
        now = time()
        online: dict[Session, None] = {}
        answers = iter(commit.result.appended)
        for copies, message, draft in batch.deliveries:
            hints = self.relay.hints(draft) if self.relay is not None else None
            for copy in copies:
                answer = next(answers)
                session = copy.session
                try:
                    if isinstance(session, AddressedClient):
                        self._offered(session, message, draft, answer)
                        continue
                    if hints is not None:
                        hints.add(session, answer)
                    if not isinstance(session, Session):
                        self._arrived_elsewhere(copy, message, answer)
                    elif self._arrived(session, copy, message, answer, now):
                        online[session] = None
                except Exception as error:  # noqa: BLE001 - it is stored: the others, and the publisher, must hear of it
                    self._crash(session, error)
            if hints is not None:
                hints.send()
        if online:
            self.pump(online, now)

    def _offered(
        self, client: AddressedClient, message: FullMessage | PlainMessage, draft: Draft, answer: Appended
    ) -> None:
        """Take in the answer to an offer."""
        relay, found = self.relay, answer.offered
        if relay is None:
            return
        stats = relay.stats
        if found is None:
            relay.unmatched(message.message())
            return
        stats.restored += len(answer.dropped)
        stats.dropped["queue_full"] += len(answer.dropped)
        if answer.repeated:
            stats.withdrawn["repeated"] += 1
        elif answer.position:
            stats.withdrawn["elsewhere"] += 1
        elif found.granted or not answer.attached:
            why = "queue_full" if found.granted or self.keep_qos0 else "offline_qos0"
            relay.forgo(client.client_id, message.message(), why)
        else:
            relay.give(client, message.message(), answer)
        if answer.position:
            relay.stored(client, answer, draft)

    def _arrived_elsewhere(self, copy: Copy, message: FullMessage | PlainMessage, answer: Appended) -> None:
        """Take in the answer about the entry of a session that is not attached here."""
        relay, session = self.relay, copy.session
        if relay is None or not isinstance(session, Subscriber):
            return
        stats = relay.stats
        if answer.gone:
            relay.subscribers.forget(session.client_id, session.generation)
            stats.withdrawn["elsewhere"] += 1  # no receiver any more
        elif answer.repeated:
            stats.withdrawn["repeated"] += 1
        elif answer.position or answer.attached:  # (QoS 0 is not stored for one that is attached)
            stats.withdrawn["elsewhere"] += 1
        else:
            relay.forgo(session.client_id, message.message(), "queue_full")
        stats.restored += len(answer.dropped)
        stats.dropped["queue_full"] += len(answer.dropped)

    def _arrived(
        self, session: Session, copy: Copy, message: FullMessage | PlainMessage, answer: Appended, now: float
    ) -> bool:
        """Take in the answer about one receiver's entry; True if the receiver is there to get it."""
        queue = session.durable
        if queue is None:
            return False
        if answer.dropped:
            queue.pushed_out(answer.dropped)
        if answer.over:
            queue.store.reader.trim(queue)
        frame: Frame | None = None
        if answer.repeated:
            session.shared.stats.withdrawn["repeated"] += 1
        if not answer.position:
            session.drop(message.frame(copy, now), "session_ended" if answer.gone else "queue_full")
        elif queue.open and not answer.repeated:
            try:
                frame = message.frame(copy, now)
            except Exception as error:  # noqa: BLE001 - it is stored, and will be read
                self._supervisor.note("sessions.deliver", error, client_id=session.client.client_id)
        queue.arrived(answer.position, frame, message.size, repeated=answer.repeated)
        return queue.open

    def _not_written(self, error: BaseException, batch: MessageBatch) -> None:
        if not self._refused:  # once, not for every message
            log.error("not_stored", error=str(error), consequence="publishers are refused until the store takes writes")
        self._refused += 1
        for copies, message, _ in batch.deliveries:
            for copy in copies:
                session = copy.session
                if not isinstance(session, Session):
                    if self.relay is not None:
                        self.relay.stats.withdrawn["store_failed"] += not message.moved
                    continue
                session.shared.stats.withdrawn["store_failed"] += not message.moved
                queue = session.durable
                if queue is not None:
                    queue.arrived(0, None, message.size)
                    if not getattr(error, "certain", False):
                        queue.look_again()
        self._flush()

    def pump(self, sessions: Iterable[Session], now: float) -> None:
        """Send what waits for clients."""
        for session in sessions:
            try:
                if session.link is not None and session.pump(now):
                    session.link.pump_later()
            except Exception as error:  # noqa: BLE001 - ARCHITECTURE, rule 7
                self._crash(session, error)
        self._flush()

    def _crash(self, session: Session | Subscriber | AddressedClient | GroupPeer, error: Exception) -> None:
        """Send a client away after a defect of ours; it goes on with what is stored when it comes back."""
        self._supervisor.note("sessions.deliver", error, client_id=session.client_id)
        if isinstance(session, Session) and session.link is not None:
            session.link.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")


def _ended(session: Session | Subscriber | AddressedClient | GroupPeer) -> bool:
    return isinstance(session, Session) and session.ended


def _session_of(copy: Copy) -> Session:
    assert isinstance(copy.session, Session)  # noqa: S101 - others get no frame from here
    return copy.session


def _queue_of(copy: Copy) -> DurableQueue:
    queue = _session_of(copy).durable
    assert queue is not None  # noqa: S101 - it has one until all that was accepted for it is handed over (`retire`)
    return queue


def _alike(copies: Sequence[Copy]) -> Iterable[Sequence[Copy]]:
    """Return receivers that get the same entry, together."""
    groups: dict[tuple[object, ...], list[Copy]] = {}
    for copy in copies:
        where: object = None
        if isinstance(copy.session, AddressedClient):
            where = copy.session.client_id
        elif isinstance(copy.session, Session):
            queue = _queue_of(copy)
            where = (id(queue.bound), queue.generation > 0)
        kind = (copy.qos, copy.retain, copy.identifiers, copy.group, where)
        groups.setdefault(kind, []).append(copy)
    return groups.values()
