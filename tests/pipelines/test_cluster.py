"""Pipelines on a real Spark cluster: a master and two workers as processes of their own, commands as a user gives them.

What a command says on the cluster is what the same functions say on `local[2]`, in the session that tests share; and
both executors have done some of the work.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from motorcade.cli import _report
from motorcade.pipelines import audit
from motorcade.pipelines.receipts import COLUMNS, receipts
from motorcade.pipelines.sources.store_cache import store_cache
from tests.chaos import spark_judge as judge
from tests.chaos.spark_feed import NODE, SCHEMA, STREAM, Feed, Fleet
from tests.scenarios.witness import wait_until
from tests.support.dispatch import environment
from tests.support.fanout import Platform, Watch, fresh, get, vehicle
from tests.support.node import ROOT, NodeProcess
from tests.support.ports import free_port
from tests.support.spark_cluster import SparkCluster, spark_home

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

#: Seconds that a command may take, with the start of Spark, on a busy machine.
PATIENCE = 280.0

MESSAGES = 2000
REQUEST = "task_ota_7"
HERE, AWAY = fresh(3), fresh(297)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster() as started:
        yield started


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One with a stream, and with receipts: a request for 300 vehicles, three of which are there and answer."""
    with NodeProcess(config=NODE, data=tmp_path_factory.mktemp("node"), http=True) as running:
        vehicles = [vehicle(running, vin) for vin in HERE]
        with Watch(running, REQUEST) as watch, Platform(running) as platform:
            for start in range(0, 300, 100):
                platform.send([*HERE, *AWAY][start : start + 100], REQUEST)
            for client in vehicles:
                get(client)
            watch.gather(lambda: watch.number("acked") == len(HERE), "the vehicles have answered")
        yield running
        for client in vehicles:
            client.close()


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    store_cache.close()


class ClusterUser:
    """A person at a command line who uses the cluster."""

    def __init__(self, cluster: SparkCluster) -> None:
        self.cluster = cluster

    def command(self, *words: object, master: str = "") -> subprocess.CompletedProcess[str]:
        words = (sys.executable, "-m", "motorcade", *words, "--master", master or self.cluster.url)
        return self.run(words, {})

    def run(self, words: Iterable[object], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, words)],
            env=environment(self.cluster.environment | env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def done(self, *words: object) -> str:
        """The output of a command that must succeed, when both executors have worked for it."""
        with self.working():
            result = self.command(*words)
        assert 0 == result.returncode, result.stdout + result.stderr
        return result.stdout

    @contextmanager
    def working(self) -> Iterator[None]:
        """One application, for which both executors have finished tasks."""
        before = self.cluster.applications()
        yield
        (application,) = [name for name in self.cluster.applications() if name not in before]
        tasks = self.cluster.tasks(application)
        assert 2 == len(tasks), tasks
        assert all(tasks.values()), tasks


@pytest.fixture
def user(cluster: SparkCluster) -> ClusterUser:
    return ClusterUser(cluster)


def url_of(node: NodeProcess) -> str:
    return f"rocksdb://{node.data / 'store'}"


def timeless(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "made_at"}


@pytest.mark.long
def test_receipts(user: ClusterUser, node: NodeProcess, spark: SparkSession, tmp_path: Path) -> None:
    """The tables are files that this session reads."""
    user.done("pipeline", "run", "receipts", "--data", node.data, "--out", tmp_path / "out", "--quiet")
    written = json.loads((tmp_path / "out" / "current" / "report.json").read_text())
    (ours,) = [one for one in written["requests"] if one["request_id"] == REQUEST]
    assert {"accepted": 300, "acked": 3, "pending": 297}.items() <= ours["funnel"].items()
    here = _report.data(spark, url_of(node), "", REQUEST, slow_after=3600.0)
    assert timeless(here) == timeless(written)


def test_ingest(user: ClusterUser, node: NodeProcess, tmp_path: Path) -> None:
    """Every message is in the lake once, where it belongs."""
    feed = Feed(node.port, Random(7), rate=5000.0)
    feed.start()
    wait_until(lambda: feed.ledger.size >= MESSAGES, "messages are published")
    feed.stop()
    (tmp_path / "schema.toml").write_text(SCHEMA)
    words = ("--stream", STREAM, "--schema", tmp_path / "schema.toml", "--lake", tmp_path / "lake", "--data", node.data)
    user.done("pipeline", "run", "ingest", *words, "--checkpoint", tmp_path / "run", "--max-rows", MESSAGES, "--quiet")
    verdict = judge.lake(feed.ledger, judge.read(tmp_path / "lake"))
    assert verdict.passed, verdict.told()


def test_audience(user: ClusterUser, node: NodeProcess, spark: SparkSession, tmp_path: Path) -> None:
    """Those who are meant, and nobody else, have one delivery each; the session here reads that from the receipts."""
    fleet = Fleet.make(tmp_path / "fleet.parquet", 1000, Random(7))
    (tmp_path / "payload").write_text("do it")
    who = ("--table", f"fleet={fleet.table}", "--sql", fleet.SQL)
    what = ("--request", "task_ota_8", "--payload", tmp_path / "payload", "--broker", f"mqtt://{node.mqtt}")
    user.done("pipeline", "run", "audience", *who, *what, "--checkpoint", tmp_path / "run", "--quiet")
    stream = spark.read.format("motorcade").options(store=url_of(node), stream="receipts").schema(COLUMNS).load()
    rows = receipts(stream, request="task_ota_8").deliveries.select("vin").collect()
    assert sorted(fleet.audience) == sorted(row["vin"] for row in rows)


def archive(place: Path) -> Path:
    """A small one of the kind that `pack` makes: its packages are those of this environment."""
    venv.create(place / "environment", with_pip=False)
    (packages,) = (place / "environment" / "lib").glob("python*/site-packages")
    (packages / "here.pth").write_text(f"{ROOT / 'src'}\n{spark_home().parent}\n")
    with tarfile.open(place / "motorcade.tar.gz", "w:gz") as made:
        made.add(place / "environment", ".")
    return place / "motorcade.tar.gz"


def test_the_audit_by_the_script_for_yarn(
    user: ClusterUser, node: NodeProcess, spark: SparkSession, tmp_path: Path
) -> None:
    """`spark-submit` starts the driver, which finds the Spark that started it; Python is that of the archive."""
    words = (ROOT / "deploy" / "yarn" / "submit", archive(tmp_path), "pipeline", "run", "audit")
    settings = {"MASTER": user.cluster.url, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with user.working():
        done = user.run((*words, "--data", node.data, "--json"), settings)
    assert 0 == done.returncode, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert {"acked", "pending"} == verdict["outcomes"].keys()
    assert 3 == verdict["outcomes"]["acked"]
    assert verdict["outcomes"] == audit.run(spark, url_of(node)).outcomes


def test_a_cluster_that_is_not_there(user: ClusterUser, node: NodeProcess) -> None:
    master = f"spark://127.0.0.1:{free_port()}"
    result = user.command("fanout", "report", REQUEST, "--data", node.data, master=master)
    assert 1 == result.returncode
    assert f"error: there is no Spark master at {master}" in result.stderr
    assert "Traceback" not in result.stderr
