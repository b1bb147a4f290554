"""Durable sessions: what the broker writes to the store, when, and how it comes back after a restart.

A session that outlives its connection is durable if the node has a lasting store. The pure modules (channel, pub/sub,
registry, mailbox) say what is to be kept and get a `Ticket`; here it is carried out.

    accept, save, subscribe …  ─▶ [ part: everything of one turn of the event loop ] ─commit─▶ tickets are done
    fetch                      ─▶ read ─▶ Mailbox.fetched ─▶ Session.pump

Rule 1: what is asked for in one turn is committed together, in parts of at most `PART_ROWS` rows, so that no commit
        holds up the others. What only removes has a part of its own: a full store refuses the rest, and is emptied.
        A QoS 2 message with its packet id is never divided: it happens as a whole, or, on a store
        whose batches are not atomic, is repeated under the same token.
Rule 2: parts are begun in order, so writes for one mailbox or record are applied in order (ports, rule 6).
Rule 3: acknowledgements of receivers ride along. If they are lost in a crash, the message is sent again (QoS 1), or
        only its PUBREL (QoS 2).
Rule 4: a session that ends leaves nothing: mailbox first, records last, so that a crash in between ends it again.
        A new session of the same client waits for that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from time import time
from typing import Any, NamedTuple

import structlog

from motorcade.broker import kept
from motorcade.broker.frames import Frame, frame_of, message_of
from motorcade.broker.kept import AWAITING, SESSIONS, SUBSCRIPTIONS, pair
from motorcade.broker.mailbox import IDS_OF_MAILBOX, Mailbox
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
MAX_FLYING = 10_000  #: rows the store has not answered yet, before QoS 0 messages are no longer kept
RETRY = 1.0  #: seconds until something that failed is tried again
STEP = 256  #: sessions and entries between two turns of the event loop

CLOSE_PATIENCE = 10.0  #: seconds that the last writes may take

LEASE = "sessions"  #: name of the lease that says which node serves the sessions of a shared store
OTHER_NODE = "another node serves the sessions of this store; stop it, or give this node a store of its own"
LEASE_TTL = 3.0  #: seconds after which a node that died is forgotten


class _Whole:
    """A message of any kind, encoded once per kind of receiver."""

    __slots__ = ("_frames", "_message", "octets")

    def __init__(self, message: Message) -> None:
        self._message = message
        self.octets = len(message.payload)
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

    __slots__ = ("_frame", "_version", "octets")

    def __init__(self, frame: Frame, version: int, octets: int) -> None:
        self._frame = frame
        self._version = version
        self.octets = octets

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

    __slots__ = ("acks", "batch", "deliveries", "puts", "rows", "tickets")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.rows = 0
        self.deliveries: list[_Delivery] = []  #: in the order of the batch's answers
        self.tickets: list[Ticket] = []
        self.acks: dict[Mailbox, list[int]] = {}
        self.puts = False  #: it has records


class Keeper:
    """The durable sessions of one node."""

    def __init__(self, store: Store, plane: Plane, loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
        self._store = store
        self._plane = plane
        self._loop = loop
        self._flush = flush
        self.now = time()  #: of this turn, about
        self._bounds: dict[tuple[int, int], Bound] = {}
        self._part: _Part | None = None
        self._removing: _Part | None = None  # what gives room: it is stored even if nothing else can be
        self._flying = 0  # rows that the store has not answered yet
        self._unsaved: set[Session] = set()  # their records are out of date
        self._refused = 0  # parts since the store began to refuse them
        self._acks: dict[Mailbox, list[int]] = {}
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: dict[str, Ticket] = {}
        self._lease: Lease | None = None
        self._leads_until = math.inf  #: of the loop's time; a store that only this node can reach needs no lease
        self.failed = 0  #: commits that the store refused or lost

    # -- messages

    def accept(
        self, message: Message, copies: Sequence[Copy], now: float, publisher: Session | None = None, packet_id: int = 0
    ) -> Ticket:
        """Keep a message for its durable receivers, and, of a durable publisher, the id of its QoS 2 packet."""
        ticket = Ticket()
        token = b""
        octets = len(message.payload)
        whole = bool(packet_id)
        part = self._room(len(copies) + 1 if whole else 1)
        if publisher is not None and packet_id:
            self._in_order(part)
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
                mailbox.expect(octets)
        ticket.finish()  # its own part: from here on only those of the store are open
        return ticket

    def accept_plain(
        self, route: Route, frame: Frame, payload: bytes, client: ClientInfo, version: int, ticket: Ticket
    ) -> None:
        """The same for the byte loop: a QoS 1 message without properties that only durable receivers get."""
        octets = len(payload)
        source = _Plain(frame, version, octets)
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
                owners: list[str] = []
                for copy in some:
                    mailbox = copy.session.mailbox
                    if mailbox is not None:
                        mailbox.expect(octets)
                        owners.append(mailbox.owner)
                    part.deliveries.append(_Delivery(copy, source))
                part.batch.append(owners, draft, self.now, bound)
                part.rows += len(some)

    def _bound(self, copy: Copy) -> Bound:
        """How large a receiver's mailbox may grow; one object per answer, since there are few."""
        room = copy.session.mailbox.room if copy.session.mailbox is not None else (0, 0)
        bound = self._bounds.get(room)
        if bound is None:
            if len(self._bounds) >= BODIES:
                self._bounds.clear()
            bound = self._bounds[room] = Bound(*room)
        return bound

    def keep(self, session: Session, message: Message, *, retain: bool) -> None:
        """Keep a QoS 0 message for a client that is away, unless the store has more to do than it can."""
        copy = Copy(session, 0, retain, ())
        if self._flying >= MAX_FLYING:
            session.drop(_Whole(message).frame(copy, self.now), "queue_full")
        else:
            self.accept(message, [copy], message.timestamp or time())

    def give(self, message: Message, copy: Copy, now: float) -> None:
        """Keep a message for one durable receiver; nobody waits for it."""
        self.accept(message, [copy], now)

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

    def look_up(self, session: Session, packet_id: int, guid: bytes) -> Ticket | None:
        """Ask whether a QoS 2 message that nobody knows about was stored; None: repeat it, it is recognised.

        Where batches are atomic, its packet id tells of all of it; elsewhere the repetition has the same token.
        """
        if not self._store.atomic:
            return None
        ticket = Ticket()
        self._spawn(self._look_up(pair(session.client.client_id, str(packet_id)), guid, ticket), "look_up")
        return ticket

    async def _look_up(self, key: str, guid: bytes, ticket: Ticket) -> None:
        error: Exception | None = None
        try:
            value = await self._store.records.get(AWAITING, key, time())
            ticket.known = value is not None and kept.decode_awaiting(value).guid == guid
        except Exception as failure:  # noqa: BLE001 - whoever waits must hear of it
            error = failure
        ticket.finish(error)

    def release(self, session: Session, packet_ids: Iterable[int]) -> Ticket:
        """QoS 2 messages of the client are released: their ids may be used again when the ticket is done."""
        part, ticket = self._remover()
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
        part, ticket = self._remover()
        part.batch.mark(mailbox.owner, position, mark)
        part.rows += 1
        return ticket

    # -- parts

    def _one(self) -> tuple[_Part, Ticket]:
        """A part with room for a record, and a ticket that is done with it."""
        part = self._room(1)
        self._in_order(part)
        ticket = Ticket(0)
        self._take(part, ticket)
        return part, ticket

    def _in_order(self, part: _Part) -> None:
        """A record is put: what was asked to be removed before must be begun before."""
        part.puts = True
        if self._removing is not None:
            self._begin(self._removing)

    def _remover(self) -> tuple[_Part, Ticket]:
        """The part for what only removes, after every record that was put before; and a ticket."""
        if self._part is not None and self._part.puts:
            self._begin(self._part)
        part = self._removing
        if part is not None and part.rows >= PART_ROWS:
            self._begin(part)
            part = None
        if part is None:
            part = self._removing = _Part(self._store.batch())
            self._later()
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
        if self._part is not None:
            self._begin(self._part)
        acks, self._acks = self._acks, {}
        acks = {mailbox: positions for mailbox, positions in acks.items() if not mailbox.session.ended}
        if acks:
            part = self._removing or _Part(self._store.batch())
            part.acks = acks
            for mailbox, positions in acks.items():
                part.batch.acknowledge(mailbox.owner, positions)
                part.rows += len(positions)
            self._removing = part
        if self._removing is not None:
            self._begin(self._removing)

    def _begin(self, part: _Part) -> None:
        if part is self._part:
            self._part = None
        else:
            self._removing = None
        self._flying += part.rows
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
            self._check_lead()
            answers = await part.batch.commit()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._refuse(part, error)
        else:
            self._settle(part, answers)

    def _settle(self, part: _Part, answers: Sequence[Appended]) -> None:
        """A part is stored: receivers that wait get their messages, then publishers their answers."""
        now = time()
        self._flying -= part.rows
        if self._refused and (part.puts or part.deliveries):
            log.warning("stores_again", refused=self._refused)
            self._refused = 0
        touched: set[Session] = set()
        for delivery, answer in zip(part.deliveries, answers, strict=True):
            self._arrive(delivery, answer, now)
            touched.add(delivery.copy.session)
        for mailbox, positions in part.acks.items():
            mailbox.settled(positions)
        for ticket in part.tickets:
            ticket.finish()
        for session in touched:
            try:
                self._pump(session, now)
            except Exception:
                log.exception("pump_failed", client_id=session.client.client_id)
        self._flush()

    def _arrive(self, delivery: _Delivery, answer: Appended, now: float) -> None:
        copy = delivery.copy
        session = copy.session
        mailbox = session.mailbox
        if mailbox is None:
            return
        if answer.dropped:
            session.shared.stats.dropped["queue_full"] += len(answer.dropped)
        octets = delivery.source.octets
        if not answer.position:
            mailbox.arrived(0, None, octets)
            session.drop(delivery.source.frame(copy, now), "queue_full")
        elif mailbox.open and not answer.repeated:
            mailbox.arrived(answer.position, delivery.source.frame(copy, now), octets)
        else:
            mailbox.arrived(answer.position, None, octets)

    def _refuse(self, part: _Part, error: Exception) -> None:
        """A part could not be stored, or nobody knows."""
        self.failed += 1
        self._flying -= part.rows
        if not self._refused:  # once, not for every message
            log.error("not_stored", error=str(error), consequence="publishers are refused until the store takes writes")
        self._refused += 1
        for delivery in part.deliveries:
            mailbox = delivery.copy.session.mailbox
            if mailbox is not None:
                mailbox.arrived(0, None, delivery.source.octets)
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
        ticket.then(lambda: self._saved(session, ticket))
        return ticket

    def _saved(self, session: Session, ticket: Ticket) -> None:
        """What could not be written down is tried again: an old record would bring back an old will."""
        if ticket.error is None:
            self._unsaved.discard(session)
        elif session not in self._unsaved and not session.ended:
            self._unsaved.add(session)
            self._loop.call_later(RETRY, self._save_again, session)

    def _save_again(self, session: Session) -> None:
        if session in self._unsaved:
            self._unsaved.discard(session)
            if not session.ended:
                self._save(session)

    def subscribe(self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()) -> Ticket:
        """Write changed subscriptions down."""
        client_id = session.client.client_id
        added = list(added)
        part, ticket = self._one() if added else self._remover()
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
        for part in (self._part, self._removing):  # what was asked for before must not come after
            if part is not None:
                self._begin(part)
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
        """Messages of shared groups that nobody acknowledged go to other members. [MQTT-4.8.2-5]

        Each is taken out of this mailbox when it is in the other one: a repetition goes on where this one ended.
        """
        mailbox = session.mailbox
        after = count = seen = 0
        while True:
            now = time()
            entries = await self._store.mailboxes.read(owner, after, STEP, now)
            for entry in entries:
                after = entry.position
                seen += 1
                record = kept.decode_message(entry.body)
                sent = mailbox is not None and mailbox.may_have_been_sent(after, seen)
                if record.group and not entry.mark and not (record.flags & 3 == 2 and sent):
                    message = kept.message_from(record, entry.payload)
                    count += await self._give_on(message, record.group, session, after, now)
            if len(entries) < STEP:
                return count

    async def _give_on(self, message: Message, text: str, session: Session, position: int, now: float) -> bool:
        """Give one message to another member of its group; False if there is nobody, or no room."""
        pubsub = self._plane.pubsub
        group = pubsub.group(text)
        copy = pubsub.choose(group, message, without=session) if group is not None else None
        if copy is None:
            return False
        if copy.session.mailbox is not None and copy.qos:
            ticket = self.accept(message, [copy], now)
            await wait(ticket, self._loop)
            if ticket.refused:
                return False
            if ticket.error is not None:
                raise ticket.error
        else:
            pubsub.offer(message, copy, now)
            self._flush()
        await self._store.mailboxes.acknowledge(kept.owner_of(session.client.client_id), [position])
        return True

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
            lost += not self._restore_one(SUBSCRIPTIONS, key, partial(self._resubscribe, key, value))
            await self._breathe(pubsub.subscriptions)
        async for key, value in self._store.records.scan(AWAITING, now):
            lost += not self._restore_one(AWAITING, key, partial(self._await_again, key, value))
        log.info("sessions_restored", sessions=found, subscriptions=pubsub.subscriptions, orphans=lost)

    def _restore_one(self, collection: str, key: str, restore: Callable[[], bool]) -> bool:
        """Bring one record back; one that belongs to nobody, or cannot be read, is removed."""
        try:
            if restore():
                return True
        except Exception as error:  # noqa: BLE001 - as above
            log.error("record_unreadable", collection=collection, key=key, error=repr(error))  # noqa: TRY400
        part, _ = self._remover()
        part.batch.delete(collection, key)
        part.rows += 1
        return False

    def _resubscribe(self, key: str, value: bytes) -> bool:
        client_id, filter_ = kept.unpair(key)
        session = self._plane.registry.sessions.get(client_id)
        if session is not None:
            self._plane.pubsub.subscribe(session, kept.subscription_from(filter_, value))
        return session is not None

    def _await_again(self, key: str, value: bytes) -> bool:
        client_id, number = kept.unpair(key)
        session = self._plane.registry.sessions.get(client_id)
        if session is not None:
            record = kept.decode_awaiting(value)
            session.await_release(int(number), record.time)
            if not self._store.atomic:
                session.doubt(int(number), record.guid)
        return session is not None

    async def _breathe(self, count: int) -> None:
        if not count % STEP:
            await asyncio.sleep(0)

    def _restored(self, client_id: str, record: kept.SessionRecord, now: float) -> Session:
        client = kept.client_from(client_id, record)
        session = Session(self._plane.shared, client, record.created_at)
        session.mailbox = Mailbox(session, self, restored=True)
        # The client may still hold an id of the process before: begin elsewhere.
        session.next_id = IDS_OF_MAILBOX + 1 + int(now * 1000) % (65535 - IDS_OF_MAILBOX)
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

    async def lead(self, node: str, lost: Callable[[str], None]) -> None:
        """On a store that several nodes can reach: be the one that serves the sessions, or raise `StoreError`."""
        deadline = self._loop.time() + 2 * LEASE_TTL
        while not await self._acquire(node):
            if self._loop.time() > deadline:
                raise StoreError(OTHER_NODE)
            log.info("waiting", reason="another node serves the sessions of this store, or has died just now")
            await asyncio.sleep(LEASE_TTL / 4)
        self._spawn(self._renew(node, lost), "lease")

    async def _acquire(self, node: str) -> bool:
        began = self._loop.time()
        self._lease = await self._store.coordination.acquire(LEASE, node, LEASE_TTL, time())
        if self._lease is not None:
            self._leads_until = began + LEASE_TTL
        return self._lease is not None

    async def _renew(self, node: str, lost: Callable[[str], None]) -> None:
        """Hold the lease. While it cannot be renewed nothing is stored; if somebody else has it, this node stops."""
        while self._lease is not None:
            await asyncio.sleep(LEASE_TTL / 6)
            began = self._loop.time()
            try:
                if await self._store.coordination.renew(self._lease, LEASE_TTL, time()):
                    self._leads_until = began + LEASE_TTL
                elif await self._acquire(node):  # it ran out while the store was away, and nobody has taken it
                    log.warning("lease_renewed", reason="the store was away")
                else:
                    log.error("lease_lost", consequence="another node serves the sessions; this one stops")
                    lost(OTHER_NODE)
                    return
            except StoreError as error:
                if self._loop.time() > self._leads_until:
                    log.warning("lease_not_renewed", error=str(error))

    def _check_lead(self) -> None:
        if self._loop.time() > self._leads_until:
            raise StoreError("this node may not serve the sessions now: its lease has run out")

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
        room = mailbox.room if mailbox is not None else (0, 0)
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
