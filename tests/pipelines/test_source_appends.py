"""Frames into Redis streams: staged by tasks, landed by the driver, each row once whatever is repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources.appends import PART_ROWS, REMEMBERED, STAGED_FOR, RedisStreamWriter, beside, entries_of
from motorcade.pipelines.sources.datasource import MotorcadeDataSource
from motorcade.pipelines.sources.options import OptionError
from motorcade.pipelines.sources.store_cache import store_cache
from motorcade.redis.slots import slot_of
from motorcade.storage.redis_reader import Asking
from tests.pipelines.lake import Lake
from tests.pipelines.queries import to_the_end
from tests.support.redis import RedisCluster, RedisServer

KEY = "messages:made"


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
    appends = RedisStreamWriter(server.url, KEY, "q")
    some = range(3 * PART_ROWS + 7)
    staged = [appends.stage(numbers(*some)), appends.stage(numbers()), appends.stage(numbers(9000, 9001))]
    assert [] == stream(server), "nobody sees half of a batch before it is whole"
    assert len(some) + 2 == appends.land(staged, 0)
    assert [*some, 9000, 9001] == stream(server)
    assert {beside(KEY, "q").encode()} == left(server), "nothing staged is left"


def test_a_batch_lands_once(server: RedisServer) -> None:
    """Spark runs the last batch again if it does not know that it was done; its tasks stage anew."""
    appends = RedisStreamWriter(server.url, KEY, "q")
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
        RedisStreamWriter(server.url, KEY, "q").stage(numbers(1))
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


def test_a_driver_may_die_anywhere(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is run again, with its rows in another order and in other tasks: what lands is one batch, once."""
    first = [*range(2 * PART_ROWS)]
    for calls in range(1, 14):
        server.empty()
        appends = RedisStreamWriter(server.url, KEY, "q")
        staged = [appends.stage(numbers(*first[:300])), appends.stage(numbers(*first[300:]))]
        with monkeypatch.context() as patch:
            crash_after(store_cache.take(server.url, Asking), calls, patch)
            with suppress(CrashedError):
                appends.land(staged, 0)
        again = RedisStreamWriter(server.url, KEY, "q")
        again.land([again.stage(numbers(*reversed(first)))], 0)
        assert first == sorted(stream(server)), calls
        appends.land([appends.stage(numbers(9999))], 1)
        assert [*first, 9999] == sorted(stream(server)), calls


def test_nothing_that_is_staged_stays_for_ever(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a write that was killed anywhere go by themselves; those that are used get their time again."""
    staged = RedisStreamWriter(server.url, KEY, "q", 1000).stage(numbers(*range(3 * PART_ROWS)))
    assert 0 < server.client.ttl(staged.key) <= STAGED_FOR
    for calls in range(1, 5):
        appends = RedisStreamWriter(server.url, KEY, f"q{calls}", 1000)
        staged = appends.stage(numbers(*range(20 * PART_ROWS)))
        server.command("EXPIRE", staged.key, 900)
        with monkeypatch.context() as patch:
            crash_after(store_cache.take(server.url, Asking), calls, patch)
            with pytest.raises(CrashedError):
                appends.land([staged], 0)
        assert all(0 < server.client.ttl(key) <= STAGED_FOR for key in left(server))
        assert calls == 1 or server.client.ttl(staged.key) > 900, "what is used is kept"


def test_rows_that_vanish_before_they_land_fail_the_write(server: RedisServer) -> None:
    """Expired, evicted, lost in a fail-over; nothing has landed, so the batch is written again."""
    appends = RedisStreamWriter(server.url, KEY, "q")
    for vanish in (
        lambda one: server.command("DEL", one.key),
        lambda one: server.command("HDEL", one.key, "1"),
        lambda one: server.command("PEXPIRE", one.key, "0"),
    ):
        staged = [appends.stage(numbers(*range(300))), appends.stage(numbers(*range(300, 800)))]
        vanish(staged[1])
        with pytest.raises(PipelineError, match=r"rows that were staged .* are gone .*Nothing of the batch has landed"):
            appends.land(staged, 0)
        appends.forget(staged)
        assert [] == stream(server)
    appends.land([appends.stage(numbers(1, 2))], 0)
    assert [1, 2] == stream(server)


def test_rows_that_vanish_while_they_land_fail_the_write(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a batch is never taken for a whole one, however often it is repeated; the operator has the last word."""
    appends = RedisStreamWriter(server.url, KEY, "q")
    staged = appends.stage(numbers(*range(9000)))
    with monkeypatch.context() as patch:
        crash_after(store_cache.take(server.url, Asking), 3, patch)
        with pytest.raises(CrashedError):
            appends.land([staged], 0)
    there = len(stream(server))
    assert 0 < there < 9000
    server.command("DEL", staged.key)
    for _ in range(2):
        again = appends.stage(numbers(*range(9000)))
        with pytest.raises(PipelineError, match=rf"{there} of 9000 rows of batch 0 of 'q' .*DEL .*HSET"):
            appends.land([again], 0)
        appends.forget([again])
    with pytest.raises(PipelineError, match=rf"{there} of 9000 rows of batch 0"):
        appends.land([appends.stage(numbers(7))], 1)
    assert there == len(stream(server))
    ledger = beside(KEY, "q")
    server.command("HSET", ledger, "batch", 0)
    server.command("HDEL", ledger, "landing", "landed")
    assert 1 == appends.land([appends.stage(numbers(7))], 1)


def test_an_abort_does_not_remove_what_was_decided_on(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark aborts a write whose commit has failed, and runs the batch again."""
    appends = RedisStreamWriter(server.url, KEY, "q")
    staged = [appends.stage(numbers(*range(5000)))]
    with monkeypatch.context() as patch:
        crash_after(store_cache.take(server.url, Asking), 3, patch)
        with pytest.raises(CrashedError):
            appends.land(staged, 0)
    appends.forget(staged)
    assert 0 < len(stream(server))
    appends.land([appends.stage(numbers(*reversed(range(5000))))], 0)
    assert list(range(5000)) == stream(server)
    assert {beside(KEY, "q").encode()} == left(server)


def test_a_new_checkpoint_under_an_old_name_is_refused(server: RedisServer) -> None:
    """Its first batch has the number of one that is in the stream; it is not lost in silence."""
    appends = RedisStreamWriter(server.url, KEY, "q")
    appends.land([appends.stage(numbers(1, 2), "first")], 0)
    assert 0 == appends.land([appends.stage(numbers(1, 2), "first")], 0), "the same batch again"
    for batch in (0, 1):
        other = [appends.stage(numbers(3), "second")]
        with pytest.raises(PipelineError, match=r"with another checkpoint \(its id is first\).*new name.*`query`"):
            appends.land(other, batch)
        appends.forget(other)
    assert [1, 2] == stream(server)
    assert 1 == appends.land([appends.stage(numbers(3), "first"), appends.stage(numbers(), "first")], 1)


def test_a_ledger_of_version_0_1_0_goes_on(server: RedisServer) -> None:
    """It knows no checkpoint: the first one that comes is taken for its own. A landing cut short cannot go on."""
    server.command("HSET", beside(KEY, "q"), "batch", "3")
    appends = RedisStreamWriter(server.url, KEY, "q")
    assert 0 == appends.land([appends.stage(numbers(1), "mine")], 3)
    assert 1 == appends.land([appends.stage(numbers(2), "mine")], 4)
    server.command("HSET", beside(KEY, "old"), "batch", "3", "landing", "4", "staged", "abc=2")
    old = RedisStreamWriter(server.url, KEY, "old")
    with pytest.raises(PipelineError, match=r"batch 4 of 'old' was cut short while version 0.1.0"):
        old.land([old.stage(numbers(1), "mine")], 4)


def test_of_two_drivers_one_lands(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was taken for dead, and wakes up when another has begun with the batch."""
    appends = RedisStreamWriter(server.url, KEY, "q")
    staged = appends.stage(numbers(1, 2))
    decide = RedisStreamWriter._decide

    def overtaken(self: RedisStreamWriter, *args: Any) -> Any:
        monkeypatch.undo()
        found = decide(self, *args)
        other = RedisStreamWriter(server.url, KEY, "q")
        other.land([other.stage(numbers(2, 1))], 0)
        return found

    monkeypatch.setattr(RedisStreamWriter, "_decide", overtaken)
    with pytest.raises(PipelineError, match="by another driver at the same time"):
        appends.land([staged], 0)
    assert [2, 1] == stream(server)


def test_a_server_that_falls_back_in_the_middle_gets_the_rest_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fail-over to a replica that was behind: what it does not know of lands again."""
    first = [*range(30 * PART_ROWS)]
    for restored in (16, 32):
        server.empty()
        appends = RedisStreamWriter(server.url, KEY, "q")
        staged = [appends.stage(numbers(*first[:6000])), appends.stage(numbers(*first[6000:]))]
        with monkeypatch.context() as patch:
            calls = fall_back(server, store_cache.take(server.url, Asking), restored, patch)
            appends.land(staged, 0)
        assert restored < len(calls)
        assert first == sorted(stream(server)), restored


def fall_back(server: RedisServer, asking: Asking, restored: int, patch: pytest.MonkeyPatch) -> list[int]:
    """At this call the server is as it was at the eighth. Return the calls."""
    wait, calls = asking.wait, list[int]()
    behind: dict[bytes, bytes] = {}

    def waiting(answer: Any) -> Any:
        found = wait(answer)
        calls.append(len(calls))
        if len(calls) == 8:
            behind.update({key: server.command("DUMP", key) for key in server.command("KEYS", "*")})
        if len(calls) == restored:
            server.empty()
            for key, value in behind.items():
                server.command("RESTORE", key, 0, value)
        return found

    patch.setattr(asking, "wait", waiting)
    return calls


def test_a_frame_with_a_batch_id_is_written_once(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed anywhere, or done and not heard of: the caller repeats it, and no row is there twice."""
    schema = StructType([StructField("n", LongType()), StructField("text", StringType())])
    options = {"redis_stream": KEY, "store": server.url}

    def write(name: str, *rows: int) -> None:
        writer = MotorcadeDataSource({**options, "batch_id": name}).writer(schema, overwrite=False)
        writer.commit([writer.write(numbers(*rows[:300])), writer.write(numbers(*rows[300:]))])

    rows = [*range(900)]
    for calls in range(1, 40):
        server.empty()
        with monkeypatch.context() as patch:
            crash_after(store_cache.take(server.url, Asking), calls, patch)
            with suppress(CrashedError):
                write("day-1", *rows)
        write("day-1", *reversed(rows))
        write("day-1", *rows)
        assert rows == sorted(stream(server)), calls
        assert all(0 < server.client.ttl(key) <= REMEMBERED for key in left(server))
    with pytest.raises(PipelineError, match=r"written into 'messages:made' with 900 rows, and this frame has 2"):
        write("day-1", 1, 2)
    write("day-2", 1000)
    assert [*rows, 1000] == sorted(stream(server))


def test_a_run_that_is_given_up_leaves_nothing(server: RedisServer) -> None:
    appends = RedisStreamWriter(server.url, KEY, "q")
    appends.forget([appends.stage(numbers(1)), appends.stage(numbers(2))])
    assert set() == left(server)


def test_keys_beside_a_stream_are_in_its_slot() -> None:
    for key in ("a", "a:b", "{a}:b", "x{a}", "a{b", "ä"):
        assert slot_of(key) == slot_of(beside(key, "q")) == slot_of(beside(key, "q", "task")), key
    for key in ("a{}b", "}a{"):
        with pytest.raises(OptionError, match="has braces that leave no room"):
            RedisStreamWriter("redis://h", key, "q")


def test_entries_are_made_of_columns_or_of_one_map() -> None:
    plain = pa.RecordBatch.from_pydict({"a": ["x", None], "b": pa.array([b"\xff", b""]), "n": [1, 2]})
    assert [[b"a", b"x", b"b", b"\xff", b"n", b"1"], [b"b", b"", b"n", b"2"]] == entries_of(plain)
    kind = pa.map_(pa.string(), pa.binary())
    whole = pa.RecordBatch.from_arrays([pa.array([[("k", b"v"), ("l", None)]], kind)], ["fields"])
    assert [[b"k", b"v"]] == entries_of(whole)
    with pytest.raises(PipelineError, match="without any value"):
        entries_of(pa.RecordBatch.from_pydict({"a": pa.array([None], pa.string())}))


@pytest.mark.timeout(900)
def test_a_query_writes_into_a_redis_stream_of_a_cluster(
    spark: SparkSession, redis_cluster: RedisCluster, tmp_path: Path
) -> None:
    """From a Motorcade stream to a Redis stream, and once more after the note of the last batch was lost."""
    redis_cluster.empty()
    with Lake(redis_cluster.url) as lake:
        lake.fill("s", 1500)

        def run(checkpoint: str = "checkpoint") -> None:
            query = (
                spark.readStream.format("motorcade")
                .options(store=redis_cluster.url, stream="s", max_rows="1000", rows_per_partition="400")
                .load()
                .selectExpr("offset AS n", "payload", "topic")
                .writeStream.format("motorcade")
                .options(store=redis_cluster.url, redis_stream=KEY, query="copy")
                .option("checkpointLocation", str(tmp_path / checkpoint))
                .trigger(availableNow=True)
            )
            to_the_end(query.start)

        run()
        for commit in (tmp_path / "checkpoint" / "commits").glob("*1*"):
            commit.unlink()
        lake.fill("s", 10, first=1501)
        run()
        known = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
        with pytest.raises(StreamingQueryException, match=rf"another checkpoint \(its id is {known}\)"):
            run("another")
    found = spark.read.format("motorcade").options(store=redis_cluster.url, redis_stream=KEY).load()
    rows = found.selectExpr("int(string(fields['n'])) AS n", "string(fields['payload']) AS payload").collect()
    assert [(number, f'{{"n": {number}}}') for number in range(1, 1511)] == sorted(tuple(row) for row in rows)
    made = spark.createDataFrame([("a",), ("b",)], "text STRING")
    for _ in range(2):
        made.write.format("motorcade").options(store=redis_cluster.url, redis_stream="other", batch_id="once").mode(
            "append"
        ).save()
    entries = spark.read.format("motorcade").options(store=redis_cluster.url, redis_stream="other").load()
    assert ["a", "b"] == sorted(row[0] for row in entries.selectExpr("string(fields['text'])").collect())
