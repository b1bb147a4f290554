"""The files of an embedded store, read by another process while its node runs.

RocksDB calls it a secondary: it opens the same files, follows the node's log and never writes but for a log of its own,
in a folder of its own. The node does not notice; it need not even run.

    node ── writes ──▶ log, sorted files ◀── reads, catches up on request ── secondary

Rule 1: all files are held open from the time they are found, so that what the node removes stays readable.
Rule 2: rows are taken apart by the functions that the engine itself uses.
Rule 3: between finding a file and opening it the node may remove it. Then everything is opened again, a few times.
Rule 4: a node that starts begins a new list of files, and what a secondary remembers of the old log would stand before
        what the node has since written. So everything is opened again then, too.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from rocksdict import AccessType, BlockBasedOptions, Cache, Options, Rdict

from motorcade.storage import stream_rows, tables
from motorcade.storage.files import Files, RocksTables, scan
from motorcade.storage.ports import StoreError
from motorcade.storage.readers import MAX_ROWS, Extent, MailboxPage, StreamPage

#: Bytes. What is read in bulk is read once.
BLOCK_CACHE: Final = 16 * 2**20

#: How often files are opened again when the node removes them meanwhile.
OPEN_ATTEMPTS: Final = 5

#: Messages that entries have in common, kept at hand while mailboxes are read.
MAX_SHARED: Final = 10_000

#: The tables that are read; opening fewer takes less time.
READ: Final = ("streams", "rows", "entries", "shared", "records", "meta")

_PREFIX: Final = "motorcade-secondary-"

T = TypeVar("T")


class Secondary:
    """A `StoreReader` of a directory."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._files = Files(self._path, block_cache=BLOCK_CACHE)  # for its words about errors only
        self._cache = Cache(BLOCK_CACHE)
        self._manifest = b""  # the name of the list of files it was opened with
        self._opened: RocksTables | None = None
        if not (self._path / "CURRENT").exists():
            raise StoreError(
                f"there is no store at {self._path} on {socket.gethostname()}; a node keeps it in the folder `store` "
                "below its --data, and every machine that reads it must see that folder"
            )
        self._persist(self._open)

    # -- opening, catching up, closing

    def _open(self) -> None:
        self._release()
        self._manifest = self._read_manifest()
        families = {table: self._options() for table in READ}
        # The folder is for the engine's log alone, which is open by then: a killed process leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
            access = AccessType.secondary(folder)
            db = Rdict(str(self._path), self._options(), column_families=families, access_type=access)
        self._opened = RocksTables(db, families)
        self._check_format(self._opened)

    def _check_format(self, opened: RocksTables) -> None:
        stored = opened.meta.get(tables.META_FORMAT)
        version = tables.NUMBER.unpack(stored)[0] if stored is not None else 0
        if version == tables.FORMAT:
            return
        self._release()
        advice = "start a node of this version on it once" if version < tables.FORMAT else "use a newer one"
        raise StoreError(
            f"the store at {self._path} has format {version}, this version of Motorcade reads {tables.FORMAT}; {advice}"
        )

    def _options(self) -> Options:
        options = Options(raw_mode=True)
        options.set_max_open_files(-1)  # rule 1
        options.set_keep_log_file_num(1)
        blocks = BlockBasedOptions()
        blocks.set_block_cache(self._cache)
        blocks.set_cache_index_and_filter_blocks(True)
        options.set_block_based_table_factory(blocks)
        return options

    def refresh(self) -> None:
        self._persist(self._catch_up)

    def _catch_up(self) -> None:
        if self._opened is not None and self._manifest == self._read_manifest():
            self._opened.db.try_catch_up_with_primary()
            if self._manifest == self._read_manifest():
                return
        self._open()  # rule 4

    def _read_manifest(self) -> bytes:
        return (self._path / "CURRENT").read_bytes()

    def _persist(self, step: Callable[[], None]) -> None:
        """Try, and if that fails open everything again (rule 3)."""
        for attempt in range(OPEN_ATTEMPTS):
            try:
                (self._open if attempt else step)()
                return
            except StoreError:
                raise
            except Exception as error:
                if attempt == OPEN_ATTEMPTS - 1:
                    self._release()
                    raise self._files.explain(error) from error

    def _release(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            db = opened.release()
            del opened
            db.close()

    def close(self) -> None:
        self._release()

    def _look(self, look: Callable[[RocksTables], T]) -> T:
        if self._opened is None:
            raise StoreError(f"the reader of {self._path} is closed")
        try:
            return look(self._opened)
        except StoreError:
            raise
        except Exception as error:
            raise self._files.explain(error) from error

    # -- streams

    def streams(self) -> list[str]:
        return self._look(lambda opened: [key.decode() for key, _ in scan(opened.streams, b"", b"")])

    def extent(self, stream: str) -> Extent:
        head = self._look(lambda opened: stream_rows.head(stream, opened))
        return Extent(head.first if head.records else head.last + 1, head.last, head.records, head.size_bytes)

    def find(self, stream: str, time: float) -> int:
        return self._look(lambda opened: stream_rows.find(stream, time, opened))

    def pages(self, stream: str, after: int, last: int, rows: int = MAX_ROWS) -> Iterator[StreamPage]:
        while after < last:
            page = self._look(lambda opened: stream_rows.page(stream, after, last, rows, opened))  # noqa: B023
            if not page.offsets:
                return
            after = page.offsets[-1]
            yield page

    # -- records

    def record(self, collection: str, key: str) -> bytes | None:
        where = tables.name(collection) + b"\0" + tables.name(key)
        row = self._look(lambda opened: opened.records.get(where))
        return None if row is None else row[tables.EXPIRES.size :]

    # -- mailboxes

    def parts(self) -> int:
        return 1

    def waiting(self, prefix: str, part: int) -> Iterator[MailboxPage]:
        if part or self._opened is None:
            return
        start = prefix.encode()
        messages: dict[bytes, tables.EntryRow | None] = {}
        page = MailboxPage([], [], [], [], [], [])
        try:
            # An upper bound would have to follow all that begins with the prefix; looking is simpler.
            for key, row in scan(self._opened.entries, start, b""):
                if not key.startswith(start):
                    break
                _add_entry(page, key, row, messages, self._opened)
                if len(page.owners) >= MAX_ROWS:
                    yield page
                    page = MailboxPage([], [], [], [], [], [])
        except StoreError:
            raise
        except Exception as error:
            raise self._files.explain(error) from error
        if page.owners:
            yield page


def _add_entry(
    page: MailboxPage, key: bytes, row: bytes, messages: dict[bytes, tables.EntryRow | None], opened: RocksTables
) -> None:
    if len(row) <= tables.REFERENCE_SIZE:
        entry = _shared(row[:8], messages, opened)
        mark = row[tables.REFERENCE_MARK_AT]
    else:
        entry = tables.parse_entry(row)
        mark = entry.mark
    if entry is None:  # as in the engine's own reader: acknowledged between two looks
        return
    page.owners.append(key[:-9].decode())
    page.positions.append(tables.NUMBER.unpack(key[-8:])[0])
    page.stored.append(entry.stored_at)
    page.expires.append(tables.expiry(row))
    page.marks.append(mark)
    page.bodies.append(entry.body)


def _shared(
    number: bytes, messages: dict[bytes, tables.EntryRow | None], opened: RocksTables
) -> tables.EntryRow | None:
    if number not in messages:
        if len(messages) >= MAX_SHARED:
            messages.clear()
        row = opened.shared.get(number)
        messages[number] = tables.parse_entry(row) if row is not None else None
    return messages[number]
