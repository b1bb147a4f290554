"""Who gets which message of a queue, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from motorcade.plugins.queues.dispatcher import (
    BLOCKED,
    DISCONNECTED,
    FIRST_READ,
    LOW,
    MOST_NOTES,
    PATIENCE,
    READ,
    RESTARTED,
    TIMED_OUT,
)
from motorcade.plugins.queues.options import QueueOptions
from motorcade.plugins.queues.strategy import LeastInflight
from tests.unit.queues.desk import Desk


def test_what_is_stored_is_given_in_order() -> None:
    """However many there are, read a bounded number at a time."""
    desk = Desk()
    desk.append(1000)
    a = desk.join("a", room=32)
    desk.settle()
    while len(a.seen) < 1000:
        a.ack(*a.numbers)
    assert list(range(1, 1001)) == a.seen
    assert max(limit for _, _, limit in desk.asked) <= READ
    a.ack(*a.numbers)
    assert not desk.entries and not desk.dispatcher._levels[0].items and not desk.dispatcher._levels[0].leaving


def test_nothing_is_read_for_nobody() -> None:
    """Without consumers, or without room, the store is left alone."""
    desk = Desk()
    desk.append(10)
    assert [] == desk.asked
    a = desk.join("a", room=0)
    assert [] == desk.asked
    a.room = 2
    desk.dispatcher.has_room(a.consumer, desk.now)
    desk.settle()
    assert [1, 2] == a.numbers


def test_reading_ahead_is_bounded() -> None:
    """One who takes little makes nobody read much."""
    desk = Desk()
    desk.append(1000)
    a = desk.join("a", room=1)
    desk.settle()
    for number in range(1, 200):
        a.ack(number)
    assert len(desk.dispatcher._levels[0].ahead) <= LOW + READ
    assert FIRST_READ == desk.asked[0][2]


def test_what_is_appended_while_all_is_known_is_not_read() -> None:
    """Live messages go straight on."""
    desk = Desk()
    a = desk.join("a")
    desk.settle()
    asked = len(desk.asked)
    desk.append(3)
    desk.settle()
    assert [1, 2, 3] == a.numbers
    assert asked == len(desk.asked)


def test_what_is_appended_for_slow_consumers_is_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more is kept in memory for them, in number or in bytes, and nothing is lost."""
    for bound, value in (("MOST_WAITING", 10), ("READ_OCTETS", 20)):
        with monkeypatch.context() as patched:
            patched.setattr(f"motorcade.plugins.queues.dispatcher.{bound}", value)
            patched.setattr("motorcade.plugins.queues.dispatcher.LOW", 0)
            desk = Desk()
            a = desk.join("a", room=1)
            desk.settle()
            desk.append(50)
            desk.settle()
            assert 8 <= len(desk.dispatcher._levels[0].ahead) <= 20
            while a.numbers:
                a.ack(*a.numbers)
            assert list(range(1, 51)) == a.seen
            assert 0 == desk.dispatcher._levels[0].octets


def test_round_robin_is_fair() -> None:
    """All who have room get the same number, in turn; who has none is passed over."""
    desk = Desk()
    a, b, c = (desk.join(name) for name in "abc")
    d = desk.join("d", room=1)
    desk.append(31)
    desk.settle()
    assert [10, 10, 10, 1] == [len(client.seen) for client in (a, b, c, d)]
    assert [1, 5, 8] == a.seen[:3]


def test_least_inflight_looks_at_what_is_unacknowledged() -> None:
    desk = Desk(strategy="least_inflight")
    a, b = desk.join("a"), desk.join("b")
    desk.append(6)
    desk.settle()
    assert [3, 3] == [len(a.seen), len(b.seen)]
    b.ack(*b.numbers)
    desk.append(3)
    desk.settle()
    assert [3, 6] == [len(a.seen), len(b.seen)]
    desk.append(2)
    desk.settle()
    assert [4, 7] == [len(a.seen), len(b.seen)]


def test_least_inflight_takes_turns_among_equals() -> None:
    """Also if each acknowledges before the next message comes."""
    desk = Desk(strategy="least_inflight")
    clients = [desk.join(name) for name in "abc"]
    for _ in range(12):
        desk.append(1)
        desk.settle()
        for client in clients:
            client.ack(*client.numbers)
    assert [4, 4, 4] == [len(client.seen) for client in clients]

    @dataclass(eq=False)
    class Worker:
        room: int = 5
        held: int = 0

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


# -- again


def test_a_refused_message_goes_to_another_at_once() -> None:
    desk = Desk(redispatch_delay=60)
    a, b = desk.join("a"), desk.join("b")
    desk.append(2)
    desk.settle()
    assert ([1], [2]) == (a.numbers, b.numbers)
    a.nack(1)
    assert ([], [2, 1]) == (a.numbers, b.numbers)


def test_a_refused_message_comes_again_after_a_while_if_there_is_nobody_else() -> None:
    desk = Desk(redispatch_delay=0.5)
    a = desk.join("a")
    desk.append(2)
    desk.settle()
    a.nack(1)
    assert [2] == a.numbers
    desk.wait(0.4)
    assert [2] == a.numbers
    desk.wait(0.2)
    assert [2, 1] == a.numbers


def test_a_message_that_all_have_refused_waits() -> None:
    """It does not go round and round between them."""
    desk = Desk(redispatch_delay=0.5)
    a, b = desk.join("a"), desk.join("b")
    desk.append(1)
    desk.settle()
    a.nack(1)
    b.nack(1)
    assert [] == a.numbers + b.numbers
    desk.wait(0.6)
    assert [1] == a.numbers + b.numbers


def test_a_refused_message_does_not_wait_long_for_one_without_room() -> None:
    """Another would be better, but not if it never takes anything."""
    desk = Desk()
    a, b = desk.join("a"), desk.join("b", room=0)
    desk.append(2)
    desk.settle()
    a.nack(1)
    assert ([2], []) == (a.numbers, b.numbers)
    desk.append(1)
    desk.settle()
    assert [2, 3] == a.numbers, "nobody is held up by it"
    desk.wait(PATIENCE)
    assert [2, 3, 1] == a.numbers


def test_who_leaves_leaves_everything_in_its_old_order() -> None:
    """Before what is behind it; what was never sent is no attempt."""
    desk = Desk()
    desk.append(10)
    a = desk.join("a", room=6, blocked=True)
    desk.settle()
    a.send(2)
    a.leave()
    b = desk.join("b", room=4)
    desk.settle()
    assert [1, 2, 3, 4] == b.numbers
    assert [2, 2, 1, 1] == [item.attempts for item in b.inflight]


def test_without_consumers_nothing_stays_in_memory() -> None:
    """But how often a message was sent is known, and what was done is not done again."""
    desk = Desk()
    desk.confirm = False
    desk.append(5)
    a = desk.join("a")
    desk.settle()
    a.ack(2, 4)
    a.leave()
    level = desk.dispatcher._levels[0]
    assert not level.items and not level.ahead and not level.back
    b = desk.join("b")
    desk.settle()
    assert [1, 3, 5] == b.numbers, "the store has not removed 2 and 4 yet"
    assert [2, 2, 2] == [item.attempts for item in b.inflight]
    assert ["disconnected"] == [attempt.reason for attempt in b.inflight[0].history or ()]


def test_what_is_remembered_of_messages_is_bounded() -> None:
    """The store has the number of attempts; only their history is forgotten."""
    desk = Desk(max_attempts=0)
    desk.append(MOST_NOTES + 10)
    a = desk.join("a", room=MOST_NOTES + 10)
    desk.settle()
    a.leave()
    assert MOST_NOTES == len(desk.dispatcher._levels[0].notes)
    assert 10 == desk.counters["notes_forgotten"]
    b = desk.join("b", room=1)
    desk.settle()
    assert [2] == [item.attempts for item in b.inflight]


def test_a_late_acknowledgement_of_one_who_has_unsubscribed_counts() -> None:
    """Its client was the last one, so that nothing is in memory any more."""
    desk = Desk()
    desk.append(2)
    a = desk.join("a")
    desk.settle()
    first, second = a.inflight
    a.leave()
    desk.dispatcher.acknowledged(a.consumer, [first], desk.now)
    b = desk.join("b")
    desk.settle()
    assert [2] == b.numbers
    desk.dispatcher.acknowledged(a.consumer, [second], desk.now)
    b.ack(2)
    assert not desk.entries


# -- time


def test_what_is_not_acknowledged_in_time_goes_to_another() -> None:
    desk = Desk(ack_timeout=10)
    desk.join("a")
    desk.append(1)
    desk.settle()
    b = desk.join("b")
    desk.wait(9)
    assert [] == b.numbers
    desk.wait(2)
    assert [1] == b.numbers
    assert 1 == desk.counters["timed_out"]


def test_the_first_acknowledgement_ends_it() -> None:
    """Be it the late one; the other one is heard and does nothing."""
    for order in ("ab", "ba"):
        desk = Desk(ack_timeout=10)
        clients = {"a": desk.join("a")}
        desk.append(1)
        desk.settle()
        clients["b"] = desk.join("b")
        desk.wait(11)
        for name in order:
            clients[name].ack(1)
        assert 1 == desk.counters["acknowledged"]
        assert not desk.entries
        desk.wait(100)
        assert desk.alarm_at is None


def test_a_late_acknowledgement_withdraws_what_was_not_sent_yet() -> None:
    desk = Desk(ack_timeout=10)
    a = desk.join("a")
    desk.append(1)
    desk.settle()
    b = desk.join("b", blocked=True)
    desk.wait(11)
    assert 1 == len(b.given)
    a.ack(1)
    b.send()
    assert [] == b.seen


def test_one_that_is_alone_keeps_what_is_late() -> None:
    """It has it already; whoever comes next gets it."""
    desk = Desk(ack_timeout=10)
    a = desk.join("a")
    desk.append(1)
    desk.settle()
    desk.wait(100)
    assert [1] == a.seen
    b = desk.join("b")
    desk.settle()
    assert [1] == b.seen


def test_no_alarm_is_set_for_a_queue_that_is_idle() -> None:
    """Nor for one whose consumers are up to date."""
    desk = Desk(ack_timeout=10)
    a = desk.join("a")
    desk.join("b")
    desk.append(5)
    desk.settle()
    while a.numbers:
        a.ack(*a.numbers)
    for client in desk.clients:
        client.ack(*client.numbers)
    desk.wait(11)
    assert desk.alarm_at is None


def test_what_a_full_client_does_not_take_goes_to_one_that_waits() -> None:
    """In its order, without an attempt, and only after a moment: it may be sent right now."""
    desk = Desk(ack_timeout=0)
    a = desk.join("a", room=10, blocked=True)
    desk.append(6)
    desk.settle()
    a.send(1)
    b = desk.join("b")
    assert [] == b.numbers
    desk.wait(BLOCKED * 1.1)
    assert [2, 3, 4, 5, 6] == b.numbers
    assert {1} == {item.attempts for item in b.inflight}
    a.send()
    assert [1] == a.seen
    desk.wait(100)
    assert desk.alarm_at is None


def test_two_full_clients_do_not_pass_messages_to_and_fro() -> None:
    desk = Desk(ack_timeout=0)
    a, b = desk.join("a", blocked=True), desk.join("b", blocked=True)
    desk.append(4)
    desk.settle()
    given = [list(a.given), list(b.given)]
    desk.wait(100)
    assert given == [a.given, b.given]
    assert desk.alarm_at is None


# -- the end of a message


def test_after_too_many_attempts_a_message_is_buried() -> None:
    for end, reason in (("nack", "refused"), ("timeout", TIMED_OUT), ("leave", DISCONNECTED)):
        desk = Desk(max_attempts=3, redispatch_delay=0, ack_timeout=10)
        desk.append(1)
        for number in range(3):
            client = desk.join(f"c{number}")
            desk.settle()
            assert [1] == client.numbers
            if end == "nack":
                client.nack(1)
            elif end == "timeout":
                desk.wait(11)
            if end != "timeout" or number < 2:
                client.leave()
        assert [(1, 3, reason)] == desk.buried
        assert ["c0", "c1", "c2"] == [attempt.consumer for attempt in desk.graves[0].history or ()]
        assert not desk.entries


def test_attempts_are_counted_across_restarts() -> None:
    """A message whose last attempt the node did not survive is not sent once more."""
    desk = Desk(max_attempts=3)
    desk.append(2)
    desk.entries[0, 1].mark = 3
    desk.entries[0, 2].mark = 2
    a = desk.join("a")
    desk.settle()
    assert [2] == a.numbers
    assert [(1, 3, RESTARTED)] == desk.buried


def test_what_has_expired_is_not_given() -> None:
    """Nor sent, if it was given before."""
    desk = Desk(retention=100)
    desk.append(1)
    desk.append(1, expires_at=desk.now + 10)
    desk.append(1)
    desk.now += 20
    a = desk.join("a", blocked=True)
    desk.settle()
    assert [1, 3] == [item.position for item in a.given]
    desk.now += 100
    a.send()
    assert [] == a.seen
    desk.settle()
    assert 3 == desk.counters["expired"]
    assert not desk.entries


def test_a_replaced_message_is_not_sent_and_its_acknowledgement_does_nothing() -> None:
    desk = Desk()
    a = desk.join("a", blocked=True)
    desk.append(3)
    desk.settle()
    a.send(1)
    for position in (1, 2):
        del desk.entries[0, position]
        desk.dispatcher.gone(0, position)
    a.send()
    assert [1, 3] == a.seen
    a.ack(1)
    assert [3] == [entry.position for entry in desk.entries.values()]


# -- priorities


def test_higher_levels_go_first() -> None:
    """Whether they were there before or come later."""
    desk = Desk(priorities=3)
    desk.append(3)
    desk.append(3, level=2)
    desk.append(3, level=1)
    a = desk.join("a", room=4)
    desk.settle()
    assert [2001, 2002, 2003, 1001] == a.numbers
    desk.append(1, level=2)
    a.ack(*a.numbers)
    assert [2004, 1002, 1003, 1] == a.numbers


# -- changes


def test_options_change_while_messages_are_under_way() -> None:
    desk = Desk(ack_timeout=0, max_attempts=0)
    a = desk.join("a")
    desk.append(3)
    desk.settle()
    desk.dispatcher.change(QueueOptions(strategy="least_inflight", priorities=2, max_attempts=1), desk.now)
    desk.append(1, level=1)
    desk.settle()
    assert [1, 2, 3, 1001] == a.numbers
    a.nack(1)
    assert [(1, 1, "refused")] == desk.buried


def test_a_queue_that_is_gone_gives_nothing_and_hears_nothing() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b", blocked=True)
    desk.append(4)
    desk.settle()
    desk.dispatcher.close()
    a.ack(1)
    a.nack(3)
    b.send()
    assert [] == b.seen
    assert [] == desk.removals
    assert desk.alarm_at is None
