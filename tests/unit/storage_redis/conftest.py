"""A cluster, and a store on the server of `tests/unit/conftest.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.storage.ports import Durability
from motorcade.storage.redis import RedisStore
from tests.contracts.engines import patient
from tests.support.redis import RedisCluster, RedisServer


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A cluster that the test may break."""
    with RedisCluster() as running:
        yield running


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    made = patient(server.url, Durability.FAST)
    await made.open()
    yield made
    await made.close()
