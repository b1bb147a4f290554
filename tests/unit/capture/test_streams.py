"""Into a stream of the node, on every engine that lives in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog

from motorcade.core.message import Message
from motorcade.core.record import decode
from motorcade.extension.declared import ConflictError, UnknownError
from motorcade.plugins.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.streams.service import Streams
from motorcade.storage.ports import Store, StoreError, StoreFullError
from tests.unit.capture.capturing import NOW, capturing, message, options, rule, until

UNBOUND = StreamOptions(topics=("nothing/is/published/here",))


@pytest.fixture
async def streams(store: Store) -> AsyncIterator[Streams]:
    """The service of the plugin `streams`, with a stream `telemetry`."""
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Any, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    log = structlog.stdlib.get_logger("motorcade.plugin")
    made = Streams(store, StreamsConfig(), lambda: NOW, spawn, Counter(), log, lambda _filters: None)
    await made.start({})
    await made.create("telemetry", UNBOUND)
    yield made
    await made.stop()
    for task in list(tasks):
        task.cancel()


async def messages(store: Store, stream: str = "telemetry") -> list[Message]:
    return [decode(record.value).message() for record in await store.streams.read(stream, 0, 10_000)]


async def test_a_published_message_is_a_record_of_the_stream(store: Store, streams: Streams) -> None:
    """As it was published; the publisher is answered when the store has it."""
    given = message("fleet/1", b"\x00\xff", username="driver", user_properties=(("a", "b"),), retain=True)
    async with capturing(store, {"streams": streams}, rule={"in": rule("stream:telemetry")}) as capture:
        await capture.captured(given)
        assert [given] == await messages(store)
        assert (1, 0, "") == ((view := capture.view("in")).captured, view.pending, view.problem)


async def test_many_keep_their_order(store: Store, streams: Streams) -> None:
    async with capturing(store, {"streams": streams}, rule={"in": rule("stream:telemetry")}) as capture:
        for number in range(3000):
            capture.publish(message("fleet/1", b"%d" % number, qos=number % 3))
            if number % 700 == 0:
                await asyncio.sleep(0)
        await until(lambda: capture.view("in").captured == 3000)
    assert [b"%d" % number for number in range(3000)] == [found.payload for found in await messages(store)]


async def test_the_stream_must_be_declared_before_the_rule(store: Store, streams: Streams) -> None:
    async with capturing(store, {"streams": streams}) as capture:
        with pytest.raises(UnknownError, match="motorcade stream create nowhere"):
            await capture.rules.create("in", options("stream:nowhere"))
        assert 0 == len(capture.rules)
        await capture.rules.create("in", options("stream:telemetry"))
        with pytest.raises(UnknownError, match="no stream 'nowhere'"):
            await capture.rules.change("in", options("stream:nowhere"))
        with pytest.raises(ConflictError, match="motorcade stream read telemetry"):
            await capture.rules.read("in", 0, 1)
        await capture.captured(message("fleet/1", b"1"))


async def test_a_stream_that_goes_is_heard_of_and_may_come_back(store: Store, streams: Streams) -> None:
    """Messages fail and are counted, QoS 1 publishers are refused, the view says why."""
    services: dict[str, Any] = {"streams": streams}
    async with capturing(store, services, rule={"in": rule("stream:telemetry")}) as capture:
        await streams.delete("telemetry")
        with pytest.raises(StoreError, match="no stream 'telemetry'") as refused:
            await capture.captured(message("fleet/1", b"1"))
        assert refused.value.certain
        capture.publish(message("fleet/1", b"2", qos=0))
        await until(lambda: capture.view("in").failed == 2)
        assert "no stream 'telemetry'" in (await capture.rules.show("in")).problem
        del services["streams"]
        with pytest.raises(StoreError, match="'streams' is not loaded"):
            await capture.captured(message("fleet/1", b"3"))
        services["streams"] = streams
        await streams.create("telemetry", UNBOUND)
        assert "" == (await capture.rules.show("in")).problem
        await capture.captured(message("fleet/1", b"4"))
    assert [b"4"] == [found.payload for found in await messages(store)]


async def test_the_node_starts_without_the_stream_of_a_configured_rule(store: Store, streams: Streams) -> None:
    async with capturing(store, {"streams": streams}, rule={"in": rule("stream:later")}) as capture:
        assert "no stream 'later'" in (await capture.rules.show("in")).problem
        await streams.create("later", UNBOUND)
        await capture.captured(message("fleet/1", b"1"))
        assert "" == (await capture.rules.show("in")).problem


async def test_a_message_that_cannot_be_written_does_not_harm_others(store: Store, streams: Streams) -> None:
    """A plugin may have made it of something else than text."""
    async with capturing(store, {"streams": streams}, rule={"in": rule("stream:telemetry")}) as capture:
        odd = message("fleet/1", b"b", publisher="\ud800")
        waits = [capture.publish(given)[0] for given in (message("fleet/1", b"a"), odd, message("fleet/1", b"c"))]
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert [None, True, None] == [getattr(error, "certain", None) for error in errors]
    assert [b"a", b"c"] == [found.payload for found in await messages(store)]


async def test_a_bound_of_what_waits(store: Store, streams: Streams) -> None:
    async with capturing(store, {"streams": streams}, rule={"in": rule("stream:telemetry", max_pending=2)}) as capture:
        waits = [capture.publish(message("fleet/1", b"%d" % number)) for number in range(3)]
        capture.publish(message("fleet/1", b"3", qos=0))
        with pytest.raises(StoreFullError, match="2 messages wait"):
            await waits[2][0]
        await asyncio.gather(waits[0][0], waits[1][0])
        view = capture.view("in")
        assert (2, 1, 1, 0) == (view.captured, view.refused, view.dropped, view.pending)


async def test_the_store_refuses(store: Store, streams: Streams) -> None:
    """What the store says reaches the publisher: here that it is closed, and nobody knows."""
    async with capturing(None, {"streams": streams}, rule={"in": rule("stream:telemetry")}) as capture:
        await store.close()
        with pytest.raises(StoreError) as refused:
            await capture.captured(message("fleet/1", b"1"))
        assert not refused.value.certain
        assert 1 == capture.view("in").failed


async def test_a_reload_with_a_stream_that_is_not_there_changes_nothing(store: Store, streams: Streams) -> None:
    async with capturing(store, {"streams": streams}, rule={"in": rule("stream:telemetry")}) as capture:
        wrong = msgspec.convert({"rule": {"in": rule("stream:nowhere")}}, type(capture.plugin.config))
        with pytest.raises(UnknownError, match="no stream 'nowhere'"):
            await capture.plugin.reload(wrong)
        await capture.captured(message("fleet/1", b"1"))
