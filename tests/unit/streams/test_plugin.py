"""The plugin at the hooks of a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.declared import ConflictError
from motorcade.extension.hooks import AFTER, Handled, Verdict
from motorcade.extension.plugin import Loaded, Plugins
from motorcade.plugins.streams import StreamsPlugin
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Store, StoreFullError
from tests.unit.plugins.hub import MemoryHub

CLIENT = ClientInfo("car", version=5)


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def plugins(hub: MemoryHub, store: Store, tmp_path: Path) -> AsyncIterator[Plugins]:
    made = Plugins(hub, hub.hooks, tmp_path)
    made.store = store
    yield made
    await made.unload_all()


async def load(plugins: Plugins, **config: Any) -> Loaded:
    return await plugins.load("streams", config)


def publish(hub: MemoryHub, message: Message) -> Any:
    """What the hooks make of a message."""
    chain = hub.hooks.publish_chains(message.topic)[0]
    return message if chain is None else chain.fold(CLIENT, acc=message)


def subscribe(hub: MemoryHub, *asked: Any) -> list[Any]:
    assert hub.hooks.client_subscribe is not None
    return list(hub.hooks.client_subscribe.fold(CLIENT, (), acc=list(asked)))


async def stored(store: Store, name: str = "s") -> list[bytes]:
    return [record.value for record in await store.streams.read(name, 0, 100)]


async def test_while_nothing_is_declared_nothing_is_called(hub: MemoryHub, plugins: Plugins) -> None:
    """Publishing is as quick as without the plugin, but for what nobody may publish to."""
    await load(plugins)
    assert (None, None) == hub.hooks.publish_chains("a/b")


async def test_only_topics_that_are_bound_come_by(hub: MemoryHub, plugins: Plugins, store: Store) -> None:
    loaded = await load(plugins, stream={"s": {"topics": ["a/+", "a/#"]}, "t": {"topics": ["a/b"]}})
    assert hub.hooks.publish_chains("b/a")[0] is None
    message = Message("a/b", b"x", 1)
    assert message is publish(hub, message), "it is routed as usual"
    awaited = message.headers[AFTER]
    assert isinstance(awaited, list)
    await asyncio.gather(*awaited)
    assert (1, 1) == (len(await stored(store)), len(await stored(store, "t"))), "once in each, by whatever filter"
    assert 2 == loaded.context.counters["appended"]


async def test_qos_0_is_stored_and_nobody_waits(hub: MemoryHub, plugins: Plugins, store: Store) -> None:
    loaded = await load(plugins, stream={"s": {"topics": ["a"]}})
    message = Message("a", b"x")
    publish(hub, message)
    assert {} == message.headers
    assert isinstance(loaded.plugin, StreamsPlugin)
    await loaded.plugin.streams.stop()
    assert 1 == len(await stored(store))


async def test_dollar_topics_only_when_asked_for(hub: MemoryHub, plugins: Plugins) -> None:
    await load(plugins, stream={"all": {"topics": ["#", "+/x"]}})
    assert hub.hooks.publish_chains("$SYS/x")[0] is None
    assert hub.hooks.publish_chains("a/x")[0] is not None
    await plugins.reload("streams", {"stream": {"all": {"topics": ["$SYS/#"]}}})
    assert hub.hooks.publish_chains("$SYS/x")[0] is not None
    assert hub.hooks.publish_chains("a/x")[0] is None


async def test_what_another_plugin_has_taken_is_left_alone(hub: MemoryHub, plugins: Plugins, store: Store) -> None:
    loaded = await load(plugins, stream={"s": {"topics": ["a"]}})
    assert isinstance(loaded.plugin, StreamsPlugin)
    loaded.plugin.on_publish(CLIENT, Handled())
    await loaded.plugin.streams.stop()
    assert [] == await stored(store)


async def test_too_much_waits(hub: MemoryHub, plugins: Plugins) -> None:
    """QoS 0 is routed and counted; others hear it."""
    loaded = await load(plugins, stream={"s": {"topics": ["a"]}}, max_waiting=1)
    first, second, third = Message("a", b"1", 1), Message("a", b"2", 1), Message("a", b"3")
    for message in (first, second, third):
        publish(hub, message)
    refused = second.headers[AFTER]
    assert isinstance(refused, list)
    with pytest.raises(StoreFullError, match="max_waiting"):
        await refused[0]
    assert {} == third.headers
    assert (1, 2) == (loaded.context.counters["dropped_qos0"], loaded.context.counters["refused_waiting"])


async def test_nobody_publishes_to_a_stream_by_its_name(hub: MemoryHub, plugins: Plugins) -> None:
    await load(plugins)
    answer = publish(hub, Message("$stream/s", b"x", 1))
    assert isinstance(answer, Handled)
    assert ReasonCode.TOPIC_NAME_INVALID == answer.reason
    assert "bound to" in (answer.reason_string or "")


async def test_how_filters_are_judged(hub: MemoryHub, plugins: Plugins) -> None:
    await load(plugins, stream={"s": {"topics": ["a"]}})
    other, refused = Subscription("a/#", 2), ReasonCode.NOT_AUTHORIZED
    answers = subscribe(
        hub,
        other,
        refused,
        Subscription("$stream/s", 2),
        Subscription("$stream/s/earliest", 1),
        Subscription("$stream/x", 1),
        Subscription("$stream/s/soon", 1),
        Subscription("$share/g/$stream/s", 1),
        Subscription("$share/g/a", 1),
        Subscription("$streams", 1),
    )
    assert answers[0] is other
    assert answers[1] is refused
    assert Subscription("$stream/s", 1) == answers[2]
    assert Subscription("$stream/s/earliest", 1) == answers[3]
    assert Verdict(Subscription("$stream/x", 1), answers[4].detail) == answers[4]
    assert "no stream 'x' yet" in answers[4].detail
    assert ReasonCode.TOPIC_FILTER_INVALID == answers[5].outcome
    assert ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED == answers[6].outcome
    assert [Subscription("$share/g/a", 1), Subscription("$streams", 1)] == answers[7:]


async def test_reloading(hub: MemoryHub, plugins: Plugins, store: Store) -> None:
    """Declarations and bounds change; on an error all stays as it was."""
    loaded = await load(plugins, stream={"s": {"topics": ["a"]}})
    service = plugins.service("streams")
    await plugins.reload("streams", {"stream": {"t": {"topics": ["b"]}}, "max_streams": 2})
    assert ["t"] == [view.name for view in await service.list()]
    await service.create("u", service.Options(topics=("c",)))
    with pytest.raises(ConflictError):
        await plugins.reload("streams", {"stream": {"u": {"topics": ["d"]}}})
    with pytest.raises(ConflictError, match="max_streams"):
        await plugins.reload("streams", {"stream": {"t": {}, "v": {}, "w": {}}, "max_streams": 2})
    await plugins.reload("streams", {"stream": {"t": {"topics": ["b"]}, "v": {}}, "max_streams": 3})
    assert ["t", "u", "v"] == [view.name for view in await service.list()]
    await plugins.reload("streams", {"stream": {"t": {"topics": ["b"]}}, "max_streams": 2})
    assert ["t", "u"] == [view.name for view in await service.list()]
    assert hub.hooks.publish_chains("b")[0] is not None
    assert {"streams": 2, "stream_readers": 0} == {
        key: value for key, value in loaded.gauges().items() if key in {"streams", "stream_readers"}
    }


async def test_a_session_that_ends_is_forgotten(hub: MemoryHub, plugins: Plugins) -> None:
    loaded = await load(plugins, stream={"s": {"topics": ["a"]}})
    assert isinstance(loaded.plugin, StreamsPlugin)
    ledger = loaded.plugin.streams.ledger
    for number in range(3):
        ledger.new(f"car{number}", "s", "")
    assert hub.hooks.session_terminated is not None and hub.hooks.session_discarded is not None
    hub.hooks.session_terminated.notify(ClientInfo("car0"), "expired")
    hub.hooks.session_discarded.notify(ClientInfo("car1"))
    assert ["car2"] == [mark.client for mark in ledger.of_stream("s")]


async def test_unloaded_and_loaded_again(hub: MemoryHub, plugins: Plugins) -> None:
    """Nothing stays behind at the hooks, and everything is found again."""
    await load(plugins)
    service = plugins.service("streams")
    await service.create("s", service.Options(topics=("a",)))
    publish(hub, Message("a", b"x"))
    await plugins.unload("streams")
    assert (None, None) == hub.hooks.publish_chains("a")
    assert plugins.service("streams") is None
    await load(plugins)
    assert 1 == (await plugins.service("streams").show("s")).records


async def test_a_store_in_memory_will_do(hub: MemoryHub, tmp_path: Path) -> None:
    plugins = Plugins(hub, hub.hooks, tmp_path)
    plugins.store = MemoryStore()
    await plugins.store.open()
    await load(plugins, stream={"s": {"topics": ["a"]}})
    await plugins.unload_all()
