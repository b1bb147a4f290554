"""Servers that would lose data are not opened; stores of another shape neither."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.redis.url import RedisOptions
from motorcade.storage.ports import Durability, StoreAwayError, StoreError
from motorcade.storage.redis import RedisStore
from tests.support.ports import free_port
from tests.support.redis import RedisServer


async def refused(url: str, level: Durability = Durability.SAFE, options: RedisOptions | None = None) -> str:
    store = RedisStore(url, level, options)
    with pytest.raises(StoreError) as raised:
        await store.open()
    with pytest.raises(StoreError, match="closed"):
        await store.figures()
    return str(raised.value)


async def accepted(url: str, level: Durability = Durability.SAFE, options: RedisOptions | None = None) -> None:
    store = RedisStore(url, level, options)
    await store.open()
    await store.close()


async def test_a_server_without_append_only_file_is_refused(own_server: RedisServer) -> None:
    own_server.command("CONFIG", "SET", "appendonly", "no")
    assert "appendonly yes" in await refused(own_server.url)
    await accepted(own_server.url + "?unchecked=yes")


async def test_a_server_that_still_reads_its_file_is_waited_for(own_server: RedisServer) -> None:
    """It says meanwhile that it keeps none."""
    filling = own_server.client.pipeline(transaction=False)
    for number in range(8000):  # while it reads it answers after each 1024
        filling.set(f"key{number}", "x")
    filling.execute()
    own_server.stop()
    own_server.settings["key-load-delay"] = "300"  # microseconds
    starting = asyncio.create_task(asyncio.to_thread(own_server.start))
    away = 0
    while True:
        try:
            await accepted(own_server.url)
        except StoreAwayError as error:
            away += "still reading" in str(error)
            await asyncio.sleep(0.05)
        else:
            break
    await starting
    assert away


async def test_a_server_that_evicts_is_refused(own_server: RedisServer) -> None:
    own_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert "noeviction" in await refused(own_server.url, Durability.FAST)
    await accepted(own_server.url + "?unchecked=yes", Durability.FAST)


async def test_strict_needs_a_sync_for_every_write(own_server: RedisServer) -> None:
    own_server.command("CONFIG", "SET", "appendfsync", "everysec")
    assert "appendfsync always" in await refused(own_server.url, Durability.STRICT)
    own_server.command("CONFIG", "SET", "appendfsync", "always")
    await accepted(own_server.url, Durability.STRICT)


async def test_replicas_that_are_asked_for_have_to_be_there(server: RedisServer) -> None:
    assert "fewer than 1 replicas" in await refused(server.url + "?replicas=1")
    await accepted(server.url + "?replicas=1", Durability.FAST)
    await accepted(server.url + "?replicas=0")
    await accepted(server.url)


async def test_the_number_of_cells_is_fixed_at_creation(server: RedisServer) -> None:
    await accepted(server.url, options=RedisOptions(cells=16))
    assert "16 cells, not 32" in await refused(server.url, options=RedisOptions(cells=32))
    store = RedisStore(server.url)
    await store.open()
    assert 16 == store.core.cells.count
    await store.close()


async def test_prefixes_are_stores_of_their_own(server: RedisServer) -> None:
    first, second = RedisStore(server.url + "?prefix=a&cells=8"), RedisStore(server.url + "?prefix=b&cells=16")
    await first.open()
    await second.open()
    await first.records.put("c", "key", b"first")
    assert await second.records.get("c", "key", 0) is None
    await first.close()
    await second.close()


async def test_a_store_of_another_format_is_refused(server: RedisServer) -> None:
    server.command("HSET", "motorcade:meta", "version", 99)
    assert "format 99" in await refused(server.url)


async def test_the_url_has_to_fit_the_server(server: RedisServer) -> None:
    assert "redis://" in await refused(server.url.replace("redis://", "redis+cluster://"))
    with RedisServer({"cluster-enabled": "yes"}) as member:
        assert "redis+cluster://" in await refused(member.url)
        assert "slots" in await refused(member.url.replace("redis://", "redis+cluster://"))


async def test_nobody_there_is_said_so() -> None:
    port = free_port()
    assert str(port) in await refused(f"redis://127.0.0.1:{port}")
    assert str(port) in await refused(f"redis+cluster://127.0.0.1:{port}")


async def test_a_replica_is_refused(server: RedisServer) -> None:
    with RedisServer({"replicaof": f"{server.host} {server.port}"}) as replica:
        assert "replica" in await refused(replica.url)


async def test_a_wrong_password_is_said_so(own_server: RedisServer) -> None:
    own_server.command("CONFIG", "SET", "requirepass", "rightsecret")
    own_server.command("AUTH", "rightsecret")
    message = await refused(own_server.url.replace("://", "://wrongsecret@"))
    assert "WRONGPASS" in message and "wrongsecret" not in message
    assert "NOAUTH" in await refused(own_server.url)
    await accepted(own_server.url.replace("://", "://rightsecret@"))
