"""Wake-ups inside one process, for the engines whose nodes are alone with their store.

A wake-up goes to all that listen for the node just then, and to none later: it only says that there is
something in the store to look at (`ports.Coordination.notify`).

Beside them the watchers of streams, for all engines (`ports.Streams.watch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from motorcade.storage.ports import Watcher

#: Wake-ups that wait for one slow listener; the rest is lost, which `notify` allows.
MAX_WAKE_UPS: Final = 1000

log = structlog.stdlib.get_logger("motorcade.storage")


class WakeUps:
    """The listeners of each node."""

    def __init__(self) -> None:
        self.lost = 0  #: that a slow listener did not get
        self._listeners: dict[str, list[asyncio.Queue[bytes]]] = {}

    def notify(self, node: str, data: bytes) -> None:
        for waiting in self._listeners.get(node, ()):
            if waiting.full():
                self.lost += 1
            else:
                waiting.put_nowait(data)

    @contextmanager
    def listener(self, node: str) -> Iterator[asyncio.Queue[bytes]]:
        """Hold a queue of what comes for a node from now on."""
        waiting: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAKE_UPS)
        listeners = self._listeners.setdefault(node, [])
        listeners.append(waiting)
        try:
            yield waiting
        finally:
            listeners.remove(waiting)
            if not listeners:
                self._listeners.pop(node, None)


class Watchers:
    """Those who hear of appends to streams."""

    def __init__(self) -> None:
        self._watchers: tuple[Watcher, ...] = ()

    def add(self, told: Watcher) -> Callable[[], None]:
        """Tell it of every append from now on, until the function that is returned is called."""
        self._watchers = (*self._watchers, told)

        def remove() -> None:
            self._watchers = tuple(each for each in self._watchers if each is not told)

        return remove

    def tell(self, stream: str, last: int) -> None:
        for told in self._watchers:
            try:
                told(stream, last)
            except Exception:
                # A fault of one watcher: the callers that wait for this group must hear of it.
                log.exception("stream_watcher_failed", stream=stream)
