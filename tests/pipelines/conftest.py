"""`spark`: one session for all tests of a process, because starting one takes ten seconds and half a gigabyte.

A task may fail once, as on a cluster it may three times: Spark runs it again.

Tests that take it have the mark `spark` and run in one process (`scripts/test`), and begin and end without running
queries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from motorcade.cli import _pipeline, app
from motorcade.pipelines import runner, session
from motorcade.pipelines.sources.store_cache import store_cache
from tests.pipelines import queries
from tests.support.logs import log_put_back
from tests.support.redis import RedisCluster, RedisServer

Command = Callable[..., Result]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs the session needs the one there is."""
    for item in items:
        if "spark_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    place = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.local.dir": str(place / "local"),
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.log.level": "ERROR",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "worker_start"), prepend=os.pathsep)
        started = session.start("local[2,2]", settings, name="motorcade-tests")
    yield started
    started.stop()


@pytest.fixture
def spark(spark_session: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    monkeypatch.setattr(runner, "STARTS", queries.STARTS)
    yield spark_session
    running = spark_session.streams.active
    for query in running:
        query.stop()
    assert [] == running, "the test left queries running"


@pytest.fixture
def command(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`motorcade …` in this process and in the folder of the test, with the session that there is.

    That a command starts and ends a Java of its own is tested where processes are (test_runner_process.py).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "start", lambda *_: spark)
    monkeypatch.setattr(session, "stop", lambda *_: None)
    monkeypatch.setattr(_pipeline, "_hush", lambda _: None)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Close the stores that this process has opened for reading, and put back the log: commands configure it."""
    with log_put_back():
        yield
    store_cache.close()


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
