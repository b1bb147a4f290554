"""The state of the broker in one place: what all channels work on. Pure; `broker.py` gives it time and I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from motorcade.broker.limits import Flapping, LeakyBucket, Limits, Networks, SessionOptions
from motorcade.broker.pubsub import PubSub
from motorcade.broker.registry import Registry
from motorcade.broker.session_context import SessionContext
from motorcade.broker.stats import Stats
from motorcade.core.guid import GuidFactory
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Hooks
from motorcade.mqtt.codec import DecodeLimits

if TYPE_CHECKING:
    from motorcade.broker.relay import Relay
    from motorcade.broker.session_store import SessionStore


class BrokerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the broker itself."""

    node: str = ""  #: name of this node; empty takes the machine's name
    server_reference: str = ""  #: where clients should go instead when this node shuts down (MQTT 5)
    response_information: str = ""  #: told to MQTT 5 clients that ask for it; may contain ${clientid}
    server_keep_alive: int = 0  #: seconds; if set, MQTT 5 clients must use it instead of their own
    drain_timeout: float = 5.0  #: seconds that stopping may take to write out what clients still have to get


class BrokerState:
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
        self.shared = SessionContext(session, hooks, self.stats)
        self.pubsub = PubSub(self.shared, limits.route_cache)
        self.registry = Registry(self.shared, self.pubsub)
        self.codec_limits = DecodeLimits(max_user_properties=limits.max_user_properties)
        self.connect_bucket = LeakyBucket(limits.connect_rate, limits.connect_burst, now)
        self.networks = Networks(limits.allow, limits.deny)
        self.flapping = Flapping(limits.flapping_count, limits.flapping_window, limits.flapping_ban)
        self.draining = ""  #: why no new client is let in: this node is shutting down, or drained
        self.moved = False  #: and it will not come back: MQTT 5 clients are told to forget it
        self.connections = 0  #: network connections now, whether a client is let in or not
        self.full = False  #: above `limits.max_memory`: nothing new is taken
        self.observed = False  #: a hook observes every delivery: the fast path hands all messages to the channel
        self.retains = False  #: a plugin keeps retained messages
        self.relay: Relay | None = None  #: the way to other members of a cluster; None: this node is alone
        self.store: SessionStore | None = None  #: makes sessions durable; None: they end with the node
        hooks.on_change(self._look_at_hooks)
        self._look_at_hooks()

    def _look_at_hooks(self) -> None:
        hooks = self.hooks
        self.observed = self.full or any(
            chain is not None for chain in (hooks.message_delivered, hooks.message_acked, hooks.delivery_completed)
        )
        self.retains = any(callback.retained_only for callback in hooks.lookup("message.publish"))

    @property
    def elsewhere(self) -> ReasonCode:
        """Return the reason with which MQTT 5 clients are sent to another node."""
        return ReasonCode.SERVER_MOVED if self.moved else ReasonCode.USE_ANOTHER_SERVER

    def fill(self, full: bool) -> None:
        """Take nothing new, or all again. The fast path, which refuses nothing, rests meanwhile."""
        self.full = full
        self._look_at_hooks()

    def refuse(self, limit: str) -> None:
        """Count that a limit was hit."""
        self.stats.refused[limit] += 1
