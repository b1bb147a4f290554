"""Every limit of the broker: its name, its default, its unit. 0 is "no limit" unless the comment says otherwise.

Also the state behind three of them: rate limits (`LeakyBucket`), denied networks, bans of clients that flap.

`docs/limits.md` tells for each of them what the client hears and which counter grows.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import msgspec


class SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one session."""

    window: int = 32  #: messages sent but not acknowledged; the client's receive maximum may lower it
    queue: int = 1000  #: messages waiting; when full, the oldest QoS 0 message goes first, else the oldest
    queue_bytes: int = 8 * 1024 * 1024  #: bytes waiting; whichever of both bounds is reached first
    source_buffer: int = 128  #: messages of sources (queues, streams …) that wait for room; one of each source besides
    source_buffer_bytes: int = 1024 * 1024  #: bytes of these; whichever of both bounds is reached first
    store_qos0: bool = True  #: queue QoS 0 messages too for clients that are away; they are the first to be dropped
    patience: float = 0.5  #: seconds publishers wait for the only receiver of their messages if it is behind; 0 is none
    max_awaiting_rel: int = 100  #: QoS 2 messages of a client not yet released; announced as receive maximum
    await_rel_timeout: float = 300.0  #: seconds after which an unreleased QoS 2 message is forgotten
    expiry_default_v3: int = 7 * 86400  #: seconds a persistent MQTT 3 session outlives its connection
    expiry_max: int = 7 * 86400  #: seconds; longer wishes are lowered, and CONNACK says so
    max_subscriptions: int = 1000  #: filters per session
    max_filter_bytes: int = 128 * 1024  #: characters of all filters of a session together
    shared_strategy: str = "round_robin"  #: round_robin, random, sticky, hash_topic, hash_client or least_inflight


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one connection, and of all together."""

    max_packet_size: int = 1024 * 1024  #: bytes, both ways; announced in CONNACK
    max_connect_size: int = 16 * 1024  #: bytes of the CONNECT packet, before the client is authenticated
    connect_timeout: float = 5.0  #: seconds from the TCP connection to the last byte of CONNECT
    auth_timeout: float = 30.0  #: seconds from there until the client is let in or refused
    max_connections: int = 100_000  #: network connections of this node
    max_memory: int = 0  #: bytes of memory of this process above which it takes no new clients and messages
    max_sessions: int = 1_000_000  #: sessions of this node, connected or away
    connect_rate: float = 1000.0  #: CONNECTs per second, sustained (leaky bucket)
    connect_burst: float = 20_000.0  #: CONNECTs at once after a quiet time
    message_rate: float = 1_000_000.0  #: PUBLISHes per second of one client, sustained; above it, its reads pause
    message_burst: float = 2_000_000.0  #: PUBLISHes at once after a quiet time
    byte_rate: float = 0.0  #: bytes per second of one client, sustained; above it, its reads pause
    byte_burst: float = 64 * 1024 * 1024.0  #: bytes at once after a quiet time
    allow: tuple[str, ...] = ()  #: CIDR networks that may connect; empty is all
    deny: tuple[str, ...] = ()  #: CIDR networks that may not connect; goes before `allow`
    max_topic_levels: int = 128  #: levels of a topic or filter
    max_client_id: int = 256  #: bytes of a client id
    max_topic_alias: int = 16  #: aliases a client may set up; announced in CONNACK; 0 is none
    max_topic_alias_out: int = 16  #: aliases we set up towards a client that allows it; 0 is none
    max_user_properties: int = 64  #: user properties of one packet
    max_filters: int = 256  #: filters of one SUBSCRIBE or UNSUBSCRIBE
    write_high: int = 1024 * 1024  #: bytes waiting in a socket at which a client counts as slow: QoS 0 is dropped
    write_low: int = 256 * 1024  #: bytes at which it no longer does
    stall_timeout: float = 30.0  #: seconds after which a slow client that takes nothing at all is sent away
    keep_alive_factor: float = 1.5  #: of the keep alive time, after which a silent client is gone
    max_keep_alive: int = 0  #: seconds; longer wishes (and none) are lowered, and MQTT 5 clients are told
    route_cache: int = 64 * 1024 * 1024  #: bytes of remembered routes (which topic goes to whom); at least one is kept
    flapping_count: int = 120  #: connects of one client id within the window that get it banned
    flapping_window: float = 60.0  #: seconds
    flapping_ban: float = 60.0  #: seconds
    flapping_by_address: bool = False  #: count by address too; off, since fleets sit behind few addresses


class LeakyBucket:
    """A rate limit: a bucket that leaks `rate` units per second and holds `burst`. A rate of 0 never fills."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = max(burst, 1.0)
        self._level = 0.0
        self._at = now

    def pour(self, units: float, now: float) -> float:
        """Add units. Returns for how many seconds to hold back: 0.0 while they fit."""
        if not self._rate:
            return 0.0
        self._level = max(0.0, self._level - max(0.0, now - self._at) * self._rate) + units
        self._at = now
        over = self._level - self._burst
        return over / self._rate if over > 0 else 0.0

    def admits(self, now: float) -> bool:
        """Add one unit if it fits; False leaves the bucket as it is."""
        if not self._rate:
            return True
        level = max(0.0, self._level - max(0.0, now - self._at) * self._rate)
        self._at = now
        if level + 1.0 > self._burst:
            self._level = level
            return False
        self._level = level + 1.0
        return True


class LogLimit:
    """So many lines of one kind per window; the others are counted."""

    __slots__ = ("_began", "_lines", "_most", "_window", "left_out")

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._began = 0.0
        self._lines = 0
        self.left_out = 0  #: lines since `over`

    def admits(self, now: float) -> bool:
        """Return True if one more line may be written; else count it."""
        if now - self._began > self._window and not self.left_out:
            self._began, self._lines = now, 0
        if self._lines >= self._most:
            self.left_out += 1
            return False
        self._lines += 1
        return True

    def over(self, now: float) -> int:
        """Return how many lines were left out, if the window is over, and begin a new one."""
        if not self.left_out or now - self._began <= self._window:
            return 0
        left_out, self.left_out = self.left_out, 0
        self._began, self._lines = now, 0
        return left_out


class Networks:
    """CIDR rules on the peer's address: `deny` first, then `allow`; an empty `allow` lets all in."""

    __slots__ = ("_allow", "_deny")

    def __init__(self, allow: tuple[str, ...], deny: tuple[str, ...]) -> None:
        self._allow = tuple(ip_network(text, strict=False) for text in allow)
        self._deny = tuple(ip_network(text, strict=False) for text in deny)

    def admits(self, host: str) -> bool:
        """Return True if a peer of this address may connect."""
        if not self._allow and not self._deny:
            return True
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        address = mapped or address
        if any(address in network for network in self._deny):
            return False
        return not self._allow or any(address in network for network in self._allow)


class Flapping:
    """Bans names (client ids, addresses) that connect too often.

    Names are chosen by clients, so they go when their time is over: what was not counted for a window is with the older
    ones, and goes after another window (`sweep`). Within a window the table is bounded by forgetting the oldest.
    """

    __slots__ = ("_ban", "_banned", "_count", "_older", "_seen", "_swept", "_window")

    SIZE = 100_000  #: names remembered

    def __init__(self, count: int, window: float, ban: float) -> None:
        self._count = count
        self._window = window
        self._ban = ban
        self._seen: dict[str, tuple[float, int]] = {}
        self._older: dict[str, tuple[float, int]] = {}
        self._swept = 0.0
        self._banned: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._seen) + len(self._older) + len(self._banned)

    def banned(self, name: str, now: float) -> bool:
        """Return True if a name may not connect now."""
        until = self._banned.get(name)
        if until is None:
            return False
        if now < until:
            return True
        del self._banned[name]
        return False

    def ban(self, name: str, until: float) -> None:
        """Let a name connect no more, up to a time; its connects are forgotten."""
        self._seen.pop(name, None)
        self._older.pop(name, None)
        self._banned[name] = until
        if len(self._banned) > self.SIZE:
            del self._banned[next(iter(self._banned))]

    def count(self, name: str, now: float) -> bool:
        """Count a connect; False if it was one too many, and the name is banned from now on."""
        if not self._count:
            return True
        if self.add(name, now) > self._count:
            self.ban(name, now + self._ban)
            return False
        return True

    def add(self, name: str, now: float) -> int:
        """Count a connect; return how many there were within the window."""
        counted = self._seen if name in self._seen else self._older
        began, times = counted.pop(name, (now, 0))
        if now - began > self._window:
            began, times = now, 0
        self._seen[name] = (began, times + 1)
        if len(self._seen) + len(self._older) > self.SIZE:
            oldest = self._older or self._seen
            del oldest[next(iter(oldest))]
        return times + 1

    def sweep(self, now: float) -> None:
        """Forget whose time is over; to be called now and then."""
        if 0.0 <= now - self._swept <= self._window:
            return
        self._swept = now
        self._older, self._seen = self._seen, {}
        if self._banned:
            self._banned = {name: until for name, until in self._banned.items() if now < until}
