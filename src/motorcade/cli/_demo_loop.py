"""The last scene of the demonstration: the whole loop, on Spark.

    fleet table ─ SQL ─▶ audience ─▶ fan-out ─▶ vehicles ─▶ acknowledgements ─▶ receipts ─┬─▶ report, with a picture
                                                                                          └─▶ audit: is anything lost?

One Spark session does all of it, in a thread beside the vehicles; starting one takes longer than its work. What a user
would type instead is shown. Every figure is checked against what was put into the table, and the audit must be clean.

It has to be one and the same thread: a query is started with the data sources of the session that is active in its
thread, and that is the one which was started there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from motorcade.core.errors import MotorcadeError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from motorcade.pipelines.audience import AudienceCounts
    from motorcade.publisher.batches import Order

REQUEST: Final = "task_brakes_7"
SQL: Final = "SELECT vin FROM fleet WHERE model = 'van' AND firmware < 7"
PAYLOAD: Final = b'{"do": "update", "what": "brakes", "to": 7}'

ROWS: Final = 2000  #: of the table
AUDIENCE: Final = 400  #: vehicles that the query names
LATE: Final = 30  #: of them, that come after the message was sent
AWAY: Final = 5  #: of them, that never come
TWICE: Final = 20  #: rows that name a vehicle a second time
WRONG: Final = 3  #: rows of the audience without a proper VIN
FIRST: Final = 100_000  #: number of the first vehicle; other scenes have lower ones

PATIENCE: Final = 120.0  #: seconds for the vehicles; two cores are shared with Spark

Say = Callable[[str], None]
T = TypeVar("T")


class LoopError(MotorcadeError):
    """The loop did not close."""


@dataclass(frozen=True)
class LoopSettings:
    """Ports and directories of the demonstration."""

    port: int  #: of MQTT
    data: Path  #: of the node
    work: Path  #: for what is gone afterwards
    report: Path  #: for what stays


def vehicles() -> list[str]:
    """Return the VINs that the query should find."""
    from motorcade.core.vin import make_vin

    return [make_vin(FIRST + number) for number in range(AUDIENCE)]


async def play(settings: LoopSettings, say: Say) -> str:
    """Run the whole loop; return a line about the outcome."""
    from motorcade.fleet import Fleet, FleetOptions

    vins = vehicles()
    table = settings.work / "fleet.parquet"
    say(f"a table of {write_table(table)} rows; {AUDIENCE} vehicles are vans with old brakes")
    there, late = vins[: -LATE - AWAY], vins[-LATE - AWAY : -AWAY]
    with _spark(settings) as thread:
        starting = thread.run(thread.start)  # while the vehicles connect
        async with Fleet(FleetOptions(port=settings.port, vins=tuple(there))) as fleet:
            say(f"{len(there)} of them are there, {LATE} will come later, {AWAY} will not")
            await starting
            counts = await _send(thread, settings, table, say)
            await _answered(fleet.wait_until, lambda: fleet.figures().total.acked, len(there))
            async with Fleet(FleetOptions(port=settings.port, vins=tuple(late))) as others:
                await _answered(others.wait_until, lambda: others.figures().total.acked, LATE)
            say(f"{len(there) + LATE} vehicles have acknowledged it")
            await thread.run(_judge, thread.spark, settings, say)
    return f"{counts.vehicles} vehicles by SQL, {AUDIENCE - AWAY} acked, {AWAY} pending, none lost: audit clean"


async def _answered(
    wait_until: Callable[[Callable[[], bool], str, float], Awaitable[None]], acked: Callable[[], int], wanted: int
) -> None:
    await wait_until(lambda: acked() >= wanted, f"{wanted} vehicles acknowledge the message", PATIENCE)


def write_table(file: Path) -> int:
    """Write the fleet as Parquet: vans with old firmware, others, some twice, some with an invalid VIN."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from motorcade.core.vin import make_vin

    chosen = vehicles()
    rows = [(vin, "van", 4 + number % 3) for number, vin in enumerate(chosen)]
    rows += [(vin, "van", 4) for vin in chosen[:TWICE]]
    rows += [(f"VAN-{number}", "van", 5) for number in range(WRONG)]
    others = range(ROWS - len(rows))
    rows += [(make_vin(FIRST + AUDIENCE + number), ("van", "car")[number % 2], 7 + number % 2) for number in others]
    columns = zip(*rows, strict=True)
    pq.write_table(pa.table(dict(zip(("vin", "model", "firmware"), map(pa.array, columns), strict=True))), file)
    return len(rows)


# -- on Spark


class _Thread:
    """The thread that speaks to Spark."""

    def __init__(self, log: Path) -> None:
        self.spark: SparkSession | None = None
        self._log = log
        self._pool = ThreadPoolExecutor(1, "spark")

    def run(self, work: Callable[..., T], *given: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    def start(self) -> None:
        from motorcade.pipelines import session

        settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
        self.spark = session.start("local[2]", settings, "motorcade demo", self._log)

    def stop(self) -> None:
        from motorcade.pipelines import session

        self._pool.shutdown()
        if self.spark is not None:
            session.stop(self.spark)


@contextmanager
def _spark(settings: LoopSettings) -> Iterator[_Thread]:
    """Start a thread for Spark; stop it in any case."""
    thread = _Thread(settings.work / "spark.log")
    try:
        yield thread
    finally:
        thread.stop()


async def _send(thread: _Thread, settings: LoopSettings, table: Path, say: Say) -> AudienceCounts:
    from motorcade.publisher.batches import Order

    say(f'$ motorcade pipeline run audience --table fleet=… --sql "{SQL}" --request {REQUEST} …')
    order = Order(REQUEST, PAYLOAD)
    counts, accepted = await thread.run(_address, thread.spark, settings, table, order)
    say(
        f"{counts.rows} rows: {counts.vehicles} vehicles, {counts.duplicates} named twice, {counts.invalid_rows} no "
        f"VIN; {counts.batches} batches sent and acknowledged"
    )
    _expect("vehicles", counts.vehicles, AUDIENCE)
    _expect("rows that name a vehicle twice", counts.duplicates, TWICE)
    _expect("rows that are no VIN", counts.invalid_rows, WRONG)
    _expect("vehicles that the node accepted", accepted, AUDIENCE)
    return counts


def _address(spark: SparkSession, settings: LoopSettings, table: Path, order: Order) -> tuple[AudienceCounts, int]:
    from motorcade.pipelines import audience, runner
    from motorcade.pipelines.tables import QueryTable

    fleet = QueryTable("fleet", str(table), "parquet")
    with runner.RunDir(settings.work / "audience", "audience", {"request": REQUEST, "sql": SQL}) as folder:
        counts = audience.plan(spark, folder, order, [fleet], SQL)
        broker = {"fanout": f"mqtt://127.0.0.1:{settings.port}", "request": REQUEST}
        runner.follow(audience.sending(spark, folder, broker), folder, runner.Trigger())
        return counts, audience.progress(folder, counts)["accepted"]


def _judge(spark: SparkSession, settings: LoopSettings, say: Say) -> None:
    from motorcade.pipelines import audit

    store = f"rocksdb://{settings.data / 'store'}"
    _tell(_report(spark, store), settings, say)
    say("$ motorcade pipeline run audit")
    verdict = audit.run(spark, store)
    for line in verdict.lines():
        say(line)
    if not verdict.clean:
        raise LoopError(f"the audit found {verdict.wrong} deliveries that are not as they should be; see above")


def _report(spark: SparkSession, store: str) -> dict[str, Any]:
    from motorcade.pipelines import report
    from motorcade.pipelines.receipts import COLUMNS, receipts

    stream = spark.read.format("motorcade").options(store=store, stream="receipts")
    return report.collect(receipts(stream.schema(COLUMNS).load(), request=REQUEST))


def _tell(data: dict[str, Any], settings: LoopSettings, say: Say) -> None:
    from motorcade.pipelines import report

    page, picture = settings.report / "report.html", settings.report / "report.png"
    say(f"$ motorcade fanout report {REQUEST} --html {page} --png {picture}")
    settings.report.mkdir(parents=True, exist_ok=True)
    page.write_text(report.html(data))
    picture.write_bytes(report.png(data["requests"][0]))
    for line in report.text(data).splitlines():
        say(line)
    funnel = data["requests"][0]["funnel"]
    _expect("deliveries accepted", funnel["accepted"], AUDIENCE)
    _expect("deliveries acknowledged", funnel["acked"], AUDIENCE - AWAY)
    _expect("deliveries pending", funnel["pending"], AWAY)


def _expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise LoopError(f"{what}: {found} instead of {wanted}")
