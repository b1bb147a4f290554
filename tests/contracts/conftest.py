"""`store`: an open store of every engine in turn, empty. `engine`: how to make more of the same.

The servers of the shared engine are started once per run (and worker), when the first test asks for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.storage.ports import Store
from tests.contracts.engines import EmbeddedEngine, Engine, SharedEngine
from tests.support.redis import RedisCluster, RedisServer, valkey_program

ENGINES = ["memory", "rocksdb", "redis", "valkey", "cluster"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_valkey() -> Iterator[RedisServer]:
    with RedisServer(program=valkey_program()) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        for server in cluster.servers:
            # Nobody dies here, and nobody is to be taken for dead because the machine is busy.
            server.command("CONFIG", "SET", "cluster-node-timeout", 60_000)
        yield cluster


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    name: str = request.param
    if name == "memory":
        return Engine(name)
    made: Engine
    if name == "rocksdb":
        made = EmbeddedEngine(name, request.getfixturevalue("tmp_path"))
    else:
        made = SharedEngine(name, request.getfixturevalue(f"redis_{'server' if name == 'redis' else name}"))
    made.empty()
    return made


@pytest.fixture
async def store(engine: Engine) -> AsyncIterator[Store]:
    made = engine.make()
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def other(engine: Engine, store: Store) -> AsyncIterator[Store]:
    """A second store on the same data, as another node has it; the same store where there can be only one."""
    if not engine.shared:
        yield store
        return
    made = engine.make()
    await made.open()
    yield made
    await made.close()
