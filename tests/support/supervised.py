"""`motorcade serve --nodes` as a process of its own, with real nodes or with stand-ins (`stub_node.py`).

with NodesProcess(2, stub=True) as nodes: ...          nodes.mqtt, nodes.http, nodes.pids(), nodes.output
python -m tests.support.supervised FOLDER N KEY=VALUE…   what such a process runs with stand-ins
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from tests.support.node import ROOT, START_PATIENCE, STOP_PATIENCE, Endpoint
from tests.support.ports import free_port, free_ports


class NodesProcess:
    """A supervisor and its nodes: the command, or, with stand-ins or for one node, a program that takes `KEY=VALUE`."""

    def __init__(
        self,
        count: int,
        *args: str,
        stub: bool = False,
        data: Path | None = None,
        env: dict[str, str] | None = None,
        asked: dict[int, dict[str, object]] | None = None,
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="motorcade-nodes-")
        self.folder = Path(self._own.name)
        self.data = data if data is not None else self.folder / "data"
        self.mqtt = Endpoint("127.0.0.1", free_port())
        self.http = Endpoint("127.0.0.1", free_ports(count))
        self.output: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._env = env or {}
        if stub or count == 1:
            listeners = [f"listeners.tcp.bind={self.mqtt}", "listeners.ws.bind=off", f"http.bind={self.http}"]
            command = [
                "-m",
                "tests.support.stub_supervisor",
                "stub" if stub else "real",
                str(self.data),
                str(count),
                *listeners,
            ]
        else:
            command = ["-m", "motorcade", "serve", "--nodes", str(count), "--data", str(self.data)]
            command += ["--mqtt", str(self.mqtt), "--ws", "off", "--http", str(self.http)]
        self.command = [sys.executable, *command, *args]
        for number, wishes in (asked or {}).items():
            self.ask(number, **wishes)

    def ask(self, number: int, **wishes: object) -> None:
        """Ask a stand-in for something, from its next start on."""
        path = self.data / f"node-{number}" / "asked.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wishes))

    def launch(self) -> Self:
        """Start it, and wait for nothing."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.process = subprocess.Popen(
            self.command,
            env=environment | {"PYTHONPATH": paths} | self._env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._collect, args=(self.process,), daemon=True)
        self._reader.start()
        return self

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            self.output.extend(lines)

    def start(self) -> Self:
        """Start it, and wait for the line with `ready`."""
        self.launch()
        self.until(lambda: self.ready_line is not None or not self.running, "all nodes are ready")
        assert self.running, self.log
        return self

    def until(self, condition: Callable[[], bool], what: str, patience: float = START_PATIENCE) -> None:
        """Wait for something that the processes bring about."""
        deadline = time.monotonic() + patience
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within {patience:g} s: {what}\n{self.log}"
            time.sleep(0.02)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def ready_line(self) -> str | None:
        return next((line for line in self.output if line.startswith("motorcade ") and " ready  " in line), None)

    @property
    def log(self) -> str:
        return "".join(self.output)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the log with this event."""
        found = []
        for line in list(self.output):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["event"] == name:
                found.append(event)
        return found

    def family(self) -> list[psutil.Process]:
        """All processes below the supervisor."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def pid(self, number: int) -> int:
        """Process of a node that is up, by the log."""
        ups = [event for event in self.events("node_up") if event["node"].endswith(f"-{number}")]
        return int(ups[-1]["pid"])

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for its end."""
        assert self.process is not None
        try:
            code = self.process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.log}") from None
        if self._reader is not None:
            self._reader.join(STOP_PATIENCE)
        return code

    def stop(self) -> None:
        """SIGTERM; it must exit with 0."""
        self.signal(signal.SIGTERM)
        code = self.exit_code()
        assert code == 0, f"exit code {code}:\n{self.log}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self.running and kind is None:
                self.stop()
        finally:
            self.remove()

    def remove(self) -> None:
        """Kill what is left, and remove the folder."""
        if self.running:
            family = self.family()
            self.signal(signal.SIGKILL)
            self.exit_code()
            for process in family:
                if process.is_running():
                    process.kill()
        self._own.cleanup()


def gone(processes: list[psutil.Process]) -> bool:
    """Return True if all of them have ended."""
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
