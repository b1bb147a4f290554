"""The store as a whole: batches, sweeps beside writers, figures, closing and opening again, addresses."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from motorcade.storage import open_store
from motorcade.storage.ports import (
    Appended,
    Batch,
    Bound,
    Draft,
    Durability,
    Entry,
    MailboxInfo,
    Store,
    StoreError,
    StreamInfo,
)
from tests.contracts.engines import (
    DAY,
    NOW,
    ODD_NAMES,
    PAYLOAD,
    Engine,
    append,
    atomic,
    bodies,
    digest_of,
    entries,
    eventually,
    fill,
    owners,
    persistent,
    scan,
    sweep,
)
from tests.support.redis import RedisServer

# -- batches


async def test_nothing_happens_before_the_commit(store: Store) -> None:
    batch = Batch()
    batch.append(["v1"], Draft(b"1", PAYLOAD), NOW)
    batch.put("sessions", "c1", b"value")
    batch.stream("receipts", [b"1"], NOW)
    assert [] == await entries(store, "v1")
    assert {} == await scan(store, "sessions")
    assert [] == await store.streams.names()
    assert (0, 0) == await store.blobs.count()


async def test_a_large_batch(store: Store) -> None:
    """200 owners, a payload, two hundred records and a stream: a campaign and its book-keeping."""
    names = [f"vin-{number:06}" for number in range(200)]
    batch = Batch()
    batch.append(names, Draft(b"request", PAYLOAD), NOW)
    for name in names:
        batch.put("fleet", name, b"waiting")
    batch.stream("receipts", [name.encode() for name in names], NOW)
    assert 200 == len((await store.write(batch)).appended)
    assert sorted(names) == await owners(store)
    assert 200 == len(await scan(store, "fleet"))
    assert 200 == (await store.streams.info("receipts")).records
    assert (1, len(PAYLOAD)) == await store.blobs.count()


@atomic
async def test_batches_are_seen_as_a_whole(engine: Engine, store: Store) -> None:
    """A reader who sees the first write of a batch sees the last, and the other way round."""
    assert engine.atomic == store.atomic
    rounds = 100

    async def write() -> None:
        for number in range(1, rounds + 1):
            batch = Batch()
            batch.put("first", "key", b"%d" % number)
            batch.append(["v1"], Draft(b"%d" % number), NOW)
            batch.stream("receipts", [b"%d" % number], NOW)
            batch.put("last", "key", b"%d" % number)
            await store.write(batch)

    async def number(collection: str) -> int:
        return int(await store.records.get(collection, "key", NOW) or b"0")

    writer = asyncio.create_task(write())
    while not writer.done():
        first = await number("first")
        assert await number("last") >= first
        last = await number("last")
        assert (await store.mailboxes.info("v1")).last >= last
        last = (await store.streams.info("receipts")).records
        assert await number("first") >= last
        assert await number("last") >= last
        await asyncio.sleep(0)
    await writer
    assert rounds == await number("last")


async def test_batches_in_the_air_keep_their_order(store: Store) -> None:
    """Batches of several owners, none waited for, applied one after the other (rule 6)."""
    names = [f"v{number}" for number in range(10)]

    async def commit(number: int) -> list[Appended]:
        batch = Batch()
        for name in names:
            batch.append([name], Draft(b"%d" % number), NOW)
        batch.put("sessions", "c1", b"%d" % number)
        return (await store.write(batch)).appended

    answers = await asyncio.gather(*(commit(number) for number in range(50)))
    assert [[number + 1] * 10 for number in range(50)] == [[one.position for one in answer] for answer in answers]
    for name in names:
        assert [b"%d" % number for number in range(50)] == await bodies(store, name)
    assert {"c1": b"49"} == await scan(store, "sessions")


async def test_a_sweep_beside_writers(store: Store) -> None:
    """Nothing alive goes; everything else does in the end."""

    async def write(writer: int) -> None:
        for number in range(40):
            name = f"v{number % 5}"
            await append(store, name, Draft(b"%d %d" % (writer, number), PAYLOAD, expires_at=NOW + 5))
            await append(store, name, Draft(b"%d %d" % (writer, number)))
            await store.records.put("sessions", f"c{number}", b"%d" % writer, NOW + 5 if number % 2 else 0)

    async def keep_sweeping() -> None:
        while not done.is_set():
            await sweep(store, NOW + 5, budget=5)
            await asyncio.sleep(0)

    done = asyncio.Event()
    sweeper = asyncio.create_task(keep_sweeping())
    await asyncio.gather(*(write(writer) for writer in range(4)))
    done.set()
    await sweeper
    await sweep(store, NOW + DAY)
    found = [body for number in range(5) for body in await bodies(store, f"v{number}")]
    assert sorted(b"%d %d" % (writer, number) for writer in range(4) for number in range(40)) == sorted(found)
    assert {f"c{number}" for number in range(0, 40, 2)} == set(await scan(store, "sessions"))
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()


async def test_figures_count_what_is_there(store: Store) -> None:
    before = await store.figures()
    assert (0, 0, 0, 0) == (before.entries, before.blobs, before.blob_octets, before.records)
    assert not before.full
    assert before.engine
    await store.mailboxes.append(["v1", "v2", "v3"], Draft(b"body", PAYLOAD), NOW)
    await store.mailboxes.acknowledge("v2", [1])
    await store.blobs.put(PAYLOAD + b"1", NOW, NOW + 60)
    for key in ("a", "b", "a", "c"):
        await store.records.put("sessions", key, b"value")
    await store.records.delete("sessions", "c")
    await store.records.put("topics", "a", b"value")
    after = await store.figures()
    assert (2, 2, 2 * len(PAYLOAD) + 1, 3) == (after.entries, after.blobs, after.blob_octets, after.records)
    assert after.writes > before.writes
    assert after.commits > before.commits
    assert before.engine == after.engine
    assert 0 == after.queued


# -- closing and opening


async def use_everything(store: Store) -> None:
    """Something of every kind, some of it removed again."""
    await store.mailboxes.append([*ODD_NAMES, "v1"], Draft(b"to all", PAYLOAD), NOW)
    await append(store, "v1", Draft(b"key", PAYLOAD, b"key", NOW + 60, droppable=True, token=b"token"))
    await append(store, "v1", Draft(b"key again", b"small", b"key", NOW + 60, droppable=True, token=b"token 2"))
    await store.mailboxes.mark("v1", 1, 200)
    await fill(store, "v2", b"1", b"2", b"3")
    await store.mailboxes.acknowledge("v2", [2, 3])
    await fill(store, "v3", b"1")
    await store.mailboxes.clear("v3")
    for number, name in enumerate(ODD_NAMES):
        await store.records.put("topics", name, b"%d" % number)
    await store.records.put("topics", "short", b"value", NOW + 60)
    await store.records.delete("topics", "*")
    await store.blobs.put(PAYLOAD + b"kept", NOW, NOW + 60)
    await store.streams.append("receipts", [b"1", b"22", b"333"], NOW)
    await store.streams.trim("receipts", records=2)
    await store.streams.append("dropped", [b"1"], NOW)
    await store.streams.drop("dropped")
    batch = Batch()
    batch.append(["v4"], Draft(b"batch", PAYLOAD + b"batch"), NOW)
    batch.put("sessions", "c1", b"batch")
    batch.stream("capture", [b"batch"], NOW)
    await store.write(batch)


@persistent
async def test_what_was_written_survives_closing_and_opening(engine: Engine) -> None:
    """Contents, what mailboxes know (positions, keys, tokens, which entries go first), sizes and soundness."""
    first = engine.make()
    await first.open()
    await use_everything(first)
    await first.close()
    store = engine.make()
    await store.open()
    figures = await store.figures()
    assert (len(ODD_NAMES) + 4, len(ODD_NAMES) + 1) == (figures.entries, figures.records)
    assert [] == await store.check()
    await mailboxes_are_there(store)
    await records_are_there(store)
    await streams_are_there(store)
    await blobs_are_there(store)
    await store.close()


async def mailboxes_are_there(store: Store) -> None:
    assert [
        Entry(1, b"to all", PAYLOAD, b"", NOW, 0.0, 200),
        Entry(3, b"key again", b"small", b"key", NOW, NOW + 60, 0),
    ] == await entries(store, "v1")
    assert [b"1"] == await bodies(store, "v2")
    assert [b"batch"] == await bodies(store, "v4")
    for name in ODD_NAMES:
        assert [PAYLOAD] == [entry.payload for entry in await entries(store, name)]
    assert sorted([*ODD_NAMES, "v1", "v2", "v4"]) == await owners(store)
    assert MailboxInfo(2, 6 + len(PAYLOAD) + 14, 1, 3, 1) == await store.mailboxes.info("v1")
    assert MailboxInfo(0, 0, 0, 1, 1) == await store.mailboxes.info("v3")
    assert [b"to all"] == await bodies(store, "v1", NOW + 60)
    # Positions, keys, tokens, and which entries go first.
    assert Appended("v3", 2) == await append(store, "v3", Draft(b"2"))
    assert Appended("v2", 4) == await append(store, "v2", Draft(b"4"))
    assert Appended("v1", 2, repeated=True) == await append(store, "v1", Draft(b"key", token=b"token"))
    assert Appended("v1", 4, dropped=(3,)) == await append(store, "v1", Draft(b"4"), bound=Bound(entries=2))
    assert Appended("v1", 5) == await append(store, "v1", Draft(b"5", key=b"key"))
    assert Appended("v1", 6, replaced=5) == await append(store, "v1", Draft(b"6", key=b"key"))


async def records_are_there(store: Store) -> None:
    wanted = {name: b"%d" % number for number, name in enumerate(ODD_NAMES) if name != "*"}
    assert wanted | {"short": b"value"} == await scan(store, "topics")
    assert wanted == await scan(store, "topics", now=NOW + 60)
    assert {"c1": b"batch"} == await scan(store, "sessions")


async def streams_are_there(store: Store) -> None:
    assert ["capture", "receipts"] == sorted(await store.streams.names())
    found = await store.streams.read("receipts", 0, 10)
    assert [(NOW, b"22"), (NOW, b"333")] == [(record.time, record.value) for record in found]
    assert StreamInfo(found[0].offset, found[1].offset, 2, 5) == await store.streams.info("receipts")
    (offset,) = await store.streams.append("receipts", [b"4"], NOW - 5)
    assert offset > found[1].offset
    assert NOW == (await store.streams.read("receipts", found[1].offset, 1))[0].time


async def blobs_are_there(store: Store) -> None:
    assert PAYLOAD + b"kept" == await store.blobs.get(digest_of(PAYLOAD + b"kept"), NOW)
    assert await store.blobs.get(digest_of(PAYLOAD + b"kept"), NOW + 60) is None
    await sweep(store, NOW + DAY)
    assert (2, 2 * len(PAYLOAD) + 5) == await store.blobs.count()
    for name in [*ODD_NAMES, "v1", "v4"]:
        await store.mailboxes.clear(name)
    await sweep(store, NOW + 2 * DAY)
    assert (0, 0) == await store.blobs.count()


@persistent
async def test_fencing_tokens_grow_across_openings(engine: Engine) -> None:
    """A leader from before must not look newer than one from after."""
    tokens = []
    for _ in range(3):
        store = engine.make()
        await store.open()
        lease = await eventually(
            lambda store=store: store.coordination.acquire("sweeper", "node", 0.05, time.time()),  # type: ignore[misc]
            lambda lease: lease is not None,
        )
        tokens.append(lease.token)
        await store.close()
    assert sorted(set(tokens)) == tokens


async def test_opening_and_closing_again_and_again(engine: Engine) -> None:
    """The same object, too."""
    store = engine.make()
    for number in range(1, 6):
        await store.open()
        await append(store, "v1", Draft(b"%d" % number, PAYLOAD))
        assert (number if engine.persistent else 1) == len(await entries(store, "v1"))
        await store.close()


async def test_a_closed_store_says_so(engine: Engine) -> None:
    store = engine.make()
    await store.open()
    await fill(store, "v1", b"1")
    mailboxes, batch = store.mailboxes, Batch()
    await store.close()
    await store.close()
    batch.put("sessions", "c1", b"value")
    for call in (
        mailboxes.append(["v1"], Draft(b"body"), NOW),
        store.mailboxes.read("v1", 0, 10, NOW),
        store.mailboxes.info("v1"),
        store.blobs.put(PAYLOAD, NOW),
        store.records.get("sessions", "c1", NOW),
        store.streams.append("receipts", [b"1"], NOW),
        store.coordination.attach("v1", "node"),
        store.write(batch),
        store.sweep(NOW, 10),
    ):
        with pytest.raises(StoreError):
            await call


async def test_closing_waits_for_what_is_in_the_air(engine: Engine) -> None:
    """Every write that began before is answered: done, or refused and not done."""
    store = engine.make()
    await store.open()
    calls = [asyncio.create_task(append(store, "v1", Draft(b"%d" % number))) for number in range(50)]
    await asyncio.sleep(0)
    await store.close()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, Appended | StoreError) for answer in answers)
    done = [b"%d" % number for number, answer in enumerate(answers) if isinstance(answer, Appended)]
    if engine.persistent:
        await store.open()
        assert done == await bodies(store, "v1")
        await store.close()


# -- addresses


async def test_a_store_is_opened_by_its_address(tmp_path: Path, redis_server: RedisServer) -> None:
    """Each kind; the data is where the address says. Any other is refused with the forms that there are."""
    for url, engine in (
        ("memory://", "memory"),
        (f"rocksdb://{tmp_path}/data", "rocksdb"),
        (redis_server.url, "redis"),
    ):
        store = await open_store(url, Durability.FAST)
        assert engine == (await store.figures()).engine
        await store.close()
    assert (tmp_path / "data").is_dir()
    for url in ("", "memory", "rocksdb://", "redis://", "sqlite:///x.db", "/var/lib/motorcade"):
        with pytest.raises(StoreError, match="memory://, rocksdb://DIRECTORY"):
            await open_store(url)
