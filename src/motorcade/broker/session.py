"""A session: what the broker remembers of a client across connections, and its in-flight window. [MQTT-4.1.0-1]

Subscriptions, QoS 2 messages of the client that are not released yet, the will, and when the session ends. What the
client still has to get: a bounded queue, then the inflight window, then the bytes for its socket.

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

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from motorcade.broker.ack_queue import AckQueue
from motorcade.broker.client_link import ClientLink, Waiter
from motorcade.broker.durable_queue import FIRST_OTHER_ID, DurableQueue
from motorcade.broker.frames import (
    IDS,
    Frame,
    aliased,
    converted,
    frame_of,
    is_released,
    message_of,
    qos_of,
    released,
    size_of,
    topic_of,
)
from motorcade.broker.live_queue import LiveQueue
from motorcade.broker.revoked import Revoked
from motorcade.broker.session_context import SessionContext
from motorcade.broker.source_scheduler import SourceScheduler
from motorcade.broker.window_state import BEHIND, CONNECTING, FULL_SOCKET, OFFLINE, READY, WAITING, Lag
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Why


class Doubt(NamedTuple):
    """A QoS 2 message that may be stored for some of its receivers, but perhaps not for all."""

    guid: bytes  #: under which the store recognises it
    chosen: Mapping[str, str]  #: members of shared groups that get it, see `session_records.AwaitingRecord`


class Owed(NamedTuple):
    """A will that is due. Until it is stored for those who get it, it stays in the session's record."""

    will: Message
    done: Commit[None]


class Wake:
    """The timers' reference to a session, so that one that has ended need not wait for them to be freed."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session: Session | None = session


class Session:
    """One client's session."""

    __slots__ = (
        "_doubts",
        "acks",
        "alias_limit",
        "aliases",
        "awaiting",
        "client",
        "connected_at",
        "created_at",
        "disconnected_at",
        "durable",
        "ended",
        "expires_at",
        "expiry",
        "filter_bytes",
        "inflight",
        "lag",
        "limit",
        "link",
        "max_packet",
        "next_id",
        "oldest",
        "oldest_since",
        "out",
        "owed",
        "queue",
        "received",
        "recorded",
        "revoked",
        "scheduler",
        "shared",
        "state",
        "subscriptions",
        "unsent",
        "version",
        "waiting",
        "wake",
        "wake_at",
        "will",
        "will_at",
        "will_delay",
    )

    def __init__(self, shared: SessionContext, client: ClientInfo, now: float) -> None:
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
        self.subscriptions: dict[str, Subscription] = {}
        self.filter_bytes = 0  #: of their filters
        self.awaiting: dict[int, float] | None = None  #: QoS 2 packet ids of the client, and when they came
        self.expiry = 0  #: seconds the session outlives its connection
        self.expires_at: float | None = None  #: while disconnected: when it ends
        self.will: Message | None = None
        self.will_delay = 0  #: seconds
        self.will_at: float | None = None  #: while disconnected: when the will is published
        self.owed: Owed | None = None  #: a will that is being published
        self.wake_at: float | None = None  #: the registry's timer
        self.wake: Wake | None = None  #: what the registry's timers refer to
        self.ended = False
        self.recorded = False  #: it has a record, though it ends with its connection: the will of a clean session
        self.created_at = now
        self.connected_at = now
        self.disconnected_at: float | None = None
        self.received = 0  #: messages this client has published
        self.oldest = 0  #: packet id that is in flight for longest, as of the last look
        self.oldest_since = 0.0  #: on the clock of the event loop
        self.acks: AckQueue | None = None  #: answers that wait for the store
        self._doubts: dict[int, Doubt] | None = None

    # -- the connection comes and goes

    def attach(self, version: int, limit: int, max_packet: int, alias_limit: int) -> None:
        """Attach a connection with these properties; `resend` and `pump` follow when CONNACK is out."""
        self.version = version
        self.limit = limit
        self.max_packet = max_packet
        self.alias_limit = alias_limit
        self.aliases = {} if alias_limit else None
        self.out.clear()
        self.state = CONNECTING

    def detach(self) -> None:
        """Detach the connection. What was not written stays in the window; QoS 0 is lost, as QoS 0 may be."""
        self.state = OFFLINE
        self.let_go()
        if self.durable is not None:
            self.durable.detach()
        self.aliases = None
        self.unsent = None
        self.out.clear()
        if self.scheduler is not None:
            self.scheduler.detach(Why.DISCONNECTED if self.expiry else Why.ENDED)
            self.put_down()

    def set_writable(self, writable: bool) -> None:
        """Note that the socket is full, or takes bytes again (call `pump` then)."""
        if self.greeted:
            self.state = WAITING if writable else FULL_SOCKET
            self.settle()

    def settle(self) -> None:
        """Tell WAITING and READY apart (rule 3)."""
        if self.state >= WAITING:
            waits = self.queue or self.unsent or (self.durable is not None and self.durable.catch_up_to)
            self.state = WAITING if waits else READY

    def overdue(self, now: float) -> bool:
        """Return True if its end or its will is due."""
        return any(when is not None and when <= now for when in (self.expires_at, self.will_at))

    @property
    def client_id(self) -> str:
        """Return the id of its client."""
        return self.client.client_id

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
        """Hold a frame that cannot go out now: it waits, or it is dropped."""
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
        """Let publishers go on that have waited long enough."""
        if self.waiting is waiting:
            self.shared.stats.refused["patience"] += 1
            self.let_go()
            self.lag = Lag.GIVEN_UP

    def let_go(self) -> None:
        """Let the publishers that wait for this client go on."""
        self.lag = Lag.NONE
        waiting, self.waiting = self.waiting, None
        for link in waiting or ():
            link.caught_up()

    def _taken_back(self, frame: Frame) -> bool:
        chain = self.shared.hooks.message_nack
        return bool(chain and chain.fold(self.client, message_of(frame, self.version), acc=False) is True)

    def keep_all(self, now: float) -> None:
        """Have stored what is in memory only, since a durable session leaves this node.

        That is QoS 0 which waits, and retained messages in flight; what other sources have given, they give again.
        """
        queue, self.queue = self.queue, None
        if queue is not None:
            waiting = list(queue)
            queue.replace(())
            for frame in waiting:
                self.hold(frame)
        scheduler, durable = self.scheduler, self.durable
        if scheduler is None or durable is None:
            return
        for number, (slot, given) in scheduler.unacked.items():
            sent = self.inflight.get(number)
            if slot.kind.retained and sent is not None and not is_released(sent):
                durable.keep_retained(given.message, qos_of(sent), now)

    def empty_queue(self) -> None:
        """Empty the queue as the session ends: nothing waits any more."""
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
        """Return a packet id that is not in use. There is one: the window is smaller than the id space."""
        first = 1 if self.durable is None else FIRST_OTHER_ID
        number = max(self.next_id, first)
        while number in self.inflight:
            number = number + 1 if number < 65535 else first
        self.next_id = number + 1 if number < 65535 else first
        return number

    def _with_alias(self, frame: Frame, aliases: dict[bytes, int]) -> tuple[bytes, bytes]:
        """Return head and tail with a topic alias, where that is allowed and fits."""
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
        """The number of messages of QoS 1 and 2 without a packet id that may still be sent."""
        room = self.limit - len(self.inflight)
        if self.durable is None:
            return room
        ids = 65536 - FIRST_OTHER_ID + len(self.durable.sent) - len(self.inflight)
        return min(room, ids)

    def put_down(self) -> None:
        """Free the scheduler when no source is left: most clients have none that lasts."""
        if self.scheduler is not None and self.scheduler.idle:
            self.scheduler = None

    def go_on(self) -> None:
        """Pump again, as something that stood in the way has gone."""
        if self.link is not None:
            self.link.pump_later()

    def _has_caught_up(self) -> bool:
        options = self.shared.options
        size = self.queue.size if self.queue is not None else 0
        if self.durable is not None:
            size += self.durable.backlog_size
        return self.waiting_messages * 4 <= options.queue and size * 4 <= (options.queue_bytes or 1 << 62)

    def fresh(self, frame: Frame, now: float) -> Frame | None:
        """Return a frame that has waited, with what is left of its life told again; None if it has expired."""
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
        """Redeliver everything unacknowledged after CONNACK, in the original order, with its id. [MQTT-4.4.0-1].

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
        """Withdraw what is in flight and may not be read any more: it is not repeated.

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
        """Count a message that this client will not get, and tell the hook `message.dropped`."""
        self.shared.stats.dropped[why] += 1
        chain = self.shared.hooks.message_dropped
        if chain is not None:
            chain.notify(self.client, message_of(frame, self.version), why)

    def forgo(self, message: Message, why: str) -> None:
        """Count a message that was never encoded, likewise."""
        self.shared.stats.dropped[why] += 1
        if self.shared.hooks.message_dropped is not None:
            self.shared.hooks.message_dropped.notify(self.client, message, why)

    # -- the client across connections

    @property
    def special(self) -> bool:
        """True if messages must be encoded for this client alone: it limits packet sizes or takes topic aliases."""
        return bool(self.max_packet or self.alias_limit)

    def speak(self, version: int, now: float) -> None:
        """Change to another protocol version of a client that came back: what waits is encoded again."""
        old = self.version
        if (old == 5) == (version == 5):
            return
        self.inflight = {n: converted(frame, old, version, now) for n, frame in self.inflight.items()}
        if self.queue is not None:
            self.queue.replace([converted(frame, old, version, now) for frame in self.queue])

    def acknowledged(self, number: int, reason: ReasonCode = ReasonCode.SUCCESS) -> None:
        """Finish a message in flight: the client is done with it."""
        del self.inflight[number]
        if self.durable is not None:
            self.durable.acknowledged(number)
        if self.scheduler is not None:
            self.scheduler.acknowledged(number, reason)

    def held_for(self, now: float) -> float:
        """Return the age in seconds of the oldest unacknowledged message, about; note a new oldest."""
        oldest = next(iter(self.inflight), 0)
        if oldest != self.oldest:
            self.oldest = oldest
            self.oldest_since = now
        return now - self.oldest_since if oldest else 0.0

    # -- sources

    def offer_to_sources(self, subscription: Subscription, *, is_new: bool) -> None:
        """Offer a new subscription to sources: they may have something for it."""
        if self.revoked is not None:
            self.revoked.allow(subscription.filter)
        why = Why.NEW if is_new else Why.AGAIN
        if self.scheduler is not None or self._concerns_sources(subscription, why):
            self.schedule_sources().subscribed(subscription, why)

    def revoke(self, filters: list[str]) -> None:
        """Withdraw subscriptions: what waits under them is dropped, and what is in flight not repeated."""
        if self.revoked is None:
            self.revoked = Revoked(filters, self.subscriptions)
        else:
            for filter_ in filters:
                self.revoked.add(filter_)
        if self.queue is not None:
            self.queue.purge(self.revoked)
        if self.durable is None and not self.inflight:
            self.revoked = None  # nothing is left
        self.go_on()

    def leave_sources(self, filter_: str) -> None:
        """Take from sources a filter that the client has unsubscribed."""
        if self.scheduler is not None:
            self.scheduler.unsubscribed(filter_)
            self.put_down()
            self.go_on()  # others may have room now

    def resume_sources(self) -> None:
        """Resume the sources of a client that is back."""
        wanted = (self._concerns_sources(subscription, Why.RESUMED) for subscription in self.subscriptions.values())
        if self.scheduler is not None or any(wanted):
            self.schedule_sources().resumed()

    def _concerns_sources(self, subscription: Subscription, why: Why) -> bool:
        return any(kind.concerns(self.client, subscription, why) for kind in self.shared.sources.kinds)

    def schedule_sources(self) -> SourceScheduler:
        """Return the scheduler that sends messages of sources to this client; made when first needed."""
        if self.scheduler is None:
            self.scheduler = SourceScheduler(self)
        return self.scheduler

    def expects_release(self, number: int) -> bool:
        """Return True if a QoS 2 message of the client with this id is already here."""
        return self.awaiting is not None and number in self.awaiting

    def await_release(self, number: int, now: float) -> None:
        """Keep the id of a QoS 2 message of the client, which has come and been routed, until PUBREL."""
        if self.awaiting is None:
            self.awaiting = {}
        self.awaiting[number] = now

    def doubt(self, number: int, doubt: Doubt) -> None:
        """Note that the store could not tell whether a QoS 2 message of the client is stored for all its receivers."""
        if self._doubts is None:
            self._doubts = {}
        self._doubts[number] = doubt

    def doubts(self, number: int) -> bool:
        """Return True if a QoS 2 message of the client is doubtful."""
        return self._doubts is not None and number in self._doubts

    def doubted(self, number: int) -> Doubt | None:
        """Take what is known of a doubtful message that is to be routed once more, now that it has come again."""
        return self._doubts.pop(number, None) if self._doubts else None

    @property
    def acks_wait(self) -> bool:
        """Return True while answers wait for the store."""
        return self.acks is not None and self.acks.answers > 0

    def ack_queue(self) -> AckQueue:
        """Return where answers wait; made when first needed."""
        if self.acks is None:
            self.acks = AckQueue()
        return self.acks

    def release(self, number: int) -> bool:
        """Release an id, as PUBREL has come; False if the id was not known."""
        self.doubted(number)
        return self.awaiting is not None and self.awaiting.pop(number, None) is not None

    def forget_unreleased(self, before: float) -> list[int]:
        """Forget QoS 2 ids of the client that came before a time; which."""
        if not self.awaiting:
            return []
        old = [number for number, at in self.awaiting.items() if at < before]
        for number in old:
            self.release(number)
        return old
