"""What Spark asks of the source, asked by hand: offsets, partitions and batches, without Spark.

Where the answer depends on what a store says of its streams, every engine is asked (`every_lake`).
"""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from structlog.testing import capture_logs

from motorcade.core import record
from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources import columns, messages, redis_streams
from motorcade.pipelines.sources.datasource import BatchReader, MotorcadeDataSource, StreamReader
from motorcade.pipelines.sources.messages import MAX_PARTITIONS, TrimmedError
from motorcade.pipelines.sources.store_cache import MAX_OPEN, StoreCache, store_cache
from motorcade.storage.ports import Draft, StoreError
from motorcade.storage.redis_reader import EntryId
from tests.pipelines.lake import NOW, Lake, message
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.redis import RedisServer

ALL = ReadAllAvailable()


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    with Lake(f"rocksdb://{tmp_path / 'store'}") as opened:
        yield opened


@pytest.fixture
def every_lake(url: str) -> Iterator[Lake]:
    with Lake(url) as opened:
        yield opened


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers look at the store whenever they are asked."""
    monkeypatch.setattr(messages, "FRESH", 0.0)
    monkeypatch.setattr(redis_streams, "FRESH", 0.0)


fresh = pytest.mark.usefixtures("_fresh")


def sent(part: Any) -> Any:
    """As an executor gets it."""
    return pickle.loads(pickle.dumps(part))


def source(url: str, **options: str) -> MotorcadeDataSource:
    """Of the stream `s`, unless options name something else."""
    kind = {} if {"redis_stream", "mailboxes"} & options.keys() else {"stream": "s"}
    return MotorcadeDataSource({"store": url, **kind, **options})


def batch_reader(url: str, **options: str) -> BatchReader:
    made = source(url, **options)
    reader = made.reader(made.schema())
    assert isinstance(reader, BatchReader)
    return reader


def stream_reader(url: str, **options: str) -> StreamReader:
    made = source(url, **options)
    reader = made.streamReader(made.schema())
    assert isinstance(reader, StreamReader)
    return reader


def rows_of(reader: BatchReader | StreamReader, parts: list[Any]) -> list[dict[str, Any]]:
    """What executors make of these partitions."""
    there = sent(reader)
    return [row for part in parts for made in there.read(sent(part)) for row in made.to_pylist()]


def read(url: str, **options: str) -> list[dict[str, Any]]:
    reader = batch_reader(url, **options)
    return rows_of(reader, reader.partitions())


def follow(reader: StreamReader, start: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything behind a place."""
    return rows_of(reader, reader.partitions(start, reader.latestOffset(start, ALL)))


def offsets(rows: list[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in rows]


# -- reading


def test_a_row_has_what_the_record_has(every_lake: Lake) -> None:
    lake = every_lake
    lake.append("s", [record.encode(message(1)), record.encode(message(2, username="me", content_type="text"))], NOW)
    properties = (("a", "1"), ("a", "2"))
    lake.append("s", [record.encode(message(3, user_properties=properties, retain=True))], NOW + 0.123456)
    first, second, third = read(lake.url)
    assert {
        "offset": 1,
        "time": datetime.fromtimestamp(NOW, UTC),
        "topic": "v/1/t",
        "payload": b'{"n": 1}',
        "client": "car-1",
        "username": None,
        "guid": (1).to_bytes(16, "big"),
        "qos": 1,
        "retain": False,
        "content_type": None,
        "user_properties": [],
        "published": datetime.fromtimestamp(NOW + 1, UTC),
    } == first
    assert (2, "me", "text") == (second["offset"], second["username"], second["content_type"])
    assert [{"name": "a", "value": "1"}, {"name": "a", "value": "2"}] == third["user_properties"]
    assert third["retain"] is True
    assert datetime.fromtimestamp(NOW + 0.123456, UTC) == third["time"]


def test_partitions_cover_every_row_once_and_none_that_comes_during_the_read(lake: Lake) -> None:
    lake.fill("s", 2500)
    reader = batch_reader(lake.url, rows_per_partition="400")
    parts = reader.partitions()
    lake.fill("s", 100, first=2501)
    assert 7 == len(parts)
    assert list(range(1, 2501)) == offsets(rows_of(reader, parts))


def test_beginning_and_end_can_be_chosen(every_lake: Lake) -> None:
    lake = every_lake
    lake.fill("s", 10, now=NOW)
    lake.fill("s", 10, first=11, now=NOW + 100)
    between = datetime.fromtimestamp(NOW + 50, UTC).isoformat()
    assert list(range(5, 9)) == offsets(read(lake.url, starting="5", ending="8"))
    assert list(range(11, 21)) == offsets(read(lake.url, starting=between))
    assert list(range(1, 11)) == offsets(read(lake.url, ending=between))
    assert [] == read(lake.url, starting="latest")
    assert list(range(1, 21)) == offsets(read(lake.url, ending="1000"))
    assert [] == read(lake.url, starting="8", ending="3") == read(lake.url, starting="21")
    with pytest.raises(PipelineError, match="ends at offset 20; it cannot be read from 50 on"):
        read(lake.url, starting="50")


def test_only_the_columns_of_the_schema_are_made(lake: Lake) -> None:
    lake.fill("s", 2)
    full = source(lake.url).schema()
    reader = source(lake.url).reader(type(full)([full["payload"], full["offset"]]))
    assert isinstance(reader, BatchReader)
    (made,) = [made for part in reader.partitions() for made in reader.read(part)]
    assert ["payload", "offset"] == made.schema.names
    assert [{"payload": b'{"n": 1}', "offset": 1}, {"payload": b'{"n": 2}', "offset": 2}] == made.to_pylist()


def test_a_stream_that_is_not_there_is_an_error_or_empty(lake: Lake) -> None:
    lake.fill("other", 1)
    with pytest.raises(PipelineError) as caught:
        read(lake.url)
    assert (
        "the stream 's' has no record in this store: there is no such stream (with records there are: other), or "
        "nothing has come to it yet. Look at the name; the option if_missing=empty waits for the first record"
    ) == str(caught.value)
    assert [] == read(lake.url, if_missing="empty")
    reader = stream_reader(lake.url, if_missing="empty")
    start = reader.initialOffset()
    assert start == reader.latestOffset(start, ALL) == {"offset": 0}


def test_receipts_that_are_not_there_yet_are_none(lake: Lake) -> None:
    """Every node has that stream, so there is nothing to be missed."""
    lake.fill("other", 1)
    reader = stream_reader(lake.url, stream="receipts")
    start = reader.initialOffset()
    assert start == reader.latestOffset(start, ALL) == {"offset": 0}
    lake.fill("receipts", 3)
    assert 3 == stream_reader(lake.url, stream="receipts").latestOffset(start, ALL)["offset"]


def test_a_stream_that_was_created_is_empty_before_its_first_record(tmp_path: Path) -> None:
    """And is not there when it was deleted."""
    with NodeProcess(data=tmp_path, http=True) as node, Operator(node) as operator:
        store = f"rocksdb://{tmp_path / 'store'}"
        operator.create("streams", "s", topics=["s/#"])
        assert {"offset": 0} == stream_reader(store).initialOffset()
        operator.delete("streams", "s")
        store_cache.close()
        with pytest.raises(PipelineError, match="the stream 's' has no record in this store"):
            stream_reader(store).initialOffset()


def test_a_record_that_cannot_be_read_is_named(lake: Lake) -> None:
    lake.fill("s", 2)
    lake.append("s", [b"\x93\x09\xa1t\xc4\x00", b"nonsense", record.encode(message(5))], NOW)
    with pytest.raises(
        PipelineError, match=r"offset 3 of the stream 's' cannot be read.*version is 9.*on_damaged=skip"
    ):
        read(lake.url)
    with capture_logs() as logs:
        assert [1, 2, 5] == offsets(read(lake.url, on_damaged="skip"))
    assert [3, 4] == [entry["offset"] for entry in logs if entry["event"] == "record_damaged"]
    assert [] == read(lake.url, on_damaged="skip", starting="3", ending="4")


# -- following


@fresh
def test_a_stream_is_followed_in_batches(every_lake: Lake) -> None:
    """Each batch begins where the one before ended; none is larger than the limit; at the end nothing moves."""
    lake = every_lake
    lake.fill("s", 250)
    reader = stream_reader(lake.url, max_rows="100", rows_per_partition="30")
    limit = reader.getDefaultReadLimit()
    assert ReadMaxRows(100) == limit
    start = reader.initialOffset()
    seen: list[int] = []
    ends = []
    for _ in range(5):
        end = reader.latestOffset(start, limit)
        seen += offsets(rows_of(reader, reader.partitions(start, end)))
        start = end
        ends.append(end["offset"])
        if len(ends) == 3:
            lake.fill("s", 20, first=251)
    assert [100, 200, 250, 270, 270] == ends
    assert list(range(1, 271)) == seen
    assert {"offset": 270} == reader.reportLatestOffset()
    assert [] == reader.partitions(start, start)


def test_a_batch_is_the_same_after_a_restart(lake: Lake) -> None:
    """Offsets are all that is needed: another process, more rows in the stream, the same partitions and rows."""
    lake.fill("s", 300)
    first = stream_reader(lake.url, rows_per_partition="100", max_rows="250")
    start = first.initialOffset()
    end = first.latestOffset(start, first.getDefaultReadLimit())
    parts = first.partitions(start, end)
    lake.fill("s", 300, first=301)
    store_cache.close()
    again = stream_reader(lake.url, rows_per_partition="100", max_rows="10")
    same = again.partitions(start, end)
    assert [part.value for part in parts] == [part.value for part in same]
    assert rows_of(first, parts) == rows_of(again, same)
    assert 250 == len(rows_of(again, same))


@fresh
def test_a_backfill_ends_where_the_stream_ended_when_it_began(lake: Lake) -> None:
    lake.fill("s", 50)
    reader = stream_reader(lake.url)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    lake.fill("s", 50, first=51)
    assert 20 == reader.latestOffset(start, ReadMaxRows(20))["offset"]
    assert 50 == reader.latestOffset(start, ALL)["offset"]
    assert 50 == reader.latestOffset({"offset": 50}, ReadMaxRows(20))["offset"]


@fresh
def test_history_that_was_trimmed_is_an_error_or_skipped(every_lake: Lake) -> None:
    """How many are missing is told; what is missing does not count as rows of a batch."""
    lake = every_lake
    lake.fill("s", 100)
    reader = stream_reader(lake.url)
    start = reader.initialOffset()
    lake.trim("s", records=40)
    with pytest.raises(TrimmedError, match=r"'s' was trimmed: offsets 1 to 60 \(60 records\).*on_trimmed=skip"):
        reader.latestOffset(start, ALL)
    # What was read is allowed to go.
    assert 100 == reader.latestOffset({"offset": 60}, ALL)["offset"]
    with pytest.raises(TrimmedError, match="offsets 60 to 60"):
        reader.latestOffset({"offset": 59}, ALL)
    with pytest.raises(TrimmedError, match="offsets 10 to 60"):
        read(lake.url, starting="10")
    assert list(range(61, 101)) == offsets(read(lake.url, starting="earliest"))
    skipping = stream_reader(lake.url, on_trimmed="skip", rows_per_partition="25")
    end = skipping.latestOffset(start, ReadMaxRows(10))
    assert 70 == end["offset"]
    with capture_logs() as logs:
        assert list(range(61, 71)) == offsets(rows_of(skipping, skipping.partitions(start, end)))
    assert 60 == sum(entry["skipped"] for entry in logs if entry["event"] == "stream_trimmed")


def test_a_trim_between_planning_and_reading_is_noticed(every_lake: Lake) -> None:
    lake = every_lake
    lake.fill("s", 100)
    reader = stream_reader(lake.url, rows_per_partition="50")
    start = reader.initialOffset()
    first, second = reader.partitions(start, reader.latestOffset(start, ALL))
    lake.trim("s", records=30)
    store_cache.close()  # an executor is another process
    with pytest.raises(TrimmedError, match="offsets 1 to 50"):
        rows_of(reader, [first])
    with pytest.raises(TrimmedError, match="offsets 51 to 70"):
        rows_of(reader, [second])
    skipping = stream_reader(lake.url, on_trimmed="skip")
    with capture_logs() as logs:
        assert list(range(71, 101)) == offsets(rows_of(skipping, [first, second]))
    assert [50, 20] == [entry["skipped"] for entry in logs]


@fresh
def test_a_stream_that_was_made_anew_is_noticed(every_lake: Lake) -> None:
    """Also when it has grown, and by another process, which has the offset from a checkpoint."""
    lake = every_lake
    lake.fill("s", 100)
    reader = stream_reader(lake.url)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    lake.fill("s", 50, first=101)
    assert 150 == stream_reader(lake.url).latestOffset(end, ALL)["offset"]
    lake.do(lambda store: store.streams.drop("s"))
    lake.fill("s", 10)
    with pytest.raises(PipelineError, match=r"ends at offset 10, but was read up to 100.*new checkpoint"):
        reader.latestOffset(end, ALL)
    lake.fill("s", 190, first=1001)
    another = stream_reader(lake.url)
    with pytest.raises(PipelineError, match=r"another record at offset 100 than the one that was read.*new checkpoint"):
        another.latestOffset(end, ALL)
    # If it was trimmed, or the checkpoint is an old one, there is nothing to compare.
    assert 200 == another.latestOffset({"offset": 100}, ALL)["offset"]
    lake.trim("s", records=50)
    assert 200 == stream_reader(lake.url, on_trimmed="skip").latestOffset(end, ALL)["offset"]


def test_an_executor_that_sees_another_store_says_so(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CATCH_UP", 0.1)
    lake.fill("s", 10)
    reader = stream_reader(lake.url)
    parts = reader.partitions({"offset": 0}, {"offset": 20})
    with pytest.raises(PipelineError, match="ends at offset 10 here, but the driver has seen 20"):
        rows_of(reader, parts)


@given(st.integers(0, 10**12), st.integers(0, 10**7), st.integers(1, 10**6))
def test_a_split_is_even_and_whole(after: int, count: int, rows: int) -> None:
    parts = messages.split(after, after + count, rows)
    assert len(parts) <= MAX_PARTITIONS
    edges = [after, *(last for _, last in parts)]
    assert list(pairwise(edges)) == parts
    assert edges[-1] == after + count if count else parts == []
    sizes = [high - low for low, high in parts]
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
    assert not sizes or max(sizes) <= rows or len(parts) == MAX_PARTITIONS


# -- mailboxes


def test_what_waits_is_listed(every_lake: Lake) -> None:
    lake = every_lake
    vehicles = [f"fanout:{number:04}" for number in range(300)]
    lake.do(lambda store: store.mailboxes.append(vehicles, Draft(b"body", b"p" * 1000, key=b"k"), NOW))
    lake.do(lambda store: store.mailboxes.append(vehicles[:1], Draft(b"soon", expires_at=NOW + 5), NOW + 1))
    lake.do(lambda store: store.mailboxes.append(["fanout-done:1"], Draft(b"other"), NOW))
    found = read(lake.url, mailboxes="fanout:")
    assert 301 == len(found)
    assert set(vehicles) == {row["owner"] for row in found}
    (first, second) = sorted((row for row in found if row["owner"] == vehicles[0]), key=lambda row: row["position"])
    moment = datetime.fromtimestamp(NOW, UTC)
    assert {
        "owner": vehicles[0], "position": 1, "stored": moment, "expires": None, "mark": 0, "body": b"body",
    } == first  # fmt: skip
    assert datetime.fromtimestamp(NOW + 5, UTC) == second["expires"]


# -- streams of Redis


def fill(server: RedisServer, count: int, first: int = 1) -> None:
    pipe = server.client.pipeline(transaction=False)
    for number in range(first, first + count):
        pipe.xadd("s", {"payload": b"%d" % number, "kind": b"k"}, id=f"{1_000_000 + number // 4}-{number % 4}")
    pipe.execute()


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(dict(row["fields"])["payload"]) for row in rows]


@pytest.fixture
def server(redis_server: RedisServer, _fresh: None) -> RedisServer:
    redis_server.empty()
    return redis_server


def native(server: RedisServer, **options: str) -> StreamReader:
    return stream_reader(server.url, redis_stream="s", **options)


def test_entries_become_rows(server: RedisServer) -> None:
    server.client.xadd("s", {"a": b"1", "b": b"\xff"}, id="1760000000000-5")
    server.client.xadd("s", {"c": b""}, id="1760000000001-0")
    reader = native(server)
    start = reader.initialOffset()
    moments = [datetime.fromtimestamp(seconds, UTC) for seconds in (1760000000, 1760000000.001)]
    ids, fields = ["1760000000000-5", "1760000000001-0"], [[("a", b"1"), ("b", b"\xff")], [("c", b"")]]
    numbered = [(1760000000000 << 20) + 5, 1760000000001 << 20]
    assert [
        {"offset": offset, "time": time, "id": id_, "fields": pairs}
        for offset, time, id_, pairs in zip(numbered, moments, ids, fields, strict=True)
    ] == follow(reader, start)


def test_a_redis_stream_is_followed_in_batches(server: RedisServer) -> None:
    fill(server, 2500)
    reader = native(server, max_rows="1100", rows_per_partition="300")
    start, seen = reader.initialOffset(), list[int]()
    sizes = []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        parts = reader.partitions(start, end)
        found = numbers(rows_of(reader, parts))
        seen += found
        sizes.append(len(found))
        start = end
    assert [1100, 1100, 300] == sizes
    assert list(range(1, 2501)) == seen
    assert {"id": "1000625-0", "entries": 2500} == start
    fill(server, 5, first=2501)
    assert [2501, 2502, 2503, 2504, 2505] == numbers(follow(reader, start))


def test_a_redis_stream_is_read_from_where_to_where_it_is_told(server: RedisServer) -> None:
    fill(server, 100)
    beginnings = {"earliest": 1, "latest": 101, "1000005-2": 22, "1970-01-01T00:16:40.005Z": 20}
    readers = {starting: native(server, starting=starting) for starting in beginnings}
    starts = {starting: reader.initialOffset() for starting, reader in readers.items()}
    fill(server, 10, first=101)
    for starting, first in beginnings.items():
        reader, start = readers[starting], starts[starting]
        assert (list(range(first, 111)), first - 1) == (numbers(follow(reader, start)), start["entries"]), starting
    found = read(server.url, redis_stream="s", starting="1000002", ending="1000003-1")
    assert list(range(8, 14)) == numbers(found)


def test_entries_that_were_trimmed_are_counted(server: RedisServer) -> None:
    """Redis does not say what a trim has taken; the count in the offset does."""
    fill(server, 100)
    reader = native(server)
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ReadMaxRows(60))
    assert 60 == middle["entries"]
    server.client.xtrim("s", maxlen=40, approximate=False)
    # What was read may go …
    assert {"id": "1000025-0", "entries": 100} == reader.latestOffset(middle, ALL)
    # … what was not may not.
    with pytest.raises(TrimmedError, match="60 entries after 1000000-0 and before 1000015-1 are gone"):
        reader.latestOffset(start, ALL)
    server.client.xtrim("s", maxlen=35, approximate=False)
    with pytest.raises(TrimmedError, match="5 entries after 1000015-0"):
        reader.latestOffset(middle, ALL)
    server.client.xtrim("s", maxlen=0, approximate=False)
    with pytest.raises(TrimmedError, match="40 entries after 1000015-0 and before its end"):
        reader.latestOffset(middle, ALL)
    skipping = native(server, on_trimmed="skip")
    with capture_logs() as logs:
        end = skipping.latestOffset(middle, ReadMaxRows(10))
    assert {"id": "1000025-0", "entries": 100} == end
    assert [40] == [entry["skipped"] for entry in logs]
    assert end == skipping.latestOffset(end, ReadMaxRows(10))


def test_skipped_entries_are_counted_once(server: RedisServer) -> None:
    fill(server, 100)
    reader = native(server, on_trimmed="skip")
    start = reader.initialOffset()
    server.client.xtrim("s", maxlen=40, approximate=False)
    end = reader.latestOffset(start, ReadMaxRows(10))
    assert {"id": "1000017-2", "entries": 70} == end
    with capture_logs() as logs:
        reader.latestOffset(end, ReadMaxRows(10))
    assert [] == logs


def test_a_trim_of_a_redis_stream_after_the_planning_is_noticed(server: RedisServer) -> None:
    fill(server, 100)
    reader = native(server, rows_per_partition="50")
    start = reader.initialOffset()
    first, second = reader.partitions(start, reader.latestOffset(start, ALL))
    server.client.xtrim("s", maxlen=70, approximate=False)
    with pytest.raises(TrimmedError, match="30 entries"):
        rows_of(reader, [first])
    assert list(range(52, 101)) == numbers(rows_of(reader, [second]))[-49:]


def test_a_redis_stream_that_is_not_there_or_is_none_is_told(server: RedisServer) -> None:
    with pytest.raises(PipelineError, match=r"Redis stream 's' is not there.*nothing has come.*if_missing=empty"):
        native(server).initialOffset()
    reader = native(server, if_missing="empty")
    start = reader.initialOffset()
    assert start == reader.latestOffset(start, ReadMaxRows(10))
    fill(server, 3)
    assert [1, 2, 3] == numbers(follow(reader, start))
    server.client.set("s", "text")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        native(server).initialOffset()


def test_a_redis_stream_that_was_made_anew_is_noticed(server: RedisServer) -> None:
    fill(server, 100)
    reader = native(server)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    server.client.delete("s")
    fill(server, 10)
    with pytest.raises(PipelineError, match="ends at 1000002-2, but was read up to 1000025-0"):
        reader.latestOffset(end, ALL)
    # Also where ids are times, and so go on.
    server.client.delete("s")
    fill(server, 10, first=200)
    with pytest.raises(PipelineError, match="recreated"):
        reader.latestOffset(end, ALL)


def test_a_redis_stream_may_begin_in_the_future(server: RedisServer) -> None:
    fill(server, 10)
    reader = native(server, starting="2000000-0")
    start = reader.initialOffset()
    assert start == reader.latestOffset(start, ALL) == reader.latestOffset(start, ReadMaxRows(5))
    fill(server, 10, first=11)
    assert start == reader.latestOffset(start, ALL)
    server.client.xadd("s", {"payload": b"21"}, id="2000000-0")
    assert [21] == numbers(follow(reader, start))


def test_an_id_too_large_for_an_offset_is_told() -> None:
    with pytest.raises(ValueError, match="1-1048576 does not fit the column `offset`"):
        columns.entries(["offset"], [b"1-1048576"], [[]])
    assert ["1-1048576"] == columns.entries(["id"], [b"1-1048576"], [[]]).column("id").to_pylist()


@given(st.integers(0, 2**42), st.integers(0, 2**30), st.integers(1, 50), st.integers(0, 9))
def test_a_split_by_time_is_whole(first: int, span: int, parts: int, sequence: int) -> None:
    after, last = EntryId(first, sequence), EntryId(first + span, sequence + 1)
    ranges = redis_streams.split(after, last, parts)
    assert after == ranges[0][0]
    assert last == ranges[-1][1]
    assert len(ranges) <= parts
    assert all(low < high for low, high in ranges)
    assert [high for _, high in ranges[:-1]] == [low for low, _ in ranges[1:]]


# -- parts


def test_columns_of_one_value_are_like_others() -> None:
    for values, kind in (
        (["a"] * 5, pa.string()), ([None] * 5, pa.string()), ([b""] * 5, pa.binary()), ([True] * 5, pa.bool_()),
        (["a", "b", "a"], pa.string()), ([None, "x", None], pa.string()), ([1, 2, 1], pa.int32()),
    ):  # fmt: skip
        assert pa.array(values, kind).equals(columns.plain(values, kind))


class Thing:
    def __init__(self, url: str) -> None:
        self.url = url
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_shelf_is_bounded() -> None:
    kept = StoreCache()
    things = [kept.take(str(number), Thing) for number in range(MAX_OPEN)]
    assert things[0] is kept.take("0", Thing)
    kept.take("more", Thing)
    assert [False, True, False, False] == [thing.closed for thing in things]
    kept.close()
    assert all(thing.closed for thing in things)


def test_a_worker_sets_aside_what_is_imported_once(tmp_path: Path) -> None:
    """So that Spark's garbage collection after each task has little to do; and nobody else's process is touched."""
    with Lake(f"rocksdb://{tmp_path / 'store'}") as lake:
        lake.fill("s", 1)
        frozen = gc.get_freeze_count()
        assert 1 == len(read(lake.url))
        assert frozen == gc.get_freeze_count()
    program = """
import gc
from motorcade.pipelines.sources.store_cache import settle
settle()
first = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
settle()
print(first > 1000, first == gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "True True" == done.stdout.strip()
