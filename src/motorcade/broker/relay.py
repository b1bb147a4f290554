"""Messages between the members of a cluster: what leaves this node, and what comes from the others.

    PUBLISH ─▶ stored for durable receivers, wherever they are ─▶ committed ─┬─▶ live receivers of this node
                                                                             ├─▶ peers with live receivers
                                                                             └─▶ peers with durable ones: hints
    from a peer ─▶ live receivers of this node only

Rule 1: durable receivers belong to the publisher's member: it stores for all of them, and tells the members that have
        them attached (`Hints`). No member stores what it gets from another one, and no publish hook runs there again.
Rule 2: a peer gets a message when the store has it for durable receivers. What the store refuses reached no client.
Rule 3: PUBACK and PUBREC wait until the peers have taken a message over (`confirm`); a silent peer is not waited for
        longer than the cluster's patience.
Rule 4: for a peer for which as much waits as may, messages of QoS 0 are dropped and counted, and publishers of others
        pause (`obstacle`). So they do while routes cannot be relied on (`Cluster.holds`).
Rule 5: what a peer has sent is delivered in its order. Where finding the receivers of a topic takes several turns of
        the event loop, everything that comes after it waits.
Rule 6: ids of QoS 2 messages that live receivers got are remembered, so that a publisher whose member has died may
        repeat its message elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from motorcade.broker import fastpath, items
from motorcade.broker.addressing import Addressing
from motorcade.broker.effects import AwaitMembers
from motorcade.broker.frames import message_of as frame_message
from motorcade.broker.frames import read_varint
from motorcade.broker.interest import OF_ONE_NODE, Interest
from motorcade.broker.outgoing import Hints, Outgoing
from motorcade.broker.pubsub import Copy, GroupPeer, RemoteReceivers, Route, Search, SharedGroup, Target
from motorcade.broker.remote_router import PeerGroup, RemoteRouter
from motorcade.broker.subscribers import AddressedClient, Subscriber, Subscribers
from motorcade.clock import time
from motorcade.commit import Commit, joined
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.recent import RecentSet
from motorcade.delivery.record import RecordError, message_of
from motorcade.extension.cluster import Cluster, Peer
from motorcade.storage.homes import CLIENT
from motorcade.storage.offers import body_of
from motorcade.storage.ports import Appended, Bound, Draft, Entry
from motorcade.tasks import Tasks

if TYPE_CHECKING:
    from motorcade.broker.session import Session
    from motorcade.broker.state import BrokerState

log = structlog.stdlib.get_logger("motorcade.relay")

GUIDS: Final = 65_536  #: ids of QoS 2 messages given to live receivers that are remembered, at least
GUID_MEMORY: Final = 3600.0  #: seconds for which they are, if they are not more
PUBLISHERS: Final = 10_000  #: publishers of peers that are remembered
MAX_TRIES: Final = 3  #: members that may return a message for a group, before it is dropped
MAX_BEHIND: Final = 1000  #: items of peers that wait because the receivers of a topic are being found
CLIENTS_PER_ITEM: Final = 1000  #: ids in one item


class Relay:
    """The broker's way to the other members, and theirs to it."""

    def __init__(
        self,
        cluster: Cluster,
        state: BrokerState,
        flush: Callable[[], None],
        supervisor: Tasks,
        addressing: Addressing | None = None,
    ) -> None:
        """Join: from now on clients of the peers get what is published here. `flush`: something is in `out`."""
        self.cluster = cluster
        self.addressing = addressing or Addressing()
        self.stats = state.stats
        self._state = state
        self._pubsub = pubsub = state.pubsub
        self._flush = flush
        self._supervisor = supervisor
        self.router = RemoteRouter(pubsub.routes_changed, pubsub.forget_topics)
        self.subscribers = Subscribers(pubsub.routes_changed, pubsub, _feeds_of(state))
        self.interest = Interest(lambda: self._soon(self._tell_interest), self.addressing)
        self._peers: dict[str, Peer] = {}
        self._told: dict[Peer, None] = {}  # peers that got something since the last `confirm`
        self._collected: Outgoing | None = None  # packets of the read under way, which go before anything else
        self._unhinted: dict[Peer, None] = {}  # peers that have to look by themselves as soon as they have room
        self._guids: RecentSet[bytes] = RecentSet(GUIDS)
        self._guids_since = time()
        self._publishers: dict[bytes, ClientInfo] = {}
        self._behind: deque[Iterator[None]] = deque()  # items that wait (rule 5); the first one is under way
        state.relay = pubsub.relay = self
        state.shared.clustered = True
        pubsub.interest = self.interest
        if state.store is not None:
            state.store.writer.relay = self
            state.store.writer.bound = bound_of(state)
            state.store.writer.keep_qos0 = state.session_options.store_qos0
        for session in state.registry.sessions.values():
            pubsub.tell_interest(session)
        handlers = (
            (items.INTEREST, self._on_interest),
            (items.LIVE, self._on_live),
            (items.MESSAGE, self._on_message),
            (items.GROUP, self._on_group),
            (items.RETURNED, self._on_returned),
            (items.HINT, self._on_hint),
            (items.DIRECT, self._on_direct),
            (items.LOOK, self._on_look),
            (items.ATTACHED, self._on_attached),
            (items.GONE, self._on_gone),
        )
        for kind, handler in handlers:
            cluster.on_item(kind, self._ordered(kind, handler))
        cluster.on_change(self.members_changed)
        pubsub.forget_topics()
        self.members_changed()

    def _soon(self, callback: Callable[[], None]) -> None:
        self._state.shared.soon(callback)

    # -- members

    def members_changed(self) -> None:
        """Members have come or gone: those that are new are told everything, those that are gone want nothing more."""
        peers = {peer.id: peer for peer in self.cluster.peers}
        gone = [peer for id_, peer in self._peers.items() if peers.get(id_) is not peer]
        new = [peer for id_, peer in peers.items() if self._peers.get(id_) is not peer]
        self._peers = peers
        for peer in gone:
            self._told.pop(peer, None)
            self._unhinted.pop(peer, None)
            self.router.leave(peer)
            self._pubsub.leave_groups(peer)
            self.subscribers.left(peer.id)
        if gone:
            self._soon(self._sweep)
            self.look_again()
        if new:
            self._tell_interest(known_to=[peer for peer in peers.values() if peer not in new])
            for peer in new:
                self.router.join(peer)
                self._welcome(peer)

    def _welcome(self, peer: Peer) -> None:
        for body in self.interest.whole():
            peer.send(items.INTEREST, body)
        attached = [
            session.client_id
            for session in self._state.registry.sessions.values()
            if session.link is not None and self.has_place(session)
        ]
        for at in range(0, len(attached), CLIENTS_PER_ITEM):
            peer.send(items.ATTACHED, items.encode(items.ClientsItem(attached[at : at + CLIENTS_PER_ITEM])))

    def _sweep(self) -> None:
        if self.router.sweep():
            self._soon(self._sweep)

    def look_again(self) -> None:
        """Have all durable sessions that are attached here look for what was stored for them: hints may be lost."""
        store = self._state.store
        if store is None:
            return
        sessions = self._state.registry.sessions.values()
        store.reader.look_again([session.durable for session in sessions if session.durable is not None])

    # -- what clients of this node want

    def _tell_interest(self, known_to: Iterable[Peer] | None = None) -> None:
        bodies = self.interest.flush()
        for peer in self._peers.values() if known_to is None else known_to:
            for body in bodies:
                peer.send(items.INTEREST, body)

    def known(self) -> Commit[None]:
        """Return a commit that is done when the peers know what clients of this node want now."""
        self._tell_interest()
        return self.cluster.known()

    def tell_place(self, client_id: str, *, here: bool) -> None:
        """Tell that the client of a durable session is connected here now, or is no more."""
        body = items.encode(items.ClientsItem([client_id]))
        for peer in self._peers.values():
            peer.send(items.ATTACHED if here else items.GONE, body)

    def has_place(self, session: Session) -> bool:
        """Return True if peers keep where the client of a session is: it has subscriptions that they know."""
        return session.durable is not None and (not self.addressing or self._has_known(session))

    def _has_known(self, session: Session, besides: str = "") -> bool:
        """Return True if a session has a subscription that peers know, besides this one."""
        covers, client_id = self.addressing.covers, session.client_id
        return any(text != besides and not covers(client_id, text) for text in session.subscriptions)

    def keeps_to_itself(self, session: Session, filters: Iterable[str]) -> bool:
        """Return True if peers hear nothing of these filters: SUBACK and UNSUBACK need not wait for them."""
        if not self.addressing or session.durable is None:
            return False
        return all(self.addressing.covers(session.client_id, text) for text in filters)

    def noted(self, session: Session, text: str, *, here: bool) -> None:
        """Tell where the client of a session is with the first subscription that peers know, and without the last."""
        if not self.addressing or session.durable is None or self.addressing.covers(session.client_id, text):
            return
        if (session.online or not here) and not self._has_known(session, besides=text):
            self.tell_place(session.client_id, here=here)

    # -- routes

    def elsewhere(self, topic: str, groups: Sequence[SharedGroup], search: Search | None) -> RemoteReceivers | None:
        """Return who gets messages of a topic on other nodes."""
        if topic.startswith(OF_ONE_NODE):
            return None
        links = self.router.resolve(topic, search.peers if search is not None else None)
        named = self.addressing.clients_of(topic)
        targets: dict[Subscriber, Target[Subscriber]] = {}
        for subscriber, options in self.subscribers.found(topic, search.subscribers if search is not None else None):
            known = targets.get(subscriber)
            if subscriber.client_id in named:
                continue
            if known is None:
                targets[subscriber] = Target(subscriber, options)
            else:
                known.merge(options)
        spread = tuple(group for group in groups if group.spread)
        if links[0] is None and not targets and not spread and not named:
            return None
        addressed = tuple(map(AddressedClient, named))
        here = self._state.registry.sessions.__contains__
        return RemoteReceivers(links, tuple(targets.values()), spread, addressed, self.asleep, here)

    def heard(self, topic: str) -> bool:
        """Return True if a client elsewhere would get a message of a topic."""
        if topic.startswith(OF_ONE_NODE):
            return False
        if self.addressing.clients_of(topic):
            return True  # only the store knows
        return self.router.resolve(topic)[0] is not None or self.subscribers.table.heard(topic)

    def heard_below(self, level: str) -> bool:
        """Return True if a client elsewhere would get some message of a `$…` topic with this first level."""
        if level == OF_ONE_NODE[:-1]:
            return False
        return self.router.table.heard_below(level) or self.subscribers.table.heard_below(level)

    def asleep(self, subscriber: Subscriber) -> bool:
        """Return True if a session is attached to no member that is alive, as far as is known here."""
        return self.subscribers.place(subscriber.client_id) not in self._peers

    # -- messages out

    def obstacle(self, topic: str) -> AwaitMembers | None:
        """Return what a message of QoS 1 or 2 has to wait for before it is routed (rule 4)."""
        if not self.cluster.holds:
            return AwaitMembers(self.cluster.again(), view=True)
        live = self._pubsub.route(topic).live
        peer = live.full if live is not None else None
        return None if peer is None else AwaitMembers(peer.room(), view=False)

    def confirm(self) -> Commit[None] | None:
        """Return the commit of all that was sent since the last call; None: nothing that needs one (rule 3)."""
        if not self._told:
            return None
        told, self._told = self._told, {}
        commits = [peer.confirm() for peer in told]
        return commits[0] if len(commits) == 1 else joined(commits)

    def read_over(self) -> None:
        """Nothing is collected any more."""
        self._collected = None

    def outgoing(self, client: ClientInfo, version: int, data: bytes) -> Outgoing:
        """Return what collects packets of one read for the peers."""
        self._collected = Outgoing(self, items.live_head(client, version), data)
        return self._collected

    def send_packets(self, links: PeerGroup, body: bytes, count: int) -> None:
        """Send packets as they came in."""
        for peer in links.peers:
            self._send(peer, items.LIVE, body, count, droppable=links.droppable)

    def _send(self, peer: Peer, kind: str, body: bytes, count: int = 1, *, droppable: bool) -> None:
        if self._collected is not None:
            self._collected.flush()
        if droppable and peer.full:
            self.stats.cluster_dropped[kind] += count
            return
        self.stats.cluster_sent[kind] += count
        peer.send(kind, body, droppable=droppable)
        if not droppable:
            self._told[peer] = None

    def forward(self, message: Message, elsewhere: RemoteReceivers, now: float) -> int:
        """Send a message to the peers that want it live, and keep it for sessions that sleep; to how many it goes."""
        count = 0
        links = elsewhere.live if message.qos else elsewhere.all
        if links is not None:
            body = self._encoded(items.MESSAGE, message)
            for peer in links.peers if body else ():
                self._send(peer, items.MESSAGE, body, droppable=links.droppable)
                count += 1
        sleepers: list[Copy] = []
        for target in elsewhere.subscribers:
            wanted = target.towards(message.publisher)
            if wanted is not None and not min(message.qos, wanted.qos) and self.asleep(target.session):
                retain = message.retain and wanted.retain_as_published
                sleepers.append(Copy(target.session, 0, retain, wanted.identifiers))
        if sleepers:
            self._keep(message, sleepers, now)
        away = [] if message.qos else [Copy(client, 0, message.retain, ()) for client in elsewhere.away()]
        if away:
            self._offer(message, away, now)
        return count + len(sleepers) + len(away)

    def _encoded(self, kind: str, message: Message, group: str = "", tries: int = 0) -> bytes:
        """Return a message as bytes; none if it has something that cannot be written."""
        try:
            return items.RELAY.encode(message, group, tries)[0]
        except RecordError as error:
            log.error("message_not_sent", topic=message.topic[:256], error=str(error))  # noqa: TRY400 - a plugin's fault
            self.stats.cluster_dropped[kind] += 1
            return b""

    def _keep(self, message: Message, copies: list[Copy], now: float) -> None:
        """Store a QoS 0 message for sessions that sleep, unless the store has as much to do as it may."""
        self.stats.routed += len(copies)
        store = self._state.store
        why = ""
        if store is None or not self._state.session_options.store_qos0:
            why = "offline_qos0"
        elif store.writer.full:
            why = "queue_full"
        if store is None or why:
            for copy in copies:
                self.forgo(copy.session.client_id, message, why)
        else:
            store.writer.accept(message, copies, now)

    def _offer(self, message: Message, copies: list[Copy], now: float) -> None:
        """Offer a QoS 0 message to clients that the topic names, unless the store has as much to do as it may."""
        self.stats.routed += len(copies)
        store = self._state.store
        if store is not None and not store.writer.full:
            store.writer.accept(message, copies, now)
            return
        for copy in copies:
            self.forgo(copy.session.client_id, message, "queue_full")

    def forgo(self, client_id: str, message: Message, why: str) -> None:
        """Count a message that a session which is not attached here does not get."""
        self.stats.dropped[why] += 1
        chain = self._state.hooks.message_dropped
        if chain is not None:
            chain.notify(ClientInfo(client_id), message, why)

    def offer(self, message: Message, copy: Copy, member: Subscriber | GroupPeer, now: float) -> None:
        """Give a member of a group that is not here its copy, or have a peer choose one."""
        if isinstance(member, GroupPeer):
            if self._peers.get(member.peer.id) is member.peer:
                self._send_to_group(message, copy, member.peer)
            elif copy.group is not None:
                self._pubsub.share(copy.group, message, now)  # it is gone since it was chosen
        elif copy.qos and self._state.store is not None:
            self._state.store.writer.accept(message, [copy], now)
        else:
            self.stats.routed -= 1  # it counts there
            self._keep(message, [copy], now)

    def _send_to_group(self, message: Message, copy: Copy, peer: Peer) -> None:
        tries = message.headers.get("tries")
        group = copy.group.text if copy.group is not None else ""
        body = self._encoded(items.GROUP, message, group, tries if isinstance(tries, int) else 0)
        if not body:
            return
        self._send(peer, items.GROUP, body, droppable=not message.qos)
        if message.qos == 1 and copy.group is not None:
            peer.confirm().then(partial(self._share_again, peer, copy.group, message))

    def _share_again(self, peer: Peer, group: SharedGroup, message: Message) -> None:
        """Choose again if a peer has died instead of confirming a message for a group."""
        if self.cluster.peer(peer.id) is peer:
            return
        if self._peers.get(peer.id) is peer:
            self.members_changed()  # it would be chosen again
        self._pubsub.share(group, message, time())
        self._flush()

    def unmatched(self, message: Message) -> None:
        """Count a message that the client which its topic names does not want; perhaps it was for no other."""
        self.stats.withdrawn["unmatched"] += 1
        route = self._pubsub.route(message.topic)
        elsewhere = route.elsewhere
        others = elsewhere is None or elsewhere.all or elsewhere.subscribers or len(elsewhere.addressed) > 1
        if not (route.count or others):
            self._pubsub.unheard(message)

    def give(self, client: AddressedClient, message: Message, answer: Appended) -> None:
        """Have the member that has a client attached give it a message at QoS 0, unless it does so anyway."""
        found, member = answer.offered, answer.attached
        route = self._pubsub.route(message.topic)
        links = route.elsewhere and (route.elsewhere.live if message.qos else route.elsewhere.all)
        peer = self._peers.get(member)
        self.stats.withdrawn["elsewhere"] += 1
        if found is None or member == self.cluster.me or (links and peer in links.peers):
            return
        if peer is None:
            self.stats.cluster_dropped[items.DIRECT] += 1  # it is dead, or not known yet
            return
        record = self._encoded(items.DIRECT, message)
        if record:
            item = items.DirectItem(client.client_id, found.retained, found.identifiers, record)
            self._send(peer, items.DIRECT, items.encode(item), droppable=True)

    def stored(self, client: AddressedClient, answer: Appended, draft: Draft) -> None:
        """Tell the member that has a client attached of an entry, which may be this one; `draft`: as it was offered."""
        member, found = answer.attached, answer.offered
        if not member or found is None:
            return
        entries = [(client.client_id, answer.position, answer.over)]
        body = body_of(draft.body, found)
        if member == self.cluster.me:
            self.hint_here(entries, body, draft.payload)
        else:
            self.send_hint(member, entries, Draft(body, draft.payload))

    def hints(self, draft: Draft) -> Hints:
        """Return what collects the members that have to know of an entry."""
        return Hints(self, draft)

    def send_hint(self, member: str, entries: list[tuple[str, int, bool]], draft: Draft) -> None:
        """Tell a member what is in mailboxes of clients that it has attached."""
        peer = self._peers.get(member)
        if peer is None or peer.full:
            self.stats.cluster_dropped[items.HINT] += len(entries)
            if peer is not None and peer not in self._unhinted:
                self._unhinted[peer] = None
                peer.room().then(partial(self._let_look, peer))
            return
        self.stats.cluster_sent[items.HINT] += len(entries)
        peer.send(items.HINT, items.encode(items.HintItem(entries, draft.body, draft.payload)))

    def _let_look(self, peer: Peer) -> None:
        """Have a peer look for what it was not told of, now that it has room."""
        if peer in self._unhinted:
            del self._unhinted[peer]
            peer.send(items.LOOK, b"")

    # -- messages in

    def _ordered(self, kind: str, handler: Callable[[Peer, bytes], Iterator[None]]) -> Callable[[Peer, bytes], None]:
        """Return a handler of items that keeps their order (rule 5), and survives a defect in one."""

        def handle(peer: Peer, body: bytes) -> None:
            steps = self._survived(kind, handler(peer, body))
            if self._behind:
                self._behind.append(steps)
                while len(self._behind) > MAX_BEHIND:
                    self._finish(self._behind.popleft())
            elif next(steps, self) is None:
                self._behind.append(steps)
                self._soon(self._catch_up)

        return handle

    def _survived(self, kind: str, steps: Iterator[None]) -> Iterator[None]:
        try:
            yield from steps
        except Exception as error:  # noqa: BLE001 - the link, and what comes after it, must go on
            self._supervisor.note(f"relay.{kind}", error)

    def _finish(self, steps: Iterator[None]) -> None:
        for _ in steps:
            pass

    def _catch_up(self) -> None:
        """Go on with items that wait, until one needs another turn again."""
        behind = self._behind
        while behind:
            if next(behind[0], self) is None:
                self._soon(self._catch_up)
                return
            behind.popleft()

    def _route(self, topic: str) -> Iterator[None]:
        """Find the receivers of a topic; in several turns, if that takes so many."""
        search = self._pubsub.begin(topic)
        if search is None:
            return
        try:
            yield
            while not self._pubsub.go_on(search):
                yield
        finally:
            self._pubsub.give_up(search)

    def _on_interest(self, peer: Peer, body: bytes) -> Iterator[None]:
        if self._peers.get(peer.id) is not peer:
            self.members_changed()  # this one may not have been told of yet
        if self._peers.get(peer.id) is not peer:
            return
        item = items.decode_interest(body)
        for filter_, flags in item.filters:
            self.router.tell(peer, filter_, flags)
        for text, live, durable in item.groups:
            self._pubsub.count_group(text, peer, live, durable)
        yield from ()

    def _on_attached(self, peer: Peer, body: bytes) -> Iterator[None]:
        for client_id in items.decode_clients(body).clients:
            self.subscribers.move(client_id, peer.id)
        yield from ()

    def _on_gone(self, peer: Peer, body: bytes) -> Iterator[None]:
        for client_id in items.decode_clients(body).clients:
            self.subscribers.leave(client_id, peer.id)
        yield from ()

    def _on_message(self, _: Peer, body: bytes) -> Iterator[None]:
        message = message_of(items.RELAY.decode(body))
        self.stats.cluster_received[items.MESSAGE] += 1
        now = time()
        if message.qos == 2 and not self.is_first(message, now):
            return
        yield from self._route(message.topic)
        self._pubsub.deliver(message, self._pubsub.route(message.topic), now)
        self._flush()

    def _on_group(self, peer: Peer, body: bytes) -> Iterator[None]:
        record = items.RELAY.decode(body)
        self.stats.cluster_received[items.GROUP] += 1
        message, now = message_of(record), time()
        if message.qos == 2 and not self.is_first(message, now, record.group):
            return
        group = self._pubsub.group(record.group)
        if group is not None and self._pubsub.share_here(group, message, now):
            self._flush()
        else:
            self.stats.cluster_sent[items.RETURNED] += 1
            peer.send(items.RETURNED, body, droppable=not message.qos)
        yield from ()

    def _on_returned(self, _: Peer, body: bytes) -> Iterator[None]:
        """Choose another member. At QoS 2 one may have it already, if its publisher has repeated it elsewhere."""
        record = items.RELAY.decode(body)
        self.stats.cluster_received[items.RETURNED] += 1
        message = message_of(record)
        group = self._pubsub.group(record.group)
        if message.qos == 2 or group is None or record.tries >= MAX_TRIES:
            self.stats.cluster_dropped[items.GROUP] += 1
            return
        message.headers["tries"] = record.tries + 1
        self._pubsub.share(group, message, time())
        self._flush()
        yield from ()

    def _on_hint(self, _: Peer, body: bytes) -> Iterator[None]:
        item = items.decode_hint(body)
        self.hint_here(item.entries, item.body, item.payload)
        yield from ()

    def is_here(self, receiver: Session | Subscriber | GroupPeer) -> bool:
        """Return True if this is the session that serves its client here."""
        return self._state.registry.sessions.get(receiver.client_id) is receiver

    def hint_here(self, entries: Sequence[tuple[str, int, bool]], body: bytes, payload: bytes) -> None:
        """Take in what was stored for clients that are attached to this member, as the store says."""
        store = self._state.store
        if store is None:
            return
        sessions = self._state.registry.sessions
        online: list[Session] = []
        for client_id, position, over in entries:
            session = sessions.get(client_id)
            queue = session.durable if session is not None else None
            if session is None or queue is None:
                self.stats.cluster_dropped[items.HINT] += 1  # it is elsewhere by now, and finds the entry there
                if store.attachments is not None:
                    store.attachments.hinted(client_id, position)
                continue
            self.stats.cluster_received[items.HINT] += 1
            queue.hinted(position, Entry(position, body, payload, b"", 0.0, 0.0, 0))
            if over:
                queue.store.reader.trim(queue)
            if queue.open:
                online.append(session)
        if online:
            store.writer.pump(online, time())

    def _on_direct(self, _: Peer, body: bytes) -> Iterator[None]:
        item = items.decode_direct(body)
        session = self._state.registry.sessions.get(item.client_id)
        if session is None or not session.online:
            self.stats.cluster_dropped[items.DIRECT] += 1
            return
        self.stats.cluster_received[items.DIRECT] += 1
        self.stats.routed += 1
        message = message_of(items.RELAY.decode(item.record))
        self._pubsub.offer(message, Copy(session, 0, item.retained, item.identifiers), time())
        self._flush()
        yield from ()

    def _on_look(self, _peer: Peer, _body: bytes) -> Iterator[None]:
        self.look_again()
        yield from ()

    def is_first(self, message: Message, now: float, group: str = "") -> bool:
        """Remember that live receivers of this node get a QoS 2 message; False if they got it before (rule 6).

        A plugin may have published it again to another topic.
        """
        if not message.guid:
            return True
        guids = self._guids
        guid = message.guid + f"{message.topic}\0{group}".encode()
        if guid in guids:
            return False
        if now - self._guids_since >= GUID_MEMORY:
            guids.turn()
            self._guids_since = now
        elif guids.full:
            self.stats.cluster_forgotten += guids.turn()
            self._guids_since = now
        guids.add(guid)
        return True

    def _on_live(self, _: Peer, body: bytes) -> Iterator[None]:
        """Deliver PUBLISH packets to live receivers, in runs, as the fast path does."""
        i = items.head_size(body)
        client = self._publisher(body[:i])
        n = len(body)
        v5 = client.version == 5
        routes = self._pubsub.routes
        while i < n:
            length, start = read_varint(body, i + 1)
            end = start + length
            stop = start + 2 + (body[start] << 8 | body[start + 1])
            topic = body[start + 2 : stop]
            route = routes.get(topic)
            if route is None:
                name = topic.decode()
                yield from self._route(name)
                route = self._pubsub.route(name)
            last = end
            if body[i] == 0x30 and not route.single:
                head, size = body[i:stop], end - i
                while body.startswith(head, last) and last + size <= n:
                    last += size
            self._deliver(route, body, i, stop, end, last, client, v5=v5)
            i = last
        self._flush()

    def _deliver(
        self, route: Route, body: bytes, i: int, stop: int, end: int, last: int, client: ClientInfo, *, v5: bool
    ) -> None:
        """Deliver equal packets body[i:last] to the live receivers of this node."""
        qos, size = body[i] >> 1 & 3, end - i
        count = (last - i) // size
        stats = self.stats
        stats.cluster_received[items.LIVE] += count
        skip = stop + 2 if qos else stop
        if self._state.observed or route.single or (qos and route.kept):
            now = time()
            for at in range(i, last, size):
                message = frame_message((body[i:stop], body[at + skip - i : at + size], client), client.version)
                self._pubsub.deliver(message, route, now)
            return
        dirty = self._state.shared.dirty
        if not qos:
            went = fastpath.deliver_qos0(route, body, i, stop, end, last, client, dirty, v5=v5)
        else:
            went = fastpath.deliver_qos1(route, (body[i:stop], body[skip:end], client), v5, dirty)
        stats.routed += count * (len(route.v3_all) + len(route.v5_all))
        stats.packets_sent += went
        stats.publish_sent += went
        stats.publish_bytes_sent += went * (end - skip - v5)

    def _publisher(self, head: bytes) -> ClientInfo:
        found = self._publishers.get(head)
        if found is None:
            if len(self._publishers) >= PUBLISHERS:
                self._publishers.clear()
            found = self._publishers[head] = items.publisher_of(head)
        return found


def bound_of(state: BrokerState) -> Bound:
    """Return how large mailboxes may grow whose client's window is not known here."""
    options = state.session_options
    return Bound(options.queue + options.window if options.queue else 0, options.queue_bytes)


def _feeds_of(state: BrokerState) -> Callable[[str], int]:
    """Return what tells the feed of a client's cell."""
    if state.store is None:
        return lambda _: 0
    feeds = state.store.store.feeds
    return lambda client_id: feeds.feed_of(CLIENT + client_id)
