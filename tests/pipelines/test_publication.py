"""Editions of what receipts tell: complete before they are seen, and bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from motorcade.core import record
from motorcade.core.message import Message
from motorcade.pipelines import publication
from tests.pipelines.lake import Lake
from tests.pipelines.receipts_made import told

pytestmark = pytest.mark.timeout(240)


def test_an_edition_is_seen_when_it_is_complete(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever runs before it have left: the newest stays beside it, what is older or was not finished goes."""
    url, out = f"rocksdb://{tmp_path / 'store'}", tmp_path / "out"
    receipts = [
        told("A.1", "accepted", 0, "r/../1"),
        told("A.1", "acked", 1, "r/../1"),
        told("B.1", "accepted", 0, "r2"),
    ]
    with Lake(url) as lake:
        messages = [Message("$SDV-FANOUT/receipt/r/A", json.dumps(receipt).encode(), 1) for receipt in receipts]
        lake.append("receipts", [record.encode(message) for message in messages])
    for left in ("00000006/old", "00000007/newest", "00000008/deliveries/unfinished"):
        (out / "editions" / left).mkdir(parents=True)
    (out / "current").symlink_to("editions/00000007")
    (out / ".current.1a2b3c4d").symlink_to("editions/00000008")
    made = publication.publish(spark, url, out, max_requests=1)
    assert {"receipts": 3, "deliveries": 2, "requests": 2, "edition": 8} == made
    assert Path("editions/00000008") == (out / "current").readlink()
    assert ["00000007", "00000008"] == sorted(edition.name for edition in (out / "editions").iterdir())
    assert ["current", "editions"] == sorted(entry.name for entry in out.iterdir())
    tables = {"deliveries", "funnel", "latency", "stragglers", "reasons", "nodes", "hours"}
    files = {"report.json", "report.html", "pictures"}
    assert tables | files == {entry.name for entry in (out / "current").iterdir()}
    assert not (out / "current" / "deliveries" / "unfinished").exists()
    (picture,) = (out / "current" / "pictures").iterdir()
    assert "001-r_.._1.png" == picture.name, "a name of somebody else's is no path"
    assert 2 == json.loads((out / "current" / "report.json").read_text())["requests_total"]
