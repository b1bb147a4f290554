"""Publish on one member, subscribe on another: what arrives, in which order, and what answers and publishers wait for.

All through packets of clients. Links hold items back, or lose them, when a test says so (`tests.support.members`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.broker import pubsub as pubsub_module
from motorcade.broker.connection import Pause
from motorcade.broker.limits import SessionOptions
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback
from motorcade.mqtt.packets import Puback, Publish, Pubrec, Pubrel, Suback, Subscribe, Unsuback, Unsubscribe, Will
from motorcade.mqtt.properties import Properties
from motorcade.storage.ports import StoreFullError
from tests.support.members import PATIENCE, MemberNode, Members
from tests.support.virtual import Client, standing
from tests.unit.broker.test_balance import balanced, exported

LASTING: dict[str, Any] = {"clean": False, "session_expiry": 1000}


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(3)
    with standing(made.clock):
        yield made


def sleeper(node: MemberNode, name: str, *wanted: Subscription | tuple[str, int], version: int = 5) -> Client:
    """A client with a durable session and these subscriptions."""
    client = node.client(name, version, **(LASTING if version == 5 else {"clean": False}))
    if wanted:
        node.subscribe(client, *wanted)
    return client


def all_of(client: Client) -> list[Publish]:
    """Everything that comes, acknowledged as it comes."""
    found: list[Publish] = []
    while new := client.messages():
        found += new
        for message in new:
            if message.qos == 1:
                client.send(Puback(message.packet_id))
            elif message.qos == 2:
                client.send(Pubrec(message.packet_id))
    return found


def payloads(client: Client) -> list[bytes]:
    return [bytes(message.payload) for message in all_of(client)]


# --- who gets what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasting", [False, True], ids=["live", "durable"])
@pytest.mark.parametrize("versions", [(4, 4), (4, 5), (5, 4), (5, 5)])
def test_every_qos_arrives_at_the_granted_one(members: Members, versions: tuple[int, int], lasting: bool) -> None:
    """A topic's first message goes through the channel, the others through the fast path if they can."""
    a, b, _ = members.nodes
    publisher = a.client("publisher", versions[0])
    readers = []
    for granted in (0, 1, 2):
        more: dict[str, Any] = {"clean": False} if lasting else {}
        if lasting and versions[1] == 5:
            more["session_expiry"] = 1000
        readers.append(b.client(f"reader{granted}", versions[1], **more))
        b.subscribe(readers[-1], ("t/#", granted))
    for turn in range(3):
        for qos in (0, 1, 2):
            assert 0 == publisher.publish("t/x", b"%d" % turn, qos)
            for granted, reader in enumerate(readers):
                got = [(m.topic, bytes(m.payload), m.qos, m.retain, m.dup) for m in all_of(reader)]
                assert [("t/x", b"%d" % turn, min(qos, granted), False, False)] == got, (turn, qos, granted)


def test_a_run_goes_as_it_came(members: Members) -> None:
    """QoS 0 and QoS 1 of one read, to topics that several members, one member or none besides this one wants."""
    a, b, c = members.nodes
    publisher = a.client("publisher")
    here, there, other = a.client("here"), b.client("there"), c.client("other")
    for client in (here, there, other):
        client.node.subscribe(client, ("both", 1))
    b.subscribe(there, ("one", 1))
    a.subscribe(here, ("local", 1))
    for topic in ("both", "one", "local"):
        publisher.publish(topic, b"first")
    for client in (here, there, other):
        all_of(client)
    packets = []
    for number in range(40):
        topic, qos = ("both", "local", "both", "one")[number % 4], (number // 4) % 2
        packets.append(Publish(topic, b"%d" % number, qos, packet_id=number + 1 if qos else 0))
    sent = len(members.link(a, b).sent)
    publisher.send(*packets)
    members.turn()
    assert [n + 1 for n in range(40) if n // 4 % 2] == [p.packet_id for p in publisher.take() if isinstance(p, Puback)]
    assert set(members.link(a, b).sent[sent:]) == {"live"}
    received = [node.state.stats.cluster_received["live"] for node in (b, c)]
    assert [20 + 10, 20] == received and sum(received) == a.state.stats.cluster_sent["live"]
    for client, topics in ((here, ("both", "local")), (there, ("both", "one")), (other, ("both",))):
        got = all_of(client)
        for qos in (0, 1):
            expected = [p.payload for p in packets if p.qos == qos and p.topic in topics]
            assert expected == [m.payload for m in got if m.qos == qos]


def test_options_of_subscriptions(members: Members) -> None:
    """Retain as published, identifiers, and several subscriptions of one client, live and stored."""
    a, b, _ = members.nodes
    publisher = a.client("publisher", 4)
    wanted = (
        Subscription("t", 1, retain_as_published=True, identifier=3),
        Subscription("+", 0),
        Subscription("#", 2),
    )
    live, stored = b.client("live"), sleeper(b, "stored")
    for client in (live, stored):
        for number, subscription in enumerate(wanted):
            found = (subscription.identifier,) if subscription.identifier else ()
            client.send(Subscribe(number + 1, (subscription,), Properties(subscription_ids=found)))
            client.expect(Suback)
    stored.disconnect()
    for _ in range(2):
        for retain in (False, True):
            publisher.send(Publish("t", b"x", 2, retain=retain, packet_id=1), Pubrel(1))
            members.turn()
    stored = a.admit("stored", **LASTING)
    for client in (live, stored):
        got = [(m.qos, m.retain, m.properties.subscription_ids) for m in all_of(client)]
        assert [(2, False, (3,)), (2, True, (3,))] * 2 == got


def test_no_local_is_about_the_client_wherever_it_is(members: Members) -> None:
    a, b, _ = members.nodes
    wanted = Subscription("t", 1, no_local=True)
    car = sleeper(b, "car", wanted)
    other = a.client("other")
    a.subscribe(other, wanted)
    car.publish("t", b"of car")
    other.publish("t", b"of other")
    assert [b"of other"] == payloads(car)
    assert [b"of car"] == payloads(other)
    car.disconnect()
    will = Will("t", b"own will", 1)
    car = a.admit("car", will=will, **LASTING)
    car.close()  # its own message, published when no member has its session
    members.turn()
    other.publish("t", b"again")
    car = b.admit("car", **LASTING)
    assert [b"again"] == payloads(car)
    assert [b"own will"] == payloads(other)


def test_properties_and_what_is_left_of_a_life(members: Members) -> None:
    a, b, _ = members.nodes
    live, stored = b.client("live"), sleeper(b, "stored", ("t", 1))
    b.subscribe(live, ("t", 1))
    told = Properties(
        payload_format=1,
        message_expiry=60,
        content_type="c",
        response_topic="r",
        correlation_data=b"d",
        user_properties=(("a", "1"), ("a", "2")),
    )
    publisher = a.client("publisher")
    publisher.send(Publish("t", b"x", 1, packet_id=1, properties=told))
    members.turn()
    for client in (live, stored):
        (message,) = all_of(client)
        assert told == message.properties
    stored.disconnect()
    publisher.send(Publish("t", b"x", 1, packet_id=1, properties=told))
    members.turn()
    members.clock.now += 20
    (message,) = all_of(a.admit("stored", **LASTING))
    assert 40 == message.properties.message_expiry
    assert 60 == all_of(live)[0].properties.message_expiry


def test_a_message_without_receivers_on_any_member(members: Members) -> None:
    a, b, _ = members.nodes
    publisher, reader = a.client("publisher"), b.client("reader")
    publisher.put("t", b"x")
    assert ReasonCode.NO_MATCHING_SUBSCRIBERS is publisher.expect(Puback).reason
    b.subscribe(reader, ("t", 0))
    for qos in (1, 2, 1):
        assert 0 == publisher.publish("t", b"x", qos)
    reader.unsubscribe("t")
    for _ in range(2):
        publisher.put("t", b"x")
        assert ReasonCode.NO_MATCHING_SUBSCRIBERS is publisher.expect(Puback).reason
    assert 3 == len(payloads(reader))
    assert {"message": 2, "live": 1} == {k: n for k, n in a.state.stats.cluster_sent.items() if n}


def test_messages_of_one_node_stay_there(members: Members) -> None:
    a, b, _ = members.nodes
    reader = b.client("reader")
    b.subscribe(reader, ("$SYS/#", 0), ("#", 0))
    asleep = sleeper(b, "asleep", ("$SYS/#", 1))
    asleep.disconnect()
    for node in (a, b):
        node.begin(node.broker.publish(Message(f"$SYS/{node.member}", b"x", 1)))
    assert ["$SYS/n2~2"] == [message.topic for message in all_of(reader)]
    assert {} == members.store.entries("asleep")
    assert not a.broker.heard("$SYS/x") and not a.broker.heard_below("$SYS")
    assert b.broker.heard("$SYS/x")


def test_all_members_are_asked_for_receivers(members: Members) -> None:
    a, b, _ = members.nodes
    asleep, awake = sleeper(b, "asleep", ("$a/+/x", 1)), b.client("awake")
    asleep.disconnect()
    b.subscribe(awake, ("$b/x", 1))
    assert [True, False, True] == [a.broker.heard(topic) for topic in ("$a/1/x", "$a/1/y", "$b/x")]
    assert [True, True, False] == [a.broker.heard_below(level) for level in ("$a", "$b", "$c")]


def test_hooks_of_publishing_run_once_and_those_of_delivery_where_it_is_delivered(members: Members) -> None:
    seen: list[str] = []
    a, b, _ = members.nodes
    for node in (a, b):

        def publish(_c: ClientInfo | None, m: Message, name: str = node.member) -> None:
            seen.append(f"published {name} {m.payload.decode()}")

        def delivered(client: ClientInfo, m: Message, name: str = node.member) -> None:
            seen.append(f"delivered {name} {client.client_id} {m.publisher} {m.payload.decode()}")

        node.hooks.add("message.publish", Callback(publish, 0, "test", topics=("t",)))
        node.hooks.add("message.delivered", Callback(delivered, 0, "test"))
    reader = b.client("reader")
    b.subscribe(reader, ("#", 1))
    publisher = a.client("publisher")
    publisher.publish("t", b"1")
    publisher.publish("u", b"2", 0)
    assert [
        "published n1~1 1",
        "delivered n2~2 reader publisher 1",
        "delivered n2~2 reader publisher 2",
    ] == seen


def test_a_will_reaches_the_clients_of_other_members(members: Members) -> None:
    a, b, _ = members.nodes
    reader, asleep = b.client("reader"), sleeper(b, "asleep", ("w", 1))
    b.subscribe(reader, ("w", 1))
    asleep.disconnect()
    a.client("car", will=Will("w", b"gone", 1)).close()
    members.turn()
    assert [b"gone"] == payloads(reader) == payloads(b.admit("asleep", **LASTING))


# --- durable sessions ---------------------------------------------------------------------------------------------


def test_what_is_published_anywhere_waits_for_a_session_that_sleeps(members: Members) -> None:
    a, b, c = members.nodes
    sleeper(b, "car", ("t", 1)).disconnect()
    publishers = [node.client(f"p{number}") for number, node in enumerate(members.nodes)]
    for turn in range(3):
        for number, publisher in enumerate(publishers):
            assert 0 == publisher.publish("t", b"%d %d" % (number, turn))
    assert [b"%d %d" % (n, turn) for turn in range(3) for n in range(3)] == payloads(c.admit("car", **LASTING))
    assert a.relay.subscribers.table.get("t") is not None
    assert c.relay.subscribers.table.get("t") is None, "it is here"


def test_messages_of_qos_0_wait_for_those_that_sleep_and_go_live_to_the_others(members: Members) -> None:
    a, b, _ = members.nodes
    car, other = sleeper(b, "car", ("t", 1)), sleeper(b, "other", ("t", 0))
    other.disconnect()
    publisher = a.client("publisher")
    for qos in (0, 0, 1):
        publisher.publish("t", b"%d" % qos, qos)
    assert [b"0", b"0", b"1"] == payloads(car)
    assert {} == members.store.entries("car")
    assert 3 == len(members.store.entries("other"))
    assert [(b"0", 0), (b"0", 0), (b"1", 0)] == [(bytes(m.payload), m.qos) for m in all_of(a.admit("other", **LASTING))]


def test_messages_of_qos_0_for_sleepers_are_dropped_where_they_are_not_kept() -> None:
    members = Members(2, SessionOptions(store_qos0=False))
    with standing(members.clock):
        a, b = members.nodes
        told: list[tuple[str, str]] = []
        a.hooks.add("message.dropped", Callback(lambda c, m, why: told.append((c.client_id, why)), 0, "test"))
        sleeper(b, "car", ("t", 1)).disconnect()
        publisher = a.client("publisher")
        for _ in range(2):
            publisher.publish("t", b"x", 0)
        assert [("car", "offline_qos0")] * 2 == told
        assert {} == members.store.entries("car")


def test_a_mailbox_of_a_sleeper_is_bounded_wherever_its_messages_come_from() -> None:
    """By queue and window: how much of it is in flight is not known here."""
    members = Members(2, SessionOptions(queue=3, window=2))
    with standing(members.clock):
        a, b = members.nodes
        sleeper(b, "car", ("t", 1)).disconnect()
        publisher = a.client("publisher")
        for number in range(8):
            assert 0 == publisher.publish("t", b"%d" % number)
        assert 3 == a.state.stats.dropped["queue_full"]
        assert [b"3", b"4", b"5", b"6", b"7"] == payloads(b.admit("car", **LASTING))


def test_a_full_mailbox_is_trimmed_by_the_member_that_has_its_client() -> None:
    """Only that one knows what is in flight; who appends is told that there is too much, and passes it on."""
    members = Members(2, SessionOptions(queue=3, window=2))
    with standing(members.clock):
        a, b = members.nodes
        car = sleeper(b, "car", ("t", 1))
        publisher = a.client("publisher")
        for number in range(8):
            assert 0 == publisher.publish("t", b"%d" % number)
        members.turn()
        assert 3 == b.state.stats.dropped["queue_full"] and not a.state.stats.dropped["queue_full"]
        assert [b"0", b"1", b"5", b"6", b"7"] == payloads(car)
        for node in (a, b):
            balanced(exported(node))


def test_an_attached_session_gets_what_others_store_from_a_hint(members: Members) -> None:
    """In order it goes on from memory; nothing is read."""
    a, b, _ = members.nodes
    car = sleeper(b, "car", ("t", 2))
    members.store.held_reads = True
    publisher = a.client("publisher")
    for number in range(5):
        publisher.publish("t", b"%d" % number, 1 + number % 2)
    got = all_of(car)
    assert [(b"%d" % n, 1 + n % 2) for n in range(5)] == [(bytes(m.payload), m.qos) for m in got]
    assert [1, 2, 3, 4, 5] == [m.packet_id - got[0].packet_id + 1 for m in got]
    assert not members.store.reads
    assert 5 == members.link(a, b).sent.count("hint")


def test_one_hint_for_all_clients_of_a_member(members: Members) -> None:
    a, b, c = members.nodes
    cars = [sleeper((b, b, c)[number], f"car{number}", ("t", 1)) for number in range(3)]
    a.client("publisher").publish("t", b"x")
    assert [[b"x"]] * 3 == [payloads(car) for car in cars]
    assert [1, 1] == [members.link(a, there).sent.count("hint") for there in (b, c)]
    assert 3 == a.state.stats.cluster_sent["hint"]
    assert [2, 1] == [there.state.stats.cluster_received["hint"] for there in (b, c)]


def test_hints_that_come_late_or_in_another_order(members: Members) -> None:
    """What lies before a hinted entry is read: its commit says that all of it is there."""
    a, b, c = members.nodes
    car = sleeper(b, "car", ("t", 1))
    slow = members.link(a, b)
    slow.held = True
    a.client("p").publish("t", b"1")
    assert [] == payloads(car)
    c.client("q").publish("t", b"2")
    assert [b"1", b"2"] == payloads(car)
    slow.held = False
    slow.let_go()
    assert [] == payloads(car), "it is known already"
    c.client("q").publish("t", b"3")
    assert [b"3"] == payloads(car)


def test_an_entry_that_is_not_confirmed_is_not_read(members: Members) -> None:
    """It is in the store, but perhaps not as safe yet as it should be."""
    a, b, _ = members.nodes
    car = sleeper(b, "car", ("t", 1))
    members.link(a, b).held = True
    a.client("p").publish("t", b"1")
    session = b.state.registry.sessions["car"]
    assert session.durable is not None
    session.durable.unread = True
    session.go_on()
    assert [] == payloads(car)
    b.client("q").publish("t", b"2")  # an own commit says it of all before it
    assert [b"1", b"2"] == payloads(car)


def test_what_is_not_confirmed_is_not_asked_for_again_and_again(members: Members) -> None:
    """The mailbox is empty up to where it was when the client came, and goes on above that."""
    a, b, _ = members.nodes
    car = sleeper(b, "car", ("t", 1))
    publisher = a.client("p")
    for number in range(3):
        publisher.publish("t", b"%d" % number)
    payloads(car)
    members.turn()
    members.link(a, b).held = True
    publisher.publish("t", b"3")
    car.disconnect()
    members.turn()
    sleeping = members.store.entries("car")
    members.link(a, b).let_go()
    members.turn()
    members.link(a, b).held = True
    car = b.admit("car", **LASTING)
    assert [b"3"] == payloads(car) and 1 == len(sleeping)
    members.turn()
    publisher.publish("t", b"4")
    session = b.state.registry.sessions["car"]
    assert session.durable is not None
    session.durable.unread = True
    session.go_on()
    assert [] == payloads(car)
    members.link(a, b).let_go()
    assert [b"4"] == payloads(car)


def test_when_a_member_is_lost_the_others_look_for_what_it_could_not_tell(members: Members) -> None:
    a, b, _ = members.nodes
    cars = [sleeper(b, f"car{number}", (f"t/{number % 2}", 1)) for number in range(4)]
    members.link(a, b).held = True
    publisher = a.client("p")
    assert 0 == publisher.publish("t/0", b"x")
    assert [[]] * 4 == [payloads(car) for car in cars]
    written = members.store.waiting
    members.store.held = True
    members.kill(a)
    assert [[]] * 4 == [payloads(car) for car in cars], "it is not safe before something after it is"
    assert 1 == len(written), "only mailboxes that have something new are written to"
    members.store.held = False
    members.store.let_go()
    assert [[b"x"], [], [b"x"], []] == [payloads(car) for car in cars]


def test_hints_that_a_full_peer_cannot_take_are_looked_for_when_it_has_room(members: Members) -> None:
    """They are no reason to hold up publishers: what they tell of is stored."""
    a, b, _ = members.nodes
    cars = [sleeper(b, f"car{number}", ("t", 1)) for number in range(2)]
    link = members.link(a, b)
    link.held, link.room_for = True, 1
    publisher = a.client("p")
    for number in range(4):
        assert 0 == publisher.publish("t", b"%d" % number)
    assert [[], []] == [payloads(car) for car in cars]
    assert 6 == a.state.stats.cluster_dropped["hint"]
    link.held = False
    link.let_go()
    members.turn()
    assert [[b"0", b"1", b"2", b"3"]] * 2 == [payloads(car) for car in cars]
    assert ["hint", "look"] == link.sent[-2:]


def test_a_hint_for_a_client_that_has_moved_on(members: Members) -> None:
    a, b, c = members.nodes
    car = sleeper(b, "car", ("t", 1))
    members.link(a, b).held = True
    a.client("p").publish("t", b"x")
    assert [] == payloads(car)
    car = c.admit("car", **LASTING)
    assert [b"x"] == payloads(car)
    members.link(a, b).let_go()
    members.turn()
    assert 1 == b.state.stats.cluster_dropped["hint"]


def test_a_session_that_is_not_that_of_before_gets_nothing(members: Members) -> None:
    """Another user has the client id now; a member that does not know it yet stores nothing for it."""
    a, b, _ = members.nodes
    car = sleeper(b, "car", ("t", 1))
    known = a.relay.subscribers.get("car")
    assert known is not None
    car.disconnect()
    b.client("car", clean=True).disconnect()
    assert 0 == len(a.relay.subscribers)
    a.relay.subscribers.put("car", known.generation, Subscription("t", 1))  # as if it had not heard yet
    car = b.client("car", clean=False, session_expiry=100)
    publisher = a.client("p")
    a.relay.subscribers.put("car", known.generation, Subscription("t", 1))
    publisher.publish("t", b"x")
    assert [] == payloads(car)
    assert 0 == len(a.relay.subscribers)
    publisher.put("t", b"x")
    assert ReasonCode.NO_MATCHING_SUBSCRIBERS is publisher.expect(Puback).reason


def test_what_the_store_refuses_reaches_no_client(members: Members) -> None:
    """Also not live receivers elsewhere."""
    a, b, _ = members.nodes
    live = b.client("live")
    b.subscribe(live, ("t", 1))
    sleeper(b, "car", ("t", 1)).disconnect()
    publisher = a.client("publisher")
    publisher.publish("t", b"1")
    members.store.held = True
    publisher.put("t", b"2")
    members.turn()
    assert [b"1"] == payloads(live)
    members.store.fail(StoreFullError("no room"))
    assert ReasonCode.QUOTA_EXCEEDED is publisher.expect(Puback).reason
    members.store.held = False
    publisher.publish("t", b"3")
    assert [b"3"] == payloads(live)


def test_live_receivers_wait_for_the_commit(members: Members) -> None:
    a, b, _ = members.nodes
    live = b.client("live")
    b.subscribe(live, ("t", 1))
    sleeper(b, "car", ("t", 1)).disconnect()
    publisher = a.client("publisher")
    publisher.publish("t", b"1")
    payloads(live)
    members.store.held = True
    publisher.put("t", b"2")
    assert [] == payloads(live)
    members.store.held = False
    members.store.let_go()
    members.turn()
    assert [b"2"] == payloads(live)
    publisher.expect(Puback)


# --- order --------------------------------------------------------------------------------------------------------


def test_the_order_of_a_publisher_is_kept(members: Members) -> None:
    """Whatever way its messages take: as they came in, with properties, and in several reads."""
    a, b, _ = members.nodes
    live, stored = b.client("live", receive_maximum=100), sleeper(b, "stored", ("t", 1))
    b.subscribe(live, ("t", 1), ("u", 1))
    publisher = a.client("publisher")
    for topic in ("t", "u"):
        publisher.publish(topic, b"first")
    for client in (live, stored):
        all_of(client)
    link = members.link(a, b)
    for number in range(60):
        qos = number % 2
        more = Properties(content_type="c") if number % 7 == 0 else Properties()
        topic = "t" if number % 3 else "u"
        publisher.send(Publish(topic, b"%d" % number, qos, packet_id=number + 2 if qos else 0, properties=more))
        if number % 5 == 0:
            link.held = not link.held
        if number % 11 == 0:
            members.turn()
    link.held = False
    link.let_go()
    members.turn()
    answered = [p.packet_id for p in publisher.take() if isinstance(p, Puback)]
    assert [n + 2 for n in range(60) if n % 2] == answered
    for client, topics in ((live, "tu"), (stored, "t")):
        got = all_of(client)
        for topic in topics:
            for qos in (0, 1):
                expected = [n for n in range(60) if (topic == "t") == bool(n % 3) and n % 2 == qos]
                assert expected == [int(m.payload) for m in got if m.topic == topic and m.qos == qos]


def test_items_keep_their_order_while_receivers_are_being_found(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is compared with many filters takes several turns; what comes after it waits."""
    a, b, _ = members.nodes
    live = b.client("live")
    b.subscribe(live, *((f"+/{number}/+/#", 0) for number in range(20)), ("#", 1))
    publisher = a.client("publisher")
    publisher.publish("known", b"0")
    monkeypatch.setattr(pubsub_module, "LEVELS_PER_TURN", 1)
    for number in range(1, 30):
        publisher.send(Publish("known" if number % 3 else f"a/{number % 20}/b/{number}", b"%d" % number, 0))
    members.turn()
    assert list(range(30)) == [int(payload) for payload in payloads(live)]
    assert b.state.stats.long_matches


# --- what is waited for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("known", [False, True], ids=["channel", "fast path"])
def test_answers_wait_until_the_peers_have_it_but_not_for_ever(members: Members, qos: int, known: bool) -> None:
    a, b, _ = members.nodes
    reader = b.client("reader")
    b.subscribe(reader, ("t", 2))
    publisher, other = a.client("publisher"), a.client("other")
    a.subscribe(other, ("own", 1))
    if known:
        publisher.publish("t", b"first", qos)
        other.publish("own", b"first")
    publisher.take()
    members.link(a, b).silent = True
    publisher.put("t", b"x", qos)
    assert 0 == other.publish("own", b"x"), "others are not held up"
    members.wait(PATIENCE - 0.1)
    assert [] == publisher.take()
    assert b"x" == payloads(reader)[-1], "it has arrived"
    members.wait(0.2)
    publisher.expect(Puback if qos == 1 else Pubrec)
    publisher.put("t", b"y", 1)
    members.turn()
    assert [] == publisher.take()
    members.link(a, b).speak()
    publisher.expect(Puback)


def test_a_silent_peer_delays_answers_not_messages(members: Members) -> None:
    """What waits for an answer is delivered already, so what comes after it need not wait."""
    a, b, c = members.nodes
    readers = [node.client(f"reader{number}") for number, node in enumerate((a, b, c))]
    for reader in readers:
        reader.node.subscribe(reader, ("t", 1))
    publisher = a.client("publisher")
    members.link(a, b).silent = True
    told = Properties(content_type="c")
    for number in range(10):  # by both ways
        more = told if number % 2 else Properties()
        publisher.send(Publish("t", b"%d" % number, 1, packet_id=number + 1, properties=more))
    for reader in readers:
        assert [b"%d" % number for number in range(10)] == payloads(reader)
    assert [] == publisher.take()
    members.link(a, b).speak()
    members.turn()
    assert list(range(1, 11)) == [p.packet_id for p in publisher.take() if isinstance(p, Puback)]


def test_what_is_stored_and_what_goes_live_are_answered_in_order(members: Members) -> None:
    a, b, _ = members.nodes
    live = b.client("live")
    b.subscribe(live, ("live", 1))
    sleeper(b, "car", ("kept", 1)).disconnect()
    here = a.client("here")
    a.subscribe(here, ("here", 1))
    publisher = a.client("publisher")
    topics = ("live", "kept", "here")
    for topic in topics:
        publisher.publish(topic, b"first")
    for held, silent in ((True, False), (False, True), (True, True)):
        members.store.held, members.link(a, b).silent = held, silent
        publisher.send(*(Publish(topics[n % 3], b"%d" % n, 1, packet_id=n + 1) for n in range(9)))
        publisher.send(*(Publish(topics[n % 3], b"%d" % n, 1, packet_id=n + 1) for n in range(9, 18)))
        members.turn()
        members.store.held = False
        members.store.let_go()
        members.turn()
        members.link(a, b).speak()
        members.turn()
        assert list(range(1, 19)) == [p.packet_id for p in publisher.take() if isinstance(p, Puback)], (held, silent)
        for client in (live, here):
            got = [int(m.payload) for m in all_of(client) if m.payload != b"first"]
            assert sorted(got) == got and 6 == len(got)


def test_a_full_peer_drops_qos_0_and_holds_up_its_publishers_only(members: Members) -> None:
    a, b, c = members.nodes
    readers = [node.client(f"reader{number}") for number, node in enumerate((b, c))]
    for reader, topic in zip(readers, ("b", "c"), strict=True):
        reader.node.subscribe(reader, (topic, 1))
    to_b, to_c, fast = (a.client(name) for name in ("to_b", "to_c", "fast"))
    fast.publish("b", b"first")
    link = members.link(a, b)
    link.held, link.room_for = True, 0
    to_b.publish("b", b"lost", 0)
    fast.publish("b", b"lost", 0)
    assert 2 == sum(a.state.stats.cluster_dropped.values())
    for client in (to_b, fast):
        client.put("b", b"kept")
        client.put("b", b"kept too")
        assert Pause.PEER in client.connection.pauses
        assert [] == client.take()
    assert 0 == to_c.publish("c", b"other")
    link.room_for = 100
    link.held = False
    link.let_go(0)
    members.turn()
    for client in (to_b, fast):
        assert not client.connection.pauses
        assert 2 == len([p for p in client.take() if isinstance(p, Puback)])
    assert [b"first", b"kept", b"kept too", b"kept", b"kept too"] == payloads(readers[0])
    assert [b"other"] == payloads(readers[1])


def test_a_full_peer_that_dies_holds_up_no_publisher(members: Members) -> None:
    a, b, _ = members.nodes
    reader = b.client("reader")
    b.subscribe(reader, ("t", 1))
    publisher = a.client("publisher")
    link = members.link(a, b)
    link.held, link.room_for = True, 0
    publisher.put("t", b"x")
    members.turn()
    assert [] == publisher.take()
    members.kill(b)
    assert ReasonCode.NO_MATCHING_SUBSCRIBERS is publisher.expect(Puback).reason


@pytest.mark.parametrize("qos", [1, 2])
def test_while_routes_cannot_be_relied_on_nothing_above_qos_0_is_routed(members: Members, qos: int) -> None:
    a, b, _ = members.nodes
    here, there = a.client("here"), b.client("there")
    for client in (here, there):
        client.node.subscribe(client, ("t", 2))
    sleeper(b, "car", ("t", 1)).disconnect()
    publisher, fast = a.client("publisher"), a.client("fast")
    for topic in ("t", "here"):
        fast.publish(topic, b"first", 1)
    a.subscribe(here, ("here", 1))
    fast.publish("here", b"first", 1)
    for client in (here, there):
        all_of(client)
    a.cluster.holds = False
    publisher.publish("t", b"0", 0)
    for client in (publisher, fast):
        client.put("t" if client is publisher else "here", b"x", qos)
        assert Pause.VIEW in client.connection.pauses
        client.put("t", b"behind it", 0)
    work = a.begin(a.broker.publish(Message("t", b"own", 1)))
    assert [b"0"] == payloads(here) == payloads(there)
    assert 2 == len(members.store.entries("car"))
    assert [] == publisher.take() == fast.take() and not work.done()
    a.cluster.holds = True
    members.turn()
    for client in (publisher, fast):
        assert not client.connection.pauses
        client.expect(Puback if qos == 1 else Pubrec)
    assert [b"behind it", b"behind it", b"own", b"x"] == sorted(payloads(there))
    assert [b"behind it", b"behind it", b"own", b"x", b"x"] == sorted(payloads(here))
    assert work.done()


def test_a_client_that_goes_while_it_waits_for_members_leaves_nothing(members: Members) -> None:
    a, b, _ = members.nodes
    reader = b.client("reader")
    b.subscribe(reader, ("t", 1))
    publisher = a.client("publisher")
    a.cluster.holds = False
    publisher.put("t", b"x")
    publisher.close()
    members.turn()
    a.cluster.holds = True
    members.turn()
    assert [] == payloads(reader)
    assert "publisher" not in a.state.registry.sessions


@pytest.mark.parametrize("lasting", [False, True])
def test_a_subscription_is_granted_when_all_members_know_of_it(members: Members, lasting: bool) -> None:
    _, b, c = members.nodes
    reader = b.client("reader", **(LASTING if lasting else {}))
    link = members.link(b, c)
    link.held = True
    reader.send(Subscribe(1, (Subscription("t", 1),)))
    members.turn()
    assert [] == reader.take()
    link.held = False
    link.let_go()
    reader.expect(Suback)
    link.held = True
    reader.send(Unsubscribe(2, ("t",)))
    members.turn()
    assert [] == reader.take()
    link.held = False
    link.let_go()
    reader.expect(Unsuback)


def test_another_client_of_the_same_filter_waits_for_the_same(members: Members) -> None:
    """The filter was told, but not every member has taken it over."""
    a, b, _ = members.nodes
    first, second = b.client("first"), b.client("second")
    link = members.link(b, a)
    link.held = True
    for client in (first, second):
        client.send(Subscribe(1, (Subscription("t", 1),)))
    members.turn()
    assert [] == first.take() == second.take()
    link.held = False
    link.let_go()
    first.expect(Suback)
    second.expect(Suback)
    second.subscribe("t", 0)
    assert 1 == link.sent.count("interest"), "and it is told once"


# --- members come and go ------------------------------------------------------------------------------------------


def test_a_member_that_is_new_is_told_everything(members: Members) -> None:
    a, b, _ = members.nodes
    live, shared = b.client("live"), b.client("shared")
    b.subscribe(live, ("live", 1))
    b.subscribe(shared, ("$share/g/shared", 1))
    awake = sleeper(b, "awake", ("kept", 1))
    new = members.join()
    new.relay.subscribers.put("awake", b.state.registry.sessions["awake"].durable.generation, Subscription("kept", 1))  # type: ignore[union-attr]
    publisher = new.client("publisher")
    for topic in ("live", "shared"):
        publisher.publish(topic, topic.encode())
    publisher.publish("kept", b"0", 0)
    assert [b"live"] == payloads(live)
    assert [b"shared"] == payloads(shared)
    assert [b"0"] == payloads(awake)
    reader = new.client("reader")
    new.subscribe(reader, ("back", 1))
    a.client("p").publish("back", b"x")
    assert [b"x"] == payloads(reader)


def test_a_member_that_is_gone_wants_nothing(members: Members) -> None:
    a, b, c = members.nodes
    for node in (b, c):
        node.subscribe(node.client(f"live {node.member}"), ("t", 1), ("$share/g/s", 1), (f"only {node.member}", 1))
    publisher = a.client("publisher")
    members.kill(b)
    for topic, reason in (("t", 0), ("s", 0), ("only n2~2", 0x10), ("only n3~3", 0)):
        publisher.put(topic, b"x")
        assert reason == publisher.expect(Puback).reason, topic
    assert {"t", "only n3~3"} == set(a.relay.router.table.filters())


def test_answers_do_not_wait_for_the_dead(members: Members) -> None:
    a, b, _ = members.nodes
    b.subscribe(b.client("reader"), ("t", 1))
    publisher = a.client("publisher")
    members.link(a, b).held = True
    publisher.put("t", b"x")
    members.turn()
    assert [] == publisher.take()
    members.kill(b)
    publisher.expect(Puback)


# --- QoS 2 --------------------------------------------------------------------------------------------------------


def test_a_qos_2_message_that_is_repeated_elsewhere_is_given_once(members: Members) -> None:
    """Its publisher's member has died, and it has sent it to another one: under the same id, as its session says."""
    a, b, c = members.nodes
    live, other = b.client("live"), b.client("other")
    b.subscribe(live, ("t", 2))
    b.subscribe(other, ("$share/g/t", 2))
    publisher = a.client("publisher")
    message = Message("t", b"x", 2, publisher="publisher", guid=b"g" * 16)
    for node in (a, c, a):
        node.begin(node.broker.publish(message))
        members.turn()
    assert [b"x"] == payloads(live)
    assert [b"x"] == payloads(other)
    message = Message("t", b"x", 2, publisher="publisher", guid=b"h" * 16)
    for node in (b, c):
        node.begin(node.broker.publish(message))
        members.turn()
    assert [b"x"] == payloads(live), "also if it came from a client of this member before"
    publisher.publish("t", b"y", 2)
    assert [b"y"] == payloads(live)


def test_ids_of_qos_2_messages_are_remembered_for_an_hour_or_as_many_as_there_is_room_for(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = members.nodes[0].relay
    monkeypatch.setattr(relay._guids, "_least", 4)

    def first(number: int, later: float = 0.0) -> bool:
        return relay.is_first(Message("t", b"", 2, guid=b"%016d" % number), members.clock.now + later)

    assert [True] * 8 == [first(number) for number in range(8)]
    assert [False] * 8 == [first(number) for number in range(8)]
    assert 0 == members.nodes[0].state.stats.cluster_forgotten
    assert first(8) and first(0)
    assert 4 == members.nodes[0].state.stats.cluster_forgotten
    assert first(9, 3601) and not first(8, 3601), "the older half is kept for another hour"
    assert first(10, 7300) and first(8, 7300)
    assert 4 == members.nodes[0].state.stats.cluster_forgotten, "these were forgotten in time"


# --- shared groups ------------------------------------------------------------------------------------------------


def test_each_member_of_a_group_gets_its_share_wherever_it_is(members: Members) -> None:
    """Two of four are where the publisher is; one of the others is durable."""
    a, b, c = members.nodes
    clients = [a.client("c1"), a.client("c2"), b.client("c3"), sleeper(c, "c4", ("$share/g/t", 1))]
    for client in clients[:3]:
        client.node.subscribe(client, ("$share/g/t", 1))
    for _ in range(20):
        a.client("p").publish("t", b"x")
    assert [5, 5, 5, 5] == [len(payloads(client)) for client in clients]
    clients[0].disconnect()
    clients[1].disconnect()
    for number in range(6):
        a.client("p").publish("t", b"%d" % number, number % 3)
    assert 6 == len(payloads(clients[2])) + len(payloads(clients[3]))


def test_a_member_here_without_room_leaves_messages_to_members_elsewhere(members: Members) -> None:
    a, b, _ = members.nodes
    full, free = a.client("full", receive_maximum=1), b.client("free")
    for client in (full, free):
        client.node.subscribe(client, ("$share/g/t", 1))
    for _ in range(10):
        a.client("p").publish("t", b"x")
    taken = [packet for packet in full.take() if isinstance(packet, Publish)]  # none is acknowledged
    assert [1, 9] == [len(taken), len(payloads(free))]


@pytest.mark.parametrize("strategy", ["hash_topic", "hash_client"])
def test_a_hash_chooses_the_same_member_on_each_node(strategy: str) -> None:
    members = Members(3, SessionOptions(shared_strategy=strategy))
    with standing(members.clock):
        clients = [node.client(f"c{number}") for number, node in enumerate(members.nodes * 2)]
        clients += [sleeper(node, f"s{number}", ("$share/g/+", 1)) for number, node in enumerate(members.nodes)]
        for client in clients[:6]:
            client.node.subscribe(client, ("$share/g/+", 1))
        for number in range(30):
            for node in members.nodes:
                publisher = node.client(f"p{number}")
                publisher.publish(f"t{number}", b"%d" % number, 1)
        got = [payloads(client) for client in clients]
        assert 90 == sum(map(len, got))
        for number in range(30):
            assert 1 == sum(b"%d" % number in found for found in got), "one member has all three"
        assert sum(map(bool, got)) > 4


def test_members_of_a_group_elsewhere_get_their_share(members: Members) -> None:
    """Two of three are with one member, so it gets two messages of three."""
    a, b, c = members.nodes
    clients = [node.client(f"c{number}") for number, node in enumerate((b, b, c))]
    for client in clients:
        client.node.subscribe(client, ("$share/g/t/+", 1))
    publisher = a.client("p")
    for number in range(30):
        publisher.publish(f"t/{number}", b"x", number % 2)
    assert [10, 10, 10] == [len(payloads(client)) for client in clients]
    assert 30 == a.state.stats.cluster_sent["group"]


def test_durable_members_elsewhere_are_stored_for(members: Members) -> None:
    a, b, c = members.nodes
    awake, asleep = sleeper(b, "awake", ("$share/g/t", 1)), sleeper(c, "asleep", ("$share/g/t", 1))
    asleep.disconnect()
    publisher = a.client("p")
    for number in range(4):
        assert 0 == publisher.publish("t", b"%d" % number)
    assert [b"0", b"1", b"2", b"3"] == payloads(awake)
    assert {} == members.store.entries("asleep")
    awake.disconnect()
    for number in range(4, 8):
        assert 0 == publisher.publish("t", b"%d" % number)
    both = payloads(b.admit("awake", **LASTING)) + payloads(c.admit("asleep", **LASTING))
    assert [b"4", b"5", b"6", b"7"] == sorted(both)
    publisher.put("t", b"x", 0)
    members.turn()
    assert 0 == a.state.stats.dropped["no_subscribers"]


def test_a_message_for_a_group_that_has_no_member_there_any_more_is_given_to_another(members: Members) -> None:
    a, b, c = members.nodes
    leaves, stays = b.client("leaves"), c.client("stays")
    for client in (leaves, stays):
        client.node.subscribe(client, ("$share/g/t", 2))
    publisher = a.client("p")
    publisher.publish("t", b"first", 2)  # goes to one of both
    members.link(b, a).held = True
    leaves.disconnect()
    for qos in (1, 2, 0):
        for number in range(2):
            publisher.publish("t", b"%d %d" % (qos, number), qos)
    members.link(b, a).held = False
    members.link(b, a).let_go()
    members.turn()
    got = [payload for payload in payloads(stays) if payload != b"first"]
    assert 5 == len(got)
    assert {b"1 0", b"1 1", b"0 0", b"0 1"} < set(got), "at QoS 2 a member may have it already"
    assert {"group": 1} == {kind: n for kind, n in a.state.stats.cluster_dropped.items() if n}
    assert 3 == b.state.stats.cluster_sent["returned"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_member_that_dies_with_a_message_for_a_group(members: Members, qos: int) -> None:
    """Another one gets it; at QoS 2 the first one may have it already."""
    a, b, c = members.nodes
    dies, stays = b.client("dies"), c.client("stays")
    b.subscribe(dies, ("$share/g/t", 2))
    link = members.link(a, b)
    publisher = a.client("p")
    publisher.publish("t", b"first")
    c.subscribe(stays, ("$share/g/t", 2))
    link.held = True
    for _ in range(2):
        publisher.put("t", b"x", qos)
    members.turn()
    sent = link.sent.count("group")
    members.kill(b)
    assert 2 == sent, "one for each member, and the one before"
    assert 1 + (qos == 1) == len(payloads(stays))
    assert (qos > 0) * 2 == len([p for p in publisher.take() if isinstance(p, Puback | Pubrec)])


def test_unacknowledged_messages_of_a_group_go_to_members_elsewhere(members: Members) -> None:
    """[MQTT-4.8.2-5]"""
    a, b, c = members.nodes
    ends = a.client("ends")
    a.subscribe(ends, ("$share/g/t", 1))
    a.client("p").publish("t", b"x")
    stays, later = b.client("stays"), sleeper(c, "later", ("$share/h/u", 1))
    b.subscribe(stays, ("$share/g/t", 1))
    ends.disconnect()
    assert [b"x"] == payloads(stays)
    ends = sleeper(a, "ends", ("$share/h/u", 1))
    a.client("p").publish("u", b"y")
    ends.messages()
    a.client("ends", clean=True)
    assert [b"y"] == payloads(later)


# --- figures ------------------------------------------------------------------------------------------------------


def test_counters_add_up_on_each_member() -> None:
    members = Members(3, SessionOptions(window=2, queue=3, patience=0.0))
    with standing(members.clock):
        a = members.nodes[0]
        live = [node.client(f"live{number}") for number, node in enumerate(members.nodes)]
        lasting = [sleeper(node, f"kept{number}", ("t", 1)) for number, node in enumerate(members.nodes)]
        for client in live:
            client.node.subscribe(client, ("t", 1), ("$share/g/t", 1))
        lasting[2].disconnect()
        publishers = [node.client(f"p{number}") for number, node in enumerate(members.nodes)]

        def check() -> None:
            members.turn()
            for node in members.nodes:
                balanced(exported(node))

        for number in range(12):
            publisher = publishers[number % 3]
            publisher.put("t", b"%d" % number, number % 3)
            check()
            if number % 4 == 0:
                for client in (*live, *lasting):
                    payloads(client)
                check()
            for packet in publisher.take():
                if isinstance(packet, Pubrec):
                    publisher.send(Pubrel(packet.packet_id))
        lasting[2] = a.admit("kept2", **LASTING)
        for client in (*live, *lasting):
            payloads(client)
            check()
        sent = sum((sum(node.state.stats.cluster_sent.values()) for node in members.nodes), 0)
        received = sum((sum(node.state.stats.cluster_received.values()) for node in members.nodes), 0)
        assert sent == received > 0
