"""What a cluster does once, whichever member does it: a client id is one client, and a will is published once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.broker.attachments import CLAIM_AGAIN, LET_GO
from motorcade.broker.session_records import SESSIONS
from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.packets import Connack, Connect, Disconnect, Puback, Pubrec, Will
from motorcade.mqtt.properties import Properties
from motorcade.storage.ports import StoreAwayError
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, Peer, standing

CLEAN: dict[str, Any] = {"clean": True}
LASTING: dict[str, Any] = {"clean": False, "session_expiry": 100}


@pytest.fixture
def members() -> Iterator[Members]:
    found = Members(3)
    with standing(found.clock):
        yield found


def watcher(node: MemberNode, qos: int = 1) -> Client:
    client = node.client("watcher")
    client.subscribe("will", qos)
    return client


def wanted(client_id: str, *, clean: bool = True, will: Will | None = None, expiry: int = 0) -> Connect:
    return Connect(client_id, 5, clean, will=will, properties=Properties(session_expiry=expiry))


def goodbye(peer: Peer) -> ReasonCode | None:
    return next((packet.reason for packet in peer.take() if isinstance(packet, Disconnect)), None)


def connected(members: Members, client_id: str) -> list[str]:
    """Members with a connection of a client."""
    return [node.member for node in members.nodes if node.broker.client(client_id) is not None]


def received(client: Client) -> list[bytes]:
    """All payloads that come, whatever their QoS is."""
    found: list[bytes] = []
    while messages := client.messages():
        found += (bytes(message.payload) for message in messages)
        client.send(*(Puback(m.packet_id) if m.qos == 1 else Pubrec(m.packet_id) for m in messages if m.qos))
    return found


# -- one id, one client


@pytest.mark.parametrize("before", [CLEAN, LASTING], ids=["clean", "lasting"])
@pytest.mark.parametrize("after", [CLEAN, LASTING], ids=["clean", "lasting"])
def test_who_comes_elsewhere_takes_over(members: Members, before: dict[str, Any], after: dict[str, Any]) -> None:
    """[MQTT-3.1.4-3]: the first one hears why it has to go."""
    a, b, _ = members.nodes
    first = a.admit("car", **before)
    b.admit("car", **after)
    assert ReasonCode.SESSION_TAKEN_OVER == goodbye(first)
    assert [b.member] == connected(members, "car")


def test_an_old_client_is_just_closed(members: Members) -> None:
    a, b, _ = members.nodes
    first = a.admit("car", 4)
    b.admit("car", 4)
    assert [] == first.take()
    assert not first.open


def test_an_id_goes_round_the_cluster(members: Members) -> None:
    """The last one stays, and nothing of the others is left."""
    for number in range(9):
        clean = bool(number % 2)
        members.nodes[number % 3].admit("car", clean=clean, session_expiry=0 if clean else 100)
    assert [members.nodes[2].member] == connected(members, "car")
    assert 1 == sum(len(node.attachments) for node in members.nodes)


def test_of_two_let_in_without_the_store_one_stays(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = members.nodes

    async def away(*_args: object, **_more: object) -> None:
        raise StoreAwayError("the server is away")

    with monkeypatch.context() as patches:
        patches.setattr(members.store.inner.coordination, "try_open", away)
        a.client("car")
        b.client("car")
        assert 2 == len(connected(members, "car"))
    members.wait(2 * CLAIM_AGAIN + LET_GO)
    assert 1 == len(connected(members, "car"))
    assert connected(members, "car") == [m for m, _ in members.store.inner.mailboxes.attached.values()]


# -- wills


@pytest.mark.parametrize("kind", [CLEAN, LASTING], ids=["clean", "lasting"])
def test_a_client_that_goes_well_leaves_no_will(members: Members, kind: dict[str, Any]) -> None:
    a, b, _ = members.nodes
    seen = watcher(b)
    a.admit("car", will=Will("will", b"gone", 1), **kind).disconnect()
    members.kill(a)
    members.wait(5)
    assert [] == seen.payloads()


@pytest.mark.parametrize("kind", [CLEAN, LASTING], ids=["clean", "lasting"])
def test_a_take_over_elsewhere_publishes_the_will_once(members: Members, kind: dict[str, Any]) -> None:
    """The connection was closed without a DISCONNECT of the client: [MQTT-3.1.2-8]."""
    a, b, c = members.nodes
    seen = watcher(c)
    a.admit("car", will=Will("will", b"first", 1), **kind)
    b.admit("car", will=Will("will", b"second", 1), **kind)
    members.wait(3)
    assert [b"first"] == seen.payloads()
    members.kill(b)
    members.wait(5)
    assert [b"second"] == seen.payloads()
    assert kind is LASTING or {} == members.store.records_of(SESSIONS)


@pytest.mark.parametrize("kind", [CLEAN, LASTING], ids=["clean", "lasting"])
def test_a_silent_members_will_is_published_by_who_displaces_it(members: Members, kind: dict[str, Any]) -> None:
    a, b, c = members.nodes
    seen = watcher(c)
    a.admit("car", will=Will("will", b"gone", 1), **kind)
    b.cluster.mute.add(a.member)
    peer = b.peer()
    expiry = 100 if kind is LASTING else 0
    peer.send(wanted("car", clean=expiry == 0, expiry=expiry))
    members.wait(LET_GO)
    assert [Connack] == [type(packet) for packet in peer.take()]
    b.cluster.mute.clear()
    members.wait(40)
    assert [b"gone"] == seen.payloads()
    assert [b.member] == connected(members, "car")


@pytest.mark.parametrize(
    ("delay", "expiry", "after"),
    [(10, 100, 10), (50, 20, 20), (10, 0, 0)],
    ids=["its delay", "the end of its session", "no session"],
)
def test_the_will_of_a_dead_members_client_waits_for(members: Members, delay: int, expiry: int, after: int) -> None:
    """[MQTT-3.1.3-9]; the delay begins when the member is found dead."""
    a, b, _ = members.nodes
    seen = watcher(b)
    will = Will("will", b"gone", 1, properties=Properties(will_delay=delay))
    a.admit("car", clean=expiry == 0, session_expiry=expiry, will=will)
    members.kill(a)
    if after:
        members.wait(after - 2)
        assert [] == seen.payloads()
    members.wait(5)
    assert [b"gone"] == seen.payloads()
    members.wait(200)
    assert [] == seen.payloads()
    assert {} == members.store.records_of(SESSIONS)


def test_no_will_of_a_dead_members_client_that_is_back_in_time(members: Members) -> None:
    a, b, c = members.nodes
    seen = watcher(b)
    will = Will("will", b"gone", 1, properties=Properties(will_delay=10))
    a.admit("car", will=will, **LASTING)
    members.kill(a)
    members.wait(5)
    assert c.admit("car", **LASTING).connack.session_present
    members.wait(30)
    assert [] == seen.payloads()


@pytest.mark.parametrize("qos", [1, 2])
def test_a_will_is_not_lost_with_the_steward(members: Members, qos: int) -> None:
    """The second one publishes it again under the same id, so that it counts once at QoS 2."""
    a, b, c = members.nodes
    seen = watcher(c, 2)
    stored = c.admit("stored", **LASTING)
    stored.subscribe("will", 2)
    a.admit("car", will=Will("will", b"gone", qos), **LASTING)
    a.admit("van", will=Will("will", b"gone too", qos))
    members.store.held = True
    members.kill(a)
    for _ in range(12):  # the steward dies somewhere on its way
        members.wait(0.25)
        members.store.let_go(1)
    members.kill(b)
    members.store.held = False
    members.store.let_go()
    members.wait(10)
    for client in (seen, stored):
        found = received(client)
        assert {b"gone", b"gone too"} == set(found)
        assert qos == 1 or 2 == len(found)
    members.wait(200)
    assert [] == received(seen)
    assert {"stored"} == members.store.records_of(SESSIONS).keys()


def test_two_stewards_publish_a_will_once(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = members.nodes
    seen = watcher(c, 2)
    for number in range(20):
        kind = LASTING if number % 2 else CLEAN
        a.admit(f"car{number}", will=Will("will", b"%d" % number, 1), **kind)
    for node in (b, c):
        monkeypatch.setattr(node.cluster, "is_steward", lambda _feed: True)
    members.kill(a)
    members.wait(10)
    assert sorted(b"%d" % number for number in range(20)) == sorted(seen.drain())


def test_a_will_that_was_left_while_the_store_was_away(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean client is let in while the store is away, will and all; its will is published if it is lost."""
    a, b, _ = members.nodes
    seen = watcher(b)

    async def away(*_args: object, **_more: object) -> None:
        raise StoreAwayError("the server is away")

    with monkeypatch.context() as patches:
        patches.setattr(members.store.inner.coordination, "try_open", away)
        car = a.admit("car", will=Will("will", b"gone", 1))
        car.close()
        members.wait(1)
        assert [b"gone"] == seen.payloads()
        a.admit("van", will=Will("will", b"gone too", 1))
    members.wait(3)
    members.kill(a)
    members.wait(5)
    assert [b"gone too"] == seen.payloads()
