"""The subscribers of a topic: subscriptions of this node, shared groups, and the delivery to sessions.

A topic's answer is a `Route`: the receivers, sorted by how they are served, so that a delivery is a loop over a
tuple without decisions in it.

    plain receivers      by protocol (3.x or 5) and granted QoS; all get the very same bytes
    targets              receivers with something of their own: subscription identifiers, no-local,
                         a packet size limit, topic aliases
    groups               shared subscriptions; each gives the message to one of its members
    kept                 those with a durable session: QoS 1 and 2 go through its mailbox in the store,
                         QoS 0 the way of the others

A session with several matching subscriptions gets one copy, with the highest QoS of them and all their identifiers.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from motorcade.broker.frames import Frame, frame_of, is_released, message_of, qos_of
from motorcade.broker.limits import Limits
from motorcade.broker.router import Router, Routes, first_level
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches, split_share
from motorcade.core.trie import Matching
from motorcade.extension.hooks import Callback, Chain, Hooks

NOBODY: Mapping[str, str] = {}

ROUTES = 100_000  #: topics whose route is remembered
LEVELS_PER_TURN = 8192  #: levels of filters that a new topic is compared with before others have their turn


class Target:
    """One receiver of a topic, with all its matching subscriptions taken together."""

    __slots__ = ("identifiers", "no_local", "own", "qos", "retain_as_published", "session")

    def __init__(self, session: Session, subscription: Subscription) -> None:
        self.session = session
        self.qos = subscription.qos
        self.retain_as_published = subscription.retain_as_published
        self.identifiers: tuple[int, ...] = (subscription.identifier,) if subscription.identifier else ()
        self.no_local = subscription.no_local  #: some subscription is not for the session's own messages
        self.own: Target | None = None  #: what is left for these, if `no_local`; None: nothing

    def merge(self, subscription: Subscription) -> None:
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

    @property
    def plain(self) -> bool:
        """True if the shared bytes serve this receiver."""
        return not self.identifiers and not self.no_local and not self.session.special


class Copy(NamedTuple):
    """The copy of a message for one receiver."""

    session: Session
    qos: int
    retain: bool
    identifiers: tuple[int, ...]
    group: SharedGroup | None = None  #: that has chosen this receiver


Receivers = tuple[Session, ...]


NO_RECEIVERS: tuple[Receivers, Receivers, Receivers, Receivers, Receivers] = ((), (), (), (), ())


class Route:
    """Receivers of one topic. `from_N` are those with a granted QoS of at least N."""

    __slots__ = (
        "as_published",
        "bodies",
        "count",
        "groups",
        "kept",
        "lasting",
        "only",
        "plain",
        "publish_hooks",
        "rest",
        "retain_hooks",
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
    )

    def __init__(
        self,
        topic: str,
        targets: list[Target],
        groups: tuple[SharedGroup, ...],
        hooks: Hooks,
    ) -> None:
        self.topic = topic
        self.stale = False
        self.groups = groups
        self.publish_hooks, self.retain_hooks = hooks.publish_chains(topic)
        self.count = len(targets) + len(groups)
        #: takes plain messages of this topic for itself, and no other plugin wants to see them
        self.plain = _plain(self.publish_hooks)
        #: a plugin wants to see every message of this topic: the fast path leaves them to the channel
        self.slow = self.publish_hooks is not None or (not self.count and hooks.message_dropped is not None)
        #: a receiver's messages of QoS 1 and 2 go through the store: the fast path leaves them to the channel
        self.kept = any(t.session.durable is not None for t in targets) or any(g.durable for g in groups)
        plain = [t for t in targets if t.plain]
        #: the session that alone gets the messages of this topic; its publishers may wait for it (session, rule 4)
        self.only = targets[0].session if len(targets) == 1 and not groups else None
        self.targets = tuple(targets) if self.kept else ()  #: all of them, where one of them has to be chosen
        #: if all receivers are durable and take QoS 1: what they get; the fast path stores such messages itself
        self.lasting = _lasting(targets) if self.kept and not groups else ()
        #: see `session_writer.PlainMessage`; made when first needed, since many routes are remembered
        self.bodies: dict[tuple[object, ...], bytes] | None = None
        self.rest = tuple(t for t in targets if not t.plain)  #: receivers that need their own encoding
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


def _lasting(targets: list[Target]) -> tuple[Copy, ...]:
    if any(t.session.durable is None or not t.qos or t.no_local for t in targets):
        return ()
    return tuple(Copy(t.session, 1, False, t.identifiers) for t in targets)


def _by_qos(targets: list[Target]) -> tuple[Receivers, Receivers, Receivers, Receivers, Receivers]:
    qos0, qos1, qos2 = (tuple(t.session for t in targets if t.qos == qos) for qos in (0, 1, 2))
    return qos0 + qos1 + qos2, qos0, qos1, qos2, qos1 + qos2


class SharedGroup:
    """Members of `$share/{group}/{filter}`; a message goes to one of them. [MQTT-4.8.2-4]"""

    __slots__ = ("_by_room", "_next", "_pick", "_sticky", "filter", "members", "name")

    def __init__(self, name: str, filter_: str, strategy: str) -> None:
        self.name = name
        self.filter = filter_
        self.members: dict[Session, Subscription] = {}
        self._next = 0
        self._sticky: Session | None = None
        self._by_room = strategy in ("round_robin", "random", "least_inflight")  # the others keep to their member
        # Not bound: a group that refers to itself would wait for a full collection.
        self._pick: Callable[[SharedGroup, list[Session], str, str], Session] = STRATEGIES[strategy]

    @property
    def text(self) -> str:
        """As a client subscribes to it."""
        return f"$share/{self.name}/{self.filter}"

    @property
    def durable(self) -> bool:
        """True if a message may have to go to a member's mailbox."""
        return any(session.durable is not None for session in self.members)

    def leave(self, session: Session) -> None:
        """Remove a member."""
        self.members.pop(session, None)
        if self._sticky is session:
            self._sticky = None

    def choose(self, topic: str, publisher: str, *, qos: int, without: Session | None = None) -> Session | None:
        """Return the member that gets the next message: a connected one if there is any, else one that stores it."""
        online = [s for s in self.members if s.online and s is not without]
        if online:
            if self._by_room:
                online = [s for s in online if s.ready and len(s.inflight) < s.limit] or online
            return self._pick(self, online, topic, publisher)
        away = [s for s in self.members if s is not without] if qos else []
        return self._pick(self, away, topic, publisher) if away else None

    def round_robin(self, members: list[Session], _topic: str, _publisher: str) -> Session:
        """Choose one member after the other."""
        self._next += 1
        return members[self._next % len(members)]

    def random(self, members: list[Session], _topic: str, _publisher: str) -> Session:
        """Choose any member."""
        return random.choice(members)  # noqa: S311 - spreads load, guards nothing

    def sticky(self, members: list[Session], topic: str, publisher: str) -> Session:
        """Return the same member until it goes away."""
        if self._sticky is None or self._sticky not in members:
            self._sticky = self.random(members, topic, publisher)
        return self._sticky

    def hash_topic(self, members: list[Session], topic: str, _publisher: str) -> Session:
        """Return the same member for the same topic, as long as the members stay the same."""
        return members[zlib.crc32(topic.encode()) % len(members)]

    def hash_client(self, members: list[Session], _topic: str, publisher: str) -> Session:
        """Return the same member for the same publisher, as long as the members stay the same."""
        return members[zlib.crc32(publisher.encode()) % len(members)]

    def least_inflight(self, members: list[Session], _topic: str, _publisher: str) -> Session:
        """Return the member with the fewest unacknowledged messages; among equals the one chosen longest ago."""
        chosen = min(members, key=lambda s: len(s.inflight) + s.waiting_messages)
        self.members[chosen] = self.members.pop(chosen)
        return chosen


STRATEGIES = {
    "round_robin": SharedGroup.round_robin,
    "random": SharedGroup.random,
    "sticky": SharedGroup.sticky,
    "hash_topic": SharedGroup.hash_topic,
    "hash_client": SharedGroup.hash_client,
    "least_inflight": SharedGroup.least_inflight,
}


class Audience:
    """The subscribers of one filter."""

    __slots__ = ("groups", "members")

    def __init__(self) -> None:
        self.members: dict[Session, Subscription] = {}
        self.groups: dict[str, SharedGroup] = {}


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
        self._matching: list[Matching[Audience]] = []  # topics that are compared with all filters in several turns
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
        is_new = subscription.filter not in session.subscriptions
        session.subscriptions[subscription.filter] = subscription
        if is_new:
            session.filter_bytes += len(subscription.filter)
        audience = self._router.get(filter_)
        if audience is None:
            audience = Audience()
            self._router.set(filter_, audience)
            for matching in self._matching:
                if matches(filter_, matching.topic):
                    matching.found.append(audience)  # it may have been there already
        if group is None:
            audience.members[session] = subscription
            self.subscriptions += is_new
        else:
            if group not in audience.groups:
                audience.groups[group] = SharedGroup(group, filter_, self.shared.options.shared_strategy)
            audience.groups[group].members[session] = subscription
            self.shared_subscriptions += is_new
        self._routes.invalidate(filter_)
        return is_new

    def unsubscribe(self, session: Session, text: str) -> bool:
        """Remove a subscription, given as the client wrote it; False if there was none."""
        if session.subscriptions.pop(text, None) is None:
            return False
        session.filter_bytes -= len(text)
        group, filter_ = split_share(text)
        audience = self._router.get(filter_)
        if audience is None:
            return True
        if group is None:
            audience.members.pop(session, None)
            self.subscriptions -= 1
        else:
            shared = audience.groups[group]
            shared.leave(session)
            if not shared.members:
                del audience.groups[group]
            self.shared_subscriptions -= 1
        if not audience.members and not audience.groups:
            self._router.remove(filter_)
        self._routes.invalidate(filter_)
        return True

    def unsubscribe_all(self, session: Session) -> None:
        """Remove all subscriptions of a session that ends."""
        for text in list(session.subscriptions):
            self.unsubscribe(session, text)

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

    def begin(self, topic: str) -> Matching[Audience] | None:
        """Find the receivers of a valid topic, as far as it can be done in this turn; the rest is for `go_on`.

        None when `route` knows them. Filters can be made so that a topic is compared with the levels of all of them.
        """
        if topic.encode() in self.routes or (topic[0] == "$" and self.shared.hooks.are_taken(first_level(topic))):
            return None
        matching = self._router.begin(topic)
        if matching is None:
            return None
        if matching.step(LEVELS_PER_TURN):
            self._routes.put(topic, self._route_of(topic, matching.found))
            return None
        self.shared.stats.long_matches += 1
        self._matching.append(matching)
        return matching

    def go_on(self, matching: Matching[Audience]) -> bool:
        """Go on with what `begin` has begun; True when `route` knows the receivers."""
        if not matching.step(LEVELS_PER_TURN):
            return False
        self.give_up(matching)
        if matching.topic.encode() not in self.routes:
            self._routes.put(matching.topic, self._route_of(matching.topic, matching.found))
        return True

    def give_up(self, matching: Matching[Audience]) -> None:
        """Forget what `begin` has begun."""
        if matching in self._matching:
            self._matching.remove(matching)

    def _taken_route(self, level: str) -> Route:
        """Return one route for all topics below a level that a plugin takes, which may be any number."""
        route = self.taken.get(level.encode())
        if route is None:
            route = self.taken[level.encode()] = Route(f"{level}/", [], (), self.shared.hooks)
        return route

    def heard(self, topic: str) -> bool:
        """Return True if a subscriber would get a message of a topic; remembers nothing of it."""
        return self._router.heard(topic)

    def heard_below(self, level: str) -> bool:
        """Return True if a subscriber would get some message of a `$…` topic with this first level."""
        return self._router.heard_below(level)

    def _resolve(self, topic: str) -> Route:
        found = self._router.match(topic)
        return self._made(topic, found)

    def _route_of(self, topic: str, found: list[Audience]) -> Route:
        """Return the route of a topic to those with a wildcard in their filter, and those without."""
        exact = self._router.exact(topic)
        # One that came while it was matched may be there twice.
        return self._made(topic, list(dict.fromkeys(found if exact is None else [*found, exact])))

    def _made(self, topic: str, found: list[Audience]) -> Route:
        targets: dict[Session, Target] = {}
        groups: list[SharedGroup] = []
        for audience in found:
            groups.extend(audience.groups.values())
            for session, subscription in audience.members.items():
                known = targets.get(session)
                if known is None:
                    targets[session] = Target(session, subscription)
                else:
                    known.merge(subscription)
        return Route(topic, list(targets.values()), tuple(groups), self.shared.hooks)

    # -- delivery of any message

    def to_keep(self, message: Message, chosen: Mapping[str, str] = NOBODY) -> list[Copy] | None:
        """Return the copies of a QoS 1 or 2 message that must be stored before it is delivered; None: there are none.

        Members of shared groups are chosen now: the list has a copy for each group with a durable member, also if the
        one who gets it is not durable. `chosen` says who was chosen for this very message before.
        """
        route = self.route(message.topic)
        if not route.kept or not message.qos:
            return None
        copies: list[Copy] = []
        for target in route.targets:
            if target.session.durable is None:
                continue
            if target.no_local and message.publisher == target.session.client.client_id:
                if target.own is None:
                    continue
                target = target.own  # noqa: PLW2901 - what is left of it
            qos = min(message.qos, target.qos)
            if qos:
                retain = message.retain and target.retain_as_published
                copies.append(Copy(target.session, qos, retain, target.identifiers))
        for group in route.groups:
            copy = self.choose(group, message, again=chosen.get(group.text, "")) if group.durable else None
            if copy is not None:
                copies.append(copy)
        return copies

    def publish(self, message: Message, now: float, kept: list[Copy] | None = None) -> int:
        """Deliver a message to all receivers; return how many. What is in `kept` has gone through the store."""
        route = self.route(message.topic)
        if not route.count and not kept:
            self._unheard(message)
            return 0
        qos = message.qos
        if kept is not None:
            for copy in kept:
                if copy.group is not None and (copy.session.durable is None or not copy.qos):
                    if copy.session.ended:
                        self.share(copy.group, message, now)  # it has left while the message was stored
                    else:
                        self.shared.stats.routed += 1
                        self.offer(message, copy, now)
        for version, qos0, qos1, qos2 in (
            (4, route.v3_qos0, route.v3_qos1, route.v3_qos2),
            (5, route.v5_qos0, route.v5_qos1, route.v5_qos2),
        ):
            for granted, receivers in ((0, qos0), (1, qos1), (2, qos2)):
                if receivers:
                    self._send_plain(message, version, min(qos, granted), receivers, route, now)
        for target in route.rest:
            self._send_target(message, target, now)
        for group in route.groups:
            if kept is None or not group.durable:
                self.share(group, message, now)
        return route.count or len(kept or ())

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

    def _send_target(self, message: Message, target: Target, now: float) -> None:
        session = target.session
        if target.no_local and message.publisher == session.client.client_id:
            if target.own is None:
                return  # [MQTT-3.8.3-3]
            target = target.own
        qos = min(message.qos, target.qos)
        if qos and session.durable is not None:
            return  # it has gone through the store
        retain = message.retain and target.retain_as_published
        if target.identifiers:
            message = noted(message, target.identifiers)
        self.shared.stats.routed += 1
        session.offer(frame_of(message, session.version, qos, now, retain=retain, identifiers=target.identifiers))

    def share(self, group: SharedGroup, message: Message, now: float) -> None:
        """Give a message to one member of a group."""
        copy = self.choose(group, message)
        if copy is None:
            self._unheard(message)
            return
        self.shared.stats.routed += 1
        self.offer(message, copy, now)

    def choose(
        self, group: SharedGroup, message: Message, without: Session | None = None, again: str = ""
    ) -> Copy | None:
        """Return a group member's copy of a message; None if there is no member. `again`: the member chosen before."""
        session = (
            next((member for member in group.members if member.client.client_id == again), None) if again else None
        )
        session = session or group.choose(message.topic, message.publisher, qos=message.qos, without=without)
        if session is None:
            return None
        subscription = group.members[session]
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        retain = message.retain and subscription.retain_as_published
        return Copy(session, min(message.qos, subscription.qos), retain, identifiers, group)

    def offer(self, message: Message, copy: Copy, now: float) -> None:
        """Give a receiver its copy."""
        session = copy.session
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

    def _unheard(self, message: Message) -> None:
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
                self.offer(origin, copy, now)
            else:
                session.drop(frame, "session_ended")

    # -- delivery from the fast path

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


def chosen_of(copies: Iterable[Copy]) -> dict[str, str]:
    """Return the member chosen in each shared group."""
    return {copy.group.text: copy.session.client.client_id for copy in copies if copy.group is not None}


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
