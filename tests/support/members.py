"""Nodes that are members of one cluster in one process: one event loop, one clock, one store, and links that are lists.

    members = Members(2)
    with standing(members.clock):
        a, b = members.nodes                     each is a `MemoryNode`
        car = b.client("car")
        car.subscribe("t")
        a.client("p").publish("t", b"x")
        members.link(a, b).held = True           what A sends to B waits, until `let_go`
        members.kill(b)                          what it still had to say is lost
    b.cluster.held_feeds.held = True         B hears of no notes for a while

    members = Members(2, plugins={"retained": {}})     with plugins; their tasks and writes end with their node

What a node does with the cluster is real: claims of clients, sessions that sleep and wake, the feed of subscriptions,
the steward, plugins, how notes are read. What is below it is done here in the simplest way that keeps its promises:
links (in order, each item once), confirmations, questions, the view, and who is a member.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from motorcade.broker.addressing import Addressing
from motorcade.broker.attachments import Attachments
from motorcade.broker.connection import Pause
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.relay import Relay
from motorcade.broker.shared_bans import SharedBans
from motorcade.broker.steward import Steward
from motorcade.broker.subscription_feed import SubscriptionFeed
from motorcade.cluster.notes import NoteReader
from motorcade.commit import Commit, joined
from motorcade.core.errors import MotorcadeError
from motorcade.extension.cluster import AskError, AskHandler, End, ItemHandler, MemberView, NoteHandler, Peer, Reload
from motorcade.extension.plugin import Loaded, Plugins
from motorcade.storage.ports import (
    Batch,
    FeedEnd,
    FeedPage,
    Feeds,
    FeedTail,
    Store,
    StreamAppend,
    Watcher,
    Written,
)
from tests.support.held_store import HeldStore
from tests.support.virtual import Clock, MemoryNode, Turns

PATIENCE = 0.5  #: seconds that a silent peer is waited for
MANY = 1_000_000
LIMITS = Limits(flapping_count=0, connect_rate=0.0)


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
            if (handler := there.handlers.get(kind)) is not None:
                handler(there.links[self._cluster.me], body)
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


class HeldFeeds:
    """The feeds of the store, of which one member hears nothing while they are held."""

    def __init__(self, feeds: Feeds) -> None:
        self._feeds = feeds
        self._go_on = asyncio.Event()
        self._go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feeds, name)

    def follow(self, after: Sequence[FeedEnd]) -> FeedTail:
        return cast("FeedTail", _HeldTail(self._feeds.follow(after), self._go_on))

    @property
    def held(self) -> bool:
        return not self._go_on.is_set()

    @held.setter
    def held(self, held: bool) -> None:
        """A turn of the loop must follow."""
        if held:
            self._go_on.clear()
        else:
            self._go_on.set()


class _HeldTail:
    def __init__(self, tail: FeedTail, go_on: asyncio.Event) -> None:
        self._tail = tail
        self._go_on = go_on
        self._resets = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tail, name)

    async def next(self) -> tuple[int, FeedPage]:
        while True:
            found = await self._tail.next()
            resets = self._resets
            await self._go_on.wait()
            if resets == self._resets:
                return found

    def reset(self, feed: int, end: FeedEnd) -> None:
        self._resets += 1
        self._tail.reset(feed, end)


def _drop(table: dict[str, Any], key: str, value: object) -> None:
    """Remove what was registered, unless something else has taken its place."""
    if table.get(key) == value:
        del table[key]


class MemoryCluster:
    """The cluster as one member sees it: a `Cluster`."""

    def __init__(self, node: MemberNode, loop: Turns, store: HeldStore) -> None:
        self.me = node.member
        self.loop = loop
        self.store = store
        self.links: dict[str, Link] = {}
        self.handlers: dict[str, ItemHandler] = {}
        self.dead: list[str] = []  #: members that are fenced
        self.mute: set[str] = set()  #: members that do not answer questions
        self.feeds = 1
        self.asked: dict[str, AskHandler] = {}
        self.held_feeds = HeldFeeds(store.feeds)
        self.notes = NoteReader(cast("Feeds", self.held_feeds), self, node.broker.supervisor)
        self._syncs: list[tuple[int, Commit[None]]] = []
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

    def on_item(self, kind: str, handler: ItemHandler) -> End:
        self.handlers[kind] = handler
        return lambda: _drop(self.handlers, kind, handler)

    def on_ask(self, noun: str, handler: AskHandler) -> End:
        self.asked[noun] = handler
        return lambda: _drop(self.asked, noun, handler)

    async def ask(self, member: str, noun: str, body: bytes = b"", *, patience: float = 5.0) -> bytes:
        link = self.links.get(member)
        if link is None:
            raise AskError(f"{member} is gone")
        there = link.there
        answer: asyncio.Future[bytes] = self.loop.create_future()

        async def handle() -> None:
            try:
                handler = there.cluster.asked.get(noun)
                if handler is None:
                    raise AskError(f"{member} does not know the question {noun!r}")
                found = await handler(self.me, body)
            except MotorcadeError as error:
                if not answer.done():
                    answer.set_exception(AskError(str(error)))
                return
            if not answer.done():
                answer.set_result(found)

        if member not in self.mute:
            self.loop.call_soon(lambda: self.loop.create_task(handle()) if there.alive else None)
        gone = self.loop.call_later(
            patience, lambda: None if answer.done() else answer.set_exception(AskError("silent"))
        )
        try:
            return await answer
        finally:
            gone.cancel()

    def on_note(self, code: str, handler: NoteHandler, reload: Reload) -> End:
        return self.notes.on_note(code, handler, reload)

    async def read(self) -> None:
        """Read the notes of the store, as they come."""
        await self.notes.begin()

    def reads(self, feed: int) -> None:
        assert not feed
        self._syncs = [(0, commit) for _, commit in self._syncs]

    def note_handled(self, feed: int) -> None:
        assert not feed
        handled = self.notes.handled(0)
        done = [commit for number, commit in self._syncs if number <= handled]
        self._syncs = [one for one in self._syncs if one[0] > handled]
        for commit in done:
            commit.settle(None)

    def reached(self, feed: int, number: int) -> Commit[None]:
        commit: Commit[None] = Commit()
        self._syncs.append((0 if self.notes.is_reading(feed) else number, commit))
        if not self.notes.is_reading(feed):
            self.note_handled(feed)
        return commit

    def handled(self, feed: int) -> int:
        return self.notes.handled(feed)

    def gap_end(self, feed: int) -> int | None:
        return self.notes.gap_end(feed)

    def reload(self, feed: int) -> None:
        with self.loop.running():  # a test may ask from outside
            self.notes.reload(feed)

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
        commits = [self.known()]
        for link in self.links.values():
            commit: Commit[None] = Commit()
            commits.append(commit)
            commit.follow(link.there.cluster.reached(feed, number))
        return joined(commits)

    def on_change(self, told: Callable[[], None]) -> End:
        self._told.append(told)
        return lambda: self._told.remove(told)

    def is_steward(self, feed: int) -> bool:
        """The first of those that are alive."""
        return self.me == min([self.me, *self.links])

    def fenced(self) -> Sequence[str]:
        return self.dead

    def change(self) -> None:
        """Members have come or gone."""
        for told in self._told:
            told()


class MemberStore:
    """The store, as one member writes to it: nothing any more when that is dead."""

    def __init__(self, store: HeldStore, writer: str) -> None:
        self._store = store
        self.writer = writer  #: likewise: claims are one member's
        self.dead = False
        self.streams = MemberStreams(store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, batch: Batch) -> Commit[Written]:
        if self.dead:
            return Commit()
        commit = self._store.write(batch)
        names = [step.stream for step in batch.steps if isinstance(step, StreamAppend)]
        if names:
            commit.then(lambda: self.streams.tell(names, commit))
        return commit


class MemberStreams:
    """The streams of the store, as one member uses them: what others append, the store does not tell it."""

    def __init__(self, store: HeldStore) -> None:
        self._store = store
        self._watchers: list[Watcher] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store.streams, name)

    def watch(self, told: Watcher) -> Callable[[], None]:
        self._watchers.append(told)
        return lambda: self._watchers.remove(told)

    def tell(self, names: Sequence[str], commit: Commit[Written]) -> None:
        """Tell what this member has appended, when it is stored."""
        if commit.error is not None:
            return
        for name, offsets in zip(names, commit.result.offsets, strict=True):
            for told in self._watchers:
                told(name, offsets[-1])


class MemberNode(MemoryNode):
    """A node that is a member of a cluster."""

    def __init__(self, members: Members, number: int, session: SessionOptions | None) -> None:
        self.member = f"n{number}~{number}"
        self.alive = True
        self.members = members
        super().__init__(
            session,
            members.limits,
            cast("asyncio.AbstractEventLoop", members.loop),
            store=members.store if members.lasting else None,
            clock=members.clock,
            process=number,
        )
        self.cluster = MemoryCluster(self, members.loop, members.store)
        self.tasks: list[asyncio.Task[None]] = []
        self.plugin_store = MemberStore(members.store, f"writer of {self.member}")
        self.plugins = Plugins(self.broker, self.hooks, Path("unused"), self.state.shared.sources)
        self.plugins.store, self.plugins.cluster = self.plugin_store, self.cluster

    def load(self, name: str, **config: Any) -> Loaded:
        """Load a plugin."""
        return self.run(self.plugins.load(name, config))

    def join(self) -> None:
        """All links are there."""
        addressing = Addressing(self.members.addressed)
        self.relay = Relay(self.cluster, self.state, self.broker.flusher.later, self.broker.supervisor, addressing)
        self.bans = SharedBans(self.cluster, cast("Store", self.plugin_store), self.state)
        loop, store = self.members.loop, self.session_store
        if store is not None or self.plugins.loaded():
            self.tasks.append(loop.create_task(self.cluster.read()))
        if store is None:
            return
        self.attachments = Attachments(self.cluster, store, self.state.registry, self.broker.publish_will)
        feed = SubscriptionFeed(self.cluster, store.store, self.attachments, self.relay.subscribers, addressing)
        store.join(self.attachments, feed, addressing)
        self.attachments.start()
        self.steward = Steward(self.cluster, store.store, self.attachments)
        self.tasks.append(loop.create_task(self.steward.run()))

    def due(self) -> None:
        """Sessions whose time is over end, as the broker lets them several times a second."""
        for will in self.state.registry.due(self.clock.now):
            self.broker.publish_will(will)


class Members:
    """See above."""

    def __init__(
        self,
        count: int = 2,
        session: SessionOptions | None = None,
        *,
        store: HeldStore | None = None,
        lasting: bool = True,
        plugins: dict[str, dict[str, Any]] | None = None,
        limits: Limits = LIMITS,
        addressed: Sequence[str] = (),
    ) -> None:
        """Without `lasting` sessions end with their connections, and only plugins use the store."""
        self.lasting = lasting
        self.limits = limits
        self.addressed = addressed
        self.plugins = plugins or {}
        self.clock = Clock()
        self.loop = Turns(self.clock)
        self.store = store or HeldStore()
        self.store.loop = cast("asyncio.AbstractEventLoop", self.loop)
        self.options = session
        self._count = count  # members that there ever were: a name is not used again
        self.nodes = [MemberNode(self, number + 1, session) for number in range(count)]
        for node in self.nodes:
            node.cluster.links = {other.member: Link(node.cluster, other) for other in self.nodes if other is not node}
        for node in self.nodes:
            self._load(node)
        with self.loop.running():
            for node in self.nodes:
                node.join()
        self.turn()

    def _load(self, node: MemberNode) -> None:
        for name, config in self.plugins.items():
            node.load(name, **config)

    def join(self) -> MemberNode:
        """One more member."""
        self._count += 1
        new = MemberNode(self, self._count, self.options)
        for node in self.nodes:
            node.cluster.links[new.member] = Link(node.cluster, new)
            new.cluster.links[node.member] = Link(new.cluster, node)
        self._load(new)
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
        end = self.clock.now + seconds
        while self.clock.now < end:
            step = min(0.25, end - self.clock.now)
            self.nodes[0].wait(step)
            with self.loop.running():
                for node in self.nodes:
                    node.due()
            self.turn()

    def kill(self, node: MemberNode) -> None:
        """A member is fenced, and its clients are gone with it; what it has sent and did not arrive is lost."""
        node.alive = False
        self.nodes.remove(node)
        for link in node.cluster.links.values():
            link.waiting.clear()
        node.cluster.links.clear()
        for connection in list(node.broker.connections):
            connection.hold(Pause.CLOSING)
        node.plugin_store.dead = True
        node.cluster.notes.close()
        self.store.inner.gate.fenced_others.add(node.plugin_store.writer)
        for task in [*node.tasks, *(task for loaded in node.plugins.loaded() for task in loaded.context.tasks)]:
            task.cancel()
        if node.session_store is not None:
            node.session_store.lease.write = lambda _batch: Commit()  # type: ignore[assignment, method-assign]
            node.attachments.stop()
        with self.loop.running():
            for other in self.nodes:
                link = other.cluster.links.pop(node.member)
                other.cluster.dead.append(node.member)
                other.cluster.change()
                link._settle()
        self.turn()
