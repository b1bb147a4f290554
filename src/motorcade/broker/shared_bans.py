"""Connects that are counted over all members of a cluster, and bans that all of them keep.

    CONNECT ─▶ counted here, and told to the peers from the second one of a name on ─┐
    connects at a peer ──────────────────────────────────────────────────────────────┴▶ too many ─▶ banned
    banned ─▶ record and note in one batch ─▶ every member refuses the name, also one that starts later

Rule 1: a name that connects once is not told to other members, so that a storm of clients costs no member more than
        its share. The first connect of a name at each member is therefore missing at the others.
Rule 2: while the store is away, a ban holds at the member that has found it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from motorcade.broker.limits import Flapping
from motorcade.clock import time
from motorcade.commit import Commit
from motorcade.extension.cluster import Cluster, Peer
from motorcade.storage.ports import Batch, Store, Written

if TYPE_CHECKING:
    from motorcade.broker.state import BrokerState

log = structlog.stdlib.get_logger("motorcade.broker")

CODE: Final = "b"  #: of the notes
CONNECTS: Final = "connects"  #: kind of the items: names that have connected, one for each time
BANS: Final = "ban"  #: collection of the records, by name

_encode = msgspec.msgpack.Encoder().encode
_decode_names = msgspec.msgpack.Decoder(list[str]).decode


class Ban(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A name that may not connect: the record, and the note."""

    name: str
    until: float  #: seconds since the epoch


_decode_ban = msgspec.msgpack.Decoder(Ban).decode


class SharedBans(Flapping):
    """`Flapping` for all members: connects are counted, and clients banned, together."""

    __slots__ = ("_cluster", "_state", "_store", "_untold")

    def __init__(self, cluster: Cluster, store: Store, state: BrokerState) -> None:
        """Take the place of the node's own one."""
        limits = state.limits
        super().__init__(limits.flapping_count, limits.flapping_window, limits.flapping_ban)
        self._cluster = cluster
        self._store = store
        self._state = state
        self._untold: list[str] = []
        cluster.on_item(CONNECTS, self._on_connects)
        cluster.on_note(CODE, self._handle, self._reload)
        state.flapping = self

    def count(self, name: str, now: float) -> bool:
        admitted = super().count(name, now)
        if not self._count:
            return True
        if not admitted:
            self._keep(Ban(name, self._banned[name]))
        elif self._seen[name][1] > 1 and self._cluster.peers:  # rule 1
            if not self._untold:
                self._state.shared.soon(self._tell)
            self._untold.append(name)
        return admitted

    def _tell(self) -> None:
        names, self._untold = self._untold, []
        body = _encode(names)
        for peer in self._cluster.peers:
            peer.send(CONNECTS, body, droppable=True)

    def _on_connects(self, _peer: Peer, body: bytes) -> None:
        now = time()
        for name in _decode_names(body):
            self.add(name, now)

    # -- bans

    def _keep(self, ban: Ban) -> None:
        batch = Batch()
        body = _encode(ban)
        batch.put(BANS, ban.name, body, ban.until)
        batch.note(ban.name, CODE.encode() + body)
        commit = self._store.write(batch)
        commit.then(partial(self._kept, ban, commit))

    def _kept(self, ban: Ban, commit: Commit[Written]) -> None:
        if commit.error is not None:  # rule 2
            log.warning("ban_not_stored", name=ban.name, error=str(commit.error))

    def _handle(self, _feed: int, _number: int, data: bytes) -> None:
        self._take(_decode_ban(data))

    async def _reload(self, feed: int) -> None:
        """Read the bans of a cell again; those that are known hold until they are over."""
        async for _, value in self._store.records.scan(BANS, time(), feed=feed):
            self._take(_decode_ban(value))

    def _take(self, ban: Ban) -> None:
        if ban.until > time():
            self.ban(ban.name, max(ban.until, self._banned.get(ban.name, 0.0)))
