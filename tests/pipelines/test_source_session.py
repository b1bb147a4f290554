"""What a machine without Java or without Spark is told, and that nobody needs them who does not use pipelines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.clientserver import SHUTDOWN_FINALIZER_WORKER, FinalizerWorker  # type: ignore[import-untyped]

from motorcade.pipelines import PipelineError, session
from tests.support.cases import refusal
from tests.support.ports import free_port


def java(place: Path, says: str) -> str:
    """The home of a Java that says this about itself."""
    program = place / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return str(place)


def test_a_java_that_is_new_enough_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, says in ((17, 'openjdk version "17.0.15" 2025-04-15'), (25, 'openjdk version "25" 2025-09-16')):
        monkeypatch.setenv("JAVA_HOME", java(tmp_path / str(version), says))
        assert version == session.check_java()


def test_a_java_that_is_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one was tried, why that one, what is wrong with it, and what helps; wherever it was found."""
    path = os.environ["PATH"]
    for number, (says, told) in enumerate(
        (
            ('java version "1.8.0_402"', "it is Java 8"),
            ('openjdk version "11.0.2" 2019-01-15', "it is Java 11"),
            ("hello", "asked for its version, it says 'hello'"),
        )
    ):
        home = java(tmp_path / str(number), says)
        monkeypatch.setenv("JAVA_HOME", home)
        assert (
            f"Spark needs Java 17 or newer. {home}/bin/java (of JAVA_HOME={home}) is no such Java: {told}. Set "
            "JAVA_HOME to the folder of another one, which has bin/java in it, or unset it if the `java` of PATH will "
            "do"
        ) == refusal(PipelineError, session.start)
        monkeypatch.delenv("JAVA_HOME")
        monkeypatch.setenv("PATH", f"{home}/bin:{path}")
        assert (
            f"Spark needs Java 17 or newer. {home}/bin/java (the first one of PATH; JAVA_HOME is not set) is no such "
            f"Java: {told}. Install one (Debian: apt-get install openjdk-17-jre-headless), and set JAVA_HOME to its "
            "folder"
        ) == refusal(PipelineError, session.check_java)


def test_a_java_home_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in JAVA_HOME, `…/bin` instead of the folder above, a file that may not be run."""
    home = Path(java(tmp_path / "jdk", 'openjdk version "21"'))
    for wrong, why in ((tmp_path / "jkd", "there is no such folder"), (home / "bin", "there is no bin/java in it")):
        monkeypatch.setenv("JAVA_HOME", str(wrong))
        said = refusal(PipelineError, session.check_java)
        assert f"{wrong}/bin/java (of JAVA_HOME={wrong}) cannot be run: {why}. Set JAVA_HOME" in said
    (home / "bin" / "java").chmod(0o644)
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(PipelineError, match=r"cannot be run: Permission denied\. Set JAVA_HOME"):
        session.check_java()


def test_no_java_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        "Spark needs Java 17 or newer. There is no `java` in PATH, and JAVA_HOME is not set. Install one (Debian: "
        "apt-get install openjdk-17-jre-headless), and set JAVA_HOME to its folder if it is not in PATH"
    ) == refusal(PipelineError, session.check_java)


def test_which_clusters_are_on_this_machine() -> None:
    here = ["local[2]", "local-cluster[2,1,1024]", "spark://127.0.0.1:7077", "spark://localhost", "spark://[::1]:7077"]
    away = ["spark://127.0.0.1:7077,10.0.0.2:7077", "spark://master.example:7077", "yarn"]
    away.append("k8s://https://127.0.0.1:6443")  # its pods are elsewhere
    assert here == [master for master in [*here, *away] if session.is_here(master)]


def test_a_master_that_does_not_answer_is_named() -> None:
    master = f"spark://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(PipelineError, match=f"no Spark master at {master} .*refused.*refused.*--master"):
        session.check_master(master)
    with pytest.raises(PipelineError, match="'spark://host:port' is no master; write spark://HOST:PORT"):
        session.check_master("spark://host:port")
    # One that answers is enough.
    with socket.create_server(("127.0.0.1", 0)) as server:
        session.check_master(f"spark://127.0.0.1:{free_port()},127.0.0.1:{server.getsockname()[1]}")
    session.check_master("yarn")  # which is found by its configuration


def test_the_python_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting counts, then the environment; on this machine, what runs the driver."""
    monkeypatch.setenv("PYSPARK_PYTHON", "environment")
    session._choose_python("setting", here=False)
    assert "setting" == os.environ["PYSPARK_PYTHON"]
    session._choose_python(None, here=True)
    assert "setting" == os.environ["PYSPARK_PYTHON"]
    monkeypatch.delenv("PYSPARK_PYTHON")
    session._choose_python(None, here=False)
    assert "PYSPARK_PYTHON" not in os.environ
    session._choose_python(None, here=True)
    assert sys.executable == os.environ["PYSPARK_PYTHON"]


def test_why_java_does_not_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Not in those of the Java of an earlier run, which is still there and writes to its log and its output."""
    output = tmp_path / "spark.log"
    program = (
        "import sys, pathlib\n"
        "from motorcade.pipelines import PipelineError, session\n"
        "from pyspark import java_gateway\n"
        "output = pathlib.Path(sys.argv[1])\n"
        "earlier = [output.open('ab', 0), output.with_suffix('.out').open('ab', 0)]\n"
        "popen = java_gateway.Popen\n"
        "def slow(*args, **more):\n"
        "    for one in earlier: one.write(b'an earlier Java: java.io.EOFException\\n')\n"
        "    started = popen(*args, **more)\n"
        "    started.wait(60)\n"
        "    for one in earlier: one.write(b'an earlier Java: at last it ends\\n')\n"
        "    return started\n"
        "java_gateway.Popen = slow\n"
        "settings = {'spark.driver.extraJavaOptions': '-XX:+UseSerialGC -XX:+UseParallelGC'}\n"
        "try: session.start('local[1]', settings, output=output)\n"
        "except PipelineError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Java did not start: " in done.stdout, done.stderr
    assert "initialization of VM" in done.stdout
    assert "an earlier Java" not in done.stdout
    assert 2 == output.read_text().count("an earlier Java")


def test_nobody_needs_spark_who_does_not_use_it() -> None:
    """As after `pip install motorcade`: everything but the pipelines works, and those say what to install."""
    program = (
        "import sys\n"
        "for name in ('pyspark', 'pyarrow', 'matplotlib'): sys.modules[name] = None\n"
        "import motorcade.node, motorcade.cli, motorcade.storage.secondary, motorcade.pipelines\n"
        "try: motorcade.pipelines.register(object())\n"
        "except motorcade.pipelines.PipelineError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stderr
    assert "pip install 'motorcade[spark]'" in done.stdout


def test_what_py4j_is_telling_java_of_is_waited_for() -> None:
    """Java goes after the answer: without one py4j would write a traceback to standard error."""
    told: list[str] = []

    class Client:
        def __init__(self) -> None:
            self.finalizer_deque: deque[Any] = deque()
            self.is_connected = True

        def garbage_collect_object(self, target: str, _enqueue: bool) -> None:
            if self.is_connected:
                asked.set()
                time.sleep(0.1)
                told.append(target)

    client, asked = Client(), threading.Event()
    client.finalizer_deque.extend([(client, "second"), (client, "first")])
    FinalizerWorker(client.finalizer_deque).start()
    assert asked.wait(10)
    session._let_go(SimpleNamespace(_gateway_client=client))
    assert ["first"] == told
    client.finalizer_deque.append(SHUTDOWN_FINALIZER_WORKER)
