"""What pipelines that are killed work on: telemetry that never ends, and fleets to choose an audience from.

Feed     publishes numbered messages of all sorts to a stream of the node, and writes each down in a ledger when the
         node has acknowledged it
Fleet    a table of vehicles with duplicates, wrong VINs and others that nobody asks for; and who is meant
"""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from motorcade.client import Client
from motorcade.core.reasons import ReasonCode
from motorcade.core.vin import make_vin
from tests.chaos.spark_judge import Ledger

STREAM = "telemetry"
NODE = f"""
[plugins.streams.stream.{STREAM}]
topics = ["ecp/#"]
retention = 0
"""

SCHEMA = """
[types.position]
topics = ["ecp/+/position"]
fields = "vin STRING NOT NULL, n BIGINT NOT NULL, at TIMESTAMP NOT NULL"
time = "at"
key = ["vin", "n"]

[types.trip]
topics = ["ecp/+/trip"]
fields = "n BIGINT NOT NULL, text STRING"
"""

#: How often which message is published.
SORTS = {
    "position": 50,
    "late": 8,
    "repeated": 8,
    "trip": 20,
    "not_json": 3,
    "wrong_type": 3,
    "missing_field": 3,
    "no_type": 3,
    "too_late": 2,
}
VEHICLES = 50
WINDOW = 500  #: messages that have no answer yet
PATIENCE = 60.0  # seconds


class Feed:
    """A publisher in a thread of its own."""

    def __init__(self, port: int, random: Random, rate: float) -> None:
        self.ledger = Ledger()
        self._port = port
        self._random = random
        self._rate = rate
        self._number = 0
        self._ending = threading.Event()
        self._result: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """When everything that was published is acknowledged."""
        self._ending.set()
        self._result.result(PATIENCE)

    def _run(self) -> None:
        try:
            asyncio.run(self._publish())
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self._result.set_exception(error)
        else:
            self._result.set_result(None)

    async def _publish(self) -> None:
        loop = asyncio.get_running_loop()
        async with await Client.connect(port=self._port, client_id="feed") as client:
            begun, waiting = loop.time(), set[asyncio.Future[ReasonCode]]()
            while not self._ending.is_set():
                for topic, payload in self._next():
                    answer = await client.send(topic, payload, 1)
                    assert answer is not None
                    waiting.add(answer)
                if len(waiting) >= WINDOW:
                    await asyncio.gather(*waiting)  # raises what went wrong: the node is never killed here
                    waiting.clear()
                await asyncio.sleep(max(0.0, begun + self._number / self._rate - loop.time()))
            await asyncio.gather(*waiting)

    def _next(self) -> Iterator[tuple[str, bytes]]:
        """The next message, with its place in the ledger; one that is repeated comes twice.

        What is written down here and then not acknowledged ends the test anyway.
        """
        self._number += 1
        number, now = self._number, datetime.now(UTC)
        vin = make_vin(self._random.randrange(VEHICLES))
        sort = self._random.choices(list(SORTS), list(SORTS.values()))[0]
        topic = f"ecp/{vin}/{'trip' if sort == 'trip' else 'position'}"
        body: dict[str, object] = {"vin": vin, "n": number, "at": now.isoformat()}
        match sort:
            case "position" | "repeated" | "late":
                at = now - timedelta(days=self._random.randint(1, 4)) if sort == "late" else now
                body["at"] = at.isoformat()
                self.ledger.rows["position"][number] = at.date().isoformat()
            case "trip":
                body = {"n": number, "text": b64encode(self._random.randbytes(30)).decode()}
                self.ledger.rows["trip"][number] = ""
            case "wrong_type":
                body["n"] = f"x{number}"
            case "missing_field":
                del body["vin"]
            case "no_type":
                topic = f"ecp/{vin}/mood"
            case "too_late":
                body["at"] = (now - timedelta(days=30)).isoformat()
        payload = json.dumps(body).encode()
        if sort == "not_json":
            payload = payload[:-1]
        if sort not in {"position", "repeated", "late", "trip"}:
            self.ledger.dead[payload] = sort
        yield topic, payload
        if sort == "repeated":
            self.ledger.repeated += 1
            yield topic, payload


@dataclass(frozen=True)
class Fleet:
    """A table, the query that chooses from it, and who is meant by that."""

    table: Path
    audience: frozenset[str]

    SQL = "SELECT vin FROM fleet WHERE region = 'north'"

    @classmethod
    def make(cls, table: Path, vehicles: int, random: Random) -> Fleet:
        """So many that are meant; half as many others, every tenth twice, every hundredth wrong."""
        first = random.randrange(1_000_000)
        meant = [make_vin(first + number) for number in range(vehicles)]
        rows = [(vin, "north") for vin in meant]
        rows += [(vin, "north") for vin in meant[::10]]
        rows += [(f"{vin[:-1]}?", "north") for vin in meant[::100]]
        rows += [(make_vin(first + vehicles + number), "south") for number in range(vehicles // 2)]
        random.shuffle(rows)
        vins, regions = zip(*rows, strict=True)
        table.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"vin": vins, "region": regions}), table, row_group_size=max(1, len(rows) // 4))
        return cls(table, frozenset(meant))
