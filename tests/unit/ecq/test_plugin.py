"""Compacted queues of a node in virtual time: what examples say more clearly than `test_model.py` does."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from motorcade.broker.limits import SessionOptions
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.declared import BadOptionsError, UnknownError
from motorcade.mqtt.packets import Puback, Publish, Pubrec, Pubrel, Suback, Subscribe, Will
from motorcade.plugins.logs.compacted.options import EcqConfig
from motorcade.storage.ports import Draft, Entry, StoreError, StoreFullError
from tests.unit.ecq.node import EXCLUSIVE, ROOTS, SHARED, EcqNode, numbers, told, values

QUOTA, REFUSED = 0x97, 0x83

# -- appending and consuming


def test_the_last_value_of_each_key_comes_in_order() -> None:
    """The key is everything after the client id; an empty payload is a value; the numbers of each queue are its own."""
    with EcqNode.on() as node:
        node.fill("other", ("a", b"x"))
        node.fill("car", ("a", b"1"), ("b/c", b"2"), ("a", b"3"), ("d", b""), ("/a", b"5"), ("a/", b"6"), ("ü", b"7"))
        kept = [(2, "b/c", b"2"), (3, "a", b"3"), (4, "d", b""), (5, "/a", b"5"), (6, "a/", b"6"), (7, "ü", b"7")]
        car = node.consumer()
        messages = car.messages()
        assert kept == told(messages)
        assert {(1, False, False)} == {(message.qos, message.retain, message.dup) for message in messages}
        car.ack(*messages)
        assert 7 == node.progress()
        assert kept == node.stored(), "all is kept"


def test_who_is_connected_gets_it_at_once_and_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the QoS of its producer."""
    with EcqNode.on() as node:
        car, pub = node.consumer(), node.client("pub")
        monkeypatch.setattr(node.held.mailboxes, "read", None)
        for number in range(20):
            assert 0 == pub.publish(f"$ECQ/w/car/k{number}", b"%d" % number, number % 3)
        assert [*range(1, 21)] == numbers(car.messages())
        monkeypatch.undo()


def test_what_the_producer_says_is_kept() -> None:
    """But for a sequence number of its own making; and the QoS is 1, whatever it was."""
    for form, root in ROOTS.items():
        number = f"{root[1:].lower()}-seqno"
        said: dict[str, Any] = {
            "content_type": "text/plain",
            "response_topic": "answer",
            "correlation_data": b"c",
            "payload_format": 1,
        }
        pairs = (("x", "1"), (number, "4711"), ("x", "2"))
        with EcqNode.on() as node:
            pub = node.client("pub")
            for key, payload in (("k", b"v"), ("l", b"v" * 10_000)):
                pub.publish(f"{root}/w/car/{key}", payload, message_expiry=1000, user_properties=pairs, **said)
            node.wait(100)
            car = node.consumer("car", shared="car" if form is SHARED else "")
            for message, counted in zip(car.messages(), ("1", "2"), strict=True):
                found = message.properties
                assert (("x", "1"), ("x", "2"), (number, counted)) == found.user_properties
                assert said == {name: getattr(found, name) for name in said}
                assert 900 == found.message_expiry


def test_a_message_that_has_expired_does_not_come_nor_what_it_has_replaced() -> None:
    with EcqNode.on() as node:
        node.fill("car", ("k", b"old"))
        pub = node.client("pub")
        pub.publish("$ECQ/w/car/k", b"expires", message_expiry=1)
        pub.publish("$ECQ/w/car/l", b"lasts", message_expiry=1000)
        node.wait(2)
        assert [b"lasts"] == node.consumer().payloads()


def test_nobody_else_gets_it() -> None:
    """Not by a wildcard, nor does its consumer twice; a subscription identifier comes with it."""
    with EcqNode.on() as node:
        other, car, pub = node.client("other"), node.client("car"), node.client("pub")
        for client in (other, car):
            for filter_ in ("#", "+/+/+/+", "+/w/#"):
                client.subscribe(filter_)
        car.subscribe("$ECQ/car/#", identifier=77)
        assert 0 == pub.publish("$ECQ/w/car/k", b"v")
        assert [] == other.messages()
        assert [(77,)] == [message.properties.subscription_ids for message in car.messages()]


def test_more_than_fits_the_window() -> None:
    """Each acknowledgement makes room for the next: no batch has to be complete."""
    for version, window in ((4, 32), (5, 10)):
        with EcqNode.on() as node:
            node.fill("car", *((f"k{number}", b"%d" % number) for number in range(300)))
            car = node.consumer("car", version, receive_maximum=10)
            held = car.messages()
            assert window == len(held)
            car.ack(held[3])
            assert [b"%d" % window] == car.payloads()
            car.ack(*held[:3], *held[4:])
            car.drain()
            assert [b"%d" % number for number in range(300)] == [message.payload for message in car.received]
            assert 300 == node.progress()


def test_exactly_once_into_the_queue() -> None:
    """QoS 2: the packet that comes again is the same message. QoS 1: it is a new one."""
    with EcqNode.on() as node:
        pub = node.client("pub")
        for key, repeated in (("k", False), ("l", True)):
            pub.send(Publish(f"$ECQ/w/car/{key}", b"v", 2, dup=repeated, packet_id=9))
            assert 0 == pub.expect(Pubrec).reason
        pub.send(Pubrel(9))
        for key, repeated in (("m", False), ("n", True)):
            pub.send(Publish(f"$ECQ/w/car/{key}", b"v", 1, dup=repeated, packet_id=9))
            assert 0 == pub.expect(Puback).reason
        assert ["k", "m", "n"] == node.keys()


def test_a_repetition_with_the_same_guid_is_not_doubled() -> None:
    """QoS 2: the broker publishes again under the same GUID what may have been stored."""
    with EcqNode.on() as node:
        for _ in range(2):
            node.run(node.broker.publish(Message("$ECQ/w/car/k", b"v", 2, guid=bytes(16))))
        assert [(1, "k", b"v")] == node.stored()


def test_wills_and_plugins_of_the_node_append() -> None:
    with EcqNode.on() as node:
        car = node.consumer()
        node.run(node.broker.publish(Message("$ECQ/w/car/k", b"v", 1)))
        node.client("lost", will=Will("$ECQ/w/car/state", b"lost", 1)).close()
        assert [("k", b"v"), ("state", b"lost")] == values(car.messages())


# -- progress


def test_progress_outlives_the_process_and_is_there_at_once() -> None:
    """A clean end writes it; a killed node forgets no more than an interval; whoever comes back at once finds it."""
    for killed in (False, True):
        with EcqNode.on(progress_interval=10.0) as node:
            node.fill("car", ("a", b"1"), ("b", b"2"), ("c", b"3"), ("d", b"4"))
            car = node.consumer()
            messages = car.messages()
            car.ack(*messages[:2])
            node.wait(10.0)
            car.ack(messages[2])
            second = node.kill() if killed else node.restart()
            car = second.consumer()
            assert ([3, 4] if killed else [4]) == numbers(car.messages())
            car.ack(*car.inflight)
            car.close()
            car = second.consumer()
            second.fill("car", ("e", b"5"))
            assert [5] == numbers(car.messages())


def test_a_newer_value_supersedes_what_was_in_flight() -> None:
    """With a session that lasts and without; nothing comes as a repetition."""
    sessions: list[dict[str, Any]] = [{"session_expiry": 100, "clean": False}, {}]
    for lasting in sessions:
        with EcqNode.on() as node:
            node.fill("car", ("a", b"old"), ("b", b"1"))
            car = node.consumer("car", **lasting)
            assert 2 == len(car.messages())
            car.close()
            node.fill("car", ("a", b"new"))
            messages = node.consumer("car", **lasting).messages()
            assert [("b", b"1"), ("a", b"new")] == values(messages)
            assert not [message for message in messages if message.dup]


def test_progress_passes_what_was_replaced() -> None:
    """Once the consumer is away: until then it may still acknowledge it."""
    with EcqNode.on() as node:
        car = node.consumer()
        node.fill("car", ("a", b"1"), ("a", b"2"))
        car.ack(car.messages()[1])
        assert 0 == node.progress()
        car.close()
        node.turn()
        assert 2 == node.progress()


# -- reading beside appending


def test_what_is_appended_while_it_reads_is_not_missed() -> None:
    with EcqNode.on() as node:
        node.fill("car", ("a", b"1"))
        node.held.held_reads = True
        car = node.client("car")
        car.subscribe("$ECQ/car/#")
        (reading,) = node.held.reads
        found = reading.apply()
        reading.apply = lambda: found  # the answer is on its way
        node.held.held_reads = False
        node.fill("car", ("b", b"2"), ("a", b"3"))
        node.held.let_read()
        assert [1, 2, 3] == numbers(car.messages())


def test_nobody_is_given_what_the_node_has_not_heard_of() -> None:
    """It may be one too many, and go again; if it stays, it comes in its place, or when the heartbeat finds it."""
    for heartbeat in (False, True):
        with EcqNode.on(heartbeat=10.0) as node:
            node.fill("car", ("a", b"1"), ("b", b"2"))
            mailboxes = node.held.mailboxes
            (entry, _) = node.run(mailboxes.read("ecq:car", 0, 2, 0.0))
            node.run(mailboxes.append(["ecq:car"], Draft(entry.body, key=b"z"), node.now))
            car = node.consumer()
            assert [1, 2] == numbers(car.messages())
            if heartbeat:
                node.wait(11.0)
                assert [(3, "z", b"1")] == told(car.messages())
            else:
                node.fill("car", ("c", b"4"))
                assert [3, 4] == numbers(car.messages())


# -- refusals of consumers


def test_what_is_refused_comes_again_unless_it_is_replaced() -> None:
    """Before anything newer that waits; however long it takes until a newer value is stored."""
    with EcqNode.on(retry_delay=1.0) as node:
        node.fill("car", ("a", b"1"), ("b", b"2"))
        car = node.consumer("car", receive_maximum=2)
        first, second = car.messages()
        node.fill("car", ("c", b"3"))
        car.ack(first, reason=REFUSED)
        assert [3] == numbers(car.messages()), "others do not wait for it"
        car.ack(second)
        assert 0 == node.progress(), "progress does"
        node.wait(1.0)
        (again,) = car.messages()
        assert ([1], 1) == (numbers([again]), node.counters["given_again"])
        car.ack(again, reason=REFUSED)
        node.fill("car", ("a", b"new"))
        node.wait(10.0)
        assert [("a", b"new")] == values(car.messages())


def test_what_is_refused_too_often_is_passed_over_and_kept() -> None:
    with EcqNode.on(retry_delay=1.0, max_attempts=3) as node:
        node.fill("car", ("a", b"1"), ("b", b"2"))
        car = node.consumer()
        message, other = car.messages()
        for _ in range(2):
            car.ack(message, reason=QUOTA)
            node.wait(1.0)
            (message,) = car.messages()
            assert [1] == numbers([message])
        car.ack(message, reason=QUOTA)
        node.wait(10.0)
        assert [] == car.messages()
        car.ack(other)
        assert (1, 3, 2) == (node.counters["given_up"], node.counters["refused"], node.progress())
        assert 2 == len(node.stored())


def test_what_a_client_cannot_take_is_passed_over() -> None:
    with EcqNode.on() as node:
        node.fill("car", ("a", bytes(1000)), ("b", b"2"))
        car = node.consumer("car", maximum_packet_size=200)
        assert [b"2"] == car.drain()
        assert (1, 2) == (node.counters["too_large"], node.progress())


# -- refusals of the plugin

#: Reason, QoS, filters; `car` asks. A SUBACK may not say that a QoS is not supported (0x9B).
FILTERS: list[tuple[int, int, list[str]]] = [
    (0x83, 0, ["$ECQ/car/#", "$SCQ/q/#"]),
    (0x83, 2, ["$ECQ/car/#", "$SCQ/q/#"]),
    (0x87, 0, ["$ECQ/other/#"]),
    (0x87, 1, ["$ECQ/other/#", "$ECQ/w/#", "$ECQ/rewind/#"]),
    (0x8F, 1, ["$ECQ", "$ECQ/#", "$ECQ/+/#", "$ECQ/+/k", "$ECQ/car", "$ECQ/car/k", "$ECQ/car/k/#", "$ECQ/car/+"]),
    (0x8F, 1, ["$ECQ/w/car/#", "$SCQ/#", "$SCQ/+/#", "$SCQ//#", "$SCQ/q", "$SCQ/q/k", "$SCQ/q/+", "$SCQ/w/#"]),
    (0x8F, 1, ["$SCQ/w/q/#", "$SCQ/rewind/#", f"$SCQ/{'n' * 300}/#"]),
    (0x9E, 1, ["$share/g/$ECQ/car/#", "$share/g/$SCQ/q/#"]),
]


def test_subscriptions_that_are_refused() -> None:
    """In words, or with 0x80 to MQTT 3; the connection stays, and what was granted before does. Others are granted."""
    with EcqNode.on() as node:
        car = node.consumer()
        for reason, qos, filter_ in ((reason, qos, each) for reason, qos, some in FILTERS for each in some):
            answer = car.subscribe(filter_, qos)
            assert ((reason,), True) == (answer.reasons, bool(answer.properties.reason_string)), filter_
            old = node.client("car" if "car" in filter_ else "old", 4)
            assert (0x80,) == old.subscribe(filter_, qos).reasons, filter_
            if "car" in filter_:
                car = node.consumer()
        node.fill("car", ("k", b"v"))
        assert [b"v"] == car.payloads()
        refused = node.counters["refused_subscribe"]
        for filter_ in ("$ECQX/a", "a/$ECQ/car/#", "#", "$share/g/a/$ECQ/#"):
            assert (1,) == car.subscribe(filter_).reasons
        assert refused == node.counters["refused_subscribe"]


def test_each_filter_of_a_subscribe_has_its_own_answer() -> None:
    with EcqNode.on() as node:
        car = node.client("car")
        wanted = [("$ECQ/other/#", 1), ("$ECQ/car/#", 1), ("plain", 2), ("$ECQ/car/#", 1)]
        car.send(Subscribe(1, tuple(Subscription(*each) for each in wanted)))
        assert (0x87, 1, 2, 1) == car.expect(Suback).reasons
        node.fill("car", ("k", b"v"))
        assert [b"v"] == car.payloads()


def test_odd_client_ids_have_their_own_queue_or_none() -> None:
    """A client that is called like a part of a topic never gets the messages of others."""
    with EcqNode.on() as node:
        for client_id, reason in (("w", 1), ("rewind", 1), ("a/b", 0x8F), ("$x", 1), ("ü", 1)):
            client = node.client(client_id)
            assert (reason,) == client.subscribe(f"$ECQ/{client_id}/#").reasons, client_id
            node.fill("other", ("k", b"secret"))
            if reason == 1:
                node.fill(client_id, ("k", b"own"))
            assert ([b"own"] if reason == 1 else []) == client.payloads(), client_id


TOPICS = {
    0x87: ["$ECQ/rewind/car"],
    0x90: [
        *("$ECQ", "$ECQ/", "$ECQ/k", "$ECQ/car/k", "$ECQ/w", "$ECQ/w/", "$ECQ/w/car", "$ECQ/w/car/", "$ECQ/w//k"),
        *("$ECQ/x/car/k", "$ECQ/rewind", "$ECQ/rewind/", "$ECQ/rewind/pub/x"),
        *("$SCQ", "$SCQ/q", "$SCQ/q/k", "$SCQ/w/q", "$SCQ/w/w/k", "$SCQ/w/rewind/k"),
        *(f"$ECQ/w/car/{'k' * 1025}", f"$ECQ/w/{'n' * 257}/k"),
    ],
}


def test_publishes_that_are_refused() -> None:
    """In words; MQTT 3 is disconnected; of QoS 0 nobody hears. Nothing reaches a consumer, not by its own hand."""
    with EcqNode.on() as node:
        car, pub = node.consumer(), node.client("pub")
        for reason, topic in ((reason, each) for reason, some in TOPICS.items() for each in some):
            pub.put(topic, b"1")
            answer = pub.expect(Puback)
            assert (reason, True) == (answer.reason, bool(answer.properties.reason_string)), topic
            assert (reason, 0) == (pub.publish(topic, b"1", 2), pub.publish(topic, b"1", 0)), topic
            old = node.client("old", 4)
            old.put(topic, b"1")
            node.turn()
            assert not old.open, topic
        assert 0x90 == car.publish("$ECQ/car/k", b"x")
        assert [] == car.messages()
        assert [] == [queue for queue in node.plugin.queues if queue.coming]


def test_wrong_settings_are_named() -> None:
    for wrong in ({"max_messages": -1}, {"overflow": "panic"}, {"colour": 1}):
        with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
            msgspec.convert(wrong, EcqConfig)


# -- bounds


def test_a_full_queue_takes_newer_values_only() -> None:
    """MQTT 5 hears why, MQTT 3 is disconnected, QoS 0 is dropped and counted. Acknowledging makes no room."""
    for form, root in ROOTS.items():
        with EcqNode.on(max_messages=2) as node:
            car, pub, old = (node.client(name, version) for name, version in (("car", 5), ("pub", 5), ("old", 4)))
            car.subscribe(f"{root}/car/#")
            answers = [pub.publish(f"{root}/w/car/{key}", b"v") for key in "aabcabd"]
            assert [0, 0, 0, QUOTA, 0, 0, QUOTA] == answers
            assert ["a", "b"] == [key for _, key, _ in node.stored("car", form)]
            assert ["a", "a", "b", "a", "b"] == [key for key, _ in values(car.messages())]
            assert (2, QUOTA) == (node.counters["refused_full"], pub.publish(f"{root}/w/car/e", b"v", 2))
            pub.publish(f"{root}/w/car/e", b"v", 0)
            old.put(f"{root}/w/car/e", b"v")
            node.turn()
            assert (5, False) == (node.counters["refused_full"], old.open)
            car.drain()
            assert QUOTA == pub.publish(f"{root}/w/car/c", b"v"), "acknowledged messages stay, and so does the bound"
            assert 0 == pub.publish(f"{root}/w/other/c", b"v"), "others are not concerned"


def test_many_at_once_do_not_exceed_the_bound() -> None:
    with EcqNode.on(max_messages=5) as node:
        pub = node.client("pub")
        pub.send(*(Publish(f"$ECQ/w/car/k{number}", b"v", 1, packet_id=number) for number in range(1, 41)))
        assert [0] * 5 + [QUOTA] * 35 == [pub.expect(Puback).reason for _ in range(40)]
        assert [f"k{number}" for number in range(1, 6)] == node.keys()


def test_bytes_are_bounded_too() -> None:
    """The bound counts what is there: a value that is replaced by a smaller one gives its room back."""
    with EcqNode.on(max_bytes=20_000) as node:
        pub = node.client("pub")

        def publish(key: str, size: int) -> int:
            return pub.publish(f"$ECQ/w/car/{key}", bytes(size))

        assert [0, 0, 0] == [publish(key, 6000) for key in "abc"]
        assert QUOTA == publish("d", 6000)
        assert QUOTA == publish("a", 12_000), "with the others it would be too much"
        assert 0 == publish("a", 5000)
        assert QUOTA == publish("e", 30_000), "it never fits"
        view = node.show()
        assert (3, True) == (view.messages, view.bytes <= 20_000)
        assert 0 == publish("b", 100)
        assert 0 == publish("d", 5000), "now there is room"


def test_or_the_oldest_goes() -> None:
    """By count and by bytes; who consumes gets what is left, and is not held up by what is gone."""
    with EcqNode.on(max_messages=3, max_bytes=20_000, overflow="drop_oldest") as node:
        pub, car = node.client("pub"), node.consumer("car", receive_maximum=1)
        assert [0] * 6 == [pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "abacde"]
        assert (["c", "d", "e"], 2) == (node.keys(), node.counters["dropped"])
        assert [0, 0] == [pub.publish(f"$ECQ/w/car/{key}", bytes(15_000)) for key in "xy"]
        assert ["y"] == node.keys()
        car.drain()
        seen = numbers(car.received)
        assert (sorted(seen), 8) == (seen, seen[-1])
        assert 8 == node.progress()


def test_queues_are_bounded() -> None:
    with EcqNode.on(max_queues=2) as node:
        pub = node.client("pub")
        assert [0, 0, QUOTA, 0] == [pub.publish(f"$ECQ/w/{name}/k", b"v") for name in ("a", "b", "c", "a")]
        assert QUOTA == pub.publish("$SCQ/w/a/k", b"v")
        node.delete("a")
        assert 0 == pub.publish("$ECQ/w/c/k", b"v")
        pub = node.restart().client("pub")
        assert [QUOTA, 0] == [pub.publish(f"$ECQ/w/{name}/k", b"v") for name in ("d", "b")]


def test_what_waits_for_the_store_is_bounded() -> None:
    with EcqNode.on(max_pending=3) as node:
        pub, old = node.client("pub"), node.client("old", 4)
        node.held.held = True
        for number in range(5):
            pub.put(f"$ECQ/w/car/k{number}", b"v")
        old.put("$ECQ/w/car/z", b"v", 0)
        node.turn()
        assert (3, True) == (node.counters["refused_pending"], old.open), "who waits for no answer is not sent away"
        node.held.held = False
        node.held.let_go()
        assert [0, 0, 0, QUOTA, QUOTA] == [pub.expect(Puback).reason for _ in range(5)]


def test_a_full_store_is_told_to_the_producer() -> None:
    with EcqNode.on() as node:
        pub, old = node.client("pub"), node.client("old", 4)
        node.held.held = True
        for client in (pub, old):
            client.put("$ECQ/w/car/k", b"v")
            node.turn()
            node.held.fail(StoreFullError("no room on the disk"))
        answer = pub.expect(Puback)
        assert (QUOTA, "no room on the disk") == (answer.reason, answer.properties.reason_string)
        assert not old.open
        node.held.held = False
        assert 0 == pub.publish("$ECQ/w/car/k", b"w")


def test_a_store_that_does_not_answer_ends_the_connection() -> None:
    """What was written all the same reaches the consumer, in its place."""
    for written in (False, True):
        with EcqNode.on() as node:
            node.fill("car", ("a", b"1"))
            car, pub = node.consumer(), node.client("pub")
            assert [1] == numbers(car.messages())
            node.held.held = True
            pub.put("$ECQ/w/car/b", b"2")
            node.turn()
            with node.loop.running():  # type: ignore[union-attr]
                node.held.fail(StoreError("no answer"), written=written)
            node.held.held = False
            node.turn()
            assert not pub.open
            node.fill("car", ("c", b"3"))
            assert ([2, 3] if written else [2]) == numbers(car.messages())


def test_what_was_stored_unnoticed_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has replaced all that is left up to the end that is known: the consumer waits until it is heard of."""
    with EcqNode.on(session=SessionOptions(source_buffer=1)) as node:
        car, pub = node.consumer(receive_maximum=1), node.client("pub")
        node.fill("car", *((key, b"1") for key in "abc"))
        (first,) = car.messages()
        node.held.held = True
        pub.put("$ECQ/w/car/b", b"2")
        pub.put("$ECQ/w/car/c", b"2")
        node.turn()
        with node.loop.running():  # type: ignore[union-attr]
            node.held.fail(StoreError("no answer"), late=True)
            node.held.held = False
            node.held.let_go()
        node.turn()
        read, reads = node.held.mailboxes.read, count()

        async def counted(owner: str, after: int, limit: int, now: float) -> list[Entry]:
            assert next(reads) < 20, "it is read for ever"
            return await read(owner, after, limit, now)

        monkeypatch.setattr(node.held.mailboxes, "read", counted)
        car.ack(first)
        node.turn()
        node.wait(61.0)
        assert [b"1", b"2", b"2"] == car.drain(), "the first one was on its way already"


# -- rewinding


def test_rewinding_to_a_number() -> None:
    """A preview says what comes, and changes nothing. A number that was replaced leads to the next one there is."""
    for connected in (True, False):
        with EcqNode.on() as node:
            node.fill("car", *((key, b"v" * 100) for key in "abcd"), ("b", b"w" * 100))
            car = node.consumer()
            assert 4 == len(car.drain())
            if not connected:
                car.close()
            preview = node.rewind(to=2, preview=True)
            assert (5, 1, 3, 3, 5, 0) == tuple(
                getattr(preview, name) for name in ("before", "progress", "messages", "first", "last", "skipped")
            )
            assert 300 < preview.bytes < 1500
            assert (5, []) == (node.progress(), car.messages())
            assert msgspec.structs.replace(preview, preview=False) == node.rewind(to=2)
            assert 1 == node.progress()
            car = car if connected else node.consumer()
            assert [3, 4, 5] == numbers(car.messages())


def test_rewinding_while_messages_come() -> None:
    """Nothing is missed, values of a key never go back."""
    with EcqNode.on() as node:
        car, pub = node.consumer("car", receive_maximum=7), node.client("pub")
        newest: dict[str, int] = {}
        for turn in range(20):
            node.held.held = True
            for number in range(turn * 30, turn * 30 + 30):
                pub.put(f"$ECQ/w/car/k{number % 50}", b"%d" % number, 0)
            node.turn()
            node.held.let_go(turn % 3)
            car.ack(*car.inflight[: turn % 5])
            node.held.held = False
            car.put("$ECQ/rewind/car", b"%d" % (1 + turn), 0)
            node.held.let_go()
            car.drain()
        for key, payload in values(car.received):
            assert int(payload) >= newest.get(key, 0), f"{key}: {payload!r} after {newest[key]}"
            newest[key] = int(payload)
        assert {f"k{number % 50}": number for number in range(550, 600)} == newest


def test_rewinding_to_a_time() -> None:
    with EcqNode.on(retention=0.0) as node:
        node.fill("car", ("a", b"1"), ("b", b"2"))
        node.wait(1000.0)
        middle = node.now
        node.wait(1000.0)
        node.fill("car", ("c", b"3"))
        car = node.consumer()
        assert 3 == len(car.drain())
        for since, progress, messages in ((middle, 2, [3]), (middle - 5000.0, 0, [1, 2, 3])):
            view = node.rewind(since=since)
            assert (progress, len(messages)) == (view.progress, view.messages)
            assert messages == numbers(car.messages())
        view = node.rewind(since=node.now + 10.0)
        assert (0, 3) == (view.progress, view.messages), "never forward"


def test_going_forward_skips_and_says_so() -> None:
    with EcqNode.on() as node:
        node.fill("car", *((key, b"v") for key in "abcd"))
        view = node.rewind(to=4)
        assert (0, 3, 3, 1) == (view.before, view.progress, view.skipped, view.messages)
        assert [4] == numbers(node.consumer().messages())


def test_rewinds_that_make_no_sense() -> None:
    with EcqNode.on() as node:
        node.fill("car", ("a", b"1"))
        for wrong in ({}, {"to": 1, "since": 1.0}, {"to": -1}, {"to": 3}):
            with pytest.raises(BadOptionsError):
                node.rewind(**wrong)
        with pytest.raises(UnknownError):
            node.rewind("nobody", to=1)
        with pytest.raises(UnknownError):
            node.rewind("car", "another", to=1)
        node.fill("q", ("a", b"1"), form=SHARED)
        with pytest.raises(BadOptionsError):
            node.rewind("q", form=SHARED, to=1)
        with pytest.raises(UnknownError):
            node.rewind("q", "nobody", SHARED, to=1)


REWINDS = [b"1", b" 2 ", b"2020-01-01T00:00:00Z", b"2020-01-01", b"2020-01-01T00:00:00+02:00"]
NO_REWINDS = [
    *(b"9", b"-1", b"1.5", b"0x10", b"1 2", b"", b" ", b"x", b"yesterday", b"2026-13-01", b"null", b"1" * 100),
    *(b"\xff\xfe", "²".encode()),
]


def test_a_consumer_rewinds_by_itself() -> None:
    """It hears what comes, or what is wrong; of QoS 0 it hears nothing, and MQTT 3 knows only the end."""
    with EcqNode.on() as node:
        car = node.client("car")
        car.put("$ECQ/rewind/car", b"1")
        answer = car.expect(Puback)
        assert (REFUSED, True) == (answer.reason, "car" in (answer.properties.reason_string or "")), "it is not there"
        node.fill("car", ("a", b"1"), ("b", b"2"))
        car.subscribe("$ECQ/car/#")
        car.drain()
        for payload in REWINDS:
            car.put("$ECQ/rewind/car", payload)
            answer = car.expect(Puback)
            known = dict(answer.properties.user_properties)
            assert (0, "2") == (answer.reason, known["before"]), payload
            assert int(known["messages"]) == 2 - int(known["progress"]) == len(car.drain()) > 0, payload
        for qos in (0, 2):
            assert 0 == car.publish("$ECQ/rewind/car", b"1", qos)
            assert 2 == len(car.drain())
        for payload in NO_REWINDS:
            car.put("$ECQ/rewind/car", payload)
            answer = car.expect(Puback)
            assert (0x99, True) == (answer.reason, bool(answer.properties.reason_string)), payload
        assert [] == car.messages()
        car = node.consumer("car", 4)
        car.put("$ECQ/rewind/car", b"yesterday")
        node.turn()
        assert not car.open
        car = node.client("car")
        assert 0 == car.publish("$ECQ/rewind/car", b"2"), "before it consumes"
        car.subscribe("$ECQ/car/#")
        assert [2] == numbers(car.messages())


def test_a_rewind_that_the_store_does_not_take_ends_the_connection() -> None:
    """The client rewinds again; nothing of ours has failed."""
    with EcqNode.on() as node:
        node.fill("car", ("a", b"1"), ("b", b"2"))
        car = node.consumer("car")
        assert 2 == len(car.drain())
        node.held.held = True
        car.put("$ECQ/rewind/car", b"1")
        node.turn()
        with node.loop.running():  # type: ignore[union-attr]
            node.held.fail(StoreError("no answer"))
        node.held.held = False
        node.held.let_go()
        node.turn()
        assert (False, 0) == (car.open, node.counters["task_failed"])


# -- the shared form


def test_each_consumer_of_a_shared_queue_has_its_own_progress() -> None:
    with EcqNode.on() as node:
        first = node.consumer("a", shared="q")
        node.fill("q", ("x", b"1"), ("y", b"2"), ("x", b"3"), form=SHARED)
        messages = first.messages()
        assert [1, 2, 3] == numbers(messages)
        first.ack(*messages)
        late = node.consumer("b", shared="q")
        messages = late.messages()
        assert [("y", b"2"), ("x", b"3")] == values(messages), "the compacted state"
        late.ack(messages[0])
        view = node.show("q", SHARED)
        assert {"a": (3, 0), "b": (2, 1)} == {each.client: (each.progress, each.waiting) for each in view.consuming}
        assert 0 == first.publish("$SCQ/rewind/q", b"1")
        assert [2, 3] == numbers(first.messages())
        assert [] == late.messages(), "the other one does not notice"
        assert 2 == len(node.stored("q", SHARED)), "there is one copy"


def test_both_forms_of_one_name_have_nothing_to_do_with_each_other() -> None:
    with EcqNode.on() as node:
        car = node.consumer()
        car.subscribe("$SCQ/car/#")
        car.subscribe("$SCQ/other/#")
        for form, name in ((EXCLUSIVE, "car"), (SHARED, "car"), (SHARED, "other")):
            node.fill(name, ("k", b"v"), form=form)
        messages = car.messages()
        assert ["$ECQ/car/k", "$SCQ/car/k", "$SCQ/other/k"] == [message.topic for message in messages]
        assert [1, 1, 1] == numbers(messages)


def test_more_consumers_than_are_remembered() -> None:
    with EcqNode.on(max_consumers=1) as node:
        node.fill("q", ("x", b"1"), form=SHARED)
        for name, comes in (("a", True), ("b", True), ("a", False), ("b", True)):
            client = node.consumer(name, shared="q")
            assert ([b"1"] if comes else []) == client.drain(), name
            client.close()
        assert 2 == node.counters["refused_consumers"]


# -- what is too old


def test_what_is_too_old_does_not_come_and_is_collected() -> None:
    """Age counts from the last value; and this is so every time."""
    with EcqNode.on(retention=100.0, gc_step=3) as node:
        node.fill("car", *((f"k{number}", b"v") for number in range(10)))
        node.wait(60.0)
        node.fill("car", ("new", b"v"), ("k0", b"w"))
        node.wait(60.0)
        car = node.consumer()
        messages = car.messages()
        assert [("new", b"v"), ("k0", b"w")] == values(messages)
        car.ack(*messages)
        assert 12 == node.progress()
        assert (9, 0) == (node.collect(), node.collect())
        view = node.show()
        assert (2, 11, 12) == (view.messages, view.first, view.last)
        node.wait(1000.0)
        assert 2 == node.collect(), "again and again"
        node.fill("car", ("k0", b"x"))
        assert [13] == numbers(car.messages()), "numbers go on"


def test_what_waits_too_long_for_the_window_is_not_sent() -> None:
    with EcqNode.on(retention=100.0) as node:
        node.fill("car", *((f"k{number}", b"v") for number in range(5)))
        car = node.consumer("car", receive_maximum=2)
        messages = car.messages()
        node.wait(200.0)
        node.fill("car", ("new", b"v"))
        car.ack(*messages)
        assert [6] == numbers(car.messages())
        assert 3 == node.counters["too_old"]


def test_the_collector_runs_by_itself() -> None:
    with EcqNode.on(retention=100.0, gc_interval=10.0) as node:
        node.fill("car", ("a", b"v"))
        node.wait(99.0)
        assert 0 == node.counters["collected"]
        node.wait(12.0)
        assert 1 == node.counters["collected"]
        rounds = node.counters["gc_rounds"]
        node.wait(100.0)
        assert rounds + 10 == node.counters["gc_rounds"]


def test_an_empty_queue_that_nobody_uses_is_forgotten() -> None:
    with EcqNode.on(retention=100.0, idle=1000.0, gc_interval=1e6) as node:
        car = node.consumer()
        node.fill("car", ("a", b"1"))
        car.drain()
        node.wait(2000.0)
        node.collect()
        assert 0 == node.counters["forgotten"], "somebody consumes it"
        car.close()
        node.turn()
        node.wait(1.0)
        node.collect()
        assert 1 == node.counters["forgotten"]
        with pytest.raises(UnknownError):
            node.show()
        assert 0 == len(node.plugin.queues), "it is closed, too"
        node.fill("car", ("a", b"2"))
        assert [(2, "a", b"2")] == node.stored(), "numbers go on"


def test_queues_that_are_no_longer_used_are_closed() -> None:
    """Whoever chooses ever-new names fills the memory only until the next collections; nothing is lost with it."""
    with EcqNode.on() as node:
        consumer = node.consumer("kept")
        for number in range(20):
            node.fill(f"car-{number}", ("a", b"1"))
            node.consumer(f"reader-{number}", shared=f"never-there-{number}").disconnect()
        assert (1, 41) == (len(node.plugin.queues.consumed()), len(node.plugin.queues))
        node.delete("car-0")
        assert 40 == len(node.plugin.queues)
        node.collect()
        node.fill("car-1", ("b", b"2"))
        node.collect()
        assert ["car-1", "kept"] == sorted(queue.name for queue in node.plugin.queues), "in use"
        node.collect()
        assert ["kept"] == [queue.name for queue in node.plugin.queues]
        node.fill("car-1", ("c", b"3"))
        assert [1, 2, 3] == [number for number, _, _ in node.stored("car-1")]
        node.fill("kept", ("a", b"1"))
        assert [1] == numbers(consumer.messages())


# -- operators


def test_lists_come_in_pages() -> None:
    with EcqNode.on() as node:
        for name in "dbca":
            node.fill(name, ("k", b"v"))
        node.fill("s", ("k", b"v"), form=SHARED)
        first = node.run(node.service.list(EXCLUSIVE, "", 3))
        assert ["a", "b", "c"] == [view.name for view in first]
        assert ["d"] == [view.name for view in node.run(node.service.list(EXCLUSIVE, "c", 3))]
        assert ["s"] == [view.name for view in node.run(node.service.list(SHARED))]
        assert (1, 1, 1, 0) == (first[0].messages, first[0].first, first[0].last, first[0].consumers)


def test_a_queue_is_shown_with_its_consumer() -> None:
    with EcqNode.on() as node:
        node.fill("car", *((key, b"v") for key in "abc"))
        with pytest.raises(UnknownError):
            node.show("nobody")
        car = node.consumer()
        car.ack(car.messages()[0])
        view = node.show()
        assert (3, 1, 3, 1) == (view.messages, view.first, view.last, view.consumers)
        (consumer,) = view.consuming
        assert ("car", True, 1, 2, 2) == (
            consumer.client,
            consumer.connected,
            consumer.progress,
            consumer.waiting,
            consumer.in_flight,
        )
        assert (node.now, node.now) == (view.oldest, consumer.acked_at)
        car.close()
        node.turn()
        (consumer,) = node.show().consuming
        assert (False, 1, 0) == (consumer.connected, consumer.progress, consumer.in_flight)


def test_a_deleted_queue_begins_anew_but_its_numbers_go_on() -> None:
    with EcqNode.on() as node:
        node.fill("car", *((key, b"v") for key in "abc"))
        car = node.consumer("car", receive_maximum=1)
        before = car.messages()
        node.delete("car")
        with pytest.raises(UnknownError):
            node.show()
        car.ack(*before)
        node.fill("car", ("d", b"v"))
        messages = car.messages()
        assert [4] == numbers(messages)
        car.ack(*messages)
        assert 4 == node.progress()
        with pytest.raises(UnknownError):
            node.delete("car", SHARED)


# -- the plugin comes and goes


def test_options_change_while_it_runs() -> None:
    with EcqNode.on(max_messages=1) as node:
        pub = node.client("pub")
        assert [0, QUOTA] == [pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "ab"]
        node.run(node.plugins.reload("ecq", {"max_messages": 2}))
        assert [0, QUOTA] == [pub.publish(f"$ECQ/w/car/{key}", b"v") for key in "bc"]
        node.run(node.plugins.reload("ecq", {"max_messages": 2, "overflow": "drop_oldest"}))
        assert 0 == pub.publish("$ECQ/w/car/c", b"v")
        assert ["b", "c"] == node.keys()


def test_a_plugin_that_is_loaded_again_goes_on() -> None:
    """Who is subscribed already gets what comes."""
    with EcqNode.on() as node:
        car = node.consumer()
        node.fill("car", ("a", b"1"))
        car.drain()
        node.run(node.plugins.unload("ecq"))
        node.load()
        node.fill("car", ("b", b"2"))
        assert [2] == numbers(car.messages())


def test_a_consumer_begins_though_messages_are_on_their_way_all_the_time() -> None:
    """The end of the queue is not known to be stored then: the next that is stored tells; refused, the next look."""
    for refused in (False, True):
        with EcqNode.on() as before:
            before.fill("car", ("a", b"1"))
            node = before.restart()
            pub = node.client("pub")
            node.held.held = True
            pub.put("$ECQ/w/car/b", b"2")
            car = node.consumer()
            assert [] == car.messages()
            node.held.full = refused
            with node.loop.running():  # type: ignore[union-attr]
                node.held.let_go()
            node.held.held = False
            node.wait(1.0 if refused else 0.0)
            assert ([1] if refused else [1, 2]) == numbers(car.messages())
