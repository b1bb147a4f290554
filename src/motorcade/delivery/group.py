"""Write what is appended in one turn of the event loop as one batch.

The store gathers the batches of a turn as well, but each costs it a call, an answer and a commit: measured with RocksDB
15 µs of processor time for each message of a stream, against 9 µs here, where the messages of a turn share them.

Rule 1: groups are written in the order in which they were begun; several may be in flight.
Rule 2: a group is full with `MAX_ITEMS` items or `MAX_BYTES` bytes: the store's thread holds up other writes for as
        long as it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from motorcade.commit import Commit
from motorcade.storage.ports import Batch, Store, Written

MAX_ITEMS: Final = 256
MAX_BYTES: Final = 4 * 1024**2

T = TypeVar("T")


class Group(Commit[Written], Generic[T]):
    """Items that are written together; done when they are stored."""

    __slots__ = ("items", "size", "time")

    def __init__(self) -> None:
        super().__init__()
        self.items: list[T] = []
        self.size = 0
        self.time = 0.0  #: at which it is written


class GroupWriter(Generic[T]):
    """Write items in groups."""

    def __init__(
        self,
        store: Store,
        now: Callable[[], float],
        fill: Callable[[Batch, Group[T]], None],
        done: Callable[[Group[T]], None],
    ) -> None:
        """`fill` makes the batch of a group. `done` is called when it is written, before others who wait for it."""
        self._store = store
        self._now = now
        self._fill = fill
        self._done = done
        self._group: Group[T] | None = None  # of this turn

    def add(self, items: Sequence[T], size: int) -> Group[T]:
        """Write items, in one group, with the others of this turn; they are the last of the group now."""
        group = self._group
        if group is None or len(group.items) >= MAX_ITEMS or group.size >= MAX_BYTES:
            if group is not None:
                self._write(group)
            group = self._group = Group()
            asyncio.get_running_loop().call_soon(self._write, group)
        group.items += items
        group.size += size
        return group

    def flush(self) -> None:
        """Write now what was added in this turn: before what its caller writes next."""
        if self._group is not None:
            self._write(self._group)

    def _write(self, group: Group[T]) -> None:
        if self._group is not group:
            return  # written already, since it was full
        self._group = None
        batch = Batch()
        group.time = self._now()
        self._fill(batch, group)
        write = self._store.write(batch)
        write.then(partial(self._written, group, write))

    def _written(self, group: Group[T], write: Commit[Written]) -> None:
        group.result, group.error = write.result, write.error
        try:
            self._done(group)
        finally:  # whatever the feature does: publishers wait for it
            group.finish(write.error)
