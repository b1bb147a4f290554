"""Data pipelines on Spark: streams become frames, frames become fan-outs.

    sources/    the data source `motorcade`: streams, Redis streams and mailboxes as frames
    session     a Spark session with what the source needs
    …           pipelines are functions from frame to frame, one file each

All of it needs the extra `motorcade[spark]` and Java 17 or newer. Nothing below this package imports it, and importing
it does not import Spark; that happens when something is done.

    spark = session.start()                                # has the source registered
    frame = spark.read.format("motorcade").option("store", "rocksdb://…").option("stream", "receipts").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from motorcade.core.errors import MotorcadeError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The message if the extra is not installed.
MISSING = "`pip install 'motorcade[spark]'` brings what pipelines need"


class PipelineError(MotorcadeError):
    """A pipeline cannot be run as it is asked for."""


def register(spark: SparkSession) -> None:
    """Make `format("motorcade")` known to a session."""
    try:
        from motorcade.pipelines.sources.datasource import MotorcadeDataSource  # noqa: PLC0415 - see above
    except ImportError as error:
        raise PipelineError(f"{error}; {MISSING}") from error
    spark.dataSource.register(MotorcadeDataSource)
