"""What is there after a process was killed in the middle of writing."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from motorcade.storage.ports import MailboxInfo
from motorcade.storage.rocks import RocksStore
from tests.unit.storage import crash_child
from tests.unit.storage.crash_child import DRAINED, NOW, OWNERS, forgotten, mark

ROUNDS = 8


@dataclass
class Acknowledged:
    """What children said was durable."""

    batches: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    position: int = 0  #: the highest given in the first mailbox of DRAINED

    def add(self, line: str) -> None:
        what, number = line.split()
        if what == "mark":
            self.marked.add(int(number))
        elif what == "forgotten":
            self.forgotten.add(int(number))
        else:
            self.batches.add(int(what))
            self.position = max(self.position, int(number))


def kill_at_random(path: Path, first: int, draw: random.Random, acknowledged: Acknowledged) -> None:
    command = [sys.executable, crash_child.__file__, str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        # So many lines, then at once: somewhere within a group, since eight batches are always in the air.
        lines = [child.stdout.readline() for _ in range(draw.randint(1, 360))]
        child.kill()
        lines += child.stdout.readlines()
    for line in lines:
        if line.endswith("\n"):
            acknowledged.add(line)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_store_has_all_that_it_acknowledged_and_no_half_batches(tmp_path: Path) -> None:
    acknowledged = Acknowledged()
    draw = random.Random(11)
    for turn in range(ROUNDS):
        kill_at_random(tmp_path / "store", turn * 1_000_000, draw, acknowledged)
        store = RocksStore(tmp_path / "store")
        await store.open()
        try:
            await check_contents(store, acknowledged)
            assert [] == await store.check()
        finally:
            await store.close()
    assert len(acknowledged.batches) >= ROUNDS
    assert acknowledged.marked
    assert acknowledged.forgotten


async def check_contents(store: RocksStore, acknowledged: Acknowledged) -> None:
    found = {int(key) async for key, _ in store.records.scan("batches", NOW)}
    assert not acknowledged.batches - found
    size = len(found) + 1
    for owner in OWNERS:
        entries = await store.mailboxes.read(owner, 0, size, NOW)
        assert found == {int(entry.body) for entry in entries}
        assert all(entry.payload == entry.body + b" " + (entry.body + b" ") * 99 for entry in entries)
        assert len(entries) == (await store.mailboxes.info(owner)).entries
    assert found == {int(record.value) for record in await store.streams.read("log", 0, size)}
    marks = {int(entry.body): entry.mark for entry in await store.mailboxes.read(OWNERS[0], 0, size, NOW)}
    assert {number: mark(number) for number in acknowledged.marked} == {
        number: marks[number] for number in acknowledged.marked
    }
    owners = {owner async for owner in store.mailboxes.owners()}
    assert not owners & {forgotten(number) for number in acknowledged.forgotten}
    for number in sorted(acknowledged.forgotten)[-20:]:
        assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info(forgotten(number))
    # Acknowledged entries may be back, but no position is given twice.
    assert acknowledged.position <= (await store.mailboxes.info(DRAINED[0])).last
