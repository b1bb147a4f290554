"""The other members of a cluster, as broker and plugins see them.

    member     a running node; its number is new at every start, its id is `NAME~NUMBER`
    peer       another member, with the link to it
    tell       an item on the link: numbered, in order, sent again after a break, lost only with its member
    ask        a question to one member, with an answer or an error
    note       what a batch tells all members, in the feed of the cell it writes (`storage.ports.Batch.note`)

Rule 1: items of one peer come in the order in which they were sent. A handler must not wait, and must not raise.
Rule 2: a note is handled once, in the order of its feed. If notes are missing, the feature reads that cell again
        (`reload`), and goes on with what came after.
Rule 3: a new incarnation of a member begins with nothing: what the one before has told is void.
Rule 4: what begins to handle something returns a function that ends it. Handlers of notes that are registered while
        this node is a member already are told to read all cells first.
Rule 5: names of items, questions and notes are part of what members of two versions say to each other. A name is
        never used again for something else. Codes of notes: b bans, c compacted queues, d declarations of streams,
        f fan-out, k declarations of capture rules, r retained messages, s subscriptions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Protocol

from motorcade.commit import Commit
from motorcade.core.errors import MotorcadeError


class MemberState(StrEnum):
    """A member, as the store knows it."""

    JOINING = auto()  #: it reads what the others share; it serves no client yet
    LIVE = auto()
    LEAVING = auto()  #: it takes no new clients and sends its own away
    CONDEMNED = auto()  #: another member has found it dead; its right to write is being taken
    FENCED = auto()  #: nothing that it still sends is stored; its clients are being taken care of


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member at one moment."""

    id: str
    name: str
    number: int
    state: MemberState
    address: str  #: of its links
    since: float  #: when it joined, seconds since the epoch
    software: str
    linked: bool  #: the link between it and this member is open
    round_trip: float = 0.0  #: seconds, of the last ping


class Peer(Protocol):
    """Another member that is alive, and what is sent to it."""

    @property
    def id(self) -> str:
        """The id of the member."""

    @property
    def full(self) -> bool:
        """Return True while as much waits for it as may: droppable items are dropped, and publishers pause."""

    def send(self, kind: str, body: bytes, *, droppable: bool = False) -> None:
        """Send an item; `droppable`: not if the link is full (counted)."""

    def confirm(self) -> Commit[None]:
        """Return the commit of all that was sent so far: the peer has taken it over, or it is dead, or patience ends.

        It never fails: a peer that is slow must not stop the publishers of all others.
        """

    def room(self) -> Commit[None]:
        """Return a commit that is done when the link is no longer full."""


ItemHandler = Callable[[Peer, bytes], None]
AskHandler = Callable[[str, bytes], Awaitable[bytes]]  #: id of the member that asks, and the question
NoteHandler = Callable[[int, int, bytes], None]  #: feed, number of the note, what it says
Reload = Callable[[int], Awaitable[None]]  #: read everything of a cell again, by the number of its feed
End = Callable[[], None]  #: handle it no longer


class AskError(MotorcadeError):
    """A question was not answered: the member is gone, silent, or refuses."""


class Cluster(Protocol):
    """The cluster that this node is a member of."""

    @property
    def me(self) -> str:
        """The id of this member."""

    @property
    def peers(self) -> Sequence[Peer]:
        """The other members that are alive."""

    def peer(self, member: str) -> Peer | None:
        """Return a peer by its id; None if it is not alive, or is this member."""

    def members(self) -> Sequence[MemberView]:
        """Return all members, this one first."""

    def on_item(self, kind: str, handler: ItemHandler) -> End:
        """Handle items of a kind."""

    def on_ask(self, noun: str, handler: AskHandler) -> End:
        """Answer questions."""

    async def ask(self, member: str, noun: str, body: bytes = b"", *, patience: float = 5.0) -> bytes:
        """Ask a member; `AskError` if there is no answer in time, or the member refuses."""

    def on_note(self, code: str, handler: NoteHandler, reload: Reload) -> End:
        """Handle notes whose data begins with a code of one letter; the handler gets what is behind it."""

    @property
    def holds(self) -> bool:
        """Return True while routes may be relied on: no member can have granted what is not known here (view lease)."""

    def again(self) -> Commit[None]:
        """Return a commit that is done when `holds` is True again."""

    def known(self) -> Commit[None]:
        """Return a commit that is done when all peers know what they were told, or cannot acknowledge without it.

        For interest in live messages; SUBACK and UNSUBACK wait for it. `synced` is the same for notes.
        """

    def synced(self, feed: int, number: int) -> Commit[None]:
        """Return a commit that is done when every member has handled a note, or cannot acknowledge without it."""

    def on_change(self, told: Callable[[], None]) -> End:
        """Be told when members have come or gone."""

    def handled(self, feed: int) -> int:
        """Return the number of the last note of a feed that was handled here."""

    def reached(self, feed: int, number: int) -> Commit[None]:
        """Return a commit that is done when a note was handled here, or its cell was read again meanwhile."""

    def reload(self, feed: int) -> None:
        """Read a cell again, as if notes were missing."""

    def gap_end(self, feed: int) -> int | None:
        """Return the end of a feed whose cell is read because notes were missing; None: it is not read, or else why.

        A fail-over may have forgotten notes, and gives their numbers again: those above this end are others.
        """

    @property
    def feeds(self) -> int:
        """Return how many feeds there are, which is how many cells."""

    def is_steward(self, feed: int) -> bool:
        """Return True if this member keeps a cell in order."""

    def fenced(self) -> Sequence[str]:
        """Return the ids of members that are fenced, and whose clients may not all be taken care of."""
