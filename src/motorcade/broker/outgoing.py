"""Batches for peers: packets of one read, and hints of one message, collected and sent together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motorcade.broker.remote_router import PeerGroup
from motorcade.commit import Commit
from motorcade.storage.ports import Appended, Draft

if TYPE_CHECKING:
    from motorcade.broker.pubsub import GroupPeer
    from motorcade.broker.relay import Relay
    from motorcade.broker.session import Session
    from motorcade.broker.subscribers import Subscriber


class Outgoing:
    """Packets of one read on their way to peers: neighbours with the same receivers go together, as they came in."""

    __slots__ = ("_count", "_data", "_end", "_head", "_links", "_relay", "_start", "size")

    def __init__(self, relay: Relay, head: bytes, data: bytes) -> None:
        self._relay = relay
        self._head = head
        self._data = data
        self._links: PeerGroup | None = None
        self._start = self._end = self._count = 0
        self.size = 0  #: bytes of messages whose publisher waits for the peers

    def add(self, links: PeerGroup, start: int, end: int, count: int) -> None:
        """Add packets data[start:end]."""
        if links is self._links and start == self._end:
            self._end = end
            self._count += count
            return
        self.flush()
        self._links, self._start, self._end, self._count = links, start, end, count

    def flush(self) -> None:
        """Send what was added."""
        links, self._links = self._links, None
        if links is not None:
            self._relay.send_packets(links, self._head + self._data[self._start : self._end], self._count)

    def close(self) -> None:
        """Send the last of it."""
        self.flush()
        self._relay.read_over()

    def confirm(self) -> Commit[None]:
        """Return the commit of all that was added."""
        self.flush()
        return self._relay.confirm() or Commit.stored(None)


class Hints:
    """The members that have to know of an entry, because clients that it is for are attached to them.

    That may be this one, if it was not so yet when the entry was handed to the store.
    """

    __slots__ = ("_draft", "_found", "_relay")

    def __init__(self, relay: Relay, draft: Draft) -> None:
        self._relay = relay
        self._draft = draft
        self._found: dict[str, list[tuple[str, int, bool]]] = {}

    def add(self, receiver: Session | Subscriber | GroupPeer, answer: Appended) -> None:
        """Take in what the store says of a client's mailbox."""
        member, relay = answer.attached, self._relay
        if member and answer.position and (member != relay.cluster.me or not relay.is_here(receiver)):
            self._found.setdefault(member, []).append((receiver.client_id, answer.position, answer.over))

    def send(self) -> None:
        """Tell them."""
        for member, entries in self._found.items():
            if member == self._relay.cluster.me:
                self._relay.hint_here(entries, self._draft.body, self._draft.payload)
            else:
                self._relay.send_hint(member, entries, self._draft)
