"""The store of durable sessions: what they are to get, their records, their end, and how they come back.

    accept ─▶ [ one batch per message, or per read ] ─▶ store.write ─▶ stored: receivers get it, then it is answered
       └─(more than the store has room for now)─▶ [ waiting: in steps, in order ] ─┘
    acknowledgements of receivers ─▶ [ gathered for a turn of the event loop ] ─▶ store.write
    records: put, delete, mark ─────────────────────────────────────────────────▶ store.write

A session that outlives its connection is durable if the node has a lasting store. The pure modules (channel, pub/sub,
registry, durable queue) ask here for what is to be stored, and get a `Commit`. The store keeps the order of the writes.

Rule 1: a batch has at most `MAX_ROWS` entries, and the store about `MAX_IN_FLIGHT` that it has not answered, so that
        neither asking nor answering holds up the event loop. A QoS 2 message of a durable publisher is not divided: it
        is stored with its packet id as a whole, or, where batches are not atomic, repeated under the same token.
Rule 2: what only removes is in batches of its own. A full store refuses the rest, and these give it room again.
Rule 3: acknowledgements of receivers are written later, and tried again if that fails. If they are lost in a crash, the
        message is sent again (QoS 1), or only its PUBREL (QoS 2).
Rule 4: a session that ends leaves nothing: mailbox first, records last, so that a crash in between ends it again.
        A new session of the same client waits for that.
Rule 5: a record that could not be written is written again later: an old one would bring back an old will.
Rule 6: one damaged record hurts one session, never the start of the node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import structlog

from motorcade.broker import session_records as records
from motorcade.broker.durable_queue import FIRST_OTHER_ID, UNKNOWN, DurableQueue
from motorcade.broker.frames import Frame, frame_of, message_of
from motorcade.broker.lease import SessionLease
from motorcade.broker.pubsub import Copy, Route, chosen_of, noted
from motorcade.broker.revoked import Revoked
from motorcade.broker.session import Doubt, Session
from motorcade.broker.session_records import AWAITING, SESSIONS, SUBSCRIPTIONS, pair
from motorcade.broker.state import BrokerState
from motorcade.clock import time
from motorcade.commit import Commit, is_refusal, joined
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.delivery.record import RecordError
from motorcade.storage.ports import Appended, Batch, Draft, Store, StoreError, Written
from motorcade.tasks import Tasks, Work

log = structlog.stdlib.get_logger("motorcade.sessions")

MAX_ROWS = 256  #: entries in one batch, unless a QoS 2 message needs more
MAX_IN_FLIGHT = 4096  #: rows the store has not answered yet, before messages wait; QoS 0 is no longer kept then
TURN_ROWS = 1024  #: entries of messages that wait, handed over in one turn of the event loop
BODIES = 256  #: publishers of a topic whose entries' common part is remembered
RETRY = 1.0  #: seconds until something that failed is tried again
STEP = 256  #: sessions and entries between two turns of the event loop
TRIM_STEP = 16  #: entries of a mailbox that is too full, read at once
CLOSE_PATIENCE = 10.0  #: seconds that the last writes may take


class FullMessage:
    """A message of any kind for durable receivers, encoded once per kind of receiver."""

    __slots__ = ("_frames", "_message", "moved", "size")

    def __init__(self, message: Message, *, moved: bool = False) -> None:
        self.moved = moved  #: it is in another mailbox until it is stored
        self._message = message
        self._frames: dict[tuple[object, ...], Frame] = {}
        self.size = len(message.payload)

    def draft(self, copy: Copy, token: bytes) -> Draft:
        """Return the entry for a receiver."""
        message, group = self._message, copy.group.text if copy.group is not None else ""
        body, payload = records.ENTRY.encode(message, copy.qos, copy.retain, copy.identifiers, group)
        if token and group:
            token += group.encode()  # a member may get it by a subscription of its own as well
        return Draft(body, payload, expires_at=message.expires_at or 0.0, droppable=not copy.qos, token=token)

    def frame(self, copy: Copy, now: float) -> Frame:
        """Return what goes to a receiver that is connected."""
        version = copy.session.version
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
        """Return the entry for a receiver."""
        client, bodies = self._client, self._route.bodies
        if bodies is None:
            bodies = self._route.bodies = {}
        key = (client.client_id, client.username, copy.identifiers)
        body = bodies.get(key)
        if body is None:
            if len(bodies) >= BODIES:
                bodies.clear()
            body = bodies[key] = records.plain_body(self._route.topic, client, copy.identifiers)
        return Draft(body, self._payload, token=token)

    def frame(self, copy: Copy, now: float) -> Frame:
        """Return what goes to a receiver that is connected."""
        version = copy.session.version
        if not copy.identifiers and (version == 5) == (self._version == 5):
            return self._frame
        message = noted(message_of(self._frame, self._version), copy.identifiers)
        return frame_of(message, version, 1, now, identifiers=copy.identifiers)


class MessageBatch(Batch):
    """Messages for durable receivers that are written together."""

    __slots__ = ("deliveries", "rows")

    def __init__(self) -> None:
        self.steps = []
        self.conditions = ()
        self.deliveries: list[tuple[Sequence[Copy], FullMessage | PlainMessage]] = []  #: in the order of the answers
        self.rows = 0

    def add(self, message: FullMessage | PlainMessage, copies: Sequence[Copy], now: float, token: bytes = b"") -> None:
        """Add the entries of a message."""
        self.rows += len(copies)
        for alike in _alike(copies) if len(copies) > 1 else (copies,):
            draft = message.draft(alike[0], token)  # first: if it cannot be stored, nothing is to be expected
            owners: list[str] = []
            spared: list[int] = []
            for copy in alike:
                queue = _queue_of(copy)
                spared.append(queue.expect(message.size))
                owners.append(queue.owner)
            self.append(owners, draft, now, queue.bound, spared)
            self.deliveries.append((alike, message))


class Waiting:
    """A message that waits for room in the store, and goes there in steps."""

    __slots__ = ("_left", "at", "commit", "copies", "message", "now", "packet", "token")

    def __init__(
        self,
        message: FullMessage | None,
        copies: Sequence[Copy],
        now: float,
        token: bytes = b"",
        packet: tuple[str, bytes] | None = None,
    ) -> None:
        self.message = message  #: None: it only waits for those before it
        self.copies = copies
        self.now = now
        self.token = token
        self.packet = packet
        self.at = 0  #: receivers that are done
        self.commit: Commit[None] = Commit()
        self._left = 1  # steps that are not stored yet, and one for those to come

    def step(self, commit: Commit[Written]) -> None:
        """Wait for one more step."""
        self._left += 1
        commit.then(partial(self.finish, commit))

    def finish(self, commit: Commit[Written] | None = None) -> None:
        """Note that a step is stored, or that none is to come."""
        self._left -= 1
        error = self.commit.error = self.commit.error or (commit.error if commit is not None else None)
        if not self._left:
            self.commit.finish(error)


class SessionStore:
    """The durable sessions of one node."""

    def __init__(
        self,
        store: Store,
        state: BrokerState,
        loop: asyncio.AbstractEventLoop,
        flush: Callable[[], None],
        supervisor: Tasks | None = None,
    ) -> None:
        self.supervisor = supervisor or Tasks()
        self.store = store
        self.loop = loop
        self._state = state
        self._flush = flush
        self._in_flight = 0  # rows that the store has not answered yet
        self._refused = 0  # batches since the store began to refuse them; 0: it takes them
        self._waiting: deque[Waiting] = deque()
        self._acks: dict[DurableQueue, list[int]] = {}
        self._scheduled = False
        self._trimming: dict[DurableQueue, bool] = {}  # mailboxes that are too full, and whether they have grown since
        self._unsaved: set[Session] = set()  # their records are out of date
        self._retiring: dict[str, Commit[None]] = {}
        self._leaving: dict[str, DurableQueue] = {}  # of sessions that have ended, until the store has removed them
        self._lease: SessionLease | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress: asyncio.Event | None = None  # while the node stops: set when something is done

    # -- messages

    @property
    def full(self) -> bool:
        """Return True while the store has as much to do as it may: messages wait, and publishers should."""
        return bool(self._waiting) or self._in_flight >= MAX_IN_FLIGHT

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
        if any(copy.session.ended for copy in copies):  # while a plugin, or the store, was waited for
            for copy in copies:
                if copy.session.ended:
                    copy.session.forgo(message, "session_ended")
            copies = [copy for copy in copies if not copy.session.ended]
        packet = None
        if publisher is not None and packet_id:
            packet = pair(publisher.client.client_id, str(packet_id)), message.guid
            if not self.store.atomic:
                token = message.guid
        elif not copies:
            return Commit.stored(None)
        full = FullMessage(message, moved=moved)
        if self.full or (len(copies) > MAX_ROWS and packet is None):
            waiting = Waiting(full, copies, now, token, packet)
            self._waiting.append(waiting)
            self._later()
            return waiting.commit
        return self._append(full, copies, now, token, packet)

    def _append(
        self,
        message: FullMessage,
        copies: Sequence[Copy],
        now: float,
        token: bytes,
        packet: tuple[str, bytes] | None,
    ) -> Commit[Written]:
        """Hand a message to the store, with its packet id if it has one.

        Where batches are not atomic, the record of the id comes first, with what a repetition has to know. It becomes
        final with the last step, so that after a crash an unfinished message is told from a finished one.
        """
        batch = MessageBatch()
        if packet is not None and not self.store.atomic:
            begun = records.AwaitingRecord(now, packet[1], True, chosen_of(copies))
            batch.put(AWAITING, packet[0], records.encode(begun))
        if copies:
            try:
                batch.add(message, copies, now, token)
            except RecordError as error:
                return Commit.failed(error)
        if packet is not None:
            batch.put(AWAITING, packet[0], records.encode(records.AwaitingRecord(now, packet[1])))
            batch.rows += 1
        return self.write(batch)

    def write(self, batch: MessageBatch) -> Commit[Written]:
        """Write messages; receivers get them when they are stored, before the caller hears of it."""
        commit = self._write(batch)
        self._in_flight += batch.rows
        commit.then(partial(self._written, commit, batch))
        return commit

    def _write(self, batch: Batch) -> Commit[Written]:
        if self._lease is not None:
            try:
                self._lease.check()
            except StoreError as error:
                return Commit.failed(error)
        return self.store.write(batch)

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
        for copies, message in batch.deliveries:
            for copy in copies:
                answer = next(answers)
                try:
                    if self._arrived(copy, message, answer, now):
                        online[copy.session] = None
                except Exception as error:  # noqa: BLE001 - it is stored: the others, and the publisher, must hear of it
                    self._crash(copy.session, error)
        if online:
            for session in online:
                self.pump(session, now)
            self._flush()

    def _answered(self, rows: int) -> None:
        self._in_flight -= rows
        if self._waiting:
            self._later()
        if self._progress is not None:
            self._progress.set()

    def _arrived(self, copy: Copy, message: FullMessage | PlainMessage, answer: Appended, now: float) -> bool:
        """Take in the answer about one receiver's entry; True if the receiver is there to get it."""
        session = copy.session
        queue = session.durable
        if queue is None:
            return False
        position = answer.position
        if answer.dropped:
            queue.pushed_out(answer.dropped)
        if answer.over:
            self._trim(queue)
        if answer.repeated:
            session.shared.stats.withdrawn["repeated"] += 1
        elif position:
            queue.count_in(position)
        frame: Frame | None = None
        if not position:
            session.drop(message.frame(copy, now), "queue_full")
        elif queue.open and not answer.repeated:
            try:
                frame = message.frame(copy, now)
            except Exception as error:  # noqa: BLE001 - it is stored, and will be read
                self.supervisor.note("sessions.deliver", error, client_id=session.client.client_id)
        queue.arrived(position, frame, message.size)
        return queue.open

    def _not_written(self, error: BaseException, batch: MessageBatch) -> None:
        if not self._refused:  # once, not for every message
            log.error("not_stored", error=str(error), consequence="publishers are refused until the store takes writes")
        self._refused += 1
        for copies, message in batch.deliveries:
            for copy in copies:
                copy.session.shared.stats.withdrawn["store_failed"] += not message.moved
                queue = copy.session.durable
                if queue is not None:
                    queue.arrived(0, None, message.size)
                    if not getattr(error, "certain", False):
                        queue.look_again()
        self._flush()

    def keep(self, session: Session, message: Message, *, retain: bool) -> None:
        """Keep a QoS 0 message for a client that is away, unless the store has as much to do as it may."""
        identifiers = message.headers.get("subscription_ids")
        copy = Copy(session, 0, retain, identifiers if isinstance(identifiers, tuple) else ())
        if self.full:
            session.drop(FullMessage(message).frame(copy, time()), "queue_full")
        else:
            self.accept(message, [copy], message.timestamp or time())

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        """Write what this turn has gathered, and as much of what waits as there is room for."""
        self._scheduled = False
        self._write_acks()
        waiting, rows = self._waiting, 0
        while waiting and rows < TURN_ROWS and self._in_flight < MAX_IN_FLIGHT:
            first = waiting[0]
            copies = first.copies if first.packet is not None else first.copies[first.at : first.at + MAX_ROWS]
            if first.message is not None:
                first.step(self._append(first.message, copies, first.now, first.token, first.packet))
            first.at += len(copies)
            rows += len(copies)
            if first.at >= len(first.copies):
                waiting.popleft()
                first.finish()
        if waiting and self._in_flight < MAX_IN_FLIGHT:
            self._later()

    def _caught_up(self) -> Commit[None]:
        """Return a commit that is done when all that waits now has been handed to the store."""
        if not self._waiting:
            return Commit.stored(None)
        self._waiting.append(Waiting(None, (), 0.0))
        return self._waiting[-1].commit

    # -- what durable queues ask for

    def acknowledge(self, queue: DurableQueue, position: int) -> None:
        """Remove an entry, at the end of this turn."""
        self._acks.setdefault(queue, []).append(position)
        self._later()

    def _write_acks(self) -> None:
        acks, self._acks = self._acks, {}
        acks = {queue: positions for queue, positions in acks.items() if not queue.session.ended}
        if acks:
            batch = Batch()
            for queue, positions in acks.items():
                batch.acknowledge(queue.owner, positions)
            commit = self._write(batch)
            self._in_flight += len(acks)
            commit.then(partial(self._acks_written, commit, acks))

    def _acks_written(self, commit: Commit[Written], acks: dict[DurableQueue, list[int]]) -> None:
        self._answered(len(acks))
        if commit.error is not None:
            self.loop.call_later(RETRY, self._retry_acks, acks)
            return
        for queue, positions in acks.items():
            queue.settled(positions)

    def _retry_acks(self, acks: dict[DurableQueue, list[int]]) -> None:
        for queue, positions in acks.items():
            self._acks.setdefault(queue, []).extend(positions)
        self._later()

    def mark(self, queue: DurableQueue, position: int, mark: int) -> Commit[Written]:
        """Note a number with an entry."""
        batch = Batch()
        batch.mark(queue.owner, position, mark)
        return self._write_one(batch)

    def _write_one(self, batch: Batch) -> Commit[Written]:
        """Write something else than messages."""
        commit = self._write(batch)
        self._in_flight += 1
        commit.then(partial(self._answered, 1))
        return commit

    def fetch(self, queue: DurableQueue, limit: int) -> None:
        """Read entries for a client that has room."""
        self._watch(partial(self._fetch, queue, queue.epoch, limit), "fetch")

    async def _fetch(self, queue: DurableQueue, epoch: int, limit: int) -> None:
        """Read from the cursor on: it knows what an attempt that failed has taken already."""
        while queue.serves(epoch) and queue.reading:
            try:
                await self._count_sent(queue)
                tail, now = queue.tail, time()
                entries = await self.store.mailboxes.read(queue.owner, queue.cursor, limit, now)
            except StoreError as error:
                log.error("not_read", client_id=queue.session.client.client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
                continue
            if queue.serves(epoch):
                queue.fetched(entries, limit, tail)
                self.pump(queue.session, now)
                self._flush()
            return

    def pump(self, session: Session, now: float) -> None:
        """Send what waits for a client."""
        try:
            if session.link is not None and session.pump(now):
                session.link.pump_later()
        except Exception as error:  # noqa: BLE001 - ARCHITECTURE, rule 7
            self._crash(session, error)

    def _crash(self, session: Session, error: Exception) -> None:
        """Send a client away after a defect of ours; it goes on with what is stored when it comes back."""
        self.supervisor.note("sessions.deliver", error, client_id=session.client.client_id)
        if session.link is not None:
            session.link.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")

    # -- a mailbox that is too full

    def _trim(self, queue: DurableQueue) -> None:
        """Drop of what waits in a mailbox, oldest first, until the rest fits (durable queue, rule 5)."""
        if queue not in self._trimming:
            self._watch(partial(self._trim_all, queue), "trim")
        self._trimming[queue] = True

    async def _trim_all(self, queue: DurableQueue) -> None:
        while self._trimming.get(queue) and not queue.session.ended:
            self._trimming[queue] = False
            try:
                await self._count_sent(queue)
                await self._drop_waiting(queue)
            except StoreError as error:
                log.error("mailbox_not_trimmed", client_id=queue.session.client.client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
                self._trimming[queue] = True
        self._trimming.pop(queue, None)

    async def _count_sent(self, queue: DurableQueue) -> None:
        """After a crash: find the last entry that may have been sent before it (durable queue, rule 3)."""
        after = count = size = 0
        while queue.sent_to == UNKNOWN:
            limit = min(queue.max_sent - count, TRIM_STEP)
            entries = await self.store.mailboxes.read(queue.owner, after, limit, time())
            count += len(entries)
            size += sum(len(entry.body) + len(entry.payload) for entry in entries)
            after = entries[-1].position if entries else after
            if len(entries) < limit or count >= queue.max_sent:
                queue.know_sent(after, count, size)

    async def _drop_waiting(self, queue: DurableQueue) -> None:
        info = await self.store.mailboxes.info(queue.owner)
        bound = queue.bound
        # What is acknowledged may still be counted.
        entries = info.entries - len(queue.acked)
        size = info.size_bytes * entries // max(1, info.entries)
        after = queue.sent_to
        while 0 < bound.entries < entries or 0 < bound.size_bytes < size:
            found = await self.store.mailboxes.read(queue.owner, after, TRIM_STEP, time())
            if queue.session.ended:
                return  # the next session of its client may have the mailbox by now
            for entry in found:
                after = entry.position
                if (0 < bound.entries < entries or 0 < bound.size_bytes < size) and queue.discard(entry):
                    entries -= 1
                    size -= len(entry.body) + len(entry.payload)
            if len(found) < TRIM_STEP:
                return

    # -- records of sessions

    def make_durable(self, session: Session) -> None:
        """Give a new session its queue."""
        session.durable = DurableQueue(session, self)

    def save(self, session: Session) -> Commit[Any]:
        """Write the record of a session as it is now; not before what its client had earlier is gone."""
        before = self._retiring.get(session.client.client_id)
        if before is None:
            return self._save(session)
        commit: Commit[None] = Commit()

        def go_on() -> None:
            saved = self._save(session)
            saved.then(lambda: commit.finish(saved.error))

        before.then(go_on)
        return commit

    def gone(self, client_id: str) -> Commit[None] | None:
        """Return the end of what a client had earlier; None if there is nothing to wait for."""
        return self._retiring.get(client_id)

    def _save(self, session: Session) -> Commit[Written]:
        batch = Batch()
        batch.put(SESSIONS, session.client.client_id, records.encode(_record(session)))
        commit = self._write_one(batch)
        commit.then(partial(self._saved, session, commit))
        return commit

    def _saved(self, session: Session, commit: Commit[Written]) -> None:
        if commit.error is None:
            self._unsaved.discard(session)
        elif session not in self._unsaved and not session.ended:
            self._unsaved.add(session)
            self.loop.call_later(RETRY, self._save_again, session)

    def _save_again(self, session: Session) -> None:
        if session in self._unsaved:
            self._unsaved.discard(session)
            if not session.ended:
                self._save(session)

    def subscribe(
        self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()
    ) -> Commit[Written]:
        """Write changed subscriptions."""
        client_id = session.client.client_id
        batch = Batch()
        for subscription in added:
            record = records.subscription_record(subscription)
            batch.put(SUBSCRIPTIONS, pair(client_id, subscription.filter), record)
        for filter_ in removed:
            batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
        return self._write_one(batch)

    def release(self, session: Session, packet_ids: Iterable[int]) -> Commit[Written]:
        """Remove ids of QoS 2 messages of a client; they may be used again when the commit is done."""
        batch = Batch()
        for number in packet_ids:
            batch.delete(AWAITING, pair(session.client.client_id, str(number)))
        return self._write_one(batch)

    # -- the end of sessions

    def retire(self, session: Session, filters: Sequence[str]) -> None:
        """Remove a session that has ended; `filters` were its subscriptions."""
        client_id = session.client.client_id
        waits = [self._caught_up()]
        if client_id in self._retiring:
            waits.append(self._retiring[client_id])
        commit = self._retiring[client_id] = Commit()
        if session.durable is not None:
            self._leaving[client_id] = session.durable
        self._watch(partial(self._retire, session, filters, joined(waits), commit), "retire")

    async def _retire(
        self, session: Session, filters: Sequence[str], earlier: Commit[None], commit: Commit[None]
    ) -> None:
        client_id = session.client.client_id
        await earlier
        if session.owed is not None:
            await session.owed.done
        while True:
            try:
                await self._remove(session, filters)
                break
            except StoreError as error:
                log.error("session_not_removed", client_id=client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
        if self._retiring.get(client_id) is commit:
            del self._retiring[client_id]
            self._leaving.pop(client_id, None)
        session.durable = None  # they refer to each other: without the collector neither would ever be freed
        commit.finish()

    async def _remove(self, session: Session, filters: Sequence[str]) -> None:
        client_id = session.client.client_id
        owner = records.owner_of(client_id)
        queue = session.durable
        if queue is not None and any(filter_.startswith("$share/") for filter_ in filters):
            await self._hand_on(queue)
        lost = await self.store.mailboxes.forget(owner)
        if queue is not None:
            queue.forgotten(lost)
        batch = Batch()
        for filter_ in filters:
            batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
        for number in session.awaiting or ():
            batch.delete(AWAITING, pair(client_id, str(number)))
        batch.delete(SESSIONS, client_id)
        await self.store.write(batch)

    async def _hand_on(self, queue: DurableQueue) -> None:
        """Give unacknowledged messages of shared groups to other members. [MQTT-4.8.2-5]

        Each is taken out of this mailbox when it is in the other one: a repetition goes on where this one ended.
        """
        await self._count_sent(queue)
        after = 0
        while True:
            now = time()
            entries = await self.store.mailboxes.read(queue.owner, after, STEP, now)
            for entry in entries:
                after = entry.position
                try:
                    record = records.ENTRY.decode(entry.body)
                except Exception as error:  # noqa: BLE001 - rule 6
                    log.error("entry_unreadable", owner=queue.owner, position=after, error=repr(error))  # noqa: TRY400
                    continue
                if record.group and not entry.mark and not (record.granted == 2 and after <= queue.sent_to):
                    message = records.message_from(record, entry.payload)
                    await self._give_on(message, record.group, queue, after, now)
            if len(entries) < STEP:
                return

    async def _give_on(self, message: Message, text: str, queue: DurableQueue, position: int, now: float) -> None:
        """Give one message to another member of its group, if there is one, and room."""
        pubsub = self._state.pubsub
        group = pubsub.group(text)
        copy = pubsub.choose(group, message, without=queue.session) if group is not None else None
        if copy is None:
            return
        if copy.session.durable is not None and copy.qos:
            try:
                await self.accept(message, [copy], now, token=message.guid, moved=True)
            except StoreError as error:
                if is_refusal(error):
                    return
                raise
        else:
            pubsub.offer(message, copy, now)
            self._flush()
        await self.store.mailboxes.acknowledge(queue.owner, [position])
        queue.left((position,))

    def expired(self, entries: Iterable[tuple[str, int]]) -> None:
        """Note that the store has removed entries whose time was over."""
        sessions = self._state.registry.sessions
        for owner, position in entries:
            if not owner.startswith(records.OWNER):
                continue
            client_id = owner[len(records.OWNER) :]
            session, queue = sessions.get(client_id), self._leaving.get(client_id)
            if queue is None and session is not None:
                queue = session.durable
            if queue is not None:
                queue.expired(position)

    # -- start and end

    async def restore(self) -> None:
        """Bring the sessions back that the process before this one has left."""
        now = time()
        registry, pubsub = self._state.registry, self._state.pubsub
        found = lost = 0
        async for client_id, value in self.store.records.scan(SESSIONS, now):
            try:
                session = self._restored(client_id, records.decode_session(value), now)
            except Exception as error:  # noqa: BLE001 - one damaged record must not keep all others from their clients
                log.error("session_unreadable", client_id=client_id, error=repr(error))  # noqa: TRY400
                continue
            registry.restore(session)
            if session.disconnected_at == now:
                self._save(session)  # it was connected: its expiry begins now, not with every start
            found += 1
            await self._breathe(found)
        async for key, value in self.store.records.scan(SUBSCRIPTIONS, now):
            lost += not self._restore_one(SUBSCRIPTIONS, key, partial(self._resubscribe, key, value))
            await self._breathe(pubsub.subscriptions)
        async for key, value in self.store.records.scan(AWAITING, now):
            lost += not self._restore_one(AWAITING, key, partial(self._await_again, key, value))
        log.info("sessions_restored", sessions=found, subscriptions=pubsub.subscriptions, orphans=lost)

    def _restore_one(self, collection: str, key: str, restore: Callable[[], bool]) -> bool:
        """Bring one record back; remove one that belongs to no session, or cannot be read."""
        try:
            if restore():
                return True
        except Exception as error:  # noqa: BLE001 - as above
            log.error("record_unreadable", collection=collection, key=key, error=repr(error))  # noqa: TRY400
        batch = Batch()
        batch.delete(collection, key)
        self._write_one(batch)
        return False

    def _resubscribe(self, key: str, value: bytes) -> bool:
        client_id, filter_ = records.unpair(key)
        session = self._state.registry.sessions.get(client_id)
        if session is not None:
            self._state.pubsub.subscribe(session, records.subscription_from(filter_, value))
            if session.revoked is not None:
                session.revoked.allow(filter_)
        return session is not None

    def _await_again(self, key: str, value: bytes) -> bool:
        client_id, number = records.unpair(key)
        session = self._state.registry.sessions.get(client_id)
        if session is not None:
            record = records.decode_awaiting(value)
            session.await_release(int(number), record.time)
            if record.begun:
                session.doubt(int(number), Doubt(record.guid, record.chosen))
        return session is not None

    async def _breathe(self, count: int) -> None:
        if not count % STEP:
            await asyncio.sleep(0)

    def _restored(self, client_id: str, record: records.SessionRecord, now: float) -> Session:
        client = records.client_from(client_id, record)
        session = Session(self._state.shared, client, record.created_at)
        known = not record.connected and record.sent_to >= 0
        session.durable = DurableQueue(
            session, self, restored=True, sent_to=record.sent_to if known else UNKNOWN, window=record.window
        )
        # The client may still hold an id of the process before: begin elsewhere.
        session.next_id = FIRST_OTHER_ID + int(now * 1000) % (65536 - FIRST_OTHER_ID)
        session.expiry = record.expiry
        # A client that was connected has lost its connection with the process that served it.
        session.disconnected_at = now if record.connected else record.disconnected_at
        # Never later than from now on: the clock may have been set back meanwhile.
        latest = now + record.expiry
        session.expires_at = min(record.expires_at, latest) if not record.connected and record.expires_at else latest
        if record.revoked:
            session.revoked = Revoked(record.revoked, ())
        will = record.will
        if will is not None:
            session.will = records.will_from(will, client)
            session.will_delay = will.delay
            session.will_at = now + will.delay if will.at is None else min(will.at, now + will.delay)
        return session

    async def lead(self, node: str, lost: Callable[[str], None]) -> None:
        """On a store that several nodes can reach: be the one that serves the sessions, or raise `StoreError`."""
        self._lease = SessionLease(self.store.coordination, node, self.supervisor)
        await self._lease.begin(lost)

    def check(self) -> None:
        """Raise `StoreError` if nothing may be written now."""
        if self._lease is not None:
            self._lease.check()

    def _watch(self, work: Work, name: str) -> None:
        """Run something beside, again if it fails; `close` waits for it."""
        task = self.supervisor.start(work, f"sessions.{name}", loop=self.loop)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._answered(0)

    async def close(self) -> None:
        """Wait until all that was asked for is stored, as long as something of it gets done."""
        progress = self._progress = asyncio.Event()
        self._turn_over()
        while self._tasks or self._waiting or self._in_flight:
            progress.clear()
            try:
                async with asyncio.timeout(CLOSE_PATIENCE):
                    await progress.wait()
            except TimeoutError:
                log.error("not_stored_in_time", tasks=len(self._tasks), rows=self._in_flight)  # noqa: TRY400
                break
            self._turn_over()
        for task in self._tasks:
            task.cancel()
        if self._lease is not None:
            await self._lease.end()


def _record(session: Session) -> records.SessionRecord:
    client = session.client
    will = None
    if session.will is not None:
        will = records.will_record(session.will, session.will_delay, session.will_at)
    elif session.owed is not None:
        will = records.will_record(session.owed.will, 0, 0.0)
    queue = session.durable
    sent_to = queue.sent_to if queue is not None and session.link is None else UNKNOWN
    # This connection may take fewer at once than were sent before: none of them must be forgotten in a crash.
    window = max(session.limit if session.link is not None else 0, queue.held if queue is not None else 0)
    return records.SessionRecord(
        client.username,
        session.version,
        session.expiry,
        session.created_at,
        session.link is not None,
        session.expires_at,
        session.disconnected_at,
        will,
        client.superuser,
        client.attributes,
        client.host,
        client.listener,
        -1 if sent_to == UNKNOWN else sent_to,
        window,
        sorted(session.revoked.filters) if session.revoked is not None else [],
    )


def _queue_of(copy: Copy) -> DurableQueue:
    queue = copy.session.durable
    assert queue is not None  # noqa: S101 - it has one until all that was accepted for it is handed over (`retire`)
    return queue


def _alike(copies: Sequence[Copy]) -> Iterable[Sequence[Copy]]:
    """Return receivers that get the same entry, together."""
    groups: dict[tuple[object, ...], list[Copy]] = {}
    for copy in copies:
        groups.setdefault((copy.qos, copy.retain, copy.identifiers, copy.group, id(_queue_of(copy).bound)), []).append(
            copy
        )
    return groups.values()
