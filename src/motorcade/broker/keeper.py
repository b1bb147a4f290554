"""Durable sessions: their records, their end, and how they come back after a restart.

A session that outlives its connection is durable if the node has a lasting store. The pure modules (channel, pub/sub,
registry, mailbox) say what is to be kept and get a `Ticket`; here and in `commits.py` it is carried out.

Rule 1: a session that ends leaves nothing: mailbox first, records last, so that a crash in between ends it again.
        A new session of the same client waits for that.
Rule 2: a record that could not be written is written again later: an old one would bring back an old will.
Rule 3: one damaged record hurts one session, never the start of the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import structlog

from motorcade.broker import kept
from motorcade.broker.commits import RETRY, Commits, wait
from motorcade.broker.kept import AWAITING, SESSIONS, SUBSCRIPTIONS, pair
from motorcade.broker.lead import Lead
from motorcade.broker.mailbox import FIRST_OTHER_ID, UNKNOWN, Mailbox
from motorcade.broker.plane import Plane
from motorcade.broker.revoked import Revoked
from motorcade.broker.session import Doubt, Session
from motorcade.broker.ticket import Ticket
from motorcade.clock import time
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.storage.ports import Batch, Store, StoreError
from motorcade.tasks import Tasks

log = structlog.stdlib.get_logger("motorcade.keeper")

STEP = 256  #: sessions and entries between two turns of the event loop
TRIM_STEP = 16  #: entries of a mailbox that is too full, read at once
CLOSE_PATIENCE = 10.0  #: seconds that the last writes may take


class Keeper(Commits):
    """The durable sessions of one node."""

    def __init__(
        self,
        store: Store,
        plane: Plane,
        loop: asyncio.AbstractEventLoop,
        flush: Callable[[], None],
        supervisor: Tasks | None = None,
    ) -> None:
        super().__init__(store, loop, flush, supervisor)
        self._plane = plane
        self._unsaved: set[Session] = set()  # their records are out of date
        self._retiring: dict[str, Ticket] = {}
        self._leaving: dict[str, Mailbox] = {}  # of sessions that have ended, until the store has removed them
        self._lead: Lead | None = None

    # -- QoS 2 messages of clients

    def look_up(self, session: Session, packet_id: int, guid: bytes) -> Ticket | None:
        """Ask whether a QoS 2 message that nobody knows about was stored; None: repeat it, it is recognised.

        Where batches are atomic, its packet id tells of all of it; elsewhere the repetition has the same token.
        """
        if not self.store.atomic:
            return None
        ticket = Ticket()
        self.spawn(self._look_up(pair(session.client.client_id, str(packet_id)), guid, ticket), "look_up")
        return ticket

    async def _look_up(self, key: str, guid: bytes, ticket: Ticket) -> None:
        error: Exception | None = None
        try:
            value = await self.store.records.get(AWAITING, key, time())
            ticket.known = value is not None and kept.decode_awaiting(value).guid == guid
        except Exception as failure:  # noqa: BLE001 - whoever waits must hear of it
            error = failure
        ticket.finish(error)

    def release(self, session: Session, packet_ids: Iterable[int]) -> Ticket:
        """QoS 2 messages of the client are released: their ids may be used again when the ticket is done."""
        part, ticket = self.remover()
        for number in packet_ids:
            part.batch.delete(AWAITING, pair(session.client.client_id, str(number)))
            part.rows += 1
        return ticket

    # -- reading

    def fetch(self, session: Session, after: int, limit: int) -> None:  # noqa: ARG002 - the mailbox's cursor is `after`
        """Read entries for a client that has room."""
        if session.mailbox is not None:
            self.watch(partial(self._fetch, session, session.mailbox, session.mailbox.epoch, limit), "fetch")

    async def _fetch(self, session: Session, mailbox: Mailbox, epoch: int, limit: int) -> None:
        """Read from the cursor on: it knows what an attempt that failed has taken already."""
        while mailbox.serves(epoch) and mailbox.reading:
            tail, now = mailbox.tail, time()
            try:
                entries = await self.store.mailboxes.read(mailbox.owner, mailbox.cursor, limit, now)
            except StoreError as error:
                log.error("not_read", client_id=session.client.client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
                continue
            if mailbox.serves(epoch):
                mailbox.fetched(entries, limit, tail)
                self.pump(session, now)
                self._flush()
            return

    # -- a mailbox that is too full

    def trim(self, session: Session) -> None:
        """Drop of what waits in a mailbox, oldest first, until the rest fits (mailbox, rule 5)."""
        mailbox = session.mailbox
        if mailbox is None:
            return
        mailbox.over = True
        if not mailbox.trimming:
            mailbox.trimming = True
            self.watch(partial(self._trim, session, mailbox), "trim")

    async def _trim(self, session: Session, mailbox: Mailbox) -> None:
        mailbox.over = True
        while mailbox.over and not session.ended:
            mailbox.over = False
            try:
                await self._count_sent(mailbox)
                await self._drop_waiting(mailbox)
            except StoreError as error:
                log.error("mailbox_not_trimmed", client_id=session.client.client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
                mailbox.over = True
        mailbox.trimming = False

    async def _count_sent(self, mailbox: Mailbox) -> None:
        """After a crash: find the last entry that may have been sent before it."""
        after = count = octets = 0
        while mailbox.sent_to == UNKNOWN:
            limit = min(mailbox.doubtful - count, TRIM_STEP)
            entries = await self.store.mailboxes.read(mailbox.owner, after, limit, time())
            count += len(entries)
            octets += sum(len(entry.body) + len(entry.payload) for entry in entries)
            after = entries[-1].position if entries else after
            if len(entries) < limit or count >= mailbox.doubtful:
                mailbox.know_sent(after, count, octets)

    async def _drop_waiting(self, mailbox: Mailbox) -> None:
        info = await self.store.mailboxes.info(mailbox.owner)
        most, most_octets = mailbox.room
        # What is acknowledged may still be counted.
        entries = info.entries - len(mailbox.acked)
        octets = info.octets * entries // max(1, info.entries)
        after = mailbox.sent_to
        while 0 < most < entries or 0 < most_octets < octets:
            found = await self.store.mailboxes.read(mailbox.owner, after, TRIM_STEP, time())
            if mailbox.session.ended:
                return  # the next session of its client may have the mailbox by now
            for entry in found:
                after = entry.position
                if (0 < most < entries or 0 < most_octets < octets) and mailbox.discard(entry):
                    entries -= 1
                    octets -= len(entry.body) + len(entry.payload)
            if len(found) < TRIM_STEP:
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
        part, ticket = self.putter()
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
            self.loop.call_later(RETRY, self._save_again, session)

    def _save_again(self, session: Session) -> None:
        if session in self._unsaved:
            self._unsaved.discard(session)
            if not session.ended:
                self._save(session)

    def subscribe(self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()) -> Ticket:
        """Write changed subscriptions down."""
        client_id = session.client.client_id
        added = list(added)
        part, ticket = self.putter() if added else self.remover()
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
        self.begin_all()
        ticket = Ticket()
        before = self._retiring.get(client_id)
        self._retiring[client_id] = ticket
        if session.mailbox is not None:
            self._leaving[client_id] = session.mailbox
        self.watch(partial(self._retire, session, filters, before, ticket), "retire")

    async def _retire(self, session: Session, filters: Sequence[str], before: Ticket | None, ticket: Ticket) -> None:
        client_id = session.client.client_id
        owed = session.owed.ticket if session.owed is not None else None
        for earlier in (before, owed, self.caught_up()):
            if earlier is not None:
                await wait(earlier, self.loop)
        await asyncio.sleep(0)  # what was handed over in this turn is begun at its end
        while True:
            try:
                await self._remove(session, filters)
                break
            except StoreError as error:
                log.error("session_not_removed", client_id=client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
        if self._retiring.get(client_id) is ticket:
            del self._retiring[client_id]
            self._leaving.pop(client_id, None)
        session.mailbox = None  # they refer to each other: without the collector neither would ever be freed
        ticket.finish()

    async def _remove(self, session: Session, filters: Sequence[str]) -> None:
        client_id = session.client.client_id
        owner = kept.owner_of(client_id)
        if any(filter_.startswith("$share/") for filter_ in filters):
            await self._hand_on(session, owner)
        lost = await self.store.mailboxes.forget(owner)
        mailbox = session.mailbox
        if mailbox is not None:
            mailbox.forgotten(lost)
        batch = Batch()
        for filter_ in filters:
            batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
        for number in session.awaiting or ():
            batch.delete(AWAITING, pair(client_id, str(number)))
        batch.delete(SESSIONS, client_id)
        await self.store.write(batch)

    async def _hand_on(self, session: Session, owner: str) -> None:
        """Messages of shared groups that nobody acknowledged go to other members. [MQTT-4.8.2-5]

        Each is taken out of this mailbox when it is in the other one: a repetition goes on where this one ended.
        """
        mailbox = session.mailbox
        after = seen = 0
        while True:
            now = time()
            entries = await self.store.mailboxes.read(owner, after, STEP, now)
            for entry in entries:
                after = entry.position
                seen += 1
                try:
                    record = kept.decode_message(entry.body)
                except Exception as error:  # noqa: BLE001 - rule 3
                    log.error("entry_unreadable", owner=owner, position=after, error=repr(error))  # noqa: TRY400
                    continue
                sent = mailbox is not None and mailbox.may_have_been_sent(after, seen)
                if record.group and not entry.mark and not (record.flags & 3 == 2 and sent):
                    message = kept.message_from(record, entry.payload)
                    await self._give_on(message, record.group, session, after, now)
            if len(entries) < STEP:
                return

    async def _give_on(self, message: Message, text: str, session: Session, position: int, now: float) -> None:
        """Give one message to another member of its group, if there is one, and room."""
        pubsub = self._plane.pubsub
        group = pubsub.group(text)
        copy = pubsub.choose(group, message, without=session) if group is not None else None
        if copy is None:
            return
        if copy.session.mailbox is not None and copy.qos:
            ticket = self.accept(message, [copy], now, token=message.guid, moved=True)
            await wait(ticket, self.loop)
            if ticket.refused:
                return
            if ticket.error is not None:
                raise ticket.error
        else:
            pubsub.offer(message, copy, now)
            self._flush()
        await self.store.mailboxes.acknowledge(kept.owner_of(session.client.client_id), [position])
        if session.mailbox is not None:
            session.mailbox.left((position,))

    def expired(self, entries: Iterable[tuple[str, int]]) -> None:
        """The store has removed entries of mailboxes whose time was over."""
        sessions = self._plane.registry.sessions
        for owner, position in entries:
            if not owner.startswith(kept.OWNER):
                continue
            client_id = owner[len(kept.OWNER) :]
            session, mailbox = sessions.get(client_id), self._leaving.get(client_id)
            if mailbox is None and session is not None:
                mailbox = session.mailbox
            if mailbox is not None:
                mailbox.expired(position)

    # -- start and end

    async def restore(self) -> None:
        """Bring the sessions back that the process before this one has left."""
        now = time()
        registry, pubsub = self._plane.registry, self._plane.pubsub
        found = lost = 0
        async for client_id, value in self.store.records.scan(SESSIONS, now):
            try:
                session = self._restored(client_id, kept.decode_session(value), now)
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
        """Bring one record back; one that belongs to nobody, or cannot be read, is removed."""
        try:
            if restore():
                return True
        except Exception as error:  # noqa: BLE001 - as above
            log.error("record_unreadable", collection=collection, key=key, error=repr(error))  # noqa: TRY400
        part, _ = self.remover()
        part.batch.delete(collection, key)
        part.rows += 1
        return False

    def _resubscribe(self, key: str, value: bytes) -> bool:
        client_id, filter_ = kept.unpair(key)
        session = self._plane.registry.sessions.get(client_id)
        if session is not None:
            self._plane.pubsub.subscribe(session, kept.subscription_from(filter_, value))
            if session.revoked is not None:
                session.revoked.allow(filter_)
        return session is not None

    def _await_again(self, key: str, value: bytes) -> bool:
        client_id, number = kept.unpair(key)
        session = self._plane.registry.sessions.get(client_id)
        if session is not None:
            record = kept.decode_awaiting(value)
            session.await_release(int(number), record.time)
            if record.begun:
                session.doubt(int(number), Doubt(record.guid, record.chosen))
        return session is not None

    async def _breathe(self, count: int) -> None:
        if not count % STEP:
            await asyncio.sleep(0)

    def _restored(self, client_id: str, record: kept.SessionRecord, now: float) -> Session:
        client = kept.client_from(client_id, record)
        session = Session(self._plane.shared, client, record.created_at)
        known = not record.connected and record.sent_to >= 0
        session.mailbox = Mailbox(
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
            session.will = kept.will_from(will, client)
            session.will_delay = will.delay
            session.will_at = now + will.delay if will.at is None else min(will.at, now + will.delay)
        return session

    async def lead(self, node: str, lost: Callable[[str], None]) -> None:
        """On a store that several nodes can reach: be the one that serves the sessions, or raise `StoreError`."""
        self._lead = Lead(self.store.coordination, node, self.supervisor)
        await self._lead.begin(lost)

    def check(self) -> None:
        if self._lead is not None:
            self._lead.check()

    async def close(self) -> None:
        """Wait until everything that was asked for is stored."""
        await self.wait_for_tasks(CLOSE_PATIENCE)
        if self._lead is not None:
            await self._lead.end()


def _record(session: Session) -> kept.SessionRecord:
    client = session.client
    will = None
    if session.will is not None:
        will = kept.will_record(session.will, session.will_delay, session.will_at)
    elif session.owed is not None:
        will = kept.will_record(session.owed.will, 0, 0.0)
    mailbox = session.mailbox
    sent_to = mailbox.sent_to if mailbox is not None and session.link is None else UNKNOWN
    # This connection may take fewer at once than were sent before: none of them must be forgotten in a crash.
    window = max(session.limit if session.link is not None else 0, mailbox.held if mailbox is not None else 0)
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
        -1 if sent_to == UNKNOWN else sent_to,
        window,
        sorted(session.revoked.filters) if session.revoked is not None else [],
    )
