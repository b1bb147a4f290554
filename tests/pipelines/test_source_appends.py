"""Frames into Redis streams: staged by tasks, landed by the driver, each row once whatever is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources.appends import PART_ROWS, Appends, beside, entries_of
from motorcade.pipelines.sources.datasource import MotorcadeDataSource
from motorcade.pipelines.sources.options import OptionError
from motorcade.pipelines.sources.shelf import shelf
from motorcade.redis.slots import slot_of
from motorcade.storage.redis_reader import Asking
from tests.pipelines.lake import Lake
from tests.support.redis import RedisCluster, RedisServer

KEY = "messages:made"


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    shelf.close()


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.empty()
    return redis_server


def numbers(*values: int) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"n": pa.array(values, pa.int64()), "text": pa.array(["x"] * len(values))})


def stream(server: RedisServer) -> list[int]:
    return [int(fields[b"n"]) for _, fields in server.command("XRANGE", KEY, "-", "+")]


def left(server: RedisServer) -> set[bytes]:
    """Keys beside the stream."""
    return set(server.command("KEYS", "*")) - {KEY.encode()}


def test_rows_of_all_tasks_land_together(server: RedisServer) -> None:
    appends = Appends(server.url, KEY, "q")
    some = range(3 * PART_ROWS + 7)
    staged = [appends.stage(numbers(*some)), appends.stage(numbers()), appends.stage(numbers(9000, 9001))]
    assert [] == stream(server), "nobody sees half of a batch before it is whole"
    assert len(some) + 2 == appends.land(staged, 0)
    assert [*some, 9000, 9001] == stream(server)
    assert {beside(KEY, "q").encode()} == left(server), "nothing staged is left"


def test_a_batch_lands_once(server: RedisServer) -> None:
    """Spark runs the last batch again if it does not know that it was done; its tasks stage anew."""
    appends = Appends(server.url, KEY, "q")
    appends.land([appends.stage(numbers(1, 2))], 0)
    appends.land([appends.stage(numbers(3))], 1)
    assert 0 == appends.land([appends.stage(numbers(3))], 1)
    assert [1, 2, 3] == stream(server)
    assert {beside(KEY, "q").encode()} == left(server)
    with pytest.raises(PipelineError, match=r"later batches than 0.*new name with the option `query`"):
        appends.land([appends.stage(numbers(1))], 0)


def test_a_key_that_is_no_stream_is_told_before_anything_is_staged(server: RedisServer) -> None:
    server.command("SET", KEY, "something else")
    with pytest.raises(PipelineError, match=f"the key '{KEY}' is a string, not a stream"):
        Appends(server.url, KEY, "q").stage(numbers(1))
    assert set() == left(server)


class CrashedError(Exception):
    pass


def crash_after(asking: Asking, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions reach the server; the answer to the last of them nobody hears."""
    wait, left_over = asking.wait, [calls]

    def waiting(answer: Any) -> Any:
        found = wait(answer)
        left_over[0] -= 1
        if not left_over[0]:
            raise CrashedError
        return found

    monkeypatch.setattr(asking, "wait", waiting)


@pytest.mark.parametrize("calls", range(1, 14))
def test_a_driver_may_die_anywhere(server: RedisServer, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is run again, with its rows in another order and in other tasks: what lands is one batch, once."""
    first = [*range(2 * PART_ROWS)]
    appends = Appends(server.url, KEY, "q")
    staged = [appends.stage(numbers(*first[:300])), appends.stage(numbers(*first[300:]))]
    with monkeypatch.context() as patch:
        crash_after(shelf.take(server.url, Asking), calls, patch)
        try:
            appends.land(staged, 0)
        except CrashedError:
            pass
    again = Appends(server.url, KEY, "q")
    again.land([again.stage(numbers(*reversed(first)))], 0)
    assert first == sorted(stream(server))
    appends.land([appends.stage(numbers(9999))], 1)
    assert [*first, 9999] == sorted(stream(server))


def test_what_is_decided_on_does_not_expire(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    appends = Appends(server.url, KEY, "q")
    staged = appends.stage(numbers(1))
    assert 0 < server.client.ttl(staged.key) <= 24 * 3600
    with monkeypatch.context() as patch:
        crash_after(shelf.take(server.url, Asking), 2, patch)
        with pytest.raises(CrashedError):
            appends.land([staged], 0)
    assert -1 == server.client.ttl(staged.key)


def test_a_run_that_is_given_up_leaves_nothing(server: RedisServer) -> None:
    appends = Appends(server.url, KEY, "q")
    appends.forget([appends.stage(numbers(1)), appends.stage(numbers(2))])
    assert set() == left(server)


@pytest.mark.parametrize("key", ["a", "a:b", "{a}:b", "x{a}", "a{b", "ä"])
def test_keys_beside_a_stream_are_in_its_slot(key: str) -> None:
    assert slot_of(key) == slot_of(beside(key, "q")) == slot_of(beside(key, "q", "task"))


@pytest.mark.parametrize("key", ["a{}b", "}a{"])
def test_a_key_that_leaves_no_room_beside_it_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match="has braces that leave no room"):
        Appends("redis://h", key, "q")


def test_entries_are_made_of_columns_or_of_one_map() -> None:
    plain = pa.RecordBatch.from_pydict({"a": ["x", None], "b": pa.array([b"\xff", b""]), "n": [1, 2]})
    assert [[b"a", b"x", b"b", b"\xff", b"n", b"1"], [b"b", b"", b"n", b"2"]] == entries_of(plain)
    kind = pa.map_(pa.string(), pa.binary())
    whole = pa.RecordBatch.from_arrays([pa.array([[("k", b"v"), ("l", None)]], kind)], ["fields"])
    assert [[b"k", b"v"]] == entries_of(whole)
    with pytest.raises(PipelineError, match="without any value"):
        entries_of(pa.RecordBatch.from_pydict({"a": pa.array([None], pa.string())}))


@pytest.mark.parametrize(
    ("options", "overwrite", "says"),
    [
        ({}, False, "one of the options `redis_stream`, `fanout` and `publish`"),
        ({"redis_stream": "s"}, False, "`store` says where"),
        ({"redis_stream": "s", "store": "rocksdb:///x"}, False, "the store must be redis"),
        ({"redis_stream": "s", "store": "redis://h", "qery": "x"}, False, "no option 'qery' for writing"),
        ({"redis_stream": "s", "store": "redis://h", "query": "a b"}, False, "option query: 'a b' has a blank"),
        ({"redis_stream": "s", "store": "redis://h"}, True, "not overwritten"),
        ({"redis_stream": "s", "store": "redis://h"}, False, "option query: a name is needed"),
    ],
)
def test_a_wrong_option_for_writing_is_named(options: dict[str, str], overwrite: bool, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        MotorcadeDataSource(options).streamWriter(StructType([StructField("a", StringType())]), overwrite)


def test_a_type_that_entries_cannot_have_is_named() -> None:
    source = MotorcadeDataSource({"redis_stream": "s", "store": "redis://h", "query": "q"})
    with pytest.raises(OptionError, match="the column 'a' is double; entries of a stream have text"):
        source.writer(StructType([StructField("a", DoubleType())]), overwrite=False)


@pytest.mark.timeout(240)
def test_a_query_writes_into_a_redis_stream_of_a_cluster(
    spark: SparkSession, redis_cluster: RedisCluster, tmp_path: Path
) -> None:
    """From a Motorcade stream to a Redis stream, and once more after the note of the last batch was lost."""
    redis_cluster.empty()
    with Lake(redis_cluster.url) as lake:
        lake.fill("s", 1500)

        def run() -> None:
            query = (
                spark.readStream.format("motorcade")
                .options(store=redis_cluster.url, stream="s", max_rows="1000", rows_per_partition="400")
                .load()
                .selectExpr("offset AS n", "payload", "topic")
                .writeStream.format("motorcade")
                .options(store=redis_cluster.url, redis_stream=KEY, query="copy")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(90), "the query does not end"

        run()
        for commit in (tmp_path / "checkpoint" / "commits").glob("*1*"):
            commit.unlink()
        lake.fill("s", 10, first=1501)
        run()
    found = spark.read.format("motorcade").options(store=redis_cluster.url, redis_stream=KEY).load()
    rows = found.selectExpr("int(string(fields['n'])) AS n", "string(fields['payload']) AS payload").collect()
    assert [(number, f'{{"n": {number}}}') for number in range(1, 1511)] == sorted(tuple(row) for row in rows)
    made = spark.createDataFrame([("a",), ("b",)], "text STRING")
    made.write.format("motorcade").options(store=redis_cluster.url, redis_stream="other").mode("append").save()
    entries = spark.read.format("motorcade").options(store=redis_cluster.url, redis_stream="other").load()
    assert ["a", "b"] == sorted(row[0] for row in entries.selectExpr("string(fields['text'])").collect())
