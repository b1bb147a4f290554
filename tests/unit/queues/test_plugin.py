"""Queues of a node in virtual time: what is published, stored, given, acknowledged, given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.delivery.writebehind import LAST_ATTEMPT
from motorcade.extension.hooks import AFTER
from motorcade.mqtt.packets import Puback, Publish, Pubrel
from motorcade.plugins.logs.queues.dispatcher import Level, QueueDispatcher
from motorcade.plugins.logs.queues.source import QueueSource
from motorcade.storage.ports import Acknowledge, Batch, Draft, Entry, StoreError, Written
from tests.unit.queues.node import QueuesNode

QUOTA, REFUSED = 0x97, 0x83
DEAD: dict[str, Any] = {"topics": ["q/#"], "dead_letter": "dead"}


def queue(**options: Any) -> dict[str, Any]:
    return {"q": {"topics": ["q/#"], **options}}


def numbered(count: int, word: str = "") -> list[bytes]:
    return [f"{word}{number}".encode() for number in range(count)]


def priority(level: str) -> dict[str, Any]:
    return {"user_properties": (("priority", level),)}


def payloads(messages: list[Publish]) -> list[bytes]:
    return [bytes(message.payload) for message in messages]


def test_what_is_published_waits_for_a_consumer() -> None:
    """In order; each comes once, and is gone when it was acknowledged."""
    for version in (4, 5):
        with QueuesNode.on(queue=queue()) as node:
            node.fill(*numbered(300))
            worker = node.worker("a", version, receive_maximum=20)
            assert (20 if version == 5 else 32) == len(worker.messages())
            assert numbered(300) == worker.drain()
            assert [] == node.stored()
            assert 300 == node.counters["appended"] == node.counters["delivered"] == node.counters["acknowledged"]


def test_several_consumers_share() -> None:
    for version in (4, 5):
        with QueuesNode.on(queue=queue()) as node:
            workers = [node.worker(name, version) for name in "abc"]
            node.fill(*numbered(30))
            shares = [worker.payloads() for worker in workers]
            assert [10, 10, 10] == [len(share) for share in shares]
            assert set(numbered(30)) == {payload for share in shares for payload in share}


def test_every_qos_goes_in_and_at_most_qos_1_comes_out() -> None:
    """QoS 2 is granted as 1; what is written to a consumer of QoS 0 counts as taken."""
    with QueuesNode.on(queue=queue()) as node:
        worker, pub = node.client("worker"), node.client("pub")
        for wanted in (2, 0):
            assert (min(wanted, 1),) == worker.subscribe("$queue/q", wanted).reasons
            for qos in (0, 1, 2):
                assert 0 == pub.publish("q/a", b"%d" % qos, qos)
            messages = worker.messages()
            assert (numbered(3), {min(wanted, 1)}) == (payloads(messages), {message.qos for message in messages})
            worker.ack(*worker.inflight)
            assert [] == node.stored()


def test_messages_keep_their_properties_and_are_routed_too() -> None:
    """Consumers get all of them, with the identifier of their subscription; live subscribers get theirs."""
    said: dict[str, Any] = {
        "payload_format": 1,
        "content_type": "text/plain",
        "response_topic": "answer",
        "correlation_data": bytes(range(256)),
        "user_properties": (("a", "1"), ("a", "2")),
    }
    with QueuesNode.on(queue=queue()) as node:
        worker, live = node.client("worker"), node.client("live")
        worker.subscribe("$queue/q", identifier=4711)
        live.subscribe("q/#", 2)
        node.fill("grün".encode(), message_expiry=100, **said)
        for client, identifiers in ((worker, (4711,)), (live, ())):
            (message,) = client.messages()
            assert ("q/a", "grün".encode(), 1, False) == (message.topic, message.payload, message.qos, message.retain)
            found = message.properties
            assert said == {name: getattr(found, name) for name in said}
            assert (identifiers, 100) == (found.subscription_ids, found.message_expiry)


def test_one_client_consumes_several_queues() -> None:
    """Both get their turn, however much waits in one of them."""
    with QueuesNode.on(queue={"a": {"topics": ["a"]}, "b": {"topics": ["b"]}}) as node:
        node.fill(*numbered(200, "a"), topic="a")
        node.fill(*numbered(20, "b"), topic="b")
        worker = node.worker("w", queue="a", receive_maximum=4)
        worker.subscribe("$queue/b")
        seen = worker.drain()
        assert numbered(200, "a") == [each for each in seen if each.startswith(b"a")]
        assert numbered(20, "b") == [each for each in seen if each.startswith(b"b")]
        assert seen.index(b"b0") < 120, "the other one is not drained first"


def test_a_message_may_belong_to_several_queues() -> None:
    """It is in each of them once, however many filters match; a wildcard does not mean `$…`."""
    many = {"a": {"topics": ["x/#", "x/+"]}, "b": {"topics": ["x/y"]}, "c": {"topics": ["z"]}, "all": {"topics": ["#"]}}
    with QueuesNode.on(queue=many) as node:
        node.fill(b"1", topic="x/y")
        node.fill(b"2", topic="$SYS/x")
        assert ([b"1"], [b"1"], [], [b"1"]) == tuple(node.stored(name) for name in many)


def test_attempts_survive_the_process() -> None:
    """What was in flight comes again, and is counted; at last it is a dead letter that tells of it."""
    with QueuesNode.on(queue={"dead": {}, "q": DEAD | {"max_attempts": 2}}) as node:
        node.fill(b"x", user_properties=(("trace", "7"),))
        assert [b"x"] == node.worker("a").payloads()
        node.wait(0.1)
        assert [1] == node.marks()
        second = node.kill()
        worker = second.worker("a")
        worker.ack(*worker.messages(), reason=REFUSED)
        assert [] == second.stored()
        (letter,) = second.run(second.queues.read("dead", 0, 10))
        assert ("q/a", b"x", "2", "q") == (
            letter.topic,
            letter.payload,
            letter.properties["attempts"],
            letter.properties["dead-queue"],
        )
        worker.subscribe("$queue/dead")
        (message,) = worker.messages()
        told = dict(message.properties.user_properties)
        assert ("2", "q", "refused with 0x83", "7") == (
            told["dead-attempts"],
            told["dead-queue"],
            told["dead-reason"],
            told["trace"],
        )
        assert [["a", "refused with 0x83"]] == [attempt[1:] for attempt in json.loads(told["dead-history"])]
        assert 1 == second.counters["dead_lettered"]


def test_without_a_place_for_dead_letters_they_are_dropped_and_counted() -> None:
    """The next message is not held up; without a bound nothing is given up."""
    for most in (2, 0):
        with QueuesNode.on(queue=queue(max_attempts=most, redispatch_delay=0.5)) as node:
            node.fill(b"poison")
            worker = node.worker("a")
            for _ in range(most or 30):
                worker.ack(*worker.messages(), reason=REFUSED)
                node.wait(0.6)
            node.fill(b"good")
            assert ([b"good"] if most else [b"poison", b"good"]) == worker.payloads()
            assert (1 if most else 0) == node.counters["dead_dropped"]


def test_a_message_that_no_consumer_can_take_is_given_up() -> None:
    """One whose packets may not be that large has not acknowledged it; one that may gets it."""
    with QueuesNode.on(queue={"dead": {}, "q": DEAD | {"max_attempts": 2}}) as node:
        small = node.worker("small", maximum_packet_size=100)
        node.fill(bytes(1000))
        node.wait(10)
        (letter,) = node.run(node.queues.read("dead", 0, 10))
        assert "larger than the consumer takes" == letter.properties["dead-reason"]
        large = node.worker("large")
        node.fill(bytes(2000))
        node.wait(10)
        assert ([bytes(2000)], []) == (large.drain(), small.payloads())


def test_a_dead_letter_waits_for_room() -> None:
    """It stays where it is as long as the dead-letter queue is full, and holds up nobody."""
    dead = {"topics": ["dead"], "max_messages": 1}
    with QueuesNode.on(queue={"dead": dead, "q": DEAD | {"max_attempts": 1}}) as node:
        node.fill(b"old", topic="dead")
        node.fill(b"x", b"y")
        worker = node.worker("a")
        bad, good = worker.messages()
        worker.ack(bad, reason=REFUSED)
        worker.ack(good)
        node.wait(20)
        assert ([b"x"], True) == (node.stored(), node.counters["dead_letter_refused"] > 1)
        worker.subscribe("$queue/dead")
        assert [b"old"] == worker.drain()
        node.wait(20)
        assert [b"x"] == worker.drain()
        assert [] == node.stored()


def test_a_dead_letter_with_a_key_is_not_lost_in_a_full_queue() -> None:
    """Only the store could tell whether it replaces an older value, and it leaves its old queue in the same write."""
    dead = {"topics": ["dead"], "kind": "last_value", "max_messages": 1}
    with QueuesNode.on(queue={"dead": dead, "q": DEAD | {"max_attempts": 1}}) as node:
        node.fill(b"old", topic="dead")
        node.fill(b"x")
        worker = node.worker("a")
        worker.ack(*worker.messages(), reason=REFUSED)
        assert ([], [b"old", b"x"]) == (node.stored(), node.stored("dead"))


# -- bounds


def test_a_full_queue_refuses() -> None:
    """MQTT 5 hears it, MQTT 3 is disconnected, QoS 0 is counted; there is room again when something is consumed."""
    with QueuesNode.on(queue=queue(max_messages=2)) as node:
        pub, old = node.client("pub"), node.client("old", 4)
        assert [0, 0, QUOTA] == [pub.publish("q/a", payload) for payload in numbered(3)]
        assert (0, QUOTA) == (pub.publish("q/a", b"0", 0), pub.publish("q/a", b"2", 2))
        old.put("q/a", b"2")
        node.turn()
        assert (4, False) == (node.counters["refused_full"], old.open)
        worker = node.worker("a")
        assert numbered(2) == worker.drain()
        assert [] == node.stored()
        assert 0 == pub.publish("q/a", b"4")
        assert [b"4"] == worker.drain()


def test_a_message_is_in_all_queues_or_in_none() -> None:
    many = {"a": {"topics": ["x"], "max_messages": 1}, "b": {"topics": ["x"]}}
    with QueuesNode.on(queue=many) as node:
        pub = node.client("pub")
        assert [0, QUOTA] == [pub.publish("x", payload) for payload in numbered(2)]
        pub.publish("x", b"2", 0)
        assert 3 == node.counters["appended"]
        assert [b"0", b"2"] == node.stored("b"), "nobody hears of QoS 0, so it goes where there is room"


def test_expired_messages_make_room() -> None:
    """They leave the store without a word; whoever is refused makes the queue look how large it is."""
    with QueuesNode.on(queue=queue(max_messages=1), sweep_interval=1e6) as node:
        pub = node.client("pub")
        assert [0, QUOTA] == [pub.publish("q/a", payload, message_expiry=500) for payload in numbered(2)]
        node.clock.now += 1000
        node.run(node.held.sweep(node.now, 100))
        assert QUOTA == pub.publish("q/a", b"2")
        node.wait(10)
        assert 0 == pub.publish("q/a", b"2")
        assert [b"2"] == node.stored()


def test_a_full_queue_drops_the_oldest() -> None:
    """One that a consumer holds is not among them: if it fails, another one gets it. What is gone comes to nobody."""
    for fails in (True, False):
        with QueuesNode.on(queue=queue(max_messages=3, overflow="drop_oldest")) as node:
            worker = node.worker("a", receive_maximum=1)
            node.fill(b"0")
            assert [b"0"] == worker.payloads()
            node.fill(*numbered(6)[1:])
            assert ([b"0", b"4", b"5"], 3) == (node.stored(), node.counters["dropped"])
            if fails:
                worker.close()
                worker = node.worker("b", receive_maximum=1)
            assert [b"0", b"4", b"5"] == worker.drain()
            assert [] == node.stored()


def test_the_lowest_level_is_dropped_first() -> None:
    with QueuesNode.on(queue=queue(max_messages=4, overflow="drop_oldest", priorities=3)) as node:
        node.fill(*numbered(4, "low"))
        node.fill(*numbered(3, "high"), **priority("9"))
        assert ([b"high0", b"high1", b"high2", b"low3"], 3) == (node.stored(), node.counters["dropped"])


def test_what_consumers_have_is_looked_for_only_in_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs as much as there are messages in flight. What is known of the size may be too little, once."""
    looked: list[Level] = []
    sent_up_to = QueueDispatcher.sent_up_to

    def look(dispatcher: QueueDispatcher, level: Level) -> int:
        looked.append(level)
        return sent_up_to(dispatcher, level)

    monkeypatch.setattr(QueueDispatcher, "sent_up_to", look)
    with QueuesNode.on(queue=queue(max_messages=3, overflow="drop_oldest")) as node:
        node.fill(*numbered(3))
        assert not looked
        node.fill(b"3")
        assert looked and [b"1", b"2", b"3"] == node.stored()
        node.queue()._entries = 0
        node.fill(b"4")
        node.wait(10)
        assert node.queue()._entries >= 3
        node.fill(b"5", b"6")
        assert [b"4", b"5", b"6"] == node.stored()


def test_what_goes_to_a_consumer_while_a_queue_is_trimmed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the consumer fails, another one gets it."""
    with QueuesNode.on(queue=queue(max_messages=2, overflow="drop_oldest", priorities=2)) as node:
        node.fill(*numbered(2, "low"))
        read, answer = node.held.mailboxes.read, asyncio.Event()
        trimming: list[str] = []

        async def slow(owner: str, *args: Any) -> list[Entry]:
            entries = await read(owner, *args)
            if not trimming:
                trimming.append(owner)
                await answer.wait()
            return entries

        monkeypatch.setattr(node.held.mailboxes, "read", slow)
        node.fill(b"high", **priority("9"))
        assert ["queue:q"] == trimming
        worker = node.worker("a", receive_maximum=1)
        worker.ack(*worker.messages())
        (held,) = worker.messages()
        answer.set()
        node.wait(1)
        assert bytes(held.payload) in node.stored()


def test_what_could_not_be_dropped_at_once_is_dropped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """No consumer gets it any more, so it must not stay in the queue."""
    with QueuesNode.on(queue=queue(max_messages=2, overflow="drop_oldest", priorities=2)) as node:
        worker = node.worker("a", receive_maximum=1)
        monkeypatch.setattr(node.held, "write", failing_removals(1, node.held.write))
        node.fill(*numbered(3))
        node.wait(2)
        assert [b"0", b"2"] == worker.drain()
        assert ([], 1) == (node.stored(), node.counters["dropped"])


def test_bytes_are_bounded_too() -> None:
    """A message larger than the queue is refused, whatever happens to others."""
    for overflow in ("refuse", "drop_oldest"):
        with QueuesNode.on(queue=queue(max_bytes=10_000, overflow=overflow)) as node:
            pub = node.client("pub")
            answers = [pub.publish("q/a", bytes([number]) * 3000) for number in range(5)]
            assert ([0, 0, 0, QUOTA, QUOTA] if overflow == "refuse" else [0] * 5) == answers
            assert ([0, 1, 2] if overflow == "refuse" else [2, 3, 4]) == [payload[0] for payload in node.stored()]
            assert QUOTA == pub.publish("q/a", bytes(20_000))


def test_what_waits_for_the_store_is_bounded() -> None:
    """A store that does not answer is not given everything at once."""
    with QueuesNode.on(queue=queue(), max_pending=5) as node:
        pub = node.client("pub")
        node.held.held = True
        for payload in numbered(8):
            pub.put("q/a", payload, 0)
        node.turn()
        assert 3 == node.counters["refused_pending"]
        assert QUOTA == pub.publish("q/a", b"8")
        node.let_go()
        assert numbered(5) == node.stored()


def test_a_store_that_does_not_answer_does_not_keep_the_plugin() -> None:
    """It ends all the same; the publisher is answered when the store is back."""
    with QueuesNode.on(queue=queue()) as node:
        pub = node.client("pub")
        node.held.held = True
        pub.put("q/a", b"1")
        unloading = node.begin(node.plugins.unload("queues"))
        node.wait(LAST_ATTEMPT)
        assert unloading.done()
        assert [] == pub.take()
        node.let_go()
        assert [0] == [answer.reason for answer in pub.take() if isinstance(answer, Puback)]


# -- a store that fails


def test_a_store_that_is_full_refuses_the_publisher() -> None:
    """And nothing stays behind that would count against the queue."""
    with QueuesNode.on(queue=queue(max_messages=1)) as node:
        pub = node.client("pub")
        node.held.full = True
        assert QUOTA == pub.publish("q/a", b"1")
        node.held.full = False
        assert 0 == pub.publish("q/a", b"2")
        assert [b"2"] == node.stored()


def test_an_unknown_outcome_closes_the_connection() -> None:
    """The publisher sends it again; with QoS 1 it may be there twice then, and never not at all."""
    with QueuesNode.on(queue=queue()) as node:
        pub = node.client("pub")
        node.held.held = True
        pub.put("q/a", b"1")
        node.turn()
        node.fail_write(written=True)
        node.let_go()
        assert not pub.open
        assert [b"1"] == node.stored()
        assert 0 == node.client("pub").publish("q/a", b"1")
        assert [b"1", b"1"] == node.stored()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_an_append_of_unknown_outcome_reaches_a_consumer(*, qos: int) -> None:
    """Without a restart; other messages follow it, or none."""
    for followed in (False, True):
        with QueuesNode.on(queue=queue(max_messages=2)) as node:
            worker, pub = node.worker("a"), node.client("pub")
            node.held.held = True
            pub.put("q/a", b"1", qos)
            node.turn()
            node.fail_write(written=True)
            node.let_go()
            if followed:
                node.fill(b"2")
            node.wait(1)
            expected = [b"1", b"2"] if followed else [b"1"]
            assert expected == worker.payloads()
            assert len(expected) == node.queue().size[0]
            worker.ack(*worker.inflight)
            node.fill(b"3")
            assert [b"3"] == worker.drain()
            assert [] == node.stored()


def test_a_repetition_of_what_was_stored_unnoticed_reaches_a_consumer_once() -> None:
    """QoS 2: the repeated append is told that the first one was done, which the consumers were not."""
    with QueuesNode.on(queue=queue()) as node:
        worker = node.worker("a")
        message = Message("q/a", b"once", 2, publisher="pub", guid=bytes(16), timestamp=node.now)
        node.held.held = True
        first = node.begin(published(node, message))
        node.fail_write(written=True)
        node.let_go()
        assert isinstance(first.exception(), StoreError)
        node.run(published(node, message))
        assert [b"once"] == worker.drain()
        assert [] == node.stored()


async def published(node: QueuesNode, message: Message) -> None:
    """Publish a message under its GUID, and wait until it is stored."""
    chain = node.hooks.publish_chains("q/a")[0]
    assert chain is not None
    copy = replace(message, headers={})
    assert copy is chain.fold(None, acc=copy)
    for done in cast("list[Commit[None]]", copy.headers[AFTER]):
        await done


def test_a_repetition_with_the_same_guid_is_not_doubled() -> None:
    """QoS 2: the broker publishes again under the same GUID what may have been stored."""
    with QueuesNode.on(queue=queue()) as node:
        message = Message("q/a", b"once", 2, publisher="pub", guid=bytes(16), timestamp=node.now)
        for _ in range(2):
            node.run(published(node, message))
        pub = node.client("pub")
        assert 0 == pub.publish("q/a", b"x", 2)
        pub.send(Publish("q/a", b"y", 2, packet_id=9), Publish("q/a", b"y", 2, dup=True, packet_id=9), Pubrel(9))
        assert [b"once", b"x", b"y"] == node.stored()


def failing_removals(times: int, write: Callable[[Batch], Commit[Written]]) -> Callable[[Batch], Commit[Written]]:
    """Let so many writes that remove something fail."""
    left = iter(range(times))

    def fails(batch: Batch) -> Commit[Written]:
        removes = any(isinstance(step, Acknowledge) for step in batch.steps)
        return Commit.failed(StoreError("away")) if removes and next(left, None) is not None else write(batch)

    return fails


def test_acknowledgements_that_fail_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile nobody gets the message again."""
    with QueuesNode.on(queue=queue()) as node:
        node.fill(*numbered(3))
        monkeypatch.setattr(node.held, "write", failing_removals(3, node.held.write))
        worker = node.worker("a")
        worker.drain()
        worker.close()
        other = node.worker("b")
        node.wait(60)
        assert [] == other.messages()
        assert [] == node.stored()


def test_a_dead_letter_is_moved_once() -> None:
    """Though the store did not say that it was moved."""
    with QueuesNode.on(queue={"dead": {}, "q": DEAD | {"max_attempts": 1}}) as node:
        node.fill(b"x")
        worker = node.worker("a")
        (message,) = worker.messages()
        node.wait(1)
        assert [1] == node.marks()
        node.held.held = True
        worker.ack(message, reason=REFUSED)
        for written in (True, False):
            node.wait(10)
            assert node.held.waiting
            node.fail_write(written=written)
        node.let_go()
        node.wait(10)
        assert ([], [b"x"], 1) == (node.stored(), node.stored("dead"), node.counters["dead_lettered"])


def test_reading_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with QueuesNode.on(queue=queue()) as node:
        node.fill(b"x")
        mailboxes = node.held.mailboxes
        read, left = mailboxes.read, iter(range(3))

        async def fails(*args: Any) -> list[Entry]:
            if next(left, None) is not None:
                raise StoreError("away")
            return await read(*args)

        monkeypatch.setattr(mailboxes, "read", fails)
        worker = node.worker("a")
        assert [] == worker.payloads()
        node.wait(60)
        assert [b"x"] == worker.drain()


def test_a_defect_in_one_queue_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is stored; the publisher is answered, and the next message is taken."""
    with QueuesNode.on(queue=queue()) as node:
        pub = node.client("pub")
        with monkeypatch.context() as broken:
            broken.setattr("motorcade.plugins.logs.queues.queue.Queue.appended", lambda *_: 1 / 0)
            assert 0 == pub.publish("q/a", b"1")
        assert 0 == pub.publish("q/a", b"2")
        assert [b"1", b"2"] == node.stored()


def test_what_cannot_be_read_holds_up_nobody() -> None:
    """It is counted, stays where it is, and an operator sees it."""
    with QueuesNode.on(queue=queue()) as node:
        node.run(node.held.mailboxes.append(["queue:q"], Draft(b"damaged", b"?"), node.now))
        node.fill(b"x")
        assert [b"x"] == node.worker("a").drain()
        assert 1 == node.counters["unreadable"]
        (found,) = [found for found in node.run(node.queues.read("q", 0, 10)) if found.payload == b"?"]
        assert found.properties["error"]


#: A message and a dead letter, as the version before `delivery.record` stored them.
OLD = (
    b"\x9e\x01\xa3q/a\xa3pub\xa4user\xc4\x10\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f"
    b"\xcbA\xd9T\xfc@ \x00\x00\xcbA\xd9T\xfd!\x00\x00\x00\x02\x01"
    b"\xaatext/plain\xa6answer\xc4\x02\x00\xff\x92\x92\xa1a\xa11\x92\xa1a\xa12\xc0"
)
OLD_DEAD = (
    b"\x9e\x01\xa3q/b\xa3pub\xc0\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xcbA\xd9T\xfc@\x00\x00"
    b"\x00\xc0\x00\xc0\xc0\xc0\xc0\x90\x94\xa1q\xb1refused with 0x83\x02\x91\x93\xcbA\xd9T\xfc@@\x00\x00"
    b"\xa1a\xb1refused with 0x83"
)


def test_entries_of_the_version_before_are_read() -> None:
    with QueuesNode.on(queue=queue()) as node:
        for body in (OLD, OLD_DEAD):
            node.run(node.held.mailboxes.append(["queue:q"], Draft(body, b"beside"), node.now))
        plain, dead = node.run(node.queues.read("q", 0, 10))
        assert ("q/a", b"beside", "pub", bytes(range(16)).hex()) == (
            plain.topic,
            plain.payload,
            plain.publisher,
            plain.guid,
        )
        assert ("2", "0", "q", "2") == tuple(
            found.properties[name]
            for found, name in ((plain, "qos"), (dead, "qos"), (dead, "dead-queue"), (dead, "attempts"))
        )
        first, second = node.worker("a").messages()
        told = first.properties
        assert ("q/a", b"beside", 1, False) == (first.topic, first.payload, first.qos, first.retain)
        assert (1, 900, "text/plain", "answer", b"\x00\xff") == (
            told.payload_format,
            told.message_expiry,
            told.content_type,
            told.response_topic,
            told.correlation_data,
        )
        assert (("a", "1"), ("a", "2")) == told.user_properties
        assert {
            "dead-reason": "refused with 0x83",
            "dead-queue": "q",
            "dead-attempts": "2",
            "dead-history": '[[1700000001.0,"a","refused with 0x83"]]',
        } == dict(second.properties.user_properties)


# -- last value


def test_of_a_key_only_the_newest_is_kept() -> None:
    """By its topic, its publisher or a property; of a message without the property nothing is known."""
    for key, kept in (
        ("topic", [b"none", b"0", b"1", b"3"]),
        ("publisher", [b"3"]),
        ("property:vin", [b"none", b"0", b"3"]),
    ):
        with QueuesNode.on(queue=queue(kind="last_value", key=key)) as node:
            pub = node.client("pub")
            pub.publish("q/none", b"none")
            pub.publish("q/0", b"0")
            for number, topic in ((1, "q/1"), (2, "q/2"), (3, "q/2")):
                pub.publish(topic, b"%d" % number, user_properties=(("vin", "V"),))
            assert (kept, 5 - len(kept)) == (node.stored(), node.counters["replaced"]), key
            assert kept == node.worker("a").drain(), key
            assert [] == node.stored()


def test_a_value_in_flight_is_superseded_and_one_that_was_not_sent_replaced() -> None:
    """The acknowledgement of an old value does not remove the new one."""
    with QueuesNode.on(queue=queue(kind="last_value")) as node:
        worker = node.worker("a", receive_maximum=1)
        node.fill(b"a1", topic="q/a")
        (first,) = worker.messages()
        node.fill(b"b1", b"b2", b"b3", topic="q/b")
        node.fill(b"a2", topic="q/a")
        worker.ack(first)
        assert [b"b3", b"a2"] == worker.drain()
        assert [] == node.stored()


def test_a_full_queue_takes_newer_values() -> None:
    """But no further keys."""
    with QueuesNode.on(queue=queue(kind="last_value", max_messages=2)) as node:
        pub = node.client("pub")
        topics = ["q/a", "q/a", "q/a", "q/b", "q/a", "q/c", "q/b"]
        assert [0, 0, 0, 0, 0, QUOTA, 0] == [pub.publish(topic, topic.encode()) for topic in topics]
        assert [b"q/a", b"q/b"] == node.stored()


def test_what_is_refused_by_a_full_queue_fails_alone() -> None:
    """Not the others that are written with it."""
    with QueuesNode.on(queue=queue(kind="last_value", max_messages=2)) as node:
        pub = node.client("pub")
        assert [0, 0] == [pub.publish(topic, b"old") for topic in ("q/a", "q/b")]
        for number, topic in enumerate(("q/c", "q/a", "q/d", "q/b"), 1):
            pub.send(Publish(topic, b"new " + topic.encode(), 1, packet_id=number))
        node.turn()
        answers = {answer.packet_id: answer.reason for answer in pub.take() if isinstance(answer, Puback)}
        assert {1: QUOTA, 2: 0, 3: QUOTA, 4: 0} == answers
        assert [b"new q/a", b"new q/b"] == node.stored()


# -- priorities and age


def test_higher_priorities_come_first() -> None:
    """What is no number, or none at all, has none; one too high is the highest; without levels it means nothing."""
    for levels in (1, 3):
        with QueuesNode.on(queue=queue(priorities=levels)) as node:
            node.fill(b"plain")
            for text in ("1", "x", "-1", "2", "77", "", "1"):
                node.fill(text.encode(), **priority(text))
            wanted = [b"2", b"77", b"1", b"1", b"plain", b"x", b"-1", b""]
            if levels == 1:
                wanted = [b"plain", b"1", b"x", b"-1", b"2", b"77", b"", b"1"]
            assert wanted == node.stored()
            for number, found in enumerate(node.run(node.queues.read("q", 0, 100)), 1):
                rest = node.run(node.queues.read("q", found.position, 100))
                assert wanted[number:] == [each.payload for each in rest]
            assert wanted == node.worker("a").drain()
            assert [] == node.stored()


def test_what_is_too_old_is_not_given() -> None:
    """By its own expiry or the retention of the queue; the sweep removes it, be it marked."""
    with QueuesNode.on(queue=queue(retention=1000, ack_timeout=0), sweep_interval=1e6) as node:
        node.fill(b"0", message_expiry=100)
        node.fill(b"1")
        worker = node.worker("a")
        assert numbered(2) == worker.payloads()
        node.wait(1)
        assert [1, 1] == node.marks()
        worker.close()
        node.wait(200)
        assert [b"1"] == node.stored()
        node.wait(900)
        node.fill(b"2")
        assert [b"2"] == node.stored()
        assert 3 == node.run(node.queue().sweep(node.now, 10))
        node.wait(0.1)
        assert (1, 2) == (len(node.marks()), node.counters["expired"])
        assert [b"2"] == node.worker("b").drain()


# -- who may

FILTERS = [
    ("$queue/q", 1),
    ("$queue/not-there-yet", 1),
    *((f"$queue/{name}", 0x8F) for name in ("a/b", "+", "#", "x/#", "", "-x", ".x", "a b", "ü", "x" * 65)),
    ("$queue", 0x8F),
    ("$share/g/$queue/q", 0x9E),
    ("$queues/q", 2),
    ("a/$queue/q", 2),
]


def test_who_may_subscribe_and_publish_where() -> None:
    """A refusal says why, the connection stays; MQTT 3 hears 0x80, and is disconnected if it publishes."""
    with QueuesNode.on(queue=queue()) as node:
        worker, old = node.client("worker"), node.client("old", 4)
        for filter_, reason in FILTERS:
            answer = worker.subscribe(filter_, 2)
            assert (reason,) == answer.reasons, filter_
            assert bool(answer.properties.reason_string) == (reason > 2 or "not-there" in filter_), filter_
            assert (min(reason, 0x80),) == old.subscribe(filter_, 2).reasons, filter_
        for topic in ("$queue/q", "$queue/a/b", "$queue"):
            assert 0x90 == worker.publish(topic, b"x"), topic
        old.put("$queue/q", b"x")
        node.turn()
        assert (False, []) == (old.open, node.stored())


def test_a_queue_without_topics_costs_publishers_nothing() -> None:
    with QueuesNode.on(queue={"dead": {}, "q": {"topics": ["q"], "dead_letter": "dead"}}) as node:
        assert (None, None) == node.hooks.publish_chains("other")
        assert None is not node.hooks.publish_chains("q")[0]


def test_nothing_happens_while_nothing_happens() -> None:
    """Consumers that wait set no timers, and nobody looks into the store for them."""
    with QueuesNode.on(queue=queue()) as node:
        worker = node.worker("a")
        node.fill(b"x")
        worker.drain()
        node.wait(100)
        assert None is node.queue()._timer
        assert {"queues.sweep"} == {task.get_name() for task in node.loaded.context.tasks}


# -- sessions


def test_a_session_that_is_away_gets_nothing_and_takes_part_again_when_it_is_back() -> None:
    """What it held goes to others, or to itself when it is back; also to the connection that takes it over."""
    lasting: dict[str, Any] = {"clean": False, "session_expiry": 100}
    for alone in (True, False):
        with QueuesNode.on(queue=queue(ack_timeout=0)) as node:
            node.fill(*numbered(100))
            first = node.worker("a", receive_maximum=10, **lasting)
            assert numbered(10) == first.payloads()
            first.ack(*first.inflight[:3])
            if not alone:
                first.close()
                assert numbered(100)[3:] == node.worker("b").drain()
            second = node.worker("a", **lasting)  # takes over what is not closed
            assert (True, False) == (second.connack.session_present, first.open)
            assert (numbered(100)[3:] if alone else []) == second.drain()
            node.fill(*numbered(10))
            assert (10 if alone else 5) == len(second.drain())


def test_what_is_acknowledged_after_unsubscribing_counts() -> None:
    with QueuesNode.on(queue=queue(ack_timeout=0)) as node:
        node.fill(*numbered(5))
        worker = node.worker("a")
        held = worker.messages()
        worker.unsubscribe("$queue/q")
        worker.ack(*held[:2])
        assert numbered(5)[2:] == node.worker("b").drain()


def test_what_a_broken_source_had_in_flight_hangs_on_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler takes it back while there is no source to hear it; it comes again now, not after ack_timeout."""
    with QueuesNode.on(queue=queue(ack_timeout=0)) as node:
        worker = node.worker("a", session_expiry=100, receive_maximum=3)
        node.fill(*numbered(6))
        first, *_ = worker.messages()
        kind = next(kind for kind in node.state.shared.sources.kinds if kind.name == "queue")
        with monkeypatch.context() as broken:
            broken.setattr(QueueSource, "delivered_run", lambda self, given, ack: 1 // 0)
            worker.ack(first)
            node.wait(10)
            assert kind.counters["recreated"]
            worker.close()
            node.turn()
        worker = node.worker("a", clean=False, session_expiry=100)
        assert worker.connack.session_present
        node.wait(10)
        assert set(numbered(6)[1:]) <= set(worker.drain()), "what became of the first one, nobody has heard"
        assert [] == node.stored()
        assert 1 == kind.counters["failed"]
        kind.counters["failed"] = 0  # as it was meant to be
