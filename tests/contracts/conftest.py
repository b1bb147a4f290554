"""`store`: an open store of every engine in turn, empty. `engine`: how to make more of the same.

The servers of the shared engine are started once per run (and worker), when the first test asks for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Durability, Store
from tests.contracts.engines import Engine
from tests.support.redis import RedisCluster, RedisServer

ENGINES = ["memory", "rocksdb", "redis", "cluster"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


def engine_of(name: str, request: pytest.FixtureRequest) -> Engine:
    # To be removed when both are there: an engine that is not written yet is skipped.
    module = {"memory": "memory", "rocksdb": "rocks"}.get(name, "redis")
    if find_spec(f"motorcade.storage.{module}") is None:
        pytest.skip(f"motorcade.storage.{module} is not written yet")
    match name:
        case "memory":
            return Engine(name, MemoryStore, persistent=False, shared=False, atomic=True)
        case "rocksdb":
            rocks = import_module("motorcade.storage.rocks").RocksStore
            path: Path = request.getfixturevalue("tmp_path") / "store"
            return Engine(name, lambda: rocks(path), persistent=True, shared=False, atomic=True)
    redis = import_module("motorcade.storage.redis").RedisStore
    servers: RedisServer | RedisCluster = request.getfixturevalue(f"redis_{'server' if name == 'redis' else name}")
    servers.empty()
    # A server alone has no replica that could confirm anything.
    level = Durability.FAST if name == "redis" else Durability.SAFE
    return Engine(name, lambda: redis(servers.url, durability=level), persistent=True, shared=True, atomic=False)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, request)


@pytest.fixture
async def store(engine: Engine) -> AsyncIterator[Store]:
    made = engine.make()
    await made.open()
    yield made
    await made.close()
