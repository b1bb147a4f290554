"""`store`: an open store of every engine in turn, empty. `engine`: how to make more of the same.

The servers of the shared engine are started once per run (and worker), when the first test asks for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Durability, Store
from motorcade.storage.rocks import RocksStore
from tests.contracts.engines import Engine, patient
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


def engine_of(name: str, request: pytest.FixtureRequest) -> Engine:
    match name:
        case "memory":
            return Engine(name, MemoryStore, persistent=False, shared=False, atomic=True)
        case "rocksdb":
            path: Path = request.getfixturevalue("tmp_path") / "store"
            return Engine(name, lambda: RocksStore(path), persistent=True, shared=False, atomic=True)
    servers: RedisServer | RedisCluster = request.getfixturevalue(f"redis_{'server' if name == 'redis' else name}")
    servers.empty()
    # A server alone has no replica that could confirm anything.
    level = Durability.SAFE if name == "cluster" else Durability.FAST
    return Engine(name, lambda: patient(servers.url, level), persistent=True, shared=True, atomic=False)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, request)


@pytest.fixture
async def store(engine: Engine) -> AsyncIterator[Store]:
    made = engine.make()
    await made.open()
    yield made
    await made.close()
