"""`$stream/{name}`: everything that was published, in order, for everybody who reads it, from wherever they like.

Everything is looked at from outside, on each store; nodes are shared by the tests, streams are not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    FILTER_INVALID,
    SHARED_NOT_SUPPORTED,
    ack_all,
    ask,
    connected,
    fill,
    lasting,
    numbers,
    payloads,
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
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    REASON_STRING,
    RESPONSE_TOPIC,
    SUBSCRIPTION_ID,
    USER_PROPERTY,
    both_versions,
    let_pass,
)
from tests.support.kept import Stream, assert_refused, sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, Packet, prop

WINDOW = 32
OFFSET, TIME = "stream-offset", "stream-time"

#: Outdated records go within `trim_interval`; the tests need not wait as long as users.
CONFIG = """
[plugins.streams]
trim_interval = 0.1
progress_interval = 0.1

[plugins.systopics]
interval = 1
"""


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), CONFIG) as running:
        yield running


@pytest.fixture
def stream(node: NodeProcess, desk: Operator) -> Callable[..., Stream]:
    def make(**options: Any) -> Stream:
        return Stream(node, desk, unique("s"), **options)

    return make


Make = Callable[..., Stream]


@pytest.fixture
def reader(node: NodeProcess) -> Iterator[Callable[..., Client]]:
    """`reader(stream, offset)`: a client that reads it from there; each version says it in its own way."""
    with ExitStack() as stack:

        def make(
            stream: Stream | None, offset: object = None, version: int = 5, qos: int = 1, client_id: str = ""
        ) -> Client:
            client = stack.enter_context(connected(node, client_id, version))
            if stream is not None:
                start_reading(client, stream, offset, qos)
            return client

        yield make


Read = Callable[..., Client]


def start_reading(client: Client, stream: Stream, offset: object = None, qos: int = 1) -> Packet:
    if offset is None:
        return subscribe(client, stream.filter, qos)
    if client.version < 5:
        return subscribe(client, f"{stream.filter}/{offset}", qos)
    return subscribe(client, stream.filter, qos, user(OFFSET, str(offset)))


# --- where to begin -----------------------------------------------------------------------------------------------


@both_versions
def test_from_the_earliest_and_from_the_latest(stream: Make, reader: Read, version: int) -> None:
    """Everything there is, or only what is published from now on; who says nothing gets the latter."""
    history = stream()
    history.put_numbers(100)
    earliest = reader(history, "earliest", version)
    latest = reader(history, "latest", version)
    silent = reader(history, None, version)
    messages = take(earliest, 100)
    assert list(range(100)) == numbers(messages)
    assert {(f"{history.name}/a", 1, False, False)} == {(m.topic, m.qos, m.retain, m.dup) for m in messages}
    history.put_numbers(5, 100)
    for client in (earliest, latest, silent):
        assert list(range(100, 105)) == numbers(take(client, 5))


@both_versions
def test_from_an_offset(stream: Make, reader: Read, version: int) -> None:
    """The message with that offset is the first; offsets grow by one, and are told to MQTT 5 clients."""
    history = stream()
    history.put_numbers(50)
    messages = take(reader(history, "earliest"), 50)
    offsets = [int(user_property(message, OFFSET)) for message in messages]
    assert list(range(offsets[0], offsets[0] + 50)) == offsets
    for number in (0, 17, 49):
        client = reader(history, offsets[number], version)
        assert list(range(number, 50)) == numbers(take(client, 50 - number))
        client.close()


@both_versions
def test_from_an_offset_that_is_not_there_yet(stream: Make, reader: Read, version: int) -> None:
    """What lies behind the end begins with the next message, at the latest with the one that has that offset."""
    history = stream()
    history.put_numbers(3)
    last = int(user_property(take(reader(history, "earliest"), 3)[-1], OFFSET))
    client = reader(history, last + 1, version)
    history.put(b"next")
    assert [b"next"] == payloads(take(client, 1))


def test_from_a_time(stream: Make, reader: Read) -> None:
    """The first message is the first one that is not older, whichever way the time is written."""
    history = stream()
    history.put(b"old")
    let_pass(1.1)  # whole seconds are the coarsest form
    middle = datetime.now(UTC)
    let_pass(1.1)
    history.put(b"new", b"newer")
    forms = [
        f"@{int(middle.timestamp())}",
        f"@{middle.timestamp():.3f}",
        middle.strftime("%Y-%m-%dT%H:%M:%SZ"),
        middle.isoformat().replace("+00:00", "Z"),
        middle.astimezone(timezone(timedelta(hours=-5))).isoformat(),
    ]
    for form in forms:
        for version in (4, 5):
            assert [b"new", b"newer"] == payloads(take(reader(history, form, version), 2)), form
    east = middle.astimezone(timezone(timedelta(hours=2))).isoformat()  # `+` has a meaning of its own in a filter
    assert [b"new", b"newer"] == payloads(take(reader(history, east, 5), 2))


def test_times_before_everything_and_after_everything(stream: Make, reader: Read) -> None:
    history = stream()
    history.put(b"1", b"2")
    early, late = reader(history, "@0"), reader(history, f"@{int(time.time()) + 3600}")
    assert [b"1", b"2"] == payloads(take(early, 2))
    history.put(b"3")
    assert [b"3"] == payloads(take(early, 1))
    assert [] == settled(late)


@both_versions
@pytest.mark.parametrize(
    "offset", ["-1", "1.5", "yesterday", "@", "@x", "@-5", "2026-13-01T00:00:00Z", "LATEST?", "9" * 30, " "]
)
def test_a_bad_offset_is_refused(stream: Make, reader: Read, node: NodeProcess, offset: str, version: int) -> None:
    """In the SUBACK, with what is allowed; the subscription is not there, and the client stays."""
    history = stream()
    history.put(b"x")
    client = reader(None, version=version)
    if version == 5:
        answer = ask(client, history.filter, 1, user(OFFSET, offset))
        assert [FILTER_INVALID] == answer.reasons
        assert "earliest" in str(answer.prop(REASON_STRING)), "it says what could be written"
    assert [FILTER_INVALID if version == 5 else 0x80] == ask(client, f"{history.filter}/{offset}").reasons
    client.publish(f"{history.name}/a", b"y", 1)
    assert [] == settled(client)


def test_both_forms_work_in_mqtt_5(stream: Make, reader: Read) -> None:
    """The form for MQTT 3 is understood in MQTT 5, with the properties of a stream."""
    history = stream()
    history.put_numbers(3)
    client = reader(None)
    subscribe(client, f"{history.filter}/earliest")
    messages = take(client, 3)
    assert [0, 1, 2] == numbers(messages)
    assert user_property(messages[0], OFFSET)


# --- what is delivered --------------------------------------------------------------------------------------------


def test_messages_keep_their_properties_and_tell_their_place(stream: Make, reader: Read) -> None:
    """All properties of the publisher, then offset and time; the identifier of the subscription."""
    history = stream()
    properties = [
        (PAYLOAD_FORMAT, 1),
        (CONTENT_TYPE, "text/plain"),
        (RESPONSE_TOPIC, "answer/here"),
        (CORRELATION_DATA, bytes(range(256))),
        (USER_PROPERTY, ("a", "1")),
        (USER_PROPERTY, ("a", "2")),
    ]
    live = reader(None)
    subscribe(live, f"{history.name}/#", 2)
    before = time.time()
    history.put("grün".encode(), properties=b"".join(prop(key, value) for key, value in properties))
    after = time.time()
    client = reader(None)
    subscribe(client, history.filter, 1, user(OFFSET, "earliest"), prop(SUBSCRIPTION_ID, 99))
    message = take(client, 1)[0]
    assert "grün".encode() == message.payload
    added = [pair for pair in message.properties if pair not in properties]
    assert {SUBSCRIPTION_ID, USER_PROPERTY} == {key for key, _ in added}
    assert {OFFSET, TIME} == {value[0] for key, value in added if key == USER_PROPERTY}
    assert [value for key, value in properties if key == USER_PROPERTY] == message.prop_all(USER_PROPERTY)[:2]
    assert 99 == message.prop(SUBSCRIPTION_ID)
    assert before - 1 <= when(user_property(message, TIME)) <= after + 1
    message = live.receive()
    assert ("grün".encode(), 1) == (message.payload, message.qos), "it is routed as usual"
    assert [("a", "1"), ("a", "2")] == message.prop_all(USER_PROPERTY)


def when(text: str) -> float:
    """Seconds since the epoch; the property can be given back as an offset, so it has one of those forms."""
    if text.startswith("@"):
        return float(text[1:])
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def test_a_time_that_was_told_can_be_used(stream: Make, reader: Read) -> None:
    """What `stream-time` says is a start position, as it is: the same message is among the first."""
    history = stream()
    history.put(b"1")
    let_pass(0.01)
    history.put(b"2")
    let_pass(0.01)
    history.put(b"3")
    told = user_property(take(reader(history, "earliest"), 2)[1], TIME)
    assert [b"2", b"3"] == payloads(take(reader(history, told), 2))


@both_versions
def test_a_retained_message_is_stored_as_an_ordinary_one(
    node: NodeProcess, stream: Make, reader: Read, version: int
) -> None:
    """What comes from a stream is no retained message, though it was published as one; what is retained stays so."""
    history = stream()
    with connected(node, "", version) as publisher:
        publisher.publish(f"{history.name}/a", b"kept", 1, retain=True)
    message = take(reader(history, "earliest", version), 1)[0]
    assert (b"kept", False) == (message.payload, message.retain)
    late = reader(None, version=version)
    subscribe(late, f"{history.name}/a")
    message = take(late, 1)[0]
    assert (b"kept", True) == (message.payload, message.retain)


def test_a_stream_and_its_topic_are_two_subscriptions(stream: Make, reader: Read) -> None:
    """Who has both gets both, each with its own identifier."""
    history = stream()
    client = reader(None)
    subscribe(client, f"{history.name}/#", 1, prop(SUBSCRIPTION_ID, 1))
    subscribe(client, history.filter, 1, prop(SUBSCRIPTION_ID, 2))
    history.put_numbers(10)
    seen = sorted((message.prop(SUBSCRIPTION_ID), int(message.payload)) for message in take(client, 20))
    assert [(identifier, number) for identifier in (1, 2) for number in range(10)] == seen


def test_all_payloads_come_out_as_they_went_in(stream: Make, reader: Read) -> None:
    """All byte values, nothing at all, and a large one."""
    history = stream()
    sent = [bytes(range(256)), b"", b"\0" * 100_000, b"{}"]
    history.put(*sent)
    assert sent == payloads(take(reader(history, "earliest"), 4))
    assert sent == history.stored()


@both_versions
def test_every_qos_goes_in_and_at_most_qos_1_comes_out(
    node: NodeProcess, stream: Make, reader: Read, version: int
) -> None:
    history = stream()
    client, zero = reader(None, version=version), reader(history, "earliest", version, 0)
    assert [1] == ask(client, f"{history.filter}/earliest", 2).reasons
    with connected(node, "", version) as publisher:
        for qos in (0, 1, 2):
            publisher.publish(f"{history.name}/a", b"%d" % qos, qos)
    messages = take(client, 3)
    assert ([0, 1, 2], {1}) == (numbers(messages), {message.qos for message in messages})
    messages = take(zero, 3)
    assert ([0, 1, 2], {0}) == (numbers(messages), {message.qos for message in messages})


def test_a_refusal_does_not_hold_up_a_stream(stream: Make, reader: Read) -> None:
    """A stream has no second reader to turn to: the message was delivered, the next ones come."""
    history = stream()
    history.put_numbers(100)
    client = reader(history, "earliest")
    ack_all(client, take(client, WINDOW, ack=False), reason=0x83)
    assert list(range(WINDOW, 100)) == numbers(take(client, 100 - WINDOW))


# --- readers do not know each other -------------------------------------------------------------------------------


def test_readers_are_independent(stream: Make, reader: Read) -> None:
    """Each has its own place; a slow one holds up nobody."""
    history = stream()
    history.put_numbers(300)
    slow = reader(history, "earliest")
    held = take(slow, WINDOW, ack=False)
    quick = reader(history, "earliest")
    assert list(range(300)) == numbers(take(quick, 300))
    middle = reader(history, "earliest", 4)
    assert list(range(150)) == numbers(take(middle, 150))
    ack_all(slow, held)
    assert list(range(WINDOW, 300)) == numbers(take(slow, 300 - WINDOW))
    assert list(range(150, 300)) == numbers(take(middle, 150))


@both_versions
def test_history_passes_into_the_present_without_a_gap(
    node: NodeProcess, stream: Make, reader: Read, version: int
) -> None:
    """Readers that come while messages are published get all, in order, none twice."""
    history = stream()
    total = 3000
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            history.put_numbers(total)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    publisher = threading.Thread(target=publish, daemon=True)
    history.put(b"first")
    first = reader(history, "earliest", version)
    assert [b"first"] == payloads(take(first, 1))
    publisher.start()
    seen = take(first, 500)
    second = reader(history, "earliest", version)
    assert [b"first"] == payloads(take(second, 1))
    assert list(range(total)) == numbers(take(second, total))
    assert list(range(total)) == numbers(seen + take(first, total - 500))
    publisher.join(60)
    assert [] == errors
    history.put(b"end")
    assert [] == take_until(first, b"end") == take_until(second, b"end")


# --- progress -----------------------------------------------------------------------------------------------------


@both_versions
def test_a_reader_that_comes_back_goes_on(node: NodeProcess, stream: Make, version: int) -> None:
    """By its client id, also with a new session, if it names no position; what it had acknowledged does not come."""
    history = stream()
    history.put_numbers(100)
    name = unique("reader")
    with connected(node, name, version) as client:
        start_reading(client, history, "earliest")
        take(client, 40)
        client.disconnect()
    history.put_numbers(10, 100)
    with connected(node, name, version) as client:
        start_reading(client, history)
        assert list(range(40, 110)) == numbers(take(client, 70))
        settled(client)
        unsubscribe(client, history.filter)
        history.put(b"110")
        start_reading(client, history)
        assert [b"110"] == payloads(take(client, 1))
    with connected(node, unique("stranger"), version) as client:
        start_reading(client, history)
        history.put(b"111")
        assert [b"111"] == payloads(take(client, 1)), "the progress of another means nothing"


def test_progress_is_what_was_acknowledged_without_a_hole(node: NodeProcess, stream: Make) -> None:
    """A message that was not acknowledged comes again, though later ones were."""
    history = stream()
    history.put_numbers(20)
    name = unique("reader")
    with connected(node, name) as client:
        start_reading(client, history, "earliest")
        messages = take(client, 20, ack=False)
        ack_all(client, messages[:5] + messages[6:])
        settled(client)
        client.disconnect()
    with connected(node, name) as client:
        start_reading(client, history)
        assert b"5" == take(client, 1)[0].payload


def test_a_position_that_is_named_counts_more_than_progress(node: NodeProcess, stream: Make) -> None:
    """Going back is possible: in the same session by subscribing again, or in a new one."""
    history = stream()
    history.put_numbers(30)
    name = unique("reader")
    with connected(node, name) as client:
        start_reading(client, history, "earliest")
        messages = take(client, 30)
        settled(client)
        start_reading(client, history, user_property(messages[10], OFFSET))
        assert list(range(10, 30)) == numbers(take(client, 20))
        settled(client)
        client.disconnect()
    with connected(node, name) as client:
        start_reading(client, history, "earliest")
        assert list(range(30)) == numbers(take(client, 30))


@both_versions
def test_a_lasting_session_misses_nothing_while_it_is_away(node: NodeProcess, stream: Make, version: int) -> None:
    """It does not subscribe again, and gets what was in flight, then what came meanwhile, in order."""
    history = stream()
    history.put_numbers(50)
    name = unique("sleeper")
    with lasting(node, name, version) as client:
        start_reading(client, history, "earliest")
        take(client, 10)
        held = take(client, 5, ack=False)
        settled(client)
        client.abort()
    history.put_numbers(200, 50)
    with lasting(node, name, version) as client:
        assert client.connack is not None and client.connack.session_present
        messages = take(client, 240)
        assert list(range(10, 250)) == numbers(messages)
        assert {True} == {message.dup for message in messages[: len(held)]}


def test_two_subscriptions_of_one_client_to_one_stream(stream: Make, reader: Read) -> None:
    """One from the beginning and one live are two subscriptions, and each gets its own."""
    history = stream()
    history.put_numbers(5)
    client = reader(None)
    subscribe(client, f"{history.filter}/earliest", 1, prop(SUBSCRIPTION_ID, 1))
    subscribe(client, f"{history.filter}/latest", 1, prop(SUBSCRIPTION_ID, 2))
    history.put(b"5")
    seen = [(message.prop(SUBSCRIPTION_ID), int(message.payload)) for message in take(client, 7)]
    assert [*((1, number) for number in range(6)), (2, 5)] == sorted(seen)


# --- retention ----------------------------------------------------------------------------------------------------


def test_old_messages_go(stream: Make, reader: Read) -> None:
    """After the retention of the stream they are not delivered any more, whoever asks."""
    history = stream(retention=1)
    # Readers are there before what they read: it does not wait for them.
    early = reader(history, "earliest")
    history.put(b"old")
    first = take(early, 1)[0]
    let_pass(1.0)
    wait_until(lambda: history.stored() == [], "it is gone")
    for position in ("earliest", user_property(first, OFFSET), "@0"):
        late = reader(history, position)
        history.put(b"new")
        assert [b"new"] == payloads(take(late, 1))


def test_a_stream_keeps_its_newest_messages(stream: Make, reader: Read) -> None:
    """Of more than `max_messages` the oldest go; offsets go on as if nothing had happened."""
    history = stream(max_messages=100)
    history.put_numbers(1000)
    wait_until(lambda: len(history.stored()) <= 200, "the oldest are gone")  # the bound is kept to in steps
    messages = take_until_last(reader(history, "earliest"), b"999")
    assert 100 <= len(messages) <= 200
    assert list(range(1000 - len(messages), 1000)) == numbers(messages)
    offsets = [int(user_property(message, OFFSET)) for message in messages]
    assert offsets == list(range(offsets[0], offsets[0] + len(messages)))


def take_until_last(client: Client, last: bytes) -> list[Packet]:
    messages = take(client, 1)
    while messages[-1].payload != last:
        messages += take(client, 1)
    return messages


def test_bytes_are_bounded_too(stream: Make) -> None:
    history = stream(max_bytes=200_000)
    history.put(*(b"%03d" % number + b"x" * 10_000 for number in range(100)))
    wait_until(lambda: len(history.stored()) <= 40, "the oldest are gone")
    assert b"099" == history.stored()[-1][:3]


def test_a_slow_reader_is_overtaken_by_the_retention(stream: Make, reader: Read) -> None:
    """It goes on with what is left, in order."""
    history = stream(max_messages=100)
    slow = reader(history, "earliest")
    history.put_numbers(WINDOW)
    held = take(slow, WINDOW, ack=False)
    history.put_numbers(2000, WINDOW)
    wait_until(lambda: len(history.stored()) <= 200, "the oldest are gone")
    ack_all(slow, held)
    messages = take_until_last(slow, b"%d" % (2000 + WINDOW - 1))
    seen = numbers(messages)
    assert seen == sorted(set(seen))
    assert len(seen) < 2000


def test_an_expired_message_is_not_delivered(stream: Make, reader: Read) -> None:
    """Its own expiry counts, and what is left of it is told."""
    history = stream()
    history.put(b"expires", properties=prop(MESSAGE_EXPIRY, 1))
    history.put(b"lasts", properties=prop(MESSAGE_EXPIRY, 1000))
    let_pass(1.5)
    message = take(reader(history, "earliest"), 1)[0]
    assert b"lasts" == message.payload
    assert 900 < message.prop(MESSAGE_EXPIRY) < 1000


# --- names --------------------------------------------------------------------------------------------------------


@both_versions
def test_a_stream_that_is_not_there_yet(node: NodeProcess, desk: Operator, version: int) -> None:
    """Subscribing is granted, with a word about it; when it is declared, its messages come."""
    name = unique("later")
    with connected(node, "", version) as client:
        answer = subscribe(client, f"$stream/{name}")
        if version == 5:
            assert name in str(answer.prop(REASON_STRING))
        fill(node, [(f"{name}/a", b"too early")])
        later = Stream(node, desk, name)
        later.put(b"now")
        assert [b"now"] == payloads(take(client, 1))


def test_deleted_and_made_again(node: NodeProcess, desk: Operator, stream: Make, reader: Read) -> None:
    """What was in it is gone, progress too; its readers read the new one without doing anything."""
    history = stream()
    history.put_numbers(100)
    client = reader(history, "earliest")
    held = take(client, WINDOW, ack=False)
    desk.delete("streams", history.name)
    assert history.name not in desk.names("streams")
    ack_all(client, held)
    again = Stream(node, desk, history.name)
    assert [] == again.stored()
    again.put(b"new", b"newer")
    assert [] == take_until(client, b"new")
    assert [b"newer"] == payloads(take(client, 1))
    assert [b"new", b"newer"] == payloads(take(reader(again, "earliest"), 2))


def test_options_change_under_readers(node: NodeProcess, desk: Operator, stream: Make, reader: Read) -> None:
    """Other topics, from now on; what is in the stream stays."""
    history = stream()
    history.put(b"before")
    client = reader(history, "earliest")
    desk.change("streams", history.name, topics=[f"other/{history.name}"])
    history.put(b"not any more")
    fill(node, [(f"other/{history.name}", b"after")])
    assert [b"before", b"after"] == payloads(take(client, 2))


@both_versions
@pytest.mark.parametrize(
    "name", ["", "-x", ".x", "a b", "+", "#", "x/#", "x/+", "ü", "x" * 65, "x/earliest/y"], ids=lambda n: repr(n)[:12]
)
def test_a_bad_name_is_refused(node: NodeProcess, name: str, version: int) -> None:
    """In the SUBACK, with the reason; the connection stays."""
    with connected(node, "", version) as client:
        assert_refused(client, f"$stream/{name}", FILTER_INVALID)


@both_versions
def test_a_stream_is_not_shared(node: NodeProcess, stream: Make, version: int) -> None:
    history = stream()
    with connected(node, "", version) as client:
        assert_refused(client, f"$share/g/{history.filter}", SHARED_NOT_SUPPORTED)


@both_versions
def test_nobody_publishes_to_a_stream_by_its_name(node: NodeProcess, stream: Make, version: int) -> None:
    history = stream()
    with connected(node, "", version) as client:
        history.assert_nobody_publishes_to_it(client)


def test_topics_with_a_dollar_are_not_meant_by_wildcards(node: NodeProcess, desk: Operator) -> None:
    """`#` is everything but `$…`; figures of the node are stored only if the stream says so."""
    everything = Stream(node, desk, unique("all"), topics=["#", "+/+"])
    figures = Stream(node, desk, unique("figures"), topics=["$SYS/broker/#"])
    try:
        fill(node, [(unique("t"), b"x")])
        assert b"x" in everything.stored()
        topics = {message["topic"] for message in desk.read("streams", everything.name, limit=1000)}
        assert not [topic for topic in topics if topic.startswith("$")]
        wait_until(lambda: bool(figures.stored()), "the figures of the node", 30)
        topics = {message["topic"] for message in desk.read("streams", figures.name, limit=1000)}
        assert all(topic.startswith("$SYS/broker/") for topic in topics)
    finally:
        desk.delete("streams", everything.name)
        desk.delete("streams", figures.name)


def test_one_message_in_several_places(node: NodeProcess, desk: Operator, stream: Make, reader: Read) -> None:
    """Whoever is bound to its topic gets it, each once, also by two filters."""
    name = unique("many")
    first = stream(topics=[f"{name}/#", f"{name}/a"])
    second = stream(topics=[f"+/{name}", f"{name}/+"])
    desk.create("queues", name, topics=[f"{name}/#"])
    fill(node, [(f"{name}/a", b"x"), (f"{name}/b", b"y")])
    assert [b"x", b"y"] == first.stored() == second.stored()
    client = reader(None)
    subscribe(client, f"$queue/{name}")
    assert [b"x", b"y"] == payloads(take(client, 2))
