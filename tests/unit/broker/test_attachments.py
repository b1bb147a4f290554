"""Clients of a cluster: they come, move, sleep, and what is theirs is done once, whichever member dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from motorcade.broker.attachments import DRAIN_PATIENCE, LET_GO
from motorcade.broker.session_records import (
    AWAITING,
    SESSIONS,
    SUBSCRIPTIONS,
    decode_session,
    pair,
    subscription_record,
)
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Will,
)
from motorcade.mqtt.properties import Properties
from motorcade.storage.ports import StoreAwayError, StoreFencedError
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, Peer, standing

LASTING = Properties(session_expiry=100)


@pytest.fixture
def members() -> Iterator[Members]:
    found = Members(3)
    with standing(found.clock):
        yield found


def lasting(node: MemberNode, name: str, *filters: str, clean: bool = False, expiry: int = 100) -> Client:
    client = node.admit(name, clean=clean, session_expiry=expiry)
    for filter_ in filters:
        client.subscribe(filter_, 2)
    return client


def goodbye(peer: Peer) -> ReasonCode | None:
    """The reason of the DISCONNECT that has come."""
    return next((packet.reason for packet in peer.take() if isinstance(packet, Disconnect)), None)


def attached(members: Members) -> dict[str, list[str]]:
    """Members and their clients, as the store has it."""
    found: dict[str, list[str]] = {}
    for home, (member, _) in members.store.inner.mailboxes.attached.items():
        found.setdefault(member, []).append(home.removeprefix("client:"))
    return found


# -- moves


def test_a_session_moves_with_its_client(members: Members) -> None:
    a, b, _ = members.nodes
    here = lasting(a, "car", "t")
    publisher = b.client("publisher")
    publisher.publish("t", b"1")
    assert [b"1"] == here.payloads()
    there = b.admit("car", clean=False, session_expiry=100)
    assert ReasonCode.SESSION_TAKEN_OVER == goodbye(here)
    assert there.connack.session_present
    publisher.publish("t", b"2")
    assert [(b"1", True), (b"2", False)] == [(bytes(m.payload), m.dup) for m in there.messages()]
    assert [b.member] == [member for member, clients in attached(members).items() if "car" in clients]
    assert "car" not in a.state.registry.sessions
    there.ack(*there.inflight)
    assert {} == members.store.entries("car")


@pytest.mark.parametrize("number", [0, 1], ids=["another member", "the same member"])
def test_what_is_stored_before_a_member_hears_that_it_has_a_client_is_not_missed(members: Members, number: int) -> None:
    """The store has attached the client when it takes the message, and says so to the publisher's member."""
    publishing, attaching = members.nodes[number], members.nodes[1]
    lasting(attaching, "car", "t").disconnect()
    publisher = publishing.client("publisher")
    members.store.held_opens = True
    peer = attaching.peer()
    peer.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.turn()
    assert [attaching.member] == [member for member, clients in attached(members).items() if "car" in clients]
    publisher.publish("t", b"early")
    with members.loop.running():
        members.store.let_open()
    members.turn()
    members.store.held_opens = False
    assert [b"early"] == [bytes(packet.payload) for packet in peer.take() if isinstance(packet, Publish)]
    publisher.publish("t", b"late")
    assert [b"late"] == [bytes(packet.payload) for packet in peer.take() if isinstance(packet, Publish)]


def test_a_client_that_is_lost_as_it_comes_gets_its_connack_first(members: Members) -> None:
    """It is claimed elsewhere in the turn in which it is let in. [MQTT-3.14.0-1]"""
    a = members.nodes[0]
    a.hooks.add("client.connected", Callback(lambda client: a.attachments.lost(client.client_id), 0, "test"))
    peer = a.peer()
    peer.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.turn()
    connack, disconnect = peer.take()
    assert isinstance(connack, Connack) and ReasonCode.SUCCESS == connack.reason
    assert isinstance(disconnect, Disconnect) and ReasonCode.SESSION_TAKEN_OVER == disconnect.reason
    assert not peer.open


def test_a_client_that_comes_back_to_a_member_which_has_lost_it_unaware_hears_no_goodbye_first(
    members: Members,
) -> None:
    """It was displaced while the member stood still, and has left the other one. It is let in, or comes again."""
    a, b, _ = members.nodes
    lasting(a, "car", "t")
    b.cluster.mute.add(a.member)
    a.cluster.mute.add(b.member)
    there = b.peer()
    there.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO + 1)
    assert isinstance(there.take()[0], Connack)
    there.send(Disconnect())
    members.turn()
    for _ in range(2):
        again = a.peer()
        again.send(Connect("car", 5, clean_start=False, properties=LASTING))
        members.turn()
        packets = again.take()
        assert not packets or isinstance(packets[0], Connack)
    members.wait(1)
    assert again.open and {a.member: ["car"]} == attached(members)


@pytest.mark.parametrize("clean", [False, True])
def test_a_client_whose_attachment_the_store_has_forgotten_misses_nothing(members: Members, clean: bool) -> None:
    """A fail-over has forgotten it, and nothing tells the client's member: whoever stores finds nobody to tell."""
    a, b, _ = members.nodes
    car = b.client("car") if clean else lasting(b, "car", "t")
    kept = lasting(b, "kept", "t")
    publisher = a.client("publisher")
    publisher.publish("t", b"1")
    assert [b"1"] == kept.payloads() and ([] if clean else [b"1"]) == car.payloads()
    del members.store.inner.mailboxes.attached["client:car"]
    members.store.inner.coordination.takeovers += 1
    publisher.publish("t", b"2")
    members.wait(3)
    assert [b"2"] == kept.payloads() and kept.open
    assert clean is car.open
    if not clean:
        car = lasting(b, "car")
        assert [b"1", b"2"] == car.payloads()
    assert {"car", "kept"} == set(attached(members)[b.member])
    members.wait(3)
    assert car.open and kept.open


def test_who_is_no_member_any_more_reads_no_cell_again(members: Members) -> None:
    """It may be asked for that after its end, by writes that have failed with it; its store is closed then."""
    a, _, c = members.nodes
    members.kill(a)
    c.run(members.store.inner.close())
    a.cluster.reload(0)
    members.turn()
    assert 0 == a.cluster.notes.reading


def test_a_member_that_joins_knows_filters_of_before_there_were_members(members: Members) -> None:
    """Their records have no generation; those of the same session that have come since have one."""
    a, b, _ = members.nodes
    for name in ("car1", "car2", "car3"):
        client = lasting(b, name, "new")
        old = subscription_record(Subscription("old", 1))
        members.store.inner.records.apply_put(SUBSCRIPTIONS, pair(name, "old"), old, 0.0)
        client.subscribe("newer", 1)
        client.disconnect()
    members.wait(3)
    late = members.join()
    awake = lasting(b, "car1", "newest")
    for topic in ("old", "new", "newer"):
        late.client(f"p-{topic}").publish(topic, topic.encode())
    for name in ("car1", "car2", "car3"):
        assert 3 == len(members.store.entries(name))
    assert 3 == len(awake.drain())
    lasting(a, "car2", clean=True)
    late.client("p").publish("old", b"for the one that has ended")
    assert {} == members.store.entries("car2")


def test_one_that_comes_back_while_its_dead_member_is_taken_care_of(members: Members) -> None:
    """It goes on where it has come to; those that are written together with it are asleep all the same."""
    a, b, c = members.nodes
    names = [f"car{number}" for number in range(300)]
    for name in names:
        lasting(b, name, "t")
    members.kill(b)
    members.store.held = True
    members.wait(2)
    peer = c.peer()
    peer.send(Connect("car7", 5, clean_start=False, properties=LASTING))
    members.turn()
    members.store.held = False
    members.store.let_go()
    members.turn()
    members.wait(2)
    assert {c.member: ["car7"]} == attached(members)
    assert [True] == [packet.session_present for packet in peer.take() if isinstance(packet, Connack)]
    records = members.store.records_of(SESSIONS)
    assert ["car7"] == [name for name in names if decode_session(records[name]).connected]
    a.client("publisher").publish("t", b"x")
    assert 300 == sum(bool(members.store.entries(name)) for name in names)
    assert [b"x"] == [bytes(packet.payload) for packet in peer.take() if isinstance(packet, Publish)]


def test_plugins_hear_that_a_session_is_no_longer_here(members: Members) -> None:
    """It moves, falls asleep, or was displaced; not if it ends."""
    a, b, c = members.nodes
    left: list[tuple[str, str]] = []
    for node in members.nodes:
        note = partial(lambda member, client: left.append((member, client.client_id)), node.member)
        node.hooks.add("session.left", Callback(note, 0, "test"))
    lasting(a, "car", "t")
    there = lasting(b, "car")
    assert [(a.member, "car")] == left
    there.disconnect()
    assert [(a.member, "car"), (b.member, "car")] == left
    c.client("clean").disconnect()
    lasting(a, "displaced", "t")
    c.cluster.mute.add(a.member)
    peer = c.peer()
    peer.send(Connect("displaced", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO + 1)
    assert peer.open
    c.cluster.mute.clear()
    members.wait(40)
    assert [(a.member, "car"), (b.member, "car"), (a.member, "displaced")] == left


def test_a_client_id_is_unique_in_the_cluster(members: Members) -> None:
    """Clean sessions as well. [MQTT-3.1.4-3]"""
    a, b, _ = members.nodes
    here = a.client("car")
    there = b.client("car")
    assert not here.open
    assert there.open
    assert {b.member: ["car"]} == attached(members)
    there.disconnect()
    assert {} == attached(members)


def test_of_two_that_connect_at_once_one_stays(members: Members) -> None:
    a, b, _ = members.nodes
    peers = [node.peer() for node in (a, b)]
    for peer in peers:
        peer.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.turn()
    members.wait(LET_GO + 1)
    connected = [peer for peer in peers if peer.open]
    assert 1 == len(connected)
    assert 1 == len(attached(members))
    assert [Connack] == [type(packet) for packet in connected[0].take()]


def test_a_silent_member_is_displaced(members: Members) -> None:
    """Nothing of the client is written by the member that does not answer, and it lets the client go when it hears."""
    a, b, c = members.nodes
    here = lasting(a, "car", "t")
    b.cluster.mute.add(a.member)
    peer = b.peer()
    peer.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.turn()
    assert [] == peer.take()
    members.wait(LET_GO)
    assert peer.take()
    c.client("publisher").publish("t", b"1")
    assert [] == here.payloads(), "the member that has the client attached gets the hint"
    b.cluster.mute.clear()
    members.wait(40)
    assert not here.open
    assert ["car"] == [*b.state.registry.sessions]


def test_a_decision_of_a_displaced_member_is_refused(members: Members) -> None:
    a, b, _ = members.nodes
    here = lasting(a, "car", "t")
    b.cluster.mute.add(a.member)
    peer = b.peer()
    peer.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO)
    peer.take()
    here.send(Subscribe(7, (Subscription("late", 1),)))
    members.turn()
    granted = [packet for packet in here.take() if isinstance(packet, Suback) and packet.reasons[0] < 0x80]
    assert [] == granted
    assert not here.open
    assert ["3:cart"] == list(members.store.records_of(SUBSCRIPTIONS))


def test_what_a_client_publishes_waits_for_what_it_published_elsewhere(members: Members) -> None:
    """F3: the old member has messages on their way to the store; they must not land behind those of the new one."""
    a, b, c = members.nodes
    watcher = lasting(c, "watcher", "t")
    here = lasting(a, "car")
    members.store.held = True
    here.put("t", b"1")
    members.turn()
    peer = b.peer()
    peer.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO)
    members.store.held = False
    members.store.let_go(1)
    members.turn()
    peer.send(Publish("t", b"2", 1, packet_id=5))
    members.store.let_go()
    members.turn()
    members.wait(1)
    assert [b"1", b"2"] == watcher.payloads()
    assert [5] == [packet.packet_id for packet in peer.take() if isinstance(packet, Puback)]


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("how", ["reset", "displaced"])
def test_what_a_client_publishes_waits_for_what_its_broken_connection_has_published(
    members: Members, how: str, clean: bool
) -> None:
    """Nothing of it would be known elsewhere once it is detached; and servers of a store do not wait for each other."""
    a, b, c = members.nodes
    watcher = lasting(c, "watcher", "t")
    here = a.client("car") if clean else lasting(a, "car")
    members.store.held = True
    here.put("t", b"1")
    members.turn()
    late = members.store.set_aside()
    members.store.held = False
    if how == "displaced":
        b.cluster.mute.add(a.member)
    else:
        here.close()
        members.wait(0.5)
    peer = b.peer()
    peer.send(Connect("car", 5, clean_start=clean, properties=Properties() if clean else LASTING))
    members.wait(LET_GO + 1)
    assert [Connack] == [type(packet) for packet in peer.take()]
    if how == "displaced":  # it finds out by itself before it is asked
        with members.loop.running():
            a.attachments.lost("car")
        b.cluster.mute.clear()
    peer.send(Publish("t", b"2", 1, packet_id=5))
    members.wait(DRAIN_PATIENCE + 5)
    assert [] == peer.take()
    late()
    members.wait(1)
    assert [b"1", b"2"] == watcher.payloads()
    assert [5] == [packet.packet_id for packet in peer.take() if isinstance(packet, Puback)]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_a_member_that_was_fenced_refuses_no_message(members: Members, version: int, qos: int) -> None:
    """Its publishers are closed without an answer, and send again what another member will take."""
    a, _, c = members.nodes
    lasting(c, "watcher", "t")
    publisher = Client(a, "car", version)
    publisher.connect(Connect("car", version, clean_start=True))
    members.store.held = True
    publisher.put("t", b"1", qos)
    members.turn()
    with members.loop.running():
        members.store.fail(StoreFencedError("this store was fenced"))
        members.store.let_go()
    members.turn()
    assert [] == [packet for packet in publisher.take() if isinstance(packet, Puback | Pubrec)]
    assert not publisher.open


def test_what_a_client_acknowledges_does_not_wait_for_that(members: Members) -> None:
    """Its window would stand still for as long as the member that it comes from is silent."""
    a, b, c = members.nodes
    lasting(a, "car", "t")
    b.cluster.mute.add(a.member)
    there = b.peer()
    there.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO)
    publisher = c.client("publisher")
    for number in range(3):
        publisher.publish("t", b"%d" % number)
    there.send(Publish("elsewhere", b"waits", 1, packet_id=5))
    came = [packet for packet in there.take() if isinstance(packet, Publish)]
    assert [b"0", b"1", b"2"] == [bytes(packet.payload) for packet in came]
    assert {} != members.store.entries("car")
    b.cluster.mute.clear()
    members.wait(40)
    assert [5] == [packet.packet_id for packet in there.take() if isinstance(packet, Puback)]
    there = b.peer()
    b.cluster.mute.add(a.member)
    lasting(a, "car")
    b.cluster.mute.clear()
    b.cluster.mute.add(a.member)
    there.send(Connect("car", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO)
    again = [packet for packet in there.take() if isinstance(packet, Publish)]
    assert [b"0", b"1", b"2"] == [bytes(packet.payload) for packet in again]
    for packet in again:
        there.send(Puback(packet.packet_id))
    there.send(Publish("elsewhere", b"waits", 1, packet_id=6))
    members.wait(2)
    assert {} == members.store.entries("car"), "acknowledged, though the member is still silent"
    assert [] == [packet for packet in there.take() if isinstance(packet, Puback)]


# -- sleep, end, wills


def test_a_session_that_sleeps_leaves_memory(members: Members) -> None:
    a, b, c = members.nodes
    lasting(a, "car", "t/+", "x").disconnect()
    for node in members.nodes:
        assert "car" not in node.state.registry.sessions
        assert ["car"] == node.relay.subscribers.of_feed(0)
    assert {} == attached(members)
    b.client("publisher").publish("t/1", b"1")
    again = c.admit("car", clean=False, session_expiry=100)
    assert [b"1"] == again.payloads()
    assert [] == c.relay.subscribers.of_feed(0)
    assert ["car"] == a.relay.subscribers.of_feed(0)


def test_a_session_ends_when_its_time_is_over(members: Members) -> None:
    a, b, _ = members.nodes
    lasting(b, "car", "t", expiry=30).disconnect()
    a.client("publisher").publish("t", b"1")
    members.wait(20)
    assert members.store.entries("car")
    members.wait(15)
    assert {} == members.store.entries("car")
    for collection in (SESSIONS, SUBSCRIPTIONS, AWAITING):
        assert {} == members.store.records_of(collection)
    assert all(not node.relay.subscribers for node in members.nodes)
    assert not any("car" in clients for clients in attached(members).values())


def test_a_clean_start_elsewhere_ends_the_session(members: Members) -> None:
    a, b, c = members.nodes
    lasting(a, "car", "t").disconnect()
    c.client("publisher").publish("t", b"1")
    fresh = b.admit("car", clean=True, session_expiry=100)
    assert not fresh.connack.session_present
    c.client("publisher").publish("t", b"2")
    assert [] == fresh.payloads()
    assert all(not node.relay.subscribers for node in members.nodes)


def test_unsubscribing_is_known_everywhere(members: Members) -> None:
    a, b, _ = members.nodes
    car = lasting(a, "car", "t", "u")
    car.unsubscribe("t")
    publisher = b.client("publisher")
    assert 0x10 == publisher_reason(publisher, "t")
    car.disconnect()
    assert 0x10 == publisher_reason(publisher, "t")
    assert 0 == publisher_reason(publisher, "u")


def publisher_reason(publisher: Client, topic: str) -> int:
    publisher.put(topic, b"x")
    return int(publisher.expect(Puback).reason)


def test_the_will_of_a_dead_members_client_is_published_once(members: Members) -> None:
    a, b, c = members.nodes
    watcher = b.client("watcher")
    watcher.subscribe("will", 1)
    a.admit("clean", will=Will("will", b"clean", 1))
    a.admit("lasting", clean=False, session_expiry=100, will=Will("will", b"lasting", 1))
    a.admit("silent")
    members.kill(a)
    members.wait(5)
    assert [b"clean", b"lasting"] == sorted(watcher.payloads())
    assert {} == {m: clients for m, clients in attached(members).items() if m == a.member}
    assert ["lasting"] == list(members.store.records_of(SESSIONS))
    members.wait(5)
    assert [] == watcher.payloads()
    assert c.state.registry.sessions.keys() == set()


def test_a_will_is_not_published_if_its_client_is_back_in_time_elsewhere(members: Members) -> None:
    a, b, c = members.nodes
    watcher = c.client("watcher")
    watcher.subscribe("will", 1)
    will = Will("will", b"gone", 1, properties=Properties(will_delay=10))
    first = a.admit("car", clean=False, session_expiry=100, will=will)
    first.close()
    members.wait(5)
    back = b.admit("car", clean=False, session_expiry=100, will=will)
    members.wait(20)
    assert [] == watcher.payloads()
    back.close()
    members.wait(12)
    assert [b"gone"] == watcher.payloads()


def test_clients_of_a_dead_member_go_on_elsewhere(members: Members) -> None:
    a, b, c = members.nodes
    lasting(a, "car", "t", expiry=60)
    publisher = b.client("publisher")
    publisher.publish("t", b"1")
    members.kill(a)
    publisher.publish("t", b"2")
    members.wait(3)
    again = c.admit("car", clean=False, session_expiry=60)
    assert again.connack.session_present
    assert [b"1", b"2"] == again.payloads()
    again.disconnect()
    members.wait(70)
    assert {} == members.store.records_of(SESSIONS)


def test_the_expiry_of_a_dead_members_client_begins_with_its_death(members: Members) -> None:
    a, b, _ = members.nodes
    lasting(a, "car", "t", expiry=20)
    members.kill(a)
    members.wait(15)
    assert ["car"] == list(members.store.records_of(SESSIONS))
    members.wait(10)
    assert {} == members.store.records_of(SESSIONS)
    assert not b.relay.subscribers


def test_the_will_of_a_dead_members_client_waits_as_long_as_it_asked(members: Members) -> None:
    a, b, _ = members.nodes
    watcher = b.client("watcher")
    watcher.subscribe("will", 1)
    will = Will("will", b"gone", 1, properties=Properties(will_delay=20))
    a.admit("car", clean=False, session_expiry=100, will=will)
    members.kill(a)
    members.wait(15)
    assert [] == watcher.payloads()
    assert {b.member: ["watcher"]} == attached(members), "it is asleep"
    members.wait(10)
    assert [b"gone"] == watcher.payloads()
    members.wait(100)
    assert {} == members.store.records_of(SESSIONS)


# -- exactly once


@pytest.mark.parametrize("held", [True, False])
def test_qos_2_is_routed_again_if_its_member_died_before_all_had_it(members: Members, held: bool) -> None:
    """Committed, acknowledged to no one: live receivers elsewhere have not got it yet, or have."""
    a, b, c = members.nodes
    live = c.client("live")
    live.subscribe("t", 2)
    stored = lasting(c, "stored", "t")
    publisher = a.admit("publisher", clean=False, session_expiry=100)
    members.link(a, c).held = held
    publisher.send(Publish("t", b"x", 2, packet_id=1))
    members.turn()
    members.kill(a)
    again = b.admit("publisher", clean=False, session_expiry=100)
    again.send(Publish("t", b"x", 2, dup=True, packet_id=1))
    assert 1 == again.expect(Pubrec).packet_id
    again.send(Pubrel(1))
    for client in (live, stored):
        assert [b"x"] == client.payloads()
    assert {} == members.store.records_of(AWAITING)


# -- trouble


def test_clean_clients_are_let_in_while_the_store_is_away(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = members.nodes
    coordination = members.store.inner.coordination
    lasting(b, "car", "t").disconnect()

    async def away(*_args: object, **_more: object) -> None:
        raise StoreAwayError("the server is away")

    with monkeypatch.context() as patches:
        patches.setattr(coordination, "try_open", away)
        car = a.client("car")
        refused = a.peer()
        refused.send(Connect("other", 5, clean_start=False, properties=LASTING))
        members.turn()
        assert [ReasonCode.SERVER_UNAVAILABLE] == [p.reason for p in refused.take() if isinstance(p, Connack)]
    assert {} == attached(members)
    members.wait(3)
    assert {a.member: ["car"]} == attached(members)
    assert car.open
    assert {} == members.store.records_of(SESSIONS), "the session that it had ends"


def test_a_client_that_goes_while_the_store_is_away_leaves_nothing(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = members.nodes

    async def away(*_args: object, **_more: object) -> None:
        raise StoreAwayError("the server is away")

    with monkeypatch.context() as patches:
        patches.setattr(members.store.inner.coordination, "try_open", away)
        a.client("car").disconnect()
        members.wait(3)
        assert 0 == len(a.attachments)
    members.wait(3)
    assert {} == attached(members)


def test_subscriptions_are_read_again_when_notes_are_missing(members: Members) -> None:
    a, b, c = members.nodes
    lasting(a, "car", "t", "u").disconnect()
    lasting(a, "van", "t").disconnect()
    b.relay.subscribers.drop("car", "t")
    b.relay.subscribers.forget("van")
    b.relay.subscribers.put("ghost", 1, Subscription("t", 1))
    b.cluster.reload(0)
    members.turn()
    assert {*c.relay.subscribers.of_feed(0)} == {*b.relay.subscribers.of_feed(0)} == {"car", "van"}
    car = b.relay.subscribers.get("car")
    assert car is not None
    assert {"t", "u"} == {filter_ for filter_, _ in car.subscriptions()}
