"""Streams beyond the model (`test_model.py`): any name, long ones, records that lie together, and calls at once."""

from __future__ import annotations

import asyncio

from motorcade.storage.ports import Batch, Draft, Formed, Store, StreamInfo, StreamRecord
from tests.contracts.engines import NOW, ODD_NAMES, odd_id, trim


async def values(store: Store, stream: str, after: int = 0) -> list[bytes]:
    return [record.value for record in await store.streams.read(stream, after, 1_000_000)]


async def test_streams_have_any_name_and_are_not_mistaken_for_their_neighbours(store: Store) -> None:
    for name in ODD_NAMES:
        await store.streams.append(name, [b"theirs"], NOW)
    left = list(ODD_NAMES)
    for number, name in enumerate(ODD_NAMES):
        await store.streams.append(name, [b"%d" % number], NOW)
    for number, name in enumerate(ODD_NAMES):
        assert [b"theirs", b"%d" % number] == await values(store, name), odd_id(name)
        await store.streams.drop(name)
        left.remove(name)
        assert [] == await values(store, name), odd_id(name)
        assert sorted(left) == sorted(await store.streams.names()), odd_id(name)


async def test_a_stream_longer_than_any_page(store: Store) -> None:
    """With a mebibyte in the middle."""
    large = bytes(range(256)) * 4096
    wanted = [b"%d" % number for number in range(5000)]
    wanted[2600:2602] = [large, large[1:]]
    for start in range(0, 5000, 500):
        await store.streams.append("receipts", wanted[start : start + 500], NOW)
    for size in (700, 5000, 9999):
        found: list[bytes] = []
        after = 0
        while page := await store.streams.read("receipts", after, size):
            assert len(page) <= size
            found += [record.value for record in page]
            after = page[-1].offset
        assert wanted == found
    assert sum(map(len, wanted)) == (await store.streams.info("receipts")).size_bytes


async def test_values_of_one_form(store: Store) -> None:
    """Stored as they like, read as what they are."""
    columns = ([b"%d" % number for number in range(600)], [b"x" * (number % 7) for number in range(600)])
    formed = Formed([b"<", 0, b"|", 1, 0, b"", b">"], columns)
    wanted = [b"<%b|%b%b>" % (first, second, first) for first, second in zip(*columns, strict=True)]
    offsets = await store.streams.append("receipts", formed, NOW)
    batch = Batch()
    batch.stream("receipts", formed.part(0, 1), NOW + 1)
    batch.stream("receipts", [b"other"], NOW + 1)
    batch.stream("receipts", Formed([0], [[]]), NOW + 1)
    await store.write(batch)
    assert 600 == len(offsets)
    assert [*wanted, wanted[0], b"other"] == await values(store, "receipts")
    assert wanted[250:260] == [record.value for record in await store.streams.read("receipts", offsets[249], 10)]
    size_bytes = sum(map(len, wanted)) + len(wanted[0]) + 5
    info = await store.streams.info("receipts")
    assert (602, size_bytes) == (info.records, info.size_bytes)
    await trim(store, "receipts", records=100, budget=130)
    assert [*wanted[502:], wanted[0], b"other"] == await values(store, "receipts")
    info = await store.streams.info("receipts")
    assert (offsets[502], 100, size_bytes - sum(map(len, wanted[:502]))) == (info.first, info.records, info.size_bytes)
    assert [] == await store.check()


async def test_records_that_came_together_are_read_and_go_one_by_one(store: Store) -> None:
    """Whatever an engine keeps together: from every offset, in pages of any size, trimmed anywhere."""
    wanted: list[StreamRecord] = []
    for turn, count in enumerate((1, 2, 7, 40, 1, 300, 3)):
        given = [b"%d %d" % (turn, number) * (number % 5) for number in range(count)]
        if turn == 3:
            given[17] = bytes(40_000)
        offsets = await store.streams.append("receipts", given, NOW + turn)
        wanted += [StreamRecord(offset, NOW + turn, value) for offset, value in zip(offsets, given, strict=True)]
    number = 0
    while wanted:
        for limit in (1, 3, 11, 500):
            place = number * limit % len(wanted)
            assert wanted[place : place + limit] == await store.streams.read(
                "receipts", wanted[place].offset - 1, limit
            )
        for turn in range(7):
            time = NOW + turn
            later = [record for record in wanted if record.time >= time]
            assert later == await store.streams.read("receipts", await store.streams.find("receipts", time), 1000)
        info = StreamInfo(wanted[0].offset, wanted[-1].offset, len(wanted), sum(len(record.value) for record in wanted))
        assert info == await store.streams.info("receipts")
        gone = min(1 + number * 7, len(wanted))
        size_bytes = sum(len(record.value) for record in wanted[:gone])
        if number % 2 and gone < len(wanted):
            swept = await store.streams.trim("receipts", records=len(wanted) - gone, budget=gone)
        else:
            swept = await store.streams.trim("receipts", before=NOW + 100, budget=gone)
        assert (gone, size_bytes) == (swept.removed, swept.size_bytes)
        del wanted[:gone]
        number += 1
        assert [] == await store.check()
    assert [] == await values(store, "receipts")


async def test_writers_at_once_get_offsets_of_their_own(store: Store) -> None:
    """Records of one append stay together and in order."""

    async def write(writer: int) -> list[int]:
        offsets: list[int] = []
        for number in range(20):
            offsets += await store.streams.append("receipts", [b"%d %d" % (writer, number), b"and"], NOW)
        return offsets

    given = await asyncio.gather(*(write(writer) for writer in range(8)))
    flat = [offset for offsets in given for offset in offsets]
    assert 320 == len(set(flat))
    found = await store.streams.read("receipts", 0, 1000)
    assert sorted(flat) == [record.offset for record in found]
    assert all(offsets == sorted(offsets) for offsets in given)
    assert {b"and"} == {record.value for record in found[1::2]}


async def test_appends_in_the_air_keep_their_order(store: Store) -> None:
    """Rule 6."""
    calls = [store.streams.append("receipts", [b"%d" % number], NOW) for number in range(200)]
    answers = await asyncio.gather(*calls)
    offsets = [offset for (offset,) in answers]
    assert sorted(offsets) == offsets
    assert [b"%d" % number for number in range(200)] == await values(store, "receipts")


async def test_a_reader_beside_writers_misses_nothing(store: Store) -> None:
    """Whoever goes on after the last offset seen gets everything: no smaller offset appears later."""
    total = 400

    async def write(writer: int) -> None:
        for number in range(100):
            await store.streams.append("receipts", [b"%d %d" % (writer, number)], NOW)

    async def read() -> list[bytes]:
        found: list[bytes] = []
        after = 0
        while len(found) < total:
            page = await store.streams.read("receipts", after, 9)
            if page:
                found += [record.value for record in page]
                after = page[-1].offset
            else:
                await asyncio.sleep(0)
        return found

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(read())
        for writer in range(4):
            tasks.create_task(write(writer))
    assert total == len(set(reader.result()))


async def test_appends_are_told_by_whatever_way_they_come(store: Store) -> None:
    """By `append` and in batches, with the last offset; until the watcher has had enough."""
    told: dict[str, list[int]] = {"a": [], "b": []}
    end = store.streams.watch(lambda stream, last: told[stream].append(last))
    (first,) = await store.streams.append("a", [b"1"], NOW)
    assert [first] == told["a"]
    batch = Batch()
    batch.put("things", "k", b"v")
    batch.stream("a", [b"2", b"3"], NOW)
    batch.append(["car"], Draft(b"entry"), NOW)
    batch.stream("b", Formed((b"x", 0), ([b"1", b"2", b"3"],)), NOW)
    batch.stream("a", [], NOW)
    await store.write(batch)
    assert (await store.streams.info("a")).last == told["a"][-1]
    assert (await store.streams.info("b")).last == told["b"][-1]
    await asyncio.gather(*(store.streams.append("a", [b"%d" % number] * 700, NOW) for number in range(3)))
    assert (await store.streams.info("a")).last == told["a"][-1]
    assert sorted(told["a"]) == told["a"]
    before = list(told["a"])
    await store.streams.trim("a", records=1)
    end()
    await store.streams.append("a", [b"4"], NOW)
    assert before == told["a"]


async def test_an_append_whose_caller_is_gone_is_told_or_found(store: Store) -> None:
    """A caller that is cancelled in between does not keep others from hearing of the records."""
    told: list[int] = []
    end = store.streams.watch(lambda _stream, last: told.append(last))
    gone = asyncio.ensure_future(store.streams.append("a", [b"1"], NOW))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await store.streams.append("a", [b"2"], NOW)
    assert (await store.streams.info("a")).last == told[-1]
    end()
