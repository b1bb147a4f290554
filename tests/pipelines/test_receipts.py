"""Tables over receipts made by hand: every number below can be counted in `STORY`."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from motorcade.pipelines.receipts import ReceiptTables, latency, parse, read, receipts
from tests.pipelines.receipts_made import START, moment, stream, told, unparsed

pytestmark = pytest.mark.timeout(240)

STORY: list[dict[str, Any] | bytes] = [
    # A.1: at once.
    told("A.1", "accepted", 0),
    told("A.1", "sent", 1.5, attempt=1),
    told("A.1", "acked", 2.25, attempt=1),
    # B.1: sent three times, acknowledged after more than an hour; most of it between the first and the last sending.
    told("B.1", "accepted", 0),
    told("B.1", "sent", 10, attempt=1),
    told("B.1", "retried", 40, attempt=1, reason="no_ack"),
    told("B.1", "sent", 50, attempt=2),
    told("B.1", "retried", 80, attempt=2, reason="session_ended"),
    told("B.1", "sent", 4000, attempt=3, node="n2"),
    told("B.1", "acked", 4003, attempt=3, node="n2"),
    # C.1: never there. D.1: in flight. E.1: refused, will be tried again.
    told("C.1", "accepted", 0),
    told("D.1", "accepted", 0),
    told("D.1", "sent", 3, attempt=1),
    told("E.1", "accepted", 0),
    told("E.1", "sent", 3, attempt=1),
    told("E.1", "retried", 4, attempt=1, reason="refused_0x83"),
    # F.1: given up; then something earlier is told, and the end once more.
    told("F.1", "accepted", 0),
    told("F.1", "sent", 5, attempt=1),
    told("F.1", "failed", 35, attempt=1, reason="no_ack"),
    told("F.1", "retried", 34, attempt=1, reason="no_ack"),
    told("F.1", "failed", 35, attempt=1, reason="no_ack"),
    # G.1 is replaced by G.2, which expires; H.1 is called off. I.1 has QoS 0.
    told("G.1", "accepted", 0),
    told("G.2", "accepted", 100),
    told("G.1", "replaced", 100, reason="reissued"),
    told("G.2", "expired", 200, reason="expires_in"),
    told("H.1", "accepted", 0),
    told("H.1", "cancelled", 60, reason="cancelled"),
    told("I.1", "accepted", 0),
    told("I.1", "acked", 7200, attempt=1, reason="qos0"),
    # F.1 and H.1 are acknowledged when they are over.
    told("F.1", "sent", 9000, attempt=1, reason="late_ack"),
    told("H.1", "sent", 9000, attempt=1, reason="late_ack"),
    # Another request, and what is no receipt.
    told("A.2", "accepted", 500, request="r2"),
    told("A.2", "sent", 501, request="r2", attempt=1),
    told("A.2", "acked", 501.125, request="r2", attempt=1),
    b"no JSON",
    b"\xff\xfe",
    b"[]",
    told("Z.1", "accepted", 0, v=2),
    told("Z.2", "vanished", 0),
    told("Z.3", "acked", 0, time=1e300),
    told("Z.4", "acked", 0, vin=None),
]  # fmt: skip


@pytest.fixture(scope="module")
def tables(spark_session: SparkSession) -> Iterator[ReceiptTables]:
    made = receipts(stream(spark_session, STORY))
    with made.kept():
        yield made


def test_payloads_come_to_the_same_as_what_the_source_has_parsed(spark: SparkSession) -> None:
    parsed, plain = (sorted(read(made(spark, STORY)).collect()) for made in (stream, unparsed))
    assert parsed == plain
    assert len(STORY) == len(parsed)


def rows(frame: DataFrame, *keys: str) -> dict[Any, Row]:
    """By one column, or by several."""
    found = frame.collect()
    by = {tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]]: row for row in found}
    assert len(by) == len(found)
    return by


def test_what_is_no_receipt_is_left_out(spark: SparkSession) -> None:
    assert len(STORY) - 7 - 2 == parse(stream(spark, STORY)).count()
    assert 3 == parse(stream(spark, STORY), "r2").count()


def test_deliveries(spark: SparkSession, tables: ReceiptTables) -> None:
    found = rows(tables.deliveries, "delivery_id")
    assert {
        "A.1": ("acked", "", 1, 0), "A.2": ("acked", "", 1, 0), "B.1": ("acked", "slow_retry", 3, 2),
        "C.1": ("accepted", "never_sent", 0, 0), "D.1": ("sent", "in_flight", 1, 0),
        "E.1": ("retried", "refused_0x83", 1, 1), "F.1": ("failed", "no_ack", 1, 1),
        "G.1": ("replaced", "reissued", 0, 0), "G.2": ("expired", "expires_in", 0, 0),
        "H.1": ("cancelled", "cancelled", 0, 0), "I.1": ("acked", "slow_answer", 1, 0),
    } == {key: (row.state, row.why, row.attempts, row.retries) for key, row in found.items()}  # fmt: skip
    times = {key: (row["wait"], row["retry"], row["answer"], row["total"]) for key, row in found.items()}
    assert (1.5, None, 0.75, 2.25) == times["A.1"]
    assert (10.0, 3990.0, 3.0, 4003.0) == times["B.1"]
    assert (None, None, None, None) == times["C.1"] == times["G.2"]
    assert (5.0, None, None, None) == times["F.1"]
    assert "n2" == found["B.1"].node
    assert {"qos0"} == {row.reason for row in found.values() if row.vin == "I"}


def test_the_funnel(spark: SparkSession, tables: ReceiptTables) -> None:
    found = rows(tables.funnel, "request_id")
    assert {"r1", "r2"} == set(found)
    first = found["r1"].asDict()
    assert {
        "request_id": "r1", "vehicles": 9, "accepted": 10, "sent": 5, "retried": 3, "pending": 3,
        "acked": 3, "replaced": 1, "failed": 1, "expired": 1, "cancelled": 1,
    } == {key: value for key, value in first.items() if not key.endswith("_at")}  # fmt: skip
    assert (START, START + 7200) == (first["first_at"].timestamp(), first["last_at"].timestamp())


def test_stragglers(spark: SparkSession, tables: ReceiptTables) -> None:
    """With how long they have waited: until their end, or until the newest receipt, or until a time that is given."""
    ages = {row.delivery_id: (row.why, row.age) for row in tables.stragglers.collect()}
    ended = {
        "B.1": ("slow_retry", 4003.0), "F.1": ("no_ack", 35.0), "G.2": ("expires_in", 100.0),
        "I.1": ("slow_answer", 7200.0),
    }  # fmt: skip
    waits = {"C.1": "never_sent", "D.1": "in_flight", "E.1": "refused_0x83"}
    assert ended | {key: (why, 7200.0) for key, why in waits.items()} == ages
    later = receipts(stream(spark, STORY), now=moment(10_000), slow_after=5000).stragglers
    del ended["B.1"]
    assert ended | {key: (why, 10_000.0) for key, why in waits.items()} == {
        row.delivery_id: (row.why, row.age) for row in later.collect()
    }


def test_counts_by_reason_node_and_hour(spark: SparkSession, tables: ReceiptTables) -> None:
    reasons = Counter({(row.request_id, row.state, row.why): row["count"] for row in tables.reasons.collect()})
    assert 10 - 1 == reasons.total()  # only A.1 has none
    assert 1 == reasons["r1", "failed", "no_ack"]
    nodes = {(row.request_id, row.node, row.state): row["count"] for row in tables.nodes.collect()}
    assert 1 == nodes["r1", "n2", "sent"] == nodes["r1", "n2", "acked"]
    assert 10 == nodes["r1", "n1", "accepted"]
    assert 1 == nodes["r1", "n1", "failed"]  # told twice
    hours = {(row.request_id, row.hour.timestamp(), row.state): row["count"] for row in tables.hours.collect()}
    assert 10 == hours["r1", START, "accepted"]
    assert 1 == hours["r1", START + 3600, "sent"]
    assert (1, 1) == (hours["r1", START + 3600, "acked"], hours["r1", START + 7200, "acked"])
    assert len(STORY) - 7 - 2 - 1 == sum(hours.values()) == sum(nodes.values())


def test_percentiles_are_values_of_the_data(spark: SparkSession) -> None:
    """The smallest value that so many are not above, counted by hand."""
    chance = random.Random(7)
    expected: dict[str, list[float]] = defaultdict(list)
    story = []
    for number in range(400):
        wait, answer = round(chance.expovariate(1 / 60), 3), round(chance.uniform(0.01, 5), 3)
        name = f"V{number}.1"
        story += [
            told(name, "accepted", 0),
            told(name, "sent", wait, attempt=1),
            told(name, "acked", round(wait + answer, 3), attempt=1),
        ]
        for stage, seconds in (("wait", wait), ("answer", answer), ("total", wait + answer)):
            expected[stage].append(seconds)
    chance.shuffle(story)  # an order that does not help
    found = rows(latency(receipts(stream(spark, story)).deliveries), "stage")
    assert expected.keys() == found.keys()
    for stage, values in expected.items():
        values.sort()
        row = found[stage]
        assert 400 == row["count"]
        assert pytest.approx(sum(values) / 400, abs=1e-5) == row["mean"]
        assert pytest.approx(values[-1], abs=1e-5) == row["max"]
        for name, share in {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}.items():
            assert pytest.approx(values[math.ceil(share * 400) - 1], abs=1e-5) == row[name], (stage, name)


def test_nothing_at_all(spark: SparkSession) -> None:
    empty = receipts(stream(spark, [b"none"]))
    with empty.kept():
        assert [[]] * 7 == [frame.collect() for frame in empty.named().values()]
