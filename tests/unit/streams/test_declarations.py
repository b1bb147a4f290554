"""Streams as operators and other plugins see them: declared, changed, deleted, read, trimmed; stored and bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from motorcade.core.message import Message
from motorcade.core.record import encode
from motorcade.extension.declared import CONFIGURED, CREATED, ConflictError, FoundMessage, UnknownError
from motorcade.plugins.logs.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.logs.streams.service import COLLECTION
from motorcade.plugins.logs.streams.views import ReaderView
from motorcade.storage.ports import StoreError, Swept
from tests.support.virtual import START
from tests.unit.streams.node import LASTING, StreamsNode


def options(*topics: str, **others: object) -> StreamOptions:
    return msgspec.convert({"topics": list(topics), **others}, StreamOptions)


def listed(node: StreamsNode) -> list[str]:
    return [view.name for view in node.run(node.streams.list())]


def test_created_shown_changed_and_there_again() -> None:
    with StreamsNode.on() as node:
        view = node.run(node.streams.create("fleet", options("a/#", "b", retention=60)))
        assert ("fleet", CREATED, ("a/#", "b"), 60, 0, 0) == (
            view.name,
            view.origin,
            view.topics,
            view.retention,
            view.records,
            view.readers,
        )
        node.append(b"12", b"345", stream="fleet")
        view = node.run(node.streams.change("fleet", options("c", max_messages=5)))
        assert (("c",), 5, 1, 2, 2) == (view.topics, view.max_messages, view.first, view.last, view.records)
        assert view.bytes > 5
        node.run(node.streams.create("another", options()))
        assert ["another", "fleet"] == listed(node)
        again = node.restart()
        assert ["another", "fleet"] == listed(again)
        assert options("c", max_messages=5) == again.streams.options("fleet")
        assert 2 == again.run(again.streams.show("fleet")).records
        assert again.hooks.publish_chains("c")[0] is not None
        assert again.hooks.publish_chains("b")[0] is None


def test_what_is_refused() -> None:
    """Each with a word about what is wrong; changes wait for each other."""
    with StreamsNode.with_stream() as node:
        streams = node.streams
        assert "there already" in node.refusal(streams.create("s", options()))
        assert "'a b'" in node.refusal(streams.create("a b", options()))
        for work in (streams.show("x"), streams.change("x", options()), streams.delete("x"), streams.read("x", 0, 1)):
            assert "no stream 'x'" in node.refusal(work)

        async def create() -> str:
            try:
                await streams.create("new", options())
            except ConflictError as error:
                return str(error)
            return "done"

        async def both() -> list[str]:
            return list(await asyncio.gather(create(), create()))

        assert ["done", "stream 'new' is there already (command)"] == node.run(both())


def test_what_the_configuration_declares_is_changed_there() -> None:
    """On an error all stays as it was."""
    with StreamsNode.on(stream={"fleet": {"topics": ["a"]}}) as node:
        assert CONFIGURED == node.run(node.streams.show("fleet")).origin
        for work in (node.streams.change("fleet", options()), node.streams.delete("fleet")):
            assert "[plugins.streams.stream.fleet]" in node.refusal(work)
        changed = {"fleet": {"topics": ["b"]}, "new": {"topics": ["c"]}}
        node.run(node.plugins.reload("streams", {"stream": changed, "max_streams": 3}))
        node.create()
        for wrong, told in (
            ({"s": {"topics": ["d"]}}, "'s' was declared while the node ran"),
            (changed | {"more": {}}, "max_streams"),
        ):
            assert told in node.refusal(node.plugins.reload("streams", {"stream": wrong, "max_streams": 3}))
        assert "max_streams" in node.refusal(node.streams.create("more", options()))
        assert 2 == node.counters["refused_max_streams"]
        assert ["fleet", "new", "s"] == listed(node)
        for topic, bound in (("a", False), ("b", True), ("c", True), ("t/a", True), ("d", False)):
            assert bound is (node.hooks.publish_chains(topic)[0] is not None), topic
        assert {"streams": 3, "stream_readers": 0}.items() <= dict(node.loaded.gauges()).items()


def test_the_configuration_wins_over_what_is_stored_and_what_cannot_be_read_is_left_alone() -> None:
    with StreamsNode.with_stream() as node:
        node.append(b"kept")
        node.run(node.held.records.put(COLLECTION, "damaged", b"\xc1"))
        again = node.restart(stream={"s": {"topics": ["other"]}})
        view = again.run(again.streams.show("s"))
        assert (CONFIGURED, ("other",), 1) == (view.origin, view.topics, view.records)
        assert (1, 1) == (len(again.streams), again.counters["declaration_unreadable"])


def test_a_deletion_that_was_cut_short_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of the old stream never turn up in a new one of the same name."""
    with StreamsNode.with_stream() as node:
        node.append(b"old")
        node.reader("car", "earliest", **LASTING).drain()

        async def die(_stream: str) -> None:
            raise StoreError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(node.held.streams, "drop", die)
            assert "killed" in node.refusal(node.streams.delete("s"))
        again = node.kill()
        assert 0 == len(again.streams)
        again.create()
        assert (0, {}) == (again.run(again.streams.show("s")).last, again.progress())


def test_what_is_under_way_goes_with_its_stream() -> None:
    """Whoever has appended hears that it was stored, which it was; then it is gone."""
    with StreamsNode.with_stream() as node:
        appending = node.appending(b"1")
        node.run(node.streams.delete("s"))
        assert ([1], []) == (appending.result, node.run(node.held.streams.names()))


def test_a_stream_of_another_plugin() -> None:
    """It can be read and appended to, is bound to nothing, and its owner alone decides on its life."""
    with StreamsNode.with_stream() as node:
        node.run(node.held.streams.append("receipts", [encode(Message("r", b"0"))], node.now))
        for _ in range(2):
            node.run(node.streams.open("receipts", "fanout"))
        car = node.reader("car", "earliest", stream="receipts")
        node.append(b"1", stream="receipts")
        assert [b"0", b"1"] == car.drain()
        for work in (node.streams.delete("receipts"), node.streams.open("receipts", "other")):
            assert "fanout" in node.refusal(work)
        node.run(node.streams.release("receipts", "other"))
        assert "fanout" == node.run(node.streams.show("receipts")).origin
        node.run(node.streams.release("receipts", "fanout"))
        with pytest.raises(UnknownError):
            node.run(node.streams.show("receipts"))
        assert 2 == len(node.stored("receipts"))


def test_reading_as_an_operator() -> None:
    with StreamsNode.with_stream() as node:
        message = Message("t/a", b"1", 2, publisher="ann", guid=b"g" * 16, user_properties=(("k", "v"),))
        with node.loop.running():  # type: ignore[union-attr]
            node.streams.append("s", [message])
        node.run(node.held.streams.append("s", [b"\xc1"], node.now))
        damaged, first = sorted(node.run(node.streams.read("s", 0, 10)), key=lambda found: bool(found.topic))
        assert first == FoundMessage(
            position=first.position,
            topic="t/a",
            payload=b"1",
            time=START,
            publisher="ann",
            guid="67" * 16,
            properties={"qos": "2", "k": "v"},
        )
        assert b"\xc1" == damaged.payload and "malformed" in damaged.properties["unreadable"]
        assert [2] == [found.position for found in node.run(node.streams.read("s", 1, 1))]


def test_readers_are_shown_with_their_lag() -> None:
    with StreamsNode.with_stream() as node:
        node.append_numbers(10)
        near, far = node.reader("near", "9", **LASTING), node.reader("far", stream="s/earliest", window=3)
        far.ack(far.messages()[1])
        near.ack(near.messages()[0])
        near.close()
        node.turn()
        view = node.run(node.streams.show("s"))
        assert (2, 10) == (view.readers, view.lag)
        shown = {reader.client: (reader.filter, reader.connected, reader.offset, reader.lag) for reader in view.reading}
        assert {"near": ("$stream/s", False, 9, 1), "far": ("$stream/s/earliest", True, 0, 10)} == shown
        assert () == node.run(node.streams.list())[0].reading
        node.client("near").disconnect()
        view = node.run(node.streams.show("s"))
        assert (1, 2) == (view.readers, len(view.reading)), "where it would go on is shown all the same"
        assert ReaderView(client="near", offset=9, lag=1) == view.reading[1]


def test_options_are_checked() -> None:
    for given, says in [
        ({"topics": ["a/#/b"]}, "topics: 'a/#/b'"),
        ({"topics": ["$share/g/a"]}, "no message is published there"),
        ({"topics": ["$stream/x"]}, "no message is published there"),
        ({"topics": [""]}, "topics: ''"),
        ({"retention": -1}, "retention"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"speed": 1}, "speed"),
    ]:
        with pytest.raises(msgspec.ValidationError, match=says):
            msgspec.convert({"stream": {"x": given}}, StreamsConfig)


# -- what goes, when, and in which steps


def kept(node: StreamsNode) -> list[int]:
    return [record.offset for record in node.held.inner.streams.streams["s"].records]


def test_old_records_go() -> None:
    """When the oldest is to go, but not more often than a hundredth of the retention; readers never see them again."""
    with StreamsNode.with_stream({"retention": 10}) as node:
        car = node.reader("car", "earliest", window=100)
        for _ in range(20):
            node.append(b"x")
            node.wait(1)
        assert START + 20 == node.stream.outdated_at()
        assert (list(range(11, 21)), 10) == (kept(node), node.counters["trimmed"])
        car.drain()
        node.wait(20)
        view = node.run(node.streams.show("s"))
        assert (0, 20, 0, 0) == (view.first, view.last, view.records, view.bytes)
        node.append(b"new")
        assert ([21], node.now + 10) == (kept(node), node.stream.outdated_at())
        for position in ("1", "earliest", "@0"):
            assert [b"new"] == node.reader(f"late {position}", position).drain(), position


def test_the_next_look_comes_in_time() -> None:
    with StreamsNode.with_stream({"retention": 60}) as node:
        trimmer = node.streams.trimmer
        assert 10 == trimmer._patience(), "there is nothing to lose"
        node.append(b"x")
        node.clock.now += 57
        assert 3 == trimmer._patience()
        node.clock.now += 4
        assert 0.6 == trimmer._patience()
        node.create("short", retention=8)
        node.clock.now -= 20
        assert 2 == trimmer._patience(), "progress in it may expire, too"
        node.clock.now += 20


def test_a_stream_that_grows_too_far_is_trimmed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the interval, in bounded steps; and while nothing is to be done, nothing runs."""
    with StreamsNode.with_stream({"max_messages": 100, "retention": 0}, trim_interval=1e5, trim_budget=7) as node:
        steps: list[int] = []
        trim = node.held.streams.trim

        async def counted(*args: Any) -> Swept:
            swept = await trim(*args)
            steps.append(swept.removed)
            return swept

        monkeypatch.setattr(node.held.streams, "trim", counted)
        for _ in range(10):
            node.append(*(b"x" for _ in range(100)))
        node.wait(10)
        assert (list(range(901, 1001)), 900, 7) == (kept(node), sum(steps), max(steps))
        size = node.stream.size_bytes // 100
        assert 1e5 == node.streams.trimmer._patience()
        node.run(node.streams.change("s", options(max_bytes=2 * size, retention=0)))
        node.begin(node.streams.trimmer.look())
        node.wait(10)
        assert [999, 1000] == kept(node)
        assert (998 * size, 2, 2 * size, 999) == (
            node.counters["trimmed_bytes"],
            node.stream.records,
            node.stream.size_bytes,
            node.stream.first,
        )
        node.run(node.streams.delete("s"))
        assert node.streams.trimmer._patience() is None
