"""A node with a stream, over both engines that live in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from motorcade.storage.ports import Store
from tests.unit.streams.clients import Node


@pytest.fixture
async def node(store: Store) -> AsyncIterator[Node]:
    """With a stream `s`."""
    made = await Node.on(store)
    await made.create()
    yield made
    await made.stop()
