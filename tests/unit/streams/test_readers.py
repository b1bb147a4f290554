"""Readers: where they begin, how they go on, and that nothing is lost or doubled on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import encode
from motorcade.extension.sources import Why
from motorcade.plugins.streams.pages import PAGE
from motorcade.storage.ports import Store, StoreError, StreamInfo
from tests.unit.streams.clients import NOW, Node, offsets


async def numbered(node: Node, count: int, start: int = 0) -> None:
    await node.append(*(b"%d" % number for number in range(start, start + count)))


def payloads(messages: list[Message]) -> list[int]:
    return [int(message.payload) for message in messages]


@pytest.mark.parametrize(
    ("offset", "first"),
    [
        ("earliest", 0),
        ("latest", 10),
        ("", 10),
        ("1", 0),
        ("4", 3),
        ("10", 9),
        ("11", 10),
        (f"@{NOW}", 0),
        (f"@{NOW + 4.5}", 5),
        (f"@{NOW + 9}", 9),
        ("2023-11-14T22:13:25Z", 5),
        ("2023-11-14T23:13:25+01:00", 5),
        ("@0", 0),
    ],
)
async def test_where_a_reader_begins(node: Node, offset: str, first: int) -> None:
    for number in range(10):
        await numbered(node, 1, number)
        node.now += 1
    session = node.client("car").subscribe("$stream/s", offset)
    await node.quiet()
    await numbered(node, 5, 10)
    await session.client.drain()
    assert list(range(first, 15)) == payloads(session.received)


async def past(store: Store, *numbers: int, batch: bool = True) -> None:
    """Append to the stream as other plugins do it: in a batch of their own, past the service."""
    values = [encode(Message("t/a", b"%d" % number)) for number in numbers]
    if not batch:
        await store.streams.append("s", values, NOW)
        return
    together = store.batch()
    together.stream("s", values, NOW)
    together.put("things", "k", b"v")
    await together.commit()


@pytest.mark.parametrize("batch", [True, False], ids=["batch", "append"])
async def test_what_is_appended_past_the_service_is_read_to_the_end(node: Node, store: Store, batch: bool) -> None:
    """By readers that come later, that are there, and that come back; the service has appended before and after."""
    await past(store, 0, 1, 2, batch=batch)
    early = node.client("early").subscribe("$stream/s", "earliest")
    latest = node.client("latest").subscribe("$stream/s", "latest")
    second = node.client("second").subscribe("$stream/s", "2")
    await early.client.drain()
    await second.client.drain()
    assert ([0, 1, 2], [1, 2]) == (payloads(early.received), payloads(second.received))
    await numbered(node, 2, 3)
    await past(store, 5, 6, batch=batch)
    for session in (early, latest, second):
        await session.client.drain()
    assert list(range(7)) == payloads(early.received)
    assert list(range(3, 7)) == payloads(latest.received), "not what was there before"
    early.client.disconnect()
    second.client.unsubscribe("$stream/s")
    latest.client.disconnect()
    await past(store, 7, batch=batch)
    early.client.resume()
    again = second.client.subscribe("$stream/s")
    for session in (early, again):
        await session.client.drain()
    assert list(range(8)) == payloads(early.received)
    assert [7] == payloads(again.received)
    assert 0 == node.counters["found_late"]


async def test_appends_past_the_service_beside_its_own(node: Node, store: Store) -> None:
    """Both at once, again and again: every reader gets all there is, each once."""
    sessions = [node.client(f"car{number}", 50, 50).subscribe("$stream/s", "earliest") for number in range(3)]
    for start in range(0, 60, 6):
        await asyncio.gather(
            numbered(node, 2, start),
            past(store, start + 2, start + 3),
            numbered(node, 1, start + 4),
            past(store, start + 5),
        )
    for session in sessions:
        await session.client.drain()
        assert list(range(60)) == sorted(payloads(session.received))
        assert list(range(1, 61)) == offsets(session.received)
    await node.streams.trimmer.look()
    stream = node.streams.streams()[0]
    info = await store.streams.info("s")
    assert (info.first, info.last, info.records, info.octets) == (
        stream.first,
        stream.tail,
        stream.records,
        stream.octets,
    )


async def test_what_the_store_cannot_tell_is_found_within_an_interval(
    node: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or a write of unknown outcome: readers at the tail do not wait for the next append."""
    session = node.client("car").subscribe("$stream/s", "earliest")
    await node.quiet()
    node.streams._unwatch()  # type: ignore[misc] # as if the append came from elsewhere
    await past(store, 0, 1)
    await node.quiet()
    assert [] == session.received
    await node.streams.trimmer.look()
    await session.client.drain()
    assert [0, 1] == payloads(session.received)
    assert 1 == node.counters["found_late"]
    append = store.streams.append

    async def unknown(*args: Any) -> list[int]:
        await append(*args)
        raise StoreError("not confirmed in time")

    monkeypatch.setattr(store.streams, "append", unknown)
    with pytest.raises(StoreError):
        await node.append(b"2")
    monkeypatch.setattr(store.streams, "append", append)
    await node.streams.trimmer.look()
    await session.client.drain()
    assert [0, 1, 2] == payloads(session.received)


async def test_what_is_appended_while_a_stream_is_being_declared_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await Node.on(store)
    session = node.client("car").subscribe("$stream/s", "earliest")
    info = store.streams.info

    async def meanwhile(stream: str) -> StreamInfo:
        found = await info(stream)
        monkeypatch.undo()
        await past(store, 0)
        return found

    monkeypatch.setattr(store.streams, "info", meanwhile)
    await node.create()
    await session.client.drain()
    assert [0] == payloads(session.received)
    await node.stop()


async def test_an_offset_in_the_future_is_waited_for(node: Node) -> None:
    session = node.client("car").subscribe("$stream/s", "8")
    await numbered(node, 3)
    await node.quiet()
    assert [] == session.received
    await numbered(node, 10, 3)
    await session.client.drain()
    assert list(range(7, 13)) == payloads(session.received)


async def test_a_time_in_the_future_is_waited_for(node: Node) -> None:
    """What is appended before it does not come, even if it is near the end."""
    session = node.client("car").subscribe("$stream/s", f"@{NOW + 60}")
    await numbered(node, 3)
    await node.quiet()
    node.now = NOW + 59
    await numbered(node, 1, 3)
    assert session.feed is not None
    timer = session.feed.timers[-1]
    assert 60 == timer.delay
    node.now = NOW + 60
    await numbered(node, 2, 4)
    session.feed.send(timer.what)
    await session.client.drain()
    assert [4, 5] == payloads(session.received)


async def test_an_offset_that_is_gone_means_the_oldest(node: Node, store: Store) -> None:
    await numbered(node, 20)
    await store.streams.trim("s", records=5)
    session = node.client("car").subscribe("$stream/s", "3")
    await session.client.drain()
    assert list(range(15, 20)) == payloads(session.received)


async def test_messages_are_as_published_and_tell_their_place(node: Node) -> None:
    """From the store and from memory alike."""
    published = Message(
        "t/x", b"\x00", 2, True, "ann", "user", b"g" * 16, NOW, 1, NOW + 99, "text", "re", b"c", (("k", "v"),)
    )
    session = node.client("car").subscribe("$stream/s", "earliest")
    await node.streams.append("s", [published])
    await node.quiet()
    again = node.client("other").subscribe("$stream/s", "earliest")
    node.streams.stream("s").pages.clear()  # type: ignore[union-attr]
    await node.quiet()
    wanted = (("k", "v"), ("stream-offset", "1"), ("stream-time", "2023-11-14T22:13:20.000Z"))
    for got in (session.received[0], again.received[0]):
        assert (
            Message("t/x", b"\x00", 1, True, "ann", "user", b"g" * 16, NOW, 1, NOW + 99, "text", "re", b"c", wanted)
            == got
        )


async def test_a_long_stream_and_a_small_window(node: Node) -> None:
    """5 000 messages through a window of 32, in order, never more than asked for."""
    for start in range(0, 5000, 500):
        await numbered(node, 500, start)
    session = node.client("car", window=32, buffer=50).subscribe("$stream/s", "earliest")
    await session.client.drain()
    assert list(range(5000)) == payloads(session.received)
    assert 0 == session.overshoot


async def test_readers_of_the_same_part_share_the_reads(node: Node) -> None:
    await numbered(node, 3 * PAGE)
    sessions = [node.client(f"car{n}", 32, 64).subscribe("$stream/s", "earliest") for n in range(20)]
    await node.quiet()
    for session in sessions:
        await session.client.drain()
    assert [list(range(3 * PAGE))] * 20 == [payloads(session.received) for session in sessions]
    assert 3 * PAGE == node.counters["read"]


@pytest.mark.parametrize("readers", [1, 2])
async def test_what_nobody_reads_any_more_takes_no_memory(node: Node, readers: int) -> None:
    """What the only reader has been through is gone; another one may still come by."""
    await numbered(node, 3 * PAGE)
    fast, *others = [node.client(f"car{n}", 32, 64).subscribe("$stream/s", "earliest") for n in range(readers)]
    await fast.client.drain()
    await numbered(node, 3, 3 * PAGE)
    await fast.client.drain()
    assert (node.streams.cache.octets > 0) is (readers > 1)
    for session in (fast, *others):
        await session.client.drain()
        assert list(range(3 * PAGE + 3)) == payloads(session.received)
    assert 3 * PAGE == node.counters["read"], "once for all; what is appended comes from memory"


async def test_at_the_tail_nothing_is_read(node: Node, store: Store) -> None:
    """One append wakes everybody who waits, from memory; without one nobody does anything."""
    sessions = [node.client(f"car{n}").subscribe("$stream/s") for n in range(200)]
    await node.quiet()
    assert not node.tasks
    await numbered(node, 3)
    await node.quiet()
    assert [[0, 1, 2]] * 200 == [payloads(session.received) for session in sessions]
    assert 0 == node.counters["read"]


@pytest.mark.parametrize("qos", [0, 1])
async def test_from_history_to_live_without_a_gap(node: Node, qos: int) -> None:
    """Appended while a page is being read, before it is there, and after."""
    await numbered(node, 300)
    session = node.client("car", 8, 16).subscribe("$stream/s", "earliest", qos)
    number = 300
    while len(session.received) < 900:
        if number < 900:
            await numbered(node, 7, number)
            number += 7
        session.client.turn()
        for _ in range(min(5, len(session.inflight))):
            session.client.acknowledge()
    await numbered(node, 1, number)
    await session.client.drain()
    assert list(range(number + 1)) == payloads(session.received)
    assert 0 == session.overshoot


async def test_a_record_that_is_not_one_is_passed_over(node: Node, store: Store) -> None:
    await numbered(node, 2)
    await store.streams.append("s", [b"\xc1 garbage"], NOW)
    await numbered(node, 2, 2)
    session = node.client("car").subscribe("$stream/s", "earliest")
    await session.client.drain()
    assert [0, 1, 2, 3] == payloads(session.received)
    assert 1 == node.counters["unreadable"]


async def test_what_a_failed_append_has_stored_after_all_is_read(node: Node, store: Store) -> None:
    """Its outcome was not known. Readers at the tail find it in the store when the next one comes."""
    session = node.client("car").subscribe("$stream/s")
    await numbered(node, 2)
    await session.client.drain()
    await store.streams.append("s", [encode(Message("t", b"2"))], NOW)  # nobody has told the plugin
    await numbered(node, 1, 3)
    await session.client.drain()
    assert [0, 1, 2, 3] == payloads(session.received)


async def test_a_store_that_cannot_be_read_is_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await numbered(node, 3)
    read = type(node.store.streams).read

    async def fail(*_args: object) -> list[object]:
        raise StoreError("away")

    monkeypatch.setattr(type(node.store.streams), "read", fail)
    session = node.client("car").subscribe("$stream/s", "earliest")
    await node.quiet()
    assert (1, []) == (node.counters["read_failed"], session.received)
    monkeypatch.setattr(type(node.store.streams), "read", read)
    assert session.feed is not None
    session.feed.send(session.feed.timers[-1].what)
    await session.client.drain()
    assert [0, 1, 2] == payloads(session.received)


# -- coming back


async def test_acknowledged_out_of_order_then_away(node: Node) -> None:
    """In the same process nothing comes twice: neither what was acknowledged nor what the session has in flight."""
    await numbered(node, 20)
    session = node.client("car", window=4).subscribe("$stream/s", "earliest")
    await node.quiet()
    car = session.client
    car.acknowledge(2)
    car.acknowledge(0)
    await node.quiet()
    car.disconnect()
    before = list(session.inflight)
    await numbered(node, 5, 20)
    car.resume()
    await node.quiet()
    assert before == session.inflight
    await car.drain()
    assert list(range(25)) == payloads(session.received)


async def test_resumed_again_and_again(node: Node) -> None:
    await numbered(node, 50)
    session = node.client("car", window=3, buffer=7).subscribe("$stream/s", "earliest")
    while len(session.received) < 50:
        await node.quiet()
        session.client.acknowledge(-1)
        session.client.disconnect()
        session.client.resume()
    await session.client.drain()
    assert list(range(50)) == payloads(session.received)


async def test_a_message_lost_by_the_session_comes_again(node: Node) -> None:
    """Whatever took it away: it was not acknowledged."""
    await numbered(node, 10)
    session = node.client("car", window=4).subscribe("$stream/s", "earliest")
    await node.quiet()
    session.client.disconnect()
    del session.inflight[1]
    session.client.resume()
    await session.client.drain()
    assert sorted([*range(10), 1]) == sorted(payloads(session.received))
    mark = node.streams.ledger.find("car", "s", "")
    assert mark is not None and 10 == mark.done


async def test_a_refusal_counts_as_delivered(node: Node) -> None:
    await numbered(node, 2)
    session = node.client("car").subscribe("$stream/s", "earliest")
    await node.quiet()
    session.client.acknowledge(0, reason=ReasonCode.UNSPECIFIED_ERROR)
    session.client.acknowledge(0)
    mark = node.streams.ledger.find("car", "s", "")
    assert mark is not None and 2 == mark.done
    assert 1 == node.counters["refused"]


@pytest.mark.parametrize("graceful", [True, False])
async def test_after_a_restart_only_what_was_not_committed_comes_again(store: Store, graceful: bool) -> None:
    first = await Node.on(store)
    await first.create()
    await numbered(first, 30)
    session = first.client("car", window=4).subscribe("$stream/s", "earliest")
    await first.quiet()
    for _ in range(10):
        session.client.acknowledge()
        await first.quiet()
    if graceful:
        session.client.disconnect()
        await first.stop()
    else:
        await first.streams.ledger.settle()
        for _ in range(2):
            session.client.acknowledge()
        await first.kill()
    second = await Node.on(store)
    session.received.clear()
    session.client.resume(second)
    await session.client.drain()
    assert list(range(10, 30)) == payloads(session.received)
    await second.stop()


async def test_killed_before_the_first_progress_is_written(store: Store) -> None:
    """Nothing is lost: it begins with the oldest."""
    first = await Node.on(store)
    await first.create()
    await numbered(first, 3)
    session = first.client("car").subscribe("$stream/s")
    await first.kill()
    second = await Node.on(store)
    session.client.resume(second)
    await numbered(second, 1, 3)
    await session.client.drain()
    assert [0, 1, 2, 3] == payloads(session.received)
    await second.stop()


async def test_a_named_position_counts_each_time(node: Node) -> None:
    """Subscribing again begins anew; acknowledgements from before it do not count."""
    await numbered(node, 10)
    car = node.client("car", window=10, buffer=20)
    session = car.subscribe("$stream/s", "earliest")
    await node.quiet()
    old = session.inflight[9]
    again = car.subscribe("$stream/s", "8")
    await node.quiet()
    assert [7, 8, 9] == payloads(again.received)
    again.delivered(old)
    mark = node.streams.ledger.find("car", "s", "")
    assert mark is not None and 7 == mark.done
    assert set() == mark.acked


async def test_two_subscriptions_have_a_place_each(node: Node) -> None:
    await numbered(node, 5)
    car = node.client("car")
    everything, some = car.subscribe("$stream/s/earliest"), car.subscribe("$stream/s/4")
    await car.drain()
    assert ([0, 1, 2, 3, 4], [3, 4]) == (payloads(everything.received), payloads(some.received))
    car.unsubscribe("$stream/s/4")
    assert node.streams.ledger.find("car", "s", "earliest") is not None
    assert node.streams.ledger.find("car", "s", "4") is None


@pytest.mark.parametrize("end", [Why.UNSUBSCRIBED, Why.ENDED])
async def test_a_reader_without_a_session_goes_on_by_its_name(store: Store, end: Why) -> None:
    """In this process and in the next; a stranger begins with the latest."""
    node = await Node.on(store)
    await node.create()
    await numbered(node, 30)
    session = node.client("car", window=4).subscribe("$stream/s", "earliest")
    for number in (10, 20):
        await node.quiet()
        while int(session.inflight[0].message.payload) < number:
            session.client.acknowledge()
            await node.quiet()
        session.inflight.clear()
        session.client.sessions.pop(session.subscription.filter).end(end)
        if number == 20:
            await node.stop()
            node = await Node.on(store)
        session = node.client("car", window=4).subscribe("$stream/s")
        await node.quiet()
        assert number == payloads(session.received)[0]
    stranger = node.client("bus").subscribe("$stream/s")
    await numbered(node, 1, 30)
    await session.client.drain()
    assert list(range(20, 31)) == payloads(session.received)
    assert [30] == payloads(stranger.received)
    await node.stop()


# -- streams that come and go


async def test_a_stream_that_is_declared_later(node: Node) -> None:
    session = node.client("car").subscribe("$stream/later")
    await node.quiet()
    await node.create("later")
    await node.append(b"1", stream="later")
    await session.client.drain()
    assert [1] == payloads(session.received)


@pytest.mark.parametrize("connected", [True, False])
async def test_deleted_and_made_again(node: Node, connected: bool) -> None:
    """Old records, what was given of them and all progress are gone; the subscription lives on."""
    await numbered(node, 10)
    session = node.client("car", window=2).subscribe("$stream/s", "earliest")
    await node.quiet()
    if not connected:
        session.client.disconnect()
    await node.streams.delete("s")
    await node.quiet()
    await node.create("s")
    await node.append(b"100", b"101", b"102")
    if not connected:
        session.client.resume()
    await session.client.drain()
    assert [0, 1, 100, 101, 102] == payloads(session.received)
    assert [1, 2, 3] == offsets(session.received)[2:]
    view = await node.streams.show("s")
    assert ((3, 0, 1), "car") == ((view.last, view.lag, view.readers), view.reading[0].client)


async def test_leaving_the_configuration_loses_nothing(store: Store) -> None:
    """The declaration goes, the records and everybody's place stay."""
    node = await Node.on(store)
    await node.create("s")
    options = node.streams.options("s")
    await node.streams.delete("s")
    await node.streams.reconfigure({"s": options})
    await numbered(node, 10)
    session = node.client("car", window=3).subscribe("$stream/s", "earliest")
    await node.quiet()
    await node.streams.reconfigure({})
    session.client.acknowledge()
    await node.quiet()
    await node.streams.reconfigure({"s": options})
    await numbered(node, 2, 10)
    await session.client.drain()
    assert list(range(12)) == payloads(session.received)
    await node.stop()


async def test_sessions_that_end_leave_only_progress_behind(node: Node, store: Store) -> None:
    """Unsubscribed, ended with the connection, or ended while away."""
    await numbered(node, 3)
    cars = [node.client(f"car{n}") for n in range(3)]
    for car in cars:
        car.subscribe("$stream/s", "earliest")
        await car.drain()
    cars[0].unsubscribe("$stream/s")
    cars[1].disconnect(Why.ENDED)
    cars[2].disconnect()
    node.streams.ledger.forget_client("car2")
    await node.quiet()
    assert [] == node.streams.ledger.of_stream("s")
    assert {} == node.streams.ledger._marks
    assert [[]] * 3 == [progress.marks for progress in node.streams.ledger.of_clients("s")]
    assert 0 == node.streams.cache.octets
    assert 0 == node.streams.cache.behind
    assert {} == node.streams._readers
    await node.streams.delete("s")
    assert 0 == len(node.streams.ledger)
    assert [] == [key async for key, _ in store.records.scan("stream-progress", NOW)]
