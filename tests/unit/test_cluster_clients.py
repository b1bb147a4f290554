"""An operator asks one member about the clients of all: a list, one client, and sending one away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from motorcade.broker.session_records import SESSIONS
from motorcade.client_control import DISCONNECTED, REMOVED, ClientPage, Directory, LocalClients, NotFoundError
from motorcade.cluster_clients import ClusterClients
from motorcade.core.reasons import ReasonCode
from motorcade.extension.ask_all import PATIENCE, UnansweredError
from motorcade.mqtt.packets import Disconnect, Will
from motorcade.mqtt.properties import Properties
from tests.support.members import MemberNode, Members
from tests.support.virtual import Peer, standing

T = TypeVar("T")

LASTING: dict[str, Any] = {"clean": False, "session_expiry": 100}


class World:
    def __init__(self, members: Members) -> None:
        self.members = members
        self.directories = [self.directory(node) for node in members.nodes]

    def directory(self, node: MemberNode) -> Directory:
        assert node.session_store is not None
        return ClusterClients(node.cluster, LocalClients(node.broker), node.attachments, node.session_store.store)

    def run(self, work: Any, seconds: float = 0.0) -> Any:
        node = self.members.nodes[0]
        task: asyncio.Task[Any] = node.begin(work)
        if seconds:
            self.members.wait(seconds)
        assert task.done()
        return task.result()

    def page(self, directory: Directory, cursor: str = "", limit: int = 100, search: str = "", node: str = "") -> Any:
        return self.run(directory.page(cursor, limit, search, node))

    def all(self, directory: Directory, limit: int, search: str = "") -> list[tuple[str, str | None]]:
        """All pages."""
        found: list[tuple[str, str | None]] = []
        cursor: str | None = ""
        while cursor is not None:
            page: ClientPage = self.page(directory, cursor, limit, search)
            assert len(page.clients) <= limit
            found += ((view.client_id, view.node) for view in page.clients)
            cursor = page.cursor
        return found


@pytest.fixture
def world() -> Iterator[World]:
    members = Members(3)
    with standing(members.clock):
        yield World(members)


def goodbye(peer: Peer) -> ReasonCode | None:
    return next((packet.reason for packet in peer.take() if isinstance(packet, Disconnect)), None)


# -- the list


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_the_list_has_every_client_once(world: World, limit: int) -> None:
    nodes = world.members.nodes
    expected: list[tuple[str, str | None]] = []
    for number in range(9):
        nodes[number % 3].admit(f"car{number}", username="fleet" if number % 2 else None)
        expected.append((f"car{number}", f"n{number % 3 + 1}"))
    for number in range(4):
        sleeper = nodes[number % 3].admit(f"asleep{number}", username="fleet", **LASTING)
        sleeper.subscribe("t", 1)
        sleeper.disconnect()
    world.members.wait(2)
    nodes[0].client("p").publish("t", b"x" * 10)
    expected = [*expected, ("p", "n1"), *((f"asleep{number}", None) for number in range(4))]
    for directory in world.directories:
        assert expected == world.all(directory, limit)
        assert [one for one in expected if one[0] in "car1 car3 car5 car7" or one[1] is None] == world.all(
            directory, limit, "FLEET"
        )
    view = world.page(world.directories[0], search="asleep2").clients[0]
    assert (False, "fleet", 1, 1) == (view.connected, view.username, view.subscriptions, view.queued)
    assert view.expires_at > 0 and view.queued_bytes >= 10


def test_the_list_of_one_node(world: World) -> None:
    a, b, _ = world.members.nodes
    a.admit("here")
    b.admit("there")
    b.admit("asleep", **LASTING).disconnect()
    world.members.wait(2)
    for directory in world.directories:
        page = world.page(directory, node="n2")
        assert [("there", "n2")] == [(view.client_id, view.node) for view in page.clients]
        assert (1, None) == (page.count, page.cursor)
    with pytest.raises(NotFoundError, match="there are n1, n2, n3"):
        world.page(world.directories[0], node="n4")


def test_a_member_that_does_not_answer_is_named(world: World) -> None:
    a, b, c = world.members.nodes
    for number, node in enumerate((a, b, c)):
        node.admit(f"car{number}")
    a.cluster.mute.add(b.member)
    page = world.run(world.directories[0].page("", 100, "", ""), PATIENCE + 1)
    assert ["car0", "car2"] == [view.client_id for view in page.clients]
    assert ["n2"] == list(page.unanswered)


# -- one client


def test_a_client_is_found_wherever_it_is(world: World) -> None:
    a, b, _ = world.members.nodes
    a.admit("here").subscribe("t", 1)
    sleeper = b.admit("asleep", will=Will("gone", b"x", 1), **LASTING)
    sleeper.subscribe("t/#", 2)
    for directory in world.directories:
        assert "n1" == world.run(directory.show("here")).client.node
        assert "n2" == world.run(directory.show("asleep")).client.node
    sleeper.close()
    world.members.wait(2)
    for directory in world.directories:
        detail = world.run(directory.show("asleep"))
        assert (None, False, 100) == (detail.client.node, detail.client.connected, detail.session_expiry)
        assert [("t/#", 2)] == [(view.filter, view.qos) for view in detail.subscriptions]
        with pytest.raises(NotFoundError):
            world.run(directory.show("nobody"))


def test_a_client_may_be_at_a_member_that_does_not_answer(world: World) -> None:
    a, b, c = world.members.nodes
    b.admit("car")
    c.admit("asleep", **LASTING).disconnect()
    world.members.wait(2)
    a.cluster.mute.add(b.member)
    with pytest.raises(UnansweredError, match="no answer from: n2"):
        world.run(world.directories[0].show("car"), PATIENCE + 1)
    assert ["n2"] == list(world.run(world.directories[0].show("asleep"), PATIENCE + 1).unanswered)


# -- sending one away


@pytest.mark.parametrize("kind", [{}, LASTING], ids=["clean", "lasting"])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_client_is_sent_away_from_anywhere(world: World, kind: dict[str, Any], asked: int) -> None:
    _, b, c = world.members.nodes
    seen = c.client("seen")
    seen.subscribe("gone", 1)
    car = b.admit("car", will=Will("gone", b"car", 1), **kind)
    done = world.run(world.directories[asked].kick("car"))
    assert (DISCONNECTED, "n2", {}) == (done.result, done.node, done.unanswered)
    assert ReasonCode.ADMINISTRATIVE_ACTION == goodbye(car)
    assert not car.open
    world.members.wait(2)
    assert [b"car"] == seen.payloads()
    assert bool(kind) is b.admit("car", **LASTING).connack.session_present


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_session_that_sleeps_is_ended(world: World, asked: int) -> None:
    _, b, c = world.members.nodes
    seen = c.client("seen")
    seen.subscribe("gone", 1)
    car = b.admit("car", will=Will("gone", b"car", 1, properties=Properties(will_delay=50)), **LASTING)
    car.subscribe("t", 1)
    car.close()
    world.members.wait(2)
    done = world.run(world.directories[asked].kick("car"))
    assert (REMOVED, None) == (done.result, done.node)
    world.members.wait(2)
    assert {} == world.members.store.records_of(SESSIONS)
    assert [b"car"] == seen.payloads()
    with pytest.raises(NotFoundError):
        world.run(world.directories[asked].kick("car"))


@pytest.mark.parametrize("kind", [{}, LASTING], ids=["clean", "lasting"])
def test_a_client_is_taken_from_a_member_that_does_not_answer(world: World, kind: dict[str, Any]) -> None:
    """It is closed as soon as its member goes on."""
    a, b, _ = world.members.nodes
    car = b.admit("car", **kind)
    a.cluster.mute.add(b.member)
    done = world.run(world.directories[0].kick("car"), PATIENCE + 3)
    assert (DISCONNECTED, ["n2"]) == (done.result, list(done.unanswered))
    a.cluster.mute.clear()
    world.members.wait(40)
    assert not car.open
    assert 0 == sum(len(node.attachments) for node in world.members.nodes)
    a.cluster.mute.add(b.member)
    with pytest.raises(UnansweredError, match="n2"):
        world.run(world.directories[0].kick("nobody"), PATIENCE + 3)
