"""Who gets which message of a queue, and what becomes of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from motorcade.plugins.logs.queues.dispatcher import (
    BLOCKED,
    DISCONNECTED,
    FIRST_READ,
    LOW,
    MAX_REMEMBERED,
    PATIENCE,
    READ,
    RESTARTED,
    TIMED_OUT,
)
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.strategy import LeastInflight, Random, RoundRobin
from tests.unit.queues.rig import Rig


@dataclass(eq=False)
class Worker:
    """A consumer, for a strategy alone."""

    room: int = 5
    held: int = 0


def test_what_is_stored_is_given_in_order() -> None:
    """However many there are, read a bounded number at a time."""
    rig = Rig()
    rig.append(1000)
    a = rig.join("a", room=32)
    rig.settle()
    while len(a.seen) < 1000:
        a.ack(*a.numbers)
    assert list(range(1, 1001)) == a.seen
    assert max(limit for _, _, limit in rig.asked) <= READ
    a.ack(*a.numbers)
    assert not rig.entries and not rig.dispatcher.levels[0].entries and not rig.dispatcher.levels[0].leaving


def test_nothing_is_read_for_nobody() -> None:
    """Without consumers, or without room, the store is left alone."""
    rig = Rig()
    rig.append(10)
    assert [] == rig.asked
    a = rig.join("a", room=0)
    assert [] == rig.asked
    a.room = 2
    rig.dispatcher.has_room(a.consumer, rig.now)
    rig.settle()
    assert [1, 2] == a.numbers


def test_reading_ahead_is_bounded() -> None:
    """One who takes little makes nobody read much."""
    rig = Rig()
    rig.append(1000)
    a = rig.join("a", room=1)
    rig.settle()
    for number in range(1, 200):
        a.ack(number)
    assert len(rig.dispatcher.levels[0].ahead) <= LOW + READ
    assert FIRST_READ == rig.asked[0][2]


def test_what_is_appended_while_all_is_known_is_not_read() -> None:
    """Live messages go straight on."""
    rig = Rig()
    a = rig.join("a")
    rig.settle()
    asked = len(rig.asked)
    rig.append(3)
    rig.settle()
    assert [1, 2, 3] == a.numbers
    assert asked == len(rig.asked)


def test_what_is_appended_for_slow_consumers_is_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more is kept in memory for them, in number or in bytes, and nothing is lost."""
    for bound, value in (("MAX_WAITING", 10), ("READ_BYTES", 20)):
        with monkeypatch.context() as patched:
            patched.setattr(f"motorcade.plugins.logs.queues.dispatcher.{bound}", value)
            patched.setattr("motorcade.plugins.logs.queues.dispatcher.LOW", 0)
            rig = Rig()
            a = rig.join("a", room=1)
            rig.settle()
            rig.append(50)
            rig.settle()
            assert 8 <= len(rig.dispatcher.levels[0].ahead) <= 20
            while a.numbers:
                a.ack(*a.numbers)
            assert list(range(1, 51)) == a.seen
            assert 0 == rig.dispatcher.levels[0].size


def test_round_robin_is_fair() -> None:
    """All who have room get the same number, in turn; who has none is passed over."""
    rig = Rig()
    a, b, c = (rig.join(name) for name in "abc")
    d = rig.join("d", room=1)
    rig.append(31)
    rig.settle()
    assert [10, 10, 10, 1] == [len(client.seen) for client in (a, b, c, d)]
    assert [1, 5, 8] == a.seen[:3]


def test_least_inflight_looks_at_what_is_unacknowledged() -> None:
    rig = Rig(strategy="least_inflight")
    a, b = rig.join("a"), rig.join("b")
    rig.append(6)
    rig.settle()
    assert [3, 3] == [len(a.seen), len(b.seen)]
    b.ack(*b.numbers)
    rig.append(3)
    rig.settle()
    assert [3, 6] == [len(a.seen), len(b.seen)]
    rig.append(2)
    rig.settle()
    assert [4, 7] == [len(a.seen), len(b.seen)]


def test_least_inflight_takes_turns_among_equals() -> None:
    """Also if each acknowledges before the next message comes."""
    rig = Rig(strategy="least_inflight")
    clients = [rig.join(name) for name in "abc"]
    for _ in range(12):
        rig.append(1)
        rig.settle()
        for client in clients:
            client.ack(*client.numbers)
    assert [4, 4, 4] == [len(client.seen) for client in clients]

    strategy: LeastInflight[Worker] = LeastInflight()
    workers = [Worker(), Worker(), Worker()]
    for worker in workers:
        strategy.offer(worker)
    chosen: list[int] = []
    for _ in range(12):
        worker = strategy.pick() or Worker()
        chosen.append(workers.index(worker))
        worker.held += 1
        strategy.given(worker)
        worker.held -= 1
        strategy.offer(worker)
        assert workers[chosen[-1]] is strategy.those_with_room()[-1]
    assert [4, 4, 4] == [chosen.count(number) for number in range(3)]


def test_random_gives_each_the_same_chance() -> None:
    """Also if some are busy for a while: what happened before makes no difference."""
    strategy: Random[Worker] = Random(random.Random(7))
    busy = random.Random(8)
    workers = [Worker() for _ in range(4)]
    chosen: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    last = 0
    for _ in range(8000):
        for worker in workers:
            worker.room = 5
            strategy.offer(worker)
        busy.choice(workers).room = 0
        picked = strategy.pick()
        assert picked is not None
        strategy.given(picked)
        index = workers.index(picked)
        chosen[index] += 1
        pairs[last, index] += 1
        last = index
    assert all(1850 < chosen[number] < 2150 for number in range(4)), chosen
    assert all(400 < pairs[a, b] < 600 for a in range(4) for b in range(4)), pairs
    for worker in workers:
        worker.room = 5
        strategy.offer(worker)
    assert 24 == len({tuple(strategy.those_with_room()) for _ in range(500)}), "every order comes"


@pytest.mark.parametrize(
    "strategy",
    [RoundRobin(), LeastInflight(), Random(random.Random(1))],
    ids=["round_robin", "least_inflight", "random"],
)
def test_those_with_no_room_are_left_out_until_they_are_offered(strategy: RoundRobin[Worker]) -> None:
    a, b = Worker(room=0), Worker()
    strategy.offer(a)
    strategy.offer(b)
    assert {b} == {strategy.pick() for _ in range(20)}
    a.room, b.room = 5, 0
    strategy.offer(a)
    assert {a} == {strategy.pick() for _ in range(20)}
    assert strategy.is_alone and [a] == strategy.those_with_room()
    strategy.discard(a)
    assert strategy.pick() is None


def test_least_inflight_ranks_by_what_is_held_now() -> None:
    """Though it was not told: another queue of the same client may have changed it."""
    strategy: LeastInflight[Worker] = LeastInflight()
    a, b = Worker(held=1), Worker(held=2)
    strategy.offer(a)
    strategy.offer(b)
    a.held = 3
    assert [b, a] == strategy.those_with_room()
    b.held = 4
    assert a is strategy.pick()


def test_what_a_deleted_queue_gave_leaves_the_counts_alone() -> None:
    """Its consumer is one of the next queue of that name by then."""
    rig = Rig()
    a = rig.join("a")
    rig.append(2)
    rig.settle()
    old = list(a.inflight)
    rig.dispatcher.close()
    for entry in old:
        rig.dispatcher.not_taken(a.consumer, entry, "refused", rig.now)
    assert 0 == a.consumer.sent and a.consumer.is_hungry


# -- again


def test_a_refused_message_goes_to_another_at_once() -> None:
    rig = Rig(redispatch_delay=60)
    a, b = rig.join("a"), rig.join("b")
    rig.append(2)
    rig.settle()
    assert ([1], [2]) == (a.numbers, b.numbers)
    a.nack(1)
    assert ([], [2, 1]) == (a.numbers, b.numbers)


def test_a_refused_message_comes_again_after_a_while_if_there_is_nobody_else() -> None:
    rig = Rig(redispatch_delay=0.5)
    a = rig.join("a")
    rig.append(2)
    rig.settle()
    a.nack(1)
    assert [2] == a.numbers
    rig.wait(0.4)
    assert [2] == a.numbers
    rig.wait(0.2)
    assert [2, 1] == a.numbers


def test_a_message_that_all_have_refused_waits() -> None:
    """It does not go round and round between them."""
    rig = Rig(redispatch_delay=0.5)
    a, b = rig.join("a"), rig.join("b")
    rig.append(1)
    rig.settle()
    a.nack(1)
    b.nack(1)
    assert [] == a.numbers + b.numbers
    rig.wait(0.6)
    assert [1] == a.numbers + b.numbers


def test_a_refused_message_does_not_wait_long_for_one_without_room() -> None:
    """Another would be better, but not if it never takes anything."""
    rig = Rig()
    a, b = rig.join("a"), rig.join("b", room=0)
    rig.append(2)
    rig.settle()
    a.nack(1)
    assert ([2], []) == (a.numbers, b.numbers)
    rig.append(1)
    rig.settle()
    assert [2, 3] == a.numbers, "nobody is held up by it"
    rig.wait(PATIENCE)
    assert [2, 3, 1] == a.numbers


def test_who_leaves_leaves_everything_in_its_old_order() -> None:
    """Before what is behind it; what was never sent is no attempt."""
    rig = Rig()
    rig.append(10)
    a = rig.join("a", room=6, blocked=True)
    rig.settle()
    a.send(2)
    a.leave()
    b = rig.join("b", room=4)
    rig.settle()
    assert [1, 2, 3, 4] == b.numbers
    assert [2, 2, 1, 1] == [item.attempts for item in b.inflight]


def test_without_consumers_nothing_stays_in_memory() -> None:
    """But how often a message was sent is known, and what was done is not done again."""
    rig = Rig()
    rig.confirm = False
    rig.append(5)
    a = rig.join("a")
    rig.settle()
    a.ack(2, 4)
    a.leave()
    level = rig.dispatcher.levels[0]
    assert not level.entries and not level.ahead and not level.returned
    b = rig.join("b")
    rig.settle()
    assert [1, 3, 5] == b.numbers, "the store has not removed 2 and 4 yet"
    assert [2, 2, 2] == [item.attempts for item in b.inflight]
    assert ["disconnected"] == [attempt.reason for attempt in b.inflight[0].history or ()]


def test_attempts_count_though_the_store_does_not_know_of_them() -> None:
    """While the node runs it remembers how often a message was sent, also when it is not in memory."""
    rig = Rig(max_attempts=2)
    rig.append()
    rig.join("a")
    rig.settle()
    rig.clients[0].leave()
    rig.entries[0, 1].mark = 0  # it could not be stored
    rig.join("b")
    rig.settle()
    rig.clients[0].leave()
    assert [(1, 2, DISCONNECTED)] == rig.dead


def test_what_is_remembered_of_messages_is_bounded() -> None:
    """The store has the number of attempts; only their history is forgotten."""
    rig = Rig(max_attempts=0)
    rig.append(MAX_REMEMBERED + 10)
    a = rig.join("a", room=MAX_REMEMBERED + 10)
    rig.settle()
    a.leave()
    assert MAX_REMEMBERED == len(rig.dispatcher.levels[0].remembered)
    assert 10 == rig.counters["notes_forgotten"]
    b = rig.join("b", room=1)
    rig.settle()
    assert [2] == [item.attempts for item in b.inflight]


# -- time


def test_what_is_not_acknowledged_in_time_goes_to_another() -> None:
    rig = Rig(ack_timeout=10)
    rig.join("a")
    rig.append(1)
    rig.settle()
    b = rig.join("b")
    rig.wait(9)
    assert [] == b.numbers
    rig.wait(2)
    assert [1] == b.numbers
    assert 1 == rig.counters["timed_out"]


def test_the_first_acknowledgement_ends_it() -> None:
    """Be it the late one; the other one is heard and does nothing."""
    for order in ("ab", "ba"):
        rig = Rig(ack_timeout=10)
        clients = {"a": rig.join("a")}
        rig.append(1)
        rig.settle()
        clients["b"] = rig.join("b")
        rig.wait(11)
        for name in order:
            clients[name].ack(1)
        assert 1 == rig.counters["acknowledged"]
        assert not rig.entries
        rig.wait(100)
        assert rig.timer_at is None


def test_one_that_is_alone_keeps_what_is_late() -> None:
    """It has it already; whoever comes next gets it."""
    rig = Rig(ack_timeout=10)
    a = rig.join("a")
    rig.append(1)
    rig.settle()
    rig.wait(100)
    assert [1] == a.seen
    b = rig.join("b")
    rig.settle()
    assert [1] == b.seen


def test_no_timer_is_set_for_a_queue_that_is_idle() -> None:
    """Nor for one whose consumers are up to date."""
    rig = Rig(ack_timeout=10)
    a = rig.join("a")
    rig.join("b")
    rig.append(5)
    rig.settle()
    while a.numbers:
        a.ack(*a.numbers)
    for client in rig.clients:
        client.ack(*client.numbers)
    rig.wait(11)
    assert rig.timer_at is None


def test_what_a_full_client_does_not_take_goes_to_one_that_waits() -> None:
    """In its order, without an attempt, and only after a moment: it may be sent right now."""
    rig = Rig(ack_timeout=0)
    a = rig.join("a", room=10, blocked=True)
    rig.append(6)
    rig.settle()
    a.send(1)
    b = rig.join("b")
    assert [] == b.numbers
    rig.wait(BLOCKED * 1.1)
    assert [2, 3, 4, 5, 6] == b.numbers
    assert {1} == {item.attempts for item in b.inflight}
    a.send()
    assert [1] == a.seen
    rig.wait(100)
    assert rig.timer_at is None


def test_two_full_clients_do_not_pass_messages_to_and_fro() -> None:
    rig = Rig(ack_timeout=0)
    a, b = rig.join("a", blocked=True), rig.join("b", blocked=True)
    rig.append(4)
    rig.settle()
    given = [list(a.given), list(b.given)]
    rig.wait(100)
    assert given == [a.given, b.given]
    assert rig.timer_at is None


# -- the end of a message


def test_after_too_many_attempts_a_message_is_dead_lettered() -> None:
    for end, reason in (("nack", "refused"), ("timeout", TIMED_OUT), ("leave", DISCONNECTED)):
        rig = Rig(max_attempts=3, redispatch_delay=0, ack_timeout=10)
        rig.append(1)
        for number in range(3):
            client = rig.join(f"c{number}")
            rig.settle()
            assert [1] == client.numbers
            if end == "nack":
                client.nack(1)
            elif end == "timeout":
                rig.wait(11)
            if end != "timeout" or number < 2:
                client.leave()
        assert [(1, 3, reason)] == rig.dead
        assert ["c0", "c1", "c2"] == [attempt.consumer for attempt in rig.dead_entries[0].history or ()]
        assert not rig.entries


def test_attempts_are_counted_across_restarts() -> None:
    """A message whose last attempt the node did not survive is not sent once more."""
    rig = Rig(max_attempts=3)
    rig.append(2)
    rig.entries[0, 1].mark = 3
    rig.entries[0, 2].mark = 2
    a = rig.join("a")
    rig.settle()
    assert [2] == a.numbers
    assert [(1, 3, RESTARTED)] == rig.dead


def test_what_has_expired_is_not_given() -> None:
    """Nor sent, if it was given before."""
    rig = Rig(retention=100)
    rig.append(1)
    rig.append(1, expires_at=rig.now + 10)
    rig.append(1)
    rig.now += 20
    a = rig.join("a", blocked=True)
    rig.settle()
    assert [1, 3] == [item.position for item in a.given]
    rig.now += 100
    a.send()
    assert [] == a.seen
    rig.settle()
    assert 3 == rig.counters["expired"]
    assert not rig.entries


# -- priorities


def test_higherlevels_go_first() -> None:
    """Whether they were there before or come later."""
    rig = Rig(priorities=3)
    rig.append(3)
    rig.append(3, level=2)
    rig.append(3, level=1)
    a = rig.join("a", room=4)
    rig.settle()
    assert [2001, 2002, 2003, 1001] == a.numbers
    rig.append(1, level=2)
    a.ack(*a.numbers)
    assert [2004, 1002, 1003, 1] == a.numbers


# -- changes


def test_options_change_while_messages_are_under_way() -> None:
    rig = Rig(ack_timeout=0, max_attempts=0)
    a = rig.join("a")
    rig.append(3)
    rig.settle()
    rig.dispatcher.change(QueueOptions(strategy="least_inflight", priorities=2, max_attempts=1), rig.now)
    rig.append(1, level=1)
    rig.settle()
    assert [1, 2, 3, 1001] == a.numbers
    a.nack(1)
    assert [(1, 1, "refused")] == rig.dead


def test_a_queue_that_is_gone_gives_nothing_and_hears_nothing() -> None:
    rig = Rig()
    a, b = rig.join("a"), rig.join("b", blocked=True)
    rig.append(4)
    rig.settle()
    rig.dispatcher.close()
    a.ack(1)
    a.nack(3)
    b.send()
    assert [] == b.seen
    assert [] == rig.removals
    assert rig.timer_at is None
