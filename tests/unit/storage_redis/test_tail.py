"""Following feeds through what happens to servers: notes that are forgotten, connections that break."""

from __future__ import annotations

import asyncio
import time

import pytest

from motorcade.storage import redis_tail
from motorcade.storage.ports import Durability, FeedEnd
from motorcade.storage.redis import RedisStore
from tests.contracts.engines import patient
from tests.contracts.test_tails import Reader, note
from tests.support.redis import RedisServer
from tests.support.waiting import PATIENCE, until
from tests.unit.storage_redis.proxy import Relay

HOME = "client:x"


def forget(store: RedisStore, server: RedisServer, number: int) -> None:
    """What a fail-over does that has lost the last notes, back to this one."""
    feed = store.feeds.feed_of(HOME)
    last = int(server.command("HGET", store.core.key(feed, "n"), "notes"))
    for gone in range(number + 1, last + 1):
        server.command("XDEL", store.core.key(feed, "F"), f"{gone}-0")
    server.command("XSETID", store.core.key(feed, "F"), f"{number}-0")
    server.command("HSET", store.core.key(feed, "n"), "notes", number)


@pytest.mark.parametrize("instead", [0, 1, 2, 5])
async def test_notes_that_a_fail_over_has_forgotten_are_a_gap(
    store: RedisStore, server: RedisServer, instead: int
) -> None:
    """Whether as many have come in their place, fewer, more or none: what was read is never taken for what is there."""
    feed = store.feeds.feed_of(HOME)
    reader = Reader(store.feeds.follow(await store.feeds.ends()))
    await note(store, HOME, b"1", b"2", b"3")
    await reader.until(3)
    forget(store, server, 1)
    if instead:
        await note(store, HOME, *(b"another" for _ in range(instead)))
    async with asyncio.timeout(PATIENCE):
        while not reader.gaps:
            await reader.take()
    assert 3 == len(reader.found[feed]), "nothing came before the gap was told"
    reader.tail.reset(feed, FeedEnd())
    await reader.until(4 + instead)
    assert [b"1", *[b"another"] * instead] == [data for _, data in reader.found[feed][3:]]
    reader.tail.close()


async def test_a_reader_comes_back_when_its_connections_break(server: RedisServer, store: RedisStore) -> None:
    async with Relay(server.host, server.port) as relay:
        far = patient(f"redis://127.0.0.1:{relay.port}", Durability.FAST)
        await far.open()
        reader = Reader(far.feeds.follow(await far.feeds.ends()))
        for number in range(3):
            await note(store, HOME, b"%d" % number)
            await reader.until(number + 1)
            for client in server.client.client_list():
                if client["name"] == "motorcade":
                    server.client.client_kill_filter(_id=client["id"])
        await note(store, HOME, b"3")
        await reader.until(4)
        assert [] == reader.gaps
        await far.close()
        waiting = [client for client in server.client.client_list() if "xread" in client["cmd"]]
        await until(lambda: not [client for client in server.client.client_list() if "xread" in client["cmd"]])
        assert len(waiting) <= 1, "one wait for all feeds"


async def test_a_caller_that_has_heard_of_a_note_need_not_wait(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the connection that waits is lost."""
    monkeypatch.setattr(redis_tail.RedisTail, "_follow", lambda *_: asyncio.sleep(3600))
    reader = Reader(store.feeds.follow(await store.feeds.ends()))
    await note(store, HOME, b"1")
    reader.tail.look(store.feeds.feed_of(HOME))
    began = time.monotonic()
    await reader.until(1)
    assert time.monotonic() - began < PATIENCE
    reader.tail.close()
