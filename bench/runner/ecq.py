"""Compacted queues: durable appends by many producers, their delivery, and one key that is updated again and again.

    append    100 producers to 1000 queues, nobody consumes; from the first byte to the last PUBACK
    drain     then the owners of the queues come and get what is left: the last value of each key
    live      producers and owners at once, no key twice: from the first byte to the last delivery
    one-key   one key of one queue, updated 100 000 times, in ten steps: their rates, what is left, what is on disk

Beside it the bare engine (`../ecq/raw.py`), in interleaved rounds, which writes the same rows from one thread without a
network. The generator (`ecq` of mqttload.c) knows which messages must arrive: the last values, in order, and no other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from .brokers import Motorcade, MotorcadeStored, Running
from .machine import (
    BENCH,
    BenchError,
    alone,
    compile_generator,
    describe,
    exit_code,
    free_port,
    parse_cores,
    raise_open_files,
)
from .phases import converse
from .report import markdown_table

APPEND_BARS = {256: 20_000, 1024: 10_000}  #: durable appends a second, by size
DELIVERY_BAR = 20_000  #: deliveries a second
FLAT = 0.8  #: the last step of one key is at least this part of the median of all steps

ROUNDS = 3
QUEUES, PRODUCERS, WINDOW, KEYS = 1000, 100, 20, 1
MESSAGES, QUICK_MESSAGES = 400_000, 100_000
LIVE_PART = 4  #: of the messages of a round, in the live part
STEPS, UPDATES, QUICK_UPDATES = 10, 100_000, 20_000
BUSY = 0.95  #: a generator that was busier was the bottleneck itself
PATIENCE = 600.0
PARTS = ("append-256", "append-1024", "live-256", "one-key")


@dataclass(slots=True)
class Bench:
    """Runs everything, on these cores."""

    generator: Path
    store: str
    messages: int
    updates: int
    broker_core: int
    generator_core: int
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  #: by row
    raw: dict[int, list[dict[str, float]]] = field(default_factory=dict)  #: by size
    steps: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)  #: of one key

    def measure(self, rounds: int, chosen: Sequence[str]) -> None:
        """Rounds of all parts, interleaved: a bad minute of the machine is shared."""
        for _ in range(rounds):
            for size in APPEND_BARS:
                if f"append-{size}" in chosen:
                    self._stored(size)
                    self._bare(size)
            if "live-256" in chosen:
                self._live(256)
        if "one-key" in chosen:
            self._one_key()

    def _stored(self, size: int) -> None:
        with self._node() as node:
            words = (
                f"--n {QUEUES} --pubs {PRODUCERS} --per {KEYS} --msgs {self.messages} --window {WINDOW} --size {size}"
            )
            said = converse([*self._command(node), *words.split(), "--idle", "20"], PATIENCE)
        for phase in ("append", "drain"):
            self._note(f"{phase}-{size}", said[phase])

    def _live(self, size: int) -> None:
        messages = self.messages // LIVE_PART
        per = ceil(ceil(messages / PRODUCERS) / QUEUES)
        with self._node() as node:
            words = f"--n {QUEUES} --pubs {PRODUCERS} --per {per} --msgs {messages} --window {WINDOW} --size {size}"
            said = self._once([*self._command(node), *words.split(), "--mode", "live", "--idle", "20"])
        self._note(f"live-{size}", said)

    def _one_key(self) -> None:
        each = self.updates // STEPS
        words = f"--n 1 --pubs 1 --per 1 --msgs {each} --window 100 --size 256 --mode append --idle 20"
        with self._node() as node:
            for _ in range(STEPS):
                said = self._once([*self._command(node), *words.split()])
                self._check(said, "one-key")
                self.steps.append(said)
            disk = sum(path.stat().st_size for path in (node.folder / "data").rglob("*") if path.is_file())
            address = f"http://{node.control_address}/api/v1/compacted/exclusive/bench-q0"
            token = (node.folder / "data" / "token").read_text().strip()
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                self.left = json.load(answer) | {"disk": disk}
        print(f"one-key: {median(step['rate'] for step in self.steps):.0f}/s", file=sys.stderr, flush=True)

    def _bare(self, size: int) -> None:
        told = {"queues": QUEUES, "producers": PRODUCERS, "keys": KEYS, "messages": self.messages, "size": size}
        done = subprocess.run(
            [
                "taskset",
                "-c",
                str(self.broker_core),
                str(Motorcade.program.parent / "python"),
                BENCH / "ecq" / "raw.py",
            ],
            input=json.dumps(told | {"group": PRODUCERS * WINDOW}),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"bare engine: {done.stderr.strip()}")
        self.raw.setdefault(size, []).append(json.loads(done.stdout))

    def _once(self, command: Sequence[str]) -> dict[str, Any]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        if done.returncode or not done.stdout:
            raise BenchError(done.stderr.strip() or "the generator said nothing")
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    def _note(self, row: str, said: dict[str, Any]) -> None:
        self._check(said, row)
        self.rounds.setdefault(row, []).append(said)
        print(f"{row}: {said['rate']:.0f}/s", file=sys.stderr, flush=True)

    def _check(self, said: dict[str, Any], what: str) -> None:
        """Whatever is lost, wrong or out of order makes all figures worthless."""
        wrong = ("lost", "unexpected", "reordered", "timed_out", "conn_fail", "disconnects", "unacked")
        if any(said[name] for name in wrong):
            raise BenchError(f"{what}: {', '.join(f'{name} {said[name]}' for name in wrong if said[name])}")

    def _node(self) -> _Node:
        return _Node(MotorcadeStored("safe", self.store, ""), self.broker_core)

    def _command(self, node: Running) -> list[str]:
        head = ["taskset", "-c", str(self.generator_core), str(self.generator), "ecq", "127.0.0.1", str(node.port)]
        return [*head, "--broker-pid", str(node.pid), "--tag", "bench"]


class _Node:
    """A fresh node for one part."""

    def __init__(self, broker: MotorcadeStored, core: int) -> None:
        self._broker, self._core = broker, core

    def __enter__(self) -> Running:
        self._running = Running(self._broker, free_port(), self._core)
        return self._running

    def __exit__(self, *_: object) -> None:
        self._running.stop()


# -- the report


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def _bar(row: str, rates: Sequence[float]) -> str:
    kind, _, size = row.partition("-")
    bar = APPEND_BARS[int(size)] if kind == "append" else DELIVERY_BAR
    return f"≥ {_grouped(bar)}/s: {'met' if median(rates) >= bar else 'missed'}"


def _table(bench: Bench) -> list[str]:
    rows = []
    for row, runs in bench.rounds.items():
        kind, _, size = row.partition("-")
        rates = [said["rate"] for said in runs]
        bare = [one[kind] for one in bench.raw.get(int(size), ()) if kind in one]
        ratios = [own / other for own, other in zip(rates, bare, strict=False)]
        count = "acknowledged" if kind == "append" else "received"
        cost = median(said["broker_cpu_s"] / said[count] * 1e6 for said in runs)
        least = [one[f"{kind}_cpu_us"] for one in bench.raw.get(int(size), ()) if kind in one]
        rows.append(
            [
                row,
                f"{_grouped(median(rates))}/s",
                f"{_grouped(min(rates))} – {_grouped(max(rates))}",
                f"{cost:.1f} µs" + (f" / {median(least):.1f} µs" if least else ""),
                f"{_grouped(median(bare))}/s" if bare else "",
                f"{median(ratios):.2f}" if ratios else "",
                f"{median(said['gen_util'] for said in runs):.2f}",
                _bar(row, rates) + (" (the generator was busy)" if median(_loads(runs)) > BUSY else ""),
            ]
        )
    heads = ["row", "rate", "lowest – highest", "CPU each / bare", "bare engine", "ratio", "load gen", "bar"]
    return [*markdown_table(heads, rows), ""]


def _loads(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [said["gen_util"] for said in runs]


def _one_key_words(bench: Bench) -> list[str]:
    rates = [step["rate"] for step in bench.steps]
    last = rates[-1] / median(rates)
    words = f"One key updated {_grouped(bench.updates)} times: {_grouped(median(rates))}/s; the steps: "
    words += f"{', '.join(_grouped(rate) for rate in rates)}. The last one is {last:.2f} of the median "
    words += f"({'flat' if last >= FLAT else 'not flat'}). Left: {bench.left['messages']} message of "
    words += f"{bench.left['bytes']} bytes, number {_grouped(bench.left['last'])}; "
    return [f"{words}{bench.left['disk'] / 1e6:.1f} MB in the data directory.", ""]


def markdown(bench: Bench, notes: Sequence[str]) -> str:
    """The whole report."""
    lines = ["# Compacted queues", "", *(f"- {note}" for note in notes), ""]
    if bench.rounds:
        lines += _table(bench)
    if bench.steps:
        lines += _one_key_words(bench)
    return "\n".join(lines)


def met(bench: Bench) -> bool:
    """All that was measured."""
    bars = [_bar(row, [said["rate"] for said in runs]).endswith("met") for row, runs in bench.rounds.items()]
    if bench.steps:
        rates = [step["rate"] for step in bench.steps]
        bars += [rates[-1] >= FLAT * median(rates), bench.left["messages"] == 1]
    return all(bars)


# -- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/run ecq", description="Compacted queues: appends, deliveries, one key updated again and again."
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer messages")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of which the median counts ({ROUNDS})")
    parser.add_argument("--messages", type=int, metavar="N", help=f"appended in a round ({MESSAGES})")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts")
    parser.add_argument("--store", default="rocksdb://", metavar="URL", help="where the node stores (rocksdb://)")
    parser.add_argument("--cores", default="0,1", metavar="B,G", help="cores of broker and generator (0,1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every measured bar is met")
    return parser


def _measure(args: argparse.Namespace) -> int:
    broker_core, generator_core = parse_cores(args.cores)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    messages = args.messages or (QUICK_MESSAGES if args.quick else MESSAGES)
    raise_open_files()
    with alone():
        Motorcade().prepare(install=False)
        updates = QUICK_UPDATES if args.quick else UPDATES
        bench = Bench(compile_generator(), args.store, messages, updates, broker_core, generator_core)
        bench.measure(rounds, args.only or PARTS)
    notes = [
        f"motorcade: {Motorcade().version()}, store {args.store}, synced before each acknowledgement",
        f"{PRODUCERS} producers, {WINDOW} messages in flight each; {QUEUES} queues; {_grouped(messages)} messages",
        f"node on core {broker_core}, generator on core {generator_core}; median of {rounds} interleaved round(s)",
        f"machine: {describe()}",
    ]
    report = markdown(bench, notes)
    print(report)
    if args.out:
        args.out.write_text(report)
    if args.json:
        told = {
            "machine": describe(),
            "rows": bench.rounds,
            "bare": bench.raw,
            "steps": bench.steps,
            "left": bench.left,
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if args.strict and not met(bench) else 0


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code tells failures of the run, and with --strict of the bars."""
    args = _parser().parse_args(arguments)
    return exit_code("bench/run ecq", lambda: _measure(args))
