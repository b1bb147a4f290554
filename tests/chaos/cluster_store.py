"""The store of a cluster of nodes, and what may happen to it: a lone Redis, or a Redis Cluster.

    kill      a master dies; of a cluster its replica takes over, and what was killed comes back as a replica
    forget    a replica that lacks what another one has confirmed becomes master, and the master and that other replica
              follow it: what was confirmed meanwhile is gone. The store needs two replicas of each master for it.

What a fail-over may have forgotten is a `Lapse`: homes of some cells, in an interval of time. The judge excuses what is
within, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from motorcade.redis.slots import slot_of
from motorcade.storage.cells import DEFAULT_CELLS, Cells
from tests.support.redis import RedisCluster, RedisServer, wait_until
from tests.support.store_trace import TraceEntry, read_trace

PREFIX = "motorcade"

#: Seconds that a lone server is away at most, and a replica that will forget stands still.
AWAY = 3.0
BEHIND = (0.5, 2.5)

#: Seconds until all servers of a cluster follow the masters that have taken over, at most, on a busy machine.
HEALED = 240.0

CELLS = Cells(PREFIX, DEFAULT_CELLS)


@dataclass(frozen=True)
class Lapse:
    """What a store has forgotten: everything that was written to these cells within this time."""

    cells: frozenset[int]
    began: float
    ended: float

    def concerns(self, home: str | bytes, began: float, ended: float) -> bool:
        """Whether something about this home, or payload of this digest, which began and ended then, may be gone."""
        return CELLS.of(home) in self.cells and began <= self.ended and self.began <= ended


class ClusterStore:
    """The servers, and their faults. Calls are made one at a time."""

    def __init__(self, engine: str, *, forgets: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.lapses: list[Lapse] = []
        self.clock = clock
        self._lone: RedisServer | None = None
        self._cluster: RedisCluster | None = None
        if engine == "redis":
            # Each write is synced: a server that is killed has then forgotten nothing of what it has confirmed.
            self._lone = RedisServer({"appendfsync": "always"})
        else:
            self._cluster = RedisCluster(replicas=2 if forgets else 1)

    @property
    def servers(self) -> list[RedisServer]:
        return [self._lone] if self._lone is not None else self._of_cluster.servers

    @property
    def _of_cluster(self) -> RedisCluster:
        assert self._cluster is not None, "a lone server"
        return self._cluster

    @property
    def url(self) -> str:
        url = self._lone.url if self._lone is not None else self._of_cluster.url
        return f"{url}?trace=yes&prefix={PREFIX}"

    async def start(self) -> None:
        await asyncio.to_thread((self._lone or self._of_cluster).start)

    async def remove(self) -> None:
        await asyncio.to_thread((self._lone or self._of_cluster).remove)

    async def kill(self, random: Random) -> None:
        """Kill a master, and let it come back."""
        if self._lone is not None:
            await asyncio.to_thread(self._lone.kill)
            await asyncio.sleep(random.uniform(0.0, AWAY))
            await asyncio.to_thread(self._lone.start)
            return
        cluster = self._of_cluster
        victim = random.choice(await asyncio.to_thread(cluster.masters))
        masters = 3
        await asyncio.to_thread(victim.kill)
        await asyncio.to_thread(wait_until, lambda: len(cluster.masters()) == masters, "a replica is promoted")
        await asyncio.to_thread(victim.start)

    async def forget(self, random: Random) -> None:
        """Let a master, with what it has written in a while, and who has confirmed it, be forgotten."""
        await asyncio.to_thread(self._forget, random.choice(range(3)), random.uniform(*BEHIND))

    def _forget(self, which: int, seconds: float) -> None:
        master = self._of_cluster.masters()[which]
        other, behind = replicas_of(self._of_cluster, master)
        cells = frozenset(cells_of(master))
        began = self.clock()
        # Stopped, it cannot read; what is on its way to it would still reach it, so connections are cut as well, and
        # those of others come again.
        behind.pause()
        master.command("CLIENT", "KILL", "TYPE", "replica")
        time.sleep(seconds)
        other.pause()
        master.kill()
        behind.resume()
        try:
            wait_until(lambda: bool(behind.command("CLUSTER", "FAILOVER", "TAKEOVER")), "the takeover is begun")
            wait_until(lambda: behind.client.info("replication")["role"] == "master", "who was behind is master")
        finally:
            other.resume()
        self.lapses.append(Lapse(cells, began, self.clock()))
        master.start()

    async def wait_healthy(self) -> None:
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.wait_healthy, HEALED)

    def traces(self) -> dict[int, list[TraceEntry]]:
        """What the scripts have written down, by cell."""
        masters = [self._lone] if self._lone is not None else self._of_cluster.masters()
        return read_trace([server.client for server in masters], PREFIX)


def replicas_of(cluster: RedisCluster, master: RedisServer) -> list[RedisServer]:
    """The running servers that follow this one."""

    def follows(server: RedisServer) -> bool:
        info = server.client.info("replication")
        return bool(info["role"] == "slave" and info["master_port"] == master.port)

    return [server for server in cluster.running if follows(server)]


def cells_of(master: RedisServer) -> list[int]:
    """The cells whose slots this server has."""
    rows: Any = master.command("CLUSTER", "SLOTS")
    mine = [(row[0], row[1]) for row in rows if row[2][1] == master.port]
    slots = [slot_of(f"{PREFIX}:{{{cell}}}:") for cell in range(DEFAULT_CELLS)]
    return [cell for cell, slot in enumerate(slots) if any(first <= slot <= last for first, last in mine)]
