"""What does not end by itself: a CONNECT, an authentication, hooks that set each other off, a flood of lines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from motorcade.broker import broker as broker_module
from motorcade.broker import connection as connection_module
from motorcade.broker.broker import MAX_DEPTH, REFUSALS_LOGGED
from motorcade.broker.limits import Limits, LogLimit
from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.message import Message
from motorcade.extension.hooks import Allow, Callback, Decision, Stop
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Connack, Connect, Pingreq, Publish
from motorcade.mqtt.reasons import ReasonCode
from tests.support.virtual import MemoryNode, standing


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    node = MemoryNode(limits=Limits(connect_timeout=5.0, auth_timeout=30.0, connect_rate=0.0))
    with standing(node.clock):
        yield node


class Lines:
    """A logger that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    warning = error = info


def later(node: MemoryNode, seconds: float) -> None:
    node.clock.now += seconds
    node.broker._tick()
    node.turn()


@pytest.mark.parametrize("version", [4, 5])
def test_the_time_for_connect_ends_with_its_last_byte(node: MemoryNode, version: int) -> None:
    """A CONNECT that is not whole is waited for as long as `connect_timeout`, an authentication for `auth_timeout`."""
    answer: asyncio.Future[Decision] = asyncio.Future(loop=node.broker.loop)

    async def ask(_client: ClientInfo, _credentials: Credentials, _decision: Decision | None) -> Stop:
        return Stop(await asyncio.shield(answer))

    node.hooks.add("client.authenticate", Callback(ask, 0, "slow", timeout=1000.0))
    connect = codec.encode(Connect("c", version), version)
    half, whole, patient = (node.peer(version) for _ in range(3))
    half.send(connect[:-1])
    node.broker.loop.call_soon(whole.send, connect)
    node.turn()
    later(node, 4.9)
    assert [True, True] == [peer.open for peer in (half, whole)]
    node.broker.loop.call_soon(patient.send, codec.encode(Connect("p", version), version))
    node.turn()
    later(node, 0.2)
    assert [False, True] == [peer.open for peer in (half, whole)]
    assert b"" == bytes(half.wire.written)
    assert {"connect_timeout": 1} == {name: count for name, count in node.state.stats.refused.items() if count}
    later(node, 24.8)
    assert 0 == node.state.stats.refused["auth_timeout"]
    later(node, 0.3)
    assert [False, True] == [peer.open for peer in (whole, patient)]
    (connack,) = whole.take()
    assert isinstance(connack, Connack)
    assert connack.reason is ReasonCode.SERVER_UNAVAILABLE
    assert 1 == node.state.stats.refused["auth_timeout"]
    answer.set_result(Allow())
    node.turn()
    assert ["p"] == list(node.state.registry.sessions)


@pytest.mark.parametrize("waits", [False, True])
def test_a_hook_that_publishes_to_itself_is_cut(node: MemoryNode, waits: bool) -> None:
    """Whether it awaits what it publishes or not; the log names the plugin, once, and all of them are counted."""
    seen: list[str] = []

    def on_publish(_client: ClientInfo | None, message: Message) -> None:
        seen.append(message.topic)
        for branch in ("a", "b") if len(seen) < 100 else ("a",):
            node.broker.loop.create_task(node.broker.publish(Message(f"loop/{branch}", b"")))

    async def on_publish_waits(_client: ClientInfo | None, message: Message) -> None:
        seen.append(message.topic)
        await node.broker.publish(Message("loop/again", b""))

    hook = on_publish_waits if waits else on_publish
    node.hooks.add("message.publish", Callback(hook, 0, "circular", topics=("loop/#",), timeout=1000.0))
    lines = Lines()
    client = node.client("client")
    with patch.object(broker_module, "log", lines):
        for _ in range(3):
            node.broker.loop.call_soon(client.send, Publish("loop/begin", b"x"))
            node.turn()
        assert len(seen) == 3 * (MAX_DEPTH + 1) if waits else len(seen) < 2 ** (MAX_DEPTH + 3)
        assert node.state.stats.dropped["hook_loop"] >= 3
        (line,) = lines.lines
        assert ("hook_loop", ["circular"]) == (line[0], line[1]["plugins"])
        later(node, 11.0)
        assert ("hooks_publish_in_a_loop", {"more": node.state.stats.dropped["hook_loop"] - 1}) == lines.lines[-1]
    seen.clear()
    done = node.broker.loop.create_task(node.broker.publish(Message("other", b"")))
    node.turn()
    assert done.done() and not seen


def test_a_plugin_may_publish_for_ever_if_nothing_of_it_comes_back(node: MemoryNode) -> None:
    """A task that a hook has started publishes message after message: none is the consequence of another."""

    async def work() -> None:
        for number in range(5 * MAX_DEPTH):
            await node.broker.publish(Message(f"result/{number}", b""))

    def on_publish(_client: ClientInfo | None, _message: Message) -> None:
        node.broker.loop.create_task(work())

    node.hooks.add("message.publish", Callback(on_publish, 0, "busy", topics=("job",)))
    subscriber = node.client("subscriber")
    node.subscribe(subscriber, ("result/#", 0))
    node.client("client").send(Publish("job", b""))
    node.turn()
    assert 5 * MAX_DEPTH == len(subscriber.take())
    assert 0 == node.state.stats.dropped["hook_loop"]


def test_refused_clients_are_logged_with_a_bound(node: MemoryNode) -> None:
    """A flood of them is a number, not a flood of lines."""
    lines = Lines()
    with patch.object(broker_module, "log", lines), patch.object(connection_module, "log", lines):
        for _ in range(1000):
            node.peer().send(b"\xc0\x00")
        node.turn()
        assert ["client_refused"] * REFUSALS_LOGGED == [event for event, _ in lines.lines]
        later(node, 5.0)
        assert REFUSALS_LOGGED == len(lines.lines)
        later(node, 6.0)
        assert ("clients_refused", {"more": 1000 - REFUSALS_LOGGED}) == lines.lines[-1]
        node.peer().send(b"\xc0\x00")
        assert REFUSALS_LOGGED + 1 == [event for event, _ in lines.lines].count("client_refused")


def test_lines_are_counted_per_window() -> None:
    limit = LogLimit(2, 10.0)
    assert [True, True, False, False] == [limit.admits(100.0) for _ in range(4)]
    assert 0 == limit.over(105.0)
    assert 2 == limit.over(111.0)
    assert 0 == limit.over(130.0)
    assert [True, True, False] == [limit.admits(130.0) for _ in range(3)]


def test_a_node_without_memory_takes_nothing_new() -> None:
    """Clients and messages are refused, what is there is served on, and some way below the bound all is as before."""
    node = MemoryNode(limits=Limits(max_memory=1000))
    taken = [0]
    with standing(node.clock), patch.object(broker_module, "resident_memory", lambda: taken[0]):
        new, old = node.client("new"), node.client("old", 4)
        node.subscribe(new, ("t", 1))
        for size, full in ((1000, False), (1001, True), (960, True), (950, False), (1000, False), (2000, True)):
            taken[0] = size
            later(node, 1.0)
            assert full is node.state.full, size
        new.send(Publish("t", b"0"), Publish("t", b"1", 1, packet_id=1), Publish("t", b"2", 2, packet_id=2))
        new.send(Pingreq())
        node.turn()
        quota = ReasonCode.QUOTA_EXCEEDED
        answers = [(type(p).__name__, getattr(p, "reason", None)) for p in new.take()]
        assert [("Puback", quota), ("Pubrec", quota), ("Pingresp", None)] == answers
        old.send(Publish("t", b"0"), Pingreq())
        node.turn()
        assert 1 == len(old.take())
        old.send(Publish("t", b"1", 1, packet_id=1))
        node.turn()
        stranger = node.peer()
        stranger.send(Connect("stranger", 5))
        node.turn()
        (connack,) = stranger.take()
        assert isinstance(connack, Connack) and connack.reason is quota
        assert [False, False, True] == [peer.open for peer in (old, stranger, new)]
        assert (6, 5) == (node.state.stats.refused["max_memory"], node.state.stats.dropped["no_memory"])
        taken[0] = 100
        later(node, 1.0)
        new.send(Publish("t", b"again"))
        node.turn()
        assert [b"again"] == [p.payload for p in new.take() if isinstance(p, Publish)]
