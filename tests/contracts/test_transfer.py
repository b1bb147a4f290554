"""Contract of export and import: the same contents come out of every engine, and go on where they were."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from motorcade.storage import transfer
from motorcade.storage.ports import SPARE_ALL, Batch, Bound, Draft, MailboxInfo, Store, StoreError
from motorcade.storage.redis import RedisStore
from motorcade.storage.transfer_redis import RedisSource, RedisTarget
from motorcade.storage.transfer_rocks import RocksSource, RocksTarget
from tests.contracts.engines import (
    HOUR,
    NOW,
    PAYLOAD,
    EmbeddedEngine,
    Engine,
    SharedEngine,
    append,
    entries,
    fill,
    owners,
    scan,
    sweep,
)
from tests.support.redis import RedisCluster, RedisServer

ENGINES = ["rocksdb", "redis", "cluster"]
YEAR = 365 * 24 * HOUR


class Place:
    """Where a store of one engine is; empty again with every `fresh`."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self._engine = engine
        self.fresh()

    @property
    def path(self) -> Path:
        assert isinstance(self._engine, EmbeddedEngine)
        return self._engine.path

    def fresh(self) -> None:
        self._engine.empty()

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        store = self._engine.make()
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    async def export(self, now: float = NOW) -> bytes:
        out = io.BytesIO()
        if self.name == "rocksdb":
            await transfer.export(RocksSource(self.path), out, now)
        else:
            async with self.store() as store:
                assert isinstance(store, RedisStore)
                await transfer.export(RedisSource(store), out, now)
        return out.getvalue()

    async def load(self, file: bytes, now: float = NOW) -> dict[str, int]:
        reading = io.BytesIO(file)
        _, promised = transfer.verify(reading)
        if self.name == "rocksdb":
            loaded = await transfer.load(RocksTarget(self.path), reading)
        else:
            async with self.store() as store:
                assert isinstance(store, RedisStore)
                loaded = await transfer.load(RedisTarget(store, now), reading)
        assert promised == loaded
        return loaded


@pytest.fixture
def places(tmp_path: Path, redis_server: RedisServer, redis_cluster: RedisCluster) -> dict[str, Place]:
    shared = [SharedEngine("redis", redis_server), SharedEngine("cluster", redis_cluster)]
    engines = [EmbeddedEngine("rocksdb", tmp_path / "stores"), *shared]
    return {engine.name: Place(engine) for engine in engines}


def contents(file: bytes) -> dict[str, object]:
    """What a file holds, whatever the order and the parts; without what differs by nature from engine to engine."""
    found: dict[str, object] = {}
    for frame in transfer.frames(io.BytesIO(file)):
        match frame:
            case transfer.ExportedBlob():
                found[f"blob {frame.data!r}"] = frame.keep_until
            case transfer.ExportedMailbox():
                before = found.get(f"mailbox {frame.owner}", (0, 0, []))
                entries = before[2] + frame.entries  # type: ignore[index]
                found[f"mailbox {frame.owner}"] = (frame.last, frame.generation, entries, frame.spare)
            case transfer.ExportedTokens():
                for token, position, until in frame.tokens:
                    found[f"token {frame.owner} {token!r}"] = (position, round(until, 3))
            case transfer.ExportedRecords():
                for key, value, until in frame.records:
                    found[f"record {frame.collection} {key}"] = (value, until)
            case transfer.ExportedStream():
                before = found.get(f"stream {frame.name}", (0, 0, []))
                found[f"stream {frame.name}"] = (frame.last, frame.time, before[2] + frame.records)  # type: ignore[index]
            case transfer.ExportedLease():
                found[f"lease {frame.name}"] = frame.token
    return found


# -- made-up contents, written through the ports

names = st.sampled_from(["a", "v:{1}*", "車" * 100])
bodies = st.binary(max_size=40)
payloads = st.sampled_from([b"", b"short", b"s" * 100, b"i" * 256, b"o" * 257, PAYLOAD, PAYLOAD * 20])
times = st.sampled_from([0.0, NOW - 5, NOW + 0.25, NOW + 60.125, NOW + 30 * 24 * HOUR])
appends = st.tuples(
    st.just("append"),
    st.lists(names, min_size=1, max_size=4),
    bodies,
    payloads,
    st.sampled_from([b"", b"k", b"key \x00\xff"]),
    times,
    st.booleans(),
    st.sampled_from([b"", b"t1", b"t\x002"]),
    st.sampled_from([Bound(), Bound(entries=3), Bound(size_bytes=5000)]),
)
steps = st.one_of(
    appends,
    appends,
    st.tuples(st.just("acknowledge"), names, st.integers(1, 4)),
    st.tuples(st.just("mark"), names, st.integers(1, 4), st.integers(0, 255)),
    st.tuples(st.just("clear"), names),
    st.tuples(st.just("put"), st.sampled_from(["one", "two"]), names, bodies, times),
    st.tuples(st.just("blob"), payloads, times),
    st.tuples(st.just("stream"), names, st.lists(bodies, min_size=1, max_size=3), st.sampled_from([NOW, NOW + 1.5])),
    st.tuples(st.just("trim"), names, st.integers(1, 3)),
    st.tuples(st.just("spare"), names, st.sampled_from([SPARE_ALL, 0, 2])),
    st.tuples(st.just("due"), names, times),
    st.tuples(st.just("lease"), names),
    st.tuples(st.just("release"), names),
)


async def write(store: Store, made: list[tuple]) -> dict[str, int]:
    """Carry the steps out; the last token of every lease."""
    leases = {}
    fencing: dict[str, int] = {}
    for step in made:
        match step:
            case ("append", owners_, body, payload, key, expires_at, droppable, token, bound):
                draft = Draft(body, payload, key, expires_at, droppable, token)
                await store.mailboxes.append(owners_, draft, NOW - 10, bound)
            case ("acknowledge", owner, position):
                await store.mailboxes.acknowledge(owner, [position])
            case ("mark", owner, position, mark):
                await store.mailboxes.mark(owner, position, mark)
            case ("clear", owner):
                await store.mailboxes.clear(owner)
            case ("spare", owner, position):
                batch = Batch()
                batch.spare(owner, position)
                await store.write(batch)
            case ("due", home, at):
                batch = Batch()
                batch.due(home, at)
                await store.write(batch)
            case ("put", collection, key, value, expires_at):
                await store.records.put(collection, key, value, expires_at)
            case ("blob", data, keep_until):
                await store.blobs.put(data, NOW - 10, keep_until)
            case ("stream", stream, values, now):
                await store.streams.append(stream, values, now)
            case ("trim", stream, records):
                await store.streams.trim(stream, records=records)
            case ("lease", name):
                lease = await store.coordination.acquire(name, "node", 600.0, NOW)
                if lease is not None:
                    leases[name] = lease
                    fencing[name] = lease.token
            case ("release", name):
                if name in leases:
                    await store.coordination.release(leases.pop(name))
    return fencing


async def seen(store: Store) -> dict[str, object]:
    """What readers of the ports see."""
    found: dict[str, object] = {}
    for owner in await owners(store):
        if read := await entries(store, owner):
            found[f"mailbox {owner}"] = read
    for collection in ("one", "two"):
        found[collection] = await scan(store, collection)
    feeds = range(len(await store.feeds.ends()))
    found["due"] = sorted([home for feed in feeds for home in await store.coordination.due(feed, NOW + YEAR, 1000)])
    for stream in await store.streams.names():
        records = await store.streams.read(stream, 0, 1000)
        found[f"stream {stream}"] = (
            records,
            await store.streams.info(stream),
            await store.streams.find(stream, NOW + 1),
        )
    return found


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller example would take as long again
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(made=st.lists(steps, min_size=10, max_size=50))
def test_contents_pass_through_all_engines_unchanged(places: dict[str, Place], made: list[tuple]) -> None:
    """rocksdb, redis, cluster, rocksdb: what is written down and what is read is the same at every station."""

    async def travel() -> None:
        for place in places.values():
            place.fresh()
        async with places["rocksdb"].store() as store:
            fencing = await write(store, made)
            at_first = await seen(store)
        file = await places["rocksdb"].export()
        expected = contents(file)
        for name in ("redis", "cluster", "rocksdb"):
            place = places[name]
            place.fresh()
            await place.load(file)
            file = await place.export()
            assert expected == contents(file), name
            async with place.store() as store:
                assert at_first == await seen(store), name
                assert [] == await store.check(), name
                await tokens_go_on(store, fencing)

    asyncio.run(travel())


async def tokens_go_on(store: Store, fencing: dict[str, int]) -> None:
    for name, token in fencing.items():
        lease = await store.coordination.acquire(name, "node", 0.001, NOW + HOUR)
        assert lease is None or lease.token > token, name


# -- what goes on after an import


@pytest.fixture(params=ENGINES)
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]


async def moved(place: Place, file: bytes) -> None:
    place.fresh()
    await place.load(file)


async def test_mailboxes_and_streams_go_on_where_they_were(place: Place) -> None:
    """Positions and tokens of appends, keys, marks and droppable entries, offsets after what was trimmed."""
    async with place.store() as store:
        for body in (b"1", b"2", b"3"):
            await append(store, "cleared", Draft(body, token=b"t" + body))
        await store.mailboxes.clear("cleared")
        await append(store, "v", Draft(b"kept"))
        await append(store, "v", Draft(b"qos 0", droppable=True))
        await append(store, "v", Draft(b"old value", key=b"k"))
        await store.mailboxes.mark("v", 1, 7)
        await store.streams.append("part", [b"1", b"2", b"3"], NOW + 5)
        await store.streams.trim("part", records=1)
        await store.streams.append("all", [b"1", b"2"], NOW)
        await store.streams.trim("all", before=NOW + 1)
    await moved(place, await place.export())
    async with place.store() as store:
        repeated = await append(store, "cleared", Draft(b"2", token=b"t2"), NOW + 1)
        assert (2, True) == (repeated.position, repeated.repeated)
        assert 4 == (await append(store, "cleared", Draft(b"4"))).position
        assert [7, 0, 0] == [entry.mark for entry in await entries(store, "v")]
        assert 3 == (await append(store, "v", Draft(b"new value", key=b"k"))).replaced
        assert (2,) == (await append(store, "v", Draft(b"one more"), bound=Bound(entries=3))).dropped
        assert {"part", "all"} == set(await store.streams.names())
        assert [4] == await store.streams.append("part", [b"4"], NOW)
        assert [3] == await store.streams.append("all", [b"3"], NOW)
        records = await store.streams.read("part", 0, 10)
        assert [(3, NOW + 5, b"3"), (4, NOW + 5, b"4")] == [(each.offset, each.time, each.value) for each in records]


async def test_what_expires_still_does_and_payloads_go_with_their_last_entry(place: Place) -> None:
    async with place.store() as store:
        await store.mailboxes.append(["v", "w"], Draft(b"", PAYLOAD, expires_at=NOW + 60), NOW)
        await append(store, "v", Draft(b"gone before", expires_at=NOW + 1), NOW)
        await store.records.put("one", "key", b"value", NOW + 60)
        digest = await store.blobs.put(b"put " * 100, NOW, NOW + 60)
    file = await place.export(NOW + 2)
    assert file.count(PAYLOAD) == 1
    assert b"gone before" not in file
    await moved(place, file)
    async with place.store() as store:
        assert PAYLOAD == (await entries(store, "w", NOW + 59))[0].payload
        assert b"put " * 100 == await store.blobs.get(digest, NOW + 59)
        assert {"key": b"value"} == await scan(store, "one", now=NOW + 59)
        await sweep(store, NOW + 3)
        figures = await store.figures()
        assert (2, 2, 1) == (figures.entries, figures.blobs, figures.records)
        await sweep(store, NOW + 3 * HOUR)
        figures = await store.figures()
        assert (0, 0, 0) == (figures.entries, figures.blobs, figures.records)
        assert (0, 0) == await store.blobs.count()
        assert [] == await store.check()


async def test_large_mailboxes_and_streams_come_in_parts(place: Place) -> None:
    async with place.store():
        pass
    assert not any(transfer.verify(io.BytesIO(await place.export()))[1].values()), "an empty store can be told"
    async with place.store() as store:
        batch = Batch()
        for number in range(1203):
            batch.append(["v"], Draft(b"%d" % number, PAYLOAD if number % 2 else b""), NOW)
        batch.stream("s", [b"%d" % number for number in range(1203)], NOW)
        await store.write(batch)
        gone = [position for position in range(1, 1204) if position % 7 == 0 or 600 < position < 650]
        await store.mailboxes.acknowledge("v", gone)
        expected = await entries(store, "v")
    file = await place.export()
    frames = list(transfer.frames(io.BytesIO(file)))
    assert [2, 3] == [
        sum(isinstance(frame, kind) for frame in frames) for kind in (transfer.ExportedMailbox, transfer.ExportedStream)
    ]
    assert 1 == file.count(PAYLOAD)
    await moved(place, file)
    async with place.store() as store:
        assert expected == await entries(store, "v")
        assert 1203 == (await store.streams.info("s")).records
        assert [] == await store.check()


async def test_what_is_in_flight_and_what_is_due_go_along(place: Place) -> None:
    """Entries that a client has had are not pushed out; homes come up at their times; both only once more changed."""
    async with place.store() as store:
        await fill(store, "v", b"1", b"2", b"3")
        batch = Batch()
        batch.spare("v", SPARE_ALL)
        batch.due("client:v", NOW + 60.125)
        batch.due("client:w", NOW + 5)
        await store.write(batch)
    await moved(place, await place.export())
    async with place.store() as store:
        assert (await append(store, "v", Draft(b"4"), bound=Bound(entries=3))).over
        found = [await store.coordination.due(store.feeds.feed_of(f"client:{name}"), NOW + 61, 9) for name in "vw"]
        assert ("client:v", NOW + 60.125) in found[0] and ("client:w", NOW + 5) in found[1]
        assert 2 == (await store.figures()).records
        batch = Batch()
        batch.due("client:v", 0)
        batch.due("client:w", 0)
        await store.write(batch)
        assert 0 == (await store.figures()).records
        assert [] == await store.check()


# -- files


async def some_file(folder: Path) -> bytes:
    place = Place(EmbeddedEngine("rocksdb", folder))
    async with place.store() as store:
        await store.mailboxes.append(["v", "w"], Draft(b"body", PAYLOAD), NOW)
        await store.records.put("one", "key", b"value")
    return await place.export()


def refused(file: bytes) -> str:
    with pytest.raises(transfer.TransferError) as caught:
        transfer.verify(io.BytesIO(file))
    return str(caught.value)


async def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    file = await some_file(tmp_path)
    for end in range(len(file)):
        refused(file[:end])
    assert "cut off" in refused(file[:-1])
    packed = gzip.compress(file)
    for end in range(0, len(packed), 3):
        refused(packed[:end])


async def test_a_file_with_one_wrong_byte_is_refused(tmp_path: Path) -> None:
    file = await some_file(tmp_path)
    for at in range(0, len(file), 7):
        wrong = bytearray(file)
        wrong[at] ^= 0x01
        refused(bytes(wrong))
    assert "follows its end" in refused(file + b"x")


async def test_a_compressed_file_is_the_same(tmp_path: Path) -> None:
    file = await some_file(tmp_path)
    assert transfer.verify(io.BytesIO(file)) == transfer.verify(io.BytesIO(gzip.compress(file)))


async def test_generations_and_the_positions_of_what_is_gone_go_along(places: dict[str, Place], place: Place) -> None:
    """From the embedded engine to each, and on from there."""
    async with places["rocksdb"].store() as store:
        await fill(store, "session:a", b"1", b"2", b"3")
        await store.mailboxes.forget("session:a")
        made = await store.mailboxes.make("session:b")
        await fill(store, "session:c", b"4")
    file = await places["rocksdb"].export()
    await moved(place, file)
    assert contents(file) == contents(await place.export())
    async with place.store() as store:
        assert made == (await store.mailboxes.info("session:b")).generation
        assert (await fill(store, "session:a", b"5"))[0] > 3
        answers = await store.mailboxes.append(["session:b"] * 2, Draft(b""), NOW, generations=[made, made + 1])
        assert [False, True] == [answer.gone for answer in answers]
        assert [] == await store.check()


async def test_a_file_of_version_1_is_read(place: Place) -> None:
    """Its mailboxes have no generation, and it has no floor of positions."""
    item = [7, NOW, 0.0, 3, False, b"key", b"body", b"payload", b"", 7]
    frames: list[list[object]] = [
        ["store", "motorcade store", 1, "memory", NOW, "0.9"],
        ["mailbox", "session:a", 9, [item]],
        ["records", "session", [["a", b"value", 0.0]]],
        ["floor", 5],
    ]
    file = b"".join(len(packed).to_bytes(4, "big") + packed for packed in map(msgspec.msgpack.encode, frames))
    counts = dict.fromkeys(
        ("mailboxes", "entries", "blobs", "blob_octets", "records", "streams", "stream_records", "leases"), 0
    ) | {"mailboxes": 1, "entries": 1, "records": 1}
    end = msgspec.msgpack.encode(["end", counts, hashlib.sha256(file).digest()])
    await place.load(file + len(end).to_bytes(4, "big") + end)
    async with place.store() as store:
        assert MailboxInfo(1, 11, 7, 9, 1) == await store.mailboxes.info("session:a")
        assert b"value" == await store.records.get("session", "a", NOW)
        assert [10] == await fill(store, "session:a", b"next")
        assert [] == await store.check()


async def test_other_files_and_later_versions_are_refused_by_name() -> None:
    for other in (b"", b"x", b"PK\x03\x04 something else", bytes(100), b"\xff" * 100):
        assert "no exported store" in refused(other)
    packed = transfer._encode(transfer.FileHeader(transfer.NAME, transfer.VERSION + 1, "memory", NOW, "9.9"))
    assert "made by Motorcade 9.9" in refused(len(packed).to_bytes(4, "big") + packed)


# -- imports that do not come to their end


async def test_an_embedded_store_is_there_as_a_whole_or_not_at_all(places: dict[str, Place]) -> None:
    place = places["rocksdb"]
    target = RocksTarget(place.path)
    await target.load(transfer.ExportedRecords("one", [("key", b"value", 0.0)]))
    assert not place.path.exists()
    target.abandon()
    assert [] == list(place.path.parent.iterdir())


async def test_a_shared_store_that_was_filled_in_part_opens_no_more(places: dict[str, Place]) -> None:
    for name in ("redis", "cluster"):
        place = places[name]
        async with place.store() as store:
            assert isinstance(store, RedisStore)
            await RedisTarget(store, NOW).load(transfer.ExportedRecords("one", [("key", b"value", 0.0)]))
        with pytest.raises(StoreError, match="was not finished"):
            async with place.store():
                pass
