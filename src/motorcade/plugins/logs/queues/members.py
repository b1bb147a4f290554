"""Messages between members of a cluster about queues.

    alone ── a peer comes: what is in memory is claimed ─▶ several members ── all peers are gone ─▶ alone

| item | body | meaning |
|---|---|---|
| `queues.hungry` | `Hungry` | consumers there have room for so many messages of a queue, and there are none |
| `queues.offer` | name | there may be some again |
| `queues.gone` | `Gone` | these messages were replaced or pushed out |

Questions: `queues.claims` is answered when everything that the asked member has in memory is claimed; `queues.show` has
what only it knows. A note has the options of a queue that was declared or changed, or says that it was deleted.

Rule 1: a member that is alone claims nothing: it reads what others could not have. When it sees a peer it claims all
        that it has in memory, gives back what it has claimed before and not in memory, and takes nothing more but by
        claims.
Rule 2: a member claims nothing until each older one has said that this is done there. Younger ones have seen it from
        their beginning, so they have never been alone.
Rule 3: items of a member come unless that member dies. So when one has gone, each looks once whether there is something
        to claim; once a second it does so, too, while it is hungry.
Rule 4: declarations take effect by their notes, in the order of the notes, also where they were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.extension.ask_all import MemberAnswers, ask_all
from motorcade.extension.cluster import AskError, Cluster, Peer
from motorcade.extension.plugin import Spawn
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.tables import PREFIX_OF_MAILBOXES
from motorcade.storage.ports import Batch, StoreError

if TYPE_CHECKING:
    from motorcade.plugins.logs.queues.queue import Queue
    from motorcade.plugins.logs.queues.service import QueueService

HUNGRY: Final = "queues.hungry"
OFFER: Final = "queues.offer"
GONE: Final = "queues.gone"
CLAIMS: Final = "queues.claims"
SHOW: Final = "queues.show"
CODE: Final = "q"  #: of the notes
RETRY: Final = 1.0  #: seconds until a member is asked again
LOOK: Final = 1.0  #: seconds between two looks for something to claim


class Hungry(msgspec.Struct, array_like=True, gc=False):
    """A member with consumers that have nothing."""

    queue: str
    count: int


class Gone(msgspec.Struct, array_like=True, gc=False):
    """Messages of a mailbox that are not there any more."""

    mailbox: str
    positions: list[int]


class Declaration(msgspec.Struct, array_like=True):
    """A queue that an operator has declared, changed or deleted."""

    name: str
    options: QueueOptions | None  #: None: it was deleted


class Consuming(msgspec.Struct, array_like=True):
    """The consumers of a queue on one member."""

    clients: list[tuple[str, int, int]]  #: name, messages held, and how many of these were sent
    dead_lettered: int


_encode = msgspec.msgpack.Encoder().encode
_decode_hungry = msgspec.msgpack.Decoder(Hungry).decode
_decode_gone = msgspec.msgpack.Decoder(list[Gone]).decode
_decode_name = msgspec.msgpack.Decoder(str).decode
_decode_names = msgspec.msgpack.Decoder(list[str]).decode
_decode_declaration = msgspec.msgpack.Decoder(Declaration).decode
decode_consuming = msgspec.msgpack.Decoder(dict[str, Consuming]).decode


def _number(member: str) -> int:
    """Return the number of a member, which is greater the later it has come."""
    return int(member.rpartition("~")[2])


class QueueMembers:
    """The other members, as the queues of this one know them."""

    def __init__(self, cluster: Cluster, queues: QueueService, spawn: Spawn) -> None:
        self.cluster = cluster
        self.claims = False  #: there are others (rule 1)
        self._queues = queues
        self._spawn = spawn
        self._peers: dict[str, Peer] = {}
        self._older: set[str] = set()  # members that have not said yet that all they have is claimed (rule 2)
        self._adopting = 0  # queues whose messages in memory are being claimed
        self._adopted = asyncio.Event()
        self._gone: dict[str, list[int]] = {}  # not told yet, by mailbox
        self._applied: dict[int, int] = {}  # by feed: number of the last note that was handled
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # feed, number

    def start(self, at_end: Callable[[Callable[[], None]], None]) -> None:
        """Begin; `at_end` takes what ends it."""
        cluster = self.cluster
        for kind, handler in ((HUNGRY, self._on_hungry), (OFFER, self._on_offer), (GONE, self._on_gone)):
            at_end(cluster.on_item(kind, handler))
        at_end(cluster.on_ask(CLAIMS, self._answer_claims))
        at_end(cluster.on_ask(SHOW, self._answer_show))
        at_end(cluster.on_change(self._members_changed))
        self._adopted.set()
        self._members_changed()

    def follow(self, at_end: Callable[[Callable[[], None]], None]) -> None:
        """Follow the declarations, when those of now are known."""
        at_end(self.cluster.on_note(CODE, self._on_note, self._reload))

    # -- members come and go

    @property
    def waits(self) -> bool:
        """Return True while nothing may be claimed (rule 2)."""
        return bool(self._older)

    def _members_changed(self) -> None:
        before, self._peers = self._peers, {peer.id: peer for peer in self.cluster.peers}
        gone = before.keys() - self._peers.keys()
        new = [member for member, peer in self._peers.items() if before.get(member) is not peer]
        if not gone and not new:
            return
        for member in gone:
            self._older.discard(member)
        for queue in self._queues:
            for member in gone:
                queue.dispatcher.forget_member(member)
            if new:
                queue.dispatcher.new_members()
        for member in new:
            if _number(member) < _number(self.cluster.me):
                self._older.add(member)
                self._spawn(partial(self._ask_older, member), "older")
        if self._peers and not self.claims:
            self.claims = True
            for queue in self._queues:
                self._adopt(queue)
        elif not self._peers and self.claims:
            self.claims = False
            for queue in self._queues:
                queue.dispatcher.end_claims(self._queues.now())
        self._look()

    def _look(self) -> None:
        now = self._queues.now()
        for queue in self._queues:
            queue.dispatcher.waits = self.waits
            queue.dispatcher.look(now)

    def _adopt(self, queue: Queue) -> None:
        """Claim what a queue has in memory, and nothing else (rule 1)."""
        self._adopting += 1
        self._adopted.clear()
        levels = queue.dispatcher.levels.values()
        upto = {level: level.cursor for level in levels}
        known = {level: level.entries.keys() | level.leaving for level in levels if queue.dispatcher.has_claimed}
        queue.dispatcher.begin_claims()

        async def adopt() -> None:
            while self.claims and not queue.closed:
                try:
                    await queue.adopt(upto, known)
                    break
                except StoreError:
                    await asyncio.sleep(RETRY)
            self._adopting -= 1
            if not self._adopting:
                self._adopted.set()

        self._spawn(adopt(), "adopt")

    async def _ask_older(self, member: str) -> None:
        """Wait until all that a member has is claimed."""
        while member in self._older:
            try:
                await self.cluster.ask(member, CLAIMS)
            except AskError as error:
                if f"not know the question {CLAIMS!r}" not in str(error):  # else it does not serve queues
                    await asyncio.sleep(RETRY)
                    continue
            self._older.discard(member)
        self._look()

    async def _answer_claims(self, member: str, _body: bytes) -> bytes:
        if member not in self._peers:
            self._members_changed()  # this one may not have been told of yet
        if member not in self._peers:
            raise MotorcadeError(f"{self.cluster.me} does not know {member} yet")
        await self._adopted.wait()
        return b""

    async def look_again(self) -> None:
        """Look for something to claim while consumers have nothing, until cancelled (rule 3)."""
        while True:
            await asyncio.sleep(LOOK)
            now = self._queues.now()
            for queue in self._queues if self.claims else ():
                if queue.dispatcher.consumers:
                    queue.dispatcher.look(now)

    # -- messages

    def offer(self, queue: str, member: str) -> None:
        """Tell a member that there may be messages."""
        peer = self._peers.get(member)
        if peer is not None:
            peer.send(OFFER, _encode(queue))

    def tell_hungry(self, queue: str, count: int) -> None:
        """Tell all others that consumers here have nothing."""
        body = _encode(Hungry(queue, count))
        for peer in self._peers.values():
            peer.send(HUNGRY, body)

    def tell_gone(self, mailbox: str, positions: Sequence[int]) -> None:
        """Tell all others that messages are not there any more."""
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._send_gone)
        self._gone.setdefault(mailbox, []).extend(positions)

    def _send_gone(self) -> None:
        gone, self._gone = self._gone, {}
        body = _encode([Gone(mailbox, positions) for mailbox, positions in gone.items()])
        for peer in self._peers.values():
            peer.send(GONE, body)

    def _on_hungry(self, peer: Peer, body: bytes) -> None:
        if peer.id not in self._peers:
            self._members_changed()
        item = _decode_hungry(body)
        queue = self._queues.get(item.queue)
        if queue is not None and peer.id in self._peers:
            queue.dispatcher.note_hungry(peer.id, item.count, self._queues.now())

    def _on_offer(self, _peer: Peer, body: bytes) -> None:
        queue = self._queues.get(_decode_name(body))
        if queue is not None:
            queue.dispatcher.look(self._queues.now(), offered=True)

    def _on_gone(self, _peer: Peer, body: bytes) -> None:
        for item in _decode_gone(body):
            name, _, number = item.mailbox.removeprefix(PREFIX_OF_MAILBOXES).partition(":")
            queue = self._queues.get(name)
            level = queue.dispatcher.levels.get(int(number or 0)) if queue is not None else None
            if level is not None:
                for position in item.positions:
                    level.dispatcher.gone(level, position)

    # -- declarations

    async def declare(self, batch: Batch, name: str, options: QueueOptions | None) -> None:
        """Write a declaration; return when it has taken effect at all members. `StoreError`."""
        home = PREFIX_OF_MAILBOXES + name
        batch.note(home, CODE.encode() + _encode(Declaration(name, options)))
        store = self._queues.store
        number = (await store.write(batch)).notes[-1]
        feed = store.feeds.feed_of(home)
        if self._applied.get(feed, 0) < number:
            applied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((feed, number, applied))
            await applied
        await self.cluster.synced(feed, number)

    def _on_note(self, feed: int, number: int, data: bytes) -> None:
        declaration = _decode_declaration(data)
        self._queues.apply(declaration.name, declaration.options)
        self._is_applied(feed, number)

    def _is_applied(self, feed: int, number: int) -> None:
        self._applied[feed] = number
        left = []
        for one in self._waiting:
            if one[0] == feed and one[1] <= number:
                if not one[2].done():
                    one[2].set_result(None)
            else:
                left.append(one)
        self._waiting = left

    async def _reload(self, feed: int) -> None:
        """Notes are missing: read all declarations of a cell."""
        handled = self.cluster.handled(feed)
        stored = await self._queues.stored(feed)
        store = self._queues.store
        for queue in list(self._queues):
            if queue.name not in stored and store.feeds.feed_of(PREFIX_OF_MAILBOXES + queue.name) == feed:
                self._queues.apply(queue.name, None)
        for name, options in stored.items():
            self._queues.apply(name, options)
        self._is_applied(feed, max(handled, *[number for of, number, _ in self._waiting if of == feed], 0))

    # -- operators

    async def ask_all(self, names: Sequence[str]) -> MemberAnswers:
        """Ask all others what they have of queues."""
        return await ask_all(self.cluster, SHOW, _encode(list(names)))

    async def _answer_show(self, _member: str, body: bytes) -> bytes:
        found: dict[str, Consuming] = {}
        for name in _decode_names(body):
            queue = self._queues.get(name)
            if queue is not None:
                clients = [(each.name, each.held, each.sent) for each in queue.dispatcher.consumers]
                found[name] = Consuming(clients, queue.dead_lettered)
        return _encode(found)
