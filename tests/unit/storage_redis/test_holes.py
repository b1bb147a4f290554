"""Positions that are gone: what is left of a mailbox from which entries go in any order."""

from __future__ import annotations

import random
import time

from motorcade.storage.ports import Batch, Draft, MailboxInfo
from motorcade.storage.redis import RedisStore

NOW = time.time()


async def holes(store: RedisStore, owner: str) -> list[bytes]:
    found: list[bytes] = await store.core.ask(store.core.cells.of(owner), "ZRANGE", "g:", owner, 0, -1)
    return found


async def fill(store: RedisStore, owner: str, count: int) -> None:
    batch = Batch()
    for number in range(count):
        batch.append([owner], Draft(b"%d" % number), NOW)
    await store.write(batch)


async def test_what_goes_in_order_leaves_no_holes(store: RedisStore) -> None:
    await fill(store, "v1", 10)
    for position in range(1, 10):
        await store.mailboxes.acknowledge("v1", [position])
        assert [] == await holes(store, "v1")
    assert MailboxInfo(1, 1, 10, 10, 1) == await store.mailboxes.info("v1")


async def test_holes_are_joined(store: RedisStore) -> None:
    for number, (gone, left, first) in enumerate(HOLES):
        owner = f"v{number}"
        await fill(store, owner, 10)
        for position in gone:
            assert 1 == await store.mailboxes.acknowledge(owner, [position])
        assert left == await holes(store, owner)
        assert first == (await store.mailboxes.info(owner)).first
        assert 11 == (await store.mailboxes.append([owner], Draft(b"next"), NOW))[0].position
        expected = [position for position in range(1, 12) if position not in gone]
        assert expected == [entry.position for entry in await store.mailboxes.read(owner, 0, 100, NOW)]
        assert [] == await store.check()


HOLES: list[tuple[list[int], list[bytes], int]] = [
    ([3], [b"3:3"], 1),
    ([3, 5], [b"3:3", b"5:5"], 1),
    ([3, 5, 4], [b"3:5"], 1),
    ([5, 4, 3], [b"3:5"], 1),
    ([3, 4, 5], [b"3:5"], 1),
    ([2, 1], [], 3),
    ([2, 4, 1], [b"4:4"], 3),
    ([2, 4, 1, 3], [], 5),
    ([10, 9], [b"9:10"], 1),
    ([2, 3, 4, 5, 6, 7, 8, 9, 10], [b"2:10"], 1),
    ([2, 3, 4, 5, 6, 7, 8, 9, 10, 1], [], 0),
]


async def test_any_order_from_any_place(store: RedisStore) -> None:
    """A mailbox of two thousand is emptied in a random order, and read from everywhere meanwhile."""
    dice = random.Random(7)
    left = list(range(1, 2001))
    await fill(store, "v1", len(left))
    while left:
        some = dice.sample(left, min(len(left), 190))
        assert len(some) == await store.mailboxes.acknowledge("v1", some)
        left = sorted(set(left) - set(some))
        for after in (0, *dice.sample(range(2000), 5)):
            limit = dice.choice([1, 7, 300, 3000])
            wanted = [position for position in left if position > after][:limit]
            assert wanted == [entry.position for entry in await store.mailboxes.read("v1", after, limit, NOW)]
        assert [] == await store.check()
    assert [] == await holes(store, "v1")


async def test_one_key_written_often_beside_one_that_stays(store: RedisStore) -> None:
    """The hole between them is passed in one step, from wherever the reader was."""
    await store.mailboxes.append(["v1"], Draft(b"stays"), NOW)
    for number in range(500):
        await store.mailboxes.append(["v1"], Draft(b"%d" % number, key=b"key"), NOW)
    assert [b"2:500"] == await holes(store, "v1")
    for after in (1, 2, 250, 499, 500):
        assert [501] == [entry.position for entry in await store.mailboxes.read("v1", after, 10, NOW)]
    assert [1, 501] == [entry.position for entry in await store.mailboxes.read("v1", 0, 10, NOW)]
