"""Nodes that are members of one cluster in one process: one event loop, one clock, one store, and links that are lists.

    members = Members(2)
    with standing(members.clock):
        a, b = members.nodes                     each is a `MemoryNode`
        car = b.client("car")
        car.subscribe("t")
        a.client("p").publish("t", b"x")
        members.link(a, b).held = True           what A sends to B waits, until `let_go`
        members.kill(b)                          what it still had to say is lost

What a node does with the cluster is real. What is not the broker's is done here in the simplest way that keeps its
promises: links (in order, each item once), confirmations, the view, and where a durable session is. A client that
connects somewhere is sent away elsewhere first, and its session is loaded from the store; when it leaves, its session
goes back to sleep, and all members have it as a subscriber. They hear of its subscriptions when these are stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from motorcade.broker import session_records as records
from motorcade.broker.connection import Pause
from motorcade.broker.durable_queue import UNKNOWN
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.relay import Relay
from motorcade.broker.session import Session
from motorcade.broker.session_store import SessionStore
from motorcade.commit import Commit, joined
from motorcade.core.client import ClientInfo
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.cluster import AskHandler, ItemHandler, MemberView, NoteHandler, Peer, Reload
from motorcade.extension.hooks import Callback
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import SPARE_ALL, Batch, Fence, Written
from tests.support.held_store import HeldStore, _run
from tests.support.virtual import Clock, MemoryNode, Turns

PATIENCE = 0.5  #: seconds that a silent peer is waited for
MANY = 1_000_000


class Link:
    """What one member sends to another: a `Peer`, seen from the first one."""

    def __init__(self, cluster: MemoryCluster, there: MemberNode) -> None:
        self.id = there.member
        self.there = there
        self.held = False  #: items wait until they are let go
        self.silent = False  #: items arrive, and are not confirmed
        self.room_for = MANY  #: items that may wait
        self.waiting: deque[tuple[str, bytes]] = deque()
        self.sent: list[str] = []  #: kinds of all items that were ever sent
        self._cluster = cluster
        self._count = self._arrived = 0
        self._commits: list[tuple[int, Commit[None]]] = []
        self._rooms: list[Commit[None]] = []

    @property
    def full(self) -> bool:
        return len(self.waiting) >= self.room_for

    def send(self, kind: str, body: bytes, *, droppable: bool = False) -> None:
        if not self.there.alive or (droppable and self.full):
            return
        self.sent.append(kind)
        self.waiting.append((kind, body))
        self._count += 1
        if not self.held:
            self._cluster.loop.call_soon(self._deliver, 1)

    def _deliver(self, count: int) -> None:
        while self.waiting and count > 0 and self.there.alive:
            count -= 1
            kind, body = self.waiting.popleft()
            self._arrived += 1
            there = self.there.cluster
            there.handlers[kind](there.links[self._cluster.me], body)
        self._settle()

    def _settle(self) -> None:
        """Confirm what has arrived."""
        if self.silent and self.there.alive:
            return
        over = not self.there.alive
        done = [commit for number, commit in self._commits if over or number <= self._arrived]
        self._commits = [one for one in self._commits if not over and one[0] > self._arrived]
        rooms: list[Commit[None]] = []
        if over or not self.full:
            rooms, self._rooms = self._rooms, rooms
        for commit in (*done, *rooms):
            if not commit.done:
                commit.settle(None)

    def confirm(self) -> Commit[None]:
        commit: Commit[None] = Commit()
        if not self.there.alive or (self._arrived >= self._count and not self.silent):
            commit.settle(None)
            return commit
        self._commits.append((self._count, commit))
        self._cluster.loop.call_later(PATIENCE, lambda: None if commit.done else commit.settle(None))
        return commit

    def room(self) -> Commit[None]:
        commit: Commit[None] = Commit()
        self._rooms.append(commit)
        if not self.full:
            self._settle()
        return commit

    # -- the test's side; a turn of the loop must follow

    def let_go(self, count: int = MANY) -> None:
        """The oldest items arrive."""
        self._cluster.loop.call_soon(self._deliver, count)

    def speak(self) -> None:
        """Confirm again."""
        self.silent = False
        self._cluster.loop.call_soon(self._settle)


class MemoryCluster:
    """The cluster as one member sees it: a `Cluster`."""

    def __init__(self, node: MemberNode, loop: Turns) -> None:
        self.me = node.member
        self.loop = loop
        self.links: dict[str, Link] = {}
        self.handlers: dict[str, ItemHandler] = {}
        self._told: list[Callable[[], None]] = []
        self._holds = True
        self._again: list[Commit[None]] = []

    @property
    def peers(self) -> Sequence[Peer]:
        return list(self.links.values())

    def peer(self, member: str) -> Peer | None:
        return self.links.get(member)

    def members(self) -> Sequence[MemberView]:
        return ()

    def on_item(self, kind: str, handler: ItemHandler) -> None:
        self.handlers[kind] = handler

    def on_ask(self, noun: str, handler: AskHandler) -> None:
        """No member asks here."""

    async def ask(self, member: str, noun: str, body: bytes = b"", *, patience: float = 5.0) -> bytes:
        raise NotImplementedError

    def on_note(self, code: str, handler: NoteHandler, reload: Reload) -> None:
        """There are no notes here."""

    @property
    def holds(self) -> bool:
        return self._holds

    @holds.setter
    def holds(self, holds: bool) -> None:
        self._holds = holds
        if holds:
            again, self._again = self._again, []
            for commit in again:
                self.loop.call_soon(commit.settle, None)

    def again(self) -> Commit[None]:
        commit: Commit[None] = Commit()
        if self._holds:
            commit.settle(None)
        else:
            self._again.append(commit)
        return commit

    def known(self) -> Commit[None]:
        return joined([link.confirm() for link in self.links.values()])

    def synced(self, feed: int, number: int) -> Commit[None]:
        return self.known()

    def on_change(self, told: Callable[[], None]) -> None:
        self._told.append(told)

    def is_steward(self, feed: int) -> bool:
        return False

    def change(self) -> None:
        """Members have come or gone."""
        for told in self._told:
            told()


class MemberSessions(SessionStore):
    """The durable sessions of a member, which says where they are."""

    node: MemberNode

    def make_durable(self, session: Session) -> None:
        super().make_durable(session)
        self.node.claim(session)

    def subscribe(
        self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()
    ) -> Commit[Written]:
        new, gone = list(added), list(removed)
        commit = super().subscribe(session, new, gone)

        def stored() -> None:
            if commit.error is None and session.durable is not None:
                for node in self.node.others():
                    for subscription in new:
                        node.relay.subscribers.put(session.client_id, session.durable.generation, subscription)
                    for filter_ in gone:
                        node.relay.subscribers.drop(session.client_id, filter_)

        commit.then(stored)
        return commit

    def retire(self, session: Session, filters: Sequence[str]) -> None:
        super().retire(session, filters)
        self.node.release(session.client_id)
        for node in self.node.members.nodes:
            node.relay.subscribers.forget(session.client_id)


class MemberNode(MemoryNode):
    """A node that is a member of a cluster."""

    sessions = MemberSessions

    session_store: MemberSessions | None

    def __init__(self, members: Members, number: int, session: SessionOptions | None) -> None:
        self.member = f"n{number}~{number}"
        self.alive = True
        self.members = members
        super().__init__(
            session,
            Limits(flapping_count=0, connect_rate=0.0),
            cast("asyncio.AbstractEventLoop", members.loop),
            store=members.store if members.lasting else None,
            clock=members.clock,
            process=number,
        )
        if self.session_store is not None:
            self.session_store.node = self
        self.cluster = MemoryCluster(self, members.loop)
        self.fences: dict[str, Fence] = {}

    def join(self) -> None:
        """All links are there."""
        self.relay = Relay(self.cluster, self.state, self.broker.flusher.later, self.broker.supervisor)
        if self.members.lasting:
            self.hooks.add("client.connect", Callback(self._admit, 0, "members"))
            self.hooks.add("client.disconnected", Callback(self._left, 0, "members"))

    # -- where durable sessions are

    def others(self) -> list[MemberNode]:
        return [node for node in self.members.nodes if node is not self]

    async def _admit(self, client: ClientInfo, _reason: ReasonCode) -> None:
        """A client connects: its session comes here."""
        client_id = client.client_id
        if client_id in self.state.registry.sessions:
            return
        for node in self.members.nodes:
            other = node.state.registry.sessions.get(client_id)
            if other is not None and other.link is not None:
                other.link.end(ReasonCode.SESSION_TAKEN_OVER, "connected elsewhere")
        await self.members.quiet()
        self._load(client_id)

    def _load(self, client_id: str) -> None:
        now = self.clock.now
        inner = self.members.store.inner.records
        found = inner.collections.get(records.SESSIONS, {}).get(client_id)
        store = self.session_store
        if found is None or store is None:
            return
        session = store._restored(client_id, records.decode_session(found[0]), now)
        self.state.registry.restore(session)
        for collection, restore in (
            (records.SUBSCRIPTIONS, store._resubscribe),
            (records.AWAITING, store._await_again),
        ):
            for key, value in inner.look(collection, CLIENT + client_id, now).items():
                restore(key, value)
        self.claim(session)

    def claim(self, session: Session) -> None:
        """A durable session is attached here now."""
        store, queue = self.members.store.inner, session.durable
        assert queue is not None
        attached = _run(store.coordination.attach(queue.owner, self.member))
        self.fences[session.client_id] = attached.fence
        batch = Batch()
        batch.make(queue.owner)
        batch.spare(queue.owner, SPARE_ALL)
        store.apply(batch)
        queue.wake(store.mailboxes.look(queue.owner))

    def release(self, client_id: str) -> None:
        """It is so no more."""
        fence = self.fences.pop(client_id, None)
        if fence is not None:
            _run(self.members.store.inner.coordination.detach(fence))

    def _left(self, client: ClientInfo, _why: str) -> None:
        """A client has gone: its session sleeps."""
        session = self.state.registry.sessions.get(client.client_id)
        if session is None or session.durable is None or session.link is not None:
            return
        self.members.going += 1
        self.members.loop.create_task(self._put_to_sleep(session))

    async def _put_to_sleep(self, session: Session) -> None:
        await self.members.written(self)
        self.members.going -= 1
        if session.link is not None or session.ended or session.durable is None:
            return
        batch = Batch()
        sent_to = session.durable.sent_to
        batch.spare(session.durable.owner, SPARE_ALL if sent_to == UNKNOWN else sent_to)
        self.members.store.inner.apply(batch)
        wanted = list(session.subscriptions.values())
        self.state.pubsub.unsubscribe_all(session)
        del self.state.registry.sessions[session.client_id]
        self.release(session.client_id)
        for node in self.members.nodes:
            for subscription in wanted:
                node.relay.subscribers.put(session.client_id, session.durable.generation, subscription)


class Members:
    """See above."""

    def __init__(
        self,
        count: int = 2,
        session: SessionOptions | None = None,
        *,
        store: HeldStore | None = None,
        lasting: bool = True,
    ) -> None:
        """Without `lasting` sessions end with their connections, and the store is not used."""
        self.lasting = lasting
        self.clock = Clock()
        self.loop = Turns(self.clock)
        self.store = store or HeldStore()
        self.going = 0  #: sessions that are being put to sleep
        self.options = session
        self.nodes = [MemberNode(self, number + 1, session) for number in range(count)]
        for node in self.nodes:
            node.cluster.links = {other.member: Link(node.cluster, other) for other in self.nodes if other is not node}
        with self.loop.running():
            for node in self.nodes:
                node.join()
        self.turn()

    def join(self) -> MemberNode:
        """One more member."""
        new = MemberNode(self, max(int(node.member[1:].partition("~")[0]) for node in self.nodes) + 1, self.options)
        for node in self.nodes:
            node.cluster.links[new.member] = Link(node.cluster, new)
            new.cluster.links[node.member] = Link(new.cluster, node)
        with self.loop.running():
            new.join()
            for node in self.nodes:
                node.cluster.change()
        self.nodes.append(new)
        self.turn()
        return new

    def link(self, here: MemberNode, there: MemberNode) -> Link:
        """What one member sends to another."""
        return here.cluster.links[there.member]

    def turn(self) -> None:
        """Everything that can happen now happens."""
        self.loop.turn()

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.nodes[0].wait(seconds)

    def kill(self, node: MemberNode) -> None:
        """A member is gone, and its clients with it; what it has sent and did not arrive is lost."""
        node.alive = False
        self.nodes.remove(node)
        for link in node.cluster.links.values():
            link.waiting.clear()
        node.cluster.links.clear()
        for connection in list(node.broker.connections):
            connection.hold(Pause.CLOSING)
        if node.session_store is not None:
            node.session_store.lease.write = lambda _batch: Commit()  # type: ignore[assignment, method-assign]
        with self.loop.running():
            for client_id, fence in list(node.fences.items()):
                _run(self.store.inner.coordination.detach(fence))
                del node.fences[client_id]
            for other in self.nodes:
                link = other.cluster.links.pop(node.member)
                other.cluster.change()
                link._settle()
        self.turn()

    async def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(100):
            if done():
                return
            await asyncio.sleep(0)
        raise AssertionError("the store is held back")

    async def quiet(self) -> None:
        """Sessions that are on their way to sleep are asleep."""
        await self._until(lambda: not self.going)

    async def written(self, node: MemberNode) -> None:
        """What a node has to write is written."""
        store = node.session_store
        assert store is not None
        await self._until(lambda: not (self.store.waiting or store.writer.rows or list(store.writer.acks)))
