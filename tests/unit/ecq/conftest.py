"""Every test runs over both engines that live in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Store
from motorcade.storage.rocks import RocksStore


@pytest.fixture(params=["memory", "rocksdb"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else RocksStore(tmp_path / "store")
    await made.open()
    yield made
    await made.close()
