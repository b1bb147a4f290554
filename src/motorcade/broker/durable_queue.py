"""The durable queue of a session: the offline queue, or backlog, of a client that is away or slow.

It is the session's mailbox in the store, and the part of it that was read ahead for the window.

    store   1 2 3 4 5 6 7 8 9 10 11           positions, oldest first
            └sent─┘ └ahead─┘└─ not read ─┘     sent: in the session's window; ahead: read, waits for room
                        cursor ┘       tail ┘

Rule 1: the packet id of an entry follows from its position (`id_of`). So nothing about ids is stored, and after a crash
        every message is sent again under the id it had.  [MQTT-4.4.0-1]
        If an older entry holds that id, unacknowledged for `IDS_OF_QUEUE` messages or its acknowledgement not stored
        yet, the entry is moved: it gets one of `MOVED_IDS` ids above, and a mark that tells which one. The mark is
        stored before the entry is sent, and stays with it: so it too has the same id after a crash.
Rule 2: a message of QoS 1 or 2 is sent only after its entry is committed, and PUBREL only after the entry's mark is.
Rule 3: a connection begins with the oldest entry. What the last connection had in flight is simply there again.
        What may have been sent before goes out with DUP: all up to `sent_to`, which the session's record tells when
        its client is away. After a crash it is unknown what a connected client was sent; but never more than its
        window and `UNSETTLED` entries are ahead of the acknowledgements in the store, so the first so many of those
        that were there before get it.
Rule 4: in memory are at most `AHEAD` entries per client, however many there are in the store.
Rule 5: a full mailbox drops what waits, never what was sent. While the client is away the store does it (`expect`).
        While it is connected, an entry could be sent between the append and its commit; so the store drops nothing but
        QoS 0 and tells that there is too much, and the oldest that waits is chosen here (`discard`). For the same
        reason a connection sends nothing before what was appended in its absence is committed (`_hold`).
Rule 6: nothing here waits. `SessionStore` reads and writes, and calls back.
Rule 7: in a cluster other members append too, and tell of it when it is committed (`hinted`). Only what is known to be
        committed is read (`confirmed_to`): all that was there before the session was attached here, before an own
        write, or before an entry that another member tells of. The mailbox is the members' together: what goes into it
        leaves the figures of the one, and comes into those of the other when it is delivered or dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from motorcade.broker.frames import IDS, RELEASED, Frame, build, frame_of, message_of, topic_of
from motorcade.broker.session_records import ENTRY, message_from, owner_of
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.storage.ports import SPARE_ALL, Bound, Entry, MailboxInfo

if TYPE_CHECKING:
    from motorcade.broker.session import Session
    from motorcade.broker.session_store import SessionStore

IDS_OF_QUEUE = 60_000  #: packet ids 1 to this one follow from the positions of entries
MOVED_FROM = 60_001  #: the first id of entries whose own id is held by an older one
MOVED_IDS = 120
FIRST_OTHER_ID = MOVED_FROM + MOVED_IDS  #: from here on ids belong to everything that is not in the mailbox
BODIES = 10_000  #: bodies of plain messages that are remembered
AHEAD = 64  #: entries read ahead
AHEAD_BYTES = 256 * 1024  #: bytes of payloads read ahead, about

NOT_SENT = (-1, 0)  #: position and size where there is none
UNSETTLED = 256  #: acknowledgements the store may not know of yet, before nothing more is sent

UNKNOWN = 1 << 62  #: a position that is never reached
GAP = 1 << 16  #: so many positions that are passed over at once have no entries (ports, rule 9)
BYTES_STEP = 1024 * 1024
BOUNDS = 256  #: bounds of mailboxes that are remembered

RELEASED_MARK = 1  #: mark of an entry: PUBREC has come
SENT_MARK = 2  #: mark of an entry of QoS 2 that was sent: from then on it must not expire (marked ones never do)

#: Mark of a moved entry: this, twice the place of its id among those of moved entries, and one if PUBREC has come.
#: So the lowest bit of any mark tells whether PUBREC has come.
MOVED_MARK = 16

RETRY = 1.0  #: seconds until a mark that could not be stored is tried again

log = logging.getLogger(__name__)


def id_of(position: int) -> int:
    """Return the packet id under which an entry is sent."""
    return 1 + position % IDS_OF_QUEUE


class EntryDecoder:
    """Makes frames of entries. Bodies of plain messages are the same for all of a client to a topic, and remembered."""

    def __init__(self) -> None:
        self._plain: dict[bytes, tuple[bytes, int, ClientInfo]] = {}

    def frame(self, entry: Entry, version: int, now: float) -> Frame:
        """Return the frame of an entry; `RecordError` if it cannot be read."""
        plain = self._plain.get(entry.body)
        if plain is None:
            record = ENTRY.decode(entry.body)
            if not record.plain:
                message = message_from(record, entry.payload)
                return frame_of(
                    message, version, record.granted, now, retain=record.retained, identifiers=record.identifiers
                )
            if len(self._plain) >= BODIES:
                self._plain.clear()
            publisher = ClientInfo(record.client, record.username)
            plain = self._plain[entry.body] = record.topic.encode(), record.granted, publisher
        topic, qos, publisher = plain
        return build(topic, b"\x00" + entry.payload if version == 5 else entry.payload, qos, publisher)


class DurableQueue:
    """One durable session's way from the store to its window."""

    __slots__ = (
        "_ahead",
        "_ahead_size",
        "_base",
        "_clear_to",
        "_counted",
        "_discarded",
        "_gone",
        "_held_size",
        "_hold",
        "_moved",
        "_oldest",
        "_step",
        "_unread_size",
        "_unstored",
        "_window_size",
        "acked",
        "before",
        "catch_up_to",
        "coming",
        "coming_size",
        "confirmed_to",
        "cursor",
        "epoch",
        "generation",
        "held",
        "kept",
        "open",
        "owner",
        "reading",
        "sent",
        "sent_to",
        "session",
        "shared",
        "store",
        "tail",
        "unread",
    )

    def __init__(
        self, session: Session, store: SessionStore, *, restored: bool = False, sent_to: int = UNKNOWN, window: int = 0
    ) -> None:
        """Take `restored`: the process before this one may have left entries, and has sent those up to `sent_to`.

        If that is unknown, `window` is how many the client took at once; 0: as many as now.
        """
        self.session = session
        self.store = store
        self.owner = owner_of(session.client.client_id)
        self.generation = 0  #: of the mailbox; 0: any
        self.shared = session.shared.clustered  #: other members append to the mailbox too (rule 7)
        self.confirmed_to = 0 if self.shared else UNKNOWN  #: entries up to here are committed, wherever they came from
        self.cursor = 0  #: everything up to here has been read (by this connection)
        self.tail = 0  #: highest position heard of
        self._base = 0  # below the first position heard of; mailboxes do not begin with 1 (ports, rule 9)
        self.unread = restored  #: there may be entries above the cursor that were not told of
        self.coming = 0  #: entries handed to the store whose position is not known yet
        self.coming_size = 0  #: bytes of their payloads
        self.kept = 0  #: entries of this process in the store
        #: Entries up to here are of the process before; of a shared mailbox all are, as far as the figures go.
        self.before = UNKNOWN if restored or self.shared else 0
        self._counted: set[int] | None = None  # dropped, though the store may have them yet
        self._gone: set[int] | None = None  # in flight, and removed from the store because they have expired
        #: Position up to which the client has to get what was kept while it was away before QoS 0 goes out; 0: it has.
        self.catch_up_to = 0
        self.open = False  #: a client is there and has got its CONNACK
        self.epoch = 0  #: one more with every connection
        self.reading = False
        self.sent: dict[int, tuple[int, int]] = {}  #: packet id -> position and bytes, in the window now
        #: Entries the last connections had in flight, at most.
        self.held = (window or session.shared.options.window) if restored else 0
        self._held_size = 0
        self._window_size = 0  # bytes in the window now
        self._unread_size = 0  # bytes of entries that have arrived and wait in the store, about
        self.sent_to = sent_to if restored else 0  #: highest position that was ever sent; `UNKNOWN` after a crash
        self._discarded: set[int] | None = None  # dropped here while a read was under way
        self._hold = 0  # appends that were begun before this connection and are not answered yet
        self._moved: dict[int, int] = {}  # position -> packet id of moved entries, until their end is stored
        self._unstored = 0  # position of the one whose mark is not stored yet
        self._clear_to = 0  # below this position no older entry can have the id of another
        self._oldest = 0  # because of this one
        self.acked: set[int] = set()  #: acknowledged, but the store may not know yet
        self._ahead: deque[tuple[int, Entry | Frame]] = deque()
        self._ahead_size = 0
        self._step = AHEAD // 4

    @property
    def backlog(self) -> int:
        """Return about how many entries wait; what was pushed out meanwhile counts."""
        unread = max(0, self.tail - max(self.cursor, self._base)) if self.cursor or not self.unread else 0
        return unread + self.coming + len(self._ahead)

    @property
    def backlog_size(self) -> int:
        """Return about how many bytes their payloads have."""
        return self.coming_size + self._unread_size + self._ahead_size

    @property
    def bound(self) -> Bound:
        """Return how large the mailbox may grow: the queue, and what is in the window.

        While a client is connected its whole window counts, and bytes are rounded up, so that most receivers have the
        same bound: these are served together.
        """
        shared = self.session.shared
        options = shared.options
        if self.open:
            window, size = options.window, self._window_size
        else:
            window, size = self.held, self._held_size
        entries = options.queue + window if options.queue else 0
        size = options.queue_bytes + -(-size // BYTES_STEP) * BYTES_STEP if options.queue_bytes else 0
        bound = shared.bounds.get((entries, size))  # kept, since there are few and making one is slow
        if bound is None:
            if len(shared.bounds) >= BOUNDS:
                shared.bounds.clear()
            bound = shared.bounds[entries, size] = Bound(entries, size)
        return bound

    @property
    def max_sent(self) -> int:
        """Return how many entries a process that was killed had sent, at most (rule 3)."""
        return (self.held or 65535) + UNSETTLED

    @property
    def pending(self) -> bool:
        """Return True if there is something to send, here or in the store."""
        return bool(self._ahead) or self.unread or self.tail > self.cursor

    # -- the connection comes and goes

    def wake(self, mailbox: MailboxInfo, told_to: int) -> None:
        """Note that this member of a cluster has attached the session, how its mailbox was, and what came since."""
        self.generation = mailbox.generation
        last = max(mailbox.last, told_to)
        self.confirm(last)
        self.tail = max(self.tail, last)  # a late word of an earlier entry brings nothing new

    def confirm(self, position: int) -> None:
        """Note that everything up to an entry is committed."""
        self.confirmed_to = max(self.confirmed_to, position)

    def begin(self) -> None:
        """Begin with the oldest entry: a client is there and has got its CONNACK."""
        self.open = True
        self._hold = self.coming
        self.catch_up_to = self.tail or UNKNOWN
        self.epoch += 1
        self.cursor = self._clear_to = 0
        self.unread = True

    def serves(self, epoch: int) -> bool:
        """Return True if the connection of this number is still there."""
        return self.open and self.epoch == epoch

    def detach(self) -> None:
        """Note that the connection is gone; what it had on its way is in the store."""
        session = self.session
        self._hold_back()
        self._window_size = 0
        for position in self._gone or ():  # nothing is left to be sent again
            session.shared.stats.dropped["expired"] += 1
            self.left((position,))
        self._gone = None
        for number in self.sent:
            session.inflight.pop(number, None)
        self.sent.clear()
        self._ahead.clear()
        self._ahead_size = self._unread_size = 0
        self.open = self.reading = False
        self.catch_up_to = self._hold = 0
        self._discarded = None
        if self._moved:  # what is left will be read with its mark
            self._moved = {p: n for p, n in self._moved.items() if p in self.acked or p == self._unstored}

    def _hold_back(self) -> None:
        """Note how much is in flight: what this connection has sent, and what those before it have sent."""
        held, size = len(self.sent), self._window_size
        if self._ahead[0][0] <= self.sent_to if self._ahead else self.pending and self.cursor < self.sent_to:
            held, size = max(held, self.held), max(size, self._held_size)  # it has not repeated all of them
        self.held, self._held_size = held, size

    # -- in

    def keep(self, frame: Frame) -> None:
        """Store a QoS 0 message for a client that is away."""
        session = self.session
        self.store.writer.keep(session, message_of(frame, session.version), retain=bool(frame[0][0] & 1))

    def keep_retained(self, message: Message, qos: int, now: float) -> None:
        """Store a retained message that is in flight to a client which leaves this node."""
        self.store.writer.keep_message(self.session, message, qos, now)

    def expect(self, size: int) -> int:
        """Note that an entry with so large a payload is handed to the store.

        Return the position up to which the store must not drop entries when there is no room (rule 5).
        """
        self.coming += 1
        self.coming_size += size
        if self.open:
            self.session.note_backlog(self.backlog, self.backlog_size)
            return SPARE_ALL
        return SPARE_ALL if self.sent_to == UNKNOWN else self.sent_to

    def arrived(self, position: int, frame: Frame | None, size: int, *, repeated: bool = False) -> None:
        """Take in an entry that is committed. If nothing waits before it, it goes on from memory; else it will be read.

        Position 0: it was not committed, or the queue was full. `repeated`: it was there before.
        """
        if position and self.shared:
            self.confirm(position)
            self.session.shared.stats.withdrawn["elsewhere"] += not repeated
        elif position and not repeated:
            if position <= self.before:
                self.before = position - 1
            self.kept += 1
            self.session.shared.kept += 1
        self.coming -= 1
        self.coming_size -= size
        if self._hold:
            self._hold -= 1
            if not self._hold:
                self.session.go_on()
        self._take_in(position, frame, size)

    def hinted(self, position: int, entry: Entry) -> None:
        """Take in an entry that another member has appended; it is committed."""
        self.confirm(position)
        self._take_in(position, entry, len(entry.payload))
        self.session.note_backlog(self.backlog, self.backlog_size)

    def _take_in(self, position: int, what: Entry | Frame | None, size: int) -> None:
        """Have an entry sent from memory if nothing waits before it."""
        if not self.tail:
            self._base = max(0, position - 1)
        elif position - self.tail > GAP:
            self._base = position - 1 - max(0, self.tail - max(self.cursor, self._base))
        self.tail = max(self.tail, position)
        if not self.open or position <= self.cursor:
            return  # the client is away, or it is read already
        is_next = position == self.cursor + 1 and not self.reading and not self.unread
        if what is not None and is_next and len(self._ahead) < AHEAD and self._ahead_size < AHEAD_BYTES:
            self.cursor = position
            self._ahead.append((position, what))
            self._ahead_size += size
        else:
            self._unread_size += size

    def look_again(self) -> None:
        """Read again: a write has failed with an unknown outcome, so there may be entries that were not told of."""
        if self.shared:
            self.store.reader.look_again((self,))
        elif self.open:
            self.unread = True
            self.session.go_on()

    def confirmed(self, last: int) -> None:
        """Read on: everything up to an entry is committed now, announced or not."""
        self.confirm(last)
        if self.open and last > self.cursor:
            self.unread = True
            self.session.go_on()

    def fetched(self, entries: Sequence[Entry], limit: int, tail: int) -> None:
        """Take in entries that this connection has asked for. `tail` was known when they were read."""
        self.reading = False
        size = 0
        for number, entry in enumerate(entries):
            awaited = self.coming and entry.position > max(self.tail, self.before)
            if awaited or entry.position > self.confirmed_to:
                # It is in the store, but perhaps not as safe yet as it should be: its commit is awaited.
                entries = entries[:number]
                tail = self.confirmed_to if self.shared else 0
                break
            self.cursor = entry.position
            size += len(entry.payload)
            if entry.position not in self.acked and not (self._discarded and entry.position in self._discarded):
                self._ahead.append((entry.position, entry))
                if entry.mark >= MOVED_MARK:
                    self._moved[entry.position] = MOVED_FROM + (entry.mark - MOVED_MARK) // 2
                    self._clear_to = min(self._clear_to, entry.position)
        self._discarded = None
        self._ahead_size += size
        self._unread_size = max(0, self._unread_size - size)
        if len(entries) < limit:
            self.cursor = max(self.cursor, tail)
            self.unread = False
            if self.before == UNKNOWN and not self.coming and not self.shared:
                self.before = self.cursor
            if self.cursor >= self.tail:
                self._unread_size = 0  # what was pushed out or has expired is never read
        elif size:  # as many next time as fit
            self._step = max(1, min(AHEAD, AHEAD_BYTES * len(entries) // size))
        else:
            self._step = AHEAD
        self.tail = max(self.tail, self.cursor)

    def know_sent(self, position: int, entries: int, size: int) -> None:
        """Note that the process before this one has sent no entry above this one: at most so many, of so many bytes."""
        if self.sent_to == UNKNOWN:
            self.sent_to = min(position, self.before)
            if not self.open:
                self.held = max(self.held, entries)
                self._held_size = max(self._held_size, size)

    def discard(self, entry: Entry) -> bool:
        """Drop an entry that waits, because there is no room; False if it does not wait any more."""
        position = entry.position
        if position <= self.sent_to or position in self.acked:
            return False
        if self.open:
            self._ahead_size = max(0, self._ahead_size - len(entry.payload))
        self._take_back((position,))
        session = self.session
        if session.shared.hooks.message_dropped is None:
            session.shared.stats.dropped["queue_full"] += 1
        else:
            frame = self._decoded(entry, 0.0)
            if frame is not None:
                session.drop(frame, "queue_full")
        self._not_delivered(position)
        return True

    def pushed_out(self, positions: Sequence[int]) -> None:
        """Note that the store has dropped entries, because there is no room."""
        dropped = [position for position in positions if position not in self.acked]
        self._take_back(dropped)
        self.session.shared.stats.dropped["queue_full"] += len(dropped)
        self.left(dropped)

    def expired(self, position: int) -> None:
        """Note that the store has removed an entry whose time is over."""
        if position in self.acked:
            return
        if any(position == sent for sent, _ in self.sent.values()):  # it may still be acknowledged
            self._gone = (self._gone or set()) | {position}
            return
        self._take_back((position,))
        self.session.shared.stats.dropped["expired"] += 1
        self.left((position,))

    def _take_back(self, positions: Sequence[int]) -> None:
        """Do not send entries that are gone, though they were read."""
        if self.open and positions:
            self._ahead = deque(one for one in self._ahead if one[0] not in positions)
            if self.reading:
                self._discarded = (self._discarded or set()).union(positions)

    def left(self, positions: Sequence[int]) -> None:
        """Count entries that are no longer in the store."""
        old = sum(position <= self.before for position in positions) if self.before else 0
        shared = self.session.shared
        shared.stats.restored += old
        shared.kept -= len(positions) - old
        self.kept -= len(positions) - old

    # -- out

    # As an `Upstream`: takes its turn with the sources of its client.

    @property
    def waits(self) -> bool:
        """Return True if something is here that waits for room only."""
        return self.open and bool(self._ahead)

    @property
    def needs_room(self) -> bool:
        """Return True: QoS 0 goes with the others, in order."""
        return True

    def turn(self, now: float) -> bool:
        """Send the next message; False if there is none, or it must wait."""
        return self.pump(now, 1) > 0

    def pump(self, now: float, most: int | None = None) -> int:
        """Send what is here, as far as the window allows but at most so many, and have more read; return how many."""
        if not self.open or self._hold:
            return 0
        session = self.session
        ahead = self._ahead
        before = len(ahead)
        least = 0 if most is None else before - most
        while ahead and session.writable and len(ahead) > least:
            position, what = ahead[0]
            if len(session.inflight) >= session.limit or len(self.acked) >= UNSETTLED:
                break
            number = 1 + position % IDS_OF_QUEUE if position < self._clear_to else self._number_of(position)
            if not number:
                break
            ahead.popleft()
            self._send(position, number, what, now)
            if position >= self.catch_up_to:
                self.catch_up_to = 0
        left = len(ahead)
        session.shared.stats.store_sent += before - left
        if not ahead:
            self._ahead_size = 0
            if not self.unread and self.tail <= self.cursor:
                self.catch_up_to = 0
                if session.revoked is not None and not (session.inflight or self.coming):
                    session.revoked = None  # nothing is left that came under these filters
        if not self.reading and len(ahead) * 2 < self._step and (self.unread or self.tail > self.cursor):
            self.reading = True
            self.store.reader.fetch(self, self._step)
        return before - left

    def _number_of(self, position: int) -> int:
        """Return the packet id of the next entry, if an older one may have that of its position; 0: it has to wait."""
        number = self._moved.get(position, 0)
        if number:
            return 0 if position == self._unstored or number in self.session.inflight else number
        number = id_of(position)
        if number in self.session.inflight or any(not (position - other) % IDS_OF_QUEUE for other in self.acked):
            self._move(position)
            return 0
        if self.sent.get(id_of(self._oldest), NOT_SENT)[0] != self._oldest:
            self._oldest = min((position, *self.acked, *(sent for sent, _ in self.sent.values())))
            waiting = min((other for other in self._moved if other > position), default=UNKNOWN)
            self._clear_to = min(self._oldest + IDS_OF_QUEUE, waiting)
        return number

    def _move(self, position: int) -> None:
        """Give an entry another id, and have that stored; it can be sent then."""
        taken = set(self._moved.values()) | self.session.inflight.keys()
        free = next((number for number in range(MOVED_FROM, FIRST_OTHER_ID) if number not in taken), 0)
        if not free or self._unstored:
            return  # tried again when something is acknowledged, or that one is stored
        held, _ = self.sent.get(id_of(position), (0, 0))
        if held:
            log.warning(
                "message_held client=%s packet_id=%d messages_since=%d consequence=%s",
                self.session.client.client_id,
                id_of(position),
                position - held,
                "it is never acknowledged; another message whose turn this id is gets another one",
            )
        self._moved[position] = free
        self._unstored = position
        self.session.shared.stats.moved_ids += 1
        self._store_move()

    def _store_move(self) -> None:
        position = self._unstored
        if self.session.ended or position not in self._moved:  # there was no room for it, and it is gone
            self._unstored = 0
            self.session.go_on()
            return
        commit = self.store.writer.mark(self, position, MOVED_MARK + 2 * (self._moved[position] - MOVED_FROM))

        def stored() -> None:
            if self.session.ended:
                return
            if commit.error is not None:
                self.session.shared.later(RETRY, self._store_move)
                return
            self._unstored = 0
            self.session.go_on()

        commit.then(stored)

    def _send(self, position: int, number: int, what: Entry | Frame, now: float) -> None:
        session = self.session
        again = position <= self.sent_to
        if isinstance(what, tuple):
            frame = session.fresh(what, now)
        elif what.mark & RELEASED_MARK:
            session.shared.stats.store_sent -= 1  # `pump` counts it
            self._send_release(position, number)
            return
        else:
            frame = self._decoded(what, now)
        if session.revoked is not None and frame is not None and session.revoked.hides(topic_of(frame).decode()):
            self._withdraw(position, number, frame, again=again)
            return
        self.sent_to = max(self.sent_to, position)
        if frame is None or not session.send(frame, number, again=again):
            session.shared.stats.store_sent -= 1
            self._not_delivered(position)
            return
        if not frame[0][0] & 6:
            self._done(position)
            return
        size = len(frame[1])
        self.sent[number] = position, size
        self._window_size += size
        origin = frame[2]
        if frame[0][0] & 4 and isinstance(origin, Message) and origin.expires_at is not None and number < MOVED_FROM:
            self.store.writer.mark(self, position, SENT_MARK)  # [MQTT-4.3.3-7]: from now on it must not expire

    def _withdraw(self, position: int, number: int, frame: Frame, *, again: bool) -> None:
        """Drop an entry that the client may not read any more; if it may have come before, PUBREL frees its id."""
        session = self.session
        if not (self._counted and position in self._counted):
            session.drop(frame, "revoked")
        session.shared.stats.store_sent -= 1
        self.sent_to = max(self.sent_to, position)
        if not (again and frame[0][0] & 4):
            self._not_delivered(position)
            return
        self._count(position)
        self.sent[number] = position, 0
        session.inflight[number] = RELEASED
        commit, epoch = self.release(number), self.epoch

        def stored() -> None:
            if commit is not None and commit.error is None and self.serves(epoch):
                self._send_release(position, number)
                if session.link is not None:
                    session.link.write_later()

        if commit is not None:
            commit.then(stored)

    def _decoded(self, entry: Entry, now: float) -> Frame | None:
        """Return the frame of an entry that was read; None if it has expired, or is damaged."""
        session = self.session
        try:
            frame = session.shared.decoder.frame(entry, session.version, now)
        except Exception:
            log.exception("entry_unreadable client=%s position=%d", session.client.client_id, entry.position)
            session.shared.stats.dropped["unreadable"] += 1
            return None
        if not entry.mark and isinstance(frame[2], Message) and frame[2].expired(now):
            session.drop(frame, "expired")
            return None
        return frame

    def _send_release(self, position: int, number: int) -> None:
        """Send PUBREL: PUBREC came before the crash or the break."""
        session = self.session
        self.sent[number] = position, 0
        session.inflight[number] = RELEASED
        if not session.out:
            session.shared.dirty.append(session)
        session.out.append(b"\x62\x02" + IDS[number])
        session.shared.stats.packets_sent += 1

    # -- acknowledgements

    def acknowledged(self, number: int) -> None:
        """Note that the client is done with a message."""
        position, size = self.sent.pop(number, (0, 0))
        if position:
            self._window_size -= size
            self._done(position)

    def may_come_again(self, number: int) -> bool:
        """Return True if a message that is not in the window may still be read and sent under this id."""
        return number < FIRST_OTHER_ID and (not self.open or self.pending)

    def release(self, number: int) -> Commit[Any] | None:
        """Note PUBREC; PUBREL may go out when the commit is done. None: the message is not from the store."""
        position, _ = self.sent.get(number, (0, 0))
        if not position:
            return None
        mark = RELEASED_MARK if number < MOVED_FROM else MOVED_MARK + 2 * (number - MOVED_FROM) + RELEASED_MARK
        return self.store.writer.mark(self, position, mark)

    def _done(self, position: int) -> None:
        self.acked.add(position)
        self.store.writer.acks.hurry(self)

    def forgotten(self, lost: int) -> None:
        """Note that the session has ended; so many entries were still in the store."""
        counted = self._counted or set()
        lost = max(0, lost - len(counted))
        delivered = min(lost, len(self.acked - counted))  # the store was not told any more
        shared = self.session.shared
        shared.stats.store_delivered += delivered
        shared.stats.dropped["session_ended"] += lost - delivered
        shared.stats.restored += max(0, lost - self.kept)
        shared.kept -= self.kept
        self.kept = 0
        self._counted = None
        self.acked.clear()

    def _not_delivered(self, position: int) -> None:
        self._count(position)
        self._done(position)

    def _count(self, position: int) -> None:
        """Count an entry that is dropped as one that has left, once."""
        if self._counted is None:
            self._counted = set()
        if position not in self._counted:
            self._counted.add(position)
            self.left((position,))

    def settled(self, positions: Sequence[int]) -> None:
        """Note that the store knows of these acknowledgements."""
        delivered = positions
        if self._counted:
            delivered = [position for position in positions if position not in self._counted]
            self._counted = self._counted.difference(positions) or None
        self.session.shared.stats.store_delivered += len(delivered)
        self.left(delivered)
        if self._gone:
            self._gone = self._gone.difference(positions) or None
        full = len(self.acked) >= UNSETTLED or bool(self._moved)
        self.acked.difference_update(positions)
        if not self.acked:
            self.acked.clear()  # only this gives the memory back
        if self._moved:
            for position in positions:
                self._moved.pop(position, None)
        if full and self.open:
            self.session.go_on()
