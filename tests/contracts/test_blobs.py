"""Blobs beyond the model (`test_model.py`): how long they are kept to the moment, and sweeps beside owners."""

from __future__ import annotations

import asyncio

from motorcade.storage.ports import Draft, Store
from tests.contracts.engines import DAY, NOW, PAYLOAD, append, digest_of, entries, sweep

#: When everything that nobody needs at NOW must be gone.
LATER = NOW + DAY


async def test_what_was_put_is_there_until_its_time_and_can_come_back(store: Store) -> None:
    """To the moment for readers; a sweep gives the room back."""
    assert await store.blobs.get(digest_of(b"nothing"), NOW) is None
    for number, data in enumerate((b"x", PAYLOAD, bytes(range(256)) * 4096)):
        now = NOW + number * 3 * DAY
        for _ in range(2):
            digest = await store.blobs.put(data, now, now + 10)
            assert digest_of(data) == digest
            await store.blobs.put(data, now + 1, now + 5)
            await store.blobs.put(data, now + 1)
            assert (1, len(data)) == await store.blobs.count(), "once"
            assert data == await store.blobs.get(digest, now + 9.75)
            assert await store.blobs.get(digest, now + 10) is None
            await sweep(store, now + 9)
            assert data == await store.blobs.get(digest, now + 9), "not before its time"
            await sweep(store, now + DAY)
            assert (0, 0) == await store.blobs.count()
            assert await store.blobs.get(digest, now + DAY) is None
            now += DAY


async def test_keep_until_and_entries_both_hold(store: Store) -> None:
    digest = await store.blobs.put(PAYLOAD, NOW, LATER + DAY)
    await append(store, "v1", Draft(b"body", PAYLOAD))
    await store.mailboxes.acknowledge("v1", [1])
    await sweep(store, LATER)
    assert PAYLOAD == await store.blobs.get(digest, LATER), "kept by the time alone"
    await append(store, "v1", Draft(b"body", PAYLOAD), LATER)
    await sweep(store, LATER + 2 * DAY)
    assert PAYLOAD == await store.blobs.get(digest, LATER + 2 * DAY), "kept by the entry alone"
    await store.mailboxes.acknowledge("v1", [2])
    await sweep(store, LATER + 4 * DAY)
    assert (0, 0) == await store.blobs.count()


async def test_a_payload_is_stored_once_for_many_owners_until_the_last_entry_goes(store: Store) -> None:
    """Across owners, whatever the sweeps do in between."""
    names = [f"v{number}" for number in range(100)]
    await store.mailboxes.append(names, Draft(b"first", PAYLOAD), NOW)
    await store.mailboxes.append(names, Draft(b"second", PAYLOAD), NOW)
    for name in names[:-1]:
        assert 2 == await store.mailboxes.clear(name)
    await store.mailboxes.acknowledge(names[-1], [1])
    await sweep(store, LATER)
    assert (1, len(PAYLOAD)) == await store.blobs.count()
    assert [PAYLOAD] == [entry.payload for entry in await entries(store, names[-1], LATER)]
    await store.mailboxes.acknowledge(names[-1], [2])
    await sweep(store, LATER + DAY)
    assert (0, 0) == await store.blobs.count()


async def test_a_payload_let_go_and_wanted_again_at_once_is_there(store: Store) -> None:
    """Sweeps run while owners come and go: no entry is ever without its payload."""
    rounds = 40

    async def use(name: str) -> None:
        for number in range(1, rounds + 1):
            await append(store, name, Draft(b"%d" % number, PAYLOAD), LATER)
            (entry,) = await entries(store, name, LATER)
            assert PAYLOAD == entry.payload
            await store.mailboxes.acknowledge(name, [number])

    async def sweep_meanwhile() -> None:
        while not done.is_set():
            await sweep(store, LATER + DAY, budget=3)
            await asyncio.sleep(0)

    done = asyncio.Event()
    sweeper = asyncio.create_task(sweep_meanwhile())
    try:
        await asyncio.gather(*(use(f"v{number}") for number in range(4)))
    finally:
        done.set()
        await sweeper
    await sweep(store, LATER + 2 * DAY)
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()
