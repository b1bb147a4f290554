"""The backlog in mailboxes, as rows; read once, as of now. For audits: what is still pending by the store itself.

Tasks share the cells of a Redis store; an embedded store is read by one task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from motorcade.pipelines.sources import columns
from motorcade.pipelines.sources.messages import Range, split
from motorcade.pipelines.sources.options import ReadOptions
from motorcade.pipelines.sources.store_cache import store_cache
from motorcade.storage.readers import StoreReader, open_reader

#: Cells that one task reads.
PARTS_PER_TASK: Final = 8


class MailboxReader:
    """Plans and reads."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = names

    def ranges(self) -> list[Range]:
        return split(0, self._reader().parts(), PARTS_PER_TASK)

    def read(self, part: Range) -> Iterator[pa.RecordBatch]:
        reader = self._reader()
        reader.refresh()
        for number in range(*part):
            for page in reader.waiting(self._options.name, number):
                if page.owners:
                    yield columns.waiting(self._names, page)

    def _reader(self) -> StoreReader:
        return store_cache.take(self._options.store, open_reader)
