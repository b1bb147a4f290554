"""A real node and a simulated fleet: what Spark makes of their receipts, beside what a subscriber was told meanwhile.

The expected values are counted from the receipts that were published live over MQTT, in plain Python. What Spark reads
is the store, beside the running node.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from pyspark.sql import SparkSession

from motorcade.client import Client
from motorcade.core.receipt import FINAL, State
from motorcade.core.vin import make_vin
from motorcade.fleet import Behaviour, Fleet, FleetOptions
from motorcade.pipelines import audit
from motorcade.pipelines.receipts import COLUMNS, receipts
from motorcade.storage.ports import Draft
from tests.pipelines.lake import NOW, Lake
from tests.pipelines.receipts_made import store, told
from tests.scenarios.witness import wait_until
from tests.support.fanout import Watch, batch
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.redis import RedisCluster

pytestmark = pytest.mark.timeout(500)

#: Seconds for anything that happens by itself, on a busy machine.
PATIENCE = 120.0

#: Seconds between two batches, so that the machine has time for the audit.
PAUSE = 0.05

CONFIG = """
[plugins.fanout]
ack_timeout = 3
retry_delay = 0.2
max_attempts = 2
"""

VINS = [make_vin(number) for number in range(1, 41)]
REFUSING, SILENT, AWAY = VINS[:5], VINS[5:8], VINS[8:18]
HERE = [vin for vin in VINS if vin not in AWAY]
STEADY = HERE[8:]


class Life:
    """Vehicles, and a platform that goes on sending to those that answer, in a thread of their own."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="life")
        self._fleet = Fleet(FleetOptions(port=node.port, vins=tuple(VINS)))
        self._traffic: Future[int] | None = None

    def do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE)

    def __enter__(self) -> Self:
        self._thread.start()
        self._fleet.behave(Behaviour(refuse=1.0), REFUSING)
        self._fleet.behave(Behaviour(ignore=1.0), SILENT)
        self.do(self._fleet.start(vins=HERE))
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._fleet.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def send(self, vins: list[str], request: str, **fields: Any) -> None:
        self.do(self._send(vins, request, **fields))

    async def _send(self, vins: list[str], request: str, **fields: Any) -> None:
        async with await Client.connect(port=self._node.port) as platform:
            assert 0 == await platform.publish("$SDV-FANOUT", json.dumps(batch(vins, request, **fields)).encode(), 1)

    def traffic(self, running: threading.Event, busy: threading.Event) -> None:
        """Send requests until the event is cleared; `busy` after the first one."""

        async def flow() -> int:
            number = 0
            while running.is_set():
                # Every other one replaces what may still be waiting.
                await self._send(STEADY, f"flow_{number // 2}")
                number += 1
                busy.set()
                await asyncio.sleep(PAUSE)
            return number

        self._traffic = asyncio.run_coroutine_threadsafe(flow(), self._loop)

    def quiet(self) -> int:
        """When no batch is sent any more: how many there were."""
        assert self._traffic is not None
        return self._traffic.result(PATIENCE)


@dataclass
class Told:
    """What a subscriber has heard, by delivery."""

    seen: list[dict[str, Any]]

    def histories(self, request: str | None = None) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for receipt in self.seen:
            if request in (None, receipt["request_id"]):
                found[receipt["delivery_id"]].append(receipt)
        return found

    def outcomes(self, request: str | None = None) -> Counter[str]:
        """How many deliveries are in which final state, or pending."""
        ends = [
            next((receipt["state"] for receipt in history if receipt["state"] in FINAL), "pending")
            for history in self.histories(request).values()
        ]
        return Counter(ends)

    def totals(self, request: str) -> list[float]:
        """Seconds from acceptance to acknowledgement."""
        times = [{item["state"]: item["time"] for item in history} for history in self.histories(request).values()]
        return sorted(moments["acked"] - moments["accepted"] for moments in times if "acked" in moments)


def settled(operator: Operator, watch: Watch) -> Told:
    """When nobody but those who are away has anything to get, and the subscriber has heard of all of it."""

    def over() -> bool:
        told_ = Told(watch.seen)
        open_ = {item[0]["vin"] for item in told_.histories().values() if not FINAL & {one["state"] for one in item}}
        return open_ <= set(AWAY) and all(
            told_.outcomes(view["request_id"])["pending"] == view["pending"]
            and len(told_.histories(view["request_id"])) == view["targets"]
            for view in operator.web.get("fanout/requests?limit=1000").json()["data"]
        )

    watch.gather(over, "everything is heard of")
    watch.nothing_more()
    return Told(watch.seen)


@pytest.mark.slow
def test_the_whole_loop(spark: SparkSession, tmp_path: Path) -> None:
    url = f"rocksdb://{tmp_path / 'data' / 'store'}"
    with (
        NodeProcess(config=CONFIG, data=tmp_path / "data", http=True) as node,
        Operator(node) as operator,
        Life(node) as life,
    ):
        with Watch(node) as watch:
            _story(life, operator)
            heard = settled(operator, watch)
        verdict = audit.run(spark, url)
        assert verdict.clean, verdict.as_dict()
        assert heard.outcomes() == Counter(verdict.outcomes)
        assert {"acked", "failed", "replaced", "expired", "cancelled", "pending"} == set(verdict.outcomes)
        alone = audit.run(spark, url, request="ota")
        assert heard.outcomes("ota") == Counter(alone.outcomes)
        _tables_are_right(spark, url, heard)
        _audited_while_it_moves(spark, url, life, len(heard.histories()))
    _damage_is_found(spark, url)


def _story(life: Life, operator: Operator) -> None:
    life.send(VINS, "ota")
    life.send(AWAY[:3], "ota")  # replaces theirs
    life.send(AWAY[3:6], "off")
    assert 200 == operator.web.post("fanout/requests/off/cancel").status_code
    life.send(AWAY[6:8], "brief", expires_in=0.1)
    life.send(STEADY[:2], "brief")

    def collected() -> bool:
        """What is over is collected each hour, or now; not all of it is over yet, if the machine is quick."""
        assert operator.web.post("fanout/gc").status_code in {202, 409}  # or one is under way
        return not any(operator.web.get(f"fanout/requests/{name}").json()["pending"] for name in ("brief", "off"))

    wait_until(collected, "what has expired or was called off is collected")


def _audited_while_it_moves(spark: SparkSession, url: str, life: Life, before: int) -> None:
    """Nothing is taken for lost because it was under way; and afterwards everything is there."""
    running, busy = threading.Event(), threading.Event()
    running.set()
    life.traffic(running, busy)
    try:
        assert busy.wait(PATIENCE)
        verdict = audit.run(spark, url)
    finally:
        running.clear()
        batches = life.quiet()
    assert verdict.clean, verdict.as_dict()
    assert before <= sum(verdict.outcomes.values()) <= before + batches * len(STEADY)
    after = audit.run(spark, url)
    assert after.clean, after.as_dict()
    assert before + batches * len(STEADY) == sum(after.outcomes.values())


def _tables_are_right(spark: SparkSession, url: str, heard: Told) -> None:
    frame = spark.read.format("motorcade").options(store=url, stream="receipts").schema(COLUMNS).load()
    tables = receipts(frame)
    with tables.kept():
        for row in tables.funnel.collect():
            request = row["request_id"]
            histories = heard.histories(request)
            assert len(histories) == row["accepted"], request
            outcomes = {name: row[name] for name in (*FINAL, "pending") if row[name]}
            assert heard.outcomes(request) == Counter(outcomes), request
            assert sum(any(one["state"] == "sent" for one in history) for history in histories.values()) == row["sent"]
        totals = {row["request_id"]: row for row in tables.latency.where("stage = 'total'").collect()}
        expected = heard.totals("ota")
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            assert pytest.approx(expected[math.ceil(share * len(expected)) - 1], abs=1e-5) == totals["ota"][name]
        late = {row["delivery_id"]: row for row in tables.stragglers.where("request_id = 'ota'").collect()}
        by_vin = {vin: {row["why"] for row in late.values() if row["vin"] == vin} for vin in VINS}
        assert all({"refused_0x83"} == by_vin[vin] for vin in REFUSING)
        assert all({"no_ack"} == by_vin[vin] for vin in SILENT)
        assert all({"never_sent"} == by_vin[vin] for vin in AWAY)
        states: Counter[str] = Counter()
        for row in tables.nodes.collect():
            states[row["state"]] += row["count"]
        assert Counter(receipt["state"] for receipt in heard.seen) == states


def _damage_is_found(spark: SparkSession, url: str) -> None:
    """Behind the node's back: an entry goes, another one comes, a third one is said to be over."""
    gone, kept, new = AWAY[8], AWAY[9], make_vin(900)
    with Lake(url) as lake:
        assert 1 == lake.do(lambda opened: opened.mailboxes.clear(f"fanout:{gone}"))
        lake.do(lambda opened: opened.mailboxes.append([f"fanout:{new}"], Draft(b"b", b"p"), NOW))
        store(lake, [told(f"{kept}.1", "acked", 0, "ota")])
    verdict = audit.run(spark, url, pause=0.0)
    assert {f"{gone}.1": "lost", f"{kept}.1": "final_and_pending", f"{new}.1": "never_accepted"} == {
        finding["delivery_id"]: finding["problem"] for finding in verdict.findings
    }
    assert 1 == verdict.exit_code


def test_what_ends_between_two_looks_at_a_redis_cluster_is_no_finding(
    spark: SparkSession, redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt of a replaced entry comes a moment after the entry has gone."""
    vin = make_vin(1)
    redis_cluster.empty()
    with Lake(redis_cluster.url) as lake:
        lake.do(lambda opened: opened.mailboxes.append([f"fanout:{vin}"], Draft(b"b", b"p"), NOW))
        store(lake, [told(f"{vin}.{number}", "accepted", 0) for number in (1, 2, 3)])
        late = [told(f"{vin}.2", str(State.REPLACED), 1), told(f"{vin}.4", "accepted", 1)]
        monkeypatch.setattr(audit, "sleep", lambda _seconds: store(lake, late))
        verdict = audit.run(spark, redis_cluster.url)
    assert {"replaced": 1, "pending": 1, "lost": 1} == verdict.outcomes
    assert [f"{vin}.3"] == [finding["delivery_id"] for finding in verdict.findings]
    assert 3 == verdict.upto
