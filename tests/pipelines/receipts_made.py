"""Receipts made by hand, as rows of the stream and of mailboxes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from motorcade.core import record
from motorcade.core.message import Message
from motorcade.pipelines import audit, receipts
from motorcade.pipelines.sources import columns
from motorcade.pipelines.sources.datasource import columns_of
from motorcade.pipelines.sources.json_payloads import JsonPayloads
from motorcade.pipelines.sources.options import SourceKind
from tests.pipelines.lake import Lake

#: The beginning of an hour, in seconds since the epoch.
START = 1_790_002_800.0


def moment(seconds: float) -> datetime:
    """So many seconds after START."""
    return datetime.fromtimestamp(START + seconds, UTC)


def told(delivery: str, state: str, at: float, request: str = "r1", **more: Any) -> dict[str, Any]:
    """A receipt, `at` seconds after START."""
    return {
        "v": 1,
        "state": state,
        "vin": delivery.partition(".")[0],
        "request_id": request,
        "delivery_id": delivery,
        "time": START + at,
        "node": "n1",
        "attempt": 0,
        "reason": "",
    } | more


def records(rows: Iterable[dict[str, Any] | bytes], first: int = 1) -> list[tuple[int, str, bytes]]:
    """Offset, topic and payload, in this order; bytes are payloads as they are."""
    made = []
    for offset, row in enumerate(rows, first):
        if isinstance(row, bytes):
            made.append((offset, "$SDV-FANOUT/receipt/r1/V", row))
        else:
            topic = f"$SDV-FANOUT/receipt/{row['request_id']}/{row['vin']}"
            made.append((offset, topic, json.dumps(row).encode()))
    return made


def store(lake: Lake, rows: Iterable[dict[str, Any] | bytes]) -> None:
    """Append them to the stream, as a node would."""
    messages = [Message(topic, payload, 1) for _, topic, payload in records(rows)]
    lake.append("receipts", [record.encode(message) for message in messages])


def stream(spark: SparkSession, rows: Iterable[dict[str, Any] | bytes], first: int = 1) -> DataFrame:
    """The stream as the source reads it for receipts, with what it has parsed."""
    made = records(rows, first)
    schema = StructType.fromDDL(receipts.COLUMNS)
    assert isinstance(schema, StructType)
    payloads = pa.array([payload for _, _, payload in made], pa.binary())
    parsed = JsonPayloads(columns_of(SourceKind.STREAM, schema).json).column(payloads)
    return _frame(spark, [row[:2] for row in made], "offset LONG, topic STRING", json=parsed)


def unparsed(spark: SparkSession, rows: Iterable[dict[str, Any] | bytes], first: int = 1) -> DataFrame:
    """The stream as it was published."""
    return _frame(spark, records(rows, first), "offset LONG, topic STRING, payload BINARY")


def mailboxes(spark: SparkSession, deliveries: Iterable[str], stored: float = 0) -> DataFrame:
    """Entries that wait, all stored so many seconds after START."""
    split = [delivery.split(".") for delivery in deliveries]
    rows = [(f"fanout:{vin}", int(position), moment(stored)) for vin, position in split]
    return _frame(spark, rows, audit.COLUMNS)


def _frame(spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: str, **more: pa.Array) -> DataFrame:
    """Through Arrow: then no Python worker is needed to read it."""
    names = [column.split()[0] for column in schema.split(", ")]
    made = {name: pa.array([row[index] for row in rows], columns.TYPES[name]) for index, name in enumerate(names)}
    return spark.createDataFrame(pa.table(made | more))
