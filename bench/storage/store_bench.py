"""The embedded store through its ports, beside RocksDB driven directly with the same files, options and rows.

    accept        batches of 200 owners that share one 4 KiB payload (each payload used by five batches), 16 in flight
    accept-keyed  the same with a compaction key: what a fan-out does
    next-ack      read the next entry with its payload and acknowledge it, 64 clients at once; the bare engine does it
                  one after the other, with one unsynced write for each acknowledgement
    next-ack-grouped  the same, but the bare engine writes 64 acknowledgements at once

Bare and ported runs alternate, so that a busy machine troubles both; the ratio of each pair counts, then the median.
While `accept` runs through the ports, a timer of 1 ms beside it shows how late the event loop is.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from rocksdict import WriteBatch

from motorcade.storage.files import Files, Tables
from motorcade.storage.ports import Draft, Durability
from motorcade.storage.rocks import RocksStore

OWNERS = 200
PAYLOAD = 4096
SHARED_BY = 5  # batches that carry the same payload
BODY = bytes(28)
IN_FLIGHT = 16
CLIENTS = 64
ACKS_PER_WRITE = 64

#: The bars, and the units of all rows.
BARS = {"accept": 0.7, "next-ack": 0.7}
UNITS = {
    "accept": "batches/s",
    "accept-keyed": "batches/s",
    "next-ack": "cycles/s",
    "next-ack-grouped": "cycles/s",
}
BUCKETS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50, float("inf"))  # ms

NUMBER = struct.Struct(">Q")


class Sample(NamedTuple):
    rate: float  #: a second
    cpu: float  #: microseconds of all threads, each


class Stopwatch:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def sample(self, count: int) -> Sample:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Sample(count / wall, cpu / count * 1e6)


@dataclass
class Row:
    name: str
    unit: str
    bare: list[Sample] = field(default_factory=list)
    ports: list[Sample] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours.rate / raw.rate for ours, raw in zip(self.ports, self.bare, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """Work done with the same processor time; other work on the machine hardly changes it."""
        return statistics.median(raw.cpu / ours.cpu for ours, raw in zip(self.ports, self.bare, strict=True))


@dataclass
class Work:
    """What both sides do: the same vehicles, payloads and requests."""

    batches: int
    vehicles: int

    def __iter__(self) -> Iterator[tuple[list[str], bytes, bytes]]:
        draw = random.Random(7)
        names = [f"LMC{number:014d}" for number in range(self.vehicles)]
        payload = b""
        for number in range(self.batches):
            if number % SHARED_BY == 0:
                payload = draw.randbytes(PAYLOAD)
            yield draw.sample(names, OWNERS), payload, b"task_%d" % number


# -- the bare engine


def bare(path: Path, run: Callable[[Tables], Sample]) -> Sample:
    files = Files(path)
    files.open()
    try:
        with files.reading() as opened:
            try:
                return run(opened)
            finally:
                del opened
    finally:
        files.close()


def bare_accept(work: Work, keyed: bool, opened: Tables) -> Sample:
    """One row per owner, the payload once by its hash; keyed: also one row that leads from the key to the entry."""
    batches = list(work)
    db, entries, blobs, keys = opened.db, *(opened.handles[table] for table in ("entries", "blobs", "keys"))
    watch = Stopwatch()
    for number, (owners, payload, key) in enumerate(batches, start=1):
        batch = WriteBatch(raw_mode=True)
        digest = hashlib.sha256(payload).digest()
        if opened.blobs.get(digest) is None:
            batch.put(digest, payload, blobs)
        place = NUMBER.pack(number)
        value = place + BODY + digest
        for owner in owners:
            name = owner.encode() + b"\0"
            if keyed:
                where = name + key
                old = opened.keys.get(where)
                if old is not None:
                    batch.delete(name + old, entries)
                batch.put(where, place, keys)
            batch.put(name + place, value, entries)
        db.write(batch)
        if number % IN_FLIGHT == 0:
            db.flush_wal(True)
    db.flush_wal(True)
    return watch.sample(len(batches))


def bare_next_ack(work: Work, acks_per_write: int, opened: Tables) -> Sample:
    """Seek, fetch the payload, delete; deletions in groups, unsynced."""
    bare_accept(work, False, opened)
    db, entries = opened.db, opened.handles["entries"]
    owners = sorted({owner for batch in work for owner in batch[0]})
    done = 0
    batch = WriteBatch(raw_mode=True)
    watch = Stopwatch()
    for owner in owners:
        rows = opened.entries.iter()
        rows.seek(owner.encode() + b"\0")
        key, value = rows.key(), rows.value()
        assert opened.blobs.get(value[-32:]) is not None
        batch.delete(key, entries)
        done += 1
        if done % acks_per_write == 0:
            db.write(batch)
            batch = WriteBatch(raw_mode=True)
    db.write(batch)
    return watch.sample(done)


# -- through the ports


def ported(path: Path, durability: Durability, run: Callable[[RocksStore], object]) -> object:
    async def whole() -> object:
        store = RocksStore(path, durability)
        await store.open()
        try:
            return await run(store)  # type: ignore[misc]
        finally:
            await store.close()

    return asyncio.run(whole())


async def accept(work: Work, keyed: bool, store: RocksStore, in_flight: int = IN_FLIGHT) -> Sample:
    batches = list(work)
    left = iter(batches)

    async def publisher() -> None:
        for owners, payload, key in left:
            await store.mailboxes.append(owners, Draft(BODY, payload, key if keyed else b""), 1e9)

    watch = Stopwatch()
    await asyncio.gather(*(publisher() for _ in range(in_flight)))
    return watch.sample(len(batches))


async def next_ack(work: Work, store: RocksStore) -> Sample:
    await accept(work, False, store)
    owners = sorted({owner for batch in work for owner in batch[0]})
    left = iter(owners)

    async def client() -> None:
        for owner in left:
            (entry,) = await store.mailboxes.read(owner, 0, 1, 1e9)
            assert len(entry.payload) == PAYLOAD
            assert await store.mailboxes.acknowledge(owner, [entry.position]) == 1

    watch = Stopwatch()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return watch.sample(len(owners))


async def accept_with_timer(work: Work, store: RocksStore) -> list[float]:
    """How late a timer of 1 ms is, in ms, while batches are accepted."""
    late: list[float] = []
    loop = asyncio.get_running_loop()

    async def timer() -> None:
        while True:
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            late.append((loop.time() - due) * 1000)

    beside = asyncio.create_task(timer())
    await accept(work, False, store)
    beside.cancel()
    return late


# -- the run


def main() -> int:
    arguments = _arguments()
    work = Work(arguments.batches, arguments.vehicles)
    durability = Durability(arguments.durability)
    rows = {name: Row(name, unit) for name, unit in UNITS.items()}
    late: list[float] = []
    place = Path(tempfile.mkdtemp(prefix="motorcade-bench-", dir=arguments.dir))
    runs: dict[str, tuple[Callable[[Tables], Sample], Callable[[RocksStore], object]]] = {
        "accept": (lambda opened: bare_accept(work, False, opened), lambda store: accept(work, False, store)),
        "accept-keyed": (lambda opened: bare_accept(work, True, opened), lambda store: accept(work, True, store)),
        "next-ack": (lambda opened: bare_next_ack(work, 1, opened), lambda store: next_ack(work, store)),
        "next-ack-grouped": (
            lambda opened: bare_next_ack(work, ACKS_PER_WRITE, opened),
            lambda store: next_ack(work, store),
        ),
    }
    try:
        for turn in range(arguments.rounds):
            for name, (raw, ours) in runs.items():
                print(f"round {turn + 1}: {name}", file=sys.stderr)
                rows[name].bare.append(bare(place / "bare", raw))
                rows[name].ports.append(ported(place / "ports", durability, ours))  # type: ignore[arg-type]
                _clean(place)
            found = ported(place / "ports", durability, lambda store: accept_with_timer(work, store))
            late += found  # type: ignore[operator]
            _clean(place)
    finally:
        shutil.rmtree(place)
    print(report(rows, late, arguments))
    if arguments.json:
        content = {"rows": [asdict(row) for row in rows.values()], "late_ms": late}
        arguments.json.write_text(json.dumps(content))
    missed = [name for name, bar in BARS.items() if rows[name].ratio < bar]
    return 1 if arguments.strict and missed else 0


def _clean(place: Path) -> None:
    for part in ("bare", "ports"):
        shutil.rmtree(place / part, ignore_errors=True)


def report(rows: dict[str, Row], late: list[float], arguments: argparse.Namespace) -> str:
    setting = f"{arguments.batches} batches of {OWNERS} owners out of {arguments.vehicles}, {arguments.rounds} rounds"
    lines = [
        f"Store beside its bare engine: {setting}, durability {arguments.durability}, {os.cpu_count()} cores.",
        "",
        "| row | bare engine | through the ports | ratio (of each pair) | CPU each, bare and ports, µs | ratio | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        raw, ours = (statistics.median(sample.rate for sample in side) for side in (row.bare, row.ports))
        raw_cpu, our_cpu = (statistics.median(sample.cpu for sample in side) for side in (row.bare, row.ports))
        pairs = ", ".join(f"{ratio:.2f}" for ratio in row.ratios)
        bar = BARS.get(name)
        verdict = "" if bar is None else f"≥ {bar} {'met' if row.ratio >= bar else 'missed'}"
        lines.append(
            f"| {name} | {raw:,.0f} {row.unit} | {ours:,.0f} | {row.ratio:.2f} ({pairs}) "
            f"| {raw_cpu:.0f}, {our_cpu:.0f} | {row.cpu_ratio:.2f} | {verdict} |"
        )
    ordered = sorted(late)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    lines += [
        "",
        f"Event loop late while batches are accepted: p50 {p50:.2f}, p99 {p99:.2f}, max {ordered[-1]:.2f} ms.",
        "",
        "| late by less than, ms | ticks | share |",
        "|---|---|---|",
    ]
    low = float("-inf")
    for high in BUCKETS:
        count = sum(low <= tick < high for tick in ordered)
        lines.append(f"| {high:g} | {count} | {count / len(ordered):.1%} |")
        low = high
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/storage/run", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=2000, help="batches in each run (2000)")
    parser.add_argument("--vehicles", type=int, default=20_000, help="owners that the batches draw from (20000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (3)")
    parser.add_argument("--durability", choices=["fast", "safe"], default="safe")
    parser.add_argument("--dir", type=Path, help="where the files go (a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every bar is met")
    return parser.parse_args()
