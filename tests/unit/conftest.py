"""Redis servers for the tests that ask for one.

server      one for all tests of a module, each of which gets it empty; whoever stops, pauses or fills it starts,
            resumes or relieves it before it ends
own_server  for a test that changes its configuration, or needs nobody else to be connected
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Store
from motorcade.storage.rocks import RocksStore
from tests.support.redis import RedisServer


@pytest.fixture(params=["memory", "rocksdb"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else RocksStore(tmp_path / "store")
    await made.open()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def lone_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(lone_server: RedisServer) -> Iterator[RedisServer]:
    lone_server.empty()
    yield lone_server
    # A test that has failed half-way shall not make the others fail.
    if not lone_server.running:
        lone_server.start()
    lone_server.resume()
    lone_server.command("CONFIG", "SET", "maxmemory", "0")


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    # What it has confirmed is in its file when it is killed; otherwise it may answer while an earlier sync still runs.
    with RedisServer({"appendfsync": "always"}) as running:
        yield running
