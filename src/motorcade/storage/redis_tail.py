"""Following the feeds of a shared store: wait at the servers until something comes, and read it.

    XREAD BLOCK, on a connection of its own ──> wakes ──> XRANGE from the note known last ──> page or gap ──> next

Rule 1: a wait gives nothing, it only wakes. What is given begins with the note that the reader knows: if a fail-over
        has forgotten that one, what came in its place is a gap, however much has come since.
Rule 2: a wait hears nothing of notes that are gone. So each feed is looked at every `PULSE`, with each new connection
        (its server may have forgotten, or be another one), and when the caller asks.
Rule 3: no command takes keys of several slots. A lone server has one wait for all feeds, a cluster one for each.
Rule 4: a page counts as given when `next` returns it; `MAX_PAGES` may wait for that, then reading waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final

import structlog

from motorcade.redis.resp import RedisConnection, ServerAddress, ServerError, connect
from motorcade.redis.servers import FIRST_PAUSE, LONGEST_PAUSE
from motorcade.storage.ports import FeedEnd, FeedPage, Feeds, StoreError
from motorcade.storage.tails import CLOSED, MAX_PAGE, check_ends

if TYPE_CHECKING:
    from motorcade.storage.redis import Core

log = structlog.get_logger("motorcade.storage.redis")

#: Seconds that a wait takes at most, and between two looks at a feed of which nothing is heard.
PULSE: Final = 1.0
#: Pages of all feeds that the reader has not taken.
MAX_PAGES: Final = 64


class FollowedFeed:
    """One feed, and how far it was read."""

    def __init__(self, number: int, end: FeedEnd) -> None:
        self.number = number
        self.given = end  #: how far what the caller has goes
        self.end = end  #: how far it was read
        self.gap = False  #: nothing is read until the caller says where to go on
        self.resets = 0
        self.lock = asyncio.Lock()  #: of the one who reads it

    def reset(self, end: FeedEnd) -> None:
        self.given = self.end = end
        self.gap = False
        self.resets += 1


class RedisTail:
    """A `FeedTail` of a shared store."""

    def __init__(self, core: Core, feeds: Feeds, after: Sequence[FeedEnd], tails: set[RedisTail]) -> None:
        check_ends(after, core.cells.count)
        self._core = core
        self._reader = feeds
        self._feeds = [FollowedFeed(number, end) for number, end in enumerate(after)]
        self._pages: asyncio.Queue[tuple[FollowedFeed, int, FeedPage] | None] = asyncio.Queue(MAX_PAGES)
        self._tails = tails
        self._closed = ""
        self._tasks: set[asyncio.Task[None]] = set()
        groups = [[feed] for feed in self._feeds] if core.servers.clustered else [self._feeds]
        for group in groups:
            self._tasks.add(asyncio.create_task(self._follow(group), name=f"redis-tail-{group[0].number}"))
        tails.add(self)

    @property
    def ends(self) -> Sequence[FeedEnd]:
        return [feed.given for feed in self._feeds]

    async def next(self) -> tuple[int, FeedPage]:
        while not self._closed:
            found = await self._pages.get()
            if found is None:
                break
            feed, resets, page = found
            if resets == feed.resets:  # else it was read before the caller said where to go on
                if page.notes:
                    feed.given = _end_of(page)
                return feed.number, page
        raise StoreError(self._closed)

    def reset(self, feed: int, end: FeedEnd) -> None:
        self._feeds[feed].reset(end)
        self.look(feed)

    def look(self, feed: int) -> None:
        if not self._closed:
            task = asyncio.create_task(self._try([self._feeds[feed]]), name=f"redis-tail-look-{feed}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self, why: str = CLOSED) -> None:
        self._closed = self._closed or why
        self._tails.discard(self)
        for task in self._tasks:
            task.cancel()
        while not self._pages.empty():
            self._pages.get_nowait()
        self._pages.put_nowait(None)

    # -- reading

    async def _try(self, feeds: Sequence[FollowedFeed]) -> None:
        try:
            await self._read(feeds)
        except StoreError as error:  # the next pulse comes
            log.debug("redis_tail_failed", error=str(error))

    async def _read(self, feeds: Sequence[FollowedFeed]) -> None:
        if len(feeds) == 1:
            await self._read_one(feeds[0])
        else:
            await asyncio.gather(*map(self._read_one, feeds))

    async def _read_one(self, feed: FollowedFeed) -> None:
        """Read to the end of a feed."""
        async with feed.lock:
            while not feed.gap:
                resets, end = feed.resets, feed.end
                page = await self._reader.read(feed.number, end, MAX_PAGE)
                if resets != feed.resets:
                    continue
                if page.gap:
                    feed.gap = True
                elif page.notes:
                    feed.end = _end_of(page)
                else:
                    return
                await self._pages.put((feed, resets, page))
                if len(page.notes) < MAX_PAGE:
                    return

    # -- waiting

    async def _follow(self, feeds: Sequence[FollowedFeed]) -> None:
        """Wait for news of feeds whose server is the same, wherever that is."""
        servers, slot = self._core.servers, self._core.cells.slot(feeds[0].number)
        pause = FIRST_PAUSE
        while True:
            address = servers.master(slot)
            try:
                if address is not None:
                    connection = await connect(address, servers.access)
                    try:
                        pause = FIRST_PAUSE
                        await self._wait_at(connection, address, slot, feeds)
                    finally:
                        connection.close()
            except (StoreError, ServerError) as error:
                log.debug("redis_tail_lost", server=str(address), error=str(error))
            except Exception:
                log.exception("redis_tail_failed", again_in=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            await servers.refresh()

    async def _wait_at(
        self, connection: RedisConnection, address: ServerAddress, slot: int, feeds: Sequence[FollowedFeed]
    ) -> None:
        loop, looked_at = asyncio.get_running_loop(), -inf
        by_key = {self._core.key(feed.number, "F"): feed for feed in feeds}
        while self._core.servers.master(slot) == address:
            if loop.time() - looked_at >= PULSE:
                looked_at = loop.time()
                await self._read(feeds)
            waiting = {key: feed.end for key, feed in by_key.items() if not feed.gap}
            if not waiting:
                await asyncio.sleep(PULSE)
                continue
            ids = [f"{end.number}-0" for end in waiting.values()]
            found: Any = await connection.call(
                "XREAD", "COUNT", 1, "BLOCK", int(PULSE * 1000), "STREAMS", *waiting, *ids
            )
            await self._read([by_key[key] for key, _ in found or ()])


def _end_of(page: FeedPage) -> FeedEnd:
    return FeedEnd(page.notes[-1].number, page.notes[-1].nonce)
