"""The memory of the broker's tables. Bytes are estimates, see `extension.metrics.Table`."""

from __future__ import annotations

from typing import Final

from motorcade.broker.limits import Flapping
from motorcade.broker.remote_router import REMOTE_BYTES
from motorcade.broker.router import NODE_BYTES
from motorcade.broker.state import BrokerState
from motorcade.broker.subscribers import SUBSCRIBER_BYTES
from motorcade.extension.metrics import Table

# Bytes, measured with CPython 3.11; `tests/unit/broker/test_tables.py` compares them with what is really allocated.
SESSION_BYTES: Final = 1200  #: without subscriptions, will and messages
CONNECTION_BYTES: Final = 1100  #: without its session, and without what the socket buffers
SUBSCRIPTION_BYTES: Final = 540  #: with a filter of its own, without the levels of one with wildcards
FLAPPING_BYTES: Final = 260  #: one name


def tables(state: BrokerState) -> list[Table]:
    """Return figures that are counted anyway, so this takes no longer with more clients."""
    pubsub, shared = state.pubsub, state.shared
    subscriptions = pubsub.subscriptions + pubsub.shared_subscriptions
    elsewhere: list[Table] = []
    if (relay := state.relay) is not None:
        wanted, sessions = relay.router.table, relay.subscribers
        size_bytes = len(wanted) * REMOTE_BYTES + wanted.nodes * NODE_BYTES
        sleeping = sessions.subscriptions * SUBSCRIBER_BYTES + sessions.table.nodes * NODE_BYTES
        elsewhere = [
            Table("remote_filters", len(wanted), size_bytes),
            Table("subscribers", sessions.subscriptions, sleeping),
        ]
    return [
        *elsewhere,
        Table("routes", len(pubsub.routes), pubsub.route_bytes, state.limits.route_cache),
        Table(
            "subscriptions",
            subscriptions,
            subscriptions * SUBSCRIPTION_BYTES + pubsub.filter_nodes * NODE_BYTES,
        ),
        Table("sessions", len(state.registry.sessions), len(state.registry.sessions) * SESSION_BYTES),
        Table("connections", state.connections, state.connections * CONNECTION_BYTES),
        Table("queued_messages", shared.queued, shared.queued_bytes),
        Table(
            "flapping", len(state.flapping), len(state.flapping) * FLAPPING_BYTES, 2 * Flapping.SIZE * FLAPPING_BYTES
        ),
    ]
