"""The data that all sessions of a node share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from motorcade.broker.durable_queue import EntryDecoder
from motorcade.broker.limits import SessionOptions
from motorcade.broker.stats import Stats
from motorcade.extension.hooks import Hooks
from motorcade.extension.sources import Delayed, Sources
from motorcade.storage.ports import Bound

if TYPE_CHECKING:
    from motorcade.broker.session import Session


def _no_loop(*_: object) -> Delayed:
    raise RuntimeError("there is no event loop yet")


class SessionContext:
    """The data that all sessions of a node share: one object, so that a session needs one reference."""

    __slots__ = (
        "bounds",
        "clustered",
        "decoder",
        "dirty",
        "hooks",
        "kept",
        "later",
        "options",
        "queued",
        "queued_bytes",
        "soon",
        "sources",
        "stats",
    )

    def __init__(self, options: SessionOptions, hooks: Hooks, stats: Stats) -> None:
        self.options = options
        self.hooks = hooks
        self.stats = stats
        self.clustered = False  #: other members append to mailboxes too
        self.queued = 0  #: messages waiting in all queues
        self.queued_bytes = 0
        self.kept = 0  #: messages of this process in the mailboxes of all durable sessions, those in flight too
        self.decoder = EntryDecoder()  #: of entries in mailboxes
        self.bounds: dict[tuple[int, int], Bound] = {}  #: of mailboxes, see `DurableQueue.bound`
        self.dirty: list[Session] = []  #: windows with bytes in `out`, to be written at the end of this turn
        self.sources = Sources()  #: kinds of sources that plugins have registered
        #: Call back in the next turn of the event loop, and after some seconds; set by the broker.
        self.soon: Callable[[Callable[[], None]], object] = _no_loop
        self.later: Callable[[float, Callable[[], None]], Delayed] = _no_loop
