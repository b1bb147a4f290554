"""Counters of one node. They only grow; readers take a copy.

The fast path counts in local variables and adds here once per read.
"""

from __future__ import annotations


class Stats:
    """The counts since the node started."""

    __slots__ = (
        "abandoned",
        "acl_allowed",
        "acl_denied",
        "auth_allowed",
        "auth_denied",
        "bytes_received",
        "bytes_sent",
        "cluster_dropped",
        "cluster_forgotten",
        "cluster_received",
        "cluster_sent",
        "connections_accepted",
        "connections_closed",
        "dropped",
        "expired_sessions",
        "long_matches",
        "moved_ids",
        "moves",
        "packets_received",
        "packets_sent",
        "protocol_errors",
        "publish_bytes_received",
        "publish_bytes_sent",
        "publish_received",
        "publish_sent",
        "refused",
        "restored",
        "routed",
        "sessions",
        "store_delivered",
        "store_sent",
        "withdrawn",
    )

    def __init__(self) -> None:
        self.abandoned = 0  #: copies that were sent, and given up before they were acknowledged
        self.routed = 0  #: copies of messages, one for each client that a message goes to
        self.restored = 0  #: copies that the process before this one has stored, counted when they leave the store
        self.store_sent = 0  #: PUBLISH packets of copies in the store, each time they are sent
        self.store_delivered = 0  #: copies in the store that were acknowledged, or sent with QoS 0
        self.connections_accepted = 0
        self.connections_closed = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.packets_received = 0  #: of all types
        self.packets_sent = 0
        self.publish_received = 0
        self.publish_sent = 0
        self.publish_bytes_received = 0
        self.publish_bytes_sent = 0
        self.auth_allowed = 0
        self.auth_denied = 0
        self.acl_allowed = 0
        self.acl_denied = 0
        self.expired_sessions = 0
        self.long_matches = 0  #: new topics that were compared with so many filters that it took several turns
        self.moved_ids = 0  #: packet ids not used because a client holds them, never acknowledged
        self.dropped: dict[str, int] = dict.fromkeys(DROP_REASONS, 0)  #: messages not delivered, by reason
        self.withdrawn: dict[str, int] = dict.fromkeys(
            WITHDRAWN, 0
        )  #: copies that no client has or waits for, by reason
        self.refused: dict[str, int] = dict.fromkeys(LIMIT_NAMES, 0)  #: times a limit was hit, by its name
        self.cluster_sent: dict[str, int] = dict.fromkeys(
            CLUSTER_KINDS, 0
        )  #: messages to other members, by kind of item
        self.cluster_received: dict[str, int] = dict.fromkeys(
            CLUSTER_KINDS, 0
        )  #: messages from other members, likewise
        self.cluster_dropped: dict[str, int] = dict.fromkeys(
            CLUSTER_KINDS, 0
        )  #: those that did not go, or came for none
        self.cluster_forgotten = 0  #: ids of QoS 2 messages forgotten before their hour was over
        self.protocol_errors: dict[str, int] = {}  #: connections closed for breaking the rules, by reason code
        self.sessions: dict[str, int] = dict.fromkeys(SESSION_EVENTS, 0)
        self.moves: dict[str, int] = dict.fromkeys(MOVES, 0)  #: clients between members

    def cluster(self) -> dict[str, dict[str, int]]:
        """Return what has gone to other members and come from them: family, kind of item, messages."""
        return {
            "sent": dict(self.cluster_sent),
            "received": dict(self.cluster_received),
            "dropped": dict(self.cluster_dropped),
            "forgotten": {"message": self.cluster_forgotten},
        }


DROP_REASONS = (
    "no_subscribers",
    "queue_full",
    "expired",
    "too_large",
    "slow_consumer",
    "offline_qos0",
    "session_ended",
    "not_authorized",
    "revoked",
    "not_stored",
    "unreadable",
    "will_failed",
    "hook_loop",
    "no_memory",
)
WITHDRAWN = (
    "store_failed",  # it was not stored, or that is not known
    "repeated",  # the store has it already
    "unmatched",  # the client that the topic names has no subscription that matches
    "nack",  # a plugin has taken it back
    "elsewhere",  # it is in the store that the members share, or with another member; who takes it from there counts it
)
CLUSTER_KINDS = ("live", "message", "group", "returned", "hint", "direct")
LIMIT_NAMES = (
    "max_packet_size",
    "max_connect_size",
    "connect_timeout",
    "auth_timeout",
    "max_connections",
    "max_memory",
    "max_sessions",
    "connect_rate",
    "message_rate",
    "byte_rate",
    "network",
    "max_topic_levels",
    "max_client_id",
    "max_topic_alias",
    "max_user_properties",
    "max_filters",
    "max_subscriptions",
    "max_filter_bytes",
    "patience",
    "source_buffer",
    "max_awaiting_rel",
    "await_rel_timeout",
    "stall_timeout",
    "keep_alive",
    "flapping",
)
SESSION_EVENTS = ("created", "resumed", "takenover", "discarded", "terminated")
MOVES = (
    "came",  # from another member, which has let it go
    "displaced",  # from another member, which did not let it go in time
    "went",  # from its connection here to another member, which has asked for it
    "lost",  # to another member, without being asked
    "slept",  # its session is written down, and belongs to no member
)
