"""Streams: append-only, offsets that grow, retention in steps."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.storage.ports import Draft, Formed, Store, StreamInfo, StreamRecord, Swept
from tests.contracts.engines import NOW, ODD_NAMES, odd_id


async def values(store: Store, stream: str, after: int = 0) -> list[bytes]:
    return [record.value for record in await store.streams.read(stream, after, 1_000_000)]


async def numbered(store: Store, stream: str, count: int) -> list[int]:
    """Records "0", "1", …, one a second from NOW; their offsets."""
    offsets = []
    for number in range(count):
        offsets += await store.streams.append(stream, [b"%d" % number], NOW + number)
    return offsets


async def trim(store: Store, stream: str, budget: int = 1000, **limits: float) -> list[Swept]:
    """A complete trim, step by step."""
    steps: list[Swept] = []
    while not steps or steps[-1].cursor is not None:
        assert len(steps) < 10_000, "the trim does not end"
        steps.append(await store.streams.trim(stream, budget=budget, **limits))  # type: ignore[arg-type]
    return steps


async def test_an_unknown_stream_is_empty(store: Store) -> None:
    assert [] == await store.streams.read("receipts", 0, 10)
    assert StreamInfo(0, 0, 0, 0) == await store.streams.info("receipts")
    assert 0 == await store.streams.find("receipts", NOW)
    assert Swept(0, 0, None) == await store.streams.trim("receipts", before=NOW)
    assert [] == await store.streams.names()
    await store.streams.drop("receipts")


async def test_records_come_in_the_order_they_went_in(store: Store) -> None:
    offsets = await store.streams.append("receipts", [b"1", b"2", b""], NOW)
    offsets += await store.streams.append("receipts", [b"3"], NOW + 0.5)
    assert sorted(set(offsets)) == offsets
    assert len(offsets) == 4
    assert offsets[0] >= 1
    assert [
        StreamRecord(offsets[0], NOW, b"1"),
        StreamRecord(offsets[1], NOW, b"2"),
        StreamRecord(offsets[2], NOW, b""),
        StreamRecord(offsets[3], NOW + 0.5, b"3"),
    ] == await store.streams.read("receipts", 0, 10)


async def test_no_values_is_no_append(store: Store) -> None:
    assert [] == await store.streams.append("receipts", [], NOW)
    assert StreamInfo(0, 0, 0, 0) == await store.streams.info("receipts")


async def test_a_reader_goes_on_after_an_offset(store: Store) -> None:
    offsets = await numbered(store, "receipts", 10)
    for start in range(10):
        page = await store.streams.read("receipts", offsets[start], 4)
        assert offsets[start + 1 : start + 5] == [record.offset for record in page]
    assert [] == await store.streams.read("receipts", 0, 0)
    assert [] == await store.streams.read("receipts", offsets[-1] + 1000, 5)


async def test_a_stream_longer_than_any_page(store: Store) -> None:
    wanted = [b"%d" % number for number in range(5000)]
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


async def test_large_values(store: Store) -> None:
    large = bytes(range(256)) * 4096
    await store.streams.append("receipts", [large, b"", large[1:]], NOW)
    assert [large, b"", large[1:]] == await values(store, "receipts")
    assert 2 * len(large) - 1 == (await store.streams.info("receipts")).octets


async def test_values_of_one_form(store: Store) -> None:
    """Stored as they like, read as what they are."""
    columns = ([b"%d" % number for number in range(600)], [b"x" * (number % 7) for number in range(600)])
    formed = Formed([b"<", 0, b"|", 1, 0, b"", b">"], columns)
    wanted = [b"<%b|%b%b>" % (first, second, first) for first, second in zip(*columns, strict=True)]
    offsets = await store.streams.append("receipts", formed, NOW)
    batch = store.batch()
    batch.stream("receipts", formed.part(0, 1), NOW + 1)
    batch.stream("receipts", [b"other"], NOW + 1)
    batch.stream("receipts", Formed([0], [[]]), NOW + 1)
    await batch.commit()
    assert 600 == len(offsets)
    assert [*wanted, wanted[0], b"other"] == await values(store, "receipts")
    assert wanted[250:260] == [record.value for record in await store.streams.read("receipts", offsets[249], 10)]
    octets = sum(map(len, wanted)) + len(wanted[0]) + 5
    info = await store.streams.info("receipts")
    assert (602, octets) == (info.records, info.octets)
    await trim(store, "receipts", records=100, budget=130)
    assert [*wanted[502:], wanted[0], b"other"] == await values(store, "receipts")
    info = await store.streams.info("receipts")
    assert (offsets[502], 100, octets - sum(map(len, wanted[:502]))) == (info.first, info.records, info.octets)
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
        octets = sum(len(record.value) for record in wanted[:gone])
        if number % 2 and gone < len(wanted):
            swept = await store.streams.trim("receipts", records=len(wanted) - gone, budget=gone)
        else:
            swept = await store.streams.trim("receipts", before=NOW + 100, budget=gone)
        assert (gone, octets) == (swept.removed, swept.octets)
        del wanted[:gone]
        number += 1
        assert [] == await store.check()
    assert [] == await values(store, "receipts")


async def test_info_follows_every_change(store: Store) -> None:
    offsets = await store.streams.append("receipts", [b"1", b"22", b"333"], NOW)
    assert StreamInfo(offsets[0], offsets[2], 3, 6) == await store.streams.info("receipts")
    await trim(store, "receipts", records=1)
    assert StreamInfo(offsets[2], offsets[2], 1, 3) == await store.streams.info("receipts")
    await trim(store, "receipts", before=NOW + 1)
    assert StreamInfo(0, offsets[2], 0, 0) == await store.streams.info("receipts")
    assert ["receipts"] == await store.streams.names(), "an empty stream is still a stream"
    (offset,) = await store.streams.append("receipts", [b"4"], NOW)
    assert offset > offsets[2], "offsets are never used again"
    assert StreamInfo(offset, offset, 1, 1) == await store.streams.info("receipts")


async def test_streams_have_any_name(store: Store) -> None:
    for name in ODD_NAMES:
        await store.streams.append(name, [b"theirs"], NOW)
    left = list(ODD_NAMES)
    for name in ODD_NAMES:
        await store.streams.append(name, [b"mine"], NOW)
        assert [b"theirs", b"mine"] == await values(store, name), odd_id(name)
        await store.streams.drop(name)
        left.remove(name)
        assert [] == await values(store, name), odd_id(name)
        assert sorted(left) == sorted(await store.streams.names()), odd_id(name)
        for other in left:
            assert [b"theirs"] == await values(store, other), (odd_id(name), odd_id(other))


async def test_find_gives_where_a_time_begins(store: Store) -> None:
    """Reading after it gives that time and later, nothing earlier."""
    for number in range(10):
        await store.streams.append("receipts", [b"%d" % number, b"%d again" % number], NOW + number)

    async def begins(time: float) -> list[bytes]:
        return (await values(store, "receipts", await store.streams.find("receipts", time)))[:1]

    assert [b"0"] == await begins(0.0)
    assert [b"0"] == await begins(NOW)
    assert [b"1"] == await begins(NOW + 0.25)
    assert [b"5"] == await begins(NOW + 5)
    assert [b"9"] == await begins(NOW + 9)
    assert [] == await begins(NOW + 9.25)
    after = await store.streams.find("receipts", NOW + 1000)
    assert (await store.streams.info("receipts")).last == after
    await store.streams.append("receipts", [b"new"], NOW + 1000)
    assert [b"new"] == await values(store, "receipts", after)


async def test_find_after_a_trim(store: Store) -> None:
    await numbered(store, "receipts", 10)
    await trim(store, "receipts", before=NOW + 4)
    assert [b"4"] == (await values(store, "receipts", await store.streams.find("receipts", NOW)))[:1]
    await trim(store, "receipts", before=NOW + 100)
    after = await store.streams.find("receipts", NOW)
    await store.streams.append("receipts", [b"new"], NOW + 11)
    assert [b"new"] == await values(store, "receipts", after)


async def test_time_never_goes_back_in_a_stream(store: Store) -> None:
    """Clocks of several nodes differ; a search by time must still not miss anything."""
    for number, time in enumerate((NOW + 10, NOW + 5, NOW + 20, NOW, NOW + 15)):
        await store.streams.append("receipts", [b"%d" % number], time)
    found = await store.streams.read("receipts", 0, 10)
    assert [NOW + 10, NOW + 10, NOW + 20, NOW + 20, NOW + 20] == [record.time for record in found]
    after = await store.streams.find("receipts", NOW + 15)
    assert [b"2", b"3", b"4"] == await values(store, "receipts", after)
    await trim(store, "receipts", before=NOW + 100)
    await store.streams.append("receipts", [b"5"], NOW)
    assert [NOW + 20] == [record.time for record in await store.streams.read("receipts", 0, 10)], "also when empty"


async def test_trim_by_age(store: Store) -> None:
    await numbered(store, "receipts", 10)
    assert [Swept(0, 0, None)] == await trim(store, "receipts", before=NOW)
    assert [Swept(4, 4, None)] == await trim(store, "receipts", before=NOW + 4)
    assert [b"4", b"5", b"6", b"7", b"8", b"9"] == await values(store, "receipts")


async def test_trim_by_count(store: Store) -> None:
    await numbered(store, "receipts", 10)
    assert [Swept(0, 0, None)] == await trim(store, "receipts", records=10)
    assert [Swept(7, 7, None)] == await trim(store, "receipts", records=3)
    assert [b"7", b"8", b"9"] == await values(store, "receipts")


async def test_trim_by_octets(store: Store) -> None:
    """As few go as it takes, even all of them."""
    await store.streams.append("receipts", [b"1" * 10, b"2" * 20, b"3" * 30], NOW)
    assert [Swept(0, 0, None)] == await trim(store, "receipts", octets=60)
    assert [Swept(1, 10, None)] == await trim(store, "receipts", octets=59)
    assert [Swept(1, 20, None)] == await trim(store, "receipts", octets=30)
    assert [Swept(1, 30, None)] == await trim(store, "receipts", octets=1)
    assert StreamInfo(0, (await store.streams.info("receipts")).last, 0, 0) == await store.streams.info("receipts")


async def test_trim_without_limits_keeps_everything(store: Store) -> None:
    await numbered(store, "receipts", 3)
    assert [Swept(0, 0, None)] == await trim(store, "receipts")
    assert 3 == len(await values(store, "receipts"))


async def test_the_strictest_limit_counts(store: Store) -> None:
    await numbered(store, "receipts", 10)
    await trim(store, "receipts", before=NOW + 2, records=8, octets=5)
    assert [b"5", b"6", b"7", b"8", b"9"] == await values(store, "receipts")
    await trim(store, "receipts", before=NOW + 9, records=4, octets=5)
    assert [b"9"] == await values(store, "receipts")


@pytest.mark.parametrize(
    "limits", [{"before": NOW + 90}, {"records": 10}, {"octets": 20}], ids=["age", "count", "size"]
)
async def test_trim_goes_in_steps(store: Store, limits: dict[str, float]) -> None:
    """No step above its budget; all steps together as one without."""
    await numbered(store, "receipts", 100)
    steps = await trim(store, "receipts", budget=7, **limits)
    assert max(step.removed for step in steps) <= 7
    assert 90 == sum(step.removed for step in steps)
    assert 170 == sum(step.octets for step in steps)
    assert [b"%d" % number for number in range(90, 100)] == await values(store, "receipts")


async def test_a_dropped_stream_is_gone(store: Store) -> None:
    await numbered(store, "receipts", 10)
    await numbered(store, "capture", 3)
    await store.streams.drop("receipts")
    assert StreamInfo(0, 0, 0, 0) == await store.streams.info("receipts")
    assert [] == await values(store, "receipts")
    assert ["capture"] == await store.streams.names()
    (offset,) = await store.streams.append("receipts", [b"new"], NOW)
    assert offset >= 1
    assert StreamInfo(offset, offset, 1, 3) == await store.streams.info("receipts")
    assert [b"new"] == await values(store, "receipts")


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
    batch = store.batch()
    batch.put("things", "k", b"v")
    batch.stream("a", [b"2", b"3"], NOW)
    batch.append(["car"], Draft(b"entry"), NOW)
    batch.stream("b", Formed((b"x", 0), ([b"1", b"2", b"3"],)), NOW)
    batch.stream("a", [], NOW)
    await batch.commit()
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
