"""A Motorcade node as a process of its own, for tests that look at it from outside.

The node gets a fresh data directory and free loopback ports. Its output is collected by a thread, so that a chatty
node never blocks on a full pipe, and is shown when a test fails to start or to stop it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

READY = re.compile(r"\bready\b")

#: Plugins of tests are loaded over the control port from temporary folders and from the repository.
PLUGIN_FOLDERS = [tempfile.gettempdir(), str(ROOT)]
PLUGIN_PATHS = {"MOTORCADE_HTTP__PLUGIN_PATHS": json.dumps(PLUGIN_FOLDERS)}

#: The setting with which the control port wants no token.
OPEN = {"MOTORCADE_HTTP__REQUIRE_TOKEN": "false"}

#: Seconds a node may take to say `ready`, and to exit after a signal. Generous: machines that run tests are busy.
START_PATIENCE = 60.0
STOP_PATIENCE = 60.0
#: Seconds for an answer of its control port.
PATIENCE = 60.0


@dataclass(frozen=True)
class Endpoint:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """From `HOST:PORT`."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RunningNode:
    """A node as its clients see it: where it listens, and where its data and its token are."""

    mqtt: Endpoint
    http: Endpoint | None = None

    def __init__(self, data: Path | None = None) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="motorcade-test-")
        self.folder = Path(self._own.name)
        self.data = data if data is not None else self.folder / "data"

    # An address for MQTT clients.

    @property
    def host(self) -> str:
        return self.mqtt.host

    @property
    def port(self) -> int:
        return self.mqtt.port

    @property
    def at(self) -> tuple[str, str]:
        """The option of commands that mean this node."""
        return ("--http", str(self.http))

    @property
    def auth(self) -> dict[str, str]:
        """The header that the control port wants."""
        path = self.data / "token"
        return {"Authorization": f"Bearer {path.read_text().strip()}"} if path.exists() else {}

    def web(self, path: str = "/api/v1") -> httpx.Client:
        """A client of the control port, below this path, that shows the token."""
        assert self.http is not None, "the node was started without its control port"
        return httpx.Client(base_url=f"http://{self.http}{path}", headers=self.auth, trust_env=False, timeout=PATIENCE)

    def remove(self) -> None:
        """Remove its folder; data that a test has given stay."""
        self._own.cleanup()


class NodeProcess(RunningNode):
    """`motorcade serve` under test.

    `mqtt`, `ws` and `http` are where it listens (`ws` and `http` only when asked for). `config` is the text of a TOML
    configuration file; `args` are appended to the command line; `env` is added to the environment. With `data` the
    node keeps its data there (so a second node can go on with it), else in a directory of its own. The control port
    wants the token that the node makes, which `web` shows and commands find; without `token` it is open.
    """

    def __init__(
        self,
        *args: str,
        config: str | None = None,
        data: Path | None = None,
        env: dict[str, str] | None = None,
        ws: bool = False,
        http: bool = False,
        token: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(data)
        self.args = args
        self.config = config
        self.env = ({} if token else OPEN) | (env or {})
        self.mqtt = Endpoint(host, free_port(host))
        self.ws = Endpoint(host, free_port(host)) if ws else None
        self.http = Endpoint(host, free_port(host)) if http else None
        self.process: subprocess.Popen[str] | None = None
        self.output: list[str] = []
        self._started = threading.Event()  # it is ready, or it will never be
        self._ready = False
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the node was not started"
        return self.process.pid

    def command(self) -> list[str]:
        """The command line of the node."""
        line = [sys.executable, "-m", "motorcade", "serve", "--mqtt", str(self.mqtt), "--data", str(self.data)]
        line += ["--ws", str(self.ws or "off"), "--http", str(self.http or "off")]
        if self.config is not None:
            path = self.folder / "motorcade.toml"
            path.write_text(self.config)
            line += ["--config", str(path)]
        return line + list(self.args)

    def start(self) -> Self:
        """Start the node and wait until it says `ready`."""
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            self.command(),
            env=environment | PLUGIN_PATHS | self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._collect, args=(self.process,), name="node-output", daemon=True)
        self._reader.start()
        self._started.wait(START_PATIENCE)
        if not self._ready:
            self.kill()
            raise AssertionError(f"the node did not become ready:\n{self.log}")
        return self

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.output.append(line)
                if READY.search(line):
                    self._ready = True
                    self._started.set()
        self._started.set()  # the end of the output

    @property
    def log(self) -> str:
        """Everything the node has printed."""
        return "".join(self.output)

    def stop(self) -> None:
        """SIGTERM; the node must exit with 0."""
        assert self.process is not None, "the node was not started"
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the node did not stop:\n{self.log}") from None
        self._finish()
        assert code == 0, f"the node exited with {code}:\n{self.log}"

    def kill(self) -> None:
        """SIGKILL, as a crash of the process."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_PATIENCE)
        self._finish()

    def _finish(self) -> None:
        if self._reader is not None:
            self._reader.join(STOP_PATIENCE)
        self.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process is None or self.process.poll() is not None:
            self._finish()
        elif kind is None:
            self.stop()
        else:
            self.kill()
