# ruff: noqa: INP001 - a single file, which is handed to spark-submit
"""What `spark-submit` runs: the command line of Motorcade, in a driver that Spark has started."""

from __future__ import annotations

from motorcade.cli import main

main()
