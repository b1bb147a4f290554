"""Who is killed: the node, and the server it keeps its state in.

    Backing   the store behind the node: a directory, one Redis server, a cluster of them, or nothing at all
    Victim    the node, again and again: same port, same data, another process

A kill is SIGKILL to a process that was started here. Between SIGKILL and the next start nothing is tidied up.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from tests.support.node import Endpoint, NodeProcess
from tests.support.ports import free_port
from tests.support.redis import RedisCluster, RedisServer

ENGINES = ("memory", "rocksdb", "redis", "redis+cluster")

#: No queue may drop anything: what is not delivered shall be the fault of the kill, never of a limit.
CONFIG = """
[session]
queue = 10000000
queue_bytes = 0
"""


class NotReadyError(Exception):
    """A node did not come up; nothing can be tried on it any more."""


class Backing:
    """What the node keeps its state in."""

    def __init__(self, engine: str, data: Path) -> None:
        self.engine = engine
        self.data = data
        self.server: RedisServer | None = None
        self.cluster: RedisCluster | None = None

    def start(self) -> None:
        if self.engine == "redis":
            self.server = RedisServer().start()
        elif self.engine == "redis+cluster":
            self.cluster = RedisCluster().start()

    @property
    def url(self) -> str:
        if self.server is not None:
            return self.server.url
        if self.cluster is not None:
            return self.cluster.url
        return f"{self.engine}://"

    def kill(self, random: Random) -> RedisServer:
        """Kill the server, or one of the masters; returns the one that has to be started again."""
        victim = self.server or random.choice(self.cluster.masters() if self.cluster is not None else [])
        victim.kill()
        return victim

    def remove(self) -> None:
        if self.server is not None:
            self.server.remove()
        if self.cluster is not None:
            self.cluster.remove()


class Victim:
    """One node in the eyes of its clients; many processes, one after the other."""

    def __init__(
        self, backing: Backing, data: Path, *, durability: str = "", config: str = "", http: bool = False
    ) -> None:
        self.address = Endpoint("127.0.0.1", free_port())
        self.backing = backing
        self.data = data
        self.starts = 0
        self.config = CONFIG + (f'[store]\ndurability = "{durability}"\n' if durability else "") + config
        self._http = http
        self.tracebacks: list[str] = []
        self._process: NodeProcess | None = None

    async def start(self) -> None:
        """Start, and wait until the node is ready."""
        try:
            await asyncio.to_thread(self._new().start)
        except AssertionError as error:
            raise NotReadyError(f"process {self.starts}: {error}") from None

    async def start_and_kill(self, seconds: float) -> None:
        """Start, and kill so many seconds later, ready or not."""
        node = self._new()
        starting = asyncio.create_task(asyncio.to_thread(node.start))
        while node.process is None and not starting.done():  # noqa: ASYNC110 - the thread has no event for it
            await asyncio.sleep(0.001)
        await asyncio.sleep(seconds)
        self.strike()
        try:
            await starting
        except AssertionError:
            pass  # it was not ready yet, and now it never will be
        await self.kill()

    def _new(self) -> NodeProcess:
        assert self._process is None, "there is a node already"
        self.starts += 1
        node = NodeProcess("--store", self.backing.url, config=self.config, data=self.data, http=self._http)
        node.mqtt = self.address
        self._process = node
        return node

    @property
    def http(self) -> Endpoint:
        """The control port of the present process."""
        assert self._process is not None and self._process.http is not None, "there is none"
        return self._process.http

    @property
    def auth(self) -> dict[str, str]:
        """The header that its control port wants."""
        assert self._process is not None, "there is none"
        return self._process.auth

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.process is not None and self._process.process.poll() is None

    def strike(self) -> None:
        """SIGKILL this very moment; `kill` takes care of the rest."""
        if self._process is not None and self._process.process is not None:
            self._process.process.kill()

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        await self._end("kill")

    async def stop(self) -> None:
        """SIGTERM; a node that does not end with 0 raises."""
        await self._end("stop")

    async def _end(self, how: str) -> None:
        node, self._process = self._process, None
        if node is None:
            return
        try:
            await asyncio.to_thread(getattr(node, how))
        finally:
            self.data.mkdir(parents=True, exist_ok=True)
            with (self.data / "node.log").open("a") as log:
                log.write(f"--- process {self.starts}\n{node.log}")
            if "Traceback" in node.log:
                self.tracebacks.append(f"process {self.starts}: see node.log")
