"""Ends of streams, as members of a cluster tell each other.

    first reader of a stream here ─▶ `stream.read` to all peers ─▶ each answers with the end it knows
    appended here ─▶ stored ─▶ `stream.end` to the peers that read the stream, once per turn ─▶ their readers wake up
    trimmed here ─▶ the same, with the first offset that is left
    larger than it may be ─▶ `stream.full` to all peers: the steward of its cell trims it

A hint goes only to members that have readers: a stream without readers elsewhere costs an append nothing, and what a
member says of its readers is one item when the first one comes and one when the last one goes. Telling all peers would
cost an item for each group of appends and peer, with readers or without.

Rule 1: an end is told when the store has confirmed it, so its records can be read when the hint comes.
Rule 2: hints may be dropped where a link is full. Readers that wait at the tail look once every `LOOK` seconds as well.
Rule 3: a member that hears of a reader answers with the end that it knows; so no append falls between.
Rule 4: of one peer at most `MAX_INTEREST` names are kept; its readers of other streams go by rule 2 (`untold`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from motorcade.extension.cluster import Cluster, Peer
from motorcade.extension.plugin import Context

LOOK: Final = 1.0  #: seconds between two looks at a stream whose readers wait for more
READ: Final = "stream.read"  #: kinds of items: names of streams that have readers at the sender now
UNREAD: Final = "stream.unread"  #: that have none any more
END: Final = "stream.end"  #: ends of streams
FULL: Final = "stream.full"  #: names of streams that are larger than they may be
MAX_INTEREST: Final = 10_000  #: streams that one peer reads
MAX_NAMES: Final = 1000  #: in one item
FULL_AGAIN: Final = 1.0  #: seconds until the steward is told again that a stream is too large


class End(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of a stream, as a member knows it."""

    stream: str
    last: int  #: offset given last
    first: int = 0  #: of the oldest record; 0: not known


_encode = msgspec.msgpack.Encoder().encode
_decode_names = msgspec.msgpack.Decoder(list[str]).decode
_decode_ends = msgspec.msgpack.Decoder(list[End]).decode


class TailOwner(Protocol):
    """The streams of a node."""

    def read_here(self) -> Iterable[str]:
        """Return the names of streams that have readers here."""

    def end_of(self, name: str) -> End | None:
        """Return what is known here of a stream; None: nothing."""

    def told_end(self, end: End) -> None:
        """Take what another member knows of a stream."""

    def told_full(self, name: str) -> None:
        """Trim a stream, if that is for this member to do."""


class StreamTails:
    """Hints to the other members where streams end, and theirs."""

    def __init__(self, context: Context, cluster: Cluster, owner: TailOwner) -> None:
        self._cluster = cluster
        self._owner = owner
        self._counters: Counter[str] = context.counters
        self._interest: dict[str, set[str]] = {}  # streams that peers read: ids of the peers
        self._names: Counter[str] = Counter()  # how many streams each peer reads
        self._known: set[str] = set()  # peers that were told what is read here
        self._ends: dict[str, End] = {}  # to be told at the end of this turn
        self._full: dict[str, bool] = {}  # streams that the steward was told of just now; True: is to hear of again
        for kind, handler in ((READ, self._on_read), (UNREAD, self._on_unread), (END, self._on_end)):
            context.at_end(cluster.on_item(kind, handler))
        context.at_end(cluster.on_item(FULL, self._on_full))
        context.at_end(cluster.on_change(self.members_changed))
        self.members_changed()

    def __len__(self) -> int:
        """Return how many streams are read elsewhere."""
        return len(self._interest)

    # -- out

    def members_changed(self) -> None:
        """Tell new members what is read here, and forget those that are gone."""
        peers = {peer.id: peer for peer in self._cluster.peers}
        for member in self._known - peers.keys():
            self._forget(member)
        names = list(self._owner.read_here()) if peers.keys() - self._known else []
        for member in peers.keys() - self._known:
            for start in range(0, len(names), MAX_NAMES):
                peers[member].send(READ, _encode(names[start : start + MAX_NAMES]))
        self._known = set(peers)

    def _forget(self, member: str) -> None:
        self._names.pop(member, None)
        for name in [name for name, members in self._interest.items() if member in members]:
            self._not_read(name, member)

    def read(self, name: str) -> None:
        """Tell that a stream has a reader here now."""
        for peer in self._cluster.peers:
            peer.send(READ, _encode([name]))

    def unread(self, name: str) -> None:
        """Tell that a stream has no reader here any more."""
        for peer in self._cluster.peers:
            peer.send(UNREAD, _encode([name]))

    def moved(self, name: str) -> None:
        """Tell those that read a stream where it ends, or begins, at the end of this turn."""
        if name not in self._interest:
            return
        if not self._ends:
            asyncio.get_running_loop().call_soon(self._tell)
        end = self._owner.end_of(name)
        if end is not None:
            self._ends[name] = end

    def _tell(self) -> None:
        ends, self._ends = self._ends, {}
        told: dict[str, list[End]] = {}
        for name, end in ends.items():
            for member in self._interest.get(name, ()):
                told.setdefault(member, []).append(end)
        for member, some in told.items():
            self._send_ends(self._cluster.peer(member), some)

    def _send_ends(self, peer: Peer | None, ends: Sequence[End]) -> None:
        if peer is not None and ends:
            self._counters["ends_told"] += len(ends)
            peer.send(END, _encode(ends), droppable=True)

    def full(self, name: str) -> None:
        """Tell the steward that a stream is larger than it may be: now, and while that goes on every second."""
        if name in self._full:
            self._full[name] = True
            return
        self._full[name] = False
        asyncio.get_running_loop().call_later(FULL_AGAIN, self._full_again, name)
        for peer in self._cluster.peers:
            peer.send(FULL, _encode([name]), droppable=True)

    def _full_again(self, name: str) -> None:
        if self._full.pop(name):
            self.full(name)

    # -- in

    def _on_read(self, peer: Peer, body: bytes) -> None:
        ends: list[End] = []
        for name in _decode_names(body):
            if peer.id not in self._interest.get(name, ()):
                if self._names[peer.id] >= MAX_INTEREST:
                    self._counters["untold"] += 1
                    continue
                self._names[peer.id] += 1
                self._interest.setdefault(name, set()).add(peer.id)
            end = self._owner.end_of(name)
            if end is not None:
                ends.append(end)
        self._send_ends(peer, ends)  # rule 3

    def _on_unread(self, peer: Peer, body: bytes) -> None:
        for name in _decode_names(body):
            if peer.id in self._interest.get(name, ()):
                self._names[peer.id] -= 1
                self._not_read(name, peer.id)

    def _not_read(self, name: str, member: str) -> None:
        members = self._interest[name]
        members.discard(member)
        if not members:
            del self._interest[name]

    def _on_end(self, _peer: Peer, body: bytes) -> None:
        for end in _decode_ends(body):
            self._owner.told_end(end)

    def _on_full(self, _peer: Peer, body: bytes) -> None:
        for name in _decode_names(body):
            self._owner.told_full(name)
