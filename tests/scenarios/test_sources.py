"""Do messages that are stored reach a client as fast as it takes them: all, in order, in step with its window, and
without one source, or live messages, standing in the way of another?

The sources are streams here, because their contents can be read again by every test; one node serves all tests.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.consumers import (
    ack_all,
    connected,
    fill,
    lasting,
    numbered,
    numbers,
    receive_maximum,
    settled,
    subscribe,
    take,
    take_until,
    unique,
    unsubscribe,
)
from tests.support.flows import MAXIMUM_PACKET_SIZE, acknowledge, both_versions
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, Packet, prop

STORED = 5000
HUGE = 20_000
WINDOW = 32  #: messages in flight at most, unless the client wants fewer

CONFIG = """
[plugins.streams.stream.stored]
topics = ["stored/#"]

[plugins.streams.stream.huge]
topics = ["huge/#"]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "rocksdb://", http=True, config=CONFIG) as running:
        fill(running, numbered("stored/a", STORED))
        fill(running, numbered("huge/a", HUGE, padding=60))
        yield running


@pytest.fixture
def small(desk: Operator) -> str:
    """A stream of the test's own; it is bound to topics below its name."""
    name = unique("small")
    desk.create("streams", name, topics=[f"{name}/#"])
    return name


# --- all of them, in order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "maximum"), [(4, None), (5, 1), (5, 10), (5, 65535)], ids=["3.1.1", "5-1", "5-10", "5-65535"]
)
def test_thousands_of_stored_messages_arrive_in_order(node: NodeProcess, version: int, maximum: int | None) -> None:
    """And never are more in flight than the window and the client's receive maximum allow."""
    properties = [receive_maximum(maximum)] if maximum else []
    room = min(maximum or WINDOW, WINDOW)
    seen: list[int] = []
    with connected(node, "", version, *properties) as client:
        subscribe(client, "$stream/stored/earliest")
        while len(seen) < STORED:
            lot = take(client, min(room, STORED - len(seen)), ack=False)
            if len(seen) < 40 * room:
                assert [] == settled(client), "more in flight than allowed"
            assert {1} == {message.qos for message in lot}
            seen += numbers(lot)
            ack_all(client, lot)
    assert list(range(STORED)) == seen


@both_versions
def test_an_ordinary_client_gets_all_of_them(node: NodeProcess, version: int) -> None:
    """paho-mqtt with its own ideas about when to acknowledge."""
    seen: list[int] = []
    ended = threading.Event()

    def on_connect(*_: object) -> None:
        client.subscribe("$stream/stored/earliest", 1)

    def on_message(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        seen.append(int(message.payload))
        if len(seen) == STORED:
            ended.set()

    client = paho.Client(
        CallbackAPIVersion.VERSION2, unique("paho"), protocol=paho.MQTTv5 if version == 5 else paho.MQTTv311
    )
    client.on_connect = on_connect
    client.on_message = on_message
    client.connect(node.host, node.port)
    client.loop_start()
    try:
        ended.wait(60)
    finally:
        client.disconnect()
        client.loop_stop()
    assert list(range(STORED)) == seen


@both_versions
def test_a_subscriber_of_qos_0_misses_nothing(node: NodeProcess, version: int) -> None:
    """It does not acknowledge, and reads late; what is stored waits until it does."""
    with connected(node, "", version) as client, connected(node, "", version) as other:
        subscribe(client, "$stream/huge/earliest", 0)
        subscribe(other, "$stream/stored/earliest", 0)
        assert list(range(STORED)) == numbers(take(other, STORED))  # meanwhile nobody reads from the first
        messages = take(client, HUGE)
    assert list(range(HUGE)) == numbers(messages)
    assert {0} == {message.qos for message in messages}


def test_who_does_not_acknowledge_waits_alone(node: NodeProcess, small: str) -> None:
    """A full window stays full; another subscriber of the same stream gets all, and so does the first one later."""
    with connected(node) as stuck, connected(node) as quick:
        subscribe(stuck, f"$stream/{small}/earliest")
        subscribe(quick, f"$stream/{small}/earliest")
        fill(node, numbered(f"{small}/a", 200))
        held = take(stuck, WINDOW, ack=False)
        assert list(range(200)) == numbers(take(quick, 200))
        assert [] == settled(stuck)
        ack_all(stuck, held)
        assert list(range(200)) == numbers(held) + numbers(take(stuck, 200 - WINDOW))


def test_acknowledging_out_of_order_makes_room_all_the_same(node: NodeProcess, small: str) -> None:
    """Room is room: whichever message was acknowledged, the next one comes, and the held ones never again."""
    fill(node, numbered(f"{small}/a", 500))
    with connected(node, "", 5, receive_maximum(8)) as client:
        subscribe(client, f"$stream/{small}/earliest")
        held = take(client, 8, ack=False)
        seen = numbers(held)
        chance = random.Random(8)
        while held:
            acknowledge(client, held.pop(chance.randrange(len(held))))
            if len(seen) < 500:
                held += take(client, 1, ack=False)
                seen.append(numbers(held[-1:])[0])
    assert list(range(500)) == seen


def test_a_message_too_large_for_the_client_is_left_out(node: NodeProcess, small: str) -> None:
    """Those around it come; the client is not harmed, and others get the large one."""
    large = b"L" * 3000
    fill(node, [*numbered(f"{small}/a", 50), (f"{small}/a", large), *numbered(f"{small}/a", 50, start=50)])
    with connected(node, "", 5, prop(MAXIMUM_PACKET_SIZE, 1000)) as modest, connected(node) as other:
        subscribe(modest, f"$stream/{small}/earliest")
        subscribe(other, f"$stream/{small}/earliest")
        assert list(range(100)) == numbers(take(modest, 100))
        assert large == take(other, 101)[50].payload
        fill(node, [(f"{small}/a", b"end")])
        assert [] == take_until(modest, b"end")


# --- fair ---------------------------------------------------------------------------------------------------------


def longest_run(kinds: list[str], kind: str) -> int:
    """How many messages of a kind came one after the other."""
    longest = run = 0
    for one in kinds:
        run = run + 1 if one == kind else 0
        longest = max(longest, run)
    return longest


def kind_of(message: Packet) -> str:
    return "huge" if message.topic.startswith("huge/") else "small"


@pytest.mark.parametrize("maximum", [1, 10, 65535])
def test_a_small_source_is_served_beside_a_huge_one(node: NodeProcess, small: str, maximum: int) -> None:
    """Its next message comes within a round: no more of the huge one come before than the window can hold.

    The client is stuck when the small one gets its message, and takes one at a time then. A twin tells when the message
    can be had.
    """
    room = min(WINDOW, maximum)
    with connected(node, "", 5, receive_maximum(maximum)) as client, connected(node) as twin:
        subscribe(client, f"$stream/{small}/latest")
        subscribe(twin, f"$stream/{small}/latest")
        subscribe(client, "$stream/huge/earliest")
        held = take(client, room, ack=False)
        for turn in range(5):
            fill(node, [(f"{small}/a", b"%d" % turn)])
            assert b"%d" % turn == take(twin, 1)[0].payload
            assert [] == settled(client)
            between = 0
            while True:
                acknowledge(client, held.pop(0))
                held += take(client, 1, ack=False)
                if kind_of(held[-1]) == "small":
                    break
                between += 1
                assert between <= room, "more than a round of the huge source went before"


def test_a_queue_is_served_beside_a_huge_stream(node: NodeProcess, desk: Operator) -> None:
    """Its backlog and the stream's take turns, one message each as long as both have some."""
    queue = unique("queue")
    desk.create("queues", queue, topics=[f"{queue}/#"])
    fill(node, numbered(f"{queue}/a", 200))
    with connected(node) as client:
        subscribe(client, "$stream/huge/earliest")
        held = take(client, WINDOW, ack=False)
        subscribe(client, f"$queue/{queue}")
        ack_all(client, held)
        messages: list[Packet] = []
        while Counter(map(kind_of, messages))["small"] < 200:
            messages += take(client, 1)
    kinds = [kind_of(message) for message in messages]
    assert list(range(200)) == numbers(message for message in messages if kind_of(message) == "small")
    assert longest_run(kinds, "huge") <= 2 * WINDOW, "the queue waited for more than what is on its way already"
    assert longest_run(kinds, "small") <= WINDOW, "the stream waited for the queue"


def test_retained_messages_are_served_beside_a_huge_stream(node: NodeProcess) -> None:
    """A set of retained messages begins at once and takes turns with what is stored."""
    name = unique("retained")
    with connected(node) as publisher:
        for number in range(100):
            publisher.publish(f"{name}/{number}", b"r", 1, retain=True)
    with connected(node) as client:
        subscribe(client, "$stream/huge/earliest")
        held = take(client, WINDOW, ack=False)
        subscribe(client, f"{name}/#")
        ack_all(client, held)
        kinds: list[str] = []
        while Counter(kinds)["small"] < 100:
            kinds.append(kind_of(take(client, 1)[0]))
        assert longest_run(kinds, "huge") <= WINDOW, "more than a round of the huge stream went before a retained one"
        assert longest_run(kinds, "small") <= WINDOW, "the huge stream waited for the whole set"


def test_live_messages_and_a_backlog_take_turns(node: NodeProcess) -> None:
    """Neither waits for the other to be done: not the stored ones for 500 that came live, nor these for thousands."""
    topic = unique("live")
    with connected(node) as client:
        subscribe(client, topic)
        subscribe(client, "$stream/huge/earliest")
        held = take(client, WINDOW, ack=False)
        fill(node, numbered(topic, 500))
        ack_all(client, held)
        messages = list(held)
        while Counter(message.topic for message in messages)[topic] < 500:
            messages += take(client, 1)
    stored = [message for message in messages if message.topic != topic]
    assert list(range(500)) == numbers(message for message in messages if message.topic == topic)
    assert list(range(len(stored))) == numbers(stored)
    kinds = [kind_of(message) for message in messages[WINDOW:]]
    assert longest_run(kinds, "huge") <= 2 * WINDOW, "live messages waited for the backlog"
    assert longest_run(kinds, "small") <= 2 * WINDOW, "the backlog waited for live messages"


def test_each_live_message_comes_soon_during_a_backlog(node: NodeProcess) -> None:
    """One that is published in the middle of thousands of stored ones is among the next few."""
    topic = unique("live")
    with connected(node) as client, connected(node) as publisher:
        subscribe(client, topic)
        subscribe(client, "$stream/huge/earliest")
        held = take(client, WINDOW, ack=False)
        for turn in range(20):
            publisher.publish(topic, b"%d" % turn, 1)
            assert [] == settled(client)
            between = 0
            while True:
                acknowledge(client, held.pop(0))
                held += take(client, 1, ack=False)
                if held[-1].topic == topic:
                    break
                between += 1
                assert between <= WINDOW


# --- unsubscribing ------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("qos", [0, 1], ids=["qos0", "qos1"])
def test_after_unsubscribing_nothing_of_it_comes(node: NodeProcess, small: str, version: int, qos: int) -> None:
    """Only what was in flight before the UNSUBACK; other subscriptions go on, and the place can be taken again."""
    with connected(node, "", version) as client:
        subscribe(client, "$stream/huge/earliest", qos)
        subscribe(client, f"$stream/{small}/earliest")
        before = take(client, WINDOW, ack=False) + unsubscribe(client, "$stream/huge/earliest")
        ack_all(client, before)
        fill(node, numbered(f"{small}/a", 100))
        assert [f"{small}/a"] * 100 == [message.topic for message in take(client, 100)]
        subscribe(client, "$stream/huge/earliest")
        assert list(range(100)) == numbers(take(client, 100)), "subscribing anew begins anew"


def test_one_of_two_sources_can_be_left(node: NodeProcess) -> None:
    """The other goes on where it is."""
    with connected(node) as client:
        subscribe(client, "$stream/huge/earliest")
        subscribe(client, "$stream/stored/earliest")
        kept: list[Packet] = []
        messages = take(client, 200) + unsubscribe(client, "$stream/huge/earliest")
        ack_all(client, messages[200:])
        kept += [message for message in messages if message.topic == "stored/a"]
        rest = take(client, STORED - len(kept))
    assert list(range(STORED)) == numbers(kept + rest)


# --- coming back --------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("how", ["take-over", "abort", "disconnect"])
def test_a_delivery_goes_on_over_many_connections(node: NodeProcess, version: int, how: str) -> None:
    """Nothing is lost, nothing comes twice but what was in flight, and that with DUP."""
    chance = random.Random(f"{how} {version}")
    name = unique("traveller")
    first: list[int] = []  # in the order in which they came first
    acknowledged: set[int] = set()
    unacknowledged: set[int] = set()
    client = lasting(node, name, version)
    subscribe(client, "$stream/stored/earliest")
    total = 1500
    while len(first) < total:
        for _ in range(chance.randrange(1, 400)):
            [message] = take(client, 1, ack=False)
            [number] = numbers([message])
            assert number not in acknowledged, f"{number} came again after its acknowledgement"
            if number in unacknowledged:
                assert message.dup, f"{number} came again without DUP"
            else:
                first.append(number)
            unacknowledged.add(number)
            if chance.random() < 0.97 or len(unacknowledged) >= WINDOW:
                acknowledge(client, message)
                acknowledged.add(number)
                unacknowledged.remove(number)
        for message in settled(client):  # the node knows now of all acknowledgements
            [number] = numbers([message])
            assert number not in acknowledged
            if number not in unacknowledged:
                first.append(number)
                unacknowledged.add(number)
        before = client
        if how == "abort":
            before.abort()
        elif how == "disconnect":
            before.disconnect()
        client = lasting(node, name, version)
        assert client.connack is not None and client.connack.session_present
        before.close()
    client.close()
    assert list(range(len(first))) == sorted(first)
    assert first == sorted(first), "order"


def test_acknowledgements_after_a_take_over_make_room(node: NodeProcess, small: str) -> None:
    """What the old connection sent and the new one sent again is acknowledged there, and the next ones come."""
    fill(node, numbered(f"{small}/a", 100))
    name = unique("taken")
    with lasting(node, name) as old:
        subscribe(old, f"$stream/{small}/earliest")
        assert list(range(WINDOW)) == numbers(take(old, WINDOW, ack=False))
        with lasting(node, name) as new:
            again = take(new, WINDOW, ack=False)
            assert list(range(WINDOW)) == numbers(again)
            assert all(message.dup for message in again)
            assert [] == settled(new)
            ack_all(new, again)
            rest = take(new, 100 - WINDOW)
            assert list(range(WINDOW, 100)) == numbers(rest)
            assert not any(message.dup for message in rest)


# --- plugins come and go ------------------------------------------------------------------------------------------


def test_a_source_is_unloaded_and_loaded_under_its_clients() -> None:
    """The connection stays, live messages flow, and the stream goes on where it was when its plugin is back."""
    with NodeProcess("--store", "rocksdb://", http=True) as node, Operator(node) as desk:
        desk.done("stream", "create", "s", "--topic", "s/#")
        fill(node, numbered("s/a", 1000))
        with connected(node, "reader") as client, connected(node) as publisher:
            subscribe(client, "live")
            subscribe(client, "$stream/s/earliest")
            seen = take(client, 100)
            held = take(client, WINDOW, ack=False)
            desk.done("plugin", "unload", "streams")
            ack_all(client, held)
            publisher.publish("live", b"without", 1)
            assert b"without" == take(client, 1)[0].payload
            publisher.publish("s/a", b"-1", 1)  # nobody stores it
            desk.done("plugin", "load", "streams")
            again = take_until(client, b"999")
        once = numbers(seen + held)
        inflight = set(numbers(held))
        news = [number for number in numbers(again) if number not in inflight]
        assert list(range(999)) == once + news
        desk.done("plugin", "unload", "streams")
        assert "s" not in desk.done("plugin", "list").split()


# --- idle ---------------------------------------------------------------------------------------------------------


def test_idle_subscribers_cost_no_cpu(node: NodeProcess, desk: Operator) -> None:
    """Hundreds of clients that wait for queues and streams leave the node asleep: nobody polls for them."""
    queue, stream = unique("idle"), unique("idle")
    desk.create("queues", queue, topics=[f"{queue}/#"])
    desk.create("streams", stream, topics=[f"{stream}/#"])
    clients: list[Client] = []
    try:
        for number in range(500):
            client = connected(node)
            clients.append(client)
            for filter_ in (f"$queue/{queue}", f"$stream/{stream}", f"$stream/missing-{number}"):
                subscribe(client, filter_)
        fill(node, [(f"{stream}/a", b"x")])
        for client in clients:
            assert b"x" == take(client, 1)[0].payload
        # What the node still has to do for those who came just now may fall into the first of the measurements.
        assert min(share_of_cpu(node) for _ in range(2)) < 0.1, "500 idle subscribers keep the node busy"
    finally:
        for client in clients:
            client.close()


def share_of_cpu(node: NodeProcess, seconds: float = 3.0) -> float:
    """Processor time of the node's process, as a part of real time."""
    process = psutil.Process(node.pid)
    before, start = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, end = process.cpu_times(), time.monotonic()
    return float((after.user + after.system - before.user - before.system) / (end - start))
