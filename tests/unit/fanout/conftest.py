"""The store of tests of receipts: in memory. Engines are held to the same contract (`tests/contracts`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Store


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()
