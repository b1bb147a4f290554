"""Into a Redis cluster: a stream is at its place, a channel is heard everywhere, a failover doubles nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.redis.slots import slot_of
from motorcade.storage.ports import StoreError
from tests.support.redis import RedisCluster, RedisServer
from tests.support.waiting import until
from tests.unit.capture.capturing import capturing, message, payloads, rule

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as running:
        yield running


def home(cluster: RedisCluster, key: str) -> RedisServer:
    """The master of a key."""
    for line in cluster.masters()[0].command("CLUSTER", "SLOTS"):
        if line[0] <= slot_of(key) <= line[1]:
            return next(server for server in cluster.servers if server.port == line[2][1])
    raise AssertionError(f"nobody serves {key}")


async def test_messages_are_in_the_stream_wherever_its_key_lives(cluster: RedisCluster) -> None:
    keys = ["messages:published", "fleet:{eu}:in", "a", "b", "c"]
    rules = {f"r{n}": rule(f"redis-stream:{key}", redis=cluster.url) for n, key in enumerate(keys)}
    async with capturing(rule=rules) as capture:
        for number in range(50):
            await capture.captured(message("fleet/1", b"%d" % number))
    expected = [b"%d" % number for number in range(50)]
    assert dict.fromkeys(keys, expected) == {key: payloads(home(cluster, key), key) for key in keys}
    assert 1 < len({home(cluster, key).port for key in keys})


async def test_a_channel_is_heard_on_every_server(cluster: RedisCluster) -> None:
    listeners = [server.client.pubsub(ignore_subscribe_messages=True) for server in cluster.running]
    for listener in listeners:
        listener.subscribe("news")
        listener.get_message(timeout=60)
    async with capturing(rule={"in": rule("redis-channel:news", redis=cluster.url, form="payload")}) as capture:
        for number in range(10):
            await capture.captured(message("fleet/1", b"%d" % number))
    for listener in listeners:
        heard: list[Any] = []
        while len(heard) < 10:
            found = listener.get_message(timeout=60)
            assert found is not None, heard
            heard.append(found["data"])
        assert [b"%d" % number for number in range(10)] == heard
        listener.close()


async def test_the_url_of_a_lone_server_does_not_serve(cluster: RedisCluster) -> None:
    """The problem that the rule shows says how to write it."""
    key = "elsewhere"
    other = next(server for server in cluster.masters() if server is not home(cluster, key))
    async with capturing(rule={"in": rule(f"redis-stream:{key}", redis=f"{other.url}?patience=0.1")}) as capture:
        with pytest.raises(StoreError, match=r"its URL begins with redis\+cluster://") as refused:
            await capture.captured(message("fleet/1", b""))
        assert refused.value.certain


async def test_a_master_that_dies_takes_nothing_along(cluster: RedisCluster) -> None:
    """Everything that was confirmed is in the stream once, and in order, on the server that has taken over."""
    key = "failover"
    async with capturing(rule={"in": rule(f"redis-stream:{key}", redis=f"{cluster.url}?patience=60")}) as capture:
        sent = 0

        async def publish() -> None:
            nonlocal sent
            sent += 1
            await capture.captured(message("fleet/1", b"%06d" % sent))

        await asyncio.gather(*(publish() for _ in range(100)))
        master = home(cluster, key)
        under_way = [asyncio.create_task(publish()) for _ in range(100)]
        await asyncio.sleep(0)
        master.kill()
        under_way += [asyncio.create_task(publish()) for _ in range(100)]
        await asyncio.gather(*under_way)
        await asyncio.gather(*(publish() for _ in range(100)))
        await until(lambda: capture.view("in").captured == 400)
    assert master.port != home(cluster, key).port
    assert [b"%06d" % number for number in range(1, 401)] == payloads(home(cluster, key), key)
