"""The flow plane's state in one place: what all channels work on. Pure; `broker.py` gives it time and I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from motorcade.broker.frames import Frame
from motorcade.broker.limits import Flapping, LeakyBucket, Limits, Networks, SessionOptions
from motorcade.broker.pubsub import Copy, PubSub, Route
from motorcade.broker.registry import Registry, SessionKeeping
from motorcade.broker.session import Session
from motorcade.broker.stats import Stats
from motorcade.broker.ticket import Ticket
from motorcade.broker.window import Shared
from motorcade.core.client import ClientInfo
from motorcade.core.guid import GuidFactory
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Hooks
from motorcade.mqtt.codec import Limits as CodecLimits


class BrokerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the broker says about itself."""

    node: str = ""  #: name of this node; empty takes the machine's name
    server_reference: str = ""  #: where clients should go instead when this node shuts down (MQTT 5)
    response_information: str = ""  #: told to MQTT 5 clients that ask for it; may contain ${clientid}
    server_keep_alive: int = 0  #: seconds; if set, MQTT 5 clients must use it instead of their own
    drain_timeout: float = 5.0  #: seconds that stopping may take to write out what clients still have to get


class Keeping(SessionKeeping, Protocol):
    """What makes sessions durable. Nothing here waits: a ticket is done when the store has done it."""

    @property
    def busy(self) -> bool:
        """Whether publishers should let others have their turn."""

    def check(self) -> None:
        """Raise `StoreError` if nothing may be written now."""

    def make_durable(self, session: Session) -> None:
        """Give a new session its mailbox."""

    def accept(
        self,
        message: Message,
        copies: Sequence[Copy],
        now: float,
        publisher: Session | None = None,
        packet_id: int = 0,
        token: bytes = b"",
    ) -> Ticket:
        """Keep a message for its durable receivers, and, of a durable publisher, the id of its QoS 2 packet."""

    def announce(
        self, session: Session, packet_id: int, guid: bytes, copies: Sequence[Copy], now: float
    ) -> Ticket | None:
        """Store who was chosen in shared groups before anybody gets the message; None: that is not needed."""

    def look_up(self, session: Session, packet_id: int, guid: bytes) -> Ticket | None:
        """Ask whether a QoS 2 message that nobody knows about was stored; None: repeat it, it is recognised."""

    def accept_plain(
        self, route: Route, frame: Frame, payload: bytes, client: ClientInfo, version: int, ticket: Ticket
    ) -> None:
        """The same for the byte loop: a QoS 1 message without properties that only durable receivers get."""

    def release(self, session: Session, packet_ids: Iterable[int]) -> Ticket:
        """QoS 2 messages of the client are released."""

    def save(self, session: Session) -> Ticket:
        """Write a session down as it is now."""

    def gone(self, client_id: str) -> Ticket | None:
        """The end of what a client had earlier; None if there is nothing to wait for."""

    def subscribe(self, session: Session, added: Iterable[Subscription], removed: Iterable[str] = ()) -> Ticket:
        """Write changed subscriptions down."""


class Plane:
    """Sessions, subscriptions, limits and counters of one node."""

    def __init__(
        self,
        options: BrokerOptions,
        session: SessionOptions,
        limits: Limits,
        hooks: Hooks,
        guids: GuidFactory,
        now: float,
    ) -> None:
        self.options = options
        self.session_options = session
        self.limits = limits
        self.hooks = hooks
        self.guids = guids
        self.stats = Stats()
        self.shared = Shared(session, hooks, self.stats)
        self.pubsub = PubSub(self.shared, limits.route_cache)
        self.registry = Registry(self.shared, self.pubsub)
        self.codec_limits = CodecLimits(max_user_properties=limits.max_user_properties)
        self.connect_bucket = LeakyBucket(limits.connect_rate, limits.connect_burst, now)
        self.networks = Networks(limits.allow, limits.deny)
        self.flapping = Flapping(limits.flapping_count, limits.flapping_window, limits.flapping_ban)
        self.draining = False  #: shutting down: nobody new is let in
        self.connections = 0  #: network connections now, whether a client is let in or not
        self.full = False  #: above `limits.max_memory`: nothing new is taken
        self.observed = False  #: somebody listens to every delivery: the byte loop hands all messages to the channel
        self.retains = False  #: somebody keeps retained messages
        self.keeper: Keeping | None = None  #: what makes sessions durable; None: they end with the node
        hooks.on_change(self._look_at_hooks)
        self._look_at_hooks()

    def _look_at_hooks(self) -> None:
        hooks = self.hooks
        self.observed = self.full or any(
            chain is not None for chain in (hooks.message_delivered, hooks.message_acked, hooks.delivery_completed)
        )
        self.retains = any(callback.retained_only for callback in hooks.lookup("message.publish"))

    def fill(self, full: bool) -> None:
        """Take nothing new, or all again. The byte loop, which refuses nothing, rests meanwhile."""
        self.full = full
        self._look_at_hooks()

    def refuse(self, limit: str) -> None:
        """Count that a limit was hit."""
        self.stats.refused[limit] += 1
