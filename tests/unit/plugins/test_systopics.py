"""The node's figures as `$SYS` messages: names, texts, averages, and what is left out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

import motorcade
from motorcade import tasks
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled
from motorcade.extension.plugin import Loaded
from motorcade.plugins.systopics import SysTopicsPlugin
from motorcade.plugins.systopics.load import Load as LoadAverage
from motorcade.plugins.systopics.plugin import memory
from motorcade.storage.ports import StoreFullError
from tests.unit.plugins.hub import MemoryHub

Load = Callable[..., Awaitable[Loaded]]

FIGURES = {
    "clients_connected": 3,
    "clients_disconnected": 2,
    "clients_total": 5,
    "clients_maximum": 4,
    "clients_expired": 1,
    "messages_received": 120,
    "messages_sent": 240,
    "publish_received": 60,
    "publish_sent": 90,
    "publish_dropped": 6,
    "publish_bytes_received": 600,
    "publish_bytes_sent": 900,
    "bytes_received": 6000,
    "bytes_sent": 9000,
    "subscriptions": 7,
    "shared_subscriptions": 8,
    "sockets_opened": 30,
    "connections_accepted": 12,
    "messages_stored": 9,
    "messages_stored_bytes": 99,
    "retained_messages": 55,
    "uptime": 10.7,
}

#: Of mosquitto's tree, what does not depend on the machine, for FIGURES.
EXPECTED = {
    "version": f"motorcade version {motorcade.__version__}",
    "uptime": "10 seconds",
    "clients/connected": "3",
    "clients/disconnected": "2",
    "clients/active": "3",
    "clients/inactive": "2",
    "clients/expired": "1",
    "clients/maximum": "4",
    "clients/total": "5",
    "messages/received": "120",
    "messages/sent": "240",
    "messages/stored": "9",
    "store/messages/count": "9",
    "store/messages/bytes": "99",
    "subscriptions/count": "7",
    "shared_subscriptions/count": "8",
    "retained messages/count": "55",
    "publish/messages/received": "60",
    "publish/messages/sent": "90",
    "publish/messages/dropped": "6",
    "publish/bytes/received": "600",
    "publish/bytes/sent": "900",
    "bytes/received": "6000",
    "bytes/sent": "9000",
}
#: All of it.
TREE = {
    *EXPECTED,
    *("timestamp", "heap/current", "heap/maximum"),
    *(
        f"load/{name}/{period}"
        for name in (
            *("messages/received", "messages/sent", "publish/received", "publish/sent", "publish/dropped"),
            *("bytes/received", "bytes/sent", "sockets", "connections"),
        )
        for period in ("1min", "5min", "15min")
    ),
}


async def systopics(hub: MemoryHub, load: Load) -> SysTopicsPlugin:
    """The plugin after its first round."""
    plugin = (await load("systopics", interval=3600)).plugin
    assert isinstance(plugin, SysTopicsPlugin)
    async with asyncio.timeout(60):
        await hub.seen("$SYS/broker/heap/maximum")
    return plugin


def texts(hub: MemoryHub) -> dict[str, str]:
    """What was published, by topic below `$SYS/broker`."""
    return {m.topic.removeprefix("$SYS/broker/"): m.payload.decode() for m in hub.routed}


async def test_the_tree_is_mosquittos(hub: MemoryHub, load: Load) -> None:
    """Every customary topic is there with its text, retained, and nothing else."""
    hub.figures.update(FIGURES)
    await systopics(hub, load)
    found = texts(hub)
    assert EXPECTED == {topic: found.get(topic) for topic in EXPECTED}
    assert TREE == found.keys()
    assert all(message.retain and message.topic.startswith("$SYS/broker/") for message in hub.routed)


async def test_only_what_has_changed_is_published_again(hub: MemoryHub, load: Load) -> None:
    """A round in which one figure moved publishes that one."""
    hub.figures.update(FIGURES)
    plugin = await systopics(hub, load)
    hub.routed.clear()
    hub.figures["clients_connected"] = 4
    await plugin.publish_round()
    assert {"clients/connected": "4", "clients/active": "4"} == {
        t: v for t, v in texts(hub).items() if not t.startswith("heap/")
    }


async def test_rounds_go_on_after_a_store_that_refused_a_figure(
    hub: MemoryHub, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable subscriber of `$SYS` and a full store: publishing raises."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    publish, failures = hub.publish, iter([StoreFullError("full"), StoreFullError("full")])

    async def refuses(message: Message, client: ClientInfo | None = None) -> int:
        if message.topic.endswith("clients/connected") and (error := next(failures, None)) is not None:
            raise error
        return await publish(message, client)

    monkeypatch.setattr(hub, "publish", refuses)
    hub.figures.update(FIGURES)
    loaded = await load("systopics", interval=3600)
    async with asyncio.timeout(60):
        await hub.seen("$SYS/broker/heap/maximum")
    assert EXPECTED.items() <= texts(hub).items()
    assert 2 == loaded.context.counters["task_failed"]


async def test_load_is_per_minute_and_moves_with_time(hub: MemoryHub, load: Load) -> None:
    """60 messages in 10 seconds are 360 per minute, of which each average takes its share."""
    hub.figures.update(FIGURES)
    plugin = await systopics(hub, load)
    assert "0.00" == texts(hub)["load/publish/received/1min"]  # the first look knows no rate yet
    hub.figures.update(publish_received=120, uptime=20.7)
    await plugin.publish_round()
    for period, seconds in (("1min", 60), ("5min", 300), ("15min", 900)):
        expected = 360 * (1 - math.exp(-10 / seconds))
        assert f"{expected:.2f}" == texts(hub)[f"load/publish/received/{period}"]


def test_averages_settle_at_the_rate_and_fade_after_it() -> None:
    """A steady rate is reached from below; when nothing happens any more, a period later 1/e of it is left."""
    average = LoadAverage()
    count = 0
    for _ in range(1000):
        average.observe(count, 10.0)
        count += 5
    assert pytest.approx(30.0, rel=0.001) == average.averages()["1min"]
    for _ in range(6):
        average.observe(count - 5, 10.0)
    assert pytest.approx(30.0 / math.e, rel=0.001) == average.averages()["1min"]


async def test_clients_may_not_speak_for_the_broker(hub: MemoryHub, load: Load) -> None:
    """A message of a client to `$SYS` is refused with a reason; other topics are no business of this plugin."""
    await systopics(hub, load)
    hub.routed.clear()
    for topic in ("$SYS", "$SYS/broker/uptime", "$SYS/x"):
        chain = hub.hooks.publish_chains(topic)[0]
        assert chain is not None
        answer = chain.fold(ClientInfo("liar"), acc=Message(topic, b"1"))
        assert isinstance(answer, Handled) and ReasonCode.NOT_AUTHORIZED == answer.reason
    assert (None, None) == hub.hooks.publish_chains("cars/1")


def test_memory_is_that_of_this_process() -> None:
    """Resident memory now is not above its maximum, and both are those of a Python process: megabytes."""
    current, maximum = memory()
    assert 1_000_000 < current <= maximum
