"""The options of one stream, and of the plugin."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from motorcade.core.errors import TopicError
from motorcade.core.topic import SHARE, check_filter
from motorcade.extension.declared import Name

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

WEEK: Final = 7 * 86400.0
_NOT_PUBLISHED: Final = (f"{SHARE}/", "$stream/", "$queue/")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The messages that a stream takes, and how much of them it keeps. 0 lifts a bound."""

    #: Filters: what is published to one of them is appended. None: only plugins append to it, such as capture.
    topics: tuple[str, ...] = ()
    retention: Seconds = WEEK  #: seconds; what is older goes
    max_bytes: Count = 10 * 1024**3  #: of all records; above it the oldest go
    max_messages: Count = 0  #: likewise

    def __post_init__(self) -> None:
        for filter_ in self.topics:
            check_bound(filter_)


def check_bound(filter_: str) -> None:
    """Raise `ValueError` if nothing can ever be published to what a filter matches."""
    try:
        check_filter(filter_)
    except TopicError as error:
        raise ValueError(f"topics: {filter_!r}: {error}") from error
    if filter_.startswith(_NOT_PUBLISHED):
        raise ValueError(f"topics: {filter_!r}: no message is published there; name the topics themselves")


class StreamsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Streams by name, and the bounds of the plugin."""

    stream: dict[Name, StreamOptions] = {}  #: `[plugins.streams.stream.NAME]`: one stream each
    max_streams: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: declared at a time, in whatever way
    max_waiting: Annotated[int, msgspec.Meta(ge=1)] = 10_000  #: messages that wait for the store, all streams together
    max_waiting_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024**2  #: bytes likewise
    cache_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 * 1024**2  #: of records in memory, shared by all readers
    progress_interval: Annotated[float, msgspec.Meta(gt=0)] = 1.0  #: seconds between two notes of a reader's progress
    #: clients whose progress in one stream is kept; of those beyond nothing is committed
    max_progress: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    trim_interval: Annotated[float, msgspec.Meta(gt=0)] = 10.0  #: seconds after which outdated records go at the latest
    trim_budget: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: records removed in one step
