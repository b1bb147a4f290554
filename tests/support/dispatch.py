"""Leaders and workers as processes of their own, and what anybody can see of them in Redis.

    with Place(server) as place:                        a Redis server or a cluster, and a configuration for all
        worker, leader = place.worker(), place.leader()
        place.publish(b'{"n": 1}', b'{"n": 2}')
        place.wait_processed(2)

Everything that `Place` starts it stops: what still runs at the end must exit with 0 after SIGTERM, unless the test has
failed or has killed it itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import redis
import redis.cluster
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from tests.support.commands import Commands, run
from tests.support.node import READY, ROOT
from tests.support.ports import free_port
from tests.support.redis import RedisCluster, RedisServer

#: Seconds until something that should happen has happened. Generous: machines that run tests are busy.
PATIENCE = 60.0

#: Options of tests that count deliveries: no one loses a message or the lead only because the machine has let it wait
#: for some seconds. A process that dies is noticed all the same, by the end of its connections.
STEADY: dict[str, Any] = {"lease": 30.0, "ack_timeout": 60.0, "remember": 300.0}

SHOWN = 40  # last lines of a log

PUBLISHED, PROCESSED, PENDING, DEAD = "messages:published", "messages:processed", "messages:pending", "messages:dead"
LOCK, WORKERS = "distributed_leader_lock", "consumer:ids"

Entry = tuple[bytes, dict[bytes, bytes]]


def wait_until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Ask again and again until `condition` holds; a server that is away just now means that it does not."""
    end = time.monotonic() + patience
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < end, f"not within {patience:g} s: {what}"
        time.sleep(0.01)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return clean | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"} | dict(extra or {})


class Daemon:
    """`motorcade dispatch leader` or `worker`: started, signalled, listened to."""

    def __init__(self, words: list[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.words = words
        self.folder = folder
        self.env = dict(env or {})
        self.name = ""  #: of a worker: where it listens
        self.output: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._over = threading.Event()

    def launch(self) -> Self:
        """Start it, or start it again where it was, and do not wait."""
        self._ready, self._over = threading.Event(), threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "motorcade", "dispatch", *self.words],
            env=environment(self.env),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(
            target=self._collect, args=(self.process, self._ready, self._over), name="dispatch-output", daemon=True
        ).start()
        return self

    def start(self) -> Self:
        """Start it, and wait until it says `ready`."""
        self.launch()
        self._ready.wait(PATIENCE)
        if not self.running or not self._ready.is_set():
            self.kill()
            raise AssertionError(f"dispatch {' '.join(self.words)} did not become ready:\n{self.log}")
        return self

    def _collect(self, process: subprocess.Popen[str], ready: threading.Event, over: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line)
            if READY.search(line):
                ready.set()
        ready.set()
        over.set()

    @property
    def log(self) -> str:
        return "".join(self.output)

    @property
    def pid(self) -> int:
        assert self.process is not None, "it was not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether the process that runs now has said so."""
        return self.running and self._ready.is_set()

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """What it has logged under this name, with these values."""
        lines = [line for line in list(self.output) if f'"{name}"' in line and line.startswith("{")]
        found = [event for event in map(json.loads, lines) if event.get("event") == name]
        return [event for event in found if fields.items() <= event.items()]

    def wait_event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait until something is logged; the first of these events."""
        wait_until(lambda: self.events(name, **fields), f"{name} {fields or ''} is logged by {self.words[0]}")
        return self.events(name, **fields)[0]

    def kill(self) -> None:
        """SIGKILL: a crash."""
        if self.running:
            assert self.process is not None
            self.process.kill()
        self._reap()

    def pause(self) -> None:
        """SIGSTOP: a machine that hangs."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM; it must end with 0."""
        assert self.process is not None, "it was not started"
        if self.running:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)  # one that is paused would not hear of it
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"dispatch {' '.join(self.words)} did not stop:\n{self.log}") from None
        self._reap()
        assert self.process.returncode == 0, f"it ended with {self.process.returncode}:\n{self.log}"
        assert "Traceback" not in self.log, self.log

    def _reap(self) -> None:
        if self.process is not None:
            self.process.wait(PATIENCE)
            self._over.wait(PATIENCE)


class Place(Commands):
    """A Redis with leaders and workers around it. `options` are the [dispatch] section of their configuration."""

    def __init__(self, backing: RedisServer | RedisCluster, **options: Any) -> None:
        self.backing = backing
        self.options = options
        self._own = tempfile.TemporaryDirectory(prefix="motorcade-dispatch-")
        self.folder = Path(self._own.name)
        self.daemons: list[Daemon] = []
        self.redis = connect(backing)

    @property
    def url(self) -> str:
        return self.backing.url

    # What runs.

    def leader(self, *words: str, **options: Any) -> Daemon:
        """A dispatcher: it leads, or waits until it may."""
        daemon = Daemon(["leader", *self._config(options), *words], self.folder)
        self.daemons.append(daemon)
        return daemon.start()

    def worker(self, *words: str, port: int = 0, **options: Any) -> Daemon:
        port = port or free_port()
        daemon = Daemon(["worker", "--listen", f"127.0.0.1:{port}", *self._config(options), *words], self.folder)
        daemon.name = f"127.0.0.1:{port}"
        self.daemons.append(daemon)
        return daemon.start()

    def _config(self, options: Mapping[str, Any]) -> list[str]:
        """A file for one process."""
        path = self.folder / f"{len(self.daemons)}-{time.monotonic_ns()}.toml"
        # A worker that a test plays may never answer: leaders need not wait for it when they are stopped.
        values = {"redis": self.url, "stop_patience": 0.5} | self.options | dict(options)
        text = "[dispatch]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        tomllib.loads(text)
        path.write_text(text)
        return ["--config", str(path)]

    def command(self, *words: object) -> subprocess.CompletedProcess[str]:
        """`motorcade dispatch WORDS`, as an operator would."""
        return run("dispatch", *words, *self._config({}))

    # What is in Redis.

    def publish(self, *texts: bytes) -> None:
        line = self.redis.pipeline(transaction=False)
        for text in texts:
            line.xadd(PUBLISHED, {"payload": text})
        line.execute()

    def processed(self) -> list[Entry]:
        return list(self.redis.xrange(PROCESSED))

    def count(self) -> int:
        return int(self.redis.xlen(PROCESSED))

    def wait_processed(self, count: int, patience: float = PATIENCE) -> list[Entry]:
        """Wait for so many entries, and for everything to be finished with them; there may not be more."""
        wait_until(lambda: self.count() >= count, f"{count} processed", patience)
        self.wait_idle()
        entries = self.processed()
        assert count == len(entries)
        return entries

    def wait_idle(self) -> None:
        """Nothing is pending, and the stream has nothing that is not acknowledged."""
        wait_until(lambda: not self.pending(), "nothing is pending")

    def pending(self) -> int:
        return int(self.redis.zcard(PENDING)) + self.unacknowledged()

    def unacknowledged(self) -> int:
        try:
            return sum(int(group["pending"]) for group in self.redis.xinfo_groups(PUBLISHED))
        except redis.ResponseError:  # no such stream
            return 0

    def dead(self) -> list[Entry]:
        return list(self.redis.xrange(DEAD))

    # The end.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for daemon in reversed(self.daemons):  # leaders were started last
                if not daemon.running:
                    continue
                if kind is None:
                    daemon.stop()
                else:
                    daemon.kill()
        finally:
            for daemon in self.daemons:
                daemon.kill()
            self.redis.close()
            self._own.cleanup()


@pytest.fixture(scope="module")
def dispatch_redis() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def show(places: list[Place]) -> None:
    """Print what everybody has logged last."""
    for daemon in (daemon for one in places for daemon in one.daemons):
        print(f"--- dispatch {' '.join(daemon.words)}\n{''.join(daemon.output[-SHOWN:])}")


@pytest.fixture
def place_of(dispatch_redis: RedisServer) -> Iterator[PlaceOf]:
    """`place_of(lease=0.5)`: a Redis without data, options for all, and nobody around it yet."""
    dispatch_redis.empty()
    places: list[Place] = []

    def make(**options: Any) -> Place:
        places.append(stack.enter_context(Place(dispatch_redis, **options)))
        return places[-1]

    with contextlib.ExitStack() as stack:
        stack.callback(show, places)  # when all have ended; pytest prints it if the test has failed
        yield make


def connect(backing: RedisServer | RedisCluster) -> Any:
    """A client of redis-py that goes on after a failover."""
    if isinstance(backing, RedisServer):
        return redis.Redis(backing.host, backing.port, socket_timeout=60.0)
    nodes = [redis.cluster.ClusterNode(server.host, server.port) for server in backing.servers]
    return redis.cluster.RedisCluster(
        startup_nodes=nodes, socket_timeout=2.0, retry=Retry(ConstantBackoff(0.2), retries=50)
    )


PlaceOf = Callable[..., Place]


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Messages that can be told from each other."""
    return [b'{"n": %d}' % number for number in range(first, first + count)]


def texts(place: Place) -> list[bytes]:
    """The messages in the processed stream."""
    return [fields[b"payload"] for _, fields in place.processed()]


def numbers(place: Place) -> list[int]:
    """The numbers in the processed stream, sorted."""
    return sorted(json.loads(text)["n"] for text in texts(place))
