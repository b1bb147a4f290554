"""A Spark session that is ready for pipelines, embedded or on a cluster.

    spark = start()                              all cores of this machine
    spark = start("spark://host:7077")           a cluster; `motorcade[spark]` must be installed on its machines
    spark = start("local[2]", {"spark.driver.memory": "2g"})

Java is looked for before Spark is, because what Spark says without it helps nobody.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from motorcade.pipelines import MISSING, PipelineError, register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA: Final = 17

#: Seconds that Java may take to say its version.
JAVA_PATIENCE: Final = 30.0

#: What pipelines want and users may change.
SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",  # a pipeline shows its own
    "spark.sql.session.timeZone": "UTC",  # as everything in the store
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
}

#: On this machine only: 200 shuffle partitions, Spark's default, are for clusters; the interfaces are nobody else's.
LOCAL_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def start(master: str = "local[*]", settings: Mapping[str, str] | None = None, name: str = "motorcade") -> SparkSession:
    """A session with the source registered; one that this process has already is used again."""
    check_java()
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - importing takes a while, and it is an extra
    except ImportError as error:
        raise PipelineError(f"{error}; {MISSING}") from error
    chosen = SETTINGS | (LOCAL_SETTINGS if master.startswith("local") else {}) | dict(settings or {})
    # Workers run what runs the driver; on a cluster the machines have their own.
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def check_java() -> int:
    """The version of the Java that Spark will use; `PipelineError` if there is none, or an old one."""
    program = _java()
    if program is None:
        raise PipelineError(
            f"Spark needs Java {OLDEST_JAVA} or newer, and there is none: install one (Debian: apt-get install "
            f"openjdk-{OLDEST_JAVA}-jre-headless), or set JAVA_HOME to where it is"
        )
    try:
        done = subprocess.run(  # noqa: S603 - the Java that Spark would run anyway
            [program, "-version"], capture_output=True, text=True, timeout=JAVA_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PipelineError(f"{program} cannot be run: {error}") from error
    version = _version(done.stderr + done.stdout)
    if version is None or version < OLDEST_JAVA:
        what = f"Java {version}" if version is not None else "no Java that tells its version"
        raise PipelineError(
            f"Spark needs Java {OLDEST_JAVA} or newer, {program} is {what}; set JAVA_HOME to where a newer one is"
        )
    return version


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def _version(text: str) -> int | None:
    """17 of `openjdk version "17.0.15"`, 8 of `java version "1.8.0_402"`."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else None
