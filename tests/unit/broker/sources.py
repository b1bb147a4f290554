"""Sources for tests of the scheduler, and clients that answer as they are told.

    script = SourceScript()              # a kind of source, and the notes of all its instances
    script.open(node)
    script.answer = lambda source, what, desired: [given(1)]
    script.source.feed.send("go")        # the instance that was made last
    script.heard                         # every callback, in order

A `ScriptedSource` does what its script says and nothing else; a `SharedBacklog` serves clients by sources that fetch at
once or later, and that remember in their slot how far they have come.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import pytest

from motorcade.broker.session import Session
from motorcade.broker.source_scheduler import SourceScheduler
from motorcade.broker.source_slot import InstanceFeed, SourceSlot
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import Ack, Answer, FastFeed, FastSource, Feed, Given, Source, SourceType, Why
from motorcade.mqtt.packets import Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel, Suback, Subscribe, Unsubscribe
from motorcade.mqtt.properties import NONE, Properties
from tests.support.virtual import MemoryNode, Peer

F = TypeVar("F", bound=Callable[..., Any])


def fatal(callback: F) -> F:
    """The scheduler survives whatever a source raises; an assertion in a callback must fail the test all the same."""

    @wraps(callback)
    def checked(*args: Any) -> Any:
        try:
            return callback(*args)
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            pytest.fail(f"{callback.__name__}, line {where.lineno}: {where.line}: {error}")

    return cast("F", checked)


def given(number: int, filter_: str = "x", qos: int = 1, payload: bytes | None = None, **more: Any) -> Given:
    """A message of a source; its number is its tag and its payload."""
    return Given(Message(f"from/{filter_}", payload or b"%d" % number, qos, **more), filter_, number)


def some(count: int, filter_: str = "x", qos: int = 1, first: int = 1) -> list[Given]:
    return [given(number, filter_, qos) for number in range(first, first + count)]


class ScriptedSource(Source):
    """Notes what it hears, and answers what its script says."""

    feed: FastFeed

    def __init__(self, feed: FastFeed, script: SourceScript) -> None:
        super().__init__(feed)
        self.script = script
        self.number = len(script.sources)
        self.over = False
        script.sources.append(self)
        script.made(self)

    @fatal
    def _note(self, *what: Any) -> None:
        assert not self.over, f"{what} after terminate"
        self.script.heard.append(what)

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        self._note("subscribe", subscription.filter, why)
        return self.script.takes(self, subscription, why)

    def unsubscribe(self, filter_: str, why: Why) -> None:
        self._note("unsubscribe", filter_, why)
        self.script.leaves(self, filter_, why)

    def terminate(self) -> None:
        self._note("terminate")
        self.over = True
        self.script.ends(self)

    def info(self, what: object, desired: int) -> Answer:
        self._note("info", what, desired)
        return self.script.answer(self, what, desired)

    def delivered(self, given: Given, ack: Ack) -> Answer:
        self._note("delivered", given.tag, ack)
        return self.script.after(self, given, ack)


class AskedSource(ScriptedSource, FastSource):
    """Wants to be asked before a message is sent."""

    def sending(self, given: Given) -> Message | None:
        self._note("sending", given.tag)
        return self.script.at_last(given)


class RunSource(ScriptedSource, FastSource):
    """Hears of several deliveries at once."""

    def delivered_run(self, given: Sequence[Given], ack: Ack) -> Answer:
        self._note("delivered_run", [one.tag for one in given], ack)
        return self.script.after(self, given[-1], ack)


class SourceScript:
    """A kind of source under test."""

    def __init__(self, name: str = "script", *, asked: bool = False, runs: bool = False, **options: Any) -> None:
        sort = AskedSource if asked else RunSource if runs else ScriptedSource
        self.heard: list[tuple[Any, ...]] = []
        self.sources: list[ScriptedSource] = []
        self.kind = SourceType(name, lambda feed: sort(feed, self), "test", **options)
        self.made: Callable[[ScriptedSource], None] = lambda source: None
        self.takes: Callable[[ScriptedSource, Subscription, Why], bool] = lambda source, subscription, why: True
        self.leaves: Callable[[ScriptedSource, str, Why], None] = lambda source, filter_, why: None
        self.ends: Callable[[ScriptedSource], None] = lambda source: None
        #: `info`: by default, what is sent is what is given
        self.answer: Callable[[ScriptedSource, Any, int], Answer] = lambda source, what, desired: (
            what if isinstance(what, Sequence) and not isinstance(what, str) else None
        )
        self.after: Callable[[ScriptedSource, Given, Ack], Answer] = lambda source, given, ack: None
        self.at_last: Callable[[Given], Message | None] = lambda given: given.message

    def open(self, node: MemoryNode) -> SourceScript:
        node.state.shared.sources.register(self.kind)
        node.turn()
        return self

    def close(self, node: MemoryNode) -> None:
        node.state.shared.sources.unregister(self.kind.name)
        node.turn()

    @property
    def source(self) -> ScriptedSource:
        return self.sources[-1]

    @property
    def slot(self) -> SourceSlot:
        feed = self.source.feed
        assert isinstance(feed, InstanceFeed)
        return feed._slot

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        """Callbacks of these names, in order."""
        return [call for call in self.heard if call[0] in names]

    def acks(self) -> list[tuple[int, ReasonCode, str]]:
        """What became of messages: tag, reason, why it was dropped."""
        return [(call[1], call[2].reason, call[2].dropped) for call in self.calls("delivered")]

    def tags(self) -> list[int]:
        return [call[1] for call in self.calls("delivered")]

    def give(self, node: MemoryNode, *what: Given) -> None:
        """The instance that was made last gives messages in the next turn."""
        self.source.feed.send(list(what))
        node.turn()


class SharedBacklog:
    """A backlog, and a kind of source that serves clients from it, each from where it was before."""

    def __init__(
        self, name: str, count: int, *, filter_: str = "x", qos: int = 1, delay: float | None = None, **options: Any
    ) -> None:
        self.count = count
        self.filter = filter_
        self.qos = qos
        self.delay = delay  #: seconds that fetching takes; None: it is done at once
        self.most = 0  #: the largest number it was ever told
        self.kind = SourceType(name, lambda feed: Reader(feed, self), "test", prefix=filter_, **options)

    def open(self, node: MemoryNode) -> SharedBacklog:
        node.state.shared.sources.register(self.kind)
        node.turn()
        return self


class Reader(Source):
    """Reads a backlog as there is room."""

    def __init__(self, feed: Feed, backlog: SharedBacklog) -> None:
        super().__init__(feed)
        self.backlog = backlog
        self.next = 0
        self.fetching = 0

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        if subscription.filter != self.backlog.filter:
            return False
        self.next = self.feed.kept or 0
        self.feed.send("more")
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:
        unsent = self.feed.unsent
        self.feed.kept = unsent[0].tag if unsent else self.next

    def info(self, what: object, desired: int) -> Answer:
        self.backlog.most = max(self.backlog.most, desired)
        if isinstance(what, tuple):
            self.fetching = 0
            return self._give(what[1])
        return self._more(desired)

    def delivered(self, given: Given, ack: Ack) -> Answer:
        self.backlog.most = max(self.backlog.most, ack.desired)
        return self._more(ack.desired)

    def _more(self, desired: int) -> Answer:
        wanted = min(desired, self.backlog.count - self.next)
        if not wanted or self.fetching:
            return None
        if self.backlog.delay is None:
            return self._give(wanted)
        self.fetching = wanted
        self.feed.send_later(self.backlog.delay, ("fetched", wanted))
        return None

    def _give(self, count: int) -> list[Given]:
        first, self.next = self.next, self.next + count
        return [given(n, self.backlog.filter, self.backlog.qos) for n in range(first, self.next)]


# --- the client's side --------------------------------------------------------------------------------------------


def messages(peer: Peer) -> list[Publish]:
    """Messages that have come since the last time; nothing else has."""
    packets = [packet for packet in peer.take() if not isinstance(packet, Suback)]
    assert all(isinstance(packet, Publish) for packet in packets), packets
    return [packet for packet in packets if isinstance(packet, Publish)]


def payloads(peer: Peer) -> list[bytes]:
    return [packet.payload for packet in messages(peer)]


def numbers(peer: Peer) -> list[int]:
    return [int(payload) for payload in payloads(peer)]


def acknowledge(node: MemoryNode, peer: Peer, *packets: Publish, reason: ReasonCode = ReasonCode.SUCCESS) -> None:
    """PUBACK for messages, in one read."""
    if packets:
        peer.send(*(Puback(packet.packet_id, reason) for packet in packets))
        node.turn()


def unsubscribe(node: MemoryNode, peer: Peer, *filters: str) -> list[Packet]:
    """Unsubscribe; what has come with the UNSUBACK."""
    peer.send(Unsubscribe(2, filters))
    node.turn()
    return peer.take()


def subscribe(node: MemoryNode, peer: Peer, *wanted: tuple[str, int] | Subscription, identifier: int = 0) -> None:
    """Subscribe; what comes then is not read yet."""
    subscriptions = tuple(w if isinstance(w, Subscription) else Subscription(*w) for w in wanted)
    peer.send(Subscribe(1, subscriptions, Properties(subscription_ids=(identifier,)) if identifier else NONE))
    node.turn()


def session_of(node: MemoryNode, client_id: str = "car") -> Session:
    return node.state.registry.sessions[client_id]


def scheduler_of(node: MemoryNode, client_id: str = "car") -> SourceScheduler:
    scheduler = session_of(node, client_id).scheduler
    assert scheduler is not None
    return scheduler


def answer(packet: Packet) -> Packet | None:
    """What a client says to a packet, if anything."""
    if isinstance(packet, Pubrel):
        return Pubcomp(packet.packet_id)
    if isinstance(packet, Publish) and packet.qos:
        return Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id)
    return None
