"""The embedded store through its ports, beside RocksDB driven directly with the same files, options and rows.

    accept        batches of 200 owners that share one 4 KiB payload (each payload used by five batches), 16 in flight
    accept-keyed  the same with a compaction key: what a fan-out does
    next-ack      read the next entry with its payload and acknowledge it, 64 clients at once

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

from rocksdict import WriteBatch

from motorcade.storage import tables
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

#: The bar of each row.
BARS = {"accept": 0.7, "accept-keyed": 0.7, "next-ack": 0.7}
BUCKETS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50, float("inf"))  # ms

NUMBER = struct.Struct(">Q")


@dataclass
class Row:
    name: str
    unit: str
    bare: list[float] = field(default_factory=list)
    ports: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(ours / raw for ours, raw in zip(self.ports, self.bare, strict=True))


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


def bare(path: Path, run: Callable[[Tables], float]) -> float:
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


def bare_accept(work: Work, keyed: bool, opened: Tables) -> float:
    """One row per owner, the payload once by its hash; keyed: also one row that leads from the key to the entry."""
    batches = list(work)
    db, entries, blobs, keys = opened.db, *(opened.handles[table] for table in ("entries", "blobs", "keys"))
    begun = time.perf_counter()
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
    return len(batches) / (time.perf_counter() - begun)


def bare_next_ack(work: Work, opened: Tables) -> float:
    """Seek, fetch the payload, delete; deletions in groups, unsynced."""
    bare_accept(work, False, opened)
    db, entries = opened.db, opened.handles["entries"]
    owners = sorted({owner for batch in work for owner in batch[0]})
    done = 0
    batch = WriteBatch(raw_mode=True)
    begun = time.perf_counter()
    for owner in owners:
        rows = opened.entries.iter()
        rows.seek(owner.encode() + b"\0")
        key, value = rows.key(), rows.value()
        assert opened.blobs.get(value[-32:]) is not None
        batch.delete(key, entries)
        done += 1
        if done % ACKS_PER_WRITE == 0:
            db.write(batch)
            batch = WriteBatch(raw_mode=True)
    db.write(batch)
    return done / (time.perf_counter() - begun)


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


async def accept(work: Work, keyed: bool, store: RocksStore, in_flight: int = IN_FLIGHT) -> float:
    batches = list(work)
    left = iter(batches)

    async def publisher() -> None:
        for owners, payload, key in left:
            await store.mailboxes.append(owners, Draft(BODY, payload, key if keyed else b""), 1e9)

    begun = time.perf_counter()
    await asyncio.gather(*(publisher() for _ in range(in_flight)))
    return len(batches) / (time.perf_counter() - begun)


async def next_ack(work: Work, store: RocksStore) -> float:
    await accept(work, False, store)
    owners = sorted({owner for batch in work for owner in batch[0]})
    left = iter(owners)

    async def client() -> None:
        for owner in left:
            (entry,) = await store.mailboxes.read(owner, 0, 1, 1e9)
            assert len(entry.payload) == PAYLOAD
            assert await store.mailboxes.acknowledge(owner, [entry.position]) == 1

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return len(owners) / (time.perf_counter() - begun)


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
    rows = {
        name: Row(name, unit)
        for name, unit in (("accept", "batches/s"), ("accept-keyed", "batches/s"), ("next-ack", "cycles/s"))
    }
    late: list[float] = []
    place = Path(tempfile.mkdtemp(prefix="motorcade-bench-", dir=arguments.dir))
    runs: dict[str, tuple[Callable[[Tables], float], Callable[[RocksStore], object]]] = {
        "accept": (lambda opened: bare_accept(work, False, opened), lambda store: accept(work, False, store)),
        "accept-keyed": (lambda opened: bare_accept(work, True, opened), lambda store: accept(work, True, store)),
        "next-ack": (lambda opened: bare_next_ack(work, opened), lambda store: next_ack(work, store)),
    }
    try:
        for turn in range(arguments.rounds):
            for name, (raw, ours) in runs.items():
                print(f"round {turn + 1}: {name}", file=sys.stderr)
                rows[name].bare.append(bare(place / "bare", raw))
                rows[name].ports.append(float(ported(place / "ports", durability, ours)))  # type: ignore[arg-type]
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
    missed = [name for name, row in rows.items() if row.ratio < BARS[name]]
    return 1 if arguments.strict and missed else 0


def _clean(place: Path) -> None:
    for part in ("bare", "ports"):
        shutil.rmtree(place / part, ignore_errors=True)


def report(rows: dict[str, Row], late: list[float], arguments: argparse.Namespace) -> str:
    lines = [
        f"Store beside its bare engine: {arguments.batches} batches of {OWNERS} owners out of {arguments.vehicles}, "
        + f"durability {arguments.durability}, {arguments.rounds} rounds, {os.cpu_count()} cores.",
        "",
        "| row | bare engine | through the ports | ratio (of each pair) | bar |",
        "|---|---|---|---|---|",
    ]
    for row in rows.values():
        raw, ours = statistics.median(row.bare), statistics.median(row.ports)
        pairs = ", ".join(f"{p / b:.2f}" for p, b in zip(row.ports, row.bare, strict=True))
        verdict = "met" if row.ratio >= BARS[row.name] else "missed"
        lines.append(
            f"| {row.name} | {raw:,.0f} {row.unit} | {ours:,.0f} | {row.ratio:.2f} ({pairs}) "
            f"| ≥ {BARS[row.name]} {verdict} |"
        )
    ordered = sorted(late)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    lines += [
        "",
        f"Event loop late while batches are accepted, {len(ordered)} ticks of 1 ms: "
        + f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {ordered[-1]:.2f} ms",
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
