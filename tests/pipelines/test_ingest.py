"""Streams into a lake: what was published over MQTT, and what a reader of Parquet files finds, whatever happens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from motorcade.core import record
from motorcade.core.message import Message
from motorcade.core.vin import make_vin
from motorcade.pipelines import PipelineError, ingest, schema, status
from motorcade.pipelines import lake as lakes
from motorcade.pipelines.ingest_run import Ingestion, IngestSource
from motorcade.pipelines.lake import Disk
from motorcade.pipelines.runner import BatchProgress, RunDir, RunOutcome, Trigger, follow
from tests.pipelines.conftest import Command
from tests.pipelines.lake import NOW, Lake
from tests.support.flows import publish_many
from tests.support.node import NodeProcess
from tests.support.redis import RedisServer
from tests.support.wire import Client

pytestmark = pytest.mark.timeout(500)

CONFIG = """
[plugins.streams.stream.telemetry]
topics = ["ecp/#"]
"""

SCHEMA = """
[types.position]
topics = ["ecp/+/position"]
fields = "vin STRING NOT NULL, lat DOUBLE NOT NULL, at TIMESTAMP"
time = "at"
key = ["vin", "at"]

[types.trip]
topics = ["ecp/+/trip"]
fields = "vin STRING NOT NULL, km DOUBLE"
"""


def rows_of(lake: Path, table: str) -> list[dict[str, Any]]:
    """As any reader of Parquet files sees them."""
    if not (lake / table).exists():
        return []
    partitioning = ds.partitioning(flavor="hive")
    return list(ds.dataset(lake / table, partitioning=partitioning).to_table().to_pylist())


def files_of(lake: Path, table: str) -> list[Path]:
    return sorted((lake / table).glob("day=*/*"))


def leftovers(lake: Path) -> list[Path]:
    return list((lake / lakes.HOME).rglob("*.parquet"))


# -- a node, a command, a reader


class Published:
    """What was published, and where it should be."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.now = datetime.now(UTC).replace(microsecond=0)
        self.positions: dict[tuple[str, datetime], float] = {}
        self.trips: list[tuple[str, float]] = []
        self.dead: Counter[tuple[str, bytes]] = Counter()
        self.duplicates = 0
        self.total = 0

    def position(self, number: int, at: datetime, lat: float = 1.0) -> tuple[str, bytes]:
        vin = make_vin(number)
        return f"ecp/{vin}/position", json.dumps({"vin": vin, "lat": lat, "at": at.isoformat()}).encode()

    def good(self, numbers: Sequence[int], at: datetime) -> None:
        for number in numbers:
            known = (make_vin(number), at) in self.positions
            self.duplicates += known
            self.positions.setdefault((make_vin(number), at), number / 10)
            self._send(*self.position(number, at, number / 10))

    def trip(self, number: int) -> None:
        self.trips.append((make_vin(number), number * 1.5))
        body = json.dumps({"vin": make_vin(number), "km": number * 1.5}).encode()
        self._send(f"ecp/{make_vin(number)}/trip", body)

    def bad(self, topic: str, payload: bytes, reason: str) -> None:
        self.dead[reason, payload] += 1
        self._send(topic, payload)

    def _send(self, topic: str, payload: bytes) -> None:
        publish_many(self._client, topic, [payload], qos=1)
        self.total += 1

    def everything(self, numbers: range) -> None:
        """Good, late, bad, and twice."""
        self.good(numbers, self.now)
        self.good(numbers[:5], self.now - timedelta(days=2))
        self.good(numbers[:4], self.now)
        for number in numbers[:6]:
            self.trip(number)
        old, new = self.now - timedelta(days=30), self.now + timedelta(days=1)
        self.bad(*self.position(numbers[0], old), "too_late")
        self.bad(*self.position(numbers[0], new), "in_future")
        self.bad("ecp/x/position", b'{"vin": "x"', "not_json")
        self.bad("ecp/x/position", b"\xff\x00", "not_json")
        self.bad("ecp/x/position", b'{"vin": "x", "lat": "north"}', "wrong_type")
        self.bad("ecp/x/trip", b'{"km": 1}', "missing_field")
        self.bad("ecp/x/other", b"{}", "no_type")
        self.bad("ecp/x/other", b"{}", "no_type")

    def is_in(self, lake: Path) -> None:
        """Exactly this, each row once, in the day that it belongs to."""
        positions = rows_of(lake, "position")
        found = {(row["vin"], row["at"]): row["lat"] for row in positions}
        assert self.positions == found
        assert len(found) == len(positions), "something is there twice"
        assert all(str(row["at"].date()) == str(row["day"]) for row in positions)
        assert sorted(self.trips) == sorted((row["vin"], row["km"]) for row in rows_of(lake, "trip"))
        dead = rows_of(lake, "dead_letters")
        assert self.dead == Counter((row["reason"], row["payload"]) for row in dead)
        assert all(row["topic"].startswith("ecp/") and row["offset"] > 0 for row in dead)


INGEST = [
    *("pipeline", "run", "ingest", "--schema", "schema.toml", "--lake", "lake", "--checkpoint", "run"),
    *("--data", "data", "--stream", "telemetry", "--json"),
]


def test_what_was_published_is_in_the_lake_once(command: Command, tmp_path: Path) -> None:
    """A node runs, a command reads its stream, twice; the second time there is more, and some of it is known."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    with NodeProcess(config=CONFIG, data=tmp_path / "data") as node, Client(node) as client:
        client.connect("car", keepalive=0)
        published = Published(client)
        published.everything(range(1, 41))
        first = command(*INGEST)
        assert 0 == first.exit_code, first.stderr
        published.is_in(tmp_path / "lake")
        _counts_are_right([json.loads(first.stdout)], published)
        before = published.total
        published.everything(range(30, 61))
        second = command(*INGEST, "--compact")
        assert 0 == second.exit_code, second.stderr
        assert published.total - before == json.loads(second.stdout)["rows"], "only what is new is read"
        published.is_in(tmp_path / "lake")
        _counts_are_right([json.loads(done.stdout) for done in (first, second)], published)
        assert 2 == len(files_of(tmp_path / "lake", "position")), "one file for each day"
        shown = status.look(tmp_path / "run")
        assert ("done", 0) == (shown["state"], shown["behind"])
        assert [] == leftovers(tmp_path / "lake")
        refused = command(*INGEST, "--dedupe-within", "0")
        assert isinstance(refused.exception, PipelineError)
        assert "was begun with duplicates 'looked for', and now it is 'kept'" in str(refused.exception)


def _counts_are_right(outcomes: Sequence[Mapping[str, Any]], published: Published) -> None:
    """What all runs together have told."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        for name, value in outcome["counts"].items():
            total.update({name: value} if isinstance(value, int) else value)
    reasons: Counter[str] = Counter()
    for (reason, _), count in published.dead.items():
        reasons[reason] += count
    yesterday = published.now - timedelta(days=1)
    assert reasons + Counter(
        read=published.total,
        position=len(published.positions),
        trip=len(published.trips),
        duplicates=published.duplicates,
        late=sum(at < yesterday for _, at in published.positions),
    ) == Counter(total)


# -- runs in this process


class Frail(Disk):
    """Fails before its n-th step from now on."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def move(self, source: Path, target: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device", str(target))
        super().move(source, target)


@contextmanager
def ingestion(
    spark: SparkSession, place: Path, source: IngestSource, text: str = SCHEMA, disk: Disk | None = None, **bounds: Any
) -> Iterator[tuple[Ingestion, RunDir]]:
    (place / "schema.toml").write_text(text)
    types = schema.read(place / "schema.toml")
    reads = {"store": "here", source.kind: source.name}
    with (
        RunDir(place / "run", "ingest", {}) as folder,
        Ingestion(spark, folder, place / "lake", source, types, ingest.IngestOptions(**bounds)) as one,
    ):
        if disk is not None:
            one.lake._disk = disk
        one.open(reads)
        yield one, folder


def run(spark: SparkSession, place: Path, source: IngestSource, **more: Any) -> tuple[RunOutcome, list[BatchProgress]]:
    seen: list[BatchProgress] = []
    with ingestion(spark, place, source, **more) as (one, folder):
        return follow(one.writer(), folder, Trigger(), one.shown(seen.append)), seen


def append(lake: Lake, numbers: Sequence[int], now: float = NOW) -> None:
    """Positions with these numbers, recorded at a time."""
    values = []
    for number in numbers:
        body = {"vin": f"v{number}", "lat": number, "at": datetime.fromtimestamp(now, UTC).isoformat()}
        values.append(record.encode(Message("ecp/x/position", json.dumps(body).encode(), 1, timestamp=now)))
    lake.append("s", values, now)


def numbers_in(lake: Path) -> list[int]:
    return sorted(int(row["lat"]) for row in rows_of(lake, "position"))


def test_a_run_that_fails_anywhere_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    """The disk is full at each step of a batch in turn; Spark's note that a batch is done is lost."""
    source = IngestSource(f"rocksdb://{tmp_path / 'store'}", "stream", "s", {"max_rows": "100"})
    with Lake(f"rocksdb://{tmp_path / 'store'}") as lake:
        append(lake, range(150))
        # Nothing decided; decided, nothing moved; in the second batch. The tests of the lake die at every step.
        for steps in (3, 1, 4):
            with pytest.raises(PipelineError, match=r"cannot be (opened|written): No space left on device"):
                run(spark, tmp_path, source, disk=Frail(steps))
        run(spark, tmp_path, source)
        assert list(range(150)) == numbers_in(tmp_path / "lake")
        # As if the driver had died after the lake had the batch, before Spark had noted that.
        commits = tmp_path / "run" / "spark" / "commits"
        for commit in (commits / "1", commits / ".1.crc"):
            commit.unlink()
        append(lake, range(150, 180))
        outcome, seen = run(spark, tmp_path, source)
        assert [1, 2] == [batch.number for batch in seen]
        assert list(range(180)) == numbers_in(tmp_path / "lake")
        assert {"position": 80} == outcome.counts["written"], "of both batches that this run has finished"
        assert [] == leftovers(tmp_path / "lake")


def test_duplicates_are_known_across_batches_and_runs_for_a_while(spark: SparkSession, tmp_path: Path) -> None:
    source = IngestSource(f"rocksdb://{tmp_path / 'store'}", "stream", "s", {"max_rows": "50"})
    more: dict[str, Any] = {"text": SCHEMA.replace('key = ["vin", "at"]', 'key = ["vin"]'), "dedupe_within": 60.0}
    with Lake(f"rocksdb://{tmp_path / 'store'}") as lake:
        append(lake, [*range(50), *range(40, 60), *range(5), *range(5)])
        outcome, seen = run(spark, tmp_path, source, **more)
        assert list(range(60)) == numbers_in(tmp_path / "lake")
        assert 20 == outcome.counts["duplicates"] == sum(batch.counts["duplicates"] for batch in seen)
        append(lake, range(10), NOW + 30)
        outcome, _ = run(spark, tmp_path, source, **more)
        assert 10 == outcome.counts["duplicates"]
        # Keys are forgotten at the end of a batch that knows the time of the one before it.
        append(lake, range(100, 150), NOW + 300)
        append(lake, range(150, 200), NOW + 301)
        append(lake, [0], NOW + 302)
        run(spark, tmp_path, source, **more)
        assert [0, *range(60), *range(100, 200)] == numbers_in(tmp_path / "lake")


def test_a_schema_may_grow_and_not_change(spark: SparkSession, tmp_path: Path) -> None:
    source = IngestSource(f"rocksdb://{tmp_path / 'store'}", "stream", "s")
    with Lake(f"rocksdb://{tmp_path / 'store'}") as lake:
        append(lake, range(3))
        run(spark, tmp_path, source)
        append(lake, range(3, 5))
        wider = SCHEMA.replace("at TIMESTAMP", "at TIMESTAMP, speed INT") + '[types.rest]\nfields = "x INT"\n'
        run(spark, tmp_path, source, text=wider)
        append(lake, range(5, 6))
        with pytest.raises(PipelineError, match="the column 'lat' is double in the files there"):
            run(spark, tmp_path, source, text=SCHEMA.replace("lat DOUBLE", "lat FLOAT"))
        with ingestion(spark, tmp_path, source, text=wider) as (one, folder):
            follow(one.writer(), folder, Trigger(), one.shown(lambda _batch: None))
            assert one.compact() > 0
        assert 1 == len(files_of(tmp_path / "lake", "position"))
    rows = ds.dataset(files_of(tmp_path / "lake", "position")).to_table().to_pylist()
    assert [0, 1, 2, 3, 4, 5] == sorted(row["lat"] for row in rows)
    assert {None} == {row["speed"] for row in rows}


def test_many_files_of_a_day_are_merged_by_themselves(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motorcade.pipelines.ingest_run.MANY_FILES", 3)
    source = IngestSource(f"rocksdb://{tmp_path / 'store'}", "stream", "s", {"max_rows": "10"})
    with Lake(f"rocksdb://{tmp_path / 'store'}") as lake:
        append(lake, range(40))
        run(spark, tmp_path, source, dedupe_within=0.0)
    names = [file.name for file in files_of(tmp_path / "lake", "position")]
    assert len(names) < 4
    assert any(name.startswith("merged-") for name in names)
    assert list(range(40)) == numbers_in(tmp_path / "lake")


def test_processed_messages_of_a_redis_stream(spark: SparkSession, redis_server: RedisServer, tmp_path: Path) -> None:
    """What workers write has no topic; the one type without filters takes it. An id that is there twice counts once."""
    redis_server.empty()
    for number in [*range(200), 7, 8]:
        entry: Any = {"id": f"m{number}", "payload": json.dumps({"n": number}), "worker": "w1"}
        redis_server.client.xadd("messages:processed", entry)
    redis_server.client.xadd("messages:processed", {"id": "bad", "payload": "-"})
    redis_server.client.xadd("messages:processed", {"id": "none"})
    source = IngestSource(redis_server.url, "redis_stream", "messages:processed", {"max_rows": "150"})
    text = '[types.processed]\nfields = "n INT NOT NULL"\n'
    outcome, _ = run(spark, tmp_path, source, text=text)
    assert 204 == outcome.rows
    assert list(range(200)) == sorted(row["n"] for row in rows_of(tmp_path / "lake", "processed"))
    dead = rows_of(tmp_path / "lake", "dead_letters")
    assert [("no_payload", None), ("not_json", b"-")] == sorted((row["reason"], row["payload"]) for row in dead)
    assert 2 == outcome.counts["duplicates"]
    redis_server.client.xadd("messages:processed", {"id": "m200", "payload": '{"n": 200}'})
    outcome, _ = run(spark, tmp_path, source, text=text)
    assert 1 == outcome.rows
    assert list(range(201)) == sorted(row["n"] for row in rows_of(tmp_path / "lake", "processed"))


def test_a_stream_is_not_brought_twice_by_a_new_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    source = IngestSource(f"rocksdb://{tmp_path / 'store'}", "stream", "s")
    with Lake(f"rocksdb://{tmp_path / 'store'}") as lake:
        append(lake, range(3))
        run(spark, tmp_path, source, dedupe_within=0.0)
        (tmp_path / "run").rename(tmp_path / "kept")
        with pytest.raises(PipelineError, match="has rows of store here, stream s already"):
            run(spark, tmp_path, source, dedupe_within=0.0)
        (tmp_path / "lake").rename(tmp_path / "elsewhere")
        for file in sorted((tmp_path / "run").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (tmp_path / "run").rmdir()
        (tmp_path / "kept").rename(tmp_path / "run")
        with pytest.raises(PipelineError, match="knows nothing of this run"):
            run(spark, tmp_path, source, dedupe_within=0.0)
