"""Cache open stores between the tasks of one Spark worker process, and keep garbage collection cheap.

Spark keeps its Python processes and gives them one task after the other, each with a new source. Opening a store
takes a fifth of a second, so what is open stays open: by process, because an open store does not survive a fork.

After each task Spark collects garbage, and going over all that was imported takes 30 ms, as long as reading 50 000
rows. So that is set aside once.

Rule 1: one task at a time works in a process, so no task closes what another one uses.
"""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

#: Stores open at once; the one not used for the longest time goes.
MAX_OPEN: Final = 4


class Closing(Protocol):
    """A store or reader that can be cached."""

    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=Closing)


class StoreCache:
    """The open stores of this process."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, str, str], Closing] = OrderedDict()

    def take(self, url: str, opening: Callable[[str], Opened]) -> Opened:
        key = (os.getpid(), opening.__qualname__, url)
        found = self._open.pop(key, None)
        if found is None:
            found = opening(url)
            while len(self._open) >= MAX_OPEN:
                old, closing = self._open.popitem(last=False)
                if old[0] == key[0]:  # what came over by a fork is the parent's
                    closing.close()
        self._open[key] = found
        return found  # type: ignore[return-value]

    def close(self) -> None:
        while self._open:
            (pid, _, _), closing = self._open.popitem()
            if pid == os.getpid():
                closing.close()


#: The cache of this process: tasks know nothing of each other, so none could pass it on.
store_cache = StoreCache()


_settled = 0  #: pid of the process that is settled


def settle() -> None:
    """Take everything that is there out of garbage collection; in processes that work for Spark only."""
    global _settled  # noqa: PLW0603 - of the process, as what it does
    if _settled != os.getpid():
        gc.freeze()
        _settled = os.getpid()
