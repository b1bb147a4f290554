"""Streams of a real process, on each engine: a day in the life, and readers beside publishers.

What they promise is tested in virtual time (tests/unit/streams), what outlives the node in `test_queues_durable.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    FILTER_INVALID,
    SHARED_NOT_SUPPORTED,
    ack_all,
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
    user,
    user_property,
)
from tests.support.flows import both_versions
from tests.support.kept import Stream, assert_refused, sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client

WINDOW = 32
OFFSET, TIME = "stream-offset", "stream-time"
ODD = [bytes(range(256)), b"", b"\0" * 100_000, b"{}"]

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


def read(client: Client, stream: Stream, offset: object = None) -> None:
    """Read from there; each version says it in its own way."""
    if offset is None:
        subscribe(client, stream.filter)
    elif client.version < 5:
        subscribe(client, f"{stream.filter}/{offset}")
    else:
        subscribe(client, stream.filter, 1, user(OFFSET, str(offset)))


@both_versions
def test_a_day_of_a_stream(node: NodeProcess, operator: Operator, version: int) -> None:
    """Read from anywhere, by many, again after a pause, in a session that lasts and without one."""
    history = Stream(node, operator, unique("s"))
    history.put(*ODD)
    history.put_numbers(100)
    with connected(node) as first:
        read(first, history, "earliest")
        messages = take(first, 104)
        assert ODD + [b"%d" % number for number in range(100)] == payloads(messages) == history.stored()
        assert list(range(1, 105)) == [int(user_property(message, OFFSET)) for message in messages]
        told = user_property(messages[50], TIME)
    for offset, seen in ((55, 100 - 50), (told, None), ("latest", 0), (None, 0)):
        with connected(node, "", version) as client:
            read(client, history, offset)
            if seen is None:
                assert messages[50].payload in payloads(take_until(client, b"99"))
            else:
                assert list(range(100 - seen, 100)) == numbers(take(client, seen))
    name = unique("reader")
    with connected(node, name, version) as client:
        read(client, history, "earliest")
        take(client, 44)
        held = take(client, 5, ack=False)
        ack_all(client, held[1:])
        settled(client)
        client.disconnect()
    with connected(node, unique("live"), version) as live:
        subscribe(live, f"{history.name}/#")
        history.put_numbers(10, 100)
        assert list(range(100, 110)) == numbers(take(live, 10)), "they are routed as usual"
    with connected(node, name, version) as client:
        read(client, history)
        assert list(range(40, 110)) == numbers(take(client, 70)), "it goes on by its name, without a hole"
    sleeper = unique("sleeper")
    with lasting(node, sleeper, version) as client:
        read(client, history, "earliest")
        take(client, 14)
        take(client, 5, ack=False)
        settled(client)
        client.abort()
    history.put_numbers(100, 110)
    with lasting(node, sleeper, version) as client:
        messages = take(client, 200)
        assert list(range(10, 210)) == numbers(messages)
        assert {True} == {message.dup for message in messages[:5]}
    operator.delete("streams", history.name)
    again = Stream(node, operator, history.name)
    again.put(b"new")
    with lasting(node, sleeper, version) as client:
        assert [] == take_until(client, b"new"), "its readers read the new one without doing anything"


@both_versions
def test_what_is_refused_is_told(node: NodeProcess, operator: Operator, version: int) -> None:
    """In the SUBACK, with the reason; the connection stays."""
    history = Stream(node, operator, unique("s"))
    with connected(node, "", version) as client:
        for filter_ in ("$stream/-x", "$stream/#", f"{history.filter}/yesterday"):
            assert_refused(client, filter_, FILTER_INVALID)
        assert_refused(client, f"$share/g/{history.filter}", SHARED_NOT_SUPPORTED)
        history.assert_nobody_publishes_to_it(client)


@both_versions
def test_history_passes_into_the_present_without_a_gap(node: NodeProcess, operator: Operator, version: int) -> None:
    """Readers that come while messages are published get all, in order, none twice."""
    history = Stream(node, operator, unique("s"))
    total = 3000
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            history.put_numbers(total)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    publisher = threading.Thread(target=publish, daemon=True)
    with connected(node, "", version) as first, connected(node, "", version) as second:
        read(first, history, "earliest")
        publisher.start()
        seen = take(first, 500)
        read(second, history, "earliest")
        assert list(range(total)) == numbers(take(second, total))
        assert list(range(total)) == numbers(seen + take(first, total - 500))
        publisher.join(60)
        assert [] == errors
        history.put(b"end")
        assert [] == take_until(first, b"end") == take_until(second, b"end")


def test_a_stream_keeps_its_newest_messages(node: NodeProcess, operator: Operator) -> None:
    """By count, bytes and age; a slow reader goes on with what is left, and offsets as if nothing had happened."""
    bounds: list[dict[str, Any]] = [{"max_messages": 100}, {"max_bytes": 100_000}, {"retention": 1}]
    for bound in bounds:
        history = Stream(node, operator, unique("s"), **bound)
        with connected(node) as slow:
            read(slow, history, "earliest")
            history.put_numbers(WINDOW)
            held = take(slow, WINDOW, ack=False)
            fill(node, [(f"{history.name}/a", b"%d " % number + b"x" * 1000) for number in range(WINDOW, 1000)])
            wait_until(lambda kept=history: len(kept.stored()) <= 200, "the oldest are gone")  # type: ignore[misc]
            history.put(b"end")
            ack_all(slow, held)
            seen = numbers(take_until(slow, b"end"))
            assert seen == sorted(set(seen)) and len(seen) < 1000 - WINDOW, bound


def test_topics_with_a_dollar_are_not_meant_by_wildcards(node: NodeProcess, operator: Operator) -> None:
    """`#` is everything but `$…`; figures of the node are stored only if the stream says so."""
    everything = Stream(node, operator, unique("all"), topics=["#", "+/+"])
    figures = Stream(node, operator, unique("figures"), topics=["$SYS/broker/#"])
    try:
        fill(node, [(unique("t"), b"x")])
        assert b"x" in everything.stored()
        topics = {message["topic"] for message in operator.read("streams", everything.name, limit=1000)}
        assert not [topic for topic in topics if topic.startswith("$")]
        wait_until(lambda: bool(figures.stored()), "the figures of the node", 30)
        topics = {message["topic"] for message in operator.read("streams", figures.name, limit=1000)}
        assert all(topic.startswith("$SYS/broker/") for topic in topics)
    finally:
        operator.delete("streams", everything.name)
        operator.delete("streams", figures.name)
