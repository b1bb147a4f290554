"""What a caller is told when a server is full, hangs or dies, and what is true then.

An error that is `certain`: surely nothing was written. Any other `StoreError`: perhaps; repeated with the same token,
it is written once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from motorcade.redis.resp import ServerAddress
from motorcade.storage.ports import (
    Appended,
    Batch,
    Draft,
    Durability,
    MailboxInfo,
    StoreError,
    StoreFullError,
    StoreRefusedError,
)
from motorcade.storage.redis import RedisStore, WakeupListener
from tests.support.redis import RedisCluster, RedisServer, wait_until
from tests.support.waiting import until
from tests.unit.storage_redis.opening import opened
from tests.unit.storage_redis.proxy import Relay

NOW = time.time()
PAYLOAD = b"payload " * 500

pytestmark = pytest.mark.timeout(120)


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    """Stop a server (SIGSTOP), and let it go on whatever happens."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


def put(key: str) -> Batch:
    batch = Batch()
    batch.put("c", key, b"value")
    return batch


def make_full(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory", server.client.info("memory")["used_memory"] // 2)


def make_room(servers: Iterable[RedisServer]) -> None:
    for server in servers:
        server.command("CONFIG", "SET", "maxmemory", 0)


async def append(store: RedisStore, owners: list[str], body: bytes, payload: bytes = b"") -> list[Appended]:
    """As a batch, with the body as token."""
    batch = Batch()
    batch.append(owners, Draft(body, payload, token=body), NOW)
    return (await store.write(batch)).appended


async def insist(store: RedisStore, owners: list[str], body: bytes, payload: bytes = b"") -> int:
    """Repeat until it succeeds; how often it failed."""
    for failures in range(100):
        try:
            await append(store, owners, body, payload)
        except StoreFullError:
            raise
        except StoreError:
            continue
        return failures
    raise AssertionError("never written")


async def bodies(store: RedisStore, owner: str) -> list[bytes]:
    return [entry.body for entry in await store.mailboxes.read(owner, 0, 100_000, NOW)]


# -- full


async def test_a_full_server_does_nothing_of_a_batch(own_server: RedisServer) -> None:
    """Whatever stands first in it."""
    async with opened(own_server.url) as store:
        await append(store, ["v1"], b"1")
        await store.records.put("c", "key", b"value")
        make_full(own_server)
        batch = Batch()
        batch.acknowledge("v1", [1])
        batch.delete("c", "key")
        batch.append(["v1", "v2"], Draft(b"2", PAYLOAD), NOW)
        with pytest.raises(StoreFullError):
            await store.write(batch)
        assert [b"1"] == await bodies(store, "v1")
        assert b"value" == await store.records.get("c", "key", NOW)
        assert (0, 0) == await store.blobs.count()
        assert [] == await store.check()


async def test_a_full_server_can_be_emptied(own_server: RedisServer) -> None:
    """Everything that removes, marks, attaches and leads goes on, even if there is nothing to remove."""
    async with opened(own_server.url) as store:
        for number in range(1, 6):
            await append(store, ["v1"], b"%d" % number, PAYLOAD)
        await store.records.put("c", "key", b"value")
        await store.streams.append("s", [b"1", b"2"], NOW)
        make_full(own_server)
        attached = await store.coordination.attach("v1", "node")
        assert attached.pending
        assert await store.mailboxes.mark("v1", 2, 1)
        assert 1 == await store.mailboxes.acknowledge("v1", [1])
        assert 0 == await store.mailboxes.acknowledge("v1", [1])
        assert 4 == await store.mailboxes.clear("v1")
        assert 0 == await store.mailboxes.forget("v1")
        assert await store.records.delete("c", "key")
        assert not await store.records.delete("c", "key")
        assert 1 == (await store.streams.trim("s", records=1)).removed
        await store.streams.drop("s")
        lease = await store.coordination.acquire("l", "node", 60.0, NOW)
        assert lease is not None
        assert await store.coordination.renew(lease, 60.0, NOW)
        assert await store.coordination.release(lease)
        assert await store.coordination.detach(attached.fence)
        await store.sweep(NOW, 100)
        assert (0, 0) == await store.blobs.count()
        with pytest.raises(StoreFullError):
            await store.records.put("c", "key", b"value")
        with pytest.raises(StoreFullError):
            await store.blobs.put(PAYLOAD, NOW)
        assert [] == await store.check()


async def test_full_after_a_lost_command_is_not_full(own_server: RedisServer) -> None:
    """The command may still be on its way to the server, so nobody can say that it will not be carried out."""
    async with Relay(own_server.host, own_server.port) as relay, opened(f"redis://127.0.0.1:{relay.port}") as store:
        await append(store, ["v1"], b"1")
        make_full(own_server)
        relay.stop_next()
        with pytest.raises(StoreError, match="perhaps") as raised:
            await append(store, ["v1"], b"2")
        assert not isinstance(raised.value, StoreFullError)
        with pytest.raises(StoreFullError):
            await append(store, ["v1"], b"2")
        make_room([own_server])
        assert 0 == await insist(store, ["v1"], b"2")
        assert [b"1", b"2"] == await bodies(store, "v1")


async def test_one_full_master_of_a_cluster(cluster: RedisCluster) -> None:
    """What others have taken is not called refused; repeated, it reaches those that were missed."""
    async with opened(cluster.url, Durability.SAFE) as store:
        cells, masters = store.core.cells, cluster.masters()
        full = masters[0]
        names = [f"v{number}" for number in range(60)]
        address = {name: store.core.servers.master(cells.slot(cells.of(name))) for name in names}
        mine = [name for name in names if address[name] == (full.host, full.port)]
        others = [name for name in names if name not in mine]
        assert mine
        assert others
        make_full(full)
        with pytest.raises(StoreFullError):
            await append(store, mine, b"1", PAYLOAD)
        for name in mine:
            assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info(name)
        with pytest.raises(StoreError, match="in part") as raised:
            await append(store, names, b"2")
        assert not isinstance(raised.value, StoreFullError)
        assert [b"2"] == await bodies(store, others[0])
        assert {1} == {answer.position for answer in await append(store, others, b"2")}
        make_room(masters)
        repeated = {answer.owner for answer in await append(store, names, b"2") if answer.repeated}
        assert set(others) == repeated
        for name in names:
            assert [b"2"] == await bodies(store, name)
        assert [] == await store.check()


# -- hanging and dead


async def test_a_server_that_hangs_carries_out_a_write_once(own_server: RedisServer) -> None:
    """What was sent is confirmed when it goes on; what could not be sent within `patience` is refused for certain."""
    async with opened(own_server.url, patience=0.5) as store:
        store.core.servers.patience = 60.0  # while nothing is wrong, the machine may be slow
        await append(store, ["v1"], b"1")
        store.core.servers.patience = 0.5
        with paused(own_server):
            sent = asyncio.create_task(append(store, ["v1", "v2"], b"2", PAYLOAD))
            await until(lambda: store.core.writer._pipelines[0].frozen is not None)
            for _ in range(3):
                with pytest.raises(StoreRefusedError, match="within") as raised:
                    await append(store, ["v1", "v2"], b"not sent", PAYLOAD)
                assert raised.value.certain and raised.value.away
            assert not sent.done()
            store.core.servers.patience = 60.0
        assert [2, 1] == [answer.position for answer in await sent]
        await append(store, ["v1"], b"3")
        assert [b"1", b"2", b"3"] == await bodies(store, "v1")
        assert [b"2"] == await bodies(store, "v2")
        assert [] == await store.check()


async def test_a_store_that_is_closed_while_a_server_hangs(own_server: RedisServer) -> None:
    """Closing waits for `patience`; then nobody knows of what was sent, and what was not sent is refused."""
    async with opened(own_server.url, patience=0.5) as store:
        store.core.servers.patience = 60.0  # while nothing is wrong, the machine may be slow
        await append(store, ["v1"], b"1")
        store.core.servers.patience = 0.5
        with paused(own_server):
            sent = store.write(put("a"))
            await until(lambda: store.core.writer._pipelines[0].frozen is not None)
            behind = store.write(put("b"))
            async with asyncio.timeout(60):
                await store.close()
        assert sent.done and isinstance(sent.error, StoreError) and not sent.refused
        assert behind.done and isinstance(behind.error, StoreRefusedError)


async def test_what_waits_behind_another_cell_is_refused_in_time() -> None:
    """A batch is held in a cell whose server is away; writes behind its second part are not held with it."""
    with RedisCluster(replicas=0, settings={"cluster-require-full-coverage": "no"}) as cluster:
        async with opened(cluster.url, patience=60.0) as store:
            cells, victim = store.core.cells, cluster.masters()[0]
            names = [f"v{number}" for number in range(200)]
            where = {name: store.core.servers.master(cells.slot(cells.of(name))) for name in names}
            lost = next(name for name in names if where[name] == (victim.host, victim.port))
            there = next(name for name in names if where[name] != (victim.host, victim.port))
            await append(store, [lost], b"0")
            with paused(victim):
                both = Batch()
                both.append([lost], Draft(b"1"), NOW)
                both.mark(there, 1, 1)
                held = store.write(both)
                await until(lambda: any(pipeline.frozen is not None for pipeline in store.core.writer._pipelines))
                store.core.servers.patience = 0.5
                with pytest.raises(StoreRefusedError):
                    await append(store, [there], b"2")
                assert not held.done
                store.core.servers.patience = 60.0
            assert [2] == [answer.position for answer in (await held).appended]
            assert [1] == [answer.position for answer in await append(store, [there], b"3")]


async def test_a_master_killed_in_the_middle(cluster: RedisCluster) -> None:
    """Batches over all masters, with little patience; each is carried on until it is written, once."""
    names = [f"v{number}" for number in range(60)]
    async with opened(cluster.url, Durability.SAFE, patience=1.0) as store:
        written: list[bytes] = []

        async def write(count: int) -> None:
            for _ in range(count):
                body = b"%d" % (len(written) + 1)
                await insist(store, names, body, PAYLOAD + body)
                written.append(body)

        await write(20)
        victim = cluster.masters()[0]
        writing = asyncio.create_task(write(100))
        await asyncio.sleep(0)
        victim.kill()
        await asyncio.to_thread(wait_until, lambda: len(cluster.masters()) == 3, "a replica is promoted")
        # Its successor has no replica that could confirm anything, so nothing is acknowledged until it is back.
        await asyncio.to_thread(victim.start)
        await writing
        await asyncio.to_thread(cluster.wait_healthy)
        for name in names:
            assert written == await bodies(store, name)
        assert [] == await store.check()


async def test_a_master_without_replica_that_is_killed() -> None:
    """The others go on; when it is back it has everything that was synced, and gets its part of what was begun."""
    # With `everysec` what was written while an earlier sync was under way would be lost.
    settings = {"cluster-require-full-coverage": "no", "appendfsync": "always"}
    with RedisCluster(replicas=0, settings=settings) as cluster:
        async with opened(cluster.url, Durability.STRICT, patience=0.5) as store:
            names = [f"v{number}" for number in range(60)]
            await append(store, names, b"1")
            victim = cluster.masters()[0]
            cells = store.core.cells
            lost = [
                n for n in names if store.core.servers.master(cells.slot(cells.of(n))) == (victim.host, victim.port)
            ]
            victim.kill()
            writing = asyncio.create_task(append(store, names, b"2"))
            async with asyncio.timeout(60):
                for name in set(names) - set(lost):
                    while [b"1", b"2"] != await bodies(store, name):  # noqa: ASYNC110 - the store tells nobody
                        await asyncio.sleep(0.01)
            await asyncio.sleep(2 * store.core.servers.patience)  # that is what it must outlast
            assert not writing.done()
            await asyncio.to_thread(victim.start)
            await writing
            for name in names:
                assert [b"1", b"2"] == await bodies(store, name)


async def test_a_listener_that_fails_by_a_defect_listens_again(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, failures = WakeupListener._follow, iter([ValueError("a defect"), KeyError("another")])

    async def fails(listener: WakeupListener, address: ServerAddress) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        await follow(listener, address)

    monkeypatch.setattr(WakeupListener, "_follow", fails)
    listening = store.coordination.listen("n")
    heard = asyncio.ensure_future(anext(listening))
    async with asyncio.timeout(60):
        while not heard.done():
            await store.coordination.notify("n", b"wake up")
            await asyncio.sleep(0.01)
    assert b"wake up" == heard.result()
    await listening.aclose()  # type: ignore[attr-defined]
