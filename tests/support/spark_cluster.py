"""A standalone Spark cluster of real processes on this machine: one master, and workers that start executors.

    with SparkCluster() as cluster:
        motorcade … --master cluster.url        with `cluster.environment` for the process of the driver
        cluster.tasks("app-…")                  how many tasks each executor of an application has finished
        cluster.executors()                     the processes of executors, for who wants to kill one

All of it is what the installed package ships, started by `spark-class` in the foreground. Ports are free ones of the
loopback interface. Each process has a session of its own, so that what it has started can be ended with it; signals go
to processes that were started here, and to no others.

The drivers' settings are in a `spark-defaults.conf`, as an administrator would give them to users: executors as large
as a worker allows, and no more shuffle partitions than a small cluster wants.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pyspark

from tests.support.node import ROOT
from tests.support.ports import free_port

HOST = "127.0.0.1"
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
EXECUTOR = "CoarseGrainedExecutorBackend"  #: in the command line of an executor

#: Seconds until master and workers know each other, and until a process has gone. Three JVMs on a busy machine.
START_PATIENCE = 90.0
STOP_PATIENCE = 15.0

MEMORY = "512m"  #: of a worker, and of the one executor that an application has there
DAEMON_MEMORY = "192m"  #: heap of master and workers themselves

#: For JVMs that live for seconds, on few cores: to compile much would not pay. A run of a small pipeline takes 16 s of
#: processor time instead of 27.
BRIEF_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}

SHOWN = 4000  # last characters of a log

DEFAULTS = f"""
spark.executor.memory {MEMORY}
spark.executor.cores 1
spark.driver.memory 512m
spark.sql.shuffle.partitions 2
spark.ui.enabled false
spark.master.rest.enabled false
"""

_FINISHED = re.compile(r"Executor: Finished task ")


class Daemon:
    """The master or a worker: a JVM in a session of its own, whose output goes to a file."""

    def __init__(self, name: str, words: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.log_file = folder / f"{name}.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [str(spark_home() / "bin" / "spark-class"), *words],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")[-SHOWN:]

    def executors(self) -> list[psutil.Process]:
        """Those that this worker has started and that run."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if is_executor(child)]

    def stop(self) -> None:
        """SIGTERM, by which a worker ends its executors; SIGKILL to all of the session if that does not help."""
        family = _family(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_PATIENCE)
        for process in still_running(family, STOP_PATIENCE):
            with suppress(psutil.NoSuchProcess):
                process.kill()


class SparkCluster:
    """A master and `workers` workers with one core each."""

    def __init__(self, workers: int = 2) -> None:
        self._wanted = workers
        self.folder = Path(tempfile.mkdtemp(prefix="motorcade-spark-"))
        self.url = f"spark://{HOST}:{free_port()}"
        self._page = free_port()
        self.master: Daemon | None = None
        self.workers: list[Daemon] = []

    # -- life

    def start(self) -> Self:
        """Start everything, and wait until the master lists all workers."""
        (self.folder / "conf").mkdir()
        (self.folder / "conf" / "spark-defaults.conf").write_text(DEFAULTS)
        try:
            port = self.url.rpartition(":")[2]
            self.master = self._daemon("master", MASTER, "--port", port, "--webui-port", str(self._page))
            for number in range(self._wanted):
                self.workers.append(self._worker(number))
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _worker(self, number: int) -> Daemon:
        words = ["--port", str(free_port()), "--webui-port", str(free_port()), "--cores", "1", "--memory", MEMORY]
        place = self.folder / f"worker-{number}"
        return self._daemon(place.name, WORKER, *words, "--work-dir", str(place), self.url)

    def _daemon(self, name: str, kind: str, *words: str) -> Daemon:
        return Daemon(name, [kind, "--host", HOST, *words], self.folder, self._daemon_environment())

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_PATIENCE
        while len(self.alive()) < self._wanted:
            daemons = [daemon for daemon in (self.master, *self.workers) if daemon is not None]
            if time.monotonic() > end or any(daemon.process.poll() is not None for daemon in daemons):
                logs = "\n".join(f"--- {daemon.log_file.name}\n{daemon.log}" for daemon in daemons)
                raise AssertionError(f"the Spark cluster did not become ready:\n{logs}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Workers first: one that loses its master keeps trying."""
        for daemon in (*self.workers, *([self.master] if self.master else [])):
            daemon.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- what others need, and what can be seen

    @property
    def environment(self) -> dict[str, str]:
        """For the process of a driver, beside what it has: a user of this cluster has its configuration."""
        return {"SPARK_CONF_DIR": str(self.folder / "conf"), "SPARK_LOCAL_IP": HOST, **BRIEF_JAVA}

    def _daemon_environment(self) -> dict[str, str]:
        """Executors inherit it from their worker: this is how the package under test is found there."""
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        return (
            os.environ
            | BRIEF_JAVA
            | {
                "SPARK_HOME": str(spark_home()),
                "SPARK_CONF_DIR": str(self.folder / "conf"),
                "SPARK_LOCAL_IP": HOST,
                "SPARK_LOCAL_DIRS": str(self.folder / "local"),
                "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            }
        )

    def state(self) -> dict[str, Any]:
        """What the master's page says, as JSON; nothing while there is no such page."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._page}/json/", timeout=10) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):  # while it starts, the page is there before the JSON is
            return {}

    def alive(self) -> list[dict[str, Any]]:
        return [worker for worker in self.state().get("workers", []) if worker["state"] == "ALIVE"]

    def applications(self) -> list[str]:
        """Identifiers of all there were, oldest first."""
        state = self.state()
        return sorted(app["id"] for app in [*state.get("activeapps", []), *state.get("completedapps", [])])

    def executors(self) -> list[psutil.Process]:
        return [executor for worker in self.workers for executor in worker.executors()]

    def tasks(self, application: str) -> dict[str, int]:
        """By `worker/executor`: how many tasks of an application it has finished, as its log says."""
        logs = self.folder.glob(f"worker-*/{application}/*/stderr")
        return {
            f"{log.parents[2].name}/{log.parent.name}": len(_FINISHED.findall(log.read_text(errors="replace")))
            for log in logs
        }


def spark_home() -> Path:
    return Path(pyspark.__file__).parent


def still_running(processes: Sequence[psutil.Process], patience: float) -> list[psutil.Process]:
    """Those that have not ended within so many seconds. `psutil.wait_procs` fails for some that end while it asks."""
    end = time.monotonic() + patience
    left = list(processes)
    while left := [process for process in left if _is_running(process)]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def is_executor(process: psutil.Process) -> bool:
    try:
        return any(EXECUTOR in word for word in process.cmdline())
    except psutil.Error:
        return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
