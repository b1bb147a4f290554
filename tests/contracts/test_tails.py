"""Following feeds: whoever waits hears of every note once, in order, or that there is a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

from motorcade.storage.ports import Batch, FeedEnd, FeedTail, Store, StoreError
from motorcade.storage.tails import MAX_PAGE

HOMES = [f"client:{number}" for number in range(12)]
LOST = FeedEnd(3, b"12345678")  #: of a note that no feed has any more


async def note(store: Store, home: str, *data: bytes) -> None:
    batch = Batch()
    for each in data:
        batch.note(home, each)
    await store.write(batch)


class Reader:
    """What a tail has given, feed by feed."""

    def __init__(self, tail: FeedTail) -> None:
        self.tail = tail
        self.found: dict[int, list[tuple[int, bytes]]] = {}
        self.gaps: list[int] = []

    async def take(self) -> None:
        feed, page = await self.tail.next()
        assert not (page.gap and page.notes)
        assert page.gap or page.notes
        if page.gap:
            self.gaps.append(feed)
        self.found.setdefault(feed, []).extend((note.number, note.data) for note in page.notes)

    async def until(self, wanted: int) -> dict[int, list[tuple[int, bytes]]]:
        """Read until there are so many notes."""
        async with asyncio.timeout(60):
            while sum(map(len, self.found.values())) < wanted:
                await self.take()
        return {feed: notes for feed, notes in self.found.items() if notes}


@pytest.fixture
async def reader(store: Store) -> AsyncIterator[Reader]:
    """One that begins with the ends of an empty store."""
    made = Reader(store.feeds.follow(await store.feeds.ends()))
    yield made
    made.tail.close()


def wanted(store: Store, rounds: int) -> dict[int, list[bytes]]:
    """What feeds have when each home was told of so many things in turn."""
    found: dict[int, list[bytes]] = {}
    for number in range(rounds):
        for home in HOMES:
            found.setdefault(store.feeds.feed_of(home), []).append(b"%s %d" % (home.encode(), number))
    return found


async def test_every_note_comes_once_and_in_order(store: Store, other: Store, reader: Reader) -> None:
    """Whoever writes it, and whether the reader waits or lags behind; the ends go along with what was given."""
    reading = asyncio.create_task(reader.until(5 * len(HOMES)))
    for number in range(5):
        for home in HOMES:
            await note(other if number % 2 else store, home, b"%s %d" % (home.encode(), number))
    found = await reading
    assert wanted(store, 5) == {feed: [data for _, data in notes] for feed, notes in found.items()}
    assert all([number for number, _ in notes] == list(range(1, len(notes) + 1)) for notes in found.values())
    assert await store.feeds.ends() == list(reader.tail.ends)
    again = Reader(other.feeds.follow([FeedEnd()] * len(reader.tail.ends)))
    assert found == await again.until(5 * len(HOMES))
    again.tail.close()


async def test_a_reader_goes_on_where_another_one_ended(store: Store, reader: Reader) -> None:
    await note(store, HOMES[0], b"1")
    await reader.until(1)
    ends = list(reader.tail.ends)
    await note(store, HOMES[0], b"2")
    await note(store, HOMES[1], b"1")
    following = Reader(store.feeds.follow(ends))
    found = await following.until(2)
    assert [(2, b"2")] == found[store.feeds.feed_of(HOMES[0])][:1]
    assert ends == list(reader.tail.ends), "what was not taken does not count"
    following.tail.close()


async def test_many_notes_wait_for_a_slow_reader(store: Store, reader: Reader) -> None:
    """More than are kept at hand for it."""
    feed = store.feeds.feed_of(HOMES[0])
    for _ in range(10):
        await note(store, HOMES[0], *(b"%d" % number for number in range(MAX_PAGE)))
    await note(store, HOMES[0], b"last")
    assert {feed: list(range(1, 10 * MAX_PAGE + 2))} == {
        feed: [number for number, _ in notes] for feed, notes in (await reader.until(10 * MAX_PAGE + 1)).items()
    }


async def test_a_gap_is_told_once_and_the_reader_says_where_to_go_on(store: Store) -> None:
    """Other feeds go on meanwhile."""
    ends = await store.feeds.ends()
    feed = store.feeds.feed_of(HOMES[0])
    reader = Reader(store.feeds.follow([LOST if number == feed else end for number, end in enumerate(ends)]))
    async with asyncio.timeout(60):
        await reader.take()
    assert [feed] == reader.gaps
    beside = [home for home in HOMES if store.feeds.feed_of(home) != feed]
    await note(store, HOMES[0], b"1", b"2")
    for home in beside:
        await note(store, home, b"beside")
    await reader.until(len(beside))
    end = (await store.feeds.ends())[feed]
    reader.tail.reset(feed, end)
    assert end == reader.tail.ends[feed]
    await note(store, HOMES[0], b"3")
    reader.tail.look(feed)
    await reader.until(len(beside) + 1)
    assert [(3, b"3")] == reader.found[feed]
    assert [feed] == reader.gaps
    reader.tail.close()


async def test_what_was_read_before_a_reset_is_left_out(store: Store, reader: Reader) -> None:
    feed = store.feeds.feed_of(HOMES[0])
    await note(store, HOMES[0], b"1", b"2")
    await reader.until(2)
    second = reader.tail.ends[feed]
    await note(store, HOMES[0], b"3", b"4")
    reader.tail.look(feed)
    await asyncio.sleep(0.05)  # it may have been read by then, or not
    reader.tail.reset(feed, second)
    reader.tail.reset(feed, FeedEnd())
    await reader.until(6)
    assert [1, 2, 1, 2, 3, 4] == [number for number, _ in reader.found[feed]]


async def refused(waiting: Awaitable[object]) -> str:
    with pytest.raises(StoreError) as raised:
        async with asyncio.timeout(60):
            await waiting
    return str(raised.value)


async def test_a_reader_that_is_closed_waits_no_longer(store: Store, other: Store, reader: Reader) -> None:
    """Nor does one whose store is closed."""
    closed = other.feeds.follow(await store.feeds.ends())
    waiting, theirs = asyncio.create_task(closed.next()), asyncio.create_task(reader.tail.next())
    await asyncio.sleep(0)
    closed.close()
    assert "closed" in await refused(waiting)
    assert "closed" in await refused(closed.next())
    closed.close()
    assert not theirs.done()
    await store.close()
    assert "closed" in await refused(theirs)
    assert "closed" in await refused(reader.tail.next())
    with pytest.raises(StoreError, match="closed"):
        store.feeds.follow([])
    await store.open()


async def test_a_reader_names_an_end_for_each_feed(store: Store) -> None:
    ends = await store.feeds.ends()
    for wrong in ([], [*ends, FeedEnd()]):
        with pytest.raises(ValueError, match="feeds"):
            store.feeds.follow(wrong)
