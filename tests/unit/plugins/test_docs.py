"""The plugin on the page docs/plugins.md is one that works, and the page names the defaults that hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from motorcade.core.message import Message
from motorcade.extension.hooks import AFTER
from motorcade.extension.plugin import Loaded
from motorcade.plugins.retained import RetainedConfig
from motorcade.plugins.retained.plugin import LAST
from motorcade.storage.memory import MemoryStore
from tests.support.node import ROOT
from tests.unit.plugins.hub import MemoryHub

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


async def test_the_plugin_of_the_page_works(
    hub: MemoryHub, load: Callable[..., Awaitable[Loaded]], tmp_path: Path
) -> None:
    """Copied into a file and loaded, it does what its description says, and leaves other topics alone."""
    file = tmp_path / "prefix.py"
    file.write_text(EXAMPLES[0])
    await load("prefix", path=str(file), prefix="fleet")
    for topic in ("devices/1", "other"):
        await hub.publish(Message(topic, b""))
    assert ["fleet/devices/1", "other"] == [message.topic for message in hub.routed]


async def test_the_plugin_that_stores_lets_the_acknowledgement_wait(
    hub: MemoryHub, load: Callable[..., Awaitable[Loaded]], tmp_path: Path
) -> None:
    """What it stores is there when the publisher hears of it."""
    file = tmp_path / "audit.py"
    file.write_text(EXAMPLES[1])
    loaded = await load("audit", path=str(file))
    store = loaded.context.store = MemoryStore()
    await store.open()
    message = Message("audit/door", b"opened")
    await hub.publish(message)
    awaited = message.headers[AFTER]
    assert isinstance(awaited, list)
    await asyncio.gather(*awaited)
    assert [b"opened"] == [record.value for record in await store.streams.read("audit", 0, 10)]


def test_the_page_tells_the_defaults_that_hold() -> None:
    """Bounds of the retained plugin stand on the page with their numbers."""
    rows = dict(re.findall(r"^\| `(max_\w+)` \| (\d+) ", PAGE, re.MULTILINE))
    defaults = msgspec.structs.asdict(RetainedConfig())
    assert {key: str(value) for key, value in defaults.items() if key.startswith("max_")} == rows
    assert f"priority {LAST}".replace("-", "−") in PAGE
