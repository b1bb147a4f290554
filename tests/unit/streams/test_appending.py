"""From publish to the store: in order, in groups, within bounds, and the publisher hears what became of it."""

from __future__ import annotations

from typing import Any

import pytest

from motorcade.core.message import Message
from motorcade.core.record import RecordError
from motorcade.extension.declared import UnknownError
from motorcade.extension.hooks import Handled
from motorcade.mqtt.packets import Puback, Publish
from motorcade.plugins.logs.streams.plugin import StreamsPlugin
from motorcade.storage.ports import StoreError, StoreFullError
from tests.support.virtual import Client
from tests.unit.streams.node import StreamsNode

QUOTA = 0x97


def hold(node: StreamsNode) -> None:
    """From now on the store appends when it is told to."""
    node.held.streams_too = node.held.held = True


def let_go(node: StreamsNode) -> None:
    node.held.held = False
    node.held.let_go()
    node.turn()


def put(pub: Client, *payloads: bytes, qos: int = 1) -> None:
    """One read of the broker's."""
    first = pub._numbers + 1
    pub._numbers += len(payloads)
    pub.send(*(Publish("t/a", each, qos, packet_id=qos and first + n) for n, each in enumerate(payloads)))
    pub.node.turn()


def answers(pub: Client) -> list[int]:
    return [packet.reason for packet in pub.take() if isinstance(packet, Puback)]


def test_what_is_published_is_in_every_stream_that_is_bound_to_it() -> None:
    """Once in each, by whatever filter, with every QoS; a wildcard does not mean `$…`, and it is routed as usual."""
    streams = {"s": {"topics": ["t/+", "t/#"]}, "t": {"topics": ["t/b"]}, "all": {"topics": ["#", "+/x"]}}
    with StreamsNode.on(stream=streams) as node:
        pub, live = node.client("pub"), node.client("live")
        live.subscribe("#")
        for topic in ("t/a", "t/b", "other"):
            for qos in (0, 1, 2):
                assert 0 == pub.publish(topic, b"%d" % qos, qos)
        assert [6, 3, 9] == [len(node.stored(name)) for name in streams]
        assert [b"0", b"1", b"2"] == node.stored("t")
        assert (18, 9) == (node.counters["appended"], len(live.messages()))
        for topic, taken in (("$SYS/x", False), ("a/x", True)):
            assert taken is (node.hooks.publish_chains(topic)[0] is not None)
        node.run(node.plugins.reload("streams", {"stream": {"all": {"topics": ["$SYS/#"]}}}))
        for topic, taken in (("$SYS/x", True), ("a/x", False)):
            assert taken is (node.hooks.publish_chains(topic)[0] is not None), "only what is bound comes by"


def test_what_another_plugin_has_taken_is_left_alone() -> None:
    with StreamsNode.with_stream() as node:
        assert isinstance(node.loaded.plugin, StreamsPlugin)
        node.loaded.plugin.on_publish(None, Handled())
        node.turn()
        assert [] == node.stored()


def test_publishers_are_answered_in_order_when_their_messages_are_stored() -> None:
    """One write at a time, while the next gathers. What another plugin appends is in order, too."""
    with StreamsNode.with_stream() as node:
        pub = node.client("pub")
        hold(node)
        put(pub, *(b"%d" % number for number in range(10)))
        more = node.appending(b"10", b"11")
        put(pub, b"12")
        assert (1, [], 13) == (len(node.held.waiting), answers(pub), node.streams.waiting.messages)
        node.held.let_go(1)
        node.turn()
        assert (10, 10, False) == (len(node.stored()), len(answers(pub)), more.done)
        let_go(node)
        assert ([11, 12], 1) == (more.result, len(answers(pub)))
        assert [b"%d" % number for number in range(13)] == node.stored()
        assert 0 == node.streams.waiting.messages == node.streams.waiting.size_bytes


def test_a_store_that_is_full_refuses_certainly() -> None:
    """Everybody of the group hears why; the next one is tried as ever."""
    with StreamsNode.with_stream() as node:
        pub = node.client("pub")
        hold(node)
        put(pub, b"1")
        other = node.appending(b"2")
        node.held.fail(StoreFullError("disk full"))
        node.turn()
        node.held.fail(StoreFullError("disk full"))
        node.turn()
        assert ([QUOTA], "disk full") == (answers(pub), str(other.error))
        let_go(node)
        assert [1] == node.append(b"3")
        assert (2, 1, [b"3"]) == (node.counters["append_failed"], node.counters["appended"], node.stored())


def test_a_write_of_unknown_outcome_is_looked_for_and_counted() -> None:
    """Though no reader waits, and the store has told nobody."""
    with StreamsNode.with_stream() as node:
        node.streams._unwatch()  # type: ignore[misc]
        hold(node)
        appending = node.appending(b"1")
        node.turn()
        node.held.fail(StoreError("no answer"), written=True)
        let_go(node)
        assert isinstance(appending.error, StoreError)
        node.wait(11)
        assert (1, 1) == (node.stream.tail, node.stream.records)


def test_what_waits_is_bounded_in_number_and_bytes() -> None:
    """What does not fit is refused at once, whoever asks; QoS 0 is routed and counted."""
    bounds: list[tuple[dict[str, Any], list[bytes]]] = [
        ({"max_waiting": 3}, [b"1", b"2", b"3"]),
        ({"max_waiting_bytes": 1000}, [bytes(1000)]),
    ]
    for bound, fitting in bounds:
        with StreamsNode.with_stream(**bound) as node:
            pub, other = node.client("pub"), node.client("other")
            hold(node)
            put(pub, *fitting)
            put(other, b"4")
            put(other, b"5", qos=0)
            assert [QUOTA] == answers(other)
            (name,) = bound
            refused = node.appending(b"6").error
            assert isinstance(refused, StoreFullError) and name in str(refused)
            assert (3, 1) == (node.counters["refused_waiting"], node.counters["dropped_qos0"])
            let_go(node)
            assert len(fitting) == len(answers(pub)) == len(node.stored())
            assert [len(fitting) + 1] == node.append(b"6")


def test_errors_of_an_append_are_told_where_it_is_waited_for() -> None:
    with StreamsNode.with_stream() as node:
        assert isinstance(node.appending(b"", stream="x").error, UnknownError)
        with node.loop.running():  # type: ignore[union-attr]
            assert isinstance(node.streams.append("s", [Message("t\ud800", b"")]).error, RecordError)
        assert [] == node.append()


def test_a_stream_that_could_not_be_counted_is_counted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamsNode.with_stream() as node:
        node.append_past(1, 2, batch=False)
        assert 2 == node.stream.tail and node.stream.uncounted

        async def breaks(_: str) -> None:
            raise StoreError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(node.held.streams, "info", breaks)
            with pytest.raises(StoreError):
                node.run(node.stream.look())
        node.run(node.stream.look())
        assert 2 == node.stream.records


def test_who_may_subscribe_and_publish_where() -> None:
    """A refusal says why, the connection stays; MQTT 3 hears 0x80, and is disconnected if it publishes."""
    filters = [
        ("$stream/s", 1),
        ("$stream/s/earliest", 1),
        ("$stream/x", 1),
        *((f"$stream/{name}", 0x8F) for name in ("", "-x", "a b", "+", "#", "s/soon", "s/#", "s/earliest/x", "s/-1")),
        ("$share/g/$stream/s", 0x9E),
        ("$share/g/a", 2),
        ("$streams", 2),
        ("a/#", 2),
    ]
    with StreamsNode.with_stream() as node:
        car, old = node.client("car"), node.client("old", 4)
        for filter_, reason in filters:
            answer = car.subscribe(filter_, 2)
            assert (reason,) == answer.reasons, filter_
            assert bool(answer.properties.reason_string) == (reason > 2 or filter_ == "$stream/x"), filter_
            assert (min(reason, 0x80),) == old.subscribe(filter_, 2).reasons, filter_
        answer = car.subscribe("$stream/s", 1, stream_offset="yesterday")
        assert (0x8F,) == answer.reasons and "earliest" in (answer.properties.reason_string or "")
        assert 0x90 == car.publish("$stream/s", b"x")
        old.put("$stream/s", b"x")
        node.turn()
        assert (False, []) == (old.open, node.stored())


def test_without_streams_nothing_is_called() -> None:
    """Publishing is as quick as without the plugin; unloaded, nothing stays behind, and everything is found again."""
    with StreamsNode.on() as node:
        assert (None, None) == node.hooks.publish_chains("t/a")
        node.create()
        node.append(b"x")
        node.run(node.plugins.unload("streams"))
        assert (None, None) == node.hooks.publish_chains("t/a")
        assert node.plugins.service("streams") is None
        node.load()
        assert 1 == node.run(node.streams.show("s")).records
