"""The plugin in a hub in memory, with a real store and a real Redis."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.core.guid import GuidFactory
from motorcade.core.message import Message
from motorcade.extension.hooks import AFTER, Hooks
from motorcade.extension.plugin import Context
from motorcade.plugins.capture import CaptureConfig, CapturePlugin, RuleOptions, RuleView
from motorcade.plugins.capture.rules import CaptureRules
from motorcade.storage.ports import Store
from tests.support.redis import RedisServer
from tests.unit.plugins.hub import MemoryHub

PATIENCE = 60.0  #: seconds for what must happen sooner or later
NOW = 1_700_000_000.123456
GUIDS = GuidFactory("test", 1)


def message(topic: str, payload: bytes, qos: int = 1, **more: Any) -> Message:
    """As the broker makes it of a PUBLISH."""
    given: dict[str, Any] = {"publisher": "car", "guid": GUIDS.next(int(NOW * 1e6)), "timestamp": NOW} | more
    return Message(topic, payload, qos, **given)


class Capture:
    """A running plugin."""

    def __init__(self, plugin: CapturePlugin, context: Context, hooks: Hooks) -> None:
        self.plugin = plugin
        self.context = context
        self.hooks = hooks

    @property
    def rules(self) -> CaptureRules:
        rules = self.context.service("captures")
        assert isinstance(rules, CaptureRules)
        return rules

    def publish(self, given: Message) -> list[Commit[Any]]:
        """Publish as the broker does; return what the acknowledgement waits for."""
        chain = self.hooks.publish_chains(given.topic)[1 if given.retain else 0]
        if chain is not None:
            assert chain.fold(None, acc=given) is given
        waits = given.headers.pop(AFTER, [])
        assert isinstance(waits, list)
        return waits

    async def captured(self, given: Message) -> None:
        """Publish, and wait until the publisher would be answered; its refusal is raised."""
        waits = self.publish(given)
        assert waits, "no rule wants it"
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*waits)

    def view(self, name: str) -> RuleView:
        """What is known at once."""
        rule = self.rules._rule(name)
        return rule.view(rule.sink.problem)


@asynccontextmanager
async def capturing(
    store: Store | None = None, services: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Capture]:
    """`capturing(rule={"name": {"topics": [...], "to": ...}})`."""
    hub = MemoryHub(time=NOW)
    log = structlog.stdlib.get_logger("motorcade.plugin")
    with tempfile.TemporaryDirectory() as data:
        context = Context(
            "capture",
            hub,
            log,
            Path(data),
            Counter(),
            set(),
            store,
            hub.hooks,
            services=services if services is not None else {},
        )
        plugin = CapturePlugin(context, msgspec.convert(config, CaptureConfig))
        try:
            await plugin.start()
            yield Capture(plugin, context, hub.hooks)
        finally:
            hub.hooks.remove_owner("capture")
            await plugin.stop()
            for task in list(context.tasks):
                task.cancel()
            if context.tasks:
                await asyncio.wait(list(context.tasks))
    assert not context.counters["task_failed"]


def rule(to: str, *topics: str, **more: Any) -> dict[str, Any]:
    return {"topics": list(topics) or ["fleet/#"], "to": to} | more


def options(to: str, *topics: str, **more: Any) -> RuleOptions:
    return msgspec.convert(rule(to, *topics, **more), RuleOptions)


def entries(server: RedisServer, key: str) -> list[dict[str, bytes]]:
    """What a Redis stream holds."""
    found: Any = server.client.xrange(key)
    return [{name.decode(): value for name, value in fields.items()} for _, fields in found]


def payloads(server: RedisServer, key: str) -> list[bytes]:
    return [fields["payload"] for fields in entries(server, key)]
