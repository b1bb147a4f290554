"""Receipts to tables, fleet tables to encoded batches, a stream to a lake: three sizes each, beside plain Python.

    receipts   the stream `receipts` of an embedded store → all tables → the data of the report
    audience   Parquet of VINs, some wrong, some twice → validated, each once → messages of 200 vehicles as Parquet
    ingest     a stream of an embedded store, of three types, some of it late, wrong or there twice → Parquet files

Cost should grow linearly: the rate at the largest size against that at the smallest is shown, and must not fall below
`LINEAR`. The plain programs (`plain_receipts.py` and so on) run in the same round, one process each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from read_bench import APPEND, HERE, NOW, cpu_since, say, start, ticks_by_process

from motorcade.core import receipt as receipts_
from motorcade.core import record
from motorcade.core.message import Message
from motorcade.core.receipt import Receipt, State, delivery_id
from motorcade.pipelines import audience, report, schema
from motorcade.pipelines import ingest as ingests
from motorcade.pipelines.ingest_run import Ingestion, IngestSource
from motorcade.pipelines.receipts import COLUMNS, receipts
from motorcade.pipelines.runner import RunDir, Trigger, follow
from motorcade.publisher.batches import Order
from motorcade.storage import open_store
from motorcade.storage.ports import Durability

SIZES = {
    "receipts": (300_000, 1_000_000, 3_000_000),  # events
    "audience": (1_000_000, 3_000_000, 10_000_000),  # vehicles
    "ingest": (100_000, 300_000, 1_000_000),  # messages
}
REQUESTS = 10
FILES = 8
LINEAR = 0.75  # of the rate at the smallest size, at the largest

Measured = tuple[float, Any]  #: seconds, and what must be the same whoever measures


# -- receipts


def history(vehicle: int) -> list[Receipt]:
    """Most vehicles get it at once, some after a retry, some never; three events on the average."""
    vin = f"LMCAAAAA9RA{vehicle % 1_000_000:06}"
    begun = NOW + vehicle / 500

    def told(state: State, after: float, attempt: int, reason: str = "") -> Receipt:
        return Receipt(
            state=state,
            vin=vin,
            request_id=f"campaign-{vehicle % REQUESTS}",
            delivery_id=delivery_id(vin, 1 + vehicle // 1_000_000),
            time=begun + after,
            node=f"n{vehicle % 3}",
            attempt=attempt,
            reason=reason,
        )

    events = [told(State.ACCEPTED, 0.0, 0)]
    match vehicle % 10:
        case 0:
            return events
        case 1:
            return [*events, told(State.SENT, 2.0, 1)]
        case 2 | 3:
            events += [told(State.SENT, 1.0, 1), told(State.RETRIED, 31.0, 1, "timeout"), told(State.SENT, 32.0, 2)]
            return [*events, told(State.ACKED, 32.5 + vehicle % 7, 2)]
        case _:
            return [*events, told(State.SENT, 0.5, 1), told(State.ACKED, 0.6 + vehicle % 97 / 10, 1)]


async def fill_receipts(url: str, events: int) -> None:
    store = await open_store(url, Durability.FAST)
    waiting: list[bytes] = []
    written = vehicle = 0
    while written < events:
        while len(waiting) < APPEND:
            for told in history(vehicle):
                topic = f"{receipts_.TOPIC}/{told.request_id}/{told.vin}"
                guid = (vehicle * 8 + len(waiting) % 8).to_bytes(16, "big")
                message = Message(topic, receipts_.encode(told), 1, timestamp=told.time, guid=guid)
                waiting.append(record.encode(message))
            vehicle += 1
        some = waiting[: min(APPEND, events - written)]
        del waiting[: len(some)]
        await store.streams.append("receipts", some, NOW + written / 1000)
        written += len(some)
    await store.close()


def spark_receipts(spark: SparkSession, url: str) -> Measured:
    begun = time.perf_counter()
    stream = spark.read.format("motorcade").options(store=url, stream="receipts")
    data = report.collect(receipts(stream.schema(COLUMNS).load()))
    seconds = time.perf_counter() - begun
    assert len(data["requests"]) == REQUESTS
    return seconds, {one["request_id"]: _pick(one["funnel"]) for one in data["requests"]}


def plain_receipts(url: str) -> Measured:
    told = _child("plain_receipts.py", url)
    return told["seconds"], {request: _pick(funnel) for request, funnel in told["funnels"].items()}


def _pick(funnel: dict[str, Any]) -> list[int]:
    return [funnel.get(name, 0) for name in ("accepted", "sent", "acked", "pending")]


# -- audience


def write_fleet(folder: Path, vehicles: int) -> None:
    """Rows of a fleet table: each VIN once, but for one in fifty, which comes twice; one in a thousand is wrong."""
    folder.mkdir()
    each = vehicles // FILES
    for part in range(FILES):
        numbers = np.arange(part * each, (part + 1) * each)
        numbers[::50] = numbers[0] + 1  # the same one again and again
        digits = np.char.zfill(numbers.astype("U"), 8)
        vins = np.char.add("LMCAAAAA9", digits)
        vins[7::1000] = np.char.replace(vins[7::1000], "LMC", "LMO")  # no VIN has an O
        table = pa.table({"vin": pa.array(vins), "model": pa.array(np.where(numbers % 4 == 0, "truck", "car"))})
        pq.write_table(table, folder / f"{part}.parquet")


def spark_audience(spark: SparkSession, fleet: Path, out: Path) -> Measured:
    begun = time.perf_counter()
    work = audience.sharing(spark, audience.PARTITIONS)
    work.read.parquet(str(fleet)).createOrReplaceTempView("fleet")
    plan = audience.planned(
        audience.chosen(work, "SELECT vin FROM fleet WHERE model = 'car'"), Order("bench", b"bench")
    )
    plan.write.mode("overwrite").parquet(str(out))
    seconds = time.perf_counter() - begun
    row = spark.read.parquet(str(out)).selectExpr("sum(vehicles)", "max(vehicles)").collect()[0]
    assert row[1] <= 200
    return seconds, int(row[0])


def plain_audience(fleet: Path, out: Path) -> Measured:
    told = _child("plain_audience.py", str(fleet), str(out))
    return told["seconds"], told["vehicles"]


# -- ingest

SCHEMA = """
[types.position]
topics = ["v/+/position"]
fields = "vin STRING NOT NULL, lat DOUBLE NOT NULL, lon DOUBLE NOT NULL, speed DOUBLE, soc INT, at TIMESTAMP"
time = "at"
key = ["vin", "at"]

[types.trip]
topics = ["v/+/trip"]
fields = "vin STRING NOT NULL, started BIGINT, legs ARRAY<STRUCT<km: DOUBLE, seconds: INT>>"
time = "started"
time_unit = "ms"
strict = true

[types.health]
topics = ["v/+/health"]
fields = "vin STRING NOT NULL, odometer DOUBLE, voltage DOUBLE, codes ARRAY<STRING>"
"""

PER_SECOND = 200  #: records; so the largest size is longer than duplicates are known
AGAIN = 49  #: every so many-th message is the one that came AGO before
AGO = 777
DAY = 86400.0

POSITION = b'{"vin":"%s","lat":48.%06d,"lon":11.%06d,"speed":%d.5,"soc":%d,"at":"%s"}'
TRIP = b'{"vin":"%s","started":%d,"legs":[{"km":%d.5,"seconds":%d},{"km":3.25,"seconds":240}]}'
HEALTH = b'{"vin":"%s","odometer":%d.1,"voltage":13.%d,"codes":["P0%03d","U0100"]}'

#: What can be wrong with a message; some of it only with those of one type.
WRONG: list[Callable[[str, bytes], tuple[str, bytes]]] = [
    lambda kind, body: (kind, body[:-2]),
    lambda kind, body: (kind, body + b"}"),
    lambda kind, body: (kind, body.replace(b'"lat":', b'"lat":"north","x":')),
    lambda kind, body: (kind, body.replace(b'"vin"', b'"win"')),
    lambda kind, body: (kind, body.replace(b'"at":"20', b'"at":"19')),
    lambda kind, body: (kind, body.replace(b'"legs"', b'"parts"')),
    lambda _kind, body: ("other", body),
]


def telemetry(number: int) -> Message:
    """Eight of ten are positions; one in twenty is of the day before, one in a hundred is wrong."""
    if number % AGAIN == 0 and number > AGO:
        return telemetry(number - AGO)
    name = f"LMCAAAAA9RA{number % 20_000:06}"
    vin = name.encode()
    recorded = NOW + number / PER_SECOND
    happened = recorded - 1.5 - (DAY if number % 21 == 7 else 0.0)
    match number % 10:
        case 8:
            kind, body = "trip", TRIP % (vin, happened * 1000, number % 90, number % 5000)
        case 9:
            kind, body = "health", HEALTH % (vin, number % 300_000, number % 10, number % 1000)
        case _:
            lat, lon = number * 7919 % 10**6, number * 104729 % 10**6
            at = datetime.fromtimestamp(happened, UTC).isoformat(timespec="milliseconds").encode()
            kind, body = "position", POSITION % (vin, lat, lon, number % 180, number % 101, at)
    if number % 97 == 0:
        kind, body = WRONG[number // 97 % len(WRONG)](kind, body)
    guid = number.to_bytes(16, "big")
    return Message(f"v/{name}/{kind}", body, 1, publisher=name, timestamp=recorded, guid=guid)


async def fill_telemetry(url: str, messages: int) -> None:
    store = await open_store(url, Durability.FAST)
    for first in range(1, messages + 1, APPEND):
        numbers = range(first, min(first + APPEND, messages + 1))
        values = [record.encode(telemetry(number)) for number in numbers]
        await store.streams.append("telemetry", values, NOW + first / PER_SECOND)
    await store.close()


def spark_ingest(spark: SparkSession, url: str, place: Path) -> Measured:
    """As `motorcade pipeline run ingest` does it, into a new lake."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "schema.toml").write_text(SCHEMA)
    types = schema.read(place / "schema.toml")
    begun = time.perf_counter()
    with (
        RunDir(place / "run", "ingest", {}) as folder,
        Ingestion(
            spark, folder, place / "lake", IngestSource(url, "stream", "telemetry"), types, ingests.IngestOptions()
        ) as one,
    ):
        one.open({"stream": "telemetry"})
        outcome = follow(one.writer(), folder, Trigger(), one.shown(lambda _batch: None))
    seconds = time.perf_counter() - begun
    return seconds, (rows_in(place / "lake"), dict(outcome.counts["dead"]), outcome.rows)


def plain_ingest(url: str, place: Path) -> Measured:
    shutil.rmtree(place, ignore_errors=True)
    told = _child("plain_ingest.py", url, str(place))
    return told["seconds"], (rows_in(place), told["dead"], told["read"])


def rows_in(lake: Path) -> dict[str, int]:
    """By table and day."""
    found: dict[str, int] = {}
    for file in lake.glob("[!.]*/*/*.parquet"):
        name = str(file.parent.relative_to(lake))
        found[name] = found.get(name, 0) + pq.read_metadata(file).num_rows
    return found


def _child(program: str, *arguments: str) -> dict[str, Any]:
    line = [sys.executable, str(HERE / program), *arguments]
    return dict(json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout))


# -- rounds


def rounds(
    what: str, size: int, times: int, ours: Callable[[], Measured], theirs: Callable[[], Measured]
) -> dict[str, list[float]]:
    """Rates of both, and processor time of ours."""
    rates: dict[str, list[float]] = {"spark": [], "plain": [], "cpu": []}
    ours()  # once unmeasured
    for _ in range(times):
        before = ticks_by_process()
        seconds, result = ours()
        cpu = cpu_since(before)
        other, expected = theirs()
        if result != expected:
            raise SystemExit(f"{what}: Spark came to {result}, plain Python to {expected}: nothing was measured")
        rates["spark"].append(size / seconds)
        rates["plain"].append(size / other)
        rates["cpu"].append(cpu / size * 1e6)
        say(
            f"{what} {size:,}: {size / seconds:,.0f}/s in Spark ({cpu / size * 1e6:.2f} µs), "
            f"{size / other:,.0f}/s plain"
        )
    return rates


def measure(spark: SparkSession, what: str, size: int, times: int, folder: Path) -> dict[str, list[float]]:
    say(f"making {size:,} of {what}")
    if what == "receipts":
        url = f"rocksdb://{folder / f'receipts-{size}'}"
        asyncio.run(fill_receipts(url, size))
        return rounds(what, size, times, lambda: spark_receipts(spark, url), lambda: plain_receipts(url))
    if what == "ingest":
        url = f"rocksdb://{folder / f'telemetry-{size}'}"
        asyncio.run(fill_telemetry(url, size))
        place = folder / "ingest"
        return rounds(
            what, size, times, lambda: spark_ingest(spark, url, place), lambda: plain_ingest(url, folder / "plain")
        )
    fleet, out = folder / f"fleet-{size}", folder / "batches"
    write_fleet(fleet, size)
    return rounds(
        what, size, times, lambda: spark_audience(spark, fleet, out), lambda: plain_audience(fleet, folder / "plain")
    )


def main(what: str, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench/spark/run {what}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES[what])), help="several with commas, growing")
    parser.add_argument("--out", type=Path, help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every bar is met")
    arguments = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    folder = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    lines = ["| what | size | Spark, `local[2]` | plain Python, one process | ratio |", "|---|---|---|---|---|"]
    medians: list[float] = []
    try:
        spark = start("local[2]")
        for size in map(int, arguments.sizes.split(",")):
            rates = measure(spark, what, size, arguments.rounds, folder)
            ratio = statistics.median(a / b for a, b in zip(rates["spark"], rates["plain"], strict=True))
            ours, theirs, cpu = (statistics.median(rates[who]) for who in ("spark", "plain", "cpu"))
            medians.append(ours)
            lines.append(f"| {what} | {size:,} | {ours:,.0f}/s, {cpu:.2f} µs | {theirs:,.0f}/s | {ratio:.2f} |")
        spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = medians[-1] / medians[0]
    met = grown >= LINEAR
    lines += [
        "",
        f"Rate at the largest size, of that at the smallest: {grown:.2f} (≥ {LINEAR}: {'met' if met else 'missed'})",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 1 if arguments.strict and not met else 0
