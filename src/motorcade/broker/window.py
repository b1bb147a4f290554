"""What one client still has to get: a bounded queue, then the inflight window, then the bytes for its socket.

    publish -> [ queue: waits, may drop ]-[ window: sent, not acknowledged ]-> out -> vehicle
                queue, queue_bytes       ^ limit (receive maximum)
    sources -> scheduler ------------------+  (everything that does not come live: asked for only while there is room)

Rule 1: only this file hands out packet ids; an id is free again when its message leaves the window.
Rule 2: order in is order out. Nothing overtakes inside one session: while something waits in the queue,
        everything waits, QoS 0 too. Messages of a source keep their order among themselves, and take their turn with
        the queue (`source_scheduler.py`).
Rule 3: the state is READY exactly while a message may go straight to `out`: connected, the socket takes bytes,
        nothing waits. QoS 1 and 2 need room in the window besides. The fast path relies on it.
Rule 4: back-pressure before loss. A connected client that is behind is waited for: from half a queue on it is BEHIND,
        and publishers whose messages go to this client alone pause until the queue is down to a quarter, but not for
        longer than `patience`; then it is GIVEN_UP until it has caught up by itself.

    OFFLINE --attach--> CONNECTING --resend--> WAITING <--settle--> READY
       ^                                          ^                   |
       |                                          +-- FULL_SOCKET <---+   (set_writable)
       +------ detach, from any state
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from motorcade.broker.durable_queue import FIRST_OTHER_ID, DurableQueue, EntryDecoder
from motorcade.broker.frames import (
    IDS,
    Frame,
    aliased,
    frame_of,
    is_released,
    message_of,
    qos_of,
    released,
    size_of,
    topic_of,
)
from motorcade.broker.limits import SessionOptions
from motorcade.broker.live_queue import LiveQueue
from motorcade.broker.revoked import Revoked
from motorcade.broker.source_scheduler import SourceScheduler
from motorcade.broker.stats import Stats
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Hooks
from motorcade.extension.sources import Delayed, Sources
from motorcade.storage.ports import Bound


class WindowState(enum.IntEnum):
    """How far a message gets that comes now. Each state allows what those before it allow, and more."""

    OFFLINE = 0  #: no connection is attached
    CONNECTING = 1  #: a connection is attached, but its client has no CONNACK yet: nothing may go out before
    FULL_SOCKET = 2  #: the socket takes no bytes: QoS 0 is dropped, everything else waits
    WAITING = 3  #: the socket takes bytes, but something waits already, and goes first
    READY = 4  #: rule 3


class Lag(enum.Enum):
    """Whether publishers wait for a client (rule 4)."""

    NONE = enum.auto()  #: it keeps up with them
    BEHIND = enum.auto()  #: those who publish to it alone wait
    GIVEN_UP = enum.auto()  #: they have waited long enough: what does not fit is dropped


OFFLINE, CONNECTING, FULL_SOCKET, WAITING, READY = WindowState
BEHIND = Lag.BEHIND


class Waiter(Protocol):
    """A publisher that waits for a client."""

    def caught_up(self) -> None:
        """The client is no longer behind."""


class ClientLink(Protocol):
    """The connection of a session, as far as a session may know it."""

    direct: Callable[[bytes], int] | None  #: `send` of a socket that takes bytes right now

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket."""

    def write_rest(self, data: bytes) -> None:
        """Hand over bytes that `direct` did not take."""

    def abort(self, why: str) -> None:
        """Close at once."""

    def flush(self) -> None:
        """Write what this connection's window has in `out` now."""

    def write_later(self) -> None:
        """Write it at the end of this turn of the event loop."""

    def end(self, reason: ReasonCode, detail: str = "") -> None:
        """Say goodbye with a reason (MQTT 5) and close."""

    def pump_later(self) -> None:
        """Call `pump` again in the next turn of the event loop."""

    def less_crowded(self) -> None:
        """Fewer answers wait for the store: packets may be taken again."""

    def acknowledge(self, numbers: list[bytes], commit: Commit[Any]) -> None:
        """Messages of the client are stored, or could not be: tell it."""

    def caught_up(self) -> None:
        """The client that this connection's publisher has waited for is no longer behind."""


class WindowContext:
    """What all windows of a node share: one object, so that a session needs one reference."""

    __slots__ = (
        "bounds",
        "decoder",
        "dirty",
        "hooks",
        "kept",
        "later",
        "options",
        "queued",
        "queued_bytes",
        "soon",
        "sources",
        "stats",
    )

    def __init__(self, options: SessionOptions, hooks: Hooks, stats: Stats) -> None:
        self.options = options
        self.hooks = hooks
        self.stats = stats
        self.queued = 0  #: messages waiting in all queues
        self.queued_bytes = 0
        self.kept = 0  #: messages of this process in the mailboxes of all durable sessions, those in flight too
        self.decoder = EntryDecoder()  #: of entries in mailboxes
        self.bounds: dict[tuple[int, int], Bound] = {}  #: of mailboxes, see `DurableQueue.bound`
        self.dirty: list[Window] = []  #: windows with bytes in `out`, to be written at the end of this turn
        self.sources = Sources()  #: kinds of sources that plugins have registered
        #: Call back in the next turn of the event loop, and after some seconds; set by the broker.
        self.soon: Callable[[Callable[[], None]], object] = _no_loop
        self.later: Callable[[float, Callable[[], None]], Delayed] = _no_loop


def _no_loop(*_: object) -> Delayed:
    raise RuntimeError("there is no event loop yet")


class Window:
    """Queue and inflight window of one session."""

    __slots__ = (
        "alias_limit",
        "aliases",
        "client",
        "durable",
        "inflight",
        "lag",
        "limit",
        "link",
        "max_packet",
        "next_id",
        "out",
        "queue",
        "revoked",
        "scheduler",
        "shared",
        "state",
        "unsent",
        "version",
        "waiting",
    )

    def __init__(self, shared: WindowContext, client: ClientInfo) -> None:
        self.shared = shared
        self.client = client
        self.version = client.version
        self.link: ClientLink | None = None  # its connection; a window knows no more of it
        self.state = OFFLINE
        self.out: list[bytes] = []
        self.inflight: dict[int, Frame] = {}  # in the order of sending, which is the order of resending
        self.unsent: deque[int] | None = None  # ids in flight that this connection has not repeated yet
        self.limit = shared.options.window
        self.next_id = 1
        self.queue: LiveQueue | None = None  # made when first needed: most sessions never wait
        self.lag = Lag.NONE
        self.waiting: list[Waiter] | None = None  # publishers that wait because of it
        self.scheduler: SourceScheduler | None = None  # made when first needed: for messages of sources
        self.durable: DurableQueue | None = None  # durable sessions: QoS 1 and 2 come from here instead of the queue
        self.revoked: Revoked | None = None  # what its client may not read any more, while something of it may be left
        self.max_packet = 0  # bytes the client takes; 0 is any
        self.alias_limit = 0  # aliases the client takes; 0 is none
        self.aliases: dict[bytes, int] | None = None

    # -- the connection comes and goes

    def attach(self, version: int, limit: int, max_packet: int, alias_limit: int) -> None:
        """A connection with these properties is there; `resend` and `pump` follow when CONNACK is out."""
        self.version = version
        self.limit = limit
        self.max_packet = max_packet
        self.alias_limit = alias_limit
        self.aliases = {} if alias_limit else None
        self.out.clear()
        self.state = CONNECTING

    def detach(self) -> None:
        """The connection is gone. What was not written stays in the window; QoS 0 is lost, as QoS 0 may be."""
        self.state = OFFLINE
        self.let_go()
        if self.durable is not None:
            self.durable.detach()
        self.aliases = None
        self.unsent = None
        self.out.clear()

    def set_writable(self, writable: bool) -> None:
        """The socket is full, or takes bytes again (call `pump` then)."""
        if self.greeted:
            self.state = WAITING if writable else FULL_SOCKET
            self.settle()

    def settle(self) -> None:
        """Tell WAITING and READY apart (rule 3)."""
        if self.state >= WAITING:
            waits = self.queue or self.unsent or (self.durable is not None and self.durable.catch_up_to)
            self.state = WAITING if waits else READY

    @property
    def online(self) -> bool:
        """Return True if a connection is attached."""
        return self.state is not OFFLINE

    @property
    def greeted(self) -> bool:
        """Return True if its client has got CONNACK."""
        return self.state > CONNECTING

    @property
    def writable(self) -> bool:
        """Return True if packets may be sent: its client has got CONNACK, and its socket takes bytes."""
        return self.state >= WAITING

    @property
    def ready(self) -> bool:
        """Return True if a message may go straight to `out` (rule 3)."""
        return self.state is READY

    @property
    def behind(self) -> bool:
        """Return True if publishers wait for this client (rule 4)."""
        return self.lag is BEHIND

    # -- messages in

    def offer(self, frame: Frame) -> None:
        """Send a frame now if the rules allow it, else let it wait or drop it."""
        qos = qos_of(frame)
        if self.state is READY and (not qos or len(self.inflight) < self.limit):
            self.send(frame)
        else:
            self.hold(frame)

    def hold(self, frame: Frame) -> None:
        """A frame that cannot go out now: it waits, or it is dropped."""
        if not frame[0][0] & 6:
            state = self.state
            if state is OFFLINE and not self.shared.options.store_qos0:
                self.drop(frame, "offline_qos0")
                return
            if state is OFFLINE and self.durable is not None:
                self.durable.keep(frame)
                return
            if state is FULL_SOCKET:
                self.drop(frame, "slow_consumer")
                return
        if self.shared.hooks.message_nack is not None and self._taken_back(frame):
            self.shared.stats.withdrawn["nack"] += 1
            return
        queue = self.queue
        if queue is None:
            queue = self.queue = LiveQueue(self)
            if self.state is READY:
                self.state = WAITING
        queue.add(frame)

    @property
    def waiting_messages(self) -> int:
        """Messages that are not sent yet, about."""
        return len(self.queue or ()) + (self.durable.backlog if self.durable is not None else 0)

    def note_backlog(self, backlog: int, size: int) -> None:
        """Note that so many messages of so many bytes wait, in memory or in the store (rule 4)."""
        options = self.shared.options
        much = backlog * 2 >= options.queue > 1 or size * 2 >= options.queue_bytes > 1
        if much and self.state is not OFFLINE and self.lag is Lag.NONE and options.patience > 0:
            self.lag = BEHIND

    def lose_patience(self, waiting: list[Waiter]) -> None:
        """Those who wait have waited long enough."""
        if self.waiting is waiting:
            self.shared.stats.refused["patience"] += 1
            self.let_go()
            self.lag = Lag.GIVEN_UP

    def let_go(self) -> None:
        """Whoever waits for this client goes on."""
        self.lag = Lag.NONE
        waiting, self.waiting = self.waiting, None
        for link in waiting or ():
            link.caught_up()

    def _taken_back(self, frame: Frame) -> bool:
        chain = self.shared.hooks.message_nack
        return bool(chain and chain.fold(self.client, message_of(frame, self.version), acc=False) is True)

    def empty_queue(self) -> None:
        """The session ends: nothing waits any more."""
        queue, self.queue = self.queue, None
        if queue is not None:
            queue.replace(())

    # -- messages out

    def send(self, frame: Frame, number: int = 0, *, again: bool = False) -> bool:
        """Put a frame on the wire; QoS 1 and 2 enter the window. The caller has checked that there is room.

        False if it is larger than the client takes. `number` is a packet id that belongs to it already.
        """
        head, tail, _ = frame
        if self.max_packet and size_of(frame) > self.max_packet:
            self.drop(frame, "too_large")  # [MQTT-3.1.2-24], [MQTT-3.1.2-25]
            return False
        if self.aliases is not None:
            head, tail = self._with_alias(frame, self.aliases)
        out = self.out
        if not out:
            self.shared.dirty.append(self)
        if head[0] & 6:
            number = number or self.take_id()
            self.inflight[number] = frame
            # [MQTT-3.3.1-1]: DUP. All parts or none, if memory ends.
            out += (bytes((head[0] | 8,)) + head[1:] if again else head, IDS[number], tail)
        else:
            out += (head, tail)
        stats = self.shared.stats
        stats.packets_sent += 1
        stats.publish_sent += 1
        stats.publish_bytes_sent += len(tail)
        hooks = self.shared.hooks
        if hooks.message_delivered is not None:
            hooks.message_delivered.notify(self.client, message_of(frame, self.version))
        if hooks.delivery_completed is not None and not head[0] & 6:
            hooks.delivery_completed.notify(self.client, message_of(frame, self.version), ReasonCode.SUCCESS)
        return True

    def take_id(self) -> int:
        """A packet id that is not in use. There is one: the window is smaller than the id space."""
        first = 1 if self.durable is None else FIRST_OTHER_ID
        number = max(self.next_id, first)
        while number in self.inflight:
            number = number + 1 if number < 65535 else first
        self.next_id = number + 1 if number < 65535 else first
        return number

    def _with_alias(self, frame: Frame, aliases: dict[bytes, int]) -> tuple[bytes, bytes]:
        """Head and tail with a topic alias, where that is allowed and fits."""
        topic = topic_of(frame)
        alias = aliases.get(topic)
        if alias is not None:
            return aliased(frame, alias, known=True)
        if len(aliases) < self.alias_limit:
            head, tail = aliased(frame, len(aliases) + 1, known=False)
            if not self.max_packet or size_of((head, tail, None)) <= self.max_packet:
                aliases[topic] = len(aliases) + 1
                return head, tail
        return frame[0], frame[1]

    def pump(self, now: float) -> bool:
        """Send what waits, as far as window and socket allow. True if sources could go on in the next turn."""
        if self.state <= CONNECTING:
            return False
        if self.unsent and self.state >= WAITING:
            self._repeat(now)
        scheduler, durable = self.scheduler, self.durable
        more = False
        if scheduler is not None:
            more = self.state >= WAITING and scheduler.active and scheduler.pump(now)
            self.put_down()
        if durable is not None:
            durable.pump(now, 0 if more else None)
        queue = self.queue
        if queue is not None:
            if self.state >= WAITING and not more:
                while queue.turn(now):
                    pass
            if not queue:
                self.queue = None
        if self.lag is not Lag.NONE and self._has_caught_up():
            self.let_go()
        self.settle()
        return more

    @property
    def room(self) -> int:
        """How many more messages of QoS 1 and 2 may be sent that have no packet id yet."""
        room = self.limit - len(self.inflight)
        if self.durable is None:
            return room
        ids = 65536 - FIRST_OTHER_ID + len(self.durable.sent) - len(self.inflight)
        return min(room, ids)

    def put_down(self) -> None:
        """Most clients have no source that lasts: give the memory back when none is left."""
        if self.scheduler is not None and self.scheduler.idle:
            self.scheduler = None

    def go_on(self) -> None:
        """Something that stood in the way of `pump` has gone."""
        if self.link is not None:
            self.link.pump_later()

    def _has_caught_up(self) -> bool:
        options = self.shared.options
        size = self.queue.size if self.queue is not None else 0
        if self.durable is not None:
            size += self.durable.backlog_size
        return self.waiting_messages * 4 <= options.queue and size * 4 <= (options.queue_bytes or 1 << 62)

    def fresh(self, frame: Frame, now: float) -> Frame | None:
        """A frame that has waited, with what is left of its life told anew; None if it has expired."""
        origin = frame[2]
        if isinstance(origin, Message) and origin.expires_at is not None:
            if origin.expired(now):
                self.drop(frame, "expired")  # [MQTT-3.3.2-5]
                return None
            if self.version == 5:
                return self._retimed(frame, origin, now)
        return frame

    def _retimed(self, frame: Frame, message: Message, now: float) -> Frame:
        identifiers = message.headers.get("subscription_ids")
        ids = identifiers if isinstance(identifiers, tuple) else ()
        return frame_of(message, 5, qos_of(frame), now, retain=bool(frame[0][0] & 1), identifiers=ids)

    # -- acknowledgements

    def resend(self, now: float) -> None:
        """After CONNACK: everything unacknowledged again, in the original order, with its id. [MQTT-4.4.0-1].

        The client may take fewer at once than before: the rest is repeated as it acknowledges (`repeat`). What the
        source of a message has withdrawn meanwhile is not repeated.
        """
        self.state = WAITING
        if self.revoked is not None:
            self._withdraw(self.revoked)
        if self.max_packet:  # it may also take smaller ones than before
            for number in [n for n, frame in self.inflight.items() if size_of(frame) > self.max_packet]:
                self.drop(self.inflight.pop(number), "too_large")
                self.shared.stats.abandoned += 1
                if self.scheduler is not None:
                    self.scheduler.acknowledged(number, ReasonCode.PACKET_TOO_LARGE, "too_large")
        self.unsent = deque(number for number, frame in self.inflight.items() if not is_released(frame)) or None
        if self.inflight and not self.out:
            self.shared.dirty.append(self)
        self.out.extend(b"\x62\x02" + IDS[number] for number, frame in self.inflight.items() if is_released(frame))
        self._repeat(now)
        if self.durable is not None:
            self.durable.begin()

    def _withdraw(self, revoked: Revoked) -> None:
        """What is in flight and may not be read any more is not repeated.

        Its client may have got a QoS 2 message, and holds its id then: PUBREL frees it, and does no harm otherwise.
        """
        scheduler = self.scheduler
        for number, frame in list(self.inflight.items()):
            of = scheduler.unacked.get(number) if scheduler is not None else None
            hidden = of[1].filter in revoked.filters if of is not None else False
            if is_released(frame) or not (hidden or revoked.hides(topic_of(frame).decode())):
                continue
            self.drop(frame, "revoked")
            self.shared.stats.abandoned += 1
            if qos_of(frame) == 2:
                self.inflight[number] = released(frame)
                continue
            del self.inflight[number]
            if scheduler is not None:
                scheduler.acknowledged(number, ReasonCode.NOT_AUTHORIZED, "not_authorized")
        if self.durable is None:
            self.revoked = None

    def _repeat(self, now: float) -> None:
        """Send unacknowledged messages again, as far as the window allows."""
        unsent = self.unsent
        if not unsent:
            return
        unsent = deque(number for number in unsent if number in self.inflight)  # the others were acknowledged unasked
        out = self.out
        if not out:
            self.shared.dirty.append(self)
        while unsent and len(self.inflight) - len(unsent) < self.limit:
            number = unsent.popleft()
            if self.scheduler is not None and not self.scheduler.may_repeat(number):
                del self.inflight[number]
                continue
            frame = self.inflight[number]
            origin = frame[2]
            if self.version == 5 and isinstance(origin, Message) and origin.expires_at is not None:
                frame = self.inflight[number] = self._retimed(frame, origin, now)  # [MQTT-3.3.2-6]
            head, tail, _ = frame
            out += (bytes((head[0] | 8,)) + head[1:], IDS[number], tail)  # [MQTT-3.3.1-1]: DUP
        self.unsent = unsent or None

    def drop(self, frame: Frame, why: str) -> None:
        """Count a message that this client will not get, and tell whoever listens."""
        self.shared.stats.dropped[why] += 1
        chain = self.shared.hooks.message_dropped
        if chain is not None:
            chain.notify(self.client, message_of(frame, self.version), why)

    def forgo(self, message: Message, why: str) -> None:
        """The same for a message that was never encoded."""
        self.shared.stats.dropped[why] += 1
        if self.shared.hooks.message_dropped is not None:
            self.shared.hooks.message_dropped.notify(self.client, message, why)
