"""Reading a store from outside its node: the same as the ports say, while the store is open and being written."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from motorcade.storage import open_store
from motorcade.storage.ports import Batch, Draft, Durability, Formed, Store, StoreError
from motorcade.storage.readers import MAX_ROWS, PAGE_BYTES, Extent, StoreReader, StreamPage, open_reader, rows_for
from motorcade.storage.redis_reader import ORIGIN, EntryId, NativeReader
from motorcade.storage.secondary import Secondary
from tests.contracts.engines import HOUR, NOW, PAYLOAD
from tests.support.redis import RedisCluster, RedisServer

T = TypeVar("T")


@pytest.fixture(params=["rocksdb", "redis", "cluster"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "rocksdb":
        return f"rocksdb://{tmp_path / 'store'}"
    servers: RedisServer | RedisCluster = request.getfixturevalue(
        "redis_server" if request.param == "redis" else "redis_cluster"
    )
    servers.empty()
    return servers.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = await open_store(url, Durability.FAST)
    yield opened
    await opened.close()


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[StoreReader]:
    reader = await asyncio.to_thread(open_reader, url)
    try:
        yield reader
    finally:
        await asyncio.to_thread(reader.close)


async def look(question: Callable[[], T]) -> T:
    """A reader has a loop of its own, which cannot run inside that of the test."""
    return await asyncio.to_thread(question)


async def rows(reader: StoreReader, stream: str, after: int, last: int, most: int = MAX_ROWS) -> list[tuple]:
    pages = await look(lambda: list(reader.pages(stream, after, last, most)))
    assert all(0 < len(page.offsets) <= most for page in pages)
    return [row for page in pages for row in zip(*page, strict=True)]


async def test_a_stream_that_two_nodes_write_reads_as_one(url: str, store: Store) -> None:
    """Each record once, at the offset that its writer was told, in the order of each; times never go back.

    Pages are read while both write, of any size, and the clock of one is behind.
    """
    if url.startswith("rocksdb"):
        pytest.skip("the embedded engine serves one node")
    other = await open_store(url, Durability.FAST)
    told: dict[int, bytes] = {}
    seen: list[list[tuple]] = []

    async def write(node: Store, name: str, clock: float) -> None:
        chance = random.Random(name)
        for step in range(40):
            values = [b"%s %d:%d" % (name.encode(), step, at) for at in range(chance.choice((1, 3, 40, 300)))]
            offsets = await node.streams.append("both", values, NOW + step + clock)
            assert list(offsets) == list(range(offsets[0], offsets[0] + len(values))), "what is appended together"
            told.update(zip(offsets, values, strict=True))

    try:
        async with reading(url) as reader:
            writing = asyncio.gather(write(store, "a", 0.0), write(other, "b", -5.0))
            while not writing.done():
                seen.append(await rows(reader, "both", 0, 100_000, most=97))
            await writing
            whole = await rows(reader, "both", 0, 100_000)
            assert sorted(told.items()) == [(offset, value) for offset, _, value in whole]
            assert list(range(1, len(told) + 1)) == [offset for offset, *_ in whole]
            assert all(before[1] <= after[1] for before, after in itertools.pairwise(whole))
            assert all(part == whole[: len(part)] for part in seen), "a part is the beginning"
            for name in (b"a", b"b"):
                steps = [tuple(map(int, value[2:].split(b":"))) for _, _, value in whole if value.startswith(name)]
                assert sorted(steps) == steps
            assert Extent(1, len(told), len(told), sum(map(len, told.values()))) == await look(
                lambda: reader.extent("both")
            )
            assert whole == [
                (record.offset, record.time, record.value)
                for record in await other.streams.read("both", 0, len(told) + 1)
            ]
    finally:
        await other.close()


async def test_a_reader_sees_what_the_ports_see(url: str, store: Store) -> None:
    """Records of every kind of row: alone, in runs, of one form; in pages of any size, from any offset to any other."""
    await store.streams.append("s", [b"alone"], NOW)
    await store.streams.append("s", [b"%d" % number for number in range(600)], NOW + 1)
    await store.streams.append("s", Formed([b"<", 0, b"|", 1, b">"], [[b"a", b"b", b"c"], [b"1", b"2", b"3"]]), NOW + 2)
    await store.streams.append("s", [b"large" * 5000, b""], NOW + 3)
    expected = [(record.offset, record.time, record.value) for record in await store.streams.read("s", 0, 10_000)]
    assert 606 == len(expected)
    async with reading(url) as reader:
        assert expected == await rows(reader, "s", 0, 10_000)
        assert expected[:10] == await rows(reader, "s", 0, 10)
        assert expected[300:602] == await rows(reader, "s", 300, 602, most=7)
        assert [] == await rows(reader, "s", 606, 10_000)
        assert ["s"] == await look(reader.streams)
        assert Extent(1, 606, 606, sum(len(value) for *_, value in expected)) == await look(lambda: reader.extent("s"))
        for moment in (NOW - 1, NOW, NOW + 0.5, NOW + 1, NOW + 2, NOW + 2.5, NOW + 9):
            assert await store.streams.find("s", moment) == await look(partial(reader.find, "s", moment))


async def test_records_are_read_and_a_stream_that_nobody_has_made_is_empty(url: str, store: Store) -> None:
    await store.records.put("colours", "sky", b"blue")
    await store.records.put("colours", "grass", b"")
    async with reading(url) as reader:
        for collection, key, value in (
            ("colours", "sky", b"blue"),
            ("colours", "grass", b""),
            ("colours", "sea", None),
            ("colour", "sky", None),
        ):
            assert value == await look(partial(reader.record, collection, key))
        assert Extent(1, 0, 0, 0) == await look(lambda: reader.extent("nobody"))
        assert [] == await rows(reader, "nobody", 0, 100)
        assert [] == await look(reader.streams)


async def test_what_was_trimmed_is_told_by_the_floor(url: str, store: Store) -> None:
    """A trim may end inside a row that several records share."""
    await store.streams.append("s", [b"%d" % number for number in range(100)], NOW)
    async with reading(url) as reader:
        await store.streams.trim("s", records=30)
        await look(reader.refresh)
        assert Extent(71, 100, 30, 60) == await look(lambda: reader.extent("s"))
        assert list(range(71, 101)) == [offset for offset, *_ in await rows(reader, "s", 0, 100)]
        await store.streams.trim("s", before=NOW + 1)
        await look(reader.refresh)
        assert Extent(101, 100, 0, 0) == await look(lambda: reader.extent("s"))
        assert [] == await rows(reader, "s", 0, 100)


async def test_a_reader_follows_a_store_that_is_written(url: str, store: Store) -> None:
    """After every refresh all that was written is there, without a gap; enough for the embedded store to sort files."""
    written: list[bytes] = []
    chance = random.Random(7)
    async with reading(url) as reader:
        for round_number in range(40):
            values = [chance.randbytes(chance.randrange(2000)) for _ in range(chance.randrange(1, 300))]
            await store.streams.append("s", values, NOW + round_number)
            written += values
            await look(reader.refresh)
            extent = await look(lambda: reader.extent("s"))
            assert len(written) == extent.last
            after = chance.randrange(len(written))
            assert written[after:] == [value for *_, value in await rows(reader, "s", after, extent.last)]


async def test_a_reader_lists_what_waits(url: str, store: Store) -> None:
    """Entries of their own and shared ones, marked, expiring, expired and not swept; of the wanted owners only."""
    vehicles = [f"fanout:{number:03}" for number in range(150)]
    await store.mailboxes.append(vehicles, Draft(b"shared", PAYLOAD, key=b"k"), NOW)
    await store.mailboxes.append(vehicles[:1], Draft(b"own", expires_at=NOW + HOUR), NOW + 1)
    await store.mailboxes.append(vehicles[1:2], Draft(b"late", expires_at=NOW + 2), NOW + 1)
    await store.mailboxes.append(["fanout-done:000", "fanout", "g"], Draft(b"other"), NOW)
    await store.mailboxes.mark(vehicles[2], 1, 3)
    await store.mailboxes.acknowledge(vehicles[3], [1])
    expected = {(owner, 1, NOW, 0.0, 0, b"shared") for owner in vehicles}
    expected -= {(vehicles[2], 1, NOW, 0.0, 0, b"shared"), (vehicles[3], 1, NOW, 0.0, 0, b"shared")}
    expected |= {
        (vehicles[0], 2, NOW + 1, NOW + HOUR, 0, b"own"),
        (vehicles[1], 2, NOW + 1, NOW + 2, 0, b"late"),
        (vehicles[2], 1, NOW, 0.0, 3, b"shared"),
    }
    async with reading(url) as reader:
        await look(reader.refresh)
        found = await look(lambda: _waiting(reader, "fanout:"))
        assert len(expected) == len(found)
        assert expected == set(found)
        assert len(expected) + 3 == len(await look(lambda: _waiting(reader, "")))


async def test_a_mailbox_larger_than_a_page_is_listed_whole(url: str, store: Store) -> None:
    batch = Batch()
    for number in range(1200):
        batch.append(["v"], Draft(b"%d" % number), NOW)
    await store.write(batch)
    async with reading(url) as reader:
        found = await look(lambda: _waiting(reader, "v"))
        assert [("v", number + 1, NOW, 0.0, 0, b"%d" % number) for number in range(1200)] == found


def _waiting(reader: StoreReader, prefix: str) -> list[tuple]:
    return [
        row
        for part in range(reader.parts())
        for page in reader.waiting(prefix, part)
        for row in zip(*page, strict=True)
    ]


async def test_pages_are_small_where_records_are_large(url: str, store: Store) -> None:
    """About PAGE_BYTES at once, so that a stream of pictures does not fill the memory."""
    for _ in range(4):
        await store.streams.append("s", [b"x" * 400_000 for _ in range(20)], NOW)
    async with reading(url) as reader:
        pages: list[StreamPage] = await look(lambda: list(reader.pages("s", 0, 80)))
        assert 80 == sum(len(page.values) for page in pages)
        assert PAGE_BYTES + 400_000 >= max(sum(map(len, page.values)) for page in pages)


async def test_a_large_record_ends_a_page(tmp_path: Path) -> None:
    """However small those before it were: an embedded store need not guess."""
    url = f"rocksdb://{tmp_path / 'store'}"
    store = await open_store(url, Durability.FAST)
    sizes = [10, *[PAGE_BYTES] * 3, 10, 10]
    for size in sizes:
        await store.streams.append("s", [bytes(size)], NOW)
    async with reading(url) as reader:
        pages: list[StreamPage] = await look(lambda: list(reader.pages("s", 0, 99)))
        assert [[10, PAGE_BYTES], [PAGE_BYTES], [PAGE_BYTES], [10, 10]] == [
            list(map(len, page.values)) for page in pages
        ]
    await store.close()


async def test_pages_have_what_the_engine_reads(tmp_path: Path) -> None:
    """Runs of every kind, gaps at the beginning, any part of it."""
    url = f"rocksdb://{tmp_path / 'store'}"
    store = await open_store(url, Durability.FAST)
    for turn in range(6):
        values = [b"%d-%d" % (turn, number) for number in range(1 + turn * 3 % 7)]
        await store.streams.append("s", values if turn % 2 else Formed([b"<", 0, b">"], [values]), NOW + turn)
    while (await store.streams.trim("s", records=15)).cursor:
        pass
    wanted = [(one.offset, one.time, one.value) for one in await store.streams.read("s", 0, 99)]
    assert 15 == len(wanted)
    last = wanted[-1][0]
    async with reading(url) as reader:
        for limit, after in itertools.product((1, 3, 10, 1000), range(last + 1)):
            for end in {after, after + 1, after + 4, last + 1}:
                found = await rows(reader, "s", after, end, limit)
                assert [row for row in wanted if after < row[0] <= end] == found
    await store.close()


def test_how_many_rows_fit_a_page() -> None:
    assert 100 == rows_for(0, 0, 100)
    assert 8192 == rows_for(1000, 10, 8192)
    assert 16 == rows_for(10**9, 10, 8192)
    assert 5 == rows_for(10**9, 10, 5)
    assert 84 == rows_for(100_000, 1, 8192) + 1


# -- the embedded store


async def test_a_reader_outlives_the_node(tmp_path: Path) -> None:
    """The node is stopped, started again and writes on; the reader need not be opened anew."""
    url = f"rocksdb://{tmp_path / 'store'}"
    written = 0
    reader: StoreReader | None = None
    for life in range(4):
        store = await open_store(url, Durability.FAST)
        for _ in range(5):
            written += len(await store.streams.append("s", [b"%d" % life] * 50, NOW + life))
        reader = reader or open_reader(url)
        reader.refresh()
        assert written == reader.extent("s").last
        await store.close()
        reader.refresh()
        assert list(range(1, written + 1)) == [
            number for page in reader.pages("s", 0, written) for number in page.offsets
        ]
    assert reader is not None
    reader.close()


async def test_a_reader_follows_a_node_that_starts_again(tmp_path: Path) -> None:
    """What was written before the restart and after it: streams and mailboxes."""
    url = f"rocksdb://{tmp_path / 'store'}"
    owners = [f"fanout:{number}" for number in range(5)]
    store = await open_store(url, Durability.FAST)
    await store.streams.append("s", [b"0"], NOW)
    async with reading(url) as reader:
        for count in (1, 2, 3):
            await store.streams.append("s", [b"%d" % count] * 10, NOW)
            await store.mailboxes.append(owners, Draft(b"body", PAYLOAD), NOW)
            await look(reader.refresh)
            await store.streams.append("s", [b"unseen"], NOW)
            await store.close()
            store = await open_store(url, Durability.FAST)
            await store.mailboxes.clear(owners[count])
            await store.streams.append("s", [b"again"], NOW)
            await look(reader.refresh)
            last = 1 + 12 * count
            assert last == (await look(lambda: reader.extent("s"))).last
            assert list(range(1, last + 1)) == [offset for offset, _, _ in await rows(reader, "s", 0, last)]
            waiting = await look(lambda: [owner for page in reader.waiting("fanout:", 0) for owner in page.owners])
            assert {owners[count]} == set(owners) - set(waiting)
    await store.close()


async def test_files_that_the_node_removes_stay_readable(tmp_path: Path) -> None:
    """A page is asked for long after the files that have it were compacted away."""
    url = f"rocksdb://{tmp_path / 'store'}"
    store = await open_store(url, Durability.FAST)
    await store.streams.append("s", [b"%d" % number for number in range(50_000)], NOW)
    await store.close()
    store = await open_store(url, Durability.FAST)  # the log is sorted into files now
    reader = open_reader(url)
    pages = reader.pages("s", 0, 50_000, 1000)
    first = next(pages)
    while (await store.streams.trim("s", before=NOW + 1, budget=100_000)).cursor:
        pass
    await store.close()
    store = await open_store(url, Durability.FAST)
    await store.close()
    assert 0 < len(first.offsets) <= 1000
    assert list(range(1, 50_001)) == [*first.offsets, *(offset for page in pages for offset in page.offsets)]
    reader.close()


async def test_a_reader_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither beside the store nor elsewhere, not even while it is open: Spark kills its workers without a word."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    store = await open_store(f"rocksdb://{tmp_path / 'store'}", Durability.FAST)
    await store.streams.append("s", [b"1"], NOW)
    before = sorted(path.name for path in (tmp_path / "store").iterdir())
    reader = Secondary(tmp_path / "store")
    assert [] == list((tmp_path / "tmp").iterdir())
    await store.streams.append("s", [b"2"], NOW)
    reader.refresh()
    assert 2 == reader.extent("s").last
    assert before == sorted(path.name for path in (tmp_path / "store").iterdir())
    reader.close()
    reader.close()
    with pytest.raises(StoreError, match="closed"):
        reader.extent("s")
    await store.close()


def test_a_place_without_a_store_is_refused(tmp_path: Path) -> None:
    """Without showing a password."""
    for url, says in (
        (f"rocksdb://{tmp_path}/nothing", "there is no store at .*nothing"),
        ("memory://", "does not name a store that can be read from outside"),
        ("nonsense", "does not name a store"),
        ("redis://127.0.0.1:1?patience=0.2", "127.0.0.1:1"),
        ("mysql://user:geheim@127.0.0.1/", "does not name a store"),
    ):
        with pytest.raises(StoreError, match=says) as error:
            open_reader(url)
        assert "geheim" not in str(error.value)


def test_a_reader_does_not_make_a_store(redis_server: RedisServer) -> None:
    redis_server.empty()
    with pytest.raises(StoreError, match="no store with the prefix 'motorcade'"):
        open_reader(redis_server.url)
    assert 0 == redis_server.client.dbsize()


# -- streams of Redis itself


@pytest.fixture(params=["redis", "cluster"])
def servers(request: pytest.FixtureRequest) -> RedisServer | RedisCluster:
    found: RedisServer | RedisCluster = request.getfixturevalue(
        "redis_server" if request.param == "redis" else "redis_cluster"
    )
    found.empty()
    return found


def _client(servers: RedisServer | RedisCluster):
    """Somebody else's program."""
    import redis  # noqa: PLC0415

    if isinstance(servers, RedisServer):
        return servers.client
    return redis.RedisCluster("127.0.0.1", servers.servers[0].port)


def test_entries_of_a_redis_stream_come_in_pages(servers: RedisServer | RedisCluster) -> None:
    client = _client(servers)
    for number in range(2500):
        client.xadd(
            "messages:processed", {"payload": b"%d" % number, "kind": "x"}, id=f"{1000 + number // 10}-{number % 10}"
        )
    reader = NativeReader(servers.url)
    extent = reader.extent("messages:processed")
    assert (True, EntryId(1000, 0), EntryId(1249, 9), 2500, 2500) == tuple(extent)
    pages = list(reader.pages("messages:processed", ORIGIN, extent.last))
    assert [b"%d" % number for number in range(2500)] == [words[1] for page in pages for words in page.fields]
    part = list(reader.pages("messages:processed", EntryId(1000, 3), EntryId(1001, 1)))
    assert [b"1000-4", b"1000-5", b"1000-6", b"1000-7", b"1000-8", b"1000-9", b"1001-0", b"1001-1"] == part[0].ids
    assert (EntryId(1120, 3), 1204) == reader.stride("messages:processed", ORIGIN, extent.last, 1204)
    assert (EntryId(1249, 9), 2500) == reader.stride("messages:processed", ORIGIN, extent.last, 10_000)
    assert (EntryId(5000, 0), 0) == reader.stride("messages:processed", EntryId(5000, 0), EntryId(9000, 0), 10)
    client.xtrim("messages:processed", maxlen=10, approximate=False)
    assert (True, EntryId(1249, 0), EntryId(1249, 9), 2500, 10) == tuple(reader.extent("messages:processed"))
    assert (False, None, ORIGIN, 0, 0) == tuple(reader.extent("nobody"))
    reader.close()


def test_pages_that_nobody_wants_do_no_harm(redis_server: RedisServer) -> None:
    """A reader that stops in the middle can go on with something else."""
    redis_server.empty()
    pipe = redis_server.client.pipeline(transaction=False)
    for number in range(20_000):
        pipe.xadd("s", {"n": number}, id=f"{number + 1}-0")
    pipe.execute()
    reader = NativeReader(redis_server.url)
    for _ in range(3):
        pages = reader.pages("s", ORIGIN, EntryId(20_000, 0))
        assert MAX_ROWS // 1000 * 1000 == len(next(pages).ids) < 20_000
        pages.close()  # type: ignore[attr-defined]
    assert 20_000 == sum(len(page.ids) for page in reader.pages("s", ORIGIN, EntryId(20_000, 0)))
    reader.close()


def test_the_id_just_below() -> None:
    most = 2**64 - 1
    for given, below in (("5-3", "5-2"), ("5-0", f"4-{most}"), ("0-0", "0-0"), ("7", f"6-{most}")):
        assert below == str(EntryId.parse(given).before())
