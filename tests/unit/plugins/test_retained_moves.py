"""What a client retains on one member is never overtaken by what it has retained on the one it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.broker.attachments import DRAIN_PATIENCE
from motorcade.mqtt.packets import Connack, Connect, Puback, Publish, Will
from motorcade.mqtt.properties import Properties
from motorcade.plugins.retained.record import COLLECTION, decode
from tests.support.held_store import Waiting
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, standing

LASTING = Properties(session_expiry=100)


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(2, plugins={"retained": {}})
    with standing(made.clock):
        yield made


def stored(members: Members, topic: str) -> bytes | None:
    value = members.store.records_of(COLLECTION).get(topic)
    return None if value is None else decode(topic, value).payload


def slow_write(members: Members) -> Waiting[Any]:
    """The write that was made last goes to a server that takes its time; those of others are done."""
    assert len(members.store.waiting) == 1
    call = members.store.waiting.pop()
    members.store.held = False
    return call


def done(members: Members, call: Waiting[Any]) -> None:
    """It is done at last."""
    with members.loop.running():
        call.go()
    members.turn()


def publish_slowly(members: Members, client: Client, qos: int) -> Waiting[Any]:
    members.store.held = True
    client.send(Publish("t", b"1", qos, retain=True, packet_id=1 if qos else 0))
    client.node.turn()
    return slow_write(members)


def connect(members: Members, node: MemberNode, properties: Properties) -> Client:
    """The client comes to a member, which may take some time; one that was displaced may not know of that yet."""
    for _ in range(5):
        client = Client(node, "car")
        client.send(Connect("car", 5, False, properties=properties))
        members.wait(1.2)
        if client.open and [packet for packet in client.take() if isinstance(packet, Connack) and not packet.reason]:
            return client
    raise AssertionError("it is not let in")


def goes_on(
    members: Members, node: MemberNode, properties: Properties, call: Waiting[Any], *, patient: bool = False
) -> None:
    """The client comes to another member, and publishes there; what it has published before comes first."""
    client = connect(members, node, properties)
    client.send(Publish("t", b"2", 1, retain=True, packet_id=7))
    members.wait(3)
    assert not [packet for packet in client.take() if isinstance(packet, Puback)]
    assert stored(members, "t") is None
    done(members, call)
    members.wait(DRAIN_PATIENCE if patient else 1)
    assert [7] == [packet.packet_id for packet in client.take() if isinstance(packet, Puback)]
    assert stored(members, "t") == b"2"


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("properties", [LASTING, Properties()], ids=["durable", "clean"])
@pytest.mark.parametrize("way", ["moves", "breaks off", "is displaced"])
def test_a_late_write_does_not_overtake_what_the_client_writes_elsewhere(
    members: Members, qos: int, properties: Properties, way: str
) -> None:
    a, b = members.nodes
    car = a.client("car", properties=properties)
    call = publish_slowly(members, car, qos)
    if way == "breaks off":
        car.close()
        members.wait(0.1)
    elif way == "is displaced":
        b.cluster.mute.add(a.member)
        members.loop.call_later(1.5, b.cluster.mute.clear)
    goes_on(members, b, properties, call, patient=way == "is displaced")


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("properties", [LASTING, Properties()], ids=["durable", "clean"])
@pytest.mark.parametrize("way", ["moves", "breaks off"])
def test_a_will_is_retained_before_what_its_client_writes_elsewhere(
    members: Members, qos: int, properties: Properties, way: str
) -> None:
    """ "offline" must not come after "online"."""
    a, b = members.nodes
    will = Will("t", b"offline", qos, retain=True)
    car = a.client("car", properties=properties, will=will)
    held: list[Waiting[Any]] = []
    write = a.plugin_store.write

    def slowly(batch: Any) -> Any:
        if any(getattr(step, "collection", "") == COLLECTION for step in batch.steps):
            members.store.held = True
            commit = write(batch)
            held.append(members.store.waiting.pop())
            members.store.held = False
            members.store.let_go()
            return commit
        return write(batch)

    a.plugin_store.write = slowly  # type: ignore[method-assign]
    if way == "breaks off":
        car.close()
        members.wait(0.1)
    client = connect(members, b, properties)
    client.send(Publish("t", b"online", 1, retain=True, packet_id=7))
    members.wait(3)
    assert 1 == len(held)
    assert stored(members, "t") in (None, b"offline")  # a member that displaces another one publishes what is owed
    done(members, held[0])
    members.wait(1)
    assert [7] == [packet.packet_id for packet in client.take() if isinstance(packet, Puback)]
    assert stored(members, "t") == b"online"


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_a_client_that_moves_on_waits_for_the_first_member_too(qos: int, hops: int) -> None:
    members = Members(3, plugins={"retained": {}})
    with standing(members.clock):
        car = members.nodes[0].client("car", properties=LASTING)
        call = publish_slowly(members, car, qos)
        for hop in range(1, hops):
            connect(members, members.nodes[hop % 3], LASTING)
        goes_on(members, members.nodes[hops % 3] if hops != 3 else members.nodes[1], LASTING, call)


def test_a_member_that_is_found_dead_is_not_waited_for(members: Members) -> None:
    """Nothing that it still sends is stored."""
    a, b = members.nodes
    car = a.client("car", properties=LASTING)
    publish_slowly(members, car, 1)
    b.cluster.mute.add(a.member)
    client = connect(members, b, LASTING)
    client.send(Publish("t", b"2", 1, retain=True, packet_id=7))
    members.wait(3)
    assert stored(members, "t") is None
    members.kill(a)
    members.wait(DRAIN_PATIENCE)
    assert [7] == [packet.packet_id for packet in client.take() if isinstance(packet, Puback)]
    assert stored(members, "t") == b"2"
