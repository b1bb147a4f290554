"""Frames to vehicles and to topics, through a real node: acknowledged, and vehicles addressed once.

Tasks are called as Spark calls them, with columns of Arrow; some tests go through Spark itself. Vehicles are sent to in
mode `append`, in which one that was addressed twice would have two messages.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources.brokers import SendCounts, noted
from motorcade.pipelines.sources.datasource import BatchSender, MotorcadeDataSource, StreamSender
from motorcade.pipelines.sources.fanouts import Fanouts
from motorcade.pipelines.sources.publishes import Publishes
from motorcade.publisher.batches import BatchTotals, Order
from motorcade.publisher.publisher import PublishError
from tests.pipelines.queries import to_the_end
from tests.support.consumers import connected, subscribe, unique
from tests.support.cutter import Cutter
from tests.support.fanout import fresh, get, request_name
from tests.support.flows import USER_PROPERTY
from tests.support.node import NodeProcess
from tests.support.operator import Operator, payload_of

CONTENT_TYPE = 0x03

TEXT, BINARY, NUMBER = StringType(), BinaryType(), IntegerType()


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


VINS = columns(vin=TEXT)
MESSAGES = columns(batch_id=TEXT, message=BINARY, vehicles=NUMBER)
TOPICS = columns(topic=TEXT, payload=BINARY)
PAIR = [("name", pa.string()), ("value", pa.string())]
PAIRS = ArrayType(columns(name=TEXT, value=TEXT))


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "memory://", http=True) as running:
        yield running


@pytest.fixture(scope="module")
def operator(node: NodeProcess) -> Iterator[Operator]:
    with Operator(node) as running:
        yield running


def url(node: NodeProcess | Cutter) -> str:
    return f"mqtt://127.0.0.1:{node.port}"


def fanout(node: NodeProcess | Cutter, request: str, schema: StructType = VINS, **options: Any) -> Fanouts:
    given = {"fanout": url(node), "request": request, "payload": "do it", "mode": "append"} | options
    return Fanouts.parse({key: str(value) for key, value in given.items()}, schema, streaming=False)


def vins(*parts: Sequence[str | None]) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict({"vin": pa.array(column, pa.string())}) for column in parts])


def encoded(order: Order, *some: Sequence[str], run: str = "run-0-") -> Iterator[pa.RecordBatch]:
    for number, targets in enumerate(some):
        name = f"{run}{number}"
        row = {"batch_id": [name], "message": [order.trigger(targets, name)], "vehicles": [len(targets)]}
        yield pa.RecordBatch.from_pydict(row)


def accepted(operator: Operator, request: str) -> Counter[str]:
    """How often each vehicle was accepted for a request, by the receipts."""
    found: Counter[str] = Counter()
    after = 0
    while page := operator.read("streams", "receipts", after=after, limit=1000):
        for message in page:
            receipt = json.loads(message["payload"])
            found[receipt["vin"]] += (receipt["state"], receipt["request_id"]) == ("accepted", request)
        after = page[-1]["position"]
    return +found


# -- vehicles


def test_vehicles_are_sent_to_in_batches_and_by_a_task_that_runs_again_once(
    node: NodeProcess, operator: Operator
) -> None:
    """Even if its rows come in another order. Another write is another one."""
    request, targets = request_name(), fresh(25)
    task = fanout(node, request, batch=10)
    assert SendCounts(3, BatchTotals(batches=3, accepted=25)) == task.send(vins(targets[:7], targets[7:] + targets[:2]))
    again = task.send(vins(targets[12:], list(reversed(targets[:12]))))
    assert BatchTotals(batches=3, accepted=25, repeated=3) == again.figures
    assert Counter(targets) == accepted(operator, request)
    fanout(node, request).send(vins(targets[:3]))
    assert Counter(targets + targets[:3]) == accepted(operator, request)


def test_answers_may_be_lost(node: NodeProcess, operator: Operator) -> None:
    """Batches that were in flight are sent again, over another connection, and are stored once."""
    request, targets = request_name(), fresh(300)
    with Cutter(node.port, 0.15, 7) as way:
        sent = fanout(way, request, batch=20, window=2).send(vins(targets))
        assert way.cuts > 0
    assert sent.reconnected > 0 and sent.sent_again > 0
    assert (15, 300) == (sent.figures.batches, sent.figures.accepted)
    assert Counter(targets) == accepted(operator, request)


@pytest.mark.slow
def test_a_broker_may_start_again_in_the_middle(tmp_path: Path) -> None:
    request, targets = request_name(), fresh(30)
    order = Order(request, b"do it", {"mode": "append"})
    first = NodeProcess(data=tmp_path / "data", http=True).start()
    second = NodeProcess(data=tmp_path / "data", http=True)
    second.mqtt, second.http = first.mqtt, first.http

    def rows() -> Iterator[pa.RecordBatch]:
        some = [*encoded(order, targets[:10], targets[10:20], targets[20:])]
        yield some[0]
        first.stop()
        second.start()
        yield from some[1:]

    try:
        sent = fanout(first, request, MESSAGES).send(rows())
        assert 1 == sent.reconnected
        assert (3, 30) == (sent.figures.batches, sent.figures.accepted)
        with Operator(second) as operator:
            assert Counter(targets) == accepted(operator, request)
    finally:
        first.kill()
        second.kill()


def test_encoded_batches_go_as_they_are(node: NodeProcess, operator: Operator) -> None:
    request, targets = request_name(), fresh(5)
    order = Order(request, b"do it", {"mode": "append", "priority": 3})
    task = fanout(node, request, MESSAGES)
    assert BatchTotals(batches=2, accepted=5) == task.send(encoded(order, targets[:2], targets[2:])).figures
    assert BatchTotals(batches=2, accepted=5, repeated=2) == task.send(encoded(order, targets[:2], targets[2:])).figures
    assert Counter(targets) == accepted(operator, request)


def test_a_refusal_ends_a_task_with_the_brokers_words(node: NodeProcess, operator: Operator) -> None:
    request, targets = request_name(), fresh(40)
    order = Order(request, b"do it")
    some = [[vin] for vin in targets]
    some[3] = ["NOVIN"]
    with pytest.raises(
        PublishError, match=r"batch run-0-3 \(1 vehicles\) was refused: ids\[0\]: 'NOVIN' is no VIN.*0x99"
    ):
        fanout(node, request, MESSAGES).send(encoded(order, *some))
    there = accepted(operator, request)
    assert 3 <= len(there) < 40 and {1} == set(there.values())


def test_a_vin_that_is_none_is_found_before_anything_is_sent(node: NodeProcess, operator: Operator) -> None:
    request, targets = request_name(), fresh(40)
    with pytest.raises(PipelineError, match=r"2 of the VINs of a task are none.*nothing of this task was sent"):
        fanout(node, request, batch=1).send(vins([*targets, "NOVIN", None]))
    assert not accepted(operator, request)


def test_a_broker_without_fan_out_is_told() -> None:
    order = Order("r", b"do it")
    with NodeProcess("--store", "memory://", config="[plugins.fanout]\nenabled = false\n") as plain:
        with pytest.raises(PublishError, match=r"the payload was not stored: .*is the plugin 'fanout' loaded"):
            fanout(plain, "r").send(vins(fresh(1)))
        bare = Fanouts.parse({"fanout": url(plain)}, MESSAGES, streaming=True)
        with pytest.raises(PublishError, match=r"batch run-0-0 \(1 vehicles\): .*is the plugin 'fanout' loaded"):
            bare.send(encoded(order, fresh(1)))


def test_a_broker_that_is_away_is_waited_for_but_not_for_ever(node: NodeProcess) -> None:
    with Cutter(node.port, 1.0, 1) as way, pytest.raises(PublishError, match=r"nothing was acknowledged for 0\.5 s"):
        fanout(way, "r", patience=0.5).send(vins(fresh(1)))


def test_the_driver_notes_what_tasks_have_sent(tmp_path: Path) -> None:
    task = Fanouts.parse({"fanout": "mqtt://h", "figures": str(tmp_path / "f")}, MESSAGES, streaming=True)
    one = SendCounts(2, BatchTotals(batches=2, accepted=9), reconnected=1, sent_again=3)
    task.line.note([one, one], 0)
    task.line.note([one], 1)
    task.line.note([one], 1)  # the batch was run again
    assert SendCounts(6, BatchTotals(batches=6, accepted=27), 3, 9) == noted(tmp_path / "f")
    assert SendCounts() == noted(tmp_path / "nowhere")


# -- topics


def publish(node: NodeProcess, rows: dict[str, Any], schema: StructType, **options: str) -> SendCounts:
    task = Publishes.parse({"publish": url(node)} | options, schema)
    batch = pa.RecordBatch.from_pydict(rows)
    return task.send(iter([batch.slice(0, 1), batch.slice(1)]))


def test_rows_are_published_to_a_stream(node: NodeProcess, operator: Operator) -> None:
    name = unique("trips")
    operator.create("streams", name, topics=[f"{name}/#"])
    rows = {
        "topic": [f"{name}/{number % 3}" for number in range(1200)],
        "payload": [b"\xff%d" % number for number in range(1200)],
        "content_type": [None, "text/plain"] * 600,
        "user_properties": pa.array(
            [[{"name": "n", "value": str(number)}, {"name": "n", "value": "x"}] for number in range(1200)],
            pa.list_(pa.struct(PAIR)),
        ),
    }
    schema = columns(topic=TEXT, payload=BINARY, content_type=TEXT, user_properties=PAIRS)
    assert SendCounts(1200) == publish(node, rows, schema)
    found = [*operator.read("streams", name, limit=1000)]
    found += operator.read("streams", name, after=found[-1]["position"], limit=1000)
    assert rows["topic"] == [message["topic"] for message in found]
    assert rows["payload"] == [payload_of(message) for message in found]


def test_properties_go_with_a_message(node: NodeProcess) -> None:
    topic, listener = unique("listened"), connected(node, unique("listener"), 5)
    subscribe(listener, topic)
    kinds: list[tuple[DataType, list[Any], pa.DataType, list[tuple[str, str]]]] = [
        (PAIRS, [{"name": "a", "value": "1"}, {"name": "a", "value": "2"}], pa.list_(pa.struct(PAIR)),
         [("a", "1"), ("a", "2")]),
        (MapType(TEXT, TEXT), [("a", "1"), ("b", None)], pa.map_(pa.string(), pa.string()), [("a", "1")]),
    ]  # fmt: skip
    for kind, given, type_, wanted in kinds:
        rows = {
            "topic": [topic] * 2,
            "payload": ["ä", None],
            "content_type": ["text/plain", None],
            "user_properties": pa.array([given, None], type_),
        }
        schema = columns(topic=TEXT, payload=TEXT, content_type=TEXT, user_properties=kind)
        assert 2 == publish(node, rows, schema).messages
        first, second = get(listener), get(listener)
        assert ("ä".encode(), "text/plain", wanted) == (
            first.payload,
            first.prop(CONTENT_TYPE),
            [tuple(pair) for pair in first.prop_all(USER_PROPERTY)],
        )
        assert (b"", None, []) == (second.payload, second.prop(CONTENT_TYPE), second.prop_all(USER_PROPERTY))
    listener.close()


def test_what_nobody_takes_is_an_error_unless_it_may_go(node: NodeProcess) -> None:
    rows = {"topic": [unique("nobody")], "payload": [b""]}
    with pytest.raises(PublishError, match=r"messages to 'nobody.*bind a stream or a queue"):
        publish(node, rows, TOPICS)
    assert 1 == publish(node, rows, TOPICS, unrouted="ignore").messages


def test_what_is_no_topic_is_named(node: NodeProcess) -> None:
    for topic in (None, "", "a/+", "a\0b"):
        rows = {"topic": pa.array([topic], pa.string()), "payload": [b""]}
        with pytest.raises(PipelineError, match="is no topic that can be published to"):
            publish(node, rows, TOPICS)


# -- through Spark


@pytest.mark.timeout(240)
def test_a_frame_is_written_to_topics_and_a_task_that_fails_says_why(
    spark: SparkSession, node: NodeProcess, operator: Operator
) -> None:
    targets, name = fresh(50), unique("copies")
    operator.create("streams", name, topics=[f"{name}/#"])
    frame = spark.createDataFrame([(f"{name}/{vin}", vin) for vin in targets], "topic STRING, payload STRING")
    frame.repartition(3).write.format("motorcade").option("publish", url(node)).mode("append").save()
    assert sorted(targets) == sorted(message["payload"] for message in operator.read("streams", name, limit=1000))
    wrong = spark.createDataFrame([("NOVIN",)], "vin STRING")
    writer = wrong.write.format("motorcade").options(fanout=url(node), request="r", payload="x")
    with pytest.raises(Exception, match="NOVIN' is no VIN"):
        writer.mode("append").save()


def dying() -> type[MotorcadeDataSource]:
    """The source, with tasks whose process dies at the first attempt: all is acknowledged, and Spark is not told.

    Defined here and not at the top of the module, so that Spark takes the classes to its workers by value.
    """

    def die_once() -> None:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingBatch(BatchSender):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            told = super().write(iterator)
            die_once()
            return told

    class DyingStream(StreamSender):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            told = super().write(iterator)
            die_once()
            return told

    class Dying(MotorcadeDataSource):
        @classmethod
        def name(cls) -> str:
            return "motorcade_dying"

        def writer(self, schema: StructType, overwrite: bool) -> DyingBatch:
            writer = super().writer(schema, overwrite)
            assert isinstance(writer, BatchSender)
            return DyingBatch(writer._sender)

        def streamWriter(self, schema: StructType, overwrite: bool) -> DyingStream:  # noqa: N802 - Spark's name
            writer = super().streamWriter(schema, overwrite)
            assert isinstance(writer, StreamSender)
            return DyingStream(writer._sender)

    return Dying


@pytest.mark.timeout(240)
def test_tasks_that_spark_runs_again_reach_nobody_twice(
    spark: SparkSession, node: NodeProcess, operator: Operator, tmp_path: Path
) -> None:
    """VINs of a frame, then encoded batches of a query; the process of each task dies when all of it is accepted."""
    spark.dataSource.register(dying())
    request, targets, figures = request_name(), fresh(60), tmp_path / "written"
    frame = spark.createDataFrame([(vin,) for vin in targets], "vin STRING").repartition(3)
    options = {"fanout": url(node), "request": request, "payload": "do it", "mode": "append", "batch": "5"}
    frame.write.format("motorcade_dying").options(**options, figures=str(figures)).mode("append").save()
    assert Counter(targets) == accepted(operator, request)
    told = noted(figures).figures
    assert (60, told.batches) == (told.accepted, told.repeated), "not every batch was there before it was sent again"

    request, targets, figures = request_name(), fresh(60), tmp_path / "followed"
    order = Order(request, b"do it", {"mode": "append"})
    plan = encoded(order, *(targets[first : first + 5] for first in range(0, 60, 5)))
    rows = [tuple(one.to_pylist()[0].values()) for one in plan]
    spark.createDataFrame(rows, MESSAGES).repartition(3).write.parquet(str(tmp_path / "plan"))
    query = spark.readStream.schema(MESSAGES).parquet(str(tmp_path / "plan")).writeStream.format("motorcade_dying")
    options = {"fanout": url(node), "request": request, "payload": "do it", "figures": str(figures)}
    options["checkpointLocation"] = str(tmp_path / "checkpoint")
    to_the_end(query.options(**options).trigger(availableNow=True).start)
    assert Counter(targets) == accepted(operator, request)
    assert BatchTotals(batches=12, accepted=60, repeated=12) == noted(figures).figures
