"""Which vehicle gets what, when and in which order. What holds whatever happens is in the model (`test_model`).

Numbers such as A4, S14 or G6 in the docstrings name rows of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import Receipt
from motorcade.mqtt.packets import Disconnect, Puback
from motorcade.plugins.fanout.record import EntryRecord, encode
from motorcade.plugins.fanout.tables import owner_of
from motorcade.storage.ports import Draft
from tests.unit.fanout.node import (
    VIN,
    VINS,
    FanoutNode,
    filter_of,
    in_turn,
    message_of,
    say,
    taken,
    topic_of,
)

OPTIONS: dict[str, Any] = {"ack_timeout": 10.0, "retry_delay": 1.0, "retry_delay_max": 1.5, "max_attempts": 3}


@pytest.fixture
def node() -> Iterator[FanoutNode]:
    with FanoutNode.on(**OPTIONS) as made:
        yield made


def send_all(node: FanoutNode, vin: str, *requests: str) -> None:
    for request in requests:
        node.send([vin], request)


def brief(found: list[Receipt]) -> list[str]:
    """State, attempt and reason."""
    return [" ".join(filter(None, (str(r.state), str(r.attempt or ""), r.reason))) for r in found]


# -- who gets it


def test_only_the_vehicle_itself_sees_its_messages(node: FanoutNode) -> None:
    """The client id is the VIN: others who subscribe to its topic, or to everything, see nothing of it."""
    listener = node.client("listener")
    for filter_ in ("#", filter_of(VIN)):
        listener.subscribe(filter_)
    neighbour = node.vehicle(VINS[1], filter_=filter_of(VIN))
    car = node.vehicle()
    send_all(node, VIN, "a", "b")
    assert ["a", "b"] == in_turn(car)
    assert [] == neighbour.messages() == listener.messages()


def test_any_filter_that_covers_the_topic_brings_its_messages(node: FanoutNode) -> None:
    """S14, S15: not only the very filter that was agreed upon; with one that does not, it is said why nothing comes."""
    covering = ("agent/{}/#", "agent/+/proxy/request/+", "#", "agent/{}/+/request/+", "+/{}/proxy/+/+")
    for vin, pattern in zip(VINS, covering, strict=False):
        car = node.vehicle(vin, filter_=pattern.format(vin))
        send_all(node, vin, "a", "b")
        assert ["a", "b"] == in_turn(car), pattern
    vin = VINS[-1]
    car = node.vehicle(vin, filter_=f"agent/{vin}/proxy/+")
    for other in (f"agent/{vin}/proxy/request/+/x", f"agent/{vin}x/#"):
        car.subscribe(other)
    send_all(node, vin, "a")
    assert [] == car.messages()
    assert "not_subscribed" == node.why(vin)
    car.subscribe(filter_of(vin))
    assert ["a"] == in_turn(car)


def test_of_several_filters_the_one_with_the_highest_qos_counts(node: FanoutNode) -> None:
    """S14, G12: one message, with the identifier of that subscription; the next one waits for its acknowledgement."""
    car = node.vehicle(filter_=f"agent/{VIN}/#", qos=0)
    car.subscribe("agent/+/proxy/request/+", 1, identifier=7)
    car.subscribe(filter_of(VIN), 0)
    send_all(node, VIN, "a", "b")
    first = message_of(car)
    assert (topic_of(VIN, "a"), 1, (7,)) == (first.topic, first.qos, first.properties.subscription_ids)
    car.ack(first)
    assert ["b"] == in_turn(car)


def test_the_qos_is_the_granted_one_and_never_above_1(node: FanoutNode) -> None:
    """S19, G12: with QoS 0 nothing is acknowledged: what was handed over counts, and its receipt says so."""
    for vin, asked, sent in zip(VINS, (1, 2, 0), (1, 1, 0), strict=False):
        car = node.lasting(vin)
        car.subscribe(filter_of(vin), asked, identifier=11)
        send_all(node, vin, "a", "b", "c")
        first = car.messages()[0] if not asked else message_of(car)
        assert (sent, (11,)) == (first.qos, first.properties.subscription_ids)
    assert {"a": 1, "b": 1, "c": 1} == {
        r.request_id: r.attempt for r in node.receipts(vin=VINS[2]) if r.reason == "qos0"
    }


def test_a_prefix_of_ones_own_names_the_topics() -> None:
    """S23, S42, G5: messages arrive there and acknowledgements count."""
    with FanoutNode.on(topic_prefix="cars/cmd/{VIN}") as node:
        node.send([VIN], "a")
        car = node.vehicle()
        assert [] == car.messages()
        assert f"cars/cmd/{VIN}/+" == node.run(node.service.vehicle(VIN)).filter
        car.subscribe(f"cars/cmd/{VIN}/+")
        node.send([VIN], "b")
        assert ["a", "b"] == in_turn(car)
        assert ["accepted", "sent", "acked"] == node.states("b")


def test_however_many_dispatchers_there_are_messages_come_in_order() -> None:
    """The seed, S16: a vehicle always has the same one."""
    for dispatchers in (1, 64):
        with FanoutNode.on(dispatchers=dispatchers) as node:
            cars = [node.vehicle(vin) for vin in VINS[:10]]
            for request in "abc":
                assert taken(20) == node.send(VINS, request)
            cars += [node.vehicle(vin) for vin in VINS[10:]]
            assert [["a", "b", "c"]] * 20 == [in_turn(car) for car in cars]


def test_a_batch_looks_only_for_vehicles_that_are_there(node: FanoutNode) -> None:
    """S12, S13: among many that are away."""
    cars = [node.vehicle(vin) for vin in VINS[::10]]
    node.client(VINS[1])  # has not subscribed
    node.send(VINS, "a")
    assert 2 == node.counters["trigger_batch"]
    for car in cars:
        car.ack(message_of(car))
    assert {"accepted": 18, "acked": 2} == node.counts("a")


# -- signs of life


def test_heartbeats_of_the_vehicle_itself_are_triggers(node: FanoutNode) -> None:
    """The seed, A5, S27, S28, S34: another node has stored something, and nobody has told this one.

    Other topics, and what others say about the vehicle, are no triggers; all go their way as messages.
    """
    listener = node.client("listener")
    listener.subscribe("ecp/#")
    neighbour = node.vehicle(VINS[1])
    car = node.vehicle()
    for number, (client, word, is_trigger) in enumerate(
        (
            (neighbour, "online", False),
            (node.platform, "heartbeat", False),
            (car, "status", False),
            (car, "online/x", False),
            (car, "online", True),
            (car, "heartbeat", True),
        )
    ):
        entry = encode(EntryRecord(b"another batch...", f"r{number}", node.now))
        node.run(node.held.inner.mailboxes.append([owner_of(VIN)], Draft(entry, b"task"), node.now))
        node.wait(100.0)
        client.publish(f"ecp/{VIN}/{word}", b"{}")
        assert f"ecp/{VIN}/{word}" == message_of(listener).topic
        came = in_turn(car)
        assert is_trigger == bool(came), f"{word}: {came}"


# -- one in flight


def test_acknowledgements_of_something_else_end_nothing(node: FanoutNode) -> None:
    """S24, S25, G6: neither of an ordinary message on the very same topic, nor another client's, nor of nothing."""
    car, listener = node.vehicle(), node.client("listener")
    listener.subscribe(filter_of(VIN))
    listener.publish(topic_of(VIN, "a"), b"ordinary")
    ordinary = message_of(car)
    node.send([VIN], "a", "task")
    task = message_of(car)
    assert (b"ordinary", b"task") == (ordinary.payload, task.payload)
    car.ack(ordinary)
    listener.ack(message_of(listener))
    say(car, Puback(task.packet_id + 1000))
    assert ["accepted", "sent"] == node.states("a")
    for _ in range(2):
        say(car, Puback(task.packet_id))
    assert ["accepted", "sent", "acked"] == node.states("a")
    assert [] == car.messages()


def test_the_acknowledgement_of_an_ordinary_message_does_not_delete_what_waits(node: FanoutNode) -> None:
    """S25, G6: on the very topic, by a subscription that covers this topic and not the filter."""
    car = node.vehicle(filter_=topic_of(VIN, "a"))
    node.platform.publish(topic_of(VIN, "a"), b"ordinary")
    ordinary = message_of(car)
    node.send([VIN], "a", "task")
    car.ack(ordinary)
    assert [] == car.messages()
    car.subscribe(filter_of(VIN))
    assert b"task" == message_of(car).payload


# -- order


def test_the_highest_priority_comes_first_and_overtakes_nothing_in_flight(node: FanoutNode) -> None:
    """S22, G10: among equals in the order of acceptance; in the end the oldest is the next again."""
    car = node.vehicle()
    node.send([VIN], "first")
    first = message_of(car)
    for name, priority in (("n1", 0), ("h1", 5), ("n2", 0), ("top", 9), ("h2", 5), ("low", 1)):
        node.send([VIN], name, priority=priority)
    assert [] == car.messages()
    car.ack(first)
    assert ["top", "h1", "h2", "low", "n1", "n2"] == in_turn(car)
    for name, priority in (("n3", 0), ("h3", 3)):
        node.send([VIN], name, priority=priority)
    assert ["n3", "h3"] == in_turn(car), "the first was on its way already"


# -- attempts that fail


def test_an_error_is_no_acknowledgement(node: FanoutNode) -> None:
    """S24, G6: it is told with its code, and the message sent again, until it is too often; then the next one comes."""
    car = node.vehicle()
    send_all(node, VIN, "a", "b")
    for reason, pause in ((0x83, 1.0), (0x97, 1.5), (0x80, 0.0)):
        message = message_of(car)
        assert (topic_of(VIN, "a"), False) == (message.topic, message.dup)
        car.ack(message, reason=reason)
        node.wait(pause - 0.1 if pause else 0.0)
        assert not pause or [] == car.messages(), "too soon"
        node.wait(0.1)
    wanted = ["sent 1", "retried 1 refused_0x83", "sent 2", "retried 2 refused_0x97", "sent 3", "failed 3 refused_0x80"]
    assert ["accepted", *wanted] == brief(node.receipts("a"))
    message = message_of(car)
    assert topic_of(VIN, "b") == message.topic
    car.ack(message, reason=0x87)
    node.wait(1.0)
    car.ack(message_of(car), reason=0x10)
    assert ["accepted", "sent 1", "retried 1 refused_0x87", "sent 2", "acked 2"] == brief(node.receipts("b"))


def test_a_silent_vehicle_is_disconnected_and_gets_the_same_packet_again(node: FanoutNode) -> None:
    """S38, G7: its time begins when it is back; after `max_attempts` the message has failed and blocks nothing."""
    for vin, window in zip(VINS, (1, 32), strict=False):
        car = node.vehicle(vin, receive_maximum=window)
        send_all(node, vin, "a", "b")
        first = message_of(car)
        for delay in (1.0, 1.5):
            node.wait(10.1)
            assert car.open, "its connection is closed when it may be sent again"
            node.wait(delay)
            assert ReasonCode.UNSPECIFIED_ERROR is car.expect(Disconnect).reason
            car = node.lasting(vin, receive_maximum=window)
            again = message_of(car)
            assert (True, first.packet_id, first.topic) == (again.dup, again.packet_id, again.topic)
        node.wait(10.1)
        wanted = ["sent 1", "retried 1 no_ack", "sent 2", "retried 2 no_ack", "sent 3", "failed 3 no_ack"]
        assert ["accepted", *wanted] == brief(node.receipts("a", vin))
        car = node.lasting(vin)
        message = message_of(car)
        assert (topic_of(vin, "b"), False) == (message.topic, message.dup)
        say(car, Puback(first.packet_id))
        assert "sent 3 late_ack" == brief(node.receipts("a", vin))[-1], "an acknowledgement that nobody asked for"


@pytest.mark.parametrize("how", ["replaced", "cancelled"])
def test_a_message_that_ends_between_silence_and_the_next_attempt_blocks_nothing(node: FanoutNode, how: str) -> None:
    """The connection is closed at the time at which the message was to be sent again, since it holds its place."""
    car = node.vehicle()
    send_all(node, VIN, "a")
    message_of(car)
    node.wait(10.5)
    assert "retried 1 no_ack" == brief(node.receipts("a"))[-1]
    if how == "replaced":
        send_all(node, VIN, "a")
    else:
        node.run(node.service.cancel("a"))
        send_all(node, VIN, "b")
    assert car.open
    node.wait(1.0)
    assert ReasonCode.UNSPECIFIED_ERROR is car.expect(Disconnect).reason
    assert ["a" if how == "replaced" else "b"] == in_turn(node.lasting(VIN))


def test_a_longer_ack_timeout_holds_for_a_silent_vehicle_whose_message_was_replaced(node: FanoutNode) -> None:
    car = node.vehicle()
    send_all(node, VIN, "a")
    message_of(car)
    node.wait(10.5)
    node.run(node.plugins.reload("fanout", OPTIONS | {"ack_timeout": 25.0}))
    send_all(node, VIN, "a")
    node.wait(13.5)
    assert car.open
    node.wait(2.0)
    assert ReasonCode.UNSPECIFIED_ERROR is car.expect(Disconnect).reason
    assert ["a"] == in_turn(node.lasting(VIN))


def test_each_vehicle_has_its_own_time_to_acknowledge() -> None:
    """That of one ends before another, whose time is over, may be sent its message again."""
    with FanoutNode.on(ack_timeout=10.0, retry_delay=60.0) as node:
        cars = []
        for vin in VINS[:3]:
            cars.append(node.vehicle(vin))
            node.send([vin], "a")
            node.wait(1.0)
        node.wait(10.0)
        assert ["retried"] * 3 == [node.states("a", vin)[-1] for vin in VINS[:3]]
        assert all(car.open for car in cars)
        node.wait(60.0)
        assert not any(car.open for car in cars)


def test_another_ack_timeout_holds_for_what_is_in_flight(node: FanoutNode) -> None:
    """None, a longer one, then the time is over."""
    car = node.vehicle()
    node.send([VIN], "a")
    for timeout in (0.0, 25.0):
        node.run(node.plugins.reload("fanout", OPTIONS | {"ack_timeout": timeout}))
        node.wait(11.0)
        assert {"sent": 1} == node.counts("a")
    node.wait(4.0)
    assert {"retried": 1} == node.counts("a") and not car.open


def test_the_time_a_vehicle_is_away_does_not_count(node: FanoutNode) -> None:
    car = node.vehicle()
    node.send([VIN], "a")
    car.messages()
    node.wait(9.0)
    car.close()
    node.wait(1000.0)
    car = node.lasting(VIN)
    assert message_of(car).dup
    node.wait(9.0)
    assert car.open
    assert ["accepted", "sent 1", "sent 2"] == brief(node.receipts()), "the repetition is an attempt"


def test_attempts_are_counted_though_no_session_remembers_them(node: FanoutNode) -> None:
    """A message that makes a vehicle fail again and again; the session ends with the connection."""
    send_all(node, VIN, "a", "b")
    for number in range(3):
        car = node.client(VIN)
        car.subscribe(filter_of(VIN))
        message = message_of(car)
        assert (topic_of(VIN, "a"), False) == (message.topic, message.dup), f"attempt {number}"
        car.close()
        node.turn()
    assert "failed 3 session_ended" == brief(node.receipts("a"))[-1]
    assert ["b"] == in_turn(node.vehicle())


def test_attempts_are_counted_though_the_process_is_killed(node: FanoutNode) -> None:
    car = node.vehicle()
    send_all(node, VIN, "a", "b")
    for pause in (1.0, 0.0):
        car.ack(message_of(car), reason=0x80)
        node.wait(pause)
    node = node.kill()
    car = node.lasting()
    car.ack(message_of(car), reason=0x80)
    assert "failed 3 refused_0x80" == brief(node.receipts("a"))[-1]
    assert ["b"] == in_turn(car)


def test_a_message_above_the_maximum_packet_size_of_its_vehicle_fails(node: FanoutNode) -> None:
    car = node.vehicle(maximum_packet_size=1000)
    node.send([VIN], "a", "x" * 1000)
    node.send([VIN], "b")
    assert ["b"] == in_turn(car)
    assert "failed too_large" in {f"{r.state} {r.reason}" for r in node.receipts("a")}
    node.send([VIN], "a", "small")
    assert ["a"] == in_turn(car)


# -- what is over


@pytest.mark.parametrize(
    ("over", "answers", "ends"),
    [
        ("replaced", True, ["replaced 1 reissued", "sent 1 late_ack"]),
        ("replaced", False, ["replaced 1 reissued"]),
        ("cancelled", True, ["acked 1"]),
        ("cancelled", False, ["cancelled 1 cancelled"]),
    ],
)
def test_what_cannot_be_called_back_is_waited_for(node: FanoutNode, over: str, answers: bool, ends: list[str]) -> None:
    """A3, S17, S38: the vehicle is there, and has it. The next one waits for its answer, but not for ever."""
    car = node.vehicle()
    node.send([VIN], "a", "old")
    old = message_of(car)
    if over == "replaced":
        node.send([VIN], "a", "new")
    else:
        node.run(node.service.cancel("a"))
    node.send([VIN], "b")
    assert [] == car.messages()
    if answers:
        car.ack(old)
    else:
        node.wait(10.1)
        assert not car.open
        car = node.lasting(VIN)
    assert (["b"] if over == "cancelled" else ["a", "b"]) == in_turn(car)
    first = [receipt for receipt in node.receipts("a") if receipt.delivery_id == f"{VIN}.1"]
    assert ["accepted", "sent 1", *ends] == brief(first)
