"""A real cluster that changes roles and moves slots under writes; `tests/chaos/test_masters.py` kills masters."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.storage.ports import Batch, Draft, Fence, StoreFencedError
from tests.chaos.masters import NOW, Load, master_of, opened, replica_of
from tests.contracts.test_tails import HOMES, Reader, note
from tests.support.redis import RedisCluster, wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster(cluster: RedisCluster) -> RedisCluster:
    """Roles change when a test says so, and not because a server was slow."""
    for server in cluster.servers:
        server.command("CONFIG", "SET", "cluster-node-timeout", 60_000)
    return cluster


async def test_a_planned_change_of_roles_disturbs_nobody(cluster: RedisCluster) -> None:
    async with opened(cluster) as store:
        load = Load(store)
        load.start()
        await load.reach(10)
        old = master_of(cluster, store, "v0")
        new = replica_of(cluster, old)
        new.command("CLUSTER", "FAILOVER")
        await asyncio.to_thread(wait_until, lambda: new in cluster.masters(), "the roles are changed")
        await load.reach(10)
        await load.stop()
        assert master_of(cluster, store, "v0") is not old
        assert 0 == load.failed
        assert (0, 0) == await load.missing()
        assert [] == await store.check()


async def test_a_cell_that_is_being_moved_waits_and_is_not_torn(cluster: RedisCluster) -> None:
    """Half of its keys are at the new server: neither may take writes for it. Others go on."""
    async with opened(cluster) as store:
        cells = store.core.cells
        cell = cells.of("v0")
        slot = cells.slot(cell)
        other = next(f"x{n}" for n in range(1000) if cells.of(f"x{n}") != cell)
        for number in range(1, 4):
            await store.mailboxes.append(["v0"], Draft(b"%d" % number), NOW)
        source = master_of(cluster, store, "v0")
        target = next(server for server in cluster.masters() if server is not source)
        names = {server: server.command("CLUSTER", "MYID").decode() for server in (source, target)}
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert len(keys) >= 4
        # All but the writer's own key, which routes its calls: the script itself has to notice.
        for key in [key for key in keys if b":w:" not in key][::2]:
            source.command("MIGRATE", target.host, target.port, key, 0, 5000)
        writing = asyncio.create_task(store.mailboxes.append(["v0"], Draft(b"4"), NOW))
        assert 1 == (await store.mailboxes.append([other], Draft(b"1"), NOW))[0].position
        await asyncio.wait([writing], timeout=0.5)
        assert not writing.done()
        for key in source.command("CLUSTER", "GETKEYSINSLOT", slot, 1000):
            source.command("MIGRATE", target.host, target.port, key, 0, 5000)
        for server in (target, source):
            server.command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
        assert 3 < (await writing)[0].position
        bodies = [entry.body for entry in await store.mailboxes.read("v0", 0, 10, NOW)]
        assert [b"1", b"2", b"3", b"4"] == bodies
        assert [] == await store.check()


async def test_fences_hold_after_a_change_of_roles(cluster: RedisCluster) -> None:
    """Of a home and of a store: what was refused before is refused by the servers that take over, too."""
    async with opened(cluster) as store, opened(cluster) as late, opened(cluster) as dead:
        stale = (await late.coordination.attach("session:x", "late")).fence
        fence = (await store.coordination.attach("session:x", "store")).fence
        assert await store.coordination.fence_member(dead.writer)
        old = set(cluster.masters())
        for server in old:
            replica_of(cluster, server).command("CLUSTER", "FAILOVER")
        await asyncio.to_thread(wait_until, lambda: old.isdisjoint(cluster.masters()), "the roles are changed")

        def decision(named: Fence) -> Batch:
            batch = Batch()
            batch.fence(named)
            batch.put("session", "x", b"1")
            return batch

        for writing in (late.write(decision(stale)), dead.write(decision(fence))):
            with pytest.raises(StoreFencedError):
                await writing
        await store.write(decision(fence))
        await asyncio.gather(*(late.records.put("c", f"k{number}", b"1") for number in range(100)))
        assert "" == late.condition().trouble
        assert {store.writer, late.writer} == {member.writer for member in await store.coordination.members()}


async def test_wake_ups_find_their_way_after_a_failover(cluster: RedisCluster) -> None:
    async with opened(cluster) as here, opened(cluster) as there:
        heard: list[bytes] = []

        async def listen() -> None:
            async for data in here.coordination.listen("node-1"):
                heard.append(data)  # noqa: PERF401 - looked at while it grows

        listening = asyncio.create_task(listen())

        async def notified(data: bytes) -> None:
            async with asyncio.timeout(60):
                while data not in heard:
                    await there.coordination.notify("node-1", data)
                    await asyncio.sleep(0.05)

        await notified(b"before")
        for server in cluster.masters():
            replica_of(cluster, server).command("CLUSTER", "FAILOVER")
        await notified(b"after a change of roles")
        listening.cancel()


async def test_readers_of_feeds_find_their_way_after_a_failover(cluster: RedisCluster) -> None:
    """Each feed has its own way: nothing is missed and nothing comes twice."""
    async with opened(cluster) as here, opened(cluster) as there:
        reader = Reader(here.feeds.follow(await here.feeds.ends()))
        count = 0
        for name in ("before", "meanwhile", "after"):
            if name == "meanwhile":
                for server in cluster.masters():
                    replica_of(cluster, server).command("CLUSTER", "FAILOVER")
            for home in HOMES:
                await note(there, home, name.encode())
                count += 1
            await reader.until(count)
        found = {feed: [data for _, data in notes] for feed, notes in reader.found.items()}
        per_feed = {feed: [home for home in HOMES if here.feeds.feed_of(home) == feed] for feed in found}
        for feed, homes in per_feed.items():
            assert [name for name in (b"before", b"meanwhile", b"after") for _ in homes] == found[feed]
        assert [] == reader.gaps
        reader.tail.close()
