"""What a durable session still has to get: its mailbox in the store, and the part of it that is on its way.

    store   1 2 3 4 5 6 7 8 9 10 11           positions, oldest first
            └sent─┘ └ahead─┘└─ not read ─┘     sent: in the session's window; ahead: read, waits for room
                        cursor ┘       tail ┘

Rule 1: the packet id of an entry follows from its position (`id_of`). So nothing about ids is stored, and after a crash
        every message is sent again under the id it had.  [MQTT-4.4.0-1]
Rule 2: a message of QoS 1 or 2 is sent only after its entry is committed, and PUBREL only after the entry's mark is.
Rule 3: a connection begins with the oldest entry. What the last connection had in flight is simply there again.
        What may have been sent before goes out with DUP. After a restart nobody knows what was; but never more than
        the window and `UNSETTLED` entries are ahead of the acknowledgements in the store, so these get it.
Rule 4: in memory are at most `AHEAD` entries per client, however many there are in the store.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from motorcade.broker.frames import IDS, RELEASED, Frame, build, frame_of, message_of
from motorcade.broker.kept import decode_message, is_plain, message_from, owner_of
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message

if TYPE_CHECKING:
    from motorcade.broker.pubsub import Copy
    from motorcade.broker.session import Session
    from motorcade.broker.ticket import Ticket

IDS_OF_MAILBOX = 60_000  #: packet ids 1 to this one belong to mailbox entries, those above to everything else
BODIES = 10_000  #: bodies of plain messages that are remembered
AHEAD = 64  #: entries read ahead
AHEAD_OCTETS = 256 * 1024  #: bytes of payloads read ahead, about

UNSETTLED = 256  #: acknowledgements the store may not know of yet, before nothing more is sent

UNKNOWN = 1 << 62  #: a position that is never reached
OCTETS_STEP = 1024 * 1024

RELEASED_MARK = 1  #: mark of an entry: PUBREC has come
SENT_MARK = (
    2  #: mark of an entry of QoS 2 that could expire otherwise: it was sent (ports: marked entries never expire)
)

log = logging.getLogger(__name__)


class Kept(Protocol):
    """An entry of the store, or what will be read as one."""

    @property
    def position(self) -> int: ...

    @property
    def body(self) -> bytes: ...

    @property
    def payload(self) -> bytes: ...

    @property
    def mark(self) -> int: ...


class Keeping(Protocol):
    """What carries out the wishes of mailboxes; nothing here waits."""

    def fetch(self, session: Session, after: int, limit: int) -> None:
        """Read entries; `Mailbox.fetched` follows."""

    def acknowledge(self, mailbox: Mailbox, position: int) -> None:
        """An entry is done with; `Mailbox.settled` follows when the store knows."""

    def mark(self, mailbox: Mailbox, position: int, mark: int) -> Ticket:
        """Note a number with an entry."""

    def keep(self, session: Session, message: Message, *, retain: bool) -> None:
        """Keep a QoS 0 message for a client that is away."""

    def give(self, message: Message, copy: Copy, now: float) -> None:
        """Keep a message for one durable receiver; nobody waits for it."""


def id_of(position: int) -> int:
    """The packet id under which an entry is sent."""
    return 1 + position % IDS_OF_MAILBOX


class Bodies:
    """Reads the bodies of entries. Those of plain messages are the same for all of a client to a topic."""

    def __init__(self) -> None:
        self._plain: dict[bytes, tuple[bytes, int, ClientInfo]] = {}

    def frame(self, entry: Kept, version: int, now: float) -> Frame:
        """The frame of an entry."""
        plain = self._plain.get(entry.body)
        if plain is None:
            record = decode_message(entry.body)
            if not is_plain(record):
                message = message_from(record, entry.payload)
                flags = record.flags
                return frame_of(
                    message, version, flags & 3, now, retain=bool(flags & 4), identifiers=record.identifiers
                )
            if len(self._plain) >= BODIES:
                self._plain.clear()
            publisher = ClientInfo(record.publisher, record.username)
            plain = self._plain[entry.body] = record.topic.encode(), record.flags & 3, publisher
        topic, qos, publisher = plain
        return build(topic, b"\x00" + entry.payload if version == 5 else entry.payload, qos, publisher)


class Mailbox:
    """One durable session's way from the store to its window."""

    __slots__ = (
        "_ahead",
        "_ahead_octets",
        "_catch_to",
        "_doubtful",
        "_held_octets",
        "_read",
        "_restored",
        "_sent_octets",
        "_step",
        "_unread_octets",
        "_window_octets",
        "acked",
        "catching_up",
        "coming",
        "coming_octets",
        "cursor",
        "epoch",
        "held",
        "keeper",
        "open",
        "owner",
        "reading",
        "sent",
        "sent_to",
        "session",
        "tail",
        "unread",
    )

    def __init__(self, session: Session, keeper: Keeping, *, restored: bool = False) -> None:
        self.session = session
        self.keeper = keeper
        self.owner = owner_of(session.client.client_id)
        self.cursor = 0  #: everything up to here has been read (by this connection)
        self.tail = 0  #: highest position heard of
        self.unread = restored  #: there may be entries above the cursor that nobody has told of
        self.coming = 0  #: entries handed to the store whose position is not known yet
        self.coming_octets = 0
        self.catching_up = False  #: what was kept while the client was away is not sent yet; QoS 0 waits for it
        self._catch_to = 0
        self._restored = restored  # nobody has told of all entries
        self._read = False  # this connection has read at least once: the cursor means something
        self.open = False  #: a client is there and has got its CONNACK
        self.epoch = 0  #: one more with every connection
        self.reading = False
        self.sent: dict[int, int] = {}  #: packet id -> position, in the window now
        self.held = session.shared.options.window if restored else 0  #: entries the last connection had in its window
        self._held_octets = 0
        self._sent_octets: dict[int, int] = {}  # packet id -> octets, in the window now
        self._window_octets = 0  # of all of them
        self._unread_octets = 0  # of entries that have arrived and wait in the store, about
        self.sent_to = 0  #: highest position that was ever sent
        self.acked: set[int] = set()  #: acknowledged, but the store may not know yet
        self._ahead: deque[tuple[int, Kept | Frame]] = deque()
        self._ahead_octets = 0
        self._step = AHEAD // 4
        self._doubtful = 0  # entries that the process before this one may have sent
        if restored:
            self._doubtful = (session.shared.options.window or 65535) + UNSETTLED

    @property
    def backlog(self) -> int:
        """Entries that wait, about; what was pushed out meanwhile counts."""
        unread = max(0, self.tail - self.cursor) if self._read else 0
        return unread + self.coming + len(self._ahead)

    @property
    def backlog_octets(self) -> int:
        """Octets of their payloads, about."""
        return self.coming_octets + self._unread_octets + self._ahead_octets

    @property
    def room(self) -> tuple[int, int]:
        """(entries, octets) the mailbox may have: the queue, and what is in the window; 0 is any number.

        While a client is connected, its whole window counts, and octets are rounded up, so that most get the same
        answer: whoever does is served together.
        """
        options = self.session.shared.options
        octets = self._window_octets if self.open else self._held_octets
        return (
            options.queue + (options.window if self.open else self.held) if options.queue else 0,
            options.queue_bytes + -(-octets // OCTETS_STEP) * OCTETS_STEP if options.queue_bytes else 0,
        )

    @property
    def waiting(self) -> bool:
        """Whether there is something to send as soon as there is room."""
        return bool(self._ahead) or self.unread or self.tail > self.cursor

    # -- the connection comes and goes

    def begin(self) -> None:
        """A client is there and has got its CONNACK: begin with the oldest entry."""
        self.open = self.catching_up = True
        self._catch_to = self.tail or UNKNOWN
        self._read = False
        self.epoch += 1
        self.cursor = 0
        self.unread = True

    def serves(self, epoch: int) -> bool:
        """Whether the connection of this number is still there."""
        return self.open and self.epoch == epoch

    def detach(self) -> None:
        """The connection is gone; what it had on its way is in the store."""
        session = self.session
        self.held = len(self.sent)
        self._held_octets = self._window_octets
        self._window_octets = 0
        self._sent_octets.clear()
        for number in self.sent:
            session.inflight.pop(number, None)
        self.sent.clear()
        self._ahead.clear()
        self._ahead_octets = self._unread_octets = 0
        self.open = self.reading = self.catching_up = False

    # -- in

    def keep(self, frame: Frame) -> None:
        """A QoS 0 message for a client that is away."""
        session = self.session
        self.keeper.keep(session, message_of(frame, session.version), retain=bool(frame[0][0] & 1))

    def expect(self, octets: int) -> None:
        """An entry with so large a payload is handed to the store."""
        self.coming += 1
        self.coming_octets += octets
        if self.open:
            self.session.note_backlog(self.backlog, self.backlog_octets)

    def arrived(self, position: int, frame: Frame | None, octets: int) -> None:
        """An entry is committed. If nothing waits before it, it goes on from memory; else it will be read.

        0: it was not, or the queue was full.
        """
        self.coming -= 1
        self.coming_octets -= octets
        self.tail = max(self.tail, position)
        if not self.open or position <= self.cursor:
            return  # nobody is there, or it is read already
        is_next = position == self.cursor + 1 and not self.reading and not self.unread
        if frame is not None and is_next and len(self._ahead) < AHEAD and self._ahead_octets < AHEAD_OCTETS:
            self.cursor = position
            self._ahead.append((position, frame))
            self._ahead_octets += octets
        else:
            self._unread_octets += octets

    def look_again(self) -> None:
        """There may be entries that nobody tells of: a write failed, and may have been done all the same."""
        if self.open:
            self.unread = True
            self.session.go_on()

    def fetched(self, entries: Sequence[Kept], limit: int, tail: int) -> None:
        """Entries that were asked for by this connection have been read. `tail` was known when they were."""
        self.reading = False
        self._read = True
        octets = 0
        for number, entry in enumerate(entries):
            if self.coming and not self._restored and entry.position > self.tail:
                # It is in the store, but perhaps not as safe yet as it should be: its commit is awaited.
                entries = entries[:number]
                tail = 0
                break
            self.cursor = entry.position
            octets += len(entry.payload)
            if entry.position not in self.acked:
                self._ahead.append((entry.position, entry))
        self._ahead_octets += octets
        self._unread_octets = max(0, self._unread_octets - octets)
        if len(entries) < limit:
            self.cursor = max(self.cursor, tail)
            self.unread = self._restored = False
            if self.cursor >= self.tail:
                self._unread_octets = 0  # what was pushed out or has expired is never read
        elif octets:  # as many next time as fit
            self._step = max(1, min(AHEAD, AHEAD_OCTETS * len(entries) // octets))
        else:
            self._step = AHEAD
        self.tail = max(self.tail, self.cursor)

    # -- out

    @property
    def may_send(self) -> bool:
        """Whether something is here that waits for room only."""
        return self.open and bool(self._ahead)

    def pump(self, now: float, most: int | None = None) -> int:
        """Send what is here, as far as the window allows but at most so many, and have more read; how many went."""
        if not self.open:
            return 0
        session = self.session
        ahead = self._ahead
        before = len(ahead)
        least = 0 if most is None else before - most
        while ahead and session.writable and len(ahead) > least:
            position, what = ahead[0]
            number = id_of(position)
            if len(session.inflight) >= session.limit or number in session.inflight or len(self.acked) >= UNSETTLED:
                break
            ahead.popleft()
            self._send(position, number, what, now)
            if position >= self._catch_to:
                self.catching_up = False
        left = len(ahead)
        if not ahead:
            self._ahead_octets = 0
            if not self.unread and self.tail <= self.cursor:
                self.catching_up = False
        if not self.reading and len(ahead) * 2 < self._step and (self.unread or self.tail > self.cursor):
            self.reading = True
            self.keeper.fetch(session, self.cursor, self._step)
        return before - left

    def _send(self, position: int, number: int, what: Kept | Frame, now: float) -> None:
        session = self.session
        again = position <= self.sent_to
        if self._doubtful:
            self._doubtful -= 1
            again = True
        if isinstance(what, tuple):
            frame = session.fresh(what, now)
        elif what.mark == RELEASED_MARK:
            self._send_release(position, number)
            return
        else:
            frame = self._decoded(what, now)
        self.sent_to = max(self.sent_to, position)
        if frame is None or not session.send(frame, number, again=again) or not frame[0][0] & 6:
            self._done(position)
            return
        self.sent[number] = position
        octets = self._sent_octets[number] = len(frame[1])
        self._window_octets += octets
        if frame[0][0] & 4 and isinstance(frame[2], Message) and frame[2].expires_at is not None:
            self.keeper.mark(self, position, SENT_MARK)  # [MQTT-4.3.3-7]: from now on it must not expire

    def _decoded(self, entry: Kept, now: float) -> Frame | None:
        """The frame of an entry that was read; None if it has expired, or is damaged."""
        session = self.session
        try:
            frame = session.shared.bodies.frame(entry, session.version, now)
        except Exception:
            log.exception("entry_unreadable client=%s position=%d", session.client.client_id, entry.position)
            session.shared.stats.dropped["unreadable"] += 1
            return None
        if entry.mark != SENT_MARK and isinstance(frame[2], Message) and frame[2].expired(now):
            session.drop(frame, "expired")
            return None
        return frame

    def _send_release(self, position: int, number: int) -> None:
        """PUBREC came before the crash or the break: only PUBREL is missing."""
        session = self.session
        self.sent[number] = position
        session.inflight[number] = RELEASED
        if not session.out:
            session.shared.dirty.append(session)
        session.out.append(b"\x62\x02" + IDS[number])
        session.shared.stats.packets_sent += 1

    # -- acknowledgements

    def acknowledged(self, number: int) -> None:
        """The client is done with a message."""
        position = self.sent.pop(number, 0)
        if position:
            self._window_octets -= self._sent_octets.pop(number, 0)
            self._done(position)

    def may_have_been_sent(self, position: int, number: int) -> bool:
        """Whether an entry, the so-manyth of the mailbox, may have reached the client."""
        return position <= self.sent_to or number <= self._doubtful

    def may_come_again(self, number: int) -> bool:
        """Whether a message that is not in the window may still be read and sent under this id."""
        return number <= IDS_OF_MAILBOX and (not self.open or self.waiting)

    def release(self, number: int) -> Ticket | None:
        """PUBREC has come: PUBREL may go out when the ticket is done; None: it is not from the store."""
        position = self.sent.get(number)
        return None if position is None else self.keeper.mark(self, position, RELEASED_MARK)

    def _done(self, position: int) -> None:
        self.acked.add(position)
        self.keeper.acknowledge(self, position)

    def settled(self, positions: Sequence[int]) -> None:
        """The store knows that these are acknowledged."""
        full = len(self.acked) >= UNSETTLED
        self.acked.difference_update(positions)
        if not self.acked:
            self.acked.clear()  # only this gives the memory back
        if full and self.open:
            self.session.go_on()
