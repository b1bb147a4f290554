"""A plugin loaded by its entry point into a hub in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from motorcade.extension.plugin import Loaded, Plugins
from tests.unit.plugins.hub import MemoryHub

Load = Callable[..., Awaitable[Loaded]]


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def load(hub: MemoryHub, tmp_path: Path) -> AsyncIterator[Load]:
    """`await load(name, path=None, **config)`; everything loaded is unloaded at the end."""
    plugins = Plugins(hub, hub.hooks, tmp_path, hub.sources)

    async def loaded(name: str, path: str | None = None, **config: Any) -> Loaded:
        return await plugins.load(name, config, path)

    yield loaded
    await plugins.unload_all()
