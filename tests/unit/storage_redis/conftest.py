"""Servers of these tests; each test gets them empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.storage.ports import Durability
from motorcade.storage.redis import RedisStore
from tests.support.redis import RedisCluster, RedisServer


@pytest.fixture(scope="session")
def lone_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(lone_server: RedisServer) -> RedisServer:
    lone_server.empty()
    return lone_server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that the test may stop, pause or change."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A cluster that the test may break."""
    with RedisCluster() as running:
        yield running


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    made = RedisStore(server.url, Durability.FAST)
    await made.open()
    yield made
    await made.close()
