"""Durable sessions: what the broker writes to the store, when, and how it comes back after a restart.

A session that outlives its connection is durable if the node has a lasting store. The pure modules (channel, pub/sub,
registry, mailbox) say what is to be kept and get a `Ticket`; here it is carried out.

    accept, save, subscribe …  ─▶ [ part: everything of one turn of the event loop ] ─commit─▶ tickets are done
    fetch                      ─▶ read ─▶ Mailbox.fetched ─▶ Session.pump

Rule 1: what is asked for in one turn is committed together, in parts of at most `PART_ROWS` rows, so that no commit
        holds up the others. A QoS 2 message with its packet id is never divided: it happens as a whole, or, on a store
        whose batches are not atomic, is repeated under the same token.
Rule 2: parts are begun in order, so writes for one mailbox or record are applied in order (ports, rule 6).
Rule 3: acknowledgements of receivers ride along. If they are lost in a crash, the message is sent again (QoS 1), or
        only its PUBREL (QoS 2).
Rule 4: a session that ends leaves nothing: mailbox first, records last, so that a crash in between ends it again.
        A new session of the same client waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from time import time
from typing import Any, NamedTuple

import structlog

from motorcade.broker import kept
from motorcade.broker.frames import Frame, frame_of, message_of
from motorcade.broker.kept import AWAITING, SESSIONS, SUBSCRIPTIONS, pair
from motorcade.broker.mailbox import Mailbox
from motorcade.broker.plane import Plane
from motorcade.broker.pubsub import Copy, Route, noted
from motorcade.broker.session import Session
from motorcade.broker.ticket import Ticket
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.storage.ports import Appended, Batch, Bound, Draft, Lease, Store, StoreError

log = structlog.stdlib.get_logger("motorcade.keeper")

PART_ROWS = 256  #: rows in one commit, unless a QoS 2 message needs more
BODIES = 256  #: publishers of a topic whose entries' common part is remembered
RETRY = 1.0  #: seconds until something that failed is tried again
STEP = 256  #: sessions and entries between two turns of the event loop

CLOSE_PATIENCE = 10.0  #: seconds that the last writes may take

LEASE = "sessions"  #: name of the lease that says which node serves the sessions of a shared store
LEASE_TTL = 3.0  #: seconds after which a node that died is forgotten


class _Whole:
    """A message of any kind, encoded once per kind of receiver."""

    __slots__ = ("_frames", "_message")

    def __init__(self, message: Message) -> None:
        self._message = message
        self._frames: dict[tuple[object, ...], Frame] = {}

    def frame(self, copy: Copy, now: float) -> Frame:
        """The frame for a receiver."""
        version = copy.session.version
        kind = (version == 5, copy.qos, copy.retain, copy.identifiers)
        frame = self._frames.get(kind)
        if frame is None:
            message = noted(self._message, copy.identifiers) if copy.identifiers else self._message
            frame = frame_of(message, version, copy.qos, now, retain=copy.retain, identifiers=copy.identifiers)
            self._frames[kind] = frame
        return frame


class _Plain:
    """A QoS 1 message without properties, as it came in."""

    __slots__ = ("_frame", "_version")

    def __init__(self, frame: Frame, version: int) -> None:
        self._frame = frame
        self._version = version

    def frame(self, copy: Copy, now: float) -> Frame:
        """The frame for a receiver."""
        version = copy.session.version
        if not copy.identifiers and (version == 5) == (self._version == 5):
            return self._frame
        message = noted(message_of(self._frame, self._version), copy.identifiers)
        return frame_of(message, version, 1, now, identifiers=copy.identifiers)


class _Delivery(NamedTuple):
    """One receiver's copy of a message in a part."""

    copy: Copy
    source: _Whole | _Plain


class _Part:
    """What is committed together."""

    __slots__ = ("acks", "batch", "deliveries", "rows", "tickets")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.rows = 0
        self.deliveries: list[_Delivery] = []  #: in the order of the batch's answers
        self.tickets: list[Ticket] = []
        self.acks: dict[Mailbox, list[int]] = {}


class Keeper:
    """The durable sessions of one node."""

    def __init__(self, store: Store, plane: Plane, loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
        self._store = store
        self._plane = plane
        self._loop = loop
        self._flush = flush
        self.now = time()  #: of this turn, about
        self._bounds: dict[int, Bound] = {}
        self._part: _Part | None = None
        self._acks: dict[Mailbox, list[int]] = {}
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: dict[str, Ticket] = {}
        self._lease: Lease | None = None
        self.failed = 0  #: commits that the store refused or lost

    # -- messages

    def accept(
        self, message: Message, copies: Sequence[Copy], now: float, publisher: Session | None = None, packet_id: int = 0
    ) -> Ticket:
        """Keep a message for its durable receivers, and, of a durable publisher, the id of its QoS 2 packet."""
        ticket = Ticket()
        token = b""
        whole = bool(packet_id)
        part = self._room(len(copies) + 1 if whole else 1)
        if publisher is not None and packet_id:
            token = b"" if self._store.atomic else message.guid
            record = kept.encode(kept.AwaitingRecord(now, message.guid))
            part.batch.put(AWAITING, pair(publisher.client.client_id, str(packet_id)), record)
            part.rows += 1
        self._take(part, ticket)
        source = _Whole(message)
        for alike in _alike(copies):
            first = alike[0]
            draft = self._draft(message, first, token)
            bound = self._bound(first)
            while alike:
                size = len(alike) if whole else PART_ROWS
                some, alike = alike[:size], alike[size:]  # noqa: PLW2901 - what is left
                if not whole:
                    part = self._room(len(some))
                    self._take(part, ticket)
                part.batch.append([copy.session.mailbox.owner for copy in some], draft, now, bound)  # type: ignore[union-attr]
                part.rows += len(some)
                part.deliveries += [_Delivery(copy, source) for copy in some]
        for copy in copies:
            mailbox = copy.session.mailbox
            if mailbox is not None:
                mailbox.expect()
        ticket.finish()  # its own part: from here on only those of the store are open
        return ticket

    def accept_plain(
        self, route: Route, frame: Frame, payload: bytes, client: ClientInfo, version: int, ticket: Ticket
    ) -> None:
        """The same for the byte loop: a QoS 1 message without properties that only durable receivers get."""
        source = _Plain(frame, version)
        now = self.now
        for alike in _alike(route.lasting):
            first = alike[0]
            key = (client.client_id, client.username, first.identifiers)
            body = route.bodies.get(key)
            if body is None:
                if len(route.bodies) >= BODIES:
                    route.bodies.clear()
                body = route.bodies[key] = kept.plain_body(route.topic, client, first.identifiers)
            draft = Draft(body, payload)
            bound = self._bound(first)
            for start in range(0, len(alike), PART_ROWS):
                some = alike[start : start + PART_ROWS]
                part = self._room(len(some))
                self._take(part, ticket)
                owners = []
                for copy in some:
                    mailbox = copy.session.mailbox
                    if mailbox is not None:
                        mailbox.expect()
                        owners.append(mailbox.owner)
                    part.deliveries.append(_Delivery(copy, source))
                part.batch.append(owners, draft, now, bound)
                part.rows += len(some)

    def _bound(self, copy: Copy) -> Bound:
        """How large a receiver's mailbox may grow; one object per answer, since there are few."""
        room = copy.session.mailbox.room if copy.session.mailbox is not None else 0
        bound = self._bounds.get(room)
        if bound is None:
            bound = self._bounds[room] = Bound(room, self._plane.session_options.queue_bytes)
        return bound

    def keep(self, session: Session, message: Message, *, retain: bool) -> None:
        """Keep a QoS 0 message for a client that is away."""
        self.accept(message, [Copy(session, 0, retain, ())], message.timestamp or time())

    def _draft(self, message: Message, copy: Copy, token: bytes) -> Draft:
        group = f"$share/{copy.group.name}/{copy.group.filter}" if copy.group is not None else ""
        record = kept.record_of(message, copy.qos, retain=copy.retain, identifiers=copy.identifiers, group=group)
        return Draft(
            kept.encode(record),
            message.payload,
            expires_at=message.expires_at or 0.0,
            droppable=not copy.qos,
            token=token,
        )

    def release(self, session: Session, packet_ids: Iterable[int]) -> Ticket:
        """QoS 2 messages of the client are released: their ids may be used again when the ticket is done."""
        part, ticket = self._one()
        for number in packet_ids:
            part.batch.delete(AWAITING, pair(session.client.client_id, str(number)))
            part.rows += 1
        return ticket

    def acknowledge(self, mailbox: Mailbox, position: int) -> None:
        """An entry is done with."""
        self._acks.setdefault(mailbox, []).append(position)
        self._later()

    def mark(self, mailbox: Mailbox, position: int, mark: int) -> Ticket:
        """Note a number with an entry."""
        part, ticket = self._one()
        part.batch.mark(mailbox.owner, position, mark)
        part.rows += 1
        return ticket

    # -- parts

    def _one(self) -> tuple[_Part, Ticket]:
        """A part with room for a row, and a ticket that is done with it."""
        part = self._room(1)
        ticket = Ticket(0)
        self._take(part, ticket)
        return part, ticket

    def _room(self, rows: int) -> _Part:
        """The part of this turn, or one more if it is full."""
        part = self._part
        if part is not None and part.rows and part.rows + rows > PART_ROWS:
            self._begin(part)
            part = None
        if part is None:
            part = self._part = _Part(self._store.batch())
            self._later()
        return part

    def _take(self, part: _Part, ticket: Ticket) -> None:
        """The ticket is not done before the part is."""
        if not part.tickets or part.tickets[-1] is not ticket:
            ticket.part()
            part.tickets.append(ticket)

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.now = time()
            self._loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._scheduled = False
        part, acks = self._part, self._acks
        if acks:
            self._acks = {}
            if part is None:
                part = _Part(self._store.batch())
            part.acks = acks
            for mailbox, positions in acks.items():
                part.batch.acknowledge(mailbox.owner, positions)
        if part is not None:
            self._begin(part)

    def _begin(self, part: _Part) -> None:
        self._part = None
        self._spawn(self._commit(part), "commit")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("keeper_failed", task=task.get_name(), error=repr(task.exception()), exc_info=task.exception())

    async def _commit(self, part: _Part) -> None:
        try:
            answers = await part.batch.commit()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._refuse(part, error)
        else:
            self._settle(part, answers)

    def _settle(self, part: _Part, answers: Sequence[Appended]) -> None:
        """A part is stored: receivers that wait get their messages, then publishers their answers."""
        now = time()
        touched: set[Session] = set()
        for delivery, answer in zip(part.deliveries, answers, strict=True):
            self._arrive(delivery, answer, now)
            touched.add(delivery.copy.session)
        for mailbox, positions in part.acks.items():
            mailbox.settled(positions)
        for ticket in part.tickets:
            ticket.finish()
        for session in touched:
            self._pump(session, now)
        self._flush()

    def _arrive(self, delivery: _Delivery, answer: Appended, now: float) -> None:
        copy = delivery.copy
        session = copy.session
        mailbox = session.mailbox
        if mailbox is None:
            return
        if answer.dropped:
            session.shared.stats.dropped["queue_full"] += len(answer.dropped)
        if not answer.position:
            mailbox.arrived(0, None)
            session.drop(delivery.source.frame(copy, now), "queue_full")
        elif mailbox.open and not answer.repeated:
            mailbox.arrived(answer.position, delivery.source.frame(copy, now))
        else:
            mailbox.arrived(answer.position, None)

    def _refuse(self, part: _Part, error: Exception) -> None:
        """A part could not be stored, or nobody knows."""
        self.failed += 1
        log.error("not_stored", error=str(error), messages=len(part.deliveries))
        for delivery in part.deliveries:
            mailbox = delivery.copy.session.mailbox
            if mailbox is not None:
                mailbox.arrived(0, None)
        if part.acks:
            self._loop.call_later(RETRY, self._again, part.acks)
        for ticket in part.tickets:
            ticket.finish(error)
        self._flush()

    def _again(self, acks: dict[Mailbox, list[int]]) -> None:
        for mailbox, positions in acks.items():
            self._acks.setdefault(mailbox, []).extend(positions)
        self._later()

    def _pump(self, session: Session, now: float) -> None:
        if session.link is not None and session.pump(now):
            session.link.pump_later()

    # -- reading

    def fetch(self, session: Session, after: int, limit: int) -> None:
        """Read entries for a client that has room."""
        self._spawn(self._fetch(session, after, limit), "fetch")

    async def _fetch(self, session: Session, after: int, limit: int) -> None:
        mailbox = session.mailbox
        if mailbox is None:
            return
        epoch = mailbox.epoch
        while mailbox.serves(epoch):
            tail, now = mailbox.tail, time()
            try:
                entries = await self._store.mailboxes.read(mailbox.owner, after, limit, now)
            except StoreError as error:
                log.error("not_read", client_id=session.client.client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
                continue
            if mailbox.serves(epoch):
                mailbox.fetched(entries, limit, tail)
                self._pump(session, now)
                self._flush()
            return

    # -- sessions

    def make_durable(self, session: Session) -> None:
        """Give a new session its mailbox."""
        session.mailbox = Mailbox(session, self)

    def save(self, session: Session) -> Ticket:
        """Write a session down as it is now; not before what its client had earlier is gone."""
        client_id = session.client.client_id
        before = self._retiring.get(client_id)
        if before is None:
            return self._save(session)
        ticket = Ticket()

        def go_on() -> None:
            saved = self._save(session)
            saved.then(lambda: ticket.finish(saved.error))

        before.then(go_on)
        return ticket

    def gone(self, client_id: str) -> Ticket | None:
        """A ticket for the end of what a client had earlier; None if there is nothing to wait for."""
        return self._retiring.get(client_id)

    def _save(self, session: Session) -> Ticket:
        part, ticket = self._one()
        part.batch.put(SESSIONS, session.client.client_id, kept.encode(_record(session)))
        part.rows += 1
        return ticket

    def subscribe(self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()) -> Ticket:
        """Write changed subscriptions down."""
        client_id = session.client.client_id
        part, ticket = self._one()
        for subscription in added:
            part.batch.put(SUBSCRIPTIONS, pair(client_id, subscription.filter), kept.subscription_record(subscription))
            part.rows += 1
        for filter_ in removed:
            part.batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
            part.rows += 1
        return ticket

    def retire(self, session: Session, filters: Sequence[str]) -> None:
        """A session has ended; `filters` were its subscriptions."""
        client_id = session.client.client_id
        ticket = Ticket()
        before = self._retiring.get(client_id)
        self._retiring[client_id] = ticket
        self._spawn(self._retire(session, filters, before, ticket), "retire")

    async def _retire(self, session: Session, filters: Sequence[str], before: Ticket | None, ticket: Ticket) -> None:
        client_id = session.client.client_id
        if before is not None:
            await wait(before, self._loop)
        while True:
            try:
                await self._remove(session, filters)
                break
            except StoreError as error:
                log.error("session_not_removed", client_id=client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
        if self._retiring.get(client_id) is ticket:
            del self._retiring[client_id]
        ticket.finish()

    async def _remove(self, session: Session, filters: Sequence[str]) -> None:
        client_id = session.client.client_id
        owner = kept.owner_of(client_id)
        handed_on = 0
        if any(filter_.startswith("$share/") for filter_ in filters):
            handed_on = await self._hand_on(session, owner)
        lost = await self._store.mailboxes.forget(owner)
        self._plane.stats.dropped["session_ended"] += max(0, lost - handed_on)
        batch = self._store.batch()
        for filter_ in filters:
            batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
        for number in session.awaiting or ():
            batch.delete(AWAITING, pair(client_id, str(number)))
        batch.delete(SESSIONS, client_id)
        await batch.commit()

    async def _hand_on(self, session: Session, owner: str) -> int:
        """Messages of shared groups that nobody acknowledged go to other members. [MQTT-4.8.2-5]"""
        pubsub = self._plane.pubsub
        after = count = 0
        mailbox = session.mailbox
        while True:
            now = time()
            entries = await self._store.mailboxes.read(owner, after, STEP, now)
            for entry in entries:
                after = entry.position
                record = kept.decode_message(entry.body)
                may_have_arrived = entry.mark or (
                    record.flags & 3 == 2 and after <= (mailbox.sent_to if mailbox else 0)
                )
                if not record.group or may_have_arrived:
                    continue
                group = pubsub.group(record.group)
                copy = (
                    None
                    if group is None
                    else pubsub.choose(group, kept.message_from(record, entry.payload), without=session)
                )
                if copy is None:
                    continue
                await self.deliver(kept.message_from(record, entry.payload), copy, now)
                count += 1
            if len(entries) < STEP:
                return count

    async def deliver(self, message: Message, copy: Copy, now: float) -> None:
        """Give a message to one receiver, durable or not."""
        if copy.session.mailbox is not None and copy.qos:
            ticket = self.accept(message, [copy], now)
            await wait(ticket, self._loop)
            if isinstance(ticket.error, StoreError):
                raise ticket.error
        else:
            self._plane.pubsub.offer(message, copy, now)
            self._flush()

    # -- start and end

    async def restore(self) -> None:
        """Bring the sessions back that the process before this one has left."""
        now = time()
        registry, pubsub = self._plane.registry, self._plane.pubsub
        found = lost = 0
        async for client_id, value in self._store.records.scan(SESSIONS, now):
            try:
                session = self._restored(client_id, kept.decode_session(value), now)
            except Exception as error:  # noqa: BLE001 - one damaged record must not keep all others from their clients
                log.error("session_unreadable", client_id=client_id, error=repr(error))  # noqa: TRY400
                continue
            registry.restore(session)
            found += 1
            await self._breathe(found)
        async for key, value in self._store.records.scan(SUBSCRIPTIONS, now):
            client_id, filter_ = kept.unpair(key)
            owner = registry.sessions.get(client_id)
            if owner is None:
                lost += 1
                continue
            pubsub.subscribe(owner, kept.subscription_from(filter_, value))
            await self._breathe(pubsub.subscriptions)
        async for key, value in self._store.records.scan(AWAITING, now):
            client_id, number = kept.unpair(key)
            owner = registry.sessions.get(client_id)
            if owner is not None:
                record = kept.decode_awaiting(value)
                owner.await_release(int(number), record.time)
                if not self._store.atomic:
                    owner.doubt(int(number), record.guid)
        log.info("sessions_restored", sessions=found, subscriptions=pubsub.subscriptions, orphans=lost)

    async def _breathe(self, count: int) -> None:
        if not count % STEP:
            await asyncio.sleep(0)

    def _restored(self, client_id: str, record: kept.SessionRecord, now: float) -> Session:
        client = kept.client_from(client_id, record)
        session = Session(self._plane.shared, client, record.created_at)
        session.mailbox = Mailbox(session, self, restored=True)
        session.expiry = record.expiry
        # A client that was connected has lost its connection with the process that served it.
        session.disconnected_at = now if record.connected else record.disconnected_at
        session.expires_at = now + record.expiry if record.connected else record.expires_at
        will = record.will
        if will is not None:
            session.will = kept.will_from(will, client)
            session.will_delay = will.delay
            session.will_at = now + will.delay if will.at is None else will.at
        return session

    async def lead(self, node: str, lost: Callable[[], None]) -> None:
        """On a store that several nodes can reach: be the one that serves the sessions, or raise `StoreError`."""
        deadline = self._loop.time() + 2 * LEASE_TTL
        while True:
            self._lease = await self._store.coordination.acquire(LEASE, node, LEASE_TTL, time())
            if self._lease is not None:
                break
            if self._loop.time() > deadline:
                raise StoreError(
                    "another node serves the sessions of this store; stop it, or give this node a store of its own"
                )
            log.info("waiting", reason="another node serves the sessions of this store, or has died just now")
            await asyncio.sleep(LEASE_TTL / 4)
        self._spawn(self._renew(self._lease, lost), "lease")

    async def _renew(self, lease: Lease, lost: Callable[[], None]) -> None:
        until = self._loop.time() + LEASE_TTL
        while True:
            await asyncio.sleep(LEASE_TTL / 6)
            try:
                if await self._store.coordination.renew(lease, LEASE_TTL, time()):
                    until = self._loop.time() + LEASE_TTL
                    continue
                log.error("lease_lost", consequence="another node may serve the sessions now; this one stops")
                lost()
                return
            except StoreError as error:
                if self._loop.time() > until:
                    log.warning("lease_not_renewed", error=str(error))

    async def close(self) -> None:
        """Wait until everything that was asked for is stored."""
        self._turn_over()
        lease, self._lease = self._lease, None
        while True:
            tasks = [task for task in self._tasks if task.get_name() != "lease"]
            if not tasks:
                break
            _, late = await asyncio.wait(tasks, timeout=CLOSE_PATIENCE)
            if late:
                log.error("not_stored_in_time", tasks=len(late), consequence="what they wrote may be missing")
                break
            self._turn_over()
        for task in self._tasks:
            task.cancel()
        if lease is not None:
            try:
                await self._store.coordination.release(lease)
            except StoreError as error:
                log.warning("lease_not_released", error=str(error))


def _alike(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Receivers that get the same entry together."""
    if len(copies) == 1:
        return [[*copies]]
    groups: dict[tuple[object, ...], list[Copy]] = {}
    for copy in copies:
        mailbox = copy.session.mailbox
        room = mailbox.room if mailbox is not None else 0
        groups.setdefault((copy.qos, copy.retain, copy.identifiers, copy.group, room), []).append(copy)
    return list(groups.values())


def _record(session: Session) -> kept.SessionRecord:
    client = session.client
    will = None
    if session.will is not None:
        will = kept.will_record(session.will, session.will_delay, session.will_at)
    return kept.SessionRecord(
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
    )


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
