"""The embedded engine beyond the contracts: groups, queue, files, damage, full disks, copies."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from rocksdict import Options, Rdict, WriteBatch

from motorcade.storage import deltas, tables, writer
from motorcade.storage import files as files_module
from motorcade.storage.files import Files, RocksTables, Step, migrate, write_meta
from motorcade.storage.ports import (
    SPARE_ALL,
    Batch,
    Bound,
    Draft,
    Durability,
    Entry,
    FeedEnd,
    Fence,
    MailboxInfo,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StreamRecord,
    Written,
)
from motorcade.storage.rocks import RocksStore
from motorcade.storage.transaction import state
from motorcade.storage.writer import RocksWriter
from tests.support.waiting import until

NOW = 1_000_000.0
PAYLOAD = b"payload " * 512


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RocksStore]:
    store = RocksStore(tmp_path / "store")
    await store.open()
    yield store
    await store.close()


async def reopened(store: RocksStore, **options: int) -> RocksStore:
    await store.close()
    again = RocksStore(store.path, **options)  # type: ignore[arg-type]
    await again.open()
    return again


# -- groups and the queue


async def test_calls_in_the_air_share_groups(store: RocksStore) -> None:
    before = await store.figures()
    await asyncio.gather(*(store.mailboxes.append([f"v{number}"], Draft(b""), NOW) for number in range(500)))
    after = await store.figures()
    assert 500 == after.writes - before.writes
    assert after.commits - before.commits < 50


async def test_a_full_queue_lets_callers_wait_in_order(tmp_path: Path) -> None:
    """Nothing is refused, nothing overtakes, and the writer never holds more than allowed."""
    store = RocksStore(tmp_path, max_queued=4)
    await store.open()
    appends = [asyncio.create_task(store.mailboxes.append(["v"], Draft(b"%d" % number), NOW)) for number in range(100)]
    await asyncio.sleep(0)
    assert 4 == store._writer._held
    assert 96 == len(store._writer._line)
    answers = await asyncio.gather(*appends)
    assert list(range(1, 101)) == [answer.position for (answer,) in answers]
    assert 0 == (await store.figures()).queued
    await store.close()


async def test_a_write_is_carried_out_although_its_caller_gives_up(tmp_path: Path) -> None:
    """Others may rely on the order in which writes began."""
    store = RocksStore(tmp_path, max_queued=1)
    await store.open()
    first, second, third = (
        asyncio.create_task(store.mailboxes.append(["v"], Draft(body), NOW)) for body in (b"1", b"2", b"3")
    )
    await asyncio.sleep(0)
    second.cancel()
    await first
    await third
    assert [b"1", b"2", b"3"] == [entry.body for entry in await store.mailboxes.read("v", 0, 9, NOW)]
    await until(lambda: store._writer.queued == 0)
    await store.close()


async def test_closing_commits_what_waits(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, max_queued=2)
    await store.open()
    appends = [asyncio.create_task(store.mailboxes.append(["v"], Draft(b""), NOW)) for _ in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert 20 == len(await asyncio.gather(*appends))
    again = await reopened(store)
    assert MailboxInfo(20, 0, 1, 20, 1) == await again.mailboxes.info("v")
    await again.close()


async def test_an_impossible_call_does_not_harm_those_beside_it(store: RocksStore) -> None:
    """They share a transaction until one of them turns out to be impossible."""
    calls = [
        store.mailboxes.append(["good"], Draft(b"1"), NOW),
        store.mailboxes.append(["good", "bad\0name"], Draft(b"2", PAYLOAD), NOW),
        store.mailboxes.append(["good"], Draft(b"3"), NOW),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], ValueError)
    assert [b"1", b"3"] == [entry.body for entry in await store.mailboxes.read("good", 0, 9, NOW)]
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()


async def test_acknowledgements_alone_wait_for_no_sync(store: RocksStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.mailboxes.append(["v"], Draft(b""), NOW)
    synced = count_syncs(store, monkeypatch)
    assert 1 == await store.mailboxes.acknowledge("v", [1])
    assert [] == synced
    await store.mailboxes.append(["v"], Draft(b""), NOW)
    assert [True] == synced


async def test_what_must_be_synced_is_though_an_acknowledgement_follows(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.mailboxes.append(["v"], Draft(b""), NOW)
    synced = count_syncs(store, monkeypatch)
    await asyncio.gather(store.mailboxes.append(["v"], Draft(b""), NOW), store.mailboxes.acknowledge("v", [1]))
    assert [True] == synced


async def test_the_fast_level_never_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RocksStore(tmp_path, Durability.FAST)
    await store.open()
    synced = count_syncs(store, monkeypatch)
    await store.mailboxes.append(["v"], Draft(b""), NOW)
    assert [] == synced
    await store.close()


class SecondBreaks:
    """A database whose second write fails."""

    def __init__(self, db: Rdict) -> None:
        self._db = db
        self.writes = 0
        self.synced: list[bool] = []

    def write(self, *given: object) -> None:
        self.writes += 1
        if self.writes == 2:
            raise OSError("Input/output error")
        self._db.write(*given)  # type: ignore[arg-type]

    def flush_wal(self, sync: bool) -> None:
        self.synced.append(sync)
        self._db.flush_wal(sync)

    def __getattr__(self, name: str) -> object:
        return getattr(self._db, name)


async def test_of_a_group_that_failed_each_write_is_stored_or_refused(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second write fails: the first one is in the log of the files, and confirmed when these are open again."""
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(writer, "MERGE_ROWS", 1)
    opened = store._writer._tables
    assert opened is not None
    breaking = SecondBreaks(opened.db)
    told: list[tuple[str, int]] = []
    store.streams.watch(lambda stream, last: told.append((stream, last)))
    with monkeypatch.context() as patch:
        patch.setattr(opened, "db", breaking)
        calls = [store.streams.append("a", [b"1"], NOW), store.streams.append("b", [b"1"], NOW)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert 2 == breaking.writes and not breaking.synced
    assert [1] == answers[0]
    assert isinstance(answers[1], StoreFullError) and answers[1].certain
    assert [("a", 1)] == told
    await until(lambda: not store._writer.full)
    assert [2] == await store.streams.append("a", [b"2"], NOW)
    assert [1] == await store.streams.append("b", [b"2"], NOW), "what was refused is not there"


def giving_up(fence: Fence) -> Batch:
    """A last decision."""
    batch = Batch()
    batch.put("session", fence.home, b"asleep")
    batch.detach(fence)
    return batch


async def test_a_home_is_given_up_only_if_the_last_decision_is_stored(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that give up their homes the second write fails; of three in one transaction one is impossible."""
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    fences = [(await store.coordination.attach(name, "node-a")).fence for name in "abcd"]
    opened = store._writer._tables
    assert opened is not None
    with monkeypatch.context() as patch:
        patch.setattr(writer, "MERGE_ROWS", 1)
        patch.setattr(opened, "db", SecondBreaks(opened.db))
        outcomes = await asyncio.gather(
            *(store.write(giving_up(fence)) for fence in fences[:2]), return_exceptions=True
        )
    assert [Written, StoreFullError] == list(map(type, outcomes))
    await until(lambda: not store._writer.full)
    impossible = Batch()
    impossible.put("bad\0name", "key", b"")
    together = [giving_up(fences[2]), impossible, giving_up(fences[3])]
    outcomes = await asyncio.gather(*map(store.write, together), return_exceptions=True)
    assert [Written, ValueError, Written] == list(map(type, outcomes))
    assert ["b"] == [fence.home async for fence in store.coordination.attached("node-a", 0)]
    assert await store.records.get("session", "b", NOW) is None
    await store.write(giving_up(fences[1]))
    assert b"asleep" == await store.records.get("session", "b", NOW)


def break_sync(store: RocksStore, patch: pytest.MonkeyPatch) -> None:
    """Let every write reach the log of the files, and no sync succeed."""
    opened = store._writer._tables
    assert opened is not None
    db = opened.db

    class Breaking:
        def flush_wal(self, sync: bool) -> None:
            raise OSError(f"Input/output error ({sync})")

        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

    patch.setattr(opened, "db", Breaking())


async def test_a_failed_sync_is_confirmed_when_the_files_are_open_again(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was answered from it: the repetition of a token that is not durable yet. Nothing is there twice."""
    monkeypatch.setattr(writer, "MERGE_ROWS", 1)
    may_open = threading.Event()
    reopen = RocksWriter._open_again
    monkeypatch.setattr(RocksWriter, "_open_again", lambda self: reopen(self) if may_open.is_set() else None)
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    order: list[int] = []
    with monkeypatch.context() as patch:
        break_sync(store, patch)
        commits = []
        for number in range(3):
            batch = Batch()
            batch.append(["v"], Draft(b"%d" % (number // 2), token=b"%d" % (number // 2)), NOW)
            commits.append(store.write(batch))
            commits[-1].then(partial(order.append, number))
        await until(lambda: store._writer.full)
    with pytest.raises(StoreFullError):
        await store.mailboxes.append(["v"], Draft(b"refused"), NOW)
    assert not any(commit.done for commit in commits)
    assert 3 == store._writer.queued and 0 == store._writer._held
    may_open.set()
    appended = [answer for commit in commits for answer in (await commit).appended]
    assert [(1, False), (1, True), (2, False)] == [(answer.position, answer.repeated) for answer in appended]
    assert [0, 1, 2] == order
    assert [b"0", b"1"] == [entry.body for entry in await store.mailboxes.read("v", 0, 9, NOW)]
    assert 3 == (await store.mailboxes.append(["v"], Draft(b"3"), NOW))[0].position


@pytest.mark.parametrize("opens", [True, False])
async def test_closing_after_a_failed_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
    """The files are asked once more; if they cannot be opened, nobody knows."""
    store = RocksStore(tmp_path / "store")
    await store.open()
    if not opens:
        monkeypatch.setattr(RocksWriter, "_open_again", lambda _: None)
    with monkeypatch.context() as patch:
        break_sync(store, patch)
        batch = Batch()
        batch.append(["v"], Draft(b"1"), NOW)
        commit = store.write(batch)
        await until(lambda: store._writer.full)
    await store.close()
    assert commit.done
    if opens:
        assert commit.error is None and 1 == commit.result.appended[0].position
    else:
        assert isinstance(commit.error, StoreError) and not commit.refused
    assert 0 == store._writer.queued


async def test_files_that_cannot_be_read_cannot_tell(store: RocksStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers are not kept waiting for somebody to mend the disk."""
    batch = Batch()
    batch.append(["v"], Draft(b"1"), NOW)

    def fail(_files: Files, _key: bytes) -> bytes:
        raise StoreError("File too large")

    with monkeypatch.context() as patch:
        break_sync(store, patch)
        patch.setattr(Files, "stored", fail)
        commit = store.write(batch)
        with pytest.raises(StoreError, match="cannot tell"):
            await asyncio.wait_for(commit, 60)
    assert not commit.refused
    await until(lambda: 0 == store._writer.queued == store._writer._held)


def count_syncs(store: RocksStore, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows with every sync."""
    synced: list[bool] = []
    opened = store._writer._tables
    assert opened is not None

    class Watched:
        def flush_wal(self, sync: bool) -> None:
            synced.append(sync)
            db.flush_wal(sync)

        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

    db = opened.db
    monkeypatch.setattr(opened, "db", Watched())
    return synced


# -- heads


async def test_sizes_are_right_after_opening_again(store: RocksStore) -> None:
    """Heads are written now and then; what came since is counted."""
    counts = (1, tables.TAIL - 1, tables.TAIL, tables.TAIL + 1, 3 * tables.TAIL + 5)
    for count in counts:
        for number in range(count):
            await store.mailboxes.append([f"v{count}"], Draft(b"%03d" % number, droppable=number % 2 == 0), NOW)
    again = await reopened(store)
    for count in counts:
        assert MailboxInfo(count, 3 * count, 1, count, 1) == await again.mailboxes.info(f"v{count}")
    assert [] == await again.check()
    await again.close()


async def test_positions_go_on_after_everything_was_acknowledged_and_reopened(store: RocksStore) -> None:
    await store.mailboxes.append(["v"], Draft(b""), NOW)
    await store.mailboxes.acknowledge("v", [1])
    again = await reopened(store)
    (answer,) = await again.mailboxes.append(["v"], Draft(b""), NOW)
    assert 2 == answer.position
    assert ["v"] == [owner async for owner in again.mailboxes.owners()]
    await again.close()


async def test_what_is_forgotten_takes_no_place_in_the_cache_of_heads(store: RocksStore) -> None:
    """Owners are chosen by clients. One that comes back begins again, also in the transaction that forgets it."""
    boxes = store.mailboxes
    heads = store._writer.state.heads
    for number in range(50):
        await boxes.append([f"car-{number}"], Draft(b"body", PAYLOAD), NOW)
    assert 50 == len(heads.young)
    await asyncio.gather(*(boxes.forget(f"car-{number}") for number in range(49)))
    assert ["car-49"] == [*heads.young, *heads.old]
    (again,) = await boxes.append(["car-7"], Draft(b"again"), NOW)
    assert 2 == again.position
    _, appended = await asyncio.gather(boxes.forget("car-49"), boxes.append(["car-49"], Draft(b"new"), NOW))
    assert (2, [b"new"]) == (appended[0].position, [entry.body for entry in await boxes.read("car-49", 0, 9, NOW)])
    store = await reopened(store)
    assert [b"again"] == [entry.body for entry in await store.mailboxes.read("car-7", 0, 9, NOW)]
    assert [] == await store.mailboxes.read("car-8", 0, 9, NOW)
    await store.close()


async def test_a_small_cache_of_heads_changes_nothing(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, max_heads=4)
    await store.open()
    owners = [f"v{number}" for number in range(50)]
    for number in range(1, 4):
        answers = await store.mailboxes.append([*owners, *owners], Draft(b"x", key=b"k%d" % number), NOW)
        assert {2 * number - 1, 2 * number} == {answer.position for answer in answers}
    assert all([MailboxInfo(3, 3, 2, 6, 1) == await store.mailboxes.info(owner) for owner in owners])
    assert [] == await store.check()
    await store.close()


class Asked:
    """Stands before a table and counts what is asked of it."""

    def __init__(self, table: Rdict) -> None:
        self.table = table
        self.count = 0

    def get(self, key: bytes) -> bytes | None:
        self.count += 1
        found: bytes | None = self.table.get(key)
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self.table, name)


async def test_a_key_that_is_new_to_a_mailbox_is_not_looked_for(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes as long as writing a row; a campaign asks for two hundred vehicles at once."""
    monkeypatch.setattr(tables, "key_bit", lambda key: 1 << key[0])
    owners = [f"v{number}" for number in range(50)]
    opened = store._writer._tables
    assert opened is not None
    asked = Asked(opened.keys)
    opened.keys = asked  # type: ignore[assignment]
    try:
        await store.mailboxes.append([*owners, "other"], Draft(b"", key=b"a"), NOW)
        await store.mailboxes.append(owners, Draft(b"", key=b"b"), NOW)
        assert 0 == asked.count
        answers = await store.mailboxes.append(owners, Draft(b"", key=b"a"), NOW)
        assert {1} == {answer.replaced for answer in answers}
        assert 50 <= asked.count <= 51
        for owner in owners:
            await store.mailboxes.clear(owner)
        asked.count = 0
        await store.mailboxes.append(owners, Draft(b"", key=b"a"), NOW)
        assert 0 == asked.count
    finally:
        opened.keys = asked.table
        del opened, asked


async def test_keys_are_found_whatever_is_known_of_a_mailbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mailbox that was never empty, opened again, out of the cache, full, attached; few bits, and many keys."""
    for bits in (0, 1, tables.KEY_BITS):
        monkeypatch.setattr(tables, "KEY_BITS", bits)
        await find_keys(RocksStore(tmp_path / str(bits), max_heads=8))


async def find_keys(store: RocksStore) -> None:
    await store.open()
    owners = [f"v{number}" for number in range(20)]
    newest: dict[bytes, int] = {}
    for turn in range(1, 9):
        for number in range(turn * 3):
            key = b"%d" % (number * number % 17)
            bound = Bound(entries=40) if number % 3 == 0 else Bound()
            for answer in await store.mailboxes.append(owners, Draft(b"x", key=key), NOW, bound):
                assert newest.get(key, 0) == answer.replaced, (turn, number, answer)
                position = answer.position
            newest[key] = position
        if turn == 3:
            store = await reopened(store, max_heads=8)
        elif turn == 5:
            await asyncio.gather(*(store.coordination.attach(owner, "node") for owner in owners[::2]))
        elif turn == 7:
            gone = [newest.pop(key) for key in [*newest][::2]]
            for owner in owners:
                await store.mailboxes.acknowledge(owner, gone)
    assert {(len(newest), position)} == {
        ((await store.mailboxes.info(owner)).entries, (await store.mailboxes.info(owner)).last) for owner in owners
    }
    assert [] == await store.check()
    await store.close()


async def test_a_page_from_which_entries_are_removed_meanwhile_is_filled_with_others(store: RocksStore) -> None:
    """A short page would tell the reader that there is nothing more."""
    for number in range(8):
        await store.mailboxes.append(["v"], Draft(b"%d" % number, bytes([number]) * (300 * 1024)), NOW)
    for limit, gone, wanted in ((1, [1], [b"1"]), (4, [3, 4], [b"1", b"4", b"5", b"6"])):
        free = threading.Event()
        busy = [asyncio.ensure_future(store._reader.beside(lambda _: free.wait(60))) for _ in range(2)]  # noqa: B023
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(store.mailboxes.read("v", 0, limit, NOW))
        await asyncio.sleep(0)  # the rows are found; their payloads wait for a thread
        assert len(gone) == await store.mailboxes.acknowledge("v", gone)
        free.set()
        assert wanted == [entry.body for entry in await reading]
        await asyncio.gather(*busy)


async def test_readers_never_find_a_replaced_mailbox_empty(store: RocksStore) -> None:
    """Old or new, never nothing, while one value is replaced again and again.

    A read that goes on in steps, over many that were removed, may find both.
    """
    await store.mailboxes.append(["v"], Draft(b"0", key=b"key"), NOW)

    async def replace() -> None:
        for number in range(300):
            await store.mailboxes.append(["v"], Draft(b"%d" % number, key=b"key"), NOW)

    replacing = asyncio.create_task(replace())
    while not replacing.done():
        assert 1 <= len(await store.mailboxes.read("v", 0, 9, NOW)) <= 2
        await asyncio.sleep(0)
    await replacing
    assert [b"299"] == [entry.body for entry in await store.mailboxes.read("v", 0, 9, NOW)]


# -- shared messages and notes


async def test_a_message_for_many_is_stored_once_and_goes_with_its_last_entry(store: RocksStore) -> None:
    owners = [f"v{number}" for number in range(50)]
    await store.mailboxes.append(owners, Draft(b"body" * 20, b"payload" * 10), NOW)
    await store.mailboxes.append(owners, Draft(b"body", PAYLOAD, b"key", expires_at=NOW + 9), NOW)
    figures = await store.figures()
    assert (100, 2, 1) == (figures.entries, figures.shared, figures.blobs)
    opened = store._writer._tables
    assert opened is not None
    assert {14, 22} == {len(row) for row in opened.entries.values()}
    del opened
    again = await reopened(store)
    for owner in owners:
        first, second = await again.mailboxes.read(owner, 0, 9, NOW)
        assert (b"body" * 20, b"payload" * 10, b"", 0.0) == (first.body, first.payload, first.key, first.expires_at)
        assert (b"body", PAYLOAD, b"key", NOW + 9) == (second.body, second.payload, second.key, second.expires_at)
        assert MailboxInfo(2, 154 + len(PAYLOAD), 1, 2, 1) == await again.mailboxes.info(owner)
        assert 2 == (await again.figures()).shared
        assert 1 == await again.mailboxes.acknowledge(owner, [1])
    assert [] == await again.check()
    figures = await again.figures()
    assert (50, 1, 1) == (figures.entries, figures.shared, figures.blobs)
    assert 50 == (await again.sweep(NOW + 9, 100)).removed
    assert {"heads": 50, "meta": 4} == rows_of(again)
    await again.close()


async def test_few_small_copies_are_not_shared(store: RocksStore) -> None:
    await store.mailboxes.append(["v", "w"], Draft(b"body"), NOW)
    assert 0 == (await store.figures()).shared


async def test_copies_that_are_pushed_out_or_repeated_hold_nothing(store: RocksStore) -> None:
    """Counters are right however a copy comes to nothing: no room, no room ever, a known token."""
    owners = [f"v{number}" for number in range(20)]
    kept, bound = Draft(b"kept"), Bound(entries=1)
    await store.mailboxes.append(owners[:10], kept, NOW)
    small = Draft(bytes(99), PAYLOAD, droppable=True)
    answers = await store.mailboxes.append(owners, small, NOW, bound)
    assert [0] * 10 + [1] * 10 == [answer.position for answer in answers]
    assert [] == await store.check()
    with_token = Draft(bytes(99), PAYLOAD, token=b"token")
    await store.mailboxes.append(owners[5:15], with_token, NOW, bound)
    answers = await store.mailboxes.append(owners, with_token, NOW, bound)
    assert [owner in owners[5:15] for owner in owners] == [answer.repeated for answer in answers]
    assert [] == await store.check()
    assert {0} == {answer.position for answer in await store.mailboxes.append(owners, small, NOW, Bound(size_bytes=9))}
    for owner in owners:
        await store.mailboxes.clear(owner)
    figures = await store.figures()
    assert (0, 0, 0) == (figures.entries, figures.shared, figures.blobs)
    assert [] == await store.check()


async def test_what_is_acknowledged_twice_counts_once_though_it_was_seen(store: RocksStore) -> None:
    """What readers saw spares the writer a look, but never tells it that an entry is still there."""
    owners = [f"v{number}" for number in range(30)]
    for _ in range(6):
        await store.mailboxes.append(owners, Draft(bytes(50)), NOW)
    assert 6 == len(await store.mailboxes.read("v0", 0, 9, NOW))
    removed = [await store.mailboxes.acknowledge("v0", [position]) for position in (1, 1, 4, 4, 2, 4, 6, 6)]
    assert [1, 0, 1, 0, 1, 0, 1, 0] == removed
    assert [3, 5] == [entry.position for entry in await store.mailboxes.read("v0", 0, 9, NOW)]
    await store.mailboxes.forget("v0")
    (new,) = await store.mailboxes.append(["v0"], Draft(b"new"), NOW)
    assert 0 == await store.mailboxes.acknowledge("v0", range(1, 7))
    assert 1 == await store.mailboxes.acknowledge("v0", [new.position])
    assert [] == await store.check()
    assert 0 == (await store.mailboxes.info("v0")).size_bytes


async def test_entries_that_lie_together_are_not_read_one_by_one_to_be_removed(store: RocksStore) -> None:
    """A queue acknowledges far behind what its readers saw last."""
    batch = Batch()
    for number in range(400):
        batch.append(["q"], Draft(b"%d" % number), NOW)
    await store.write(batch)
    await store.close()
    await store.open()
    opened = store._writer._tables
    assert opened is not None
    asked = Asked(opened.entries)
    opened.entries = asked  # type: ignore[assignment]
    try:
        assert 100 == await store.mailboxes.acknowledge("q", range(1, 101))
        assert 50 == await store.mailboxes.acknowledge("q", range(300, 200, -2))
        assert 0 == asked.count
        assert 3 == await store.mailboxes.acknowledge("q", [101, 150, 400])
        assert 3 == asked.count
    finally:
        opened.entries = asked.table
        del opened, asked
    assert MailboxInfo(247, 247 * 3, 102, 400, 1) == await store.mailboxes.info("q")
    assert [] == await store.check()


async def test_what_has_just_come_is_not_looked_up_to_be_removed(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is connected gets a message without a look at the store, and acknowledges it at once."""
    owners = [f"v{number}" for number in range(50)]
    opened = store._writer._tables
    assert opened is not None
    asked = Asked(opened.entries)
    opened.entries = asked  # type: ignore[assignment]
    try:
        for draft in (Draft(b"own"), Draft(bytes(50), PAYLOAD, b"key"), Draft(b"own", key=b"key")):
            for answer in await store.mailboxes.append(owners, draft, NOW):
                assert 1 == await store.mailboxes.acknowledge(answer.owner, [answer.position])
            for owner in owners:
                (one,) = await store.mailboxes.append([owner], draft, NOW)
                (two,) = await store.mailboxes.append([owner], draft, NOW)
                assert (one.position if draft.key else 0) == two.replaced
                gone = [two.position] if draft.key else [one.position, two.position]
                assert len(gone) == await store.mailboxes.acknowledge(owner, gone)
        assert 0 == asked.count
        monkeypatch.setattr(state, "MAX_KNOWN", 100)
        await store.mailboxes.append(["v1"], Draft(b"later"), NOW)
        await store.mailboxes.append(["v2"], Draft(bytes(200)), NOW)
        await store.mailboxes.append(["v3"], Draft(bytes(200)), NOW)
        assert 1 == await store.mailboxes.acknowledge("v1", [(await store.mailboxes.info("v1")).last])
        assert 1 == asked.count
    finally:
        opened.entries = asked.table
        del opened, asked
    assert [] == await store.check()


async def test_any_entries_may_be_removed_at_once(store: RocksStore) -> None:
    """Of all kinds; those that are there, were never there, came in the same batch, were read or not; named twice."""
    for seed in range(6):
        await remove_any(store, random.Random(seed), [f"v{seed}", f"w{seed}", f"x{seed}"])


async def remove_any(store: RocksStore, draw: random.Random, owners: list[str]) -> None:
    there: dict[str, dict[int, bytes]] = {owner: {} for owner in owners}
    last = dict.fromkeys(there, 0)
    for _ in range(25):
        batch = Batch()
        for _ in range(draw.randrange(40)):
            key = draw.choice([b"", b"", b"", b"k%d" % draw.randrange(20)])
            some = draw.sample(sorted(there), draw.choice([1, 1, 3]))
            payload = draw.choice([b"", b"", b"small", PAYLOAD])
            batch.append(some, Draft(bytes(draw.randrange(200)), payload, key, droppable=draw.random() < 0.1), NOW)
            for owner in some:
                last[owner] += 1
                mine = there[owner]
                there[owner] = {place: own for place, own in mine.items() if not key or own != key} | {last[owner]: key}
        for owner, mine in there.items():
            if draw.random() < 0.5:
                gone = draw.choices(range(-1, last[owner] + 3), k=draw.choice([0, 1, 2, 30, 200]))
                if draw.random() < 0.5:
                    start = draw.randrange(last[owner] + 1)
                    gone = list(range(start, start + draw.randrange(1, 60)))
                batch.acknowledge(owner, gone)
                there[owner] = {place: key for place, key in mine.items() if place not in set(gone)}
        await store.write(batch)
        for owner, mine in there.items():
            info = await store.mailboxes.info(owner)
            assert (len(mine), min(mine, default=0), last[owner]) == (info.entries, info.first, info.last)
            if draw.random() < 0.3:
                entries = await store.mailboxes.read(owner, 0, draw.choice([10, 60, 1000]), NOW)
                assert list(mine)[: len(entries)] == [entry.position for entry in entries]
                wanted = draw.sample(entries, draw.randrange(len(entries) + 1))
                positions = [entry.position for entry in wanted]
                assert len(wanted) == await store.mailboxes.acknowledge(owner, positions * 2)
                assert 0 == await store.mailboxes.acknowledge(owner, positions)
                there[owner] = {place: key for place, key in mine.items() if place not in positions}
    assert [] == await store.check()
    for owner, mine in there.items():
        assert len(mine) == await store.mailboxes.acknowledge(owner, range(last[owner] + 9))
        assert MailboxInfo(0, 0, 0, last[owner], 1) == await store.mailboxes.info(owner)
    assert [] == await store.check()
    assert (0, 0) == await store.blobs.count()


async def test_notes_are_put_in_place_and_their_log_stays_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many generations of notes; opened again in the middle of each kind."""
    monkeypatch.setattr(deltas, "MAX_CHANGED", 40)
    monkeypatch.setattr(deltas, "MAX_ROWS", 25)
    store = RocksStore(tmp_path)
    await store.open()
    owners = [f"v{number}" for number in range(60)]
    for turn in range(1, 41):
        some = owners[turn % 7 :: 7]
        answers = await store.mailboxes.append(some, Draft(bytes(60), PAYLOAD), NOW)
        for answer in answers[::2]:
            await store.mailboxes.acknowledge(answer.owner, [answer.position])
        await store.mailboxes.forget(owners[turn])
        if turn % 9 == 0:
            assert [] == await store.check()
            store = await reopened(store)
    opened = store._writer._tables
    assert opened is not None
    rows, heads = len(list(opened.notes.keys())), len(list(opened.heads.keys()))
    del opened
    assert rows < 75
    assert heads > 10
    for owner in owners:
        await store.mailboxes.clear(owner)
    figures = await store.figures()
    assert (0, 0, 0) == (figures.entries, figures.shared, figures.blobs)
    assert [] == await store.check()
    await store.close()


# -- sweeps


async def test_a_prolonged_record_leaves_no_trail(store: RocksStore) -> None:
    for number in range(50):
        await store.records.put("sessions", "v", b"", NOW + 10 + number)
    opened = store._writer._tables
    assert opened is not None
    assert 1 == len(list(opened.endings.keys()))
    del opened
    assert 0 == (await store.sweep(NOW + 20, 100)).removed
    assert b"" == await store.records.get("sessions", "v", NOW + 20)
    assert 1 == (await store.sweep(NOW + 60, 100)).removed
    assert 0 == (await store.figures()).records


async def test_a_sweep_leaves_nothing_behind(store: RocksStore) -> None:
    owners = [f"v{number}" for number in range(600)]
    await store.mailboxes.append(owners, Draft(b"1", PAYLOAD, b"k", expires_at=NOW + 1, token=b"t"), NOW)
    removed = 0
    cursor: bytes | None = b""
    while cursor is not None:
        step = await store.sweep(NOW + 4000, 7, cursor)
        assert step.removed <= 7
        removed, cursor = removed + step.removed, step.cursor
    assert 600 == removed
    assert {"heads": 600, "meta": 4} == rows_of(store)
    assert [] == await store.check()


def rows_of(store: RocksStore) -> dict[str, int]:
    """How many rows each table has, noted or in place."""
    opened = store._writer._tables
    assert opened is not None
    keys = {table: set(getattr(opened, table).keys()) for table in tables.TABLES if table != "notes"}
    del opened
    for key, value in store._writer.state.deltas.all().items():
        change = keys[tables.DELTA_TABLES[key[:1]]].discard if value is None else keys[tables.DELTA_TABLES[key[:1]]].add
        change(key[1:])
    return {table: len(found) for table, found in keys.items() if found}


# -- files


async def test_a_second_opener_is_told_who_is_in_the_way(store: RocksStore) -> None:
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom motorcade.storage.rocks import RocksStore\n"
        "asyncio.run(RocksStore(Path(sys.argv[1])).open())"
    )
    second = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script, str(store.path)], capture_output=True, text=True, check=False
    )
    assert 1 == second.returncode
    assert "in use by another process" in second.stderr.splitlines()[-1]
    with pytest.raises(StoreError, match="in use"):
        await RocksStore(store.path).open()
    await store.mailboxes.append(["v"], Draft(b""), NOW)


async def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/store"):
        await RocksStore(tmp_path / "file" / "store").open()


async def test_older_formats_are_brought_up_to_date_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RocksStore(tmp_path)
    await store.open()
    await store.records.put("c", "k", b"v")
    await store.close()
    taken: list[tuple[int, bytes]] = []

    def step(version: int) -> Step:
        def take(opened: RocksTables, place: bytes) -> tuple[WriteBatch, bytes | None]:
            taken.append((version, place))
            if (version, place) == (2, b"bb") and taken.count((2, b"bb")) == 1:
                raise StoreError("interrupted")
            batch = WriteBatch(raw_mode=True)
            batch.put(b"c\0%d%s" % (version, place), bytes(8), opened.handles["records"])
            return batch, place + b"b" if len(place) < 3 else None

        return take

    with files_open(tmp_path) as opened:
        write_meta(opened, tables.META_FORMAT, 2)
        del opened
    monkeypatch.setattr(tables, "FORMAT", 4)
    monkeypatch.setattr(files_module, "MIGRATIONS", {2: step(2), 3: step(3)})
    with pytest.raises(StoreError, match="interrupted"):
        await store.open()
    await store.open()
    assert b"v" == await store.records.get("c", "k", NOW)
    places = [b"", b"b", b"bb", b"bbb"]
    made = {f"{version}{place.decode()}" for version in (2, 3) for place in places}
    assert made | {"k"} == {key async for key, _ in store.records.scan("c", NOW)}
    await store.close()
    # What was done before the interruption is not done again.
    assert [(2, b""), (2, b"b"), (2, b"bb"), (2, b"bb"), (2, b"bbb"), *((3, place) for place in places)] == taken
    await store.open()
    await store.close()
    assert 9 == len(taken)


async def test_a_directory_of_format_1_is_brought_up_to_date(tmp_path: Path) -> None:
    """Rows as the first version wrote them: copies for all owners, heads that lag behind, no notes."""
    number, body, digest = tables.NUMBER.pack, b"body", hashlib.sha256(PAYLOAD).digest()
    first = struct.pack(">ddBBIII", NOW, 0.0, 2, 0, 3, 4, len(PAYLOAD)) + b"key" + body + digest
    later = struct.pack(">ddBBIII", NOW, NOW + 9, 1, 7, 0, 4, 2) + body + b"in"
    with Rdict(str(tmp_path), Options(raw_mode=True), column_families=None) as db:
        made = {table: db.create_column_family(table, Options(raw_mode=True)) for table in FORMAT_1}
        for owner in (b"v", b"w"):
            made["entries"][owner + b"\0" + number(1)] = first
            made["keys"][owner + b"\0key"] = number(1)
            made["heads"][owner] = struct.pack(">QQQQQ", 1, 1, 4 + len(PAYLOAD), 1, 0)
        made["entries"][b"v\0" + number(2)] = later
        made["endings"][struct.pack(">QB", int(NOW + 9) * 1000, 1) + number(1)] = msgspec.msgpack.encode((["v"], [2]))
        made["tokens"][b"w\0token"] = struct.pack(">dQ", NOW + 3600, 1)
        made["blobs"][digest] = PAYLOAD
        made["blobinfo"][digest] = struct.pack(">QdQ", 2, 0.0, len(PAYLOAD))
        made["records"][b"c\0k"] = struct.pack(">d", 0.0) + b"value"
        made["meta"][b"format"] = number(1)
        made["meta"][b"boot"] = number(5)
        made["meta"][b"totals"] = struct.pack(">QQQQ", 3, 1, len(PAYLOAD), 1)
        del made
    store = RocksStore(tmp_path)
    await store.open()
    assert [] == await store.check()
    assert [(1, PAYLOAD, 0), (2, b"in", 7)] == [
        (entry.position, entry.payload, entry.mark) for entry in await store.mailboxes.read("v", 0, 9, NOW)
    ]
    assert MailboxInfo(2, 10 + len(PAYLOAD), 1, 2, 1) == await store.mailboxes.info("v")
    assert b"value" == await store.records.get("c", "k", NOW)
    answers = await store.mailboxes.append(["v", "w"] * 3, Draft(bytes(99), PAYLOAD, b"key", token=b"token"), NOW)
    assert [(3, 1), (1, 0), (3, 0), (1, 0), (3, 0), (1, 0)] == [(each.position, each.replaced) for each in answers]
    assert 1 == (await store.sweep(NOW + 9, 100)).removed
    await store.mailboxes.acknowledge("w", [1])
    await store.mailboxes.acknowledge("v", [3])
    figures = await store.figures()
    assert (0, 0, 1) == (figures.entries, figures.blobs, figures.records)
    assert [] == await store.check()
    await store.close()
    with files_open(tmp_path) as opened:
        assert number(4) == opened.meta.get(b"format")
        del opened


async def test_a_directory_of_format_3_is_brought_up_to_date(tmp_path: Path) -> None:
    """Heads and totals of five numbers, some in place, some noted only; no feed."""
    number, row = tables.NUMBER.pack, struct.pack(">ddBBIII", NOW, 0.0, 0, 0, 0, 4, 0) + b"body"
    with Rdict(str(tmp_path), Options(raw_mode=True), column_families=None) as db:
        made = {table: db.create_column_family(table, Options(raw_mode=True)) for table in FORMAT_3}
        for owner, position in ((b"v", 7), (b"w", 3)):
            made["entries"][owner + b"\0" + number(position)] = row
        made["heads"][b"v"] = struct.pack(">QQQQQ", 7, 1, 4, 7, 0)
        noted = {b"hw": struct.pack(">QQQQQ", 3, 1, 4, 3, 0), b"mtotals": struct.pack(">QQQQQ", 2, 0, 0, 0, 0)}
        made["notes"][number(1)] = msgspec.msgpack.encode(noted)
        made["meta"][b"totals"] = struct.pack(">QQQQQ", 1, 0, 0, 0, 0)
        made["meta"][b"format"] = number(3)
        made["meta"][b"boot"] = number(5)
        del made
    store = RocksStore(tmp_path)
    await store.open()
    assert [] == await store.check()
    assert MailboxInfo(1, 4, 7, 7, 1) == await store.mailboxes.info("v")
    assert MailboxInfo(1, 4, 3, 3, 1) == await store.mailboxes.info("w")
    assert 1 == await store.mailboxes.forget("v")
    answers = await store.mailboxes.append(["v", "w", "x"], Draft(b"later"), NOW, generations=[0, 1, 0])
    assert [8, 4, 8] == [answer.position for answer in answers]
    batch = Batch()
    batch.note("client:v", b"changed")
    await store.write(batch)
    store = await reopened(store)
    assert [8, 1, 8] == [(await store.mailboxes.info(owner)).generation for owner in "vwx"]
    assert [b"changed"] == [note.data for note in (await store.feeds.read(0, FeedEnd(), 9)).notes]
    assert 9 == (await store.mailboxes.append(["v"], Draft(b"later"), NOW))[0].position
    assert [] == await store.check()
    await store.close()


async def test_a_directory_of_format_2_is_brought_up_to_date(store: RocksStore) -> None:
    """Each record of a stream in a row of its own; what comes later may share one."""
    await store.streams.append("s", [b"1"], NOW)
    await store.streams.append("s", [b"22"], NOW + 1)
    await store.close()
    with files_open(store.path) as opened:
        assert struct.pack(">d", NOW) + b"1" == opened.rows.get(b"s\0" + tables.NUMBER.pack(1))
        write_meta(opened, tables.META_FORMAT, 2)
        del opened
    await store.open()
    assert [3, 4, 5] == await store.streams.append("s", [b"3", b"4", b"5"], NOW + 2)
    assert [b"1", b"22", b"3", b"4", b"5"] == [record.value for record in await store.streams.read("s", 0, 9)]
    assert 2 == await store.streams.find("s", NOW + 2)
    assert 4 == (await store.streams.trim("s", records=1)).removed
    assert [(5, NOW + 2, b"5")] == [
        (record.offset, record.time, record.value) for record in await store.streams.read("s", 0, 9)
    ]
    assert [] == await store.check()
    assert {"rows": 1, "streams": 1, "meta": 4} == rows_of(store)
    assert 1 == (await store.streams.trim("s", before=NOW + 9)).removed
    assert {"streams": 1, "meta": 4} == rows_of(store)
    await store.close()
    with files_open(store.path) as opened:
        assert tables.NUMBER.pack(4) == opened.meta.get(b"format")
        del opened
    await store.open()


FORMAT_1 = (
    *("entries", "heads", "keys", "tokens", "blobs", "blobinfo"),
    *("records", "streams", "rows", "leases", "endings", "meta"),
)
FORMAT_3 = (*FORMAT_1, "shared", "holders", "notes")


async def test_heads_have_six_numbers_unless_they_spare(store: RocksStore) -> None:
    """As every head of this format has that is in a store already; in place and among the deltas."""
    for owner, position in (("v", 0), ("w", SPARE_ALL), ("x", 2)):
        await store.mailboxes.append([owner], Draft(b"1"), NOW)
        batch = Batch()
        batch.spare(owner, position)
        await store.write(batch)
        await store.mailboxes.append([owner], Draft(b"2"), NOW)
        await store.mailboxes.acknowledge(owner, [1])
    deltas_of = store._writer.state.deltas
    rows = {key: len(row) for key, row in deltas_of.all().items() if row is not None}
    assert (48, 56, 56) == (rows[b"hv"], rows[b"hw"], rows[b"hx"])
    store = await reopened(store)
    for owner, dropped in (("v", (2, 3)), ("w", ()), ("x", (3,))):
        await store.mailboxes.append([owner], Draft(b"3"), NOW)
        (answer,) = await store.mailboxes.append([owner], Draft(b"4"), NOW, Bound(entries=2 if owner == "x" else 1))
        assert (dropped, owner == "w") == (answer.dropped, answer.over), owner
    assert [] == await store.check()
    await store.close()


async def test_a_later_format_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path)
    write_meta(files.open(), tables.META_FORMAT, tables.FORMAT + 1)
    files.close()
    with pytest.raises(StoreError, match="use a newer one"):
        await RocksStore(tmp_path).open()
    with files_open(tmp_path) as opened:
        write_meta(opened, tables.META_FORMAT, 0)
        with pytest.raises(StoreError, match="cannot bring up to date"):
            migrate(opened, {})


class files_open:  # noqa: N801 - reads like the function it stands for
    def __init__(self, path: Path) -> None:
        self._files = Files(path)

    def __enter__(self) -> RocksTables:
        return self._files.open()

    def __exit__(self, *_: object) -> None:
        self._files.close()


async def test_a_backup_is_a_store_of_its_own(store: RocksStore, tmp_path: Path) -> None:
    await store.mailboxes.append(["v"], Draft(b"1", PAYLOAD), NOW)
    await store.backup(tmp_path / "copies" / "one")
    await store.mailboxes.append(["v"], Draft(b"2"), NOW)
    with pytest.raises(StoreError, match="exists already"):
        await store.backup(tmp_path / "copies" / "one")
    copy = RocksStore(tmp_path / "copies" / "one")
    await copy.open()
    (entry,) = await copy.mailboxes.read("v", 0, 9, NOW)
    assert (b"1", PAYLOAD) == (entry.body, entry.payload)
    await copy.mailboxes.append(["v"], Draft(b"3"), NOW)
    await copy.close()
    assert [b"1", b"2"] == [entry.body for entry in await store.mailboxes.read("v", 0, 9, NOW)]
    again = await reopened(store)
    await again.close()


async def test_check_finds_what_does_not_agree(store: RocksStore) -> None:
    await store.mailboxes.append(["v", "w"], Draft(b"1", PAYLOAD, b"key"), NOW)
    await store.streams.append("s", [b"1", b"2"], NOW)
    await store.streams.append("s", [b"3"], NOW)
    await store.streams.append("t", [b"1", b"2", b"3"], NOW)
    await store.streams.trim("t", records=1)
    assert [] == await store.check()
    await store.close()
    with files_open(store.path) as opened:
        opened.entries.delete(b"v\0" + tables.NUMBER.pack(1))
        opened.rows.delete(b"s\0" + tables.NUMBER.pack(2))
        opened.rows.put(b"t\0" + tables.NUMBER.pack(1), struct.pack(">d", NOW) + b"trimmed")
        (digest,) = opened.blobs.keys()
        opened.blobs.put(digest, b"other")
        del opened
    await store.open()
    wrong = "\n".join(await store.check())
    for finding in (
        "compaction keys",
        "said to have entries",
        "does not agree with the digest",
        "held by",
        "stream 's'",
        "stream 't'",
    ):
        assert finding in wrong
    assert [] == list(store.path.glob("copy-*"))
    await store.close()


# -- damage


async def test_a_damaged_log_is_named_and_can_be_salvaged(store: RocksStore, tmp_path: Path) -> None:
    for number in range(200):
        await store.mailboxes.append(["v"], Draft(b"%d" % number, os.urandom(200)), NOW)
    # As a crash leaves it: closing would empty the log.
    crashed = tmp_path / "crashed"
    shutil.copytree(store.path, crashed)
    damage(max(crashed.glob("*.log"), key=lambda path: path.stat().st_size))
    with pytest.raises(StoreDamagedError, match="bring back a backup"):
        await RocksStore(crashed).open()
    salvaged = RocksStore(crashed, salvage=True)
    await salvaged.open()
    bodies = [entry.body for entry in await salvaged.mailboxes.read("v", 0, 999, NOW)]
    assert 0 < len(bodies) < 200
    assert [b"%d" % number for number in range(len(bodies))] == bodies
    await salvaged.close()


async def test_a_damaged_table_is_named_by_reads_and_by_check(store: RocksStore) -> None:
    """Never an empty answer where there was something."""
    owners = [f"v{number:04}" for number in range(2000)]
    await store.mailboxes.append(owners, Draft(os.urandom(100)), NOW)
    await store.close()
    with files_open(store.path) as opened:
        opened.entries.flush()
        del opened
    damage(max(store.path.glob("*.sst"), key=lambda path: path.stat().st_size))
    await store.open()
    outcomes = [await outcome(store, owner) for owner in owners]
    assert any(isinstance(found, StoreDamagedError) and ".sst" in str(found) for found in outcomes)
    assert all(isinstance(found, StoreDamagedError) or found == 1 for found in outcomes)
    assert ".sst" in "".join(await store.check())
    await store.close()


async def test_a_damaged_table_is_named_by_readers_of_streams_and_of_long_mailboxes(tmp_path: Path) -> None:
    """Who goes on where the last page ended never takes a damage for the end."""
    for together in (1, 50):
        store = RocksStore(tmp_path / str(together))
        await store.open()
        await read_damaged(store, together)


async def read_damaged(store: RocksStore, together: int) -> None:
    batch = Batch()
    for _ in range(2000 // together):
        batch.stream("s", [os.urandom(100) for _ in range(together)], NOW)
        batch.append(["v"], Draft(os.urandom(100 * together)), NOW)
    await store.write(batch)
    await store.close()
    with files_open(store.path) as opened:
        opened.rows.flush()
        opened.entries.flush()
        del opened
    for path in sorted(store.path.glob("*.sst"), key=lambda path: path.stat().st_size)[-2:]:
        damage(path)
    await store.open()
    for read in (
        lambda after: store.streams.read("s", after, 100),
        lambda after: store.mailboxes.read("v", after, 100, NOW),
    ):
        with pytest.raises(StoreDamagedError, match="sst"):
            await read_on(read)
    await store.close()


async def read_on(read: Callable[[int], Awaitable[Sequence[StreamRecord | Entry]]]) -> None:
    """Page by page, to what seems to be the end."""
    seen = 0
    while page := await read(seen):
        found = [record.offset if isinstance(record, StreamRecord) else record.position for record in page]
        assert list(range(seen + 1, seen + 1 + len(page))) == found
        seen += len(page)


async def outcome(store: RocksStore, owner: str) -> int | StoreError:
    try:
        return len(await store.mailboxes.read(owner, 0, 9, NOW))
    except StoreError as error:
        return error


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


# -- no room


async def test_low_room_refuses_what_grows_and_does_what_shrinks(store: RocksStore) -> None:
    await store.mailboxes.append(["v"], Draft(b"1"), NOW)
    free = store._files.free_bytes
    full = await reopened(store, reserve=free() * 2)
    with pytest.raises(StoreFullError, match="kept in reserve"):
        await full.mailboxes.append(["v"], Draft(b"2"), NOW)
    assert (await full.figures()).full
    assert [b"1"] == [entry.body for entry in await full.mailboxes.read("v", 0, 9, NOW)]
    assert 1 == await full.mailboxes.acknowledge("v", [1])
    full._writer._reserve = 0
    await until(lambda: not full._writer.full)
    await full.mailboxes.append(["v"], Draft(b"3"), NOW)
    await full.close()


async def test_a_full_disk_refuses_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of 12 MiB; where nothing may be mounted, the next test stands alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount")
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.05)
    try:
        await fill_and_mend(disk)
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", str(disk)], check=False)


async def fill_and_mend(disk: Path) -> None:
    filler = disk / "filler"
    filler.write_bytes(bytes(4 * 2**20))
    store = RocksStore(disk / "store", reserve=0)
    await store.open()
    stored = 0
    try:
        while True:
            await store.mailboxes.append(["v"], Draft(b"%d" % stored, os.urandom(50_000)), NOW)
            stored += 1
    except StoreError as error:
        assert "No space left" in str(error)  # noqa: PT017 - the loop counts what went before
        assert error.certain  # noqa: PT017
    assert (await store.figures()).full
    with pytest.raises(StoreFullError):
        await store.records.put("c", "k", b"v")
    # What was acknowledged can be read all the while.
    assert stored == len(await store.mailboxes.read("v", 0, 9999, NOW))
    filler.unlink()
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=64m", str(disk)], check=True)
    await until(lambda: not store._writer.full)
    await store.records.put("c", "k", b"v")
    (answer,) = await store.mailboxes.append(["v"], Draft(b"new"), NOW)
    bodies = [entry.body for entry in await store.mailboxes.read("v", 0, 9999, NOW)]
    assert [b"%d" % number for number in range(stored)] == bodies[:stored]
    assert b"new" == bodies[-1]
    assert answer.position >= stored + 1
    assert [] == await store.check()
    await store.close()


async def test_files_that_may_grow_no_further_refuse_writes_and_lose_nothing(tmp_path: Path) -> None:
    """The limit on the size of files stands for every error but a full disk."""
    script = """
import asyncio, os, resource, signal, sys
from pathlib import Path
from motorcade.storage.ports import Draft, StoreError, StoreFullError
from motorcade.storage.rocks import RocksStore
from motorcade.storage.transaction import state

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = RocksStore(Path(sys.argv[1]), reserve=0)
    await store.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    stored = 0
    try:
        while True:
            await store.mailboxes.append(["v"], Draft(b"%d" % stored, os.urandom(20_000)), 1.0)
            stored += 1
    except StoreError as error:
        print(error, file=sys.stderr)
        assert error.certain
    try:
        await store.mailboxes.append(["v"], Draft(b"refused"), 1.0)
    except StoreFullError as error:
        assert error.certain
    assert stored == len(await store.mailboxes.read("v", 0, 9999, 1.0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    async with asyncio.timeout(60):
        while (await store.figures()).full:
            await asyncio.sleep(0.05)
    await store.mailboxes.append(["v"], Draft(b"%d" % stored), 1.0)
    await store.close()
    print(stored + 1)

asyncio.run(main())
"""
    child = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert 0 == child.returncode, child.stderr
    assert "File too large" in child.stderr
    store = RocksStore(tmp_path)
    await store.open()
    entries = await store.mailboxes.read("v", 0, 9999, NOW)
    expected = [b"%d" % number for number in range(int(child.stdout))]
    # The refused one may or may not be there; it was never acknowledged.
    assert expected == list(dict.fromkeys(entry.body for entry in entries))
    await store.close()


async def test_replaced_values_give_their_disk_back(tmp_path: Path) -> None:
    """One key, far more written than stays: what is left is of the size of one value, not of all that came before."""
    store = RocksStore(tmp_path / "store", Durability.FAST)
    await store.open()
    for group in range(250):
        batch = Batch()
        for number in range(100):
            batch.append(["ecq:car"], Draft(b"", bytes((group, number)) * 2048, b"key"), 1000.0 + group)
        await store.write(batch)
    info = await store.mailboxes.info("ecq:car")
    assert (1, 4096, 25_000) == (info.entries, info.size_bytes, info.last)
    await store.close()
    left = sum(file.stat().st_size for file in (tmp_path / "store").iterdir())
    assert left < 25_000 * 4096 // 10, "100 MB were written"


# -- memory


async def test_the_cache_of_blocks_stays_within_its_bound(store: RocksStore, tmp_path: Path) -> None:
    for _ in range(8):
        await store.streams.append("s", [os.urandom(65_536) for _ in range(16)], NOW)
    written = (await store.figures()).memory_bytes
    assert written > 8 << 20  # in the write buffers
    await store.backup(tmp_path / "copy")  # which empties them
    used = []
    for bound in (64 << 20, 1 << 20):
        store = await reopened(store, block_cache=bound)
        for offset in range(1, 129, 16):
            await store.streams.read("s", offset, 16)
        used.append((await store.figures()).memory_bytes)
    await store.close()
    assert used[0] > 7 << 20 > 4 << 20 > used[1]
