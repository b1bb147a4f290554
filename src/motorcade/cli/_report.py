"""The report about a request: started from the command line, shown there, written to files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motorcade.cli import _files
from motorcade.core.errors import MotorcadeError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ReportError(MotorcadeError):
    """There is nothing to report."""


def made(url: str, shown: str, request: str, slow_after: float, master: str) -> dict[str, Any]:
    """Make the data of the report in a Spark session of its own."""
    from motorcade.cli import _pipeline
    from motorcade.storage.readers import open_reader

    open_reader(url).close()  # what is wrong with it is told sooner, and in fewer words, than by Spark
    with _pipeline.session(master, None, f"motorcade fanout report {request}") as (spark, display):
        display.tell("reading receipts")
        return data(spark, url, shown, request, slow_after)


def data(spark: SparkSession, url: str, shown: str, request: str, slow_after: float) -> dict[str, Any]:
    """Return the data of the report; `shown` is the store's URL without its password."""
    # Not before there is a session: they cannot be imported without Spark, and starting one says what to do then.
    from motorcade.pipelines import report
    from motorcade.pipelines.receipts import COLUMNS, receipts
    from motorcade.plugins.fanout.tables import RECEIPTS

    stream = spark.read.format("motorcade").options(store=url, stream=RECEIPTS, if_missing="empty")
    found = report.collect(receipts(stream.schema(COLUMNS).load(), request=request, slow_after=slow_after))
    if not found["requests"]:
        raise ReportError(
            f"{shown} has no receipts of request {request!r}; `motorcade fanout list` names the requests of a node, "
            "whose receipts are kept for receipts_retention"
        )
    return found


def write(found: dict[str, Any], html: Path | None, png: Path | None) -> None:
    """Write the requested files: all of them, or none."""
    from motorcade.pipelines import report

    contents: dict[Path, bytes] = {}
    if html is not None:
        contents[html] = report.html(found).encode()
    if png is not None:
        contents[png] = report.png(found["requests"][0])
    _files.write(contents)
    for file in contents:
        print(f"written: {file}", file=sys.stderr)


def show(found: dict[str, Any]) -> None:
    from motorcade.pipelines import report

    print(report.text(found))
