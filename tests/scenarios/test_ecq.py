"""`$ECQ/{CLIENTID}/#`: the last value of each key for one consumer, in order, with progress that is remembered.

Everything is looked at from outside, on each engine; nodes are shared by the tests, queues and client ids are not.
Other files named `test_ecq_…` have the shared form, rewinding, limits, operators, and what outlives the node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.compacted import Compacted
from tests.support.consumers import (
    FILTER_INVALID,
    SHARED_NOT_SUPPORTED,
    TOPIC_INVALID,
    ack_all,
    ask,
    assert_full,
    connected,
    fill,
    gather,
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
    user_property,
)
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MAXIMUM_PACKET_SIZE,
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
from tests.support.kept import sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import (
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUBACK,
    Client,
    Packet,
    Will,
    ack_packet,
    prop,
    publish_packet,
    subscribe_packet,
)

WINDOW = 32
NOT_AUTHORIZED = 0x87
REFUSED = 0x83  #: implementation specific error: the consumer cannot do it

ATTEMPTS = 3

CONFIG = f"""
[plugins.ecq]
max_attempts = {ATTEMPTS}
retry_delay = 0.05
heartbeat = 0.2
"""

#: `behind/{queue}/{another}`: the first message of one queue is in the other one too, and nobody was told.
BEHIND = """
from motorcade.extension.plugin import Plugin, hook
from motorcade.storage.ports import Draft


class Behind(Plugin):
    @hook("message.publish", topics=["behind/+/+"])
    async def copy(self, client, message):
        _, source, target = message.topic.split("/")
        mailboxes, now = self.context.store.mailboxes, self.context.hub.now()
        (entry,) = await mailboxes.read(f"ecq:{source}", 0, 1, now)
        await mailboxes.append([f"ecq:{target}"], Draft(entry.body, entry.payload, entry.key), now)
"""


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), CONFIG) as running:
        yield running


@pytest.fixture
def queue(node: NodeProcess) -> Compacted:
    """Of a client that no other test uses."""
    return Compacted(node, unique("car"))


def last(queue: Compacted, client: Client, word: bytes = b"end") -> list[Packet]:
    """What comes to a consumer before a message that is appended now."""
    queue.put(("the-last", word))
    return take_until(client, word)


# --- appending and consuming --------------------------------------------------------------------------------------


@both_versions
def test_realtime_forwarding(queue: Compacted, node: NodeProcess, version: int) -> None:
    """The consumer is online: each message comes at once, whatever the QoS of its producer, with QoS 1."""
    with queue.consumer(version) as client:
        seen = []
        for producer_version in (4, 5):
            with connected(node, "", producer_version) as producer:
                for qos in (0, 1, 2):
                    producer.publish(queue.write(f"{producer_version}/{qos}"), b"%d" % qos, qos)
                    seen += take(client, 1)
    keys = ["4/0", "4/1", "4/2", "5/0", "5/1", "5/2"]
    assert [queue.read(key) for key in keys] == [message.topic for message in seen]
    assert [(b"%d" % (number % 3), 1, False, False) for number in range(6)] == [
        (message.payload, message.qos, message.retain, message.dup) for message in seen
    ]
    if version == 5:
        assert [1, 2, 3, 4, 5, 6] == queue.numbers(seen)


@both_versions
def test_reactive_forwarding(queue: Compacted, version: int) -> None:
    """The consumer is away: messages wait, and come in the order of their numbers when it subscribes."""
    queue.put_numbers(100)
    with queue.consumer(version) as client:
        seen = take(client, 100)
        assert list(range(100)) == numbers(seen)
        assert version < 5 or list(range(1, 101)) == queue.numbers(seen)
        queue.put(("live", b"100"))
        assert [b"100"] == payloads(take(client, 1)), "history passes into the present"


def test_one_value_for_each_key(queue: Compacted) -> None:
    """The key is everything after the client id, slashes too. A newer value takes the place of the older one."""
    keys = ["a", "a/b", "a/", "/a", "b", "ü/\U0001f697", "w", "#1"]
    queue.put(*((key.replace("#", "n"), b"%d" % turn) for turn in range(20) for key in keys))
    with queue.consumer() as client:
        seen = take(client, len(keys))
        assert [key.replace("#", "n") for key in keys] == queue.keys(seen)
        assert {b"19"} == set(payloads(seen))
        first = 19 * len(keys) + 1
        assert list(range(first, first + len(keys))) == queue.numbers(seen), "each value has a number of its own"
        assert [] == last(queue, client)


def test_the_order_is_that_of_the_last_values(queue: Compacted) -> None:
    queue.put(("a", b"1"), ("b", b"2"), ("c", b"3"), ("a", b"4"), ("b", b"5"), ("a", b"6"))
    with queue.consumer() as client:
        seen = take(client, 3)
        assert [("c", b"3"), ("b", b"5"), ("a", b"6")] == list(zip(queue.keys(seen), payloads(seen), strict=True))
        assert [3, 5, 6] == queue.numbers(seen)


def test_each_client_has_its_own_numbers(node: NodeProcess) -> None:
    """The same key in two queues is two keys."""
    first, second = (Compacted(node, unique("car")) for _ in range(2))
    first.put(("k", b"first"), ("l", b"x"))
    second.put(("k", b"second"))
    with first.consumer() as one, second.consumer() as two:
        assert ([b"first", b"x"], [b"second"]) == (payloads(mine := take(one, 2)), payloads(other := take(two, 1)))
        assert ([1, 2], [1]) == (first.numbers(mine), second.numbers(other))


def test_no_copy_by_ordinary_routing(queue: Compacted, node: NodeProcess) -> None:
    """Neither to its consumer nor to anybody who subscribes to everything; not as a retained message either."""
    with connected(node) as other, queue.consumer() as client, connected(node) as producer:
        for filter_ in ("#", "+/+/+/+", "+/w/#"):
            subscribe(other, filter_)
        subscribe(client, "#")
        producer.publish(queue.write("k"), b"x", 1, retain=True)
        producer.publish(f"mark/{queue.name}", b"mark", 1)
        assert [b"mark"] == payloads(take(other, 1))
        seen = last(queue, client)
        assert {queue.read("k"): False, f"mark/{queue.name}": False} == {one.topic: one.retain for one in seen}
        assert 2 == len(seen)
    with queue.consumer() as client:
        assert [] == last(queue, client, b"again"), "nothing was retained"


def test_what_a_producer_says_of_its_message(queue: Compacted, node: NodeProcess) -> None:
    """Its properties are those of the delivery; the number is the node's, whoever claims to know another one."""
    with connected(node) as producer, queue.consumer() as client:
        properties = [
            prop(PAYLOAD_FORMAT, 1),
            prop(CONTENT_TYPE, "text/plain"),
            prop(RESPONSE_TOPIC, "answers"),
            prop(CORRELATION_DATA, b"\x00\xff"),
            user("colour", "green"),
            user(queue.property, "4711"),
            user("colour", "red"),
        ]
        producer.publish(queue.write("k"), "grün".encode(), 1, properties=b"".join(properties))
        message = take(client, 1)[0]
        assert "grün".encode() == message.payload
        told = [message.prop(key) for key in (PAYLOAD_FORMAT, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION_DATA)]
        assert [1, "text/plain", "answers", b"\x00\xff"] == told
        pairs = message.prop_all(USER_PROPERTY)
        assert ["green", "red"] == [value for name, value in pairs if name == "colour"]
        assert "1" == user_property(message, queue.property)


def test_an_empty_payload_is_a_value(queue: Compacted) -> None:
    """It does not delete its key, as a retained message would."""
    queue.put(("k", b"x"), ("k", b""), ("l", b"y"))
    with queue.consumer() as client:
        seen = take(client, 2)
        assert ([b"", b"y"], [2, 3]) == (payloads(seen), queue.numbers(seen))


def test_a_message_that_has_expired(queue: Compacted) -> None:
    """It is not delivered, nor is the value that it has replaced."""
    queue.put(("k", b"old"))
    queue.put(("k", b"expires"), properties=prop(MESSAGE_EXPIRY, 1))
    queue.put(("l", b"lasts"), properties=prop(MESSAGE_EXPIRY, 1000))
    let_pass(1.2)
    with queue.consumer() as client:
        message = take(client, 1)[0]
        assert b"lasts" == message.payload
        assert 900 < message.prop(MESSAGE_EXPIRY) < 1000
        assert [] == last(queue, client)


def test_large_messages(queue: Compacted) -> None:
    """One that is larger than its consumer takes does not stop those behind it."""
    queue.put(("large", b"x" * 300_000), ("k", b"1"), ("l", b"2"))
    with queue.consumer(5, prop(MAXIMUM_PACKET_SIZE, 1000)) as client:
        assert [b"1", b"2"] == payloads(take(client, 2))
        assert [] == last(queue, client)
    queue.put(("large", b"y" * 300_000))
    with queue.consumer() as client:
        assert [b"y" * 300_000] == payloads(take(client, 1))


def test_subscription_identifiers(queue: Compacted, node: NodeProcess) -> None:
    with connected(node, queue.name) as client:
        subscribe(client, queue.filter, 1, prop(SUBSCRIPTION_ID, 77))
        queue.put(("k", b"x"))
        assert [77] == take(client, 1)[0].prop_all(SUBSCRIPTION_ID)


def test_a_message_of_qos_2_that_is_repeated(queue: Compacted, node: NodeProcess) -> None:
    """It is appended once; one of QoS 1 is a new message each time it comes."""
    with connected(node) as producer:
        for qos, answer in ((2, PUBREC), (1, PUBACK)):
            for repeated in (False, True):
                key = f"{qos}-{repeated}"  # the packet identifier tells, not what is in it
                producer.send(publish_packet(queue.write(key), b"x", qos=qos, packet_id=9, dup=repeated))
                assert 0 == (producer.expect(answer).reason or 0)
            if qos == 2:
                producer.send(ack_packet(PUBREL, 9))
                producer.expect(PUBCOMP)
    with queue.consumer() as client:
        seen = take(client, 3)
        assert (["2-False", "1-False", "1-True"], [1, 2, 3]) == (queue.keys(seen), queue.numbers(seen))


def test_a_will_is_appended(queue: Compacted, node: NodeProcess) -> None:
    """Who publishes it does not matter."""
    with queue.consumer() as client:
        producer = connected(node, "", will=Will(queue.write("state"), b"lost", 1))
        producer.publish(queue.write("state"), b"here", 1)
        producer.abort()
        seen = take(client, 2)
        assert ([b"here", b"lost"], [1, 2]) == (payloads(seen), queue.numbers(seen))


def test_live_messages_come_beside_it(queue: Compacted, node: NodeProcess) -> None:
    """A consumer's other subscriptions go on while it has a long queue to consume."""
    queue.put_numbers(500)
    with connected(node, queue.name) as client:
        subscribe(client, f"live/{queue.name}")
        subscribe(client, queue.filter)
        take(client, 100)
        fill(node, [(f"live/{queue.name}", b"live")])
        seen = payloads(take(client, 401))
        assert [b"%d" % number for number in range(100, 500)] == [word for word in seen if word != b"live"]
        assert seen.index(b"live") < 300, "it need not wait for the whole queue"


# --- several in flight, and progress ------------------------------------------------------------------------------


@both_versions
def test_several_in_flight(queue: Compacted, version: int) -> None:
    """Up to the window, and each acknowledgement makes room for the next: no batch has to be complete."""
    queue.put_numbers(100)
    room = 10 if version == 5 else WINDOW
    with queue.consumer(version, receive_maximum(10)) as client:
        held = take(client, room, ack=False)
        queue.put_numbers(1, 100)
        assert_full(client)
        acknowledge(client, held[3])
        held += take(client, 1, ack=False)
        assert_full(client)
        ack_all(client, held[:3] + held[4:])
        assert list(range(room + 1, 101)) == numbers(take(client, 100 - room))


@both_versions
def test_what_was_acknowledged_does_not_come_again(queue: Compacted, version: int) -> None:
    """After a reconnect with a new session, and after it has subscribed again."""
    queue.put_numbers(100)
    with queue.consumer(version) as client:
        take(client, 40)
        settled(client)
        client.disconnect()
    queue.put_numbers(10, 100)
    with queue.consumer(version) as client:
        assert list(range(40, 110)) == numbers(take(client, 70))
        settled(client)
        unsubscribe(client, queue.filter)
        queue.put_numbers(1, 110)
        assert [] == settled(client), "it does not consume now"
        subscribe(client, queue.filter)
        assert [b"110"] == payloads(take(client, 1))
        client.abort()
    with queue.consumer(version) as client:
        assert [] == last(queue, client), "neither after a connection that was lost"


def test_progress_never_passes_what_is_not_acknowledged(queue: Compacted) -> None:
    queue.put_numbers(20)
    with queue.consumer() as client:
        messages = take(client, 20, ack=False)
        ack_all(client, messages[:5] + messages[6:])
        settled(client)
        client.disconnect()
    with queue.consumer() as client:
        assert b"5" == take(client, 1)[0].payload


def test_acknowledgements_in_any_order(queue: Compacted) -> None:
    """The last one counts as little as the others: progress is not taken back."""
    queue.put_numbers(20)
    with queue.consumer() as client:
        ack_all(client, reversed(take(client, 20, ack=False)))
        settled(client)
        client.abort()
    with queue.consumer() as client:
        assert [] == last(queue, client)


@both_versions
@pytest.mark.parametrize("leave", ["disconnect", "abort"])
def test_a_session_that_lasts_is_resumed(queue: Compacted, version: int, leave: str) -> None:
    """It need not subscribe again: what was in flight comes, then what was appended meanwhile, each once."""
    queue.put_numbers(50)
    with queue.sleeper(version) as client:
        take(client, 10)
        take(client, 5, ack=False)
        settled(client)
        getattr(client, leave)()
    queue.put_numbers(100, 50)
    with queue.sleeper(version) as client:
        assert client.connack is not None and client.connack.session_present
        assert list(range(10, 150)) == numbers(take(client, 140))
        assert [] == last(queue, client), "the session has no copies of its own"


@both_versions
@pytest.mark.parametrize("session", ["lasting", "new"])
def test_a_newer_value_takes_the_place_of_what_was_in_flight(queue: Compacted, version: int, session: str) -> None:
    """When the connection ends: the old value is never given again."""
    come = queue.sleeper if session == "lasting" else queue.consumer
    queue.put(("a", b"1"), ("b", b"2"), ("c", b"3"))
    with come(version) as client:
        take(client, 3, ack=False)
        client.abort()
    queue.put(("b", b"4"))
    with come(version) as client:
        assert [b"1", b"3", b"4"] == payloads(take(client, 3))
        assert [] == last(queue, client)


@pytest.mark.parametrize("first", [0, 1])
def test_two_values_of_a_key_in_flight(queue: Compacted, first: int) -> None:
    """The newer one comes though the older one is not acknowledged; then both have to be."""
    queue.put(("k", b"1"))
    with queue.consumer() as client:
        held = take(client, 1, ack=False)
        queue.put(("k", b"2"))
        held += take(client, 1, ack=False)
        assert [b"1", b"2"] == payloads(held)
        acknowledge(client, held[first])
        settled(client)
        client.abort()
    with queue.consumer() as client:
        again = last(queue, client)
        assert ([b"2"] if first == 0 else []) == payloads(again), "the older value is gone, and holds up nothing"


def test_a_refused_message_comes_again(queue: Compacted) -> None:
    """A PUBACK with an error is no acknowledgement. Others do not wait for it; progress does."""
    queue.put_numbers(3)
    with queue.consumer() as client:
        held = take(client, 3, ack=False)
        ack_all(client, held[:1], reason=REFUSED)
        ack_all(client, held[1:])
        again = take(client, 1)
        assert ([b"0"], [1]) == (payloads(again), queue.numbers(again))
        assert [] == last(queue, client)


def test_a_message_that_is_refused_for_good(node: NodeProcess, queue: Compacted) -> None:
    """After `max_attempts` it is passed over, so that progress goes on; it is still there for who goes back."""
    queue.put_numbers(3)
    with queue.consumer() as client:
        held = take(client, 3, ack=False)
        ack_all(client, held[1:])
        for _ in range(ATTEMPTS - 1):
            ack_all(client, held[:1], reason=REFUSED)
            held = take(client, 1, ack=False)
            assert [b"0"] == payloads(held)
        ack_all(client, held, reason=REFUSED)
        assert [] == last(queue, client)
        settled(client)
        client.disconnect()
    with queue.consumer() as client:
        assert [] == last(queue, client, b"again")
        client.publish(queue.rewind, b"1", 1)
        assert b"0" == take(client, 1)[0].payload


def test_a_refused_message_that_is_out_of_date(queue: Compacted) -> None:
    """Its newer value comes instead."""
    queue.put(("k", b"1"))
    with queue.consumer() as client:
        held = take(client, 1, ack=False)
        queue.put(("k", b"2"))
        newer = take(client, 1)
        ack_all(client, held, reason=REFUSED)
        assert [b"2"] == payloads(newer)
        assert [] == last(queue, client), "never an old value after a newer one"


@both_versions
def test_subscribing_again_on_the_same_connection(queue: Compacted, version: int) -> None:
    """Nothing is repeated, nothing is forgotten."""
    queue.put_numbers(60)
    with queue.consumer(version) as client:
        take(client, 10)
        for _ in range(3):
            subscribe(client, queue.filter)
        held = take(client, WINDOW, ack=False)
        subscribe(client, queue.filter)
        ack_all(client, held)
        rest = take(client, 60 - 10 - WINDOW)
        assert list(range(10, 60)) == sorted(set(numbers(held + rest)))
        queue.put(("k", b"live"))
        assert b"live" == take(client, 1)[0].payload
        assert [] == last(queue, client)


def test_unsubscribing_with_messages_in_flight(queue: Compacted) -> None:
    """Acknowledgements that come later count; after it has subscribed again the rest comes."""
    queue.put_numbers(100)
    with queue.consumer() as client:
        held = take(client, WINDOW, ack=False)
        assert [] == unsubscribe(client, queue.filter)
        ack_all(client, held)
        assert [] == settled(client)
        subscribe(client, queue.filter)
        assert list(range(WINDOW, 100)) == numbers(take(client, 100 - WINDOW))


def test_a_heartbeat_finds_what_was_missed(queue: Compacted, node: NodeProcess) -> None:
    """A message that is there though no event has told of it: a fallback that ought never to be needed."""
    other = Compacted(node, unique("other"))
    other.put(("k", b"missed"))
    with Operator(node) as desk, queue.consumer() as client:
        queue.put(("first", b"first"))
        take(client, 1)
        desk.load("behind", BEHIND)
        fill(node, [(f"behind/{other.name}/{queue.name}", b"")])
        seen = take(client, 1)
        assert ([queue.read("k")], [b"missed"], [2]) == ([seen[0].topic], payloads(seen), queue.numbers(seen))
        desk.unload("behind")
        assert [] == last(queue, client)


# --- one consumer -------------------------------------------------------------------------------------------------


@both_versions
def test_the_queue_of_another_client(queue: Compacted, node: NodeProcess, version: int) -> None:
    """It is refused, in words; its own consumer notices nothing."""
    queue.put(("k", b"secret"))
    with connected(node, unique("thief"), version) as thief:
        answer = ask(thief, queue.filter)
        assert [NOT_AUTHORIZED if version == 5 else 0x80] == answer.reasons
        assert version < 5 or answer.prop(REASON_STRING)
        with queue.consumer(version) as client:
            assert [b"secret"] == payloads(take(client, 1))
            assert [] == last(queue, client)
        assert [] == settled(thief)


@both_versions
def test_a_take_over(queue: Compacted, version: int) -> None:
    """Of two connections with the same client id the newer one consumes; nothing is lost between them."""
    queue.put_numbers(200)
    with queue.consumer(version) as old:
        seen = numbers(take(old, 50))
        settled(old)
        with queue.consumer(version) as new:
            old.expect_closed()
            rest = numbers(take(new, 150))
            assert list(range(50, 200)) == rest, f"{len(seen)} were acknowledged before"
            assert [] == last(queue, new)


@pytest.mark.parametrize(
    "form",
    [
        "{root}/#",
        "{root}/+/#",
        "{root}/w/#",
        "{root}/w/{name}/#",
        "{root}/{name}",
        "{root}/{name}/k",
        "{root}/{name}/k/#",
        "{root}/{name}/+",
        "{root}/+/k",
        "{root}/rewind/#",
        "{root}",
    ],
)
@both_versions
def test_other_filters_are_refused(node: NodeProcess, form: str, version: int) -> None:
    """Nobody looks into the queues of others through a wildcard, nor at what producers publish."""
    queue = Compacted(node, unique("car"))
    with connected(node, queue.name, version) as client:
        answer = ask(client, form.format(root=queue.root, name=queue.name))
        if version < 5:
            assert [0x80] == answer.reasons
        else:
            assert answer.reasons[0] in (FILTER_INVALID, NOT_AUTHORIZED)
            assert answer.prop(REASON_STRING)
        queue.put(("k", b"x"))
        assert [] == settled(client)
        subscribe(client, queue.filter)
        assert [b"x"] == payloads(take(client, 1)), "its own queue is still its own"


@both_versions
def test_a_queue_is_not_a_shared_subscription(queue: Compacted, node: NodeProcess, version: int) -> None:
    with connected(node, queue.name, version) as client:
        answer = ask(client, f"$share/g/{queue.filter}")
        assert [SHARED_NOT_SUPPORTED if version == 5 else 0x80] == answer.reasons
        assert version < 5 or answer.prop(REASON_STRING)
        queue.put(("k", b"x"))
        assert [] == settled(client)


@both_versions
@pytest.mark.parametrize("qos", [0, 2])
def test_another_qos_is_refused(queue: Compacted, node: NodeProcess, version: int, qos: int) -> None:
    """QoS 1 exactly: 0 would have no acknowledgements, 2 promises what is not kept. The connection stays."""
    queue.put(("k", b"x"))
    with connected(node, queue.name, version) as client:
        answer = ask(client, queue.filter, qos)
        assert 0x80 <= answer.reasons[0] if version == 5 else [0x80] == answer.reasons
        if version == 5:
            assert NOT_AUTHORIZED != answer.reasons[0], "it is not about rights"
            assert "QoS" in str(answer.prop(REASON_STRING))
        assert [] == settled(client)
        subscribe(client, queue.filter)
        assert [b"x"] == payloads(take(client, 1))
        refused = ask(client, queue.filter, qos)  # what was granted before stays
        assert refused.reasons[0] >= 0x80
        queue.put(("k", b"y"))
        assert [b"y"] == payloads(take(client, 1))


def test_one_subscribe_of_several_filters(queue: Compacted, node: NodeProcess) -> None:
    """Each has its own answer."""
    with connected(node, queue.name) as client:
        packet_id = client.next_id()
        filters = [("$ECQ/somebody/#", 1), (queue.filter, 1), (f"plain/{queue.name}", 2), (queue.filter, 1)]
        client.send(subscribe_packet(packet_id, filters))
        assert [NOT_AUTHORIZED, 1, 2, 1] == client.expect(SUBACK).reasons
        queue.put(("k", b"x"))
        assert [b"x"] == payloads(take(client, 1))
        assert [] == last(queue, client)


@pytest.mark.parametrize("client_id", ["w", "rewind", "a/b", "$x", "ü"])
def test_odd_client_ids(node: NodeProcess, client_id: str) -> None:
    """A client that is called like a part of a topic gets its own messages or none, never those of others."""
    other = Compacted(node, unique("other"))
    with connected(node, client_id) as client:
        answer = ask(client, f"$ECQ/{client_id}/#")
        other.put(("k", b"secret"))
        if answer.reasons == [1]:
            assert client_id != "a/b", "a queue is one level"
            own = Compacted(node, client_id)
            own.put(("k", b"own"))
            assert [(own.read("k"), b"own")] == [(one.topic, one.payload) for one in take(client, 1)]
        else:
            assert client_id not in ("$x", "ü"), "these are as good as any"
            assert answer.reasons[0] >= 0x80
            assert answer.prop(REASON_STRING)
        assert [] == settled(client)


# --- refusals of producers ----------------------------------------------------------------------------------------


WRONG_TOPICS = [
    "$ECQ/{name}/k",
    "$ECQ/{name}",
    "$ECQ/w",
    "$ECQ/w/{name}",
    "$ECQ/w/{name}/",
    "$ECQ/w//k",
    "$ECQ/x/{name}/k",
    "$ECQ",
    "$ECQ/",
    "$ECQ/w/",
    "$ECQ/w/{name}/" + "x" * 5000,
    "$ECQ/w/" + "x" * 5000 + "/k",
]


@pytest.mark.parametrize("topic", WRONG_TOPICS, ids=lambda topic: topic[:20])
@both_versions
def test_publishing_elsewhere_is_refused(queue: Compacted, node: NodeProcess, topic: str, version: int) -> None:
    """The producer hears so; nothing reaches the consumer, by any way."""
    topic = topic.format(name=queue.name)
    with queue.consumer() as client, connected(node, "", version) as producer:
        if version == 5:
            for qos in (1, 2):
                answer = producer.publish(topic, b"x", qos)
                assert answer is not None and answer.reason in (TOPIC_INVALID, NOT_AUTHORIZED)
                assert answer.prop(REASON_STRING)
            producer.publish(topic, b"x", 0)
            assert [] == settled(producer)
        else:
            producer.send(publish_packet(topic, b"x", version=4, qos=1, packet_id=7))
            assert [] == producer.expect_closed()
        assert [] == last(queue, client)


def test_its_own_read_topic_is_no_exception(queue: Compacted) -> None:
    """A consumer cannot put messages into its queue past the numbers."""
    with queue.consumer() as client:
        answer = client.publish(queue.read("k"), b"x", 1)
        assert answer is not None and answer.reason in (TOPIC_INVALID, NOT_AUTHORIZED)
        assert [] == last(queue, client)


# --- many at once -------------------------------------------------------------------------------------------------


@both_versions
def test_many_producers_and_a_consumer_that_comes_and_goes(queue: Compacted, node: NodeProcess, version: int) -> None:
    """Values of a key never go back, numbers grow on each connection, and the last value of each key arrives."""
    producers, rounds, keys = 4, 150, 5
    errors: list[BaseException] = []

    def produce(number: int) -> None:
        try:
            wanted = ((queue.write(f"{number}/{turn % keys}"), b"%d" % turn) for turn in range(rounds))
            fill(node, wanted)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(producers)]
    for thread in threads:
        thread.start()
    values: dict[str, list[int]] = {}
    final = {f"{number}/{key}": rounds - keys + key for number in range(producers) for key in range(keys)}
    while {key: seen[-1] for key, seen in values.items()} != final:
        assert [] == errors
        with queue.sleeper(version) if len(values) % 2 else queue.consumer(version) as client:
            lot: list[Packet] = []
            while len(lot) < 60 and {key: seen[-1] for key, seen in values.items()} != final:
                message = take(client, 1, ack=len(lot) % 7 != 6)[0]
                lot.append(message)
                values.setdefault(queue.keys([message])[0], []).append(int(message.payload))
            if version == 5:
                told = queue.numbers(lot)
                assert told == sorted(set(told))
            client.abort()
    for thread in threads:
        thread.join(60)
    assert [] == errors
    for key, seen in values.items():
        assert seen == sorted(seen), f"{key}: an old value after a newer one: {seen}"


def test_many_queues_at_once(node: NodeProcess) -> None:
    """Each consumer gets its own, in order."""
    queues = [Compacted(node, unique("car")) for _ in range(30)]
    clients = [queue.consumer() for queue in queues]
    fill(node, [(queue.write(f"k{number}"), b"%d" % number) for number in range(20) for queue in queues])
    shares = gather(clients, 20 * len(queues))
    for queue, client, share in zip(queues, clients, shares, strict=True):
        assert (list(range(20)), list(range(1, 21))) == (numbers(share), queue.numbers(share))
        client.close()


def test_one_key_many_times(queue: Compacted, node: NodeProcess) -> None:
    """A consumer that is away for 3000 updates of one key gets one message."""
    fill(node, [(queue.write("k"), b"%d" % number) for number in range(3000)])
    with queue.consumer() as client:
        seen = take(client, 1)
        assert ([b"2999"], [3000]) == (payloads(seen), queue.numbers(seen))
        assert [] == last(queue, client)


def test_producers_of_qos_0(queue: Compacted, node: NodeProcess) -> None:
    """Appended in order; nobody waits for an answer."""
    fill(node, [(queue.write(f"k{number}"), b"%d" % number) for number in range(300)], qos=0)
    with queue.consumer() as client:
        assert list(range(300)) == numbers(take(client, 300))
