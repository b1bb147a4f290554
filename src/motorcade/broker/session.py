"""A session: what the broker remembers of a client across connections. [MQTT-4.1.0-1]

It is a window (what the client still has to get) plus subscriptions, QoS 2 messages of the client that are not
released yet, the will, and when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from motorcade.broker.ack_queue import AckQueue
from motorcade.broker.frames import converted
from motorcade.broker.revoked import Revoked
from motorcade.broker.source_scheduler import SourceScheduler
from motorcade.broker.window import Window, WindowContext
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
    """What timers hold instead of the session, so that one that has ended need not wait for them to be freed."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session: Session | None = session


class Session(Window):
    """One client's session."""

    __slots__ = (
        "_doubts",
        "acks",
        "awaiting",
        "connected_at",
        "created_at",
        "disconnected_at",
        "ended",
        "expires_at",
        "expiry",
        "filter_bytes",
        "oldest",
        "oldest_since",
        "owed",
        "received",
        "subscriptions",
        "wake",
        "wake_at",
        "will",
        "will_at",
        "will_delay",
    )

    def __init__(self, shared: WindowContext, client: ClientInfo, now: float) -> None:
        super().__init__(shared, client)
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
        self.created_at = now
        self.connected_at = now
        self.disconnected_at: float | None = None
        self.received = 0  #: messages this client has published
        self.oldest = 0  #: packet id that is in flight for longest, as of the last look
        self.oldest_since = 0.0  #: on the clock of the event loop
        self.acks: AckQueue | None = None  #: answers that wait for the store
        self._doubts: dict[int, Doubt] | None = None

    @property
    def special(self) -> bool:
        """Whether messages must be encoded for this client alone: it limits packet sizes or takes topic aliases."""
        return bool(self.max_packet or self.alias_limit)

    def speak(self, version: int, now: float) -> None:
        """The client came back with another protocol version: what waits is encoded anew."""
        old = self.version
        if (old == 5) == (version == 5):
            return
        self.inflight = {n: converted(frame, old, version, now) for n, frame in self.inflight.items()}
        if self.queue is not None:
            self.queue.replace([converted(frame, old, version, now) for frame in self.queue])

    def acknowledged(self, number: int, reason: ReasonCode = ReasonCode.SUCCESS) -> None:
        """The client is done with a message that was in flight."""
        del self.inflight[number]
        if self.durable is not None:
            self.durable.acknowledged(number)
        if self.scheduler is not None:
            self.scheduler.acknowledged(number, reason)

    def held_for(self, now: float) -> float:
        """Seconds for which the oldest message in flight has not been acknowledged, about; note when it is another."""
        oldest = next(iter(self.inflight), 0)
        if oldest != self.oldest:
            self.oldest = oldest
            self.oldest_since = now
        return now - self.oldest_since if oldest else 0.0

    # -- sources

    def offer_to_sources(self, subscription: Subscription, *, is_new: bool) -> None:
        """The client has subscribed: sources may have something for it."""
        if self.revoked is not None:
            self.revoked.allow(subscription.filter)
        why = Why.NEW if is_new else Why.AGAIN
        if self.scheduler is not None or self._concerns_sources(subscription, why):
            self.schedule_sources().subscribed(subscription, why)

    def revoke(self, filters: list[str]) -> None:
        """Subscriptions were taken away: what waits under them is dropped, and what is in flight not repeated."""
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
        """The client has unsubscribed."""
        if self.scheduler is not None:
            self.scheduler.unsubscribed(filter_)
            self.put_down()
            self.go_on()  # others may have room now

    def resume_sources(self) -> None:
        """The client is back: its sources go on."""
        wanted = (self._concerns_sources(subscription, Why.RESUMED) for subscription in self.subscriptions.values())
        if self.scheduler is not None or any(wanted):
            self.schedule_sources().resumed()

    def _concerns_sources(self, subscription: Subscription, why: Why) -> bool:
        return any(kind.concerns(self.client, subscription, why) for kind in self.shared.sources.kinds)

    def detach(self) -> None:
        super().detach()
        if self.scheduler is not None:
            self.scheduler.detach(Why.DISCONNECTED if self.expiry else Why.ENDED)
            self.put_down()

    def schedule_sources(self) -> SourceScheduler:
        """What carries messages of sources to this client; made when first needed."""
        if self.scheduler is None:
            self.scheduler = SourceScheduler(self)
        return self.scheduler

    def expects_release(self, number: int) -> bool:
        """Whether a QoS 2 message of the client with this id is already here."""
        return self.awaiting is not None and number in self.awaiting

    def await_release(self, number: int, now: float) -> None:
        """A QoS 2 message of the client has come and been routed; its id is taken until PUBREL."""
        if self.awaiting is None:
            self.awaiting = {}
        self.awaiting[number] = now

    def doubt(self, number: int, doubt: Doubt) -> None:
        """Note that the store could not tell whether a QoS 2 message of the client is stored for all its receivers."""
        if self._doubts is None:
            self._doubts = {}
        self._doubts[number] = doubt

    def doubts(self, number: int) -> bool:
        """Whether a QoS 2 message of the client is doubtful."""
        return self._doubts is not None and number in self._doubts

    def doubted(self, number: int) -> Doubt | None:
        """What is known of a doubtful message that is to be routed once more, now that it has come again."""
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
        """PUBREL has come; False if the id was not known."""
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
