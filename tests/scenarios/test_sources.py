"""Do messages that are stored reach a client of a real node: all, in order, in step with its window, over many
connections, beside other sources and live messages, while plugins come and go?

The sources are streams here, because their contents can be read again by every test, and one that a user has written;
one node serves nearly all tests. What sources may rely on in detail is in `tests/unit/broker/test_source_scheduler.py`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.scenarios.witness import wait_until
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
from tests.support.flows import acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, Packet

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
    for sign in ("connection_failed", "Exception in callback", "never retrieved", "never awaited"):
        assert sign not in running.log, running.log[max(0, running.log.index(sign) - 1000) :][:4000]


# --- all of them, in order ----------------------------------------------------------------------------------------


def test_thousands_of_stored_messages_arrive_in_order(node: NodeProcess) -> None:
    """And never are more in flight than the window and the client's receive maximum allow."""
    for version, maximum in ((4, WINDOW), (5, 10)):
        seen: list[int] = []
        with connected(node, "", version, receive_maximum(maximum)) as client:
            subscribe(client, "$stream/stored/earliest")
            while len(seen) < STORED:
                lot = take(client, min(maximum, STORED - len(seen)), ack=False)
                if len(seen) < 40 * maximum:
                    assert [] == settled(client), f"more in flight than {maximum}"
                assert {1} == {message.qos for message in lot}
                seen += numbers(lot)
                ack_all(client, lot)
        assert list(range(STORED)) == seen, version


def test_an_ordinary_client_gets_all_of_them(node: NodeProcess) -> None:
    """paho-mqtt with its own ideas about when to acknowledge."""
    for protocol in (paho.MQTTv311, paho.MQTTv5):
        seen: list[int] = []
        ended = threading.Event()
        client = paho.Client(CallbackAPIVersion.VERSION2, unique("paho"), protocol=protocol)

        def on_message(
            _client: paho.Client,
            _data: object,
            message: paho.MQTTMessage,
            seen: list[int] = seen,
            ended: threading.Event = ended,
        ) -> None:
            seen.append(int(message.payload))
            if len(seen) == STORED:
                ended.set()

        client.on_connect = lambda client, *_: client.subscribe("$stream/stored/earliest", 1)
        client.on_message = on_message
        client.connect(node.host, node.port)
        client.loop_start()
        try:
            ended.wait(60)
        finally:
            client.disconnect()
            client.loop_stop()
        assert list(range(STORED)) == seen, protocol


def test_a_subscriber_of_qos_0_misses_nothing(node: NodeProcess) -> None:
    """It does not acknowledge, and reads late; what is stored waits until it does."""
    with connected(node) as client, connected(node, "", 4) as other:
        subscribe(client, "$stream/huge/earliest", 0)
        subscribe(other, "$stream/stored/earliest", 0)
        assert list(range(STORED)) == numbers(take(other, STORED))  # meanwhile nobody reads from the first
        messages = take(client, HUGE)
    assert list(range(HUGE)) == numbers(messages)
    assert {0} == {message.qos for message in messages}


# --- beside each other --------------------------------------------------------------------------------------------


def test_everybody_has_a_turn_beside_a_huge_stream(node: NodeProcess, operator: Operator) -> None:
    """A queue, a set of retained messages and live messages, and the stream waits for none of them either."""
    name = unique("small")
    operator.create("queues", f"{name}-queue", topics=[f"{name}/queue/#"])
    fill(node, numbered(f"{name}/queue/a", 200))
    with connected(node) as publisher:
        for number in range(100):
            publisher.publish(f"{name}/retained/{number}", b"%d" % number, 1, retain=True)
    with connected(node) as client:
        subscribe(client, f"{name}/live")
        subscribe(client, "$stream/huge/earliest")
        held = take(client, WINDOW, ack=False)
        subscribe(client, f"$queue/{name}-queue")
        subscribe(client, f"{name}/retained/#")
        fill(node, numbered(f"{name}/live", 300))
        ack_all(client, held)
        messages: list[Packet] = []
        wanted = Counter(queue=200, retained=100, live=300)
        while wanted - Counter(map(sort, messages)):
            messages += take(client, 1)
    sorts = list(map(sort, messages))
    for each, count in wanted.items():
        assert list(range(count)) == sorted(numbers(m for m in messages if sort(m) == each))
        assert count == sorts.count(each)
    assert list(range(sorts.count("huge"))) == [n - WINDOW for n in numbers(m for m in messages if sort(m) == "huge")]
    for each in (*wanted, "huge"):
        assert longest_run(sorts, each) <= 2 * WINDOW, f"the others waited for {each}"


def sort(message: Packet) -> str:
    return message.topic.split("/")[1] if message.topic.startswith("small") else "huge"


def longest_run(sorts: list[str], sort: str) -> int:
    """How many messages of a sort came one after the other."""
    longest = run = 0
    for one in sorts:
        run = run + 1 if one == sort else 0
        longest = max(longest, run)
    return longest


# --- coming back --------------------------------------------------------------------------------------------------


def test_a_delivery_goes_on_over_many_connections(node: NodeProcess) -> None:
    """Nothing is lost, nothing comes twice but what was in flight, and that with DUP; in either version."""
    chance = random.Random("traveller")
    name = unique("traveller")
    first: list[int] = []  # in the order in which they came first
    acknowledged: set[int] = set()
    unacknowledged: set[int] = set()
    client = lasting(node, name)
    subscribe(client, "$stream/stored/earliest")
    for how, version in zip(cycle(("take-over", "abort", "disconnect")), cycle((4, 5)), strict=False):
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
        if len(first) > 2500:
            break
        before = client
        if how == "abort":
            before.abort()
        elif how == "disconnect":
            before.disconnect()
        client = lasting(node, name, version)
        assert client.connack is not None and client.connack.session_present
        before.close()
    client.close()
    assert list(range(len(first))) == first


# --- plugins come and go ------------------------------------------------------------------------------------------


def test_a_source_is_unloaded_and_loaded_under_its_clients() -> None:
    """The connection stays, live messages flow, and the stream goes on where it was when its plugin is back."""
    with NodeProcess("--store", "rocksdb://", http=True) as node, Operator(node) as operator:
        operator.done("stream", "create", "s", "--topic", "s/#")
        fill(node, numbered("s/a", 1000))
        with connected(node, "reader") as client, connected(node) as publisher:
            subscribe(client, "live")
            subscribe(client, "$stream/s/earliest")
            seen = take(client, 100)
            held = take(client, WINDOW, ack=False)
            operator.done("plugin", "unload", "streams")
            ack_all(client, held)
            publisher.publish("live", b"without", 1)
            assert b"without" == take(client, 1)[0].payload
            publisher.publish("s/a", b"-1", 1)  # nobody stores it
            operator.done("plugin", "load", "streams")
            again = take_until(client, b"999")
        once = numbers(seen + held)
        inflight = set(numbers(held))
        news = [number for number in numbers(again) if number not in inflight]
        assert list(range(999)) == once + news
        operator.done("plugin", "unload", "streams")
        assert "s" not in operator.done("plugin", "list").split()


#: `rows/{name}/{count}`: messages 0 … count-1 on topic `{name}`, as many at a time as there is room for. Goes on after
#: a disconnect; counts what happens to it. `faulty` gives one message, and raises when that is acknowledged.
ROWS = """
from motorcade.core.message import Message
from motorcade.extension.plugin import Plugin
from motorcade.extension.sources import Given, SourceType, Source


class Rows(Source):
    def __init__(self, feed, counters):
        super().__init__(feed)
        self.counters = counters
        counters["made"] += 1

    def subscribe(self, subscription, why):
        self.filter = subscription.filter
        _, self.topic, count = subscription.filter.split("/")
        self.count = int(count)
        self.counters["subscribe_" + why] += 1
        self.given = self.feed.kept or 0
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        return self.more(desired)

    def delivered(self, given, ack):
        self.counters["refused" if ack.refused else "delivered"] += 1
        return self.more(ack.desired)

    def more(self, desired):
        end = min(self.given + desired, self.count)
        messages = [Message(self.topic, b"%d" % number, qos=1) for number in range(self.given, end)]
        self.given = end
        return [Given(message, self.filter) for message in messages]

    def unsubscribe(self, filter_, why):
        self.counters["unsubscribe_" + why] += 1
        self.feed.kept = self.given - len(self.feed.unsent)

    def terminate(self):
        self.counters["terminated"] += 1


class Faulty(Source):
    def subscribe(self, subscription, why):
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        return [Given(Message("faulty", b"0", qos=1), "faulty")]

    def delivered(self, given, ack):
        raise RuntimeError("a plugin's own trouble")


class RowsPlugin(Plugin):
    async def start(self):
        make = lambda feed: Rows(feed, self.context.counters)
        self.context.add_source(SourceType(self.context.name, make, prefix="rows/"))
        self.context.add_source(SourceType(self.context.name + "-faulty", Faulty, prefix="faulty"))
"""


def test_a_source_that_a_user_has_written(node: NodeProcess, operator: Operator) -> None:
    """Loaded by its path under a client that waits for it; it goes on after a disconnect, and ends when unloaded."""
    name, client_id = unique("source"), unique("reader")
    counters = {"made": 1, "subscribe_recreated": 1, "delivered": 50, "refused": 1}
    with lasting(node, client_id) as client:
        subscribe(client, "rows/t/200")
        subscribe(client, "live")
        assert [] == settled(client)
        operator.load(name, ROWS)
        assert list(range(50)) == numbers(take(client, 50))
        ack_all(client, take(client, 1, ack=False), reason=0x97)
        held = take(client, WINDOW, ack=False)
        assert [] == settled(client)
        assert counters == operator.counters(name)
        client.disconnect()
    wait_until(lambda: operator.counters(name).get("terminated") == 1, "the end of the first instance")
    with lasting(node, client_id, 4) as client, connected(node) as publisher:
        again = take(client, WINDOW)
        assert (numbers(held), {True}) == (numbers(again), {message.dup for message in again})
        subscribe(client, "faulty")
        rest: list[Packet] = []
        while Counter(message.topic for message in rest)["t"] < 200 - 51 - WINDOW:
            rest += take(client, 1)
        assert list(range(51 + WINDOW, 200)) == numbers(message for message in rest if message.topic == "t")
        wait_until(lambda: operator.counted(f"{name}-faulty", "failed") >= 1, "the failure is counted in /metrics")
        ack_all(client, unsubscribe(client, "faulty"))
        subscribe(client, "rows/u/1000")
        held = take(client, WINDOW, ack=False)
        operator.unload(name)
        ack_all(client, held)
        publisher.publish("live", b"live", 1)
        assert [] == take_until(client, b"live"), "nothing of a source that is gone"


# --- idle ---------------------------------------------------------------------------------------------------------


def test_idle_subscribers_cost_no_cpu(node: NodeProcess, operator: Operator) -> None:
    """Hundreds of clients that wait for queues and streams leave the node asleep: nobody polls for them."""
    queue, stream = unique("idle"), unique("idle")
    operator.create("queues", queue, topics=[f"{queue}/#"])
    operator.create("streams", stream, topics=[f"{stream}/#"])
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
