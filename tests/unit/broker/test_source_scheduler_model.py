"""The scheduler under everything that can happen to it, against what sources and clients may rely on.

A client with a few subscriptions, and sources of all sorts behind them: that have their messages at once or fetch them
first, of one filter or several, that are asked again before a message leaves, that take messages back when the client
goes, that give too much, raise, end themselves or want to be made anew. Kinds of sources come and go; the client
acknowledges, refuses, breaks, is taken over, comes back with another window or version, or not at all; live messages
come beside, through the queue or, with a store, through the mailbox. At all times:

    no more in flight than the client takes, nor than a source may have
    no more waits than `source_buffer` and one of each source (and what was given beyond what was asked for)
    what a source may give is never less than what is left of the promise before; who was told 0 hears of room
    what comes was given, and not withdrawn since by an UNSUBSCRIBE or the end of its source
    messages of one source come in the order in which it gave them, behind those that are repeated
    QoS 2 comes once, QoS 1 again only with DUP, and neither after its source has heard of the acknowledgement
    a source hears once what became of each message, and nothing after `terminate`; nothing goes into a full socket
    turn and turn about: while somebody waits and could send, each of the others sends `PASSED` messages at most

And in the end, when everybody is back and acknowledges: what sources have has arrived. And when the client has
unsubscribed, nothing is left of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.session import Session
from motorcade.broker.source_scheduler import MAX_BACKOFF, SourceScheduler
from motorcade.broker.source_slot import SourceSlot
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import (
    RECREATE,
    ROOM,
    Ack,
    Answer,
    Destroy,
    FastFeed,
    FastSource,
    Given,
    Source,
    SourceType,
    Why,
)
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Turns, standing
from tests.unit.broker.sources import fatal
from tests.unit.broker.world import Guest, World, often

EXPIRY = 50
SMALL = 60  #: bytes of a packet that some connections take
BIG = 80  #: bytes of a payload that does not fit into it
GREED = 3  #: messages that some sources give beyond what they may
STOCKS = 3
PASSED = 2  #: messages that one may send while another waits; one, unless that one has just come from the other line
GRANTED = (0, 1, 2)  #: every kind has a filter for each QoS


class Boom(Exception):  # noqa: N818 - it goes off
    """A source fails."""


@dataclass(eq=False)
class Item:
    """A message that a source has."""

    life: Life = field(repr=False)
    message: Message
    qos: int  #: at which it is sent
    withdrawn: bool  #: it is taken back when it is about to be sent
    live: bool = False  #: it was given, and is not withdrawn
    seq: int = 0  #: when it was given, among all
    agent: Agent | None = field(default=None, repr=False)  #: by whom
    connection: int = 0  #: and in which connection
    pardons: int = 0  #: times after which it may come anew
    times: int = 0  #: times it has come without DUP
    shown: int = 0  #: times it has come, as the protocol counts
    shown_in: int = 0  #: the connection in which it has come last
    received: bool = False  #: the client has said so with PUBREC
    acked: ReasonCode | None = None  #: by the client
    lingers: bool = False  #: its filter is gone, but its kind wants to hear of it even after a return
    heard: bool = False  #: its source knows what became of it
    dropped: str = ""


@dataclass(eq=False)
class Life:
    """What one filter has to get from one kind, from a subscription to its end."""

    stock: Stock
    filter: str
    items: list[Item] = field(default_factory=list)
    todo: deque[Item] = field(default_factory=deque)  #: to be given
    over: bool = False
    agent: Agent | None = None


@dataclass(frozen=True)
class Traits:
    """What sort of source it is."""

    qos: int
    delay: float | None  #: seconds that fetching takes; None: messages are there at once
    multi: bool
    generic: bool
    renew: bool
    release: bool
    lingers: bool
    most: int  #: messages in flight per instance; 0: any number
    asks: bool
    runs: bool  #: hears of several deliveries at once
    greedy: bool
    retries: bool  #: gives refused messages again


class Stock:
    """A kind of source, and all that its instances share."""

    def __init__(self, world: Machine, number: int, traits: Traits) -> None:
        self.world = world
        self.name = f"k{number}"
        self.traits = traits
        self.agents: list[Agent] = []
        self.lives: dict[str, Life] = {}  #: by filter; the present ones
        self.registered = False
        self.say: str | None = None  #: what the next answer is instead of messages
        self.fails: str | None = None  #: the callback that raises when it is called next
        self.failures = 0  #: times one has raised
        self.kind = SourceType(
            self.name,
            lambda feed: SORTS[traits.asks, traits.runs](feed, self),
            "test",
            prefix=f"{self.name}/",
            multi_topic=traits.multi,
            generic=traits.generic,
            renew=traits.renew,
            release=traits.release,
            lingers=traits.lingers,
            max_unacked=traits.most,
        )

    def begin(self, filter_: str) -> Life:
        """A filter has something to get from now on."""
        self.end(filter_)
        life = self.lives[filter_] = Life(self, filter_)
        self.world.fill(life, self.world.backlog)
        return life

    def end(self, filter_: str) -> None:
        life = self.lives.pop(filter_, None)
        if life is not None:
            life.over = True

    def fail(self, callback: str) -> None:
        if self.fails == callback:
            self.fails = None
            self.failures += 1
            raise Boom(callback)


class Agent(Source):
    """An instance that keeps to the contract, but for what its traits and the machine say."""

    feed: FastFeed

    def __init__(self, feed: FastFeed, stock: Stock) -> None:
        super().__init__(feed)
        self.stock = stock
        self.world = stock.world
        self.over = False
        self.excused = False  #: it ends by its own fault or wish
        self.lives: dict[str, Life] = {}
        self.all_lives: list[Life] = []
        self.fetching: list[Item] = []
        self.left = 0  #: of the promise
        self.told = -1
        self.last = 0
        stock.agents.append(self)

    @property
    def slot(self) -> SourceSlot | None:
        slots = self.world.slots()
        return next((slot for slot in slots if slot.source is self), None)

    @fatal
    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        assert not self.over
        filter_ = subscription.filter
        assert self.stock.registered and filter_ in self.world.car.filters
        self.excused = True  # until it has taken the filter
        self.stock.fail("make")
        if self.feed.kept is None:
            self.feed.kept = {}
        life: Life | None = self.feed.kept.get(filter_)
        if life is not None and life.over:  # it was unsubscribed while there was no instance to hear of it
            life = None
        if life is not None:
            self._compare(life, why)
        elif why in (Why.RESUMED, Why.RECREATED):
            assert filter_ not in self.stock.lives, "what was kept is gone"
        if why is Why.RESUMED:
            offer = (self.world.car.connections, self.stock, filter_)
            assert offer not in self.world.offers, "it was offered twice"
            self.world.offers.add(offer)
        try:
            self.stock.fail("subscribe")
        except Boom:
            self.stock.end(filter_)
            self.feed.kept.pop(filter_, None)
            raise
        if self.stock.say == "no":
            self.stock.say = None
            self.stock.end(filter_)
            self.feed.kept.pop(filter_, None)
            return False
        self.excused = False
        if life is None:
            life = self.feed.kept[filter_] = self.stock.begin(filter_)
        life.agent = self
        self.lives[filter_] = life
        self.all_lives.append(life)
        self.feed.send("news")
        return True

    def _compare(self, life: Life, why: Why) -> None:
        """What an earlier instance had in flight is still there, or was taken back while there was none."""
        flying: list[Item] = [given.tag for given in self.feed.inflight if given.filter == life.filter]
        assert all(item.live and not item.heard for item in flying)
        taken = [item for item in life.items if item.live and not item.heard and item not in flying]
        release = self.stock.traits.release and why is Why.RESUMED
        assert release or not taken, "the session has forgotten what is in flight"
        assert not release or all(item.acked is not None or not item.qos for item in flying), "it was not taken back"
        for item in reversed(taken):
            item.live = False
            item.pardons += 1
            life.todo.appendleft(item)

    @fatal
    def unsubscribe(self, filter_: str, why: Why) -> None:
        assert not self.over
        life = self.lives[filter_]
        back = self._withdraw(filter_)
        if self.stock.traits.release and why in (Why.DISCONNECTED, Why.ENDED):
            back[:0] = self.take_back(filter_)
        life.todo.extendleft(reversed(back))
        assert why is not Why.ENDED or not self.world.session.expiry
        assert why is not Why.DISCONNECTED or self.world.session.expiry
        assert why is not Why.UNSUBSCRIBED or filter_ not in self.world.car.filters
        if why is Why.UNSUBSCRIBED:
            for given in self.feed.inflight:
                given.tag.lingers |= given.filter == filter_ and self.stock.traits.lingers and len(self.lives) == 1
            self.forget(filter_)
        self.stock.fail("unsubscribe")

    def take_back(self, filter_: str) -> list[Item]:
        """What is in flight is not this client's any more."""
        flying: list[Item] = [given.tag for given in self.feed.inflight if given.filter == filter_]
        for item in flying:
            item.live = False
            item.pardons += 1
        return flying

    def _withdraw(self, filter_: str) -> list[Item]:
        """What was given for a filter or is being fetched, and must not come any more."""
        unsent: list[Item] = [given.tag for given in self.feed.unsent if given.filter == filter_]
        for item in unsent:
            item.live = False
        fetching = [item for item in self.fetching if item.life.filter == filter_]
        self.fetching = [item for item in self.fetching if item.life.filter != filter_]
        return unsent + fetching

    def forget(self, filter_: str) -> None:
        self.stock.end(filter_)
        self.feed.kept.pop(filter_, None)
        del self.lives[filter_]

    @fatal
    def terminate(self) -> None:
        assert not self.over
        self.over = True
        if not self.excused and self.stock.registered:
            assert not self.world.session.greeted or not self.feed.inflight, "it ends before the last acknowledgement"
            unheard = [item for life in self.all_lives for item in life.items if item.acked is not None]
            assert all(item.heard for item in unheard if item.live), "an acknowledgement was not told"
        for life in self.all_lives:
            if life.agent is self:
                life.agent = None
        self.stock.fail("terminate")

    @fatal
    def info(self, what: object, desired: int) -> Answer:
        assert not self.over
        self._hear(desired)
        if what is ROOM:
            assert desired > 0
        try:
            self.stock.fail("info")
        except Boom:
            self.excused = True
            raise
        if isinstance(what, list):
            rows = [item for item in what if item in self.fetching]
            self.fetching = [item for item in self.fetching if item not in rows]
            if rows:
                return self._give(rows)
        return self._answer(desired)

    @fatal
    def delivered(self, given: Given, ack: Ack) -> Answer:
        assert not self.over
        self.outcome(given, ack)
        return self.afterwards(ack)

    def outcome(self, given: Given, ack: Ack) -> None:
        """What became of one message."""
        item = given.tag
        assert isinstance(item, Item) and item.life.stock is self.stock
        assert not item.heard, "it was told twice"
        item.heard = True
        item.dropped = ack.dropped
        self._hear(ack.desired)
        if ack.dropped:
            self._judge_drop(item, ack)
        elif item.qos:
            assert item.acked == ack.reason, "it was not acknowledged so"
        else:
            self.world.written.append(item)
        if ack.refused and not ack.dropped and self.stock.traits.retries and not item.life.over:
            item.live = item.heard = item.received = False
            item.acked = None
            item.pardons += 1
            item.life.todo.appendleft(item)

    def afterwards(self, ack: Ack) -> Answer:
        try:
            self.stock.fail("delivered")
        except Boom:
            self.excused = True
            raise
        return self._answer(ack.desired)

    def _judge_drop(self, item: Item, ack: Ack) -> None:
        item.live = False
        if ack.dropped == "withdrawn":
            assert item.withdrawn and self.stock.traits.asks
        elif ack.dropped == "expired":
            assert item.message.expired(self.world.node.clock.now)
        else:
            assert ack.dropped == "too_large" and len(item.message.payload) >= BIG and self.world.car.was_small

    def _hear(self, desired: int) -> None:
        leaving = not self.feed.subscriptions
        if self.world.session.greeted and not leaving:
            assert desired >= self.left, "the promise was broken"
            most = self.stock.traits.most
            if most:
                assert desired + len(self.feed.unsent) + len(self.feed.inflight) <= most + self._greed(most)
        else:
            assert desired == 0
        self.left = self.told = desired

    def _greed(self, most: int) -> int:
        return max(0, len(self.feed.unsent) + len(self.feed.inflight) - most) if self.stock.traits.greedy else 0

    def _answer(self, desired: int) -> Answer:
        say = self.stock.say
        if say in ("recreate", "destroy", "destroy one") and self.feed.subscriptions:
            self.stock.say = None
            self.excused = True
            if say == "recreate":
                return RECREATE
            return self._destroy(list(self.lives)[: 1 if say == "destroy one" else None])
        greed = GREED if self.stock.traits.greedy and desired else 0
        items: list[Item] = []
        waiting = deque(life for life in self.lives.values() if life.todo)
        while waiting and len(items) + len(self.fetching) < desired + greed:
            life = waiting.popleft()  # filter by filter: what needs room in the window is mixed with what needs none
            items.append(life.todo.popleft())
            if life.todo:
                waiting.append(life)
        if not items or self.stock.traits.delay is None:
            return self._give(items)
        self.fetching += items
        if self.stock.traits.delay:
            self.feed.send_later(self.stock.traits.delay, items)
        else:  # as a task of a plugin does it, which knows nothing of the end of the source
            self.world.loop.call_later(self.stock.traits.delay, self.feed.send, items)
        return None

    def hand(self) -> None:
        """Give the next message of a filter at once, if that can be done."""
        for life in self.lives.values():
            if not life.todo or life.todo[0].withdrawn or self.fetching or self.feed.unsent:
                continue
            item = life.todo[0]
            before = item.live, item.seq, item.agent, item.connection
            (given,) = self._giving([item])
            if self.feed.hand(given):
                life.todo.popleft()
                assert item.qos and given in self.feed.inflight
            else:
                item.live, item.seq, item.agent, item.connection = before

    def _destroy(self, filters: list[str]) -> Answer:
        whole = len(filters) == len(self.lives)
        self.excused = whole
        for filter_ in filters:
            self._withdraw(filter_)
            self.forget(filter_)
        return Destroy() if whole else Destroy(filters)

    def _give(self, items: list[Item]) -> Answer:
        self.left = max(0, self.left - len(items))
        return self._giving(items) or None

    def _giving(self, items: list[Item]) -> list[Given]:
        for item in items:
            self.world.count += 1
            item.seq = self.world.count
            item.live = True
            item.agent = self
            item.connection = self.world.car.connections
        return [Given(item.message, item.life.filter, item) for item in items]


class AskedAgent(Agent, FastSource):
    """Is asked before a message leaves, and sees there who else waits."""

    asked: Item | None = None

    @fatal
    def sending(self, given: Given) -> Message | None:
        assert not self.over
        item: Item = given.tag
        assert item.live
        if item is not self.asked:  # it may be asked twice
            self.asked = item
            self.world.turn_of(self)
        self.stock.fail("sending")
        return None if item.withdrawn else item.message


class RunAgent(Agent, FastSource):
    """Hears of several deliveries at once."""

    @fatal
    def delivered(self, given: Given, ack: Ack) -> Answer:
        raise AssertionError("one by one, though it wants to hear of them at once")

    @fatal
    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        assert not self.over and given
        for one in given:
            self.outcome(one, ack)
        return self.afterwards(ack)


class AskedRunAgent(AskedAgent, RunAgent):
    """Both."""


SORTS = {(False, False): Agent, (True, False): AskedAgent, (False, True): RunAgent, (True, True): AskedRunAgent}


class Car(Guest):
    """The client."""

    def __init__(self, world: Machine) -> None:
        super().__init__()
        self.world = world
        self.version = 5
        self.connections = 0
        self.life = 0  #: one more with every session
        self.user: str | None = None
        self.expiry = 0
        self.lost_at = 0.0
        self.has_session = False
        self.expects_session = False
        self.limit = 0
        self.was_small = False  #: it has taken small packets only, once
        self.filters: dict[str, int | None] = {}  #: of sources, with subscription identifiers; None: not sure which
        self.asked: deque[tuple[str, int]] = deque()  #: identifiers for which SUBACK has not come
        self.todo: list[Packet] = []
        self.flying: dict[int, Item | None] = {}
        self.unreleased: dict[int, Item | None] = {}  #: QoS 2 messages that have come, part of the session
        self.released: dict[int, Item | None] = {}  #: of which PUBREL has come
        self.live: set[bytes] = set()  #: live messages that have come in this session

    def connect(self, *, clean: bool, version: int, limit: int, small: bool, expiry: int, user: str | None) -> None:
        if self.peer is not None:
            self.read()
            self.lost()
        if version != 5:
            limit, small, expiry = 0, False, 0 if clean else EXPIRY
        now = self.world.node.clock.now
        lasts = self.has_session and self.expiry > 0 and now < self.lost_at + self.expiry
        self.expects_session = lasts and not clean and user == self.user
        self.version, self.user, self.expiry = version, user, expiry
        self.limit = min(limit or self.world.window, self.world.window)
        self.was_small |= small
        properties = NONE
        if version == 5:
            properties = Properties(
                session_expiry=expiry or None,
                receive_maximum=limit or None,
                maximum_packet_size=SMALL if small else None,
                topic_alias_maximum=self.world.aliases,
            )
        self.connections += 1
        self.peer = self.world.node.peer(version)
        if not self.expects_session:
            self.forget()
        self.peer.send(Connect("car", version, clean, username=user, properties=properties))

    def forget(self) -> None:
        """There is a new session, or none."""
        self.life += 1
        self.has_session = False
        self.filters.clear()
        self.unreleased.clear()
        self.released.clear()
        self.live.clear()
        for stock in self.world.stocks:
            for filter_ in list(stock.lives):
                stock.end(filter_)
        for item in self.world.items.values():
            item.live = False

    def lost(self) -> None:
        super().lost()
        self.lost_at = self.world.node.clock.now
        self.todo.clear()
        self.flying.clear()
        self.filters.update((filter_, None) for filter_, _ in self.asked if filter_ in self.filters)
        self.asked.clear()
        self.world.written.clear()  # QoS 0 may be lost with the connection
        if self.has_session and not self.expiry:
            self.forget()

    def heard(self, packet: Packet) -> None:
        assert self.peer is not None
        if isinstance(packet, Connack):
            assert not packet.reason and packet.session_present == self.expects_session
            self.on = self.has_session = True
            if not packet.session_present:
                self.peer.send(Subscribe(1, (Subscription("live/#", 2),)))
            return
        assert self.on, f"{packet} before CONNACK"
        if isinstance(packet, Publish):
            self._message(packet)
        elif isinstance(packet, Pubrel):
            id_ = packet.packet_id
            self.released[id_] = self.unreleased.pop(id_, self.released.get(id_))
            self.todo.append(packet)
        elif isinstance(packet, Suback):
            if packet.packet_id == 2:
                filter_, number = self.asked.popleft()
                if filter_ in self.filters:
                    self.filters[filter_] = number
        else:
            assert isinstance(packet, Unsuback), packet

    def _message(self, packet: Publish) -> None:
        number = packet.packet_id
        item = self.world.items.get(packet.payload)
        assert self.peer is not None and not self.peer.wire.full, "it was sent into a full socket"
        if packet.qos:
            assert number not in self.flying, f"packet id {number} is in use"
            self.flying[number] = item
            assert len(self.flying) <= self.limit, "more in flight than the client takes"
            self.todo.append(packet)
        fresh = number not in self.unreleased
        if packet.qos == 2:
            self.unreleased[number] = item
        if item is None:
            assert packet.payload.startswith(b"live ")
            assert packet.qos < 2 or not fresh or packet.payload not in self.live, "a live message has come twice"
            self.live.add(packet.payload)
            return
        self._of_source(item, packet, fresh=fresh)

    def _of_source(self, item: Item, packet: Publish, *, fresh: bool) -> None:
        agent = item.agent
        assert item.live and agent is not None, f"{packet} was never given, or was withdrawn"
        assert packet.qos == item.qos
        if item.qos:
            assert not item.heard, "it has come again after its acknowledgement"
        if item.qos < 2 or fresh:
            item.shown += 1
            assert item.qos == 1 or item.shown <= 1 + item.pardons, f"{packet} has come twice"
        item.shown_in = self.connections
        if packet.dup:
            assert item.connection < self.connections, "DUP, but it was not sent before"
            return
        assert not [other for other in item.life.items if self._is_to_be_repeated(other)], "it passes what is in flight"
        item.times += 1
        assert item.times <= 1 + item.pardons, f"{packet} has come twice, without DUP"
        assert item.connection == self.connections, "it was given to an earlier connection, but comes without DUP"
        assert item.seq > agent.last, "out of order"
        agent.last = item.seq
        most = agent.stock.traits.most
        if most and item.qos:
            flying = [other for other in self.flying.values() if other is not None and other.life.stock is agent.stock]
            assert len([other for other in flying if other.agent is agent]) <= most
        if self.version == 5:
            now = self.filters.get(item.life.filter)
            if now is not None:
                soon = [number for filter_, number in self.asked if filter_ == item.life.filter]
                assert packet.properties.subscription_ids in [(number,) if number else () for number in (now, *soon)]

    def _is_to_be_repeated(self, item: Item) -> bool:
        """Whether it was sent on an earlier connection, and has to come first."""
        return (
            item.live
            and item.times > 0
            and item.qos > 0
            and max(item.connection, item.shown_in) < self.connections
            and not (item.heard or item.received or item.acked is not None or len(item.message.payload) >= BIG)
        )

    def answer(self, which: int, refuse: bool) -> None:
        packet = self.todo.pop(which % len(self.todo))
        assert self.peer is not None and isinstance(packet, Publish | Pubrel)
        number = packet.packet_id
        item = self.flying.get(number)
        reason = ReasonCode.QUOTA_EXCEEDED if refuse and self.version == 5 else ReasonCode.SUCCESS
        if isinstance(packet, Publish) and packet.qos == 2 and reason < 0x80:
            if item is not None:
                item.received = True
            self.peer.send(Pubrec(number))
            return
        answer: Packet
        if isinstance(packet, Pubrel):  # whatever PUBCOMP says, the client has taken the message with PUBREC
            unknown = reason is not ReasonCode.SUCCESS
            answer = Pubcomp(number, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if unknown else ReasonCode.SUCCESS)
            reason = ReasonCode.SUCCESS
            item = self.released.pop(number, None)
        else:
            answer = Puback(number, reason) if packet.qos == 1 else Pubrec(number, reason)
            self.unreleased.pop(number, None)
        self.flying.pop(number, None)
        if item is not None:
            item.acked = reason
        self.peer.send(answer)


kinds = st.integers(0, STOCKS - 1)
turns = st.booleans()
traits = st.builds(
    Traits,
    qos=st.sampled_from((2, 2, 1, 0)),
    delay=st.sampled_from((None, None, 0.0, 0.3)),
    multi=st.booleans(),
    generic=st.booleans(),
    renew=st.booleans(),
    release=st.sampled_from((False, False, True)),
    lingers=st.booleans(),
    most=st.sampled_from((0, 0, 1, 2)),
    asks=st.sampled_from((True, True, False)),
    runs=st.booleans(),
    greedy=st.sampled_from((False, False, False, True)),
    retries=st.booleans(),
)


class Machine(World):
    """The world."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.backlog = 5
        self.items: dict[bytes, Item] = {}
        self.written: list[Item] = []  #: QoS 0, told as written and not come yet
        self.published: list[tuple[bytes, int, int]] = []  #: live: payload, QoS, life of the client
        self.passed: dict[tuple[object, object], int] = {}  #: (who waits, who sent meanwhile): how often
        self.heads: dict[object, object] = {}  #: what those who wait have to send next
        self.offers: set[tuple[int, Stock, str]] = set()  #: filters that were offered to a connection's sources again
        self.stocks: list[Stock] = []

    @initialize(
        sorts=st.tuples(*[traits] * STOCKS),
        window=st.integers(1, 4),
        buffer=st.sampled_from((1, 4, 16)),
        buffer_bytes=st.sampled_from((1 << 20, 1 << 20, 100)),
        lasting=st.booleans(),
        observed=st.booleans(),
        aliases=st.sampled_from((None, None, 2)),
        version=st.sampled_from((4, 5, 5)),
        filters=st.lists(st.tuples(kinds, st.sampled_from(GRANTED)), min_size=1, max_size=5),
    )
    def start(
        self,
        sorts: tuple[Traits, ...],
        window: int,
        buffer: int,
        buffer_bytes: int,
        lasting: bool,
        observed: bool,
        aliases: int | None,
        version: int,
        filters: list[tuple[int, int]],
    ) -> None:
        self.window, self.buffer, self.buffer_bytes, self.aliases = window, buffer, buffer_bytes, aliases
        options = SessionOptions(
            window=window,
            queue=0,
            queue_bytes=0,
            source_buffer=buffer,
            source_buffer_bytes=buffer_bytes,
            max_awaiting_rel=0,
            await_rel_timeout=0,
            expiry_default_v3=EXPIRY,
        )
        self.node = MemoryNode(options, Limits(flapping_count=0), store=HeldStore() if lasting else None)
        assert isinstance(self.node.loop, Turns)
        self.loop = self.node.loop
        self.stack.enter_context(standing(self.node.clock))
        self.node.state.observed = observed
        self.stocks = [Stock(self, number, sort) for number, sort in enumerate(sorts)]
        for stock in self.stocks:
            self.register(stock)
        self.publisher = self.node.client("pub")
        self.car = Car(self)
        self.car.connect(clean=True, version=version, limit=0, small=False, expiry=EXPIRY, user=None)
        self.go_on()
        self.wanted = filters
        self.subscribe_all()

    # -- what there is

    @property
    def session(self) -> Session:
        return self.node.state.registry.sessions["car"]

    @property
    def scheduler(self) -> SourceScheduler | None:
        session = self.node.state.registry.sessions.get("car")
        return None if session is None else session.scheduler

    def slots(self) -> list[SourceSlot]:
        scheduler = self.scheduler
        return [] if scheduler is None else [*scheduler.slots.values(), *scheduler.leaving]

    def fill(self, life: Life, count: int) -> None:
        """A filter has more to get."""
        traits = life.stock.traits
        for _ in range(count):
            self.count += 1
            number = self.count
            payload = b"%s %d" % (life.filter.encode(), number)
            if number % 13 == 0:
                payload = payload.ljust(BIG, b".")
            granted = int(life.filter[-1])
            message = Message(f"from/{life.filter}", payload, traits.qos)
            if number % 17 == 0:
                message.expires_at = self.node.clock.now + 2
            qos = min(traits.qos, granted, 1 if traits.release else 2)
            item = self.items[payload] = Item(life, message, qos, withdrawn=traits.asks and number % 11 == 0)
            life.items.append(item)
            life.todo.append(item)

    # -- what is true at once

    def turn_of(self, agent: Agent) -> None:
        """A source is about to send one: nobody who waits may have been passed over by it before."""
        session, scheduler = self.session, self.scheduler
        assert scheduler is not None
        room = len(session.inflight) < session.limit
        waiting: dict[object, object] = {}
        for slot in scheduler.slots.values():
            if slot.source is not agent and slot.buffer and self._may_send(slot, room):
                waiting[slot] = slot.buffer[0]
        queue = session.durable
        if queue is not None and queue.waits and room:
            waiting["durable"] = queue._ahead[0]
        caught_up = not session.unsent and (queue is None or not queue.catch_up_to)
        if session.queue and caught_up and room:
            waiting["queue"] = next(iter(session.queue))
        for who, head in waiting.items():
            if self.heads.get(who) is not head:  # it has sent one, or has left the line meanwhile
                self.heads[who] = head
                for pair in [pair for pair in self.passed if pair[0] is who or pair[0] == who]:
                    del self.passed[pair]
            times = self.passed[who, agent] = self.passed.get((who, agent), 0) + 1
            assert times <= PASSED, f"{who} waits, and {agent.stock.name} sends one message after the other"

    def _may_send(self, slot: SourceSlot, room: bool) -> bool:
        given = slot.buffer[0]
        item: Item = given.tag
        if not item.qos:
            return True
        return room and (not slot.kind.max_unacked or slot.unacked < slot.kind.max_unacked)

    def check(self) -> None:
        """Between two steps."""
        scheduler = self.scheduler
        peer = self.car.peer
        if scheduler is None:
            return
        slots = self.slots()
        session = scheduler.session
        assert scheduler.buffered == sum(len(slot.buffer) for slot in slots)
        assert scheduler.buffered_bytes == sum(len(given.message.payload) for slot in slots for given in slot.buffer)
        assert scheduler.promised == sum(slot.promised for slot in slots)
        flying = Counter(slot for slot, _ in scheduler.unacked.values())
        for slot in slots:
            assert slot.unacked == flying[slot]
            if slot.source is None:
                assert not slot.buffer and not slot.promised
        assert scheduler.unacked.keys() <= session.inflight.keys()
        greedy = sum(len(slot.buffer) for slot in slots if self.stock_of(slot).traits.greedy)
        assert scheduler.buffered - greedy <= self.buffer + len(slots), "too much waits"
        assert not scheduler.leaving or all(slot.unacked for slot in scheduler.leaving)
        if peer is None or not self.car.on or peer.wire.full:
            return
        assert all(item.shown for item in self.written), "it was told as written, and never came"
        self.written.clear()
        for item in self.items.values():
            agent = item.life.agent
            told = item.lingers and item.life.stock.registered
            if item.acked is not None and item.live and (told or (agent is not None and not agent.over)):
                assert item.heard, f"{item.message} was acknowledged, and its source does not know"
        for slot in scheduler.slots.values():
            self._check_room(scheduler, slot)

    def _check_room(self, scheduler: SourceScheduler, slot: SourceSlot) -> None:
        """Who was told 0 has heard of room if there is some."""
        agent = slot.source
        if not isinstance(agent, Agent) or agent.told != 0:
            return
        room = (
            (self.buffer - scheduler.buffered - scheduler.promised) // 2
            if scheduler.buffered_bytes < self.buffer_bytes
            else 0
        )
        if not slot.buffer:
            room = max(room, 1)
        if slot.kind.max_unacked:
            room = min(room, slot.kind.max_unacked - slot.unacked - len(slot.buffer))
        assert room < 1, "there is room, and the source does not know"

    def stock_of(self, slot: SourceSlot) -> Stock:
        return next(stock for stock in self.stocks if stock.kind is slot.kind)

    # -- what happens

    def go_on(self, turn: bool = True) -> None:
        if turn:
            for _ in range(3):
                self.node.turn()
                self.car.read()
                for packet in self.publisher.take():
                    if isinstance(packet, Pubrec):
                        self.publisher.send(Pubrel(packet.packet_id))
            self.check()

    def register(self, stock: Stock) -> None:
        stock.registered = True
        self.node.state.shared.sources.register(stock.kind)

    @rule(which=kinds, qos=st.sampled_from(GRANTED), backlog=st.integers(0, 20), number=st.integers(0, 2), turn=turns)
    def subscribe(self, which: int, qos: int, backlog: int, number: int, turn: bool) -> None:
        car = self.car
        if not car.may_speak or car.peer is None:
            return
        self.backlog = backlog
        filter_ = f"k{which}/{qos}"
        number = number if car.version == 5 else 0
        car.filters.setdefault(filter_, None)
        car.asked.append((filter_, number))
        properties = Properties(subscription_ids=(number,)) if number else NONE
        car.peer.send(Subscribe(2, (Subscription(filter_, qos),), properties))
        self.go_on(turn)

    @rule(number=st.integers(0, 8), turn=turns)
    def unsubscribe(self, number: int, turn: bool) -> None:
        car = self.car
        if not car.may_speak or car.peer is None or not car.filters:
            return
        filter_ = list(car.filters)[number % len(car.filters)]
        del car.filters[filter_]
        stock = self.stocks[int(filter_[1])]
        car.peer.send(Unsubscribe(3, (filter_,)))
        life = stock.lives.get(filter_)
        assert life is None or life.agent is None, "its source was not told"
        stock.end(filter_)
        self.go_on(turn)

    @rule(which=kinds, count=st.integers(1, 20), how=st.sampled_from(("tell", "send", "hand")), turn=turns)
    def store(self, which: int, count: int, how: str, turn: bool) -> None:
        """There is more for the filters of a kind; its plugin says so to its sources, or hands it over at once."""
        stock = self.stocks[which]
        for life in stock.lives.values():
            self.fill(life, count)
        agents = [agent for agent in stock.agents if not agent.over]
        if how == "hand":
            for agent in agents:
                agent.hand()
        if how == "tell" and stock.traits.generic:
            generic = [slot for slot in self.slots() if slot.kind.generic and slot.source and not slot.leaving]
            assert self.node.broker.tell("car", "news") == bool(generic)
        else:
            for agent in agents:
                agent.feed.send("news")
        self.go_on(turn)

    @rule(
        answers=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        refuse=st.sampled_from((False, False, True)),
        turn=turns,
    )
    def answer(self, answers: list[int], refuse: bool, turn: bool) -> None:
        for number in answers:
            if self.car.may_speak and self.car.todo:
                self.car.answer(number, refuse)
        self.go_on(turn)

    @rule(
        clean=st.sampled_from((False,) * 7 + (True,)),
        version=st.sampled_from((4, 5, 5, 5)),
        limit=st.integers(0, 4),
        small=st.sampled_from((False, False, True)),
        expiry=st.sampled_from((EXPIRY,) * 7 + (0,)),
        user=st.sampled_from((None,) * 9 + ("else",)),
    )
    def connect(self, clean: bool, version: int, limit: int, small: bool, expiry: int, user: str | None) -> None:
        """Also while it is connected: then it takes its own connection over."""
        self.car.connect(clean=clean, version=version, limit=limit, small=small, expiry=expiry, user=user)
        self.go_on()
        if not self.car.filters:
            self.subscribe_all()

    def subscribe_all(self) -> None:
        """What a client does that has a new session."""
        for which, qos in self.wanted:
            self.subscribe(which, qos, 5, 0, True)

    @rule(goodbye=st.booleans(), turn=turns)
    def leave(self, goodbye: bool, turn: bool) -> None:
        car = self.car
        if car.peer is None:
            return
        if goodbye and car.may_speak:
            car.peer.send(Disconnect())
        else:
            car.peer.close()
        self.node.turn()
        car.peer.take()
        car.lost()
        self.go_on(turn)

    @rule(full=st.booleans(), turn=turns)
    def stall(self, full: bool, turn: bool) -> None:
        if self.car.peer is not None and self.car.on:
            self.go_on()
        if self.car.peer is not None and self.car.on:
            (self.car.peer.wire.fill if full else self.car.peer.wire.drain)()
        self.go_on(turn)

    @rule(qos=st.lists(st.integers(0, 2), min_size=1, max_size=4), turn=turns)
    def publish(self, qos: list[int], turn: bool) -> None:
        """Live messages."""
        for level in qos:
            self.count += 1
            payload = b"live %d" % self.count
            if level and self.car.has_session and self.car.on:
                self.published.append((payload, level, self.car.life))
            self.publisher.send(Publish("live/1", payload, level, packet_id=self.count % 60000 + 1 if level else 0))
        self.go_on(turn)

    @rule(which=kinds, turn=turns)
    def come_or_go(self, which: int, turn: bool) -> None:
        """A kind is registered, or is no longer."""
        stock = self.stocks[which]
        self.backlog = 5
        if stock.registered:
            stock.registered = False
            self.node.state.shared.sources.unregister(stock.name)
            assert all(agent.over for agent in stock.agents)
            for filter_ in list(stock.lives):
                stock.end(filter_)
            for item in self.items.values():
                item.lingers &= item.life.stock is not stock
        else:
            self.register(stock)
        self.go_on(turn)

    @rule(which=kinds, say=st.sampled_from(("recreate", "recreate", "destroy", "destroy one", "no")), turn=turns)
    def say(self, which: int, say: str, turn: bool) -> None:
        """A source wants something else."""
        self.stocks[which].say = say
        for agent in self.stocks[which].agents:
            if not agent.over:
                agent.feed.send("news")
        self.go_on(turn)

    @rule(
        which=kinds,
        callback=st.sampled_from(
            ("subscribe", "unsubscribe", "terminate", "info", "info", "delivered", "delivered", "sending")
        ),
    )
    def sabotage(self, which: int, callback: str) -> None:
        """A callback raises when it is called next."""
        self.stocks[which].fails = callback

    @rule(seconds=st.sampled_from((0.05, 0.1, 0.1, 0.4, 0.4, 1.0, 1.0, 3.0, 2.0 * EXPIRY)))
    def wait(self, seconds: float) -> None:
        self.go_on()
        self.node.clock.now += seconds
        for will in self.node.state.registry.due(self.node.clock.now):
            self.node.broker.publish_will(will)
        if self.car.peer is None and "car" not in self.node.state.registry.sessions and self.car.has_session:
            self.car.forget()
        self.go_on()

    # -- what must be true in the end

    def come_to_rest(self) -> None:
        """Everything works, the client is there and acknowledges, until nothing happens any more."""
        self.go_on()
        for stock in self.stocks:
            stock.say = stock.fails = None
            if not stock.registered:
                self.backlog = 0
                self.register(stock)
        self.stall(False, True)
        if self.car.peer is None:
            self.car.connect(clean=False, version=5, limit=0, small=False, expiry=EXPIRY, user=self.car.user)
        self.go_on()
        assert self.car.may_speak
        quiet = known = 0
        while quiet < 4:
            before, known = known, sum(item.heard for item in self.items.values())
            quiet = quiet + 1 if known == before else 0
            while self.car.todo:
                quiet = 0
                self.car.answer(0, refuse=False)
                self.go_on()
            self.wait(MAX_BACKOFF / 3)

    def judge(self) -> None:
        for stock in self.stocks:
            assert stock.failures == stock.kind.counters["failed"]
            for filter_, life in stock.lives.items():
                assert filter_ in self.car.filters
                assert life.agent is not None and not life.agent.over, f"{filter_} has lost its source"
                assert not life.todo, f"{filter_} waits for {len(life.todo)} messages"
                for item in life.items:
                    assert item.heard, f"nobody knows what became of {item.message}"
                    assert item.dropped or not item.qos or item.shown, f"{item.message} has never come"
        for payload, _, life_ in self.published:
            assert life_ != self.car.life or payload in self.car.live, f"{payload!r} has never come"

    def leave_nothing(self) -> None:
        """Without subscriptions there are no sources."""
        scheduler = self.scheduler
        while self.car.filters:
            self.unsubscribe(0, True)
        self.wait(10.0)  # closed connections have their time
        assert not self.car.todo and not self.session.inflight
        assert self.scheduler is None, "the scheduler is left"
        assert all(agent.over for stock in self.stocks for agent in stock.agents)
        if scheduler is not None:
            assert (0, 0, 0) == (scheduler.buffered, scheduler.buffered_bytes, scheduler.promised)
        assert not [timer for _, _, timer in self.loop.later if timer.callback is not None], "timers are left"


Machine.TestCase.settings = often(examples=300, steps=40)
TestSourceScheduler: Any = Machine.TestCase
