"""Packets through the fast path, one by one and in runs. `test_equivalence` compares it with the channel."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from motorcade.broker import fastpath
from motorcade.broker.window_state import Lag
from motorcade.extension.hooks import Callback
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Pingreq, Puback, Publish, Pubrec, Pubrel
from motorcade.mqtt.properties import Properties
from motorcade.mqtt.reasons import ReasonCode
from tests.support.held_store import HeldStore
from tests.support.members import Members
from tests.support.virtual import Client, MemoryNode, standing


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    node = MemoryNode()
    with standing(node.clock):
        yield node


def reader(node: MemoryNode, **more: Any) -> Client:
    client = node.client("reader", **more)
    client.subscribe("t", 2)
    return client


def test_what_nobody_hears_is_answered_with_its_reason(node: MemoryNode) -> None:
    client = node.client("publisher")
    for _ in range(2):  # the first one goes through the channel, which finds the route
        client.send(Publish("nobody", b"", 1, packet_id=1), Publish("nobody", b"", 2, packet_id=2))
        node.turn()
        answers = [packet for packet in client.take() if isinstance(packet, Puback | Pubrec)]
        assert [ReasonCode.NO_MATCHING_SUBSCRIBERS] * 2 == [answer.reason for answer in answers]
        client.send(Pubrel(2))


def test_a_qos_2_id_is_routed_once_until_it_is_released(node: MemoryNode) -> None:
    client, other = node.client("publisher"), reader(node)
    for expected in (1, 1):
        for _ in range(2):
            client.send(Publish("t", b"x", 2, packet_id=7))
            assert 7 == client.expect(Pubrec).packet_id
        client.send(Pubrel(7))
        assert expected == len(other.messages())


def test_packet_ids_begin_again_after_the_last_one(node: MemoryNode) -> None:
    client, other = node.client("publisher"), reader(node)
    client.publish("t", b"x")  # through the channel
    node.state.registry.sessions["reader"].next_id = 65535
    for _ in range(3):
        client.publish("t", b"x")
    assert [1, 65535, 2, 3] == [message.packet_id for message in other.messages()]


def test_a_run_of_packets_ends_where_one_has_properties(node: MemoryNode) -> None:
    """Their heads are the same, and so are their lengths."""
    client, new, old = node.client("publisher"), reader(node), node.client("old", 4)
    old.subscribe("t")
    plain = Publish("t", b"\0" * 7)
    told = Publish("t", b"", properties=Properties(user_properties=(("a", "b"),)))
    assert len(codec.encode(plain, 5)) == len(codec.encode(told, 5))
    for _ in range(2):
        client.send(plain, plain, told, plain)
        found = [(message.payload, message.properties.user_properties) for message in new.messages()]
        assert [(b"\0" * 7, ())] * 2 + [(b"", (("a", "b"),)), (b"\0" * 7, ())] == found
        assert [payload for payload, _ in found] == old.payloads()


def test_what_waits_goes_before_what_is_new(node: MemoryNode) -> None:
    """An acknowledgement and a message in one read: there is room, but somebody was here before."""
    client = reader(node, receive_maximum=1)
    for payload in (b"1", b"2"):
        client.publish("t", payload)
    (first,) = client.messages()
    client.send(Puback(first.packet_id), Publish("t", b"3", 1, packet_id=9))
    assert [b"2"] == client.payloads()
    client.ack(client.inflight[-1])
    assert [b"3"] == client.payloads()


def test_answers_that_wait_for_the_store_are_not_passed() -> None:
    store = HeldStore()
    node = MemoryNode(store=store)
    with standing(node.clock):
        node.client("asleep", clean=False, session_expiry=1000).subscribe("kept")
        node.client("awake").subscribe("live")
        client = node.client("publisher")
        for topic in ("kept", "live"):
            client.publish(topic, b"")
        store.held = True
        client.send(*(Publish(topic, b"", 1, packet_id=n) for n, topic in enumerate(("kept", "live"), 11)))
        node.turn()
        assert [] == client.take()
        store.held = False
        store.let_go()
        node.turn()
        assert [11, 12] == [packet.packet_id for packet in client.take() if isinstance(packet, Puback)]


# -- the table of conditions

LINES, FIRST = inspect.getsourcelines(fastpath.run)
#: Line number -> row of the table that a packet is left by there.
LEAVES = {
    number: found[1] for number, line in enumerate(LINES, FIRST) if (found := re.search(r"# leave: ([a-z-]+)", line))
}
TABLE = re.findall(r"^    ([a-z-]+) +(?:any|PUBLISH|QoS|PUBACK)", fastpath.__doc__ or "", re.MULTILINE)


def test_each_place_that_leaves_a_packet_names_its_row() -> None:
    assert set(TABLE) == set(LEAVES.values())
    unnamed = [
        line for number, line in enumerate(LINES, FIRST) if line.strip().startswith("break") and number not in LEAVES
    ]
    assert len(unnamed) == 1, "the end of a run of equal packets is the only other one"


class Road:
    """Subscribers of every kind, and a publisher that has published to all of them."""

    def __init__(self) -> None:
        self.members = Members(2, store=HeldStore())
        self.node, elsewhere = self.members.nodes
        with standing(self.node.clock):
            elsewhere.client("there").subscribe("remote", 2)
            for name, topics in (("awake", ("live", "mixed", "alone")), ("other", ("live",))):
                client = self.node.client(name)
                for topic in topics:
                    client.subscribe(topic, 2)
            asleep = self.node.client("asleep", clean=False, session_expiry=1000)
            for topic in ("kept", "mixed"):
                asleep.subscribe(topic)
            self.node.hooks.add("message.publish", Callback(lambda *_: None, 0, "test", topics=("hooked",)))
            self.publisher = self.node.client("publisher")
            self.durable = self.node.client("durable", clean=False, session_expiry=1000)
            for topic in ("live", "mixed", "alone", "kept", "hooked", "remote"):
                self.publisher.publish(topic, b"")
                self.durable.publish(topic, b"")

    def left_by(self, do: Callable[[Road], None]) -> set[str]:
        """The rows of the table by which packets were left."""
        found: set[str] = set()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code is fastpath.run.__code__ and event == "line" and frame.f_lineno in LEAVES:
                found.add(LEAVES[frame.f_lineno])
            return trace

        before = sys.gettrace()
        with standing(self.node.clock):
            sys.settrace(trace)
            try:
                do(self)
            finally:
                sys.settrace(before)
        return found


def message(topic: str, qos: int = 1, number: int = 9, **properties: Any) -> Publish:
    return Publish(topic, b"x", qos, packet_id=number if qos else 0, properties=Properties(**properties))


def hold(road: Road) -> None:
    store = road.node.store
    assert isinstance(store, HeldStore)
    store.held = True
    road.publisher.send(message("kept"), message("live", number=10))


def fall_behind(road: Road) -> None:
    road.node.state.registry.sessions["awake"].lag = Lag.BEHIND
    road.publisher.send(message("alone"))


def lose_view(road: Road) -> None:
    road.node.cluster.holds = False
    road.publisher.send(message("live"))


def fill_peer(road: Road) -> None:
    (link,) = road.node.cluster.links.values()
    link.room_for = 0
    road.publisher.send(message("remote"))


def without_id(road: Road) -> None:
    road.publisher.send(codec.encode(message("live", number=1), 5).replace(b"live\0\1", b"live\0\0"))


LEFT: dict[str, Callable[[Road], None]] = {
    "unfinished": lambda road: road.publisher.send(codec.encode(message("live"), 5)[:6]),
    "kind": lambda road: road.publisher.send(Publish("live", b"x", 1, retain=True, packet_id=9)),
    "route": lambda road: road.publisher.send(message("new")),
    "hooks": lambda road: road.publisher.send(message("hooked")),
    "properties": lambda road: road.publisher.send(message("live", content_type="a")),
    "order": lambda road: road.publisher.send(message("kept"), message("kept", 0)),
    "id": without_id,
    "kept": lambda road: road.publisher.send(message("mixed")),
    "durable": lambda road: road.durable.send(message("live", 2)),
    "answers": hold,
    "view": lose_view,
    "remote": fill_peer,
    "behind": fall_behind,
    "store": lambda road: road.publisher.send(message("kept")),
    "awaiting": lambda road: road.publisher.send(message("live", 2), message("live", 2)),
    "in-flight": lambda road: road.publisher.send(Puback(77)),
}


@pytest.mark.parametrize(
    "leave",
    [
        lambda road: road.publisher.send(message("remote", 2)),  # it needs an id that other members know
        lambda road: road.publisher.send(message("nightly", 0)),  # it is stored for one that sleeps
        lambda road: road.publisher.send(message("shared")),  # another node chooses
    ],
)
def test_what_else_is_left_because_of_others(leave: Callable[[Road], None]) -> None:
    road = Road()
    with standing(road.node.clock):
        elsewhere = road.members.nodes[1]
        elsewhere.client("member").subscribe("$share/g/shared", 1)
        sleeper = elsewhere.client("sleeper", clean=False, session_expiry=1000)
        sleeper.subscribe("nightly")
        sleeper.disconnect()
        for topic in ("shared", "nightly"):
            road.publisher.publish(topic, b"")
    assert {"remote"} == road.left_by(leave) - {"unfinished"}


@pytest.mark.parametrize("row", TABLE)
def test_each_row_of_the_table_leaves_a_packet_to_the_channel(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    road = Road()
    plain = road.left_by(
        lambda road: road.publisher.send(
            Pingreq(), message("live"), message("remote", 0), message("remote"), message("kept", number=10)
        )
    )
    assert plain <= {"unfinished"}, "what is plain is taken"
    with standing(road.node.clock):
        road.node.turn()
    if row == "store":
        monkeypatch.setattr(fastpath, "MAX_ROWS", 0)
    assert row in road.left_by(LEFT[row])
