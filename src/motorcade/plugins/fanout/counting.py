"""Counts of a cluster: one member counts the requests, as a reader of the stream `receipts`; the others ask it.

    steward of the stream's cell ─▶ attaches the home of the stream: a fence
          ─▶ the one before counts no more, or is gone
          ─▶ last checkpoint ─▶ what the stream has behind it ─▶ checkpoints, with the fence

Rule 1: a checkpoint is a decision of the member with the fence. So one that counted before, and does not know that it
        does no more, changes none.
Rule 2: the new one loads when the one before has said that nothing of it is under way, or is gone: its checkpoints lie
        in many cells, and the fence guards but one.
Rule 3: an answer has everything that was in the stream when the question came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.receipt import State
from motorcade.extension.cluster import AskError
from motorcade.extension.declared import UnknownError
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.counters import RequestCounters
from motorcade.plugins.fanout.members import PATIENCE, FanoutMembers
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.plugins.fanout.views import PENDING, RequestView, TargetView, Wanted
from motorcade.storage.ports import Fence, Store, StoreError, StoreFencedError

if TYPE_CHECKING:
    from motorcade.plugins.fanout.queries import Queries

COUNTED: Final = "fanout.counted"
UNCOUNT: Final = "fanout.uncount"
INTERVAL: Final = 1.0  #: seconds between two looks at the role, and at the stream
AGAIN: Final = 0.2  #: seconds until a question is asked again


T = TypeVar("T")


class Query(msgspec.Struct, array_like=True, gc=False):
    """A question about requests."""

    what: str  #: requests, status, targets, place
    request_id: str = ""
    state: str = ""  #: `Wanted`; empty: any
    after: str = ""
    limit: int = 0


class _Reply(msgspec.Struct, array_like=True):
    found: msgspec.Raw = msgspec.Raw(b"\xc0")
    unknown: str | None = None  #: text of an `UnknownError`


_encode = msgspec.msgpack.Encoder().encode
_decode_query = msgspec.msgpack.Decoder(Query).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class CountingRole:
    """The role, as one member sees it."""

    def __init__(self, context: Context, members: FanoutMembers, counters: RequestCounters, queries: Queries) -> None:
        self._context = context
        self._members = members
        self._cluster = members.cluster
        self._store: Store = context.store
        self._counters = counters
        self._queries = queries
        self._fence: Fence | None = None  # it is this member
        self._counting = ""  # the other one that has answered last
        self._changing = asyncio.Lock()

    def start(self) -> None:
        """Begin to answer, and to hear who counts."""
        context, cluster = self._context, self._cluster
        context.at_end(cluster.on_ask(COUNTED, self._answer))
        context.at_end(cluster.on_ask(UNCOUNT, self._uncount))
        context.spawn(self.run, "counting")

    # -- the role

    @property
    def is_here(self) -> bool:
        """Return True if this member counts."""
        return self._fence is not None

    async def run(self) -> None:
        """Take the role when it is this member's, and count, until cancelled."""
        feed = self._store.feeds.feed_of(RECEIPTS)
        while True:
            try:
                if self._fence is None and self._cluster.is_steward(feed):
                    async with self._changing:
                        await self._take()
                if self._fence is not None:
                    await self._count()
            except StoreFencedError:
                await self._let_go()  # another one has taken it
            except StoreError as error:
                self._context.counters["ledger_failed"] += 1
                self._context.log.warning("fanout_ledger_not_written", error=str(error))
            await asyncio.sleep(INTERVAL)

    async def _take(self) -> None:
        attached = await self._store.coordination.attach(RECEIPTS, self._members.me)
        before = attached.previous
        while before != self._members.me and before and self._members.is_alive(before):  # rule 2
            try:
                await self._cluster.ask(before, UNCOUNT, patience=PATIENCE)
            except AskError:
                await asyncio.sleep(AGAIN)
            else:
                break
        await self._counters.reload()
        self._fence = attached.fence
        self._context.log.info("fanout_counts", member=self._members.me, before=before)

    async def _count(self) -> None:
        """Count what has come, and write a checkpoint (rule 1)."""
        async with self._changing:
            if self._fence is not None:
                await self._counters.follow()
                await self._counters.checkpoint(self._fence)

    async def _let_go(self) -> None:
        async with self._changing:
            self._fence = None
            self._counters.forget_all()

    async def _uncount(self, _member: str, _body: bytes) -> bytes:
        """Count no more: another member does."""
        if self._fence is not None:
            await self._let_go()
        return b""

    async def stop(self) -> None:
        """Write the last checkpoint."""
        if self._fence is not None:
            await self._count()
            await self._store.coordination.detach(self._fence)

    # -- questions

    async def requests(self, after: str, limit: int) -> Sequence[RequestView]:
        """Return requests in the order of their ids."""
        return await self._ask(Query("requests", after=after, limit=limit), list[RequestView])

    async def status(self, request_id: str) -> RequestView:
        """Return one request; `UnknownError`."""
        return await self._ask(Query("status", request_id), RequestView)

    async def targets(self, request_id: str, state: Wanted, after: str, limit: int) -> Sequence[TargetView]:
        """Return the deliveries, each with its last receipt."""
        return await self._ask(Query("targets", request_id, str(state or ""), after, limit), list[TargetView])

    async def place(self, request_id: str) -> int:
        """Return the offset of the stream behind which the receipts of a request begin."""
        return await self._ask(Query("place", request_id), int)

    async def _ask(self, query: Query, kind: type[T]) -> T:
        """Return the answer, from the member that counts; `StoreError` if it cannot be found out."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while True:
            if self._fence is not None:
                async with self._changing:
                    if self._fence is not None:
                        found: T = await self._here(query)
                        return found
            why = "no member counts yet"
            peers = [peer.id for peer in self._cluster.peers]
            for member in sorted(peers, key=lambda peer: peer != self._counting):
                try:
                    body = await self._cluster.ask(member, COUNTED, _encode(query), patience=PATIENCE)
                except AskError as error:
                    why = str(error)
                    continue
                self._counting = member
                reply = _decode_reply(body)
                if reply.unknown is not None:
                    raise UnknownError(reply.unknown)
                return msgspec.msgpack.decode(reply.found, type=kind)
            if loop.time() > until:
                raise StoreError(f"the counts of requests are not known here: {why}; ask again, or another node")
            await asyncio.sleep(AGAIN)

    async def _here(self, query: Query) -> Any:
        await self._counters.follow()  # rule 3
        queries = self._queries
        match query.what:
            case "requests":
                return await queries.requests(query.after, query.limit)
            case "status":
                return await queries.status(query.request_id)
            case "targets":
                state: Wanted = PENDING if query.state == PENDING else State(query.state) if query.state else None
                return await queries.targets(query.request_id, state, query.after, query.limit)
        return self._counters.place(query.request_id)

    async def _answer(self, _member: str, body: bytes) -> bytes:
        query = _decode_query(body)
        async with self._changing:
            if self._fence is None:
                raise MotorcadeError(f"{self._members.me} does not count the requests")
            try:
                return _encode(_Reply(msgspec.Raw(_encode(await self._here(query)))))
            except UnknownError as error:
                return _encode(_Reply(unknown=str(error)))
