"""Which receipts are in the stream, when the store could not say whether it has written them.

    commit ─▶ no answer ─▶ settle: a write behind it ─▶ read what lies at the end of the stream ─▶ those that are there

Rule 1: a write of unknown outcome may still be carried out while a later one of the same stream is not (`ports`, rule
        6). So something is written first that changes nothing; when that is done, the end of the stream is the truth.
Rule 2: everybody who is in doubt looks at the same records, which are read once. They are forgotten when nobody is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.storage.ports import Streams

STEP: Final = 1000  #: records read at once


class Doubt:
    """The end of the stream, as far as somebody needs to know it."""

    def __init__(self, streams: Streams, guid: slice) -> None:
        self._streams = streams
        self._guid = guid  # where it is in a value
        self._users = 0
        self._found: set[bytes] = set()  # guids
        self._after = -1  # what lies behind this offset is in `_found`
        self._upto = -1  # as far as it lies before this one
        self._reading = asyncio.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is read meanwhile is kept."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._found.clear()
                self._after = self._upto = -1

    async def find(self, values: Iterable[bytes], after: int) -> set[bytes]:
        """Those of these values that are in the stream; they can lie only behind an offset. `StoreError`."""
        async with self._reading:
            await self._streams.trim(RECEIPTS, budget=1)  # rule 1: removes nothing
            if self._after < 0 or after < self._after:
                self._found.clear()
                self._after = self._upto = after
            while page := await self._streams.read(RECEIPTS, self._upto, STEP):
                self._found.update(record.value[self._guid] for record in page)
                self._upto = page[-1].offset
            return {value for value in values if value[self._guid] in self._found}
