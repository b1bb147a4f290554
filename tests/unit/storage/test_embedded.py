"""The directory of an embedded store, seen from outside."""

from __future__ import annotations

import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from motorcade.storage import embedded, tables
from motorcade.storage.files import Files, write_meta
from motorcade.storage.ports import Draft, StoreError, StoreFullError
from motorcade.storage.rocks import RocksStore

NOW = 2_000_000_000.0
#: A folder on another disk than that of the tests, where there is one.
SHARED_MEMORY = next(iter(Path("/dev").glob("shm")), None)


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    store = RocksStore(tmp_path / "store")
    await store.open()
    await store.mailboxes.append(["a", "b"], Draft(b"body", b"payload " * 100), NOW)
    await store.close()
    return tmp_path / "store"


async def test_a_copy_made_beside_the_store_gets_its_own_place(path: Path, tmp_path: Path) -> None:
    """On the disk of the store, and on another."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as other:
        for elsewhere in (tmp_path / "elsewhere", Path(other)):
            store = RocksStore(path)
            await store.open()
            await store.backup(path / "copy-1")
            to = elsewhere / "deep" / "copy"
            size_bytes = embedded.publish(path / "copy-1", to)
            await store.close()
            assert size_bytes == sum(file.stat().st_size for file in to.iterdir())
            assert [] == embedded.check(to)
            assert 2 == embedded.contents(to).entries
            assert not (path / "copy-1").exists()
            assert ["copy"] == [file.name for file in to.parent.iterdir()]


def test_without_room_nothing_is_left(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as the standard library has it
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(StoreFullError, match="a copy needs"):
        embedded.copy(path, tmp_path / "copies" / "one")
    assert [] == list((tmp_path / "copies").iterdir())


def test_a_copy_that_fails_leaves_nothing(path: Path, tmp_path: Path) -> None:
    def fail(done: int, whole: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(StoreError, match="could not be made: Input/output error"):
        embedded.copy(path, tmp_path / "copies" / "one", fail)
    assert [] == list((tmp_path / "copies").iterdir())


def test_other_formats_are_told_and_left_alone(path: Path) -> None:
    for step, words in ((1, "use a newer one"), (-1, "make a backup before")):
        files = Files(path)
        opened = files.open()
        write_meta(opened, tables.META_FORMAT, tables.FORMAT + step)
        del opened
        files.close()
        for look in (embedded.check, embedded.contents):
            with pytest.raises(StoreError, match=words):
                look(path)
        assert tables.FORMAT + step == embedded.format_of(path)


async def test_records_are_counted_while_somebody_writes(path: Path) -> None:
    store = RocksStore(path)
    await store.open()
    for number in range(20):
        await store.records.put("one" if number % 2 else "two", str(number), b"value")
    with pytest.raises(StoreError, match="there is no store"), embedded.claimed(path.parent / "nowhere"):
        pass
    assert {"one": 10, "two": 10} == embedded.records_beside(path)
    await store.close()
