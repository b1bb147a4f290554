"""What is there after a process was killed in the middle of writing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from motorcade.storage.rocks import RocksStore
from tests.unit.storage import crash_child
from tests.unit.storage.crash_child import NOW, OWNERS

ROUNDS = 20


def killed_at_random(path: Path, first: int, draw: random.Random) -> set[int]:
    """The batches that a child acknowledged before it was killed."""
    command = [sys.executable, crash_child.__file__, str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        # So many lines, then at once: somewhere within a group, since eight batches are always in the air.
        lines = [child.stdout.readline() for _ in range(draw.randint(1, 120))]
        child.kill()
        lines += child.stdout.readlines()
    return {int(line) for line in lines if line.endswith("\n")}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_store_has_all_that_it_acknowledged_and_no_half_batches(tmp_path: Path) -> None:
    acknowledged: set[int] = set()
    draw = random.Random(11)
    for turn in range(ROUNDS):
        acknowledged |= killed_at_random(tmp_path / "store", turn * 1_000_000, draw)
        store = RocksStore(tmp_path / "store")
        await store.open()
        try:
            found = {int(key) async for key, _ in store.records.scan("batches", NOW)}
            assert not acknowledged - found
            size = len(found) + 1
            for owner in OWNERS:
                entries = await store.mailboxes.read(owner, 0, size, NOW)
                assert found == {int(entry.body) for entry in entries}
                assert all(entry.payload == entry.body + b" " + (entry.body + b" ") * 99 for entry in entries)
                assert len(entries) == (await store.mailboxes.info(owner)).entries
            assert found == {int(record.value) for record in await store.streams.read("log", 0, size)}
            assert [] == await store.check()
        finally:
            await store.close()
    assert len(acknowledged) >= ROUNDS
