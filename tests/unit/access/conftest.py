"""An access plugin, loaded as a node loads it."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from motorcade.core.client import ClientInfo, Credentials
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Plugins


class Node:
    """The hub that plugins see, of a node without clients: it only remembers what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.rechecks = 0
        self.time = time.time()
        self.hooks = Hooks()
        self.plugins = Plugins(self, self.hooks, folder)  # type: ignore[arg-type]  # what access never asks for is missing

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def recheck_access(self) -> None:
        self.rechecks += 1

    async def authenticate(self, client: ClientInfo, **shown: Any) -> Any:
        """The decision of the chain, as the broker gets it."""
        assert self.hooks.client_authenticate is not None
        answer = self.hooks.client_authenticate.fold(client, Credentials(**shown), acc=None)
        return await answer if inspect.isawaitable(answer) else answer

    async def log_in(self, username: str, password: str, client_id: str = "c1", host: str = "192.0.2.1") -> Any:
        return await self.authenticate(ClientInfo(client_id, username, host), password=password.encode())

    def authorize(self, client: ClientInfo, action: str, asked: str) -> Any:
        assert self.hooks.client_authorize is not None
        return self.hooks.client_authorize.fold(client, action, asked, acc=None)

    def counter(self, name: str) -> int:
        (loaded,) = self.plugins.loaded()
        return loaded.context.counters[name]


Start = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Load the access plugin with a configuration; unloaded at the end. Failures are answered without delay."""
    nodes: list[Node] = []

    async def load(**config: Any) -> Node:
        node = Node(tmp_path / "data")
        nodes.append(node)
        await node.plugins.load("access", {"failure_delay": 0.0} | config)
        return node

    yield load
    for node in nodes:
        await node.plugins.unload_all()
