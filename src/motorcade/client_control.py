"""Clients for operators: list them in pages, show one in full, send one away.

Everything handed out is a copy. `LocalClients` is about the clients of this node; with several nodes `cluster_clients`
puts together what each of them tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from time import monotonic
from typing import Final, Protocol

import msgspec

from motorcade.broker.broker import Broker
from motorcade.broker.session import Session
from motorcade.core.errors import MotorcadeError
from motorcade.core.subscription import Subscription
from motorcade.storage.ports import StoreError

PAGE: Final = 100  #: clients on a page unless the caller says otherwise
MAX_CLIENTS: Final = 1000  #: clients on a page
MAX_SUBSCRIPTIONS: Final = 1000  #: subscriptions shown of one client
SCAN: Final = 500  #: client ids looked at before the loop may go on with messages
COPY: Final = 50  #: clients copied before the loop may go on with messages; like SCAN a tenth of a millisecond

DISCONNECTED: Final = "disconnected"
REMOVED: Final = "session removed"


class NotFoundError(MotorcadeError):
    """There is no client, node or plugin of that name, or no plugin that has such things."""


class SubscriptionView(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription of a client."""

    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int

    @classmethod
    def of(cls, subscription: Subscription) -> SubscriptionView:
        """Return a view with copies of a subscription's values."""
        return cls(
            filter=subscription.filter,
            qos=subscription.qos,
            no_local=subscription.no_local,
            retain_as_published=subscription.retain_as_published,
            retain_handling=subscription.retain_handling,
            identifier=subscription.identifier,
        )


class ClientView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the client list. Times are seconds since the epoch, sizes bytes."""

    client_id: str
    username: str | None
    connected: bool
    host: str
    port: int
    listener: str  #: tcp, tls, ws or wss
    protocol: str  #: `3.1`, `3.1.1` or `5`
    keep_alive: int  #: seconds; 0 is none
    clean_start: bool
    connected_at: float
    disconnected_at: float | None
    expires_at: float | None  #: while disconnected: when the session ends
    subscriptions: int
    inflight: int  #: messages sent, not acknowledged
    queued: int  #: messages waiting
    queued_bytes: int
    node: str | None = None  #: that it is attached to; None: its session sleeps, and belongs to none


class WillView(msgspec.Struct, frozen=True, kw_only=True):
    """The will of a client, without its payload."""

    topic: str
    qos: int
    retain: bool
    delay: int  #: seconds


class SourceView(msgspec.Struct, frozen=True, kw_only=True):
    """One of a client's sources of messages that do not come live."""

    source: str  #: `retained`, `queue`, `stream`, or what a plugin has registered
    filters: list[str]  #: subscriptions it serves
    waiting: int  #: messages it has given that wait for room
    unacked: int  #: messages of it in flight
    promised: int  #: messages it may give now
    recreating: bool  #: it has failed, and is made again after a while


class ClientDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about one client."""

    client: ClientView
    created_at: float
    session_expiry: int  #: seconds the session outlives its connection
    superuser: bool
    certificate: str | None  #: subject
    window: int  #: messages that may be in flight
    inflight_ids: list[int]  #: packet ids sent and not acknowledged, oldest first
    held_seconds: float  #: for so long the oldest of them has not been acknowledged, about; 0: none, or not connected
    awaiting_release: list[int]  #: packet ids of QoS 2 messages of the client that it has not released
    sources: list[SourceView]  #: what brings it messages that do not come live: queues, streams, retained ones
    max_packet_size: int  #: the client takes no larger packets; 0 is any
    topic_aliases: int  #: the client takes so many
    published: int  #: messages the client has sent
    will: WillView | None
    subscriptions: list[SubscriptionView]  #: the first MAX_SUBSCRIPTIONS of them
    unanswered: dict[str, str] = {}  #: nodes that may know more, and why they did not tell it


class ClientPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some clients, in the order of their ids."""

    clients: list[ClientView]
    count: int  #: clients that match the search, on all pages; of several nodes without sessions that sleep
    cursor: str | None  #: pass it to get the next page; None: this is the last
    unanswered: dict[str, str] = {}  #: nodes whose clients are missing, and why


class Kicked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of sending a client away."""

    client_id: str
    result: str
    node: str | None  #: that had it; None: its session slept
    unanswered: dict[str, str] = {}  #: nodes that did not answer, and why


class Directory(Protocol):
    """Clients of one node, or of all."""

    async def page(self, cursor: str, limit: int, search: str, node: str) -> ClientPage:
        """Return up to `limit` clients after a cursor whose id or user name contains `search`."""

    async def show(self, client_id: str) -> ClientDetail:
        """Return everything about one client; `NotFoundError` if it has no session."""

    async def kick(self, client_id: str) -> Kicked:
        """Send a client away, or end its session if it is away already."""


class LocalClients:
    """The clients of this node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._state = broker.state

    async def page(self, cursor: str, limit: int, search: str, node: str) -> ClientPage:
        if node not in ("", self._state.options.node):
            raise NotFoundError(f"there is no node {node!r}: this one, {self._state.options.node}, is alone")
        sessions = self._state.registry.sessions
        wanted = search.casefold()
        matching = 0
        found: list[str] = []
        ids = iter(list(sessions))
        while step := list(islice(ids, SCAN)):
            if wanted:
                step = [name for name in step if name in sessions and _matches(sessions[name], wanted)]
            matching += len(step)
            last = found[-1] if len(found) > limit else None  # what lies behind it is for later pages
            after = [name for name in step if name > cursor and (last is None or name < last)]
            if after:
                found = sorted([*found, *after])[: limit + 1]
            await asyncio.sleep(0)
        more = len(found) > limit
        views: list[ClientView] = []
        for start in range(0, min(limit, len(found)), COPY):
            copied = [sessions.get(name) for name in found[start : min(start + COPY, limit)]]
            present = [session for session in copied if session is not None]  # the others have ended meanwhile
            waiting = await asyncio.gather(*map(self._waiting, present))
            views += [_client_view(*both, self._state.options.node) for both in zip(present, waiting, strict=True)]
            await asyncio.sleep(0)
        return ClientPage(clients=views, count=matching, cursor=found[limit - 1] if more else None)

    async def show(self, client_id: str) -> ClientDetail:
        session = self.session(client_id)
        return _client_detail(session, await self._waiting(session), self._state.options.node)

    async def _waiting(self, session: Session) -> tuple[int, int]:
        """Return (messages, bytes) that wait for a client: in memory, and in its mailbox, without what is in flight."""
        messages, size_bytes = (len(session.queue), session.queue.size) if session.queue is not None else (0, 0)
        queue = session.durable
        if queue is None:
            return messages, size_bytes
        try:
            info = await queue.store.store.mailboxes.info(queue.owner)
        except StoreError:
            return messages, size_bytes  # the rest cannot be known now
        return messages + max(0, info.entries - len(queue.sent)), size_bytes + info.size_bytes

    async def kick(self, client_id: str) -> Kicked:
        session = self.session(client_id)
        node = self._state.options.node
        if session.link is not None:
            await self._broker.disconnect(client_id)
            return Kicked(client_id=client_id, result=DISCONNECTED, node=node)
        self.end(client_id)
        return Kicked(client_id=client_id, result=REMOVED, node=node)

    def end(self, client_id: str) -> None:
        """End the session of a client that is away."""
        for will in self._state.registry.end(client_id, self._broker.now()):
            self._broker.publish_will(will)

    def session(self, client_id: str) -> Session:
        """Return the session of a client; `NotFoundError`."""
        session = self._state.registry.sessions.get(client_id)
        if session is None:
            raise NotFoundError(f"there is no client {client_id!r}")
        return session


def _matches(session: Session, wanted: str) -> bool:
    return matches(session.client.client_id, session.client.username, wanted)


def matches(client_id: str, username: str | None, wanted: str) -> bool:
    """Return True if an id or a user name contains a text in lower case."""
    return wanted in client_id.casefold() or wanted in (username or "").casefold()


PROTOCOLS = {3: "3.1", 4: "3.1.1", 5: "5"}


def _client_view(session: Session, waiting: tuple[int, int], node: str) -> ClientView:
    client = session.client
    return ClientView(
        client_id=client.client_id,
        username=client.username,
        connected=session.link is not None,
        host=client.host,
        port=client.port,
        listener=client.listener,
        protocol=PROTOCOLS.get(client.version, str(client.version)),
        keep_alive=client.keep_alive,
        clean_start=client.clean_start,
        connected_at=session.connected_at,
        disconnected_at=session.disconnected_at,
        expires_at=session.expires_at,
        subscriptions=len(session.subscriptions),
        inflight=len(session.inflight),
        queued=waiting[0],
        queued_bytes=waiting[1],
        node=node,
    )


def _client_detail(session: Session, waiting: tuple[int, int], node: str) -> ClientDetail:
    will = session.will
    certificate = session.client.certificate
    shown: Iterable[Subscription] = islice(session.subscriptions.values(), MAX_SUBSCRIPTIONS)
    return ClientDetail(
        client=_client_view(session, waiting, node),
        created_at=session.created_at,
        session_expiry=session.expiry,
        superuser=session.client.superuser,
        certificate=certificate.subject if certificate else None,
        window=session.limit,
        inflight_ids=list(session.inflight),
        held_seconds=round(session.held_for(monotonic()), 1) if session.link is not None else 0.0,
        awaiting_release=list(session.awaiting or ()),
        sources=_source_views(session),
        max_packet_size=session.max_packet,
        topic_aliases=session.alias_limit,
        published=session.received,
        will=WillView(topic=will.topic, qos=will.qos, retain=will.retain, delay=session.will_delay) if will else None,
        subscriptions=[SubscriptionView.of(subscription) for subscription in shown],
    )


def _source_views(session: Session) -> list[SourceView]:
    slots = session.scheduler.slots.values() if session.scheduler is not None else ()
    return [
        SourceView(
            source=slot.kind.name,
            filters=list(slot.subscriptions),
            waiting=len(slot.buffer),
            unacked=slot.unacked,
            promised=slot.promised,
            recreating=slot.retry is not None,
        )
        for slot in islice(slots, MAX_SUBSCRIPTIONS)
    ]
