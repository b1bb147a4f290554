"""Blobs: one copy however many refer to it, and none when nobody does."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.storage.ports import Bound, Draft, Store
from tests.contracts.engines import DAY, NOW, PAYLOAD, append, digest_of, entries, sweep

OTHER = b"another payload " * 300

#: When everything that nobody needs at NOW must be gone.
LATER = NOW + DAY


async def release_all(store: Store) -> None:
    """A complete sweep, late enough for every engine."""
    await sweep(store, LATER)


async def test_an_unknown_blob_is_none(store: Store) -> None:
    assert await store.blobs.get(digest_of(b"nothing"), NOW) is None
    assert (0, 0) == await store.blobs.count()


@pytest.mark.parametrize("data", [b"x", PAYLOAD, bytes(range(256)) * 4096], ids=["1 B", "4 KiB", "1 MiB"])
async def test_what_was_put_can_be_got(store: Store, data: bytes) -> None:
    digest = await store.blobs.put(data, NOW, NOW + 60)
    assert digest_of(data) == digest
    assert data == await store.blobs.get(digest, NOW)
    assert (1, len(data)) == await store.blobs.count()


async def test_the_same_data_is_stored_once(store: Store) -> None:
    await store.blobs.put(PAYLOAD, NOW, NOW + 60)
    await store.blobs.put(PAYLOAD, NOW + 1, NOW + 60)
    await append(store, "v1", Draft(b"body", PAYLOAD))
    await store.blobs.put(OTHER, NOW, NOW + 60)
    assert (2, len(PAYLOAD) + len(OTHER)) == await store.blobs.count()


async def test_what_was_only_put_ends_at_its_time(store: Store) -> None:
    """To the moment for readers; a sweep gives the room back."""
    digest = await store.blobs.put(PAYLOAD, NOW, NOW + 10)
    assert PAYLOAD == await store.blobs.get(digest, NOW + 9.75)
    assert await store.blobs.get(digest, NOW + 10) is None
    await sweep(store, NOW + 9)
    assert PAYLOAD == await store.blobs.get(digest, NOW + 9), "not before its time"
    await release_all(store)
    assert (0, 0) == await store.blobs.count()


async def test_a_later_put_lengthens_and_never_shortens(store: Store) -> None:
    digest = await store.blobs.put(PAYLOAD, NOW, NOW + 10)
    await store.blobs.put(PAYLOAD, NOW + 1, NOW + 2 * DAY)
    await store.blobs.put(PAYLOAD, NOW + 2, NOW + 5)
    await store.blobs.put(PAYLOAD, NOW + 2)
    assert PAYLOAD == await store.blobs.get(digest, NOW + 20)
    await release_all(store)
    assert PAYLOAD == await store.blobs.get(digest, LATER)
    await sweep(store, NOW + 4 * DAY)
    assert await store.blobs.get(digest, NOW + 4 * DAY) is None
    assert (0, 0) == await store.blobs.count()


async def test_a_blob_can_come_back(store: Store) -> None:
    digest = await store.blobs.put(PAYLOAD, NOW, NOW + 10)
    await release_all(store)
    assert await store.blobs.get(digest, LATER) is None
    assert digest == await store.blobs.put(PAYLOAD, LATER, LATER + 10)
    assert PAYLOAD == await store.blobs.get(digest, LATER)


async def test_a_payload_is_stored_once_for_many_owners(store: Store) -> None:
    names = [f"v{number}" for number in range(100)]
    await store.mailboxes.append(names, Draft(b"first", PAYLOAD), NOW)
    await store.mailboxes.append(names, Draft(b"second", PAYLOAD), NOW)
    assert (1, len(PAYLOAD)) == await store.blobs.count()
    assert PAYLOAD == await store.blobs.get(digest_of(PAYLOAD), NOW)


async def test_a_payload_stays_until_the_last_entry_goes(store: Store) -> None:
    """Across owners, whatever the sweeps do in between."""
    names = [f"v{number}" for number in range(5)]
    await store.mailboxes.append(names, Draft(b"body", PAYLOAD), NOW)
    for name in names[:-1]:
        await store.mailboxes.acknowledge(name, [1])
        await release_all(store)
        assert (1, len(PAYLOAD)) == await store.blobs.count()
    assert [PAYLOAD] == [entry.payload for entry in await entries(store, names[-1], LATER)]
    await store.mailboxes.acknowledge(names[-1], [1])
    await release_all(store)
    assert (0, 0) == await store.blobs.count()
    assert await store.blobs.get(digest_of(PAYLOAD), LATER) is None


async def test_every_way_out_releases_the_payload(store: Store) -> None:
    """Acknowledged, replaced, pushed out, refused by the bound, cleared, expired, in a batch."""
    await append(store, "acknowledged", Draft(b"", PAYLOAD + b"1"))
    await store.mailboxes.acknowledge("acknowledged", [1])
    await append(store, "replaced", Draft(b"", PAYLOAD + b"2", b"key"))
    await append(store, "replaced", Draft(b"", b"", b"key"))
    await append(store, "pushed out", Draft(b"", PAYLOAD + b"3"))
    await append(store, "pushed out", Draft(b""), bound=Bound(entries=1))
    await append(store, "refused", Draft(b"", PAYLOAD + b"4"), bound=Bound(octets=10))
    await append(store, "refused too", Draft(b""))
    await append(store, "refused too", Draft(b"", PAYLOAD + b"5", droppable=True), bound=Bound(entries=1))
    await append(store, "cleared", Draft(b"", PAYLOAD + b"6"))
    await store.mailboxes.clear("cleared")
    await append(store, "expired", Draft(b"", PAYLOAD + b"7", expires_at=NOW + 1))
    batch = store.batch()
    batch.append(["batch"], Draft(b"", PAYLOAD + b"8", b"key"), NOW)
    batch.append(["batch"], Draft(b"", PAYLOAD + b"9", b"key"), NOW)
    batch.acknowledge("batch", [2])
    await batch.commit()
    await append(store, "stays", Draft(b"", PAYLOAD))
    await release_all(store)
    assert (1, len(PAYLOAD)) == await store.blobs.count()
    assert [] == await store.check()


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in a batch"])
async def test_a_refused_append_lets_go_of_nothing_else(store: Store, together: bool) -> None:
    """The same payload is held by an entry that stays, in the same mailbox and in another."""
    stays, goes = Draft(b"stays", PAYLOAD), Draft(b"goes", PAYLOAD)
    for first, second in (("v1", "v1"), ("v2", "v3")):
        if together:
            batch = store.batch()
            batch.append([first], stays, NOW)
            batch.append([second], goes, NOW, Bound(octets=10))
            answers = await batch.commit()
        else:
            answers = [await append(store, first, stays), await append(store, second, goes, bound=Bound(octets=10))]
        assert [True, False] == [bool(answer.position) for answer in answers]
        await release_all(store)
        assert [(b"stays", PAYLOAD)] == [(entry.body, entry.payload) for entry in await entries(store, first, LATER)]
        assert PAYLOAD == await store.blobs.get(digest_of(PAYLOAD), LATER)
        await store.mailboxes.clear(first)
        await sweep(store, LATER + DAY)
        assert (0, 0) == await store.blobs.count()


async def test_a_repeated_append_holds_no_payload(store: Store) -> None:
    """Otherwise its payload would never go."""
    draft = Draft(b"body", PAYLOAD, token=b"token")
    await append(store, "v1", draft)
    await append(store, "v1", draft)
    await store.mailboxes.acknowledge("v1", [1])
    await append(store, "v1", draft)
    await release_all(store)
    assert (0, 0) == await store.blobs.count()


async def test_one_entry_twice_in_a_mailbox_holds_twice(store: Store) -> None:
    await store.mailboxes.append(["v1", "v1"], Draft(b"body", PAYLOAD), NOW)
    await store.mailboxes.acknowledge("v1", [1])
    await release_all(store)
    assert [PAYLOAD] == [entry.payload for entry in await entries(store, "v1", LATER)]


async def test_keep_until_and_entries_both_hold(store: Store) -> None:
    digest = await store.blobs.put(PAYLOAD, NOW, LATER + DAY)
    await append(store, "v1", Draft(b"body", PAYLOAD))
    await store.mailboxes.acknowledge("v1", [1])
    await release_all(store)
    assert PAYLOAD == await store.blobs.get(digest, LATER), "kept by the time alone"
    await append(store, "v1", Draft(b"body", PAYLOAD), LATER)
    await sweep(store, LATER + 2 * DAY)
    assert PAYLOAD == await store.blobs.get(digest, LATER + 2 * DAY), "kept by the entry alone"
    await store.mailboxes.acknowledge("v1", [2])
    await sweep(store, LATER + 4 * DAY)
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
