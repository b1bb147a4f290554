"""Durable subscriptions of all members, as notes in the feeds of the cells.

    SUBSCRIBE ─▶ record and note in one batch ─▶ stored ─▶ all members have handled the note ─▶ SUBACK
    a note of another member ─▶ `Subscribers`, by which messages for its client are appended here

Rule 1: a note has all that a member needs to know, so that it reads nothing. A cell whose notes are missing is read
        again from the records of its subscriptions, which are what the notes tell. Of addressed filters there is a
        record and no note; notes of them were written before the cluster had their pattern.
Rule 2: notes about a client that is attached here were written by this member, or before it claimed the client. Any
        other one says that the client is attached to its writer now: it is lost to this member.
Rule 3: a session that goes to sleep becomes a subscriber at once, as it is. Notes about it that were written before are
        passed over when they come (`_slept`).
Rule 4: a fail-over may forget notes, and give their numbers again. When notes are missing, no number above the new end
        of the feed is relied on any more, neither that of rule 2 nor that of rule 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from motorcade.broker import session_records as records
from motorcade.broker.addressing import Addressing
from motorcade.broker.session_records import SUBSCRIPTIONS
from motorcade.broker.subscribers import Subscribers
from motorcade.clock import time
from motorcade.commit import Commit
from motorcade.core.subscription import Subscription
from motorcade.extension.cluster import Cluster
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import Batch, Store, Written

if TYPE_CHECKING:
    from motorcade.broker.attachments import Attachments
    from motorcade.broker.session import Session

log = structlog.stdlib.get_logger("motorcade.sessions")

CODE: Final = "s"  #: of these notes
RELOAD_STEP: Final = 500  #: clients of a cell that is read again, in one turn of the event loop


class SubscriptionNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A change of one durable subscription."""

    member: str  #: that has written it
    client_id: str
    generation: int  #: of the mailbox of the session
    filter: str = ""  #: empty: the session has ended
    record: bytes | None = None  #: `session_records.SubscriptionRecord`; None: the client has unsubscribed


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SubscriptionNote).decode


class SubscriptionFeed:
    """Notes about durable subscriptions, written to the store and read by all members."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        attachments: Attachments,
        subscribers: Subscribers,
        addressing: Addressing | None = None,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._attachments = attachments
        self._subscribers = subscribers
        self._addressing = addressing or Addressing()
        self._slept: dict[str, int] = {}  # clients whose notes up to this number are known
        self._reloading: dict[
            int, set[str]
        ] = {}  # cells that are read again: clients that have gone to sleep meanwhile
        cluster.on_note(CODE, self._handle, self._reload)

    # -- out

    def note(
        self, batch: Batch, client_id: str, generation: int, filter_: str = "", record: bytes | None = None
    ) -> None:
        """Tell of a change with the batch that makes it."""
        note = SubscriptionNote(self._cluster.me, client_id, generation, filter_, record)
        batch.note(CLIENT + client_id, CODE.encode() + _encode(note))

    def synced(self, client_id: str, commit: Commit[Written]) -> Commit[Written]:
        """Return a commit that is done when a change is stored, and all members know it."""
        known: Commit[Written] = Commit()
        commit.then(partial(self._stored, client_id, commit, known))
        return known

    def _stored(self, client_id: str, commit: Commit[Written], known: Commit[Written]) -> None:
        if commit.error is not None or not commit.result.notes:
            known.follow(commit)
            return
        feed = self._store.feeds.feed_of(CLIENT + client_id)
        self._cluster.synced(feed, max(commit.result.notes)).then(partial(known.settle, commit.result))

    def slept(self, session: Session, wanted: Iterable[Subscription], noted: int) -> None:
        """Make a subscriber of a session that is asleep now; `noted`: the last note that it takes into account."""
        client_id = session.client_id
        generation = session.durable.generation if session.durable is not None else 0
        for subscription in wanted:
            if self._addressing.covers(client_id, subscription.filter):
                continue
            self._subscribers.put(client_id, generation, subscription)
        feed = self._store.feeds.feed_of(CLIENT + client_id)
        if feed in self._reloading:
            self._reloading[feed].add(client_id)
        if noted > self._cluster.handled(feed):
            self._slept[client_id] = noted

    # -- in

    def _handle(self, _feed: int, number: int, data: bytes) -> None:
        note = _decode(data)
        client_id = note.client_id
        if self._attachments.has(client_id):
            if note.member != self._cluster.me and number > self._attachments.noted(client_id):
                self._attachments.lost(client_id)
            return
        known = self._slept.get(client_id, 0)
        if number >= known:
            self._slept.pop(client_id, None)
        if number <= known:
            return
        if not note.filter:
            self._subscribers.forget(client_id, note.generation)
        elif note.record is None:
            self._subscribers.drop(client_id, note.filter)
        elif not self._addressing.covers(client_id, note.filter):
            self._subscribers.put(client_id, note.generation, records.subscription_from(note.filter, note.record))

    async def _reload(self, feed: int) -> None:
        """Read the subscriptions of a cell again.

        When a member joins, nothing has to go of what it knows: it takes in each as it comes.
        """
        end = self._cluster.gap_end(feed)
        if end is not None:
            self._forget_numbers(feed, end)
        slept = self._reloading[feed] = set()
        first = not self._subscribers.of_feed(feed)
        found: dict[str, tuple[int, dict[str, Subscription]]] = {}
        async for key, value in self._store.records.scan(SUBSCRIPTIONS, time(), feed=feed):
            try:
                client_id, filter_ = records.unpair(key)
                if self._addressing.covers(client_id, filter_):
                    continue
                record = records.decode_subscription(value)
            except (msgspec.MsgspecError, ValueError) as error:
                log.error("record_unreadable", collection=SUBSCRIPTIONS, key=key, error=str(error))  # noqa: TRY400
                continue
            subscription = records.subscription_of(filter_, record)
            if not first:
                _, subscriptions = found.setdefault(client_id, (record.generation, {}))
                subscriptions[filter_] = subscription
            elif client_id not in slept and not self._attachments.has(client_id):
                known = self._subscribers.get(client_id)  # records of a time with one node have no generation
                generation = known.generation if known is not None else record.generation
                self._subscribers.put(client_id, generation, subscription)
        if first:
            del self._reloading[feed]
            return
        clients = dict.fromkeys((*self._subscribers.of_feed(feed), *found))
        for count, client_id in enumerate(clients, 1):
            if client_id not in slept and not self._attachments.has(client_id):
                self._replace(client_id, *found.get(client_id, (0, {})))
            if not count % RELOAD_STEP:
                await asyncio.sleep(0)
        del self._reloading[feed]

    def _forget_numbers(self, feed: int, end: int) -> None:
        """Forget which notes were taken into account, above the end of a feed that has lost some (rule 4)."""
        feed_of = self._store.feeds.feed_of
        for client_id, number in list(self._slept.items()):
            if number > end and feed_of(CLIENT + client_id) == feed:
                del self._slept[client_id]
        self._attachments.note_gap(feed, end)

    def _replace(self, client_id: str, generation: int, subscriptions: dict[str, Subscription]) -> None:
        """Make what is known of a client what the store has."""
        known = self._subscribers.get(client_id)
        for filter_, _ in known.subscriptions() if known is not None else ():
            if filter_ not in subscriptions:
                self._subscribers.drop(client_id, filter_)
        for subscription in subscriptions.values():
            self._subscribers.put(client_id, generation, subscription)
