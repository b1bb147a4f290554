"""A node with the plugin `queues`; see `tests/unit/plugins/node.py`.

async with Node.on(store, queue={"q": {"topics": ["q/#"]}}) as node:
    await (await node.client("car")).subscribe("$queue/q")
"""

from __future__ import annotations

import asyncio
from typing import Any

from motorcade.core.errors import MotorcadeError
from motorcade.plugins.queues.declarations import Declarations
from motorcade.plugins.queues.plugin import QueuesPlugin
from tests.unit.plugins.node import PATIENCE, Client, PluginNode, until

__all__ = ["Client", "Node", "until"]


class Node(PluginNode):
    """One process."""

    plugin_name = "queues"

    @property
    def queues(self) -> Declarations:
        found: Declarations = self.plugins.service("queues")
        return found

    @property
    def plugin(self) -> QueuesPlugin:
        assert isinstance(self.loaded.plugin, QueuesPlugin)
        return self.loaded.plugin

    async def stored(self, name: str = "q") -> list[bytes]:
        return [found.payload for found in await self.queues.read(name, 0, 1000)]

    async def emptied(self, name: str = "q") -> None:
        """Wait until a queue has no messages."""
        await self.comes_to([], name)

    async def comes_to(self, wanted: list[bytes], name: str = "q") -> None:
        """Wait until a queue has these messages and no others."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while wanted != (found := await self.stored(name)):
            assert asyncio.get_running_loop().time() < deadline, f"{found}, not {wanted}"
            await asyncio.sleep(0.002)

    async def error(self, work: Any) -> str:
        """What an operator is told."""
        try:
            await work
        except MotorcadeError as error:
            return str(error)
        raise AssertionError("nothing was refused")
