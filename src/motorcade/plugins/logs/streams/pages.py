"""Parts of streams in memory, as messages ready to be sent: one copy for all who read there.

    offsets   1 ─────────────── 900 ── 1027        5000 ────── 5100 = tail
    pages                        [──────]            [──────────]
                                  read by a reader    appended just now, grows

A page holds every record there is with an offset above `after` and up to `upto`. A reader at `cursor` with
`after <= cursor < upto` needs nothing but the page; one that finds none reads one from the store, or waits at the tail.
That is why nothing is lost or doubled between reading and live: there is one sequence, and one place in it per reader.

Rule 1: pages of one stream do not overlap.
Rule 2: what was appended becomes part of the last page only if its offsets follow without a hole. A hole may hide a
        record whose append had no known outcome; it is read from the store.
Rule 3: readers keep no page. All pages together take at most `max_bytes`; the one used longest ago goes first. What
        the only reader of a stream has been through goes at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from motorcade.core.message import Message
from motorcade.delivery.reader import Page

PAGE: Final = 128  #: records; engines read so many at once without a thread
PAGE_BYTES: Final = 256 * 1024  #: a page is not made longer when it has so many
OVERHEAD: Final = 700  #: bytes a message takes in memory besides its payload, roughly


class CachedPage(Page):
    """A page of a stream."""

    __slots__ = ("owner", "size_bytes")

    def __init__(self, owner: Pages, after: int, upto: int, numbers: list[int], messages: list[Message]) -> None:
        super().__init__(after, upto, numbers, messages)
        self.owner = owner
        self.size_bytes = size_of(messages)


class Cache:
    """The pages of all streams, within a bound."""

    def __init__(self, max_bytes: int, counters: Counter[str]) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.behind = 0  #: readers that are not at the tail now
        self._counters = counters
        self._pages: OrderedDict[CachedPage, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def used(self, page: CachedPage) -> None:
        self._pages.move_to_end(page)

    def add(self, page: CachedPage) -> None:
        self._pages[page] = None
        self.grown(page, page.size_bytes)

    def grown(self, page: CachedPage, size_bytes: int) -> None:
        """Make room, but for the page itself."""
        self.size_bytes += size_bytes
        self._pages.move_to_end(page)
        while self.size_bytes > self.max_bytes and len(self._pages) > 1:
            oldest = next(iter(self._pages))
            oldest.owner.remove(oldest)
            self._counters["cache_evicted"] += 1

    def remove(self, page: CachedPage) -> None:
        if page in self._pages:
            del self._pages[page]
            self.size_bytes -= page.size_bytes

    def share(self) -> int:
        """Return how many bytes of pages each reader that is behind may use, so that none evicts another's."""
        return self.max_bytes // max(1, self.behind)


class Pages:
    """The pages of one stream."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pages: list[CachedPage] = []  # by `after`
        self._afters: list[int] = []

    def find(self, cursor: int) -> CachedPage | None:
        """Return the page in which the record after an offset is, or would be."""
        at = bisect_right(self._afters, cursor) - 1
        if at < 0:
            return None
        page = self._pages[at]
        if cursor >= page.upto:
            return None
        self._cache.used(page)
        return page

    def add(self, after: int, upto: int, offsets: list[int], messages: list[Message]) -> CachedPage | None:
        """Add a range that was read, without what other pages have of it; None: they have all."""
        at = bisect_right(self._afters, after) - 1
        if at >= 0 and self._pages[at].upto > after:
            after = self._pages[at].upto
        if at + 1 < len(self._pages):
            upto = min(upto, self._pages[at + 1].after)
        if after >= upto:
            return None
        low, high = bisect_right(offsets, after), bisect_right(offsets, upto)
        page = CachedPage(self, after, upto, offsets[low:high], messages[low:high])
        self._insert(at + 1, page)
        return page

    def extend(self, offsets: Sequence[int], messages: Sequence[Message]) -> None:
        """Add what was appended just now."""
        last = self._pages[-1] if self._pages else None
        if last is not None and offsets[0] <= last.upto:
            skip = bisect_right(offsets, last.upto)  # a reader has read it from the store meanwhile
            offsets, messages = offsets[skip:], messages[skip:]
            if not offsets:
                return
        if last is None or offsets[0] != last.upto + 1 or len(last.numbers) >= PAGE or last.size_bytes >= PAGE_BYTES:
            page = CachedPage(self, offsets[0] - 1, offsets[-1], list(offsets), list(messages))
            self._insert(len(self._pages), page)
            return
        size_bytes = size_of(messages)
        last.numbers += offsets
        last.messages += messages
        last.upto = offsets[-1]
        last.size_bytes += size_bytes
        self._cache.grown(last, size_bytes)

    def _insert(self, at: int, page: CachedPage) -> None:
        self._pages.insert(at, page)
        self._afters.insert(at, page.after)
        self._cache.add(page)

    def remove(self, page: Page) -> None:
        at = bisect_right(self._afters, page.after) - 1
        if at >= 0 and self._pages[at] is page:
            self._cache.remove(self._pages[at])
            del self._pages[at], self._afters[at]

    def forget_before(self, offset: int) -> None:
        """Forget records before an offset, which are gone from the stream."""
        while self._pages and self._pages[0].upto < offset:
            self.remove(self._pages[0])

    def clear(self) -> None:
        for page in list(self._pages):
            self.remove(page)


def size_of(messages: Sequence[Message]) -> int:
    """Return how many bytes messages count for in the cache."""
    return sum(len(message.payload) for message in messages) + OVERHEAD * len(messages)
