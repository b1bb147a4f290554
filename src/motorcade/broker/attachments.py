"""The clients that are attached to this member: how they come, move and go (several nodes on one store).

    absent ──claim──▶ CLAIMING ──▶ ATTACHED ──sleep, end──▶ LEAVING ──▶ absent
                         │  attached elsewhere: ask that member to let go, for `LET_GO` at most; then displace it

A client's home in the store is attached to the member that serves it. What is decided about the client (the record of
its session, subscriptions, ids of its QoS 2 messages) is written with the fence of that attachment; a member that was
displaced writes nothing of it any more. Facts (acknowledgements, marks) need no fence.

Rule 1: a client is claimed before its session is looked for. What the store has of it is brought into memory then, as
        a start of a lone node does it for all sessions; after that everything goes on as on a lone node.
Rule 2: who loses a client ends its connection, writes its session down, and detaches it. Then the new member goes on.
        It reads what the client publishes only when everything is settled that the client has published at the old one
        (`drained`), or that one is fenced: the fence of a home does not cover what its client writes elsewhere
        (retained messages, keys that replace). What is under way counts until its outcome is known, answered or not:
        also messages of QoS 0, the will, and what the old one itself waits for (`under_way`). A client whose connection
        broke is detached when that is settled, unless another member asks for it: a member that attaches a client which
        is attached nowhere does not know that it should wait.
Rule 3: a session whose client is away belongs to no member. It is written down and forgotten here; what it must get is
        appended by the publishers' members, and its end and its will are due in its cell (`steward`).
Rule 4: claims of one client follow each other; a client that comes back while it leaves is claimed again after that.
Rule 5: while the store is away, clients with clean sessions are let in and claimed later; of two with the same id, the
        one that is claimed last goes on.
Rule 6: to publish a will is a decision (`SessionStore.take_will`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from motorcade.broker.registry import Registry
from motorcade.broker.session import Session
from motorcade.broker.session_records import AWAITING, SESSIONS, SUBSCRIPTIONS, owner_of
from motorcade.broker.session_store import SessionStore
from motorcade.clock import time
from motorcade.commit import Commit, joined
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.cluster import AskError, Cluster
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import Batch, Fence, Opened, StoreError, StoreFencedError, StoreRefusedError, Written

log = structlog.stdlib.get_logger("motorcade.attachments")

LET_GO: Final = 1.0  #: seconds that another member may take to let a client go, before it is displaced
DRAIN_AGAIN: Final = 0.2  #: seconds until a member that could not be asked whether a client is drained is asked again
DRAIN_PATIENCE: Final = 30.0  #: seconds that it may take to answer
SETTLE: Final = 1.0  #: seconds between two looks at clients that could not leave at once
CLAIM_AGAIN: Final = 1.0  #: seconds until a client that was let in without the store is claimed again

COLLECTIONS: Final = (SESSIONS, SUBSCRIPTIONS, AWAITING)  #: what is read with a claim


class Attaching(Enum):
    """The state of a client's attachment to this member."""

    CLAIMING = auto()
    ATTACHED = auto()
    LEAVING = auto()


class ClientClaim(NamedTuple):
    """A claim of a client: for which kind of session."""

    lasting: bool  #: its session outlives the connection
    clean: bool  #: what it had before is to end


ADOPTION: Final = ClientClaim(lasting=True, clean=False)  #: no client is there: something of its session is due


class AttachedClient:
    """A client that is attached to this member, or about to be."""

    __slots__ = (
        "asked",
        "claim",
        "claimed",
        "drained",
        "fence",
        "flushed",
        "id",
        "left",
        "noted",
        "state",
        "told_to",
    )

    def __init__(self, client_id: str, claim: ClientClaim) -> None:
        self.id = client_id
        self.claim = claim
        self.state = Attaching.CLAIMING
        self.fence: Fence | None = None  #: None: let in while the store is away
        self.noted = 0  #: number of the last note of its cell that its session here takes into account
        self.told_to = 0  #: position of the last entry of its mailbox that was told of before its session was here
        self.asked = False  #: by another member, to let it go: that one waits until it is drained
        self.drained: Commit[None] | None = None  #: of the member that had it before, until that is so
        self.flushed = False  #: what its session has acknowledged is written, as far as that can be done
        self.claimed: Commit[None] = Commit()
        self.left: Commit[None] = Commit()  #: it is no longer attached here


class LetGo(msgspec.Struct, array_like=True):
    """The question `let_go`: give a client to the member that asks."""

    client_id: str
    resume: bool  #: its session goes on


_encode = msgspec.msgpack.Encoder().encode
_decode_let_go = msgspec.msgpack.Decoder(LetGo).decode


class Attachments:
    """The clients of one member."""

    def __init__(
        self,
        cluster: Cluster,
        sessions: SessionStore,
        registry: Registry,
        publish_will: Callable[[Message], None],
    ) -> None:
        self._cluster = cluster
        self._sessions = sessions
        self._store = sessions.store
        self._loop = sessions.loop
        self._registry = registry
        self._publish_will = publish_will
        self._moves = registry.stats.moves
        self._clients: dict[str, AttachedClient] = {}
        self._idle: dict[str, None] = {}  # attached, and without a connection
        self._under_way: dict[str, set[Commit[Any]]] = {}  # by client: what it has published, and is not settled
        self._asked: dict[tuple[str, str], Commit[None]] = {}  # who asks, about whom: until that is settled
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        cluster.on_ask("let_go", self._asked_to_let_go)
        cluster.on_ask("drained", self._asked_drained)
        cluster.on_ask("settled", self._asked_settled)

    def __len__(self) -> int:
        """Return how many clients are attached, or about to be."""
        return len(self._clients)

    def start(self) -> None:
        """Begin to look after clients that could not leave at once."""
        self._timer = self._loop.call_later(SETTLE, self._settle_all)

    def stop(self) -> None:
        """End what is under way; the clients stay attached until this member is gone."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    # -- who is attached

    def fence(self, client_id: str) -> Fence | None:
        """Return the fence of a client's decisions; None if it was let in while the store was away."""
        client = self._clients.get(client_id)
        return client.fence if client is not None else None

    def has(self, client_id: str) -> bool:
        """Return True if this member decides about a client."""
        client = self._clients.get(client_id)
        return client is not None and client.fence is not None

    def fences(self) -> list[Fence]:
        """Return the fences of all clients that are attached to this member now."""
        attached = (client for client in self._clients.values() if client.state is Attaching.ATTACHED)
        return [client.fence for client in attached if client.fence is not None]

    def generation(self, fence: Fence) -> int:
        """Return that of the mailbox of a client that is attached here; 0: it has none, as far as is known."""
        session = self._registry.sessions.get(fence.home.removeprefix(CLIENT))
        return session.durable.generation if session is not None and session.durable is not None else 0

    def forgotten(self, fence: Fence) -> None:
        """Note that the store has forgotten an attachment: no member would tell this one what it stores for the client.

        Or that it has forgotten its mailbox: nothing more would be stored for it.

        One whose session lasts comes again, and finds all there is; another one is claimed again (rule 5).
        """
        client = self._clients.get(fence.home.removeprefix(CLIENT))
        if client is None or client.fence != fence or client.state is not Attaching.ATTACHED:
            return
        log.warning("attachment_forgotten", client_id=client.id)
        if client.claim.lasting:
            self._drop(client)
        else:
            client.fence = None
            self._claim_later(client)

    def drained(self, client_id: str) -> Commit[None] | None:
        """Return what a client's PUBLISHes have to wait for; None: nothing (rule 2)."""
        client = self._clients.get(client_id)
        return client.drained if client is not None else None

    def noted(self, client_id: str) -> int:
        """Return the number of the last note that the session of a client here takes into account."""
        client = self._clients.get(client_id)
        return client.noted if client is not None else 0

    def note(self, client_id: str, number: int) -> None:
        """Remember the number of a note that was written with a decision about a client."""
        client = self._clients.get(client_id)
        if client is not None:
            client.noted = max(client.noted, number)

    def note_gap(self, feed: int, end: int) -> None:
        """Note that notes above this one were forgotten: what has their numbers from now on is not known here."""
        for client in self._clients.values():
            if client.noted > end and self._store.feeds.feed_of(CLIENT + client.id) == feed:
                client.noted = end

    # -- they come

    def claim(self, client_id: str, *, lasting: bool = True, clean: bool = False) -> Commit[None]:
        """Attach a client to this member, and bring back what the store has of it (rule 1).

        `lasting`: its session outlives the connection, so replicas have to confirm it. `clean`: what it had before is
        to end. The commit fails with the error of the store.
        """
        return self._begin(client_id, ClientClaim(lasting=lasting, clean=clean))

    def adopt(self, client_id: str) -> Commit[None]:
        """Claim a client for what is due of it, unless a member that is alive has it: the commit fails then."""
        return self._begin(client_id, ADOPTION)

    def _begin(self, client_id: str, claim: ClientClaim) -> Commit[None]:
        client = self._clients.get(client_id)
        if client is not None and client.state is Attaching.LEAVING:  # rule 4
            again: Commit[None] = Commit()
            client.left.then(lambda: again.follow(self._begin(client_id, claim)))
            return again
        if client is None:
            client = self._clients[client_id] = AttachedClient(client_id, claim)
            self._start(self._claim(client), "claim")
        elif client.claim is ADOPTION:
            client.claim = claim  # its client is here
        return client.claimed

    async def _claim(self, client: AttachedClient) -> None:
        try:
            opened = await self._open(client)
        except StoreError as error:
            lasting = client.claim.lasting
            if lasting or not getattr(error, "away", False):
                self._forget(client)
                client.claimed.finish(error)
                return
            self._claim_later(client)  # rule 5
        else:
            client.fence, client.noted = opened.attached.fence, opened.attached.noted
            self._sessions.wake(client.id, opened, client.told_to)
        client.state = Attaching.ATTACHED
        client.claimed.finish()  # its connection goes on, and opens the session
        self.idle(client.id)

    def hinted(self, client_id: str, position: int) -> None:
        """Note an entry for a client whose session is not here: the store may have attached it just now."""
        client = self._clients.get(client_id)
        if client is not None and client.state is Attaching.CLAIMING:
            client.told_to = max(client.told_to, position)

    async def _open(self, client: AttachedClient) -> Opened:
        """Attach a home, and read what lies there. The member that has it is asked to let it go first."""
        cluster, displace, let_go = self._cluster, "", False
        while True:
            found = await self._store.coordination.try_open(
                owner_of(client.id), cluster.me, COLLECTIONS, time(), displace=displace, wait=client.claim.lasting
            )
            if isinstance(found, Opened):
                if displace and client.claim is not ADOPTION:
                    self._moves["came" if let_go else "displaced"] += 1
                return found
            other = found.member
            if cluster.peer(other) is not None:  # else it is fenced
                if client.claim is ADOPTION:
                    raise StoreRefusedError(f"{client.id} is attached to {other}")
                let_go = await self._ask_to_let_go(client, other)
            displace = other

    async def _ask_to_let_go(self, client: AttachedClient, member: str) -> bool:
        """Ask the member that has a client; True if it has let it go."""
        client.drained = self._await_drained(client, member)
        question = LetGo(client.id, resume=not client.claim.clean)
        try:
            await self._cluster.ask(member, "let_go", _encode(question), patience=LET_GO)
        except AskError as error:
            log.info("client_displaced", client_id=client.id, member=member, reason=str(error))
            return False
        return True

    def _await_drained(self, client: AttachedClient, member: str) -> Commit[None]:
        """Return a commit that is done when a member has answered all that a client has published there (rule 2)."""
        drained: Commit[None] = Commit()

        async def ask() -> None:
            while self._cluster.peer(member) is not None:
                # One that is no longer here may be there again by now, and must not be taken away.
                noun = "drained" if self._clients.get(client.id) is client else "settled"
                try:
                    await self._cluster.ask(member, noun, client.id.encode(), patience=DRAIN_PATIENCE)
                except AskError:
                    await asyncio.sleep(DRAIN_AGAIN)
                else:
                    break
            if client.drained is drained:
                client.drained = None
            drained.finish()

        self._start(ask(), "drained")
        return drained

    def _claim_later(self, client: AttachedClient) -> None:
        """Claim a client that was let in while the store was away, until that succeeds."""

        async def again() -> None:
            while self._clients.get(client.id) is client:
                await asyncio.sleep(CLAIM_AGAIN)
                try:
                    opened = await self._open(client)
                except StoreError:
                    continue
                client.fence, client.noted = opened.attached.fence, opened.attached.noted
                for will in self._sessions.supersede(client.id, opened):  # a clean session takes its place
                    self._publish_will(will)
                self.idle(client.id)
                return

        self._start(again(), "claim")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=f"attachments.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._sessions.supervisor.note(task.get_name(), error)

    # -- they go

    def disconnected(self, session: Session) -> None:
        """Note that a client has no connection here any more; its session may have ended with it."""
        self._drain(session)
        self.idle(session.client.client_id)

    def idle(self, client_id: str) -> None:
        """Look whether a client can leave: it has no connection here, or its session has ended."""
        if client_id in self._clients:
            self._idle[client_id] = None
            self._loop.call_soon(self._settle, client_id)

    def _settle_all(self) -> None:
        self.start()
        for client_id in list(self._idle):
            self._settle(client_id)

    def _settle(self, client_id: str) -> None:
        """Put the session of a client without a connection to sleep; detach the client if it has none (rule 3)."""
        client = self._clients.get(client_id)
        session = self._registry.sessions.get(client_id)
        if (
            client is None
            or client.state is not Attaching.ATTACHED
            or (session is not None and session.link is not None)
        ):
            self._idle.pop(client_id, None)
            if client is not None and client.state is Attaching.ATTACHED:
                client.asked = False  # it has come back
            return
        if client.fence is None:
            if session is None:
                self._forget(client)  # it came and went while the store was away
            return
        if client.drained is not None:
            self.under_way(client_id, client.drained)
        ending = self._sessions.gone(client_id)
        if ending is None and session is not None and session.owed is not None:
            ending = session.owed.done
        if ending is None and not client.asked:
            ending = self._unsettled(client_id)
        if ending is not None:
            self._settle_after(client, ending)
            return
        batch = Batch()
        if session is not None:
            if session.overdue(time()):
                return  # its will, or its end, comes first
            if not client.flushed:
                client.flushed = True
                self._settle_after(client, self._sessions.flush(session))
                return
            self._sessions.put_to_sleep(batch, session)
        self._leave(client, session, batch)

    def _settle_after(self, client: AttachedClient, commit: Commit[Any]) -> None:
        commit.then(partial(self._loop.call_soon, self._settle, client.id))

    def _leave(self, client: AttachedClient, session: Session | None, batch: Batch) -> None:
        assert client.fence is not None  # noqa: S101 - `_settle` has looked
        self._idle.pop(client.id, None)
        client.state, client.flushed = Attaching.LEAVING, False
        batch.detach(client.fence)
        commit = self._store.write(batch)
        commit.then(partial(self._left, client, session, commit))

    def _left(self, client: AttachedClient, session: Session | None, commit: Commit[Written]) -> None:
        if commit.error is None:
            self._moves["slept"] += session is not None
            wanted = list(session.subscriptions.values()) if session is not None else []
            if session is not None:
                self._registry.forget(session)
            self._forget(client)
            if session is not None and self._sessions.feed is not None:
                self._sessions.feed.slept(session, wanted, client.noted)
                self._sessions.let_go(session)
        elif isinstance(commit.error, StoreFencedError):
            self._drop(client)
        else:  # nothing of it was written; it is tried again
            client.state = Attaching.ATTACHED
            self._idle[client.id] = None

    def _forget(self, client: AttachedClient) -> None:
        self._idle.pop(client.id, None)
        if self._clients.get(client.id) is client:
            del self._clients[client.id]
        client.left.finish()

    def lost(self, client_id: str) -> None:
        """Note that another member decides about a client: end its connection here, and write nothing of it."""
        client = self._clients.get(client_id)
        if client is not None and client.state is Attaching.ATTACHED:
            log.info("client_lost", client_id=client_id, reason="another member has claimed it")
            self._drop(client)

    def _drop(self, client: AttachedClient) -> None:
        """Forget a client that was displaced. What others have noted of it meanwhile was passed over: read it again."""
        self._moves["lost"] += 1
        session = self._registry.sessions.get(client.id)
        if client.drained is not None:
            self.under_way(client.id, client.drained)
        if session is not None:
            link = session.link
            self._drain(session)
            if link is not None:
                link.flush()  # CONNACK may be there: it goes before the goodbye
            self._registry.forget(session)
            self._sessions.let_go(session)
            if link is not None:
                link.end(ReasonCode.SESSION_TAKEN_OVER, "another connection uses this client id")
        self._forget(client)
        self._cluster.reload(self._store.feeds.feed_of(CLIENT + client.id))

    # -- other members ask

    async def _asked_to_let_go(self, member: str, body: bytes) -> bytes:
        """Give a client to another member; answered when it is detached."""
        question = _decode_let_go(body)
        await self._let_go(question.client_id, member, resume=question.resume)
        return b""

    async def _let_go(self, client_id: str, member: str, *, resume: bool) -> None:
        client = self._clients.get(client_id)
        if client is not None and client.state is Attaching.CLAIMING:
            await client.claimed
        if client is None or self._clients.get(client_id) is not client:
            return
        session = self._registry.sessions.get(client_id)
        client.asked = True
        if session is not None and session.link is not None:
            log.info("client_moves", client_id=client_id, member=member)
            self._moves["went"] += 1
            self._drain(session)
            for will in self._registry.let_go(session, time(), resume=resume):
                self._publish_will(will)
        self.idle(client_id)
        await client.left

    # -- what clients have published

    def under_way(self, client_id: str, commit: Commit[Any]) -> None:
        """Note something that a client has published, until its outcome is known."""
        if commit.done:
            return
        under_way = self._under_way.setdefault(client_id, set())
        under_way.add(commit)

        def settled() -> None:
            under_way.discard(commit)
            if not under_way and self._under_way.get(client_id) is under_way:
                del self._under_way[client_id]

        commit.then(settled)

    def _unsettled(self, client_id: str) -> Commit[None] | None:
        """Return the end of what a client has published and is not settled now; None: nothing."""
        under_way = self._under_way.get(client_id)
        if not under_way:
            return None
        settled: Commit[None] = Commit()
        joined(under_way).then(settled.finish)  # whatever the outcome is
        return settled

    def _drain(self, session: Session) -> None:
        """Note what the client of a session has published, and is not answered."""
        if session.acks_wait:
            answered: Commit[None] = Commit()
            session.ack_queue().join(Commit.stored(None), answered.finish, 0)
            self.under_way(session.client.client_id, answered)

    async def _asked_drained(self, member: str, body: bytes) -> bytes:
        """Answer when everything is settled that a client has published here."""
        await self._let_go(body.decode(), member, resume=True)  # it may have been displaced without being asked
        return await self._asked_settled(member, body)

    async def _asked_settled(self, member: str, body: bytes) -> bytes:
        """Answer when what is under way of a client when this is asked is settled.

        What comes later may wait for the one who asks. So a question that is repeated is the same question.
        """
        key = member, body.decode()
        settled = self._asked.get(key)
        if settled is None:
            settled = self._unsettled(key[1])
            if settled is None:
                return b""
            self._asked[key] = settled
            settled.then(partial(self._asked.pop, key, None))
        await settled
        return b""
