"""The subscribers of a topic: subscriptions of this node, shared groups, and the delivery to sessions.

A topic's answer is a `Route`: the receivers, sorted by how they are served, so that a delivery is a loop over a
tuple without decisions in it.

    plain receivers      by protocol (3.x or 5) and granted QoS; all get the very same bytes
    targets              receivers with something of their own: subscription identifiers, no-local,
                         a packet size limit, topic aliases
    groups               shared subscriptions; each gives the message to one of its members
    kept                 those with a durable session: QoS 1 and 2 go through its mailbox in the store,
                         QoS 0 the way of the others
    elsewhere            those on other nodes: peers that want it live, and durable sessions that are not attached here

A session with several matching subscriptions gets one copy, with the highest QoS of them and all their identifiers.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from motorcade.broker.frames import Frame, frame_of, is_released, message_of, qos_of
from motorcade.broker.limits import Limits
from motorcade.broker.remote_router import DURABLE, LIVE, PeerGroup
from motorcade.broker.router import Router, Routes, first_level
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.broker.subscribers import AddressedClient, Options, Subscriber
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches, split_share
from motorcade.core.trie import Matching
from motorcade.extension.cluster import Peer
from motorcade.extension.hooks import Callback, Chain, Hooks

if TYPE_CHECKING:
    from motorcade.broker.interest import Interest
    from motorcade.broker.relay import Relay

NOBODY: Mapping[str, str] = {}

ROUTES = 100_000  #: topics whose route is remembered
LEVELS_PER_TURN = 8192  #: levels of filters that a new topic is compared with before others have their turn

R = TypeVar("R", Session, Subscriber)
M = TypeVar("M")


class Target(Generic[R]):
    """One receiver of a topic, with all its matching subscriptions taken together."""

    __slots__ = ("identifiers", "no_local", "own", "qos", "retain_as_published", "session")

    def __init__(self, session: R, subscription: Subscription | Options) -> None:
        self.session: R = session
        self.qos = subscription.qos
        self.retain_as_published = subscription.retain_as_published
        self.identifiers: tuple[int, ...] = (subscription.identifier,) if subscription.identifier else ()
        self.no_local = subscription.no_local  #: some subscription is not for the session's own messages
        self.own: Target[R] | None = None  #: what is left for these, if `no_local`; None: nothing

    def merge(self, subscription: Subscription | Options) -> None:
        """Add one more matching subscription of the same session."""
        if subscription.no_local and not self.no_local:
            self.own = Target(self.session, Subscription("", self.qos, retain_as_published=self.retain_as_published))
            self.own.identifiers = self.identifiers
            self.no_local = True
        elif not subscription.no_local and self.no_local:
            if self.own is None:
                self.own = Target(self.session, subscription)
            else:
                self.own.merge(subscription)
        self.qos = max(self.qos, subscription.qos)
        self.retain_as_published = self.retain_as_published or subscription.retain_as_published
        if subscription.identifier:
            self.identifiers += (subscription.identifier,)  # [MQTT-3.3.4-3]

    def towards(self, publisher: str) -> Target[R] | None:
        """Return what counts for a publisher's messages; None: they are not for this receiver. [MQTT-3.8.3-3]"""
        return self.own if self.no_local and publisher == self.session.client_id else self


class GroupPeer:
    """A peer that is to give a message to one of its members of a group."""

    __slots__ = ("client_id", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.client_id = ""  # it is not known here which one


class Copy(NamedTuple):
    """The copy of a message for one receiver."""

    session: Session | Subscriber | AddressedClient | GroupPeer
    qos: int  #: of an addressed client that of the message: the store knows what is granted
    retain: bool
    identifiers: tuple[int, ...]
    group: SharedGroup | None = None  #: that has chosen this receiver

    @property
    def lasting(self) -> bool:
        """Return True if it goes through a mailbox in the store."""
        if not self.qos:
            return False
        session = self.session
        if isinstance(session, Session):
            return session.durable is not None
        return isinstance(session, Subscriber | AddressedClient)


Receivers = tuple[Session, ...]


NO_RECEIVERS: tuple[Receivers, Receivers, Receivers, Receivers, Receivers] = ((), (), (), (), ())


class RemoteReceivers:
    """The receivers of a topic on other nodes."""

    __slots__ = ("addressed", "all", "asleep", "groups", "is_here", "live", "subscribers")

    def __init__(
        self,
        links: tuple[PeerGroup | None, PeerGroup | None],
        subscribers: tuple[Target[Subscriber], ...],
        groups: tuple[SharedGroup, ...],
        addressed: tuple[AddressedClient, ...],
        asleep: Callable[[Subscriber], bool],
        is_here: Callable[[str], bool],
    ) -> None:
        """`asleep` says whether a session is attached to no member, `is_here` whether this node has one of a client."""
        self.all, self.live = links  #: peers that get messages of QoS 0, and those that get others
        self.subscribers = subscribers  #: durable sessions that are not attached here
        self.groups = groups  #: those with members there
        self.addressed = addressed  #: clients that the topic names, wherever they are
        self.asleep = asleep
        self.is_here = is_here

    @property
    def sleepers(self) -> bool:
        """Return True if a session sleeps: messages of QoS 0 are stored for it; or if the store knows where it is."""
        return any(self.asleep(target.session) for target in self.subscribers) or any(self.away())

    def away(self) -> Iterator[AddressedClient]:
        """Return the clients that the topic names and that have no session here."""
        return (client for client in self.addressed if not self.is_here(client.client_id))

    @property
    def chooses(self) -> bool:
        """Return True if the member of some group that gets the next message may be on another node."""
        return any(not group.online or group.connected_elsewhere(self.asleep) for group in self.groups)


class Route:
    """Receivers of one topic. `from_N` are those with a granted QoS of at least N."""

    __slots__ = (
        "as_published",
        "beyond",
        "bodies",
        "count",
        "elsewhere",
        "groups",
        "kept",
        "lasting",
        "live",
        "only",
        "plain",
        "publish_hooks",
        "rest",
        "retain_hooks",
        "single",
        "slow",
        "stale",
        "targets",
        "topic",
        "v3_all",
        "v3_from_1",
        "v3_qos0",
        "v3_qos1",
        "v3_qos2",
        "v5_all",
        "v5_from_1",
        "v5_qos0",
        "v5_qos1",
        "v5_qos2",
        "weight",
    )

    def __init__(
        self,
        topic: str,
        targets: list[Target[Session]],
        groups: tuple[SharedGroup, ...],
        hooks: Hooks,
        elsewhere: RemoteReceivers | None = None,
    ) -> None:
        self.topic = topic
        self.stale = False
        self.groups = groups
        self.publish_hooks, self.retain_hooks = hooks.publish_chains(topic)
        self.count = len(targets) + len(groups)  #: receivers on this node
        self.elsewhere = elsewhere
        self.live = elsewhere.live if elsewhere is not None else None  #: peers that get messages of QoS 1 and 2
        others = elsewhere.subscribers if elsewhere is not None else ()
        addressed = elsewhere.addressed if elsewhere is not None else ()
        self.weight = self.count + len(others) + len(addressed)  #: receivers that the route refers to
        #: takes plain messages of this topic for itself, and no other plugin wants to see them
        self.plain = _plain(self.publish_hooks)
        unheard = not self.count and elsewhere is None
        #: a plugin wants to see every message of this topic: the fast path leaves them to the channel
        self.slow = self.publish_hooks is not None or (unheard and hooks.message_dropped is not None)
        #: a receiver's messages of QoS 1 and 2 go through the store: the fast path leaves them to the channel
        self.kept = (
            bool(others or addressed)
            or any(t.session.durable is not None for t in targets)
            or any(g.durable for g in groups)
        )
        self.beyond = self.kept or elsewhere is not None  #: not all of it is for windows of this node
        plain = [t for t in targets if _is_plain(t)]
        #: the session that alone gets the messages of this topic; its publishers may wait for it (session, rule 4)
        self.only = targets[0].session if len(targets) == 1 and not groups and elsewhere is None else None
        own = _unaddressed(targets, addressed)
        #: where one of them has to be chosen: all whose messages this node gives to them, or stores
        self.targets = tuple(own) if self.kept else ()
        #: if all receivers are durable and take QoS 1: what they get; the fast path stores such messages itself
        #: (who takes QoS 0 here is not among these)
        fast = self.kept and not groups and self.live is None and all(t.qos for t in targets)
        self.lasting = _lasting((*own, *others), addressed) if fast else ()
        #: see `session_writer.PlainMessage`; made when first needed, since many routes are remembered
        self.bodies: dict[tuple[object, ...], bytes] | None = None
        self.rest = tuple(t for t in targets if not _is_plain(t))  #: receivers that need their own encoding
        self.single = bool(self.rest or groups)  #: some receiver's messages are sent one by one
        if not targets:  # mostly topics that plugins take
            self.as_published: frozenset[Session] = frozenset()
            self.v3_all, self.v3_qos0, self.v3_qos1, self.v3_qos2, self.v3_from_1 = NO_RECEIVERS
            self.v5_all, self.v5_qos0, self.v5_qos1, self.v5_qos2, self.v5_from_1 = NO_RECEIVERS
            return
        self.as_published = frozenset(t.session for t in plain if t.retain_as_published)
        v3 = [t for t in plain if t.session.version != 5]
        v5 = [t for t in plain if t.session.version == 5]
        self.v3_all, self.v3_qos0, self.v3_qos1, self.v3_qos2, self.v3_from_1 = _by_qos(v3)
        self.v5_all, self.v5_qos0, self.v5_qos1, self.v5_qos2, self.v5_from_1 = _by_qos(v5)


def _plain(chain: Chain | None) -> Callback | None:
    if chain is None or len(chain.callbacks) > 1 or chain.callbacks[0].plain is None:
        return None
    return chain.callbacks[0]


def _is_plain(target: Target[Session]) -> bool:
    """Return True if the shared bytes serve this receiver."""
    return not target.identifiers and not target.no_local and not target.session.special


def _unaddressed(targets: list[Target[Session]], addressed: tuple[AddressedClient, ...]) -> list[Target[Session]]:
    """Return the sessions that are not served by way of the store alone (addressing, rule 2)."""
    if not addressed:
        return targets
    named = {client.client_id for client in addressed}
    return [t for t in targets if t.session.durable is None or t.session.client_id not in named]


def _lasting(
    targets: Iterable[Target[Session] | Target[Subscriber]], addressed: tuple[AddressedClient, ...]
) -> tuple[Copy, ...]:
    copies: list[Copy] = []
    for target in targets:
        copy = Copy(target.session, min(1, target.qos), False, target.identifiers)
        if not copy.lasting or target.no_local:
            return ()
        copies.append(copy)
    return (*copies, *(Copy(client, 1, False, ()) for client in addressed))


def _by_qos(targets: list[Target[Session]]) -> tuple[Receivers, Receivers, Receivers, Receivers, Receivers]:
    qos0, qos1, qos2 = (tuple(t.session for t in targets if t.qos == qos) for qos in (0, 1, 2))
    return qos0 + qos1 + qos2, qos0, qos1, qos2, qos1 + qos2


class SharedGroup:
    """Members of `$share/{group}/{filter}`; a message goes to one of them. [MQTT-4.8.2-4]

    Connected members go first, on whichever node: each gets its share, by the number of members of each node. For a
    durable member elsewhere the message is stored; of the others only their number is known, and their node chooses
    among them. With `hash_topic` and `hash_client` all nodes choose the same member.
    """

    __slots__ = (
        "_by_room",
        "_hashed",
        "_next",
        "_pick",
        "_pick_any",
        "_sticky",
        "filter",
        "members",
        "name",
        "peers",
        "subscribers",
    )

    def __init__(self, name: str, filter_: str, strategy: str) -> None:
        self.name = name
        self.filter = filter_
        self.members: dict[Session, Subscription] = {}
        self.peers: dict[Peer, tuple[GroupPeer, int, int]] = {}  #: connected members there, see `present`
        self.subscribers: dict[Subscriber, Options] = {}  #: members that are durable, and not attached here
        self._next = 0
        self._sticky: Any = None
        self._by_room = strategy in ("round_robin", "random", "least_inflight")  # the others keep to their member
        self._hashed = strategy.startswith("hash_")
        # Not bound: a group that refers to itself would wait for a full collection.
        self._pick: Callable[[SharedGroup, list[Any], str, str], Any] = STRATEGIES[strategy]
        #: How busy members elsewhere are is not known here.
        self._pick_any = self._pick if strategy != "least_inflight" else STRATEGIES["round_robin"]

    @property
    def text(self) -> str:
        """As a client subscribes to it."""
        return f"$share/{self.name}/{self.filter}"

    @property
    def durable(self) -> bool:
        """True if a message may have to go to a member's mailbox."""
        return bool(self.subscribers) or any(session.durable is not None for session in self.members)

    @property
    def online(self) -> bool:
        """Return True if a member is connected here."""
        return any(session.online for session in self.members)

    @property
    def spread(self) -> bool:
        """Return True if it has members elsewhere."""
        return bool(self.peers or self.subscribers)

    @property
    def empty(self) -> bool:
        """Return True if it has no members at all."""
        return not (self.members or self.peers or self.subscribers)

    def present(self) -> tuple[int, int]:
        """Return how many members are connected here: those that take everything live, and durable ones."""
        online = [
            session.durable is not None and wanted.qos > 0 for session, wanted in self.members.items() if session.online
        ]
        return len(online) - sum(online), sum(online)

    def leave(self, session: Session) -> None:
        """Remove a member."""
        self.members.pop(session, None)
        if self._sticky is session:
            self._sticky = None

    def choose(
        self,
        topic: str,
        publisher: str,
        *,
        qos: int,
        without: Session | None = None,
        asleep: Callable[[Subscriber], bool] = bool,
        me: str = "",
    ) -> Session | Subscriber | GroupPeer | None:
        """Return the member that gets the next message: a connected one if there is any, else one that stores it.

        `asleep` says whether a session is attached to no member of the cluster; `me` is the id of this one.
        """
        online = [s for s in self.members if s.online and s is not without]
        if not self.spread:
            if online:
                return cast("Session", self._pick(self, self._with_room(online), topic, publisher))
        elif self._hashed:
            slots = self._slots(online, qos, asleep, me)
            if slots:
                chosen = self._pick(self, slots, topic, publisher)
                return self.choose_here(topic, publisher, qos=qos, without=without) if chosen is None else chosen
        else:
            there = self._elsewhere(qos, asleep)
            if online or there:
                free = self._with_room(online, otherwise=not there)
                chosen = cast(
                    "Session | Subscriber | GroupPeer", self._pick_any(self, [*free, *there], topic, publisher)
                )
                if self._pick is self._pick_any or not isinstance(chosen, Session):
                    return chosen
                return cast("Session", self._pick(self, free, topic, publisher))
        if not qos:
            return None
        sleeping: list[Session | Subscriber] = [s for s in self.members if s is not without]
        sleeping += (s for s in self.subscribers if asleep(s))
        if not sleeping:
            return None
        pick = self._pick_any if self.spread else self._pick
        return cast("Session | Subscriber", pick(self, sleeping, topic, publisher))

    def connected_elsewhere(self, asleep: Callable[[Subscriber], bool]) -> bool:
        """Return True if a member is connected to another node."""
        return bool(self.peers) or not all(map(asleep, self.subscribers))

    def _with_room(self, online: list[Session], *, otherwise: bool = True) -> list[Session]:
        """Return the members that have room in their window; all of them if none has and `otherwise`."""
        if not self._by_room:
            return online
        free = [s for s in online if s.ready and len(s.inflight) < s.limit]
        return free or (online if otherwise else free)

    def _elsewhere(self, qos: int, asleep: Callable[[Subscriber], bool]) -> list[Session | Subscriber | GroupPeer]:
        """Return the members that are connected to other nodes."""
        others: list[Session | Subscriber | GroupPeer] = []
        for there, live, durable in self.peers.values():
            others += [there] * (live if qos else live + durable)
        if qos:
            others += (s for s, options in self.subscribers.items() if options.qos and not asleep(s))
        return others

    def _slots(
        self, online: list[Session], qos: int, asleep: Callable[[Subscriber], bool], me: str
    ) -> list[Session | Subscriber | GroupPeer | None]:
        """Return the connected members, in the same order on each node; None: one of those here that are counted."""
        lasting = [s for s in online if s.durable is not None and min(qos, self.members[s].qos)]
        nodes: dict[str, list[GroupPeer | None]] = {me: [None] * (len(online) - len(lasting))}
        for peer, (there, live, durable) in self.peers.items():
            nodes[peer.id] = [there] * (live if qos else live + durable)
        known: list[Session | Subscriber] = list(lasting)
        if qos:
            known += (s for s, options in self.subscribers.items() if options.qos and not asleep(s))
        known.sort(key=lambda session: session.client_id)
        return [*(slot for node in sorted(nodes) for slot in nodes[node]), *known]

    def choose_here(self, topic: str, publisher: str, *, qos: int, without: Session | None = None) -> Session | None:
        """Return the member that gets a message for which this node is chosen; None if it has no member."""
        online = [
            s
            for s, wanted in self.members.items()
            if s.online and s is not without and (s.durable is None or not min(qos, wanted.qos))
        ]
        return cast("Session", self._pick(self, online, topic, publisher)) if online else None

    def round_robin(self, members: list[M], _topic: str, _publisher: str) -> M:
        """Choose one member after the other."""
        self._next += 1
        return members[self._next % len(members)]

    def random(self, members: list[M], _topic: str, _publisher: str) -> M:
        """Choose any member."""
        return random.choice(members)  # noqa: S311 - spreads load, guards nothing

    def sticky(self, members: list[M], topic: str, publisher: str) -> M:
        """Return the same member until it goes away."""
        if self._sticky is None or self._sticky not in members:
            self._sticky = self.random(members, topic, publisher)
        return cast("M", self._sticky)

    def hash_topic(self, members: list[M], topic: str, _publisher: str) -> M:
        """Return the same member for the same topic, as long as the members stay the same."""
        return members[zlib.crc32(topic.encode()) % len(members)]

    def hash_client(self, members: list[M], _topic: str, publisher: str) -> M:
        """Return the same member for the same publisher, as long as the members stay the same."""
        return members[zlib.crc32(publisher.encode()) % len(members)]

    def least_inflight(self, members: list[Session], _topic: str, _publisher: str) -> Session:
        """Return the member with the fewest unacknowledged messages; among equals the one chosen longest ago."""
        chosen = min(members, key=lambda s: len(s.inflight) + s.waiting_messages)
        self.members[chosen] = self.members.pop(chosen)
        return chosen


STRATEGIES: dict[str, Callable[[SharedGroup, list[Any], str, str], Any]] = {
    "round_robin": SharedGroup.round_robin,
    "random": SharedGroup.random,
    "sticky": SharedGroup.sticky,
    "hash_topic": SharedGroup.hash_topic,
    "hash_client": SharedGroup.hash_client,
    "least_inflight": SharedGroup.least_inflight,
}


class Audience:
    """The subscribers of one filter."""

    __slots__ = ("durable", "groups", "live", "members")

    def __init__(self) -> None:
        self.members: dict[Session, Subscription] = {}
        self.groups: dict[str, SharedGroup] = {}
        #: For peers (`interest`): members that take everything live, and durable ones that do so at QoS 0 only.
        self.live = self.durable = 0

    @property
    def flags(self) -> int:
        """Return what peers have to know."""
        return (LIVE if self.live else 0) | (DURABLE if self.durable else 0)

    @property
    def empty(self) -> bool:
        """Return True if it has no members."""
        return not (self.members or self.groups)


class Search:
    """A topic whose receivers are being found, in several turns."""

    __slots__ = ("local", "peers", "subscribers", "topic")

    def __init__(self, topic: str, local: Matching[Audience], relay: Relay | None) -> None:
        self.topic = topic
        self.local = local
        self.peers = relay.router.table.begin(topic) if relay is not None else None
        self.subscribers = relay.subscribers.table.begin(topic) if relay is not None else None

    def step(self, most: int) -> bool:
        """Compare it with so many levels of filters of each kind; True when all have been looked at."""
        done = [part.step(most) for part in (self.local, self.peers, self.subscribers) if part is not None]
        return all(done)

    def watch(self, relay: Relay | None, *, begin: bool) -> None:
        """Have tables tell what comes between two steps, or no longer."""
        if relay is None or self.peers is None or self.subscribers is None:
            return
        for table, part in ((relay.router.table, self.peers), (relay.subscribers.table, self.subscribers)):
            if begin:
                table.searches.append(part)
            elif part in table.searches:
                table.searches.remove(part)


class PubSub:
    """Subscriptions and delivery of one node."""

    def __init__(self, shared: SessionContext, route_cache: int = Limits().route_cache) -> None:
        """Take `route_cache`, the bytes that remembered routes may take."""
        self.shared = shared
        self.subscriptions = 0
        self.shared_subscriptions = 0
        self._router: Router[Audience] = Router()
        self._routes: Routes[Route] = Routes(
            ROUTES,
            route_cache,
            lambda free: shared.soon(free),  # noqa: PLW0108 - it is set later
        )
        self._matching: list[Search] = []  # topics that are compared with all filters in several turns
        self._far_groups: dict[Peer, set[str]] = {}  # groups with members there, as they are written
        self.relay: Relay | None = None  #: the way to other members, if there are any; set by it
        self.interest: Interest | None = None  #: what they have to know; likewise
        self.taken: dict[bytes, Route] = {}  #: first level -> route of all topics below it, read by the fast path
        self.routes = self._routes.table  #: topic bytes -> route, read by the fast path
        shared.hooks.on_change(self.forget_routes)

    @property
    def route_bytes(self) -> int:
        """Bytes of remembered routes, about."""
        return self._routes.size_bytes

    @property
    def filter_nodes(self) -> int:
        """Levels of filters with wildcards."""
        return self._router.nodes

    def routes_changed(self, filter_: str) -> None:
        """Forget routes after a change of what others have subscribed to."""
        self._routes.invalidate(filter_)

    def forget_topics(self) -> None:
        """Do so after a change of very many filters."""
        self._routes.clear()

    def forget_routes(self) -> None:
        """Forget routes after a change of hooks: every route may now be served differently."""
        self._routes.clear()
        for route in self.taken.values():
            route.stale = True
        self.taken.clear()

    # -- subscriptions

    def subscribe(self, session: Session, subscription: Subscription) -> bool:
        """Add or replace a subscription; True if it is new. [MQTT-3.8.4-3]"""
        group, filter_ = split_share(subscription.filter)
        old = session.subscriptions.get(subscription.filter)
        is_new = old is None
        session.subscriptions[subscription.filter] = subscription
        if is_new:
            session.filter_bytes += len(subscription.filter)
        audience = self._audience(filter_)
        if group is None:
            audience.members[session] = subscription
            self.subscriptions += is_new
            if self.interest is not None:
                self.interest.count(audience, filter_, session, subscription, 1)
                if old is not None:
                    self.interest.count(audience, filter_, session, old, -1)
        else:
            shared = self._shared_group(audience, group, filter_)
            shared.members[session] = subscription
            self.shared_subscriptions += is_new
            if self.interest is not None:
                self.interest.count_group(shared)
        self._routes.invalidate(filter_)
        if is_new and self.relay is not None:
            self.relay.noted(session, subscription.filter, here=True)
        return is_new

    def _audience(self, filter_: str) -> Audience:
        audience = self._router.get(filter_)
        if audience is None:
            audience = Audience()
            self._router.set(filter_, audience)
            for search in self._matching:
                if matches(filter_, search.topic):
                    search.local.found.append(audience)  # it may have been there already
        return audience

    def _shared_group(self, audience: Audience, group: str, filter_: str) -> SharedGroup:
        shared = audience.groups.get(group)
        if shared is None:
            shared = audience.groups[group] = SharedGroup(group, filter_, self.shared.options.shared_strategy)
        return shared

    def unsubscribe(self, session: Session, text: str) -> bool:
        """Remove a subscription, given as the client wrote it; False if there was none."""
        old = session.subscriptions.pop(text, None)
        if old is None:
            return False
        session.filter_bytes -= len(text)
        group, filter_ = split_share(text)
        audience = self._router.get(filter_)
        if audience is None:
            return True
        if group is None:
            audience.members.pop(session, None)
            self.subscriptions -= 1
            if self.interest is not None:
                self.interest.count(audience, filter_, session, old, -1)
        else:
            shared = audience.groups[group]
            shared.leave(session)
            self.shared_subscriptions -= 1
            if self.interest is not None:
                self.interest.count_group(shared)
        self._left(audience, group, filter_)
        if self.relay is not None:
            self.relay.noted(session, text, here=False)
        return True

    def _left(self, audience: Audience, group: str | None, filter_: str) -> None:
        """Remove what is empty after a member has left."""
        if group is not None and audience.groups[group].empty:
            del audience.groups[group]
        if audience.empty:
            self._router.remove(filter_)
        self._routes.invalidate(filter_)

    def unsubscribe_all(self, session: Session) -> None:
        """Remove all subscriptions of a session that ends."""
        for text in list(session.subscriptions):
            self.unsubscribe(session, text)

    def presence(self, session: Session) -> None:
        """Tell peers that the connection of a session has come or gone, and how many members its groups have now."""
        if self.interest is None or self.relay is None:
            return
        if self.relay.has_place(session):
            self.relay.tell_place(session.client_id, here=session.online)
        for text in session.subscriptions:
            if text.startswith("$share/") and (group := self.group(text)) is not None:
                self.interest.count_group(group)

    def tell_interest(self, session: Session) -> None:
        """Count what a session has subscribed to before there were peers."""
        for text, subscription in session.subscriptions.items():
            group, filter_ = split_share(text)
            audience = self._router.get(filter_)
            if audience is None or self.interest is None:
                continue
            if group is None:
                self.interest.count(audience, filter_, session, subscription, 1)
            else:
                self.interest.count_group(audience.groups[group])

    def is_here(self, client_id: str) -> None:
        """Note that a client's session is on this node from now on."""
        if self.relay is not None:
            self.relay.subscribers.forget(client_id)

    # -- members of groups that are elsewhere

    def count_group(self, text: str, peer: Peer, live: int, durable: int) -> None:
        """Note how many connected members a group has at a peer, see `SharedGroup.present`."""
        name, filter_ = split_share(text)
        if name is None:
            return
        if not live and not durable:
            group = self.group(text)
            if group is None or group.peers.pop(peer, None) is None:
                return
            self._far_groups[peer].discard(text)
        else:
            group = self._shared_group(self._audience(filter_), name, filter_)
            there = group.peers[peer][0] if peer in group.peers else GroupPeer(peer)
            group.peers[peer] = there, live, durable
            self._far_groups.setdefault(peer, set()).add(text)
        self._group_changed(group)

    def leave_groups(self, peer: Peer) -> None:
        """Forget the members of groups at a peer that is gone."""
        for text in list(self._far_groups.get(peer, ())):
            self.count_group(text, peer, 0, 0)
        self._far_groups.pop(peer, None)

    def join_group(self, text: str, subscriber: Subscriber, options: Options) -> None:
        """Add a durable session that is not attached here to a group."""
        name, filter_ = split_share(text)
        if name is not None:
            group = self._shared_group(self._audience(filter_), name, filter_)
            group.subscribers[subscriber] = options
            self._group_changed(group)

    def leave_group(self, text: str, subscriber: Subscriber) -> None:
        """Remove it from a group."""
        group = self.group(text)
        if group is not None and group.subscribers.pop(subscriber, None) is not None:
            self._group_changed(group)

    def _group_changed(self, group: SharedGroup) -> None:
        audience = self._router.get(group.filter)
        if audience is not None:
            self._left(audience, group.name, group.filter)

    def refresh(self, session: Session) -> None:
        """Serve a session that came back with other properties, perhaps another way from now on."""
        for text in session.subscriptions:
            self._routes.invalidate(split_share(text)[1])

    # -- routes

    def route(self, topic: str) -> Route:
        """Return the receivers of a valid topic."""
        route = self.routes.get(topic.encode())
        if route is None:
            if topic[0] == "$" and self.shared.hooks.are_taken(level := first_level(topic)):
                return self._taken_route(level)
            route = self._resolve(topic)
            self._routes.put(topic, route)
        return route

    def begin(self, topic: str) -> Search | None:
        """Find the receivers of a valid topic, as far as it can be done in this turn; the rest is for `go_on`.

        None when `route` knows them. Filters can be made so that a topic is compared with the levels of all of them.
        """
        if topic.encode() in self.routes or (topic[0] == "$" and self.shared.hooks.are_taken(first_level(topic))):
            return None
        if self._router.nodes == 0 and self.relay is None:
            return None  # no filter has wildcards
        search = Search(topic, self._router.begin(topic), self.relay)
        if search.step(LEVELS_PER_TURN):
            self._routes.put(topic, self._route_of(search))
            return None
        self.shared.stats.long_matches += 1
        self._matching.append(search)
        search.watch(self.relay, begin=True)
        return search

    def go_on(self, search: Search) -> bool:
        """Go on with what `begin` has begun; True when `route` knows the receivers."""
        if not search.step(LEVELS_PER_TURN):
            return False
        self.give_up(search)
        if search.topic.encode() not in self.routes:
            self._routes.put(search.topic, self._route_of(search))
        return True

    def give_up(self, search: Search) -> None:
        """Forget what `begin` has begun."""
        if search in self._matching:
            self._matching.remove(search)
            search.watch(self.relay, begin=False)

    def _taken_route(self, level: str) -> Route:
        """Return one route for all topics below a level that a plugin takes, which may be any number."""
        route = self.taken.get(level.encode())
        if route is None:
            route = self.taken[level.encode()] = Route(f"{level}/", [], (), self.shared.hooks)
        return route

    def heard(self, topic: str) -> bool:
        """Return True if a subscriber would get a message of a topic; remembers nothing of it."""
        return self._router.heard(topic) or (self.relay is not None and self.relay.heard(topic))

    def heard_below(self, level: str) -> bool:
        """Return True if a subscriber would get some message of a `$…` topic with this first level."""
        return self._router.heard_below(level) or (self.relay is not None and self.relay.heard_below(level))

    def _resolve(self, topic: str) -> Route:
        found = self._router.match(topic)
        return self._made(topic, found, None)

    def _route_of(self, search: Search) -> Route:
        """Return the route of a topic to those with a wildcard in their filter, and those without."""
        found = search.local.found
        exact = self._router.exact(search.topic)
        # One that came while it was matched may be there twice.
        return self._made(search.topic, list(dict.fromkeys(found if exact is None else [*found, exact])), search)

    def _made(self, topic: str, found: list[Audience], search: Search | None) -> Route:
        targets: dict[Session, Target[Session]] = {}
        groups: list[SharedGroup] = []
        for audience in found:
            groups.extend(audience.groups.values())
            for session, subscription in audience.members.items():
                known = targets.get(session)
                if known is None:
                    targets[session] = Target(session, subscription)
                else:
                    known.merge(subscription)
        elsewhere = self.relay.elsewhere(topic, groups, search) if self.relay is not None else None
        return Route(topic, list(targets.values()), tuple(groups), self.shared.hooks, elsewhere)

    # -- delivery of any message

    def to_keep(self, message: Message, chosen: Mapping[str, str] = NOBODY) -> list[Copy] | None:
        """Return the copies of a QoS 1 or 2 message that must be stored before it is delivered; None: there are none.

        Members of shared groups are chosen now: the list has a copy for each group with a durable member, also if the
        one who gets it is not durable. `chosen` says who was chosen for this very message before.
        """
        route = self.route(message.topic)
        if not route.kept or not message.qos:
            return None
        elsewhere = route.elsewhere.subscribers if route.elsewhere is not None else ()
        targets: Iterable[Target[Session] | Target[Subscriber]] = (*route.targets, *elsewhere)
        wanted = (target.towards(message.publisher) for target in targets)
        found = (copy_for(message, target) for target in wanted if target is not None)
        copies = [copy for copy in found if copy.lasting]
        if route.elsewhere is not None:
            copies += (Copy(client, message.qos, message.retain, ()) for client in route.elsewhere.addressed)
        for group in route.groups:
            member = self.choose(group, message, again=chosen.get(group.text, "")) if group.durable else None
            if member is not None:
                copies.append(member)
        return copies

    def publish(self, message: Message, now: float, kept: list[Copy] | None = None) -> int:
        """Deliver a message to all receivers; return how many. What is in `kept` has gone through the store.

        A peer counts as one.
        """
        route = self.route(message.topic)
        elsewhere = route.elsewhere
        if not route.count and not kept and elsewhere is None:
            self.unheard(message)
            return 0
        for copy in kept or ():
            if copy.group is not None and not copy.lasting:
                if isinstance(copy.session, Session) and copy.session.ended:
                    self.share(copy.group, message, now)  # it has left while the message was stored
                else:
                    self._give(message, copy, now)
        if self.relay is None or message.qos != 2 or self.relay.is_first(message, now):
            self.deliver(message, route, now)
        for group in route.groups:
            if kept is None or not group.durable:
                self.share(group, message, now)
        count = route.count or len(kept or ())
        if self.relay is not None and elsewhere is not None:
            count += self.relay.forward(message, elsewhere, now)
        if not count:
            self.unheard(message)
        return count

    def deliver(self, message: Message, route: Route, now: float) -> None:
        """Deliver a message to the receivers on this node that take it live, but for groups."""
        qos = message.qos
        for version, qos0, qos1, qos2 in (
            (4, route.v3_qos0, route.v3_qos1, route.v3_qos2),
            (5, route.v5_qos0, route.v5_qos1, route.v5_qos2),
        ):
            for granted, receivers in ((0, qos0), (1, qos1), (2, qos2)):
                if receivers:
                    self._send_plain(message, version, min(qos, granted), receivers, route, now)
        for target in route.rest:
            self._send_target(message, target, now)

    def _send_plain(
        self, message: Message, version: int, qos: int, receivers: Receivers, route: Route, now: float
    ) -> None:
        frame = frame_of(message, version, qos, now)
        if qos and route.kept:
            receivers = tuple(session for session in receivers if session.durable is None)
        self.shared.stats.routed += len(receivers)
        if not message.retain or not route.as_published:
            for session in receivers:
                session.offer(frame)
            return
        retained = frame_of(message, version, qos, now, retain=True)
        for session in receivers:  # [MQTT-3.3.1-12], [MQTT-3.3.1-13]
            session.offer(retained if session in route.as_published else frame)

    def _send_target(self, message: Message, target: Target[Session], now: float) -> None:
        session = target.session
        wanted = target.towards(message.publisher)
        if wanted is None:
            return
        qos = min(message.qos, wanted.qos)
        if qos and session.durable is not None:
            return  # it has gone through the store
        retain = message.retain and wanted.retain_as_published
        if wanted.identifiers:
            message = noted(message, wanted.identifiers)
        self.shared.stats.routed += 1
        session.offer(frame_of(message, session.version, qos, now, retain=retain, identifiers=wanted.identifiers))

    def share(self, group: SharedGroup, message: Message, now: float) -> None:
        """Give a message to one member of a group."""
        copy = self.choose(group, message)
        if copy is None:
            self.unheard(message)
            return
        self._give(message, copy, now)

    def share_here(self, group: SharedGroup, message: Message, now: float) -> bool:
        """Give a message to a member on this node, as a peer asks for; False if there is no member any more."""
        session = group.choose_here(message.topic, message.publisher, qos=message.qos)
        if session is None:
            return False
        self._give(message, _member_copy(message, session, group.members[session], group), now)
        return True

    def _give(self, message: Message, copy: Copy, now: float) -> None:
        self.shared.stats.routed += not isinstance(copy.session, GroupPeer)  # else it counts where it is delivered
        self.offer(message, copy, now)

    def choose(
        self, group: SharedGroup, message: Message, without: Session | None = None, again: str = ""
    ) -> Copy | None:
        """Return a group member's copy of a message; None if there is no member. `again`: the member chosen before."""
        member: Session | Subscriber | GroupPeer | None = None
        if again:
            members: Iterable[Session | Subscriber] = (*group.members, *group.subscribers)
            member = next((member for member in members if member.client_id == again), None)
        if member is None:
            asleep, me = (self.relay.asleep, self.relay.cluster.me) if self.relay is not None else (bool, "")
            member = group.choose(
                message.topic, message.publisher, qos=message.qos, without=without, asleep=asleep, me=me
            )
        if member is None:
            return None
        if isinstance(member, GroupPeer):
            return Copy(member, message.qos, message.retain, (), group)
        wanted = group.members[member] if isinstance(member, Session) else group.subscribers[member]
        return _member_copy(message, member, wanted, group)

    def offer(self, message: Message, copy: Copy, now: float) -> None:
        """Give a receiver its copy."""
        session = copy.session
        if isinstance(session, Subscriber | GroupPeer):
            if self.relay is not None:
                self.relay.offer(message, copy, session, now)
            return
        if isinstance(session, AddressedClient):
            return  # it is in no group, and has its message from the store
        if copy.qos and session.durable is not None:
            session.durable.store.writer.accept(message, [copy], now)
            return
        message = noted(message, copy.identifiers, copy.group)
        session.offer(
            frame_of(message, session.version, copy.qos, now, retain=copy.retain, identifiers=copy.identifiers)
        )

    def group(self, text: str) -> SharedGroup | None:
        """Return the group of `$share/{group}/{filter}`, if it has members."""
        name, filter_ = split_share(text)
        audience = self._router.get(filter_)
        return None if audience is None or name is None else audience.groups.get(name)

    def unheard(self, message: Message) -> None:
        """Count a message that is for no subscriber."""
        self.shared.stats.dropped["no_subscribers"] += 1
        chain = self.shared.hooks.message_dropped
        if chain is not None:
            chain.notify(None, message, "no_subscribers")

    def hand_on(self, session: Session, now: float) -> None:
        """Give a session's unacknowledged shared messages to other members as it ends. [MQTT-4.8.2-5]"""
        of_sources = session.scheduler.unacked if session.scheduler is not None else ()
        sent = [
            (frame, qos_of(frame) == 1)  # QoS 2 may have arrived
            for number, frame in session.inflight.items()
            if number not in of_sources and not is_released(frame)  # sources say what becomes of theirs
        ]
        self.shared.stats.abandoned += len(sent)
        waiting = [(frame, True) for frame in session.queue or ()]
        for frame, may_go_on in sent + waiting:
            origin = frame[2]
            group = origin.headers.get("shared_group") if isinstance(origin, Message) else None
            copy = None
            if isinstance(group, SharedGroup) and isinstance(origin, Message) and may_go_on:
                copy = self.choose(group, origin, without=session)
            if copy is not None and isinstance(origin, Message):
                self.shared.stats.withdrawn["elsewhere"] += isinstance(copy.session, GroupPeer)
                self.offer(origin, copy, now)
            else:
                session.drop(frame, "session_ended")

    # -- delivery from the fast path, and from that of a peer

    def deliver_rest(self, route: Route, frame: Frame, version: int, publisher: ClientInfo, now: float) -> None:
        """Deliver to the receivers of `route` that are not plain a message that came as bytes."""
        message = message_of(frame, version)
        message.publisher = publisher.client_id
        message.username = publisher.username
        message.qos = qos_of(frame)
        # The fast path counts one copy for each of them. There may be fewer: no member, or the publisher's own.
        self.shared.stats.routed -= len(route.rest) + len(route.groups)
        for target in route.rest:
            self._send_target(message, target, now)
        for group in route.groups:
            self.share(group, message, now)


def copy_for(message: Message, target: Target[Session] | Target[Subscriber]) -> Copy:
    """Return what a receiver gets of a message."""
    retain = message.retain and target.retain_as_published
    return Copy(target.session, min(message.qos, target.qos), retain, target.identifiers)


def _member_copy(
    message: Message, member: Session | Subscriber, wanted: Subscription | Options, group: SharedGroup
) -> Copy:
    identifiers = (wanted.identifier,) if wanted.identifier else ()
    retain = message.retain and wanted.retain_as_published
    return Copy(member, min(message.qos, wanted.qos), retain, identifiers, group)


def chosen_of(copies: Iterable[Copy]) -> dict[str, str]:
    """Return the member chosen in each shared group; a peer that is to choose one gets its message after the commit."""
    chosen = (copy for copy in copies if copy.group is not None)
    return {copy.group.text: copy.session.client_id for copy in chosen if copy.group and copy.session.client_id}


def noted(message: Message, identifiers: tuple[int, ...], group: SharedGroup | None = None) -> Message:
    """Return the message with notes for its way to one receiver; the original is left as it is."""
    headers = dict(message.headers)
    headers.pop("subscription_ids", None)  # of a member that had it before
    if identifiers:
        headers["subscription_ids"] = identifiers
    if group is not None:
        headers["shared_group"] = group
    return Message(
        message.topic,
        message.payload,
        message.qos,
        message.retain,
        message.publisher,
        message.username,
        message.guid,
        message.timestamp,
        message.payload_format,
        message.expires_at,
        message.content_type,
        message.response_topic,
        message.correlation_data,
        message.user_properties,
        headers,
    )
