"""A pipeline: kilometres per vehicle and day, from a stream of trips to Parquet files.

motorcade stream create trips --topic 'fleet/+/trip'
python examples/pipelines/daily_distance.py --store rocksdb://motorcade-data/store --into lake/distance

Run it as often as you like: it goes on where it stopped (checkpoint beside the files), and every trip counts once.
"""

import argparse
from pathlib import Path

import pyspark.sql.functions as F
from pyspark.sql import DataFrame, SparkSession

from motorcade.pipelines import session

SCHEMA = "time TIMESTAMP, topic STRING, json STRUCT<km: DOUBLE>"


def trips(spark: SparkSession, store: str, stream: str) -> DataFrame:
    """Return the stream as a streaming frame; the source parses the JSON payload."""
    return spark.readStream.format("motorcade").options(store=store, stream=stream).schema(SCHEMA).load()


def distances(records: DataFrame) -> DataFrame:
    """Return one row per trip: VIN, day, kilometres. Payloads without `km` are dropped."""
    return records.select(
        F.split("topic", "/")[1].alias("vin"), F.to_date("time").alias("day"), F.col("json.km").alias("km")
    ).where("km IS NOT NULL")


def per_day(rows: DataFrame) -> DataFrame:
    """Return one row per vehicle and day."""
    return rows.groupBy("day", "vin").agg(F.sum("km").alias("km"), F.count("*").alias("trips")).orderBy("day", "vin")


def run(spark: SparkSession, store: str, stream: str, into: Path) -> None:
    """Append what is new to the Parquet files, then show the totals."""
    query = (
        distances(trips(spark, store, stream))
        .writeStream.format("parquet")
        .option("path", str(into))
        .option("checkpointLocation", str(into / "_checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    per_day(spark.read.parquet(str(into))).show(truncate=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--stream", default="trips")
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    started = session.start()
    try:
        run(started, given.store, given.stream, given.into)
    finally:
        session.stop(started)
