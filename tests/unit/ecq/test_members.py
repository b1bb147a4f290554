"""Compacted queues on several members of a cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from motorcade.commit import Commit
from motorcade.core.subscription import Subscription
from motorcade.delivery.progress import decode
from motorcade.extension.compacted import SERVICE, Compacted, CompactedKind, CompactedView, RewindView
from motorcade.extension.declared import BadOptionsError, UnknownError
from motorcade.mqtt.packets import Publish, Subscribe
from motorcade.plugins.logs.compacted.members import LOOK, STORED, WANTED, StoredItem
from motorcade.plugins.logs.compacted.plugin import EcqPlugin
from motorcade.storage.ports import Batch, Written
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, standing
from tests.unit.ecq.node import EXCLUSIVE, SHARED, numbers, told

QUOTA = 0x97
FORMS = ((EXCLUSIVE, "$ECQ"), (SHARED, "$SCQ"))
both_forms = pytest.mark.parametrize(("form", "root"), FORMS, ids=("exclusive", "shared"))


def cluster(count: int = 2, **options: Any) -> Members:
    return Members(count, plugins={"ecq": {"progress_interval": 0.01} | options})


@pytest.fixture
def members() -> Iterator[Members]:
    members = cluster(heartbeat=1e6)  # nothing may depend on it
    with standing(members.clock):
        yield members


def service(node: MemberNode) -> Compacted:
    found: Compacted = node.plugins.service(SERVICE)
    return found


def plugin(node: MemberNode) -> EcqPlugin:
    (loaded,) = [each for each in node.plugins.loaded() if each.name == "ecq"]
    assert isinstance(loaded.plugin, EcqPlugin)
    return loaded.plugin


def consumer(node: MemberNode, root: str = "$ECQ", name: str = "q", **more: Any) -> Client:
    client = node.client(name, **more)
    if not client.connack.session_present:
        assert (1,) == client.subscribe(f"{root}/q/#").reasons
    return client


def publish(client: Client, key: str, payload: bytes, root: str = "$ECQ") -> None:
    assert 0 == client.publish(f"{root}/w/q/{key}", payload)


def collect(node: MemberNode) -> int:
    """Remove what is too old, with the pauses that this takes."""
    task = node.begin(plugin(node).collector.collect())
    node.members.wait(1.0)
    return task.result()


def drained(client: Client) -> list[Publish]:
    """What comes until nothing more does; all of it is acknowledged."""
    before = len(client.received)
    client.drain()
    return client.received[before:]


def show(node: MemberNode, form: CompactedKind = EXCLUSIVE) -> CompactedView:
    return node.run(service(node).show(form, "q"))


def rewind(node: MemberNode, form: CompactedKind = EXCLUSIVE, **how: Any) -> RewindView:
    return node.run(service(node).rewind(form, "q", "" if form is EXCLUSIVE else "q", **how))


# -- appended anywhere, consumed anywhere


@both_forms
def test_what_is_appended_at_any_member_comes_at_once_and_in_order(
    members: Members, form: CompactedKind, root: str
) -> None:
    a, b = members.nodes
    car = consumer(a, root)
    here, there = a.client("here"), b.client("there")
    for number, client in enumerate((there, here, there, there, here), 1):
        publish(client, f"k{number}", b"%d" % number, root)
        assert [(number, f"k{number}", b"%d" % number)] == told(drained(car))
    publish(there, "k1", b"6", root)
    assert [(6, "k1", b"6")] == told(drained(car))
    assert form is show(b, form).kind


@both_forms
def test_both_members_append_in_one_turn_and_nothing_is_passed_over(
    members: Members, form: CompactedKind, root: str
) -> None:
    a, b = members.nodes
    car = consumer(a, root)
    here, there = a.client("here"), b.client("there")
    members.store.held = True
    for number in range(6):
        (here if number % 2 else there).put(f"{root}/w/q/k{number}", b"%d" % number)
    members.store.held = False
    with members.loop.running():
        members.store.let_go()
    members.turn()
    came = told(drained(car))
    assert list(range(1, 7)) == [number for number, _, _ in came]
    assert {(f"k{number}", b"%d" % number) for number in range(6)} == {(key, payload) for _, key, payload in came}
    assert 6 == show(a, form).messages


@both_forms
def test_a_hint_that_is_late_or_lost_with_its_member(members: Members, form: CompactedKind, root: str) -> None:
    a, b = members.nodes
    car = consumer(a, root)
    there = b.client("there")
    members.link(b, a).held = True
    publish(there, "late", b"1", root)
    assert [] == car.messages()
    with members.loop.running():
        members.link(b, a).held = False
        members.link(b, a).let_go()
    members.turn()
    assert [(1, "late", b"1")] == told(drained(car))
    members.link(b, a).held = True
    publish(there, "lost", b"2", root)
    assert [] == car.messages()
    members.kill(b)
    assert [(2, "lost", b"2")] == told(drained(car))
    assert 2 == show(a, form).last


def test_a_full_link_gets_one_look_in_place_of_all_hints(members: Members) -> None:
    a, b = members.nodes
    car = consumer(a)
    link, there = members.link(b, a), b.client("there")
    link.held, link.room_for = True, 0
    for number in range(3):
        publish(there, f"k{number}", b"x")
    assert [] == car.messages()
    assert 0 == link.sent.count(STORED)
    assert 3 == plugin(b).context.counters["hints_dropped"]
    link.held, link.room_for = False, 100
    with members.loop.running():
        link.let_go()
        link._settle()
    members.turn()
    assert 1 == link.sent.count(LOOK)
    assert [1, 2, 3] == numbers(drained(car))


def test_a_shared_queue_is_told_to_members_that_consume_it_and_to_no_other(members: Members) -> None:
    a, b = members.nodes
    pub = b.client("pub")
    publish(pub, "k", b"1", "$SCQ")
    assert 0 == members.link(b, a).sent.count(STORED)
    first, second = (consumer(a, "$SCQ", name) for name in ("first", "second"))
    assert [[1], [1]] == [numbers(drained(each)) for each in (first, second)]
    publish(pub, "k", b"2", "$SCQ")
    assert 2 == members.link(b, a).sent.count(STORED), "where it ended, and what was appended"
    first.disconnect()
    publish(pub, "k", b"3", "$SCQ")
    assert 3 == members.link(b, a).sent.count(STORED)
    second.disconnect()
    publish(pub, "k", b"4", "$SCQ")
    assert 3 == members.link(b, a).sent.count(STORED)


def test_a_member_that_does_not_know_yet_of_a_consumer_is_waited_for(members: Members) -> None:
    """The consumer looks again when all know of it: what was appended until then was told to nobody."""
    a, b = members.nodes
    pub = b.client("pub")
    link = members.link(a, b)
    link.held = True
    car = a.client("car")
    car.send(Subscribe(1, (Subscription("$SCQ/q/#", 1),)))
    members.turn()
    for _ in range(2):  # that there is a subscription, and that there is a consumer
        while link.waiting and WANTED not in [kind for kind, _ in link.waiting]:
            with members.loop.running():
                link.let_go(1)
            members.turn()
    assert WANTED in [kind for kind, _ in link.waiting]
    publish(pub, "k", b"1", "$SCQ")
    assert [] == car.messages()
    with members.loop.running():
        link.let_go()
    members.turn()
    assert [1] == numbers(drained(car))


def test_a_member_that_hears_late_of_a_consumer_tells_where_the_queue_ends(members: Members) -> None:
    """It was silent for longer than it is waited for, and has appended meanwhile."""
    a, b = members.nodes
    pub = b.client("pub")
    link = members.link(a, b)
    link.held = True
    car = a.client("car")
    car.send(Subscribe(1, (Subscription("$SCQ/q/#", 1),)))
    members.wait(3.0)
    publish(pub, "k", b"1", "$SCQ")
    members.wait(3.0)
    assert [] == car.messages()
    with members.loop.running():
        link.held = False
        link.let_go()
    members.turn()
    assert [1] == numbers(drained(car))


def test_a_hint_between_an_append_and_the_word_of_it_hides_nothing(members: Members) -> None:
    """The own append has landed, the other member's too, and consumers are told of both at once."""
    a, b = members.nodes
    car = consumer(a)
    here, there = a.client("here"), b.client("there")
    publish(here, "first", b"0")
    assert [1] == numbers(drained(car))
    members.store.held = True
    here.put("$ECQ/w/q/here", b"1")
    members.turn()
    there.put("$ECQ/w/q/there", b"2")
    members.turn()
    members.store.held = False
    with members.loop.running():
        members.store.let_go(2)
        hint = msgspec.msgpack.encode([StoredItem("ecq:q", 3, [])])
        a.cluster.handlers[STORED](members.link(a, b), hint)
        members.store.let_go()
    members.turn()
    assert [2, 3] == numbers(drained(car))


@both_forms
def test_a_second_member_joins_one_that_serves(form: CompactedKind, root: str) -> None:
    members = cluster(1, heartbeat=1e6)
    with standing(members.clock):
        (a,) = members.nodes
        car = consumer(a, root)
        publish(a.client("pub"), "a", b"1", root)
        assert [1] == numbers(drained(car))
        b = members.join()
        publish(b.client("other"), "b", b"2", root)
        publish(a.client("third"), "c", b"3", root)
        assert [2, 3] == numbers(drained(car))
        members.kill(b)
        publish(a.client("fourth"), "d", b"4", root)
        assert [4] == numbers(drained(car))
        assert 4 == show(a, form).messages


# -- bounds


@pytest.mark.parametrize("overflow", ["refuse", "drop_oldest"])
def test_the_bounds_of_a_queue_hold_over_all_members(overflow: str) -> None:
    members = cluster(2, max_messages=2, overflow=overflow)
    with standing(members.clock):
        here, there = (node.client(f"pub{number}") for number, node in enumerate(members.nodes))
        publish(here, "a", b"1")
        publish(there, "b", b"2")
        for client in (here, there):
            expected = QUOTA if overflow == "refuse" else 0
            assert expected == client.publish(f"$ECQ/w/q/{client.client_id}", b"new")
        if overflow == "refuse":
            publish(there, "a", b"newer")
            publish(here, "b", b"newer")
        found = members.nodes[0].run(service(members.nodes[0]).read(EXCLUSIVE, "q"))
        assert 2 == len(found)
        assert [3, 4] == [each.position for each in found]


def test_the_number_of_queues_is_counted_over_all_members() -> None:
    members = cluster(2, max_queues=3)
    with standing(members.clock):
        here, there = (node.client(f"pub{number}") for number, node in enumerate(members.nodes))
        for number in range(3):
            assert 0 == (there if number % 2 else here).publish(f"$SCQ/w/q{number}/k", b"1")
        assert QUOTA == here.publish("$SCQ/w/more/k", b"1")
        assert QUOTA == there.publish("$SCQ/w/more/k", b"1")
        members.nodes[0].run(service(members.nodes[0]).delete(SHARED, "q1"))
        members.turn()
        assert 0 == there.publish("$SCQ/w/more/k", b"1")
        assert QUOTA == here.publish("$SCQ/w/even-more/k", b"1")
        for node in members.nodes:
            plugin(node).queues.count = 17
            collect(node)
            assert 3 == plugin(node).queues.count


# -- consumers move


@both_forms
def test_a_consumer_moves_and_its_progress_with_it(members: Members, form: CompactedKind, root: str) -> None:
    a, b = members.nodes
    pub = a.client("pub")
    car = consumer(a, root)
    for number in range(4):
        publish(pub, f"k{number}", b"old", root)
    first, second, *_ = car.messages()
    car.ack(first, second)
    members.wait(1.0)
    car = consumer(b, root)
    assert [(3, "k2", b"old"), (4, "k3", b"old")] == told(car.messages())
    publish(pub, "k2", b"new", root)
    assert [(5, "k2", b"new")] == told(car.messages())
    members.wait(1.0)
    (view,) = show(a, form).consuming
    assert (True, 2, 3) == (view.connected, view.progress, view.in_flight)
    car.ack(*car.inflight)
    members.wait(1.0)
    (view,) = show(a, form).consuming
    assert (True, 5, 0) == (view.connected, view.progress, view.in_flight)


def test_no_old_value_comes_after_a_newer_one_though_the_consumer_moves(members: Members) -> None:
    a, b = members.nodes
    pub = b.client("pub")
    car = consumer(a, receive_maximum=1)
    for payload in (b"1", b"2", b"3"):
        publish(pub, "k", payload)
        publish(pub, "l", payload)
    seen = [told(car.messages())]
    for number in range(4):
        car = consumer(members.nodes[number % 2], receive_maximum=1)
        seen.append(told(drained(car) if number == 3 else car.messages()))
        publish(pub, "k", b"%d" % (number + 4))
    seen.append(told(drained(car)))
    came = [each for some in seen for each in some]
    for key in ("k", "l"):
        found = [number for number, of, _ in came if of == key]
        assert found == sorted(found)
    assert ("k", b"7") in [each[1:] for each in came]


def test_what_was_known_of_the_end_before_a_consumer_came_is_not_relied_on(members: Members) -> None:
    """The member appended itself once; what others have appended since, and a consumer there acknowledged, is more."""
    a, b = members.nodes
    publish(b.client("pub"), "a", b"1")
    car = consumer(a)
    publish(a.client("other"), "b", b"2")
    assert [1, 2] == numbers(drained(car))
    members.wait(1.0)
    car = consumer(b)
    assert [] == car.messages()
    assert 0 == plugin(b).context.counters["given_again"]
    publish(a.client("third"), "c", b"3")
    assert [3] == numbers(drained(car))


def test_progress_that_is_stored_late_takes_nothing_back(members: Members) -> None:
    """The member that the consumer has left writes when the next one has gone on long since."""
    a, b = members.nodes
    pub = b.client("pub")
    car = consumer(a)
    publish(pub, "a", b"1")
    publish(pub, "b", b"2")
    (first, _second) = car.messages()
    write = members.store.write
    late: list[Batch] = []

    def put_aside(batch: Batch) -> Commit[Written]:
        late.append(batch)
        return Commit()

    a.plugin_store.write = put_aside  # type: ignore[method-assign]
    car.ack(first)
    members.wait(1.0)
    assert late
    car = consumer(b)
    assert [1, 2] == numbers(drained(car))
    publish(pub, "c", b"3")
    assert [3] == numbers(drained(car))
    members.wait(1.0)
    with members.loop.running():
        for batch in late:
            write(batch)
    members.turn()
    assert 3 == decode(members.store.records_of("ecq-progress")["q"]).number
    members.kill(b)
    assert [] == consumer(a).messages()


# -- rewinding


@both_forms
def test_a_rewind_at_one_member_reaches_the_consumer_at_another(
    members: Members, form: CompactedKind, root: str
) -> None:
    a, b = members.nodes
    pub = a.client("pub")
    car = consumer(a, root)
    for number in range(3):
        publish(pub, f"k{number}", b"%d" % number, root)
    assert [1, 2, 3] == numbers(drained(car))
    preview = rewind(b, form, to=2, preview=True)
    assert (True, 3, 1, 2) == (preview.preview, preview.before, preview.progress, preview.messages)
    assert [] == car.messages()
    done = rewind(b, form, to=2)
    assert (False, 3, 1, 2) == (done.preview, done.before, done.progress, done.messages)
    again = car.messages()
    assert [2, 3] == numbers(again)
    members.wait(1.0)
    assert 1 == show(b, form).consuming[0].progress
    car.ack(*again)
    members.wait(1.0)
    assert 3 == show(b, form).consuming[0].progress
    with pytest.raises(BadOptionsError, match="not between 0 and 4"):
        rewind(b, form, to=9)


def test_a_rewind_of_a_consumer_that_is_nowhere_holds_wherever_it_comes(members: Members) -> None:
    a, b = members.nodes
    car = consumer(a)
    publish(b.client("pub"), "k", b"1")
    assert [1] == numbers(drained(car))
    car.disconnect()
    members.wait(1.0)
    assert 1 == rewind(b, to=1).messages
    assert [1] == numbers(consumer(a).messages())
    publish(b.client("again"), "k", b"1", "$SCQ")
    with pytest.raises(UnknownError, match="no consumer 'nobody'"):
        b.run(service(b).rewind(SHARED, "q", "nobody", to=1))


def test_a_consumer_that_comes_while_it_is_rewound_elsewhere_begins_again(members: Members) -> None:
    a, b = members.nodes
    car = consumer(a)
    publish(b.client("pub"), "k", b"1")
    assert [1] == numbers(drained(car))
    car.disconnect()
    members.wait(1.0)
    members.store.held = True  # the rewind is not stored yet
    task = b.begin(service(b).rewind(EXCLUSIVE, "q", to=1))
    members.turn()
    assert not task.done()
    waiting = list(members.store.waiting)
    members.store.waiting.clear()
    members.store.held = False
    car = consumer(a)
    assert [] == car.messages()
    members.store.waiting.extend(waiting)
    with members.loop.running():
        members.store.let_go()
    members.turn()
    assert 1 == task.result().messages
    assert [1] == numbers(drained(car))


def test_progress_of_a_generation_before_a_rewind_is_void(members: Members) -> None:
    a, b = members.nodes
    pub = b.client("pub")
    car = consumer(a)
    publish(pub, "a", b"1")
    publish(pub, "b", b"2")
    assert [1, 2] == numbers(drained(car))
    members.wait(1.0)
    members.link(b, a).held = True  # neither question nor item
    b.cluster.mute.add(a.member)
    task = b.begin(service(b).rewind(EXCLUSIVE, "q", to=1))
    members.wait(5.0)
    assert 2 == task.result().messages
    publish(pub, "c", b"3")
    members.kill(a)
    assert [1, 2, 3] == numbers(consumer(b).messages())


# -- operators


@both_forms
def test_every_member_shows_the_same(members: Members, form: CompactedKind, root: str) -> None:
    a, b = members.nodes
    car = consumer(a, root)
    pub = b.client("pub")
    for number in range(3):
        publish(pub, f"k{number}", b"x", root)
    first, *_ = car.messages()
    car.ack(first)
    views = [show(node, form) for node in members.nodes]
    assert views[0] == views[1]
    (view,) = views[0].consuming
    assert (True, 1, 2, 2) == (view.connected, view.progress, view.waiting, view.in_flight)
    lists = [node.run(service(node).list(form)) for node in members.nodes]
    assert lists[0] == lists[1]
    assert ["q"] == [each.name for each in lists[0]]
    reads = [node.run(service(node).read(form, "q")) for node in members.nodes]
    assert reads[0] == reads[1]
    assert 3 == len(reads[0])


def test_a_member_that_does_not_answer_is_named(members: Members) -> None:
    a, b = members.nodes
    consumer(a)
    publish(b.client("pub"), "k", b"1")
    b.cluster.mute.add(a.member)
    task = b.begin(service(b).show(EXCLUSIVE, "q"))
    members.wait(5.0)
    assert {"n1": "silent"} == task.result().unanswered


@both_forms
def test_a_queue_is_deleted_at_one_member_and_goes_on_at_the_other(
    members: Members, form: CompactedKind, root: str
) -> None:
    a, b = members.nodes
    car, pub = consumer(a, root), a.client("pub")
    publish(pub, "k", b"1", root)
    assert [1] == numbers(drained(car))
    b.run(service(b).delete(form, "q"))
    members.turn()
    assert [] == a.run(service(a).list(form))
    publish(pub, "k", b"2", root)
    assert [2] == numbers(drained(car))
    assert ["q"] == [each.name for each in b.run(service(b).list(form))]


def test_what_was_on_its_way_while_its_queue_was_deleted_has_a_record(members: Members) -> None:
    a, b = members.nodes
    pub = a.client("pub")
    publish(pub, "k", b"1")
    members.store.held = True
    pub.put("$ECQ/w/q/l", b"2")
    members.turn()
    append = members.store.waiting.popleft()
    members.store.held = False
    b.run(service(b).delete(EXCLUSIVE, "q"))  # all of it, and the note has come
    members.turn()
    members.store.waiting.append(append)
    with members.loop.running():
        members.store.let_go()
    members.turn()
    assert 1 == show(b).messages
    assert {1} == {plugin(node).queues.count for node in members.nodes}


def test_what_was_appended_and_forgotten_while_its_queue_was_deleted_has_a_record(members: Members) -> None:
    a, b = members.nodes
    pub = a.client("pub")
    publish(pub, "k", b"1")
    members.store.held = True
    task = b.begin(service(b).delete(EXCLUSIVE, "q"))
    members.turn()
    with members.loop.running():
        members.store.let_go(1)  # the messages go
    members.turn()
    pub.put("$ECQ/w/q/l", b"2")
    members.turn()
    held = members.store.waiting
    held.rotate(1)  # the append before the deletion of what else there is
    with members.loop.running():
        members.store.let_go(1)
    members.turn()
    queues = plugin(a).queues
    queues.drop(queues.exclusive["q"])
    assert not queues.exclusive
    members.store.held = False
    with members.loop.running():
        members.store.let_go()
    members.turn()
    assert task.done()
    assert [(2, b"2")] == [(each.position, each.payload) for each in b.run(service(b).read(EXCLUSIVE, "q"))]


# -- the collector


def test_what_is_too_old_is_collected_by_one_member_and_queues_without_use_are_forgotten_by_all() -> None:
    members = cluster(2, retention=50.0, idle=100.0, heartbeat=1e6, gc_interval=1e9)
    with standing(members.clock):
        a, b = members.nodes
        pub = b.client("pub")
        publish(pub, "k", b"1")
        members.wait(51.0)  # before each collects by itself for the first time
        assert [0, 1] == [collect(b), collect(a)]
        members.wait(60.0)
        assert [0, 0] == [collect(b), collect(a)]
        members.turn()
        assert [] == b.run(service(b).list(EXCLUSIVE))
        assert {0} == {plugin(node).queues.count for node in members.nodes}
        publish(pub, "k", b"2")
        assert [2] == [each.position for each in a.run(service(a).read(EXCLUSIVE, "q"))]
        members.kill(a)
        members.wait(60.0)
        assert 1 == collect(b)
