"""Readers in virtual time: where they begin, how they go on, and that nothing is lost or doubled on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motorcade.plugins.logs.streams.pages import PAGE
from motorcade.storage.ports import Batch, StoreError, StreamInfo
from tests.support.virtual import START
from tests.unit.streams.node import LASTING, StreamsNode, numbers, offsets, read


def test_where_a_reader_begins() -> None:
    """As a property or in the filter, which is the only way of MQTT 3."""
    begins = {
        "earliest": 0,
        "latest": 10,
        "": 10,
        "1": 0,
        "4": 3,
        "10": 9,
        "11": 10,
        f"@{START}": 0,
        f"@{START + 4.5}": 5,
        f"@{START + 9}": 9,
        "2023-11-14T22:13:25Z": 5,
        "2023-11-14T23:13:25+01:00": 5,
        "@0": 0,
    }
    with StreamsNode.with_stream() as node:
        for number in range(10):
            node.append_numbers(1, number)
            node.wait(1)
        readers = []
        for number, (offset, first) in enumerate(begins.items()):
            readers.append((node.reader(f"car{number}", offset), first, offset))
            if "+" not in offset:
                stream = f"s/{offset}" if offset else "s"
                readers.append((node.reader(f"old{number}", stream=stream, version=4), first, offset))
        node.append_numbers(5, 10)
        for car, first, offset in readers:
            car.drain()
            assert list(range(first, 15)) == numbers(car.received), offset


def test_what_is_appended_past_the_service_is_read_to_the_end() -> None:
    """By readers that come later, that are there, and that come back; the service has appended before and after."""
    for batch in (True, False):
        with StreamsNode.with_stream() as node:
            node.append_past(0, 1, 2, batch=batch)
            early = node.reader("early", "earliest", **LASTING)
            latest, second = node.reader("latest", "latest"), node.reader("second", "2")
            assert ([b"0", b"1", b"2"], [b"1", b"2"]) == (early.drain(), second.drain())
            node.append_numbers(2, 3)
            node.append_past(5, 6, batch=batch)
            for car in (early, latest, second):
                car.drain()
            assert list(range(7)) == numbers(early.received)
            assert list(range(3, 7)) == numbers(latest.received), "not what was there before"
            early.close()
            second.unsubscribe("$stream/s")
            node.append_past(7, batch=batch)
            read(second)
            assert [b"7"] == node.reader("early", **LASTING).drain() == second.drain()
            assert 0 == node.counters["found_late"]


def test_what_the_store_cannot_tell_is_found_within_an_interval() -> None:
    """Another process, or a write of unknown outcome: readers at the tail do not wait for the next append."""
    with StreamsNode.with_stream() as node:
        car = node.reader("car", "earliest")
        node.streams._unwatch()  # type: ignore[misc] # as if the append came from elsewhere
        node.append_past(0, 1)
        assert [] == car.messages()
        node.wait(11)
        assert ([b"0", b"1"], 1) == (car.drain(), node.counters["found_late"])
        node.held.streams_too = node.held.held = True
        appending = node.appending(b"2")
        node.turn()
        node.held.fail(StoreError("not confirmed in time"), written=True)
        node.held.held = False
        node.turn()
        assert isinstance(appending.error, StoreError)
        node.wait(11)
        assert [b"2"] == car.drain()


def test_what_is_appended_while_a_stream_is_being_declared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamsNode.on() as node:
        car = node.reader("car", "earliest")
        info = node.held.streams.info

        async def meanwhile(stream: str) -> StreamInfo:
            found = await info(stream)
            monkeypatch.undo()
            await asyncio.sleep(0)
            batch = Batch()
            batch.stream("s", [b"\x00"], node.now)
            await node.held.write(batch)
            return found

        monkeypatch.setattr(node.held.streams, "info", meanwhile)
        node.create()
        node.append(b"1")
        assert ([2], 1) == (offsets(car.messages()), node.counters["unreadable"])


def test_what_lies_in_the_future_is_waited_for() -> None:
    """An offset, or a time: what is appended before it does not come, even if it is near the end."""
    with StreamsNode.with_stream() as node:
        by_offset, by_time = node.reader("offset", "8"), node.reader("time", f"@{START + 60}")
        node.append_numbers(3)
        node.wait(59)
        node.append_numbers(1, 3)
        assert [] == by_offset.messages() == by_time.messages()
        node.wait(1)
        node.append_numbers(9, 4)
        assert [b"%d" % number for number in range(7, 13)] == by_offset.drain()
        assert [b"%d" % number for number in range(4, 13)] == by_time.drain()


def test_an_offset_that_is_gone_means_the_oldest() -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(20)
        node.run(node.held.streams.trim("s", records=5))
        assert [b"%d" % number for number in range(15, 20)] == node.reader("car", "3").drain()


def test_messages_are_as_published_and_tell_their_place() -> None:
    """From the store and from memory alike; no retained ones, whatever they were published as. They are routed, too."""
    said: dict[str, Any] = {
        "payload_format": 1,
        "message_expiry": 99,
        "content_type": "text",
        "response_topic": "re",
        "correlation_data": b"c",
    }
    place = (("k", "v"), ("stream-offset", "1"), ("stream-time", "2023-11-14T22:13:20.000Z"))
    with StreamsNode.with_stream() as node:
        live, pub = node.client("live"), node.client("pub")
        live.subscribe("t/#", 2)
        car = node.reader("car", "earliest")
        pub.publish("t/x", b"\x00", 2, user_properties=(("k", "v"),), **said)
        node.stream.pages.clear()
        again = node.client("again")
        again.subscribe("$stream/s", 1, 99, stream_offset="earliest")
        for client, qos, more, identifiers in ((car, 1, place, ()), (again, 1, place, (99,)), (live, 2, place[:1], ())):
            (message,) = client.messages()
            assert ("t/x", b"\x00", qos) == (message.topic, message.payload, message.qos)
            found = message.properties
            assert said | {"user_properties": more, "subscription_ids": identifiers} == {
                name: getattr(found, name) for name in (*said, "user_properties", "subscription_ids")
            }


def test_an_expired_message_is_not_delivered() -> None:
    """Its own expiry counts, and what is left of it is told."""
    with StreamsNode.with_stream() as node:
        pub = node.client("pub")
        for word, expiry in ((b"expires", 1), (b"lasts", 1000)):
            pub.publish("t/a", word, message_expiry=expiry)
        node.wait(10)
        (message,) = node.reader("car", "earliest").messages()
        assert (b"lasts", 990) == (message.payload, message.properties.message_expiry)


def test_a_long_stream_and_a_small_window() -> None:
    for qos in (0, 1):
        with StreamsNode.with_stream() as node:
            node.append_numbers(1500)
            car = node.reader("car", "earliest", window=32, qos=qos)
            car.drain()
            assert list(range(1500)) == numbers(car.received)


def test_readers_of_the_same_part_share_the_reads() -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(3 * PAGE)
        readers = [node.reader(f"car{number}", "earliest", window=32) for number in range(10)]
        while sum(len(car.messages()) for car in readers):
            for car in readers:
                car.ack(*car.inflight)
        assert [list(range(3 * PAGE))] * 10 == [numbers(car.received) for car in readers]
        assert 3 * PAGE == node.counters["read"]


def test_what_nobody_reads_any_more_takes_no_memory() -> None:
    """What the only reader has been through is gone; another one may still come by."""
    for others in (0, 1):
        with StreamsNode.with_stream() as node:
            node.append_numbers(3 * PAGE)
            readers = [node.reader(f"car{number}", "earliest", window=32) for number in range(1 + others)]
            readers[0].drain()
            node.append_numbers(3, 3 * PAGE)
            readers[0].drain()
            assert (node.streams.cache.size_bytes > 0) is (others > 0)
            for car in readers:
                car.drain()
                assert list(range(3 * PAGE + 3)) == numbers(car.received)
            assert 3 * PAGE == node.counters["read"], "once for all; what is appended comes from memory"


def test_at_the_tail_nothing_is_read() -> None:
    """One append wakes everybody who waits, from memory; without one nobody does anything."""
    with StreamsNode.with_stream() as node:
        readers = [node.reader(f"car{number}") for number in range(50)]
        assert {"streams.trim"} == {task.get_name() for task in node.loaded.context.tasks}
        node.append_numbers(3)
        assert [[0, 1, 2]] * 50 == [numbers(car.messages()) for car in readers]
        assert 0 == node.counters["read"]


def test_a_slow_reader_holds_up_nobody_and_goes_on_with_what_is_left() -> None:
    with StreamsNode.with_stream() as node:
        slow = node.reader("slow", "earliest")
        node.append_numbers(300)
        assert 4 == len(slow.messages())
        assert 300 == len(node.reader("quick", "earliest").drain())
        node.run(node.held.streams.trim("s", records=50))
        seen = [int(payload) for payload in slow.drain()]
        assert (seen, 300) == (sorted(set(seen)), seen[-1] + 1)
        assert set(range(250, 300)) <= set(seen)


def test_a_record_that_is_not_one_is_passed_over() -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(2)
        node.run(node.held.streams.append("s", [b"\xc1 garbage"], node.now))
        node.append_numbers(2, 2)
        assert [b"0", b"1", b"2", b"3"] == node.reader("car", "earliest").drain()
        assert 1 == node.counters["unreadable"]


def test_a_store_that_cannot_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(3)

        async def fail(*_args: object) -> list[object]:
            raise StoreError("away")

        monkeypatch.setattr(type(node.held.streams), "read", fail)
        car = node.reader("car", "earliest")
        assert (1, []) == (node.counters["read_failed"], car.messages())
        monkeypatch.undo()
        node.wait(1)
        assert [b"0", b"1", b"2"] == car.drain()


# -- coming back


def test_what_was_given_and_never_sent_holds_up_nobody_when_it_is_trimmed() -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(20)
        car = node.reader("car", "earliest", **LASTING)
        assert 4 == len(car.messages())
        car.close()
        node.turn()
        swept = node.run(node.held.streams.trim("s", before=node.now + 1))
        node.run(node.stream.trimmed(swept.removed, swept.size_bytes))
        assert [b"0", b"1", b"2", b"3"] == node.reader("car", **LASTING).drain()
        node.run(node.held.streams.append("s", [b"\xc1 garbage"], node.now))
        assert 21 == node.cursor().done


def test_a_refusal_counts_as_delivered() -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(2)
        car = node.reader("car", "earliest")
        first, second = car.messages()
        car.ack(first, reason=0x83)
        car.ack(second)
        assert (2, 1) == (node.cursor().done, node.counters["refused"])


def test_killed_before_the_first_progress_is_written() -> None:
    """Nothing is lost: it begins with the oldest."""
    with StreamsNode.with_stream() as node:
        node.append_numbers(3)
        node.held.held = True
        node.reader("car", **LASTING)
        second = node.kill()
        second.held.held = False
        second.append_numbers(1, 3)
        assert [b"0", b"1", b"2", b"3"] == second.reader("car", **LASTING).drain()


def test_two_subscriptions_have_a_place_each() -> None:
    """And the topics of the stream are a third one."""
    with StreamsNode.with_stream() as node:
        node.append_numbers(5)
        car = node.client("car")
        for identifier, filter_ in enumerate(("$stream/s/earliest", "$stream/s/4", "t/#"), 1):
            car.subscribe(filter_, 1, identifier)
        node.client("pub").publish("t/a", b"5")
        car.drain()
        seen: dict[tuple[int, ...], list[int]] = {}
        for message in car.received:
            seen.setdefault(message.properties.subscription_ids, []).append(int(message.payload))
        assert {(1,): [0, 1, 2, 3, 4, 5], (2,): [3, 4, 5], (3,): [5]} == seen
        car.unsubscribe("$stream/s/4")
        assert ["earliest"] == list(node.cursors())


def test_a_reader_without_a_session_goes_on_by_its_name() -> None:
    """In this process and in the next; a stranger begins with the latest."""
    for unsubscribes in (True, False):
        with StreamsNode.with_stream() as first:
            node = first
            node.append_numbers(30)
            car = node.reader("car", "earliest")
            for number in (10, 20):
                car.messages()
                while int(car.inflight[0].payload) < number:
                    car.ack(car.inflight[0])
                    car.messages()
                if unsubscribes:
                    car.unsubscribe("$stream/s")
                car.disconnect()
                if number == 20:
                    node = node.restart()
                car = node.reader("car")
                car.messages()
                assert number == int(car.received[0].payload)
            stranger = node.reader("bus")
            node.append_numbers(1, 30)
            car.drain()
            assert list(range(20, 31)) == numbers(car.received)
            assert [b"30"] == stranger.drain()


# -- streams that come and go


def test_a_stream_that_is_declared_later() -> None:
    with StreamsNode.on() as node:
        car = node.client("car")
        assert "no stream 'later' yet" in (car.subscribe("$stream/later").properties.reason_string or "")
        node.create("later")
        node.append(b"1", stream="later")
        assert [b"1"] == car.drain()


def test_leaving_the_configuration_loses_nothing() -> None:
    """The declaration goes, the records and everybody's place stay."""
    declared = {"s": {"topics": ["t/#"]}}
    with StreamsNode.on(stream=declared) as node:
        node.append_numbers(10)
        car = node.reader("car", "earliest", window=3)
        first, *_ = car.messages()
        node.run(node.plugins.reload("streams", {}))
        car.ack(first)
        node.run(node.plugins.reload("streams", {"stream": declared}))
        node.append_numbers(2, 10)
        car.drain()
        assert list(range(12)) == numbers(car.received)


def test_sessions_that_end_leave_only_progress_behind() -> None:
    """Unsubscribed, ended with the connection, or ended while away; a deleted stream leaves nothing."""
    with StreamsNode.with_stream() as node:
        node.append_numbers(3)
        cars = [node.reader(f"car{number}", "earliest", session_expiry=100 * (number // 2)) for number in range(3)]
        for car in cars:
            car.drain()
        cars[0].unsubscribe("$stream/s")
        cars[1].disconnect()
        cars[2].close()
        node.wait(101)
        assert (0, 3) == (len(node.progress_store), len(node.progress()))
        assert (0, 0, {}) == (node.streams.cache.size_bytes, node.streams.cache.behind, node.streams._readers)
        node.run(node.streams.delete("s"))
        assert {} == node.progress()
