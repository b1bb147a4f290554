"""The judge is judged: histories with one fault each, and the verdict each must get."""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos.judge import (
    Debts,
    Delivery,
    History,
    Probe,
    Publication,
    Retained,
    Verdict,
    Will,
    Window,
    judge,
    matches,
    unpublished_wills,
)
from tests.chaos.messages import DAMAGED, make_payload, read_payload


def published(
    history: History, number: int, qos: int, *, sent: tuple[float, ...] = (), acknowledged: bool = True
) -> str:
    """One message of publisher `p`, sent at its number and acknowledged right after."""
    end = float(number) + 0.5 if acknowledged else float("inf")
    name = f"p:{number}"
    times = list(sent or (float(number),))
    history.publications[name] = Publication(name, "p", f"t/q{qos}", number, qos, times, end, end)
    return name


def delivered(
    history: History,
    name: str,
    *,
    to: str = "r",
    qos: int = 2,
    dup: bool = False,
    connection: int = 1,
    member: str = "r",
) -> None:
    into = history.receivers[to].deliveries
    into.append(Delivery(name, history.publications[name].topic, qos, dup, connection, 100.0 + len(into), member))


def sound(shared: bool = False) -> History:
    """Five messages at QoS 2 and five at QoS 1, all of them acknowledged and delivered once and in order."""
    history = History(clock=lambda: 0.0)
    history.receiver("r", shared=shared).windows.append(Window("t/#", 2, asked=0.0, granted=0.1))
    for number in range(1, 11):
        qos = 2 if number <= 5 else 1
        delivered(history, published(history, number, qos), qos=qos)
    return history


def swap(history: History) -> None:
    deliveries = history.receivers["r"].deliveries
    deliveries[1], deliveries[3] = deliveries[3], deliveries[1]


def lose(history: History) -> None:
    del history.receivers["r"].deliveries[2]


def lose_last(history: History) -> None:
    del history.receivers["r"].deliveries[-1]


def twice_at_qos_2(history: History) -> None:
    delivered(history, "p:3", connection=2, dup=True)


def twice_on_one_connection(history: History) -> None:
    delivered(history, "p:7", qos=1, dup=True)


def never_answered(history: History) -> None:
    published(history, 11, 2, acknowledged=False)


def received_but_not_completed(history: History) -> None:
    """PUBREC is a promise too: what has it and never arrives is lost, and its flow is open."""
    publication = history.publications[published(history, 11, 2)]
    publication.completed = float("inf")


def lower_qos(history: History) -> None:
    history.receivers["r"].deliveries[0].qos = 1


def damage(history: History) -> None:
    history.receivers["r"].deliveries[0].name = DAMAGED


def after_unsuback(history: History) -> None:
    window = history.receivers["r"].windows[0]
    window.leaving, window.left = 9.6, 9.7


def retained(value: bytes, sent: float, acknowledged: float) -> Retained:
    return Retained(value, Publication("", "p", "k", 1, 1, [sent], acknowledged, acknowledged))


def stale_retained(history: History) -> None:
    history.retained["k"] = [retained(b"1", 1.0, 1.5), retained(b"2", 2.0, 2.5)]
    history.probes.append(Probe(3.0, 3.5, {"k": b"1"}))


def missing_retained(history: History) -> None:
    history.retained["k"] = [retained(b"1", 1.0, 1.5)]
    history.probes.append(Probe(3.0, 3.5, {}))


def risen_retained(history: History) -> None:
    """A value that was removed, and the removal acknowledged, is there again."""
    history.retained["k"] = [retained(b"1", 1.0, 1.5), retained(b"", 2.0, 2.5)]
    history.probes.append(Probe(3.0, 3.5, {"k": b"1"}))


def will_missing(history: History) -> None:
    history.wills.append(Will("w", due=True, deaths="cut"))


def will_unwanted(history: History) -> None:
    history.wills.append(Will("w", due=False, deaths="back"))
    history.willed["w"] = 1


def forgotten(history: History) -> None:
    history.odd("session forgotten", "r, connection 2")


FAULTS: dict[Callable[[History], None], set[str]] = {
    swap: {"order"},
    lose: {"lost"},
    lose_last: {"lost"},
    twice_at_qos_2: {"QoS 2 twice"},
    twice_on_one_connection: {"repeated on one connection"},
    never_answered: {"unanswered"},
    received_but_not_completed: {"unanswered", "lost"},
    lower_qos: {"wrong QoS"},
    damage: {"invented", "lost"},
    after_unsuback: {"unwanted"},
    stale_retained: {"retained"},
    missing_retained: {"retained"},
    risen_retained: {"retained"},
    will_missing: {"will missing"},
    will_unwanted: {"will unwanted"},
    forgotten: {"session forgotten"},
}


def test_each_fault_is_found_and_nothing_else() -> None:
    for fault, kinds in FAULTS.items():
        history = sound()
        fault(history)
        verdict = judge(history)
        assert kinds == verdict.by_kind.keys(), fault.__name__
        assert verdict.told() and not verdict.passed, fault.__name__


def test_a_sound_history_passes() -> None:
    verdict = judge(sound())
    assert {} == verdict.by_kind
    assert verdict.passed
    assert (5, 5, 5, 0, 0) == figures(verdict, 1)
    assert (5, 5, 5, 0, 0) == figures(verdict, 2)


def figures(verdict: Verdict, qos: int) -> tuple[int, ...]:
    tally = verdict.by_qos[f"QoS {qos}"]
    return tally.acknowledged, tally.due, tally.delivered, tally.duplicated, tally.lost


def test_a_loss_is_counted_where_it_happened() -> None:
    history = sound()
    lose(history)
    verdict = judge(history)
    assert (5, 5, 4, 0, 1) == figures(verdict, 2)
    assert (5, 5, 5, 0, 0) == figures(verdict, 1)
    assert 1 == verdict.by_receiver["r"].lost


def test_debts_are_what_is_acknowledged_due_and_not_there() -> None:
    history = sound()
    debts = Debts(history)
    assert {} == debts.owed()
    name = published(history, 11, 2, acknowledged=False)
    assert {} == debts.owed()
    history.publications[name].acknowledged = 11.5
    assert {"r": [name]} == names(debts)
    history.publications[name].completed = 11.6
    assert {"r": [name]} == names(debts)
    delivered(history, name)
    assert {} == debts.owed()


def names(debts: Debts) -> dict[str, list[str]]:
    return {receiver: [publication.name for publication in owed] for receiver, owed in debts.owed().items()}


def test_qos_1_may_come_again_on_another_connection() -> None:
    """With the DUP flag, or without it after the publisher had to repeat it; the rest is counted apart."""
    history = sound()
    history.publications["p:7"].sent.append(7.2)
    delivered(history, "p:6", qos=1, dup=True, connection=2)
    delivered(history, "p:7", qos=1, dup=False, connection=2)
    delivered(history, "p:8", qos=1, dup=False, connection=2)
    verdict = judge(history)
    assert verdict.passed
    tally = verdict.by_qos["QoS 1"]
    assert (1, 1, 1, 3) == (tally.marked, tally.repeated, tally.unmarked, tally.duplicated)


def test_a_receiver_at_qos_1_may_get_a_qos_2_message_again_and_it_is_counted_apart() -> None:
    history = sound()
    history.receivers["r"].windows[0].qos = 1
    for delivery in history.receivers["r"].deliveries:
        delivery.qos = 1
    delivered(history, "p:3", qos=1, dup=True, connection=2)
    verdict = judge(history)
    assert verdict.passed
    assert (5, 0) == (verdict.by_qos["QoS 2"].acknowledged, verdict.by_qos["QoS 2"].duplicated)
    assert (5, 1) == (verdict.by_qos["QoS 2 as 1"].due, verdict.by_qos["QoS 2 as 1"].duplicated)


def test_what_was_not_acknowledged_is_not_owed() -> None:
    history = sound()
    name = published(history, 11, 1, acknowledged=False)
    history.publications[name].given_up = True
    assert judge(history).passed


def test_what_was_sent_before_suback_or_ended_after_unsubscribe_is_not_owed_but_allowed() -> None:
    history = sound()
    window = history.receivers["r"].windows[0]
    window.granted, window.leaving = 1.2, 10.2  # message 1 began before, message 10 ended after
    lose_last(history)
    assert judge(history).passed
    del history.receivers["r"].deliveries[0]
    assert judge(history).passed


def test_members_of_a_group_are_one_receiver_without_an_order() -> None:
    history = sound(shared=True)
    swap(history)
    assert judge(history).passed
    delivered(history, "p:3", member="other")
    assert {"QoS 2 twice", "repeated on one connection"} >= judge(history).by_kind.keys() >= {"QoS 2 twice"}


def test_a_retained_value_may_be_the_one_that_is_under_way() -> None:
    history = sound()
    history.retained["k"] = [retained(b"1", 1.0, 1.5), retained(b"2", 2.0, 9.0)]
    history.probes += [Probe(3.0, 3.5, {"k": b"1"}), Probe(3.0, 3.5, {"k": b"2"}), Probe(1.6, 1.9, {"k": b"1"})]
    history.probes += [Probe(0.5, 1.1, {}), Probe(0.5, 1.1, {"k": b"1"})]
    assert judge(history).passed
    history.probes.append(Probe(1.6, 1.9, {"k": b"2"}))  # not even sent
    assert 1 == judge(history).count("retained")


def test_a_look_that_was_cut_short_tells_only_what_it_saw() -> None:
    history = sound()
    history.retained["k"] = [retained(b"1", 1.0, 1.5), retained(b"2", 2.0, 2.5)]
    history.probes.append(Probe(3.0, 3.5, {}, whole=False))
    assert judge(history).passed
    history.probes.append(Probe(3.0, 3.5, {"k": b"1"}, whole=False))
    assert 1 == judge(history).count("retained")


def test_wills_may_come_more_than_once() -> None:
    history = sound()
    will_missing(history)
    assert 1 == len(unpublished_wills(history))
    history.willed["w"] = 2
    verdict = judge(history)
    assert verdict.passed
    assert 1 == verdict.wills_repeated


def test_topic_filters_match_as_the_specification_says() -> None:
    for pattern, topic, expected in (
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("a/+/c", "a/b/c", True),
        ("a/+", "a/b/c", False),
        ("a/b/c", "a/b", False),
        ("$share/g/a/#", "a/b", True),
        ("$share/g/a/#", "b", False),
    ):
        assert expected is matches(pattern, topic), (pattern, topic)


def test_payloads_notice_damage() -> None:
    payload = make_payload("p:1", 50)
    assert "p:1" == read_payload(payload)
    assert DAMAGED == read_payload(payload[:-1])
    assert DAMAGED == read_payload(payload[:-1] + b"!")
    assert DAMAGED == read_payload(b"")
