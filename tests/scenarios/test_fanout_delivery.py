"""Which vehicle gets what, when and in which order; one message at a time, whatever the vehicle and its connection do.

Numbers such as A4, S14 or G6 in the docstrings name rows of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.witness import wait_until
from tests.support.checks import both_versions
from tests.support.consumers import connected, lasting, receive_maximum, subscribe, unsubscribe
from tests.support.fanout import (
    INGRESS,
    Platform,
    Watch,
    batch,
    filter_of,
    fresh,
    get,
    heartbeat,
    octets,
    one,
    quiet,
    request_name,
    told,
    topic_of,
    vehicle,
)
from tests.support.flows import MAXIMUM_PACKET_SIZE, SESSION_EXPIRY, SUBSCRIPTION_ID, acknowledge, publish_many
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import DISCONNECT, PUBACK, Client, Packet, prop, publish_packet

#: What is refused is sent again soon, and given up early; for silence there is as much patience as by default.
BRISK = """
[plugins.fanout]
retry_delay = 0.05
retry_delay_max = 0.05
max_attempts = 8
"""

#: Little patience, so that tests need not have much.
HASTY = """
[plugins.fanout]
ack_timeout = 0.5
retry_delay = 0.1
retry_delay_max = 0.2
max_attempts = 3
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(config=BRISK, http=True) as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[NodeProcess]:
    with NodeProcess(config=HASTY, http=True) as running:
        yield running


def requests(platform: Platform, vin: str, count: int) -> list[str]:
    """Messages that wait for a vehicle; the names of their requests, in order."""
    names = [request_name() for _ in range(count)]
    for name in names:
        platform.send([vin], name, name)
    return names


def name_of(message: Packet) -> str:
    """The request of a message whose data is its name."""
    name = message.topic.rsplit("/", 1)[1]
    assert name.encode() == message.payload
    return name


def in_turn(client: Client, names: list[str]) -> None:
    """The vehicle gets these, each when it has acknowledged the one before, and then nothing."""
    for name in names:
        message = get(client, ack=False)
        assert name == name_of(message)
        quiet(client, 0.03)
        acknowledge(client, message)
    quiet(client)


# --- the five triggers --------------------------------------------------------------------------------------------


def test_a_new_batch(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """The seed, S35: a vehicle that is there gets it at once."""
    vin = one()
    client = vehicle(node, vin)
    quiet(client)
    before = desk.counters("fanout").get("trigger_batch", 0)
    names = requests(platform, vin, 1)
    in_turn(client, names)
    assert before + 1 == desk.counters("fanout")["trigger_batch"]


def test_a_batch_finds_those_that_are_there(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """S12, S13: among many vehicles that are away, connected ones are looked for, and nobody else."""
    vins, request = fresh(300), request_name()
    clients = {vin: vehicle(node, vin) for vin in vins[::100]}
    connected(node, vins[1])  # is there, and has not subscribed
    before = desk.counters("fanout").get("trigger_batch", 0)
    platform.send(vins, request)
    for vin, client in clients.items():
        assert topic_of(vin, request) == get(client).topic
    assert before + 3 == desk.counters("fanout")["trigger_batch"]
    wait_until(
        lambda: desk.show("fanout/requests", request)["states"] == {"accepted": 297, "acked": 3}, "the others wait"
    )


@pytest.mark.parametrize("dispatchers", [1, 64])
def test_any_number_of_dispatchers(dispatchers: int) -> None:
    """The seed, S16: a vehicle always has the same one, so its messages come in order, one at a time, each once."""
    with NodeProcess(config=f"[plugins.fanout]\ndispatchers = {dispatchers}\n") as node, Platform(node) as platform:
        vins = fresh(20)
        clients = [vehicle(node, vin) for vin in vins[:10]]
        names = [request_name() for _ in range(5)]
        for name in names:
            platform.send(vins, name, name)
        clients += [vehicle(node, vin) for vin in vins[10:]]
        for name in names:
            messages = [get(client, ack=False) for client in clients]
            assert {name} == {name_of(message) for message in messages}
            for client, message in zip(clients, messages, strict=True):
                quiet(client, 0.001)
                acknowledge(client, message)
        for client in clients:
            quiet(client, 0.01)


@both_versions
def test_a_subscription(node: NodeProcess, platform: Platform, version: int) -> None:
    """The seed, A4, G2, S31: what was there before comes as soon as the vehicle subscribes; no heartbeat is needed."""
    vin = one()
    names = requests(platform, vin, 3)
    client = lasting(node, vin, version)
    quiet(client)
    subscribe(client, filter_of(vin))
    in_turn(client, names)


@both_versions
def test_a_session_that_is_resumed(node: NodeProcess, platform: Platform, version: int) -> None:
    """The seed, A4, G2, S32: a vehicle that comes back with its session need not say anything."""
    vin = one()
    vehicle(node, vin, version).disconnect()
    names = requests(platform, vin, 3)
    in_turn(lasting(node, vin, version), names)


def test_an_acknowledgement(node: NodeProcess, platform: Platform) -> None:
    """The seed, S20, S29: each acknowledgement brings the next, at once, until all have come."""
    vin = one()
    client = vehicle(node, vin)
    in_turn(client, requests(platform, vin, 40))


def test_heartbeats_of_the_vehicle_itself(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """The seed, A5, S27, S34: both topics are triggers, do no harm, and go their way as messages; others are none."""
    vin = one()
    listener = connected(node)
    subscribe(listener, f"ecp/{vin}/#")
    client = vehicle(node, vin)
    names = requests(platform, vin, 2)
    first = get(client, ack=False)
    before = desk.counters("fanout").get("trigger_heartbeat", 0)
    for word in ("online", "heartbeat", "status", "online/x"):
        heartbeat(client, vin, word)
        assert f"ecp/{vin}/{word}" == get(listener).topic
    assert before + 2 == desk.counters("fanout")["trigger_heartbeat"]
    quiet(client)  # one in flight: no second copy, no second message
    acknowledge(client, first)
    heartbeat(client, vin)
    second = get(client, ack=False)
    assert names == [name_of(first), name_of(second)]
    quiet(client)


def test_heartbeats_of_somebody_else(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """S28: what another client says about a vehicle does nothing, whether or not the vehicle is there."""
    vin, other = fresh(2)
    stranger = vehicle(node, other)
    client = vehicle(node, vin)
    names = requests(platform, vin, 2)
    first = get(client, ack=False)
    before = desk.counters("fanout").get("trigger_heartbeat", 0)
    heartbeat(stranger, vin, "online")
    heartbeat(platform.client, vin)
    assert before == desk.counters("fanout").get("trigger_heartbeat", 0)
    quiet(client)
    quiet(stranger)
    acknowledge(client, first)
    assert names == [name_of(first), name_of(get(client))]


# --- who gets it --------------------------------------------------------------------------------------------------


def test_only_the_vehicle_itself(node: NodeProcess, platform: Platform) -> None:
    """The client id is the VIN: others who subscribe to its topic, or to everything, see nothing of it."""
    vin, other = fresh(2)
    listener = connected(node)
    subscribe(listener, "#")
    subscribe(listener, filter_of(vin))
    neighbour = vehicle(node, other, filter_=filter_of(vin))
    client = vehicle(node, vin)
    in_turn(client, requests(platform, vin, 2))
    quiet(neighbour)
    quiet(listener)


@pytest.mark.parametrize(
    "pattern", ["agent/{vin}/#", "agent/+/proxy/request/+", "#", "agent/{vin}/+/request/+", "+/{vin}/proxy/+/+"]
)
def test_any_filter_that_covers_the_topic(node: NodeProcess, platform: Platform, pattern: str) -> None:
    """S14, S15: not only the very filter that was agreed upon."""
    vin = one()
    client = vehicle(node, vin, filter_=pattern.format(vin=vin))
    in_turn(client, requests(platform, vin, 2))


def test_filters_that_do_not_cover_it(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """S14: a vehicle that is there and has not subscribed gets nothing, and it is said why."""
    vin = one()
    client = vehicle(node, vin, filter_=f"agent/{vin}/proxy/+")
    subscribe(client, f"agent/{vin}/proxy/request/+/x")
    subscribe(client, f"agent/{vin}x/#")
    names = requests(platform, vin, 1)
    quiet(client)
    assert "not_subscribed" == desk.show("vehicles", vin)["why"]["reason"]
    subscribe(client, filter_of(vin))
    in_turn(client, names)


def test_several_filters_bring_one_message(node: NodeProcess, platform: Platform) -> None:
    """S14, G12: the one with the highest QoS counts; the next message still waits for the acknowledgement."""
    vin = one()
    client = vehicle(node, vin, filter_=f"agent/{vin}/#", qos=0)
    subscribe(client, "agent/+/proxy/request/+", 1, prop(SUBSCRIPTION_ID, 7))
    subscribe(client, filter_of(vin), 0)
    names = requests(platform, vin, 3)
    message = get(client, ack=False)
    assert (names[0], 1, 7) == (name_of(message), message.qos, message.prop(SUBSCRIPTION_ID))
    quiet(client)
    acknowledge(client, message)
    in_turn(client, names[1:])


def test_the_quality_of_service_that_was_granted(node: NodeProcess, platform: Platform) -> None:
    """S19, G12: never above the granted one, and never above 1; the subscription identifier is there."""
    for asked, sent in ((1, 1), (2, 1), (0, 0)):
        vin = one()
        client = lasting(node, vin)
        subscribe(client, filter_of(vin), asked, prop(SUBSCRIPTION_ID, 11))
        requests(platform, vin, 1)
        message = get(client)
        assert (sent, 11) == (message.qos, message.prop(SUBSCRIPTION_ID))


def test_a_subscription_with_qos_0(node: NodeProcess, platform: Platform) -> None:
    """G12: nothing is acknowledged, so what was handed over counts, and says so; all come, in order, each once."""
    vin = one()
    client = vehicle(node, vin, qos=0)
    with Watch(node) as watch:
        names = requests(platform, vin, 5)
        messages = [get(client) for _ in names]
        assert names == [name_of(message) for message in messages]
        assert {0} == {message.qos for message in messages}
        watch.gather(lambda: watch.states(vin).count("acked") == 5, "all five are over")
        assert {"qos0"} == {receipt["reason"] for receipt in watch.of(vin) if receipt["state"] == "acked"}
    quiet(client)


def test_a_prefix_of_ones_own() -> None:
    """S23, S42, G5: with any `topic_prefix` messages arrive and acknowledgements count."""
    with NodeProcess(config='[plugins.fanout]\ntopic_prefix = "cars/cmd/{VIN}"\n', http=True) as node:
        vin, request = one(), request_name()
        with Platform(node) as platform, Watch(node, request) as watch, Operator(node) as desk:
            platform.send([vin], request, "1")
            old = vehicle(node, vin)
            quiet(old)
            assert f"cars/cmd/{vin}/+" == desk.show("vehicles", vin)["filter"]
            subscribe(old, f"cars/cmd/{vin}/+")
            assert (f"cars/cmd/{vin}/{request}", b"1") == told(old)
            watch.until(vin, "accepted", "sent", "acked")
            platform.send([vin], request, "2")
            assert (f"cars/cmd/{vin}/{request}", b"2") == told(old)


# --- one in flight ------------------------------------------------------------------------------------------------


def test_a_large_window_changes_nothing(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """S17, G9: the session would take many; the fan-out gives one, other messages go beside it."""
    vin = one()
    client = vehicle(node, vin, 5, receive_maximum(32))
    subscribe(client, "other/+")
    names = requests(platform, vin, 10)
    first = get(client, ack=False)
    with connected(node) as other:
        publish_many(other, "other/1", [b"%d" % number for number in range(20)], 1)
    others = [get(client, ack=False) for _ in range(20)]
    assert {"other/1"} == {message.topic for message in others}
    quiet(client)
    for message in others:
        acknowledge(client, message)
    quiet(client)
    view = desk.show("vehicles", vin)
    assert (10, names[0], "in_flight") == (view["pending"], view["in_flight"]["request_id"], view["why"]["reason"])
    acknowledge(client, first)
    in_turn(client, names[1:])


def test_acknowledgements_of_something_else(node: NodeProcess, platform: Platform) -> None:
    """S24, S25, G6: neither an ordinary message on the very same topic, nor another client's, ends a delivery."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    listener = connected(node)
    subscribe(listener, filter_of(vin))
    with Watch(node, request) as watch, connected(node) as other:
        platform.send([vin], request, "task")
        task = get(client, ack=False)
        assert b"task" == task.payload
        for _ in range(3):
            other.publish(topic_of(vin, request), b"ordinary", 1)
            assert b"ordinary" == get(client).payload
            assert b"ordinary" == get(listener).payload
        acknowledge(client, Packet(3, 2, b"", 5, packet_id=(task.packet_id or 0) + 1000, qos=1))  # of nothing at all
        watch.until(vin, "accepted", "sent")
        watch.nothing_more()
        acknowledge(client, task)
        watch.until(vin, "accepted", "sent", "acked")
        watch.nothing_more()


def test_an_ordinary_message_before_anything_was_sent(node: NodeProcess, platform: Platform) -> None:
    """S25, G6: its acknowledgement must not delete what waits for a vehicle; nor does a second PUBACK."""
    vin, request = one(), request_name()
    client = vehicle(node, vin, filter_=topic_of(vin, request))  # covers the one topic, not the filter
    with connected(node) as other:
        other.publish(topic_of(vin, request), b"ordinary", 1)
    message = get(client)
    platform.send([vin], request, "task")
    acknowledge(client, message)
    quiet(client)
    subscribe(client, filter_of(vin))
    task = get(client)
    assert b"task" == task.payload
    platform.send([vin], request_name(), "next")
    acknowledge(client, task)
    message = get(client, ack=False)
    assert b"next" == message.payload
    quiet(client)


@both_versions
def test_a_vehicle_that_dies_before_it_acknowledges(node: NodeProcess, platform: Platform, version: int) -> None:
    """The seed, A6, S33, S34: the session repeats it with DUP and the same packet id, and nothing else."""
    vin = one()
    client = vehicle(node, vin, version)
    names = requests(platform, vin, 3)
    first = get(client, ack=False)
    client.abort()
    back = lasting(node, vin, version)
    again = get(back, ack=False)
    assert (True, first.packet_id, names[0]) == (again.dup, again.packet_id, name_of(again))
    heartbeat(back, vin, "online")
    subscribe(back, filter_of(vin))
    quiet(back)
    acknowledge(back, again)
    in_turn(back, names[1:])


def test_a_take_over_with_a_message_in_flight(node: NodeProcess, platform: Platform) -> None:
    """The seed, A6, S13, G15: the new connection has it in flight; the old one's acknowledgement comes too late."""
    vin = one()
    with Watch(node) as watch:
        client = vehicle(node, vin)
        names = requests(platform, vin, 2)
        for _ in range(3):
            message = get(client, ack=False)
            assert names[0] == name_of(message)
            taken_over, client = client, lasting(node, vin)
            acknowledge(taken_over, message)
            taken_over.expect_closed()
        last = get(client, ack=False)
        assert last.dup
        quiet(client)
        acknowledge(client, last)
        in_turn(client, names[1:])
        watch.gather(lambda: watch.states(vin).count("acked") == 2, "both are over")
        assert 2 == len({receipt["delivery_id"] for receipt in watch.of(vin) if receipt["state"] == "sent"})


def test_a_batch_during_a_take_over(node: NodeProcess, platform: Platform) -> None:
    """S13, G15: a vehicle that changes connections while batches come is not passed over; it gets each of them."""
    vin = one()
    names: list[str] = []
    client = vehicle(node, vin)
    for _ in range(7):  # each may be an attempt
        name = request_name()
        names.append(name)
        packet_id = platform.client.next_id()
        body = octets(batch([vin], name, name))
        platform.client.send(publish_packet(INGRESS, body, qos=1, packet_id=packet_id))
        client = lasting(node, vin)
        platform.client.await_answer(PUBACK, packet_id)
    in_turn(client, names)


@both_versions
def test_a_clean_start_with_a_message_in_flight(node: NodeProcess, platform: Platform, version: int) -> None:
    """The session is gone, the message is not: it is sent anew, once, and only then the next."""
    vin = one()
    names = requests(platform, vin, 2)
    for leave in (Client.abort, Client.disconnect, lambda _client: None):
        client = vehicle(node, vin, version)
        assert names[0] == name_of(get(client, ack=False))
        leave(client)
        clean = connected(node, vin, version)
        quiet(clean, 0.03)
        subscribe(clean, filter_of(vin))
        again = get(clean, ack=False)
        assert (False, names[0]) == (again.dup, name_of(again))
        quiet(clean)
        clean.disconnect()
    in_turn(vehicle(node, vin, version), names)


def test_a_session_that_ends_with_a_message_in_flight(node: NodeProcess, platform: Platform) -> None:
    """S36: it waits again, and the vehicle gets it when it comes with a new session."""
    vin = one()
    names = requests(platform, vin, 2)
    client = connected(node, vin, 5, prop(SESSION_EXPIRY, 0))
    subscribe(client, filter_of(vin))
    assert names[0] == name_of(get(client, ack=False))
    client.abort()
    in_turn(vehicle(node, vin), names)


def test_unsubscribing_with_a_message_in_flight(node: NodeProcess, platform: Platform) -> None:
    """It stays in flight: no second copy by subscribing again, and its acknowledgement counts in any case."""
    vin = one()
    client = vehicle(node, vin)
    with Watch(node) as watch:
        names = requests(platform, vin, 3)
        first = get(client, ack=False)
        assert [] == unsubscribe(client, filter_of(vin))
        subscribe(client, filter_of(vin))
        subscribe(client, f"agent/{vin}/#")
        quiet(client)
        acknowledge(client, first)
        second = get(client, ack=False)
        assert names[:2] == [name_of(first), name_of(second)]
        unsubscribe(client, filter_of(vin))
        unsubscribe(client, f"agent/{vin}/#")
        acknowledge(client, second)
        watch.gather(lambda: watch.states(vin).count("acked") == 2, "the acknowledgement counts")
        quiet(client)
        subscribe(client, filter_of(vin))
        in_turn(client, names[2:])


def test_unsubscribed_and_gone_with_a_message_in_flight(node: NodeProcess, platform: Platform) -> None:
    """The session repeats what is in flight; a vehicle that has unsubscribed meanwhile ends it all the same."""
    vin = one()
    client = vehicle(node, vin)
    with Watch(node) as watch:
        names = requests(platform, vin, 2)
        first = get(client, ack=False)
        unsubscribe(client, filter_of(vin))
        client.abort()
        back = lasting(node, vin)
        again = get(back, ack=False)
        assert (True, first.packet_id) == (again.dup, again.packet_id)
        acknowledge(back, again)
        watch.gather(lambda: watch.states(vin).count("acked") == 1, "the acknowledgement counts")
        quiet(back)
        subscribe(back, filter_of(vin))
        in_turn(back, names[1:])


def test_many_triggers_at_once(node: NodeProcess, platform: Platform) -> None:
    """S17, S37: batches, heartbeats and subscriptions in one write; at any time one message is unacknowledged."""
    vin = one()
    client = vehicle(node, vin)
    names = [request_name() for _ in range(30)]
    packets = [
        publish_packet(INGRESS, octets(batch([vin], name, name)), qos=1, packet_id=number)
        for number, name in enumerate(names, 1)
    ]
    platform.client.send(b"".join(packets))
    client.send(publish_packet(f"ecp/{vin}/online", b"") * 50)
    for name in names:
        subscribe(client, filter_of(vin))
        heartbeat(client, vin)
        message = get(client, ack=False)
        assert name == name_of(message)
        assert [] == list(client.pending), "a second one, before the first was acknowledged"
        acknowledge(client, message)
    quiet(client)


# --- order --------------------------------------------------------------------------------------------------------


def test_the_order_of_acceptance(node: NodeProcess, platform: Platform) -> None:
    """S20, G13: not the clock, not the name of the request; also what is accepted while others are delivered."""
    vin = one()
    names = [f"task_{name}" for name in ("z", "a", "m", "Z", "0", "~", "b")]
    body = b"".join(
        publish_packet(INGRESS, octets(batch([vin], name, name)), qos=1, packet_id=number)
        for number, name in enumerate(names, 1)
    )
    platform.client.send(body)
    for _ in names:
        assert 0 == platform.client.expect(PUBACK).reason
    client = vehicle(node, vin)
    first = get(client)
    platform.send([vin], "task_A", "task_A")
    in_turn(client, [*names[1:], "task_A"])
    assert names[0] == name_of(first)


def test_priorities(node: NodeProcess, platform: Platform) -> None:
    """S22, G10: the highest first, among equals in order; what is in flight is not overtaken."""
    vin = one()
    client = vehicle(node, vin)
    platform.send([vin], "task_p_0", "task_p_0")
    first = get(client, ack=False)
    for name, priority in (("n1", 0), ("h1", 5), ("n2", 0), ("top", 9), ("h2", 5), ("low", 1)):
        platform.send([vin], name, name, priority=priority)
    quiet(client)
    acknowledge(client, first)
    in_turn(client, ["top", "h1", "h2", "low", "n1", "n2"])
    for name, priority in (("n3", 0), ("h3", 3)):
        platform.send([vin], name, name, priority=priority)
    assert ["n3", "h3"] == [name_of(get(client)), name_of(get(client))], "the first was on its way already"


# --- attempts that fail -------------------------------------------------------------------------------------------


def sent_away(client: Client, node: NodeProcess, vin: str) -> Client:
    """The vehicle was silent for too long; it is back, and resumes its session."""
    *_, goodbye = client.expect_closed()
    assert (DISCONNECT, 0x80) == (goodbye.type, goodbye.reason)
    return lasting(node, vin)


@pytest.mark.parametrize("window", [1, 32])
def test_silence(hasty: NodeProcess, window: int) -> None:
    """S38, G7: the same packet again on the next connection, then failed; the vehicle is not blocked by it."""
    vin, request = one(), request_name()
    client = vehicle(hasty, vin, 5, receive_maximum(window))
    with Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send([vin], request, "silence")
        platform.send([vin], "task_next", "task_next")
        attempts = []
        for _ in range(3):
            attempts.append(get(client, ack=False))
            client = sent_away(client, hasty, vin)
        assert [topic_of(vin, request)] * 3 == [message.topic for message in attempts]
        assert [False, True, True] == [message.dup for message in attempts]
        assert 1 == len({message.packet_id for message in attempts})
        assert "task_next" == name_of(get(client))
        receipts = watch.until(vin, "accepted", "sent", "retried", "sent", "retried", "sent", "failed")
        assert [0, 1, 1, 2, 2, 3, 3] == [receipt["attempt"] for receipt in receipts]
        assert ["no_ack"] * 3 == [r["reason"] for r in receipts if r["state"] in ("retried", "failed")]
        acknowledge(client, attempts[0])  # unasked
        late = watch.until(vin, "accepted", "sent", "retried", "sent", "retried", "sent", "failed", "sent")[-1]
        assert (3, "late_ack") == (late["attempt"], late["reason"])
        quiet(client)
        watch.nothing_more()


def test_an_error_is_no_acknowledgement(node: NodeProcess, platform: Platform) -> None:
    """S24, G6: a PUBACK with an error code is told with its code, and the message sent again until it is too often."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    reasons = (0x83, 0x97, 0x80, 0x87, 0x91, 0x90, 0x99, 0x83)
    with Watch(node, request) as watch:
        platform.send([vin], request, "refused")
        platform.send([vin], "task_next", "task_next")
        for reason in reasons:
            message = get(client, ack=False)
            assert topic_of(vin, request) == message.topic
            acknowledge(client, message, reason=reason)
        assert "task_next" == name_of(get(client))
        receipts = watch.until(vin, "accepted", *["sent", "retried"] * 7, "sent", "failed")
        told_reasons = [receipt["reason"] for receipt in receipts if receipt["state"] in ("retried", "failed")]
        assert [f"refused_0x{reason:02x}" for reason in reasons] == told_reasons


def test_success_in_the_end(node: NodeProcess, platform: Platform) -> None:
    """Refused, then taken: one `acked`; 0x10 is a success too."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        platform.send([vin], request, "x")
        acknowledge(client, get(client, ack=False), reason=0x87)
        acknowledge(client, get(client, ack=False), reason=0x10)
        receipts = watch.until(vin, "accepted", "sent", "retried", "sent", "acked")
        assert 1 == len({receipt["delivery_id"] for receipt in receipts})
        assert 2 == receipts[-1]["attempt"]
        quiet(client)


def test_an_acknowledgement_while_it_waits_for_the_next_attempt(hasty: NodeProcess) -> None:
    """Told `retried` and not sent again yet: the acknowledgement still ends it."""
    vin, request = one(), request_name()
    client = vehicle(hasty, vin)
    with Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send([vin], request, "x")
        message = get(client, ack=False)
        watch.until(vin, "accepted", "sent", "retried")
        acknowledge(client, message)
        watch.gather(lambda: watch.states(vin)[-1] == "acked", "it is over")
        watch.nothing_more()
        assert 1 == watch.number("acked")


def test_time_away_does_not_count(hasty: NodeProcess) -> None:
    """The clock of an attempt stands still while the vehicle is away, and begins anew when it is back."""
    vin, request, other = one(), request_name(), one()
    client = vehicle(hasty, vin)
    with Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send([vin, other], request, "x")
        get(client, ack=False)
        client.abort()
        silent = vehicle(hasty, other)
        for _ in range(2):
            silent = sent_away(silent, hasty, other)
        watch.gather(lambda: watch.states(other)[-1:] == ["failed"], "meanwhile another has used up all attempts")
        back = lasting(hasty, vin)
        assert get(back).dup
        receipts = watch.until(vin, "accepted", "sent", "sent", "acked")
        assert 2 == receipts[-1]["attempt"]  # the repetition


def test_a_vehicle_that_cannot_take_so_much(hasty: NodeProcess) -> None:
    """A message above the vehicle's Maximum Packet Size has failed, and blocks nothing."""
    vin, request = one(), request_name()
    client = vehicle(hasty, vin, 5, prop(MAXIMUM_PACKET_SIZE, 1000))
    with Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send([vin], request, "x" * 1000)
        platform.send([vin], "task_next", "task_next")
        assert "task_next" == name_of(get(client))
        watch.gather(lambda: "failed" in watch.states(vin), "it has failed")
        assert "too_large" == watch.of(vin)[-1]["reason"]
        platform.send([vin], request, "small")
        assert b"small" == get(client).payload


def test_a_message_that_is_replaced_while_it_is_in_flight(node: NodeProcess, platform: Platform) -> None:
    """A3, S17: the old one cannot be called back, so the new one waits for its acknowledgement; neither comes twice."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        platform.send([vin], request, "old")
        old = get(client, ack=False)
        assert {"accepted": 1, "duplicates": 0, "replaced": 1} == platform.send([vin], request, "new")
        quiet(client)
        acknowledge(client, old)
        assert b"new" == get(client).payload
        quiet(client)
        watch.gather(lambda: watch.number("acked") >= 1, "the new one is acknowledged")
        finals = [r for r in watch.seen if r["state"] in ("acked", "replaced")]
        assert 2 == len(finals) == len({receipt["delivery_id"] for receipt in finals})


def test_a_message_that_is_replaced_while_its_vehicle_is_away(node: NodeProcess, platform: Platform) -> None:
    """A3, A6: the old one is withdrawn from the session; the last one comes alone."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        platform.send([vin], request, "1")
        get(client, ack=False)
        client.abort()
        platform.send([vin], request, "2")
        platform.send([vin], request, "3")
        back = lasting(node, vin)
        last = get(back)
        assert (False, b"3") == (last.dup, last.payload)
        quiet(back)
        watch.gather(lambda: watch.number("acked") == 1, "the last one is acknowledged")
        assert 2 == watch.number("replaced")


def test_a_message_that_is_replaced_while_its_vehicle_is_silent(hasty: NodeProcess) -> None:
    """A3, S38: the old one is not sent again; the new one does not wait for ever."""
    vin, request = one(), request_name()
    client = vehicle(hasty, vin)
    with Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send([vin], request, "old")
        get(client, ack=False)
        platform.send([vin], request, "new")
        client = sent_away(client, hasty, vin)
        new = get(client)
        assert (False, b"new") == (new.dup, new.payload)
        watch.gather(lambda: watch.number("acked") == 1, "the new one is acknowledged")
        quiet(client, 1.0)
        assert ["accepted", "sent", "accepted", "replaced", "sent", "acked"] == watch.states(vin)


def test_attempts_are_counted_over_sessions(node: NodeProcess, platform: Platform) -> None:
    """A message that makes a vehicle fail, again and again, has its attempts counted though no session remembers it."""
    vin, request = one(), request_name()
    with Watch(node, request) as watch:
        platform.send([vin], request)
        for number in (1, 2, 3):
            client = connected(node, vin)
            subscribe(client, filter_of(vin))
            get(client, ack=False)
            watch.gather(lambda number=number: watch.number("sent") == number, "it is sent")  # type: ignore[misc]
            client.abort()
        assert [1, 2, 3] == [receipt["attempt"] for receipt in watch.seen if receipt["state"] == "sent"]


# --- time -----------------------------------------------------------------------------------------------------------


def test_what_is_not_delivered_in_time(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """S22, G10: `expires_in` is over: it is not sent, `expired`, and what is behind it comes."""
    late, away, request = one(), one(), request_name()
    with Watch(node, request) as watch:
        platform.send([late, away], request, "x", expires_in=0.3)
        platform.send([late], "task_next", "task_next", expires_in=3600)
        wait_until(lambda: desk.web.post("fanout/gc").status_code < 300 and expired(desk, request), "it expires")
        in_turn(vehicle(node, late), ["task_next"])
        for vin in (late, away):
            receipts = watch.until(vin, "accepted", "expired")
            assert "expires_in" == receipts[-1]["reason"]
        watch.nothing_more()
    assert "nothing_pending" == desk.show("vehicles", away)["why"]["reason"]


def expired(desk: Operator, request: str) -> bool:
    return bool(desk.show("fanout/requests", request)["pending"] == 0)


def test_a_vehicle_that_comes_after_it_has_expired(node: NodeProcess, platform: Platform) -> None:
    """No collection is needed: it is looked at before it is sent."""
    vin, request = one(), request_name()
    with Watch(node, request) as watch:
        platform.send([vin], request, "x", expires_in=0.01)
        quiet(platform.client, 0.05)
        client = vehicle(node, vin)
        watch.until(vin, "accepted", "expired")
        quiet(client)


@pytest.mark.parametrize("why", ["expired", "cancelled"])
def test_what_is_in_flight_at_a_vehicle_that_does_not_come_back(
    node: NodeProcess, platform: Platform, desk: Operator, why: str
) -> None:
    """Its session may be kept for ever, its message is not: it ends, once; a late PUBACK changes nothing."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        platform.send([vin], request, "x", **({"expires_in": 0.5} if why == "expired" else {}))
        get(client, ack=False)
        client.abort()
        wait_until(lambda: not desk.show("vehicles", vin)["connected"], "it is away")
        if why == "cancelled":
            desk.web.post(f"fanout/requests/{request}/cancel")
        wait_until(lambda: desk.web.post("fanout/gc").status_code < 300 and expired(desk, request), "it is over")
        watch.until(vin, "accepted", "sent", why)
        platform.send([vin], "task_next", "task_next")
        back = lasting(node, vin)
        message = get(back)
        if message.dup:  # the session has repeated it
            message = get(back)
        assert "task_next" == name_of(message)
        watch.nothing_more()
