"""Progress in the store: by client id, written seldom, never backwards, gone when it was of no use for long."""

from __future__ import annotations

from typing import Any

from motorcade.plugins.logs.streams.reader import COLLECTION, key_of
from motorcade.plugins.logs.streams.service import LASTS
from motorcade.storage.ports import StoreError
from tests.support.virtual import START, Client
from tests.unit.streams.node import LASTING, StreamsNode, read

WEEK = 7 * 86400.0


def reading(node: StreamsNode, count: int = 8, **more: Any) -> Client:
    """A client with everything in flight."""
    node.append_numbers(count)
    car = node.reader("car", "earliest", window=count, **more)
    assert count == len(car.messages())
    return car


def test_many_acknowledgements_are_one_write() -> None:
    """The first place is written at once, the rest when the interval is over, which runs only after a change."""
    with StreamsNode.with_stream(progress_interval=10.0) as node:
        car = reading(node)
        assert {"s/car": [1, 0, START]} == node.progress()
        assert not node.progress_store.unwritten.is_timed
        written = node.counters["progress_written"]
        for message in list(car.inflight[:5]):
            car.ack(message)
        assert written == node.counters["progress_written"]
        node.wait(10)
        assert {"s/car": [1, 5, START]} == node.progress()
        assert written + 1 == node.counters["progress_written"]
        assert not node.progress_store.unwritten.is_timed


def test_progress_outlives_its_subscription_and_is_written_at_once() -> None:
    """Whatever session the client has, it goes on by its id."""
    sessions: list[tuple[str, dict[str, Any]]] = [("close", LASTING), ("end", {}), ("unsubscribe", {})]
    for how, session in sessions:
        for version in (4, 5):
            with StreamsNode.with_stream(progress_interval=1000.0) as node:
                node.append_numbers(20)
                car = node.reader("car", stream="s/earliest", version=version, window=8, **session)
                car.messages()
                car.ack(*car.inflight[:5])
                if how == "unsubscribe":
                    car.unsubscribe("$stream/s/earliest")
                    car.take()
                car.disconnect()
                assert {"s/car": [1, 5, START]} == node.progress(), how
                seen = node.reader("car", version=version).drain()
                assert [b"%d" % number for number in range(5, 20)] == seen, how


def test_what_is_acknowledged_after_unsubscribing_counts() -> None:
    """It was in flight; the client has got it. When the last of it is acknowledged, its place is no more."""
    with StreamsNode.with_stream() as node:
        car = reading(node)
        messages = list(car.inflight)
        car.unsubscribe("$stream/s")
        car.ack(*messages[:4], messages[5])
        assert 4 == node.committed()
        read(car)
        car.ack(messages[4])  # it is given again already
        assert (b"4", 4) == (car.messages()[0].payload, node.cursor().done)
        car.unsubscribe("$stream/s")
        car.ack(*reversed(car.inflight))
        assert ({}, 8) == (node.cursors(), node.committed())


def test_several_subscriptions_share_the_progress() -> None:
    """It is that of the one farthest behind, as long as it is there. Nothing is missed, whichever ends first."""
    with StreamsNode.with_stream() as node:
        node.append_numbers(20)
        car = node.client("car")
        car.subscribe("$stream/s/11", 1, 11)
        car.subscribe("$stream/s/earliest", 1, 1)
        by_filter = {
            number: [
                message for message in car.messages() + car.inflight if number in message.properties.subscription_ids
            ]
            for number in (11, 1)
        }
        car.ack(*by_filter[11][:4])
        car.ack(by_filter[1][0])
        assert (14, 1) == (node.cursor(offset="11").done, node.committed())
        car.ack(*(message for message in by_filter[1] if message in car.inflight))
        car.unsubscribe("$stream/s/earliest")
        assert 14 == node.committed()
        car.subscribe("$stream/s/5")
        car.unsubscribe("$stream/s/11")
        assert 4 == node.committed()
    for order in (("15", "4"), ("4", "15")):
        with StreamsNode.with_stream() as node:
            node.append_numbers(20)
            car = node.client("car")
            for offset in order:
                car.subscribe(f"$stream/s/{offset}")
            car.disconnect()
            assert 3 == node.committed()
            car = node.reader("car", stream="s/18")
            assert 17 == node.committed()
            car.ack(car.messages()[0])
            assert 18 == node.committed()


def test_there_is_a_bound_per_stream() -> None:
    """Who is beyond it, or has no name of its own, reads like everybody else; nothing of it is committed."""
    with StreamsNode.with_stream(max_progress=2) as node:
        node.create("other")
        cars = [node.reader(f"car{number}") for number in range(3)]
        node.reader("car9", stream="other")
        nameless = node.reader("auto-0123456789abcdef0123", stream="other/earliest")
        node.append(b"1")
        node.append(b"2", stream="other")
        assert ([b"1"], [b"2"]) == (cars[2].drain(), nameless.drain())
        assert (1, 3) == (node.counters["refused_max_progress"], len(node.progress()))
        cars[2].disconnect()
        assert [] == node.reader("car2").messages(), "nothing is committed, so it begins with the latest"
        assert {"s/car0", "s/car1", "other/car9"} == set(node.restart().progress())


def test_a_store_that_fails_is_tried_again() -> None:
    """Unless the stream is gone meanwhile: it would be there for the next stream of that name."""
    for deleted in (False, True):
        with StreamsNode.with_stream(progress_interval=1.0) as node:
            car = reading(node)
            car.ack(car.inflight[0])
            node.held.held = True
            node.wait(1)
            (write,) = node.held.waiting
            if deleted:
                node.held.held = False
                node.held.waiting.clear()
                node.run(node.streams.delete("s"))
                node.held.waiting.append(write)
            node.held.fail(StoreError("away"))
            node.held.held = False
            node.wait(10)
            assert ({} if deleted else {"s/car": [1, 1, START]}) == node.progress()
            assert 1 == node.counters["progress_failed"]


def test_progress_expires() -> None:
    """The retention after the last commit, in the store and in memory; without a retention after 30 days."""
    with StreamsNode.with_stream() as node:
        node.create("kept", topics=[], retention=0)
        node.append(b"0")
        for stream in ("s", "kept"):
            node.reader("car", "earliest", stream=stream).disconnect()
        node.clock.now = START + WEEK - 1
        assert {"s/car", "kept/car"} == set(node.progress())
        assert (0, 0) == (node.committed(), node.committed(stream="kept"))
        node.clock.now = START + WEEK
        assert {"kept/car"} == set(node.progress())
        assert node.committed() is None
        assert 0 == node.committed(stream="kept")
        node.clock.now = START + LASTS
        assert {} == node.progress()
        assert 0 == len(node.progress_store)


def test_the_last_commit_counts_and_expired_progress_makes_room() -> None:
    """Whoever has begun first may go last. Who comes back late is written at once: it could expire otherwise."""
    with StreamsNode.with_stream({"retention": 100}, max_progress=2) as node:
        for name in ("one", "two"):
            node.reader(name).disconnect()
        node.wait(90)
        node.reader("one").disconnect()
        assert [1, 0, START + 90] == node.progress()["s/one"]
        node.wait(20)
        node.run(node.streams.trimmer.look())
        node.reader("three").disconnect()
        assert (0, {"s/one", "s/three"}) == (node.counters["refused_max_progress"], set(node.progress()))


def test_a_subscription_keeps_its_progress() -> None:
    """However long nothing happens, and the node may die at any time."""
    for away in (False, True):
        with StreamsNode.with_stream({"retention": 100}) as node:
            node.append(b"0")
            car = node.reader("car", "earliest", **LASTING)
            node.reader("gone").disconnect()
            car.drain()
            if away:
                car.close()
            for _ in range(40):
                node.wait(10)
                assert 1 == node.progress()["s/car"][1]
            assert {"s/car"} == set(node.progress())
            assert 5 < node.counters["progress_written"] < 15, "seldom"
            node.kill()


def test_client_ids_may_be_anything() -> None:
    """With slashes, and too long for a key: that one is not stored."""
    with StreamsNode.with_stream() as node:
        node.append(b"1")
        odd = ["a/b//c", "$stream/s", "ü€"]
        for client_id in odd:
            node.reader(client_id, stream="s/earliest")
        with node.loop.running():  # type: ignore[union-attr]
            progress = node.progress_store.open(key_of("s"), "x" * 65_535)
        node.run(node.progress_store.load(progress))
        assert not progress.kept
        again = node.restart()
        assert 1 == node.counters["progress_unwritable"]
        assert {f"s/{client_id}" for client_id in odd} == set(again.progress())
        assert [0] * 3 == [again.committed(client_id) for client_id in odd]


def test_a_record_of_something_else_is_left_alone() -> None:
    with StreamsNode.with_stream() as node:
        node.run(node.held.records.put(COLLECTION, "s/car", b"\xc1"))
        node.reader("car")
        assert (1, 0) == (node.counters["progress_unreadable"], node.committed())


def test_a_store_that_has_lost_its_end() -> None:
    """Progress beyond the end goes back to it; who has asked for what is not there yet waits on."""
    with StreamsNode.with_stream() as node:
        node.append(b"0", b"1", b"2")
        node.reader("lost", "earliest", **LASTING).drain()
        node.reader("ahead", "6", **LASTING)
        node.held.inner.streams.streams.pop("s")
        again = node.restart()
        again.append(b"3")
        lost, ahead = again.reader("lost", **LASTING), again.reader("ahead", **LASTING)
        again.append(*(b"%d" % number for number in range(4, 10)))
        assert [b"4", b"5"] == lost.drain()[:2]
        assert [b"8", b"9"] == ahead.drain()
