"""Kill masters of a real Redis cluster under load, and count what was acknowledged and lost.

    python -m tests.chaos.masters --rounds 6        the table in docs/durability.md

A round: writers append numbered entries to many owners, one at a time per owner; a master is killed with SIGKILL; its
replica is promoted; the killed one comes back as replica; the writers go on. In the end every owner's entries are read.
With `cut_off` the replica is stopped and its link cut before the kill, and comes back after it: it knows nothing of
what was written meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from motorcade.redis.url import RedisOptions
from motorcade.storage.ports import Draft, Durability, StoreError
from motorcade.storage.redis import RedisStore
from tests.support.redis import RedisCluster, RedisServer, wait_until

NOW = time.time()
OWNERS = 60

#: Seconds that a writer waits for a master. Generous: a failover on a busy machine takes long, and nobody may fail.
PATIENCE = 90.0

#: Entries of the victim's owners that are acknowledged while its replica is cut off, if they are at all.
CUT_OFF_ENTRIES = 500


@asynccontextmanager
async def opened(cluster: RedisCluster, level: Durability = Durability.SAFE) -> AsyncIterator[RedisStore]:
    store = RedisStore(cluster.url, level, RedisOptions(patience=PATIENCE))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def poll(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - what it looks at knows nothing of events
            await asyncio.sleep(0.01)


@dataclass
class Load:
    """Writers that go on until they are stopped; each owner's entries are numbered, one after the other."""

    store: RedisStore
    acknowledged: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    stopping: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self._write(f"v{number}")) for number in range(OWNERS)]

    async def _write(self, owner: str) -> None:
        number = 0
        while not self.stopping:
            number += 1
            try:
                await self.store.mailboxes.append([owner], Draft(b"%d" % number), NOW)
            except StoreError:
                self.failed += 1
                return  # whether this one was written is not known, so the numbers end here
            self.acknowledged[owner] = number

    async def reach(self, more: int) -> None:
        """Wait until every owner has so many more acknowledged entries."""
        goal = {f"v{number}": self.acknowledged.get(f"v{number}", 0) + more for number in range(OWNERS)}
        await poll(lambda: all(self.acknowledged.get(owner, 0) >= count for owner, count in goal.items()))

    async def stop(self) -> None:
        self.stopping = True
        await asyncio.gather(*self.tasks)

    def count(self, owners: list[str]) -> int:
        return sum(self.acknowledged.get(owner, 0) for owner in owners)

    @property
    def total(self) -> int:
        return sum(self.acknowledged.values())

    async def missing(self) -> tuple[int, int]:
        """(acknowledged and lost, written twice)."""
        lost = twice = 0
        for owner, count in self.acknowledged.items():
            found = [int(entry.body) for entry in await self.store.mailboxes.read(owner, 0, 10_000_000, NOW)]
            lost += len(set(range(1, count + 1)) - set(found))
            twice += len(found) - len(set(found))
            assert sorted(found) == found, "order"
        return lost, twice


def master_of(cluster: RedisCluster, store: RedisStore, owner: str) -> RedisServer:
    cells = store.core.cells
    address = store.core.servers.master(cells.slot(cells.of(owner)))
    assert address is not None
    return next(server for server in cluster.servers if server.port == address.port)


def replica_of(cluster: RedisCluster, master: RedisServer) -> RedisServer:
    for server in cluster.running:
        info = server.client.info("replication")
        if info["role"] == "slave" and info["master_port"] == master.port:
            return server
    raise AssertionError("no replica")


async def kill_master(cluster: RedisCluster, load: Load, owner: str, *, cut_off: bool = False) -> None:
    """One round; the writers go on when it is over."""
    store = load.store
    victim = master_of(cluster, store, owner)
    if cut_off:
        replica = replica_of(cluster, victim)
        mine = [f"v{n}" for n in range(OWNERS) if master_of(cluster, store, f"v{n}") is victim]
        unconfirmed, before = store.core.writer.unconfirmed, load.count(mine)
        # Stopped, it cannot connect again; what is on its way to it would still reach it, so the link is cut as well.
        replica.pause()
        victim.command("CLIENT", "KILL", "TYPE", "replica")
        await poll(lambda: store.core.writer.unconfirmed > unconfirmed or load.count(mine) > before + CUT_OFF_ENTRIES)
        victim.kill()
        replica.resume()
    else:
        victim.kill()
    await asyncio.to_thread(wait_until, lambda: len(cluster.masters()) == 3, "a replica is promoted")
    await asyncio.to_thread(victim.start)


@dataclass(frozen=True)
class Outcome:
    """What some rounds have come to."""

    acknowledged: int
    failed: int
    lost: int
    twice: int


async def measure(
    cluster: RedisCluster, level: Durability, rounds: int, *, cut_off: bool, between: int = 100
) -> Outcome:
    """So many rounds on an empty cluster; `between`: entries per owner before and after each."""
    cluster.empty()
    async with opened(cluster, level) as store:
        load = Load(store)
        load.start()
        await load.reach(between)
        for number in range(rounds):
            await kill_master(cluster, load, f"v{number % OWNERS}", cut_off=cut_off)
            await load.reach(between)
            await asyncio.to_thread(cluster.wait_healthy)
        await load.stop()
        lost, twice = await load.missing()
        assert [] == await store.check()
        return Outcome(load.total, load.failed, lost, twice)


async def measure_alone(sync: str, rounds: int, between: int = 100) -> Outcome:
    """The same with a lone server without replica, killed and started again where it was."""
    with RedisServer({"appendfsync": sync}) as server:
        store = RedisStore(server.url, Durability.SAFE, RedisOptions(patience=PATIENCE))
        await store.open()
        try:
            load = Load(store)
            load.start()
            await load.reach(between)
            for _ in range(rounds):
                server.kill()
                await asyncio.to_thread(server.start)
                await load.reach(between)
            await load.stop()
            return Outcome(load.total, load.failed, *await load.missing())
        finally:
            await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    print("| servers | durability | killed | kills | acknowledged | lost | twice |")
    print("|---|---|---|--:|--:|--:|--:|")

    def tell(servers: str, level: str, killed: str, outcome: Outcome) -> None:
        figures = f"{rounds} | {outcome.acknowledged} | {outcome.lost} | {outcome.twice}"
        print(f"| {servers} | {level} | {killed} | {figures} |", flush=True)

    for level in (Durability.SAFE, Durability.FAST):
        for cut_off in (False, True):
            with RedisCluster() as cluster:
                outcome = asyncio.run(measure(cluster, level, rounds, cut_off=cut_off))
            tell("cluster", level, "a master" + (", its replica cut off" if cut_off else ""), outcome)
    for sync in ("always", "everysec"):
        tell("alone", f"safe, appendfsync {sync}", "the server", asyncio.run(measure_alone(sync, rounds)))


if __name__ == "__main__":
    main()
