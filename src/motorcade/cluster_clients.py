"""Clients of all members of a cluster, from any one of them.

    list ─▶ ask every member for its part of the page ─▶ one page, in the order of ids ─▶ then sessions that sleep,
                                                                                          cell by cell, from the store
    show ─▶ this member ─▶ all others at once ─▶ the store
    kick ─▶ this member ─▶ all others at once ─▶ claim the client, and end its session

Rule 1: a member that does not answer in time is named in the answer, and what is told is what is known without it.
Rule 2: a client that is attached to a member that does not answer is taken from it when it is kicked: what it still
        does there has no effect on its session any more (`attachments`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from heapq import nsmallest
from typing import Final

import msgspec
import structlog

from motorcade.broker import session_records as records
from motorcade.broker.attachments import Attachments
from motorcade.broker.session_records import SESSIONS, SUBSCRIPTIONS, SessionRecord
from motorcade.client_control import (
    DISCONNECTED,
    PROTOCOLS,
    REMOVED,
    ClientDetail,
    ClientPage,
    ClientView,
    Kicked,
    LocalClients,
    NotFoundError,
    SubscriptionView,
    WillView,
    matches,
)
from motorcade.clock import time
from motorcade.core.errors import MotorcadeError
from motorcade.core.subscription import Subscription
from motorcade.extension.ask_all import UnansweredError, ask_all, name_of
from motorcade.extension.cluster import AskError, Cluster
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import Store, StoreRefusedError

log = structlog.stdlib.get_logger("motorcade.control")

PAGE_QUESTION: Final = "clients"
SHOW_QUESTION: Final = "client"
KICK_QUESTION: Final = "kick"
#: What a cursor begins with when all clients that are attached to a member have been told; no client id does.
ASLEEP: Final = "#"
CELLS: Final = 2.0  #: seconds after which a page of sessions that sleep ends with a whole cell
READ: Final = 50  #: sessions whose mailbox is looked at together
LATE: Final = 30.0  #: seconds that a member may take to answer that was silent when a client was kicked
AGAIN: Final = 1.0  #: seconds until it is asked again
TRIES: Final = 3  #: times that a client is looked for that moves meanwhile


class PageQuestion(msgspec.Struct, array_like=True):
    """The question for a part of a page."""

    cursor: str
    limit: int
    search: str


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(PageQuestion).decode
_decode_page = msgspec.msgpack.Decoder(ClientPage).decode
_decode_detail = msgspec.msgpack.Decoder(ClientDetail).decode


class ClusterClients:
    """The clients of all members."""

    def __init__(self, cluster: Cluster, local: LocalClients, attachments: Attachments, store: Store) -> None:
        self._cluster = cluster
        self._local = local
        self._attachments = attachments
        self._store = store
        self._late: set[asyncio.Task[None]] = set()
        cluster.on_ask(PAGE_QUESTION, self._answer_page)
        cluster.on_ask(SHOW_QUESTION, self._answer_show)
        cluster.on_ask(KICK_QUESTION, self._answer_kick)

    # -- the list

    async def page(self, cursor: str, limit: int, search: str, node: str) -> ClientPage:
        if cursor.startswith(ASLEEP):
            return await self._asleep(cursor, limit, search)
        members = self._members(node)
        question = _encode(PageQuestion(cursor, limit, search))
        asked = [member for member in members if member != self._cluster.me]
        here = self._here(cursor, limit, search) if self._cluster.me in members else _nothing()
        page, answers = await asyncio.gather(here, ask_all(self._cluster, PAGE_QUESTION, question, asked))
        pages = [page, *(_decode_page(answer) for answer in answers.found.values())]
        found = _merged(view for page in pages for view in page.clients)
        more = len(found) > limit or any(page.cursor is not None for page in pages)
        found = found[:limit]
        following = found[-1].client_id if more and found else None
        if following is None and not node:
            rest = await self._asleep(f"{ASLEEP}0/", limit - len(found), search) if len(found) < limit else None
            following = rest.cursor if rest is not None else f"{ASLEEP}0/"
            told = {view.client_id for view in found}
            found += (view for view in rest.clients if view.client_id not in told) if rest is not None else ()
        return ClientPage(
            clients=found, count=sum(page.count for page in pages), cursor=following, unanswered=answers.silent
        )

    def _members(self, node: str) -> list[str]:
        members = [self._cluster.me, *(peer.id for peer in self._cluster.peers)]
        wanted = [member for member in members if node in ("", name_of(member))]
        if not wanted:
            names = ", ".join(sorted(map(name_of, members)))
            raise NotFoundError(f"there is no node {node!r} in this cluster; there are {names}")
        return wanted

    async def _here(self, cursor: str, limit: int, search: str) -> ClientPage:
        page = await self._local.page(cursor, limit, search, "")
        me = name_of(self._cluster.me)
        return msgspec.structs.replace(page, clients=[msgspec.structs.replace(view, node=me) for view in page.clients])

    async def _answer_page(self, _member: str, body: bytes) -> bytes:
        question = _decode_question(body)
        return _encode(await self._here(question.cursor, question.limit, question.search))

    async def _asleep(self, cursor: str, limit: int, search: str) -> ClientPage:
        """Return sessions that sleep, by the number of their cell and then by id; a cell is read as a whole."""
        number, _, after = cursor[len(ASLEEP) :].partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 9):
            raise NotFoundError(f"{cursor!r} is no cursor")
        feed, until = int(number), time() + CELLS
        found: list[ClientView] = []
        while feed < self._cluster.feeds and len(found) <= limit and time() < until:
            cell = await self._cell(feed, after, limit + 1 - len(found), search)
            found += cell
            if len(found) > limit:
                break
            feed, after = feed + 1, ""
        if len(found) > limit:
            last = found[limit - 1]
            following: str | None = f"{ASLEEP}{self._feed_of(last.client_id)}/{last.client_id}"
        else:
            following = f"{ASLEEP}{feed}/" if feed < self._cluster.feeds else None
        return ClientPage(clients=found[:limit], count=0, cursor=following)

    def _feed_of(self, client_id: str) -> int:
        return self._store.feeds.feed_of(CLIENT + client_id)

    async def _cell(self, feed: int, after: str, limit: int, search: str) -> list[ClientView]:
        wanted = search.casefold()
        found: dict[str, SessionRecord] = {}
        async for client_id, value in self._store.records.scan(SESSIONS, time(), feed=feed):
            if client_id <= after or self._attachments.has(client_id):
                continue
            record = _readable(client_id, value)
            if record is not None and not record.connected and matches(client_id, record.username, wanted):
                found[client_id] = record
        ids = nsmallest(limit, found)
        views: list[ClientView] = []
        for at in range(0, len(ids), READ):
            views += await asyncio.gather(*(self._sleeper(id_, found[id_]) for id_ in ids[at : at + READ]))
        return views

    async def _sleeper(self, client_id: str, record: SessionRecord) -> ClientView:
        info = await self._store.mailboxes.info(records.owner_of(client_id))
        subscriptions = await self._store.records.of_home(SUBSCRIPTIONS, CLIENT + client_id, time())
        return ClientView(
            client_id=client_id,
            username=record.username,
            connected=False,
            host=record.host,
            port=0,
            listener=record.listener,
            protocol=PROTOCOLS.get(record.version, str(record.version)),
            keep_alive=0,
            clean_start=False,
            connected_at=0.0,
            disconnected_at=record.disconnected_at,
            expires_at=record.expires_at,
            subscriptions=len(subscriptions),
            inflight=0,
            queued=info.entries,
            queued_bytes=info.size_bytes,
        )

    # -- one client

    async def show(self, client_id: str) -> ClientDetail:
        found = await self._show_here(client_id)
        if found is not None:
            return found
        answers = await ask_all(self._cluster, SHOW_QUESTION, client_id.encode())
        details = [_decode_detail(answer) for answer in answers.found.values() if answer]
        if details:  # it moves: the one it is connected to knows more
            return max(details, key=lambda detail: (detail.client.connected, detail.client.connected_at))
        value = await self._store.records.get(SESSIONS, client_id, time())
        record = _readable(client_id, value) if value is not None else None
        if record is not None:
            detail = await self._sleeping_detail(client_id, record)
            return msgspec.structs.replace(detail, unanswered=answers.silent)
        raise _missing(client_id, answers.silent)

    async def _show_here(self, client_id: str) -> ClientDetail | None:
        try:
            detail = await self._local.show(client_id)
        except NotFoundError:
            return None
        view = msgspec.structs.replace(detail.client, node=name_of(self._cluster.me))
        return msgspec.structs.replace(detail, client=view)

    async def _answer_show(self, _member: str, body: bytes) -> bytes:
        detail = await self._show_here(body.decode())
        return b"" if detail is None else _encode(detail)

    async def _sleeping_detail(self, client_id: str, record: SessionRecord) -> ClientDetail:
        home, now = CLIENT + client_id, time()
        stored = await self._store.records.of_home(SUBSCRIPTIONS, home, now)
        awaiting = await self._store.records.of_home(records.AWAITING, home, now)
        subscriptions: list[Subscription] = []
        for key, value in stored.items():
            subscriptions.append(records.subscription_from(records.unpair(key)[1], value))
        will = records.will_from(record.will, records.client_from(client_id, record)) if record.will else None
        return ClientDetail(
            client=await self._sleeper(client_id, record),
            created_at=record.created_at,
            session_expiry=record.expiry,
            superuser=record.superuser,
            certificate=None,
            window=record.window,
            inflight_ids=[],
            held_seconds=0.0,
            awaiting_release=sorted(int(records.unpair(key)[1]) for key in awaiting),
            sources=[],
            max_packet_size=0,
            topic_aliases=0,
            published=0,
            will=WillView(topic=will.topic, qos=will.qos, retain=will.retain, delay=record.will.delay)
            if will is not None and record.will is not None
            else None,
            subscriptions=[SubscriptionView.of(subscription) for subscription in subscriptions],
        )

    # -- sending one away

    async def kick(self, client_id: str) -> Kicked:
        silent: dict[str, str] = {}
        for _ in range(TRIES):
            if (done := await self._kick_here(client_id)) is not None:
                return done
            answers = await ask_all(self._cluster, KICK_QUESTION, client_id.encode())
            silent = answers.silent
            for node, answer in answers.found.items():
                if answer:
                    return Kicked(client_id=client_id, result=answer.decode(), node=node)
            if not silent and await self._store.records.get(SESSIONS, client_id, time()) is None:
                raise NotFoundError(f"there is no client {client_id!r}")
            try:
                await self._attachments.adopt(client_id)
            except StoreRefusedError as error:
                log.info("kick_again", client_id=client_id, reason=str(error))  # it moves, or its member is silent
                if silent:
                    return await self._take_away(client_id, silent)
                continue
            if await self._kick_here(client_id) is None:
                raise _missing(client_id, silent)
            return Kicked(client_id=client_id, result=REMOVED, node=None, unanswered=silent)
        raise UnansweredError(f"client {client_id!r} moves all the time, try again", silent)

    async def _take_away(self, client_id: str, silent: dict[str, str]) -> Kicked:
        """Claim a client from a member that does not answer (rule 2), and close its connection when that goes on."""
        await self._attachments.claim(client_id)
        for peer in self._cluster.peers:
            if name_of(peer.id) in silent:
                task = asyncio.create_task(self._kick_late(client_id, peer.id), name="control.kick")
                self._late.add(task)
                task.add_done_callback(self._late.discard)
        return Kicked(client_id=client_id, result=DISCONNECTED, node=None, unanswered=silent)

    async def _kick_late(self, client_id: str, member: str) -> None:
        while self._cluster.peer(member) is not None:
            try:
                await self._cluster.ask(member, KICK_QUESTION, client_id.encode(), patience=LATE)
            except AskError:
                await asyncio.sleep(AGAIN)
            else:
                return

    async def _kick_here(self, client_id: str) -> Kicked | None:
        try:
            done = await self._local.kick(client_id)
        except NotFoundError:
            return None
        return msgspec.structs.replace(done, node=name_of(self._cluster.me))

    async def _answer_kick(self, _member: str, body: bytes) -> bytes:
        done = await self._kick_here(body.decode())
        return b"" if done is None else done.result.encode()


async def _nothing() -> ClientPage:
    return ClientPage(clients=[], count=0, cursor=None)


def _merged(views: Iterable[ClientView]) -> list[ClientView]:
    """Return views in the order of their ids; of a client that moves, the one that knows most."""
    best: dict[str, ClientView] = {}
    for view in views:
        known = best.get(view.client_id)
        if known is None or (known.connected, known.connected_at) < (view.connected, view.connected_at):
            best[view.client_id] = view
    return [best[client_id] for client_id in sorted(best)]


def _readable(client_id: str, value: bytes) -> SessionRecord | None:
    try:
        return records.decode_session(value)
    except msgspec.MsgspecError as error:
        log.error("session_unreadable", client_id=client_id, error=str(error))  # noqa: TRY400
        return None


def _missing(client_id: str, silent: dict[str, str]) -> MotorcadeError:
    if silent:
        return UnansweredError(f"client {client_id!r} is at no node that answers", silent)
    return NotFoundError(f"there is no client {client_id!r}")
