"""Reading a stream into Spark: beside a plain Python consumer, beside Spark's own reading of JSON, beside a live node.

    payload   count, sum of the payloads' lengths, highest offset: two columns
    rows      the same, and every other column is made and looked at
    parse     offset and payload only, and the sum of a field of the JSON in it: by from_json, or in Python by msgspec
    latency   p99 of a node's messages while Spark reads the stream they go into, against without

All that is compared runs in the same round, one after the other, in an order that rotates; a bar is held against the
median of the ratios of the rounds. Whoever reads gets the same two cores, the Redis server among them. Every reading
must come to the same sums.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from motorcade.core import record
from motorcade.core.message import Message
from motorcade.pipelines import session
from motorcade.storage import open_store
from motorcade.storage.ports import Durability
from runner.machine import process_tree

HERE = Path(__file__).resolve().parent

SIZES = (300_000, 1_000_000, 3_000_000)
APPEND = 2000  # records in one append
FILES = 8  # of JSON lines
NOW = 1_790_000_000.0
RATE = 500.0  # messages a second while the latency is measured

TELEMETRY = "speed INT, lat DOUBLE, lon DOUBLE, soc INT, vin STRING"
LINES = (
    "offset LONG, time TIMESTAMP, topic STRING, payload STRING, client STRING, username STRING, guid STRING, qos INT, "
    "retain BOOLEAN, content_type STRING, user_properties ARRAY<STRUCT<name: STRING, value: STRING>>, "
    "published TIMESTAMP"
)

#: What is read, and which of it is parsed: by the source, or by Spark.
MODES = ("payload", "rows", "parse", "from_json")
PARSING = ("parse", "from_json")

#: (name, what, against what, at least)
BARS = [
    ("plain", "rows/s in Spark against a plain Python consumer, one process", 1.0),
    ("plain2", "rows/s in Spark against a plain Python consumer, two processes", 0.0),
    ("json", "rows/s in Spark against Spark's own reading of the same rows as JSON", 0.5),
]


def message(number: int) -> Message:
    vin = f"LMCAAAAA9RA{number % 100_000:06}"
    payload = b'{"speed":%d,"lat":48.%06d,"lon":11.%06d,"soc":%d,"vin":"%s"}' % (
        number % 180, number * 7919 % 10**6, number * 104729 % 10**6, number % 101, vin.encode(),
    )  # fmt: skip
    return Message(
        f"v/{vin}/telemetry", payload, 1, publisher=vin, timestamp=NOW + number / 1000, guid=number.to_bytes(16, "big")
    )


async def fill(url: str, rows: int) -> None:
    store = await open_store(url, Durability.FAST)
    for start in range(1, rows + 1, APPEND):
        values = [record.encode(message(number)) for number in range(start, min(start + APPEND, rows + 1))]
        await store.streams.append("telemetry", values, NOW + start / 1000)
    await store.close()


def write_lines(folder: Path, rows: int) -> None:
    """The same rows as JSON, a line each."""
    folder.mkdir()
    for part in range(FILES):
        with (folder / f"{part}.json").open("w") as lines:
            for number in range(1 + rows * part // FILES, 1 + rows * (part + 1) // FILES):
                made = message(number)
                when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(made.timestamp)) + f".{number % 1000:03}Z"
                row = {
                    "offset": number, "time": when, "topic": made.topic, "payload": made.payload.decode(),
                    "client": made.publisher, "username": None, "guid": made.guid.hex(), "qos": 1, "retain": False,
                    "content_type": None, "user_properties": [], "published": when,
                }  # fmt: skip
                lines.write(json.dumps(row, separators=(",", ":")) + "\n")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    port = free_port()
    folder.mkdir()
    line = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(
        [*line, "--appendonly", "yes", "--appendfsync", "everysec"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


# -- who reads


def plain(url: str, rows: int, mode: str, processes: int) -> tuple[float, list[int]]:
    """So many processes, each with its part; the time from when they begin until the last is done."""
    edges = [rows * part // processes for part in range(processes + 1)]
    children = [
        subprocess.Popen(
            [sys.executable, HERE / "plain.py", url, str(low), str(high), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for low, high in pairwise(edges)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    begun = time.perf_counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    told = [json.loads(child.communicate()[0]) for child in children]
    seconds = time.perf_counter() - begun
    count, size_bytes, reached, speeds = zip(*(tell["sums"] for tell in told), strict=True)
    return seconds, [sum(count), sum(size_bytes), max(reached), sum(speeds)]


def sums_of(frame: DataFrame, mode: str) -> list[int]:
    """Of rows, bytes, offset and speed, as far as the mode has them."""
    wanted = ["count(1)", "sum(length(payload))", "max(offset)", "0"]
    if mode in PARSING:
        parsed = "json" if "json" in frame.columns else f"from_json(string(payload), '{TELEMETRY}')"
        wanted[1], wanted[3] = "0", f"sum({parsed}.speed)"
    elif mode == "rows":
        # Or Spark would not even look at those of a JSON file.
        wanted.append("count(topic) + count(client) + count(time) + count(qos) + count(guid) + count(published)")
    row = frame.selectExpr(*wanted).collect()[0]
    return [int(value) for value in row[:4]]


def spark_stream(spark: SparkSession, url: str, mode: str, rows: int) -> tuple[float, list[int]]:
    begun = time.perf_counter()
    reader = spark.read.format("motorcade").options(store=url, stream="telemetry", ending=str(rows))
    if mode == "parse":
        reader = reader.schema("offset LONG, json STRUCT<speed: INT>")
    elif mode != "rows":
        reader = reader.schema("offset LONG, payload BINARY")
    sums = sums_of(reader.load(), mode)
    return time.perf_counter() - begun, sums


def spark_lines(spark: SparkSession, folder: Path, mode: str) -> tuple[float, list[int]]:
    begun = time.perf_counter()
    sums = sums_of(spark.read.schema(LINES).json(str(folder)), mode)
    return time.perf_counter() - begun, sums


# -- rounds


@dataclass
class Figures:
    """Of each round, by (engine, mode, size, who)."""

    rates: dict[tuple[str, str, int, str], list[float]] = field(default_factory=dict)  #: rows a second
    cpu: dict[tuple[str, str, int, str], list[float]] = field(default_factory=dict)  #: microseconds a row, servers too

    def add(self, engine: str, mode: str, size: int, who: str, seconds: float, cpu: float) -> None:
        self.rates.setdefault((engine, mode, size, who), []).append(size / seconds)
        self.cpu.setdefault((engine, mode, size, who), []).append(cpu / size * 1e6)

    def median(self, engine: str, mode: str, size: int, who: str) -> float:
        return statistics.median(self.rates[engine, mode, size, who])

    def ratio(self, engine: str, mode: str, size: int, who: str) -> float:
        ours = self.rates[engine, mode, size, "spark"]
        theirs = self.rates[engine, mode, size, who]
        return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def rounds(
    spark: SparkSession, engine: str, url: str, lines: Path, size: int, arguments: argparse.Namespace, figures: Figures
) -> None:
    for mode in MODES:
        readers: list[tuple[str, Callable[[], tuple[float, list[int]]]]] = [
            ("spark", lambda mode=mode: spark_stream(spark, url, mode, size)),  # type: ignore[misc]
            ("plain", lambda mode=mode: plain(url, size, mode, 1)),  # type: ignore[misc]
            ("plain2", lambda mode=mode: plain(url, size, mode, 2)),  # type: ignore[misc]
            ("json", lambda mode=mode: spark_lines(spark, lines, mode)),  # type: ignore[misc]
        ]
        expected: list[int] | None = None
        for _, read in (readers[0], readers[3]):  # once unmeasured: the JVM compiles what it has seen a few times
            read()
        for number in range(arguments.rounds):
            for who, read in readers[number % 4 :] + readers[: number % 4]:
                before = ticks_by_process()
                seconds, sums = read()
                cpu = cpu_since(before)
                expected = expected or sums
                if sums != expected:
                    raise SystemExit(f"{who} on {engine} came to {sums}, others to {expected}: nothing was measured")
                figures.add(engine, mode, size, who, seconds, cpu)
                say(f"{engine} {mode} {size} {who}: {size / seconds:,.0f} rows/s, {cpu / size * 1e6:.2f} µs CPU a row")


def ticks_by_process() -> dict[int, int]:
    """Processor time of this process and of all that live below it, with that of children they have waited for."""
    ticks = {}
    for pid in process_tree(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        ticks[pid] = sum(map(int, fields[11:15]))
    return ticks


def cpu_since(before: dict[int, int]) -> float:
    """Seconds. What was used by a process that nobody has waited for is lost with it."""
    used = sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in ticks_by_process().items())
    return used / os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- latency


class Latency(NamedTuple):
    """p99 of one round, in milliseconds."""

    quiet: float
    looping: float  #: while the other core is busy with nothing, which costs something on many machines
    reading: float  #: while Spark reads on it


def latency(spark_cores: str, url: str, port: int, arguments: argparse.Namespace) -> list[Latency]:
    """The reader is a process of its own, on a core of its own."""
    found = []
    for _ in range(arguments.rounds):
        quiet = probe(port, arguments.seconds)
        loop = subprocess.Popen(["taskset", "-c", spark_cores, sys.executable, "-c", "while True: sum(range(10**6))"])
        try:
            looping = probe(port, arguments.seconds)
        finally:
            loop.kill()
            loop.wait()
        reader = subprocess.Popen(
            ["taskset", "-c", spark_cores, sys.executable, str(HERE / "run"), "--follow", url],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        reader.stdout.readline()  # it has read once, so everything is warm
        reading = probe(port, arguments.seconds)
        told = json.loads(reader.communicate()[0].splitlines()[-1])
        found.append(Latency(quiet["p99"], looping["p99"], reading["p99"]))
        say(f"latency: p99 {_shown(found[-1])}; Spark has read {told['rows']:,} rows")
    return found


def _shown(one: Latency) -> str:
    return f"{one.quiet:.2f} → {one.looping:.2f} → {one.reading:.2f}"


def probe(port: int, seconds: float) -> dict[str, float]:
    line = ["taskset", "-c", "0", sys.executable, str(HERE / "latency.py"), str(port), str(RATE), str(seconds)]
    return dict(json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout))


def follow(url: str) -> None:
    """Read the whole stream over and over until stdin ends."""
    spark = start("local[1]")
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
    rows = 0
    while not done.is_set():
        frame = spark.read.format("motorcade").options(store=url, stream="telemetry").load()
        rows += sums_of(frame, "rows")[0]
        print("read", flush=True)
    print(json.dumps({"rows": rows}), flush=True)
    spark.stop()


@contextmanager
def node(data: Path) -> Iterator[int]:
    port = free_port()
    config = data / "motorcade.toml"
    config.write_text('[plugins.streams.stream.telemetry]\ntopics = ["v/#"]\n')
    line = ["taskset", "-c", "0", sys.executable, "-m", "motorcade", "serve", "--config", str(config)]
    line += ["--mqtt", f"127.0.0.1:{port}", "--ws", "off", "--http", "off", "--data", str(data)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        while "ready" not in (told := process.stdout.readline()):
            if not told:
                raise SystemExit("the node did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield port
    finally:
        process.terminate()
        process.wait()


# -- the whole


def start(master: str) -> SparkSession:
    spark = session.start(
        master,
        {"spark.driver.memory": "2g", "spark.ui.enabled": "false", "spark.log.level": "ERROR"},
        "motorcade-bench",
    )
    spark.range(10).count()
    return spark


def report(figures: Figures, latencies: list[Latency], sizes: list[int]) -> tuple[str, bool]:
    lines = ["| engine | what | rows | Spark | plain, 1 process | plain, 2 processes | Spark, JSON files | bars |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    met = True
    for engine, mode, size in dict.fromkeys(key[:3] for key in figures.rates):
        rates = [
            f"{figures.median(engine, mode, size, who):,.0f}/s, "
            f"{statistics.median(figures.cpu[engine, mode, size, who]):.2f} µs"
            for who in ("spark", "plain", "plain2", "json")
        ]
        told = []
        for who, _, least in BARS:
            ratio = figures.ratio(engine, mode, size, who)
            if least and size == max(sizes):
                met = met and ratio >= least
                told.append(f"{ratio:.2f} × {who} (≥ {least:g}: {'met' if ratio >= least else 'missed'})")
            else:
                told.append(f"{ratio:.2f} × {who}")
        lines.append(f"| {engine} | {mode} | {size:,} | {' | '.join(rates)} | {'; '.join(told)} |")
    if latencies:
        ratio = statistics.median(one.reading / one.quiet for one in latencies)
        looping = statistics.median(one.looping / one.quiet for one in latencies)
        met = met and ratio <= 1.5
        lines.append("")
        lines.append(
            f"Latency of the node while Spark reads, p99: {ratio:.2f} × of without "
            f"(≤ 1.5: {'met' if ratio <= 1.5 else 'missed'}); while a loop that does nothing has Spark's core: "
            f"{looping:.2f} ×; rounds in ms, without, loop, Spark: {', '.join(map(_shown, latencies))}"
        )
    return "\n".join(lines), met


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/spark/run", description="Measures reading streams into Spark.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="rows, several with commas")
    parser.add_argument("--engines", default="rocksdb,redis")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of the latency (0: none)")
    parser.add_argument("--out", type=Path, help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every bar is met")
    parser.add_argument("--follow", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        follow(arguments.follow)
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    sizes = [int(size) for size in arguments.sizes.split(",")]
    figures, latencies = Figures(), list[Latency]()
    folder = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        spark = start("local[2]")
        for size in sizes:
            say(f"making {size:,} rows")
            write_lines(folder / f"lines-{size}", size)
            for engine in arguments.engines.split(","):
                _measure(spark, engine, folder, size, arguments, figures)
        spark.stop()
        if arguments.seconds:
            latencies = _latency(folder, sizes, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text, met = report(figures, latencies, sizes)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 1 if arguments.strict and not met else 0


def _measure(
    spark: SparkSession, engine: str, folder: Path, size: int, arguments: argparse.Namespace, figures: Figures
) -> None:
    lines = folder / f"lines-{size}"
    if engine == "rocksdb":
        url = f"rocksdb://{folder / f'store-{size}'}"
        asyncio.run(fill(url, size))
        rounds(spark, engine, url, lines, size, arguments, figures)
        return
    with redis_server(folder / f"redis-{size}") as url:
        wait_for(url)
        asyncio.run(fill(url, size))
        rounds(spark, engine, url, lines, size, arguments, figures)


def wait_for(url: str) -> None:
    import redis  # noqa: PLC0415

    client: Any = redis.Redis.from_url(url)
    end = time.monotonic() + 10
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _latency(folder: Path, sizes: list[int], arguments: argparse.Namespace) -> list[Latency]:
    data = folder / "node"
    data.mkdir()
    asyncio.run(fill(f"rocksdb://{data / 'store'}", max(sizes)))
    with node(data) as port:
        return latency("1", f"rocksdb://{data / 'store'}", port, arguments)


if __name__ == "__main__":
    sys.exit(main())
