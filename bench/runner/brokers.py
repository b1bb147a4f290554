"""The brokers: how each is found or installed, started on one core, and stopped by its pid.

A broker is compared only when it is configured like the others: no limit that a workload reaches, nothing on
disk, Nagle's algorithm off. The files in peers/ and motorcade.toml hold that; README.md gives the reasons.
Workloads that need a disk are measured on the `stored` variants of a broker instead, for which the files are in
offline/.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .machine import BENCH, BUILD, OFFLINE, PEERS, REPOSITORY, BenchError, process_tree

START_SECONDS = 30.0
STOP_SECONDS = 10.0


class StartError(BenchError):
    """A broker ended, or did not listen, before it could be measured."""


class Broker:
    """A broker that can be measured. Subclasses say how it is installed and started."""

    name: str
    #: Workloads it cannot end in reasonable time -> why. They are left out, and the report says so.
    left_out: Mapping[str, str] = MappingProxyType({})
    #: What it prints when it serves, if it says so; otherwise it serves when it listens.
    ready: str | None = None
    #: The ways it is run for workloads that need messages to be kept on disk.
    stored: tuple[Broker, ...] = ()

    def prepare(self, install: bool) -> None:
        """Find the program, or install it when allowed. Raise BenchError when it cannot be had."""

    def command(self, folder: Path, port: int) -> list[str]:
        """What to run, with `folder` for its files, to serve MQTT on loopback `port`."""
        raise NotImplementedError

    def version(self) -> str:
        """For the head of the report. Called after prepare()."""
        raise NotImplementedError


class Motorcade(Broker):
    """The broker of this repository, from its virtualenv."""

    name = "motorcade"
    ready = " ready "
    program = REPOSITORY / ".venv" / "bin" / "motorcade"

    def prepare(self, install: bool) -> None:
        if not self.program.exists():
            raise BenchError("motorcade is not set up in .venv; run `make setup` first")

    def command(self, folder: Path, port: int) -> list[str]:
        listeners = ["--mqtt", f"127.0.0.1:{port}", "--ws", "off", "--http", "off"]
        config = ["--config", str(BENCH / "motorcade.toml")]
        return [str(self.program), "serve", *config, *listeners, "--data", str(folder / "data")]

    def version(self) -> str:
        python = self.program.with_name("python")
        code = "import platform, motorcade; print(motorcade.__version__, 'on Python', platform.python_version())"
        return _first_line([str(python), "-c", code])


class MotorcadeStored(Motorcade):
    """Motorcade with a store, and with its control port, which tells how late the event loop is."""

    def __init__(self, durability: str, url: str, promise: str) -> None:
        self.name = f"motorcade-{durability if url != 'memory://' else 'memory'}"
        self.durability = durability
        self.url = url
        self.promise = promise

    def command(self, folder: Path, port: int) -> list[str]:
        config = folder / "motorcade.toml"
        config.write_text((OFFLINE / "motorcade.toml").read_text().replace("{durability}", self.durability))
        listeners = ["--mqtt", f"127.0.0.1:{port}", "--ws", "off", "--http", "127.0.0.1:0"]
        place = ["--data", str(folder / "data"), "--store", self.url]
        return [str(self.program), "serve", "--config", str(config), *listeners, *place]

    def version(self) -> str:
        return f"{super().version()}; {self.promise}"


Motorcade.stored = (
    MotorcadeStored("safe", "rocksdb://", "acknowledges what is on disk, synced"),
    MotorcadeStored("fast", "rocksdb://", "acknowledges what was handed to the operating system"),
    MotorcadeStored("safe", "memory://", "acknowledges what is in memory; nothing outlives it"),
)


class Mosquitto(Broker):
    """The yardstick, from Debian's package."""

    name = "mosquitto"

    def prepare(self, install: bool) -> None:
        if self._program() is not None:
            return
        if not install or os.geteuid() != 0 or not shutil.which("apt-get"):
            raise BenchError("mosquitto is not installed; on Debian: `apt-get install mosquitto` as root")
        # RUNLEVEL=1 keeps the package from starting its own server, which nobody asked for.
        environment = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
        _install(["apt-get", "install", "-y", "-q", "--no-install-recommends", "mosquitto"], env=environment)

    def command(self, folder: Path, port: int) -> list[str]:
        config = folder / "mosquitto.conf"
        config.write_text((PEERS / "mosquitto.conf").read_text().format(port=port))
        return [str(self._program()), "-c", str(config)]

    def version(self) -> str:
        return _first_line([str(self._program()), "-h"]).removeprefix("mosquitto version ")

    @staticmethod
    def _program() -> str | None:
        return shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


class MosquittoStored(Mosquitto):
    """mosquitto with its persistence file, which it always writes as a whole."""

    def __init__(self, name: str, autosave: str, promise: str) -> None:
        self.name = name
        self.autosave = autosave
        self.promise = promise

    def command(self, folder: Path, port: int) -> list[str]:
        config = folder / "mosquitto.conf"
        template = (OFFLINE / "mosquitto.conf").read_text()
        config.write_text(template.format(port=port, folder=folder, autosave=self.autosave))
        return [str(self._program()), "-c", str(config)]

    def version(self) -> str:
        return f"{super().version()}; {self.promise}"


Mosquitto.stored = (
    MosquittoStored("mosquitto-lazy", "", "acknowledges what is in memory; writes it every 30 minutes and at its end"),
    MosquittoStored(
        "mosquitto-eager",
        "autosave_on_changes true\nautosave_interval 1",
        "acknowledges what is in memory, and writes all of it after every change",
    ),
)


class Aedes(Broker):
    """The usual broker of the JavaScript world, from npm, at the version of peers/package-lock.json."""

    name = "aedes"
    folder = BUILD / "aedes"

    def prepare(self, install: bool) -> None:
        if not shutil.which("node") or not shutil.which("npm"):
            raise BenchError("aedes needs node and npm")
        wanted, installed = PEERS / "package-lock.json", self.folder / "installed-lock.json"
        if installed.exists() and installed.read_bytes() == wanted.read_bytes():
            return
        if not install:
            raise BenchError("aedes is not installed, and --no-install was given")
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PEERS / "package.json", self.folder)
        shutil.copy(wanted, self.folder)
        _install(["npm", "ci", "--no-audit", "--no-fund"], cwd=self.folder)
        shutil.copy(wanted, installed)

    def command(self, folder: Path, port: int) -> list[str]:
        script = self.folder / "aedes.mjs"  # beside node_modules, where node looks for what it imports
        shutil.copy(PEERS / "aedes.mjs", script)
        return ["node", str(script), str(port)]

    def version(self) -> str:
        code = "const {readFileSync} = require('fs'); const p = 'node_modules/aedes/package.json';"
        code += "console.log(JSON.parse(readFileSync(p)).version, 'on node', process.version)"
        return _first_line(["node", "-e", code], cwd=self.folder)


class Amqtt(Broker):
    """The other broker in Python, from PyPI, in a virtualenv of its own."""

    name = "amqtt"
    folder = BUILD / "amqtt"
    python = folder / "bin" / "python"
    # It compares a message with one filter after the other, so the time grows with their number.
    left_out = MappingProxyType(
        {
            "varied-q1-100-1024": "5000 filters: a few hundred messages/s",
            "wildcard-10000": "10 000 filters: fewer than 200 messages/s",
            "memory-subscribed": "10 000 subscribed clients do not connect within 90 s",
            "latency-10000": "it does not reach 10 000 messages/s",
        }
    )

    def prepare(self, install: bool) -> None:
        wanted, installed = PEERS / "requirements.txt", self.folder / "requirements.txt"
        if installed.exists() and installed.read_bytes() == wanted.read_bytes():
            return
        if not install:
            raise BenchError("amqtt is not installed, and --no-install was given")
        venv.create(self.folder, with_pip=True, clear=True)
        _install([str(self.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(wanted)])
        shutil.copy(wanted, installed)

    def command(self, folder: Path, port: int) -> list[str]:
        return [str(self.python), str(PEERS / "amqtt_broker.py"), str(port)]

    def version(self) -> str:
        code = "import platform; from importlib.metadata import version;"
        return _first_line(
            [str(self.python), "-c", code + "print(version('amqtt'), 'on Python', platform.python_version())"]
        )


class Custom(Broker):
    """Any broker, started by the command line that the user gave."""

    def __init__(self, name: str, template: str) -> None:
        self.name = name
        self.template = template
        self.stored = (self,)  # whatever the command says

    def prepare(self, install: bool) -> None:
        words = shlex.split(self.template)
        if "{port}" not in self.template:
            raise BenchError("--broker-cmd must contain {port}")
        if not words or not shutil.which(words[0]):
            raise BenchError(f"--broker-cmd: no such program: {words[0] if words else ''}")

    def command(self, folder: Path, port: int) -> list[str]:
        return [word.replace("{port}", str(port)).replace("{dir}", str(folder)) for word in shlex.split(self.template)]

    def version(self) -> str:
        return f"`{self.template}`"


#: In the order of the report's columns.
BROKERS: dict[str, Broker] = {broker.name: broker for broker in (Motorcade(), Mosquitto(), Aedes(), Amqtt())}


class Running:
    """A broker that serves on `port`, pinned to one core."""

    def __init__(self, broker: Broker, port: int, core: int) -> None:
        self.broker = broker
        self.port = port
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self.log = self.folder / "output"
        self.command = ["taskset", "-c", str(core), *broker.command(self.folder, port)]
        self.process = self._start()
        try:
            self._await_service()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as output:
            return subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal must reach it through stop(), not before
            )

    def restart(self, number: signal.Signals, patience: float) -> float:
        """End the broker by this signal and start it again on the same files; seconds until it serves."""
        self.process.send_signal(number)
        self.process.wait(patience)
        started = time.monotonic()
        self.process = self._start()
        self._await_service(patience, 0.005)
        return time.monotonic() - started

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def control_address(self) -> str | None:
        """Where it tells its metrics, by its own words in its `ready` line."""
        found = re.search(r" ready .*\bhttp (\S+)", self.log.read_text(errors="replace"))
        return found[1] if found else None

    def stop(self) -> None:
        """End the broker and what it started, by pid, and remove its folder."""
        family = process_tree(self.pid)
        for number, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            for pid in family:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def _await_service(self, patience: float = START_SECONDS, pause: float = 0.05) -> None:
        deadline = time.monotonic() + patience
        while True:
            if self._serves():
                return
            if not self.alive or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise StartError(f"did not start: {said[-1]}")
            time.sleep(pause)

    def _serves(self) -> bool:
        if self.broker.ready and self.broker.ready not in self.log.read_text(errors="replace"):
            return False
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


def _install(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Run an installer with its output on stderr: stdout is for the report."""
    print("$ " + " ".join(command), file=sys.stderr, flush=True)
    if subprocess.run(command, check=False, cwd=cwd, env=env, stdout=sys.stderr).returncode:
        raise BenchError(f"`{' '.join(command)}` failed")


def _first_line(command: list[str], cwd: Path | None = None) -> str:
    answer = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True)
    lines = (answer.stdout or answer.stderr).strip().splitlines()
    return lines[0] if lines else "unknown version"
