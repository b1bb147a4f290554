"""`$queue/{name}`: many consumers, each message to one of them, until somebody has acknowledged it.

Everything is looked at from outside, on each store; nodes are shared by the tests, queues are not.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    FILTER_INVALID,
    QUOTA_EXCEEDED,
    SHARED_NOT_SUPPORTED,
    ack_all,
    ask,
    connected,
    fill,
    gather,
    lasting,
    numbers,
    payloads,
    receive_maximum,
    settled,
    subscribe,
    take,
    take_until,
    unique,
    unsubscribe,
    user,
)
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    REASON_STRING,
    RESPONSE_TOPIC,
    SUBSCRIPTION_ID,
    USER_PROPERTY,
    acknowledge,
    both_versions,
    let_pass,
)
from tests.support.kept import Queue, assert_refused, sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, prop, publish_packet

REFUSED = 0x83  #: implementation specific error: the consumer cannot do it
WINDOW = 32


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), "[store]\nsweep_interval = 0.2\n") as running:
        yield running


@pytest.fixture
def queue(node: NodeProcess, desk: Operator) -> Callable[..., Queue]:
    def make(**options: Any) -> Queue:
        return Queue(node, desk, unique("q"), **options)

    return make


Make = Callable[..., Queue]


@pytest.fixture
def consumer(node: NodeProcess) -> Iterator[Callable[..., Client]]:
    """`consumer(queue)`: a client that is subscribed to it."""
    with ExitStack() as stack:

        def make(
            queue: Queue | None, version: int = 5, qos: int = 1, client_id: str = "", properties: tuple[bytes, ...] = ()
        ) -> Client:
            client = stack.enter_context(connected(node, client_id, version, *properties))
            if queue is not None:
                subscribe(client, queue.filter, qos)
            return client

        yield make


Consume = Callable[..., Client]


def assert_empty(queue: Queue, *consumers: Client) -> None:
    """Nobody has anything more to get: a last message comes next, to one of them."""
    wait_until(lambda: queue.stored() == [], "the queue is empty")
    for client in consumers:
        assert [] == settled(client)


# --- one of them gets it ------------------------------------------------------------------------------------------


@both_versions
def test_what_is_stored_waits_for_a_consumer(queue: Make, consumer: Consume, version: int) -> None:
    """In order, with its topic, at QoS 1; once it is acknowledged it is gone for everybody."""
    jobs = queue()
    jobs.put_numbers(300)
    first = consumer(jobs, version)
    messages = take(first, 300)
    assert list(range(300)) == numbers(messages)
    assert {(f"{jobs.name}/a", 1, False, False)} == {(m.topic, m.qos, m.retain, m.dup) for m in messages}
    settled(first)
    wait_until(lambda: jobs.stored() == [], "what is acknowledged is removed")
    second = consumer(jobs, version)
    first.close()
    jobs.put(b"new")
    assert [] == take_until(second, b"new")


def test_messages_keep_their_properties_and_are_routed_too(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    """Consumers get all of them, with the identifier of their subscription; live subscribers get theirs."""
    jobs = queue()
    properties = [
        (PAYLOAD_FORMAT, 1),
        (CONTENT_TYPE, "text/plain"),
        (RESPONSE_TOPIC, "answer/here"),
        (CORRELATION_DATA, bytes(range(256))),
        (USER_PROPERTY, ("a", "1")),
        (USER_PROPERTY, ("a", "2")),
    ]
    worker, live = consumer(None), consumer(None)
    subscribe(worker, jobs.filter, 1, prop(SUBSCRIPTION_ID, 4711))
    subscribe(live, f"{jobs.name}/#", 2)
    jobs.put("grün".encode(), properties=b"".join(prop(key, value) for key, value in properties))
    message = take(worker, 1)[0]
    assert [(SUBSCRIPTION_ID, 4711)] == [pair for pair in message.properties if pair not in properties]
    assert [value for key, value in properties if key == USER_PROPERTY] == message.prop_all(USER_PROPERTY)
    assert ("grün".encode(), f"{jobs.name}/a") == (message.payload, message.topic)
    message = live.receive()
    assert ("grün".encode(), 1) == (message.payload, message.qos)
    assert None is message.prop(SUBSCRIPTION_ID)


def test_all_payloads_come_out_as_they_went_in(queue: Make, consumer: Consume) -> None:
    """All byte values, nothing at all, and a large one."""
    jobs = queue()
    sent = [bytes(range(256)), b"", b"\0" * 100_000, b"{}"]
    jobs.put(*sent)
    assert sent == payloads(take(consumer(jobs), 4))


@both_versions
def test_a_queue_takes_every_qos_and_gives_at_most_qos_1(
    node: NodeProcess, queue: Make, consumer: Consume, version: int
) -> None:
    """QoS 2 is granted as 1; a message published with QoS 0 is stored too."""
    jobs = queue()
    worker = consumer(None, version)
    assert [1] == ask(worker, jobs.filter, 2).reasons
    with connected(node, "", version) as publisher:
        for qos in (0, 1, 2):
            publisher.publish(f"{jobs.name}/a", b"%d" % qos, qos)
    messages = take(worker, 3)
    assert ([0, 1, 2], {1}) == (numbers(messages), {message.qos for message in messages})


@both_versions
def test_a_consumer_of_qos_0_takes_without_acknowledging(queue: Make, consumer: Consume, version: int) -> None:
    """What was written to it counts as taken."""
    jobs = queue()
    jobs.put_numbers(500)
    worker = consumer(jobs, version, 0)
    messages = take(worker, 500)
    assert (list(range(500)), {0}) == (numbers(messages), {message.qos for message in messages})
    wait_until(lambda: jobs.stored() == [], "it is taken")


@both_versions
def test_round_robin(queue: Make, consumer: Consume, version: int) -> None:
    """Three who are equally quick get a third each."""
    jobs = queue(strategy="round_robin")
    workers = [consumer(jobs, version) for _ in range(3)]
    jobs.put_numbers(30)
    shares = [numbers(take(worker, 10)) for worker in workers]
    assert list(range(30)) == sorted(itertools.chain(*shares))
    assert all(share == sorted(share) for share in shares)
    assert_empty(jobs, *workers)


def test_round_robin_passes_over_those_who_have_no_room(queue: Make, consumer: Consume) -> None:
    """One that does not acknowledge keeps what its window holds; the others get everything else."""
    jobs = queue(ack_timeout=0)
    stuck = consumer(jobs, properties=(receive_maximum(3),))
    quick = consumer(jobs)
    jobs.put_numbers(100)
    held = take(stuck, 3, ack=False)
    rest = take(quick, 97)
    assert [] == settled(stuck)
    assert list(range(100)) == sorted(numbers(held + rest))


def test_random(queue: Make, consumer: Consume) -> None:
    """Each message to one of them, and nobody gets all."""
    jobs = queue(strategy="random")
    workers = [consumer(jobs) for _ in range(2)]
    jobs.put_numbers(200)
    shares = gather(workers, 200)
    assert list(range(200)) == sorted(numbers(shares[0] + shares[1]))
    assert shares[0] and shares[1]


def test_least_inflight(queue: Make, consumer: Consume) -> None:
    """Who has fewer unacknowledged messages gets the next one."""
    jobs = queue(strategy="least_inflight", ack_timeout=0)
    slow, quick = consumer(jobs), consumer(jobs)
    jobs.put_numbers(2)
    held = take(slow, 1, ack=False)
    seen = take(quick, 1)
    for number in range(2, 22):
        settled(quick)
        jobs.put(b"%d" % number)
        seen += take(quick, 1)
    assert [] == settled(slow)
    assert list(range(22)) == sorted(numbers(held + seen))


def test_several_filters_and_one_message(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    """A message that matches two of them is stored once; what matches none is not."""
    name = unique("f")
    jobs = queue(topics=[f"{name}/+/x", f"{name}/#", f"other/{name}"])
    fill(node, [(f"{name}/1/x", b"0"), (f"other/{name}", b"1"), (f"other/{name}/2", b"no"), (name, b"2")])
    worker = consumer(jobs)
    assert [0, 1, 2] == numbers(take(worker, 3))
    assert_empty(jobs, worker)


def test_topics_with_a_dollar_are_not_meant_by_wildcards(node: NodeProcess, desk: Operator, consumer: Consume) -> None:
    """`#` is everything but `$…`; figures of the node reach a queue only if it says so."""
    everything = Queue(node, desk, unique("all"), topics=["#", "+/+"])
    try:
        fill(node, [(unique("t"), b"x")])
        wait_until(lambda: b"x" in everything.stored(), "it takes everything")
        topics = {message["topic"] for message in desk.read("queues", everything.name, limit=1000)}
        assert not [topic for topic in topics if topic.startswith("$")]
    finally:
        desk.delete("queues", everything.name)


# --- again --------------------------------------------------------------------------------------------------------


def test_a_refused_message_goes_to_another(queue: Make, consumer: Consume) -> None:
    """An error code in PUBACK says: not me."""
    jobs = queue(redispatch_delay=60)  # nobody waits for this where there is another
    picky, other = consumer(jobs), consumer(jobs)
    jobs.put_numbers(10)
    ack_all(picky, take(picky, 5, ack=False), reason=REFUSED)
    assert list(range(10)) == sorted(numbers(take(other, 10)))
    assert [] == settled(picky)
    assert_empty(jobs)


def test_a_refused_message_comes_again_if_there_is_nobody_else(queue: Make, consumer: Consume) -> None:
    """After a moment, to the same consumer; not with DUP, for it is a new delivery."""
    jobs = queue()
    jobs.put(b"once more")
    worker = consumer(jobs)
    ack_all(worker, take(worker, 1, ack=False), reason=REFUSED)
    message = take(worker, 1)[0]
    assert b"once more" == message.payload
    assert_empty(jobs, worker)


def test_silence_is_a_refusal_too(queue: Make, consumer: Consume) -> None:
    """After `ack_timeout` another gets it; a late acknowledgement harms nobody."""
    jobs = queue(ack_timeout=0.3)
    silent = consumer(jobs)
    jobs.put(b"x")
    held = take(silent, 1, ack=False)
    other = consumer(jobs)
    assert [b"x"] == payloads(take(other, 1))
    ack_all(silent, held)
    assert_empty(jobs, silent, other)
    jobs.put(b"1", b"2")
    assert {b"1", b"2"} == {*payloads(take(silent, 1)), *payloads(take(other, 1))}


def test_what_another_has_done_meanwhile_does_not_come_late(queue: Make, consumer: Consume) -> None:
    """Of messages that timed out nothing is left with the silent consumer: it acknowledges, and gets new ones only."""
    jobs = queue(ack_timeout=0.3)
    silent = consumer(jobs, properties=(receive_maximum(3),))
    jobs.put_numbers(50)
    held = take(silent, 3, ack=False)
    other = consumer(jobs)
    seen: set[int] = set()
    while len(seen) < 50:  # what this machine acknowledges too late comes twice
        seen |= set(numbers(take(other, 1)))
    assert set(range(50)) == seen
    wait_until(lambda: jobs.stored() == [], "the other has done everything")
    ack_all(silent, held)
    other.close()
    jobs.put(b"new")
    assert [] == take_until(silent, b"new")


@both_versions
@pytest.mark.parametrize("how", ["disconnect", "abort", "unsubscribe"])
def test_who_leaves_leaves_its_messages_to_others(queue: Make, consumer: Consume, version: int, how: str) -> None:
    """What it had and did not acknowledge comes to another, before what stands behind."""
    jobs = queue(ack_timeout=0)
    jobs.put_numbers(100)
    leaving = consumer(jobs, version)
    take(leaving, 10)
    held = settled(leaving)
    held += take(leaving, WINDOW - len(held), ack=False)
    if how == "unsubscribe":
        unsubscribe(leaving, jobs.filter)
        ack_all(leaving, held[:2])  # the client may do so; they were in flight
    elif how == "abort":
        leaving.abort()
    else:
        leaving.disconnect()
    other = consumer(jobs, version)
    seen = set(range(10)) | (set(numbers(held[:2])) if how == "unsubscribe" else set())
    while not set(range(100)) <= seen:
        seen |= set(numbers(take(other, 1)))
    assert_empty(jobs, other)


def test_a_session_that_is_away_gets_nothing(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    """The others get everything; when it is back it takes part again, without subscribing."""
    jobs = queue()
    name = unique("away")
    with lasting(node, name) as leaving:
        subscribe(leaving, jobs.filter)
        jobs.put(b"held")
        assert [b"held"] == payloads(take(leaving, 1, ack=False))
        leaving.disconnect()
    jobs.put_numbers(20)
    other = consumer(jobs)
    assert [b"held", *(b"%d" % number for number in range(20))] == payloads(take(other, 21))
    settled(other)
    with lasting(node, name) as back:
        assert back.connack is not None and back.connack.session_present
        assert [] == settled(back)
        jobs.put_numbers(10)
        assert 5 == len(take(back, 5)) == len(take(other, 5))


@both_versions
def test_a_session_that_was_away_goes_on_alone(node: NodeProcess, queue: Make, version: int) -> None:
    """What it held when the connection broke comes to it again, and nothing is lost or comes after its PUBACK."""
    jobs = queue(ack_timeout=0)
    jobs.put_numbers(200)
    name = unique("alone")
    done: list[int] = []
    with lasting(node, name, version) as first:
        subscribe(first, jobs.filter)
        done += numbers(take(first, 50))
        take(first, WINDOW, ack=False)
        settled(first)
        first.abort()
    with lasting(node, name, version) as second:
        rest = take(second, 150)
        assert list(range(200)) == sorted(done + numbers(rest))
        assert_empty(jobs, second)


def test_a_take_over_loses_nothing(node: NodeProcess, queue: Make) -> None:
    """The new connection gets what the old one held; acknowledged there, it is gone."""
    jobs = queue(ack_timeout=0)
    jobs.put_numbers(100)
    name = unique("taken")
    with lasting(node, name) as old:
        subscribe(old, jobs.filter)
        take(old, 20)
        take(old, WINDOW, ack=False)
        settled(old)
        with lasting(node, name) as new:
            assert list(range(20, 100)) == sorted(numbers(take(new, 80)))
            assert_empty(jobs, new)


# --- in the end ---------------------------------------------------------------------------------------------------


def test_after_too_many_attempts_a_message_becomes_a_dead_letter(
    desk: Operator, queue: Make, consumer: Consume
) -> None:
    """With its topic, payload and properties, and the history of what was tried; the next one is not held up."""
    dead = queue(topics=[])
    jobs = queue(max_attempts=3, dead_letter=dead.name, redispatch_delay=0.01)
    client_id = unique("refuser")
    worker = consumer(jobs, client_id=client_id)
    jobs.put(b"poison", properties=user("trace", "7"))
    for _ in range(3):
        ack_all(worker, take(worker, 1, ack=False), reason=REFUSED)
    jobs.put(b"good")
    assert [] == take_until(worker, b"good"), "three attempts, and no fourth"
    wait_until(lambda: dead.stored() == [b"poison"], "the dead letter")
    [letter] = desk.read("queues", dead.name)
    assert f"{jobs.name}/a" == letter["topic"]
    assert "3" == letter["properties"]["attempts"]
    assert client_id in letter["properties"]["history"], "who was tried"
    undertaker = consumer(dead)
    message = take(undertaker, 1)[0]
    assert (f"{jobs.name}/a", b"poison") == (message.topic, message.payload)
    assert ("trace", "7") in message.prop_all(USER_PROPERTY)
    assert_empty(jobs, worker)


def test_without_a_place_for_dead_letters_they_are_dropped_and_counted(
    desk: Operator, queue: Make, consumer: Consume
) -> None:
    jobs = queue(max_attempts=2, redispatch_delay=0.01)
    worker = consumer(jobs)
    before = desk.counted("queues", "dead")
    jobs.put(b"poison")
    for _ in range(2):
        ack_all(worker, take(worker, 1, ack=False), reason=REFUSED)
    wait_until(lambda: jobs.stored() == [], "it is dropped")
    assert desk.counted("queues", "dead") > before
    jobs.put(b"good")
    assert [] == take_until(worker, b"good")


def test_without_a_bound_it_is_tried_for_ever(queue: Make, consumer: Consume) -> None:
    jobs = queue(max_attempts=0, redispatch_delay=0)
    worker = consumer(jobs)
    jobs.put(b"stubborn")
    for _ in range(30):
        ack_all(worker, take(worker, 1, ack=False), reason=REFUSED)
    assert [b"stubborn"] == payloads(take(worker, 1))
    assert_empty(jobs, worker)


def test_disconnects_count_as_attempts(node: NodeProcess, queue: Make) -> None:
    """A message that kills its consumers ends as a dead letter, too."""
    dead = queue(topics=[])
    jobs = queue(max_attempts=2, dead_letter=dead.name)
    jobs.put(b"killer")
    for _ in range(2):
        with connected(node) as victim:
            subscribe(victim, jobs.filter)
            assert [b"killer"] == payloads(take(victim, 1, ack=False))
            victim.abort()
    wait_until(lambda: dead.stored() == [b"killer"], "the dead letter")


# --- what comes first, what is kept -------------------------------------------------------------------------------


def test_priorities(queue: Make, consumer: Consume) -> None:
    """Higher first, in order among equals; levels beyond the highest count as it, nonsense as none."""
    jobs = queue(priorities=3)
    for payload, priority in [("low1", "0"), ("mid", "1"), ("top1", "2"), ("low2", ""), ("top2", "9"), ("low3", "x")]:
        jobs.put(payload.encode(), properties=user("priority", priority) if priority else user("other", "1"))
    seen = payloads(take(consumer(jobs), 6))
    assert [b"top1", b"top2", b"mid", b"low1", b"low2", b"low3"] == seen


def test_without_levels_priority_means_nothing(queue: Make, consumer: Consume) -> None:
    jobs = queue()
    jobs.put(b"1", properties=user("priority", "0"))
    jobs.put(b"2", properties=user("priority", "9"))
    assert [b"1", b"2"] == payloads(take(consumer(jobs), 2))


def test_a_full_queue_refuses(node: NodeProcess, desk: Operator, queue: Make, consumer: Consume) -> None:
    """MQTT 5 hears why, MQTT 3 is disconnected, QoS 0 is dropped and counted; taking one makes room."""
    jobs = queue(max_messages=5)
    jobs.put_numbers(5)
    topic = f"{jobs.name}/a"
    with connected(node) as publisher, connected(node, "", 4) as old, connected(node) as careless:
        for qos in (1, 2):
            answer = publisher.publish(topic, b"6", qos)
            assert answer is not None and QUOTA_EXCEEDED == answer.reason
        old.send(publish(topic, b"6"))
        assert [] == old.expect_closed()
        before = desk.counted("queues")
        careless.publish(topic, b"6")
        assert [] == settled(careless)
        wait_until(lambda: desk.counted("queues") > before, "what is dropped is counted")
        assert [b"%d" % number for number in range(5)] == jobs.stored()
        worker = consumer(jobs, properties=(receive_maximum(1),))
        take(worker, 1)
        wait_until(lambda: len(jobs.stored()) == 4, "one is taken")
        answer = publisher.publish(topic, b"5", 1)
        assert answer is not None and (answer.reason or 0) < 0x80
    assert [1, 2, 3, 4, 5] == numbers(take(worker, 5))


def publish(topic: str, payload: bytes) -> bytes:
    return publish_packet(topic, payload, version=4, qos=1, packet_id=7)


def test_a_full_queue_drops_the_oldest_if_it_is_told_to(desk: Operator, queue: Make, consumer: Consume) -> None:
    jobs = queue(max_messages=5, overflow="drop_oldest")
    before = desk.counted("queues")
    jobs.put_numbers(8)
    assert [3, 4, 5, 6, 7] == numbers(take(consumer(jobs), 5))
    assert desk.counted("queues") > before


def test_bytes_are_bounded_too(node: NodeProcess, queue: Make) -> None:
    jobs = queue(max_bytes=100_000)
    with connected(node) as publisher:
        reasons = []
        for _ in range(20):
            answer = publisher.publish(f"{jobs.name}/a", b"x" * 20_000, 1)
            assert answer is not None
            reasons.append(answer.reason)
    assert 3 <= len(jobs.stored()) <= 5
    assert QUOTA_EXCEEDED == reasons[-1]


def test_what_is_too_old_is_not_delivered(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    """After the retention of the queue, or the message's own expiry, whichever ends first."""
    jobs, short = queue(), queue(retention=1)
    jobs.put(b"expires", properties=prop(MESSAGE_EXPIRY, 1))
    jobs.put(b"lasts", properties=prop(MESSAGE_EXPIRY, 1000))
    short.put(b"old")
    let_pass(1.5)
    message = take(consumer(jobs), 1)[0]
    assert b"lasts" == message.payload
    assert 900 < message.prop(MESSAGE_EXPIRY) < 1000, "what is left of its time"
    worker = consumer(short)  # it is there first: the new message does not wait for it
    short.put(b"new")
    assert [b"new"] == payloads(take(worker, 1))


# --- the last value counts ----------------------------------------------------------------------------------------


def test_last_value_by_topic(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    """Of a hundred messages on ten topics the last ten are left, in the order of their publication."""
    jobs = queue(kind="last_value")
    fill(node, [(f"{jobs.name}/{number % 10}", b"%d" % number) for number in range(100)])
    worker = consumer(jobs)
    assert list(range(90, 100)) == numbers(take(worker, 10))
    assert_empty(jobs, worker)


def test_last_value_by_publisher(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    jobs = queue(kind="last_value", key="publisher")
    with connected(node, unique("a")) as anna, connected(node, unique("b")) as berta:
        for number in range(3):
            anna.publish(f"{jobs.name}/{number}", b"anna %d" % number, 1)
            berta.publish(f"{jobs.name}/{number}", b"berta %d" % number, 1)
    assert [b"anna 2", b"berta 2"] == payloads(take(consumer(jobs), 2))


def test_last_value_by_property(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    jobs = queue(kind="last_value", key="property:vin")
    for number, vin in enumerate("ABABC"):
        jobs.put(b"%s %d" % (vin.encode(), number), properties=user("vin", vin))
    assert [b"A 2", b"B 3", b"C 4"] == payloads(take(consumer(jobs), 3))


def test_a_newer_value_comes_after_the_one_in_flight(node: NodeProcess, queue: Make, consumer: Consume) -> None:
    """Acknowledging the old one does not take the new one away."""
    jobs = queue(kind="last_value", ack_timeout=0)
    worker = consumer(jobs)
    jobs.put(b"old")
    held = take(worker, 1, ack=False)
    jobs.put(b"newer")
    jobs.put(b"newest")
    ack_all(worker, held)
    seen = payloads(take(worker, 1))
    if seen == [b"newer"]:  # it was on its way before the newest came
        seen = payloads(take(worker, 1))
    assert [b"newest"] == seen
    assert_empty(jobs, worker)


# --- names --------------------------------------------------------------------------------------------------------


@both_versions
def test_a_queue_that_is_not_there_yet(node: NodeProcess, desk: Operator, version: int) -> None:
    """Subscribing is granted, with a word about it; when it is declared, its messages come."""
    name = unique("later")
    with connected(node, "", version) as worker:
        answer = subscribe(worker, f"$queue/{name}")
        if version == 5:
            assert name in str(answer.prop(REASON_STRING))
        fill(node, [(f"{name}/a", b"too early")])
        later = Queue(node, desk, name)
        later.put(b"now")
        assert [b"now"] == payloads(take(worker, 1))


def test_deleted_and_made_again(node: NodeProcess, desk: Operator, queue: Make, consumer: Consume) -> None:
    """What was in it is gone; its consumers work for the new one without doing anything."""
    jobs = queue(ack_timeout=0)
    worker = consumer(jobs, properties=(receive_maximum(2),))
    jobs.put_numbers(10)
    held = take(worker, 2, ack=False)
    desk.delete("queues", jobs.name)
    assert jobs.name not in desk.names("queues")
    ack_all(worker, held)
    again = Queue(node, desk, jobs.name)
    assert [] == again.stored()
    again.put(b"new")
    assert [] == take_until(worker, b"new")


def test_options_change_under_consumers(node: NodeProcess, desk: Operator, queue: Make, consumer: Consume) -> None:
    """Other topics, from now on; what is in the queue stays."""
    jobs = queue()
    jobs.put(b"before")
    desk.change("queues", jobs.name, topics=[f"other/{jobs.name}"])
    jobs.put(b"not any more")
    fill(node, [(f"other/{jobs.name}", b"after")])
    assert [b"before", b"after"] == payloads(take(consumer(jobs), 2))


@both_versions
@pytest.mark.parametrize(
    "name", ["", "-x", ".x", "a b", "a/b", "+", "#", "x/#", "ü", "x" * 65], ids=lambda name: repr(name)[:12]
)
def test_a_bad_name_is_refused(node: NodeProcess, name: str, version: int) -> None:
    """In the SUBACK, with the reason; the connection stays."""
    with connected(node, "", version) as client:
        assert_refused(client, f"$queue/{name}", FILTER_INVALID)


@both_versions
def test_a_queue_is_not_shared_twice(node: NodeProcess, queue: Make, version: int) -> None:
    """Its consumers share it already: `$share` before it is refused."""
    jobs = queue()
    with connected(node, "", version) as client:
        assert_refused(client, f"$share/g/{jobs.filter}", SHARED_NOT_SUPPORTED)


@both_versions
def test_nobody_publishes_to_a_queue_by_its_name(node: NodeProcess, queue: Make, version: int) -> None:
    jobs = queue()
    with connected(node, "", version) as client:
        jobs.assert_nobody_publishes_to_it(client)


# --- many ---------------------------------------------------------------------------------------------------------


def test_many_consumers_publishers_and_accidents(node: NodeProcess, queue: Make) -> None:
    """Consumers come, refuse, and vanish while messages come in; at the end each message was acknowledged by one."""
    jobs = queue(redispatch_delay=0.01, max_attempts=0, ack_timeout=0)
    total = 600
    done: Counter[int] = Counter()
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while sum(1 for _ in done) < total:
                with connected(node, "", 4 + number % 2) as client:
                    subscribe(client, jobs.filter)
                    for turn in range(60):
                        try:
                            message = client.recv(0.2)
                        except TimeoutError:
                            break
                        if (turn + number) % 10 == 9 and client.version == 5:
                            ack_all(client, [message], reason=REFUSED)
                            continue
                        acknowledge(client, message)
                        with lock:
                            done[int(message.payload)] += 1
                    settled(client)  # the node has read all acknowledgements; what came is left to others
                    client.abort()
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    jobs.put_numbers(total)
    for thread in threads:
        thread.join(60)
    assert [] == errors
    assert set(range(total)) == set(done)
    assert set(done.values()) == {1}, "acknowledged, and delivered again"
    assert_empty(jobs)
