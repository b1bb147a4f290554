"""Messages between members of a cluster about compacted queues.

    append at B ─▶ store ─▶ "its client is attached to A", or "A wants it" ─▶ `stored` ─▶ A: its consumers read on

| item | body | meaning |
|---|---|---|
| `compacted.stored` | `StoredItem` list | they end there now, and these of their messages were replaced or dropped |
| `compacted.look` | nothing | that could not be told: look where all queues end that have consumers there |
| `compacted.wanted`, `compacted.unwanted` | names | shared queues that have consumers there now, or no longer |
| `compacted.made` | number | so many queues more than there were |
| `compacted.rewound` | `Consumption` | this consumer was rewound, and was not known to be connected |

Questions: `compacted.show` and `compacted.rewind`, for what only the member knows that has the consumer. A note says
that a queue was deleted or forgotten.

Rule 1: the store decides what is in a queue and in which order. An item only says that it is worth looking.
Rule 2: an item of a member comes unless that member dies. So when members have come or gone, all queues with consumers
        are looked at once, and a consumer of a shared queue looks again when all members know of it. One that is silent
        is not waited for any longer; it answers with the end that it knows when it hears of the consumer.
Rule 3: an append to a queue that was deleted meanwhile writes its record again: what is stored is always found by
        operators and by the collector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from motorcade.extension.ask_all import MemberAnswers, ask_all
from motorcade.extension.cluster import Cluster, Peer
from motorcade.plugins.logs.compacted.queue import CompactedQueue, Queues
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, SHARED
from motorcade.storage.homes import home_of_owner
from motorcade.storage.ports import Appended, Batch, StoreError

STORED: Final = "compacted.stored"
LOOK: Final = "compacted.look"
WANTED: Final = "compacted.wanted"
UNWANTED: Final = "compacted.unwanted"
MADE: Final = "compacted.made"
REWOUND: Final = "compacted.rewound"
SHOW: Final = "compacted.show"
REWIND: Final = "compacted.rewind"
CODE: Final = "c"  #: of the notes

MAX_WANTED: Final = 65_536  #: names of shared queues kept of a member; one that wants more is told of all of them
NAMES_PER_ITEM: Final = 1000
RETRY: Final = 1.0  #: seconds until a record that could not be written again is tried again


class StoredItem(msgspec.Struct, array_like=True, gc=False):
    """A queue in which something was stored."""

    owner: str
    number: int  #: it ends there, at least
    gone: list[int]


class Consumption(msgspec.Struct, array_like=True, gc=False):
    """A consumer of a queue."""

    owner: str
    client: str


class Deleted(msgspec.Struct, array_like=True, gc=False):
    """A queue whose record was deleted; in a note."""

    member: str  #: by which one
    owner: str


_encode = msgspec.msgpack.Encoder().encode
_decode_stored = msgspec.msgpack.Decoder(list[StoredItem]).decode
_decode_names = msgspec.msgpack.Decoder(list[str]).decode
_decode_number = msgspec.msgpack.Decoder(int).decode
_decode_deleted = msgspec.msgpack.Decoder(Deleted).decode
_decode_consumption = msgspec.msgpack.Decoder(Consumption).decode

Handler = Callable[[Peer, bytes], None]


class CompactedMembers:
    """The other members, as the compacted queues of this one know them."""

    def __init__(
        self,
        cluster: Cluster,
        queues: Queues,
        look_all: Callable[[], None],
        rewound: Callable[[CompactedQueue, str], Coroutine[Any, Any, None]],
    ) -> None:
        """Take `look_all`, which looks at all queues that have consumers, and `rewound`, for a consumer here."""
        self.cluster = cluster
        self._queues = queues
        self._look_all = look_all
        self._rewound = rewound
        self._peers: dict[str, Peer] = {}
        self._wanted: dict[str, set[str] | None] = {}  # by member; None: all there are
        self._stored: dict[str, dict[str, StoredItem]] = {}  # by member and mailbox: not told yet
        self._untold: set[str] = set()  # members whose link was full
        self._made = 0
        self._sending = False
        self._loop = asyncio.get_running_loop()

    def start(self, at_end: Callable[[Callable[[], None]], None]) -> None:
        """Begin; `at_end` takes what ends it."""
        cluster = self.cluster
        handlers: tuple[tuple[str, Handler], ...] = (
            (STORED, self._on_stored),
            (LOOK, self._on_look),
            (WANTED, self._on_wanted),
            (UNWANTED, self._on_unwanted),
            (MADE, self._on_made),
            (REWOUND, self._on_rewound),
        )
        for kind, handler in handlers:
            at_end(cluster.on_item(kind, handler))
        at_end(cluster.on_note(CODE, self._on_note, self._reload))
        at_end(cluster.on_change(self._members_changed))
        self._members_changed()

    def __bool__(self) -> bool:
        """Return True while there are others."""
        return bool(self._peers)

    # -- members come and go

    def _members_changed(self) -> None:
        before, self._peers = self._peers, {peer.id: peer for peer in self.cluster.peers}
        for member in before.keys() - self._peers.keys():
            self._wanted.pop(member, None)
            self._stored.pop(member, None)
            self._untold.discard(member)
        new = [peer for member, peer in self._peers.items() if before.get(member) is not peer]
        names = [queue.name for queue in self._queues.consumed() if queue.shape is SHARED]
        for peer in new:
            self._wanted[peer.id] = set()
            self._send_names((peer,), WANTED, names)
        if new or before.keys() - self._peers.keys():  # rule 2
            for queue in self._queues:
                queue.known = queue.known and bool(queue.consumers)
            self.cluster.known().then(self._look_all)

    def _known(self, peer: Peer) -> bool:
        if self._peers.get(peer.id) is not peer:
            self._members_changed()  # this one may not have been told of yet
        return self._peers.get(peer.id) is peer

    # -- consumers come and go

    def enter(self, queue: CompactedQueue) -> None:
        """Note that a queue has its first consumer here; where it ends is not known from before."""
        if self._peers:
            queue.known = False
        if self._peers and queue.shape is SHARED:
            self._send_names(self._peers.values(), WANTED, (queue.name,))
            self.cluster.known().then(partial(self._look_again, queue))

    def _look_again(self, queue: CompactedQueue) -> None:
        if queue.consumers:
            self._queues.look(queue)

    def leave(self, queue: CompactedQueue) -> None:
        """Note that a queue has no consumer here any more."""
        if self._peers and queue.shape is SHARED:
            self._send_names(self._peers.values(), UNWANTED, (queue.name,))

    def _send_names(self, peers: Iterable[Peer], kind: str, names: list[str] | tuple[str, ...]) -> None:
        for peer in peers:
            for at in range(0, len(names), NAMES_PER_ITEM):
                peer.send(kind, _encode(names[at : at + NAMES_PER_ITEM]))

    def _on_wanted(self, peer: Peer, body: bytes) -> None:
        if not self._known(peer):
            return
        names, wanted = _decode_names(body), self._wanted.get(peer.id)
        for name in names:
            queue = self._queues.peek(SHARED, name)
            if queue is not None and queue.known and queue.tail:
                self._add(peer.id, queue.owner, queue.tail)
        if wanted is not None:
            wanted.update(names)
            if len(wanted) > MAX_WANTED:
                self._wanted[peer.id] = None
                self._queues.counters["wanted_overflows"] += 1

    def _on_unwanted(self, peer: Peer, body: bytes) -> None:
        wanted = self._wanted.get(peer.id) if self._known(peer) else None
        if wanted is not None:
            wanted.difference_update(_decode_names(body))

    # -- what is stored

    def stored(self, queue: CompactedQueue, answer: Appended) -> None:
        """Tell the members with consumers of a queue that something was stored in it."""
        if queue.shape is EXCLUSIVE:
            if answer.attached in self._peers:  # this member is none of them
                self._add_answer(answer.attached, queue.owner, answer)
            return
        for member, names in self._wanted.items():
            if names is None or queue.name in names:
                self._add_answer(member, queue.owner, answer)

    def _add_answer(self, member: str, owner: str, answer: Appended) -> None:
        self._add(member, owner, answer.position).gone += [each for each in (answer.replaced, *answer.dropped) if each]

    def _add(self, member: str, owner: str, number: int) -> StoredItem:
        """Tell a member at the end of this turn that a queue ends there, at least."""
        stored = self._stored.setdefault(member, {})
        item = stored.get(owner)
        if item is None:
            item = stored[owner] = StoredItem(owner, 0, [])
            self._send_soon()
        item.number = max(item.number, number)
        return item

    def made(self, count: int = 1) -> None:
        """Tell the others that there are more queues."""
        self._made += count
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        made, self._made = self._made, 0
        told, self._stored = self._stored, {}
        for member, stored in told.items():
            peer = self._peers.get(member)
            if peer is not None and peer.full:
                self._queues.counters["hints_dropped"] += len(stored)
                if member not in self._untold:
                    self._untold.add(member)
                    peer.room().then(partial(self._let_look, peer))
            elif peer is not None:
                peer.send(STORED, _encode(list(stored.values())))
        if made:
            for peer in self._peers.values():
                peer.send(MADE, _encode(made))

    def _let_look(self, peer: Peer) -> None:
        """Have a member look for what it was not told of, now that its link has room."""
        if peer.id in self._untold:
            self._untold.discard(peer.id)
            peer.send(LOOK, b"")

    def _on_stored(self, _peer: Peer, body: bytes) -> None:
        for item in _decode_stored(body):
            queue = self._queues.find(item.owner)
            if queue is not None:
                queue.hinted(item.number, item.gone)

    def _on_look(self, _peer: Peer, _body: bytes) -> None:
        self._look_all()

    def _on_made(self, _peer: Peer, body: bytes) -> None:
        self._queues.count += _decode_number(body)

    # -- queues that are deleted

    def note(self, batch: Batch, owner: str) -> None:
        """Let all members know that this batch deletes the record of a queue."""
        batch.note(home_of_owner(owner), CODE.encode() + _encode(Deleted(self.cluster.me, owner)))

    def _on_note(self, _feed: int, _number: int, data: bytes) -> None:
        deleted = _decode_deleted(data)
        if deleted.member == self.cluster.me:
            return
        self._queues.count -= 1
        queue = self._queues.find(deleted.owner)
        if queue is not None and (queue.registered or queue.coming):
            self._queues.spawn(partial(self._keep, queue), "keep")

    async def _reload(self, feed: int) -> None:
        """Notes are missing: any queue of this cell may have been deleted."""
        feeds = self._queues.store.feeds
        for queue in [each for each in self._queues if each.registered or each.coming]:
            if feeds.feed_of(home_of_owner(queue.owner)) == feed:
                await self._keep(queue)

    async def _keep(self, queue: CompactedQueue) -> None:
        """Write the record of a queue again if something is in it, or on its way (rule 3)."""
        while True:
            try:
                async with queue.lock:
                    queue.registered = False
                    await self._queues.keep(queue)
            except StoreError:
                await asyncio.sleep(RETRY)
            else:
                return

    # -- operators

    async def ask_all(self, question: str, body: bytes) -> MemberAnswers:
        """Ask all others."""
        return await ask_all(self.cluster, question, body)

    def tell_rewound(self, queue: CompactedQueue, client: str) -> None:
        """Tell the others that a consumer was rewound: it may have come to one of them meanwhile."""
        for peer in self._peers.values():
            peer.send(REWOUND, _encode(Consumption(queue.owner, client)))

    def _on_rewound(self, _peer: Peer, body: bytes) -> None:
        item = _decode_consumption(body)
        queue = self._queues.find(item.owner)
        if queue is not None and queue.consumers:
            self._queues.spawn(partial(self._rewound, queue, item.client), "rewound")
