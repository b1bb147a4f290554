"""The source inside Spark: a running node, every engine, restarts, and what users see of errors."""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from motorcade.storage.ports import Draft
from tests.pipelines.lake import NOW, Lake
from tests.pipelines.queries import to_the_end
from tests.support.flows import publish_many
from tests.support.node import NodeProcess
from tests.support.redis import RedisCluster, RedisServer
from tests.support.wire import Client

CONFIG = """
[plugins.streams.stream.telemetry]
topics = ["v/#"]
"""


def frame(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("motorcade").options(store=url, **{"stream": "s", **options}).load()


def run(spark: SparkSession, urls: list[str], place: Path, **options: str) -> list[Any]:
    """Everything that is there now into a lake of Parquet files; the progress of the batches."""
    source = spark.readStream.format("motorcade").schema("offset LONG, topic STRING, payload BINARY")
    followed = reduce(DataFrame.unionAll, [source.options(store=url, stream="s", **options).load() for url in urls])
    files = followed.writeStream.format("parquet").option("path", str(place / "rows")).trigger(availableNow=True)
    query = to_the_end(files.option("checkpointLocation", str(place / "checkpoint")).start)
    return [progress for progress in query.recentProgress if progress.numInputRows]


def lake_of(spark: SparkSession, place: Path) -> list[int]:
    """The offsets in the lake; each row is that of its offset."""
    rows = spark.read.parquet(str(place / "rows")).collect()
    assert all(bytes(row.payload) == b'{"n": %d}' % row.offset for row in rows)
    return sorted(row.offset for row in rows)


@pytest.mark.timeout(240)
def test_the_stream_of_a_running_node_is_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    """What was acknowledged to a publisher is in the frame; the node goes on, and so does the next read."""
    with NodeProcess(config=CONFIG, data=tmp_path) as node, Client(node) as client:
        client.connect("car-1")
        publish_many(client, "v/1", [b'{"speed": %d}' % number for number in range(500)], qos=1)
        url = f"rocksdb://{tmp_path / 'store'}"
        telemetry = frame(spark, url, stream="telemetry", rows_per_partition="200")
        speeds = telemetry.selectExpr(
            "offset", "topic", "client", "qos", "get_json_object(string(payload), '$.speed') AS v"
        )
        rows = speeds.orderBy("offset").collect()
        assert [(number + 1, "v/1", "car-1", 1, str(number)) for number in range(500)] == [tuple(row) for row in rows]
        publish_many(client, "v/1", [b"{}", b"no json"] * 50, qos=1)
        assert 600 == frame(spark, url, stream="telemetry").count()
        parsed = spark.read.format("motorcade").schema("json STRUCT<speed: INT>, offset LONG")
        rows = parsed.options(store=url, stream="telemetry").load().orderBy("offset").collect()
        assert [(number,) for number in range(500)] + [(None,), None] * 50 == [row.json for row in rows]


@pytest.mark.timeout(240)
def test_streams_of_every_engine_become_files_once(
    spark: SparkSession, redis_server: RedisServer, redis_cluster: RedisCluster, tmp_path: Path
) -> None:
    """In bounded batches; the next run goes on where this one ended; a batch whose commit was lost is read again."""
    redis_server.empty()
    redis_cluster.empty()
    urls = [f"rocksdb://{tmp_path / 'store'}", redis_server.url, redis_cluster.url]
    with ExitStack() as stores:
        lakes = [stores.enter_context(Lake(url)) for url in urls]
        for lake in lakes:
            lake.fill("s", 1000)
        progress = run(spark, urls, tmp_path, max_rows="400", rows_per_partition="300")
        assert [1200, 1200, 600] == [batch.numInputRows for batch in progress]
        assert sorted([*range(1, 1001)] * 3) == lake_of(spark, tmp_path)
        for lake in lakes:
            lake.fill("s", 200, first=1001)
        # As if the driver had died after the sink was done, before it was noted that it is.
        for commit in (tmp_path / "checkpoint" / "commits").glob("*2*"):
            commit.unlink()
        run(spark, urls, tmp_path, max_rows="400")
        assert sorted([*range(1, 1201)] * 3) == lake_of(spark, tmp_path)


@pytest.mark.timeout(240)
def test_a_query_ends_with_what_is_wrong(spark: SparkSession, tmp_path: Path) -> None:
    """A trim that was quicker than the query fails it with the offsets that are gone, and can be passed over."""
    url = f"rocksdb://{tmp_path / 'store'}"
    with Lake(url) as lake:
        lake.fill("s", 100)
        run(spark, [url], tmp_path)
        lake.fill("s", 100, first=101)
        lake.trim("s", records=50)
        with pytest.raises(StreamingQueryException, match=r"offsets 101 to 150.*on_trimmed=skip"):
            run(spark, [url], tmp_path)
        run(spark, [url], tmp_path, on_trimmed="skip")
        assert [*range(1, 101), *range(151, 201)] == lake_of(spark, tmp_path)
        with pytest.raises(AnalysisException, match="no option 'streem'"):
            spark.read.format("motorcade").options(store=url, streem="s").load()
        with pytest.raises(PySparkException, match="the stream 'nobody' has no record in this store"):
            frame(spark, url, stream="nobody").collect()
        assert [] == frame(spark, url, stream="nobody", if_missing="empty").collect()
        with pytest.raises(PySparkException, match="there is no store at"):
            frame(spark, f"rocksdb://{tmp_path / 'elsewhere'}").collect()


@pytest.mark.timeout(240)
def test_redis_streams_and_mailboxes_are_frames(spark: SparkSession, redis_server: RedisServer) -> None:
    redis_server.empty()
    for number in range(300):
        redis_server.client.xadd(
            "messages:processed", {"payload": b"%d" % number}, id=f"{1_760_000_000_000 + number}-1"
        )
    entries = spark.read.format("motorcade").options(
        store=redis_server.url, redis_stream="messages:processed", rows_per_partition="100"
    )
    rows = (
        entries.load().selectExpr("id", "string(fields['payload']) AS n", "time", "offset").orderBy("offset").collect()
    )
    assert [str(number) for number in range(300)] == [row.n for row in rows]
    assert "1760000000007-1" == rows[7].id
    assert (1_760_000_000_007 << 20) + 1 == rows[7].offset
    with Lake(redis_server.url) as lake:
        owners = [f"fanout:{number}" for number in range(40)]
        lake.do(lambda store: store.mailboxes.append(owners, Draft(b"b", b"p" * 500), NOW))
        waiting = spark.read.format("motorcade").options(store=redis_server.url, mailboxes="fanout:").load()
        assert sorted(owners) == sorted(
            row.owner for row in waiting.where("position = 1 AND expires IS NULL").collect()
        )
