"""Going back in a compacted queue: by the consumer itself over MQTT, by an operator, to a number or a time.

What is delivered again is the queue as it is now: one value for each key. `test_ecq_operators.py` has the command line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from tests.support.compacted import Compacted
from tests.support.consumers import (
    ack_all,
    connected,
    fill,
    numbers,
    payloads,
    settled,
    subscribe,
    take,
    take_until,
    unique,
    unsubscribe,
    user_property,
)
from tests.support.flows import REASON_STRING, both_versions, let_pass
from tests.support.kept import sound_node
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, Packet, publish_packet

WINDOW = 32
NOT_AUTHORIZED, TOPIC_INVALID, PAYLOAD_INVALID = 0x87, 0x90, 0x99

both_kinds = pytest.mark.parametrize("kind", ["exclusive", "shared"])


@pytest.fixture(scope="module", params=["rocksdb", "redis"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), "") as running:
        yield running


@pytest.fixture
def queue(node: NodeProcess) -> Compacted:
    return Compacted(node, unique("car"))


def rewind(client: Client, queue: Compacted, to: object, qos: int = 1) -> None:
    """Ask for it, and be obeyed."""
    answer = client.publish(queue.rewind, str(to).encode(), qos)
    assert answer is None or 0 == (answer.reason or 0), f"0x{answer.reason:02x}: {answer.prop(REASON_STRING)}"


def asked(desk: Operator, queue: Compacted, **how: Any) -> dict[str, Any]:
    """The same by an operator."""
    answer = desk.web.post(f"{queue.path}/rewind", json=how)
    assert 200 == answer.status_code, answer.text
    return dict(answer.json())


def progress(desk: Operator, queue: Compacted, client: str = "") -> int:
    (found,) = (view for view in queue.shown(desk)["consuming"] if view["client"] == (client or queue.name))
    return int(found["progress"])


def last(queue: Compacted, client: Client, word: bytes = b"end") -> list[Packet]:
    """What comes to a consumer before a message that is appended now."""
    queue.put(("the-last", word))
    return take_until(client, word)


@both_kinds
@both_versions
def test_to_a_number(node: NodeProcess, kind: str, version: int) -> None:
    """That one is the next delivered; everything after it follows, then what is new."""
    queue = Compacted(node, unique("q"), kind)
    queue.put_numbers(20)
    with queue.consumer(version) as client:
        take(client, 20)
        rewind(client, queue, 8)
        again = take(client, 13)
        assert list(range(7, 20)) == numbers(again)
        assert version < 5 or list(range(8, 21)) == queue.numbers(again)
        assert [] == last(queue, client)
        rewind(client, queue, 1)
        assert list(range(20)) == numbers(take(client, 20))
        take(client, 1)
        assert [] == last(queue, client, b"end2")


def test_only_what_is_still_there(queue: Compacted) -> None:
    """A number whose message was replaced leads to the next one that is there; each key once, with its last value."""
    queue.put(("a", b"1"), ("b", b"2"), ("c", b"3"), ("a", b"4"), ("b", b"5"))
    with queue.consumer() as client:
        take(client, 3)
        rewind(client, queue, 1)
        again = take(client, 3)
        assert ([b"3", b"4", b"5"], [3, 4, 5]) == (payloads(again), queue.numbers(again))
        rewind(client, queue, 4)
        assert [b"4", b"5"] == payloads(take(client, 2))
        assert [] == last(queue, client)


@both_versions
def test_to_a_time(queue: Compacted, version: int) -> None:
    """Everything that was appended at that time or later, written in any offset from UTC."""
    queue.put(("a", b"old"), ("b", b"old"))
    let_pass(0.2)
    now = datetime.now(UTC)
    let_pass(0.2)
    queue.put(("b", b"new"), ("c", b"new"))
    with queue.consumer(version) as client:
        take(client, 3)
        forms = [
            now.isoformat(),
            now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            now.astimezone(timezone(timedelta(hours=-7))).isoformat(),
        ]
        for form in forms:
            rewind(client, queue, form)
            assert [queue.read("b"), queue.read("c")] == [message.topic for message in take(client, 2)], form
        rewind(client, queue, (now - timedelta(days=1)).isoformat())
        assert 3 == len(take(client, 3))
        rewind(client, queue, (now + timedelta(days=1)).isoformat())
        assert [] == last(queue, client), "nothing is that new, and what comes is not missed"


def test_acknowledgements_of_before_do_not_count(queue: Compacted, desk: Operator) -> None:
    """What is in flight when the consumer goes back belongs to the past."""
    queue.put_numbers(100)
    with queue.consumer() as client:
        take(client, 50)
        held = take(client, WINDOW, ack=False)
        rewind(client, queue, 11)
        ack_all(client, held)
        again = take_until_number(client, queue, 100)
        assert list(range(11, 101)) == sorted(set(queue.numbers(again))), "each comes again"
        settled(client)
        client.disconnect()
    with queue.consumer() as client:
        assert [] == last(queue, client)
    with queue.consumer() as client:
        rewind(client, queue, 11)
        held = take(client, WINDOW, ack=False)
        client.abort()
    with queue.consumer() as client:
        assert 11 == queue.numbers(take(client, 1))[0], "it was not acknowledged since"


def take_until_number(client: Client, queue: Compacted, number: int) -> list[Packet]:
    messages = take(client, 1)
    while queue.numbers(messages[-1:]) != [number]:
        messages += take(client, 1)
    return messages


def test_going_back_while_messages_come(queue: Compacted, node: NodeProcess) -> None:
    """Nothing is missed, values of a key never go back."""
    errors: list[BaseException] = []

    def produce() -> None:
        try:
            fill(node, [(queue.write(f"k{number % 50}"), b"%d" % number) for number in range(3000)])
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    thread = threading.Thread(target=produce, daemon=True)
    with queue.consumer() as client:
        thread.start()
        newest: dict[str, int] = {}
        for turn in range(20):
            for message in take(client, 40):
                key, value = queue.keys([message])[0], int(message.payload)
                assert value >= newest.get(key, 0), f"{key}: {value} after {newest[key]}"
                newest[key] = value
            rewind(client, queue, 1 + turn)
        thread.join(60)
        assert [] == errors
        for message in last(queue, client):
            newest[queue.keys([message])[0]] = int(message.payload)
        assert {f"k{number % 50}": number for number in range(2950, 3000)} == newest


def test_without_consuming_now(queue: Compacted, node: NodeProcess, desk: Operator) -> None:
    """It may go back before it subscribes; an operator may take it back while it is away."""
    queue.put_numbers(10)
    with queue.consumer() as client:
        take(client, 10)
        settled(client)
        unsubscribe(client, queue.filter)
        rewind(client, queue, 6)
        assert [] == settled(client)
        subscribe(client, queue.filter)
        assert list(range(5, 10)) == numbers(take(client, 5))
        client.disconnect()
    told = asked(desk, queue, to=3)
    assert (10, 2, 8, 3, 10) == (told["before"], told["progress"], told["messages"], told["first"], told["last"])
    assert not told["preview"]
    with queue.consumer() as client:
        assert list(range(2, 10)) == numbers(take(client, 8))
    with queue.sleeper() as client:
        settled(client)
    asked(desk, queue, to=9)
    with queue.sleeper() as client:
        assert [8, 9] == numbers(take(client, 2)), "a session that lasts, too"


def test_by_an_operator_while_it_consumes(queue: Compacted, desk: Operator) -> None:
    queue.put_numbers(50)
    with queue.consumer() as client:
        take(client, 50)
        settled(client)
        told = asked(desk, queue, since=time.time() - 3600)
        assert (0, 50) == (told["progress"], told["messages"])
        assert list(range(50)) == numbers(take(client, 50))
        assert [] == last(queue, client)


def test_a_preview_changes_nothing(queue: Compacted, desk: Operator) -> None:
    """It tells how many messages and bytes would come, and the first and last number of them."""
    queue.put(*((f"k{number % 10}", b"x" * 100) for number in range(30)))
    with queue.consumer() as client:
        take(client, 10)
        settled(client)
        told = asked(desk, queue, to=5, preview=True)
        assert (True, 30, 10, 21, 30) == tuple(
            told[key] for key in ("preview", "before", "messages", "first", "last")
        ), "only the last values are there"
        assert 1000 <= told["bytes"] <= 5000
        told = asked(desk, queue, to=26, preview=True)
        assert (5, 26, 30) == (told["messages"], told["first"], told["last"])
        assert 500 <= told["bytes"] <= 2500
        told = asked(desk, queue, since=time.time() + 3600, preview=True)
        assert (0, 0) == (told["messages"], told["bytes"])
        assert 30 == progress(desk, queue)
        assert [] == last(queue, client)
    told = asked(desk, queue, to=26, preview=True)
    given = asked(desk, queue, to=26)
    assert told | {"preview": False} == given, "the preview was true"


def test_forward_too(queue: Compacted, desk: Operator) -> None:
    """A number ahead of progress skips what is between, and says so."""
    queue.put_numbers(100)
    told = asked(desk, queue, to=91)
    assert 90 == told["skipped"]
    with queue.consumer() as client:
        assert list(range(90, 100)) == numbers(take(client, 10))


@both_versions
def test_the_queue_of_another_client(node: NodeProcess, queue: Compacted, desk: Operator, version: int) -> None:
    """Nobody takes another consumer back."""
    queue.put_numbers(5)
    with queue.consumer() as client:
        take(client, 5)
        settled(client)
        with connected(node, unique("other"), version) as other:
            if version == 5:
                for qos in (1, 2):
                    answer = other.publish(queue.rewind, b"1", qos)
                    assert answer is not None and NOT_AUTHORIZED == answer.reason
                    assert answer.prop(REASON_STRING)
                other.publish(queue.rewind, b"1", 0)
                settled(other)
            else:
                other.send(publish_packet(queue.rewind, b"1", version=4, qos=1, packet_id=7))
                assert [] == other.expect_closed()
        assert [] == last(queue, client)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        b"-1",
        b"1.5",
        b"0x10",
        b" ",
        b"\xff",
        b"2026-13-01",
        b"yesterday",
        b"9" * 30,
        b"99",
        b"1 2",
        b"null",
        "²".encode(),
    ],
    ids=repr,
)
def test_a_bad_payload(queue: Compacted, payload: bytes) -> None:
    """It is refused in words, nothing changes, and the connection stays."""
    queue.put_numbers(5)
    with queue.consumer() as client:
        take(client, 5)
        answer = client.publish(queue.rewind, payload, 1)
        assert answer is not None and PAYLOAD_INVALID == answer.reason
        assert answer.prop(REASON_STRING)
        assert [] == last(queue, client)


def test_a_bad_payload_of_an_old_client(queue: Compacted) -> None:
    """MQTT 3.1.1 has no words for it: the connection ends, and nothing has changed."""
    queue.put_numbers(5)
    with queue.consumer(4) as client:
        take(client, 5)
        settled(client)
        client.send(publish_packet(queue.rewind, b"yesterday", version=4, qos=1, packet_id=7))
        assert [] == client.expect_closed()
    with queue.consumer(4) as client:
        assert [] == last(queue, client)


def test_what_the_answer_tells(queue: Compacted, node: NodeProcess) -> None:
    """Progress before and after, and how many messages will come; and that there is no such queue."""
    with queue.consumer() as client:
        answer = client.publish(queue.rewind, b"1", 1)
        assert answer is not None and 0x80 <= (answer.reason or 0)
        assert queue.name in str(answer.prop(REASON_STRING))
        queue.put_numbers(10)
        take(client, 10)
        answer = client.publish(queue.rewind, b"4", 1)
        assert answer is not None
        told = {name: user_property(answer, name) for name in ("before", "progress", "messages")}
        assert {"before": "10", "progress": "3", "messages": "7"} == told
        assert list(range(3, 10)) == numbers(take(client, 7))


def test_topics_that_are_none(queue: Compacted) -> None:
    """`rewind` names one queue and nothing more."""
    with queue.consumer() as client:
        for topic in (f"{queue.rewind}/x", f"{queue.root}/rewind", f"{queue.root}/rewind/"):
            answer = client.publish(topic, b"1", 1)
            assert answer is not None and answer.reason in (TOPIC_INVALID, NOT_AUTHORIZED), topic
            assert answer.prop(REASON_STRING)


def test_any_qos(queue: Compacted) -> None:
    queue.put_numbers(5)
    with queue.consumer() as client:
        for qos in (0, 1, 2):
            take(client, 5)
            settled(client)
            rewind(client, queue, 1, qos)
        assert list(range(5)) == numbers(take(client, 5))
        assert [] == last(queue, client)


def test_consumers_of_a_shared_queue_go_back_each_for_itself(node: NodeProcess, desk: Operator) -> None:
    queue = Compacted(node, unique("q"), "shared")
    queue.put_numbers(10)
    with queue.consumer(client_id=unique("a")) as one, queue.consumer(client_id=unique("b")) as two:
        take(one, 10)
        take(two, 10)
        settled(two)
        rewind(one, queue, 6)
        assert list(range(5, 10)) == numbers(take(one, 5))
        told = asked(desk, queue, consumer=two.client_id, to=9)
        assert 2 == told["messages"]
        assert [8, 9] == numbers(take(two, 2))
        queue.put(("the-last", b"end"))
        assert [] == take_until(one, b"end") == take_until(two, b"end")
        assert 11 == progress(desk, queue, one.client_id)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"to": 1, "since": 1.0}, 400),
        ({"to": -1}, 400),
        ({"to": "x"}, 400),
        ({"to": 99}, 400),
        ({"to": 1.5}, 400),
        ({"to": 1, "colour": "red"}, 400),
        ({"since": "yesterday"}, 400),
    ],
    ids=str,
)
def test_an_operator_who_asks_wrongly(queue: Compacted, desk: Operator, body: dict[str, Any], status: int) -> None:
    queue.put_numbers(5)
    answer = desk.web.post(f"{queue.path}/rewind", json=body)
    assert (status, True) == (answer.status_code, bool(answer.json()["message"])), answer.text
    answer = desk.web.post(f"compacted/exclusive/{unique('nobody')}/rewind", json={"to": 1})
    assert 404 == answer.status_code
