"""Reading a store from outside its node: in bulk, one call after the other, without an event loop.

    open_reader(url) ─▶ rocksdb://   secondary.py       the files of a running node, opened a second time
                        redis://     redis_reader.py    the servers that nodes share

For programs that go through much of what is stored and are no node: Spark jobs, reports, audits. A reader never writes,
takes part in nothing, and is not a store: it has no ports.

Rule 1: a reader sees the store as of its last `refresh`, or later.
Rule 2: pages are columns, because bulk readers make columns of them. A page holds no more than the caller
        asks for, and about PAGE_BYTES of values.
Rule 3: what was trimmed is left out without a word; a caller that must know compares the offsets, and asks `extent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from motorcade.storage.ports import StoreError

#: Bytes of values in one page, about: by a run or an answer more, and from Redis more where records grow suddenly.
PAGE_BYTES = 8 * 2**20

#: Rows of a page, however small; and, from Redis, however large they are.
MAX_ROWS = 16_384
FEWEST_ROWS = 16


class Extent(NamedTuple):
    """The ends of a stream."""

    floor: int  #: no record below it; the oldest one is there or above. Without records: where the next one will be
    last: int  #: offset given last; 0: none ever, perhaps there is no such stream
    records: int
    size_bytes: int  #: of values


class StreamPage(NamedTuple):
    """Some records of a stream, oldest first, as columns of the same length."""

    offsets: Sequence[int]
    times: Sequence[float]
    values: Sequence[bytes]


class MailboxPage(NamedTuple):
    """Some entries of mailboxes as columns. What has expired is there until it is swept."""

    owners: list[str]
    positions: list[int]
    stored: list[float]
    expires: list[float]  #: 0: never
    marks: list[int]
    bodies: list[bytes]


class StoreReader(Protocol):
    """One open store."""

    def refresh(self) -> None:
        """See what was written until now."""

    def streams(self) -> list[str]:
        """Return the names of all streams."""

    def extent(self, stream: str) -> Extent:
        """Return the first and last of a stream as of now."""

    def find(self, stream: str, time: float) -> int:
        """Return the offset after which records of `time` and later begin."""

    def pages(self, stream: str, after: int, last: int, rows: int = MAX_ROWS) -> Iterator[StreamPage]:
        """Yield the records above `after` up to `last`, in pages of up to so many rows."""

    def parts(self) -> int:
        """Return into how many parts the mailboxes can be divided, to be read beside each other."""

    def waiting(self, prefix: str, part: int) -> Iterator[MailboxPage]:
        """Yield all entries of the owners whose name begins with `prefix`, of one part of the store."""

    def record(self, collection: str, key: str) -> bytes | None:
        """Return a record of a collection whose records do not expire."""

    def close(self) -> None:
        """Let go of everything; closing again does nothing."""


def rows_for(size_bytes: int, records: int, most: int) -> int:
    """Return how many rows a page may have, if they are as large as these."""
    if not size_bytes or not records:
        return max(1, most)
    return max(min(FEWEST_ROWS, most), min(most, PAGE_BYTES * records // size_bytes), 1)


def open_reader(url: str) -> StoreReader:
    """Open the store that `url` names; `StoreError` says what is wrong with it."""
    scheme, separator, place = url.partition("://")
    if scheme == "rocksdb" and place:
        from motorcade.storage.secondary import Secondary  # noqa: PLC0415 - see storage/__init__.py

        return Secondary(place)
    if separator and place and scheme in {"redis", "rediss", "redis+cluster", "rediss+cluster"}:
        try:
            from motorcade.storage.redis_reader import RedisReader  # noqa: PLC0415
        except ImportError as error:
            raise StoreError(f"{error}; `pip install 'motorcade[redis]'` brings what this store needs") from error
        return RedisReader(url)
    raise StoreError(
        f"{scheme + '://' if separator else url!r} does not name a store that can be read from outside its node; it "
        "should be rocksdb://DIRECTORY, redis://HOST:PORT or redis+cluster://HOST:PORT"
    )
