"""The operator's views of a stream."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_READERS: Final = 1000  #: shown with one stream; `readers` counts all


class ReaderView(msgspec.Struct, frozen=True, kw_only=True):
    """One client's place in a stream."""

    client: str
    filter: str = ""  #: its subscription; "": none now, but it goes on here when it has one
    connected: bool = False
    offset: int  #: everything up to it was acknowledged
    lag: int  #: records after it, or nearly: offsets may have gaps
    in_flight: int = 0
    node: str = ""  #: that it is connected to, with several nodes


class ReadingSummary(msgspec.Struct, array_like=True, frozen=True):
    """The readers of a stream on one member."""

    readers: int
    lowest: int  #: offset of the one that is farthest behind

    def beside(self, other: ReadingSummary) -> ReadingSummary:
        """Return the same of two members together."""
        return ReadingSummary(self.readers + other.readers, min(self.lowest, other.lowest))


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """A stream, at one moment."""

    name: str
    origin: str
    topics: tuple[str, ...]
    retention: float
    max_bytes: int
    max_messages: int
    first: int  #: offset of the oldest record; 0: none
    last: int  #: offset given last
    records: int
    bytes: int
    readers: int  #: subscriptions, those of clients that are away too
    lag: int  #: of the reader that is farthest behind
    reading: tuple[ReaderView, ...] = ()  #: only in the view of one stream; clients without a subscription too
    unanswered: dict[str, str] = {}  #: nodes whose readers are missing, since they did not answer, and why
