"""What does one hostile connection cost the others?

A connection floods a node as fast as it is read: per turn of the event loop up to 32 reads of 256 000 bytes, as libuv
does it, until reading is paused. Measured is the processor time of every turn, and how many turns a well-behaved
client waits for its answer.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from itertools import count
from time import thread_time
from typing import Any

import pytest

from motorcade.broker.connection import Connection
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.pubsub import ROUTES
from motorcade.broker.websocket import WebSocketProtocol, measure
from motorcade.core.subscription import Subscription
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import Properties
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, Turns, Wire, standing

READ = 256_000  #: bytes libuv reads at once
READS = 32  #: times it does so before anything else has its turn
TURNS = 10  #: of the event loop, while the flood goes on
MOST = 0.020  #: seconds of processor time that a turn may take

CONT, BINARY, PING, PONG, FIN = 0x0, 0x2, 0x9, 0xA, 0x80
HANDSHAKE = (
    b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    node = MemoryNode(SessionOptions(), Limits(message_rate=0.0))
    with standing(node.clock):
        yield node


class Drain(Wire):
    """A peer that reads everything and keeps nothing."""

    sent = 0

    def write(self, data: Any) -> None:
        self.sent += len(data)


class Flood:
    """The hostile end of a connection, over TCP or WebSocket."""

    def __init__(self, node: MemoryNode, websocket: bool, flood: Iterator[bytes]) -> None:
        assert isinstance(node.loop, Turns)
        self.loop = node.loop
        self.wire = Drain(node.loop)
        self.connection = Connection(node.broker, "ws")
        self.protocol: Any = self.connection
        if websocket:
            self.protocol = WebSocketProtocol(lambda: self.connection, "/mqtt", (), 1 << 20, node.broker.loop)
        self.wire.protocol = self.protocol
        self.protocol.connection_made(self.wire)
        self.flood = flood

    def turn(self) -> float:
        """Read as libuv does, then run what was due when the turn began; the processor time of it."""
        flood, began = self.flood, thread_time()
        taken = 0.0
        for _ in range(READS):
            if not self.wire.reading or self.wire.gone:
                break
            data = next(flood)
            began = thread_time()
            self.protocol.data_received(data)
            taken += thread_time() - began
        began = thread_time()
        for _ in range(len(self.loop.soon)):
            self.loop.soon.popleft().run()
        return taken + thread_time() - began


def encoded(*packets: Any) -> bytes:
    return b"".join(codec.encode(packet, 5) for packet in packets)


def frame(opcode: int, data: bytes = b"", first: int = FIN) -> bytes:
    """A masked frame; the mask is 0."""
    size = len(data)
    length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes((first | opcode,)) + length + b"\0\0\0\0" + data


def reads(make: Callable[[int], bytes], size: int = READ, *, new: bool = False) -> Iterator[bytes]:
    """Packets of a kind in reads: the same ones again and again, or `new` ones."""
    numbers = count()
    read = b""
    while True:
        if new or not read:
            parts: list[bytes] = []
            left = size
            while left > 0:
                parts.append(make(next(numbers)))
                left -= len(parts[-1])
            read = b"".join(parts)
        yield read


def again(*packets: Any) -> Callable[[int], bytes]:
    data = encoded(*packets)
    return lambda _: data


CONNECT = encoded(Connect("hostile", 5))


def deep(number: int) -> str:
    """A filter of 128 levels."""
    return "/".join("+" if number >> level % 32 & 1 else "a" for level in range(128))


PACKETS: dict[str, Callable[[int], bytes]] = {
    "QoS 0 without a payload": again(Publish("t", b"")),
    "QoS 0 in turn to two topics": again(Publish("t", b""), Publish("u", b"")),
    "QoS 0 to many subscribers": again(Publish("many", b""), Publish("many", b"x")),
    "QoS 0 to many subscribers, all alike": again(Publish("many", b"")),
    "QoS 1 to many subscribers": again(Publish("many", b"", 1, packet_id=1)),
    "QoS 0 to many groups": again(Publish("groups", b"")),
    "QoS 0 to a full queue": again(Publish("away", b""), Publish("away", b"x")),
    "QoS 0 to a full queue, all alike": again(Publish("away", b"")),
    "QoS 1": again(Publish("t", b"", 1, packet_id=1)),
    "QoS 1 to one subscriber": again(Publish("one", b"", 1, packet_id=1)),
    "QoS 2, one id": again(Publish("t", b"", 2, packet_id=1)),
    "QoS 2 and its release": again(Publish("t", b"", 2, packet_id=1), Pubrel(1)),
    "PUBACK": again(Puback(1)),
    "PUBREC": again(Pubrec(1)),
    "PUBREL": again(Pubrel(1)),
    "PUBCOMP": again(Pubcomp(1)),
    "PINGREQ": again(Pingreq()),
    "large and small": again(Publish("t", b"x" * 60_000), *[Pingreq()] * 90_000),
    "user properties": again(Publish("t", b"", properties=Properties(user_properties=(("", ""),) * 64))),
    "SUBSCRIBE": again(Subscribe(1, (Subscription("a"),))),
    "SUBSCRIBE and UNSUBSCRIBE": again(Subscribe(1, (Subscription("#"),)), Unsubscribe(2, ("#",))),
    "many filters to leave": again(Unsubscribe(1, tuple(f"{i}" for i in range(256)))),
    "malformed": lambda _: b"\xff" * 64,
    "CONNECT again": lambda _: CONNECT,
}
EVER_NEW: dict[str, Callable[[int], bytes]] = {
    "topics": lambda n: encoded(Publish(f"new/{n}", b"")),
    "deep topics": lambda n: encoded(Publish("/".join(str(n + i) for i in range(128)), b"")),
    "filters": lambda n: encoded(Subscribe(1, (Subscription(f"f/{n}"),)), Unsubscribe(1, (f"f/{n}",))),
    "deep filters": lambda n: encoded(
        Subscribe(1, tuple(Subscription(deep(n * 256 + i)) for i in range(256))),
        Unsubscribe(1, tuple(deep(n * 256 + i) for i in range(256))),
    ),
}


def audience(node: MemoryNode) -> None:
    """Clients to whom a flood may go."""
    for number in range(100):
        drained(node.client(f"many{number}"), "many")
    drained(node.client("one"), "one")
    drained(node.client("groups"), *[f"$share/g{number}/groups" for number in range(200)])
    away = node.client("away", properties=Properties(session_expiry=1000))
    node.subscribe(away, ("away", 1))
    away.close()
    node.turn()


def drained(peer: Peer, *filters: str) -> None:
    """Subscribe, and read everything from then on."""
    peer.send(Subscribe(1, tuple(Subscription(filter_, 1) for filter_ in filters)))
    peer.wire.__class__ = Drain


def measured(node: MemoryNode, flood: Flood) -> list[float]:
    """Processor time of each turn while a well-behaved client is answered in every one."""
    bystander = node.client("bystander")
    times: list[float] = []
    gc.collect()
    gc.disable()  # a node puts full collections off, and has less to look at than a run of tests
    try:
        for _ in range(TURNS):
            bystander.send(Pingreq())
            times.append(flood.turn())
            assert [Pingresp()] == bystander.take()
    finally:
        gc.enable()
    return times


def assert_bounded(times: list[float]) -> None:
    """A turn is cheap; one of them may have met the garbage collector."""
    assert sorted(times)[-2] <= MOST, [f"{1000 * t:.1f} ms" for t in times]


def let_in(node: MemoryNode, websocket: bool, flood: Iterator[bytes]) -> Flood:
    hostile = Flood(node, websocket, flood)
    hostile.protocol.data_received(HANDSHAKE + frame(BINARY, CONNECT) if websocket else CONNECT)
    assert hostile.connection.session is not None
    return hostile


def framed(flood: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in frames of this size, regardless of packets."""
    before = framed_before = b""
    for data in flood:
        if data is not before:
            before = data
            framed_before = b"".join(frame(BINARY, data[i : i + size]) for i in range(0, len(data), size))
        yield framed_before


@pytest.mark.parametrize("kind", PACKETS)
def test_packets_after_connect(node: MemoryNode, kind: str) -> None:
    """Whatever a client that is let in sends, a turn is bounded; over WebSocket too, however frames are cut."""
    audience(node)
    make = PACKETS[kind]
    assert_bounded(measured(node, let_in(node, False, reads(make))))
    assert_bounded(measured(node, let_in(node, True, framed(reads(make, 30_000), 7))))
    assert_bounded(measured(node, let_in(node, True, framed(reads(make), 60_000))))


@pytest.mark.parametrize("kind", EVER_NEW)
def test_ever_new_names(node: MemoryNode, kind: str) -> None:
    """The same for names that no table knows yet."""
    make = EVER_NEW[kind]
    assert_bounded(measured(node, let_in(node, False, reads(make, new=True))))
    assert_bounded(measured(node, let_in(node, True, framed(reads(make, 30_000, new=True), 7))))


def test_a_full_cache_of_routes_is_emptied_in_a_bounded_time(node: MemoryNode) -> None:
    """One SUBSCRIBE concerns every route that is remembered, and one more topic pushes the oldest of them out."""
    publisher = node.client("publisher")
    for number in range(ROUTES):
        node.state.pubsub.route(f"fleet/{number // 100}/{number}")
    last = f"fleet/{(ROUTES - 1) // 100}/{ROUTES - 1}"
    old = node.state.pubsub.route(last)
    publisher.send(Publish("one/more", b""))
    assert ROUTES // 4 < len(node.state.pubsub.routes) <= ROUTES
    subscribe = encoded(Subscribe(1, (Subscription("#"),)))
    assert_bounded(measured(node, let_in(node, False, iter([subscribe, *[b""] * 1000]))))
    assert old.stale
    assert node.state.pubsub.route(last).count == 1


def adversarial(node: MemoryNode, clients: int = 10) -> list[Peer]:
    """Clients with filters of which a topic `a/a/…` looks at every level."""
    peers: list[Peer] = []
    for number in range(clients):
        peer = node.client(f"adversary{number}")
        for first in range(0, 1000, 250):
            wanted = tuple(Subscription(deep(number << 16 | first + i), 0) for i in range(250))
            peer.send(Subscribe(1, wanted))
            node.turn()
        peers.append(peer)
        peer.take()
    return peers


def test_adversarial_filters_cost_their_publisher_turns_and_nobody_else(node: MemoryNode) -> None:
    """Ten clients with as many deep filters as they may have: a new topic is matched in steps, and reaches them all."""
    peers = adversarial(node)
    assert node.state.stats.refused["max_filter_bytes"] > 0
    flood = let_in(node, False, iter([encoded(Publish("/".join("a" * 128), b"x"))] + [b""] * 10_000))
    times = measured(node, flood)
    assert_bounded(times)
    assert 1 == node.state.stats.long_matches
    assert len(node.state.pubsub._matching) == 1, "it still waits"
    node.turn()
    assert [1] * 10 == [len(peer.take()) for peer in peers]
    assert [] == node.state.pubsub._matching


def test_filters_that_change_while_a_topic_is_matched(node: MemoryNode) -> None:
    """A filter that comes between two steps gets the message once, one that goes does not, one that does both does."""
    topic = "/".join("a" * 128)
    early, late, twice = (node.client(name) for name in ("early", "late", "twice"))
    node.subscribe(early, ("a/#", 0), (topic, 0))
    node.subscribe(twice, (deep(0), 0), ("+/#", 0))
    adversarial(node, 3)
    publisher = node.client("publisher")
    publisher.connection.data_received(encoded(Publish(topic, b"x")))
    assert 1 == len(node.state.pubsub._matching)
    late.send(Subscribe(1, (Subscription("a/+/#"), Subscription("#"), Subscription("b/#"))))
    early.send(Unsubscribe(2, ("a/#", topic)))
    twice.send(Unsubscribe(3, ("+/#", deep(0))), Subscribe(4, (Subscription("+/#"), Subscription(topic))))
    node.turn()
    got = [[p.payload for p in peer.take() if isinstance(p, Publish)] for peer in (early, late, twice)]
    assert [[], [b"x"], [b"x"]] == got
    route = node.state.pubsub.route(topic)
    assert sorted(s.client.client_id for s in route.v5_all) == [
        "adversary0",
        "adversary1",
        "adversary2",
        "late",
        "twice",
    ]


def test_a_publisher_that_goes_while_its_topic_is_matched_leaves_nothing(node: MemoryNode) -> None:
    adversarial(node, 2)
    publisher = node.client("publisher")
    publisher.connection.data_received(encoded(Publish("/".join("a" * 128), b"x")))
    assert 1 == len(node.state.pubsub._matching)
    publisher.close()
    node.turn()
    assert [] == node.state.pubsub._matching


def test_what_the_node_publishes_is_matched_in_steps_too(node: MemoryNode) -> None:
    """A will to such a topic."""
    peers = adversarial(node, 2)
    stats = node.state.stats
    leaving = node.peer()
    leaving.send(Connect("leaving", 5, will=Will("/".join("a" * 128), b"gone")))
    node.turn()
    leaving.close()
    node.turn()
    assert 1 == stats.long_matches
    assert [1, 1] == [len(peer.take()) for peer in peers]


def test_a_client_that_goes_in_the_midst_of_its_filters() -> None:
    """They are subscribed to and left in several turns. Memory and store agree about what was not answered."""
    node = MemoryNode(store=HeldStore())
    filters = [f"filters/{number:040}" for number in range(250)]
    subscribe = Subscribe(1, tuple(Subscription(each, 1) for each in filters))
    forever = Properties(session_expiry=1000)
    with standing(node.clock):
        for way in ("lost", "taken over"):
            first = node.client("c", clean=False, properties=forever)
            first.send(subscribe)
            session = node.state.registry.sessions["c"]
            assert 0 < len(session.subscriptions) < len(filters), "others have their turn now"
            if way == "lost":
                first.close()
                node.turn()
                assert {} == session.subscriptions
            else:
                second = node.peer()
                second.send(
                    Connect("c", 5, clean_start=False, properties=forever), Subscribe(2, (Subscription(filters[0]),))
                )
                node.turn()
                assert [filters[0]] == list(session.subscriptions), "those of the new connection stay"
                second.close()
                node.turn()
        third = node.client("c", clean=False, properties=forever)
        third.send(subscribe)
        node.turn()
        third.send(Unsubscribe(3, tuple(filters)))
        third.close()
        node.turn()
        left = set(session.subscriptions)
        assert 0 < len(left) < len(filters), "others have had their turn"
        node = node.restart()
    with standing(node.clock):
        assert left == set(node.state.registry.sessions["c"].subscriptions)


FRAMES = {
    "pings": frame(PING),
    "pings with data": frame(PING, b"x" * 125),
    "pongs": frame(PONG),
    "empty messages": frame(BINARY),
    "empty fragments": frame(BINARY, first=0) + frame(CONT, first=0) * 1000 + frame(CONT),
    "fragments": frame(BINARY, b"\xc0", first=0) + frame(CONT, b"\0\xc0", first=0) * 1000 + frame(CONT, b"\0"),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_after_connect(node: MemoryNode, kind: str) -> None:
    """Frames that say nothing in MQTT have a budget too."""
    flood = let_in(node, True, reads(lambda _: FRAMES[kind]))
    assert_bounded(measured(node, flood))
    assert not flood.wire.gone


BEFORE: dict[str, bytes] = {name: HANDSHAKE + data * (1_000_000 // len(data)) for name, data in FRAMES.items()} | {
    "a CONNECT in tiny frames": HANDSHAKE + frame(BINARY, b"\x10\xff\x7f") + frame(BINARY, b"x") * 5000,
    "a handshake that never ends": b"GET /mqtt HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
    "a line that never ends": b"GET /" + b"a" * 1_000_000,
}


@pytest.mark.parametrize("kind", BEFORE)
def test_before_connect_over_websocket(node: MemoryNode, kind: str) -> None:
    """A stranger costs no more than a CONNECT: after a few frames, or too many bytes, it is closed."""
    data = BEFORE[kind]
    flood = Flood(node, True, (data[i : i + READ] for i in count(0, READ)))
    assert_bounded(measured(node, flood))
    assert flood.wire.gone


STRANGERS: dict[str, bytes] = {
    "PINGREQ": encoded(Pingreq()),
    "zeros": bytes(100),
    "noise": b"\x10\xff\xff\xff\x7f" + os.urandom(1000),
    "a CONNECT that is too long": b"\x10\x80\x80\x02" + b"x" * 1000,
    "half a CONNECT": CONNECT[:-1],
    "malformed": b"\x10\x04\x00\x04MQTT",
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_before_connect_over_tcp(node: MemoryNode, kind: str) -> None:
    """Bytes before CONNECT are refused, or waited for without being looked at again."""
    flood = Flood(node, False, reads(lambda _: STRANGERS[kind]))
    assert_bounded(measured(node, flood))
    assert flood.wire.gone


def test_a_connect_byte_by_byte(node: MemoryNode) -> None:
    """A CONNECT in thousands of tiny reads is collected, not parsed again and again."""
    connect = encoded(Connect("x" * 200, 5, username="u" * 15_000))
    flood = Flood(node, False, (connect[i : i + 1] for i in range(len(connect))))
    began = thread_time()
    for byte in connect:
        flood.protocol.data_received(bytes((byte,)))
    assert thread_time() - began < 10 * MOST
    assert flood.connection.session is not None


# --- what waits for the next turn is neither lost nor out of order --------------------------------------------------


@pytest.mark.parametrize("websocket", [False, True])
def test_what_is_over_the_budget_follows_in_order(node: MemoryNode, websocket: bool) -> None:
    """All messages of a long read arrive, in order, and the DISCONNECT behind them is heard."""
    subscriber = node.client("subscriber")
    node.subscribe(subscriber, ("t", 0))
    flood = Flood(node, websocket, iter(()))
    packets = [encoded(Publish("t", b"%d" % i)) for i in range(10_000)]
    data = [encoded(Connect("flood", 5)), *packets, encoded(Disconnect())]
    flood.protocol.data_received(HANDSHAKE * websocket + b"".join(frame(BINARY, d) if websocket else d for d in data))
    node.turn()
    assert [b"%d" % i for i in range(10_000)] == [p.payload for p in subscriber.take() if isinstance(p, Publish)]
    assert flood.wire.gone


@pytest.mark.parametrize("websocket", [False, True])
@pytest.mark.parametrize("eof", [False, True])  # TLS tells of the end right behind the last bytes
@pytest.mark.parametrize("properties", [Properties(), Properties(content_type="x")])  # these go through the channel
def test_a_connection_that_breaks_while_its_packets_wait(
    node: MemoryNode, websocket: bool, eof: bool, properties: Properties
) -> None:
    """What was read before the end counts: the DISCONNECT among it, so that no will is published."""
    subscriber = node.client("subscriber")
    node.subscribe(subscriber, ("#", 0))
    flood = Flood(node, websocket, iter(()))
    packets = [encoded(Publish("t", b"%d" % i, properties=properties)) for i in range(5000)]
    data = [encoded(Connect("flood", 5, will=Will("will", b"!"))), *packets, encoded(Disconnect())]
    flood.protocol.data_received(HANDSHAKE * websocket + b"".join(frame(BINARY, d) if websocket else d for d in data))
    flood.wire.broken = True
    if eof:
        flood.protocol.eof_received()
    flood.protocol.connection_lost(None)
    flood.wire.gone = True
    node.turn()
    got = [p for p in subscriber.take() if isinstance(p, Publish)]
    assert ["t"] * 5000 == [p.topic for p in got]
    assert flood.connection not in node.broker.connections
    assert 1 == node.state.connections


def test_frames_are_measured_wherever_they_are_cut() -> None:
    """Every cut of a stream of frames ends where whole headers end, and counts each frame once."""
    stream = b"".join(
        (
            frame(PING),
            frame(BINARY, b"x" * 5),
            frame(BINARY, b"y" * 300),
            b"\x82\xff" + (70_000).to_bytes(8, "big") + bytes(70_004),
        )
    )
    for cut in [*range(400), len(stream) - 1]:
        inside = total = 0
        rest = b""
        for piece in (stream[:cut], stream[cut:]):
            data = rest + piece
            end, inside, frames = measure(data, inside, 100)
            rest = data[end:]
            total += frames
        assert (0, 4, b"") == (inside, total, rest), cut
    assert (6 + 11, 0, 2) == measure(stream, 0, 2)
