"""Publish reports of receipts: tables as Parquet, a page, pictures, JSON; replaced all at once.

    OUT/current            a symbolic link to the newest edition; what others read
    OUT/editions/NUMBER/   deliveries/ funnel/ latency/ stragglers/ reasons/ nodes/ hours/   Parquet
                           report.json   for dashboards, see docs/pipelines.md
                           report.html   a page that needs nothing else
                           pictures/NUMBER-REQUEST.png

Rule 1: an edition is complete before the link points at it, and is never changed after. The link is replaced by
        rename, so a reader who follows it once sees tables that belong together.
Rule 2: the edition before the newest stays, for who is reading it. What an edition that was not finished has left is
        removed by the next one.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from motorcade.pipelines import report
from motorcade.pipelines.receipts import COLUMNS, SLOW_AFTER, receipts
from motorcade.plugins.fanout.tables import RECEIPTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CURRENT: Final = "current"
EDITIONS: Final = "editions"

#: Editions that stay.
KEPT: Final = 2

#: Characters of a request's name in the name of its picture.
_NAME: Final = 80


def publish(
    spark: SparkSession,
    store: str,
    out: Path,
    *,
    request: str | None = None,
    slow_after: float = SLOW_AFTER,
    max_requests: int = report.MAX_REQUESTS,
) -> dict[str, Any]:
    """Make the next edition; how many receipts, deliveries and requests are in it."""
    number = 1 + max(_numbers(out), default=0)
    place = out / EDITIONS / f"{number:08d}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    stream = spark.read.format("motorcade").options(store=store, stream=RECEIPTS, if_missing="empty")
    tables = receipts(stream.schema(COLUMNS).load(), request=request, slow_after=slow_after)
    with tables.kept():
        for name, frame in tables.named().items():
            frame.write.parquet(str(place / name))
        counts = {"receipts": tables.once.count(), "deliveries": tables.deliveries.count()}
        data = report.collect(tables, max_requests=max_requests)
    _write(place, data)
    _point(out, place)
    _tidy(out, number)
    return {**counts, "requests": data["requests_total"], "edition": number}


def _numbers(out: Path) -> list[int]:
    """Return the numbers of finished editions: the link points at the newest."""
    try:
        return [int((out / CURRENT).readlink().name)]
    except (OSError, ValueError):
        return []


def _write(place: Path, data: report.Data) -> None:
    pictures = [report.png(request) for request in data["requests"]]
    (place / "pictures").mkdir()
    for index, (request, picture) in enumerate(zip(data["requests"], pictures, strict=True), 1):
        name = re.sub(r"[^\w.-]", "_", request["request_id"])[:_NAME]
        (place / "pictures" / f"{index:03d}-{name}.png").write_bytes(picture)
    (place / "report.json").write_text(json.dumps(data, ensure_ascii=False))
    (place / "report.html").write_text(report.html(data, pictures))


def _point(out: Path, place: Path) -> None:
    link = out / f".{CURRENT}.{secrets.token_hex(4)}"
    link.symlink_to(place.relative_to(out))
    link.replace(out / CURRENT)


def _tidy(out: Path, newest: int) -> None:
    for edition in (out / EDITIONS).iterdir():
        if not edition.name.isdigit() or not newest - KEPT < int(edition.name) <= newest:
            shutil.rmtree(edition, ignore_errors=True)
    for link in out.glob(f".{CURRENT}.*"):
        link.unlink(missing_ok=True)
