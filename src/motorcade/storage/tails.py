"""Following a feed inside one process, for the engines whose nodes are alone with their store.

    note is written ──> Tails.ring ──> LocalTail.next reads on

The bell says that there may be news; what is given comes from the feed itself. So it may ring for nothing. A tail looks
by itself now and then, too: a write of unknown outcome may turn out to be stored later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from motorcade.storage.ports import FeedEnd, FeedPage, Feeds, StoreError

#: Notes in one page of a tail.
MAX_PAGE: Final = 500
#: Seconds between two looks at a feed of which nothing is heard.
LOOK_EVERY: Final = 1.0

CLOSED: Final = "this reader of the feeds was closed"


def check_ends(after: Sequence[FeedEnd], count: int) -> None:
    """Raise `ValueError` unless there is an end for each feed."""
    if len(after) != count:
        raise ValueError(f"the store has {count} feeds, not {len(after)}")


class Tails:
    """The readers that follow the feed of a store."""

    def __init__(self) -> None:
        self._tails: set[LocalTail] = set()

    def __bool__(self) -> bool:
        return bool(self._tails)

    def follow(self, feeds: Feeds, after: Sequence[FeedEnd]) -> LocalTail:
        check_ends(after, 1)
        tail = LocalTail(feeds, after[0], self)
        self._tails.add(tail)
        return tail

    def remove(self, tail: LocalTail) -> None:
        self._tails.discard(tail)

    def ring(self) -> None:
        """Let all readers look: there may be news, or the store was closed."""
        for tail in self._tails:
            tail.look(0)


class LocalTail:
    """A `FeedTail` of a store with one feed."""

    def __init__(self, feeds: Feeds, after: FeedEnd, tails: Tails) -> None:
        self._feeds = feeds
        self._end = after
        self._tails = tails
        self._gap = False  #: nothing comes until the reader says where to go on
        self._closed = False
        self._news = asyncio.Event()

    @property
    def ends(self) -> Sequence[FeedEnd]:
        return [self._end]

    async def next(self) -> tuple[int, FeedPage]:
        while not self._closed:
            self._news.clear()
            end = self._end
            page = await self._feeds.read(0, end, MAX_PAGE)  # also after a gap: a closed store says so
            if end is self._end and not self._gap:
                if page.gap:
                    self._gap = True
                    return 0, page
                if page.notes:
                    self._end = FeedEnd(page.notes[-1].number, page.notes[-1].nonce)
                    return 0, page
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._news.wait()
            except TimeoutError:
                pass
        raise StoreError(CLOSED)

    def reset(self, feed: int, end: FeedEnd) -> None:
        self._end, self._gap = end, False
        self.look(feed)

    def look(self, feed: int) -> None:  # noqa: ARG002 - there is but one
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._tails.remove(self)
        self._news.set()
