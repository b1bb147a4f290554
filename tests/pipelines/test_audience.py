"""An audience by SQL, planned and sent to a real node: whatever is repeated, each vehicle is addressed once.

Vehicles are sent to in mode `append`, in which one that was addressed twice would have two messages. How often each was
accepted is read from the stream of receipts, and the audit has its say about the store.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from motorcade.core import record
from motorcade.core.vin import make_vin
from motorcade.pipelines import PipelineError, audience, audit, failures, runner, session
from motorcade.pipelines.rundir import RunDir
from motorcade.pipelines.sources.store_cache import store_cache
from motorcade.pipelines.tables import tables_of
from motorcade.publisher.batches import Order
from motorcade.storage.readers import open_reader
from tests.scenarios.witness import wait_until
from tests.support.cases import refusal, unlike
from tests.support.fanout import Platform, request_name
from tests.support.node import ROOT, NodeProcess

pytestmark = pytest.mark.timeout(400)

#: Seconds that a command may take, Spark's start included, on a busy machine.
PATIENCE = 300.0

VINS = [make_vin(number) for number in range(1000)]
WRONG = ["", "NOVIN", VINS[0].lower(), VINS[1][:-1] + "I", VINS[2] + "0", "x" * 1000]
DUPLICATES = VINS[:30] * 2

#: The fleet: vehicles, some of them twice more, some rows that are none.
ROWS = [(vin, 2020 + number % 5) for number, vin in enumerate([*VINS, *DUPLICATES])] + [(text, 2024) for text in WRONG]
SINCE_2022 = [row for row in ROWS if row[1] >= 2022]
CHOSEN = {vin for vin, _ in SINCE_2022} & set(VINS)
EVERYBODY = "SELECT vin FROM fleet"
SQL = f"{EVERYBODY} WHERE year >= 2022"


@pytest.fixture
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    """Afterwards it divides rows as before."""
    with audience._settings_kept(spark):
        yield spark


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(data=tmp_path_factory.mktemp("node") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table as Parquet."""
    place = tmp_path_factory.mktemp("fleet") / "fleet.parquet"
    vins, years = zip(*ROWS, strict=True)
    pq.write_table(pa.table({"vin": [vin or None for vin in vins], "year": years}), place)
    return place


def store(node: NodeProcess) -> str:
    return f"rocksdb://{node.data / 'store'}"


def order(request: str | None = None) -> Order:
    return Order(request or request_name(), b'{"do": "it"}', {"mode": "append"})


def accepted(node: NodeProcess, request: str) -> Counter[str]:
    """How often each vehicle was accepted for a request."""
    reader = open_reader(store(node))
    try:
        pages = [*reader.pages("receipts", 0, reader.extent("receipts").last)]
    finally:
        reader.close()
    told = [json.loads(record.decode(value).payload) for page in pages for value in page.values]
    return Counter(one["vin"] for one in told if (request, "accepted") == (one["request_id"], one["state"]))


@contextmanager
def new_receipts(node: NodeProcess) -> Iterator[Callable[[], bool]]:
    """Whether there are more receipts than there were at the start. Spark would say so when its tasks are done."""
    reader = open_reader(store(node))
    before = reader.extent("receipts").last

    def there() -> bool:
        reader.refresh()
        return reader.extent("receipts").last > before

    try:
        yield there
    finally:
        reader.close()


def plan(spark: SparkSession, folder: RunDir, what: Order, fleet: Path, sql: str = SQL) -> audience.AudienceCounts:
    """With this rate a file has ten batches."""
    return audience.plan(spark, folder, what, tables_of([f"fleet={fleet}"], []), sql, size=20, rate=20.0)


def send(spark: SparkSession, folder: RunDir, node: NodeProcess, **more: Any) -> runner.RunOutcome:
    query = audience.sending(spark, folder, {"fanout": f"mqtt://{node.mqtt}", "patience": "20"}, **more)
    return runner.follow(query, folder, runner.Trigger())


def counts_of_the_table() -> audience.AudienceCounts:
    """In plain Python, from the rows."""
    rows = [vin for vin, _ in SINCE_2022]
    invalid = {
        "missing": sum(not vin for vin in rows),
        "wrong_character": sum(vin in {VINS[0].lower(), VINS[1][:-1] + "I", "NOVIN", "x" * 1000} for vin in rows),
        "wrong_length": rows.count(VINS[2] + "0"),
    }
    return audience.AudienceCounts(
        rows=len(rows),
        vehicles=len(CHOSEN),
        duplicates=sum(vin in CHOSEN for vin in rows) - len(CHOSEN),
        invalid={reason: count for reason, count in invalid.items() if count},
        batches=-(-len(CHOSEN) // 20),
    )


def same(expected: audience.AudienceCounts, found: audience.AudienceCounts) -> bool:
    names = ("rows", "vehicles", "duplicates", "invalid", "batches")
    return [getattr(expected, name) for name in names] == [getattr(found, name) for name in names]


# -- sources


def as_csv(spark: SparkSession, place: Path) -> Path:
    with (place / "fleet.csv").open("w", newline="") as out:
        csv.writer(out).writerows([("vin", "year"), *ROWS])
    return place / "fleet.csv"


def as_database(spark: SparkSession, place: Path) -> str:
    """Derby, which PySpark has with it, in a folder."""
    url = f"jdbc:derby:{place / 'derby'};create=true"
    frame = spark.createDataFrame([(vin or None, year) for vin, year in ROWS], "vin STRING, year INT")
    frame.write.format("jdbc").options(url=url, dbtable="fleet").save()
    return url


def test_vehicles_of_a_table_are_sent_to(spark: SparkSession, node: NodeProcess, fleet: Path, tmp_path: Path) -> None:
    """Of Parquet files; tables of other kinds come to the same plan."""
    what = order()
    for place in (as_csv(spark, tmp_path), as_database(spark, tmp_path)):
        with audience.registered(spark, tables_of([f"fleet={place}"], [])):
            found = audience.counted(audience.planned(audience.chosen(spark, SQL), what, size=20, partitions=1))
        assert same(counts_of_the_table(), found), (place, found)
    with RunDir(tmp_path / "run", "audience", {}) as folder:
        counts = audience.plan(spark, folder, what, tables_of([f"fleet={fleet}"], []), SQL, size=20)
        assert same(counts_of_the_table(), counts), counts
        outcome = send(spark, folder, node)
        told = audience.progress(folder, counts)
    assert outcome.done and counts.batches == outcome.rows
    assert Counter(CHOSEN) == accepted(node, what.request_id)
    assert (len(CHOSEN), counts.batches, 0, 0) == tuple(
        told[name] for name in ("accepted", "acknowledged", "repeated", "rejected")
    )
    wrong = pq.read_table(tmp_path / "run" / "invalid").to_pylist()
    assert counts.invalid_rows == sum(row["rows"] for row in wrong)
    by_text = {row["vin"]: row for row in wrong}
    assert "character 17 is 'I'" in by_text[VINS[1][:-1] + "I"]["detail"]
    assert f"{'x' * 64}…" in by_text, "what is far too long is cut"
    verdict = audit.run(spark, store(node), request=what.request_id)
    assert verdict.clean and {"pending": len(CHOSEN)} == verdict.outcomes


# -- looking first


def test_a_dry_run_counts_and_sends_nothing(spark: SparkSession, node: NodeProcess, fleet: Path) -> None:
    what = Order(request_name(), b"x" * 500)
    some = sorted(CHOSEN)
    with Platform(node) as platform:
        platform.send([*some[:7], make_vin(10**6)], what.request_id)  # the last one is not of this audience
        platform.send(some[:3], request_name())  # nor is this the request
    with audience.registered(audience.sharing(spark, 8), tables_of([f"fleet={fleet}"], [])):
        frame = audience.chosen(spark, SQL)
        counts = audience.counted(audience.planned(frame, what, size=20))
        pending = audience.pending_of(spark, store(node), what.request_id, frame)
    assert same(counts_of_the_table(), counts), counts
    assert [] == spark.catalog.listTables()
    found = audience.dry_run(what, counts, pending)
    assert (7, len(CHOSEN), counts.invalid_rows) == (
        found["pending_replaced"],
        found["vehicles"],
        found["invalid"],
    )
    topic = f"agent/{VINS[0]}/proxy/request/{what.request_id}"
    assert len(CHOSEN) * (500 + len(topic)) < found["bytes_one_by_one"] < len(CHOSEN) * (500 + len(topic) + 10)
    assert found["bytes_one_by_one"] - found["bytes"] == found["bytes_saved"]
    assert len(CHOSEN) * 20 < found["bytes"] < len(CHOSEN) * 20 + counts.batches * 300 + 700
    assert {*some[:7], make_vin(10**6)} == set(accepted(node, what.request_id))


def test_vehicles_fill_their_batches_and_the_check_digit_is_looked_at(spark: SparkSession, fleet: Path) -> None:
    """A small audience is not spread over many batches that are nearly empty."""
    audience.sharing(spark, 64)
    wrong = [vin[:8] + ("1" if vin[8] == "0" else "0") + vin[9:] for vin in VINS[:50]]
    frame = spark.createDataFrame([(vin,) for vin in [*VINS, *wrong]], "vin STRING")
    counts = audience.counted(audience.planned(audience.audience(frame), order(), check_digit=True))
    assert (5, 1000, {"wrong_check_digit": 50}) == (counts.batches, counts.vehicles, counts.invalid)


def test_what_names_no_vehicles_is_refused(spark: SparkSession, fleet: Path, tmp_path: Path) -> None:
    """Statements that are no queries, queries without VINs, tables that cannot be read."""
    with audience.registered(spark, tables_of([f"fleet={fleet}"], [])):
        assert [] == unlike(
            (says, refusal(PipelineError, audience.chosen, spark, sql))
            for sql, says in (
                ("SELECT year FROM fleet", "has no column `vin` but year; write"),
                ("SELECT year AS vin FROM fleet", "`vin` of the query is bigint, not string"),
                ("DROP VIEW fleet", r"no query \(SELECT … AS vin …\): .*Syntax error at or near 'DROP'"),
                ("CACHE TABLE fleet", "Syntax error at or near 'CACHE'"),
            )
        )
    broken = tmp_path / "broken.parquet"
    broken.write_text("no columns at all")
    for place, says in (
        (str(broken), "CANNOT_READ_FILE_FOOTER"),
        ("jdbc:derby:memory:nowhere", "Database 'memory:nowhere' not found"),
    ):
        with (
            pytest.raises(PipelineError, match=rf"^table 'fleet' \({re.escape(place)}\) cannot be read: .*{says}"),
            audience.registered(spark, tables_of([f"fleet={place}"], [])),
        ):
            pass
    # Where Java is, and so where the user is, if it is a command.
    assert not Path(java(spark).getProperty("user.dir"), "derby.log").exists()


def java(spark: SparkSession) -> Any:
    return spark._jvm.java.lang.System  # type: ignore[union-attr]


def test_who_has_said_where_derby_writes_is_not_overruled(spark: SparkSession) -> None:
    (ours, value), file = session.DERBY_SILENT, "derby.stream.error.file"
    assert (value, None) == (java(spark).getProperty(ours), java(spark).getProperty(file))
    java(spark).clearProperty(ours)
    java(spark).setProperty(file, "somewhere")
    try:
        for logged in (True, False):
            session._quiet_derby(spark, logged=logged)
        found = {key for key in session.DERBY_OWN if java(spark).getProperty(key) is not None}
    finally:
        java(spark).clearProperty(file)
        java(spark).setProperty(ours, value)
    assert {file} == found


def test_a_line_that_cannot_be_read_is_told_or_left_out(spark: SparkSession, tmp_path: Path) -> None:
    """Where it is, and what is wrong with it; also if the fields that are too many or too few are not asked for."""
    file = tmp_path / "fleet.csv"
    long = f"{VINS[1]},2024,left,over"
    for line, sql in ((long, f"{EVERYBODY} WHERE year = 2024"), (long, EVERYBODY), (VINS[1], EVERYBODY)):
        file.write_text(f"vin,year\n{VINS[0]},2024\n{line}\n")
        with (
            audience.registered(spark, tables_of([f"fleet={file}"], [])),
            pytest.raises(Py4JJavaError) as failure,
        ):
            audience.counted(audience.planned(audience.chosen(spark, sql), order()))
        said = failures.words(failure.value)
        assert "fleet.csv: " in said, said
        assert f"record: {line} (a line needs as many fields as the file has names" in said, said
    file.write_text(f"vin,year\n{VINS[0]},2024\n{VINS[1]}\n{VINS[2]},2024,x\n{VINS[3]},2024\n")
    with audience.registered(spark, tables_of([f"fleet={file}"], ["fleet.mode=DROPMALFORMED"])):
        assert {VINS[0], VINS[3]} == {row.vin for row in audience.chosen(spark, EVERYBODY).collect()}


def test_a_query_that_fails_leaves_a_folder_for_another_one(spark: SparkSession, fleet: Path, tmp_path: Path) -> None:
    tables = tables_of([f"fleet={fleet}"], [])
    with RunDir(tmp_path / "run", "audience", {"sql": "wrong"}) as folder:
        with pytest.raises(PySparkException):
            audience.plan(spark, folder, order(), tables, "SELECT string(raise_error('no')) AS vin FROM fleet")
        assert not folder.part("planning").exists()
    with RunDir(tmp_path / "run", "audience", {"sql": "right"}):
        pass


def test_nobody_is_an_audience_too(spark: SparkSession, fleet: Path, tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", "audience", {}) as folder:
        counts = plan(spark, folder, order(), fleet, f"{EVERYBODY} WHERE year > 3000")
        assert audience.AudienceCounts() == counts
        query = audience.sending(spark, folder, {"fanout": "mqtt://127.0.0.1:1"})
        assert runner.follow(query, folder, runner.Trigger()).done


# -- interrupted


def test_a_plan_is_made_once_and_reaches_nobody_twice(
    spark: SparkSession, node: NodeProcess, fleet: Path, tmp_path: Path
) -> None:
    """A run that ended while it was planned leaves nothing behind; one that ended after it goes on with the plan.

    Then Spark forgets the last micro-batch, as if the driver was killed before it could note it.
    """
    what = order()
    with RunDir(tmp_path / "run", "audience", {}) as folder:
        left = folder.part("planning") / "kind=batch"
        left.mkdir(parents=True)
        (left / "part-00000.parquet").write_bytes(b"half of a file")
        counts = plan(spark, folder, what, fleet)
        assert not folder.part("planning").exists()
    copy = tmp_path / "fleet.parquet"  # other rows, and nobody reads them
    with RunDir(tmp_path / "run", "audience", {}) as folder:
        before = {file.name: file.read_bytes() for file in folder.part("plan").glob("*.parquet")}
        pq.write_table(pa.table({"vin": [make_vin(77)], "year": [2024]}), copy)
        assert counts == plan(spark, folder, what, copy)
        assert before == {file.name: file.read_bytes() for file in folder.part("plan").glob("*.parquet")}
        first = send(spark, folder, node)
        assert first.done and first.batches > 1
        assert Counter(CHOSEN) == accepted(node, what.request_id)
        last = max((folder.part("spark") / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
        last.unlink()
        (last.parent / f".{last.name}.crc").unlink()
        assert send(spark, folder, node).batches == 1
        told = audience.progress(folder, counts)
    assert told["repeated"] > 0
    assert (counts.batches, len(CHOSEN)) == (told["acknowledged"], told["accepted"])
    assert Counter(CHOSEN) == accepted(node, what.request_id)


def test_stopped_in_the_middle_and_started_again(
    spark: SparkSession, node: NodeProcess, fleet: Path, tmp_path: Path
) -> None:
    what = order()
    with RunDir(tmp_path / "run", "audience", {}) as folder:
        counts = plan(spark, folder, what, fleet)
        # Slow enough to be stopped: each of the two tasks has its whole share of the plan before it.
        sending = audience.sending(spark, folder, {"fanout": f"mqtt://{node.mqtt}"}, rate=40.0, connections=2)
        with new_receipts(node) as some_are_accepted:
            query = sending.option("checkpointLocation", folder.spark).trigger(availableNow=True).start()
            try:
                wait_until(some_are_accepted, "the first are accepted", PATIENCE)
            finally:
                query.stop()
        assert 0 < len(accepted(node, what.request_id)) < len(CHOSEN)
        assert send(spark, folder, node).done
        told = audience.progress(folder, counts)
    # Whether some were sent twice depends on where it was stopped, in a micro-batch or between two.
    assert Counter(CHOSEN) == accepted(node, what.request_id)
    assert (counts.batches, len(CHOSEN)) == (told["acknowledged"], told["accepted"])


def test_a_refusal_stops_the_run_and_the_rest_stays_in_the_plan(
    spark: SparkSession, fleet: Path, tmp_path: Path
) -> None:
    """The node takes fewer vehicles in a batch than the plan has; then its configuration is put right."""
    what = order()
    with RunDir(tmp_path / "run", "audience", {}) as folder:
        plan(spark, folder, what, fleet)
        with (
            NodeProcess(config="[plugins.fanout]\nmax_vins = 19\n", data=tmp_path / "data") as small,
            pytest.raises(PipelineError, match=r"batch \w+-\d+-\d+ \(20 vehicles\) was refused: ids: 20 VINs are more"),
        ):
            send(spark, folder, small)
        with NodeProcess(data=tmp_path / "data") as node:
            assert send(spark, folder, node).done
            store_cache.close()
            assert Counter(CHOSEN) == accepted(node, what.request_id)


# -- the command


def command(place: Path, *words: object) -> subprocess.Popen[str]:
    fixed = ["--master", "local[2]", "--set", "spark.driver.memory=1g", "--partitions", "4"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MOTORCADE_", "PYSPARK_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "motorcade", "pipeline", "run", "audience", *map(str, words), *fixed],
        cwd=place,
        env=clean | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_command_that_is_killed_goes_on(node: NodeProcess, fleet: Path, tmp_path: Path) -> None:
    """Killed as soon as some vehicles are accepted; the same command, without a rate, reaches the others."""
    request = request_name()
    (tmp_path / "task.json").write_text('{"do": "it"}')
    words = ["--request", request, "--payload", "task.json", "--table", f"fleet={fleet}", "--sql", SQL, "--append"]
    words += ["--batch", "20", "--checkpoint", "run", "--broker", f"mqtt://{node.mqtt}"]
    first = command(tmp_path, *words, "--rate", "40")
    with new_receipts(node) as there:

        def some_are_accepted() -> bool:
            assert first.poll() is None, first.communicate()
            return there()

        try:
            wait_until(some_are_accepted, "some vehicles are accepted", PATIENCE)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.communicate(timeout=PATIENCE)
    assert 0 < len(accepted(node, request)) < len(CHOSEN)
    second = command(tmp_path, *words, "--json")
    out, err = second.communicate(timeout=PATIENCE)
    assert 0 == second.returncode, err
    told = json.loads(out)
    assert (request, True, len(CHOSEN)) == (told["request_id"], told["done"], told["counts"]["accepted"])
    said = [line for line in err.splitlines() if not line.startswith("batch ")]
    wrong = counts_of_the_table().invalid_rows
    assert [f"{wrong} rows are no VINs; they are in {tmp_path / 'run' / 'invalid'}"] == said, "nothing of Spark's"
    assert Counter(CHOSEN) == accepted(node, request)
    other = command(tmp_path, *words, "--priority", "3")
    _, err = other.communicate(timeout=PATIENCE)
    assert (1, True) == (other.returncode, "was begun with priority unset, and now it is '3'" in err), err
