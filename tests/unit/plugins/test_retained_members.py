"""Retained messages while a cluster has several members, in virtual time.

A subscriber that comes after an acknowledged publish gets what was published last, on whichever member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motorcade.core.subscription import Subscription
from motorcade.extension.plugin import Plugins
from motorcade.mqtt.packets import Puback, Publish, Suback, Subscribe
from motorcade.mqtt.properties import Properties
from motorcade.plugins.retained import RetainedPlugin, feed
from motorcade.plugins.retained.record import COLLECTION, decode
from motorcade.storage.ports import AddNote, StoreError, StoreFigures
from tests.support.held_store import HeldStore
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, MemoryNode, standing

FULL = 0x97
LARGE = b"x" * 1000


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(2, plugins={"retained": {}})
    with standing(made.clock):
        yield made


def plugin(node: MemberNode) -> RetainedPlugin:
    (loaded,) = node.plugins.loaded()
    assert isinstance(loaded.plugin, RetainedPlugin)
    return loaded.plugin


def counters(node: MemberNode) -> dict[str, int]:
    return dict(plugin(node).context.counters)


def send(client: Client, topic: str, payload: bytes, qos: int = 1, number: int = 1, **properties: Any) -> None:
    """Publish retained, whenever that is answered."""
    packet = Publish(topic, payload, qos, True, packet_id=number if qos else 0, properties=Properties(**properties))
    client.send(packet)


def retain(client: Client, topic: str, payload: bytes, qos: int = 1, **properties: Any) -> int:
    """Publish retained, and be answered."""
    send(client, topic, payload, qos, **properties)
    reason = client.expect(Puback).reason
    return int(reason) if reason >= 0x80 else 0


def ask(node: MemoryNode, filter_: str, client_id: str = "asks", **wanted: Any) -> Client:
    """A new subscriber, whenever it gets something."""
    client = node.client(client_id)
    client.send(Subscribe(1, (Subscription(filter_, 1, **wanted),)))
    client.expect(Suback)
    return client


def taken(members: Members, client: Client) -> dict[str, bytes]:
    """The retained messages that a client has got by now, each once."""
    members.wait(0.1)
    found = [packet for packet in client.messages() if packet.retain]
    client.ack(*(packet for packet in found if packet.qos))
    assert len({packet.topic for packet in found}) == len(found)
    return {packet.topic: bytes(packet.payload) for packet in found}


def given(members: Members, node: MemberNode, filter_: str = "#") -> dict[str, bytes]:
    """What a new subscriber gets."""
    client = ask(node, filter_)
    found = taken(members, client)
    client.disconnect()
    return found


def stored(members: Members) -> dict[str, bytes]:
    """What the store has."""
    return {topic: decode(topic, value).payload for topic, value in members.store.records_of(COLLECTION).items()}


@pytest.mark.parametrize("payload", [b"1", LARGE], ids=["in the note", "read"])
@pytest.mark.parametrize("filter_", ["t/1", "t/+", "#"])
def test_subscribers_of_all_members_get_what_was_published_last(members: Members, payload: bytes, filter_: str) -> None:
    a, b = members.nodes
    car, truck = a.client("car"), b.client("truck")
    for at, value in ((car, payload), (truck, payload + b"2"), (car, payload + b"3")):
        assert 0 == retain(at, "t/1", value)
        for node in members.nodes:
            assert {"t/1": value} == given(members, node, filter_)
    assert 0 == retain(truck, "t/1", b"")
    assert {} == stored(members)
    for node in members.nodes:
        assert {} == given(members, node, filter_)


def test_a_subscriber_waits_until_its_member_has_heard_of_what_was_acknowledged(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    assert 0 == retain(car, "t", b"old")
    assert {"t": b"old"} == given(members, b)
    b.cluster.held_feeds.held = True
    assert 0 == retain(car, "t", b"new")  # whatever B does
    subscribers = [ask(b, filter_, f"asks-{place}") for place, filter_ in enumerate(("t", "+", "#"))]
    assert [{}, {}, {}] == [taken(members, one) for one in subscribers]
    b.cluster.held_feeds.held = False
    assert [{"t": b"new"}] * 3 == [taken(members, one) for one in subscribers]


def test_a_deletion_reaches_what_its_member_has_not_heard_of(members: Members) -> None:
    a, b = members.nodes
    b.cluster.held_feeds.held = True
    assert 0 == retain(a.client("car"), "t", b"x")
    assert 0 == retain(b.client("truck"), "t", b"")
    b.cluster.held_feeds.held = False
    assert {} == stored(members)
    assert {} == given(members, a) == given(members, b)


def test_what_two_members_write_at_the_same_time_is_the_same_everywhere(members: Members) -> None:
    a, b = members.nodes
    car, truck = a.client("car"), b.client("truck")
    for first, second in ((car, truck), (truck, car)):
        members.store.held = True
        send(first, "t", b"first")
        first.node.turn()
        send(second, "t", b"second")
        second.node.turn()
        assert not [packet for packet in (*car.take(), *truck.take()) if isinstance(packet, Puback)]
        members.store.held = False
        members.store.let_go()
        assert not max(first.expect(Puback).reason, second.expect(Puback).reason) & 0x80
        assert {"t": b"second"} == stored(members) == given(members, a) == given(members, b)


def test_a_client_gets_what_it_has_just_published_itself_and_nothing_older(members: Members) -> None:
    """At QoS 0, and while the store takes its time; other topics do not wait."""
    a, _ = members.nodes
    car = a.client("car")
    assert 0 == retain(car, "t", b"old")
    assert 0 == retain(car, "u", b"another")
    members.store.held = True
    send(car, "t", b"new", qos=0)
    send(car, "v", b"first", qos=0)
    subscriber = ask(a, "#")
    assert {"u": b"another"} == taken(members, subscriber)
    members.store.held = False
    members.store.let_go()
    assert {"t": b"new", "v": b"first"} == taken(members, subscriber)


def test_what_the_store_refuses_changes_nothing_anywhere(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    assert 0 == retain(car, "t", b"old")
    members.store.full = True
    assert FULL == retain(car, "t", b"new")
    assert FULL == retain(car, "new", b"new")
    members.store.full = False  # a subscription is stored
    assert {"t": b"old"} == given(members, a) == given(members, b)
    members.store.full = True
    assert 0 == retain(b.client("truck"), "t", b"")
    members.store.full = False
    assert {} == given(members, a) == given(members, b)


def test_nobody_gets_an_outdated_message_while_the_new_one_is_being_read(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = members.nodes
    records = members.store.inner.records
    read, go_on = records.get, asyncio.Event()

    async def slow(collection: str, key: str, now: float) -> bytes | None:
        await go_on.wait()
        return await read(collection, key, now)

    car = a.client("car")
    assert 0 == retain(car, "t", b"old")
    monkeypatch.setattr(records, "get", slow)
    assert 0 == retain(car, "t", LARGE)
    asked = ask(b, "#")
    assert {} == taken(members, asked)
    asked.take()
    assert 0 == retain(car, "t", b"small")  # its note has all, and what is being read is outdated
    members.wait(1)
    assert [(b"small", False)] == [
        (packet.payload, packet.retain) for packet in asked.messages()
    ]  # live, and only once
    assert {"t": b"small"} == given(members, b)
    go_on.set()
    assert {"t": b"small"} == given(members, b) == given(members, a)


def test_a_record_that_cannot_be_read_is_read_later(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = members.nodes
    records = members.store.inner.records
    read, failures = records.get, 3

    async def failing(collection: str, key: str, now: float) -> bytes | None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StoreError("no answer")
        return await read(collection, key, now)

    monkeypatch.setattr(records, "get", failing)
    assert 0 == retain(a.client("car"), "t", LARGE)
    asked = ask(b, "t")
    assert {} == taken(members, asked)
    members.wait(feed.RETRY * 3)
    assert {"t": LARGE} == taken(members, asked)


def test_with_too_much_to_be_read_the_cell_is_read_again(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_UNREAD", 2)
    a, b = members.nodes
    b.cluster.held_feeds.held = True
    car = a.client("car")
    for number in range(5):
        assert 0 == retain(car, f"t/{number}", LARGE + b"%d" % number)
    asked = ask(b, "#")
    b.cluster.held_feeds.held = False
    assert {f"t/{number}": LARGE + b"%d" % number for number in range(5)} == taken(members, asked)
    assert 1 <= counters(b)["overrun"] <= 2


def test_a_cell_of_which_notes_are_missing_is_read_again(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    for topic in ("kept", "deleted", "changed"):
        assert 0 == retain(car, topic, b"old")
    b.cluster.held_feeds.held = True
    assert 0 == retain(car, "changed", b"new")
    assert 0 == retain(car, "deleted", b"")
    assert 0 == retain(car, "made", b"new")
    members.store.inner.feeds._notes.popleft()
    members.store.inner.feeds._notes = type(members.store.inner.feeds._notes)(
        list(members.store.inner.feeds._notes)[-1:], maxlen=10
    )
    asked = ask(b, "#")
    b.cluster.held_feeds.held = False
    wanted = {"kept": b"old", "changed": b"new", "made": b"new"}
    members.wait(2)
    assert wanted == taken(members, asked)
    assert wanted == given(members, b) == given(members, a)


def test_a_note_that_a_fail_over_has_forgotten_is_not_waited_for_for_ever(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    assert 0 == retain(car, "s", b"kept")
    members.store.held = True
    car.send(*(Publish(topic, b"lost", 1, True, packet_id=number) for number, topic in enumerate(("t", "v"), 1)))
    a.turn()
    members.store.let_go()
    for topic in ("t", "v"):  # confirmed, and forgotten before any member has read of it
        members.store.inner.feeds._notes.pop()
        del members.store.inner.records.collections[COLLECTION][topic]
    members.store.held = False
    assert 0 == retain(b.client("truck"), "u", b"kept")  # its note has a number that one of those had
    asked = ask(a, "#")
    assert {"s": b"kept", "u": b"kept"} == taken(members, asked)
    members.wait(feed.OVERDUE + 2)
    assert {} == given(members, b, "v") == given(members, a, "v")
    assert 0 == retain(b.client("truck"), "v", b"again")
    assert {"v": b"again"} == given(members, a, "v") == given(members, b, "v")


def test_messages_expire_on_all_members_at_their_second(members: Members) -> None:
    a, b = members.nodes
    assert 0 == retain(a.client("car"), "t", b"x", message_expiry=10)
    members.wait(9)
    assert {"t": b"x"} == given(members, a) == given(members, b)
    members.wait(1.5)
    assert {} == given(members, a) == given(members, b)
    assert [1, 1] == [counters(node)["expired"] for node in members.nodes]
    assert [0, 0] == [plugin(node).gauges()["retained_messages"] for node in members.nodes]


def test_a_member_that_comes_later_has_them_all_and_one_that_dies_takes_none_along(members: Members) -> None:
    a, b = members.nodes
    assert 0 == retain(a.client("car"), "t", b"1")
    assert 0 == retain(b.client("truck"), "u", LARGE)
    c = members.join()
    members.kill(a)
    assert {"t": b"1", "u": LARGE} == given(members, c) == given(members, b)
    assert 0 == retain(b.client("truck"), "t", b"2")
    assert {"t": b"2", "u": LARGE} == given(members, c) == given(members, b)


def test_a_write_of_a_member_that_was_found_dead_changes_nothing(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    assert 0 == retain(car, "t", b"1")
    members.kill(a)
    send(car, "t", b"late")
    a.turn()
    assert {"t": b"1"} == given(members, b)


def test_a_plugin_that_is_loaded_later_gives_nothing_before_it_has_read_all(members: Members) -> None:
    a, b = members.nodes
    assert 0 == retain(a.client("car"), "t", b"1")
    b.run(b.plugins.unload("retained"))
    assert 0 == retain(a.client("car"), "t", b"2")
    b.load("retained")
    assert {"t": b"2"} == given(members, b)


def test_bounds_hold_on_each_member(members: Members) -> None:
    a, b = members.nodes
    a.run(a.plugins.reload("retained", {"max_messages": 2}))
    b.run(b.plugins.reload("retained", {"max_messages": 1}))
    car = a.client("car")
    for topic in ("t", "u", "v"):
        assert 0 == retain(car, topic, b"x")
    assert {"t": b"x", "u": b"x"} == given(members, a) == stored(members)
    assert {"t": b"x"} == given(members, b)
    assert counters(a)["refused_max_messages"] == counters(b)["refused_max_messages"] == 1
    assert 0 == retain(b.client("truck"), "t", b"")
    assert {"u": b"x"} == given(members, a)


def test_what_is_under_way_counts_for_the_bounds(members: Members) -> None:
    a, b = members.nodes
    a.run(a.plugins.reload("retained", {"max_messages": 2}))
    car = a.client("car")
    members.store.held = True
    for number, topic in enumerate(("t", "u", "v"), 1):
        send(car, topic, b"x", number=number)
        a.turn()
    members.store.held = False
    members.store.let_go()
    members.turn()
    assert {"t": b"x", "u": b"x"} == given(members, a) == given(members, b) == stored(members)
    assert 1 == counters(a)["refused_max_messages"]


def test_a_message_that_does_not_fit_makes_the_old_one_go_everywhere(members: Members) -> None:
    a, b = members.nodes
    a.run(a.plugins.reload("retained", {"max_payload": 10}))
    car = a.client("car")
    assert 0 == retain(car, "t", b"old")
    assert 0 == retain(car, "t", LARGE)
    assert {} == stored(members) == given(members, a) == given(members, b)


def test_operators_see_and_delete_the_same_on_each_member(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    for topic in ("t/1", "t/2", "u"):
        assert 0 == retain(car, topic, b"x")
    assert {"t/1", "t/2", "u"} == set(plugin(a).topics()) == set(plugin(b).topics())
    with members.loop.running():
        assert 2 == plugin(b).clear("t/#")
    members.turn()
    assert ["u"] == list(plugin(a).topics()) == list(plugin(b).topics())
    assert (message := plugin(b).get("u")) is not None and message.payload == b"x"
    assert {"u": b"x"} == stored(members)


# -- what subscriptions ask for, and live messages over links


def test_groups_get_no_retained_messages_and_retain_handling_holds(members: Members) -> None:
    a, b = members.nodes
    assert 0 == retain(a.client("car"), "t", b"x")
    assert {} == taken(members, ask(b, "$share/g/t"))
    assert {} == taken(members, ask(b, "t", retain_handling=2))
    asked = ask(b, "t", retain_handling=1)
    assert {"t": b"x"} == taken(members, asked)
    for handling, wanted in ((1, {}), (0, {"t": b"x"}), (2, {})):
        asked.send(Subscribe(9, (Subscription("t", 1, retain_handling=handling),)))
        asked.expect(Suback)
        assert wanted == taken(members, asked)


def test_own_messages_are_left_out_where_that_was_asked_for(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    assert 0 == retain(car, "t", b"1")
    car.disconnect()
    asked = ask(b, "t", "car", no_local=True)
    assert {} == taken(members, asked)
    members.store.held = True
    send(asked, "u", b"2", qos=0)
    asked.send(Subscribe(2, (Subscription("u", 1, no_local=True), Subscription("#", 0))))
    b.turn()
    members.store.held = False
    members.store.let_go()
    assert {"t": b"1", "u": b"2"} == taken(members, asked)  # by the other subscription, once each


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_the_flag_of_a_live_message_from_another_member_is_as_the_subscriber_wants_it(
    members: Members, qos: int
) -> None:
    a, b = members.nodes
    as_published = ask(b, "t", "as-published", retain_as_published=True)
    plain, group, old = ask(b, "t", "plain"), ask(b, "$share/g/t", "group"), b.client("old", 4)
    old.subscribe("t")
    durable = b.client("durable", properties=Properties(session_expiry=100))
    durable.send(Subscribe(1, (Subscription("t", 1, retain_as_published=True),)))
    members.wait(1)
    for one in (as_published, plain, group, old, durable):
        one.take()
    car = a.client("car")
    send(car, "t", b"x", qos)
    members.wait(1)
    flags = {one.client_id: [packet.retain for packet in one.messages()] for one in (as_published, plain, old, durable)}
    assert {"as-published": [True], "plain": [False], "old": [False], "durable": [True]} == flags
    assert [b"x"] == group.payloads()


def test_a_subscriber_gets_a_message_live_or_retained_whenever_it_comes(members: Members) -> None:
    """No gap between the two: the publisher's member does not know of the subscription when it routes the message."""
    a, b = members.nodes
    b.cluster.held_feeds.held = True
    members.link(b, a).held = True  # what B wants
    asked = b.client("asks")
    asked.send(Subscribe(1, (Subscription("t", 1),)))
    b.turn()
    assert 0 == retain(a.client("car"), "t", b"x")
    members.link(b, a).held = False
    members.link(b, a).let_go()
    asked.expect(Suback)
    b.cluster.held_feeds.held = False
    assert {"t": b"x"} == taken(members, asked)


def test_what_came_live_does_not_come_as_a_retained_message_too(members: Members) -> None:
    """However long the client has no room for its retained messages."""
    a, b = members.nodes
    assert 0 == retain(a.client("first"), "t/0", b"old")
    for number, there in enumerate((a, b)):
        asked = ask(there, "t/#", f"asks-{number}", retain_as_published=True)
        car = a.client("car")
        for qos in (0, 1, 2):
            send(car, f"t/{qos}", b"%d" % number, qos, number=qos)
        members.wait(1)
        found = [packet.topic for packet in asked.messages() if packet.payload == b"%d" % number]
        assert ["t/0", "t/1", "t/2"] == found


def test_a_retained_message_that_waits_for_room_gives_way_to_the_one_that_came_live(members: Members) -> None:
    a, b = members.nodes
    car = a.client("car")
    for topic in ("t/0", "t/1"):
        assert 0 == retain(car, topic, b"old")
    for there in (a, b):
        slow = there.client("slow", receive_maximum=1)
        slow.subscribe("t/#")
        members.wait(1)
        for topic in ("t/0", "t/1"):
            assert 0 == retain(car, topic, b"new")
        assert [b"new", b"new", b"old"] == sorted(slow.drain())
        slow.disconnect()
        for topic in ("t/0", "t/1"):
            assert 0 == retain(car, topic, b"old")


# -- costs


def test_a_lone_node_writes_no_notes() -> None:
    class Kept(HeldStore):
        async def figures(self) -> StoreFigures:
            return replace(await super().figures(), engine="kept")

    store = Kept()
    node = MemoryNode(store=store)
    plugins = Plugins(node.broker, node.hooks, Path("unused"), node.state.shared.sources)
    plugins.store = store
    steps: list[object] = []
    write = store.write
    store.write = lambda batch: (steps.extend(batch.steps), write(batch))[1]  # type: ignore[method-assign, func-returns-value]
    with standing(node.clock):
        node.run(plugins.load("retained", {}))
        car = node.client("car")
        send(car, "t", b"x")
        assert car.expect(Puback).reason < 0x80
    assert 1 == len(steps)
    assert not [step for step in steps if isinstance(step, AddNote)]


def test_a_note_is_small_however_large_the_message_is(members: Members) -> None:
    a, _ = members.nodes
    assert 0 == retain(a.client("car"), "t", b"x" * 1_000_000)
    (note,) = members.store.inner.feeds._notes
    assert len(note.data) < 100
