"""Addressed filters on several nodes: no member knows of them, and what is published anywhere arrives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from motorcade.broker.attachments import LET_GO
from motorcade.broker.limits import SessionOptions
from motorcade.broker.session_records import SUBSCRIPTIONS
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches
from motorcade.mqtt.packets import Connect, Puback, Publish, Pubrec, Pubrel, Suback, Subscribe, Unsuback, Unsubscribe
from motorcade.mqtt.properties import Properties
from motorcade.storage.ports import StoreFullError
from tests.support.held_store import HeldStore
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, standing

LASTING = Properties(session_expiry=100)
PATTERN = "agent/{client}/#"
ALL = "agent/V1/#"


def made(count: int = 3, **more: object) -> Iterator[Members]:
    found = Members(count, addressed=[PATTERN], **more)  # type: ignore[arg-type]
    with standing(found.clock):
        yield found


@pytest.fixture
def members() -> Iterator[Members]:
    yield from made()


def car(node: MemberNode, *filters: str, name: str = "V1", qos: int = 2, clean: bool = False) -> Client:
    client = node.admit(name, clean=clean, session_expiry=100)
    for filter_ in filters:
        assert (qos,) == client.subscribe(filter_, qos).reasons
    return client


def routes(node: MemberNode) -> tuple[int, int, int, int]:
    """How many clients, filters and places elsewhere a member knows."""
    relay = node.relay
    return (
        len(relay.subscribers),
        relay.subscribers.subscriptions,
        len(relay.router.table),
        len(relay.subscribers._places),
    )


def dropped(node: MemberNode) -> dict[str, int]:
    return {reason: count for reason, count in node.state.stats.dropped.items() if count}


# -- no route


def test_nobody_else_knows_of_an_addressed_filter(members: Members) -> None:
    """Connected or asleep; nor is there a note of it."""
    a, b, c = members.nodes
    clients = [car(b, f"agent/V{n}/#", f"agent/V{n}/cmd/+", name=f"V{n}") for n in range(20)]
    assert [(0, 0, 0, 0)] * 2 == [routes(a), routes(c)]
    for client in clients[:10]:
        client.close()
    members.wait(5)
    assert [(0, 0, 0, 0)] * 3 == [routes(node) for node in members.nodes]
    assert 10 == len(b.state.registry.sessions), "the others are asleep"
    assert 40 == len(members.store.records_of(SUBSCRIPTIONS))
    late = members.join()
    assert (0, 0, 0, 0) == routes(late)
    assert 0 == members.store.inner.feeds.apply_note(b"") - 1, "it is the first note"


def test_what_is_not_addressed_is_known_everywhere(members: Members) -> None:
    a, b, _ = members.nodes
    client = car(b, ALL, "fleet/#", "agent/V2/#")
    assert (1, 2, 2, 1) == routes(a)
    client.disconnect()
    members.wait(3)
    assert (1, 2, 0, 0) == routes(a)
    again = car(a)
    assert {b.member: [], a.member: ["V1"]} == {
        node.member: [name for name in node.state.registry.sessions if name == "V1"] for node in (a, b)
    }
    again.unsubscribe("fleet/#")
    again.unsubscribe("agent/V2/#")
    assert (0, 0, 0, 0) == routes(b)


def test_suback_waits_for_nobody(members: Members) -> None:
    a, b, _ = members.nodes
    client = b.admit("V1", clean=False, session_expiry=100)
    publisher = a.client("p")
    for node in members.nodes:
        node.cluster.held_feeds.held = True
        for link in node.cluster.links.values():
            link.held = link.silent = True
    client.send(Subscribe(1, (Subscription(ALL, 1),)))
    assert client.expect(Suback).reasons == (1,)
    publisher.publish("agent/V1/cmd", b"1")
    client.send(Unsubscribe(2, (ALL,)))
    client.expect(Unsuback)
    publisher.publish("agent/V1/cmd", b"2")
    assert [b"1"] == stored(members)


def stored(members: Members, name: str = "V1") -> list[bytes]:
    """The payloads in a client's mailbox."""
    mailboxes = members.store.inner.mailboxes
    return [mailboxes._blobs.data(row.digest) for row in mailboxes.boxes[f"session:{name}"].rows.values()]


# -- messages arrive


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1])
def test_a_connected_client_gets_what_is_published_anywhere(members: Members, at: int, qos: int) -> None:
    """At once, and once."""
    client = car(members.nodes[1], ALL)
    publisher = members.nodes[at].client("p")
    for number in range(3):
        publisher.publish("agent/V1/cmd", b"%d" % number, qos)
    assert [(b"0", qos), (b"1", qos), (b"2", qos)] == [(bytes(m.payload), m.qos) for m in client.messages()]
    publisher.publish("agent/V2/cmd", b"", qos)
    publisher.publish("agent", b"", qos)
    assert [] == client.messages()


def test_a_client_that_sleeps_gets_it_when_it_comes_back(members: Members) -> None:
    a, b, c = members.nodes
    client = b.admit("V1", clean=False, session_expiry=100)
    client.subscribe(ALL, 2, identifier=7)
    client.disconnect()
    members.wait(3)
    assert [] == [*b.state.registry.sessions]
    for node in (a, c):
        publisher = node.client("p" + node.member)
        for qos in (0, 1, 2):
            publisher.publish("agent/V1/cmd", b"%d" % qos, qos, content_type="text")
    back = car(c)
    assert back.connack.session_present
    found = [
        (bytes(m.payload), m.qos, m.properties.subscription_ids, m.properties.content_type) for m in back.messages()
    ]
    assert [(b"%d" % qos, qos, (7,), "text") for qos in (0, 1, 2)] * 2 == found


def test_qos_0_is_not_kept_if_that_is_switched_off() -> None:
    for members in made(2, session=SessionOptions(store_qos0=False)):
        a, b = members.nodes
        client = car(b, ALL)
        publisher = a.client("p")
        publisher.publish("agent/V1/cmd", b"live", 0)
        assert [b"live"] == client.payloads()
        client.disconnect()
        members.wait(3)
        publisher.publish("agent/V1/cmd", b"lost", 0)
        assert {"offline_qos0": 1} == dropped(a)
        assert [] == car(a).payloads()


def test_all_subscriptions_of_the_client_count_once(members: Members) -> None:
    """Also those that are no addressed ones: one copy with the highest QoS."""
    a, b, _ = members.nodes
    for sleeping in (False, True):
        client = car(b, clean=True)
        client.subscribe("agent/V1/#", 0, identifier=1)
        client.subscribe("agent/+/cmd", 2, identifier=2)
        client.subscribe("#", 1, identifier=3)
        if sleeping:
            client.disconnect()
            members.wait(3)
        for node in (a, b):
            publisher = node.client("p")
            for qos in (1, 2, 0):
                publisher.publish("agent/V1/cmd", b"%d" % qos, qos)
            publisher.publish("agent/V1/other", b"o")
            publisher.publish("other", b"o")
            publisher.disconnect()
        if sleeping:
            client = car(a)
        found = [(bytes(m.payload), m.qos, sorted(m.properties.subscription_ids)) for m in client.messages()]
        expected = [(b"1", 1, [1, 2, 3]), (b"2", 2, [1, 2, 3]), (b"0", 0, [1, 2, 3]), (b"o", 1, [1, 3]), (b"o", 1, [3])]
        assert sorted(expected * 2) == sorted(found)
        client.ack(*(m for m in client.inflight if m.qos == 1))


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_monitors_and_others_below_the_pattern_get_it_live(members: Members, qos: int) -> None:
    """On the client's member too, which gives it to all of them; and nobody gets it twice."""
    a, b, c = members.nodes
    client = car(b, ALL)
    low = car(b, name="low")
    low.subscribe("agent/V1/#", 1)
    monitors = [node.client(f"m{number}") for number, node in enumerate(members.nodes)]
    for monitor in monitors:
        monitor.subscribe("agent/+/cmd", 2)
    asleep = car(c, "agent/V1/cmd", name="other")
    asleep.disconnect()
    members.wait(3)
    for node in members.nodes:
        node.client(f"p{node.member}").publish("agent/V1/cmd", b"x", qos)
    assert [[b"x"] * 3] * 5 == [one.payloads() for one in (client, low, *monitors)]
    assert [b"x"] * 3 == car(a, name="other").payloads()


@pytest.mark.parametrize("qos", [1, 2])
def test_a_subscription_at_qos_0_is_served_live(members: Members, qos: int) -> None:
    """From its own member and from others, with and without a monitor beside it."""
    a, b, _ = members.nodes
    client = car(b, ALL, qos=0)
    for _ in range(2):
        for node in (a, b):
            publisher = node.client("p")
            publisher.publish("agent/V1/cmd", b"x", qos)
            publisher.disconnect()
        assert [(b"x", 0)] * 2 == [(bytes(m.payload), m.qos) for m in client.messages()]
        b.client("monitor").subscribe("#", 1)
    client.disconnect()
    members.wait(3)
    a.client("p").publish("agent/V1/cmd", b"kept", qos)
    assert [(b"kept", 0)] == [(bytes(m.payload), m.qos) for m in car(a).messages()]


def test_a_clean_session_below_the_pattern_is_an_ordinary_one(members: Members) -> None:
    a, b, _ = members.nodes
    client = b.client("V1")
    client.subscribe(ALL, 2)
    assert (0, 0, 1, 0) == routes(a)
    for qos in (0, 1, 2):
        a.client("p").publish("agent/V1/cmd", b"%d" % qos, qos)
    assert [b"0", b"1", b"2"] == client.payloads()


def test_shared_groups_below_the_pattern_are_ordinary_ones(members: Members) -> None:
    a, b, c = members.nodes
    for name in ("V1", "w"):
        car(b if name == "w" else c, "$share/g/agent/V1/#", name=name)
    publisher = a.client("p")
    for number in range(4):
        publisher.publish("agent/V1/cmd", b"%d" % number)
    found = [[node for node in members.nodes if name in node.state.registry.sessions] for name in ("V1", "w")]
    assert [[c], [b]] == found
    assert 4 == len(stored(members, "V1")) + len(stored(members, "w"))
    assert 2 == len(stored(members, "w"))


def test_what_the_client_publishes_itself_is_for_those_who_want_it(members: Members) -> None:
    a, b, _ = members.nodes
    client = b.admit("V1", clean=False, session_expiry=100)
    client.send(Subscribe(1, (Subscription(ALL, 1, no_local=True),)))
    client.expect(Suback)
    client.publish("agent/V1/cmd", b"own")
    a.client("p").publish("agent/V1/cmd", b"x")
    assert [b"x"] == client.payloads()
    client.subscribe("agent/V1/cmd", 1)
    client.publish("agent/V1/cmd", b"own")
    assert [b"own"] == client.payloads()


# -- sessions begin, move and end


def test_a_member_that_has_lost_the_client_unawares_stores_for_it(members: Members) -> None:
    """It believes that the session is here, and has heard of none of its new filters."""
    a, b, _ = members.nodes
    car(a, "agent/V1/old")
    b.cluster.mute.add(a.member)
    there = b.peer()
    there.send(Connect("V1", 5, clean_start=False, properties=LASTING))
    members.wait(LET_GO)
    there.send(Subscribe(7, (Subscription("agent/V1/new", 1),)), Unsubscribe(8, ("agent/V1/old",)))
    members.turn()
    assert "V1" in a.state.registry.sessions
    there.take()
    publisher = a.client("p")
    publisher.publish("agent/V1/new", b"1")
    publisher.publish("agent/V1/old", b"2")
    members.turn()
    assert [b"1"] == [bytes(p.payload) for p in there.take() if isinstance(p, Publish)]


@pytest.mark.parametrize("at", [0, 1])
def test_a_hint_that_comes_before_the_client_is_here_is_kept(members: Members, at: int) -> None:
    """The store has attached it, and the answer is on its way."""
    a, b, _ = members.nodes
    car(a, ALL).disconnect()
    members.wait(3)
    publisher = members.nodes[at].client("p")
    members.store.held_opens = True
    client = b.peer()
    client.send(Connect("V1", 5, clean_start=False, properties=LASTING))
    members.turn()
    publisher.publish("agent/V1/cmd", b"x")
    with members.loop.running():
        members.store.let_open()
    members.turn()
    assert [b"x"] == [bytes(p.payload) for p in client.take() if isinstance(p, Publish)]


def test_another_session_of_the_client_gets_nothing_of_the_old_one(members: Members) -> None:
    a, b, c = members.nodes
    car(b, ALL).disconnect()
    members.wait(3)
    publisher = a.client("p")
    publisher.publish("agent/V1/cmd", b"old")
    new = car(c, clean=True)
    publisher.publish("agent/V1/cmd", b"between")
    new.subscribe(ALL, 1)
    publisher.publish("agent/V1/cmd", b"new")
    assert [b"new"] == new.payloads()
    assert {"no_subscribers": 1} == dropped(a)


def test_a_session_that_has_ended_gets_nothing(members: Members) -> None:
    a, b, _ = members.nodes
    car(b, ALL).disconnect()
    members.wait(110)
    a.client("p").publish("agent/V1/cmd", b"x")
    assert {} == members.store.records_of(SUBSCRIPTIONS)
    assert 0 == members.store.inner.mailboxes.look("session:V1").generation
    assert {"no_subscribers": 1} == dropped(a)


def test_messages_arrive_though_the_member_of_the_client_dies(members: Members) -> None:
    a, b, c = members.nodes
    car(b, ALL)
    publisher = a.client("p")
    publisher.publish("agent/V1/cmd", b"1")
    members.link(a, b).held = True
    publisher.publish("agent/V1/cmd", b"2")
    members.kill(b)
    publisher.publish("agent/V1/cmd", b"3")
    members.wait(3)
    publisher.publish("agent/V1/cmd", b"4")
    assert [b"1", b"2", b"3", b"4"] == car(c).drain()


def test_hints_are_lost_and_the_client_gets_it_all_the_same(members: Members) -> None:
    """With the member that had to tell."""
    a, b, c = members.nodes
    client = car(b, ALL)
    members.link(a, b).held = True
    a.client("p").publish("agent/V1/cmd", b"1")
    assert [] == client.payloads()
    members.kill(a)
    members.wait(1)
    assert [b"1"] == client.payloads()
    assert c.alive


def test_a_message_of_qos_2_is_stored_once_wherever_its_publisher_repeats_it(members: Members) -> None:
    a, b, c = members.nodes
    client = car(c, ALL)
    publisher = a.admit("p", clean=False, session_expiry=100)
    members.store.held = True
    publisher.send(Publish("agent/V1/cmd", b"x", 2, packet_id=9))
    members.turn()
    members.store.let_go(1)
    publisher.close()
    members.store.held = False
    members.store.let_go()
    members.turn()
    again = b.admit("p", clean=False, session_expiry=100)
    again.send(Publish("agent/V1/cmd", b"x", 2, dup=True, packet_id=9))
    assert 9 == again.expect(Pubrec).packet_id
    again.send(Pubrel(9))
    members.turn()
    assert [b"x"] == client.payloads()
    assert 1 == len(stored(members))


def test_what_cannot_be_stored_is_refused(members: Members) -> None:
    a, b, _ = members.nodes
    car(b, ALL)
    monitor = b.client("monitor")
    monitor.subscribe("agent/+/cmd", 1)
    publisher = a.client("p")
    members.store.held = True
    publisher.put("agent/V1/cmd", b"x")
    members.turn()
    members.store.fail(StoreFullError("there is no room"))
    assert 0x97 == publisher.expect(Puback).reason
    assert [] == monitor.payloads(), "what the store refuses reaches no client"


def test_the_queue_of_a_client_has_its_bound() -> None:
    for members in made(2, session=SessionOptions(queue=3, window=2)):
        a, b = members.nodes
        car(b, ALL).disconnect()
        members.wait(3)
        publisher = a.client("p")
        for number in range(8):
            publisher.publish("agent/V1/cmd", b"%d" % number)
        assert {"queue_full": 3} == dropped(a)
        assert [b"3", b"4", b"5", b"6", b"7"] == car(a).drain()


# -- another configuration


def test_what_was_stored_with_other_patterns_is_served() -> None:
    """All members stop; records stay what they are, and each member makes of them what its patterns say."""
    store = HeldStore()
    patterns: list[list[str]] = [[], [PATTERN], ["other/{client}"], [PATTERN], []]
    for round_, addressed in enumerate(patterns):
        members = Members(2, addressed=addressed, store=store)
        with standing(members.clock):
            a, b = members.nodes
            client = car(b, ALL if round_ == 0 else f"agent/V1/{round_}")
            assert round_ == 0 or client.connack.session_present
            client.disconnect()
            members.wait(3)
            known = round_ + 1 if addressed != [PATTERN] else 0
            assert (known, known) == (a.relay.subscribers.subscriptions, b.relay.subscribers.subscriptions)
            publisher = a.client("p")
            for number in range(1, round_ + 1):
                publisher.publish(f"agent/V1/{number}", b"%d" % number)
            again = car(a)
            assert [b"%d" % number for number in range(1, round_ + 1)] == again.drain()
            again.disconnect()
            members.wait(3)
            for node in list(members.nodes):
                members.kill(node)


def test_without_patterns_all_is_as_before() -> None:
    members = Members(2)
    with standing(members.clock):
        a, b = members.nodes
        car(b, ALL).disconnect()
        members.wait(3)
        assert (1, 1, 0, 0) == routes(a)
        a.client("p").publish("agent/V1/cmd", b"x")
        assert [b"x"] == car(a).payloads()
        assert 0 == a.state.stats.withdrawn["unmatched"]


# -- everything together


@pytest.mark.parametrize("seed", range(12))
def test_what_is_acknowledged_arrives_once(seed: int) -> None:
    """Clients move, sleep, change their filters and begin anew; members die and come; publishers are anywhere."""
    for members in made():
        Walk(random.Random(seed), members).run()


class Walk:
    """A random one. `wanted` is what each client is to get, in any order of publishers."""

    def __init__(self, random_: random.Random, members: Members) -> None:
        self.random = random_
        self.members = members
        self.names = [f"V{number}" for number in range(4)]
        self.clients: dict[str, tuple[MemberNode, Client]] = {}
        self.filters: dict[str, set[str]] = {name: set() for name in self.names}
        self.wanted: dict[str, list[bytes]] = {name: [] for name in self.names}
        self.got: dict[str, list[bytes]] = {name: [] for name in self.names}
        self.published = 0

    def run(self) -> None:
        steps = [self.come, self.come, self.go, self.subscribe, self.subscribe, self.unsubscribe, self.begin_again]
        for _ in range(150):
            self.random.choice([*steps, *[self.publish] * 8, self.rest, self.die])()
        for name in self.names:
            self.come(name)
            self.take(name)
        assert self.wanted == self.got
        assert any(self.wanted.values())

    def node(self) -> MemberNode:
        return self.random.choice(self.members.nodes)

    def name(self) -> str:
        return self.random.choice(self.names)

    def take(self, name: str) -> None:
        client = self.clients[name][1]
        if client.open:
            client.messages()
            self.got[name] += (bytes(m.payload) for m in client.inflight)
            client.ack(*client.inflight)

    def come(self, name: str = "") -> None:
        name = name or self.name()
        if name in self.clients:
            self.take(name)
        node = self.node()
        self.clients[name] = node, car(node, name=name)

    def begin_again(self) -> None:
        name = self.name()
        if name in self.clients:
            self.take(name)
        if len(self.got[name]) == len(self.wanted[name]):
            node = self.node()
            self.clients[name] = node, car(node, name=name, clean=True)
            self.filters[name] = set()

    def go(self) -> None:
        name = self.name()
        if name in self.clients:
            self.take(name)
            self.clients[name][1].close()
            self.members.turn()

    def subscribe(self) -> None:
        name = self.name()
        if name in self.clients and self.clients[name][1].open:
            self.take(name)
            client = self.clients[name][1]
            filter_ = self.random.choice([f"agent/{name}/#", f"agent/{name}/+", "agent/+/b", f"agent/{name}/a"])
            client.subscribe(filter_, 1)
            self.filters[name].add(filter_)

    def unsubscribe(self) -> None:
        name = self.name()
        if name in self.clients and self.clients[name][1].open and self.filters[name]:
            self.take(name)
            filter_ = self.random.choice(sorted(self.filters[name]))
            self.clients[name][1].unsubscribe(filter_)
            self.filters[name].remove(filter_)

    def publish(self) -> None:
        publisher = self.node().client(f"p{self.published}")
        self.published += 1
        topic = f"agent/{self.name()}/{self.random.choice('abc')}"
        payload = b"%d" % self.published
        assert 0 == publisher.publish(topic, payload)
        for name in self.names:
            if any(matches(filter_, topic) for filter_ in self.filters[name]):
                self.wanted[name].append(payload)
        publisher.disconnect()

    def rest(self) -> None:
        self.members.wait(self.random.choice([0.5, 3]))

    def die(self) -> None:
        if self.random.random() < 0.3:
            for name in self.names:
                if name in self.clients:
                    self.take(name)
            node = self.members.nodes[self.random.randrange(len(self.members.nodes) - 1)]  # numbers are given once
            self.members.kill(node)
            self.clients = {name: one for name, one in self.clients.items() if one[0] is not node}
            self.members.join()
            self.members.wait(3)
