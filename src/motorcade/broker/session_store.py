"""The durable sessions of a node: their records, their end, and how they come back.

    SessionStore ── records, end, restore, lease
      ├─ writer      what is stored: messages, acknowledgements, marks      (session_writer)
      ├─ reader      what is read: entries for clients, mailboxes to trim   (session_reader)
      └─ attachments with several nodes: which clients are attached to this one; else None

A session that outlives its connection is durable if the node has a lasting store. The pure modules (channel, pub/sub,
registry, durable queue) ask here for what is to be stored, and get a `Commit`. The store keeps the order of the writes.

Rule 1: a session that ends leaves nothing: mailbox first, records last, so that a crash in between ends it again.
        A new session of the same client waits for that.
Rule 2: a record that could not be written is written again later: an old one would bring back an old will.
Rule 3: one damaged record hurts one session, never the start of the node.
Rule 4: with several nodes, what is decided about a session is written with the fence of its client. One that is refused
        has another member in charge: the client is lost to this one. Changed subscriptions are noted in the feed of
        the cell, and confirmed when all members know them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from motorcade.broker import session_records as records
from motorcade.broker.addressing import Addressing
from motorcade.broker.durable_queue import FIRST_OTHER_ID, UNKNOWN, DurableQueue
from motorcade.broker.lease import SessionLease
from motorcade.broker.pubsub import GroupPeer
from motorcade.broker.revoked import Revoked
from motorcade.broker.session import Doubt, Session
from motorcade.broker.session_reader import SessionReader, insist
from motorcade.broker.session_records import AWAITING, SESSIONS, SUBSCRIPTIONS, pair
from motorcade.broker.session_writer import RETRY, SessionWriter
from motorcade.broker.state import BrokerState
from motorcade.clock import time
from motorcade.commit import Commit, is_refusal, joined
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.delivery.writebehind import WriteBehind
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import SPARE_ALL, Batch, Opened, Store, StoreError, StoreFencedError, Written
from motorcade.tasks import Tasks, Work

if TYPE_CHECKING:
    from motorcade.broker.attachments import Attachments
    from motorcade.broker.subscription_feed import SubscriptionFeed

log = structlog.stdlib.get_logger("motorcade.sessions")

STEP = 256  #: sessions and entries between two turns of the event loop
CLOSE_PATIENCE = 10.0  #: seconds that the last writes may take


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
        self.lease = SessionLease(store, self.supervisor)
        self.writer = SessionWriter(self.lease, loop, flush, self.supervisor)
        self.reader = SessionReader(store.mailboxes, self.writer, self._start)
        self.attachments: Attachments | None = None
        self.feed: SubscriptionFeed | None = None  #: what other members hear of subscriptions
        self.addressing = Addressing()  #: of which of them they hear nothing
        self._state = state
        self._flush = flush
        # Sessions whose record could not be written (rule 2).
        self._unsaved = WriteBehind(self.writer, self._fill, lambda: RETRY, RETRY, lambda *_: None, loop)
        self._retiring: dict[str, Commit[None]] = {}
        self._leaving: dict[str, DurableQueue] = {}  # of sessions that have ended, until the store has removed them
        self._tasks: set[asyncio.Task[None]] = set()

    # -- records of sessions

    def make_durable(self, session: Session) -> None:
        """Give a new session its queue."""
        session.durable = DurableQueue(session, self)

    def save(self, session: Session) -> Commit[Any]:
        """Write the record of a session as it is now; not before what its client had earlier is gone."""
        before = self._retiring.get(session.client.client_id)
        if before is None:
            return self._save(session)
        commit: Commit[Any] = Commit()
        before.then(lambda: commit.follow(self._save(session)))
        return commit

    def gone(self, client_id: str) -> Commit[None] | None:
        """Return the end of what a client had earlier; None if there is nothing to wait for."""
        return self._retiring.get(client_id)

    def _save(self, session: Session) -> Commit[Written]:
        client_id = session.client.client_id
        if self.attachments is not None and self._state.registry.sessions.get(client_id) is not session:
            return Commit.failed(StoreFencedError("the session goes on elsewhere"))
        batch = Batch()
        self._fill(batch, (session,))
        if self.attachments is not None:
            self._attend(batch, session)
        commit = self.writer.write(batch)
        commit.then(partial(self._saved, session, commit))
        return commit

    def _attend(self, batch: Batch, session: Session) -> None:
        """Write besides that a client is here: nothing is due of its session, and what it was sent is not dropped."""
        client_id = session.client.client_id
        self.writer.decide(batch, client_id)
        batch.due(CLIENT + client_id, 0.0)
        session.recorded = session.durable is None
        if session.durable is not None:
            batch.make(session.durable.owner)
            batch.spare(session.durable.owner, SPARE_ALL)

    def _fill(self, batch: Batch, sessions: Collection[Session]) -> None:
        for session in sessions:
            if not session.ended:
                batch.put(SESSIONS, session.client.client_id, records.encode(_record(session)))

    def _saved(self, session: Session, commit: Commit[Written]) -> None:
        if self.attachments is not None:
            self._attended(session, commit)
        elif commit.error is None:
            self._unsaved.drop(session)
        elif not session.ended:
            self._unsaved.change(session)

    def _attended(self, session: Session, commit: Commit[Written]) -> None:
        client_id = session.client.client_id
        self.writer.decided(client_id, commit)
        if commit.error is None:
            if commit.result.generations and session.durable is not None:
                session.durable.generation = commit.result.generations[0]
        elif not session.ended and self._state.registry.sessions.get(client_id) is session:
            self._state.shared.later(RETRY, partial(self._save_again, session))

    def _save_again(self, session: Session) -> None:
        if not session.ended:
            self._save(session)

    def subscribe(
        self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()
    ) -> Commit[Written]:
        """Write changed subscriptions; with several nodes the commit is done when all know them (rule 4)."""
        client_id = session.client.client_id
        generation = session.durable.generation if session.durable is not None else 0
        batch = Batch()
        for subscription in added:
            record = records.subscription_record(subscription, generation)
            batch.put(SUBSCRIPTIONS, pair(client_id, subscription.filter), record)
            if self.feed is not None and not self.addressing.covers(client_id, subscription.filter):
                self.feed.note(batch, client_id, generation, subscription.filter, record)
        for filter_ in removed:
            batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
            if self.feed is not None and not self.addressing.covers(client_id, filter_):
                self.feed.note(batch, client_id, generation, filter_)
        if self.feed is None:
            return self.writer.write(batch)
        self.writer.decide(batch, client_id)
        commit = self.writer.write(batch)
        commit.then(partial(self.writer.decided, client_id, commit))
        return self.feed.synced(client_id, commit)

    def lasting_wills(self, client_id: str) -> bool:
        """Return True if the will of a clean session is stored too: another member publishes it if this one dies."""
        return self.attachments is not None and self.attachments.has(client_id)

    async def take_will(self, session: Session) -> bool:
        """Take the will of a session, so that of several nodes one publishes it; False: the client is another's."""
        if self.attachments is None or not self.attachments.has(session.client_id):
            return self.attachments is None
        batch = Batch()
        batch.put(SESSIONS, session.client_id, records.encode(_record(session)))
        self.writer.decide(batch, session.client_id)
        try:
            await self.writer.write(batch)
        except StoreFencedError:
            self.attachments.lost(session.client_id)
            return False
        except StoreError as error:
            if not is_refusal(error):
                raise
        return True

    def release(self, session: Session, packet_ids: Iterable[int]) -> Commit[Written]:
        """Remove ids of QoS 2 messages of a client; they may be used again when the commit is done."""
        batch = Batch()
        client_id = session.client.client_id
        for number in packet_ids:
            batch.delete(AWAITING, pair(client_id, str(number)))
        self.writer.decide(batch, client_id)
        commit = self.writer.write(batch)
        commit.then(partial(self.writer.decided, client_id, commit))
        return commit

    # -- the end of sessions

    def disconnected(self, session: Session) -> None:
        """Write down that a client has gone; with several nodes its session goes to sleep."""
        if self.attachments is not None:
            self.attachments.disconnected(session)
        elif session.durable is not None and not session.ended:
            self.save(session)

    def ended(self, session: Session, filters: Sequence[str]) -> None:
        """Remove what is stored of a session that has ended; `filters` were its subscriptions."""
        if session.durable is not None or session.recorded:
            self.retire(session, filters)
        elif self.attachments is not None:
            self.attachments.disconnected(session)

    def retire(self, session: Session, filters: Sequence[str]) -> None:
        """Remove a session that has ended; `filters` were its subscriptions."""
        client_id = session.client.client_id
        waits = [self.writer.caught_up()]
        if client_id in self._retiring:
            waits.append(self._retiring[client_id])
        commit = self._retiring[client_id] = Commit()
        if session.durable is not None:
            self._leaving[client_id] = session.durable
        self._start(partial(self._retire, session, filters, joined(waits), commit), "retire")

    async def _retire(
        self, session: Session, filters: Sequence[str], earlier: Commit[None], commit: Commit[None]
    ) -> None:
        client_id = session.client.client_id
        await earlier
        if session.owed is not None:
            await session.owed.done
        await insist(partial(self._remove_ours, session, filters), "session_not_removed", client_id)
        if self._retiring.get(client_id) is commit:
            del self._retiring[client_id]
            self._leaving.pop(client_id, None)
        if self.attachments is not None:
            self.attachments.idle(client_id)
        session.durable = None  # they refer to each other: without the collector neither would ever be freed
        commit.finish()

    async def _remove_ours(self, session: Session, filters: Sequence[str]) -> None:
        try:
            await self._remove(session, filters)
        except StoreFencedError:  # the member that has claimed the client removes the rest
            if self.attachments is None:
                raise
            self.attachments.lost(session.client_id)

    async def _remove(self, session: Session, filters: Sequence[str]) -> None:
        client_id = session.client.client_id
        owner = records.owner_of(client_id)
        queue = session.durable
        fence = self.attachments.fence(client_id) if self.attachments is not None else None
        if queue is not None and any(filter_.startswith("$share/") for filter_ in filters):
            await self._hand_on(queue)
        if queue is not None:
            queue.forgotten(await self.store.mailboxes.forget(owner, fence))
        batch = Batch()
        for filter_ in filters:
            batch.delete(SUBSCRIPTIONS, pair(client_id, filter_))
        for number in session.awaiting or ():
            batch.delete(AWAITING, pair(client_id, str(number)))
        batch.delete(SESSIONS, client_id)
        if self.feed is not None:
            known = any(not self.addressing.covers(client_id, filter_) for filter_ in filters)
            if known and queue is not None:
                self.feed.note(batch, client_id, queue.generation)
            batch.due(CLIENT + client_id, 0.0)
            self.writer.decide(batch, client_id)
        await self.store.write(batch)

    async def _hand_on(self, queue: DurableQueue) -> None:
        """Give unacknowledged messages of shared groups to other members. [MQTT-4.8.2-5]

        Each is taken out of this mailbox when it is in the other one: a repetition goes on where this one ended.
        """
        await self.reader.count_sent(queue)
        async for entry in self.reader.entries(queue, STEP):
            position = entry.position
            try:
                record = records.ENTRY.decode(entry.body)
            except Exception as error:  # noqa: BLE001 - rule 3
                log.error("entry_unreadable", owner=queue.owner, position=position, error=repr(error))  # noqa: TRY400
                continue
            if record.group and not entry.mark and not (record.granted == 2 and position <= queue.sent_to):
                await self._give_on(records.message_from(record, entry.payload), record.group, queue, position, time())

    async def _give_on(self, message: Message, text: str, queue: DurableQueue, position: int, now: float) -> None:
        """Give one message to another member of its group, if there is one, and room."""
        pubsub = self._state.pubsub
        group = pubsub.group(text)
        copy = pubsub.choose(group, message, without=queue.session) if group is not None else None
        if copy is None:
            return
        if copy.lasting:
            try:
                await self.writer.accept(message, [copy], now, token=message.guid, moved=True)
            except StoreError as error:
                if is_refusal(error):
                    return
                raise
        else:
            self._state.stats.withdrawn["elsewhere"] += isinstance(copy.session, GroupPeer)
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

    # -- several nodes

    def join(self, attachments: Attachments, feed: SubscriptionFeed, addressing: Addressing | None = None) -> None:
        """Be one of several nodes."""
        self.addressing = addressing or self.addressing
        self.attachments = self.writer.attachments = attachments
        self.feed = feed

    async def seen_at(self, client_id: str) -> float:
        """Return when the connection of a client ended whose session sleeps in the store; 0: there is none."""
        value = await self.store.records.get(SESSIONS, client_id, time())
        with suppress(msgspec.MsgspecError):
            return (value is not None and records.decode_session(value).disconnected_at) or 0.0
        return 0.0

    def flush(self, session: Session) -> Commit[None]:
        """Hand to the store what was accepted for a session and what its client has acknowledged."""
        waits: list[Commit[Any]] = [self.writer.caught_up()]
        if session.durable is not None:
            session.keep_all(time())
            waits.append(self.writer.acks.flush(session.durable))
        return joined(waits)

    def let_go(self, session: Session) -> None:
        """Free a session that is asleep now, or elsewhere, when no write needs it any more."""

        def free() -> None:
            session.durable = None  # they refer to each other

        self.writer.caught_up().then(free)

    def put_to_sleep(self, batch: Batch, session: Session) -> None:
        """Write a session down whose client is away, and when its end or its will is due."""
        client_id = session.client.client_id
        batch.put(SESSIONS, client_id, records.encode(_record(session)))
        if session.durable is not None:
            sent_to = session.durable.sent_to
            batch.spare(session.durable.owner, SPARE_ALL if sent_to == UNKNOWN else sent_to)
        due = [when for when in (session.expires_at, session.will_at) if when is not None]
        batch.due(CLIENT + client_id, min(due))

    def wake(self, client_id: str, opened: Opened, told_to: int = 0) -> None:
        """Bring the session of a client back that was attached to this member.

        `told_to`: up to which entry of its mailbox this member was told meanwhile.
        """
        now = time()
        stored, subscriptions, awaiting = opened.records
        value = stored.get(client_id)
        session: Session | None = None
        if value is not None:
            try:
                session = self._restored(client_id, records.decode_session(value), now)
            except Exception as error:  # noqa: BLE001 - rule 3
                log.error("session_unreadable", client_id=client_id, error=repr(error))  # noqa: TRY400
        if session is not None:
            if session.durable is not None:
                session.durable.wake(opened.attached.mailbox, told_to)
            self._state.registry.restore(session)
        for key, record in subscriptions.items():
            self._restore_one(SUBSCRIPTIONS, key, partial(self._resubscribe, key, record))
        for key, record in awaiting.items():
            self._restore_one(AWAITING, key, partial(self._await_again, key, record))

    def supersede(self, client_id: str, opened: Opened) -> list[Message]:
        """Remove what the store has of a client whose clean session began while the store was away.

        Returns the will of what is removed. The record of the session that goes on is written after that.
        """
        stored, subscriptions, _ = opened.records
        wills: list[Message] = []
        value = stored.get(client_id)
        if value is not None:
            now = time()
            try:
                session = self._restored(client_id, records.decode_session(value), now)
            except Exception as error:  # noqa: BLE001 - rule 3
                log.error("session_unreadable", client_id=client_id, error=repr(error))  # noqa: TRY400
                session = Session(self._state.shared, ClientInfo(client_id), now)
            session.durable = session.durable or DurableQueue(session, self)
            session.ended = True
            wills = self._state.registry.take_will(session)
            self.retire(session, [records.unpair(key)[1] for key in subscriptions])
        going_on = self._state.registry.sessions.get(client_id)
        if going_on is not None and going_on.will is not None:
            self.save(going_on)
        return wills

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
        self.writer.write(batch)
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
            # Another member may have died before live receivers had it: they know what they have got by its guid.
            if record.begun or self.attachments is not None:
                session.doubt(int(number), Doubt(record.guid, record.chosen))
        return session is not None

    async def _breathe(self, count: int) -> None:
        if not count % STEP:
            await asyncio.sleep(0)

    def _restored(self, client_id: str, record: records.SessionRecord, now: float) -> Session:
        client = records.client_from(client_id, record)
        session = Session(self._state.shared, client, record.created_at)
        known = not record.connected and record.sent_to >= 0
        if record.expiry:
            session.durable = DurableQueue(
                session, self, restored=True, sent_to=record.sent_to if known else UNKNOWN, window=record.window
            )
        else:  # a clean session with a will, whose member has died
            session.recorded = True
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

    def _start(self, work: Work, name: str) -> None:
        """Run something as a task, again if it fails; `close` waits for it."""
        task = self.supervisor.start(work, f"sessions.{name}", loop=self.loop)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self.writer.progress is not None:
            self.writer.progress.set()

    async def close(self, patience: float = CLOSE_PATIENCE) -> None:
        """Wait until all that was asked for is stored, as long as something of it gets done within `patience`."""
        progress = self.writer.progress = asyncio.Event()
        self.writer.turn_over()
        while self._tasks or self.writer.rows:
            progress.clear()
            try:
                async with asyncio.timeout(patience):
                    await progress.wait()
            except TimeoutError:
                log.error("not_stored_in_time", tasks=len(self._tasks), rows=self.writer.rows)  # noqa: TRY400
                break
            self.writer.turn_over()
        await self.writer.acks.settle()
        await self._unsaved.settle()
        for task in self._tasks:
            task.cancel()
        await self.lease.end()


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
