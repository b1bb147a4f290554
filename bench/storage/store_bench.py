"""The embedded store through its ports, beside RocksDB driven directly with the same files and options.

    accept        batches of 200 owners that share one 4 KiB payload (each payload used by five batches), 16 in flight
    accept-keyed  the same with a compaction key: what a fan-out does
    next-ack      read the next entry with its payload and acknowledge it, 64 clients at once; the bare engine does it
                  one after the other, and writes 64 acknowledgements at once, without a sync: as the store does
    next-ack-synced  the same, but the bare engine syncs after each 64, as any commit elsewhere would
    turn          200 messages of 164 bytes, each for one of 10 000 owners, in one batch: a busy turn of the broker
    fan           one message for 10 000 owners
    read          64 entries of an owner at once
    acks          200 acknowledgements of 200 owners in one batch

The bare engine writes what any layout needs: a row for each entry that leads to its payload (the digest cut to 20
bytes, 28 with the position), and the payload once; for single messages, the message in its row. It finds the next
entry with a seek, and fetches the payload. It keeps no sizes, counters, positions or answers.

Bare and ported runs alternate, so that a busy machine troubles both. A bar is held against the best of each side; the
ratio of each pair is shown too. While `accept` runs through the ports, a timer of 1 ms beside it shows how late the
event loop is.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rocksdict import WriteBatch

from motorcade.storage.files import Files, RocksTables
from motorcade.storage.ports import Batch, Bound, Draft, Durability
from motorcade.storage.rocks import RocksStore

OWNERS = 200
PAYLOAD = 4096
SHARED_BY = 5  # batches that carry the same payload
BODY = bytes(28)
IN_FLIGHT = 16
CLIENTS = 64
ACKS_PER_WRITE = 64
SESSIONS = 10_000
TURN = 200  # messages in one turn of the broker
TURNS = 100
FANS = 10
WINDOW = 64
SMALL_BODY, SMALL_PAYLOAD = bytes(100), bytes(64)

#: The bars, and the units of all rows.
BARS = {"accept": 0.7, "next-ack": 0.7}
UNITS = {
    "accept": "batches/s",
    "accept-keyed": "batches/s",
    "next-ack": "cycles/s",
    "next-ack-synced": "cycles/s",
    "turn": "messages/s",
    "fan": "messages/s",
    "read": "entries/s",
    "acks": "acknowledgements/s",
}
#: Upper ends in ms; those of the broker's own measure of its event loop, and two finer ones.
BUCKETS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, float("inf"))

NUMBER = struct.Struct(">Q")
BOUND = Bound(entries=1000)  # as a session has one


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
        """The best of each side: what other work on the machine took from a run tells nothing."""
        return max(sample.rate for sample in self.ports) / max(sample.rate for sample in self.bare)

    @property
    def cpu_ratio(self) -> float:
        """Work done with the same processor time, best of each side too."""
        return min(sample.cpu for sample in self.bare) / min(sample.cpu for sample in self.ports)


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


def bare(path: Path, run: Callable[[RocksTables], Sample]) -> Sample:
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


def bare_accept(work: Work, keyed: bool, opened: RocksTables) -> Sample:
    """One row per owner, the payload once by its hash; keyed: also a row that leads from the key to the entry."""
    batches = list(work)
    db, entries, blobs, keys = opened.db, *(opened.handles[table] for table in ("entries", "blobs", "keys"))
    watch = Stopwatch()
    for number, (owners, payload, key) in enumerate(batches, start=1):
        batch = WriteBatch(raw_mode=True)
        digest = hashlib.sha256(payload).digest()[:20]
        if opened.blobs.get(digest) is None:
            batch.put(digest, payload, blobs)
        place = NUMBER.pack(number)
        value = place + digest
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


def bare_next_ack(work: Work, synced: bool, opened: RocksTables) -> Sample:
    """Seek, fetch the payload, delete; deletions in groups."""
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
        assert opened.blobs.get(value[-20:]) is not None
        batch.delete(key, entries)
        done += 1
        if done % ACKS_PER_WRITE == 0:
            db.write(batch)
            if synced:
                db.flush_wal(True)
            batch = WriteBatch(raw_mode=True)
    db.write(batch)
    return watch.sample(done)


@cache
def sessions() -> list[str]:
    return [f"session:client-{number:06d}" for number in range(SESSIONS)]


def turns() -> list[list[str]]:
    draw, names = random.Random(3), sessions()
    return [draw.sample(names, TURN) for _ in range(TURNS)]


def bare_turn(opened: RocksTables) -> Sample:
    work, row = turns(), bytes(30) + SMALL_BODY + SMALL_PAYLOAD
    db, entries = opened.db, opened.handles["entries"]
    watch = Stopwatch()
    for number, owners in enumerate(work, start=1):
        batch, place = WriteBatch(raw_mode=True), NUMBER.pack(number)
        for owner in owners:
            batch.put(owner.encode() + b"\0" + place, row, entries)
        db.write(batch)
        db.flush_wal(True)
    return watch.sample(TURN * TURNS)


def bare_fan(opened: RocksTables) -> Sample:
    owners = sessions()
    db, entries, shared = opened.db, opened.handles["entries"], opened.handles["shared"]
    watch = Stopwatch()
    for number in range(1, FANS + 1):
        batch, place = WriteBatch(raw_mode=True), NUMBER.pack(number)
        batch.put(place, SMALL_BODY + SMALL_PAYLOAD, shared)
        for owner in owners:
            batch.put(owner.encode() + b"\0" + place, place, entries)
        db.write(batch)
        db.flush_wal(True)
    return watch.sample(SESSIONS * FANS)


def bare_read(opened: RocksTables) -> Sample:
    bare_window(opened)
    watch = Stopwatch()
    count = 0
    for owner in sessions()[:TURN]:
        rows = opened.entries.iter()
        rows.seek(owner.encode() + b"\0")
        for _ in range(WINDOW):
            assert len(rows.value()) > len(rows.key())
            count += 1
            rows.next()
    return watch.sample(count)


def bare_acks(opened: RocksTables) -> Sample:
    bare_window(opened)
    db, entries = opened.db, opened.handles["entries"]
    watch = Stopwatch()
    for number in range(WINDOW):
        batch, place = WriteBatch(raw_mode=True), NUMBER.pack(number)
        for owner in sessions()[:TURN]:
            batch.delete(owner.encode() + b"\0" + place, entries)
        db.write(batch)
    return watch.sample(TURN * WINDOW)


def bare_window(opened: RocksTables) -> None:
    """64 messages for each of some owners."""
    row = bytes(30) + SMALL_BODY + SMALL_PAYLOAD
    for number in range(WINDOW):
        batch = WriteBatch(raw_mode=True)
        for owner in sessions()[:TURN]:
            batch.put(owner.encode() + b"\0" + NUMBER.pack(number), row, opened.handles["entries"])
        opened.db.write(batch)


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


async def turn(store: RocksStore) -> Sample:
    work, draft = turns(), Draft(SMALL_BODY, SMALL_PAYLOAD)
    watch = Stopwatch()
    for owners in work:
        batch = Batch()
        for owner in owners:
            batch.append([owner], draft, 1e9, BOUND)
        await store.write(batch)
    return watch.sample(TURN * TURNS)


async def fan(store: RocksStore) -> Sample:
    owners, draft = sessions(), Draft(SMALL_BODY, SMALL_PAYLOAD)
    watch = Stopwatch()
    for _ in range(FANS):
        await store.mailboxes.append(owners, draft, 1e9, BOUND)
    return watch.sample(SESSIONS * FANS)


async def window(store: RocksStore) -> None:
    for _ in range(WINDOW):
        batch = Batch()
        for owner in sessions()[:TURN]:
            batch.append([owner], Draft(SMALL_BODY, SMALL_PAYLOAD), 1e9, BOUND)
        await store.write(batch)


async def read(store: RocksStore) -> Sample:
    await window(store)
    watch = Stopwatch()
    count = 0
    for owner in sessions()[:TURN]:
        count += len(await store.mailboxes.read(owner, 0, WINDOW, 1e9))
    return watch.sample(count)


async def acks(store: RocksStore) -> Sample:
    await window(store)
    for owner in sessions()[:TURN]:
        await store.mailboxes.read(owner, 0, WINDOW, 1e9)
    watch = Stopwatch()
    for number in range(1, WINDOW + 1):
        batch = Batch()
        for owner in sessions()[:TURN]:
            batch.acknowledge(owner, (number,))
        await store.write(batch)
    return watch.sample(TURN * WINDOW)


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
    runs: dict[str, tuple[Callable[[RocksTables], Sample], Callable[[RocksStore], object]]] = {
        "accept": (lambda opened: bare_accept(work, False, opened), lambda store: accept(work, False, store)),
        "accept-keyed": (lambda opened: bare_accept(work, True, opened), lambda store: accept(work, True, store)),
        "next-ack": (lambda opened: bare_next_ack(work, False, opened), lambda store: next_ack(work, store)),
        "next-ack-synced": (lambda opened: bare_next_ack(work, True, opened), lambda store: next_ack(work, store)),
        "turn": (bare_turn, turn),
        "fan": (bare_fan, fan),
        "read": (bare_read, read),
        "acks": (bare_acks, acks),
    }
    try:
        for turn_number in range(arguments.rounds):
            for name, (raw, ours) in runs.items():
                if arguments.only and name not in arguments.only:
                    continue
                print(f"round {turn_number + 1}: {name}", file=sys.stderr)
                rows[name].bare.append(bare(place / "bare", raw))
                rows[name].ports.append(ported(place / "ports", durability, ours))  # type: ignore[arg-type]
                _clean(place)
            if not arguments.only or "late" in arguments.only:
                print(f"round {turn_number + 1}: how late the event loop is", file=sys.stderr)
                found = ported(place / "ports", durability, lambda store: accept_with_timer(work, store))
                late += found  # type: ignore[operator]
                _clean(place)
    finally:
        shutil.rmtree(place)
    print(report(rows, late, arguments))
    if arguments.json:
        content = {"rows": [asdict(row) for row in rows.values()], "late_ms": late}
        arguments.json.write_text(json.dumps(content))
    missed = [name for name, bar in BARS.items() if rows[name].bare and rows[name].ratio < bar]
    return 1 if arguments.strict and missed else 0


def _clean(place: Path) -> None:
    for part in ("bare", "ports"):
        shutil.rmtree(place / part, ignore_errors=True)


def report(rows: dict[str, Row], late: list[float], arguments: argparse.Namespace) -> str:
    setting = f"{arguments.batches} batches of {OWNERS} owners out of {arguments.vehicles}, {arguments.rounds} rounds"
    lines = [
        f"Store beside its bare engine: {setting}, durability {arguments.durability}, {os.cpu_count()} cores.",
        "",
        "| row | bare engine, best | ports, best | ratio (of each pair) | CPU each, µs: bare, ports | ratio | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if not row.bare:
            continue
        raw, ours = (max(sample.rate for sample in side) for side in (row.bare, row.ports))
        raw_cpu, our_cpu = (min(sample.cpu for sample in side) for side in (row.bare, row.ports))
        pairs = ", ".join(f"{ratio:.2f}" for ratio in row.ratios)
        bar = BARS.get(name)
        verdict = "" if bar is None else f"≥ {bar} {'met' if row.ratio >= bar else 'missed'}"
        lines.append(
            f"| {name} | {raw:,.0f} {row.unit} | {ours:,.0f} | {row.ratio:.2f} ({pairs}) "
            f"| {raw_cpu:.2f}, {our_cpu:.2f} | {row.cpu_ratio:.2f} | {verdict} |"
        )
    return "\n".join(lines + (histogram(late) if late else []))


def histogram(late: list[float]) -> list[str]:
    ordered = sorted(late)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    lines = [
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
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/storage/run", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=2000, help="batches in each run (2000)")
    parser.add_argument("--vehicles", type=int, default=20_000, help="owners that the batches draw from (20000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the best counts (3)")
    parser.add_argument("--durability", choices=["fast", "safe"], default="safe")
    parser.add_argument("--dir", type=Path, help="where the files go (a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--only", nargs="*", help=f"some rows: {', '.join(UNITS)}, late")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every bar is met")
    return parser.parse_args()
