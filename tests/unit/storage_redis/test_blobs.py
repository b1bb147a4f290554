"""Payloads and the entries that refer to them are in different cells; no order of events may part them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

from motorcade.storage.ports import Draft, Durability, Swept
from motorcade.storage.redis import BlobCache, RedisStore, blob_operation
from motorcade.storage.redis_format import raw
from motorcade.storage.redis_writer import Operation
from tests.support.redis import RedisServer

NOW = time.time()
PAYLOAD = b"payload " * 512
DIGEST = hashlib.sha256(PAYLOAD).digest()
OWNERS = [f"v{number}" for number in range(50)]


async def whole_sweep(store: RedisStore, now: float = NOW, budget: int = 100) -> list[Swept]:
    steps = [await store.sweep(now, budget)]
    while (cursor := steps[-1].cursor) is not None:
        steps.append(await store.sweep(now, budget, cursor))
    return steps


async def test_a_payload_whose_entries_are_not_written_yet_is_held(store: RedisStore) -> None:
    core = store.core
    await core.one(blob_operation(core, DIGEST, PAYLOAD, 0.0, 0.0, "hold"))
    assert 0 == sum(step.removed for step in await whole_sweep(store))
    await core.one(Operation(("unhold", core.cells.of(DIGEST), "hold", [raw(DIGEST)])))
    assert 1 == sum(step.removed for step in await whole_sweep(store))


async def test_a_condemned_payload_that_is_wanted_again_stays(store: RedisStore) -> None:
    """Between the look for references and the removal somebody appends it once more."""
    core, cell = store.core, store.core.cells.of(DIGEST)
    await store.blobs.put(PAYLOAD, NOW)
    assert [2] == await core.one(Operation(("condemn", cell, NOW, "sweep", [raw(DIGEST)])))
    await store.mailboxes.append(OWNERS, Draft(b"1", PAYLOAD), NOW)
    assert [0, 0] == await core.one(Operation(("discard", cell, "sweep", [raw(DIGEST)])))
    assert PAYLOAD == (await store.mailboxes.read("v7", 0, 1, NOW))[0].payload


async def test_entries_without_end_keep_a_payload_that_had_one(store: RedisStore, server: RedisServer) -> None:
    """The servers' own expiry grows, and goes when it must."""
    key = store.core.key(store.core.cells.of(DIGEST), "b:", DIGEST)
    await store.mailboxes.append(OWNERS, Draft(b"1", PAYLOAD, expires_at=NOW + 100), NOW)
    first = server.command("PTTL", key)
    await store.mailboxes.append(OWNERS, Draft(b"1", PAYLOAD, expires_at=NOW + 9000), NOW)
    second = server.command("PTTL", key)
    assert 0 < first < second
    await store.mailboxes.append(OWNERS, Draft(b"1", PAYLOAD, expires_at=NOW + 100), NOW)
    assert second - 60_000 < server.command("PTTL", key) <= second
    await store.mailboxes.append(OWNERS, Draft(b"2", PAYLOAD), NOW)
    assert -1 == server.command("PTTL", key)
    await store.mailboxes.append(OWNERS, Draft(b"3", PAYLOAD, expires_at=NOW + 100), NOW)
    assert -1 == server.command("PTTL", key)


async def test_counts_are_put_right_where_the_server_removed_a_payload(store: RedisStore, server: RedisServer) -> None:
    await store.blobs.put(PAYLOAD, NOW)
    server.command("DEL", store.core.key(store.core.cells.of(DIGEST), "b:", DIGEST))
    await whole_sweep(store)
    assert (0, 0) == await store.blobs.count()


async def test_a_missing_payload_holds_nothing_up_and_is_found(store: RedisStore, server: RedisServer) -> None:
    await store.mailboxes.append(OWNERS, Draft(b"1", PAYLOAD), NOW)
    await store.mailboxes.append(["v1"], Draft(b"2"), NOW)
    server.command("DEL", store.core.key(store.core.cells.of(DIGEST), "b:", DIGEST))
    other = RedisStore(server.url, Durability.FAST)  # has nothing in its cache
    await other.open()
    assert [b"2"] == [entry.body for entry in await other.mailboxes.read("v1", 0, 10, NOW)]
    assert any("missing" in line for line in await other.check())
    await other.close()


async def test_a_page_with_a_missing_payload_is_filled_with_others(store: RedisStore, server: RedisServer) -> None:
    """A short page would tell the reader that there is nothing more."""
    for number in range(4):
        await store.mailboxes.append(["v"], Draft(b"%d" % number, PAYLOAD + b"%d" % number), NOW)
    core, digest = store.core, hashlib.sha256(PAYLOAD + b"0").digest()
    server.command("DEL", core.key(core.cells.of(digest), "b:", digest))
    core.cache = BlobCache(0)
    assert [b"1", b"2"] == [entry.body for entry in await store.mailboxes.read("v", 0, 2, NOW)]
    assert [b"1"] == [entry.body for entry in await store.mailboxes.read("v", 0, 1, NOW)]


async def test_sweeps_beside_appends_part_nothing(server: RedisServer) -> None:
    """Many appends and acknowledgements of few payloads, two sweepers, two nodes."""
    stores = [RedisStore(server.url, Durability.FAST) for _ in range(2)]
    for store in stores:
        await store.open()
    chance = random.Random(7)
    payloads = [bytes([number]) * 2000 for number in range(4)]
    stop = asyncio.Event()

    async def sweeper(store: RedisStore) -> None:
        while not stop.is_set():
            await whole_sweep(store)

    async def worker(store: RedisStore, number: int) -> None:
        for _ in range(60):
            owners = [f"w{number}-{index}" for index in range(chance.randint(1, 5))]
            payload = chance.choice(payloads)
            answers = await store.mailboxes.append(owners, Draft(b"b", payload), NOW)
            store.core.cache._blobs.clear()
            for answer in answers:
                (entry,) = await store.mailboxes.read(answer.owner, answer.position - 1, 1, NOW)
                assert payload == entry.payload
                await store.mailboxes.acknowledge(answer.owner, [answer.position])

    sweepers = [asyncio.create_task(sweeper(store)) for store in stores]
    await asyncio.gather(*(worker(stores[number % 2], number) for number in range(8)))
    stop.set()
    await asyncio.gather(*sweepers)
    await whole_sweep(stores[0])
    assert (0, 0) == await stores[1].blobs.count()
    assert [] == await stores[0].check()
    for store in stores:
        await store.close()
