"""Queues on several members of a cluster, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from motorcade.commit import Commit
from motorcade.extension.declared import ConflictError
from motorcade.plugins.logs.queues.dispatcher import BLOCKED
from motorcade.plugins.logs.queues.members import HUNGRY, OFFER
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.plugin import QueuesPlugin
from motorcade.plugins.logs.queues.service import QueueService
from motorcade.storage.ports import Batch, StoreError, Written
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, standing

QUOTA = 0x97
REFUSED = 0x83
NUMBERS = [b"%d" % number for number in range(40)]


@contextmanager
def cluster(count: int = 2, **options: Any) -> Iterator[Members]:
    members = Members(count, plugins={"queues": {"queue": {"q": {"topics": ["q/#"]} | options, "dead": {}}}})
    with standing(members.clock):
        yield members


def queues(node: MemberNode) -> QueueService:
    found: QueueService = node.plugins.service("queues")
    return found


def plugin(node: MemberNode) -> QueuesPlugin:
    (loaded,) = [each for each in node.plugins.loaded() if each.name == "queues"]
    assert isinstance(loaded.plugin, QueuesPlugin)
    return loaded.plugin


def worker(node: MemberNode, name: str, queue: str = "q", **more: Any) -> Client:
    client = node.client(name, **more)
    if not client.connack.session_present:
        assert (1,) == client.subscribe(f"$queue/{queue}").reasons
    return client


def fill(node: MemberNode, *payloads: bytes, topic: str = "q/a", **properties: Any) -> None:
    pub = node.client(f"filler-{node.member}")
    for payload in payloads:
        assert 0 == pub.publish(topic, payload, **properties)
    pub.disconnect()


def stored(members: Members, name: str = "q") -> list[bytes]:
    """What is in a queue, once what was acknowledged is removed."""
    members.wait(0.25)
    node = members.nodes[0]
    return [found.payload for found in node.run(queues(node).read(name, 0, 1000))]


def claimed(members: Members, mailbox: str = "queue:q") -> Counter[str]:
    """How many messages each writer has claimed."""
    box = members.store.inner.mailboxes.boxes.get(mailbox)
    return Counter(box.claims.values()) if box is not None else Counter()


def finish(members: Members, workers: Sequence[Client]) -> list[bytes]:
    """All workers acknowledge what they have, until nothing comes any more; what they had or got."""
    seen = []
    for _ in range(50):
        some = [payload for each in workers for payload in each.drain()]
        seen += some
        members.wait(0.25)
        if not some and not any(each.messages() for each in workers):
            return seen
    raise AssertionError("it does not end")


# -- each message to one consumer


def test_a_message_goes_to_a_consumer_at_another_member_at_once() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = worker(b, "there")
        for payload in NUMBERS[:5]:
            fill(a, payload)
            assert [payload] == there.drain()
        assert [] == stored(members)
        assert 0 < members.link(a, b).sent.count(OFFER)


@pytest.mark.parametrize("strategy", ["round_robin", "random", "least_inflight"])
def test_each_message_goes_to_one_consumer_of_all(strategy: str) -> None:
    with cluster(3, strategy=strategy) as members:
        workers = [
            worker(node, f"{node.member}-{number}", receive_maximum=3) for node in members.nodes for number in (1, 2)
        ]
        for number, payload in enumerate(NUMBERS):
            fill(members.nodes[number % 3], payload)
        members.wait(0.25)
        assert all(each.messages() or each.received for each in workers), "some have nothing"
        assert sorted(NUMBERS) == sorted(finish(members, workers))
        assert [] == stored(members)
        assert not claimed(members)


def test_a_consumer_alone_gets_all_in_order_wherever_it_is_published() -> None:
    with cluster() as members:
        a, b = members.nodes
        fill(a, *NUMBERS[:20])
        fill(b, *NUMBERS[20:30])
        there = worker(b, "there", receive_maximum=4)
        fill(a, *NUMBERS[30:])
        assert NUMBERS == finish(members, [there])


def test_no_more_is_claimed_than_consumers_have_room_for() -> None:
    with cluster() as members:
        a, b = members.nodes
        fill(b, *NUMBERS)
        here = worker(a, "here", receive_maximum=1)
        assert [NUMBERS[0]] == here.payloads()
        assert sum(claimed(members).values()) <= 10
        others = worker(b, "there", receive_maximum=30)
        assert 25 <= len(others.payloads())


def test_what_waits_behind_a_slow_consumer_goes_to_another_member_that_has_nothing() -> None:
    with cluster() as members:
        a, b = members.nodes
        slow = worker(a, "slow", receive_maximum=1)
        fill(a, *NUMBERS[:6])
        assert [NUMBERS[0]] == slow.payloads()
        quick = worker(b, "quick")
        members.wait(4 * BLOCKED)
        assert NUMBERS[1:6] == sorted(quick.drain())
        members.wait(3.0)
        assert [] == quick.payloads()
        slow.ack(*slow.inflight)
        assert [] == slow.payloads()
        assert [] == stored(members)
        fill(b, b"next")
        assert [b"next"] == quick.drain() + slow.drain()


def test_a_consumer_whose_messages_went_to_another_member_gets_the_next_ones_when_it_has_room() -> None:
    with cluster() as members:
        a, b = members.nodes
        slow = worker(a, "slow", receive_maximum=1)
        fill(a, *NUMBERS[:6])
        assert [NUMBERS[0]] == slow.payloads()
        quick = worker(b, "quick")
        members.wait(4 * BLOCKED)
        assert NUMBERS[1:6] == sorted(quick.drain())
        slow.ack(*slow.inflight)
        quick.disconnect()
        fill(b, *NUMBERS[6:9])
        members.wait(1.25)
        assert NUMBERS[6:9] == slow.drain()
        assert [] == stored(members)


# -- refused, not answered, gone


def test_what_a_consumer_refuses_goes_to_another_member() -> None:
    with cluster(redispatch_delay=0.5) as members:
        a, b = members.nodes
        here = worker(a, "here")
        fill(a, b"x")
        (message,) = here.messages()
        there = worker(b, "there")
        here.ack(message, reason=REFUSED)
        members.wait(0.75)
        assert [] == here.payloads()
        (message,) = there.messages()
        there.ack(message, reason=REFUSED)
        members.wait(0.75)
        assert [b"x"] == here.drain()
        assert [] == stored(members)


@pytest.mark.parametrize("goodbye", [True, False])
def test_what_a_consumer_holds_when_it_goes_comes_to_another_member_at_once(goodbye: bool) -> None:
    with cluster() as members:
        a, b = members.nodes
        here = worker(a, "here")
        fill(a, *NUMBERS[:5])
        assert NUMBERS[:5] == here.payloads()
        there = worker(b, "there")
        assert [] == there.payloads()
        if goodbye:
            here.disconnect()
        else:
            here.close()
        assert NUMBERS[:5] == sorted(there.payloads())
        assert [2] * 5 == marks(members)
        there.drain()
        assert [] == stored(members)


def marks(members: Members, mailbox: str = "queue:q") -> list[int]:
    """How often messages were sent, as the store knows."""
    return [row.mark for row in members.store.inner.mailboxes.boxes[mailbox].rows.values()]


def test_a_message_that_is_not_acknowledged_in_time_goes_to_another_member_and_may_be_acknowledged_late() -> None:
    with cluster(ack_timeout=5.0) as members:
        a, b = members.nodes
        here = worker(a, "here")
        fill(a, b"x", b"y")
        first, second = here.messages()
        there = worker(b, "there")
        members.wait(6.0)
        assert [b"x", b"y"] == sorted(there.payloads())
        here.ack(first)  # late, and it counts
        assert [b"y"] == stored(members)
        there.ack(*there.inflight)
        here.ack(second)
        assert [] == stored(members)
        assert [] == finish(members, [here, there])


def test_a_consumer_that_is_slow_and_the_only_one_is_not_sent_a_message_twice() -> None:
    """Though another member is there, which has none."""
    with cluster(ack_timeout=5.0) as members:
        a, _ = members.nodes
        here = worker(a, "here")
        fill(a, b"x")
        (message,) = here.messages()
        members.wait(30.0)
        assert [] == here.payloads()
        here.ack(message)
        assert [] == stored(members)


def test_a_consumer_that_does_not_acknowledge_in_time_gets_others_while_it_has_room() -> None:
    with cluster(ack_timeout=5.0) as members:
        a, b = members.nodes
        here = worker(a, "here")
        fill(a, b"x", b"y")
        held = here.messages()
        members.wait(6.0)
        fill(b, *NUMBERS[:30])
        got: list[bytes] = []
        for _ in range(10):
            members.wait(0.25)
            some = [message for message in here.messages() if message not in held]
            got += [bytes(message.payload) for message in some]
            here.ack(*some)
        assert NUMBERS[:30] == got
        here.ack(*held)
        assert [] == stored(members)


def test_attempts_count_over_members_and_kills_until_the_message_is_a_dead_letter() -> None:
    with cluster(3, max_attempts=3, dead_letter="dead") as members:
        fill(members.nodes[0], b"poison")
        for number in range(3):
            node = members.nodes[-1]
            victim = worker(node, f"victim{number}")
            members.wait(0.5)
            assert [b"poison"] == victim.payloads(), number
            members.wait(0.5)  # the attempt is counted
            if len(members.nodes) > 1:
                members.kill(node)
            else:
                victim.disconnect()
        fresh = members.join()
        good = worker(fresh, "good")
        members.wait(1.0)
        assert [] == good.payloads()
        (dead,) = worker(fresh, "undertaker", "dead").messages()
        assert b"poison" == bytes(dead.payload)
        assert "3" == dict(dead.properties.user_properties)["dead-attempts"]
        assert [] == stored(members)


def test_dead_letters_are_moved_once_whichever_member_does_it() -> None:
    with cluster(max_attempts=1, dead_letter="dead") as members:
        a, b = members.nodes
        here, there = worker(a, "here"), worker(b, "there")
        for number, payload in enumerate(NUMBERS[:10]):
            fill(members.nodes[number % 2], payload)
        for each in (here, there):
            for message in each.messages():
                each.ack(message, reason=REFUSED)
        members.wait(0.25)
        assert [] == stored(members)
        assert NUMBERS[:10] == sorted(stored(members, "dead"))
        views = [node.run(queues(node).show("q")) for node in members.nodes]
        assert [10, 10] == [view.dead_lettered for view in views]


# -- members come and go


def test_what_a_member_has_claimed_goes_to_others_when_it_is_dead() -> None:
    with cluster() as members:
        a, b = members.nodes
        doomed, there = worker(a, "doomed"), worker(b, "there")
        fill(a, *NUMBERS[:6])
        had = doomed.payloads()
        assert had
        got = there.drain()
        members.kill(a)
        got += finish(members, [there])
        assert sorted(NUMBERS[:6]) == sorted(got)
        assert [] == stored(members)


def test_a_second_member_joins_one_that_serves_and_nothing_is_given_twice() -> None:
    with cluster(1) as members:
        (a,) = members.nodes
        here = worker(a, "here", receive_maximum=2)
        fill(a, *NUMBERS[:20])
        held = here.messages()
        assert NUMBERS[:2] == [bytes(message.payload) for message in held]
        assert not claimed(members), "a node that is alone claims nothing"
        b = members.join()
        there = worker(b, "there", receive_maximum=2)
        members.wait(1.0)
        assert set(NUMBERS[:2]).isdisjoint(there.payloads())
        assert sorted(NUMBERS[:20]) == sorted(finish(members, [here, there]))
        assert [] == stored(members)


def test_a_member_claims_nothing_before_an_older_one_has_claimed_what_it_has() -> None:
    with cluster(1) as members:
        (a,) = members.nodes
        here = worker(a, "here", receive_maximum=2)
        fill(a, *NUMBERS[:20])
        assert NUMBERS[:2] == here.payloads()
        write, late = a.plugin_store.write, list[tuple[Batch, Commit[Written]]]()

        def put_aside(batch: Batch) -> Commit[Written]:
            commit: Commit[Written] = Commit()
            late.append((batch, commit))
            return commit

        a.plugin_store.write = put_aside  # type: ignore[method-assign]
        there = worker(members.join(), "there", receive_maximum=2)
        members.wait(10.0)
        assert late
        assert [] == there.payloads()
        a.plugin_store.write = write  # type: ignore[method-assign]
        with members.loop.running():
            for batch, commit in late:
                done = write(batch)
                done.then(lambda commit=commit, done=done: commit.settle(done.result))  # type: ignore[misc]
        members.wait(2.0)
        assert there.payloads()
        assert sorted(NUMBERS[:20]) == sorted(finish(members, [here, there]))


def test_a_member_that_is_alone_again_goes_on_without_claims() -> None:
    with cluster() as members:
        a, b = members.nodes
        fill(b, *NUMBERS[:10])
        there = worker(b, "there", receive_maximum=3)
        assert 3 == len(there.payloads())
        here = worker(a, "here", receive_maximum=3)
        members.wait(4 * BLOCKED)
        assert 3 == len(here.inflight) + len(here.messages())
        members.kill(b)
        got = finish(members, [here])
        assert sorted(NUMBERS[:10]) == sorted(got)
        fill(a, *NUMBERS[10:20])
        assert NUMBERS[10:20] == here.drain()
        assert not claimed(members)
        c = members.join()
        fill(c, *NUMBERS[20:30])
        assert NUMBERS[20:30] == here.drain()
        assert [] == stored(members)


def test_what_a_member_has_claimed_and_forgets_while_it_is_alone_goes_to_the_next_one() -> None:
    with cluster() as members:
        a, b = members.nodes
        here = worker(a, "here")
        fill(a, *NUMBERS[:5])
        first, *_ = here.messages()
        assert claimed(members)
        members.kill(b)
        here.ack(first)
        here.disconnect()
        there = worker(members.join(), "there")
        members.wait(0.25)
        assert NUMBERS[1:5] == sorted(there.drain())
        assert [] == stored(members)
        assert not claimed(members)


def test_what_is_before_a_late_claim_is_read_by_a_member_that_is_alone() -> None:
    payloads = [b"%d" % number for number in range(600)]
    with cluster() as members:
        a, b = members.nodes
        for number in range(10):
            worker(b, f"doomed{number}")
        fill(b, *payloads)
        members.wait(1.0)
        assert 400 < sum(claimed(members).values())
        here = a.client("here", receive_maximum=1)
        members.store.held_reads = True
        here.subscribe("$queue/q")
        assert {b.plugin_store.writer, a.plugin_store.writer} == set(claimed(members))
        members.kill(b)
        members.store.held_reads = False
        with members.loop.running():
            members.store.let_read()
        members.turn()
        assert Counter(payloads) == Counter(finish(members, [here]))
        assert [] == stored(members)


def test_a_member_that_dies_between_an_append_and_its_word_leaves_nothing_that_waits() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = worker(b, "there")
        members.link(a, b).held = True
        fill(a, b"x")
        assert [] == there.payloads()
        members.kill(a)
        assert [b"x"] == there.drain()


def test_what_nobody_was_told_of_is_found_within_a_second() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = worker(b, "there")
        members.link(a, b).held = True
        fill(a, b"x")
        assert [] == there.payloads()
        members.wait(1.25)
        assert [b"x"] == there.drain()


def test_a_member_that_has_told_that_it_is_hungry_says_so_once() -> None:
    with cluster() as members:
        a, b = members.nodes
        worker(b, "there")
        before = members.link(b, a).sent.count(HUNGRY)
        members.wait(10.0)
        assert before == members.link(b, a).sent.count(HUNGRY)


def test_a_plugin_that_is_unloaded_gives_back_what_it_has() -> None:
    with cluster() as members:
        a, b = members.nodes
        here = worker(a, "here")
        fill(a, *NUMBERS[:5])
        assert NUMBERS[:5] == here.payloads()
        a.begin(a.plugins.unload("queues"))
        members.wait(1.0)
        assert not claimed(members)
        assert sorted(NUMBERS[:5]) == sorted(finish(members, [worker(b, "there")]))


# -- the store


def test_a_claim_whose_outcome_is_unknown_is_found_out_about() -> None:
    for written in (True, False):
        with cluster() as members:
            a, b = members.nodes
            fill(b, *NUMBERS[:5])
            members.wait(1.0)
            there = a.client("there")
            members.store.held = True
            there.subscribe("$queue/q")
            assert members.store.waiting
            while members.store.waiting:
                with members.loop.running():
                    members.store.fail(StoreError("no answer"), written=written)
                members.turn()
            members.store.held = False
            members.wait(2.0)
            assert NUMBERS[:5] == finish(members, [there])
            assert [] == stored(members)


# -- bounds, kinds


@pytest.mark.parametrize("priorities", [1, 3])
def test_a_queue_is_full_at_all_members_at_once(priorities: int) -> None:
    with cluster(max_messages=3, priorities=priorities) as members:
        pubs = [node.client(f"pub{number}") for number, node in enumerate(members.nodes)]
        answers = [
            pubs[number % 2].publish("q/a", b"x", user_properties=(("priority", str(number % 3)),))
            for number in range(6)
        ]
        assert [0, 0, 0, QUOTA, QUOTA, QUOTA] == answers
        there = worker(members.nodes[1], "there")
        there.ack(there.messages()[0])
        members.wait(0.25)
        assert [0, QUOTA] == [pub.publish("q/a", b"y") for pub in pubs]


@pytest.mark.parametrize("priorities", [1, 2])
def test_a_queue_that_drops_its_oldest_leaves_consumers_of_all_members_theirs(priorities: int) -> None:
    with cluster(max_messages=3, overflow="drop_oldest", priorities=priorities) as members:
        a, b = members.nodes
        there = worker(b, "there", receive_maximum=1)
        fill(a, b"held")
        (held,) = there.messages()
        fill(a, *NUMBERS[:9])
        members.wait(0.5)
        assert len(stored(members)) <= 3
        there.ack(held)
        got = finish(members, [there])
        assert NUMBERS[8] in got
        assert [] == stored(members)


def test_a_newer_value_from_any_member_replaces_one_that_waits_at_another() -> None:
    with cluster(kind="last_value") as members:
        a, b = members.nodes
        there = worker(b, "there", receive_maximum=1)
        fill(a, b"1", topic="q/first")
        (first,) = there.messages()
        fill(a, b"old", topic="q/k")
        members.wait(0.25)
        fill(a, b"new", topic="q/k")
        fill(b, b"newest", topic="q/k")
        there.ack(first)
        assert [b"newest"] == finish(members, [there])
        assert [] == stored(members)


def test_the_highest_level_goes_first_wherever_it_was_published() -> None:
    with cluster(priorities=3) as members:
        a, b = members.nodes
        for level, payload in ((0, b"low"), (2, b"high"), (1, b"middle")):
            fill(a, payload, user_properties=(("priority", str(level)),))
        there = worker(b, "there")
        assert [b"high", b"middle", b"low"] == there.drain()


def test_what_is_too_old_is_removed_by_one_member_though_others_look() -> None:
    with cluster(retention=100.0) as members:
        a, b = members.nodes
        fill(a, *NUMBERS[:5])
        members.wait(90.0)
        fill(b, b"young")
        here = worker(a, "here", receive_maximum=1)
        (held,) = here.messages()
        members.wait(15.0)
        assert [0, 1] == [bool(plugin(node).context.counters["expired"]) for node in members.nodes] or not any(
            plugin(node).context.counters["expired"] for node in members.nodes
        )
        for node in (b, a):
            node.begin(plugin(node).sweep("", 1000))
            members.wait(0.25)
        here.ack(held)
        assert [b"young"] == finish(members, [here])
        assert [] == stored(members)
        assert not claimed(members)
        assert 4 == sum(plugin(node).context.counters["expired"] for node in members.nodes)


# -- declarations, operators


def test_a_queue_is_declared_changed_and_deleted_at_any_member() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = b.client("there")
        assert "there is no queue" in str(there.subscribe("$queue/new").properties.reason_string)
        a.run(queues(a).create("new", QueueOptions(topics=("new/#",))))
        fill(b, b"1", topic="new/a")
        assert [b"1"] == there.drain()
        for node in members.nodes:
            with pytest.raises(ConflictError, match="already"):
                node.run(queues(node).create("new", QueueOptions()))
        b.run(queues(b).change("new", QueueOptions(topics=("other/#",))))
        fill(a, b"2", topic="new/a")
        fill(a, b"3", topic="other/a")
        assert [b"3"] == there.drain()
        assert ["dead", "new", "q"] == [view.name for view in a.run(queues(a).list())]
        fill(a, b"4", topic="other/a")
        (held,) = there.messages()
        a.run(queues(a).delete("new"))
        assert ["dead", "q"] == [view.name for view in b.run(queues(b).list())]
        there.ack(held)
        b.run(queues(b).create("new", QueueOptions(topics=("new/#",))))
        assert [] == there.payloads(), "its messages are gone"
        fill(a, b"5", topic="new/a")
        assert [b"5"] == there.drain()
        c = members.join()
        assert ["dead", "new", "q"] == [view.name for view in c.run(queues(c).list())]


def test_every_member_shows_the_same() -> None:
    with cluster() as members:
        a, b = members.nodes
        here, there = worker(a, "here", receive_maximum=2), worker(b, "there", receive_maximum=2)
        fill(a, *NUMBERS[:4])
        here.messages()
        there.messages()
        members.wait(0.25)
        views = [node.run(queues(node).show("q")) for node in members.nodes]
        assert {view.messages for view in views} == {4}
        assert {view.consumers for view in views} == {2}
        assert 1 == len({view.inflight for view in views})
        names = [sorted((each.client, each.unacked, each.sent) for each in view.clients) for view in views]
        assert names[0] == names[1]
        assert ["here", "there"] == [name for name, _, _ in names[0]]
        b.cluster.mute.add(a.member)
        task = b.begin(queues(b).show("q"))
        members.wait(5.0)
        assert {"n1": "silent"} == task.result().unanswered
