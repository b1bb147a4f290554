"""Streams as operators and other plugins see them: declared, changed, deleted, read; stored and bounded."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from motorcade.core.message import Message
from motorcade.core.record import encode
from motorcade.extension.declared import CONFIGURED, CREATED, BadNameError, ConflictError, Found, UnknownError
from motorcade.plugins.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.streams.service import COLLECTION
from motorcade.plugins.streams.views import ReaderView
from motorcade.storage.ports import Store, StoreError
from tests.unit.streams.clients import NOW, Node


def options(*topics: str, **others: object) -> StreamOptions:
    return msgspec.convert({"topics": list(topics), **others}, StreamOptions)


async def test_created_shown_changed_and_there_again(store: Store) -> None:
    node = await Node.on(store)
    view = await node.streams.create("fleet", options("a/#", "b", retention=60))
    assert ("fleet", CREATED, ("a/#", "b"), 60, 0, 0) == (
        view.name,
        view.origin,
        view.topics,
        view.retention,
        view.records,
        view.readers,
    )
    assert ["a/#", "b"] == node.bound
    await node.append(b"12", b"345", stream="fleet")
    view = await node.streams.change("fleet", options("c", max_messages=5))
    assert (("c",), 5, 1, 2, 2) == (view.topics, view.max_messages, view.first, view.last, view.records)
    assert view.bytes > 5
    assert ["c"] == node.bound
    await node.streams.create("another", options())
    assert ["another", "fleet"] == [view.name for view in await node.streams.list()]
    await node.stop()
    again = await Node.on(store)
    assert 2 == len(again.streams)
    assert ["c"] == again.bound
    assert options("c", max_messages=5) == again.streams.options("fleet")
    assert 2 == (await again.streams.show("fleet")).records
    await again.stop()


async def test_what_is_refused(node: Node) -> None:
    """Each with a word about what is wrong."""
    streams = node.streams
    with pytest.raises(ConflictError, match="there already"):
        await streams.create("s", options())
    with pytest.raises(BadNameError, match="'a b'"):
        await streams.create("a b", options())
    for work in (streams.show("x"), streams.change("x", options()), streams.delete("x"), streams.read("x", 0, 1)):
        with pytest.raises(UnknownError, match="no stream 'x'"):
            await work


async def test_what_the_configuration_declares_is_changed_there(store: Store) -> None:
    node = await Node.on(store, stream={"fleet": options("a")})
    assert CONFIGURED == (await node.streams.show("fleet")).origin
    for work in (node.streams.change("fleet", options()), node.streams.delete("fleet")):
        with pytest.raises(ConflictError, match=r"\[plugins.streams.stream.fleet\]"):
            await work
    await node.streams.reconfigure({"fleet": options("b"), "new": options("c")})
    assert ["b", "c"] == node.bound
    await node.create("s")
    with pytest.raises(ConflictError, match="'s' was declared while the node ran"):
        await node.streams.reconfigure({"s": options("d")})
    assert ["b", "c", "t/#"] == node.bound, "nothing has changed"
    await node.stop()


async def test_the_configuration_wins_over_what_is_stored(store: Store) -> None:
    first = await Node.on(store)
    await first.create("s")
    await first.append(b"kept")
    await first.stop()
    node = await Node.on(store, stream={"s": options("other")})
    view = await node.streams.show("s")
    assert (CONFIGURED, ("other",), 1) == (view.origin, view.topics, view.records)
    await node.stop()


async def test_there_is_a_bound(store: Store) -> None:
    node = await Node.on(store, max_streams=2)
    await node.create("a")
    await node.create("b")
    with pytest.raises(ConflictError, match="max_streams"):
        await node.create("c")
    with pytest.raises(ConflictError, match="max_streams"):
        await node.streams.reconfigure({"c": options()})
    assert 2 == node.counters["refused_max_streams"]
    assert ["a", "b"] == [view.name for view in await node.streams.list()]
    await node.stop()


async def test_a_deletion_that_was_cut_short_is_finished(
    node: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the old stream never turn up in a new one of the same name."""
    await node.append(b"old")
    car = node.client("car")
    car.subscribe("$stream/s", "earliest")
    await car.drain()
    drop = store.streams.drop

    async def die(_stream: str) -> None:
        raise StoreError("killed")

    monkeypatch.setattr(store.streams, "drop", die)
    with pytest.raises(StoreError):
        await node.streams.delete("s")
    await node.kill()
    monkeypatch.setattr(store.streams, "drop", drop)
    again = await Node.on(store)
    assert 0 == len(again.streams)
    await again.create("s")
    assert 0 == (await again.streams.show("s")).last
    assert [] == [key async for key, _ in store.records.scan("stream-progress", NOW)]
    await again.stop()


async def test_what_is_under_way_goes_with_its_stream(node: Node, store: Store) -> None:
    """Whoever has appended hears that it was stored, which it was; then it is gone."""
    appended = node.streams.append("s", [Message("t", b"1")])
    await node.streams.delete("s")
    assert [1] == await appended
    assert [] == await store.streams.names()


async def test_a_stream_of_another_plugin(node: Node, store: Store) -> None:
    """It can be read and appended to, is bound to nothing, and its owner alone decides on its life."""
    await store.streams.append("receipts", [encode(Message("r", b"0"))], NOW)
    await node.streams.open("receipts", "fanout")
    await node.streams.open("receipts", "fanout")
    assert ["t/#"] == node.bound
    session = node.client("car").subscribe("$stream/receipts", "earliest")
    await node.append(b"1", stream="receipts")
    await session.client.drain()
    assert [b"0", b"1"] == [message.payload for message in session.received]
    for work in (node.streams.delete("receipts"), node.streams.open("receipts", "other")):
        with pytest.raises(ConflictError, match="fanout"):
            await work
    await node.streams.release("receipts", "other")
    assert "fanout" == (await node.streams.show("receipts")).origin
    await node.streams.release("receipts", "fanout")
    with pytest.raises(UnknownError):
        await node.streams.show("receipts")
    assert 2 == (await store.streams.info("receipts")).records


async def test_reading_as_an_operator(node: Node, store: Store) -> None:
    await node.streams.append(
        "s", [Message("t/a", b"1", 2, publisher="ann", guid=b"g" * 16, user_properties=(("k", "v"),))]
    )
    await store.streams.append("s", [b"\xc1"], NOW)
    first, second = await node.streams.read("s", 0, 10)
    assert first == Found(
        position=1,
        topic="t/a",
        payload=b"1",
        time=NOW,
        publisher="ann",
        guid="67" * 16,
        properties={"qos": "2", "k": "v"},
    )
    assert (2, b"\xc1") == (second.position, second.payload)
    assert "malformed" in second.properties["unreadable"]
    assert [2] == [found.position for found in await node.streams.read("s", 1, 1)]


async def test_readers_are_shown_with_their_lag(node: Node) -> None:
    await node.append(*(b"x" for _ in range(10)))
    near, far = node.client("near", 2), node.client("far", 3)
    near.subscribe("$stream/s", "9")
    far.subscribe("$stream/s/earliest")
    await node.quiet()
    far.acknowledge(1)
    near.acknowledge()
    near.disconnect()
    await node.quiet()
    view = await node.streams.show("s")
    assert (2, 10) == (view.readers, view.lag)
    shown = {reader.client: (reader.filter, reader.connected, reader.offset, reader.lag) for reader in view.reading}
    assert {"near": ("$stream/s", False, 9, 1), "far": ("$stream/s/earliest", True, 0, 10)} == shown
    assert () == (await node.streams.list())[0].reading
    node.streams.ledger.forget_client("near")
    view = await node.streams.show("s")
    assert (1, 2) == (view.readers, len(view.reading)), "where it would go on is shown all the same"
    assert ReaderView(client="near", offset=9, lag=1) == view.reading[1]


async def test_changes_wait_for_each_other(node: Node) -> None:
    """Two who create the same: one is told that it is there."""
    results = await asyncio.gather(node.create("new"), node.create("new"), return_exceptions=True)
    assert [None, ConflictError] == [result and type(result) for result in results]


async def test_a_declaration_that_cannot_be_read_is_left_alone(store: Store) -> None:
    await store.records.put(COLLECTION, "s", b"\xc1")
    node = await Node.on(store)
    assert (0, 1) == (len(node.streams), node.counters["declaration_unreadable"])
    await node.stop()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"topics": ["a/#/b"]}, "topics: 'a/#/b'"),
        ({"topics": ["$share/g/a"]}, "nobody publishes there"),
        ({"topics": ["$stream/x"]}, "nobody publishes there"),
        ({"topics": [""]}, "topics: ''"),
        ({"retention": -1}, "retention"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"speed": 1}, "speed"),
    ],
)
def test_options_are_checked(given: dict[str, object], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({"stream": {"x": given}}, StreamsConfig)
