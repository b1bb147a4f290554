"""`spark`: one session for all tests of a process, because starting one takes ten seconds and half a gigabyte.

A task may fail once, as on a cluster it may three times: Spark runs it again.

Tests that take it have the mark `spark` and run in one process (`scripts/test`), and begin and end without running
queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from motorcade.pipelines import session
from tests.support.redis import RedisCluster, RedisServer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs the session needs the one there is."""
    for item in items:
        if "spark_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    place = tmp_path_factory.mktemp("spark")
    started = session.start(
        "local[2,2]",
        {
            "spark.driver.memory": "1g",
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": str(place / "warehouse"),
            "spark.local.dir": str(place / "local"),
            "spark.sql.streaming.metricsEnabled": "false",
            "spark.log.level": "ERROR",
        },
        name="motorcade-tests",
    )
    yield started
    started.stop()


@pytest.fixture
def spark(spark_session: SparkSession) -> Iterator[SparkSession]:
    yield spark_session
    running = spark_session.streams.active
    for query in running:
        query.stop()
    assert [] == running, "the test left queries running"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(params=["rocksdb", "redis", "cluster"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store that is empty, on every engine in turn."""
    if request.param == "rocksdb":
        return f"rocksdb://{tmp_path / 'store'}"
    servers: RedisServer | RedisCluster = request.getfixturevalue(f"redis_{_FIXTURES[request.param]}")
    servers.empty()
    return servers.url


_FIXTURES = {"redis": "server", "cluster": "cluster"}
