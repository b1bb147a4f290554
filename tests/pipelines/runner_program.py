"""A pipeline that copies a stream into files, started as a process: STORE FOLDER LAKE TRIGGER."""

from __future__ import annotations

from pathlib import Path

import typer

from motorcade import cli
from motorcade.cli import _pipeline

#: So that a stream of some thousand records takes some time.
MAX_ROWS = 200


def copy(store: str, folder: Path, lake: str, trigger: str) -> None:
    with _pipeline.running(
        folder, "copy", {"store": store, "stream": "log"}, "local[1]", ["spark.driver.memory=1g"]
    ) as run:
        stream = run.spark.readStream.format("motorcade").options(store=store, stream="log", max_rows=MAX_ROWS)
        files = stream.load().writeStream.format("parquet").option("path", lake)
        outcome = run.follow(files, _pipeline.trigger_of(trigger, 0.1))
    _pipeline.ended(outcome, as_json=True)


if __name__ == "__main__":
    # Errors and exit codes are those of the command line.
    cli.app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    cli.app.command()(copy)
    cli.main()
